"""A pod process for the chaos run: `python -m tests.chaos.pod PORT NAME LEDGER SEED`. It misbehaves by chance.

Every request whose work it begins is written to LEDGER at once (one id a line, O_APPEND), so that the driver can count
runs even of a pod that was killed. A refusal is written nowhere: it ran nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import sys

import uvloop

from tests.fakes.fake_pod import FakePod, Served

_ID = re.compile(rb'"chaos_id"\s*:\s*"([0-9a-f]+)"')
FAULTS = (
    "ok",
    "429",
    "503",
    "500",
    "shutting_down",
    "reset_before",
    "reset_mid",
    "cut_mid",
    "malformed",
    "freeze",
    "slow",
)
WEIGHTS = (70, 3, 3, 3, 3, 2, 4, 3, 3, 2, 4)


def text_of(chaos_id: str) -> list[str]:
    """The words of the answer to a request: the driver knows them too."""
    rng = random.Random(chaos_id)
    return [rng.choice(["hello", "größe", "日本", "🧪", "x" * 3000]) for _ in range(rng.randrange(1, 20))]


class Pod:
    def __init__(self, name: str, ledger: int, seed: int) -> None:
        self._name = name
        self._ledger = ledger
        self._rng = random.Random(seed)

    async def script(self, served: Served) -> None:
        found = _ID.search(served.received.body)
        if found is None:
            await served.reply(400, {"error": {"message": "no id", "type": "BadRequestError"}})
            return
        chaos_id = found.group(1).decode()
        fault = self._rng.choices(FAULTS, WEIGHTS)[0]
        if fault in ("429", "503"):
            await served.reply(int(fault), {"error": {"message": "busy"}}, ("Retry-After", "1"))
            return
        if fault == "shutting_down":
            message = "cannot schedule new futures after shutdown"
            await served.reply(500, {"error": {"message": message, "type": "InternalServerError", "code": 500}})
            return
        os.write(self._ledger, f"{chaos_id}\n".encode())
        await self._run(served, chaos_id, fault)

    async def _run(self, served: Served, chaos_id: str, fault: str) -> None:
        rng = self._rng
        match fault:
            case "500":
                await served.reply(500, {"error": {"message": "engine trouble"}})
                return
            case "reset_before":
                served.reset()
                return
            case "malformed":
                await served.write(
                    rng.choice(
                        [b"\x00\x01garbage\r\n\r\n", b"HTTP/1.1 99 X\r\n\r\n", b"HTTP/1.1 200 OK\r\nbad\r\n\r\n"]
                    )
                )
                served.close()
                return
        await asyncio.sleep(rng.random() * 0.02)
        words = text_of(chaos_id)
        if b'"stream": true' not in served.received.body:
            await self._whole(served, words, fault)
            return
        await served.begin_stream()
        stop_at = rng.randrange(len(words)) if fault in ("reset_mid", "cut_mid", "freeze") else -1
        for n, word in enumerate(words):
            if n == stop_at:
                await self._stop(served, fault)
                return
            await served.event({"choices": [{"index": 0, "delta": {"content": word}}]})
            await asyncio.sleep(0.1 if fault == "slow" else rng.random() * 0.01)
        await served.event("[DONE]")
        await served.end()

    async def _whole(self, served: Served, words: list[str], fault: str) -> None:
        body = json.dumps({"choices": [{"message": {"content": "".join(words)}}]}).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        if fault in ("reset_mid", "cut_mid", "freeze"):
            await served.write(head + body[: len(body) // 2])
            await self._stop(served, fault)
            return
        if fault == "slow":
            await asyncio.sleep(0.5)
        await served.write(head + body)

    async def _stop(self, served: Served, fault: str) -> None:
        await asyncio.sleep(0.02)
        if fault == "reset_mid":
            served.reset()
        elif fault == "cut_mid":
            served.close()
        else:
            await served.wait_closed_by_peer()


async def main(port: int, name: str, ledger_path: str, seed: int) -> None:
    ledger = os.open(ledger_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    pod = FakePod(Pod(name, ledger, seed).script, name=name, idle_close_s=5.0)
    pod.port = port
    await pod.start()
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(30)
            pod.requests.clear()  # bounded: the ledger is what counts


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))
