"""Manage the aliases of models. An alias may have defaults of its own (a preset). A variant, which is the same loaded model with these
defaults, then answers the requests that name the alias."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from server.defaults import Defaults
from server.models.model import Loaded, Model

LATEST = ":latest"


def names_like(name: str) -> tuple[str, str]:
    """Return the names that a request may mean, in order of preference: the name in the request, and that name without the tag that
    Ollama's clients add."""
    return name, name.removesuffix(LATEST)


class Aliases:
    """The aliases of the served models: which model each one names, and which defaults it has."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        """`models`: the models that are served, by name."""
        self._models = models
        self._owners: dict[str, str] = {}
        self._presets: dict[str, Defaults] = {}

    def __contains__(self, alias: str) -> bool:
        return alias in self._owners

    def owners(self) -> dict[str, str]:
        """Return the name of the model behind each alias."""
        return dict(self._owners)

    def owner(self, alias: str) -> str | None:
        """Return the name of the model behind an alias, or None if there is no such alias."""
        return self._owners.get(alias)

    def of(self, name: str) -> tuple[str, ...]:
        """Return the aliases of a model, sorted."""
        return tuple(sorted(alias for alias, owner in self._owners.items() if owner == name))

    def presets_of(self, name: str) -> dict[str, Defaults]:
        """Return the defaults of those aliases of a model that have their own."""
        return {alias: own for alias, own in self._presets.items() if self._owners[alias] == name}

    def preset_of(self, alias: str) -> Defaults:
        """Return the defaults of an alias. They are empty if it has none of its own."""
        return self._presets.get(alias, Defaults())

    def point(self, aliases: Iterable[str], name: str) -> list[str]:
        """Point aliases at a model. An alias that named another model loses its defaults. Return the other models that lost an alias and
        have none left."""
        before = [self._owners[alias] for alias in aliases if alias in self._owners]
        for alias in aliases:
            if self._owners.get(alias) != name:
                self._drop_preset(alias)
            self._owners[alias] = name
        return [owner for owner in dict.fromkeys(before) if owner != name and not self.of(owner)]

    def adopt(self, presets: Mapping[str, Defaults], variants: Mapping[str, Loaded], loaded: Loaded) -> None:
        """Set the defaults of a model's aliases (`presets`), and add to `loaded` the variants that answer by these aliases. Leave out
        aliases that were removed while their variants were made."""
        kept = [alias for alias in presets if alias in self._owners]
        self._presets.update((alias, presets[alias]) for alias in kept)
        loaded.variants.update((alias, variants[alias]) for alias in kept)

    def remove(self, alias: str) -> bool:
        """Remove an alias. Return whether it existed."""
        self._drop_preset(alias)
        return self._owners.pop(alias, None) is not None

    def forget(self, name: str) -> None:
        """Remove all aliases of a model."""
        for alias in self.of(name):
            self.remove(alias)

    def _drop_preset(self, alias: str) -> None:
        """Remove the defaults of an alias, and the variant that answers by it."""
        self._presets.pop(alias, None)
        for model in self._models.values():
            if model.loaded is not None:
                model.loaded.variants.pop(alias, None)
