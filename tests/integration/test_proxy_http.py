"""HTTP framing and headers: H09 to H14, H77, and the rest of their kind. Most tests speak bytes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import time
import zlib

import pytest

from tests.fakes.fake_pod import FakePod, Served, echo
from tests.fakes.proxy_world import World, eventually, rss_bytes, world

CHAT = b"/v1/chat/completions"


def post(path: bytes, body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST %b HTTP/%b" % (path, version), b"Host: router.example", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def chunked(path: bytes, pieces: list[bytes], *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"Host: r", b"Transfer-Encoding: chunked", *headers]
    return b"\r\n".join([*lines, b"", b""]) + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


async def one(w: World, data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers by lower-case name, body, of one exchange on a connection that is then closed."""
    head, _, body = (await w.raw(data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(b":") for line in lines[1:])}
    if headers.get(b"transfer-encoding") == b"chunked":
        body, rest = b"", body
        while size := int(rest.partition(b"\r\n")[0], 16):
            rest = rest.partition(b"\r\n")[2]
            body, rest = body + rest[:size], rest[size + 2 :]
    return int(lines[0].split()[1]), headers, body


async def error_of(w: World, data: bytes) -> tuple[int, dict[str, object]]:
    status, headers, body = await one(w, data)
    assert headers[b"content-type"].startswith(b"application/json")
    return status, json.loads(body)["error"]


# -- sizes ---------------------------------------------------------------------------------------------------


async def test_h09_a_body_of_20_mb_passes() -> None:
    body = b'{"model":"m","prompt":"' + os.urandom(10_000_000).hex().encode() + b'"}'

    async def script(served: Served) -> None:
        await served.reply(200, b"ok")

    async with world(script) as w:
        status, _, _ = await one(w, post(b"/v1/completions", body))
        assert status == 200
        assert w.pod.bodies == [body]


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_h09_above_the_limit_is_a_json_413(framing: str) -> None:
    body = b"x" * 300_000
    async with world(request_max_bytes=100_000) as w:
        data = post(CHAT, body) if framing == "length" else chunked(CHAT, [body[:90_000], body[90_000:]])
        status, error = await error_of(w, data)
        assert status == 413
        assert "100000" in str(error["message"])
        assert w.bodies() == 0


async def test_h09_a_refused_upload_that_goes_on_gets_one_reply() -> None:
    async with world(request_max_bytes=1000, request_header_max_bytes=8192) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        writer.write(b"POST /v1/x HTTP/1.1\r\nHost: r\r\nContent-Length: 9999999\r\n\r\n")
        got = asyncio.create_task(reader.read(-1))
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                writer.write(b"x" * 50_000)
                await writer.drain()
                await asyncio.sleep(0.005)
        assert (await got).count(b"HTTP/1.1") == 1
        writer.close()


async def test_bodies_together_are_bounded() -> None:
    async def slow(served: Served) -> None:
        await served.wait_closed_by_peer()

    async with world(slow, buffered_bodies_max_bytes=150_000) as w:
        body = b'{"model":"m","prompt":"' + b"x" * 100_000 + b'"}'
        first = asyncio.create_task(w.raw(post(b"/v1/completions", body)))
        await eventually(lambda: w.bodies() == 1)
        status, headers, _ = await one(w, post(b"/v1/completions", body))
        assert (status, headers[b"retry-after"]) == (429, b"1")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await eventually(lambda: w.app.proxy._bodies.held_bytes == 0)


async def test_h10_request_headers_of_16_kib_pass_and_reply_headers_too() -> None:
    async def script(served: Served) -> None:
        await served.reply(200, b"ok", ("X-Long", "r" * 16384))

    async with world(script) as w:
        status, headers, _ = await one(w, post(CHAT, b'{"model":"m"}', b"Cookie: " + b"c" * 16384))
        assert status == 200
        assert headers[b"x-long"] == b"r" * 16384
        assert w.pod.requests[0].header("cookie") == "c" * 16384


async def test_h10_longer_request_headers_are_a_json_431() -> None:
    async with world(request_header_max_bytes=8192, request_headers_max=50) as w:
        status, error = await error_of(w, post(CHAT, b"{}", b"Cookie: " + b"c" * 20_000))
        assert (status, error["type"]) == (431, "invalid_request_error")
        status, _ = await error_of(w, post(CHAT, b"{}", *(b"X-%d: 1" % n for n in range(80))))
        assert status == 431
        assert w.bodies() == 0


