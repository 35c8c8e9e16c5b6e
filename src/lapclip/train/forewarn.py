"""What should be known before training begins, mostly of the data, as warnings of a run."""

from collections.abc import Iterator

from lapclip.data.open import Data, first_unreadable
from lapclip.data.source import Source
from lapclip.data.tokenizer import Tokenizer
from lapclip.machine.power import read_battery
from lapclip.runs.events import Warned
from lapclip.runs.run import Run
from lapclip.train.prepare import sample_captions


def warnings_of(
    data: Data, run: Run, tokenizer: Tokenizer, text_length: int, step: int, pause_below: str | None
) -> Iterator[Warned]:
    """What should be known before training begins."""
    if pause_below is not None and read_battery() is None:
        yield Warned(
            step,
            message=f"no battery can be read here, so training never pauses for one below {pause_below}",
            hint="omit `--pause-below` on this machine",
            kind="no-battery",
        )
    if step and has_changed(run, data):
        yield Warned(
            step,
            message="the source has changed since the run began",
            hint="training goes on with what is there now; for a fresh start, begin a new run",
        )
    for part in data.parts:
        if part.files is None:
            continue
        if part.files.is_streamed:
            yield Warned(
                step,
                message=f"`{part.name}` is not packed: its images are decoded anew in every epoch",
                hint="`lapclip data pack` says how much room a pack needs",
            )
        for what, count in part.files.catalogue.problems.counts.most_common(3):
            name = part.files.catalogue.problems.names[what][0]
            yield Warned(
                step,
                message=f"`{name}` {what}" + (f", and so {count - 1:,} more" if count > 1 else ""),
                hint=f"`lapclip data check --json {part.name}` names them",
            )
        if broken := part.files.pack.unreadable:
            yield Warned(
                step,
                message=f"{len(broken):,} of {len(part.files.catalogue.names):,} images are left out: "
                f"{first_unreadable(part.files.catalogue, part.files.pack)}",
                hint=f"`lapclip data check --json {part.name}` names them all",
            )
    if cut := captions_cut(data.training, tokenizer, text_length, step):
        yield cut


def has_changed(run: Run, data: Data) -> bool:
    return run.load_machine().get("data") not in (None, data.fingerprint)


def captions_cut(source: Source, tokenizer: Tokenizer, text_length: int, step: int) -> Warned | None:
    """A warning when many captions lose their end."""
    lengths = tokenizer.lengths(sample_captions(source, 1000))
    share = float((lengths > text_length).mean())
    if share < 0.01:
        return None
    return Warned(
        step,
        message=f"{share:.0%} of the captions are longer than {text_length} tokens and lose their end",
        hint=f"`--text-length {int(lengths.max())}` would keep them whole, at some cost in time",
    )
