"""A scenario file as the crowd takes it: scenarios/*.toml or regimes/*.toml -> stages to send over HTTP.

Regimes are the files that `simulate` reads; of them a crowd needs [[workload]]. What shapes the simulated fleet there
([world], [[events]]) is `simulate`'s business; how a crowd sends ([client]) is ours.
Reads files; decides nothing. May import: the standard library, msgspec, loadtest.workload.
"""

import gzip
import inspect
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from loadtest import workload
from loadtest.workload import Session, Stage, Workload

SCENARIOS_DIR = Path(__file__).parent / "scenarios"
REGIMES_DIR = Path(__file__).parent / "regimes"
TRACES_DIR = Path(__file__).parent.parent / "tests" / "data" / "traces"  # of a checkout; the package has none

KINDS: Mapping[str, Callable[..., Workload]] = {
    "ladder": workload.ladder,
    "shared-prefix": workload.shared_prefix,
    "cold": workload.cold,
    "chat": workload.chat,
    "adapters": workload.adapters,
    "bursts": workload.bursts,
    "rag": workload.rag,
}
TRACES: Mapping[str, Callable[..., Workload]] = {
    "timed-trace": workload.timed_trace,
    "agent-trace": workload.agent_trace,
    "message-trace": workload.message_trace,
}


class ScenarioError(Exception):
    """A scenario cannot be used; the text says which, why, and what to do."""


