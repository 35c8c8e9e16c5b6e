"""The embedded sources: rich, repeatable, and with validation scenes that cannot be found by chance or from colours."""

import hashlib
import re
from collections import Counter
from dataclasses import fields
from random import Random

import numpy as np
import pytest
from conftest import opened

from lapclip.data.drawing import draw_image
from lapclip.data.scenes import ALL_KINDS, BACKGROUNDS, COLOURS, KINDS, SIZE_WORDS, UNSEEN_COLOUR, Scene
from lapclip.data.synthetic import DocumentsSource, SceneSource, ValidationScenes
from lapclip.errors import UserError

POOL = ValidationScenes()


def attributes(scene: Scene) -> dict[str, object]:
    flat = {f.name: getattr(scene, f.name) for f in fields(scene) if f.name not in ("first", "second")}
    for name in ("first", "second"):
        thing = getattr(scene, name)
        flat |= {f"{name}.{f.name}": getattr(thing, f.name) for f in fields(thing)}
    return flat


def is_unseen(scene: Scene) -> bool:
    """Whether it shows a combination of kind and colour that training never does."""
    return any(UNSEEN_COLOUR[thing.kind] == thing.colour for thing in (scene.first, scene.second))


def test_image_k_is_the_same_on_every_machine():
    """Digests of pixels and captions; they change only when the drawing is changed on purpose."""
    source, digest = SceneSource(num_pairs=1000), hashlib.sha256()
    for index in (0, 1, 2, 500, 999, 123456):
        digest.update(source.image(index, 64).tobytes())
        digest.update(source.captions(index)[0].encode())
        digest.update(POOL.image(index % 512, 48).tobytes())
    assert digest.hexdigest()[:16] == "30f91bcd06874811"


def test_the_source_is_endless_its_seed_matters_and_images_have_any_size():
    far = SceneSource(num_pairs=10).captions(10**12)
    assert far == SceneSource(num_pairs=10**13).captions(10**12)
    assert SceneSource(10, seed=1).captions(0) != SceneSource(10, seed=0).captions(0)
    image = SceneSource(10).image(3, 63)
    assert image.size == (63, 63) and image.mode == "RGB"
    assert len(set(image.get_flattened_data())) > 25, "edges are anti-aliased"


def test_scenes_vary_in_everything_they_promise():
    scenes = [SceneSource(10**6).scene(index) for index in range(3000)]
    seen = {name: Counter(attributes(s)[name] for s in scenes) for name in attributes(scenes[0])}
    assert set(seen["category"]) == {"nature", "animals", "urban", "food"}
    assert set(seen["background"]) == {b for bs in BACKGROUNDS.values() for b in bs}
    assert set(seen["first.kind"]) == set(ALL_KINDS) and set(seen["second.colour"]) == set(COLOURS)
    assert [len(seen[n]) for n in ("time", "first.count", "first.size", "first.place")] == [4, 3, 2, 3]
    for counts in seen.values():
        assert min(counts.values()) > 0.5 * len(scenes) / len(counts), "each value is common"
    assert len({SceneSource(10**6).captions(i) for i in range(3000)}) == 3000


def test_captions_say_what_is_drawn_in_several_wordings():
    openings = set()
    for index in range(300):
        scene, (caption,) = SceneSource(300).scene(index), SceneSource(300).captions(index)
        openings.add(caption.split()[0])
        assert scene.background in caption
        for thing in (scene.first, scene.second):
            words = f"{thing.colour} {thing.kind[:3]}"
            assert re.search(rf"(a|two|three) ({'|'.join(SIZE_WORDS[thing.size])}) {words}", caption), caption
    assert len(openings) >= 5


def test_training_never_shows_a_validation_combination():
    for index in range(20_000):
        assert not is_unseen(SceneSource(10**6).scene(index))
    assert set(UNSEEN_COLOUR) == {kind for kinds in KINDS.values() for kind in kinds}
    assert set(UNSEEN_COLOUR.values()) == set(COLOURS), "no colour is unseen more than its share"


@pytest.mark.slow
def test_every_pooled_image_is_unseen_unique_and_has_three_near_neighbours():
    scenes = [POOL.scene(index) for index in range(POOL.num_pairs)]
    captions = [POOL.captions(index)[0] for index in range(POOL.num_pairs)]
    assert all(map(is_unseen, scenes))
    assert len(set(scenes)) == len(set(captions)) == 512
    values = np.array([list(map(str, attributes(scene).values())) for scene in scenes])
    num_different = (values[:, None] != values).sum(axis=2)
    assert ((num_different == 1).sum(axis=1) >= 3).all()


def test_what_differs_in_one_attribute_differs_in_the_image():
    """No attribute is only in the words: the same random details, another value, another image."""
    for start in range(0, POOL.num_pairs, 8):
        drawn = {draw_image(POOL.scene(index), 64, Random(0)).tobytes() for index in range(start, start + 8)}
        assert len(drawn) == 8


def test_the_documents_pairs_are_216_and_24_each_with_a_caption_of_its_own():
    data = opened("synthetic:documents")
    training, validation = data.training, data.validation
    assert (training.num_pairs, validation.num_pairs) == (216, 24)
    captions = [source.captions(n)[0] for source in (training, validation) for n in range(source.num_pairs)]
    assert len(set(captions)) == 240 and max(map(len, captions)) <= 75
    first, again = (DocumentsSource(0, 216).image(5, 224).tobytes() for _ in range(2))
    assert first == again != DocumentsSource(0, 216).image(9, 224).tobytes()


@pytest.mark.parametrize("name", ["synthetc", "photos/", "synthetic:1", "synthetic:many"])
def test_what_is_not_a_source_is_an_error_with_a_hint(name):
    assert opened("synthetic:").training.num_pairs == 100_000
    with pytest.raises(UserError) as caught:
        opened(name)
    assert "synthetic" in caught.value.hint
