"""`lapclip watch`: the live view of a run on a terminal, until the run ends or somebody leaves. It only reads.

In 80x24 everything stands in one column; in a larger window the curves grow, and the machine stands beside them.
"""

import codecs
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lapclip.errors import one_line
from lapclip.runs.history import Summary
from lapclip.units import UNKNOWN, duration, percent, size
from lapclip.view.braille import ASCII, Point, bounds, columns, curve
from lapclip.view.lines import how_far, what_now
from lapclip.view.live import (
    Bar,
    cores_of,
    facts_of,
    figures_of,
    memory_of,
    parts_of,
    readings_of,
    references_of,
    time_left,
)

SECONDS_BETWEEN_READS = 2.0
SECONDS_BETWEEN_SIZES = 0.25  # a window of another size is drawn again after that
LEAVE, INTERRUPT, SUSPEND = b"qQ\x04", b"\x03", b"\x1a"
WIDE, TALL = 150, 30  # columns and rows from which the machine stands beside the curves
MAX_CURVE_ROWS = 24
MAX_POINTS = 600  # of a curve: each costs time that training could have
LABEL = 6  # columns for the ends of a scale
NEARLY_FULL = 0.9  # of the memory limit
STATE_STYLES = {"running": "green", "finished": "green", "paused": "yellow", "stopped": "yellow"}
FOOTER = "q leaves this view; training goes on"
Rows = list[list[Segment]]


def watch_here(summary: Summary) -> int:
    """Shows the run until it ends (0), `q` (0) or Ctrl-C (130); training never notices."""
    summary.read()
    console = make_console()
    if summary.is_over:
        draw_once(summary, console)
        return 0
    live = Live(View(summary), console=console, screen=True, auto_refresh=False)
    with keyboard(console) as wait_for_key, live:
        while not summary.is_over:
            key = wait_for_key(SECONDS_BETWEEN_READS)
            if key and key in LEAVE + INTERRUPT:
                return 130 if key == INTERRUPT else 0
            if key == SUSPEND:
                live.stop()
                os.kill(0, signal.SIGTSTP)
                live.start()
            summary.read()
            live.refresh()
    draw_once(summary, console)
    return 0


def draw_once(summary: Summary, console: Console | None = None) -> None:
    """The view as it is now, left in the scrollback."""
    (console or make_console()).print(View(summary, is_live=False), end="")


def make_console() -> Console:
    """A console on stdout; characters that its encoding lacks are replaced, and NO_COLOR omits every style."""
    codecs.register_error("closest", lambda error: (closest(error), getattr(error, "end", 0)))
    with suppress(AttributeError):  # not a file
        sys.stdout.reconfigure(errors="closest")  # type: ignore[union-attr]
    return Console(color_system=None if os.environ.get("NO_COLOR") else "auto", highlight=False)


def closest(error: UnicodeError) -> str:
    assert isinstance(error, UnicodeEncodeError)
    return error.object[error.start : error.end].translate(ASCII).encode("ascii", "replace").decode()


