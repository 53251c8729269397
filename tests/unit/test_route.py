"""The conductor: what a request meets between its tokens and its booking. No sockets; the stores are the real ones."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from router.core.hashing import chain_keys, pack_tokens, root_key
from router.core.types import Add, BlockKey, Clear, IndexUnavailable, Remove, WorkerAddress, WorkerId
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet
from router.fleet.state import ModelEntry, PodSpec, Probed, Seen
from router.index.local import LocalView
from router.index.memory import MemoryIndex
from router.index.port import Held, IndexReader
from router.ops import Metrics
from router.policy.baselines import POLICIES
from router.policy.retry import FailureKind
from router.route import Choice, Conductor, Refused, RouteLimits, RouteRequest
from router.tokenize.port import NoTokens, PromptTokens

BLOCK = 16
MODELS = (ModelEntry(id="m", root="org/m"), ModelEntry(id="ad", root="x", parent="m"))


class BodyIsTokens:
    """Tokens for tests: the body is a JSON list of ids; {} has none."""

    async def prompt(self, *, model: str, endpoint: str, body: bytes) -> PromptTokens | NoTokens:
        ids = msgspec.json.decode(body)
        return PromptTokens(pack_tokens(ids)) if isinstance(ids, list) else NoTokens("no_tokenizer")


class Away:
    """An index that cannot answer."""

    async def holders(self, keys: Sequence[BlockKey]) -> Mapping[WorkerAddress, Held]:
        raise IndexUnavailable("deadline")


class Town:
    """A fleet of ready pods, a memory index, a local view and a conductor."""

    def __init__(
        self, pods: int = 2, *, block_sizes: Sequence[int] = (), index: IndexReader | None = None, **trial: Any
    ) -> None:
        self.now_s = 100.0
        self.fleet = Fleet(default_block_size_tokens=BLOCK, clock=lambda: self.now_s)
        for i in range(pods):
            spec = PodSpec(identity=f"p{i}", name=f"pod-{i}", url=f"http://p{i}:1", events="tcp://p:1")
            self.fleet._apply(Seen(spec))
            size = block_sizes[i] if block_sizes else None
            self.fleet._apply(Probed(identity=f"p{i}", not_ready=None, models=MODELS, block_size_tokens=size))
        self.index = MemoryIndex()
        self.local = LocalView(clock=lambda: self.now_s)
        self.index.listen(self.local)
        self.fleet.learn_block_sizes_from(lambda worker: self.index.block_sizes().get(worker))
        self.metrics = Metrics()
        self.conductor = Conductor(
            fleet=self.fleet,
            tokens=BodyIsTokens(),
            index=index or self.index,
            local=self.local,
            metrics=self.metrics,
            policies=POLICIES,
            policy="prefix",
            seed="s",
            rng=random.Random(1),
            **trial,
        )

    async def holds(self, pod: str, ids: Sequence[int], *, size: int = BLOCK, lora: str | None = None) -> None:
        worker = WorkerId(WorkerAddress(pod), f"life of {pod}")
        keys = chain_keys(root_key(seed="s", model="org/m", lora_name=lora), pack_tokens(ids), size)
        await self.index.register(worker)
        await self.index.apply(worker, [Add(tuple(keys))])

    async def ask(self, body: object, **kw: object) -> Choice:
        text = msgspec.json.encode(body)
        request = RouteRequest(
            **{"endpoint": "/v1/completions", "model": "m", "body": text, "body_bytes": len(text), **kw}  # type: ignore[arg-type]
        )
        choice = self.conductor.choose(await self.conductor.prepare(request))
        assert isinstance(choice, Choice)
        return choice


async def test_the_holder_is_chosen_and_the_match_is_at_most_prompt_minus_one() -> None:
    town = Town()
    await town.holds("p1", range(160))
    choice = await town.ask(list(range(160)))
    assert (choice.name, choice.prompt_tokens, choice.matched_tokens, choice.indexed_tokens) == ("pod-1", 160, 144, 144)
    assert choice.reason == "prefix"


async def test_what_was_just_sent_there_counts_before_any_event_and_is_told_apart() -> None:
    town = Town(pods=4)
    first = await town.ask(list(range(320)))
    second = await town.ask(list(range(320)) + [7] * 20)
    assert second.worker == first.worker
    assert (second.matched_tokens, second.indexed_tokens) == (320, 0)


async def test_a_burst_of_siblings_sees_each_other() -> None:
    """All are prepared before the first is chosen, as it happens when tokens come from a pool."""
    town = Town(pods=4)
    bodies = [list(range(1600)) + [1000 + i] * 20 for i in range(8)]
    prepared = [
        await town.conductor.prepare(
            RouteRequest(endpoint="/v1/completions", model="m", body=msgspec.json.encode(b), body_bytes=9000)
        )
        for b in bodies
    ]
    chosen = [town.conductor.choose(p) for p in prepared]
    matched = [c.matched_tokens for c in chosen if isinstance(c, Choice)]
    assert len({c.name for c in chosen if isinstance(c, Choice)}) < 4
    assert sum(m == 1600 for m in matched if m is not None) >= 5


def ill(town: Town, pod: str, kind: FailureKind) -> None:
    breaker = town.fleet._breakers[WorkerAddress(pod)] = Breaker()
    for _ in range(5):
        breaker.failed(kind, now_s=town.now_s)
    assert not town.fleet.allows(WorkerAddress(pod))


async def test_one_clients_poison_does_not_close_the_fleet_to_the_others() -> None:
    """Its 500s open every breaker; the pods answer all the same, so it may be the request that is ill."""
    town = Town(pods=3)
    for pod in ("p0", "p1"):
        ill(town, pod, "status_5xx")
    assert (await town.ask([1])).name == "pod-2", "as long as one is well it is left alone"
    ill(town, "p2", "reset")
    assert {(await town.ask([n])).name for n in range(20)} == {"pod-0", "pod-1"}, "whoever answers not at all stays out"
    for pod in ("p0", "p1"):
        ill(town, pod, "timeout")
    prepared = await town.conductor.prepare(RouteRequest(endpoint="/v1/completions", model="m"))
    assert town.conductor.choose(prepared) == Refused("no_worker")


async def test_a_removal_takes_the_prediction_away_at_once() -> None:
    town = Town(pods=1)
    await town.holds("p0", range(320))
    await town.ask(list(range(320)))
    keys = chain_keys(root_key(seed="s", model="org/m"), pack_tokens(range(320)), BLOCK)
    await town.index.apply(WorkerId(WorkerAddress("p0"), "life of p0"), [Remove(tuple(keys[10:]))])
    assert (await town.ask(list(range(320)))).matched_tokens == 160


async def test_a_prediction_ends_seconds_after_the_first_token() -> None:
    town = Town(pods=1)
    await town.index.learnt(WorkerId(WorkerAddress("p0"), "life of p0"), BLOCK)  # its events do come
    choice = await town.ask(list(range(320)))
    choice.booking.first_token()
    assert (await town.ask(list(range(320)))).matched_tokens == 304
    town.now_s += 6.5
    later = await town.ask(list(range(320)))
    assert later.matched_tokens == 304, "the second request is still being computed there"
    later.booking.first_token()
    town.now_s += 5.5
    still = await town.ask(list(range(320)))
    assert still.matched_tokens == 304, "late events may still be under way"
    still.booking.first_token()
    town.now_s += 6.5
    assert (await town.ask(list(range(320)))).matched_tokens == 0


async def test_a_pod_whose_events_never_come_is_remembered_like_one_without_any() -> None:
    """H75: a wrong events endpoint must not cost more than having none."""
    town = Town(pods=2)
    first = await town.ask(list(range(320)))
    first.booking.first_token()
    first.booking.release()
    town.now_s += 60.0
    second = await town.ask(list(range(320)))
    assert (second.worker, second.matched_tokens, second.indexed_tokens) == (first.worker, 304, 0)


async def test_events_that_only_the_indexer_subscribes_to_count_as_events() -> None:
    """With a shared index the router may be told a pod's URL alone: its predictions end all the same."""
    town = Town(pods=1)
    town.fleet._apply(Seen(PodSpec(identity="p0", name="pod-0", url="http://p0:1")))
    await town.holds("p0", range(16))
    await town.index.learnt(WorkerId(WorkerAddress("p0"), "life of p0"), BLOCK)
    choice = await town.ask(list(range(320)))
    await town.index.apply(WorkerId(WorkerAddress("p0"), "life of p0"), [Clear()])
    choice.booking.first_token()
    assert (await town.ask(list(range(320)))).matched_tokens == 0, "a clear while it ran stays"
    town.now_s += 60.0
    assert (await town.ask(list(range(320)))).matched_tokens == 0


