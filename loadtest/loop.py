"""The event loop of everything here that must be on time: uvloop's where there is one.

May import: the standard library, uvloop.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """As asyncio.run."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
