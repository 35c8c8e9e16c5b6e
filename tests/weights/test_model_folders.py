"""Model folders of lapclip and of Hugging Face: the same embeddings as where they come from, or a sentence."""

import functools
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from test_update import make_run
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from lapclip.embedder import load
from lapclip.errors import UserError
from lapclip.model.towers import PIXEL_MEAN, PIXEL_STD

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["a red house", "Two DOGS on a beach", "", "dogs " * 40, "house <|endoftext|> dogs"]
START, END = "<|startoftext|>", "<|endoftext|>"
PIXELS = np.random.default_rng(0).integers(0, 256, (5, 3, 24, 24), dtype=np.uint8)


@functools.cache
def tokenizer_json() -> str:
    """Built as OpenAI's: lower-cased, words that end in `</w>`, the end token with the highest id."""
    ending = {"end_of_word_suffix": "</w>"}
    pipeline = tokenizers.Tokenizer(models.BPE(**ending))
    pipeline.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False, **ending)
    pipeline.train_from_iterator(TEXTS[:2], trainer)
    pipeline.add_special_tokens([START, END])
    start, end = pipeline.token_to_id(START), pipeline.token_to_id(END)
    pipeline.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, start), (END, end)]
    )
    pipeline.enable_truncation(16)  # as files that were used for training keep it
    pipeline.enable_padding(pad_id=end, pad_token=END, length=16)
    return pipeline.to_str()


def clip_tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_json())


def save_clip(folder: Path, *, activation="quick_gelu", end_read_at: int | None = None):
    """A small CLIP of transformers with random weights, saved as people publish it."""
    from transformers import CLIPConfig, CLIPModel

    pipeline = clip_tokenizer()
    end = pipeline.token_to_id(END)
    shape = {"intermediate_size": 96, "hidden_size": 24, "num_hidden_layers": 2, "hidden_act": activation}
    theirs = CLIPModel(
        CLIPConfig(
            text_config={**shape, "num_attention_heads": 2, "vocab_size": end + 1, "max_position_embeddings": 16,
                         "eos_token_id": end_read_at or end, "bos_token_id": end - 1, "pad_token_id": end},
            vision_config={**shape, "num_attention_heads": 3, "image_size": 24, "patch_size": 8},
            projection_dim=20,
        )
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():  # its own initialisation leaves most biases at zero
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    theirs.save_pretrained(folder)
    pipeline.save(str(folder / "tokenizer.json"))
    return theirs


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip") / "theirs"
    return folder, save_clip(folder)


@pytest.fixture
def copy(clip, tmp_path) -> Path:
    """A folder that a test may spoil."""
    return Path(shutil.copytree(clip[0], tmp_path / "theirs"))


def assert_agree(embedder, theirs, atol=1e-5, mean=PIXEL_MEAN, std=PIXEL_STD) -> None:
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (mean, std))
    pipeline = clip_tokenizer()
    pipeline.encode_special_tokens = True
    tokens = torch.tensor([pipeline.encode(text).ids for text in TEXTS])
    pixels = (torch.from_numpy(PIXELS) / 255 - mean) / std
    with torch.no_grad():
        out = theirs(input_ids=tokens, pixel_values=pixels, attention_mask=torch.ones_like(tokens))
    np.testing.assert_allclose(embedder.pixels(PIXELS), out.image_embeds.numpy(), atol=atol)
    np.testing.assert_allclose(embedder.texts(TEXTS), out.text_embeds.numpy(), atol=atol)


def change(file: Path, **changes) -> None:
    content = json.loads(file.read_text())
    for key, value in changes.items():
        tower, _, name = key.partition("__")
        (content[f"{tower}_config"] if name else content)[name or key] = value
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(("activation", "end_read_at"), [("quick_gelu", 2), ("gelu", None)])
def test_a_clip_of_hugging_face_embeds_as_transformers_does(activation, end_read_at):
    theirs = save_clip(Path("theirs"), activation=activation, end_read_at=end_read_at)
    embedder = load("theirs")
    assert (embedder.name, embedder.image_size, embedder.width) == ("theirs", 24, 20)
    assert_agree(embedder, theirs)
    assert embedder.scale == pytest.approx(theirs.logit_scale.exp().item())


