"""vLLM's step loop written the plain way: every sequence in every step, lists scanned. The oracle of loadtest.engine.

Written from the description of the scheduler (and read beside vLLM 0.32's source), sharing no code with the fast
engine but the request and event types. Slow on purpose.
"""

from loadtest.engine import Cleared, Event, FirstToken, Removed, Request, StepResult, Stored
from loadtest.profile import Profile


class PlainSequence:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.outputs = 0
        self.computed = 0
        self.blocks: list[int] = []
        self.cached = -1
        self.hashes = list(request.hashes)
        self.decoding = False  # its last step gave a token, and it was not preempted since

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.outputs


class ReferenceEngine:
    def __init__(self, profile: Profile, private_start: int = 0) -> None:
        self.p = profile
        self.free = list(range(1, profile.num_blocks))
        self.refs = dict.fromkeys(self.free, 0)
        self.hash_of: dict[int, int | None] = dict.fromkeys(self.free)
        self.stored: list[tuple[int, int]] = []  # (hash, block) in order of storing
        self.arriving: list[tuple[float, int, PlainSequence]] = []
        self.waiting: list[PlainSequence] = []
        self.running: list[PlainSequence] = []
        self.events: list[Event] = []
        self.private = private_start
        self.arrivals = 0
        self.slots: list[str] = []  # adapters on the GPU, least recently used first
        self.loads = 0

    def submit(self, request: Request, now_s: float) -> None:
        self.arrivals += 1
        self.arriving.append((now_s + self.p.frontend_s, self.arrivals, PlainSequence(request)))
        self.arriving.sort(key=lambda a: a[:2])

    def abort(self, request_id: object) -> None:
        for seq in self.running + self.waiting:
            if seq.request.id == request_id:
                was_running = seq in self.running
                (self.running if was_running else self.waiting).remove(seq)
                self.release(seq)
                if was_running:
                    self.touch(seq)
                return
        self.arriving = [a for a in self.arriving if a[2].request.id != request_id]

    def reset(self) -> bool:
        if any(self.refs.values()):
            return False
        self.hash_of = dict.fromkeys(self.hash_of)
        self.stored = []
        self.events.append(Cleared())
        return True

    def find(self, h: int) -> int | None:
        return next((b for stored, b in self.stored if stored == h), None)

    def hash_at(self, seq: PlainSequence, i: int) -> int:
        while i >= len(seq.hashes):
            self.private += 1
            seq.hashes.append((1 << 62) + self.private)
        return seq.hashes[i]

    def take(self, n: int) -> list[int] | None:
        if n > len(self.free):
            return None
        taken, self.free = self.free[:n], self.free[n:]
        for b in taken:
            h = self.hash_of[b]
            if h is not None:
                self.stored.remove((h, b))
                self.hash_of[b] = None
                self.events.append(Removed(h))
            self.refs[b] = 1
        return taken

    def release(self, seq: PlainSequence) -> None:
        for b in reversed(seq.blocks):
            self.refs[b] -= 1
            if self.refs[b] == 0:
                if self.hash_of[b] is None:
                    self.free.insert(0, b)
                else:
                    self.free.append(b)
        seq.blocks = []
        seq.computed = 0
        seq.decoding = False

    def store(self, seq: PlainSequence, before: int, after: int) -> None:
        bs = self.p.block_size_tokens
        first = before // bs
        full = after // bs
        fresh = [i for i in range(first, full) if self.hash_of[seq.blocks[i]] is None]
        if not fresh:
            return
        for i in fresh:
            h = self.hash_at(seq, i)
            self.hash_of[seq.blocks[i]] = h
            self.stored.append((h, seq.blocks[i]))
        self.events.append(
            Stored(
                tuple(seq.hashes[i] for i in fresh),
                seq.hashes[fresh[0] - 1] if fresh[0] else None,
                tuple(seq.request.token_ids[fresh[0] * bs : full * bs]),
                bs,
                seq.request.lora_name,
                seq.request.cache_salt if not fresh[0] else None,
            )
        )

    def touch(self, seq: PlainSequence) -> None:
        """Its adapter was used now."""
        name = seq.request.lora_name
        if self.p.max_loras and name is not None:
            if name in self.slots:
                self.slots.remove(name)
            self.slots.append(name)

    def running_adapters(self) -> set[str]:
        return {s.request.lora_name for s in self.running if s.request.lora_name is not None}

    def slot_is_free_for(self, seq: PlainSequence) -> bool:
        name = seq.request.lora_name
        return not self.p.max_loras or name is None or len(self.running_adapters() | {name}) <= self.p.max_loras

    def take_slot(self, seq: PlainSequence) -> int:
        """How many adapters had to be loaded: 0 or 1."""
        name = seq.request.lora_name
        if not self.p.max_loras or name is None:
            return 0
        loads = 0
        if name not in self.slots:
            loads = 1
            if len(self.slots) == self.p.max_loras:
                self.slots.remove(next(n for n in self.slots if n not in self.running_adapters()))
        self.touch(seq)
        self.loads += loads
        return loads

    def allocate(self, seq: PlainSequence, new: int) -> bool:
        need = -(-(seq.computed + new) // self.p.block_size_tokens) - len(seq.blocks)
        blocks = self.take(need)
        if blocks is None:
            return False
        seq.blocks += blocks
        self.store(seq, seq.computed, seq.computed + new)
        return True

    def step(self, now_s: float) -> StepResult | None:
        while self.arriving and self.arriving[0][0] <= now_s:
            self.waiting.append(self.arriving.pop(0)[2])
        if not self.running and not self.waiting:
            return None
        p, bs = self.p, self.p.block_size_tokens
        result = StepResult(now_s, now_s, 0, 0, 0, [], [], [], [])
        budget = p.max_num_batched_tokens
        scheduled: list[tuple[PlainSequence, int]] = []
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            new = min(seq.tokens - seq.computed, budget)
            ok = self.allocate(seq, new)
            while not ok:
                victim = self.running.pop()
                self.release(victim)
                self.touch(victim)
                self.waiting.insert(0, victim)
                result.preempted.append(victim.request.id)
                if victim is seq:
                    break
                ok = self.allocate(seq, new)
            if not ok:
                break
            scheduled.append((seq, new))
            budget -= new
            i += 1
        at = 0  # requests before it were passed over
        while not result.preempted and at < len(self.waiting) and budget > 0 and len(self.running) < p.max_num_seqs:
            seq = self.waiting[at]
            if not self.slot_is_free_for(seq):
                at += 1
                continue
            hit: list[int] = []
            if not seq.request.skip_cache_read:
                for k in range((seq.tokens - 1) // bs):
                    b = self.find(seq.hashes[k]) if k < len(seq.hashes) else None
                    if b is None:
                        break
                    hit.append(b)
            idle = sum(1 for b in hit if self.refs[b] == 0)
            if -(-seq.tokens // bs) - len(hit) + idle > len(self.free):
                break
            for b in hit:
                if self.refs[b] == 0:
                    self.free.remove(b)
                self.refs[b] += 1
            seq.blocks = hit
            seq.computed = len(hit) * bs
            if seq.cached < 0:
                seq.cached = seq.computed
            new = min(seq.tokens - seq.computed, budget)
            assert self.allocate(seq, new)
            self.waiting.pop(at)
            result.ends_s += self.take_slot(seq) * p.lora_load_s
            self.running.append(seq)
            scheduled.append((seq, new))
            budget -= new
        self.run(scheduled, result)
        result.events = self.events
        self.events = []
        return result

    def run(self, scheduled: list[tuple[PlainSequence, int]], result: StepResult) -> None:
        p = self.p
        prefill_s, kv_tokens = 0.0, 0
        for seq, new in scheduled:
            if seq.decoding:
                kv_tokens += seq.tokens
                result.decode_sequences += 1
            else:
                middle = seq.computed + new / 2
                prefill_s += new * (1.0 + middle / p.attention_equal_context_tokens) / p.prefill_tokens_per_s
                result.prefill_tokens += new
                result.prefills += 1
        result.ends_s += p.t0_s + prefill_s + kv_tokens * p.c_kv_s + len(scheduled) * p.c_seq_s
        for seq, new in scheduled:
            seq.computed += new
            if seq.computed < seq.tokens:
                continue
            if seq.outputs == 0:
                result.first.append(FirstToken(seq.request.id, seq.cached))
            seq.outputs += 1
            seq.decoding = True
            if seq.outputs == seq.request.output_tokens:
                self.running.remove(seq)
                self.release(seq)
                self.touch(seq)
                result.finished.append(seq.request.id)
