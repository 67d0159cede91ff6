"""Plumbing that the algorithm scripts share: processes, data, rewards, checkpoints, logging.

Nothing that a paper would ablate lives here. The sections stand in the order in which a script meets them.
"""

import hashlib
import math
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm

set_num_threads = torch.set_num_threads  # vLLM's CPU build puts a function that does nothing in its place
ROOT = os.path.dirname(os.path.abspath(__file__))
progress_bars: list[tqdm] = []  # that are on the terminal
EXIT_BAD_INPUT = 2  # a flag or a file has to be mended first
EXIT_INTERRUPTED = 75  # SIGTERM or SIGINT: a checkpoint was saved, `--resume` goes on from it


def fail(message: str, local: bool = False) -> NoReturn:
    """End the run for a reason that the user can mend: one line on stderr, exit code 2.

    All ranks of a node are taken to fail alike, and one speaks for them, unless the reason is `local` to this rank.
    """
    if local or int(os.environ.get("LOCAL_RANK", "0")) == 0:
        for bar in progress_bars:
            bar.close()  # ends its line
        message = " ".join(message.splitlines())  # names from files may hold line ends
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(EXIT_BAD_INPUT)


def warn(message: str) -> None:
    """One line on stderr, from rank 0 only."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"warning: {message}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """This process among all of the run: one process, or `torchrun` on one or several nodes.

    Collectives are no-ops for a single process. All ranks have to call them alike.
    """

    rank: int
    size: int
    device: torch.device
    group: object = None  # of torch.distributed; None: the default one
    ranks_per_engine: int = 1  # neighbouring ranks that share one rollout engine, and so compute the same rollout
    sequence_parallel_group: object = None  # see `data_parallel`

    @property
    def main(self) -> bool:
        return self.rank == 0

    def rollout_world(self, ranks_per_engine: int) -> "World":
        """Return the same processes in a CPU group of their own, for the thread that makes the next rollout."""
        group = dist.new_group(backend="gloo") if self.size > 1 else None
        return World(self.rank, self.size, torch.device("cpu"), group, ranks_per_engine)

    def data_parallel(self, sequence_parallel: int) -> "World":
        """Return the same processes counted by data-parallel rank: `sequence_parallel` neighbours share each sequence.

        Sums and gathers of the result run over one process of each sequence-parallel group.
        """
        if sequence_parallel == 1:
            return self
        if self.size % sequence_parallel:
            fail(f"--sequence_parallel {sequence_parallel}: has to divide the number of ranks, {self.size}")
        sequence_group, _ = dist.new_subgroups(sequence_parallel)
        same_slice = [list(range(i, self.size, sequence_parallel)) for i in range(sequence_parallel)]
        group, _ = dist.new_subgroups_by_enumeration(same_slice)
        rank, size = self.rank // sequence_parallel, self.size // sequence_parallel
        return World(rank, size, self.device, group, sequence_parallel_group=sequence_group)

    def all_gather(self, items: list) -> list:
        """Return every rank's list, concatenated in rank order."""
        return [item for part in self._all_gather(items) for item in part]

    def _all_gather(self, items: list) -> list[list]:
        parts = [items] * self.size
        if self.size > 1:
            dist.all_gather_object(parts, items, group=self.group)
        return parts

    def shard(self, items: list) -> list:
        """Return this rank's share of a list that all ranks hold: items rank, rank + size, rank + 2 size and so on."""
        return items[self.rank // self.ranks_per_engine :: self.size // self.ranks_per_engine]

    def unshard(self, items: list, total: int) -> list:
        """Gather the shares of `shard` in the order of the original list of `total` items."""
        result, shares = [None] * total, self._all_gather(items)[:: self.ranks_per_engine]
        for number, share in enumerate(shares):
            result[number :: len(shares)] = share
        return result

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the largest of each value over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return bool(self.sum(torch.tensor(int(flag), device=self.device)).item())

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)


