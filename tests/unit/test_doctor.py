"""Facts about a pod, and what the doctor makes of them."""

import msgspec
import pytest

from router.diagnosis import Facts, diagnose
from router.doctor import built_in_chats

RIGHT = Facts(
    url="http://pod:8000",
    health_status=200,
    version="0.32.0",
    models=["m"],
    root="org/m",
    prefix_caching=True,
    block_size_tokens=32,
    sources=["tcp://*:5557"],
    events_endpoint="tcp://pod:5557",
    events_connected=True,
    batches=2,
    event_block_sizes=[32],
    predicted_tokens=128,
    delivered_tokens=128,
    chats_compared=60,
)
SILENT = {"batches": 0, "event_block_sizes": []}


def changed(**fields: object) -> Facts:
    return msgspec.structs.replace(RIGHT, **fields)


def test_a_right_pod_has_only_good_findings() -> None:
    assert {f.level for f in diagnose(RIGHT)} == {"ok"}


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        pytest.param(Facts(url="http://x"), "unreachable", id="no answer"),
        pytest.param(changed(health_status=503), "unhealthy", id="engine dead"),
        pytest.param(changed(models=[]), "no_model", id="not an OpenAI server"),
        pytest.param(changed(sources=[], events_endpoint=None, **SILENT), "no_events", id="events are off"),
        pytest.param(
            changed(sources=None, events_connected=False, **SILENT), "no_events", id="old vLLM and nothing on the port"
        ),
        pytest.param(changed(sources=["tcp://router:5557"], **SILENT), "endpoint_without_star", id="it dials out"),
        pytest.param(changed(prefix_caching=False, delivered_tokens=0), "prefix_caching_off", id="caching off"),
        pytest.param(
            changed(asked_events="tcp://pod:5558", events_endpoint="tcp://pod:5558", **SILENT),
            "wrong_port",
            id="wrong port",
        ),
        pytest.param(changed(events_connected=False, **SILENT), "events_unreachable", id="port closed"),
        pytest.param(changed(**SILENT), "silent_events", id="connected but silent"),
        pytest.param(changed(undecodable=1), "undecodable_events", id="a newer wire format"),
        pytest.param(changed(chats_differed=60), "wrong_tokenizer", id="other template"),
        pytest.param(changed(delivered_tokens=0), "prediction_differs", id="predicted, not delivered"),
        pytest.param(changed(probe_error="POST ... 400"), "probe_failed", id="no completions"),
    ],
)
def test_each_fault_has_its_name_and_a_cure(facts: Facts, name: str) -> None:
    bad = [f for f in diagnose(facts) if f.level == "bad"]
    assert name in [f.name for f in bad]
    assert all(f.fix for f in bad)


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (changed(old_form=True), "old_events"),
        (changed(prefix_caching=None), "prefix_caching_unknown"),
        (changed(event_block_sizes=[16]), "block_size_differs"),
        (changed(tokenizer_error="none here"), "tokens_not_checked"),
        (changed(delivered_tokens=None), "delivered_unknown"),
    ],
)
def test_what_only_deserves_a_note(facts: Facts, name: str) -> None:
    found = diagnose(facts)
    assert name in [f.name for f in found if f.level == "note"]
    assert not [f for f in found if f.level == "bad"]


def test_the_built_in_chats_are_the_same_every_time_and_varied() -> None:
    bodies = built_in_chats()
    assert bodies == built_in_chats()
    assert len(bodies) == 60
    assert sum(b'"tools"' in b for b in bodies) > 10
    assert sum(b'"tool_calls"' in b for b in bodies) > 10
