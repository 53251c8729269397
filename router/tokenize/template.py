"""A model's chat template, rendered as `transformers` and vLLM do it. No I/O.

Templates come from model repositories, so they run in jinja2's immutable sandbox, with the extensions, filters and
globals of transformers' own environment (utils/chat_template_utils.py), byte for byte. minijinja renders several times
faster; it is used for a template once proof.py has seen it give the same text, and jinja2 goes on checking a sample of
live requests.
May import: the standard library, jinja2, minijinja, router.tokenize.{chat,content_format}.
"""

import functools
import json
import logging
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import minijinja

from router.tokenize.chat import ContentFormat, Message, Unrenderable, without_developer
from router.tokenize.content_format import detect_format

log = logging.getLogger("warmroute.tokenize")

SAMPLE_EVERY = 512  # renderings
FAST_MAX_MESSAGES = 256  # minijinja holds the interpreter's lock while it renders, and a template may loop in a loop
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_RENDER_ARGUMENTS = frozenset({"tools", "documents", "add_generation_prompt", "continue_final_message"})
_REFUSED_VARIABLES = frozenset({"chat_template", "tokenize"})
# Arguments of transformers' apply_chat_template that change what it does beyond rendering.
_METHOD_ARGUMENTS = frozenset(
    {
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenizer_kwargs",
        "truncation",
    }
)


class TemplateRefusal(Exception):
    """The template raised on this request: the engine answers 400."""


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks what the assistant said; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_generation_support")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def _generation_support(self, caller: Any) -> Any:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As in transformers: UTF-8 stays, keys keep their order, nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:  # noqa: A002  the name templates use
    return datetime.now().strftime(format)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class _Fast:
    """The same template in minijinja, an environment per thread: one is locked while it renders, and a template that
    calls back into Python (tojson) may lose its turn while holding that lock."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._local = threading.local()

    def render(self, context: dict[str, Any]) -> str:
        """Raises anything; the caller then asks jinja2."""
        environment: minijinja.Environment | None = getattr(self._local, "environment", None)
        if environment is None:
            environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True)
            environment.add_filter("tojson", _tojson)
            environment.add_global("raise_exception", _raise_exception)
            environment.add_global("strftime_now", _strftime_now)
            environment.add_template("chat", self._source)
            self._local.environment = environment
        return environment.render_template("chat", **context)


class ChatTemplate:
    """One compiled template. Raises jinja2.TemplateError if it cannot be compiled."""

    def __init__(self, source: str, *, content_format: ContentFormat | None = None) -> None:
        self.source = source
        env = _environment()
        tree = env.parse(source)
        self.content_format: ContentFormat = content_format or detect_format(tree)
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree)) - env.globals.keys()
        self._accepted = self.variables | _RENDER_ARGUMENTS
        self._compiled = env.from_string(source)
        self._fast: _Fast | None = None
        self._until_sample = SAMPLE_EVERY
        self._sample: tuple[dict[str, Any], str] | None = None

    @property
    def is_fast(self) -> bool:
        """Does minijinja render it?"""
        return self._fast is not None

    def render(self, conversation: list[Message], variables: dict[str, Any], special_tokens: Mapping[str, Any]) -> str:
        """The prompt text. `variables` are offered, not imposed: only what the template names reaches it.

        Raises TemplateRefusal when the template refuses, Unrenderable when the engine would or we do not follow.
        """
        context, final = self.context(conversation, variables, special_tokens)
        text = self._render_fast(context) if len(conversation) <= FAST_MAX_MESSAGES else None
        if text is None:
            text = self.render_exact(context)
        return text if final is None else _cut_at_tag(text, final)

    def context(
        self, conversation: list[Message], variables: dict[str, Any], special_tokens: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str | None]:
        """What the template sees, and the final message's text if it is to be continued. Raises Unrenderable."""
        if not _REFUSED_VARIABLES.isdisjoint(variables) or not _METHOD_ARGUMENTS.isdisjoint(variables):
            raise Unrenderable("chat_template_kwargs name an argument of the rendering itself")
        if not conversation:
            raise Unrenderable("no messages")
        if not self.knows_developer and any(m["role"] == "developer" for m in conversation):
            conversation = without_developer(conversation)
        kwargs = {k: v for k, v in variables.items() if k in self._accepted}
        final = None
        if kwargs.pop("continue_final_message", False):
            if kwargs.get("add_generation_prompt"):
                raise Unrenderable("continue_final_message together with add_generation_prompt")
            conversation, final = _tag_final(conversation, self.source)
        arguments: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": False}
        return {**special_tokens, **arguments, **kwargs, "messages": conversation}, final

    def render_exact(self, context: dict[str, Any]) -> str:
        """By jinja2. Raises TemplateRefusal."""
        try:
            return self._compiled.render(context)
        except Exception as exc:  # a template is foreign code: it may raise anything, and only this request is hurt
            raise TemplateRefusal(f"{type(exc).__name__}: {exc}"[:200]) from exc

    @functools.cached_property
    def wants_system_first(self) -> bool:
        """Does it refuse a second system message? vLLM then merges them for /v1/messages; tried as vLLM tries it."""
        plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        said = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            plain.from_string(self.source).render(messages=said, add_generation_prompt=False)
        except Exception:  # vLLM looks for TemplateError only, and does not start on any other
            return True
        return False

    def render_trial(self, context: dict[str, Any]) -> str:
        """By minijinja, whether it is trusted or not. Raises anything."""
        return (self._fast or _Fast(self.source)).render(context)

    def trust_fast(self) -> None:
        """From now on minijinja renders: it was seen to give the same text."""
        self._fast = _Fast(self.source)

    def _render_fast(self, context: dict[str, Any]) -> str | None:
        fast = self._fast
        if fast is None:
            return None
        try:
            text = fast.render(context)
        except Exception:  # jinja2 has the last word on what is an error
            return None
        self._until_sample -= 1
        if self._until_sample <= 0:
            self._until_sample, self._sample = SAMPLE_EVERY, (context, text)
        return text

    def take_sample(self) -> tuple[dict[str, Any], str] | None:
        """A rendering to be checked by `check`, now and then; it is given out once."""
        sample, self._sample = self._sample, None
        return sample

    def check(self, sample: tuple[dict[str, Any], str]) -> bool:
        """Does jinja2 give the same text? If not, it renders from now on."""
        context, text = sample
        try:
            same = self.render_exact(context) == text
        except TemplateRefusal:
            same = False
        if not same:
            log.error("minijinja rendered a chat otherwise than jinja2: no longer used for this template")
            self._fast = None
        return same


def _tag_final(conversation: list[Message], source: str) -> tuple[list[Message], str]:
    last = dict(conversation[-1])
    content = last.get("content")
    if content is None or "content" not in source:
        raise Unrenderable("continue_final_message without a final content")
    if isinstance(content, list):
        parts = [dict(part) for part in content]
        for part in reversed(parts):
            if "text" in part:
                final = part["text"]
                part["text"] = final + _CONTINUE_TAG
                break
        else:
            raise Unrenderable("continue_final_message without a final text")
        last["content"] = parts
    else:
        final = content
        last["content"] = content + _CONTINUE_TAG
    return [*conversation[:-1], last], final


def _cut_at_tag(text: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise TemplateRefusal("the final message does not appear in the rendered chat")
    at = text.rindex(tag)
    if text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:at]
    return text[:at].rstrip()  # the template trimmed the message
