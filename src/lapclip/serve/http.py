"""Serving pages, on this machine only unless asked: the address, who may ask, what answers say, which files are read.

A page of another site must not reach it: the name in the `Host` header is checked, since any name can be made to point
at 127.0.0.1, and requests that another site's page makes are refused.
"""

import asyncio
import importlib.util
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapclip.errors import UserError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send

HERE = "127.0.0.1"
FIRST_PORT = 8765
NUM_PORTS = 50  # tried one after the other when none was asked for
PAGES = (Path(__file__).parent.parent / "page").resolve()
KINDS_OF_FILE = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".jpg": "image/jpeg",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
}


def require_web() -> None:
    """Refuses when what serves pages is not installed."""
    if not all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn")):
        raise UserError("a page needs starlette and uvicorn", hint="pip install 'lapclip[web]'")


def listen(port: int | None, host: str = HERE) -> socket.socket:
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
            reason = error.strerror or str(error)
    asked = f"port {port}" if port is not None else f"any port from {FIRST_PORT} to {candidate}"
    raise UserError(f"cannot serve at {asked}: {reason.lower()}", hint="choose another with `--port`")


def resolve(host: str) -> tuple[int, str]:
    """The family and the number of an address given by number or name."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise UserError(
            f"`{host}` is no address of this machine", hint="`--host 0.0.0.0` means all of them"
        ) from None
    return family, str(address[0])


def address_of(listening: socket.socket, host: str = HERE) -> str:
    return f"http://{bracketed(host)}:{listening.getsockname()[1]}/"


def bracketed(host: str) -> str:
    """An address as it stands in a URL, where IPv6 has brackets."""
    return f"[{host}]" if ":" in host else host


def own_hosts(port: int) -> frozenset[str]:
    """What the `Host` header may say to mean this machine."""
    return frozenset(f"{name}:{port}" for name in ("localhost", HERE, "[::1]"))


def build_app(routes: "Sequence[Route]", *, port: int, methods: Sequence[str] = ("GET", "HEAD")) -> "ASGIApp":
    """An application of these routes that answers only to this machine and explains what it refuses."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException

    handlers: dict[Any, Any] = {UserError: explain_problem, HTTPException: explain_refusal}
    app = Starlette(routes=list(routes), exception_handlers=handlers)
    return Guard(app, address=f"http://{HERE}:{port}/", hosts=own_hosts(port), methods=methods)


class Guard:
    """Stands before an application: refuses what does not come from a page of its own, and adds the headers."""

    def __init__(
        self,
        app: "ASGIApp",
        *,
        address: str,
        hosts: Collection[str],
        methods: Sequence[str] | None,  # None: the application knows
        headers: Mapping[str, str] = HEADERS,
    ):
        self.app = app
        self.address, self.hosts, self.methods = address, hosts, methods
        self.headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.origins = {f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts}

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                more = [(name, value) for name, value in self.headers if name not in own]
                if b"cache-control" not in own:
                    more.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await (self.refusal(scope) or self.app)(scope, receive, send_with_headers)

    def refusal(self, scope: "Scope") -> "Response | None":
        """Why a request is not answered, if it is not."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if headers.get(b"host", "").lower() not in self.hosts:
            message = "this page is served to this machine only, under its own name"
            return explained(421, message, f"open {self.address}")
        # Another port of this machine is the same site, and another page.
        is_foreign = headers.get(b"sec-fetch-site") in ("cross-site", "same-site")
        if is_foreign and headers.get(b"sec-fetch-mode") != "navigate":
            return explained(403, "a page of another site may not read this one", "open it by itself")
        is_reading = scope["method"] in ("GET", "HEAD")
        if not is_reading and headers.get(b"origin", self.address.rstrip("/")) not in self.origins:
            return explained(403, "a page of another site may not ask this one", "open it by itself")
        if self.methods is not None and scope["method"] not in self.methods:
            allowed = ", ".join(self.methods)
            answer = explained(405, f"`{scope['method']}` is not answered here", f"use {allowed}")
            answer.headers["allow"] = allowed
            return answer
        return None


def explained(status: int, error: str, hint: str) -> "Response":
    from starlette.responses import JSONResponse

    return JSONResponse({"error": error, "hint": hint}, status)


def explain_problem(request: "Request", problem: UserError) -> "Response":
    return explained(404, problem.message, problem.hint)


def explain_refusal(request: "Request", problem: Any) -> "Response":
    if problem.status_code == 404:
        return explained(404, "there is nothing at this address", "the page is at `/`")
    return explained(problem.status_code, str(problem.detail).lower(), "the page is at `/`")


def send_file(
    folder: Path, name: str, *, pattern: str, most_bytes: int, seconds_fresh: int = 0
) -> "Response":
    """A file whose name has that pattern and that lies in that folder, also after following every link.

    The folder itself may be no link either: whoever writes into a run could point it anywhere.
    """
    from starlette.responses import Response

    nothing = UserError("there is no such file", hint="look at the page again: it may have been tidied away")
    if not re.fullmatch(pattern, name, re.ASCII):
        raise nothing
    try:
        path = (folder / name).resolve(strict=True)
        if (
            not path.is_relative_to(folder.parent.resolve() / folder.name)
            or not path.is_file()
            or path.stat().st_size > most_bytes
        ):
            raise nothing
        content = path.read_bytes()
    except (OSError, RuntimeError):  # a circle of links is a RuntimeError
        raise nothing from None
    fresh = {"cache-control": f"private, max-age={seconds_fresh}"} if seconds_fresh else {}
    return Response(content, media_type=KINDS_OF_FILE[Path(name).suffix], headers=fresh)


def send_static(name: str) -> "Response":
    """One of the files that came with lapclip."""
    return send_file(PAGES, name, pattern=r"[A-Za-z][\w.-]*\.(html|css|js|svg)", most_bytes=1 << 20)


def serve(
    app: "ASGIApp",
    listening: socket.socket,
    closing: asyncio.Event,
    *,
    protocol: "type[asyncio.Protocol] | None" = None,
    most_connections: int | None = 200,
) -> None:
    """Answers until Ctrl-C or a kill, and ends at once then: `closing` tells open streams to end."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            super().handle_exit(sig, frame)
            asyncio.get_running_loop().call_soon_threadsafe(closing.set)

    config = uvicorn.Config(
        app,
        http=protocol or "auto",
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,
        limit_concurrency=most_connections,
    )
    Server(config).run(sockets=[listening])
