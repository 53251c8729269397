"""Proof by trial, at load, of what a tokenizer or template is claimed to allow. Pure, seeded; CPU only.

The static checks of pieces.py say what may be exact; this corpus is hostile where such claims break: every added token,
blanks on either side of it, composition, scripts without blanks, code, empty pieces. One difference and the step stays
off for that tokenizer: slower, never wrong. Live requests go on being sampled (encode.py).
May import: the standard library, tokenizers, router.tokenize.{chat,pieces,template}.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from router.tokenize.chat import Message, Unrenderable, normalise, render_tools
from router.tokenize.pieces import Cuts, Splitter, plausible_cuts
from router.tokenize.template import ChatTemplate, TemplateRefusal

DOCUMENTS = 300
_WORDS = tuple(
    """the of and to a in is that it for not as with be this on are by at which naïve über façade Straße señor
    don't we'll I'm they've it's CAPS camelCase snake_case kebab-case x1 42 3.14 1000000 слово и ещё λόγος και 한국어
    문장 def return self.value None lambda x: http://e.org/a?b=c""".split()  # noqa: SIM905  a list of them would fill the screen
)
_HOSTILE = (
    *(
        "日本語のテキスト。",
        "中文没有空格",
        "हिन्दी में पाठ",
        "ไทยไม่มีช่องว่าง",
        "العربية من",
        "עברית כאן",
        "👩‍👩‍👧‍👦",
        "🇩🇪🇫🇷",
    ),
    *("e\u0301", "\u1e9b\u0323", "a\u0300\u0301\u0302", "ﬁ", "½", "१२३", "Ⅷ", "\u200b", "\u00a0", "\u2028", "\u3000"),
    *("\ufeff", "\x00", "\x7f", "\t\t", "   ", "\n", "\n\n\n", " \n ", "\r\n", "...", "!?!?", "=====", "{}[]()"),
    *('{"a": 1.5}', "<b>&amp;</b>", "\\n\\u0041", "▁", "▁a▁b", "Ġ", "Ċ", "'s", "'LL", "a" * 40, "0" * 7),
)
_GLUE = (" ", " ", " ", " ", " ", "", "\n", "  ", "\t", ", ")


def documents(rng: random.Random, tokens: Sequence[str], count: int = DOCUMENTS) -> Iterator[str]:
    """Texts of about a hundred words. Every token of `tokens` appears once in the first of them, if there are few."""
    sweep = list(tokens) if len(tokens) <= 2000 else rng.sample(list(tokens), 2000)
    for _ in range(count):
        out: list[str] = []
        for _ in range(rng.randint(0, 120)):
            kind = rng.random()
            if kind < 0.8:
                out.append(rng.choice(_WORDS))
            elif kind < 0.92 or not tokens:
                out.append(rng.choice(_HOSTILE))
            else:
                out.append(sweep.pop() if sweep else rng.choice(tokens))
            out.append(rng.choice(_GLUE))
        yield "".join(out)


def proven_cuts(tokenizer_json: str, *, seed: int = 20261129) -> tuple[Cuts, list[str]]:
    """The cuts that are plausible and, over the corpus, exact; and the tokens in front of which to cut."""
    plausible, borders = plausible_cuts(tokenizer_json)
    if plausible == Cuts(special=False, words=False):
        return plausible, borders
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
    rng = random.Random(seed)
    corpus = list(documents(rng, added))
    whole = [tuple(e.ids) for e in tokenizer.encode_batch_fast(corpus, add_special_tokens=False)]
    special = plausible.special and _exact(tokenizer, Cuts(special=True, words=False), borders, corpus, whole)
    words = plausible.words and _exact(tokenizer, Cuts(special=False, words=True), borders, corpus, whole)
    both = Cuts(special=special, words=words)
    if special and words and not _exact(tokenizer, both, borders, corpus, whole):
        both = Cuts(special=True, words=False)
    return both, borders


def _exact(
    tokenizer: Tokenizer, cuts: Cuts, borders: list[str], corpus: list[str], whole: list[tuple[int, ...]]
) -> bool:
    """Do the pieces' ids, joined, equal the whole's, with cuts at (nearly) every allowed place and far between?"""
    for piece_chars in (1, 30, 200):
        splitter = Splitter(cuts, borders, piece_chars=piece_chars)
        for text, ids in zip(corpus, whole, strict=True):
            pieces = splitter.split(text)
            if len(pieces) == 1:
                continue
            parts = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
            if tuple(i for part in parts for i in part.ids) != ids:
                return False
    return True


