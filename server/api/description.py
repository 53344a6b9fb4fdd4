"""What /openapi.json says beyond what FastAPI gathers from the routes: the shapes of events in streams."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from server.api.answers import ChatChunk, CompletionChunk
from server.operations import OperationReport

EVENTS = (ChatChunk, CompletionChunk, OperationReport)


def describe_events(app: FastAPI) -> None:
    generated = app.openapi

    def described() -> dict[str, object]:
        if app.openapi_schema is None:
            inputs: list[tuple[type, JsonSchemaMode, TypeAdapter]] = [(event, "serialization", TypeAdapter(event)) for event in EVENTS]
            _, events = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
            generated()["components"]["schemas"] |= events["$defs"]
        return generated()

    app.openapi = described
