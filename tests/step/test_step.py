"""Any batch in the memory of one chunk, with the gradients of the whole batch."""

import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tiny import TOKENIZER, assert_alike, first_batch

from lapclip.config import ModelConfig, Plan
from lapclip.data.batches import Batch
from lapclip.data.synthetic import SceneSource
from lapclip.machine.device import DEVICES, Device, device_named
from lapclip.model.clip import CLIP, SIZES, build_model
from lapclip.model.towers import Shape
from lapclip.step.loss import LOSSES
from lapclip.step.step import (
    Replica,
    choose_features,
    choose_patches,
    contrastive_step,
    fixed_length,
    in_batch_accuracy,
    move,
    padded_length,
)

SOURCE = SceneSource(num_pairs=10)  # fewer pairs than the batch holds, so that it has duplicates
BATCH = first_batch(14, SOURCE, image_size=32)
SIZE = replace(SIZES["nano"], image=Shape(32, 2, 2), text=Shape(32, 2, 2), embedding=16)


def build(loss: str) -> CLIP:
    torch.manual_seed(0)
    return CLIP(SIZE, vocab_size=TOKENIZER.vocab_size, has_bias=loss == "sigmoid")


def some_inputs(share: float = 0.5):
    keep = choose_patches(0, seed=0, batch_size=14, num_patches=16, share=share)
    return move(BATCH, Device("cpu"), keep)


def gradients(loss: str, chunk: int) -> tuple[dict[str, torch.Tensor], float, float]:
    model = build(loss)
    value, accuracy = contrastive_step(model, some_inputs(), LOSSES[loss], Plan("cpu", "fp32", 1, chunk))
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None and g.abs().sum() > 0 for g in found.values()), "every parameter learns"
    return found, value.item(), accuracy.item()


@pytest.mark.parametrize("chunk", [1, 4, 13])
@pytest.mark.parametrize("loss", LOSSES)
def test_chunked_gradients_equal_whole_batch_gradients(loss, chunk):
    """With half of the patches dropped and duplicates in the batch."""
    whole, whole_loss, whole_accuracy = gradients(loss, chunk=14)
    parts, parts_loss, parts_accuracy = gradients(loss, chunk=chunk)
    assert parts_loss == pytest.approx(whole_loss, rel=1e-6) and parts_accuracy == whole_accuracy
    assert_alike(parts, whole, 1e-5)


@pytest.mark.parametrize("chunk", [1, 32, 64])
def test_a_residual_network_and_several_captions_have_the_same_gradients_in_chunks(chunk):
    """Images are normalised in groups of 32, and a chunk is rounded up to whole groups; dropped features are the same."""
    batch, found = first_batch(72, SceneSource(num_pairs=60), image_size=32), []
    tokens, ends = (np.stack([rows, np.roll(rows, 1, axis=0)], axis=1) for rows in (batch.tokens, batch.ends))
    ids = np.stack([batch.caption_ids, np.roll(batch.caption_ids, 1)], axis=1)
    moved = move(replace(batch, tokens=tokens, ends=ends, caption_ids=ids), Device("cpu"), None)
    for own in (chunk, 72):
        torch.manual_seed(0)
        model = CLIP(SIZES["resnet-tiny"], vocab_size=TOKENIZER.vocab_size)
        inputs = choose_features(moved, model, 3, seed=1, dropout=0.2)
        loss, _ = contrastive_step(model, inputs, LOSSES["softmax"], Plan("cpu", "fp32", 1, own))
        learned = {n: p.grad for n, p in model.named_parameters() if p.grad.abs().sum() > 0}
        found.append({"loss": loss, **learned, **dict(model.named_buffers())})
    assert_alike(*found, 1e-4)


@pytest.mark.parametrize("size", [SIZE, SIZES["resnet-tiny"]])
def test_halves_computed_at_the_same_time_have_the_gradients_of_the_batch(size):
    """And to the bit the same ones each time, although the order in which the halves finish is not fixed."""
    batch, found, rows = first_batch(72, SceneSource(num_pairs=60), image_size=size.image_size), [], []
    inputs, before = move(batch, Device("cpu"), None), torch.get_num_threads()
    for is_split in (False, True, True, True):
        torch.manual_seed(0)
        model = CLIP(size, vocab_size=TOKENIZER.vocab_size)
        replica = Replica(model) if is_split else None
        for module in (model, replica.model) if replica else ():
            module.image.register_forward_hook(lambda _, inputs, out: rows.append(len(out)))
        torch.set_num_threads(2 if is_split else 1)  # two threads on one operation round differently
        loss, _ = contrastive_step(
            model, inputs, LOSSES["softmax"], Plan("cpu", "fp32", 2, 72), replica=replica
        )
        learned = {n: p.grad for n, p in model.named_parameters() if p.grad.abs().sum() > 0}
        found.append({"loss": loss, **learned})
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    assert sorted(rows) == [36, 36] * 3 if size is SIZE else all(0 < one < 72 for one in rows)
    assert_alike(found[0], found[1], 1e-4)
    for other in found[2:]:
        assert other.keys() == found[1].keys() and all(torch.equal(other[n], found[1][n]) for n in other)


