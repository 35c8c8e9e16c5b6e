"""The embedded sources: drawn scenes whose captions say what is drawn, and the documents' own gradients with noise.

Pair k is determined by the seed and k alone, on every machine.
"""

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
from PIL import Image

from lapclip.data.drawing import draw_image
from lapclip.data.scenes import CATEGORIES, FAMILY_SIZE, Scene, describe, draw_family, draw_scene
from lapclip.data.source import Source


@dataclass(frozen=True)
class SceneSource(Source):
    """Scenes of seen combinations: as many as asked for, and there are always more."""

    num_pairs: int = 100_000
    seed: int = 0
    chance: ClassVar[str] = ""  # begins what the random numbers of drawings and words are seeded by

    def scene(self, index: int) -> Scene:
        return draw_scene(Random(f"{self.seed} scene {index}"))

    def image(self, index: int, size: int) -> Image.Image:
        return draw_image(self.scene(index), size, Random(f"{self.seed} {self.chance}drawing {index}"))

    def captions(self, index: int) -> tuple[str, ...]:
        return (describe(self.scene(index), Random(f"{self.seed} {self.chance}words {index}")),)


@dataclass(frozen=True)
class ValidationScenes(SceneSource):
    """Scenes of combinations that `SceneSource` never shows, in families of near neighbours, to measure recall on."""

    num_pairs: int = 512
    chance: ClassVar[str] = "held-out "

    def scene(self, index: int) -> Scene:
        family, member = divmod(index, FAMILY_SIZE)
        return draw_family(Random(f"{self.seed} family {family}"), layout=family)[member]


# Of the documents' images: the colours at top and bottom by category, and what their captions say. No two of the 240
# pairs have the same caption: equal ones would count as correct, and loss and accuracy would not be comparable.
COLOURS = {
    "nature": ((34, 139, 34), (135, 206, 235)),
    "animals": ((139, 90, 43), (222, 184, 135)),
    "urban": ((105, 105, 105), (192, 192, 192)),
    "food": ((220, 60, 40), (255, 200, 80)),
}
SUBJECTS = {
    "nature": ("forest under the sky", "lake between hills", "meadow in the sun", "river in a valley"),
    "animals": ("dog in the grass", "cat on a chair", "bird on a branch", "horse by a fence"),
    "urban": ("street in the city", "building of glass", "bridge over the road", "square with people"),
    "food": ("salad on a plate", "bowl of soup", "slice of cake", "basket of bread"),
}
LOOKS = ("small", "large", "beautiful", "quiet", "bright")
TIMES = ("in the morning", "at noon", "in the evening")


@dataclass(frozen=True)
class DocumentsSource(Source):
    """The kind of pair the documents trained on: a gradient and noise, coloured by category, with a fixed caption.

    Only the category can be learned from these images; everything beyond it is memorised noise.
    """

    first: int
    num_pairs: int
    seed: int = 0

    def category(self, index: int) -> str:
        return CATEGORIES[(self.first + index) % len(CATEGORIES)]

    def image(self, index: int, size: int) -> Image.Image:
        top, bottom = COLOURS[self.category(index)]
        noise = np.random.default_rng([self.seed, self.first + index])
        ramp = np.linspace(0.0, 1.0, size)[:, None, None]
        gradient = (1 - ramp) * np.array(top) + ramp * np.array(bottom)
        pixels = gradient + noise.normal(0, 25, (size, size, 3))
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))

    def captions(self, index: int) -> tuple[str, ...]:
        subjects, number = SUBJECTS[self.category(index)], (self.first + index) // len(CATEGORIES)
        number, subject = divmod(number, len(subjects))
        time, look = divmod(number, len(LOOKS))
        return (f"a {LOOKS[look]} {subjects[subject]} {TIMES[time]}",)
