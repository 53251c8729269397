"""What a chat costs from body to block keys, by part, against transformers alone.

    python -m tests.bench_tokenize [--family qwen3] [--family tiny] [--json FILE]

"tiny" has a plain ChatML template; the others are fetched (tests/families.py). CPU milliseconds, best of several
rounds.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from router.core.hashing import chain_keys, root_key
from router.tokenize.chat import ChatBody, normalise, template_variables
from router.tokenize.export import Exported
from router.tokenize.load import load
from router.tokenize.model import ModelOptions, ModelRenderer, _chat_decoder
from router.tokenize.port import PromptTokens
from router.tokenize.rendering import render_fully
from router.tokenize.service import TokenService
from tests.families import family

TINY = Path(__file__).parent / "data" / "tiny-model"
PATH = "/v1/chat/completions"
BLOCK = 16


def chat(seed: int, words_in_all: int) -> list[dict[str, str]]:
    """Made-up prose in forty messages after a system prompt."""
    rng = random.Random(seed)
    syllables = ["ta", "ri", "mon", "el", "ve", "sho", "ka", "ing", "pre", "fi", "con", "der", "ally", "st", "un"]
    words = ["".join(rng.choice(syllables) for _ in range(rng.randint(1, 3))) for _ in range(3000)]
    words += ["the", "of", "and", "to", "in", "is", "that", "it", "was", "for"] * 300
    each = words_in_all // 41
    said = [" ".join(rng.choice(words) for _ in range(each)) + "." for _ in range(41)]
    roles = ["system"] + ["user", "assistant"] * 20
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]


def cpu_ms(work: Callable[[], Any], rounds: int = 7) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time_ns()
        work()
        best = min(best, time.thread_time_ns() - start)
    return best / 1e6


def warm_parts(renderer: ModelRenderer, body: bytes) -> dict[str, float]:
    parsed: ChatBody = _chat_decoder.decode(body)
    template = renderer._choose(None, has_tools=False)

    def rendered() -> str:
        conversation, _ = normalise(parsed.messages, template.content_format)
        return template.render(conversation, template_variables(parsed, None, {}), renderer._special)

    text = rendered()
    encoder = renderer.encoder
    packed = encoder.complete(encoder.draft(text))
    root = root_key(seed="s", model="m")
    return {
        "parse": cpu_ms(lambda: _chat_decoder.decode(body), 50),
        "template": cpu_ms(rendered, 50),
        "pieces": cpu_ms(lambda: encoder.complete(encoder.draft(text)), 50),
        "keys": cpu_ms(lambda: chain_keys(root, packed, BLOCK), 50),
    }


def measure(name: str, exported: Exported, folder: Path, tokens: int) -> dict[str, Any]:
    def fresh() -> ModelRenderer:
        return ModelRenderer(exported, ModelOptions())

    renderer = fresh()
    tried = render_fully(renderer, PATH, msgspec.json.encode({"messages": chat(1, 4100)}))
    assert isinstance(tried, PromptTokens)
    messages = chat(1, 4100 * tokens // tried.count + 41)
    body = msgspec.json.encode({"model": "m", "messages": messages, "stream": True})
    found = render_fully(renderer, PATH, body)
    assert isinstance(found, PromptTokens)

    def cold() -> float:
        anew = fresh()
        return cpu_ms(lambda: render_fully(anew, PATH, body), 1)

    turns = [
        msgspec.json.encode({"model": "m", "messages": [*messages, {"role": "user", "content": c["content"][:750]}]})
        for c in chat(2, 8000)[1:20]
    ]
    new_turn = min(cpu_ms(lambda b=b: render_fully(renderer, PATH, b), 1) for b in turns)  # type: ignore[misc]
    return {
        "model": name,
        "tokens": found.count,
        "body_bytes": len(body),
        "transformers": transformers_ms(folder, messages),
        "cold": min(cold() for _ in range(3)),
        "new_turn": new_turn,
        "warm": cpu_ms(lambda: render_fully(renderer, PATH, body), 50),
        **warm_parts(renderer, body),
    }


def transformers_ms(folder: Path, messages: list[dict[str, str]]) -> float:
    """apply_chat_template and the tokenizer's call, as a plain user of the library would."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def work() -> Any:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    work()
    return cpu_ms(work)


async def worst_stall_ms(source: Path) -> float:
    """The longest time the event loop did not turn while a cold prompt of 1 MB was tokenized."""
    service = TokenService({"m": str(source)})
    await service.start()
    while any(m["state"] == "loading" for m in service.status()["models"].values()):
        await asyncio.sleep(0.01)
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": chat_text(1_000_000)}]})
    worst, last = 0.0, time.perf_counter()
    task = asyncio.ensure_future(service.prompt(model="m", endpoint=PATH, body=body))
    while service._in_pool or not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    await service.close()
    return worst * 1e3


def chat_text(chars: int) -> str:
    text = " ".join(m["content"] for m in chat(3, 8000))
    return (text * (chars // len(text) + 1))[:chars]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    columns = ("tokens", "transformers", "cold", "new_turn", "warm", "parse", "template", "pieces", "keys")
    print("model      " + "".join(f"{c:>13}" for c in columns) + "   (CPU ms)")
    for name in args.family or ["tiny", "qwen3"]:
        folder = TINY if name == "tiny" else family(name)
        exported = load(str(folder), offline=True, deadline_s=600)
        for tokens in (7_000, 30_000):
            row = measure(name, exported, folder, tokens)
            rows.append(row)
            print(f"{name:11}" + "".join(f"{row[c]:13.3f}" if c != "tokens" else f"{row[c]:13d}" for c in columns))
        stall = asyncio.run(worst_stall_ms(folder))
        rows.append({"model": name, "worst_stall_ms": stall})
        print(f"{name:11}longest stall of the event loop during a cold 1 MB prompt: {stall:.1f} ms")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
