"""The chart under real Helm 3 and 4: does it lint, is it what the API server takes, and do its parts fit each other?"""

import argparse
import importlib.util
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from router.cli import build_parser
from router.policy.baselines import POLICIES
from router.settings import IndexSettings, ServeSettings, read
from tests.helm.conftest import CHART, EVERYTHING, NAMESPACE, Objects, rendered

Render = Callable[..., Objects]
FREE_TEXT = {"type": "string", "minLength": 1}
CUSTOM = {  # as much of the custom resources as this chart writes; their own schemas come with their operators
    "ServiceMonitor": {
        "required": ["selector", "endpoints"],
        "properties": {
            "selector": {"required": ["matchLabels"]},
            "endpoints": {"minItems": 1, "items": {"required": ["port", "path", "interval"]}},
        },
    },
    "PrometheusRule": {"required": ["groups"], "properties": {"groups": {"type": "array", "minItems": 1}}},
    "HTTPRoute": {
        "required": ["parentRefs", "rules"],
        "properties": {"rules": {"items": {"required": ["matches", "backendRefs", "timeouts"]}}},
    },
    "ScaledObject": {
        "required": ["scaleTargetRef", "minReplicaCount", "maxReplicaCount", "triggers"],
        "properties": {
            "triggers": {
                "items": {
                    "required": ["type", "metadata"],
                    "properties": {"metadata": {"additionalProperties": FREE_TEXT}},  # KEDA takes strings only
                }
            }
        },
    },
}


def of_kind(objects: Objects, kind: str) -> Objects:
    return [o for o in objects if o["kind"] == kind]


