"""What is promised to programs, in `fixtures/*.json`: keys and their types. More may be added, nothing taken away."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
IS_WRITING = "LAPCLIP_WRITE_PROMISES" in os.environ  # then what is found is added to what is promised
# Objects whose keys are the machine's or the data's, not ours.
OPEN = {"caches", "readings", "grad_norms", "rates", "torch"}


def promised(name: str, found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """What a file of promises says; made or added to when asked for."""
    file = FIXTURES / f"{name}.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    if IS_WRITING:
        known = {part: {**known.get(part, {}), **found.get(part, {})} for part in {**known, **found}}
        file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return known


def broken(name: str, found: dict[str, dict[str, str]]) -> list[str]:
    """Promises that do not hold: each key is still there, and of the same type; null goes with every type."""
    problems = []
    for part, keys in promised(name, found).items():
        for key, kinds in keys.items() if part in found else ():
            now = found[part].get(key)
            before, after = ({*kinds.split("|")} - {"null"}, {*(now or "").split("|")} - {"null"})
            if now is None and is_unseen(key, found[part]):
                continue
            if now is None:
                problems.append(f"{part}: `{key}` is gone")
            elif before and not after <= before:
                problems.append(f"{part}: `{key}` was {kinds}, and is {now}")
    return problems


def is_unseen(key: str, found: dict[str, str]) -> bool:
    """Whether it would stand in a list that is empty this time."""
    lists = [key[: match.start()] for match in re.finditer(r"\[\]", key)]
    return any(name in found and f"{name}[]" not in found for name in lists)


def keys_of(*values: object) -> dict[str, str]:
    """Each key of nested JSON with its types: {"runs[].name": "str", "runs[].pid": "int|null"}."""
    found: dict[str, set[str]] = defaultdict(set)

    def look(value: object, path: str, name: str) -> None:
        found[path].add("null" if value is None else type(value).__name__)
        if isinstance(value, dict) and name not in OPEN:
            for key, inner in value.items():
                look(inner, f"{path}.{key}" if path else key, key)
        elif isinstance(value, list):
            for inner in value:
                look(inner, f"{path}[]", name)

    for value in values:
        look(value, "", "")
    return {path: "|".join(sorted(kinds)) for path, kinds in found.items()}


def promises_of(document: dict) -> Iterator[tuple[str, str]]:
    """Each path, method, parameter, kind of body, answer and property of an OpenAPI document, with its type."""

    def properties(schema: dict, place: str) -> Iterator[tuple[str, str]]:
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        yield place, str(schema.get("type", "any"))
        for name, inner in schema.get("properties", {}).items():
            always = "" if name in schema.get("required", ()) else "?"
            yield from properties(inner, f"{place}.{name}{always}")
        if "items" in schema:
            yield from properties(schema["items"], f"{place}[]")

    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            here = f"{method.upper()} {path}"
            yield f"{here} id", operation["operationId"]
            for one in operation.get("parameters", ()):
                yield from properties(one["schema"], f"{here} {one['in']} {one['name']}")
                yield f"{here} {one['in']} {one['name']} required", str(one.get("required", False))
            for kind, body in operation.get("requestBody", {}).get("content", {}).items():
                yield from properties(body["schema"], f"{here} takes {kind} ")
            for code, answer in operation["responses"].items():
                yield from ((f"{here} {code} header {name}", "any") for name in answer.get("headers", ()))
                for kind, content in answer.get("content", {}).items():
                    yield from properties(content.get("schema", {}), f"{here} {code} {kind} ")
