"""KV events on the wire, as vLLM publishes them: a PUB socket, and a ROUTER socket that replays.

One batch per engine step that has events: topic, 8-byte big-endian sequence number, msgpack payload. The map form is
vLLM's since 0.24, the array form what came before.
May import: the standard library, msgspec, pyzmq, loadtest.blocks.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import zmq
from zmq.asyncio import Context as AsyncContext
from zmq.asyncio import Socket as AsyncSocket

from loadtest.blocks import Cleared, Event, Removed, Stored

log = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
EventForm = Literal["map", "array"]
_encode = msgspec.msgpack.Encoder().encode


class EventPublisher:
    """The events of one life of a pod. Sequence numbers begin at 0; the last `buffer_batches` can be asked for again.

    Endpoints are bound as given; port 0 takes a free one. `endpoint` and `replay_endpoint` then name the real ports.
    """

    def __init__(
        self,
        *,
        endpoint: str = "tcp://127.0.0.1:0",
        replay_endpoint: str | None = "tcp://127.0.0.1:0",
        topic: str = "",
        form: EventForm = "map",
        buffer_batches: int = 10_000,
        hwm: int = 100_000,
    ) -> None:
        self.form: EventForm = form
        self.topic = topic
        self.hwm = hwm
        self.next_seq = 0
        self.blocks_stored = 0
        self.blocks_removed = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._lora_ids: dict[str, int] = {}
        self._context = AsyncContext()
        self._pub = zmq.Socket(self._context, zmq.PUB)
        self._pub.set_hwm(hwm)
        self._replay: AsyncSocket | None = None
        self._task: asyncio.Task[None] | None = None
        try:
            self.endpoint = _bind(self._pub, endpoint)
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self.replay_endpoint = _bind(self._replay, replay_endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def start(self) -> None:
        """Begin to answer replays; needs a running loop."""
        if self._replay is not None:
            self._task = asyncio.create_task(self._serve_replays(self._replay))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._pub.close(linger=0)  # the asyncio context does not know this one, and would wait for it for ever
        self._context.destroy(linger=0)

    def publish(self, events: Sequence[Event], *, at_s: float) -> None:
        """Send one batch; `at_s` is its Unix time. Nothing is sent for no events."""
        if not events:
            return
        shape = self._as_map if self.form == "map" else self._as_array
        payload = _encode([at_s, [shape(e) for e in events], 0])
        seq = self.next_seq
        self.next_seq += 1
        self._buffer.append((seq, payload))
        # PUB drops at its high-water mark and never blocks: a slow subscriber has a gap, as with vLLM
        self._pub.send_multipart((self.topic.encode(), seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        for e in events:
            if isinstance(e, Stored):
                self.blocks_stored += len(e.hashes)
            elif isinstance(e, Removed):
                self.blocks_removed += 1

    def source(self) -> dict[str, Any]:
        """This rank's entry of GET /kv_event_sources."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self._buffer.maxlen,
            "hwm": self.hwm,
            "max_queue_size": 100_000,
            "topic": self.topic,
        }

    def _as_map(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Stored):
            return {
                "type": "BlockStored",
                "block_hashes": event.hashes,
                "parent_block_hash": event.parent,
                "token_ids": event.token_ids,
                "block_size": event.block_size_tokens,
                "lora_id": self._lora_id(event.lora_name),
                "medium": "GPU",
                "lora_name": event.lora_name,
                "extra_keys": _extra_keys(event),
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        if isinstance(event, Removed):
            return {"type": "BlockRemoved", "block_hashes": (event.hash,), "medium": "GPU", "group_idx": 0}
        assert isinstance(event, Cleared)
        return {"type": "AllBlocksCleared"}

    def _as_array(self, event: Event) -> list[Any]:
        if isinstance(event, Stored):
            lora_id = self._lora_id(event.lora_name)
            head = ["BlockStored", event.hashes, event.parent, event.token_ids, event.block_size_tokens, lora_id]
            return [*head, "GPU", event.lora_name, _extra_keys(event), 0, "full_attention"]
        if isinstance(event, Removed):
            return ["BlockRemoved", (event.hash,), "GPU", 0]
        assert isinstance(event, Cleared)
        return ["AllBlocksCleared"]

    def _lora_id(self, name: str | None) -> int | None:
        return None if name is None else self._lora_ids.setdefault(name, len(self._lora_ids) + 1)

    async def _serve_replays(self, socket: AsyncSocket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3:  # identity, empty, first sequence number wanted
                log.warning("replay request with %d frames instead of 3", len(frames))
                continue
            client, _, wanted = frames
            first = int.from_bytes(wanted, "big")
            for seq, payload in list(self._buffer):
                if seq >= first:
                    await socket.send_multipart((client, b"", self.topic.encode(), seq.to_bytes(8, "big"), payload))
            await socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _bind(socket: zmq.Socket[Any], endpoint: str) -> str:
    socket.setsockopt(zmq.LINGER, 0)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(endpoint)
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def _extra_keys(event: Stored) -> list[list[str] | None]:
    """One entry per block: LoRA name on each, the salt on the block that begins at token 0; as vLLM, untagged."""
    lora = [event.lora_name] if event.lora_name is not None else []
    first = [*lora, event.cache_salt] if event.cache_salt is not None else lora
    return [(first if n == 0 else lora) or None for n in range(len(event.hashes))]
