"""Models of transformers and OpenCLIP, in and out: from an image file and a text to the same embeddings as there."""

import functools
import importlib.util
import json
import os
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from test_model_folders import END, START, TEXTS, clip_tokenizer, save_clip, tokenizer_json
from test_update import make_run
from tokenizers import Tokenizer, processors

from lapclip.config import ModelConfig, load_config
from lapclip.data.decode import RESIZES
from lapclip.data.tokenizer import Tokenizer as Tokens
from lapclip.data.tokenizer import train_tokenizer
from lapclip.embedder import Embedder, load
from lapclip.errors import UserError
from lapclip.export.folders import export
from lapclip.finetune.prepare import find_pretrained
from lapclip.machine.device import device_named
from lapclip.model.blocks import Shape
from lapclip.model.clip import CLIP, openai, shape_of
from lapclip.model.towers import PIXEL_MEAN, PIXEL_STD
from lapclip.weights.reading import read_run

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = [(101, 64), (37, 90), (24, 24), (95, 71)]  # with odd margins, so that half pixels count


@functools.cache
def pictures() -> list[Image.Image]:
    random = np.random.default_rng(1)
    small = [Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8)) for _ in SIZES]
    return [one.resize(size, Image.Resampling.BICUBIC) for one, size in zip(small, SIZES, strict=True)]


def image_files() -> list[Path]:
    files = []
    for number, picture in enumerate(pictures()):
        files.append(Path(f"{number}.{'jpg' if number % 2 else 'png'}"))
        picture.save(files[-1], quality=95)
    return files


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def siglip_tokenizer() -> Tokenizer:
    pipeline = clip_tokenizer()
    pipeline.no_padding()
    pipeline.no_truncation()
    ids = [(END, pipeline.token_to_id(END))]
    pipeline.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=ids)
    return pipeline


