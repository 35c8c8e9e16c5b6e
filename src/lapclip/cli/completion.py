"""`lapclip --install-completion`: commands, flags and their values on Tab, in bash, zsh and fish."""

from pathlib import Path
from typing import Literal

from lapclip.cli.screen import say
from lapclip.errors import UserError, code, reason_for

Shell = Literal["bash", "zsh", "fish"]
STARTUP_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc"}  # fish needs none


def install_completion(*, shell: Shell | None = None) -> int:
    """Install completion of commands and flags for your shell.

    Args:
        shell: the shell; default: the one that runs this command
    """
    from lapclip.cli import app

    shell = shell or current_shell()
    try:
        path = app.install_completion(shell=shell)
        path.write_text(with_files(path.read_text("utf-8"), shell), "utf-8")
    except OSError as error:
        what = f"cannot install completion: {code(error.filename or Path.home())}: {reason_for(error)}"
        raise UserError(what, hint="make your home folder and its startup files writable") from None
    startup = STARTUP_FILES.get(shell)
    say(f"wrote {code(path)}" + (f"; `{startup}` loads it" if startup else "") + "; open a new terminal")
    if shell == "zsh" and not starts_completion(Path("~/.zshrc").expanduser()):
        say("zsh completes only if `~/.zshrc` also has this line: `autoload -Uz compinit && compinit`")
    return 0


def current_shell() -> Shell:
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    try:
        found = detect_shell()
        if found != "powershell":
            return found
        what = f"completion is not available for {code(found)}"
    except ShellDetectionError:
        what = "cannot tell which shell you use"
    raise UserError(what, hint="name one: `lapclip --install-completion --shell bash` (or zsh, fish)")


def with_files(script: str, shell: Shell) -> str:
    """Where the script knows no word, files are offered, as without it: a source is text, and most often a path."""
    if shell == "bash":
        return script.replace("\ncomplete -F ", "\ncomplete -o bashdefault -o default -F ")
    if shell == "zsh":
        # The file itself is the body of the function that zsh calls, so it must not define one of its own name.
        own = script.replace("_cyclopts_lapclip()", "_lapclip_words()")
        return own + '_lapclip_words "$@"\n(( compstate[nmatches] )) || _files\n'
    return script  # fish does so by itself


def starts_completion(startup: Path) -> bool:
    """Whether zsh completes at all: a new account of macOS does not."""
    text = startup.read_text("utf-8", errors="replace") if startup.exists() else ""
    return "compinit" in text or "oh-my-zsh" in text
