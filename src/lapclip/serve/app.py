"""The HTTP interface: a request in, checked against the table of operations, an answer or a refusal out."""

import asyncio
import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lapclip import __version__
from lapclip.errors import UserError
from lapclip.search.searcher import Match
from lapclip.serve.door import Door
from lapclip.serve.http import HEADERS, Guard, send_static
from lapclip.serve.limits import Gone, Held, Limits, Rates, Upload, send_and_close
from lapclip.serve.openapi import build_openapi
from lapclip.serve.operations import LONGEST_TEXT, MOST_TEXTS, Operation, find_operations
from lapclip.serve.parameters import read_query
from lapclip.serve.refusals import Answer, Refused, come_back, json_answer
from lapclip.serve.service import Service

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

# An image that somebody drops on the page is shown there before it is sent.
PAGE_HEADERS = {
    **HEADERS,
    "content-security-policy": HEADERS["content-security-policy"].replace(
        "img-src 'self'", "img-src 'self' blob:"
    ),
}
SECONDS_TO_ANSWER = 0.3  # after Ctrl-C
SECONDS_FRESH = 300  # of a thumbnail in the browser's cache


def build_server(
    service: Service,
    *,
    address: str,
    hosts: frozenset[str],
    port: int,
    token: str | None,
    limits: Limits,
    closing: asyncio.Event,
) -> "ASGIApp":
    """The whole application: who may ask at all, who comes in, what is answered, until it is closing."""
    api = Api(service, limits, closing, needs_token=token is not None)
    door = Door(api, token=token, rates=Rates(limits.rate), port=port)
    return Guard(door, address=address, hosts=hosts, methods=None, headers=PAGE_HEADERS)


