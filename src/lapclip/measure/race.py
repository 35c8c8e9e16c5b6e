"""Ways to run a step in, how fast each is out: checked, warmed up, then timed in turn until the time is used up.

A busy or hot minute falls on all of them alike, because they take turns in an order that changes from round to round.
"""

import statistics
import time
from collections.abc import Generator, Sequence
from dataclasses import replace

from lapclip.device import device_named, processor, ran_out_of_memory, release_memory
from lapclip.errors import UserError
from lapclip.measure.parity import NUM_PAIRS, Gradients, Probe, disagreement, first_line, reference
from lapclip.measure.rehearsal import Rig, Work, loss_of, placed_model, some_batch, some_patches
from lapclip.measure.results import Candidate, Measured, spread_of
from lapclip.model.clip import shape_of
from lapclip.step import Way

HOPELESS = 1.5  # times as slow as the best: taken no further
MOST_ROUNDS = 9
BLOCK_SECONDS = 0.4  # a block of steps lasts about so long, or one step
MOST_DRIFT = 0.1  # from round to round, before the machine is given a rest
REST_SECONDS = 3.0
MOST_RESTS = 2

Progress = str  # what is being done, for whoever waits


def measure(
    work: Work, ways: Sequence[Way], *, seconds: float, least_rounds: int = 3, patience: float = 1.0
) -> Generator[Progress, None, Measured]:
    """Times ways of a step for about so many seconds; a step in low precision that takes longer than `patience` stops
    the search for how much slower it is."""
    started = time.perf_counter()
    rigs = Rigs(work)
    tried: dict[Way, Candidate] = {}
    for way in ways:
        yield f"trying {way.in_words()}"
        tried[way] = try_out(rigs, way, patience)
    entered = [way for way in ways if tried[way].rejected is None]
    block_seconds = min(BLOCK_SECONDS, seconds / ((least_rounds + 2) * len(ways)))
    times = yield from race(rigs, entered, least_rounds, block_seconds, until=started + seconds)
    rigs.clear()
    best = min(times.values(), key=statistics.median, default=[])
    candidates = tuple(
        rated(tried[way], times[way], best, work.batch_size) if way in times else tried[way] for way in ways
    )
    drift = drift_of(best) if best else 0.0
    return Measured(candidates, time.time(), time.perf_counter() - started, drift)


class Rigs:
    """One rig a device, made when it is needed; compiled ones apart. The weights of all begin equal."""

    def __init__(self, work: Work):
        self.work = work
        self.made: dict[tuple[str, bool], Rig] = {}
        self.right: Gradients | None = None  # what the processor finds in fp32, once somebody asks

    def rig(self, way: Way) -> Rig:
        if (way.device, way.compile) not in self.made:
            self.made[way.device, way.compile] = Rig(self.work, way.device, compile=way.compile)
        return self.made[way.device, way.compile]

    def problem(self, way: Way) -> str | None:
        """What the parity gate says of a way; on models of its own, whose weights no step has changed."""
        num_pairs = min(NUM_PAIRS, self.work.batch_size)
        probe = Probe(
            some_batch(self.work, num_pairs),
            some_patches(self.work, num_pairs),
            loss_of(self.work),
            shape_of(self.work.model).text_length,
        )
        if self.right is None:
            self.right = reference(placed_model(self.work, processor()), probe)
        model = placed_model(self.work, device_named(way.device), compile=way.compile)
        return disagreement(model, probe, self.right, way)

    def clear(self) -> None:
        devices = [rig.device for rig in self.made.values()]
        self.made.clear()
        for device in devices:
            device.release_memory()
        release_memory()


