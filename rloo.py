"""REINFORCE for language models, without a critic: RLOO, REINFORCE++, ReMax and OPO, in one file.

For each prompt, sample responses from the current policy, score them, and minimise over the response tokens

    mean of  max(-A * r, -A * clip(r, 1 - low, 1 + high))          r = pi / pi_old of the token or of the sequence

The algorithms differ in the advantage A alone (`token_advantages`; R: score minus beta * KL of the response):

    rloo                  R - mean R of the other responses to the prompt         arXiv:2402.14740, section 2.3
    reinforce++           reward-to-go of each token, whitened over the batch     arXiv:2501.03262v9, eq. 4 and 5
    reinforce++-baseline  R - mean R of the group, whitened over the batch        arXiv:2501.03262v9, eq. 6 and 7
    remax                 R - score of the greedy response                        arXiv:2310.10505
    opo                   R - mean R of the group weighted by length              arXiv:2505.23585

Deliberate choices. As in all scripts here, the gradient is that of the global batch, whatever the ranks and
micro-batches; the sampling temperature is in every log-probability; each (response, position) has its own random
number; masks come from lengths, never from token ids; what could not be scored is left out and counted. And:
1. The KL stands in the reward, estimator k1, as RLOO and REINFORCE++ have it; `--kl_in loss` moves it to the loss.
2. `--ratio sequence` has one ratio a response, as RLOO is derived; one ratio a token is what most systems run.
3. With one update a rollout the ratio is exactly 1, and all of this is REINFORCE with a baseline.
4. Whitening counts the response tokens of all ranks, its variance is unbiased, and a response without a score is out.
5. The greedy response of remax is scored without its KL: any function of the prompt is a baseline without bias.

    bash scripts/demo.sh rloo                                                         # a tiny model on a CPU, minutes
    python rloo.py --model Qwen/Qwen2.5-0.5B-Instruct                                 # one GPU, GSM8K
    torchrun --nproc_per_node 8 rloo.py --model Qwen/Qwen2.5-7B                       # eight GPUs
"""

import contextlib
import dataclasses
import functools
import math
import os
import sys
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
import tyro
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process

import utils
from plumbing import checkpoints, data, engines, evaluation, memory, models, run_log
from plumbing.rewards import Rewards, is_reward_model, needs_answer, one_score, reward_names, reward_weights
from plumbing.sharding import Sharding, gradient_sync, model_device, sync_reference, unsharded


