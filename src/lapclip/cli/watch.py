"""`lapclip watch`: a run while it learns, from any other terminal; it only reads, and training never notices."""

import os
import sys
from typing import TYPE_CHECKING, Literal

from lapclip.cli.flags import AsJson, Switch, refuse_together
from lapclip.cli.screen import own_name, print_json, say, until_closed
from lapclip.errors import UserError

if TYPE_CHECKING:
    from lapclip.runs.history import Summary


def watch(
    run: str | None = None,
    *,
    once: Switch = False,
    web: Switch = False,
    port: int | None = None,
    open: bool = True,
    to: Literal["tensorboard", "wandb"] | None = None,
    json: AsJson = False,
) -> int:
    """Watch a run: curves, speed, memory, machine and warnings.

    `q` quits; training continues. On a pipe, prints plain lines until the run ends.

    Args:
        run: a run, by name or path; default: the newest in this folder, running ones first
        once: print the view once and exit
        web: show the run as a page in the browser
        port: port of the page; default: 8765, or the next free one
        open: open the page in the browser
        to: export the run's metrics to this tool
    """
    refuse_together(once=once and not json, web=web, to=to is not None, json=json)
    if port is not None and not web:
        raise UserError("`--port` needs `--web`", hint="add `--web`, or omit `--port`")
    if web:
        return show_page(run, port, open)
    from lapclip.runs.history import Summary
    from lapclip.runs.status import run_to_watch

    watched = Summary(run_to_watch(run))
    if to is not None:
        from lapclip.view.loggers import LOGGERS

        return 0 if LOGGERS[to](watched.run) else 130
    if json:
        watched.read()
        print_json(watched.document())
        return 0
    with until_closed():
        return show(watched, once=once)
    return 0


def show_page(name: str | None, port: int | None, open_browser: bool) -> int:
    """Serves the page until Ctrl-C."""
    import webbrowser

    from lapclip.runs.run import find_run
    from lapclip.serve.http import address_of, listen, serve
    from lapclip.serve.limits import Limits
    from lapclip.serve.watch import page_app

    shown = find_run(name) if name is not None else None
    with listen(port) as listening:
        address = address_of(listening)
        say(f"the page is at {address} (Ctrl-C stops serving it; training continues)")
        sys.stderr.flush()
        if open_browser:
            webbrowser.open(address)
        serve(page_app(shown, address), listening, Limits())
    say("")
    return 0


def show(watched: "Summary", *, once: bool) -> int:
    from lapclip.view.lines import follow_in_lines
    from lapclip.view.terminal import draw_once, watch_here

    if once:
        watched.read()
        draw_once(watched)
        return 0
    is_here = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    try:
        code = watch_here(watched) if is_here else follow_in_lines(watched)
    except KeyboardInterrupt:
        code = 130
    if not watched.is_over:
        name = watched.run.reference
        say(f"`{name}` continues training; `{own_name()} watch {name}` shows it again")
    return code
