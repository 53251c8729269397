"""A pod's bytes -> one reply, whatever the cuts."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.proxy.wire import Malformed, ReplyParser

LINE = 1024


def parse(pieces: list[bytes], method: str = "POST", *, close: bool = False) -> tuple[int, list, bytes, bool, bool]:
    parser = ReplyParser(method, line_max_bytes=LINE)
    for piece in pieces:
        parser.feed(piece)
    if close:
        parser.end()
    return parser.status, parser.headers, b"".join(parser.body), parser.done, parser.surplus


WHOLE = {
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: \xe9\r\n\r\nhello", b"hello"),
    "chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nT: 1\r\n\r\n",
        b"hello",
    ),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 E\r\nL: x\r\n\r\nHTTP/1.1 200\r\nContent-Length: 1\r\n\r\n!",
        b"!",
    ),
    "crlf inside": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n\r\n\r\n\r\n0\r\n\r\n", b"\r\n\r\n"),
    "length and chunks": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\ntransfer-encoding: Chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        b"x",
    ),
}


@pytest.mark.parametrize("what", sorted(WHOLE))
def test_every_cut_in_two_and_byte_by_byte(what: str) -> None:
    wire, body = WHOLE[what]
    whole = parse([wire])
    assert whole[2:] == (body, True, False)
    for at in range(len(wire)):
        assert parse([wire[:at], wire[at:]]) == whole
        assert not parse([wire[:at]])[3]  # no beginning is taken for the whole
    assert parse([wire[i : i + 1] for i in range(len(wire))]) == whole
    assert parse([wire + b"x"])[4]
    assert parse([wire, b"x"])[4]


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=8), st.lists(st.integers(1, 60), min_size=1, max_size=50))
def test_chunked_bodies_come_out_as_they_went_in(chunks: list[bytes], steps: list[int]) -> None:
    wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire += b"".join(b"%X\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"
    pieces, at, n = [], 0, 0
    while at < len(wire):
        pieces.append(wire[at : at + steps[n % len(steps)]])
        at += steps[n % len(steps)]
        n += 1
    assert parse(pieces)[2:] == (b"".join(chunks), True, False)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_reply_or_malformed(data: bytes) -> None:
    for wire in (data, b"HTTP/1.1 200 OK\r\n" + data, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data):
        with contextlib.suppress(Malformed):
            status, _, _, done, _ = parse([wire])
            assert 200 <= status <= 599 or not done


MALFORMED = {
    "not http": b"RTSP/1.0 200 OK\r\n\r\n",
    "http 2": b"HTTP/2.0 200 OK\r\n\r\n",
    "two digits": b"HTTP/1.1 99 X\r\n\r\n",
    "four digits": b"HTTP/1.1 2000 X\r\n\r\n",
    "sixhundred": b"HTTP/1.1 600 X\r\n\r\n",
    "no status": b"HTTP/1.1 \r\n\r\n",
    "switching": b"HTTP/1.1 101 Up\r\nUpgrade: x\r\n\r\n",
    "no colon": b"HTTP/1.1 200 OK\r\nabc\r\n\r\n",
    "space before colon": b"HTTP/1.1 200 OK\r\nabc : 1\r\n\r\n",
    "folded": b"HTTP/1.1 200 OK\r\nA: 1\r\n 2\r\n\r\n",
    "nul": b"HTTP/1.1 200 OK\r\nA: \x00\r\n\r\n",
    "bare newline": b"HTTP/1.1 200 OK\nA: 1\r\n\r\n",
    "newline in value": b"HTTP/1.1 200 OK\r\nA: 1\nB: 2\r\n\r\n",
    "long line": b"HTTP/1.1 200 OK\r\nA: " + b"x" * 2000 + b"\r\n\r\n",
    "long head": b"HTTP/1.1 200 OK\r\n" + b"A: 1\r\n" * 2000,
    "lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n",
    "signed length": b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
    "huge length": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
    "gzip coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "coding twice": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    "chunk size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    "chunk prefix": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\n",
    "huge chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    "chunk longer than said": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
    "chunk end cut wrong": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nax",
    "endless chunk line": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 5000,
    "trailer": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nbad trailer\r\n\r\n",
    "endless trailers": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: 1\r\n" * 1000,
}


@pytest.mark.parametrize("what", sorted(MALFORMED))
def test_what_is_not_plainly_right_is_malformed(what: str) -> None:
    with pytest.raises(Malformed):
        parse([MALFORMED[what]])


@pytest.mark.parametrize(
    ("method", "head"),
    [("HEAD", b"200 OK\r\nContent-Length: 5"), ("GET", b"204 No"), ("GET", b"304 No\r\nContent-Length: 5")],
)
def test_replies_without_body(method: str, head: bytes) -> None:
    assert parse([b"HTTP/1.1 " + head + b"\r\n\r\n"], method)[2:] == (b"", True, False)


@pytest.mark.parametrize("said", [b"Content-Length: 2, 2", b"Content-Length: 2\r\ncontent-length: 2"])
def test_a_length_that_is_said_twice_goes_on_once(said: bytes) -> None:
    _, headers, body, done, _ = parse([b"HTTP/1.1 200 OK\r\n" + said + b"\r\nA: 1\r\n\r\n{}"])
    assert (headers, body, done) == ([(b"A", b"1"), (b"Content-Length", b"2")], b"{}", True)


def test_a_reply_until_the_close_is_whole_only_then() -> None:
    wire = b"HTTP/1.1 200 OK\r\n\r\nabc"
    assert parse([wire])[3] is False
    assert parse([wire], close=True)[2:] == (b"abc", True, False)


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"HTTP/1.1 200 OK", True),
        (b"HTTP/1.1 200 OK\r\nConnection: Close", False),
        (b"HTTP/1.1 200 OK\r\nConnection: x, close", False),
        (b"HTTP/1.0 200 OK", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive", True),
    ],
)
def test_when_a_connection_can_be_used_again(head: bytes, kept: bool) -> None:
    parser = ReplyParser("GET", line_max_bytes=LINE)
    parser.feed(head + b"\r\nContent-Length: 0\r\n\r\n")
    assert parser.keep_alive is kept
