"""GPU memory of a run, without a GPU: the script's own main() on tensors that have shapes and no
data.

    python scripts/memory.py grpo --gpus 8 --gpu_gb 80 --model Qwen/Qwen2.5-7B    # and any flags of grpo.py
    python scripts/memory.py my_fork.py --gpu_gb 24 --model runs/base/final --lora_rank 16

Two steps with prompts and responses of the greatest length run on torch's fake tensors and, for
several GPUs, on its fake process group; every storage that lives is counted, by what made it. vLLM
does not run: its weights and its cache are added, unless servers sample. What CUDA, NCCL and cuBLAS
take for themselves, and fragmentation, are not seen: RESERVE is kept free for them. A model is a
folder or one of scripts/memory.yaml. Exit code 0: it fits, 1: it does not, 2: bad input.
"""

import contextlib
import functools
import importlib
import io
import json
import os
import re
import sys
import tempfile
import weakref
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import numpy as np
import repository  # noqa: F401
import torch
import tyro
import yaml
from pydantic.dataclasses import dataclass
from transformers import AutoConfig, PreTrainedModel

import utils
from extras.vllm.sampling import RolloutEngine, sent_weights
from plumbing import cli
from plumbing.models import forward, loading, sharding
from plumbing.models import tokenizer as tokenizers
from plumbing.models.config import load_config
from plumbing.models.sharding import base_weights, merged
from plumbing.rewards.sources import kind_of
from plumbing.rollout import engines
from plumbing.run import metrics, ranks, run
from plumbing.run.command import parse, report_errors

BYTES_OF_A_GB = 1.06e9  # in a GPU's name: an H100 of 80 GB has 84.9e9
RESERVE = 5e9  # bytes
NOT_FOLLOWED = (
    r"tools=\('.*?\)|(environment|agent)='[^']+'|rollout_backend='hf'|shard='fsdp_offload'"
    r"|teacher='http[^']*'"
)
TABLE = yaml.safe_load(Path(utils.ROOT, "scripts/memory.yaml").read_text())
FAKE = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
aten = torch.ops.aten


@dataclass
class MemoryArgs:
    script: tyro.conf.Positional[Path]
    """grpo, rloo, ppo, distill, reward_model, or the path of a fork; its flags follow."""
    gpus: cli.PositiveInt = 1
    """Number of GPUs, with a rank on each."""
    gpu_gb: cli.PositiveFloat = 80.0
    """GB in the GPU's name, such as 24, 40 or 80."""


