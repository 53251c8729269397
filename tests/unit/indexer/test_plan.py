"""The Ledger against an independent recount of recorded events, and as a table of the rules."""

import struct
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
import xxhash

from indexer.merge import merged
from indexer.plan import AskReplay, Ledger
from indexer.snapshot import pack, unpack
from indexer.wire import Batch, Cleared, Event, Removed, Stored, Unknown, decode
from router.core.hashing import chain_keys, pack_tokens, root_key
from router.core.types import Add, BlockKey, Clear, IndexOp, Remove
from tests.fakes.recorded import SETS, as_arrays, as_map_batch, frames, raw


def ledger() -> Ledger:
    return Ledger(seed="seed", model="m")


class Index:
    """What a store would hold after these operations."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {"gpu": set(), "cpu": set(), "storage": set()}

    def apply(self, ops: list[IndexOp]) -> None:
        for op in ops:
            if isinstance(op, Clear):
                for keys in self.held.values():
                    keys.clear()
            elif isinstance(op, Add):
                self.held[op.tier] |= set(op.keys)
            else:
                self.held[op.tier] -= set(op.keys)


# -- the oracle: written from the documentation of keys and events, using none of our functions ------------------


def recount(payloads: list[bytes], root: Callable[[str | None, str | None], bytes]) -> set[bytes]:
    """Keys that must be claimed at the end of these (map form) batches."""
    own: dict[Any, bytes] = {}  # engine hash -> key, for everything ever seen
    copies: Counter[Any] = Counter()
    for payload in payloads:
        for e in msgspec.msgpack.decode(payload)[1]:
            if e["type"] == "AllBlocksCleared":
                copies.clear()
            elif e["type"] == "BlockRemoved":
                copies.subtract(e["block_hashes"])
            else:
                size = e["block_size"]
                extra = (e.get("extra_keys") or [None])[0] or []
                salt = next((x for x in extra if x != e["lora_name"]), None)
                key = root(e["lora_name"], salt) if e["parent_block_hash"] is None else own.get(e["parent_block_hash"])
                for i, engine_hash in enumerate(e["block_hashes"]):
                    if key is not None:
                        block = e["token_ids"][i * size : (i + 1) * size]
                        key = xxhash.xxh3_64_digest(key + struct.pack(f"<{size}I", *block))
                        own[engine_hash] = key
                    copies[engine_hash] += 1
    return {own[h] for h, n in copies.items() if n > 0 and h in own}


def root_by_hand(lora: str | None, salt: str | None) -> bytes:
    fields = [f if f is None else f.encode() for f in ("seed", "m", lora, salt)]
    return xxhash.xxh3_64_digest(
        b"".join(struct.pack("<I", 0xFFFFFFFF) if f is None else struct.pack("<I", len(f)) + f for f in fields)
    )


@pytest.mark.parametrize("shape", [bytes, as_arrays, as_map_batch], ids=["map", "array", "map batch"])
@pytest.mark.parametrize("name", SETS)
def test_recorded_events_give_what_a_recount_gives(name: str, shape: Callable[[bytes], bytes]) -> None:
    told = frames(name)
    book, index, most = ledger(), Index(), 0
    if told[0][0] > 0:  # a late subscriber's view
        book.begin_replay(AskReplay(0, "start"))
        book.end_replay(answered=False)
    for n, (seq, payload) in enumerate(told):
        ops = book.receive(seq, decode(shape(payload)))
        assert isinstance(ops, list)
        index.apply(ops)
        expected = recount([p for _, p in told[: n + 1]], root_by_hand)
        assert index.held["gpu"] == expected == set(book.claims("gpu")), f"after batch {seq}"
        most = max(most, len(expected))
    assert book.claimed["gpu"] == len(expected)
    assert most > 0
    assert book.block_size_tokens == 32
    assert (book.facts.orphans, book.facts.unknown_removals, book.facts.undecodable) == (0, 0, 0)


@pytest.mark.parametrize("name", ["default", "cbor"])
def test_the_recordings_hold_duplicates_so_that_a_set_would_be_wrong(name: str) -> None:
    stored = Counter(
        str(h) for _, p in frames(name) for e in raw(p)[1] if e["type"] == "BlockStored" for h in e["block_hashes"]
    )
    assert max(stored.values()) >= 2


# -- rules --------------------------------------------------------------------------------------------------------

SIZE = 2
TOKENS = list(range(100, 120))


def keys(n: int, *, lora: str | None = None, salt: str | None = None, tokens: list[int] = TOKENS) -> list[BlockKey]:
    root = root_key(seed="seed", model="m", lora_name=lora, cache_salt=salt)
    return chain_keys(root, pack_tokens(tokens[: n * SIZE]), SIZE)


def stored(start: int, stop: int, *, names: int = 1000, parent: int | None = None, **fields: Any) -> Stored:
    """Blocks start..stop of the chain; block i is called names + i."""
    return Stored(
        hashes=tuple(names + i for i in range(start, stop)),
        parent=parent if parent is not None else (names + start - 1 if start else None),
        tokens=pack_tokens(TOKENS[start * SIZE : stop * SIZE]),
        block_size_tokens=SIZE,
        **fields,
    )


def removed(*blocks: int, names: int = 1000, **fields: Any) -> Removed:
    return Removed(tuple(names + i for i in blocks), **fields)


def tell(book: Ledger, *events: Event) -> list[IndexOp]:
    ops = book.receive(book.last_seq + 1, Batch(0.0, events))
    assert isinstance(ops, list)
    return ops


def test_a_block_is_claimed_until_its_last_copy_is_gone() -> None:
    book = ledger()
    assert tell(book, stored(0, 3)) == [Add(tuple(keys(3)))]
    assert tell(book, stored(2, 3)) == []  # recomputed: a second copy
    assert tell(book, removed(2)) == []
    assert tell(book, removed(2)) == [Remove((keys(3)[2],))]
    assert tell(book, removed(2)) == []
    assert book.facts.unknown_removals == 1


def test_an_unknown_removal_does_not_end_the_batch() -> None:
    book = ledger()
    tell(book, stored(0, 3))
    assert tell(book, removed(99, 1, 98, 0)) == [Remove((keys(3)[1], keys(3)[0]))]


def test_children_of_an_unknown_parent_are_never_claimed_but_counted() -> None:
    book = ledger()
    assert tell(book, stored(1, 3)) == []
    assert tell(book, stored(3, 4)) == []
    assert (book.facts.orphans, book.facts.unclaimable) == (2, 3)
    tell(book, stored(0, 1))
    assert tell(book, stored(1, 4)) == [Add(tuple(keys(4)[1:]))]  # told with a known parent: now they can be named
    assert tell(book, removed(1, 2, 3)) == []
    assert tell(book, removed(1, 2, 3)) == [Remove(tuple(keys(4)[1:]))]


def test_only_the_full_attention_group_counts() -> None:
    book = ledger()
    window = {"group": 1, "kind": "sliding_window"}
    full = {"group": 0, "kind": "full_attention"}
    assert tell(book, stored(0, 3, **window)) == []
    assert tell(book, stored(0, 3, **full)) == [Add(tuple(keys(3)))]
    assert tell(book, removed(0, 1, 2, group=1)) == []
    assert tell(book, removed(2, group=0)) == [Remove((keys(3)[2],))]
    assert book.facts.other_groups == 3


def test_without_kinds_group_0_counts() -> None:
    book = ledger()
    assert tell(book, stored(0, 2, group=1)) == []
    assert tell(book, stored(0, 2, group=0)) == [Add(tuple(keys(2)))]
    assert tell(book, removed(1, group=1)) == []


def test_events_without_a_group_before_do_not_mix_the_groups_after() -> None:
    """Connectors in the same engine name no group; a removal in another group still means nothing."""
    book = ledger()
    tell(book, stored(0, 2))
    assert tell(book, removed(1, group=1)) == []
    tell(book, stored(2, 4, group=0, kind="full_attention"), stored(2, 4, group=1, kind="sliding_window"))
    assert tell(book, removed(0, 1, 2, 3, group=1)) == []
    assert tell(book, removed(3, group=0)) == [Remove((keys(4)[3],))]


def test_the_second_full_attention_group_is_kept_apart() -> None:
    book = ledger()
    for group in (3, 4):
        tell(book, stored(0, 2, group=group, kind="mla_attention"))
    assert tell(book, removed(0, 1, group=4)) == []
    assert tell(book, removed(0, 1, group=3)) == [Remove(tuple(keys(2)))]


def test_tiers_are_claimed_apart_and_a_clear_means_the_gpu() -> None:
    book = ledger()
    tell(book, stored(0, 4))
    bare = Stored((1000, 1001, 7777), None, b"", 0, medium="CPU")  # offloading names hashes only
    assert tell(book, bare) == [Add(tuple(keys(2)), "cpu")]
    assert tell(book, Stored((1001,), None, b"", 0, medium="STORAGE")) == [Add((keys(2)[1],), "storage")]
    assert tell(book, removed(1)) == [Remove((keys(2)[1],))]
    assert isinstance(tell(book, Cleared(), stored(0, 1))[0], Clear)
    assert set(book.claims("gpu")) == {keys(1)[0]}
    assert set(book.claims("cpu")) == set(keys(2))
    assert tell(book, removed(1, medium="CPU"), removed(1, medium="STORAGE")) == [
        Remove((keys(2)[1],), "cpu"), Remove((keys(2)[1],), "storage"),
    ]  # fmt: skip


def test_a_clear_comes_before_what_the_same_batch_stores() -> None:
    book = ledger()
    tell(book, stored(0, 4))
    assert tell(book, Cleared(), stored(0, 2)) == [Clear(), Add(tuple(keys(2)))]
    assert tell(book, removed(3)) == []


@pytest.mark.parametrize(
    ("fields", "lora", "salt"),
    [
        pytest.param({"extra_keys": [["s"], None]}, None, "s", id="salt"),
        pytest.param({"extra_keys": [["ad"], ["ad"]], "lora_name": "ad", "lora_id": 1}, "ad", None, id="adapter"),
        pytest.param({"extra_keys": [["ad", "s"], ["ad"]], "lora_name": "ad", "lora_id": 1}, "ad", "s", id="both"),
        pytest.param({"extra_keys": [["s"], None], "lora_name": "ad"}, "ad", "s", id="adapter named beside them only"),
        pytest.param({"extra_keys": [["ad", "ad"], ["ad"]], "lora_name": "ad"}, "ad", "ad", id="a salt like the name"),
        pytest.param({"extra_keys": [[["cache_salt", "s"]], None]}, None, "s", id="tagged salt"),
        pytest.param(
            {"extra_keys": [[["lora", "ad", "/p"]], [["lora", "ad", "/p"]]], "lora_name": "ad"},
            "ad",
            None,
            id="tagged adapter",
        ),
        pytest.param({"lora_name": "ad", "lora_id": 1}, "ad", None, id="0.14: no extra keys"),
        pytest.param({"extra_keys": [["s", 7, 8], [9, 9]], "lookahead": True}, None, "s", id="0.33: lookahead tokens"),
    ],
)
def test_salt_and_adapter_go_into_the_keys(fields: dict[str, Any], lora: str | None, salt: str | None) -> None:
    assert tell(ledger(), stored(0, 2, **fields)) == [Add(tuple(keys(2, lora=lora, salt=salt)))]


@pytest.mark.parametrize(
    ("fields", "claimed"),
    [
        pytest.param({"extra_keys": [None, [["image", 0]], None]}, 1, id="an image from block 1 on"),
        pytest.param({"extra_keys": [[["image", 0]], None, None]}, 0, id="an image in the first block"),
        pytest.param({"extra_keys": [[["image", "a", 0]], None, None]}, 0, id="a tagged image in the first block"),
        pytest.param({"extra_keys": [["a", "b"], None, None]}, 0, id="two texts: one may be an image"),
        pytest.param({"lora_id": 1}, 0, id="0.10: an adapter's number without its name"),
    ],
)
def test_what_our_keys_cannot_name_is_not_claimed(fields: dict[str, Any], claimed: int) -> None:
    book = ledger()
    assert merged(tell(book, stored(0, 3, **fields))) == ([Add(tuple(keys(claimed)))] if claimed else [])
    assert book.facts.unclaimable == 3 - claimed
    assert book.facts.unknown_removals == 0
    tell(book, removed(0, 1, 2))
    assert book.claimed["gpu"] == book.facts.unknown_removals == 0


def test_an_event_of_a_later_release_is_counted_and_passed_over() -> None:
    book = ledger()
    assert tell(book, Unknown("BlocksMoved"), stored(0, 1)) == [Add(tuple(keys(1)))]
    assert book.facts.unknown_events == 1


def test_what_stays_without_a_name_is_counted_copy_by_copy() -> None:
    book = ledger()
    orphan = stored(3, 4)
    assert tell(book, orphan, orphan) == tell(book, removed(3), removed(3)) == []
    assert (book.facts.unclaimable, book.facts.unknown_removals) == (2, 0)
    tell(book, removed(3))
    assert book.facts.unknown_removals == 1


def test_a_block_that_gets_its_name_late_is_claimed_on_every_tier_that_has_it() -> None:
    book = ledger()
    tell(book, stored(1, 2), Stored((1001,), None, b"", 0, medium="CPU"))  # the parent is not known yet
    assert merged(tell(book, stored(0, 1), stored(1, 2))) == [Add(tuple(keys(2))), Add((keys(2)[1],), "cpu")]


def test_copies_beyond_the_counter_stay_claimed() -> None:
    book = ledger()
    for _ in range(70_000):
        tell(book, stored(0, 1))
    for _ in range(65_534):
        assert tell(book, removed(0)) == []
    assert book.claimed["gpu"] == 1


def test_salts_without_end_keep_no_root_without_end() -> None:
    book = ledger()
    for n in range(5000):
        tell(book, stored(0, 1, names=10 * n + 1, extra_keys=[[f"s{n}"]]))
    assert book.claimed["gpu"] == 5000
    assert len(book._roots) <= 4096
    tell(book, stored(0, 1, names=1, extra_keys=[["s0"]]))
    assert book.claimed["gpu"] == 5000  # the root that was let go comes out the same


def test_a_masked_event_is_not_sliced_blindly() -> None:
    book = ledger()
    masked = Stored((1, 2), None, pack_tokens(TOKENS[:8]), SIZE)  # four blocks' tokens, two of them stored
    assert tell(book, masked) == []
    assert tell(book, Removed((1, 2))) == []
    assert book.facts.unknown_removals == 0


def test_lookahead_gives_one_key_two_names() -> None:
    """From 0.33 the tokens after a block are in the engine's hash: two hashes, one content."""
    book = ledger()
    tell(book, stored(0, 2, names=1000, lookahead=True))
    assert tell(book, stored(0, 2, names=2000, lookahead=True)) == []
    assert tell(book, removed(0, 1, names=1000)) == []
    assert tell(book, removed(0, 1, names=2000)) == [Remove(tuple(keys(2)))]