async def test_h10_many_long_request_headers_are_not_kept_without_end() -> None:
    """Two hundred lines of 60 KB are 12 MB before anything is known of the request."""
    async with world(request_header_max_bytes=8192) as w:
        lines = [b"X-%d: " % n + b"x" * 8000 for n in range(40)]
        status, error = await error_of(w, post(CHAT, b"{}", *lines))
        assert (status, error["type"]) == (431, "invalid_request_error")
        assert (await one(w, post(CHAT, b'{"model":"m"}', *lines[:3])))[0] == 200
        began_s = time.monotonic()
        assert (await w.raw(b"\r\n" * 100_000)).startswith(b"HTTP/1.1 431")
        assert time.monotonic() - began_s < 10.0, "and then the connection is closed"


async def test_h10_longer_reply_headers_are_a_json_502() -> None:
    async def script(served: Served) -> None:
        await served.reply(200, b"ok", ("X-Long", "r" * 100_000))

    async with world(script) as w:
        status, error = await error_of(w, post(CHAT, b'{"model":"m"}'))
        assert (status, error["type"]) == (502, "server_error")


# -- the same bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m"}',
        b' {\n "model" : "m" , "x":"\xc3\xa9\xf0\x9f\x98\x80" }\n\n',
        b'{"model":"m","big":1e400,"nan":NaN}',
        b'{"model":"other","model":"m"}',
        b'{"model":"m","prompt":"\\ud83d"}',
    ],
)
async def test_h11_the_same_bytes_and_their_length_go_to_the_pod(body: bytes) -> None:
    async with world() as w:
        assert (await one(w, post(b"/v1/completions", body)))[0] == 200
        assert (await one(w, chunked(b"/v1/completions", [body[:5], body[5:]])))[0] == 200
        assert w.pod.bodies == [body, body]
        for got in w.pod.requests:
            assert got.all("content-length") == [str(len(body))]
            assert got.all("transfer-encoding") == []


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
async def test_compressed_bodies_go_on_as_they_came(coding: str) -> None:
    plain = b'{"model":"m","prompt":"hello"}'
    body = {"gzip": gzip.compress(plain), "deflate": zlib.compress(plain), "br": b"\x8b\x02\x80hello\x03"}[coding]
    async with world() as w:
        status, _, _ = await one(w, post(b"/v1/newthing", body, b"Content-Encoding: " + coding.encode()))
        assert status == 200
        assert w.pod.bodies == [body]
        assert w.pod.requests[0].header("content-encoding") == coding
        assert w.conductor.asked[0].body == (b"" if coding == "br" else plain)  # read for routing only


async def test_a_compressed_bomb_is_not_inflated_beyond_the_bound() -> None:
    bomb = gzip.compress(b'{"model":"m","prompt":"' + b"a" * 50_000_000 + b'"}')
    async with world(inflate_max_bytes=1_000_000) as w:
        status, _, _ = await one(w, post(b"/v1/completions", bomb, b"Content-Encoding: gzip"))
        assert status == 200
        assert w.pod.bodies == [bomb]
        assert w.conductor.asked[0].body == b""


async def test_a_compressed_reply_goes_on_as_it_came() -> None:
    packed = gzip.compress(b"hello")

    async def script(served: Served) -> None:
        await served.reply(200, packed, ("Content-Encoding", "gzip"), ("Content-Type", "application/json"))

    async with world(script) as w:
        _, headers, body = await one(w, post(CHAT, b'{"model":"m"}', b"Accept-Encoding: gzip"))
        assert (body, headers[b"content-encoding"]) == (packed, b"gzip")
        assert w.pod.requests[0].header("accept-encoding") == "gzip"


async def test_path_and_query_go_on_as_they_came() -> None:
    targets = [
        b"/v1/x?",
        b"/v1/a%2Fb/../c?q=%20+%e4&&=;x",
        b"/v1//double//?a=b?c",
        b"/v1/%7Etilde~",
        b"/v1/x?u=http://y/z",
    ]
    async with world() as w:
        for target in targets:
            assert (await one(w, b"GET %b HTTP/1.1\r\nHost: r\r\n\r\n" % target))[0] == 200
        assert (await one(w, b"GET http://elsewhere:99/v1/abs?q HTTP/1.1\r\nHost: r\r\n\r\n"))[0] == 200
        assert [r.raw_head.split(b" ")[1] for r in w.pod.requests] == [*targets, b"/v1/abs?q"]


