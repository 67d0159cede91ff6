"""DDP, FSDP2, the attention's implementation, and unsharding for a rollout."""

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from plumbing.cli import ModelArgs
from plumbing.models.loading import Precision, blocks_of, caps_scores, checkpoint_blocks
from utils import UserError, World, as_user_error, say


class Sharding:
    """Places models as --shard says, and sets their --attention.

    With --shard none each rank has all weights, and DDP averages the gradients of the models that
    train. With fsdp (torch's FSDP2) a rank has a shard of the weights, gradients and Adam's state:
    the weights of a decoder block are gathered while the block computes, those outside of blocks
    (embeddings, head) while the model does. Blocks get their weights in the format of matrix
    products; autocast stays on, so that the result is the one without sharding. fsdp_offload keeps
    the shards on the CPU between passes.

    Attributes:
        on: whether models are sharded.
        shards_reward_models: whether reward models are: not while a rollout overlaps training, as ranks would meet in
            both.
    """

    def __init__(self, args: ModelArgs, world: World, precision: Precision):
        self.args = args
        self.world = world
        self.precision = precision
        if args.compile:
            with as_user_error("--compile"):  # a small function, which says if there is no compiler
                torch.compile(torch.sin)(torch.zeros(2, device=world.device))
        on_gpu = world.device.type == "cuda"
        offload = args.shard == "fsdp_offload"
        self.offload = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
        self.on = args.shard.startswith("fsdp")
        if args.shard == "auto":
            self.on = on_gpu and world.size > 1
        if self.on:
            if not dist.is_initialized():  # one process, without torchrun
                dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
            self.mesh = dist.init_device_mesh(world.device.type, (world.size,))
            say(f"sharding: {'fsdp_offload' if offload else 'fsdp'} over {world.size} ranks")
        self.shards_reward_models = self.on and not getattr(args, "async_steps", 0)

    @property
    def load_device(self) -> torch.device:
        """Where to load a model to, before `shard`.

        Only rank 0 reads the files of a model that is to be sharded, to the CPU: a GPU may not have
        the memory for all of it, nor a machine that for a copy per rank.
        """
        return torch.device("cpu" if self.world.main else "meta") if self.on else self.world.device

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a module as it is trained: itself in one process or sharded, else in DDP. See
        `shard`.
        """
        self.shard(module)
        if self.on or self.world.size == 1:
            return module
        return DistributedDataParallel(
            module, forward_sync_buffers=False, gradient_as_bucket_view=True
        )

    def shard(self, module: torch.nn.Module, reward_model: bool = False) -> torch.nn.Module:
        """Set a module's attention, shard it with --shard fsdp, checkpoint its blocks, and compile
        it: all in place.

        From then on its forward computes in the format of --precision.

        Reward models keep no activations, and with --async_steps score in another thread, which
        must not compile.

        Args:
            module: called as module(input_ids, mask), its forward holds every use of its weights.
                Each forward pass is a collective: all ranks have to make as many.
            reward_model: whether it is one, see `shards_reward_models`.
        """
        model = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
        if self.args.attention != "auto":
            set_attention(model, self.args.attention)
        module.forward = self.precision.autocast()(module.forward)
        if self.shards_reward_models if reward_model else self.on:
            self._fully_shard(module, model)
        if self.args.gradient_checkpointing and not reward_model:
            checkpoint_blocks(model)
        if self.args.compile and not reward_model:
            compile_parts(module)
        return module

    def _fully_shard(self, module: torch.nn.Module, model: PreTrainedModel) -> None:
        state = module.state_dict() if self.world.main else {}
        tensors = [*module.parameters(), *module.buffers()]
        dtypes = [tensor.dtype for tensor in tensors]
        # Some models keep a few tensors in float32; a state dict has values only.
        dist.broadcast_object_list(dtypes, 0)
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)
        shard = functools.partial(fully_shard, mesh=self.mesh, offload_policy=self.offload)
        policy = functools.partial(
            MixedPrecisionPolicy, reduce_dtype=self.precision.loss_dtype, cast_forward_inputs=False
        )
        for block in blocks_of(model):
            shard(block, mp_policy=policy(self.precision.compute_dtype))
        # Scores and logits require more bits than half precision has.
        shard(module, mp_policy=policy())
        self._load_shards(module, model, state)
        module.register_forward_hook(reset_after_inference)
        # The root comes first.
        model.fsdp_modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
        model.compute_device = self.world.device
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.world.device)
        with torch.no_grad():
            # The first forward pass makes this module FSDP's root; generation calls `model`.
            module(ids, ids > 0)

    def _load_shards(self, module: torch.nn.Module, model: PreTrainedModel, state: dict) -> None:
        """Load the state that rank 0 has of a module into all ranks' shards, one tensor at a
        time.
        """
        offloaded = isinstance(self.offload, CPUOffloadPolicy)
        device = torch.device("cpu") if offloaded else self.world.device
        if not self.world.main:
            module.to_empty(device=device)
            model.tie_weights()
        for buffer in module.buffers():
            # All on one device while torch broadcasts, as it requires.
            buffer.data = buffer.data.to(device)
        set_model_state_dict(
            module, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self.world.device)
            # Also those that a state dict leaves out, such as rotary frequencies.
            dist.broadcast(buffer, 0)


def compile_parts(module: torch.nn.Module) -> None:
    """Compile, in place, a module's decoder blocks, which share their graphs, and a policy's
    `statistics`.

    A block's `forward` is compiled: the hooks of FSDP and DDP stay outside, gradient checkpointing
    is inside, and parameters keep their names. There is a graph with and one without gradient, each
    again for a batch of one row.
    """
    # It would split a block's graph, and takes no checkpointing in it.
    torch._dynamo.config.optimize_ddp = False
    # Blocks of all models share a limit.
    compiled = functools.partial(torch.compile, dynamic=True, recompile_limit=64)
    for block in blocks_of(module):
        block.forward = compiled(block.forward)
    if hasattr(module, "statistics"):
        module.statistics = compiled(module.statistics)  # type: ignore[assignment]


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Make a model compute its attention by --attention `name`, or raise a UserError if it
    cannot.
    """
    # transformers would only log that it cannot set it, and its sdpa leaves the cap of scores out.
    if not model._can_set_attn_implementation() or name == "sdpa" and caps_scores(model.config):
        raise UserError(f"--attention {name}: {type(model).__name__} does not support it")
    with as_user_error(f"--attention {name}"):
        model.set_attn_implementation(name)


