"""Captured events of real engines, and what the Ledger made of them: tests/golden/events, one line a batch.

The batches themselves are in tests/data/recorded. A change of wire, Ledger or keys shows here, block by block; if it is
meant, write the files anew: `python -m tests.unit.indexer.test_golden_events`.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from indexer.plan import AskReplay, Ledger
from indexer.wire import decode
from router.core.types import Clear, Remove
from tests.fakes.recorded import SETS, as_arrays, as_map_batch, frames, raw

FOLDER = Path(__file__).parents[2] / "golden" / "events"


def told(name: str, shape: Callable[[bytes], bytes] = bytes) -> Iterator[str]:
    """A line of JSON a batch: number, kinds of its events with their blocks, and the index operations in order."""
    ledger = Ledger(seed="golden", model="tiny-model")
    for n, (seq, payload) in enumerate(frames(name)):
        batch = decode(shape(payload))
        ops = ledger.receive(seq, batch)
        if isinstance(ops, AskReplay):  # the recording begins late, and nothing older is to be had
            assert n == 0
            ledger.begin_replay(ops)
            ledger.end_replay(answered=False)
            ops = ledger.receive(seq, batch)
        assert isinstance(ops, list)
        shown = [
            ["clear"]
            if isinstance(op, Clear)
            else ["remove" if isinstance(op, Remove) else "add", op.tier, *(key.hex() for key in op.keys)]
            for op in ops
        ]
        events = [[type(e).__name__, len(getattr(e, "hashes", ()))] for e in batch.events]
        yield json.dumps({"seq": seq, "events": events, "ops": shown})


@pytest.mark.parametrize("shape", [bytes, as_arrays, as_map_batch], ids=["as published", "arrays", "map batch"])
@pytest.mark.parametrize("name", SETS)
def test_captured_events_mean_what_they_meant(name: str, shape: Callable[[bytes], bytes]) -> None:
    assert list(told(name, shape)) == (FOLDER / f"{name}.jsonl").read_text().splitlines()


def test_report_mode_full_is_said_like_a_second_copy() -> None:
    """Why we never ask for it (ADR 12): batches 46 and 47 of this recording are one copy, and differ in nothing."""
    first, again = [raw(payload)[1] for seq, payload in frames("lora") if seq in (46, 47)]
    assert first == again
    lines = [json.loads(line) for line in told("lora")]
    assert [len(line["ops"]) for line in lines if line["seq"] in (46, 47)] == [1, 0]


if __name__ == "__main__":
    for each in SETS:
        (FOLDER / f"{each}.jsonl").write_text("".join(line + "\n" for line in told(each)))