@dataclass
class Args:
    # ---- run ----
    run_name: str = ""
    """Name of the run's folder; default: algorithm, model, data set and seed."""
    output_dir: str = "runs"
    """Folder that holds the runs; several nodes need one that they share."""
    seed: int = 1
    """Seed of everything random: the order of the prompts, the sampling, the mini-batches."""
    resume: bool = False
    """Go on from the run's newest complete checkpoint, if it has one."""
    track: bool = False
    """Log to Weights & Biases too (WANDB_MODE=offline works)."""
    wandb_project: str = "rl-on-language-models"
    """Weights & Biases project."""

    # ---- model ----
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """Model to train: a causal language model's folder or hub name."""
    ref_model: str = ""
    """Reference for the KL penalty; default: --model as it was at the start."""
    reward_model: str = ""
    """Reward model (folder or hub name) whose score is one more source after those of --reward."""
    precision: Literal["auto", "float32", "float64", "bf16", "fp16", "pure_bf16"] = "auto"
    """bf16 keeps float32 weights and computes in bfloat16 (autocast), fp16 in float16, with the loss scaled; pure_bf16
    has weights and Adam's state in bfloat16, too; float64 is for exactness tests; auto is bf16 on GPUs and float32
    elsewhere."""
    attention: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"
    ] = "auto"
    """What computes the attention, by transformers' names; auto is sdpa (torch's own) where the model has it."""
    compile: bool = False
    """Compile the decoder blocks of all models, and the statistics of the logits, by torch.compile; generate runs as it
    is."""
    shard: Literal["auto", "none", "fsdp"] = "auto"
    """none holds whole models on each rank; fsdp cuts weights, gradients and Adam's state in pieces, one a rank; auto
    is fsdp if whole models would take over 60 % of a GPU's memory."""
    shard_group_size: int = 0
    """Ranks that share one sharded copy, such as those of a node, with --shard fsdp; 0 for all."""
    cpu_offload: bool = False
    """Keep sharded weights, gradients and Adam's state on the CPU, where the update is computed: slow, but small."""
    lora_rank: int = 0
    """Train LoRA adapters of this rank instead of the weights, with peft; the reference is then the model without them.
    0: train all weights."""
    lora_alpha: float = 32.0
    """The adapters' product is scaled by this over --lora_rank."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    sequence_parallel: int = 1
    """Neighbouring ranks that share each sequence in training, each with a slice of its positions; for long ones."""

    # ---- data ----
    dataset: str = "openai/gsm8k"
    """Prompts: arithmetic (built in), reasoning_gym:TASK, a .jsonl, .json or .parquet file, a folder, owner/name or
    owner/name:config on the hub, or a .json list of {"prob": weight, "filepath": any of these}."""
    dataset_split: str = "train"
    """Split of --dataset to train on."""
    prompt_column: str = ""
    """Column of the prompt, text or messages; default: the first of prompt, question, messages, problem, quiz,
    src."""
    answer_column: str = ""
    """Column of the reference answer; default: the first of answer, ground_truth, solution_text, solution,
    tgt."""
    system_prompt: str = "Please reason step by step, and put your final answer within \\boxed{}."
    """System turn put before each prompt that has none; "" for none."""
    max_prompt_length: int = 512
    """Most tokens of a prompt; a longer one ends the run at the start, naming its row."""
    eval_dataset: str = ""
    """Prompts to evaluate on; default: the --eval_split of --dataset, or for a single file nothing."""
    eval_split: str = "test"
    """Split to evaluate on."""
    ptx_dataset: str = ""
    """Rows of prompt and answer text to imitate beside the rewards, named as --dataset, with the usual columns."""
    ptx_coef: float = 0.0
    """Weight of the cross-entropy on --ptx_dataset."""
    ptx_batch_size: int = 64
    """Rows of --ptx_dataset an optimizer update, over all ranks."""

    # ---- rewards ----
    reward: tuple[str, ...] = ("math",)
    """Reward sources, summed: math (parsed and compared), gsm8k (strict ####), exact, format (think/answer), code (runs
    Python against the row's tests), knights, reasoning_gym, path/to/file.py:function, a reward model's folder or hub
    name, or a reward server's http:// address. A response counts as correct if the first source that is no model gives
    it 1 or more."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each reward source; default: 1 each. A source of weight 0 is only measured."""
    reward_model_scale: Literal["raw", "centred", "standardized"] = "raw"
    """Take a reward model's score as it is, minus the mean that its config carries, or divided by its deviation too."""
    reward_timeout: float = 30.0
    """Seconds that one call of a reward source may take before it is killed and its sample left out."""
    non_stop_penalty: bool = True
    """Replace the score of a response that does not end with a stop token by --penalty_reward_value."""
    penalty_reward_value: float = 0.0
    """Score of a response without a stop token."""
    overlong_buffer: int = 0
    """Soft overlong penalty: over the last so many tokens before --max_response_length the score falls linearly by up
    to 1 (DAPO, arXiv:2503.14476, eq. 13); 0 for none."""
    mask_truncated: bool = False
    """Leave responses without a stop token out, of the loss and of their group's baseline; no penalty touches them."""
    reward_normalization: bool = False
    """Normalise scores by their mean and standard deviation since the start of the run, before any penalty."""
    reward_clip: float = 0.0
    """Clip scores to +- this, before any penalty; 0 for no clip."""
    filter_groups: Literal["none", "drop", "refill"] = "none"
    """Drop the groups whose scores are all equal; refill also samples other prompts in their place (DAPO's dynamic
    sampling)."""
    max_refills: int = 9
    """Most further rollouts of a step with --filter_groups refill; then the step goes on with what there is."""

    # ---- rollout ----
    rollout_backend: Literal["auto", "hf", "vllm", "server"] = "auto"
    """What samples: transformers' generate (hf), vLLM in this process, or vLLM servers; auto is vLLM on a GPU where it
    is installed, else hf."""
    rollout_servers: tuple[str, ...] = ()
    """Addresses of the vLLM servers, such as http://10.0.0.2:8000; scripts/vllm_server.py starts one."""
    async_steps: Literal[0, 1] = 0
    """1: while a step trains, vLLM samples for the next one, with the weights from before the step."""
    rollout_correction: Literal["none", "truncate", "mask", "sequence_mask"] = "none"
    """Weight the policy loss by rho = policy at the start of the step / policy that sampled: truncate rho of a token to
    --rollout_correction_cap, drop tokens outside of [1 / cap, cap], or take the response's and drop it above cap."""
    rollout_correction_cap: float = 2.0
    """Largest rho of --rollout_correction; 2 for tokens, 3 for sequences are usual."""
    vllm_tensor_parallel: int = 1
    """Neighbouring ranks that share one vLLM engine."""
    kv_cache_gb: float = 0.0
    """GB of vLLM's cache on each device; 0: a quarter of a GPU's memory, 1 on a CPU."""
    max_response_length: int = 1024
    """Most tokens of a response."""
    min_response_length: int = 0
    """Tokens before which a stop token cannot be sampled."""
    temperature: float = 1.0
    """Sampling temperature; it divides the logits in every log-probability."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability; below 1 it biases the ratio."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 for all; above 0 it biases the ratio."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens seen before; other than 1 it biases the ratio."""
    stop_token: str = "eos"
    """Token that ends a response: eos (every end token of tokenizer and model) or the text of one token."""
    pad_token: str = ""
    """Padding token for a tokenizer that has none; "eos" is safe, as masks come from lengths."""
    generation_batch_size: int = 512
    """Responses that one device generates at once. Memory and speed only."""

    # ---- optimization ----
    total_episodes: int = 180_000
    """Responses after which the run ends (rounded down to whole steps); GSM8K with 8 a prompt has 59,784 a pass."""
    rollout_batch_size: int = 64
    """Prompts a step, over all ranks."""
    group_size: int = 8
    """Responses a prompt (G)."""
    mini_batch_size: int = 512
    """Responses an optimizer update, over all ranks."""
    num_epochs: int = 1
    """Passes over one rollout."""
    micro_batch_tokens: int = 0
    """Tokens, padding included, of a forward pass on one device. Memory and speed only: never changes a result. 0:
    16,384, or fewer where scripts/memory.py expects that to take over 80 % of a GPU."""
    logits_chunk_tokens: int = 0
    """Response tokens whose logits exist at once, recomputed in the backward pass. Memory and speed only. 0: 512, or up
    to 4,096 where that still fits into 80 % of a GPU."""
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_ratio: float = 0.03
    """Fraction of all updates over which the learning rate rises."""
    min_learning_rate: float = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    weight_decay: float = 0.0
    """Weight decay of matrices; biases and norms have none."""
    adam_beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    adam_beta2: float = 0.999
    """AdamW's decay of the mean squared gradient."""
    max_grad_norm: float = 1.0
    """Clip the norm of the gradient to this."""
    max_skipped_updates: int = 5
    """Updates in a row that may be skipped for a gradient that is not finite before the run stops."""

    # ---- the algorithm ----
    advantage: Literal["rloo", "reinforce++", "reinforce++-baseline", "remax", "opo"] = "rloo"
    """The algorithm, which is how scores become advantages."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio of each token, or one of the whole response."""
    gamma: float = 1.0
    """Discount a token, where each has a reward of its own (GAE, reinforce++)."""
    loss_aggregation: Literal["token", "step_token", "sequence", "sequence_sum", "constant"] | None = None
    """How token losses become one number: mean over an update's tokens, over a step's tokens, mean of sequence means,
    of sequence sums, or sum / (sequences * max_response_length); default: token, with --ratio sequence sequence."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - this."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + this."""
    dual_clip: float = 0.0
    """Where the advantage is negative, the loss is at most -A times this (> 1; verl: 3.0); 0 for no such bound."""
    kl_coef: float = 0.001
    """Weight beta of the KL to the reference; 0 needs, and loads, no reference model."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Add the KL to the loss, or take it from the score."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "full"] = "k1"
    """Estimator of the KL per token; full sums over the vocabulary, exactly."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Keep beta, or steer it to --kl_target (Ziegler et al. 2019)."""
    kl_target: float = 0.1
    """Mean KL per token that the adaptive controller steers to."""
    kl_horizon: int = 10_000
    """Responses over which the adaptive controller acts."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    ref_refresh_every: int = 0
    """Steps between refreshes of the reference from the policy (TR-DPO, arXiv:2404.09656); 0 for never."""
    ref_refresh_mix: float = 1.0
    """Share of the policy's weights in a refresh."""

    # ---- evaluation ----
    eval_every: int = 20
    """Steps between evaluations; also before the first step and after the last. 0: never."""
    eval_prompts: int = 256
    """Prompts of an evaluation, the first ones of the evaluation set; 0 for all."""
    eval_samples: int = 4
    """Sampled responses a prompt for accuracy and pass@k, beside the greedy one."""
    log_samples: int = 16
    """Samples of each step written to samples.jsonl."""

    # ---- checkpoints ----
    save_every: int = 50
    """Steps between checkpoints; 0: only when the run is interrupted."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay; 0 for all."""


# ----------------------------------------------------------------------------------------------------------------
# The equations: tensors in, tensors out. N sequences, T response positions, G responses a prompt, V vocabulary.
# ----------------------------------------------------------------------------------------------------------------


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of x where mask is set; what stands elsewhere, NaN included, does not leak."""
    return torch.where(mask, x, 0.0).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of x where mask is set, 0 where it is set nowhere."""
    return masked_sum(x, mask, dim) / mask.sum(dim).clamp(min=1)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per token from the sampled tokens' log-probabilities, any shape.

    d = logprobs - ref_logprobs; k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) + d - 1, with its exponent clamped to
    +-20 and its value to +-10. As a loss: the gradient of k1 has zero mean, the gradient of k3 is not that of the
    reverse KL (on policy it is that of the forward KL), and the gradient of k2 is right on policy. DeepSeekMath has k3.
    Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return d.square() / 2
    return (torch.exp((-d).clamp(-20, 20)) + d - 1).clamp(-10, 10)


def adapt_kl_coef(kl_coef: float, kl: float, target: float, sequences: int, horizon: int) -> float:
    """The adaptive controller's next beta (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    beta * (1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon), kl the mean over sequences of the token mean;
    a KL that is not finite leaves beta as it is.
    """
    error = min(max(kl / target - 1, -0.2), 0.2) if math.isfinite(kl) else 0.0
    return kl_coef * (1 + error * sequences / horizon)


