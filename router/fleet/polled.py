"""Pods from what can only be asked again and again: the addresses of a host name, or a file of SPECs.

A question that fails keeps the last list: name servers have hiccups, files are half written for a moment, and dead pods
show themselves. May import: the standard library, router.fleet.{discovery,state,static}.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from router.core.types import Clock
from router.fleet.discovery import DiscoveryStatus, Observer, OnPods, RestartReason
from router.fleet.state import PodSpec
from router.fleet.static import parse_specs

log = logging.getLogger("warmroute.discovery")
ANSWER_LIMIT_S = 10.0


class LookError(Exception):
    """The question had no usable answer; the text is for the operator."""

    def __init__(self, text: str, reason: RestartReason) -> None:
        super().__init__(text)
        self.reason: RestartReason = reason


Look = Callable[[], Awaitable[Sequence[PodSpec]]]
"""All pods as of now. Raises LookError."""


class PolledDiscovery:
    """Asks `look` every `interval_s` and tells the pods when they are others."""

    def __init__(
        self,
        kind: str,
        look: Look,
        on_pods: OnPods,
        observer: Observer,
        *,
        interval_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._kind, self._look, self._on_pods, self._observer = kind, look, on_pods, observer
        self._interval_s, self._clock = interval_s, clock
        self._told: Sequence[PodSpec] | None = None
        self._synced_at_s: float | None = None
        self._error: str | None = None
        self._restarts = 0

    async def run(self) -> None:
        """Never returns; ends only by cancellation."""
        while True:
            await self.once()
            await asyncio.sleep(self._interval_s)

    async def once(self) -> None:
        """One question; whatever happens, the next one is asked."""
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                found = tuple(await self._look())
            self._error, self._synced_at_s = None, self._clock()
            self._observer.synced(self._kind)
            if found != self._told:
                self._on_pods(found)
                self._told = found
        except LookError as exc:
            self._failed(str(exc), exc.reason)
        except TimeoutError:
            self._failed(f"no answer within {ANSWER_LIMIT_S:g} s", "timeout")
        except Exception as exc:  # a listener's fault, or ours: told, and tried again
            log.exception("discovery by %s stumbled", self._kind)
            self._failed(f"unexpected {type(exc).__name__}", "bug")

    def _failed(self, text: str, reason: RestartReason) -> None:
        if text != self._error:
            log.warning("pods not found anew: %s; the last known ones are kept", text)
        self._error = text
        self._restarts += 1
        self._observer.restarted(self._kind, reason)

    def status(self) -> DiscoveryStatus:
        """How it is doing."""
        return DiscoveryStatus(
            kind=self._kind,
            synced=self._synced_at_s is not None,
            last_sync_age_s=None if self._synced_at_s is None else self._clock() - self._synced_at_s,
            restarts=self._restarts,
            last_error=self._error,
        )


def addresses_of(host: str, *, port: int, events_port: int | None, replay_port: int | None) -> Look:
    """Every address of a headless Service or a service of docker compose is a pod; of two families IPv4 is used."""

    async def look() -> list[PodSpec]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as exc:
            raise LookError(f"{host} cannot be resolved: {exc.strerror}", "connect") from exc
        families = {info[0] for info in found}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        addresses = sorted({str(info[4][0]) for info in found if info[0] == family})
        return [_spec(f"[{a}]" if ":" in a else a, port, events_port, replay_port) for a in addresses]

    return look


def _spec(host: str, port: int, events_port: int | None, replay_port: int | None) -> PodSpec:
    url = f"http://{host}:{port}"
    return PodSpec(
        identity=url,
        name=url,
        url=url,
        events=f"tcp://{host}:{events_port}" if events_port else None,
        replay=f"tcp://{host}:{replay_port}" if replay_port else None,
    )


def lines_of(path: Path) -> Look:
    """One SPEC a line, as after --pod; `#` begins a comment. A change counts once two looks have seen the same."""
    taken: str | None = None
    seen: str | None = None

    async def look() -> list[PodSpec]:
        nonlocal taken, seen
        try:
            text = await asyncio.to_thread(path.read_text, encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as exc:
            raise LookError(f"--pods-file {path} cannot be read: {type(exc).__name__}", "http") from exc
        if taken is None or text == seen:  # else it may be half written
            taken = text
        seen = text
        lines = [line.partition("#")[0].strip() for line in taken.splitlines()]
        try:
            return parse_specs([line for line in lines if line])
        except ValueError as exc:
            raise LookError(f"--pods-file {path}: {exc}", "decode") from exc

    return look
