"""Group Relative Policy Optimization (GRPO) and its variants, in one file.

For each prompt q, sample G responses o_1..o_G from the current policy, score them, and minimise

    J = mean over the tokens of  max(-A_i * r_it, -A_i * clip(r_it, 1 - low, 1 + high)) + beta * KL_it
    r_it = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)          A_i = (R_i - mean(R)) / (std(R) + 1e-6)

Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3 and 4. `--loss` takes the variants in VARIANTS below.

Deliberate choices:
1. The gradient is that of the global batch: sums are divided by counts over all ranks and micro-batches, so neither
   the number of ranks nor `--micro_batch_tokens` changes it.
2. The sampling temperature divides the logits in every log-probability (TRL issue 3029).
3. Each (response, position) has its own uniform random number, a function of the seed and the step, which the sampler
   inverts: a rollout does not depend on the number of ranks, nor a resumed run on what ran before.
4. Masks come from lengths, never from token ids, so pad == eos is harmless and the stop token is trained on.
5. With one update a rollout the old log-probabilities ARE the current ones: no extra pass, the ratio is exactly 1.
6. A response that could not be scored is left out of its group; it is counted, and never a silent zero.
7. Training rows are padded on the right and attended causally, so they need neither mask nor position ids; prompts'
   logits are never computed, and response logits only `--logits_chunk_tokens` at a time.

    bash scripts/demo.sh                                                              # a tiny model on a CPU, minutes
    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct                                 # one GPU, GSM8K
    torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen2.5-7B                       # eight GPUs
"""

import contextlib
import functools
import math
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
import tyro
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process

import utils

# What each --loss stands for, unless a flag says otherwise:
#             token loss    aggregation     scale    low    high   source
VARIANTS = {
    "grpo":      ("ppo",       "sequence",  "group", 0.2,   0.2),  # DeepSeekMath, arXiv:2402.03300, eq. 3
    "dr_grpo":   ("ppo",       "constant",  "none",  0.2,   0.2),  # Dr. GRPO, arXiv:2503.20783
    "dapo":      ("ppo",       "step_token", "group", 0.2,  0.28),  # DAPO, arXiv:2503.14476, eq. 8
    "bnpo":      ("ppo",       "token",     "group", 0.2,   0.2),  # TRL's name for the mean over an optimizer batch
    "gspo":      ("gspo",      "sequence",  "group", 3e-4,  4e-4),  # GSPO-token, arXiv:2507.18071, eq. 13
    "cispo":     ("cispo",     "token",     "group", 1.0,   4.0),  # MiniMax-M1, arXiv:2506.13585, eq. 4
    "sapo":      ("sapo",      "sequence",  "group", 0.0,   0.0),  # SAPO, arXiv:2511.20347, eq. 5; it does not clip
    "reinforce": ("reinforce", "token",     "group", 0.0,   0.0),  # -A log pi, no ratio
}  # fmt: skip


