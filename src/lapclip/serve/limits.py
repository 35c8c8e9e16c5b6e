"""How much a client may ask for, and how long it may take: bytes, seconds, requests a second, connections.

uvicorn's own limits do not suffice. Its timeout starts after a response and ends with the next byte, so a client that
sends a byte now and then would keep its connection; and it refuses in plain text, without a `Retry-After`.
"""

import asyncio
import ipaddress
import sys
import time
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CLIENTS = 10_000  # whose rate is remembered
BURST_SECONDS = 10  # of requests that may come at once: a page asks for all its thumbnails
MAX_HEAD_BYTES = 64 << 10
LINGER_SECONDS = 2.0  # of reading on after a refusal, so that the client can read it
FREE_PARTS = 4096  # of a body, of any size; parsing one takes as long as some kilobytes in one piece
MIN_PART_BYTES = 256  # the average of further parts


@dataclass(frozen=True)
class Limits:
    """Every limit that is not one of a parameter."""

    upload_bytes: int = 32 << 20
    json_bytes: int = 1 << 20
    held_bytes: int = 256 << 20  # of all uploads that are arriving or being decoded
    header_seconds: float = 10.0  # for the head of a request
    silent_seconds: float = 10.0  # between two parts of a body
    body_seconds: float = 60.0
    unread_seconds: float = 30.0  # for a response that the client does not read
    connections: int = 1000
    requests: int = 256  # being answered
    rate: float | None = None  # requests a second of one client


class Refused(Exception):
    """A request that is refused: the status, what is wrong, and one thing to do about it."""

    def __init__(self, status: int, error: str, hint: str, *, retry_seconds: float = -1, **headers: str):
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if retry_seconds >= 0:
            self.headers["retry-after"] = str(max(1, round(retry_seconds + 0.5)))


def busy() -> Refused:
    return Refused(503, "too many requests at once", "try again in a second", retry_seconds=0)


def media_type(headers: dict[bytes, bytes]) -> str:
    return headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()


class BodyLimit:
    """ASGI middleware: refuses bodies that are too large or too slow, and bounds the memory of all of them."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self.app, self.limits = app, limits
        self.num_bytes = 0  # held for all requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body(scope, receive, send, self)
        try:
            await self.app(scope, body.receive, body.send)
        finally:
            self.num_bytes -= body.num_bytes


class Body:
    """The body of one request while it arrives, and the response to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limit: BodyLimit):
        self.receive_next, self.send_next, self.limit = receive, send, limit
        self.headers = dict(scope["headers"])
        self.is_complete = not has_body(self.headers)
        is_json = media_type(self.headers) == "application/json"
        self.max_bytes = limit.limits.json_bytes if is_json else limit.limits.upload_bytes
        self.num_bytes = 0
        self.deadline: float | None = None

    async def receive(self) -> Message:
        if self.is_complete:
            return await self.receive_next()
        now = time.monotonic()
        if self.deadline is None:
            self.deadline = now + self.limit.limits.body_seconds
            if {b"content-length", b"transfer-encoding"} <= self.headers.keys():
                # A proxy may believe the other one, and take the rest of the body for another request.
                raise Refused(400, "two headers give the length of the body", "omit `content-length`")
            # h11 has checked that it is a number of at most twenty digits.
            if int(self.headers.get(b"content-length", 0)) > self.max_bytes:
                raise self.too_large()
        try:
            async with asyncio.timeout(min(self.limit.limits.silent_seconds, self.deadline - now)):
                message = await self.receive_next()
        except TimeoutError:
            raise Refused(408, "the body took too long to arrive", "send it again, faster") from None
        self.is_complete = not message.get("more_body", False)
        num_bytes = len(message.get("body", b""))
        self.num_bytes += num_bytes
        self.limit.num_bytes += num_bytes
        if self.num_bytes > self.max_bytes:
            raise self.too_large()
        if self.limit.num_bytes > self.limit.limits.held_bytes:
            raise busy()
        return message

    def too_large(self) -> Refused:
        return Refused(413, f"the body is larger than {self.max_bytes >> 20} MB", "send a smaller one")

    async def send(self, message: Message) -> None:
        """Sends the response; one to a request that is still arriving ends the connection."""
        if not self.is_complete and message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        elif not self.is_complete and not message.get("more_body", False):
            await self.send_next({**message, "more_body": True})
            await self.discard()
            message = {"type": "http.response.body", "body": b""}
        await self.send_next(message)

    async def discard(self) -> None:
        """Reads on for a moment: closing a connection on a client that still sends would lose the response."""
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while not self.is_complete:
                    self.is_complete = not (await self.receive_next()).get("more_body", False)
        except (TimeoutError, asyncio.CancelledError):  # or the server ends
            return