def test_running_statistics_are_those_of_both_halves():
    """To first order: the halves do not see what the other one has changed in the same step."""
    batch = first_batch(64, SceneSource(num_pairs=60), image_size=64)
    inputs, found = move(batch, Device("cpu"), None), []
    for is_split in (False, True):
        torch.manual_seed(0)
        model = CLIP(SIZES["resnet-tiny"], vocab_size=TOKENIZER.vocab_size)
        replica = Replica(model) if is_split else None
        for _ in range(12):
            contrastive_step(model, inputs, LOSSES["softmax"], Plan("cpu", "fp32", 1, 64), replica=replica)
        found.append(model.image.norm.running_var)
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=0)


def test_a_batch_too_small_for_halves_has_the_running_statistics_of_one_module():
    found, inputs = [], move(first_batch(20, SOURCE, image_size=64), Device("cpu"), None)
    for is_split in (False, True):
        torch.manual_seed(0)
        model = CLIP(SIZES["resnet-tiny"], vocab_size=TOKENIZER.vocab_size)
        replica = Replica(model) if is_split else None
        contrastive_step(model, inputs, LOSSES["softmax"], Plan("cpu", "fp32", 1, 20), replica=replica)
        found.append(model.image.norm.running_mean)
    assert torch.equal(*found)


@pytest.mark.parametrize("chunk", [14, 5])
def test_a_tower_that_is_frozen_whole_has_no_gradient(chunk):
    """As the image tower of a SigLIP model, which has no projection, under `--tune text`."""
    torch.manual_seed(0)
    model = CLIP(replace(SIZE, siglip=True, embedding=32, text_length=16), vocab_size=TOKENIZER.vocab_size)
    model.image.requires_grad_(False)
    batch = first_batch(14, SOURCE, image_size=32)
    inputs = move(
        replace(batch, tokens=batch.tokens[:, :16], ends=batch.ends.clip(max=15)), Device("cpu"), None
    )
    contrastive_step(model, inputs, LOSSES["softmax"], Plan("cpu", "fp32", 1, chunk))
    assert all(p.grad is None for p in model.image.parameters())
    assert model.project_text.weight.grad.abs().sum() > 0


def test_a_half_that_fails_is_reported_after_the_other_has_ended():
    ended = []

    def end_later() -> None:
        time.sleep(0.05)
        ended.append(1)

    with pytest.raises(MemoryError):
        Replica(build("softmax")).run(partial(raise_, MemoryError()), end_later)
    assert ended == [1]
    with pytest.raises(MemoryError):
        Replica(build("softmax")).run(partial(ended.append, 1), partial(raise_, MemoryError()))


def raise_(error: Exception) -> None:
    raise error


