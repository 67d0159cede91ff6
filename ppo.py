"""Proximal Policy Optimization (PPO) for language models: actor, critic and GAE, in one file.

Sample a response to each prompt, score it, and give its tokens rewards r_t = -beta * KL_t, the last one the score too:

    delta_t = r_t + gamma * V_t+1 - V_t     A_t = delta_t + gamma * lambda * A_t+1     returns R_t = A_t + V_t
    actor:  mean of max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high))               ratio = pi / pi_old, A whitened
    critic: 0.5 * mean of max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

Sources: PPO, arXiv:1707.06347, eq. 7; GAE, arXiv:1506.02438, eq. 16; RLHF, arXiv:1909.08593 and arXiv:2203.02155.

Deliberate choices. As in all scripts here, the gradient is that of the global batch, whatever the ranks and
micro-batches; the sampling temperature is in every log-probability; each (response, position) has its own random
number; masks come from lengths, never from token ids; what could not be scored is left out and counted; per-token
values live in `Batch.tokens`, a dict that carries whatever is put there (see grpo.py, choice 8). And:
1. A value is read at the position that predicts its token, as the log-probabilities are. After the last token it is 0.
2. The critic is a reward model (`--value_model`), its head fitted to the first returns, or the policy with a head of
   zeros: values start at 0 then, and the first returns are the rewards alone.
3. Actor and critic share no weights: each has its own optimizer, schedule and gradient clipping.
4. Returns are taken before the advantages are whitened, over the response tokens of the step, all ranks. They may have
   a lambda of their own (`--critic_gae_lambda`), and the critic its own epochs and mini-batches.
5. Scores: the weighted sum of the sources, then normalisation, then the clip, then the penalty for no stop token.

    bash scripts/demo.sh ppo                                                          # a tiny model on a CPU, minutes
    python ppo.py --model Qwen/Qwen2.5-0.5B-Instruct                                  # one GPU, GSM8K
    torchrun --nproc_per_node 8 ppo.py --model Qwen/Qwen2.5-7B                        # eight GPUs
"""

import functools
import math
import os
from typing import Callable, Literal

import torch
from pydantic import FiniteFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

import utils
from plumbing import cli
from plumbing.cli import Decay, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share
from plumbing.data import mixture as data
from plumbing.models import loading as models
from plumbing.models import lora
from plumbing.models.critic import critic_schedule, explained_variance, load_critic
from plumbing.models.sharding import Sharding, gradient_sync, model_device, sync_reference
from plumbing.rewards.sources import Rewards, needs_answer, reward_weights
from plumbing.rollout import engines
from plumbing.rollout.batch import (
    Batch,
    Experience,
    collate,
    forward_batch,
    forward_tokens,
    join,
    logits_processors,
    rollout,
)
from plumbing.run import evaluation
from plumbing.run.ranks import record
from plumbing.run.run import Run
from plumbing.turns.conversations import load_conversations


