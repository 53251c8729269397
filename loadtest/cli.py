"""The load test's command line: one subcommand per room. Rooms are imported when they are asked for.

May import: the standard library, every room of loadtest.
"""

import argparse
import importlib
from collections.abc import Sequence

COMMANDS = {
    "fleet": ("loadtest.fleet.launch", "start emulated vLLM pods"),
    "simulate": ("loadtest.simulate", "scenarios under routing rules in virtual time"),
    "calibrate": ("loadtest.calibrate", "measure a pod and write its profile"),
}
"""Subcommand -> module with `add_arguments(parser)` and `run(args) -> int`, and its help."""


def main(argv: Sequence[str]) -> int:
    """Run one subcommand. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="warmroute loadtest", description="Load test and emulated fleet")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    known, rest = parser.parse_known_args(list(argv[:1]))
    module = importlib.import_module(COMMANDS[known.command][0])
    sub = argparse.ArgumentParser(
        prog=f"warmroute {'' if known.command == 'demo' else 'loadtest '}{known.command}",
        description=COMMANDS[known.command][1],
    )
    module.add_arguments(sub)
    return int(module.run(sub.parse_args(list(argv[1:]) + rest)))
