"""A prompt as canonical bytes, for prefix routing where exact ids cannot be had. Pure.

Requests that begin alike give bytes that begin alike: salt, tools and instructions, then the messages in order; what
does not belong to the prompt (temperature, stream, ...) is left out. 256-byte blocks are chained like tokens, into the
local view only. May import: the standard library, msgspec.
"""

from typing import Any

import msgspec

BLOCK_BYTES = 256
_FIRST = ("tools", "system", "instructions", "chat_template_kwargs")
_THEN = ("messages", "input", "prompt")


def canonical_prompt(endpoint: str, body: bytes, cache_salt: str | None) -> bytes:
    """The bytes; the body itself when it has none of the known parts or is not a JSON object."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    if not isinstance(fields, dict):
        return body
    parts = [endpoint.encode(), (cache_salt or "").encode("utf-8", "surrogatepass")]
    parts += [msgspec.json.encode(fields[name]) for name in _FIRST if fields.get(name) is not None]
    said = [part for name in _THEN if fields.get(name) is not None for part in _parts(fields[name])]
    return b"\x00".join(parts + said) if said else body


def _parts(value: Any) -> list[bytes]:
    """A list item by item, so that one more message only appends."""
    if isinstance(value, str):
        return [value.encode("utf-8", "surrogatepass")]
    if isinstance(value, list):
        return [msgspec.json.encode(item) for item in value]
    return [msgspec.json.encode(value)]
