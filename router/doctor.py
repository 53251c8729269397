"""`warmroute doctor --url POD`: is this pod fit for prefix routing? Looks at one live pod, says what to fix.

`examine` moves bytes and returns facts; `diagnose` turns facts into findings and is pure.
May import: the standard library, aiohttp, msgspec, pyzmq, router.core, router.tokenize, indexer.wire.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from indexer.wire import Stored, WireError, decode
from router.core.hashing import usable_blocks
from router.tokenize.canary import Difference, first_difference
from router.tokenize.load import LoadFailure, is_at_hand, load
from router.tokenize.model import ModelOptions, ModelRenderer
from router.tokenize.pod import tokenize_body
from router.tokenize.port import PromptTokens
from router.tokenize.proof import chats
from router.tokenize.service import render_fully

CHATS = 60
_PATH = "/v1/chat/completions"


class Facts(msgspec.Struct, kw_only=True):
    """What was seen of a pod. None: it could not be seen."""

    url: str
    health_status: int | None = None
    version: str | None = None
    models: list[str] = []
    root: str | None = None
    prefix_caching: bool | None = None
    block_size_tokens: int | None = None
    sources: list[str] | None = None  # endpoints in GET /kv_event_sources; None: the pod has no such route
    asked_events: str | None = None  # --events
    events_endpoint: str | None = None  # where we listened
    events_connected: bool = False
    batches: int = 0
    undecodable: int = 0
    old_form: bool = False
    event_block_sizes: list[int] = []
    probe_error: str | None = None
    predicted_tokens: int | None = None
    delivered_tokens: int | None = None
    tokenizer_error: str | None = None
    chats_compared: int = 0
    chats_differed: int = 0
    difference: Difference | None = None


class Finding(msgspec.Struct, frozen=True):
    """`name` is stable; `level` "bad" means that prefix routing suffers."""

    level: Literal["ok", "note", "bad"]
    name: str
    says: str
    fix: str = ""


def diagnose(facts: Facts) -> list[Finding]:
    """Findings in the order in which to mend them. Pure."""
    if facts.health_status is None:
        return [Finding("bad", "unreachable", f"no answer from {facts.url}/health", "is it up, and is this its port?")]
    found = [_health(facts), _model(facts), _prefix_caching(facts), *_events(facts)]
    if facts.batches:
        found.append(_block_size(facts))
    found += [_tokens(facts), _prediction(facts)]
    return found


def _health(facts: Facts) -> Finding:
    if facts.health_status != 200:
        return Finding("bad", "unhealthy", f"/health answers {facts.health_status}", "see the pod's own log")
    return Finding("ok", "reachable", f"vLLM {facts.version or 'of unknown version'}")


def _model(facts: Facts) -> Finding:
    if not facts.models:
        return Finding("bad", "no_model", "/v1/models names no model", "is this a vLLM OpenAI server?")
    return Finding("ok", "model", ", ".join(facts.models[:5]) + (f" (root {facts.root})" if facts.root else ""))


def _prefix_caching(facts: Facts) -> Finding:
    if facts.prefix_caching is None:
        says = "no vllm:cache_config_info in /metrics"
        return Finding("note", "prefix_caching_unknown", says, "it is on by default in vLLM V1")
    if not facts.prefix_caching:
        return Finding(
            "bad", "prefix_caching_off", "the pod caches no prefixes", "start it with --enable-prefix-caching"
        )
    return Finding("ok", "prefix_caching", f"on, blocks of {facts.block_size_tokens} tokens")


_TURN_ON = """start it with --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}'"""