@dataclass
class Args(cli.RunArgs, cli.ModelArgs, cli.DataArgs, cli.RewardArgs, cli.RolloutArgs, cli.ConversationArgs):
    total_episodes: PositiveInt = 180_000
    """Responses after which the run ends (rounded down to whole steps); GSM8K with 8 a prompt has 59,784 a pass."""
    rollout_batch_size: PositiveInt = 512
    """Prompts a step, over all ranks."""
    group_size: PositiveInt = 1
    """Responses a prompt (G)."""
    mini_batch_size: PositiveInt = 128
    """Responses an optimizer update, over all ranks."""
    num_epochs: PositiveInt = 1
    """Passes over one rollout."""
    max_response_length: PositiveInt = 1024
    """Most tokens of a response."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; it divides the logits in every log-probability."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_ratio: Share = 0.03
    """Fraction of all updates over which the learning rate rises."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices; biases and norms have none."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay of the mean gradient and of the mean squared gradient."""
    max_grad_norm: PositiveFloat = 1.0
    """Clip the norm of the gradient to this."""

    value_model: str = ""
    """Where the critic starts: a reward model with its head, or a language model with a head of zeros; default:
    --model."""
    critic_learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of the critic's AdamW."""
    critic_lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the critic's learning rate after its warm-up."""
    critic_warmup_ratio: Share = 0.03
    """Fraction of the critic's updates over which its learning rate rises."""
    critic_weight_decay: NonNegativeFloat = 0.0
    """Weight decay of the critic's matrices."""
    critic_num_epochs: NonNegativeInt = 0
    """Passes of the critic over one rollout; 0: --num_epochs."""
    critic_mini_batch_size: NonNegativeInt = 0
    """Responses an update of the critic, over all ranks; 0: --mini_batch_size."""
    critic_gradient_checkpointing: bool = False
    """Recompute the critic's activations in the backward pass, also where --gradient_checkpointing is off."""
    critic_warmup_steps: NonNegativeInt = 0
    """First steps, in which the critic trains and the policy does not (value pretraining, arXiv:2503.01491)."""

    gamma: Share = 1.0
    """Discount a token, where each has a reward of its own (GAE, reinforce++)."""
    gae_lambda: Share = 0.95
    """GAE's lambda: 1 for the reward-to-go minus the value, 0 for the one-step difference."""
    critic_gae_lambda: Share | None = None
    """Lambda of the returns to which the critic is trained (VC-PPO, arXiv:2503.01491: 1); default: --gae_lambda."""
    whiten_advantages: bool = True
    """Whiten the advantages over all response tokens of the step."""
    pf_ppo: Literal["none", "pow", "max_min", "max_random"] = "none"
    """PF-PPO: draw the responses to train on anew, by |score| (pow), from the best and the worst, or half of them
    from the best; among the responses to a prompt or, with --group_size 1, of the step."""
    loss_aggregation: Literal["token", "step_token", "sequence", "sequence_sum", "constant"] = "token"
    """How token losses become one number: mean over an update's tokens, over a step's tokens, mean of sequence means,
    of sequence sums, or sum / (sequences * max_response_length)."""
    clip_low: Share = 0.2
    """The ratio is clipped below at 1 - this."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped above at 1 + this."""
    value_clip: NonNegativeFloat = 0.2
    """Values are clipped to +- this around those at the rollout; 0 for no clip."""
    dual_clip: NonNegativeFloat = 0.0
    """Where the advantage is negative, the loss is at most -A times this (> 1; verl: 3.0); 0 for no such bound."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    rollout_correction: Literal["none", "truncate", "mask", "sequence_mask"] = "none"
    """Weight the policy loss by rho = policy at the start of the step / policy that sampled: truncate rho of a token to
    --rollout_correction_cap, drop tokens outside of [1 / cap, cap], or take the response's and drop it above cap."""
    rollout_correction_cap: PositiveFloat = 2.0
    """Largest rho of --rollout_correction; 2 for tokens, 3 for sequences are usual."""

    kl_coef: NonNegativeFloat = 0.001
    """Weight beta of the KL to the reference; 0 needs, and loads, no reference model."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Add the KL to the loss, or take it from the score."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimator of the KL per token."""
    kl_target: NonNegativeFloat = 0.0
    """Mean KL per token to which beta is steered (Ziegler et al. 2019, adaptive); 0 keeps beta fixed."""
    kl_horizon: PositiveInt = 10_000
    """Responses over which --kl_target acts."""
    ref_model: str = ""
    """Reference for the KL penalty; default: --model as it was at the start."""
    ref_refresh_every: NonNegativeInt = 0
    """Steps between refreshes of the reference from the policy (TR-DPO, arXiv:2404.09656); 0 for never."""
    ptx_dataset: str = ""
    """Rows for a supervised loss added to the policy's (PPO-ptx, arXiv:2203.02155), named as those of --dataset: a
    prompt, and the text to imitate in an answer column or in a last turn of the assistant."""
    ptx_coef: NonNegativeFloat = 0.0
    """Weight of the cross-entropy on --ptx_dataset."""
    ptx_batch_size: PositiveInt = 64
    """Rows of --ptx_dataset an optimizer update, over all ranks."""

    non_stop_penalty: bool = True
    """Replace the score of a response that does not end with a stop token by --penalty_reward_value."""
    penalty_reward_value: FiniteFloat = 0.0
    """Score of a response without a stop token."""
    overlong_buffer: NonNegativeInt = 0
    """Soft overlong penalty: over the last so many tokens before --max_response_length the score falls linearly by up
    to 1 (DAPO, arXiv:2503.14476, eq. 13); 0 for none."""
    mask_truncated: bool = False
    """Leave responses without a stop token out, of the loss and of their group's baseline; no penalty touches them."""
    reward_normalization: bool = False
    """Normalise scores by their mean and standard deviation since the start of the run, before any penalty."""
    reward_clip: NonNegativeFloat = 0.0
    """Clip scores to +- this, before any penalty; 0 for no clip."""
    filter_groups: Literal["none", "drop", "refill"] = "none"
    """Drop the groups whose scores are all equal; refill also samples other prompts in their place (DAPO's dynamic
    sampling)."""

    RULES = cli.RL_RULES | {
        "--critic_mini_batch_size must divide --rollout_batch_size x --group_size": lambda a: (
            a.rollout_batch_size * a.group_size % (a.critic_mini_batch_size or a.mini_batch_size) == 0
        ),
        "--critic_warmup_steps must be less than the steps of --total_episodes": lambda a: (
            a.critic_warmup_steps < a.total_episodes // (a.rollout_batch_size * a.group_size)
        ),
        "--ptx_coef and --ptx_dataset require each other": lambda a: bool(a.ptx_coef) == bool(a.ptx_dataset),
    }
    WARNINGS = cli.RL_WARNINGS | {"--value_clip: above 10 a clip hardly ever acts": lambda a: a.value_clip <= 10}


# ----------------------------------------------------------------------------------------------------------------
# The equations: tensors in, tensors out. N sequences, T response positions, G responses a prompt, V vocabulary.
# ----------------------------------------------------------------------------------------------------------------


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of x where mask is set; what stands elsewhere, NaN included, does not leak."""
    return torch.where(mask, x, 0.0).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of x where mask is set, 0 where it is set nowhere."""
    return masked_sum(x, mask, dim) / mask.sum(dim).clamp(min=1)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per token from the sampled tokens' log-probabilities, any shape.

    d = logprobs - ref_logprobs; k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) + d - 1 with d clamped at -20, for the
    exponent. (verl and OpenRLHF clamp the value of k3, too: at 10 its gradient is 0 for d < -2.6, where the policy has
    run away furthest.) As a loss, the gradient of k1 has zero mean, the gradient of k3 is not that of the reverse KL
    (on policy it is that of the forward KL), and the gradient of k2 is right on policy. DeepSeekMath has k3.
    Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return d.square() / 2
    d = d.clamp(min=-20)  # not in the exponent alone: the gradient of the other d would then push d further down
    return torch.exp(-d) + d - 1