@dataclass
class Args:
    # ---- run ----
    run_name: str = ""
    """Name of the run's folder; default: algorithm, model, data set and seed."""
    output_dir: str = "runs"
    """Folder that holds the runs."""
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
    """Policy to train: a causal language model's folder or hub name."""
    ref_model: str = ""
    """Reference for the KL penalty; default: --model as it was at the start."""
    precision: Literal["auto", "float32", "float64", "bf16"] = "auto"
    """bf16 keeps float32 weights and computes in bfloat16 (autocast); float64 is for tests of exactness; auto takes bf16
    on GPUs and float32 elsewhere."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    # ---- data ----
    dataset: str = "openai/gsm8k"
    """Prompts: arithmetic (built in), a .jsonl, .json or .parquet file, a folder, or a hub name (owner/name[:config])."""
    dataset_split: str = "train"
    """Split of --dataset to train on."""
    prompt_column: str = ""
    """Column of the prompt, text or messages; default: the first of prompt, question, messages, problem."""
    answer_column: str = ""
    """Column of the reference answer; default: the first of answer, ground_truth, solution."""
    system_prompt: str = "Please reason step by step, and put your final answer within \\boxed{}."
    """System turn put before each prompt that has none; "" for none."""
    max_prompt_length: int = 512
    """Most tokens of a prompt; a longer one ends the run at the start, naming its row."""
    eval_dataset: str = ""
    """Prompts to evaluate on; default: the --eval_split of --dataset, or for a single file nothing."""
    eval_split: str = "test"
    """Split to evaluate on."""

    # ---- rewards ----
    reward: tuple[str, ...] = ("math",)
    """Reward sources, summed: math (parsed and compared), gsm8k (strict ####), exact, format (think/answer), or
    path/to/file.py:function. A response counts as correct if the first source gives it 1 or more."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each reward source; default: 1 each."""
    reward_timeout: float = 30.0
    """Seconds that one call of a reward source may take before it is killed and its sample left out."""
    non_stop_penalty: bool = True
    """Replace the score of a response that does not end with a stop token by --penalty_reward_value."""
    penalty_reward_value: float = 0.0
    """Score of a response without a stop token."""

    # ---- rollout ----
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
    micro_batch_tokens: int = 16_384
    """Tokens, padding included, of a forward pass on one device. Memory and speed only: never changes a result."""
    logits_chunk_tokens: int = 2_048
    """Response tokens whose logits exist at once, recomputed in the backward pass. Memory and speed only."""
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
    loss: Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo", "reinforce"] = "grpo"
    """Variant: fixes token loss, aggregation, advantage scale and clip range (VARIANTS), each open to its own flag."""
    loss_aggregation: Literal["token", "step_token", "sequence", "sequence_sum", "constant"] | None = None
    """How token losses become one number: mean over an update's tokens, over a step's tokens, mean of sequence means, of
    sequence sums, or sum / (sequences * max_response_length); default: the variant's."""
    advantage_scale: Literal["group", "batch", "none"] | None = None
    """Divide advantages by the standard deviation of the group's scores, of the step's, or by nothing; default: the
    variant's."""
    clip_low: float | None = None
    """The ratio is clipped below at 1 - this; default: the variant's."""
    clip_high: float | None = None
    """The ratio is clipped above at 1 + this; default: the variant's."""
    dual_clip: float = 0.0
    """Where the advantage is negative, the loss is at most -A times this (> 1; verl: 3.0); 0 for no such bound."""
    sapo_tau_positive: float = 1.0
    """SAPO's temperature where the advantage is positive."""
    sapo_tau_negative: float = 1.05
    """SAPO's temperature where it is not."""
    kl_coef: float = 0.001
    """Weight beta of the KL to the reference; 0 needs, and loads, no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or take it from the score."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "full"] = "k3"
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
    """Responses of each step written to samples.jsonl."""

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


def group_advantages(scores: Tensor, group_size: int, scale: str) -> Tensor:
    """Group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    Args:
        scores: (N,), the G responses of a prompt next to each other; NaN or infinite where there is no score.
        scale: divide by the "group"'s or the "batch"'s unbiased standard deviation + 1e-6, or by nothing ("none").
    Returns:
        (N,): (R - mean) / (std + eps); exactly 0 in a group whose scores are all equal, and for a missing score, which
        does not count in its group either.
    """
    grouped = scores.view(-1, group_size)  # (N / G, G)
    present = grouped.isfinite()
    mean = masked_mean(grouped, present, 1)[:, None]
    centred = torch.where(present, grouped - mean, 0.0)
    equal = torch.where(present, grouped, -torch.inf).amax(1) <= torch.where(present, grouped, torch.inf).amin(1)
    if scale == "group":
        variance = centred.square().sum(1, keepdim=True) / (present.sum(1, keepdim=True) - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + 1e-6)
    elif scale == "batch":
        everything = scores[scores.isfinite()]
        centred = centred / (everything.std() + 1e-6) if len(everything) > 1 else centred
    return centred.masked_fill(equal[:, None], 0.0).view(-1)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per token from the sampled tokens' log-probabilities, any shape.

    d = logprobs - ref_logprobs; k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) + d - 1, with its exponent clamped to
    +-20 and its value to +-10. Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    As a loss: the gradient of k1 has zero mean, the gradient of k3 is not that of the reverse KL (it is, on policy, that
    of the forward KL), and the gradient of k2 is right on policy. DeepSeekMath's GRPO uses k3.
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

    beta * (1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon), kl the mean over sequences of the token mean.
    """
    return kl_coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * sequences / horizon)


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, kind: str, clip_low: float, clip_high: float,
    dual_clip: float = 0.0, tau_positive: float = 1.0, tau_negative: float = 1.05,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of each response token.

    Args:
        logprobs, old_logprobs: (N, T), current and at the rollout. advantages: (N, 1) or (N, T). mask: (N, T) bool.
        kind: "ppo" (arXiv:1707.06347, eq. 7; dual clip: arXiv:1912.09729, eq. 5), "gspo" (arXiv:2507.18071, eq. 13),
            "cispo" (arXiv:2506.13585, eq. 4), "sapo" (arXiv:2511.20347, eq. 5) or "reinforce".
    Returns:
        Loss (N, T), and where clipping took the gradient or changed the weight (N, T) bool.
    """
    log_ratio = logprobs - old_logprobs
    if kind == "gspo":  # one ratio a sequence; logprobs - logprobs.detach() is 0 and carries the token's gradient
        sequence = masked_mean(log_ratio, mask, 1)[:, None]
        log_ratio = sequence.detach() + logprobs - logprobs.detach()
    ratio = torch.exp(log_ratio.clamp(-20, 20))
    outside = (ratio < 1 - clip_low) & (advantages < 0) | (ratio > 1 + clip_high) & (advantages > 0)
    if kind == "reinforce":
        return -advantages * logprobs, torch.zeros_like(mask)
    if kind == "cispo":
        weight = ratio.clamp(1 - clip_low, 1 + clip_high).detach()
        return -weight * advantages * logprobs, weight != ratio
    if kind == "sapo":
        tau = torch.where(advantages > 0, tau_positive, tau_negative)
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, torch.zeros_like(mask)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip:
        bounded = (advantages < 0) & (loss > -advantages * dual_clip)
        loss, outside = torch.where(bounded, -advantages * dual_clip, loss), outside | bounded
    return loss, outside


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


def entropy_of(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits), nats: (..., V) -> (...). H = logsumexp(z) - sum(softmax(z) * z)."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


# ----------------------------------------------------------------------------------------------------------------
# The policy: log-probabilities of the response tokens, without ever holding (tokens, V)
# ----------------------------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """A causal language model whose forward gives statistics of response tokens instead of logits.

    All of it happens inside this module's forward, so that DDP, which wraps it, sees every use of the weights.
    """

    def __init__(self, model: nn.Module, temperature: float, chunk_tokens: int, train_entropy: bool = False):
        super().__init__()
        self.model, self.temperature, self.chunk_tokens, self.train_entropy = model, temperature, chunk_tokens, train_entropy

    def forward(self, input_ids: Tensor, response_mask: Tensor, reference: "Policy | None" = None):
        """
        Args:
            input_ids: (N, L), query and response, padded on the right (causal attention never looks there).
            response_mask: (N, L) bool, set on response tokens.
            reference: give the exact KL to this model, too.
        Returns:
            logprobs (tokens,), entropies (tokens,) and KL to the reference (tokens,) or None, where `tokens` are the set
            entries of the mask row by row; float32 or better.
        """
        hidden, labels = self.hidden(input_ids, response_mask)  # (tokens, H), (tokens,)
        with torch.no_grad():
            ref_hidden = reference.hidden(input_ids, response_mask)[0] if reference else hidden.detach()
        chunks = []
        for part in zip(*(x.split(self.chunk_tokens) for x in (hidden, labels, ref_hidden))):
            if torch.is_grad_enabled() and len(labels) > self.chunk_tokens:  # logits live only while they are used
                part = checkpoint(self.statistics, *part, reference, use_reentrant=False, preserve_rng_state=False)
            else:
                part = self.statistics(*part, reference)
            chunks.append(part)
        logprobs, entropies, kl = (torch.cat(column) if column[0] is not None else None for column in zip(*chunks))
        return logprobs, entropies, kl

    def hidden(self, input_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states that predict the response tokens, one position before each, and the tokens."""
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # (N, L, H)
        return hidden[:, :-1][response_mask[:, 1:]], input_ids[:, 1:][response_mask[:, 1:]]

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own head: (..., H) -> (..., V), float32 or better, not divided by the temperature."""
        logits = self.model.get_output_embeddings()(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        softcap = getattr(self.model.config, "final_logit_softcapping", None)  # Gemma 2 and 3
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def statistics(self, hidden: Tensor, labels: Tensor, ref_hidden: Tensor, reference: "Policy | None"):
        logits = self.logits(hidden) / self.temperature  # (chunk, V)
        logprobs = logits.gather(-1, labels[:, None])[:, 0] - logits.logsumexp(-1)
        kl = None
        if reference is not None:
            with torch.no_grad():
                ref_all = (reference.logits(ref_hidden) / self.temperature).log_softmax(-1)
            kl = exact_kl(logits.log_softmax(-1), ref_all)
        # Last, so that the recomputation for the backward pass ends before an entropy that is only logged.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.train_entropy):
            entropies = entropy_of(logits)
        return logprobs, entropies, kl

    @torch.no_grad()
    def check_head(self, flag: str, input_ids: list[int]) -> None:
        """End the run if `logits` is not what the model itself computes (some scale their logits in other ways)."""
        ids = torch.tensor([input_ids], device=self.model.device)
        own = self.logits(self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        theirs = self.model(input_ids=ids, use_cache=False).logits.to(own.dtype)
        if not torch.allclose(own, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item()):
            utils.fail(f"{flag}: {type(self.model).__name__} changes its logits after the head in a way that Policy.logits lacks")


def collate(queries: list[list[int]], responses: list[list[int]], device) -> tuple[Tensor, Tensor]:
    """Rows of query and response, padded on the right: input_ids (N, L) and response_mask (N, L) bool."""
    lengths = [len(q) + len(r) for q, r in zip(queries, responses)]
    input_ids = torch.zeros(max(1, len(queries)), max(lengths, default=2), dtype=torch.long)
    response_mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for i, (query, response) in enumerate(zip(queries, responses)):
        input_ids[i, : lengths[i]] = torch.tensor(query + response)
        response_mask[i, len(query) : lengths[i]] = True
    return input_ids.to(device), response_mask.to(device)


def pad_rows(flat: Tensor, mask: Tensor) -> Tensor:
    """Lay values of response tokens, row after row, out as (N, T) along a mask (N, T); 0 elsewhere. Differentiable."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


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
        self.logprobs[self.rows, self.position] = logprobs.gather(1, tokens)[:, 0]
        self.position += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)  # generate takes the argmax