def _events(facts: Facts) -> list[Finding]:
    if facts.sources == [] and facts.asked_events is None:
        return [Finding("bad", "no_events", "the pod publishes no KV events", _TURN_ON)]
    unbound = [s for s in facts.sources or [] if not _binds(s)]
    if unbound and not facts.batches:
        says = f"its endpoint {unbound[0]} has no *: the pod does not listen there, it connects to that address"
        return [Finding("bad", "endpoint_without_star", says, 'write it as "endpoint": "tcp://*:PORT"')]
    if facts.batches:
        found = [Finding("ok", "events", f"{facts.batches} batches from {facts.events_endpoint}")]
        if facts.old_form:
            says = "events are arrays, as vLLM wrote them up to 0.23"
            found.append(Finding("note", "old_events", says, "they are understood; newer vLLM also says more in them"))
        if facts.undecodable:
            found.append(
                Finding("bad", "undecodable_events", f"{facts.undecodable} batches not understood", "report it")
            )
        return found
    if facts.asked_events and facts.sources and _port(facts.asked_events) not in map(_port, facts.sources):
        says = f"nothing comes from {facts.asked_events}, but the pod says it publishes on {facts.sources[0]}"
        return [Finding("bad", "wrong_port", says, f"use port {_port(facts.sources[0])}")]
    if facts.events_endpoint and not facts.events_connected:
        says = f"nobody listens on {facts.events_endpoint}"
        fix = _TURN_ON if facts.sources is None else "is the port open between here and the pod?"
        return [Finding("bad", "no_events" if facts.sources is None else "events_unreachable", says, fix)]
    if facts.prefix_caching is False:
        return [
            Finding("bad", "no_events", "no events: there is no prefix cache to speak of", "see prefix_caching_off")
        ]
    says = f"connected to {facts.events_endpoint}, but a new prompt caused no event"
    return [Finding("bad", "silent_events", says, "is that the publisher's port, not its replay port? topic filter?")]


def _binds(endpoint: str) -> bool:
    """vLLM binds its publisher only to such endpoints (distributed/kv_events.py)."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


def _block_size(facts: Facts) -> Finding:
    sizes = sorted(set(facts.event_block_sizes))
    if facts.block_size_tokens is not None and sizes and facts.block_size_tokens not in sizes:
        says = f"events speak of blocks of {sizes} tokens, /metrics of {facts.block_size_tokens}"
        return Finding("note", "block_size_differs", says, "events win; hybrid models have several sizes")
    return Finding("ok", "block_size", f"{sizes or facts.block_size_tokens} tokens")


def _tokens(facts: Facts) -> Finding:
    if facts.tokenizer_error is not None:
        return Finding("note", "tokens_not_checked", facts.tokenizer_error, "give --tokenizer FOLDER_OR_HUB_ID")
    if not facts.chats_compared:
        return Finding("note", "tokens_not_checked", "the pod answered no /tokenize", "is it behind a filter?")
    if facts.chats_differed:
        where = f", first at token {facts.difference.index}" if facts.difference is not None else ""
        says = f"{facts.chats_differed} of {facts.chats_compared} chats have other token ids here than there{where}"
        fix = "use the tokenizer and chat template the pod was started with (--tokenizer, --chat-template)"
        return Finding("bad", "wrong_tokenizer", says, fix)
    return Finding("ok", "tokens", f"{facts.chats_compared} chats, all with the pod's own token ids")


def _prediction(facts: Facts) -> Finding:
    if facts.probe_error is not None:
        return Finding("bad", "probe_failed", facts.probe_error, "does the model serve /v1/completions?")
    if facts.delivered_tokens is None:
        says = "the pod does not say how much of a prompt was cached"
        return Finding("note", "delivered_unknown", says, "start it with --enable-prompt-tokens-details")
    says = f"predicted {facts.predicted_tokens} cached tokens of a repeated prompt, delivered {facts.delivered_tokens}"
    if facts.predicted_tokens == facts.delivered_tokens:
        return Finding("ok", "prediction", says)
    return Finding(
        "bad", "prediction_differs", says, "was it restarted or very busy just now? else: prefix caching, block size"
    )


# --- looking ---


async def examine(url: str, *, events: str | None, tokenizer: str | None, api_key: str | None, wait_s: float) -> Facts:
    """Ask and listen. Never raises for what a pod does."""
    facts = Facts(url=url, asked_events=events)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=60, connect=5)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as http:
        facts.health_status = (await _get(http, "/health"))[0]
        if facts.health_status is None:
            return facts
        await _look_around(http, facts)
        await _probe_and_listen(http, facts, wait_s=wait_s)
        await _compare_tokens(http, facts, tokenizer)
    return facts


async def _get(http: aiohttp.ClientSession, path: str) -> tuple[int | None, str]:
    try:
        async with http.get(path) as reply:
            return reply.status, await reply.text()
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
        return None, ""


async def _get_json(http: aiohttp.ClientSession, path: str) -> Any:
    status, text = await _get(http, path)
    with contextlib.suppress(ValueError):
        return json.loads(text) if status == 200 else None
    return None


async def _post(http: aiohttp.ClientSession, path: str, body: bytes) -> tuple[int | None, Any]:
    try:
        async with http.post(path, data=body, headers={"Content-Type": "application/json"}) as reply:
            return reply.status, await reply.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None, None


async def _look_around(http: aiohttp.ClientSession, facts: Facts) -> None:
    version = await _get_json(http, "/version")
    facts.version = version.get("version") if isinstance(version, dict) else None
    models = await _get_json(http, "/v1/models")
    rows = models.get("data") if isinstance(models, dict) else None
    rows = [m for m in rows or [] if isinstance(m, dict) and isinstance(m.get("id"), str)]
    facts.models = [m["id"] for m in rows if not m.get("parent")]
    facts.root = next((m["root"] for m in rows if isinstance(m.get("root"), str) and not m.get("parent")), None)
    _read_config((await _get(http, "/metrics"))[1], facts)
    status, text = await _get(http, "/kv_event_sources")
    if status == 200:
        with contextlib.suppress(ValueError):
            ranks = json.loads(text)
            facts.sources = [s["endpoint"] for _, s in sorted(ranks.items()) if s and s.get("endpoint")]


def _read_config(metrics: str, facts: Facts) -> None:
    line = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.M)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line.group(1))) if line else {}
    if "enable_prefix_caching" in labels:
        facts.prefix_caching = labels["enable_prefix_caching"] == "True"
    if labels.get("block_size", "").isdigit():
        facts.block_size_tokens = int(labels["block_size"])


def _endpoint(facts: Facts) -> str | None:
    """Where to listen: as asked, else what the pod says with its own host filled in, else vLLM's usual port."""
    if facts.asked_events:
        return facts.asked_events
    host = urlsplit(facts.url).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    if facts.sources:
        return f"tcp://{host}:{_port(facts.sources[0])}"
    return f"tcp://{host}:5557" if facts.sources is None else None


