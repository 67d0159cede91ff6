"""What every training loop calls at every step: processes, random numbers, micro-batches,
optimizer, clock, sums.

Imports nothing of this project.
"""

import contextlib
import hashlib
import math
import os
import re
import resource
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from tqdm import tqdm

VERSION = "0.5.0"  # of the project; CHANGELOG.md and CITATION.cff have it, too
ROOT = os.path.dirname(os.path.abspath(__file__))
# After SIGTERM or SIGINT. If the first step had begun, a checkpoint was saved.
EXIT_INTERRUPTED = 75


def one_line(message: str) -> str:
    """Return a message without control characters, such as line ends: text from a file may hold
    them, and a terminal would obey.
    """
    return re.sub(r"[\0-\x1f\x7f-\x9f]+", " ", message)


class UserError(Exception):
    """An error that the user can fix. The message names the flag, or the file and its row, and says
    what to do. A command prints it as one line and exits with code 2 (plumbing/run/command.py).

    All ranks of a node are assumed to raise it alike, and one prints it for them, unless the reason
    is `local` to this rank.
    """

    def __init__(self, message: str, local: bool = False):
        super().__init__(message)
        self.local = local


class Interrupted(Exception):
    """SIGTERM or SIGINT came, and the run stops; a command exits with code 75 then."""


