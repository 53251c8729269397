"""An emulated pod renders a chat as vLLM does; the router's renderer, proven against vLLM, is the oracle."""

from random import Random

import msgspec
import pytest

from loadtest.fleet.text import ModelText
from router.doctor import built_in_chats
from router.tokenize.model import ModelOptions, ModelRenderer
from router.tokenize.port import PromptTokens
from router.tokenize.rendering import render_fully
from tests.unit.tokenize.exported import tiny_exported


@pytest.fixture(scope="module")
def text() -> ModelText:
    return ModelText()


def test_an_empty_part_is_no_line_of_its_own(text: ModelText) -> None:
    parts = [{"type": "text", "text": ""}, {"type": "text", "text": "a"}, "b"]
    whole = text.chat({"messages": [{"role": "user", "content": "a\nb"}]})
    assert text.chat({"messages": [{"role": "user", "content": parts}]}) == whole


def test_the_doctors_chats_have_the_routers_ids(text: ModelText) -> None:
    renderer = ModelRenderer(tiny_exported(), ModelOptions())
    for body in built_in_chats():
        ours = render_fully(renderer, "/v1/chat/completions", body)
        assert isinstance(ours, PromptTokens)
        theirs = text.encode(text.chat(msgspec.json.decode(body)), add_special_tokens=False)
        assert ours.packed == b"".join(i.to_bytes(4, "little") for i in theirs)


@pytest.mark.parametrize("seed", range(20))
def test_prompts_of_plain_words_have_the_tokenizers_ids(text: ModelText, seed: int) -> None:
    rng = Random(seed)
    prompt = "".join(w for _, w in rng.choices(text.plain_words, k=rng.randrange(1, 300)))
    spoilt = [prompt + rng.choice([" ", "\n", "é", " Zq", "<|im_end|>"]), prompt[1:], " " + prompt, prompt.upper()]
    for whole in (prompt, *spoilt):
        for special in (True, False):
            theirs = tuple(text.tokenizer.encode(whole, add_special_tokens=special).ids)
            assert text.encode(whole, add_special_tokens=special) == theirs
