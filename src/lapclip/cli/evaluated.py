"""What `lapclip eval` found: tables and sentences for a terminal, a page, a sheet of mistakes."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lapclip.cli.screen import say
from lapclip.data.decode import Unreadable
from lapclip.data.source import Source
from lapclip.data.whole import as_jpeg
from lapclip.errors import UserError, printable, shortened
from lapclip.view.evaluation import (
    comparison,
    how_measured,
    is_told,
    points_between,
    tests_of,
    write_evaluation,
    zero_shot_words,
)
from lapclip.view.lines import recall_table
from lapclip.view.sheet import NUM_FOUND, TILE, draw_found

NUM_CLASSES = 8  # of those that are named worst
NUM_UNREADABLE = 3  # that are named
PICTURE = 144  # pixels of each side on the page, where they are shown smaller: screens have small dots
MOST_DRAWN = 50  # mistakes on a sheet, which is then 9,000 pixels high


def show(result: Mapping[str, Any], num_mistakes: int) -> None:
    """Prints all of it on stdout, within 80 columns."""
    screen = Console()
    images = "validation images" if result["held_out"] else "images"
    screen.print(recall_table(result, images), highlight=False)
    tell(screen, how_measured(result))
    if asked := result.get("negatives"):
        levels = ", ".join(f"{level} {asked[level]:.1%}" for level in ("easy", "medium", "hard"))
        alike = f"hard: the others' captions are alike; chance {asked['chance']:.0%}"
        tell(screen, f"The right one of {asked['num_choices']}: {levels} ({alike})")
    if unreadable := result.get("unreadable"):
        named = ", ".join(shortened(name, 60) for name in unreadable[:NUM_UNREADABLE])
        tell(screen, f"{len(unreadable):,} images cannot be read and are left out, such as {named}")
    if result.get("zero_shot"):
        screen.print()
        tell(screen, *zero_shot_words(result))
        screen.print(classes_table(result["zero_shot"]["classes"]), highlight=False)
    if result.get("against"):
        screen.print()
        tell(screen, *comparison(result))
        screen.print(differences_table(result), highlight=False)
    if num_mistakes and result["mistakes"]:
        screen.print()
        tell(screen, *mistake_lines(result["mistakes"][:num_mistakes]))


def tell(screen: Console, *sentences: str) -> None:
    for sentence in sentences:
        screen.print(printable(sentence), markup=False, highlight=False, soft_wrap=not screen.is_terminal)


def plain_table(title: str, *headings: str) -> Table:
    """Words to the left, numbers (whose headings end in a space) to the right."""
    table = Table(title=Text(title, style="italic"), title_justify="left", box=box.SIMPLE)
    for heading in headings:
        is_number = heading.endswith(" ")
        table.add_column(
            heading.strip(), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    return table


def classes_table(classes: Sequence[Mapping[str, Any]]) -> Table:
    worst = sorted(classes, key=lambda c: (c["top1"], str(c["label"])))[:NUM_CLASSES]
    title = "by class" if len(classes) <= NUM_CLASSES else f"the {NUM_CLASSES} classes that are named worst"
    table = plain_table(title, "class", "images ", "right ", "taken most for", "times ")
    for c in worst:
        other = shortened(str(c["taken_for"]), 60) if c["taken_for"] else ""
        times = f"{c['num_taken_for']:,}" if c["taken_for"] else ""
        table.add_row(
            Text(shortened(str(c["label"]), 60)),
            f"{c['num_images']:,}",
            f"{c['top1']:.1%}",
            Text(other),
            times,
        )
    return table


def differences_table(result: Mapping[str, Any]) -> Table:
    table = plain_table("the difference", "", "points ", "95% sure ", "p ", "told from chance")
    for name, test in tests_of(result):
        table.add_row(
            name,
            f"{100 * test['difference']:+.1f}",
            points_between(test, signed=True),
            f"{test['p_value']:.2g}",
            "yes" if is_told(test) else "no",
        )
    return table


def mistake_lines(mistakes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Two lines each, which fit into 80 columns: the place and the words; the images."""
    lines = ["the worst mistakes: the place of the right image, its name, what came first"]
    for mistake in mistakes:
        first = mistake["found"][0]["picture"] if mistake["found"] else "another"
        lines += [
            f"{mistake['rank']:>8,}. {shortened(mistake['caption'], 65)}",
            f"{'':10}{end_of(mistake['picture'])}; first: {end_of(first)}",
        ]
    return lines


def end_of(name: str, most: int = 30) -> str:
    """A name fit to be shown; of a long path its end, by which the image is found."""
    shown = shortened(name, 10_000)
    return shown if len(shown) <= most else "..." + shown[3 - most :]


def next_step(result: Mapping[str, Any], named: Sequence[str], written: Mapping[str, str]) -> str:
    """One thing that is worth doing now."""
    found, named_rightly = result["text_to_image"], result.get("zero_shot")
    is_guessing = found["interval@1"][0] <= found["chance@1"]
    if named_rightly:  # words that are only the names of classes ask few questions
        is_guessing = named_rightly["interval@1"][0] <= named_rightly["chance"]
    if is_guessing:
        return "this cannot be told from guessing: measure on more images, or train longer"
    if "page" in written:
        return "open the page in a browser"
    return f"see its mistakes with their images: `lapclip eval {shlex.join(named)} --html`"


def write_files(
    result: Mapping[str, Any], source: Source, page: Path | None, sheet: Path | None
) -> dict[str, str]:
    """Writes the page and the sheet that were asked for, each whole or not at all; where they are."""
    written = {}
    for what, path in (("page", page), ("sheet", sheet)):
        if path is None:
            continue
        try:
            if what == "page":
                write_evaluation(path, result, small_images(source, result["mistakes"]))
            elif not draw_mistakes(path, source, result["mistakes"]):
                say("there are no mistakes to draw, so that no sheet is written")
                continue
        except OSError as error:
            raise UserError(
                f"cannot write `{path}`: {(error.strerror or str(error)).lower()}", hint="name another place"
            ) from None
        written[what] = str(path)
    return written


def small_images(source: Source, mistakes: Sequence[Mapping[str, Any]]) -> dict[int, bytes]:
    """A JPEG of each image that the mistakes speak of; what can no longer be read is left out."""
    wanted = {place["index"] for mistake in mistakes for place in (mistake, *mistake["found"])}
    images = {}
    for index in sorted(wanted):
        with suppress(Unreadable):  # of a streamed source
            images[index] = as_jpeg(source.image(index, PICTURE).resize((PICTURE, PICTURE)))
    return images


def draw_mistakes(path: Path, source: Source, mistakes: Sequence[Mapping[str, Any]]) -> bool:
    """A PNG: for each mistake its words, the right image in a frame, and what was found before it; False if none."""
    rows = []
    for mistake in mistakes[:MOST_DRAWN]:
        with suppress(Unreadable):
            places = [mistake, *mistake["found"]][:NUM_FOUND]
            images = [(source.image(place["index"], TILE), place is mistake) for place in places]
            rows.append((f"in place {mistake['rank']:,}: {shortened(mistake['caption'])}", images))
    if not rows:
        return False
    draw_found(path, rows)
    return True