class Finished:
    """Stopping criterion: note the rows that drew a stop token, and leave `generate` when half of them have."""

    def __init__(self, stop_ids: list[int], interrupted):
        self.stop_ids, self.interrupted, self.rows = stop_ids, interrupted, None

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        stopped = torch.isin(input_ids[:, -1], torch.tensor(self.stop_ids, device=input_ids.device))
        self.rows = stopped if self.rows is None else self.rows | stopped
        leave = self.interrupted() or self.rows.sum() * 2 >= len(self.rows)
        return self.rows | leave


@torch.no_grad()
def generate(model, queries: list[list[int]], uniforms: Tensor | None, args, stop_ids: list[int], pad_id: int, interrupted):
    """Sample one response a query with transformers' generate; see `Sampler` for the random numbers.

    Args:
        queries: token ids, left-padded here. uniforms: (N, max_response_length) float64, or None for greedy.
        interrupted: a function that is asked at every token; once true, what there is comes back at once.
    Returns:
        responses, list of token ids up to and including the first stop token; their log-probabilities, alike.
    """
    device, width = model.device, max(map(len, queries))
    input_ids = torch.tensor([[pad_id] * (width - len(q)) + q for q in queries], device=device)  # (N, width)
    attention_mask = torch.tensor([[0] * (width - len(q)) + [1] * len(q) for q in queries], device=device)
    sampler = Sampler(uniforms, len(queries), args.max_response_length, device)
    processors = LogitsProcessorList([sampler])
    if uniforms is not None:
        if args.top_p < 1:
            processors.insert(0, logits_process.TopPLogitsWarper(args.top_p))
        if args.top_k > 0:
            processors.insert(0, logits_process.TopKLogitsWarper(args.top_k))
        processors.insert(0, logits_process.TemperatureLogitsWarper(args.temperature))
    if args.min_response_length > 0:
        processors.insert(0, logits_process.MinNewTokensLengthLogitsProcessor(width, args.min_response_length, stop_ids, device=device))
    if args.repetition_penalty != 1:
        processors.insert(0, logits_process.RepetitionPenaltyLogitsProcessor(args.repetition_penalty))
    # The model's own generation defaults (Qwen2.5 has a repetition penalty there) would change the distribution.
    defaults, model.generation_config = model.generation_config, GenerationConfig()
    settings = GenerationConfig(max_length=width + args.max_response_length, do_sample=False, pad_token_id=pad_id, return_dict_in_generate=True)
    tokens = torch.full((len(queries), args.max_response_length), pad_id, device=device)  # (N, T)
    cache = None
    try:
        # Whenever half of the rows are finished, go on without them: a long tail of responses runs in a small batch.
        while len(sampler.rows) and sampler.position < args.max_response_length and not interrupted():
            finished = Finished(stop_ids, interrupted)
            output = model.generate(
                input_ids, attention_mask=attention_mask, past_key_values=cache, generation_config=settings,
                logits_processor=processors, stopping_criteria=StoppingCriteriaList([finished]),
            )  # fmt: skip
            tokens[sampler.rows, : sampler.position] = output.sequences[:, width:]
            going = ~finished.rows
            sampler.rows, input_ids, cache = sampler.rows[going], output.sequences[going], output.past_key_values
            attention_mask = nn.functional.pad(attention_mask[going], (0, input_ids.shape[1] - attention_mask.shape[1]), value=1)
            cache.batch_select_indices(going.nonzero()[:, 0])
    finally:
        model.generation_config = defaults
    responses = [truncate_at_stop(row, stop_ids) for row in tokens[:, : sampler.position].tolist()]
    logprobs = [row[: len(response)] for row, response in zip(sampler.logprobs.tolist(), responses)]
    return responses, logprobs


