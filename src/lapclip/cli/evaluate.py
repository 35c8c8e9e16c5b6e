"""`lapclip eval`: recall and zero-shot accuracy beside chance and another model, and the worst mistakes."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lapclip.cli.flags import AsJson, with_settings
from lapclip.cli.screen import OPENING, follow, print_json, say, stop_requests, working
from lapclip.config import SETTINGS, Config, load_config
from lapclip.errors import UserError, printable, shortened

if TYPE_CHECKING:
    from lapclip.data.source import Source
    from lapclip.data.split import EvaluationSet

NUM_LISTED, NUM_KEPT, MAX_MISTAKES = 10, 50, 1000  # in the terminal, in JSON and pages, and at most
BATCH_SIZE = 12  # for a model whose own is unknown
NUM_CLASSES = 8  # the worst ones are listed
NUM_UNREADABLE = 3  # files that are named
IMAGE_SIZE = 144  # pixels of an image on the page, which shows it smaller: for high-resolution screens
MAX_DRAWN = 50  # mistakes on a sheet, which is then 9,000 pixels high


@dataclass(frozen=True)
class Options:
    """What is measured, and how."""

    run: str
    source: str | None
    against: str | None
    num_validation: int | None
    pool_size: int | None
    published: bool
    templates: tuple[str, ...]
    num_mistakes: int
    data: dict[str, Any]  # settings of the source


@with_settings("format", "images", "image_column", "caption_column")
def evaluate(
    run: Annotated[
        str, Parameter(help="a run, by name or path (its best checkpoint), or a folder with a model")
    ],
    source: Annotated[
        str | None, Parameter(help="what to measure on, by default the validation set of the run's source")
    ] = None,
    *,
    num_validation: Annotated[
        int | None,
        Parameter(help="images to search; by default as many as in training, or all of SOURCE"),
    ] = None,
    pool_size: Annotated[
        int | None,
        Parameter(help="search exactly this many images at a time, so that results are comparable"),
    ] = None,
    published: Annotated[
        bool,
        Parameter(help="as in published tables: equal captions of other images are wrong", negative=""),
    ] = False,
    against: Annotated[str | None, Parameter(help="another model to compare with on the same images")] = None,
    template: Annotated[
        tuple[str, ...],
        Parameter(
            help="a prompt for a class, such as `a photo of a {}`; repeatable",
            negative="",
            show_default=False,
        ),
    ] = (),
    mistakes: Annotated[
        int | None,
        Parameter(
            help=f"how many to list; by default {NUM_LISTED} in the terminal, {NUM_KEPT} in pages and JSON"
        ),
    ] = None,
    sheet: Annotated[Path | None, Parameter(help="draw the worst mistakes with their images: a PNG")] = None,
    html: Annotated[
        list[Path] | None,
        Parameter(
            help="write a page; by default `evaluation.html` in the run, or in this folder",
            consume_multiple=(0, 1),
            negative="",
            show_default=False,
        ),
    ] = None,
    json: AsJson = False,
    flags: dict[str, Any],
) -> int:
    """Measure how often the correct image is found by its caption, and the correct caption by its image.

    A source with classes, such as a folder of folders, is also classified without training for it (zero-shot).
    """
    check_numbers(num_validation, pool_size, mistakes)
    kept, listed = (default if mistakes is None else mistakes for default in (NUM_KEPT, NUM_LISTED))
    options = Options(run, source, against, num_validation, pool_size, published, template, kept, flags)
    config, folder = config_of(run)
    if config is None and source is None:
        refuse_without_source(run)
    page = None if html is None else page_path(html, folder)
    sheet = None if sheet is None else sheet_path(sheet)
    result, images = measure(options, config)
    if template and "zero_shot" not in result:
        say("this source has fewer than two classes: `--template` has no effect")
    if not json:  # before a file is written, which may fail
        show(result, listed)
    written = write_files(result, images, page, sheet)
    if json:
        print_json(result | written)
        return 0
    for what, path in written.items():
        say(f"the {what}: {path}")
    say(f"next: {next_step(result, [run] if source is None else [run, source], written)}")
    return 0


def measure(options: Options, config: Config | None) -> "tuple[dict[str, Any], Source]":
    """The result of the evaluation, and the source of its images."""
    other_config = None if options.against is None else config_of(options.against)[0]
    with working("starting"):
        from lapclip.embedder import TEMPLATES, label_prompts, load
        from lapclip.evaluate.full import evaluate as evaluate_model

        label_prompts(["label"], options.templates or TEMPLATES)  # refuses wrong templates first
        embedder = load(options.run)
        other = None if options.against is None else load(options.against)
    with stop_requests("stopping; what is packed already is kept") as requests:
        size = max(embedder.image_size, other.image_size if other else 0)
        measured, about = open_measured(config, other_config, options, size, requests)
        num_images = options.num_validation
        if num_images is None and options.source is None and options.pool_size is None and config is not None:
            num_images = config.data.num_validation
        available = measured.source.num_different
        available = available if num_images is None else min(num_images, available)
        if options.pool_size is not None and options.pool_size > available:  # embedding may take minutes
            what = f"`--pool-size {options.pool_size}` is more than the {available:,} images of the source"
            raise UserError(what, hint=f"use at most {available:,}")
        work = evaluate_model(
            embedder,
            measured,
            batch_size=(config.train.batch_size if config else None) or BATCH_SIZE,
            num_images=num_images,
            pool_size=options.pool_size,
            published=options.published,
            templates=options.templates or TEMPLATES,
            num_mistakes=options.num_mistakes,
            against=other,
        )
        return follow(work, requests, "evaluating") | about, measured.source


def check_numbers(num_validation: int | None, pool_size: int | None, mistakes: int | None) -> None:
    if num_validation is not None and (problem := SETTINGS["num_validation"].problem(num_validation)):
        raise UserError(f"`--num-validation` {problem}", hint="training uses 512")
    if pool_size is not None and pool_size < 2:
        raise UserError(f"`--pool-size` is {pool_size}", hint="use 2 or more; published tables use 1000")
    if mistakes is not None and not 0 <= mistakes <= MAX_MISTAKES:
        raise UserError(f"`--mistakes` is {mistakes}", hint=f"use 0 to {MAX_MISTAKES}")


def refuse_without_source(run: str) -> None:
    if not (Path(run).expanduser() / "model.safetensors").is_file():
        hint = f"name the model first: `lapclip eval RUN {shlex.quote(run)}`"
        raise UserError(f"`{run}` holds no model", hint=hint)
    hint = f"name a source: `lapclip eval {shlex.quote(run)} SOURCE`"
    raise UserError(f"`{run}` is a model without a source of its own", hint=hint)


def config_of(name: str) -> tuple[Config | None, Path | None]:
    """The settings and the folder of a run, or of the run of a checkpoint; None for other models."""
    from lapclip.runs.run import Run, open_run

    path = Path(name).expanduser()
    try:
        run = open_run(name)
    except UserError:
        if not path.is_dir():
            raise
        above = path.absolute().parents
        if path.absolute().parent.name != "checkpoints" or not (above[1] / "config.toml").is_file():
            return None, None
        run = Run(above[1])
    return run.load_config(), run.path


def page_path(named: Sequence[Path], folder: Path | None) -> Path:
    """Where the page is written; an error here comes before anything is measured."""
    path = named[0].expanduser() if named else (folder or Path()) / "evaluation.html"
    if path.suffix.lower() not in (".html", ".htm"):
        hint = "name the page `evaluation.html`, for example; a source goes before `--html`"
        raise UserError(f"`--html {path}` does not end in `.html`", hint=hint)
    from lapclip.view.html import refuse_foreign

    try:
        refuse_foreign(path)
    except UserError as problem:
        raise UserError(problem.message, hint="name another file: `--html FILE.html`") from None
    return path


def sheet_path(named: Path) -> Path:
    path = named.expanduser()
    if path.suffix.lower() != ".png":
        raise UserError(f"`--sheet` is `{path}`", hint="the sheet is a PNG, such as `mistakes.png`")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"`--sheet {path}` cannot be a file", hint="name a file in an existing folder")
    return path


def open_measured(
    config: Config | None, other: Config | None, options: Options, image_size: int, requests: Sequence[int]
) -> "tuple[EvaluationSet, dict[str, Any]]":
    """What to measure on, and its name; of a source that a model was trained on only the validation set."""
    from lapclip.data.open import open_source
    from lapclip.data.split import evaluation_set

    source, runs = options.source, [own for own in (config, other) if own is not None]
    if source is None:
        assert config is not None
        data, runs = config.data, [own for own in runs if names_in(own) & names_in(config)]
    else:
        data = load_config(flags={"source": source}).data
    if runs:
        # Packing and the share decide the split, so they are those of training. A smaller validation share is a
        # part of a larger one: the smallest was trained on by none.
        share = min(own.data.validation_share for own in runs)
        data = replace(data, pack=runs[0].data.pack, validation_share=share)
    opened = follow(open_source(replace(data, **options.data), image_size), requests, OPENING, is_kept=True)
    trained_on = set().union(*(names_in(own) for own in runs))
    is_own = source is None or any(part.name in trained_on for part in opened.parts)
    if is_own and source is not None:
        say("this source, or a part of it, was trained on: only its validation set is measured")
    measured = evaluation_set(opened, validation_only=is_own)
    if measured.own_sides:
        say(f"the source has a {' and a '.join(measured.own_sides)} split of its own: only that is measured")
    name = opened.source if source is None else source
    return measured, {"source": name, "held_out": is_own}


def names_in(config: Config) -> set[str]:
    """The sources that a run was trained on."""
    from lapclip.data.open import parse_source

    return {name for name, _ in parse_source(config.data.source)}


def show(result: Mapping[str, Any], num_mistakes: int) -> None:
    """Prints the result on stdout, within 80 columns."""
    from lapclip.view.evaluation import comparison, how_measured, zero_shot_words
    from lapclip.view.lines import recall_table

    screen = Console()
    images = "validation images" if result["held_out"] else "images"
    screen.print(recall_table(result, images), highlight=False)
    tell(screen, how_measured(result))
    if negatives := result.get("negatives"):
        levels = ", ".join(f"{level} {negatives[level]:.1%}" for level in ("easy", "medium", "hard"))
        what = f"hard: similar captions; chance {negatives['chance']:.0%}"
        tell(screen, f"The correct one of {negatives['num_choices']}: {levels} ({what})")
    if unreadable := result.get("unreadable"):
        named = ", ".join(shortened(name, 60) for name in unreadable[:NUM_UNREADABLE])
        tell(screen, f"{len(unreadable):,} images cannot be read and are omitted, such as {named}")
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


def table_of(title: str, **headings: bool) -> Table:
    """A table with these columns; numeric ones are right-aligned."""
    table = Table(title=Text(title, style="italic"), title_justify="left", box=box.SIMPLE)
    for heading, is_number in headings.items():
        justify: Literal["right", "left"] = "right" if is_number else "left"
        table.add_column(heading.replace("_", " "), justify=justify, no_wrap=is_number, overflow="fold")
    return table


def classes_table(classes: Sequence[Mapping[str, Any]]) -> Table:
    worst = sorted(classes, key=lambda c: (c["top1"], str(c["label"])))[:NUM_CLASSES]
    title = "by class" if len(classes) <= NUM_CLASSES else f"the {NUM_CLASSES} least accurate classes"
    columns = {"class": False, "images": True, "correct": True, "most_confused_with": False, "times": True}
    table = table_of(title, **columns)
    for c in worst:
        label, other = (Text(shortened(str(name or ""), 60)) for name in (c["label"], c["taken_for"]))
        times = f"{c['num_taken_for']:,}" if c["taken_for"] else ""
        table.add_row(label, f"{c['num_images']:,}", f"{c['top1']:.1%}", other, times)
    return table


def differences_table(result: Mapping[str, Any]) -> Table:
    from lapclip.view.evaluation import is_told, points_between, tests_of

    columns = {"": False, "points": True, "95%_interval": True, "p": True, "significant": False}
    table = table_of("the difference", **columns)
    for name, test in tests_of(result):
        points, interval = f"{100 * test['difference']:+.1f}", points_between(test, signed=True)
        table.add_row(name, points, interval, f"{test['p_value']:.2g}", "yes" if is_told(test) else "no")
    return table


def mistake_lines(mistakes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Two lines each, which fit into 80 columns: rank and caption; the images."""
    lines = ["the worst mistakes: the rank of the correct image, its name, what ranks first"]
    for mistake in mistakes:
        first = mistake["found"][0]["picture"] if mistake["found"] else "another"
        lines.append(f"{mistake['rank']:>8,}. {shortened(mistake['caption'], 65)}")
        lines.append(f"{'':10}{end_of(mistake['picture'])}; first: {end_of(first)}")
    return lines