def test_a_reloaded_adapter_voids_what_its_old_weights_left() -> None:
    book = ledger()
    tell(book, stored(0, 3, names=1000, lora_name="ad", lora_id=1), stored(0, 3, names=5000))
    ops = merged(tell(book, stored(0, 1, names=2000, lora_name="ad", lora_id=2)))
    assert set(book.claims("gpu")) == set(keys(1, lora="ad")) | set(keys(3))
    assert [type(op) for op in ops] == [Remove, Add]
    tell(book, removed(0, 1, 2, names=1000))
    assert set(book.claims("gpu")) == set(keys(1, lora="ad")) | set(keys(3))
    assert book.facts.lora_reloads == 1


def test_an_adapter_loaded_again_from_the_same_place_keeps_its_blocks() -> None:
    book = ledger()
    tell(book, stored(0, 2, names=1000, lora_name="ad", lora_id=1))
    tell(book, stored(2, 3, names=1000, lora_name="ad", lora_id=2))
    assert set(book.claims("gpu")) == set(keys(3, lora="ad"))


def test_the_block_size_is_the_commonest_one() -> None:
    book = ledger()
    assert book.block_size_tokens is None
    tell(book, Stored((1,), None, pack_tokens([1]), 1), stored(0, 3))
    assert book.block_size_tokens == SIZE


