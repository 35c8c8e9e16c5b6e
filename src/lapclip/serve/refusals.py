"""What is not answered, and how it is said: a status, what is wrong, and one thing to do about it."""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

# Every status of a refusal, as the description of the interface tells it.
REFUSALS = {
    400: "The question cannot be understood, or asks for nothing.",
    401: "A token is needed: `Authorization: Bearer TOKEN`.",
    403: "Another site's page asked.",
    404: "There is no such thing, or no index yet.",
    405: "Not this method; `Allow` lists those that are answered.",
    408: "The request took too long to arrive.",
    413: "The body is too large.",
    414: "The address is too long.",
    415: "The body is of another kind than is read here, or no image.",
    421: "The server is not meant by this name.",
    429: "Too many requests; `Retry-After` says when to come back.",
    431: "The head of the request is too long.",
    503: "Too busy; `Retry-After` says when to come back.",
}


class Refused(Exception):
    """A request that is not answered as it wanted."""

    def __init__(self, status: int, error: str, hint: str, *headers: tuple[bytes, bytes]):
        super().__init__(error)
        self.status, self.error, self.hint, self.headers = status, error, hint, headers

    def answer(self) -> "Answer":
        return json_answer({"error": self.error, "hint": self.hint}, self.status, *self.headers)


@dataclass(frozen=True)
class Answer:
    """What is sent back; as an ASGI application, so that it is as good as any other."""

    body: bytes
    kind: bytes = b"application/json"
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())

    def start(self) -> dict[str, Any]:
        own = [(b"content-type", self.kind), (b"content-length", str(len(self.body)).encode())]
        if self.status == 204:
            own = []
        return {"type": "http.response.start", "status": self.status, "headers": [*own, *self.headers]}

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        await send(self.start())
        await send({"type": "http.response.body", "body": self.body})


def json_answer(content: object, status: int = 200, *headers: tuple[bytes, bytes]) -> Answer:
    """In ASCII, which can say every file name, also one that is not text."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
    return Answer(body, status=status, headers=headers)


def come_back(seconds: float) -> tuple[bytes, bytes]:
    return (b"retry-after", str(max(1, round(seconds + 0.5))).encode())
