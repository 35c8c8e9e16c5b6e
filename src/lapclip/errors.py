"""The one error that is shown to users, and untrusted text made safe to show."""

import difflib
import os
import re
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterable
from contextlib import suppress

# Controls a terminal, changes the direction of text, or is not a character; tabs and line breaks are kept.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


class UserError(Exception):
    """Something the user can fix: what was found, and exactly one thing to do about it."""

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.add_note(f"hint: {hint}")  # for those who call from Python


class NoCaptions(UserError):
    """A folder has images only."""


class MissingPackage(UserError):
    """An optional package is needed; `extra` is the group of lapclip's optional dependencies that installs it."""

    def __init__(self, message: str, extra: str):
        super().__init__(message, hint=install_command(extra))


def install_command(extra: str) -> str:
    """Adds a group of optional dependencies to this environment; a lapclip that is installed stays as it is."""
    own = os.path.join(os.path.dirname(sys.executable), "pip")
    is_found = shutil.which("pip") == own or not os.path.exists(own)
    program = "pip" if is_found else typed(min(own, os.path.relpath(own), key=len))
    return f"{program} install 'lapclip[{extra}]'"


def typed(word: object) -> str:
    """A path or name as one types it in a shell."""
    return shlex.quote(str(word))


def suggest(word: str, known: Iterable[str], cutoff: float = 0.6, within: str = "") -> str:
    """` Did you mean ...?` for a word that nearly is a known one, else nothing; `within` is the folder of names."""
    known = list(known)
    plain = [re.sub("[\u0300-\u036f]", "", unicodedata.normalize("NFD", one)) for one in (word, *known)]
    near = difflib.get_close_matches(plain[0], plain[1:], n=1, cutoff=cutoff)
    return f"; did you mean `{os.path.join(within, known[plain.index(near[0], 1) - 1])}`?" if near else ""


def suggest_path(path: str, *others: str, is_folder: bool = False) -> str:
    """The same for a path, of what lies in the same folder; only names are compared, as all share that folder."""
    folder, name = os.path.split(os.path.expanduser(path).rstrip(os.sep))
    with suppress(OSError), os.scandir(folder or ".") as entries:
        names = sorted(entry.name for entry in entries if not is_folder or entry.is_dir())
        return suggest(name, [*others, *names[:10_000]], 0.7, folder)
    return ""


def reason_for(error: Exception) -> str:
    """What went wrong, in the words of the system if it has some."""
    return getattr(error, "strerror", None) or str(error)


def printable(text: str) -> str:
    """Text that can only be read: names of files and words from them may hold anything."""
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text: object) -> str:
    """Untrusted text as one printable line."""
    return re.sub(r"[\t\n]", " ", UNPRINTABLE.sub(" ", str(text))).strip()


def code(text: object) -> str:
    """A name in backticks; its own backticks must not end them."""
    return f"`{one_line(text).replace('`', chr(39)) or ' '}`"


def shortened(text: str, most: int = 200) -> str:
    """Untrusted text made printable, on one line, and cut to a maximum length."""
    shown = re.sub(r"[\t\n]", "\N{REPLACEMENT CHARACTER}", printable(text[: most + 1]))
    return shown if len(text) <= most else shown[: most - 3].rstrip() + "..."


def shortened_path(path: str, most: int = 200) -> str:
    """As `shortened`, but cut in front: the name of the file says most."""
    return shortened(path if len(path) <= most else "..." + path[3 - most :], most)
