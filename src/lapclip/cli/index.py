"""`lapclip index`: embeds the images of folders, so that `lapclip search` finds them."""

import os
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lapclip.cli.flags import AsJson, Switch
from lapclip.cli.models import fetch_missing
from lapclip.cli.screen import follow, own_name, print_json, print_table, say, stop_requests, working
from lapclip.errors import MissingPackage, UserError, shortened, shortened_path, typed
from lapclip.units import age, duration, plural, size

if TYPE_CHECKING:
    from lapclip.search.update import Summary


@dataclass(frozen=True)
class ChosenModel:
    """A model to index with."""

    load_from: str
    path: str  # of the run or folder, by which its index is found again
    name: str
    why: str = ""  # it was chosen; empty if it was named


def index(
    *folders: str,
    model: Annotated[str | None, Parameter(show_default="automatic")] = None,
    fresh: Switch = False,
    forget: str | None = None,
    list: Switch = False,
    remove: str | None = None,
    json: AsJson = False,
) -> int:
    """Embed every image in the given folders for `lapclip search`; when repeated, only new and changed ones.

    Images that were moved or copied are not embedded again. Stop at any time: the same command continues.

    Args:
        folders: folders with images; by default all folders of the index
        model: a run, by name or path, a folder or file with a model, a name of `lapclip models`, or `hf-hub:OWNER/NAME`
        fresh: embed everything again; also repairs a damaged index
        forget: remove a folder and its images from the index
        list: show every index
        remove: remove the index of a model, by its name or path
    """
    if list or remove is not None:
        if folders or model or forget or fresh or (list and remove):
            what = f"`{'--list' if list else '--remove'}` cannot be combined with folders or other flags"
            raise UserError(what, hint="omit the others")
        return show_all(json) if list else remove_index(str(remove), json)
    if forget is not None:
        forgotten = forget_folder(forget, model)
        if not folders:
            if json:
                print_json(forgotten)
            return 0
    from lapclip.search.index import indexes_of, list_indexes
    from lapclip.search.scan import real_folders

    # Refuses a folder that does not exist before a model is downloaded or loaded for it.
    asked = real_folders(folders, [folder for info in indexes_of(model) for folder in info.folders])
    fetch_missing(model)
    chosen = choose_model(model)
    with working("starting"):
        from lapclip.embedder import load
        from lapclip.search.update import update

        embedder = load(chosen.load_from)
    if chosen.why:
        say(f"using the model `{chosen.name}`, {chosen.why}; `--model` chooses another")
    earlier = [info.fingerprint for info in list_indexes() if info.model == chosen.path]
    if earlier and embedder.fingerprint not in earlier:
        again = "all images are embedded again; until then, searches use the old index"
        say(f"`{chosen.name}` was trained further since it was indexed: {again}")
    with stop_requests("stopping; images that are already embedded are kept") as requests:
        work = update(embedder, name=chosen.name, model=chosen.path, folders=folders, fresh=fresh)
        summary = follow(work, requests, "indexing", is_kept=True)
    if json:
        print_json(as_record(summary, chosen))
    if not asked or {*asked} - {*summary.empty}:
        say_summary(summary)
    if summary.unusable:
        named = ", ".join(f"`{shortened(folder)}`" for folder in summary.unusable)
        if not any(summary.unusable.values()):
            hint = "name a folder with JPEG or PNG images; SVG, PSD, XCF and JPEG XL are not supported"
            raise UserError(f"there is no image in a supported format in {named}", hint=hint)
        what = f"no image in {named} can be read"
        other = UserError(what, hint="convert its images to JPEG or PNG")
        raise MissingPackage(what, summary.extra) if summary.extra else other
    return 0


def choose_model(model: str | None) -> ChosenModel:
    """The model that was named; else that of the index updated last, else the newest run with a checkpoint."""
    from lapclip.runs.run import RUNS, all_runs, find_run
    from lapclip.search.index import MODEL, indexes_of, path_of_model

    if known := indexes_of(model):
        last, why = known[0], "" if model else "as before"
        if os.path.exists(last.model):
            return ChosenModel(last.model, last.model, last.name, why)
        why = "from the copy in the index: its run no longer exists"
        return ChosenModel(str(last.path / MODEL), last.model, last.name, why)
    if model is not None:
        path = path_of_model(model) or str(find_run(model).path)  # which raises the error
        return ChosenModel(path, path, os.path.basename(path) if os.path.isdir(model) else model)
    for run in all_runs():
        if any(run.checkpoints.glob("step-*")):
            path = os.path.realpath(run.path)
            return ChosenModel(path, path, run.name, "the newest run")
    what = f"there is no model to index with: `{RUNS.absolute()}` holds no run with a checkpoint"
    hint = f"train one: `{own_name()} train`; for photos without captions: `{own_name()} models`"
    raise UserError(what, hint=hint)


