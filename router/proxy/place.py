"""A request's place in line while pods have enough to do, from its head and body. Pure.

May import: the standard library, router.waiting (its type), router.proxy.{headers,parse,tenant}.
"""

from __future__ import annotations

from router.proxy.headers import RawHeaders, value_of
from router.proxy.parse import Parsed
from router.proxy.tenant import tenant_of
from router.waiting import Asking

NO_PREFILL = ("/tokenize", "/detokenize", "/count_tokens", "/render")
"""Ends of paths that cost a pod no prefill: nothing to wait for."""
PRIORITY_MAX_BYTES = 20


def asking(path: str, headers: RawHeaders, parsed: Parsed, *, tenant_header: str | None) -> Asking | None:
    """None: it has nothing to do with prefill and does not wait."""
    if parsed.model is None or path.endswith(NO_PREFILL):
        return None
    return Asking(
        priority=priority(headers, parsed),
        tenant=None if tenant_header is None else tenant_of(headers, tenant_header.encode()),
        in_one_piece=not parsed.stream,
    )


def priority(headers: RawHeaders, parsed: Parsed) -> int:
    """As vLLM reads it: X-Vllm-Priority when it is a whole number, else the body's `priority`; the lower, the earlier.

    Both go on to the pod, so that a request has the same place in its queue, if that has priorities.
    """
    given = value_of(headers, b"x-vllm-priority")
    if given is not None and len(given) <= PRIORITY_MAX_BYTES:
        try:
            return int(given)
        except ValueError:
            pass
    return parsed.priority
