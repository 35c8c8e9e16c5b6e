"""Numbers drawn with characters: exactly as wide as asked, high where the number is high."""

import math
import random
from itertools import pairwise

import pytest

from lapclip.view.braille import BRAILLE, DOTS, bounds, columns, curve, resample


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


def test_chance_is_a_dotted_line_at_its_height():
    drawn = heights(curve([], 10, 2, across=(0, 1), up=(0, 1), line=0.0))
    assert [bool(dots) for dots in drawn] == [x % 4 == 0 for x in range(20)]
    assert all(dots in ([], [7]) for dots in drawn)


@pytest.mark.parametrize("seed", range(8))
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
    assert resample([(2.0, 1.0), (8.0, 4.0)], 6, (0, 10)) == [None, 1.0, 2.0, 3.0, 4.0, None]
    assert resample([], 3, (0, 10)) == [None] * 3
    assert resample([(5.0, 1.0)], 3, (5, 5)) == [1.0, None, None]


def test_columns_show_the_least_use_too():
    assert columns([0.0, 0.001, 0.5, 1.0, 3.0]) == " ▁▄██"