def end_of(name: str, width: int = 30) -> str:
    """A printable name; of a long path its end."""
    shown = shortened(name, 10_000)
    return shown if len(shown) <= width else "..." + shown[3 - width :]


def next_step(result: Mapping[str, Any], arguments: Sequence[str], written: Mapping[str, str]) -> str:
    """One thing that is worth doing now."""
    found, classified = result["text_to_image"], result.get("zero_shot")
    is_chance = found["interval@1"][0] <= found["chance@1"]
    if classified:  # captions that are only class names ask few questions
        is_chance = classified["interval@1"][0] <= classified["chance"]
    if is_chance:
        return "this is not distinguishable from chance: measure on more images, or train longer"
    if "page" in written:
        return "open the page in a browser"
    return f"see its mistakes with their images: `lapclip eval {shlex.join(arguments)} --html`"


def write_files(
    result: Mapping[str, Any], source: "Source", page: Path | None, sheet: Path | None
) -> dict[str, str]:
    """Writes the page and the sheet if asked for, each whole or not at all; returns their paths."""
    written = {}
    if page is not None:
        from lapclip.view.evaluation import write_evaluation

        write_evaluation(page, result, small_images(source, result["mistakes"]))
        written["page"] = str(page)
    if sheet is not None:
        if draw_mistakes(sheet, source, result["mistakes"]):
            written["sheet"] = str(sheet)
        else:
            say("there are no mistakes to draw: no sheet is written")
    return written


