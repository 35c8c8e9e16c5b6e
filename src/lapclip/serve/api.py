"""The HTTP API: what can be asked, as one table of operations that is routed, checked and described from.

Parameters, bodies and answers are msgspec structs; the OpenAPI document is made from their schemas.
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from http import HTTPStatus
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lapclip import __version__
from lapclip.errors import UserError, suggest
from lapclip.search.index import Filter, parse_date
from lapclip.serve.http import Guard, build_app, json_response, send_static
from lapclip.serve.limits import Bodies, Limits, Refused, busy
from lapclip.serve.service import MAX_TEXTS, Service

MAX_QUERY_BYTES = 48 << 10  # after the `?`
MAX_FIELDS = 1200
FRESH_SECONDS = 300  # of a thumbnail in the browser's cache
NUMBERS = {"integer": (int, "a whole number"), "number": (float, "a number")}
IMAGE_TYPES = ("image/*", "application/octet-stream")
REFUSALS = (400, 401, 403, 404, 405, 408, 413, 414, 415, 421, 429, 431, 503)  # every status of a refusal

Text = Annotated[str, Meta(max_length=10_000)]
Id = Annotated[int, Meta(ge=1, le=10**18 - 1, description="id of an indexed image, as returned by `/search`")]
Label = Annotated[str, Meta(min_length=1, max_length=1000)]
Template = Annotated[str, Meta(max_length=1000, pattern=r"\{\}")]
Top = Annotated[int, Meta(ge=1, le=1000, description="maximum number of results, 1 to 1000")]
Cosine = Annotated[float, Meta(ge=-1, le=1, description="minimum cosine similarity of a result, -1 to 1")]
Prompts = "prompts with `{}` in place of the label"
Inside = "only images in this folder: one of those in `/health`, or a folder inside one"


class Nothing(Struct):
    """No parameters."""


class Search(Struct):
    q: Annotated[Text, Meta(description="text; ` + ` and ` - ` add and subtract terms")] = ""
    like: Annotated[list[Id], Meta(max_length=64, description="ids of indexed images to search for")] = []
    unlike: Annotated[list[Id], Meta(max_length=64, description="ids of indexed images to subtract")] = []
    top: Top = 24
    min_score: Cosine | UnsetType = UNSET
    folder: Annotated[str, Meta(max_length=4096, description=Inside)] = ""
    after: Annotated[date, Meta(description="only files modified on this day or later")] | UnsetType = UNSET
    before: Annotated[date, Meta(description="only files modified before this day")] | UnsetType = UNSET
    min_size: Annotated[int, Meta(ge=0, le=10**6, description="minimum pixels of the longer side")] = 0


class Classify(Struct):
    label: Annotated[list[Label], Meta(min_length=1, max_length=1000, description="one parameter per label")]
    template: Annotated[list[Template], Meta(max_length=16, description=Prompts)] = []


class ClassifyIndexed(Classify, kw_only=True):
    id: Id


class OneImage(Struct):
    id: Id


class OneFile(Struct):
    name: Annotated[str, Meta(min_length=1, max_length=100, description="the file's name")]


class Texts(Struct, forbid_unknown_fields=True):
    texts: Annotated[list[Text], Meta(min_length=1, max_length=MAX_TEXTS)]


class Health(Struct):
    status: str
    model: str
    width: int
    num_pictures: int
    folders: list[str]
    version: str


class Found(Struct):
    id: int
    path: str
    name: str
    score: float
    width: int
    height: int
    copies: list[str]
    modified: float


class Results(Struct):
    query: str
    milliseconds: float
    results: list[Found]
    num_pictures: int
    unknown_words: list[str] | None


class Embeddings(Struct):
    embeddings: list[list[float]]
    width: int


class Probability(Struct):
    label: str
    probability: float


class Probabilities(Struct):
    results: list[Probability]


class Problem(Struct):
    error: str
    hint: str


async def health(service: Service, asked: Nothing) -> Health:
    num_images, folders = 0, []
    with suppress(Refused, UserError):
        index = (await service.current()).index
        num_images, folders = index.num_images, index.folders
    embedder = service.embedder
    return Health("ok", embedder.name, embedder.width, num_images, folders, __version__)


async def search(service: Service, asked: Search, image: bytes = b"") -> Results:
    started = time.perf_counter()
    searcher = await service.current()
    folder = known_folder(asked.folder, searcher.index.folders)
    likes = [(1, id) for id in asked.like] + [(-1, id) for id in asked.unlike]
    vector_E = await service.vector(searcher, asked.q, likes, image)
    min_score = None if asked.min_score is UNSET else asked.min_score
    after, before = (None if day is UNSET else parse_date(str(day)) for day in (asked.after, asked.before))
    wanted = Filter(folder, after, before, asked.min_size or None)
    limits: dict[str, Any] = {"top": asked.top, "min_score": min_score, "wanted": wanted}
    work = partial(searcher.search, vector_E, **limits, without=[id for _, id in likes])
    found = await service.in_thread(service.searchers, work)
    results = [Found(**match.record() | {"score": round(match.score, 6)}) for match in found.matches]
    milliseconds = round((time.perf_counter() - started) * 1000, 2)
    unknown = service.embedder.tokenizer.unknown_words(asked.q)
    return Results(asked.q, milliseconds, results, searcher.index.num_images, unknown)


async def embed(service: Service, asked: Nothing, body: bytes | list[str]) -> Embeddings:
    rows = await service.text_rows(body) if isinstance(body, list) else (await service.image_row(body))[None]
    return Embeddings(rows.tolist(), rows.shape[1])


async def classify(service: Service, asked: Classify, image: bytes = b"") -> Probabilities:
    row = await (service.row_of(asked.id) if isinstance(asked, ClassifyIndexed) else service.image_row(image))
    found = await service.classify(row, asked.label, asked.template)
    return Probabilities([Probability(label, probability) for label, probability in found])


async def thumbnail(service: Service, asked: OneImage, is_large: bool = False) -> Response:
    fresh = {"cache-control": f"private, max-age={FRESH_SECONDS}"}
    return Response(await service.show(asked.id, is_large), media_type="image/jpeg", headers=fresh)


async def static(service: Service, asked: OneFile | None) -> Response:
    return send_static(asked.name if asked else "search.html")


async def openapi(service: Service, asked: Nothing) -> dict[str, Any]:
    return describe(service.needs_token)


def known_folder(folder: str, folders: list[str]) -> str | None:
    """The folder, if the index has it by that name; the disk is not asked."""
    plain = os.path.normpath(folder)
    is_known = any(plain == own or plain.startswith(own.rstrip("/") + "/") for own in folders)
    if folder and (not is_known or "\0" in folder):
        raise Refused(404, "this folder is not indexed", "`/health` lists the indexed folders")
    return plain if folder else None


@dataclass(frozen=True)
class Operation:
    """One thing to ask: where, how, with what, and the struct or the media type of the answer."""

    name: str  # `operationId`, which generated clients use
    method: Literal["GET", "POST"]
    path: str
    handler: Callable[..., Awaitable[Any]]
    summary: str
    answer: type | str
    parameters: type[Struct] | None = Nothing  # of the path and the query; None takes any
    has_image: bool = False
    has_texts: bool = False


OPERATIONS = (
    Operation("health", "GET", "/health", health, "The model and the index", Health),
    Operation("search", "GET", "/search", search, "Search by text and by indexed images", Results, Search),
    Operation("search_picture", "POST", "/search", search, "Search by uploaded image", Results, Search, has_image=True),
    Operation("embed", "POST", "/embed", embed, "Embeddings of texts or an image, unit length", Embeddings,
              has_image=True, has_texts=True),
    Operation("classify", "GET", "/classify", classify, "Classify an indexed image", Probabilities,
              ClassifyIndexed),
    Operation("classify_picture", "POST", "/classify", classify, "Classify an uploaded image", Probabilities,
              Classify, has_image=True),
    Operation("thumbnail", "GET", "/thumbnail/{id}", thumbnail, "Thumbnail of an image", "image/jpeg", OneImage),
    Operation("picture", "GET", "/picture/{id}", partial(thumbnail, is_large=True), "Large version of an image",
              "image/jpeg", OneImage),
    Operation("openapi", "GET", "/openapi.json", openapi, "This description", dict),
    Operation("page", "GET", "/", static, "The page", "text/html", None),
    Operation("static", "GET", "/static/{name}", static, "A file of the page", "*/*", OneFile),
)  # fmt: skip


def build_server(
    service: Service, *, address: str, hosts: frozenset[str], token: str | None, limits: Limits
) -> ASGIApp:
    """The whole application: who may ask, how much, and what is answered."""
    service.needs_token = token is not None
    free, bodies = asyncio.Semaphore(limits.requests), Bodies(limits)
    by_path: dict[str, dict[str, Operation]] = defaultdict(dict)
    for operation in OPERATIONS:
        by_path[operation.path][operation.method] = operation

    async def endpoint(request: Request) -> Response:
        """Reads what is asked, and has it answered."""
        own = request.scope["route"]
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"allow": ", ".join(sorted(own.methods))})
        operation = by_path[own.path]["GET" if request.method == "HEAD" else request.method]
        asked: list[Any] = [operation.parameters and read_parameters(operation.parameters, request)]
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        max_bytes = limits.json_bytes if kind == "application/json" else limits.upload_bytes
        async with bodies.read(request, max_bytes) as body:
            if operation.has_image:
                asked.append(read_body(operation, kind, body))
            elif body:
                raise Refused(400, f"`{request.method}` does not accept a body here", "omit it")
            if free.locked():
                raise busy()
            async with free:
                answer = await operation.handler(service, *asked)
        return answer if isinstance(answer, Response) else json_response(answer)

    routes = [Route(path, endpoint, methods=[*methods, "OPTIONS"]) for path, methods in by_path.items()]
    app = build_app(routes, hint="`/openapi.json` lists all routes")
    return Guard(app, address=address, hosts=hosts, token=token, rate=limits.rate)


def read_body(operation: Operation, kind: str, body: bytes) -> bytes | list[str]:
    """The bytes of an image or the texts of a JSON object, by the media type."""
    if kind == "application/json" and operation.has_texts:
        try:
            return msgspec.json.decode(body, type=Texts).texts
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise Refused(400, f"the body: {problem}", 'send `{"texts": ["a cat", "a dog"]}`') from None
    if not kind.startswith("image/") and kind != "application/octet-stream":
        also = " or `application/json`" if operation.has_texts else ""
        hint = f"send an image with `content-type: image/jpeg`{also}"
        raise Refused(415, f"a body of type `{kind[:80]}` is not accepted here", hint)
    if not body:
        raise Refused(400, "the body is empty", "send the bytes of an image")
    return body


def read_parameters(kind: type[Struct], request: Request) -> Struct:
    """The parameters of the path and the query as their struct; Refused names what is wrong."""
    known = schema_of(kind)["properties"]
    given: dict[str, Any] = dict(request.path_params)
    for name, text in read_fields(request.scope["query_string"]):
        if name not in known or name in request.path_params:
            shown = name[:40]
            own = ", ".join(f"`{one}`" for one in known if one not in request.path_params) or "none"
            raise Refused(400, f"unknown parameter `{shown}`{suggest(shown, known)}", f"there is {own}")
        schema = known[name].get("items", known[name])
        if schema["type"] in NUMBERS:
            refuse_wrong_number(name, text, schema)
        if known[name]["type"] == "array":
            given.setdefault(name, []).append(text)
        elif name in given:
            raise Refused(400, f"`{name}` is given twice", "`/openapi.json` describes the parameters")
        else:
            given[name] = text
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as problem:
        if request.path_params:
            raise Refused(404, "there is nothing at this URL", "`/search` returns ids of images") from None
        raise Refused(400, f"the parameters: {problem}", "`/openapi.json` describes them") from None


def refuse_wrong_number(name: str, text: str, schema: dict[str, Any]) -> None:
    kind, words = NUMBERS[schema["type"]]
    least, most = schema["minimum"], schema["maximum"]
    with suppress(msgspec.ValidationError):
        if least <= msgspec.convert(text, kind, strict=False) <= most:
            return
    raise Refused(400, f"`{name}` is not {words} from {least:,} to {most:,}", "`/openapi.json` describes it")


def read_fields(query: bytes) -> list[tuple[str, str]]:
    if len(query) > MAX_QUERY_BYTES:
        raise Refused(414, f"the URL is longer than {MAX_QUERY_BYTES >> 10} KB", "send a smaller request")
    try:
        text = query.decode("utf-8")
        return parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except UnicodeDecodeError:
        raise Refused(400, "the URL has bytes that are not UTF-8", "encode text as UTF-8") from None
    except ValueError:
        raise Refused(400, f"more than {MAX_FIELDS:,} parameters", "send a smaller request") from None


@cache
def schema_of(struct: type[Struct]) -> dict[str, Any]:
    return msgspec.json.schema_components([struct])[1][struct.__name__]


@cache
def describe(needs_token: bool) -> dict[str, Any]:
    """The OpenAPI document."""
    answers = [operation.answer for operation in OPERATIONS if not isinstance(operation.answer, str)]
    kinds = list(dict.fromkeys([Problem, Texts, *answers]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for operation in OPERATIONS:
        paths[operation.path][operation.method.lower()] = describe_operation(operation, by_kind)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "lapclip", "version": __version__, "summary": "A CLIP model and its index."},
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def describe_operation(operation: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    retry = {"headers": {"Retry-After": {"required": True, "schema": {"type": "integer"}}}}
    kind = operation.answer
    content = {kind: {}} if isinstance(kind, str) else {"application/json": {"schema": schemas[kind]}}
    responses = {"200": {"description": operation.summary, "content": content}}
    for status in REFUSALS:
        problem = {"application/json": {"schema": schemas[Problem]}}
        refusal = {"description": HTTPStatus(status).phrase, "content": problem}
        responses[str(status)] = refusal | (retry if status in (429, 503) else {})
    described: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary}
    described["responses"] = responses
    own = schema_of(operation.parameters or Nothing)
    if own["properties"]:
        described["parameters"] = [
            {
                "name": name,
                "in": "path" if f"{{{name}}}" in operation.path else "query",
                "required": name in own["required"],
                "description": schema["description"],
                "schema": {key: value for key, value in schema.items() if key != "description"},
            }
            for name, schema in own["properties"].items()
        ]
    if operation.has_image:
        image = {"schema": {"type": "string", "format": "binary"}}
        texts = {"application/json": {"schema": schemas[Texts]}} if operation.has_texts else {}
        described["requestBody"] = {"required": True, "content": texts | dict.fromkeys(IMAGE_TYPES, image)}
    return described