def try_out(rigs: Rigs, way: Way, patience: float) -> Candidate:
    """Whether a way is right, and not hopelessly slow; its first step, which compiles and takes memory."""
    try:
        if way.precision != "fp32":
            num_pairs, factor = slower_than_fp32(rigs, way, patience)
            if factor > HOPELESS:
                of = "a step" if num_pairs == rigs.work.batch_size else f"a step of {num_pairs} pairs"
                return Candidate(way, rejected=f"{of} takes {factor:.1f} times as long as in fp32")
        if not way.is_plain and (problem := rigs.problem(way)):
            return Candidate(way, rejected=problem)
        first = rigs.rig(way).step(way)
    except UserError:
        raise
    except (RuntimeError, NotImplementedError, MemoryError) as error:
        rigs.made.pop((way.device, way.compile), None)
        what = "out of memory" if ran_out_of_memory(error) else f"fails: {first_line(error)}"
        return Candidate(way, rejected=what)
    return Candidate(way, first_call_seconds=first)


def slower_than_fp32(rigs: Rigs, way: Way, patience: float) -> tuple[int, float]:
    """By which factor a step in some precision is slower, with as many pairs as patience allows."""
    rig, exact = rigs.rig(way), replace(way, precision="fp32")
    num_pairs, factor = min(2, rigs.work.batch_size), 1.0
    while True:
        seconds: dict[Way, list[float]] = {way: [], exact: []}
        for number in range(3):
            for one in (way, exact):
                took = rig.step_of_few(one, num_pairs)
                if number > 0:  # the first one warms up
                    seconds[one].append(took)
        factor = statistics.median(seconds[way]) / statistics.median(seconds[exact])
        if num_pairs == rigs.work.batch_size or statistics.median(seconds[way]) > patience / 2:
            return num_pairs, factor
        num_pairs = min(2 * num_pairs, rigs.work.batch_size)


def race(
    rigs: Rigs, ways: Sequence[Way], least_rounds: int, block_seconds: float, until: float
) -> Generator[Progress, None, dict[Way, list[float]]]:
    """Seconds of a step, block by block; ways that fall far behind drop out, but keep what they have."""
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    running, before = list(ways), None
    num_steps = {way: num_in_block(rigs.rig(way).step(way), block_seconds) for way in ways}
    num_rests = 0
    for number in range(MOST_ROUNDS if ways else 0):
        for way in running[:: -1 if number % 2 else 1]:
            yield f"round {number + 1}: {way.in_words()}"
            rig = rigs.rig(way)
            if before is not None and before.keep_memory != way.keep_memory:
                rig.step(way)  # untimed: it gives memory back, or takes it again
            seconds[way].append(statistics.mean(rig.step(way) for _ in range(num_steps[way])))
            before = way
        if number >= least_rounds - 1 and time.perf_counter() > until:
            break
        medians = {way: statistics.median(seconds[way]) for way in running}
        best = min(medians, key=lambda way: medians[way])
        running = [way for way in running if medians[way] <= HOPELESS * medians[best] or number == 0]
        is_hot = seconds[best][-1] > (1 + MOST_DRIFT) * seconds[best][0]
        if is_hot and num_rests < MOST_RESTS and time.perf_counter() + REST_SECONDS < until:
            yield "letting the machine cool down"
            time.sleep(REST_SECONDS)
            num_rests += 1
    return seconds


def num_in_block(step_seconds: float, block_seconds: float = BLOCK_SECONDS) -> int:
    return max(1, round(block_seconds / step_seconds))


def rated(candidate: Candidate, seconds: list[float], best: list[float], batch_size: int) -> Candidate:
    """By how much slower than the best it was round by round, so that a busy round counts for both."""
    factor = statistics.median(own / other for own, other in zip(seconds, best, strict=False))
    slow = f"{factor:.1f}x as long as the fastest" if factor > HOPELESS else None
    return replace(
        candidate,
        pairs_per_second=batch_size / (statistics.median(best) * factor),
        spread=spread_of(seconds),
        rejected=slow,
    )


def drift_of(seconds: list[float]) -> float:
    """How much slower the last third of the rounds was than the first."""
    third = max(1, len(seconds) // 3)
    return statistics.median(seconds[-third:]) / statistics.median(seconds[:third]) - 1
