"""`lapclip report`: what a run came to, as one page to keep, or several runs side by side."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lapclip.cli.flags import AsJson, Switch, output_file, refuse_together
from lapclip.cli.screen import people, print_json, working
from lapclip.errors import UserError, printable

MAX_RUNS = 12  # that colours and dashes can tell apart


def report(
    *runs: Annotated[str, Parameter(name="RUN")],
    output: Annotated[Path | None, Parameter(name=("--out", "--output"))] = None,
    markdown: Switch = False,
    json: AsJson = False,
) -> int:
    """Write the result of a run as one self-contained HTML file: summary, curves, tables, settings.

    Works on finished runs and on those that were stopped, failed, or are still running. Prints the file's path.

    Args:
        runs: a run, by name or path; several are compared side by side
        output: the page to write; by default `report.html` in the run, or here for several
        markdown: print it as Markdown on stdout instead of writing a page
    """
    if not 0 < len(runs) <= MAX_RUNS:
        hint = "name one or several: `lapclip report cats dogs`; `lapclip runs` lists them"
        raise UserError(f"{len(runs)} runs are named; one page shows 1 to {MAX_RUNS}", hint=hint)
    refuse_together(out=output is not None, markdown=markdown, json=json)
    from lapclip.runs.history import summarize
    from lapclip.runs.run import open_run
    from lapclip.view.html import write_html
    from lapclip.view.markdown import as_markdown
    from lapclip.view.report import as_numbers, document_of

    opened = list({run.path.resolve(): run for run in map(open_run, runs)}.values())
    with working("reading"):
        summaries = [summarize(run) for run in opened]
    if json:
        print_json(as_numbers(summaries))
    elif markdown:
        sys.stdout.write(as_markdown(document_of(summaries)))
    else:
        default = opened[0].path / "report.html" if len(opened) == 1 else Path("report.html")
        document = document_of(summaries)
        path = output_file(output or default) if output or len(opened) > 1 else default
        write_html(document, path)
        for sentence in document.sections[0].words:
            people.print(sentence, markup=False, highlight=False, soft_wrap=not people.is_terminal)
        sys.stdout.write(f"{printable(str(path)) if sys.stdout.isatty() else path}\n")
    return 0