def save_siglip(folder: Path, **numbers) -> torch.nn.Module:
    from transformers import SiglipConfig, SiglipModel

    shape = {"hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2} | numbers
    size = {"max_position_embeddings": 16, "vocab_size": clip_tokenizer().get_vocab_size()}
    config = SiglipConfig(
        text_config={**shape, "num_attention_heads": 2, **size},
        vision_config={**shape, "num_attention_heads": 3, "image_size": 24, "patch_size": 8},
    )
    theirs = randomize(SiglipModel(config))
    theirs.save_pretrained(folder)
    siglip_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": START}))
    about = {
        "size": {"height": 24, "width": 24},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    return theirs


def rows_of_transformers(
    theirs: torch.nn.Module, folder: Path, files: list[Path]
) -> tuple[np.ndarray, np.ndarray]:
    """As its own classes compute them from the files of a folder."""
    from transformers import CLIPImageProcessorPil, PreTrainedTokenizerFast, SiglipImageProcessorPil

    is_siglip = theirs.config.model_type == "siglip"
    processor = (SiglipImageProcessorPil if is_siglip else CLIPImageProcessorPil).from_pretrained(folder)
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END, pad_token=END
    )
    if (folder / "tokenizer_config.json").exists():
        words = PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = words(
        TEXTS[:3], padding="max_length", max_length=16, truncation=True, return_tensors="pt"
    ).input_ids
    pixels = processor([Image.open(file).copy() for file in files], return_tensors="pt").pixel_values
    with torch.no_grad():
        out = theirs(input_ids=tokens, pixel_values=pixels)
    return out.image_embeds.numpy(), out.text_embeds.numpy()


def assert_same(embedder: Embedder, theirs: tuple[np.ndarray, np.ndarray], files: list[Path]) -> None:
    np.testing.assert_allclose(embedder.texts(TEXTS[:3]), theirs[1], atol=1e-4)
    np.testing.assert_allclose(embedder.images(files), theirs[0], atol=1e-4)


def their_clip(folder: Path) -> torch.nn.Module:
    theirs = save_clip(folder)
    about = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    return theirs


@pytest.mark.parametrize("make", [their_clip, save_siglip])
def test_files_and_texts_embed_as_in_transformers_and_again_after_an_export(make):
    from transformers import AutoModel

    theirs, files = make(Path("theirs")), image_files()
    embedder = load("theirs")
    assert_same(embedder, rows_of_transformers(theirs, Path("theirs"), files), files)
    assert (load(embedder.save("ours")).texts(TEXTS) == embedder.texts(TEXTS)).all()
    done = export(embedder, "hf", Path("again"))
    assert done.measured["parity"]["min_cosine"] > 0.99999 and not done.notes
    again = AutoModel.from_pretrained("again").eval()
    assert_same(embedder, rows_of_transformers(again, Path("again"), files), files)
    with pytest.raises(UserError, match="already exists"):
        export(embedder, "hf", Path("again"))


NUMBERS = {
    "embed_dim": 20, "quick_gelu": True,
    "vision_cfg": {"image_size": 24, "patch_size": 8, "layers": 2, "width": 24, "head_width": 8, "mlp_ratio": 3.0},
    "text_cfg": {"context_length": 16, "width": 24, "heads": 2, "layers": 2},
}  # fmt: skip


def save_open_clip(folder: Path, **changes) -> dict:
    """The tensors of a small CLIP with OpenAI's names, without OpenCLIP: random, of the shapes it would have."""
    embedder = load_small()
    export(embedder, "openclip", folder)
    about = json.loads((folder / "open_clip_config.json").read_text())
    about["model_cfg"] |= changes
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    return load_file(folder / "open_clip_model.safetensors")


def load_small() -> Embedder:
    save_clip(Path("small"))
    return load("small")


@pytest.mark.skipif(not importlib.util.find_spec("open_clip"), reason="needs `pip install open_clip_torch`")
@pytest.mark.parametrize(("is_quick", "mode"), [(True, "shortest"), (False, "squash")])
def test_files_and_texts_embed_as_in_open_clip_and_again_after_an_export(is_quick, mode):
    import open_clip

    pipeline = clip_tokenizer()
    text = NUMBERS["text_cfg"] | {"vocab_size": pipeline.get_vocab_size(), "hf_tokenizer_name": "this"}
    config = NUMBERS | {"quick_gelu": is_quick, "text_cfg": text, "init_logit_bias": -10}
    theirs, files = randomize(open_clip.CLIP(**config)), image_files()
    images = {
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.3, 0.4],
        "resize_mode": mode,
        "interpolation": "bicubic",
    }
    Path("theirs").mkdir()
    Path("theirs/open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": images})
    )
    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in theirs.state_dict().items()}},
        "theirs/open_clip_pytorch_model.bin",
    )
    pipeline.save("theirs/tokenizer.json")
    special = {
        "eos_token": END,
        "pad_token": END,
        "bos_token": START,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    Path("theirs/tokenizer_config.json").write_text(json.dumps(special))
    embedder = load("theirs")
    export(embedder, "openclip", Path("again"))
    for folder in ("theirs", "again"):
        model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
        words = open_clip.get_tokenizer(f"local-dir:{folder}")
        with torch.no_grad():
            pixels = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
            rows = (
                model.eval().encode_image(pixels, normalize=True).numpy(),
                model.encode_text(words(TEXTS[:3]), normalize=True).numpy(),
            )
        assert_same(embedder, rows, files)


@pytest.mark.skipif(not importlib.util.find_spec("open_clip"), reason="needs `pip install open_clip_torch`")
def test_the_vocabulary_of_an_installed_open_clip_is_found_and_encodes_as_there():
    import open_clip

    from lapclip.weights.open_clip import find_tokenizer

    texts = ["A  red House!", "it's 42 DOGS", "été à la plage, 日本 \u2603", "dogs " * 40, ""]
    ours = find_tokenizer(Path())
    frame = ours.pipeline.encode("", add_special_tokens=True).ids
    theirs = open_clip.get_tokenizer("ViT-B-32")(texts)
    for row, ids in zip(theirs.tolist(), ours.ids(texts), strict=True):
        expected = [frame[0], *ids[:75], frame[1]]
        assert row == expected + [0] * (77 - len(expected))


def test_a_file_of_openai_needs_no_config_and_others_are_not_guessed():
    start, end = (clip_tokenizer().token_to_id(token) for token in (START, END))
    size = replace(
        openai(Shape(64, 2, 1), Shape(64, 2, 1), 8, 20), image_size=24, text_length=16, resize="crop-rounded"
    )
    model, device = randomize(CLIP(size, vocab_size=end + 1)), device_named("cpu")
    embedder = Embedder(model, Tokens(clip_tokenizer(), start=start, end=end, pad=end), device)
    export(embedder, "openclip", Path("folder"))
    tensors = load_file("folder/open_clip_model.safetensors")
    Path("bare").mkdir()
    Path("folder/tokenizer.json").rename("bare/tokenizer.json")
    sign = {"input_resolution": 24, "context_length": 16, "vocab_size": 400}
    save_file(
        tensors | {name: torch.tensor(number) for name, number in sign.items()}, "bare/mine.safetensors"
    )
    torch.save(tensors, "bare/ViT-B-32.pt")
    for file in ("mine.safetensors", "ViT-B-32.pt"):
        found = load(Path("bare", file))
        np.testing.assert_allclose(found.texts(TEXTS), embedder.texts(TEXTS), atol=1e-5)
        np.testing.assert_allclose(found.images(image_files()), embedder.images(image_files()), atol=1e-5)
    Path("bare/mine.safetensors").unlink()
    Path("bare/ViT-B-32.pt").rename("bare/mine.pt")
    with pytest.raises(UserError, match="GELU or QuickGELU"):
        load("bare")
    with pytest.raises(UserError, match=r"has no `tokenizer.json`"):
        load_without_packages("folder")


def load_without_packages(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        load(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"vision_cfg": {"timm_model_name": "vit_base"}},
            "`timm_model_name` of the image tower is 'vit_base'",
        ),
        ({"text_cfg": {"no_causal_mask": True}}, "`no_causal_mask` of the text tower is True"),
        ({"text_cfg": {"hf_model_name": "roberta"}}, "'roberta', which means another architecture"),
        ({"vision_cfg": {"head_width": "a"}}, "not describe a CLIP"),
        ({"vision_cfg": {"head_width": 0}}, "not describe a CLIP"),
        ({"text_cfg": {"heads": 10**9}}, "heads of the text tower is 1000000000"),
        ({"vision_cfg": [7]}, "not describe a CLIP"),
        ({"text_cfg": 7}, "not describe a CLIP"),
    ],
)
def test_a_config_of_open_clip_that_the_towers_cannot_express_is_refused(changes, said):
    save_open_clip(Path("folder"), **changes)
    with pytest.raises(UserError, match=said):
        load("folder")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_hostile_or_broken_file_of_weights_executes_nothing_and_is_refused():
    tensors = save_open_clip(Path("folder"))
    Path("folder/open_clip_model.safetensors").unlink()
    file = Path("folder/open_clip_pytorch_model.bin")

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def script() -> None:
        with warnings.catch_warnings(action="ignore"):
            torch.jit.script(Module()).save(str(file))

    def compressed() -> None:
        torch.save(tensors, "plain")
        with zipfile.ZipFile("plain") as plain, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
            for part in plain.infolist():
                packed.writestr(part.filename, plain.read(part))

    def cut() -> None:
        torch.save(tensors, file)
        file.write_bytes(file.read_bytes()[:5000])

    wrong = {
        "Weights only load failed|cannot read": lambda: torch.save({"a": Bomb()}, file),
        "TorchScript": script,
        "is compressed": compressed,
        "cannot read": cut,
        "not a table of tensors": lambda: torch.save([torch.zeros(1)], file),
        "holds torch.int64, not floats": lambda: torch.save(tensors | {"logit_scale": torch.tensor(1)}, file),
        "is not a table": lambda: torch.save(
            tensors | {"logit_scale": torch.tensor(1.0, device="meta")}, file
        ),
        "table of tensors by name": lambda: torch.save(tensors | {"logit_scale": "1"}, file),
        "not finite": lambda: torch.save(tensors | {"logit_scale": torch.tensor(float("nan"))}, file),
        "is of another model": lambda: torch.save(tensors | {"ln_final.bias": torch.zeros(50)}, file),
        "not describe": lambda: torch.save({"a": torch.zeros(1)}, file),
        "GB of memory": lambda: (file.write_bytes(b""), os.truncate(file, 10**13)),
    }
    for said, write in wrong.items():
        write()
        with pytest.raises(UserError, match=said):
            load("folder")
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    load("folder")
    assert not Path("exploded").exists()


