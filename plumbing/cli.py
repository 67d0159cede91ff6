"""The flags of the machinery, with their ranges and rules.

The type of a flag holds its range, which pydantic checks. What a paper's table of hyperparameters
lists is in the scripts, whose `Args` inherit the groups that they need. A class of flags may have two
methods (plumbing/run/command.py): `rules` yields the conditions that flags must meet, and `warnings`
those without which flags are doubtful.
"""

import importlib.util
import os
import re
from typing import Annotated, Any, Iterator, Literal

from pydantic import AfterValidator, Field, FiniteFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

# Of a server, such as http://10.0.0.2:8000.
ADDRESS = r"https?://(\[[\da-fA-F:]+\]|[^\s/:]+)(:\d+)?(/\S*)?"
PositiveFloat = Annotated[FiniteFloat, Field(gt=0)]
NonNegativeFloat = Annotated[FiniteFloat, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Minutes = Annotated[float, Field(gt=0, le=1e4)]
Factor = Annotated[FiniteFloat, Field(ge=1)]
Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
Port = Annotated[int, Field(ge=0, lt=2**16)]
NonEmpty = Annotated[str, Field(min_length=1)]
# Of a file, a folder or the hub; ~ is the home folder, also in quotes, where shells do not expand it.
PathOrName = Annotated[str, AfterValidator(os.path.expanduser)]
Address = Annotated[str, Field(pattern=rf"^{ADDRESS}$")]
FileMember = Annotated[PathOrName, Field(pattern=r"^(.+:\w+)?$")]
Rules = Iterator[tuple[object, str]]  # conditions, each with what to say if it does not hold


@dataclass
class OutputArgs:
    config: PathOrName = ""
    """File with flags, .json or .yaml: {"learning_rate": 1e-6, ...}, or the args.json of a run.
    Flags of the command line override it."""
    run_name: Annotated[str, Field(max_length=200, pattern=r"^([^/]*[^/.])?$")] = ""
    """Name of the run's folder; default: script, model, data set and seed."""
    output_dir: PathOrName = "runs"
    """Folder that holds the runs; several nodes need one that they share."""
    seed: NonNegativeInt = 1
    """Seed of everything random: the order of the data, the sampling, the mini-batches."""


@dataclass
class RunArgs(OutputArgs):
    resume: bool = False
    """Continue from the run's newest checkpoint; begin a new run if there is none."""
    save_every: NonNegativeInt = 50
    """Steps between checkpoints; the last step has one, too. 0: only where the run is interrupted
    or fails, so that its end leaves final/ and no state of Adam."""
    keep_checkpoints: NonNegativeInt = 2
    """Number of checkpoints to keep, the newest ones; 0 for all."""
    keep_best: Annotated[str, Field(pattern="^(eval/.+)?$")] = ""
    """Metric of the evaluation, such as eval/accuracy: keep the trained model with the highest
    value, without Adam's state, in checkpoints/best/."""
    stop_at: FiniteFloat | None = None
    """End the run once the metric of --keep_best is this or more, after the first step or later."""
    eval_every: NonNegativeInt = 20
    """Steps between evaluations; also before the first step and after the last. 0: never."""
    log_samples: NonNegativeInt = 16
    """Samples of each step written to samples.jsonl."""
    track: Literal["", "wandb", "trackio"] = ""
    """Log to Weights & Biases (wandb; WANDB_PROJECT and WANDB_MODE=offline work) or to trackio,
    too."""
    collective_timeout: Minutes = 30.0
    """Minutes for which ranks wait for each other before the run ends; after a tenth of it, a line on
    each node names the ranks that are late. Higher where one rank may sample or score for longer."""

    def rules(self: Any) -> Rules:
        if self.keep_best:
            yield self.eval_every, "--keep_best requires an --eval_every above 0"
        if self.stop_at is not None:
            yield self.keep_best, "--stop_at requires a --keep_best"


@dataclass
class PretrainedArgs:
    model: PathOrName = "Qwen/Qwen2.5-0.5B-Instruct"
    """Model to begin with: a causal language model's folder or hub name."""
    stop_token: str = "eos"
    """Token that ends a response: eos (every end token of tokenizer and model, and that of the chat
    template's turns) or the text of one token."""
    chat_template: PathOrName = ""
    """File of a chat template (jinja) in place of the tokenizer's, as for a base model; none for
    prompts that hold a template already: texts that stay as they are, without --system_prompt.
    Default: the tokenizer's."""
    chat_template_kwargs: str = "{}"
    """JSON object of values that the chat template reads, such as {"enable_thinking": false}."""
    precision: Literal["auto", "float32", "float64", "bf16", "fp16", "pure_bf16"] = "auto"
    """bf16 keeps float32 weights and computes in bfloat16 (autocast), fp16 in float16, with the
    loss scaled; pure_bf16 has weights and Adam's state in bfloat16, too; float64 is for exactness
    tests; auto is bf16 on GPUs and float32 elsewhere."""


@dataclass
class ModelArgs(PretrainedArgs):
    attention: Literal[
        "auto",
        "sdpa",
        "eager",
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
        "flex_attention",
    ] = "auto"
    """Attention kernel, by transformers' names; auto is sdpa (torch's) where the model has it, and
    eager for one that caps the scores of attention (Gemma 2), which sdpa would leave out."""
    gradient_checkpointing: bool = True
    """Recompute activations and logits in the backward pass: much less memory, about a third more
    time."""
    compile: bool = False
    """Compile decoder blocks and log-probabilities by torch.compile: faster, in less memory; the
    first step takes a minute or more. The decode loop and reward models stay as they are."""
    micro_batch_tokens: PositiveInt = 16_384
    """Tokens, padding included, of a forward pass on one device. Memory and speed; results change
    by rounding only."""
    lora_rank: NonNegativeInt = 0
    """Train LoRA adapters of this rank (alpha is twice the rank) instead of the weights, with peft;
    the reference is then the model without them. 0: train all weights."""
    quantize: Literal["", "4bit"] = ""
    """QLoRA: hold the weights under the adapters in 4 bits (NF4 with double quantization, by
    bitsandbytes)."""
    shard: Literal["auto", "none", "fsdp", "fsdp_offload"] = "auto"
    """none holds whole models on each rank; fsdp shards weights, gradients and Adam's state over
    the ranks; fsdp_offload also keeps them on the CPU, where the update is computed: slow, but
    small; auto is fsdp on several GPUs, else none."""

    share_prompts = False  # a flag where a prompt has several responses, see PolicyArgs

    def rules(self: Any) -> Rules:
        if self.quantize:
            yield self.lora_rank, "--quantize requires a --lora_rank above 0"
            yield (
                self.precision != "float64",
                "--quantize requires another --precision than float64",
            )
            installed = importlib.util.find_spec("bitsandbytes")
            yield installed, "--quantize requires bitsandbytes: pip install bitsandbytes==0.50.2"


@dataclass
class PromptArgs:
    dataset: PathOrName = "openai/gsm8k"
    """Prompts: arithmetic or instructions (built in), reasoning_gym:TASK, a .jsonl, .json, .csv or .parquet file, a
    folder, owner/name or owner/name:config on the hub, each with @split after it for another split
    than train; or a .json list of {"prob": weight, "filepath": any of these}."""
    prompt_column: str = ""
    """Column of the prompt, text or messages; a dot goes into an object or its JSON text. Default: the first of
    prompt, question, messages, problem, quiz, src, instruction, conversations in which one of the
    first 1,000 rows has something."""
    answer_column: str = ""
    """Column of the reference answer, likewise; default: the first of answer, ground_truth,
    reward_model.ground_truth, verification_info.ground_truth, expected_answer, solution_text,
    solution, tgt, completion, output, or else the turn of the assistant that messages end with."""
    max_prompt_length: PositiveInt = 512
    """Maximum number of tokens of a prompt; longer ones are left out, and counted."""


@dataclass
class DataArgs(PromptArgs):
    shuffle: bool = True
    """Shuffle the rows of --dataset anew for each pass; --no-shuffle keeps the order of the file, as for
    a curriculum (of a list: the order of each data set)."""
    eval_dataset: PathOrName = ""
    """Prompts to evaluate on, named as those of --dataset, split test unless @split is given;
    default: those of --dataset, or for a single file nothing but --eval_share. Of a list, each data
    set has an accuracy, too."""
    eval_share: Decay = 0.0
    """Fraction of the rows of --dataset that is held out and evaluated on, in place of --eval_dataset:
    chosen by a hash of the prompt, so that it is the same in each run."""
    eval_prompts: NonNegativeInt = 256
    """Prompts of an evaluation, the first ones of the evaluation set; 0 for all."""
    eval_samples: PositiveInt = 4
    """Sampled responses per prompt for accuracy and pass@k, in addition to the greedy one."""

    def rules(self: Any) -> Rules:
        if self.eval_share:
            yield not self.eval_dataset, "--eval_share and --eval_dataset exclude each other"


@dataclass
class ScoringArgs:
    reward: Annotated[tuple[PathOrName, ...], Field(min_length=1)] = ("math",)
    """Reward sources: math (parsed and compared), gsm8k (strict ####), exact, format
    (think/answer), code (runs Python against the row's tests), ifeval, reasoning_gym, episode
    (what --environment or --agent gives), path/to/file.py:function, a reward model's folder or hub
    name, or a reward server's http:// address. A response counts as correct if the first source
    that tells right from wrong gives it 1 or more."""
    timeout: Seconds = 30.0
    """Seconds after which a call of a reward source, a tool or an environment is killed; the sample
    of such a reward is left out."""
    reward_workers: NonNegativeInt = 0
    """Processes of a rank for built-in rewards, which score while it samples; 0: one for each of
    its share of cores."""

    def rules(self: Any) -> Rules:
        yield len(set(self.reward)) == len(self.reward), "--reward must not name a source twice"
        yield (
            all(re.fullmatch(ADDRESS, x) for x in self.reward if re.match("https?://", x)),
            "--reward: the address of a reward server must be of the form http://10.0.0.2:8000",
        )


@dataclass
class RewardArgs(ScoringArgs):
    reward_weights: tuple[Weight, ...] = ()
    """Weight of each reward source in their sum; default: 1 each. A source of weight 0 is only
    measured."""

    def rules(self: Any) -> Rules:
        if self.reward_weights:
            one_each = len(self.reward_weights) == len(self.reward)
            yield one_each, "--reward_weights must hold one weight for each source of --reward"
            yield any(self.reward_weights), "--reward_weights must not all be 0"


@dataclass
class SamplingArgs:
    kv_cache_gb: NonNegativeFloat = 0.0
    """GB of vLLM's cache on each device; 0: a quarter of a GPU's memory, 1 on a CPU."""
    generation_batch_size: PositiveInt = 512
    """Responses that one device generates at once; conversations, each with a process, that a rank
    has at once. Memory and speed only."""
    min_response_length: NonNegativeInt = 0
    """Tokens before which a stop token cannot be sampled."""
    top_p: PositiveFraction = 1.0
    """Sample from the smallest set of tokens with this probability; below 1 it biases training's
    ratio."""
    repetition_penalty: PositiveFloat = 1.0
    """Divide the logits of tokens seen before; other than 1 it biases training's ratio."""
    log_tokens: bool = True
    """Write the tokens of the responses in samples.jsonl, with their log-probs, advantages and
    weights, to tokens.jsonl: about 80 bytes per token."""

    def rules(self: Any) -> Rules:
        yield (
            self.min_response_length <= self.max_response_length,
            "--min_response_length must be at most --max_response_length",
        )


@dataclass
class RolloutArgs(SamplingArgs):
    rollout_backend: Literal["auto", "hf", "vllm", "server"] = "auto"
    """What samples: transformers' model (hf), vLLM in this process, or vLLM servers; auto is vLLM
    on a GPU where it is installed, else hf."""
    rollout_servers: tuple[Address, ...] = ()
    """Addresses of the vLLM servers, such as http://10.0.0.2:8000; scripts/vllm_server.py starts
    one."""
    async_steps: Annotated[int, Field(ge=0, le=8)] = 0
    """While a step trains, vLLM samples for so many steps after it: 1 with the weights from before
    the step; from 2 on responses under way go on with the new ones."""
    vllm_tensor_parallel: PositiveInt = 1
    """Neighbouring ranks that share one vLLM engine."""
    vllm_lora: bool = True
    """vLLM samples from the base and the adapter of --lora_rank, of which a sync sends the adapter,
    where vLLM supports the family (a server: where it has --lora_rank, too); else, and with
    --no-vllm_lora, from merged weights."""
    eval_temperature: Annotated[float, Field(gt=0, le=2)] | None = None
    """Temperature of the samples of an evaluation; default: --temperature."""
    eval_top_p: PositiveFraction | None = None
    """--top_p of the samples of an evaluation; default: --top_p."""
    save_rollouts: bool = False
    """Save what each step samples, with its scores, in rollouts/ of the run's folder."""
    rollouts_from: PathOrName = ""
    """Folder of a run with --save_rollouts: train on what its steps have sampled, in place of
    sampling; evaluations still sample."""

    def rules(self: Any) -> Rules:
        backend = self.rollout_backend
        yield (
            (backend == "server") == bool(self.rollout_servers),
            "--rollout_backend server and --rollout_servers require each other",
        )
        if self.compile and self.async_steps:
            yield (
                backend == "server",
                "--compile requires --async_steps 0 or --rollout_backend server: torch compiles in one "
                "thread only",
            )
        if self.rollouts_from:
            yield not self.save_rollouts, "--save_rollouts and --rollouts_from exclude each other"
        if self.vllm_tensor_parallel > 1:
            yield backend == "vllm", "--vllm_tensor_parallel requires --rollout_backend vllm"
            yield (
                not self.async_steps,
                "--async_steps requires --vllm_tensor_parallel 1: ranks that share an engine would meet "
                "in it and in training at once",
            )

    def warnings(self: Any) -> Rules:
        yield (
            self.top_p == 1 and self.repetition_penalty == 1 and self.min_response_length == 0,
            "--top_p, --repetition_penalty and --min_response_length bias the ratio: they "
            "change the distribution that is sampled, not the one that is trained",
        )


@dataclass
class ConversationArgs:
    tools: tuple[FileMember, ...] = ()
    """Functions that the model may call, each as path/to/tools.py:function, with type hints and a
    docstring."""
    environment: FileMember = ""
    """Class that answers the model's turns, as path/to/environment.py:Class, with an instance for
    each response; the sum of its rewards is the source episode of --reward."""
    agent: FileMember = ""
    """Function play(base_url, **row) that asks the model by OpenAI's API, as path/to/agent.py:play;
    what it returns is the source episode of --reward."""
    agent_timeout: Seconds = 600.0
    """Seconds after which a call of the agent is killed; the response is left out."""
    max_turns: PositiveInt = 10
    """Maximum number of turns of the model in a response."""
    turn_stop: tuple[NonEmpty, ...] = ()
    """Texts that end a turn as a stop token does, such as </search> for a model that continues
    after a call."""

    def rules(self: Any) -> Rules:
        talks = self.tools or self.environment
        if "episode" in self.reward:
            rewards = self.environment or self.agent
            yield rewards, "--reward episode requires an --environment or --agent"
        if self.agent:
            yield not talks, "--agent takes the place of --tools and --environment"
        if self.turn_stop:
            several = talks or self.agent
            yield several, "--turn_stop requires --tools, an --environment or an --agent"
        if talks or self.agent:
            yield (
                (self.min_response_length, self.vllm_tensor_parallel) == (0, 1),
                "--tools, --environment and --agent require --min_response_length 0 and "
                "--vllm_tensor_parallel 1",
            )

    def warnings(self: Any) -> Rules:
        if self.environment or self.agent:
            yield (
                "episode" in self.reward,
                "--environment and --agent: their rewards do not count without episode in --reward",
            )


@dataclass
class OptimizerArgs:
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_ratio: Fraction = 0.03
    """Fraction of all updates over which the learning rate rises."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices; biases and norms have none."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay of the mean gradient and of the mean squared gradient."""
    max_grad_norm: PositiveFloat = 1.0
    """Clip the norm of the gradient to this."""

    def rules(self: Any) -> Rules:
        yield (
            self.min_learning_rate <= self.learning_rate,
            "--min_learning_rate must be at most --learning_rate",
        )

    def warnings(self: Any) -> Rules:
        if self.lora_rank:
            yield (
                self.learning_rate >= 1e-5,
                "--lora_rank: adapters hardly move at a --learning_rate below 1e-5; 1e-5 to 2e-4 are usual",
            )


@dataclass
class PolicyArgs(OptimizerArgs):
    pass_rates: tuple[FiniteFloat, FiniteFloat] | None = None
    """LOW HIGH: draw prompts by what the policy solves. A prompt whose last group had a mean score
    below LOW or above HIGH, by the first source of --reward that tells right from wrong, has a
    tenth of the chance of the others. Default: shuffled passes."""
    share_prompts: bool = False
    """Forward the prompt of several responses once, where that saves a fifth of the tokens of a pass:
    for long prompts. Results change by rounding only."""
    ref_model: PathOrName = ""
    """Reference for the KL penalty; default: --model as it was at the start."""

    def rules(self: Any) -> Rules:
        yield (
            self.total_episodes >= self.rollout_batch_size * self.group_size,
            "--total_episodes must be at least a step, --rollout_batch_size x --group_size",
        )
        yield (
            self.overlong_buffer <= self.max_response_length,
            "--overlong_buffer must be at most --max_response_length",
        )
        yield (
            self.dual_clip == 0 or self.dual_clip > 1,
            "--dual_clip must be above 1, or 0 for none",
        )
        yield (
            self.filter_groups != "refill" or self.async_steps < 2,
            "--filter_groups refill requires --async_steps 0 or 1: the first prompt "
            "of a step is known only after the step before has sampled",
        )
        if self.pass_rates:
            low, high = self.pass_rates
            yield low <= high, "--pass_rates LOW HIGH: LOW must be at most HIGH"
            yield (
                self.shuffle and self.group_size > 1,
                "--pass_rates requires --shuffle and a --group_size of 2 or more: it draws the prompts, "
                "by the mean scores of their groups",
            )
        if self.ref_refresh_every:
            yield (
                self.kl_coef and not self.lora_rank,
                "--ref_refresh_every requires a reference with weights: --lora_rank 0 and a --kl_coef "
                "above 0",
            )
        if self.ref_model or self.kl_target:
            yield self.kl_coef, "--ref_model and --kl_target require a --kl_coef above 0"
        if self.entropy_target:
            begins = self.entropy_coef
            yield begins, "--entropy_target requires an --entropy_coef above 0 to begin with"
        if self.kl_target:
            yield (
                5 * self.kl_horizon > self.rollout_batch_size * self.group_size,
                "--kl_horizon must be over a fifth of a step's responses: --kl_coef would fall to 0 or "
                "below",
            )

    def warnings(self: Any) -> Rules:
        if self.kl_coef:
            settings = self.kl_in, self.kl_estimator, getattr(self, "kl_weighting", "none")
            yield (
                settings != ("loss", "k1", "none"),
                "--kl_in loss with --kl_estimator k1: its gradient has zero mean; use k2 or k3",
            )
        yield (
            self.rollout_correction != "sequence_mask" or self.async_steps < 2,
            "--rollout_correction sequence_mask with --async_steps of 2 or more drops long responses "
            "whole, as its product over tokens grows with the length; use geometric, or dppo of grpo.py",
        )
