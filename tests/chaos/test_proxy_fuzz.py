"""Random exchanges arrive byte-identical both ways. The client is the standard library's, an oracle apart from ours.

Everything is derived from a seed: the pod answers by the seed in a header, the test knows what it will say.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import http.client
import json
import random
import urllib.parse
from dataclasses import dataclass

import pytest

from tests.fakes.fake_pod import FakePod, Served
from tests.fakes.proxy_world import World, eventually, world

WORDS = ["plain", "größe", "日本語テスト", "🧪🚀", "\u202eרtl", "\\n\\t", "x" * 500]


@dataclass(frozen=True)
class Plan:
    """One exchange."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes | None
    pieces: list[int] | None  # chunk lengths of a chunked request; None: Content-Length
    status: int
    reply_headers: list[tuple[str, str]]
    reply: bytes
    framing: str
    writes: list[int]  # how the pod's bytes are cut


def cuts(rng: random.Random, size: int) -> list[int]:
    """Lengths that sum to `size`; small ones for small bodies, so that multi-byte characters are cut."""
    out, left = [], size
    while left:
        step = min(left, rng.choice([1, 2, 3, 10, 100]) if size < 5000 else rng.choice([17, 4096, 65536, 1 << 20]))
        out.append(step)
        left -= step
    return out


def request_body(rng: random.Random) -> tuple[bytes, list[tuple[str, str]]]:
    """A body and the headers that describe it."""
    text = " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 60])))
    plain = json.dumps({"model": "m", "prompt": text}, ensure_ascii=rng.random() < 0.5).encode()
    match rng.randrange(5):
        case 0:
            return gzip.compress(plain, mtime=0), [("Content-Type", "application/json"), ("Content-Encoding", "gzip")]
        case 1:
            part = rng.randbytes(rng.choice([1, 1000, 300_000]))
            body = b'--bnd\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + part
            body += b'\r\n--bnd\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--bnd--\r\n'
            return body, [("Content-Type", "multipart/form-data; boundary=bnd")]
        case 2:
            return rng.randbytes(rng.choice([0, 1, 5000])), [("Content-Type", "application/octet-stream")]
        case _:
            return plain, [("Content-Type", "application/json")]


def reply_body(rng: random.Random) -> tuple[bytes, list[tuple[str, str]]]:
    match rng.randrange(5):
        case 0:
            return gzip.compress(rng.randbytes(3000), mtime=0), [
                ("Content-Encoding", "gzip"),
                ("Content-Type", "text/plain"),
            ]
        case 1:
            return rng.randbytes(rng.choice([0, 1, 100_000])), [("Content-Type", "audio/wav")]
        case _:
            sizes = [1, 3, 20] if rng.random() < 0.97 else [40_000]  # now and then an event of megabytes
            events = [" ".join(rng.choices(WORDS, k=rng.choice(sizes))) for _ in range(rng.randrange(1, 12))]
            body = "".join(f"data: {json.dumps(e, ensure_ascii=False)}\n\n" for e in events) + "data: [DONE]\n\n"
            return body.encode(), [("Content-Type", "text/event-stream; charset=utf-8")]


def make_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    method = rng.choice(["POST"] * 8 + ["GET", "HEAD", "PUT", "DELETE"])
    body, described = request_body(rng) if method in ("POST", "PUT") else (None, [])
    path = rng.choice(["/v1/newthing", "/tokenize", "/v1/a%2Fb", "/v1/audio/transcriptions", "/v1/x//y/../z"])
    query = rng.choice(["", "?a=1", "?q=%e4+%20&&", "?" + urllib.parse.quote("日本"), "?u=http://x/?y"])
    reply, reply_described = reply_body(rng)
    status = rng.choice([200] * 8 + [201, 204, 304, 400, 404, 418, 422, 500])
    framing = rng.choice(["length", "chunked", "chunked", "close"])
    if status == 500 or status in (204, 304):
        framing = "length"
    return Plan(
        method=method,
        target=path + query,
        headers=[
            *described,
            ("X-Seed", str(seed)),
            ("X-Rand", rng.choice(["", "a b", "é".encode().decode("latin-1")])),
        ],
        body=body,
        pieces=cuts(rng, len(body)) if body and rng.random() < 0.5 else None,
        status=status,
        reply_headers=[*reply_described, ("X-One", "1"), ("x-one", "2"), ("Set-Cookie", "a=b; Path=/")],
        reply=b"" if status in (204, 304) else reply,
        framing=framing,
        writes=cuts(rng, 10_000 if len(reply) < 10_000 else 4_000_000),
    )


