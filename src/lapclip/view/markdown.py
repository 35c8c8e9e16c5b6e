"""A document as Markdown: the same sentences and tables, and a curve as a row of small bars."""

import re
from collections.abc import Sequence

from lapclip.errors import one_line
from lapclip.view.braille import bounds, columns, resample
from lapclip.view.document import Chart, Document, Line, Table

NUM_BARS = 40


def as_markdown(document: Document) -> str:
    blocks = [f"# {inline(document.title)}", *([inline(document.about)] if document.about else [])]
    tiles = (f"{what}: {value}" + f" ({beside})" * bool(beside) for what, value, beside in document.tiles)
    blocks += ["\n".join(f"- {inline(tile)}" for tile in tiles)] if document.tiles else []
    for section in document.sections:
        blocks.append(f"## {inline(section.title)}")
        blocks += [inline(sentence) for sentence in section.words]
        lists = (
            [inline(point) for point in section.points],
            [f"{inline(query.text)}: {inline(query.rank_words)}" for query in section.queries],
            [chart_line(chart) for chart in section.charts],
        )
        blocks += ["\n".join(f"- {line}" for line in lines) for lines in lists if lines]
        for table in section.tables:
            blocks += [f"**{inline(table.caption)}**"] if table.caption != section.title else []
            blocks += [table_lines(table), *([inline(table.note)] if table.note else [])]
        if section.text:
            blocks.append(fenced(section.text))
    blocks += [inline(document.footer)] if document.footer else []
    return "\n\n".join(blocks) + "\n"


def inline(text: str) -> str:
    """Text on one line in which nothing but code in backticks means anything."""
    parts = re.split(r"(`[^`]+`)", one_line(text))
    parts[::2] = [re.sub(r"([\\`*_\[\]<>|~#&$])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [part.replace("|", "\\|") for part in parts[1::2]]
    return "".join(parts)


def table_lines(table: Table) -> str:
    marks = ["---:" if is_number else "---" for is_number in table.is_number]
    lines = [row_line(list(table.columns)), f"| {' | '.join(marks)} |", *map(row_line, table.cells)]
    return "\n".join(lines)


def row_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(inline(cell) for cell in cells)} |"


def chart_line(chart: Chart) -> str:
    shown = [line for line in chart.lines if line.look in ("line", "dots")]
    bars = " ".join(f"`{sparkline(line)}`" for line in shown)
    return f"{inline(chart.title)}: {bars} {inline(chart.in_words)}"


def sparkline(line: Line) -> str:
    """The line as bars from its lowest to its highest value, evenly spread over its axis."""
    span = line.points[0][0], line.points[-1][0]
    values = [v for v in resample(line.points, min(NUM_BARS, len(line.points)), span) if v is not None]
    low, high = bounds(values)
    return columns([max(0.01, (value - low) / (high - low)) for value in values])


def fenced(text: str) -> str:
    """Text as it is, in a fence longer than any within it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    whole = text.encode("utf-8", "replace").decode("utf-8").strip()
    return f"{fence}toml\n{whole}\n{fence}"