def truncate_at_stop(tokens: list[int], stop_ids: list[int]) -> list[int]:
    """A response without what follows its first stop token; the stop token stays, and is trained on."""
    end = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens) - 1)
    return tokens[: end + 1]


def rollout(rows: list[dict], samples: int, key: tuple, model, args, rewards, tokenizer, stop_ids, interrupt, world) -> dict:
    """Sample and score `samples` responses for each row, spread over the ranks; every rank gets the whole result.

    Args:
        rows: prompts of all ranks. samples: responses a prompt; 0 for a single greedy one. key: names the randomness.
    Returns:
        Columns of N = rows * samples entries, the responses of a prompt next to each other: queries, responses (lists of
        token ids), logprobs (lists, of the sampler), texts, stopped (bool), parts {source: scores}, row (prompt rows).
    """
    rows = [row for row in rows for _ in range(max(1, samples))]
    uniforms = None
    if samples:  # one row of numbers a response of the whole step, whichever rank generates it
        uniforms = torch.rand(len(rows), args.max_response_length, dtype=torch.float64, generator=utils.generator(*key))
    mine, responses, logprobs = world.deal(list(range(len(rows)))), [], []
    for i in range(0, len(mine), args.generation_batch_size):
        batch = mine[i : i + args.generation_batch_size]
        new = generate(model, [rows[j]["query"] for j in batch], None if uniforms is None else uniforms[batch], args, stop_ids, tokenizer.pad_token_id, lambda: interrupt.requested)
        responses, logprobs = responses + new[0], logprobs + new[1]
    if interrupt.agreed():
        return {}
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    columns = {k: [rows[j][k] for j in mine] for k in rows[0] if k not in ("prompt", "query")}
    parts = rewards.score([rows[j]["prompt"] for j in mine], texts, columns)
    share = [
        (response, logprob, text, bool(response) and response[-1] in stop_ids, {name: part[i] for name, part in parts.items()})
        for i, (response, logprob, text) in enumerate(zip(responses, logprobs, texts))
    ]
    responses, logprobs, texts, stopped, scored = zip(*world.undeal(share, len(rows)))
    return {
        "rows": rows, "queries": [row["query"] for row in rows], "responses": list(responses), "logprobs": list(logprobs),
        "texts": texts, "stopped": torch.tensor(stopped), "parts": {name: torch.tensor([s[name] for s in scored], dtype=torch.float64) for name in scored[0]},
    }  # fmt: skip


