"""The tiny model's tokenizer, loaded as the router loads it: by transformers, in a child process, once per session.

Reading tokenizer.json alone would not do: transformers 5 gives a Qwen2 model Qwen2's own splitting of digits and
blanks, whatever the file says, and so does the engine.
"""

from functools import cache
from pathlib import Path

import msgspec

from router.tokenize.export import Exported
from router.tokenize.load import load

TINY = Path(__file__).parents[2] / "data" / "tiny-model"


@cache
def tiny_exported() -> Exported:
    return load(str(TINY), offline=True, deadline_s=300)


def with_template(source: str) -> Exported:
    """The tiny tokenizer under another chat template."""
    return msgspec.structs.replace(tiny_exported(), chat_templates={"default": source})
