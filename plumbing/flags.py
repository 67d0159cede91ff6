"""The flags of the machinery, declared once: each script's `Args` inherits the groups that it needs.

A range stands at the flag, in its type. plumbing/command_line.py reads a command line, and shows one group a class in
`--help`. What a paper's table of hyperparameters would list stands in the scripts. OutputArgs, PretrainedArgs,
PromptArgs, ScoringArgs and SamplingArgs are what scripts/evaluate.py takes as well; the groups of training extend them.
Imports utils only.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Callable, Literal
from urllib.parse import urlsplit

from tyro.constructors import PrimitiveConstructorSpec

from utils import fail, warn

LARGEST = {int: 10**15, float: 1e30}


def in_range(kind: type, allowed: Callable, meaning: str, several: bool = False):
    """Return the type of a flag whose value is a finite number for which `allowed` holds; others raise ValueError.

    Larger numbers than LARGEST have no use, and no place in int64 or float32. With `several`, the flag takes any number
    of values, and gives a tuple.
    """

    def read(word: str):
        shown = word or "''"
        try:
            value = kind(word)
        except ValueError:
            raise ValueError(f"has to be {'a whole number' if kind is int else 'a number'}, not {shown}") from None
        if not (abs(value) <= LARGEST[kind] and allowed(value)):
            limit = f" and at most {LARGEST[kind]:g}" if allowed(value) and value < math.inf else ""
            raise ValueError(f"has to be {meaning}{limit}, not {shown}")
        return value

    name = kind.__name__.upper()
    if several:
        spec = PrimitiveConstructorSpec(
            nargs="*", metavar=f"[{name} [{name} ...]]", instance_from_str=lambda words: tuple(map(read, words)),
            is_instance=lambda value: isinstance(value, tuple), str_from_instance=lambda value: list(map(str, value)),
        )  # fmt: skip
        return Annotated[tuple[kind, ...], spec]
    spec = PrimitiveConstructorSpec(
        nargs=1, metavar=name, instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, (int, float)), str_from_instance=lambda value: [str(value)],
    )  # fmt: skip
    return Annotated[kind, spec]


PositiveInt = in_range(int, lambda x: x > 0, "above 0")
NonNegativeInt = in_range(int, lambda x: x >= 0, "0 or more")
PositiveInts = in_range(int, lambda x: x > 0, "above 0", several=True)
Float = in_range(float, lambda x: True, "a finite number")
Floats = in_range(float, lambda x: True, "a finite number", several=True)
Port = in_range(int, lambda x: 0 <= x < 2**16, "between 0 and 65535")
PositiveFloat = in_range(float, lambda x: x > 0, "above 0")
Seconds = in_range(float, lambda x: 0 < x <= 1e6, "above 0 and at most 1e6")
NonNegativeFloat = in_range(float, lambda x: x >= 0, "0 or more")
Share = in_range(float, lambda x: 0 <= x <= 1, "between 0 and 1")
PositiveShare = in_range(float, lambda x: 0 < x <= 1, "above 0 and at most 1")
Decay = in_range(float, lambda x: 0 <= x < 1, "0 or more and below 1")
ZeroOrAboveOne = in_range(float, lambda x: x == 0 or x > 1, "above 1, or 0 for none")


def read_tracker(words: list[str]) -> str:
    """Return the value of --track for the words after it; raise ValueError for others than it takes."""
    if len(words) > 1 or not {"wandb", "tensorboard", ""} >= set(words):
        raise ValueError(f"has to be wandb or tensorboard, not {' '.join(words)}")
    return words[0] if words else "wandb"


Tracker = Annotated[
    str,
    PrimitiveConstructorSpec(
        nargs="*", metavar="{wandb,tensorboard}", instance_from_str=read_tracker,
        is_instance=lambda value: isinstance(value, str), str_from_instance=lambda value: [value] if value else [],
    ),
]  # fmt: skip


@dataclass
class ConfigArgs:
    config: str = ""
    """File with flags, .json or .yaml: {"learning_rate": 1e-6, ...}, or the args.json of a run. Flags of the command
    line go over it."""


@dataclass
class OutputArgs:
    run_name: str = ""
    """Name of the run's folder; default: script, model, data set and seed."""
    output_dir: str = "runs"
    """Folder that holds the runs; several nodes need one that they share."""
    seed: NonNegativeInt = 1
    """Seed of everything random: the order of the data, the sampling, the mini-batches."""


