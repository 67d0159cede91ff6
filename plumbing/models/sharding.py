"""Where the weights of a model are: on each rank (DDP), in shards (FSDP2), gathered for a rollout;
and their names with and without an adapter.
"""

import contextlib
import functools
from typing import Any, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from plumbing.models.forward import blocks_of, checkpoint_blocks, compile_parts, set_attention
from plumbing.models.loading import Precision
from utils import UserError, World, as_user_error, full_tensor, say


class Sharding:
    """Places models as --shard says, and sets how they compute: --attention,
    --gradient_checkpointing, --compile.

    With --shard none each rank has all weights, and DDP averages the gradients of the models that
    train. With fsdp (torch's FSDP2) a rank has a shard of the weights, gradients and Adam's state.
    A decoder block's weights are gathered while the block computes, and the weights outside of
    blocks (embeddings, head) while the model computes. A block's weights are gathered in the format
    of matrix products. Autocast stays on, so that the result is the same as without sharding.
    fsdp_offload keeps the shards on the CPU between passes.

    Attributes:
        on: whether models are sharded.
        shards_reward_models: whether reward models are sharded. They are not while a rollout
            overlaps training: ranks would meet in both at once.
    """

    def __init__(self, args: ModelArgs, world: World, precision: Precision):
        self.args = args
        self.world = world
        self.precision = precision
        if args.compile:
            with as_user_error("--compile"):  # a small function shows whether there is a compiler
                torch.compile(torch.sin)(torch.zeros(2, device=world.device))
        on_gpu = world.device.type == "cuda"
        offload = args.shard == "fsdp_offload"
        self.offload = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
        self.on = args.shard.startswith("fsdp")
        if args.shard == "auto":
            self.on = on_gpu and world.size > 1
        if self.on and args.quantize:
            raise UserError(f"--quantize {args.quantize}: requires --shard none")
        if self.on:
            if not dist.is_initialized():  # one process, without torchrun
                dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
            self.mesh = dist.init_device_mesh(world.device.type, (world.size,))
            say(f"sharding: {'fsdp_offload' if offload else 'fsdp'} over {world.size} ranks")
        self.shards_reward_models = self.on and not getattr(args, "async_steps", 0)

    @property
    def load_device(self) -> torch.device:
        """The device to load a model to, before `shard`.

        A model that will be sharded or quantized is read to the CPU, as a GPU may lack the memory
        for it. Of a model that will be sharded, only rank 0 reads the files, as a machine may lack
        the memory for a copy per rank.
        """
        if self.args.quantize:
            return torch.device("cpu")
        return torch.device("cpu" if self.world.main else "meta") if self.on else self.world.device

    def wrap(self, module: nn.Module) -> nn.Module:
        """Shard a module, see `shard`, and return what trains it: its DDP wrapper on several ranks
        that each have all weights, else the module itself.
        """
        self.shard(module)
        if self.on or self.world.size == 1:
            return module
        return DistributedDataParallel(
            module, forward_sync_buffers=False, gradient_as_bucket_view=True
        )

    def shard(self, module: nn.Module, reward_model: bool = False) -> nn.Module:
        """Set a module's attention and autocast, shard it, recompute its blocks and compile it, as
        the flags say; all in place. Raise a UserError if it does not support --share_prompts.

        A reward model keeps no activations. With --async_steps it scores in another thread, which
        must not compile.

        Args:
            module: called as module(input_ids, mask). Its forward holds every use of its weights.
                Each forward pass is a collective: all ranks have to make the same number of them.
            reward_model: whether it is a reward model, see `shards_reward_models`.
        """
        model = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
        if self.args.attention != "auto":
            set_attention(model, self.args.attention)
        if self.args.share_prompts and not reward_model:
            from extras.shared_prompts import check_shared_prompts

            check_shared_prompts(model)
        module.forward = self.precision.autocast()(module.forward)
        if self.shards_reward_models if reward_model else self.on:
            self._fully_shard(module, model)
        elif self.args.quantize and not reward_model:
            module.to(self.world.device)  # which quantizes the weights of --quantize
        if self.args.gradient_checkpointing and not reward_model:
            checkpoint_blocks(model)
        if self.args.compile and not reward_model:
            compile_parts(module)
        return module

    def _fully_shard(self, module: nn.Module, model: PreTrainedModel) -> None:
        state = module.state_dict() if self.world.main else {}
        tensors = [*module.parameters(), *module.buffers()]
        # Some models keep a few tensors in float32, and a state dict holds values only.
        dtypes = [tensor.dtype for tensor in tensors]
        dist.broadcast_object_list(dtypes, 0)
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)
        shard = functools.partial(fully_shard, mesh=self.mesh, offload_policy=self.offload)
        policy = functools.partial(
            MixedPrecisionPolicy, reduce_dtype=self.precision.loss_dtype, cast_forward_inputs=False
        )
        for block in blocks_of(model):
            shard(block, mp_policy=policy(self.precision.compute_dtype))
        # Scores and logits need more bits than half precision has.
        shard(module, mp_policy=policy())
        self._load_shards(module, model, state)
        module.register_forward_hook(reset_after_inference)
        # The root comes first.
        model.fsdp_modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
        model.compute_device = self.world.device
        # FSDP's root is the module of the first forward pass, and generation calls `model`.
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.world.device)
        with torch.no_grad():
            module(ids, ids > 0)

    def _load_shards(self, module: nn.Module, model: PreTrainedModel, state: dict) -> None:
        """Load a module's state, which rank 0 has, into the shards of all ranks, one tensor at a
        time.
        """
        offloaded = isinstance(self.offload, CPUOffloadPolicy)
        device = torch.device("cpu") if offloaded else self.world.device
        if not self.world.main:
            module.to_empty(device=device)
            model.tie_weights()
        for buffer in module.buffers():  # torch's broadcast requires one device
            buffer.data = buffer.data.to(device)
        set_model_state_dict(
            module, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self.world.device)
            # A state dict leaves some buffers out, such as rotary frequencies.
            dist.broadcast(buffer, 0)