# -- sequence -----------------------------------------------------------------------------------------------------

B = [Batch(0.0, (stored(i, i + 1),)) for i in range(10)]


def at(last: int) -> tuple[Ledger, Index]:
    """A Ledger that has followed from the beginning up to batch `last`; digests are 100 + seq."""
    book, index = ledger(), Index()
    for seq in range(last + 1):
        ops = book.receive(seq, B[seq], 100 + seq)
        assert isinstance(ops, list)
        index.apply(ops)
    return book, index


def replay(book: Ledger, index: Index, ask: AskReplay, batches: range, *, offset: int = 100) -> AskReplay | None:
    index.apply(list(ask.ops))
    book.begin_replay(ask)
    for seq in batches:
        told = book.replayed(seq, B[seq], offset + seq)
        if isinstance(told, AskReplay):
            return told
        index.apply(told)
    told = book.end_replay(answered=True)
    if isinstance(told, AskReplay):
        return told
    index.apply(told)
    return None


def test_a_double_does_nothing() -> None:
    book, _ = at(3)
    assert book.receive(3, B[3], 103) == []
    assert (book.last_seq, book.facts.doubles) == (3, 1)


def test_a_gap_asks_from_the_last_applied_and_is_filled() -> None:
    book, index = at(1)
    ask = book.receive(5, B[5], 105)
    assert ask == AskReplay(1, "gap")
    assert replay(book, index, ask, range(1, 6)) is None
    assert book.receive(5, B[5], 105) == []
    assert book.receive(6, B[6], 106) == [Add((keys(7)[6],))]
    assert index.held["gpu"] == set(keys(6))