def test_vocab_and_merges_are_read_as_transformers_reads_them_where_there_is_no_tokenizer_json():
    from transformers import CLIPTokenizer

    save_clip(Path("theirs"))
    about = json.loads(tokenizer_json())["model"]
    Path("theirs/tokenizer.json").unlink()
    words, merges = clip_tokenizer().get_vocab(), [tuple(pair) for pair in about["merges"]]
    Path("theirs/vocab.json").write_text(json.dumps(words))
    Path("theirs/merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]))
    texts = ["It's 42 Dogs,  on\ta\nbeach!", "", "\u00e9t\u00e9"]
    tokenizer = load("theirs").tokenizer
    assert [[tokenizer.start, *ids, tokenizer.end] for ids in tokenizer.ids(texts)] == CLIPTokenizer(
        words, merges
    )(texts).input_ids
    Path("theirs/merges.txt").write_text("a b c")
    with pytest.raises(UserError, match="are no vocabulary"):
        load("theirs")


@pytest.mark.parametrize("resize", RESIZES[1:])
@pytest.mark.parametrize("turned", range(1, 9))
def test_an_image_is_resized_as_others_do_however_its_camera_was_held(resize, turned):
    from PIL import ImageOps

    from lapclip.data.images import decode_as_trained

    side, picture = 24, pictures()[1].resize((46, 87))
    exif = Image.Exif()
    exif[0x0112] = turned
    picture.save("turned.png", exif=exif)
    upright = ImageOps.exif_transpose(Image.open("turned.png").copy())
    by = Image.Resampling.BILINEAR if "bilinear" in resize else Image.Resampling.BICUBIC
    width, height = upright.size
    if resize.startswith("squash"):
        expected = upright.resize((side, side), by)
    else:
        long = int(side * 87 / 46)
        whole = upright.resize((long, side) if width > height else (side, long), by)
        margin = round((long - side) / 2) if "rounded" in resize else (long - side) // 2
        left, top = (margin, 0) if width > height else (0, margin)
        expected = whole.crop((left, top, left + side, top + side))
    found = decode_as_trained(Path("turned.png").read_bytes(), side, resize).pixels
    assert np.abs(found.astype(int) - np.asarray(expected).transpose(2, 0, 1)).max() <= 1


def test_a_run_is_exported_for_open_clip_with_the_same_embeddings_and_not_for_transformers(call):
    make_run(Path("runs/mine"), seed=0)
    done = call("export", "mine", "--to", "openclip", "--out", "out", "--json")
    result = json.loads(done.stdout)
    assert result["parity"]["min_cosine"] > 0.9999 and result["parity"]["top1_agreement"] == 1
    assert result["bytes"] > 1000 and result["latency_ratio"] > 0 and "one step" in result["notes"][0]
    np.testing.assert_allclose(load("out").texts(TEXTS), load("mine").texts(TEXTS), atol=1e-4)
    refused = call("export", "mine", "--to", "hf", "--out", "other")
    assert refused.returncode == 1 and "norm before its first block" in refused.stderr
    assert "--to openclip" in refused.stderr and not Path("other").exists()


def test_a_residual_network_is_not_exported_but_saved_and_loaded(tmp_path):
    tokenizer = train_tokenizer("bpe", [*TEXTS], 300)
    model = CLIP(shape_of(ModelConfig()), vocab_size=tokenizer.vocab_size).eval()
    embedder = Embedder(model, tokenizer, device_named("cpu"))
    with pytest.raises(UserError, match="residual network") as refused:
        export(embedder, "openclip", tmp_path / "other")
    assert "--size tiny" in refused.value.hint and not (tmp_path / "other").exists()
    with pytest.raises(UserError, match="transformers has no place for a residual network") as refused:
        export(embedder, "hf", tmp_path / "other")
    assert "--to openclip" in refused.value.hint, "which has a place for `tiny`, as transformers has not"
    embedder.save(tmp_path / "saved")
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 64, 64), dtype=np.uint8)
    saved = load(tmp_path / "saved")
    assert np.array_equal(saved.texts(TEXTS), embedder.texts(TEXTS))
    np.testing.assert_allclose(saved.pixels(images), embedder.pixels(images), atol=1e-6)


