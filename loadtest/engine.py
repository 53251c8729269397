"""A vLLM pod in virtual time: scheduler, block cache, step clock. Pure.

V1's loop: running requests first (one token each, or the rest of a chunked prefill), then the waiting ones first come
first served, as far as the token budget, the sequence limit and the free blocks go. A step is atomic here: `step(now)`
leaves the state of the step's end, and what it reports happens at `ends_s`. Decoding costs work only where a block
begins, fills or a request ends: a wheel of `block_size_tokens` buckets knows which sequences those are
(tests/sim/reference_engine.py is the plain version, and both must agree).

The engine knows nothing of the router: its block hashes are its own.
May import: the standard library, msgspec, xxhash, loadtest.blocks, loadtest.profile.
"""

import heapq
import struct
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from random import Random

import msgspec
import xxhash

from loadtest.blocks import BlockPool, Cleared, Event, Removed, Stored
from loadtest.profile import Profile

__all__ = ["Cleared", "Engine", "Event", "FirstToken", "Gauges", "Removed", "Request", "StepResult", "Stored"]


class Request(msgspec.Struct, gc=False):
    """One request. `hashes` is the chain of full blocks of prompt and answer, as far as known to the caller."""

    id: str | int
    prompt_tokens: int
    output_tokens: int  # how many will be generated, at least 1
    hashes: Sequence[int]
    token_ids: Sequence[int] = ()  # prompt and answer; empty for synthetic requests
    lora_name: str | None = None
    cache_salt: str | None = None
    skip_cache_read: bool = False  # prompt_logprobs


def request_from_tokens(
    request_id: str | int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    block_size_tokens: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    skip_cache_read: bool = False,
) -> Request:
    """A request with real token ids; the answer's ids are chosen beforehand. Hashes are opaque 64-bit integers."""
    ids = [*prompt_ids, *output_ids]
    packed = array("I", ids).tobytes()
    step = 4 * block_size_tokens
    digest = repr(("engine", lora_name, cache_salt)).encode()
    hashes = []
    for start in range(0, len(packed) - step + 1, step):
        digest = xxhash.xxh3_128_digest(digest + packed[start : start + step])
        hashes.append(struct.unpack(">Q", digest[8:])[0])
    return Request(
        request_id, len(prompt_ids), len(output_ids), hashes, tuple(ids), lora_name, cache_salt, skip_cache_read
    )


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """A request's first token, and how much of its prompt came from the cache when it was first admitted."""

    id: str | int
    cached_tokens: int


class StepResult(msgspec.Struct, gc=False):
    """What one step did. Times are seconds of the caller's clock; everything counts as happening at `ends_s`."""

    started_s: float
    ends_s: float
    prefill_tokens: int
    decode_sequences: int
    prefills: int  # sequences that computed a part of their prompt
    first: list[FirstToken]
    finished: list[str | int]
    preempted: list[str | int]
    events: list[Event]


class Gauges(msgspec.Struct, frozen=True):
    """What /metrics would say now. Counters count since the engine began."""

    running: int
    waiting: int
    kv_usage_ratio: float  # blocks held by running requests; a full but idle cache is 0
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    finished_requests: int
    aborted_requests: int
    running_adapters: tuple[str, ...] = ()  # with max_loras only: those that have running requests


