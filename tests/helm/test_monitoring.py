"""Alerts and dashboard: does every expression parse, name what exists, and have words for whoever is woken by it?

The slow lane asks Prometheus itself: promtool on the rules and on the metrics pages, and a real Prometheus that scrapes
a running router and answers every query of the dashboard.
"""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import promql_parser
import pytest
import yaml

from loadtest.fleet.text import TINY_MODEL
from router.ops import Metrics
from tests.fakes.kube_api import kube_api
from tests.fakes.kube_world import Cluster, Crowd, warmroute
from tests.fakes.redis_servers import free_port
from tests.helm.conftest import CHART, Objects
from tests.helm.fetch_tools import ROOT, prometheus

ALERTS = CHART / "files" / "alerts.yaml"
DASHBOARD = CHART / "files" / "dashboards" / "warmroute.json"


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> Iterator[tuple[str, str]]:
    """Title and expression, variables filled in as Grafana does."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$__rate_interval", "1m").replace("$namespace", ".*")
            assert "$" not in expr, expr
            yield panel["title"], expr


EXPRESSIONS = [(r["alert"], r["expr"]) for r in rules()] + list(panels())


def samples() -> dict[str, set[str]]:
    """Every sample name that a fresh process could show, with its labels."""
    metrics = Metrics()
    metrics.pod_rows.rows = lambda: [{"pod": "p", "workers": [dict.fromkeys(ROWS, 1)]}]
    found: dict[str, set[str]] = {}
    for collector in list(metrics.registry._collector_to_names):
        for name in metrics.registry._collector_to_names[collector]:
            found[name] = set(getattr(collector, "_labelnames", ()))
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


ROWS = [*Metrics().pod_rows.GAUGES, *Metrics().pod_rows.COUNTERS]
FROM_PROMETHEUS = {"namespace", "instance", "job", "service", "le"}


@pytest.mark.parametrize(("where", "expr"), EXPRESSIONS, ids=[f"{n}: {w}" for n, (w, _) in enumerate(EXPRESSIONS)])
def test_an_expression_parses_and_names_what_exists(where: str, expr: str) -> None:
    promql_parser.parse(expr)
    known = samples()
    used = set(re.findall(r"\bwarmroute_\w+", expr))
    assert used
    assert used <= set(known), f"{where} names a metric that does not exist"
    for name, matchers in re.findall(r"\b(warmroute_\w+)\{([^}]*)\}", expr):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        assert labels <= known[name] | FROM_PROMETHEUS, where


def test_the_chart_carries_both(render: Callable[..., Objects]) -> None:
    objects = render("--set", "monitoring.prometheusRule.enabled=true,monitoring.dashboard.enabled=true")
    (rule,) = [o for o in objects if o["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
    (config,) = [o for o in objects if o["kind"] == "ConfigMap"]
    assert json.loads(config["data"]["warmroute.json"]) == json.loads(DASHBOARD.read_text())
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_every_alert_has_its_words_in_the_runbook_and_its_test() -> None:
    book = (ROOT / "docs" / "operations.md").read_text()
    headings = set(re.findall(r"^### (\w+)$", book, re.MULTILINE))
    tested = set(re.findall(r"Warmroute\w+", (Path(__file__).parent / "alerts_test.yaml").read_text()))
    names = {rule["alert"] for rule in rules()}
    assert {h for h in headings if h.startswith("Warmroute")} == names
    assert tested == names
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_the_panels_do_not_overlap_and_each_has_its_own_id() -> None:
    board = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


# ---- the slow lane: Prometheus itself ----


@pytest.fixture(scope="module")
def tools() -> Path:
    """The directory of prometheus and promtool."""
    return prometheus()


@pytest.mark.slow
def test_promtool_takes_the_rules_and_each_alert_fires(tools: Path, tmp_path: Path) -> None:
    shutil.copy(ALERTS, tmp_path / "alerts.yaml")
    shutil.copy(Path(__file__).parent / "alerts_test.yaml", tmp_path)
    for command in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run([tools / "promtool", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def check_metrics(tools: Path, page: str) -> None:
    done = subprocess.run(
        [tools / "promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.slow
async def test_a_real_prometheus_answers_every_query_of_the_dashboard(tools: Path, tmp_path: Path) -> None:
    async with kube_api() as api:
        cluster = Cluster(api)
        try:
            for _ in range(2):
                await cluster.add()
            args = ["serve", "--host=127.0.0.1", "--port=0", "--admin-port=0", f"--tokenizer=tiny={TINY_MODEL}"]
            args += ["--discovery=kubernetes", "--selector=app=vllm", "--control=random:50%", "--shadow=least-loaded"]
            env = {"KUBECONFIG": str(api.kubeconfig(tmp_path))}
            async with warmroute(args, tmp_path / "router.log", **env) as router:
                await router.listening("client", "admin")
                async with aiohttp.ClientSession() as session, Crowd(router.url) as crowd:
                    await crowd.more(1)
                    async with session.get(router.url + "/metrics") as reply:
                        check_metrics(tools, await reply.text())
                    await scraped(tools, tmp_path, router.ports["client"], session)
        finally:
            await cluster.stop()


async def scraped(tools: Path, tmp_path: Path, target: int, session: aiohttp.ClientSession) -> None:
    port = free_port()
    job = {
        "job_name": "warmroute",
        "scrape_interval": "1s",
        "static_configs": [{"targets": [f"127.0.0.1:{target}"], "labels": {"namespace": "serving"}}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job], "rule_files": [str(ALERTS)]}))
    process = await asyncio.create_subprocess_exec(
        tools / "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        left = dict.fromkeys(expr for _, expr in panels())
        async with asyncio.timeout(120.0):
            while left:
                await asyncio.sleep(1.0)
                for expr in list(left):
                    try:
                        async with session.get(
                            f"http://127.0.0.1:{port}/api/v1/query", params={"query": expr}
                        ) as reply:
                            answer = await reply.json()
                    except aiohttp.ClientError:
                        break
                    assert answer["status"] == "success", answer
                    if answer["data"]["result"] or expr in QUIET:
                        del left[expr]
    except TimeoutError:
        raise AssertionError(f"no data for {list(left)}") from None
    finally:
        process.terminate()
        await process.wait()


MUST_NOT_HAPPEN = re.compile(
    r"warmroute_(refusals|retries|retries_denied|pod_failures|broken_streams|index_fallbacks|token_fallbacks)_total"
)
QUIET = {expr for _, expr in panels() if MUST_NOT_HAPPEN.search(expr)}
"""A labelled counter of mishaps has no series until the first one: no data is good news."""
