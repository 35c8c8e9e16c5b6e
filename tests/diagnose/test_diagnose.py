"""What is said of a run and what is not: noise, resumed runs, and speed that changes by design. Real runs are next door."""

import math
import random
import re
from dataclasses import replace

import pytest

from lapclip.autotune.resolve import RECIPES
from lapclip.config import SETTINGS, load_config, value_of
from lapclip.diagnose.diagnosis import MAX_TIMES, SECONDS_AWAY, Diagnosis
from lapclip.diagnose.learning import USUAL_LR
from lapclip.runs.events import Evaluated, Inspected, Started, Step, Warned
from lapclip.runs.history import is_as_good

BATCH = 32
RESOLVED = {
    "batch_size": BATCH, "chunk": BATCH, "lr": 1e-3, "loss": "softmax", "keep_patches": 1.0, "workers": 2, "steps": 1000,
}  # fmt: skip
GB = 1_000_000_000


def config(**flags):
    return load_config(flags=RESOLVED | flags)


def started(step=0, **more) -> Started:
    return replace(Started(step, step * 0.1, 1, 1, 2000, BATCH, BATCH, "cpu", 1, None, 1000), **more)


def step(number, **more) -> Step:
    """A step of a healthy run of a thousand."""
    healthy = Step(
        step=number, epoch=number * BATCH / 2000, num_pairs_seen=number * BATCH,
        loss=3.5 * math.exp(-number / 100) + 0.2, accuracy=1 - 0.97 * math.exp(-number / 100), lr=1e-3,
        temperature=0.07, grad_norm=5.0, pairs_per_second=320.0, data_seconds=0.001, seconds=number * 0.1,
        progress=number / 1000, seconds_left=1.0, num_different=BATCH,
    )  # fmt: skip
    return replace(healthy, **more)


def inspected(number, norms=None, used=GB, **readings) -> Inspected:
    healthy = dict.fromkeys(("image.patches", "image.0", "image.out", "text.tokens", "text.out"), 1.0)
    return Inspected(number, {}, {}, used, used, 8 * GB, norms or healthy, readings)


def evaluated(number, loss, recall, num_images=512) -> Evaluated:
    way = {"recall@1": recall, "recall@5": recall, "recall@10": recall, "interval@10": [0.31, 0.69]}
    found = {"num_images": num_images, "text_to_image": way, "image_to_text": way}
    return Evaluated(number, found, is_best=False, elapsed_seconds=0.1, loss=loss)


def said(events, **flags) -> list[Warned]:
    diagnosis = Diagnosis(config(**flags))
    return [warned for event in events for warned in diagnosis.look(event)]


def kinds(events, **flags) -> list[str]:
    return [warned.kind for warned in said(events, **flags)]


def at_chance(number, **more) -> Step:
    return step(number, **({"loss": math.log(BATCH), "accuracy": 1 / BATCH} | more))


def test_a_healthy_run_gives_no_cause_for_words():
    events = [started()]
    for n in range(1, 1001):
        events += [step(n)] + [inspected(n)] * (n % 50 == 0)
        events += [evaluated(n, 3 - n / 500, n / 1000)] * (n % 100 == 0)
    assert kinds(events) == []


def test_chance_is_usual_while_the_learning_rate_rises():
    assert kinds([started(), *(at_chance(n) for n in range(1, 199))]) == []
    assert kinds([started(), *(at_chance(n) for n in range(1, 501))], warmup=0.5) == []
    stuck = [started(), *(at_chance(n) for n in range(1, 300))]
    for flags, hint in (
        ({"lr": 0.1}, "`--lr 0.002`"),
        ({"weight_decay": 2.0}, "`--weight-decay 0.1`"),
        ({"loss": "sigmoid"}, "`lapclip data show synthetic"),
    ):
        [warned] = said(stuck, **flags)
        assert warned.kind == "collapsed" and "chance" in warned.message and hint in warned.hint


def test_a_falling_loss_and_a_little_above_chance_are_learning():
    falling = (at_chance(n, loss=math.log(BATCH) * (1.3 - n / 2000)) for n in range(1, 400))
    assert kinds([started(), *falling]) == []
    assert kinds([started(), *(at_chance(n, accuracy=0.04) for n in range(1, 400))]) == []