async def by_plan(served: Served) -> None:
    """The pod: its bytes are cut anywhere, framing included."""
    plan = make_plan(int(served.received.header("x-seed") or 0))
    head = [f"HTTP/1.1 {plan.status} Said"] + [f"{k}: {v}" for k, v in plan.reply_headers]
    wire = plan.reply
    if plan.framing == "chunked":
        head.append("Transfer-Encoding: chunked")
        rng, at, wire = random.Random(plan.target), 0, b""
        for size in cuts(rng, len(plan.reply)):
            wire += b"%x\r\n%b\r\n" % (size, plan.reply[at : at + size])
            at += size
        wire += b"0\r\n\r\n"
    elif plan.framing == "length":
        if plan.status != 204:
            head.append(f"Content-Length: {len(plan.reply)}")
    else:
        head.append("Connection: close")
        served.close()
    if plan.method == "HEAD":
        wire = b""
    data = ("\r\n".join(head) + "\r\n\r\n").encode("latin-1") + wire
    at = 0
    for n, size in enumerate([*plan.writes, len(data)]):
        if at >= len(data):
            break
        step = size if n < 200 else len(data)  # the first few hundred bytes in crumbs, the rest at once
        await served.write(data[at : at + step])
        at += step
        if n % 7 == 0:
            await asyncio.sleep(0)


def exchange(port: int, seeds: list[int]) -> list[str]:
    """Some exchanges on one connection; what was wrong with them."""
    wrong = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for seed in seeds:
        plan = make_plan(seed)
        connection.putrequest(plan.method, plan.target, skip_accept_encoding=True)
        for name, value in plan.headers:
            connection.putheader(name, value.encode("latin-1"))
        if plan.body is not None:
            if plan.pieces is None:
                connection.putheader("Content-Length", str(len(plan.body)))
                connection.endheaders(plan.body)
            else:
                connection.putheader("Transfer-Encoding", "chunked")
                connection.endheaders()
                at = 0
                for size in plan.pieces:
                    connection.send(b"%x\r\n%b\r\n" % (size, plan.body[at : at + size]))
                    at += size
                connection.send(b"0\r\n\r\n")
        else:
            connection.endheaders()
        response = connection.getresponse()
        got = response.read()
        expected = b"" if plan.method == "HEAD" else plan.reply
        if (response.status, got) != (plan.status, expected):
            wrong.append(
                f"seed {seed}: {response.status} with {len(got)} bytes, not {plan.status} with {len(expected)}"
            )
        if response.headers.get_all("X-One") != ["1", "2"] or response.headers["Set-Cookie"] != "a=b; Path=/":
            wrong.append(f"seed {seed}: headers {response.headers.items()}")
        if plan.status not in (204, 304) and plan.framing == "length" and response.headers["Content-Length"] is None:
            wrong.append(f"seed {seed}: no length")
    connection.close()
    return wrong


async def run(w: World, pod: FakePod, seeds: list[int]) -> None:
    gate = asyncio.Semaphore(8)

    async def some(group: list[int]) -> list[str]:
        async with gate:
            return await asyncio.to_thread(exchange, w.port, group)

    groups = [seeds[i : i + 4] for i in range(0, len(seeds), 4)]
    wrong = [line for lines in await asyncio.gather(*map(some, groups)) for line in lines]
    assert not wrong, wrong[:5]
    received = {int(r.header("x-seed") or -1): r for r in pod.requests}
    assert len(pod.requests) == len(seeds)
    for seed in seeds:
        plan, got = make_plan(seed), received[seed]
        assert (got.method, got.target) == (plan.method, plan.target), f"seed {seed}"
        same = hashlib.sha256(got.body).digest() == hashlib.sha256(plan.body or b"").digest()
        assert same, f"seed {seed}: {len(got.body)} bytes, not {len(plan.body or b'')}"
        for name, value in plan.headers:
            assert got.header(name) == value, f"seed {seed}: {name}"
    await eventually(lambda: w.inflight == 0)


async def test_proxy_fuzz_random_exchanges_arrive_byte_identical() -> None:
    pod = FakePod(by_plan)
    async with world(pods=[pod]) as w:
        await run(w, pod, list(range(120)))


@pytest.mark.slow
async def test_proxy_fuzz_two_thousand_exchanges() -> None:
    pod = FakePod(by_plan)
    async with world(pods=[pod]) as w:
        await run(w, pod, list(range(1000, 3000)))
