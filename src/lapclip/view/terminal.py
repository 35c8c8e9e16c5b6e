"""`lapclip watch`: the live view of a run on a terminal, until the run ends or somebody leaves. It only reads.

Everything fits into 80x24; in a larger window the curves grow, and more warnings are shown.
"""

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lapclip.errors import one_line
from lapclip.runs.history import Summary
from lapclip.units import UNKNOWN, percent, size
from lapclip.view import live
from lapclip.view.braille import Point, bounds, columns, curve
from lapclip.view.charts import thin
from lapclip.view.lines import SECONDS_BETWEEN_READS, forgetting, how_far, what_now
from lapclip.view.live import Bar

SECONDS_BETWEEN_SIZES = 0.25  # a window of another size is drawn again after that
LEAVE = b"qQ\x04"  # Ctrl-D too
MAX_CURVE_ROWS = 24
LABEL = 6  # columns for the ends of a scale
NEARLY_FULL = 0.9  # of the memory limit
STATE_STYLES = {"running": "green", "finished": "green", "paused": "yellow", "stopped": "yellow"}
FOOTER = "q quits this view; training continues"
Rows = list[list[Segment]]


def watch_here(summary: Summary) -> int:
    """Shows the run until it ends (0), `q` (0), Ctrl-C or a closed terminal (130); training never notices."""
    summary.read()
    console = make_console()
    screen = Live(View(summary), console=console, screen=True, auto_refresh=False)
    with keys_one_by_one() as signals, nullcontext() if summary.is_over else screen:
        while not summary.is_over:
            before = console.size, summary.state_words
            key = wait_for_key(console, signals)
            if signals or (key and key in LEAVE):
                return 130 if signals else 0
            events, is_reset = summary.read()
            if events or is_reset or before != (console.size, summary.state_words):
                screen.refresh()
    draw_once(summary, console)
    return 0


def draw_once(summary: Summary, console: Console | None = None) -> None:
    """The view as it is now, left in the scrollback."""
    (console or make_console()).print(View(summary, is_live=False), end="")


def make_console() -> Console:
    """A console on stdout; characters that its encoding lacks are question marks, and NO_COLOR omits every style."""
    with suppress(AttributeError):  # not a file
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return Console(color_system=None if os.environ.get("NO_COLOR") else "auto", highlight=False)


@contextmanager
def keys_one_by_one() -> Iterator[list[int]]:
    """Keys come without Enter and are not echoed. Signals are collected, so that none interrupts drawing; Ctrl-Z
    does nothing, because the shell would go on in the view's screen.
    """
    signals: list[int] = []
    keys = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda *got: signals.append(got[0])) for number in ends}
    handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        if keys is not None:
            tty.setcbreak(sys.stdin)
        yield signals
    finally:
        if keys is not None:
            with suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, keys)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def wait_for_key(console: Console, signals: list[int]) -> bytes:
    """A key; b"" when it is time to read again, a signal came, or the window has another size."""
    size, end = console.size, time.monotonic() + SECONDS_BETWEEN_READS
    keys = [sys.stdin] if sys.stdin.isatty() else []
    while time.monotonic() < end and console.size == size and not signals:
        if select.select(keys, [], [], SECONDS_BETWEEN_SIZES)[0]:
            return os.read(sys.stdin.fileno(), 1024)[:1] or b"q"
    return b""


