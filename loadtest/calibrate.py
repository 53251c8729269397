"""`warmroute loadtest calibrate`: measure a live pod and write the profile of the engine model.

Measured with token-id prompts that share nothing: time to first token against prompt length, time between tokens
against the number of streams and their context; block size, blocks and lengths are what the pod says of itself.
The pod should be idle otherwise. May import: the standard library, msgspec, aiohttp, loadtest.profile.
"""

import argparse
import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp
import msgspec

FIRST_ID, IDS = 200, 7000  # token ids that every vocabulary has
LENGTHS_TOKENS = (256, 512, 1024, 2048, 4096, 6144, 8192)
BATCHES = (1, 2, 4, 8, 16)
OUTPUT_TOKENS = 48
REPEATS = 3
TINY = 1e-9
ASSUMED = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}


class PodFacts(msgspec.Struct, frozen=True):
    """What the pod says of itself."""

    model: str
    max_model_len_tokens: int
    block_size_tokens: int
    num_blocks: int


class Prefill(msgspec.Struct, frozen=True):
    """One prompt computed alone."""

    prompt_tokens: int
    ttft_s: float


class Decode(msgspec.Struct, frozen=True):
    """Median time between tokens while `streams` decode with `context_tokens` each."""

    streams: int
    context_tokens: int
    step_s: float


class Fit(msgspec.Struct, frozen=True):
    """The model's constants, as far as a client can see them."""

    prefill_tokens_per_s: float
    attention_equal_context_tokens: float
    t0_s: float
    c_seq_s: float
    c_kv_s: float
    frontend_s: float


class CalibrationError(Exception):
    """The pod cannot be measured; the text says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--url", required=True, help="an idle pod, not a router")
    parser.add_argument("--model", help="a served model; default: the first that the pod lists")
    parser.add_argument("--name", default="measured", help="the profile's name (default: measured)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default: NAME.toml)")
    said = "as the pod was started, which it does not say; assumed unless given"
    parser.add_argument("--max-num-seqs", type=int, help=f"{said} ({ASSUMED['max_num_seqs']})")
    parser.add_argument("--max-num-batched-tokens", type=int, help=f"{said} ({ASSUMED['max_num_batched_tokens']})")


def run(args: argparse.Namespace) -> int:
    """Measure and write. Returns the exit status."""
    out = args.out or Path(f"{args.name}.toml")
    try:
        facts, prefills, decodes = asyncio.run(measure(args.url.rstrip("/"), args.model))
    except CalibrationError as exc:
        print(exc)
        return 1
    given = {name: value for name in ASSUMED if (value := getattr(args, name)) is not None}
    text = profile_text(args.name, facts, fit(prefills, decodes), given)
    out.write_text(text, encoding="utf-8")
    print(text)
    print(f"written to {out}; {len(prefills)} prompts and {len(decodes)} batches measured")
    return 0


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="warmroute loadtest calibrate", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(list(argv)))


async def measure(url: str, model: str | None) -> tuple[PodFacts, list[Prefill], list[Decode]]:
    """All measurements, one after the other. Raises CalibrationError."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        try:
            facts = await _facts(session, url, model)
            rng = Random()
            await _stream(session, url, facts.model, _prompt(rng, 64), 4)
            return facts, await _prefills(session, url, facts, rng), await _decodes(session, url, facts, rng)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, IndexError) as exc:
            raise CalibrationError(f"the pod could not be measured: {type(exc).__name__}") from exc


async def _facts(session: aiohttp.ClientSession, url: str, model: str | None) -> PodFacts:
    async with session.get(url + "/v1/models") as reply:
        models = (await reply.json())["data"]
    chosen = next((m for m in models if model in (None, m["id"])), None)
    if chosen is None:
        raise CalibrationError(f"the pod does not serve {model!r}")
    async with session.get(url + "/metrics") as reply:
        info = re.search(r"vllm:cache_config_info\{([^}]*)\}", await reply.text())
    labels = dict(re.findall(r'(\w+)="([^"]*)"', info.group(1))) if info else {}
    if "num_gpu_blocks" not in labels or "block_size" not in labels:
        raise CalibrationError("the pod's /metrics has no vllm:cache_config_info: is it a vLLM pod, and not a router?")
    length = int(chosen.get("max_model_len") or 4096)
    return PodFacts(chosen["id"], length, int(labels["block_size"]), int(labels["num_gpu_blocks"]))


async def _prefills(session: aiohttp.ClientSession, url: str, facts: PodFacts, rng: Random) -> list[Prefill]:
    out = []
    for length in (n for n in LENGTHS_TOKENS if n < 0.9 * facts.max_model_len_tokens):
        for _ in range(REPEATS):
            first_s, _ = await _stream(session, url, facts.model, _prompt(rng, length), 1)
            out.append(Prefill(length, first_s))
    return out


