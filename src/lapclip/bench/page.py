"""Figures and tables into one file: a PNG, an SVG, or an HTML page that needs nothing beside itself. Knows no torch."""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lapclip.bench.paper import DOTS_PER_INCH, PAPER, drawing, printable
from lapclip.errors import UserError
from lapclip.machine.hardware import Machine, read_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".html")
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
body { max-width: 1200px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; line-height: 1.25; }
.wide { overflow-x: auto; margin: 1.5rem 0; }
.wide svg { display: block; width: 100%; min-width: 720px; height: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; padding-bottom: 0.4rem; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 1rem 0.3rem 0; border-bottom: 1px solid #ddd; }
"""


@dataclass(frozen=True)
class Table:
    """Rows as people read them."""

    caption: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def check_image(path: Path, num_figures: int = 1) -> None:
    """Refuses, before anything is measured, an image that could not be written afterwards."""
    if path.suffix.lower() not in ENDINGS:
        raise UserError(
            f"`{path}` does not end in {', '.join(f'`{ending}`' for ending in ENDINGS)}: these can be written",
            hint=f"name it `{path.with_suffix('.html') if path.name else 'bench.html'}`",
        )
    if path.suffix.lower() == ".svg" and num_figures > 1:
        raise UserError(
            f"`{path}` would need {num_figures} figures, and an SVG file holds one",
            hint=f"name it `{path.with_suffix('.html')}`: a page holds them all",
        )
    if path.is_dir():
        raise UserError(f"`{path}` is a folder", hint="name a file that is not there yet")
    if not path.parent.is_dir():
        raise UserError(
            f"there is no folder `{path.parent}` to write `{path.name}` to", hint="make the folder first"
        )
    if not os.access(path.parent, os.W_OK):
        raise cannot_write(path, "permission denied")
    with drawing():
        pass


def write_image(path: Path, figures: "list[Figure]", *, title: str, tables: list[Table]) -> None:
    """Writes the figures, and in a page the tables too, in the format of the path's ending; whole or not at all."""
    check_image(path, len(figures))
    with drawing():
        match path.suffix.lower():
            case ".png":
                content = stacked([drawn(figure) for figure in figures], title)
            case ".svg":
                content = as_svg(figures[0], title).encode()
            case _:
                content = as_page(title, figures, tables, read_machine()).encode()
    beside = path.with_name(f".{path.name}.writing")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise cannot_write(path, (error.strerror or str(error)).lower()) from None


def cannot_write(path: Path, why: str) -> UserError:
    return UserError(
        f"cannot write `{path}`: {why}",
        hint="name a file in a folder that has room and that you may write to",
    )


def drawn(figure: "Figure") -> Image.Image:
    file = BytesIO()
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH)
    return Image.open(file).convert("RGB")


def stacked(images: Sequence[Image.Image], title: str) -> bytes:
    """One PNG of images below one another, as wide as the widest."""
    sheet = Image.new("RGB", (max(p.width for p in images), sum(p.height for p in images)), PAPER)
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    about = PngInfo()
    about.add_itxt("Title", printable(title))
    file = BytesIO()
    sheet.save(file, format="PNG", pnginfo=about)
    return file.getvalue()


def as_svg(figure: "Figure", title: str) -> str:
    file = BytesIO()
    figure.savefig(file, format="svg", metadata={**NO_METADATA, "Title": printable(title)})
    return file.getvalue().decode()


def inline_svg(figure: "Figure", number: int) -> str:
    """A figure as it may stand inside a page: no prologue, no addresses, and ids that no other figure has."""
    svg = as_svg(figure, figure.get_suptitle())
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)

    # matplotlib escapes `<` and `>` in texts and attributes: what is between them is a tag.
    def own(tag: re.Match) -> str:
        text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", tag[0])
        return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>figure{number}-", text)

    return re.sub(r"<[^>]*>", own, svg)


def as_page(title: str, figures: "Sequence[Figure]", tables: Sequence[Table], machine: Machine) -> str:
    """One page of HTML: no script, and nothing that a browser would have to fetch."""
    shown = said(title)
    images = [
        f'<div class="wide">{inline_svg(figure, number)}</div>' for number, figure in enumerate(figures, 1)
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{shown}</title><style>{STYLE}</style></head>",
            f"<body><h1>{shown}</h1>",
            *images,
            *[as_html(table) for table in [*tables, facts(machine)]],
            "</body></html>\n",
        ]
    )


def as_html(table: Table) -> str:
    head = "".join(f'<th scope="col">{said(cell)}</th>' for cell in table.header)
    rows = "\n".join(f"<tr>{''.join(f'<td>{said(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    caption = f"<caption>{said(table.caption)}</caption>"
    return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'


def facts(machine: Machine) -> Table:
    rows: list[tuple[str, ...]] = [
        ("chip", machine.chip),
        ("cores used", str(machine.num_cores)),
        ("memory", f"{machine.memory_bytes / 1e9:.1f} GB, {machine.available_bytes / 1e9:.1f} GB of it free"),
        ("system", machine.system),
        ("Python", machine.python),
    ]
    return Table("The machine", ("fact", "value"), rows)


def said(text: str) -> str:
    return escape(printable(text))
