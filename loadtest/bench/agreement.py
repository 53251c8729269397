"""Whether emulated pods in real time, behind the real router, show what the simulation says:
`python -m loadtest.bench.agreement`.

Regimes cut to two pods (a quarter of the rates and prefixes, one minute; or the ladder's own cut), each sent over HTTP
and each simulated: the same sessions, rule, profile and seed. Run it on a quiet machine: the pods, the router and the
client feel whatever else runs there, and the simulation does not.
May import: the standard library, rich, the rooms of loadtest.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from loadtest import loop
from loadtest.compare import save, wide_console
from loadtest.crowds import Recipe
from loadtest.experiment import Experiment, load_experiment
from loadtest.fleet.text import TINY_MODEL
from loadtest.live import Display
from loadtest.profile import load_profile
from loadtest.report import Figures, doubts, summaries
from loadtest.rig import MODEL, Rig, rig
from loadtest.run import Arm, Plan, PlanError, execute
from loadtest.samples import percentile
from loadtest.sim_policies import FACTORIES
from loadtest.sim_world import Setup, Simulation

PODS = 2
PROFILE = "qwen3-32b-2xh100"
WITHIN_RATIO = 0.25
REGIMES: Mapping[str, Mapping[str, Any]] = {
    "hot-prefix": {"rate": 15.0, "groups": 38, "seconds": 60.0},
    "zipf": {"rate": 6.0, "groups": 125, "seconds": 60.0},
    "chat-60": {"rate": 3.0, "seconds": 60.0},
    "bursts-32": {"siblings": 8, "seconds": 60.0},
    "ladder-cut": {},
}
"""Name -> what of the regime's workload is another for two pods."""
SHORT = [name for name in REGIMES if name != "ladder-cut"]


class Compared(msgspec.Struct, frozen=True):
    """One regime under one rule, both ways. Times in seconds of the pods' clock."""

    regime: str
    policy: str
    simulated_ttft_p90_s: float
    real: Figures
    pods_late_s: float  # how far the pods fell behind their own clock

    @property
    def ratio(self) -> float:
        return (self.real.ttft_p90 or 0.0) / self.simulated_ttft_p90_s

    @property
    def agrees(self) -> bool:
        return abs(self.ratio - 1) <= WITHIN_RATIO and not self.real.failed

    def line(self) -> str:
        f, real_ms = self.real, (self.real.ttft_p90 or 0.0) * 1000
        return (
            f"{self.regime:<12} {self.policy:<12} {f.requests:>5} {f.failed:>4} "
            f"{self.simulated_ttft_p90_s * 1000:>9.0f} {real_ms:>9.0f} {self.ratio:>6.2f}  "
            f"{'yes' if self.agrees else 'NO':<3} {(f.late_p99 or 0.0) * 1000:>8.0f} {self.pods_late_s * 1000:>8.0f}"
        )


HEAD = (
    f"{'regime':<12} {'rule':<12} {'req':>5} {'fail':>4} {'sim p90':>9} {'real p90':>9} {'ratio':>6}  "
    f"{'met':<3} {'client':>8} {'pods':>8} late, ms"
)


def two_pods(regime: str) -> Experiment:
    """The regime as two pods get it. Completions, because a simulated prompt has no template around it."""
    return load_experiment(regime, {**REGIMES[regime], "api": "completions"})


def simulated_p90_s(experiment: Experiment, policy: str, seed: int) -> float:
    """TTFT p90 of the same sessions in virtual time."""
    world = Setup(profile=load_profile(PROFILE), pods=PODS)
    outcome = Simulation(world, experiment.build(seed), FACTORIES[policy](), seed).run()
    samples = [s for stage in outcome.stages if stage.measured for s in stage.samples]
    ttft = [s.first_s - s.sent_s for s in samples if s.first_s >= 0]
    return percentile(ttft, 0.9) or 0.0


async def measure(args: argparse.Namespace, built: Rig, regime: str) -> list[Compared]:
    """One regime under every rule, over HTTP and simulated."""
    experiment = two_pods(regime)
    plan = Plan(
        arms=[Arm(p, (built.url,), p) for p in args.policy or ["prefix"]],
        recipe=Recipe(experiment=experiment, seed=args.seed, speed=args.speed, tokenizer=TINY_MODEL),
        model=MODEL,
        pods=built.pods,
        command=f"python -m loadtest.bench.agreement --regime {regime} --seed {args.seed} --speed {args.speed:g}",
    )
    with Display(wide_console(), quiet=args.quiet) as display:
        done = await execute(plan, display.show)
    if args.out is not None:
        save(done, args.out / regime)
    for text in [t for texts in doubts(done) for t in texts]:
        print(f"{regime}: {text}", file=sys.stderr)
    late_s = {r.arm: max(s.fleet_late_s or 0.0 for s in r.stages) for r in done.runs}
    return [
        Compared(regime, s.arm, simulated_p90_s(experiment, s.arm, args.seed), s.pooled, late_s[s.arm])
        for s in summaries(done)
    ]


async def run(args: argparse.Namespace) -> int:
    """Print a line a regime and rule. Returns 1 when one is not within the bound."""
    flags = ["--profile", PROFILE, "--stream-interval", "8", "--speed", str(args.speed)]
    agree = True
    async with rig(PODS, flags) as built:
        print(HEAD)
        for regime in args.regime or SHORT:
            for c in await measure(args, built, regime):
                print(c.line(), flush=True)
                agree = agree and c.agrees
    print(f"emulated; within {WITHIN_RATIO:.0%} of the simulation: {'all' if agree else 'NOT all'}")
    return 0 if agree else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", action="append", choices=tuple(REGIMES), help="repeatable (the short ones)")
    parser.add_argument("--policy", action="append", choices=tuple(FACTORIES), help="repeatable (prefix)")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and prompts (1)")
    parser.add_argument("--speed", type=float, default=1.0, help="below 1: slower than real time (1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the load test's own reports there")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    try:
        return loop.run(run(parser.parse_args()))
    except PlanError as exc:
        print(exc, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
