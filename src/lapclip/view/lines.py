"""A run in sentences: one for an event, one for its state; shown in one live line, or as plain lines on a pipe."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lapclip.errors import code, one_line, printable, shortened_path
from lapclip.runs.events import Continued, Evaluated, Event, Interpolated, Paused, Started, Step, Warned
from lapclip.runs.history import KS, History, Summary, mean_recall
from lapclip.units import duration, percent, plural

SECONDS_BETWEEN_LINES = 10  # on a pipe
SECONDS_BETWEEN_READS = 2.0
WAYS = (("text_to_image", "text → image"), ("image_to_text", "image → text"))


def sentence(event: Event, history: History) -> str:
    """What happened, in one line; nothing for an event that is not worth one. The history has it already."""
    match event:
        case Started():
            resumed = f"resuming after {duration(event.seconds)} of training"
            said = resumed if event.step else "training starts"
            if event.num_trained is not None:
                said += f", {event.num_trained:,} of {event.num_parameters:,} parameters are trained"
            return f"step {event.step:,}: {said}"
        case Evaluated():
            found = {name: percent(share) for name, share in event.recall["text_to_image"].items()}
            shares = (f"recall@{k} {found[f'recall@{k}']} (chance {found[f'chance@{k}']})" for k in (1, 10))
            said = f"step {event.step:,}: {', '.join(shares)}"
            if event.general:
                said += f", general recall@10 {percent(event.general['text_to_image']['recall@10'])}"
            trained = [mean_recall(e.recall) for e in history.evaluations if event.is_best and e.step]
            if trained and mean_recall(event.recall) < max(trained):
                return f"{said}, within the noise of the highest: the later checkpoint is kept as `best`"
            return said + ", saved as `best`" * event.is_best
        case Interpolated():
            return f"step {event.step:,}: {interpolated_words(event)}"
        case Warned():
            return f"step {event.step:,}: warning: {one_line(event.message)}; hint: {one_line(event.hint)}"
        case Paused():
            return f"step {event.step:,}: paused, everything is saved: {one_line(event.reason)}"
        case Continued():
            return f"step {event.step:,}: continuing after a pause of {duration(event.paused_seconds)}"
    return ""


def interpolated_words(event: Interpolated) -> str:
    """Which mean of the pretrained and the trained weights was best."""
    means = [percent(mean_recall(recall)) for recall in event.recall]
    each = ", ".join(f"{alpha:g}: {mean}" for alpha, mean in zip(event.alphas, means, strict=True))
    way = f"{event.chosen:g} of the way from the pretrained to the trained weights"
    which = "the trained model, which none exceeds by a whole image" if event.chosen == 1 else way
    return f"`best` is {which}; mean recall by the share of the trained weights, the rest being pretrained: {each}"


def forgetting(summary: Summary) -> list[str]:
    """What a fine-tuned model has forgotten, and what is kept of the pretrained one, a sentence each."""
    said = []
    if general := summary.general:
        before, now = (percent(general[when]["text_to_image"]["recall@10"]) for when in ("before", "now"))
        source = code(shortened_path(one_line(general["source"] or "general"), 24))
        said.append(f"recall@10 on {source} (general): {before} before, {now} now")
    if event := summary.history.interpolated:
        said.append(interpolated_words(event))
    return said


def progress(history: History) -> str:
    """How far training is, in less than 80 columns."""
    step, loss = history.step, history.recently("loss") or 0.0
    if step is None:
        return ""
    return (
        f"{step.progress:4.0%}  loss {loss:.{3 if loss < 10 else 1}f}"
        f"  acc {percent(history.recently('accuracy') or 0.0)} (chance {percent(history.chance or 0.0)})"
        f"  {history.recently('pairs_per_second'):,.0f} pairs/s  tau {step.temperature:.3f}"
        f"  {duration(step.seconds_left)} left"
    )


def how_far(summary: Summary) -> str:
    step, started = summary.history.step, summary.history.started
    if step is None:
        return "no step yet"
    total = f" of {started.total_steps:,}" if started and started.total_steps else ""
    minutes = f" of {started.minutes:g} min" if started and started.minutes else ""
    return f"step {step.step:,}{total}, epoch {step.epoch:.2f}, {duration(step.seconds)}{minutes} of training"


def what_now(summary: Summary) -> str:
    """What to know, and to type, about a run that is not simply running; nothing about one that is."""
    history, name = summary.history, one_line(summary.run.reference)
    resume = f"resume it with `lapclip train --resume {name}`"
    if summary.is_preparing:
        return "reading data or measuring the machine; training starts soon"
    match summary.state:
        case "paused" if history.paused:
            return one_line(history.paused.reason)
        case "finished" if end := history.finished:
            done = f"{plural(end.step, 'step')}, {end.epochs:.2f} epochs in {duration(end.seconds)}"
            return f"{done}; evaluate it with `lapclip eval {name}`"
        case "failed" if failed := summary.failed:
            return f"{one_line(failed.message)}; hint: {one_line(failed.hint)}"
        case "crashed":
            return f"its process ended unexpectedly; {resume}"
        case "stopped":
            return f"{'everything is saved' if history.finished else 'it was never trained'}; {resume}"
    return ""


class Screen:
    """Shows events as they come: one live line on a terminal, lines now and then on a pipe."""

    def __init__(self, console: Console):
        self.console, self.history = console, History()
        self.live = Live(console=console, refresh_per_second=4, transient=True)
        self.last_line, self.is_paused = -math.inf, False

    def __enter__(self) -> "Screen":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def show(self, event: Event) -> None:
        self.history.add(event)
        self.tell(event, self.history)

    def tell(self, event: Event, history: History) -> None:
        """Shows an event that the history has in it already."""
        is_known = self.is_paused and isinstance(event, Paused)  # a pause is reported again and again
        self.is_paused = history.paused is not None
        if isinstance(event, Step) and self.console.is_terminal:
            self.live.update(Text(progress(history), no_wrap=True, overflow="ellipsis"))
        elif isinstance(event, Step):
            if time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES or event.progress >= 1:
                self.last_line = time.monotonic()
                self.say(f"step {event.step:,}: {progress(history).strip()}")
        elif (line := sentence(event, history)) and not is_known:
            self.say(line)

    def say(self, text: str) -> None:
        is_pipe = not self.console.is_terminal
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=is_pipe)


def follow_in_lines(summary: Summary) -> int:
    """One line with the state of the run, then lines as things happen; 0 when it ends."""
    summary.read()
    screen, history = Screen(Console(soft_wrap=True, color_system=None)), summary.history
    screen.say(f"run {summary.run.reference}: {summary.state_words}, {how_far(summary)}")
    if summary.is_over and history.evaluated:
        screen.say(sentence(history.evaluated, history))
    while not summary.is_over:
        time.sleep(SECONDS_BETWEEN_READS)
        for event in summary.read()[0]:
            screen.tell(event, summary.history)
    screen.say(f"{summary.state}: {what_now(summary)}")
    return 0


def recall_table(recall: Mapping[str, Any], image: str = "validation image") -> Table:
    """Recall in both directions with 95% intervals, as far as they were measured, beside chance."""
    title = f"{plural(recall['num_images'], image)}, {plural(recall['num_captions'], 'caption')}"
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE, pad_edge=False)
    for heading in ("", "recall@1", "@5", "@10", "median rank"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    both = [[f"{recall[direction][f'chance@{k}']:.1%}" for k in KS] for direction, _ in WAYS]
    is_shared = both[0] == both[1]
    for (direction, name), chances in zip(WAYS, both, strict=True):
        found = recall[direction]
        shares = [f"{found[f'recall@{k}']:.1%}" for k in KS]
        table.add_row(name, *shares, f"{found['median_rank']:g}")
        intervals = [interval(found.get(f"interval@{k}")) for k in KS]
        table.add_row(" 95% interval", *intervals, style="dim")
        if not is_shared:
            table.add_row(" chance", *chances, style="dim")
    if is_shared:
        table.add_row("chance", *both[0])
    if batches := recall.get("in_batch"):
        matched = f"{batches['accuracy']:.1%} are matched correctly (chance {batches['chance']:.1%})"
        table.caption = f"in batches of {batches['batch_size']}, {matched}"
    return table


def interval(ends: Sequence[float] | None) -> str:
    return f"{percent(ends[0])} to {percent(ends[1])}" if ends else ""
