"""Encoders in ONNX files as frozen towers."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import picture_folder
from onnx import TensorProto, helper
from tokenizers.processors import TemplateProcessing
from torch import nn

import lapclip
from lapclip.data.tokenizer import SPECIAL, train_bpe
from lapclip.errors import UserError
from lapclip.files import cache_folder
from lapclip.finetune import encoders
from lapclip.model.encoders import Bert, EfficientNetLite, Encoder, read_out

SIDE, LENGTH = 288, 128
IMAGES = torch.randint(0, 256, (3, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.manual_seed(0))
TEXTS = ["a red cat", "an old dog under the green tree, number 3", ""]
BOTH = ("--image-tower", "image.onnx", "--text-tower", "text.onnx")


class Map(nn.Module):
    """What `EfficientNetLite` computes of normalised pixels before it pools, [B, D, h, w]."""

    def __init__(self, model: EfficientNetLite):
        super().__init__()
        self.body = nn.Sequential(model.stem, nn.ReLU6(), model.blocks, model.head, nn.ReLU6())

    def forward(self, pixels):
        return self.body(pixels)


class LastLayer(nn.Module):
    def __init__(self, model: Bert):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        x = self.model.norm(self.model.embed(input_ids) + self.model.positions[: input_ids.shape[1]])
        for block in self.model.blocks:
            x = block(x, attention_mask[:, None, None].bool())
        return x


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The same two encoders in torch and, with dynamic and with fixed sizes, as ONNX files."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("encoders")
    tokenizer = train_bpe(["red green blue old new cat dog tree number 1 2 3"], 400).pipeline
    ends = [(name, tokenizer.token_to_id(name)) for name in (SPECIAL[1], SPECIAL[2])]
    tokenizer.post_processor = TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"image_mean": [127 / 255] * 3, "image_std": [128 / 255] * 3, "size": {"shortest_edge": 320}}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    image = EfficientNetLite(8, [[8, 8, 8, 3, 2], [8, 32, 16, 5, 2]], 24).eval()
    text = Bert(16, 2, 2, 32, tokenizer.get_vocab_size(), LENGTH, 1e-12).eval()
    tokens, names = torch.ones(1, LENGTH, dtype=torch.long), ["input_ids", "attention_mask"]
    for prefix, axes in (("", ({0: "batch"}, {0: "batch", 1: "tokens"})), ("fixed-", ({}, {}))):
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter(
                "ignore"
            )  # of the exporter: about itself, and about Python code that it unrolls
            for module, inputs, name, named, dynamic in (
                (Map(image), (torch.zeros(1, 3, SIDE, SIDE),), "image", ["pixels"], axes[0]),
                (LastLayer(text), (tokens, tokens), "text", names, axes[1]),
            ):
                changing = {one: dynamic for one in named if dynamic}
                file = folder / f"{prefix}{name}.onnx"
                torch.onnx.export(
                    module, inputs, file, dynamo=False, input_names=named, dynamic_axes=changing
                )
    return folder, image, text


@pytest.fixture
def here(made):
    """The files in the present folder."""
    shutil.copytree(made[0], ".", dirs_exist_ok=True)


def graph(
    file: str, *, inputs: tuple[str, ...] = ("pixels",), side: int | str = 32, external: str | None = None
) -> str:
    """The mean of the first input, [B, 3], plus a weight."""
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [3], np.zeros(3, np.float32).tobytes(), raw=True)
    if external:
        Path(external).write_bytes(weight.raw_data)
        onnx.external_data_helper.set_external_data(weight, external)
        weight.ClearField("raw_data")
    nodes = [
        helper.make_node("GlobalAveragePool", inputs[:1], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("Add", ["flat", "weight"], ["out"]),
    ]
    shaped = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3, side, side]) for name in inputs
    ]
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", 3])
    whole = helper.make_graph(nodes, "graph", shaped, [out], [weight])
    model = helper.make_model(whole, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    Path(file).write_bytes(model.SerializeToString())
    return file


@pytest.mark.parametrize("prefix", ["", "fixed-"])
def test_features_are_those_of_the_same_encoder_in_torch(here, made, prefix):
    _, image, text = made
    found = encoders.compose(f"{prefix}image.onnx", f"{prefix}text.onnx")
    assert found.model.size.image_size == SIDE
    tokens, ends = map(torch.from_numpy, found.tokenizer.encode(TEXTS, found.model.size.text_length))
    kept = torch.arange(tokens.shape[1]) <= ends[:, None]
    with torch.inference_mode():
        expected = read_out([LastLayer(text)(tokens, kept)], kept)
        assert expected.shape == (3, 2 * 16), "mean and maximum"
        torch.testing.assert_close(found.model.text(tokens, ends), expected, atol=1e-3, rtol=0)
        torch.testing.assert_close(found.model.image(IMAGES), image(IMAGES), atol=1e-3, rtol=0)


def test_one_vector_per_image_is_used_as_it_is(here):
    Path("preprocessor_config.json").unlink()
    found = encoders.compose(graph("any.onnx", side="side"), "text.onnx")
    images = IMAGES[:, :, :224, :224]
    expected = (images.double().mean((2, 3)) / 255 - torch.tensor([0.4815, 0.4578, 0.4082])) / 0.27
    assert found.model.size.image_size == 224
    torch.testing.assert_close(found.model.image(images).double(), expected, atol=0.02, rtol=0.05)


@pytest.mark.slow
def test_heads_on_two_files_are_trained_loaded_and_used(here, call):
    picture_folder(Path("photos"), 24)
    ran = call("train", "photos", *BOTH, "--run", "mine", "--steps", "4")
    assert ran.returncode == 0, ran.stderr
    for name in ("image.onnx", "text.onnx"):
        Path(name).unlink()  # it is kept in the cache folder
    model = lapclip.load("mine")
    rows = np.concatenate([model.images(["photos/00.jpg", "photos/01.jpg"]), model.texts(TEXTS)])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    program = (
        "import sys, numpy as np, lapclip; model = lapclip.load(lapclip.load('mine').save('saved'));"
        "images = model.images(['photos/00.jpg', 'photos/01.jpg']);"
        "np.save('rows.npy', np.concatenate([images, model.texts(eval(sys.argv[1]))]))"
    )
    subprocess.run([sys.executable, "-c", program, repr(TEXTS)], check=True)
    np.testing.assert_array_equal(np.load("rows.npy"), rows)
    for flags, said in (
        (("train", "photos", "--from", "mine", "--tune", "lora"), "which cannot be trained"),
        (("export", "mine", "--to", "hf", "--out", "out"), "has no place for frozen encoders"),
    ):
        refused = call(*flags)
        assert refused.returncode == 1 and said in " ".join(refused.stderr.split())
    kept = sorted((cache_folder() / "onnx").iterdir())
    assert len(kept) == 2
    kept[0].write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"needs the file `(image|text)\.onnx`"):
        lapclip.load("mine")
    shutil.rmtree(cache_folder() / "onnx")  # as on another machine
    with pytest.raises(UserError, match=r"needs the file `image\.onnx`") as caught:
        lapclip.load("saved")
    assert str(kept[0]) in caught.value.hint or str(kept[1]) in caught.value.hint


@pytest.mark.parametrize("tower", ["--image-tower", "--text-tower"])
def test_a_file_that_is_not_onnx_is_refused_and_not_kept(here, call, tower):
    Path("other.onnx").write_text("this is not ONNX")
    towers = {BOTH[0]: BOTH[1], BOTH[2]: BOTH[3]} | {tower: "other.onnx"}
    ran = call(
        "train", str(picture_folder(Path("photos"), 4)), *(word for pair in towers.items() for word in pair)
    )
    assert ran.returncode == 1 and "`other.onnx` cannot be used" in ran.stderr, ran.stderr
    assert len(list((cache_folder() / "onnx").glob("*"))) == (tower == "--text-tower"), (
        "the other tower alone"
    )


def test_files_that_are_no_encoders_are_refused(here):
    for file, said in (
        (graph("two.onnx", inputs=("pixels", "more")), "its inputs are `pixels`, `more`, not only images"),
        (graph("huge.onnx", side=4096), "4,096 pixels"),
        ("text.onnx", "its inputs are `input_ids`, `attention_mask`"),
        ("imag.onnx", "did you mean `image.onnx`"),
        (graph("apart.onnx", external="weights.bin"), "External data"),
    ):
        with pytest.raises(UserError, match=said):
            encoders.find_image(file)
    assert not list((cache_folder() / "onnx").glob("*")), "what is refused is not kept"
    with pytest.raises(UserError, match="its inputs are `pixels`"):
        encoders.compose("image.onnx", "image.onnx")
    Path("tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no `tokenizer\.json` beside it"):
        encoders.compose("image.onnx", "text.onnx")


def test_a_strangers_model_opens_no_file_that_this_user_has_not_named(here, monkeypatch):
    found = encoders.compose("image.onnx", "text.onnx")
    folder = lapclip.embedder.Embedder(found.model, found.tokenizer, lapclip.machine.device.processor()).save(
        "theirs"
    )
    lapclip.load(folder)
    described = json.loads((folder / "model.json").read_text())
    text = described["size"]["text_encoder"]["numbers"]["sha256"]
    opened = []
    sys.addaudithook(lambda event, given: opened.append(given[0]) if event == "open" else None)
    for sha256, said in (
        ("0" * 64, "not in the cache folder"),
        ("../" * 9 + str(Path("image.onnx").absolute()), "not named by a hash"),
        (text, "its inputs are"),  # named, but as a text tower
    ):
        described["size"]["image_encoder"]["numbers"]["sha256"] = sha256
        (folder / "model.json").write_text(json.dumps(described))
        opened.clear()
        with pytest.raises(UserError, match=said):
            lapclip.load(folder)
        assert [Path(str(path)).stem for path in opened if str(path).endswith(".onnx")] == [text] * (
            sha256 == text
        )


def test_without_the_package_the_install_command_is_named(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match="`onnxruntime` is not installed") as caught:
        encoders.compose("image.onnx", "text.onnx")
    assert "install 'lapclip[onnx]'" in caught.value.hint


def test_the_description_of_a_file_holds_no_path(here):
    Path("deep").mkdir()
    shutil.copy("image.onnx", "deep")
    encoder = encoders.compose("deep/image.onnx", "text.onnx").model.size.image_encoder
    assert isinstance(encoder, Encoder) and encoder.numbers["name"] == "image.onnx"
    assert encoder.numbers["mean"] == [127] * 3, "of the file one folder above"
