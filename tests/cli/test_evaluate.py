"""`lapclip eval`: what it prints, writes and refuses, on models that were really trained."""

import json
import math
import os
import shutil
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, opened, picture_folder, wait_for
from PIL import Image

from lapclip.cli.evaluate import next_step
from lapclip.config import load_config, with_values
from lapclip.embedder import TEMPLATES, load
from lapclip.runs.run import Run

HOSTILE = "cat\u202e[bold]x"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, another one that differs in its weights, photos, and a folder of classes."""
    from lapclip.train.loop import train
    from lapclip.train.prepare import prepare

    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LAPCLIP_CACHE", str(tmp_path_factory.mktemp("cache")))
        run = prepare(load_config(flags=SMALL), "mine")
        list(train(run.load_config(), run))
    shutil.copytree(folder / "runs/mine", folder / "runs/other", symlinks=True)
    for weights in (folder / "runs/other").rglob("model.safetensors"):
        disturb(weights)
    picture_folder(folder / "photos", 40)
    for label, colour in (("cat", 0), ("dog", 255), (HOSTILE, 128)):
        (folder / "animals" / label).mkdir(parents=True)
        for number in range(4):
            pixels = np.full((24, 24, 3), colour, dtype=np.uint8)
            pixels[: 6 + number] = 40 * number
            Image.fromarray(pixels).save(folder / "animals" / label / f"{number}.png")
    return folder


def disturb(weights: Path) -> None:
    from safetensors.numpy import load_file, save_file

    random = np.random.default_rng(0)
    tensors = {
        name: (values + 0.1 * random.standard_normal(values.shape)).astype(values.dtype)
        for name, values in load_file(weights).items()
    }
    save_file(tensors, weights)


@pytest.fixture(autouse=True)
def here(trained, tmp_path, one_thread):
    """All of it, at hand in the test's own folder; a test that changes a file puts another in its place."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True, symlinks=True, copy_function=os.link)


def test_a_person_reads_all_of_it_within_80_columns(call):
    done = call("eval", "mine", "--against", "other", "--mistakes", "3")
    assert done.returncode == 0, done.stderr
    expected = ("text → image", "95% interval", "chance", "with 16 images", "`mine`", "`other`", "p = ")
    assert all(text in done.stdout for text in expected), done.stdout
    assert done.stdout.count("first: image") == 3 and "image → text @10 " in done.stdout
    table = done.stdout[: done.stdout.index("Each caption is compared")]
    assert max(map(len, table.splitlines())) <= 80 and not {*"\u2026\x1b"} & {*done.stdout}
    assert "next: " in done.stderr


def test_folders_of_classes_are_named_without_training(call):
    done = call("eval", "mine", "animals", "--json", "--template", "one {}", "--template", "{} there")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["num_images"] == 12 and not result["held_out"], "all of another source, not a share of it"
    zero_shot = result["zero_shot"]
    assert zero_shot["num_classes"] == 3 and zero_shot["templates"] == ["one {}", "{} there"]
    assert sum(map(sum, zero_shot["confusion"]["counts"])) == 12
    (few_shot,) = result["few_shot"]["results"]  # four would leave no image of a class to test on
    assert few_shot["examples_per_class"] == 1 and few_shot["num_images"] == 9
    assert "`--template` has no effect" in call("eval", "mine", "--template", "{}").stderr
    shown = call("eval", "mine", "animals")
    assert "among 3 (chance 33.3%" in shown.stdout and "classified as" in shown.stdout
    assert "% with 1 (" in shown.stdout and "Few-shot" in shown.stdout
    assert "\u202e" not in shown.stdout and "[bold]x" in shown.stdout
    own = Run(Path("runs/mine"))
    config = own.load_config()
    own.write_config(replace(config, data=replace(config.data, format="classes")))
    result = json.loads(call("eval", "mine", "animals", "--json").stdout)
    assert result["zero_shot"]["templates"] == ["{}"], "as the captions that it was trained on"
    kept = load(load("mine").save("kept"))
    labels, expected = ["cat", "dog"], load("mine").texts(["cat", "dog"])
    np.testing.assert_allclose(kept.label_rows(labels), expected, atol=1e-6, err_msg="also once it is saved")
    compared = json.loads(call("eval", "mine", "animals", "--against", "other", "--json").stdout)
    other = json.loads(call("eval", "other", "animals", "--json").stdout)["zero_shot"]
    assert other["templates"] == list(TEMPLATES), "each model is prompted as alone"
    difference = compared["zero_shot"]["top1"] - other["top1"]
    assert compared["against"]["zero_shot"]["top1"]["difference"] == pytest.approx(difference)
    Path("animals/cat/0.png").unlink()
    Path("animals/cat/0.png").write_bytes(b"no picture")
    pools = json.loads(call("eval", "mine", "animals", "--pool-size", "5", "--published", "--json").stdout)
    assert pools["pool"] == {"size": 5, "num_pools": 2} and pools["num_images"] == 10
    assert pools["protocol"] == "published" and pools["text_to_image"]["chance@1"] == pytest.approx(1 / 5)
    assert [Path(name).name for name in pools["unreadable"]] == ["0.png"]
    assert "omitted: 1 image that cannot be read" in call("eval", "mine", "animals").stdout


