"""vLLM on other GPUs or machines (--rollout_backend server), started by scripts/vllm_server.py.

The servers sample over HTTP, and rank 0 sends them the weights by vLLM's transfer over NCCL. A key
in the variable VLLM_API_KEY goes with every request.
"""

import asyncio
import itertools
import json
import math
import os
import time
from typing import Iterator

import aiohttp
import torch
from transformers import PreTrainedModel

from extras.vllm.engine import (
    Response,
    VllmSampling,
    check_sent,
    policy_steps,
    sent_weights,
)
from plumbing.cli import RolloutArgs
from plumbing.models.sharding import merged
from utils import UserError, World, first_line

SERVER_START = 600.0  # seconds in which a server has to answer when a run starts
SERVER_PATIENCE = 120.0  # seconds for which a server may be away later
# Seconds in which a server must answer one of its requests: less than the half hour that other
# ranks wait.
SERVER_ANSWER = 1500.0
SERVER_REQUESTS = 256  # requests under way, for each rank and server
TRANSFER = 600.0  # seconds until a step of the weight transfer must be done


class Weights:
    """A model's weights as they are sent, with its adapter: vLLM's WeightSource."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.entries: list[tuple] = []  # of `sent_weights`

    def metadata(self) -> list:
        from vllm.distributed.weight_transfer import ParamMeta

        sent_as = lambda weight: self.dtype if weight.is_floating_point() else weight.dtype
        return [
            ParamMeta(name, sent_as(weight), tuple(weight.shape))
            for name, weight, _ in self.entries
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and whole tensors; of a sharded model, each is gathered from all ranks.

        `entries` loses what was yielded: after an error, what is left in it is what other ranks
        still gather.
        """
        for meta in self.metadata():
            _, weight, layer = self.entries.pop(0)
            yield meta.name, merged(weight.detach(), layer).to(meta.dtype).contiguous()


