"""What a synthetic image shows, as plain values: drawn at random, put into words, and varied one attribute at a time.

A scene is determined by its random numbers alone, so image k is the same on every machine. Nothing here draws:
`drawing.py` does.
"""

from dataclasses import dataclass, replace
from random import Random

KINDS = {
    "nature": ("tree", "flower", "mushroom", "cactus", "leaf", "rock"),
    "animals": ("fish", "cat", "bird", "snail", "butterfly", "turtle"),
    "urban": ("house", "tower", "car", "lamp", "flag", "bench"),
    "food": ("apple", "cup", "cake", "carrot", "pizza", "lolly"),
}
BACKGROUNDS = {
    "nature": ("meadow", "desert", "snow field", "beach"),
    "animals": ("pond", "farm", "forest floor", "savanna"),
    "urban": ("street", "square", "harbour", "park"),
    "food": ("wooden table", "white tablecloth", "checked cloth", "stone counter"),
}
CATEGORIES = tuple(KINDS)
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "white", "black")
TIMES = ("morning", "noon", "evening", "night")
COUNTS = (1, 2, 3)
SIZES = ("small", "large")
PLACES = ("left", "middle", "right")

ALL_KINDS = tuple(kind for kinds in KINDS.values() for kind in kinds)
# Each kind has one colour that no training image shows it in; the kinds spread over all colours.
UNSEEN_COLOUR = {kind: COLOURS[(i * 3 + i // 8) % len(COLOURS)] for i, kind in enumerate(ALL_KINDS)}


@dataclass(frozen=True)
class Thing:
    """One or several equal objects standing together."""

    kind: str
    colour: str
    count: int
    size: str
    place: str


@dataclass(frozen=True)
class Scene:
    """Two things in two different places, before a background, at a time of day."""

    category: str
    background: str
    time: str
    first: Thing
    second: Thing


def draw_scene(random: Random) -> Scene:
    """A random scene of seen combinations only: what training is made of."""
    category = random.choice(CATEGORIES)
    kinds = random.sample(KINDS[category], 2)
    places = random.sample(PLACES, 2)
    things = []
    for kind, place in zip(kinds, places, strict=True):
        colour = random.choice([c for c in COLOURS if c != UNSEEN_COLOUR[kind]])
        things.append(Thing(kind, colour, random.choice(COUNTS), random.choice(SIZES), place))
    return Scene(category, random.choice(BACKGROUNDS[category]), random.choice(TIMES), *things)


# Which attribute takes four values and which takes two in a family of eight validation scenes.
FAMILIES = (
    ("colour", "size"), ("background", "count"), ("time", "place"), ("kind", "colour"),
    ("colour", "place"), ("background", "size"), ("time", "kind"), ("kind", "count"),
)  # fmt: skip
FAMILY_SIZE = 8


def draw_family(random: Random, layout: int) -> list[Scene]:
    """Eight scenes of unseen combinations; each has four neighbours in it that differ in one attribute only.

    The second thing carries the unseen combination and stays as it is; the first thing and what is around it vary.
    """
    scene = draw_scene(random)
    base = replace(scene, second=replace(scene.second, colour=UNSEEN_COLOUR[scene.second.kind]))
    four, two = FAMILIES[layout % len(FAMILIES)]
    # Seeded by the family, so that the second attribute takes the same two values in all its members.
    members = vary(base, four, 4, random)
    return [scene for one in members for scene in vary(one, two, 2, Random(f"{base} {two}"))]


def vary(scene: Scene, attribute: str, num_values: int, random: Random) -> list[Scene]:
    """The scene itself and others that differ from it in one attribute only, its own or the first thing's."""
    values: tuple = {
        "background": BACKGROUNDS[scene.category],
        "time": TIMES,
        "kind": tuple(k for k in KINDS[scene.category] if k != scene.second.kind),
        "colour": COLOURS,
        "count": COUNTS,
        "size": SIZES,
        "place": tuple(p for p in PLACES if p != scene.second.place),
    }[attribute]
    varied = scene if attribute in ("background", "time") else scene.first
    value = getattr(varied, attribute)
    others = random.sample([v for v in values if v != value], num_values - 1)
    changed = [replace(varied, **{attribute: v}) for v in (value, *others)]
    return [one if isinstance(one, Scene) else replace(scene, first=one) for one in changed]


NUMBERS = ("", "a", "two", "three")
SIZE_WORDS = {"small": ("small", "little"), "large": ("large", "big")}
PLACE_WORDS = {
    "left": ("on the left", "at the left"),
    "middle": ("in the middle", "in the centre"),
    "right": ("on the right", "at the right"),
}
TIME_WORDS = {
    "morning": ("in the morning", "at sunrise"),
    "noon": ("at noon", "at midday"),
    "evening": ("in the evening", "at sunset"),
    "night": ("at night", "after dark"),
}
PREPOSITIONS = {
    "pond": "by a", "farm": "on a", "forest floor": "on a", "savanna": "on a",
    "street": "in a", "square": "in a", "harbour": "at a", "park": "in a",
}  # fmt: skip
PLURALS = {
    "butterfly": "butterflies", "cactus": "cacti", "leaf": "leaves",
    "lolly": "lollies", "bench": "benches", "fish": "fish",
}  # fmt: skip


def describe(scene: Scene, random: Random) -> str:
    """One caption that says everything the scene shows, in one of several wordings."""
    one, two = in_words(scene.first, random), in_words(scene.second, random)
    if random.random() < 0.5:
        one, two = two, one
    ground = f"{PREPOSITIONS.get(scene.background, 'on a')} {scene.background}"
    time = random.choice(TIME_WORDS[scene.time])
    sentences = (
        f"{one} and {two}, {ground} {time}",
        f"{ground} {time}: {one}, {two}",
        f"{time} {ground}, {one} and {two}",
        f"a picture of {one} with {two}, {time}, {ground}",
    )
    return random.choice(sentences)


def in_words(thing: Thing, random: Random) -> str:
    noun = thing.kind if thing.count == 1 else PLURALS.get(thing.kind, thing.kind + "s")
    size = random.choice(SIZE_WORDS[thing.size])
    return f"{NUMBERS[thing.count]} {size} {thing.colour} {noun} {random.choice(PLACE_WORDS[thing.place])}"
