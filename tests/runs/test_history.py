"""What a run's events come to: bounded however long the run, and correct after a killed process lost some of them."""

import itertools
from dataclasses import replace

import pytest
from made_events import ONE_OF_EACH, RECALL, WAY, evaluated, finished, memorised, started, step

from lapclip.runs.events import Continued, Evaluated, Paused, Step, Warned
from lapclip.runs.history import (
    MAX_EVALUATIONS,
    MAX_GAP,
    MAX_INSPECTIONS,
    MAX_STEPS,
    MAX_WARNINGS,
    History,
    Thinned,
    is_as_good,
    is_chance,
)


def steps(first: int, last: int, **changes) -> list[Step]:
    return [step(number, **{"loss": float(number)} | changes) for number in range(first, last + 1)]


def inspected(number: int, seconds: float, watts: float | None):
    readings = {} if watts is None else {"power_watts": watts}
    return replace(ONE_OF_EACH[2], step=number, time=1000.0 + seconds, readings=readings)


@pytest.mark.parametrize("most", [1, 2, 10])
def test_thinning_keeps_the_first_the_last_and_no_more_than_it_may(most):
    thinned = Thinned(most)
    for number in range(5000):
        thinned.add(number)
        kept = list(thinned)
        assert kept[-1] == number and len(kept) == len(thinned) <= max(2, most)
        assert kept[0] == 0 and len({b - a for a, b in itertools.pairwise(kept[:-1])}) <= 1, "evenly spread"


def test_of_many_steps_a_bounded_number_is_held():
    history, plain, look = History(), step(1), inspected(1, 0, 10.0)
    for number in range(1, 200_001):
        history.add(plain)
        if number % 1000 == 0:
            history.add(replace(look, step=number))
            history.add(replace(ONE_OF_EACH[3], step=number, is_best=False))
            history.add(Warned(number, f"warning {number}", "do"))
    assert len(history.steps) <= MAX_STEPS and len(history.inspections) <= MAX_INSPECTIONS
    assert len(history.evaluations) <= MAX_EVALUATIONS and len(history.warnings) == MAX_WARNINGS
    assert history.warnings[-1].step == 200_000 and history.evaluated.step == 200_000


@pytest.mark.parametrize("kept_step", [0, 5, 10, 15, 20, 24])
def test_what_a_killed_process_lost_is_taken_back(kept_step):
    """A run that was killed and went on looks like one that never had the lost steps."""
    before = [
        started(0), *steps(1, 5), evaluated(5, is_best=True), Warned(5, "early", "do"),
        *steps(6, 15), evaluated(15, is_best=True), Warned(15, "late", "do"), *steps(16, 24, loss=99.0),
    ]  # fmt: skip
    kept = [event for event in before if event.step <= kept_step]
    after = [started(kept_step), *steps(kept_step + 1, 30), evaluated(30)]
    history, never = History().extend([*before, *after]), History().extend([*kept, *after])
    assert len(history.starts) == 2
    for name in ("steps", "evaluations", "warnings"):
        assert list(getattr(history, name)) == list(getattr(never, name)), name
    assert history.best == never.best


def test_a_resumed_run_is_no_longer_over():
    history = History().extend(ONE_OF_EACH)
    assert history.last is ONE_OF_EACH[-1] and history.best and history.saved and history.inspected
    assert history.finished and history.failed
    history.add(started(3))
    assert history.finished is None and history.failed is None


@pytest.mark.parametrize("end", [Continued(3, 60.0), step(4), started(3)], ids=lambda e: type(e).__name__)
def test_a_pause_ends(end):
    history = History().extend([started(0), *steps(1, 3), Paused(3, "the battery is low")])
    assert history.paused.reason == "the battery is low"
    history.add(end)
    assert history.paused is None


def test_energy_is_power_over_time_as_far_as_it_is_known():
    looks = [inspected(1, 0, 10.0), inspected(2, 5, 20.0), inspected(9, 10, 20.0), inspected(11, 12, 20.0)]
    assert History().extend(looks).joules == 5 * 15 + 5 * 20 + 2 * 20
    unknown = [inspected(1, 0, None), inspected(2, 9, 10.0), inspected(3, 9 + MAX_GAP + 1, 10.0)]
    unknown += [inspected(3, 20, 10.0), inspected(4, 25, None), inspected(5, 30, 10.0)]
    assert History().extend(unknown).joules is None, "over a gap, backwards in time, over a missing reading"
    resumed = History().extend([started(0), *looks, started(0), inspected(1, 30, 10.0)])
    assert resumed.joules == 215, "a restart counts no second twice"
    resumed.add(inspected(2, 35, 10.0))
    assert resumed.joules == 265


def test_what_a_person_reads_is_the_mean_of_the_last_steps_however_many_there_were():
    history = History()
    assert history.recently("loss") is None
    history.extend([started(0), *steps(1, 3)])
    assert history.recently("loss") == 2.0
    history.extend(steps(4, 3 * MAX_STEPS + 7))
    last = 3 * MAX_STEPS + 7
    assert history.recently("loss") == last - 4.5 and len(history.recent) == 10
    history.add(started(last))
    assert history.recently("loss") == list(history.steps)[-1].loss, "until this process has made a step"
    history.add(step(last + 1, loss=1.0))
    assert history.recently("loss") == 1.0