def say(message: str, file: Any = None) -> None:
    """Print one line above the progress bars, from rank 0 only; on stdout by default."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write(one_line(message), file)


def warn(message: str) -> None:
    """Print one line on stderr, as `say` does."""
    say(f"warning: {message}", sys.stderr)


@dataclass
class World:
    """This process among all of the run: one process, or `torchrun` on one or several nodes.

    Collectives are no-ops for a single process. All ranks have to call them alike.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # None: torch.distributed's default one
    # Neighbouring ranks that share one rollout engine, and so compute the same rollout.
    ranks_per_engine: int = 1
    timeout: timedelta = timedelta(minutes=30)  # of a collective

    @property
    def main(self) -> bool:
        return self.rank == 0

    def rollout_world(self, ranks_per_engine: int) -> "World":
        """Return the same processes in a CPU group of their own, for rollouts: a thread may make them
        while the step trains.
        """
        # Fails at once where a rank has ended; a new group would wait for it until the time-out.
        self.barrier()
        group = dist.new_group(backend="gloo", timeout=self.timeout) if self.size > 1 else None
        return World(self.rank, self.size, torch.device("cpu"), group, ranks_per_engine)

    def all_gather(self, items: list) -> list:
        """Return every rank's list, concatenated in rank order."""
        parts = [items] * self.size
        if self.size > 1:
            dist.all_gather_object(parts, items, group=self.group)
        return [item for part in parts for item in part]

    def shard(self, items: list) -> list:
        """Return this rank's share of a list that all ranks hold: items rank, rank + size,
        rank + 2 size and so on.

        Ranks that share an engine count as one here, and get the same items.
        """
        return items[self.rank // self.ranks_per_engine :: self.size // self.ranks_per_engine]

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
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

    def on_main(self, act: Callable, *args: Any, **options: Any):
        """Call a function on rank 0 alone; on all ranks return what it returns, or raise the
        UserError that it raises.
        """
        result = error = None
        if self.main:
            try:
                result = act(*args, **options)
            except UserError as raised:
                error = raised
        result, error = self.all_gather([(result, error)])[0]
        if error is not None:
            raise error
        return result


def setup_processes(minutes: float = 30.0) -> World:
    """Join the process group that torchrun describes in the environment; without torchrun, be the
    only process.

    Args:
        minutes: after which a rank that waits in a collective ends in an error.
    """
    # transformers would print its progress and warnings once per rank.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    world = World(0, 1, torch.device("cpu"), timeout=timedelta(minutes=minutes))
    # Otherwise training fragments the memory, and a vLLM that wakes up finds no room in it. torch
    # reads this at its first allocation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        gpus = torch.cuda.device_count()
        if local >= gpus:
            raise UserError(
                f"torchrun --nproc_per_node: starts more processes than there are GPUs, {gpus}"
            )
        world.device = torch.device("cuda", local)
        torch.cuda.set_device(world.device)
    if "RANK" in os.environ:
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        store, world.rank, world.size = next(rendezvous("env://", timeout=world.timeout))
        # torchrun's store outlives the ranks. Ranks that --max_restarts starts again would find the
        # addresses of dead ranks in it, and fail or hang (torch 2.13). So each start has a prefix.
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(
            backend, timeout=world.timeout, store=store, rank=world.rank, world_size=world.size
        )
    return world


def generator(*key: Any) -> np.random.Generator:
    """Return a random generator that is a function of `key` alone, such as ("rollout", seed, step).

    Nothing random in a run depends on what ran before, so a resumed run, or one with another number
    of ranks, draws the same numbers. (torch's CPU generator would use 32 bits of the seed only.)
    """
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(key).encode()).digest(), "big"))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for a one-line report."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def as_user_error(flag: str):
    """Raise a UserError in place of any error inside, where a library loads what a flag names.

    Args:
        flag: with its value, such as "--model Qwen/Qwen2.5-7B".
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Files of any content: transformers, tokenizers and datasets raise errors of any type.
        raise UserError(f"{flag}: {first_line(error)}") from error


class Optimizer:
    """AdamW with a schedule, gradient clipping, and a guard: a gradient that is not finite never
    reaches the weights.

    Weight decay acts on matrices, not on biases and norms. What runs backward is the loss times
    `loss_scale`: 1, or with --precision fp16 a power of two that is halved at a gradient that is
    not finite and doubled after 2000 updates without one. torch.amp.GradScaler does the same, but
    lets each rank decide by its shard of the gradient; here the norm over all ranks decides.

    Args:
        model: the parameters; all ranks hold the same gradient of them, or their shards of it, when
            `step` is called.
        steps: how many the schedule spans. updates_per_step: of a step whose responses all train.
        prefix: of the flags to go by, "critic_" for --critic_learning_rate and so on.
    """

    MAX_SKIPPED = 5  # updates in a row without a finite gradient; the run fails at the next one

    def __init__(
        self, model: nn.Module, args: Any, steps: int, updates_per_step: int = 1, prefix: str = ""
    ):
        setting = lambda name: getattr(args, prefix + name)
        self.peak = setting("learning_rate")
        # The critic has no flag for it.
        self.floor = 0.0 if prefix else args.min_learning_rate
        self.schedule = setting("lr_schedule")
        self.warmup_ratio = setting("warmup_ratio")
        self.max_grad_norm = args.max_grad_norm
        self.prefix = prefix
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self.parameters if p.ndim >= 2]
        others = [p for p in self.parameters if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": setting("weight_decay")},
            {"params": others, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=args.adam_betas, fused=True)
        self.total_updates = steps * updates_per_step
        self.updates_per_step = updates_per_step
        self.lr = 0.0  # of the last update
        self.updates = 0  # the place in the schedule
        self.skipped_in_a_row = self.since_rescaled = 0
        self.rescales = args.precision == "fp16"
        self.loss_scale = 2.0**16 if self.rescales else 1.0
        # What a resume goes on with; `updates` is a function of the step (`begin_step`).
        self.counters = ["skipped_in_a_row", "lr"]
        if self.rescales:
            self.counters += ["loss_scale", "since_rescaled"]
        self.norms: list[float] = []  # of the gradients since the last `metrics`, before clipping

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of a loss, times `loss_scale`.

        The loss is the sum of the ranks' shares, but DDP and FSDP average gradients over the ranks:
        so the share is multiplied by their number. If the loss is not finite, the gradient is made
        NaN, so that `step` skips the update: behind a torch.clamp, the gradient of a NaN is 0 and
        would look valid.
        """
        scale = self.loss_scale * (dist.get_world_size() if dist.is_initialized() else 1)
        (loss * torch.where(loss.isfinite(), scale, math.nan)).backward()

    def step(self) -> None:
        """Clip, check, update the weights, and clear the gradient."""
        if self.loss_scale != 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.loss_scale
        norm = full_tensor(nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)).item()
        finite = math.isfinite(norm)  # the same on all ranks, so all of them skip or none does
        factor = lr_factor(self.updates, self.total_updates, self.warmup_ratio, self.schedule)
        self.lr = self.floor + factor * (self.peak - self.floor)
        for group in self.adam.param_groups:
            group["lr"] = self.lr
        if finite and norm:  # without a gradient Adam's mean of earlier ones would move the weights
            self.adam.step()
        self.adam.zero_grad()
        self.updates += 1
        self.norms.append(norm)
        scale_was_lowered = self.rescale(finite)
        # With fp16 a scale of the loss that was too high is no fault of the run; it is lower now.
        if not scale_was_lowered:
            self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
            if not finite or not norm:
                name = f"{self.prefix}update".replace("_", " ")
                warn(
                    f"{name} {self.updates}: its gradient has norm {norm}, so it changes no weight"
                )
        if self.skipped_in_a_row > self.MAX_SKIPPED:
            raise UserError(
                f"--{self.prefix}learning_rate {self.peak}: the gradient was not finite in {self.skipped_in_a_row} "
                "updates in a row; resume from the last checkpoint with a lower one"
            )

    def begin_step(self, step: int, updates: int) -> None:
        """Set `self.updates`, the place in the learning rate schedule, for the start of a step.

        Each step owns `updates_per_step` places (steps count from 1). A step with fewer `updates`,
        because responses were left out, uses the last of its places. The place does not depend on
        earlier steps, so it is right after a resume with other flags.
        """
        self.updates = step * self.updates_per_step - updates

    def rescale(self, finite: bool) -> bool:
        """Adapt the scale of the loss to an update; return whether it was lowered."""
        self.since_rescaled = self.since_rescaled + 1 if finite else 0
        lower = not finite and self.loss_scale > 1
        if lower:
            self.loss_scale /= 2
        elif self.rescales and self.since_rescaled == 2000:
            self.loss_scale *= 2
            self.since_rescaled = 0
        return lower

    def metrics(self) -> dict[str, float]:
        """Return the learning rate now, and mean gradient norm and number of skipped updates since
        the last call.
        """
        finite = [norm for norm in self.norms if math.isfinite(norm)]
        skipped = len(self.norms) - len(finite)
        self.norms = []
        mean = sum(finite) / len(finite) if finite else math.nan
        return {
            f"{self.prefix}lr": self.lr,
            f"loss/{self.prefix}grad_norm": mean,
            f"val/{self.prefix}skipped_updates": skipped,
            **({f"val/{self.prefix}loss_scale": self.loss_scale} if self.rescales else {}),
        }

    def state_dict(self) -> dict:
        """Return the counters; plumbing/run/checkpoints.py saves Adam's state by the names of its
        parameters.
        """
        return {name: getattr(self, name) for name in self.counters}

    def load_state_dict(self, state: dict) -> None:
        for name in self.counters:
            # A run with another --precision has saved no scale.
            setattr(self, name, state.get(name, getattr(self, name)))


