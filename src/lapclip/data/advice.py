"""What numbers about the data suggest for training on it, each with its reason; the doctor and `resolve` both ask."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lapclip.config import DataConfig
from lapclip.errors import typed
from lapclip.units import percent, plural

DEFAULT_BATCH_SIZE = 128
MIN_IMAGES = 1_000
MIN_VALIDATION = 100
MIN_TEXT_LENGTH, MAX_TEXT_LENGTH = 16, 77  # CLIP's own length is 77
MAX_OUTSIDE = 0.01  # of the letters; the 33 characters have room for hardly any beside a to z
MAX_SHARED = 0.2  # of the captions
MAX_DUPLICATES = 0.05  # of the images
MAX_UNREADABLE = 0.01
MAX_CUT = 0.05  # of the captions
SHARE, MAX_SHARE, ENOUGH = 0.05, 0.2, 50  # of the images; more of few, until so many are for validation
MAX_CLASS_RATIO = 10  # images in the largest class for each in the smallest


def data_command(verb: str, source: str, config: DataConfig, format: str | None) -> str:
    """`lapclip data VERB` of a source, with the settings that make it read the pairs as training does."""
    format = format if format in ("classes", "names", "metadata", "txt") else None
    columns = {"--image-column": config.image_column, "--caption-column": config.caption_column}
    flags = {"--format": format, "--images": config.images} | columns
    how = [f" {flag} {typed(value)}" for flag, value in flags.items() if value]
    return f"lapclip data {verb} {typed(source)}{''.join(how)}"


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What advice is based on; unknown facts have their defaults. Names and values are those of `data check --json`."""

    num_train: int
    num_validation: int
    num_unreadable: int = 0
    num_duplicate_images: int = 0  # beyond the first of each
    num_leaks: int = 0  # validation images that are in training too
    tokenizer: str = "bpe"
    text_length: int = MAX_TEXT_LENGTH  # of the model
    caption_tokens: dict[str, int] = field(default_factory=dict)  # percentiles
    caption_tokens_cut: dict[str, float] = field(default_factory=dict)  # share, by text length
    num_distinct_captions: int = 0
    share_shared_captions: float = 0.0  # captions of several images
    scripts: dict[str, int] = field(default_factory=dict)
    share_outside_a_to_z: float = 0.0  # of the letters
    classes: dict[str, Any] | None = None

    @property
    def share_cut(self) -> float:
        return self.caption_tokens_cut.get(str(self.text_length), 0.0)


@dataclass(frozen=True)
class Advice:
    """A setting worth changing, or without one something worth knowing."""

    setting: str | None
    value: Any
    why: str
    kind: Literal[
        "", "names", "column", "shared", "plain", "classes", "table", "prefix", "languages", "cropped", "unseen"
    ] = ""  # fmt: skip

    @property
    def sentence(self) -> str:
        if self.setting is None:
            return self.why
        return f"`--{self.setting.replace('_', '-')} {self.value}`: {self.why}"


def facts_of_captions(captions: list[str], lengths: np.ndarray, **known: Any) -> DataFacts:
    """The facts that a sample of captions gives, with their lengths in tokens, before any image is decoded."""
    counts = Counter(caption.casefold() for caption in captions)
    text_length = known["text_length"]
    return DataFacts(
        caption_tokens=percentiles(lengths, (50, 99, 100)),
        caption_tokens_cut={str(text_length): float((lengths > text_length).mean())},
        share_shared_captions=sum(n for n in counts.values() if n > 1) / len(captions),
        **known,
    )


def percentiles(numbers: np.ndarray, which: Sequence[int]) -> dict[str, int]:
    """Numbers that so many percent do not exceed, each one of those given."""
    values = np.percentile(numbers, which, method="inverted_cdf")
    return {str(percent): int(value) for percent, value in zip(which, values, strict=True)}


def share_outside_a_to_z(captions: Iterable[str]) -> float:
    """The share of letters, whatever their case, that an English keyboard does not have."""
    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update(caption.lower())
    letters = {letter: count for letter, count in counts.items() if letter.isalpha()}
    outside = sum(count for letter, count in letters.items() if not letter.isascii())
    return outside / max(sum(letters.values()), 1)


