"""A report as Markdown: the same sentences and tables, and a curve as a row of small bars."""

import re
from collections.abc import Sequence

from lapclip.errors import one_line
from lapclip.view.charts import Chart, Line
from lapclip.view.found import Query
from lapclip.view.section import Section, Table
from lapclip.view.svg import in_words

BARS = "▁▂▃▄▅▆▇█"
NUM_BARS = 40


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    blocks = [f"# {inline(title)}"]
    for section in sections:
        blocks.append(f"## {inline(section.title)}")
        blocks += [inline(sentence) for sentence in section.words]
        if section.points:
            blocks.append("\n".join(f"- {inline(point)}" for point in section.points))
        if section.queries:
            blocks.append("\n".join(query_line(query) for query in section.queries))
        if section.charts:
            blocks.append("\n".join(chart_lines(chart) for chart in section.charts))
        blocks += [table_lines(table) for table in section.tables]
        if section.text:
            blocks.append(fenced(section.text))
    return "\n\n".join(blocks) + "\n"


def inline(text: str) -> str:
    """Text on one line in which nothing but code in backticks means anything."""
    parts = re.split(r"(`[^`]+`)", one_line(text))
    return "".join(
        part.replace("|", "\\|") if number % 2 else re.sub(r"([\\`*_\[\]<>|~#&$])", r"\\\1", part)
        for number, part in enumerate(parts)
    )


def table_lines(table: Table) -> str:
    marks = ["---:" if table.is_numbers(column) else "---" for column in range(len(table.header))]
    lines = [row_line(table.header), f"| {' | '.join(marks)} |", *(row_line(row) for row in table.rows)]
    note = f"\n\n{inline(table.note)}" if table.note else ""
    return f"**{inline(table.caption)}**\n\n" + "\n".join(lines) + note


def row_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(inline(cell) for cell in cells)} |"


def query_line(query: Query) -> str:
    rank = "not known" if query.rank is None else f"at place {query.rank}"
    return f"- {inline(query.text)}: its own image {rank}"


def chart_lines(chart: Chart) -> str:
    shown = [line for line in chart.lines if line.look in ("line", "dots")]
    bars = " ".join(f"`{sparkline(line)}`" for line in shown)
    return f"- {inline(chart.title)}: {bars} {inline(in_words(chart))}"


def sparkline(line: Line) -> str:
    """The line as bars from its lowest to its highest value, evenly spread over its axis."""
    left, right = line.points[0][0], line.points[-1][0]
    columns: list[list[float]] = [[] for _ in range(min(NUM_BARS, len(line.points)))]
    for x, y in line.points:
        place = (x - left) / (right - left) if right > left else 0.0
        columns[min(len(columns) - 1, int(place * len(columns)))].append(y)
    means = [sum(column) / len(column) if column else None for column in columns]
    known = [mean for mean in means if mean is not None]
    low, high = min(known), max(known)

    def bar(mean: float | None) -> str:
        if mean is None:
            return " "
        return BARS[min(7, int(8 * (mean - low) / (high - low)))] if high > low else BARS[3]

    return "".join(map(bar, means))


def fenced(text: str) -> str:
    """Text as it is, in a fence longer than any within it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    whole = text.encode("utf-8", "replace").decode("utf-8").strip()
    return f"{fence}toml\n{whole}\n{fence}"
