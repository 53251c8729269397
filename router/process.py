"""What every long-running command of ours does: stop on signals, run on uvloop, open an admin port.

May import: aiohttp.web, router.admin, router.door, router.ops, router.settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from router.admin import AdminPages, build_admin_app
from router.door import ApiKeys
from router.ops import setup_logging
from router.settings import IndexSettings, ServeSettings, SettingsError, unread

log = logging.getLogger("warmroute.process")

DESCRIPTORS_MAX = 1 << 20  # where there is no hard limit


async def open_admin(
    pages: AdminPages, settings: ServeSettings | IndexSettings, keys: ApiKeys | None, stack: AsyncExitStack
) -> int:
    """Serve the admin port; returns the port that was got. Raises SettingsError when it cannot be had."""
    runner = web.AppRunner(build_admin_app(pages, keys=keys), access_log=None, handle_signals=False)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, settings.admin_host, settings.admin_port)
    try:
        await site.start()
    except OSError as exc:
        raise cannot_listen("admin", settings.admin_host, settings.admin_port, exc) from exc
    port = int(runner.addresses[0][1])
    log.info("listening", extra={"fields": {"what": "admin", "host": settings.admin_host, "port": port}})
    return port


def begin_log(settings: ServeSettings | IndexSettings) -> None:
    """Log as the settings say, first of all what of them has no effect."""
    setup_logging(level=settings.log_level, form=settings.log_format)
    for text in unread(settings, os.environ):
        log.warning(text)


def cannot_listen(what: str, host: str, port: int, exc: OSError) -> SettingsError:
    """What to say of a port that was not got; `what`: client or admin."""
    at = "admin-" if what == "admin" else ""
    cure = f"choose another --{at}port" if exc.errno != errno.EADDRNOTAVAIL else f"is --{at}host one of this machine's?"
    return SettingsError(f"cannot listen on {host}:{port} for {what}: {exc.strerror or exc}; {cure}")


def stop_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. A second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            sys.exit(130)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


def raise_descriptor_limit() -> None:
    """Up to what we may have: the usual soft limit of 1,024 carries 500 streams, and only select() ever needed it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # not every system lets us
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_on_uvloop(main: Callable[[], Any]) -> int:
    """Run a coroutine function to its end; a SettingsError becomes exit status 2 with its cure."""
    import uvloop

    raise_descriptor_limit()
    try:
        uvloop.run(main())
    except SettingsError as exc:
        sys.stderr.write(f"warmroute: {exc}\n")
        return 2
    return 0
