"""Chats with tools, repeated system prompts and token-id prompts for the tiny model. Seeded; no sockets."""

import json
from random import Random
from typing import Any

WORDS = [
    "route", "block", "cache", "prefix", "token", "queue", "engine", "replica", "window", "signal", "kernel", "river",
    "stone", "paper", "garden", "winter", "bridge", "copper", "lantern", "harbor", "meadow", "orbit", "violet",
]  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather for a city, in °C; für Städte 天气",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"type": "string"}, "city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
Request = tuple[str, dict[str, Any]]


def words(rng: Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) + ("." if rng.random() < 0.1 else "") for _ in range(count))


class Chat:
    """One conversation: ask for the next request, tell the answer."""

    def __init__(self, rng: Random, system: str, *, tools: bool, max_tokens: int) -> None:
        self._rng = rng
        self._tools = tools
        self._max_tokens = max_tokens
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self.turn = 0

    def next(self, user_words: int = 40) -> Request:
        if self._tools and self.turn == 1:  # a tool call and its result, as an agent sends them
            call = {"name": "get_weather", "arguments": json.dumps({"city": self._rng.choice(WORDS), "unit": "C"})}
            self._messages.append(
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c1", "type": "function", "function": call}],
                }
            )
            self._messages.append({"role": "tool", "tool_call_id": "c1", "content": words(self._rng, 12)})
        text = words(self._rng, user_words)
        content: Any = text if self._rng.random() < 0.7 else [{"type": "text", "text": text}]
        self._messages.append({"role": "user", "content": content})
        body: dict[str, Any] = {
            "model": "tiny",
            "messages": list(self._messages),
            "max_tokens": self._max_tokens,
            "temperature": 0,
        }
        if self._tools:
            body |= {"tools": TOOLS, "tool_choice": "none"}
        return "/v1/chat/completions", body

    def answer(self, text: str | None) -> None:
        self._messages.append({"role": "assistant", "content": text or ""})
        self.turn += 1


def token_prompt(rng: Random, prefixes: list[list[int]]) -> Request:
    ids = rng.choice(prefixes) + [rng.randrange(100, 8000) for _ in range(rng.randrange(1, 90))]
    return "/v1/completions", {"model": "tiny", "prompt": ids, "max_tokens": 4, "temperature": 0}


def token_prefixes(rng: Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(100, 8000) for _ in range(length)] for _ in range(count)]
