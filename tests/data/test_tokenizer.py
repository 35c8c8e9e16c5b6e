"""Captions as rows of token ids."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers

from lapclip.data.tokenizer import (
    END,
    PAD,
    START,
    UNKNOWN,
    WORDS,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
    words_of,
)
from lapclip.errors import UserError

CAPTIONS = ["a small red cat on the left", "two large blue dogs", "ein Haus am See", "東京の夜景", "قطة"] * 20
BPE = train_tokenizer("bpe", CAPTIONS, 600)
CHARACTERS = train_tokenizer("characters", CAPTIONS, 600)


@pytest.mark.parametrize("tokenizer", [BPE, CHARACTERS], ids=["bpe", "characters"])
def test_a_row_is_start_caption_end_padding(tokenizer):
    texts = ["a cat", "A CAT", "a small red cat", "", "a <end> b <pad> <start>", "unseen wörds"]
    tokens, ends = tokenizer.encode(texts, 60)
    for row, end in zip(tokens, ends, strict=True):
        assert row[0] == START and row[end] == END
        assert (row[end + 1 :] == PAD).all() and not np.isin(row[1:end], [PAD, START, END]).any()
    assert (tokens[0] == tokens[1]).all() and ends[3] == 1
    Path("tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
    assert (load_tokenizer(Path("tokenizer.json")).encode(texts, 60)[0] == tokens).all()
    tokens, ends = tokenizer.encode(["two large blue dogs " * 50, "a"], 12)
    assert tokens.shape == (2, 12) and ends[0] == 11 and tokens[0, 11] == END, "cut, and still ends"


def test_the_character_tokenizer_has_33_symbols_whatever_it_was_trained_on():
    assert CHARACTERS.vocab_size == train_tokenizer("characters", ["ab"], 600).vocab_size == 33
    tokens, _ = CHARACTERS.encode(["a\u2603\nb"], 20)
    assert (tokens[0] == UNKNOWN).sum() == 2, "one unknown for each character, the line break included"


@pytest.mark.parametrize(
    "caption", ["a small red cat", "日本語のキャプション", "قطة", "🦄 emoji", "naïve café", "tab\tand\nline"]
)
def test_bpe_writes_every_language_and_reads_it_back(caption):
    tokens, ends = BPE.encode([caption], 200)
    assert BPE.pipeline.decode(tokens[0, 1 : ends[0]].tolist()).strip() == caption.lower()
    assert UNKNOWN not in tokens
    assert BPE.lengths(["a small red cat on the left"])[0] == 7 + 2, "frequent words are one token"


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "Evil"}}'])
def test_a_broken_file_is_named(content):
    Path("tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(Path("tokenizer.json"))


def test_words_that_no_caption_has_are_named_in_any_script():
    Path("tokenizer.json").write_text(BPE.to_json(), "utf-8")
    assert load_tokenizer(Path("tokenizer.json")).unknown_words("asdkjhasd") is None, "it is not known"
    words = words_of(
        [
            "A small, red-haired CAT's toy",
            "ein Haus am See",
            "東京の夜景",
            "हिन्दी",
            "caf\u00e9 \u201cTag\u201d",
            "STRASSE",
        ]
    )
    Path(WORDS).write_text("\n".join(words), "utf-8")
    tokenizer = load_tokenizer(Path("tokenizer.json"))
    assert tokenizer.unknown_words("Red cat + haus - SEE: 京都 夜 cafe\u0301 straße हिन्दी tag!") == ["都"]
    assert tokenizer.unknown_words("asdkjhasd cat asdkjhasd Hund हिन्") == ["asdkjhasd", "hund", "हिन्"]
    assert tokenizer.unknown_words("カエル 東京の蛙夜 日本go") == ["カエル", "蛙", "日本go"], (
        "as one writes them"
    )
    assert tokenizer.share_unknown(["ein Hund", "東蛙"]) == 0.5 and BPE.share_unknown(["ein"]) is None
    assert tokenizer.share_unknown(["the cat of the Hund"]) == 0.5, "words that show nothing do not count"
    assert tokenizer.unknown_words("a cat with the Hund") == ["hund"], (
        "words that show nothing are not missed"
    )
    assert tokenizer.unknown_words("") == [] and words_of(str(number) for number in range(500_000)) is None


def test_other_peoples_vocabularies_have_their_own_start_end_and_padding():
    theirs = Tokenizer(tokenizers.Tokenizer.from_str(BPE.to_json()), start=7, end=9, pad=9)
    ours, ends = BPE.encode(["a cat", "a small red cat"], 40)
    tokens, their_ends = theirs.encode(["a cat", "a small red cat"], 40)
    assert (tokens == np.select([ours == START, ours == END, ours == PAD], [7, 9, 9], ours)).all()
    assert (their_ends == ends).all() and theirs.highest_id == BPE.vocab_size - 1


def test_a_file_that_asks_to_cut_and_pad_is_not_obeyed():
    """That is done by rows, as long as the model reads."""
    pipeline = tokenizers.Tokenizer.from_str(BPE.to_json())
    pipeline.enable_truncation(3)
    pipeline.enable_padding(length=30)
    Path("tokenizer.json").write_text(pipeline.to_str(), "utf-8")
    texts = ["a cat", "two large blue dogs on the left"]
    assert (load_tokenizer(Path("tokenizer.json")).encode(texts, 50)[0] == BPE.encode(texts, 50)[0]).all()