class AdaptiveKL:
    """The weight beta of the KL. --kl_target adapts it (Ziegler et al. 2019, arXiv:1909.08593,
    section 2.2).

    `coef`: beta of the next step.
    """

    def __init__(self, args: Any, state: dict):
        """`state`: of the run, which keeps beta for a resume."""
        self.args = args
        self.state = state
        self.coef = state.get("kl_coef", args.kl_coef) if args.kl_target else args.kl_coef

    def update(self, kl: float, sequences: int) -> None:
        """Set beta to beta * (1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon).

        Args:
            kl: mean over `sequences` of the mean over tokens. One that is not finite changes nothing.
        """
        if self.args.kl_target and math.isfinite(kl):
            error = min(max(kl / self.args.kl_target - 1, -0.2), 0.2)
            self.coef *= 1 + error * sequences / self.args.kl_horizon
            self.state["kl_coef"] = self.coef


class AdaptiveEntropy:
    """The weight of the entropy bonus. --entropy_target adapts it (Skywork-OR1, arXiv:2505.22312;
    the numbers are TRL's).

    `coef`: of the next step, 0 after a step whose entropy was above the target.
    """

    def __init__(self, args: Any, state: dict):
        """`state`: of the run; `weight`, which each step changes, and `coef` are saved there for a
        resume.
        """
        self.target = args.entropy_target
        self.state = state
        saved = state.get("entropy_coefs") if self.target else None
        self.weight, self.coef = saved or [args.entropy_coef] * 2

    def update(self, entropy: float) -> None:
        """Add 0.005 where the step's mean entropy per token is below the target, else subtract it,
        within 0 and 1. An entropy that is not finite changes nothing.
        """
        if self.target and math.isfinite(entropy):
            change = 0.005 if entropy < self.target else -0.005
            self.weight = min(max(self.weight + change, 0.0), 1.0)
            self.coef = self.weight if entropy <= self.target else 0.0
            self.state["entropy_coefs"] = [self.weight, self.coef]

    def metrics(self) -> dict:
        return {"policy/entropy_coef": self.coef} if self.target else {}