def test_half_precision_and_what_old_versions_wrote_are_read_too(clip, copy):
    tensors = {name: tensor.half() for name, tensor in load_file(copy / "model.safetensors").items()}
    tensors["text_model.embeddings.position_ids"] = torch.arange(16)
    save_file(tensors, copy / "model.safetensors")
    assert_agree(load(copy), clip[1], atol=1e-2)


def test_it_is_the_same_to_the_bit_as_a_model_folder_of_ours(copy):
    about = {"image_mean": PIXEL_MEAN, "image_std": PIXEL_STD, "rescale_factor": 1 / 255, "do_rescale": True}
    (copy / "preprocessor_config.json").write_text(json.dumps(about))
    before = load(copy)
    after = load(before.save(Path("ours")))
    assert after.fingerprint == before.fingerprint and after.name == "theirs"
    assert (after.pixels(PIXELS) == before.pixels(PIXELS)).all()
    assert (after.texts(TEXTS) == before.texts(TEXTS)).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "siglip2"}, "NaFlex"),
        ({"model_type": "blip"}, "`blip`"),
        ({"text__intermediate_size": 97}, "describes 42,243 parameters"),
        ({"vision__layer_norm_eps": 1e-6}, "layer_norm_eps` of the text tower is 1e-05, not 1e-06"),
        ({"vision__hidden_act": "gelu_new"}, "tower is 'gelu_new', not 'gelu' or 'quick_gelu'"),
        ({"text__hidden_act": "gelu"}, "text tower is 'gelu', not 'quick_gelu'"),
        ({"vision__num_channels": 1}, "tower is 1, not 3"),
        ({"vision__num_attention_heads": 5}, "24 is not a multiple of 5 heads"),
        ({"vision__patch_size": 7}, "multiple of patch size 7"),
        ({"vision__image_size": 1024, "vision__patch_size": 1}, "1,048,576 patches"),
        ({"text__eos_token_id": 7}, "pooled at token 7"),
        ({"text__vocab_size": 100}, "only 100 tokens"),
        ({"vision__hidden_size": 7998, "vision__intermediate_size": 31992}, "parameters, and `model.safetensors` holds"),
        ({"vision__num_hidden_layers": 10**9}, "depth of the image tower is 1000000000"),
        ({"text__max_position_embeddings": -1}, "text_length is -1"),
        ({"text__hidden_size": None}, "width of the text tower is None"),
        ({"projection_dim": True}, "embedding is True"),
        ({"projection_dim": 10}, r"is \[20, 24\], not \[10, 24\]"),
        ({"text__num_hidden_layers": 1}, "is not in this model"),
    ],
)  # fmt: skip
def test_what_the_towers_cannot_express_is_refused_by_name(copy, changes, said):
    change(copy / "config.json", **changes)
    with pytest.raises(UserError, match=said):
        load(copy)


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000, "\xff"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "preprocessor_config.json"])
def test_a_broken_file_is_named(copy, file, content):
    (copy / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=file):
        load(copy)


def test_a_truncated_or_poisoned_file_of_weights_is_named(copy):
    file = copy / "model.safetensors"
    tensors, whole = load_file(file), file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"cannot read .*model\.safetensors"):
        load(copy)
    for scale, said in ((float("nan"), "not finite"), (1, "`logit_scale` holds I64")):
        save_file(tensors | {"logit_scale": torch.tensor(scale)}, file)
        with pytest.raises(UserError, match=said):
            load(copy)


