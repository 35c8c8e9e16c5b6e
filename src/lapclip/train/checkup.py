"""The doctor's round: reads a packed part of the data with the tokenizer that training would use, and examines it."""

from dataclasses import replace

from lapclip.autotune.resolve import resolve_tokenizer
from lapclip.config import Config
from lapclip.data.captions import VALIDATION
from lapclip.data.doctor import Report, examine
from lapclip.data.open import Data, Part
from lapclip.data.scripts import share_outside_a_to_z
from lapclip.data.tokenizer import train_tokenizer
from lapclip.model.clip import shape_of
from lapclip.train.prepare import NUM_CAPTIONS_READ, sample_captions, summarise


def check_up(config: Config, part: Part) -> Report:
    """What there is to say about one part; of settings, what training would choose."""
    files = part.files
    assert files is not None, "what lapclip draws is sound"
    sample = sample_captions(part.training, NUM_CAPTIONS_READ)
    kind = resolve_tokenizer(config, share_outside_a_to_z(sample)).value
    tokenizer = train_tokenizer(kind, sample, config.data.max_vocab)
    captions = [caption for own in files.catalogue.captions for caption in own]
    report = examine(
        files.catalogue,
        files.pack.records,
        files.pack.unreadable,
        files.groups,
        files.sides == VALIDATION,
        tokenizer.lengths(captions),
        text_length=shape_of(config.model).text_length,
        vocab=kind,
        image_size=shape_of(config.model).image_size,
    )
    alone = Data((part,), "", part.training, part.validation)
    summary = summarise(config, alone, tokenizer, sample, tokenizer.lengths(sample))
    settings = [advice.sentence for advice in summary.advice.values()]
    if num := files.pack.num_needing["heic"]:
        settings.append(
            f"{num:,} of the unreadable images are HEIC: `pip install 'lapclip[heic]'`, then try again"
        )
    return replace(
        report, advice=[*settings, *(line for line in report.advice if not line.startswith("`--"))]
    )