class _Sequence:
    """A request inside the engine. While decoding, its length is `base + clock`."""

    __slots__ = (
        "blocks", "cached_tokens", "computed", "decoding", "finish_clock", "number", "preemptions", "private",
        "request", "stored_blocks", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = request.prompt_tokens  # prompt and answer so far; stale while decoding
        self.computed = 0
        self.blocks: list[int] = []
        self.stored_blocks = 0
        self.cached_tokens = -1  # -1: not admitted yet
        self.preemptions = 0
        self.private: list[int] = []  # hashes of the answer's blocks that the caller did not name
        self.number = 0  # of the admission
        self.decoding = False
        self.finish_clock = -1


class Engine:
    """One pod. Deterministic in (profile, seed, calls)."""

    def __init__(self, profile: Profile, seed: int = 0, *, slowdown: float = 1.0) -> None:
        self.profile = profile
        self.slowdown = slowdown  # 2.0 = every step takes twice as long
        self._rng = Random(seed)
        self._events: list[Event] = []
        self._pool = BlockPool(profile.num_blocks, self._events)
        self._arriving: list[tuple[float, int, _Sequence]] = []
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}  # by admission number, oldest first
        self._by_id: dict[str | int, _Sequence] = {}
        self._partial: _Sequence | None = None  # the one prefill that did not fit into a step: always the last admitted
        self._clock = 0  # steps begun
        bs = profile.block_size_tokens
        self._begins: list[dict[int, _Sequence]] = [{} for _ in range(bs)]  # clock % bs -> who needs a block
        self._finishes: dict[int, list[_Sequence]] = {}  # clock -> whose last token comes in that step
        self._decoding = 0
        self._decode_kv_tokens = 0
        self._admissions = 0
        self._arrivals = 0
        self._blocked_hashes: frozenset[int] | None = None  # the first waiting request does not fit until ...
        self._lora_running: Counter[str] = Counter()  # running requests by adapter, with max_loras only
        self._lora_slots: dict[str, None] = {}  # adapters on the GPU, least recently used first
        self._lora_loads = 0  # in this step
        self._private_hashes = (seed & 0xFFFF) << 40
        self._queries = self._hits = self._preemptions = 0
        self._prompt_tokens = self._generated = self._finished = self._aborted = 0

    def submit(self, request: Request, now_s: float) -> None:
        """Hand in a request; the scheduler sees it after the front-end latency.

        Raises ValueError for an id in use or a request that no pod of this profile could ever hold.
        """
        p = self.profile
        total = request.prompt_tokens + request.output_tokens
        if request.id in self._by_id:
            raise ValueError(f"request id {request.id!r} is in flight already")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        if total > p.max_model_len_tokens:
            raise ValueError(f"{total} tokens exceed the model's {p.max_model_len_tokens}")
        if -(-total // p.block_size_tokens) > self._pool.usable_blocks:
            raise ValueError(f"{total} tokens exceed the pod's KV cache")
        seq = _Sequence(request)
        self._by_id[request.id] = seq
        self._arrivals += 1
        ready_s = now_s + p.frontend_s + p.frontend_s_per_token * request.prompt_tokens
        if p.frontend_jitter_s:
            ready_s += self._rng.expovariate(1.0 / p.frontend_jitter_s)
        heapq.heappush(self._arriving, (ready_s, self._arrivals, seq))

    def abort(self, request_id: str | int) -> bool:
        """Forget a request wherever it is; its blocks are free at once. False when it is not here."""
        seq = self._by_id.pop(request_id, None)
        if seq is None:
            return False
        if seq.number in self._running and self._running[seq.number] is seq:
            self._leave(seq)
            self._pool.release(seq.blocks)
            self._blocked_hashes = None
        elif seq in self._waiting:
            self._waiting.remove(seq)
            self._blocked_hashes = None
        else:
            self._arriving = [a for a in self._arriving if a[2] is not seq]
            heapq.heapify(self._arriving)
        self._aborted += 1
        return True

    def reset(self) -> bool:
        """reset_prefix_cache: False while blocks are held. AllBlocksCleared goes out with the next step."""
        return self._pool.clear()

    def progress(self, request_id: str | int) -> int:
        """Output tokens so far of a request that is in flight. Raises KeyError otherwise."""
        seq = self._by_id[request_id]
        return self._length(seq) - seq.request.prompt_tokens

    def next_step_s(self, now_s: float) -> float | None:
        """When a step may begin: now, or when the first arrival is through the front end; None when idle."""
        if self._running or self._waiting:
            return now_s
        return max(now_s, self._arriving[0][0]) if self._arriving else None

    def gauges(self) -> Gauges:
        """Counters and gauges as of the end of the last step."""
        return Gauges(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._arriving),
            kv_usage_ratio=1.0 - len(self._pool.free) / self._pool.usable_blocks,
            prefix_queries_tokens=self._queries,
            prefix_hits_tokens=self._hits,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated,
            finished_requests=self._finished,
            aborted_requests=self._aborted,
            running_adapters=tuple(self._lora_running),
        )

    def match_blocks(self, hashes: Sequence[int]) -> int:
        """How many of a chain's blocks, from its start, are in the cache now. For oracles: no real pod answers this."""
        return self._pool.depth(hashes, len(hashes))

    def pending_prefill_tokens(self) -> int:
        """The work of what is still to be computed for all in flight, in tokens without context. For oracles."""
        bs = self.profile.block_size_tokens
        total = self._work_tokens(self._partial.computed, self._partial.tokens) if self._partial else 0.0
        for seq in [*self._waiting, *(a[2] for a in self._arriving)]:
            total += self._work_tokens(self._pool.depth(self._chain(seq), (seq.tokens - 1) // bs) * bs, seq.tokens)
        return round(total)

    def _work_tokens(self, computed: int, until: int) -> float:
        """What the tokens from `computed` to `until` cost, attention counted, in tokens without context."""
        middle = (computed + until) / 2
        return (until - computed) * (1.0 + middle / self.profile.attention_equal_context_tokens)

    def step(self, now_s: float) -> StepResult | None:
        """Run one step that begins at `now_s`; None when there is nothing to run."""
        arriving = self._arriving
        while arriving and arriving[0][0] <= now_s:
            self._waiting.append(heapq.heappop(arriving)[2])
        if not self._running and not self._waiting:
            return None
        p = self.profile
        result = StepResult(now_s, now_s, 0, 0, 0, [], [], [], [])
        self._decode_blocks(result)
        decoding = result.decode_sequences = self._decoding
        kv_tokens = self._decode_kv_tokens
        prefill_s, completed = self._prefill(p.max_num_batched_tokens - decoding, result)
        sequences = decoding + result.prefills
        self._advance(completed, result)
        duration_s = p.t0_s + prefill_s + kv_tokens * p.c_kv_s + sequences * p.c_seq_s
        if self._lora_loads:
            duration_s += self._lora_loads * p.lora_load_s
            self._lora_loads = 0
        if p.jitter_ratio:
            duration_s *= 1.0 + p.jitter_ratio * self._rng.random()
        result.ends_s = now_s + duration_s * self.slowdown
        if self._events:
            result.events = self._events[:]
            self._events.clear()
        return result

    def _decode_blocks(self, result: StepResult) -> None:
        """Give a block to each decoding sequence that begins one, oldest first; enter the blocks that fill up."""
        bs = self.profile.block_size_tokens
        pool = self._pool
        bucket = self._begins[self._clock % bs]
        if bucket:
            if len(bucket) <= len(pool.free):
                for seq in bucket.values():
                    seq.blocks += pool.allocate(1)
            else:
                for seq in list(bucket.values()):
                    while seq.decoding and not pool.free:
                        self._preempt_last(result)
                    if seq.decoding:
                        seq.blocks += pool.allocate(1)
        for seq in self._begins[(self._clock + 1) % bs].values():
            self._store(seq, self._length(seq) // bs)

    def _prefill(self, budget: int, result: StepResult) -> tuple[float, list[_Sequence]]:
        """Continue the unfinished prefill, then admit. Returns the prefill's seconds and who got through."""
        seconds = 0.0
        completed: list[_Sequence] = []
        seq = self._partial
        if seq is not None and budget > 0:
            bs = self.profile.block_size_tokens
            chunk = min(seq.tokens - seq.computed, budget)
            need = -(-(seq.computed + chunk) // bs) - len(seq.blocks)
            if need > len(self._pool.free):
                self._preempt_last(result)
            else:
                seconds += self._run_chunk(seq, chunk, need, completed, result)
                budget -= chunk
        if result.preempted:
            return seconds, completed
        waiting, limit = self._waiting, self.profile.max_num_seqs
        max_loras = self.profile.max_loras
        skipped: list[_Sequence] = []
        while waiting and budget > 0 and len(self._running) < limit and self._blocked_hashes is None:
            if max_loras and self._has_no_slot(waiting[0]):
                skipped.append(waiting.popleft())
                continue
            admitted = self._try_admit(waiting[0])
            if admitted:
                seq = waiting.popleft()
                chunk = min(seq.tokens - seq.computed, budget)
                need = -(-(seq.computed + chunk) // self.profile.block_size_tokens) - len(seq.blocks)
                seconds += self._run_chunk(seq, chunk, need, completed, result)
                budget -= chunk
        waiting.extendleft(reversed(skipped))
        return seconds, completed

    def _has_no_slot(self, seq: _Sequence) -> bool:
        """All slots belong to running requests of other adapters: vLLM passes the request over, later ones go on."""
        name = seq.request.lora_name
        return name is not None and name not in self._lora_running and len(self._lora_running) == self.profile.max_loras

    def _take_slot(self, name: str) -> None:
        """One more running request of the adapter; it is loaded if it is not there, in the place of an idle one."""
        slots = self._lora_slots
        if name in slots:
            del slots[name]
        else:
            self._lora_loads += 1
            if len(slots) == self.profile.max_loras:
                del slots[next(n for n in slots if n not in self._lora_running)]
        slots[name] = None
        self._lora_running[name] += 1

    def _leave_slot(self, name: str) -> None:
        slots, running = self._lora_slots, self._lora_running
        running[name] -= 1
        if not running[name]:
            del running[name]
        del slots[name]
        slots[name] = None

    def _try_admit(self, seq: _Sequence) -> bool:
        """Look the prompt up and take its cached blocks, if the whole sequence fits into the pool now."""
        bs, pool = self.profile.block_size_tokens, self._pool
        usable = 0 if seq.request.skip_cache_read else (seq.tokens - 1) // bs
        chain = self._chain(seq)
        hit = pool.match(chain, usable)
        # vLLM's scheduler_reserve_full_isl: the whole input must fit, cached blocks that are evictable included
        if -(-seq.tokens // bs) - len(hit) + pool.unreferenced(hit) > len(pool.free):
            self._blocked_hashes = frozenset(chain)
            return False
        pool.touch(hit)
        seq.blocks = hit
        seq.stored_blocks = len(hit)
        seq.computed = len(hit) * bs
        if not seq.preemptions:
            self._queries += seq.tokens
            self._hits += seq.computed
        if seq.cached_tokens < 0:
            seq.cached_tokens = seq.computed
        self._admissions += 1
        seq.number = self._admissions
        self._running[seq.number] = seq
        if self.profile.max_loras and seq.request.lora_name is not None:
            self._take_slot(seq.request.lora_name)
        return True

    def _run_chunk(
        self, seq: _Sequence, chunk: int, need: int, completed: list[_Sequence], result: StepResult
    ) -> float:
        """Allocate and enter a chunk's blocks; returns its seconds."""
        p = self.profile
        seq.blocks += self._pool.allocate(need)
        work_tokens = self._work_tokens(seq.computed, seq.computed + chunk)
        seq.computed += chunk
        result.prefill_tokens += chunk
        result.prefills += 1
        self._store(seq, seq.computed // p.block_size_tokens)
        if seq.computed == seq.tokens:
            completed.append(seq)
            self._partial = None
        else:
            self._partial = seq
        return work_tokens / p.prefill_tokens_per_s

    def _store(self, seq: _Sequence, full_blocks: int) -> None:
        """Enter the blocks that became full and report them."""
        first = seq.stored_blocks
        if full_blocks <= first:
            return
        request, bs = seq.request, self.profile.block_size_tokens
        chain = self._chain(seq, full_blocks)
        hashes = tuple(chain[first:full_blocks])
        self._pool.store(seq.blocks[first:full_blocks], hashes)
        seq.stored_blocks = full_blocks
        self._events.append(
            Stored(
                hashes,
                chain[first - 1] if first else None,
                tuple(request.token_ids[first * bs : full_blocks * bs]),
                bs,
                request.lora_name,
                request.cache_salt if not first else None,
            )
        )
        if self._blocked_hashes is not None and not self._blocked_hashes.isdisjoint(hashes):
            self._blocked_hashes = None

    def _chain(self, seq: _Sequence, blocks: int = 0) -> Sequence[int]:
        """The hashes of the sequence's full blocks; answers that the caller did not name get private ones."""
        named = seq.request.hashes
        if blocks > len(named) + len(seq.private):
            for _ in range(blocks - len(named) - len(seq.private)):
                self._private_hashes += 1
                seq.private.append((1 << 62) + self._private_hashes)
        return [*named, *seq.private] if seq.private else named

    def _advance(self, completed: list[_Sequence], result: StepResult) -> None:
        """The end of the step: tokens come out, finished requests free their blocks, prefills join the decoding."""
        clock = self._clock
        self._clock = clock + 1
        self._generated += self._decoding + len(completed)
        self._decode_kv_tokens += self._decoding
        for seq in self._finishes.pop(clock, ()):
            self._finish(seq, result)
        for seq in completed:
            if seq.tokens == seq.request.prompt_tokens:
                result.first.append(FirstToken(seq.request.id, seq.cached_tokens))
                self._prompt_tokens += seq.request.prompt_tokens
            seq.tokens += 1
            left = seq.request.prompt_tokens + seq.request.output_tokens - seq.tokens
            if left:
                self._join(seq, left)
            else:
                self._finish(seq, result)

    def _join(self, seq: _Sequence, left: int) -> None:
        """Start decoding with the next step. `tokens` becomes the length less the clock."""
        bs = self.profile.block_size_tokens
        self._decoding += 1
        self._decode_kv_tokens += seq.tokens
        seq.decoding = True
        seq.finish_clock = self._clock + left - 1
        self._finishes.setdefault(seq.finish_clock, []).append(seq)
        seq.tokens -= self._clock
        self._begins[(1 - seq.tokens) % bs][seq.number] = seq

    def _length(self, seq: _Sequence) -> int:
        return seq.tokens + self._clock if seq.decoding else seq.tokens

    def _leave(self, seq: _Sequence) -> None:
        """Take a running sequence out of the batch. Its blocks are the caller's to release."""
        del self._running[seq.number]
        if self.profile.max_loras and seq.request.lora_name is not None:
            self._leave_slot(seq.request.lora_name)
        if seq is self._partial:
            self._partial = None
        if not seq.decoding:
            return
        del self._begins[(1 - seq.tokens) % self.profile.block_size_tokens][seq.number]
        seq.tokens += self._clock
        seq.decoding = False
        self._decoding -= 1
        self._decode_kv_tokens -= seq.tokens
        ending = self._finishes.get(seq.finish_clock)
        if ending is not None:
            ending.remove(seq)

    def _finish(self, seq: _Sequence, result: StepResult) -> None:
        self._leave(seq)
        self._pool.release(seq.blocks)
        del self._by_id[seq.request.id]
        self._finished += 1
        self._blocked_hashes = None
        result.finished.append(seq.request.id)

    def _preempt_last(self, result: StepResult) -> None:
        """Recompute later: the last admitted goes back to the head of the queue and its blocks are free."""
        seq = next(reversed(self._running.values()))
        self._leave(seq)
        self._pool.release(seq.blocks)
        seq.blocks = []
        seq.computed = seq.stored_blocks = 0
        seq.preemptions += 1
        self._preemptions += 1
        self._waiting.appendleft(seq)
        self._blocked_hashes = None
        result.preempted.append(seq.request.id)
