"""Waiting without fixed sleeps."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """`await until(condition)`: polls; fails after 30 s."""

    async def wait(condition: Callable[[], object], within_s: float = 30.0) -> None:
        ends = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < ends, "never happened"
            await asyncio.sleep(0.01)

    return wait