def test_equal_captions_make_chance_higher_and_guessing_easier():
    loss = math.log(BATCH - BATCH / 8 + 1)
    events = [started(), *(at_chance(n, loss=loss, accuracy=1 / 8, num_different=8) for n in range(1, 300))]
    warned = said(events)
    assert [w.kind for w in warned] == ["duplicate-captions", "collapsed"]
    assert "ln 29" in warned[1].message and "data show synthetic" in warned[1].hint


def test_a_larger_batch_is_advised_only_where_it_brings_other_captions():
    few, mixed = (said(step(n, num_different=d) for n in range(1, 100))[0] for d in (8, 16))
    assert "--batch-size" not in few.hint and "`--batch-size 64`" in mixed.hint
    assert "about 8 different captions" in few.message and "with 7 instead of 31 captions" in few.message
    assert "all 32 pairs" in said(step(n, num_different=1) for n in range(1, 20))[0].message
    assert kinds(step(n, num_different=28) for n in range(1, 100)) == []


def test_a_temperature_is_pinned_only_when_it_stays():
    assert kinds(step(n, temperature=0.01 if n % 150 else 0.02) for n in range(1, 900)) == []
    [sharp] = said(step(n, temperature=0.01) for n in range(1, 900))
    [flat] = said(step(n, temperature=1.0) for n in range(1, 900))
    assert sharp.kind == flat.kind == "scale-pinned"
    assert "`--batch-size 64`" in sharp.hint and "`--lr 0.0003`" in flat.hint


def test_single_long_gradients_and_long_ones_while_learning_are_usual():
    assert kinds(step(n, grad_norm=500.0 if n % 10 == 0 else 5.0, loss=2.0) for n in range(1, 600)) == []
    grows = (step(n, grad_norm=2.0 * 1.01**n, loss=3 - n / 400) for n in range(1, 600))
    assert kinds(grows) == [], "the loss falls: it leaves a plateau"
    tiny = (step(n, grad_norm=1e-5 if n < 300 else 0.5, loss=2 + n / 600) for n in range(1, 600))
    assert kinds(tiny) == [], "shorter than what is shortened at all"
    explodes = (
        step(n, grad_norm=5.0 if n < 300 else 80.0, loss=1.0 if n < 300 else 1.5) for n in range(1, 600)
    )
    assert kinds(explodes) == ["exploding-gradients"]


def test_a_layer_has_vanished_only_when_it_stays_so():
    gone = {"image.patches": 1e-9, "image.0": 0.5, "image.out": 1.0, "text.tokens": 1.0, "scale": 0.0}
    assert kinds(inspected(n, gone if n % 4 else None) for n in range(1, 40)) == []
    assert [w.message for w in said(inspected(n, gone) for n in range(1, 40))] == [
        "`image.patches` hardly learns: gradient norm 1.0e-09 in `image.patches`, 1.0e+00 in `image.out`"
    ]
    nothing = dict.fromkeys(gone, 0.0)
    assert kinds(inspected(n, nothing) for n in range(1, 40)) == [], "a loss of zero has no gradient anywhere"


def test_the_wobble_of_a_pool_says_nothing():
    """A run that has long learned all it can: recall and loss are those of 128 images, drawn again each time."""
    chance, events = random.Random(1), [started()]
    for n in range(1, 61):
        events += [step(10 * n, loss=1.0 / n)]
        losses = [chance.gauss(1.5, 1.0) for _ in range(128)]
        found = sum(chance.random() < 0.5 for _ in range(128)) / 128
        events += [evaluated(10 * n, sum(losses) / 128, found, 128)]
    assert kinds(events) == []


def evaluations(recalls, losses, num_images=512, accuracy=0.9):
    events, highest, best = [started()], None, (0.0, 0.0)
    for n, (recall, loss) in enumerate(zip(recalls, losses, strict=True), 1):
        found = evaluated(20 * n, loss, recall, num_images)
        is_best = is_as_good(recall, loss, num_images, highest, best)
        events += [step(20 * n, accuracy=accuracy), replace(found, is_best=is_best)]
        highest, best = max(highest or 0.0, recall), (recall, loss) if is_best else best
    return events


RISING = [2.0, 1.5, 1.7, 1.9, 2.1, 2.3]


