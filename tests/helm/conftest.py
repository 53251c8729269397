"""Real Helm 3 and Helm 4 for the tests of the chart."""

import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.fetch_tools import ROOT, tool

CHART = ROOT / "deploy" / "helm" / "warmroute"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
NAMESPACE = "serving"
Objects = list[dict[str, Any]]


def fetched(major: str, name: str = "helm") -> Path:
    """The binary; skips the test when it cannot be had, unless `make test-helm` insists."""
    try:
        return tool(major, name)
    except (OSError, subprocess.SubprocessError) as exc:
        if os.environ.get("WARMROUTE_REQUIRE_HELM"):
            raise
        pytest.skip(f"{name} {major} could not be fetched ({type(exc).__name__}); `make test-helm` insists on it")


@pytest.fixture(scope="session", params=["v3", "v4"])
def helm(request: pytest.FixtureRequest) -> Path:
    """Both of them in turn."""
    return fetched(request.param)


@pytest.fixture(scope="session")
def helm4() -> Path:
    """The newer one, where one is enough."""
    return fetched("v4")


@functools.cache
def rendered(helm: Path, *arguments: str) -> str:
    """`helm template`'s output. Raises CalledProcessError, whose stderr says why."""
    command = [helm, "template", "rel", CHART, "--namespace", NAMESPACE, "--kube-version", "1.31", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(scope="session")
def render(helm4: Path) -> Callable[..., Objects]:
    """Objects of the chart with these arguments."""

    def objects(*arguments: str) -> Objects:
        return [o for o in yaml.safe_load_all(rendered(helm4, *arguments)) if o]

    return objects


@pytest.fixture(scope="session", params=[None, *EXAMPLES], ids=lambda p: p.stem if p else "defaults")
def example(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The arguments of each example, and of the defaults."""
    return () if request.param is None else ("-f", str(request.param))


EVERYTHING = (
    "-f", str(CHART / "examples" / "production-ha.yaml"),
    "-f", str(CHART / "examples" / "benchmark-16xh100.yaml"),
    "-f", str(CHART / "examples" / "multi-model-lora.yaml"),
)  # fmt: skip
