"""A pseudo-terminal with a screen that can be read, for tests of what people see."""

import codecs
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from fcntl import ioctl

from conftest import command, environment

SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|\x1b(.)", re.DOTALL)


class Glass:
    """A terminal's two screens, for the few sequences the view uses; anything else is a mistake."""

    def __init__(self, columns: int, rows: int):
        self.columns, self.rows = columns, rows
        self.row = self.column = 0
        self.is_other = False
        self.cursors = {False: (0, 0), True: (0, 0)}
        self.lines: dict[bool, list[str]] = {False: [], True: []}

    @property
    def shown(self) -> list[str]:
        return self.lines[self.is_other]

    def take(self, text: str) -> None:
        place = 0
        for found in SEQUENCE.finditer(text):
            self.write(text[place : found.start()])
            place = found.end()
            self.obey(*found.groups())
        self.write(text[place:])

    def obey(self, private: str, numbers: str, letter: str, single: str | None) -> None:
        assert single is None, f"an unknown sequence {single!r}"
        if private:
            assert numbers in ("1049", "25", "2026"), numbers
            if numbers == "1049":  # each screen has its own cursor
                self.is_other = letter == "h"
                self.cursors[not self.is_other] = self.row, self.column
                self.row, self.column = self.cursors[self.is_other]
        elif letter == "H":
            self.row, self.column = (int(number) - 1 for number in (numbers or "1;1").split(";"))
            assert self.row < self.rows, "below the window"
        elif letter == "K":
            self.put(self.line()[: self.column])
        elif letter == "J":
            self.lines[self.is_other] = [] if numbers == "2" else self.shown[: self.row]
        else:
            assert letter == "m", f"an unknown sequence {letter}"

    def line(self) -> str:
        self.shown.extend([""] * (self.row + 1 - len(self.shown)))
        return self.shown[self.row]

    def put(self, line: str) -> None:
        self.line()
        self.shown[self.row] = line

    def write(self, text: str) -> None:
        for letter in text:
            if letter == "\r":
                self.column = 0
            elif letter == "\n":
                self.row, self.column = self.row + 1, 0
            else:
                assert letter.isprintable(), repr(letter)
                line = self.line().ljust(self.column)
                self.put(line[: self.column] + letter + line[self.column + 1 :])
                self.column += 1
                assert self.column <= self.columns or not self.is_other, f"too wide: {self.line()!r}"


class Terminal:
    """A command on a pseudo-terminal of a size, and what stands on its screen."""

    def __init__(self, *arguments: str, columns: int, rows: int, **more: str):
        self.ours, theirs = pty.openpty()
        self.theirs = theirs  # kept open, so that the last output can be read after the process has ended
        self.resize(columns, rows)
        dropped = ("COLUMNS", "LINES", "NO_COLOR")
        kept = {name: value for name, value in environment().items() if name not in dropped}
        self.process = subprocess.Popen(
            command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=kept | {"TERM": "xterm-256color"} | more,
        )  # fmt: skip
        self.raw = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.rest = ""  # of a sequence that has come half

    def resize(self, columns: int, rows: int) -> None:
        ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.glass = Glass(columns, rows)

    def read(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and select.select([self.ours], [], [], left)[0]:
            new = self.decoder.decode(os.read(self.ours, 65536))
            self.raw += new
            whole = re.fullmatch(r"(.*?)(\x1b(?:\[[?0-9;]*)?)?", self.rest + new, re.DOTALL)
            assert whole is not None
            self.rest = whole[2] or ""
            self.glass.take(whole[1])

    def wait_for(self, *words: str, seconds: float = 30) -> str:
        """The screen as soon as all of these stand on it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.read(0.3)
            text = "\n".join(self.glass.shown)
            if all(word in text for word in words):
                return text
        missing = [word for word in words if word not in "\n".join(self.glass.shown)]
        raise AssertionError(f"{missing} not on\n" + "\n".join(self.glass.shown))

    def press(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def code(self) -> int:
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.1)
        self.read(0.2)
        return self.process.wait(timeout=1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)
