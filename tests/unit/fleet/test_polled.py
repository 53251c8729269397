"""Discovery by asking again: a host name's addresses, a file's lines. No waiting, no name server."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from router.fleet.discover import build_discovery
from router.fleet.discovery import PodSpec, RestartReason
from router.fleet.polled import PolledDiscovery, addresses_of, lines_of
from router.ops import Metrics
from router.settings import ServeSettings, SettingsError, read


class Heard:
    """What the fleet and the metrics are told."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []
        self.reasons: list[RestartReason] = []
        self.stumble = False

    def on_pods(self, pods: Sequence[PodSpec]) -> None:
        if self.stumble:
            raise RuntimeError
        self.lists.append([p.url for p in pods])

    def synced(self, kind: str) -> None:
        assert kind in ("dns", "file")

    def restarted(self, kind: str, reason: RestartReason) -> None:
        self.reasons.append(reason)


def by_file(path: Path, heard: Heard) -> PolledDiscovery:
    return PolledDiscovery("file", lines_of(path), heard.on_pods, heard, interval_s=1.0, clock=lambda: 0.0)


async def test_a_file_is_read_again(tmp_path: Path) -> None:
    path, heard = tmp_path / "pods", Heard()
    path.write_text("\ufeff# an editor's mark\nhttp://a:8000,events=tcp://a:5557 # the first\n\n")
    discovery = by_file(path, heard)
    await discovery.once()
    await discovery.once()
    assert heard.lists == [["http://a:8000"]]
    path.write_text("http://a:8000\nhttp://b:8000\n")
    await discovery.once()
    assert len(heard.lists) == 1, "it may be half written: once more"
    await discovery.once()
    assert heard.lists[-1] == ["http://a:8000", "http://b:8000"]
    path.write_text("")
    await discovery.once()
    await discovery.once()
    assert heard.lists[-1] == []
    assert heard.reasons == []


@pytest.mark.parametrize("text", ["http://a:8000\nftp://b\n", "http://a:8000\nhttp://a:8000\n", None])
async def test_a_file_that_cannot_be_used_keeps_the_pods_and_says_why(tmp_path: Path, text: str | None) -> None:
    path, heard = tmp_path / "pods", Heard()
    path.write_text("http://a:8000\n")
    discovery = by_file(path, heard)
    await discovery.once()
    path.unlink() if text is None else path.write_text(text)
    await discovery.once()
    await discovery.once()
    assert heard.lists == [["http://a:8000"]]
    assert heard.reasons
    status = discovery.status()
    assert status.synced
    assert status.last_error is not None
    assert "--pods-file" in status.last_error
    path.write_text("http://b:8000\n")
    await discovery.once()
    await discovery.once()
    assert heard.lists[-1] == ["http://b:8000"]
    assert discovery.status().last_error is None


async def test_a_stumbling_listener_is_told_again(tmp_path: Path) -> None:
    path, heard = tmp_path / "pods", Heard()
    path.write_text("http://a:8000\n")
    discovery, heard.stumble = by_file(path, heard), True
    await discovery.once()
    heard.stumble = False
    await discovery.once()
    assert heard.lists == [["http://a:8000"]]
    assert heard.reasons == ["bug"]


def answers(*addresses: str) -> list[Any]:
    return [(socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 8000)) for a in addresses]


async def test_every_address_of_a_name_is_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = [
        answers("10.0.0.2", "10.0.0.1", "10.0.0.2"),
        OSError(-2, "Name or service not known"),
        answers("10.0.0.2", "fd00::2"),
        answers("fd00::3"),
    ]

    async def getaddrinfo(host: str, port: int, *, type: int) -> Any:  # noqa: A002
        assert (host, port, type) == ("vllm", 8000, socket.SOCK_STREAM)
        answer = said.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    heard = Heard()
    look = addresses_of("vllm", port=8000, events_port=5557, replay_port=None)
    discovery = PolledDiscovery("dns", look, heard.on_pods, heard, interval_s=1.0)
    assert not discovery.status().synced
    await discovery.once()
    await discovery.once()
    assert heard.lists == [["http://10.0.0.1:8000", "http://10.0.0.2:8000"]], "a hiccup keeps them"
    assert "vllm cannot be resolved" in str(discovery.status().last_error)
    await discovery.once()
    assert heard.lists[-1] == ["http://10.0.0.2:8000"], "one pod, not two"
    await discovery.once()
    assert heard.lists[-1] == ["http://[fd00::3]:8000"]
    assert heard.reasons == ["connect"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"discovery": "dns", "service": "vllm"}, "--pod-port"),
        ({"discovery": "file"}, "--pods-file"),
        ({"discovery": "kubernetes"}, "--selector LABELS or --service NAME"),
        ({"discovery": "kubernetes", "selector": "a", "service": "b"}, "--selector LABELS or --service NAME"),
        ({"discovery": "kubernetes", "selector": "a in"}, "kubectl -l"),
    ],
)
def test_what_is_missing_is_said(flags: dict[str, str], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        build_discovery(read(ServeSettings, flags), lambda pods: None, Metrics())


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({"discovery": "dns", "service": "vllm", "pod_port": "8000"}, "dns"),
        ({"discovery": "file", "pods_file": "pods"}, "file"),
        ({"discovery": "kubernetes", "selector": "app=vllm"}, "kubernetes pods"),
        ({"discovery": "kubernetes", "service": "vllm"}, "kubernetes endpointslices"),
    ],
)
def test_each_kind_is_built(flags: dict[str, str], kind: str) -> None:
    assert build_discovery(read(ServeSettings, flags), lambda pods: None, Metrics()).status().kind == kind
