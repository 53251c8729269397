"""Which tenant a request is from: asked here by all that tells tenants apart. Pure.

May import: the standard library, router.door, router.proxy.headers.
"""

from __future__ import annotations

from router.door import KEY_HEADERS, key_of
from router.proxy.headers import RawHeaders


def tenant_of(headers: RawHeaders, name: bytes) -> bytes | None:
    """The tenant that header `name` (lower case) gives; None when there is none, or when two are given.

    `authorization` or `x-api-key`: the API key, in whichever of the two it came. Two different values are no tenant,
    because a client could have put one of them before what its gateway adds.
    """
    if name in KEY_HEADERS:
        given = {key for header, value in headers if (key := key_of(header, value))}
    else:
        given = {stripped for header, value in headers if header.lower() == name and (stripped := value.strip())}
    return given.pop() if len(given) == 1 else None
