"""Serving on this machine only unless asked: the address, who may ask, headers, files of the page.

A page of another site must not reach the server: the name in the `Host` header is checked, since any name can be made
to point at 127.0.0.1, and requests of other sites' pages are refused.
"""

import asyncio
import gc
import hashlib
import hmac
import ipaddress
import json
import re
import resource
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lapclip.errors import UserError, reason_for
from lapclip.files import read_bounded
from lapclip.serve.limits import Connection, Idle, Limits, Rates, Refused

LOCALHOST = "127.0.0.1"
FIRST_PORT = 8765
NUM_PORTS = 50  # tried one after the other when none was asked for
PAGES = (Path(__file__).parent.parent / "page").resolve()
MEDIA_TYPES = {  # Starlette adds the encoding
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
    ".json": "application/json", ".jpg": "image/jpeg",
}  # fmt: skip
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
FRAMES = ("iframe", "frame", "fencedframe", "embed", "object")  # values of `Sec-Fetch-Dest`
COOKIE_SECONDS = 30 * 86400
SHUTDOWN_SECONDS = 0.3  # for requests to be answered after Ctrl-C
MIN_FILES = 4096  # that may be open at once: more than connections and images need


def listen(port: int | None, host: str = LOCALHOST) -> socket.socket:
    """A socket at an address of this machine: at the port that was asked for, else the first free one of ours."""
    if port is not None and not 0 <= port <= 65535:
        raise UserError(f"there is no port {port}", hint="choose one from 1024 to 65535")
    family, address = resolve(host)
    for candidate in [port] if port is not None else range(FIRST_PORT, FIRST_PORT + NUM_PORTS):
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address, candidate))
            listening.listen()
            return listening
        except OSError as error:
            listening.close()
            reason = reason_for(error)
    asked = f"port {port}" if port is not None else f"any port from {FIRST_PORT} to {candidate}"
    raise UserError(f"cannot serve on {asked}: {reason.lower()}", hint="choose another with `--port`")


def resolve(host: str) -> tuple[int, str]:
    """The family and the number of an address given by number or name."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        hint = "`--host 0.0.0.0` means all of them"
        raise UserError(f"`{host}` is not an address of this machine", hint=hint) from None
    return family, str(address[0]).partition("%")[0]


def is_local(host: str, allowed: Sequence[str] = ()) -> bool:
    """Whether only this machine can reach that address; by another name others do, through a proxy."""
    return ipaddress.ip_address(resolve(host)[1]).is_loopback and not allowed


def address_of(listening: socket.socket, host: str = LOCALHOST) -> str:
    return f"http://{bracketed(host)}:{listening.getsockname()[1]}/"


def bracketed(host: str) -> str:
    """An address as it stands in a URL, where IPv6 has brackets."""
    return f"[{host}]" if ":" in host else host


def names_of(host: str) -> list[str]:
    """The names and addresses of this server, the one to print first."""
    number = resolve(host)[1]
    if not ipaddress.ip_address(number).is_unspecified:
        return list(dict.fromkeys([host, number]))
    name = socket.gethostname().lower()
    found = [one for addresses in psutil.net_if_addrs().values() for one in addresses]
    own = [one.address for kind in (socket.AF_INET, socket.AF_INET6) for one in found if one.family == kind]
    own = [address for address in own if "%" not in address and not is_local(address)]
    return [*own, name, name if name.endswith(".local") else f"{name}.local"]


def hosts_of(names: Sequence[str], port: int, allowed: Sequence[str] = ()) -> frozenset[str]:
    """What the `Host` header may say; an allowed name may be behind another port, a proxy's."""
    hosts = {f"{bracketed(name.lower())}:{port}" for name in ("localhost", LOCALHOST, "::1", *names)}
    for name in allowed:
        if not name or any(sign in name for sign in "/@ *,"):
            raise UserError(f"`{name}` is not a host name", hint="write it as `photos.example.org`")
        hosts |= {name.lower(), f"{name.lower()}:{port}"}
    return frozenset(hosts | ({host.removesuffix(":80") for host in hosts} if port == 80 else set()))


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    try:
        body = msgspec.json.encode(content)
    except UnicodeEncodeError:  # a file name that is not text, which only the escapes of ASCII can hold
        body = json.dumps(msgspec.to_builtins(content)).encode("ascii")
    return Response(body, status, headers, media_type="application/json")


