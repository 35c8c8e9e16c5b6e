"""A report as one HTML file that needs nothing beside itself and asks nobody for anything.

Words, tables and charts are plain HTML and SVG; a script draws the charts again to be looked into. The page forbids
every other script by name of its contents, so that no caption can become one.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from lapclip.errors import one_line
from lapclip.units import number
from lapclip.view.charts import Chart
from lapclip.view.found import Query
from lapclip.view.section import Section, Table
from lapclip.view.svg import draw, draw_heat, draw_key, in_words

PAGE = Path(__file__).parent.parent / "page"
SIGN = '<meta name="generator" content="lapclip report">'  # by which our own files are known


def as_page(
    title: str, about: str, tiles: Sequence[tuple[str, str, str]], sections: Sequence[Section]
) -> str:
    """The whole file; `tiles` are the few numbers that stand large: what, how much, beside what."""
    scripts = [read("uPlot.iife.min.js"), read("report.js")]
    charts = [chart for section in sections for chart in section.charts]
    allowed = " ".join(f"'{fingerprint(script)}'" for script in scripts) if charts else "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    style = (read("uPlot.min.css") if charts else "") + read("report.css")
    names = slugs([section.title for section in sections])
    links = "".join(
        f'<li><a href="#{name}">{said(section.title)}</a></li>'
        for name, section in zip(names[1:], sections[1:], strict=True)
    )
    ends = "".join(f"<script>{script}</script>" for script in scripts) if charts else ""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            f'<head><meta charset="utf-8">{SIGN}',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="color-scheme" content="light dark"><title>{said(title)}: lapclip</title>',
            f"<style>{style}</style></head>",
            '<body><a class="skip" href="#summary">To the summary</a>',
            f'<header><p class="kicker">lapclip report</p><h1>{said(title)}</h1>',
            f'<p class="about">{words(about)}</p></header>',
            "<main>",
            section_html(names[0], sections[0], tiles),
            f'<nav aria-label="Contents"><ul>{links}</ul></nav>',
            *(section_html(*named) for named in zip(names[1:], sections[1:], strict=True)),
            "</main>",
            "<footer><p>Written by lapclip from what the run wrote down while it trained. "
            "This page is one file and loads nothing.</p></footer>",
            f'<script type="application/json">{embedded(charts)}</script>{ends}',
            "</body></html>\n",
        ]
    )


def section_html(name: str, section: Section, tiles: Sequence[tuple[str, str, str]] = ()) -> str:
    inner = [f"<p>{words(sentence)}</p>" for sentence in section.words]
    if tiles:
        inner.append(f'<dl class="tiles">{"".join(tile_html(*tile) for tile in tiles)}</dl>')
    if section.points:
        inner.append(f"<ul>{''.join(f'<li>{words(point)}</li>' for point in section.points)}</ul>")
    if section.queries:
        inner.append("".join(query_html(query) for query in section.queries))
    if section.charts:
        inner.append(f'<div class="charts">{"".join(chart_html(chart) for chart in section.charts)}</div>')
    inner += [table_html(table, section.title) for table in section.tables]
    if section.gradients and (drawn := draw_heat(section.gradients)):
        norms = [n for row in section.gradients.norms for n in row if n]
        about = f"From {number(min(norms))} (faint) to {number(max(norms))} (strong), logarithmic."
        inner.append(
            '<figure class="map"><figcaption><strong>Every layer over the run</strong> '
            f"<span>{about}</span></figcaption>{drawn}</figure>"
        )
    if section.text:
        inner.append(
            f"<details><summary>The settings file, whole</summary><pre>{escape(as_it_is(section.text))}</pre></details>"
        )
    body = "\n".join(inner)
    title = f'<h2 id="{name}-title">{said(section.title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{title}\n{body}</section>'


def tile_html(what: str, value: str, beside: str) -> str:
    return f"<div><dt>{said(what)}</dt><dd>{said(value)}</dd><dd class='beside'>{said(beside)}</dd></div>"


def table_html(table: Table, title: str) -> str:
    is_number = [table.is_numbers(column) for column in range(len(table.header))]
    mark = [' class="n"' if n else "" for n in is_number]
    head = "".join(f'<th scope="col"{mark[n]}>{words(cell)}</th>' for n, cell in enumerate(table.header))
    rows = "\n".join(
        "<tr>"
        + f'<th scope="row"{mark[0]}>{words(row[0])}</th>'
        + "".join(f"<td{mark[n]}>{words(cell)}</td>" for n, cell in enumerate(row) if n)
        + "</tr>"
        for row in table.rows
    )
    hidden = ' class="hidden"' if table.caption == title else ""
    note = f'<p class="note">{words(table.note)}</p>' if table.note else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{said(table.caption)}"><table>'
        f"<caption{hidden}>{words(table.caption)}</caption><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody>"
        f"</table></div>{note}"
    )


def chart_html(chart: Chart) -> str:
    keys = "".join(f"<li>{draw_key(line)}{said(line.label)}</li>" for line in chart.lines)
    about = f"<span>{said(chart.about)}</span>" if chart.about else ""
    heard = said(f"{chart.title}: {in_words(chart)}")
    return (
        f'<figure class="chart"><figcaption><strong>{said(chart.title)}</strong> {about}</figcaption>'
        f'<div class="plot" role="img" aria-label="{heard}"></div>'
        f'<div class="still">{draw(chart)}<ul class="keys">{keys}</ul></div>'
        f'<p class="ends">{said(in_words(chart))}</p></figure>'
    )


def query_html(query: Query) -> str:
    images = []
    for found in query.found:
        data = base64.b64encode(found.content).decode()
        score = f"{found.score:.2f}" if found.score is not None else ""
        right, alt = (" class='right'", "the right image") if found.is_right else ("", "another image")
        label = "right" if found.is_right else ""
        images.append(
            f'<li{right}><img src="data:{found.kind};base64,{data}" alt="{alt}" width="96" height="96">'
            f"<span>{label} {score}</span></li>"
        )
    rank = "" if query.rank is None else f"its own image comes {ordinal(query.rank)}"
    return (
        f'<div class="query"><p><q>{said(query.text)}</q> <span class="rank">{rank}</span></p>'
        f"<ol>{''.join(images)}</ol></div>"
    )


def ordinal(number: int) -> str:
    names = {1: "first", 2: "second", 3: "third"}
    return names.get(number, f"at place {number:,}")


def embedded(charts: Sequence[Chart]) -> str:
    """The charts for the script; no text in them can end the element they stand in."""
    data = [
        {
            "lines": [
                {
                    "label": one_line(line.label),
                    "x": [short(x) for x, _ in line.points],
                    "y": [short(y) for _, y in line.points],
                    "colour": line.colour,
                    "dash": line.dash,
                    "look": line.look,
                    "hasDots": line.has_dots,
                }
                for line in chart.lines
            ],
            "isShare": chart.is_share,
            "fromZero": chart.from_zero,
            "isLog": chart.is_log,
            "axis": chart.axis,
            "span": [short(end) for end in chart.span],
            "bands": [[band.start, band.end, band.label] for band in chart.bands],
            "marks": [[mark.at, one_line(mark.label)] for mark in chart.marks],
        }
        for chart in charts
    ]
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def short(value: float) -> float:
    """With as many digits as an eye can tell apart on a chart."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def words(text: str) -> str:
    """A sentence: escaped, and names in backticks set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", said(text))


def said(text: object) -> str:
    return escape(one_line(text))


def as_it_is(text: str) -> str:
    lines = text.encode("utf-8", "replace").decode("utf-8").splitlines()
    return "\n".join(one_line(line) for line in lines).strip()


def slugs(titles: Sequence[str]) -> list[str]:
    """What links call the sections, no two alike."""
    names: list[str] = []
    for title in titles:
        name = re.sub(r"[^a-z0-9]+", "-", one_line(title).lower()).strip("-") or "part"
        names.append(name if name not in names else f"{name}--{len(names)}")
    return names


def fingerprint(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def read(name: str) -> str:
    return (PAGE / name).read_text("utf-8")
