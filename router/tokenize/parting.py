"""Where two requests part, what it costs, and why. Pure.

Two prompts that differ in one early character share nothing after it, and nobody sees it happen. The cause is found by
repair: give B what A has in one field, render again, and see whether they now part later.
May import: the standard library, msgspec, router.tokenize.canary.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import msgspec

from router.tokenize.canary import first_difference

Cause = Literal[
    "none",
    "continuation",
    "salt",
    "model",
    "bos",
    "default_system",
    "tools_reordered",
    "tools_key_order",
    "tools_changed",
    "template_kwargs",
    "timestamp",
    "request_id",
    "white_space",
    "unicode_form",
    "reasoning_dropped",
    "message_changed",
    "prompt_changed",
]
"""Closed: it can be a metric label."""

_SAYS: dict[Cause, str] = {
    "none": "the prompts are equal",
    "continuation": "one prompt begins with all of the other: everything is shared",
    "salt": "cache_salt differs: the engine shares nothing between them, whatever the text",
    "model": "the model (or LoRA adapter) differs: nothing is shared",
    "bos": "one prompt has one beginning-of-sequence token more: BOS is in the text and is added again",
    "default_system": "only one has a system message; the template may put a default one in its place",
    "tools_reordered": "the same tools in another order: sort them by name before sending",
    "tools_key_order": "the same tools with their JSON keys in another order: serialise them the same way every time",
    "tools_changed": "the tools differ; they stand at the front of the prompt: append, do not change",
    "template_kwargs": "the template's variables differ (chat_template_kwargs, reasoning_effort, documents, ...)",
    "timestamp": "a date or time: move it behind the parts that stay, or round it",
    "request_id": "an id that changes with each request: move it out of the prompt or to its end",
    "white_space": "white space only: strip or keep it the same way every time",
    "unicode_form": "the same characters in another Unicode form: normalise to NFC once",
    "reasoning_dropped": "reasoning of an earlier turn is in one prompt only: keep it or drop it always",
    "message_changed": "an earlier message was edited",
    "prompt_changed": "the text differs",
}
assert set(_SAYS) == set(get_args(Cause))

_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?|"
    r"\d{1,2}:\d\d(?::\d\d)?(?:\s*[AaPp][Mm])?|"
    r"\d{1,2}[./]\d{1,2}[./]\d{2,4}|\b1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?\b|"
    r"(?:\b\d{1,2}\s+)?\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?\s+\d{1,4}(?:,?\s+\d{4})?|"
    r"\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
)
_ID = re.compile(
    r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}|"
    r"\b(?=\w*\d)(?=\w*[A-Za-z])[A-Za-z0-9_-]{10,}\b|\b\d{6,}\b"
)
_VARIABLES = (
    "chat_template_kwargs",
    "reasoning_effort",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tool_choice",
    "reasoning",
    "thinking",
    "output_config",
)


class Prompt(msgspec.Struct, frozen=True):
    """A rendered request. `ids` is packed; None: there is no tokenizer, tokens are estimated."""

    text: str
    ids: bytes | None


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to say about two requests."""

    cause: Cause
    advice: str
    exact: bool  # tokens are the engine's, not estimated
    shared_tokens: int  # the first token that differs has this index
    shared_blocks: int
    lost_blocks: int  # full blocks of B that are computed again because of it
    a_tokens: int
    b_tokens: int
    around_a: str
    around_b: str


Render = Callable[[dict[str, Any]], Prompt]
CHARS_PER_TOKEN = 4  # where there is no tokenizer


def diff(a: dict[str, Any], b: dict[str, Any], render_prompt: Render, *, block_size_tokens: int = 16) -> Parting:
    """Compare two request bodies. Pure but for what `render_prompt` does; raises what it raises."""
    prompt_a, prompt_b = render_prompt(a), render_prompt(b)
    shared, a_tokens, b_tokens = _shared(prompt_a, prompt_b)
    at = common_length(prompt_a.text, prompt_b.text)
    cause = _cause(a, b, prompt_a, prompt_b, at, render_prompt)
    if cause in ("salt", "model"):
        shared = at = 0
    shared_blocks = shared // block_size_tokens
    return Parting(
        cause=cause,
        advice=_SAYS[cause],
        exact=prompt_a.ids is not None,
        shared_tokens=shared,
        shared_blocks=shared_blocks,
        lost_blocks=b_tokens // block_size_tokens - shared_blocks if cause not in ("none", "continuation") else 0,
        a_tokens=a_tokens,
        b_tokens=b_tokens,
        around_a=_around(prompt_a.text, at),
        around_b=_around(prompt_b.text, at),
    )


