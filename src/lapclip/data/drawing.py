"""Draws a scene with Pillow, anti-aliased, at any size: the shapes live in a unit square and are scaled last.

All coordinates are rounded to whole pixels of an enlarged canvas before Pillow sees them, so that no machine's
floating point decides a pixel.
"""

from functools import lru_cache, partial
from random import Random
from typing import NamedTuple

from PIL import Image, ImageDraw

from lapclip.data.scenes import Scene, Thing

Colour = tuple[int, int, int]

ENLARGED = 2  # canvas pixels per image pixel, each way; the box filter on the way down is the anti-aliasing

PAINT: dict[str, Colour] = {
    "red": (214, 40, 40),
    "orange": (245, 130, 32),
    "yellow": (250, 215, 50),
    "green": (50, 160, 70),
    "blue": (45, 95, 205),
    "purple": (135, 60, 165),
    "white": (245, 245, 240),
    "black": (35, 35, 40),
}
# The pattern of the ground; the colours of the sky above, of the ground, and of its pattern.
GROUND: dict[str, tuple[str, Colour, Colour, Colour]] = {
    "meadow": ("tufts", (150, 205, 245), (125, 185, 85), (105, 165, 70)),
    "desert": ("waves", (185, 215, 240), (225, 195, 135), (205, 172, 112)),
    "snow field": ("waves", (190, 210, 235), (232, 238, 245), (205, 216, 232)),
    "beach": ("band", (140, 200, 245), (240, 222, 172), (95, 170, 215)),
    "pond": ("waves", (165, 210, 215), (105, 165, 190), (130, 185, 205)),
    "farm": ("stripes", (170, 210, 240), (175, 145, 95), (150, 120, 75)),
    "forest floor": ("dots", (75, 110, 75), (110, 95, 60), (90, 78, 48)),
    "savanna": ("tufts", (215, 215, 190), (205, 180, 95), (185, 160, 78)),
    "street": ("dashes", (185, 195, 205), (112, 112, 118), (228, 228, 222)),
    "square": ("tiles", (180, 200, 220), (190, 180, 168), (165, 155, 145)),
    "harbour": ("waves", (170, 200, 225), (65, 115, 160), (90, 140, 180)),
    "park": ("band", (160, 205, 225), (100, 155, 90), (200, 185, 150)),
    "wooden table": ("planks", (205, 190, 175), (170, 118, 70), (148, 98, 55)),
    "white tablecloth": ("folds", (190, 185, 190), (238, 236, 230), (216, 214, 210)),
    "checked cloth": ("tiles", (205, 200, 190), (238, 228, 222), (205, 95, 95)),
    "stone counter": ("dots", (175, 180, 185), (140, 142, 148), (118, 120, 128)),
}
# What the light does to each channel, in 256ths.
LIGHT: dict[str, Colour] = {
    "morning": (262, 232, 226),
    "noon": (256, 256, 256),
    "evening": (240, 172, 128),
    "night": (104, 118, 165),
}
EXTENT = {"small": 0.17, "large": 0.27}  # width of one object, as a share of the image
CENTRE = {"left": 0.18, "middle": 0.5, "right": 0.82}
# How far below the middle of their place the objects of a thing stand, in object widths, by count.
FORMATION = {1: (0.0,), 2: (-0.55, 0.55), 3: (-1.0, 0.0, 1.0)}


