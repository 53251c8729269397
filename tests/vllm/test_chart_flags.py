"""The vLLM arguments that the chart renders, read by vLLM's own parser."""

import json
import os
import subprocess

import pytest
import yaml

from tests.helm.conftest import CHART, NAMESPACE, fetched, rendered
from tests.vllm.engines import VLLM_PYTHON

READ = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
read = make_arg_parser(FlexibleArgumentParser()).parse_args(json.load(sys.stdin))
print(json.dumps({
    "model": read.model_tag, "port": read.port, "host": read.host, "names": read.served_model_name,
    "endpoint": read.kv_events_config.endpoint, "replay": read.kv_events_config.replay_endpoint,
    "events": read.kv_events_config.enable_kv_cache_events, "publisher": read.kv_events_config.publisher,
    "caching": read.enable_prefix_caching, "details": read.enable_prompt_tokens_details,
    "shutdown": read.shutdown_timeout, "ranks": read.data_parallel_size,
    "adapters": sorted(a.name for a in read.lora_modules or []),
}))
"""


@pytest.mark.vllm
def test_vllm_takes_the_charts_arguments() -> None:
    example = str(CHART / "examples" / "multi-model-lora.yaml")
    read = {}
    for found in yaml.safe_load_all(rendered(fetched("v4"), "-f", example)):
        if found and found["kind"] == "Deployment" and "-vllm-" in found["metadata"]["name"]:
            assert found["metadata"].get("namespace", NAMESPACE) == NAMESPACE
            (box,) = found["spec"]["template"]["spec"]["containers"]
            assert box["command"] == ["vllm", "serve"]
            done = subprocess.run(
                [VLLM_PYTHON, "-c", READ],
                input=json.dumps(box["args"]),
                env={**os.environ, "VLLM_TARGET_DEVICE": "cpu"},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr[-2000:]
            read[found["metadata"]["name"]] = json.loads(done.stdout.splitlines()[-1])
    both = {
        "port": 8000,
        "host": "0.0.0.0",
        "endpoint": "tcp://*:5557",
        "replay": "tcp://*:5657",
        "events": True,
        "publisher": "zmq",
        "caching": True,
        "details": True,
        "shutdown": 120,
    }
    assert read == {
        "rel-warmroute-vllm-qwen3-8b": {
            **both,
            "model": "Qwen/Qwen3-8B",
            "names": ["qwen3-8b", "Qwen/Qwen3-8B"],
            "ranks": 1,
            "adapters": ["sql", "support"],
        },
        "rel-warmroute-vllm-deepseek": {
            **both,
            "model": "deepseek-ai/DeepSeek-V3",
            "names": None,
            "ranks": 8,
            "adapters": [],
        },
    }
