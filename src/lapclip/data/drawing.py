"""Draws a scene with Pillow, anti-aliased, at any size: the shapes live in a unit square and are scaled last.

All coordinates are rounded to whole pixels of an enlarged canvas before Pillow sees them, so that no machine's
floating point decides a pixel.
"""

from collections.abc import Callable
from functools import lru_cache
from random import Random

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
# Sky above, ground below, and the colour of the ground's pattern.
GROUND: dict[str, tuple[Colour, Colour, Colour]] = {
    "meadow": ((150, 205, 245), (125, 185, 85), (105, 165, 70)),
    "desert": ((185, 215, 240), (225, 195, 135), (205, 172, 112)),
    "snow field": ((190, 210, 235), (232, 238, 245), (205, 216, 232)),
    "beach": ((140, 200, 245), (240, 222, 172), (95, 170, 215)),
    "pond": ((165, 210, 215), (105, 165, 190), (130, 185, 205)),
    "farm": ((170, 210, 240), (175, 145, 95), (150, 120, 75)),
    "forest floor": ((75, 110, 75), (110, 95, 60), (90, 78, 48)),
    "savanna": ((215, 215, 190), (205, 180, 95), (185, 160, 78)),
    "street": ((185, 195, 205), (112, 112, 118), (228, 228, 222)),
    "square": ((180, 200, 220), (190, 180, 168), (165, 155, 145)),
    "harbour": ((170, 200, 225), (65, 115, 160), (90, 140, 180)),
    "park": ((160, 205, 225), (100, 155, 90), (200, 185, 150)),
    "wooden table": ((205, 190, 175), (170, 118, 70), (148, 98, 55)),
    "white tablecloth": ((190, 185, 190), (238, 236, 230), (216, 214, 210)),
    "checked cloth": ((205, 200, 190), (238, 228, 222), (205, 95, 95)),
    "stone counter": ((175, 180, 185), (140, 142, 148), (118, 120, 128)),
}
PATTERN = {
    "meadow": "tufts", "desert": "waves", "snow field": "waves", "beach": "band",
    "pond": "waves", "farm": "stripes", "forest floor": "dots", "savanna": "tufts",
    "street": "dashes", "square": "tiles", "harbour": "waves", "park": "band",
    "wooden table": "planks", "white tablecloth": "folds", "checked cloth": "tiles", "stone counter": "dots",
}  # fmt: skip
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
FORMATION = {
    1: (0.0,),
    2: (-0.55, 0.55),
    3: (-1.0, 0.0, 1.0),
}


def draw_image(scene: Scene, image_size: int, random: Random) -> Image.Image:
    """The scene as an RGB image; what the caption does not say (shade, horizon, exact spots) is random."""
    pixels = image_size * ENLARGED
    image = Image.new("RGB", (pixels, pixels))
    draw = ImageDraw.Draw(image)
    draw_ground(draw, scene.background, pixels, random)
    for thing in (scene.first, scene.second):
        draw_thing(draw, thing, pixels, random)
    return image.reduce(ENLARGED).point(light_table(scene.time, random.randint(-30, 30)))


