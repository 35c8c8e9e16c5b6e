"""Numbers as people read them, and text made safe to show; what is not known is a dash."""

import math
import re

from lapclip import amounts
from lapclip.errors import UNPRINTABLE

UNKNOWN = "-"
NOT_MEASURED = "not measured"


def clean(text: object) -> str:
    """One line without controls, signs that turn the writing direction, or halves of characters."""
    return re.sub(r"[\t\n]", " ", UNPRINTABLE.sub(" ", str(text))).strip()


def code(text: object) -> str:
    """A name in backticks; its own backticks must not end them."""
    return f"`{clean(text).replace('`', chr(39)) or ' '}`"


def shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 3].rstrip() + "..."


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def share(value: float | None) -> str:
    """A share as a percentage, with as many digits as a small one needs."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:.1%}" if value == 0 or abs(value) >= 0.0005 else f"{100 * value:.1g}%"


def number(value: float | None, digits: int = 3) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2g}"
    return f"{value:,.{digits}f}" if abs(value) < 100 else f"{value:,.0f}"


def count(value: float | None) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Pairs a second; slow ones with a digit after the point."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def epochs(value: float) -> str:
    """Times over the data; a part of one to two digits."""
    return f"{value:.2g}" if value < 1 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1:
        return amounts.milliseconds(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def size(num_bytes: float | None) -> str:
    if num_bytes is None or not math.isfinite(num_bytes):
        return UNKNOWN
    return amounts.size(num_bytes)


def energy(joules: float | None) -> str:
    if joules is None or not math.isfinite(joules):
        return NOT_MEASURED
    return f"{joules:,.0f} J" if joules < 36_000 else f"{joules / 3600:,.1f} Wh"


def listed(things: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return things[0] if len(things) == 1 else f"{', '.join(things[:-1])} and {things[-1]}" if things else ""


def times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")
