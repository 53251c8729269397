"""The Ledger: what one worker holds, told by its sequence numbers and events. Pure.

The engine's hash is an opaque name, mapped to our key. Copies are counted, because vLLM stores and removes duplicates:
a set would forget a block while a copy is still there. Only the full-attention group makes prefix length. What cannot
be named for certain (unknown parent, images, an adapter without a name) is remembered but never claimed: cold is better
than wrong. May import: the standard library, msgspec, router.core, and indexer's wire, table, content, snapshot.
"""

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from typing import Literal

import msgspec

from indexer import snapshot as snap
from indexer.content import is_plain, salt_of, tier_of
from indexer.snapshot import Snapshot
from indexer.table import SHIFT, new_table, table_bytes
from indexer.wire import Batch, Cleared, Removed, Stored
from router.core.hashing import next_key, root_key
from router.core.types import TIERS, Add, BlockKey, Clear, IndexOp, Remove, Tier

ReplayReason = Literal["start", "gap", "reconnect", "restart", "parent", "undecodable"]

# vllm/v1/kv_cache_interface.py KVCacheSpecKind: those whose hits need every block from 0.
_FULL_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_NO_KINDS = frozenset({None, "unknown"})
_SHIFTS = {tier: 16 * i for i, tier in enumerate(TIERS)}  # the fourth 16 bits: the adapter family
_FAMILY_SHIFT = 48
_COPIES = (1 << _FAMILY_SHIFT) - 1
_COUNT_MAX = 0xFFFF


class AskReplay(msgspec.Struct, frozen=True):
    """Replay from this sequence number (the last applied one, so that it can be compared) and tell the Ledger.

    `ops` come first; the batch that led to this was not applied and is to be received again afterwards.
    """

    from_seq: int
    reason: ReplayReason
    ops: tuple[IndexOp, ...] = ()


Told = list[IndexOp] | AskReplay


class Facts(msgspec.Struct):
    """Counts for metrics and /debug/pods."""

    batches: int = 0
    doubles: int = 0
    gaps: int = 0
    clears: int = 0  # AllBlocksCleared
    forgets: int = 0  # how often everything was forgotten: restart, a gap that could not be filled
    orphans: int = 0  # blocks stored under a parent that is not known
    unclaimable: int = 0  # blocks whose content our keys cannot name (media, adapter without a name, masks)
    unknown_removals: int = 0
    unknown_events: int = 0
    other_groups: int = 0  # blocks of groups that do not make prefix length
    undecodable: int = 0
    lora_reloads: int = 0


