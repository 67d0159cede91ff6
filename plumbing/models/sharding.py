"""DDP, FSDP2, torch.compile, the attention's implementation, and unsharding for a rollout.

Imports utils and models; sequence_parallel and memory where their flags ask for them.
"""

import contextlib
import functools
import math

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from plumbing.models.loading import ModelNames, Precision, caps_scores
from utils import World, fail, first_line, full_tensor, parameter_count


class Sharding:
    """What --shard, --attention and --compile make of the models.

    With --shard none each rank has all weights, and DDP averages the gradients of the models that train. With fsdp
    (torch's FSDP2) a rank has a shard of the weights, gradients and Adam's state: the weights of a decoder block are
    gathered while the block computes, those outside of blocks (embeddings, head) while the model does. Blocks get their
    weights in the format of matrix products; autocast stays on, so that the result is the one without sharding.

    Attributes:
        on: whether models are sharded.
        dp: the World counted by data-parallel ranks, over which gradients and statistics are summed.
    """

    AUTO_SHARE = 0.6  # of a GPU's memory that unsharded models and Adam may take before --shard auto shards them
    GRADIENT_SHARE = 0.2  # of a GPU's memory that an unsharded gradient may take before each backward pass reduces it

    def __init__(self, args, world: World, precision: Precision, held: ModelNames):
        self.world, self.autocast, self.on = world, precision.autocast, args.shard.startswith("fsdp")
        self.compute_dtype, self.reduce_dtype = precision.compute_dtype, precision.loss_dtype
        self.attention, self.compile = args.attention, args.compile
        self.overlap = getattr(args, "async_steps", 0) > 0  # of rollout and training
        gpu = world.device.type == "cuda"
        self.offload = CPUOffloadPolicy(pin_memory=gpu) if args.cpu_offload else OffloadPolicy()
        self.memory = torch.cuda.get_device_properties(world.device).total_memory if gpu else math.inf
        check_attention(args, gpu, precision)
        self.dp = world.data_parallel(args.sequence_parallel)
        if args.compile:
            check_compile(world.device)
        reason = ""
        if args.shard == "auto" and world.size > 1:
            reason = " (on a CPU)"
            if gpu:
                from plumbing.models.memory import unsharded_bytes

                need = unsharded_bytes(args, held, precision.param_dtype)
                self.on = world.any(need > self.AUTO_SHARE * self.memory)
                reason = f" (whole, models and Adam take {need / 1e9:.3g} GB; a GPU has {self.memory / 1e9:.3g})"
        if self.on:
            self.mesh = init_mesh(world, args.shard_group_size or world.size)
            over = f" over {args.shard_group_size or world.size} of {world.size} ranks"
            reason = f"{over}{', offloaded to the CPU' if args.cpu_offload else ''}{reason}"
        if world.main and (self.on or reason):
            print(f"sharding: {'fsdp' if self.on else 'none'}{reason}", flush=True)

        from plumbing.models.memory import plan_run

        plan_run(args, held, world, self)

    @property
    def load_device(self) -> torch.device:
        """Where to load a model to, before `shard`.

        Only rank 0 reads the files of a model that is to be sharded, to the CPU: a GPU may not have the memory for all
        of it, nor a machine that for a copy a rank.
        """
        if self.on:
            return torch.device("cpu" if self.world.main else "meta")
        return self.world.device

    @property
    def shards_reward_models(self) -> bool:
        """Whether reward models are sharded: not while a rollout overlaps training, as ranks would meet in both."""
        return self.on and not self.overlap

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a module as it is trained: itself in one process or sharded, else in DDP. See `shard`."""
        self.shard(module)
        if self.on or self.world.size == 1:
            return module
        return torch.nn.parallel.DistributedDataParallel(
            module, forward_sync_buffers=False, gradient_as_bucket_view=True
        )

    def shard(self, module: torch.nn.Module, blocks_only: bool = False, reward_model: bool = False) -> torch.nn.Module:
        """Set a module's attention, compile it, with --compile, and shard it, with --shard fsdp, in place.

        Args:
            module: its forward takes (input_ids, mask) and holds every use of its weights. Each forward pass is a
                collective: all ranks have to make as many.
            blocks_only: leave the weights outside of blocks unsharded, for a module whose other methods are called.
            reward_model: it scores other sequences on each rank, and in the rollout's thread, where that overlaps
                training: it is not sequence-parallel, and with overlap neither compiled nor sharded.
        """
        model = next(part for part in module.modules() if isinstance(part, transformers.PreTrainedModel))
        if self.attention != "auto":
            set_attention(model, self.attention)
        if self.dp.sequence_parallel_group is not None and not reward_model:
            from plumbing.models.sequence_parallel import enable_sequence_parallel

            enable_sequence_parallel(model, self.dp.sequence_parallel_group)
        lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]
        blocks = list(max(lists, key=parameter_count, default=()))  # the first of those with most: holds all layers
        if not (reward_model and self.overlap):
            if self.compile:
                compile_parts(module, blocks)
            if self.on:
                self._fully_shard(module, model, blocks, blocks_only)
        return module

    def _fully_shard(self, module: torch.nn.Module, model, blocks: list[torch.nn.Module], blocks_only: bool) -> None:
        state = module.state_dict() if self.world.main else {}
        self._copy_dtypes(module)
        settings = {"mesh": self.mesh, "reshard_after_forward": True, "offload_policy": self.offload}
        policy = functools.partial(MixedPrecisionPolicy, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False)
        # A CPU's layer norm takes no weights in another format than what it normalises.
        on_cpu = self.world.device.type == "cpu" and any(isinstance(x, torch.nn.LayerNorm) for x in module.modules())
        for block in blocks:
            fully_shard(block, mp_policy=policy(None if on_cpu else self.compute_dtype), **settings)
        if not blocks_only:
            # A score or a logit takes more bits than half has; its backward pass begins where the forward one ends.
            fully_shard(module, mp_policy=policy(), **settings | {"reshard_after_forward": False})
        self._load_shards(module, model, state)
        for root in blocks if blocks_only else [module]:
            root.register_forward_hook(reset_after_inference)
        gradient_bytes = parameter_count(module) * self.reduce_dtype.itemsize
        module.keeps_full_gradient = gradient_bytes <= self.GRADIENT_SHARE * self.memory
        model.fsdp_modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
        model.fsdp_blocks = blocks
        model.compute_device = self.world.device
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.world.device)
        with torch.no_grad(), self.autocast(), torch.compiler.set_stance("force_eager"):
            module(ids, ids > 0)  # the first forward pass makes this module FSDP's root; generation calls `model`

    def _copy_dtypes(self, module: torch.nn.Module) -> None:
        """Give all ranks the number formats that rank 0 found, as some models keep a few tensors in float32.

        (Loading a state dict copies values only.)
        """
        tensors = [*module.parameters(), *module.buffers()]
        dtypes = [tensor.dtype for tensor in tensors]
        if self.world.size > 1:
            dist.broadcast_object_list(dtypes, 0)
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)

    def _load_shards(self, module: torch.nn.Module, model, state: dict) -> None:
        """Load the state that rank 0 has of a module into all ranks' shards, one tensor at a time."""
        device = torch.device("cpu") if isinstance(self.offload, CPUOffloadPolicy) else self.world.device
        if not self.world.main:
            module.to_empty(device=device)
            model.tie_weights()
        # All on one device while torch broadcasts, as it asks for; then what is not sharded goes where it computes.
        not_sharded = [x for x in (*module.parameters(), *module.buffers()) if not isinstance(x, DTensor)]
        for tensor in not_sharded:
            tensor.data = tensor.data.to(device)
        set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        for tensor in not_sharded:
            tensor.data = tensor.data.to(self.world.device)
        for buffer in module.buffers() if self.world.size > 1 else ():
            dist.broadcast(buffer, 0)  # those that a state dict leaves out, such as rotary frequencies, too