@pytest.mark.parametrize("kind", ["bpe", "characters"])
def test_biases_and_a_tokenizer_of_ours_have_the_same_effect_in_transformers(kind):
    """CLIPModel has no such biases, and reads texts elsewhere if the end token is 2, as it is here."""
    from transformers import AutoModel, AutoTokenizer

    shapes = Shape(24, 2, 3), Shape(24, 2, 2, hidden=50)
    size = replace(
        openai(*shapes, 8, 20), image_size=24, text_length=16, patch_bias=True, projection_bias=True
    )
    tokenizer = train_tokenizer(kind, TEXTS, 300)
    model = randomize(CLIP(size, vocab_size=tokenizer.vocab_size, has_bias=True))
    embedder = Embedder(model, tokenizer, device_named("cpu"))
    done = export(embedder, "hf", Path("out"))
    assert done.measured["parity"]["min_cosine"] > 0.9999 and "sigmoid loss" in done.notes[0]
    words = AutoTokenizer.from_pretrained("out")
    tokens = words(TEXTS[:3], padding="max_length", truncation=True, return_tensors="pt").input_ids
    pixels = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    normalised = (pixels / 255 - torch.tensor(PIXEL_MEAN)[:, None, None]) / torch.tensor(PIXEL_STD)[
        :, None, None
    ]
    with torch.no_grad():
        out = AutoModel.from_pretrained("out").eval()(input_ids=tokens, pixel_values=normalised)
    np.testing.assert_allclose(embedder.texts(TEXTS[:3]), out.text_embeds.numpy(), atol=1e-4)
    np.testing.assert_allclose(embedder.pixels(pixels.numpy()), out.image_embeds.numpy(), atol=1e-4)


