"""The doctor's round: reads a packed part of the data with the tokenizer that training would use, and examines it."""

from lapclip.config import Config
from lapclip.data.doctor import Report, examine
from lapclip.data.opening import Part
from lapclip.data.scripts import share_outside_a_to_z
from lapclip.data.tokenizer import train_tokenizer
from lapclip.data.view import VALIDATION
from lapclip.model.clip import shape_of
from lapclip.prepare import NUM_CAPTIONS_READ, sample_captions
from lapclip.settle import settle_tokenizer


def check_up(config: Config, part: Part) -> Report:
    """What there is to say about one part."""
    files = part.files
    assert files is not None, "what lapclip draws is sound"
    sample = sample_captions(part.training, NUM_CAPTIONS_READ)
    kind, _ = settle_tokenizer(config, share_outside_a_to_z(sample))
    tokenizer = train_tokenizer(kind, sample, config.data.max_vocab)
    captions = [caption for own in files.catalogue.captions for caption in own]
    return examine(
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
