"""What users hold: images in any form give the rows that training saw, and everything else gives a sentence."""

import os
import re
import runpy
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, picture_folder
from PIL import Image, ImageOps

import lapclip as library
from lapclip.config import load_config
from lapclip.data.images import decode_as_trained
from lapclip.data.open import open_source
from lapclip.embedder import TEMPLATES, Embedder, load
from lapclip.errors import UserError, install_command
from lapclip.evaluate.pool import embed_pool
from lapclip.train.loop import train
from lapclip.train.prepare import prepare
from lapclip.units import finished
from lapclip.weights.checkpoint import all_checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_IMAGES = 40


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with photos, and a run trained on them."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("LAPCLIP_CACHE", str(home / "cache"))
        picture_folder(home / "photos", NUM_IMAGES, side=90)
        run = prepare(load_config(flags=SMALL | {"source": "photos", "save_every": "3"}), "mine")
        list(train(run.load_config(), run))
    return home


@pytest.fixture(autouse=True)
def at_home(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setenv("LAPCLIP_CACHE", str(home / "cache"))


@pytest.fixture(scope="module")
def model(home) -> Embedder:
    return load(home / "runs" / "mine")


@pytest.fixture(scope="module")
def files(home) -> list[Path]:
    return sorted((home / "photos").glob("*.jpg"))


@pytest.fixture(scope="module")
def rows(model, files) -> np.ndarray:
    return model.images(files)


def test_files_give_the_rows_that_evaluation_sees(model, rows, files):
    data = finished(open_source(load_config(Path("runs/mine/config.toml")).data, model.image_size))
    number_of = {file.with_suffix(".txt").read_text(): number for number, file in enumerate(files)}
    pools = [embed_pool(model, side, NUM_IMAGES) for side in (data.training, data.validation)]
    assert sum(len(pool.captions) for pool in pools) == NUM_IMAGES
    for pool in pools:
        numbers = [number_of[caption] for caption in pool.captions]
        np.testing.assert_allclose(pool.image_NE[pool.image_of_caption], rows[numbers], atol=1e-5)


def test_rows_have_length_one_and_depend_on_neither_chunk_nor_order(model, files, rows):
    words = ["a red cat", "", "number " * 50, "two"]
    texts = model.texts(words)
    assert rows.shape == (NUM_IMAGES, model.width) and rows.dtype == texts.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(np.vstack([rows, texts]), axis=1), 1, rtol=1e-5)
    other = Embedder(model.model, model.tokenizer, model.device, chunk=7)
    np.testing.assert_allclose(other.images(files[::-1])[::-1], rows, atol=1e-5)
    np.testing.assert_allclose(other.images(files[3:5]), rows[3:5], atol=1e-5)
    np.testing.assert_allclose(other.texts(words[::-1])[::-1], texts, atol=1e-5)


@pytest.mark.parametrize("side", [90, 11])  # larger than a pack keeps it, and smaller than the model looks at
def test_an_image_in_any_form_gives_the_same_row(model, files, side):
    image = Image.open(files[0]).resize((side + 5, side))
    path = Path("picture.png")
    image.save(path)
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    forms = [str(path), path, image, array, array / 255, (array / 255).astype(np.float16), tensor, tensor / 255,
             (tensor / 255).double().requires_grad_()]  # fmt: skip
    rows = model.images(forms)
    for form, row in zip(forms, rows, strict=True):
        np.testing.assert_allclose(row, rows[0], atol=1e-5, err_msg=str(type(form)))
    for batch in (np.stack([array, array]), torch.stack([tensor, tensor]), (path, path)):
        np.testing.assert_allclose(model.images(batch), rows[:2], atol=1e-5)
    grey = array[:, :, 0]
    same = model.images(
        [np.stack([grey] * 3, 2), grey, grey[..., None], torch.tensor(grey), torch.tensor(grey)[None]]
    )
    np.testing.assert_allclose(same[1:], same[:-1], atol=1e-5)
    clear, white = np.dstack([array, np.zeros_like(grey)]), np.full_like(array, 255)
    np.testing.assert_allclose(*model.images([clear, white]), atol=1e-5)