class View:
    """The whole view of a run, never larger than the window."""

    def __init__(self, summary: Summary, *, is_live: bool = True):
        self.summary, self.history, self.is_live = summary, summary.history, is_live

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.history, self.console = self.summary.history, console
        width = max(1, options.max_width - 2)  # one free column at each edge
        height = (options.height or console.height) - (0 if self.is_live else 1)
        footer = self.rows(line(Text(FOOTER, "dim")), width) if self.is_live else []
        top = self.header(width)
        room = height - len(top) - len(footer)
        has_curves = self.history.step is not None or self.history.evaluated is not None
        middle = self.middle(width, room) if has_curves else self.warnings(width, room)
        rows = [*top, *middle][: max(0, height - len(footer))]
        if self.is_live:
            rows += [[]] * (height - len(footer) - len(rows))  # the footer stays in the last line
        for number, row in enumerate([*rows, *footer]):
            yield from [Segment("\n")] if number else ()
            yield from [Segment(" "), *row]
        if not self.is_live:
            yield Segment("\n")

    def rows(self, shown: RenderableType, width: int) -> Rows:
        options = self.console.options.update(width=max(1, width), height=None)
        return self.console.render_lines(shown, options, pad=False)

    def wrapped(self, text: Text, width: int, max_rows: int) -> Rows:
        """A sentence in at most so many rows; omitted text is marked."""
        lines = text.wrap(self.console, max(1, width))[:]
        if len(lines) > max_rows > 0:
            lines[max_rows - 1].append(" …")
            lines[max_rows - 1].truncate(width, overflow="ellipsis")
        return [row for line in lines[: max(0, max_rows)] for row in self.rows(line, width)]

    def middle(self, width: int, room: int) -> Rows:
        """What is left over goes to the curves, then to earlier warnings; where little is, bars are omitted."""
        bars = (self.parts(), self.memory())
        below = self.rows(Group(self.numbers(), *bars, self.cores(), self.sensors()), width)
        least = 2 * 3  # two curves above one another, each with a title
        said = self.warnings(width, max(3, min(room - len(below) - least, 5)))
        if room < len(below) + len(said) + least:
            below = self.rows(Group(self.numbers(), self.cores(), self.sensors()), width)
            said = self.warnings(width, 3)
        left = room - len(below) - len(said)
        curves = self.rows(self.curves(width, min(MAX_CURVE_ROWS, left // 2 - 1)), width)
        if left > len(curves):
            said = self.warnings(width, left - len(curves) + len(said))
        return [*curves, *below, *said]

    def header(self, width: int) -> Rows:
        """The name and state of the run, what it is, how far it is, and what to know about it."""
        summary, style = self.summary, STATE_STYLES.get(self.summary.state, "red")
        name = Text.assemble((one_line(summary.run.name), "bold"), "  ", (summary.state_words, style))
        first = spread(name, Text(live.facts_of(summary), "dim"), wide=1)
        done = summary.history.progress
        second = spread(share_bar(done), f"{done:4.0%}{live.time_left(summary)}", wide=0)
        rows = self.rows(Group(first, second, line(Text(how_far(summary), "dim"))), width)
        note = what_now(summary)
        return rows + (self.wrapped(Text(f"{summary.state_words}: {note}", style), width, 2) if note else [])

    def curves(self, width: int, height: int) -> RenderableType:
        """Loss, accuracy and recall, two beside two, each with its value now and what chance would give."""
        history, references = self.history, live.references_of(self.summary)
        steps = thin(list(history.steps))
        found = [(e.step, e.recall["text_to_image"]) for e in history.evaluations]
        panels: list[tuple[str, list[Point], float | None]] = [
            ("loss", [(step.step, step.loss) for step in steps], None),
            ("in-batch accuracy", [(step.step, step.accuracy) for step in steps], references["accuracy"]),
            ("recall@1", [(step, recall["recall@1"]) for step, recall in found], references["recall_1"]),
            ("recall@10", [(step, recall["recall@10"]) for step, recall in found], references["recall_10"]),
        ]
        figures = {figure["name"]: figure for figure in live.figures_of(self.summary)}
        column = max(1, (width - 3) // 2)
        last = max(event.step for event in (history.step, history.evaluated) if event)
        table, cells = Table.grid(padding=(0, 3, 0, 0)), []
        for _ in range(2):
            table.add_column(width=column, no_wrap=True)
        for name, points, chance in panels:
            figure = figures.get(name, {"value": "not evaluated yet", "note": ""})
            note = f", {figure['note']}" if figure["note"] else ""
            cell = line(Text.assemble(f"{name} ", (figure["value"], "bold"), (note, "dim")))
            cell.truncate(column, overflow="ellipsis")
            form = "{:.2f}".format if name == "loss" else percent
            cells.append(cell.append(drawn(points, chance, (column, height), last, form)))
        table.add_row(*cells[:2])
        table.add_row(*cells[2:])
        return table

    def numbers(self) -> RenderableType:
        """The other numbers of a step, and what is forgotten."""
        said = map(line, forgetting(self.summary))
        if (step := self.history.step) is None:
            return Group(*said)
        recently, share = self.history.recently, self.summary.bench_share
        of_bench = f", {share:.0%} of bench" if share is not None else ""
        norm, speed = recently("grad_norm") or 0, recently("pairs_per_second") or 0
        numbers = f"tau {step.temperature:.4f}  lr {step.lr:.2e}  gradient norm {norm:.3g}"
        return Group(line(f"{numbers}  pairs/s {speed:,.0f}{of_bench}"), *said)

    def parts(self) -> RenderableType:
        """Where a step's time goes, a bar for each part."""
        if not (rows := live.parts_of(self.history)):
            return Text("time of a step: not measured yet", "dim", no_wrap=True)
        *parts, total = rows
        percents = [part | {"words": f"{part['share']:.0%}"} for part in parts]
        return Group(heading(f"time of a step: {total['words']}"), bars(percents))

    def memory(self) -> RenderableType:
        """What holds the memory; the bar of the heading is the peak against the limit."""
        if (seen := self.history.inspected) is None:
            return Text("memory by kind: not measured yet", "dim", no_wrap=True)
        *kinds, _, peak = live.memory_of(self.history)
        share = peak["share"] or 0.0
        words = Text.assemble(("memory", "bold"), f" {size(seen.memory_used)}, peak {peak['words']}")
        full = share_bar(share, "yellow" if share > NEARLY_FULL else "cyan")
        return Group(spread(words, full, wide=1), bars(kinds))

    def cores(self) -> RenderableType:
        """Each core's use as a column."""
        shares = [row["share"] or 0.0 for row in live.cores_of(self.history)]
        if not shares:
            return line(Text.assemble(("cores ", "bold"), ("not measured", "dim")))
        mean = f"  {sum(shares) / len(shares):.0%} of {len(shares)} cores"
        return line(Text.assemble(("core use ", "bold"), (columns(shares), "cyan"), mean))

    def sensors(self) -> RenderableType:
        readings = live.readings_of(self.history)
        known = [f"{name} {value}" for name, value in readings.items() if value is not None]
        missing = ", ".join(name for name, value in readings.items() if value is None)
        pieces = [f"not measured: {missing}", *known] if missing else known or ["not measured yet"]
        return line(Text.assemble(("machine ", "bold"), " · ".join(pieces)))

    def warnings(self, width: int, max_rows: int) -> Rows:
        """The last warnings, newest first, as many as fit."""
        if not self.history.warnings or max_rows < 3:
            return []
        rows = self.rows(heading(f"warnings, {len(self.history.warnings)} so far"), width)
        for warning in reversed(self.history.warnings):
            room = max_rows - len(rows)
            if room < 2:
                break
            message = Text(f"step {warning.step:,}: {one_line(warning.message)}", "yellow")
            rows += self.wrapped(message, width, room - 1)
            rows += self.wrapped(Text(f"  hint: {one_line(warning.hint)}"), width, max_rows - len(rows))
        return rows


def drawn(
    points: list[Point], chance: float | None, size: tuple[int, int], last: int, form: Callable[[float], str]
) -> Text:
    """A curve with the ends of its scale; chance is a dotted line."""
    text, (width, height) = Text(), size
    if not points or height < 1:
        return Text("\n" * height)
    values = [y for _, y in points]
    low, high = ends = bounds([*values, chance], lowest=0.0) if chance is not None else bounds(values)
    rows = curve(points, max(1, width - LABEL), height, across=(0.0, float(last)), up=ends, line=chance)
    for row, dots in enumerate(rows):
        end = form(high) if row == 0 else form(low) if row == height - 1 else ""
        text.append(f"\n{end:>{LABEL - 1}} ", "dim").append(dots, "cyan")
    return text


def line(text: Text | str) -> Text:
    """In one line, whatever does not fit omitted."""
    text = Text(text) if isinstance(text, str) else text
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def heading(title: str) -> Rule:
    return Rule(Text(title, "bold"), align="left", style="dim")


def share_bar(share: float, style: str = "cyan") -> ProgressBar:
    return ProgressBar(total=1.0, completed=share, style="dim", complete_style=style, finished_style=style)


def spread(left: RenderableType, right: RenderableType, *, wide: int) -> Table:
    """Two cells in one line; the first (0) or the second (1) takes the room that is left."""
    table = Table.grid(expand=True, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True, ratio=1 - wide or None)
    table.add_column(no_wrap=True, ratio=wide or None, justify="right")
    table.add_row(left, right)
    return table


def bars(rows: Sequence[Bar], num_columns: int = 3) -> Table:
    """Named bars with their values."""
    table = Table.grid(expand=True, padding=(0, 1, 0, 0))
    for _ in range(num_columns):
        table.add_column(no_wrap=True, width=11)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True, justify="right", min_width=4, max_width=12)
    for start in range(0, len(rows), num_columns):
        cells: list[RenderableType] = []
        for row in rows[start : start + num_columns]:
            words = UNKNOWN if row["share"] is None else row["words"]
            cells += [row["name"], share_bar(row["share"] or 0.0), words]
        table.add_row(*cells)
    return table
