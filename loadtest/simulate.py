"""`warmroute loadtest simulate`: scenarios under rules, in virtual time; tables, JSON, decisions spelt out.

May import: the standard library, msgspec, loadtest.*.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from loadtest import sim_scenario as regimes
from loadtest import workload
from loadtest.profile import Profile, load_profile
from loadtest.sim_policies import FACTORIES
from loadtest.sim_report import (
    ORACLE_SUFFIX,
    Row,
    acceptance,
    acceptance_table,
    ladder_figures,
    ratio_table,
    row,
    rows,
    table,
)
from loadtest.sim_world import Outcome, Setup, Simulation
from router.policy.pick import Costs

_T = TypeVar("_T")
PUBLISHED_SCRAPE_S = 0.05  # how often the published scheduler reads the pods' metrics


class Result(msgspec.Struct, frozen=True):
    """One scenario under one rule and one seed."""

    scenario: str
    policy: str
    profile: str
    calibrated: bool
    seed: int
    cpu_s: float
    rows: list[Row]
    decisions: dict[str, int]
    explained: list[dict[str, object]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--scenario", action="append", metavar="NAME", help="name or .toml file; repeatable; 'all'")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="repeatable; 'all'; NAME+oracle: with truth; NAME:alpha=0,predict=0: with other costs or knowledge",
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 1..N (default 1)")
    parser.add_argument("--profile", metavar="NAME", help="another kind of pod, rates scaled to it")
    parser.add_argument("--pods", type=int, help="another number of pods")
    parser.add_argument(
        "--overload-prefill-s", type=float, metavar="SECONDS", help="hold requests while every pod has more booked"
    )
    parser.add_argument("--explain", type=int, default=0, metavar="N", help="print the terms of the first N decisions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--traces", type=Path, default=regimes.TRACES_DIR, metavar="DIR", help="where traces lie")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("--ratios", action="store_true", help="at the end: each rule against the best, per scenario")
    parser.add_argument("--accept", action="store_true", help="the full ladder against the published tables")
    parser.add_argument("--list", action="store_true", help="name the scenarios and rules")


def run(args: argparse.Namespace) -> int:
    """Do what the flags say. Returns the exit status: 1 when --accept misses a bound, 2 for a usage error."""
    if args.list:
        for name in regimes.names():
            print(f"{name:<28} {regimes.load_regime(name).about}")
        print("rules: " + ", ".join(FACTORIES))
        print(f"NAME:FIELD=NUMBER,... takes {_fields(Setup(profile=load_profile('laptop-toy')))}")
        return 0
    if args.accept:
        return accept(args.profile or "qwen3-32b-2xh100", args.seeds)
    try:
        results = run_all(args)
    except (FileNotFoundError, ValueError) as exc:
        print(exc)
        return 2
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    return 0


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="warmroute loadtest simulate", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(list(argv)))


def run_all(args: argparse.Namespace) -> list[Result]:
    """Every scenario under every rule and seed, printed as it comes."""
    chosen = regimes.names() if args.scenario == ["all"] else args.scenario or ["ladder"]
    rules = list(FACTORIES) if args.policy == ["all"] else args.policy or ["prefix"]
    seeds = range(1, args.seeds + 1)
    results: list[Result] = []
    with _runner(args.jobs) as submit:
        for name in chosen:
            scenario = regimes.load_regime(name)
            if args.pods:
                scenario = msgspec.structs.replace(scenario, pods=args.pods)
            if args.overload_prefill_s is not None:
                world = msgspec.structs.replace(scenario.world, overload_prefill_s=args.overload_prefill_s)
                scenario = msgspec.structs.replace(scenario, world=world)
            profile = regimes.profile_of(scenario, args.profile)
            print(f"\n{name}: {scenario.about}. {_described(profile)}, {scenario.pods} pods, seeds 1..{args.seeds}")
            wait = {
                (rule, seed): submit(run_one, scenario, profile, rule, seed, explain=args.explain, traces=args.traces)
                for rule in rules
                for seed in seeds
            }
            printed: dict[str, list[Row]] = {}
            for rule in rules:
                done = [wait[rule, seed]() for seed in seeds]
                results += [result for result, _ in done]
                for result, _ in done:
                    _print_explained(result)
                printed[rule] = _pooled([outcome for _, outcome in done], scenario.pods)
            print(table(printed), flush=True)
    if args.ratios:
        print("\n" + ratio_table([(r.scenario, r.policy, r.rows[-1]) for r in results]))
    return results


class _Submit(Protocol):
    def __call__(self, f: Callable[..., _T], /, *args: Any, **kw: Any) -> Callable[[], _T]: ...


@contextlib.contextmanager
def _runner(jobs: int) -> Iterator[_Submit]:
    """Call now, or in other processes: what it gives is asked for the result."""

    def now(f: Callable[..., _T], /, *args: Any, **kw: Any) -> Callable[[], _T]:
        result = f(*args, **kw)
        return lambda: result

    if jobs < 2:
        yield now
        return
    with ProcessPoolExecutor(jobs) as pool:

        def later(f: Callable[..., _T], /, *args: Any, **kw: Any) -> Callable[[], _T]:
            return pool.submit(f, *args, **kw).result

        yield later


def run_one(
    scenario: regimes.Regime,
    profile: Profile,
    rule: str,
    seed: int,
    *,
    explain: int = 0,
    traces: Path = regimes.TRACES_DIR,
    share: float = 1.0,
) -> tuple[Result, Outcome]:
    """One run over the first `share` of the scenario. Raises ValueError for an unknown rule."""
    name, world, costs = _arm(rule, regimes.setup(scenario, profile))
    sessions = workload.shortened(regimes.build(scenario, profile, seed, traces), share)
    begun = time.process_time()
    outcome = Simulation(world, sessions, FACTORIES[name](), seed, costs=costs, explain=explain).run()
    result = Result(
        scenario.name,
        rule,
        profile.name,
        profile.calibrated,
        seed,
        time.process_time() - begun,
        rows(outcome, scenario.pods),
        dict(outcome.decisions),
        outcome.explained,
    )
    return result, outcome


def _arm(rule: str, world: Setup) -> tuple[str, Setup, Costs]:
    """NAME[:FIELD=NUMBER,...][+oracle] -> the rule's name, its world, its costs. Raises ValueError."""
    name, _, fields = rule.removesuffix(ORACLE_SUFFIX).partition(":")
    if name not in FACTORIES:
        raise ValueError(f"no rule {name!r}; known: {', '.join(FACTORIES)}")
    costs = Costs()
    for field, _, value in (f.partition("=") for f in fields.split(",") if f):
        if field in Costs.__struct_fields__:
            costs = msgspec.structs.replace(costs, **{field: float(value)})
        elif isinstance(now := getattr(world, field, None), int | float):
            world = msgspec.structs.replace(world, **{field: type(now)(float(value))})
        else:
            raise ValueError(f"rule {rule!r}: no field {field!r}; NAME:FIELD=NUMBER takes {_fields(world)}")
    if rule.endswith(ORACLE_SUFFIX):
        world = msgspec.structs.replace(world, knowledge="oracle")
    if name.startswith("precise"):
        world = msgspec.structs.replace(world, scrape_interval_s=min(world.scrape_interval_s, PUBLISHED_SCRAPE_S))
    return name, world, costs