def reset_after_inference(root: Any, *_: Any) -> None:
    """After a forward pass without gradient of FSDP's root, drop what FSDP has prepared for the
    backward pass, which does not come.
    """
    if not torch.is_grad_enabled():
        root.reset_iter_state()


def set_gradient_sync(module: nn.Module, last: bool) -> None:
    """Make DDP average gradients over the ranks in the `last` backward pass of an update only; to be
    called before the forward pass.

    FSDP averages them in every backward pass.
    """
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = last


def model_device(model: PreTrainedModel) -> torch.device:
    """Return the device on which a model computes. Its sharded weights may be offloaded."""
    return getattr(model, "compute_device", model.device)


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gather the weights of a sharded model for this context, in which no rank waits for others.

    All ranks have to enter the context, and may leave it at different times. A model that is not
    sharded stays as it is.
    """
    modules = getattr(model, "fsdp_modules", ())
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for root in modules[:1]:
            # Reshards all modules, and drops the order of forward passes, in which ranks differ.
            root.reset_iter_state()
        for block in modules[1:]:
            block.set_reshard_after_forward(True, recurse=False)


@torch.no_grad()
def sync_reference(reference: nn.Module, policy: nn.Module) -> None:
    """Copy the policy's weights to the reference. Source: TR-DPO's hard update, arXiv:2404.09656."""
    for parameter, new in zip(reference.parameters(), policy.parameters(), strict=True):
        parameter.copy_(new)


def base_weights(model: nn.Module) -> list[tuple[str, Tensor, Any]]:
    """Return the weights of a model by the names that they have in a model without an adapter.

    Returns:
        (name, tensor, its LoRA layer or None), the arguments of `merged` behind the name. Tied
        weights come twice. For a quantized weight, the tensor has shape and format only (meta).
    """
    layers = {
        f"{name}.base_layer.weight": x for name, x in model.named_modules() if hasattr(x, "lora_A")
    }
    weights = []
    for name, tensor in model.state_dict().items():
        if ".lora_" in name or ".base_layer.weight." in name:  # adapters, scales of --quantize
            continue
        layer = layers.get(name)
        if state := layer and getattr(layer.base_layer.weight, "quant_state", None):
            tensor = torch.empty(state.shape, dtype=state.dtype, device="meta")
        weights.append((name.replace(".base_layer.", "."), tensor, layer))
    return weights


@torch.no_grad()
def merged(tensor: Tensor, layer: Any, adapter: bool = True) -> Tensor:
    """Return the full tensor of one of `base_weights`, plus its adapter's product, in float32 or
    better, if `adapter`; a collective for a sharded tensor. A quantized weight is dequantized.

    (peft would merge in place, and all weights at once.)
    """
    if tensor.is_meta:
        from peft.utils.integrations import dequantize_module_weight

        tensor = dequantize_module_weight(layer.base_layer)
    tensor = full_tensor(tensor)
    if layer is None or not adapter:
        return tensor
    return tensor + full_tensor(layer.get_delta_weight("default"))