class Api:
    """Answers one request after the other; whatever is wrong with one is said in words."""

    ending: asyncio.Task[None] | None

    def __init__(self, service: Service, limits: Limits, closing: asyncio.Event, *, needs_token: bool):
        self.service, self.limits = service, limits
        self.held = Held(limits)
        self.document = json_answer(build_openapi(__version__, needs_token))
        self.closing, self.ending = closing, None
        self.working: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if self.ending is None:
            self.service.embedding.start()
            self.ending = asyncio.create_task(self.end())
        task = asyncio.current_task()
        assert task is not None  # a server's request always is one
        self.working.add(task)
        try:
            await self.respond(scope, receive, send)
        finally:
            self.working.discard(task)

    async def end(self) -> None:
        """Gives what is asked a moment to be answered when the server ends; the rest is told so."""
        await self.closing.wait()
        await asyncio.sleep(SECONDS_TO_ANSWER)
        for task in self.working:
            task.cancel()

    async def respond(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        upload = Upload(scope, receive, self.held)
        try:
            answer = await self.answer(scope, upload)
        except Gone:
            return
        except Refused as refused:
            answer = refused.answer()
        except UserError as problem:
            answer = Refused(404, problem.message, problem.hint).answer()
        except asyncio.CancelledError:
            answer = Refused(503, "the server is ending", "start it again", come_back(1)).answer()
        except Exception:
            await broken()(scope, receive, send)
            raise  # to where it is noted
        finally:
            upload.release()
        if isinstance(answer, Answer) and not upload.is_complete:
            await send_and_close(answer, upload, send)
        else:
            await answer(scope, receive, send)

    async def answer(self, scope: "Scope", upload: Upload) -> "ASGIApp":
        """Finds what is asked, reads it, and has it answered."""
        operations, rest = find_operations(scope["path"])
        if not operations:
            raise Refused(404, "there is nothing at this address", "`/openapi.json` lists what there is")
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        operation = operations.get(method)
        if operation is None:
            return refuse_method(scope["method"], operations)
        asked = (
            {} if operation.has_any_parameters else read_query(scope["query_string"], operation.parameters)
        )
        if rest:
            asked |= read_path(operation, rest)
        if operation.bodies:
            asked["body"] = await self.read_body(scope, upload, operation)
        elif not upload.is_complete:
            raise Refused(400, f"`{scope['method']}` has no body here", "leave it away")
        with self.held.working():
            return await getattr(self, operation.name)(asked)

    async def read_body(self, scope: "Scope", upload: Upload, operation: Operation) -> bytes | list[str]:
        """The bytes of an image or the texts of a JSON object, by what the client says it is."""
        kind = (
            dict(scope["headers"])
            .get(b"content-type", b"")
            .decode("latin-1")
            .partition(";")[0]
            .strip()
            .lower()
        )
        if kind == "application/json" and "texts" in operation.bodies:
            return read_texts(await upload.read(self.limits.json_bytes))
        if not kind.startswith("image/") and kind != "application/octet-stream":
            also = " or `application/json`" if "texts" in operation.bodies else ""
            hint = f"send an image with `content-type: image/jpeg`{also}"
            raise Refused(415, f"a body of kind `{kind[:80]}` is not read here", hint)
        data = await upload.read(self.limits.upload_bytes)
        if not data:
            raise Refused(400, "the body is empty", "send the bytes of an image")
        return data

    async def health(self, asked: dict[str, Any]) -> Answer:
        num_pictures, folders = 0, []
        with suppress(Refused, UserError):
            async with self.service.current() as searcher:
                num_pictures, folders = searcher.index.num_images, searcher.index.folders
        return json_answer(
            {
                "status": "ok",
                "model": self.service.embedder.name,
                "width": self.service.embedder.width,
                "num_pictures": num_pictures,
                "folders": folders,
                "version": __version__,
            }
        )

    async def search(self, asked: dict[str, Any]) -> Answer:
        started = time.perf_counter()
        async with self.service.current() as searcher:
            folder = inside(asked["folder"], searcher.index.folders)
            likes = [(1, id) for id in asked["like"]] + [(-1, id) for id in asked["unlike"]]
            vector_E = await self.service.vector(searcher, asked["q"] or "", likes, asked.get("body", b""))
            found = await self.service.search(
                searcher,
                vector_E,
                top=asked["top"],
                min_score=asked["min_score"],
                folder=folder,
                without=[id for _, id in likes],
            )
            num_pictures = searcher.index.num_images
        return json_answer(
            {
                "query": asked["q"] or "",
                "milliseconds": round((time.perf_counter() - started) * 1000, 2),
                "results": [result_of(one) for one in found],
                "num_pictures": num_pictures,
            }
        )

    search_picture = search

    async def embed(self, asked: dict[str, Any]) -> Answer:
        body = asked["body"]
        if isinstance(body, bytes):
            rows = (await self.service.image_row(body))[None]
        else:
            rows = await self.service.text_rows(body)
        return json_answer({"embeddings": rows.tolist(), "width": rows.shape[1]})

    async def classify(self, asked: dict[str, Any]) -> Answer:
        row = await self.service.row_of(asked["id"])
        return await self.labelled(row, asked)

    async def classify_picture(self, asked: dict[str, Any]) -> Answer:
        row = await self.service.image_row(asked["body"])
        return await self.labelled(row, asked)

    async def labelled(self, row: Any, asked: dict[str, Any]) -> Answer:
        found = await self.service.classify(row, asked["label"], asked["template"])
        return json_answer({"results": [{"label": label, "probability": share} for label, share in found]})

    async def thumbnail(self, asked: dict[str, Any]) -> Answer:
        return as_image(await self.service.show(asked["id"], is_large=False))

    async def image(self, asked: dict[str, Any]) -> Answer:
        return as_image(await self.service.show(asked["id"], is_large=True))

    async def openapi(self, asked: dict[str, Any]) -> Answer:
        return self.document

    async def page(self, asked: dict[str, Any]) -> "ASGIApp":
        return send_static("search.html")

    async def static(self, asked: dict[str, Any]) -> "ASGIApp":
        return send_static(asked["name"])


def broken() -> Answer:
    return Refused(500, "something is wrong with the server", "see what `lapclip serve` printed").answer()


def refuse_method(method: str, operations: dict[str, Operation]) -> Answer:
    """What is answered instead; `OPTIONS` is told so, too."""
    allowed = sorted(operations) + (["HEAD"] if "GET" in operations else []) + ["OPTIONS"]
    allow = (b"allow", ", ".join(allowed).encode())
    if method == "OPTIONS":
        return Answer(b"", status=204, headers=(allow,))
    told = f"`{method[:20]}` is not answered here"
    return Refused(405, told, f"use {' or '.join(sorted(operations))}", allow).answer()


def read_path(operation: Operation, rest: str) -> dict[str, Any]:
    (parameter,) = (parameter for parameter in operation.parameters if parameter.place == "path")
    try:
        return {parameter.name: parameter.read(rest)}
    except Refused:
        raise Refused(404, "there is nothing at this address", "`/search` gives the ids of images") from None


def read_texts(body: bytes) -> list[str]:
    """The texts of `{"texts": [...]}`; Refused says what is wrong with it."""
    hint = 'send `{"texts": ["a cat", "a dog"]}`'
    try:
        asked = json.loads(body.decode("utf-8"), parse_constant=refuse_constant)
    except UnicodeDecodeError:
        raise Refused(400, "the body is not UTF-8", hint) from None
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON", hint) from None
    if not isinstance(asked, dict) or set(asked) != {"texts"}:
        raise Refused(400, "the body is not an object with `texts` alone", hint)
    texts = asked["texts"]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Refused(400, "`texts` is not a list of texts", hint)
    if not 1 <= len(texts) <= MOST_TEXTS:
        raise Refused(400, f"`texts` holds {len(texts):,}; 1 to {MOST_TEXTS} are answered at a time", hint)
    if any(len(text) > LONGEST_TEXT for text in texts):
        raise Refused(400, f"a text is longer than {LONGEST_TEXT:,} characters", hint)
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        raise Refused(400, "a text holds half a character", "send whole ones: `\\ud83d\\ude00`") from None
    return texts


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def inside(folder: str | None, folders: list[str]) -> str | None:
    """The folder, if the index knows it by that name; the disk is not asked."""
    if not folder:
        return None
    plain = os.path.normpath(folder)
    is_known = any(plain == own or plain.startswith(own.rstrip("/") + "/") for own in folders)
    if not is_known or "\0" in folder:
        raise Refused(404, "this folder is not indexed", "`/health` lists those that are")
    return plain


def result_of(match: Match) -> dict[str, Any]:
    return match.record() | {"score": round(match.score, 6)}


def as_image(jpeg: bytes) -> Answer:
    fresh = f"private, max-age={SECONDS_FRESH}".encode()
    return Answer(jpeg, b"image/jpeg", headers=((b"cache-control", fresh),))