async def test_a_removal_while_the_request_runs_is_not_undone_by_its_first_token() -> None:
    town = Town(pods=1)
    worker = WorkerId(WorkerAddress("p0"), "life of p0")
    await town.holds("p0", range(320))
    choice = await town.ask(list(range(320)))
    await town.index.apply(worker, [Clear()])
    choice.booking.first_token()
    assert (await town.ask(list(range(320)))).matched_tokens == 0


async def test_what_a_pod_refused_is_not_predicted_there() -> None:
    town = Town(pods=1)
    (await town.ask(list(range(160)))).booking.first_token()
    refused = await town.ask(list(range(320)))
    refused.booking.void()
    refused.booking.release()
    assert (await town.ask(list(range(320)))).matched_tokens == 160, "only what another request brought there"


async def test_a_refusal_leaves_what_a_sibling_sent_since() -> None:
    town = Town(pods=1)
    refused = await town.ask(list(range(320)))
    town.now_s += 0.1
    await town.ask(list(range(320)))
    refused.booking.void()
    assert (await town.ask(list(range(320)))).matched_tokens == 304


async def test_a_burst_that_one_pod_refused_whole_is_not_predicted_there() -> None:
    """Predictions of equal prompts covered each other for half a minute, though none of them was computed."""
    town = Town(pods=1)
    refused = [await town.ask(list(range(320))) for _ in range(5)]
    for choice in refused:
        choice.booking.void()
        choice.booking.release()
    assert (await town.ask(list(range(320)))).matched_tokens == 0


