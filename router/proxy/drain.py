"""SIGTERM: unready first, then let requests end, then end the rest visibly, then close the port.

The port stays open meanwhile, so that a load balancer that has not looked yet is served and not refused, and `/ready`
can say 503. Every reply from now on is the last on its connection.
May import: the standard library, router.door, router.proxy.{front,handlers}.
"""

from __future__ import annotations

import asyncio
import logging

from router.door import Lifecycle
from router.proxy.front import Listener
from router.proxy.handlers import ProxyApp

log = logging.getLogger("router.proxy")

LOOK_S = 0.05
LAST_WORDS_S = 2.0  # for the error events of streams that are cut


async def drain(app: ProxyApp, listener: Listener, lifecycle: Lifecycle, *, delay_s: float, grace_s: float) -> bool:
    """Take `app` out of service. True when every request had ended by itself.

    `delay_s`: at least so long the port stays open, for load balancers to see the 503 of /ready.
    `grace_s`: at most so long (the delay included) requests may still run.
    """
    lifecycle.phase = "draining"
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    log.info("draining", extra={"fields": {"inflight": app.proxy.inflight, "grace_s": grace_s}})
    while (now_s := loop.time()) < began_s + grace_s:
        if app.proxy.inflight == 0 and now_s >= began_s + delay_s:
            break
        await asyncio.sleep(LOOK_S)
    clean = app.proxy.inflight == 0
    if not clean:
        log.warning("grace is over", extra={"fields": {"cut": app.proxy.inflight}})
        if app.parts.waiting is not None:
            app.parts.waiting.shut_down()
        app.parts.gone.shut_down()
    await listener.close(grace_s=0.2 if clean else LAST_WORDS_S)
    return clean
