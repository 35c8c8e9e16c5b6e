"""`lapclip search`: images of the index by words and images, and duplicates."""

import filecmp
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import CycloptsError, Parameter
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from lapclip.cli.flags import AsJson, whole_number
from lapclip.cli.screen import follow, own_name, print_json, say, working
from lapclip.errors import UserError, shortened, suggest
from lapclip.units import duration, plural

if TYPE_CHECKING:
    from PIL import Image

    from lapclip.search.index import Index
    from lapclip.search.searcher import Match, Results, Searcher, Term

MAX_RESULTS = 10_000
# A cosine that nearly all images reach that were only scaled or saved again, and few others (Flickr8k, `nano`).
NEARLY_EQUAL = 0.998
THUMBNAIL_SIZE = 320  # pixels of an image on a sheet or in a terminal
MAX_PATH_CHARACTERS = 4096
MIN_PATH_WIDTH = 20  # columns, however narrow the window
FLAGS = (
    "--like", "--unlike", "--folder", "--model", "--top", "--min-score", "--paths", "--null", "--json", "--sheet",
    "--thumbnails", "--no-thumbnails", "--duplicates", "--help",
)  # fmt: skip


@dataclass(frozen=True)
class Output:
    """How results are printed."""

    form: Literal["table", "paths", "json"]
    null: bool  # paths end in NUL
    thumbnails: bool | None


def search(
    *words: Annotated[
        str, Parameter(help="what to look for: `beach - people + sunset`", allow_leading_hyphen=True)
    ],
    like: Annotated[
        list[str] | None,
        Parameter(help="an image file to look for, alone or with words; repeatable", negative=""),
    ] = None,
    unlike: Annotated[
        list[str] | None, Parameter(help="an image file to avoid; repeatable", negative="")
    ] = None,
    folder: Annotated[str | None, Parameter(help="only images under this folder")] = None,
    model: Annotated[
        str | None, Parameter(help="whose index: a run, by name or path", show_default="the one updated last")
    ] = None,
    top: Annotated[
        int | None,
        Parameter(
            help="how many images, or groups of duplicates",
            converter=whole_number,
            show_default="10, or all groups",
        ),
    ] = None,
    min_score: Annotated[
        float | None,
        Parameter(help=f"only images with at least this score; with `--duplicates`, {NEARLY_EQUAL}"),
    ] = None,
    paths: Annotated[bool, Parameter(help="print paths only, one per line", negative="")] = False,
    null: Annotated[
        bool, Parameter(name=["--null", "-0"], help="paths end in NUL, for `xargs -0`", negative="")
    ] = False,
    sheet: Annotated[Path | None, Parameter(help="draw the results as a contact sheet, a PNG")] = None,
    thumbnails: Annotated[
        bool | None, Parameter(help="show small images in the terminal", show_default="if the terminal can")
    ] = None,
    duplicates: Annotated[
        bool, Parameter(help="list groups of equal or nearly equal images", negative="")
    ] = False,
    json: AsJson = False,
) -> int:
    """Find images by words, by other images, or by both, added and subtracted.

    The score is the cosine of the embeddings of the query and an image, from -1 to 1. It only orders the results of
    one query: how high a good match scores depends on the model and the words. A score of 1 is the image itself.
    """
    query = join_words(words)
    check_options(top=top, min_score=min_score, sheet=sheet, paths=paths or null, json=json)
    output = Output("json" if json else "paths" if paths or null else "table", null, thumbnails)
    if duplicates:
        if query or like or unlike or sheet:
            raise UserError("`--duplicates` takes no query", hint="omit the query: images are compared")
        return ignore_closed_pipe(lambda: show_duplicates(model, min_score, folder, top, output))
    likes, unlikes = like or [], unlike or []
    terms = read_terms(query, likes, unlikes)
    searcher = open_searcher(model, folder)
    prepare_graph(searcher)
    from lapclip.search.searcher import describe_query

    started = time.perf_counter()
    results = searcher.search(searcher.vector(terms), top=top or 10, min_score=min_score, folder=folder)
    seconds = time.perf_counter() - started
    if sheet is not None and results.matches:
        write_sheet(sheet.expanduser(), results.matches)
    question = describe_query(terms, likes, unlikes)
    code = ignore_closed_pipe(lambda: show_results(question, seconds, results, searcher.index, output))
    say_notes(query, results, min_score, searcher.index)
    return code


def join_words(words: Sequence[str]) -> str:
    """The query, typed in quotes or without; a sign alone is a sign, and any other hyphen begins a flag."""
    for word in words:
        if word.startswith("-") and word != "-" and not word.startswith("- "):
            flag = word.split("=")[0]
            raise CycloptsError(msg=f"unknown option: `{flag}`{suggest(flag, FLAGS)}")
    return " ".join(words).strip()