class Ledger:
    """One worker's cache as told so far. `seed` and `model` (base id) go into every chain's root key."""

    def __init__(self, *, seed: str, model: str) -> None:
        self._seed, self._model = seed, model
        self.facts = Facts()
        self.last_seq = -1  # the last applied; -1: nothing yet
        self.last_digest = 0
        self.whole = False  # the history since sequence 0 is known
        self.exhausted = False  # a replay from 0 was answered: nothing older can be had
        self.sizes: Counter[int] = Counter()
        self._blind = False  # replay could not help: take the next live batch as the beginning
        self._ask: AskReplay | None = None
        self._checked = False
        self._last_live = -1
        self._group: int | None = None
        self._group_known = False
        self._families: dict[tuple[str | None, int | None], int] = {(None, None): 0}
        self._roots: dict[tuple[str | None, str | None], BlockKey] = {}
        self._ops: list[tuple[bool, Tier, list[BlockKey]]] = []
        self._empty()

    def _empty(self) -> None:
        self._blocks = new_table()  # engine hash -> our key (0: not claimable), copies per tier and family
        self._claims = new_table(valued=False)  # our key -> how many engine hashes claim it, per tier; family
        self.claimed: dict[Tier, int] = dict.fromkeys(TIERS, 0)

    # -- sequence ---------------------------------------------------------------------------------------------

    def receive(self, seq: int, batch: Batch | None, digest: int = 0) -> Told:
        """A live batch (None: it could not be decoded). Operations in order, or AskReplay and nothing applied."""
        if self.last_seq < 0 and not (seq == 0 or self._blind):
            return AskReplay(0, "start")
        if seq <= self._last_live and not (seq == self.last_seq and digest == self.last_digest):
            self._last_live = seq - 1
            return AskReplay(max(self.last_seq, 0), "reconnect")  # it went back: another process, unless proven
        if self.last_seq < 0:
            self.whole = seq == 0
        elif seq <= self.last_seq:
            self._last_live = seq
            self.facts.doubles += 1
            return []
        elif seq > self.last_seq + 1:
            self.facts.gaps += 1
            return AskReplay(self.last_seq, "gap")
        elif batch is None:
            return AskReplay(self.last_seq, "undecodable")
        self._last_live = seq
        return self._apply(seq, batch, digest)

    def connected(self) -> AskReplay:
        """The socket was connected (again). Sequences alone cannot tell whether it is the same process."""
        self._last_live = -1
        return AskReplay(0, "start") if self.last_seq < 0 else AskReplay(self.last_seq, "reconnect")

    def begin_replay(self, ask: AskReplay) -> None:
        """The answer to `ask` comes now: `replayed` for each frame, then `end_replay`."""
        self._ask = ask
        self._checked = self.last_seq < 0

    def replayed(self, seq: int, batch: Batch | None, digest: int = 0) -> Told:
        """One replayed batch. AskReplay: stop reading this answer and ask again (another process, a hole in it)."""
        assert self._ask is not None
        reason = self._ask.reason
        if not self._checked and reason == "parent":
            self._checked = True
            return [*self._forget(), *self._begin(seq, batch, digest)]
        if not self._checked:
            if seq < self.last_seq:
                return []  # a server that begins before what was asked
            self._checked = True
            if seq == self.last_seq:
                return [] if digest == self.last_digest else self.restarted()
            if seq > self.last_seq + 1 or reason == "reconnect":  # it does not reach back, or proves nothing
                ops = [*self._forget(), *self._begin(seq, batch, digest)]
                self.exhausted = True
                return ops
        if self.last_seq < 0:
            return self._begin(seq, batch, digest)
        if seq <= self.last_seq:
            return []
        if seq > self.last_seq + 1:
            return AskReplay(self.last_seq, "gap")
        return self._apply(seq, batch, digest)

    def end_replay(self, *, answered: bool) -> Told:
        """The answer ended, by its end marker (`answered`) or by time, or could not be had at all."""
        assert self._ask is not None
        reason, self._ask = self._ask.reason, None
        if self.last_seq < 0:
            self._blind = not answered  # an empty answer: nothing was published yet, so the first batch will be 0
        elif self._checked or reason == "parent":
            pass
        elif answered:
            return self.restarted()  # the process does not know our last batch: it is another one
        else:
            return self.give_up()
        return []

    def give_up(self) -> list[IndexOp]:
        """What is missing cannot be had: forget everything and take the next live batch as the beginning."""
        ops = self._forget()
        self._blind = True
        return ops

    def restarted(self) -> AskReplay:
        """The process is another one now (by its start time, its container, its replay)."""
        return AskReplay(0, "restart", tuple(self._forget()))

    def clear(self) -> list[IndexOp]:
        """Forget everything, as for a new life of the worker."""
        return self._forget()

    @property
    def short(self) -> bool:
        """Older batches may still be had: no replay from 0 was ever answered."""
        return not self.whole and not self.exhausted and (self.last_seq >= 0 or self._blind)

    def _begin(self, seq: int, batch: Batch | None, digest: int) -> list[IndexOp]:
        assert self._ask is not None
        self.whole = seq == 0
        self.exhausted = self._ask.from_seq == 0
        return self._apply(seq, batch, digest)

    def _forget(self) -> list[IndexOp]:
        self.facts.forgets += 1
        self._empty()
        self.last_seq, self.last_digest = -1, 0
        self.whole = self.exhausted = self._blind = False
        self._families = {(None, None): 0}
        self._group_known = False
        return [Clear()]

    # -- events -----------------------------------------------------------------------------------------------

    def _apply(self, seq: int, batch: Batch | None, digest: int) -> list[IndexOp]:
        if batch is None:  # what it said is lost, so nothing that was known is certain any longer
            self.facts.undecodable += 1
            lost = self._forget()
            self.last_seq, self.last_digest, self.exhausted = seq, digest, True
            return lost
        self._blind = False
        self.last_seq, self.last_digest = seq, digest
        self.facts.batches += 1
        out: list[IndexOp] = []
        for event in batch.events:
            if isinstance(event, Stored):
                self._stored(event)
            elif isinstance(event, Removed):
                self._removed(event)
            elif isinstance(event, Cleared):
                out.extend(self._drain())
                out.append(Clear())
                self._clear_gpu()
            else:
                self.facts.unknown_events += 1
        out.extend(self._drain())
        return out

    def _stored(self, e: Stored) -> None:
        if not self._counts(e.group, e.kind):
            self.facts.other_groups += len(e.hashes)
            return
        tier = tier_of(e.medium)
        step = 4 * e.block_size_tokens
        nameable = (
            step > 0
            and len(e.tokens) == step * len(e.hashes)
            and not (e.lora_name is None and e.lora_id is not None)
            and (tier == "gpu" or e.extra_keys is not None)
        )
        if tier == "gpu" and nameable:
            self.sizes[e.block_size_tokens] += len(e.hashes)
        parent = self._parent(e)
        family = self._family(e.lora_name, e.lora_id)
        tokens = e.tokens
        for i, name in enumerate(e.hashes):
            key = b""
            if parent and nameable and (e.extra_keys is None or e.extra_keys[i : i + 1] == [None] or is_plain(e, i)):
                key = next_key(BlockKey(parent), tokens[i * step : (i + 1) * step])
            parent = self._add_copy(name or 1, key, tier, family)
            if not parent:
                self.facts.unclaimable += 1

    def _parent(self, e: Stored) -> bytes:
        """The key before the first block; b"" when it cannot be told."""
        if e.parent is None:
            salt = salt_of(e)
            root = (e.lora_name, salt)
            if root not in self._roots:
                if len(self._roots) >= 4096:
                    self._roots.clear()
                self._roots[root] = root_key(seed=self._seed, model=self._model, lora_name=e.lora_name, cache_salt=salt)
            return self._roots[root]
        name = e.parent or 1
        part = self._blocks[name >> SHIFT]
        i = part.find(name)
        if i < 0:
            self.facts.orphans += len(e.hashes)
            return b""
        value = part.values[i]
        return value.to_bytes(8, "big") if value else b""

    def _add_copy(self, name: int, key: bytes, tier: Tier, family: int) -> bytes:
        """One copy more. Returns the key it is claimed under, b"" if it is not."""
        part = self._blocks[name >> SHIFT]
        i = part.find(name)
        if i < 0:
            part.put(i, name, int.from_bytes(key, "big"), (family << _FAMILY_SHIFT) + (1 << _SHIFTS[tier]))
            if key:
                self._claim(BlockKey(key), tier, family)
            return key
        if part.values[i]:
            key = part.values[i].to_bytes(8, "big")
        elif key:  # known until now only as something that cannot be named
            part.values[i] = int.from_bytes(key, "big")
            for other in TIERS:
                if (part.counts[i] >> _SHIFTS[other]) & _COUNT_MAX:
                    self._claim(BlockKey(key), other, family)
        copies = (part.counts[i] >> _SHIFTS[tier]) & _COUNT_MAX
        if copies < _COUNT_MAX:
            part.counts[i] += 1 << _SHIFTS[tier]
        if copies == 0 and key:
            self._claim(BlockKey(key), tier, family)
        return key

    def _removed(self, e: Removed) -> None:
        if e.group is not None and self._group_known and e.group != (self._group or 0):
            return
        shift = _SHIFTS[tier_of(e.medium)]
        for name in e.hashes:
            self._remove_copy(name or 1, shift, tier_of(e.medium))

    def _remove_copy(self, name: int, shift: int, tier: Tier) -> None:
        part = self._blocks[name >> SHIFT]
        i = part.find(name)
        copies = (part.counts[i] >> shift) & _COUNT_MAX if i >= 0 else 0
        if not copies:
            self.facts.unknown_removals += 1
            return
        part.counts[i] -= 1 << shift
        value = part.values[i]
        if not part.counts[i] & _COPIES:
            part.remove(i)
        if copies == 1 and value:
            self._unclaim(value, tier)

    def _claim(self, key: BlockKey, tier: Tier, family: int) -> None:
        name = int.from_bytes(key, "big") or 1
        part = self._claims[name >> SHIFT]
        i = part.find(name)
        if i >= 0 and family and part.counts[i] >> _FAMILY_SHIFT != family:
            self._reloaded(part.counts[i] >> _FAMILY_SHIFT, family)
            i = part.find(name)
        if i < 0:
            part.put(i, name, 0, (family << _FAMILY_SHIFT) + (1 << _SHIFTS[tier]))
        else:
            part.counts[i] += 1 << _SHIFTS[tier]
            if (part.counts[i] >> _SHIFTS[tier]) & _COUNT_MAX > 1:
                return
        self.claimed[tier] += 1
        self._emit(add=True, tier=tier, key=key)

    def _unclaim(self, name: int, tier: Tier) -> None:
        part = self._claims[name >> SHIFT]
        i = part.find(name)
        part.counts[i] -= 1 << _SHIFTS[tier]
        if (part.counts[i] >> _SHIFTS[tier]) & _COUNT_MAX == 0:
            self.claimed[tier] -= 1
            self._emit(add=False, tier=tier, key=BlockKey(name.to_bytes(8, "big")))
        if not part.counts[i] & _COPIES:
            part.remove(i)

    def _reloaded(self, old: int, new: int) -> None:
        """The same tokens under the same adapter name got another engine hash: the name means other weights now.

        (Since 0.31 the adapter's path is in the engine's hash, but not in the event.) What the old adapter left
        behind can never be hit again: keep its copies for the removals to come, claim none of them.
        """
        self.facts.lora_reloads += 1
        for part in self._blocks:
            for i in part.places():
                if part.counts[i] >> _FAMILY_SHIFT == old and part.values[i]:
                    value, part.values[i] = part.values[i], 0
                    for tier in TIERS:
                        if (part.counts[i] >> _SHIFTS[tier]) & _COUNT_MAX:
                            self._unclaim(value, tier)

    def _clear_gpu(self) -> None:
        """AllBlocksCleared names no medium: it means the GPU. What other tiers hold is claimed anew after the Clear."""
        self.facts.clears += 1
        kept = [(n, v, c & ~_COUNT_MAX) for n, v, c in self._entries() if c & _COPIES & ~_COUNT_MAX]
        self._empty()
        for name, value, counts in kept:
            part = self._blocks[name >> SHIFT]
            part.put(part.find(name), name, value, counts)
            for tier in TIERS:
                if value and (counts >> _SHIFTS[tier]) & _COUNT_MAX:
                    self._claim(BlockKey(value.to_bytes(8, "big")), tier, counts >> _FAMILY_SHIFT)

    def _counts(self, group: int | None, kind: str | None) -> bool:
        """Does this group make prefix length? Decided once per life: the first full-attention group that is named."""
        if kind not in _FULL_KINDS and kind not in _NO_KINDS:
            return False
        if not self._group_known or (self._group is None and group is not None):
            if kind in _NO_KINDS and group:
                return False
            self._group, self._group_known = group, True
        return group is None or group == self._group

    def _family(self, lora_name: str | None, lora_id: int | None) -> int:
        known = self._families.get((lora_name, lora_id))
        if known is not None:
            return known
        if lora_name is None or len(self._families) > _COUNT_MAX:
            return 0
        return self._families.setdefault((lora_name, lora_id), len(self._families))

    # -- out --------------------------------------------------------------------------------------------------

    def _emit(self, *, add: bool, tier: Tier, key: BlockKey) -> None:
        if self._ops and self._ops[-1][0] is add and self._ops[-1][1] == tier:
            self._ops[-1][2].append(key)
        else:
            self._ops.append((add, tier, [key]))

    def _drain(self) -> Iterator[IndexOp]:
        ops, self._ops = self._ops, []
        return (Add(tuple(keys), tier) if add else Remove(tuple(keys), tier) for add, tier, keys in ops)

    def _entries(self) -> Iterator[tuple[int, int, int]]:
        for part in self._blocks:
            for i in part.places():
                yield part.names[i], part.values[i], part.counts[i]

    def claims(self, tier: Tier) -> Iterator[BlockKey]:
        """Every key that is claimed on a tier now. Nothing may be received while it is read."""
        shift = _SHIFTS[tier]
        for part in self._claims:
            for i in part.places():
                if (part.counts[i] >> shift) & _COUNT_MAX:
                    yield BlockKey(part.names[i].to_bytes(8, "big"))

    # -- snapshots --------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot | None:
        """All of this, to be packed elsewhere; None while nothing is known."""
        if self.last_seq < 0:
            return None
        return Snapshot(
            snap.VERSION,
            self._origin(),
            self.last_seq,
            self.last_digest,
            self.whole,
            self.exhausted,
            self._group,
            self._group_known,
            list(self._families),
            dict(self.sizes),
            *snap.dump_table(self._blocks),
        )

    def restore(self, snapshot: Snapshot) -> bool:
        """Take over what a Ledger of the same seed and model knew. False, and nothing known, if it is of another."""
        self._empty()
        if snapshot.origin != self._origin() or not snap.load_table(self._blocks, snapshot):
            self._empty()
            return False
        self.last_seq, self.last_digest = snapshot.last_seq, snapshot.last_digest
        self.whole, self.exhausted = snapshot.whole, snapshot.exhausted
        self._group, self._group_known = snapshot.group, snapshot.group_known
        self._families = {family: n for n, family in enumerate(snapshot.families)}
        self.sizes = Counter(snapshot.sizes)
        for _, value, counts in self._entries():
            for tier in TIERS:
                if value and (counts >> _SHIFTS[tier]) & _COUNT_MAX:
                    self._claim(BlockKey(value.to_bytes(8, "big")), tier, counts >> _FAMILY_SHIFT)
        self._ops.clear()  # the store is written whole afterwards
        return True

    def _origin(self) -> bytes:
        """Tells seed and model apart without giving the root key away."""
        return blake2b(root_key(seed=self._seed, model=self._model), digest_size=16).digest()

    @property
    def block_size_tokens(self) -> int | None:
        """The block size most blocks came with; None before the first."""
        return self.sizes.most_common(1)[0][0] if self.sizes else None

    @property
    def bytes_used(self) -> int:
        """What the tables take."""
        return table_bytes(self._blocks) + table_bytes(self._claims)