@pytest.mark.parametrize(
    "about",
    [{"image_mean": [1, 2]}, {"image_std": ["a"] * 3}, {"image_std": [0] * 3}, {"rescale_factor": 10**400}],
)
def test_images_that_are_normalised_by_other_than_three_numbers_are_refused(copy, about):
    (copy / "preprocessor_config.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="three means and standard deviations"):
        load(copy)


@pytest.mark.parametrize(
    ("file", "about", "mean", "std"),
    [("preprocessor_config.json", {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}, [0.5, 0.4, 0.3], [0.5, 0.6, 0.7]),
     ("processor_config.json", {"image_processor": {"do_normalize": False, "do_rescale": False}}, [0.0] * 3, [1 / 255] * 3)],
)  # fmt: skip
def test_another_normalisation_becomes_other_patch_weights(clip, copy, file, about, mean, std):
    (copy / file).write_text(json.dumps(about))
    assert_agree(load(copy), clip[1], mean=mean, std=std)


@pytest.mark.parametrize(
    ("gone", "instead", "said"),
    [
        ("model.safetensors", "pytorch_model.bin", "cannot read .*pytorch_model.bin"),
        ("model.safetensors", "README.md", "no `model.safetensors`"),
        ("tokenizer.json", "vocab.json", "no `tokenizer.json`"),
        ("model.safetensors", None, "safetensors.* not a regular file"),
        ("tokenizer.json", None, "tokenizer.json.* not a regular file"),
    ],
)
def test_a_folder_without_what_is_needed_says_how_to_get_it(copy, gone, instead, said):
    (copy / gone).rename(copy / (instead or "elsewhere"))
    if instead is None:
        os.mkfifo(copy / gone)  # which must not be waited for
    with pytest.raises(UserError, match=said):
        load(copy)


def test_a_file_with_holes_takes_no_memory(copy):
    wide = {"hidden_size": 8190, "intermediate_size": 4 * 8190, "num_hidden_layers": 128}
    change(copy / "config.json", **{f"vision__{name}": number for name, number in wide.items()})
    num_bytes = 10**12
    tensor = {"dtype": "F16", "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}
    header = json.dumps({"a": tensor}).encode()
    with (copy / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)
    with pytest.raises(UserError, match="GB of memory"):
        load(copy)


@pytest.mark.parametrize(
    ("part", "content", "said"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"},
                        "content": "aa"}] * 40}, "times as long"),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 2000}, "times as long"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "is not a tokenizer"),
        ("post_processor", None, "one start and one end"),
        ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}, "cannot encode every text"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_explodes_or_gives_up_is_refused(copy, part, content, said):
    change(copy / "tokenizer.json", **{part: content})
    with pytest.raises(UserError, match=said):
        load(copy)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["size", "image", "width"], 10**12, "width of the image tower"),
        (["size", "image", "depth"], 100, "describes"),
        (["size", "image", "heads"], 5, "multiple of 5 heads"),
        (["size", "activation"], "evil", "`evil`, which is not known"),
        (["size", "pre_norm"], 3, "not valid: Expected `bool`"),
        (["size", "text"], None, "not valid"),
        (["tokens", "end"], 10**9, "ids up to"),
        (["has_bias"], True, "describes"),
    ],
)
def test_a_model_folder_of_ours_that_was_tampered_with_is_refused(clip, path, value, said):
    load(clip[0]).save(Path("ours"))
    about = json.loads(Path("ours/model.json").read_text())
    *above, last = path
    place = about
    for key in above:
        place = place[key]
    place[last] = value
    Path("ours/model.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=said):
        load("ours")


def changed(file: str, old: str, new: str):
    return lambda run: (run / file).write_text((run / file).read_text().replace(old, new, 1))


def poison(run: Path) -> None:
    (weights,) = run.rglob("model.safetensors")
    (weights.parent / "state").mkdir()
    (weights.parent / "state/progress.json").write_text("{}")
    save_file({name: tensor * float("nan") for name, tensor in load_file(weights).items()}, weights)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda run: change(run / "tokenizer.json", normalizer={"type": "Prepend", "prepend": "a" * 2000}), "times as long"),
        (changed("tokenizer.json", '"b": 69', '"b": 70000'), "ids up to 70,000"),
        (changed("config.toml", '"nano"', '"nano"\ntext_length = 100000000'), "text_length.* is 100000000"),
        (changed("config.toml", '"nano"', '"large"'), "describes [0-9,]{11} parameters, and"),
        (poison, "not finite"),
    ],
)  # fmt: skip
def test_a_run_of_a_stranger_is_loaded_and_resumed_as_carefully_as_a_model_folder(spoil, said, call):
    make_run(Path("runs/theirs"), seed=0)
    load("theirs")
    spoil(Path("runs/theirs"))
    with pytest.raises(UserError, match=said):
        load("theirs")
    resumed = call("train", "--resume", "theirs")
    assert resumed.returncode == 1 and re.search(said, resumed.stderr.replace("\n", " ")), resumed.stderr
