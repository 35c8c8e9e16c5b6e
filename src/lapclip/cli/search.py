"""`lapclip search`: images of the index by words and images, and duplicates."""

import filecmp
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import CycloptsError, Parameter
from rich.console import Console

from lapclip.cli.flags import AsJson, Switch, output_file, refuse_together, whole_number
from lapclip.cli.screen import follow, own_name, print_json, print_table, say, until_closed, working
from lapclip.errors import UserError, install_command, reason_for, shortened, suggest
from lapclip.files import open_regular, writing
from lapclip.units import duration, plural

if TYPE_CHECKING:
    from PIL import Image

    from lapclip.search.index import Filter, Index
    from lapclip.search.searcher import Duplicate, Match, Results, Searcher, Term

MAX_RESULTS = 10_000
MAX_NOTES = 3  # on words that no training caption contains, one line each
THUMBNAIL_SIZE = 320  # pixels of an image on a sheet or in a terminal
Form = Literal["table", "paths", "null", "json"]  # of the results
COLUMNS = "score: number, image, size: number, "  # the last one says that there are copies


def search(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True)],
    like: Annotated[list[str] | None, Parameter(negative="")] = None,
    unlike: Annotated[list[str] | None, Parameter(negative="")] = None,
    folder: str | None = None,
    after: str | None = None,
    before: str | None = None,
    min_size: Annotated[int | None, Parameter(converter=whole_number)] = None,
    model: Annotated[str | None, Parameter(show_default="the one updated last")] = None,
    top: Annotated[int | None, Parameter(converter=whole_number, show_default="10, or all groups")] = None,
    min_score: float | None = None,
    paths: Switch = False,
    null: Annotated[bool, Parameter(name=["--null", "-0"], negative="")] = False,
    sheet: Path | None = None,
    thumbnails: Annotated[bool | None, Parameter(show_default="if the terminal supports it")] = None,
    copy_to: Path | None = None,
    open: Switch = False,
    duplicates: Switch = False,
    json: AsJson = False,
) -> int:
    """Find images by text, by other images, or by both, added and subtracted.

    The score is the cosine similarity of query and image, from -1 to 1.
    Scores of different queries or models are not comparable. A score of 1 is the image itself.

    Args:
        words: what to search for: `beach - people + sunset`
        like: an image file to search for, alone or with text; repeatable
        unlike: an image file to subtract; repeatable
        folder: only images under this folder
        after: only files modified on this date or later: `2024-05-31`, `2024-05` or `2024`
        before: only files modified before this date
        min_size: only images with at least this many pixels on the longer side
        model: model whose index is searched: a run, by name or path
        top: maximum number of images, or of groups of duplicates
        min_score: minimum score; with `--duplicates`, between an image and the first of its group
        paths: print paths only, one per line
        null: print paths that end in NUL, for `xargs -0`
        sheet: write the results as a contact sheet (PNG)
        thumbnails: show small images in the terminal
        copy_to: copy the results into this folder, numbered by rank; nothing is overwritten
        open: open the best result in the system's image viewer
        duplicates: list groups of identical and nearly identical images
    """
    query = join_words(words)
    form: Form = "json" if json else "null" if null else "paths" if paths else "table"
    if top is not None and not 1 <= top <= MAX_RESULTS:
        raise UserError(f"`--top` is {top}", hint=f"use 1 to {MAX_RESULTS:,}")
    if min_score is not None and not -1 <= min_score <= 1:
        raise UserError(f"`--min-score` is {min_score}", hint="use a score from -1 to 1")
    refuse_together(paths=paths or null, json=json)
    wanted = read_filter(folder, after, before, min_size)
    limits = {"`--folder`": folder, "`--after`": after, "`--before`": before, "`--min-size`": min_size}
    filters = [flag for flag, value in limits.items() if value is not None]
    if duplicates:
        if query or like or unlike or sheet or copy_to or open:
            what = "`--duplicates` does not take a query, `--sheet`, `--copy-to` or `--open`"
            raise UserError(what, hint="omit these: all images are compared with each other")
        return show_groups(form, model, -1.0 if min_score is None else min_score, wanted, top)
    likes, unlikes = like or [], unlike or []
    terms = read_terms(query, likes, unlikes)
    sheet = output_file(sheet, ".png") if sheet else None
    searcher = open_searcher(model, wanted.folder)
    prepare_graph(searcher)
    from lapclip.search.searcher import describe_query

    index, started = searcher.index, time.perf_counter()
    results = searcher.search(searcher.vector(terms), top=top or 10, min_score=min_score, wanted=wanted)
    seconds, matches, num_wanted = time.perf_counter() - started, results.matches, index.count(wanted)
    copied = copy_files(matches, copy_to.expanduser()) if copy_to is not None and matches else []
    question = describe_query(terms, likes, unlikes)
    if sheet is not None and matches:
        write_sheet(sheet, matches, question)
    record: dict[str, Any] = {"query": question, "milliseconds": seconds * 1000}
    record |= {"results": [match.record() for match in matches], "num_pictures": index.num_images}
    record |= {"num_gone": results.num_gone, "model": index.model, "index": str(index.path), "copied": copied}
    record |= {"unknown_words": searcher.embedder.tokenizer.unknown_words(query)}
    if matches and form == "table":
        show_thumbnails(matches, thumbnails)
    show_results(form, record, [matches], [row_of(match, f"{match.score:.3f}") for match in matches])
    if num_wanted and form == "table":
        among = plural(num_wanted, "matching image" if filters else "image")
        say(f"{len(matches):,} of {among} for `{shortened(question)}`, {duration(seconds)}")
    if filters and not num_wanted:
        say(f"no indexed image matches {' and '.join(filters)}")
    elif not matches:
        say("nothing was found" if min_score is None else f"no image has a score of {min_score} or more")
    say_notes(query, results, index)
    unknown = record["unknown_words"] or []
    if len(unknown) > MAX_NOTES:
        some = ", ".join(f"`{shortened(word)}`" for word in unknown[:MAX_NOTES])
        say(f"note: no training caption contains {len(unknown)} of these words: {some}, ...")
    for word in unknown if len(unknown) <= MAX_NOTES else ():
        known = searcher.embedder.tokenizer.words or ()
        alike = [w for w in known if w[:1] == word[0] and abs(len(w) - len(word)) < 3]
        swapped = [w for w in alike if sorted(w) == sorted(word)]  # `brid` for `bird`: only 0.75
        near = suggest(word, swapped, 0.65) or suggest(word, alike, 0.8)
        say(f"note: no training caption contains `{shortened(word)}`{near}")
    if open and matches:
        open_file(matches[0].entry.path)
    return 0


