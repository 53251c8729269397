"""What both ports share at the door: API keys, the shape of an error, whether we are up. Pure.

May import: the standard library, msgspec.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Answered without a key: probes have none."""
KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


def error_type(status: int) -> str:
    """OpenAI's `error.type` for a status of ours."""
    return ERROR_TYPES.get(status, "server_error")


def error_object(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """An OpenAI error object as JSON."""
    message = message.encode("utf-8", "replace").decode()  # a quoted name may hold half a surrogate pair
    error = {"message": message, "type": error_type(status), "param": param, "code": code or status}
    return msgspec.json.encode({"error": error})


class Unusable(ValueError):
    """A question that cannot be answered as it is; both ports say so in the same words."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Lifecycle:
    """Starting, then serving, then draining: what `/ready` and the proxy ask."""

    def __init__(self) -> None:
        self.phase: Literal["starting", "serving", "draining"] = "starting"

    @property
    def draining(self) -> bool:
        return self.phase == "draining"


class ApiKeys:
    """The keys that open the door. None configured: it is open."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = tuple(k.encode() for k in keys if k)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def admits(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """A known key came as `Authorization: Bearer KEY` or `x-api-key: KEY` (Anthropic's clients).

        Every key is compared, each in constant time: neither which key nor how much of it fits can be timed.
        """
        if not self._keys:
            return True
        given = [key for name, value in headers if (key := key_of(name, value)) is not None]
        fits = False
        for key in self._keys:
            for candidate in given[:4]:
                fits |= hmac.compare_digest(key, candidate)
        return fits


def key_of(name: bytes, value: bytes) -> bytes | None:
    """The API key that this header carries; None when it carries none."""
    lower = name.lower()
    if lower == b"x-api-key":
        return value.strip()
    if lower == b"authorization":
        scheme, _, key = value.strip().partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else None
    return None
