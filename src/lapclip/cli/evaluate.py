"""`lapclip eval`: recall and zero-shot accuracy beside chance and another model, and the worst mistakes."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from lapclip.cli.flags import AsJson, Switch, output_file, with_settings
from lapclip.cli.models import fetch_missing
from lapclip.cli.screen import OPENING, follow, on_screen, print_json, say, stop_requests, working
from lapclip.config import SETTINGS, Config, load_config
from lapclip.errors import UserError, printable, shortened, shortened_path, typed
from lapclip.units import plural

if TYPE_CHECKING:
    from lapclip.data.source import Source
    from lapclip.data.split import EvaluationSet
    from lapclip.runs.run import Run

NUM_LISTED, NUM_KEPT, MAX_MISTAKES = 10, 50, 1000  # in the terminal, in JSON and pages, and at most
BATCH_SIZE = 12  # for a model whose own is unknown
NUM_CLASSES = 8  # the worst ones are listed
NUM_UNREADABLE = 3  # files that are named
IMAGE_SIZE = 144  # pixels of an image on the page, which shows it smaller: for high-resolution screens
MANY_UNKNOWN = 0.5  # of the words of the captions: then the model cannot tell them apart
MAX_DRAWN = 50  # mistakes on a sheet, which is then 9,000 pixels high
OPTIONAL_FILE = Parameter(consume_multiple=(0, 1), negative="", show_default=False)


@with_settings("format", "images", "image_column", "caption_column")
def evaluate(
    run: str,
    source: str | None = None,
    *,
    num_validation: int | None = None,
    pool_size: int | None = None,
    published: Switch = False,
    against: str | None = None,
    template: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    mistakes: int | None = None,
    sheet: Path | None = None,
    html: Annotated[list[Path] | None, OPTIONAL_FILE] = None,
    json: AsJson = False,
    flags: dict[str, Any],
) -> int:
    """Measure how often the correct image is found by its caption, and the correct caption by its image.

    A source with classes, such as one folder per class, is also classified: zero-shot and few-shot.
    Few-shot learns from 1, 4 and 16 labelled images of each class, where most classes have more.

    Args:
        run: a run, by name or path (its best checkpoint), or a folder or file with a model
        source: source to evaluate on; by default the validation set of the run's source
        num_validation: number of images to search; by default as many as in training, or all of SOURCE
        pool_size: search exactly this many images at a time, so that results are comparable
        published: use the published protocol: other images with the same caption count as wrong
        against: another model to compare with on the same images
        template: a prompt for a class, such as `a photo of a {}`; repeatable
        mistakes: number of mistakes to list; by default 10 in the terminal, 50 in pages and JSON
        sheet: write the worst mistakes with their images as a PNG
        html: write an HTML page; by default `evaluation.html` in the run, or in this folder
    """
    from lapclip.data.formats.detect import refuse_missing
    from lapclip.runs.run import bases_of

    check_numbers(num_validation, pool_size, mistakes)
    fetch_missing(run, against)
    kept, listed = (default if mistakes is None else mistakes for default in (NUM_KEPT, NUM_LISTED))
    config, its_run = config_of(run, opens_source=source is None)
    folder = its_run.path if its_run else None
    if config is None and source is None:
        hint = "name a model and a source: `lapclip eval MODEL SOURCE`"
        raise UserError(f"`{run}` is not a run: there is no source to evaluate on", hint=hint)
    models = [(config, its_run), *([] if against is None else [config_of(against)])]
    for own, of in list(models):  # what those that they started from saw is not new either
        models += bases_of(own, of.path.parent if of else None) if own else []
    if source is not None:
        refuse_missing(source, flags.get("format"))
    hint = "name the page `evaluation.html`, for example; a source goes before `--html`"
    pages = html or [(folder or Path()) / "evaluation.html"]
    page = None if html is None else output_file(pages[0], ".html", ".htm", hint=hint)
    sheet = None if sheet is None else output_file(sheet, ".png")
    with working("starting"):
        from lapclip.embedder import label_prompts, load
        from lapclip.evaluate import full

        label_prompts(["label"], template or ["{}"])  # refuses wrong templates first
        embedder = load(run)
        other = None if against is None else load(against)
    with stop_requests("stopping; images that are already packed are kept") as requests:
        sizes = [model.image_size for model in (embedder, other) if model]
        measured, about = open_measured(models, source, flags, sizes, requests)
        if num_validation is None and source is None and pool_size is None and config is not None:
            num_validation = config.data.num_validation
        available = measured.source.num_different
        # Refuses before embedding, which takes minutes.
        full.divide(min(num_validation or available, available), pool_size)
        work = full.evaluate(
            embedder,
            measured,
            batch_size=(config.train.batch_size if config else None) or BATCH_SIZE,
            num_images=num_validation,
            pool_size=pool_size,
            published=published,
            templates=template or None,
            num_mistakes=kept,
            against=other,
        )
        result = follow(work, requests, "evaluating") | about
    if template and "zero_shot" not in result:
        say("this source has fewer than two classes: `--template` has no effect")
    if not json:  # before a file is written, which may fail
        show(result, listed)
    written = write_files(result, measured.source, page, sheet)
    if json:
        print_json(result | written)
        return 0
    for what, path in written.items():
        say(f"the {what}: {path}")
    say(f"next: {next_step(result, [run] if source is None else [run, source], folder, page is not None)}")
    return 0


def check_numbers(num_validation: int | None, pool_size: int | None, mistakes: int | None) -> None:
    if num_validation is not None and (problem := SETTINGS["num_validation"].problem(num_validation)):
        raise UserError(f"`--num-validation` {problem}", hint="training uses 512")
    if pool_size is not None and pool_size < 2:
        raise UserError(f"`--pool-size` is {pool_size}", hint="use 2 or more; published tables use 1000")
    if mistakes is not None and not 0 <= mistakes <= MAX_MISTAKES:
        raise UserError(f"`--mistakes` is {mistakes}", hint=f"use 0 to {MAX_MISTAKES}")


def config_of(name: str, *, opens_source: bool = False) -> "tuple[Config | None, Run | None]":
    """The settings of a run, or of the run of a checkpoint; None for other models."""
    from lapclip.files import WEIGHT_FILES
    from lapclip.runs.run import open_run, run_of
    from lapclip.weights.hub import local

    path = Path(name).expanduser()
    if (run := run_of(name)) is None:
        is_file = path.is_file() and path.name.endswith(WEIGHT_FILES)
        if path.is_dir() or is_file or local(name):
            return None, None
        run = open_run(name)  # which says what is wrong
    config = run.load_config()
    if opens_source:
        run.refuse_to_open(config, f"lapclip eval {typed(name)} SOURCE")
    return config, run


def open_measured(
    models: "Sequence[tuple[Config | None, Run | None]]",
    source: str | None,
    flags: dict[str, Any],
    image_sizes: Sequence[int],  # of the models
    requests: Sequence[int],
) -> "tuple[EvaluationSet, dict[str, Any]]":
    """What to measure on, and its name; only images that no model was trained on."""
    from lapclip.data.formats.folder import has_classes_too
    from lapclip.data.open import open_unseen
    from lapclip.data.split import evaluation_set

    config = models[0][0]
    was_classes = source is not None and config is not None and config.data.format == "classes"
    if source is not None and was_classes and flags.get("format") is None and has_classes_too(source):
        flags = flags | {"format": "classes"}
        used = "class folders are used, as in training, and not the captions of files"
        say(f"{used}: `--format` overrides this")
    trained = [own.data for own, _ in models if own]
    openable = [own.data for own, run in models if own and run and run.may_open(own)]
    data = config.data if config and source is None else load_config(flags={"source": source}).data
    work = open_unseen(replace(data, **flags), image_sizes[0], trained, openable)
    opened, shares, is_known = follow(work, requests, OPENING, is_kept=True)
    is_own = source is None or shares
    if opened.shares_images:
        say("some of these images were used for training: only the others are used")
    elif source is not None and shares:
        say("the model was trained on this source or a part of it: only its validation set is used")
    if not is_known:
        say("a source of training cannot be opened to compare: its training images may be among these")
    elif config is None and not shares:
        say("the model does not record what it was trained on: its training images may be among these")
    measured = evaluation_set(opened, validation_only=is_own)
    if len({*image_sizes}) > 1:
        for_other = evaluation_set(opened, validation_only=is_own, image_size=image_sizes[1]).source
        measured = replace(measured, for_other=for_other)
    if measured.own_sides:
        say(f"the source has a {' and a '.join(measured.own_sides)} split: only that is used")
    about = {"source": opened.source if source is None else source, "held_out": is_own}
    if format := opened.found.get("format"):
        about["format"] = format.value
        if source is not None and flags.get("format") is None:
            say(f"format: `{format.value}`, {format.why}; `--format` overrides it")
    return measured, about


def show(result: Mapping[str, Any], num_mistakes: int) -> None:
    """Prints the result on stdout, within 80 columns."""
    from lapclip.view.evaluation import class_tables, comparison_section, how_measured, zero_shot_words
    from lapclip.view.lines import recall_table

    screen = Console()
    screen.print(recall_table(result, "validation image" if result["held_out"] else "image"), highlight=False)
    tell(screen, how_measured(result))
    if negatives := result.get("negatives"):
        levels = ", ".join(f"{level} {negatives[level]:.1%}" for level in ("easy", "medium", "hard"))
        what = f"hard: similar captions; chance {negatives['chance']:.0%}"
        tell(screen, f"The correct one of {negatives['num_choices']}: {levels} ({what})")
    if unreadable := result.get("unreadable"):
        named = ", ".join(shortened_path(name, 60) for name in unreadable[:NUM_UNREADABLE])
        tell(screen, f"omitted: {plural(len(unreadable), 'image')} that cannot be read, such as {named}")
    if result.get("zero_shot"):
        screen.print()
        tell(screen, *zero_shot_words(result))
        (table,) = class_tables(result)
        screen.print(on_screen(replace(table, rows=table.rows[:NUM_CLASSES])))
        if (left := len(result["zero_shot"]["classes"]) - NUM_CLASSES) > 0:
            tell(screen, f"the {NUM_CLASSES} with the lowest accuracy; `--html` shows {left:,} more")
    if result.get("against"):
        screen.print()
        compared = comparison_section(result)
        tell(screen, *compared.words)
        screen.print(*map(on_screen, compared.tables))
    if num_mistakes and result["mistakes"]:
        screen.print()
        tell(screen, *mistake_lines(result["mistakes"][:num_mistakes]))


def tell(screen: Console, *sentences: str) -> None:
    for sentence in sentences:
        screen.print(printable(sentence), markup=False, highlight=False, soft_wrap=not screen.is_terminal)


def mistake_lines(mistakes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Two lines each, which fit into 80 columns: rank and caption; the images."""
    lines = ["the worst mistakes: the rank of the correct image, its name, what ranks first"]
    for mistake in mistakes:
        first = mistake["found"][0]["picture"] if mistake["found"] else "another"
        lines.append(f"{mistake['rank']:>8,}. {shortened(mistake['caption'], 65)}")
        lines.append(f"{'':10}{shortened_path(mistake['picture'], 30)}; first: {shortened_path(first, 30)}")
    return lines


