"""Write docs/configuration.md and docs/metrics.md from the code. `make docs`; a test compares."""

import typing
from pathlib import Path

from pydantic.fields import FieldInfo

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
        "      - http://10.0.0.1:8000,events=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:5558",
        "      - http://10.0.0.2:8000,events=tcp://10.0.0.2:5557,replay=tcp://10.0.0.2:5558",
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


PAGES = {"configuration.md": configuration, "metrics.md": metrics}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make())
