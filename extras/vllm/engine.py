"""What vLLM's two engines have in common, and the one in the training process (--rollout_backend
vllm).
"""

import asyncio
import contextlib
import itertools
import os
import threading
from typing import Any, Callable, Coroutine, Iterable

import torch
from transformers import PreTrainedModel

from plumbing.models.config import positions_of
from plumbing.models.sharding import base_weights, merged
from plumbing.tasks import run_all
from utils import UserError, World, first_line

WATCH = "extras.vllm.engine.WeightWatch"  # vLLM's worker_extension_cls
# Token ids up to and including a stop token; by name, an output of each.
Response = tuple[list[int], dict[str, list]]
CPU_SETTINGS = {  # of vLLM's CPU build, on which the tests run
    "enforce_eager": True,
    # It would turn back a seeded request's generator, which a CPU's cannot do.
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 65_536,
    "block_size": 32,  # the cache holds only whole blocks of a conversation
}


def sampling_settings(seed: int | None, length: int, stop_ids: list[int], args: Any) -> dict:
    """Return the fields of vLLM's SamplingParams for a response or a turn of at most `length` tokens;
    without a seed it is greedy.
    """
    return {
        "temperature": 0.0 if seed is None else args.temperature,
        "top_p": args.top_p,
        "seed": seed,
        "repetition_penalty": args.repetition_penalty,
        "min_tokens": args.min_response_length,
        "max_tokens": length,
        "stop_token_ids": stop_ids,
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": bool(args.turn_stop),
        "stop": list(args.turn_stop),
        "include_stop_str_in_output": True,
        # The text of a special token counts, too: a model may end its calls with one.
        "skip_special_tokens": False,
    }


def policy_steps(spans: Iterable[dict]) -> list[int]:
    """Return how many steps the policy had trained that sampled each token, from vLLM's spans of
    weight versions.
    """
    return [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]


def sent_weights(model: PreTrainedModel) -> list[tuple]:
    """Return the `base_weights` that a sync sends: all but those that are tied to another one."""
    tied = model.all_tied_weights_keys
    return [entry for entry in base_weights(model) if entry[0] not in tied]


class WeightWatch:
    """Mixed into vLLM's workers, which only log it if they have weights that no sync has sent."""

    get_model: Callable  # of the worker
    tied: dict[str, str] = {}

    def tie_weights(self, tied: dict[str, str]) -> None:
        """Take weights that no sync sends, {name: another one's name}, for equal to another one.

        vLLM has to load a tied head, too: it may compute with a copy.
        """
        self.tied = tied

    def watch_weights(self) -> None:
        """Begin to record the names of the weights that are loaded."""
        model = self.get_model()
        load = model.load_weights
        self.loaded: set[str] = set()

        def with_tied(weights: Iterable[tuple[str, torch.Tensor]]):
            for name, tensor in weights:
                yield name, tensor
                yield from ((other, tensor) for other, sent in self.tied.items() if sent == name)

        def load_and_record(weights: Iterable[tuple[str, torch.Tensor]]):
            names = load(with_tied(weights))
            self.loaded |= names
            return names

        model.load_weights = load_and_record

    def missing_weights(self) -> list[str]:
        """Return the model's weights that have not been loaded since the last call."""
        missing = {name for name, _ in self.get_model().named_parameters()} - self.loaded
        self.loaded = set()
        return sorted(missing)


def check_sent(of_workers: list[list[str]]) -> None:
    """Raise RuntimeError if the `missing_weights` of a worker are any."""
    if missing := sorted(set().union(*of_workers)):
        raise RuntimeError(
            f"{len(missing)} of its weights are none of the trained model's: {', '.join(missing[:3])}"
        )


