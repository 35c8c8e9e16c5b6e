"""What is asked: words and images, each added or taken away; text in, terms out, and terms' rows as one."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lapclip.errors import UserError

# A sign between spaces; the hyphen of `red-haired` and the signs of `C++` belong to their words.
SIGN = re.compile(r"(?:^|(?<=\s))([+-])(?=\s|$)")


@dataclass(frozen=True)
class Term:
    """One thing that is wanted (+1) or not (-1): words, the bytes of an image, or an image of the index."""

    sign: int
    words: str = ""
    picture: bytes = b""
    entry: int = 0


def parse_words(text: str) -> list[Term]:
    """The terms of `beach - people + sunset`; a sign with nothing after it is not finished yet, and left out."""
    first, *rest = SIGN.split(text)
    pieces = [("+", first), *zip(rest[::2], rest[1::2], strict=True)]
    return [
        Term(1 if sign == "+" else -1, words=" ".join(words.split()))
        for sign, words in pieces
        if words.strip()
    ]


def in_words(terms: Iterable[Term], likes: Iterable[str] = (), unlikes: Iterable[str] = ()) -> str:
    """What was asked, as a person would say it: `beach - people + like cat.jpg`."""
    said = [(term.sign, term.words) for term in terms if term.words]
    said += [(1, f"like {name}") for name in likes] + [(-1, f"like {name}") for name in unlikes]
    text = " ".join(f"{'+' if sign > 0 else '-'} {what}" for sign, what in said)
    return text.removeprefix("+ ")


def combined(rows_TE: np.ndarray, signs: Sequence[int]) -> np.ndarray:
    """The unit row of what is wanted less what is not."""
    total_E = np.asarray(signs, dtype=np.float64) @ rows_TE.astype(np.float64)
    length = float(np.linalg.norm(total_E))
    if not np.isfinite(length):
        raise UserError(
            "the model answers with what is not a number",
            hint="index with a run that has learned: `lapclip index --model RUN`",
        )
    if length < 1e-4:
        raise UserError(
            "what is asked cancels itself out", hint="leave out what is both added and taken away"
        )
    return (total_E / length).astype(np.float32)