def test_a_rising_loss_means_what_recall_says():
    assert kinds(evaluations([0.1, 0.3, 0.4, 0.5, 0.5, 0.5], RISING)) == ["loss-rises-recall-too"]
    assert kinds(evaluations([0.1, 0.3, 0.3, 0.3, 0.3, 0.3], RISING)) == ["over-fitting"]
    [fell] = said(evaluations([0.1, 0.5, 0.5, 0.4, 0.3, 0.3], RISING))
    assert fell.kind == "over-fitting" and "recall falls, from 47% to 40%" in fell.message
    assert "1.50 at step 40" in fell.message and "`best` is step 60" in fell.message, "the last one kept"
    assert "`--epochs 0.64`" in fell.hint


def test_a_model_that_has_learned_nothing_has_memorised_nothing():
    assert kinds(evaluations([0.1, 0.3, 0.3, 0.3, 0.3, 0.3], RISING, accuracy=0.094)) == []


def test_a_recall_that_still_rises_a_little_shows_no_over_fitting():
    assert kinds(evaluations([0.1, 0.3, 0.305, 0.31, 0.315, 0.32], RISING)) == []


def test_few_images_show_no_over_fitting_by_themselves():
    assert kinds(evaluations([0.1, 0.3, 0.3, 0.3, 0.3, 0.3], RISING, num_images=20)) == ["small-pool"]
    far = [2 * loss for loss in RISING]
    assert kinds(evaluations([0.1, 0.3, 0.37, 0.37, 0.37, 0.37], far, num_images=31)) == ["small-pool"]
    level = evaluations([0.1, 0.3, 0.33, 0.3, 0.33, 0.3], far, num_images=31)
    assert kinds(level) == ["small-pool", "over-fitting"], "a loss that doubles is more than noise"


def test_evaluations_that_were_lost_are_taken_back():
    lost = evaluations([0.1, 0.3, 0.3, 0.3], RISING[:4])
    again = [event for n in (1, 2) for event in (step(40 + n), evaluated(40 + n, RISING[n + 1], 0.3))]
    assert kinds([*lost, started(40), *again]) == []
    assert kinds([*lost, started(80), *again[:2], step(43, accuracy=0.9), evaluated(43, 2.2, 0.3)]) == [
        "over-fitting"
    ]


def test_a_small_pool_is_said_with_what_makes_it_larger():
    part, share = "use a larger validation set: `--num-validation 512`", "set: `--validation-share 0.2`"
    for limit, hint in {"num_validation": part, "validation_share": share, "source": "use a source"}.items():
        first = started(num_train=950, validation_limit=limit)
        [warned] = said([first, *(evaluated(n, 1.0, 0.5, 50) for n in (10, 20))], num_validation=50)
        assert "50 images" in warned.message and "31% to 69%" in warned.message and hint in warned.hint
    few_captions = evaluated(10, 1.0, 0.5, 96)
    few_captions.recall["text_to_image"]["num_units"] = 9
    [warned] = said([started(num_train=950, validation_limit="validation_share"), few_captions])
    assert "9 different captions only" in warned.message and "zero-shot accuracy" in warned.hint
    [warned] = said([started(), evaluated(10, 1.0, 0.5, 8)])
    assert "8 images only" in warned.message and "recall@10" not in warned.message, "it is always 100%"


def of_run(config, **more) -> Started:
    return started(num_train=500, batch_size=config.train.batch_size, chunk=config.train.chunk, **more)


def swapping(config):
    yield of_run(config)
    for n in range(1, 2500):
        yield at_speed(n, (10.0 if n < 1000 else 5.0) * config.train.batch_size)
        if n % 50 == 0:
            yield inspected(n, swapped_bytes=max(0, n - 1000) * 1_000_000)


def memorising(config):
    for event in evaluations([0.1, 0.5, 0.5, 0.4, 0.3, 0.3], RISING):
        budget = config.train.epochs or 10.0
        yield replace(event, epoch=budget * event.step / 120) if isinstance(event, Step) else event


