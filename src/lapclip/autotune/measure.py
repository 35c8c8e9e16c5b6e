"""Execution plans in, how fast each is out: checked, warmed up, then timed in turn until the time is used up.

What is timed is what trains: the real model, optimizer and update over one batch. A busy or hot minute affects all
plans alike, because they take turns in an order that changes from round to round.
"""

import statistics
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from lapclip.autotune.parity import Probe, disagreement, first_line, num_probed, reference
from lapclip.autotune.plans import HOPELESS, Candidate, Measured, spread_of
from lapclip.config import ModelConfig, Plan, TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine.device import (
    Device,
    device_named,
    processor,
    ran_out_of_memory,
    release_memory,
    set_up_process,
)
from lapclip.model.clip import CLIP, Size, build_model, count_parameters, shape_of
from lapclip.step.loss import LOSSES, NEEDS_BIAS
from lapclip.step.optim import build_optimizer
from lapclip.step.step import Inputs, Update, choose_patches, fixed_length, move

MAX_ROUNDS = 9
BLOCK_SECONDS = 0.4  # of steps timed together; at least one step
MAX_DRIFT = 0.1  # from round to round, before the machine is given a rest
REST_SECONDS = 3.0
MAX_RESTS = 2
PROCESS_BYTES = 400_000_000  # Python, torch and a few batches

Progress = str  # what is being done, for whoever waits