async def _probe_and_listen(http: aiohttp.ClientSession, facts: Facts, *, wait_s: float) -> None:
    facts.events_endpoint = _endpoint(facts)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        if facts.events_endpoint is not None:
            facts.events_connected = await _accepts(facts.events_endpoint)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(facts.events_endpoint)
        deadline_s = time.monotonic() + (wait_s if facts.events_connected else 0)
        await _probe(http, facts)
        await _drain(socket, facts)
        while not facts.batches and facts.probe_error is None and time.monotonic() < deadline_s:
            await _probe(http, facts)  # a subscription takes effect some time after connecting: say something new
            await _drain(socket, facts)
    except zmq.ZMQError:
        facts.events_connected = False
    finally:
        context.destroy(linger=0)


async def _drain(socket: "zmq.asyncio.Socket", facts: Facts) -> None:
    """Take what comes, until nothing has come for a moment; a busy pod never falls silent."""
    for _ in range(200):
        if not await socket.poll(500):
            return
        _note_batch((await socket.recv_multipart())[-1], facts)


async def _accepts(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    try:
        async with asyncio.timeout(3):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return True


def _note_batch(payload: bytes, facts: Facts) -> None:
    try:
        batch = decode(payload)
    except WireError:
        facts.undecodable += 1
        return
    facts.batches += 1
    facts.event_block_sizes += [e.block_size_tokens for e in batch.events if isinstance(e, Stored)]
    raw = msgspec.msgpack.decode(payload)
    facts.old_form |= any(isinstance(event, list) for event in raw[1])


async def _probe(http: aiohttp.ClientSession, facts: Facts) -> None:
    """The same new prompt twice: how much of the second does the pod take from its cache?"""
    if not facts.models:
        return
    size = facts.block_size_tokens or 16
    prompt = [random.randint(10, 900) for _ in range(4 * size + 5)]
    body = json.dumps({"model": facts.models[0], "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    hits_before, usage = 0.0, None
    for _ in range(2):
        hits_before = await _hits(http)
        status, reply = await _post(http, "/v1/completions", body)
        if status != 200 or not isinstance(reply, dict):
            facts.probe_error = f"POST /v1/completions with token ids answers {status}"
            return
        usage = reply.get("usage") or {}
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    facts.predicted_tokens = usable_blocks(len(prompt), size) * size if facts.prefix_caching is not False else 0
    if isinstance(details, dict) and details.get("cached_tokens") is not None:
        facts.delivered_tokens = int(details["cached_tokens"])
    else:
        gained = await _hits(http) - hits_before
        facts.delivered_tokens = int(gained) if gained > 0 else None


async def _hits(http: aiohttp.ClientSession) -> float:
    _, text = await _get(http, "/metrics")
    return sum(float(v) for v in re.findall(r"^vllm:prefix_cache_hits_total\{[^}]*\} (\S+)", text, re.M))


async def _compare_tokens(http: aiohttp.ClientSession, facts: Facts, tokenizer: str | None) -> None:
    source = tokenizer or (facts.root if facts.root and is_at_hand(facts.root) else None)
    if source is None:
        facts.tokenizer_error = "no tokenizer for this model on this machine"
        return
    try:
        exported = await asyncio.to_thread(load, source, offline=tokenizer is None, deadline_s=300)
        renderer = await asyncio.to_thread(ModelRenderer, exported, ModelOptions())
    except (LoadFailure, ValueError) as exc:
        facts.tokenizer_error = f"cannot load {source}: {exc}"
        return
    for body in built_in_chats():
        ours = render_fully(renderer, _PATH, body)
        status, reply = await _post(http, "/tokenize", tokenize_body(_PATH, body))
        if status != 200 or not isinstance(reply, dict) or not isinstance(ours, PromptTokens):
            continue  # refused by one side: nothing to compare
        theirs = b"".join(int(i).to_bytes(4, "little") for i in reply.get("tokens") or [])
        difference = first_difference(ours.packed, theirs)
        facts.chats_compared += 1
        facts.chats_differed += difference is not None
        facts.difference = facts.difference or difference


def built_in_chats() -> list[bytes]:
    """Bodies with system prompts, tools, calls, parts and hostile text, the same every time."""
    made = []
    for messages, tools, _ in chats(random.Random(60), frozenset(), CHATS):
        for message in messages:
            if message.get("name", "") is None:
                del message["name"]
            for call in message.get("tool_calls") or []:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        made.append(msgspec.json.encode({"messages": messages, **({"tools": tools} if tools else {})}))
    return made


# --- the command ---

_MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


def run(argv: Sequence[str]) -> int:
    """`warmroute doctor`. 0: fit; 1: something to fix."""
    parser = argparse.ArgumentParser(prog="warmroute doctor", description="check one live vLLM pod for prefix routing")
    parser.add_argument("--url", required=True, help="the pod: http://HOST:PORT")
    parser.add_argument("--events", help="its KV event endpoint, tcp://HOST:PORT (else as the pod says, or port 5557)")
    parser.add_argument("--tokenizer", help="folder or hub id (else the model's root, if it is on this machine)")
    parser.add_argument("--api-key", help="if the pod asks for one")
    parser.add_argument("--wait", type=float, default=10.0, help="seconds to wait for events (10)")
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    args = parser.parse_args(argv)
    facts = asyncio.run(
        examine(
            args.url.rstrip("/"),
            events=args.events,
            tokenizer=args.tokenizer,
            api_key=args.api_key,
            wait_s=args.wait,
        )
    )
    found = diagnose(facts)
    if args.json:
        sys.stdout.write(msgspec.json.encode({"facts": facts, "findings": found}).decode() + "\n")
    else:
        for finding in found:
            sys.stdout.write(f"{_MARKS[finding.level]} {finding.name}: {finding.says}\n")
            if finding.fix and finding.level != "ok":
                sys.stdout.write(f"     -> {finding.fix}\n")
    return 1 if any(finding.level == "bad" for finding in found) else 0
