"""What routers tell each other: sums of fresh peers, choices once, nothing of oneself, nothing stale."""

import msgspec
import pytest

from router.core.types import BlockKey, WorkerAddress
from router.fleet.bookings import Bookings
from router.index.local import LocalView
from router.peers import NOBODY, NOTES_MAX_BYTES, STALE_AFTER_S, Peers

A, B = WorkerAddress("http://a", 0), WorkerAddress("http://b", 1)
KEYS = [BlockKey(bytes([i]) * 8) for i in range(40)]


def busy(worker: WorkerAddress, requests: int, key: BlockKey | None = None) -> Bookings:
    bookings = Bookings(clock=lambda: 0.0)
    for _ in range(requests):
        bookings.hold(worker, prefill_tokens=100, prompt_tokens=500, crowd_key=key)
    bookings.place(worker, 500)
    return bookings


def test_loads_and_crowds_of_all_fresh_peers_add_up() -> None:
    me, one, two = Peers(b"me"), Peers(b"one"), Peers(b"two")
    me.hear(one.tell(busy(A, 3, KEYS[0])), now_s=10.0)
    me.hear(two.tell(busy(A, 2, KEYS[0])), now_s=10.2)
    load = me.load(A, 10.3)
    assert (load.prefill_tokens, load.inflight_requests, load.placed_tokens) == (500, 5, 1000)
    assert me.crowd(KEYS[0], 10.3) == 5
    assert me.crowd(None, 10.3) == 0
    assert me.load(B, 10.3) == NOBODY
    assert me.count(10.3) == 2


def test_a_new_message_replaces_the_old_and_a_silent_peer_is_forgotten() -> None:
    me, one = Peers(b"me"), Peers(b"one")
    me.hear(one.tell(busy(A, 3)), now_s=10.0)
    me.hear(one.tell(busy(B, 1)), now_s=10.5)
    assert (me.load(A, 10.6).inflight_requests, me.load(B, 10.6).inflight_requests) == (0, 1)
    assert me.load(B, 10.5 + STALE_AFTER_S + 0.01) == NOBODY
    assert me.count(99.0) == 0


def test_ones_own_message_is_not_heard() -> None:
    me = Peers(b"me")
    me.chose(A, KEYS, 0)
    assert me.hear(me.tell(busy(A, 3)), now_s=1.0) == []
    assert me.load(A, 1.0) == NOBODY


def test_choices_are_told_once_and_only_when_they_are_news() -> None:
    me, one = Peers(b"me"), Peers(b"one")
    one.chose(A, KEYS, 0)
    one.chose(B, KEYS, len(KEYS) - 1)
    one.chose(B, [], 0)
    heard = me.hear(one.tell(Bookings()), now_s=1.0)
    assert [(h.worker, h.keys) for h in heard] == [(A, KEYS)]
    assert me.hear(one.tell(Bookings()), now_s=1.1) == []


def test_at_a_slower_pace_peers_stay_fresh_for_longer_and_the_oldest_is_told() -> None:
    slow = Peers(b"me", interval_s=2.0)
    assert slow.age_s(0.0) == 0.0
    slow.hear(Peers(b"one").tell(Bookings()), now_s=10.0)
    slow.hear(Peers(b"two").tell(Bookings()), now_s=13.0)
    assert (slow.count(14.0), slow.age_s(14.0)) == (2, 4.0)
    assert (slow.count(18.5), slow.age_s(18.5)) == (1, 5.5)


def test_a_message_is_bounded() -> None:
    one = Peers(b"one")
    for _ in range(2 * NOTES_MAX_BYTES // (8 * len(KEYS))):
        one.chose(A, KEYS, 0)
    assert len(one.tell(Bookings())) < 1.1 * NOTES_MAX_BYTES


def test_without_others_nothing_is_kept() -> None:
    nobody = Peers(b"")
    nobody.chose(A, KEYS, 0)
    assert Peers(b"me").hear(nobody.tell(Bookings()), now_s=1.0) == []


@pytest.mark.parametrize("message", [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode([b"x", [[1]], [], []])])
def test_what_is_no_message_raises_one_thing(message: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        Peers(b"me").hear(message, now_s=1.0)


def test_what_is_heard_never_shortens_what_is_known() -> None:
    now_s = 0.0
    view = LocalView(clock=lambda: now_s)
    view.note(A, KEYS[:20], ttl_s=30.0)
    view.heard(A, KEYS, ttl_s=3.0)
    assert view.holders(KEYS) == {A: 40}
    now_s = 5.0
    assert view.holders(KEYS) == {A: 20}
