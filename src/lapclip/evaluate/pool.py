"""The pairs that recall is measured over, as embeddings, and which captions match which images.

Shapes: N images, M captions, E numbers of an embedding; Q queries and A answers, captions and images or the reverse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lapclip.data.decode import Unreadable
from lapclip.data.source import Source
from lapclip.embedder import Embedder
from lapclip.errors import UserError, shortened, shortened_path
from lapclip.units import LongWork, Progress, finished


@dataclass(frozen=True)
class Pool:
    """Embedded pairs: N images, M captions; the captions of an image are consecutive."""

    image_NE: np.ndarray
    text_ME: np.ndarray
    image_of_caption: np.ndarray  # [M], the image that each caption belongs to
    captions: list[str]
    indices: np.ndarray  # [N], the images' numbers in their source
    groups: np.ndarray  # [N], equal for equal images
    # Images that could not be read and are omitted, by their numbers in their source, and why.
    unreadable: dict[int, str] = field(default_factory=dict)

    def part(self, images: np.ndarray) -> "Pool":
        """Some of the images, ascending, with their captions."""
        place_N = np.full(len(self.indices), -1)
        place_N[images] = np.arange(len(images))
        kept = np.flatnonzero(place_N[self.image_of_caption] >= 0)
        return replace(
            self,
            image_NE=self.image_NE[images],
            text_ME=self.text_ME[kept],
            image_of_caption=place_N[self.image_of_caption[kept]],
            captions=[self.captions[m] for m in kept],
            indices=self.indices[images],
            groups=self.groups[images],
        )


def embed_pool(embedder: Embedder, source: Source, num_images: int) -> Pool:
    """A sample of a source's images with all their captions; the images are never all in memory."""
    return finished(embed_pools([(embedder, source)], num_images))[0]


def embed_pools(shown: Sequence[tuple[Embedder, Source]], num_images: int) -> LongWork[list[Pool]]:
    """The same pool embedded by each of several models, which have the same images from sources of their own."""
    source, chunk = shown[0][1], min(embedder.chunk for embedder, _ in shown)
    sample, rows = source.sample(num_images), [list[np.ndarray]() for _ in shown]
    views = [(own, embedder.image_size) for embedder, own in shown]
    kept, unreadable = list[int](), dict[int, str]()
    for start in range(0, len(sample), chunk):
        yield Progress("embedding images", start, len(sample))
        images = []
        for index in sample[start : start + chunk].tolist():
            try:
                images.append({view: view[0].image(index, view[1]) for view in {*views}})
                kept.append(index)
            except Unreadable as problem:  # only of a streamed source
                unreadable[index] = f"`{shortened_path(source.name(index))}` {shortened(str(problem))}"
        for its_rows, (embedder, _), view in zip(rows, shown, views, strict=True):
            its_rows.append(embedder.images([image[view] for image in images]))
    if not kept:
        first = f", the first one {next(iter(unreadable.values()))}" if unreadable else ""
        hint = "check that the source still exists"
        raise UserError(f"none of {len(unreadable)} validation images can be read{first}", hint=hint)
    indices = np.array(kept)
    captions_N = [source.captions(index) for index in kept]
    captions = [caption for some in captions_N for caption in some]
    image_of_caption = np.repeat(np.arange(len(indices)), [len(some) for some in captions_N])
    groups = source.groups(indices)
    pools = []
    for its_rows, (embedder, _) in zip(rows, shown, strict=True):
        text_ME = yield from embed_captions(embedder, captions)
        image_NE = np.concatenate(its_rows)
        pools.append(Pool(image_NE, text_ME, image_of_caption, captions, indices, groups, unreadable))
    return pools


def embed_captions(embedder: Embedder, captions: list[str]) -> LongWork[np.ndarray]:
    """Rows of captions; a caption that many images share, such as a class name, is embedded once."""
    number_of = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
    unique, rows, chunk = list(number_of), [], embedder.chunk
    for start in range(0, len(unique), chunk):
        yield Progress("embedding captions", start, len(unique))
        rows.append(embedder.texts(unique[start : start + chunk]))
    return np.concatenate(rows)[[number_of[caption] for caption in captions]]


def caption_numbers(captions: Sequence[str]) -> np.ndarray:
    """A number for each caption, equal for equal words; an array of strings would be as wide as the longest one."""
    number_of: dict[str, int] = {}
    return np.array([number_of.setdefault(caption.casefold(), len(number_of)) for caption in captions])


@dataclass(frozen=True)
class Links:
    """Which answers are correct for which queries, without a matrix of all: by caption number and image group."""

    key_Q: np.ndarray
    key_A: np.ndarray
    starts: np.ndarray  # where the answer keys of each query key start; one more at the end
    answer_keys: np.ndarray

    @classmethod
    def of_captions(cls, pool: Pool, published: bool = False) -> "Links":
        """From captions to images. A caption matches every image that has the same words, and images equal to those;
        in published protocols only its own image."""
        if published:
            key_M, key_N = pool.image_of_caption, np.arange(len(pool.indices))
        else:
            key_M, key_N = caption_numbers(pool.captions), np.unique(pool.groups, return_inverse=True)[1]
        return cls.of_pairs(key_M, key_N, key_M, key_N[pool.image_of_caption])

    @classmethod
    def of_pairs(cls, key_Q: np.ndarray, key_A: np.ndarray, left: np.ndarray, right: np.ndarray) -> "Links":
        left, right = np.unique(np.stack([left, right]), axis=1)
        return cls(key_Q, key_A, np.searchsorted(left, np.arange(key_Q.max() + 2)), right)

    def reverse(self) -> "Links":
        """From images to captions."""
        left = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        return Links.of_pairs(self.key_A, self.key_Q, self.answer_keys, left)

    def rows(self, queries: np.ndarray) -> np.ndarray:
        """True where an answer is correct, [len(queries), A]."""
        is_linked = np.zeros((len(queries), int(self.key_A.max()) + 1), dtype=bool)
        for row, key in enumerate(self.key_Q[queries].tolist()):
            is_linked[row, self.answer_keys[self.starts[key] : self.starts[key + 1]]] = True
        return is_linked.take(self.key_A, axis=1)


def pair_matrix(pool: Pool) -> np.ndarray:
    """True where a caption matches an image, [M, N]; for small pools."""
    return Links.of_captions(pool).rows(np.arange(len(pool.captions)))