def test_a_model_of_classes_is_measured_on_class_folders_whatever_the_names_of_files(call):
    for number, image in enumerate(sorted(Path("animals").glob("*/*.png"))):
        image.rename(
            image.with_name(f"the small picture {number} of something {'abcdefghijkl'[number] * 3}.png")
        )
    shown = call("eval", "mine", "animals", "--json")
    assert "format: `names`, detected" in shown.stderr and "zero_shot" not in json.loads(shown.stdout)
    own = Run(Path("runs/mine"))
    config = own.load_config()
    own.write_config(replace(config, data=replace(config.data, format="classes")))
    shown = call("eval", "mine", "animals", "--json")
    result = json.loads(shown.stdout)
    assert result["format"] == "classes" and result["zero_shot"]["num_classes"] == 3
    assert "class folders are used, as in training" in shown.stderr
    asked = json.loads(call("eval", "mine", "animals", "--format", "names", "--json").stdout)
    assert asked["format"] == "names" and "zero_shot" not in asked


def test_captions_of_unknown_words_are_given_as_the_cause(call):
    for caption in Path("photos").glob("*.txt"):
        caption.unlink()
        caption.write_text(f"Hund und Katze {caption.stem}")
    done = call("eval", "mine", "photos", "--json")
    assert json.loads(done.stdout)["share_unknown_words"] == 1.0
    shown = call("eval", "mine", "photos").stderr
    assert "100% of the words of these captions are in no training caption" in shown and "longer" not in shown
    assert json.loads(call("eval", "mine", "--json").stdout)["share_unknown_words"] < 0.1
    better = json.loads(done.stdout)
    better["text_to_image"]["interval@10"] = [0.9, 1.0]
    assert "100% of the words" in next_step(better, ["mine"], None, False), (
        "also where recall is above chance"
    )


def test_the_source_it_was_trained_on_is_measured_by_its_validation_set(call):
    elsewhere = json.loads(call("eval", "mine", "photos", "--json").stdout)
    assert elsewhere["num_images"] == 40 and not elsewhere["held_out"]
    trained_on("mine", str(Path("photos").absolute()))
    own = json.loads(call("eval", "mine", "--json").stdout)
    named = call("eval", "mine", "photos", "--json")
    assert "only its validation set" in named.stderr
    assert 0 < own["num_images"] < 40 and json.loads(named.stdout)["mistakes"] == own["mistakes"]


