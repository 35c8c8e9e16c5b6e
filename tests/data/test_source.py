"""Sources as training sees them: mixtures by weight, all captions or one, a bounded shuffle, broken images."""

import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, as_flags, opened, picture_folder

from lapclip.data.batches import fetch
from lapclip.data.open import parse_source
from lapclip.data.source import local_order
from lapclip.errors import UserError


def test_several_sources_are_written_with_weights():
    assert parse_source("photos") == [("photos", 1.0)]
    assert parse_source("photos + emoji@2.5 + me@home") == [("photos", 1.0), ("emoji", 2.5), ("me@home", 1.0)]
    for wrong in ("photos + ", " + photos", "photos@0", "photos@1001"):
        with pytest.raises(UserError):
            parse_source(wrong)


def test_a_mixture_shows_each_part_as_often_as_its_weight(tmp_path):
    one, two = picture_folder(tmp_path / "one", 40), picture_folder(tmp_path / "two", 20, first=100)
    mixed = opened(f"{one} + {two}@2.5")
    assert parse_source(mixed.source) == [(str(one), 1.0), (str(two), 2.5)]
    parts = [part.training.num_pairs for part in mixed.parts]
    order = mixed.training.order(0, seed=0)
    assert len(order) == mixed.training.num_pairs == parts[0] + round(2.5 * parts[1])
    times = Counter(order.tolist())
    assert {times[i] for i in range(parts[0])} == {1}
    assert {times[i] for i in range(parts[0], sum(parts))} == {2, 3}
    assert not np.array_equal(order, mixed.training.order(1, seed=0))
    for index in (0, parts[0], sum(parts) - 1):
        part, own = mixed.training.part_of(index)
        assert mixed.training.captions(index) == part.captions(own)
        pixels = mixed.training.pixels(np.array([index]), mixed.training.stored_size(16))
        assert np.array_equal(pixels[0], part.pixels(np.array([own]), 24)[0])
    sample = mixed.validation.sample(2)
    assert {mixed.validation.part_of(int(i))[0] for i in sample} == {part.validation for part in mixed.parts}


def test_an_image_that_two_parts_hold_is_on_one_side(tmp_path):
    one = picture_folder(tmp_path / "one", 24)
    for side, numbers in (("train", range(12)), ("val", range(12, 24))):
        picture_folder(tmp_path / "two" / side, len(numbers), first=numbers.start)
    mixed = opened(f"{one} + {tmp_path / 'two'}", validation_share=0.2)
    contents = {}
    for part in mixed.parts:
        for source, side in ((part.training, "train"), (part.validation, "validation")):
            for index in range(source.num_pairs):
                contents.setdefault(Path(source.name(index)).name, set()).add(side)
    assert len(contents) == 24 and not [name for name, sides in contents.items() if len(sides) > 1]
    groups = mixed.validation.groups(np.arange(mixed.validation.num_pairs))
    assert len(np.unique(groups)) < len(groups), "equal images of two parts are equal for the loss"


@pytest.mark.parametrize("name", ["holiday@2023", "50 % + 7@2", 'ünïcode 🐈 quote\'d "x"'])
def test_a_folder_may_be_called_anything(tmp_path, name):
    picture_folder(tmp_path / name, 8)
    assert opened(name).parts[0].name == str(tmp_path / name)
    assert opened(str(tmp_path / name)).training.num_pairs


def test_a_split_of_one_image_is_no_split(tmp_path):
    picture_folder(tmp_path / "photos" / "train", 20)
    picture_folder(tmp_path / "photos" / "val", 1, first=50)
    data = opened(tmp_path / "photos")
    assert data.validation.num_pairs >= 2 and data.training.num_pairs + data.validation.num_pairs == 21