CHATS = 120
_VALUES: tuple[Any, ...] = (
    *(True, False, None, 0, -3, 2**63, 1.0, 0.5, 1e20, "", "text", "5", 'Ünï "quoted" <b>&\''),
    *([], [1, [None, "x"]], {}, {"k": {"n": 1.5}}),
)
_NAMES = ("b", "a", "ü")
Chat = tuple[list[Message], list[dict[str, Any]] | None, dict[str, Any]]


def chats(rng: random.Random, variables: frozenset[str], count: int = CHATS) -> Iterator[Chat]:
    """(messages, tools, template variables), with every kind of value where a template may print one."""
    own = sorted(variables - {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})
    for _ in range(count):
        offered: dict[str, Any] = {"add_generation_prompt": rng.random() < 0.7}
        for name in own:
            if rng.random() < 0.4:
                offered[name] = rng.choice(_VALUES)
        if rng.random() < 0.2:
            offered["documents"] = [{"title": _text(rng), "text": _text(rng)}]
        tools = [_tool(rng) for _ in range(rng.randint(1, 3))] if rng.random() < 0.5 else None
        yield _messages(rng), tools, offered


def _text(rng: random.Random) -> str:
    words = [rng.choice(_HOSTILE if rng.random() < 0.2 else _WORDS) for _ in range(rng.randint(0, 12))]
    text = rng.choice(_GLUE).join(words)
    if rng.random() < 0.15:
        text = rng.choice(("<think>\n", "")) + text + "</think>\n\n" + text
    return rng.choice(("", "", " ", "\n")) + text + rng.choice(("", "", "  ", "\n\n"))


def _tool(rng: random.Random) -> dict[str, Any]:
    properties = {
        name: {
            "type": rng.choice(["string", "number", ["string", "null"]]),
            "default": rng.choice(_VALUES),
            "enum": [rng.choice(_VALUES)],
            "description": _text(rng),
        }
        for name in _NAMES
    }
    parameters = rng.choice([None, {"type": "object", "properties": properties, "required": ["b"]}])
    name = f"f{rng.randint(0, 3)}"
    return {
        "type": "function",
        "function": {"name": name, "description": rng.choice([None, _text(rng)]), "parameters": parameters},
    }


def _calls(rng: random.Random) -> list[dict[str, Any]]:
    calls = []
    for i in range(rng.randint(1, 2)):
        arguments = {name: rng.choice(_VALUES) for name in _NAMES[: rng.randint(0, 3)]}
        calls.append({"id": f"call{i}xyz9", "type": "function", "function": {"name": "f1", "arguments": arguments}})
    return calls


def _messages(rng: random.Random) -> list[Message]:
    messages: list[Message] = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(["system", "system", "developer"]), "content": _content(rng)})
    for _ in range(rng.randint(0, 3)):
        messages.append({"role": "user", "content": _content(rng)})
        answer: Message = {"role": "assistant", "content": rng.choice([None, _text(rng), _content(rng)])}
        if rng.random() < 0.3:
            answer["reasoning"] = _text(rng)
        messages.append(answer)
        if rng.random() < 0.4:
            calls = answer["tool_calls"] = _calls(rng)
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": _content(rng)} for call in calls]
            if rng.random() < 0.5:
                messages.append({"role": "assistant", "content": _text(rng)})
    if rng.random() < 0.85 or not messages:
        messages.append({"role": "user", "content": _content(rng), "name": rng.choice([None, "zoë"])})
    return messages


def _content(rng: random.Random) -> Any:
    if rng.random() < 0.75:
        return _text(rng)
    return [{"type": "text", "text": _text(rng)} for _ in range(rng.randint(0, 2))]


def renders_alike(template: ChatTemplate, special_tokens: Mapping[str, Any], *, seed: int = 20261129) -> bool:
    """Do minijinja and jinja2 agree on every chat of the corpus, on the text and on which chats are refused?"""
    texts = 0
    for messages, tools, offered in chats(random.Random(seed), template.variables):
        with contextlib.suppress(Unrenderable):
            conversation, _ = normalise(messages, template.content_format)
            variables = offered if tools is None else {**offered, "tools": render_tools(tools)}
            context, _ = template.context(conversation, variables, special_tokens)
            exact = trial = None
            with contextlib.suppress(TemplateRefusal):
                exact = template.render_exact(context)
            with contextlib.suppress(Exception):  # it may raise anything; what counts is whether jinja2 does too
                trial = template.render_trial(context)
            if exact != trial:
                return False
            texts += exact is not None
    return texts >= CHATS // 10  # a template that refuses nearly everything has proven nothing
