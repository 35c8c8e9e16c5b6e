"""Numbers drawn with characters: exactly as wide as asked, high where the number is high."""

import math
import random
from itertools import pairwise

import pytest
from rich.cells import cell_len

from lapclip.view.braille import ASCII, BRAILLE, DOTS, bar, bounds, columns, curve, fill, resample
from lapclip.view.panels_text import beside, cut, padded, paint, plain, spread, width_of, wrapped


def heights(rows: list[str]) -> list[list[int]]:
    """Where each dot column of a drawn curve has dots, counted from above."""
    found: list[list[int]] = [[] for _ in range(2 * len(rows[0]))]
    for number, row in enumerate(rows):
        for cell, letter in enumerate(row):
            bits = 0 if letter == " " else ord(letter) - BRAILLE
            for x in (0, 1):
                found[2 * cell + x] += [4 * number + y for y in range(4) if bits & DOTS[x][y]]
    return found


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right_without_a_gap():
    points = [(float(x), float(x)) for x in range(11)]
    drawn = heights(curve(points, 20, 3, across=(0, 10), up=(0, 10)))
    assert drawn[0] == [11] and drawn[-1] == [0]
    for before, after in pairwise(drawn):
        assert after and max(after) <= max(before) and min(before) - max(after) <= 1


def test_a_curve_that_begins_late_leaves_its_beginning_empty():
    drawn = heights(curve([(50.0, 1.0), (100.0, 2.0)], 10, 2, across=(0, 100), up=(0, 2)))
    assert not any(drawn[:9]) and all(drawn[11:])


def test_chance_is_a_dotted_line_at_its_height():
    drawn = heights(curve([], 10, 2, across=(0, 1), up=(0, 1), line=0.0))
    assert [bool(dots) for dots in drawn] == [x % 4 == 0 for x in range(20)]
    assert all(dots in ([], [7]) for dots in drawn)


@pytest.mark.parametrize("seed", range(20))
def test_a_curve_is_as_large_as_asked_whatever_it_is_given(seed):
    generator = random.Random(seed)
    strange = [math.nan, math.inf, -math.inf, 1e300, -1e300, 0.0]
    points = [
        (float(x), generator.choice([*strange, generator.random()])) for x in range(generator.randrange(40))
    ]
    width, height = generator.randrange(1, 60), generator.randrange(1, 8)
    ends = bounds([y for _, y in points])
    rows = curve(points, width, height, across=(0, 39), up=ends, line=generator.choice([None, math.nan, 0.5]))
    assert len(rows) == height and all(len(row) == width for row in rows)


def test_of_many_points_a_stretch_shows_their_mean_and_gaps_are_bridged():
    assert resample([(0.0, 1.0), (0.1, 3.0), (10.0, 6.0)], 3, (0, 10)) == [2.0, 4.0, 6.0]
    assert fill([None, 1.0, None, None, 4.0, None]) == [None, 1.0, 2.0, 3.0, 4.0, None]
    assert resample([], 3, (0, 10)) == [None] * 3
    assert resample([(5.0, 1.0)], 3, (5, 5)) == [1.0, None, None]


@pytest.mark.parametrize("share", [-1, 0, 0.01, 0.24, 0.26, 0.5, 0.999, 1, 7, math.nan, math.inf])
@pytest.mark.parametrize("width", [0, 1, 7, 40])
def test_a_bar_is_as_wide_as_asked(share, width):
    full, rest = bar(share, width)
    assert len(full + rest) == width
    if math.isfinite(share):
        assert abs(len(full) - min(1, max(0, share)) * width) <= 1


def test_columns_show_the_least_use_too():
    assert columns([0.0, 0.001, 0.5, 1.0, 3.0]) == " ▁▄██"


def test_every_character_that_is_drawn_has_an_ascii_one():
    drawn = curve([(x, x % 7) for x in range(50)], 30, 4, across=(0, 49), up=(0, 6), line=3.0)
    everything = "".join([*drawn, *bar(0.33, 9), columns([x / 8 for x in range(9)]), "·…"])
    assert everything.translate(ASCII).isascii()


def test_lines_are_cut_by_what_they_take_on_the_screen():
    wide = [("犬と猫の写真です", "bold"), (" and more", "")]
    for width in range(25):
        assert width_of(cut(wide, width)) <= width
        assert width_of(padded(wide, width)) == width
    assert cut(wide, 40) == wide
    assert paint(cut([("abcdef", "")], 4), colour=False) == "abc…"


def test_blocks_beside_one_another_keep_their_columns():
    rows = beside([[[("a", "")], [("bb", "")]], [[("c", "")]]], [4, 3])
    assert [paint(row, colour=False) for row in rows] == ["a     c", "bb"]


def test_what_stands_at_the_right_end_goes_when_there_is_no_room():
    assert paint(spread([("name", "")], [("more", "")], 20), colour=False) == "name            more"
    assert paint(spread([("name", "")], [("more", "")], 9), colour=False) == "name"


def test_a_sentence_is_wrapped_and_what_is_left_over_is_marked():
    text = "one two three four five six seven eight nine ten"
    rows = [paint(line, colour=False) for line in wrapped(text, 16, 3, first="step 1: ")]
    assert rows[0] == "step 1: one two" and len(rows) == 3 and rows[-1].endswith("…")
    assert all(len(row) <= 16 for row in rows)
    assert len(wrapped(text, 100, 3)) == 1


@pytest.mark.parametrize("width", [8, 9, 16, 17, 40])
def test_wide_letters_are_wrapped_and_none_is_lost(width):
    text = "犬と猫の写真ですがとても長い文章なので行に収まりません and some words 犬と猫 more"
    rows = [paint(line, colour=False) for line in wrapped(text, width, 99, first="step 1: ")]
    assert all(cell_len(row) <= width for row in rows)
    assert all(cell_len(row) >= width - 8 for row in rows[:-1]), "no line is left half empty"
    assert "".join("".join(rows).split()) == "".join(f"step 1: {text}".split())


def test_text_from_a_file_cannot_move_the_cursor():
    assert plain("a\x1b[2Jb\rc\x07\nd") == "a\ufffd[2Jb\ufffdc\ufffd d"
    assert "\x1b" not in paint(wrapped("a\x1b[2J b", 40, 1)[0], colour=False)


def test_colour_is_only_painted_where_it_is_wanted():
    line = [("loss ", ""), ("2.1", "bold"), ("   ", "")]
    assert paint(line, colour=False) == "loss 2.1"
    assert paint(line, colour=True) == "loss \x1b[1m2.1\x1b[0m"
    assert cell_len(paint(line, colour=False)) == 8
