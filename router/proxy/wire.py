"""A pod's bytes -> one HTTP/1 reply, or a reason why it is none. Pure: owns no socket.

Strict where leniency could hide a cut or mix two replies; every reply that is not plainly right is `Malformed` (H13).
1xx heads are swallowed. Trailers are read and dropped. Bodies come out as they are, only chunk framing is taken off.
May import: the standard library.
"""

from __future__ import annotations

import re
from typing import Literal

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: ([\t\x20-\x7e\x80-\xff]*))?")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[\t ]*([\t\x20-\x7e\x80-\xff]*?)[\t ]*")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[\t ]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_BEGINNING = b"HTTP/1."

CHUNK_LINE_MAX_BYTES = 4096
HEADERS_MAX = 256


class Malformed(Exception):
    """Not HTTP, or not HTTP that can be passed on. The text quotes nothing that was received."""


State = Literal["head", "length", "until_close", "chunk_size", "chunk_data", "chunk_end", "trailers", "done"]


class ReplyParser:
    """One reply. Feed bytes; take `body`; `done` says that it is whole."""

    __slots__ = (
        "_buffer",
        "_head_method",
        "_left",
        "_line_max_bytes",
        "_trailer_bytes",
        "body",
        "delimited_by_close",
        "headers",
        "keep_alive",
        "reason",
        "state",
        "status",
        "surplus",
    )

    def __init__(self, method: str, *, line_max_bytes: int) -> None:
        self._head_method = method == "HEAD"
        self._line_max_bytes = line_max_bytes
        self._buffer = b""
        self._left = 0
        self._trailer_bytes = 0
        self.state: State = "head"
        self.status = 0
        self.reason = ""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: list[bytes] = []
        self.keep_alive = False
        self.delimited_by_close = False
        self.surplus = False  # bytes came after the end of the reply

    @property
    def done(self) -> bool:
        return self.state == "done"

    @property
    def has_head(self) -> bool:
        return self.state != "head"

    def feed(self, data: bytes) -> None:
        """More bytes from the pod. Raises Malformed."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        if self.state == "head":
            rest = self._feed_head(data)
            if rest is None:
                return
            data = rest
        match self.state:
            case "length":
                self._feed_length(data)
            case "until_close":
                if data:
                    self.body.append(data)
            case "done":
                self.surplus |= bool(data)
            case _:
                self._feed_chunks(data)

    def end(self) -> bool:
        """The pod closed. True when that makes the reply whole."""
        if self.state == "until_close":
            self.state = "done"
        return self.state == "done"

    # -- head -------------------------------------------------------------------------------------------------------

    def _feed_head(self, data: bytes) -> bytes | None:
        """What follows the final head, or None when it is not complete."""
        while True:
            if data[: len(_BEGINNING)] != _BEGINNING[: len(data)]:
                raise Malformed("the reply does not begin with HTTP/1")
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > self._line_max_bytes and data.find(b"\r\n", len(data) - self._line_max_bytes) < 0:
                    raise Malformed("a header line is too long")
                if len(data) > 4 * self._line_max_bytes:
                    raise Malformed("the head is too long")
                self._buffer = data
                return None
            self._read_head(data[:end].split(b"\r\n"))
            data = data[end + 4 :]
            if self.status >= 200:
                self._begin_body()
                return data
            if self.status == 101:
                raise Malformed("it switches protocols unasked")
            if not data:
                return None

    def _read_head(self, lines: list[bytes]) -> None:
        first = _STATUS.fullmatch(lines[0])
        if first is None:
            raise Malformed("the status line is not HTTP/1")
        if len(lines) > HEADERS_MAX:
            raise Malformed("too many headers")
        self.keep_alive = first.group(1) == b"1"
        self.status = int(first.group(2))
        self.reason = (first.group(3) or b"").decode("latin-1")
        headers = self.headers = []
        for line in lines[1:]:
            if len(line) > self._line_max_bytes:
                raise Malformed("a header line is too long")
            match = _HEADER.fullmatch(line)
            if match is None:
                raise Malformed("a header line is not a header")
            headers.append((match.group(1), match.group(2)))

    def _begin_body(self) -> None:
        lengths: set[bytes] = set()
        codings: list[bytes] = []
        for name, value in self.headers:
            lower = name.lower()
            if lower == b"content-length":
                lengths.update(v.strip() for v in value.split(b","))
            elif lower == b"transfer-encoding":
                codings.append(value.lower())
            elif lower == b"connection":
                tokens = [t.strip().lower() for t in value.split(b",")]
                if b"close" in tokens:
                    self.keep_alive = False
                elif b"keep-alive" in tokens:
                    self.keep_alive = True
        if len(lengths) > 1 or any(not v.isdigit() or len(v) > 18 for v in lengths):
            raise Malformed("Content-Length is not one number")
        if self._head_method or self.status in (204, 304):
            self.state = "done"
        elif codings:
            if codings != [b"chunked"]:
                raise Malformed("a transfer coding other than chunked")
            self.headers = [h for h in self.headers if h[0].lower() != b"content-length"]
            self.state = "chunk_size"
        elif lengths:
            length = lengths.pop()
            self._say_length_once(length)
            self._left = int(length)
            self.state = "length" if self._left else "done"
        else:
            self.delimited_by_close = True
            self.keep_alive = False
            self.state = "until_close"

    def _say_length_once(self, length: bytes) -> None:
        """Said twice alike it is one length (RFC 9110, 8.6), but clients need not take it so."""
        own = [h for h in self.headers if h[0].lower() == b"content-length"]
        if own[0][1] != length or len(own) > 1:
            self.headers = [h for h in self.headers if h not in own] + [(own[0][0], length)]

    # -- body -------------------------------------------------------------------------------------------------------

    def _feed_length(self, data: bytes) -> None:
        if len(data) < self._left:
            if data:
                self.body.append(data)
                self._left -= len(data)
            return
        self.body.append(data[: self._left])
        self.surplus |= len(data) > self._left
        self.state = "done"

    def _feed_chunks(self, data: bytes) -> None:
        at, size = 0, len(data)
        while True:
            match self.state:
                case "chunk_size":
                    line = self._line(data, at, CHUNK_LINE_MAX_BYTES)
                    if line is None:
                        return
                    match = _CHUNK_SIZE.fullmatch(line)
                    if match is None:
                        raise Malformed("a chunk size is not a number")
                    at += len(line) + 2
                    self._left = int(match.group(1), 16)
                    self.state = "chunk_data" if self._left else "trailers"
                case "chunk_data":
                    if at == size:
                        return
                    piece = data[at : at + self._left]
                    self.body.append(piece)
                    at += len(piece)
                    self._left -= len(piece)
                    if self._left:
                        return
                    self.state = "chunk_end"
                case "chunk_end":
                    if size - at < 2:
                        self._buffer = data[at:]
                        if self._buffer not in (b"", b"\r"):
                            raise Malformed("a chunk does not end where its size says")
                        return
                    if data[at : at + 2] != b"\r\n":
                        raise Malformed("a chunk does not end where its size says")
                    at += 2
                    self.state = "chunk_size"
                case "trailers":
                    line = self._line(data, at, self._line_max_bytes)
                    if line is None:
                        return
                    at += len(line) + 2
                    self._trailer_bytes += len(line)
                    if self._trailer_bytes > self._line_max_bytes:
                        raise Malformed("the trailers are too long")
                    if line and _HEADER.fullmatch(line) is None:
                        raise Malformed("a trailer line is not a header")
                    if not line:
                        self.state = "done"
                case _:
                    self.surplus |= at < size
                    return

    def _line(self, data: bytes, at: int, max_bytes: int) -> bytes | None:
        """The line at `at` without its end; None, with the rest kept for the next feed, when it is not complete."""
        end = data.find(b"\r\n", at)
        if end < 0:
            if len(data) - at > max_bytes:
                raise Malformed("a line of the chunk framing is too long")
            self._buffer = data[at:]
            return None
        return data[at:end]
