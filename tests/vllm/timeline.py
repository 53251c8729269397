"""What each engine held, and when: its events recorded by a subscriber that shares no code with the indexer."""

import hashlib
import struct
import threading
import time
from bisect import bisect_right
from collections import Counter
from typing import Any

import msgspec
import zmq

Key = bytes


def chain(tokens: list[int], size: int, lora: str | None, salt: str | None) -> list[Key]:
    """A name for every full block's content and prefix; SHA-1, so not the router's."""
    key = hashlib.sha1(repr((lora, salt)).encode()).digest()
    keys = []
    for start in range(0, len(tokens) - size + 1, size):
        key = hashlib.sha1(key + struct.pack(f"<{size}I", *tokens[start : start + size])).digest()
        keys.append(key)
    return keys


class Timeline:
    """Follows one engine's PUB socket in a thread."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.setsockopt(zmq.RCVHWM, 0)
        self._sub.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._sub.connect(f"tcp://127.0.0.1:{port}")
        self._names: dict[Any, Key] = {}
        self._copies: Counter[Key] = Counter()
        self._last_seq = -1
        self._changes: dict[Key, list[tuple[float, bool]]] = {}  # when it came to be there, or ceased to
        self.resets: list[float] = []
        self.stored = self.removed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        self._context.destroy(linger=0)

    def _follow(self) -> None:
        while not self._stop.is_set():
            if self._sub.poll(50):
                _, seq, payload = self._sub.recv_multipart()
                self._tell(time.time(), int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)[1])

    def _tell(self, at_s: float, seq: int, events: list[dict[str, Any]]) -> None:
        if seq <= self._last_seq:  # another process
            self.forget(at_s)
        self._last_seq = seq
        for e in events:
            if e["type"] == "AllBlocksCleared":
                self.forget(at_s)
            elif e["type"] == "BlockRemoved":
                for name in e["block_hashes"]:
                    self.removed += 1
                    if (key := self._names.get(name)) is not None:
                        self._copies[key] -= 1
                        self._note(key, at_s)
            else:
                self._store(e, at_s)

    def _store(self, e: dict[str, Any], at_s: float) -> None:
        size, lora = e["block_size"], e["lora_name"]
        extra = [x for x in ((e["extra_keys"] or [None])[0] or []) if x != lora]
        parent = e["parent_block_hash"]
        key = (
            hashlib.sha1(repr((lora, extra[0] if extra else None)).encode()).digest()
            if parent is None
            else self._names.get(parent)
        )
        for i, name in enumerate(e["block_hashes"]):
            self.stored += 1
            if key is None:
                continue
            key = hashlib.sha1(key + struct.pack(f"<{size}I", *e["token_ids"][i * size : (i + 1) * size])).digest()
            self._names[name] = key
            self._copies[key] += 1
            self._note(key, at_s)

    def _note(self, key: Key, at_s: float) -> None:
        held = self._copies[key] > 0
        log = self._changes.setdefault(key, [])
        if not log or log[-1][1] is not held:
            log.append((at_s, held))

    def forget(self, at_s: float) -> None:
        """Cleared, or a new process."""
        self.resets.append(at_s)
        for key in [k for k, n in self._copies.items() if n > 0]:
            self._copies[key] = 0
            self._note(key, at_s)
        self._copies.clear()

    def held_at(self, key: Key, at_s: float) -> bool:
        log = self._changes.get(key, [])
        i = bisect_right(log, (at_s, True))
        return i > 0 and log[i - 1][1]

    def changed(self, key: Key, from_s: float, to_s: float) -> list[bool]:
        """What the block became in this span."""
        return [held for at_s, held in self._changes.get(key, []) if from_s <= at_s <= to_s]
