"""Find a model's tokenizer and load it in a child process (see export.py). Blocking: call it in a worker thread.

May import: the standard library, msgspec, router.tokenize.export.
"""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from router.tokenize.export import Exported

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # ORGANISATION/NAME; a bare name may be anybody's word
_TRUE = ("1", "on", "yes", "true")


class LoadFailure(Exception):
    """The tokenizer could not be had; the text says why, in one line fit for an operator."""


def is_at_hand(source: str) -> bool:
    """Can `source` be loaded without the network: a local folder, or a model in the hub cache?"""
    return os.path.isdir(source) or _hub_snapshots(source).is_dir()


def may_be_fetched(source: str) -> bool:
    """Is `source` the id of a repository on the hub, by its look, and may the hub be asked (HF_HUB_OFFLINE)?"""
    offline = any(os.environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return not offline and _REPOSITORY.fullmatch(source) is not None


def _hub_snapshots(model_id: str) -> Path:
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return Path(cache).expanduser() / ("models--" + model_id.replace("/", "--")) / "snapshots"


def load(source: str, *, offline: bool, deadline_s: float, stop: threading.Event | None = None) -> Exported:
    """Raises LoadFailure. `offline`: only folders and the hub's cache. `stop`, once set, ends the child."""
    command = [sys.executable, "-m", "router.tokenize.export", source]
    try:
        child = subprocess.Popen(  # noqa: S603  our own module; `source` comes from the settings or a pod
            command + ["--offline"] * offline,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as exc:
        raise LoadFailure(f"cannot start the loader: {exc}") from exc
    with child:
        written, complaints = _wait(child, deadline_s=deadline_s, stop=stop)
    if child.returncode != 0:
        lines = complaints.decode("utf-8", "replace").strip().splitlines()
        raise LoadFailure((lines or [f"the loader ended with status {child.returncode}"])[-1][:500])
    try:
        return msgspec.msgpack.decode(written, type=Exported)
    except msgspec.MsgspecError as exc:
        raise LoadFailure(f"the loader wrote nothing usable: {exc}") from exc


def _wait(child: "subprocess.Popen[bytes]", *, deadline_s: float, stop: threading.Event | None) -> tuple[bytes, bytes]:
    """What the child wrote and complained of; on its deadline or on `stop` it is killed and LoadFailure raised."""
    started_s = time.monotonic()
    while True:
        try:
            return child.communicate(timeout=0.2)
        except subprocess.TimeoutExpired:
            late = time.monotonic() - started_s > deadline_s
            if late or (stop is not None and stop.is_set()):
                child.kill()
                raise LoadFailure(f"loading took longer than {deadline_s:g} s" if late else "stopped") from None
