"""A pod's event side made by hand: a real PUB socket and a real ROUTER for replay, as vLLM's publisher has them.

`python -m tests.fakes.publisher EVENTS REPLAY` reads lines of hex from stdin, publishes each with the next number
and says the number on stdout: a pod that can be killed with SIGKILL.
"""

import sys
import threading
from collections import deque
from typing import Literal

import zmq

END = b"\xff" * 8


class Publisher:
    """Publishes payloads with numbers from 0; answers replay from its buffer. A thread serves the ROUTER."""

    def __init__(
        self,
        events: str = "tcp://127.0.0.1:*",
        replay: str | None = "tcp://127.0.0.1:*",
        *,
        buffer_batches: int = 10_000,
        layout: Literal["old", "new"] = "new",
        topic: bytes = b"kv@10.9.8.7@m",
    ) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, 0)
        self._pub.bind(events)
        self.events = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self._router: zmq.Socket[bytes] | None = None
        self.replay: str | None = None
        if replay is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, 0)
            self._router.bind(replay)
            self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self.layout, self.topic = layout, topic
        self.requests: list[list[bytes]] = []
        self.answering = True
        self.next_seq = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def publish(self, payload: bytes, *, lose: bool = False) -> int:
        """Next number; `lose`: subscribers do not get it, replay has it."""
        with self._lock:
            seq = self.next_seq
            self.next_seq += 1
            self.buffer.append((seq, payload))
            if not lose:
                self._pub.send_multipart([self.topic, seq.to_bytes(8, "big"), payload])
        return seq

    def send_raw(self, seq: int, payload: bytes) -> None:
        """A message with any number, not kept for replay."""
        with self._lock:
            self._pub.send_multipart([self.topic, seq.to_bytes(8, "big"), payload])

    def _serve(self) -> None:
        router = self._router
        while router is not None and not self._stop.is_set():
            if not router.poll(20):
                continue
            identity, *request = router.recv_multipart()
            self.requests.append(request)
            if not self.answering or len(request) != 2:
                continue
            start = int.from_bytes(request[1], "big")
            with self._lock:
                kept = list(self.buffer)
            middle = [b""] if self.layout == "old" else [b"", self.topic]
            for seq, payload in kept:
                if seq >= start:
                    router.send_multipart([identity, *middle, seq.to_bytes(8, "big"), payload])
            router.send_multipart([identity, *([b""] if self.layout == "old" else [b"", b""]), END, b""])

    def close(self) -> None:
        """Ends like a process that exits."""
        self._stop.set()
        self._thread.join(5)
        self._context.destroy(linger=0)


def main() -> None:
    publisher = Publisher(sys.argv[1], sys.argv[2])
    print(publisher.events, publisher.replay, flush=True)
    for line in sys.stdin:
        print(publisher.publish(bytes.fromhex(line.strip())), flush=True)
    publisher.close()


if __name__ == "__main__":
    main()
