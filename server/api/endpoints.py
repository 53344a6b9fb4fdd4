"""Finds the endpoints: every file in here, or in a folder in here, that has a `router(context)`. Nothing else lists them."""

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
    """Sorted by file; the administration comes last, and `/docs` shows them in this order."""
    made: list[APIRouter] = [module.router(context) for module in _modules() if hasattr(module, "router")]
    return sorted(made, key=lambda router: ADMINISTRATION in router.tags)


def error_shapes() -> dict[str, ErrorShape]:
    """By the beginning of a path; a file whose API tells errors otherwise than OpenAI's says so as its `ERROR_SHAPES`."""
    return {path: shape for module in _modules() for path, shape in getattr(module, "ERROR_SHAPES", {}).items()}


def shapes() -> list[type]:
    """The typed dictionaries that the files of this folder define, which are the shapes of answers."""
    return [
        shape for module in _modules() for shape in vars(module).values() if is_typeddict(shape) and shape.__module__ == module.__name__
    ]


def _modules() -> list[ModuleType]:
    return [import_module(found.name) for found in walk_packages(api.__path__, f"{api.__name__}.")]
