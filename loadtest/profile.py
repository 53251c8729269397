"""What a pod is made of: the constants of the engine model, read from profiles/*.toml, each with its source.

Reads files; decides nothing. May import: the standard library, msgspec.
"""

import tomllib
from pathlib import Path

import msgspec

PROFILES_DIR = Path(__file__).parent / "profiles"


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of pod. A step lasts

    t0_s + sum over prefill chunks of chunk * (1 + context_mid / attention_equal_context_tokens) / prefill_tokens_per_s
         + kv_tokens_of_decoding * c_kv_s + sequences * c_seq_s
    """

    name: str
    model: str
    prefill_tokens_per_s: float
    t0_s: float
    c_kv_s: float
    c_seq_s: float
    attention_equal_context_tokens: float  # context length at which attention costs as much as the linear layers
    frontend_s: float  # HTTP, tokenizing, queue hand-over: before the scheduler sees a request
    frontend_s_per_token: float = 0.0
    frontend_jitter_s: float = 0.0  # mean of an exponential delay on top
    jitter_ratio: float = 0.0  # a step lasts up to this much longer, uniformly, by the engine's seed
    block_size_tokens: int
    num_blocks: int  # vLLM's num_gpu_blocks; one of them is the null block
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len_tokens: int
    max_loras: int = 0  # adapters on the GPU at a time; 0: no LoRA, adapters are not looked at
    lora_load_s: float = 0.0  # what a step lasts longer for each adapter that it brings onto the GPU
    judged: bool = True  # false: a toy for demonstrations
    calibrated: bool = False  # true only when the published tables are reproduced within their bounds
    calibration_note: str = ""
    sources: dict[str, str]  # constant -> where it comes from

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs, as vLLM demands")

    @property
    def kv_cache_tokens(self) -> int:
        return self.num_blocks * self.block_size_tokens


def load_profile(name_or_path: str) -> Profile:
    """A profile by its name in profiles/, or by the path of a .toml file.

    Raises FileNotFoundError naming the known ones, msgspec.ValidationError for a file that does not fit.
    """
    path = Path(name_or_path) if name_or_path.endswith(".toml") else PROFILES_DIR / f"{name_or_path}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROFILES_DIR.glob("*.toml")))
        raise FileNotFoundError(f"no profile {name_or_path!r}; known: {known}, or give the path of a .toml file")
    return msgspec.convert(tomllib.loads(path.read_text()), Profile)