async def test_requests_that_read_no_cache_match_nothing() -> None:
    town = Town()
    await town.holds("p1", range(160))
    assert (await town.ask(list(range(160)), skips_cache=True)).matched_tokens == 0


async def test_adapter_and_salt_keep_blocks_apart() -> None:
    """H50."""
    town = Town()
    await town.holds("p1", range(160), lora="ad")
    assert (await town.ask(list(range(160)))).matched_tokens == 0
    assert (await town.ask(list(range(160)), model="ad")).matched_tokens == 144
    assert (await town.ask(list(range(160)), model="ad", cache_salt="x")).matched_tokens == 0


async def test_pods_of_different_block_sizes_are_compared_in_tokens() -> None:
    """H36."""
    town = Town(block_sizes=(16, 64))
    await town.holds("p0", range(96), size=16)
    await town.holds("p1", range(320), size=64)
    choice = await town.ask(list(range(330)))
    assert (choice.name, choice.matched_tokens) == ("pod-1", 320)


async def test_holders_that_are_no_pod_of_ours_are_ignored() -> None:
    """H68."""
    town = Town()
    await town.holds("stranger", range(160))
    assert (await town.ask(list(range(160)))).matched_tokens == 0


async def test_without_the_index_the_local_view_decides_and_it_is_counted() -> None:
    town = Town(pods=4, index=Away())
    first = await town.ask(list(range(320)))
    first.booking.first_token()
    town.now_s += 60.0  # a chat's next turn, long after its first was answered
    second = await town.ask(list(range(320)))
    assert (second.worker, second.matched_tokens) == (first.worker, 304)
    assert town.metrics.value("warmroute_index_fallbacks_total", reason="deadline") == 2


