"""Heads on cached features of frozen towers."""

import itertools
import json
import pickle
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import opened, picture_folder

import lapclip
from lapclip.config import DataConfig, TrainConfig
from lapclip.data.tokenizer import train_bpe
from lapclip.embedder import Embedder, find_model
from lapclip.errors import UserError
from lapclip.finetune import encoders, heads
from lapclip.finetune import features as feature_store
from lapclip.finetune.features import compute_features
from lapclip.finetune.heads import with_heads
from lapclip.machine.device import processor
from lapclip.model.blocks import Shape
from lapclip.model.clip import CLIP
from lapclip.model.encoders import Encoder
from lapclip.model.towers import Head, Size
from lapclip.units import finished
from lapclip.weights import reading

LOOKS = DataConfig(crop=0.5, flip=True)
SIZE = Size(Shape(24, 2, 2, 40), Shape(16, 2, 2), 16, 8, 16, 20)


@pytest.fixture
def base() -> Path:
    """A model folder, as `Embedder.save` writes it."""
    torch.manual_seed(0)
    tokenizer = train_bpe(["red green blue old new cat dog tree number 1 2 3"], 400)
    tokenizer = tokenizer.with_ids(5, 6, 7, is_full=False)  # as other programs have them
    model = CLIP(SIZE, vocab_size=tokenizer.vocab_size)
    return Embedder(model, tokenizer, processor(), name="base").save("base")


def features_of(base: Path, source: object):
    found = find_model(base)
    data = opened(source)
    embedder = Embedder(found.model.eval(), found.tokenizer, processor())
    return found, finished(compute_features(embedder, data, LOOKS))


