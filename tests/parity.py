"""Our ids against the engine's own, feature by feature: the parity table.

    python -m tests.parity --vllm-python .venv-vllm/bin/python --count 1000 [FAMILY ...]

The oracle is tests/vllm_oracle.py. "tiny" is the tiny model; the others are fetched (tests/families.py).
"""

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from router.core.hashing import pack_tokens
from router.tokenize.load import load
from router.tokenize.model import ModelOptions, ModelRenderer
from router.tokenize.port import NoTokens, PromptTokens
from router.tokenize.rendering import render_fully
from tests.chats import mutated, requests
from tests.families import CHAT_FAMILIES, family

TINY = Path(__file__).parent / "data" / "tiny-model"
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]  # or tools with tool_choice unset are refused
ORACLE = Path(__file__).parent / "vllm_oracle.py"


def engine_ids(python: str, folder: Path, rows: list[dict[str, Any]], flags: list[str]) -> list[dict[str, Any]]:
    """What vLLM's own code makes of each row: {"ids": ...} or {"error": ...}."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    command = [python, "-P", str(ORACLE), str(folder), *flags]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=3000, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) != len(rows):
        raise RuntimeError(f"the oracle answered {len(answers)} of {len(rows)}: {done.stderr[-2000:]}")
    return answers


class Tally:
    """Cases per feature: equal, different, not claimed by us, refused by the engine."""

    def __init__(self) -> None:
        self.cells: dict[str, Counter[str]] = {}
        self.differences: list[str] = []

    def add(self, feature: str, row: dict[str, Any], ours: PromptTokens | NoTokens, theirs: dict[str, Any]) -> None:
        cell = self.cells.setdefault(feature, Counter())
        if "error" in theirs:
            cell["refused"] += 1
        elif isinstance(ours, NoTokens):
            cell["not claimed: " + ours.reason] += 1
        elif ours.packed == pack_tokens(theirs["ids"]):
            cell["equal"] += 1
        else:
            cell["DIFFERENT"] += 1
            self.differences.append(f"{feature}: {json.dumps(row, ensure_ascii=False)[:1500]}")

    @property
    def different(self) -> int:
        return len(self.differences)

    def total(self, key: str) -> int:
        return sum(cell[key] for cell in self.cells.values())


def compare(
    python: str,
    folder: Path,
    *,
    seed: int,
    count: int,
    options: ModelOptions | None = None,
    flags: list[str] | None = None,
    mutate: bool = False,
) -> Tally:
    renderer = ModelRenderer(load(str(folder), offline=True, deadline_s=600), options or ModelOptions())
    made = list(requests(seed, count))
    if mutate:
        rng = random.Random(seed)
        made = [(feature, path, mutated(rng, body)) for feature, path, body in made]
    rows = [{"path": path, "body": body} for _, path, body in made]
    tally = Tally()
    for (feature, path, body), row, theirs in zip(
        made, rows, engine_ids(python, folder, rows, TOOLS if flags is None else flags), strict=True
    ):
        tally.add(feature, row, render_fully(renderer, path, msgspec.json.encode(body)), theirs)
    return tally


def record(file: Path, python: str, *, seed: int, count: int) -> None:
    """The golden file of tests/unit/tokenize: what the engine's own code makes of `count` requests."""
    made = list(requests(seed, count))
    answers = engine_ids(python, TINY, [{"path": path, "body": body} for _, path, body in made], TOOLS)
    rows = [
        {"feature": feature, "path": path, "body": body, "ids": answer["ids"]}
        for (feature, path, body), answer in zip(made, answers, strict=True)
        if "ids" in answer
    ]
    file.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=["tiny", *CHAT_FAMILIES])
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutate", action="store_true", help="break bodies: what is still taken must be equal")
    parser.add_argument(
        "--record", type=Path, help="write the tiny model's bodies and ids there (tests/golden) and stop"
    )
    args = parser.parse_args()
    if args.record:
        record(args.record, args.vllm_python, seed=args.seed, count=args.count)
        return 0
    bad = 0
    for name in args.families:
        folder = TINY if name == "tiny" else family(name)
        flags = [] if name == "gptoss" else TOOLS  # harmony has its own parser of tool calls
        tally = compare(args.vllm_python, folder, seed=args.seed, count=args.count, flags=flags, mutate=args.mutate)
        bad += tally.different
        print(f"{name}: equal {tally.total('equal')}, different {tally.different}, refused {tally.total('refused')}")
        for feature, cell in sorted(tally.cells.items()):
            print(f"  {feature:22} {dict(cell)}")
        for line in tally.differences[:5]:
            print("   ", line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
