"""Find a model's tokenizer and load it in a child process (see export.py). Blocking: call it in a worker thread.

May import: the standard library, msgspec, router.tokenize.export.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from router.tokenize.export import Exported


class LoadFailure(Exception):
    """The tokenizer could not be had; the text says why, in one line fit for an operator."""


def is_at_hand(source: str) -> bool:
    """Can `source` be loaded without the network: a local folder, or a model in the hub cache?"""
    return os.path.isdir(source) or _hub_snapshots(source).is_dir()


def _hub_snapshots(model_id: str) -> Path:
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return Path(cache).expanduser() / ("models--" + model_id.replace("/", "--")) / "snapshots"


def load(source: str, *, offline: bool, deadline_s: float) -> Exported:
    """Raises LoadFailure. `offline`: never ask the hub, only folders and its cache."""
    with tempfile.TemporaryDirectory(prefix="warmroute-tokenizer-") as folder:
        out = Path(folder) / "exported"
        command = [sys.executable, "-m", "router.tokenize.export", source, "--out", str(out)]
        try:
            done = subprocess.run(  # noqa: S603  our own module; `source` comes from the settings or a pod
                command + ["--offline"] * offline, capture_output=True, timeout=deadline_s, check=False
            )
        except subprocess.TimeoutExpired as exc:
            raise LoadFailure(f"loading took longer than {deadline_s:g} s") from exc
        except OSError as exc:
            raise LoadFailure(f"cannot start the loader: {exc}") from exc
        if done.returncode != 0:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise LoadFailure((lines or [f"the loader ended with status {done.returncode}"])[-1][:500])
        try:
            return msgspec.msgpack.decode(out.read_bytes(), type=Exported)
        except (OSError, msgspec.MsgspecError) as exc:
            raise LoadFailure(f"the loader wrote nothing usable: {exc}") from exc
