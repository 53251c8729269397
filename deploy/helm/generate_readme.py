"""Write deploy/helm/warmroute/README.md: the words below and a table of values.yaml's comments; a test compares."""

import re
from pathlib import Path

import yaml

CHART = Path(__file__).parent / "warmroute"
WORDS = """\
# Warmroute's Helm chart

One URL in front of all vLLM pods of a namespace. `docs/kubernetes.md` leads from nothing to the first comparison with
random routing; this page lists what can be set, generated from `values.yaml` (`python deploy/helm/generate_readme.py`).

    docker build -t warmroute:{version} .        # then load it into the nodes, or push it and set image.repository
    helm install warmroute deploy/helm/warmroute --namespace serving --set discovery.selector.app=vllm

| example | what it shows |
|---|---|
{examples}

Rights, for those who make the Role by hand (`rbac.create: false`): get, list and watch of pods in their namespace;
with `discovery.service` also of endpointslices, and get of that Service.

What a wrong value says comes from `values.schema.json` (types, ranges, unknown names) and from the templates (settings
that do not fit each other, such as a grace period shorter than the drain).

## Objects

| object | when |
|---|---|
| Deployment, Service of the router | always |
| ServiceAccount; Role, RoleBinding | unless `serviceAccount.create`, `rbac.create` are off |
| PodDisruptionBudget | more than one replica |
| Deployment, Service, PodDisruptionBudget of the indexer; Secret with the key seed | `index.shared` |
| Deployment, Service, Secret of Valkey | `index.shared` without `redis.url` and `redis.existingSecret` |
| HorizontalPodAutoscaler or KEDA ScaledObject | `router.hpa.enabled`, `router.keda.enabled` |
| Ingress, HTTPRoute | `ingress.enabled`, `httpRoute.enabled` |
| NetworkPolicies | `networkPolicy.enabled` |
| ServiceMonitors, PrometheusRule, dashboard ConfigMap | `monitoring.*.enabled` |
| a Deployment and PodDisruptionBudget of vLLM for each model | `vllm.models` |
| Job and PersistentVolumeClaim of the comparison | `loadtest.compare.enabled` |
| Pod of `helm test` | `loadtest.smoke.enabled` |

## Models of `vllm.models`

| field | meaning |
|---|---|
| `name`, `model` | short name for objects; what vLLM is to serve. Both are needed |
| `servedNames` | names clients may use; the first is the main one |
| `replicas`, `tensorParallelSize`, `dataParallelSize` | pods; GPUs a rank; ranks a pod, each with its own KV events |
| `blockSize`, `maxModelLen`, `gpuMemoryUtilization` | vLLM's flags of the same meaning |
| `loraModules` | adapter name -> path; turns LoRA on |
| `image`, `extraArgs`, `extraEnv`, `resources` | instead of or beyond the chart's |
| `modelsClaim`, `modelsSize` | a claim for the weights, or the size limit of the emptyDir they are loaded into |
| `volumes`, `volumeMounts`, `nodeSelector`, `tolerations`, `affinity`, `runtimeClassName` | as in a pod |
| `maxSurge`, `maxUnavailable` | of the rolling update; 0 and 1, since spare GPUs are rare |

## Annotations of pods

A vLLM pod that is not of this chart can say of itself: `warmroute.dev/port`, `warmroute.dev/events-port`,
`warmroute.dev/replay-port` (each of rank 0), `warmroute.dev/ranks`, `warmroute.dev/model` (base model id). They win
over the values below. Ports named `http`, `kv-events` and `kv-replay` are found without any setting.

## Values
"""


def values_table() -> str:
    """One row for each value that has a `# --` comment, with its path, default and words."""
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    lines = ["| value | default | meaning |", "|---|---|---|"]
    path: list[tuple[int, str]] = []
    words: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"\s*# (-- )?(.*)", line):
            if match[1] or words:
                words.append(match[2])
            continue
        if match := re.match(r"( *)(\w+):", line):
            indent = len(match[1])
            path = [*((i, name) for i, name in path if i < indent), (indent, match[2])]
            if words:
                value = values
                for _, name in path:
                    value = value[name]
                name = ".".join(name for _, name in path)
                lines.append(f"| `{name}` | {_shown(value)} | {' '.join(words).replace('|', '/')} |")
        words = []
    return "\n".join(lines)


def _shown(value: object) -> str:
    if value in ("", None, {}, []):
        return {"": "none"}.get(str(value), "none" if value is not None else "null")
    if isinstance(value, dict | list):
        return f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).strip()}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def readme() -> str:
    """The whole page."""
    examples = []
    for path in sorted((CHART / "examples").glob("*.yaml")):
        first = path.read_text().splitlines()[0].removeprefix("# ")
        examples.append(f"| [{path.name}](examples/{path.name}) | {first} |")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    return WORDS.format(version=version, examples="\n".join(examples)) + "\n" + values_table() + "\n"


if __name__ == "__main__":
    (CHART / "README.md").write_text(readme())
