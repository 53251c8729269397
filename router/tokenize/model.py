"""One model's rendering: a request body to the ids its engine will see. No I/O; CPU only.

May import: the standard library, msgspec, router.core.hashing, and this room but service.py and load.py.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from router.core.hashing import pack_tokens
from router.tokenize.chat import (
    MEDIA_MARK,
    ChatBody,
    ContentFormat,
    Unrenderable,
    normalise,
    render_tools,
    template_variables,
)
from router.tokenize.dialects import MessagesBody, ResponsesBody, Tools, from_messages, from_responses
from router.tokenize.encode import Encoder, Side, truncate
from router.tokenize.export import Exported
from router.tokenize.port import NoTokens, PromptTokens
from router.tokenize.proof import renders_alike
from router.tokenize.template import ChatTemplate, TemplateRefusal

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the pods of a model were started with, as far as it changes prompts."""

    chat_template: str | None = None  # --chat-template: the text itself
    content_format: Literal["auto", "string", "openai"] = "auto"  # --chat-template-content-format
    default_template_kwargs: Mapping[str, Any] = {}  # --default-chat-template-kwargs
    trust_request_template: bool = False  # --trust-request-chat-template
    exclude_tools_when_none: bool = False  # --exclude-tools-when-tool-choice-none
    max_model_len_tokens: int | None = None  # only needed for truncate_prompt_tokens: -1


class CompletionBody(msgspec.Struct):
    """The fields of POST /v1/completions that decide the prompt."""

    prompt: msgspec.Raw = msgspec.Raw(b"null")
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    max_tokens: int | None = 16
    suffix: str | None = None
    prompt_embeds: Any = None
    echo: bool | None = False
    kv_transfer_params: dict[str, Any] | None = None


_chat_decoder = msgspec.json.Decoder(ChatBody)
_responses_decoder = msgspec.json.Decoder(ResponsesBody)
_messages_decoder = msgspec.json.Decoder(MessagesBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_ids = msgspec.json.Decoder(list[TokenId])
_id_lists = msgspec.json.Decoder(list[list[TokenId]])
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])


def _completion_prompt(body: bytes) -> tuple[CompletionBody, str | bytes]:
    """The first prompt of a completions body: text, or packed ids. Raises Unrenderable."""
    parsed = decode(_completion_decoder, body)
    if parsed.prompt_embeds is not None or parsed.suffix is not None:
        raise Unrenderable("prompt_embeds or suffix")
    reused = _reused_ids(parsed.kv_transfer_params)
    if reused is not None and not parsed.echo:
        return parsed, reused
    raw = bytes(parsed.prompt)
    if raw.startswith(b'"'):
        return parsed, decode(_text, raw)
    second = raw[1:].lstrip()[:1] if raw.startswith(b"[") else b""
    if second == b'"':
        return parsed, decode(_texts, raw)[0]
    if second == b"[":
        return parsed, pack_tokens(decode(_id_lists, raw)[0])
    if second in (b"", b"]"):
        raise Unrenderable("no prompt")
    return parsed, pack_tokens(decode(_ids, raw))


def decode(decoder: Any, body: bytes) -> Any:
    """Raises Unrenderable for a body that does not fit; the pod will say what is wrong with it."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Unrenderable(str(exc)[:200]) from exc


def _reused_ids(params: dict[str, Any] | None) -> bytes | None:
    """Ids that a disaggregated prefill stage sent along replace rendering in the decode stage."""
    ids = (params or {}).get("prompt_token_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**32 for i in ids):
        raise Unrenderable("kv_transfer_params.prompt_token_ids is not a list of ids")
    return pack_tokens(ids)


class Truncation(msgspec.Struct, frozen=True):
    """truncate_prompt_tokens as it applies to one request. `side` None: the engine's default, left."""

    limit_tokens: int
    side: Side | None


def truncation(
    wanted: int | None, side: Side | None, *, output_tokens: int, options: ModelOptions
) -> Truncation | None:
    """Raises Unrenderable if -1 ("as much as the model takes") is asked for and its length is not known."""
    if wanted is None:
        return None
    if wanted < 0:
        if options.max_model_len_tokens is None:
            raise Unrenderable("truncate_prompt_tokens -1 and the model's length is not known")
        wanted = max(options.max_model_len_tokens - (1 if output_tokens else 0), 0)
    return Truncation(limit_tokens=wanted, side=side)


