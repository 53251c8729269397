"""Regimes: a named world in TOML (pods, routers, lags, what happens to the fleet) and the load upon it, for simulation.

Reads files; decides nothing. May import: the standard library, msgspec, loadtest.*.
"""

import gzip
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from loadtest import workload
from loadtest.profile import Profile, load_profile
from loadtest.sim_world import FleetEvent, Setup
from loadtest.workload import Workload

REGIMES_DIR = Path(__file__).parent / "regimes"
TRACES_DIR = Path("tests/data/traces")
SEEDS_APART = 1009  # between the seeds of a run's first workloads
GOLDEN_RATIO = 0.618  # of a trace, between where two seeds begin in it: any few of them lie well apart
REFERENCE_PREFILL_TOKENS_PER_S = 20_480.0  # the profile that the regimes' rates are written for
REFERENCE_KV_TOKENS = 307_328


class World(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of `Setup`; what is left out keeps its default."""

    routers: int = 1
    event_lag_s: float = 0.05
    scrape_interval_s: float = 1.0
    scrape_lag_s: float = 0.0
    exchange_interval_s: float = 0.1  # 0: routers do not know of each other
    slow_pods: dict[str, float] = {}  # pod number -> how many times slower
    kv_tokens_per_pod: int = 0  # 0: the profile's
    max_loras: int = 0  # 0: the profile's
    lora_load_s: float = 0.0  # 0: the profile's
    rate_tokens_per_s: float = 20_000.0  # what the router believes
    shortlist: int = 0  # 0: every pod is scored
    overload_prefill_s: float = 0.0  # routers hold requests while every pod has more prefill booked; 0: never


class Regime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One experiment. Several workloads are laid over each other."""

    about: str
    workload: list[dict[str, Any]]
    name: str = ""
    profile: str = "qwen3-32b-2xh100"
    pods: int = 8
    max_model_len_tokens: int = 0  # 0: the profile's
    world: World = World()
    events: list[FleetEvent] = []
    scale_rates: bool = True  # with another profile: rates by its prefill rate, durations the other way
    scale_groups: bool = False  # ... and numbers of groups by its KV cache


def names() -> list[str]:
    """All regimes that come with the package."""
    return sorted(p.stem for p in REGIMES_DIR.glob("*.toml"))


def load_regime(name_or_path: str) -> Regime:
    """By name or by the path of a .toml file. Raises FileNotFoundError for none such, ValueError for a bad one."""
    path = Path(name_or_path) if name_or_path.endswith(".toml") else REGIMES_DIR / f"{name_or_path}.toml"
    if not path.is_file():
        raise FileNotFoundError(f"no scenario {name_or_path!r}; known: {', '.join(names())}, or give a .toml file")
    try:
        regime = msgspec.convert(tomllib.loads(path.read_text()), Regime)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as exc:
        raise ValueError(f"scenario {path.name}: {exc}") from exc
    return msgspec.structs.replace(regime, name=regime.name or path.stem)


def setup(regime: Regime, profile: Profile) -> Setup:
    """The world of a regime with a profile's pods."""
    world = regime.world
    stretch = REFERENCE_PREFILL_TOKENS_PER_S / profile.prefill_tokens_per_s if regime.scale_rates else 1.0
    events = (msgspec.structs.replace(e, at_s=e.at_s * stretch) for e in regime.events)
    if regime.max_model_len_tokens:
        profile = msgspec.structs.replace(profile, max_model_len_tokens=regime.max_model_len_tokens)
    if world.kv_tokens_per_pod:
        profile = msgspec.structs.replace(profile, num_blocks=world.kv_tokens_per_pod // profile.block_size_tokens)
    if world.max_loras:
        load_s = world.lora_load_s or profile.lora_load_s
        profile = msgspec.structs.replace(profile, max_loras=world.max_loras, lora_load_s=load_s)
    return Setup(
        profile=profile,
        pods=regime.pods,
        routers=world.routers,
        event_lag_s=world.event_lag_s,
        scrape_interval_s=world.scrape_interval_s,
        scrape_lag_s=world.scrape_lag_s,
        exchange_interval_s=world.exchange_interval_s or None,
        slow_pods={int(pod): factor for pod, factor in world.slow_pods.items()},
        rate_tokens_per_s=world.rate_tokens_per_s,
        events=tuple(events),
        shortlist=world.shortlist or None,
        overload_prefill_s=world.overload_prefill_s,
    )


def profile_of(regime: Regime, override: str | None = None) -> Profile:
    """The regime's profile, or another one."""
    return load_profile(override or regime.profile)


def build(regime: Regime, profile: Profile, seed: int, traces_dir: Path = TRACES_DIR) -> Workload:
    """The regime's sessions. Raises ValueError for an unknown kind or argument, FileNotFoundError for no trace."""
    parts = []
    for i, given in enumerate(regime.workload):
        spec = _scaled(regime, dict(given), profile)
        kind = spec.pop("kind", None)
        maker = KINDS.get(kind)
        if maker is None:
            raise ValueError(f"unknown workload kind {kind!r}; known: {', '.join(KINDS)}")
        try:
            parts.append(maker(seed * SEEDS_APART + i, traces_dir, spec))
        except TypeError as exc:
            raise ValueError(f"scenario {regime.name}: a workload does not fit kind {kind!r}: {exc}") from exc
    return parts[0] if len(parts) == 1 else workload.mixed(regime.name, parts)


def _scaled(regime: Regime, spec: dict[str, Any], profile: Profile) -> dict[str, Any]:
    """Rates for a pod of another speed: as many requests, sent as fast as it can take them."""
    if regime.scale_rates:
        ratio = profile.prefill_tokens_per_s / REFERENCE_PREFILL_TOKENS_PER_S
        for field, factor in (("rate", ratio), ("speed", ratio), ("seconds", 1 / ratio), ("every_s", 1 / ratio)):
            if field in spec:
                spec[field] *= factor
        if spec.get("kind") == "ladder" and ratio != 1.0:
            stages = spec.get("stages", workload.LADDER_STAGES)
            spec["stages"] = [(rate * ratio, seconds / ratio) for rate, seconds in stages]
            warmup = spec.get("warmup", (15, 50))
            spec["warmup"] = (warmup[0] * ratio, warmup[1] / ratio)
    if regime.scale_groups and "groups" in spec:
        kv = profile.num_blocks * profile.block_size_tokens
        spec["groups"] = max(round(spec["groups"] * kv / REFERENCE_KV_TOKENS), 1)
    return spec


def _read(traces_dir: Path, spec: dict[str, Any]) -> Iterator[Mapping[str, Any]]:
    path = traces_dir / spec.pop("file")
    if not path.is_file():
        raise FileNotFoundError(f"no trace {path}; give --traces DIR (the repository keeps them in {TRACES_DIR})")
    with gzip.open(path, "rt") as lines:
        for line in lines:
            yield json.loads(line)


def _timed(seed: int, traces_dir: Path, spec: dict[str, Any]) -> Workload:
    rows = list(_read(traces_dir, spec))
    start_share = (seed // SEEDS_APART - 1) * GOLDEN_RATIO % 1.0  # seed 1 begins where the trace does
    return workload.timed_trace(rows, start_share=start_share, **spec)


def _agents(seed: int, traces_dir: Path, spec: dict[str, Any]) -> Workload:
    rows = list(_read(traces_dir, spec))
    return workload.agent_trace(rows, seed=seed, **spec)


def _messages(seed: int, traces_dir: Path, spec: dict[str, Any]) -> Workload:
    rows = list(_read(traces_dir, spec))
    return workload.message_trace(rows, seed=seed, **spec)


def _rag(seed: int, traces_dir: Path, spec: dict[str, Any]) -> Workload:
    lengths = [max(len(row["document"]) // 4, 1) for row in _read(traces_dir, spec)]
    return workload.rag(seed, document_tokens=lengths, **spec)


KINDS: dict[str, Callable[[int, Path, dict[str, Any]], Workload]] = {
    "ladder": lambda seed, _, spec: workload.ladder(seed, **spec),
    "shared-prefix": lambda seed, _, spec: workload.shared_prefix(seed, **spec),
    "cold": lambda seed, _, spec: workload.cold(seed, **spec),
    "chat": lambda seed, _, spec: workload.chat(seed, **spec),
    "adapters": lambda seed, _, spec: workload.adapters(seed, **spec),
    "bursts": lambda seed, _, spec: workload.bursts(seed, **spec),
    "timed-trace": _timed,
    "agent-trace": _agents,
    "message-trace": _messages,
    "rag": _rag,
}
"""Workload kind -> (seed, traces, parameters) -> workload."""
