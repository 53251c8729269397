"""`warmroute explain`: ask a running router what it would do with a request, and print the terms as a table.

May import: the standard library, aiohttp, rich.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

TIMEOUT_S = 30.0
FIGURES_WIDTH = 100  # columns beside the pod's name, which is never cut: a narrow terminal breaks lines instead
_WHERE = "give the router's admin port as --url http://HOST:PORT"
_HEADS = ("matched", "to do", "placed", "queue s", "own s", "regret s", "KV s", "LoRA s", "company", "price")
_WHY = {
    "prefix": "* the least price; among quiet pods that hold nearly all of it, the first in the prompt's own order",
    "placement": "* nobody holds it: the fewest tokens of such prompts placed lately, among pods near the least price",
    "approximate": "* by this router's own memory of the request's text, for its tokens are not known",
}


def run(argv: list[str]) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="warmroute explain", description="what a running router would do with a request, and why"
    )
    parser.add_argument("body", help="file with the request's JSON body; - for standard input")
    parser.add_argument("--url", default="http://127.0.0.1:9090", help="the router's admin URL (default: %(default)s)")
    parser.add_argument("--endpoint", default="/v1/chat/completions", help="path it would be sent to")
    parser.add_argument("--api-key", default=None, help="if the router asks for one")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="header it would be sent with, such as the tenant's; repeatable",
    )
    args = parser.parse_args(argv)
    if not args.endpoint.startswith("/"):
        parser.error(f"--endpoint {args.endpoint} must be a path, such as /v1/completions")
    if wrong := [given for given in args.header if not given.partition(":")[0].strip() or ":" not in given]:
        parser.error(f"--header {wrong[0]} must be NAME:VALUE")
    try:
        raw = sys.stdin.buffer.read() if args.body == "-" else Path(args.body).read_bytes()
    except OSError as exc:
        sys.stderr.write(f"warmroute explain: {args.body} cannot be read: {exc.strerror}\n")
        return 2
    headers = {"Content-Type": "application/json"}
    for given in args.header:
        name, _, value = given.partition(":")
        headers[name.strip()] = value.strip()
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    try:
        status, answer = asyncio.run(_ask(args.url.rstrip("/") + "/debug/route", args.endpoint, raw, headers))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:
        sys.stderr.write(f"warmroute explain: no answer from {args.url}: {type(exc).__name__}; {_WHERE}\n")
        return 1
    if status != 200 or "workers" not in answer:
        error = answer.get("error") if isinstance(answer, dict) else None
        says = error.get("message") if isinstance(error, dict) else answer
        sys.stderr.write(f"warmroute explain: the router answered {status}: {says}\n")
        return 1
    show(answer)
    return 0


async def _ask(url: str, endpoint: str, raw: bytes, headers: dict[str, str]) -> tuple[int, Any]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, params={"endpoint": endpoint}, data=raw, headers=headers) as reply,
    ):
        return reply.status, await reply.json(content_type=None)


def show(answer: dict[str, Any]) -> None:
    """Print one decision: a line a worker, cheapest first."""
    longest_name = max((len(row["pod"]) for row in answer["workers"]), default=0)
    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, longest_name + FIGURES_WIDTH))
    choice = answer["choice"].get("reason")
    goes = f"to {answer['chosen_pod']} ({choice})" if answer["chosen_pod"] else f"refused ({choice})"
    console.print(f"model {answer['model']}, policy {answer['policy']}: {goes}", markup=False)
    for line in _trial(answer):
        console.print(line, markup=False)
    if not answer["workers"]:
        console.print("no pod that is known serves this model; /ready and /debug/pods say which pods there are and why")
        return
    console.print(f"prompt: {_prompt(answer)}; {answer['crowd_requests']} in flight share it", markup=False)
    if answer.get("would_wait"):
        console.print("every pod has more to compute than --overload-prefill-s: it would wait in the router first")
    table = Table("pod", *(Column(head, justify="right") for head in _HEADS), box=None, pad_edge=False)
    for row in sorted(answer["workers"], key=lambda r: float(r["terms"]["price"])):
        t = row["terms"]
        rank = f" rank {row['rank']}" if row["rank"] else ""
        table.add_row(
            Text(row["pod"].removeprefix("http://") + rank + " *" * row["chosen"], no_wrap=True),
            str(row["matched_tokens"]),
            str(row["uncached_tokens"]),
            str(row["placed_tokens"]),
            *(f"{t[k]:.3f}" for k in ("queue_s", "own_s", "regret_s", "kv_s", "adapter_s")),
            f"{t['company']:.0f}",
            f"{t['price']:.3f}",
        )
    console.print(table)
    for row in answer["workers"]:
        if any((theirs := row.get("peers") or {}).values()):
            console.print(
                f"of {row['pod'].removeprefix('http://')}, other routers have: {_counts(theirs)}", markup=False
            )
    if answer["policy"] == "prefix" and (why := _WHY.get(choice or "")):
        console.print(why)
    console.print("price of the policy prefix = (queue + own + regret + KV + LoRA) x company (docs/policies.md)")


def _trial(answer: dict[str, Any]) -> list[str]:
    """What --control and --shadow add."""
    lines = []
    if control := answer.get("control"):
        lines.append(f"control group: {control['share_ratio']:.2%} of the requests go by {control['policy']} instead")
    if shadow := answer.get("shadow"):
        reason = shadow["choice"].get("reason")
        where = f"to {shadow['chosen_pod']}" if shadow["chosen_pod"] else "nowhere"
        lines.append(f"shadow: policy {shadow['policy']} would have sent it {where} ({reason})")
    return lines


def _counts(theirs: dict[str, int]) -> str:
    return (
        f"{theirs['inflight_requests']} requests in flight, {theirs['prefill_tokens']} tokens to compute,"
        f" {theirs['placed_tokens']} placed lately"
    )


def _prompt(answer: dict[str, Any]) -> str:
    tokens = answer.get("tokens") or {}
    if tokens.get("exact", True):
        return f"{answer['prompt_tokens']} tokens"
    detail = f": {tokens['detail']}" if tokens.get("detail") else ""
    return f"tokens not known ({tokens.get('reason')}{detail})"
