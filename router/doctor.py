"""`warmroute doctor --url POD`: is this pod fit for prefix routing? Looks at one live pod, says what to fix.

It gathers facts; diagnosis.py says what they mean.
May import: the standard library, aiohttp, msgspec, pyzmq, router.core, router.diagnosis, router.tokenize, indexer.wire.
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
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from indexer.wire import Stored, WireError, decode
from router.core.hashing import usable_blocks
from router.diagnosis import Facts, diagnose, port_of
from router.fleet.fleet import source_rows
from router.tokenize.canary import first_difference
from router.tokenize.load import LoadFailure, is_at_hand, load, may_be_fetched
from router.tokenize.model import ModelOptions, ModelRenderer
from router.tokenize.pod import tokenize_body
from router.tokenize.port import PromptTokens
from router.tokenize.proof import chats
from router.tokenize.rendering import render_fully

CHATS = 60
_PATH = "/v1/chat/completions"


async def examine(url: str, *, events: str | None, tokenizer: str | None, api_key: str | None, wait_s: float) -> Facts:
    """Ask and listen. Never raises for what a pod does."""
    facts = Facts(url=url, asked_events=events)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=60, connect=5)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as http:
        facts.health_status = (await _get(http, "/health"))[0]
        if facts.health_status is None:
            return facts
        facts.is_router = await _is_router(http)
        if facts.is_router:
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


async def _is_router(http: aiohttp.ClientSession) -> bool:
    """Only we have such a page, ready or not."""
    _, text = await _get(http, "/ready")
    with contextlib.suppress(ValueError):
        told = json.loads(text)
        return isinstance(told, dict) and "pods_known" in told
    return False


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
            facts.sources = [row["endpoint"] for row in source_rows(text.encode()) if row.get("endpoint")]


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
        return f"tcp://{host}:{port_of(facts.sources[0])}"
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
    root = facts.root or ""
    here = bool(root) and is_at_hand(root)
    source = tokenizer or (root if here or may_be_fetched(root) else None)
    if source is None:
        facts.tokenizer_error = "no tokenizer for this model on this machine"
        return
    try:
        exported = await asyncio.to_thread(load, source, offline=here and tokenizer is None, deadline_s=300)
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
    if not args.url.startswith(("http://", "https://")):
        parser.error(f"--url {args.url} must be http://HOST:PORT")
    if args.events is not None and not args.events.startswith("tcp://"):
        parser.error(f"--events {args.events} must be tcp://HOST:PORT")
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
