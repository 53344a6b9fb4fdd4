"""The models of a server as one caller sees them: an API key may be restricted to some names, and its caller learns of no others."""

from __future__ import annotations

from dataclasses import dataclass

from server.errors import MISSING_FIELD, ApiError
from server.http.keys import KeyLimits
from server.models.aliases import names_like
from server.models.model import Loaded, Model, ModelState
from server.models.registry import Registry, not_loaded


@dataclass(frozen=True, slots=True)
class VisibleModels:
    """The models of a registry that a key with these limits may use."""

    registry: Registry
    limits: KeyLimits

    def serve(self, name: str | None, *, has_begun: bool = False) -> tuple[Model, Loaded]:
        """Return what `Registry.serve` returns. A model that the caller may not use is not found, as if it were not loaded. A request
        without a name gets the only model that the caller may use; raise ApiError if the caller may use none or several. Raise ApiError
        also in the cases in which `Registry.serve` does."""
        if not self.limits.models:
            return self.registry.serve(name, has_begun=has_begun)
        names = [one for model in self.registry.models() for one in self.names_of(model)]
        if name is None:
            models = {self.registry.find(one).spec.name for one in names}
            if len(models) != 1:
                shown = ", ".join(sorted(names)) or "none"
                raise ApiError(MISSING_FIELD, f"model is absent, and the key may use {len(models)} models: {shown}", param="model")
            return self.registry.serve(names[0], has_begun=has_begun)
        meant = next((one for one in names_like(name) if one in names), None)
        if meant is None:
            raise not_loaded(
                name, [one for model in self.registry.models() if model.state is ModelState.READY for one in self.names_of(model)]
            )
        return self.registry.serve(meant, has_begun=has_begun)  # `name` itself may be that of a model that the caller may not use

    def names_of(self, model: Model) -> list[str]:
        """Return the names of a model that the caller may use: its own name first, if it is one of them, then its aliases."""
        own = model.spec.name
        return [name for name in (own, *self.registry.aliases_of(own)) if self.limits.allow(name)]

    def models(self) -> list[Model]:
        """Return the models that the caller may use by any name."""
        return [model for model in self.registry.models() if self.names_of(model)]
