"""What is decided when nobody says: complete, within memory, and each with a reason."""

from dataclasses import fields, replace

import pytest

from lapclip.autotune import plans
from lapclip.autotune.plans import Budget, Candidate, Measured
from lapclip.autotune.resolve import (
    DataSummary,
    Draft,
    recorded,
    recorded_choices,
    resolve_settings,
    resolve_tokenizer,
)
from lapclip.autotune.work import Work
from lapclip.config import Config, Plan, load_config
from lapclip.data.tokenizer import NUM_CHARACTERS
from lapclip.errors import UserError
from lapclip.machine.hardware import Machine

LAPTOP = Machine("M1", "macOS", "3.11", num_cores=8, memory_bytes=8 * 10**9, available_bytes=4 * 10**9)
DATA = DataSummary(num_train=1000, num_validation=512)


def resolved(flags=None, *, machine=LAPTOP, data=DATA, measured=None, config=None):
    config = config or load_config(flags=flags or {})
    config, choices = resolve_settings(config, data, resolve_tokenizer(config, 0.0))
    work = Work(config.model, config.train, NUM_CHARACTERS, num_tokens=8)
    return Draft(config, choices, data, machine, work).resolve(measured)


@pytest.mark.parametrize("size", ["nano", "tiny", "resnet-tiny", "small", "huge", "vit-b-32"])
def test_nothing_but_the_other_budgets_is_left_open(size):
    config, choices = resolved({"size": size})
    for section in fields(Config):
        for field in fields(getattr(config, section.name)):
            if field.name not in ("epochs", "steps", "max_memory", "pause_below", *HOW_TO_READ, *PRETRAINED):
                assert getattr(getattr(config, section.name), field.name) is not None, field.name
    assert all(choice.reason for choice in choices.values())
    assert {"batch_size", "chunk", "lr", "threads", "workers", "minutes"} <= choices.keys()
    assert config.data.tokenizer == ("characters" if size == "small" else "bpe")


def test_several_captions_are_used_where_they_cost_nothing():
    several = replace(DATA, captions_per_image=5)
    assert resolved()[0].data.captions_per_image == 1
    assert resolved(data=several)[0].data.captions_per_image == 5
    assert resolved({"size": "tiny"}, data=several)[0].data.captions_per_image == 1
    assert resolved({"teacher": "other"}, data=several)[0].data.captions_per_image == 1
    assert resolved({"captions_per_image": 2}, data=several)[0].data.captions_per_image == 2


def test_augmentation_is_stronger_the_more_often_an_image_is_used():
    photos = replace(DATA, is_drawn=False)
    few, many = (resolved({"epochs": epochs}, data=photos)[0].data for epochs in (3, 100))
    assert (few.crop, few.colour, few.word_dropout) == (0.6, 0.0, 0.0)
    assert many.crop < 0.6 and many.colour > 0 and many.word_dropout > 0
    assert resolved({"epochs": 100, "crop": 1.0}, data=photos)[0].data.crop == 1.0
    drawn = resolved({"epochs": 100})[0].data
    assert (drawn.crop, drawn.colour, drawn.word_dropout) == (1.0, 0.0, 0.0), "drawn scenes are always new"


def test_patches_cannot_be_dropped_where_there_are_none():
    with pytest.raises(UserError, match="no patches to drop"):
        resolved({"keep_patches": 0.5})


PRETRAINED = (
    "base",
    "image_tower",
    "text_tower",
    "teacher",
    "general",
    "shape",
    "tune",
)  # None: from scratch
# None: look at the source, of which there is none to read where lapclip draws.
HOW_TO_READ = ("format", "images", "image_column", "caption_column", "validation_share")


def test_what_was_asked_for_stays():
    asked = {"size": "small", "batch_size": 30, "chunk": 7, "lr": 0.5, "keep_patches": 0.3, "eval_every": "3", "threads": 1,
             "workers": 2, "steps": 9, "tokenizer": "bpe"}  # fmt: skip
    config, choices = resolved(asked)
    assert config == resolved(config=config)[0], "resolving again changes nothing"
    for name, value in asked.items():
        assert value in (getattr(getattr(config, s.name), name, None) for s in fields(config)), name
    assert {choices[name].origin for name in asked.keys() - {"size", "steps"}} == {"asked"}
    assert "minutes" not in choices


