"""Captions in, token ids out: a byte-level BPE trained on the captions at hand, or the documents' 33 characters.

Both are `tokenizers` pipelines in one `tokenizer.json`, lower-cased, with the same four special symbols. Any other
pipeline, such as OpenAI's, works too: it says which of its ids start, end and pad a row.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from unicodedata import normalize

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lapclip.errors import UserError, printable, reason_for
from lapclip.files import read_bounded

PAD, START, END, UNKNOWN = range(4)
SPECIAL = ["<pad>", "<start>", "<end>", "<unknown>"]
NUM_CHARACTERS = 33  # with the special symbols
MAX_BYTES = 64 * 2**20  # of a file; vocabularies of 250,000 tokens take about 20 MB
WORDS = "words.txt"  # beside `tokenizer.json`: the words of the training captions, one per line
MAX_WORDS = 200_000
# Words are between spaces and punctuation; in scripts without spaces, such as Chinese and Thai, each character is one.
ALONE = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
BETWEEN = r"\s!-/:-@\[-`{-~\xa1-\xbf\u2000-\u206f\u3000-\u303f\uff00-\uff0f"
FUNCTION_WORDS = frozenset(("a", "an", "and", "at", "by", "in", "is", "of", "on", "or", "the", "to", "with"))
WORD = re.compile(f"[{ALONE}]|[^{BETWEEN}{ALONE}]{{1,64}}")


@dataclass(eq=False, repr=False)
class Tokenizer:
    """Turns captions into rows of ids: start, the caption, end, padding; `is_full` pads rows to their full length."""

    pipeline: tokenizers.Tokenizer
    start: int | None = START  # None, as in SigLIP: rows begin with the caption
    end: int = END
    pad: int = PAD
    is_full: bool = False
    model_vocab_size: int | None = None  # the model may have more tokens than the pipeline
    words_file: Path = Path()  # there is none
    max_cached: int = field(default=0, init=False)  # captions whose tokens are kept in memory

    def __post_init__(self) -> None:
        self.before = [] if self.start is None else [self.start]
        self.cached: dict[str, Sequence[int]] = {}
        # `<end>` in a caption is plain text: only `encode` ends a row.
        self.pipeline.encode_special_tokens = True
        self.pipeline.no_padding()  # that and cutting is done here; other people's files may ask for both
        self.pipeline.no_truncation()

    def with_ids(
        self, start: int | None, end: int, pad: int, *, is_full: bool, vocab_size: int | None = None
    ) -> "Tokenizer":
        """The same pipeline with other tokens around texts, as a pretrained model was trained with."""
        return replace(self, start=start, end=end, pad=pad, is_full=is_full, model_vocab_size=vocab_size)

    @property
    def vocab_size(self) -> int:
        return self.model_vocab_size or self.pipeline.get_vocab_size()

    @property
    def kind(self) -> str:
        """As `--tokenizer` names it; those of other programs count as BPE."""
        return "characters" if self.vocab_size == NUM_CHARACTERS else "bpe"

    @property
    def highest_id(self) -> int:
        """Other people's vocabularies may leave ids out."""
        return max(self.pipeline.get_vocab(with_added_tokens=True).values(), default=0)

    def encode(self, captions: list[str], text_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids [B, T] and the place of each end token [B]; T is the longest caption, in steps of eight.

        In steps of eight so that an accelerator meets few different shapes. A caption that is too long is cut
        before its end token.
        """
        most = text_length - len(self.before) - 1
        rows = [[*self.before, *ids[:most], self.end] for ids in self.ids(captions)]
        longest = text_length if self.is_full else min(text_length, -(-max(map(len, rows)) // 8) * 8)
        tokens = np.full((len(rows), longest), self.pad, dtype=np.int64)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        return tokens, np.array([len(ids) - 1 for ids in rows], dtype=np.int64)

    def lengths(self, captions: list[str]) -> np.ndarray:
        """Tokens of each caption, start and end included, before any cut."""
        some = (captions[i : i + 10_000] for i in range(0, len(captions), 10_000))
        added = len(self.before) + 1
        return np.array([len(ids) + added for few in some for ids in self.ids(few)], dtype=np.int64)

    def ids(self, captions: list[str]) -> list[Sequence[int]]:
        new = [caption for caption in captions if caption not in self.cached]
        encoded = self.pipeline.encode_batch_fast(new, add_special_tokens=False)
        found = {caption: array("i", one.ids) for caption, one in zip(new, encoded, strict=True)}
        if len(self.cached) + len(found) <= self.max_cached:
            self.cached |= found
        return [found[caption] if caption in found else self.cached[caption] for caption in captions]

    def to_json(self) -> str:
        if self.is_full:  # the padding has an effect
            self.pipeline.enable_padding(pad_id=self.pad, pad_token=str(self.pipeline.id_to_token(self.pad)))
        text = self.pipeline.to_str(pretty=True)
        self.pipeline.no_padding()
        return text

    @cached_property
    def words(self) -> frozenset[str] | None:
        """Of all training captions, and words that show nothing; None for other programs and earlier versions."""
        try:
            return FUNCTION_WORDS.union(read_bounded(self.words_file).decode("utf-8", "replace").split("\n"))
        except OSError:
            return None

    def unknown_words(self, text: str) -> list[str] | None:
        """The words of a text that no training caption contains; None where those are not known."""
        if (known := self.words) is None:
            return None
        text = normalize("NFC", text.casefold())
        left = WORD.sub(lambda found: " " if found[0] in known else found[0], text)
        return list(dict.fromkeys(re.findall(f"[^{BETWEEN}]+", left)))  # characters without spaces as one

    def share_unknown(self, captions: Iterable[str]) -> float | None:
        """The share of the words of captions that no training caption contains; None where those are not known.

        Words such as `the`, which show nothing, do not count.
        """
        words = [word for text in captions for word in split_words(text) if word not in FUNCTION_WORDS]
        known = self.words
        return None if known is None else sum(word not in known for word in words) / max(1, len(words))


def load_tokenizer(path: Path) -> Tokenizer:
    try:
        pipeline = tokenizers.Tokenizer.from_str(read_bounded(path, MAX_BYTES).decode("utf-8"))
    except OSError as error:
        hint = "copy the whole run folder, including `tokenizer.json`"
        raise UserError(f"cannot read `{path}`: {reason_for(error)}", hint=hint) from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics are not even that
        problem = f"`{path}` is not a tokenizer: {printable(str(error)[:200])}"
        raise UserError(problem, hint="copy the whole folder again") from None
    return Tokenizer(pipeline, words_file=path.with_name(WORDS))


def openai_tokenizer(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """OpenAI's pipeline with a vocabulary, as transformers builds it."""
    words = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    start, end = "<|startoftext|>", "<|endoftext|>"
    pipeline = tokenizers.Tokenizer(models.BPE(vocab, merges, end_of_word_suffix="</w>", unk_token=end))
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    pipeline.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    split = pre_tokenizers.Split(Regex(words), behavior="removed", invert=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([start, end])
    ids = [(token, pipeline.token_to_id(token)) for token in (start, end)]
    pipeline.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}", special_tokens=ids)
    return Tokenizer(pipeline)


def split_words(text: str) -> list[str]:
    """The different words of a text, casefolded, in order."""
    return list(dict.fromkeys(WORD.findall(normalize("NFC", text.casefold()))))


def words_of(captions: Iterable[str]) -> list[str] | None:
    """The different words of many captions, sorted; None where there are too many to keep."""
    captions, pieces = iter(captions), set[str]()
    while some := list(islice(captions, 1000)):
        pieces.update(" ".join(some).casefold().split())  # far fewer than words, and found faster
        if len(pieces) > 2 * MAX_WORDS:
            return None
    words = sorted(split_words(" ".join(pieces)))
    return words if len(words) <= MAX_WORDS else None


def train_tokenizer(kind: str, captions: Iterable[str], max_vocab: int) -> Tokenizer:
    """A tokenizer made for these captions."""
    return train_bpe(captions, max_vocab) if kind == "bpe" else train_characters(captions)


def train_bpe(captions: Iterable[str], max_vocab: int) -> Tokenizer:
    """Byte-level, so that every caption in every language can be written; frequent words become one token."""
    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator(captions, trainer)
    return Tokenizer(pipeline)


def train_characters(captions: Iterable[str]) -> Tokenizer:
    """One token a character: the most frequent 29; the rest is unknown. Always 33 symbols, so sizes count the same."""
    counts = Counter(character for caption in captions for character in caption.lower())
    known = sorted(counts, key=lambda c: (-counts[c], c))
    alphabet = "abcdefghijklmnopqrstuvwxyz .,-'0123456789"
    known = list(dict.fromkeys([*known, *alphabet]))[: NUM_CHARACTERS - len(SPECIAL)]
    vocab = {symbol: number for number, symbol in enumerate([*SPECIAL, *known])}
    pipeline = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL[UNKNOWN]))
    pipeline.normalizer = normalizers.Lowercase()
    pipeline.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    pipeline.decoder = decoders.Fuse()
    return Tokenizer(pipeline)
