"""What images are drawn on: matplotlib, loaded only when asked for, with one look whatever the person's own settings.

Everything is told apart by marks, hatching and words as well as by colour.
"""

import logging
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lapclip import errors
from lapclip.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH_INCHES, DOTS_PER_INCH = 10.0, 120  # 1200 pixels
MOST_CHARACTERS = 24  # of a name
INK, PALE, FAINT, PAPER = "#222222", "#767676", "#dddddd", "#ffffff"
STRONG, QUIET = "#0072b2", "#c8c8c8"
# Okabe and Ito's colours, which the colour-blind tell apart; the processor is always the first.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
MARKS = ("o", "s", "^", "D")
LOOK: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a device's name is a dollar
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text: it can be found, copied and read aloud
}


@contextmanager
def drawing() -> Iterator[None]:
    """Within it figures are made and saved: our look, none of the person's own, and no noise."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    # It would say that it makes its list of fonts, or that it may not keep it in the home folder.
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box is drawn instead
            try:
                import matplotlib
            except ImportError:
                raise UserError(
                    "images need matplotlib, which is not installed", hint="pip install 'lapclip[plot]'"
                ) from None
            with matplotlib.rc_context():
                matplotlib.rcdefaults()
                matplotlib.rcParams.update(LOOK)
                yield
    finally:
        logger.setLevel(level)


def new_figure(title: str, height_inches: float) -> "Figure":
    """An empty figure of our width; no screen and no global state is involved."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    figure.suptitle(wrapped(title, 90), x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def printable(text: str) -> str:
    """Text fit to be drawn, in one line."""
    return errors.printable(" ".join(text.split()))


def wrapped(text: str, width: int, most_lines: int = 2) -> str:
    """Text in a few lines of so many characters; what does not fit ends in dots."""
    return "\n".join(textwrap.wrap(printable(text), width, max_lines=most_lines, placeholder=" ..."))


def shortened(name: str) -> str:
    """A name that fits beside others."""
    name = printable(name)
    return name if len(name) <= MOST_CHARACTERS else name[: MOST_CHARACTERS - 3] + "..."


def duration(seconds: float) -> str:
    """A time in the unit that suits it, in two or three digits."""
    if seconds >= 2 * 86400:
        value, unit = seconds / 86400, "d"
    elif seconds >= 2 * 3600:
        value, unit = seconds / 3600, "h"
    elif seconds >= 120:
        value, unit = seconds / 60, "min"
    elif seconds >= 1:
        value, unit = seconds, "s"
    elif seconds >= 1e-3:
        value, unit = seconds * 1e3, "ms"
    else:
        value, unit = seconds * 1e6, "us"
    return f"{value:,.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"


def count(number: float) -> str:
    """A number as short as a label must be: `76.7M`."""
    for letter, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g}{letter}"
    return f"{number:.3g}"
