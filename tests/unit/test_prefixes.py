"""What prefixes are worth."""

from router.core.types import BlockKey
from router.prefixes import PrefixTable


def key(n: int) -> BlockKey:
    return BlockKey(n.to_bytes(8, "big"))


def test_the_prefixes_that_saved_most_come_first() -> None:
    table = PrefixTable()
    for _ in range(3):
        table.note(key(1), depth_tokens=640, saved_tokens=640)
    table.note(key(2), depth_tokens=6400, saved_tokens=6400)
    table.note(key(3), depth_tokens=320, saved_tokens=0)
    table.note(None, depth_tokens=0, saved_tokens=0)
    assert table.top(2) == [
        {"prefix": key(2).hex(), "prefix_tokens": 6400, "requests": 1, "saved_tokens": 6400},
        {"prefix": key(1).hex(), "prefix_tokens": 640, "requests": 3, "saved_tokens": 1920},
    ]


def test_many_single_chats_do_not_push_out_a_shared_prompt() -> None:
    table = PrefixTable(rows_max=64)
    for n in range(1000):
        table.note(key(10_000 + n), depth_tokens=32, saved_tokens=32)
        table.note(key(1), depth_tokens=640, saved_tokens=640)
    assert table.top(1)[0]["requests"] == 1000
    assert len(table.top(1000)) <= 64