def token_logprobs(policy, queries, responses, mask: Tensor, args, world, autocast, reference=None) -> tuple[Tensor, Tensor]:
    """Log-probabilities of every response token under a policy, without gradient, the work spread over the ranks.

    Returns:
        logprobs (N, T), and the exact KL to `reference` (N, T), zeros without one; 0 after a response's end.
    """
    lengths, share = [len(q) + len(r) for q, r in zip(queries, responses)], []
    with torch.no_grad(), autocast():
        for rows in utils.micro_batches(lengths, args.micro_batch_tokens, world):
            ids, response_mask = collate([queries[i] for i in rows], [responses[i] for i in rows], mask.device)
            logprobs, _, kl = policy(ids, response_mask, reference)
            both = torch.stack([logprobs, torch.zeros_like(logprobs) if kl is None else kl]).cpu()
            share += zip(rows, both.split([len(responses[i]) for i in rows], dim=1))
    values = [value for _, value in sorted(world.gather(share), key=lambda pair: pair[0])]
    logprobs, kl = torch.cat(values, 1).to(mask.device)
    return pad_rows(logprobs, mask), pad_rows(kl, mask)


# ----------------------------------------------------------------------------------------------------------------
# What a fork changes first: how scores become rewards, and rewards advantages
# ----------------------------------------------------------------------------------------------------------------


def final_scores(parts: dict[str, Tensor], weights: tuple[float, ...], stopped: Tensor, args) -> Tensor:
    """One score a response: the weighted sum of its reward parts, replaced where no stop token was sampled.

    Args:
        parts: {source: (N,)}, NaN where a source gave no score, which leaves the response without one.
        stopped: (N,) bool, the response ends with a stop token.
    """
    scores = sum(weight * part for weight, part in zip(weights, parts.values()))
    return torch.where(stopped, scores, args.penalty_reward_value) if args.non_stop_penalty else scores


def sample_rows(batch: dict, count: int, advantages: list[float] | None = None) -> list[dict]:
    """The first `count` responses of a rollout for samples.jsonl and the console."""
    return [
        {
            "prompt": batch["rows"][i]["prompt"], "response": batch["texts"][i],
            **{name: part[i].item() for name, part in batch["parts"].items()},
            **({} if advantages is None else {"advantage": advantages[i]}),
            "stop": "stop" if batch["stopped"][i] else "length",
        }
        for i in range(min(count, len(batch["texts"])))
    ]  # fmt: skip


def zero_std_fraction(scores: Tensor, group_size: int) -> float:
    """Share of groups whose scores are all equal, which teach nothing."""
    grouped = scores.view(-1, group_size)
    return (grouped == grouped[:, :1]).all(1).double().mean().item()


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def evaluate(sample, eval_rows: list[dict], args) -> tuple[dict, dict]:
    """Greedy and sampled accuracy on rows that are never trained on, with the same random numbers at every call.

    Args:
        sample: `rollout`, given rows, samples and key.
    Returns:
        metrics, and the sampled rollout; both empty if the run is interrupted. accuracy: mean over all samples, the same
        as pass@1; a response is correct if the first reward source gives it 1 or more and it stopped.
    """
    metrics, k = {}, args.eval_samples
    for name, samples in (("greedy_", 0), ("", k)):
        batch = sample(eval_rows, samples, ("evaluation", args.seed))
        if not batch:
            return {}, {}
        correct = (batch["parts"][args.reward[0]] >= 1) & batch["stopped"]  # NaN, a missing score, counts as not correct
        metrics[f"eval/{name}accuracy"] = correct.double().mean().item()
    counts = correct.view(len(eval_rows), k).sum(1).tolist()
    for power in range(1, k.bit_length()):  # 2, 4, ... up to the number of samples
        metrics[f"eval/pass@{2**power}"] = sum(pass_at_k(k, c, 2**power) for c in counts) / len(counts)
    metrics["eval/stop_rate"] = batch["stopped"].double().mean().item()
    metrics["eval/sequence_lengths"] = sum(map(len, batch["responses"])) / len(batch["responses"])
    metrics["eval/missing_scores"] = sum(part.isnan() for part in batch["parts"].values()).count_nonzero().item()
    return metrics, batch


def check_args(args: Args) -> None:
    """End the run for flags that cannot work together, before anything is loaded; warn of those that rarely should."""
    responses = args.rollout_batch_size * args.group_size
    if args.group_size < 2:
        utils.fail(f"--group_size {args.group_size}: advantages are relative to a group, which takes 2 responses or more")
    for name in ("rollout_batch_size", "mini_batch_size", "num_epochs", "max_response_length", "max_prompt_length", "micro_batch_tokens",
                 "logits_chunk_tokens", "generation_batch_size", "eval_samples", "temperature", "learning_rate", "max_grad_norm", "reward_timeout"):  # fmt: skip
        if not getattr(args, name) > 0:
            utils.fail(f"--{name} {getattr(args, name)}: has to be above 0")
    if responses % args.mini_batch_size:
        utils.fail(f"--mini_batch_size {args.mini_batch_size}: has to divide --rollout_batch_size x --group_size = {responses}")
    if args.total_episodes < responses:
        utils.fail(f"--total_episodes {args.total_episodes}: is less than one step of {responses} (--rollout_batch_size x --group_size)")
    if not 0 <= args.min_response_length <= args.max_response_length:
        utils.fail(f"--min_response_length {args.min_response_length}: has to lie between 0 and --max_response_length {args.max_response_length}")
    if not args.reward or args.reward_weights and len(args.reward_weights) != len(args.reward):
        utils.fail(f"--reward_weights: {len(args.reward_weights)} weights for {len(args.reward)} reward sources")
    if args.dual_clip and args.dual_clip <= 1:
        utils.fail(f"--dual_clip {args.dual_clip}: has to be above 1 (or 0 for none)")
    if args.min_learning_rate > args.learning_rate:
        utils.fail(f"--min_learning_rate {args.min_learning_rate}: is above --learning_rate {args.learning_rate}")
    if not 0 < args.top_p <= 1 or args.top_k < 0 or args.repetition_penalty <= 0:
        utils.fail("--top_p has to lie in (0, 1], --top_k to be 0 or more, --repetition_penalty above 0")
    if args.top_p < 1 or args.top_k > 0 or args.repetition_penalty != 1:
        utils.warn("--top_p, --top_k and --repetition_penalty change the distribution that is sampled, not the one that is trained: the ratio is biased")
    if args.kl_coef and args.kl_in == "loss" and args.kl_estimator == "k1":
        utils.warn("--kl_in loss --kl_estimator k1: its gradient has zero mean, so it is noise and no penalty; take k2, k3 or full")
    if args.ref_refresh_every and not args.kl_coef:
        utils.fail(f"--ref_refresh_every {args.ref_refresh_every}: with --kl_coef 0 there is no reference to refresh")