@dataclass
class RunArgs(OutputArgs):
    resume: bool = False
    """Go on from the run's newest whole checkpoint; begin anew if it was killed before there was one."""
    resume_with_changes: bool = False
    """Go on even if flags have changed that make another run of it, such as --seed, --dataset or --loss."""
    save_every: NonNegativeInt = 50
    """Steps between checkpoints; there is one of the last step in any case. 0: only then, or when interrupted."""
    keep_checkpoints: NonNegativeInt = 2
    """Newest checkpoints that stay; 0 for all."""
    eval_every: NonNegativeInt = 20
    """Steps between evaluations; also before the first step and after the last. 0: never."""
    stop_after_step: NonNegativeInt = 0
    """Save and leave after this step, as on a signal, with schedules as they are by the whole length; 0: at the end."""
    log_samples: NonNegativeInt = 16
    """Samples of each step written to samples.jsonl."""
    report: bool = False
    """Write report.html too, at each evaluation and at the end: all of the run so far on one page, for a browser."""
    track: Tracker = ""
    """Log to wandb (Weights & Biases; WANDB_MODE=offline works) or tensorboard too; alone, --track is --track wandb."""
    wandb_project: str = "rl-on-language-models"
    """Weights & Biases project."""
    push_to_hub: bool = False
    """Push the final model to the Hugging Face hub, with a model card; takes a login (hf auth login, or HF_TOKEN)."""
    hub_model_id: str = ""
    """Repository to push to, as name or owner/name; default: the run's name."""
    hub_private_repo: bool = False
    """Make the repository private, if it is not there yet."""


@dataclass
class PretrainedArgs:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """Model to begin with: a causal language model's folder or hub name."""
    stop_token: str = "eos"
    """Token that ends a response: eos (every end token of tokenizer and model) or the text of one token."""
    pad_token: str = ""
    """Padding token in place of the tokenizer's; default: its own or, if it has none, eos (masks come from lengths)."""
    chat_template: str = ""
    """File of a chat template (jinja) in place of the tokenizer's, as for a base model; none for prompts that hold a
    template already: texts that stay as they are, without --system_prompt. Default: the tokenizer's."""
    precision: Literal["auto", "float32", "float64", "bf16", "fp16", "pure_bf16"] = "auto"
    """bf16 keeps float32 weights and computes in bfloat16 (autocast), fp16 in float16, with the loss scaled; pure_bf16
    has weights and Adam's state in bfloat16, too; float64 is for exactness tests; auto is bf16 on GPUs and float32
    elsewhere."""


@dataclass
class ModelArgs(PretrainedArgs):
    attention: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"
    ] = "auto"
    """Attention kernel, by transformers' names; auto is sdpa (torch's own) where the model has it, and eager for one
    that caps the scores of attention (Gemma 2), which sdpa would leave out."""
    compile: bool = False
    """Compile the decoder blocks of all models, and the statistics of the logits, by torch.compile; rollouts run
    uncompiled."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    micro_batch_tokens: NonNegativeInt = 0
    """Tokens, padding included, of a forward pass on one device. Memory and speed; results change by rounding only. 0:
    16,384, or fewer where the estimate of scripts/memory.py is over 80 % of a GPU."""
    lora_rank: NonNegativeInt = 0
    """Train LoRA adapters of this rank instead of the weights, with peft; the reference is then the model without them.
    0: train all weights."""
    lora_alpha: PositiveFloat = 32.0
    """The adapters' product is scaled by this over --lora_rank."""
    shard: Literal["auto", "none", "fsdp"] = "auto"
    """none holds whole models on each rank; fsdp shards weights, gradients and Adam's state over the ranks; auto is
    fsdp if whole models would take over 60 % of a GPU's memory."""
    shard_group_size: NonNegativeInt = 0
    """Ranks that share one sharded copy, such as those of a node, with --shard fsdp; 0 for all."""
    cpu_offload: bool = False
    """Keep sharded weights, gradients and Adam's state on the CPU, where the update is computed: slow, but small."""
    sequence_parallel: PositiveInt = 1
    """Neighbouring ranks that share each sequence in training, each with a slice of its positions; for long ones."""
    max_skipped_updates: NonNegativeInt = 5
    """Updates in a row that may be skipped for a gradient that is not finite before the run stops."""


