"""vLLM in the training process (--rollout_backend vllm)."""

import asyncio
import itertools
import os
from typing import Any, get_args

import torch
from transformers import PreTrainedModel

from extras.vllm.sampling import (
    ADAPTER,
    WORKER_EXTENSION,
    Adapter,
    Response,
    RolloutEngine,
    check_sent,
    response_of,
)
from plumbing.models.config import positions_of
from utils import UserError, World

CPU_SETTINGS = {  # of vLLM's CPU build, on which the tests run
    "enforce_eager": True,
    # It would turn back a seeded request's generator, which a CPU's cannot do.
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 65_536,
    "block_size": 32,  # the cache holds only whole blocks of a conversation
}


def lora_settings(args: Any, model: PreTrainedModel) -> dict[str, Any]:
    """Return vLLM's settings for the adapter of a model; {} if it has none, and where vLLM does not
    support adapters of its rank or of its family.
    """
    from vllm.config.lora import MaxLoRARanks
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import supports_lora

    layers = {name.split(".")[-1] for name, x in model.named_modules() if hasattr(x, "lora_A")}
    rank = next((x for x in get_args(MaxLoRARanks) if x >= args.lora_rank), 0)
    if not layers or not rank:
        return {}
    config = EngineArgs(args.model, language_model_only=True).create_model_config()
    family, _ = config.registry.resolve_model_cls(config.architectures, config)
    if not supports_lora(family):
        return {}
    return {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": sorted(layers)}


class Engine(RolloutEngine):
    """vLLM in this process: an engine for each rank, or for --vllm_tensor_parallel neighbouring
    ranks, which then have to make the same calls.

    `_complete` adds a request to vLLM's queue and waits for a future. One task, `_step`, makes
    vLLM's steps for all requests, and sets the future of each response that is complete. Between
    two steps the event loop runs what can go on: requests whose response is complete, new requests,
    and `sync`.
    """

    def __init__(
        self,
        args: Any,
        world: World,
        compute_dtype: torch.dtype | None,
        model: PreTrainedModel | None = None,
    ):
        """Start the engine, or raise a UserError.

        Args:
            args: the flags of a script: those of plumbing.cli.RolloutArgs, model, seed and the
                lengths of prompts and responses.
            compute_dtype: number format of matrix products; None: float32.
            model: whose weights `sync` will bring; None for the weights of --model.
        """
        super().__init__()
        # In this process, as a sync to another process would copy the weights.
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if world.size % args.vllm_tensor_parallel:
            raise UserError(
                f"--vllm_tensor_parallel {args.vllm_tensor_parallel}: must divide the number of ranks, {world.size}"
            )
        import vllm
        from vllm.platforms import current_platform

        on_gpu = torch.cuda.is_available()
        # With --async_steps the engine samples while a step trains, and cannot sleep then.
        self.can_sleep = current_platform.is_sleep_mode_available() and not args.async_steps
        self.is_shared = args.vllm_tensor_parallel > 1
        self.numbers = itertools.count()  # of the requests
        self.waiting: dict[str, asyncio.Future] = {}  # outputs of the requests under way, by number
        self.stepping: asyncio.Task | None = None  # `_step`, while requests wait
        cache_gb = args.kv_cache_gb or (torch.cuda.mem_get_info()[1] / 4e9 if on_gpu else 1.0)
        # With kv_cache_memory_bytes, gpu_memory_utilization is only the memory that has to be free
        # at the start.
        settings: dict[str, Any] = {"gpu_memory_utilization": 0.1} if on_gpu else dict(CPU_SETTINGS)
        if "RANK" in os.environ:
            settings["distributed_executor_backend"] = "external_launcher"
        # Kernels of one stream wait for each other: rollout and training overlap in two streams.
        stream = torch.cuda.Stream() if on_gpu else None
        # vLLM's CPU build would compile for 20 s and gain nothing. The trainer may compile.
        self.stance = "default" if on_gpu else "force_eager"
        threads = torch.get_num_threads()
        self.dtype = compute_dtype or torch.float32
        try:
            lora = lora_settings(args, model) if model and args.vllm_lora else {}
            with torch.cuda.stream(stream), torch.compiler.set_stance(self.stance):
                self.llm = vllm.LLM(
                    args.model,
                    dtype=self.dtype,
                    load_format="dummy" if model else "auto",
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
                    worker_extension_cls=WORKER_EXTENSION,
                    **settings,
                    **lora,
                )
        except (OSError, ValueError, RuntimeError) as error:
            # All lines, as vLLM's first line is only a heading.
            raise UserError(
                f"--model {args.model}: vLLM does not start with it: {' '.join(str(error).split())[:300]}"
            ) from error
        self.sends_adapter = bool(lora)
        self.adapter = vllm.lora.request.LoRARequest(**ADAPTER) if lora else None
        if stream is not None:
            # A thread has a stream and a device of its own; this sets both.
            self.loop.call_soon_threadsafe(torch.cuda.set_stream, stream)
        self.llm.llm_engine.set_weight_version("0")
        # LLM() leaves one thread, too few for an optimizer on the CPU (--shard fsdp_offload).
        torch.set_num_threads(threads)
        self.about = (
            f"vLLM {vllm.__version__} in this process, with a cache of {cache_gb:.3g} GB"
            f"{', freed while training' if self.can_sleep else ''}{', and the adapter' if lora else ''}"
        )

    async def _complete(self, place: int, query: list[int], settings: dict) -> Response | None:
        """Return what vLLM samples after `query`; None after a failure."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        engine = self.llm.llm_engine
        number = str(next(self.numbers))
        with self._errors_as_failure():
            # By default, vLLM would return the response so far at each token. Flat: as one list.
            sampling = SamplingParams(
                **settings, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY
            )
            prompt = {"prompt_token_ids": query}
            engine.add_request(number, prompt, sampling, lora_request=self.adapter)
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
        spans = map(vars, output.weight_versions)
        return response_of(output.token_ids, output.logprobs.logprobs, spans)

    async def _step(self) -> None:
        """Make vLLM's steps as long as a request waits. After a failure there is no further step, as
        the model may have half of the new weights.
        """
        with self._errors_as_failure(), torch.compiler.set_stance(self.stance):
            while self.waiting and not self.failure:
                for output in self.llm.llm_engine.step():
                    future = self.waiting[output.request_id]
                    if not future.done():  # the request may have been cancelled
                        future.set_result(output.outputs[0])
                await asyncio.sleep(0)  # the event loop runs what can go on

    def _send(self, model: PreTrainedModel, step: int, adapter: Adapter | None) -> None:
        self.run(self._load(model, step, adapter))

    async def _load(self, model: PreTrainedModel, step: int, adapter: Adapter | None) -> None:
        """Wake vLLM, and load the weights and the adapter."""
        with self._errors_as_failure(), torch.compiler.set_stance(self.stance):
            if self.can_sleep:  # does nothing if vLLM is awake
                self.llm.wake_up(["weights"])
            if self.weights:
                self.llm.collective_rpc("watch_weights", args=(model.all_tied_weights_keys,))
                tensors = {"weights_iterator": self._gather()}
                self.llm.collective_rpc("reload_weights", kwargs=tensors)
                check_sent(self.llm.collective_rpc("missing_weights"))
            if adapter:
                self.llm.collective_rpc("load_adapter", args=adapter)
            if self.can_sleep:
                self.llm.wake_up(["kv_cache"])
            if not self.llm.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("it did not drop its prefix cache, which is of the old weights")
            self.llm.llm_engine.set_weight_version(str(step))

    def sleep(self) -> None:
        """Free the GPU memory of weights and cache until the next `sync`, if the platform can. A base
        that no further sync brings waits in the CPU's memory.
        """
        if self.can_sleep:
            self.llm.sleep(level=1 if self.has_base else 2)
