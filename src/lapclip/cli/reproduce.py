"""`lapclip reproduce`: the experiment that lapclip grew from, and its figures beside ours."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lapclip.cli.flags import AsJson, Switch, output_file, refuse_together
from lapclip.cli.screen import follow, own_name, print_json, print_table, say, stop_requests, working
from lapclip.cli.train import begin, go_on, show_training
from lapclip.errors import printable

if TYPE_CHECKING:
    from lapclip.reproduce.figures import Row
    from lapclip.runs.history import Summary


def reproduce(
    *,
    quick: Switch = False,
    out: Annotated[Path, Parameter(name=("--out", "--output"))] = Path("reproduction.html"),
    markdown: Switch = False,
    json: AsJson = False,
) -> int:
    """Repeat the experiment of the documents that lapclip grew from, and compare every figure.

    Trains their model on their kind of data, then lapclip's default for the same minutes.
    Takes 20 minutes to an hour on two cores. Ctrl-C saves, and the same command continues.
    Both are ordinary runs, `reproduce-documents` and `reproduce-lapclip`.

    Args:
        quick: two epochs and half a minute instead, as runs of their own; what they cannot show is not measured
        out: the page to write, with plots
        markdown: print it as Markdown on stdout instead of writing a page
    """
    refuse_together(markdown=markdown, json=json)
    page = output_file(out, ".html")
    prefix = "reproduce-quick" if quick else "reproduce"
    with stop_requests("stopping after saving") as requests:
        with working("starting"):
            from lapclip.reproduce.experiment import measure, settings_of
            from lapclip.reproduce.figures import rows_of
            from lapclip.reproduce.page import as_json, document_of

        theirs = trained(f"{prefix}-documents", settings_of("documents", quick=quick), requests)
        minutes = theirs.history.seconds / 60 if theirs else 0.0
        settings = settings_of("lapclip", quick=quick, minutes=minutes)
        own = trained(f"{prefix}-lapclip", settings, requests) if theirs else None
        if theirs is None or own is None:
            say(f"to continue with all of it: `{own_name()} reproduce{' --quick' * quick}`")
            return 130
        evidence = follow(measure(theirs, own, quick=quick), requests, "measuring")
    if json:
        print_json(as_json(evidence))
        return 0
    document = document_of(evidence)
    if markdown:
        from lapclip.view.markdown import as_markdown

        sys.stdout.write(as_markdown(document))
        return 0
    from lapclip.view.html import write_html

    write_html(document, page)
    show(rows_of(evidence))
    say("the page, with the curves, and where each of the documents' systems is:")
    sys.stdout.write(f"{printable(str(page))}\n")
    return 0


def trained(name: str, flags: dict[str, Any], requests: list[int]) -> "Summary | None":
    """The finished run of this name, trained or continued where it is not finished; None if somebody stopped it."""
    from lapclip.runs.history import summarize
    from lapclip.runs.run import RUNS, Run, is_run

    if is_run(RUNS / name) and (known := summarize(Run(RUNS / name))).state == "finished":
        say(f"run: {known.run.path}, finished before; `lapclip runs remove {name}` to train it again")
        return known
    begun = (
        go_on(name, {}, requests, None) if is_run(RUNS / name) else begin(None, name, flags, requests, None)
    )
    run, config, data, cached = begun
    if requests or show_training(config, run, data, requests, cached, as_json=False, verbose=False):
        return None
    return summarize(run)


def show(rows: "list[Row]") -> None:
    """The figures; their reasons below, by number, since many rows have the same one."""
    number_of = {why: number for number, why in enumerate(dict.fromkeys(row.why for row in rows), 1)}
    cells = [(row.figure, row.documents, row.lapclip, str(row.verdict), number_of[row.why]) for row in rows]
    print_table("figure, documents, lapclip, verdict, why: count", cells, "Figures")
    reasons = [(number, why) for why, number in number_of.items()]
    print_table("number: count, reason", reasons, "Why")