def test_fewer_threads_are_not_chosen_for_being_faster_beside_other_programs(monkeypatch):
    monkeypatch.setattr(plans, "DEFAULT_THREADS", 4)
    parts = ((4, 128, 100.0), (4, 64, 120.0), (8, 128, 140.0), (1, 128, 300.0))
    timed = tuple(
        Candidate(Plan("cpu", "fp32", threads, chunk), rate, 0.01) for threads, chunk, rate in parts
    )
    for other_cores, plan, origin in ((0.1, (1, 128), "measured"), (1.2, (4, 128), "default")):
        config, choices = resolved(measured=Measured(timed, 0.0, other_cores=other_cores))
        assert (config.device.threads, config.train.chunk) == plan and choices["threads"].origin == origin
        assert ("other programs used" in choices["threads"].reason) == (origin == "default")


def test_a_run_of_the_first_version_knows_what_was_asked_for_by_its_reason():
    config, choices = resolved({"chunk": 7, "steps": 9})
    assert recorded_choices(config, recorded(choices)) == choices
    old = recorded_choices(config, {"reasons": recorded(choices)["reasons"]})
    assert old["chunk"] == choices["chunk"] and old["lr"].origin == "default"


def test_the_chunk_fits_into_what_is_free():
    plenty, why = resolved(
        {"size": "small", "batch_size": 64}, machine=replace(LAPTOP, available_bytes=200 * 10**9)
    )
    assert plenty.train.chunk == 64 and "whole batch" in why["chunk"].reason
    little, why = resolved({"size": "small", "batch_size": 64})
    assert 1 <= little.train.chunk < 64 and "2.4 GB" in why["chunk"].reason
    with_recompute, _ = resolved({"size": "small", "batch_size": 64, "recompute": True})
    assert with_recompute.train.chunk > little.train.chunk
    nothing, _ = resolved({"size": "small", "batch_size": 64}, machine=replace(LAPTOP, available_bytes=10**8))
    assert nothing.train.chunk == 1, "it is tried all the same: the system may find room"


def test_the_guess_of_activations_is_near_what_autograd_keeps():
    """For `small`: 333 MB for four pairs, counted with autograd's own hooks; the guess errs to the safe side."""
    config = load_config(flags={"size": "small"})
    work = Work(config.model, config.train, NUM_CHARACTERS, num_tokens=8)
    assert 0.333e9 < work.step_bytes(4) - work.step_bytes(0) < 1.4 * 0.333e9


def test_batch_and_validation_set_are_no_larger_than_the_data():
    config, choices = resolved(data=DataSummary(50, 24))
    assert config.train.batch_size == 50 and config.data.num_validation == 24
    assert "synthetic" in choices["num_validation"].reason
    with pytest.raises(UserError, match="cannot be filled"):
        resolved({"batch_size": 51}, data=DataSummary(50, 24))


def test_budgets_in_steps_and_in_time():
    budget = Budget.of(load_config(flags={"epochs": 2.5}).train, 1000, 10)
    assert budget == Budget(steps=250) and budget.share_done(step=125, seconds=1e9) == 0.5
    timed = Budget.of(load_config(flags={"minutes": 2.0}).train, 1000, 10)
    assert timed == Budget(seconds=120) and timed.share_done(step=10**6, seconds=90.0) == 0.75
    assert resolved({"minutes": 5.0})[0].train.eval_every == "30s"
    assert resolved({"minutes": 0.5})[0].train.eval_every == "15s", "not more often in a short run"
    assert resolved({"steps": 5})[0].train.eval_every == "1"


def test_the_schedule_is_read_in_the_middle_of_a_step():
    assert Budget(steps=1).middle(0.0, step=0) == 0.5
    assert [Budget(steps=4).middle(0.25 * step, step) for step in range(4)] == [0.125, 0.375, 0.625, 0.875]
    timed = Budget(seconds=60)
    assert timed.middle(0.6, step=3) == pytest.approx(0.7), "three steps took 0.6 of the time"
    assert timed.middle(0.0, step=0) > 0