def setup_processes() -> World:
    """Join the process group that torchrun describes in the environment; without torchrun, be the only process."""
    # Everything that transformers and torch would print once a rank; our own lines say what matters.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # Else what training leaves in pieces has no room for a sleeping vLLM to wake up in. (Read at the first allocation.)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= gpus:
            fail(f"torchrun --nproc_per_node: starts more processes than there are GPUs, {gpus}")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        # Half an hour: longer than any collective should take. A rank that waits longer ends in an error.
        backend, wait = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(minutes=30)
        store, rank, size = next(rendezvous("env://", timeout=wait))
        # torchrun's store outlives the ranks. Without a prefix for each start, those that --max_restarts starts again
        # find the addresses of the dead ones there, and fail or hang (torch 2.13).
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, timeout=wait, store=store, rank=rank, world_size=size)
    return World(rank, size, device)


def generator(*key) -> np.random.Generator:
    """A random generator that is a function of `key` alone, such as ("rollout", seed, step).

    Nothing random in a run depends on what ran before, so a resumed run, or one with another number of ranks, draws
    the same numbers. (torch's CPU generator would use 32 bits of the seed only.)
    """
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(key).encode()).digest(), "big"))


def check_ranges(args) -> None:
    """End the run for a flag that is out of its range, whichever of them a script has."""
    positive = (
        "rollout_batch_size group_size mini_batch_size batch_size num_epochs max_response_length max_prompt_length "
        "max_length reward_timeout generation_batch_size eval_samples "
        "temperature learning_rate max_grad_norm critic_learning_rate critic_max_grad_norm ptx_batch_size kl_target "
        "kl_horizon vllm_tensor_parallel lora_alpha sequence_parallel"
    )
    not_negative = (
        "weight_decay min_learning_rate critic_weight_decay critic_min_learning_rate max_skipped_updates kl_coef "
        "entropy_coef ptx_coef eval_every eval_prompts eval_pairs log_samples save_every keep_checkpoints seed "
        "clip_low clip_high value_clip critic_warmup_steps reward_clip centre_coef ref_refresh_every pf_ppo_power "
        "overlong_buffer max_refills kv_cache_gb shard_group_size lora_rank micro_batch_tokens "
        "logits_chunk_tokens"
    )
    share = "adam_beta1 adam_beta2 warmup_ratio critic_warmup_ratio gamma gae_lambda ref_refresh_mix"
    for name, value in vars(args).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(math.isfinite(x) for x in numbers if isinstance(x, float)):
            fail(f"--{name} {value}: has to be a finite number")
    for names, within, meaning in (
        (positive, lambda x: x > 0, "above 0"),
        (not_negative, lambda x: x >= 0, "0 or more"),
        (share, lambda x: 0 <= x <= 1, "between 0 and 1"),
    ):
        for name in names.split():
            value = getattr(args, name, None)
            if value is not None and not within(value):
                fail(f"--{name} {value}: has to be {meaning}")
    for name in ("shard_group_size", "cpu_offload"):
        if getattr(args, name) and args.shard != "fsdp":
            fail(f"--{name}: takes --shard fsdp")
    if 1 in (args.adam_beta1, args.adam_beta2):
        fail("--adam_beta1 and --adam_beta2 have to be below 1")
    for prefix in ("", "critic_"):
        floor, peak = (getattr(args, f"{prefix}{name}learning_rate", 0) for name in ("min_", ""))
        if floor > peak:
            fail(f"--{prefix}min_learning_rate {floor}: has to be at most --{prefix}learning_rate")


