"""A body's bytes -> what routing needs of it, or a 400 that says what is wrong. Pure.

Only the few fields named here are looked at; whether the rest makes sense is vLLM's to say (H17). The bytes themselves
are forwarded as they came: a compressed body is inflated for reading only, and only up to a bound.
May import: the standard library, msgspec, router.route (its request type), router.proxy.{errors,headers}.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

import msgspec

from router.proxy.errors import HttpError
from router.proxy.headers import RawHeaders, value_of
from router.route import RouteRequest

NEEDS_MODEL = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"})
"""Routes whose body must be a JSON object that names a model. Elsewhere a body without one goes by load."""
FORM_PARTS_MAX = 256
FORM_HEAD_MAX_BYTES = 16384  # of one part
FORM_TAIL_BYTES = 65536  # of a long form, looked through for fields that come after the file
MODEL_NAME_MAX_BYTES = 4096


class _Fields(msgspec.Struct):
    """Fields of a body that decide something here. All optional, none checked for type yet."""

    model: Any = None
    stream: Any = False
    cache_salt: Any = None
    prompt_logprobs: Any = None
    echo: Any = False
    logprobs: Any = None
    top_logprobs: Any = 0
    previous_response_id: Any = None
    priority: Any = 0


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """What a body says."""

    model: str | None = None
    stream: bool = False
    cache_salt: str | None = None
    skips_cache: bool = False
    previous_response_id: str | None = None
    priority: int = 0  # as in vLLM: the lower, the earlier
    text: bytes = b""  # the JSON text, inflated; b"" when the body is no JSON object
    unread: bool = False  # its coding is not read here, is broken, or it inflates beyond its bound


_decoder = msgspec.json.Decoder(_Fields)
NOTHING = Parsed()
UNREAD = Parsed(unread=True)


def parse(
    endpoint: str,
    headers: RawHeaders,
    body: bytes,
    *,
    inflate_max_bytes: int,
    form_search_max_bytes: int,
    thorough: bool = False,
) -> Parsed:
    """What routing needs to know. Raises HttpError(400) only for routes in NEEDS_MODEL.

    `thorough`: whatever Python's json takes for an object is one, on every route; else a glance may deny it.
    """
    needs_model = endpoint in NEEDS_MODEL
    kind = (value_of(headers, b"content-type") or b"").lower()
    if kind.startswith(b"multipart/"):
        kind_raw = value_of(headers, b"content-type") or b""
        model = form_model(kind_raw=kind_raw, body=body[:form_search_max_bytes])
        if model is None and len(body) > form_search_max_bytes:  # `curl -F file=@long.wav -F model=m`: it comes last
            model = form_model(kind_raw=kind_raw, body=body[-FORM_TAIL_BYTES:])
        return Parsed(model=model)
    text = inflate(value_of(headers, b"content-encoding"), body, max_bytes=inflate_max_bytes)
    if text is None:
        return UNREAD  # a coding that we do not read, or a bomb: the pod may know better
    if not needs_model and not thorough and text[:64].lstrip()[:1] != b"{":
        return NOTHING
    try:
        fields = decode(text)
    except ValueError as exc:
        if not needs_model:
            return NOTHING
        raise HttpError(400, f"The request body is not usable: {exc}.", code="invalid_body") from None
    return _checked(fields, text, endpoint)


def decode(text: bytes) -> _Fields:
    """The fields of a JSON object. Raises ValueError with a reason that quotes nothing of the body.

    msgspec reads the usual bodies; what it refuses but Python's json takes (NaN, lone surrogates, UTF-16), as vLLM
    does, gets a second reading.
    """
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    try:
        value = json.loads(text)
    except json.JSONDecodeError as exc:
        raise ValueError(f"it is not valid JSON ({exc.msg} at line {exc.lineno} column {exc.colno})") from None
    except (ValueError, RecursionError):
        raise ValueError("it is not valid JSON (bad encoding, or nested too deeply)") from None
    if not isinstance(value, dict):
        raise ValueError("it must be a JSON object")
    return _Fields(**{name: value[name] for name in _Fields.__struct_fields__ if name in value})


def _checked(fields: _Fields, text: bytes, endpoint: str) -> Parsed:
    model = fields.model
    if not isinstance(model, str):
        if endpoint in NEEDS_MODEL:
            problem = "is required" if model is None else "must be a string"
            raise HttpError(400, f"The field `model` {problem}; GET /v1/models lists what is served.", param="model")
        model = None
    if model == "" and endpoint not in NEEDS_MODEL:
        model = None  # vLLM takes its own for it
    salt, previous = fields.cache_salt, fields.previous_response_id
    # As in vLLM: what is echoed with log-probabilities is computed, not taken from the cache.
    echoed = fields.top_logprobs if endpoint == "/v1/chat/completions" else fields.logprobs
    skips = fields.prompt_logprobs is not None or (bool(fields.echo) and echoed is not None)
    return Parsed(
        model=model,
        stream=fields.stream is True,
        cache_salt=salt if isinstance(salt, str) else None,
        skips_cache=skips,
        previous_response_id=previous if isinstance(previous, str) else None,
        priority=fields.priority if type(fields.priority) is int else 0,
        text=text,
    )


def inflate(coding: bytes | None, body: bytes, *, max_bytes: int) -> bytes | None:
    """The body as text; None when its coding is not read here, is broken, or would exceed `max_bytes`."""
    name = (coding or b"identity").lower()
    if name in (b"identity", b""):
        return body
    if name not in (b"gzip", b"x-gzip", b"deflate"):
        return None
    for window_bits in (zlib.MAX_WBITS | 32, -zlib.MAX_WBITS):  # gzip or zlib by its header, then raw deflate
        if window_bits < 0 and name != b"deflate":
            break
        engine = zlib.decompressobj(window_bits)
        try:
            text = engine.decompress(body, max_bytes)
        except zlib.error:
            continue
        return text if engine.eof and not engine.unused_data else None  # a second member is a part of the text too
    return None


_BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,200})"|([^;\s]{1,200}))', re.IGNORECASE)
_NAME = re.compile(rb';\s*name="?model"?\s*(?:;|$)', re.IGNORECASE)


def form_model(*, kind_raw: bytes, body: bytes) -> str | None:
    """The value of a form's `model` field, looked for in `body` (a bounded part of it); None when not found."""
    found = _BOUNDARY.search(kind_raw)
    if found is None:
        return None
    delimiter = b"--" + (found.group(1) or found.group(2))
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter)
    for _ in range(FORM_PARTS_MAX):
        if at < 0:
            return None
        start = body.find(b"\r\n", at + 2)
        head_end = body.find(b"\r\n\r\n", start) if start >= 0 else -1
        if head_end < 0:
            return None
        at = body.find(b"\r\n" + delimiter, head_end + 2)
        if head_end - start <= FORM_HEAD_MAX_BYTES and _names_model(body[start:head_end]):
            value = body[head_end + 4 : at] if at >= 0 else b""
            return (value.decode("utf-8", "replace").strip() or None) if len(value) <= MODEL_NAME_MAX_BYTES else None
    return None


def _names_model(head: bytes) -> bool:
    """A part's head says that it is the field `model`. Line by line: a search through all of it can take for ever."""
    lines = head.split(b"\r\n")
    return any(line[:20].lower() == b"content-disposition:" and _NAME.search(line) for line in lines)


def route_request(endpoint: str, parsed: Parsed, *, body_bytes: int, policy: str | None) -> RouteRequest:
    """What the conductor is asked."""
    return RouteRequest(
        endpoint=endpoint,
        model=parsed.model,
        body=parsed.text,
        cache_salt=parsed.cache_salt,
        skips_cache=parsed.skips_cache,
        policy=policy,
        body_bytes=body_bytes,
    )
