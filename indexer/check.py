"""`warmroute index --check`: does the index say what the pods hold?

A pod's truth is had from its own dump (emulated pods) or by replaying its events from 0, as far as its buffer reaches;
not by report mode "full", which would make the index wrong (ADR 12).
Events under way look like differences, so only what differs three times in a row, a second apart, is reported.
May import: indexer, router.core, router.index, router.fleet, aiohttp.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import zmq.asyncio

from indexer.follow import source_specs
from indexer.plan import AskReplay, Ledger
from indexer.source import Inbox, ReplayFailed, Source, SourceSpec
from indexer.wire import WireError, decode
from router.core.hashing import next_key, pack_tokens, root_key
from router.core.types import BlockKey, IndexUnavailable
from router.fleet.build import build_fleet, fleet_specs, start_pods
from router.index.redis import RedisIndexReader
from router.ops import Metrics
from router.settings import IndexSettings, SettingsError

LOOKS = 3
NOT_COMPARED = 3  # exit status; 1: it differs, 2: it cannot be asked like that
PODS_KNOWN_WITHIN_S = 30.0


class Truth(msgspec.Struct, frozen=True):
    """What a worker holds by its own word. `whole` is False when older events can no longer be had."""

    keys: frozenset[BlockKey]
    whole: bool
    source: str


class Report(msgspec.Struct, frozen=True):
    """One worker's comparison."""

    worker: str
    source: str
    held_blocks: int
    indexed_blocks: int
    missing_blocks: int  # held, and not in the index: hits that the router does not see
    stale_blocks: int  # in the index, and not held: hits that will not happen
    note: str = ""

    def line(self) -> str:
        """For people."""
        if self.source == "?":
            return f"{self.worker}: not compared{self.note}"
        verdict = "equal" if not self.missing_blocks and not self.stale_blocks else "DIFFERS"
        return (
            f"{self.worker}: {verdict}; holds {self.held_blocks} blocks (by its {self.source}), index "
            f"{self.indexed_blocks}, missing {self.missing_blocks}, stale {self.stale_blocks}{self.note}"
        )


async def compare(
    spec: SourceSpec, reader: RedisIndexReader, session: aiohttp.ClientSession, seed: str, pause_s: float = 1.0
) -> Report:
    """Raises IndexUnavailable, or ReplayFailed when the pod tells nothing."""
    missing: frozenset[BlockKey] | None = None
    stale: frozenset[BlockKey] = frozenset()
    for look in range(LOOKS):
        truth = await dumped(spec, session, seed) or await replayed(spec, seed)
        indexed = await reader.dump(spec.address)
        now_missing, now_stale = truth.keys - indexed, frozenset(indexed - truth.keys)
        missing, stale = (now_missing, now_stale) if missing is None else (missing & now_missing, stale & now_stale)
        if not missing and not stale:
            break
        if look < LOOKS - 1:
            await asyncio.sleep(pause_s)
    note = "" if truth.whole else "; its replay does not reach back to 0, so stale ones cannot be told from old ones"
    return Report(
        str(spec.address),
        truth.source,
        len(truth.keys),
        len(indexed),
        len(missing or ()),
        len(stale) if truth.whole else 0,
        note,
    )


async def dumped(spec: SourceSpec, session: aiohttp.ClientSession, seed: str) -> Truth | None:
    """From an emulated pod's /emulated/blocks; None if there is no such thing."""
    try:
        async with session.get(f"{spec.address.pod}/emulated/blocks") as reply:
            if reply.status != 200:
                return None
            told = msgspec.json.decode(await reply.read())
    except (aiohttp.ClientError, TimeoutError, ValueError, msgspec.MsgspecError):
        return None
    blocks: dict[Any, dict[str, Any]] = {b["hash"]: b for b in told["blocks"] if b["token_ids"] is not None}
    keys: dict[Any, BlockKey] = {}

    def key_of(name: Any) -> BlockKey | None:
        chain = []
        while name is not None and name not in keys and name in blocks:
            chain.append(name)
            name = blocks[name]["parent"]
        if name is not None and name not in keys:
            return None
        for name in reversed(chain):
            block = blocks[name]
            parent = block["parent"]
            before = (
                root_key(seed=seed, model=spec.model, lora_name=block["lora_name"], cache_salt=block["cache_salt"])
                if parent is None
                else keys[parent]
            )
            keys[name] = next_key(before, pack_tokens(block["token_ids"]))
        return keys.get(chain[0]) if chain else keys[name]

    held = frozenset(k for name in blocks if (k := key_of(name)) is not None)
    return Truth(held, True, "own dump")


async def replayed(spec: SourceSpec, seed: str) -> Truth:
    """By replay from 0 through a Ledger of its own. Raises ReplayFailed."""
    ledger = Ledger(seed=seed, model=spec.model)
    context = zmq.asyncio.Context()
    try:
        source = Source(spec, Inbox(), context)
        ledger.begin_replay(AskReplay(0, "start"))
        async for seq, payload in source.replay(0):
            try:
                batch = decode(payload)
            except WireError:
                batch = None
            if isinstance(ledger.replayed(seq, batch), AskReplay):
                raise ReplayFailed("the replay had a hole")
    finally:
        context.destroy(linger=0)
    return Truth(frozenset(ledger.claims("gpu")), ledger.whole or ledger.last_seq < 0, "replay")


async def check(settings: IndexSettings) -> list[Report]:
    """Every worker of the settings' pods. Raises SettingsError with the cure."""
    if settings.redis_url is None:
        raise SettingsError("--redis-url is needed: --check compares the shared index with the pods")
    fleet = build_fleet(settings)
    async with AsyncExitStack() as stack:
        await fleet.start()
        stack.push_async_callback(fleet.close)
        await start_pods(fleet, settings, fleet_specs(settings), stack, Metrics())
        reader = RedisIndexReader(settings.redis_url, seed=settings.key_seed, metrics=Metrics(), deadline_s=10.0)
        await reader.start()
        stack.push_async_callback(reader.close)
        limit = aiohttp.ClientTimeout(total=30)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=limit))
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + PODS_KNOWN_WITHIN_S
        while len(specs := source_specs(fleet.state)) < len(fleet.state.pods) or not specs:
            if loop.time() > ends_s:
                break
            await asyncio.sleep(0.1)
        return [await _safely(spec, reader, session, settings.key_seed) for spec in specs]


async def _safely(spec: SourceSpec, reader: RedisIndexReader, session: aiohttp.ClientSession, seed: str) -> Report:
    try:
        return await compare(spec, reader, session, seed)
    except IndexUnavailable as exc:
        return Report(str(spec.address), "?", 0, 0, 0, 0, f": Redis does not answer: {exc}")
    except ReplayFailed as exc:
        return Report(str(spec.address), "?", 0, 0, 0, 0, f": the pod does not say what it holds: {exc}")


def show(reports: Sequence[Report]) -> int:
    """Print; the exit status is 1 when something differs, else 3 when something could not be compared."""
    for report in reports:
        sys.stdout.write(report.line() + "\n")
    if not reports:
        sys.stdout.write("no pod told its model and events endpoint: nothing was compared\n")
    if any(r.missing_blocks or r.stale_blocks for r in reports):
        return 1
    return NOT_COMPARED if not reports or any(r.source == "?" for r in reports) else 0