def draw_image(scene: Scene, image_size: int, random: Random) -> Image.Image:
    """The scene as an RGB image; what the caption does not say (shade, horizon, exact spots) is random."""
    pixels = image_size * ENLARGED
    image = Image.new("RGB", (pixels, pixels))
    draw = ImageDraw.Draw(image)
    pattern, *colours = GROUND[scene.background]
    sky, ground, mark = (shaded(colour, random.randint(-28, 28)) for colour in colours)
    horizon = pixels * random.randint(16, 40) // 100
    for band in range(4):
        draw.rectangle((0, horizon * band // 4, pixels, horizon), fill=shaded(sky, 6 * band))
    draw.rectangle((0, horizon, pixels, pixels), fill=ground)
    draw_pattern(draw, pattern, horizon, pixels, mark)
    for thing in (scene.first, scene.second):
        draw_thing(draw, thing, pixels, random)
    return image.reduce(ENLARGED).point(light_table(scene.time, random.randint(-30, 30)))


@lru_cache(maxsize=256)
def light_table(time: str, brightness: int) -> list[int]:
    factors = [channel + brightness for channel in LIGHT[time]]
    return [min(255, level * factor // 256) for factor in factors for level in range(256)]


def draw_pattern(draw: ImageDraw.ImageDraw, pattern: str, top: int, pixels: int, mark: Colour) -> None:
    step, line = pixels // 8, max(1, pixels // 64)
    if pattern == "band":
        draw.rectangle((0, top, pixels, top + pixels // 6), fill=mark)
    elif pattern in ("stripes", "planks", "waves"):
        spacing = step if pattern == "planks" else step * 2 // 3
        for y in range(top + spacing // 2, pixels, spacing):
            draw.line((0, y, pixels, y), fill=mark, width=line * (3 if pattern == "stripes" else 1))
    elif pattern == "folds":
        for x in range(step, pixels, step * 2):
            draw.line((x, top, x, pixels), fill=mark, width=line * 2)
    elif pattern == "dashes":
        for x in range(0, pixels, step * 2):
            draw.rectangle((x, (top + pixels) // 2, x + step, (top + pixels) // 2 + line * 2), fill=mark)
    else:
        sizes = {"tiles": (step - 1, step - 1), "dots": (line, line), "tufts": (line, line * 3)}
        width, height = sizes[pattern]
        for row, y in enumerate(range(top + (0 if pattern == "tiles" else step // 2), pixels, step)):
            for x in range((row % 2) * step, pixels, step * 2):
                draw.rectangle((x, y, x + width, y + height), fill=mark)


def draw_thing(draw: ImageDraw.ImageDraw, thing: Thing, pixels: int, random: Random) -> None:
    fill = shaded(PAINT[thing.colour], random.randint(-20, 20))
    width = EXTENT[thing.size] * pixels * random.randint(92, 108) / 100
    spacing = min(1.0, 0.6 * pixels / (3 * width)) if thing.count == 3 else 1.0
    centre_x = CENTRE[thing.place] * pixels + random.randint(-3, 3) * pixels / 100
    centre_y = 0.62 * pixels + random.randint(-6, 6) * pixels / 100
    for below in FORMATION[thing.count]:
        x = centre_x + random.randint(-4, 4) * pixels / 100
        draw_object(draw, thing.kind, x, centre_y + below * width * spacing, width, fill)


def shaded(colour: Colour, amount: int) -> Colour:
    red, green, blue = (min(255, max(0, level + amount)) for level in colour)
    return red, green, blue


class Mark(NamedTuple):
    """A part of an object, in the square round its centre: x to the right and y down, both from -1 to 1."""

    method: str  # of ImageDraw
    points: tuple[float, ...]
    fill: Colour | None  # None for the object's own colour, or that of its edge for a line
    width: int


def draw_object(draw: ImageDraw.ImageDraw, kind: str, x: float, y: float, width: float, fill: Colour) -> None:
    line = max(1, round(width / 16))
    red, green, blue = fill
    edge = (150, 150, 155) if sum(fill) < 200 else (red * 2 // 5, green * 2 // 5, blue * 2 // 5)
    for mark in SHAPES[kind]:
        points = [round((y if i % 2 else x) + c * (width / 2)) for i, c in enumerate(mark.points)]
        if mark.method == "line":
            draw.line(points, fill=mark.fill or edge, width=line * mark.width)
        elif mark.method == "arc":
            draw.arc(points, -90, 90, fill=fill, width=line * mark.width)
        else:
            angles = {"start": 180, "end": 360} if mark.method == "pieslice" else {}
            getattr(draw, mark.method)(points, **angles, fill=mark.fill or fill, outline=edge, width=line)


def mark(method: str, *points: float, fill: Colour | None = None, width: int = 2) -> Mark:
    return Mark(method, points, fill, width)


disc, box, shape = partial(mark, "ellipse"), partial(mark, "rectangle"), partial(mark, "polygon")
stroke, dome, handle = partial(mark, "line"), partial(mark, "pieslice"), partial(mark, "arc", width=3)
WOOD, GREEN, CREAM, GREY, BEAK = (110, 75, 45), (60, 130, 60), (240, 225, 195), (95, 95, 100), (245, 170, 40)
SHAPES: dict[str, tuple[Mark, ...]] = {
    "tree": (box(-0.15, 0.2, 0.15, 1, fill=WOOD), shape(-0.8, 0.45, 0, -1, 0.8, 0.45)),
    "flower": (
        stroke(0, 0, 0, 1, fill=GREEN), disc(-0.8, -0.75, -0.1, -0.05), disc(0.1, -0.75, 0.8, -0.05),
        disc(-0.35, -1.1, 0.35, -0.4), disc(-0.35, -0.4, 0.35, 0.3),
        disc(-0.22, -0.62, 0.22, -0.18, fill=CREAM),
    ),
    "mushroom": (box(-0.25, -0.1, 0.25, 1, fill=CREAM), dome(-0.95, -0.9, 0.95, 0.9)),
    "cactus": (
        box(-0.22, -1, 0.22, 1), box(-0.85, -0.5, -0.55, 0.3), box(-0.85, 0.1, -0.2, 0.35),
        box(0.55, -0.7, 0.85, 0.1), box(0.2, -0.1, 0.85, 0.15),
    ),
    "leaf": (shape(-1, 0.9, -0.7, -0.3, 0.2, -0.9, 1, -1, 0.8, 0, 0.1, 0.75), stroke(-1, 0.9, 0.9, -0.9)),
    "rock": (
        shape(-1, 0.7, -0.75, -0.1, -0.2, -0.55, 0.4, -0.45, 0.85, 0.1, 1, 0.7),
        stroke(-0.2, -0.5, 0.1, 0.1, 0.7, 0, width=1),
    ),
    "fish": (
        shape(0.35, 0, 1, -0.6, 1, 0.6), disc(-1, -0.55, 0.55, 0.55),
        disc(-0.75, -0.25, -0.45, 0.05, fill=CREAM),
    ),
    "cat": (
        shape(-0.8, -0.1, -0.75, -1, -0.1, -0.5), shape(0.8, -0.1, 0.75, -1, 0.1, -0.5),
        disc(-0.85, -0.7, 0.85, 0.85), disc(-0.58, -0.2, -0.22, 0.15, fill=CREAM),
        disc(0.22, -0.2, 0.58, 0.15, fill=CREAM),
    ),
    "bird": (
        shape(0.75, -0.5, 1, -0.35, 0.7, -0.2, fill=BEAK), disc(-0.7, -0.4, 0.6, 0.7),
        disc(0.2, -0.8, 0.85, -0.1), shape(-1, -0.3, -0.5, 0, -0.6, 0.4), stroke(0, 0.7, 0, 1),
    ),
    "snail": (
        shape(-1, 0.8, -0.6, 0.5, 0.6, 0.5, 0.75, -0.5, 1, -0.5, 0.95, 0.8, fill=CREAM),
        disc(-0.85, -0.8, 0.5, 0.6), disc(-0.45, -0.4, 0.1, 0.2),
    ),
    "butterfly": (
        shape(0, -0.1, -0.95, -0.95, -0.85, 0), shape(0, 0.1, -0.85, 0.1, -0.6, 0.9),
        shape(0, -0.1, 0.95, -0.95, 0.85, 0), shape(0, 0.1, 0.85, 0.1, 0.6, 0.9),
        stroke(0, -0.8, 0, 0.8, width=3),
    ),
    "turtle": (
        box(-0.6, 0.3, -0.35, 0.85, fill=CREAM), box(0.35, 0.3, 0.6, 0.85, fill=CREAM),
        disc(0.5, -0.2, 1, 0.35, fill=CREAM), dome(-0.9, -0.7, 0.7, 1.3),
    ),
    "house": (
        box(-0.75, -0.15, 0.75, 1), shape(-1, -0.1, 0, -1, 1, -0.1, fill=GREY),
        box(-0.2, 0.35, 0.2, 1, fill=CREAM),
    ),
    "tower": (
        box(-0.4, -1, 0.4, 1), box(-0.2, -0.7, 0.2, -0.42, fill=CREAM),
        box(-0.2, -0.15, 0.2, 0.13, fill=CREAM), box(-0.2, 0.4, 0.2, 0.68, fill=CREAM),
    ),
    "car": (
        shape(-0.5, 0.1, -0.3, -0.4, 0.4, -0.4, 0.65, 0.1, fill=CREAM), box(-1, 0, 1, 0.5),
        disc(-0.8, 0.3, -0.3, 0.8, fill=GREY), disc(0.3, 0.3, 0.8, 0.8, fill=GREY),
    ),
    "lamp": (
        stroke(0, -0.3, 0, 1, fill=GREY), disc(-0.5, -1, 0.5, 0), box(-0.35, 0.85, 0.35, 1, fill=GREY),
    ),
    "flag": (stroke(-0.7, -1, -0.7, 1, fill=GREY), shape(-0.7, -0.95, 0.95, -0.5, -0.7, 0.1)),
    "bench": (
        box(-1, -0.5, 1, -0.15), box(-1, 0.1, 1, 0.4), stroke(-0.75, -0.5, -0.75, 1, fill=GREY),
        stroke(0.75, -0.5, 0.75, 1, fill=GREY),
    ),
    "apple": (
        disc(-0.85, -0.6, 0.85, 1), stroke(0, -0.4, 0.15, -0.95, fill=WOOD),
        shape(0.1, -0.65, 0.7, -1, 0.6, -0.6, fill=GREEN),
    ),
    "cup": (handle(0.2, -0.4, 1, 0.5), shape(-0.9, -0.7, 0.6, -0.7, 0.4, 0.8, -0.7, 0.8)),
    "cake": (
        box(-0.95, 0.1, 0.95, 0.9), box(-0.6, -0.5, 0.6, 0.1, fill=CREAM), stroke(0, -1, 0, -0.5, width=3),
    ),
    "carrot": (stroke(-0.35, -1, 0, -0.45, 0.35, -1, fill=GREEN), shape(-0.5, -0.5, 0.5, -0.5, 0, 1)),
    "pizza": (
        shape(-0.95, -0.7, 0.95, -0.7, 0, 1), disc(-0.48, -0.48, -0.12, -0.12, fill=CREAM),
        disc(0.12, -0.53, 0.48, -0.17, fill=CREAM), disc(-0.18, 0.02, 0.18, 0.38, fill=CREAM),
    ),
    "lolly": (
        box(-0.12, 0.3, 0.12, 1, fill=CREAM),
        shape(-0.5, 0.4, -0.5, -0.7, -0.2, -1, 0.2, -1, 0.5, -0.7, 0.5, 0.4),
    ),
}  # fmt: skip