def test_the_last_few_looks_at_a_step_are_at_hand_until_the_run_starts_again():
    history = History().extend([started(0), *(inspected(number, 5 * number, None) for number in range(9))])
    assert [look.step for look in history.recent_inspections] == [4, 5, 6, 7, 8]
    history.add(started(8))
    assert not history.recent_inspections


def test_a_stroke_of_luck_among_few_images_is_no_reason_to_keep_an_early_model():
    def replaces(recall, loss=2.0, num_images=18, highest=0.3, best=(0.3, 2.0)) -> bool:
        return is_as_good(recall, loss, num_images, highest, best)

    assert replaces(0.1, highest=None) and replaces(0.31)
    assert replaces(0.22), "with 18 images eight points are chance"
    assert not replaces(0.22, num_images=512), "with 512 they are not"
    assert replaces(0.31, loss=9.0), "recall counts, not loss"
    assert replaces(1.0, highest=1.0) and not replaces(0.99, highest=1.0)


def test_a_checkpoint_that_is_worse_in_recall_and_in_loss_never_becomes_the_best():
    assert not is_as_good(0.581, 3.23, 45, highest=0.626, best=(0.626, 2.87)), "however few the images are"
    assert is_as_good(0.581, 2.87, 45, highest=0.626, best=(0.626, 2.87))
    assert is_as_good(0.59, 3.0, 45, highest=0.626, best=(0.581, 2.7)), "better than the one kept before"


def test_a_run_that_knows_its_pairs_and_finds_no_more_is_saturated():
    def is_saturated(accuracy: float, *recalls: float) -> bool:
        events = [started(), step(100, accuracy=accuracy)]
        for n, share in enumerate(recalls, 1):
            way = WAY | {f"recall@{k}": share for k in (1, 5, 10)}
            events.append(Evaluated(20 * n, RECALL | {"text_to_image": way, "image_to_text": way}, True, 0.1))
        return History().extend(events).is_saturated

    assert is_saturated(1.0, 0.43, 0.41, 0.42, 0.42)
    assert not is_saturated(0.9, 0.43, 0.41, 0.42, 0.42), "there is more to learn"
    assert not is_saturated(1.0, 0.41, 0.42, 0.42, 0.43), "recall still rises"
    assert is_saturated(0.9, 0.41, 1.0), "everything is found"


def test_recall_at_chance_shows_over_fitting_also_over_few_images():
    assert "not significantly above chance" in History().extend(memorised()).over_fits
    assert not History().extend(memorised(accuracy=0.5)).over_fits, "it may not have learned enough yet"
    assert not History().extend(memorised(interval=(0.5, 1.0))).over_fits, "recall is above chance"
    assert not History().extend(memorised(back=(0.5, 1.0))).over_fits, "image to text it is"
    up_and_down = memorised(losses=(1.622, 1.734, 1.549, 1.764))
    assert not History().extend(up_and_down).over_fits, "one high value at the end is no clear rise"


def test_over_fitting_is_stated_only_when_recall_stopped_rising_and_the_budget_is_used_up():
    def told(recalls, reason="budget", accuracy=0.9):
        events = [started(), *(step(n, loss=4.0 / n, accuracy=accuracy) for n in range(1, 101))]
        for n, share in enumerate(recalls, 1):
            way = {f"recall@{k}": share for k in (1, 5, 10)}
            found = RECALL | {"text_to_image": WAY | way, "image_to_text": WAY | way}
            events.append(Evaluated(20 * n, found, True, 0.1, loss=2.0 + 0.5 * n))
        return History().extend([*events, finished(100, reason)]).over_fits

    assert told([0.02, 0.04, 0.06, 0.05]) == "", "the highest is recent: it may still rise"
    assert told([0.02, 0.06, 0.05]) == "", "too few"
    assert "since step 40," in told([0.02, 0.06, 0.05, 0.05])
    assert told([0.02, 0.06, 0.05, 0.05], "stopped") == ""
    assert told([0.02, 0.06, 0.05, 0.05], accuracy=0.1) == "", "it has learned nothing that it could memorise"


def test_recall_is_at_chance_only_where_that_was_measured_both_ways_at_every_rank():
    ways = ("text_to_image", "image_to_text")
    at_chance = RECALL | dict.fromkeys(ways, WAY | {f"interval@{k}": [0.0, 0.2] for k in (1, 5, 10)})
    assert is_chance(at_chance)
    for way, k in itertools.product(ways, (1, 5, 10)):
        for interval in ([0.5, 0.7], None):
            assert not is_chance(at_chance | {way: at_chance[way] | {f"interval@{k}": interval}}), (way, k)
    assert not is_chance(RECALL) and not is_chance(None), "not measured"
