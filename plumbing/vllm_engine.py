"""vLLM as what samples: in the training process, or as servers over HTTP (scripts/vllm_server.py starts one).

Both have the same few methods: `generate`, `sync` (takes the weights of the trained model), `sleep` and `metrics`.
Token ids go in and come out, each token with its log-probability as it was drawn.
"""

import contextlib
import itertools
import math
import os
import queue
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Callable
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from plumbing.checkpoints import random_state, set_random_state
from plumbing.models import base_weights, merged
from utils import World, fail, first_line, set_num_threads, warn


class Engine:
    """vLLM in this process: token ids in, token ids and their log-probabilities out.

    One engine a rank, or one for --vllm_tensor_parallel neighbouring ranks, which then have to make the same calls. The
    weights are random until the first `sync`.
    """

    backend = "vllm"

    def __init__(self, args, world: World, half: torch.dtype | None):
        # The engine runs in this process, so that it can take the weights from the model in it.
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if world.size % args.vllm_tensor_parallel:
            fail(f"--vllm_tensor_parallel {args.vllm_tensor_parallel}: has to divide the number of ranks, {world.size}")
        import vllm
        from vllm.platforms import current_platform

        self.cpu, self.calls, self.asleep = not torch.cuda.is_available(), itertools.count(), False
        # Not while the next rollout runs beside the training.
        self.sleeps = current_platform.is_sleep_mode_available() and not args.async_steps
        cache = args.kv_cache_gb or (1.0 if self.cpu else torch.cuda.mem_get_info()[1] / 4e9)
        # With kv_cache_memory_bytes the share only says how much has to be free at the start.
        settings = {"enforce_eager": True} if self.cpu else {"gpu_memory_utilization": 0.1}
        settings |= {"enable_sleep_mode": True} if self.sleeps else {}
        settings |= {"distributed_executor_backend": "external_launcher"} if "RANK" in os.environ else {}
        # On a GPU, beside the training, work of both in one stream would wait for the other's.
        self.stream = torch.cuda.Stream() if args.async_steps and not self.cpu else None
        before, threads, ranks = random_state(), torch.get_num_threads(), os.environ.get("LOCAL_WORLD_SIZE")
        try:
            with self._on_stream():  # vLLM keeps the one that it finds here
                self.llm = vllm.LLM(
                    args.model, dtype=half or torch.float32, load_format="dummy", generation_config="vllm",
                    max_model_len=args.max_prompt_length + args.max_response_length, seed=args.seed,
                    max_num_seqs=args.generation_batch_size, kv_cache_memory_bytes=int(cache * 1e9),
                    logprobs_mode="processed_logprobs", disable_log_stats=True,
                    tensor_parallel_size=args.vllm_tensor_parallel, **settings,
                )  # fmt: skip
        except (ValueError, RuntimeError, NotImplementedError) as error:
            why = " ".join(str(error).split())[:300]  # the first line of vLLM's is a heading
            fail(f"--rollout_backend vllm: the engine does not start with --model {args.model}: {why}")
        set_random_state(before)  # vLLM has seeded everything,
        set_num_threads(threads)  # and keeps one thread
        if ranks is not None:
            os.environ["LOCAL_WORLD_SIZE"] = ranks
        share = f", one for {args.vllm_tensor_parallel} ranks" if args.vllm_tensor_parallel > 1 else ""
        sleep = "which is freed while training" if self.sleeps else "which stays (this backend cannot sleep)"
        sleep = "which stays (rollout and training overlap)" if args.async_steps else sleep
        self.about = f"vLLM {vllm.__version__} in this process{share}, with a cache of {cache:.3g} GB, {sleep}"

    @contextlib.contextmanager
    def _on_stream(self):
        """A context for the GPU's work of the engine, which waits for what was begun before it, and ends within it."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        self.stream.synchronize()

    def _quick(self):
        """On a CPU, a context without torch.compile, which would compile for many seconds and gain none."""
        return torch.compiler.set_stance("force_eager") if self.cpu else contextlib.nullcontext()

    def generate(
        self, queries: list[list[int]], seeds: list[int] | None, stop_ids: list[int], args, interrupted: Callable
    ) -> tuple[list[list[int]], list[list[float]]] | None:
        """One response a query.

        Args:
            queries: token ids. seeds: of each response, below 2**63, which alone decide what it draws; None: greedy.
            interrupted: asked at every token, unless several ranks share the engine; once true, the result is None.
        Returns:
            responses, token ids up to and including a stop token; the log-probability of each token as it was drawn.
        """
        from vllm import SamplingParams

        engine, outputs = self.llm.llm_engine, {}
        names = [f"{next(self.calls)}" for _ in queries]
        with self._quick(), self._on_stream():
            try:
                for i, (name, query) in enumerate(zip(names, queries)):
                    draw = (
                        {"temperature": 0.0} if seeds is None else {"temperature": args.temperature, "seed": seeds[i]}
                    )
                    settings = SamplingParams(
                        **draw, top_p=args.top_p, top_k=args.top_k, repetition_penalty=args.repetition_penalty,
                        min_tokens=args.min_response_length, max_tokens=args.max_response_length,
                        stop_token_ids=stop_ids, ignore_eos=True, logprobs=0, detokenize=False,
                    )  # fmt: skip
                    engine.add_request(name, {"prompt_token_ids": query}, settings)
                while engine.has_unfinished_requests():
                    if args.vllm_tensor_parallel == 1 and interrupted():
                        return None
                    outputs |= {done.request_id: done.outputs[0] for done in engine.step() if done.finished}
            finally:  # a request that stays would be in the next rollout
                if engine.has_unfinished_requests():
                    engine.abort_request(names)
        found = [outputs[name] for name in names]
        logprobs = [[each[token].logprob for each, token in zip(x.logprobs, x.token_ids)] for x in found]
        return [list(x.token_ids) for x in found], logprobs

    def sync(self, model: torch.nn.Module) -> None:
        """Give the engine the weights of `model`; wakes it."""
        weights = base_weights(model)
        if self.asleep:
            self.llm.wake_up(["weights"])
        tensors = ((name, merged(tensor, layer)) for name, tensor, layer in weights)  # one whole tensor at a time
        with self._on_stream():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        if self.asleep:
            self.llm.wake_up(["kv_cache"])
        self.asleep = False
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache, which is of the old weights")
        self.synced = sum(tensor.numel() * tensor.element_size() for _, tensor, _ in weights)

    def sleep(self) -> None:
        """Free the memory of weights and cache until the next `sync`, where the backend can."""
        if self.sleeps:
            free, _ = torch.cuda.mem_get_info()
            self.llm.sleep(level=2)
            self.asleep, self.freed_gb = True, (torch.cuda.mem_get_info()[0] - free) / 1e9

    def metrics(self) -> dict[str, float]:
        return {"rollout/sync_gb": self.synced / 1e9}


SERVER_START = 600.0  # seconds that a vLLM server has to answer in when a run starts
SERVER_PATIENCE = 120.0  # seconds that it may be away for, later
SERVER_ANSWER = 1500.0  # seconds that an answer may take: less than the half hour that other ranks wait
SERVER_REQUESTS = 256  # responses under way, for each rank and server
TRANSFER_TIMEOUT = timedelta(minutes=10)  # of one tensor


class ServerError(Exception):
    """What went wrong with a vLLM server, in one line that begins with its address."""


class Servers:
    """vLLM servers (scripts/vllm_server.py) as the rollout engine: they sample over HTTP, rank 0 pushes the weights.

    Weights go through vLLM's own weight transfer, in one process group of rank 0 and all workers of all servers: NCCL
    from a GPU, gloo from a CPU. Each update has a name, and servers say for each response which weights made it: one
    that was restarted, or that another run has sent weights to, ends the run.
    """

    backend = "server"

    def __init__(self, args, world: World, half: torch.dtype | None):
        """Wait for the servers of `--rollout_servers`, check them and connect; one that won't do ends the run.

        Args:
            half: what the run computes in, and sends; None: float32.
        """
        import requests

        self.urls = [url.rstrip("/") for url in args.rollout_servers]
        if not self.urls:
            fail("--rollout_backend server: takes --rollout_servers, such as http://10.0.0.2:8000")
        for url in self.urls:
            if not url.startswith(("http://", "https://")) or self.urls.count(url) > 1:
                fail(f"--rollout_servers {url}: takes addresses such as http://10.0.0.2:8000, each once")
        self.world, self.dtype = world, half or torch.float32
        self.name = world.all_gather([uuid.uuid4().hex[:8]])[0]  # the run's, in the names of its weights
        self.syncs, self.retries, self.weights = 0, 0, []
        self.session = requests.Session()
        self.session.trust_env = False  # proxies are for the world outside
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=SERVER_REQUESTS * len(self.urls)))
        self.about = f"vLLM at {', '.join(self.urls)}"
        if world.main:
            with self._one_line():
                self.served = self._each(lambda url: self._check(url, args))
                self._connect()
        world.barrier()

    @property
    def version(self) -> str:
        """The name of the weights that the servers should have."""
        return f"{self.name}-{self.syncs}"

    def _request(self, url: str, path: str, body: dict | None = None, timeout=60.0, patience=0.0, over=bool) -> dict:
        """What the server answers to POST, or to GET where there is no body.

        No connection, no answer in `timeout` seconds, and the statuses 429 and 5xx are tried again for `patience`
        seconds, unless `over()`. Raises ServerError.
        """
        import requests

        begin, wait = time.monotonic(), 0.5
        while True:
            try:
                transient = True
                ask = self.session.get if body is None else self.session.post
                answer = ask(url + path, json=body, timeout=(10.0, timeout))
                if answer.ok:
                    return answer.json() if answer.content else {}  # /health says nothing
                transient = answer.status_code == 429 or answer.status_code >= 500
                said = f"HTTP status {answer.status_code}: {answer.text[:300]}"
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    said = answer.json()["error"]["message"]
            except requests.Timeout:
                said = "no answer in time"
            except requests.ConnectionError:
                said = "no connection, or it was cut"
            except (requests.RequestException, ValueError) as error:
                said = first_line(error)
            tried = time.monotonic() - begin
            if not transient or tried >= patience or over():
                raise ServerError(f"{url}: {path} failed{f' for {tried:.0f} s' if patience else ''} ({said})")
            self.retries += 1
            time.sleep(min(wait, patience - tried))
            wait = min(2 * wait, 10.0)

    def _each(self, call: Callable[[str], object]) -> list:
        """`call(url)` for all servers side by side: [result]."""
        with ThreadPoolExecutor(len(self.urls)) as pool:
            return list(pool.map(call, self.urls))

    def _post_all(self, path: str, body: dict | None = None) -> list[dict]:
        return self._each(lambda url: self._request(url, path, body or {}, TRANSFER_TIMEOUT.total_seconds()))

    @contextlib.contextmanager
    def _one_line(self):
        """Let a ServerError end the run."""
        try:
            yield
        except ServerError as error:
            fail(f"--rollout_servers {error}", local=True)

    def _check(self, url: str, args) -> dict:
        """What a server says of itself; raises ServerError where it won't do."""
        try:
            self._request(url, "/health", timeout=10.0)
        except ServerError:
            print(f"waiting for the vLLM server at {url}, {SERVER_START:.0f} s at most", flush=True)
            self._request(url, "/health", None, 10.0, SERVER_START)
        try:
            (served, *_) = self._request(url, "/collective_rpc", {"method": "served"})["results"]
        except ServerError:
            raise ServerError(f"{url}: was not started by scripts/vllm_server.py") from None
        length, transfer = args.max_prompt_length + args.max_response_length, self._transfer()
        if served["max_length"] < length:
            raise ServerError(f"{url}: takes {served['max_length']} tokens, prompts and responses have up to {length}")
        if served["logprobs"] != "processed_logprobs" or served["transfer"] != transfer:
            raise ServerError(
                f"{url}: has to give processed log-probs and take weights by {transfer}: scripts/vllm_server.py does"
            )
        if served["dtype"] != str(self.dtype):
            warn(f"--rollout_servers {url}: computes in {served['dtype']}, this run in {self.dtype}")
        return served

    # ---- weights ----

    def _transfer(self) -> str:
        return "nccl" if torch.cuda.is_available() else "gloo"

    def _connect(self) -> None:
        """Open the process group for the weights: this rank is 0 in it, the servers' workers come after. One address of
        this machine has to do for all servers: the one by which it reaches the farthest, as far as that can be told."""
        # Mark each, then read the marks: the same server under two names?
        for path, new in (("/update_weight_version", True), ("/weight_info", False)):
            marks = [(url, f"{self.name} {url}") for url in self.urls]
            answers = [self._request(url, path, {"new_version": mark} if new else None) for url, mark in marks]
        for (url, mark), answer in zip(marks, answers):
            if answer["weight_version"] != mark:
                raise ServerError(f"{url}: is the same server as another one of the list")
        workers = [self._request(url, "/get_world_size")["world_size"] for url in self.urls]
        self.offsets, size = list(itertools.accumulate([1, *workers[:-1]])), 1 + sum(workers)
        local = []
        for url in map(urlsplit, self.urls):
            with socket.create_connection((url.hostname, url.port or {"http": 80}.get(url.scheme, 443)), 10) as way:
                local.append(way.getsockname()[0])
        host = next((address for address in local if not address.startswith("127.") and address != "::1"), local[0])
        if self._transfer() == "nccl":
            return self._connect_nccl(host, size)
        store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
        with ThreadPoolExecutor(1) as pool:
            info = {"master_address": host, "master_port": store.port, "world_size": size}
            joined = pool.submit(self.init_weight_transfer_engine, info)
            with self._or_error_of(joined):
                self.group = dist.ProcessGroupGloo(store, 0, size, TRANSFER_TIMEOUT)

    def _connect_nccl(self, host: str, size: int) -> None:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        class Source(WeightSource):  # vLLM's own reads parameters(), in which a tied head is missing
            def metadata(_) -> list:
                return [ParamMeta(*about) for about in self._listing()]

            def __iter__(_):
                return self._tensors()

        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        info = NCCLTrainerInitInfo(rank=0, master_address=host, master_port=port, world_size=size)
        self.sender = NCCLTrainerWeightTransferEngine.trainer_init(info, client=self, source=Source())

    @contextlib.contextmanager
    def _or_error_of(self, future):
        """Do something that takes the servers' part in it; where that has failed, its error says more."""
        try:
            yield
        except RuntimeError as error:
            future.result()
            raise ServerError(f"{' '.join(self.urls)}: weight transfer failed ({first_line(error)})") from None
        future.result()

    # The four calls that vLLM's trainer makes (its VLLMWeightSyncClient), to all servers at once.

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        def init(url: str) -> dict:
            info = {**init_info, "rank_offset": self.offsets[self.urls.index(url)]}
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

    def _listing(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype on the wire and shape of each weight."""
        kinds = ((name, self.dtype if w.is_floating_point() else w.dtype, w) for name, w, _ in self.weights)
        return [(name, dtype, tuple(weight.shape)) for name, dtype, weight in kinds]

    def _tensors(self):
        for (name, dtype, _), (_, tensor, layer) in zip(self._listing(), self.weights):
            yield name, merged(tensor.detach(), layer).to(dtype).contiguous()

    def sync(self, model) -> None:
        """Give all servers the weights of the model; all ranks call it, when none of them samples."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM sends from a stream of its own, which does not wait for ours
        self.world.barrier()
        self.syncs += 1
        self.weights = base_weights(model)
        if self.world.main:
            with self._one_line():
                if self.syncs == 1:
                    self._check_shapes(model.config)
                if self._transfer() == "nccl":
                    self.sender.send_weights()
                else:
                    self._send()
        elif any(isinstance(weight, DTensor) for _, weight, _ in self.weights):
            for _ in self._tensors():  # rank 0 sends what all of them hold pieces of
                pass
        self.synced = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in self._listing())
        self.weights = []
        self.world.barrier()

    def _send(self) -> None:
        names, dtypes, shapes = zip(*self._listing())
        info = {"names": names, "dtype_names": [str(d).removeprefix("torch.") for d in dtypes], "shapes": shapes}
        self.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            with self._or_error_of(pool.submit(self.update_weights, info)):
                for _, tensor in self._tensors():
                    self.group.broadcast(tensor, 0).wait()
        self.finish_weight_update()

    def _check_shapes(self, config) -> None:
        keys = "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
        for key in (keys + "num_key_value_heads tie_word_embeddings").split():
            for url, served in zip(self.urls, self.served):
                ours, theirs = getattr(config, key, None), served["config"].get(key)
                if None not in (ours, theirs) and ours != theirs:
                    raise ServerError(f"{url}: its model is not like --model: {key} is {theirs} there, {ours} here")

    # ---- sampling ----

    def generate(
        self, queries: list[list[int]], seeds: list[int] | None, stop_ids: list[int], args, interrupted: Callable
    ) -> tuple[list[list[int]], list[list[float]]] | None:
        """One response to each query: token ids, the stop token included, and their log-probs.

        Args:
            seeds: a response's random numbers depend on its seed alone; None: greedy.
            interrupted: asked ten times a second; None is returned once it is true.
        """
        sampling = {
            "max_tokens": args.max_response_length, "min_tokens": args.min_response_length, "logprobs": 0,
            "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, "min_p": 0.0,
            "repetition_penalty": args.repetition_penalty, "stop_token_ids": stop_ids, "ignore_eos": True,
            "detokenize": False,
        }  # fmt: skip
        if seeds is None:
            sampling |= {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
        over, done, name, shares = threading.Event(), queue.SimpleQueue(), uuid.uuid4().hex, []

        def work(url: str, share: queue.SimpleQueue) -> None:
            with contextlib.suppress(queue.Empty):
                while not over.is_set():
                    i = share.get_nowait()
                    seed = {} if seeds is None else {"seed": seeds[i]}
                    body = {"request_id": f"{name}-{i}", "token_ids": queries[i], "sampling_params": sampling | seed}
                    try:
                        done.put((i, self._sample(url, body, over.is_set)))
                    except Exception as error:
                        done.put((i, error))

        for k, url in enumerate(self.urls):
            share = queue.SimpleQueue()
            mine = range((k - self.world.rank) % len(self.urls), len(queries), len(self.urls))
            for i in mine:
                share.put(i)
            shares += [(url, share)] * min(len(mine), SERVER_REQUESTS)
        for share in shares:  # daemons: the process may end while they wait for an answer
            threading.Thread(target=work, args=share, daemon=True).start()
        responses: list = [None] * len(queries)
        left, seen, looked = set(range(len(queries))), dict.fromkeys(self.urls, time.monotonic()), time.monotonic()
        try:
            with self._one_line():
                while left and not interrupted():
                    with contextlib.suppress(queue.Empty):
                        i, responses[i] = done.get(timeout=0.1)
                        if isinstance(responses[i], Exception):
                            raise responses[i]
                        left.remove(i)
                    if time.monotonic() - looked > 10:
                        self._look_after(seen)
                        looked = time.monotonic()
        finally:
            over.set()
            if left:
                ids = [f"generate-tokens-{name}-{i}" for i in left]
                with contextlib.suppress(ServerError):
                    self._each(lambda url: self._request(url, "/abort_requests", {"request_ids": ids}, 5.0))
        return None if left else ([ids for ids, _ in responses], [logprobs for _, logprobs in responses])

    def _look_after(self, seen: dict[str, float]) -> None:
        """Note which servers are alive; raises ServerError where one was not for long (a lost machine cuts nothing)."""
        for url in self.urls:
            with contextlib.suppress(ServerError):
                self._request(url, "/health", timeout=5.0)
                seen[url] = time.monotonic()
            if time.monotonic() - seen[url] > SERVER_PATIENCE:
                raise ServerError(f"{url}: gave no sign of life for {time.monotonic() - seen[url]:.0f} s")

    def _sample(self, url: str, body: dict, over: Callable) -> tuple[list[int], list[float]]:
        for _ in range(5):
            answer = self._request(url, "/inference/v1/generate", body, SERVER_ANSWER, SERVER_PATIENCE, over)
            choice = answer["choices"][0]
            versions = {span["version"] for span in choice.get("weight_versions") or ()}
            if self.syncs and versions - {self.version}:
                raise ServerError(f"{url}: has other weights than this run's: restarted, or used by another run?")
            if choice["finish_reason"] != "abort":
                tokens = choice["logprobs"]["content"]
                return [token["token_id"] for token in tokens], [token["logprob"] for token in tokens]
            if over():
                break
            time.sleep(1)
        raise ServerError(f"{url}: someone else aborts this run's requests")

    def sleep(self) -> None:
        """Nothing to do: the servers' memory is theirs."""

    def metrics(self) -> dict[str, float]:
        """Size of the last weight sync, and HTTP requests of this rank that were tried again, in the whole run."""
        return {"rollout/sync_gb": self.synced / 1e9, "rollout/retries": self.retries}
