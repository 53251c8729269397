"""Child process: load a tokenizer as the engine does, write down what rendering and encoding need, leave.

`python -m router.tokenize.export SOURCE [--offline]`. transformers decides which class a repository really
gets and how its files are patched up (special tokens, prefix spaces, BOS); re-implementing that would be guessing. But
importing it costs 84 MB and two seconds of holding the interpreter's lock, so it happens here and not in the router.
Exit status 0 and msgpack of Exported on standard output, or 1 and one line of reason on standard error.
May import: the standard library, msgspec, router.tokenize.{pieces,proof}, and transformers inside functions.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from router.tokenize.pieces import Cuts
from router.tokenize.proof import proven_cuts


class Exported(msgspec.Struct, frozen=True):
    """What a router needs of a model's tokenizer."""

    tokenizer_json: str  # the `tokenizers` library's own format, after transformers' patching
    special_tokens: dict[str, Any]  # bos_token, eos_token, ...: template variables
    chat_templates: dict[str, str]  # by name; "default", "tool_use", ...
    processor_template: str | None  # used by vLLM before the tokenizer's own when a request has no tools
    unrenderable: str | None  # why chats of this model are not rendered by a template, if so
    cuts: Cuts  # where its texts may be cut, proven here
    borders: list[str]  # the added tokens in front of which they may


# vLLM encodes these in code, not by template (config/model.py, tokenizers/registry.py, renderers/online_renderer.py).
_CODED_ARCHITECTURES = {
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "InklingForCausalLM": "inkling",
    "InklingForConditionalGeneration": "inkling",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "MoonshotKimiaForCausalLM": "kimi_audio",
    "GptOssForCausalLM": "harmony",
}


def _folder(source: str, *, offline: bool) -> Path:
    """The local folder of a model: itself, or a snapshot of its non-weight files from hub cache or hub."""
    if os.path.isdir(source):
        return Path(source)
    if source.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"there is no folder {source}")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.model", "*.model.v*", "*.txt", "*.tiktoken", "*.py"]
    return Path(snapshot_download(source, allow_patterns=patterns, local_files_only=offline))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _coded(folder: Path) -> str | None:
    config = _read_json(folder / "config.json")
    for architecture in config.get("architectures") or []:
        if architecture in _CODED_ARCHITECTURES:
            return _CODED_ARCHITECTURES[architecture]
    if config.get("model_type") == "gpt_oss":
        return "harmony"
    return None


def _is_mistral(folder: Path) -> bool:
    files = {p.name for p in folder.iterdir()}
    tokenizer = "tekken.json" in files or any(f.startswith("tokenizer.model.v") for f in files)
    return tokenizer and any(f.startswith("consolidated") and f.endswith(".safetensors") for f in files)


def export(source: str, *, offline: bool) -> Exported:
    """Raises whatever transformers and the hub raise; ValueError for a tokenizer without a fast backend."""
    folder = _folder(source, offline=offline)
    if _is_mistral(folder):
        raise ValueError("the engine uses mistral-common for this repository; it is not rendered here")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} has no fast tokenizer")
    templates = tokenizer.chat_template or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    processor = _read_json(folder / "chat_template.json").get("chat_template")
    tokenizer_json = backend.to_str()
    cuts, borders = proven_cuts(tokenizer_json)
    return Exported(
        tokenizer_json=tokenizer_json,
        special_tokens={k: _text(v) for k, v in tokenizer.special_tokens_map.items()},
        chat_templates=dict(templates),
        processor_template=processor if isinstance(processor, str) else None,
        unrenderable=_coded(folder),
        cuts=cuts,
        borders=borders,
    )


def _text(token: Any) -> Any:
    return [str(t) for t in token] if isinstance(token, list | tuple) else str(token)


def main(argv: list[str] | None = None) -> int:
    """Command line of the child process."""
    parser = argparse.ArgumentParser(prog="python -m router.tokenize.export")
    parser.add_argument("source")
    parser.add_argument("--offline", action="store_true")
    args = parser.parse_args(argv)
    if args.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what libraries print must not get into the answer
        return _answer(args.source, offline=args.offline, out=out)


def _answer(source: str, *, offline: bool, out: BinaryIO) -> int:
    try:
        exported = export(source, offline=offline)
    except Exception as exc:  # foreign code on foreign files: every failure is this model's and is reported in one line
        sys.stderr.write(f"{type(exc).__name__}: {exc}".splitlines()[0][:500] + "\n")
        return 1
    out.write(msgspec.msgpack.encode(exported))
    return 0


if __name__ == "__main__":
    sys.exit(main())
