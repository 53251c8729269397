"""`warmroute demo` as a user starts it: emulated pods, the real router, a comparison."""

import asyncio
import sys
from pathlib import Path

import pytest

from loadtest.compare import load
from loadtest.report import summaries

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
async def test_the_demo_shows_prefix_routing_winning_on_the_same_pods(tmp_path: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import sys; from router.cli import main; sys.exit(main())"),
        *("demo", "--quiet", "--seconds", "20", "--out", str(tmp_path / "demo")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
    )
    output = (await asyncio.wait_for(child.communicate(), 280))[0].decode()
    assert child.returncode == 0, output
    run = load(tmp_path / "demo.json")
    assert run.emulated
    random, prefix = summaries(run)
    assert (random.arm, prefix.arm) == ("random", "prefix")
    assert random.pooled.requests == prefix.pooled.requests > 50
    # by the pods' own counters, so whatever the machine's speed
    assert prefix.pooled.hit_share_pods > 1.5 * random.pooled.hit_share_pods
    assert len(prefix.pooled.requests_by_pod) == 4
    assert min(prefix.pooled.requests_by_pod.values()) > 0, "no pod may be left without work"