def reset_after_inference(root: Any, *_: Any) -> None:
    """After a forward pass without gradient, drop what FSDP prepared at its root for a backward
    pass, which does not come.
    """
    if not torch.is_grad_enabled():
        root.reset_iter_state()


def set_gradient_sync(module: torch.nn.Module, last: bool) -> None:
    """Have DDP average gradients over the ranks only in the `last` backward pass of an update: set
    before the forward pass.

    FSDP reduces them in every backward pass.
    """
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = last


def model_device(model: PreTrainedModel) -> torch.device:
    """Return where a model computes; its sharded weights may be offloaded."""
    return getattr(model, "compute_device", model.device)


@contextlib.contextmanager
def unsharded(model: torch.nn.Module):
    """Gather the weights of a sharded model for this context, in which ranks compute without
    waiting for others.

    All ranks have to enter it, and may leave it at different times. An unsharded model stays as it
    is.
    """
    modules = getattr(model, "fsdp_modules", ())
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for root in modules[:1]:
            # Reshards all, and drops the order of forward passes, which differs between ranks.
            root.reset_iter_state()
        for block in modules[1:]:
            block.set_reshard_after_forward(True, recurse=False)


@torch.no_grad()
def sync_reference(reference: torch.nn.Module, policy: torch.nn.Module) -> None:
    """Copy the policy's weights to the reference. Source: TR-DPO with its hard update,
    arXiv:2404.09656.
    """
    for parameter, new in zip(reference.parameters(), policy.parameters(), strict=True):
        parameter.copy_(new)
