"""What the proxy costs: `python -m loadtest.bench.proxy`. CPU a request, added time to first byte, CPU a relayed chunk.

The router runs as a process of its own on one core; client and pods share another. The pods here do no work at all (a
canned reply the moment a request is whole), so that what is measured is the road. CPU is what the kernel charged the
router's process (user + system), not wall time, so other work on the machine disturbs it little; still, state the
machine and compare only figures of one run.
May import: the standard library, uvloop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

PODS = 2
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"c-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
JSON_BODY = (
    b'{"id":"c-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}]}'
)
JSON_REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(JSON_BODY),
    JSON_BODY,
)
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "root": "m", "parent": None}]}).encode()


class Pod(asyncio.Protocol):
    """Answers the moment a request is whole: JSON, or as many events as `x-events` says, each written apart."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = self._buffer[:head_end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._buffer) < head_end + 4 + length:
            return
        self._buffer = self._buffer[head_end + 4 + length :]
        self._answer(head)

    def _answer(self, head: bytes) -> None:
        transport = self._transport
        assert transport is not None
        if head.startswith(b"get "):
            body = MODELS if b"/v1/models" in head.split(b"\r\n", 1)[0] else b""
            transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            return
        at = head.find(b"x-events:")
        if at < 0:
            transport.write(JSON_REPLY)
            return
        transport.write(SSE_HEAD)
        self._events(int(head[at + 9 :].split(b"\r\n", 1)[0]))

    def _events(self, left: int) -> None:
        transport = self._transport
        assert transport is not None
        if transport.is_closing():
            return
        if not left:
            transport.write(b"0\r\n\r\n")
            return
        transport.write(CHUNK)
        asyncio.get_running_loop().call_soon(self._events, left - 1)


class Client:
    """One keep-alive connection, one request at a time, no parsing beyond what ends a reply."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    async def ask(self, request: bytes) -> float:
        """Seconds to the first byte of the reply's body."""
        began_s = time.perf_counter()
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head[:16]:
            raise RuntimeError(f"the router answered {head[:40]!r}")
        lower = head.lower()
        at = lower.find(b"content-length:")
        if at >= 0:
            await self._reader.readexactly(int(lower[at + 15 :].split(b"\r\n", 1)[0]))
            return time.perf_counter() - began_s
        await self._reader.readuntil(b"\n")
        first_s = time.perf_counter() - began_s
        await self._reader.readuntil(b"\r\n0\r\n\r\n")
        return first_s

    def close(self) -> None:
        self._writer.close()


def chat(size_bytes: int, turn: int = 0) -> bytes:
    """A chat body of about `size_bytes`, one long history and a short last turn that differs."""
    words = "the quick brown fox jumps over the lazy dog and runs away from it "
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    while (left := size_bytes - len(json.dumps(messages)) - 150) > 0:
        role = "user" if len(messages) % 2 else "assistant"
        messages.append({"role": role, "content": (words * 20)[: min(left, 1200)]})
    messages.append({"role": "user", "content": f"turn {turn}"})
    return json.dumps({"model": "m", "messages": messages}).encode()


