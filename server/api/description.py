"""Add the JSON schemas of answers to /openapi.json. Routes only refer to these schemas; the schemas are generated when the document is
first requested."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from typing_extensions import is_typeddict

from server import errors
from server.api import endpoints
from server.api.routes import COMPONENTS
from server.models import operations
from server.models.model import Unloaded

ELSEWHERE = (operations, errors)  # modules outside server/api that also define shapes of answers


def describe_answers(app: FastAPI) -> None:
    """Let the app's OpenAPI document contain the schemas of answers."""
    generated = app.openapi

    def described() -> dict[str, object]:
        """Return the document. The first call adds the schemas."""
        if app.openapi_schema is None:
            further = [shape for module in ELSEWHERE for shape in vars(module).values() if is_typeddict(shape)]
            shapes: list[type] = [Unloaded, *further, *endpoints.shapes()]
            inputs: list[tuple[type, JsonSchemaMode, TypeAdapter]] = [(shape, "serialization", TypeAdapter(shape)) for shape in shapes]
            _, schemas = TypeAdapter.json_schemas(inputs, ref_template=COMPONENTS)
            generated()["components"]["schemas"] |= schemas["$defs"]
        return generated()

    app.openapi = described
