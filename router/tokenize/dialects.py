"""Other ways to ask for a chat, turned into one as vLLM does: OpenAI responses and Anthropic messages. Pure.

Only what can be rendered from the body alone: a response continued by id lives in one pod's memory, and built-in tools
bring text of their own. The rules are those of vLLM 0.32 (entrypoints/openai/responses/utils.py,
entrypoints/anthropic/serving.py).
May import: the standard library, msgspec, router.tokenize.chat.
"""

from typing import Any, Literal

import msgspec

from router.tokenize.chat import BILLING_HEADER, ChatBody, Message, Unrenderable, render_tools

Tools = list[dict[str, Any]] | None


class ResponsesBody(msgspec.Struct):
    """The fields of POST /v1/responses that decide the prompt."""

    input: str | list[Any]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = "auto"
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    previous_response_id: str | None = None
    previous_input_messages: Any = None
    prompt: Any = None


class MessagesBody(msgspec.Struct):
    """The fields of POST /v1/messages that decide the prompt."""

    messages: list[Message]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


# --- responses ---


def from_responses(body: ResponsesBody) -> tuple[ChatBody, Tools]:
    """Raises Unrenderable."""
    if body.previous_response_id is not None or body.previous_input_messages is not None or body.prompt is not None:
        raise Unrenderable("continues what only a pod remembers")
    messages: list[Message] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _items(body.input)
    effort = (body.reasoning or {}).get("effort")
    continues = _is_partial(body.input)
    chat = ChatBody(
        messages=messages,
        tool_choice=body.tool_choice,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=effort,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        add_special_tokens=True,  # vLLM leaves its default here, also where the template writes BOS
        truncate_prompt_tokens=None if body.truncation == "disabled" else -1,
        max_tokens=body.max_output_tokens,
    )
    return chat, _response_tools(body.tools)


def _is_partial(items: str | list[Any]) -> bool:
    last = items[-1] if isinstance(items, list) and items else None
    if not isinstance(last, dict) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in ("in_progress", "incomplete")


def _response_tools(tools: list[dict[str, Any]] | None) -> Tools:
    if not tools:
        return None
    if any(tool.get("type") != "function" for tool in tools):
        raise Unrenderable("tools that are not functions")
    return render_tools([{"type": "function", "function": tool} for tool in tools])


def _items(items: list[Any]) -> list[Message]:
    """Items of one turn (reasoning, text, calls) grow into one assistant message."""
    messages: list[Message] = []
    for item in items:
        if not isinstance(item, dict):
            raise Unrenderable("an input item that is not an object")
        last = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
        message = _item(item, last)
        if message is not None:
            messages.append(message)
    return messages


def _item(item: dict[str, Any], last: Message | None) -> Message | None:
    """A new message, or None when the item went into `last`, the assistant message before it."""
    kind = item.get("type")
    if kind == "function_call":
        return _merge(last, "tool_calls", _function_call(item))
    if kind == "reasoning":
        return _merge(last, "reasoning", _reasoning(item))
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind not in (None, "message") or "role" not in item:
        raise Unrenderable(f"an input item of type {kind}"[:80])
    if item["role"] == "assistant":
        content = item.get("content")
        if isinstance(content, list) and content and isinstance(content[0], dict):
            content = content[0].get("text")
        if isinstance(content, str):
            return _merge(last, "content", content)
    return item


def _merge(last: Message | None, field: str, value: Any) -> Message | None:
    if field == "tool_calls":
        if last is None:
            return {"role": "assistant", "tool_calls": [value]}
        last["tool_calls"] = [*(last.get("tool_calls") or []), value]
        return None
    if last is not None and last.get(field) is None:
        last[field] = value
        return None
    return {"role": "assistant", field: value}


def _function_call(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("namespace"):
        raise Unrenderable("a call of a namespaced tool")
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "function": function, "type": "function"}