class Memory(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes of the fake storages that live, by what made them, and keeps the peak of
    each phase.
    """

    storages, live = {}, Counter()  # id: (maker, bytes); maker: bytes
    peaks = defaultdict(Counter)  # phase: `live` at its peak

    def set_bytes(self, key, size: float, maker: str = "vLLM"):
        """Set the bytes of a storage; 0 for one that is gone."""
        maker, before = self.storages.pop(key, (maker, 0))
        if size:
            self.storages[key] = maker, size
        self.live[maker] += size - before
        if self.live.total() > self.peaks[ranks.status.phase].total():
            self.peaks[ranks.status.phase] = self.live.copy()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if utils.DTensor in types:
            return NotImplemented  # it is taken apart first
        if types and operation is aten._local_scalar_dense.default:
            return 1  # what is read has a value
        # How many are set is known.
        if operation is aten.index.Tensor and args[1][0].dtype == torch.bool:
            args = args[0], args[1][0].nonzero(as_tuple=True)
        # Weights, and what FSDP gathers them into, begin as empty tensors; what is computed from
        # fake ones is fake.
        with FAKE if operation is aten.empty.memory_format else contextlib.nullcontext():
            outputs = operation(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(outputs):
            if getattr(x, "fake_mode", None) is not FAKE or x.is_meta:
                continue
            if id(storage := x.untyped_storage()) not in self.storages:
                frame = sys._getframe(1)
                while "/torch/" in frame.f_code.co_filename:
                    frame = frame.f_back
                weakref.finalize(storage, self.set_bytes, id(storage), 0)
                self.set_bytes(
                    id(storage), storage.size(), f"{frame.f_code.co_qualname}, {x.dtype}"
                )
        return outputs


class Engine(RolloutEngine):
    """Stands for vLLM: responses of the greatest length, and the bytes of its weights and its
    cache.
    """

    length = 1  # of responses; the first step is for Adam's state

    def __init__(self, args, model, world, precision, outputs):
        numbers = sum(tensor.numel() for _, tensor, _ in sent_weights(model))
        weights = numbers * precision.frozen_dtype.itemsize / args.vllm_tensor_parallel
        cache = args.kv_cache_gb * 1e9 or self.gpu_bytes / 4
        self.bytes = [0.0, 0.0] if args.rollout_backend == "server" else [weights, cache]
        self.stays = args.async_steps
        self.sends_adapter = bool(args.lora_rank and args.vllm_lora)

    def generate(self, queries, seeds, stop_ids, args, interrupted, end):
        memory.set_bytes("vLLM", sum(self.bytes))
        length = self.length
        self.length = args.max_response_length
        response = np.full(length, 5, np.int32)
        response[-1] = stop_ids[0]
        for place in range(len(queries)):
            end(place, response, {"rollout_logprobs": np.full(length, -1, np.float32)})

    def sync(self, model, _):
        memory.set_bytes("vLLM", sum(self.bytes[: 1 + self.stays]))  # the cache wakes behind it
        for _, *weight in () if self.sends_adapter else base_weights(model):
            merged(*weight)

    def sleep(self):
        if not self.stays:
            memory.set_bytes("vLLM", 0)


def fake_config(name, read=AutoConfig.from_pretrained, **options):
    """Return the configuration of a model of the table or of a folder."""
    shape = TABLE["shapes"].get(name)
    return AutoConfig.for_model(**shape) if shape else read(name, **options)


def fake_weights(model_class, *_, config, dtype, **options):
    """Stand for `from_pretrained`."""
    return model_class._from_config(config, dtype=dtype).eval(), {"missing_keys": set()}


class Linear4bit(torch.nn.Module):
    """Stands for the layer of bitsandbytes, which holds a whole weight only while it multiplies."""

    def __init__(self, inputs, outputs, compute_dtype, device):
        super().__init__()
        self.whole = functools.partial(torch.empty, outputs, inputs, dtype=compute_dtype)

    def forward(self, x):
        multiply = lambda x: torch.nn.functional.linear(x, self.whole(), self.bias)
        return forward.recomputed(multiply, x)


class Params4bit(torch.nn.Parameter):
    """Stands for the weight of bitsandbytes: 4 bits a number, and 0.127 for its scales."""

    def __new__(cls, weight, quant_type):
        small = torch.empty(int(weight.numel() * 4.127 / 8), dtype=torch.uint8)
        small = torch.nn.Parameter(small, requires_grad=False)
        small.quant_state = SimpleNamespace(shape=weight.shape, dtype=weight.dtype)
        return small


class KeepGradients(torch.nn.Module):
    """Stands for DDP, whose gradients live in buckets that stay."""

    def __new__(cls, module, **options):
        torch.optim.AdamW.zero_grad = lambda adam: None
        return module


def resize(storage, size, resize=torch.UntypedStorage.resize_):
    """FSDP's way to allocate and to free."""
    resize(storage, size)
    memory.set_bytes(id(storage), size, "gathered by FSDP")


def all_gather(world: utils.World, items: list) -> list:
    """Return the items of all ranks as if each had what this one has; of responses (place, response)
    the places are those of the ranks.
    """
    match items:
        case [(int(), *_), *_]:
            return [(place + rank, *rest) for rank in range(world.size) for place, *rest in items]
    return items * world.size


def replace_machine(gpus, gpu_bytes):
    """Replace what needs a GPU, other processes, files of weights or numbers by what takes as much
    memory.
    """
    torch.distributed.init_process_group(
        "fake", store=torch.distributed.HashStore(), rank=0, world_size=gpus
    )
    utils.setup_processes = lambda minutes: utils.World(0, gpus, torch.device("cpu"))
    utils.World.all_gather = all_gather
    new_group = torch.distributed.new_group  # of the fake backend, whichever is asked for
    torch.distributed.new_group = lambda *ranks, backend="fake", **options: new_group(
        *ranks, **options
    )
    tokenizer = tokenizers.read_tokenizer("", f"{utils.ROOT}/assets/tiny")  # a token per byte
    tokenizers.read_tokenizer = lambda *_: tokenizer
    AutoConfig.from_pretrained = fake_config
    PreTrainedModel.from_pretrained = classmethod(fake_weights)
    torch.nn.Module.to = lambda module, *_, **options: module
    torch.UntypedStorage.resize_ = resize
    sharding.DistributedDataParallel = KeepGradients
    Engine.gpu_bytes = gpu_bytes
    sharding.say = functools.partial(print, file=sys.stdout)  # what --shard auto chooses is shown
    torch.distributed.broadcast_object_list = sharding.Sharding._load_shards = lambda *_: None
    layers = SimpleNamespace(Linear4bit=Linear4bit, Params4bit=Params4bit)
    sys.modules["bitsandbytes"] = SimpleNamespace(nn=layers, __spec__=True)
    nothing = lambda *_: None
    loading.check_head = metrics.warn = run.Run.finish = ranks.watch = nothing
    run.check_rules = nothing  # `parse` has checked the flags, which `shorten` changes
    engines.rollout_engine = Engine


def shorten(args, gpus, folder):
    """Leave two steps of two micro-batches of the longest rows, and what their memory depends
    on.
    """
    if found := re.search(NOT_FOLLOWED, str(args)):
        raise utils.UserError(f"--{found[0]}: scripts/memory.py cannot follow it")
    given = defaultdict(int, vars(args))
    query = given["max_prompt_length"]
    response = given["max_response_length"]
    pair = given["max_length"]
    count = 2 * max(1, args.micro_batch_tokens // (query + response + 2 * pair)) * gpus
    row = {
        "prompt": "5" * query,
        "answer": "5" * (response - 1),
        "chosen": "5" * (pair - 1),
        "rejected": "4",
    }
    dataset = f"{folder}/rows.jsonl"
    Path(dataset).write_text(count * f"{json.dumps(row)}\n")
    vars(args).update(
        TABLE["flags"],
        output_dir=folder,
        dataset=dataset,
        reward=("exact", *(name for name in given["reward"] or () if kind_of(name) == "model")),
        batch_size=count,
        rollout_batch_size=count,
        total_episodes=2 * count,
        precision=args.precision.replace("auto", "bf16"),  # of a GPU, as --shard
        shard=args.shard.replace("auto", "fsdp" if gpus > 1 else "none"),
    )
    # transformers multiplies experts in the format of their weights, torch's fake tensors in bf16.
    config = load_config("--model", args.model).get_text_config().to_dict()
    has_experts = any(value for name, value in config.items() if "experts" in name)
    if has_experts and args.shard == "none" and not given["lora_rank"]:
        raise utils.UserError("--model: scripts/memory.py follows experts with --shard fsdp only")


def main():
    options, flags = tyro.cli(MemoryArgs, description=__doc__, return_unknown_args=True)
    gpu_bytes = options.gpu_gb * BYTES_OF_A_GB
    replace_machine(options.gpus, gpu_bytes)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        utils.as_user_error(f"{options.script}"),
        memory,
    ):
        sys.path.insert(0, f"{options.script.parent}")
        module = importlib.import_module(options.script.stem)
        args = parse(module.Args, flags)
        shorten(args, options.gpus, folder)
        module.main(args)
    del memory.peaks["load"]  # of models that are sharded, it is on the CPU
    for phase, parts in memory.peaks.items():
        print(f"{parts.total() / 1e9:6.1f} GB in {phase}")
    parts = max(memory.peaks.values(), key=Counter.total)
    for maker, size in parts.most_common(6):
        print(f"{size / 1e9:10.1f} GB of the most: {maker}")
    free = gpu_bytes - RESERVE
    most = parts.total()
    print(
        f"{'does not fit' if most > free else 'fits'}: {free / 1e9:.1f} GB are free, needed {most / 1e9:.1f}"
    )
    sys.exit(most > free)


memory = Memory()

if __name__ == "__main__":
    with report_errors():
        main()
