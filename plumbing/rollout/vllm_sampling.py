"""What vLLM's two engines have in common: responses and turns, each a request."""

import asyncio
import contextlib
import importlib.util
from typing import Callable

from utils import first_line

WATCH = "plumbing.rollout.vllm_sampling.WeightWatch"  # vLLM's worker_extension_cls
Response = tuple[list[int], list[float]]  # token ids up to and including a stop token, log-probabilities of each


def obstacle(args) -> str:
    """Return why vLLM cannot sample here or with these flags; "" if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed (pip install vllm==0.32.0)"
    if args.precision == "float64":
        return "vLLM does not compute with --precision float64"
    if args.temperature > 2:
        return f"--temperature {args.temperature}: vLLM requires at most 2"
    return ""


def sampling_settings(seed: int | None, stop_ids: list[int], args) -> dict:
    """Return the fields of vLLM's SamplingParams for a response; without a seed it is greedy."""
    draw = {"temperature": 0.0}
    if seed is not None:
        draw = {"temperature": args.temperature, "top_p": args.top_p, "seed": seed}
    return {
        **draw, "repetition_penalty": args.repetition_penalty,
        "min_tokens": args.min_response_length, "max_tokens": args.max_response_length,
        "stop_token_ids": stop_ids, "ignore_eos": True, "logprobs": 0, "detokenize": False,
    }  # fmt: skip


class WeightWatch:
    """Mixed into vLLM's workers, which only log it if they have weights that no sync has sent."""

    def watch_weights(self) -> None:
        """Begin to record the names of the weights that are loaded."""
        self.model_weights = {name for name, _ in self.get_model().named_parameters()}
        self.loaded, load = set(), self.get_model().load_weights

        def load_and_record(weights):
            self.loaded |= (names := load(weights))
            return names

        self.get_model().load_weights = load_and_record

    def missing_weights(self) -> list[str]:
        """Return the model's weights that have not been loaded since the last call."""
        loaded, self.loaded = self.loaded, set()
        return sorted(self.model_weights - loaded)


def check_sent(of_workers: list[list[str]]) -> None:
    """Raise RuntimeError if the `missing_weights` of a worker are any."""
    if missing := sorted(set().union(*of_workers)):
        raise RuntimeError(f"{len(missing)} of its weights are none of the trained model's: {', '.join(missing[:3])}")


class VllmSampling:
    """A rollout engine, which samples from a copy of the trained policy.

    Log-probabilities are those of the distribution that is sampled: after the temperature, top_p and the other limits.
    Seeds are below 2**63, and a response depends on its query, its seed and the weights only. `interrupted` is called
    again and again; once it is true, or after a failure, the result is None. Subclasses define
    `_complete(query, settings, interrupted)`, which samples one response, and `sync(model)`, which gives the engine the
    weights of the trained model: all ranks call it, and none of them samples meanwhile.

    Attributes:
        failure: why the engine no longer works, in one line; "" while it works. Run.leave saves and prints it.
        about: what the run prints at its start.
        synced: bytes of weights in the last sync.
    """

    failure, about, synced = "", "", 0

    @contextlib.contextmanager
    def _errors_as_failure(self):
        """Keep the line of what is raised first in `failure`."""
        try:
            yield
        except Exception as error:  # of any type
            self.failure = self.failure or f"vLLM failed ({type(error).__name__}: {first_line(error)})"

    def generate(
        self, queries: list[list[int]], seeds: list[int] | None, stop_ids: list[int], args, interrupted: Callable
    ) -> tuple[list[list[int]], list[dict[str, list[float]]]] | None:
        """Return a response to each of this rank's queries and, by name, the values of its tokens.

        Args:
            seeds: one a response; None for greedy responses.
        """

        async def all_responses() -> list[Response | None]:
            each = [sampling_settings(seed, stop_ids, args) for seed in seeds or [None] * len(queries)]
            return await asyncio.gather(*(self._complete(*pair, interrupted) for pair in zip(queries, each)))

        responses = asyncio.run(all_responses())
        if None in responses:
            return None
        return [ids for ids, _ in responses], [{"rollout_logprobs": logprobs} for _, logprobs in responses]

    async def sample(
        self, query: list[int], seed: int | None, length: int, stop_ids: list[int], args, interrupted: Callable
    ) -> Response | None:
        """Return one turn of a conversation, each of which is a task of one event loop.

        A turn ends with a stop token or with the token that completes one of args.turn_stop. The turns before
        it are in the engine's cache.

        Args:
            query: all that stands before the turn. length: the maximum number of tokens of the turn.
        """
        settings = sampling_settings(seed, stop_ids, args) | {"min_tokens": 0, "max_tokens": length}
        if args.turn_stop:  # the text of a special token counts, too: a model may end its calls with one
            settings |= {"stop": list(args.turn_stop), "include_stop_str_in_output": True}
            settings |= {"detokenize": True, "skip_special_tokens": False}
        return await self._complete(query, settings, interrupted)

    def sleep(self) -> None:
        """Free the engine's memory until the next `sync`, if it can."""

    def metrics(self) -> dict[str, float]:
        """Return what the engine adds to a line of metrics.jsonl: the GB of the last sync."""
        return {"rollout/sync_gb": self.synced / 1e9}
