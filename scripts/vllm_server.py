"""Serve a model with vLLM to runs on other GPUs or machines, which push their weights into it after
each step.

    export VLLM_API_KEY=...                             # of your choice, the same for the server and the run
    python scripts/vllm_server.py --model Qwen/Qwen2.5-7B --port 8000 --tensor_parallel 2 --host 10.0.0.2
    python grpo.py --model Qwen/Qwen2.5-7B --rollout_backend server --rollout_servers http://10.0.0.2:8000

This process becomes vLLM's OpenAI-compatible server with what a run needs: log-probabilities of the
distribution that is sampled, requests and responses of token ids, and weight transfer by NCCL. What
follows `--` goes to vLLM as it is: `-- --max-num-seqs 512`. GET /health answers once the model is
loaded.

Whoever gets an answer from this server can run code on its machine: vLLM's /collective_rpc calls
functions by name, and its weight transfer connects to the address that it is told. docs/rollouts.md
says what the key protects, and what not.
"""

import os
import sys
from typing import Annotated, Literal

import repository  # noqa: F401
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from server_key import require_key

import utils
from extras.vllm.sampling import WORKER_EXTENSION
from plumbing.cli import NonNegativeFloat, PathOrName, Port
from plumbing.run.command import parse, report_errors


@dataclass
class Args:
    model: PathOrName
    """Folder or hub name of the model that the run trains, or of one of the same shapes: the run
    sends all weights."""
    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach requires a key in the variable
    VLLM_API_KEY."""
    port: Annotated[Port, Field(ge=1)] = 8000
    """Port to listen on."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share the model."""
    precision: Literal["bf16", "fp16", "float32"] = "bf16"
    """Number format to compute in, best the same as the run's."""
    lora_rank: Literal[0, 1, 8, 16, 32, 64, 128, 256, 320, 512] = 0
    """Greatest --lora_rank of runs that send adapters; 0: runs send merged weights."""
    max_length: NonNegativeInt = 0
    """Maximum number of tokens of prompt and response together; 0 for as many as the model has
    positions."""
    kv_cache_gb: NonNegativeFloat = 0.0
    """GB of key-value cache on each device; 0 for what --gpu-memory-utilization (0.9) of a GPU
    leaves."""


def main(args: Args, others: list[str]) -> None:
    with utils.as_user_error(f"--host {args.host}"):
        require_key(args.host, "VLLM_API_KEY")
        # vLLM also reads a part of a name, and a file of flags.
        if any(word.startswith(("--ho", "--config")) for word in others):
            raise ValueError("it has to stand before the --, and --config is not read")
    options = {
        "model": args.model,
        "host": args.host,
        "port": args.port,
        "tensor-parallel-size": args.tensor_parallel,
        "dtype": {"bf16": "bfloat16", "fp16": "float16", "float32": "float32"}[args.precision],
        "generation-config": "vllm",  # the model's own defaults would change the distribution
        "logprobs-mode": "processed_logprobs",  # after the temperature
        "max-logprobs": -1,  # a run may ask a teacher for all
        "weight-transfer-config": '{"backend": "nccl"}',
        "middleware": "server_key.CheckKey",
        "worker-extension-cls": WORKER_EXTENSION,
        "uvicorn-log-level": "warning",  # no line for each request
        "max-model-len": args.max_length,
        "kv-cache-memory-bytes": int(args.kv_cache_gb * 1e9),
        "max-lora-rank": args.lora_rank,
    }
    words = [f"--{name}={value}" for name, value in options.items() if value]
    module = [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enable-scale-out",
        "--language-model-only",
        "--enable-lora" if args.lora_rank else "--no-enable-lora",
    ]
    # For WORKER_EXTENSION and the middleware.
    path = os.pathsep.join([utils.ROOT, f"{utils.ROOT}/scripts", os.environ.get("PYTHONPATH", "")])
    switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path}
    switches["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    # Signals and the exit code are vLLM's from here on.
    os.execve(sys.executable, [sys.executable, *module, *words, *others], os.environ | switches)


if __name__ == "__main__":
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    with report_errors():
        main(parse(Args, words[:end]), words[end + 1 :])
