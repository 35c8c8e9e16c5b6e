"""Prints a table of trained runs, read from their folders: command, machine, commit, speed, recall.

python tools/results.py RUN ... [--write]    # --write replaces the table in docs/results.md
"""

import argparse
import shlex
from pathlib import Path

from lapclip.autotune.resolve import LOOKS
from lapclip.config import SETTINGS, SHAPE
from lapclip.runs.history import Summary, summarize
from lapclip.runs.run import open_run
from lapclip.units import duration

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results.md"
BEGIN, END = "<!-- runs: begin (written by tools/results.py) -->", "<!-- runs: end -->"
HEAD = "command | machine | commit | pairs/s | training | validation images | recall@1, text → image | @10"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", help="runs, by name or path")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/results.md")
    asked = parser.parse_args()
    table = table_of([summarize(open_run(run)) for run in asked.runs])
    if asked.write:
        before, rest = PAGE.read_text("utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{rest.split(END)[1]}", "utf-8")
    else:
        print(table)


def table_of(summaries: list[Summary]) -> str:
    rule = "|".join(["---"] * (HEAD.count("|") + 1))
    rows = [f"| {HEAD} |", f"|{rule}|", *(f"| {' | '.join(row_of(summary))} |" for summary in summaries)]
    return "\n".join(rows) + "\n"


def row_of(summary: Summary) -> list[str]:
    history, machine, recall = summary.history, summary.machine, summary.history.recall
    if summary.state != "finished" or recall is None:
        raise SystemExit(f"error: run `{summary.run.name}` is {summary.state}, not finished with a recall")
    chip, cores, torch = (machine[name] for name in ("chip", "num_cores", "torch"))
    found = recall["text_to_image"]
    return [
        f"`{command_of(summary)}`",
        f"{chip}, {cores} cores, {summary.settings['device']}, torch {torch}",
        str(machine.get("commit") or f"version {machine['lapclip']}")[:12],
        f"{history.pairs_per_second or 0:,.0f}",
        f"{duration(history.seconds)}, {history.num_pairs_seen:,} pairs",
        f"{recall['num_images']:,}",
        *(f"{found[f'recall@{k}']:.1%} (chance {found[f'chance@{k}']:.1%})" for k in (1, 10)),
    ]


def command_of(summary: Summary) -> str:
    """The command that was typed: what was asked for, and what differs from a fixed default."""
    words, origins = ["lapclip", "train"], summary.machine.get("origins", {})
    decided = dict.fromkeys(
        (*SHAPE, *LOOKS, "shape"), "default"
    )  # without an origin where there was no choice
    for name, setting in SETTINGS.items():
        value, origin = summary.settings.get(name), (decided | origins).get(name)
        if origin != "asked" and (origin or value in (None, setting.field.default)):
            continue
        if isinstance(value, str):  # the folders of whoever trained it say nothing to others
            value = " + ".join(p.rsplit("/", 1)[-1] if p[:1] in ("/", "~") else p for p in value.split(" + "))
        if name == "source":
            words.insert(2, str(value))
        elif isinstance(value, bool):
            words.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
        else:
            words += [setting.flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


if __name__ == "__main__":
    main()