class VllmSampling:
    """A rollout engine, which samples from a copy of the trained policy.

    The requests of all threads run in one event loop, in a thread of its own. Log-probabilities are
    those of the distribution that is sampled: after the temperature, top_p and the other limits.
    Seeds are below 2**63, and a response depends on its query, its seed and the weights only.
    Subclasses define `_complete(place, query, settings)`, which samples one response, and
    `sync(model, step)`, which gives the engine the weights that the model has after a step: all
    ranks call it. Requests under way go on with them, as if their tokens so far were the query.

    Attributes:
        failure: why the engine no longer works, in one line; "" while it works. Run.save_and_exit saves and prints it.
        about: what the run prints at its start.
        synced: bytes of weights in the last sync.
        is_shared: whether several ranks share it. They do not ask whether they are interrupted:
            all of them have to make every step.
    """

    _complete: Callable
    sync: Callable
    failure = ""
    about = ""
    synced = 0
    is_shared = False

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        self.loop.run_forever()

    def run(self, work: Coroutine) -> Any:
        """Return what a coroutine returns, which runs in the engine's thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def run_all(self, calls: Iterable[Coroutine], interrupted: Callable) -> None:
        """Run coroutines that sample in the engine's thread, see `plumbing.tasks.run_all`; once
        interrupted, or after a failure, they are cancelled.
        """
        self.run(run_all(calls, lambda: self._has_ended(interrupted)))

    def _has_ended(self, interrupted: Callable) -> bool:
        return bool(self.failure) or interrupted() and not self.is_shared

    @contextlib.contextmanager
    def _errors_as_failure(self):
        """Keep the line of what is raised first in `failure`."""
        try:
            yield
        except Exception as error:  # of any type
            self.failure = (
                self.failure or f"vLLM failed ({type(error).__name__}: {first_line(error)})"
            )

    def generate(
        self,
        queries: list[list[int]],
        seeds: list[int] | None,
        stop_ids: list[int],
        args: Any,
        interrupted: Callable,
        end: Callable,
    ) -> None:
        """Sample a response to each of this rank's queries.

        Args:
            seeds: one per response; None for greedy responses.
            end: called with the place of a query, its response and, by name, the outputs of its
                tokens: once it has ended, so for all queries unless this is interrupted or fails.
        """

        async def respond(place: int, query: list[int], seed: int | None) -> None:
            length = args.max_response_length
            response = await self.sample(place, query, seed, length, stop_ids, args, interrupted)
            if response is not None:
                end(place, *response)

        calls = map(respond, range(len(queries)), queries, seeds or itertools.repeat(None))
        self.run_all(calls, interrupted)

    async def sample(
        self,
        place: int,
        query: list[int],
        seed: int | None,
        length: int,
        stop_ids: list[int],
        args: Any,
        interrupted: Callable,
    ) -> Response | None:
        """Return what is sampled after `query`: a response, or one turn of a conversation; None once
        interrupted, or after a failure.

        It ends with a stop token, with the token that completes one of args.turn_stop, or after
        `length` tokens. All turns of a conversation have one `place`: where the engine has those
        before in its cache.
        """
        if self._has_ended(interrupted):
            return None
        settings = sampling_settings(seed, length, stop_ids, args)
        return await self._complete(place, query, settings)

    def sleep(self) -> None:
        """Free the engine's memory until the next `sync`, if it can."""

    def metrics(self) -> dict[str, float]:
        """Return what the engine adds to a line of metrics.jsonl: the GB of the last sync."""
        return {"rollout/sync_gb": self.synced / 1e9}


