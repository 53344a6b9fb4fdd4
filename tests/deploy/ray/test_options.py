"""The options of a fleet, in the files that come with it and in its documentation."""

from __future__ import annotations

import re
import tomllib
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deploy.ray.options import Fleet, Pool
from deploy.replicas.process import DECIDED
from deploy.settings import SETTINGS
from tests.conftest import ROOT

FOLDER = ROOT / "deploy" / "ray"
MANIFEST = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
CONFIGS = {
    "config.yaml": yaml.safe_load((FOLDER / "config.yaml").read_text()),
    "rayservice.yaml": yaml.safe_load(MANIFEST["spec"]["serveConfigV2"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_files_have_valid_options(name: str) -> None:
    (application,) = CONFIGS[name]["applications"]
    module, _, attribute = application["import_path"].partition(":")
    assert f"\ndef {attribute}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    for pool in Fleet.model_validate(application["args"]).pools.values():
        assert pool.names
        assert {*pool.settings} <= {setting.name for setting in SETTINGS}


def pods() -> list[dict[str, Any]]:
    cluster = MANIFEST["spec"]["rayClusterConfig"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_the_manifest_fits_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = re.search(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert MANIFEST["spec"]["rayClusterConfig"]["rayVersion"] == pinned[1]
    grace = re.search(r"graceful_shutdown_timeout_s=(\d+)", (FOLDER / "replica.py").read_text())
    assert grace is not None
    for pod in pods():
        (container,) = pod["containers"]
        assert container["image"] == f"relaxserve-ray:{project['version']}"
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["terminationGracePeriodSeconds"] > int(grace[1])
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    ports = {port["containerPort"] for port in pods()[0]["containers"][0]["ports"]}
    assert CONFIGS["rayservice.yaml"]["http_options"]["port"] in ports


def test_the_pods_of_the_manifest_start() -> None:
    """The image has no wget, which the operator's own probes need. Others may write to an emptyDir, and a server refuses such a cache.
    The autoscaler beside the head speaks to the cluster; replicas do not."""
    head, *workers = pods()
    assert MANIFEST["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] and head.get("automountServiceAccountToken", True)
    for pod in (head, *workers):
        (container,) = pod["containers"]
        assert all("httpGet" in container[probe] for probe in ("livenessProbe", "readinessProbe"))
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        (cache,) = (PurePosixPath(entry["value"]) for entry in container["env"] if entry["name"] == "RELAXSERVE_CACHE")
        assert str(cache.parent) in {mount["mountPath"] for mount in container["volumeMounts"]}
    for group, pod in zip(MANIFEST["spec"]["rayClusterConfig"]["workerGroupSpecs"], workers, strict=True):
        assert pod["automountServiceAccountToken"] is False
        (spread,) = pod["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == {"ray.io/group": group["groupName"]}
        assert pod["containers"][0]["readinessProbe"]["httpGet"]["port"] == CONFIGS["rayservice.yaml"]["http_options"]["port"]


def test_the_manifest_says_how_its_image_is_built() -> None:
    told = (FOLDER / "rayservice.yaml").read_text()
    for pod in pods():
        assert f" -t {pod['containers'][0]['image']} " in told


def test_the_documentation_lists_all_options() -> None:
    page = (ROOT / "docs" / "fleets.md").read_text()
    told = {name for row in re.findall(r"^\| (`.+?) \|", page, re.MULTILINE) for name in re.findall(r"`([\w.]+)`", row)}
    assert {*Fleet.model_fields, *(f"pools.NAME.{name}" for name in Pool.model_fields)} == told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": {}}, "Extra inputs"),
        ({"pools": {}}, "at least 1 item"),
        ({"pools": {"a": {"models": []}}}, "at least 1 item"),
        ({"pools": {"a": {"min_replicas": 3}}}, "min_replicas is 3; expected at most max_replicas, 2"),
        ({"pools": {"a": {"models": [{"source": "demo", "max_contex": 1}]}}}, "max_contex of model 1 of a pool is no field of a model"),
        ({"pools": {"a": {"num_stages": 0}}}, "greater than or equal to 1"),
        ({"pools": {"a": {"num_stages": 2, "num_gpus": 1}}}, "num_stages is 2 and num_gpus is 1; stages compute on CPUs"),
        ({"pools": {"a": {"num_stages": 2, "num_cpus": 0}}}, "num_stages is 2 and num_cpus is 0; expected CPUs"),
        ({"pools": {"a": {"num_stages": 2, "settings": {"stage_secret_file": "x"}}}}, "name stages of their own"),
        ({"pools": {"a": {"num_stages": 2, "models": [{"source": "demo", "stages": ["h:1", "local"]}]}}}, "name stages of their own"),
        ({"pools": {"a": {"num_stages": 2, "settings": {"peer_secret_file": "x"}}}}, "models in stages give and take no pages"),
        ({"patience_s": 0}, "greater than 0"),
        ({"pools": {"Ingress": {}}}, "pools has 'Ingress', the name of the ingress itself"),
        *(
            ({"pools": {"a": {"settings": {name: 1}}}}, f"settings has {name}, which the pool or its replicas")
            for name in ("models", *DECIDED)
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Fleet.model_validate(options)


def test_a_pool_is_found_by_each_name_of_its_models() -> None:
    assert Pool(models=["demo=a", {"source": "demo", "name": "b", "aliases": ["c"]}]).names == ["a", "b", "c"]


@pytest.mark.parametrize(("num_cpus", "num_threads"), [(0.1, 1), (1, 1), (2.5, 2), (16, 16), (0, None)])
def test_a_replica_has_the_threads_that_ray_reserves(num_cpus: float, num_threads: int | None) -> None:
    assert Pool(num_cpus=num_cpus).num_threads == num_threads
