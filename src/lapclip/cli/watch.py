"""`lapclip watch`: a run while it learns, from any other terminal; it only reads, and training never notices."""

import os
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from lapclip.cli.flags import AsJson
from lapclip.cli.screen import own_name, print_json, say
from lapclip.errors import UserError

if TYPE_CHECKING:
    from lapclip.runs.history import Summary


def watch(
    run: Annotated[
        str | None, Parameter(help="a run, by name or path; without one, the newest here, running ones first")
    ] = None,
    *,
    once: Annotated[bool, Parameter(help="show it once and end", negative="")] = False,
    web: Annotated[bool, Parameter(help="as a page in the browser", negative="")] = False,
    port: Annotated[int | None, Parameter(help="of the page, if not any free one")] = None,
    open: Annotated[bool, Parameter(help="open the page in the browser")] = True,
    to: Annotated[
        Literal["tensorboard", "wandb"] | None, Parameter(help="hand the run's figures on to this tool")
    ] = None,
    json: AsJson = False,
) -> int:
    """Watch a run learn: curves, speed, memory, the machine and what to mind.

    `q` leaves, and training goes on. On a pipe, plain lines now and then until the run ends.
    """
    refuse_together(once=once and not json, web=web, to=to is not None, json=json)
    if port is not None and not web:
        raise UserError("`--port` is for the page", hint="add `--web`")
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
    try:
        return show(watched, once=once)
    except BrokenPipeError:  # whoever read it has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def show_page(name: str | None, port: int | None, open_browser: bool) -> int:
    """Serves the page until Ctrl-C."""
    from lapclip.cli.serve import require_web

    require_web()
    import webbrowser

    from lapclip.runs.run import find_run
    from lapclip.serve.http import address_of, listen, serve
    from lapclip.serve.limits import Limits
    from lapclip.serve.watch import page_app

    shown = find_run(name) if name is not None else None
    with listen(port) as listening:
        address = address_of(listening)
        say(f"the page is at {address} (Ctrl-C ends it; training goes on)")
        sys.stderr.flush()
        if open_browser:
            webbrowser.open(address)
        serve(page_app(shown, address), listening, Limits())
    say("")
    return 0


def refuse_together(**flags: bool) -> None:
    asked = [f"`--{name}`" for name, is_asked in flags.items() if is_asked]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)} do not go together", hint="choose one of them")


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
        say(f"left; `{name}` goes on training, and `{own_name()} watch {name}` shows it again")
    return code