def check_options(
    *, top: int | None, min_score: float | None, sheet: Path | None, paths: bool, json: bool
) -> None:
    if top is not None and not 1 <= top <= MAX_RESULTS:
        raise UserError(f"`--top` is {top}", hint=f"use 1 to {MAX_RESULTS:,}")
    if min_score is not None and not -1 <= min_score <= 1:
        raise UserError(f"`--min-score` is {min_score}", hint="a score lies between -1 and 1")
    if sheet is not None and sheet.suffix.lower() != ".png":
        raise UserError(f"`--sheet` is `{sheet}`", hint="the sheet is a PNG, such as `found.png`")
    if paths and json:
        raise UserError("`--paths` and `--json` do not go together", hint="choose one of them")


def read_terms(words: str, likes: Sequence[str], unlikes: Sequence[str]) -> "list[Term]":
    from lapclip.search.searcher import Term, parse_query

    terms = parse_query(words)
    terms += [Term(1, image=image_bytes(name)) for name in likes]
    terms += [Term(-1, image=image_bytes(name)) for name in unlikes]
    if not terms:
        raise UserError("the query is empty", hint=f"say what to look for: `{own_name()} search red bicycle`")
    return terms


def image_bytes(name: str) -> bytes:
    """The content of an image file; the error for anything else has its name."""
    from lapclip.data.decode import Unreadable, read_whole
    from lapclip.data.files import read_file

    try:
        data = read_file(os.path.expanduser(name))
        read_whole(data, 32)
    except (OSError, ValueError, Unreadable) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        what = f"`{shortened(name)}` cannot be used as an image: {why.lower()}"
        raise UserError(what, hint="name an image file, such as a JPEG") from None
    return data


def open_searcher(model: str | None, folder: str | None) -> "Searcher":
    from lapclip.search.index import find_index
    from lapclip.search.searcher import refuse_unknown

    index = find_index(model)
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
        count = plural(len(searcher.rows_N), "image")
        say(f"preparing {count} for faster search, once; Ctrl-C continues without")
        try:
            follow(searcher.build_graph())
        except KeyboardInterrupt:
            say("continuing without")
        except UserError as problem:
            say(f"continuing without: {problem.message}")
    elif searcher.is_large and not has_usearch():
        say("searching so many images is faster with `pip install 'lapclip[ann]'`")


def ignore_closed_pipe(show: Callable[[], Any]) -> int:
    try:
        show()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def show_results(question: str, seconds: float, results: "Results", index: "Index", output: Output) -> None:
    matches = results.matches
    if output.form == "json":
        facts = {"query": question, "milliseconds": seconds * 1000}
        about = {"num_pictures": index.num_images, "num_gone": results.num_gone, "model": index.model}
        print_json({**facts, "results": [match.record() for match in matches], **about})
    elif output.form == "paths":
        write_paths([[match.entry.path for match in matches]], output.null)
    else:
        if matches:
            show_matches(matches, output.thumbnails)
        count = f"{len(matches):,} of {plural(index.num_images, 'image')}"
        say(f"{count} for `{shortened(question)}`, {duration(seconds)}")


def show_matches(matches: "Sequence[Match]", thumbnails: bool | None) -> None:
    from lapclip.cli.thumbnails import grid, protocol_of

    out = Console(highlight=False, markup=False)
    protocol = protocol_of(
        os.environ, is_terminal=sys.stdout.isatty(), encoding=sys.stdout.encoding or "", asked=thumbnails
    )
    if protocol is not None:
        labels = [f"{match.score:.3f} {name_of(match)}" for match in matches]
        sys.stdout.write(grid(load_images(matches), labels, protocol, out.width) + "\n")
        sys.stdout.flush()
    out.print(matches_table(matches, out.width))


def matches_table(matches: "Sequence[Match]", width: int) -> Table:
    """A line for each image, best first, no wider than the window."""
    copies = [f"+{n} cop{'y' if n == 1 else 'ies'}" if (n := len(match.copies)) else "" for match in matches]
    sizes = [f"{match.entry.width} x {match.entry.height}" for match in matches]
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True)
    for heading in ("score", "image", "size", *([""] if any(copies) else [])):
        table.add_column(heading, justify="right" if heading in ("score", "size") else "left", no_wrap=True)
    taken = 8 + sum(max(map(len, column)) + 2 for column in (sizes, copies) if any(column))
    for match, *rest in zip(matches, sizes, copies, strict=True):
        path = shorten_path(shown_path(match.entry.path), max(MIN_PATH_WIDTH, width - taken - 2))
        table.add_row(f"{match.score:.3f}", path, *rest[: len(table.columns) - 2])
    return table


def shown_path(path: str) -> str:
    """A printable path, relative to the working directory if it lies below."""
    here = os.getcwd().rstrip(os.sep) + os.sep
    return shortened(path.removeprefix(here), MAX_PATH_CHARACTERS)


