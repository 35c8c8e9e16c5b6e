"""`lapclip data`: the doctor, the pack, a contact sheet, and the packs in the cache."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App
from rich.console import Console

from lapclip.cli.flags import AsJson, Switch, with_settings
from lapclip.cli.screen import OPENING, follow, people, print_json, print_table, stop_requests, working
from lapclip.config import load_config
from lapclip.errors import UserError, suggest
from lapclip.units import plural, size

if TYPE_CHECKING:
    from lapclip.config import Config
    from lapclip.data.doctor import Report
    from lapclip.data.open import Data

data = App(name="data", help="Look at a source before training, and prepare it.")
HOW_TO_READ = ("format", "images", "image_column", "caption_column", "validation_share")
SIZES = ("size", "image_size", "workers")


def open_for(flags: dict[str, Any]) -> "tuple[Config, Data]":
    """The data that flags name, packed."""
    if "source" not in flags:
        hint = "`lapclip data check photos/`, or a table, shards, `hf:NAME`, `emoji`"
        raise UserError("name a source", hint=hint)
    config = load_config(flags=flags)
    with working("starting"):
        from lapclip.data.open import open_source
        from lapclip.model.clip import shape_of
    with stop_requests("stopping; what is packed already is kept") as requests:
        opening = open_source(config.data, shape_of(config.model).image_size)
        return config, follow(opening, requests, OPENING, is_kept=True)


@data.command
@with_settings("source", *HOW_TO_READ, *SIZES, "tokenizer", "max_vocab", "text_length")
def check(*, json: AsJson = False, flags: dict[str, Any]) -> int:
    """Examine a source: what it holds, what is unreadable, duplicated or leaking, and what to do about it.

    Decodes every image and packs them at the same time, so that training starts immediately.
    """
    config, opened = open_for({**flags, "pack": True})
    with working("examining"):
        from lapclip.train.checkup import check_up

        reports = [
            (part.name, part.files.catalogue.format, check_up(config, part))
            for part in opened.parts
            if part.files
        ]
    if not reports:
        raise UserError(
            f"`{config.data.source}` is drawn by lapclip itself; there is nothing to examine",
            hint="`lapclip data show synthetic` shows what it looks like",
        )
    if json:
        results = [{"source": name, "format": form} | report.as_json() for name, form, report in reports]
        print_json(results[0] if len(results) == 1 else {"sources": results})
    else:
        for name, form, report in reports:
            show_report(f"{name} (read as `{form}`)", report)
    return 0


def show_report(name: str, report: "Report") -> None:
    from rich.table import Table

    from lapclip.data.doctor import lines

    out = Console(highlight=False, markup=False)
    out.print(name, style="bold", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for label, sentence in lines(report):
        table.add_row(label, sentence)
    out.print(table)
    if any(advice.setting for advice in report.advice):
        out.print("settings that training will use by default:")
    for advice in sorted(report.advice, key=lambda advice: advice.setting is None):
        out.print(f"- {advice.sentence}")


@data.command
@with_settings("source", *HOW_TO_READ, *SIZES)
def pack(*, json: AsJson = False, flags: dict[str, Any]) -> int:
    """Decode and resize every image once, into a copy that training reads without waiting.

    Training does this by itself; call it beforehand, or again after the source has changed: only what is new is done.
    """
    started = time.perf_counter()
    config, opened = open_for({**flags, "pack": True})
    seconds = time.perf_counter() - started
    packed = [part.files.pack for part in opened.parts if part.files]
    if not packed:
        problem = f"`{config.data.source}` is drawn as it is needed, and never packed"
        raise UserError(problem, hint="train on it: `lapclip train`")
    from lapclip.data.pack import folder_bytes

    results: list[dict[str, Any]] = [
        {
            "path": str(one.path),
            "num_images": int((one.records["row"] >= 0).sum()),
            "num_reused": one.num_reused,
            "num_unreadable": len(one.unreadable),
            "image_size": one.size,
            "bytes": folder_bytes(one.path),
            "seconds": seconds,
        }
        for one in packed
    ]
    if json:
        print_json(results[0] if len(results) == 1 else {"packs": results})
        return 0
    for result in results:
        people.print(
            f"{result['num_images']:,} images of {result['image_size']} x {result['image_size']} pixels, "
            f"{result['num_reused']:,} of them packed before, {result['num_unreadable']:,} unreadable: "
            f"{size(result['bytes'])}, {seconds:.1f} s",
            highlight=False,
        )
        Console().print(result["path"], highlight=False, soft_wrap=True)
    return 0


@data.command
@with_settings("source", *HOW_TO_READ, *SIZES)
def show(
    *,
    out: Path = Path("lapclip-sheet.png"),
    count: int = 24,
    json: AsJson = False,
    flags: dict[str, Any],
) -> int:
    """Draw a contact sheet: some images from all over the source, with their captions.

    Args:
        out: file that the sheet is written to
        count: number of images
    """
    if not 1 <= count <= 1000:
        raise UserError(f"`--count` is {count}", hint="a sheet holds 1 to 1000 images")
    out = out.expanduser()
    if out.suffix.lower() != ".png":
        raise UserError(f"`--out` is `{out}`", hint="the sheet is a PNG: name it, for example, `sheet.png`")
    _, opened = open_for(flags)
    import numpy as np

    from lapclip.data.decode import Unreadable
    from lapclip.view.sheet import draw_sheet

    training = opened.training
    chosen = np.unique(np.linspace(0, training.num_different - 1, count).astype(int)).tolist()
    rows = []
    for i in chosen:
        with suppress(Unreadable):  # of a streamed source; `check` names it
            rows.append((training.image(i, 128), list(training.captions(i)), training.name(i)))
    draw_sheet(out, rows)
    if json:
        print_json({"path": str(out), "num_images": len(rows)})
    else:
        people.print(f"{len(rows)} of {training.num_different:,} pairs", highlight=False)
        Console().print(str(out), highlight=False, soft_wrap=True)
    return 0


@data.command(name=("remove", "clean"))
def remove(*names: str, all: Switch = False, json: AsJson = False) -> int:
    """List the packs in the cache with their sizes, or remove some. They can always be made again.

    Args:
        names: packs to remove, by name or by their source
        all: remove every pack
    """
    from lapclip.data.pack import list_packs, remove_pack

    known = list_packs()
    asked = {name: {name, os.path.abspath(name)} for name in names}
    for name, forms in asked.items():
        if not any(forms & {pack.path.name, pack.source} for pack in known):
            like = suggest(name, [pack.path.name for pack in known])
            raise UserError(f"there is no pack `{name}`{like}", hint="`lapclip data remove` lists them")
    every = set().union(*asked.values())
    chosen = known if all else [pack for pack in known if every & {pack.path.name, pack.source}]
    for pack in chosen:
        remove_pack(pack)
    shown = chosen if names or all else known
    if json:
        packs = [
            {"name": p.path.name, "source": p.source, "bytes": p.num_bytes, "removed": p in chosen}
            for p in shown
        ]
        print_json({"packs": packs, "bytes": sum(p.num_bytes for p in shown)})
        return 0
    from lapclip.view.document import Table, columns_of

    rows = [
        (p.path.name, p.source, p.num_bytes, time.strftime("%Y-%m-%d", time.localtime(p.last_used)))
        for p in shown
    ]
    if shown:
        print_table(Table("", columns_of("pack, source, size: bytes, last used"), rows))
    total = f"{plural(len(shown), 'pack')}, {size(sum(p.num_bytes for p in shown))}"
    how = "" if chosen or not shown else "; to remove one: `lapclip data remove NAME`; all of them: `--all`"
    people.print(f"{'removed ' if chosen else ''}{total}{how}", highlight=False)
    return 0