@dataclass
class PromptArgs:
    dataset: str = "openai/gsm8k"
    """Prompts: arithmetic (built in), reasoning_gym:TASK, a .jsonl, .json or .parquet file, a folder, owner/name or
    owner/name:config on the hub, or a .json list of {"prob": weight, "filepath": any of these, "split": optional}."""
    dataset_split: str = "train"
    """Split of --dataset to train on."""
    prompt_column: str = ""
    """Column of the prompt, text or messages; a dot goes into an object. Default: the first that any row has something
    in of prompt, question, messages, problem, quiz, src."""
    answer_column: str = ""
    """Column of the reference answer, likewise; default: the first of answer, ground_truth, reward_model.ground_truth,
    solution_text, solution, tgt, completion, or else the turn of the assistant that messages end with."""
    system_prompt: str = "Please reason step by step, and put your final answer within \\boxed{}."
    """System turn put before each prompt that has none; "" for none."""
    max_prompt_length: PositiveInt = 512
    """Most tokens of a prompt."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """Leave prompts over --max_prompt_length out, and count them in a line, or end the run, naming the row."""


@dataclass
class DataArgs(PromptArgs):
    eval_dataset: str = ""
    """Prompts to evaluate on, named as those of --dataset; default: the --eval_split of --dataset, or for a single file
    nothing. Of a list, each data set has an accuracy of its own, too."""
    eval_split: str = "test"
    """Split to evaluate on."""
    eval_prompts: NonNegativeInt = 256
    """Prompts of an evaluation, the first ones of the evaluation set, of a list in turns; 0 for all."""
    eval_samples: PositiveInt = 4
    """Sampled responses a prompt for accuracy and pass@k, beside the greedy one."""
    ptx_dataset: str = ""
    """Rows for a supervised loss beside the policy's (PPO-ptx, arXiv:2203.02155), named as those of --dataset: a
    prompt, and the text to imitate in an answer column or in a last turn of the assistant."""
    ptx_split: str = "train"
    """Split of --ptx_dataset."""


@dataclass
class ScoringArgs:
    reward: tuple[str, ...] = ("math",)
    """Reward sources: math (parsed and compared), gsm8k (strict ####), exact, format (think/answer), code (runs Python
    against the row's tests), knights, ifeval, reasoning_gym, environment (the sum of what --environment gives),
    path/to/file.py:function, a reward model's folder or hub name, or a reward server's http:// address. A response
    counts as correct if the first source that is no model gives it 1 or more."""
    verifier_column: str = ""
    """Column with the sources of --reward, a name or a list, that alone score a row. Default: verifier or, with several
    sources, dataset in rows with ground_truth (open-instruct's); none: every source scores every row."""
    reward_model_scale: Literal["raw", "centred", "standardized"] = "raw"
    """Take a reward model's score as it is, minus the mean that its config carries, or divided by its deviation too."""
    reward_timeout: Seconds = 30.0
    """Seconds that one call of a reward source may take before it is killed and its sample left out."""


@dataclass
class RewardArgs(ScoringArgs):
    reward_weights: Floats = ()
    """Weight of each reward source in their sum; default: 1 each. A source of weight 0 is only measured."""


@dataclass
class SamplingArgs:
    kv_cache_gb: NonNegativeFloat = 0.0
    """GB of vLLM's cache on each device; 0: a quarter of a GPU's memory, 1 on a CPU."""
    generation_batch_size: PositiveInt = 512
    """Responses that one device generates at once. Memory and speed only."""
    min_response_length: NonNegativeInt = 0
    """Tokens before which a stop token cannot be sampled."""
    top_p: PositiveShare = 1.0
    """Sample from the smallest set of tokens with this probability; below 1 it biases training's ratio."""
    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0 for all; above 0 it biases training's ratio."""
    repetition_penalty: PositiveFloat = 1.0
    """Divide the logits of tokens seen before; other than 1 it biases training's ratio."""


@dataclass
class RolloutArgs(SamplingArgs):
    rollout_backend: Literal["auto", "hf", "vllm", "server"] = "auto"
    """What samples: transformers' model (hf), vLLM in this process, or vLLM servers; auto is vLLM on a GPU where it is
    installed, else hf."""
    rollout_servers: tuple[str, ...] = ()
    """Addresses of the vLLM servers, such as http://10.0.0.2:8000; scripts/vllm_server.py starts one."""
    async_steps: Literal[0, 1] = 0
    """1: while a step trains, vLLM samples for the next one, with the weights from before the step."""
    vllm_tensor_parallel: PositiveInt = 1
    """Neighbouring ranks that share one vLLM engine."""
    logits_chunk_tokens: NonNegativeInt = 0
    """Response tokens whose logits are computed at once; 0 for 512, or up to 4,096 if a GPU has the memory."""
    recompute_logits: Literal["auto", "yes", "no"] = "auto"
    """Compute logits again in the backward pass instead of keeping a number for each response token and entry of the
    vocabulary. Memory and speed only. auto: with --gradient_checkpointing, or if a GPU lacks the memory."""


def check_address(flag: str, address: str) -> None:
    """End the run unless an address is of the form http://host:port."""
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port over 65535, or no IPv6 address in brackets
        valid = False
    if not valid or len(address.split()) > 1:
        fail(f"{flag} {address}: is no address, such as http://10.0.0.2:8000")


def check_training_args(args) -> None:
    """End the run for flags of any script that do not fit together."""
    for name in ("shard_group_size", "cpu_offload"):
        if getattr(args, name) and args.shard != "fsdp":
            fail(f"--{name}: takes --shard fsdp")
    for name in ("hub_model_id", "hub_private_repo"):
        if getattr(args, name) and not args.push_to_hub:
            fail(f"--{name}: takes --push_to_hub")
    for prefix in ("", "critic_"):
        floor, peak = getattr(args, f"{prefix}min_learning_rate", 0), getattr(args, f"{prefix}learning_rate", 0)
        if floor > peak:
            fail(f"--{prefix}min_learning_rate {floor}: has to be at most --{prefix}learning_rate")


def check_rl_args(args) -> None:
    """End the run for flags of the RL scripts that do not fit together; warn of those that bias the result."""
    check_training_args(args)
    responses = args.rollout_batch_size * args.group_size
    product = f"--rollout_batch_size x --group_size = {responses}"
    if responses % args.mini_batch_size:
        fail(f"--mini_batch_size {args.mini_batch_size}: has to divide {product}")
    if args.total_episodes < responses:
        fail(f"--total_episodes {args.total_episodes}: is less than one step of {product}")
    if args.min_response_length > args.max_response_length:
        fail(f"--min_response_length {args.min_response_length}: has to be at most --max_response_length")
    if args.overlong_buffer > args.max_response_length:
        fail(f"--overlong_buffer {args.overlong_buffer}: has to be at most --max_response_length")
    if args.filter_groups != "none" and args.group_size < 2:
        fail(f"--filter_groups {args.filter_groups}: takes groups, so a --group_size of 2 or more")
    check_rollout_args(args)
    if args.ptx_coef and not args.ptx_dataset:
        fail(f"--ptx_coef {args.ptx_coef}: takes supervised rows, named by --ptx_dataset")
    if args.ptx_dataset and not args.ptx_coef:
        fail(f"--ptx_dataset {args.ptx_dataset}: has no effect without a --ptx_coef above 0")
    for name in ("clip_high", "value_clip"):
        if (getattr(args, name, None) or 0) > 10:
            warn(f"--{name} {getattr(args, name)}: so large a clip hardly ever acts")
    if args.kl_coef and args.kl_in == "loss" and args.kl_estimator == "k1":
        warn("--kl_in loss --kl_estimator k1: its gradient has zero mean, so it is no penalty; take k2, k3 or full")
    if args.ref_refresh_every and args.lora_rank:
        fail("--ref_refresh_every: with --lora_rank the reference is the model without its adapter, which stays")
    if args.ref_refresh_every and not args.kl_coef:
        fail(f"--ref_refresh_every {args.ref_refresh_every}: with --kl_coef 0 there is no reference to refresh")


def check_rollout_args(args) -> None:
    """End the run for flags of the rollout that do not fit together; warn of those that bias the ratio."""
    if args.rollout_correction == "mask" and args.rollout_correction_cap < 1:
        fail(f"--rollout_correction_cap {args.rollout_correction_cap}: takes at least 1 with --rollout_correction mask")
    if (args.rollout_backend == "server") != bool(args.rollout_servers):
        fail("--rollout_backend server and --rollout_servers ADDRESS ... go together")
    for address in args.rollout_servers:
        check_address("--rollout_servers", address)
    if args.vllm_tensor_parallel > 1 and args.rollout_backend != "vllm":
        fail(f"--vllm_tensor_parallel {args.vllm_tensor_parallel}: takes --rollout_backend vllm")
    if args.vllm_tensor_parallel > 1 and args.async_steps:
        fail("--async_steps 1: ranks that share an engine would meet in it and in training at once; take vLLM servers")
    if args.rollout_backend in ("vllm", "server") and args.temperature > 2:
        fail(f"--temperature {args.temperature}: vLLM takes at most 2")
    if args.top_p < 1 or args.top_k > 0 or args.repetition_penalty != 1 or args.min_response_length > 0:
        warn(
            "--top_p, --top_k, --repetition_penalty and --min_response_length bias the ratio: "
            "they change the distribution that is sampled, not the one that is trained"
        )
