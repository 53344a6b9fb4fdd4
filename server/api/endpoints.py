"""Find the endpoints: every module in this folder and its subfolders that defines `router(context)`. No list of endpoints exists."""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType

from fastapi import APIRouter
from typing_extensions import is_typeddict

from server import api
from server.api.context import Context
from server.api.routes import ADMINISTRATION
from server.errors import ErrorShape


def routers(context: Context) -> list[APIRouter]:
    """Return all routers sorted by file, with the administration last. `/docs` shows them in this order."""
    made: list[APIRouter] = [module.router(context) for module in _modules() if hasattr(module, "router")]
    return sorted(made, key=lambda router: ADMINISTRATION in router.tags)


def error_shapes() -> dict[str, ErrorShape]:
    """Return the functions that encode errors, by path prefix. An API whose errors differ from OpenAI's declares its function in the
    dictionary `ERROR_SHAPES`."""
    return {path: shape for module in _modules() for path, shape in getattr(module, "ERROR_SHAPES", {}).items()}


def shapes() -> list[type]:
    """Return the typed dictionaries that the modules define: the shapes of answers."""
    return [
        shape for module in _modules() for shape in vars(module).values() if is_typeddict(shape) and shape.__module__ == module.__name__
    ]


def _modules() -> list[ModuleType]:
    """Return all modules of the API."""
    return [import_module(found.name) for found in walk_packages(api.__path__, f"{api.__name__}.")]
