"""A prompt as canonical bytes, for prefix routing where exact ids cannot be had. Pure.

Requests that begin alike give bytes that begin alike: salt, tools and instructions, then the messages in order; what
does not belong to the prompt (temperature, stream, ...) is left out. 256-byte blocks are chained like tokens, into the
local view only. May import: the standard library, msgspec.
"""

from typing import Any

import msgspec

BLOCK_BYTES = 256
WHOLE_MAX_BYTES = 2 << 20  # half a million tokens; what is longer is media
_FIRST = ("tools", "system", "instructions", "chat_template_kwargs")
_THEN = ("messages", "input", "prompt")


def canonical_prompt(endpoint: str, body: bytes, cache_salt: str | None) -> bytes:
    """The bytes; the body itself when it has none of the known parts or is not a JSON object.

    Of a long body the beginning as it came: taking 20 MB of images apart would hold everybody up for 0.2 s.
    """
    if len(body) > WHOLE_MAX_BYTES:
        return b"\x00".join((endpoint.encode(), _utf8(cache_salt or ""), body[:WHOLE_MAX_BYTES]))
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    if not isinstance(fields, dict):
        return body
    parts = [endpoint.encode(), _utf8(cache_salt or "")]
    parts += [msgspec.json.encode(fields[name]) for name in _FIRST if fields.get(name) is not None]
    said = [part for name in _THEN if fields.get(name) is not None for part in _parts(fields[name])]
    return b"\x00".join(parts + said) if said else body


def _parts(value: Any) -> list[bytes]:
    """A list item by item, so that one more message only appends."""
    if isinstance(value, str):
        return [_utf8(value)]
    if isinstance(value, list):
        return [msgspec.json.encode(item) for item in value]
    return [msgspec.json.encode(value)]


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
