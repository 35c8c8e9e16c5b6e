"""Everything that can be asked of the server, as one table: it is routed, checked and described by this."""

from dataclasses import dataclass
from typing import Any, Literal

from lapclip.serve.parameters import Parameter

Body = Literal["picture", "texts"]
HIGHEST_ID = 10**18 - 1
MOST_TEXTS = 256
LONGEST_TEXT = 10_000  # characters
MOST_LABELS = 1000
MOST_TEMPLATES = 16
IMAGE_KINDS = ("image/*", "application/octet-stream")

ID = Parameter(
    "id",
    "an image of the index, as `/search` names it",
    "integer",
    1,
    HIGHEST_ID,
    is_needed=True,
    place="path",
)
SEARCHING = (
    Parameter("q", "words; ` + ` and ` - ` between them add and take away", high=LONGEST_TEXT),
    Parameter("like", "images of the index to look like", "integer", 1, HIGHEST_ID, most=64),
    Parameter("unlike", "images of the index not to look like", "integer", 1, HIGHEST_ID, most=64),
    Parameter("top", "how many results, 1 to 1000", "integer", 1, 1000, default=24),
    Parameter("min_score", "the lowest cosine of a result, -1 to 1", "number", -1, 1),
    Parameter("folder", "only images in this folder, one of `/health`'s or inside one", high=4096),
)
LABELS = (
    Parameter(
        "label", "what it may be; once for each label", low=1, high=1000, most=MOST_LABELS, is_needed=True
    ),
    Parameter(
        "template",
        "a sentence with `{}` where the label goes",
        high=1000,
        most=MOST_TEMPLATES,
        pattern=r"\{\}",
    ),
)


def record(**properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that always has all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT, WHOLE, REAL = {"type": "string"}, {"type": "integer"}, {"type": "number"}
HEALTH = record(
    status=TEXT,
    model=TEXT,
    width=WHOLE,
    num_pictures=WHOLE,
    folders=listed(TEXT),
    version=TEXT,
)
FOUND = record(id=WHOLE, path=TEXT, name=TEXT, score=REAL, width=WHOLE, height=WHOLE, copies=listed(TEXT))
RESULTS = record(query=TEXT, milliseconds=REAL, results=listed(FOUND), num_pictures=WHOLE)
EMBEDDINGS = record(embeddings=listed(listed(REAL)), width=WHOLE)
CLASSES = record(results=listed(record(label=TEXT, probability=REAL)))


@dataclass(frozen=True)
class Operation:
    """One thing to ask: where, how, with what, and the schema or the kind of file that comes back."""

    name: str
    method: Literal["GET", "POST"]
    path: str  # may end in a `{parameter}`
    summary: str
    answer: dict[str, Any] | str  # the schema of a JSON answer, or the kind of another
    parameters: tuple[Parameter, ...] = ()
    bodies: tuple[Body, ...] = ()
    has_any_parameters: bool = False  # a page's address may say what it shows


OPERATIONS = (
    Operation("health", "GET", "/health", "What is served", HEALTH),
    Operation("search", "GET", "/search", "Images that words or images mean", RESULTS, SEARCHING),
    Operation("search_picture", "POST", "/search", "Images like this one", RESULTS, SEARCHING, ("picture",)),
    Operation(
        "embed", "POST", "/embed", "Unit rows of texts or an image", EMBEDDINGS, (), ("texts", "picture")
    ),
    Operation(
        "classify",
        "GET",
        "/classify",
        "Which label fits an image of the index",
        CLASSES,
        (*LABELS, Parameter("id", ID.help, "integer", 1, HIGHEST_ID, is_needed=True)),
    ),
    Operation(
        "classify_picture",
        "POST",
        "/classify",
        "Which label fits this image",
        CLASSES,
        LABELS,
        ("picture",),
    ),
    Operation("thumbnail", "GET", "/thumbnail/{id}", "An image of the index, small", "image/jpeg", (ID,)),
    Operation("picture", "GET", "/picture/{id}", "An image of the index, large", "image/jpeg", (ID,)),
    Operation("openapi", "GET", "/openapi.json", "This description", {"type": "object"}),
    Operation("page", "GET", "/", "The page", "text/html", has_any_parameters=True),
    Operation(
        "static",
        "GET",
        "/static/{name}",
        "A file of the page",
        "*/*",
        (Parameter("name", "the file's name", low=1, high=100, is_needed=True, place="path"),),
    ),
)


def find_operations(path: str) -> tuple[dict[str, Operation], str]:
    """What can be asked at a path, by method, and the part of it that stands for the parameter."""
    fixed: dict[str, Operation] = {operation.method: operation for operation in BY_PATH.get(path, ())}
    if fixed:
        return fixed, ""
    folder, _, rest = path.rpartition("/")
    here = BY_FOLDER.get(folder, ()) if rest else ()
    under: dict[str, Operation] = {operation.method: operation for operation in here}
    return under, rest


BY_PATH: dict[str, list[Operation]] = {}
BY_FOLDER: dict[str, list[Operation]] = {}
for operation in OPERATIONS:
    folder, _, last = operation.path.rpartition("/")
    if last.startswith("{"):
        BY_FOLDER.setdefault(folder, []).append(operation)
    else:
        BY_PATH.setdefault(operation.path, []).append(operation)
