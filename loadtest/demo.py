"""`warmroute demo`: emulated pods, the real router before them, random against prefix routing. Nothing to install.

May import: the standard library, rich, the rooms of loadtest, router.policy.
"""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from loadtest import loop
from loadtest.compare import present, wide_console
from loadtest.crowds import Recipe
from loadtest.experiment import Experiment, ScenarioError, load_experiment
from loadtest.fleet.text import TINY_MODEL
from loadtest.live import Display
from loadtest.profile import load_profile
from loadtest.report import summaries
from loadtest.rig import MODEL, rig
from loadtest.run import Arm, Plan, PlanError, execute
from loadtest.samples import Run
from router.policy.baselines import POLICIES

PROFILE = "laptop-toy"
KV_BLOCKS = 1500  # of 16 tokens: 8 of the demo's 20 prefixes
LATE_LIMIT_MS = 250.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `warmroute demo`."""
    add = parser.add_argument
    add("--pods", type=int, default=4, help="emulated pods (4)")
    add("--policies", default="random,prefix", help="what to compare, the first is the base (random,prefix)")
    add("--rate", type=float, help="requests/s instead of the scenario's")
    add("--seconds", type=float, help="seconds an arm, warm-up included, instead of the scenario's")
    add("--seed", type=int, default=1, help="seed of arrivals and prompts (1)")
    add("--out", type=Path, help="write OUT.json, OUT.csv and OUT.html")
    add("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """The whole demonstration. Returns the exit status."""
    console = wide_console()
    changes = {k: v for k, v in (("rate", args.rate), ("seconds", args.seconds)) if v is not None}
    try:
        if args.pods < 1:
            raise PlanError("--pods must be at least 1; two or more, to have something to choose")
        if unknown := [p for p in args.policies.split(",") if p not in POLICIES]:
            raise PlanError(f"--policies: there is no {unknown[0]!r}; known: {', '.join(POLICIES)}")
        experiment = load_experiment("demo", changes)
        experiment.build(args.seed)  # what cannot be built is told before anything starts
        console.print(_what(experiment, args.pods), highlight=False, markup=False)
        done = loop.run(_demo(args, experiment, console))
    except (PlanError, ScenarioError) as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    present(done, console, args.out)
    return 0 if all(not a.pooled.failed and a.pooled.requests for a in summaries(done)) else 1


async def _demo(args: argparse.Namespace, experiment: Experiment, console: Console) -> Run:
    began_s = time.monotonic()
    flags = ["--profile", PROFILE, "--kv-blocks", str(KV_BLOCKS), "--stream-interval", "4"]
    async with rig(args.pods, flags) as built:
        plan = Plan(
            arms=[Arm(p, (built.url,), p) for p in args.policies.split(",") if p],
            recipe=Recipe(experiment=experiment, seed=args.seed, speed=1.0, tokenizer=TINY_MODEL),
            model=MODEL,
            pods=built.pods,
            late_limit_s=LATE_LIMIT_MS / 1000,
            command="warmroute demo",
        )
        with Display(console, quiet=args.quiet) as display:
            done = await execute(plan, display.show)
    console.print(f"{time.monotonic() - began_s:.0f} s in all\n", highlight=False)
    return done


def _what(experiment: Experiment, pods: int) -> str:
    """What is about to be shown, and when it would not show."""
    w = experiment.workload[0]
    prefixes = w["groups"] * w["prefix_tokens"]
    pod = KV_BLOCKS * load_profile(PROFILE).block_size_tokens
    enough = -(-prefixes // pod)
    if pods >= enough:
        fits = f"and fit the fleet's ({pods * pod:,}):\nthat is where routing by prefix pays."
    else:
        fits = f"and the fleet's ({pods * pod:,}) too:\nit can keep a part of them. {enough} pods or more keep all."
    return (
        f"{pods} EMULATED pods (no GPU, no model) behind a real warmroute. {experiment.about}.\n"
        f"The prefixes together ({prefixes:,} tokens) overflow one pod's KV cache ({pod:,}) {fits} "
        "If they fitted one pod, or were all different, there would be nothing to win."
    )
