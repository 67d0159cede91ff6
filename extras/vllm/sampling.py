"""What vLLM's two engines share: how they are asked for responses, and what a sync brings.

extras/vllm/engine.py has the engine in the training process, extras/vllm/servers.py the engine that
asks servers.
"""

import base64
import contextlib
from typing import Any, Callable, Coroutine, Iterable, Iterator

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedModel

from plumbing.models.sharding import base_weights, merged
from plumbing.processes import EventLoop, run_all
from utils import first_line, full_tensor

WORKER_EXTENSION = "extras.vllm.sampling.WorkerExtension"  # vLLM's worker_extension_cls
# Of vLLM's LoRARequest. There is no such file: the adapter is in memory when a request names it.
ADAPTER = {"lora_name": "policy", "lora_int_id": 1, "lora_path": "/policy"}
# (T,) int32, token ids up to and including a stop token; and by name, (T,) float32.
Response = tuple[np.ndarray, dict[str, np.ndarray]]
Adapter = tuple[bytes, int, int]  # of `packed_adapter`


def sampling_settings(seed: int | None, length: int, stop_ids: list[int], args: Any) -> dict:
    """Return the fields of vLLM's SamplingParams for a response, or a turn of a conversation, of at
    most `length` tokens. Without a seed it is greedy.

    Args:
        args: the flags of a script: those of plumbing.cli.RolloutArgs and ConversationArgs, and
            temperature.
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
        # --turn_stop may name a special token: some models end their calls with one.
        "skip_special_tokens": False,
    }


def response_of(tokens: list[int], logprobs: list[float], spans: Iterable[Any]) -> Response:
    """Return a response of vLLM, and for each token its log-probability and how many steps its policy
    had trained.

    Args:
        spans: of weight versions.
    """
    steps = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    return np.array(tokens, np.int32), {
        "rollout_logprobs": np.array(logprobs, np.float32),
        "policy_steps": np.array(steps, np.float32),
    }


def sent_weights(model: PreTrainedModel) -> list[tuple[str, Tensor, Any]]:
    """Return the `base_weights` that a sync sends: all except those that are tied to another one."""
    tied = model.all_tied_weights_keys
    return [entry for entry in base_weights(model) if entry[0] not in tied]


class WorkerExtension:
    """Mixed into vLLM's workers: finds out which weights a sync has not loaded, as vLLM itself only
    logs them and goes on; and loads an adapter from memory, where vLLM itself reads a folder.
    """

    get_model: Callable  # of the worker, as these
    model_runner: Any
    vllm_config: Any

    def watch_weights(self, tied: dict[str, str]) -> None:
        """Begin to record which weights are loaded.

        Args:
            tied: name of a tied weight, which no sync sends -> name of the weight that it is tied
                to. Both are loaded, as vLLM may compute with a copy of a tied head.
        """
        model = self.get_model()
        load = model.load_weights
        self.loaded: set[str] = set()

        def with_tied(weights: Iterable[tuple[str, Tensor]]):
            for name, tensor in weights:
                yield name, tensor
                yield from ((other, tensor) for other, sent in tied.items() if sent == name)

        def load_and_record(weights: Iterable[tuple[str, Tensor]]):
            names = load(with_tied(weights))
            self.loaded |= names
            return names

        model.load_weights = load_and_record

    def missing_weights(self) -> list[str]:
        """Return the names of the model's weights that were not loaded since `watch_weights`."""
        model = self.get_model()
        del model.load_weights  # of this object: that of its class is left
        names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        return sorted(names - self.loaded)

    def adapter_rank(self) -> int:
        """Return the greatest rank of an adapter that the worker takes; 0 if it takes none."""
        config = self.vllm_config.lora_config
        return config.max_lora_rank if config else 0

    def load_adapter(self, data: bytes | str, rank: int, alpha: int) -> None:
        """Load an adapter in place of the one before.

        Args:
            data, rank, alpha: of `packed_adapter`.
        Raises:
            RuntimeError: if the model does not have all of its layers.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self.model_runner.lora_manager._adapter_manager
        names = getattr(manager.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER["lora_int_id"],
            safetensors.torch.load(data if isinstance(data, bytes) else base64.b64decode(data)),
            PEFTHelper(rank, alpha, []),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=names and names.get_rename_mapper(),
        )
        manager.remove_adapter(adapter.id)
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
        if unknown := sorted(adapter.loras.keys() - manager.modules.keys()):
            raise RuntimeError(
                f"--vllm_lora: it lacks {len(unknown)} layers of the adapter, such as {unknown[0]}"
            )


def packed_adapter(model: PreTrainedModel, dtype: torch.dtype) -> Adapter:
    """Return a model's adapter as bytes of safetensors in a number format, its rank and its alpha; a
    collective for a sharded model.
    """
    tensors = {
        name.replace(".default.", "."): full_tensor(tensor).to(dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if ".lora_" in name
    }
    config = model.peft_config["default"]
    return safetensors.torch.save(tensors), config.r, config.lora_alpha


def check_sent(of_workers: list[list[str]]) -> None:
    """Raise RuntimeError if a worker has `missing_weights`."""
    if missing := sorted(set().union(*of_workers)):
        raise RuntimeError(
            f"{len(missing)} of its weights are none of the trained model's: {', '.join(missing[:3])}"
        )


class RolloutEngine(EventLoop):
    """A rollout engine, which samples from a copy of the trained policy.

    Requests are coroutines. Those of all threads run in its event loop. A response depends on its
    query, its seed (below 2**63) and the weights only. Log-probabilities are those of the
    distribution that is sampled: after the temperature, top_p and the other limits.

    A subclass defines two methods. `_complete(place, query, settings)` samples one response.
    `_send(model, step, adapter)` sends what `sync` has prepared: the `weights`, and the adapter if
    there is one. An error in either is in `failure`.

    Attributes:
        dtype: number format that the engine computes in.
        failure: why the engine no longer works, in one line; "" while it works. Run.save_and_exit
            saves a checkpoint and prints it.
        about: what the run prints at its start.
        weights: those of `sent_weights` that the sync under way has not yet gathered.
        synced: bytes of weights in the last sync.
        sends_adapter: whether a sync sends the adapter, and only the first one the base, too; else
            each sync sends merged weights.
        has_base: whether the engine has the base of the adapters.
        is_shared: whether several ranks share the engine. Then an interruption does not end a
            rollout: all these ranks have to make every step of it.
    """

    _complete: Callable
    _send: Callable
    dtype: torch.dtype
    weights: list[tuple[str, Tensor, Any]]
    failure = ""
    about = ""
    synced = 0
    sends_adapter = False
    has_base = False
    is_shared = False

    def run_all(self, calls: Iterable[Coroutine], interrupted: Callable) -> None:
        """Run coroutines that sample, side by side in the engine's thread. An interruption or a
        failure cancels them.
        """
        self.run(run_all(calls, lambda: bool(self.failure) or interrupted() and not self.is_shared))

    @contextlib.contextmanager
    def _errors_as_failure(self):
        """Catch an exception, and keep the first one's line in `failure`."""
        try:
            yield
        except Exception as error:  # of any type
            self.failure = (
                self.failure or f"vLLM failed ({type(error).__name__}: {first_line(error)})"
            )

    def generate(
        self,
        queries: list[list[int]],
        seeds: list[int | None],
        stop_ids: list[int],
        args: Any,
        interrupted: Callable,
        end: Callable,
    ) -> None:
        """Sample a response to each of this rank's queries.

        Args:
            seeds: one per response; None for a greedy one. args: see `sampling_settings`.
            end: called when a response has ended, with the place of its query, its token ids and, by
                name, the values of its tokens. An interruption or a failure leaves responses out.
        """

        async def respond(place: int, query: list[int], seed: int | None) -> None:
            length = args.max_response_length
            response = await self.sample(place, query, seed, length, stop_ids, args)
            if response is not None:
                end(place, *response)

        calls = map(respond, range(len(queries)), queries, seeds)
        self.run_all(calls, interrupted)

    async def sample(
        self,
        place: int,
        query: list[int],
        seed: int | None,
        length: int,
        stop_ids: list[int],
        args: Any,
    ) -> Response | None:
        """Sample a response, or one turn of a conversation; return None after a failure.

        It ends with a stop token, with the token that completes one of args.turn_stop, or after
        `length` tokens.

        Args:
            place: the same for all turns of a conversation, so that the server that has the earlier
                turns in its cache gets the next one.
        """
        return await self._complete(place, query, sampling_settings(seed, length, stop_ids, args))

    def sync(self, model: PreTrainedModel, step: int) -> None:
        """Give the engine the weights that a model has after a step; all ranks call it. Requests
        under way go on with the new weights, as if their tokens so far were the query.
        """
        adapter = packed_adapter(model, self.dtype) if self.sends_adapter else None
        self.weights = [] if self.has_base else sent_weights(model)
        self.synced = len(adapter[0]) if adapter else 0
        self.synced += sum(x.numel() * self._sent_dtype(x).itemsize for _, x, _ in self.weights)
        self._send(model, step, adapter)
        for _ in self._gather():  # after an error, the other ranks still gather the rest
            pass
        self.has_base = self.sends_adapter

    def _sent_dtype(self, weight: Tensor) -> torch.dtype:
        return weight.dtype

    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole tensors of `weights`, with the adapter merged unless it is sent. A
        tensor of a sharded model is gathered from all ranks, when its turn comes.
        """
        while self.weights:
            name, weight, layer = self.weights.pop(0)
            yield name, merged(weight, layer, not self.sends_adapter)

    def sleep(self) -> None:
        """Free the engine's memory until the next `sync`, if the engine can do that."""

    def metrics(self) -> dict[str, float]:
        """Return the engine's metrics of a step: the GB of the last sync."""
        return {"rollout/sync_gb": self.synced / 1e9}
