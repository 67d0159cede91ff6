"""What scripts/vllm_server.py adds to vLLM, whose server and workers import this file.

`CheckKey` lets in who has the key, `Worker` tells a run what the server is, and `Gloo` takes weights from a CPU, as
vLLM's own "nccl" does from a GPU; plumbing/rollout/vllm_servers.py is the other end. Imports no other module of plumbing.
"""

import os
import secrets
import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from starlette.responses import JSONResponse
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

TRANSFER_TIMEOUT = timedelta(minutes=10)  # of one tensor
NAME = uuid.uuid4().hex  # of this process, whatever its address


class CheckKey:
    """Refuses a request without the key in VLLM_API_KEY, on every path but /health: ASGI middleware.

    vLLM's own check of this key leaves out the paths that change weights and run code.
    """

    def __init__(self, app):
        self.app, self.expected = app, f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict, receive, send) -> None:
        answer = self.app
        if scope["type"] != "lifespan" and scope["path"] != "/health":  # lifespan: of the process, no request
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self.expected):
                answer = JSONResponse({"error": {"message": "VLLM_API_KEY is not the one of the server"}}, 401)
        await answer(scope, receive, send)


class Worker:
    """Methods that vLLM adds to each of its workers (--worker-extension-cls)."""

    def served(self) -> dict:
        """Return what a run checks before it sends weights."""
        model = self.model_config
        return {
            "server": NAME,
            "config": model.hf_config.to_dict(),
            "dtype": str(model.dtype),
            "max_length": model.max_model_len,
            "logprobs": str(model.logprobs_mode),
            "transfer": self.vllm_config.weight_transfer_config.backend,
        }


@dataclass
class GlooInit(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Gloo(WeightTransferEngine[GlooInit, GlooUpdate]):
    """Weight transfer between CPUs: rank 0, the trainer, broadcasts one tensor after the other."""

    init_info_cls, update_info_cls = GlooInit, GlooUpdate

    def init_transfer_engine(self, init: GlooInit) -> None:
        config = self.parallel_config
        rank = init.rank_offset + config.data_parallel_index * config.world_size + config.rank
        store = dist.TCPStore(init.master_address, init.master_port, init.world_size, is_master=False)
        self.group = dist.ProcessGroupGloo(store, rank, init.world_size, TRANSFER_TIMEOUT)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update: GlooUpdate) -> None:
        received = self._received(update)
        try:
            self.model.load_weights(received)
        finally:  # the trainer sends them all, whatever went wrong here
            for _ in received:
                pass

    def _received(self, update: GlooUpdate):
        for name, dtype, shape in zip(update.names, update.dtype_names, update.shapes):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(tensor, 0).wait()
            yield name, tensor

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # the base class then asks for an accelerator

    def shutdown(self) -> None:
        self.group = None


WeightTransferEngineFactory.register_engine("gloo", Gloo)
