"""Several runs side by side, as sections of one report."""

from collections.abc import Sequence

from lapclip.report import summary
from lapclip.report.curves import name_of, overlaid
from lapclip.report.facts import comparison_words, differing_table, results_table
from lapclip.report.record import Record
from lapclip.report.section import Section


def compared(records: Sequence[Record]) -> list[Section]:
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
