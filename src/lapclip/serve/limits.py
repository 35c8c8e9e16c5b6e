"""How much a client may ask for, and how long it may take: bytes, seconds, requests a second, connections.

uvicorn's own limits do not suffice. Its timeout starts after a response and ends with the next byte, so a client that
sends a byte now and then would keep its connection; and it refuses in plain text, without a `Retry-After`.
"""

import asyncio
import ipaddress
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import h11
import msgspec
import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS_COUNTED = 10  # over which the rate of a client is measured
MAX_HEAD_BYTES = 64 << 10
LINGER_SECONDS = 2.0  # of reading on after a refusal, so that the client can read it
FREE_PARTS = 4096  # of a body, of any size; parsing one takes as long as some kilobytes in one piece
MIN_PART_BYTES = 256  # the average of further parts


@dataclass(frozen=True)
class Limits:
    """Every limit that is not one of a parameter."""

    upload_bytes: int = 32 << 20
    json_bytes: int = 1 << 20
    held_bytes: int = 256 << 20  # of all uploads that are arriving or being decoded; of all unread responses
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


class Bodies:
    """Reads bodies, refuses those that are too large or too slow, and bounds the memory of all of them."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.num_bytes = 0  # held for all requests

    @asynccontextmanager
    async def read(self, request: Request, max_bytes: int) -> AsyncIterator[bytes]:
        """The body of a request, which counts as held until it is answered; uvicorn discards what is not read."""
        too_large = Refused(413, f"the body is larger than {max_bytes >> 20} MB", "send a smaller one")
        if int(request.headers.get("content-length", 0)) > max_bytes:  # h11 has checked that it is a number
            raise too_large
        parts: list[bytes] = []
        num_bytes, clock, patience = 0, asyncio.get_running_loop().time, self.limits.silent_seconds
        deadline = clock() + self.limits.body_seconds
        try:
            try:
                async with asyncio.timeout(patience) as timeout:
                    async for part in request.stream():
                        parts.append(part)
                        num_bytes += len(part)
                        self.num_bytes += len(part)
                        if num_bytes > max_bytes:
                            raise too_large
                        if self.num_bytes > self.limits.held_bytes:
                            raise busy()
                        timeout.reschedule(min(clock() + patience, deadline))
            except TimeoutError:
                raise Refused(408, "the body took too long to arrive", "send it again") from None
            body = b"".join(parts)
            parts.clear()  # or it would be held twice
            yield body
        finally:
            self.num_bytes -= num_bytes


class Rates:
    """Requests of each client, counted over some seconds: a page asks for all its thumbnails at once."""

    def __init__(self, rate: float | None):
        self.rate = rate
        self.counts: Counter[str] = Counter()
        self.began = time.monotonic()

    def count(self, client: str) -> None:
        """Counts one request; Refused when there were too many."""
        if self.rate is None:
            return
        now, client = time.monotonic(), network_of(client)
        if now - self.began > SECONDS_COUNTED:
            self.began = now
            self.counts.clear()
        self.counts[client] += 1
        if self.counts[client] > max(1, self.rate * SECONDS_COUNTED):
            message, left = f"more than {self.rate:g} requests per second", self.began + SECONDS_COUNTED - now
            raise Refused(429, message, "wait for the time in `Retry-After`", retry_seconds=left)


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
        self.is_due = False  # a sweep, before the next tick
        # The state of each connection, and since when it is seen.
        self.seen: dict[Any, tuple[tuple[Any, bool, bool], float]] = {}

    def sweep(self, connections: Collection[Any]) -> None:
        """Called several times a second with the open connections, and at once when there are too many."""
        now, before, self.seen, self.is_due = time.monotonic(), self.seen, {}, False
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
        num_bytes, unread = 0, [one for one in connections if one.flow.write_paused]
        for one in sorted(unread, key=lambda one: self.seen[one][1], reverse=True):
            num_bytes += one.transport.get_write_buffer_size()
            if num_bytes > self.limits.held_bytes:
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
                raise h11.RemoteProtocolError("the body is sent in too many small parts")
        return event


class Connection(H11Protocol):
    """uvicorn's connection, which is counted, stops the work for a client that has left, and refuses in JSON."""

    task: asyncio.Task[None] | None = None  # that answers the last request

    def __init__(self, idle: Idle, config: uvicorn.Config, *more: Any, **named: Any):
        super().__init__(config, *more, **named)
        self.conn, self.idle, self.app = Reader(h11.SERVER, MAX_HEAD_BYTES), idle, self.answer

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.task = asyncio.current_task()
        if self.cycle is not None and not self.cycle.disconnected:  # else its client has left already
            await self.config.loaded_app(scope, receive, send)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.idle.limits.connections and not self.idle.is_due:
            self.idle.is_due = True  # one sweep for all that came at once
            self.loop.call_soon(self.idle.sweep, self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.task is not None and self.cycle is not None and not self.cycle.response_complete:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        if self.conn.our_state is not h11.CLOSED:  # else it was refused
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.flow.read_paused and self.conn.their_state is h11.DONE:
            # The client sends its next request already. Reading goes on, or its leaving would not be noticed.
            self.flow.resume_reading()
            if len(self.conn.trailing_data[0]) > MAX_HEAD_BYTES:
                self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        problem = sys.exc_info()[1]
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # in the middle of a response
            self.transport.abort()
            return
        status = 431 if getattr(problem, "error_status_hint", 400) == 431 else 400
        error = "the header of the request is too long" if status == 431 else "this is not valid HTTP/1.1"
        body = msgspec.json.encode({"error": error, "hint": "`/openapi.json` describes the API"})
        head = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=status, headers=[*head.items()], reason=b"Refused")
        events = (response, h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        # Closed at once it would be reset while the client still sends, which would never read why.
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
        self.connection_lost(OSError())  # so that nobody waits for the rest of the request
        self.connections.add(self)  # until it is closed
        self.cycle = None  # type: ignore[assignment]
