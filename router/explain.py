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
from rich.table import Table

TIMEOUT_S = 30.0


def run(argv: list[str]) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="warmroute explain", description=__doc__)
    parser.add_argument("body", help="file with the request's JSON body; - for standard input")
    parser.add_argument("--url", default="http://127.0.0.1:9090", help="the router's admin URL (default: %(default)s)")
    parser.add_argument("--endpoint", default="/v1/chat/completions", help="path it would be sent to")
    parser.add_argument("--api-key", default=None, help="if the router asks for one")
    args = parser.parse_args(argv)
    raw = sys.stdin.buffer.read() if args.body == "-" else Path(args.body).read_bytes()
    headers = {"Content-Type": "application/json", "x-warmroute-endpoint": args.endpoint}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    try:
        status, answer = asyncio.run(_ask(args.url.rstrip("/") + "/debug/route", raw, headers))
    except (aiohttp.ClientError, OSError, TimeoutError) as exc:
        sys.stderr.write(f"warmroute explain: no answer from {args.url}: {type(exc).__name__}; is it the admin port?\n")
        return 1
    if status != 200 or "workers" not in answer:
        sys.stderr.write(f"warmroute explain: the router answered {status}: {answer}\n")
        return 1
    show(answer)
    return 0


async def _ask(url: str, raw: bytes, headers: dict[str, str]) -> tuple[int, Any]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, data=raw, headers=headers) as reply:
        return reply.status, await reply.json(content_type=None)


def show(answer: dict[str, Any]) -> None:
    """Print one decision: a line a worker, cheapest first."""
    console = Console()
    console.print(
        f"model {answer['model']}  policy {answer['policy']}  prompt {answer['prompt_tokens']} tokens  "
        f"crowd {answer['crowd_requests']}  ->  {answer['chosen_pod']} ({answer['choice'].get('reason')})"
    )
    table = Table("pod", "matched", "uncached", "queue s", "own s", "regret s", "KV s", "x company", "= price")
    for row in sorted(answer["workers"], key=lambda r: float(r["terms"]["price"])):
        t = row["terms"]
        table.add_row(
            row["pod"],
            str(row["matched_tokens"]),
            str(row["uncached_tokens"]),
            *(f"{t[k]:.3f}" for k in ("queue_s", "own_s", "regret_s", "kv_s")),
            f"{t['company']:.0f}",
            f"{t['price']:.3f}",
        )
    console.print(table)
