"""Event streams: H01 to H08, and the rest of their kind: limits, breaks, clients that leave, pods that are gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging

import pytest

from tests.fakes.fake_pod import FakePod, Served, hello_stream
from tests.fakes.proxy_world import World, eventually, world

ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/newthing"]


def request_head(path: str = "/v1/chat/completions", body: bytes = b'{"model":"m","stream":true}') -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


async def test_h01_event_streams_tell_proxies_not_to_buffer() -> None:
    async with world(hello_stream) as w:
        reply = await w.chat(stream=True)
        assert reply.headers["X-Accel-Buffering"] == "no"
        assert reply.headers["Cache-Control"] == "no-cache"
        await reply.read()


async def test_h01_what_the_pod_says_of_buffering_wins() -> None:
    async def script(served: Served) -> None:
        await served.begin_stream(("X-Accel-Buffering", "yes"), ("cache-control", "private"))
        await served.end()

    async with world(script) as w:
        reply = await w.chat(stream=True)
        assert reply.headers.getall("X-Accel-Buffering") == ["yes"]
        assert reply.headers.getall("Cache-Control") == ["private"]


async def test_h01_other_replies_get_neither() -> None:
    async with world() as w:
        reply = await w.chat()
        assert "X-Accel-Buffering" not in reply.headers
        assert "Cache-Control" not in reply.headers


async def test_h01_events_arrive_as_they_are_sent() -> None:
    go = asyncio.Event()

    async def script(served: Served) -> None:
        await served.begin_stream()
        await served.event("first")
        await go.wait()
        await served.event("second")
        await served.end()

    async with world(script) as w:
        reply = await w.chat(stream=True)
        assert await reply.content.readany() == b"data: first\n\n"  # while the pod still waits for us
        go.set()
        assert await reply.content.read() == b"data: second\n\n"


async def test_h02_no_total_limit_but_an_idle_one() -> None:
    async def script(served: Served) -> None:
        await served.begin_stream()
        for n in range(12):
            await served.event({"n": n})
            await asyncio.sleep(0.2)
        await served.wait_closed_by_peer()

    async with world(script, idle_limit_s=1.5) as w:
        got = await w.raw(request_head())
        assert got.count(b'{"n":') == 12  # 2.4 s of events, longer than the idle limit
        assert b'"error"' in got
        assert not got.endswith(b"0\r\n\r\n")
        assert w.metrics.value("warmroute_broken_streams_total", reason="timeout") == 1


async def test_h02_first_byte_limit_is_504() -> None:
    async def script(served: Served) -> None:
        await served.wait_closed_by_peer()

    async with world(script, first_byte_limit_s=0.3) as w:
        reply = await w.chat(stream=True)
        assert reply.status == 504
        assert json.loads(await reply.read())["error"]["type"] == "server_error"
        assert w.bodies() == 1  # it may be running: never sent twice
        assert w.fleet.failures["timeout"] == 1
        await eventually(lambda: w.inflight == 0 and not w.pod.open)


async def test_h02_first_byte_limit_counts_until_the_body_begins() -> None:
    async def script(served: Served) -> None:
        await served.begin_stream()  # as uvicorn: the head at once, the prefill after it
        await served.wait_closed_by_peer()

    async with world(script, first_byte_limit_s=0.5) as w:
        got = await w.raw(request_head())
        assert b'"error"' in got
        assert not got.endswith(b"0\r\n\r\n")


def broken_mid_stream(how: str) -> FakePod:
    async def script(served: Served) -> None:
        await served.begin_stream()
        await served.event({"n": 1})
        await served.event({"n": 2})
        await asyncio.sleep(0.05)
        if how == "reset":
            served.reset()
        elif how == "malformed":
            await served.write(b"zzz\r\n")
            await served.wait_closed_by_peer()
        else:
            served.close()

    return FakePod(script)


@pytest.mark.parametrize("how", ["reset", "close", "malformed"])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_h03_a_broken_stream_says_so_and_has_no_end(how: str, path: str) -> None:
    async with world(pods=[broken_mid_stream(how)]) as w:
        got = await w.raw(request_head(path))
        assert b'{"n": 2}' in got
        assert b"[DONE]" not in got
        assert not got.endswith(b"0\r\n\r\n")
        last = [line for line in got.split(b"\n") if line.startswith(b"data: ")][-1]
        event = json.loads(last[6:])
        if path == "/v1/messages":
            assert event["type"] == "error"
            assert event["error"]["type"] == "api_error"
        elif path == "/v1/responses":
            assert event["type"] == "error"
        else:
            assert event["error"]["code"] == 502
        assert w.bodies() == 1
        await eventually(lambda: w.inflight == 0)
        reason = "malformed" if how == "malformed" else "reset"
        assert w.metrics.value("warmroute_broken_streams_total", reason=reason) == 1


async def test_h03_a_cut_inside_an_event_adds_nothing_to_it() -> None:
    async def script(served: Served) -> None:
        await served.begin_stream()
        await served.event({"n": 1})
        await served.chunk(b'data: {"half')
        await asyncio.sleep(0.05)
        served.reset()

    async with world(script) as w:
        got = await w.raw(request_head())
        assert got.endswith(b'data: {"half\r\n')


async def test_h03_a_cut_reply_with_a_length_stays_short() -> None:
    async def script(served: Served) -> None:
        await served.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        await asyncio.sleep(0.05)
        served.reset()

    async with world(script) as w:
        got = await w.raw(request_head())
        assert got.endswith(b"\r\n\r\n{")


async def test_h03_to_an_http10_client_a_break_is_a_reset() -> None:
    async with world(pods=[broken_mid_stream("close")]) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        writer.write(request_head().replace(b"HTTP/1.1", b"HTTP/1.0"))
        with pytest.raises(ConnectionError):
            await reader.read(-1)
        writer.close()


async def test_h03_an_event_stream_without_length_that_ends_inside_an_event_is_broken() -> None:
    async def script(served: Served) -> None:
        await served.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\ndata: 2")
        served.close()

    async with world(script) as w:
        got = await w.raw(request_head())
        assert b"data: 2" in got
        assert not got.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("extra", [b"Content-Length: 24", b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked"])
async def test_h03_nothing_is_put_into_a_stream_of_known_length_or_a_compressed_one(extra: bytes) -> None:
    """An error event would fill up the length, so that a cut reply looks whole, or be no gzip."""

    async def script(served: Served) -> None:
        event = b"10\r\n%b\r\n" if b"chunked" in extra else b"%b"
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n%b\r\n\r\n" % extra
        await served.write(head)
        await asyncio.sleep(0.05)
        await served.write(event % b'data: {"n": 1}\n\n')
        await asyncio.sleep(0.05)
        served.reset()

    async with world(script, stream_comment_interval_s=0.01) as w:
        got = await w.raw(request_head())
        body = got.partition(b"\r\n\r\n")[2]
        assert body == (b'10\r\ndata: {"n": 1}\n\n\r\n' if b"chunked" in extra else b'data: {"n": 1}\n\n')
        assert w.metrics.value("warmroute_broken_streams_total", reason="reset") == 1


@pytest.mark.parametrize("pieces", [[b"data: 1\n", b"\n"], [b"data: 1\r\n\r", b"\n"], [b"data: 1\r\n", b"\r\n"]])
async def test_h03_where_an_event_ends_does_not_depend_on_the_cuts(pieces: list[bytes]) -> None:
    async def script(served: Served) -> None:
        await served.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for piece in pieces:
            await served.write(piece)
            await asyncio.sleep(0.05)
        served.close()

    async with world(script) as w:
        got = await w.raw(request_head().replace(b"Host: r", b"Host: r\r\nConnection: close"))
        assert got.endswith(b"0\r\n\r\n")


async def test_h04_the_pods_400_to_a_stream_request_is_a_400() -> None:
    async def script(served: Served) -> None:
        await served.reply(400, {"error": {"message": "too hot", "type": "BadRequestError", "code": 400}})

    async with world(script) as w:
        reply = await w.chat(stream=True)
        assert reply.status == 400
        assert reply.content_type == "application/json"
        assert json.loads(await reply.read())["error"]["message"] == "too hot"


async def test_h05_a_silent_prefill_is_not_cut() -> None:
    async def script(served: Served) -> None:
        await served.begin_stream()
        await asyncio.sleep(1.5)  # longer than the idle limit, which is for later
        await served.event("[DONE]")
        await served.end()

    async with world(script, idle_limit_s=0.5) as w:
        assert await (await w.chat(stream=True)).read() == b"data: [DONE]\n\n"


async def test_h05_comments_before_the_first_event_when_asked_for() -> None:
    async def script(served: Served) -> None:
        await served.begin_stream()
        await asyncio.sleep(1.0)
        await served.event("one")
        await asyncio.sleep(0.5)
        await served.event("two")
        await served.end()

    async with world(script, stream_comment_interval_s=0.2) as w:
        got = await (await w.chat(stream=True)).read()
        comments, _, rest = got.partition(b"data: one")
        assert comments.count(b":\n\n") >= 2
        assert comments.replace(b":\n\n", b"") == b""
        assert rest == b"\n\ndata: two\n\n"  # none once the pod has spoken


@pytest.mark.slow
async def test_h05_seventy_silent_seconds() -> None:
    async def script(served: Served) -> None:
        await asyncio.sleep(70)
        await hello_stream(served)

    async with world(script) as w:
        assert (await (await w.chat(stream=True)).read()).endswith(b"data: [DONE]\n\n")


async def endless(served: Served) -> None:
    """Events until the other side goes."""
    await served.begin_stream()
    with contextlib.suppress(ConnectionError):
        while not served.reader.at_eof():
            await served.event({"n": 1})
            await asyncio.sleep(0.01)
    served.close()


async def leave_after(w: World, events: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
    writer.write(request_head())
    got = b""
    while got.count(b"data: ") < events:
        got += await reader.read(4096)
    writer.transport.abort()


async def test_h06_clients_that_leave_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with world(endless) as w:
        await asyncio.gather(*(leave_after(w, 2) for _ in range(50)))
        await eventually(lambda: w.metrics.value("warmroute_client_gone_total") == 50)
        assert w.metrics.value("warmroute_requests_total", endpoint="/v1/chat/completions", status="499") == 50
        assert not [r for r in caplog.records if r.levelno > logging.INFO or r.exc_info]
        lines = [r.fields for r in caplog.records if r.name == "warmroute.access"]  # type: ignore[attr-defined]
        assert [line["status"] for line in lines] == [499] * 50
        assert w.fleet.failures.total() == 0  # nobody's fault


async def test_h07_the_pods_connections_close_with_their_clients() -> None:
    async with world(endless) as w:
        await asyncio.gather(*(leave_after(w, 2) for _ in range(50)))
        await eventually(lambda: not w.pod.open and w.inflight == 0)
        assert w.metrics.value("warmroute_pod_connections") == 0


async def test_h08_a_client_that_leaves_between_events_is_noticed() -> None:
    left = asyncio.Event()

    async def script(served: Served) -> None:
        await served.begin_stream()
        await served.event("one")
        await served.wait_closed_by_peer()
        left.set()

    async with world(script) as w:
        await leave_after(w, 1)
        await asyncio.wait_for(left.wait(), 10)
        await eventually(lambda: w.inflight == 0)


async def test_h08_a_client_that_leaves_during_its_upload_reaches_no_pod() -> None:
    async with world() as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 1000\r\n\r\n{")
        await eventually(lambda: w.app.proxy.inflight == 1)
        writer.transport.abort()
        await eventually(lambda: w.app.proxy.inflight == 0)
        assert w.bodies() == 0
        assert w.metrics.value("warmroute_client_gone_total") == 1
        del reader


async def test_h08_an_upload_the_pod_does_not_read_ends_with_its_client() -> None:
    class Deaf(FakePod):
        async def _serve(self, reader, writer, connection) -> None:  # type: ignore[no-untyped-def]
            await asyncio.sleep(3600)

    async with world(pods=[Deaf()]) as w:
        body = b'{"model":"m","prompt":"' + b"x" * 20_000_000 + b'"}'
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        writer.write(request_head("/v1/completions", body))
        await writer.drain()
        await eventually(lambda: w.inflight == 1)
        writer.transport.abort()
        await eventually(lambda: w.inflight == 0 and w.metrics.value("warmroute_pod_connections") == 0)
        del reader


async def test_streams_of_a_pod_that_is_gone_end_visibly() -> None:
    async def freeze(served: Served) -> None:
        await served.begin_stream()
        await served.event({"n": 1})
        await served.wait_closed_by_peer()

    async with world(freeze, gone_limit_s=0.2) as w:
        waiting = asyncio.create_task(w.raw(request_head()))
        await eventually(lambda: w.bodies() == 1)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        w.fleet.gone(w.pod.url).set()  # vLLM on SIGTERM: no error, no close, nothing
        got = await waiting
        assert b'"error"' in got
        assert not got.endswith(b"0\r\n\r\n")
        assert w.metrics.value("warmroute_broken_streams_total", reason="reset") == 1


async def test_a_stream_that_still_speaks_outlives_its_pods_listener() -> None:
    async def script(served: Served) -> None:
        await served.begin_stream()
        for n in range(15):
            await served.event({"n": n})
            await asyncio.sleep(0.1)
        await served.event("[DONE]")
        await served.end()

    async with world(script, gone_limit_s=1.0) as w:
        waiting = asyncio.create_task(w.chat(stream=True))
        await eventually(lambda: w.bodies() == 1)
        w.fleet.gone(w.pod.url).set()
        assert (await (await waiting).read()).endswith(b"[DONE]\n\n")


async def test_a_request_before_its_first_byte_on_a_gone_pod_is_502() -> None:
    async def script(served: Served) -> None:
        await served.wait_closed_by_peer()

    async with world(script, gone_limit_s=0.2) as w:
        waiting = asyncio.create_task(w.chat())
        await eventually(lambda: w.bodies() == 1)
        w.fleet.gone(w.pod.url).set()
        assert (await waiting).status == 502


async def test_clients_that_do_not_read_hold_their_pods_back_and_nobody_else() -> None:
    sent = 0

    async def flood(served: Served) -> None:
        nonlocal sent
        if b"quick" in served.received.body:
            await hello_stream(served)
            return
        await served.begin_stream()
        with contextlib.suppress(ConnectionError):
            for _ in range(4000):
                await served.chunk(b"x" * 16384)
                sent += 16384

    async with world(flood) as w:
        stuck = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", w.port, limit=1024)
            writer.transport.pause_reading()
            writer.write(request_head())
            stuck.append((reader, writer))
        last = -1
        while sent != last or sent == 0:
            last = sent
            await asyncio.sleep(0.3)
        assert sent < 4 * 40_000_000  # of 262 MB
        assert (await (await w.chat(messages=[{"role": "user", "content": "quick"}])).read()).endswith(b"[DONE]\n\n")
        for _, writer in stuck:
            writer.transport.abort()
        await eventually(lambda: w.inflight == 0)


async def test_a_client_that_never_reads_is_cut_at_its_limit() -> None:
    async def flood(served: Served) -> None:
        await served.begin_stream()
        with contextlib.suppress(ConnectionError):
            while True:
                await served.chunk(b"x" * 65536)
        served.close()

    async with world(flood, client_stall_limit_s=0.5) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port, limit=1024)
        writer.transport.pause_reading()
        writer.write(request_head())
        await eventually(lambda: w.bodies() == 1)
        await eventually(lambda: w.inflight == 0 and not w.pod.open)
        writer.transport.abort()
        del reader
