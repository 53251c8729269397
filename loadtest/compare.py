"""`warmroute loadtest run` and `compare`: from flags to a plan, from the run to reports.

May import: the standard library, rich, the rooms of loadtest but the fleet.
"""

import argparse
import json
import os
import shlex
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from loadtest import loop, report_html, report_text
from loadtest.crowds import ClientDied, Recipe
from loadtest.experiment import ScenarioError, load_experiment
from loadtest.live import Display
from loadtest.patience import all_pods_ready, patiently
from loadtest.report import doubts
from loadtest.run import Arm, Plan, PlanError, check_arms, execute, first_model
from loadtest.samples import FORMAT, Run


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `run`: one arm."""
    add = parser.add_argument
    add("--url", required=True, help="an OpenAI-compatible endpoint: the router or a pod, without /v1")
    add("--policy", help="the policy to ask a router for (x-warmroute-policy)")
    _add_common(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `compare`: several arms on the same pods."""
    add = parser.add_argument
    add("--url", help="the router, without /v1; needs --allow-policy-header there")
    by_header = "arms by policy header, the first is the base (random,prefix)"
    add("--arms", "--policies", dest="policies", default="random,prefix", metavar="POLICY[,POLICY...]", help=by_header)
    add(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=URL[,URL...]",
        help="arms by URL instead; several URLs in turn",
    )
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="model name (the first base model that the URL lists)")
    add("--scenario", default="quick", help="name in loadtest/scenarios or path of a .toml file (quick)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of the scenario; repeatable")
    add(
        "--pod",
        action="append",
        default=[],
        metavar="URL",
        help="a pod, for its counters and an empty cache; repeatable",
    )
    add("--tokenizer", type=Path, help="model directory, for prompts of exact token length")
    add("--repeats", type=int, default=1, help="how often each arm runs (1)")
    add("--seed", type=int, default=1, help="seed of arrivals and prompts (1)")
    add("--speed", type=float, default=1.0, help="the emulated pods' --speed; 1 for real ones (1)")
    add("--client-processes", type=int, default=1, help="client processes to spread the load over (1)")
    add("--header", action="append", default=[], metavar="NAME:VALUE", help="sent with every request; repeatable")
    keys = os.environ.get("WARMROUTE_API_KEY", "").split()
    add("--api-key", default=keys[0] if keys else None, help="sent as Authorization: Bearer (WARMROUTE_API_KEY)")
    add("--extra-body", default="{}", help='JSON merged into every body; null takes a field away: {"ignore_eos": null}')
    add("--wait-s", type=float, default=0.0, help="wait so long at most for all pods and the policy header (0)")
    add("--timeout-s", type=float, default=600.0, help="of one request (600)")
    add("--drain-limit-s", type=float, default=600.0, help="of a stage after its last request was sent (600)")
    add("--max-late-ms", type=float, default=50.0, help="a client later than this at p99 makes the run invalid (50)")
    add("--out", type=Path, help="write OUT.json, OUT.csv and OUT.html")
    add("--quiet", action="store_true", help="no progress")


def run_one(args: argparse.Namespace) -> int:
    """`warmroute loadtest run`."""
    return _carry_out(args, [Arm(args.policy or "run", (args.url,), args.policy)])


def run(args: argparse.Namespace) -> int:
    """`warmroute loadtest compare`."""
    try:
        arms = arms_from(args.url, args.policies, args.arm)
    except PlanError as exc:
        return _refuse(exc)
    return _carry_out(args, arms)


def arms_from(url: str | None, policies: str, by_url: Sequence[str]) -> list[Arm]:
    """The arms that the flags name. Raises PlanError."""
    if by_url:
        arms = []
        for text in by_url:
            name, equals, urls = text.partition("=")
            if not equals or not name or not urls.startswith("http"):
                raise PlanError(f"--arm {text!r} should be NAME=URL[,URL...]")
            arms.append(Arm(name, tuple(urls.split(","))))
        return arms
    if not url:
        raise PlanError("give the router's --url, or arms by URL with --arm NAME=URL")
    return [Arm(p, (url,), p) for p in policies.split(",") if p]