def test_a_replay_that_begins_too_late_clears_and_goes_on_from_there() -> None:
    book, index = at(1)
    ask = book.receive(5, B[5], 105)
    assert isinstance(ask, AskReplay)
    assert replay(book, index, ask, range(3, 6)) is None
    assert index.held["gpu"] == set()  # the rest has unknown parents
    assert (book.last_seq, book.whole, book.exhausted) == (5, False, True)
    assert book.receive(6, B[6], 106) == []


@pytest.mark.parametrize(
    "batches", [range(6), range(2, 6)], ids=["from before what was asked", "from right behind what is known"]
)
def test_a_gap_is_filled_by_whatever_replay_joins_it(batches: range) -> None:
    book, index = at(1)
    ask = book.receive(5, B[5], 105)
    assert isinstance(ask, AskReplay)
    assert replay(book, index, ask, batches) is None
    assert index.held["gpu"] == set(keys(6))
    assert book.facts.forgets == 0


def test_a_replay_that_says_a_batch_twice_is_heard_once() -> None:
    book, index = at(1)
    book.begin_replay(AskReplay(1, "gap"))
    for seq in (1, 2, 2, 1, 3):
        told = book.replayed(seq, B[seq], 100 + seq)
        assert isinstance(told, list)
        index.apply(told)
    assert (book.last_seq, index.held["gpu"]) == (3, set(keys(4)))


