"""A run in one line while it trains, and in a short table at its end; on a pipe, plain lines now and then."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lapclip.errors import printable
from lapclip.runs.events import Continued, Evaluated, Event, Paused, Started, Step, Warned
from lapclip.units import duration, percent

SECONDS_BETWEEN_LINES = 10  # on a pipe


class Screen:
    """Shows events as they come. Only this class decides what a person sees of them."""

    def __init__(self, console: Console):
        self.console = console
        self.live = (
            Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        )
        self.last_line = 0.0
        self.speed = Average()
        self.loss = Average()
        self.accuracy = Average()
        self.chance = 0.0
        self.is_paused = False

    def __enter__(self) -> "Screen":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, event: Event) -> None:
        match event:
            case Started():
                self.chance = 1 / event.batch_size
                if event.step:
                    self.say(f"going on from step {event.step:,}, {duration(event.seconds)} of training")
            case Step():
                self.show_step(event)
            case Evaluated():
                words = event.recall["text_to_image"]
                self.say(
                    f"step {event.step:,}: recall@1 {words['recall@1']:.1%}, recall@10 {words['recall@10']:.1%}"
                    f" (chance {words['chance@1']:.1%}, {words['chance@10']:.1%})"
                    + (", best so far" if event.is_best else "")
                )
            case Warned():
                self.say(f"warning: {event.message}\nhint: {event.hint}")
            case Paused() if not self.is_paused:
                self.is_paused = True
                self.say(f"paused, with all saved: {event.reason}")
            case Continued():
                self.is_paused = False
                self.say(f"going on after {duration(event.paused_seconds)}")
            case _:
                pass  # the command line ends with a summary of its own

    def show_step(self, event: Step) -> None:
        self.speed.add(event.pairs_per_second)
        self.loss.add(event.loss)
        self.accuracy.add(event.accuracy)
        if event.num_different:  # equal captions are all right
            self.chance = 1 / event.num_different
        loss = self.loss.value
        line = (
            f"{event.progress:4.0%}  loss {loss:.{3 if loss < 10 else 1}f}"
            f"  acc {percent(self.accuracy.value)} (chance {percent(self.chance)})"
            f"  {self.speed.value:,.0f} pairs/s  tau {event.temperature:.3f}  {duration(event.seconds_left)} left"
        )
        if self.live:
            self.live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES or event.progress >= 1:
            self.last_line = time.monotonic()
            self.say(f"step {event.step:,}: {line.strip()}")

    def say(self, sentence: str) -> None:
        soft_wrap = not self.console.is_terminal
        self.console.print(printable(sentence), markup=False, highlight=False, soft_wrap=soft_wrap)


class Average:
    """A mean over about the last ten values, so that a person can read it."""

    def __init__(self) -> None:
        self.value: float = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, 10)


def recall_table(recall: Mapping[str, Any], images: str = "held-out images") -> Table:
    """Recall both ways with its intervals, as far as they were measured, beside chance."""
    table = Table(
        title=f"{recall['num_images']:,} {images}, {recall['num_captions']:,} captions",
        title_justify="left",
        box=box.SIMPLE,
    )
    for heading in ("", "recall@1", "@5", "@10", "median rank"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    chances = []
    for direction, words in (("text_to_image", "words -> image"), ("image_to_text", "image -> words")):
        found = recall[direction]
        shares = [f"{found[f'recall@{k}']:.1%}" for k in (1, 5, 10)]
        table.add_row(words, *shares, f"{found['median_rank']:g}")
        table.add_row("  95% sure", *(between(found.get(f"interval@{k}")) for k in (1, 5, 10)), style="dim")
        chances.append([f"{found[f'chance@{k}']:.1%}" for k in (1, 5, 10)])
    table.add_row("chance", *chances[0])
    if chances[1] != chances[0]:
        table.add_row("chance, -> words", *chances[1])
    if batches := recall.get("in_batch"):
        table.caption = (
            f"in batches of {batches['batch_size']}, {batches['accuracy']:.1%} are matched rightly"
            f" (chance {batches['chance']:.1%})"
        )
        table.caption_justify = "left"
    return table


def between(interval: Sequence[float] | None) -> str:
    return f"{percent(interval[0])} to {percent(interval[1])}" if interval else ""
