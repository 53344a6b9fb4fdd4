"""The application: `serve run deploy.ray.app:app`, or a configuration file such as `config.yaml`, whose `args` are a `Fleet`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deploy.ray.ingress import INGRESS, PATIENCE_S
from deploy.ray.replica import REPLICA
from deploy.settings import model_spec


class Pool(BaseModel):
    """Replicas that serve the same models. With two bounds that differ, their number follows the load."""

    model_config = ConfigDict(extra="forbid")

    models: list[str] = Field(default=["demo"], min_length=1)  # as on the command line: SOURCE or SOURCE=NAME
    settings: dict[str, Any] = {}  # of each server, as in its configuration file
    min_replicas: int = Field(default=2, ge=0)
    max_replicas: int = Field(default=2, ge=1)
    num_cpus: float = Field(default=1.0, ge=0)  # that Ray reserves for a replica
    num_gpus: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def bounds(self) -> Pool:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}; expected at most max_replicas, {self.max_replicas}")
        return self


class Fleet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pools: dict[str, Pool] = Field(default={"replicas": Pool()}, min_length=1)  # the name of a pool is that of its deployment
    patience_s: float = Field(default=PATIENCE_S, gt=0)  # time for which a request may find no replica that serves it


def app(options: dict[str, Any]) -> Application:
    """Return an ingress in front of the pools that the options name. Raise an error if an option is wrong."""
    fleet = Fleet.model_validate(options)
    pools = {name: _replicas(name, pool) for name, pool in fleet.pools.items()}
    models = {model_spec(model).name: name for name, pool in reversed(fleet.pools.items()) for model in pool.models}
    return INGRESS.bind(pools, models, fleet.patience_s)


def _replicas(name: str, pool: Pool) -> Application:
    resources = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus}
    if pool.min_replicas == pool.max_replicas:
        made = REPLICA.options(name=name, ray_actor_options=resources, num_replicas=pool.max_replicas)
    else:
        scaling = AutoscalingConfig(
            min_replicas=pool.min_replicas,
            max_replicas=pool.max_replicas,
            metrics_interval_s=2,
            look_back_period_s=10,
            upscale_delay_s=10,
            downscale_delay_s=300,
            policy=AutoscalingPolicy(policy_function="deploy.ray.scaling:by_queue_and_pages"),
        )
        made = REPLICA.options(name=name, ray_actor_options=resources, autoscaling_config=scaling)
    return made.bind(pool.models, pool.settings)