def base_url(url: str) -> str:
    """Without the /v1 that clients are given. Raises PlanError."""
    if not url.startswith(("http://", "https://")):
        raise PlanError(f"URL {url!r} must be http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def wide_console() -> Console:
    """A terminal as wide as it is; a file or pipe wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=150)


def _carry_out(args: argparse.Namespace, arms: Sequence[Arm]) -> int:
    console = wide_console()
    try:
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)  # an hour's run must not end on this
        plan = loop.run(_plan_when_ready(args, arms))
        with Display(console, quiet=args.quiet) as display:
            done = loop.run(execute(plan, display.show))
    except (PlanError, ScenarioError, ClientDied, OSError) as exc:
        return _refuse(exc)
    except KeyboardInterrupt:
        return 130
    present(done, console, args.out)
    return 1 if doubts(done)[0] else 0


async def _plan_when_ready(args: argparse.Namespace, arms: Sequence[Arm]) -> Plan:
    """The plan, after --wait-s at most. Raises PlanError."""

    recipe = _recipe(args)
    recipe.workload()  # what cannot be built must not be found out after the wait

    async def ready() -> Plan:
        plan = await _plan(args, arms, recipe)
        if args.wait_s > 0:
            await all_pods_ready([url for arm in plan.arms for url in arm.urls], plan.headers)
            await check_arms(plan)
        return plan

    def tell(text: str) -> None:
        if not args.quiet:
            print(f"loadtest: {text}", file=sys.stderr, flush=True)

    return await patiently(ready, wait_s=args.wait_s, tell=tell)


def _recipe(args: argparse.Namespace) -> Recipe:
    if args.repeats < 1 or args.client_processes < 1 or args.speed <= 0:
        raise PlanError("--repeats and --client-processes must be at least 1, --speed above 0")
    return Recipe(
        experiment=load_experiment(args.scenario, dict(map(_setting, args.set))),
        seed=args.seed,
        speed=args.speed,
        tokenizer=args.tokenizer,
        client_processes=args.client_processes,
    )


async def _plan(args: argparse.Namespace, arms: Sequence[Arm], recipe: Recipe) -> Plan:
    arms = [msgspec.structs.replace(arm, urls=tuple(map(base_url, arm.urls))) for arm in arms]
    headers = dict(_header(h) for h in args.header)
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    try:
        extra = json.loads(args.extra_body)
        if not isinstance(extra, dict):
            raise ValueError("not an object")
    except ValueError as exc:
        raise PlanError(f"--extra-body must be a JSON object: {exc}") from exc
    return Plan(
        arms=arms,
        recipe=recipe,
        model=args.model or await first_model(arms[0].urls[0], headers),
        pods=args.pod,
        repeats=args.repeats,
        headers=headers,
        extra_body=extra,
        timeout_s=args.timeout_s,
        drain_limit_s=args.drain_limit_s,
        late_limit_s=args.max_late_ms / 1000,
        command=command_line(sys.argv),
    )


def command_line(argv: Sequence[str]) -> str:
    """The command as it goes into the report, without keys."""
    words = list(argv[1:])
    for n, word in enumerate(words[:-1]):
        if word in ("--api-key", "--header"):
            words[n + 1] = "***"
    words = [w.split("=")[0] + "=***" if w.startswith(("--api-key=", "--header=")) else w for w in words]
    front = ["warmroute"] if words[:1] in (["loadtest"], ["demo"]) else ["warmroute", "loadtest"]
    return shlex.join([*front, *words])


def present(done: Run, console: Console, out: Path | None) -> None:
    """The result on the console, and in files where `out` is given."""
    console.print(report_text.render(done))
    for path in save(done, out) if out is not None else ():
        console.print(f"wrote {path}", highlight=False, markup=False)


def save(done: Run, out: Path) -> list[Path]:
    """OUT.json, OUT.csv, OUT.html. Returns their paths."""
    stem = out.with_suffix("") if out.suffix in (".json", ".csv", ".html") else out
    stem.parent.mkdir(parents=True, exist_ok=True)
    contents = {
        ".json": msgspec.json.encode(done).decode(),
        ".csv": report_text.to_csv(done),
        ".html": report_html.render(done),
    }
    paths = [stem.with_name(stem.name + suffix) for suffix in contents]
    for path, text in zip(paths, contents.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `report`."""
    parser.add_argument("saved", type=Path, help="a saved OUT.json")
    parser.add_argument("--out", type=Path, help="write the reports here (beside the saved file)")


def run_report(args: argparse.Namespace) -> int:
    """`warmroute loadtest report`: everything again from a saved JSON."""
    try:
        done = load(args.saved)
    except (OSError, msgspec.DecodeError, PlanError) as exc:
        return _refuse(exc)
    present(done, wide_console(), args.out or args.saved)
    return 0


def load(path: Path) -> Run:
    """A saved run. Raises OSError, msgspec.DecodeError, PlanError for another format."""
    raw = path.read_bytes()
    found = msgspec.json.decode(raw)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise PlanError(f"{path} is not a saved run of this version (format {FORMAT})")
    return msgspec.json.decode(raw, type=Run)


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise PlanError(f"--set {text!r} should be KEY=VALUE")
    try:
        return key, tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key, value


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        raise PlanError(f"--header {text!r} should be NAME:VALUE")
    return name.strip(), value.strip()


def _refuse(exc: Exception) -> int:
    print(f"loadtest: {exc}", file=sys.stderr)
    return 2
