"""The port towards the pods: one suite over our own pool and the aiohttp reference, against pods that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator

import pytest

from router.ops import Metrics
from router.proxy.limits import ProxyLimits
from router.proxy.pool import Pool
from router.proxy.upstream import AiohttpUpstream, Upstream, UpstreamFailed, UpstreamRequest
from tests.fakes.fake_pod import FakePod, Served, echo
from tests.fakes.proxy_world import eventually, free_port

KINDS = {"pool": Pool, "aiohttp": AiohttpUpstream}


@pytest.fixture(params=sorted(KINDS))
async def upstream(request: pytest.FixtureRequest) -> AsyncIterator[Upstream]:
    made = KINDS[request.param](ProxyLimits(connect_limit_s=2.0, pod_keepalive_s=1.0), Metrics())
    yield made
    await made.close()


def ask(pod: FakePod, method: str = "POST", target: str = "/v1/x", body: bytes | None = b"{}") -> UpstreamRequest:
    return UpstreamRequest(
        method=method, url=pod.url, target=target, headers=[(b"Content-Type", b"application/json")], body=body
    )


async def read_all(upstream: Upstream, request: UpstreamRequest) -> tuple[int, bytes]:
    reply = await upstream.send(request)
    try:
        whole = b""
        while piece := await reply.read():
            whole += piece
        return reply.status, whole
    finally:
        reply.close()


def raw(data: bytes, *, then: str = "close") -> FakePod:
    """A pod that answers these bytes, then closes, resets, or keeps the connection."""

    async def script(served: Served) -> None:
        await served.write(data)
        if then == "close":
            served.close()
        elif then == "reset":
            await asyncio.sleep(0.05)
            served.reset()

    return FakePod(script)


async def test_a_connection_is_reused_after_a_whole_reply(upstream: Upstream) -> None:
    async with FakePod(echo) as pod:
        for _ in range(3):
            status, _ = await read_all(upstream, ask(pod))
            assert status == 200
        assert pod.connections == 1


async def test_a_large_body_arrives_whole(upstream: Upstream) -> None:
    body = os.urandom(5_000_000)
    async with FakePod(echo) as pod:
        await read_all(upstream, ask(pod, body=body))
        assert pod.bodies == [body]


@pytest.mark.parametrize("seed", range(20))
async def test_any_cut_of_a_chunked_reply_gives_the_same_bytes(upstream: Upstream, seed: int) -> None:
    rng = random.Random(seed)
    chunks = [rng.randbytes(rng.choice([1, 2, 7, 100, 70_000])) for _ in range(rng.randrange(1, 12))]
    wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire += b"".join(b"%x;ext=1\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\nX-Trailer: dropped\r\n\r\n"

    async def script(served: Served) -> None:
        at = 0
        while at < len(wire):
            step = rng.choice([1, 2, 3, 50, 5000, 100_000])
            await served.write(wire[at : at + step])
            at += step
            if rng.random() < 0.3:
                await asyncio.sleep(0)

    async with FakePod(script) as pod:
        for _ in range(2):
            assert await read_all(upstream, ask(pod)) == (200, b"".join(chunks))
        assert pod.connections == 1


async def test_interim_replies_are_swallowed(upstream: Upstream) -> None:
    wire = b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    async with raw(wire + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") as pod:
        assert await read_all(upstream, ask(pod)) == (200, b"ok")


@pytest.mark.parametrize(
    ("method", "status", "extra"),
    [("HEAD", 200, b"Content-Length: 7\r\n"), ("GET", 204, b""), ("GET", 304, b"Content-Length: 9\r\n")],
)
async def test_replies_without_a_body(upstream: Upstream, method: str, status: int, extra: bytes) -> None:
    async with raw(b"HTTP/1.1 %d X\r\n%b\r\n" % (status, extra), then="keep") as pod:
        for _ in range(2):
            assert await read_all(upstream, ask(pod, method, body=None)) == (status, b"")
        assert pod.connections == 1


async def test_a_reply_that_ends_with_the_connection(upstream: Upstream) -> None:
    async with raw(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it") as pod:
        reply = await upstream.send(ask(pod))
        assert reply.delimited_by_close
        reply.close()
        assert await read_all(upstream, ask(pod)) == (200, b"all of it")
        assert pod.connections == 2


MALFORMED = {
    "not http": b"SSH-2.0-OpenSSH\r\n\r\n",
    "status 99": b"HTTP/1.1 99 No\r\nContent-Length: 0\r\n\r\n",
    "status 700": b"HTTP/1.1 700 No\r\nContent-Length: 0\r\n\r\n",
    "status text": b"HTTP/1.1 abc No\r\n\r\n",
    "header without colon": b"HTTP/1.1 200 OK\r\nbroken header\r\nContent-Length: 0\r\n\r\n",
    "length not a number": b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\nok",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok!",
    "bad chunk size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n0\r\n\r\n",
    "endless header": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
}


@pytest.mark.parametrize("what", sorted(MALFORMED))
async def test_h13_a_malformed_reply_fails_that_request_only(upstream: Upstream, what: str) -> None:
    async with raw(MALFORMED[what], then="keep") as bad, FakePod(echo) as good:
        with pytest.raises(UpstreamFailed) as failed:
            await read_all(upstream, ask(bad))
        assert failed.value.kind == "malformed"
        assert (await read_all(upstream, ask(good)))[0] == 200
        await eventually(lambda: not bad.open, what="the bad connection is dropped")


@pytest.mark.parametrize("then", ["close", "reset"])
@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n0\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Le",
    ],
)
async def test_a_cut_reply_never_ends_cleanly(upstream: Upstream, data: bytes, then: str) -> None:
    async with raw(data, then=then) as pod:
        with pytest.raises(UpstreamFailed):
            await read_all(upstream, ask(pod))


async def test_nobody_listens(upstream: Upstream) -> None:
    request = UpstreamRequest(method="POST", url=f"http://127.0.0.1:{free_port()}", target="/", headers=[], body=b"{}")
    with pytest.raises(UpstreamFailed) as failed:
        await upstream.send(request)
    assert failed.value.kind == "connect"


async def test_a_fresh_connection_that_breaks_may_have_run_the_request(upstream: Upstream) -> None:
    async with raw(b"") as pod:
        with pytest.raises(UpstreamFailed) as failed:
            await upstream.send(ask(pod))
        assert failed.value.kind == "reset"


async def test_a_reused_connection_that_breaks_is_ambiguous(upstream: Upstream) -> None:
    async def script(served: Served) -> None:
        if served.number == 0:
            await echo(served)
        else:
            served.reset()

    async with FakePod(script) as pod:
        await read_all(upstream, ask(pod))
        with pytest.raises(UpstreamFailed) as failed:
            await upstream.send(ask(pod))
        assert failed.value.kind == "ambiguous"
        assert len(pod.requests) == 2


async def test_a_cancelled_send_closes_the_connection(upstream: Upstream) -> None:
    closed = asyncio.Event()

    async def script(served: Served) -> None:
        await served.wait_closed_by_peer()
        closed.set()

    async with FakePod(script) as pod:
        task = asyncio.create_task(upstream.send(ask(pod)))
        await eventually(lambda: pod.requests)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.wait_for(closed.wait(), 10)


async def test_closing_a_reply_early_breaks_the_connection(upstream: Upstream) -> None:
    async def script(served: Served) -> None:
        await served.begin_stream()
        await served.event({"n": 1})
        await served.wait_closed_by_peer()

    async with FakePod(script) as pod:
        reply = await upstream.send(ask(pod))
        assert await reply.read()
        reply.close()
        await eventually(lambda: not pod.open)


async def test_a_reader_that_is_slow_holds_the_pod_back(upstream: Upstream) -> None:
    written = 0

    async def script(served: Served) -> None:
        nonlocal written
        await served.begin_stream()
        for _ in range(4000):
            await served.chunk(b"x" * 16384)
            written += 16384
        await served.end()

    async with FakePod(script) as pod:
        reply = await upstream.send(ask(pod))
        last = -1
        while written != last:  # until the pod is stuck
            last = written
            await asyncio.sleep(0.3)
        assert written < 40_000_000  # of 65 MB: the kernel's buffers and a little of ours
        total = 0
        while piece := await reply.read():
            total += len(piece)
        reply.close()
        assert total == 4000 * 16384


async def test_idle_connections_are_closed_before_the_pod_would(upstream: Upstream) -> None:
    short = type(upstream)(ProxyLimits(pod_keepalive_s=0.2), Metrics())  # type: ignore[call-arg]
    async with FakePod(echo) as pod:
        await read_all(short, ask(pod))
        await eventually(lambda: not pod.open, within_s=20)
    await short.close()


async def test_the_target_goes_out_as_it_came() -> None:
    """The reference cannot do this for every target: yarl drops an empty query and what follows `#`."""
    pool = Pool(ProxyLimits(), Metrics())
    async with FakePod(echo) as pod:
        for target in ("/v1/x?", "/a%2Fb/../c?q=%20+%E4%F6&&=", "/v1/caf\udcc3\udca9"):
            await read_all(pool, ask(pod, "GET", target, None))
        got = [r.raw_head.split(b" ")[1] for r in pod.requests]
        assert got == [b"/v1/x?", b"/a%2Fb/../c?q=%20+%E4%F6&&=", "/v1/café".encode()]
    await pool.close()


async def test_header_bytes_go_out_as_they_came() -> None:
    pool = Pool(ProxyLimits(), Metrics())
    async with FakePod(echo) as pod:
        request = UpstreamRequest(
            method="GET", url=pod.url, target="/", headers=[(b"X-Odd", b"\xe9\xff"), (b"x-oDD", b"2")], body=None
        )
        await read_all(pool, request)
        assert b"\r\nX-Odd: \xe9\xff\r\nx-oDD: 2\r\n" in pod.requests[0].raw_head.decode("latin-1").encode("latin-1")
    await pool.close()