def request(body: bytes, *, events: int | None = None, path: str = "/v1/chat/completions") -> bytes:
    """One POST, ready to be written; with `events` the pod answers by a stream of so many."""
    lines = [f"POST {path} HTTP/1.1", "Host: r", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    if events is not None:
        lines.append(f"x-events: {events}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def cpu_s(pid: int) -> float:
    """User + system seconds that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    cpu_ms: float  # of the router, a request
    direct_p50_ms: float  # to the first byte, one at a time, no router
    added_p50_ms: float
    added_p99_ms: float


class Bench:
    def __init__(self, *, requests: int, flags: Sequence[str]) -> None:
        self._requests = requests
        self._flags = flags
        self._pids: list[int] = []
        self.pod_ports: list[int] = []
        self.port = self.pid = 0
        self._router: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(PODS):
            server = await loop.create_server(Pod, "127.0.0.1", 0)
            self.pod_ports.append(server.sockets[0].getsockname()[1])
        arguments = ["-m", "router", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0", *self._flags]
        for port in self.pod_ports:
            arguments += ["--pod", f"http://127.0.0.1:{port},model=m"]
        self._router = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=asyncio.subprocess.PIPE)
        self.pid = self._router.pid
        assert self._router.stderr is not None
        while self.port == 0:
            line = await asyncio.wait_for(self._router.stderr.readline(), 60)
            if not line:
                raise RuntimeError("the router did not start")
            if b'"client"' in line and b'"listening"' in line:
                self.port = json.loads(line)["port"]
        self._draining = asyncio.create_task(self._drain(self._router.stderr))
        await self._ready()
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:
            os.sched_setaffinity(self.pid, {cores[0]})
            os.sched_setaffinity(0, set(cores[1:]))

    async def _ready(self) -> None:
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(b"GET /ready HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
            ready = (await reader.read()).partition(b"\r\n\r\n")[2]
            writer.close()
            if b'"pods_ready":%d' % PODS in ready:
                return
            await asyncio.sleep(0.2)
        raise RuntimeError("the pods were not seen within 30 s")

    async def _drain(self, stream: asyncio.StreamReader) -> None:
        while await stream.read(1 << 16):  # the access log is on: it is part of the price
            pass

    async def stop(self) -> None:
        assert self._router is not None
        self._router.terminate()
        await self._router.wait()
        await self._draining

    async def closed_loop(self, port: int, asks: Sequence[bytes], clients: int) -> list[float]:
        """Every request of `asks` once, by so many clients; seconds to first byte of each."""
        left = list(asks)
        seconds: list[float] = []

        async def work() -> None:
            client = await Client.open(port)
            while left:
                seconds.append(await client.ask(left.pop()))
            client.close()

        await asyncio.gather(*(work() for _ in range(clients)))
        return seconds

    async def measure(self, what: str, asks: Sequence[bytes]) -> Row:
        await self.closed_loop(self.port, asks[: len(asks) // 4], 16)  # warm: tokens, local view, connections
        before_s = cpu_s(self.pid)
        await self.closed_loop(self.port, asks, 16)
        cpu_ms = (cpu_s(self.pid) - before_s) / len(asks) * 1000
        alone = asks[: max(len(asks) // 8, 100)]
        direct = sorted(await self.closed_loop(self.pod_ports[0], alone, 1))
        through = sorted(await self.closed_loop(self.port, alone, 1))
        median = statistics.median(direct)
        return Row(
            what,
            cpu_ms,
            median * 1000,
            (statistics.median(through) - median) * 1000,
            (through[len(through) * 99 // 100] - median) * 1000,
        )

    async def chunk_seconds(self, events: int, streams: int) -> float:
        """CPU seconds of the router per million relayed events."""
        asks = [request(chat(300), events=events)] * streams
        before_s = cpu_s(self.pid)
        await self.closed_loop(self.port, asks, 8)
        return (cpu_s(self.pid) - before_s) / (events * streams) * 1e6

    async def rows(self) -> list[Row]:
        n = self._requests
        return [
            await self.measure("small JSON, any route", [request(b'{"model":"m"}', path="/v1/newthing")] * n),
            await self.measure("small chat", [request(chat(300, turn)) for turn in range(n)]),
            await self.measure("30 KB chat, warm history", [request(chat(30_000, turn)) for turn in range(n)]),
            await self.measure("30 KB chat, 5 events", [request(chat(30_000, turn), events=5) for turn in range(n)]),
        ]


async def run(*, requests: int, flags: Sequence[str]) -> None:
    bench = Bench(requests=requests, flags=flags)
    await bench.start()
    try:
        machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        print(f"{requests} requests a row, {machine}, flags: {' '.join(flags) or '-'}")
        print(f"{'':28} {'CPU ms/request':>14} {'direct p50 ms':>14} {'added p50 ms':>13} {'added p99 ms':>13}")
        for row in await bench.rows():
            added = f"{row.added_p50_ms:13.3f} {row.added_p99_ms:13.3f}"
            print(f"{row.what:28} {row.cpu_ms:14.3f} {row.direct_p50_ms:14.3f} {added}")
        print(f"CPU per 1M relayed events: {await bench.chunk_seconds(200, max(requests // 20, 16)):.1f} s")
        print(f"RSS {rss_mb(bench.pid):.0f} MB")
    finally:
        await bench.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000, help="requests a row")
    parser.add_argument("flags", nargs="*", help="further flags of the router, after --")
    arguments = parser.parse_args()
    uvloop.run(run(requests=arguments.requests, flags=arguments.flags))
    return 0


if __name__ == "__main__":
    sys.exit(main())