def check_attention(args, gpu: bool, precision: Precision) -> None:
    """End the run if --attention does not go with the device or with other flags."""
    if args.attention not in ("auto", "sdpa") and args.sequence_parallel > 1:
        fail(f"--sequence_parallel {args.sequence_parallel}: takes --attention sdpa (or auto), not {args.attention}")
    if args.attention.startswith("flash") and not (gpu and precision.compute_dtype):
        fail(f"--attention {args.attention}: takes a GPU, and bf16, fp16 or pure_bf16 as --precision")
    if args.attention == "flex_attention" and not gpu:
        fail(f"--attention {args.attention}: takes a GPU; on a CPU torch has no gradient of it")
    if args.attention == "eager" and precision.param_dtype == torch.float64:
        fail("--attention eager: not in float64; transformers' softmax is of float32, where its mask is infinite")


def check_compile(device: torch.device) -> None:
    """End the run if torch.compile finds no working compiler."""
    try:
        torch.compile(torch.sin)(torch.zeros(2, device=device))
    except Exception as error:
        fail(f"--compile: torch.compile does not work here ({first_line(error)})")


def init_mesh(world: World, size: int) -> dist.DeviceMesh:
    """Return the ranks in groups of `size` neighbours that share a sharded copy; end the run if `size` does not fit."""
    if world.size % size:
        fail(f"--shard_group_size {size}: has to divide the number of ranks, {world.size}")
    device = world.device.type
    if not dist.is_initialized():  # one process, without torchrun
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if size == world.size:
        return dist.init_device_mesh(device, (size,), mesh_dim_names=("shard",))
    return dist.init_device_mesh(device, (world.size // size, size), mesh_dim_names=("replicate", "shard"))


def set_attention(model: torch.nn.Module, name: str) -> None:
    """Make a model compute its attention by --attention `name`, or end the run if it cannot."""
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        fail(f"--attention {name}: {first_line(error)}")
    if model.config._attn_implementation != name or (name == "sdpa" and caps_scores(model.config)):
        fail(f"--attention {name}: {type(model).__name__} does not know it")


def compile_parts(module: torch.nn.Module, blocks: list[torch.nn.Module]) -> None:
    """Compile, in place, a module's decoder blocks, which share their graphs, and a policy's `chunk`.

    It is a block's `forward` that is compiled, so that FSDP's hooks and gradient checkpointing stay outside and
    parameters keep their names. The attention mask is made outside, too: transformers leaves it out only where it can
    read the positions.
    """
    torch._dynamo.config.optimize_ddp = False  # it would split each block's graph again
    compiled = functools.partial(torch.compile, dynamic=True, recompile_limit=64)
    for block in blocks:
        block.forward = compiled(block.forward)
    if hasattr(module, "chunk"):
        module.chunk = compiled(module.chunk)


def reset_after_inference(root: FSDPModule, *_) -> None:
    """After a forward pass without gradient, drop what FSDP prepared for a backward pass, which does not come."""
    if not torch.is_grad_enabled():
        root.reset_iter_state()


def gradient_sync(module: torch.nn.Module, last: bool):
    """Return a context in which backward averages gradients over the ranks only if it is the `last` of an update.

    A sharded gradient is reduced in every backward, unless the GPU has room for an unsharded one.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last or not module.keeps_full_gradient)
    return module.no_sync() if hasattr(module, "no_sync") and not last else contextlib.nullcontext()


def model_device(model: torch.nn.Module) -> torch.device:
    """Return where a model computes; its sharded weights may be offloaded."""
    return getattr(model, "compute_device", None) or model.device


@contextlib.contextmanager
def unsharded(model: torch.nn.Module):
    """Gather the weights of a sharded model for this context, in which ranks compute without waiting for others.

    All ranks have to enter it, and may leave it at different times. An unsharded model stays as it is.
    """
    modules = getattr(model, "fsdp_modules", ())
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for root in modules[:1]:
            root.reset_iter_state()  # reshards all, and drops the order of forward passes, which differs between ranks
        for block in getattr(model, "fsdp_blocks", ()):
            block.set_reshard_after_forward(True, recurse=False)


@torch.no_grad()
def sync_reference(reference: torch.nn.Module, policy: torch.nn.Module, mix: float) -> None:
    """Move the reference's weights towards the policy's: reference = (1 - mix) * reference + mix * policy.

    Source: TR-DPO, arXiv:2404.09656. (torch's AveragedModel would hold one more copy of the model.)
    """
    for parameter, new in zip(reference.parameters(), policy.parameters(), strict=True):
        parameter.lerp_(new if isinstance(parameter, DTensor) else full_tensor(new), mix)
