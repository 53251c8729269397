"""A TCP proxy before Redis that misbehaves on demand: delays, cuts inside a reply, says READONLY, goes silent."""

from __future__ import annotations

import asyncio
import contextlib


class HostileProxy:
    """Passes bytes both ways. The switches may be changed at any time and count from the next bytes on."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.delay_s = 0.0
        self.cut_after_bytes: int | None = None  # of the next reply: then the connection is reset
        self.readonly = False  # every command is answered with a READONLY error, as by a demoted primary
        self.silent = False  # takes commands, answers nothing
        self.refusing = False
        self.connections = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def __aenter__(self) -> HostileProxy:
        self._server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut_all(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        up: asyncio.StreamWriter | None = None
        try:
            if self.refusing:
                return
            from_redis, up = await asyncio.open_connection("127.0.0.1", self._to)
            answers = asyncio.create_task(self._answers(from_redis, writer))
            self._tasks.add(answers)
            answers.add_done_callback(self._tasks.discard)
            while data := await reader.read(65536):
                if self.readonly and b"SETINFO" not in data and b"CLIENT" not in data:
                    writer.write(b"-READONLY You can't write against a read only replica.\r\n")
                    continue
                up.write(data)
        except OSError:
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            for end in (writer, up):
                if end is not None:
                    with contextlib.suppress(OSError):
                        end.close()

    async def _answers(self, from_redis: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await from_redis.read(65536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.silent:
                    continue
                if self.cut_after_bytes is not None:
                    data, self.cut_after_bytes = data[: self.cut_after_bytes], None
                    writer.write(data)
                    await writer.drain()
                    writer.transport.abort()
                    return
                writer.write(data)
            writer.close()