@pytest.mark.parametrize("make", [their_clip, save_siglip])
def test_a_run_that_starts_from_a_model_of_others_keeps_how_texts_start_end_and_are_padded(make):
    make(Path("theirs"))
    _, base = find_pretrained(load_config(flags={"base": "theirs"}))
    Path("tokenizer.json").write_text(base.tokenizer.to_json())
    again = read_run(Path(), base.model.size)
    for one, other in zip(again.encode(TEXTS, 16), base.tokenizer.encode(TEXTS, 16), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_text_that_is_too_long_is_said_once():
    embedder = load_small()
    with pytest.warns(UserWarning, match="more than 16 tokens") as said:
        embedder.texts(["dogs " * 40] * 3)
        embedder.texts(["dogs " * 40])
    assert len(said) == 1


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["clip", "siglip", "ViT-B-32-quickgelu", "ViT-B-16"])
def test_published_shapes_embed_as_in_their_programs(kind):
    """With random weights: 224 pixels, twelve layers, whole vocabularies."""
    picture = pictures()[0].resize((640, 427))
    picture.save("photo.jpg", quality=95)
    picture = Image.open("photo.jpg").copy()
    Path("theirs").mkdir()
    pipeline = siglip_tokenizer() if kind == "siglip" else clip_tokenizer()
    pipeline.no_padding()
    pipeline.no_truncation()
    end = pipeline.token_to_id(END)
    rows, length = [pipeline.encode(text).ids for text in TEXTS[:3]], 64 if kind == "siglip" else 77
    tokens = torch.tensor([row + [end] * (length - len(row)) for row in rows])
    if kind in ("clip", "siglip"):
        import transformers

        name = "CLIP" if kind == "clip" else "Siglip"
        config = getattr(transformers, f"{name}Config")(text_config={"eos_token_id": end})
        model = getattr(transformers, f"{name}Model")(config).eval()
        model.save_pretrained("theirs")
        pixels = getattr(transformers, f"{name}ImageProcessorPil")()(
            picture, return_tensors="pt"
        ).pixel_values
        with torch.no_grad():
            out = model(input_ids=tokens, pixel_values=pixels)
        expected = out.image_embeds.numpy(), out.text_embeds.numpy()
    else:
        open_clip = pytest.importorskip("open_clip")
        model, _, transform = open_clip.create_model_and_transforms(kind)
        about = {"model_cfg": open_clip.get_model_config(kind), "preprocess_cfg": {}}
        Path("theirs/open_clip_config.json").write_text(json.dumps(about))
        save_file(model.state_dict(), "theirs/open_clip_model.safetensors")
        with torch.no_grad():
            images = model.eval().encode_image(transform(picture)[None], normalize=True).numpy()
            expected = images, model.encode_text(tokens, normalize=True).numpy()
    pipeline.save("theirs/tokenizer.json")
    embedder = load("theirs")
    assert_same(embedder, expected, ["photo.jpg"])
    again = load(export(embedder, "hf", Path("again")).path)
    np.testing.assert_allclose(again.images(["photo.jpg"]), expected[0], atol=1e-3 if "ViT" in kind else 1e-4)
