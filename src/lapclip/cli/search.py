"""`lapclip search`: images of the index, by words and by images; and those that are there twice."""

import filecmp
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import CycloptsError, Parameter
from rich.console import Console

from lapclip.cli.flags import AsJson, whole_number
from lapclip.cli.screen import own_name, people, print_json, say, working
from lapclip.errors import UserError, shortened, suggest
from lapclip.units import milliseconds, plural

if TYPE_CHECKING:
    from lapclip.search.index import Index
    from lapclip.search.searcher import Match, Results, Searcher, Term

MOST = 10_000  # results
# A cosine that nearly all that are scaled or saved anew reach, and few others (Flickr8k, `nano`).
NEARLY_EQUAL = 0.998
FLAGS = (
    "--like", "--unlike", "--folder", "--model", "--top", "--min-score", "--paths", "--null", "--json", "--sheet",
    "--thumbnails", "--no-thumbnails", "--duplicates", "--help",
)  # fmt: skip
T = TypeVar("T")


def search(
    *words: Annotated[
        str, Parameter(help="what to look for: `beach - people + sunset`", allow_leading_hyphen=True)
    ],
    like: Annotated[
        list[str] | None,
        Parameter(help="an image file to look for, also with words; repeatable", negative=""),
    ] = None,
    unlike: Annotated[
        list[str] | None, Parameter(help="an image file to look away from; repeatable", negative="")
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
    paths: Annotated[bool, Parameter(help="print paths only, one a line", negative="")] = False,
    null: Annotated[
        bool, Parameter(name=["--null", "-0"], help="paths end in NUL, for `xargs -0`", negative="")
    ] = False,
    sheet: Annotated[Path | None, Parameter(help="draw what is found as a contact sheet, a PNG")] = None,
    thumbnails: Annotated[
        bool | None, Parameter(help="small images here", show_default="where the terminal can")
    ] = None,
    duplicates: Annotated[
        bool, Parameter(help="list groups of images that are equal or nearly", negative="")
    ] = False,
    json: AsJson = False,
) -> int:
    """Find images by words, by other images, or by both added and taken away.

    The score is the cosine between the embeddings of what is asked and of an image, from -1 to 1. It only orders
    the images of one search: how high a good one is depends on the model and on the words. Only 1 means the same
    with all: the image itself.
    """
    asked = joined(words)
    refuse_nonsense(top=top, min_score=min_score, sheet=sheet, paths=paths or null, json=json)
    if duplicates and (asked or like or unlike or sheet):
        raise UserError(
            "`--duplicates` compares images with each other, and looks for nothing",
            hint="leave out what to look for",
        )
    from lapclip.search.index import find_index
    from lapclip.search.searcher import describe_query, refuse_unknown

    terms = read_terms(asked, like or (), unlike or ()) if not duplicates else []
    index = find_index(model)
    if duplicates:
        return unless_nobody_reads(lambda: show_duplicates(index, min_score, folder, top, paths, null, json))
    if folder is not None:
        refuse_unknown(index, folder)
    with working("starting"):
        from lapclip.embedder import load
        from lapclip.search.searcher import Searcher

        searcher = Searcher(index, load(index.model_folder))
    mind_the_graph(searcher)
    started = time.perf_counter()
    answer = searcher.search(searcher.vector(terms), top=top or 10, min_score=min_score, folder=folder)
    seconds = time.perf_counter() - started
    question = describe_query(terms, like or (), unlike or ())
    if sheet is not None:
        from lapclip.cli.found import write_sheet

        write_sheet(sheet.expanduser(), answer.matches)

    def show() -> None:
        if json:
            print_json(as_record(question, seconds, answer, index))
        elif paths or null:
            write_paths([[found.entry.path for found in answer.matches]], null)
        else:
            show_found(answer.matches, thumbnails)
            count = f"{len(answer.matches):,} of {plural(index.num_images, 'image')}"
            say(f"{count} for `{shortened(question)}`, {milliseconds(seconds)}")

    code = unless_nobody_reads(show)
    if meant := re.search(r"\s-(\w+)", asked):
        say(f"`-{meant[1]}` was looked for as a word; ` - {meant[1]}`, with spaces, takes it away")
    say_what_is_missing(answer, min_score)
    if has_learned(index):
        say(
            f"`{index.name}` has learned since: `{own_name()} index` looks at the images with what it knows now"
        )
    return code


def joined(words: Sequence[str]) -> str:
    """What was typed, in quotes or without; a sign alone is a sign, and any other hyphen begins a flag."""
    for word in words:
        if word.startswith("-") and word != "-" and not word.startswith("- "):
            flag = word.split("=")[0]
            raise CycloptsError(msg=f"unknown option: `{flag}`{suggest(flag, FLAGS)}")
    return " ".join(words).strip()


def refuse_nonsense(
    *, top: int | None, min_score: float | None, sheet: Path | None, paths: bool, json: bool
) -> None:
    if top is not None and not 1 <= top <= MOST:
        raise UserError(f"`--top` is {top}", hint=f"ask for 1 to {MOST:,} images")
    if min_score is not None and not -1 <= min_score <= 1:
        raise UserError(f"`--min-score` is {min_score}", hint="a score lies between -1 and 1")
    if sheet is not None and sheet.suffix.lower() != ".png":
        raise UserError(f"`--sheet` is `{sheet}`", hint="the sheet is a PNG: name it `found.png`, or alike")
    if paths and json:
        raise UserError("`--paths` and `--json` do not go together", hint="choose one of them")


def read_terms(words: str, likes: Sequence[str], unlikes: Sequence[str]) -> "list[Term]":
    from lapclip.search.searcher import Term, parse_query

    terms = parse_query(words)
    terms += [Term(1, image=image_bytes(name)) for name in likes]
    terms += [Term(-1, image=image_bytes(name)) for name in unlikes]
    if not terms:
        raise UserError("nothing is asked", hint=f"say what to look for: `{own_name()} search red bicycle`")
    return terms


def image_bytes(name: str) -> bytes:
    """An image file's content, refused here by its name when it is none."""
    from lapclip.data.decode import Unreadable
    from lapclip.data.files import read_file
    from lapclip.data.whole import whole

    try:
        data = read_file(os.path.expanduser(name))
        whole(data, 32)
    except (OSError, ValueError, Unreadable) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        is_missing = isinstance(error, FileNotFoundError)
        raise UserError(
            f"`{shortened(name)}` cannot be used as an image: {why.lower()}",
            hint="look at its path, from here" if is_missing else "name an image file, such as a JPEG",
        ) from None
    return data


def mind_the_graph(searcher: "Searcher") -> None:
    """Makes the graph of a very large index, once, if that is possible; interrupted, all images are looked at."""
    from lapclip.search.nearest import has_usearch

    if searcher.needs_graph:
        say(
            f"preparing {plural(len(searcher.rows_N), 'image')} for faster search, once; Ctrl-C goes on without"
        )
        try:
            follow(searcher.build_graph(), "preparing")
        except KeyboardInterrupt:
            say("going on without")
        except UserError as problem:
            say(f"going on without: {problem.message}")
    elif searcher.is_large and not has_usearch():
        say("so many images are searched faster with `pip install 'lapclip[ann]'`")


def follow(work: Generator[tuple[int, int], None, T], what: str) -> T:
    """Follows work that says how far it is, with a bar on a terminal; its result."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=people, transient=True, disable=not people.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        while True:
            try:
                done, total = next(work)
            except StopIteration as end:
                return end.value
            bar.update(task, completed=done, total=total)


def has_learned(index: "Index") -> bool:
    """Whether the run that an index was made with has other weights by now."""
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


def unless_nobody_reads(show: Callable[[], Any]) -> int:
    try:
        show()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def as_record(question: str, seconds: float, answer: "Results", index: "Index") -> dict[str, Any]:
    return {
        "query": question,
        "milliseconds": seconds * 1000,
        "results": [match.record() for match in answer.matches],
        "num_pictures": index.num_images,
        "num_gone": answer.num_gone,
        "model": index.model,
    }


def write_paths(groups: Sequence[Sequence[str]], null: bool) -> None:
    """Paths as bytes, for other programs; a free line between groups, which NUL has none of: it would be a path."""
    end = b"\0" if null else b"\n"
    between = b"" if null else end
    for path in (path for group in groups for path in group):
        if not null and "\n" in path:
            raise UserError(
                f"the name of `{shortened(path)}` has more than one line",
                hint="add `-0`: then paths end in NUL",
            )
    sys.stdout.flush()
    out = sys.stdout.buffer
    out.write(between.join(b"".join(os.fsencode(path) + end for path in group) for group in groups))
    out.flush()


def show_found(found: "Sequence[Match]", thumbnails: bool | None) -> None:
    from lapclip.cli.found import images_of, shown_name, table_of
    from lapclip.cli.thumbnails import grid, way_to_show

    out = Console(highlight=False, markup=False)
    way = way_to_show(
        os.environ, is_terminal=sys.stdout.isatty(), encoding=sys.stdout.encoding or "", asked=thumbnails
    )
    if found and way is not None:
        labels = [f"{one.score:.3f} {shown_name(one)}" for one in found]
        sys.stdout.write(grid(images_of(found), labels, way, out.width) + "\n")
        sys.stdout.flush()
    if found:
        out.print(table_of(found, out.width))


def say_what_is_missing(answer: "Results", min_score: float | None) -> None:
    if not answer.matches:
        say("nothing is found" if min_score is None else f"no image scores {min_score} or more")
    if answer.num_gone:
        are = "is" if answer.num_gone == 1 else "are"
        say(f"{plural(answer.num_gone, 'image')} {are} gone since: `{own_name()} index` brings it up to date")
    for folder in answer.unreachable:
        say(f"`{folder}` cannot be looked into now; its images are left out")


def show_duplicates(
    index: "Index",
    min_score: float | None,
    folder: str | None,
    top: int | None,
    paths: bool,
    null: bool,
    json: bool,
) -> None:
    from lapclip.cli.found import lines_of_groups
    from lapclip.search.searcher import duplicates

    least = NEARLY_EQUAL if min_score is None else min_score
    within = None if folder is None else os.path.realpath(os.path.expanduser(folder))
    started = time.perf_counter()
    groups = follow(duplicates(index, least, within), "comparing images")[:top]
    seconds = time.perf_counter() - started
    if json:
        records = [
            [{"id": one.entry.id, "path": one.entry.path, "score": one.score} for one in group]
            for group in groups
        ]
        facts = {"min_score": least, "milliseconds": seconds * 1000}
        print_json({**facts, "groups": records, "num_pictures": index.num_images, "model": index.model})
        return
    if paths or null:
        write_paths([[one.entry.path for one in group] for group in groups], null)
        return
    out = Console(highlight=False, markup=False)
    for line in lines_of_groups(groups, out.width):
        out.print(line, soft_wrap=True)
    spare = sum(len(group) - 1 for group in groups)
    found = f"{plural(len(groups), 'group')} of equal or nearly equal images" if groups else "no two images"
    more = f", {spare:,} more than needed" if groups else " are equal or nearly"
    say(f"{found}{more}; `--min-score` {least:g} decides what is nearly")