def test_a_replay_with_a_hole_is_asked_again_from_the_hole() -> None:
    book, index = at(1)
    ask = book.receive(6, B[6], 106)
    assert isinstance(ask, AskReplay)
    book.begin_replay(ask)
    for seq in (1, 2, 3):
        told = book.replayed(seq, B[seq], 100 + seq)
        assert isinstance(told, list)
        index.apply(told)
    again = book.replayed(5, B[5], 105)
    assert again == AskReplay(3, "gap")
    assert replay(book, index, again, range(3, 7)) is None
    assert index.held["gpu"] == set(keys(7))


@pytest.mark.parametrize(
    ("batches", "offset"),
    [
        pytest.param(range(3, 6), 900, id="the same numbers, another content"),
        pytest.param(range(0), 100, id="it does not know our last number"),
    ],
)
def test_a_reconnect_to_another_process_is_a_new_life(batches: range, offset: int) -> None:
    book, index = at(3)
    ask = book.connected()
    assert ask == AskReplay(3, "reconnect")
    again = replay(book, index, ask, batches, offset=offset)
    assert again == AskReplay(0, "restart", (Clear(),))
    assert replay(book, index, again, range(2), offset=offset) is None
    assert index.held["gpu"] == set(keys(2))
    assert book.whole


def test_a_reconnect_that_cannot_prove_anything_is_a_new_life_too() -> None:
    book, index = at(3)
    assert replay(book, index, book.connected(), range(4, 6)) is None
    assert index.held["gpu"] == set()
    book, index = at(3)
    book.begin_replay(book.connected())
    told = book.end_replay(answered=False)  # no replay endpoint
    assert told == [Clear()]
    assert book.receive(7, B[0], 1) == [Add((keys(1)[0],))]