class Client(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a crowd sends it."""

    api: Literal["chat", "completions"] = "chat"
    warmup_s: float = 0.0  # the first seconds of a single-stage open loop are sent but not measured
    arrivals: Literal["poisson", "constant"] = "poisson"  # of an open loop
    stages: list[tuple[float, float]] = []  # (requests/s, seconds) each, drained between; instead of rate and seconds
    concurrency: int | None = None  # closed loop: this many sessions at a time instead of arrivals by rate
    closed_loop_s: float = 0.0  # closed loop: no session begins later; 0 = all of them are sent
    tools: int = 0  # chat: so many tool definitions in every request, as agents send them
    slo_ttft_s: float = 1.0  # goodput counts answers within both
    slo_tpot_s: float = 0.1


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, and how."""

    name: str
    about: str = ""
    workload: list[dict[str, Any]]
    client: Client = Client()
    folder: str = ""

    def build(self, seed: int) -> Workload:
        """The workload. Raises ScenarioError when the arguments do not fit the kind."""
        ladder = self._ladder() if self.client.stages else {}
        parts = [self._part(part | ladder, seed + 7919 * n) for n, part in enumerate(self.workload)]
        built = parts[0] if len(parts) == 1 else workload.mixed(self.name, parts)
        stages = built.stages
        if ladder:
            stages = tuple(self._slices(stages[0].sessions, Random(seed)))
        return Workload(self.name, tuple(s for stage in stages for s in self._shape(stage)))

    def _ladder(self) -> dict[str, float]:
        """Rate and seconds of one long stage that has sessions enough for all of the ladder's."""
        if len(self.workload) != 1 or self.workload[0].get("kind") not in ("shared-prefix", "cold", "chat", "rag"):
            raise ScenarioError(f"scenario {self.name}: stages need one [[workload]] that has a rate")
        wanted = sum(rate * seconds for rate, seconds in self.client.stages)
        seconds = sum(seconds for _, seconds in self.client.stages)
        return {"rate": 1.3 * (wanted + 50) / seconds, "seconds": seconds}

    def _slices(self, sessions: Sequence[Session], rng: Random) -> Iterator[Stage]:
        """The sessions in order, so many for each stage, at new times: every stage goes on where the last one ended."""
        begin = 0
        for rate, seconds in self.client.stages:
            count = round(rate * seconds)
            times = sorted(rng.uniform(0, seconds) for _ in range(count))  # a Poisson process of known count
            part = sessions[begin : begin + count]
            begin += count
            placed = tuple(Session(t, s.turns) for t, s in zip(times, part, strict=True))
            yield Stage(f"{rate:g}/s", placed, rate, seconds)

    def _part(self, part: Mapping[str, Any], seed: int) -> Workload:
        args = dict(part)
        kind = args.pop("kind", None)
        file = args.pop("file", None)
        if kind not in KINDS and kind not in TRACES:
            raise ScenarioError(f"scenario {self.name}: no kind {kind!r}; known: {', '.join([*KINDS, *TRACES])}")
        if kind in TRACES and not file:
            raise ScenarioError(f"scenario {self.name}: kind {kind!r} needs a file")
        if kind == "rag" and file:
            args["document_tokens"] = [_document_tokens(row) for row in self._rows(file)]
        if kind == "timed-trace":
            args.setdefault("seconds", 60.0)
        make = KINDS[kind] if kind in KINDS else TRACES[kind]
        if problem := _misfit(make, args):
            raise ScenarioError(f"scenario {self.name}: [[workload]] does not fit kind {kind!r}: {problem}")
        return make(seed if kind in KINDS else list(self._rows(file)), **args)

    def _shape(self, stage: Stage) -> list[Stage]:
        """Closed loop, constant arrivals or warm-up, where asked for."""
        c = self.client
        if c.arrivals == "constant" and not stage.concurrency and stage.sessions:
            gap_s = stage.seconds / len(stage.sessions)
            even = tuple(Session((n + 0.5) * gap_s, s.turns) for n, s in enumerate(stage.sessions))
            stage = msgspec.structs.replace(stage, sessions=even)
        if c.concurrency:
            return [msgspec.structs.replace(stage, concurrency=c.concurrency, seconds=c.closed_loop_s, rate_per_s=0.0)]
        if not c.warmup_s or not stage.measured or stage.concurrency or c.stages:
            return [stage]
        if c.warmup_s >= stage.seconds:
            raise ScenarioError(
                f"scenario {self.name}: all of its {stage.seconds:g} s are warm-up (warmup_s is {c.warmup_s:g}), so "
                "nothing would be measured; give more seconds or a shorter warmup_s"
            )
        early = tuple(s for s in stage.sessions if s.start_s < c.warmup_s)
        late = tuple(Session(s.start_s - c.warmup_s, s.turns) for s in stage.sessions if s.start_s >= c.warmup_s)
        return [
            msgspec.structs.replace(stage, name="warm-up", sessions=early, seconds=c.warmup_s, measured=False),
            msgspec.structs.replace(stage, sessions=late, seconds=stage.seconds - c.warmup_s),
        ]

    def _rows(self, file: str) -> Iterator[Mapping[str, Any]]:
        for path in (Path(file), Path(self.folder) / file, TRACES_DIR / file):
            if path.is_file():
                break
        else:
            raise ScenarioError(f"scenario {self.name}: no trace file {file}; name it with --set file=PATH")
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                if line.strip():
                    yield json.loads(line)


def load_experiment(name_or_path: str, changes: Mapping[str, Any] | None = None) -> Experiment:
    """A scenario by its name in scenarios/ or regimes/, or by the path of a .toml file. Raises ScenarioError.

    `changes` replaces fields of [client] where there is one of that name, else arguments of every [[workload]].
    """
    folders = (SCENARIOS_DIR, REGIMES_DIR)
    paths = [Path(name_or_path)] if name_or_path.endswith(".toml") else [f / f"{name_or_path}.toml" for f in folders]
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        known = ", ".join(sorted(p.stem for f in folders for p in f.glob("*.toml")))
        raise ScenarioError(f"no scenario {name_or_path!r}; known: {known}, or give the path of a .toml file")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        for key, value in (changes or {}).items():
            if key in Client.__struct_fields__:
                raw.setdefault("client", {})[key] = value
            else:
                raw["workload"] = [part | {key: value} for part in raw.get("workload", [])]
        if changes:
            raw["about"] = f"{raw.get('about', path.stem)} (changed: {_spelt(changes)})"
        experiment = msgspec.convert({"name": path.stem, "folder": str(path.parent)} | raw, Experiment)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as exc:
        raise ScenarioError(f"scenario {path.name}: {exc}") from exc
    if not experiment.workload:
        raise ScenarioError(f"scenario {path.name} has no [[workload]]")
    return experiment


def _misfit(make: Callable[..., Workload], args: Mapping[str, Any]) -> str | None:
    """Why `make` cannot be called with these settings, in the user's words; None when it can."""
    known = {n: p for n, p in inspect.signature(make).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for name, value in args.items():
        if name not in known:
            clients = ", ".join(Client.__struct_fields__)
            return f"it has no {name!r}; it has {', '.join(known)}; [client] has {clients}"
        if known[name].annotation in (int, float) and not isinstance(value, int | float):
            return f"{name!r} must be a number, got {value!r}"
    missing = [n for n, p in known.items() if p.default is p.empty and n not in args]
    return f"{', '.join(missing)} must be given" if missing else None


def _spelt(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in changes.items())


def faster(built: Workload, speed: float) -> Workload:
    """The same workload on a clock that runs `speed` times as fast: all times divided by it."""
    if speed == 1.0:
        return built
    return Workload(built.name, tuple(_faster_stage(s, speed) for s in built.stages))


def _faster_stage(stage: Stage, speed: float) -> Stage:
    sessions = tuple(
        Session(s.start_s / speed, tuple(msgspec.structs.replace(t, think_s=t.think_s / speed) for t in s.turns))
        for s in stage.sessions
    )
    return msgspec.structs.replace(
        stage, sessions=sessions, seconds=stage.seconds / speed, rate_per_s=stage.rate_per_s * speed
    )


def tool_definitions(count: int) -> list[dict[str, Any]]:
    """`count` function tools, the same in every request."""
    path = {"type": "string", "description": "file or folder, relative to the project"}
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{n}",
                "description": f"Tool number {n} of the agent. Use it when step {n} of the plan asks for it.",
                "parameters": {
                    "type": "object",
                    "properties": {"path": path, "limit": {"type": "integer"}},
                    "required": ["path"],
                },
            },
        }
        for n in range(count)
    ]


def _document_tokens(row: Mapping[str, Any]) -> int:
    text = row.get("context") or row.get("document") or row.get("text") or ""
    return max(len(text) // 4, 1)
