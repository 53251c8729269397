"""CPU of one choice among 8, 100 and 1,000 workers for a prompt of 450 blocks; `make bench-pick`.

`pick` is the policy alone, over what it is shown; `choose` is all between the index's answer and the booked worker: the
local view looked up, candidates made, the policy, the booking and the note of what was sent where.
May import: anything.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from router.core.types import BlockKey, WorkerAddress
from router.fleet.fleet import Fleet
from router.fleet.state import ModelEntry, PodSpec, Probed
from router.index.local import LocalView
from router.index.memory import MemoryIndex
from router.index.port import Held
from router.ops import Metrics
from router.policy.baselines import POLICIES
from router.policy.pick import Candidate, Costs, RoutingRequest, pick
from router.roster import ALL_LOOKED_AT, LEAST_LOADED, ORDER_GOOD_FOR_CHOICES, KeySpace
from router.route import Chain, Choice, Conductor, Prepared, RouteRequest
from router.tokenize.port import NoTokens, PromptTokens

BLOCKS, BLOCK_TOKENS, ROUNDS, REPEATS = 450, 16, 200, 9


class NoService:
    """Tokens are given; nobody asks."""

    async def prompt(self, *, model: str, endpoint: str, body: bytes) -> PromptTokens | NoTokens:
        return NoTokens("no_tokenizer")


def median_us(work: Callable[[], None]) -> float:
    """CPU of one call: median over repeats."""
    work()
    seen = []
    for _ in range(REPEATS):
        began = time.process_time()
        for _ in range(ROUNDS):
            work()
        seen.append((time.process_time() - began) / ROUNDS * 1e6)
    return statistics.median(seen)


def choosing(workers: int) -> Callable[[], None]:
    """A conductor over so many ready workers, four of which hold a part of the prompt."""
    fleet = Fleet(default_block_size_tokens=BLOCK_TOKENS)
    for i in range(workers):
        url = f"http://p{i}:8000"
        fleet.set_pods([*(p.spec for p in fleet.pods()), PodSpec(identity=url, name=url, url=url, events="tcp://p:1")])
        fleet.state = fleet.state.apply(Probed(identity=url, not_ready=None, models=(ModelEntry(id="m", root="m"),)))
    conductor = Conductor(
        fleet=fleet,
        tokens=NoService(),
        index=MemoryIndex(),
        local=LocalView(),
        metrics=Metrics(),
        policies=POLICIES,
        policy="prefix",
        seed="",
    )
    rng = random.Random(1)
    keys = [BlockKey(rng.randbytes(8)) for _ in range(BLOCKS)]
    held = {WorkerAddress(f"http://p{i}:8000"): Held(100 + i, 100 + i, 100 + i) for i in range(min(workers, 4))}
    chain = Chain(keys=keys, usable=BLOCKS - 1, block_size_tokens=BLOCK_TOKENS, held=held, exact=True)
    prepared = Prepared(
        request=RouteRequest(endpoint="/v1/completions", model="m", body=b"x", body_bytes=30_000),
        tokens=PromptTokens(bytes(4 * BLOCK_TOKENS * BLOCKS)),
        chains={KeySpace("m", None, BLOCK_TOKENS): chain},
        sequence=1,
    )

    def work() -> None:
        choice = conductor.choose(prepared)
        assert isinstance(choice, Choice)
        choice.booking.release()

    return work


def picking(workers: int) -> Callable[[], None]:
    """The policy over as many candidates as a fleet of this size shows it."""
    shown = workers if workers <= ALL_LOOKED_AT else LEAST_LOADED + ORDER_GOOD_FOR_CHOICES // 2 + 4
    rng = random.Random(1)
    fleet = [
        Candidate(worker=WorkerAddress(str(i)), matched_tokens=16 * rng.randrange(400), inflight_requests=i % 9)
        for i in range(shown)
    ]
    request, costs = RoutingRequest(prompt_tokens=7200), Costs()
    return lambda: void(pick(fleet, request, costs, rng))


def void(_: object) -> None:
    """Nothing."""


def main() -> None:
    """Print the table."""
    print(f"CPU us, median of {REPEATS} x {ROUNDS}; prompt of {BLOCKS} blocks")
    print(f"{'workers':>8} {'pick':>8} {'choose':>8}")
    for workers in (8, 100, 1000):
        print(f"{workers:>8} {median_us(picking(workers)):>8.1f} {median_us(choosing(workers)):>8.1f}")


if __name__ == "__main__":
    main()