async def test_without_ids_the_same_beginning_still_goes_to_the_same_pod() -> None:
    town = Town(pods=4)
    body = {"messages": [{"role": "system", "content": "x" * 4000}, {"role": "user", "content": "a"}]}
    longer = {"messages": [*body["messages"], {"role": "user", "content": "more"}]}
    first = await town.ask(body, endpoint="/v1/chat/completions")
    second = await town.ask(longer, endpoint="/v1/chat/completions")
    assert (first.worker, first.matched_tokens, first.reason) == (second.worker, None, "approximate")


async def test_a_worker_that_was_tried_is_not_chosen_again_even_in_a_large_fleet() -> None:
    town = Town(pods=60)
    prepared = await town.conductor.prepare(
        RouteRequest(endpoint="/v1/completions", model="m", body=b"[1,2,3]", body_bytes=7)
    )
    tried: set[WorkerAddress] = set()
    for _ in range(60):
        choice = town.conductor.choose(prepared, exclude=tried)
        assert isinstance(choice, Choice)
        assert choice.worker not in tried
        tried.add(choice.worker)
    assert town.conductor.choose(prepared, exclude=tried) == Refused("no_worker")


async def test_a_large_fleet_is_used_whole_and_its_one_holder_found() -> None:
    town = Town(pods=200)
    await town.holds("p150", range(1600))
    assert (await town.ask(list(range(1600)))).name == "pod-150"
    sent = Counter([(await town.ask([i] * 400)).name for i in range(2000, 2400)])
    assert len(sent) > 190
    assert max(sent.values()) <= 4


async def test_explaining_books_nothing() -> None:
    town = Town()
    await town.holds("p1", range(160))
    body = msgspec.json.encode(list(range(160)))
    shown = await town.conductor.explain(RouteRequest(endpoint="/v1/completions", model="m", body=body))
    assert shown["chosen_pod"] == "pod-1"
    assert [w["matched_tokens"] for w in shown["workers"]] == [0, 144]
    assert town.fleet.bookings.inflight_requests == 0


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        ("/v1/completions", list(range(160)), "placement"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 4000}]}, "approximate"),
        ("/v1/embeddings", {"input": "x" * 4000}, "load"),
    ],
)
async def test_explain_the_reply_and_the_metric_give_the_same_reason(endpoint: str, body: object, reason: str) -> None:
    town = Town()
    request = RouteRequest(endpoint=endpoint, model="m", body=msgspec.json.encode(body))
    shown = await town.conductor.explain(request)
    assert town.metrics.value("warmroute_token_fallbacks_total", reason="no_tokenizer") == 0  # nothing was routed
    served = await town.ask(body, endpoint=endpoint)
    assert (shown["choice"]["reason"], served.reason) == (reason, reason)
    assert town.metrics.value("warmroute_decisions_total", policy="prefix", reason=reason) == 1


async def test_explain_gives_the_price_of_the_worker_that_is_chosen() -> None:
    town = Town(pods=2)
    town.fleet.bookings.place(WorkerAddress("p0"), 9000)  # so the other is next, though a few requests are there
    for _ in range(3):
        town.fleet.bookings.hold(WorkerAddress("p1"))
    shown = await town.conductor.explain(
        RouteRequest(endpoint="/v1/completions", model="m", body=msgspec.json.encode([9] * 400))
    )
    (row,) = [w for w in shown["workers"] if w["chosen"]]
    assert row["pod"] == shown["chosen_pod"]
    assert shown["choice"]["price"] == row["terms"]["price"] > min(w["terms"]["price"] for w in shown["workers"])


async def test_explain_says_that_a_request_would_wait() -> None:
    town = Town(limits=RouteLimits(overload_prefill_s=0.3))
    request = RouteRequest(endpoint="/v1/completions", model="m", body=msgspec.json.encode(list(range(160))))
    assert not (await town.conductor.explain(request))["would_wait"]
    for worker in ("p0", "p1"):
        town.fleet.bookings.hold(WorkerAddress(worker), prefill_tokens=7000)
    assert (await town.conductor.explain(request))["would_wait"]