def join_words(words: Sequence[str]) -> str:
    """The query, typed in quotes or without; a sign alone is a sign, and any other hyphen begins a flag."""
    for word in words:
        if word.startswith("-") and word != "-" and not word.startswith("- "):
            flag = word.split("=")[0]
            known = [f"--{name.replace('_', '-')}" for name in signature(search).parameters]
            raise CycloptsError(msg=f"unknown option: `{flag}`{suggest(flag, known)}")
    return " ".join(words).strip()


def read_filter(folder: str | None, after: str | None, before: str | None, min_size: int | None) -> "Filter":
    from lapclip.search.index import Filter, parse_date

    if min_size is not None and not 1 <= min_size <= 10**6:
        raise UserError(f"`--min-size` is {min_size}", hint="use 1 to 1,000,000 pixels")
    inside = None if folder is None else os.path.realpath(os.path.expanduser(folder))
    after_ns, before_ns = (None if date is None else parse_date(date) for date in (after, before))
    if after_ns is not None and before_ns is not None and before_ns <= after_ns:
        what = f"`--before {before}` is not later than `--after {after}`, so no image can match"
        raise UserError(what, hint="`--after` is the first day, `--before` the day after the last")
    return Filter(inside, after_ns, before_ns, min_size)


def read_terms(words: str, likes: Sequence[str], unlikes: Sequence[str]) -> "list[Term]":
    from lapclip.search.searcher import Term, parse_query

    terms = parse_query(words)
    terms += [Term(1, image=image_bytes(name)) for name in likes]
    terms += [Term(-1, image=image_bytes(name)) for name in unlikes]
    if not terms:
        hint = f"add what to search for: `{own_name()} search red bicycle`"
        raise UserError("the query is empty", hint=hint)
    return terms


def image_bytes(name: str) -> bytes:
    """The content of an image file; the error for anything else has its name."""
    from lapclip.data.decode import Unreadable, read_whole
    from lapclip.data.files import read_file
    from lapclip.data.images import way_out

    try:
        data = read_file(os.path.expanduser(name))
        read_whole(data, 32)
    except (OSError, ValueError, Unreadable) as error:
        what = f"`{shortened(name)}` cannot be used as an image: {reason_for(error).lower()}"
        raise UserError(what, hint=way_out(error)) from None
    return data


