"""The application: `serve run deploy.ray.app:app`, or a configuration file such as `config.yaml`, whose `args` are a `Fleet`."""

from __future__ import annotations

from typing import Any

from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deploy.ray.ingress import INGRESS
from deploy.ray.options import Fleet, Pool, prefill_name
from deploy.ray.replica import REPLICA
from deploy.ray.scaling import DOWNSCALE_DELAY_S, UPSCALE_DELAY_S

POLICY = "deploy.ray.scaling:ByQueueAndPages"


def app(options: dict[str, Any]) -> Application:
    """Return an ingress in front of the pools that the options name. If several pools have a model of the same name, requests for this name
    go to the first of these pools. Raise an error if an option is wrong."""
    fleet = Fleet.model_validate(options)
    pools = {name: _replicas(name, pool) for name, pool in fleet.pools.items()}
    models = {model: name for name, pool in reversed(fleet.pools.items()) for model in pool.names}
    sharing = tuple(name for name, pool in fleet.pools.items() if pool.shares_pages)
    prefill = {name: (_prefill(name, pool), pool.prefill_characters) for name, pool in fleet.pools.items() if pool.prefill_replicas}
    return INGRESS.bind(pools, models, fleet.patience_s, sharing, prefill)


def _prefill(name: str, pool: Pool) -> Application:
    """Return the replicas that compute long prompts for a pool."""
    resources = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus}
    made = REPLICA.options(name=prefill_name(name), ray_actor_options=resources, num_replicas=pool.prefill_replicas)
    return made.bind(pool.models, pool.settings, pool.num_threads)


def _replicas(name: str, pool: Pool) -> Application:
    """Return the replicas of a pool that answer requests. Their number is fixed, or follows the load between its two bounds."""
    options: dict[str, Any] = {"name": name, "ray_actor_options": {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus}}
    if pool.num_stages > 1:
        options["placement_group_bundles"] = [{"CPU": pool.num_cpus}] * pool.num_stages
        options["placement_group_strategy"] = "STRICT_SPREAD"  # each stage has a machine of its own
    if pool.min_replicas == pool.max_replicas:
        options["num_replicas"] = pool.max_replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=pool.min_replicas,
            max_replicas=pool.max_replicas,
            metrics_interval_s=2,
            look_back_period_s=10,
            upscale_delay_s=UPSCALE_DELAY_S,
            downscale_delay_s=DOWNSCALE_DELAY_S,
            policy=AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"target_requests": pool.target_requests}),
        )
    return REPLICA.options(**options).bind(pool.models, pool.settings, pool.num_threads, pool.num_stages)