class Servers(VllmSampling):
    """vLLM servers as one rollout engine: each samples its share of every rank's queries."""

    def __init__(self, args: RolloutArgs, world: World, compute_dtype: torch.dtype | None):
        """Wait for the servers of --rollout_servers and connect, or raise a UserError.

        Args:
            compute_dtype: number format in which the weights are sent; None: float32.
        """
        super().__init__()
        self.urls = [url.rstrip("/") for url in args.rollout_servers]
        self.about = f"vLLM at {', '.join(self.urls)}"
        self.world = world
        self.weights = Weights(compute_dtype or torch.float32)
        self.free = asyncio.Semaphore(SERVER_REQUESTS * len(self.urls))
        self.heard = dict.fromkeys(self.urls, 0.0)  # when a server was asked or has answered last
        self.headers = {"Authorization": f"Bearer {os.environ.get('VLLM_API_KEY', '')}"}
        try:
            self._connect()
        except (OSError, RuntimeError) as error:
            raise UserError(f"--rollout_servers {first_line(error)}", local=True) from error
        world.barrier()

    async def _request(
        self,
        url: str,
        path: str,
        body: dict | None = None,
        timeout: float | None = TRANSFER,
        patience: float = 0.0,
    ) -> dict:
        """Return what the server answers to a POST of `body`, or to a GET if there is none.

        Without a connection, after `timeout` seconds of silence and at the statuses 429 and 5xx,
        the request is sent again for `patience` seconds. (urllib3's Retry counts attempts, not
        seconds, and cannot be cancelled.) Raises RuntimeError.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=timeout)
        method = "GET" if body is None else "POST"
        begin = time.monotonic()
        while True:
            status = 0
            try:
                async with aiohttp.request(
                    method, url + path, json=body, timeout=limits, headers=self.headers
                ) as answer:
                    status = answer.status
                    text = await answer.text()
                if answer.ok:
                    return json.loads(text) if text else {}  # /health has no body
                why = f"HTTP status {status}: {text[:300]}"
            except (aiohttp.ClientError, ValueError) as error:
                why = first_line(error) or type(error).__name__
            tried = time.monotonic() - begin
            if 400 <= status < 500 and status != 429 or tried >= patience:
                raise RuntimeError(
                    f"{url}: {path} failed{f' for {tried:.0f} s' if patience else ''} ({why})"
                )
            await asyncio.sleep(min(2.0, patience))

    def _ask_all(self, path: str, *bodies: dict, **limits: float) -> list[dict]:
        """Return what the servers answer to a request, which they get at the same time.

        Args:
            bodies: one for all servers or one for each; none for a GET. limits: see `_request`.
        """
        each = bodies if len(bodies) > 1 else (bodies or [None]) * len(self.urls)

        async def gather() -> list[dict]:
            return await asyncio.gather(
                *[self._request(url, path, body, **limits) for url, body in zip(self.urls, each)]
            )

        return self.run(gather())

    # ---- weights ----

    def _connect(self) -> None:
        """Open the process group for the weights: rank 0 is this run's rank 0, then come the
        workers of each server.
        """
        size = 0
        if self.world.main:
            print(f"waiting for {self.about}, {SERVER_START:.0f} s at most", flush=True)
            self._ask_all("/health", timeout=10.0, patience=SERVER_START)
            self._ask_all("/collective_rpc", {"method": "watch_weights"})
            served = [answer["world_size"] for answer in self._ask_all("/get_world_size")]
            *self.first_ranks, size = itertools.accumulate([1, *served])
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_ip, get_open_port

        info = NCCLTrainerInitInfo(get_ip(), get_open_port(), size, rank=self.world.rank)
        self.sender = WeightTransferTrainerFactory.trainer_init(
            info, client=self, source=self.weights
        )

    # The four calls that vLLM's trainer makes (its VLLMWeightSyncClient), to all servers at once.

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        bodies = [{"init_info": {**init_info, "rank_offset": rank}} for rank in self.first_ranks]
        self._ask_all("/init_weight_transfer_engine", *bodies)

    def start_weight_update(self) -> None:
        self._ask_all("/pause?mode=keep", {})  # requests stay, and go on after /resume
        self._ask_all("/collective_rpc", {"method": "tie_weights", "args": [self.tied]})
        self._ask_all("/start_weight_update", {})

    def update_weights(self, update_info: dict) -> None:
        self._ask_all("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask_all("/finish_weight_update", {"weight_version": str(self.step)})
        for answer in self._ask_all("/collective_rpc", {"method": "missing_weights"}):
            check_sent(answer["results"])
        answers = self._ask_all("/reset_prefix_cache?reset_running_requests=true", {})
        if not all(answer["success"] for answer in answers):
            raise RuntimeError(
                f"{' '.join(self.urls)}: could not drop what they cached with the old weights"
            )
        self._ask_all("/resume", {})

    def sync(self, model: PreTrainedModel, step: int) -> None:
        """Give all servers the weights of `model` after a step; all ranks call it."""
        self.world.barrier()
        self.weights.entries = sent_weights(model)
        self.tied = model.all_tied_weights_keys
        self.step = step
        self.synced = sum(
            meta.dtype.itemsize * math.prod(meta.shape) for meta in self.weights.metadata()
        )
        with self._errors_as_failure():
            self.sender.send_weights()  # rank 0 sends, the others only gather
        for _ in self.weights:  # after an error: the other ranks gather the rest
            pass
        # Servers that stay paused after an error would answer no rank.
        failure = max(self.world.all_gather([self.failure]))
        self.failure = self.failure or failure

    # ---- sampling ----

    async def _complete(self, place: int, query: list[int], settings: dict) -> Response | None:
        """Return what a server samples after `query`; None after a failure."""
        # A rank with few conversations would fill the first server only.
        url = self.urls[(self.world.rank + place) % len(self.urls)]
        async with self.free:
            with self._errors_as_failure():
                return await self._sample(url, {"token_ids": query, "sampling_params": settings})

    async def _sample(self, url: str, body: dict) -> Response:
        """Return a response's token ids and, by name, the values of each.

        It may wait behind others at the server, for as long as that answers any of them.
        """
        path = "/inference/v1/generate"
        request = asyncio.create_task(
            self._request(url, path, body, timeout=None, patience=SERVER_PATIENCE)
        )
        self.heard[url] = time.monotonic()
        try:
            while not request.done():
                if time.monotonic() - self.heard[url] > SERVER_ANSWER:
                    raise RuntimeError(f"{url}: {path} gave no answer for {SERVER_ANSWER:.0f} s")
                await asyncio.wait([request], timeout=1.0)
        finally:
            request.cancel()  # vLLM aborts a request whose connection is closed
        self.heard[url] = time.monotonic()
        choice = request.result()["choices"][0]
        if choice["finish_reason"] == "abort":
            raise RuntimeError(f"{url}: another client aborts this run's requests")
        tokens = choice["logprobs"]["content"]
        return [token["token_id"] for token in tokens], {
            "rollout_logprobs": [token["logprob"] for token in tokens],
            "policy_steps": policy_steps(choice["weight_versions"]),
        }
