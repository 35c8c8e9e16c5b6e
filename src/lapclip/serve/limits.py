"""How much a client may ask for: bytes, seconds, requests a second, requests at once; counted while they arrive."""

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lapclip.serve.refusals import Answer, Refused, come_back

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

MOST_CLIENTS = 10_000  # whose rate is remembered
PAGE_OF_IMAGES = 10  # seconds' worth of requests that may come at once: a page asks for all its thumbnails


@dataclass(frozen=True)
class Limits:
    """Every limit that is not a parameter's."""

    upload_bytes: int = 32 << 20
    json_bytes: int = 1 << 20
    held_bytes: int = 256 << 20  # of all uploads that are arriving or being decoded
    header_seconds: float = 10.0
    silent_seconds: float = 10.0  # between two parts of a body
    body_seconds: float = 60.0
    unread_seconds: float = 30.0  # an answer that the client does not take
    linger_seconds: float = 2.0  # reading on after a refusal, so that the client can read it
    connections: int = 1000
    requests: int = 256  # being worked on
    rate: float | None = None  # requests a second of one client


class Held:
    """The bytes of uploads in memory, of all clients together."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.num_bytes = 0
        self.num_requests = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """While a request is worked on; Refused when there are too many."""
        if self.num_requests >= self.limits.requests:
            raise busy()
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > self.limits.held_bytes:
            raise busy()


def busy() -> Refused:
    return Refused(503, "too much is being asked at once", "try again in a second", come_back(0))


class Upload:
    """The body of one request: read within its limits, and the rest of it thrown away when it is refused."""

    def __init__(self, scope: "Scope", receive: "Receive", held: Held):
        self.receive, self.held = receive, held
        headers = dict(scope["headers"])
        self.length = headers.get(b"content-length", b"0")
        self.is_chunked = b"transfer-encoding" in headers
        self.is_complete = not self.is_chunked and self.length.strip(b"0") == b""
        self.num_bytes = 0

    async def read(self, most_bytes: int) -> bytes:
        """All of it; Refused when it is too large or too slow."""
        # h11 has made sure that it is a number, of at most twenty digits.
        if not self.is_chunked and int(self.length) > most_bytes:
            raise too_large(most_bytes)
        parts: list[bytes] = []
        limits = self.held.limits
        try:
            async with asyncio.timeout(limits.body_seconds):
                while not self.is_complete:
                    message = await asyncio.wait_for(self.receive(), limits.silent_seconds)
                    parts.append(self.take(message, most_bytes))
        except TimeoutError:
            raise Refused(408, "the body took too long to arrive", "send it again, faster") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def take(self, message: "Message", most_bytes: int) -> bytes:
        if message["type"] == "http.disconnect":
            raise Gone
        part: bytes = message.get("body", b"")
        self.is_complete = not message.get("more_body", False)
        self.num_bytes += len(part)
        self.held.add(len(part))
        if self.num_bytes > most_bytes:
            raise too_large(most_bytes)
        return part

    def release(self) -> None:
        """Its bytes are no longer in memory."""
        self.held.num_bytes -= self.num_bytes
        self.num_bytes = 0

    async def discard(self) -> None:
        """Reads on for a moment: a connection that is closed on somebody who still sends loses the answer."""
        try:
            async with asyncio.timeout(self.held.limits.linger_seconds):
                while not self.is_complete:
                    message = await self.receive()
                    ended = message["type"] == "http.disconnect"
                    self.is_complete = ended or not message.get("more_body", False)
        except (TimeoutError, asyncio.CancelledError):  # or the server ends
            return


class Gone(Exception):
    """The client went away before it had asked."""


def too_large(most_bytes: int) -> Refused:
    return Refused(413, f"the body is larger than {most_bytes >> 20} MB", "send a smaller one")


class Rates:
    """Requests a second of each client: a bucket each, filled steadily, that every request takes one out of."""

    def __init__(self, rate: float | None):
        self.rate = rate
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def count(self, client: str) -> None:
        """Counts one request; Refused when the bucket is empty."""
        if self.rate is None:
            return
        client, now = network_of(client), time.monotonic()
        size = max(1.0, self.rate * PAGE_OF_IMAGES)
        left, last = self.buckets.pop(client, (size, now))
        left = min(size, left + (now - last) * self.rate)
        enough = left >= 1
        self.buckets[client] = (left - 1 if enough else left, now)
        if len(self.buckets) > MOST_CLIENTS:
            self.buckets.popitem(last=False)
        if not enough:
            hint = "wait as long as `Retry-After` says"
            raise Refused(
                429, f"more than {self.rate:g} requests a second", hint, come_back((1 - left) / self.rate)
            )


def network_of(client: str) -> str:
    """The address; of IPv6 the network, of which one client has all addresses."""
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(int(address) >> 64)
    return str(address)


async def send_and_close(answer: Answer, upload: Upload, send: "Send") -> None:
    """Sends a refusal while the client still sends, then ends the connection."""
    start = answer.start()
    start["headers"].append((b"connection", b"close"))
    await send(start)
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    await upload.discard()
    await send({"type": "http.response.body", "body": b""})
