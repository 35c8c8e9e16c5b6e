"""Where pairs come from: one way to open whatever a person names."""

from typing import Protocol

from PIL import Image

from lapclip.data.synthetic import DocumentsSource, HeldOutScenes, SceneSource
from lapclip.errors import UserError, suggest

DEFAULT_NUM_SCENES = 100_000
MOST_SCENES = 100_000_000  # their order is held in memory


class Source(Protocol):
    """Pairs by number. It can be sent to another process, and opening it does no work."""

    @property
    def num_pairs(self) -> int:
        """Pairs in an epoch."""

    def picture(self, index: int, image_size: int) -> Image.Image:
        """The picture, RGB, square, of that size."""

    def captions(self, index: int) -> tuple[str, ...]:
        """What is said of it, one wording or several."""


def open_source(name: str) -> tuple[Source, Source]:
    """The training pairs and the held-out pairs of a source."""
    kind, _, rest = name.partition(":")
    if kind != "synthetic":
        raise UserError(
            f"`{name}` is not a source{suggest(kind, ['synthetic'])}",
            hint="for now lapclip trains on what it draws: `synthetic`, `synthetic:50000` or `synthetic:documents`",
        )
    if rest == "documents":
        return DocumentsSource(first=0, num_pairs=216), DocumentsSource(first=216, num_pairs=24)
    if rest and not (rest.isascii() and rest.isdigit() and int(rest) >= 2):
        raise UserError(
            f"`{name}` should end in a number of pairs, at least 2, or in `documents`{suggest(rest, ['documents'])}",
            hint="write `synthetic:50000` or `synthetic:documents`",
        )
    if int(rest or 0) > MOST_SCENES:
        raise UserError(
            f"`{name}` asks for more than {MOST_SCENES:,} pairs",
            hint="nobody has that many minutes; ask for fewer",
        )
    return SceneSource(num_pairs=int(rest or DEFAULT_NUM_SCENES)), HeldOutScenes()