@contextmanager
def keyboard(console: Console) -> Iterator[Callable[[float], bytes]]:
    """Gives a function that waits for a key: b"" when the time is over or the window has another size."""
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(keys) if keys is not None else None

    def wait(seconds: float) -> bytes:
        if keys is not None:  # each time: a shell changes it while this process is suspended
            tty.setcbreak(keys, termios.TCSANOW)
            mode = termios.tcgetattr(keys)
            mode[3] &= ~termios.ISIG  # Ctrl-C and Ctrl-Z are keys, so that neither interrupts drawing
            termios.tcsetattr(keys, termios.TCSANOW, mode)
        size, end = console.size, time.monotonic() + seconds
        while time.monotonic() < end and console.size == size:
            if select.select([] if keys is None else [keys], [], [], SECONDS_BETWEEN_SIZES)[0]:
                return os.read(keys or 0, 1024)[:1] or b"q"
        return b""

    handlers = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield wait
    finally:
        if keys is not None and before is not None:
            with suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(keys, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


class View:
    """The whole view of a run, never larger than the window."""

    def __init__(self, summary: Summary, *, is_live: bool = True):
        self.summary, self.history, self.is_live = summary, summary.history, is_live

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.history, self.console = self.summary.history, console
        width = max(1, options.max_width - 2)  # one free column at each edge
        height = (options.height or console.height) - (0 if self.is_live else 1)
        has_footer = self.is_live and not self.summary.is_over
        footer = self.rows(line(Text(FOOTER, "dim")), width) if has_footer else []
        top = self.rows(self.header(), width) + self.wrapped(self.what_now(), width, 2)
        room = height - len(top) - len(footer)
        if self.history.step is None and self.history.evaluated is None:
            middle = self.warnings(width, room)
        else:
            is_wide = options.max_width >= WIDE and height >= TALL
            middle = (self.wide if is_wide else self.narrow)(width, room)
        rows = [*top, *middle][: max(0, height - len(footer))]
        if self.is_live:
            rows += [[]] * (height - len(footer) - len(rows))  # the footer stays in the last line
        for number, row in enumerate([*rows, *footer]):
            yield from [Segment("\n")] if number else ()
            yield from [Segment(" "), *row]
        if not self.is_live:
            yield Segment("\n")

    def rows(self, shown: RenderableType, width: int) -> Rows:
        return self.console.render_lines(
            shown, self.console.options.update(width=max(1, width), height=None), pad=False
        )

    def wrapped(self, text: Text, width: int, max_rows: int) -> Rows:
        """A sentence in at most so many rows; omitted text is marked."""
        lines = text.wrap(self.console, max(1, width))[:] if text else []
        if len(lines) > max_rows > 0:
            lines[max_rows - 1].append(" …")
            lines[max_rows - 1].truncate(width, overflow="ellipsis")
        return [row for line in lines[: max(0, max_rows)] for row in self.rows(line, width)]

    def narrow(self, width: int, room: int) -> Rows:
        """All in one column; what is left over goes to the curves, then to earlier warnings."""
        below = self.rows(
            Group(self.numbers(), self.parts(3), self.memory(3), self.cores(), self.sensors()), width
        )
        least = 2 * 3  # two curves above one another, each with a title
        said = self.warnings(width, max(3, min(room - len(below) - least, 5)))
        if room < len(below) + len(said) + least:
            below = self.rows(Group(self.numbers(), self.cores(), self.sensors()), width)
            said = self.warnings(width, 3)
        left = room - len(below) - len(said)
        curves = self.rows(self.curves(width, min(MAX_CURVE_ROWS, left // 2 - 1)), width)
        if left > len(curves) and self.history.warnings:
            said = self.warnings(width, left - len(curves) + len(said))
        return [*curves, *below, *said]

    def wide(self, width: int, room: int) -> Rows:
        """The curves on the left, the machine on the right, the warnings below."""
        right = min(76, width * 2 // 5)
        left = width - right - 3
        machine = [self.parts(1), "", self.memory(1), "", self.cores(6), self.sensors()]
        beside = Group(self.courses(right), "", *machine)
        needed = len(self.rows(beside, right))
        said = self.warnings(width, max(3, room - needed - 2))
        height = min(MAX_CURVE_ROWS, (room - len(said) - 2) // 2 - 3)
        both = grid([left, right], [[self.curves(left, height, has_steps=True), beside]])
        return [[], *self.rows(both, width), [], *said]

    def header(self) -> RenderableType:
        """The name and state of the run, how far it is, and what it is."""
        summary = self.summary
        style = STATE_STYLES.get(summary.state, "red")
        name = Text.assemble((one_line(summary.run.name), "bold"), "  ", (summary.state_words, style))
        first = spread(name, Text(facts_of(summary), "dim"), wide=1)
        second = spread(share_bar(summary.progress), f"{summary.progress:4.0%}{time_left(summary)}", wide=0)
        return Group(first, second, line(Text(how_far(summary), "dim")))

    def what_now(self) -> Text:
        note = what_now(self.summary)
        style = STATE_STYLES.get(self.summary.state, "red")
        return Text(f"{self.summary.state_words}: {note}" if note else "", style)

    def curves(self, width: int, height: int, *, has_steps: bool = False) -> RenderableType:
        """Loss, accuracy and recall, two beside two, each with its value now and what chance would give."""
        history, references = self.history, references_of(self.summary)
        steps = self.summary.some_steps(MAX_POINTS)
        found = [(e.step, e.recall["text_to_image"]) for e in history.evaluations]
        panels: list[tuple[str, list[Point], float | None]] = [
            ("loss", [(step.step, step.loss) for step in steps], None),
            ("in-batch accuracy", [(step.step, step.accuracy) for step in steps], references["accuracy"]),
            ("recall@1", [(step, recall["recall@1"]) for step, recall in found], references["recall_1"]),
            ("recall@10", [(step, recall["recall@10"]) for step, recall in found], references["recall_10"]),
        ]
        figures = {figure["name"]: figure for figure in figures_of(self.summary)}
        column = max(1, (width - 3) // 2)
        last = max((event.step for event in (history.step, history.evaluated) if event), default=1)
        cells = []
        for name, points, chance in panels:
            figure = figures.get(name, {"value": "not evaluated yet", "note": ""})
            note = f", {figure['note']}" if figure["note"] else ""
            cell = line(Text.assemble(f"{name} ", (figure["value"], "bold"), (note, "dim")))
            cell.truncate(column, overflow="ellipsis")
            form = "{:.2f}".format if name == "loss" else percent
            cell.append(drawn(points, chance, (column, height), last, form) if height > 0 else "")
            if has_steps:
                cell.append(f"\n{'':{LABEL}}step 0{last:>{max(1, column - LABEL - 6)},}\n", "dim")
            cells.append(cell)
        return grid([column, column], [cells[:2], cells[2:]])

    def measures(self) -> list[tuple[str, str, str]]:
        """Field, name and value of the other numbers of a step."""
        if (step := self.history.step) is None:
            return []
        recently, share = self.history.recently, self.summary.bench_share
        of_bench = f", {share:.0%} of bench" if share is not None else ""
        return [
            ("temperature", "tau", f"{step.temperature:.4f}"),
            ("lr", "lr", f"{step.lr:.2e}"),
            ("grad_norm", "gradient norm", f"{recently('grad_norm') or 0:.3g}"),
            ("pairs_per_second", "pairs/s", f"{recently('pairs_per_second') or 0:,.0f}{of_bench}"),
        ]

    def numbers(self) -> RenderableType:
        return line("  ".join(f"{name} {value}" for _, name, value in self.measures()))

    def courses(self, width: int) -> RenderableType:
        """The same, one a line, each with its curve."""
        steps, room, rows = self.summary.some_steps(MAX_POINTS // 3), max(1, width - 42), []
        for field, name, value in self.measures():
            points = [(float(step.step), getattr(step, field)) for step in steps]
            across, up = (0.0, points[-1][0]), bounds([y for _, y in points])
            dots = curve(points, room, 1, across=across, up=up)[0]
            rows.append([Text(name), Text(value, "bold"), Text(dots, "cyan")])
        return grid([14, 22, room], rows)

    def parts(self, num_columns: int) -> RenderableType:
        """Where a step's time goes, a bar for each part."""
        rows = [row for row in parts_of(self.history) if row["share"] is not None]
        if not rows:
            return Text("a step's time by part: not measured yet", "dim", no_wrap=True)
        total = duration(sum((self.history.parts or {}).values()))
        percents = [row | {"words": f"{row['share']:.0%}"} for row in rows]
        return Group(heading(f"where a step's {total} go"), bars(percents, num_columns))

    def memory(self, num_columns: int) -> RenderableType:
        """What holds the memory; the bar of the heading is the peak against the limit."""
        if (seen := self.history.inspected) is None:
            return Text("memory by kind: not measured yet", "dim", no_wrap=True)
        *kinds, _, peak = memory_of(self.history)
        share = peak["share"] or 0.0
        words = Text.assemble(("memory", "bold"), f" {size(seen.memory_used)}, peak {peak['words']}")
        full = share_bar(share, "yellow" if share > NEARLY_FULL else "cyan")
        return Group(spread(words, full, wide=1), bars(kinds, num_columns))

    def cores(self, max_rows: int = 0) -> RenderableType:
        """Each core's use: a bar each if they fit into so many rows, else a column each in one line."""
        rows = cores_of(self.history)
        if not rows:
            return line(Text.assemble(("cores ", "bold"), ("not measured", "dim")))
        if len(rows) <= 2 * max_rows:
            return Group(heading("cores"), bars(rows, 2))
        shares = [row["share"] or 0.0 for row in rows]
        mean = f"  {sum(shares) / len(shares):.0%} of {len(shares)} cores"
        return line(Text.assemble(("core use ", "bold"), (columns(shares), "cyan"), mean))

    def sensors(self) -> RenderableType:
        readings = readings_of(self.history)
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
    width, height = size
    if not points:
        return Text("\n" * height)
    values = [y for _, y in points]
    low, high = ends = bounds([*values, chance], lowest=0.0) if chance is not None else bounds(values)
    text = Text()
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


def bars(rows: Sequence[Bar], num_columns: int) -> Table:
    """Named bars with their values, in rows of so many."""
    table = Table.grid(expand=True, padding=(0, 1, 0, 0))
    for _ in range(num_columns):
        table.add_column(no_wrap=True, width=11)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True, justify="right", min_width=4, max_width=12)
    for start in range(0, len(rows), num_columns):
        cells: list[RenderableType] = []
        for row in rows[start : start + num_columns]:
            known = row["share"] is not None
            cells += [row["name"], share_bar(row["share"] or 0.0), row["words"] if known else UNKNOWN]
        table.add_row(*cells)
    return table


def grid(widths: Sequence[int], rows: Sequence[Sequence[RenderableType]], gap: int = 3) -> Table:
    table = Table.grid(padding=(0, gap, 0, 0))
    for width in widths:
        table.add_column(width=width, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