def main(args: Args) -> None:
    # ---- set up: processes, data, models, optimizer -----------------------------------------------------------------
    check_args(args)
    world = utils.setup_processes()
    interrupt = utils.Interrupt(world)
    folder, resume_from = utils.run_folder(args, "grpo")
    rewards = utils.Rewards(args.reward, args.reward_timeout)
    tokenizer = utils.load_tokenizer(args.model, args.pad_token)
    prompts, eval_prompts = utils.load_train_and_eval(args, tokenizer)
    stop_ids = utils.stop_token_ids(tokenizer, args.model, args.stop_token)

    token_loss, aggregation, scale, clip_low, clip_high = (
        default if chosen is None else chosen
        for default, chosen in zip(VARIANTS[args.loss], (None, args.loss_aggregation, args.advantage_scale, args.clip_low, args.clip_high))
    )
    weights = args.reward_weights or (1.0,) * len(args.reward)
    N = args.rollout_batch_size * args.group_size  # responses a step
    updates_a_step = args.num_epochs * N // args.mini_batch_size
    total_steps = args.total_episodes // N

    dtype = torch.float64 if args.precision == "float64" else torch.float32
    bf16 = args.precision == "bf16" or args.precision == "auto" and world.device.type == "cuda"
    autocast = lambda: torch.autocast(world.device.type, torch.bfloat16, enabled=bf16)  # noqa: E731
    model = utils.load_model("--model", resume_from or args.model, dtype, world.device)
    policy = Policy(model, args.temperature, args.logits_chunk_tokens, train_entropy=args.entropy_coef > 0)
    policy.check_head(f"--model {args.model}", prompts[0]["query"])
    reference = None
    if args.kl_coef:
        moved = os.path.join(resume_from or "", "reference")  # is there only if it was refreshed
        source = moved if os.path.isdir(moved) else args.ref_model or args.model
        ref_model = utils.load_model("--ref_model", source, dtype, world.device).requires_grad_(False)
        reference = Policy(ref_model, args.temperature, args.logits_chunk_tokens)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped = DistributedDataParallel(policy, gradient_as_bucket_view=True) if world.size > 1 else policy
    groups = utils.parameter_groups(policy, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), fused=True)

    # ---- resume -----------------------------------------------------------------------------------------------------
    # What the next step depends on, beside the weights and the optimizer: random numbers are functions of the step.
    state = {"step": 0, "position": 0, "update": 0, "skipped": 0, "kl_coef": args.kl_coef, "seconds": 0.0, "metrics": {}, "logged": False}
    if resume_from:
        state = utils.load_checkpoint(resume_from, world)
        optimizer.load_state_dict(state.pop("optimizer"))
    run = utils.Run(folder, args, world, total_steps, state["step"] - (not state["logged"]) if resume_from else None)
    started = time.time() - state["seconds"]
    sample = functools.partial(
        rollout, model=model, args=args, rewards=rewards, tokenizer=tokenizer, stop_ids=stop_ids, interrupt=interrupt, world=world
    )

    def save() -> None:
        run.phase("save")
        state["seconds"] = time.time() - started
        moving = reference.model if args.ref_refresh_every else None
        utils.save_checkpoint(folder, world, model, tokenizer, {**state, "optimizer": optimizer.state_dict()}, args.keep_checkpoints, moving)

    def leave() -> NoReturn:
        save()
        run.close()
        print(f"interrupted: step {state['step']} is saved, go on with --resume", flush=True) if world.main else None
        sys.exit(utils.EXIT_INTERRUPTED)

    while True:
        # ---- evaluate, log, save: the policy after `step` steps -----------------------------------------------------
        step, metrics = state["step"], state["metrics"]
        if not state["logged"]:  # a run that was interrupted after this step's update comes here, too
            if args.eval_every and eval_prompts and (step % args.eval_every == 0 or step == total_steps):
                run.phase("evaluate")
                with autocast():
                    results, batch = evaluate(sample, eval_prompts, args)
                if not results:
                    leave()
                metrics = {"step": step, "episode": step * N, **metrics, **results}
                run.table(f"held-out samples after step {step}", sample_rows(batch, 4), list(map(len, batch["responses"])))
            if metrics:
                run.log(metrics, {"score": "objective/scores", "kl": "objective/kl", "held-out": "eval/accuracy"})
            state.update(metrics={}, logged=True)
            if step and args.save_every and step % args.save_every == 0:
                save()
        if step == total_steps:
            break
        if interrupt.agreed():
            leave()

        # ---- rollout and scores -------------------------------------------------------------------------------------
        clock = [utils.now(world.device)]
        step += 1
        run.phase("rollout")
        rows = utils.take_prompts(prompts, state["position"], args.rollout_batch_size, args.seed)
        with autocast():
            batch = sample(rows, args.group_size, ("rollout", args.seed, step))
        if not batch:
            leave()
        scores = final_scores(batch["parts"], weights, batch["stopped"], args).to(world.device)  # (N,)
        for name, part in batch["parts"].items():
            if part.isnan().all():
                run.close()
                utils.fail(f"--reward {name}: gave no score to any response of step {step}; last failure: {rewards.failures.get(name)}")
        clock.append(utils.now(world.device))

        # ---- old and reference log-probs ----------------------------------------------------------------------------
        run.phase("log-probs")
        queries, responses = batch["queries"], batch["responses"]
        response_lengths = torch.tensor([len(r) for r in responses], device=world.device)  # (N,)
        response_mask = torch.arange(response_lengths.max(), device=world.device) < response_lengths[:, None]  # (N, T)
        flat = torch.tensor([x for row in batch["logprobs"] for x in row], dtype=dtype, device=world.device)
        rollout_logprobs = pad_rows(flat, response_mask)  # (N, T)
        old_logprobs, ref_logprobs, kl = None, None, None
        kl_in_reward, kl_in_loss = (reference is not None and args.kl_in == place for place in ("reward", "loss"))
        if updates_a_step > 1 or kl_in_reward:  # else the log-probs of the only update are the old ones
            full = reference if kl_in_reward and args.kl_estimator == "full" else None
            old_logprobs, kl = token_logprobs(policy, queries, responses, response_mask, args, world, autocast, full)  # (N, T)
        if reference is not None and args.kl_estimator != "full":
            ref_logprobs, _ = token_logprobs(reference, queries, responses, response_mask, args, world, autocast)  # (N, T)
        clock.append(utils.now(world.device))

        # ---- advantages ---------------------------------------------------------------------------------------------
        returns = scores  # R, (N,)
        if kl_in_reward:
            kl = kl if args.kl_estimator == "full" else kl_estimate(old_logprobs, ref_logprobs, args.kl_estimator)  # (N, T)
            returns = scores - state["kl_coef"] * masked_sum(kl, response_mask, 1)
        advantages = group_advantages(returns, args.group_size, scale).to(dtype)  # (N,)

        # ---- update: epochs, mini-batches (an optimizer step each), micro-batches -----------------------------------
        run.phase("update")
        model.train()
        sums = defaultdict(float)  # sums over this rank's tokens or sequences, for the metrics
        largest_diff, skipped, grad_norms = torch.zeros((), dtype=dtype, device=world.device), 0, []
        lengths = [len(q) + len(r) for q, r in zip(queries, responses)]
        for epoch in range(args.num_epochs):
            order = torch.randperm(N, generator=utils.generator("mini-batches", args.seed, step, epoch)).tolist()
            for start in range(0, N, args.mini_batch_size):
                mini = order[start : start + args.mini_batch_size]
                tokens = response_lengths[mini].sum().item()
                if aggregation == "step_token":  # the mean over updates of their sums / this is the step's token mean
                    tokens = response_lengths.sum().item() * args.mini_batch_size / N
                cuts = utils.micro_batches([lengths[i] for i in mini], args.micro_batch_tokens, world)
                for number, cut in enumerate(cuts, 1):
                    micro = [mini[i] for i in cut]
                    mask = response_mask[micro]  # (n, T)
                    wait = wrapped.no_sync() if world.size > 1 and number < len(cuts) else contextlib.nullcontext()
                    with wait:
                        ids, ids_mask = collate([queries[i] for i in micro], [responses[i] for i in micro], world.device)
                        full = reference if kl_in_loss and args.kl_estimator == "full" else None
                        with autocast():
                            flat = wrapped(ids, ids_mask, full)  # 3 x (tokens,)
                        logprobs, entropies = (pad_rows(x, mask) for x in flat[:2])  # (n, T)
                        old = logprobs.detach() if old_logprobs is None else old_logprobs[micro]
                        token_losses, clipped = policy_loss(
                            logprobs, old, advantages[micro, None], mask, token_loss, clip_low, clip_high,
                            args.dual_clip, args.sapo_tau_positive, args.sapo_tau_negative,
                        )  # fmt: skip
                        share = functools.partial(aggregate, mask=mask, how=aggregation, tokens=tokens, sequences=len(mini), max_length=args.max_response_length)
                        policy_term = share(token_losses)
                        loss = policy_term - args.entropy_coef * share(entropies)
                        if kl_in_loss:
                            token_kl = pad_rows(flat[2], mask) if full else kl_estimate(logprobs, ref_logprobs[micro], args.kl_estimator)
                            loss = loss + state["kl_coef"] * share(token_kl)
                        (loss * world.size).backward()  # DDP takes the mean over ranks; `share` divided by the global count
                    with torch.no_grad():
                        log_ratio = logprobs - old
                        sums["policy_loss"] += policy_term
                        sums["loss"] += loss
                        sums["entropy"] += masked_sum(entropies, mask)
                        sums["approxkl"] += masked_sum(log_ratio.square() / 2, mask)
                        sums["clipped"] += masked_sum(clipped.to(dtype), mask)
                        if epoch == 0:  # each response once, before or hardly after the policy moved
                            token_kl = token_kl if kl_in_loss else kl[micro] if kl_in_reward else torch.zeros_like(logprobs)
                            diff = torch.where(mask, (old - rollout_logprobs[micro]).abs(), 0.0)
                            sums["surprise"] -= masked_sum(old, mask)
                            sums["kl"] += masked_sum(token_kl, mask)
                            sums["kl_mean"] += masked_mean(token_kl, mask, 1).sum()
                            sums["diff"] += diff.sum()
                            largest_diff = torch.maximum(largest_diff, diff.amax() if diff.numel() else largest_diff)
                grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).item()
                for group in optimizer.param_groups:
                    floor = args.min_learning_rate / args.learning_rate
                    group["lr"] = args.learning_rate * utils.lr_factor(state["update"], total_steps * updates_a_step, args.warmup_ratio, args.lr_schedule, floor)
                if math.isfinite(grad_norm):
                    optimizer.step()
                    state["skipped"] = 0
                    grad_norms.append(grad_norm)
                else:  # the gradient is the same on all ranks, so all of them skip
                    skipped, state["skipped"] = skipped + 1, state["skipped"] + 1
                optimizer.zero_grad()
                state["update"] += 1
                if state["skipped"] > args.max_skipped_updates:
                    run.close()
                    utils.fail(f"--max_skipped_updates {args.max_skipped_updates}: the gradient was not finite {state['skipped']} updates in a row, at step {step}; try a lower --learning_rate")
        model.eval()
        clock.append(utils.now(world.device))

        # ---- KL controller and reference ----------------------------------------------------------------------------
        names = sorted(sums)
        totals = world.sum(torch.stack([sums[name].double() for name in names])).tolist()
        total = dict(zip(names, totals))
        if args.kl_controller == "adaptive" and reference is not None:
            state["kl_coef"] = adapt_kl_coef(state["kl_coef"], total["kl_mean"] / N, args.kl_target, N, args.kl_horizon)
        if args.ref_refresh_every and step % args.ref_refresh_every == 0:
            with torch.no_grad():
                for kept, new in zip(reference.model.parameters(), model.parameters()):
                    kept.lerp_(new, args.ref_refresh_mix)

        # ---- metrics ------------------------------------------------------------------------------------------------
        state.update(step=step, position=state["position"] + args.rollout_batch_size, logged=False)
        seconds = [b - a for a, b in zip(clock, clock[1:])]  # rollout, log-probs, update
        step_tokens, all_tokens = response_lengths.sum().item(), sum(lengths)
        passes = args.num_epochs * step_tokens  # response tokens that the update saw
        updates = updates_a_step
        state["metrics"] = metrics = {
            "step": step,
            "episode": step * N,
            "epoch": state["position"] / len(prompts),
            "lr": optimizer.param_groups[0]["lr"],
            "objective/scores": scores.nanmean().item(),
            "objective/verifiable_correct_rate": ((batch["parts"][args.reward[0]] >= 1) & batch["stopped"]).double().mean().item(),
            "objective/kl": total["kl"] / N if reference else None,
            "objective/kl_coef": state["kl_coef"],
            "objective/non_score_reward": -state["kl_coef"] * total["kl"] / N if reference else None,
            "objective/rlhf_reward": scores.nanmean().item() - state["kl_coef"] * total["kl"] / N,
            "objective/entropy": total["surprise"] / N,
            "objective/loss": total["loss"] / updates,
            "loss/policy_avg": total["policy_loss"] / updates,
            "loss/grad_norm": sum(grad_norms) / len(grad_norms) if grad_norms else None,
            "policy/approxkl_avg": total["approxkl"] / passes,
            "policy/clipfrac_avg": total["clipped"] / passes,
            "policy/entropy_avg": total["entropy"] / passes,
            "rollout/logprob_diff_mean": total["diff"] / step_tokens,
            "rollout/logprob_diff_max": world.max(largest_diff).item(),
            "val/sequence_lengths": step_tokens / N,
            "val/num_stop_token_ids": int(batch["stopped"].sum()),
            "val/zero_std_fraction": zero_std_fraction(returns, args.group_size),
            "val/missing_scores": int(scores.isnan().sum()),
            "val/skipped_updates": skipped,
            "time/from_scratch": time.time() - started,
            "time/rollout": seconds[0],
            "time/logprobs": seconds[1],
            "time/training": seconds[2],
            "time/step": sum(seconds),
            "perf/tokens_per_second": all_tokens / sum(seconds),
            "perf/mfu": utils.step_flops(model, all_tokens, args.num_epochs, (old_logprobs is not None) + (reference is not None)) / sum(seconds) / world.size / utils.peak_flops(world.device),
            "perf/peak_memory_gb": utils.peak_memory_gb(world.device),
        }
        for name, part in batch["parts"].items():
            metrics[f"reward/{name}"] = part.nanmean().item()
        run.samples(step, sample_rows(batch, args.log_samples, advantages.tolist()))

    # ---- the end ----------------------------------------------------------------------------------------------------
    utils.save_final(folder, world, model, tokenizer, args.model)
    run.close()


if __name__ == "__main__":
    main(tyro.cli(Args))
