"""Write docs/configuration.md, docs/metrics.md and docs/commands.md from the code. `make docs`; a test compares."""

import argparse
import importlib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from pydantic.fields import FieldInfo

from loadtest.cli import COMMANDS
from router import diff, doctor, explain
from router.cli import PASSED_ON, TOOLS
from router.ops import Metrics, PodRows
from router.settings import CommonSettings, IndexSettings, ServeSettings, choices

DOCS = Path(__file__).parent


def configuration() -> str:
    lines = [
        "# Configuration",
        "",
        "Generated from `router/settings.py` by `make docs`. Flags win over environment, environment over the YAML",
        "file (`--config FILE`, names with underscores). Environment names are `WARMROUTE_` + the name in capitals;",
        "a repeatable setting takes several values separated by white space there. The file looks so:",
        "",
        "    port: 8080",
        "    decision_headers: true",
        "    pod:",
        "      - http://10.0.0.1:8000,events=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:5657",
        "      - http://10.0.0.2:8000,events=tcp://10.0.0.2:5557,replay=tcp://10.0.0.2:5657",
    ]
    common = set(CommonSettings.model_fields)
    lines += _table("`warmroute serve` and `warmroute index`", CommonSettings, common)
    lines += _table("`warmroute serve`", ServeSettings, set(ServeSettings.model_fields) - common)
    lines += _table("`warmroute index`", IndexSettings, set(IndexSettings.model_fields) - common)
    return "\n".join(lines) + "\n"


def _table(title: str, model: type[CommonSettings], names: set[str]) -> list[str]:
    lines = ["", f"## {title}", "", "| flag | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if name not in names:
            continue
        default = field.get_default(call_default_factory=True)
        shown = _shown(default)
        flag = "--" + name.replace("_", "-")
        if "list" in str(typing.get_origin(field.annotation) or field.annotation):
            flag += " (repeatable)"
        lines.append(
            f"| `{flag}` | {shown} | {field.description}{_choices(field)} |".replace("` (repeatable)", " (repeatable)`")
        )
    return lines


def _choices(field: FieldInfo) -> str:
    return "".join(f"{', ' if at else '; one of '}`{c}`" for at, c in enumerate(choices(field)))


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None:
        return "unset"
    return "none" if default in ([], "") else f"`{default}`"


def metrics() -> str:
    lines = [
        "# Metrics",
        "",
        "Generated from the registry by `make docs`. Of both `serve` and `index`; a label takes its values from a",
        "closed set.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for collector in sorted(Metrics().registry._collector_to_names, key=lambda c: getattr(c, "_name", "")):
        name = getattr(collector, "_name", None)
        if name is None:
            continue
        kind = collector._type  # type: ignore[attr-defined]
        labels = ", ".join(collector._labelnames)  # type: ignore[attr-defined]
        full = name + ("_total" if kind == "counter" else "")
        lines.append(f"| `{full}` | {kind} | {labels} | {collector._documentation} |")  # type: ignore[attr-defined]
    lines += [
        f"| `warmroute_process_{name}` | {kind} |  | {text} |"
        for name, kind, text in (
            ("cpu_seconds_total", "counter", "CPU time of this process"),
            ("resident_memory_bytes", "gauge", "memory of this process"),
            ("open_fds", "gauge", "open file descriptors"),
            ("max_fds", "gauge", "most file descriptors it may open"),
        )
    ]
    for table, kind, suffix in ((PodRows.GAUGES, "gauge", ""), (PodRows.COUNTERS, "counter", "_total")):
        lines += [f"| `warmroute_{name}{suffix}` | {kind} | pod | {text} |" for name, text in table.values()]
    return "\n".join(lines) + "\n"


def commands() -> str:
    lines = [
        "# Commands",
        "",
        "Generated from the tools' own flags by `make docs`. The settings of `warmroute serve` and `warmroute index`",
        "are in `configuration.md`. Every command takes `--help`. In a checkout the command is `.venv/bin/warmroute`.",
        "Those that call a router over https trust a CA of your own with `SSL_CERT_FILE=ca.pem` in the environment.",
    ]
    for name, text, parser in _parsers():
        lines += ["", f"## `{name}`", "", f"{text[0].upper()}{text[1:]}.", "", "| flag | meaning |", "|---|---|"]
        for action in parser._actions:
            if action.help not in (None, argparse.SUPPRESS) and not isinstance(action, argparse._HelpAction):
                flag = ", ".join(action.option_strings)
                value = action.metavar or (action.dest if not flag else _value(action))
                help_text = parser._get_formatter()._expand_help(action).replace("|", "\\|")
                needed = "; needed" if action.required and flag else ""
                lines.append(f"| `{f'{flag} {value}'.strip()}` | {help_text}{needed} |")
    return "\n".join(lines) + "\n"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()


class _Built(Exception):
    """A parser as it is just before it parses."""


def _parsers() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    runs: dict[str, Callable[[list[str]], object]] = {"explain": explain.run, "diff": diff.run, "doctor": doctor.run}
    for name, text in TOOLS.items():
        with mock.patch.object(argparse.ArgumentParser, "parse_args", lambda parser, _: _raise(_Built(parser))):
            try:
                runs[name]([])
            except _Built as built:
                yield f"warmroute {name}", text, built.args[0]
    for name, (module, add, _, text) in COMMANDS.items():
        parser = argparse.ArgumentParser()
        getattr(importlib.import_module(module), add)(parser)
        yield f"warmroute {name}" if name in PASSED_ON else f"warmroute loadtest {name}", text, parser


def _raise(exc: Exception) -> typing.NoReturn:
    raise exc


PAGES = {"configuration.md": configuration, "metrics.md": metrics, "commands.md": commands}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make())