def test_dropped_features_follow_from_seed_and_step_and_keep_their_mean():
    model, inputs = build("softmax"), some_inputs()
    first, same, other = (
        choose_features(inputs, model, step, seed=1, dropout=0.25).drop for step in (3, 3, 4)
    )
    assert all(torch.equal(one, two) for one, two in zip(first, same, strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    assert first[0].unique().tolist() == pytest.approx([0.0, 1 / 0.75]) and 0.8 < first[0].mean() < 1.2
    assert choose_features(inputs, model, 3, seed=1, dropout=0.0) is inputs


def test_the_loss_of_several_captions_is_the_mean_of_their_losses():
    model, (one, other) = build("softmax"), (BATCH, replace(BATCH, tokens=BATCH.tokens[::-1].copy(), ends=BATCH.ends[::-1].copy(), caption_ids=BATCH.caption_ids[::-1].copy()))  # fmt: skip
    names = ("tokens", "ends", "caption_ids")
    both = {name: np.stack([getattr(one, name), getattr(other, name)], axis=1) for name in names}
    batches, plan = (one, other, replace(BATCH, **both)), Plan("cpu", "fp32", 1, 14)
    inputs = [move(batch, Device("cpu"), None) for batch in batches]
    losses = [contrastive_step(model, own, LOSSES["softmax"], plan)[0].item() for own in inputs]
    assert losses[2] == pytest.approx((losses[0] + losses[1]) / 2) and losses[0] != losses[1]


@pytest.mark.parametrize(("chunk", "forwards"), [(14, 1), (100, 1), (7, 4), (5, 6)])
def test_one_chunk_costs_one_forward(chunk, forwards):
    model, calls = build("softmax"), []
    model.image.register_forward_hook(lambda *_: calls.append(1))
    contrastive_step(model, some_inputs(), LOSSES["softmax"], Plan("cpu", "fp32", 1, chunk))
    assert len(calls) == forwards


def test_patches_follow_from_seed_and_step_alone():
    first = choose_patches(5, seed=1, batch_size=8, num_patches=64, share=0.5)
    np.random.rand(3)
    assert torch.equal(first, choose_patches(5, seed=1, batch_size=8, num_patches=64, share=0.5))
    assert not torch.equal(first, choose_patches(6, seed=1, batch_size=8, num_patches=64, share=0.5))
    assert not torch.equal(first, choose_patches(5, seed=2, batch_size=8, num_patches=64, share=0.5))
    assert first.shape == (8, 32) and all(len(set(row.tolist())) == 32 for row in first)
    assert choose_patches(5, seed=1, batch_size=8, num_patches=64, share=1.0) is None
    kept = torch.cat([choose_patches(s, seed=0, batch_size=64, num_patches=16, share=0.5) for s in range(50)])
    counts = torch.bincount(kept.flatten(), minlength=16) / len(kept)
    assert (counts - 0.5).abs().max() < 0.05, "every patch is kept equally often"


def test_captions_that_read_the_same_and_images_they_are_said_of_are_not_negatives():
    """`A cat` is `a cat` to the model; and what is said of an image by another pair is true of it too."""
    tokens, ends = TOKENIZER.encode(["A small Cat", "a red house", "a small cat", "a red house"], 32)
    _, caption_ids = np.unique(tokens, axis=0, return_inverse=True)
    images = np.zeros((4, 3, 32, 32), dtype=np.uint8)
    batch = Batch(images, tokens, ends, image_ids=np.array([0, 0, 1, 2]), caption_ids=caption_ids)
    assert some_inputs().same_BB.sum() == 14 + 2 * 4, "ten pairs in a batch of fourteen: four are there twice"
    same = move(batch, Device("cpu"), None).same_BB
    # Image 0 has both captions, image 1 the cat, image 2 the house.
    assert same.tolist() == [[True] * 4, [True] * 4, [True, False, True, False], [False, True, False, True]]


def test_accuracy_counts_both_directions_and_takes_a_twin_for_right():
    image = torch.eye(4)
    text = torch.eye(4)[[0, 1, 3, 2]]
    same = torch.eye(4, dtype=torch.bool)
    assert in_batch_accuracy(image, text, same).item() == 0.5
    same[2, 3] = same[3, 2] = True
    assert in_batch_accuracy(image, text, same).item() == 1.0


def test_an_accelerator_meets_few_text_lengths_and_finds_the_same_numbers():
    assert {padded_length(length, 77) for length in range(1, 78)} == {16, 32, 77}
    assert padded_length(10, 12) == 12, "never longer than the model's"
    assert fixed_length(DEVICES["cpu"], False, 77) is None
    assert fixed_length(DEVICES["mps"], False, 77) == 77 == fixed_length(DEVICES["cpu"], True, 77)
    model = build("softmax")
    batch = replace(BATCH, tokens=BATCH.tokens[:, :8], ends=np.minimum(BATCH.ends, 7))
    short, long = (move(batch, Device("cpu"), None, fixed_length=length) for length in (None, 32))
    assert short.tokens_BT.shape[1] == 8 and long.tokens_BT.shape[1] == 16
    torch.testing.assert_close(
        model.embed_texts(long.tokens_BT, long.ends_B), model.embed_texts(short.tokens_BT, short.ends_B)
    )


def test_a_step_on_several_threads_gives_the_same_gradients_each_time():
    """Which rows of the positions are looked up differs from image to image, and so does who adds them up."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        model = build_model(ModelConfig(size="nano"), vocab_size=50, has_bias=False)
        images = torch.randint(0, 255, (64, 3, 64, 64), dtype=torch.uint8)
        num_patches = model.size.num_patches
        keep = choose_patches(0, seed=0, batch_size=64, num_patches=num_patches, share=0.5)
        found = set()
        for _ in range(20):
            model.zero_grad()
            (model.embed_images(images, keep) * torch.linspace(-1, 1, 64)[:, None]).sum().backward()
            found.add(model.image.positions.grad.numpy().tobytes())
        assert len(found) == 1
    finally:
        torch.set_num_threads(before)


def test_the_chance_of_the_accuracy_counts_every_correct_combination():
    """Of six pairs in two classes of four and two, a random answer is right for 20 of 36 combinations."""
    zeros, ids = np.zeros((6, 1), np.int64), np.arange(6)
    batch = Batch(np.zeros((6, 3, 8, 8), np.uint8), zeros, ids, ids, np.array([0, 0, 0, 0, 1, 1]))
    assert move(batch, device_named("cpu"), None).chance == pytest.approx(20 / 36)
