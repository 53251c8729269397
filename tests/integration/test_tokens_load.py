"""The loader's child process, for real."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from router.tokenize.load import LoadFailure, is_at_hand, load, may_be_fetched

TINY = Path(__file__).parents[1] / "data" / "tiny-model"


def test_a_folder_is_loaded_as_transformers_loads_it() -> None:
    exported = load(str(TINY), offline=True, deadline_s=300)
    assert exported.chat_templates == {"default": (TINY / "chat_template.jinja").read_text()}
    assert exported.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert exported.unrenderable is None
    # transformers gives a Qwen2 model Qwen2's normaliser, which the file does not have
    assert '"NFC"' in exported.tokenizer_json
    assert '"NFC"' not in (TINY / "tokenizer.json").read_text()


def test_the_router_process_itself_does_not_import_transformers() -> None:
    script = (
        "import sys; from router.tokenize.load import load; from router.tokenize.service import TokenService;"
        f"load({str(TINY)!r}, offline=True, deadline_s=300); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


@pytest.mark.parametrize("source", ["no-such/model", "/no/such/folder"])
def test_what_is_not_there_fails_with_one_line(source: str) -> None:
    assert not is_at_hand(source)
    with pytest.raises(LoadFailure) as caught:
        load(source, offline=True, deadline_s=300)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "offline", "expected"),
    [
        ("Qwen/Qwen3-32B", "", True),
        ("Qwen/Qwen3-32B", "0", True),
        ("Qwen/Qwen3-32B", "1", False),
        ("/models/Qwen3", "", False),
        ("models/a/b", "", False),
        ("../Qwen3", "", False),
        ("tiny", "", False),
        ("", "", False),
    ],
)
def test_the_hub_is_asked_for_what_looks_like_its_ids(
    source: str, offline: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    assert may_be_fetched(source) is expected


def test_a_broken_folder_fails_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadFailure):
        load(str(tmp_path), offline=True, deadline_s=300)


def test_a_loader_that_is_late_or_not_wanted_any_more_is_killed() -> None:
    with pytest.raises(LoadFailure, match="longer than"):
        load(str(TINY), offline=True, deadline_s=0)
    stop = threading.Event()
    stop.set()
    with pytest.raises(LoadFailure, match="stopped"):
        load(str(TINY), offline=True, deadline_s=300, stop=stop)
