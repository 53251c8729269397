"""What was seen of a pod, and what is wrong with it for prefix routing. Pure.

May import: the standard library, msgspec, router.tokenize.canary.
"""

from typing import Literal

import msgspec

from router.tokenize.canary import Difference


class Facts(msgspec.Struct, kw_only=True):
    """What was seen of a pod. None: it could not be seen."""

    url: str
    health_status: int | None = None
    is_router: bool = False
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
    if facts.is_router:
        says = f"{facts.url} is a Warmroute router, which has no cache of its own"
        return [Finding("bad", "is_a_router", says, "give a pod's own URL; /debug/pods on its admin port lists them")]
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
    if facts.asked_events and facts.sources and port_of(facts.asked_events) not in map(port_of, facts.sources):
        says = f"nothing comes from {facts.asked_events}, but the pod says it publishes on {facts.sources[0]}"
        return [Finding("bad", "wrong_port", says, f"use port {port_of(facts.sources[0])}")]
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


def port_of(endpoint: str) -> str:
    """What stands after the last colon of a ZMQ endpoint."""
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
