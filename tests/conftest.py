"""Which event loop a test runs on: the proxy's on uvloop, which serves in production, the rest on asyncio's own.

Hypothesis tries the same examples everywhere and takes its time: a slow machine is no failure.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping

import pytest
import uvloop
from hypothesis import HealthCheck, settings

settings.register_profile(
    "house", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub, in this process or a child's

ON_UVLOOP = ("test_proxy_", "test_upstream", "test_real_clients", "test_chaos")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Called once a test function by pytest-asyncio."""
    if item.path.name.startswith(ON_UVLOOP):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