def named(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = [o for o in of_kind(objects, kind) if o["metadata"]["name"] == name]
    return found


def pods(objects: Objects) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, metadata and spec of everything that becomes a pod."""
    for o in objects:
        if o["kind"] in ("Deployment", "Job", "StatefulSet"):
            template = o["spec"]["template"]
            yield o["metadata"]["name"], template["metadata"], template["spec"]
        elif o["kind"] == "Pod":
            yield o["metadata"]["name"], o["metadata"], o["spec"]


def container(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = named(objects, kind, name)["spec"]["template"]["spec"]["containers"]
    return found


def flag(args: list[str], name: str) -> str:
    (value,) = [a.removeprefix(f"--{name}=") for a in args if a.startswith(f"--{name}=")]
    return value


# ---- Helm, and the API server's schemas ----


def test_lint(helm: Path, example: tuple[str, ...]) -> None:
    done = subprocess.run([helm, "lint", "--strict", CHART, *example], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.28", "1.31", "1.37"])
def test_objects_are_what_the_api_server_takes(render: Render, example: tuple[str, ...], version: str) -> None:
    objects = render(*example)
    assert objects
    for o in objects:
        if o["kind"] in CUSTOM:
            jsonschema.validate(o["spec"], CUSTOM[o["kind"]])
        else:
            kubernetes_validate.validate(o, version, strict=True)


def test_both_helms_render_the_same(example: tuple[str, ...]) -> None:
    from tests.helm.conftest import fetched

    def masked(text: str) -> list[Any]:
        objects = [o for o in yaml.safe_load_all(text) if o]
        for o in of_kind(objects, "Secret"):
            o["data"] = sorted(o["data"])  # made at random
        return sorted(objects, key=lambda o: (o["kind"], o["metadata"]["name"]))

    assert masked(rendered(fetched("v3"), *example)) == masked(rendered(fetched("v4"), *example))


def test_package(helm: Path, tmp_path: Path) -> None:
    subprocess.run([helm, "package", CHART, "-d", tmp_path], check=True, capture_output=True, timeout=60)
    (archive,) = tmp_path.glob("warmroute-*.tgz")
    packed = subprocess.run([helm, "template", "rel", archive], check=True, capture_output=True, text=True, timeout=60)
    assert "kind: Deployment" in packed.stdout


# ---- does it fit together ----


def test_defaults_need_nothing_that_an_empty_cluster_lacks(render: Render) -> None:  # H71
    objects = render()
    kinds = {o["kind"] for o in objects}
    assert kinds == {"Deployment", "Service", "ServiceAccount", "Role", "RoleBinding", "Pod"}
    assert [o["metadata"]["name"] for o in of_kind(objects, "Deployment")] == ["rel-warmroute"]
    assert "WARMROUTE_REDIS_URL" not in json.dumps(objects)


def test_grace_periods_add_up(render: Render, example: tuple[str, ...]) -> None:  # H69
    checked = 0
    for name, _, spec in pods(render(*example)):
        (box,) = spec["containers"]
        if "preStop" not in box.get("lifecycle", {}):
            continue
        wait_s = int(box["lifecycle"]["preStop"]["exec"]["command"][1])
        drains = [int(m[1]) for a in box["args"] if (m := re.fullmatch(r"--(?:drain-s|shutdown-timeout)=(\d+)", a))]
        assert len(drains) == 1, name
        assert wait_s + drains[0] < spec["terminationGracePeriodSeconds"], name
        checked += 1
    assert checked >= 1


def test_flags_are_known_to_the_binary(
    render: Render, example: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not parse here would crash-loop there; values are read as the binary reads them, environment too."""
    seen = set()
    for name, _, spec in pods(render(*example)):
        (box,) = spec["containers"]
        command = box.get("args", [""])[0]
        if command not in ("serve", "index"):
            continue
        seen.add(command)
        flags = vars(build_parser().parse_args(box["args"]))
        with monkeypatch.context() as patch:
            for variable in box.get("env", []):
                patch.setenv(variable["name"], variable.get("value", "redis://u:secret@h:6379/0"))
            settings = read(ServeSettings if command == "serve" else IndexSettings, flags)
        assert settings.discovery == "kubernetes", name
        assert bool(settings.selector) != bool(settings.service), name
    assert "serve" in seen


def test_every_environment_variable_of_ours_is_a_setting(render: Render) -> None:
    known = {f"WARMROUTE_{name.upper()}" for name in ServeSettings.model_fields}
    used = {v["name"] for _, _, spec in pods(render(*EVERYTHING)) for v in spec["containers"][0].get("env", [])}
    ours = {name for name in used if name.startswith("WARMROUTE_")}
    assert {"WARMROUTE_REDIS_URL", "WARMROUTE_KEY_SEED", "WARMROUTE_API_KEY"} <= ours <= known


def test_service_links_are_off_everywhere(render: Render) -> None:
    """A Service called warmroute would set WARMROUTE_PORT=tcp://..., one called vllm VLLM_PORT: both crash-loop."""
    for name, _, spec in pods(render(*EVERYTHING)):
        assert spec["enableServiceLinks"] is False, name


def test_ports_agree_between_router_indexer_and_vllm(render: Render) -> None:  # H75
    arguments = (*EVERYTHING, "--set", "discovery.podPort=8123,discovery.eventsPort=7001,discovery.replayPort=7101")
    objects = render(*arguments)
    router = container(objects, "Deployment", "rel-warmroute")["args"]
    indexer = container(objects, "Deployment", "rel-warmroute-indexer")["args"]
    ours = [a for a in router if re.match(r"--(namespace|selector|service|discovery|(pod|events|replay)-port)=", a)]
    assert ours == [a for a in indexer if a in ours]
    vllms = [d for d in of_kind(objects, "Deployment") if "-vllm-" in d["metadata"]["name"]]
    assert vllms
    for deployment in vllms:
        (box,) = deployment["spec"]["template"]["spec"]["containers"]
        events = json.loads(flag(box["args"], "kv-events-config"))
        assert events == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{flag(router, 'events-port')}",  # without the * vLLM would connect, not bind
            "replay_endpoint": f"tcp://*:{flag(router, 'replay-port')}",
        }
        assert flag(box["args"], "port") == flag(router, "pod-port") == "8123"
        declared = {p["name"]: p["containerPort"] for p in box["ports"]}
        assert declared == {"http": 8123, "kv-events": 7001, "kv-replay": 7101}
        for needed in ("--enable-prefix-caching", "--enable-prompt-tokens-details"):
            assert needed in box["args"]


