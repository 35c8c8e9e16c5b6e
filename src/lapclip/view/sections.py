"""A report as data, in the order it is read: what the writers of HTML and Markdown are given."""

from collections.abc import Sequence

from lapclip.errors import one_line, shortened
from lapclip.runs.history import Summary, find
from lapclip.units import count
from lapclip.view import summary
from lapclip.view.charts import charts_of, name_of, overlaid, phases_in_words
from lapclip.view.facts import (
    comparison_words,
    config_text,
    differing_table,
    machine_table,
    provenance_table,
    results_table,
    settings_table,
)
from lapclip.view.learning import (
    found_section,
    gradients_section,
    negatives_section,
    phases_section,
    stretches_section,
    temperature_section,
)
from lapclip.view.resources import cores_section, energy_section, memory_section, time_section
from lapclip.view.section import Section, Table
from lapclip.view.stretches import stretches_of
from lapclip.view.suggestions import suggestions


def sections_of(record: Summary) -> list[Section]:
    """Everything there is to say about one run; what has no data is left out or says so."""
    stretches = stretches_of(record)
    said = [
        Section("Summary", summary.sentences(record)),
        Section("What to try next", points=suggestions(record)),
        found_section(record),
        Section("Curves", phases_in_words(record), charts=charts_of(record)),
        stretches_section(record, stretches),
        phases_section(record, stretches),
        temperature_section(stretches),
        gradients_section(record),
        negatives_section(record),
        time_section(record),
        memory_section(record),
        cores_section(record),
        energy_section(record, stretches),
        warnings_section(record),
        Section("Settings", tables=settings_table(record)),
        Section("Machine", tables=machine_table(record)),
        Section(
            "To repeat it",
            provenance_words(record),
            tables=provenance_table(record),
            text=config_text(record),
        ),
    ]
    return [section for section in said if section.has_content]


def compared(records: Sequence[Summary]) -> list[Section]:
    """Several runs side by side."""
    differing = differing_table(records)
    said = [
        Section("Summary", comparison_words(records), tables=[results_table(records)]),
        Section(
            "What differs",
            [] if differing else ["Nothing: settings and machine are the same."],
            tables=differing,
        ),
        Section("Curves", charts=overlaid(records)),
        *(Section(name_of(record), summary.sentences(record)) for record in records),
    ]
    return [section for section in said if section.has_content]


def warnings_section(record: Summary) -> Section:
    seen: dict[tuple[str, str], list[int]] = {}
    for warned in record.history.warnings:
        seen.setdefault((one_line(warned.message), one_line(warned.hint)), []).append(warned.step)
    rows = [
        (count(steps[0]), str(len(steps)), shortened(message, 300), shortened(hint, 300))
        for (message, hint), steps in list(seen.items())[:50]
    ]
    if not rows:
        return Section("Warnings", ["None."] if record.history.num_steps else [])
    return Section("Warnings", tables=[Table("Warnings", ("step", "times", "warning", "what to do"), rows)])


def provenance_words(record: Summary) -> list[str]:
    if not record.config[0]:
        return ["The settings of this run could not be read, so it cannot be repeated from this page."]
    where = f"`lapclip train --config {one_line(record.run.path)}/config.toml`"
    words = [f"{where} repeats it; the file, whole, is below."]
    if find(record.settings, "minutes") is not None and record.history.num_steps:
        words.append(
            "Its budget is time, so another machine, or this one on another day, makes more steps or fewer; "
            f"`--steps {record.history.num_steps}` makes as many as here."
        )
    elif record.settings.get("device") == "cpu":
        words.append("On a CPU, with the same versions and threads, the same seed gives the same numbers.")
    return words