def open_index(model: str | None) -> "Index":
    """The index to search; says which one if there are several."""
    from lapclip.search.index import find_index, list_indexes

    index = find_index(model)
    if model is None and len(list_indexes()) > 1:
        say(f"searching the index of `{index.name}`, the one updated last; `--model` chooses another")
    return index


def open_searcher(model: str | None, folder: str | None) -> "Searcher":
    from lapclip.search.searcher import refuse_unknown

    index = open_index(model)
    if folder is not None and not os.path.exists(folder) and not index.has_under(folder):
        hint = "`lapclip index --list` shows the indexed folders"
        raise UserError(f"`{shortened(folder)}` does not exist", hint=hint)
    if folder is not None:
        refuse_unknown(index, folder)
    with working("starting"):
        from lapclip.embedder import load
        from lapclip.search.searcher import Searcher

        return Searcher(index, load(index.model_folder))


def prepare_graph(searcher: "Searcher") -> None:
    """Builds the graph of a very large index, once; without it all images are compared."""
    from lapclip.search.nearest import has_usearch

    if searcher.needs_graph:
        say(f"preparing {plural(len(searcher.rows_N), 'image')} for faster search (once); Ctrl-C skips this")
        try:
            follow(searcher.build_graph())
        except KeyboardInterrupt:
            say("continuing without")
        except UserError as problem:
            say(f"continuing without: {problem.message}")
    elif searcher.is_large and not has_usearch():
        say(f"searching so many images is faster with `{install_command('ann')}`")


def show_results(
    form: Form, record: dict[str, Any], groups: "Sequence[Sequence[Match]]", rows: Sequence[Sequence[str]]
) -> None:
    """Results as one JSON object, as paths, or as a table."""
    with until_closed():
        if form == "json":
            print_json(record)
        elif form != "table":
            write_paths([[match.entry.path for match in group] for group in groups], form == "null")
        elif rows:
            print_table(COLUMNS, rows)


def row_of(match: "Match", score: str) -> tuple[str, ...]:
    """A line of the table; the path is relative to the working directory if it lies below."""
    entry, num_copies = match.entry, len(match.copies)
    path = entry.path.removeprefix(os.getcwd().rstrip(os.sep) + os.sep)
    copies = f"+{num_copies} cop{'y' if num_copies == 1 else 'ies'}" if num_copies else ""
    return score, path, f"{entry.width} x {entry.height}", copies


def show_thumbnails(matches: "Sequence[Match]", asked: bool | None) -> None:
    from lapclip.cli.thumbnails import grid, protocol_of

    encoding = sys.stdout.encoding or ""
    protocol = protocol_of(os.environ, is_terminal=sys.stdout.isatty(), encoding=encoding, asked=asked)
    if protocol is not None:
        labels = [f"{match.score:.3f} {name_of(match)}" for match in matches]
        with until_closed():
            sys.stdout.write(grid(load_images(matches), labels, protocol, Console().width) + "\n")


def name_of(match: "Match") -> str:
    return shortened(os.path.basename(match.entry.path))


def load_images(matches: "Sequence[Match]") -> "list[Image.Image]":
    """The images of some matches; grey where a file can no longer be read."""
    from PIL import Image

    from lapclip.data.decode import Unreadable, read_whole
    from lapclip.data.files import read_file
    from lapclip.data.workers import in_order

    def load(match: "Match") -> Image.Image:
        try:
            return read_whole(read_file(match.entry.path), THUMBNAIL_SIZE)
        except (OSError, ValueError, Unreadable):
            return Image.new("RGB", (THUMBNAIL_SIZE, THUMBNAIL_SIZE), "grey")

    return list(in_order(load, matches))


def write_sheet(path: Path, matches: "Sequence[Match]", question: str) -> None:
    from lapclip.view.sheet import draw_sheet

    images = zip(load_images(matches), matches, strict=True)
    draw_sheet(path, [(image, [f"{match.score:.3f}"], name_of(match)) for image, match in images], question)
    say(f"contact sheet: `{path}`")


