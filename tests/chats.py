# ruff: noqa: E501, SIM905
"""Seeded request bodies with every feature that changes a prompt, and hostile text in them. Pure.

`requests(seed, count)` gives (feature, path, body). The features name the rows of the parity table.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Body = dict[str, Any]

_WORDS = (
    "the a prefix cache router token of request model and über naïve façade Straße señor voilà résumé jalapeño "
    "don't we'll I'm they've it's CAPITALS camelCase snake_case kebab-case x1 42 3.14159 1000000 0x7f http://e.org/a?b=c"
).split()
_CHUNKS = (
    "日本語のテキストです。", "中文没有空格", "한국어 문장 입니다", "العربية من اليمين", "עברית", "हिन्दी में पाठ", "ไทยไม่มีช่องว่าง",
    "👩‍👩‍👧‍👦 family", "🇩🇪🇫🇷", "e\u0301 combining", "\u1e9b\u0323 nfc", "ﬁ ligature", "½ ⅓ ²", "a\u200bb zero", "a\u00a0b nbsp", "\ufeffbom",
    "\u2028line sep", "\u3000ideographic space", "tabs\t\tand  double   blanks", "trailing   ", "   leading", "\r\nwindows\r\n", "\n\n\n", " \n ",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": None}\n", "<html><body>&amp; &lt;</body></html>", "{{ braces }} {% raw %}", "\\n \\u0041 \\\\",
    "a" * 90, "ab" * 60, "!?!?!?!?", "-----", "....", "=" * 40, "\x00\x01\x7f", "x\u0300\u0301\u0302\u0303", "١٢٣٤", "Ⅷ", "…", "—", "“quotes”", "▁underline▁mark", "Ġ", "Ċ",
)  # fmt: skip
SPECIALS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<|begin_of_text|>", "<|eot_id|>", "<bos>", "<start_of_turn>",
    "<end_of_turn>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<s>", "</s>", "[INST]", "<unk>", "<pad>", "<|python_tag|>",
)  # fmt: skip


def text(rng: random.Random, *, words: int = 30) -> str:
    """Mostly words, some hostile pieces, now and then a special token in the middle."""
    out: list[str] = []
    for _ in range(rng.randint(1, words)):
        kind = rng.random()
        if kind < 0.75:
            out.append(rng.choice(_WORDS))
        elif kind < 0.96:
            out.append(rng.choice(_CHUNKS))
        else:
            out.append(rng.choice(SPECIALS))
        out.append(rng.choice(("", " ", " ", " ", "\n", "  ", ", ")))
    return "".join(out)


def _user(rng: random.Random) -> Body:
    return {"role": "user", "content": text(rng)}


def _turns(rng: random.Random, *, system: bool = True) -> list[Body]:
    messages: list[Body] = []
    if system and rng.random() < 0.6:
        messages.append({"role": "system", "content": text(rng)})
    for _ in range(rng.randint(0, 3)):
        messages += [_user(rng), {"role": "assistant", "content": text(rng)}]
    return [*messages, _user(rng)]


def tool(rng: random.Random) -> Body:
    function: Body = {
        "name": rng.choice(["get_weather", "search", "読む"]),
        "parameters": {
            "type": "object",
            "properties": {"b": {"type": "string", "description": text(rng, words=5)}, "a": {"type": "number", "minimum": 0.5}},
            "required": ["b"],
            "additionalProperties": False,
        },
    }  # fmt: skip
    if rng.random() < 0.8:
        function["description"] = text(rng, words=8)
    if rng.random() < 0.3:
        function["strict"] = rng.choice([True, False, None])
    if rng.random() < 0.2:
        function["x-unknown"] = 1
    made: Body = {"type": "function", "function": function}
    if rng.random() < 0.2:
        made["unknown"] = "dropped"
    return made


def _call(rng: random.Random, n: int) -> Body:
    arguments = rng.choice([
        json.dumps({"b": "München", "a": 1}), '{ "b" : "x",\n "a":1.50 }', "", "{bad json", "[1, 2]", "null", '{"a": {"nested": [true, null]}}',
        json.dumps({"q": text(rng, words=4)}, ensure_ascii=False),
    ])  # fmt: skip
    call: Body = {"id": f"call_{n}", "type": "function", "function": {"name": "search", "arguments": arguments}}
    if rng.random() < 0.2:
        call["index"] = n
    return call


def _tool_talk(rng: random.Random, *, calls: int = 1) -> list[Body]:
    made = [_call(rng, i) for i in range(calls)]
    messages = [_user(rng), {"role": "assistant", "content": rng.choice([None, "", "let me see"]), "tool_calls": made}]
    for call in made:
        content: Any = text(rng, words=6)
        if rng.random() < 0.5:
            content = [{"type": "text", "text": content}, {"type": "text", "text": "second"}][: rng.randint(1, 2)]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return messages


def plain(rng: random.Random) -> Body:
    return {"messages": _turns(rng)}


def parts(rng: random.Random) -> Body:
    messages = _turns(rng)
    for message in messages:
        if rng.random() < 0.7:
            pieces: list[Any] = [{"type": "text", "text": message["content"]}]
            if rng.random() < 0.5:
                pieces.append({"type": "text", "text": text(rng, words=5)})
            if rng.random() < 0.2:
                pieces[-1]["cache_control"] = {"type": "ephemeral"}
            message["content"] = pieces
    return {"messages": messages}


def odd_parts(rng: random.Random) -> Body:
    messages = _turns(rng)
    kinds = [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": ""}, {"type": "text", "text": "last"}]
    messages[-1] = {"role": "user", "content": rng.sample(kinds, rng.randint(1, 3))}
    if rng.random() < 0.5 and len(messages) > 2:
        messages[-2] = {"role": "assistant", "content": [{"type": "refusal", "refusal": text(rng, words=4)}]}
    return {"messages": messages}


def null_content(rng: random.Random) -> Body:
    return {"messages": [*_turns(rng), {"role": "assistant", "content": None}, _user(rng)]}


def tools(rng: random.Random) -> Body:
    body = {"messages": _turns(rng), "tools": [tool(rng) for _ in range(rng.randint(1, 3))]}
    if rng.random() < 0.5:
        body["tool_choice"] = "none"
    return body


def tool_calls(rng: random.Random) -> Body:
    messages = [*_tool_talk(rng), {"role": "assistant", "content": text(rng)}, _user(rng)]
    body: Body = {"messages": messages if rng.random() < 0.7 else messages[:3]}
    if rng.random() < 0.7:
        body |= {"tools": [tool(rng)], "tool_choice": "none"}
    return body


def parallel_calls(rng: random.Random) -> Body:
    return {"messages": _tool_talk(rng, calls=rng.randint(2, 3)), "tools": [tool(rng)], "tool_choice": "none"}


def empty_calls(rng: random.Random) -> Body:
    return {"messages": [_user(rng), {"role": "assistant", "content": text(rng), "tool_calls": []}, _user(rng)]}


def kwargs(rng: random.Random) -> Body:
    options: Body = {
        "enable_thinking": rng.choice([True, False]),
        "thinking": rng.choice([True, False, None]),
        "unknown_variable": 3,
        "custom": "auto",
        "date_string": "1 Jan 2026",
        "tools_in_user_message": rng.choice([True, False]),
    }
    chosen = {k: options[k] for k in rng.sample(sorted(options), rng.randint(1, len(options)))}
    return {"messages": _turns(rng), "chat_template_kwargs": chosen}


def no_generation_prompt(rng: random.Random) -> Body:
    return {"messages": [*_turns(rng), {"role": "assistant", "content": text(rng)}], "add_generation_prompt": False}


def continue_final(rng: random.Random) -> Body:
    final = text(rng) + rng.choice(["", " ", "\n", "  \n"])
    messages = [*_turns(rng), {"role": "assistant", "content": final}]
    return {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}


def documents(rng: random.Random) -> Body:
    return {"messages": _turns(rng), "documents": [{"title": "t", "text": text(rng, words=8)}]}


def reasoning_effort(rng: random.Random) -> Body:
    body: Body = {"messages": _turns(rng), "reasoning_effort": rng.choice(["none", "low", "medium", "high"])}
    if rng.random() < 0.3:
        body["chat_template_kwargs"] = {"enable_thinking": rng.choice([True, False])}
    return body


def reasoning(rng: random.Random) -> Body:
    field = rng.choice(["reasoning", "reasoning_content"])
    answer = {"role": "assistant", "content": text(rng), field: text(rng, words=8)}
    messages = [_user(rng), answer, _user(rng)]
    if rng.random() < 0.5:
        messages = [_user(rng), {**answer, "tool_calls": [_call(rng, 1)]},
                    {"role": "tool", "tool_call_id": "call_1", "content": "ok"}]  # fmt: skip
    return {"messages": messages}


def developer(rng: random.Random) -> Body:
    messages = _turns(rng)
    messages.insert(rng.randint(0, len(messages) - 1), {"role": "developer", "content": text(rng)})
    if rng.random() < 0.3:
        messages.insert(0, {"role": "developer", "content": [{"type": "text", "text": "be brief"}]})
    return {"messages": messages}


def names(rng: random.Random) -> Body:
    messages = _turns(rng)
    messages[-1]["name"] = rng.choice(["alice", "Zoë"])
    return {"messages": messages}


def billing_header(rng: random.Random) -> Body:
    header = f"x-anthropic-billing-header: cch={rng.random()}"
    content: Any = header + "\n" + text(rng)
    if rng.random() < 0.5:
        content = [{"type": "text", "text": header}, {"type": "text", "text": text(rng)}]
    return {"messages": [{"role": "system", "content": content}, *_turns(rng, system=False)]}


def special_tokens(rng: random.Random) -> Body:
    body = {"messages": _turns(rng), "add_special_tokens": True}
    body["messages"][-1]["content"] += rng.choice(SPECIALS) + text(rng, words=4)
    return body


def truncated(rng: random.Random) -> Body:
    body = {"messages": _turns(rng), "truncate_prompt_tokens": rng.choice([1, 7, 20, 30_000])}
    if rng.random() < 0.6:
        body["truncation_side"] = rng.choice(["left", "right"])
    if rng.random() < 0.4:
        body["add_special_tokens"] = True
    return body


CHAT: dict[str, Callable[[random.Random], Body]] = {
    f.__name__: f
    for f in (
        plain,
        parts,
        odd_parts,
        null_content,
        tools,
        tool_calls,
        parallel_calls,
        empty_calls,
        kwargs,
        no_generation_prompt,
        continue_final,
        documents,
        reasoning_effort,
        reasoning,
        developer,
        names,
        billing_header,
        special_tokens,
        truncated,
    )
}


def completion(rng: random.Random) -> Body:
    prompt: Any = text(rng, words=60)
    kind = rng.random()
    if kind < 0.2:
        prompt = [prompt, "second"]
    elif kind < 0.4:
        prompt = [rng.randint(0, 1000) for _ in range(20)]
    elif kind < 0.5:
        prompt = [[rng.randint(0, 1000) for _ in range(20)], [1]]
    body: Body = {"prompt": prompt}
    if rng.random() < 0.3:
        body["add_special_tokens"] = rng.choice([True, False])
    if rng.random() < 0.3:
        body["truncate_prompt_tokens"] = rng.choice([1, 5, 30_000])
        if rng.random() < 0.5:
            body["truncation_side"] = rng.choice(["left", "right"])
    return body


def responses(rng: random.Random) -> Body:
    body: Body = {"input": text(rng)}
    if rng.random() < 0.7:
        items: list[Body] = [{"role": "user", "content": [{"type": "input_text", "text": text(rng)}]}]
        if rng.random() < 0.4:
            items.insert(0, {"role": rng.choice(["system", "developer"]), "content": text(rng)})
        if rng.random() < 0.5:
            items.append(
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": text(rng, words=4)}],
                }
            )
        if rng.random() < 0.5:
            said = {"type": "output_text", "text": text(rng), "annotations": []}
            items.append({"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": [said]})
        elif rng.random() < 0.5:
            items.append({"role": "assistant", "content": text(rng)})
        if rng.random() < 0.5:
            call = {"type": "function_call", "name": "search", "arguments": '{"b": "ü"}'}
            items += [{**call, "call_id": f"c{n}"} for n in range(rng.randint(1, 2))]
            items += [{"type": "function_call_output", "call_id": "c0", "output": text(rng, words=5)}]
        items.append({"role": "user", "content": text(rng)})
        body["input"] = items
    if rng.random() < 0.5:
        body["instructions"] = text(rng)
    if rng.random() < 0.4:
        body["tools"] = [{"type": "function", **tool(rng)["function"]} for _ in range(2)]
        for made in body["tools"]:
            made.pop("x-unknown", None)
            made.setdefault("strict", None)
    if rng.random() < 0.3:
        body["reasoning"] = {"effort": rng.choice(["low", "high", "none"])}
    if rng.random() < 0.2:
        body["chat_template_kwargs"] = {"enable_thinking": False}
    return body


def messages(rng: random.Random) -> Body:
    turns: list[Body] = [{"role": "user", "content": text(rng)}]
    if rng.random() < 0.5:
        blocks: list[Body] = [{"type": "text", "text": text(rng)}]
        if rng.random() < 0.5:
            blocks.insert(0, {"type": "thinking", "thinking": text(rng, words=4), "signature": "x"})
        calls = rng.randint(0, 2)
        blocks += [
            {"type": "tool_use", "id": f"t{n}", "name": "search", "input": {"b": "ü", "n": 1.5}} for n in range(calls)
        ]
        turns.append({"role": "assistant", "content": blocks})
        results: list[Body] = []
        for n in range(calls):
            content: Any = rng.choice(
                [text(rng, words=4), [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], None]
            )
            results.append({"type": "tool_result", "tool_use_id": f"t{n}", **({"content": content} if content else {})})
        turns.append(
            {"role": "user", "content": [*results, {"type": "text", "text": text(rng)}, {"type": "text", "text": ""}]}
        )
    if rng.random() < 0.2:
        turns.insert(rng.randint(0, len(turns)), {"role": "system", "content": text(rng)})
    if rng.random() < 0.3:
        turns.append({"role": "assistant", "content": text(rng)})
        turns.append(
            {"role": "user", "content": [{"type": "text", "text": text(rng), "cache_control": {"type": "ephemeral"}}]}
        )
    body: Body = {"max_tokens": 2000, "messages": turns}
    if rng.random() < 0.7:
        header = {"type": "text", "text": f"x-anthropic-billing-header: cch={rng.random()}"}
        body["system"] = rng.choice(
            [text(rng), [header, {"type": "text", "text": text(rng)}, {"type": "text", "text": "second"}]]
        )
    if rng.random() < 0.4:
        body["tools"] = [
            {"name": "search", "description": "d", "input_schema": {"properties": {"b": {"type": "string"}}}}
        ]
        if rng.random() < 0.3:
            body["tool_choice"] = {"type": rng.choice(["auto", "none"])}
    if rng.random() < 0.3:
        body["thinking"] = rng.choice([{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}])
    if rng.random() < 0.2:
        body["output_config"] = {"effort": rng.choice(["low", "max"])}
    return body


OTHERS: tuple[tuple[str, str, Callable[[random.Random], Body]], ...] = (
    ("completion", "/v1/completions", completion),
    ("responses", "/v1/responses", responses),
    ("anthropic messages", "/v1/messages", messages),
)


def requests(seed: int, count: int) -> Iterator[tuple[str, str, Body]]:
    """`count` requests, every feature in turn; every third asks another endpoint than chat."""
    rng = random.Random(seed)
    features = list(CHAT.items())
    for n in range(count):
        if n % 3 == 2:
            name, path, make = OTHERS[n // 3 % len(OTHERS)]
            yield name, path, {"model": "m", **make(rng)}
        else:
            name, make = features[(n - n // 3) % len(features)]
            yield name, "/v1/chat/completions", {"model": "m", **make(rng)}


_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, "", "x", "auto", "none", [], {}, [""], ["a", None], {"type": "text"}, {"type": "text", "text": "hi"},
    [{"type": "text", "text": "hi"}], "user", "system", "tool", "assistant", "developer", {"a": None},
)  # fmt: skip
_FIELDS = (
    "content role name tool_calls tools reasoning reasoning_content type text function arguments tool_choice documents chat_template_kwargs "
    "reasoning_effort add_generation_prompt continue_final_message add_special_tokens truncate_prompt_tokens truncation_side strict "
    "parameters description id tool_call_id system thinking input instructions status task refusal defer_loading echo suffix uuid"
).split()


def mutated(rng: random.Random, body: Body) -> Body:
    """A copy with one or two fields removed, replaced, added or doubled anywhere: mostly what an engine refuses."""
    made: Body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 2)):
        places = [(o, k) for o, k in _places(made) if not (o is made and k == "model")]
        if not places:
            continue
        holder, key = rng.choice(places)
        kind = rng.random()
        if kind < 0.25:
            del holder[key]
        elif kind < 0.6:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
        elif isinstance(holder, list):
            holder.insert(key, copy.deepcopy(rng.choice(holder)))
        else:
            holder[rng.choice(_FIELDS)] = copy.deepcopy(rng.choice(_VALUES))
    return made


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)