@dataclass(frozen=True)
class Work:
    """What is timed: a model, a batch, and how it is trained; all of it resolved."""

    model: ModelConfig
    train: TrainConfig
    vocab_size: int
    num_tokens: int  # of the longest caption of a typical batch

    @property
    def batch_size(self) -> int:
        assert self.train.batch_size is not None, "resolved"
        return self.train.batch_size

    @property
    def has_bias(self) -> bool:
        return self.train.loss in NEEDS_BIAS

    @property
    def num_parameters(self) -> int:
        return count_parameters(shape_of(self.model), vocab_size=self.vocab_size, has_bias=self.has_bias)

    def key(self) -> dict[str, Any]:
        """What the time of a step depends on."""
        names = ("batch_size", "loss", "keep_patches")
        return asdict(shape_of(self.model)) | {
            "vocab_size": self.vocab_size,
            "recompute": self.model.recompute,
            "num_tokens": self.num_tokens,
            **{name: getattr(self.train, name) for name in names},
        }

    def new_model(self, device: Device, *, compile: bool = False) -> CLIP:
        """The model on a device, its weights as at the start of a run."""
        settings = {"vocab_size": self.vocab_size, "seed": self.train.seed}
        model = device.place(build_model(self.model, has_bias=self.has_bias, **settings))
        if compile:
            model.compile_towers()
        return model

    def probe(self, num_pairs: int) -> Probe:
        """A batch of images and captions that all differ: for time their content makes no difference."""
        assert self.train.loss is not None and self.train.keep_patches is not None, "resolved"
        random, size = np.random.default_rng(self.train.seed), shape_of(self.model)
        length = min(self.num_tokens, size.text_length)
        batch = Batch(
            images=random.integers(0, 256, (num_pairs, 3, size.image_size, size.image_size), dtype=np.uint8),
            tokens=random.integers(0, self.vocab_size, (num_pairs, length)),
            ends=np.full(num_pairs, length - 1),
            image_ids=np.arange(num_pairs),
            caption_ids=np.arange(num_pairs),
        )
        draw = {"seed": self.train.seed, "batch_size": num_pairs}
        num_patches = (size.image_size // size.patch_size) ** 2
        keep_BK = choose_patches(0, num_patches=num_patches, share=self.train.keep_patches, **draw)
        return Probe(batch, keep_BK, LOSSES[self.train.loss], size.text_length)


class Rig:
    """The model of some work on one device; runs any plan with that device and compilation."""

    def __init__(self, work: Work, plan: Plan):
        self.work, self.device = work, device_named(plan.device)
        model = work.new_model(self.device, compile=plan.compile)
        optimizer = build_optimizer(model, work.train)
        probe = work.probe(work.batch_size)
        self.update = Update(model, optimizer, probe.loss_fn, work.train.clip_norm, plan)
        self.length = fixed_length(self.device, plan.compile, model.size.text_length)
        self.inputs = self.on_device(probe)

    def on_device(self, probe: Probe) -> Inputs:
        return move(probe.batch, self.device, probe.keep_BK, fixed_length=self.length)

    def step(self, plan: Plan, num_pairs: int | None = None) -> float:
        """Runs one whole step, of the whole batch or of a few pairs at once; how many seconds it took."""
        inputs = self.inputs
        if num_pairs is not None:
            plan, inputs = replace(plan, chunk=num_pairs), self.on_device(self.work.probe(num_pairs))
        self.update.plan = plan
        set_up_process(plan.threads, keep_memory=plan.keep_memory)
        self.device.synchronize()
        started = time.perf_counter()
        self.update.run(inputs)
        return time.perf_counter() - started


class Rigs:
    """One rig per device, made when it is needed; compiled ones apart. The weights of all start equal."""

    def __init__(self, work: Work):
        self.work = work
        self.made: dict[tuple[str, bool], Rig] = {}

    def rig(self, plan: Plan) -> Rig:
        if (plan.device, plan.compile) not in self.made:
            self.made[plan.device, plan.compile] = Rig(self.work, plan)
        return self.made[plan.device, plan.compile]

    def problem(self, plan: Plan) -> str | None:
        """What the parity check finds wrong with a plan; on models of its own, whose weights no step has changed."""
        probe = self.work.probe(num_probed(plan, self.work.batch_size))
        expected = reference(self.work.new_model(processor()), probe, plan)
        model = self.work.new_model(device_named(plan.device), compile=plan.compile)
        return disagreement(model, probe, expected, plan)

    def drop(self, plan: Plan) -> None:
        """Releases what failed."""
        self.made.pop((plan.device, plan.compile), None)
        device_named(plan.device).release_memory()


def measure(
    work: Work, plans: Sequence[Plan], *, seconds: float, min_rounds: int = 3, patience: float = 1.0
) -> Generator[Progress, None, Measured]:
    """Times plans for about so many seconds; a step in low precision that takes longer than `patience` stops the
    search for how much slower it is."""
    started = time.perf_counter()
    rigs = Rigs(work)
    tried: dict[Plan, Candidate] = {}
    has_exact = any(plan.precision == "fp32" for plan in plans)
    for plan in plans:
        yield f"trying {plan.in_words()}"
        has_hardware = plan.precision in device_named(plan.device).precisions()
        tried[plan] = check_plan(rigs, plan, patience if has_exact and not has_hardware else None)
    accepted = [plan for plan in plans if tried[plan].rejected is None]
    block_seconds = min(BLOCK_SECONDS, seconds / ((min_rounds + 2) * len(plans)))
    times, failed = yield from race(rigs, accepted, min_rounds, block_seconds, until=started + seconds)
    tried |= failed
    for plan in plans:
        rigs.drop(plan)
    release_memory()
    best = min(times.values(), key=statistics.median, default=[])
    for plan, own in times.items():
        tried[plan] = rated(tried[plan], own, best, work.batch_size)
    drift = drift_of(best) if best else 0.0
    return Measured(tuple(tried.values()), time.time(), time.perf_counter() - started, drift)


def check_plan(rigs: Rigs, plan: Plan, patience: float | None) -> Candidate:
    """Whether a plan is correct, and not hopelessly slow; its first step, which compiles and allocates."""
    try:
        if plan.precision != "fp32" and patience is not None:
            num_pairs, factor = slower_than_fp32(rigs, plan, patience)
            if factor > HOPELESS:
                of = "a step" if num_pairs == rigs.work.batch_size else f"a step of {num_pairs} pairs"
                return Candidate(plan, rejected=f"{of} takes {factor:.1f} times as long as in fp32")
        if not plan.is_plain and (problem := rigs.problem(plan)):
            return Candidate(plan, rejected=problem)
        return Candidate(plan, first_call_seconds=rigs.rig(plan).step(plan))
    except (RuntimeError, MemoryError) as error:
        rejected = failed_candidate(plan, error)
    rigs.drop(plan)  # outside of `except`, whose error holds on to the activations
    return rejected


def failed_candidate(plan: Plan, error: BaseException) -> Candidate:
    if ran_out_of_memory(error):
        return Candidate(plan, rejected="out of memory", ran_out_of_memory=True)
    return Candidate(plan, rejected=f"fails: {first_line(error)}")


def slower_than_fp32(rigs: Rigs, plan: Plan, patience: float) -> tuple[int, float]:
    """By which factor a step in some precision is slower, with as many pairs as patience allows."""
    rig, exact = rigs.rig(plan), replace(plan, precision="fp32")
    num_pairs = min(2, rigs.work.batch_size)
    while True:
        # The first step of each warms up.
        seconds = [(rig.step(plan, num_pairs), rig.step(exact, num_pairs)) for _ in range(3)][1:]
        own, other = (statistics.median(column) for column in zip(*seconds, strict=True))
        if num_pairs == rigs.work.batch_size or own > patience / 2:
            return num_pairs, own / other
        num_pairs = min(2 * num_pairs, rigs.work.batch_size)


def race(
    rigs: Rigs, plans: Sequence[Plan], min_rounds: int, block_seconds: float, until: float
) -> Generator[Progress, None, tuple[dict[Plan, list[float]], dict[Plan, Candidate]]]:
    """Seconds of a step, block by block, and what failed; a plan that falls far behind stops with what it has."""
    seconds: dict[Plan, list[float]] = {plan: [] for plan in plans}
    failed: dict[Plan, Candidate] = {}
    num_steps: dict[Plan, int] = {}
    running, before, num_rests = list(plans), None, 0
    for number in range(MAX_ROUNDS):
        for plan in running[:: -1 if number % 2 else 1]:
            yield f"round {number + 1}: {plan.in_words()}"
            try:
                rig = rigs.rig(plan)
                if plan not in num_steps:
                    num_steps[plan] = num_in_block(rig.step(plan), block_seconds)
                if plan != before:
                    rig.step(plan)  # untimed: caches and allocator still are as the plan before left them
                seconds[plan].append(statistics.mean(rig.step(plan) for _ in range(num_steps[plan])))
            except (RuntimeError, MemoryError) as error:
                failed[plan] = failed_candidate(plan, error)
            before = plan
        for plan in [plan for plan in running if plan in failed]:
            running.remove(plan)
            seconds.pop(plan)
            rigs.drop(plan)
        if not running or (number >= min_rounds - 1 and time.perf_counter() > until):
            break
        medians = {plan: statistics.median(seconds[plan]) for plan in running}
        best = min(medians, key=lambda plan: medians[plan])
        running = [plan for plan in running if medians[plan] <= HOPELESS * medians[best] or number == 0]
        is_hot = seconds[best][-1] > (1 + MAX_DRIFT) * seconds[best][0]
        if is_hot and num_rests < MAX_RESTS and time.perf_counter() + REST_SECONDS < until:
            yield "letting the machine cool down"
            time.sleep(REST_SECONDS)
            num_rests += 1
    return seconds, failed


def num_in_block(step_seconds: float, block_seconds: float = BLOCK_SECONDS) -> int:
    return max(1, round(block_seconds / step_seconds))


def rated(candidate: Candidate, seconds: list[float], best: list[float], batch_size: int) -> Candidate:
    """By how much slower than the best it was round by round, so that a busy round counts for both."""
    factor = statistics.median(own / other for own, other in zip(seconds, best, strict=False))
    rate = batch_size / (statistics.median(best) * factor)
    return replace(candidate, pairs_per_second=rate, spread=spread_of(seconds))


def drift_of(seconds: list[float]) -> float:
    """How much slower the last third of the rounds was than the first."""
    third = max(1, len(seconds) // 3)
    return statistics.median(seconds[-third:]) / statistics.median(seconds[:third]) - 1


def step_bytes(size: Size, num_parameters: int, chunk: int, recompute: bool) -> int:
    """An estimate: the process, weights with gradients and AdamW's two moments, and the activations of one chunk."""
    return PROCESS_BYTES + 16 * num_parameters + chunk * activation_bytes(size, recompute)


def activation_bytes(size: Size, recompute: bool) -> int:
    """What one pair saves for the backward pass, about: 14 vectors per token and layer.

    With `recompute` one per layer, and 14 for the layer that is computed again.
    """
    patches = (size.image_size // size.patch_size) ** 2 + 1
    towers = ((size.image, patches), (size.text, size.text_length))
    return 4 * sum(
        (tower.depth + 14 if recompute else 14 * tower.depth) * tower.width * num_tokens
        for tower, num_tokens in towers
    )
