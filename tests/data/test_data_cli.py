"""`lapclip data`: what people and programs read, what is refused, and what a hostile source cannot do."""

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, command, environment, opened, picture_folder, wait_for
from PIL import Image, ImageDraw
from test_decode import JPEG, png_of_size

from lapclip.data.advice import advise_share
from lapclip.data.decode import TRAITS

NANO = ("--size", "nano")


@pytest.fixture
def check(call):
    """What the doctor finds, as a program reads it."""

    def run(source: object, *flags: str) -> dict:
        done = call("data", "check", str(source), *NANO, "--json", *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_check_says_what_there_is(tmp_path, check):
    folder = picture_folder(tmp_path / "photos", 40)
    (folder / "copy.png").write_bytes((folder / "00.jpg").read_bytes())
    (folder / "copy.txt").write_text("the same words\nand others")
    (folder / "39.txt").write_text("the same words")
    Image.new("CMYK", (30, 20), (9, 99, 9, 0)).save(folder / "ink.jpg")
    (folder / "ink.txt").write_text("чёрный кот")
    report = check(folder)
    assert (report["num_images"], report["num_captions"], report["num_unreadable"]) == (42, 43, 0)
    assert report["num_duplicate_images"] == 1 and {*report["duplicate_images"][0]} == {"00.jpg", "copy.png"}
    assert report["num_duplicate_captions"] == 1 and report["traits"]["cmyk"] == 1
    assert set(report["traits"]) <= set(TRAITS) and report["scripts"]["Cyrillic"] == 1
    assert report["num_train"] + report["num_validation"] == 42
    assert report["caption_tokens"]["50"] > 2 and isinstance(report["advice"], list) and report["advice"]


def test_images_that_differ_in_detail_are_not_reported_as_copies(tmp_path, check):
    folder = picture_folder(tmp_path / "photos", 8)
    for name, words in (("a", "see you at the station"), ("b", "the invoice is overdue")):
        page = Image.new("RGB", (800, 1600), "white")
        ImageDraw.Draw(page).text((20, 60), words, "black", font_size=28)
        page.save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(words)
    page.save(folder / "b2.jpg", quality=70)
    (folder / "b2.txt").write_text(words)
    assert check(folder)["duplicate_images"] == [["b.png", "b2.jpg"]]


def star(num_points: int, step: int) -> Image.Image:
    """Thin grey lines, of which there is little to see at 8 x 8 pixels."""
    turns = [2j * np.pi * step * point / num_points for point in range(num_points + 1)]
    drawing = Image.new("RGBA", (100, 100))
    corners = [(50 + 48 * np.exp(turn).imag, 50 - 48 * np.exp(turn).real) for turn in turns]
    ImageDraw.Draw(drawing).line(corners, (150, 150, 150, 160))
    return drawing


def test_line_drawings_that_differ_are_no_copies_and_contrasted_but_stay_on_one_side(tmp_path, check):
    folder = picture_folder(tmp_path / "photos", 8)
    stars = [(31, 7), (35, 8), (37, 8), (40, 9)]
    for number, points in enumerate(stars):
        star(*points).save(folder / f"star{number}.png")
        (folder / f"star{number}.txt").write_text(f"a star number {number}")
    white = Image.new("RGB", (100, 100), "white")
    white.paste(star(*stars[0]), mask=star(*stars[0]))
    white.save(folder / "star5.jpg", quality=80)
    (folder / "star5.txt").write_text("a star saved again")
    blank = Image.new("RGBA", (100, 100))
    for number in range(2):
        blank.putpixel((number, 0), (0, 0, 0, 1))
        blank.save(folder / f"blank{number}.png")
        (folder / f"blank{number}.txt").write_text(f"nothing to see {number}")
    assert check(folder)["duplicate_images"] == [["star0.png", "star5.jpg"]]
    files = opened(folder, 64).parts[0].files
    group_of = dict(zip(files.catalogue.names, files.same.tolist(), strict=True))
    assert len({group_of[f"star{number}.png"] for number in range(4)}) == 4
    assert group_of["star0.png"] == group_of["star5.jpg"]
    assert group_of["blank0.png"] == group_of["blank1.png"], "a model sees no difference"
    side_of = dict(zip(files.catalogue.names, files.sides.tolist(), strict=True))
    assert len({side for name, side in side_of.items() if name.startswith("star")}) == 1


def test_renders_that_differ_in_one_faint_place_are_no_copies(tmp_path, check):
    folder = picture_folder(tmp_path / "photos", 8)
    for name in ("single", "double"):
        plate = Image.new("RGB", (128, 128), "white")
        draw = ImageDraw.Draw(plate)
        draw.rounded_rectangle((12, 12, 116, 116), 12, (225, 225, 225))
        draw.rounded_rectangle((30, 30, 98, 98), 5, (155, 155, 155))
        if name == "double":
            draw.line((64, 30, 64, 98), (100, 100, 100))
        plate.save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a {name} switch")
    plate.save(folder / "again.jpg", quality=50)
    (folder / "again.txt").write_text("a double switch")
    assert check(folder)["duplicate_images"] == [["again.jpg", "double.png"]]


def test_a_class_without_training_images_is_named(tmp_path, check):
    for number, place in enumerate(("train/cat", "train/dog", "val/cat", "val/dog", "val/bird")):
        folder = picture_folder(tmp_path / "kinds" / place, 12, first=12 * number)
        for text in folder.glob("*.txt"):
            text.unlink()
    what = "12 of 36 validation images are of classes without training images: `bird`"
    assert what in check(tmp_path / "kinds")["advice"]


def test_photos_without_captions_are_still_examined(tmp_path, call):
    folder = picture_folder(tmp_path / "photos", 6)
    for text in folder.glob("*.txt"):
        text.unlink()
    (folder / "IMG_7.jpg").write_bytes((folder / "00.jpg").read_bytes())
    (folder / "IMG_8.jpg").write_bytes(b"")
    done = call("data", "check", str(folder), *NANO)
    assert done.returncode == 1 and "has images but no captions" in done.stderr
    assert (
        "7 of 8 readable" in done.stdout and "1 copy or near-duplicate: `00.jpg` = `IMG_7.jpg`" in done.stdout
    )
    assert "`IMG_8.jpg` is empty" in done.stdout
    assert not any(line.startswith(("captions", "tokens", "split")) for line in done.stdout.splitlines())
    found = json.loads(call("data", "check", str(folder), *NANO, "--json").stdout)
    assert found["num_duplicate_images"] == 1 and found["unreadable"] == ["IMG_8.jpg"]
    assert not any("caption" in name for name in found)
    assert call("data", "check", str(folder), *NANO, "--format", "images").stdout == done.stdout
    refused = call("train", str(folder), *NANO, "--format", "images", "--steps", "1")
    assert refused.returncode == 1 and "not for training" in refused.stderr


def test_links_to_other_images_are_counted_as_links_and_not_as_copies(tmp_path, check, call):
    folder = picture_folder(tmp_path / "photos", 9)
    for number in range(2):
        (folder / f"link{number}.jpg").symlink_to("03.jpg")
        (folder / f"link{number}.txt").write_text(f"the same under another name {number}")
    report = check(folder)
    assert (report["num_images"], report["num_links"], report["num_duplicate_images"]) == (11, 2, 0)
    assert report["duplicate_images"] == []
    (folder / "copy.jpg").write_bytes((folder / "03.jpg").read_bytes())
    (folder / "copy.txt").write_text("a copy")
    assert check(folder)["duplicate_images"] == [["03.jpg", "copy.jpg"]]
    assert (
        "12, all readable; 2 of them are links to others" in call("data", "check", str(folder), *NANO).stdout
    )


def test_a_table_with_too_few_images_says_what_is_wrong_with_the_others(tmp_path, call):
    picture_folder(tmp_path / "photos", 2)
    table = tmp_path / "photos" / "pairs.csv"
    (tmp_path / "01.jpg").write_bytes(JPEG)
    table.write_text("image,caption\n00.jpg,a cat\ngone.jpg,a dog\n../01.jpg,a bird\n")
    said = call("data", "check", str(table), *NANO).stderr
    assert "has 1 usable image; `gone.jpg` is missing; `../01.jpg` lies outside" in said


def test_check_reads_well_on_eighty_columns(tmp_path, call):
    folder = picture_folder(tmp_path / "photos", 20)
    (folder / "broken.jpg").write_bytes(JPEG[:300])
    (folder / "broken.txt").write_text("half an image")
    done = call("data", "check", str(folder), *NANO)
    assert done.returncode == 0 and max(map(len, done.stdout.replace(str(folder), "").splitlines())) <= 80
    assert "20" in done.stdout and "broken.jpg" in done.stdout and "Truncated" in done.stdout


def test_advice_is_what_training_follows(tmp_path, call, check):
    folder = picture_folder(tmp_path / "photos", 40)
    for number in range(40):
        words = " ".join(f"word{number}x{i}" for i in range(20))
        (folder / f"{number:02}.txt").write_text(words)
    advice = " ".join(check(folder)["advice"])
    done = call("train", str(folder), *NANO, "--steps", "1", "--image-size", "16", "--json")
    settled = json.loads(done.stdout)["settled"]
    for flag in ("text-length", "batch-size"):
        assert f"`--{flag} {settled[flag.replace('-', '_')]['value']}`" in advice


@pytest.mark.slow
def test_the_text_length_that_is_advised_and_used_truncates_one_caption_in_a_hundred(tmp_path, call, check):
    folder = picture_folder(tmp_path / "photos", 40)
    for number in range(40):  # long captions are rare, and late
        long = " ".join(f"word{i}" for i in range(12 if number < 38 else 28))
        (folder / f"{number:02}.txt").write_text("".join(f"{i} {long}\n" for i in range(990)))
    report = check(folder)
    advised = -(-report["caption_tokens"]["99"] // 8) * 8
    assert 40 < advised < 77 and f"`--text-length {advised}`" in " ".join(report["advice"])
    done = call("train", str(folder), *NANO, "--steps", "1", "--image-size", "16", "--json")
    assert json.loads(done.stdout)["settled"]["text_length"]["value"] == advised


def test_file_names_are_advised_where_most_images_share_their_caption(tmp_path, check):
    animals = ("alligator", "bear", "camel", "dolphin", "eagle", "fox", "giraffe", "hen")
    for label, first in (("animals", 0), ("others", 8)):
        for file in picture_folder(tmp_path / "photos" / label, 8, first=first).glob("*.txt"):
            file.unlink()
    kinds = check(tmp_path / "photos")["advice_kinds"]
    assert "names" in kinds and "shared" not in kinds, "numbers say nothing"
    for number, animal in enumerate(animals):
        (tmp_path / f"photos/animals/{number:02}.jpg").rename(tmp_path / f"photos/animals/{animal}.jpg")
        (tmp_path / f"photos/others/{number + 8:02}.jpg").rename(
            tmp_path / f"photos/others/{animal}_{animal}.jpg"
        )
    report = check(tmp_path / "photos")
    advice = dict(zip(report["advice_kinds"], report["advice"], strict=True))["shared"]
    assert "`alligator`, `bear`" in advice and "`--format names`" in advice


def test_check_names_the_columns_of_a_table(tmp_path, call, check):
    picture_folder(tmp_path, 6)
    rows = [f"{number:02}.jpg,unit {number},a unit of kind {number} that stands" for number in range(6)]
    table = tmp_path / "units.csv"
    table.write_text("\n".join(["picture,name,description", *rows]))
    assert check(table)["columns"] == {"image": "picture", "caption": "description"}
    shown = call("data", "check", str(table), *NANO).stdout
    assert "image column `picture`, caption column `description`" in shown


def test_few_images_have_a_larger_share_for_validation_unless_one_is_asked_for(tmp_path, call, check):
    folder = picture_folder(tmp_path / "photos", 100)
    report = check(folder)
    assert 10 <= report["num_validation"] <= 35 and "`--validation-share 0.2`" in " ".join(report["advice"])
    run = [*NANO, "--image-size", "16", "--steps", "1", "--json", "--run"]
    settled = json.loads(call("train", str(folder), *run, "few").stdout)["settled"]
    assert settled["validation_share"]["value"] == 0.2 and "5%" in settled["validation_share"]["reason"]
    picture_folder(folder, 20, first=100)
    own = json.loads(call("eval", "few", "--json").stdout)
    assert own["num_images"] >= report["num_validation"], "the share of the run, of all that is there now"
    asked = call("train", str(folder), "--validation-share", "0.05", *run, "asked")
    assert "asked for" in json.loads(asked.stdout)["settled"]["validation_share"]["reason"]
    assert advise_share(1000).value == advise_share(10**6).value == 0.05 and advise_share(400).value == 0.13


def test_check_and_train_say_that_captions_are_the_names_of_folders(tmp_path, call, check):
    for number, name in enumerate(("2021-07 Italien", "Oma")):
        for file in picture_folder(tmp_path / "photos" / name, 4, first=4 * number).glob("*.txt"):
            file.unlink()
    report = check(tmp_path / "photos")
    assert "`Italien`, `Oma`" in dict(zip(report["advice_kinds"], report["advice"], strict=True))["names"]
    done = call("train", str(tmp_path / "photos"), *NANO, "--image-size", "16", "--steps", "1")
    assert done.returncode == 0 and "`Italien`, `Oma`" in done.stderr


def test_pack_says_what_it_did(tmp_path, call):
    folder = picture_folder(tmp_path / "photos", 10)
    pack = ("data", "pack", str(folder), "--image-size", "64", "--json")
    first, second = (json.loads(call(*pack).stdout) for _ in range(2))
    assert (first["num_images"], first["num_reused"], second["num_reused"]) == (10, 0, 10)
    assert first["path"] == second["path"] and Path(first["path"]).is_dir()
    assert first["bytes"] >= 10 * 3 * 72 * 72 and first["seconds"] > 0


def test_show_draws_a_sheet(tmp_path, call):
    folder = picture_folder(tmp_path / "photos", 10)
    done = call("data", "show", str(folder), *NANO, "--out", "my.png", "--count", "6", "--json")
    assert json.loads(done.stdout) == {"path": "my.png", "num_images": 6}
    with Image.open("my.png") as sheet:
        assert sheet.width > 300
    assert call("data", "show", "synthetic:50", *NANO).returncode == 0 and Path("lapclip-sheet.png").exists()
    refused = call("data", "show", "nowhere", *NANO, "--out", "my.png")
    assert refused.returncode == 1 and "replaced" not in refused.stderr, "nothing is"
    assert (
        "`my.png` exists and will be replaced"
        in call("data", "show", str(folder), *NANO, "--out", "my.png").stderr
    )
    refused = call("data", "show", str(folder), *NANO, "--out", "no/where/my.png")
    assert refused.returncode == 1 and "cannot write" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["check"], 1, "name a source"),
        (["check", "synthetic"], 1, "generated by lapclip"),
        (["chek", "photos"], 2, "chek"),
        (["check", "photos", "--format", "cvs"], 2, "Did you mean `csv`?"),
        (["pack", "nowhere"], 1, "does not exist"),
        (["show", "synthetic", "--count", "0"], 1, "`--count` is 0"),
    ],
)
def test_mistakes_are_said_in_words(arguments, code, says, call):
    done = call("data", *arguments)
    assert done.returncode == code and says in done.stderr and "hint:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_stopped_pack_says_how_to_go_on(tmp_path, call):
    folder = picture_folder(tmp_path / "photos", 400, side=300)
    process = subprocess.Popen(
        command("data", "pack", str(folder)), stderr=subprocess.PIPE, text=True, env=environment()
    )
    packs = Path(os.environ["LAPCLIP_CACHE"], "packs")
    wait_for(lambda: any(records.stat().st_size for records in packs.glob("*/records")))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command continues from there" in said
    assert "Traceback" not in said
    again = json.loads(call("data", "pack", str(folder), "--json").stdout)
    assert again["num_images"] == 400 and again["num_reused"] > 0


