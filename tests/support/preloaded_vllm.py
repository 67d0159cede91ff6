"""What the server that forks the tests' runs has done before, where they take vLLM: see
helpers.py.
"""

import gc

import gloo_transfer  # noqa: F401  # servers and runs of the tests send weights between CPUs
import vllm.distributed.elastic_ep.elastic_execute  # what an engine imports as it starts
import vllm.entrypoints.launchers.api_server.entry  # and what a server of vLLM does
import vllm.entrypoints.llm
import vllm.lora.resolver
import vllm.model_executor.layers.quantization.compressed_tensors.utils
import vllm.model_executor.models.qwen2
import vllm.utils.cpu_triton_utils
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.core.sched.scheduler
import vllm.v1.engine.core
import vllm.v1.engine.llm_engine
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401

gc.collect()
gc.freeze()  # as in preloaded.py
gc.unfreeze = lambda: None  # an engine's end would thaw that heap, too, and collect it twice
