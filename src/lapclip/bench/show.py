"""What `lapclip bench` measured, ready to be shown: for programs, as tables, and as an image or a page."""

import base64
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from lapclip.autotune.cache import folder_for, load, store
from lapclip.autotune.plans import Measured, remark_on
from lapclip.autotune.resolve import devices_for
from lapclip.bench.figures import DOTS_PER_INCH, PAPER, draw_ops, draw_sizes, draw_steps, drawing
from lapclip.bench.ops import OpTiming, crossovers, time_ops
from lapclip.bench.sizes import EPOCH_PAIRS, SizeResult, predicted_speed_up, speed_up, study_sizes
from lapclip.bench.steps import MAX_DRIFT, StepsResult, as_json, bench_steps
from lapclip.config import Config
from lapclip.data.open import Data
from lapclip.errors import UserError, one_line
from lapclip.files import write_atomically
from lapclip.machine.device import Device, default_threads, processor, set_up_process
from lapclip.machine.hardware import Machine, read_machine
from lapclip.units import age, duration, rate, short_count, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".html")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
body { max-width: 1200px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; }
img { max-width: 100%; }
.wide { overflow-x: auto; margin: 1.5rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 1rem 0.3rem 0; border-bottom: 1px solid #ddd; }
.number { text-align: right; }
"""


@dataclass(frozen=True)
class Table:
    """Rows as people read them; `numbers` names the columns that are aligned at their right."""

    caption: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Section:
    """One measurement, in every form it is shown in."""

    json: dict[str, Any]
    tables: list[Table]
    remarks: list[str]
    draw: "Callable[[], Figure]"


Work = Generator[str, None, Section]


def steps_section(config: Config, data: Data, command: str, *, compile: bool, fresh: bool) -> Work:
    """Execution plans of the run that `command` would train."""
    result = yield from bench_steps(config, data, compile=compile, fresh=fresh)
    rated = f", at about {rate(result.predicted)} pairs/s including its images" if result.predicted else ""
    remarks = [
        f"`{command}` trains this way{rated}",
        measured_ago(result.measured.when),
        *compile_remarks(result.measured),
    ]
    if abs(drift := result.measured.drift) >= MAX_DRIFT:
        became = f"{abs(drift):.0%} " + (
            "faster, so it was busy before" if drift < 0 else "slower: busy or hot"
        )
        remarks.append(f"the machine became {became}; `--fresh` measures again")
    title = f"{config.model.size}, batches of {result.resolved.train.batch_size}"
    return Section(
        as_json(result),
        [steps_table(result), reasons_table(result)],
        remarks,
        lambda: draw_steps(result.measured, result.choice.plan, title),
    )


def measured_ago(when: float) -> str:
    return f"measured {age(time.time() - when)}; `--fresh` measures again"


def compile_remarks(measured: Measured) -> Iterator[str]:
    """When compiling pays, for each plan that was tried compiled."""
    rates = {candidate.plan: candidate.pairs_per_second for candidate in measured.candidates}
    for candidate in measured.candidates:
        plain = rates.get(replace(candidate.plan, compile=False))
        speed, first = candidate.pairs_per_second, candidate.first_call_seconds
        if not candidate.plan.compile or not plain or not speed or not first:
            continue
        gain = speed / plain - 1
        takes = f"compiling takes {first:.0f} s and gains"
        if gain <= 0:
            yield f"{takes} nothing on {candidate.plan.device}"
        else:
            yield (
                f"{takes} {gain:.0%} on {candidate.plan.device}: it pays in runs of more than"
                f" {first * (1 + gain) / gain / 60:.0f} minutes, and `lapclip train` then compiles"
            )


def steps_table(result: StepsResult) -> Table:
    rows: list[tuple[str, ...]] = []
    for candidate in sorted(result.measured.candidates, key=lambda c: -(c.pairs_per_second or 0)):
        plan = candidate.plan
        spread = f"±{candidate.spread:.0%}" if candidate.spread is not None else ""
        remarks = ["chosen"] * (plan == result.choice.plan) + ["compiled"] * plan.compile
        remarks += ["memory given back"] * (not plan.keep_memory)
        remarks += [remark] if (remark := remark_on(candidate, result.measured)) else []
        speed = rate(candidate.pairs_per_second)
        settings = (plan.device, plan.precision, str(plan.threads), str(plan.chunk))
        rows.append((*settings, speed, spread, "; ".join(remarks)))
    model, batch = f"`{result.resolved.model.size}`", result.resolved.train.batch_size
    header = ("device", "precision", "threads", "chunk", "pairs/s", "spread", "remark")
    caption = f"{model}, {result.num_parameters:,} parameters, batches of {batch}"
    return Table(caption, header, rows, frozenset(("threads", "chunk", "pairs/s", "spread")))


def reasons_table(result: StepsResult) -> Table:
    values = {part: getattr(result.choice.plan, part) for part in result.reasons}
    rows: list[tuple[str, ...]] = [
        (part, ("no", "yes")[value] if isinstance(value, bool) else str(value), result.reasons[part])
        for part, value in values.items()
    ]
    return Table("what training will use", ("setting", "value", "why"), rows)


@dataclass(frozen=True)
class KnownOps:
    """What the cache keeps of single operations."""

    when: float
    ops: list[OpTiming]


def ops_section(config: Config, *, fresh: bool) -> Work:
    """Single operations."""
    devices = with_processor(devices_for(config.device))
    file = folder_for(read_machine(), {"ops": [device.name for device in devices]}) / "ops.json"
    known = None if fresh else load(file, KnownOps)
    timings = known.ops if known else []
    when = known.when if known else time.time()
    if not timings:
        set_up_process(
            default_threads()
        )  # as in training: an allocator that frees memory triples large copies
        for timing in time_ops(devices):
            yield f"{timing.op} of {timing.size} on {timing.device}"
            timings.append(timing)
        store(file, {"ops": [asdict(timing) for timing in timings]})
    found = crossovers(timings)
    remarks = [
        f"{op}: {device} is "
        + (
            "never faster than the CPU, up to the largest size"
            if n is None
            else f"faster than the CPU from size {n} on"
        )
        for device, sizes in found.items()
        for op, n in sizes.items()
    ] or ["no accelerator was timed that could overtake the CPU"]
    remarks.append(
        "size n is n x n numbers, or n tokens; the first call is what it takes more than the others; launch is what"
        " handing over takes, on the CPU the time of the smallest call"
    )
    remarks.append(measured_ago(when))
    rows = [asdict(timing) for timing in timings]
    return Section(
        {"ops": rows, "crossovers": found}, [ops_table(timings)], remarks, lambda: draw_ops(timings)
    )


def with_processor(devices: list[Device]) -> list[Device]:
    """What there is to compare with comes first."""
    return [processor(), *(device for device in devices if device != processor())]


def ops_table(timings: Sequence[OpTiming]) -> Table:
    header = ("op", "size", "device", "a call", "allocate", "first call", "launch", "compute", "sync")
    names = (
        "seconds",
        *(f"{part}_seconds" for part in ("allocate", "first_call", "launch", "compute", "synchronise")),
    )
    rows = [(t.op, str(t.size), t.device, *(duration(getattr(t, name)) for name in names)) for t in timings]
    return Table("operations, timed in blocks", header, rows, frozenset(("size", *header[3:])))


def sizes_section(config: Config, *, fresh: bool) -> Work:
    """All sizes."""
    devices = with_processor(devices_for(config.device))
    results = yield from study_sizes(devices, fresh=fresh, max_memory=config.device.max_memory)
    ratios = {id(r): speed_up(results, r) for r in results}
    faster = [f"`{r.size}`" for r in results if (ratios[id(r)] or 0) > 1]
    if not any(ratios.values()):
        remark = "no accelerator was timed: only the prediction is shown"
    elif faster:
        remark = f"an accelerator is faster than the CPU for {', '.join(faster)}"
    else:
        remark = "no accelerator is faster than the CPU at any size"
    rows = [
        asdict(r) | {"predicted_speed_up": predicted_speed_up(r.num_parameters), "speed_up": ratios[id(r)]}
        for r in results
    ]
    columns = "speed-up of an accelerator over the CPU: predicted in the documents, and measured"
    return Section({"sizes": rows}, [sizes_table(results)], [columns, remark], lambda: draw_sizes(results))


def sizes_table(results: Sequence[SizeResult]) -> Table:
    rows: list[tuple[str, ...]] = []
    for r in results:
        about = "~" if r.is_estimate else ""
        measured = speed_up(results, r)
        numbers = f"{r.pairs_per_second:,.{0 if r.pairs_per_second >= 100 else 2}f}", size(r.memory_bytes)
        speed, memory, epoch = (about + text for text in (*numbers, duration(r.epoch_seconds)))
        ratios = f"{predicted_speed_up(r.num_parameters):g}x", f"{measured:.2f}x" if measured else "-"
        shape = (r.size, short_count(r.num_parameters), r.device, str(r.batch_size))
        rows.append((*shape, speed, memory, epoch, *ratios))
    header = ("size", "params", "device", "batch", "pairs/s", "memory", "epoch", "predicted", "measured")
    caption = f"sizes, looking at whole images; an epoch is {EPOCH_PAIRS:,} pairs; ~ is an estimate"
    return Table(caption, header, rows, frozenset(header) - {"size", "device"})


def check_out(path: Path) -> None:
    """Refuses, before anything is measured, a file that could not be written afterwards."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"`{path}` does not end in {' or '.join(f'`{suffix}`' for suffix in SUFFIXES)}",
            hint=f"name it `{path.with_suffix('.html') if path.name else 'bench.html'}`",
        )
    if path.is_dir():
        raise UserError(f"`{path}` is a folder", hint="name a file that does not exist yet")
    if not path.parent.is_dir():
        message = f"there is no folder `{path.parent}` to write `{path.name}` to"
        raise UserError(message, hint="make the folder first")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write `{path}`: permission denied", hint="choose a folder you may write to")
    with drawing():
        pass


