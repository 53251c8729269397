"""The image cannot be built here, so its parts are tried: the linter, the context, and the steps, run on this machine.

Slow: the environment is made from what the Dockerfile copies and by what it runs, and the router is started from it
with a read-only root, as another user, with the two writable places that the chart gives it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest
import yaml

from router.cli import build_parser
from router.fleet.discover import build_discovery
from router.ops import Metrics
from router.settings import ServeSettings, read
from tests.fakes.redis_servers import free_port
from tests.helm.conftest import CHART
from tests.helm.fetch_tools import ROOT, hadolint

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PYTHON = Path("/usr/bin/python3.11")  # readable by everybody, unlike one in somebody's home


def copied() -> list[str]:
    """What the first stage takes from the context."""
    lines = re.findall(r"^COPY (?!--from)(.+) (?:\S+)$", DOCKERFILE, re.MULTILINE)
    return [source for line in lines for source in line.split()]


def test_the_context_holds_what_is_copied_and_little_else() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(copied()) == sorted(allowed)
    assert all((ROOT / source).exists() for source in copied())


def test_every_dependency_is_pinned_and_fits() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "deploy/docker/constraints.txt").read_text(), re.MULTILINE))
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    for wanted in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        assert re.match(r"[\w-]+", wanted)[0].lower() in pinned, wanted  # type: ignore[index]


def test_bases_are_pinned_and_the_user_is_the_charts() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(set(bases)) == 1
    assert re.fullmatch(r"docker\.io/library/python:3\.11\.\d+-slim-\w+", bases[0])
    (user,) = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    values = (CHART / "values.yaml").read_text()
    assert re.findall(r"^  runAs(?:User|Group): (\d+)$", values, re.MULTILINE) == list(user)
    assert 'ENTRYPOINT ["warmroute"]' in DOCKERFILE, "the chart's args begin with the subcommand"
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f"docker build -t warmroute:{chart['appVersion']} ." in DOCKERFILE


@pytest.mark.slow
def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([hadolint(), ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_its_steps_give_a_router_that_runs_read_only_as_another_user() -> None:
    work = ROOT / ".cache" / "image"
    if not PYTHON.is_file() or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip(f"needs {PYTHON} and the right to make a mount namespace")
    shutil.rmtree(work, ignore_errors=True)
    source, made = work / "src", work / "warmroute"
    for name in copied():
        target = source / (Path(name).name if (ROOT / name).is_file() else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copy if (ROOT / name).is_file() else shutil.copytree
        copy(ROOT / name, target)
    (step,) = re.findall(r"^RUN ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    step = step.replace("/opt/warmroute", str(made)).replace("python -m venv", f"{PYTHON} -m venv")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # whose pip it is
    subprocess.run(["sh", "-ec", step], cwd=source, env={**os.environ, "PATH": path}, check=True, timeout=600)
    port = free_port()
    start = (
        "mount -o remount,bind,ro / && mount -t tmpfs none /tmp && mount -t tmpfs none /mnt && chmod 1777 /tmp /mnt && "
        "exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "
        f"env -i PATH={made}/bin:/usr/bin:/bin HOME=/mnt HF_HOME=/mnt/hf PYTHONDONTWRITEBYTECODE=1 "
        f"warmroute serve --host=127.0.0.1 --port={port} --admin-port=0 --pod http://127.0.0.1:1"
    )
    process = subprocess.Popen(["unshare", "-m", "sh", "-ec", start], cwd="/", stderr=subprocess.PIPE, text=True)
    try:
        assert health(port, process) == 200
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert re.search(r"^Uid:\t10001\t10001", status, re.MULTILINE)
        assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
        assert " / " in Path(f"/proc/{process.pid}/mounts").read_text()
    finally:
        process.terminate()
        _, log = process.communicate(timeout=60)
        shutil.rmtree(work)
    assert process.returncode == 0, log
    assert "Traceback" not in log


def health(port: int, process: subprocess.Popen[str]) -> int:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                return int(reply.status)
        except OSError:
            time.sleep(0.1)
    return 0


def test_the_compose_file_fits_the_image_and_itself() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())["services"]
    flags = vars(build_parser().parse_args(services["router"]["command"]))
    settings = read(ServeSettings, flags)
    pods = [s for name, s in services.items() if name != "router"]
    assert all(settings.service in s["networks"]["default"]["aliases"] for s in pods)
    gpus = [s["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for s in pods]
    assert gpus == [["0"], ["1"]], "each its own: a count of 1 is GPU 0 for every container"
    build_discovery(settings, lambda pods: None, Metrics())
    vllm = services["vllm-0"]["command"]
    assert vllm == services["vllm-1"]["command"]
    events = json.loads(next(a.partition("=")[2] for a in vllm if a.startswith("--kv-events-config=")))
    assert events["endpoint"] == f"tcp://*:{settings.events_port}"
    assert events["replay_endpoint"] == f"tcp://*:{settings.replay_port}"
    assert f"--port={settings.pod_port}" in vllm
    assert settings.drain_s < int(services["router"]["stop_grace_period"].removesuffix("s"))
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert services["router"]["image"] == f"warmroute:{chart['appVersion']}"
    assert services["vllm-0"]["image"] == yaml.safe_load((CHART / "values.yaml").read_text())["vllm"]["image"]