def has_body(headers: dict[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"").strip(b"0") != b""


class Rates:
    """Requests a second of each client, as token buckets."""

    def __init__(self, rate: float | None):
        self.rate = rate
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def count(self, client: str) -> None:
        """Counts one request; Refused when there were too many."""
        if self.rate is None:
            return
        client, now = network_of(client), time.monotonic()
        size = max(1.0, self.rate * BURST_SECONDS)
        left, last = self.buckets.pop(client, (size, now))
        left = min(size, left + (now - last) * self.rate)
        self.buckets[client] = (left - 1 if left >= 1 else left, now)
        if len(self.buckets) > MAX_CLIENTS:
            self.buckets.popitem(last=False)
        if left < 1:
            message, hint = f"more than {self.rate:g} requests a second", "wait as long as `Retry-After` says"
            raise Refused(429, message, hint, retry_seconds=(1 - left) / self.rate)


def network_of(client: str) -> str:
    """The address; of IPv6 the network, of which one client has all addresses."""
    with suppress(ValueError):
        address = ipaddress.ip_address(client)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
            return str(int(address) >> 64)
    return client


class Idle:
    """Ends connections whose client keeps the server waiting, and the longest idle when there are too many."""

    def __init__(self, limits: Limits):
        self.limits = limits
        # The state of each connection, and since when it is seen.
        self.seen: dict[Any, tuple[tuple[Any, bool, bool], float]] = {}

    def sweep(self, connections: Collection[Any]) -> None:
        """Called several times a second with the open connections."""
        now, before, self.seen = time.monotonic(), self.seen, {}
        for one in connections:
            is_asking = one.cycle is not None and not one.cycle.response_complete
            state = (one.cycle, is_asking, one.flow.write_paused)
            last, since = before.get(one, (state, now))
            self.seen[one] = (state, since if last == state else now)
            patience = self.limits.unread_seconds if one.flow.write_paused else self.limits.header_seconds
            if (one.flow.write_paused or not is_asking) and now - self.seen[one][1] > patience:
                one.transport.abort()  # without the rest of a response: it would only be waited for
        if len(connections) > self.limits.connections:
            for one in sorted(connections, key=self.rank)[: len(connections) - self.limits.connections]:
                one.transport.abort()

    def rank(self, connection: Any) -> tuple[bool, float]:
        """Those without a request first, the longest idle before others; then the newest requests."""
        (_, is_asking, _), since = self.seen[connection]
        return is_asking, -since if is_asking else since


class Reader(h11.Connection):
    """An HTTP parser that refuses a body in many tiny parts, which would keep the event loop busy."""

    num_parts = num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.num_parts = self.num_bytes = 0
        elif isinstance(event, h11.Data):
            self.num_parts += 1
            self.num_bytes += len(event.data)
            if self.num_parts > FREE_PARTS + self.num_bytes // MIN_PART_BYTES:
                raise h11.RemoteProtocolError("a body in too many small parts")
        return event


class Connection(H11Protocol):
    """uvicorn's connection, which also says in JSON what is wrong with a request that is not HTTP."""

    def __init__(self, config: uvicorn.Config, *more: Any, **named: Any):
        super().__init__(config, *more, **named)
        self.conn = Reader(h11.SERVER, MAX_HEAD_BYTES)

    def send_400_response(self, msg: str) -> None:
        problem = sys.exc_info()[1]
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # in the middle of a response
            self.transport.abort()
            return
        status = 431 if getattr(problem, "error_status_hint", 400) == 431 else 400
        error = "the head of the request is too long" if status == 431 else "this is not valid HTTP/1.1"
        body = msgspec.json.encode({"error": error, "hint": "see `/openapi.json` for what can be asked"})
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        headers += [("connection", "close")]
        response = h11.Response(status_code=status, headers=headers, reason=b"Refused")
        events = (response, h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        # Closed at once it would be reset while the client still sends, which would never read why.
        self.transport.set_protocol(asyncio.Protocol())
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
        self.connection_lost(OSError())  # so that nobody waits for the rest of the request