def small_images(source: "Source", mistakes: Sequence[Mapping[str, Any]]) -> dict[int, bytes]:
    """A JPEG of each image of the mistakes; those that can no longer be read are omitted."""
    from lapclip.data.decode import Unreadable, as_jpeg

    images = {}
    for index in sorted({place["index"] for mistake in mistakes for place in (mistake, *mistake["found"])}):
        with suppress(Unreadable):  # of a streamed source
            images[index] = as_jpeg(source.image(index, IMAGE_SIZE).resize((IMAGE_SIZE, IMAGE_SIZE)))
    return images


def draw_mistakes(path: Path, source: "Source", mistakes: Sequence[Mapping[str, Any]]) -> bool:
    """A PNG: for each mistake its caption, the correct image in a frame, and what ranks before it; False if none."""
    from lapclip.data.decode import Unreadable
    from lapclip.view.sheet import NUM_FOUND, TILE, draw_found

    rows = []
    for mistake in mistakes[:MAX_DRAWN]:
        with suppress(Unreadable):
            places = [mistake, *mistake["found"]][:NUM_FOUND]
            images = [(source.image(place["index"], TILE), place is mistake) for place in places]
            rows.append((f"rank {mistake['rank']:,}: {shortened(mistake['caption'])}", images))
    if rows:
        draw_found(path, rows)
    return bool(rows)
