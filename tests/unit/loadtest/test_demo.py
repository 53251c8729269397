"""What `warmroute demo` says before it starts anything."""

import pytest

from loadtest.cli import main


def test_without_a_pod_it_says_so_and_promises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--pods", "0"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "--pods must be at least 1" in said.err
