"""A new model in, the model where it is trained out: checked, or back on the processor if nobody asked for more."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

from lapclip.autotune.parity import Probe, num_probed, place_checked
from lapclip.autotune.resolve import ASKED
from lapclip.config import Config
from lapclip.data.source import Source
from lapclip.data.tokenizer import Tokenizer
from lapclip.errors import UserError
from lapclip.machine.device import processor
from lapclip.model.clip import CLIP, build_model
from lapclip.step.feed import feed
from lapclip.step.loss import LOSSES, NEEDS_BIAS
from lapclip.step.step import Plan, choose_patches


def build_trusted(
    config: Config, source: Source, tokenizer: Tokenizer, plan: Plan, reasons: Mapping[str, str]
) -> tuple[CLIP, Plan, str | None]:
    """The model, its plan, and what was wrong with another plan that had been chosen by measurement."""
    model = new_model(config, tokenizer)
    if plan.is_plain:
        return model, plan, None
    try:
        return place_checked(model, first_pairs(config, source, tokenizer, model, plan), plan), plan, None
    except UserError as problem:
        if ASKED in (reasons.get(part) for part in ("device", "precision", "compile")):
            raise
        plain = replace(plan, device=processor().name, precision="fp32", compile=False)
        return new_model(config, tokenizer), plain, problem.message


def new_model(config: Config, tokenizer: Tokenizer) -> CLIP:
    has_bias = config.train.loss in NEEDS_BIAS
    return build_model(
        config.model, vocab_size=tokenizer.vocab_size, has_bias=has_bias, seed=config.train.seed
    )


def first_pairs(config: Config, source: Source, tokenizer: Tokenizer, model: CLIP, plan: Plan) -> Probe:
    """What a plan is checked with: the first pairs that would be trained on."""
    cfg = config.train
    assert cfg.batch_size and cfg.keep_patches and cfg.loss, "resolved"
    num_pairs = num_probed(plan, cfg.batch_size)
    with closing(
        feed(
            source, tokenizer, model.size, config.data,
            batch_size=num_pairs, seed=cfg.seed, first_step=0, workers=0,
        )
    ) as batches:  # fmt: skip
        batch = next(batches)
    keep_BK = choose_patches(
        0,
        seed=cfg.seed,
        batch_size=num_pairs,
        num_patches=model.image.num_patches,
        share=cfg.keep_patches,
    )
    return Probe(batch, keep_BK, LOSSES[cfg.loss], model.size.text_length)
