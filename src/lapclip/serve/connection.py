"""One connection: uvicorn's, that does not wait forever for a request's head or for an answer to be taken.

uvicorn's own timeout begins after an answer and ends with the next byte, so that a client that sends a byte now and
then, or nothing at all, would keep its connection. And it answers in words, as everything here does.
"""

import asyncio
import json
import sys
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lapclip.serve.limits import Limits

LONGEST_HEAD = 64 << 10  # bytes
FREE_PARTS = 4096  # of a body, however small; each takes as long to read as some kilobytes in one piece
SMALLEST_PART = 256  # bytes that the others have on average


class Reader(h11.Connection):
    """Reads HTTP, and refuses what only serves to deceive or to keep the server busy."""

    num_parts = num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.num_parts = self.num_bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                # Whoever stands between may count otherwise, and take the rest for another request.
                raise h11.RemoteProtocolError("two ways to tell where the body ends")
        elif isinstance(event, h11.Data):
            self.num_parts += 1
            self.num_bytes += len(event.data)
            if self.num_parts > FREE_PARTS + self.num_bytes // SMALLEST_PART:
                raise h11.RemoteProtocolError("a body in too many small parts")
        return event


class Connection(H11Protocol):
    """Ends connections that only wait, the longest waiting first when there are too many."""

    limits = Limits()
    head_timer: asyncio.TimerHandle | None = None
    answer_timer: asyncio.TimerHandle | None = None
    is_refused = False

    def __init__(self, config: uvicorn.Config, *more: Any, **named: Any):
        super().__init__(config, *more, **named)
        self.conn = Reader(h11.SERVER, LONGEST_HEAD)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self.drop_one()
        self.wait_for_head()

    def drop_one(self) -> None:
        """Makes room: ends the connection that has waited for a request longest, or this one."""
        waiting = [
            other
            for other in self.connections
            if isinstance(other, Connection) and other.head_timer is not None
        ]
        longest = min(waiting, key=lambda other: other.head_timer.when(), default=self)  # type: ignore[union-attr]
        longest.transport.abort()

    def wait_for_head(self) -> None:
        if self.head_timer is None and not self.transport.is_closing():
            self.head_timer = self.loop.call_later(self.limits.header_seconds, self.end)

    def end(self) -> None:
        """Too slow. What is unfinished is dropped: an answer would only be waited for."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        super().data_received(data)
        is_asking = self.cycle is not None and not self.cycle.response_complete
        if is_asking and self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
        elif not is_asking:
            self.wait_for_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.conn.trailing_data[0]:  # the next request has begun
            self.wait_for_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.answer_timer is None:
            self.answer_timer = self.loop.call_later(self.limits.unread_seconds, self.end)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.answer_timer is not None:
            self.answer_timer.cancel()
            self.answer_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.head_timer, self.answer_timer):
            if timer is not None:
                timer.cancel()
        self.head_timer = self.answer_timer = None
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or has a head of more than 64 KB, is refused in words."""
        problem = sys.exc_info()[1]
        status = 431 if getattr(problem, "error_status_hint", 400) == 431 else 400
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # in the middle of an answer
            self.transport.abort()
            return
        told = {
            # Without the bytes that h11 quotes after it.
            "error": f"this is not understood: {str(problem).partition(': bytearray')[0]}".lower(),
            "hint": "ask in HTTP/1.1, with a shorter head",
        }
        body = json.dumps(told).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        reply = h11.Response(
            status_code=status, headers=[*headers, ("connection", "close")], reason=b"Refused"
        )
        parts = [self.conn.send(event) or b"" for event in (reply, h11.Data(data=body), h11.EndOfMessage())]
        self.transport.write(b"".join(parts))
        # Closed at once, it would be reset while the client still sends, who would never read why.
        self.is_refused = True
        if self.cycle is not None:  # somebody waits for the rest of a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.wait_for_head()
        self.loop.call_later(self.limits.linger_seconds, self.transport.close)


def connection_for(limits: Limits) -> type[Any]:
    return type("LimitedConnection", (Connection,), {"limits": limits})
