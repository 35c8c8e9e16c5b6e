"""What is asked, in words: signs between spaces add and take away, and nothing else does."""

import pytest

from lapclip.search.query import Term, in_words, parse_words


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("red bicycle", [(1, "red bicycle")]),
        ("beach - people + sunset", [(1, "beach"), (-1, "people"), (1, "sunset")]),
        ("a red-haired dog", [(1, "a red-haired dog")]),
        ("C++ book -50%", [(1, "C++ book -50%")]),
        ("- people", [(-1, "people")]),
        ("+ sea", [(1, "sea")]),
        ("beach -", [(1, "beach")]),
        ("beach - + sea", [(1, "beach"), (1, "sea")]),
        ("  beach \t-\n many   people ", [(1, "beach"), (-1, "many people")]),
        ("a - b - c", [(1, "a"), (-1, "b"), (-1, "c")]),
        ("", []),
        (" - + - ", []),
        ("a -- b", [(1, "a -- b")]),
    ],
)
def test_signs_between_spaces_separate_and_others_belong_to_words(text, terms):
    assert parse_words(text) == [Term(sign, words=words) for sign, words in terms]


@pytest.mark.parametrize("text", ["beach - people + sunset", "- people", "red bicycle"])
def test_what_was_asked_can_be_said_again(text):
    assert in_words(parse_words(text)) == text


def test_images_are_said_by_their_names():
    assert in_words(parse_words("sea"), ["a.jpg"], ["b.jpg"]) == "sea + like a.jpg - like b.jpg"
    assert in_words([], ["a.jpg"]) == "like a.jpg"
