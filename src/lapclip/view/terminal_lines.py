"""A run in plain lines, for a pipe or a log: how it stands, then what happens, until it ends."""

import math
import sys
import time

from lapclip.errors import printable
from lapclip.runs.events import Continued, Evaluated, Event, Paused, Started, Step, Warned
from lapclip.runs.history import Summary
from lapclip.units import duration, percent
from lapclip.view.lines import SECONDS_BETWEEN_LINES
from lapclip.view.panels_machine import speed_of
from lapclip.view.panels_text import plain

SECONDS_BETWEEN_LOOKS = 2.0


def follow_in_lines(watched: Summary) -> int:
    """One line to begin with, then lines as things happen; 0 when the run ends."""
    watched.read()
    say(opening(watched))
    last_line = time.monotonic() if watched.history.step else -math.inf
    if watched.is_over and watched.history.evaluated:
        say(sentence(watched.history.evaluated))
    while not watched.is_over:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        for event in watched.read()[0]:
            if isinstance(event, Step):
                is_due = time.monotonic() - last_line >= SECONDS_BETWEEN_LINES
                if is_due and event is watched.history.step:
                    last_line = time.monotonic()
                    say(progress(watched, event))
            elif line := sentence(event):
                say(line)
    say(ending(watched))
    return 0


def say(line: str) -> None:
    sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()


def opening(watched: Summary) -> str:
    state = watched.state_words
    step = watched.history.step
    return f"run {watched.run.reference}: {state}" + (f", {progress(watched, step)}" if step else "")


def progress(watched: Summary, step: Step) -> str:
    chance = f" (chance {percent(watched.chance)})" if watched.chance is not None else ""
    left = f", {duration(step.seconds_left)} left" if not watched.is_over else ""
    return (
        f"step {step.step:,}: {watched.progress:.0%}, loss {watched.history.recently('loss'):.3f},"
        f" accuracy {percent(watched.history.recently('accuracy') or 0)}{chance}, tau {step.temperature:.3f},"
        f" {speed_of(watched)}{left}"
    )


def sentence(event: Event) -> str:
    """What happened, in one line; nothing for what is not worth one."""
    match event:
        case Started():
            return f"step {event.step:,}: training begins" + (" again" if event.step else "")
        case Evaluated():
            found = event.recall["text_to_image"]
            return (
                f"step {event.step:,}: recall@1 {percent(found['recall@1'])} (chance {percent(found['chance@1'])}),"
                f" recall@10 {percent(found['recall@10'])} (chance {percent(found['chance@10'])})"
                + (", best so far" if event.is_best else "")
            )
        case Warned():
            return f"step {event.step:,}: warning: {plain(event.message)}; hint: {plain(event.hint)}"
        case Paused():
            return f"step {event.step:,}: paused: {plain(event.reason)}"
        case Continued():
            return f"step {event.step:,}: training goes on"
    return ""


def ending(watched: Summary) -> str:
    """The last line: how the run ended, and how to go on with it."""
    history, name = watched.history, watched.run.reference
    match watched.state:
        case "finished" if history.finished:
            end = history.finished
            return f"finished: {end.step:,} steps, {end.num_pairs_seen:,} pairs in {duration(end.seconds)}"
        case "failed" if failed := watched.failed:
            return f"failed: {plain(failed.message)}; hint: {plain(failed.hint)}"
        case "crashed":
            return f"crashed: its process is gone; go on with `lapclip train --resume {name}`"
    return f"{watched.state}; go on with `lapclip train --resume {name}`"
