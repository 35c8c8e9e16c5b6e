"""What is decided when nobody says: complete, within memory, and each with a reason."""

from dataclasses import fields, replace

import pytest

from lapclip.autotune.memory import activation_bytes
from lapclip.autotune.resolve import DataSummary, half_a_step, resolve, share_done, total_steps
from lapclip.config import Config, load_config
from lapclip.errors import UserError
from lapclip.machine.hardware import Machine

LAPTOP = Machine("M1", "macOS", "3.11", num_cores=8, memory_bytes=8 * 10**9, available_bytes=4 * 10**9)
DATA = DataSummary(num_train=1000, num_validation=512)


def resolved(flags=None, *, machine=LAPTOP, data=DATA, num_parameters=76_736_001):
    return resolve(load_config(flags=flags or {}), data, machine, threads=4, num_parameters=num_parameters)


@pytest.mark.parametrize("size", ["nano", "tiny", "small", "huge", "vit-b-32"])
def test_nothing_but_the_other_budgets_is_left_open(size):
    config, reasons = resolved({"size": size})
    for section in fields(Config):
        for field in fields(getattr(config, section.name)):
            if field.name not in ("epochs", "steps", "max_memory", "pause_below", *HOW_TO_READ):
                assert getattr(getattr(config, section.name), field.name) is not None, field.name
    assert (
        all(reasons.values())
        and {"batch_size", "chunk", "lr", "threads", "workers", "minutes"} <= reasons.keys()
    )


HOW_TO_READ = ("format", "images", "image_column", "caption_column")  # None: look at the source


def test_what_was_asked_for_stays():
    asked = {"size": "small", "batch_size": 30, "chunk": 7, "lr": 0.5, "keep_patches": 0.3, "eval_every": "3", "threads": 1,
             "workers": 2, "steps": 9, "tokenizer": "bpe"}  # fmt: skip
    config, reasons = resolved(asked)
    again, _ = resolve(config, DATA, LAPTOP, threads=4, num_parameters=1)
    assert config == again, "settling twice changes nothing"
    for name, value in asked.items():
        assert value in (getattr(getattr(config, s.name), name, None) for s in fields(config)), name
    assert {reasons[name] for name in ("batch_size", "chunk", "lr", "threads", "workers")} == {"asked for"}
    assert "minutes" not in reasons


def test_the_documents_sizes_take_their_33_characters():
    assert resolved({"size": "small"})[0].data.tokenizer == "characters"
    assert resolved({"size": "tiny"})[0].data.tokenizer == "bpe"


def test_the_chunk_fits_into_what_is_free():
    plenty, why = resolved(
        {"size": "small", "batch_size": 64}, machine=replace(LAPTOP, available_bytes=200 * 10**9)
    )
    assert plenty.train.chunk == 64 and "whole batch" in why["chunk"]
    little, why = resolved({"size": "small", "batch_size": 64})
    assert 1 <= little.train.chunk < 64 and "2.4 GB" in why["chunk"]
    with_recompute, _ = resolved({"size": "small", "batch_size": 64, "recompute": True})
    assert with_recompute.train.chunk > little.train.chunk
    nothing, _ = resolved({"size": "small", "batch_size": 64}, machine=replace(LAPTOP, available_bytes=10**8))
    assert nothing.train.chunk == 1, "it is tried all the same: the system may find room"


def test_the_guess_of_activations_is_near_what_autograd_keeps():
    """For `small`: 333 MB for four pairs, counted with autograd's own hooks; the guess errs to the safe side."""
    from lapclip.model.clip import SIZES

    assert 0.333e9 / 4 < activation_bytes(SIZES["small"], recompute=False) < 1.4 * 0.333e9 / 4


def test_a_small_pool_is_said():
    config, reasons = resolved(data=DataSummary(216, 24))
    assert config.data.num_validation == 24 and "synthetic" in reasons["num_validation"]


def test_a_batch_no_larger_than_the_data():
    assert resolved(data=DataSummary(50, 24))[0].train.batch_size == 50
    with pytest.raises(UserError, match="cannot be filled"):
        resolved({"batch_size": 51}, data=DataSummary(50, 24))


def test_budgets_in_steps_and_in_time():
    train = load_config(flags={"epochs": 2.5}).train
    assert total_steps(train, 1000, 10) == 250
    assert share_done(train, 250, step=125, seconds=1e9) == 0.5
    timed = load_config(flags={"minutes": 2.0}).train
    assert total_steps(timed, 1000, 10) is None
    assert share_done(timed, None, step=10**6, seconds=90.0) == 0.75
    assert resolved({"minutes": 5.0})[0].train.eval_every == "30s"
    assert resolved({"minutes": 0.5})[0].train.eval_every == "15s", (
        "a short run does not consist of evaluations"
    )
    assert resolved({"steps": 5})[0].train.eval_every == "1"


def test_the_schedule_is_read_in_the_middle_of_a_step():
    assert half_a_step(0.0, step=0, total=1) == 0.5
    assert [0.25 * step + half_a_step(0.25 * step, step, total=4) for step in range(4)] == [
        0.125,
        0.375,
        0.625,
        0.875,
    ]
    assert half_a_step(0.6, step=3, total=None) == pytest.approx(0.1), "three steps took 0.6 of the time"
    assert half_a_step(0.0, step=0, total=None) > 0
