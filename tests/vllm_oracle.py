"""The engine's own front half, without an engine: bodies in, prompt token ids out. Run it with a vLLM interpreter.

    VLLM_PYTHON -P tests/vllm_oracle.py MODEL_FOLDER [VLLM FLAGS] < requests.jsonl > ids.jsonl

Each input line is {"path": "/v1/chat/completions", "body": {...}}; each output line {"ids": [...]} or {"error": "..."}.
It builds vLLM's request models, renderer and tokenizer from the model folder (config.json and tokenizer; no weights)
and calls what the API server calls. It imports nothing of this project: it is the oracle for router/tokenize.
"""

import asyncio
import json
import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
OUT = os.fdopen(os.dup(1), "w")  # vLLM prints to standard output
os.dup2(2, 1)


def build(folder: str, flags: list[str]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.launchers.render.app_state import init_render_app_state
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", folder, "--served-model-name", "m", "--enforce-eager", *flags])
    config = AsyncEngineArgs.from_cli_args(args).create_model_config()

    class Parallel:
        _api_process_rank = 0

    class Config:
        model_config = config
        parallel_config = Parallel()
        structured_outputs_config = type("S", (), {"reasoning_parser": ""})()
        observability_config = type("O", (), {})()

    return args, Config(), init_render_app_state


async def main(folder: str, flags: list[str]) -> None:
    logging.disable(logging.CRITICAL)
    from starlette.datastructures import State

    args, config, init = build(folder, flags)
    state = State()
    await init(config, state, args)
    for line in sys.stdin:
        row = json.loads(line)
        try:
            answer = await render(state, row["path"], row["body"])
        except Exception as exc:  # whatever the engine refuses, the caller wants to know
            answer = {"error": f"{type(exc).__name__}: {exc}"[:300]}
        OUT.write(json.dumps(answer) + "\n")
        OUT.flush()


async def render(state: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    online = state.online_renderer
    if path == "/v1/chat/completions":
        result = await online.render_chat(ChatCompletionRequest(**body))
        inputs = result[1] if isinstance(result, tuple) else result
    elif path == "/v1/completions":
        inputs = await online.render_completion(CompletionRequest(**body))
    elif path == "/v1/responses":
        result = await online.render_responses(ResponsesRequest(**body))
        inputs = [result.engine_input] if hasattr(result, "engine_input") else result
    elif path == "/v1/messages":
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

        serving = AnthropicServingMessages.__new__(AnthropicServingMessages)
        serving.online_renderer = online
        serving._extract_prompt_components = lambda prompt: SimpleNamespace(
            token_ids=prompt["prompt_token_ids"], text=""
        )
        chat = serving.to_chat_completion_request(
            AnthropicMessagesRequest(**body),
            merge_inline_system=serving._should_merge_inline_system(online),
            disabled_thinking_effort=await serving._probe_disabled_thinking_effort(),
        )
        result = await online.render_chat(chat)
        inputs = result[1] if isinstance(result, tuple) else result
    else:
        raise ValueError(path)
    if not isinstance(inputs, list):
        return {"error": str(inputs)[:300]}
    return {"ids": list(inputs[0]["prompt_token_ids"])}


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
