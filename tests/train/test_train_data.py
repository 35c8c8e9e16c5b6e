"""Training on what people have: exact after a resume however the images come, and honest when the source changes."""

import shutil
from dataclasses import replace

import pytest
from conftest import SMALL, opened, picture_folder
from test_train import assert_equal_to_the_bit, of, stop_after, trained

from lapclip.config import load_config
from lapclip.data.pack import packs_folder
from lapclip.data.tokenizer import load_tokenizer
from lapclip.runs.events import Step, Warned
from lapclip.train.loop import train
from lapclip.train.messages import validation_limit
from lapclip.train.prepare import prepare, revising
from lapclip.units import finished, plural


def config_for(source: object, **more):
    return load_config(
        flags=SMALL | {"source": str(source), "steps": 8, "eval_every": "8", "validation_share": 0.2} | more
    )


def test_what_limits_the_validation_set_is_known(tmp_path):
    photos = opened(picture_folder(tmp_path / "photos", 60), validation_share=0.2)
    num_images = photos.validation.num_different
    assert validation_limit(photos, num_images - 1) == "num_validation"
    assert validation_limit(photos, num_images) == "validation_share"
    for first, side in enumerate(("train", "val")):
        picture_folder(tmp_path / "set" / side, 10, first=10 * first)
    assert validation_limit(opened(tmp_path / "set"), 10) == "source"
    assert validation_limit(opened("synthetic:200"), 512) == "source"


def test_a_share_is_not_stated_where_the_dataset_has_its_own_split(tmp_path):
    photos = picture_folder(tmp_path / "photos", 30)
    rows = [f"{i:02}.jpg,a photo {i},{'val' if i < 9 else 'train'}" for i in range(30)]
    (tmp_path / "split.csv").write_text("\n".join(["image,caption,split", *rows]))
    data = opened(tmp_path / "split.csv", images=str(photos))
    assert (data.training.num_pairs, data.validation.num_pairs) == (21, 9)
    assert data.found["validation_share"].why == "not used: the dataset has its own split"
    assert "5%" in opened(photos).found["validation_share"].why


def test_characters_have_room_where_recipes_were_made_for_other_tokens():
    def text_length(**flags) -> int | None:
        run = prepare(load_config(flags=flags | {"source": "synthetic:40", "batch_size": 8, "steps": 1}))
        return run.load_config().model.text_length

    usual = text_length(size="nano")
    assert usual is not None and text_length(size="nano", tokenizer="characters") == 77 > usual


@pytest.mark.slow
def test_a_budget_longer_than_the_images_can_use_is_said_before_the_first_step(tmp_path):
    photos = picture_folder(tmp_path / "photos", 30)

    def said(num_steps: int):
        run = prepare(config_for(photos, steps=num_steps))
        stop_after(1, run)
        return [w for w in of(Warned, run.events()) if w.kind == "long-budget"]

    assert said(330) == [], "about a hundred are what it can use"
    (warned,) = said(3000)
    assert warned.step == 0 and "1,000 epochs of 24 images" in warned.message and "`--epochs " in warned.hint
    assert said(30) == []
    config = config_for(photos)
    run = prepare(replace(config, train=replace(config.train, steps=None, minutes=600.0)))
    stop_after(1, run)
    assert [w.kind for w in of(Warned, run.events())].count("long-budget") == 1, (
        "without a measured speed too"
    )


@pytest.mark.slow
def test_a_budget_of_few_steps_is_said_before_the_first_step(tmp_path):
    config = config_for(picture_folder(tmp_path / "photos", 30))

    def said(size: str, minutes: float):
        model, train = replace(config.model, size=size), replace(config.train, steps=None, minutes=minutes)
        run = prepare(replace(config, model=model, train=train))
        stop_after(1, run)
        return [w for w in of(Warned, run.events()) if w.kind == "short-budget"]

    (warned,) = said("small", 0.01)
    assert (
        warned.step == 0
        and "so the budget of 600 ms is about" in warned.message
        and "`--size`" in warned.hint
    )
    assert said("nano", 1.0) == []


