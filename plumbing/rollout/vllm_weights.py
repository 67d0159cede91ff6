"""The weights of a model on their way to vLLM servers: what plumbing/rollout/vllm_servers.py sends, and how from a CPU.

The receiving end is plumbing/rollout/vllm_worker.py. Imports plumbing.models.lora (weights by name).
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Callable, Iterator, NamedTuple

import torch
import torch.distributed as dist

from plumbing.models.lora import merged
from utils import first_line

TRANSFER_TIMEOUT = timedelta(minutes=10)  # of one tensor


class ServerError(Exception):
    """What went wrong with a server, in one line that begins with its address."""


class WeightMeta(NamedTuple):
    """What a server is told about a tensor before it arrives: vLLM's ParamMeta."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Weights:
    """A model's weights as they are sent: vLLM's WeightSource, whose own reads parameters() and lacks a tied head."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.entries = dtype, []  # of `base_weights`

    def metadata(self) -> list[WeightMeta]:
        sent_as = lambda weight: self.dtype if weight.is_floating_point() else weight.dtype
        return [WeightMeta(name, sent_as(weight), tuple(weight.shape)) for name, weight, _ in self.entries]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and whole tensors; of a sharded model, each is gathered from all ranks and has to be taken.

        `entries` loses what was yielded: after an error, what is left in it is what other ranks still gather.
        """
        for meta in self.metadata():
            _, weight, layer = self.entries.pop(0)
            yield meta.name, merged(weight.detach(), layer).to(meta.dtype).contiguous()


class GlooSender:
    """Sends weights from a CPU, for which vLLM has nothing, as its NCCLTrainerWeightTransferEngine does from a GPU.

    `client` is a Servers of plumbing/rollout/vllm_servers.py.
    """

    def __init__(self, client, source: Weights, host: str, world_size: int):
        self.client, self.source = client, source
        store = dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False)
        info = {"master_address": host, "master_port": store.port, "world_size": world_size}
        connect = lambda: dist.ProcessGroupGloo(store, 0, world_size, TRANSFER_TIMEOUT)
        self.group = self._while_servers(lambda: client.init_weight_transfer_engine(info), connect)

    def send_weights(self) -> None:
        names, dtypes, shapes = zip(*self.source.metadata())
        info = {"names": names, "dtype_names": [str(d).removeprefix("torch.") for d in dtypes], "shapes": shapes}
        self.client.start_weight_update()
        self._while_servers(lambda: self.client.update_weights(info), self._broadcast)
        self.client.finish_weight_update()

    def _broadcast(self) -> None:
        for _, tensor in self.source:
            self.group.broadcast(tensor, 0).wait()

    def _while_servers(self, ask: Callable, act: Callable):
        """Return act(), which meets the servers in a collective that they enter in ask()."""
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            try:
                result = act()
            except RuntimeError as error:
                asked.result()  # raises the servers' own error, which says more
                urls = " ".join(self.client.urls)
                raise ServerError(f"{urls}: weight transfer failed ({first_line(error)})") from None
            asked.result()
            return result