async def test_headers_pass_but_for_hop_by_hop() -> None:
    async with world() as w:
        sent = (
            b"X-Odd: \xe9\xff", b"x-double: 1", b"X-Double: 2", b"Cookie: a=b", b"User-Agent: me", b"X-Empty:",
            b"Connection: keep-alive, X-Hop", b"X-Hop: secret", b"Keep-Alive: timeout=5", b"TE: trailers",
            b"Proxy-Authorization: x", b"Upgrade: h2c", b"Trailer: X-T", b"X-data-parallel-rank: 3",
            b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"tracestate: a=1",
            b"X-Forwarded-For: 1.2.3.4", b"X-Forwarded-Proto: https", b"X-Request-Id: my-id-1",
        )  # fmt: skip
        data = post(CHAT, b'{"model":"m"}', *sent)
        head = (await w.raw(data, until=b'"body"')).partition(b"\r\n\r\n")[0]
        got = w.pod.requests[0]
        raw = got.raw_head
        assert b"\r\nX-Odd: \xe9\xff\r\n" in raw
        assert b"\r\nx-double: 1\r\nX-Double: 2\r\n" in raw
        assert (got.header("cookie"), got.header("user-agent"), got.header("x-empty")) == ("a=b", "me", "")
        assert got.header("traceparent") == "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        assert got.header("tracestate") == "a=1"
        assert got.all("x-forwarded-for") == ["1.2.3.4, 127.0.0.1"]
        assert got.all("x-forwarded-proto") == ["https"]
        assert got.all("x-forwarded-host") == ["router.example"]
        assert got.all("x-request-id") == ["my-id-1"]
        assert b"X-Request-Id: my-id-1" in head
        for name in ("x-hop", "keep-alive", "te", "proxy-authorization", "upgrade", "trailer", "x-data-parallel-rank"):
            assert got.header(name) is None, name
        assert got.all("host") == [w.pod.url.removeprefix("http://")]
        assert got.header("accept") is None  # nothing of a client library's own is added
        assert got.header("accept-encoding") is None


async def test_one_request_id_when_the_client_has_none() -> None:
    async with world() as w:
        _, headers, _ = await one(w, post(CHAT, b'{"model":"m"}'))
        assert headers[b"x-request-id"].decode() == w.pod.requests[0].header("x-request-id")
        assert len(headers[b"x-request-id"]) == 32


async def test_reply_headers_pass_but_for_hop_by_hop() -> None:
    async def script(served: Served) -> None:
        await served.write(
            b"HTTP/1.1 201 Made it\r\nContent-Length: 2\r\nX-Odd: \xe9\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\n"
            b"Connection: keep-alive, x-hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nX-Warmroute-Pod: lies\r\n"
            b"Date: Thu, 01 Jan 1970 00:00:00 GMT\r\nServer: uvicorn\r\n\r\nok"
        )

    async with world(script) as w:
        got = await w.raw(post(CHAT, b'{"model":"m"}', b"Connection: close"))
        assert got.startswith(b"HTTP/1.1 201 Made it\r\n")
        assert b"\r\nX-Odd: \xe9\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\n" in got
        assert got.count(b"\r\nDate: ") == 1
        assert got.count(b"\r\nServer: uvicorn\r\n") == 1
        assert b"Content-Type" not in got  # the pod named none
        for name in (b"X-Hop", b"Keep-Alive", b"lies"):
            assert name not in got


async def test_redirects_and_cookies_are_the_clients_business() -> None:
    async def script(served: Served) -> None:
        await served.reply(307, b"", ("Location", "http://elsewhere/"), ("Set-Cookie", "sid=1"))

    async with world(script) as w:
        for _ in range(2):
            status, headers, _ = await one(w, post(CHAT, b'{"model":"m"}'))
            assert (status, headers[b"location"]) == (307, b"http://elsewhere/")
        assert [r.header("cookie") for r in w.pod.requests] == [None, None]