def test_a_reconnect_to_the_same_process_goes_on() -> None:
    book, index = at(3)
    assert replay(book, index, book.connected(), range(3, 5)) is None
    assert index.held["gpu"] == set(keys(5))
    assert book.facts.forgets == 0


def test_a_sequence_that_goes_back_is_looked_into() -> None:
    book, index = at(5)
    ask = book.receive(2, B[2], 102)
    assert ask == AskReplay(5, "reconnect")
    assert replay(book, index, ask, range(5, 6)) is None  # the same process: it was a stray double
    assert book.receive(2, B[2], 102) == []
    assert isinstance(book.receive(0, B[0], 999), AskReplay)


def test_the_start_asks_for_everything_and_takes_what_it_gets_as_the_beginning() -> None:
    book, index = ledger(), Index()
    assert book.receive(4, B[4], 104) == AskReplay(0, "start")
    assert replay(book, index, AskReplay(0, "start"), range(3, 5)) is None
    assert book.receive(4, B[4], 104) == []
    assert (book.facts.orphans, book.whole, book.short) == (1, False, False)  # nothing older can be had


def test_a_start_on_a_silent_engine_expects_batch_0() -> None:
    book, index = ledger(), Index()
    assert replay(book, index, book.connected(), range(0)) is None
    assert not book.short
    ask = book.receive(2, B[2], 102)  # 0 and 1 were lost on the way
    assert ask == AskReplay(0, "start")
    assert replay(book, index, ask, range(3)) is None
    assert index.held["gpu"] == set(keys(3))
    assert book.whole


def test_a_start_without_an_answer_is_asked_again_and_replaces() -> None:
    book, index = ledger(), Index()
    book.begin_replay(AskReplay(0, "start"))
    assert book.end_replay(answered=False) == []
    book.receive(4, B[4], 104)
    assert book.short
    assert replay(book, index, AskReplay(0, "parent"), range(6)) is None
    assert index.held["gpu"] == set(keys(6))
    assert book.whole
    assert not book.short


def test_an_undecodable_batch_is_a_gap_and_voids_what_is_known_if_replay_has_no_better_one() -> None:
    book, index = at(3)
    ask = book.receive(4, None, 104)
    assert ask == AskReplay(3, "undecodable")
    index.apply(list(ask.ops))
    book.begin_replay(ask)
    assert book.replayed(3, B[3], 103) == []
    assert book.replayed(4, None, 104) == [Clear()]
    assert book.end_replay(answered=True) == []
    assert book.receive(4, None, 104) == []
    assert book.receive(5, B[5], 105) == []
    assert (book.facts.undecodable, book.claimed["gpu"]) == (1, 0)


def test_an_undecodable_batch_that_replays_well_costs_nothing() -> None:
    book, index = at(3)
    ask = book.receive(4, None, 999)
    assert isinstance(ask, AskReplay)
    assert replay(book, index, ask, range(3, 5)) is None
    assert book.receive(4, None, 999) == []
    assert index.held["gpu"] == set(keys(5))


# -- merged -------------------------------------------------------------------------------------------------------