@pytest.mark.parametrize("turned", range(2, 9))
def test_images_are_turned_upright(model, files, turned):
    image, path = Image.open(files[0]), Path(f"turned-{turned}.png")
    exif = Image.Exif()
    exif[0x0112] = turned
    image.save(path, exif=exif)
    seen = ImageOps.exif_transpose(Image.open(path))
    by_path, opened, upright = model.images([path, Image.open(path), seen])
    # To turn before or after resizing rounds a little differently; not to turn would be far away.
    np.testing.assert_allclose(by_path, upright, atol=5e-3)
    np.testing.assert_allclose(opened, upright, atol=5e-3)
    assert abs(upright - model.images([image])).max() > 2e-2


def test_pixels_are_what_images_come_to_and_nothing_gives_no_rows(model, files, rows):
    pixels = np.stack([decode_as_trained(file.read_bytes(), model.image_size).pixels for file in files[:5]])
    np.testing.assert_allclose(model.pixels(pixels), rows[:5], atol=1e-5)
    for wrong in (pixels.astype(np.float32), pixels[:, :, :-1], pixels[0]):
        with pytest.raises(UserError, match="uint8"):
            model.pixels(wrong)
    for nothing in ([], (), np.zeros((0, 4, 4, 3), np.uint8)):
        assert model.images(nothing).shape == (0, model.width)
    assert model.texts([]).shape == model.pixels(pixels[:0]).shape == (0, model.width)
    assert model.similarity([], []).shape == (0, 0) and model.classify([], ["cat"]).shape == (0, 1)


def test_similarity_is_the_cosine_and_takes_rows_too(model, files, rows):
    words = ["red", "a dog"]
    cosines = model.similarity(pictures=files, texts=words)  # the name of the argument in earlier versions
    np.testing.assert_allclose(cosines, rows @ model.texts(words).T, atol=1e-5)
    np.testing.assert_allclose(model.similarity(rows, model.texts(words)), cosines, atol=1e-5)
    tensor = torch.tensor(rows, requires_grad=True)
    np.testing.assert_allclose(model.similarity(tensor, words), cosines, atol=1e-5)
    with pytest.raises(UserError, match="5 values each"):
        model.similarity(rows[:, :5], words)


def test_labels_are_the_mean_over_templates_and_probabilities_a_softmax(model, files, rows):
    labels = ["cat", "{0} {name}", "dog"]
    mean = np.mean([model.texts([t.replace("{}", label) for label in labels]) for t in TEMPLATES], axis=0)
    expected = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(model.label_rows(labels), expected, atol=1e-5)
    chances = model.classify(files, labels)
    scaled = torch.from_numpy(rows @ expected.T * model.model.log_scale.exp().item())
    np.testing.assert_allclose(chances, scaled.softmax(1).numpy(), atol=1e-4)
    np.testing.assert_allclose(chances.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(model.label_rows(labels, ["{}"]), model.texts(labels), atol=1e-5)


@pytest.mark.parametrize(
    ("labels", "templates", "said"),
    [([], TEMPLATES, "labels is empty"), (["cat"], ["a photo"], "`a photo` has no placeholder"),
     (["cat"], [], "empty list of templates"), ([3], TEMPLATES, "text 0 has type `int`")],
)  # fmt: skip
def test_labels_that_cannot_be_are_refused(model, rows, labels, templates, said):
    with pytest.raises(UserError, match=said):
        model.classify(rows, labels, templates)


def test_labelled_images_teach_what_the_labels_mean(model):
    def image(red: bool, number: int) -> np.ndarray:
        pixels = np.random.default_rng(number).integers(0, 160, (32, 32, 3), dtype=np.uint8)
        pixels[..., 0 if red else 2] += 90
        return pixels

    is_red = np.arange(60) % 2 == 0
    images = [image(red, number) for number, red in enumerate(is_red)]
    for words in (("zyx", "abc"), ("abc", "zyx")):  # a name that says nothing can stand for either
        names = [words[int(red)] for red in is_red]
        learned = model.learn(images[:20], names[:20])
        assert learned.labels == ("abc", "zyx")
        chances = model.classify(images[20:], learned)
        assert chances.shape == (40, 2) and chances.dtype == np.float32
        np.testing.assert_allclose(chances.sum(axis=1), 1, rtol=1e-5)
        assert (np.take(learned.labels, chances.argmax(axis=1)) == names[20:]).mean() > 0.9
    embedded = model.images(images[:20])
    for known in (embedded, torch.from_numpy(embedded)):
        again = model.learn(known, np.array(names[:20]))
        np.testing.assert_array_equal(again.rows, learned.rows)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["cat"], "3 images and 1 label"),
        (["cat"] * 3, "1 class, but a classifier needs at least two"),
        (["cat", 3, "dog"], "text 1 has type `int`"),
    ],
)
def test_labels_that_teach_nothing_are_refused_before_anything_is_embedded(model, rows, labels, said):
    for images in (["missing.jpg"] * 3, rows[:3]):
        with pytest.raises(UserError, match=said):
            model.learn(images, labels)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (b"photos/00.jpg", "image 0 has type `bytes`"),
        (torch.zeros(()), "got a `Tensor`"),
        ((name for name in ["a"]), "got a `generator`"),
        ({"a": "b"}, "got a `dict`"),
        (["nowhere.png"], "`nowhere.png`.*: No such file"),
        (["photos"], "`photos` as an image"),
        (["photos/00.txt"], "is text"),
        (["a\0b"], "null"),
        ([Image.new("L", (4, 4)), None], "image 1 has type `NoneType`"),
        ([Image.new("RGB", (0, 4))], "no pixels"),
        ([np.zeros((0, 4, 3), np.uint8)], "no pixels"),
        ([np.zeros((3, 40, 50), np.uint8)], r"uint8 \[3, 40, 50\], not .* \[height, width, 3\]"),
        ([np.full((4, 4, 3), np.nan)], "nan"),
        ([torch.full((3, 4, 4), -2.0)], "from -2 to -2"),
        ([np.zeros((4, 4, 3), np.int64)], "array of int64"),
    ],
)
def test_what_is_no_list_of_images_is_said(model, images, said):
    with pytest.raises(UserError, match=said):
        model.images(images)