def _reasoning(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise Unrenderable("encrypted reasoning")
    for field in ("content", "summary"):
        parts = item.get(field)
        if isinstance(parts, list) and parts and isinstance(parts[0], dict):
            text = parts[0].get("text")
            if isinstance(text, str):
                return text
    return ""


# --- Anthropic messages ---


def from_messages(
    body: MessagesBody, *, merge_system: bool, disabled_effort: Literal["none", "low"]
) -> tuple[ChatBody, Tools]:
    """`merge_system`: the template wants its system message first and alone. `disabled_effort`: what the engine sends
    for thinking "disabled". Raises Unrenderable.
    """
    messages: list[Message] = []
    system = _system_parts(body.system) if body.system else []
    if merge_system:
        for message in body.messages:
            if message.get("role") == "system" and (text := _system_text(message.get("content"))):
                system.append(text)
    if system:
        messages.append({"role": "system", "content": "".join(system)})
    for message in body.messages:
        _append(message, messages, merge_system=merge_system)
    effort = (body.output_config or {}).get("effort")
    if (body.thinking or {}).get("type") == "disabled":
        effort = disabled_effort
    chat = ChatBody(
        messages=messages,
        tool_choice=(body.tool_choice or {}).get("type"),
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=effort,
        max_tokens=body.max_tokens,
        max_completion_tokens=body.max_tokens,
        kv_transfer_params=body.kv_transfer_params,
    )
    return chat, _anthropic_tools(body.tools)


def _system_parts(system: str | list[dict[str, Any]]) -> list[str]:
    if isinstance(system, str):
        return [system]
    texts = [block.get("text") for block in system if block.get("type") == "text"]
    return [t for t in texts if isinstance(t, str) and t and not t.startswith(BILLING_HEADER)]


def _system_text(content: Any) -> str:
    if isinstance(content, str):
        return "" if content.startswith(BILLING_HEADER) else content
    return "".join(_system_parts(content)) if isinstance(content, list) else ""


def _append(message: Message, messages: list[Message], *, merge_system: bool) -> None:
    role, content = message.get("role"), message.get("content")
    if role == "system":
        text = "" if merge_system else _system_text(content)
        if text:
            messages.append({"role": "system", "content": text})
        return
    made: Message = {"role": role}
    if isinstance(content, str):
        made["content"] = content
    elif isinstance(content, list):
        _blocks(content, made, messages)
    else:
        raise Unrenderable("content is neither text nor a list")
    if not (role == "user" and "content" not in made):
        messages.append(made)


def _blocks(blocks: list[Any], made: Message, messages: list[Message]) -> None:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": {"url": ""}})
        elif kind == "thinking":
            if block.get("thinking") is not None:
                thoughts.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_tool_use(block))
        elif kind == "tool_result":
            if made["role"] == "user":
                _tool_result(block, messages)
            else:
                parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise Unrenderable(f"a content block of type {kind}"[:80])
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        made["content"] = parts[0]["text"]
    elif parts:
        made["content"] = parts


def _tool_use(block: dict[str, Any]) -> dict[str, Any]:
    if not block.get("id"):
        raise Unrenderable("a tool_use without an id: the engine makes one up from the clock")
    function = {"name": block.get("name") or "", "arguments": block.get("input") or {}}
    return {"id": block["id"], "type": "function", "function": function}


def _tool_result(block: dict[str, Any], messages: list[Message]) -> None:
    content = block.get("content")
    items = [i for i in content if isinstance(i, dict)] if isinstance(content, list) else []
    text = (
        content if isinstance(content, str) else "\n".join(i.get("text", "") for i in items if i.get("type") == "text")
    )
    call = block.get("tool_use_id") or ""
    messages.append({"role": "tool", "tool_call_id": call, "content": text})
    images = [{"type": "image_url", "image_url": {"url": ""}} for i in items if i.get("type") == "image"]
    if images:
        messages.append({"role": "user", "content": images})
    names = [i.get("tool_name") or i.get("name") for i in items if i.get("type") == "tool_reference"]
    references = [{"type": "tool_reference", "name": name} for name in names if name]
    if references:
        messages.append({"role": "tool", "tool_call_id": call, "content": references})


def _anthropic_tools(tools: list[dict[str, Any]] | None) -> Tools:
    """An empty list stays one: unlike chat, this endpoint takes it."""
    if not tools:
        return tools
    made = []
    for tool in tools:
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise Unrenderable("a tool without an input_schema")
        schema = schema if "type" in schema else {**schema, "type": "object"}
        fields = {k: tool.get(k) for k in ("name", "description", "strict", "defer_loading")}
        made.append({"type": "function", "function": {**fields, "parameters": schema}})
    return render_tools(made)