def as_record(summary: "Summary", chosen: ChosenModel) -> dict[str, Any]:
    return {
        **{name: value for name, value in vars(summary).items() if name.startswith("num_")},
        "unreadable": [{"path": path, "why": why} for path, why in summary.unreadable],
        "unreachable": [*summary.unreachable, *summary.unopened],
        "model": chosen.path,
        "folders": summary.folders,
        "path": str(summary.path),
        "seconds": summary.seconds,
    }


def say_summary(summary: "Summary") -> None:
    counts = {
        "embedded": summary.num_embedded, "recognised by content": summary.num_copied, "moved": summary.num_moved,
        "removed": summary.num_removed, "unreadable": summary.num_unreadable,
        f"link{'' if summary.num_links == 1 else 's'} to images already indexed": summary.num_links,
    }  # fmt: skip
    parts = [f"{count:,} {what}" for what, count in counts.items() if count]
    images, folders = plural(summary.num_indexed, "image"), plural(len(summary.folders), "folder")
    done = ", ".join(parts) or "nothing new"
    say(f"{images} of {folders} in the index: {done}; {duration(summary.seconds)}")
    for path, why in summary.unreadable:
        say(f"  {shortened_path(path)} {shortened(why)}")
    if summary.num_unreadable:
        say(f"{plural(summary.num_unreadable, 'file')} could not be read; lapclip tries again after a change")
    for folder, why in summary.unreachable.items():
        forget = f"`{own_name()} index --forget {typed(folder)}`"
        stay = f"its images stay in the index (to remove them: {forget})"
        say(f"`{shortened(folder)}` cannot be opened: {why}; {stay}")
    for folder in [folder for folder in summary.empty if folder not in summary.unusable]:
        say(f"`{shortened(folder)}` holds no images")
    for folder in summary.unopened[:3]:
        say(f"`{shortened(folder)}` cannot be opened; its images stay in the index")
    if summary.num_replaced:
        say("the index of the earlier model is removed")
    if summary.num_indexed:
        say(f"next: `{own_name()} search WORDS`")


def forget_folder(folder: str, model: str | None) -> dict[str, Any]:
    """Removes a folder from every index of a model."""
    from lapclip.search.index import find_index, indexes_of
    from lapclip.search.update import forget

    path = os.path.realpath(os.path.expanduser(folder))
    known = indexes_of(model)
    if not known:
        find_index(model)  # raises the error
    having = [info for info in known if path in info.folders]
    if not having:
        names = ", ".join(f"`{name}`" for info in known[:1] for name in info.folders) or "none"
        what = f"`{folder}` is not a folder of the index; it has {names}"
        raise UserError(what, hint="name one of these after `--forget`")
    num_removed = max([forget(info, path) for info in having])
    say(f"removed {plural(num_removed, 'image')} of `{path}`")
    return {"num_removed": num_removed, "folder": path, "model": having[0].model}


def show_all(json: bool) -> int:
    from lapclip.data.pack import folder_bytes
    from lapclip.search.index import Index, list_indexes

    records: list[dict[str, Any]] = []
    rows = []
    for info in list_indexes():
        num_images: int | None = None
        try:
            with closing(Index(info)) as opened:
                num_images = opened.num_images
        except UserError as problem:
            say(f"{problem.message}; {problem.hint}")
        num_bytes = folder_bytes(info.path)
        facts = {key: getattr(info, key) for key in ("name", "model", "folders", "is_complete", "updated")}
        records.append({**facts, "path": str(info.path), "num_pictures": num_images, "bytes": num_bytes})
        shown = "damaged" if num_images is None else num_images
        when = age(time.time() - info.updated) + ("" if info.is_complete else ", unfinished")
        rows.append((info.name, shown, ", ".join(info.folders), num_bytes, when))
    if json:
        print_json({"indexes": records})
    elif not records:
        say(f"there is no index yet; create one: `{own_name()} index ~/Pictures`")
    else:
        print_table("model, images: count, folders, size: bytes, updated", rows)
        total = size(sum(int(record["bytes"]) for record in records))
        say(f"{total} in total; to remove one: `{own_name()} index --remove MODEL`")
    return 0


def remove_index(model: str, json: bool) -> int:
    from lapclip.data.pack import folder_bytes
    from lapclip.search.index import find_index, indexes_of
    from lapclip.search.update import remove

    chosen = indexes_of(model)
    if not chosen:
        find_index(model)  # raises the error
    num_bytes = sum(folder_bytes(info.path) for info in chosen)
    for info in chosen:
        remove(info)
    say(f"removed the index of `{chosen[0].name}`, {size(num_bytes)}; the model and the images stay")
    if json:
        print_json({"removed": [str(info.path) for info in chosen], "bytes": num_bytes})
    return 0