async def _decodes(session: aiohttp.ClientSession, url: str, facts: PodFacts, rng: Random) -> list[Decode]:
    room = facts.block_size_tokens * facts.num_blocks
    out = []
    for context in (128, min(4096, facts.max_model_len_tokens // 2)):
        for streams in BATCHES:
            if streams * (context + OUTPUT_TOKENS) > 0.8 * room:
                continue
            prompts = [_prompt(rng, context) for _ in range(streams)]
            runs = await asyncio.gather(*(_stream(session, url, facts.model, p, OUTPUT_TOKENS) for p in prompts))
            gaps = [gap for _, stream_gaps in runs for gap in stream_gaps[-OUTPUT_TOKENS // 2 :]]
            if gaps:
                out.append(Decode(streams, context + 3 * OUTPUT_TOKENS // 4, median(gaps)))
    return out


async def _stream(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], output_tokens: int
) -> tuple[float, list[float]]:
    """Seconds to the first event, and the gaps between the following ones."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": output_tokens, "min_tokens": output_tokens, "ignore_eos": True,
        "temperature": 0, "stream": True,
    }  # fmt: skip
    begun = time.perf_counter()
    async with session.post(url + "/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise CalibrationError(f"the pod answered {reply.status} to a completion of {len(prompt)} token ids")
        times = [
            time.perf_counter() - begun
            async for line in reply.content
            if line.startswith(b"data: {") and json.loads(line[6:]).get("choices")
        ]
    return times[0], [b - a for a, b in pairwise(times)]


def _prompt(rng: Random, tokens: int) -> list[int]:
    return rng.choices(range(FIRST_ID, FIRST_ID + IDS), k=tokens)


def fit(prefills: Sequence[Prefill], decodes: Sequence[Decode]) -> Fit:
    """Least squares: TTFT = a + L / R + L^2 / (2 A R); step = t0 + streams * c_seq + streams * context * c_kv.

    The front end's latency is what the first intercept has beyond t0. Nothing is negative.
    """
    by_length: dict[int, list[float]] = {}
    for p in prefills:
        by_length.setdefault(p.prompt_tokens, []).append(p.ttft_s)
    points = [(float(n), median(times)) for n, times in by_length.items()]
    a, per_token_s, per_square_s = least_squares([[1.0, n, n * n] for n, _ in points], [t for _, t in points])
    if per_square_s < 0 or per_token_s <= 0:
        (a, per_token_s), per_square_s = least_squares([[1.0, n] for n, _ in points], [t for _, t in points]), 0.0
    t0, c_seq, c_kv = least_squares(
        [[1.0, float(d.streams), float(d.streams * d.context_tokens)] for d in decodes], [d.step_s for d in decodes]
    )
    t0 = max(t0, TINY)
    rate = 1.0 / max(per_token_s, TINY)
    return Fit(
        prefill_tokens_per_s=rate,
        attention_equal_context_tokens=min(per_token_s / (2 * per_square_s), 1e9) if per_square_s > 0 else 1e9,
        t0_s=t0,
        c_seq_s=max(c_seq, 0.0),
        c_kv_s=max(c_kv, 0.0),
        frontend_s=max(a - t0, 0.0),
    )


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The coefficients that fit best. Raises CalibrationError for too few different points."""
    n = len(rows[0]) if rows else 0
    scale = [max(abs(r[i]) for r in rows) or 1.0 for i in range(n)]
    scaled = [[x / s for x, s in zip(r, scale, strict=True)] for r in rows]
    system = [
        [sum(r[i] * r[j] for r in scaled) for j in range(n)]
        + [sum(r[i] * v for r, v in zip(scaled, values, strict=True))]
        for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(system[k][i]))
        system[i], system[pivot] = system[pivot], system[i]
        if abs(system[i][i]) < 1e-12:
            raise CalibrationError("too few different measurements to fit the model")
        for k in range(n):
            if k != i:
                factor = system[k][i] / system[i][i]
                system[k] = [x - factor * y for x, y in zip(system[k], system[i], strict=True)]
    if not n:
        raise CalibrationError("nothing was measured")
    return [system[i][n] / system[i][i] / scale[i] for i in range(n)]


def profile_text(name: str, facts: PodFacts, found: Fit, given: Mapping[str, int]) -> str:
    """The profile as TOML. `given`: those of ASSUMED that somebody knows."""
    values: dict[str, Any] = {
        "name": name,
        "model": facts.model,
        **{k: float(f"{v:.6g}") for k, v in msgspec.structs.asdict(found).items()},
        "block_size_tokens": facts.block_size_tokens,
        "num_blocks": facts.num_blocks,
        **ASSUMED,
        **given,
        "max_model_len_tokens": facts.max_model_len_tokens,
        "calibrated": False,
        "calibration_note": "constants measured, the whole not yet compared with a load test of the same pod",
    }
    lines = [f"{k} = {json.dumps(v)}" for k, v in values.items()]
    measured = "measured by warmroute loadtest calibrate"
    sources = dict.fromkeys(msgspec.structs.asdict(found), measured) | dict.fromkeys(
        ("block_size_tokens", "num_blocks", "max_model_len_tokens"), "as the pod says"
    )
    sources |= {n: "given on the command line" if n in given else "assumed: the pod does not say" for n in ASSUMED}
    return "\n".join([*lines, "", "[sources]", *(f"{k} = {json.dumps(v)}" for k, v in sources.items())]) + "\n"
