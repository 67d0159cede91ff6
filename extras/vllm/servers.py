"""vLLM on other GPUs or machines (--rollout_backend server), where scripts/vllm_server.py starts it.

Requests go over HTTP. Rank 0 sends the servers the weights, by vLLM's transfer over NCCL. The key in
the variable VLLM_API_KEY goes with every request.
"""

import asyncio
import base64
import itertools
import os
import socket
import time
from typing import Any, Iterator, Sequence

import torch
from transformers import PreTrainedModel
from yarl import URL

from extras.http import SERVER_PATIENCE, SERVER_START, ask_server
from extras.vllm.sampling import (
    ADAPTER,
    Adapter,
    Response,
    RolloutEngine,
    check_sent,
    response_of,
)
from utils import UserError, World, first_line

# Seconds in which a server has to answer any of its requests; less than the default of
# --collective_timeout, after which other ranks give up.
SERVER_ANSWER = 1500.0
SERVER_REQUESTS = 256  # requests under way, for each rank and server


class Servers(RolloutEngine):
    """vLLM servers as one rollout engine: each server samples a share of every rank's queries."""

    def __init__(self, args: Any, world: World, compute_dtype: torch.dtype | None):
        """Wait for the servers of --rollout_servers and connect, or raise a UserError.

        Args:
            args: the flags of a script: those of plumbing.cli.RolloutArgs, and lora_rank.
            compute_dtype: number format in which the weights are sent; None: float32.
        """
        super().__init__()
        self.urls = [url.rstrip("/") for url in args.rollout_servers]
        self.about = f"vLLM at {', '.join(self.urls)}"
        self.world = world
        self.dtype = compute_dtype or torch.float32
        self.slots = asyncio.Semaphore(SERVER_REQUESTS * len(self.urls))
        self.last_heard = dict.fromkeys(self.urls, 0.0)  # time of a server's last request or answer
        try:
            self._connect()
            world.barrier()
            if args.lora_rank and args.vllm_lora:
                ranks = self._ask_all("/collective_rpc", {"method": "adapter_rank"})
                least = min(int(rank) for answer in ranks for rank in answer["results"])
                self.sends_adapter = args.lora_rank <= least
        except (OSError, RuntimeError) as error:
            raise UserError(f"--rollout_servers {first_line(error)}", local=True) from error
        self.about += ", and the adapter" if self.sends_adapter else ""

    def _ask_all(
        self, path: str, body: dict | list[dict] | None = None, **limits: Any
    ) -> list[dict]:
        """Send a request to all servers at the same time, and return their answers.

        Args:
            body: see `ask_server`, for all servers; a list has one for each.
            limits: timeout and patience of `ask_server`.
        """
        bodies = body if isinstance(body, list) else [body] * len(self.urls)

        async def gather() -> list[dict]:
            return await asyncio.gather(
                *[ask_server(url, path, body, **limits) for url, body in zip(self.urls, bodies)]
            )

        return self.run(gather())

    # ---- weights ----

    def _connect(self) -> None:
        """Open the process group that sends the weights: this run's rank 0 is its rank 0, and the
        workers of the servers follow.
        """
        size = 0
        if self.world.main:
            print(f"waiting for {self.about}, {SERVER_START:.0f} s at most", flush=True)
            self._ask_all("/health", timeout=10.0, patience=SERVER_START)
            served = [answer["world_size"] for answer in self._ask_all("/get_world_size")]
            *self.first_ranks, size = itertools.accumulate([1, *served])
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_open_port

        address = own_address(self.urls)
        info = NCCLTrainerInitInfo(address, get_open_port(), size, rank=self.world.rank)
        self.sender = WeightTransferTrainerFactory.trainer_init(info, client=self, source=self)

    # What vLLM's trainer reads (WeightSource).

    def metadata(self) -> list:
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, self._sent_dtype(x), tuple(x.shape)) for name, x, _ in self.weights]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta, (name, tensor) in zip(self.metadata(), self._gather()):
            yield name, tensor.to(meta.dtype).contiguous()

    def _sent_dtype(self, weight: torch.Tensor) -> torch.dtype:
        return self.dtype if weight.is_floating_point() else weight.dtype

    # vLLM's trainer makes these four calls (VLLMWeightSyncClient). Here they go to all servers.

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        bodies = [{"init_info": {**init_info, "rank_offset": rank}} for rank in self.first_ranks]
        self._ask_all("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self._ask_all("/pause?mode=keep", {})  # requests wait until /resume
        self._ask_all("/collective_rpc", {"method": "watch_weights", "args": [self.tied]})
        self._ask_all("/start_weight_update", {})

    def update_weights(self, update_info: dict) -> None:
        self._ask_all("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask_all("/finish_weight_update", {"weight_version": str(self.step)})
        for answer in self._ask_all("/collective_rpc", {"method": "missing_weights"}):
            check_sent(answer["results"])
        self._resume()

    def _resume(self) -> None:
        """Let requests go on with the new weights."""
        answers = self._ask_all("/reset_prefix_cache?reset_running_requests=true", {})
        if not all(answer["success"] for answer in answers):
            raise RuntimeError(
                f"{' '.join(self.urls)}: could not drop what they cached with the old weights"
            )
        self._ask_all("/resume", {})

    def _send_adapter(self, data: bytes, rank: int, alpha: int) -> None:
        """Send an adapter over HTTP, and say to servers that do not yet know its name that it is
        there.
        """
        self._ask_all("/pause?mode=keep", {})
        args = [base64.b64encode(data).decode(), rank, alpha]
        self._ask_all("/collective_rpc", {"method": "load_adapter", "args": args})
        for url, models in zip(self.urls, self._ask_all("/v1/models")):
            if ADAPTER["lora_name"] not in [model["id"] for model in models["data"]]:
                self.run(ask_server(url, "/v1/load_lora_adapter", ADAPTER))
        self._ask_all("/update_weight_version", {"new_version": str(self.step)})
        self._resume()

    def _send(self, model: PreTrainedModel, step: int, adapter: Adapter | None) -> None:
        self.tied = model.all_tied_weights_keys
        self.step = step
        with self._errors_as_failure():
            if self.weights:
                self.sender.send_weights()  # rank 0 sends, other ranks only gather
            if adapter and self.world.main:
                self._send_adapter(*adapter)

    def sync(self, model: PreTrainedModel, step: int) -> None:
        self.world.barrier()
        super().sync(model, step)
        # After an error on one rank the servers stay paused, and answer no rank.
        failure = max(self.world.all_gather([self.failure]))
        self.failure = self.failure or failure

    # ---- sampling ----

    async def _complete(self, place: int, query: list[int], settings: dict) -> Response | None:
        """Return what a server samples after `query`; None after a failure."""
        # Each rank begins at another server: with few conversations, all would ask the first one.
        url = self.urls[(self.world.rank + place) % len(self.urls)]
        async with self.slots:
            with self._errors_as_failure():
                model = ADAPTER["lora_name"] if self.sends_adapter else None
                body = {"token_ids": query, "sampling_params": settings, "model": model}
                return await self._sample(url, body)

    async def _sample(self, url: str, body: dict) -> Response:
        """Return a response's token ids and, by name, a value for each of them.

        The request may wait behind others as long as the server answers any of them.
        """
        path = "/inference/v1/generate"
        request = asyncio.create_task(
            ask_server(url, path, body, timeout=None, patience=SERVER_PATIENCE)
        )
        self.last_heard[url] = time.monotonic()
        try:
            while not request.done():
                if time.monotonic() - self.last_heard[url] > SERVER_ANSWER:
                    raise RuntimeError(f"{url}: {path} gave no answer for {SERVER_ANSWER:.0f} s")
                await asyncio.wait([request], timeout=1.0)
        finally:
            request.cancel()  # vLLM aborts a request whose connection is closed
        self.last_heard[url] = time.monotonic()
        choice = request.result()["choices"][0]
        if choice["finish_reason"] == "abort":
            raise RuntimeError(f"{url}: another client aborts this run's requests")
        versions = choice["weight_versions"]
        if any(span["version"] == "default" for span in versions):  # vLLM's name before a sync
            raise RuntimeError(f"{url}: this server has started anew, without the run's weights")
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return response_of(choice["token_ids"], logprobs, versions)


def own_address(urls: Sequence[str]) -> str:
    """Return the address at which servers reach this machine: VLLM_HOST_IP if that is set, else the
    one of its connection to the first server that is not on this machine.
    """
    found = os.environ.get("VLLM_HOST_IP", "")
    for url in urls:
        if not found or found.startswith("127."):
            with socket.create_connection((URL(url).host, URL(url).port)) as server:
                found = server.getsockname()[0]
    return found