def test_a_hostile_folder_is_counted_and_named_and_stops_a_run_before_it_begins(tmp_path, check, call):
    folder, secret = picture_folder(tmp_path / "photos", 20), tmp_path / "secret.jpg"
    Image.new("RGB", (32, 32), "red").save(secret)
    bad = {
        "truncated.jpg": JPEG[:300],
        "empty.jpg": b"",
        "bomb.png": png_of_size(100_000, 100_000),
        "text.jpg": b"not a picture at all",
        "script.jpg": b"#!/bin/sh\nrm -rf /\n",
    }
    for name, data in bad.items():
        (folder / name).write_bytes(data)
        (folder / name).with_suffix(".txt").write_text("looks harmless")
    (folder / "link.jpg").symlink_to(secret)
    (folder / "link.txt").write_text("leads out of the folder")
    report = check(folder)
    assert report["num_images"] == 20 and report["num_unreadable"] == 5
    assert set(report["unreadable"]) == bad.keys()
    outside = [p["names"] for what, p in report["problems"].items() if "outside the source" in what]
    assert outside == [["link.jpg"]]
    done = call("train", str(folder), *NANO, "--steps", "2")
    assert done.returncode == 1 and "5 of 25 images cannot be used" in done.stderr
    assert "--max-unreadable 0.21" in done.stderr and not Path("runs").exists()
    done = call("train", str(folder), *NANO, "--image-size", "16", "--steps", "2", "--max-unreadable", "0.21")
    assert done.returncode == 0 and "5 of 25 images omitted" in done.stderr