def test_a_folder_of_images_named_relative_to_the_table_is_found_again(tmp_path):
    picture_folder(tmp_path / "set" / "deep" / "pics", 8)
    rows = [f"{number:02}.jpg,words of {number}" for number in range(8)]
    (tmp_path / "set" / "t.csv").write_text("\n".join(["image,caption", *rows]))
    data = opened("set/t.csv", images="deep/pics")
    assert data.images == str(tmp_path / "set" / "deep" / "pics")


def test_one_caption_an_epoch_in_turn_or_all_of_them(tmp_path):
    folder = picture_folder(tmp_path / "photos", 10)
    for file in folder.glob("*.txt"):
        file.write_text("\n".join(f"{word} {file.stem}" for word in ("one", "two", "three")))
    one = opened(folder, validation_share=0.2).training
    everything = opened(folder, validation_share=0.2, captions="all").training
    assert everything.num_pairs == 3 * one.num_pairs
    indices = np.arange(one.num_pairs)
    epochs = [fetch(one, indices, np.full(len(indices), e), 24, seed=0).captions for e in range(3)]
    assert all(len({words[i] for words in epochs}) == 3 for i in indices), "each caption in its turn"
    indices = np.arange(everything.num_pairs)
    shown = fetch(everything, indices, np.zeros(len(indices), int), 24, seed=0)
    assert len(set(shown.captions)) == everything.num_pairs
    groups = everything.groups(indices)
    assert set(Counter(groups.tolist()).values()) == {3}, "the loss knows that three captions share an image"
    for i in range(everything.num_pairs):
        assert shown.captions[i].split()[1] == everything.name(i)[:-4]


def test_a_packed_source_is_small_to_send(tmp_path):
    training = opened(picture_folder(tmp_path / "photos", 30)).training
    pixels, sent = training.pixels(np.arange(5), 24), pickle.dumps(training)
    assert len(sent) < 2000 and np.array_equal(pickle.loads(sent).pixels(np.arange(5), 24), pixels)


def test_a_bounded_shuffle_shows_every_pair_once_and_reads_neighbours_together():
    order = local_order(10_000, window=800, epoch=0, seed=0)
    assert sorted(order.tolist()) == list(range(10_000))
    for start in range(0, 10_000, 800):
        runs = {int(i) // 100 for i in order[start : start + 800]}
        assert len(runs) <= 9, "a window holds eight runs of neighbours"
    assert np.abs(np.diff(order)).mean() > 1000, "from all over"
    assert not np.array_equal(order, local_order(10_000, window=800, epoch=1, seed=0))


def test_a_broken_image_gives_its_place_to_the_next_pair_and_a_vanished_source_is_an_error(tmp_path):
    folder = picture_folder(tmp_path / "photos", 12)
    training = opened(folder, pack=False).training
    gone = training.name(3)
    (folder / gone).unlink()
    got = fetch(training, np.arange(6), np.zeros(6, int), 24, seed=0)
    assert got.indices.tolist() == [0, 1, 2, 4, 4, 5] and got.captions[3] == training.captions(4)[0]
    assert len(got.faults) == 1 and gone in got.faults[0]
    for file in folder.glob("*.jpg"):
        file.unlink()
    with pytest.raises(UserError, match="in a row cannot be read"):
        fetch(training, np.arange(4), np.zeros(4, int), 24, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"workers": 1}])
def test_a_run_trains_on_a_folder_from_the_pack_and_without_it(tmp_path, more, call):
    folder = picture_folder(tmp_path / "photos", 60)
    small = SMALL | {"source": folder, "steps": 12, "eval_every": "12"} | more
    flags = [*as_flags(small), *(["--no-pack"] if more else [])]
    done = call("train", "--json", *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] == 12 and result["settled"]["pack"]["value"] is (not more)
    assert ("is not packed" in done.stderr) == bool(more)
    assert f"index {folder} --model" in done.stderr, "what to do next with a folder"
    again = call("eval", result["run"], "--json")
    assert json.loads(again.stdout)["text_to_image"] == result["recall"]["text_to_image"]
