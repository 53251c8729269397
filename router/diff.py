"""`warmroute diff A.json B.json`: where two requests part, what it costs, and why.

May import: the standard library, msgspec, router.tokenize.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from router.tokenize.load import LoadFailure, load
from router.tokenize.model import ModelOptions, ModelRenderer
from router.tokenize.parting import Parting, Prompt, Render, diff
from router.tokenize.rendering import renderer


def sketch(body: dict[str, Any]) -> Prompt:
    """Without a tokenizer: the parts of the prompt in a plausible order."""
    parts: list[str] = []
    if body.get("tools"):
        parts.append(json.dumps(body["tools"]))
    leading = [body[name] for name in ("system", "instructions", "prompt", "input") if body.get(name)]
    parts += [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in leading]
    for message in body.get("messages") or []:
        content = message.get("content") if isinstance(message, dict) else None
        rest = {k: v for k, v in message.items() if k not in ("role", "content")} if isinstance(message, dict) else {}
        said = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        role = message.get("role") if isinstance(message, dict) else ""
        parts.append(f"<{role}>\n{said}" + (json.dumps(rest, ensure_ascii=False) if rest else ""))
    return Prompt(text="\n".join(parts), ids=None)


def _read(path: str) -> dict[str, Any]:
    value = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def _print(found: Parting, *, block_size_tokens: int) -> None:
    about = "" if found.exact else "about "
    print_line = sys.stdout.write
    print_line(f"cause        {found.cause}: {found.advice}\n")
    print_line(f"shared       {about}{found.shared_tokens} of {found.a_tokens} (A) and {found.b_tokens} (B) tokens\n")
    print_line(
        f"blocks       {found.shared_blocks} shared, {found.lost_blocks} computed again (of {block_size_tokens})\n"
    )
    if found.cause not in ("none", "continuation"):
        print_line(f"A            {json.dumps(found.around_a, ensure_ascii=False)}\n")
        print_line(f"B            {json.dumps(found.around_b, ensure_ascii=False)}\n")
    if not found.exact:
        print_line(
            "             (no --tokenizer: tokens are estimated and the order of the prompt's parts is assumed)\n"
        )


def run(argv: Sequence[str]) -> int:
    """`warmroute diff`. 0: equal or a continuation; 1: they part; 2: bad input."""
    parser = argparse.ArgumentParser(prog="warmroute diff", description="where two requests part, and why")
    parser.add_argument("a", metavar="A.json", help="one request's JSON body")
    parser.add_argument("b", metavar="B.json", help="the other's")
    parser.add_argument(
        "--tokenizer", help="folder or hub id of the model's tokenizer; without it tokens are estimated"
    )
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block of the pods (16)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    bodies = []
    for path in (args.a, args.b):
        try:
            bodies.append(_read(path))
        except (OSError, ValueError) as exc:
            sys.stderr.write(f"warmroute diff: {path}: {exc}\n")
            return 2
    try:
        render_prompt: Render = sketch
        if args.tokenizer:
            exported = load(args.tokenizer, offline=False, deadline_s=300)
            render_prompt = renderer(ModelRenderer(exported, ModelOptions()))
        found = diff(bodies[0], bodies[1], render_prompt, block_size_tokens=args.block_size)
    except (LoadFailure, ValueError) as exc:
        sys.stderr.write(f"warmroute diff: {exc}\n")
        return 2
    if args.json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(found), ensure_ascii=False) + "\n")
    else:
        _print(found, block_size_tokens=args.block_size)
    return 0 if found.cause in ("none", "continuation") else 1
