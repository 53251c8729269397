"""The front door: settings in, app.run() or indexer.app.run() out.

May import: anything, late, so that `warmroute serve` pays only for what it uses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version

from router.settings import IndexSettings, ServeSettings, SettingsError, add_flags, read

PASSED_ON = {
    "loadtest": "drive an OpenAI endpoint, compare policies, simulate, or start emulated pods",
    "demo": "emulated pods, a router and a comparison with random routing, on this machine",
}
TOOLS = {
    "explain": "say where a running router would send a request, and why",
    "diff": "find the first token at which two requests part, and the likely cause",
    "doctor": "check one live pod: events, block size, tokens, predicted against delivered hits",
}


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; also what the chart's tests check rendered flags against."""
    parser = argparse.ArgumentParser(prog="warmroute", description="Prefix-cache-aware router for vLLM")
    parser.add_argument("--version", action="version", version=f"warmroute {version('warmroute')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # No abbreviations: --pods is not --pods-file.
    serve = commands.add_parser(
        "serve", help="route requests to pods behind one OpenAI-compatible URL", allow_abbrev=False
    )
    add_flags(serve, ServeSettings)
    index = commands.add_parser(
        "index", help="keep the shared index in Redis true from the pods' KV events", allow_abbrev=False
    )
    add_flags(index, IndexSettings)
    for name, text in {**PASSED_ON, **TOOLS}.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in PASSED_ON:
        from loadtest.__main__ import main as loadtest_main

        return loadtest_main(args[1:] if args[0] == "loadtest" else args)
    if args and args[0] in TOOLS:
        return _tool(args[0], args[1:])
    parser = build_parser()
    if not args:
        parser.print_help(sys.stderr)
        return 2
    known, unknown = parser.parse_known_args(args)
    flags = vars(known)
    if unknown:
        return _refuse_unknown(flags, unknown[0])
    try:
        if flags["command"] == "serve":
            from router.app import serve

            return serve(read(ServeSettings, flags))
        from indexer.serve import serve_index

        return serve_index(read(IndexSettings, flags))
    except SettingsError as exc:
        sys.stderr.write(f"warmroute {flags['command']}: {exc}\n")
        return 2


def _refuse_unknown(flags: dict[str, object], given: str) -> int:
    command, flag = flags["command"], given.partition("=")[0]
    close = get_close_matches(flag, ["--" + name.replace("_", "-") for name in flags if name != "command"], n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    sys.stderr.write(f"warmroute {command}: unknown argument {flag}; {meant}`warmroute {command} --help` lists all\n")
    return 2


def _tool(name: str, argv: list[str]) -> int:
    if name == "diff":
        from router import diff

        return diff.run(argv)
    if name == "doctor":
        from router import doctor

        return doctor.run(argv)
    from router import explain

    return explain.run(argv)