def test_the_routers_selector_finds_the_charts_own_vllm_pods(render: Render, example: tuple[str, ...]) -> None:
    from router.fleet.k8s_objects import parse_selector

    objects = render(*example)
    router = container(objects, "Deployment", "rel-warmroute")["args"]
    if any(a.startswith("--service=") for a in router):
        return
    selector = parse_selector(flag(router, "selector"))
    for name, meta, _ in pods(objects):
        assert selector.matches(meta.get("labels")) == ("-vllm-" in name), name


def test_selectors_match_pods_and_nobody_elses(render: Render) -> None:
    objects = render(*EVERYTHING)
    labels = {name: meta["labels"] for name, meta, _ in pods(objects)}

    def chosen(selector: dict[str, str]) -> list[str]:
        assert selector
        return [n for n, have in labels.items() if selector.items() <= have.items()]

    for deployment in of_kind(objects, "Deployment"):
        assert chosen(deployment["spec"]["selector"]["matchLabels"]) == [deployment["metadata"]["name"]]
    for service in of_kind(objects, "Service"):
        assert chosen(service["spec"]["selector"]) == [service["metadata"]["name"]]
        (target,) = service["spec"]["ports"]
        ports = [p["name"] for p in container(objects, "Deployment", service["metadata"]["name"])["ports"]]
        assert target["targetPort"] in ports
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert chosen(budget["spec"]["selector"]["matchLabels"]) == [budget["metadata"]["name"]]
    for policy in of_kind(objects, "NetworkPolicy"):
        assert chosen(policy["spec"]["podSelector"]["matchLabels"]), policy["metadata"]["name"]
    services = {json.dumps(s["spec"]["selector"], sort_keys=True): s for s in of_kind(objects, "Service")}
    for monitor in of_kind(objects, "ServiceMonitor"):
        service = services[json.dumps(monitor["spec"]["selector"]["matchLabels"], sort_keys=True)]
        assert [e["port"] for e in monitor["spec"]["endpoints"]] == [p["name"] for p in service["spec"]["ports"]]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_names_are_unique_and_short_enough(render: Render) -> None:
    objects = render(*EVERYTHING, "--set", "fullnameOverride=" + "n" * 63)
    keys = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(keys) == len(set(keys))
    assert all(len(name) <= 63 for _, _, name in keys)


# ---- security ----


def test_containers_are_bounded_and_locked_down(render: Render, example: tuple[str, ...]) -> None:
    for name, _, spec in pods(render(*example)):
        (box,) = spec["containers"]
        for bound in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(box["resources"][bound]), name
        assert box["securityContext"]["allowPrivilegeEscalation"] is False, name
        assert box["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for volume in spec.get("volumes", []):
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"], name
        if "-vllm-" in name:
            continue  # the vLLM image runs as root and writes where it likes
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] >= 10000, name
        assert box["securityContext"]["readOnlyRootFilesystem"] is True, name


def test_what_must_be_written_can_be_written(render: Render, example: tuple[str, ...]) -> None:
    """A read-only root and a non-root user: home, cache and temporary files need a volume."""
    box = container(render(*example), "Deployment", "rel-warmroute")
    mounts = [m["mountPath"] for m in box["volumeMounts"] if not m.get("readOnly")]
    assert "/tmp" in mounts
    home = {v["name"]: v.get("value") for v in box["env"]}
    for name in ("HOME", "HF_HOME"):
        assert any(f"{home[name]}/".startswith(f"{m}/") for m in mounts), name