def advise(facts: DataFacts) -> list[Advice]:
    """Settings first; nothing where the defaults fit."""
    settings = (advise_tokenizer, advise_text_length, advise_batch_size, advise_loss)
    found = [advice for advise_setting in settings if (advice := advise_setting(facts))]
    return found + [Advice(None, None, why) for why in warnings(facts)]


def advise_tokenizer(facts: DataFacts) -> Advice | None:
    if facts.tokenizer == "bpe" or facts.share_outside_a_to_z < MAX_OUTSIDE:
        return None
    scripts = [script for script in facts.scripts if script not in ("Latin", "Emoji", "none")]
    whose = f" ({', '.join(scripts[:3])})" if scripts else ""
    outside = f"{percent(facts.share_outside_a_to_z)} of the letters{whose} are outside a to z"
    return Advice("tokenizer", "bpe", f"{outside}; most of them would become the same unknown character")


def advise_text_length(facts: DataFacts) -> Advice | None:
    """The smallest multiple of eight that keeps 99% of the captions whole."""
    if "99" not in facts.caption_tokens or advise_tokenizer(facts):  # another tokenizer counts otherwise
        return None
    needed, longest = (facts.caption_tokens[percentile] for percentile in ("99", "100"))
    value = min(max(in_eights(needed), MIN_TEXT_LENGTH), MAX_TEXT_LENGTH)
    if value + 8 <= min(facts.text_length, longest):  # no batch is longer than its captions
        why = f"99% of the captions have at most {needed} tokens; the few longer ones lengthen whole batches"
        return Advice("text_length", value, why)
    if needed <= facts.text_length or value <= facts.text_length:
        return None
    rest = f"at most 1% at {value}" if needed <= value else f"CLIP uses {MAX_TEXT_LENGTH}"
    why = f"{percent(facts.share_cut)} of the captions are truncated at {facts.text_length}; {rest}"
    return Advice("text_length", value, why)


def in_eights(number: int) -> int:
    return -(-number // 8) * 8


def advise_batch_size(facts: DataFacts) -> Advice | None:
    half = facts.num_train // 2
    if half >= DEFAULT_BATCH_SIZE:
        return None
    value = max(half // 8 * 8 if half >= 8 else half, 2)
    why = f"{plural(facts.num_train, 'training image')}; an epoch should have at least two steps"
    return Advice("batch_size", value, why)


def advise_loss(facts: DataFacts) -> Advice | None:
    if facts.share_shared_captions <= MAX_SHARED:
        return None
    shared = f"{percent(facts.share_shared_captions)} of the captions belong to several images"
    return Advice("loss", "softmax", f"{shared}; the model learns only differences that captions describe")


def advise_share(num_images: int) -> Advice:
    """The share of validation images, which must be known before the other facts."""
    share = min(MAX_SHARE, max(SHARE, -(-100 * ENOUGH // num_images) / 100))
    return Advice("validation_share", share, f"5%, or up to 20% where that is less than {ENOUGH} images")


def warnings(facts: DataFacts) -> Iterator[str]:
    num_images = facts.num_train + facts.num_validation
    num_all = num_images + facts.num_unreadable
    if facts.num_leaks:
        leaked = plural(facts.num_leaks, "validation image")
        yield f"{leaked} also in training; recall is too high until this is corrected"
    if num_images < MIN_IMAGES:
        yield f"{plural(num_images, 'image')} are soon memorised; add images, or another source"
    if facts.num_validation < MIN_VALIDATION:
        few, points = plural(facts.num_validation, "validation image"), 100 / max(facts.num_validation, 1)
        yield f"{few}: one image is {points:.1f} points of recall, so small differences are not significant"
    if facts.num_duplicate_images > MAX_DUPLICATES * num_images:
        copies = percent(facts.num_duplicate_images / num_images)
        yield f"{copies} of the images are duplicates; they stay in the same split, and each is trained on"
    if facts.num_unreadable > MAX_UNREADABLE * num_all:
        broken = percent(facts.num_unreadable / num_all)
        yield f"{broken} of the images are unreadable; check for an incomplete download"
    classes = facts.classes
    if classes and (ratio := classes["largest"][1] / classes["smallest"][1]) > MAX_CLASS_RATIO:
        yield f"the largest class has {ratio:,.0f} times as many images as the smallest, which will be found less often"
    if facts.share_cut > MAX_CUT and not advise_text_length(facts):
        yield f"{percent(facts.share_cut)} of the captions are truncated at {facts.text_length} tokens"
