"""What routing knows of tokens. May import: router.core, msgspec."""

from typing import Literal, Protocol

import msgspec

FallbackReason = Literal[
    "no_tokenizer",
    "tokenizer_failed",
    "deadline",
    "busy",
    "unrenderable",
    "media",
    "template_error",
    "too_long",
    "endpoint",
]
"""Why there are no exact ids. Closed: it is a metric label."""


class PromptTokens(msgspec.Struct, frozen=True):
    """The ids the engine will see.

    `packed` is uint32 little-endian, 4 bytes a token (router.core.hashing.pack_tokens). `partial` means that the ids
    are the true beginning of a longer prompt (text before the first image): keys may be made, the length is not known.
    """

    packed: bytes
    partial: bool = False

    @property
    def count(self) -> int:
        return len(self.packed) // 4


class NoTokens(msgspec.Struct, frozen=True):
    """Exact ids cannot be had here; route by canonical bytes or by load, and count the reason."""

    reason: FallbackReason
    detail: str = ""


class Tokens(Protocol):
    """One per process. Never raises for a request's content; never blocks the event loop."""

    async def prompt(self, *, model: str, endpoint: str, body: bytes) -> PromptTokens | NoTokens:
        """The prompt's ids for a POST to `endpoint` ("/v1/chat/completions", ...) whose JSON body is `body`.

        `model` is the base model id whose tokenizer is meant, not the name in the body.
        """
        ...