def test_images_are_pinned(render: Render, example: tuple[str, ...]) -> None:
    images = {spec["containers"][0]["image"] for _, _, spec in pods(render(*example))}
    for image in images:
        tag = image.rpartition(":")[2]
        assert "/" not in tag, image
        assert tag != "latest", image
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert f"warmroute:{version}" in images
    from importlib.metadata import version as installed

    assert version == installed("warmroute"), "the chart's appVersion is the package's version"


def test_no_secret_is_written_in_plain_text(render: Render, example: tuple[str, ...]) -> None:
    for name, _, spec in pods(render(*example)):
        for variable in spec["containers"][0].get("env", []):
            if re.search(r"TOKEN|PASSWORD|KEY|SEED|SECRET", variable["name"]):
                assert "secretKeyRef" in variable.get("valueFrom", {}), f"{name}: {variable['name']}"
            assert not re.search(r"://[^/$]*:[^$/@]+@", variable.get("value", "")), f"{name}: {variable['name']}"


def test_made_secrets_are_random_and_referenced(render: Render) -> None:
    objects = render("--set", "index.shared=true")
    made = {o["metadata"]["name"]: o["data"] for o in of_kind(objects, "Secret")}
    assert sorted(made) == ["rel-warmroute-key-seed", "rel-warmroute-valkey"]
    for data in made.values():
        assert all(len(value) >= 40 for value in data.values())
    for name, _, spec in pods(objects):
        for variable in spec["containers"][0].get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                assert reference["key"] in made[reference["name"]], name


def test_rights_are_few_and_namespaced(render: Render, example: tuple[str, ...]) -> None:
    objects = render(*example)
    assert not of_kind(objects, "ClusterRole")
    assert not of_kind(objects, "ClusterRoleBinding")
    (role,) = of_kind(objects, "Role")
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} <= {"get", "list", "watch"}
    assert {r for rule in role["rules"] for r in rule["resources"]} <= {"pods", "endpointslices", "services"}
    args = container(objects, "Deployment", "rel-warmroute")["args"]
    assert role["metadata"]["namespace"] == flag(args, "namespace"), "the rights are where the pods are"
    (binding,) = of_kind(objects, "RoleBinding")
    assert binding["subjects"][0]["namespace"] == NAMESPACE
    for name, _, spec in pods(objects):
        asks = spec["containers"][0].get("args", [""])[0] in ("serve", "index")
        assert spec["automountServiceAccountToken"] is asks, name


def test_rights_suffice_for_a_service(render: Render) -> None:
    (role,) = of_kind(render("--set", "discovery.service=vllm"), "Role")
    granted = {(g, r): rule for rule in role["rules"] for g in rule["apiGroups"] for r in rule["resources"]}
    assert set(granted[("discovery.k8s.io", "endpointslices")]["verbs"]) == {"get", "list", "watch"}
    assert set(granted[("", "pods")]["verbs"]) == {"get", "list", "watch"}
    assert granted[("", "services")]["resourceNames"] == ["vllm"]


# ---- probes, ways in, policy names ----


def test_probes(render: Render) -> None:
    objects = render("--set", "index.shared=true")
    for name in ("rel-warmroute", "rel-warmroute-indexer"):
        box = container(objects, "Deployment", name)
        assert box["readinessProbe"]["httpGet"]["path"] == "/ready?scope=self"
        assert box["livenessProbe"]["httpGet"]["path"] == box["startupProbe"]["httpGet"]["path"] == "/health"
        live = box["livenessProbe"]
        assert live["timeoutSeconds"] >= 5, "H70: a busy loop is not a dead one"
        assert live["periodSeconds"] * live["failureThreshold"] >= 60


def test_an_ingress_does_not_buffer(render: Render) -> None:
    (ingress,) = of_kind(render("--set", "ingress.enabled=true,ingress.host=h"), "Ingress")
    notes = ingress["metadata"]["annotations"]
    assert notes["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert int(notes["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= 1800
    assert ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["name"] == "rel-warmroute"


def test_policies_offered_are_policies_that_exist() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]["router"]["properties"]["policy"]["enum"]) <= set(POLICIES)


