"""Find a model's tokenizer and load it in a child process (see export.py). Blocking: call it in a worker thread.

May import: the standard library, msgspec, router.tokenize.export.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
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


def load(source: str, *, offline: bool, deadline_s: float, stop: threading.Event | None = None) -> Exported:
    """Raises LoadFailure. `offline`: only folders and the hub's cache. `stop`, once set, ends the child."""
    with tempfile.TemporaryDirectory(prefix="warmroute-tokenizer-") as folder:
        out, complaints = Path(folder) / "exported", Path(folder) / "complaints"
        command = [sys.executable, "-m", "router.tokenize.export", source, "--out", str(out)]
        with complaints.open("wb") as stderr:
            try:
                child = subprocess.Popen(command + ["--offline"] * offline, stdout=stderr, stderr=stderr)  # noqa: S603
            except OSError as exc:
                raise LoadFailure(f"cannot start the loader: {exc}") from exc
            status = _wait(child, deadline_s=deadline_s, stop=stop)
        if status != 0:
            lines = complaints.read_text("utf-8", "replace").strip().splitlines()
            raise LoadFailure((lines or [f"the loader ended with status {status}"])[-1][:500])
        try:
            return msgspec.msgpack.decode(out.read_bytes(), type=Exported)
        except (OSError, msgspec.MsgspecError) as exc:
            raise LoadFailure(f"the loader wrote nothing usable: {exc}") from exc


def _wait(child: "subprocess.Popen[bytes]", *, deadline_s: float, stop: threading.Event | None) -> int:
    """The child's status; on its deadline or on `stop` it is killed and LoadFailure raised."""
    started_s = time.monotonic()
    while True:
        try:
            return child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            late = time.monotonic() - started_s > deadline_s
            if late or (stop is not None and stop.is_set()):
                child.kill()
                child.wait()
                raise LoadFailure(f"loading took longer than {deadline_s:g} s" if late else "stopped") from None
