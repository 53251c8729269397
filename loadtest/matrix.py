"""`warmroute loadtest matrix`: every regime under every rule on every judged profile: does `prefix` lose anywhere?

Each run is kept in a file of its own and not made again, so that a change of one rule costs that rule's runs only
(`--again RULE`). May import: the standard library, msgspec, loadtest.*.
"""

import argparse
import itertools
import time
import tomllib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from loadtest import matrix_report as report
from loadtest import sim_scenario as regimes
from loadtest.matrix_report import Cell, Run
from loadtest.sim_report import ORACLE_SUFFIX
from loadtest.sim_scenario import TRACES_DIR
from loadtest.sim_world import Outcome
from loadtest.simulate import Result, run_one

PLAN = Path(__file__).parent / "matrix.toml"


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is judged. `share` shortens a regime on a profile to about a second of CPU."""

    profiles: list[str]
    rules: list[str]
    with_truth: list[str]  # the rules of which the oracle takes the best; the others look at nothing that truth changes
    regimes: list[str]
    block_size_tokens: int  # of every profile here: coarser blocks cost less CPU, and no rule gains by them
    share: dict[str, dict[str, float]] = {}  # profile -> regime -> share of its time

    def cells(
        self, *, profiles: Sequence[str], scenarios: Sequence[str], rules: Sequence[str], seeds: int
    ) -> list[Cell]:
        """Every run that is wanted: what is left out of an argument means all of it."""
        wanted = rules or [*self.rules, *(rule + ORACLE_SUFFIX for rule in self.with_truth)]
        rows = itertools.product(range(1, seeds + 1), profiles or self.profiles, scenarios or self.regimes, wanted)
        return [Cell(profile, scenario, rule, seed) for seed, profile, scenario, rule in rows]

    def make(self, cell: Cell, traces: Path = TRACES_DIR) -> tuple[Result, Outcome]:
        """One run, shortened, on coarse blocks."""
        scenario = regimes.load_regime(cell.scenario)
        profile = regimes.profile_of(scenario, cell.profile)
        blocks = profile.kv_cache_tokens // self.block_size_tokens
        profile = msgspec.structs.replace(profile, block_size_tokens=self.block_size_tokens, num_blocks=blocks)
        share = self.share.get(cell.profile, {}).get(cell.scenario, 1.0)
        return run_one(scenario, profile, cell.rule, cell.seed, traces=traces, share=share)


def load_plan() -> Plan:
    """The plan that comes with the package."""
    return msgspec.convert(tomllib.loads(PLAN.read_text()), Plan)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--dir", type=Path, default=Path("reports/matrix"), metavar="DIR", help="where runs are kept")
    parser.add_argument(
        "--profile", action="append", default=[], metavar="NAME", help="repeatable (default: all judged)"
    )
    parser.add_argument(
        "--scenario", action="append", default=[], metavar="NAME", help="repeatable (default: the plan's)"
    )
    parser.add_argument("--policy", action="append", default=[], metavar="RULE", help="repeatable, as for simulate")
    parser.add_argument("--again", action="append", default=[], metavar="RULE", help="forget this rule's runs first")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 1..N (default 3)")
    parser.add_argument(
        "--judge", default="prefix", metavar="RULE", help="the rule that must not lose (default prefix)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("--traces", type=Path, default=TRACES_DIR, metavar="DIR", help="where traces lie")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="every figure of every rule, regime and profile")


def run(args: argparse.Namespace) -> int:
    """Make what is missing, then judge. Returns the exit status: 1 when the judged rule loses, 2 for a usage error."""
    plan = load_plan()
    cells = plan.cells(profiles=args.profile, scenarios=args.scenario, rules=args.policy, seeds=args.seeds)
    args.dir.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        if cell.rule.removesuffix(ORACLE_SUFFIX) in args.again:
            _path(args.dir, cell).unlink(missing_ok=True)
    missing = [cell for cell in cells if not _path(args.dir, cell).is_file()]
    print(f"{len(cells)} runs, {len(missing)} of them to be made", flush=True)
    try:
        _make(missing, plan, args)
    except (FileNotFoundError, ValueError) as exc:
        print(exc)
        return 2
    runs = list(_read(args.dir, cells))
    if args.csv:
        args.csv.write_text(report.csv_table(runs))
    judged = report.judge(runs, args.judge)
    print(report.ratio_tables(runs))
    print("\n" + report.verdict_table(judged))
    return 1 if any(v.lost for v in judged) else 0


def _make(missing: Sequence[Cell], plan: Plan, args: argparse.Namespace) -> None:
    begun = time.monotonic()
    with ProcessPoolExecutor(args.jobs) as pool:
        paths = [_path(args.dir, c) for c in missing]
        same = (itertools.repeat(plan), itertools.repeat(args.traces))
        for done, cell in enumerate(pool.map(_make_one, missing, paths, *same), 1):
            if done % 100 == 0 or done == len(missing):
                print(f"{done}/{len(missing)} after {time.monotonic() - begun:.0f} s: {cell}", flush=True)


def _make_one(cell: Cell, path: Path, plan: Plan, traces: Path) -> str:
    result, outcome = plan.make(cell, traces)
    ttft_s = array("f", measured_ttft_s(outcome)).tobytes()
    made = Run(cell=cell, cpu_s=result.cpu_s, row=result.rows[-1], ttft_s=ttft_s)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.msgpack.encode(made))
    part.rename(path)
    return str(path.stem)


def measured_ttft_s(outcome: Outcome) -> list[float]:
    """Every measured request's TTFT in the order of sending; infinite for one that got no first token."""
    samples = (s for stage in outcome.stages if stage.measured for s in stage.samples)
    return [s.first_s - s.sent_s if s.first_s >= 0 else float("inf") for s in samples]


def _path(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.profile}~{cell.scenario}~{cell.rule}~{cell.seed}.msgpack"


def _read(folder: Path, cells: Iterable[Cell]) -> Iterator[Run]:
    decoder = msgspec.msgpack.Decoder(Run)
    return (decoder.decode(_path(folder, cell).read_bytes()) for cell in cells)
