"""A scripted HTTP server in place of vLLM, on raw sockets: it counts what it received and can misbehave at any byte.

A script is an async function of one `Served` request. It writes what it likes, or resets, or stays silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType


@dataclass
class Received:
    """One request as it came over the wire."""

    method: str
    target: str
    version: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int  # number of the connection it came on
    raw_head: bytes = b""

    def header(self, name: str) -> str | None:
        return next((v for k, v in self.headers if k.lower() == name.lower()), None)

    def all(self, name: str) -> list[str]:
        return [v for k, v in self.headers if k.lower() == name.lower()]


@dataclass
class Served:
    """A request being answered."""

    received: Received
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pod: FakePod
    keep_open: bool = True
    number: int = 0  # how many requests the pod had received before, probes apart
    _chunked: bool = field(default=False)

    async def write(self, data: bytes) -> None:
        if self.writer.transport.is_closing():  # uvloop raises RuntimeError on writing to one
            raise ConnectionResetError
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, status: int, body: bytes | dict | list = b"", *headers: tuple[str, str]) -> None:
        """A whole reply with a Content-Length."""
        kinds = [h for h in headers if h[0].lower() == "content-type"]
        if isinstance(body, dict | list):
            body = json.dumps(body).encode()
            if not kinds:
                headers = (("Content-Type", "application/json"), *headers)
        head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Status'}\r\nContent-Length: {len(body)}\r\n"
        head += "".join(f"{k}: {v}\r\n" for k, v in headers) + "\r\n"
        await self.write(head.encode("latin-1") + (b"" if self.received.method == "HEAD" else body))

    async def begin_stream(self, *headers: tuple[str, str], status: int = 200) -> None:
        """The head of a chunked event stream."""
        head = (
            f"HTTP/1.1 {status} OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
        )
        await self.write((head + "".join(f"{k}: {v}\r\n" for k, v in headers) + "\r\n").encode("latin-1"))

    async def chunk(self, data: bytes) -> None:
        await self.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def event(self, data: object) -> None:
        """One SSE event as one chunk."""
        text = data if isinstance(data, str) else json.dumps(data)
        await self.chunk(f"data: {text}\n\n".encode())

    async def end(self) -> None:
        await self.write(b"0\r\n\r\n")

    def reset(self) -> None:
        """RST instead of FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.keep_open = False
        self.writer.transport.abort()

    def close(self) -> None:
        """FIN after what was written."""
        self.keep_open = False

    async def wait_closed_by_peer(self) -> float:
        """Until the other side closes or resets; the monotonic time of it."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        self.keep_open = False
        return time.monotonic()


PROBES = ("/health", "/v1/models", "/metrics", "/kv_event_sources")
Script = Callable[[Served], Awaitable[None]]


async def echo(served: Served) -> None:
    """What was asked, as JSON."""
    got = served.received
    await served.reply(
        200,
        {
            "pod": served.pod.name,
            "method": got.method,
            "target": got.target,
            "headers": got.headers,
            "body": got.body.decode("latin-1"),
        },
    )


async def hello_stream(served: Served) -> None:
    """Three events and the end, as a chat completion streams."""
    await served.begin_stream()
    for word in ("Hel", "lo", "!"):
        await served.event({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": word}}]})
    await served.event("[DONE]")
    await served.end()


class FakePod:
    """Listens on a free port of 127.0.0.1. `requests` holds every request but probes, in order of arrival."""

    def __init__(
        self,
        script: Script = echo,
        *,
        name: str = "pod",
        models: tuple[str, ...] = ("m",),
        ssl_context: ssl.SSLContext | None = None,
        idle_close_s: float | None = None,
    ) -> None:
        self.script = script
        self.name = name
        self.models = models
        self.idle_close_s = idle_close_s  # as uvicorn: close a connection that was idle so long
        self.requests: list[Received] = []
        self.partial_requests = 0  # heads whose body never came whole
        self.connections = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.port = 0
        self._ssl = ssl_context
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"{'https' if self._ssl else 'http'}://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[bytes]:
        return [r.body for r in self.requests]

    async def __aenter__(self) -> FakePod:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self.port, ssl=self._ssl, limit=1 << 20, backlog=4096
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_listening(self) -> None:
        """New connections are refused; open ones go on."""
        assert self._server is not None
        self._server.close()

    async def stop(self) -> None:
        """Like kill -9: everything closes now."""
        if self._server is not None:
            self._server.close()
        for writer in list(self.open):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open.add(writer)
        self.connections += 1
        try:
            await self._serve(reader, writer, self.connections)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        while True:
            try:
                async with asyncio.timeout(self.idle_close_s):
                    head = await reader.readuntil(b"\r\n\r\n")
            except TimeoutError:
                return
            received = await self._receive(head, reader, connection)
            if await self._probe(received, writer):
                continue
            served = Served(received, reader, writer, self, number=len(self.requests))
            self.requests.append(received)
            await self.script(served)
            await writer.drain()
            if not served.keep_open or received.version == "HTTP/1.0":
                return

    async def _receive(self, head: bytes, reader: asyncio.StreamReader, connection: int) -> Received:
        lines = head.decode("latin-1").split("\r\n")
        method, target, version = lines[0].split(" ")
        headers = [(k, v.strip()) for k, _, v in (line.partition(":") for line in lines[1:] if line)]
        lower = {k.lower(): v for k, v in headers}
        self.partial_requests += 1
        body = b""
        if lower.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await reader.readline()).split(b";")[0], 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            while (await reader.readline()) != b"\r\n":
                pass
        elif "content-length" in lower:
            body = await reader.readexactly(int(lower["content-length"]))
        self.partial_requests -= 1
        return Received(method, target, version, headers, body, connection, head)

    async def _probe(self, received: Received, writer: asyncio.StreamWriter) -> bool:
        """What a fleet asks by itself is answered here and not counted."""
        if received.method != "GET" or received.target not in PROBES:
            return False
        body = b""
        if received.target == "/v1/models":
            data = [{"id": m, "object": "model", "root": m, "parent": None} for m in self.models]
            body = json.dumps({"object": "list", "data": data}).encode()
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        await writer.drain()
        return True
