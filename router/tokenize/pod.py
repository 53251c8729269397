"""Ask a pod for the ids of a prompt: its /tokenize, within a budget. Used where we cannot render, and by the canary.

The engine's own code answers, so the ids are right for every model but one kind: for gpt-oss /tokenize applies the
chat template while chat completions are encoded as harmony (vLLM 0.32, entrypoints/serve/tokenize/serving.py).
May import: the standard library, msgspec, router.core, router.tokenize.{chat,dialects,port}.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from router.core.hashing import pack_tokens
from router.core.types import Clock
from router.tokenize.chat import Unrenderable

AskPod = Callable[[str, bytes], Awaitable[bytes | None]]
"""(base model id, JSON body for POST /tokenize) -> the body of a 200, or None. Bounded in time by the budget here."""

_PASSED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens")
_NOT_ASKED = ("truncate_prompt_tokens", "chat_template", "kv_transfer_params", "prompt_embeds", "suffix")


class _Reply(msgspec.Struct):
    tokens: list[int]


def tokenize_body(endpoint: str, body: bytes) -> bytes:
    """The /tokenize body whose ids are those of `body` sent to `endpoint`. Raises Unrenderable if there is none."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Unrenderable(str(exc)[:200]) from exc
    if not isinstance(fields, dict) or any(fields.get(name) is not None for name in _NOT_ASKED):
        raise Unrenderable("/tokenize does not take all of this request")
    if endpoint == "/v1/completions":
        prompt = fields.get("prompt")
        prompt = prompt[0] if isinstance(prompt, list) and prompt else prompt
        if not isinstance(prompt, str):
            raise Unrenderable("no text to tokenize")
        return msgspec.json.encode({"prompt": prompt, "add_special_tokens": fields.get("add_special_tokens", True)})
    if endpoint != "/v1/chat/completions" or not isinstance(fields.get("messages"), list):
        raise Unrenderable("/tokenize has no such form")
    return msgspec.json.encode(_chat_body(fields))


def _chat_body(fields: dict[str, Any]) -> dict[str, Any]:
    """/tokenize lacks some of a chat's fields, but takes their effects as template variables."""
    asked = {name: fields[name] for name in _PASSED if fields.get(name) is not None}
    variables = dict(fields.get("chat_template_kwargs") or {})
    effort = fields.get("reasoning_effort")
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    if fields.get("documents") is not None:
        variables["documents"] = fields["documents"]
    if variables:
        asked["chat_template_kwargs"] = variables
    asked["messages"] = [_renamed(m) for m in asked["messages"]]
    return asked


def _renamed(message: Any) -> Any:
    if not isinstance(message, dict) or message.get("reasoning_content") is None:
        return message
    renamed = {k: v for k, v in message.items() if k != "reasoning_content"}
    if renamed.get("reasoning") is None:
        renamed["reasoning"] = message["reasoning_content"]
    return renamed


class PodBudget:
    """At most so many questions at a time, each with a deadline, and none for a while after one failed."""

    def __init__(
        self, ask: AskPod, *, clock: Clock, in_flight_max: int, deadline_s: float, rest_s: float = 5.0
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._free = in_flight_max
        self._deadline_s = deadline_s
        self._rest_s = rest_s
        self._rest_until_s = 0.0

    async def tokens(self, model: str, endpoint: str, body: bytes) -> bytes | None:
        """Packed ids, or None: over budget, resting, refused or failed. Raises Unrenderable if it cannot be asked."""
        if self._free <= 0 or self._clock() < self._rest_until_s:
            return None
        question = tokenize_body(endpoint, body)
        self._free -= 1
        try:
            async with asyncio.timeout(self._deadline_s):
                reply = await self._ask(model, question)
        except (TimeoutError, OSError):
            self._rest_until_s = self._clock() + self._rest_s
            return None
        finally:
            self._free += 1
        if reply is None:
            return None
        try:
            return pack_tokens(msgspec.json.decode(reply, type=_Reply).tokens)
        except (msgspec.MsgspecError, OverflowError):
            return None
