"""What a run looks like in so many columns and rows: from what is known of it to lines of text.

In 80x24 everything stands in one column; with more room the curves grow, and what the machine does stands beside them.
"""

from lapclip.runs.history import Summary
from lapclip.units import duration
from lapclip.view.braille import bar
from lapclip.view.panels_curves import curves, titles
from lapclip.view.panels_machine import (
    cores,
    cores_below,
    heading,
    machine_title,
    memory,
    numbers,
    numbers_below,
    parts,
    sensors,
    warnings,
)
from lapclip.view.panels_text import Line, beside, cut, plain, spread, wrapped

WIDE = 150  # columns from which the machine stands beside the curves
TALL = 30  # rows, likewise
HIGHEST = 14  # rows of a curve, more of them say nothing more
STATE_STYLES = {"running": "good", "finished": "good", "paused": "warn", "stopped": "warn"}
LEAVING = "q leaves this view; training goes on"


def view(watched: Summary, width: int, height: int, *, is_live: bool = True) -> list[Line]:
    """The whole view: no line wider, and no more lines, than asked; the last line says how to leave."""
    inside = width - 1  # from the left edge
    top = header(watched, inside)
    footer: list[Line] = [[(LEAVING, "dim")]] if is_live and not watched.is_over else []
    room = height - len(top) - len(footer)
    if watched.history.step is None and watched.history.evaluated is None:
        middle: list[Line] = warnings(watched, inside, room)
    else:
        arranged = wide if width >= WIDE and height >= TALL else narrow
        middle = arranged(watched, inside, room)
    lines = [*top, *middle][: height - len(footer)]
    if is_live:
        lines += [[]] * (height - len(footer) - len(lines))  # so that the last line stays where it is
    return [cut([(" ", ""), *line], width) for line in [*lines, *footer]]


def narrow(watched: Summary, width: int, room: int) -> list[Line]:
    """All in one column; what is left over goes to the curves, then to air and to earlier warnings."""
    below = [numbers(watched, width), *parts(watched, width, 3), *memory(watched, width, 3)]
    below += [cores(watched, width), sensors(watched, width)]
    least = 2 * 3  # two rows of curves, each with a title
    said = warnings(watched, width, max(3, min(room - len(below) - least, 5)))
    if room < len(below) + len(said) + least:  # a small window: the numbers first
        below = [numbers(watched, width), cores(watched, width), sensors(watched, width)]
        said = warnings(watched, width, 3)
    height = min(HIGHEST, (room - len(below) - len(said)) // 2 - 1)
    rows = curves(watched, width, height) if height > 0 else titles(watched, width)
    left = room - len(rows) - len(below) - len(said)
    if left > 1:
        said = warnings(watched, width, len(said) + left - 1)
    air: list[Line] = [[]] if len(rows) + len(below) + len(said) < room else []
    return [*rows, *air, *below, *said]


def wide(watched: Summary, width: int, room: int) -> list[Line]:
    """Curves on the left, the machine on the right, the warnings below."""
    right_width = min(76, width * 2 // 5)
    left_width = width - right_width - 3
    right: list[Line] = [
        *numbers_below(watched, right_width), [],
        *parts(watched, right_width, 1), [],
        *memory(watched, right_width, 1), [],
        heading(machine_title(watched), right_width), *cores_below(watched, right_width, 6),
        sensors(watched, right_width),
    ]  # fmt: skip
    said = warnings(watched, width, max(3, room - len(right) - 2))
    height = min(HIGHEST + 10, (room - len(said) - 2) // 2 - 2)
    rows = beside([curves(watched, left_width, height, with_steps=True), right], [left_width, right_width], 3)
    if len(rows) > room:
        return rows[:room]
    return [[], *rows, [], *said][: max(room, len(rows))]


def header(watched: Summary, width: int) -> list[Line]:
    """The name and how the run is, how far, and what it is."""
    started, step = watched.history.started, watched.history.step
    state = watched.state_words
    name: Line = [
        (plain(watched.run.name), "bold"), ("  ", ""), (state, STATE_STYLES.get(watched.state, "bad")),
    ]  # fmt: skip
    what = ""
    if started is not None:
        million = started.num_parameters / 1e6
        what = f"{million:.{1 if million < 100 else 0}f}M parameters, {started.device}, batch {started.batch_size}"
    lines = [spread(name, [(what, "dim")], width)]
    left = watched.seconds_left
    end = f" {watched.progress:4.0%}  " + (f"{duration(left)} left" if left is not None else "")
    if watched.is_over:
        end = f" {watched.progress:4.0%}"
    full, rest = bar(watched.progress, max(0, width - max(len(end), 16)))
    lines.append([(full, "accent"), (rest, "dim"), (end, "")])
    if step is not None and started is not None:
        budget = f" of {started.total_steps:,}" if started.total_steps else ""
        trained = duration(step.seconds) + (f" of {started.minutes:g} min" if started.minutes else "")
        lines.append(
            cut(
                [(f"step {step.step:,}{budget} · epoch {step.epoch:.2f} · {trained} of training", "dim")],
                width,
            )
        )
    return [*lines, *what_now(watched, width)]


def what_now(watched: Summary, width: int) -> list[Line]:
    """What a person should know of a run that is not simply running, and what to type."""
    name, history = watched.run.reference, watched.history
    if watched.state == "paused" and history.paused is not None:
        return wrapped(history.paused.reason, width, 2, "warn", "paused: ")
    if watched.state == "failed" and watched.failed is not None:
        return [
            *wrapped(watched.failed.message, width, 3, "bad", "failed: "),
            *wrapped(watched.failed.hint, width, 2, "", "hint: "),
        ]
    if watched.state == "crashed":
        return wrapped(f"its process is gone; go on with `lapclip train --resume {name}`", width, 2, "bad")
    if watched.state == "stopped":
        what = "stopped and saved" if history.finished else "set up, but not trained yet"
        return wrapped(f"{what}; go on with `lapclip train --resume {name}`", width, 2)
    if watched.state == "finished":
        return wrapped(f"its budget is used up; look closer with `lapclip eval {name}`", width, 2)
    if watched.is_preparing:
        return wrapped("it is being set up; what is shown here is from before, if anything", width, 2)
    return wrapped("no step is done yet", width, 1) if history.step is None else []