def write_out(path: Path, sections: Sequence[Section], *, title: str = "lapclip bench") -> None:
    """Writes the charts, and in a page the tables too, in the format of the path's suffix."""
    check_out(path)
    images = [render(section.draw()) for section in sections]
    if path.suffix.lower() == ".png":
        write_atomically(path, as_png(stacked(images)))
    else:
        tables = [table for section in sections for table in section.tables]
        write_atomically(path, as_page(title, images, [*tables, facts(read_machine())]))


def render(figure: "Figure") -> Image.Image:
    file = BytesIO()
    with drawing():
        figure.savefig(file, format="png", dpi=DOTS_PER_INCH)
    return Image.open(file).convert("RGB")


def stacked(images: Sequence[Image.Image]) -> Image.Image:
    """Images below one another, as wide as the widest."""
    sheet = Image.new("RGB", (max(i.width for i in images), sum(i.height for i in images)), PAPER)
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    return sheet


def as_png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def as_page(title: str, images: Sequence[Image.Image], tables: Sequence[Table]) -> str:
    """One page of HTML: no script, and nothing that a browser would have to fetch."""
    pngs = (base64.b64encode(as_png(image)).decode() for image in images)
    charts = [
        f'<p><img alt="chart of the tables below" src="data:image/png;base64,{png}"></p>' for png in pngs
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{shown(title)}</title><style>{STYLE}</style>"
    )
    body = [f"<h1>{shown(title)}</h1>", *charts, *map(as_html, tables)]
    return "\n".join(
        ['<!DOCTYPE html>\n<html lang="en">', f"<head>{head}</head><body>", *body, "</body></html>\n"]
    )


def as_html(table: Table) -> str:
    kinds = [' class="number"' if name in table.numbers else "" for name in table.header]

    def row(cells: Sequence[str], tag: str) -> str:
        inner = (f"<{tag}{kind}>{shown(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    rows = "\n".join(row(cells, "td") for cells in table.rows)
    caption = f"<caption>{shown(table.caption)}</caption><thead>{row(table.header, 'th')}</thead>"
    return f'<div class="wide"><table>{caption}\n<tbody>{rows}</tbody></table></div>'


def facts(machine: Machine) -> Table:
    rows = [
        ("chip", machine.chip),
        ("cores used", str(machine.num_cores)),
        ("memory", f"{size(machine.memory_bytes)}, {size(machine.available_bytes)} of it free"),
        ("system", machine.system),
        ("Python", machine.python),
    ]
    return Table("The machine", ("fact", "value"), rows)


def shown(text: str) -> str:
    return escape(one_line(text))