def test_scaling_leaves_replicas_to_the_scaler(render: Render) -> None:
    plain = named(render("--set", "router.replicas=3"), "Deployment", "rel-warmroute")
    assert plain["spec"]["replicas"] == 3
    for scaler in ("router.hpa.enabled=true", "router.keda.enabled=true,router.keda.prometheusUrl=http://p:9090"):
        objects = render("--set", scaler)
        assert "replicas" not in named(objects, "Deployment", "rel-warmroute")["spec"]
        assert of_kind(objects, "PodDisruptionBudget")


def test_ranks_are_told_and_have_room_for_their_ports(render: Render) -> None:
    objects = render("-f", str(CHART / "examples" / "multi-model-lora.yaml"))
    deployment = named(objects, "Deployment", "rel-warmroute-vllm-deepseek")
    assert deployment["spec"]["template"]["metadata"]["annotations"] == {"warmroute.dev/ranks": "8"}
    (box,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--data-parallel-size=8" in box["args"]
    assert box["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_valkey_keeps_within_its_memory(render: Render) -> None:
    box = container(render("--set", "index.shared=true"), "Deployment", "rel-warmroute-valkey")
    most = int(box["args"][box["args"].index("--maxmemory") + 1].removesuffix("mb"))
    assert most < int(box["resources"]["limits"]["memory"].removesuffix("Mi"))
    assert box["args"][box["args"].index("--maxmemory-policy") + 1] == "allkeys-lru"


# ---- wrong values ----


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("router.replicas=-1", "replicas"),
        ("router.replicas=two", "replicas"),
        ("router.hpa.enabled=true,router.hpa.minReplicas=20", "minReplicas is 20"),
        ("serviceAccount.create=false", "serviceAccount.name"),
        ("discovery.namespace=gpu,vllm.models[0].name=a,vllm.models[0].model=b", "never be found"),
        ("router.resources.limits.memory=512Mi", "router.bufferedBodiesMaxBytes"),
        ("router.resources.limits.memory=0.7G", "router.bufferedBodiesMaxBytes"),
        ("index.shared=true,valkey.maxMemoryMiB=1500", "valkey.resources.limits.memory"),
        ("image.digest=sha256:abc", "digest"),
        ("router.replcias=2", "replcias"),
        ("router.policy=best", "policy"),
        ("router.preStopSeconds=0", "preStopSeconds"),
        ("router.extraArgs[0]=first-byte-limit-s=3", "extraArgs"),
        ("discovery.eventsPort=70000", "eventsPort"),
        ("valkey.image=valkey/valkey:latest", "image"),
        ("valkey.image=valkey/valkey", "image"),
        ("image.tag=latest", "tag"),
        ("redis.url=http://x", "url"),
        ("vllm.models[0].name=a", "model"),
        ("vllm.models[0].name=A,vllm.models[0].model=x", "name"),
        ("router.terminationGracePeriodSeconds=60", "set it to 140 or more"),
        ("vllm.terminationGracePeriodSeconds=60,vllm.models[0].name=a,vllm.models[0].model=m", "set it to 140 or more"),
        ("discovery.service=a,discovery.selector.app=b", "give one of them"),
        ("router.hpa.enabled=true,router.keda.enabled=true", "two autoscalers"),
        ("router.keda.enabled=true", "prometheusUrl"),
        ("redis.url=redis://u:p@h:1/0", "existingSecret"),
        ("redis.url=redis://h:1/0,redis.caSecret=ca", "rediss://"),
        ("loadtest.compare.enabled=true", "router.allowPolicyHeader"),
        ("httpRoute.enabled=true", "parentRefs"),
        (
            "discovery.replayPort=5558,vllm.models[0].name=a,vllm.models[0].model=m,vllm.models[0].dataParallelSize=2",
            "overlap",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_a_clear_line(helm: Path, setting: str, word: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        rendered(helm, "--set", setting)
    assert word in refused.value.stderr, refused.value.stderr


def test_the_schema_knows_every_value_and_no_other() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)

    def compare(value: Any, part: dict[str, Any], path: str) -> None:
        if part.get("additionalProperties") is not False or path == "vllm.models":
            return
        assert set(part["properties"]) - {"global"} == set(value), path
        for key, inner in value.items():
            if isinstance(inner, dict):
                compare(inner, part["properties"][key], f"{path}.{key}".strip("."))

    assert set(schema["properties"]["router"]["properties"]["policy"]["enum"]) == set(POLICIES)
    arm = schema["properties"]["loadtest"]["properties"]["compare"]["properties"]["policies"]["items"]["pattern"]
    assert all(re.match(arm, name) for name in POLICIES)
    values["router"]["resources"] = values["indexer"]["resources"] = values["valkey"]["resources"] = None
    values["loadtest"]["compare"]["resources"] = None
    compare(values, schema, "")


# ---- what is written down about it ----


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value and path.rpartition(".")[2] not in ("resources", "labels"):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}".strip("."))
    else:
        yield path


def test_the_readme_is_generated_from_the_values_and_every_value_has_words() -> None:
    spec = importlib.util.spec_from_file_location("generate_readme", CHART.parent / "generate_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (CHART / "README.md").read_text()
    assert page == module.readme(), "python deploy/helm/generate_readme.py"
    for path in leaves(yaml.safe_load((CHART / "values.yaml").read_text())):
        assert f"| `{path}` |" in page, path
    schema = json.loads((CHART / "values.schema.json").read_text())
    for field in schema["properties"]["vllm"]["properties"]["models"]["items"]["properties"]:
        assert f"`{field}`" in page, field


def test_the_comparisons_flags_are_known_to_the_load_test(render: Render) -> None:
    from loadtest import compare, experiment

    objects = render("-f", str(CHART / "examples" / "benchmark-16xh100.yaml"))
    (job,) = of_kind(objects, "Job")
    (box,) = job["spec"]["template"]["spec"]["containers"]
    assert box["args"][:2] == ["loadtest", "compare"]
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    asked = parser.parse_args(box["args"][2:])
    experiment.load_experiment(asked.scenario)
    assert asked.policies.split(",") == ["random", "prefix"]
    assert asked.url == "http://rel-warmroute:80"
    assert 0 < asked.wait_s < job["spec"]["activeDeadlineSeconds"], "pods take minutes to load"
    claim = job["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    kept = named(objects, "PersistentVolumeClaim", claim)
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert str(asked.out).startswith(box["volumeMounts"][0]["mountPath"] + "/")
    assert "--allow-policy-header" in container(objects, "Deployment", "rel-warmroute")["args"]


def test_the_notes_read_well(helm4: Path, example: tuple[str, ...]) -> None:
    command = [helm4, "install", "rel", CHART, "--namespace", NAMESPACE, "--dry-run=client", *example]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60, env={"KUBECONFIG": "/dev/null", "HOME": "/tmp"}
    )
    notes = done.stdout.partition("NOTES:\n")[2]
    assert "http://rel-warmroute.serving:80/v1" in notes
    assert "docker build -t warmroute:" in notes
    assert ("--selector=" in notes) != ("--service=" in notes)
    assert ("set\n   discovery.selector to their labels" in notes) == (example == ())
    assert not re.search(r"<no value>|\{\{|%!|\n\n\n", notes)


# ---- what a cluster's owner asks for ----


@pytest.mark.parametrize("memory", ["768Mi", "1Gi", "1.5Gi", "0.9G", "1e9", "900000000"])
def test_memory_that_suffices_is_taken_however_it_is_written(render: Render, memory: str) -> None:
    assert render("--set-string", f"router.resources.limits.memory={memory}")


def test_labels_digest_and_pull_secrets_reach_every_pod(render: Render) -> None:
    digest = "sha256:" + "a" * 64
    objects = render(
        *EVERYTHING, "--set", f"commonLabels.team=x,image.digest={digest},loadtest.compare.enabled=true",
        "--set", "image.pullSecrets[0]=a,image.pullSecrets[1].name=b",
    )  # fmt: skip
    assert all(o["metadata"]["labels"]["team"] == "x" for o in objects)
    for name, meta, spec in pods(objects):
        assert meta.get("labels", {}).get("team") == "x", name
        assert spec["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}], name
    for workload in of_kind(objects, "Deployment"):
        assert "team" not in workload["spec"]["selector"]["matchLabels"], "selectors never change over upgrades"
    assert container(objects, "Deployment", "rel-warmroute")["image"] == f"warmroute@{digest}"


def test_without_the_right_to_grant_rights(render: Render) -> None:
    objects = render(
        "--set", "index.shared=true,serviceAccount.create=false,serviceAccount.name=given,rbac.create=false"
    )
    assert not [o for kind in ("ServiceAccount", "Role", "RoleBinding") for o in of_kind(objects, kind)]
    accounts = {spec.get("serviceAccountName") for name, _, spec in pods(objects) if "valkey" not in name}
    assert accounts == {"given", None}
    own = render("--set", "serviceAccount.name=mine,serviceAccount.annotations.role=r")
    (account,) = of_kind(own, "ServiceAccount")
    assert (account["metadata"]["name"], account["metadata"]["annotations"]) == ("mine", {"role": "r"})
    (binding,) = of_kind(own, "RoleBinding")
    assert binding["subjects"][0]["name"] == "mine"


def test_openshift_hands_out_users_itself(render: Render) -> None:
    nothing = ",".join(f"podSecurityContext.{name}=null" for name in ("runAsUser", "runAsGroup", "fsGroup"))
    objects = render("--set", f"index.shared=true,{nothing}")
    for name, _, spec in pods(objects):
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}, name


def test_further_volumes_and_fields_of_the_service(render: Render, tmp_path: Path) -> None:
    extra = {
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
    }
    service = {"extraSpec": {"ipFamilyPolicy": "PreferDualStack", "loadBalancerSourceRanges": ["10.0.0.0/8"]}}
    values = {"router": {**extra, "service": service}, "indexer": extra, "index": {"shared": True}}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    objects = render("-f", str(file))
    for name in ("rel-warmroute", "rel-warmroute-indexer"):
        spec = named(objects, "Deployment", name)["spec"]["template"]["spec"]
        assert {"name": "ca", "configMap": {"name": "ca"}} in spec["volumes"]
        assert {"name": "ca", "mountPath": "/ca"} in spec["containers"][0]["volumeMounts"]
    assert named(objects, "Service", "rel-warmroute")["spec"]["ipFamilyPolicy"] == "PreferDualStack"


def test_a_password_of_ones_own_for_the_bundled_valkey(render: Render) -> None:
    """Without a cluster to look into (Argo CD) each rendering would make another one."""
    objects = render("--set", "index.shared=true,valkey.existingSecret=mine,valkey.key=pw")
    assert "rel-warmroute-valkey" not in [o["metadata"]["name"] for o in of_kind(objects, "Secret")]
    for name in ("rel-warmroute", "rel-warmroute-indexer", "rel-warmroute-valkey"):
        env = {v["name"]: v for v in container(objects, "Deployment", name)["env"]}
        assert env["VALKEY_PASSWORD"]["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "pw"}


def test_a_policy_for_clients_lets_monitoring_and_our_own_tests_in(render: Render) -> None:
    clients = "networkPolicy.clients[0].podSelector.matchLabels.app=web"
    policy = named(render("--set", f"networkPolicy.enabled=true,{clients}"), "NetworkPolicy", "rel-warmroute-router")
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": 8080}]
    allowed = [s["podSelector"]["matchLabels"] for s in rule["from"] if "podSelector" in s]
    assert allowed[0] == {"app": "web"}
    assert [a["app.kubernetes.io/component"] for a in allowed[1:]] == ["smoke", "loadtest"]
    assert any("namespaceSelector" in s for s in rule["from"])
