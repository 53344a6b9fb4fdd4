"""The registry of formats, which finds each by its name or an alias."""

from __future__ import annotations

from server.text.dialects.format import Format
from server.text.dialects.formats import harmony
from server.text.dialects.formats.table import TABLE

WRITTEN: tuple[Format, ...] = (*TABLE, harmony.FORMAT)
FORMATS: dict[str, Format] = {name: form for form in WRITTEN for name in (form.name, *form.aliases)}
