"""Workloads: the published ladder as published, prefixes that are shared exactly where they should be."""

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from loadtest import workload
from loadtest.workload import Segment, Session, Workload, block_hashes, token_ids

TRACES = Path(__file__).parents[2] / "data" / "traces"


def turns(built: Workload) -> list[tuple[Segment, ...]]:
    return [t.prompt for stage in built.stages for s in stage.sessions for t in s.turns]


def test_the_ladder_is_the_published_one() -> None:
    built = workload.ladder(1)
    assert [s.name for s in built.stages][:3] == ["warm-up", "3/s", "10/s"]
    assert [len(s.sessions) for s in built.stages] == [
        750, 60, 200, 300, 760, 748, 750, 750, 735, 1520, 1548, 1518, 1470, 1508, 1485, 1482, 1500,
    ]  # fmt: skip
    corpus = {s.turns[0].prompt for s in built.stages[0].sessions}
    assert len(corpus) == 750, "the warm-up seats every prompt once"
    assert set(Counter(p[0] for p in corpus).values()) == {5}
    assert len({p[0] for p in corpus}) == 150
    assert {t.prompt_tokens for s in built.stages[5].sessions for t in s.turns} == {7200}
    for stage in built.stages[1:]:
        walk = [s.turns[0].prompt for s in stage.sessions]
        assert walk[:60] == [s.turns[0].prompt for s in built.stages[0].sessions[:60]], "each starts at prompt 0"
        assert all(0 <= s.start_s <= stage.seconds for s in stage.sessions)
    assert sum(len(s.sessions) for s in built.stages if s.measured) == 16_334


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: workload.ladder(seed),
        lambda seed: workload.chat(seed, rate=2, seconds=30),
        lambda seed: workload.rag(seed, rate=5, seconds=20, document_tokens=[100, 300, 500, 700, 900]),
        lambda seed: workload.bursts(
            seed, siblings=4, every_s=1, seconds=5, prefix_tokens=90, question_tokens=9, output_tokens=3
        ),
    ],
)
def test_the_same_seed_is_the_same_workload(make: object) -> None:
    assert callable(make)
    assert make(3) == make(3)
    assert make(3) != make(4)


def test_block_hashes_are_equal_exactly_where_the_tokens_are() -> None:
    """The oracle is the text itself: spelt-out token ids, cut into blocks with all that is before them."""
    rng = Random(5)
    memo: dict[object, tuple[list[int], int, int]] = {}
    named: dict[int, tuple[int, ...]] = {}
    spelt: dict[tuple[int, ...], int] = {}
    prompts: list[tuple[Segment, ...]] = [()]
    for _ in range(150):
        base = rng.choice(prompts)
        prompt = (*base, Segment(rng.randrange(4), rng.randint(1, 40)))
        prompts.append(prompt)
        ids = token_ids(prompt)
        hashes = block_hashes(prompt, 8, memo)
        assert hashes == block_hashes(prompt, 8)
        assert len(hashes) == len(ids) // 8
        for i, h in enumerate(hashes):
            text = tuple(ids[: 8 * (i + 1)])
            assert named.setdefault(h, text) == text
            spelt.setdefault(text, h)
    assert len(spelt) > 100


def test_a_turn_goes_on_from_the_answer_before() -> None:
    built = workload.chat(2, rate=3, seconds=30, turns_mean=4)
    long = [s for s in built.stages[0].sessions if len(s.turns) > 1]
    assert long
    for session in long:
        for before, after in pairwise(session.turns):
            assert after.prompt[: len(before.prompt) + 1] == (*before.prompt, before.answer)
            assert after.think_s > 0


def test_the_hot_share_is_hot() -> None:
    built = workload.shared_prefix(
        1, rate=50, seconds=60, groups=20, prefix_tokens=64, question_tokens=8, output_tokens=1, hot_share=0.5
    )
    groups = Counter(s.turns[0].group for s in built.stages[0].sessions)
    assert 0.45 < groups["hot"] / groups.total() < 0.55


@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic", "azure_conv_2023"])
def test_timed_traces_keep_lengths_and_sharing(name: str) -> None:
    rows = read(name)
    built = workload.timed_trace(rows)
    assert len(turns(built)) == len(rows)
    assert sorted(sum(s.tokens for s in p) for p in turns(built)) == sorted(max(r["input_length"], 1) for r in rows)
    if "hash_ids" in rows[0]:
        known: set[int] = set()
        blocks = hits = 0
        for row in rows:
            blocks += len(row["hash_ids"])
            hits += sum(h in known for h in row["hash_ids"])
            known.update(row["hash_ids"])
        mine = ideal_hits(built.stages[0].sessions, 512)
        full = sum(r["input_length"] // 512 for r in rows)
        assert mine / full == pytest.approx(hits / blocks, abs=0.03)


def test_a_trace_begun_later_has_the_same_requests_in_another_order() -> None:
    rows = read("mooncake_conversation")
    whole = workload.timed_trace(rows).stages[0]
    turned = workload.timed_trace(rows, start_share=0.618).stages[0]
    assert turned.seconds == pytest.approx(whole.seconds, abs=5.0)
    first = min((s for s in whole.sessions if s.start_s >= 0.618 * 598), key=lambda s: s.start_s)
    assert turned.sessions[0].turns[0].prompt == first.turns[0].prompt
    assert Counter(s.turns[0].prompt for s in turned.sessions) == Counter(s.turns[0].prompt for s in whole.sessions)


def test_agent_and_message_traces_share_what_they_share() -> None:
    agents = workload.agent_trace(read("weka_claude_code"), concurrency=4)
    assert agents.stages[0].concurrency == 4
    sessions = agents.stages[0].sessions
    total = sum(t.prompt_tokens // 512 for s in sessions for t in s.turns)
    assert 0.9 < ideal_hits(sessions, 512) / total < 0.99
    airline = workload.message_trace(read("taubench_airline"), concurrency=4)
    assert sum(len(s.turns) for s in airline.stages[0].sessions) == 1229
    total = sum(t.prompt_tokens // 16 for s in airline.stages[0].sessions for t in s.turns)
    assert ideal_hits(airline.stages[0].sessions, 16) / total == pytest.approx(0.94, abs=0.03)


def ideal_hits(sessions: tuple[Session, ...], block: int) -> int:
    """Blocks found in an infinite cache, requests in order of sessions."""
    known: set[int] = set()
    hits = 0
    for session in sessions:
        for turn in session.turns:
            hashes = block_hashes(turn.prompt, block)
            hits += sum(h in known for h in hashes)
            known.update(hashes)
    return hits


def read(name: str) -> list[dict[str, object]]:
    with gzip.open(TRACES / f"{name}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]
