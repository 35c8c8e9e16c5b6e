"""`lapclip bench`: what this machine is, and how it trains fastest."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lapclip.cli.flags import AsJson, with_settings
from lapclip.cli.screen import OPENING, follow, people, print_json, stop_requests, working
from lapclip.config import SETTINGS, load_config
from lapclip.errors import UserError

if TYPE_CHECKING:
    from lapclip.bench.page import Table

NUMBER = re.compile(r"|-|[~±]?[\d,.]+ ?(%|x|M|B|k|GB|us|ms|s|min|h|d)?")
STEP = (
    "size",
    "image_size",
    "patch_size",
    "text_length",
    "recompute",
    "batch_size",
    "chunk",
    "loss",
    "keep_patches",
)
PLAN = ("device", "precision", "threads", "compile", "keep_memory", "max_memory")
SWITCHES = ("recompute", "keep_memory")
OF_ALL = ("device", "max_memory")  # what `--ops` and `--sizes` go by


@with_settings("source", *STEP, *PLAN)
def bench(
    *,
    ops: Annotated[
        bool, Parameter(help="time single operations by size instead, on each device", negative="")
    ] = False,
    sizes: Annotated[
        bool, Parameter(help="train every size from nano to huge for a few steps instead", negative="")
    ] = False,
    fresh: Annotated[bool, Parameter(help="measure again what was measured before", negative="")] = False,
    out: Annotated[
        Path | None,
        Parameter(
            name=("--out", "--picture"),
            help="also write a chart, `.png` or `.svg`, or a page with everything, `.html`",
        ),
    ] = None,
    json: AsJson = False,
    flags: dict[str, Any],
) -> int:
    """Measure this machine: which device, precision, threads and chunk train a model fastest, and why.

    Runs the real training step of a model on a source (drawn images, if none is named) in every way that is possible
    here, in turns, for a minute or so. What is found is kept, and `lapclip train` with the same source and flags uses
    it. `--compile` also tries compilation, which takes some minutes more.
    """
    started = time.perf_counter()
    for flag in ("--ops",) * ops + ("--sizes",) * sizes:
        if other := next((SETTINGS[name].flag for name in flags if name not in OF_ALL), None):
            raise UserError(f"`{flag}` does not go by `{other}`", hint=f"leave `{other}` away")
    config = load_config(flags={name: value for name, value in flags.items() if name != "compile"})
    if out is not None:
        from lapclip.bench.page import check_image

        check_image(out, max(1, ops + sizes))
    with working("starting"):
        from lapclip.autotune.quick import devices_for
        from lapclip.bench.overview import in_words, look_over
        from lapclip.bench.page import write_image
        from lapclip.bench.sections import ops_section, sizes_section, steps_section
        from lapclip.train.prepare import open_here

    devices_for(config.device)  # one asked for by name must be there
    compile = bool(flags.get("compile"))
    wanted = [ops_section(config, fresh=fresh)] * ops + [sizes_section(config, fresh=fresh)] * sizes
    with stop_requests("stopping; what is measured to its end is kept") as requests:
        if not wanted:
            data = follow(open_here(config), requests, OPENING, is_kept=True)
            command = as_command(flags)
            wanted = [steps_section(config, data, command, compile=compile, fresh=fresh)]
        overview = follow(look_over(fresh=fresh), requests, "measuring")
        sections = [follow(work, requests, "measuring") for work in wanted]
    tables = [table for section in sections for table in section.tables]
    if out is not None:
        figures = [section.draw() for section in sections]
        write_image(out, figures, title="lapclip bench", tables=tables)
    if json:
        measured = {name: value for section in sections for name, value in section.json.items()}
        seconds = time.perf_counter() - started
        print_json(
            {"machine": overview.machine, **overview.rates["cpu"], "rates": overview.rates}
            | measured
            | {"seconds": seconds}
        )
        return 0
    screen = Console()
    remarks = [remark for section in sections for remark in section.remarks]
    for line in in_words(overview):
        screen.print(line, highlight=False, markup=False)
    for table in tables:
        screen.print()
        screen.print(on_screen(table), highlight=False)
    screen.print("", *remarks, sep="\n", highlight=False, markup=False)
    if out is not None:
        people.print(f"image: {out}", highlight=False, soft_wrap=True)
    return 0


def as_command(flags: dict[str, Any]) -> str:
    """The training that was measured, as one would type it."""
    said = [
        f"{SETTINGS[name].flag} {flags[name]}"
        for name in (*STEP, *PLAN)
        if name in flags and name not in (*SWITCHES, "compile")
    ]
    said += [
        f"--{'' if flags[name] else 'no-'}{name.replace('_', '-')}" for name in SWITCHES if name in flags
    ]
    return " ".join(["lapclip train", *([flags["source"]] if "source" in flags else []), *said])


def on_screen(table: "Table") -> RichTable:
    shown = RichTable(title=Text(table.caption), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name, column in zip(table.header, zip(*table.rows, strict=True), strict=True):
        is_numbers = all(NUMBER.fullmatch(cell) for cell in column)
        shown.add_column(Text(name), justify="right" if is_numbers else "left")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown
