"""Where a pod's events are, in its own words: every form that engines have given GET /kv_event_sources."""

import json
from typing import Any

import msgspec
import pytest

from indexer.follow import source_specs
from router.fleet.fleet import parse_event_sources
from router.fleet.state import EventSource, FleetState, ModelEntry, PodSpec, Probed, Seen

URL = "http://10.0.0.1:8000"
ONE = {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "publisher": "zmq", "topic": ""}
CHOSEN = [{"endpoint": f"tcp://10.0.0.{9 + r}:{41001 + 10 * r}", "replay_endpoint": None} for r in range(2)]


@pytest.mark.parametrize(
    ("said", "endpoints"),
    [
        pytest.param({"0": ONE}, [("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657")], id="0.32"),
        pytest.param({"3": ONE}, [("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657")], id="one rank a pod"),
        pytest.param(
            {"1": CHOSEN[1], "0": CHOSEN[0]},
            [("tcp://10.0.0.9:41001", None), ("tcp://10.0.0.10:41011", None)],
            id="ports that the system chose",
        ),
        pytest.param(
            [{"data_parallel_rank": 1, **CHOSEN[1]}, {"data_parallel_rank": 0, **CHOSEN[0]}],
            [("tcp://10.0.0.9:41001", None), ("tcp://10.0.0.10:41011", None)],
            id="a list",
        ),
        pytest.param({"sources": [ONE]}, [("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657")], id="a list with a name"),
        pytest.param({"0": {"publisher": "null"}}, [], id="a publisher that publishes nothing"),
        pytest.param({}, [], id="none"),
        pytest.param({"0": {"endpoint": "ipc:///tmp/x"}}, [(None, None)], id="nothing that can be reached from here"),
    ],
)
def test_each_form_tells_each_ranks_endpoints(said: Any, endpoints: list[tuple[str | None, str | None]]) -> None:
    assert parse_event_sources(json.dumps(said).encode(), URL) == EventSource(tuple(endpoints))


@pytest.mark.parametrize("raw", [b"<html>", b'"text"', b'{"a": {}}', b"7"])
def test_whatever_else_is_no_such_page(raw: bytes) -> None:
    with pytest.raises(ValueError):
        parse_event_sources(raw, URL)


def test_what_a_pod_tells_is_followed_rank_by_rank_and_settings_win() -> None:
    spec = PodSpec(identity="a", name="a", url=URL)
    source = parse_event_sources(json.dumps(dict(enumerate(CHOSEN))).encode(), URL)
    told = Probed(identity="a", not_ready=None, models=(ModelEntry(id="m"),), source=source)

    def followed(spec: PodSpec) -> list[tuple[int, str, str | None]]:
        state = FleetState().apply(Seen(spec)).apply(told)
        return [(s.address.rank, s.events, s.replay) for s in source_specs(state)]

    assert followed(spec) == [(0, "tcp://10.0.0.9:41001", None), (1, "tcp://10.0.0.10:41011", None)]
    with_replay = msgspec.structs.replace(spec, replay="tcp://10.0.0.1:6000")
    assert [replay for _, _, replay in followed(with_replay)] == ["tcp://10.0.0.1:6000", "tcp://10.0.0.1:6001"]
    configured = msgspec.structs.replace(spec, events="tcp://10.0.0.1:5557")
    assert [(r, e) for r, e, _ in followed(configured)] == [(0, "tcp://10.0.0.1:5557"), (1, "tcp://10.0.0.1:5558")]
