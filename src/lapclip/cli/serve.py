"""`lapclip serve`: a model and its index as a page and over HTTP, for this machine only unless asked."""

import os
import re
import secrets
import sys
import warnings
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

from cyclopts import Parameter

from lapclip.cli.models import fetch_missing
from lapclip.cli.screen import say, working
from lapclip.errors import UserError, typed
from lapclip.units import plural

if TYPE_CHECKING:
    from lapclip.embedder import Embedder
    from lapclip.search.index import Index

RATE_ELSEWHERE = 20.0  # requests a second of one client
SECONDS_TO_END = 0.5
TOKEN = r"[A-Za-z0-9._~-]{16,256}"  # noqa: S105  # what one looks like


def serve(
    *,
    model: str | None = None,
    port: int | None = None,
    host: str = "127.0.0.1",
    token: str | None = None,
    allow_host: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    rate: float | None = None,
    open: bool = True,
    batching: bool = True,
) -> int:
    """Serve a search page and an HTTP API for a model and its index.

    `/openapi.json` describes the API. Only indexed images are served.

    Args:
        model: a run or a model folder; default: the model of the index that was updated last
        port: port to listen on; default: 8765, or the next free one
        host: address to listen on; a token is required if other machines can reach it
        token: token that clients must send; prefer LAPCLIP_TOKEN, which other users cannot see
        allow_host: additional host name of this server, for example behind a proxy
        rate: maximum requests per second per client; default: 20 if other machines have access
        open: open the page in the browser
        batching: embed requests of several clients in one batch
    """
    import webbrowser

    from lapclip.serve.http import address_of, hosts_of, is_local, listen, names_of
    from lapclip.serve.http import serve as serve_app
    from lapclip.serve.limits import Limits

    if rate is not None and not 0 < rate < 1e6:
        raise UserError(f"`--rate {rate:g}` is not a valid rate", hint="use a number above 0")
    is_here = is_local(host, allow_host)
    token = checked_token(token or os.environ.get("LAPCLIP_TOKEN") or None)
    is_own_token = token is None and not is_here
    if is_own_token:
        token = secrets.token_urlsafe(24)
    fetch_missing(model)
    limits = Limits(rate=rate if rate is not None else None if is_here else RATE_ELSEWHERE)
    with listen(port, host) as listening:  # before the model is loaded, which takes seconds
        names = names_of(host)
        hosts = hosts_of(names, listening.getsockname()[1], allow_host)
        with working("loading the model"):
            embedder, index = load_model(model)
        from lapclip.embedder import Truncated
        from lapclip.machine.device import DEFAULT_THREADS, set_up_process
        from lapclip.serve.api import build_server
        from lapclip.serve.service import Service

        warnings.simplefilter("ignore", Truncated)  # what clients send is not for whoever reads this terminal
        # One core is left to clients: measured, a single text is embedded no slower by it.
        set_up_process(max(1, DEFAULT_THREADS - 1), keep_memory=False)
        service = Service(embedder, index, is_batching=batching)
        address = address_of(listening, names[0])
        app = build_server(service, address=address, hosts=hosts, token=token, limits=limits)
        entrance = f"{address}?token={quote(token)}" if token else address
        say(f"serving at {entrance if is_own_token else address} (Ctrl-C stops it)")
        folders = "`, `".join(index.folders) if index else ""
        images = f"{plural(index.num_images, 'image')} of `{folders}`" if index else "no images yet"
        of_model = "" if index and model is None else f" --model {typed(model or embedder.name)}"
        more = f"`lapclip index ~/Pictures{of_model}` adds {'more' if index else 'some'}"
        say(f"model `{embedder.name}`, {images}; {more}")
        if token is not None and not is_own_token:
            say("clients need the token: `Authorization: Bearer TOKEN`, or once `/?token=TOKEN` in a browser")
        sys.stderr.flush()
        if open:
            webbrowser.open(entrance)
        try:
            serve_app(app, listening, limits)
        finally:
            has_ended = service.close(SECONDS_TO_END)
    say("")
    if not has_ended:
        os._exit(0)  # a large model is in the middle of a batch that nobody waits for
    return 0


def checked_token(token: str | None) -> str | None:
    if token is not None and not re.fullmatch(TOKEN, token):
        message = "invalid token: it must have 16 to 256 characters, only letters, digits and `._~-`"
        raise UserError(message, hint="omit it to have one generated")
    return token


def load_model(model: str | None) -> "tuple[Embedder, Index | None]":
    """The model and its index; without an index the model alone, by name or the newest run's."""
    from lapclip.runs.run import find_run, newest_run
    from lapclip.search.index import find_index, indexes_of, path_of_model

    newest = newest_run() if model is None else None
    if model is not None and path_of_model(model) is None and not indexes_of(model):
        find_run(model)  # raises the error, before torch is imported
    from lapclip.embedder import load

    chosen = model or (newest.path if newest else None)
    if chosen is not None and not indexes_of(model):
        return load(chosen), None
    index = find_index(model)
    return load(index.model_folder), index
