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


@dataclass
class ConfigArgs:
    config: str = ""
    """File with flags, .json or .yaml: {"learning_rate": 1e-6, ...}, or the args.json of a run. Flags of the command
    line go over it."""


class Removed:
    """What flags that are gone stand for, until nothing reads them any more."""

    report = resume_with_changes = turn_rewards = whiten_rewards = fit_value_model = hub_private_repo = False
    reward_normalization = False
    stop_after_step = top_k = max_turn_length = critic_warmup_patience = 0
    length_adaptive_lambda = critic_min_learning_rate = reward_clip = ptx_coef = 0.0
    max_skipped_updates, max_refills, logits_chunk_tokens = 5, 9, 512
    sapo_tau_positive, sapo_tau_negative, ref_refresh_mix, pf_ppo_power = 1.0, 1.05, 1.0, 1.0
    verifier_column = ptx_dataset = ""
    reward_model_scale, overlong_prompts, rewritten_turns, wandb_project = "raw", "drop", "error", None
    dataset_split, eval_split, ptx_split = "train", "test", "train"
    hub_model_id = property(lambda args: args.push_to_hub)
    adam_beta1 = property(lambda args: args.adam_betas[0])
    adam_beta2 = property(lambda args: args.adam_betas[1])
    kl_controller = property(lambda args: "adaptive" if args.kl_target else "fixed")
    reward_timeout = tool_timeout = property(lambda args: args.timeout)
    critic_max_grad_norm = property(lambda args: args.max_grad_norm)


@dataclass
class OutputArgs(Removed):
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
    save_every: NonNegativeInt = 50
    """Steps between checkpoints; there is one of the last step in any case. 0: only then, or when interrupted."""
    keep_checkpoints: NonNegativeInt = 2
    """Newest checkpoints that stay; 0 for all."""
    eval_every: NonNegativeInt = 20
    """Steps between evaluations; also before the first step and after the last. 0: never."""
    log_samples: NonNegativeInt = 16
    """Samples of each step written to samples.jsonl."""
    track: Literal["", "wandb", "trackio"] = ""
    """Log to Weights & Biases (wandb; WANDB_PROJECT and WANDB_MODE=offline work) or to trackio, too."""
    push_to_hub: str = ""
    """Push the final model to the Hugging Face hub with a model card, as NAME or OWNER/NAME; requires a login (hf auth
    login, or HF_TOKEN). "": do not."""


@dataclass
class PretrainedArgs:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """Model to begin with: a causal language model's folder or hub name."""
    stop_token: str = "eos"
    """Token that ends a response: eos (every end token of tokenizer and model) or the text of one token."""
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
    gradient_checkpointing: bool = False
    """Recompute activations and logits in the backward pass: less memory, about a third more time."""
    micro_batch_tokens: PositiveInt = 16_384
    """Tokens, padding included, of a forward pass on one device. Memory and speed; results change by rounding only."""
    lora_rank: NonNegativeInt = 0
    """Train LoRA adapters of this rank (alpha is twice the rank) instead of the weights, with peft; the reference is
    then the model without them. 0: train all weights."""
    shard: Literal["auto", "none", "fsdp", "fsdp_offload"] = "auto"
    """none holds whole models on each rank; fsdp shards weights, gradients and Adam's state over the ranks;
    fsdp_offload also keeps them on the CPU, where the update is computed: slow, but small; auto is fsdp if the
    models that train would take over 60 % of a GPU's memory, at 16 bytes a parameter."""


@dataclass
class PromptArgs:
    dataset: str = "openai/gsm8k"
    """Prompts: arithmetic (built in), reasoning_gym:TASK, a .jsonl, .json or .parquet file, a folder, owner/name or
    owner/name:config on the hub, each with @split after it for another split than train; or a .json list of {"prob":
    weight, "filepath": any of these}."""
    prompt_column: str = ""
    """Column of the prompt, text or messages; a dot goes into an object. Default: the first that any row has something
    in of prompt, question, messages, problem, quiz, src."""
    answer_column: str = ""
    """Column of the reference answer, likewise; default: the first of answer, ground_truth, reward_model.ground_truth,
    solution_text, solution, tgt, completion, or else the turn of the assistant that messages end with."""
    system_prompt: str = "Please reason step by step, and put your final answer within \\boxed{}."
    """System turn put before each prompt that has none; "" for none."""
    max_prompt_length: PositiveInt = 512
    """Most tokens of a prompt; longer ones are left out, and counted."""


@dataclass
class DataArgs(PromptArgs):
    eval_dataset: str = ""
    """Prompts to evaluate on, named as those of --dataset, split test unless @split is given; default: those of
    --dataset, or for a single file nothing. Of a list, each data set has an accuracy of its own, too."""
    eval_prompts: NonNegativeInt = 256
    """Prompts of an evaluation, the first ones of the evaluation set, of a list in turns; 0 for all."""
    eval_samples: PositiveInt = 4
    """Sampled responses a prompt for accuracy and pass@k, beside the greedy one."""


@dataclass
class ScoringArgs:
    reward: tuple[str, ...] = ("math",)
    """Reward sources: math (parsed and compared), gsm8k (strict ####), exact, format (think/answer), code (runs Python
    against the row's tests), knights, ifeval, reasoning_gym, environment (the sum of what --environment gives),
    path/to/file.py:function, a reward model's folder or hub name, or a reward server's http:// address. A response
    counts as correct if the first source that is no model gives it 1 or more."""
    timeout: Seconds = 30.0
    """Seconds after which a call of a reward source, a tool or an environment is killed; the sample of such a reward is
    left out."""


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


@dataclass
class ConversationArgs:
    tools: tuple[str, ...] = ()
    """Functions that the model may call, each as path/to/tools.py:function, with type hints and a docstring."""
    environment: str = ""
    """Class that answers the model's turns, as path/to/environment.py:Class, with an instance for each response; the
    sum of its rewards is the source environment of --reward."""
    max_turns: PositiveInt = 10
    """Most turns of the model in a response."""
    tool_call_pattern: str = ""
    """Regular expression of a tool call, with groups name and arguments (without name: the only tool), in place of the
    form of the chat template."""
    turn_stop: tuple[str, ...] = ()
    """Texts that end a turn as a stop token does, such as </search> for a model that goes on after a call."""


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
    for name in ("clip_high", "value_clip"):
        if (getattr(args, name, None) or 0) > 10:
            warn(f"--{name} {getattr(args, name)}: so large a clip hardly ever acts")
    if args.kl_coef and args.kl_in == "loss" and args.kl_estimator == "k1":
        warn("--kl_in loss --kl_estimator k1: its gradient has zero mean, so it is no penalty; take k2 or k3")
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
    if args.top_p < 1 or args.repetition_penalty != 1 or args.min_response_length > 0:
        warn(
            "--top_p, --repetition_penalty and --min_response_length bias the ratio: "
            "they change the distribution that is sampled, not the one that is trained"
        )
