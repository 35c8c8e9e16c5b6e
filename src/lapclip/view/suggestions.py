"""What to try next after a run, most useful first."""

from lapclip.errors import code, one_line, shortened
from lapclip.runs.history import Summary, find
from lapclip.view.summary import WAITS, is_near_chance, last_quarter, memory_share, validation_rise

HIGH_LR = 5e-3  # above, it may be why nothing is learned
SPOILS = ("collapsed", "exploding-gradients", "vanishing-gradients", "duplicate-captions")  # a whole run


def suggestions(record: Summary) -> list[str]:
    """What to try next, most useful first; commands as one would type them."""
    name = one_line(record.run.reference)
    resume, said = f"lapclip train --resume {name}", []
    match record.state:
        case "stopped" | "crashed":
            said.append(f"Go on from where it stands: {code(resume)}.")
        case "failed" if record.failed:
            hint = shortened(one_line(record.failed.hint)).rstrip(".")
            said.append(f"{hint[:1].upper()}{hint[1:]}.")
    grave = [w for w in record.history.warnings if w.kind in SPOILS]
    for warned in grave[-1:]:
        hint = shortened(one_line(warned.hint)).rstrip(".")
        said.append(f"{hint[:1].upper()}{hint[1:]}.")
    if is_near_chance(record) and not grave:
        said.append(advice_near_chance(record))
    rise, quarter = validation_rise(record), last_quarter(record)
    if record.state == "finished" and quarter and quarter.direction > 0 and not rise:
        said.append(f"Give it as long again, it was not done: {code(resume + twice(record))}.")
    if rise and not (quarter and quarter.direction > 0):
        said.append(
            "Use more pairs, or show them more differently (`--crop 0.6 --flip`); "
            "the best checkpoint is from before and is what `lapclip eval` loads."
        )
    waiting, workers = record.history.data_share, record.settings.get("workers")
    if waiting is not None and waiting >= WAITS and isinstance(workers, int):
        said.append(f"Prepare batches ahead with another process: `--workers {workers + 1}`.")
    if memory_share(record) and isinstance(chunk := record.settings.get("chunk"), int) and chunk > 1:
        said.append(f"Hold fewer pairs at once, with the same gradients: `--chunk {chunk // 2}`.")
    if record.history.recall is not None and record.state in ("finished", "stopped"):
        said.append(f"Measure it on other images: {code(f'lapclip eval {name} FOLDER')}.")
    return said[:4]


def advice_near_chance(record: Summary) -> str:
    source, lr = one_line(record.settings.get("source", "")), find(record.settings, "lr")
    if lr is not None and lr > HIGH_LR:
        return "Try a lower learning rate: `--lr 0.001`."
    if source and not source.startswith("synthetic"):
        return f"See whether the captions belong to their images: {code(f'lapclip data check {source}')}."
    return "Give it more time: it has hardly begun to learn."


def twice(record: Summary) -> str:
    """The flag that gives a run as much again, in the kind of budget it had."""
    for budget in ("minutes", "epochs", "steps"):
        if (amount := find(record.settings, budget)) is not None:
            return f" --{budget} {2 * amount:g}" if budget != "steps" else f" --steps {2 * amount:.0f}"
    return ""
