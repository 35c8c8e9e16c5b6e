"""Makes images for the documents from a real run: the live page, the terminal, the report and the search page.

.venv/bin/python tools/screenshots.py           trains three minutes first
.venv/bin/python tools/screenshots.py runs/NAME shows a run that is there
"""

import contextlib
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.text import Text

from lapclip.data.open import open_synthetic

DOCS = Path(__file__).resolve().parent.parent / "docs"
LAPCLIP = [sys.executable, "-m", "lapclip"]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
WIDTH = 1280
COLUMNS, ROWS = 100, 30
NUM_DRAWINGS = 500
QUESTION = "two yellow birds by a pond in the morning"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = Path(sys.argv[1]).resolve() if sys.argv[1:] else train(Path(folder))
        # There its name is enough, so that no image shows a path of this machine.
        os.chdir(run.parent.parent)
        program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        browser = playwright.chromium.launch(
            executable_path=program, args=[*FLAGS, "--no-first-run", "--disable-sync"]
        )
        image_page(browser, run)
        image_report(browser, run, Path(folder) / "report.html")
        image_search(browser, run, Path(folder))
        browser.close()
        image_terminal(run)


def train(folder: Path) -> Path:
    subprocess.run([*LAPCLIP, "train", "--minutes", "3", "--run", "shapes"], cwd=folder, check=True)
    return folder / "runs" / "shapes"


def image_page(browser: Browser, run: Path) -> None:
    with serving("watch", run.name, "--web") as address:
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)
            page.goto(address)
            page.locator("#queries img").first.wait_for()
            page.wait_for_timeout(1000)  # images and curves
            page.screenshot(path=DOCS / f"watch-{scheme}.png", full_page=True)
            page.close()


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """The address of a page, while its server runs."""
    server = subprocess.Popen(
        [*LAPCLIP, *arguments, "--no-open", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        said = iter(server.stderr.readline, "")
        yield next(found[0] for line in said if (found := re.search(r"http://\S+/", line)))
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate()


def image_search(browser: Browser, run: Path, folder: Path) -> None:
    """The search page over drawings of our own, which anybody may show."""
    os.environ["LAPCLIP_CACHE"] = str(folder / "cache")
    drawings = folder / "drawings"
    drawings.mkdir()
    source = open_synthetic("synthetic")[0]
    for number in range(NUM_DRAWINGS):
        source.image(number, 320).save(drawings / f"{number:03}.png")
    subprocess.run([*LAPCLIP, "index", str(drawings), "--model", run.name], check=True)
    with serving("serve") as address:
        page = browser.new_page(viewport={"width": WIDTH, "height": 760}, color_scheme="light")
        page.goto(address)
        page.keyboard.press("/")
        page.keyboard.type(QUESTION)
        page.wait_for_timeout(3000)  # the answer and its images
        page.screenshot(path=DOCS / "search-light.png")
        page.close()


def image_report(browser: Browser, run: Path, file: Path) -> None:
    subprocess.run(
        [*LAPCLIP, "report", run.name, "--output", str(file)], check=True, stdout=subprocess.DEVNULL
    )
    page = browser.new_page(viewport={"width": WIDTH, "height": 1600}, color_scheme="light")
    page.goto(file.as_uri())
    page.wait_for_timeout(1000)
    page.screenshot(path=DOCS / "report.png")
    page.close()


def image_terminal(run: Path) -> None:
    """What `lapclip watch --once` prints on a terminal of this size, in its colours."""
    shown = on_a_terminal([*LAPCLIP, "watch", run.name, "--once"])
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(shown), end="")
        drawn = console.export_svg(title="lapclip watch")
    # Without rich's web fonts: the documentation loads nothing from other hosts.
    own = re.sub(r" *@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL)
    (DOCS / "watch-terminal.svg").write_text(own, "utf-8")


def on_a_terminal(command: list[str]) -> str:
    """All that a command writes when it believes that somebody looks: on a pipe there are no colours."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (ROWS, COLUMNS))
    usual = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")
    }
    process = subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, env=usual | {"TERM": "xterm-256color"}
    )
    os.close(its)
    written = b""
    with contextlib.suppress(OSError):  # so a terminal ends on Linux, when nobody writes to it any more
        while more := os.read(ours, 65536):
            written += more
    os.close(ours)
    if process.wait():
        raise SystemExit(written.decode())
    return written.decode().replace("\r\n", "\n")


if __name__ == "__main__":
    main()