class TextJob:
    """A rendered prompt on its way to ids. `missing_chars` is what encoding is left; `finish` does it."""

    def __init__(
        self, encoder: Encoder, text: str, *, add_special_tokens: bool, cut: Truncation | None, goes_on: bool = False
    ) -> None:
        self._encoder = encoder
        self._draft = encoder.draft(text)
        self.known_chars = len(text) - self._draft.missing_chars
        self._add_special_tokens = add_special_tokens
        self._cut = cut
        self._goes_on = goes_on

    @property
    def text(self) -> str:
        return "".join(self._draft.pieces)

    @property
    def missing_chars(self) -> int:
        return self._draft.missing_chars

    def finish(self) -> PromptTokens:
        ids = self._encoder.complete(self._draft)
        if self._goes_on:
            return PromptTokens(
                packed=self._encoder.open_beginning(ids) if self._add_special_tokens else ids, partial=True
            )
        cut = self._cut
        if self._add_special_tokens:
            # vLLM's default truncation happens in the tokenizer, which keeps room for BOS; a named side cuts afterwards
            ids = self._encoder.wrap(
                ids, limit_tokens=cut.limit_tokens if cut is not None and cut.side is None else None
            )
        if cut is not None:
            ids = truncate(ids, cut.limit_tokens, cut.side or "left")
        return PromptTokens(packed=ids)


Rendered = TextJob | PromptTokens | NoTokens


