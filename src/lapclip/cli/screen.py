"""What every command says, and how: sentences on stderr, results on stdout."""

import gc
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, TypeVar, cast

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lapclip.errors import printable
from lapclip.units import Progress, duration, size

if TYPE_CHECKING:
    from lapclip.view.document import Table


class Stderr:
    """stderr, where what can no longer be said is dropped: a closed terminal or a full disk ends no training."""

    @property
    def real(self) -> TextIO:
        """Without what rich puts in front of it while something moves on the screen."""
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self.real.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self.real.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


people = Console(file=cast(IO[str], Stderr()))
T = TypeVar("T")
OPENING = "opening the source"
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Without a terminal: before the first line on some work, and the next.
SECONDS_QUIET, SECONDS_BETWEEN = 5.0, 60.0


def complain(message: str, hint: str) -> None:
    for kind, colour, text in (("error", "red", message), ("hint", "cyan", hint)):
        people.print(f"[bold {colour}]{kind}[/]: ", end="")
        say(text)


def say(text: str, end: str = "\n") -> None:
    """One or more sentences that may name files, runs and what is in them."""
    people.print(printable(text), end=end, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on a terminal, nothing on a pipe; torch is imported without garbage collection, which takes 0.3 s."""
    if is_first := "torch" not in sys.modules:
        gc.disable()
    try:
        with people.status(what) if people.is_terminal else nullcontext():
            yield
    finally:
        if is_first:
            gc.freeze()  # else all that was imported is walked again, also at the end of the process: 0.3 s in all
            gc.enable()


def print_json(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")


def on_screen(table: "Table") -> RichTable:
    shown = RichTable(title=Text(table.caption), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name, is_number in zip(table.columns, table.is_number, strict=True):
        justify: Literal["left", "right"] = "right" if is_number else "left"
        shown.add_column(Text(name), justify=justify, no_wrap=is_number, overflow="fold")
    for row in table.cells:
        shown.add_row(*map(Text, row))
    return shown


def print_table(columns: str, rows: Sequence[Sequence[Any]], caption: str = "") -> None:
    """On stdout, within the width of a terminal; on a pipe nothing is wrapped. `columns` as `columns_of` reads them."""
    from lapclip.view.document import Table, columns_of

    table = Table(caption, columns_of(columns), rows)
    Console(width=None if sys.stdout.isatty() else 10_000, highlight=False).print(on_screen(table))


@contextmanager
def until_closed() -> Iterator[None]:
    """Writes to stdout until whoever reads it has enough, as `head` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def own_name() -> str:
    """What to type to get this command again, also where it is not on the path."""
    own = os.path.join(os.path.dirname(sys.executable), "lapclip")  # also for a run in the background
    return "lapclip" if shutil.which("lapclip") or not os.path.exists(own) else os.path.relpath(own)


@contextmanager
def stop_requests(answer: str) -> Iterator[list[int]]:
    """Collects Ctrl-C, SIGTERM and a closed terminal instead of dying of them, and answers.

    The second Ctrl-C is not waited for. Of the others any number may come: shells and `lapclip runs stop` repeat them.
    """
    requests: list[int] = []

    def request(number: int, frame: object) -> None:
        if requests and number == signal.SIGINT:
            raise KeyboardInterrupt
        requests.append(number)
        if len(requests) == 1:
            # Straight to the terminal: a handler may interrupt rich while it holds its locks.
            with suppress(OSError, ValueError):
                text = f"\n{answer}; press Ctrl-C again to stop immediately\n"
                os.write(sys.stderr.fileno(), text.encode())

    # Under `nohup` a closed terminal is to be ignored, and stays so.
    handled = [n for n in STOPS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, request) for number in handled}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # which were held back while we were started
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopped(KeyboardInterrupt):
    """Somebody asked to stop before there was anything to save; says what stopped, and what goes on."""

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.message, self.hint = message, hint


def follow(
    work: Generator[Progress | str, None, T],
    requests: Sequence[int] = (),
    what: str = "working",
    *,
    is_kept: bool = False,
) -> T:
    """Shows how far some work is, with a bar on a terminal; returns its result.

    A request to stop closes the work. `is_kept` says that the same command then goes on from where it was.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    text = TextColumn("{task.description}")
    spinner = (SpinnerColumn(), text)
    counted = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    stage, started, before = ("", False), time.monotonic(), 0
    say_at = started + SECONDS_QUIET
    with Bar(*spinner, console=people, transient=True, disable=not people.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        while True:
            try:
                now = next(work)
            except StopIteration as end:
                return end.value
            now = Progress(now) if isinstance(now, str) else now
            if requests:
                work.close()
                done = f"; {now.done:,} of {now.total:,} are done" if is_kept and now.total else ""
                again = "continues from there" if is_kept else "starts again"
                raise Stopped(f"stopped while {what}{done}", f"the same command {again}")
            if now.total and now.done == 0 and now.needed_bytes:
                say(f"{now.what}: {now.total:,}, {size(now.needed_bytes)} of disk space")
            if (now.what, now.total > 0) != stage:  # a bar of its own, with its own time left
                stage, started, before = (now.what, now.total > 0), time.monotonic(), now.done
                bar.columns = counted if now.total else spinner
                bar.reset(task, total=now.total or None)
            # An earlier attempt may have done some of it.
            num_done, seconds = now.done - before, time.monotonic() - started
            is_known = num_done > 0 or not now.total
            if not people.is_terminal and is_known and time.monotonic() > say_at:  # in a file, nothing moves
                left = (now.total - now.done) / max(num_done, 1) * seconds
                about = f": {now.done:,} of {now.total:,}, about {duration(left)} left"
                say(now.what + about * bool(now.total))
                say_at = time.monotonic() + SECONDS_BETWEEN
            rate = num_done / max(seconds, 1e-3)
            speed = f", {rate:,.0f}/s" if rate >= 1 and now.total else f": {now.done:,}" if now.done else ""
            bad = f", {now.num_unreadable:,} unreadable" if now.num_unreadable else ""
            bar.update(task, description=now.what + speed + bad, total=now.total or None, completed=now.done)
