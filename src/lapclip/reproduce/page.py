"""The documents' experiment as one document: their figures beside ours, curves of both runs, and every system."""

from dataclasses import asdict, astuple
from typing import Any

from lapclip.reproduce.figures import BATCH_SIZE, EPOCHS, Evidence, Verdict, rows_of
from lapclip.reproduce.systems import NOT_YET, SYSTEMS
from lapclip.runs.history import Summary
from lapclip.units import duration, percent
from lapclip.view.charts import SHARES, overlaid, with_data
from lapclip.view.document import Chart, Document, Line, Section, Table, columns_of
from lapclip.view.report import results_table
from lapclip.view.resources import machine_section

TITLE = "The documents' experiment, reproduced"
MEANING = {
    Verdict.AGREES: "within the stated margin or the noise",
    Verdict.DIFFERS: "ours is another number, for the reason given",
    Verdict.CANNOT_HOLD: "contradicts arithmetic, or the documents themselves",
    Verdict.NOT_MEASURED: "not possible here, or only by the full command",
}


def document_of(evidence: Evidence) -> Document:
    theirs, own, rows = evidence.summary, evidence.own, rows_of(evidence)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in Verdict}
    tiles = [(str(verdict), str(counts[verdict]), meaning) for verdict, meaning in MEANING.items()]
    columns = columns_of("figure, documents, lapclip, verdict, why")
    figures = Table("Figures", columns, [astuple(row) for row in rows])
    systems = Table("Systems", columns_of("number: count, system, where, command"), [
        (n, s.name, f"`src/lapclip/{s.where}`" if s.command else NOT_YET, f"`{s.command}`" if s.command else NOT_YET)
        for n, s in enumerate(SYSTEMS, 1)
    ])  # fmt: skip
    sections = [
        Section("Summary", sentences([theirs, own])),
        Section("Figures", tables=[figures], charts=epoch_charts(evidence)),
        Section("The same minutes with lapclip's data and recipe", tables=[results_table([theirs, own])],
                charts=overlaid([theirs, own])),
        Section("Systems", tables=[systems], is_wide=True),
        machine_section(theirs),
    ]  # fmt: skip
    about = (
        "One CLIP of 76.7 million parameters, 240 drawn pairs, 15 epochs: the run on an M1 MacBook that five documents "
        "describe, and that lapclip grew from."
    )
    footer = "Written by `lapclip reproduce` from the events of two runs."
    return Document(TITLE, "lapclip reproduce", about, sections, tiles, footer)


def sentences(summaries: list[Summary]) -> list[str]:
    said = [
        f"`{summary.run.name}`: {duration(summary.history.seconds)} of training, recall@1 {percent(summary.recall_1)} "
        f"of {summary.num_validation} images (chance {percent(summary.history.recall['text_to_image']['chance@1'])})."
        for summary in summaries
        if summary.history.recall
    ]
    said.append(
        f"In the documents' data only the category can be learned: in a batch of {BATCH_SIZE} pairs, about three "
        "captions fit an image equally well. Their validation accuracy is within the noise of guessing, so nothing "
        "shows that what their model learned holds for other pairs. In lapclip's data the caption says what is drawn."
    )
    return said


def epoch_charts(evidence: Evidence) -> list[Chart]:
    """Loss, accuracy and temperature by epoch, with the documents' values as dots."""
    charts, ours = [], evidence.epochs
    for place, name in enumerate(("loss", "accuracy", "temperature")):
        lines = [
            Line("documents", [(float(n), values[place]) for n, values in EPOCHS.items()], 1, "dots"),
            Line("lapclip", [(float(n), getattr(epoch, name)) for n, epoch in ours.items()], 0, "dots"),
        ]
        look = SHARES if name == "accuracy" else {}
        charts.append(Chart(f"{name.capitalize()} by epoch", "means in training", lines, **look))
    return with_data(charts, axis="epoch", span=(1, 15))


def as_json(evidence: Evidence) -> dict[str, Any]:
    runs = {"documents": evidence.summary, "lapclip": evidence.own}
    systems = [
        asdict(system) | {"number": n, "exists": bool(system.command)} for n, system in enumerate(SYSTEMS, 1)
    ]
    return {
        "rows": [asdict(row) for row in rows_of(evidence)],
        "systems": systems,
        "runs": {name: str(summary.run.path) for name, summary in runs.items()},
        "results": {name: summary.results() for name, summary in runs.items()},
    }