def _fields(world: Setup) -> str:
    knowledge = [n for n in Setup.__struct_fields__ if isinstance(getattr(world, n), int | float)]
    return f"the costs {', '.join(Costs.__struct_fields__)} and, of the world, {', '.join(knowledge)}"


def accept(profile_name: str, seeds: int) -> int:
    """The published ladder at full length, precise (3:2:2) and cache-blind (random), against the tables."""
    profile = load_profile(profile_name)
    print(f"{_described(profile)}; judged: July 2026 tables, p99 of spring 2026; September 2025 beside it")
    missed = 0
    for seed in range(1, seeds + 1):
        arms: dict[str, list[Row]] = {}
        for rule in ("precise-3-2-2", "random"):
            world = Setup(profile=profile, scrape_interval_s=PUBLISHED_SCRAPE_S)
            arms[rule] = rows(Simulation(world, workload.ladder(seed), FACTORIES[rule](), seed).run(), world.pods)
        verdicts = acceptance(arms["precise-3-2-2"], arms["random"])
        missed += sum(not v.within for v in verdicts)
        print(f"\nseed {seed}")
        print(acceptance_table(verdicts))
        print(table(arms))
        for rule, arm in arms.items():
            tokens, p90 = ladder_figures(arm)
            print(f"{rule}: mean of stages {tokens:.0f} output tok/s, request-weighted TTFT p90 {p90:.3f} s")
    return 1 if missed else 0


def _pooled(outcomes: Sequence[Outcome], pods: int) -> list[Row]:
    """Rows over all seeds: stage by stage, then all."""
    if len(outcomes) == 1:
        return rows(outcomes[0], pods)
    staged = list(zip(*([s for s in o.stages if s.measured] for o in outcomes), strict=True))
    out = [row(stages[0].name, stages, pods) for stages in staged]
    return [*out, row("all", [s for stages in staged for s in stages], pods)] if len(out) > 1 else out


def _described(profile: Profile) -> str:
    state = "calibrated" if profile.calibrated else "UNCALIBRATED" if profile.judged else "a toy, not judged"
    return f"Emulated {profile.name} ({state})"


def _print_explained(result: Result) -> None:
    for decision in result.explained:
        print(msgspec.json.format(msgspec.json.encode(decision), indent=1).decode())
