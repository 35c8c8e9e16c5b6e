"""`lapclip bench`: what this machine is, and how it trains fastest."""

import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from lapclip.cli.flags import AsJson, Switch, output_file, refuse_missing_data, with_settings
from lapclip.cli.screen import OPENING, follow, on_screen, print_json, say, stop_requests, working
from lapclip.config import SETTINGS, load_config
from lapclip.errors import UserError

STEP = (
    "size", "image_size", "patch_size", "text_length", "recompute", "batch_size", "chunk", "loss", "keep_patches",
)  # fmt: skip
PLAN = ("device", "precision", "threads", "compile", "keep_memory", "max_memory")
SWITCHES = ("recompute", "keep_memory")
ALWAYS = ("device", "max_memory")  # what `--ops` and `--sizes` use too


@with_settings("source", *STEP, *PLAN)
def bench(
    *,
    ops: Switch = False,
    sizes: Switch = False,
    fresh: Switch = False,
    out: Annotated[Path | None, Parameter(name=("--out", "--picture"))] = None,
    json: AsJson = False,
    flags: dict[str, Any],
) -> int:
    """Measure this machine: which device, precision, threads and chunk train a model fastest, and why.

    Times the training step with every execution plan that is possible here, for about a minute.
    `lapclip train` with the same source and flags uses the result.
    `--compile` also tries compilation, which takes some more minutes.

    Args:
        ops: time single operations by size instead, on each device
        sizes: train every size from nano to huge for a few steps instead
        fresh: ignore cached results and measure again
        out: also write a page with all results and charts (`.html`)
    """
    started = time.perf_counter()
    for flag in ("--ops",) * ops + ("--sizes",) * sizes:
        if other := next((SETTINGS[name].flag for name in flags if name not in ALWAYS), None):
            raise UserError(f"`{flag}` does not use `{other}`", hint=f"omit `{other}`")
    config = load_config(flags={name: value for name, value in flags.items() if name != "compile"})
    refuse_missing_data(config)
    out = output_file(out, ".html") if out else None
    with working("starting"):
        from lapclip.autotune.resolve import devices_for
        from lapclip.bench.show import ops_section, sizes_section, steps_section, write_page
        from lapclip.bench.steps import in_words, look_over
        from lapclip.train.prepare import open_here

    devices_for(config)  # one asked for by name must be there
    compile = bool(flags.get("compile"))
    works = [ops_section(config, fresh=fresh)] * ops + [sizes_section(config, fresh=fresh)] * sizes
    with stop_requests("stopping; completed measurements are kept") as requests:
        if not works:
            data = follow(open_here(config), requests, OPENING, is_kept=True)
            works = [steps_section(config, data, as_command(flags), compile=compile, fresh=fresh)]
        overview = follow(look_over(fresh=fresh), requests, "measuring")
        results = [follow(work, requests, "measuring") for work in works]
    facts = in_words(overview)
    if out is not None:
        write_page(out, results, facts)
    if json:
        rates = {**overview.rates["cpu"], "rates": overview.rates}
        measured = {name: value for result in results for name, value in result.json.items()}
        seconds = time.perf_counter() - started
        print_json({"machine": overview.machine, **rates, **measured, "seconds": seconds})
        return 0
    screen = Console()
    screen.print(*facts, sep="\n", highlight=False, markup=False)
    for table in (table for result in results for table in result.section.tables):
        screen.print()
        screen.print(on_screen(table), highlight=False)
    remarks = [remark for result in results for remark in result.section.points]
    screen.print("", *remarks, sep="\n", highlight=False, markup=False)
    if out is not None:
        say(f"results: {out}")
    return 0


def as_command(flags: dict[str, Any]) -> str:
    """The training that was measured, as one would type it."""
    named = [name for name in (*STEP, *PLAN) if name in flags and name not in (*SWITCHES, "compile")]
    said = [f"{SETTINGS[name].flag} {flags[name]}" for name in named]
    given = [name for name in SWITCHES if name in flags]
    said += [f"--{'' if flags[name] else 'no-'}{name.replace('_', '-')}" for name in given]
    return " ".join(["lapclip train", *([flags["source"]] if "source" in flags else []), *said])