def clipped_loss(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7); the dual clip of arXiv:1912.09729, eq. 5, where it is above 1.

    Args:
        log_ratio: (N, T), of the policy to the one that sampled, its exponent clamped to +-20. advantages: (N, T).
    Returns:
        Loss (N, T), and where clipping took the gradient (N, T) bool.
    """
    ratio = torch.exp(log_ratio.clamp(-20, 20))
    outside = (ratio < 1 - clip_low) & (advantages < 0) | (ratio > 1 + clip_high) & (advantages > 0)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip:
        bounded = (advantages < 0) & (loss > -advantages * dual_clip)
        loss, outside = torch.where(bounded, -advantages * dual_clip, loss), outside | bounded
    return loss, outside


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the entries where mask is set, var unbiased; 0 elsewhere. Any shape.

    Without shift_mean the mean is added again: only the scale changes.
    """
    mean = masked_mean(x, mask)
    variance = masked_sum((x - mean).square(), mask) / (mask.sum() - 1).clamp(min=1)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, whitened if shift_mean else whitened + mean, 0.0)


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over the tokens of each row, 0 after its end: (N, T), (N, T) bool -> (N, T)."""
    returns, following = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(mask[:, t], rewards[:, t] + gamma * following, following)
        returns[:, t] = torch.where(mask[:, t], following, 0.0)
    return returns


def leave_one_out(grouped: Tensor) -> Tensor:
    """R_i minus the mean of the others in its group: (P, G) -> (P, G). A lone score has nothing to compare with: 0."""
    present = grouped.isfinite()
    count = present.sum(1, keepdim=True)
    others = masked_sum(grouped, present, 1)[:, None] - grouped
    return (grouped - others / (count - 1)).masked_fill(count < 2, 0.0)


def minus_mean(grouped: Tensor, weights: Tensor) -> Tensor:
    """R_i minus the mean of its group, weighted by positive whole numbers such as lengths: (P, G), (P, G) -> (P, G)."""
    present = grouped.isfinite()
    total = masked_sum(weights, present, 1).clamp(min=1)
    return grouped - (masked_sum(weights * grouped, present, 1) / total)[:, None]


def correction_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, kind: str, cap: float) -> Tensor:
    """Importance weights rho = exp(old_logprobs - rollout_logprobs) that make up for another policy having sampled.

    Args:
        old_logprobs, rollout_logprobs: (N, T), by the policy at the start of the step and by what sampled.
        kind: "truncate": min(rho, cap) (TIS); "mask": rho, 0 outside of [1 / cap, cap] (IcePop); "sequence_mask": that
            of the whole response, 0 above cap; "none": 1.
    Returns:
        (N, T), without gradient.
    """
    log_ratio = torch.where(mask, old_logprobs.detach() - rollout_logprobs, 0.0)
    if kind == "sequence_mask":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    rho = log_ratio.clamp(-20, 20).exp()
    if kind == "none":
        return torch.ones_like(rho)
    if kind == "truncate":
        return rho.clamp(max=cap)
    dropped = rho > cap if kind == "sequence_mask" else (rho > cap) | (rho < 1 / cap)
    return rho.masked_fill(dropped, 0.0)


def aggregate(x: Tensor, mask: Tensor, how: str, tokens: float, sequences: int, max_length: int) -> Tensor:
    """This micro-batch's share of the loss of a whole optimizer batch.

    Args:
        x: (N, T). mask: (N, T) bool.
        how: "token" or "step_token" = sum / tokens; "sequence" = mean of token means; "sequence_sum" = mean of sums;
            "constant" = sum / (sequences * max_length).
        tokens, sequences: of the whole optimizer batch, over all ranks and micro-batches.
    """
    if how == "sequence":
        return masked_mean(x, mask, 1).sum() / sequences
    divisor = {"sequence_sum": sequences, "constant": sequences * max_length}.get(how, tokens)
    return masked_sum(x, mask) / divisor


def exact_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) per token, summed over the vocabulary: (..., V), (..., V) -> (...)."""
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)


def entropy_of(logits: Tensor, normaliser: Tensor) -> Tensor:
    """Entropy of softmax(logits), nats: logits (..., V) and their logsumexp (...) -> (...).

    H = logsumexp(z) - sum(softmax(z) * z).
    """
    return normaliser - (logits.softmax(-1) * logits).sum(-1)


# ----------------------------------------------------------------------------------------------------------------
# The policy: log-probabilities of the response tokens, without ever holding (tokens, V)
# ----------------------------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """A causal language model whose forward gives statistics of response tokens instead of logits.

    All of it happens inside this module's forward, so that DDP or FSDP, which wrap it, see every use of the weights.
    """

    def __init__(self, model: nn.Module, temperature: float, chunk_tokens: int, train_entropy: bool = False):
        super().__init__()
        self.model, self.temperature = model, temperature
        self.chunk_tokens, self.train_entropy = chunk_tokens, train_entropy

    def forward(
        self, input_ids: Tensor, response_mask: Tensor, reference: "Policy | None" = None, temperature: float = 0.0,
        entropies: bool = True,
    ):  # fmt: skip
        """
        Args:
            input_ids: (N, L), query and response, padded on the right (causal attention never looks there).
            response_mask: (N, L) bool, set on response tokens.
            reference: give the exact KL to this model, too.
            temperature: other than that of the sampling; 1 for a supervised loss.
            entropies: compute them, too.
        Returns:
            logprobs (tokens,), entropies (tokens,) or None and KL to the reference (tokens,) or None, where `tokens`
            are the set entries of the mask row by row; float32 or better.
        """
        more = (temperature or self.temperature, reference, entropies)
        before = nn.functional.pad(response_mask[:, 1:], (0, 1))  # (N, L) bool, set where a response token is predicted
        hidden, labels = self.hidden(input_ids, before)  # (tokens, H), (tokens,)
        with torch.no_grad():
            ref_hidden = reference.hidden(input_ids, before)[0] if reference else hidden.detach()
        chunks = []
        for part in zip(*(x.split(self.chunk_tokens) for x in (hidden, labels, ref_hidden))):
            chunks.append(self.chunk(torch.is_grad_enabled() and len(labels) > self.chunk_tokens, *part, *more))
        columns = (torch.cat(column) if column[0] is not None else None for column in zip(*chunks))
        return tuple(x if x is None else models.gather_positions(self.model, x, before) for x in columns)

    def hidden(self, input_ids: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states one position before each response token, and these tokens, of this rank's positions."""
        following = nn.functional.pad(input_ids[:, 1:], (0, 1))
        input_ids, following, before = models.local_positions(self.model, input_ids, following, before)
        return models.last_hidden_states(self.model, input_ids)[before], following[before]

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own head: (..., H) -> (..., V), float32 or better, not divided by the temperature."""
        logits = self.model.get_output_embeddings()(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        softcap = getattr(self.model.config, "final_logit_softcapping", None)  # Gemma 2 and 3
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def chunk(self, recompute: bool, *inputs):
        """`statistics` in one function with its recomputation, so that --compile sees both."""
        if recompute:  # logits live only while they are used
            return checkpoint(self.statistics, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self.statistics(*inputs)

    def statistics(
        self, hidden: Tensor, labels: Tensor, ref_hidden: Tensor, temperature: float, reference: "Policy | None",
        entropies: bool,
    ):  # fmt: skip
        logits = self.logits(hidden) / temperature  # (chunk, V)
        chosen = logits.gather(-1, labels[:, None])[:, 0]  # first, so that its gradient, of (chunk, V), comes last
        normaliser = logits.logsumexp(-1)  # (chunk,)
        logprobs = chosen - normaliser
        kl = None
        if reference is not None:
            with torch.no_grad():
                ref_all = (reference.logits(ref_hidden) / temperature).log_softmax(-1)
            kl = exact_kl(logits.log_softmax(-1), ref_all)
        # Last, so that the recomputation for the backward pass ends before an entropy that is only logged.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.train_entropy):
            entropy = entropy_of(logits, normaliser) if entropies else None
        return logprobs, entropy, kl

    @torch.no_grad()
    def check_head(self, flag: str, input_ids: list[int]) -> None:
        """End the run if `logits` is not what the model itself computes (some scale their logits in other ways)."""
        if self.model.device.type == "meta":  # rank 0 has the weights
            return
        ids = torch.tensor([input_ids], device=self.model.device)
        own = self.logits(self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        theirs = self.model(input_ids=ids, use_cache=False).logits.to(own.dtype)
        if not torch.allclose(own, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item()):
            utils.fail(f"{flag}: {type(self.model).__name__} changes its logits in a way unknown to Policy.logits")


class WithoutLora:
    """A policy that trains LoRA adapters, without them: the model that it started from, as a reference."""

    def __init__(self, policy: Policy):
        self.policy, self.model, self.parameters = policy, policy.model, policy.parameters

    def _call(self, function, *args, **options):
        with models.without_lora(self.model):
            return function(*args, **options)

    def __call__(self, *args, **options):
        return self._call(self.policy, *args, **options)

    def hidden(self, *args):
        return self._call(self.policy.hidden, *args)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.policy.logits(hidden)  # the head has no adapter


@dataclass
class Batch:
    """Responses of all ranks, N of them, the G responses of a prompt next to each other.

    Every rank holds the whole of it, so that advantages, mini-batches and counts are global by construction.
    """

    rows: list[dict]  # the prompt's row of each response
    queries: list[list[int]]
    responses: list[list[int]]  # up to and including the stop token
    texts: list[str]
    rollout_logprobs: Tensor  # (N, T), by the sampler
    response_mask: Tensor  # (N, T) bool, set on response tokens
    stopped: Tensor  # (N,) bool, whether a stop token was sampled
    parts: dict[str, Tensor]  # reward source: (N,) scores, NaN where it gave none

    @property
    def lengths(self) -> list[int]:
        """Tokens of query and response together."""
        return [len(query) + len(response) for query, response in zip(self.queries, self.responses)]

    def collate(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Some rows as `collate` lays them out."""
        return collate([(self.queries[i], self.responses[i]) for i in indices], self.response_mask.device)