def copy_files(matches: "Sequence[Match]", folder: Path) -> list[str]:
    """Copies of the images, named by rank; the paths."""
    digits = len(str(len(matches)))
    originals = [match.entry.path for match in matches]
    paths = [folder / f"{rank:0{digits}}-{os.path.basename(path)}" for rank, path in enumerate(originals, 1)]
    if existing := [path for path in paths if os.path.lexists(path)]:
        raise UserError(f"`{existing[0]}` already exists", hint="choose another folder for `--copy-to`")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"`{folder}` is a file", hint="name a folder for `--copy-to`")
    if unreadable := [path for path in originals if not os.access(path, os.R_OK)]:
        raise UserError(f"cannot read `{unreadable[0]}`", hint="update the index with `lapclip index`")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for original, path in zip(originals, paths, strict=True):
            with open_regular(original) as file, path.open("xb") as copy:
                shutil.copyfileobj(file, copy)
            shutil.copystat(original, path)
    say(f"copied {plural(len(paths), 'image')} to `{folder}`")
    return [str(path.absolute()) for path in paths]


def open_file(path: str) -> None:
    """Shows an image in the viewer that the system has for it."""
    program = "open" if sys.platform == "darwin" else "xdg-open"
    try:
        # A pipe would wait for the viewer.
        quiet: Any = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        subprocess.run([program, path], check=True, start_new_session=True, **quiet)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        raise UserError(f"`{program}` cannot open `{shortened(path)}`", hint="use another viewer") from None


def write_paths(groups: Sequence[Sequence[str]], null: bool) -> None:
    """Paths as bytes, for other programs; an empty line between groups, but with NUL, where it would be a path."""
    end = b"\0" if null else b"\n"
    between = b"" if null else end
    for path in (path for group in groups for path in group):
        if not null and "\n" in path:
            what = f"the name of `{shortened(path)}` contains a line break"
            raise UserError(what, hint="add `-0` to end paths with NUL")
    sys.stdout.flush()
    out = sys.stdout.buffer
    out.write(between.join(b"".join(os.fsencode(path) + end for path in group) for group in groups))
    out.flush()


def say_notes(query: str, results: "Results", index: "Index") -> None:
    """What the person should know about the results."""
    if word := re.search(r"\s-(\w+)", query):
        say(f"`-{word[1]}` was used as a word; to subtract it, write ` - {word[1]}` with spaces")
    if results.num_gone:
        gone = f"{plural(results.num_gone, 'image')} no longer exist{'s' if results.num_gone == 1 else ''}"
        say(f"{gone}: `{own_name()} index` updates the index")
    for folder in results.unreachable:
        say(f"`{folder}` cannot be opened now; its images are omitted")
    if was_trained_since(index):
        again = f"`{own_name()} index` embeds the images with the new weights"
        say(f"`{index.name}` was trained further: {again}")


def was_trained_since(index: "Index") -> bool:
    """Whether the run that an index was made with has other weights now."""
    from lapclip.embedder import load
    from lapclip.runs.run import find_run
    from lapclip.weights.checkpoint import MODEL, best

    try:
        checkpoint = best(find_run(index.model).checkpoints)
        if checkpoint is None or filecmp.cmp(checkpoint / MODEL, index.model_folder / MODEL, shallow=False):
            return False
        return load(index.model).fingerprint != index.fingerprint
    except (UserError, OSError):  # the run is gone or broken, and the index has a copy
        return False


def show_groups(form: Form, model: str | None, min_score: float, wanted: "Filter", top: int | None) -> int:
    """Groups of identical and nearly identical images, and how many there are."""
    from lapclip.search.searcher import duplicates

    index = open_index(model)
    started = time.perf_counter()
    found = follow(duplicates(index, min_score, wanted))
    groups = found[:top]
    record: dict[str, Any] = {"min_score": min_score, "milliseconds": (time.perf_counter() - started) * 1000}
    record |= {"num_groups": len(found), "groups": [[one.record() for one in group] for group in groups]}
    record |= {"num_pictures": index.num_images, "model": index.model, "index": str(index.path)}
    show_results(form, record, groups, [row for group in groups for row in group_rows(group)])
    if form != "json":
        num_near = sum(not all(one.is_identical for one in group) for group in groups)
        kinds = f"{len(groups) - num_near:,} of identical files, {num_near:,} with near-duplicates"
        of_all = "" if len(groups) == len(found) else f"{len(groups):,} of "
        shown = f"{of_all}{plural(len(found), 'group')}: {kinds}"
        say(shown if groups else "no duplicates or near-duplicates")
    return 0


def group_rows(group: "Sequence[Duplicate]") -> Iterator[tuple[str, ...]]:
    """Each image, and how sure it is that it shows the same as the first; an empty line after the group."""
    yield row_of(group[0], "")
    for match in group[1:]:
        near = f"near-duplicate, thumbnails differ by {100 * match.difference:.1f}%"
        yield *row_of(match, f"{match.score:.3f}")[:3], "identical file" if match.is_identical else near
    yield ("",) * 4