VANISHED = {"image.patches": 1e-9, "image.0": 0.5, "image.out": 1.0}
PROVOKED = {  # each kind of warning, by the events of a run with some settings
    "collapsed": lambda c: (at_chance(n, loss=math.log(c.train.batch_size)) for n in range(1, 300)),
    "cold": lambda c: [of_run(c), *(step(n, temperature=0.01) for n in range(1, 300))],
    "hot": lambda c: [of_run(c), *(step(n, temperature=1.0) for n in range(1, 300))],
    "equal": lambda c: [of_run(c), *(step(n, num_different=c.train.batch_size // 2) for n in range(1, 20))],
    "exploding": lambda c: (step(n, grad_norm=n / 10, loss=1 + n / 300) for n in range(1, 900)),
    "vanishing": lambda c: (inspected(n, VANISHED) for n in range(1, 40)),
    "memorising": memorising,
    "part": lambda c: [of_run(c, validation_limit="num_validation"), evaluated(10, 1.0, 0.5, 31)],
    "share": lambda c: [of_run(c, validation_limit="validation_share"), evaluated(10, 1.0, 0.5, 31)],
    "waiting": lambda c: (step(n, data_seconds=0.05 * c.train.batch_size / BATCH) for n in range(1, 300)),
    "memory": lambda c: [of_run(c), *(inspected(n, used=8 * GB) for n in range(3))],
    "swapping": swapping,
}


@pytest.mark.parametrize("flags", [{}, {"lr": 0.1, "weight_decay": 2.0, "pack": False}], ids=str)
@pytest.mark.parametrize("name", PROVOKED)
def test_advice_is_valid_and_never_what_is_already_set(name, flags):
    """Following it each time, as often as a chunk of 8 can be halved and more."""
    flags = {"num_validation": 31, "chunk": 8} | flags
    for times in range(6):
        now = load_config(flags={n: v for n, v in (RESOLVED | flags).items() if n != "steps"})
        diagnosis = Diagnosis(now)
        warned = [w for event in PROVOKED[name](now) for w in diagnosis.look(event)]
        hints = " ".join(w.hint for w in warned)
        assert len(warned) == 1 or times, "it is provoked"
        for flag, value in re.findall(r"`--([\w-]+)(?: (\S+))?`", hints):
            setting = SETTINGS[flag.replace("-", "_")]
            if value or setting.type is bool:
                flags = flags | {setting.name: setting.type(value or True)}
                assert flags[setting.name] != value_of(now, setting.name), hints
        assert flags.get("batch_size", 0) <= 500, "a batch that the source cannot fill"


def at_speed(number, speed, **more) -> Step:
    return step(number, pairs_per_second=speed, **more)


def test_a_hiccup_is_no_change_of_speed():
    assert kinds(at_speed(n, 20.0 if n % 40 == 0 else 320.0) for n in range(1, 1500)) == []
    some = (at_speed(n, 200.0 if 700 < n < 1000 else 320.0) for n in range(1, 2500))
    assert kinds(some) == [], "half a minute"


def test_slower_steps_are_said_when_they_stay_and_no_reason_is_by_design():
    def events(change=None):
        yield started()
        for n in range(1, 3000):
            if n == 1000 and change:
                yield change
            yield at_speed(n, 320.0 if n < 1000 else 200.0, progress=n / 3000, seconds=n / 10)

    [warned] = said(events())
    assert warned.kind == "slower" and "38% slower, 200 pairs/s instead of 320" in warned.message
    assert kinds(events(), keep_patches=0.5, whole_from=1 / 3) == []
    assert kinds(events(), keep_patches=1.0, whole_from=1 / 3) == ["slower"]
    assert kinds(events(Warned(1000, "memory ran out", "", "memory-ran-out"))) == []
    assert kinds(events(started(999))) == [], "another process, perhaps on another machine"


def test_slower_for_want_of_data_is_said_as_that():
    fast, slow = {"speed": 320.0, "data_seconds": 0.0}, {"speed": 200.0, "data_seconds": 0.07}
    [warned] = said(at_speed(n, **(fast if n < 1000 else slow)) for n in range(3000))
    assert warned.kind == "data-bound" and "`--workers 3`" in warned.hint


@pytest.mark.parametrize(
    ("before", "now", "words", "hint"),
    [
        ({"other_cores": 0.1}, {"other_cores": 1.9}, "other programs keep 1.9 cores busy", "close"),
        ({"is_plugged": True}, {"is_plugged": False}, "battery", "plug it in"),
        ({"speed_limit": 1.0}, {"speed_limit": 0.6}, "limits its speed to 60%", "cooling"),
        ({"temperature": 60.0}, {"temperature": 95.0}, "95 °C", "cooling"),
        ({"temperature": 50.0}, {"temperature": 60.0}, "heat or", "cooling"),
        ({"swapped_bytes": 0}, {"swapped_bytes": None}, "swaps", "`--chunk 16`"),
    ],
)
def test_what_changed_in_the_machine_is_the_likely_cause(before, now, words, hint):
    events = [started()]
    for n in range(1, 2500):
        events += [at_speed(n, 320.0 if n < 1000 else 200.0)]
        if n % 50 == 0:
            readings = before if n < 1000 else now
            if "swapped_bytes" in readings:
                readings = {"swapped_bytes": max(0, n - 1000) * 1_000_000}
            events += [inspected(n, **readings)]
    [warned] = said(events)
    assert words in warned.message and hint in warned.hint


def test_what_comes_back_after_long_is_said_again_but_not_for_ever():
    diagnosis, times, seconds = Diagnosis(config()), [], 0.0
    for _ in range(6):
        for is_slow in (True, False):
            for _ in range(300 if is_slow else int(SECONDS_AWAY * 10) + 300):
                seconds += 0.1
                now = step(1, seconds=seconds, data_seconds=0.05 if is_slow else 0.0)
                times += [w.kind for w in diagnosis.look(now)]
    assert times == ["data-bound"] * MAX_TIMES


def test_a_resumed_run_is_not_told_again():
    first = [started(), *(at_chance(n) for n in range(1, 300))]
    diagnosis, told = Diagnosis(config()), []
    for event in first:
        told += diagnosis.look(event)
    written = [event for event in first if not isinstance(event, Step) or event.step % 20 == 0] + told
    again = Diagnosis(config())
    for event in written:  # too few steps to find it again: what was written counts
        again.look(event)
    assert told and not [w for n in range(300, 600) for w in again.look(at_chance(n))]
    after = [started(299), *(at_chance(n) for n in range(300, 600))]
    assert not [w for event in after for w in again.look(event)]


def test_memory_is_near_its_limit_when_it_stays_there():
    near = (inspected(n, used=int(7.5 * GB)) for n in range(1, 10))
    [warned] = said([started(), *near])
    assert "7.50 of 8.00 GB" in warned.message and "close other programs" in warned.hint
    assert kinds(inspected(n, used=int(7.5 * GB) if n % 2 else GB) for n in range(1, 10)) == []
    [left] = said(inspected(n, memory_available=300_000_000) for n in range(1, 10))
    assert "0.30 GB of memory is free" in left.message
    assert kinds((inspected(n, memory_available=300_000_000) for n in range(1, 10)), max_memory=8.0) == []
    events = [started(chunk=1), *(inspected(n, used=8 * GB) for n in range(3))]
    assert "`--recompute`" in said(events, size="tiny")[0].hint
    assert "`--size`" in said(events, size="tiny", recompute=True)[0].hint
    of_the_default = [said([started(chunk=chunk), *events[1:]])[0].hint for chunk in (64, 32)]
    assert "`--chunk 32`" in of_the_default[0], "whose chunks are groups of 32"
    assert of_the_default[1] == "close other programs", "and which recomputes nothing"


def test_an_end_with_a_high_rate_is_said_but_not_one_of_a_few_steps():
    diagnosis = Diagnosis(config(), "cats")
    diagnosis.look(step(600, lr=4e-4, progress=0.6))
    [warned] = diagnosis.at_end(600)
    assert "60% of its budget" in warned.message and "40% of its" in warned.message
    assert "`lapclip train --resume cats`" in warned.hint
    diagnosis.look(step(1000, lr=1e-6, progress=1.0))
    assert diagnosis.at_end(1000) == []
    few = Diagnosis(config())
    assert few.at_end(0) == []
    few.look(replace(step(2), lr=2e-4, progress=1.0))
    assert few.at_end(2) == []


def test_no_default_learning_rate_is_called_too_high():
    assert max(recipe.lr for recipe in RECIPES.values()) == USUAL_LR
