"""The numbers of a step, where its time and the memory go, what the machine does, and what was warned of."""

from collections.abc import Sequence

from lapclip.runs.events import Inspected
from lapclip.runs.history import Summary
from lapclip.units import milliseconds, size
from lapclip.view.braille import bar, bounds, columns, curve
from lapclip.view.panels_text import Line, beside, cut, padded, width_of, wrapped

NAME = 11  # columns for the name of a part or a kind of memory
MOST_POINTS = 200  # of a curve one line high
FULL = 0.9  # of the memory limit, from which it is worth a colour


def heading(title: str, width: int) -> Line:
    return [(title, "bold"), (" " + "─" * max(0, width - len(title) - 1), "dim")]


def speed_of(watched: Summary) -> str:
    share = watched.bench_share
    return f"{pairs_of(watched)} pairs/s" + (f", {share:.0%} of bench" if share is not None else "")


def pairs_of(watched: Summary) -> str:
    return f"{watched.history.recently('pairs_per_second') or 0:,.0f}"


def gradient_of(watched: Summary) -> str:
    return f"{watched.history.recently('grad_norm') or 0:.3g}"


def numbers(watched: Summary, width: int) -> Line:
    """Temperature, learning rate, gradient and speed, in one line."""
    step = watched.history.step
    if step is None:
        return []
    pieces = (
        f"tau {step.temperature:.4f}",
        f"lr {step.lr:.2e}",
        f"gradient norm {gradient_of(watched)}",
        speed_of(watched),
    )
    line: Line = [(piece, "") for piece in pieces]
    gap = min(6, max(2, (width - width_of(line)) // (len(line) - 1)))
    return cut([part for piece in line for part in (piece, (" " * gap, ""))][:-1], width)


def numbers_below(watched: Summary, width: int) -> list[Line]:
    """The same, one a line, each with its course."""
    now = watched.history.step
    if now is None:
        return []
    steps = watched.some_steps(MOST_POINTS)
    share = watched.bench_share
    speed = pairs_of(watched) + (f" ({share:.0%} of bench)" if share is not None else "")
    rows = [
        ("temperature tau", f"{now.temperature:.4f}", [step.temperature for step in steps]),
        ("learning rate", f"{now.lr:.2e}", [step.lr for step in steps]),
        ("gradient norm", gradient_of(watched), [step.grad_norm for step in steps]),
        ("pairs/s", speed, [step.pairs_per_second for step in steps]),
    ]
    lines: list[Line] = []
    for name, value, course in rows:
        line = padded([(f"{name:<16}", ""), (value, "bold")], 40)
        points = [(float(step.step), y) for step, y in zip(steps, course, strict=True)]
        dots = (
            curve(points, width - 40, 1, across=(0.0, float(now.step)), up=bounds(course))[0]
            if width > 50
            else ""
        )
        lines.append([*line, (dots, "accent")])
    return lines


def parts(watched: Summary, width: int, num_columns: int) -> list[Line]:
    """Where a step's time goes, a bar for each part."""
    seconds = watched.parts
    if seconds is None:
        return [cut([("a step's time by part: not measured yet", "dim")], width)]
    total = sum(seconds.values()) or 1.0
    cells = [(name, spent / total, f"{spent / total:.0%}") for name, spent in seconds.items()]
    return [heading(f"where a step's {milliseconds(total)} go", width), *grid(cells, width, num_columns, 4)]


def memory(watched: Summary, width: int, num_columns: int) -> list[Line]:
    """What holds the memory; the line of the heading is the peak against the limit."""
    seen = watched.history.inspected
    if seen is None:
        return [cut([("memory by kind: not measured yet", "dim")], width)]
    share = seen.memory_peak / seen.memory_limit if seen.memory_limit else 0.0
    title: Line = [
        ("memory", "bold"),
        (f" {size(seen.memory_used)}, peak {size(seen.memory_peak)} of {size(seen.memory_limit)} ", ""),
    ]
    full, rest = bar(share, max(0, width - width_of(title)))
    line: Line = [*title, (full, "warn" if share > FULL else "accent"), (rest, "dim")]
    return [cut(line, width), *grid(kinds(seen), width, num_columns, 7)]


def kinds(seen: Inspected) -> list[tuple[str, float | None, str]]:
    """Each kind with its share of what is in use; what is left is Python, torch and the like."""
    used = seen.memory_used or 1
    cells: list[tuple[str, float | None, str]] = [
        (kind, held / used, size(held)) if held is not None else (kind, None, "?")
        for kind, held in seen.memory.items()
    ]
    rest = used - sum(held for held in seen.memory.values() if held is not None)
    return [*cells, ("other", max(0, rest) / used, size(max(0, rest)))]


def grid(
    cells: Sequence[tuple[str, float | None, str]], width: int, num_columns: int, value_width: int
) -> list[Line]:
    """Named bars with their values, in rows of so many."""
    column = (width - 2 * (num_columns - 1)) // num_columns
    lines: list[Line] = []
    for name, share, value in cells:
        full, rest = bar(share or 0.0, max(0, column - NAME - 1 - value_width - 1))
        lines.append(
            [(f"{name:<{NAME}} ", ""), (full, "accent"), (rest, "dim"), (f" {value:>{value_width}}", "")]
        )
    rows = [lines[i : i + num_columns] for i in range(0, len(lines), num_columns)]
    return [
        beside([[line] for line in row] + [[]] * (num_columns - len(row)), [column] * num_columns)[0]
        for row in rows
    ]


def cores(watched: Summary, width: int) -> Line:
    """Each core's use: a column each, and the figures where there is room for them."""
    seen = watched.history.inspected
    shares = seen.readings.get("cores") if seen else None
    if not seen or not shares:
        return [("cores ", "bold"), ("not measured", "dim")]
    others = seen.readings.get("other_cores")
    line: Line = [("cores ", "bold"), (columns(shares), "accent")]
    end = f"  other programs use {others:.1f}" if others is not None else ""
    each = "  " + " ".join(f"{share:.0%}" for share in shares)
    if width_of(line) + len(each) + len(end) > width:
        each = f"  {len(shares)} cores, {sum(shares) / len(shares):.0%} on average"
    return cut([*line, (each, ""), (end, "dim")], width)


def machine_title(watched: Summary) -> str:
    seen = watched.history.inspected
    others = seen.readings.get("other_cores") if seen else None
    return "each core" + (f", other programs use {others:.1f}" if others is not None else "")


def cores_below(watched: Summary, width: int, most: int) -> list[Line]:
    """A bar for each core, two beside each other, if they fit into so many lines."""
    seen = watched.history.inspected
    shares = (seen.readings.get("cores") if seen else None) or []
    if not shares or len(shares) > 2 * most:
        return [cores(watched, width)]
    cells = [(f"core {number}", share, f"{share:.0%}") for number, share in enumerate(shares, 1)]
    return grid(cells, width, min(2, len(shares)), 4)


def sensors(watched: Summary, width: int) -> Line:
    """Temperature, power and battery as far as this machine tells them."""
    seen = watched.history.inspected
    readings = seen.readings if seen else {}
    known, missing = [], []
    for name, words in (
        ("temperature", "{:.0f} °C"),
        ("power_watts", "{:.1f} W"),
        ("battery", "battery {:.0f}%"),
    ):
        value = readings.get(name)
        if value is None:
            missing.append(name.removesuffix("_watts"))
        else:
            known.append(words.format(value))
    if "battery" in readings and "is_plugged" in readings:
        known.append("plugged in" if readings["is_plugged"] else "on battery")
    if (limit := readings.get("speed_limit")) is not None and limit < 1:
        known.append(f"slowed to {limit:.0%}")
    if readings.get("swap_used"):
        known.append(f"swap {size(readings['swap_used'])}")
    rest = f"not measured: {', '.join(missing)}" if missing else ""
    both = " · " if known and missing else ""
    return cut([("machine ", "bold"), (" · ".join(known), ""), (both + rest, "dim")], width)


def warnings(watched: Summary, width: int, most: int) -> list[Line]:
    """The last warnings in words, newest first, as many as fit into so many lines."""
    said = watched.history.warnings
    if not said or most < 3:
        return []
    lines: list[Line] = [
        heading("the last warning" if len(said) == 1 else f"warnings, {len(said)} so far", width)
    ]
    for warning in reversed(said):
        room = most - len(lines)
        if room < 2:
            break
        message = wrapped(warning.message, width, max(1, room - 1), "warn", f"step {warning.step:,}: ")
        hint = wrapped(warning.hint, width, room - len(message), "", "  hint: ")
        if len(lines) > 1 and len(message) + len(hint) > room - 1 and room < 4:
            break
        lines += [*message, *hint]
    return lines[:most]
