"""Each endpoint is one file of `server/api`, and no other file lists the endpoints."""

from __future__ import annotations

import sys
from types import ModuleType

from server import api
from server.api import endpoints

FILE = '''
from fastapi import Response
from typing_extensions import TypedDict

from server.api.request.fields import Options
from server.api.answer.respond import json_answer
from server.api.routes import gives, new_router

class EchoBody(Options):
    number: int

class Echoed(TypedDict):
    number: int

def router(context):
    routes = new_router("Text")

    @routes.post("/v1/echo", responses=gives(Echoed))
    async def echo(body: EchoBody) -> Response:
        """Say it again."""
        return json_answer({"number": body.number})

    return routes
'''


def test_a_new_file_is_a_new_endpoint(serve, tmp_path, monkeypatch):
    """A new file in `server/api` is enough to add an endpoint: the endpoint answers, limits the size of its body, requires an API key and
    is documented."""
    (tmp_path / "echo.py").write_text(FILE)
    monkeypatch.setattr(api, "__path__", [*api.__path__, str(tmp_path)])
    try:
        client = serve(api_keys=["a-key-of-a-client"]).http()
        assert client.post("/v1/echo", json={"number": 5}).status_code == 401
        client.headers["authorization"] = "Bearer a-key-of-a-client"
        assert client.post("/v1/echo", json={"number": 5}).json() == {"number": 5}
        assert client.post("/v1/echo", json={"number": "x"}).json()["error"]["param"] == "number"
        document = client.get("/openapi.json").json()
        assert document["components"]["schemas"]["Echoed"]["required"] == ["number"]
        assert "/v1/echo" in document["paths"]
    finally:
        sys.modules.pop("server.api.echo", None)
        if isinstance(getattr(api, "echo", None), ModuleType):
            delattr(api, "echo")


def test_no_two_shapes_have_one_name():
    """No two types of requests or answers have the same name, because `/openapi.json` identifies types by name."""
    names = [shape.__name__ for shape in endpoints.shapes()]
    assert len(names) == len(set(names)) > 40
