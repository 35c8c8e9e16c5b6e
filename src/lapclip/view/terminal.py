"""`lapclip watch`: the live view of a run on a terminal, plain lines on a pipe, until the run ends or somebody leaves.

It only reads the run's folder. What is drawn is compared with what stands there, and only lines that changed are sent.
"""

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from lapclip.runs.history import Summary
from lapclip.view.braille import ASCII
from lapclip.view.panels import view
from lapclip.view.panels_text import Line, paint

SECONDS_BETWEEN_LOOKS = 2.0
ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the other screen, so that the scrollback stays as it is; no cursor
LEAVE = "\x1b[?25h\x1b[?1049l"
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"  # shown at once by terminals that know it; others pass it over
LEAVING_KEYS = b"qQ\x04"  # and Ctrl-D
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def watch_here(watched: Summary) -> int:
    """Shows the run until it ends (0), until `q` (0) or until Ctrl-C (130); training never notices."""
    watched.read()
    if watched.is_over:
        draw_once(watched)
        return 0
    with listening() as wait, Screen() as screen:
        while not watched.is_over:
            screen.draw(view(watched, *terminal_size()))
            answer = wait(SECONDS_BETWEEN_LOOKS)
            if answer == signal.SIGTSTP:
                screen.leave()
                os.kill(os.getpid(), signal.SIGSTOP)
                screen.enter()
            elif answer == signal.SIGWINCH:
                screen.clear()
            elif answer is not None:
                return 130 if answer in INTERRUPTS else 0
            watched.read()
    draw_once(watched)
    return 0


def draw_once(watched: Summary) -> None:
    """The view as it is now, left in the scrollback."""
    width, height = terminal_size()
    lines = [painted(line) for line in view(watched, width, height - 1, is_live=False)]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def terminal_size() -> tuple[int, int]:
    """Columns and rows, now; 80x24 where nobody knows."""
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        columns, rows = 0, 0
    if columns < 1 and (asked := os.environ.get("COLUMNS", "")).isdecimal():
        columns = int(asked)
    return (
        columns or 80
    ) - 1, rows or 24  # the last column is left free: some terminals break the line there


def painted(line: Line) -> str:
    """The line as this output takes it: without colour if that was asked for, without what it cannot show."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    text = paint(line, colour=colour)
    return text if "utf" in (sys.stdout.encoding or "").lower() else as_ascii(text)


def as_ascii(text: str) -> str:
    return text.translate(ASCII).encode("ascii", "replace").decode()


class Screen:
    """The terminal's other screen, while the view is on it."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def __enter__(self) -> "Screen":
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal may be gone
            self.leave()

    def enter(self) -> None:
        self.shown = []
        send(ENTER)

    def leave(self) -> None:
        send(LEAVE)

    def clear(self) -> None:
        """For a window of another size, on which the terminal itself has moved the lines about."""
        self.shown = []
        send("\x1b[2J")

    def draw(self, lines: list[Line]) -> None:
        new = [painted(line) for line in lines]
        old = self.shown + [""] * (len(new) - len(self.shown))
        changed = [
            f"\x1b[{row};1H{text}\x1b[K"
            for row, (text, before) in enumerate(zip(new, old, strict=False), 1)
            if text != before
        ]
        if changed or len(old) > len(new):
            below = f"\x1b[{len(new) + 1};1H\x1b[J" if len(old) > len(new) else ""
            send(BEGIN + "".join(changed) + below + END)
        self.shown = new


def send(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def listening() -> Iterator[Callable[[float], int | None]]:
    """Gives a function that waits for a key or a signal: None when the time is over, 0 for `q`, else the signal."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signals = (*INTERRUPTS, signal.SIGWINCH, signal.SIGTSTP)
    handlers = {number: signal.signal(number, lambda *_: None) for number in signals}
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    settings = termios.tcgetattr(keys) if keys is not None else None

    def wait(seconds: float) -> int | None:
        sources = [reader]
        if keys is not None:
            tty.setcbreak(keys, termios.TCSANOW)  # each time: a shell sets its own while this one is stopped
            sources.append(keys)
        ready = select.select(sources, [], [], seconds)[0]
        if reader in ready:
            numbers = set(os.read(reader, 1024))
            return next((number for number in signals if number in numbers), None)
        if ready:
            typed = os.read(sources[1], 1024)
            return 0 if not typed or any(key in LEAVING_KEYS for key in typed) else None
        return None

    try:
        yield wait
    finally:
        if keys is not None and settings is not None:
            with suppress(termios.error):
                termios.tcsetattr(keys, termios.TCSADRAIN, settings)
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
