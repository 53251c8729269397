"""Which headers pass, which are ours: hop-by-hop, forwarded-for, request id. Pure; bytes in, bytes out.

May import: the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

RawHeaders = Sequence[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""RFC 9110 section 7.6.1: they speak about one connection."""
NOT_TO_POD = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-data-parallel-rank", b"x-warmroute-policy"}
"""Host and Content-Length are set anew (the same bytes go on, so the length is the same); Expect is answered here;
the rank is the router's to choose (DESIGN 6)."""
NOT_TO_CLIENT = HOP_BY_HOP
OURS = b"x-warmroute-"
"""A pod's own headers of this name would be taken for ours."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")


def value_of(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first value of header `name` (lower case), stripped; None when absent."""
    for key, value in headers:
        if key.lower() == name:
            return value.strip()
    return None


def _connection_named(headers: RawHeaders) -> frozenset[bytes]:
    """Headers that `Connection:` declares to be hop-by-hop."""
    named = [v for k, v in headers if k.lower() == b"connection"]
    if not named:
        return frozenset()
    return frozenset(token.strip().lower() for value in named for token in value.split(b","))


def request_id(headers: RawHeaders, fresh: str) -> bytes:
    """The client's X-Request-Id when it is one word of printable ASCII, else `fresh`."""
    given = value_of(headers, b"x-request-id")
    return given if given is not None and _REQUEST_ID.fullmatch(given) else fresh.encode()


def to_pod(
    headers: RawHeaders,
    *,
    request_id: bytes,
    client: bytes | None,
    scheme: bytes,
    authorization: bool,
    rank: int | None = None,
    pod_key: bytes | None = None,
) -> list[tuple[bytes, bytes]]:
    """A request's headers as they go to the pod. Order, case and doubles of what passes are kept."""
    dropped = NOT_TO_POD | _connection_named(headers)
    if not authorization:
        dropped |= {b"authorization", b"x-api-key"}
    passed: list[tuple[bytes, bytes]] = []
    forwarded_for: list[bytes] = []
    host, proto_given = b"", False
    for name, value in headers:
        lower = name.lower()
        if lower == b"host":
            host = value
        elif lower == b"x-forwarded-for":
            forwarded_for.append(value)
        elif lower == b"x-request-id":
            continue
        elif lower not in dropped:
            proto_given |= lower == b"x-forwarded-proto"
            passed.append((name, value))
    if client is not None:
        forwarded_for.append(client)
    if forwarded_for:
        passed.append((b"X-Forwarded-For", b", ".join(forwarded_for)))
    if not proto_given:
        passed.append((b"X-Forwarded-Proto", scheme))
    if host and value_of(headers, b"x-forwarded-host") is None:
        passed.append((b"X-Forwarded-Host", host))
    passed.append((b"X-Request-Id", request_id))
    if pod_key is not None:
        passed.append((b"Authorization", pod_key))
    if rank is not None:
        passed.append((b"X-data-parallel-rank", str(rank).encode()))
    return passed


def to_client(
    headers: RawHeaders,
    *,
    request_id: bytes,
    ours: Iterable[tuple[bytes, bytes]] = (),
    event_stream: bool,
    pod_url: str = "",
) -> list[tuple[bytes, bytes]]:
    """A reply's headers as they go to the client.

    An event stream says to proxies on the way that it must not be buffered or cached, unless the pod said otherwise.
    A redirect to `pod_url` itself loses scheme and host: clients cannot, or must not, reach the pod past the router.
    """
    dropped = NOT_TO_CLIENT | _connection_named(headers)
    passed = []
    buffering_said = cache_said = id_said = False
    for name, value in headers:
        lower = name.lower()
        if lower in dropped or lower.startswith(OURS):
            continue
        buffering_said |= lower == b"x-accel-buffering"
        cache_said |= lower == b"cache-control"
        id_said |= lower == b"x-request-id"
        passed.append((name, _here(value, pod_url) if lower == b"location" else value))
    if event_stream:
        if not buffering_said:
            passed.append((b"X-Accel-Buffering", b"no"))
        if not cache_said:
            passed.append((b"Cache-Control", b"no-cache"))
    if not id_said:
        passed.append((b"X-Request-Id", request_id))
    passed.extend(ours)
    return passed


def _here(location: bytes, pod_url: str) -> bytes:
    """A pod's Location as a path when it names the pod by the address we know; vLLM sends one for `/v1/models/`."""
    own = pod_url.partition("://")[2].encode()
    scheme, _, rest = location.partition(b"://")
    if not own or scheme.lower() not in (b"http", b"https") or not rest.startswith(own):
        return location
    path = rest.removeprefix(own)
    if path[:1] == b"/":
        return path
    return b"/" + path if path[:1] in (b"", b"?") else location


def is_event_stream(headers: RawHeaders) -> bool:
    """The reply is server-sent events."""
    kind = value_of(headers, b"content-type")
    return kind is not None and kind.split(b";", 1)[0].strip().lower() == b"text/event-stream"


def takes_events(headers: RawHeaders) -> bool:
    """Events of ours may stand between the pod's: not in a compressed stream, nor in one whose length was told.

    They would fill up the length, and a reply that was cut would look whole.
    """
    coding = value_of(headers, b"content-encoding")
    coded = coding is not None and coding.lower() not in (b"", b"identity")
    return is_event_stream(headers) and not coded and value_of(headers, b"content-length") is None


def header_safe(text: str) -> bytes:
    """A value of ours as a header may carry it: printable ASCII, anything else as `?`."""
    return "".join(c if " " <= c <= "~" else "?" for c in text).encode()
