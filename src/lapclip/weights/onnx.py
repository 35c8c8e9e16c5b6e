"""ONNX files as frozen encoders: one that this user has named is kept in the cache folder, under its hash.

A model names its files by their hashes only: whoever made it, no other file is opened, and no program comes with it.
"""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lapclip import files
from lapclip.errors import MissingPackage, UserError, code, one_line, shortened
from lapclip.model.clip import CLIP
from lapclip.model.encoders import Onnx

TEXT_INPUTS = {"input_ids", "attention_mask"}, {"input_ids", "attention_mask", "token_type_ids"}


def place_of(sha256: str) -> Path:
    return files.cache_folder() / "onnx" / f"{sha256}.onnx"


def digest(file: Path) -> str:
    with files.open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()  # type: ignore[arg-type]  # it has `readinto`


def is_kept(sha256: str) -> bool:
    place = place_of(sha256)
    return place.is_file() and digest(place) == sha256


@contextmanager
def kept(file: Path, sha256: str) -> Iterator[Path]:
    """A copy of a file that the user has named, which stays in the cache folder unless the block raises."""
    place = place_of(sha256)
    if is_kept(sha256):
        yield place
        return
    with files.writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_path(place) as beside:
        shutil.copyfile(file, beside)
        yield beside


def open_towers(model: CLIP) -> None:
    """Opens the files of a model, and tries each: the description of the model may be a stranger's."""
    size = model.size
    towers = (model.image, size.image.width, size.image_size), (model.text, size.text.width, size.text_length)
    for tower, width, length in towers:
        if not isinstance(tower, Onnx) or tower.session is not None:
            continue
        place = place_of(tower.sha256)
        if not is_kept(tower.sha256):
            problem = f"this model needs the file {code(tower.name)}, which is not in the cache folder"
            raise UserError(problem, hint=f"copy exactly that file to `{place}`")
        open_session(tower, place)
        if (found := width_of(tower, length, model.vocab_size)) != width:
            raise unusable(tower, f"it has {found:,} features, not {width:,}")


def open_session(tower: Onnx, file: Path) -> int | None:
    """Opens a file; returns the number of pixels per side or of tokens that it takes, if that is fixed."""
    try:
        import onnxruntime
    except ImportError:
        problem = f"{code(tower.name)} is an ONNX file, and `onnxruntime` is not installed"
        raise MissingPackage(problem, "onnx") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is raised, too
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # batches run side by side
    try:
        tower.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the library raises nothing more specific
        raise unusable(tower, str(error).replace(str(file), tower.name)) from None
    shapes = {one.name: one.shape for one in tower.session.get_inputs()}
    if len(shapes) != 1 if tower.is_image else shapes.keys() not in TEXT_INPUTS:
        texts = "`input_ids`, `attention_mask`, maybe `token_type_ids`"
        expected = "only images" if tower.is_image else texts
        raise unusable(tower, f"its inputs are {', '.join(map(code, shapes))}, not {expected}")
    fixed = [n for shape in shapes.values() for n in shape[2 if tower.is_image else 1 :] if type(n) is int]
    return max(fixed, default=None)


def width_of(tower: Onnx, length: int, vocab_size: int) -> int:
    """The number of its features, by trying two images or texts."""
    tried = [torch.full((2, length), vocab_size - 1), torch.tensor([length - 1, 1])]
    if tower.is_image:
        tried = [torch.zeros(2, 3, length, length, dtype=torch.uint8)]
    try:
        num_rows, width = tower(*tried).shape
    except Exception as error:  # as above; and torch's, of an output that is not as expected
        raise unusable(tower, str(error)) from None
    if num_rows != 2:
        raise unusable(tower, "the first dimension of its output is not the batch")
    return width


def unusable(tower: Onnx, why: str) -> UserError:
    what = f"{code(tower.name)} cannot be used as {'an image' if tower.is_image else 'a text'} tower"
    hint = "export it as one ONNX file that holds all weights, with the inputs that the guide names"
    return UserError(f"{what}: {shortened(one_line(why), 300)}", hint=hint)