def _shared(a: Prompt, b: Prompt) -> tuple[int, int, int]:
    """Tokens in common at the front, and of each."""
    if a.ids is None or b.ids is None:
        return tuple(n // CHARS_PER_TOKEN for n in (common_length(a.text, b.text), len(a.text), len(b.text)))  # type: ignore[return-value]
    found = first_difference(a.ids, b.ids)
    tokens = len(a.ids) // 4, len(b.ids) // 4
    return (tokens[0] if found is None else found.index), *tokens


def common_length(a: str, b: str) -> int:
    """Characters of the common beginning, by halving: slices compare in C."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _around(text: str, at: int, chars: int = 60) -> str:
    return text[max(at - chars, 0) : at] + "⟪" + text[at : at + chars] + "⟫"


def _cause(a: dict[str, Any], b: dict[str, Any], pa: Prompt, pb: Prompt, at: int, render_prompt: Render) -> Cause:
    if a.get("cache_salt") != b.get("cache_salt"):
        return "salt"
    if a.get("model") != b.get("model"):
        return "model"
    if pa == pb:
        return "none"
    if _one_token_more(pa.ids, pb.ids):
        return "bos"
    if _begins_with(pa, pb):
        return "continuation"
    for cause, repaired in _repairs(a, b):
        if common_length(pa.text, render_prompt(repaired).text) > at:
            return cause
    return _textual(pa.text, pb.text, at, default="message_changed" if "messages" in b else "prompt_changed")


def _begins_with(a: Prompt, b: Prompt) -> bool:
    if a.ids is not None and b.ids is not None:
        return a.ids.startswith(b.ids) or b.ids.startswith(a.ids)
    return a.text.startswith(b.text) or b.text.startswith(a.text)


def _one_token_more(a: bytes | None, b: bytes | None) -> bool:
    """Is one the other with one token put in front, which is then there twice or once?"""
    if not a or not b or a[:4] == b[:4] == a[4:8] == b[4:8]:
        return False
    longer, shorter = (a, b) if a[4:8] == b[:4] or a[4 : 4 + len(b)] == b else (b, a)
    window = min(len(longer) - 4, len(shorter), 64)
    return window >= 8 and longer[4 : 4 + window] == shorter[:window] and longer[:window] != shorter[:window]


def _repairs(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[Cause, dict[str, Any]]]:
    """B with one thing taken from A, and what that thing would be called."""
    if a.get("add_special_tokens") != b.get("add_special_tokens"):
        yield "bos", _with(b, a, "add_special_tokens")
    if a.get("tools") != b.get("tools") or _plain(a.get("tools")) != _plain(b.get("tools")):
        yield _tools_cause(a.get("tools"), b.get("tools")), _with(b, a, "tools")
    for name in _VARIABLES:
        if a.get(name) != b.get(name):
            yield "template_kwargs", _with(b, a, name)
    said_a, said_b = a.get("messages"), b.get("messages")
    if isinstance(said_a, list) and isinstance(said_b, list) and said_a and said_b:
        if _is_system(said_a[0]) != _is_system(said_b[0]):
            rest = said_b[1:] if _is_system(said_b[0]) else said_b
            yield "default_system", {**b, "messages": [*([said_a[0]] if _is_system(said_a[0]) else []), *rest]}
        if _without_reasoning(said_a) != said_a or _without_reasoning(said_b) != said_b:
            shared = [_merge_reasoning(x, y) for x, y in zip(said_b, said_a, strict=False)]
            yield "reasoning_dropped", {**b, "messages": shared + said_b[len(shared) :]}


def _with(b: dict[str, Any], a: dict[str, Any], name: str) -> dict[str, Any]:
    made = {k: v for k, v in b.items() if k != name}
    return {**made, name: a[name]} if name in a else made


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


_REASONING = ("reasoning", "reasoning_content")


def _without_reasoning(messages: list[Any]) -> list[Any]:
    return [{k: v for k, v in m.items() if k not in _REASONING} if isinstance(m, dict) else m for m in messages]


def _merge_reasoning(message: Any, other: Any) -> Any:
    """`message` with the other's reasoning, if they are the same but for it."""
    mine, theirs = _without_reasoning([message]), _without_reasoning([other])
    return other if mine == theirs else message


def _plain(value: Any) -> str:
    return json.dumps(value)


def _tools_cause(a: Any, b: Any) -> Cause:
    if not isinstance(a, list) or not isinstance(b, list):
        return "tools_changed"
    if sorted(map(_plain, a)) == sorted(map(_plain, b)):
        return "tools_reordered"
    keyed = [sorted(json.dumps(tool, sort_keys=True) for tool in tools) for tools in (a, b)]
    if keyed[0] != keyed[1]:
        return "tools_changed"
    in_order = [[json.dumps(tool, sort_keys=True) for tool in tools] for tools in (a, b)]
    return "tools_key_order" if in_order[0] == in_order[1] else "tools_reordered"


def _textual(a: str, b: str, at: int, *, default: Cause) -> Cause:
    """What kind of text is it that differs?"""
    tails = a[at : at + 400], b[at : at + 400]
    before = re.search(r"\s*$", a[:at])
    blank = before.group() if before else ""
    if tails[0] and tails[1] and _same_without_blanks(blank + tails[0], blank + tails[1]):
        return "white_space"
    near = [text[max(at - 60, 0) : at + 60] for text in (a, b)]
    forms = [unicodedata.normalize("NFKC", text) for text in near]
    if near[0] != near[1] and forms[0][:70] == forms[1][:70]:
        return "unicode_form"
    for cause, pattern in (("timestamp", _TIME), ("request_id", _ID)):
        if all(_covers(pattern, text, at) for text in (a, b)):
            return cause  # type: ignore[return-value]
    return default


def _same_without_blanks(a: str, b: str) -> bool:
    bare = ["".join(text.split()) for text in (a, b)]
    shortest = min(len(bare[0]), len(bare[1]), 24)
    return shortest >= 2 and bare[0][:shortest] == bare[1][:shortest] and a != b


def _covers(pattern: re.Pattern[str], text: str, at: int) -> bool:
    """Does a match contain or touch the place?"""
    start = max(at - 60, 0)
    return any(start + m.start() <= at <= start + m.end() for m in pattern.finditer(text[start : at + 60]))