async def test_a_pods_redirect_to_itself_leads_back_here() -> None:
    """vLLM answers `/v1/completions/` with a 307 to http://POD/v1/completions, which no client should follow."""

    async def script(served: Served) -> None:
        await served.reply(307, b"", ("Location", f"http://{served.received.header('host')}/v1/completions?a=1"))

    async with world(script) as w:
        _, headers, _ = await one(w, post(b"/v1/completions/", b'{"model":"m"}'))
        assert headers[b"location"] == b"/v1/completions?a=1"


# -- framings ------------------------------------------------------------------------------------------------


async def test_head_keeps_the_length_and_has_no_body() -> None:
    async def script(served: Served) -> None:
        await served.reply(200, b"x" * 1234)

    async with world(script) as w:
        got = await w.raw(b"HEAD /v1/thing HTTP/1.1\r\nHost: r\r\n\r\n" * 2, until=b"\r\n\r\nHTTP/1.1 200")
        assert got.count(b"Content-Length: 1234\r\n") >= 1
        assert b"xx" not in got
        assert [r.method for r in w.pod.requests][:1] == ["HEAD"]


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body_keep_the_connection_usable(status: int) -> None:
    async def script(served: Served) -> None:
        await served.write(b"HTTP/1.1 %d X\r\nX-N: %d\r\n\r\n" % (status, served.number))

    async with world(script) as w:
        got = await w.raw(b"GET /v1/thing HTTP/1.1\r\nHost: r\r\n\r\n" * 2, until=b"X-N: 1")
        assert got.count(b"HTTP/1.1 %d" % status) == 2
        assert b"Transfer-Encoding" not in got


async def test_interim_replies_of_the_pod_are_swallowed() -> None:
    async def script(served: Served) -> None:
        await served.write(b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n")
        await served.reply(200, b"ok")

    async with world(script) as w:
        assert (await w.raw(post(CHAT, b'{"model":"m"}'), until=b"ok")).startswith(b"HTTP/1.1 200")


async def test_http10_clients_get_no_chunks_and_a_close() -> None:
    async def script(served: Served) -> None:
        await served.begin_stream()
        await served.event("one")
        await served.event("two")
        await served.end()

    async with world(script) as w:
        got = await w.raw(post(CHAT, b'{"model":"m"}', version=b"1.0"))
        assert got.startswith(b"HTTP/1.0 200")
        assert got.endswith(b"\r\n\r\ndata: one\n\ndata: two\n\n")
        assert b"chunked" not in got.lower()


async def test_http10_keep_alive() -> None:
    async with world() as w:
        data = post(CHAT, b'{"model":"m"}', b"Connection: keep-alive", version=b"1.0")
        got = await w.raw(data, until=b'"body"')
        assert b"Connection: keep-alive" in got


async def test_http10_pods() -> None:
    async def script(served: Served) -> None:
        await served.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end")
        served.close()

    async with world(script) as w:
        status, headers, body = await one(w, post(CHAT, b'{"model":"m"}'))
        assert (status, body) == (200, b"until the end")
        assert headers[b"transfer-encoding"] == b"chunked"


async def test_a_transfer_coding_that_would_be_lost_is_refused() -> None:
    async with world() as w:
        data = chunked(b"/v1/newthing", [gzip.compress(b"{}")]).replace(
            b"Encoding: chunked", b"Encoding: gzip, chunked"
        )
        assert (await error_of(w, data))[0] == 400
        assert w.bodies() == 0


async def test_expect_100_continue_is_answered_before_the_body() -> None:
    async with world() as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        body = b'{"model":"m"}'
        writer.write(post(CHAT, body, b"Expect: 100-continue")[: -len(body)])
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert w.bodies() == 0
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert w.pod.requests[0].header("expect") is None
        assert w.pod.bodies == [body]
        writer.close()


async def test_expect_is_refused_before_the_body_when_it_would_be_too_large() -> None:
    async with world(request_max_bytes=100) as w:
        data = b"POST %b HTTP/1.1\r\nHost: r\r\nContent-Length: 5000\r\nExpect: 100-continue\r\n\r\n" % CHAT
        assert (await w.raw(data)).startswith(b"HTTP/1.1 413")


async def test_other_expectations_are_a_417() -> None:
    async with world() as w:
        assert (await error_of(w, post(CHAT, b"{}", b"Expect: the-unexpected")))[0] == 417


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def script(served: Served) -> None:
        await asyncio.sleep(0.05 if served.number % 2 == 0 else 0)
        await echo(served)

    async with world(script) as w:
        bodies = [b'{"model":"m","n":%d}' % n for n in range(20)]
        got = await w.raw(b"".join(post(CHAT, b) for b in bodies), until=b'\\"n\\":19')
        order = [got.index(b'\\"n\\":%d}' % n) for n in range(20)]
        assert order == sorted(order)
        assert w.pod.bodies == bodies


async def test_h14_a_client_that_pipelines_for_ever_is_bounded() -> None:
    async with world() as w:
        await w.raw(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n", until=b"ok")
        before = rss_bytes()
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port, limit=1024)
        writer.transport.pause_reading()
        piece = b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n" * 2000
        written = 0
        try:
            async with asyncio.timeout(1.5):
                while written < 200_000_000:
                    writer.write(piece)
                    await writer.drain()  # blocks for good once nobody reads on any more
                    written += len(piece)
        except TimeoutError:
            pass
        assert written < 60_000_000  # of 200 MB: what kernel buffers hold
        assert rss_bytes() - before < 80_000_000
        assert (await w.session.get(f"{w.url}/health")).status == 200
        writer.transport.abort()
        del reader


BAD_REQUESTS = {
    "no http": b"hello there\r\n\r\n",
    "two lengths": b"POST /v1/x HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "length and chunks": (
        b"POST /v1/x HTTP/1.1\r\nHost: r\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "bad chunk": b"POST /v1/x HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n",
    "space before colon": b"GET /v1/x HTTP/1.1\r\nHost : r\r\n\r\n",
    "nul in a header": b"GET /v1/x HTTP/1.1\r\nHost: r\r\nX: a\x00b\r\n\r\n",
    "other coding": b"POST /v1/x HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: gzip\r\n\r\n",
}


@pytest.mark.parametrize("what", sorted(BAD_REQUESTS))
async def test_malformed_requests_are_a_json_400_and_reach_no_pod(what: str, caplog: pytest.LogCaptureFixture) -> None:
    async with world() as w:
        got = await w.raw(BAD_REQUESTS[what])
        assert got.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        assert w.bodies() == 0
        assert not [r for r in caplog.records if r.exc_info or r.levelname == "ERROR"]


# -- forms ---------------------------------------------------------------------------------------------------


def form(boundary: bytes, *parts: tuple[bytes, bytes]) -> bytes:
    return (
        b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, value) for head, value in parts)
        + b"--%b--\r\n" % boundary
    )


