"""`lapclip eval`: how well a model finds, beside chance, beside another model, and where it is wrong."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lapclip.cli.flags import AsJson, with_settings
from lapclip.cli.screen import OPENING, follow, print_json, say, stop_requests, working
from lapclip.config import SETTINGS, Config, load_config
from lapclip.errors import UserError

if TYPE_CHECKING:
    from lapclip.data.measured import Measured

NUM_LISTED, NUM_KEPT, MOST_KEPT = 10, 50, 1000  # mistakes in the terminal, in JSON and pages, and at most
BATCH_SIZE = 12  # for a model whose own is not known


@with_settings("format", "images", "image_column", "caption_column")
def evaluate(
    run: Annotated[
        str, Parameter(help="a run, by name or path (its best checkpoint), or a folder with a model")
    ],
    source: Annotated[
        str | None, Parameter(help="what to measure on, if not the held-out pairs of the run's own source")
    ] = None,
    *,
    num_validation: Annotated[
        int | None,
        Parameter(help="images to search among; by default as many as in training, or all of SOURCE"),
    ] = None,
    pool_size: Annotated[
        int | None,
        Parameter(help="search among exactly so many images at a time, so that figures can be compared"),
    ] = None,
    published: Annotated[
        bool,
        Parameter(help="as published tables do: equal captions of other images are wrong", negative=""),
    ] = False,
    against: Annotated[
        str | None, Parameter(help="another model: how much better or worse it is on the same images")
    ] = None,
    template: Annotated[
        tuple[str, ...],
        Parameter(
            help="how to ask for a class, such as `a photo of a {}`; repeat it for several",
            negative="",
            show_default=False,
        ),
    ] = (),
    mistakes: Annotated[
        int | None,
        Parameter(
            help=f"how many to list; {NUM_LISTED} in the terminal, {NUM_KEPT} in pages and JSON by default"
        ),
    ] = None,
    sheet: Annotated[Path | None, Parameter(help="draw the worst mistakes with their images: a PNG")] = None,
    html: Annotated[
        list[Path] | None,
        Parameter(
            help="write a page to keep; by default `evaluation.html` in the run, or here",
            consume_multiple=(0, 1),
            negative="",
            show_default=False,
        ),
    ] = None,
    json: AsJson = False,
    flags: dict[str, Any],
) -> int:
    """Measure how often the right image is found for its words, and the right words for an image.

    A source with classes, such as a folder of folders, is also named without training for it (zero-shot).
    """
    refuse_numbers(num_validation, pool_size, mistakes)
    refuse_templates(template)
    config, folder = own_config(run)
    other_config = None if against is None else own_config(against)[0]
    if config is None and source is None:
        if not (Path(run).expanduser() / "model.safetensors").is_file():
            raise UserError(
                f"`{run}` holds no model", hint=f"name the model first: `lapclip eval RUN {shlex.quote(run)}`"
            )
        raise UserError(
            f"`{run}` is a model without a source of its own",
            hint=f"say what to measure it on: `lapclip eval {shlex.quote(run)} SOURCE`",
        )
    page = None if html is None else page_path(html, folder)
    sheet = None if sheet is None else sheet_path(sheet)
    with working("starting"):
        from lapclip.embedder import TEMPLATES, load
        from lapclip.evaluate.full import evaluate as run_evaluation

        embedder = load(run)
        other = None if against is None else load(against)
    with stop_requests("stopping; what is packed already is kept") as requests:
        size = max(embedder.image_size, other.image_size if other else 0)
        measured, about = open_measured(config, other_config, source, size, flags, requests)
        num_images = num_validation
        if num_images is None and source is None and pool_size is None and config is not None:
            num_images = config.data.num_validation
        num_there = measured.source.num_different
        refuse_pool(pool_size, num_there if num_images is None else min(num_images, num_there))
        work = run_evaluation(
            embedder,
            measured,
            batch_size=(config.train.batch_size if config else None) or BATCH_SIZE,
            num_images=num_images,
            pool_size=pool_size,
            published=published,
            templates=template or TEMPLATES,
            num_mistakes=NUM_KEPT if mistakes is None else mistakes,
            against=other,
        )
        result = follow(work, requests, "evaluating") | about
    from lapclip.cli.evaluated import next_step, show, write_files

    if template and "zero_shot" not in result:
        say("there are not two classes in this source, so that `--template` changes nothing")
    if not json:  # before a file is written, which may fail
        show(result, NUM_LISTED if mistakes is None else mistakes)
    written = write_files(result, measured.source, page, sheet)
    if json:
        print_json(result | written)
        return 0
    for what, path in written.items():
        say(f"the {what}: {path}")
    say(f"next: {next_step(result, [run] if source is None else [run, source], written)}")
    return 0


def refuse_numbers(num_validation: int | None, pool_size: int | None, mistakes: int | None) -> None:
    if num_validation is not None and (problem := SETTINGS["num_validation"].problem(num_validation)):
        raise UserError(f"`--num-validation` {problem}", hint="512 is what training uses")
    if pool_size is not None and pool_size < 2:
        raise UserError(
            f"`--pool-size` is {pool_size}, and there is nothing to find in that",
            hint="1000 is what published tables use",
        )
    if mistakes is not None and not 0 <= mistakes <= MOST_KEPT:
        raise UserError(f"`--mistakes` is {mistakes}", hint=f"it may be 0 to {MOST_KEPT}")


def refuse_pool(pool_size: int | None, num_images: int) -> None:
    """Before anything is embedded, which may take minutes."""
    if pool_size is not None and pool_size > num_images:
        raise UserError(
            f"`--pool-size {pool_size}` is more than the {num_images:,} images there are to measure on",
            hint=f"ask for at most {num_images:,}",
        )


def refuse_templates(templates: Sequence[str]) -> None:
    for template in templates:
        if "{}" not in template:
            raise UserError(
                f"the template `{template}` has no `{{}}` where the class goes",
                hint="write it so: `--template 'a photo of a {}'`",
            )


def own_config(name: str) -> tuple[Config | None, Path | None]:
    """The settings and the folder of the run that is meant, or that a checkpoint lies in; of other models nothing."""
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
    """Where the page goes; refused before anything is measured, if it cannot."""
    path = named[0].expanduser() if named else (folder or Path()) / "evaluation.html"
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"`--html {path}` does not end in `.html`",
            hint="name the page `evaluation.html`, or alike; a source stands before `--html`",
        )
    from lapclip.view.html import refuse_foreign

    try:
        refuse_foreign(path)
    except UserError as problem:
        raise UserError(problem.message, hint="name another file: `--html FILE.html`") from None
    return path


def sheet_path(named: Path) -> Path:
    """Where the sheet goes; refused before anything is measured, if it cannot."""
    path = named.expanduser()
    if path.suffix.lower() != ".png":
        raise UserError(f"`--sheet` is `{path}`", hint="the sheet is a PNG: name it `mistakes.png`, or alike")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(
            f"`--sheet {path}` cannot be a file there", hint="name a file in a folder that is there"
        )
    return path


def open_measured(
    config: Config | None,
    other: Config | None,
    source: str | None,
    image_size: int,
    flags: dict[str, Any],
    requests: Sequence[int],
) -> "tuple[Measured, dict[str, Any]]":
    """What to measure on, and its name. Of what one of the models was trained on, only what was held out."""
    from lapclip.data.measured import to_measure
    from lapclip.data.open import open_source

    runs = [own for own in (config, other) if own is not None]
    if source is None:
        assert config is not None
        data, runs = config.data, [own for own in runs if names_in(own) & names_in(config)]
    else:
        data = load_config(flags={"source": source}).data
    if runs:
        # Packed or not, and how much is held out, as in training: it decides the split. A smaller share is a part
        # of a larger one, so that the smallest was held out by all.
        share = min(own.data.validation_share for own in runs)
        data = replace(data, pack=runs[0].data.pack, validation_share=share)
    opened = follow(open_source(replace(data, **flags), image_size), requests, OPENING, is_kept=True)
    trained_on = set().union(*(names_in(own) for own in runs))
    is_own = source is None or any(part.name in trained_on for part in opened.parts)
    if is_own and source is not None:
        say("this source, or a part of it, was trained on: only what was held out is measured")
    measured = to_measure(opened, validation_only=is_own)
    if measured.own_sides:
        say(f"the source has a {' and a '.join(measured.own_sides)} part of its own: only that is measured")
    name = opened.source if source is None else source
    return measured, {"source": name, "held_out": is_own}


def names_in(config: Config) -> set[str]:
    """The sources that a run was trained on."""
    from lapclip.data.open import parse_source

    return {name for name, _ in parse_source(config.data.source)}