class Engine(VllmSampling):
    """vLLM's engine in this process: one per rank, or one for --vllm_tensor_parallel neighbouring
    ranks.

    Ranks that share an engine have to make the same calls.
    """

    def __init__(
        self, args: Any, world: World, compute_dtype: torch.dtype | None, load_format: str = "dummy"
    ):
        """Start the engine, or raise a UserError.

        Args:
            compute_dtype: of its matrix products; None: float32.
            load_format: "dummy" for random weights until the first `sync`, "auto" for those of
                --model.
        """
        super().__init__()
        # An engine in another process could not receive the trainer's tensors without copies.
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if world.size % args.vllm_tensor_parallel:
            raise UserError(
                f"--vllm_tensor_parallel {args.vllm_tensor_parallel}: must divide the number of ranks, {world.size}"
            )
        import vllm
        from vllm.platforms import current_platform

        on_gpu = torch.cuda.is_available()
        # Rollouts ahead sample while a step trains, when a synchronous engine would sleep.
        self.can_sleep = current_platform.is_sleep_mode_available() and not args.async_steps
        self.is_shared = args.vllm_tensor_parallel > 1
        self.numbers = itertools.count()  # of the requests
        self.waiting: dict[str, asyncio.Future] = {}  # requests under way
        self.stepping: asyncio.Task | None = None  # what serves them
        cache_gb = args.kv_cache_gb or (torch.cuda.mem_get_info()[1] / 4e9 if on_gpu else 1.0)
        # Where kv_cache_memory_bytes is given, gpu_memory_utilization is only what has to be free
        # at the start.
        settings: dict[str, Any] = {"gpu_memory_utilization": 0.1} if on_gpu else dict(CPU_SETTINGS)
        if "RANK" in os.environ:
            settings["distributed_executor_backend"] = "external_launcher"
        # Rollout and training overlap on a GPU only if their kernels are not queued in the same
        # stream.
        stream = torch.cuda.Stream() if on_gpu else None
        # vLLM's CPU build would compile for 20 s and gain nothing; the trainer may, with --compile.
        self.stance = "default" if on_gpu else "force_eager"
        threads = torch.get_num_threads()
        try:
            with torch.cuda.stream(stream), torch.compiler.set_stance(self.stance):
                self.llm = vllm.LLM(
                    args.model,
                    dtype=compute_dtype or torch.float32,
                    load_format=load_format,
                    generation_config="vllm",
                    max_model_len=min(
                        args.max_prompt_length + args.max_response_length,
                        positions_of(args.model),
                    ),
                    seed=args.seed,
                    max_num_seqs=args.generation_batch_size,
                    kv_cache_memory_bytes=int(cache_gb * 1e9),
                    logprobs_mode="processed_logprobs",
                    disable_log_stats=True,
                    enable_sleep_mode=self.can_sleep,
                    tensor_parallel_size=args.vllm_tensor_parallel,
                    language_model_only=True,
                    worker_extension_cls=WATCH,
                    **settings,
                )
        except (OSError, ValueError, RuntimeError) as error:
            # All lines: vLLM's first one is only a heading.
            raise UserError(
                f"--model {args.model}: vLLM does not start with it: {' '.join(str(error).split())[:300]}"
            ) from error
        if stream is not None:
            # Of a thread, as its device is, which this sets, too.
            self.loop.call_soon_threadsafe(torch.cuda.set_stream, stream)
        self.llm.collective_rpc("watch_weights")
        self.llm.llm_engine.set_weight_version("0")
        # LLM() leaves one, too few for an optimizer on the CPU (--shard fsdp_offload)
        torch.set_num_threads(threads)
        self.about = (
            f"vLLM {vllm.__version__} in this process, with a cache of {cache_gb:.3g} GB"
            f"{', freed while training' if self.can_sleep else ''}"
        )

    async def _complete(self, place: int, query: list[int], settings: dict) -> Response | None:
        """Return what vLLM samples after `query`; None after a failure."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        engine = self.llm.llm_engine
        number = str(next(self.numbers))
        with self._errors_as_failure():
            # By default, vLLM would make an object of each token's response so far.
            sampling = SamplingParams(**settings, output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(number, {"prompt_token_ids": query}, sampling)
        if self.failure:
            return None
        self.waiting[number] = self.loop.create_future()
        if self.stepping is None or self.stepping.done():
            self.stepping = asyncio.create_task(self._step())
        try:
            output = await self.waiting[number]
        finally:
            if self.waiting.pop(number).cancelled():
                with self._errors_as_failure():
                    engine.abort_request([number])
        logprobs = [each[token].logprob for each, token in zip(output.logprobs, output.token_ids)]
        return list(output.token_ids), {
            "rollout_logprobs": logprobs,
            "policy_steps": policy_steps(map(vars, output.weight_versions)),
        }

    async def _step(self) -> None:
        """Make vLLM's steps while a request waits; after each step, resume the tasks whose
        responses are complete, and let `sync` load new weights.
        """
        with self._errors_as_failure(), torch.compiler.set_stance(self.stance):
            while self.waiting and not self.failure:  # it may have half of the new weights
                for output in self.llm.llm_engine.step():
                    future = self.waiting[output.request_id]
                    if not future.done():  # its task may have been cancelled
                        future.set_result(output.outputs[0])
                await asyncio.sleep(0)

    def sync(self, model: PreTrainedModel, step: int) -> None:
        """Give the engine the weights of `model` after a step, and wake it."""
        self.run(self._load(model, step))

    async def _load(self, model: PreTrainedModel, step: int) -> None:
        weights = sent_weights(model)
        # A generator, so that of a sharded model one tensor at a time is gathered.
        full_tensors = ((name, merged(tensor, layer)) for name, tensor, layer in weights)
        with self._errors_as_failure(), torch.compiler.set_stance(self.stance):
            if self.can_sleep:  # if it is awake, vLLM does nothing
                self.llm.wake_up(["weights"])
            self.llm.collective_rpc("tie_weights", args=(model.all_tied_weights_keys,))
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": full_tensors})
            check_sent(self.llm.collective_rpc("missing_weights"))
            if self.can_sleep:
                self.llm.wake_up(["kv_cache"])
            if not self.llm.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("it did not drop its prefix cache, which is of the old weights")
            self.llm.llm_engine.set_weight_version(str(step))
        for _ in full_tensors:  # after an error: the other ranks gather the rest
            pass
        self.synced = sum(tensor.numel() * tensor.element_size() for _, tensor, _ in weights)

    def sleep(self) -> None:
        """Free the GPU memory of weights and cache until the next `sync`, if this platform can."""
        if self.can_sleep:
            self.llm.sleep(level=2)