@pytest.mark.slow
def test_heads_learn_and_the_towers_stay_as_they_are(base, call, monkeypatch):
    monkeypatch.setattr(heads, "SWEEP_STEPS", 15)
    picture_folder(Path("photos"), 140)
    ran = call("train", "photos", "--from", "base", "--run", "mine", "--steps", "60", "--json")
    assert ran.returncode == 0, ran.stderr
    assert "of 3 head settings" in " ".join(ran.stderr.split())
    before, trained = lapclip.load("base").model, lapclip.load("mine")
    after, tokenizer = trained.model, trained.tokenizer
    assert (tokenizer.start, tokenizer.end, tokenizer.pad) == (5, 6, 7)
    assert f"{after.num_parameters:,} parameters are trained" in ran.stderr
    for tower in ("image", "text"):
        old, new = (getattr(model, tower).state_dict() for model in (before, after))
        assert all(torch.equal(old[name], new[name]) for name in old), "frozen weights have changed"
    taught, fingerprint = lapclip.load("base"), feature_store.towers_fingerprint
    assert fingerprint(trained) == fingerprint(taught), "heads are not part of what features depend on"
    losses = [json.loads(line) for line in Path("runs/mine/events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in losses if event.get("type", event.get("event")) in ("step", "Step")]
    assert losses[-1] < 0.8 * losses[0]
    again = call("train", "--resume", "mine", "--steps", "70")
    assert again.returncode == 0 and "step 70" in again.stderr, again.stderr
    assert call("index", "photos", "--model", "mine").returncode == 0
    assert call("search", "red cat").returncode == 0


def test_a_run_on_a_folder_of_classes_is_prompted_as_it_was_trained(base, call, monkeypatch):
    monkeypatch.setattr(heads, "SWEEP_STEPS", 2)
    for label, first in (("cats", 0), ("dogs", 20)):
        for file in picture_folder(Path("animals", label), 20, first=first).glob("*.txt"):
            file.unlink()
    ran = call("train", "animals", "--from", "base", "--run", "mine", "--steps", "2")
    assert ran.returncode == 0 and lapclip.load("mine").templates == ("{}",), ran.stderr
    assert "A `base` model" in call("report", "mine", "--markdown").stdout


@pytest.mark.parametrize("tune", ["lora", "last-k", "text", "full"])
def test_parts_of_the_towers_are_trained_and_the_rest_stays(base, call, tune):
    picture_folder(Path("photos"), 40)
    flags = ["--run", "mine", "--steps", "6", "--batch-size", "16", "--last-k", "1", "--no-compile"]
    ran = call("train", "photos", "--from", "base", "--tune", tune, *flags)
    assert ran.returncode == 0, ran.stderr
    before, after = (lapclip.load(name).model.state_dict() for name in ("base", "mine"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    towers = {name for name in changed if name.startswith(("image.", "text."))}
    expected = {
        "lora": lambda name: "attention" in name and name.endswith("weight"),
        "last-k": lambda name: ".blocks.1." in name,
        "text": lambda name: name.startswith("text."),
        "full": lambda name: True,
    }[tune]
    assert towers and all(expected(name) for name in towers), sorted(towers)
    assert "project_image.weight" in changed and "parameters are trained" in ran.stderr
    assert call("train", "--resume", "mine", "--steps", "8").returncode == 0


def test_adapters_are_refused_where_there_is_no_attention_and_a_frozen_network_stays_as_it_is(call):
    picture_folder(Path("photos"), 40)
    flags = ["--steps", "2", "--batch-size", "16", "--eval-every", "100", "--threads", "1"]
    made = call("train", "photos", "--size", "resnet-tiny", "--image-size", "32", "--run", "network", *flags)
    assert made.returncode == 0, made.stderr
    refused = call("train", "photos", "--from", "network", "--tune", "lora", *flags)
    assert refused.returncode == 1 and "`network` has no attention layers" in refused.stderr
    tuned = call("train", "photos", "--from", "network", "--tune", "text", "--run", "mine", *flags)
    assert tuned.returncode == 0, tuned.stderr
    before, after = (lapclip.load(name).model.image.state_dict() for name in ("network", "mine"))
    assert all(torch.equal(before[name], after[name]) for name in before), "running statistics too"


def test_merged_adapters_compute_what_they_did_apart():
    torch.manual_seed(0)
    model = CLIP(replace(SIZE, lora_rank=3), vocab_size=40).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".up"):
            torch.nn.init.normal_(parameter)
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    with torch.inference_mode():
        apart = model.embed_images(images)
    model.merge_adapters()
    with torch.inference_mode():
        assert torch.equal(model.embed_images(images), apart)
    assert model.state_dict().keys() == CLIP(SIZE, vocab_size=40).state_dict().keys()


def test_heads_start_at_the_projections_of_the_model(base):
    found, (training, _) = features_of(base, picture_folder(Path("photos"), 20))
    model = with_heads(found, Head(8, 0.5, 0.5), training, seed=0).eval()
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    tokens, ends = torch.randint(0, 9, (4, 5)), torch.full((4,), 4)
    with torch.inference_mode():
        for new, old in (
            (model.embed_images(images), found.model.embed_images(images)),
            (model.embed_texts(tokens, ends), found.model.embed_texts(tokens, ends)),
        ):
            torch.testing.assert_close(new, old, atol=1e-5, rtol=0)


def test_heads_keep_the_temperature_and_bias_of_a_trained_model(base):
    found, (training, _) = features_of(base, picture_folder(Path("photos"), 20))
    model = CLIP(SIZE, vocab_size=found.model.vocab_size, has_bias=True, scale=33.0)
    torch.nn.init.constant_(model.bias, -3.0)
    new = with_heads(replace(found, model=model), Head(8), training, seed=0)
    assert new.scale().item() == pytest.approx(33.0) and new.bias.item() == -3.0


def test_features_are_computed_once_and_continue_after_a_stop(base, monkeypatch):
    monkeypatch.setattr(feature_store, "SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr(feature_store, "IMAGES_AT_ONCE", 4)
    found, data = find_model(base), opened(picture_folder(Path("photos"), 40))
    embedder = Embedder(found.model.eval(), found.tokenizer, processor())
    with closing(compute_features(embedder, data, LOOKS)) as work:
        stopped = list(itertools.islice(work, 5))[-1]
    assert stopped.done > 0
    work = compute_features(embedder, data, LOOKS)
    assert next(work).done >= stopped.done
    training, validation = finished(work)
    assert next(compute_features(embedder, data, LOOKS), None) is None, "all is on disk"
    assert len(training.views) == 3 and len(validation.views) == 1
    pool = training.pool(
        Embedder(with_heads(found, Head(8), training, seed=0), None, processor()), training.rows
    )
    images = [data.training.image(index, 16) for index in range(data.training.num_pairs)]
    np.testing.assert_allclose(pool.image_NE, embedder.images(images), atol=2e-3)  # half precision
    np.testing.assert_allclose(pool.text_ME, embedder.texts(pool.captions), atol=2e-3)


def test_a_batch_depends_on_seed_and_step_alone(base):
    _, (training, _) = features_of(base, picture_folder(Path("photos"), 30))
    whole = training.batches(training.rows, batch_size=8, seed=1)
    later = training.batches(training.rows, batch_size=8, seed=1, first_step=3)
    for ours, theirs in zip(itertools.islice(whole, 3, 6), later, strict=False):
        assert np.array_equal(ours.images, theirs.images) and np.array_equal(ours.tokens, theirs.tokens)


def test_settings_are_judged_on_training_images_held_back(base, monkeypatch):
    monkeypatch.setattr(heads, "SWEEP_STEPS", 10)
    found, (training, _) = features_of(base, picture_folder(Path("photos"), 130))
    judged = finished(heads.sweep(found, training, TrainConfig(loss="softmax"), threads=1))
    assert judged[0].recall >= max(one.recall for one in judged) - heads.TOLERANCE
    assert {replace(one, recall=0.0) for one in judged} == set(heads.CANDIDATES)
    monkeypatch.setattr(heads, "fit", None)  # nothing is trained again
    assert finished(heads.sweep(found, training, TrainConfig(loss="softmax"), threads=1)) == judged


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--from", "nowhere"], "nowhere"),
        (["--image-tower", "efficientnet-lite0"], "needs both towers"),
        (
            ["--image-tower", "efficientnet", "--text-tower", "minilm"],
            "did you mean `efficientnet-lite0`",
        ),
        (["--from", "base", "--text-tower", "minilm"], "names a whole model"),
        (["--from", "base", "--image-size", "32"], "the pretrained model determines `--image-size`"),
        (["--tune", "lora"], "`--tune` needs a pretrained model"),
    ],
)
def test_a_wrong_start_is_refused(base, call, flags, said):
    picture_folder(Path("photos"), 20)
    ran = call("train", "photos", *flags)
    assert ran.returncode == 1 and said in ran.stderr


class Bomb:
    def __reduce__(self):
        return (Path("exploded").touch, ())


@pytest.mark.parametrize("content", [pickle.dumps(Bomb()), b"PK\3\4 and junk", b"", pickle.dumps({"a": 1})])
def test_a_hostile_file_of_weights_is_refused_and_executes_nothing(content):
    Path("weights.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"weights\.pt"):
        reading.load_pickled(Path("weights.pt"))
    assert not Path("exploded").exists()


@pytest.mark.parametrize(
    "encoder",
    [
        Encoder("shell", {}),
        Encoder("bert", {"width": 10**9}),
        Encoder("efficientnet-lite", {"blocks": [[1] * 5] * 3000}),
    ],
)
def test_implausible_towers_of_a_stranger_are_refused(encoder):
    size = replace(SIZE, text_encoder=encoder)
    with pytest.raises(UserError, match="cannot be loaded"):
        reading.check_numbers(Path("theirs"), size, 100)


def installed(name: str) -> bool:
    try:
        encoders.installed(name, encoders.PACKAGES[name])
    except UserError:
        return False
    return True


@pytest.mark.skipif(
    not (installed("efficientnet-lite0") and installed("minilm")), reason="packages not installed"
)
def test_towers_of_packages_compute_what_their_libraries_do():
    from transformers import AutoModel, AutoTokenizer

    found = encoders.compose("efficientnet-lite0", "minilm")
    folder = encoders.installed("minilm", encoders.PACKAGES["minilm"]).parent
    texts = ["A dog runs .", "two people in the snow, with a red sled"]
    words = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        layers = AutoModel.from_pretrained(folder)(**words, output_hidden_states=True).hidden_states
        kept = words["attention_mask"][..., None]
        means = [(layer * kept).sum(1) / kept.sum(1) for layer in layers]
        tokens, ends = map(torch.from_numpy, found.tokenizer.encode(texts, 128))
        ours = found.model.text(tokens, ends)
        torch.testing.assert_close(
            ours[:, : 5 * 384], torch.cat([means[0], *means[-4:]], 1), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(ours[0, -384:], layers[-1][0, : kept[0].sum()].amax(0), atol=1e-5, rtol=0)
        features = found.model.image(torch.full((1, 3, 224, 224), 127, dtype=torch.uint8))
    output = features[:, :2560]
    assert features.shape == (1, 2 * (1280 + 192 + 320)) and output.min() >= 0 and output.max() <= 6
