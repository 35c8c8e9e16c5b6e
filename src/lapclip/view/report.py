"""What a run came to, in words, tables and curves, as one page to keep: run folders in, HTML or Markdown out."""

from collections.abc import Sequence
from pathlib import Path

from lapclip.errors import UserError, code, one_line, shortened
from lapclip.files import write_atomically
from lapclip.runs.history import Summary, find, summarize
from lapclip.runs.run import Run
from lapclip.units import UNKNOWN, count, duration, number, plural, rate, share
from lapclip.view.charts import name_of
from lapclip.view.html import SIGN, as_page
from lapclip.view.markdown import as_markdown
from lapclip.view.section import Section
from lapclip.view.sections import compared, sections_of

NUM_BYTES_READ = 2000  # enough to know a report by


def write_report(run: Run) -> Path:
    """Writes `report.html` into the run folder."""
    records = [summarize(run)]
    return write_page(records, sections_for(records), run.path / "report.html")


def write_page(records: Sequence[Summary], sections: Sequence[Section], path: Path) -> Path:
    """Writes the report of a run, or of several side by side; a file that is no report of ours is left alone."""
    refuse_foreign(path)
    about, tiles = ("", []) if len(records) > 1 else (about_of(records[0]), tiles_of(records[0]))
    write_atomically(path, as_page(title_of(records), about, tiles, sections))
    return path


def to_markdown(records: Sequence[Summary]) -> str:
    return as_markdown(title_of(records), sections_for(records))


def sections_for(records: Sequence[Summary]) -> list[Section]:
    return sections_of(records[0]) if len(records) == 1 else compared(records)


def title_of(records: Sequence[Summary]) -> str:
    return (
        one_line(records[0].run.name)
        if len(records) == 1
        else " | ".join(name_of(record) for record in records)
    )


def about_of(record: Summary) -> str:
    """One line below the title: size, source, machine, state."""
    parts = [
        record.settings.get("size"),
        record.settings.get("source"),
        record.machine.get("chip"),
        record.state,
    ]
    return " · ".join(shortened(one_line(part), 80) for part in parts if part)


def tiles_of(record: Summary) -> list[tuple[str, str, str]]:
    """The numbers one asks for first."""
    recall, step, evaluated = record.history.recall, record.history.step, record.history.evaluated
    started = record.history.started
    validation = (
        f"held-out {number(evaluated.loss)}" if evaluated and evaluated.loss is not None else "training"
    )
    tiles = [
        (
            f"recall@{k}",
            share(find(recall, "text_to_image", f"recall@{k}")),
            f"chance {share(find(recall, 'text_to_image', f'chance@{k}'))}",
        )
        for k in (1, 10)
    ]
    tiles += [
        ("loss", number(record.history.recently("loss")), validation),
        (
            "training time",
            duration(record.history.seconds) if step else UNKNOWN,
            plural(record.history.num_steps, "step"),
        ),
        (
            "pairs a second",
            rate(record.history.pairs_per_second),
            f"batches of {count(started.batch_size)}" if started else "",
        ),
    ]
    return [tile for tile in tiles if tile[1] != UNKNOWN]


def refuse_foreign(path: Path) -> None:
    """Refuses to write over what lapclip did not write."""
    if path.exists() and not path.is_file():
        raise UserError(f"{code(path)} is not a file", hint="name a file; `--markdown` prints on stdout")
    if not path.absolute().parent.is_dir():
        raise UserError(
            f"there is no folder {code(path.parent)}", hint="make the folder first, or name another file"
        )
    try:
        with path.open("rb") as file:
            start = file.read(NUM_BYTES_READ)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(
            f"cannot write {code(path)}: {(error.strerror or str(error)).lower()}", hint="name another file"
        ) from None
    if SIGN.encode() not in start:
        raise UserError(
            f"{code(path)} is there already and is no report of lapclip",
            hint="name another file with `--output`, or move that one away",
        )