WAV = (b'Content-Disposition: form-data; name="file"; filename="x.wav"\r\nContent-Type: audio/wav', os.urandom(300_000))
MODEL = (b'Content-Disposition: form-data; name="model"', b"m")


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("order", [(WAV, MODEL), (MODEL, WAV)])
async def test_h77_a_multipart_upload_arrives_whole_and_its_model_is_found(framing: str, order: tuple) -> None:
    body = form(b"b0undary", *order)
    kind = b'Content-Type: multipart/form-data; boundary="b0undary"'
    async with world() as w:
        path = b"/v1/audio/transcriptions"
        data = (
            post(path, body, kind)
            if framing == "length"
            else chunked(path, [body[:7], body[7:90_000], body[90_000:]], kind)
        )
        assert (await one(w, data))[0] == 200
        assert w.pod.bodies == [body]
        assert w.pod.requests[0].header("content-type") == 'multipart/form-data; boundary="b0undary"'
        assert w.conductor.asked[0].model == "m"


async def test_h77_no_model_field_goes_by_load_and_a_wrong_one_is_404() -> None:
    kind = b"Content-Type: multipart/form-data; boundary=b"
    async with world() as w:
        assert (await one(w, post(b"/v1/audio/transcriptions", form(b"b", WAV), kind)))[0] == 200
        assert w.conductor.asked[0].model is None
        wrong = form(b"b", (MODEL[0], b"nobody"))
        assert (await error_of(w, post(b"/v1/audio/transcriptions", wrong, kind)))[0] == 404
        assert w.bodies() == 1


async def test_h77_a_model_field_after_a_file_longer_than_is_searched_is_found() -> None:
    kind = b"Content-Type: multipart/form-data; boundary=b"
    async with world(multipart_search_max_bytes=10_000) as w:
        assert (await one(w, post(b"/v1/audio/transcriptions", form(b"b", WAV, MODEL), kind)))[0] == 200
        assert w.conductor.asked[0].model == "m"


# -- idle connections ----------------------------------------------------------------------------------------