def test_a_run_too_short_to_compare_plans_still_knows_its_number_of_epochs(tmp_path):
    config = config_for(picture_folder(tmp_path / "photos", 30))
    run = prepare(replace(config, train=replace(config.train, steps=None, minutes=0.1)))
    machine = run.load_machine()
    num_epochs = round(6 * machine["bench"]["timed_pairs_per_second"] / 24)
    assert f"about {plural(num_epochs, 'epoch')}:" in machine["reasons"]["word_dropout"]
    run.write_machine(machine | {"bench": {"pairs_per_second": 99.0}})
    assert finished(revising(run, {"minutes": 0.2}, None)).train.minutes == 0.2
    assert run.load_machine()["bench"] == {"pairs_per_second": 99.0}, "nothing follows from a speed any more"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"captions": "all"},
        {"pack": False},
        {"crop": 0.4, "flip": True, "colour": 0.2},
        {"mixed": True},
        {
            "size": "resnet-tiny",
            "image_size": 32,
            "captions_per_image": 2,
            "word_dropout": 0.2,
            "dropout": 0.1,
        },
    ],
    ids=lambda more: "-".join(more) or "packed",
)
def test_a_resumed_run_equals_one_that_never_stopped_however_images_come(tmp_path, more):
    source = str(picture_folder(tmp_path / "photos", 40))
    for file in (tmp_path / "photos").glob("*.txt"):
        file.write_text(f"{file.read_text()}\nanother caption of {file.stem}")
    if more.pop("mixed", False):
        source += f" + {picture_folder(tmp_path / 'others', 12, first=60)}@1.5 + synthetic:30"
    config = config_for(source, **more)
    straight, _ = trained(config, "straight")
    run = prepare(config, "broken")
    stop_after(3, run)
    shutil.rmtree(packs_folder())  # somebody cleaned up; it is made again
    events = list(train(run.load_config(), run))
    assert [step.step for step in of(Step, events)] == [4, 5, 6, 7, 8]
    assert not [w for w in of(Warned, events) if "changed" in w.message]
    assert_equal_to_the_bit(straight, run)


def test_the_words_of_the_training_captions_are_recorded_and_of_no_others(tmp_path):
    folder = picture_folder(tmp_path / "photos", 40)  # whose captions end in a number of their own
    run = prepare(config_for(folder, num_validation=8), "run")
    words = run.tokenizer_file.with_name("words.txt").read_text().split("\n")
    assert words == sorted(words) and {"red", "cat", "number"} <= {*words}
    assert 20 <= sum(word.isdecimal() for word in words) < 40, "not those of validation"
    assert load_tokenizer(run.tokenizer_file).unknown_words("Red asdkjhasd CAT") == ["asdkjhasd"]


def test_a_source_that_changed_is_said_when_a_run_goes_on(tmp_path):
    folder = picture_folder(tmp_path / "photos", 40)
    run = prepare(config_for(folder), "run")
    stop_after(3, run)
    picture_folder(folder, 3, first=90)
    events = list(train(run.load_config(), run))
    assert [w for w in of(Warned, events) if "the source has changed" in w.message]
    assert of(Step, events)[-1].step == 8


def test_a_run_is_named_after_its_source_and_finds_it_from_another_folder(tmp_path, monkeypatch):
    picture_folder(tmp_path / "my photos", 40)
    run = prepare(config_for("my photos"))
    assert run.name == "my-photos-nano-1" and run.load_config().data.source == str(tmp_path / "my photos")
    config = run.load_config()
    run.path = run.path.absolute()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert of(Step, list(train(config, run)))[-1].step == 8


def test_hints_read_the_source_as_training_does(tmp_path):
    picture_folder(tmp_path / "photos", 30)
    notes = ["", *(f"picture of {n} things" for n in range(29))]
    rows = [f"photos/{n:02}.jpg,caption {n},{note}" for n, note in enumerate(notes)]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,caption,note", *rows]))
    run = prepare(config_for(tmp_path / "pairs.csv", caption_column="note"))
    stop_after(1, run)
    hints = [w.hint for w in of(Warned, run.events()) if "lapclip data" in w.hint]
    assert any("data check" in hint for hint in hints) and any("data show" in hint for hint in hints)
    assert all("--caption-column note`" in hint for hint in hints)


def test_classes_that_are_for_validation_only_are_said(tmp_path):
    for number, (side, name) in enumerate(
        (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "owl"))
    ):
        picture_folder(tmp_path / side / name, 16, first=16 * number)
    run = prepare(config_for(tmp_path, format="classes"))
    stop_after(1, run)
    (warned,) = [w for w in of(Warned, run.events()) if w.kind == "unseen"]
    assert warned.message == "16 of 32 validation images are of classes without training images: `owl`"
