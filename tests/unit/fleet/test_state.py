"""FleetState: who is alive, as a sequence of events."""

import msgspec
import pytest

from router.fleet.state import FleetState, Gone, ModelEntry, PodSpec, Probed, Seen

A = PodSpec(identity="a", name="a", url="http://a:1")


def after(*events: Seen | Gone | Probed) -> FleetState:
    state = FleetState()
    for event in events:
        state = state.apply(event)
    return state


def ready(identity: str = "a", **kw: object) -> Probed:
    return Probed(identity=identity, not_ready=None, **kw)  # type: ignore[arg-type]


def test_a_pod_serves_once_a_probe_was_good_and_not_before() -> None:
    assert not after(Seen(A)).pods["a"].serving
    assert after(Seen(A), ready()).pods["a"].serving
    assert after(Seen(A), ready(), Probed(identity="a", not_ready="health")).pods["a"].not_ready == "health"


def test_terminating_wins_over_a_good_probe() -> None:
    """H23: /health stays 200 while vLLM drains."""
    leaving = msgspec.structs.replace(A, terminating=True)
    assert after(Seen(A), ready(), Seen(leaving), ready()).pods["a"].not_ready == "terminating"


def test_kubernetes_not_ready_wins_over_a_good_probe_and_ends() -> None:
    """H24."""
    loading = msgspec.structs.replace(A, ready=False)
    state = after(Seen(loading), ready())
    assert state.pods["a"].not_ready == "not_ready"
    state = state.apply(Seen(A))
    assert state.pods["a"].not_ready == "starting"
    assert state.apply(ready()).pods["a"].serving


def test_a_new_incarnation_forgets_what_the_old_one_said() -> None:
    old = ready(models=(ModelEntry(id="m"),), started_at_s=1.0, block_size_tokens=64)
    state = after(Seen(A), old, Seen(msgspec.structs.replace(A, incarnation="2")))
    assert state.pods["a"].models == ()
    assert state.pods["a"].block_size_tokens is None


def test_events_about_unknown_pods_change_nothing() -> None:
    state = after(Seen(A))
    assert state.apply(ready("b")) is state
    assert state.apply(Gone("b")) is state
    assert after(Seen(A), Gone("a")).pods == {}


@pytest.mark.parametrize(
    ("name", "base", "lora"),
    [
        pytest.param("served", "org/model", None, id="a served name"),
        pytest.param("alias", "org/model", None, id="another of the same base"),
        pytest.param("adapter", "org/model", "adapter", id="an adapter hangs under its base"),
    ],
)
def test_one_base_model_under_all_its_names(name: str, base: str, lora: str | None) -> None:
    models = (
        ModelEntry(id="served", root="org/model"),
        ModelEntry(id="alias", root="org/model"),
        ModelEntry(id="adapter", root="loras/adapter", parent="served"),
    )
    pod = after(Seen(A), ready(models=models)).pods["a"]
    assert (pod.base_model(name), pod.lora_name(name)) == (base, lora)
