"""A body and headers for POST /debug/route -> what the conductor is asked: as the client port would ask it. Pure.

May import: the standard library, router.door, router.route (its request type) and, of router.proxy,
errors, headers, limits, parse and tenant.
"""

from __future__ import annotations

import json

from router.door import Unusable
from router.proxy.errors import HttpError
from router.proxy.headers import RawHeaders, value_of
from router.proxy.limits import ProxyLimits
from router.proxy.parse import parse, route_request
from router.proxy.tenant import salted
from router.route import RouteRequest


def guess_endpoint(text: bytes) -> str:
    """The endpoint a body was meant for, by its fields; for POST /debug/route without `?endpoint=`."""
    try:
        value = json.loads(text)
    except ValueError:
        return "/v1/completions"
    if isinstance(value, dict) and "messages" in value:
        return "/v1/chat/completions"
    return "/v1/responses" if isinstance(value, dict) and "input" in value else "/v1/completions"


def explain_request(
    endpoint: str | None, headers: RawHeaders, body: bytes, *, limits: ProxyLimits | None = None
) -> RouteRequest:
    """A RouteRequest for POST /debug/route. Raises Unusable with the cure."""
    limits = limits or ProxyLimits()
    endpoint = endpoint or guess_endpoint(body)
    policy = value_of(headers, b"x-warmroute-policy")
    try:
        parsed = parse(endpoint, (), body, inflate_max_bytes=0, form_search_max_bytes=0)
        if limits.tenant_salt and limits.tenant_header:
            name = limits.tenant_header.encode()
            marked = salted(endpoint, headers, parsed, name=name, seed=limits.key_seed)
            parsed = parsed if marked is None else marked.parsed
    except HttpError as exc:
        raise Unusable(exc.message, code=exc.code, param=exc.param) from None
    return route_request(endpoint, parsed, body_bytes=len(body), policy=policy.decode("latin-1") if policy else None)
