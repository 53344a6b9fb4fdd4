"""The Kubernetes manifests conform to the schemas of their kinds. They name only paths, settings and metrics that the server has."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.ray.scaling import TARGET_REQUESTS
from deploy.settings import PREFIX, SETTINGS, read_config
from server.app import create_app
from server.http.auth import OPEN_PATHS, Access, access_of
from server.http.server import ACCEPT_S, HURRY_S
from server.http.websocket import PATHS
from server.messages import Stats
from server.metrics import Metrics, ModelReading
from server.models.registry import Registry
from server.settings import ServerSettings
from server.workers.care import Care
from tests.doubles.worker import ByteTokenizer, NullScript, NullWorker

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
KUSTOMIZATIONS = sorted(path.parent for path in FOLDER.rglob("kustomization.yaml"))
OVERLAYS = [folder for folder in KUSTOMIZATIONS if folder != FOLDER / "base"]
NAME = "app.kubernetes.io/name"
GRACE_S = 30  # default of terminationGracePeriodSeconds
# Longest time beside lame_duck_s and drain_s in which waiting connections are accepted, requests that still run get an error, workers end,
# and at last the processes.
ENDED_S = ACCEPT_S + HURRY_S + Care().stop_s + 1.0


def load(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def documents(folder: Path) -> list[dict[str, Any]]:
    """Return all YAML documents of a kustomization and of the kustomizations that it includes. If the folder has values for a Helm chart,
    add the inference pool that the chart creates."""
    (kustomization,) = load(folder / "kustomization.yaml")
    found: list[dict[str, Any]] = []
    for resource in kustomization["resources"]:
        path = (folder / resource).resolve()
        found += documents(path) if path.is_dir() else load(path)
    values = folder / "picker-values.yaml"
    return [*found, made_by_the_chart(load(values)[0]["router"])] if values.exists() else found


def made_by_the_chart(router: dict[str, Any]) -> dict[str, Any]:
    """Return the inference pool that llm-d's Helm chart llm-d-router-gateway creates from these values in a release called relaxserve."""
    servers = router["modelServers"]
    spec = {
        "selector": {"matchLabels": servers["matchLabels"]},
        "targetPorts": servers["targetPorts"],
        "appProtocol": {"http": "http", "grpc": "kubernetes.io/h2c"}[servers["protocol"]],
        "endpointPickerRef": {"name": "relaxserve-epp", "port": {"number": 9002}, "failureMode": router["inferencePool"]["failureMode"]},
    }
    return {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": "relaxserve"}, "spec": spec}


def of_kind(folder: Path, kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents(folder) if document["kind"] == kind)
    return found


# --- schemas from the API reference, reduced to the fields that the manifests use -------------------------------------------


def record(required: str = "", /, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def array(items: Any, least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


TEXT, FLAG, COUNT = {"type": "string", "minLength": 1}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
PORT_NUMBER = {"type": "integer", "minimum": 1, "maximum": 65535}
PORT = {"anyOf": [PORT_NUMBER, {"type": "string", "pattern": "^[a-z][a-z0-9-]{0,14}$"}]}
QUANTITY = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
SELECTOR = record("matchLabels", matchLabels=TEXTS)
META = record("name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}, labels=TEXTS, annotations=TEXTS)
RESOURCES = record(
    requests={"type": "object", "additionalProperties": QUANTITY}, limits={"type": "object", "additionalProperties": QUANTITY}
)
PROBE = record(
    "httpGet",
    httpGet=record("path port", path={"type": "string", "pattern": "^/"}, port=PORT),
    periodSeconds=COUNT,
    timeoutSeconds=COUNT,
    failureThreshold=COUNT,
)
SECCOMP = record("type", type={"enum": ["RuntimeDefault", "Localhost", "Unconfined"]})
CONTAINER = record(
    "name image",
    name=TEXT,
    image=TEXT,
    args=array(TEXT),
    env=array(record("name value", name=TEXT, value=TEXT)),
    ports=array(record("containerPort", name=TEXT, containerPort=PORT, protocol={"enum": ["TCP"]})),
    startupProbe=PROBE,
    livenessProbe=PROBE,
    readinessProbe=PROBE,
    resources=RESOURCES,
    securityContext=record(
        runAsNonRoot=FLAG,
        runAsUser=COUNT,
        allowPrivilegeEscalation=FLAG,
        readOnlyRootFilesystem=FLAG,
        capabilities=record(drop=array(TEXT)),
        seccompProfile=SECCOMP,
    ),
    volumeMounts=array(record("name mountPath", name=TEXT, mountPath=TEXT, subPath=TEXT, readOnly=FLAG)),
)
VOLUME = record(
    "name",
    name=TEXT,
    emptyDir=record(),
    configMap=record("name", name=TEXT),
    secret=record("secretName", secretName=TEXT, defaultMode=COUNT),
    persistentVolumeClaim=record("claimName", claimName=TEXT),
)
PEER = record("", podSelector=SELECTOR, namespaceSelector=SELECTOR, ipBlock=record("cidr", cidr=TEXT, **{"except": array(TEXT)}))
POLICY_PORT = record("port", port=PORT, protocol={"enum": ["TCP", "UDP"]})
POD = record(
    "containers",
    enableServiceLinks=FLAG,
    automountServiceAccountToken=FLAG,
    terminationGracePeriodSeconds=COUNT,
    securityContext=record(
        runAsNonRoot=FLAG,
        runAsUser=COUNT,
        runAsGroup=COUNT,
        fsGroup=COUNT,
        fsGroupChangePolicy={"enum": ["OnRootMismatch", "Always"]},
        seccompProfile=SECCOMP,
    ),
    topologySpreadConstraints=array(
        record(
            "maxSkew topologyKey whenUnsatisfiable",
            maxSkew=COUNT,
            topologyKey=TEXT,
            whenUnsatisfiable={"enum": ["DoNotSchedule", "ScheduleAnyway"]},
            labelSelector=SELECTOR,
        )
    ),
    containers=array(CONTAINER),
    volumes=array(VOLUME),
)
CLAIM_SPEC = record(
    "accessModes resources",
    accessModes=array({"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]}),
    resources=RESOURCES,
)
CLAIM = record("metadata spec", metadata=META, spec=CLAIM_SPEC)
SCALING = record(
    **{
        way: record(
            stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
            policies=array(record("type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds=COUNT)),
        )
        for way in ("scaleUp", "scaleDown")
    }
)
REFERENCE = record("kind name", group=TEXT, apiVersion=TEXT, kind=TEXT, name=TEXT)
SPECS: dict[tuple[str, str], Any] = {
    ("apps/v1", "StatefulSet"): record(
        "selector serviceName template",
        replicas=COUNT,
        serviceName=TEXT,
        podManagementPolicy={"enum": ["OrderedReady", "Parallel"]},
        selector=SELECTOR,
        template=record("metadata spec", metadata=record("labels", labels=TEXTS), spec=POD),
        volumeClaimTemplates=array(CLAIM),
    ),
    ("v1", "Service"): record(
        "selector ports",
        selector=TEXTS,
        clusterIP={"const": "None"},
        publishNotReadyAddresses=FLAG,
        ports=array(record("port", name=TEXT, port=PORT, targetPort=PORT)),
    ),
    ("networking.k8s.io/v1", "NetworkPolicy"): record(
        "podSelector",
        podSelector=SELECTOR,
        policyTypes=array({"enum": ["Ingress", "Egress"]}),
        ingress=array(record("from ports", **{"from": array(PEER)}, ports=array(POLICY_PORT))),
        egress=array(record("ports", to=array(PEER), ports=array(POLICY_PORT))),
    ),
    ("policy/v1", "PodDisruptionBudget"): record("selector", maxUnavailable=COUNT, minAvailable=COUNT, selector=SELECTOR),
    ("autoscaling/v2", "HorizontalPodAutoscaler"): record(
        "scaleTargetRef maxReplicas",
        scaleTargetRef=REFERENCE,
        minReplicas=COUNT,
        maxReplicas=COUNT,
        metrics=array(
            record(
                "type pods",
                type={"const": "Pods"},
                pods=record(
                    "metric target",
                    metric=record("name", name=TEXT),
                    target=record("type averageValue", type={"const": "AverageValue"}, averageValue=QUANTITY),
                ),
            )
        ),
        behavior=SCALING,
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): record(
        "scaleTargetRef triggers",
        scaleTargetRef=REFERENCE,
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        advanced=record(horizontalPodAutoscalerConfig=record(behavior=SCALING)),
        triggers=array(
            record(
                "type metadata",
                type={"const": "prometheus"},
                metricType={"enum": ["AverageValue", "Value"]},
                metadata=record("serverAddress query threshold", serverAddress=TEXT, query=TEXT, threshold=QUANTITY),
            )
        ),
    ),
    ("v1", "PersistentVolumeClaim"): CLAIM_SPEC,
    ("monitoring.coreos.com/v1", "PodMonitor"): record(
        "selector podMetricsEndpoints",
        selector=SELECTOR,
        jobLabel=TEXT,
        podMetricsEndpoints=array(record(port=TEXT, path=TEXT, interval={"type": "string", "pattern": r"^\d+[smh]$"})),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): record(
        "groups",
        groups=array(
            record(
                "name rules",
                name=TEXT,
                rules=array(
                    record("alert expr", alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS, **{"for": {"pattern": r"^\d+[smh]$"}})
                ),
            )
        ),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): record(
        "selector targetPorts endpointPickerRef",
        selector=SELECTOR,
        targetPorts=array(record("number", number=PORT_NUMBER)),
        appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
        endpointPickerRef=record(
            "name port",
            group=TEXT,
            kind=TEXT,
            name=TEXT,
            port=record("number", number=PORT_NUMBER),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): record(
        "rules",
        parentRefs=array(REFERENCE),
        rules=array(
            record(
                "backendRefs",
                matches=array(
                    record(
                        path=record("value", type={"enum": ["Exact", "PathPrefix"]}, value={"type": "string", "pattern": "^/"}),
                        method={"enum": ["GET", "POST", "DELETE"]},
                    )
                )
                | {"maxItems": 8},
                backendRefs=array(REFERENCE),
                timeouts=record(request={"type": "string", "pattern": r"^\d+(ms|s|m|h)$"}),
            )
        ),
    ),
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): record(
        "containers",
        annotations=TEXTS,
        supportedModelFormats=array(record("name", name=TEXT, version=TEXT, autoSelect=FLAG, priority=COUNT)),
        protocolVersions=array({"enum": ["v1", "v2", "grpc-v2"]}),
        containers=array(CONTAINER),
        volumes=array(VOLUME),
    ),
    ("serving.kserve.io/v1beta1", "InferenceService"): record(
        "predictor",
        predictor=record(
            "model",
            model=record(
                "modelFormat", runtime=TEXT, modelFormat=record("name", name=TEXT), storageUri={"type": "string", "format": "uri"}
            ),
        ),
    ),
}


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_every_document_is_in_the_schema_of_its_kind(folder: Path) -> None:
    for document in documents(folder):
        kind = (document["apiVersion"], document["kind"])
        schema = record("apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, metadata=META, spec=SPECS[kind])
        errors = [f"{'.'.join(map(str, e.instance_path))}: {e.message}" for e in jsonschema_rs.validator_for(schema).iter_errors(document)]
        assert errors == [], kind


def test_a_field_that_its_kind_does_not_have_is_found() -> None:
    wrong = {"maxUnavailable": 1, "selectors": {}}
    assert not jsonschema_rs.validator_for(SPECS["policy/v1", "PodDisruptionBudget"]).is_valid(wrong)


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_kubectl_builds_it(folder: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    built = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=True).stdout
    images = re.findall(r"image: (\S+)", built)
    assert images and set(images) == {f"relaxserve:{version_of_the_package()}"}


def version_of_the_package() -> str:
    found = re.search(r'^version = "(.*)"', (FOLDER.parents[1] / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_every_file_belongs_to_a_kustomization_or_to_a_chart() -> None:
    used = {FOLDER / "overlays/autoscale/adapter-rule.yaml", FOLDER / "overlays/gateway/picker-values.yaml"}
    for folder in KUSTOMIZATIONS:
        (kustomization,) = load(folder / "kustomization.yaml")
        files = [*kustomization["resources"], *(f for made in kustomization.get("configMapGenerator", ()) for f in made["files"])]
        files += [patch["path"] for patch in kustomization.get("patches", ()) if "path" in patch]
        used |= {folder / "kustomization.yaml", *((folder / file).resolve() for file in files)}
    assert {path for path in FOLDER.rglob("*.yaml") if path not in used} == set()


# --- names in the server's configuration -----------------------------------------------------------------------------------


def containers() -> list[dict[str, Any]]:
    pod = of_kind(FOLDER / "base", "StatefulSet")["spec"]["template"]["spec"]
    return [*pod["containers"], *of_kind(FOLDER / "overlays" / "kserve", "ServingRuntime")["spec"]["containers"]]


def patched_container() -> dict[str, Any]:
    """Return the container of the patch for replicas that share a cache."""
    (patch,) = load(FOLDER / "overlays" / "shared-cache" / "replicas.yaml")
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    return container


def merged_mounts() -> dict[str, dict[str, Any]]:
    """Return the mounts of replicas that share a cache, by path. They are merged as kubectl does it: the patch removes fields by null."""
    (base,) = of_kind(FOLDER / "base", "StatefulSet")["spec"]["template"]["spec"]["containers"]
    found = {mount["mountPath"]: mount for mount in base["volumeMounts"]}
    for mount in patched_container()["volumeMounts"]:
        both = {**found.get(mount["mountPath"], {}), **mount}
        found[mount["mountPath"]] = {name: value for name, value in both.items() if value is not None}
    return found


def test_settings_exist() -> None:
    values, models = read_config(FOLDER / "base" / "relaxserve.yaml")
    assert ServerSettings(**values).open_metrics and [model.source for model in models] == ["demo"]
    known = {PREFIX + setting.name.upper() for setting in SETTINGS} | {f"{PREFIX}CONFIG", f"{PREFIX}CACHE", f"{PREFIX}CACHE_KEY_FILE"}
    options = {f"--{setting.name.replace('_', '-')}" for setting in SETTINGS}
    for container in (*containers(), patched_container()):
        assert {entry["name"] for entry in container.get("env", ())} <= known
        assert {argument for argument in container.get("args", ()) if argument.startswith("--")} <= options


def test_probes_ask_what_answers_without_a_key() -> None:
    for container in containers():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["path"] in OPEN_PATHS
        assert container["livenessProbe"]["httpGet"]["path"].endswith("/live"), "loading a model must not trigger a restart"
        assert container["readinessProbe"]["httpGet"]["path"].endswith("/ready")


def test_the_operator_evaluates_the_alerts_of_prometheus() -> None:
    """The PrometheusRule has the same alerts as the file for Prometheus, and the PodMonitor calls the job by the name in them."""
    overlay = FOLDER / "overlays" / "monitoring"
    (alerts,) = load(FOLDER.parent / "prometheus" / "alerts.yaml")
    assert of_kind(overlay, "PrometheusRule")["spec"] == alerts
    label = of_kind(overlay, "PodMonitor")["spec"]["jobLabel"]
    job = of_kind(overlay, "StatefulSet")["spec"]["template"]["metadata"]["labels"][label]
    assert set(re.findall(r'job="(\w+)"', str(alerts))) == {job}


@pytest.mark.parametrize("overlay", ["autoscale", "keda"])
def test_an_apply_does_not_reset_what_the_autoscaler_sets(overlay: str) -> None:
    (kustomization,) = load(FOLDER / "overlays" / overlay / "kustomization.yaml")
    (patch,) = kustomization["patches"]
    stateful = of_kind(FOLDER / "overlays" / overlay, "StatefulSet")
    assert patch["target"] == {"kind": "StatefulSet", "name": stateful["metadata"]["name"]} and "replicas" in stateful["spec"]
    assert yaml.safe_load(patch["patch"]) == [{"op": "remove", "path": "/spec/replicas"}]


def test_pods_end_after_their_running_requests() -> None:
    values, _ = read_config(FOLDER / "base" / "relaxserve.yaml")
    pod = of_kind(FOLDER / "base", "StatefulSet")["spec"]["template"]["spec"]
    probe = of_kind(FOLDER / "base", "StatefulSet")["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]
    assert values["lame_duck_s"] > probe["periodSeconds"], "a pod stops before its probe of readiness has failed"
    assert pod["terminationGracePeriodSeconds"] >= values["lame_duck_s"] + values["drain_s"] + ENDED_S


def test_pods_of_kserve_end_after_their_running_requests() -> None:
    """A runtime cannot set the grace period of its pods, so that of Kubernetes applies."""
    (container,) = of_kind(FOLDER / "overlays" / "kserve", "ServingRuntime")["spec"]["containers"]
    given = dict(pairwise(container["args"]))
    lame_duck_s, drain_s = float(given["--lame-duck-s"]), float(given.get("--drain-s", ServerSettings().drain_s))
    assert lame_duck_s > container["readinessProbe"]["periodSeconds"]
    assert lame_duck_s + drain_s + ENDED_S <= GRACE_S


def test_nothing_runs_as_root_or_writes_beside_its_volumes() -> None:
    pod = of_kind(FOLDER / "base", "StatefulSet")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    dockerfile = (FOLDER.parents[1] / "docker" / "cpu.Dockerfile").read_text()
    assert "useradd --uid 10001 " in dockerfile
    written = set(re.findall(r'"(/\w+)"', re.search(r"^VOLUME (.*)$", dockerfile, re.MULTILINE)[1])) | {"/tmp"}  # type: ignore[index]
    for container in containers():
        assert container["securityContext"]["readOnlyRootFilesystem"] and not container["securityContext"]["allowPrivilegeEscalation"]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert written - mounted <= {"/models"}, "every volume but the read-only /models must be mounted"


def test_all_select_the_same_pods() -> None:
    labels = of_kind(FOLDER / "base", "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    for folder in OVERLAYS:
        for document in documents(folder):
            selector = document["spec"].get("selector")
            if selector is not None:
                assert selector.get("matchLabels", selector) == labels, document["kind"]


def test_references_lead_to_what_is_there() -> None:
    for folder in OVERLAYS:
        names = {(document["kind"], document["metadata"]["name"]) for document in documents(folder)}
        for document in documents(folder):
            match document["kind"]:
                case "HorizontalPodAutoscaler" | "ScaledObject":
                    target = document["spec"]["scaleTargetRef"]
                    assert (target["kind"], target["name"]) in names
                case "HTTPRoute":
                    for rule in document["spec"]["rules"]:
                        (backend,) = rule["backendRefs"]
                        assert (backend["kind"], backend["name"]) in names
                case "StatefulSet":
                    assert ("Service", document["spec"]["serviceName"]) in names
                case "InferenceService":
                    assert ("ServingRuntime", document["spec"]["predictor"]["model"]["runtime"]) in names
                case _:
                    pass


def _api() -> dict[str, Any]:
    options = ServerSettings()
    worker = NullWorker(NullScript())
    return create_app(options, Registry(options, lambda _spec, _progress: worker, lambda _source: ByteTokenizer())).openapi()


def test_the_route_passes_all_clients_need_and_no_administration() -> None:
    """The gateway's route agrees with the list of server/http/auth.py."""
    matches = [match for rule in of_kind(FOLDER / "overlays" / "gateway", "HTTPRoute")["spec"]["rules"] for match in rule["matches"]]

    def passes(method: str, path: str) -> bool:
        prefixes = [match["path"]["value"] for match in matches if match.get("method", method) == method]
        return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)

    for path, operations in _api()["paths"].items():
        for method in (name.upper() for name in operations):
            is_open = path.startswith("/v1/") and access_of(path, open_metrics=False) is not Access.ADMIN
            assert passes(method, path) is is_open, (method, path)
    assert all(passes("GET", path.decode()) for path in PATHS), "a WebSocket begins with a GET"


def test_a_policy_lets_only_labelled_clients_reach_the_replicas() -> None:
    """A network policy lets only pods and namespaces with certain labels connect to the replicas."""
    policy, pods = (of_kind(FOLDER / "base", kind)["spec"] for kind in ("NetworkPolicy", "StatefulSet"))
    assert policy["podSelector"]["matchLabels"].items() <= pods["template"]["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (rule,) = policy["ingress"]
    assert all(selector["matchLabels"] for peer in rule["from"] for selector in peer.values())
    (container,) = pods["template"]["spec"]["containers"]
    assert {port["port"] for port in rule["ports"]} <= {port["name"] for port in container["ports"]}


def test_every_metric_that_is_read_exists() -> None:
    metrics = Metrics()
    metrics.of("demo")
    cache = dict.fromkeys(("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"), "1")
    metrics.watch(lambda: [ModelReading("demo", "ready", Stats(0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0), cache=cache)])
    published = {
        s.name for family in text_string_to_metric_families(metrics.exposition(metrics.readings()).decode()) for s in family.samples
    }
    read = {name for path in FOLDER.rglob("*.yaml") for name in re.findall(r"(?:vllm|relaxserve):\w+", path.read_text())}
    assert {"vllm:num_requests_waiting", "vllm:cache_config_info"} <= read <= published


def test_caches_are_within_volumes_that_others_may_write_to() -> None:
    """Kubernetes creates an emptyDir with mode 0777, and a server refuses a cache that others can write to."""
    for container in containers():
        (cache,) = (Path(entry["value"]) for entry in container["env"] if entry["name"] == f"{PREFIX}CACHE")
        assert str(cache.parent) in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_replicas_that_share_a_cache_share_a_key_outside_of_it() -> None:
    folder = FOLDER / "overlays" / "shared-cache"
    (patch,) = load(folder / "replicas.yaml")
    spec, container = patch["spec"]["template"]["spec"], patched_container()
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for volume in spec["volumes"]:
        assert jsonschema_rs.validator_for(VOLUME).is_valid(volume)
    where = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    claim = of_kind(folder, "PersistentVolumeClaim")
    assert where["/cache"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert merged_mounts()["/cache"] == {"name": "shared-cache", "mountPath": "/cache"}, "the kubelet would make a folder in it for root"
    values = {entry["name"]: Path(entry["value"]) for entry in container["env"]}
    secret = where[str(values[f"{PREFIX}CACHE_KEY_FILE"].parent)]["secret"]
    assert secret["defaultMode"] == 0o440


def test_each_replica_keeps_batches_of_its_own_outside_of_its_cache() -> None:
    """Batches must outlive the cache, which may be removed, or shared."""
    stateful = of_kind(FOLDER / "base", "StatefulSet")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    (claim,) = stateful["spec"]["volumeClaimTemplates"]
    folder = Path(read_config(FOLDER / "base" / "relaxserve.yaml")[0]["batch_dir"])
    for mounts in ({mount["mountPath"]: mount for mount in container["volumeMounts"]}, merged_mounts()):
        assert mounts[str(folder.parent)] == {"name": claim["metadata"]["name"], "mountPath": "/state", "subPath": "state"}


def test_both_autoscalers_follow_the_requests_that_ray_follows() -> None:
    """A replica without waiting requests may be busy, so running ones count, too."""
    (rule,) = load(FOLDER / "overlays/autoscale/adapter-rule.yaml")[0]["rules"]["custom"]
    (metric,) = of_kind(FOLDER / "overlays/autoscale", "HorizontalPodAutoscaler")["spec"]["metrics"]
    (trigger,) = of_kind(FOLDER / "overlays/keda", "ScaledObject")["spec"]["triggers"]
    for query in (rule["metricsQuery"], trigger["metadata"]["query"]):
        assert re.findall(r"vllm:\w+", query) == ["vllm:num_requests_waiting", "vllm:num_requests_running"]
    assert float(metric["pods"]["target"]["averageValue"]) == float(trigger["metadata"]["threshold"]) == TARGET_REQUESTS
    labels = of_kind(FOLDER / "overlays/keda", "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert set(re.findall(r'job="(\w+)"', trigger["metadata"]["query"])) == {labels[NAME]}
    (kustomization,) = load(FOLDER / "overlays/keda/kustomization.yaml")
    spaces = [re.findall(r'namespace="([^"]*)"', selector) for selector in re.findall(r"\{([^}]*)\}", trigger["metadata"]["query"])]
    assert spaces == 2 * [[kustomization.get("namespace", "default")]], "replicas in other namespaces do not count"


def test_the_autoscaler_reads_what_the_adapter_makes() -> None:
    (rule,) = load(FOLDER / "overlays/autoscale/adapter-rule.yaml")[0]["rules"]["custom"]
    (metric,) = of_kind(FOLDER / "overlays/autoscale", "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