def adapt_kl_coef(kl_coef: float, kl: float, target: float, sequences: int, horizon: int) -> float:
    """Return the adaptive controller's next beta (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    beta * (1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon), where kl is the mean over sequences of the
    token mean. A KL that is not finite leaves beta as it is.
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
    """Return (x - mean) / sqrt(var + 1e-8) over the entries where mask is set, var unbiased; 0 elsewhere. Any shape.

    Without shift_mean the mean is added again: only the scale changes.
    """
    mean = masked_mean(x, mask)
    variance = masked_sum((x - mean).square(), mask) / (mask.sum() - 1).clamp(min=1)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, whitened if shift_mean else whitened + mean, 0.0)


def token_rewards(scores: Tensor, kl: Tensor | None, mask: Tensor, kl_coef: float) -> Tensor:
    """Return the reward of each token: -kl_coef * kl, and the score at the last one (arXiv:1909.08593, eq. 2).

    Args:
        scores: (N,). kl: (N, T), or None for no penalty. mask: (N, T) bool.
    Returns:
        (N, T), 0 outside of the mask.
    """
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    rewards = torch.where(last, scores[:, None], 0.0)
    return rewards if kl is None else torch.where(mask, rewards - kl_coef * kl, 0.0)


def earlier_rewards(rewards: Tensor, turn_rewards: Tensor, mask: Tensor) -> Tensor:
    """Move what the turns of a conversation earned from its last token to theirs; the sum of a response stays.

    Args:
        rewards: (N, T), with the score at the last token. turn_rewards: (N, T), a part of the score, at the last token
            of each turn. mask: (N, T) bool.
    """
    return rewards + turn_rewards - token_rewards(turn_rewards.sum(1), None, mask, 0.0)


def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """Return each response's lambda, 1 - 1 / (alpha * length), at least 0 (VAPO, arXiv:2504.05118): (N, T) -> (N,).

    1 / (1 - lambda), over which GAE looks ahead, is then a share alpha of the response, whatever its length.
    """
    return (1 - 1 / (alpha * mask.sum(1, dtype=torch.float64))).clamp(min=0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages and returns by generalized advantage estimation (GAE, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma * lam * A_{t+1}. Positions outside of the mask pass on
    what follows them; after the last token, value and advantage are 0.

    Args:
        rewards, values: (N, T). mask: (N, T) bool. lam: of all, or of each response (N,).
    Returns:
        Advantages (N, T) and returns A + V (N, T), 0 outside of the mask.
    """
    advantages = torch.zeros_like(values)
    value = advantage = torch.zeros_like(values[:, 0])  # of the next token
    for t in reversed(range(values.shape[1])):
        m = mask[:, t]
        delta = rewards[:, t] + gamma * value - values[:, t]
        advantage = torch.where(m, delta + gamma * lam * advantage, advantage)
        value = torch.where(m, values[:, t], value)
        advantages[:, t] = advantage
    return torch.where(mask, advantages, 0.0), torch.where(mask, advantages + values, 0.0)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Clipped value loss, 0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), any shape; clip 0 for none.

    Source: OpenAI baselines' ppo2; https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details, detail 9.
    Returns: the loss, and where clipping raised it (bool).
    """
    plain = (values - returns).square()
    if not clip:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def filter_weights(grouped: Tensor, kind: str, power: float) -> Tensor:
    """Return how likely PF-PPO draws each response for training (arXiv:2409.06957).

    Args:
        grouped: (P, G) scores, compared along a row; one that is not finite is never drawn unless all of its row are.
        kind: "pow": |score| ** power. "max_min": best and worst alike, no other. "max_random": half of the draws for
            the best, half for all others.
    Returns:
        (P, G) float64, each row adds up to 1; uniform where the rule gives no response any weight.
    """
    scored = grouped.isfinite()
    scores = torch.where(scored, grouped, 0.0).double()
    best = scored & (scores == scores.masked_fill(~scored, -torch.inf).amax(1, keepdim=True))
    worst = scored & (scores == scores.masked_fill(~scored, torch.inf).amin(1, keepdim=True))
    normalise = lambda rows: rows / rows.sum(1, keepdim=True).clamp(min=1)
    if kind == "pow":
        largest = scores.abs().amax(1, keepdim=True).clamp(min=1e-300)
        weights = torch.where(scored, (scores.abs() / largest) ** power, 0.0)
    elif kind == "max_min":
        weights = normalise(best.double()) + normalise(worst.double())
    else:
        weights = normalise(best.double()) + normalise((scored & ~best).double())
    for fallback in (scored, torch.ones_like(scored)):
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, fallback.double())
    return weights / weights.sum(1, keepdim=True)


def resample(weights: Tensor, generator) -> list[int]:
    """Draw from each row of weights (P, G) as many of its entries as it has, with replacement: P * G flat indices."""
    size = weights.shape[1]
    rows = enumerate(weights.tolist())
    return [p * size + i for p, row in rows for i in generator.choice(size, size, p=row).tolist()]


def correction_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, kind: str, cap: float) -> Tensor:
    """Return importance weights rho = exp(old_logprobs - rollout_logprobs), for samples of another policy.

    Args:
        old_logprobs, rollout_logprobs: (N, T), by the policy at the start of the step and by what sampled.
        kind: "truncate": min(rho, cap) (TIS); "mask": rho, 0 outside of [1 / cap, cap] (IcePop); "sequence_mask": rho
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
    """Return a micro-batch's share of the loss of its optimizer batch.

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


def loss_reduction(mask: Tensor, mini: list[int], drawn: list[int], passes: float, args: Args) -> Callable:
    """Return `aggregate` for the update on the responses `mini` of those that were drawn, each in `passes` updates.

    With "step_token" the mean over updates of their losses is the mean over the step's tokens.
    """
    rows, passes = (drawn, passes) if args.loss_aggregation == "step_token" else (mini, 1)
    return functools.partial(
        aggregate, how=args.loss_aggregation, tokens=mask[rows].sum().item() * passes, sequences=len(mini),
        max_length=args.max_response_length,
    )  # fmt: skip


def exact_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return KL(policy || reference) per token, summed over the vocabulary: (..., V), (..., V) -> (...).

    A token that the policy masks (-inf) adds 0. The KL is inf where only the reference masks a token.
    """
    probabilities = logprobs.exp()
    log_ratios = (logprobs - ref_logprobs).masked_fill(probabilities == 0, 0.0)
    return (probabilities * log_ratios).sum(-1)


def entropy_from_logprobs(logprobs: Tensor) -> Tensor:
    """Return the entropy H = -sum(p * log p) in nats over the vocabulary: log p (..., V) -> (...).

    A masked token (-inf) adds 0, which takes a finite number: 0 * -inf is NaN.
    """
    return -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)


