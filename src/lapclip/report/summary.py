"""A run in words: what was trained on what, what it came to, what limited it and what to try next.

Each sentence stands only where the run's data carries it.
"""

from collections import Counter

from lapclip.report.machinery import data_share
from lapclip.report.record import Record, find
from lapclip.report.verdict import (
    WAITS,
    has_training_loss_fallen,
    is_near_chance,
    last_quarter,
    memory_share,
    slowdown,
    validation_rise,
)
from lapclip.report.words import (
    clean,
    code,
    count,
    duration,
    listed,
    plural,
    rate,
    share,
    shortened,
    size,
    times,
)

# The warnings that say most about a result, the gravest first.
GRAVEST = (
    "collapsed", "exploding-gradients", "vanishing-gradients", "over-fitting", "scale-pinned", "data-bound",
    "memory-near-limit", "slower", "slept", "duplicate-captions", "small-pool", "lr-still-high",
    "loss-rises-recall-too",
)  # fmt: skip


def sentences(record: Record) -> list[str]:
    """The summary, what matters most first."""
    said = [what_and_how_long(record), how_it_ended(record), result(record), whether_it_improved(record)]
    said += [validation(record), *limits(record), interruptions(record), warnings(record)]
    return [sentence for sentence in said if sentence]


def what_and_how_long(record: Record) -> str:
    settings, started = record.settings, record.history.started
    size_name, source = settings.get("size"), settings.get("source")
    model = f"A {code(size_name)} model" if size_name else "A model"
    parameters = f" of {count(started.num_parameters)} parameters" if started else ""
    on = f" on {code(source)}" if source else ""
    if started is None:
        return f"{model}{on} was prepared, but no training was recorded."
    pairs = f", {count(started.num_train)} pairs"
    last = record.history.step
    if last is None and not record.history.finished:
        return f"{model}{parameters}{on}{pairs}: training began, and no step was recorded."
    seen = (record.history.finished or last).num_pairs_seen  # type: ignore[union-attr]
    epochs = seen / started.num_train if started.num_train else 0.0
    return (
        f"{model}{parameters} was trained{on}{pairs}, in batches of {count(started.batch_size)}: "
        f"{plural(record.steps, 'step')}, {count(seen)} pairs or {epochs:.2g} times over the data, in "
        f"{duration(record.seconds)} of training on {code(started.device)} ({rate(record.pairs_per_second)} pairs/s)."
    )


def how_it_ended(record: Record) -> str:
    history = record.history
    done = f" at {history.step.progress:.0%} of its budget" if history.step else ""
    saved = f"the last checkpoint is of step {count(history.saved.step)}" if history.saved else ""
    match record.state:
        case "finished":
            return "It used up its budget."
        case "stopped":
            if not record.steps:
                return "It was stopped before its first step." if history.started else ""
            return f"It was stopped{done}; everything until then is saved."
        case "failed":
            why = shortened(clean(record.failure).rstrip("."))
            return f"It failed{done}: {why}" + (f"; {saved}." if saved else "; nothing had been saved.")
        case "crashed":
            kept = f"; {saved}" if saved else "; nothing had been saved"
            return (
                f"Its process ended without a word{done}, killed or with the machine{kept}. "
                "What follows is what it had written down until then."
            )
        case "running":
            return f"It is still running{done}: this is how it stands now."
        case "paused" if history.paused:
            return f"It is paused{done}: {shortened(clean(history.paused.reason))}."
    return ""


def result(record: Record) -> str:
    recall = record.recall
    found, chance = find(recall, "text_to_image", "recall@1"), find(recall, "text_to_image", "chance@1")
    if found is None:
        if not record.steps:
            return ""
        return (
            "It was never evaluated, so how well it finds is not known; `lapclip eval` measures a checkpoint."
        )
    among = find(recall, "num_images")
    pictures = f" among {count(among)}" if among else ""
    said = f"Words find their picture{pictures} first in {share(found)} of cases (chance {share(chance)})"
    ten, chance = (find(recall, "text_to_image", name) for name in ("recall@10", "chance@10"))
    if ten is not None:
        said += f" and within the first ten in {share(ten)} (chance {share(chance)})"
    back = find(recall, "image_to_text", "recall@1")
    if back is not None:
        said += f"; pictures find their words first in {share(back)}"
    if (
        record.best_step is not None
        and record.best_step != record.steps
        and len(record.history.evaluations) > 1
    ):
        said += f". That is step {count(record.best_step)}, the best of {len(record.history.evaluations)} evaluations"
    if is_near_chance(record):
        said += ". This is hardly more than guessing"
    return said + "."


def whether_it_improved(record: Record) -> str:
    change = last_quarter(record)
    if change is None:
        return ""
    said = f"from {share(change.before)} at step {count(change.step_before)} to {share(change.after)}"
    points = f"{100 * change.noise:.1f} points"
    if change.direction > 0:
        return f"It was still improving at the end: recall@1 rose {said}."
    if change.direction < 0:
        return f"It became worse at the end: recall@1 fell {said}, more than chance explains ({points})."
    return (
        f"It was no longer clearly improving at the end: recall@1 went {said}, "
        f"and chance alone may move it by {points}."
    )