def check_common_args(args) -> None:
    """End the run for flags of the RL scripts that are out of range or don't fit together."""
    check_ranges(args)
    responses = args.rollout_batch_size * args.group_size
    product = f"--rollout_batch_size x --group_size = {responses}"
    if responses % args.mini_batch_size:
        fail(f"--mini_batch_size {args.mini_batch_size}: has to divide {product}")
    if args.total_episodes < responses:
        fail(f"--total_episodes {args.total_episodes}: is less than one step of {product}")
    if not 0 <= args.min_response_length <= args.max_response_length:
        fail(f"--min_response_length {args.min_response_length}: has to lie between 0 and --max_response_length")
    if not 0 < args.rollout_correction_cap or args.rollout_correction == "mask" and args.rollout_correction_cap < 1:
        fail(f"--rollout_correction_cap {args.rollout_correction_cap}: has to be above 0, with mask 1 or more")
    if (args.rollout_backend == "server") != bool(args.rollout_servers):
        fail("--rollout_backend server and --rollout_servers ADDRESS ... go together")
    if args.vllm_tensor_parallel > 1 and args.rollout_backend != "vllm":
        fail(f"--vllm_tensor_parallel {args.vllm_tensor_parallel}: takes --rollout_backend vllm")
    if args.vllm_tensor_parallel > 1 and args.async_steps:
        fail("--async_steps 1: ranks that share an engine would meet in it and in training at once; take vLLM servers")
    if args.rollout_backend in ("vllm", "server") and args.temperature > 2:
        fail(f"--temperature {args.temperature}: vLLM takes at most 2")
    if args.overlong_buffer > args.max_response_length:
        fail(f"--overlong_buffer {args.overlong_buffer}: has to be at most --max_response_length")
    if args.filter_groups != "none" and args.group_size < 2:
        fail(f"--filter_groups {args.filter_groups}: takes groups, so a --group_size of 2 or more")
    from plumbing.rewards import check_sources, reward_names

    check_sources(reward_names(args), args.reward_weights)
    if args.ptx_coef and not args.ptx_dataset:
        fail(f"--ptx_coef {args.ptx_coef}: takes supervised rows, named by --ptx_dataset")
    if args.ptx_dataset and not args.ptx_coef:
        fail(f"--ptx_dataset {args.ptx_dataset}: has no effect without a --ptx_coef above 0")
    if args.kl_coef and args.kl_in == "loss" and args.kl_estimator == "k1":
        warn("--kl_in loss --kl_estimator k1: its gradient has zero mean, so it is no penalty; take k2, k3 or full")
    if args.ref_refresh_every and args.lora_rank:
        fail("--ref_refresh_every: with --lora_rank the reference is the model without its adapter, which stays")
    if args.ref_refresh_every and not args.kl_coef:
        fail(f"--ref_refresh_every {args.ref_refresh_every}: with --kl_coef 0 there is no reference to refresh")
    if not 0 < args.top_p <= 1 or args.top_k < 0 or args.repetition_penalty <= 0:
        fail("--top_p has to lie in (0, 1], --top_k to be 0 or more, --repetition_penalty to be above 0")
    if args.top_p < 1 or args.top_k > 0 or args.repetition_penalty != 1 or args.min_response_length > 0:
        warn(
            "--top_p, --top_k, --repetition_penalty and --min_response_length bias the ratio: "
            "they change the distribution that is sampled, not the one that is trained"
        )


class Interrupt:
    """SIGTERM and SIGINT ask the run to save and end; a second SIGINT ends it at once.

    `requested` is this process's flag and is polled where ranks run on their own (generation). `agreed` is collective
    and is asked where ranks meet, so that all of them leave at the same place.
    """

    def __init__(self, world: World):
        self.world, self.requested = world, False
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, signum, frame) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))

    def agreed(self) -> bool:
        return self.world.any(self.requested)


