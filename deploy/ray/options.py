"""The options of a fleet: the `args` of its application in Ray's configuration file."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deploy.ray.scaling import TARGET_REQUESTS
from deploy.replicas.process import DECIDED
from deploy.settings import model_entry
from server.models.state import ModelSpec

PATIENCE_S = 60.0
PREFILL_CHARACTERS = 8192
INGRESS = "Ingress"  # name of the ingress's deployment: the name of its class


def prefill_name(pool: str) -> str:
    """Return the name of the deployment whose replicas compute long prompts for a pool."""
    return f"{pool}-prefill"


class Pool(BaseModel):
    """Replicas that serve the same models. If `min_replicas` and `max_replicas` differ, the number of replicas follows the load."""

    model_config = ConfigDict(extra="forbid")

    models: list[str | dict[str, Any]] = Field(default=["demo"], min_length=1)  # as in the configuration file of a server
    settings: dict[str, Any] = {}  # other settings of each server, as in its configuration file, except those that replicas decide
    min_replicas: int = Field(default=2, ge=0)
    max_replicas: int = Field(default=2, ge=1)
    # running and waiting requests that each replica should have, if the number of replicas follows the load
    target_requests: float = Field(default=TARGET_REQUESTS, gt=0)
    num_cpus: float = Field(default=1.0, ge=0)  # CPUs that Ray reserves for a replica, whose models compute with as many threads
    num_gpus: float = Field(default=0.0, ge=0)
    num_stages: int = Field(default=1, ge=1)  # number of machines of a replica, each of which computes a part of the layers of its models
    prefill_replicas: int = Field(default=0, ge=0)  # number of further replicas, which only compute long prompts for the others
    # least number of new characters of a prompt that a prefill replica computes; a beginning that a replica of the pool has is not new
    prefill_characters: int = Field(default=PREFILL_CHARACTERS, ge=1)

    @model_validator(mode="after")
    def check(self) -> Pool:
        _ = self.names  # raises an error if an entry is wrong
        if (decided := next((name for name in ("models", *DECIDED) if name in self.settings), None)) is not None:
            raise ValueError(f"settings has {decided}, which the pool or its replicas decide; leave it out")
        if self.num_stages > 1:
            self._check_stages()
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}; expected at most max_replicas, {self.max_replicas}")
        if self.prefill_replicas and not self.shares_pages:
            text = "set peer_secret_file in settings, the secret with which replicas give each other pages"
            raise ValueError(f"prefill_replicas is {self.prefill_replicas}; {text}")
        return self

    def _check_stages(self) -> None:
        """Raise ValueError if a setting of the pool does not go with stages."""
        shown = f"num_stages is {self.num_stages}"
        if self.num_gpus:
            raise ValueError(f"{shown} and num_gpus is {self.num_gpus:g}; stages compute on CPUs: leave one of them out")
        if not self.num_cpus:
            raise ValueError(f"{shown} and num_cpus is 0; expected CPUs for Ray to reserve on each machine of a replica")
        if "stage_secret_file" in self.settings or any(spec.stages for spec in self._specs):
            raise ValueError(f"{shown}, and settings or models name stages of their own; leave one of them out")
        if self.prefill_replicas or self.shares_pages:
            given = "prefill_replicas" if self.prefill_replicas else "peer_secret_file"
            raise ValueError(f"{shown} and {given} is set, but models in stages give and take no pages; leave one of them out")

    @property
    def names(self) -> list[str]:
        """The names by which requests ask for the models."""
        return [name for spec in self._specs for name in (spec.name, *spec.aliases)]

    @property
    def _specs(self) -> list[ModelSpec]:
        return [model_entry(entry, f"model {number} of a pool") for number, entry in enumerate(self.models, 1)]

    @property
    def shares_pages(self) -> bool:
        """Whether the replicas give each other pages of their prefix caches: whether the settings name a file with a common secret."""
        return self.settings.get("peer_secret_file") is not None

    @property
    def num_threads(self) -> int | None:
        """The threads of a replica's models. Replicas that all used all cores of their machine would wait for each other in each step. None
        if no CPUs are reserved: each model then uses the threads of its server's settings."""
        return max(1, int(self.num_cpus)) if self.num_cpus else None


class Fleet(BaseModel):
    """The options of the whole application."""

    model_config = ConfigDict(extra="forbid")

    pools: dict[str, Pool] = Field(default={"replicas": Pool()}, min_length=1)  # by name, which is also the name of the deployment
    patience_s: float = Field(default=PATIENCE_S, gt=0)  # longest time that a request waits for a replica that serves it

    @model_validator(mode="after")
    def check(self) -> Fleet:
        if INGRESS in self.pools:  # Ray would give the pool another name, under which the ingress would not find it
            raise ValueError(f"pools has {INGRESS!r}, the name of the ingress itself; give it another name")
        for name, pool in self.pools.items():
            if pool.prefill_replicas and prefill_name(name) in self.pools:
                raise ValueError(f"pools has {prefill_name(name)!r}, the name of the prefill replicas of {name!r}; give it another name")
        return self