def next_step(result: dict[str, Any], arguments: Sequence[str], folder: Path | None, has_page: bool) -> str:
    """One thing that is worth doing now; `folder` is that of the run."""
    from lapclip.runs.history import is_chance, summarize
    from lapclip.runs.run import Run

    is_as_chance = is_chance(result)
    if classified := result.get("zero_shot"):  # captions that are only class names ask few questions
        is_as_chance &= classified["interval@1"][0] <= classified["chance"]
    unknown = result["share_unknown_words"]
    if unknown is not None and unknown > MANY_UNKNOWN:
        return f"{unknown:.0%} of the words of these captions are in no training caption: train on captions like these"
    if is_as_chance and folder and (over_fits := summarize(Run(folder)).over_fits):
        return f"this is not significantly better than chance; in training, {over_fits}"
    if is_as_chance:
        return "this is not significantly better than chance: evaluate on more images, or train longer"
    if has_page:
        return "open the page in a browser"
    return f"see its mistakes with their images: `lapclip eval {shlex.join(arguments)} --html`"


def write_files(
    result: Mapping[str, Any], source: "Source", page: Path | None, sheet: Path | None
) -> dict[str, str]:
    """Writes the page and the sheet if asked for, each whole or not at all; returns their paths."""
    written, mistakes = {}, result["mistakes"]
    if page is not None:
        from lapclip.files import write_atomically
        from lapclip.view.evaluation import evaluation_page

        write_atomically(page, evaluation_page(result, small_images(source, mistakes)))
        written["page"] = str(page)
    if sheet is not None and draw_mistakes(sheet, source, mistakes):
        written["sheet"] = str(sheet)
    elif sheet is not None:
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