def shorten_path(path: str, width: int) -> str:
    """A path in at most `width` columns; its middle is omitted, its beginning and its name say most."""
    if cell_len(path) <= width:
        return path
    keep = max(2, width - 3)
    head, tail = path[: keep // 3], path[-(keep - keep // 3) :]
    while cell_len(head) + 3 + cell_len(tail) > width and len(tail) > 1:  # wide characters
        head, tail = (head[:-1], tail) if len(head) > len(tail) // 2 else (head, tail[1:])
    return f"{head}...{tail}"


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


def write_sheet(path: Path, matches: "Sequence[Match]") -> None:
    from lapclip.view.sheet import draw_sheet

    images = zip(load_images(matches), matches, strict=True)
    draw_sheet(path, [(image, [f"{match.score:.3f}"], name_of(match)) for image, match in images])
    say(f"drawn: `{path}`")


def write_paths(groups: Sequence[Sequence[str]], null: bool) -> None:
    """Paths as bytes, for other programs; an empty line between groups, but with NUL, where it would be a path."""
    end = b"\0" if null else b"\n"
    between = b"" if null else end
    for path in (path for group in groups for path in group):
        if not null and "\n" in path:
            what = f"the name of `{shortened(path)}` contains a line break"
            raise UserError(what, hint="add `-0`: then paths end in NUL")
    sys.stdout.flush()
    out = sys.stdout.buffer
    out.write(between.join(b"".join(os.fsencode(path) + end for path in group) for group in groups))
    out.flush()


def say_notes(query: str, results: "Results", min_score: float | None, index: "Index") -> None:
    """What the person should know about the results."""
    if word := re.search(r"\s-(\w+)", query):
        say(f"`-{word[1]}` was searched as a word; ` - {word[1]}`, with spaces, subtracts it")
    if not results.matches:
        say("nothing was found" if min_score is None else f"no image scores {min_score} or more")
    if results.num_gone:
        gone = f"{plural(results.num_gone, 'image')} no longer exist{'s' if results.num_gone == 1 else ''}"
        say(f"{gone}: `{own_name()} index` updates the index")
    for folder in results.unreachable:
        say(f"`{folder}` cannot be opened now; its images are omitted")
    if was_trained_since(index):
        say(f"`{index.name}` was trained since: `{own_name()} index` embeds the images with the new weights")


def was_trained_since(index: "Index") -> bool:
    """Whether the run that an index was made with has other weights now."""
    from lapclip.embedder import load
    from lapclip.runs.run import find_run
    from lapclip.weights.checkpoint import MODEL, best

    try:
        checkpoint = best(find_run(index.model).checkpoints)
        if checkpoint is None or filecmp.cmp(checkpoint / MODEL, index.model_folder / MODEL, shallow=False):
            return False
        return load(index.model).fingerprint != index.path.name
    except (UserError, OSError):  # the run is gone or broken, and the index has a copy
        return False


def show_duplicates(
    model: str | None, min_score: float | None, folder: str | None, top: int | None, output: Output
) -> None:
    from lapclip.search.index import find_index
    from lapclip.search.searcher import duplicates

    index, score = find_index(model), NEARLY_EQUAL if min_score is None else min_score
    within = None if folder is None else os.path.realpath(os.path.expanduser(folder))
    started = time.perf_counter()
    groups = follow(duplicates(index, score, within))[:top]
    seconds = time.perf_counter() - started
    if output.form == "json":
        keys = ("id", "path", "score")
        records = [[{key: one.record()[key] for key in keys} for one in group] for group in groups]
        facts = {"min_score": score, "milliseconds": seconds * 1000}
        print_json({**facts, "groups": records, "num_pictures": index.num_images, "model": index.model})
        return
    if output.form == "paths":
        write_paths([[match.entry.path for match in group] for group in groups], output.null)
        return
    out = Console(highlight=False, markup=False)
    for line in group_lines(groups, out.width):
        out.print(line, soft_wrap=True)
    spare = sum(len(group) - 1 for group in groups)
    found = f"{plural(len(groups), 'group')} of equal or nearly equal images, {spare:,} more than needed"
    say(f"{found if groups else 'no two images are equal or nearly equal'}; `--min-score` is {score:g}")


def group_lines(groups: "Sequence[Sequence[Match]]", width: int) -> Iterator[str]:
    """Each group with an empty line after it: the score of each image with the first one, and its path."""
    for group in groups:
        for number, match in enumerate(group):
            is_copy = number > 0 and match.entry.row == group[0].entry.row
            score = "" if number == 0 else "equal" if is_copy else f"{match.score:.3f}"
            size = f"{match.entry.width} x {match.entry.height}"
            path = shorten_path(shown_path(match.entry.path), max(MIN_PATH_WIDTH, width - 7 - len(size) - 2))
            yield f"{score:5}  {path}  {size}"
        yield ""
