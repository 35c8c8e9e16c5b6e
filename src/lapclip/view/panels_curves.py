"""The curves of a run, each with its value now and what chance would give."""

from collections.abc import Callable

from lapclip.runs.history import Summary
from lapclip.units import percent
from lapclip.view.braille import Point, bounds, curve
from lapclip.view.panels_text import Line, beside, cut, spread

MOST_POINTS = 600  # of a curve: each costs time that training could have had
LABEL = 6  # columns for the ends of a scale
Drawn = tuple[
    Line, list[Point], float | None, Callable[[float], str]
]  # title, points, chance, form of a value


def curves(watched: Summary, width: int, height: int, *, with_steps: bool = False) -> list[Line]:
    """Loss, accuracy and recall, two beside two."""
    column = (width - 3) // 2
    panels = [
        panel(drawn, column, height, steps_of(watched), with_steps=with_steps) for drawn in all_of(watched)
    ]
    gap: list[Line] = [[]] if with_steps else []
    return [*beside(panels[:2], [column, column], 3), *gap, *beside(panels[2:], [column, column], 3)]


def steps_of(watched: Summary) -> tuple[float, float]:
    """From the first step to the last, for all curves alike."""
    last = max(
        (event.step for event in (watched.history.step, watched.history.evaluated) if event), default=1
    )
    return 0.0, float(last)


def titles(watched: Summary, width: int) -> list[Line]:
    """The values without their curves, for a window with no room."""
    return [cut(title, width) for title, *_ in all_of(watched)]


def all_of(watched: Summary) -> list[Drawn]:
    return [loss(watched), accuracy(watched), recall(watched, 1), recall(watched, 10)]


def loss(watched: Summary) -> Drawn:
    points = [(float(step.step), step.loss) for step in watched.some_steps(MOST_POINTS)]
    now = watched.history.recently("loss")
    value = f"{now:.3f}" if now is not None else "none yet"
    tested = watched.history.evaluated
    validation = f", held-out {tested.loss:.3f}" if tested and tested.loss is not None else ""
    return [("loss ", ""), (value, "bold"), (validation, "dim")], points, None, lambda value: f"{value:.2f}"


def accuracy(watched: Summary) -> Drawn:
    points = [(float(step.step), step.accuracy) for step in watched.some_steps(MOST_POINTS)]
    now = watched.history.recently("accuracy")
    value = percent(now) if now is not None else "none yet"
    return titled("in-batch accuracy", value, watched.chance), points, watched.chance, percent


def recall(watched: Summary, k: int) -> Drawn:
    """Words -> image, over the held-out pool."""
    found = [(e.step, e.recall["text_to_image"]) for e in watched.history.evaluations]
    if not found:
        return titled(f"recall@{k}", "not evaluated yet", None), [], None, percent
    now = found[-1][1]
    points = [(float(step), shares[f"recall@{k}"]) for step, shares in found]
    chance = now[f"chance@{k}"]
    best = watched.history.best
    most = best.recall["text_to_image"][f"recall@{k}"] if best else None
    value = percent(now[f"recall@{k}"])
    if best is not None and most is not None and best.step != found[-1][0]:
        value += f" (best {percent(most)})"
    return titled(f"recall@{k}", value, chance), points, chance, percent


def titled(name: str, value: str, chance: float | None) -> Line:
    against = f", chance {percent(chance)}" if chance is not None else ""
    return [(f"{name} ", ""), (value, "bold"), (against, "dim")]


def panel(
    drawn: Drawn, width: int, height: int, steps: tuple[float, float], *, with_steps: bool
) -> list[Line]:
    """A title, and under it the curve with the ends of its scale; chance is a dotted line."""
    title, points, chance, form = drawn
    if not points:
        return [cut(title, width), *[[]] * (height + with_steps)]
    values = [y for _, y in points]
    low, high = ends = bounds([*values, chance], lowest=0.0) if chance is not None else bounds(values)
    rows: list[Line] = []
    dotted = curve(points, max(1, width - LABEL), height, across=steps, up=ends, line=chance)
    for row, dots in enumerate(dotted):
        end = form(high) if row == 0 else form(low) if row == height - 1 else ""
        rows.append([(f"{end:>{LABEL - 1}} ", "dim"), (dots, "accent")])
    if with_steps:
        first: Line = [(" " * LABEL + f"step {steps[0]:,.0f}", "dim")]
        rows.append(spread(first, [(f"{steps[1]:,.0f}", "dim")], width))
    return [cut(title, width), *rows]