def test_a_link_to_a_folder_and_the_table_in_it_are_the_source_that_the_folder_is(call):
    images = sorted(Path("photos").glob("*.jpg"))
    rows = [f"{path.name},picture {number}" for number, path in enumerate(images)]
    Path("photos/metadata.csv").write_text("\n".join(["file_name,text", *rows]) + "\n")
    Path("link").symlink_to("photos")
    folder, table = Path("photos").absolute(), Path("photos/metadata.csv").absolute()

    def held_out(source: str) -> bool:
        return json.loads(call("eval", "mine", source, "--json").stdout)["held_out"]

    trained_on("mine", str(folder))
    assert held_out("link") and held_out("photos/metadata.csv") and held_out("link/metadata.csv")
    run = Run(Path("runs/mine"))
    run.write_config(with_values(run.load_config(), {"source": str(table)}))
    assert held_out("photos") and held_out("link")


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "streamed"])
def test_images_that_a_run_trained_on_are_never_measured_in_whatever_source_they_are(call, is_packed):
    """In a folder within the source, in one that holds it, and in a table; even if hardly any is left."""
    for number, name in enumerate(("cats", "dogs", "new")):
        picture_folder(Path("all/pets" if name != "new" else "all", name), 20, first=20 * number)
    trained_on("mine", str(Path("all/pets").absolute()), share=0.2)
    run = Run(Path("runs/mine"))
    run.write_config(with_values(run.load_config(), {"pack": is_packed}))
    training = opened("all/pets", validation_share=0.2, pack=is_packed).training
    seen = {Path(training.name(index)).stem for index in range(training.num_pairs)}
    rows = [f"all/pets/cats/{n:02}.jpg,cat {n}\nall/new/{n + 40}.jpg,new {n}" for n in range(20)]
    Path("table.csv").write_text("\n".join(["image,caption", *rows]) + "\n")
    unseen = {
        name: {path.stem for path in Path(name).rglob("*.jpg")} - seen for name in ("all", "all/pets/cats")
    }
    unseen["table.csv"] = unseen["all/pets/cats"] | {f"{n + 40}" for n in range(20)}
    for name, images in unseen.items():
        measured = call("eval", "mine", name, "--mistakes", "60", "--json")
        found = json.loads(measured.stdout)
        assert "used for training" in measured.stderr and found["held_out"]
        assert found["num_images"] == len(images), name
        assert {Path(one["picture"]).stem for one in found["mistakes"]} <= images
    beside = call("eval", "mine", "all/new", "--json")
    assert json.loads(beside.stdout)["num_images"] == 20 and "used for training" not in beside.stderr


def test_a_test_split_beside_the_folder_of_training_is_measured_alone(call):
    for number, side in enumerate(("train", "val", "test")):
        picture_folder(Path("set", side), 8, first=8 * number)
    trained_on("mine", str(Path("set/train").absolute()))
    measured = call("eval", "mine", "set", "--json")
    assert "has a test split" in measured.stderr and json.loads(measured.stdout)["num_images"] == 8


def test_a_run_that_may_not_open_its_source_is_evaluated_with_a_warning(call):
    picture_folder(Path("all/pets"), 20)
    trained_on("other", str(Path("all").absolute()), is_recorded=False)
    shutil.copytree("runs/other", "theirs")
    measured = call("eval", "theirs", "all/pets", "--json")
    assert "its training images may be among these" in measured.stderr
    assert json.loads(measured.stdout)["num_images"] == 20


@pytest.mark.parametrize("base", ["mine", "runs/mine"])
def test_images_of_a_base_are_left_out_from_any_folder(call, base, monkeypatch):
    """Also those of the same source, if the base was not trained on a pack and so had another split."""
    photos = str(Path("photos").absolute())
    trained_on("mine", photos, share=0.2)
    mine = Run(Path("runs/mine"))
    mine.write_config(with_values(mine.load_config(), {"pack": False}))
    trained_on("other", photos, share=0.2)
    other = Run(Path("runs/other"))
    other.write_config(with_values(other.load_config(), {"pack": True, "base": base}))
    training = opened("photos", validation_share=0.2, pack=False).training
    seen = {Path(training.name(index)).stem for index in range(training.num_pairs)}
    folder = other.path.absolute()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    measured = call("eval", str(folder), "--mistakes", "60", "--json")
    assert "used for training" in measured.stderr
    found = json.loads(measured.stdout)
    assert found["num_images"] and not {Path(one["picture"]).stem for one in found["mistakes"]} & seen


def test_a_base_that_may_not_open_its_source_is_pointed_out_also_on_the_run_s_own_source(call):
    photos = Path("photos").absolute()
    (photos / "below").mkdir()
    trained_on("mine", str(photos / "below"), is_recorded=False)
    shutil.copytree("runs/mine", "theirs")
    trained_on("other", str(photos), share=0.2)
    other = Run(Path("runs/other"))
    other.write_config(with_values(other.load_config(), {"base": str(Path("theirs").absolute())}))
    measured = call("eval", "other", "--json")
    assert "its training images may be among these" in measured.stderr
    assert json.loads(measured.stdout)["num_images"] < 40


