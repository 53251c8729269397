"""Which tenant a request is from, and the salt that keeps the tenants' caches apart. Pure.

vLLM shares cached blocks only between requests of equal `cache_salt`. With --tenant-salt every JSON body gets one, made
of its tenant: the only change that is ever made to a body (docs/proxy.md).
May import: the standard library, router.door, router.proxy.{errors,headers,parse}.
"""

from __future__ import annotations

import hashlib
import hmac
import json

import msgspec

from router.door import KEY_HEADERS, key_of
from router.proxy.errors import HttpError
from router.proxy.headers import RawHeaders
from router.proxy.parse import Parsed

SALT_BYTES = 16  # twice as many characters; vLLM takes 1 to 128 of them
SALTLESS_ROUTES = frozenset({"/cohere/v2/chat", "/v2/embed"})
"""Routes of vLLM 0.32 that fill the cache from a JSON body and know no `cache_salt`; the others know or ignore it."""


class Salted(msgspec.Struct, frozen=True):
    """A request as it goes on: with its tenant's salt, in its body and for routing."""

    parsed: Parsed
    body: bytes
    headers: RawHeaders


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


def tenant_salt(seed: str, tenant: bytes, own: str | None) -> str:
    """The salt of a tenant's requests: keyed by the installation's seed, so that nobody can make another tenant's.

    The client's `own` salt goes in too: it parts caches further, but never out of the tenant.
    """
    rest = b"" if own is None else b"/" + own.encode("utf-8", "surrogatepass")
    message = b"cache_salt" + len(tenant).to_bytes(4, "big") + tenant + rest
    return hmac.digest(seed.encode(), message, hashlib.sha256)[:SALT_BYTES].hex()


def with_salt(text: bytes, salt: str) -> bytes:
    """A JSON object with `cache_salt` put before its end. Of two fields with one name vLLM takes the last.

    Not a byte of the rest is another, unless the text was UTF-16 or -32: then it becomes UTF-8.
    """
    encoding = json.detect_encoding(text)
    if not encoding.startswith("utf-8"):
        text = text.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    end = text.rindex(b"}")
    comma = "" if text[:end].rstrip().endswith(b"{") else ","
    return b'%b%b"cache_salt":"%b"%b' % (text[:end], comma.encode(), salt.encode(), text[end:])


def salted(endpoint: str, headers: RawHeaders, parsed: Parsed, *, name: bytes, seed: str) -> Salted | None:
    """The request with its tenant's salt; None when its body is no JSON object: a form, or nothing that vLLM reads.

    `parsed` was read thoroughly. Raises HttpError when the tenant is not known, or no salt can be put.
    """
    if parsed.unread:
        raise HttpError(400, "The body's Content-Encoding cannot be read here, so no cache_salt can be put into it.")
    if not parsed.text:
        return None
    if endpoint in SALTLESS_ROUTES:
        raise HttpError(403, "This route takes no cache_salt, so tenants could not be kept apart.")
    tenant = tenant_of(headers, name)
    if tenant is None:
        status, shown = (401, "API key") if name in KEY_HEADERS else (400, f"header {name.decode('latin-1')}")
        raise HttpError(status, f"One {shown} is needed: it says which tenant this is.", code="tenant_missing")
    salt = tenant_salt(seed, tenant, parsed.cache_salt or None)
    return Salted(
        parsed=msgspec.structs.replace(parsed, cache_salt=salt),
        body=with_salt(parsed.text, salt),
        headers=[h for h in headers if h[0].lower() != b"content-encoding"],
    )
