"""What numbers about the data suggest for training on it, each with its reason; the doctor and `resolve` both ask."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DEFAULT_BATCH_SIZE = 128
FEW_IMAGES = 1_000
FEW_HELD_OUT = 100
LEAST_TEXT, MOST_TEXT = 16, 77  # CLIP's own length is 77
MANY_OUTSIDE = 0.01  # of the letters; the 33 characters have room for hardly any beside a to z
MANY_SHARED = 0.2  # of the captions
MANY_DUPLICATES = 0.05  # of the images
MANY_UNREADABLE = 0.01
MUCH_CUT = 0.05  # of the captions
UNEVEN = 10  # times as many images in the largest class as in the smallest


@dataclass(frozen=True)
class DataFacts:
    """The numbers that advice is made from; what is not known says nothing."""

    num_train: int
    num_validation: int
    num_unreadable: int = 0
    num_duplicate_images: int = 0
    num_leaks: int = 0
    text_length: int = MOST_TEXT  # of the model
    tokenizer: str = "bpe"
    tokens: dict[str, int] = field(default_factory=dict)  # of a caption: percentiles
    share_cut: float = 0.0  # of the captions, at the model's length
    share_shared: float = 0.0  # of the captions that are said of several images
    num_distinct_captions: int = 0
    scripts: dict[str, int] = field(default_factory=dict)
    share_outside_a_to_z: float = 0.0  # of the letters
    num_classes: int = 0
    class_ratio: float = 1.0  # images in the largest class for each in the smallest

    @property
    def num_images(self) -> int:
        return self.num_train + self.num_validation


@dataclass(frozen=True)
class Advice:
    """A setting worth changing, or without one something worth knowing."""

    setting: str | None
    value: Any
    why: str

    @property
    def sentence(self) -> str:
        if self.setting is None:
            return self.why
        return f"`--{self.setting.replace('_', '-')} {self.value}`: {self.why}"


def facts_of_captions(captions: list[str], lengths: np.ndarray, **known: Any) -> DataFacts:
    """What a sample of captions, with their lengths in tokens, says before every image was looked at."""
    counts = Counter(caption.casefold() for caption in captions)
    return DataFacts(
        tokens={str(p): int(np.percentile(lengths, p, method="higher")) for p in (50, 99, 100)},
        share_cut=float((lengths > known["text_length"]).mean()),
        share_shared=sum(n for n in counts.values() if n > 1) / len(captions),
        num_distinct_captions=len(counts),
        **known,
    )


def advise(facts: DataFacts) -> list[Advice]:
    """Settings first; nothing where the defaults are right."""
    settings = (
        advise_tokenizer(facts),
        advise_text_length(facts),
        advise_batch_size(facts),
        advise_loss(facts),
    )
    return [
        *(advice for advice in settings if advice),
        *(Advice(None, None, why) for why in warnings(facts)),
    ]


def advise_tokenizer(facts: DataFacts) -> Advice | None:
    if facts.tokenizer == "bpe" or facts.share_outside_a_to_z < MANY_OUTSIDE:
        return None
    scripts = [script for script in facts.scripts if script not in ("Latin", "Emoji", "none")]
    whose = f" ({', '.join(scripts[:3])})" if scripts else ""
    return Advice(
        "tokenizer",
        "bpe",
        f"{facts.share_outside_a_to_z:.0%} of the letters{whose} are not among a to z; "
        "most of them would be one and the same unknown character",
    )


def advise_text_length(facts: DataFacts) -> Advice | None:
    """The least, in steps of eight, that keeps 99 in 100 captions whole."""
    if "99" not in facts.tokens or advise_tokenizer(facts):  # another tokenizer counts otherwise
        return None
    needed = facts.tokens["99"]
    value = min(max(eights(needed), LEAST_TEXT), MOST_TEXT)
    longest_batch = min(
        facts.text_length, eights(facts.tokens["100"])
    )  # no batch is longer than its captions
    if value < longest_batch:
        return Advice(
            "text_length",
            value,
            f"99 in 100 captions have at most {needed} tokens; the few longer ones lengthen whole batches",
        )
    if needed <= facts.text_length or value <= facts.text_length:
        return None
    rest = f"at most 1 in 100 at {value}" if needed <= value else f"CLIP's own length is {MOST_TEXT}"
    return Advice(
        "text_length",
        value,
        f"{percent(facts.share_cut)} of the captions are cut at {facts.text_length}; {rest}",
    )


def eights(number: int) -> int:
    return -(-number // 8) * 8


def advise_batch_size(facts: DataFacts) -> Advice | None:
    half = facts.num_train // 2
    if half >= DEFAULT_BATCH_SIZE:
        return None
    value = max(half // 8 * 8 if half >= 8 else half, 2)
    return Advice(
        "batch_size",
        value,
        f"{facts.num_train:,} training images; an epoch should have at least two steps",
    )


def advise_loss(facts: DataFacts) -> Advice | None:
    if facts.share_shared <= MANY_SHARED:
        return None
    return Advice(
        "loss",
        "softmax",
        f"{percent(facts.share_shared)} of the captions are said of several images; with either loss equal ones "
        "never count as wrong answers, but only what captions tell apart is learned",
    )


def warnings(facts: DataFacts) -> Iterator[str]:
    if facts.num_leaks:
        yield (
            f"{counted(facts.num_leaks, 'validation picture')} can be seen in training as well; recall will look "
            "better than it is, until they are removed from one side"
        )
    if facts.num_images < FEW_IMAGES:
        yield (
            f"{counted(facts.num_images, 'picture')} will soon be known by heart; use strong augmentation, start from "
            "a model that was trained on more, or mix in another source"
        )
    if facts.num_validation < FEW_HELD_OUT:
        points = 100 / max(facts.num_validation, 1)
        yield (
            f"{counted(facts.num_validation, 'validation picture')}: one more found is {points:.1f} points of recall, "
            "so small differences mean nothing"
        )
    if facts.num_duplicate_images > MANY_DUPLICATES * facts.num_images:
        yield (
            f"{percent(facts.num_duplicate_images / facts.num_images)} of the images are copies of others; they are "
            "kept on one side, but each copy counts again in training"
        )
    if facts.num_unreadable > MANY_UNREADABLE * (facts.num_images + facts.num_unreadable):
        yield (
            f"{percent(facts.num_unreadable / (facts.num_images + facts.num_unreadable))} of the images cannot be "
            "read; see whether a download broke off"
        )
    if facts.num_classes and facts.class_ratio > UNEVEN:
        yield (
            f"the largest class has {facts.class_ratio:,.0f} times as many images as the smallest; "
            "rare classes will be found less often"
        )
    if facts.share_cut > MUCH_CUT:
        cut = percent(facts.share_cut)
        yield f"{cut} of the captions are cut at {facts.text_length} tokens; their ends are not learned"


def percent(share: float) -> str:
    """A share in few digits, without calling a little nothing, or nearly all all."""
    if 0 < share < 0.001:
        return "less than 0.1%"
    if 0.999 < share < 1:
        return "more than 99.9%"
    return f"{share:.1%}".replace(".0%", "%")


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
