"""Events of a run that exists nowhere: a thousand steps of 8 pairs; ten are an epoch, and each takes a second."""

from dataclasses import replace

from lapclip.runs.events import (
    KINDS_OF_MEMORY,
    PARTS,
    Continued,
    Evaluated,
    Event,
    Failed,
    Finished,
    Inspected,
    Interpolated,
    Paused,
    Saved,
    Started,
    Step,
    Warned,
)

WAY = {
    "recall@1": 0.2, "recall@5": 0.4, "recall@10": 0.6, "median_rank": 3.0, "interval@10": [0.5, 0.7],
    "chance@1": 0.01, "chance@5": 0.05, "chance@10": 0.1,
}  # fmt: skip
RECALL = {
    "num_images": 100, "num_captions": 100, "text_to_image": WAY, "image_to_text": WAY,
    "in_batch": {"accuracy": 0.5, "chance": 0.125, "batch_size": 8},
    "negatives": {"easy": 0.9, "medium": 0.5, "hard": 0.2, "chance": 0.1, "num_choices": 10},
}  # fmt: skip
READINGS = {
    "cores": [0.5, 1.0], "other_cores": 0.2, "memory_available": 10**9, "swap_used": 0, "swapped_bytes": 5,
    "temperature": 71.5, "speed_limit": 0.9, "power_watts": 12.5, "power_of": "processor package", "battery": 80,
    "is_plugged": False,
}  # fmt: skip
BEGAN = 1_700_000_000.125


def started(step: int = 0, **changes) -> Started:
    return replace(
        Started(step, float(step), 1, 10**6, 80, 8, 8, "cpu", 2, None, 1000, time=BEGAN), **changes
    )


def step(number: int, **changes) -> Step:
    plain = Step(
        number, number / 10, 8 * number, 2.0, 0.5, 1e-3, 0.07, 1.0, 8.0, 0.0, float(number), min(1.0, number / 1000), 1.0,
        time=BEGAN + number,
    )  # fmt: skip
    return replace(plain, **changes)


def inspected(number: int, **changes) -> Inspected:
    parts, memory = dict.fromkeys(PARTS, 0.1), dict.fromkeys(KINDS_OF_MEMORY, 10) | {"activations": None}
    norms = {"image.0": 1.0, "text.0": 2.0}
    plain = Inspected(number, parts, memory, 10**9, 2 * 10**9, 4 * 10**9, norms, {"cores": [0.5, 1.0]})
    return replace(plain, **changes)


def evaluated(number: int, snapshot: str | None = None, *, is_best: bool = True) -> Evaluated:
    return Evaluated(number, RECALL, is_best, 0.1, loss=2.1, snapshot=snapshot)


def finished(number: int, reason: str = "budget", **changes) -> Finished:
    plain = Finished(
        reason, number, number / 10, float(number), 8 * number, 8.0, 10**9, 10**6, RECALL, number, "x"
    )
    return replace(plain, **changes)


ONE_OF_EACH = [
    started(),
    step(1, num_different=7),
    inspected(1, readings=READINGS),
    evaluated(1, "snapshots/step-000001.json"),
    Warned(
        1,
        "an image of a caf\u00e9 \U0001f468\u200d\U0001f469\u200d\U0001f467\nis broken",
        "mend it",
        "collapsed",
    ),
    Paused(1, "the battery is low"),
    Continued(1, 60.0),
    Saved(1, "checkpoints/step-000001", 1000, 0.1),
    finished(1),
    Failed("no memory", "close programs"),
    Interpolated(1, [0.0, 0.5, 1.0], [RECALL] * 3, [RECALL] * 3, 0.5),
]


def memorised(
    *,
    accuracy: float = 1.0,
    interval: tuple[float, float] = (0.0, 0.5),
    back: tuple[float, float] = (0.0, 0.5),
    losses: tuple[float, ...] = (2.4, 3.1, 3.8, 3.8),
) -> list[Event]:
    """A finished run that knows its training pairs by heart and finds no others, among 6 validation images."""
    way = WAY | {f"chance@{k}": min(1.0, k / 6) for k in (1, 5, 10)} | {"recall@1": 1 / 6}
    way |= {"interval@5": [0.4, 1.0], "interval@10": [0.6, 1.0]}
    ways = {
        "text_to_image": way | {"interval@1": [*interval]},
        "image_to_text": way | {"interval@1": [*back]},
    }
    found = RECALL | ways | {"num_images": 6}
    return [
        started(),
        *(step(n, loss=4.0 / n, accuracy=accuracy) for n in range(1, 101)),
        *(Evaluated(25 * n, found, True, 0.1, loss=loss) for n, loss in enumerate(losses, 1)),
        Finished("budget", 100, 10.0, 100.0, 800, 8.0, 10**9, 10**6, found, 100, "checkpoints/best"),
    ]