# ----------------------------------------------------------------------------------------------------------------
# Models and tokenizers
# ----------------------------------------------------------------------------------------------------------------


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for a one-line report."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class Optimizer:
    """AdamW with a schedule, gradient clipping, and a guard: a gradient that is not finite never reaches the weights.

    Weight decay acts on matrices, not on biases and norms. What runs backward is the loss times `loss_scale`: 1, or
    with --precision fp16 a power of two that keeps gradients in its range, halved at a gradient that is not finite and
    doubled after 2000 updates without one, as torch.amp.GradScaler does it.

    Args:
        model: the parameters; all ranks hold the same gradient of them, or their shards of it, when `step` is called.
        total_updates: how many updates the schedule spans.
        prefix: of the flags to go by, "critic_" for --critic_learning_rate and so on.
    """

    COUNTERS = ("updates", "skipped_in_a_row", "loss_scale", "since_rescaled")  # of a checkpoint, beside Adam's state

    def __init__(self, model: torch.nn.Module, args, total_updates: int, prefix: str = ""):
        setting = lambda name: getattr(args, prefix + name)
        self.peak, self.floor = setting("learning_rate"), setting("min_learning_rate")
        self.schedule, self.warmup_ratio = setting("lr_schedule"), setting("warmup_ratio")
        self.max_grad_norm, self.max_skipped, self.prefix = setting("max_grad_norm"), args.max_skipped_updates, prefix
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        matrices, others = [p for p in self.parameters if p.ndim >= 2], [p for p in self.parameters if p.ndim < 2]
        decay = setting("weight_decay")
        groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(args.adam_beta1, args.adam_beta2), fused=True)
        self.total_updates = total_updates
        self.updates = self.skipped_in_a_row = self.since_rescaled = 0
        self.rescales, self.loss_scale = args.precision == "fp16", 2.0**16 if args.precision == "fp16" else 1.0
        self.norms: list[float] = []  # of the gradients since the last `metrics`, before clipping

    @property
    def lr(self) -> float:
        """The learning rate of the last update."""
        return self.adam.param_groups[0]["lr"]

    def step(self) -> None:
        """Clip, check, update the weights, and clear the gradient."""
        if self.loss_scale != 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.loss_scale
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)).item()
        factor = lr_factor(self.updates, self.total_updates, self.warmup_ratio, self.schedule)
        for group in self.adam.param_groups:
            group["lr"] = self.floor + factor * (self.peak - self.floor)
        if math.isfinite(norm):  # the same on all ranks, so all of them skip or none does
            self.adam.step()
        self.adam.zero_grad()
        self.updates += 1
        self.norms.append(norm)
        if not self.rescale(math.isfinite(norm)):  # else it was the scale's fault
            self.skipped_in_a_row = 0 if math.isfinite(norm) else self.skipped_in_a_row + 1
        if self.skipped_in_a_row > self.max_skipped:
            fail(
                f"--max_skipped_updates {self.max_skipped}: the gradient was not finite in {self.skipped_in_a_row} "
                f"updates in a row; go on from the last checkpoint with a lower --{self.prefix}learning_rate"
            )

    def rescale(self, finite: bool) -> bool:
        """Move the scale of the loss by what came of it; whether it was lowered."""
        self.since_rescaled += 1
        lower = self.rescales and not finite and self.loss_scale > 1
        if lower or self.rescales and finite and self.since_rescaled == 2000:
            self.loss_scale, self.since_rescaled = self.loss_scale * (0.5 if lower else 2.0), 0
        elif not finite:
            self.since_rescaled = 0
        return lower

    def metrics(self) -> dict[str, float]:
        """The learning rate now; mean gradient norm and number of skipped updates since the last call."""
        taken = [norm for norm in self.norms if math.isfinite(norm)]
        skipped, self.norms = len(self.norms) - len(taken), []
        mean = sum(taken) / len(taken) if taken else math.nan
        return {
            f"{self.prefix}lr": self.lr,
            f"loss/{self.prefix}grad_norm": mean,
            f"val/{self.prefix}skipped_updates": skipped,
            **({f"val/{self.prefix}loss_scale": self.loss_scale} if self.rescales else {}),
        }

    def state_dict(self) -> dict:
        counters = {name: getattr(self, name) for name in self.COUNTERS}
        return {"adam": self.adam.state_dict(), **counters}

    def load_state_dict(self, state: dict) -> None:
        """Take over a state from a checkpoint, whole or sharded; either goes with either kind of parameters."""
        from plumbing.checkpoints import Stored, read_sharded

        parameters = [p for group in self.adam.param_groups for p in group["params"]]
        values = [(parameters[i], own, name) for i, own in state["adam"]["state"].items() for name in own]
        stored: dict[str, dict[str, torch.Tensor]] = {}  # folder: what to read from there
        for parameter, own, name in values:
            if isinstance(own[name], Stored):
                folder, key = own[name].folder, own[name].key
                own[name] = stored.setdefault(folder, {})[key] = torch.zeros_like(parameter, requires_grad=False)
            elif isinstance(parameter, DTensor) and own[name].shape == parameter.shape:
                spread = (parameter.device_mesh, parameter.placements)
                own[name] = distribute_tensor(own[name].to(parameter.device), *spread, src_data_rank=None)
        for folder, tensors in stored.items():
            read_sharded(folder, tensors)
        self.adam.load_state_dict(state["adam"])
        for name in self.COUNTERS:
            setattr(self, name, state.get(name, getattr(self, name)))


