"""What `warmroute explain` prints and refuses; the decision itself is tested where it is made."""

from pathlib import Path
from typing import Any

import pytest

from router import doctor, explain

POD = "http://a-rather-long-name.of-a-pod.somewhere.svc.cluster.local:8000"
TERMS = {"queue_s": 0.5, "own_s": 0.25, "regret_s": 0.0, "kv_s": 0.125, "company": 4.0, "price": 3.5}


def answer(**fields: Any) -> dict[str, Any]:
    row = {"pod": POD, "rank": 1, "matched_tokens": 32, "uncached_tokens": 16, "terms": TERMS}
    base: dict[str, Any] = {"model": "m", "policy": "prefix", "prompt_tokens": 48, "tokens": {"exact": True}}
    base |= {"crowd_requests": 0, "choice": {"reason": "prefix"}, "chosen_pod": POD, "workers": [row]}
    return base | fields


def test_a_pod_is_named_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    explain.show(answer())
    printed = capsys.readouterr().out
    (line,) = [x for x in printed.splitlines() if x.startswith(POD.removeprefix("http://"))]
    assert line.split()[1:] == ["rank", "1", "32", "16", "0.500", "0.250", "0.000", "0.125", "4", "3.500"]
    assert "48 tokens" in printed


def test_tokens_that_are_not_known_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    explain.show(answer(prompt_tokens=None, tokens={"exact": False, "reason": "no_tokenizer", "detail": "loading"}))
    assert "tokens not known (no_tokenizer: loading)" in capsys.readouterr().out


def test_a_model_that_nobody_serves_gets_words_and_no_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    explain.show(answer(choice={"reason": "no_worker"}, chosen_pod=None, workers=[]))
    printed = capsys.readouterr().out
    assert "refused (no_worker)" in printed
    assert "no pod that is known serves this model" in printed


def test_a_body_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.run([str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--url", "10.0.0.1:8000"], "must be http://HOST:PORT"),
        (["--url", "http://10.0.0.1:8000", "--events", "10.0.0.1:5557"], "must be tcp://HOST:PORT"),
    ],
)
def test_the_doctor_refuses_an_address_of_another_form(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        doctor.run(args)
    assert says in capsys.readouterr().err
