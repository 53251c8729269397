"""The style that a tool can check: module docstrings, sizes, and no secrets of a machine in the tree."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("router", "indexer", "loadtest")
SOURCES = sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|home/[a-z]+|root|Users)/")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert path.name == "__init__.py" or ast.get_docstring(tree), "the module has no docstring"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_clock_or_chance_hides_in_a_pure_room(path: Path) -> None:
    room = path.relative_to(ROOT).as_posix()
    if not room.startswith(("router/core/", "router/policy/")):
        return
    names = {
        node.func.value.id + "." + node.func.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    }
    assert not names & {"time.time", "time.monotonic", "random.random", "random.choice", "random.randrange"}


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    tracked = [
        p
        for folder in (*ROOMS, "tests", "docs", "deploy", ".ci", ".github")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".json"} and p.stat().st_size < 500_000
    ]
    bad = [
        f"{p.relative_to(ROOT)}: {line.strip()[:100]}"
        for p in tracked
        for line in p.read_text(errors="replace").splitlines()
        if MACHINE_PATH.search(line) and "MACHINE_PATH" not in line
    ]
    assert not bad