def validation(record: Record) -> str:
    rise = validation_rise(record)
    if rise is not None:
        said = (
            f"The validation loss was lowest at step {count(rise.step_before)} ({rise.before:.3f}) and rose "
            f"to {rise.after:.3f}"
        )
        quarter = last_quarter(record)
        if quarter and quarter.direction > 0:
            return f"{said}, while recall still rose."
        if has_training_loss_fallen(record, rise):
            return f"{said} while the training loss fell: it began to learn the training pairs by heart."
        return f"{said}."
    losses = [e.loss for e in record.history.evaluations if e.loss is not None]
    return "The validation loss did not rise." if len(losses) >= 3 else ""


def limits(record: Record) -> list[str]:
    said = []
    waiting = data_share(record)
    if waiting is not None and len(record.history.steps) > 3:
        if waiting >= WAITS:
            said.append(f"Data limited it: {share(waiting)} of the time it waited for the next batch.")
        else:
            said.append(
                f"Computing limited it, not data: {share(waiting)} of the time it waited for a batch."
            )
    slower = slowdown(record)
    if slower is not None:
        said.append(
            f"It became slower: from {rate(slower.before)} to {rate(slower.after)} pairs/s over the same kind of step."
        )
    bench = find(record.machine, "bench", "pairs_per_second")
    if bench and record.pairs_per_second:
        said.append(
            f"`lapclip bench` had measured {rate(bench)} pairs/s; "
            f"it ran at {record.pairs_per_second / bench:.0%} of that."
        )
    if memory := memory_share(record):
        said.append(f"Memory came near its limit: {size(memory[0])} of the {size(memory[1])} it may use.")
    return said


def interruptions(record: Record) -> str:
    parts = []
    resumed = len(record.starts) - 1
    if resumed > 0:
        parts.append(f"it was taken up again {times(resumed)}")
    waited = [pause.seconds for pause in record.pauses if pause.seconds is not None]
    if record.pauses:
        seconds = f", {duration(sum(waited))} in all, not counted as training" if waited else ""
        parts.append(f"it paused {times(len(record.pauses))}{seconds}")
    return f"On the way {listed(parts)}." if parts else ""


def warnings(record: Record) -> str:
    """How many there were, and the gravest one."""
    seen = record.history.warnings
    if not seen:
        return ""
    gravest = min(seen, key=lambda w: GRAVEST.index(w.kind) if w.kind in GRAVEST else len(GRAVEST))
    different = len(Counter(w.kind or w.message for w in seen))
    rest = f"{plural(different, 'kind')} of warning" if different > 1 else "One warning"
    which = ", the gravest" if different > 1 else ""
    return f"{rest}{which}: {shortened(clean(gravest.message))} (step {count(gravest.step)})."


def suggestions(record: Record) -> list[str]:
    """What to try next, most useful first; commands as one would type them."""
    name = clean(record.run.reference)
    resume, said = f"lapclip train --resume {name}", []
    match record.state:
        case "stopped" | "crashed":
            said.append(f"Go on from where it stands: {code(resume)}.")
        case "failed" if record.failure_hint:
            hint = shortened(clean(record.failure_hint)).rstrip(".")
            said.append(f"{hint[:1].upper()}{hint[1:]}.")
    if is_near_chance(record):
        source = clean(record.settings.get("source", ""))
        said.append(
            f"See whether the captions belong to their pictures: {code(f'lapclip data check {source}')}."
            if source and not source.startswith("synthetic")
            else "Give it more time, or a higher learning rate: it has hardly begun to learn."
        )
    rise, quarter = validation_rise(record), last_quarter(record)
    if record.state == "finished" and quarter and quarter.direction > 0 and not rise:
        said.append(f"Give it as long again, it was not done: {code(resume + twice(record))}.")
    if rise and not (quarter and quarter.direction > 0):
        said.append(
            "Use more pairs, or show them more differently (`--crop 0.6 --flip`); "
            "the best checkpoint is from before and is what `lapclip eval` loads."
        )
    waiting, workers = data_share(record), record.settings.get("workers")
    if waiting is not None and waiting >= WAITS and isinstance(workers, int):
        said.append(f"Prepare batches ahead with another process: `--workers {workers + 1}`.")
    if memory_share(record) and isinstance(chunk := record.settings.get("chunk"), int) and chunk > 1:
        said.append(f"Hold fewer pairs at once, with the same gradients: `--chunk {chunk // 2}`.")
    if record.recall is not None and record.state in ("finished", "stopped"):
        said.append(f"Measure it on other pictures: {code(f'lapclip eval {name} FOLDER')}.")
    return said[:4]


def twice(record: Record) -> str:
    """The flag that gives a run as much again, in the kind of budget it had."""
    for budget in ("minutes", "epochs", "steps"):
        if (amount := find(record.settings, budget)) is not None:
            return f" --{budget} {2 * amount:g}" if budget != "steps" else f" --steps {2 * amount:.0f}"
    return ""
