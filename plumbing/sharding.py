"""DDP, FSDP2, torch.compile, and what is gathered for a rollout."""

import contextlib
import functools
import math
from typing import Callable

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from plumbing.models import ModelNames
from plumbing.sequence_parallel import share_sequences
from utils import World, fail, first_line, parameter_count, whole


class Sharding:
    """What --attention and --compile make of the models, and --shard: whole ones on every rank (none; DDP averages the
    gradients of those that train), or weights, gradients and Adam's state in pieces, one a rank (fsdp, torch's FSDP2).

    A decoder block's weights are whole on a rank only while the block computes, those outside of blocks (embeddings,
    head) while the model does. Matrix products in half precision get the blocks' weights in that format; autocast
    stays on, so that it computes what it does without sharding.
    """

    WHOLE_SHARE = 0.6  # of a GPU's memory that whole models and Adam may take before --shard auto shards them
    GRADIENT_SHARE = 0.2  # of a GPU's memory up to which a whole gradient may collect before it is sharded

    def __init__(
        self, args, world: World, names: ModelNames, stored: torch.dtype, half: torch.dtype | None, autocast: Callable
    ):
        self.world, self.autocast, self.on = world, autocast, args.shard == "fsdp"
        self.attention, self.compile = args.attention, args.compile
        if args.attention not in ("auto", "sdpa") and args.sequence_parallel > 1:
            fail(
                f"--sequence_parallel {args.sequence_parallel}: takes --attention sdpa (or auto), not {args.attention}"
            )
        self.teams = world.data_parallel(args.sequence_parallel)
        self.compute, self.reduce = half, torch.promote_types(stored, torch.float32)
        gpu = world.device.type == "cuda"
        self.offload = CPUOffloadPolicy(pin_memory=gpu) if args.cpu_offload else OffloadPolicy()
        self.memory = torch.cuda.get_device_properties(world.device).total_memory if gpu else math.inf
        # A rollout beside the training must not meet other ranks where the training does.
        self.rewards = not getattr(args, "async_steps", 0)
        if args.attention.startswith("flash") and not (gpu and half):
            fail(f"--attention {args.attention}: takes a GPU, and bf16, fp16 or pure_bf16 as --precision")
        if args.attention == "flex_attention" and not gpu:
            fail(f"--attention {args.attention}: takes a GPU; on a CPU torch has no gradient of it")
        if args.attention == "eager" and stored == torch.float64:
            fail("--attention eager: not in float64; transformers' softmax is of float32, where its mask is infinite")
        if args.compile:
            try:
                torch.compile(torch.sin)(torch.zeros(2, device=world.device))
            except Exception as error:
                fail(f"--compile: torch.compile does not work here ({first_line(error)})")
        reason = ""
        if args.shard == "auto" and world.size > 1:
            reason = " (on a CPU)"
            if gpu:
                from plumbing.memory import unsharded_bytes

                need = unsharded_bytes(args, names, stored)
                self.on = world.any(need > self.WHOLE_SHARE * self.memory)
                reason = f" (whole, models and Adam take {need / 1e9:.3g} GB; a GPU has {self.memory / 1e9:.3g})"
        if self.on:
            size = args.shard_group_size or world.size
            if world.size % size:
                fail(f"--shard_group_size {size}: has to divide the number of ranks, {world.size}")
            if not dist.is_initialized():  # one process, without torchrun
                backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            shape, names = (size,), ("shards",)
            if size < world.size:
                shape, names = (world.size // size, size), ("copies", "shards")
            self.mesh = dist.init_device_mesh(world.device.type, shape, mesh_dim_names=names)
            reason = f" over {size} of {world.size} ranks{', offloaded to the CPU' if args.cpu_offload else ''}{reason}"
        if world.main and (self.on or reason):
            print(f"sharding: {'fsdp' if self.on else 'none'}{reason}", flush=True)

    @property
    def home(self) -> torch.device:
        """Where to load a model to. A GPU may not have the memory for a whole one that is to be sharded, nor a machine
        for one a rank, so that only rank 0 reads the files."""
        if self.on:
            return torch.device("cpu" if self.world.main else "meta")
        return self.world.device

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module as it is trained: itself in one process, DDP over several, or itself, sharded."""
        self.shard(module)
        if self.on or self.world.size == 1:
            return module
        return torch.nn.parallel.DistributedDataParallel(
            module, forward_sync_buffers=False, gradient_as_bucket_view=True
        )

    def shard(
        self, module: torch.nn.Module, blocks_only: bool = False, beside: bool = False, rewards: bool = False
    ) -> torch.nn.Module:
        """Set a module's attention, compile it, with --compile, and shard it, with --shard fsdp, in place.

        Args:
            module: its forward takes (input_ids, mask) and holds every use of its weights. Each forward pass is a
                collective: all ranks have to make as many.
            blocks_only: leave the weights outside of blocks whole, for a module whose other methods are called.
            beside: it computes in another thread than the training, so it is neither compiled nor sharded.
            rewards: it is a reward model, whose ranks have other sequences than their neighbours.
        """
        model = next(part for part in module.modules() if isinstance(part, transformers.PreTrainedModel))
        if self.attention != "auto":
            set_attention(model, self.attention)
        if self.teams.sequence_parallel_group is not None and not rewards:
            share_sequences(model, self.teams.sequence_parallel_group)
        lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]
        blocks = list(max(lists, key=parameter_count, default=()))  # the first of those with most: holds all layers
        if self.compile and not beside:
            compile_parts(module, blocks)
        if not self.on or beside:
            return module
        self._await_main((*module.parameters(), *module.buffers()))
        weights = [tensor.data for tensor in (*module.parameters(), *module.buffers())]  # rank 0 has them
        if not self.world.main:
            module.to_empty(device="cpu")  # pages that are not written to take no memory
            model.tie_weights()
        settings = {"mesh": self.mesh, "reshard_after_forward": True, "offload_policy": self.offload}
        policy = functools.partial(MixedPrecisionPolicy, reduce_dtype=self.reduce, cast_forward_inputs=False)
        # A CPU's layer norm takes no weights in another format than what it normalises.
        on_cpu = self.world.device.type == "cpu" and any(isinstance(x, torch.nn.LayerNorm) for x in module.modules())
        for block in blocks:
            fully_shard(block, mp_policy=policy(None if on_cpu else self.compute), **settings)
        if not blocks_only:
            # A score or a logit takes more bits than half has; its backward pass begins where the forward one ends.
            fully_shard(module, mp_policy=policy(), **settings | {"reshard_after_forward": False})
        for tensor in (*module.parameters(), *module.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(self.world.device)
        if self.world.size > 1:
            for tensor, of_main in zip((*module.parameters(), *module.buffers()), weights, strict=True):
                self._spread(tensor.data, of_main)
        roots = blocks if blocks_only else [module]
        for root in roots:
            root.register_forward_hook(forget_pass)
        module.collects_gradient = parameter_count(module) * self.reduce.itemsize <= self.GRADIENT_SHARE * self.memory
        model.sharded_parts = tuple(part for part in module.modules() if isinstance(part, FSDPModule))
        model.blocks_reshard = blocks
        model.compute_device = self.world.device
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.world.device)
        with torch.no_grad(), self.autocast(), torch.compiler.set_stance("force_eager"):
            module(ids, ids > 0)  # the first pass says which module is the outermost
        return module

    def _await_main(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Wait until rank 0 has read a model's files, where some tensors may have formats of their own, and take over
        the formats; where the files ended the run there, end it here."""
        formats = [tensor.dtype for tensor in tensors]
        if self.world.size > 1:
            try:
                dist.broadcast_object_list(formats, 0)
            except RuntimeError:  # a connection broke
                fail("a rank ended while rank 0 read a model for all; see what it said", local=self.world.rank == 1)
        for tensor, kind in zip(tensors, formats, strict=True):
            tensor.data = tensor.data.to(kind)

    def _spread(self, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill a tensor, or this rank's piece of it, with what rank 0 has as `whole`."""
        sent = whole.to(self.world.device) if self.world.main else torch.empty_like(whole, device=self.world.device)
        dist.broadcast(sent, 0)
        if isinstance(tensor, DTensor):
            sent = distribute_tensor(sent, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
            tensor = tensor.to_local()
        tensor.copy_(sent)


def set_attention(model: torch.nn.Module, name: str) -> None:
    """Make a model compute its attention by --attention `name`, or end the run if it cannot."""
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        fail(f"--attention {name}: {first_line(error)}")
    if model.config._attn_implementation != name:
        fail(f"--attention {name}: {type(model).__name__} does not know it")


def compile_parts(module: torch.nn.Module, blocks: list[torch.nn.Module]) -> None:
    """Compile, in place, a module's decoder blocks, which share their graphs, and a policy's `chunk`.

    The `forward` of a block, not the block: FSDP's hooks and gradient checkpointing stay outside, names as they are.
    The attention mask stays outside, too: transformers leaves it out only where it may look at the positions.
    """
    torch._dynamo.config.optimize_ddp = False  # it would cut each block's graph again
    compiled = functools.partial(torch.compile, dynamic=True, recompile_limit=64)
    for block in blocks:
        block.forward = compiled(block.forward)
    if hasattr(module, "chunk"):
        module.chunk = compiled(module.chunk)


def forget_pass(root: FSDPModule, *_) -> None:
    """After a pass without gradient: drop the notes that it left for a backward pass, which does not come."""
    if not torch.is_grad_enabled():
        root.reset_iter_state()


def gradient_sync(module: torch.nn.Module, now: bool):
    """A context that averages gradients over the ranks only in the last backward pass of an update."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now or not module.collects_gradient)
    return module.no_sync() if hasattr(module, "no_sync") and not now else contextlib.nullcontext()


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model computes; sharded weights may lie elsewhere."""
    return getattr(model, "compute_device", None) or model.device


@contextlib.contextmanager
def gathered(model: torch.nn.Module):
    """A context in which the weights of a sharded model are whole, so that ranks compute without waiting for others.

    All ranks have to enter, and may leave at different times. Nothing happens to a model that is not sharded.
    """
    parts = getattr(model, "sharded_parts", ())
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for root in parts[:1]:
            root.reset_iter_state()  # reshards all, and forgets the order of the passes, which differs between ranks
        for block in getattr(model, "blocks_reshard", ()):
            block.set_reshard_after_forward(True, recurse=False)


@torch.no_grad()
def mix_into(reference: torch.nn.Module, policy: torch.nn.Module, share: float) -> None:
    """Move a model's weights by a share of the way to another's, of the same architecture."""
    for kept, new in zip(reference.parameters(), policy.parameters()):
        kept.lerp_(new if isinstance(kept, DTensor) else whole(new), share)