async def test_h12_idle_connections_that_pods_close_surface_nowhere() -> None:
    async with world(pods=[FakePod(echo, idle_close_s=0.2)], pod_keepalive_s=60) as w:
        for _ in range(8):
            assert (await w.chat()).status == 200
            await asyncio.sleep(0.25)
        assert w.bodies() == 8
        assert w.metrics.value("warmroute_ambiguous_retries_total") == 0  # their close was seen before reuse


async def test_h12_a_connection_closed_on_reuse_is_tried_once_more_and_counted() -> None:
    async def script(served: Served) -> None:
        if served.number == 1:
            served.reset()  # the second request of all, on the first one's connection
        else:
            await echo(served)

    async with world(script) as w:
        assert (await w.chat()).status == 200
        assert (await w.chat()).status == 200
        assert [r.connection for r in w.pod.requests] == [1, 1, 2]
        assert w.metrics.value("warmroute_ambiguous_retries_total") == 1
        assert w.fleet.failures.total() == 0


async def test_h12_ambiguous_retries_can_be_forbidden() -> None:
    async def script(served: Served) -> None:
        if served.number == 1:
            served.reset()
        else:
            await echo(served)

    async with world(script, retry_ambiguous=False) as w:
        assert (await w.chat()).status == 200
        assert (await w.chat()).status == 502
        assert w.bodies() == 2


async def test_h12_a_fresh_connection_that_breaks_is_not_tried_again() -> None:
    async def script(served: Served) -> None:
        served.reset()

    async with world(script, echo) as w:
        assert (await w.chat()).status == 502
        assert w.bodies() == 1


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok and more",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 99 Huh\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"\r\n\r\n",
        b"\x00" * 100,
    ],
)
async def test_h13_a_malformed_reply_is_a_json_502_for_that_request_only(wire: bytes) -> None:
    async def script(served: Served) -> None:
        if b"bad" in served.received.body:
            await served.write(wire)
        else:
            await echo(served)

    async with world(script) as w:
        assert (await w.chat()).status == 200
        status, error = await error_of(w, post(CHAT, b'{"model":"m","x":"bad"}'))
        assert (status, error["type"]) == (502, "server_error")
        assert (await w.chat()).status == 200
        assert w.bodies() == 3
        assert w.pod.connections == 2  # the bad one was dropped
        assert w.fleet.failures["malformed"] == 1


# -- odd clients ------------------------------------------------------------------------------------------------


async def test_an_upgrade_is_not_passed_on_and_leaves_the_connection_usable() -> None:
    async with world() as w:
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA=="
        data = b"GET /v1/realtime HTTP/1.1\r\nHost: r\r\n%b\r\n\r\nGET /health HTTP/1.1\r\nHost: r\r\n\r\n" % upgrade
        got = await w.raw(data, until=b'"ok"')
        assert got.count(b"HTTP/1.1 200") == 2
        assert w.pod.requests[0].header("upgrade") is None
        assert w.pod.requests[0].header("connection") is None


async def test_http2_and_tls_on_the_plain_port_are_told_so_and_reach_no_pod() -> None:
    async with world() as w:
        assert (await w.raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")).startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
        assert b"400" in (await w.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)))[:20]
        assert w.bodies() == 0


async def test_half_a_surrogate_pair_in_a_model_name_is_a_404() -> None:
    async with world() as w:
        assert (await error_of(w, post(CHAT, b'{"model":"\\ud83d"}')))[0] == 404


async def test_a_client_that_shuts_its_sending_side_counts_as_gone() -> None:
    """asyncio's servers take a half-closed connection for one whose client has left (docs/proxy.md)."""

    async def silent(served: Served) -> None:
        await served.wait_closed_by_peer()

    async with world(silent) as w:
        _, writer = await asyncio.open_connection("127.0.0.1", w.port)
        writer.write(post(CHAT, b'{"model":"m"}'))
        await eventually(lambda: w.bodies() == 1)
        writer.write_eof()
        await eventually(lambda: w.inflight == 0 and not w.pod.open)
        writer.close()


async def test_a_pods_head_and_body_in_one_piece_go_out_in_one_piece() -> None:
    async with world() as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        writer.write(post(CHAT, b'{"model":"m"}'))
        first = await reader.read(1 << 20)
        assert first.endswith(b"}")  # head, whole body: no wait for a second segment
        writer.close()