def trained_on(run: str, source: str, share: float = 0.05, is_recorded: bool = True) -> None:
    """Makes a run believe that it was trained on something else."""
    settings = Path("runs", run, "config.toml")
    changed = settings.read_text().replace(f'"{SMALL["source"]}"', f'"{source}"')
    changed = changed.replace("[data]", f"[data]\nvalidation_share = {share}")
    settings.unlink()
    settings.write_text(changed)
    if is_recorded:
        Run(settings.parent).write_config(Run(settings.parent).load_config())


@pytest.mark.parametrize(
    "place", ["photos", "emoji:{}", "http://127.0.0.1:{}/x-{{0..1}}.tar", "synthetic + hf:{}"]
)
def test_a_run_of_a_stranger_does_not_decide_what_is_opened(call, tmp_path, place):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)
        source = place.format(listening.getsockname()[1]) if "{" in place else str(Path(place).absolute())
        trained_on("other", source, is_recorded=False)
        shutil.copytree("runs/other", "theirs")
        for arguments in (["eval", "theirs"], ["train", "--resume", "theirs"], ["runs", "resume", "theirs"]):
            refused = call(*arguments)
            assert refused.returncode == 1 and "no record of training on it" in refused.stderr, refused.stderr
            assert refused.stderr.count("hint:") == 1 and "theirs SOURCE`" in refused.stderr
        with pytest.raises(TimeoutError):
            listening.accept()
    named = json.loads(call("eval", "theirs", "animals", "--json").stdout)
    assert named["num_images"] == 12, "what a person names is opened"


def test_what_this_user_trained_on_is_opened_for_any_run_and_older_runs_are_known_by_their_place(
    call, monkeypatch
):
    trained_on("other", str(Path("photos").absolute()), is_recorded=False)
    assert call("eval", "other").returncode == 1, "newer than this version, and nothing is recorded"
    monkeypatch.setattr("lapclip.runs.run.INSTALLED", math.inf)
    assert call("eval", "other").returncode == 0, "from before anything was recorded"
    Run(Path("runs/mine")).write_config(Run(Path("runs/mine")).load_config())
    assert call("eval", "other").returncode == 0
    shutil.copytree("runs/other", "runs/unpacked")
    assert call("eval", "unpacked").returncode == 1, "newer than the first record"
    Run(Path("runs/other")).write_config(Run(Path("runs/other")).load_config())
    Path("runs/unpacked").rename("elsewhere")
    assert call("eval", "elsewhere").returncode == 0


def test_what_either_model_was_trained_on_is_never_measured(call):
    photos = Path("photos").absolute()
    trained_on("other", f"{photos} + synthetic", share=0.4)
    compared = json.loads(call("eval", "mine", "photos", "--against", "other", "--json").stdout)
    assert compared["held_out"] and compared["num_images"] < 40, "trained on as a part of a mixture"
    trained_on("mine", str(photos), share=0.1)
    own = json.loads(call("eval", "mine", "--json").stdout)
    for arguments in (["mine", "--against", "other"], ["other", "photos", "--against", "mine"]):
        assert json.loads(call("eval", *arguments, "--json").stdout)["num_images"] == own["num_images"]


def test_a_comparison_says_when_the_other_model_was_trained_on_some_of_the_images(call):
    below = Path("photos/below").absolute()
    below.mkdir()
    for path in sorted(Path("photos").glob("*.*"))[:40]:  # images and their captions
        path.rename(below / path.name)
    trained_on("mine", str(below.parent), share=0.4)
    trained_on("other", str(below), share=0.1)
    done = call("eval", "mine", "--against", "other", "--mistakes", "0")
    assert done.returncode == 0, done.stderr
    assert "some of these images were used for training: only the others are used" in done.stderr


def test_a_comparison_gives_each_model_the_figures_it_has_alone_whatever_their_image_sizes(call):
    from lapclip.train.loop import train
    from lapclip.train.prepare import prepare

    run = prepare(load_config(flags=SMALL | {"image_size": 48}), "large")
    list(train(run.load_config(), run))
    alone = {name: json.loads(call("eval", name, "photos", "--json").stdout) for name in ("mine", "large")}
    for one, other in (("mine", "large"), ("large", "mine")):
        compared = json.loads(call("eval", one, "photos", "--against", other, "--json").stdout)
        for way in ("text_to_image", "image_to_text"):
            for key, test in compared["against"][way].items():
                difference = alone[one][way][key] - alone[other][way][key]
                assert test["difference"] == pytest.approx(difference, abs=1e-12)
        del compared["against"]
        assert compared == alone[one], "to the last digit"


