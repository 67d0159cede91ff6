"""vLLM's NCCL weight transfer by gloo, as CPUs have no NCCL: importing this file changes both of
its ends.

What vLLM does around the broadcasts stays: handshake, metadata, gathers of the other ranks.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_engine


def group(info, rank: int) -> dist.ProcessGroupGloo:
    # As vLLM's own group: it listens on the address in use, where TCPStore by itself takes all of
    # the machine's.
    store = StatelessProcessGroup.create(
        info.master_address, info.master_port, rank, info.world_size
    ).store
    return dist.ProcessGroupGloo(store, rank, info.world_size, timedelta(minutes=10))


def broadcast(self, source, meta) -> None:
    """Send the weights from rank 0 of the trainer; its other ranks take part in the gathers."""
    for _, tensor in self._checked_iter(source, meta) if self.is_sender else source:
        if self.is_sender:
            self.model_update_group.broadcast(tensor, 0).wait()


def receive(self, info) -> None:
    for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        self.model_update_group.broadcast(tensor, 0).wait()
        self.model.load_weights([(name, tensor)])


def update_weights(self, update_info: dict) -> None:
    # the base class then asks for an accelerator
    self.receive_weights(self.parse_update_info(update_info))


nccl_engine.open_trainer_endpoint = lambda info: group(info, 0)
nccl_engine.worker_init_process_group = lambda info, config: group(
    info, info.rank_offset + config.rank
)
nccl_engine.NCCLTrainerWeightTransferEngine._broadcast = broadcast
nccl_engine.NCCLWeightTransferEngine.receive_weights = receive
nccl_engine.NCCLWeightTransferEngine.update_weights = update_weights
nccl_engine.NCCLWeightTransferEngine.shutdown = lambda self: None
