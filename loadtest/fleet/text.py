"""Text in, token ids out, and words for answers: what an emulated pod knows of language.

On purpose a path of its own, not `router.tokenize`: the ids an emulated pod counts are the oracle for the router's.
May import: the standard library, tokenizers, jinja2, transformers (only for a directory of your own).
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

TINY_MODEL = Path(__file__).resolve().parent.parent / "data" / "tiny-model"
"""The tokenizer and template that come with the package."""


class BadMessages(Exception):
    """The messages cannot be rendered; the text says why and becomes the 400 of the emulated pod."""


class ModelText:
    """Tokenizer and chat template of one model directory (`tokenizer.json`, `chat_template.jinja`)."""

    def __init__(self, directory: Path = TINY_MODEL, *, cache_entries: int = 4096, words: int = 1024) -> None:
        self.tokenizer = _load_tokenizer(directory)
        self._template = _load_template(directory)
        self._cache: OrderedDict[tuple[str, bool], tuple[int, ...]] = OrderedDict()
        self._cache_entries = cache_entries
        self.plain_words = self._find_plain_words(words)
        self._words_alone = self._words_come_alone()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of `text`. Whole texts are remembered (a load test repeats them), bounded by count."""
        key = (text, add_special_tokens)
        ids = self._cache.get(key)
        if ids is None:
            ids = self._ids_of_words(text) if self._words_alone else ()
            ids = ids or self._tokenize(text, add_special_tokens)
            self._cache[key] = ids
            if len(self._cache) > self._cache_entries:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return ids

    def _tokenize(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def _ids_of_words(self, text: str) -> tuple[int, ...]:
        """The ids of a text of plain words alone, many times sooner than the tokenizer; none for any other text.

        The pods run on the machine that they are measured on, and load tests send long prompts of such words.
        """
        if not text.startswith(" "):
            return ()
        ids = [self._id_of_word.get(word, -1) for word in text[1:].split(" ")]
        return () if -1 in ids else tuple(ids)

    def _words_come_alone(self) -> bool:
        """Whether this tokenizer makes one id of every plain word wherever it stands, and adds nothing around them."""
        words = [t for _, t in self.plain_words]
        texts = ["".join(Random(n).choices(words, k=500)) for n in range(8)]
        return all(self._ids_of_words(t) == self._tokenize(t, special) for t in texts for special in (True, False))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def chat(self, body: Mapping[str, Any]) -> str:
        """The prompt text of a chat request's body. Raises BadMessages."""
        messages = [_plain_message(m) for m in body["messages"]]
        values: dict[str, Any] = {
            "messages": messages,
            "tools": body.get("tools") or None,
            "add_generation_prompt": body.get("add_generation_prompt", True),
            **(body.get("chat_template_kwargs") or {}),
        }
        going_on = bool(body.get("continue_final_message"))
        if going_on and values["add_generation_prompt"] and "add_generation_prompt" in body:
            raise BadMessages("continue_final_message and add_generation_prompt exclude each other")
        if going_on:
            values["add_generation_prompt"] = False
        try:
            text = self._template.render(**values)
        except jinja2.TemplateError as exc:
            raise BadMessages(f"the chat template refused the messages: {exc}") from exc
        return _cut_after_last_content(text, messages) if going_on else text

    def answer(self, seed: int, length_tokens: int) -> list[int]:
        """`length_tokens` ids of plain words, the same for the same seed.

        Put together and tokenized again they give the same ids, so that a chat's next turn finds them in the cache.
        """
        ids = [i for i, _ in self.plain_words]
        rng = Random(seed)
        start, stride = rng.randrange(len(ids)), 2 * rng.randrange(1, len(ids) // 2) + 1
        return [ids[(start + n * stride) % len(ids)] for n in range(length_tokens)]

    def words_text(self, ids: Iterable[int]) -> str:
        """The text of ids that `answer` gave; only spaces and a-z, so it may stand in JSON as it is."""
        text = self._text_of_word
        return "".join([text[i] for i in ids])

    def _find_plain_words(self, wanted: int) -> list[tuple[int, str]]:
        """Ids that decode to one space and some of a-z, and that come back alone when their text is tokenized."""
        vocabulary = sorted(self.tokenizer.get_vocab(with_added_tokens=False).values())
        texts = self.tokenizer.decode_batch([[i] for i in vocabulary], skip_special_tokens=False)
        words = [(i, t) for i, t in zip(vocabulary, texts, strict=True) if re.fullmatch(r" [a-z]{2,}", t)]
        encoded = self.tokenizer.encode_batch([f"a{t}{t}" for _, t in words], add_special_tokens=False)
        alone = [w for w, e in zip(words, encoded, strict=True) if e.ids[-2:] == [w[0], w[0]]]
        if len(alone) < 16:
            raise ValueError("this tokenizer has too few plain words for emulated answers; use another model directory")
        power = 1 << (min(wanted, len(alone)).bit_length() - 1)  # an odd stride over a power of two visits every word
        self._text_of_word = dict(alone[:power])
        self._id_of_word = {t[1:]: i for i, t in alone[:power]}
        return alone[:power]


def _load_tokenizer(directory: Path) -> Tokenizer:
    """As vLLM does it: transformers may replace a file's pre-tokenizer by its own for the model type.

    The file that comes with the package was saved after that, so the import of transformers is not paid for it.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no tokenizer.json; name a model directory that has one")
    if directory.resolve() == TINY_MODEL:
        return Tokenizer.from_file(str(path))
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(str(directory), local_files_only=True).backend_tokenizer
    assert isinstance(backend, Tokenizer)
    return backend


def _load_template(directory: Path) -> jinja2.Template:
    source: Any = None
    if (directory / "chat_template.jinja").is_file():
        source = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    elif (directory / "tokenizer_config.json").is_file():
        source = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    if not isinstance(source, str):
        raise FileNotFoundError(f"{directory} has no chat template (chat_template.jinja)")
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], keep_trailing_newline=False
    )
    env.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    env.globals["raise_exception"] = _raise
    return env.from_string(source)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _plain_message(message: object) -> dict[str, Any]:
    """One message as templates of content format "string" get it from vLLM."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadMessages("every message must be an object with a role")
    out = {k: v for k, v in message.items() if k not in ("content", "tool_calls")}
    if out["role"] == "developer":
        out["role"] = "system"
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(text for p in content if (text := _part_text(p)))  # as vLLM: an empty part is no line
    elif content is not None and not isinstance(content, str):
        raise BadMessages("message content must be a string, a list of parts or null")
    out["content"] = content or ""
    if message.get("tool_calls"):
        out["tool_calls"] = [_plain_call(c) for c in message["tool_calls"]]
    return out


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BadMessages("an emulated pod takes text parts only")


def _plain_call(call: Any) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = {}
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}


def _cut_after_last_content(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    last = str(messages[-1]["content"]).strip() if messages else ""
    at = text.rfind(last)
    if not last or at < 0:
        raise BadMessages("continue_final_message needs a last message with text")
    return text[: at + len(last)]
