"""The load test's command line: one subcommand per room. Rooms are imported when they are asked for.

May import: the standard library, every room of loadtest.
"""

import argparse
import importlib
from collections.abc import Sequence

COMMANDS = {
    "run": ("loadtest.compare", "add_run_arguments", "run_one", "load one OpenAI-compatible endpoint and measure it"),
    "compare": ("loadtest.compare", "add_arguments", "run", "the same load under several policies, on the same pods"),
    "report": ("loadtest.compare", "add_report_arguments", "run_report", "make the reports again from a saved JSON"),
    "fleet": (
        "loadtest.fleet.launch",
        "add_arguments",
        "run",
        "start emulated pods (completions and chats of text, n = 1; no responses, messages, embeddings, LoRA loads)",
    ),
    "simulate": ("loadtest.simulate", "add_arguments", "run", "a fleet in virtual time, no sockets"),
    "matrix": (
        "loadtest.matrix",
        "add_arguments",
        "run",
        "every regime under every rule; does the default lose anywhere?",
    ),
    "calibrate": ("loadtest.calibrate", "add_arguments", "run", "measure a pod's constants for a profile"),
    "demo": ("loadtest.demo", "add_arguments", "run", "random against prefix routing on emulated pods"),
}
"""Subcommand -> module, its function that adds flags, its function that runs, help."""


def main(argv: Sequence[str]) -> int:
    """Run one subcommand. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="warmroute loadtest", description="Load test and emulated fleet")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, _, _, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    name = parser.parse_args(list(argv[:1])).command
    module_name, add, run, text = COMMANDS[name]
    module = importlib.import_module(module_name)
    prog = "warmroute demo" if name == "demo" else f"warmroute loadtest {name}"
    sub = argparse.ArgumentParser(prog=prog, description=text)
    getattr(module, add)(sub)
    return int(getattr(module, run)(sub.parse_args(list(argv[1:]))))