class ModelRenderer:
    """Built in a worker thread (a big tokenizer takes seconds); used from any thread. Raises ValueError."""

    def __init__(self, exported: Exported, options: ModelOptions, *, cache_max_bytes: int = 128 * 1024 * 1024) -> None:
        self.options = options
        self.unrenderable = exported.unrenderable
        self.encoder = Encoder(
            exported.tokenizer_json, cuts=exported.cuts, borders=exported.borders, cache_max_bytes=cache_max_bytes
        )
        self._special = exported.special_tokens
        self._named = exported.chat_templates
        self._processor_template = exported.processor_template
        self._compiled: dict[str, ChatTemplate] = {}
        for source in (options.chat_template, exported.processor_template, *exported.chat_templates.values()):
            if source is not None:
                template = self._template(source)
                if renders_alike(template, self._special):
                    template.trust_fast()

    def _template(self, source: str) -> ChatTemplate:
        compiled = self._compiled.get(source)
        if compiled is None:
            forced = self.options.content_format
            chosen: ContentFormat | None = None if forced == "auto" else forced
            try:
                compiled = ChatTemplate(source, content_format=chosen)
            except Exception as exc:  # jinja2 raises more than TemplateError on hostile source (RecursionError, ...)
                raise Unrenderable(f"the chat template does not compile: {exc}"[:200]) from exc
            if len(self._compiled) > 32:  # only request templates can make it grow
                self._compiled.clear()
            self._compiled[source] = compiled
        return compiled

    def _choose(self, requested: str | None, *, has_tools: bool) -> ChatTemplate:
        if requested is not None and not self.options.trust_request_template:
            raise Unrenderable("chat_template in the request")
        given = requested or self.options.chat_template
        if given is not None:
            return self._template(self._named.get(given, given) if len(self._named) > 1 else given)
        if not has_tools and self._processor_template is not None:
            return self._template(self._processor_template)
        name = "tool_use" if has_tools and "tool_use" in self._named else "default"
        if name not in self._named:
            raise Unrenderable("the model has no chat template")
        return self._template(self._named[name])

    def chat(self, body: bytes) -> Rendered:
        """For POST /v1/chat/completions. Raises Unrenderable, TemplateRefusal."""
        parsed = decode(_chat_decoder, body)
        return self.chat_body(parsed, render_tools(parsed.tools))

    def responses(self, body: bytes) -> Rendered:
        """For POST /v1/responses. Raises Unrenderable, TemplateRefusal."""
        return self.chat_body(*from_responses(decode(_responses_decoder, body)))

    def messages(self, body: bytes) -> Rendered:
        """For POST /v1/messages. Raises Unrenderable, TemplateRefusal."""
        parsed = decode(_messages_decoder, body)
        merge = any(self._choose(None, has_tools=tools).wants_system_first for tools in (False, True))
        disabled = (parsed.thinking or {}).get("type") == "disabled"
        effort = self._disabled_effort if disabled else "none"
        return self.chat_body(*from_messages(parsed, merge_system=merge, disabled_effort=effort))

    @functools.cached_property
    def _disabled_effort(self) -> Literal["none", "low"]:
        """What vLLM sends for thinking "disabled": "low" if the template refuses "none" or takes it for an effort."""

        def probe(effort: str) -> bytes | None:
            said = [{"role": "user", "content": "Hi"}]
            try:
                job = self.chat_body(ChatBody(messages=said, reasoning_effort=effort), None)
            except (Unrenderable, TemplateRefusal):
                return None
            return job.finish().packed if isinstance(job, TextJob) else None

        none = probe("none")
        efforts = ("low", "medium", "high", "xhigh", "max")
        return "low" if none is None or any(probe(effort) == none for effort in efforts) else "none"

    def chat_body(self, body: ChatBody, tools: Tools) -> Rendered:
        """For a parsed chat and its rendered tools. Raises Unrenderable, TemplateRefusal."""
        reused = _reused_ids(body.kv_transfer_params)
        if reused is not None:
            return PromptTokens(packed=reused)
        if self.unrenderable is not None:
            raise Unrenderable(f"rendered in code by the engine: {self.unrenderable}")
        if body.tool_choice == "none" and self.options.exclude_tools_when_none:
            tools = None
        variables = template_variables(body, tools, self.options.default_template_kwargs)
        template = self._choose(body.chat_template, has_tools=variables.get("tools") is not None)
        conversation, media = normalise(body.messages, template.content_format)
        text = template.render(conversation, variables, self._special)
        if media:
            return self._before_media(text, add_special_tokens=body.add_special_tokens)
        output_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens or 0
        cut = truncation(
            body.truncate_prompt_tokens, body.truncation_side, output_tokens=output_tokens, options=self.options
        )
        return TextJob(self.encoder, text, add_special_tokens=body.add_special_tokens, cut=cut)

    def _before_media(self, text: str, *, add_special_tokens: bool) -> TextJob | NoTokens:
        """The text before the last special token that precedes the first media part cannot change any more."""
        known, mark, _ = text.partition(MEDIA_MARK)
        settled = self.encoder.settled_chars(known) if mark else 0
        if not settled:
            return NoTokens("media", "nothing is known before the first media part")
        return TextJob(self.encoder, known[:settled], add_special_tokens=add_special_tokens, cut=None, goes_on=True)

    def due_check(self) -> Callable[[], bool] | None:
        """Now and then, a check of a live request against the slow, plain way; to be run in the pool."""
        text = self.encoder.take_sample()
        if text is not None:
            return functools.partial(self.encoder.check, text)
        for template in tuple(self._compiled.values()):
            sample = template.take_sample()
            if sample is not None:
                return functools.partial(template.check, sample)
        return None

    def details(self) -> dict[str, Any]:
        """For /ready details, JSON-able."""
        counts = self.encoder.counts
        return {
            "piece_cuts": [name for name in ("special", "words") if getattr(self.encoder.cuts, name)],
            "piece_cache_bytes": self.encoder.cache.size_bytes,
            "fast_templates": sum(t.is_fast for t in self._compiled.values()),
            "templates": len(self._compiled),
            "checked": counts.texts_checked,
            "differed": counts.texts_differed,
            **({"unrenderable": self.unrenderable} if self.unrenderable else {}),
        }


def completion(renderer: ModelRenderer | NoTokens, body: bytes) -> Rendered:
    """For POST /v1/completions; of a batch, its first prompt. Raises Unrenderable."""
    parsed, prompt = _completion_prompt(body)
    options = ModelOptions() if isinstance(renderer, NoTokens) else renderer.options
    cut = truncation(
        parsed.truncate_prompt_tokens, parsed.truncation_side, output_tokens=parsed.max_tokens or 0, options=options
    )
    if isinstance(prompt, bytes):
        return PromptTokens(packed=prompt if cut is None else truncate(prompt, cut.limit_tokens, cut.side or "left"))
    if isinstance(renderer, NoTokens):
        return renderer
    return TextJob(renderer.encoder, prompt, add_special_tokens=parsed.add_special_tokens, cut=cut)