# ----------------------------------------------------------------------------------------------------------------
# The policy: log-probabilities of the response tokens, without ever holding logits of all of them
# ----------------------------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """A causal language model whose forward gives statistics of response tokens instead of logits.

    All of it happens inside this module's forward, so that DDP or FSDP, which wrap it, see every use of the weights.
    """

    def __init__(
        self, model: nn.Module, temperature: float, chunk_tokens: int, train_entropy: bool = False,
        recompute_logits: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.model, self.temperature, self.chunk_tokens = model, temperature, chunk_tokens
        self.recompute_logits = recompute_logits
        self.entropy_name = "entropies" if train_entropy else "detached_entropies"

    def forward(
        self, input_ids: Tensor, response_mask: Tensor, reference: "Policy | None" = None,
        temperature: float | None = None, entropy: bool = True,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return statistics of the response tokens.

        Args:
            input_ids: (N, L), query and response, padded on the right (causal attention never looks there).
            response_mask: (N, L) bool, set on response tokens.
            reference: the other model of the exact KL. This policy itself stands for it without its LoRA adapter.
            temperature: divides the logits; None for the temperature of the sampling.
            entropy: whether to compute the entropies.
        Returns:
            Values (tokens,), the set entries of the mask row by row, float32 or better: "logprobs"; "kl" with a
            reference; "entropies", or "detached_entropies" (no gradient, for the log) unless they are trained.
        """
        predicts = nn.functional.pad(response_mask[:, 1:], (0, 1))  # (N, L) bool, set one before each response token
        hidden, labels = self.hidden_and_labels(input_ids, predicts)
        ref_hidden = hidden.detach()
        if reference is not None:
            with torch.no_grad(), lora.without_lora(reference.model):
                ref_hidden, _ = reference.hidden_and_labels(input_ids, predicts)
        recompute = torch.is_grad_enabled() and self.recompute_logits and len(labels) > self.chunk_tokens
        parts = zip(*(x.split(self.chunk_tokens) for x in (hidden, labels, ref_hidden)))
        options = (self.temperature if temperature is None else temperature, reference, entropy)
        chunks = [self.chunk(recompute, *part, *options) for part in parts]
        outputs = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        return outputs

    def hidden_and_labels(self, input_ids: Tensor, predicts: Tensor) -> tuple[Tensor, Tensor]:
        """Return what predicts each response token (tokens, H), and these tokens (tokens,)."""
        labels = nn.functional.pad(input_ids[:, 1:], (0, 1))
        return models.last_hidden_states(self.model, input_ids, predicts), labels[predicts]

    def logits(self, hidden: Tensor, temperature: float = 1.0) -> Tensor:
        """Apply the model's own head: (..., H) -> (..., V), float32 or better, divided by the temperature."""
        logits = self.model.get_output_embeddings()(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        softcap = getattr(self.model.config, "final_logit_softcapping", None)  # Gemma 2 and 3
        logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
        return logits if temperature == 1 else logits / temperature

    def chunk(self, recompute: bool, *inputs) -> dict[str, Tensor]:
        """Call `chunk_outputs`, with recomputation in the backward pass if asked."""
        if recompute:  # logits live only while they are used
            return checkpoint(self.chunk_outputs, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self.chunk_outputs(*inputs)

    def chunk_outputs(
        self, hidden: Tensor, labels: Tensor, ref_hidden: Tensor, temperature: float, reference: "Policy | None",
        entropy: bool,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return log-probability, KL and entropy of each token of a chunk; see `forward`."""
        logprobs = self.logits(hidden, temperature).log_softmax(-1)  # (chunk, V)
        outputs = {"logprobs": logprobs.gather(-1, labels[:, None])[:, 0]}
        if reference is not None:
            with torch.no_grad():
                ref_logprobs = reference.logits(ref_hidden, temperature).log_softmax(-1)
            outputs["kl"] = exact_kl(logprobs, ref_logprobs)
        if entropy:  # at the end: recomputation stops after what has a gradient, so one without is not computed twice
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_name == "entropies"):
                outputs[self.entropy_name] = entropy_from_logprobs(logprobs)
        return outputs


def load_policy(args: Args, saved: str | None, dtype: torch.dtype, device) -> Policy:
    """Load the policy of --model, or of the checkpoint folder `saved`."""
    model = models.load_model("--model", args.model if args.lora_rank else saved or args.model, dtype, device)
    if args.lora_rank:
        lora.add_lora(model, args)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(
        model, args.temperature, args.logits_chunk_tokens, train_entropy=args.entropy_coef > 0,
        recompute_logits=args.gradient_checkpointing,
    )  # fmt: skip
    models.check_head(f"--model {args.model}", model, policy.logits)
    return policy


def reference_name(args: Args) -> str:
    """Return the folder or hub name of the reference of the KL penalty; "" if no other model is held for it."""
    return (args.ref_model or ("" if args.lora_rank else args.model)) if args.kl_coef else ""


def refreshed_reference(saved: str | None) -> str | None:
    """Return the folder of the refreshed reference in the checkpoint folder `saved`; None if there is none."""
    folder = saved and os.path.join(saved, "reference")
    return folder if folder and os.path.isdir(folder) else None


def load_reference(
    args: Args, policy: Policy, saved: str | None, dtype: torch.dtype, sharding: Sharding
) -> Policy | None:
    """Load the model of the KL penalty; None without one. With LoRA it is the policy, used without its adapter."""
    if not reference_name(args):
        return policy if args.kl_coef else None
    name = refreshed_reference(saved) or reference_name(args)
    flag = f"--ref_model {name}" if args.ref_model else f"--model {name}"
    model = models.load_model(flag.split()[0], name, dtype, sharding.load_device).requires_grad_(False)
    reference = Policy(model, args.temperature, args.logits_chunk_tokens)
    models.check_head(flag, model, reference.logits)
    # Without --ref_model it is what the policy started from, which a resumed run loads again; a refresh mixes weights.
    models.check_same_shapes(flag, reference, policy, everything=not args.ref_model or args.ref_refresh_every > 0)
    return sharding.shard(reference)


def update_critic(
    wrapped: nn.Module, optimizer: utils.Optimizer, batch: Batch, drawn: list[int], args: Args, step: int,
    world: utils.World, autocast: Callable,
) -> utils.Sums:  # fmt: skip
    """Train the critic on the responses drawn, to their "returns".

    Returns:
        The sums over the updates of the value loss, and the tokens, and those where clipping raised it.
    """
    epochs, size, updates_a_step = critic_schedule(args)
    sums, updates = utils.Sums(world), utils.mini_batches(drawn, size, epochs, (args.seed, step))
    optimizer.updates += updates_a_step - len(updates)  # where responses were left out; the schedule goes by steps
    for _, mini in updates:
        reduce_loss = loss_reduction(batch.response_mask, mini, drawn, epochs / len(updates), args)
        for inputs, t, last in batch.micro_batches(mini, args.micro_batch_tokens, world):
            m = t["response_mask"]  # (n, T), as all of t
            with gradient_sync(wrapped, last):
                with autocast():
                    values = forward_tokens(wrapped, inputs, m)["values"]
                losses, raised = value_loss(values, t["old_values"], t["returns"], args.value_clip)
                loss = reduce_loss(losses, m)
                optimizer.backward(loss * world.size)  # as in phase 4 of `main`
            sums.add(value_loss=loss / len(updates), raised=masked_sum(raised.double(), m), value_tokens=m.sum())
        optimizer.step()
    return sums


def ptx_loss(wrapped: nn.Module, rows: list[dict], args, optimizer: utils.Optimizer, world, autocast) -> Tensor:
    """Add the gradient of --ptx_coef * cross-entropy per token on supervised rows (PTX: arXiv:2203.02155, eq. 2).

    Leaves the average over ranks to the next backward pass. Returns this rank's share of the cross-entropy.
    """
    tokens = sum(len(row["response"]) for row in rows)
    lengths = [len(row["query"]) + len(row["response"]) for row in rows]
    total = torch.zeros((), device=world.device)
    for cut in utils.micro_batches(lengths, args.micro_batch_tokens, world):
        with gradient_sync(wrapped, False):
            with autocast():  # at temperature 1, whatever that of the rollout
                inputs = collate([(rows[i]["query"], rows[i]["response"]) for i in cut], world.device)
                loss = -wrapped(*inputs, temperature=1.0, entropy=False)["logprobs"].sum() / tokens
            optimizer.backward(args.ptx_coef * loss * world.size)
        total = total + loss.detach()  # float64 in a float64 run
    return total


# ----------------------------------------------------------------------------------------------------------------
# Rollout: the decode loop
# ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    model, queries: list[list[int]], uniforms: Tensor | None, stop_ids: list[int], args, interrupted: Callable,
    lengths: list[int] | None = None, stop_strings: Callable | None = None,
) -> tuple[list[list[int]], list[dict[str, list[float]]]]:  # fmt: skip
    """Sample one response a query: a pass over the left-padded prompts, then one token at a time over the cache.

    A token is drawn by inverting its distribution function at a uniform number given in advance. Whenever half of the
    rows have ended, they are dropped: the long tail of responses runs in a small batch.

    Args:
        queries: token ids. uniforms: (N, T) float64 in [0, 1), T >= all lengths, or None for greedy decoding.
        interrupted: asked at every token; once true, what there is comes back at once.
        lengths: most tokens of each response; None: --max_response_length.
        stop_strings: transformers' StopStringCriteria, which ends a turn of a conversation as a stop token does.
    Returns:
        Responses, token ids up to and including the first stop token; for each the per-token values by name.
    """
    device, width = model_device(model), max(map(len, queries))
    lengths = lengths or [args.max_response_length] * len(queries)
    length, ends = max(lengths), torch.tensor(lengths, device=device)  # (N,), where each response ends at the latest
    # Padded with the row's own first token: masked, and nothing that a repetition penalty has not seen anyway.
    rows = [[query[0]] * (width - len(query)) + query + [0] * length for query in queries]
    sequences = torch.tensor(rows, device=device)  # (N, width + T)
    mask = torch.tensor([[0] * (width - len(query)) + [1] * len(query) for query in queries], device=device)
    values = {"rollout_logprobs": torch.zeros(len(queries), length, device=device)}  # (N, T) each, see `Batch.tokens`
    processors = logits_processors(args, width, stop_ids, uniforms is not None, device)
    stops, uniforms = torch.tensor(stop_ids, device=device), None if uniforms is None else uniforms.to(device)
    running = torch.arange(len(queries), device=device)  # (n,), the rows that the batch still holds
    finished = torch.zeros_like(running, dtype=torch.bool)  # (n,)
    cache, input_ids, positions = DynamicCache(config=model.config), sequences[:, :width], (mask.cumsum(1) - 1).clamp(0)
    for t in range(length):
        outputs = model(
            input_ids=input_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        scores = outputs.logits[:, -1].float()  # (n, V)
        for process in processors:
            scores = process(sequences[running, : width + t], scores)
        token_logprobs = scores.log_softmax(-1)
        if uniforms is None:
            tokens = token_logprobs.argmax(-1, keepdim=True)  # (n, 1)
        else:  # summed in float64: a float32 sum over 150,000 tokens would distort the rare ones
            cdf = token_logprobs.exp().cumsum(-1, dtype=torch.float64)
            tokens = torch.searchsorted(cdf, uniforms[running, t, None] * cdf[:, -1:], right=True)
            tokens.clamp_(max=cdf.shape[1] - 1)  # NaN logits: `rollout` says so, once it has all responses
        sequences[running, width + t] = tokens[:, 0]
        values["rollout_logprobs"][running, t] = token_logprobs.gather(1, tokens)[:, 0]
        ended = torch.isin(tokens[:, 0], stops) | (t + 1 == ends[running])
        if stop_strings is not None:
            ended |= stop_strings(sequences[running, width : width + t + 1], None)
        ends[running[ended & ~finished]] = t + 1
        finished |= ended
        count = int(finished.sum())
        if count == len(running) or interrupted():
            break
        input_ids, positions = tokens, positions[:, -1:] + 1
        mask = nn.functional.pad(mask, (0, 1), value=1)
        if 2 * count >= len(running):
            kept = ~finished
            running, input_ids, positions, mask = running[kept], input_ids[kept], positions[kept], mask[kept]
            finished = finished[kept]
            cache.batch_select_indices(kept.nonzero()[:, 0])
    responses = [row[:end] for row, end in zip(sequences[:, width : width + t + 1].tolist(), ends.tolist())]
    tables = {name: x.tolist() for name, x in values.items()}
    return responses, [
        {name: table[i][: len(response)] for name, table in tables.items()} for i, response in enumerate(responses)
    ]


# ----------------------------------------------------------------------------------------------------------------
# What a fork changes first: how reward components become one score, and scores become advantages
# ----------------------------------------------------------------------------------------------------------------


def weighted_sum(components: dict[str, Tensor], args: Args) -> Tensor:
    """Return the weighted sum of the reward components: {source: (N,)} -> (N,).

    NaN where a source gave no score (NaN), unless the source's weight is 0.
    """
    return sum(weight * scores for scores, weight in zip(components.values(), reward_weights(args)) if weight)


def final_scores(scores: Tensor, lengths: Tensor, stopped: Tensor, statistics: list[float], args: Args) -> Tensor:
    """Return what each response is trained with (N,); NaN for one that is left out, also of baselines and means.

    Args:
        scores: (N,), as `weighted_sum` gives them. lengths: (N,), tokens. stopped: (N,) bool, see `Batch.ended`.
        statistics: as in `utils.update_statistics`, of all scores so far.
    """
    if args.reward_normalization:
        count, mean, squares = statistics
        scores = (scores - mean) / (math.sqrt(squares / max(1, count - 1)) + 1e-8)
    if args.reward_clip:
        scores = scores.clamp(-args.reward_clip, args.reward_clip)
    if args.non_stop_penalty:
        scores = torch.where(stopped, scores, args.penalty_reward_value)
    if args.overlong_buffer:
        over = lengths - (args.max_response_length - args.overlong_buffer)
        scores = scores - (over / args.overlong_buffer).clamp(min=0)
    return torch.where(stopped, scores, math.nan) if args.mask_truncated else scores


def collect(
    step: int, position: int, statistics: list[float], policy_step: int, *, prompts: list[dict], sample: Callable,
    rewards: Rewards, args: Args,
) -> Experience | None:  # fmt: skip
    """Sample and score the prompts of a step, and drop or replace groups as --filter_groups says.

    Args:
        position: of the step's first prompt in `data.take_prompts`. statistics: of the scores of all steps before.
        policy_step: steps that the policy has trained. sample: `rollout` with all but its first three arguments.
    Returns:
        The Experience; None if the run is interrupted.
    """
    wanted, size = args.rollout_batch_size, args.group_size
    batches, count = [], wanted
    for refill in range(1 + (args.max_refills if args.filter_groups == "refill" else 0)):
        rows = data.take_prompts(prompts, position, count, args.seed)
        key = ("rollout", args.seed, step, refill) if refill else ("rollout", args.seed, step)
        batches.append(sample(rows, size, key))
        if batches[-1] is None:
            return None
        position += count
        statistics = utils.update_statistics(statistics, weighted_sum(batches[-1].reward_components, args))
        batch = join(batches)
        scores = weighted_sum(batch.reward_components, args)  # all of a step by the same statistics
        batch.scores = final_scores(scores, batch.response_mask.sum(1), batch.ended, statistics, args)
        has_signal = ~equal_scores(batch.scores.view(-1, size))  # (prompts,)
        found = int(has_signal.sum())
        if found >= wanted or evaluation.unscored(batches[-1], rewards, args):
            break
        # As many prompts as it takes if the next ones are like those so far.
        count = min(wanted, math.ceil((wanted - found) * len(has_signal) / max(1, found)))
    metrics = {
        "objective/scores": batch.scores.nanmean().item(),
        "val/zero_std_fraction": 1 - found / len(has_signal) if size > 1 else math.nan,
        "val/sampled_prompts": len(has_signal),
        **evaluation.batch_metrics(batch),
    }
    unscored, sampled_tokens = evaluation.unscored(batch, rewards, args), sum(batch.lengths)
    if args.filter_groups != "none":
        if not found:  # nothing to learn from in this step
            batch.scores, has_signal = torch.full_like(batch.scores, math.nan), torch.ones_like(has_signal)
        batch = batch.select(has_signal.repeat_interleave(size).nonzero()[: wanted * size, 0].tolist())
    return Experience(batch, metrics, sampled_tokens, position, statistics, policy_step, size, unscored)


def equal_scores(grouped: Tensor) -> Tensor:
    """Return which groups (N / G, G) have no two different scores, and so nothing to learn from: (N / G,) bool."""
    scored = grouped.isfinite()
    highest = grouped.masked_fill(~scored, -torch.inf).amax(1)
    lowest = grouped.masked_fill(~scored, torch.inf).amin(1)
    return highest <= lowest


@record
def main(args: Args) -> None:
    # ---- setting up: processes, data, rewards ----
    world = utils.setup_processes()
    run = Run(args, __file__, world)
    tokenizer = models.load_tokenizer(args.model, args.chat_template)
    stop_ids = models.stop_token_ids(tokenizer, args.model, args.stop_token)
    conversations = load_conversations(args, tokenizer, stop_ids)
    tools = conversations and conversations.schemas
    prompts, eval_prompts = data.load_train_and_eval(args, tokenizer, needs_answer(args), tools)
    ptx_rows = data.load_supervised(args, tokenizer, stop_ids) if args.ptx_coef else []
    rewards = Rewards(args, tokenizer, prompts + eval_prompts, conversations is not None)
    N = args.rollout_batch_size * args.group_size  # responses a step; fewer train where some are left out
    updates_a_step = args.num_epochs * N // args.mini_batch_size
    total_steps = args.total_episodes // N
    if args.value_model:
        models.check_can_read("--value_model", args.value_model, tokenizer, args.model)

    # ---- setting up: models, optimizer, rollout ----
    precision = models.precision(args.precision, world.device)
    dtype, loss_dtype, compute_dtype, autocast = precision
    sharding = Sharding(args, world, precision)
    dp = world
    policy = load_policy(args, run.checkpoint, dtype, sharding.load_device)
    model, wrapped = policy.model, sharding.wrap(policy)
    reference = load_reference(args, policy, run.checkpoint, dtype, sharding)
    exact_kl_args = {"reference": reference} if args.kl_estimator == "full" and reference is not None else {}
    kl_in_reward = reference is not None and args.kl_in == "reward"
    kl_in_loss = reference is not None and args.kl_in == "loss"
    rewards.load_models(args, precision, sharding)
    critic = load_critic(args, run.checkpoint, dtype, sharding.load_device)
    wrapped_critic = sharding.wrap(critic)
    optimizer = utils.Optimizer(policy, args, (total_steps - args.critic_warmup_steps) * updates_a_step)
    critic_optimizer = utils.Optimizer(critic, args, total_steps * critic_schedule(args)[2], prefix="critic_")
    rollout_world = world.rollout_world(args.vllm_tensor_parallel)
    engine = engines.rollout_engine(args, rollout_world, compute_dtype)
    if engine is None:
        models.check_decodes(f"--model {args.model}", model)
    sample = functools.partial(
        rollout, generate=generate, model=model, engine=engine, tokenizer=tokenizer, stop_ids=stop_ids, rewards=rewards,
        conversations=conversations, args=args, interrupt=run.interrupt, world=rollout_world, autocast=autocast,
    )  # fmt: skip
    collect_step = functools.partial(collect, prompts=prompts, sample=sample, rewards=rewards, args=args)
    forward_all = functools.partial(forward_batch, token_budget=args.micro_batch_tokens, world=dp, autocast=autocast)
    evaluate = functools.partial(evaluation.evaluate, sample, eval_prompts, args) if eval_prompts else None
    keeps_reference = bool(reference and (args.ref_refresh_every or refreshed_reference(run.checkpoint)))
    kept = {"": model, "critic": critic.scalar.model} | ({"reference": reference.model} if keeps_reference else {})
    run.start(total_steps, tokenizer, kept, {"": optimizer, "critic": critic_optimizer}, engine)
    run.log.lengths(data.token_lengths(prompts, eval_prompts, ptx_rows))
    critic.state = run.state.get("critic", critic.state)
    run.clock.count_flops(policy)
    if reference not in (None, policy):
        run.clock.count_flops(reference)
    run.clock.count_flops(critic)
    prefetch = engines.Prefetch(collect_step, run.interrupt) if args.async_steps else None
    prefetched = None
    if engine is not None:
        engine.sync(model)

    for step in run.steps(evaluate):
        # ---- 1. rollout ----
        run.phase("rollout")
        experience, prefetched = prefetched, None
        if experience is None:
            position, statistics = run.state.get("position", 0), run.state.get("score_statistics", [0.0, 0.0, 0.0])
            experience = collect_step(step, position, statistics, step - 1)
        if experience is None:
            run.leave()
        batch, position, statistics = experience.batch, experience.position, experience.score_statistics
        if experience.unscored:
            run.fail(f"--reward: no response of step {step} got a score from {experience.unscored}")
        if prefetch is not None and step < total_steps:  # samples while this step trains, with the weights from before
            prefetch.start(step + 1, position, statistics, step - 1)
        mask, scores, kl_coef = (
            batch.response_mask,
            batch.scores,
            run.state.get("kl_coef", args.kl_coef),
        )  # (N, T), (N,)
        trained = scores.isfinite().nonzero()[:, 0].tolist()  # the responses that train
        if engine is not None:
            engine.sleep()

        # ---- 2. log-probs: of the old policy, which sampled, and of the reference ----
        run.phase("logprobs")
        # The old log-probs are those of the policy at the start of the step: with one update, the current ones. If an
        # asynchronous rollout is by older weights, they are the engine's, unless --rollout_correction weighs the two.
        old_from_engine = args.async_steps > 0 and args.rollout_correction == "none"
        needs_old = updates_a_step > 1 and not old_from_engine
        if reference is not None and not exact_kl_args:
            with lora.without_lora(reference.model):
                batch.tokens["ref_logprobs"] = forward_all(reference, batch, entropy=False)["logprobs"]
        if needs_old or kl_in_reward or args.pf_ppo != "none":
            old = forward_all(policy, batch, entropy=False, **exact_kl_args)
            if exact_kl_args:
                batch.tokens["kl"] = old["kl"]
            elif reference is not None:
                batch.tokens["kl"] = kl_estimate(old["logprobs"], batch.tokens["ref_logprobs"], args.kl_estimator)
        if old_from_engine:
            batch.tokens["old_logprobs"] = batch.tokens["rollout_logprobs"].to(loss_dtype)
        elif needs_old:
            batch.tokens["old_logprobs"] = old["logprobs"]

        # ---- 3. values, advantages, and which responses train ----
        run.phase("values")
        warmup_steps = critic.state["warmup_steps"]  # fewer than --critic_warmup_steps if it ended early
        policy_trains = step > warmup_steps
        optimizer.total_updates = (total_steps - warmup_steps) * updates_a_step
        scored = mask & scores.isfinite()[:, None]  # (N, T), the tokens that can train
        kl = batch.tokens["kl"] if kl_in_reward else None
        rewards_t = token_rewards(scores.to(loss_dtype), kl, mask, kl_coef)  # (N, T)
        if args.turn_rewards:
            weight = reward_weights(args)[args.reward.index("environment")]
            rewards_t = earlier_rewards(rewards_t, weight * batch.tokens["turn_rewards"].to(loss_dtype), mask)
        if args.whiten_rewards:
            rewards_t = whiten(rewards_t, scored, shift_mean=False)
        old_values = forward_all(critic, batch)["values"]  # (N, T)
        if critic.state["fits"]:  # to the rewards-to-go, in which values have no share
            old_values = critic.fit(old_values, gae(rewards_t, old_values, scored, args.gamma, 1.0)[1], scored)
        policy_lambda = critic_lambda = args.gae_lambda
        if args.length_adaptive_lambda:
            policy_lambda = length_adaptive_lambda(scored, args.length_adaptive_lambda)
        if args.critic_gae_lambda is not None:
            critic_lambda = args.critic_gae_lambda
        advantages, _ = gae(rewards_t, old_values, scored, args.gamma, policy_lambda)  # (N, T)
        _, returns = gae(rewards_t, old_values, scored, args.gamma, critic_lambda)
        batch.tokens["advantages"] = whiten(advantages, scored) if args.whiten_advantages else advantages
        batch.tokens["old_values"], batch.tokens["returns"] = old_values, returns
        drawn = trained
        if args.pf_ppo != "none":
            groups = scores.view((1, -1) if args.group_size == 1 else (-1, args.group_size))
            odds = filter_weights(groups, args.pf_ppo, args.pf_ppo_power)
            finite = set(trained)
            drawn = [i for i in resample(odds, utils.generator("filter", args.seed, step)) if i in finite]

        # ---- 4. updates of critic and policy: epochs, mini-batches (an optimizer step each), micro-batches ----
        run.phase("training")
        model.train()  # for gradient checkpointing; there is no dropout
        critic.train()
        sums = update_critic(wrapped_critic, critic_optimizer, batch, drawn, args, step, dp, autocast)
        updates = utils.mini_batches(drawn, args.mini_batch_size, args.num_epochs, (args.seed, step))
        optimizer.updates += (updates_a_step - len(updates)) * policy_trains  # where responses were left out
        for number, (epoch, mini) in enumerate(updates):
            reduce_loss = loss_reduction(mask, mini, drawn, args.num_epochs / len(updates), args)
            if args.ptx_coef and policy_trains:
                count = args.ptx_batch_size
                rows = data.take_prompts(ptx_rows, optimizer.updates * count, count, args.seed)
                sums.add(ptx=ptx_loss(wrapped, rows, args, optimizer, dp, autocast))
            for inputs, t, last in batch.micro_batches(mini, args.micro_batch_tokens, dp):
                m = t["response_mask"]  # (n, T), as all of t and out
                with gradient_sync(wrapped, last), torch.set_grad_enabled(policy_trains):
                    with autocast():
                        out = forward_tokens(wrapped, inputs, m, **(exact_kl_args if kl_in_loss else {}))
                    logprobs = out["logprobs"]
                    old_logprobs = t.get("old_logprobs", logprobs.detach())
                    weights = correction_weights(
                        old_logprobs, t["rollout_logprobs"], m, args.rollout_correction, args.rollout_correction_cap
                    )
                    token_losses, clipped = clipped_loss(
                        logprobs - old_logprobs, t["advantages"], args.clip_low, args.clip_high, args.dual_clip
                    )
                    loss = policy_term = reduce_loss(token_losses * weights, m)
                    token_kl = torch.zeros_like(logprobs)
                    if args.entropy_coef:
                        loss = loss - args.entropy_coef * reduce_loss(out["entropies"], m)
                    if kl_in_loss:
                        if exact_kl_args:
                            token_kl = out["kl"]
                        else:
                            token_kl = kl_estimate(logprobs, t["ref_logprobs"], args.kl_estimator)
                        loss = loss + kl_coef * reduce_loss(token_kl, m)
                    # DDP and FSDP take the mean over ranks, and `reduce_loss` has divided by the counts of all ranks.
                    if policy_trains:
                        optimizer.backward(loss * dp.size)
                sums.add(policy_loss=policy_term, loss=loss, clipped=masked_sum(clipped.double(), m))
                sums.add(entropy=masked_sum(out[policy.entropy_name], m), tokens=m.sum())
                sums.add(approxkl=masked_sum((logprobs - old_logprobs).square() / 2, m))
                if epoch == 0:  # each response once
                    kl = t.get("kl", token_kl.detach())
                    sums.add(kl=masked_sum(kl, m), mean_kl=masked_mean(kl, m, 1).sum())
                    sums.add(surprisal=-masked_sum(old_logprobs, m), weights=masked_sum(weights, m))
                    latest = logprobs.detach() if old_from_engine else old_logprobs
                    if number == 0 or not old_from_engine:  # else the first update only: nearest to what sampled
                        evaluation.add_mismatch(sums, latest, t["rollout_logprobs"], m)
            if policy_trains:
                optimizer.step()
        model.eval()
        critic.eval()

        # ---- 5. sync: the prefetched rollout, the engine, the reference, the KL controller ----
        if prefetch is not None and step < total_steps:
            run.phase("rollout")
            prefetched = prefetch.result()
        if engine is not None:
            run.phase("sync")
            engine.sync(model)
        if args.ref_refresh_every and step % args.ref_refresh_every == 0:
            sync_reference(reference, policy)
        total = sums.totals()
        if args.pf_ppo != "none":  # the sums were of the responses drawn, these are of the rollout
            total["surprisal"] = -masked_sum(old["logprobs"], scored).item()
            if reference is not None:
                kl = batch.tokens["kl"]
                total.update(kl=masked_sum(kl, scored).item(), mean_kl=masked_mean(kl, scored, 1).sum().item())
        next_kl_coef = kl_coef
        if reference is not None and args.kl_controller == "adaptive" and policy_trains:
            next_kl_coef = adapt_kl_coef(
                kl_coef, total["mean_kl"] / max(1, len(trained)), args.kl_target, len(trained), args.kl_horizon
            )
        explained = explained_variance(old_values, returns, scored)
        critic.end_step(step, step * N, explained, args.critic_warmup_patience)

        # ---- 6. metrics ----
        metrics = {
            "epoch": position / len(prompts),
            "objective/kl_coef": kl_coef,
            **evaluation.policy_metrics(
                total, len(updates), len(trained), args, experience.metrics["objective/scores"], kl_coef
            ),
            "rollout/staleness": step - 1 - experience.policy_step,
            "loss/value_avg": total["value_loss"],
            "val/clipfrac_avg": total["raised"] / total["value_tokens"],
            "val/explained_variance": explained,
            "val/values": masked_mean(old_values, scored).item(),
            "val/returns": masked_mean(returns, scored).item(),
            **experience.metrics,
            **optimizer.metrics(),
            **critic_optimizer.metrics(),
            **(engine.metrics() if engine is not None else {}),
        }
        engines.watch_agreement({"step": step, **metrics})
        mean_advantages = masked_mean(batch.tokens["advantages"], mask, 1)
        shown = evaluation.sample_rows(batch, args.log_samples, mean_advantages)
        run.finish_step(
            metrics, shown, experience.sampled_tokens,
            position=position, score_statistics=statistics, kl_coef=next_kl_coef,
            critic=critic.state,
        )  # fmt: skip
    run.finish()


if __name__ == "__main__":
    main(cli.parse(Args))