def lr_factor(update: int, total: int, warmup_ratio: float, schedule: str) -> float:
    """Where between its floor (0) and its peak (1) the learning rate of an optimizer update stands.

    Rises linearly over the first `warmup_ratio * total` updates (the first one already moves), then stays ("constant")
    or falls to 0 at the last update ("linear", "cosine").
    """
    warmup = math.ceil(warmup_ratio * total)
    if update < warmup:
        return (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, total - 1 - warmup))
    return {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[schedule]


PASS = 1024  # tokens of padding that one more forward pass, and backward, is worth


def micro_batches(lengths: list[int], token_budget: int, world: World) -> list[list[int]]:
    """Cut sequences of known lengths into this rank's micro-batches of similar length.

    Ranks cut at the same places, as they meet in each pass and the slowest decides: those with the fewest tokens,
    padding included, where one more micro-batch counts as PASS of them.

    Args:
        lengths: tokens of every sequence of all ranks, the same list on every rank.
        token_budget: tokens of a micro-batch on a rank, padding included; a longer sequence is one of its own.
    Returns:
        Lists of indices into `lengths`, as many on every rank, so that none waits for the others in a collective; the
        last one may be empty, and is run like the rest.
    """
    token_budget *= world.sequence_parallel_group.size() if world.sequence_parallel_group else 1
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])  # longest first: memory problems show at once
    longest = np.array([lengths[i] for i in order[:: world.size]])  # over the ranks, at each place
    cost, begins, start = np.zeros(len(longest) + 1), [0], 0  # the least of the first so many places; its last cut
    for end in range(1, len(longest) + 1):
        while start < end - 1 and (end - start) * longest[start] > token_budget:
            start += 1
        costs = cost[start:end] + np.arange(end - start, 0, -1) * longest[start:end]
        begins.append(start + int(costs.argmin()))
        cost[end] = costs.min() + PASS
    own, cuts, end = order[world.rank :: world.size], [], len(longest)
    while end:
        cuts.append(own[begins[end] : end])
        end = begins[end]
    return cuts[::-1]


