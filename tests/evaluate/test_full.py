"""The full evaluation: whole pools and fixed ones, both protocols, two models, classes, mistakes."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from lapclip.config import DataConfig
from lapclip.data.decode import Unreadable
from lapclip.data.open import open_source
from lapclip.data.source import Source
from lapclip.data.split import EvaluationSet, evaluation_set
from lapclip.data.tokenizer import train_characters
from lapclip.embedder import TEMPLATES
from lapclip.errors import UserError
from lapclip.evaluate.full import divide, evaluate, worst_mistakes
from lapclip.evaluate.pool import Links, Pool, embed_pool
from lapclip.evaluate.retrieval import rank_answers, retrieval
from lapclip.units import finished

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


@dataclass(frozen=True)
class Numbered(Source):
    """Images that show their number, and captions that say it."""

    num_pairs: int = 60
    unreadable: tuple[int, ...] = ()

    def image(self, index: int, size: int) -> Image.Image:
        if index in self.unreadable:
            raise Unreadable("is broken")
        return Image.new("RGB", (size, size), (index // 256, index % 256, 0))

    def captions(self, index: int) -> tuple[str, ...]:
        return tuple(f"number {index} wording {turn}" for turn in range(1 + index % 4))


class Known:
    """A model whose embeddings are known: it reads the numbers, and errs by some noise."""

    chunk, image_size, width, templates = 16, 8, 12, TEMPLATES
    tokenizer = train_characters([])

    def __init__(self, noise: float, seed: int = 0):
        self.name, self.noise, self.seed = f"noise {noise}", noise, seed

    def row(self, number: int, kind: int) -> np.ndarray:
        truth = np.random.default_rng([7, number]).normal(size=self.width)
        return truth + self.noise * np.random.default_rng([self.seed, number, kind]).normal(size=self.width)

    def images(self, pictures) -> np.ndarray:
        seen = [image.getpixel((0, 0)) for image in pictures]
        return unit([self.row(256 * red + green, 0) for red, green, _ in seen], self.width)

    def texts(self, texts) -> np.ndarray:
        said = [text.split() for text in texts]
        return unit([self.row(int(words[1]), 1 + int(words[3])) for words in said], self.width)


class OfColours:
    """A model that knows the words for colours, and nothing else."""

    name, chunk, image_size, width, templates = "colours", 4, 16, 3, TEMPLATES
    scale = 20.0
    tokenizer = train_characters([])

    def images(self, pictures) -> np.ndarray:
        return unit([np.asarray(p, dtype=float).mean(axis=(0, 1)) + 1 for p in pictures], 3)

    def texts(self, texts) -> np.ndarray:
        known = [[COLOURS.get(word, (1, 1, 1)) for word in text.split()] for text in texts]
        return unit([np.sum(colours, axis=0) for colours in known], 3)

    def label_rows(self, labels, templates) -> np.ndarray:
        prompts = [[template.replace("{}", label) for template in templates] for label in labels]
        return unit([self.texts(some).mean(axis=0) for some in prompts], 3)


def unit(rows, width: int) -> np.ndarray:
    rows = np.array(rows, dtype=np.float32).reshape(-1, width)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def numbered(**options) -> EvaluationSet:
    source = Numbered(**options)
    return EvaluationSet(source, [None] * source.num_pairs, (), (), ())


def measure(embedder, measured=None, **options) -> dict:
    return finished(evaluate(embedder, measured or numbered(), batch_size=12, **options))


@pytest.fixture
def colour_folder(tmp_path):
    for number, name in enumerate(COLOURS):
        (tmp_path / "colours" / name).mkdir(parents=True)
        for shade in range(5):
            tint = np.clip(np.array(COLOURS[name]) - 25 * shade + 3 * number, 0, 255).astype(np.uint8)
            noise = np.random.default_rng([number, shade]).integers(0, 30, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(np.where(tint > 40, tint - noise, noise)).save(
                tmp_path / "colours" / name / f"{shade}.png"
            )
    return tmp_path / "colours"


def test_a_whole_pool_is_measured_as_in_training():
    result, expected = measure(Known(0.7)), retrieval(embed_pool(Known(0.7), Numbered(), 60), 12)
    assert result["in_batch"] == expected["in_batch"] and result["negatives"] == expected["negatives"]
    assert (result["num_images"], result["num_captions"]) == (60, 150)
    assert result["pool"] == {"size": 60, "num_pools": 1} and result["model"] == "noise 0.7"
    for way in ("text_to_image", "image_to_text"):
        for key, value in expected[way].items():
            if not key.startswith("interval"):
                assert result[way][key] == pytest.approx(value), key
        for k in (1, 5, 10):
            low, high = result[way][f"interval@{k}"]
            assert 0 <= low <= result[way][f"recall@{k}"] <= high <= 1 and low < high
    assert 0.1 < result["text_to_image"]["recall@1"] < 0.9


def test_recall_in_fixed_pools_is_the_mean_over_disjoint_pools():
    assert len(set(np.concatenate(divide(103, 20)).tolist())) == 100
    assert not np.array_equal(divide(103, 20)[0], np.arange(20)), "drawn by chance"
    result = measure(Known(0.7), pool_size=25)
    assert result["pool"] == {"size": 25, "num_pools": 2} and result["num_images"] == 50
    whole = embed_pool(Known(0.7), Numbered(), 60)
    own = [retrieval(whole.part(pictures), 12) for pictures in divide(60, 25)]
    for way in ("text_to_image", "image_to_text"):
        for key in ("recall@1", "recall@5", "recall@10", "median_rank", "chance@1", "chance@5", "chance@10"):
            assert result[way][key] == pytest.approx(np.mean([pool[way][key] for pool in own]))
    assert result["text_to_image"]["chance@10"] == pytest.approx(10 / 25)
    assert result["text_to_image"]["recall@1"] > measure(Known(0.7))["text_to_image"]["recall@1"]
    assert all(mistake["rank"] <= 25 for mistake in result["mistakes"])
    for mistake in [*result["mistakes"], *measure(Known(0.9), num_mistakes=6)["mistakes"]]:
        assert mistake["caption"].split()[1] == str(mistake["index"])
        assert mistake["picture"] == f"image {mistake['index']}"
        assert mistake["found"] and mistake["found"][0]["score"] >= mistake["score"]


def test_class_folders_have_shared_captions_and_zero_shot_accuracy(colour_folder):
    data = finished(open_source(DataConfig(source=str(colour_folder), workers=0), 16))
    measured = evaluation_set(data, validation_only=False)
    shared = measure(OfColours(), measured, templates=("a {} image", "{}"), against=OfColours())
    published = measure(OfColours(), measured, published=True)
    assert shared["protocol"] == "shared" and published["protocol"] == "published"
    assert shared["text_to_image"]["recall@1"] == 1 > published["text_to_image"]["recall@1"]
    assert shared["text_to_image"]["num_units"] == 4, "captions"
    assert shared["text_to_image"]["chance@1"] == pytest.approx(5 / 20)
    assert published["text_to_image"]["chance@1"] == pytest.approx(1 / 20)
    zero_shot = shared["zero_shot"]
    assert zero_shot["top1"] == 1 and zero_shot["num_images"] == 20
    assert zero_shot["confusion"]["labels"] == sorted(COLOURS)
    assert zero_shot["confusion"]["counts"] == (5 * np.eye(4, dtype=int)).tolist()
    assert zero_shot["templates"] == ["a {} image", "{}"]
    assert [one["top1"] for one in shared["few_shot"]["results"]] == [1, 1], (
        "with 1 and 4 of 5 images per class"
    )
    assert shared["against"]["zero_shot"]["top1"] == {"difference": 0, "interval": [0, 0], "p_value": 1}


@pytest.mark.parametrize("pool_size", [None, 25])
def test_a_better_model_is_told_from_a_worse_one(pool_size):
    good, bad = (Known(noise, seed) for noise, seed in ((0.4, 1), (1.2, 2)))
    one = measure(good, against=bad, pool_size=pool_size)
    two = measure(bad, against=good, pool_size=pool_size)
    for key in ("recall@1", "recall@5", "recall@10"):
        told, back = (result["against"]["text_to_image"][key] for result in (one, two))
        assert told["difference"] == pytest.approx(one["text_to_image"][key] - two["text_to_image"][key])
        assert told["difference"] == pytest.approx(-back["difference"])
        assert 0 < told["interval"][0] < told["difference"] < told["interval"][1]
        assert told["p_value"] == back["p_value"] < 0.01


def test_unreadable_images_are_named_and_omitted_and_broken_weights_refused():
    result = measure(Known(0.5), numbered(unreadable=(3, 40)), against=Known(0.8))
    assert result["num_images"] == 58 and result["unreadable"] == ["image 3", "image 40"]
    with pytest.raises(UserError, match="none of 5 validation images can be read"):
        measure(Known(0.5), numbered(num_pairs=5, unreadable=(0, 1, 2, 3, 4)))
    for models in ((Known(np.nan), Known(0.5)), (Known(0.5), Known(np.nan))):
        with pytest.raises(UserError, match="the weights of `noise nan` are damaged"):
            measure(models[0], against=models[1])


@dataclass(frozen=True)
class OneCaptionForTen(Numbered):
    def captions(self, index: int) -> tuple[str, ...]:
        return (f"number {index // 10} wording 0",)


@pytest.mark.parametrize("pool_size", [None, 30])
def test_images_that_share_a_caption_are_one_witness(pool_size):
    """Ten images called the same ask the same question: six questions are asked, not sixty."""
    shared = EvaluationSet(OneCaptionForTen(), [None] * 60, (), (), ())
    result = measure(Known(0.1, 1), shared, against=Known(3.0, 2), pool_size=pool_size)
    told = result["against"]["text_to_image"]["recall@1"]
    assert told["p_value"] >= 2 / 2**6 - 0.01, "what flips of six signs can tell"
    low, high = result["text_to_image"]["interval@1"]
    assert high - low > 0.3


def a_pool(num_images: int = 30, captions_each: int = 3, noise: float = 1.0, seed: int = 0) -> Pool:
    random = np.random.default_rng(seed)
    image = random.normal(size=(num_images, 8))
    image_of_caption = np.repeat(np.arange(num_images), captions_each)
    text = image[image_of_caption] + noise * random.normal(size=(len(image_of_caption), 8))
    image, text = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (image, text))
    captions = [f"caption {m}" for m in range(len(text))]
    numbers = 100 + np.arange(num_images)
    return Pool(image, text, image_of_caption, captions, indices=numbers, groups=numbers)


def worst(pool: Pool, most: int = 1000):
    links = Links.of_captions(pool)
    return worst_mistakes(pool, finished(rank_answers(pool.text_ME, pool.image_NE, links)), links, most)


def test_the_worst_come_first_and_each_image_once():
    pool = a_pool()
    listed = worst(pool)
    cosine = pool.text_ME @ pool.image_NE.T
    own = cosine[np.arange(90), pool.image_of_caption]
    ranks = (cosine >= own[:, None]).sum(axis=1)
    highest = [ranks[pool.image_of_caption == n].max() for n in range(30)]
    assert [m.rank for m in listed] == sorted((rank for rank in highest if rank > 1), reverse=True)
    assert len({m.index for m in listed}) == len(listed) > 10
    for mistake in listed:
        caption = pool.captions.index(mistake.caption)
        assert mistake.index == pool.indices[pool.image_of_caption[caption]]
        assert mistake.rank == ranks[caption]
        scores = [score for _, score in mistake.found]
        assert len(scores) == min(5, mistake.rank - 1), "no more than came before it"
        assert scores == sorted(scores, reverse=True) and min(scores) >= mistake.score
        assert mistake.index not in [index for index, _ in mistake.found]
        assert abs(mistake.gap - (scores[0] - mistake.score)) < 1e-6
    assert worst(pool, 4) == listed[:4] and worst(a_pool(noise=0)) == []
    pairs = list(pairwise(worst(a_pool(noise=0.7))))
    assert any(one.rank == two.rank for one, two in pairs)
    assert all((one.rank, one.gap) >= (two.rank, two.gap) for one, two in pairs), "the larger gap first"


def test_images_that_share_a_caption_make_one_mistake_of_it():
    pool = a_pool(12, 1, noise=2)
    named = replace(
        pool, captions=["cat"] * 6 + ["dog"] * 6, text_ME=np.repeat(pool.text_ME[[0, 6]], 6, axis=0)
    )
    listed = worst(named)
    assert len(listed) == len({mistake.caption for mistake in listed}) > 0
    for mistake in listed:
        own = range(6) if mistake.caption == "cat" else range(6, 12)
        cosine = named.image_NE @ named.text_ME[own[0]]
        assert mistake.index - 100 == max(own, key=lambda n: cosine[n]), "the nearest of its images"
        assert not {index - 100 for index, _ in mistake.found} & set(own)