async def test_weighing_books_nothing_and_sees_what_is_booked() -> None:
    town = Town()
    await town.holds("p1", range(160))
    body = msgspec.json.encode(list(range(160)))
    prepared = await town.conductor.prepare(RouteRequest(endpoint="/v1/completions", model="m", body=body))
    candidates, request = town.conductor.weigh(prepared)
    assert request.prompt_tokens == 160
    assert [(c.matched_tokens, c.booked_prefill_tokens) for c in candidates] == [(0, 0), (144, 0)]
    assert town.fleet.bookings.inflight_requests == 0
    choice = town.conductor.choose(prepared)
    assert isinstance(choice, Choice)
    assert [c.booked_prefill_tokens for c in town.conductor.weigh(prepared)[0]] == [0, 16]
    assert town.conductor.prefill_due_s(choice.worker) == 16 / 20_000


async def test_who_has_waited_sees_what_siblings_left_meanwhile() -> None:
    town = Town()
    body = msgspec.json.encode(list(range(160)))
    prepared = await town.conductor.prepare(RouteRequest(endpoint="/v1/completions", model="m", body=body))
    await town.holds("p1", range(160))
    assert [c.matched_tokens for c in town.conductor.weigh(prepared)[0]] == [0, 0]
    again = await town.conductor.look_again(prepared)
    assert [c.matched_tokens for c in town.conductor.weigh(again)[0]] == [0, 144]
    assert msgspec.structs.replace(again, chains=prepared.chains) == prepared


async def test_when_the_index_is_away_what_it_said_before_counts() -> None:
    town = Town()
    await town.holds("p1", range(160))
    body = msgspec.json.encode(list(range(160)))
    prepared = await town.conductor.prepare(RouteRequest(endpoint="/v1/completions", model="m", body=body))
    town.conductor._index = Away()
    again = await town.conductor.look_again(prepared)
    assert [c.matched_tokens for c in town.conductor.weigh(again)[0]] == [0, 144]
    assert town.metrics.value("warmroute_index_fallbacks_total", reason="deadline") == 1


async def test_a_rank_is_named_only_where_the_engine_listens_to_it() -> None:
    town = Town(pods=1)
    spec = msgspec.structs.replace(town.fleet.pods()[0].spec, ranks=2)
    town.fleet._apply(Seen(spec))
    assert (await town.ask([1] * 40)).data_parallel_rank in (0, 1)
    assert (await town.ask([1] * 40, endpoint="/v1/embeddings")).data_parallel_rank is None


async def test_a_request_goes_where_its_adapter_is_and_leaves_no_trace_when_it_has_ended() -> None:
    town = Town(pods=3)
    for pod in ("p0", "p1", "p2"):
        town.fleet.adapters.scraped(WorkerAddress(pod), max_loras=1, running=(), waiting=(), own=(), valid_s=10.0)
    first = await town.ask([1] * 40, model="ad")
    base = await town.ask([2] * 400)
    assert base.worker != first.worker, "the base model needs no adapter, and that pod has company"
    shown = await explained(town, "ad")
    away = {w["pod"]: w["adapter_s"] for w in shown["workers"]}
    assert away == {f"pod-{i}": 0.0 if f"pod-{i}" == first.name else 0.5 for i in range(3)}
    assert shown["chosen_pod"] == first.name
    assert all(w["terms"]["adapter_s"] == 0.0 for w in (await explained(town, "m"))["workers"])
    first.booking.release()
    assert list(town.fleet.adapters.in_flight(first.worker)) == []
    assert (await town.ask([4] * 40, model="ad")).worker == first.worker, "it is still loaded there"


async def test_adapters_can_be_left_out_of_it() -> None:
    town = Town(pods=2)
    town.conductor._limits = RouteLimits(lora_load_s=0.0)
    choice = await town.ask([1] * 40, model="ad")
    assert list(town.fleet.adapters.in_flight(choice.worker)) == []


async def explained(town: Town, model: str) -> dict[str, Any]:
    body = msgspec.json.encode([5] * 40)
    return await town.conductor.explain(RouteRequest(endpoint="/v1/completions", model=model, body=body))
