"""The description of the interface, OpenAPI 3.1, made from the table of operations."""

from typing import Any

from lapclip.serve.operations import IMAGE_KINDS, LONGEST_TEXT, MOST_TEXTS, OPERATIONS, Body, Operation
from lapclip.serve.parameters import Parameter
from lapclip.serve.refusals import REFUSALS

PROBLEM = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "hint": {"type": "string"}},
    "required": ["error", "hint"],
}
TEXTS = {
    "type": "object",
    "properties": {
        "texts": {
            "type": "array",
            "items": {"type": "string", "maxLength": LONGEST_TEXT},
            "minItems": 1,
            "maxItems": MOST_TEXTS,
        }
    },
    "required": ["texts"],
    "additionalProperties": False,
}
PICTURE = {"type": "string", "format": "binary"}
RETRIES = {429, 503}


def build_openapi(version: str, needs_token: bool) -> dict[str, Any]:
    """The whole document, as JSON has it."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = describe(operation)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "lapclip",
            "version": version,
            "summary": "A CLIP model and its index of images.",
        },
        "paths": paths,
        "components": {"schemas": {"Problem": PROBLEM}},
    }
    if needs_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def describe(operation: Operation) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {"200": answered(operation)} | refusals(),
    }
    if operation.parameters:
        told["parameters"] = [describe_parameter(parameter) for parameter in operation.parameters]
    if operation.bodies:
        content = {kind: schema for body in operation.bodies for kind, schema in contents(body).items()}
        told["requestBody"] = {"required": True, "content": content}
    return told


def describe_parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.is_needed,
        "description": parameter.help,
        "schema": parameter.schema(),
    }


def contents(body: Body) -> dict[str, Any]:
    if body == "texts":
        return {"application/json": {"schema": TEXTS}}
    return {kind: {"schema": PICTURE} for kind in IMAGE_KINDS}


def answered(operation: Operation) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        return {"description": operation.summary, "content": {operation.answer: {}}}
    return {
        "description": operation.summary,
        "content": {"application/json": {"schema": operation.answer}},
    }


def refusals() -> dict[str, Any]:
    problem = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    later = {"headers": {"Retry-After": {"required": True, "schema": {"type": "integer"}}}}
    return {
        str(status): {"description": words, "content": problem} | (later if status in RETRIES else {})
        for status, words in REFUSALS.items()
    }