def test_a_model_of_its_own_agrees_with_its_run_and_needs_a_source(call):
    checkpoint = next(Path("runs/mine/checkpoints").glob("step-*"))
    load("mine").save(Path("model"))
    refused = call("eval", "model")
    assert refused.returncode == 1 and "eval MODEL SOURCE" in refused.stderr
    shown = [call("eval", name, "photos", "--json") for name in ("mine", "model")]
    assert ["does not record what it was trained on" in one.stderr for one in shown] == [False, True]
    results = [json.loads(one.stdout) for one in shown]
    assert results[0]["text_to_image"] == results[1]["text_to_image"]
    assert json.loads(call("eval", str(checkpoint), "--json").stdout)["held_out"], "its run's own source"


def test_the_page_and_the_sheet_are_written_where_it_says(call):
    done = call("eval", "mine", "--html", "--sheet", "m.png", "--mistakes", "2", "--json")
    result = json.loads(done.stdout)
    assert result["page"] == "runs/mine/evaluation.html" and result["sheet"] == "m.png"
    page = Path(result["page"]).read_text()
    assert page.count('class="question"') == 2 == len(result["mistakes"])
    assert page.count("data:image/jpeg") == sum(1 + len(m["found"]) for m in result["mistakes"])
    with Image.open("m.png") as sheet:
        assert sheet.format == "PNG" and sheet.height > 2 * 128
    again = call("eval", "mine", "--html", "here.html", "--sheet", "none.png", "--mistakes", "0")
    assert "no mistakes to draw" in again.stderr and not Path("none.png").exists() and again.stdout
    assert again.returncode == 0 and "the page: here.html" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["mine", "--template", "a photo"], "`a photo` has no placeholder for the label", "write `{}`"),
        (["mine", "animals", "--pool-size", "50"], "but there are 12 images", "at most 12"),
        (["mine", "--pool-size", "1"], "`--pool-size` is 1", "1000"),
        (["mine", "--mistakes", "-1"], "`--mistakes` is -1", "0 to 1000"),
        (["mine", "--num-validation", "0"], "`--num-validation`", "512"),
        (["mine", "--sheet", "m.jpg"], "`m.jpg` does not end in `.png`", "`m.png`"),
        (["mine", "--sheet", "none/m.png"], "none/m.png", "an existing folder"),
        (["mine", "--html", "animals"], "does not end in `.html`", "goes before `--html`"),
        (["mine", "--html", "foreign.html"], "is not known to be written by lapclip", "another file"),
        (["mine", "--html", "none/page.html"], "cannot write `none/page.html`", "an existing folder"),
        (["animals"], "`animals` is not a run", "lapclip eval MODEL SOURCE"),
        (["mien"], "did you mean `mine`", "lists the runs"),
        (["mine", "--against", "none"], "there is no run `none`", "lists the runs"),
        (["mine", "none.csv"], "none.csv", ""),
    ],
)
def test_mistakes_are_answered_with_a_way_out(call, arguments, message, hint):
    Path("foreign.html").write_text("<p>mine</p>")
    done = call("eval", *arguments)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert message in done.stderr and hint in done.stderr and done.stderr.count("hint: ") == 1
    assert Path("foreign.html").read_text() == "<p>mine</p>"


def test_ctrl_c_ends_it_with_a_sentence_and_writes_nothing(call):
    """At the first moment from which it is answered by a sentence of ours."""
    usual = signal.getsignal(signal.SIGINT)

    def interrupt():
        wait_for(lambda: signal.getsignal(signal.SIGINT) is not usual)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    done = call("eval", "mine", "--num-validation", "512", "--html", "page.html")
    thread.join()
    assert (done.returncode, done.stdout) == (130, "") and not Path("page.html").exists()
    assert "stopped while evaluating" in done.stderr and "the same command starts again" in done.stderr
