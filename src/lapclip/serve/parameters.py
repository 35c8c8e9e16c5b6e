"""What may stand after the `?`: each parameter once, as a line of a table; checked here, described by `openapi`."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

from lapclip.errors import suggest
from lapclip.serve.refusals import Refused

LONGEST_QUERY = 48 << 10  # bytes after the `?`
MOST_FIELDS = 1200
INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)
NUMBER = re.compile(r"-?\d{1,20}(\.\d{1,40})?([eE][+-]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name, what it means, what a value may be, and how often it may be given."""

    name: str
    help: str
    kind: Literal["string", "integer", "number"] = "string"
    low: float | None = None  # of a number; of a string, its length
    high: float | None = None
    most: int = 1
    is_needed: bool = False
    default: float | None = None
    pattern: str | None = None
    place: Literal["query", "path"] = "query"

    def schema(self) -> dict[str, Any]:
        """What JSON Schema calls it."""
        low, high = ("minLength", "maxLength") if self.kind == "string" else ("minimum", "maximum")
        told = {low: self.low, high: self.high, "pattern": self.pattern, "default": self.default}
        value = {"type": self.kind} | {name: limit for name, limit in told.items() if limit is not None}
        if self.most == 1:
            return value
        return {"type": "array", "items": value, "maxItems": self.most} | (
            {"minItems": 1} if self.is_needed else {}
        )

    def read(self, text: str) -> str | int | float:
        """The value that a text means; Refused when it means none."""
        if self.kind == "string":
            return self.checked_text(text)
        if not (INTEGER if self.kind == "integer" else NUMBER).fullmatch(text):
            wanted = "a whole number" if self.kind == "integer" else "a number"
            raise self.refused(f"{wanted} is wanted")
        value = int(text) if self.kind == "integer" else float(text)
        if not math.isfinite(value) or value < (self.low or 0) or value > (self.high or math.inf):
            raise self.refused(f"it lies outside {self.low:g} to {self.high:g}")
        return value

    def checked_text(self, text: str) -> str:
        if len(text) < (self.low or 0):
            raise self.refused("it is empty")
        if self.high is not None and len(text) > self.high:
            raise self.refused(f"it is longer than {self.high:,.0f} characters")
        if self.pattern and not re.search(self.pattern, text):
            raise self.refused("it has no `{}`, where the label goes")
        return text

    def refused(self, why: str) -> Refused:
        return Refused(400, f"`{self.name}` cannot be used: {why}", f"{self.name}: {self.help}")


def read_query(query: bytes, parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The values by name, lists for those that may be repeated; Refused names what is wrong."""
    if len(query) > LONGEST_QUERY:
        raise Refused(414, f"the address is longer than {LONGEST_QUERY >> 10} KB", "ask for less at a time")
    by_name = {parameter.name: parameter for parameter in parameters if parameter.place == "query"}
    values: dict[str, Any] = {name: [] for name, parameter in by_name.items() if parameter.most > 1}
    for name, text in read_fields(query):
        parameter = by_name.get(name)
        if parameter is None:
            known = ", ".join(f"`{known}`" for known in by_name) or "none"
            shown = name[:40]
            raise Refused(400, f"unknown parameter `{shown}`{suggest(shown, by_name)}", f"there is {known}")
        if parameter.most > 1:
            values[name].append(parameter.read(text))
            if len(values[name]) > parameter.most:
                raise parameter.refused(f"it is given more than {parameter.most:,} times")
        elif name in values:
            raise parameter.refused("it is given twice")
        else:
            values[name] = parameter.read(text)
    for parameter in by_name.values():
        if parameter.is_needed and not values.get(parameter.name):
            raise Refused(400, f"`{parameter.name}` is missing", f"{parameter.name}: {parameter.help}")
        if parameter.most == 1:
            values.setdefault(parameter.name, parameter.default)
    return values


def read_fields(query: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            query.decode("utf-8"),
            keep_blank_values=True,
            encoding="utf-8",
            errors="strict",
            max_num_fields=MOST_FIELDS,
        )
    except UnicodeDecodeError:
        raise Refused(400, "the address holds bytes that are no UTF-8", "encode words as UTF-8") from None
    except ValueError:
        raise Refused(400, f"more than {MOST_FIELDS:,} parameters", "ask for less at a time") from None
