"""vLLM on other GPUs or machines (--rollout_backend server), which scripts/vllm_server.py starts.

The servers sample over HTTP, and rank 0 sends them the weights by vLLM's own weight transfer: by NCCL from a GPU, by
gloo from a CPU. A key in the variable VLLM_API_KEY goes with every request. plumbing/rollout/engines.py says what an engine
offers. Imports plumbing.rollout.engines (responses and turns), plumbing.models.lora (weights by name) and plumbing.rollout.vllm_weights (how
they are sent).
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import socket
import time
import uuid
import weakref
from typing import Callable
from urllib.parse import urlsplit

import aiohttp
import torch
from torch.distributed.tensor import DTensor

from plumbing.models.lora import base_weights
from plumbing.rollout.engines import VllmSampling
from plumbing.rollout.vllm_weights import TRANSFER_TIMEOUT, GlooSender, ServerError, Weights
from utils import World, fail, first_line, warn

SERVER_START = 600.0  # seconds in which a server has to answer when a run starts
SERVER_PATIENCE = 120.0  # seconds for which a server may be away later
SERVER_ANSWER = 1500.0  # seconds that a response may take: less than the half hour that other ranks wait
SERVER_REQUESTS = 256  # requests under way, for each rank and server
SHAPE = (  # what the configs of the trained and the served model have to agree in
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "head_dim", "num_key_value_heads", "tie_word_embeddings",
)  # fmt: skip


class Servers(VllmSampling):
    """vLLM servers as one rollout engine: each samples its share of every rank's queries.

    Each update of the weights has a name, and the servers say with each response which weights made it: a server that
    was restarted, or that another run has sent weights to, ends the run.
    """

    def __init__(self, args, world: World, compute_dtype: torch.dtype | None):
        """Wait for the servers of --rollout_servers, check them and connect; end the run if one will not do.

        Args:
            compute_dtype: number format in which the trainer computes and the weights are sent; None: float32.
        """
        self.urls = [url.rstrip("/") for url in args.rollout_servers]
        for url in self.urls:
            if not url.startswith(("http://", "https://")) or self.urls.count(url) > 1:
                fail(f"--rollout_servers {url}: takes addresses such as http://10.0.0.2:8000, each once")
        self.world, self.weights = world, Weights(compute_dtype or torch.float32)
        self.run = world.all_gather([uuid.uuid4().hex[:8]])[0]
        self.transfer = "nccl" if torch.cuda.is_available() else "gloo"
        self.version = ""  # name of the weights that the servers should have: run and number of the sync
        self.syncs, self.retries, self.failure = 0, 0, ""
        self.requests: set[asyncio.Task] = set()  # under way
        self.watching: asyncio.Task | None = None  # what cancels them
        self.server_of = weakref.WeakKeyDictionary()  # address of the server of each task that samples
        self.next_server = itertools.cycle(self.urls)
        for _ in range(world.rank % len(self.urls)):  # a rank with few conversations would fill the first one only
            next(self.next_server)
        key = os.environ.get("VLLM_API_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.about = f"vLLM at {', '.join(self.urls)}"
        if world.main:
            with self._errors_end_the_run():
                self.served = self._each(lambda url: self._check(url, args))
                self._connect()
        world.barrier()

    async def _request(self, url: str, path: str, body: dict | None = None, timeout=60.0, patience=0.0) -> dict:
        """Return what the server answers to a POST of `body`, or to a GET if there is none.

        Without a connection, after `timeout` seconds of silence and at the statuses 429 and 5xx, the request is sent
        again for `patience` seconds. (urllib3's Retry counts attempts, not seconds, and cannot be cancelled.)
        Raises ServerError.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=timeout)
        method, begin, wait = "GET" if body is None else "POST", time.monotonic(), 0.5
        options = {"json": body, "timeout": limits, "headers": self.headers}
        while True:
            transient = True
            try:
                async with aiohttp.request(method, url + path, **options) as answer:
                    text = await answer.text()
                if answer.ok:
                    return json.loads(text) if text else {}  # /health answers without words
                transient = answer.status == 429 or answer.status >= 500
                why = f"HTTP status {answer.status}: {text[:300]}"
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    why = json.loads(text)["error"]["message"]
            except aiohttp.ServerTimeoutError:
                why = "no answer in time"
            except aiohttp.ClientConnectionError:
                why = "no connection, or it was cut"
            except (aiohttp.ClientError, ValueError) as error:
                why = first_line(error)
            tried = time.monotonic() - begin
            if not transient or tried >= patience:
                raise ServerError(f"{url}: {path} failed{f' for {tried:.0f} s' if patience else ''} ({why})")
            self.retries += 1
            await asyncio.sleep(min(wait, patience - tried))
            wait = min(2 * wait, 10.0)

    def _each(self, call: Callable) -> list:
        """Return [await call(url)] of all servers, asked at the same time."""

        async def gather() -> list:
            return await asyncio.gather(*map(call, self.urls))

        return asyncio.run(gather())

    def _post_all(self, path: str, body: dict | None = None) -> list[dict]:
        return self._each(lambda url: self._request(url, path, body or {}, TRANSFER_TIMEOUT.total_seconds()))

    @contextlib.contextmanager
    def _errors_end_the_run(self):
        """End the run with the one line of a ServerError."""
        try:
            yield
        except ServerError as error:
            fail(f"--rollout_servers {error}", local=True)

    @contextlib.contextmanager
    def _errors_as_failure(self):
        """Keep the line of the first ServerError in `failure`."""
        try:
            yield
        except ServerError as error:
            self.failure = self.failure or str(error)

    async def _check(self, url: str, args) -> dict:
        """Return what plumbing/rollout/vllm_worker.py says of a server; raise ServerError if the run cannot use it."""
        try:
            await self._request(url, "/health", timeout=10.0)
        except ServerError:
            print(f"waiting for the vLLM server at {url}, {SERVER_START:.0f} s at most", flush=True)
            await self._request(url, "/health", timeout=10.0, patience=SERVER_START)
        try:
            (served, *_) = (await self._request(url, "/collective_rpc", {"method": "served"}))["results"]
        except ServerError as error:
            raise ServerError(f"{error}; scripts/vllm_server.py starts servers that a run can use") from None
        length = args.max_prompt_length + args.max_response_length
        if served["max_length"] < length:
            raise ServerError(f"{url}: takes {served['max_length']} tokens, prompts and responses have up to {length}")
        if served["logprobs"] != "processed_logprobs" or served["transfer"] != self.transfer:
            needs = f"has to give processed log-probs and take weights by {self.transfer}"
            raise ServerError(f"{url}: {needs}: scripts/vllm_server.py does")
        if self.transfer == "gloo" and served["config"].get("num_experts_per_tok"):
            raise ServerError(f"{url}: on a CPU, vLLM takes no new weights of experts, as its model has")
        if served["dtype"] != str(self.weights.dtype):
            warn(f"--rollout_servers {url}: computes in {served['dtype']}, this run in {self.weights.dtype}")
        return served

    # ---- weights ----

    def _connect(self) -> None:
        """Open the process group for the weights: rank 0 is this process, then come the workers of each server."""
        servers = [served["server"] for served in self.served]
        for i, url in enumerate(self.urls):
            if servers[i] in servers[:i]:
                raise ServerError(f"{url}: is the same server as another one of the list")
        workers = [answer["world_size"] for answer in self._each(lambda url: self._request(url, "/get_world_size"))]
        self.rank_offsets = dict(zip(self.urls, itertools.accumulate([1, *workers[:-1]])))
        host, size = self._address(), 1 + sum(workers)
        if self.transfer == "gloo":
            self.sender = GlooSender(self, self.weights, host, size)
            return
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        info = NCCLTrainerInitInfo(rank=0, master_address=host, master_port=port, world_size=size)
        self.sender = NCCLTrainerWeightTransferEngine.trainer_init(info, client=self, source=self.weights)

    def _address(self) -> str:
        """Return the address of this machine that the servers reach: the first one that is not its loopback."""
        found = []
        for url in map(urlsplit, self.urls):
            port = url.port or {"http": 80, "https": 443}[url.scheme]
            with socket.create_connection((url.hostname, port), timeout=10) as connection:
                found.append(connection.getsockname()[0])
        return next((address for address in found if not address.startswith("127.") and address != "::1"), found[0])

    # The four calls that vLLM's trainer makes (its VLLMWeightSyncClient), to all servers at once.

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        def init(url: str):
            info = {**init_info, "rank_offset": self.rank_offsets[url]}
            return self._request(url, "/init_weight_transfer_engine", {"init_info": info}, SERVER_START)

        self._each(init)

    def start_weight_update(self) -> None:
        self._post_all("/start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self._post_all("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post_all("/finish_weight_update", {"weight_version": weight_version or self.version})
        if not all(answer["success"] for answer in self._post_all("/reset_prefix_cache?reset_running_requests=true")):
            raise ServerError(f"{' '.join(self.urls)}: could not drop what they cached with the old weights")

    def sync(self, model) -> None:
        """Give all servers the weights of `model`; all ranks call it, while none of them samples."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM sends from a stream of its own, which does not wait for ours
        self.world.barrier()
        self.syncs += 1
        self.version = f"{self.run}-{self.syncs}"
        self.weights.entries = base_weights(model)
        self.synced = sum(meta.dtype.itemsize * math.prod(meta.shape) for meta in self.weights.metadata())
        sharded = any(isinstance(weight, DTensor) for _, weight, _ in self.weights.entries)
        if self.world.main:
            with self._errors_end_the_run():
                if self.syncs == 1:
                    self._check_shapes(model.config)
            try:
                self.sender.send_weights()
            except (ServerError, RuntimeError) as error:  # vLLM's and torch's own, of NCCL, too
                self.failure = first_line(error)
        if sharded:
            for _ in self.weights:  # rank 0 gathers each tensor from all ranks, those that it could not send, too
                pass
        self.weights.entries = []
        self.world.barrier()

    def _check_shapes(self, config) -> None:
        for key in SHAPE:
            for url, served in zip(self.urls, self.served):
                ours, theirs = getattr(config, key, None), served["config"].get(key)
                if None not in (ours, theirs) and ours != theirs:
                    raise ServerError(f"{url}: its model is not like --model: {key} is {theirs} there, {ours} here")

    # ---- sampling ----

    async def _complete(
        self, query: list[int], settings: dict, interrupted: Callable
    ) -> tuple[list[int], list[float]] | None:
        """Return what a server samples after `query`; None if interrupted or failed.

        All turns of a task are sampled by one server, which has the conversation in its cache.
        """
        if self.failure:
            return None
        if self.watching is None or self.watching.done():
            self.slots = {url: asyncio.Semaphore(SERVER_REQUESTS) for url in self.urls}
            self.watching = asyncio.create_task(self._watch(interrupted))
        task = asyncio.current_task()
        if task not in self.server_of:
            self.server_of[task] = next(self.next_server)
        body = {"token_ids": query, "sampling_params": settings}
        request = asyncio.create_task(self._sample(self.server_of[task], body))
        self.requests.add(request)
        request.add_done_callback(self.requests.discard)
        await asyncio.wait([request])
        with self._errors_as_failure():
            return None if request.cancelled() else request.result()

    async def _watch(self, interrupted: Callable) -> None:
        """Cancel all requests once `interrupted()`, which is asked every 0.1 s, or after a failure."""
        watches = [asyncio.create_task(self._watch_health(url)) for url in self.urls]
        while self.requests and not self.failure and not interrupted():
            await asyncio.sleep(0.1)
        for task in [*watches, *self.requests]:
            task.cancel()  # vLLM aborts a request whose connection is closed

    async def _sample(self, url: str, body: dict) -> tuple[list[int], list[float]]:
        """Return a response's token ids and log-probabilities."""
        for _ in range(5):
            async with self.slots[url]:
                answer = await self._request(url, "/inference/v1/generate", body, SERVER_ANSWER, SERVER_PATIENCE)
            choice = answer["choices"][0]
            versions = {span["version"] for span in choice.get("weight_versions") or ()}
            if self.version and versions - {self.version}:
                raise ServerError(f"{url}: has other weights than this run's: restarted, or used by another run?")
            if choice["finish_reason"] != "abort":
                tokens = choice["logprobs"]["content"]
                return [token["token_id"] for token in tokens], [token["logprob"] for token in tokens]
            await asyncio.sleep(1)
        raise ServerError(f"{url}: someone else aborts this run's requests")

    async def _watch_health(self, url: str) -> None:
        """Set `failure` if a server is away for SERVER_PATIENCE: a machine that is lost closes no connection."""
        with self._errors_as_failure():
            while True:
                await asyncio.sleep(10)
                await self._request(url, "/health", timeout=5.0, patience=SERVER_PATIENCE)

    def sleep(self) -> None:
        """Do nothing: the memory is the servers' own."""

    def metrics(self) -> dict[str, float]:
        """Return the GB of the last sync, and how many of this rank's requests were sent again since the start."""
        return {"rollout/sync_gb": self.synced / 1e9, "rollout/retries": self.retries}
