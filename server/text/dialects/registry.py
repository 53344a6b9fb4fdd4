"""The registry of formats: every module of server/text/dialects/formats, by its name and its aliases. A module is found without
registration."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from server.text.dialects import formats
from server.text.dialects.format import Format

WRITTEN: list[Format] = [import_module(f"{formats.__name__}.{module.name}").FORMAT for module in iter_modules(formats.__path__)]
FORMATS: dict[str, Format] = {name: form for form in WRITTEN for name in (form.name, *form.aliases)}