def test_one_alone_is_a_list_of_one(model, files, rows):
    pixels = np.asarray(Image.open(files[0]))
    for one in (
        str(files[0]),
        files[0],
        Image.open(files[0]),
        pixels,
        torch.from_numpy(pixels.transpose(2, 0, 1).copy()),
    ):
        np.testing.assert_array_equal(model.images(one), model.images([one]))
    np.testing.assert_array_equal(model.texts("a dog"), model.texts(["a dog"]))
    assert model.similarity(files[0], "red").shape == model.classify(files[0], "red", "a {}").shape == (1, 1)


def test_an_image_that_cannot_be_read_has_the_hint_that_helps(model, monkeypatch):
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    phone = b"\0\0\0\x18ftypheic" + bytes(100)
    for number in range(4):
        folder = Path("phone")
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.heic").write_bytes(phone)
        (folder / f"{number}.txt").write_text("a phone's image")
    install = install_command("heic")
    for images, hint in (("nowhere.png", "path"), ("photos/00.txt", "JPEG"), ("phone/0.heic", install)):
        with pytest.raises(UserError) as caught:
            model.images(images)
        assert hint in caught.value.hint
    with pytest.raises(UserError, match="0 usable images") as caught:
        finished(open_source(load_config(flags={"source": "phone"}).data, 16))
    assert install in caught.value.hint


def test_an_unreadable_file_or_text_among_many_is_named_and_ends_the_threads(model, files):
    Path("broken.jpg").write_bytes(files[0].read_bytes()[:300])
    with pytest.raises(UserError, match=r"`broken\.jpg`"):
        model.images([*files, "broken.jpg", *files])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]
    with pytest.raises(UserError, match="text 1 has type `NoneType`"):
        model.texts(["a", None])
    assert (model.texts(["caf\udce9", "\ud800"]) == model.texts(["caf?", "?"])).all(), "lone surrogates"


def test_a_saved_model_is_the_same_to_the_bit_and_shares_its_weights(model, files, rows, tmp_path):
    folder = model.save(tmp_path / "new" / "model")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model"], "nothing is left beside it"
    again = load(folder)
    assert (again.name, again.fingerprint) == ("mine", model.fingerprint)
    assert re.fullmatch("[0-9a-f]{16}", again.fingerprint)
    assert (again.images(files) == rows).all() and (again.texts(["a b"]) == model.texts(["a b"])).all()
    assert os.path.samefile(folder / "model.safetensors", model.weights)
    model.save(folder)  # again: nothing to do
    assert load(again.save(tmp_path / "copy of a copy")).fingerprint == model.fingerprint


