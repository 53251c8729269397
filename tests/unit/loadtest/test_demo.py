"""What `warmroute demo` says before it starts anything."""

import pytest

from loadtest.cli import main
from loadtest.demo import _what
from loadtest.experiment import load_experiment


def test_without_a_pod_it_says_so_and_promises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--pods", "0"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "--pods must be at least 1" in said.err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--policies", "random,foo"], "no 'foo'; known: prefix, "),
        (["--seconds", "5"], "all of its 5 s are warm-up"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *flags]) == 1
    said = capsys.readouterr()
    assert says in said.err
    assert "EMULATED" not in said.out


@pytest.mark.parametrize(("pods", "fits"), [(2, False), (3, True), (4, True)])
def test_it_says_whether_the_prefixes_fit(pods: int, fits: bool) -> None:
    told = _what(load_experiment("demo", {}), pods)
    assert ("60,000 tokens" in told, f"({pods * 24_000:,})" in told) == (True, True)
    assert ("fit the fleet's" in told) == fits
    assert ("3 pods or more keep all" in told) != fits