def test_missing_images_are_said_and_too_many_stop_a_run(tmp_path, call):
    names = [f"photos/{p.name}" for p in sorted(picture_folder(tmp_path / "photos", 30).glob("*.jpg"))]

    def table(missing: int) -> None:
        rows = [f"{name},words" for name in [*names, *(f"photos/gone{n}.jpg" for n in range(missing))]]
        Path("t.csv").write_text("\n".join(["image,caption", *rows]))

    table(missing=2)
    done = call("train", "t.csv", *NANO, "--image-size", "16", "--steps", "1")
    assert done.returncode == 0 and "`photos/gone0.jpg` is missing, and 1 more" in done.stderr
    table(missing=30)
    done = call("train", "t.csv", *NANO, "--image-size", "16", "--steps", "1")
    assert done.returncode == 1 and "30 images that" in done.stderr and "--images FOLDER" in done.stderr
    assert "--max-unreadable 0.51" in done.stderr
    checked = json.loads(call("data", "check", "t.csv", "--json").stdout)
    assert any("training refuses this source: 30 images" in advice for advice in checked["advice"])


def test_names_do_not_move_the_cursor(tmp_path, call):
    folder = picture_folder(tmp_path / "photos", 20)
    (folder / "\x1b[2Jgone\x07.jpg").write_bytes(b"x")
    (folder / "\x1b[2Jgone\x07.txt").write_text("a name like a command")
    train = ("train", str(folder), *NANO, "--image-size", "16", "--steps", "1", "--max-unreadable")
    for code, *arguments in ((0, "data", "check", str(folder), *NANO), (1, *train, "0"), (0, *train, "1")):
        done = call(*arguments)
        said = done.stdout + done.stderr
        assert done.returncode == code and "gone" in said and "\x1b[2J" not in said and "\x07" not in said


def test_any_caption_can_be_trained_on(tmp_path, call):
    folder = picture_folder(tmp_path / "photos", 20)
    odd = ["🐱👩‍👩‍👧 🏳️‍🌈", "קוט שחור יושב", "\u202ereversed\u202c words", "x" * 1_000_000, "a\x00b\x1b[31mc"]
    for number, caption in enumerate(odd):
        (folder / f"{number:02}.txt").write_text(caption, encoding="utf-8")
    (folder / "19.txt").write_text("  \n\n")
    done = call("train", str(folder), *NANO, "--image-size", "16", "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["settled"]["batch_size"]["value"] <= 19


FLICKR = ROOT.parent / "shared" / "data" / "flickr8k"


@pytest.mark.prove
@pytest.mark.skipif(not FLICKR.exists(), reason="needs the Flickr8k photos")
def test_the_doctor_sees_flickr8k_whole(check):
    report = check(FLICKR)
    assert (report["num_images"], report["num_captions"], report["num_unreadable"]) == (7091, 35455, 0)
    assert report["duplicate_images"] == [["2851198725_37b6027625.jpg", "3050606344_af711c726c.jpg"]]
    assert report["own_split"] and report["num_validation"] == 500