def test_merging_changes_nothing_but_the_length() -> None:
    rng = Random(3)
    names = [BlockKey(bytes([n]) * 8) for n in range(12)]
    for _ in range(300):
        ops: list[IndexOp] = []
        for _ in range(rng.randrange(12)):
            some = tuple(rng.sample(names, rng.randrange(1, 5)))
            ops.append(rng.choice([Add(some), Remove(some), Add(some, "cpu"), Remove(some, "cpu"), Clear()]))
        long, short = Index(), Index()
        for index in (long, short):
            index.apply([Add(tuple(names[:6]))])
        long.apply(ops)
        short.apply(merged(ops))
        assert long.held == short.held
        assert len(merged(ops)) <= 7


# -- tables -------------------------------------------------------------------------------------------------------


def test_the_ledger_agrees_with_a_dict_under_random_events() -> None:
    """Oracle: a Counter of copies, and the keys computed in one go."""
    rng = Random(5)
    book, copies = ledger(), Counter[int]()
    all_keys = keys(10)
    for _ in range(3000):
        if rng.random() < 0.5:
            start = rng.randrange(10)
            if start and not copies[start - 1]:
                continue
            stop = rng.randrange(start, 10) + 1
            tell(book, stored(start, stop))
            copies.update(range(start, stop))
        else:
            i = rng.randrange(10)
            tell(book, removed(i))
            copies[i] -= copies[i] > 0
        assert set(book.claims("gpu")) == {all_keys[i] for i, n in copies.items() if n}


# -- snapshots ----------------------------------------------------------------------------------------------------


def lived() -> Ledger:
    """A Ledger with a bit of everything."""
    book = ledger()
    tell(book, stored(0, 6), stored(3, 5), stored(0, 2, names=2000, lora_name="ad", lora_id=3))
    tell(book, Stored((1000,), None, b"", 0, medium="CPU"), removed(5), stored(7, 8))
    return book


def test_a_snapshot_goes_on_where_the_ledger_was() -> None:
    first, second = lived(), ledger()
    taken = first.snapshot()
    assert taken is not None
    found = unpack(pack(taken))
    assert found is not None
    assert second.restore(found)
    for tier in ("gpu", "cpu"):
        assert set(second.claims(tier)) == set(first.claims(tier))  # type: ignore[arg-type]
    assert second.claimed == first.claimed
    assert (second.last_seq, second.block_size_tokens, second.whole) == (1, SIZE, True)
    for events in (
        [removed(3, 4)],
        [removed(3)],
        [stored(5, 7)],
        [stored(0, 1, names=9000, lora_name="ad", lora_id=4)],
    ):
        assert tell(first, *events) == tell(second, *events)


def test_a_snapshot_of_another_seed_or_model_is_not_taken() -> None:
    taken = lived().snapshot()
    assert taken is not None
    for other in (Ledger(seed="other", model="m"), Ledger(seed="seed", model="other")):
        assert not other.restore(taken)
        assert (other.last_seq, other.claimed["gpu"]) == (-1, 0)
    assert ledger().snapshot() is None


def test_a_broken_snapshot_is_no_snapshot() -> None:
    taken = lived().snapshot()
    assert taken is not None
    blob = pack(taken)
    rng = Random(9)
    for n in range(300):
        bad = bytearray(blob[: rng.randrange(len(blob))] if n % 2 else blob)
        for _ in range(n % 5):
            if bad:
                bad[rng.randrange(len(bad))] = rng.randrange(256)
        found = unpack(bytes(bad))
        assert found is None or found == taken  # bits that mean nothing to zlib
    for change in ({"version": 0}, {"parts": [8] * 63}, {"parts": [7] * 64}, {"names": b""}, {"last_seq": -1}):
        assert unpack(pack(msgspec.structs.replace(taken, **change))) is None
    cut = 8 * taken.parts[-1]
    fewer = {name: getattr(taken, name)[:-cut] for name in ("names", "values", "counts")}
    assert not ledger().restore(msgspec.structs.replace(taken, parts=taken.parts[:-1], **fewer))  # another table's
    full = msgspec.structs.replace(taken, names=b"\1" * len(taken.names))
    assert not ledger().restore(full)  # no empty place: probing would never end
