"""Models of transformers and OpenCLIP, in and out: from an image file and a text to the same embeddings as there."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from test_model_folders import END, START, TEXTS, change, clip_tokenizer, save_clip, tokenizer_json
from test_update import make_run
from tokenizers import Tokenizer, processors

from lapclip.data.decode import RESIZES
from lapclip.embedder import Embedder, load
from lapclip.errors import UserError
from lapclip.export.folders import export

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
    pixels = processor([Image.open(file) for file in files], return_tensors="pt").pixel_values
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