def join(batches: list[Batch], chosen: list[int]) -> Batch:
    """Some of the responses of several batches, counted through them all, as one batch."""

    def pick(field: str) -> list:
        every = [item for batch in batches for item in getattr(batch, field)]
        return [every[i] for i in chosen]

    pad = lambda field: nn.utils.rnn.pad_sequence(pick(field), batch_first=True)
    parts = {name: torch.cat([batch.parts[name] for batch in batches])[chosen] for name in batches[0].parts}
    lists = (pick(field) for field in ("rows", "queries", "responses", "texts"))
    return Batch(*lists, pad("rollout_logprobs"), pad("response_mask"), torch.stack(pick("stopped")), parts)


def collate(rows: list[tuple[list[int], list[int]]], device) -> tuple[Tensor, Tensor]:
    """Queries and responses, padded on the right: input_ids (n, L) and a mask (n, L) of response tokens.

    No rows at all make one row of padding, with which a rank that has nothing to do takes part.
    """
    ids = [torch.tensor(query + response) for query, response in rows] or [torch.zeros(2, dtype=torch.long)]
    input_ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, (query, response) in zip(mask, rows):
        row[len(query) : len(query) + len(response)] = True
    return input_ids.to(device), mask.to(device)


def pad_rows(flat: Tensor, mask: Tensor) -> Tensor:
    """Lay values of response tokens, row after row, out as (N, T) along a mask (N, T); 0 elsewhere. Differentiable."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def over_batch(module: nn.Module, batch: Batch, *more, budget: int, world, autocast, **options) -> list[Tensor]:
    """What `module(*batch.collate(rows), *more, **options)` gives for every response token, without gradient, the work
    spread over the ranks: (N, T) for each of its outputs that is not None, 0 after a response's end."""
    share = []
    with torch.no_grad(), autocast():
        for rows in utils.micro_batches(batch.lengths, budget, world):
            outputs = [x for x in module(*batch.collate(rows), *more, **options) if x is not None]  # (tokens,) each
            parts = torch.stack(outputs).cpu().split([len(batch.responses[i]) for i in rows], dim=1)
            share += zip(rows, [part.clone() for part in parts])  # a view would take the whole with it to the others
    values = [value for _, value in sorted(world.all_gather(share), key=lambda pair: pair[0])]
    return [pad_rows(x, batch.response_mask) for x in torch.cat(values, 1).to(batch.response_mask.device)]


def imitate(wrapped: nn.Module, rows: list[dict], coef: float, budget: int, world, autocast) -> Tensor:
    """Add the gradient of coef * cross-entropy per token on supervised rows (PTX: arXiv:2203.02155, eq. 2).

    Leaves the average over ranks to the next backward pass. Returns this rank's share of the cross-entropy.
    """
    tokens = sum(len(row["response"]) for row in rows)
    lengths = [len(row["query"]) + len(row["response"]) for row in rows]
    total = torch.zeros((), device=world.device)
    for cut in utils.micro_batches(lengths, budget, world):
        with gradient_sync(wrapped, False):
            with autocast():
                texts = collate([(rows[i]["query"], rows[i]["response"]) for i in cut], world.device)
                logprobs, _, _ = wrapped(*texts, None, 1.0, False)  # at temperature 1, whatever that of the rollout
            loss = -logprobs.sum() / tokens
            (coef * loss * world.size).backward()
        total = total + loss.detach()
    return total


# ----------------------------------------------------------------------------------------------------------------
# Rollout
# ----------------------------------------------------------------------------------------------------------------


class Sampler(logits_process.LogitsProcessor):
    """Draws each row's next token by inverting its distribution function at a uniform number given in advance.

    Keeps the log-probability of every token drawn, so that `generate` need not hold scores of (T, N, V).
    """

    def __init__(self, uniforms: Tensor | None, rows: int, max_length: int, device):
        self.uniforms = None if uniforms is None else uniforms.to(device)  # (N, T) float64 in [0, 1); None: greedy
        self.logprobs = torch.zeros(rows, max_length, device=device)  # (N, T)
        self.rows = torch.arange(rows, device=device)  # which sequences the running batch holds
        self.position = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = scores.log_softmax(-1)  # (n, V), after temperature, top-k and top-p
        if self.uniforms is None:
            tokens = logprobs.argmax(-1, keepdim=True)
        else:  # float64: a float32 sum over 150,000 tokens would distort the rare ones
            cdf = logprobs.double().exp().cumsum(-1)
            u = self.uniforms[self.rows, self.position, None]
            tokens = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)
            tokens.clamp_(max=cdf.shape[1] - 1)  # NaN logits: `rollout` says so, once it has all responses
        self.logprobs[self.rows, self.position] = logprobs.gather(1, tokens)[:, 0]
        self.position += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)  # generate takes the argmax


class Finished(StoppingCriteria):
    """Notes the rows that drew a stop token, and leaves `generate` when half of them have."""

    def __init__(self, stop_ids: Tensor, rows: int, interrupted):
        self.stop_ids, self.interrupted = stop_ids, interrupted
        self.rows = torch.zeros(rows, dtype=torch.bool, device=stop_ids.device)

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        self.rows |= torch.isin(input_ids[:, -1], self.stop_ids)
        leave = self.interrupted() or self.rows.sum() * 2 >= len(self.rows)
        return self.rows | leave


@torch.compiler.set_stance("force_eager")  # its shapes change at every token
@torch.no_grad()
def generate(
    model, queries: list[list[int]], uniforms: Tensor | None, stop_ids: list[int], pad_id: int, args, interrupted
):
    """Sample one response a query with transformers' generate; see `Sampler` for the random numbers.

    Args:
        queries: token ids, left-padded here. uniforms: (N, max_response_length) float64, or None for greedy.
        interrupted: a function that is asked at every token; once true, what there is comes back at once.
    Returns:
        responses, token ids up to and including the first stop token; their log-probabilities, alike.
    """
    device, width = model_device(model), max(map(len, queries))
    # Padded with the row's own first token: masked, and nothing that a repetition penalty has not seen anyway.
    input_ids = torch.tensor([[q[0]] * (width - len(q)) + q for q in queries], device=device)  # (N, width)
    attention_mask = torch.tensor([[0] * (width - len(q)) + [1] * len(q) for q in queries], device=device)
    sampler = Sampler(uniforms, len(queries), args.max_response_length, device)
    processors = []  # what happens to the logits of the next token, in this order
    if args.repetition_penalty != 1:
        processors.append(logits_process.RepetitionPenaltyLogitsProcessor(args.repetition_penalty))
    if args.min_response_length > 0:
        least = args.min_response_length
        processors.append(logits_process.MinNewTokensLengthLogitsProcessor(width, least, stop_ids, device))
    if uniforms is not None:
        processors.append(logits_process.TemperatureLogitsWarper(args.temperature))
        processors += [logits_process.TopKLogitsWarper(args.top_k)] if args.top_k > 0 else []
        processors += [logits_process.TopPLogitsWarper(args.top_p)] if args.top_p < 1 else []
    settings = {"max_length": width + args.max_response_length, "do_sample": False, "return_dict_in_generate": True}
    settings |= {"synced_gpus": False}  # weights are whole here: ranks need not wait for each other
    # The model's own generation defaults (Qwen2.5 has a repetition penalty there) would change the distribution.
    defaults, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=pad_id)
    tokens = torch.full((len(queries), args.max_response_length), pad_id, device=device)  # (N, T)
    cache = None
    # Whenever half of the rows are finished, go on without them: the long tail of responses runs in a small batch.
    while len(sampler.rows) and sampler.position < args.max_response_length and not interrupted():
        finished = Finished(torch.tensor(stop_ids, device=device), len(sampler.rows), interrupted)
        output = model.generate(
            input_ids, attention_mask=attention_mask, past_key_values=cache, **settings,
            logits_processor=LogitsProcessorList([*processors, sampler]),
            stopping_criteria=StoppingCriteriaList([finished]),
        )  # fmt: skip
        tokens[sampler.rows, : sampler.position] = output.sequences[:, width:]
        going = ~finished.rows
        sampler.rows, input_ids, cache = sampler.rows[going], output.sequences[going], output.past_key_values
        attention_mask = nn.functional.pad(
            attention_mask[going], (0, width + sampler.position - attention_mask.shape[1]), value=1
        )
        cache.batch_select_indices(going.nonzero()[:, 0])
    model.generation_config = defaults
    responses = [truncate_at_stop(row, stop_ids) for row in tokens[:, : sampler.position].tolist()]
    return responses, [row[: len(response)] for row, response in zip(sampler.logprobs.tolist(), responses)]


