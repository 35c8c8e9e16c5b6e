"""Augmentation: the same after a resume, never outside the image, and nothing when nothing is asked for."""

import numpy as np
import torch

from lapclip.step.augment import augment

NOTHING = {"crop": 1.0, "flip": False, "colour": 0.0}


def pictures(num: int = 16, size: int = 24) -> torch.Tensor:
    random = np.random.default_rng(0)
    return torch.from_numpy(random.integers(0, 255, (num, 3, size, size), dtype=np.uint8))


def test_nothing_asked_for_changes_nothing():
    images = pictures()
    assert augment(images, 24, step=3, seed=0, **NOTHING) is images


def test_seed_and_step_decide_everything():
    images = pictures()
    settings = {"crop": 0.5, "flip": True, "colour": 0.3}
    one, again = (augment(images, 16, step=3, seed=0, **settings) for _ in range(2))
    assert torch.equal(one, again) and one.shape == (16, 3, 16, 16) and one.dtype == torch.uint8
    assert not torch.equal(one, augment(images, 16, step=4, seed=0, **settings))
    assert not torch.equal(one, augment(images, 16, step=3, seed=1, **settings))


def test_a_flip_mirrors_about_every_second_image():
    images = pictures(num=400, size=8)
    flipped = augment(images, 8, step=0, seed=0, crop=1.0, flip=True, colour=0.0)
    same = (flipped == images).flatten(1).all(1)
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert bool((same ^ mirrored).all()) and 150 < int(mirrored.sum()) < 250


def test_a_crop_shows_a_part_of_the_image_and_nothing_beside_it():
    ramp = torch.arange(64, dtype=torch.uint8).mul(4)[None, None, None].expand(200, 3, 64, 64).contiguous()
    shown = augment(ramp, 32, step=0, seed=0, crop=0.3, flip=False, colour=0.0).float()
    width = (shown[:, 0, 0, -1] - shown[:, 0, 0, 0]) / 252 * 63 / 64 * 32 / 31  # of the image, about
    assert bool((shown[:, 0, 0].diff() >= 0).all()), "no fold at the border"
    assert 0.4 < float(width.min()) < 0.65 and float(width.max()) <= 1.02
    left = shown[:, 0, 0, 0]
    assert float(left.min()) < 10 and float(left.max()) > 60, "from everywhere"


def test_whole_images_are_merely_made_smaller():
    smooth = torch.linspace(0, 255, 72).to(torch.uint8)[None, None, None].expand(2, 3, 72, 72).contiguous()
    shown = augment(smooth, 64, step=0, seed=0, **NOTHING).float()
    assert torch.allclose(shown[0, 0, 0], torch.linspace(0, 255, 64), atol=3)


def test_colour_changes_grey_images_in_brightness_only():
    grey = torch.full((50, 3, 8, 8), 100, dtype=torch.uint8)
    shown = augment(grey, 8, step=0, seed=0, crop=1.0, flip=False, colour=0.4).float()
    assert float(shown.std(dim=1).max()) <= 1
    means = shown.mean(dim=(1, 2, 3))
    assert float(means.min()) >= 59 and float(means.max()) <= 141 and float(means.std()) > 10