@lru_cache(maxsize=256)
def light_table(time: str, brightness: int) -> list[int]:
    return [
        min(255, level * (channel + brightness) // 256) for channel in LIGHT[time] for level in range(256)
    ]


def draw_ground(draw: ImageDraw.ImageDraw, background: str, pixels: int, random: Random) -> None:
    sky, ground, mark = (shaded(colour, random.randint(-28, 28)) for colour in GROUND[background])
    horizon = pixels * random.randint(16, 40) // 100
    for band in range(4):
        draw.rectangle((0, horizon * band // 4, pixels, horizon), fill=shaded(sky, 6 * band))
    draw.rectangle((0, horizon, pixels, pixels), fill=ground)
    draw_pattern(draw, PATTERN[background], (0, horizon, pixels, pixels), mark)


def draw_pattern(
    draw: ImageDraw.ImageDraw, pattern: str, area: tuple[int, int, int, int], mark: Colour
) -> None:
    left, top, right, bottom = area
    pixels = right - left
    step, line = pixels // 8, max(1, pixels // 64)
    if pattern == "band":
        draw.rectangle((left, top, right, top + pixels // 6), fill=mark)
    elif pattern in ("stripes", "planks", "waves"):
        spacing = step if pattern == "planks" else step * 2 // 3
        for y in range(top + spacing // 2, bottom, spacing):
            draw.line((left, y, right, y), fill=mark, width=line * (3 if pattern == "stripes" else 1))
    elif pattern == "folds":
        for x in range(left + step, right, step * 2):
            draw.line((x, top, x, bottom), fill=mark, width=line * 2)
    elif pattern == "dashes":
        for x in range(left, right, step * 2):
            draw.rectangle((x, (top + bottom) // 2, x + step, (top + bottom) // 2 + line * 2), fill=mark)
    elif pattern == "tiles":
        for row, y in enumerate(range(top, bottom, step)):
            for x in range(left + (row % 2) * step, right, step * 2):
                draw.rectangle((x, y, x + step - 1, y + step - 1), fill=mark)
    else:
        height = line if pattern == "dots" else line * 3
        for row, y in enumerate(range(top + step // 2, bottom, step)):
            for x in range(left + (row % 2) * step, right, step * 2):
                draw.rectangle((x, y, x + line, y + height), fill=mark)


def draw_thing(draw: ImageDraw.ImageDraw, thing: Thing, pixels: int, random: Random) -> None:
    fill = shaded(PAINT[thing.colour], random.randint(-20, 20))
    width = EXTENT[thing.size] * pixels * random.randint(92, 108) / 100
    spacing = min(1.0, 0.6 * pixels / (3 * width)) if thing.count == 3 else 1.0
    centre_x = CENTRE[thing.place] * pixels + random.randint(-3, 3) * pixels / 100
    centre_y = 0.62 * pixels + random.randint(-6, 6) * pixels / 100
    for below in FORMATION[thing.count]:
        x = centre_x + random.randint(-4, 4) * pixels / 100
        SHAPES[thing.kind](Pen(draw, x, centre_y + below * width * spacing, width, fill))


def shaded(colour: Colour, amount: int) -> Colour:
    red, green, blue = (min(255, max(0, level + amount)) for level in colour)
    return red, green, blue


class Pen:
    """Draws in the unit square round one object's centre: x to the right and y down, both from -1 to 1."""

    def __init__(self, draw: ImageDraw.ImageDraw, x: float, y: float, width: float, fill: Colour):
        self.draw, self.x, self.y, self.half, self.fill = draw, x, y, width / 2, fill
        self.line = max(1, round(width / 16))
        red, green, blue = fill
        dark = red + green + blue < 200
        self.edge = (150, 150, 155) if dark else (red * 2 // 5, green * 2 // 5, blue * 2 // 5)

    def points(self, *coordinates: float) -> list[int]:
        return [round((self.y if i % 2 else self.x) + c * self.half) for i, c in enumerate(coordinates)]

    def disc(self, *box: float, fill: Colour | None = None) -> None:
        self.draw.ellipse(self.points(*box), fill=fill or self.fill, outline=self.edge, width=self.line)

    def box(self, *box: float, fill: Colour | None = None) -> None:
        self.draw.rectangle(self.points(*box), fill=fill or self.fill, outline=self.edge, width=self.line)

    def shape(self, *corners: float, fill: Colour | None = None) -> None:
        self.draw.polygon(self.points(*corners), fill=fill or self.fill, outline=self.edge, width=self.line)

    def stroke(self, *ends: float, fill: Colour | None = None, width: int = 2) -> None:
        self.draw.line(self.points(*ends), fill=fill or self.edge, width=self.line * width)


WOOD, GREEN, CREAM, GREY = (110, 75, 45), (60, 130, 60), (240, 225, 195), (95, 95, 100)


def tree(pen: Pen) -> None:
    pen.box(-0.15, 0.2, 0.15, 1.0, fill=WOOD)
    pen.shape(-0.8, 0.45, 0.0, -1.0, 0.8, 0.45)


def flower(pen: Pen) -> None:
    pen.stroke(0, 0, 0, 1.0, fill=GREEN)
    for x, y in ((-0.45, -0.4), (0.45, -0.4), (0.0, -0.75), (0.0, -0.05)):
        pen.disc(x - 0.35, y - 0.35, x + 0.35, y + 0.35)
    pen.disc(-0.22, -0.62, 0.22, -0.18, fill=CREAM)


def mushroom(pen: Pen) -> None:
    pen.box(-0.25, -0.1, 0.25, 1.0, fill=CREAM)
    pen.draw.pieslice(
        pen.points(-0.95, -0.9, 0.95, 0.9), 180, 360, fill=pen.fill, outline=pen.edge, width=pen.line
    )


def cactus(pen: Pen) -> None:
    pen.box(-0.22, -1.0, 0.22, 1.0)
    pen.box(-0.85, -0.5, -0.55, 0.3)
    pen.box(-0.85, 0.1, -0.2, 0.35)
    pen.box(0.55, -0.7, 0.85, 0.1)
    pen.box(0.2, -0.1, 0.85, 0.15)


def leaf(pen: Pen) -> None:
    pen.shape(-1.0, 0.9, -0.7, -0.3, 0.2, -0.9, 1.0, -1.0, 0.8, 0.0, 0.1, 0.75)
    pen.stroke(-1.0, 0.9, 0.9, -0.9)


def rock(pen: Pen) -> None:
    pen.shape(-1.0, 0.7, -0.75, -0.1, -0.2, -0.55, 0.4, -0.45, 0.85, 0.1, 1.0, 0.7)
    pen.stroke(-0.2, -0.5, 0.1, 0.1, 0.7, 0.0, width=1)


def fish(pen: Pen) -> None:
    pen.shape(0.35, 0.0, 1.0, -0.6, 1.0, 0.6)
    pen.disc(-1.0, -0.55, 0.55, 0.55)
    pen.disc(-0.75, -0.25, -0.45, 0.05, fill=CREAM)


def cat(pen: Pen) -> None:
    pen.shape(-0.8, -0.1, -0.75, -1.0, -0.1, -0.5)
    pen.shape(0.8, -0.1, 0.75, -1.0, 0.1, -0.5)
    pen.disc(-0.85, -0.7, 0.85, 0.85)
    for x in (-0.4, 0.4):
        pen.disc(x - 0.18, -0.2, x + 0.18, 0.15, fill=CREAM)


def bird(pen: Pen) -> None:
    pen.shape(0.75, -0.5, 1.0, -0.35, 0.7, -0.2, fill=(245, 170, 40))
    pen.disc(-0.7, -0.4, 0.6, 0.7)
    pen.disc(0.2, -0.8, 0.85, -0.1)
    pen.shape(-1.0, -0.3, -0.5, 0.0, -0.6, 0.4)
    pen.stroke(0.0, 0.7, 0.0, 1.0)


def snail(pen: Pen) -> None:
    pen.shape(-1.0, 0.8, -0.6, 0.5, 0.6, 0.5, 0.75, -0.5, 1.0, -0.5, 0.95, 0.8, fill=CREAM)
    pen.disc(-0.85, -0.8, 0.5, 0.6)
    pen.disc(-0.45, -0.4, 0.1, 0.2)


def butterfly(pen: Pen) -> None:
    for side in (-1, 1):
        pen.shape(0.0, -0.1, side * 0.95, -0.95, side * 0.85, 0.0)
        pen.shape(0.0, 0.1, side * 0.85, 0.1, side * 0.6, 0.9)
    pen.stroke(0, -0.8, 0, 0.8, width=3)


def turtle(pen: Pen) -> None:
    for x in (-0.6, 0.35):
        pen.box(x, 0.3, x + 0.25, 0.85, fill=CREAM)
    pen.disc(0.5, -0.2, 1.0, 0.35, fill=CREAM)
    pen.draw.pieslice(
        pen.points(-0.9, -0.7, 0.7, 1.3), 180, 360, fill=pen.fill, outline=pen.edge, width=pen.line
    )


def house(pen: Pen) -> None:
    pen.box(-0.75, -0.15, 0.75, 1.0)
    pen.shape(-1.0, -0.1, 0.0, -1.0, 1.0, -0.1, fill=GREY)
    pen.box(-0.2, 0.35, 0.2, 1.0, fill=CREAM)


def tower(pen: Pen) -> None:
    pen.box(-0.4, -1.0, 0.4, 1.0)
    for y in (-0.7, -0.15, 0.4):
        pen.box(-0.2, y, 0.2, y + 0.28, fill=CREAM)


def car(pen: Pen) -> None:
    pen.shape(-0.5, 0.1, -0.3, -0.4, 0.4, -0.4, 0.65, 0.1, fill=CREAM)
    pen.box(-1.0, 0.0, 1.0, 0.5)
    for x in (-0.55, 0.55):
        pen.disc(x - 0.25, 0.3, x + 0.25, 0.8, fill=GREY)


def lamp(pen: Pen) -> None:
    pen.stroke(0, -0.3, 0, 1.0, fill=GREY, width=2)
    pen.disc(-0.5, -1.0, 0.5, 0.0)
    pen.box(-0.35, 0.85, 0.35, 1.0, fill=GREY)


def flag(pen: Pen) -> None:
    pen.stroke(-0.7, -1.0, -0.7, 1.0, fill=GREY)
    pen.shape(-0.7, -0.95, 0.95, -0.5, -0.7, 0.1)


def bench(pen: Pen) -> None:
    pen.box(-1.0, -0.5, 1.0, -0.15)
    pen.box(-1.0, 0.1, 1.0, 0.4)
    for x in (-0.75, 0.75):
        pen.stroke(x, -0.5, x, 1.0, fill=GREY)


def apple(pen: Pen) -> None:
    pen.disc(-0.85, -0.6, 0.85, 1.0)
    pen.stroke(0, -0.4, 0.15, -0.95, fill=WOOD)
    pen.shape(0.1, -0.65, 0.7, -1.0, 0.6, -0.6, fill=GREEN)


def cup(pen: Pen) -> None:
    pen.draw.arc(pen.points(0.2, -0.4, 1.0, 0.5), -90, 90, fill=pen.fill, width=pen.line * 3)
    pen.shape(-0.9, -0.7, 0.6, -0.7, 0.4, 0.8, -0.7, 0.8)


def cake(pen: Pen) -> None:
    pen.box(-0.95, 0.1, 0.95, 0.9)
    pen.box(-0.6, -0.5, 0.6, 0.1, fill=CREAM)
    pen.stroke(0, -1.0, 0, -0.5, width=3)


def carrot(pen: Pen) -> None:
    pen.stroke(-0.35, -1.0, 0, -0.45, 0.35, -1.0, fill=GREEN)
    pen.shape(-0.5, -0.5, 0.5, -0.5, 0.0, 1.0)


def pizza(pen: Pen) -> None:
    pen.shape(-0.95, -0.7, 0.95, -0.7, 0.0, 1.0)
    for x, y in ((-0.3, -0.3), (0.3, -0.35), (0.0, 0.2)):
        pen.disc(x - 0.18, y - 0.18, x + 0.18, y + 0.18, fill=CREAM)


def lolly(pen: Pen) -> None:
    pen.box(-0.12, 0.3, 0.12, 1.0, fill=CREAM)
    pen.shape(-0.5, 0.4, -0.5, -0.7, -0.2, -1.0, 0.2, -1.0, 0.5, -0.7, 0.5, 0.4)


SHAPES: dict[str, Callable[[Pen], None]] = {
    shape.__name__: shape
    for shape in (
        tree, flower, mushroom, cactus, leaf, rock, fish, cat, bird, snail, butterfly, turtle,
        house, tower, car, lamp, flag, bench, apple, cup, cake, carrot, pizza, lolly,
    )
}  # fmt: skip