def explain(refused: Refused) -> Response:
    return json_response({"error": refused.error, "hint": refused.hint}, refused.status, refused.headers)


def build_app(routes: Sequence[Route], hint: str = "the page is at `/`") -> Starlette:
    """An application of these routes that answers every problem in JSON."""

    def answer(request: Request, problem: Any) -> Response:
        match problem:
            case Refused():
                return explain(problem)
            case UserError():
                return explain(Refused(404, problem.message, problem.hint))
            case HTTPException(status_code=405):
                allow = ", ".join(sorted((problem.headers or {})["Allow"].split(", ")))
                message = f"`{request.method[:20]}` is not allowed here"
                return explain(Refused(405, message, f"use {allow}", allow=allow))
            case HTTPException(status_code=status):
                return explain(Refused(status, "there is nothing at this URL", hint))
            case ClientDisconnect():  # which nobody reads
                return Response(status_code=400)
        return explain(Refused(500, "the server failed", "see what `lapclip serve` printed"))

    kinds = (Refused, UserError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=list(routes), exception_handlers=dict.fromkeys(kinds, answer))
    app.router.redirect_slashes = False
    return app


class Guard:
    """ASGI middleware: lets in who may ask, and adds the headers.

    Refuses other names and other sites' pages, clients that ask too often, and those without the token.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        address: str,
        hosts: Collection[str] = (),
        token: str | None = None,
        rate: float | None = None,
    ):
        port = urlsplit(address).port or 80
        self.app, self.address, self.rates = app, address, Rates(rate)
        self.hosts = hosts or hosts_of([], port)
        self.headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        self.origins = {f"{scheme}://{host}" for scheme in ("http", "https") for host in self.hosts}
        self.token = digest(token) if token is not None else None
        self.cookie = f"lapclip-{port}"  # all ports of a machine share cookies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                own = {name for name, _ in message["headers"]}
                more = [header for header in self.headers if header[0] not in own]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        try:
            answer = self.check(Request(scope)) or self.app
        except Refused as refused:
            answer = explain(refused)
        try:
            await answer(scope, receive, send_with_headers)
        except asyncio.CancelledError:  # the server ends, or the client has left
            if has_started:
                with suppress(Exception):  # the client has not read a response of known length to its end
                    await send({"type": "http.response.body", "body": b""})
                return
            ending = Refused(503, "the server is shutting down", "start it again", retry_seconds=1)
            await explain(ending)(scope, receive, send_with_headers)

    def check(self, request: Request) -> Response | None:
        """Refused, or the response that replaces a token in the address by a cookie, or None."""
        headers = request.headers
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may believe the other one, and take the rest of the body for another request.
            hint = "omit `content-length`"
            raise Refused(400, "two headers give the length of the body", hint, connection="close")
        if headers.get("host", "").lower() not in self.hosts:
            raise Refused(421, "this page is served to this machine only", f"open {self.address}")
        site, mode, shown_in = (headers.get(f"sec-fetch-{name}") for name in ("site", "mode", "dest"))
        is_foreign = site in ("cross-site", "same-site")  # another port of this machine is the same site
        # A person may follow a link to the page. At any other address a script could open it again and again.
        is_link = mode == "navigate" and shown_in in (None, "document") and request.scope["path"] == "/"
        # Chromium says `none` of what another site's page has it prefetch, and loads a refused page when it is opened.
        if shown_in in FRAMES or "sec-purpose" in headers or (is_foreign and not is_link):
            raise Refused(403, "pages of other sites may not read this page", f"open {self.address}")
        if headers.get("origin", self.address.rstrip("/")) not in self.origins:
            message = "pages of other sites may not send requests to this server"
            raise Refused(403, message, "open it in its own tab")
        self.rates.count(request.client.host if request.client else "")
        if self.token is None:
            return None
        given = request.query_params.get("token", "") if request.url.path == "/" else ""
        if self.is_token(given):  # a redirect, so that it does not stay in the browser's history
            response = Response(status_code=303, headers={"location": "/"})
            options: Any = {"max_age": COOKIE_SECONDS, "httponly": True, "samesite": "strict"}
            is_secure = request.url.scheme == "https"  # as a proxy with TLS says
            response.set_cookie(self.cookie, given, secure=is_secure, **options)
            return response
        kind, _, shown = headers.get("authorization", "").partition(" ")
        is_bearer = kind.lower() == "bearer" and self.is_token(shown.strip())
        if is_bearer or self.is_token(request.cookies.get(self.cookie, "")):
            return None
        hint = "open the URL that `lapclip serve` printed"
        raise Refused(401, "a token is required", hint, www_authenticate="Bearer")

    def is_token(self, given: str) -> bool:
        """In constant time: digests are equally long."""
        return self.token is not None and hmac.compare_digest(digest(given), self.token)


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def send_file(folder: Path, name: str, *, pattern: str, max_bytes: int, fresh_seconds: int = 0) -> Response:
    """A file whose name has that pattern and that lies in that folder, also after following every link.

    The folder itself may be no link either: whoever writes into a run could point it anywhere.
    """
    missing = UserError("there is no such file", hint="reload the page: it may have been removed")
    if not re.fullmatch(pattern, name, re.ASCII):
        raise missing
    try:
        path = (folder / name).resolve(strict=True)
        if not path.is_relative_to(folder.parent.resolve() / folder.name):
            raise missing
        content = read_bounded(path, max_bytes)
    except (OSError, RuntimeError):  # a circle of links is a RuntimeError
        raise missing from None
    fresh = {"cache-control": f"private, max-age={fresh_seconds}"} if fresh_seconds else {}
    return Response(content, media_type=MEDIA_TYPES[Path(name).suffix], headers=fresh)


def send_static(name: str) -> Response:
    """One of the files that came with lapclip."""
    return send_file(PAGES, name, pattern=r"[A-Za-z][\w.-]*\.(html|css|js|svg)", max_bytes=1 << 20)


def allow_many_files() -> int:
    """How many files may be open, of which a connection is one; macOS allows 256 of them unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(MIN_FILES, hard)), hard))
    return min(MIN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def serve(app: ASGIApp, listening: socket.socket, limits: Limits) -> None:
    """Answers until Ctrl-C or a kill; what is not answered soon after that is cancelled."""
    num_files = allow_many_files()
    idle = Idle(replace(limits, connections=min(limits.connections, num_files // 4)))

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listening.listen(MIN_FILES)  # so many may wait; a client whose connection did not fit would hang

        def handle_exit(self, sig: int, frame: Any) -> None:
            super().handle_exit(sig, frame)
            loop = asyncio.get_running_loop()
            loop.call_soon_threadsafe(loop.call_later, SHUTDOWN_SECONDS, self.cancel)

        def cancel(self) -> None:
            for task in self.server_state.tasks:
                task.cancel()

        async def on_tick(self, counter: int) -> bool:
            idle.sweep(self.server_state.connections)
            return await super().on_tick(counter)

    quiet: Any = {"log_level": "error", "access_log": False, "server_header": False}
    parts: Any = {"http": partial(Connection, idle), "lifespan": "off", "ws": "none"}
    backlog = num_files // 16  # accepted per turn of the event loop: few enough to leave files for those open
    config = uvicorn.Config(app, timeout_graceful_shutdown=1, backlog=backlog, **parts, **quiet)
    gc.freeze()  # else a collection walks all that was imported, and requests wait 100 ms for it
    with suppress(KeyboardInterrupt):  # the usual end, not a failure
        Server(config).run(sockets=[listening])
