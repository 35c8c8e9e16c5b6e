"""Runs the data doctor on a packed part of the data, with the tokenizer and the settings that training would use."""

from dataclasses import replace

from lapclip.autotune.resolve import resolve_tokenizer
from lapclip.config import Config
from lapclip.data.advice import Advice, share_outside_a_to_z
from lapclip.data.doctor import Report, examine
from lapclip.data.open import Data, Part
from lapclip.data.tokenizer import train_tokenizer
from lapclip.model.clip import shape_of
from lapclip.train.prepare import NUM_CAPTIONS_READ, sample_captions, summarise


def check_up(config: Config, part: Part) -> Report:
    """The report on one part, with the settings that training would choose for it."""
    files = part.files
    assert files is not None, "what lapclip draws is sound"
    sample = sample_captions(part.training, NUM_CAPTIONS_READ)
    kind = resolve_tokenizer(config, share_outside_a_to_z(sample)).value
    tokenizer = train_tokenizer(kind, sample, config.data.max_vocab)
    lengths = tokenizer.lengths([caption for own in files.catalogue.captions for caption in own])
    shape = shape_of(config.model)
    report = examine(
        files, lengths, text_length=shape.text_length, tokenizer=kind, image_size=shape.image_size
    )
    alone = Data((part,), "", part.training, part.validation)
    advice = list(summarise(config, alone, tokenizer, sample, tokenizer.lengths(sample)).advice.values())
    if num := files.pack.num_needing_extra:
        why = f"{num:,} of the unreadable images are HEIC: `pip install 'lapclip[heic]'`, then try again"
        advice.append(Advice(None, None, why))
    return replace(report, advice=[*advice, *(other for other in report.advice if other.setting is None)])
