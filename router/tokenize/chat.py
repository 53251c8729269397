"""A chat request as the engine will read it: messages, tools and template variables. Pure.

vLLM does not hand a client's messages to the template as they are: it joins or wraps content parts, parses tool-call
arguments, renames reasoning fields. A difference here is a prompt with other tokens, hence no cache hit and no error.
The rules are those of vLLM 0.32 (renderers/chat_utils.py, entrypoints/openai/chat_completion/protocol.py).
May import: the standard library and msgspec.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

ContentFormat = Literal["string", "openai"]
"""How a template reads message.content: as one string, or as a list of parts."""

Message = dict[str, Any]

MEDIA_MARK = "\U0010fffdwarmroute-media\U0010fffd"
"""Stands in rendered text where the first image, sound or film would be; the prompt is known up to here only."""

_TEXT_KEY = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA_KEYS = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "prompt_embeds",
        "video_embeds",
        "video_url",
    }
)
_MEDIA_TYPES = _MEDIA_KEYS | {"input_image", "file"}
# Fields that vLLM's part types declare; whatever else a client puts beside a text goes on to the template.
_DECLARED_PART_FIELDS = (_MEDIA_KEYS - {"prompt_embeds"}) | {
    "closed",
    "data",
    "file",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
}
BILLING_HEADER = "x-anthropic-billing-header"


class Unrenderable(ValueError):
    """We cannot make the engine's ids from this request (or the engine refuses it). The text says why."""


class ChatBody(msgspec.Struct):
    """The fields of POST /v1/chat/completions that decide the prompt. Everything else is skipped while parsing."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


def template_variables(
    body: ChatBody, tools: list[dict[str, Any]] | None, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """What the engine offers to the template: server defaults < request's kwargs < the request's own fields.

    As in vLLM a value of None or "auto" never overrides.
    """
    merged = dict(defaults)
    if tools is not None:
        merged["tools"] = tools
    user = body.chat_template_kwargs or {}
    own = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "documents": body.documents,
        "reasoning_effort": body.reasoning_effort,
    }
    if body.reasoning_effort is not None and "enable_thinking" not in user:
        own["enable_thinking"] = body.reasoning_effort != "none"
    for source in (user, own):
        merged.update((k, v) for k, v in source.items() if v is not None and v != "auto")
    return merged


def render_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as vLLM's models dump them: declared fields only, in declared order."""
    if tools is None:
        return None
    if not tools:
        raise Unrenderable("tools is an empty list")
    return [_tool(tool) for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unrenderable("a tool without a function")
    if tool.get("type", "function") != "function":
        raise Unrenderable("a tool that is not a function")
    rendered: dict[str, Any] = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    outer: dict[str, Any] = {"type": "function", "function": rendered}
    _put_flag(rendered, "strict", function.get("strict"))
    inner = function.get("defer_loading")
    _put_flag(rendered, "defer_loading", tool.get("defer_loading") if inner is None else inner)
    _put_flag(outer, "defer_loading", tool.get("defer_loading"))
    return outer


def _put_flag(rendered: dict[str, Any], name: str, value: Any) -> None:
    """Such a field is rendered only if it is given; the engine turns 0 and "true" into booleans, we do not follow."""
    if value is None:
        return
    if not isinstance(value, bool):
        raise Unrenderable(f"a tool whose {name} is no boolean")
    rendered[name] = value


def normalise(messages: list[Message], content_format: ContentFormat) -> tuple[list[Message], bool]:
    """Messages as the template gets them, and whether they stop short at a media part (marked by MEDIA_MARK).

    Raises Unrenderable for what the engine would refuse or what we do not follow.
    """
    conversation: list[Message] = []
    for message in messages:
        result, media = _message(message, content_format)
        conversation.append(result)
        if media:
            return conversation, True
    return conversation, False


def _message(message: Message, content_format: ContentFormat) -> tuple[Message, bool]:
    role = message.get("role")
    if not isinstance(role, str):
        raise Unrenderable("a message without a role")
    content, media = _content(message.get("content"), role, content_format)
    result: Message = {"role": role, "content": content}
    if role == "assistant":
        _assistant(message, result)
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        if isinstance(content, list) and not any(part.get("type") != "text" for part in content):
            result["content"] = "\n".join(part.get("text", "") for part in content)
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            result[field] = message[field]
    if role == "developer":
        result["tools"] = message.get("tools")
    return result, media


def _assistant(message: Message, result: Message) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise Unrenderable("tool_calls is not a list")
        if calls:
            result["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise Unrenderable("a tool call that is not a function call")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> dict[str, Any]:
    """Templates want an object: JSON text is parsed; nothing, bad JSON and non-objects become {}."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)  # not msgspec: it refuses NaN, which Python and so the engine accept
        except (json.JSONDecodeError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _content(content: Any, role: str, content_format: ContentFormat) -> tuple[Any, bool]:
    wrap = content_format == "openai"
    if isinstance(content, str):
        if role == "system" and content.startswith(BILLING_HEADER):
            content = content.partition("\n")[2]
            if not content:
                return ([] if wrap else ""), False
        return ([{"type": "text", "text": content}] if wrap else content), False
    if content is None:
        return ([] if wrap else ""), False
    if not isinstance(content, list):
        raise Unrenderable("content is neither text nor a list")
    parts: list[Any] = []
    for part in content:
        if isinstance(part, dict) and _is_media(part):
            # "string" templates get the placeholders before the message's text, so nothing of it is known.
            return ([*parts, {"type": "text", "text": MEDIA_MARK}] if wrap else MEDIA_MARK), True
        parsed = _part(part, role, wrap)
        if parsed:  # an empty text is no line of its own
            parts.append(parsed)
    return (parts if wrap else "\n".join(parts)), False


def _is_media(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    if kind in _MEDIA_TYPES:
        return True
    return kind is None and not _MEDIA_KEYS.isdisjoint(part)


def _part(part: Any, role: str, wrap: bool) -> Any:
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    if not isinstance(part, dict) or part.get("uuid") is not None:
        raise Unrenderable("a content part that is neither text nor an object")
    kind = part.get("type")
    if kind == "tool_reference":
        name = part.get("name")
        if not isinstance(name, str):
            raise Unrenderable("a tool_reference without a name")
        return {"type": "tool_reference", "name": name} if wrap else name
    key = _TEXT_KEY.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise Unrenderable("a content part of unknown type")
    text = part.get(key)
    if text is None and kind in ("text", "refusal"):
        return None
    if not isinstance(text, str):
        raise Unrenderable("a text part without text")
    if role == "system" and kind == "text" and text.startswith(BILLING_HEADER):
        text = text.partition("\n")[2]
        if not text:
            return None
    if not wrap:
        return text
    extra = {k: v for k, v in part.items() if k not in _DECLARED_PART_FIELDS} if len(part) > 2 else {}
    return {"type": "text", "text": text, **extra}


def without_developer(conversation: list[Message]) -> list[Message]:
    """For templates that do not know the role: developer becomes system, and system messages merge at the front."""
    renamed: list[Message] = []
    for message in conversation:
        if message["role"] == "developer":
            message = {k: v for k, v in message.items() if k != "tools"}
            message["role"] = "system"
        renamed.append(message)
    if not any(m["role"] == "system" for m in renamed[1:]):
        return renamed
    systems = [_plain_text(m.get("content", "")) for m in renamed if m["role"] == "system"]
    merged = {"role": "system", "content": "\n\n".join(s for s in systems if s)}
    return [merged, *(m for m in renamed if m["role"] != "system")]


def _plain_text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return content if isinstance(content, str) else ""