def truncate_at_stop(tokens: list[int], stop_ids: list[int]) -> list[int]:
    """A response without what follows its first stop token; the stop token stays, and is trained on."""
    end = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens) - 1)
    return tokens[: end + 1]


def rollout(
    rows: list[dict], samples: int, key: tuple, *, model, engine, tokenizer, stop_ids, rewards, args, interrupt, world,
    autocast,
):  # fmt: skip
    """Sample and score `samples` responses for each row, spread over the ranks.

    Args:
        rows: prompts of all ranks. samples: responses a prompt; 0 for a single greedy one.
        key: names the random numbers, see `utils.generator`. engine: what samples; None for transformers.
    Returns:
        The Batch, the same on every rank; None if the run is interrupted.
    """
    rows, device = [row for row in rows for _ in range(samples or 1)], model_device(model)
    numbers, uniforms, seeds = utils.generator(*key), None, None
    if samples and engine is None:  # a line of numbers for each response of all ranks, whichever rank generates it
        uniforms = torch.from_numpy(numbers.random((len(rows), args.max_response_length)))  # (N, T)
    elif samples:  # a seed for each
        seeds = numbers.integers(2**62, size=len(rows))
    share = []  # (response, logprobs) of this rank's rows
    mine, interrupted = world.shard(list(range(len(rows)))), lambda: interrupt.requested
    if engine is not None:
        queries, own = [rows[i]["query"] for i in mine], None if seeds is None else seeds[mine].tolist()
        found = engine.generate(queries, own, stop_ids, args, interrupted)
        share = (
            None if found is None else [(truncate_at_stop(ids, stop_ids), logprobs) for ids, logprobs in zip(*found)]
        )
    with unsharded(model) if engine is None else contextlib.nullcontext(), autocast():
        for start in range(0, len(mine) if engine is None else 0, args.generation_batch_size):
            part = mine[start : start + args.generation_batch_size]
            queries, numbers = [rows[i]["query"] for i in part], None if uniforms is None else uniforms[part]
            share += zip(*generate(model, queries, numbers, stop_ids, tokenizer.pad_token_id, args, interrupted))
    if world.any(interrupt.requested or share is None):
        return None
    texts = [tokenizer.decode(response, skip_special_tokens=True) for response, _ in share]
    parts = rewards.score([rows[i] for i in mine], texts, [response for response, _ in share])  # {source: scores}
    everything = world.unshard(list(zip(*zip(*share), texts, *parts.values())), len(rows))
    responses, logprobs, texts, *scores = zip(*everything)
    sequences = [row["query"] + list(response) for row, response in zip(rows, responses)]
    scores = [one_score(sequences, x) if name in rewards.models else x for name, x in zip(parts, scores)]
    lengths = torch.tensor([len(response) for response in responses])
    mask = (torch.arange(lengths.max()) < lengths[:, None]).to(device)
    if not all(math.isfinite(x) for row in logprobs for x in row):
        utils.fail("--model: its log-probabilities are not finite, so its weights or --precision are to blame")
    return Batch(
        rows, [row["query"] for row in rows], list(responses), list(texts),
        pad_rows(torch.tensor([x for row in logprobs for x in row], device=device), mask), mask,
        torch.tensor([response[-1] in stop_ids for response in responses], device=device),
        {name: torch.tensor(column, device=device) for name, column in zip(parts, scores)},
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------
# What a fork changes first: how reward parts become one score, and scores become advantages
# ----------------------------------------------------------------------------------------------------------------


def weighted_sum(parts: dict[str, Tensor], args: Args) -> Tensor:
    """The sum of the reward parts of each response: {source: (N,)} -> (N,); NaN where a source gave no score (NaN),
    unless the source's weight is 0."""
    return sum(weight * part for part, weight in zip(parts.values(), reward_weights(args)) if weight)


def update_moments(moments: list[float], scores: Tensor) -> list[float]:
    """Take more scores (N,) into running [count, mean, sum of squared deviations]; what is not finite does not count.

    Source: Welford's method in the batch form of Chan, Golub and LeVeque 1979, eq. 2.1.
    """
    count, mean, squares = moments
    new = scores[scores.isfinite()].double()
    if not len(new):
        return moments
    total, difference = count + len(new), new.mean().item() - mean
    squares += (new - new.mean()).square().sum().item() + difference**2 * count * len(new) / total
    return [total, mean + difference * len(new) / total, squares]


def final_scores(scores: Tensor, lengths: Tensor, stopped: Tensor, moments: list[float], args: Args) -> Tensor:
    """What a response is trained with (N,); NaN for one that is left out, which counts in no baseline or mean either.

    Args:
        scores: (N,), as `weighted_sum` gives them. lengths: (N,), tokens. stopped: (N,) bool.
        moments: as in `update_moments`, of all scores so far.
    """
    if args.reward_normalization:
        count, mean, squares = moments
        scores = (scores - mean) / (math.sqrt(squares / max(1, count - 1)) + 1e-8)
    if args.reward_clip:
        scores = scores.clamp(-args.reward_clip, args.reward_clip)
    if args.non_stop_penalty:
        scores = torch.where(stopped, scores, args.penalty_reward_value)
    if args.overlong_buffer:
        over = lengths - (args.max_response_length - args.overlong_buffer)
        scores = scores - (over / args.overlong_buffer).clamp(min=0)
    return torch.where(stopped, scores, math.nan) if args.mask_truncated else scores


@dataclass
class Experience:
    """What a step trains on."""

    batch: Batch
    scores: Tensor  # (N,), as `final_scores` gives them
    sampled: Batch  # what the metrics are of: groups that were dropped are in there, too
    metrics: dict[str, float]
    position: int  # where the next step goes on: in the stream of prompts,
    moments: list[float]  # and with the moments of the scores
    policy: int  # steps that the policy which sampled had trained
    group_size: int

    def state(self) -> dict:
        """What a checkpoint holds of it: plain types and tensors, of the rows what is still needed."""
        batches = {name: dict(vars(batch)) for name, batch in (("batch", self.batch), ("sampled", self.sampled))}
        for batch in batches.values():
            batch["rows"] = [{"prompt": row["prompt"], "query": row["query"]} for row in batch["rows"]]
        return {**vars(self), **batches}

    @staticmethod
    def of(state: dict, device) -> "Experience":
        """The way back from `state`, which was loaded to the CPU."""

        def move(x):
            return {key: move(y) for key, y in x.items()} if isinstance(x, dict) else x.to(device)

        moved = lambda batch: {key: x if isinstance(x, list) else move(x) for key, x in batch.items()}
        batches = {name: Batch(**moved(state[name])) for name in ("batch", "sampled")}
        return Experience(**{**state, **batches, "scores": state["scores"].to(device)})


def collect(
    step: int, position: int, moments: list[float], policy: int, *, prompts: list[dict], sample, args: Args
) -> Experience | None:
    """Sample and score the prompts of a step, and drop or replace groups as --filter_groups says.

    Args:
        position: of the step's first prompt in `data.take_prompts`. moments: of the scores of all steps before.
        policy: steps that the policy has trained. sample: `rollout` with all but its first three arguments.
    Returns:
        The Experience; None if the run is interrupted.
    """
    wanted, size = args.rollout_batch_size, args.group_size
    batches, parts, count = [], [], wanted
    for refill in range(1 + args.max_refills * (args.filter_groups == "refill")):
        rows = data.take_prompts(prompts, position, count, args.seed)
        key = ("rollout", args.seed, step, refill) if refill else ("rollout", args.seed, step)
        batches.append(sample(rows, size, key))
        if batches[-1] is None:
            return None
        sums, lengths = weighted_sum(batches[-1].parts, args), batches[-1].response_mask.sum(1)
        position, moments = position + count, update_moments(moments, sums)
        parts.append((sums, lengths, batches[-1].stopped))
        scores = final_scores(*map(torch.cat, zip(*parts)), moments, args)  # all of a step by the same moments
        teaches = ~equal_scores(scores.view(-1, size))  # (prompts,)
        found = int(teaches.sum())
        if found >= wanted or evaluation.silent_source(batches[-1], args):
            break
        # As many prompts as it takes if the next ones are like those so far.
        count = min(wanted, math.ceil((wanted - found) * len(teaches) / max(1, found)))
    metrics = {
        "objective/scores": scores.nanmean().item(),
        "val/zero_std_fraction": 1 - found / len(teaches) if size > 1 else math.nan,
        "val/sampled_prompts": len(teaches),
    }
    sampled = batch = join(batches, list(range(len(scores)))) if len(batches) > 1 else batches[0]
    if args.filter_groups != "none":
        if not found:  # nothing to learn from in this step
            scores = torch.full_like(scores, math.nan)
            teaches = torch.ones_like(teaches)
        chosen = teaches.repeat_interleave(size).nonzero()[: wanted * size, 0].tolist()
        batch, scores = join([sampled], chosen), scores[chosen]
    return Experience(batch, scores, sampled, metrics, position, moments, policy, size)


def token_advantages(
    kind: str, scores: Tensor, greedy_scores: Tensor | None, kl: Tensor | None, mask: Tensor, group_size: int,
    kl_coef: float, gamma: float,
) -> Tensor:  # fmt: skip
    """The advantage of every response token: where the algorithms of this file differ.

    Args:
        kind: as --advantage; each formula stands in the docstring at the top.
        scores: (N,), the G responses of a prompt next to each other; NaN or infinite where there is no score.
        greedy_scores: (N,), of the greedy response to the same prompt; read by remax only.
        kl: (N, T) per token, taken from the reward with kl_coef; None for none. mask: (N, T) bool.
    Returns:
        (N, T), 0 outside of the mask and for a response without a score, which does not count in its group either;
        where there is a group and its R are all equal, exactly 0 (before any whitening over the batch).
    """
    penalties = torch.zeros_like(mask, dtype=scores.dtype) if kl is None else kl_coef * kl
    totals = scores - masked_sum(penalties, mask, 1)  # R, (N,)
    trained = mask & totals.isfinite()[:, None]
    if kind == "reinforce++":
        last = torch.arange(mask.shape[1], device=mask.device) == mask.sum(1, keepdim=True) - 1
        rewards = torch.where(last, scores[:, None], 0.0) - penalties
        return whiten(reward_to_go(rewards, mask, gamma), trained)
    grouped, lengths = totals.view(-1, group_size), mask.sum(1).view(-1, group_size)  # (N / G, G)
    if kind == "remax":
        advantages = totals - greedy_scores
        trained = trained & advantages.isfinite()[:, None]
    else:
        if kind == "rloo":
            advantages = leave_one_out(grouped)
        else:
            advantages = minus_mean(grouped, lengths if kind == "opo" else torch.ones_like(lengths))
        advantages = advantages.masked_fill(equal_scores(grouped)[:, None], 0.0).flatten()
    advantages = torch.where(trained, advantages[:, None], 0.0)
    return whiten(advantages, trained) if kind == "reinforce++-baseline" else advantages


def equal_scores(grouped: Tensor) -> Tensor:
    """Groups (N / G, G) whose scores, as far as there are any, are all equal: such a group teaches nothing. (N / G,)"""
    present = grouped.isfinite()
    highest = grouped.masked_fill(~present, -torch.inf).amax(1)
    lowest = grouped.masked_fill(~present, torch.inf).amin(1)
    return highest <= lowest


def check_args(args: Args) -> None:
    """End the run for flags of this file that cannot work together; warn of those that rarely should."""
    utils.check_common_args(args)
    if args.group_size < 2 and args.advantage not in ("reinforce++", "remax"):
        utils.fail(
            f"--group_size {args.group_size}: --advantage {args.advantage} compares 2 responses a prompt or more"
        )
    if args.filter_groups != "none" and args.advantage in ("remax", "reinforce++"):
        utils.fail(f"--filter_groups {args.filter_groups}: --advantage {args.advantage} learns from equal scores, too")
    if args.advantage == "remax" and args.async_steps:
        utils.fail("--advantage remax: compares with the greedy response of the same policy; takes --async_steps 0")
    if args.dual_clip and not args.dual_clip > 1:
        utils.fail(f"--dual_clip {args.dual_clip}: has to be above 1 (or 0 for none)")


def main(args: Args) -> None:
    # ---- shared: set up - processes, data, rewards ------------------------------------------------------------------
    check_args(args)
    world = utils.setup_processes()
    interrupt = utils.Interrupt(world)
    folder, resume_from = checkpoints.run_folder(args, __file__)
    tokenizer = models.load_tokenizer(args.model, args.pad_token)
    stop_ids = models.stop_token_ids(tokenizer, args.model, args.stop_token)
    prompts, eval_prompts = data.load_train_and_eval(args, tokenizer, needs_answer(args))
    supervised = data.load_supervised(args, tokenizer, stop_ids) if args.ptx_coef else []
    rewards = Rewards(reward_names(args), args.reward_timeout, tokenizer)
    frozen = [("--reward", name) for name in filter(is_reward_model, rewards.names)]
    if args.kl_coef and (args.ref_model or not args.lora_rank):  # else the reference is the model without its adapter
        frozen.append(("--ref_model", args.ref_model or args.model))

    N = args.rollout_batch_size * args.group_size  # responses a step; fewer where groups are dropped
    updates_a_step = args.num_epochs * N // args.mini_batch_size
    total_steps = args.total_episodes // N
    # ---- end shared
    aggregation = args.loss_aggregation or args.ratio
    held = models.ModelNames(trained=[("--model", args.model)], scalar=[], frozen=frozen)

    # ---- shared: models ---------------------------------------------------------------------------------------------
    precision = models.precision(args.precision, world.device)
    stored, dtype, half, autocast = precision
    sharding = Sharding(args, world, precision, held)
    teams = sharding.dp  # of ranks that share each sequence in training
    memory.plan_run(args, held, world, sharding)
    source = args.model if args.lora_rank else resume_from or args.model
    model = models.load_model("--model", source, stored, sharding.load_device)
    if args.lora_rank:
        models.add_lora(model, args, resume_from)
    policy = Policy(model, args.temperature, args.logits_chunk_tokens, train_entropy=args.entropy_coef > 0)
    policy.check_head(f"--model {args.model}", prompts[0]["query"][:32])
    wrapped = sharding.wrap(policy)
    reference = None  # the model of the KL; `exact` is the same again if its exact KL is asked for
    if args.kl_coef and args.lora_rank and not args.ref_model:
        reference = WithoutLora(policy)
    elif args.kl_coef:
        refreshed = os.path.join(resume_from or "", "reference")  # a checkpoint has it once it was refreshed
        name = refreshed if os.path.isdir(refreshed) else args.ref_model or args.model
        ref_model = models.load_model("--ref_model", name, stored, sharding.load_device).requires_grad_(False)
        reference = Policy(ref_model, args.temperature, args.logits_chunk_tokens)
        reference.check_head(f"--ref_model {name}", prompts[0]["query"][:32])
        models.check_same_shapes(f"--ref_model {name}", reference, policy, everything=args.ref_refresh_every > 0)
        # Its head is used in the policy's forward for the exact KL.
        sharding.shard(reference, blocks_only=args.kl_estimator == "full")
    exact = reference if args.kl_estimator == "full" else None
    kl_in_reward, kl_in_loss = (reference is not None and args.kl_in == place for place in ("reward", "loss"))
    rewards.load_models(args.reward_model_scale, stored, world.device, autocast, args.micro_batch_tokens, sharding)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # ---- end shared
    optimizer = utils.Optimizer(policy, args, total_steps * updates_a_step)

    # ---- resume -----------------------------------------------------------------------------------------------------
    # What the next step depends on, beside the weights and the optimizer: random numbers are functions of the step.
    state = {"step": 0, "position": 0, "kl_coef": args.kl_coef, "seconds": 0.0, "metrics": {}, "logged": False}
    state["moments"] = [0.0, 0.0, 0.0]  # of the scores, see update_moments
    if resume_from:
        state = checkpoints.load_state(resume_from, world)
        checkpoints.load_optimizer(resume_from, "", model, optimizer)
    saved, following = state.pop("ahead", None), None  # the next step's, if it is there already
    if saved and args.async_steps and saved["group_size"] == args.group_size:
        following = Experience.of(saved, world.device)

    def save() -> None:
        run.phase("save")
        state.update(seconds=clock.total(), ahead=following and following.state())
        saved = {"": model} | ({"reference": reference.model} if args.ref_refresh_every else {})
        checkpoints.save_checkpoint(folder, world, tokenizer, state, saved, {"": optimizer}, args.keep_checkpoints)

    # ---- shared: run ------------------------------------------------------------------------------------------------
    beside = world.rollout_world(args.vllm_tensor_parallel)
    engine = engines.rollout_engine(args, beside, half)
    token_lengths = {"prompts": [len(row["query"]) for row in prompts]}
    token_lengths |= {"held-out prompts": [len(row["query"]) for row in eval_prompts]} if eval_prompts else {}
    token_lengths |= (
        {"supervised rows": [len(r["query"]) + len(r["response"]) for r in supervised]} if supervised else {}
    )
    run = run_log.Run(folder, args, __file__, world, total_steps, state if resume_from else None, token_lengths)
    clock = utils.Clock(world.device, state["seconds"], engine)
    sample = functools.partial(
        rollout, model=model, engine=engine, tokenizer=tokenizer, stop_ids=stop_ids, rewards=rewards, args=args,
        interrupt=interrupt, world=beside, autocast=autocast,
    )  # fmt: skip
    gather_experience = functools.partial(collect, prompts=prompts, sample=sample, args=args)
    ahead = engines.Ahead(gather_experience, interrupt) if args.async_steps else None
    look = functools.partial(over_batch, budget=args.micro_batch_tokens, world=teams, autocast=autocast)

    def leave() -> NoReturn:
        save()
        run.close(f"interrupted: step {state['step']} is saved, go on with --resume")
        sys.exit(utils.EXIT_INTERRUPTED)

    def require_scores(batch: Batch) -> None:
        source = evaluation.silent_source(batch, args)
        if source:
            save()
            run.close(f"step {state['step']} is saved, go on with --resume")
            why = rewards.why_missing({source: batch.parts[source]})
            utils.fail(f"--reward: no response of step {state['step'] + 1} got a score from {why}")

    if engine is not None:
        engine.sync(model)
    while True:
        # ---- evaluate, log, save: the policy after `step` steps (a run interrupted here resumes here) ---------------
        step, metrics = state["step"], state["metrics"]
        if not state["logged"]:
            if args.eval_every and eval_prompts and (step % args.eval_every == 0 or step >= total_steps):
                run.phase("evaluate")
                results, batch = evaluation.evaluate(sample, eval_prompts, args)
                if not results:
                    leave()
                metrics = {"step": step, "episode": step * N, **metrics, **results}
                rows = evaluation.sample_rows(batch, 4, apart=args.eval_samples)
                run.table(step, rows, [len(response) for response in batch.responses])
            if metrics:
                run.log(metrics, {"score": "objective/scores", "kl": "objective/kl", "held-out": "eval/accuracy"})
            state.update(metrics={}, logged=True)
            if step and args.save_every and step % args.save_every == 0:
                save()
        if step >= total_steps:
            break
        if interrupt.agreed():
            leave()

        # ---- rollout and scores -------------------------------------------------------------------------------------
        step += 1
        clock.start()
        run.phase("rollout")
        experience, following = following, None
        if experience is None:
            experience = gather_experience(step, state["position"], state["moments"], step - 1)
            if experience is None:
                leave()
        require_scores(experience.sampled)
        if ahead and step < total_steps:  # goes on while this step trains, with the policy from before it
            ahead.start(step + 1, experience.position, experience.moments, step - 1)
        batch, scores = experience.batch, experience.scores  # scores: (N,)
        mask, lengths = batch.response_mask, batch.lengths  # (N, T), [N]
        present = scores.isfinite().nonzero()[:, 0].tolist()  # the responses that train
        # ---- end shared
        greedy_scores = None  # (N,)
        if args.advantage == "remax":
            greedy = sample(batch.rows[:: args.group_size], 0, ("greedy", args.seed, step))
            if greedy is None:
                leave()
            require_scores(greedy)
            sums, ends = weighted_sum(greedy.parts, args), greedy.response_mask.sum(1)
            # A baseline cannot be left out: a greedy response without a stop token has its penalty.
            penalised = dataclasses.replace(args, mask_truncated=False)
            greedy_scores = final_scores(sums, ends, greedy.stopped, experience.moments, penalised)
            greedy_scores = greedy_scores.repeat_interleave(args.group_size)
            present = [i for i in present if greedy_scores[i].isfinite()]
        clock.lap("rollout")

        # The old policy is the one that sampled. Its log-probs are those of the only update or computed now; where the
        # weights have moved since, they are what the engine said, unless a correction makes up for the difference.
        by_engine = args.async_steps > 0 and args.rollout_correction == "none"
        needs_old = updates_a_step > 1 and not by_engine or kl_in_reward
        # ---- shared: old and reference log-probs --------------------------------------------------------------------
        if engine is not None:
            engine.sleep()
        run.phase("log-probs")
        old_logprobs, ref_logprobs, kl = None, None, None  # (N, T), kl that of the policy that sampled
        if reference is not None and exact is None:
            (ref_logprobs,) = look(reference, batch, entropies=False)
        if needs_old:
            old_logprobs, *full_kl = look(policy, batch, exact, entropies=False)
            if reference is not None:
                kl = full_kl[0] if exact else kl_estimate(old_logprobs, ref_logprobs, args.kl_estimator)
        passes = [model] * needs_old + [reference] * (reference is not None and (needs_old or exact is None))
        if by_engine:
            old_logprobs = batch.rollout_logprobs.to(dtype)
        clock.lap("logprobs")
        # ---- end shared

        # ---- advantages ---------------------------------------------------------------------------------------------
        advantages = token_advantages(
            args.advantage, scores, greedy_scores, kl if kl_in_reward else None, mask, args.group_size,
            state["kl_coef"], args.gamma,
        ).to(dtype)  # (N, T)  # fmt: skip

        # ---- update: epochs, mini-batches (an optimizer step each), micro-batches -----------------------------------
        run.phase("update")
        model.train()  # for gradient checkpointing; there is no dropout
        sums, updates = utils.Sums(teams), 0
        # The schedules go by steps: one in which responses were left out may have fewer updates.
        fewer = updates_a_step - args.num_epochs * math.ceil(len(present) / args.mini_batch_size)
        optimizer.updates += fewer
        for epoch in range(args.num_epochs):
            order = utils.generator("mini-batches", args.seed, step, epoch).permutation(present).tolist()
            minis = utils.even_parts(order, args.mini_batch_size)
            for mini in minis:
                updates += 1
                tokens = mask[mini].sum().item()
                if aggregation == "step_token":  # the mean over updates of sum / this is the token mean of the step
                    tokens = mask[present].sum().item() / len(minis)
                mean = functools.partial(
                    aggregate, how=aggregation, tokens=tokens, sequences=len(mini), max_length=args.max_response_length
                )
                if args.ptx_coef:
                    count = args.ptx_batch_size
                    texts = data.take_prompts(supervised, optimizer.updates * count, count, args.seed)
                    coef = args.ptx_coef * optimizer.loss_scale
                    sums.add(ptx=imitate(wrapped, texts, coef, args.micro_batch_tokens, teams, autocast))
                cuts = utils.micro_batches([lengths[i] for i in mini], args.micro_batch_tokens, teams)
                for number, cut in enumerate(cuts, 1):
                    micro = [mini[i] for i in cut]
                    m = mask[micro]  # (n, T)
                    with gradient_sync(wrapped, number == len(cuts)):
                        with autocast():
                            logprobs, entropies, full_kl = wrapped(*batch.collate(micro), exact if kl_in_loss else None)
                        logprobs, entropies = pad_rows(logprobs, m), pad_rows(entropies, m)  # (n, T)
                        now = logprobs.detach()
                        old = now if updates_a_step == 1 and not by_engine else old_logprobs[micro]
                        sampled = batch.rollout_logprobs[micro]  # the log-probs of what sampled
                        weights = correction_weights(
                            old, sampled, m, args.rollout_correction, args.rollout_correction_cap
                        )
                        log_ratio = logprobs - old
                        if args.ratio == "sequence":
                            log_ratio = masked_sum(log_ratio, m, 1)[:, None].expand_as(log_ratio)
                        token_losses, clipped = clipped_loss(
                            log_ratio, advantages[micro], args.clip_low, args.clip_high, args.dual_clip
                        )
                        policy_term = mean(token_losses * weights, m)
                        # ---- shared: penalties
                        loss = policy_term - args.entropy_coef * mean(entropies, m)
                        token_kl = torch.zeros_like(old)
                        if kl_in_loss:
                            if exact:
                                token_kl = pad_rows(full_kl, m)
                            else:
                                token_kl = kl_estimate(logprobs, ref_logprobs[micro], args.kl_estimator)
                            loss = loss + state["kl_coef"] * mean(token_kl, m)
                        # ---- end shared
                        # DDP and FSDP take the mean over ranks, and `mean` has divided by the counts of all ranks.
                        (loss * teams.size * optimizer.loss_scale).backward()
                    # ---- shared: statistics of the update
                    sums.add(policy_loss=policy_term, loss=loss, entropy=masked_sum(entropies, m))
                    sums.add(clipped=masked_sum(clipped.double(), m), tokens=m.sum())
                    sums.add(approxkl=masked_sum((logprobs - old).square() / 2, m))
                    if epoch == 0:  # each response once
                        token_kl = token_kl if kl is None else kl[micro]
                        sums.add(kl=masked_sum(token_kl, m), mean_kl=masked_mean(token_kl, m, 1).sum())
                        sums.add(surprise=-masked_sum(old, m), weights=masked_sum(weights, m))
                        if updates == 1 or not by_engine:  # by the same weights, as far as they can be
                            latest = now if by_engine else old
                            diff = torch.where(m, (latest - sampled).abs(), 0.0)
                            prob_diff = masked_sum((latest.exp() - sampled.exp()).abs(), m)
                            sums.add(diff=diff.sum(), prob_diff=prob_diff, compared=m.sum())
                            sums.max(diff=diff)
                        # ---- end shared
                optimizer.step()
        model.eval()
        clock.lap("training")
        # ---- shared: the next rollout, and the weights to the engine ------------------------------------------------
        if ahead and step < total_steps:
            run.phase("rollout")
            following = ahead.result()
            clock.lap("rollout")
        if engine is not None:
            run.phase("sync")
            engine.sync(model)
            clock.lap("sync")
        # ---- end shared
        # Tokens that went through each model, times FLOPs a parameter.
        sampled_tokens, trained_tokens = sum(experience.sampled.lengths), sum(lengths[i] for i in present)
        sampled_tokens += sum(greedy.lengths) if greedy_scores is not None else 0
        learning = 4 if args.lora_rank else 6  # frozen weights have no gradient
        work = {"training": [(model, learning * args.num_epochs * trained_tokens)]}

        # ---- KL controller and reference ----------------------------------------------------------------------------
        total = sums.totals()
        kl_coef = state["kl_coef"]
        if reference is not None and args.kl_controller == "adaptive":
            state["kl_coef"] = adapt_kl_coef(
                kl_coef, total["mean_kl"] / max(1, len(present)), args.kl_target, len(present), args.kl_horizon
            )
        # ---- shared: metrics ----------------------------------------------------------------------------------------
        if args.ref_refresh_every and step % args.ref_refresh_every == 0:
            sync_reference(reference, policy, args.ref_refresh_mix)

        state.update(step=step, position=experience.position, moments=experience.moments, logged=False)
        tokens = total["tokens"] / args.num_epochs
        responses, updates, mean_score = max(1, len(present)), max(1, updates), experience.metrics["objective/scores"]
        kl_sum = total["kl"] / responses if reference is not None else math.nan
        if args.rollout_backend != "server":  # that is the servers' work; beside the training it has no time of its own
            work["ahead" if ahead else "rollout"] = [(model, 2 * sampled_tokens)]
        work["logprobs"] = [(passed, 2 * sum(lengths)) for passed in passes]
        work["training"] += [(exact, 2 * args.num_epochs * trained_tokens)] * (exact is not None and kl_in_loss)
        state["metrics"] = {
            "step": step,
            "episode": step * N,
            "epoch": state["position"] / len(prompts),
            "objective/kl": kl_sum,
            "objective/kl_coef": kl_coef,
            "objective/non_score_reward": -kl_coef * kl_sum,
            "objective/rlhf_reward": mean_score - (kl_coef * kl_sum if reference is not None else 0.0),
            "objective/entropy": total["surprise"] / responses,
            "objective/loss": (total["loss"] + args.ptx_coef * total.get("ptx", 0.0)) / updates,
            "loss/policy_avg": total["policy_loss"] / updates,
            "policy/approxkl_avg": total["approxkl"] / (tokens * args.num_epochs),
            "policy/clipfrac_avg": total["clipped"] / (tokens * args.num_epochs),
            "policy/entropy_avg": total["entropy"] / (tokens * args.num_epochs),
            "rollout/logprob_diff_mean": total["diff"] / total["compared"],
            "rollout/logprob_diff_max": total["max_diff"],
            "rollout/prob_diff_mean": total["prob_diff"] / total["compared"],
            "rollout/correction_mean": total["weights"] / tokens,
            "rollout/staleness": step - 1 - experience.policy,
            **({"loss/ptx": total["ptx"] / updates} if "ptx" in total else {}),
            **optimizer.metrics(),
            **experience.metrics,
            **evaluation.batch_metrics(experience.sampled),
            **(engine.metrics() if engine is not None else {}),
            **clock.metrics(work, sampled_tokens, world),
        }
        engines.watch_agreement(state["metrics"])
        # ---- end shared
        if greedy_scores is not None:
            state["metrics"]["val/missing_greedy_scores"] = int(greedy_scores.isnan().sum()) // args.group_size
        run.samples(step, evaluation.sample_rows(batch, args.log_samples, masked_mean(advantages, mask, 1)))

    # ---- shared: the end --------------------------------------------------------------------------------------------
    checkpoints.save_final(folder, world, model, tokenizer, args.model)
    run.close(f"model: {os.path.join(folder, 'final')}")
    # ---- end shared


if __name__ == "__main__":
    main(tyro.cli(Args))
