"""What `warmroute explain` prints and refuses; the decision itself is tested where it is made."""

from pathlib import Path
from typing import Any

import pytest

from router import doctor, explain

POD = "http://a-rather-long-name.of-a-pod.somewhere.svc.cluster.local:8000"
TERMS = {
    "queue_s": 0.5, "own_s": 0.25, "regret_s": 0.0, "kv_s": 0.125, "adapter_s": 0.75, "company": 4.0, "price": 6.5,
}  # fmt: skip


def answer(**fields: Any) -> dict[str, Any]:
    row = {"pod": POD, "rank": 1, "matched_tokens": 32, "uncached_tokens": 16, "placed_tokens": 7, "chosen": True}
    row["terms"] = TERMS
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
    assert line.split()[1:] == [
        "rank",
        "1",
        "*",
        "32",
        "16",
        "7",
        "0.500",
        "0.250",
        "0.000",
        "0.125",
        "0.750",
        "4",
        "6.500",
    ]
    assert "48 tokens" in printed


def test_tokens_that_are_not_known_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    explain.show(answer(prompt_tokens=None, tokens={"exact": False, "reason": "no_tokenizer", "detail": "loading"}))
    assert "tokens not known (no_tokenizer: loading)" in capsys.readouterr().out


def test_a_trial_and_what_other_routers_have_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = answer()["workers"]
    theirs = {"inflight_requests": 3, "prefill_tokens": 700, "placed_tokens": 0}
    told = {
        "control": {"policy": "random", "share_ratio": 0.005},
        "shadow": {"policy": "least-loaded", "choice": {"reason": "load"}, "chosen_pod": "http://b:1"},
        "workers": [{**row, "peers": theirs}],
    }
    explain.show(answer(**told))
    printed = capsys.readouterr().out
    assert "control group: 0.50% of the requests go by random instead" in printed
    assert "shadow: policy least-loaded would have sent it to http://b:1 (load)" in printed
    assert "other routers have: 3 requests in flight, 700 tokens to compute, 0 placed lately" in printed
    explain.show(answer(control=None, shadow=None, workers=[{**row, "peers": dict.fromkeys(theirs, 0)}]))
    printed = capsys.readouterr().out
    assert "control group" not in printed
    assert "shadow" not in printed
    assert "other routers" not in printed


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


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--header", "x"], "--header x must be NAME:VALUE"),
        (["--header", ":x"], "--header :x must be NAME:VALUE"),
        (["--endpoint", "foo"], "--endpoint foo must be a path"),
    ],
)
def test_a_question_that_means_nothing_is_refused(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        explain.run(["body.json", *flags])
    assert end.value.code == 2
    assert says in capsys.readouterr().err