def test_weights_that_changed_since_they_were_read_are_written_not_linked(model, tmp_path):
    changed = load("mine")
    with torch.no_grad():
        changed.model.project_image.weight[0, 0] += 1
    assert changed.fingerprint != model.fingerprint
    folder = changed.save(tmp_path / "changed")
    assert not os.path.samefile(folder / "model.safetensors", model.weights)
    assert load(folder).fingerprint == changed.fingerprint
    changed.weights = tmp_path / "gone"
    assert load(changed.save(tmp_path / "again")).fingerprint == changed.fingerprint
    with pytest.raises(UserError, match="holds another model"):
        model.save(folder)


def test_saving_overwrites_nothing(model, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "novel.txt").write_text("once")
    (tmp_path / "file").write_text("upon a time")
    wrong = {tmp_path / "mine": "already exists", tmp_path / "file": "already exists",
             tmp_path / "file" / "inside": "cannot write", **dict.fromkeys(["", ".", "/", "a\0b"], "not a valid name")}  # fmt: skip
    for name, said in wrong.items():
        with pytest.raises(UserError, match=said):
            model.save(name)
    assert sorted(os.listdir(tmp_path)) == ["file", "mine"] and os.listdir(tmp_path / "mine") == ["novel.txt"]
    (tmp_path / "empty").mkdir()
    assert load(model.save(tmp_path / "empty")).fingerprint == model.fingerprint


def test_a_checkpoint_is_loaded_with_its_runs_settings(model):
    first, *_, last = all_checkpoints(Path("runs/mine/checkpoints"))
    one, other = load(first), load(str(last.absolute()))
    assert one.name == f"mine {first.name}" and one.fingerprint != other.fingerprint
    assert model.fingerprint in (one.fingerprint, other.fingerprint)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("mime", "there is no model `mime`; did you mean `mine`"),
        ("quite-else", "there are .*`mine`"),
        ("runs/mine/checkpoints/step-000009", "did you mean `runs/mine/checkpoints/step-00000"),
        ("photos", "`photos` holds no model"),
        ("runs/mine/config.toml", "is a file, but a model is a folder"),
        ("x" * 1000, "cannot open"),
        ("a\0b", "there is no model"),
    ],
)
def test_a_wrong_path_says_what_there_is(path, said):
    with pytest.raises(UserError, match=said):
        load(path)
    with pytest.raises(UserError, match="no device `gpu`"):
        load("mine", device="gpu")


def test_what_the_library_offers_is_there():
    assert library.load is load and set(library.__all__) <= set(dir(library))
    assert [getattr(library, name) for name in library.__all__]
    with pytest.raises(AttributeError, match="nothing"):
        _ = library.nothing


def test_a_bar_is_shown_only_where_it_is_asked_for(model, files, capfd):
    model.images(files[:2])
    model.images(files * 9)  # many, but on a pipe
    assert capfd.readouterr() == ("", "")
    model.images(files[:2], progress=True)
    said = capfd.readouterr()
    assert said.out == "" and "embedding" in said.err and "2/2" in said.err


def test_the_example_runs(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ask_a_model.py"])
    runpy.run_path(str(ROOT / "examples" / "ask_a_model.py"))
    said = capsys.readouterr().out
    assert "mine: image size 16" in said and "most similar: " in said and "a red circle: " in said
    assert len(re.findall(r"\(\d+%\)", said)) == 6
    monkeypatch.setattr(sys, "argv", ["ask_a_model.py", "runs/mine", "photos"])
    runpy.run_path(str(ROOT / "examples" / "ask_a_model.py"))
    assert f"{NUM_IMAGES} images embedded" in capsys.readouterr().out


def test_the_guide_runs(tmp_path, home, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "runs"):
        (tmp_path / name).symlink_to(home / name)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide-python.md").read_text(), re.DOTALL)
    assert len(blocks) >= 4
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert "best: photos/" in capsys.readouterr().out