def lr_factor(update: int, total: int, warmup_ratio: float, schedule: str) -> float:
    """Return where the learning rate of an update stands between its floor (0) and its peak (1).

    It rises linearly over the first `warmup_ratio * total` updates, then stays ("constant") or
    falls to 0 at the last update ("linear", "cosine"). transformers' schedules start at 0, so that
    the first update would not move a weight.
    """
    warmup = math.ceil(warmup_ratio * total)
    if update < warmup:
        return (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, total - 1 - warmup))
    return {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[schedule]


PASS_TOKENS = 1024  # tokens of padding that cost as much as one more forward and backward pass


def micro_batches(lengths: list[int], token_budget: int, world: World) -> list[list[int]]:
    """Cut sequences into this rank's micro-batches of similar length.

    All ranks cut at the same places, since they meet in the collectives of each pass and the
    slowest one decides. The cuts minimise the tokens of the slowest rank, padding and PASS_TOKENS
    for each micro-batch included.

    Args:
        lengths: tokens of every sequence of all ranks, the same list on every rank.
        token_budget: tokens of a micro-batch on a rank, padding included; a longer sequence is a
            micro-batch alone.
    Returns:
        Lists of indices into `lengths`, as many on every rank, so that none waits for the others in
        a collective. The last one may be empty, and is run like the rest.
    """
    # Longest first: memory problems show at once.
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # Place k holds order[k * size : (k + 1) * size], a sequence for each rank. (places,): the greatest
    # length at each place.
    longest = np.array([lengths[i] for i in order[:: world.size]])
    # Dynamic programming over cut positions: cost[i] is the minimum for the first i places, and
    # last_cut[i] the place where the last micro-batch of that minimum begins.
    cost = np.zeros(len(longest) + 1)
    last_cut = [0]
    start = 0
    for end in range(1, len(longest) + 1):
        while start < end - 1 and (end - start) * longest[start] > token_budget:
            start += 1
        # For every begin in start..end - 1: tokens of the places from there to end - 1 as one
        # micro-batch, padded to the longest.
        padded = np.arange(end - start, 0, -1) * longest[start:end]
        costs = cost[start:end] + padded + PASS_TOKENS
        cost[end] = costs.min()
        last_cut.append(start + int(costs.argmin()))
    mine = order[world.rank :: world.size]
    cuts = []
    end = len(longest)
    while end:
        cuts.append(mine[last_cut[end] : end])
        end = last_cut[end]
    return cuts[::-1]


def mini_batches(
    items: list[int], size: int, epochs: int, key: tuple
) -> list[tuple[int, list[int]]]:
    """Shuffle items anew for each epoch and cut them into mini-batches of at most `size`, 0 for
    all: [(epoch, items)].

    Args:
        key: names the random order, see `generator`.
    """
    orders = [
        generator("mini-batches", *key, epoch).permutation(items).tolist()
        for epoch in range(epochs)
    ]
    return [
        (epoch, part)
        for epoch, order in enumerate(orders)
        for part in even_parts(order, size or len(items) or 1)
    ]


def count_updates(count: int, size: int, epochs: int) -> int:
    """Return how many mini-batches `mini_batches` makes of so many items."""
    return epochs * math.ceil(count / (size or count))


def even_parts(items: list, most: int) -> list[list]:
    """Cut a list into the fewest parts of at most `most` items, of sizes that differ by one at
    most.
    """
    count = math.ceil(len(items) / most)
    return [items[len(items) * i // count : len(items) * (i + 1) // count] for i in range(count)]


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor, gathered if it is sharded: a collective, on the GPU where the ranks have
    one.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    # An offloaded tensor is gathered by the GPUs.
    return tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]


def memory_gb(device: torch.device) -> float:
    """Return the memory in use, in GB: on a GPU, that of the device once it has done all that it
    was asked to do; on a CPU, the peak of this process so far.

    The GPU's driver is asked, as torch's counters include what a vLLM that sleeps has freed.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 1e9
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024)
        / 1e9
    )


class Clock:
    """Seconds and peak memory of the phases of a step."""

    def __init__(self, world: World, seconds_before: float):
        """
        Args:
            seconds_before: of the run before it was resumed.
        """
        self.device = world.device
        self.start_time = self.phase_start = time.perf_counter() - seconds_before
        self.phase = ""
        self.seconds: dict[str, float] = defaultdict(float)
        self.peak_memory_gb = 0.0  # of a step; the run sets it to 0 where one begins

    def begin_phase(self, phase: str) -> None:
        """Begin a phase, which ends the one before; "" for none."""
        # `memory_gb` waits for the GPU, which works on after a call has returned. It still counts
        # what the phase has freed, as torch keeps that memory.
        self.peak_memory_gb = max(self.peak_memory_gb, memory_gb(self.device))
        now = time.perf_counter()
        if self.phase:
            self.seconds[self.phase] += now - self.phase_start
        self.phase = phase
        self.phase_start = now

    def total(self) -> float:
        """Return the seconds since the run began, those before a resume included."""
        return time.perf_counter() - self.start_time

    def times(self) -> dict[str, float]:
        """Return the seconds of the phases since the last call, and end the phase that lasts."""
        self.begin_phase("")
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds.clear()
        return times

    def metrics(self, tokens: int) -> dict[str, float]:
        """End the step; return the seconds of its phases, its speed and its peak memory.

        Args:
            tokens: of the step's sequences, prompts included, over all ranks.
        """
        times = self.times()
        step = sum(times.values())
        return {
            **times,
            "time/step": step,
            "time/from_scratch": self.total(),
            "perf/tokens_per_second": tokens / step,
            "perf/peak_memory_gb": self.peak_memory_gb,
        }


class Sums:
    """Sums and largest values of tensors over micro-batches and ranks; nothing waits for the GPU
    until `totals`.
    """

    def __init__(self, world: World):
        self.world = world
        self.sums: dict[str, Tensor] = {}
        self.largest: dict[str, Tensor] = {}

    def add(self, mask: Tensor | None = None, **tensors: Tensor) -> None:
        """Add numbers by name. With a mask, the tensors have its shape, and what is added is their
        sum over its set entries.
        """
        for name, x in tensors.items():
            if mask is not None:
                x = torch.where(mask, x, 0.0).sum()
            self.sums[name] = self.sums.get(name, 0.0) + x.detach().double()

    def max(self, **tensors: Tensor) -> None:
        # Begins at 0, as no value here is negative. An empty tensor then needs no case of its own.
        for name, x in tensors.items():
            before = self.largest.get(name, x.new_zeros(1))
            self.largest[name] = torch.cat([x.detach().flatten().double(), before]).amax(0, True)

    def totals(self) -> dict[str, float]:
        """Return {name: sum over all ranks, "max_" + name: largest over all ranks}; NaN for what
        was never added.
        """
        totals: dict[str, float] = defaultdict(lambda: math.nan)
        for prefix, tensors, reduce in (
            ("", self.sums, self.world.sum),
            ("max_", self.largest, self.world.max),
        ):
            if tensors:
                values = reduce(torch.hstack([*tensors.values()])).tolist()
                totals.update((prefix + name, x) for name, x in zip(tensors, values))
        return totals
