"""A document as one HTML file that needs nothing else and loads nothing.

uPlot draws the charts. The page's policy allows its own scripts by their hash and forbids every other, so that no
caption can become one; a page without charts has no script at all.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from lapclip.errors import one_line
from lapclip.files import HTML_SIGN, refuse_foreign, write_atomically
from lapclip.view.document import Document

PAGE = Path(__file__).parent.parent / "page"


def as_html(document: Document) -> str:
    charts = [chart for section in document.sections for chart in section.charts]
    scripts = [read("uPlot.iife.min.js"), read("report.js")] if charts else []
    data = json.dumps([chart.data() for chart in charts], separators=(",", ":"), allow_nan=False)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{fingerprint}'" for fingerprint in hashes)
    names = slugs([section.title for section in document.sections])
    blocks: Any = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(PAGE), autoescape=True, finalize=finalize, **blocks)
    environment.filters |= {"words": words, "image": as_data, "lines": as_lines}
    return environment.get_template("report.html").render(
        document=document,
        sections=list(zip(names, document.sections, strict=True)),
        sign=Markup(HTML_SIGN),  # noqa: S704  # a constant
        policy=f"script-src {allowed}; " if scripts else "",
        style=(read("uPlot.min.css") if charts else "") + read("look.css") + read("report.css"),
        scripts=scripts,
        data=data.replace("<", "\\u003c"),  # no text in it can end its element
    )


def finalize(value: object) -> object:
    """Every text of a page, on one line and printable, before it is escaped."""
    return one_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def words(text: str) -> Markup:
    """A sentence: escaped, with names in backticks set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(one_line(text)))))  # noqa: S704  # escaped


def as_data(content: bytes, media_type: str) -> Markup:
    return Markup(f"data:{media_type};base64,{base64.b64encode(content).decode()}")  # noqa: S704


def as_lines(text: str) -> Markup:
    lines = text.encode("utf-8", "replace").decode("utf-8").splitlines()
    return Markup("\n").join(escape(one_line(line)) for line in lines).strip()


def slugs(titles: Sequence[str]) -> list[str]:
    """What links call the sections, no two alike."""
    names: list[str] = []
    for title in titles:
        name = re.sub(r"[^a-z0-9]+", "-", one_line(title).lower()).strip("-") or "part"
        names.append(name if name not in names else f"{name}--{len(names)}")
    return names


def read(name: str) -> str:
    return (PAGE / name).read_text("utf-8")


def write_html(document: Document, path: Path) -> Path:
    """Writes the page; a file that lapclip did not write is left alone."""
    refuse_foreign(path)
    write_atomically(path, as_html(document))
    return path
