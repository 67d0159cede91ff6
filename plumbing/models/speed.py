"""How fast this machine multiplies matrices and reads memory, measured once; and how close the decode
loop comes to that.
"""

import functools
import time
from typing import Callable

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from plumbing.models.loading import Precision


def fastest(work: Callable, device: torch.device) -> float:
    """Return the seconds of the fastest of four calls; a GPU makes each ten times."""
    repeats = 10 if device.type == "cuda" else 1
    seconds = []
    for _ in range(4):  # the first call loads the kernel
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - begin) / repeats)
    return min(seconds)


@functools.cache
def product_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a product of two matrices, with this process's threads.

    They have 4096^2 numbers on a GPU and 512^2 on a CPU, where this takes less than half a second.
    """
    size = 4096 if device.type == "cuda" else 512
    # Random numbers, as a GPU needs less power for equal ones; from a generator of their own, so
    # that the run's random numbers stay the same.
    numbers = torch.Generator().manual_seed(0)
    matrix = torch.randn(size, size, generator=numbers).to(device, dtype)
    return 2 * size**3 / fastest(lambda: matrix @ matrix, device)


class Decoding:
    """Measures the decode loop: its ms per token, and the ms that its reads of weights and KV cache
    take at least.
    """

    def __init__(self, model: PreTrainedModel, precision: Precision):
        """Measure the memory's bandwidth, by summing the model's largest weight."""
        largest = max(model.parameters(), key=torch.Tensor.numel).detach()
        local = largest.to_local() if isinstance(largest, DTensor) else largest
        self.bandwidth = local.nbytes / fastest(local.sum, local.device)  # bytes per second
        size = precision.frozen_dtype.itemsize
        self.weights = size * sum(p.numel() for p in model.parameters())  # bytes
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.per_token = (
            size * 2 * config.num_hidden_layers * kv_heads * width
        )  # bytes of the cache
        self.reset()

    def reset(self) -> None:
        self.seconds = 0.0
        self.steps = 0  # forward passes
        self.cached = 0  # tokens of the cache that these passes have read

    def timed(self, interrupted: Callable) -> Callable:
        """Return a function for a decode loop to call after each token. It returns `interrupted()`,
        and measures the time between two calls, which is that of a forward pass.

        The pass over the prompts comes before the first call, and is not measured.
        """
        last = None

        def call() -> bool:
            nonlocal last
            now = time.perf_counter()
            if last is not None:
                self.seconds += now - last
                self.steps += 1
            last = now
            return interrupted()

        return call

    def count_cached(self, query: int, response: int) -> None:
        """Count the tokens of the cache that the forward passes of a response have read.

        `query`, `response`: how many tokens they have.
        """
        passes = response - 1
        self.cached += passes * query + passes * (passes + 1) // 2

    def metrics(self) -> dict[str, float]:
        """Return the ms per token since the last call, and their lower bound; {} if there were no
        tokens.
        """
        if not self.steps:
            return {}
        size = self.weights + self.per_token * self.cached / self.steps
        result = {
            "perf/decode_ms_per_token": 1e3 * self.seconds / self.steps,
            "perf/decode_ms_bound": 1e3 * size / self.bandwidth,
        }
        self.reset()
        return result