def even_parts(items: list, most: int) -> list[list]:
    """Cut a list into as few parts of at most `most` items as it takes, of sizes that differ by one at most."""
    count = math.ceil(len(items) / most)
    return [items[len(items) * i // count : len(items) * (i + 1) // count] for i in range(count)]


# ----------------------------------------------------------------------------------------------------------------
# Number formats and sharding
# ----------------------------------------------------------------------------------------------------------------


def parameter_count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, gathered if it is sharded: a collective, on the GPU where the ranks have one."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()  # an offloaded tensor is gathered by the GPUs


# ----------------------------------------------------------------------------------------------------------------
# Sequences that several ranks share: each has a slice of the positions, and in attention some of the heads at all
# positions (DeepSpeed Ulysses, arXiv:2309.14509)
# ----------------------------------------------------------------------------------------------------------------


# ----------------------------------------------------------------------------------------------------------------
# Data
# ----------------------------------------------------------------------------------------------------------------


# ----------------------------------------------------------------------------------------------------------------
# Rewards: answers are checked in processes of their own, so that what hangs or crashes there can be killed
# ----------------------------------------------------------------------------------------------------------------


# ----------------------------------------------------------------------------------------------------------------
# Rollout engines: what samples, if it is not transformers
# ----------------------------------------------------------------------------------------------------------------


# ----------------------------------------------------------------------------------------------------------------
# Evaluation
# ----------------------------------------------------------------------------------------------------------------


# ----------------------------------------------------------------------------------------------------------------
# Checkpoints
# ----------------------------------------------------------------------------------------------------------------


# ----------------------------------------------------------------------------------------------------------------
# Logging
# ----------------------------------------------------------------------------------------------------------------


def peak_memory_gb(device: torch.device) -> float:
    """The most memory in use so far, in GB: of the GPU as allocated by torch, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


class Clock:
    """Seconds that the phases of a step take, and what follows from them."""

    def __init__(self, device: torch.device, seconds_before: float, engine=None):
        """`engine`: what samples; where it sleeps, the memory that torch still counts for it is free."""
        self.device, self.begin, self.engine = device, time.perf_counter() - seconds_before, engine
        self.laps: dict[str, float] = {}
        self.peak_gb = 0.0  # the most memory in use in a lap

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the GPU works on after a call has returned
        return time.perf_counter()

    def start(self) -> None:
        self.last, self.laps = self._now(), {}

    def lap(self, name: str) -> None:
        """The phase that ends now."""
        now = self._now()
        self.laps[name], self.last = self.laps.get(name, 0.0) + now - self.last, now
        asleep = self.engine.freed_gb if getattr(self.engine, "asleep", False) else 0.0
        self.peak_gb = max(self.peak_gb, peak_memory_gb(self.device) - asleep)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def total(self) -> float:
        """Seconds since the run began, those before a resume included."""
        return time.perf_counter() - self.begin

    def metrics(self, work: dict[str, list[tuple]], tokens: int, world: World) -> dict[str, float]:
        """time/... of the laps and perf/... of the step; MFU is of the step, and of each lap that has work.

        Args:
            work: by phase, the models at work and the FLOPs that each did for a parameter: 2 a token for a pass
                forward, 6 with the one backward.
            tokens: of the step's sequences, prompts included, over all ranks.
        """
        step, peak = sum(self.laps.values()), world.size * peak_flops(self.device)
        flops = {name: sum(count * parameter_count(model) for model, count in done) for name, done in work.items()}
        known = [name for name in self.laps if flops.get(name) and math.isfinite(peak)]
        return {
            **{f"time/{name}": seconds for name, seconds in self.laps.items()},
            "time/step": step,
            "time/from_scratch": self.total(),
            "perf/tokens_per_second": tokens / step,
            "perf/mfu": sum(flops.values()) / step / peak,
            **{f"perf/mfu_{name}": flops[name] / self.laps[name] / peak for name in known},
            "perf/peak_memory_gb": self.peak_gb,
        }


class Sums:
    """Sums (and largest values) of tensors over micro-batches and ranks; nothing waits for the GPU until `totals`."""

    def __init__(self, world: World):
        self.world, self.sums, self.largest = world, {}, {}

    def add(self, **tensors: torch.Tensor) -> None:
        for name, x in tensors.items():
            self.sums[name] = self.sums.get(name, 0) + x.detach().double()

    def max(self, **tensors: torch.Tensor) -> None:
        for name, x in tensors.items():  # an empty micro-batch has none; 0 is below every value that is asked for
            before = self.largest.get(name, x.new_zeros(1))
            self.largest[name] = torch.cat([x.detach().flatten().double(), before]).amax(0, True)

    def totals(self) -> dict[str, float]:
        """{name: sum over all ranks} and {"max_" + name: largest over all ranks}; NaN for what was never added."""
        if not self.sums:
            return defaultdict(lambda: math.nan)
        sums = self.world.sum(torch.stack(list(self.sums.values()))).tolist()
        largest = self.world.max(torch.cat(list(self.largest.values()))).tolist()
        return dict(zip(self.sums, sums)) | {f"max_{name}": value for name, value in zip(self.largest, largest)}


def peak_flops(device: torch.device) -> float:
    """Dense bf16 FLOP/s of the GPU by its data sheet; NaN where it is not known, as on a CPU."""
    sheet = {  # TFLOP/s
        "H100": 989, "H200": 989, "H800": 989, "B200": 2250, "A100": 312, "A800": 312, "L40S": 362, "A10": 125,
        "4090": 165, "3090": 71,
    }  # fmt: skip
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((teraflops * 1e12 for key, teraflops in sheet.items() if key in name), math.nan)
