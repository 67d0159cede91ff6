"""Proximal Policy Optimization (PPO) for language models: actor, critic and GAE, in one file.

Sample a response to each prompt and score it. Each token gets the reward r_t = -beta * KL_t; the
last token also gets the score:

    delta_t = r_t + gamma * V_{t+1} - V_t   A_t = delta_t + gamma * lambda * A_{t+1}   returns R_t = A_t + V_t
    actor:  mean of max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high))               ratio = pi / pi_old, A whitened
    critic: 0.5 * mean of max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

Sources: PPO, arXiv:1707.06347, eq. 7; GAE, arXiv:1506.02438, eq. 16; RLHF, arXiv:1909.08593 and
arXiv:2203.02155.

Deliberate choices. As in all scripts here, the gradient is that of the global batch, whatever the
ranks and micro-batches; the sampling temperature is in every log-probability; each (response,
position) has one random number; masks come from lengths, never from token ids; what could not be
scored is left out and counted; per-token tensors live in `Batch.tokens`, a dict that carries
whatever is put there (see grpo.py, choice 8). And:
1. A value is read at the position that predicts its token, as the log-probabilities are. After the
   last token it is 0.
2. The critic starts as a reward model with its head (`--value_model`), or as a language model, by
   default --model, with a head of zeros: then values start at 0, and the first returns are sums of
   rewards alone.
3. Actor and critic share no weights: each has an optimizer, a schedule and gradient clipping.
4. Advantages are whitened over the response tokens of the step, all ranks, after the returns are
   computed. Returns may have another lambda (`--critic_gae_lambda`), and the critic other epochs
   and mini-batches.
5. Scores: the weighted sum of the sources, then normalisation, then the clip, then the penalty for
   no stop token.

    bash scripts/demo.sh ppo                                                          # a tiny model on a CPU, minutes
    python ppo.py --model Qwen/Qwen2.5-0.5B-Instruct                                  # one GPU of 40 GB, GSM8K
    torchrun --nproc_per_node 8 ppo.py --model Qwen/Qwen2.5-7B                        # eight GPUs of 80 GB
"""

import functools
import math
import os
from typing import Callable, Iterator, Literal, Sequence

import numpy as np
import torch
from pydantic import FiniteFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from transformers import PreTrainedModel

import utils
from plumbing import cli
from plumbing.cli import (
    Factor,  # a number of at least 1
    Fraction,  # from 0 to 1
    NonNegativeFloat,
    NonNegativeInt,
    PathOrName,
    PositiveFloat,
    PositiveInt,
)
from plumbing.data.mixture import next_prompts, take_prompts
from plumbing.data.rows import Row
from plumbing.models import loading
from plumbing.models.forward import (
    expand_cache,
    head_logits,
    invert_distribution,
    last_hidden_states,
    logits_processors,
    recomputed,
)
from plumbing.models.sharding import model_device, set_gradient_sync, sync_reference
from plumbing.rewards.sources import reward_weights
from plumbing.rollout.batch import Batch, Sample, forbid_gradient, forward_batch, forward_tokens
from plumbing.rollout.sampler import (
    MAX_REFILLS,
    Experience,
    Sampler,
    prompts_to_add,
    select_groups,
)
from plumbing.run.command import parse, report_errors
from plumbing.run.metrics import add_rollout, batch_metrics, mismatch_metrics
from plumbing.run.setup import set_up

CHUNK_TOKENS = 512  # response tokens whose logits are held at once
ROLLOUT_OUTPUTS = ("rollout_logprobs",)  # what `generate` stores per token; vLLM returns no others
MAX_LOG_RATIO = 20  # in nats: exp of more would swamp a batch
SHRINK_AT = 0.25  # share of finished rows at which the decode loop drops them


@dataclass
class Args(
    cli.RunArgs,
    cli.ModelArgs,
    cli.DataArgs,
    cli.RewardArgs,
    cli.RolloutArgs,
    cli.ConversationArgs,
    cli.PolicyArgs,
):
    total_episodes: PositiveInt = 180_000
    """Responses after which the run ends (rounded down to whole steps); GSM8K with 8 per prompt has
    59,784 per pass."""
    rollout_batch_size: PositiveInt = 512
    """Prompts per step, over all ranks."""
    group_size: PositiveInt = 1
    """Responses per prompt (G)."""
    mini_batch_size: NonNegativeInt = 128
    """Maximum number of responses in an optimizer update, over all ranks; those of a step are cut
    into equal parts. 0: the whole step."""
    num_epochs: PositiveInt = 1
    """Passes over one rollout."""
    max_response_length: PositiveInt = 1024
    """Maximum number of tokens of a response."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; it divides the logits in every log-probability."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    system_prompt: str | None = None
    """System turn put before each prompt that has none; the saved chat template does the same; ""
    adds none. Default: that of SYSTEM_PROMPTS for the first source of --reward, else none."""

    value_model: PathOrName = ""
    """Where the critic starts: a reward model with its head, or a language model with a head of
    zeros; default: --model."""
    critic_learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of the critic's AdamW."""
    critic_lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the critic's learning rate after its warm-up."""
    critic_warmup_ratio: Fraction = 0.03
    """Fraction of the critic's updates over which its learning rate rises."""
    critic_weight_decay: NonNegativeFloat = 0.0
    """Weight decay of the critic's matrices."""
    critic_num_epochs: NonNegativeInt = 0
    """Passes of the critic over one rollout; 0: --num_epochs."""
    critic_mini_batch_size: NonNegativeInt = 0
    """Maximum number of responses in an update of the critic, over all ranks; 0:
    --mini_batch_size."""
    critic_warmup_steps: NonNegativeInt = 0
    """Number of first steps in which only the critic trains (value pretraining, arXiv:2503.01491);
    the metrics of the policy's updates are null in them."""

    gamma: Fraction = 1.0
    """Discount per token of the rewards that come later."""
    gae_lambda: Fraction = 0.95
    """GAE's lambda: 1 for the reward-to-go minus the value, 0 for the one-step difference."""
    critic_gae_lambda: Fraction | None = None
    """Lambda of the returns to which the critic is trained (VC-PPO, arXiv:2503.01491: 1); default:
    --gae_lambda."""
    turn_rewards: bool = False
    """Give each reward of the --environment to the last token of its turn, instead of giving
    their sum to the last token of the response."""
    whiten_advantages: bool = True
    """Whiten the advantages over all response tokens of the step."""
    pf_ppo: Literal["none", "pow", "max_min", "max_random"] = "none"
    """PF-PPO: draw the responses to train on, with replacement, from those to the same prompt or,
    with --group_size 1, from those of the step. pow: by |score|; max_min: a best one or a worst
    one, with equal probability; max_random: a best one or any other, with equal probability."""
    loss_aggregation: Literal["token", "step_token", "sequence", "sequence_sum", "constant"] = (
        "token"
    )
    """How token losses become one number. token: mean over an update's tokens; step_token: over a
    step's tokens; sequence: mean of the sequences' means; sequence_sum: mean of their sums;
    constant: sum / (sequences * max_response_length)."""
    clip_low: Fraction = 0.2
    """The ratio is clipped below at 1 - this."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped above at 1 + this."""
    value_clip: NonNegativeFloat = 0.2
    """Values are clipped to +- this around those at the rollout; 0 for no clip."""
    dual_clip: NonNegativeFloat = 0.0
    """Bound of the loss where the advantage is negative: at most -A times this, which must be above
    1 (verl: 3.0); 0 for no bound."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    entropy_target: NonNegativeFloat = 0.0
    """Target of the mean entropy per token (Skywork-OR1, arXiv:2505.22312). The weight of the bonus
    starts at --entropy_coef, which must be above 0. After each step it rises by 0.005 if the entropy
    was below the target, else it falls by 0.005, within 0 and 1. The step after one above the target
    has no bonus in its loss. 0 keeps the weight fixed."""

    kl_coef: NonNegativeFloat = 0.001
    """Weight beta of the KL to the reference; 0 loads no reference model."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Add the KL to the loss, or subtract it from the score."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimator of the KL per token."""
    kl_target: NonNegativeFloat = 0.0
    """Target of the mean KL per token: beta starts at --kl_coef and is adapted to reach the target
    (Ziegler et al. 2019); a resumed run continues with the saved beta. 0 keeps beta fixed."""
    kl_horizon: PositiveInt = 10_000
    """Responses in which --kl_target changes beta by about 20 percent at most."""
    ref_refresh_every: NonNegativeInt = 0
    """Steps between two copies of the policy's weights to the reference (TR-DPO, arXiv:2404.09656);
    0 for never."""
    rollout_correction: Literal["none", "truncate", "mask", "sequence_mask", "geometric"] | None = (
        None
    )
    """Multiply the policy loss by rho = pi_old / pi_rollout, probability of a token at the start of
    the step divided by that when it was sampled.
    truncate: rho of a token, at most --rollout_correction_cap; mask: rho of a token, 0 outside of
    [1 / cap, cap]; sequence_mask: rho of the whole response, 0 above cap; geometric: 1, or 0 for a
    response whose geometric mean of rho is outside of [1 / cap, cap]. Default: truncate where vLLM
    samples without --async_steps, else none."""
    rollout_correction_cap: Factor | None = None
    """Largest rho of --rollout_correction; 2 for tokens, 3 for sequences are usual, and 1.001 to 1.1
    for a geometric mean. Default: 2, or 1.1 for geometric."""
    off_policy_delta: NonNegativeFloat = 0.0
    """Leave the tokens with a negative advantage out of the policy loss, in a response whose mean of
    log(pi_rollout / pi) over its tokens is above this; 0.5 is usual, 0 for never (DeepSeek-V3.2)."""
    ptx_dataset: PathOrName = ""
    """Rows for a supervised loss that is added to the policy's (PPO-ptx, arXiv:2203.02155); takes
    the same names as --dataset."""
    response_column: str = ""
    """Column of the text that supervised rows teach; default: the last turn of the assistant, or
    else the first of response, completion, solution, tgt, answer, output that at least one
    row fills."""
    ptx_coef: NonNegativeFloat = 0.0
    """Weight of the cross-entropy on --ptx_dataset."""
    ptx_batch_size: PositiveInt = 64
    """Rows of --ptx_dataset per optimizer update, over all ranks."""

    non_stop_penalty: bool = True
    """Penalise a response without a stop token by --penalty_reward_value."""
    penalty_reward_value: FiniteFloat | None = None
    """Score of a response without a stop token; default: the lower of its score and 0."""
    overlong_buffer: NonNegativeInt = 0
    """Soft overlong penalty: over this many last tokens before --max_response_length the score
    falls linearly by up to 1 (DAPO, arXiv:2503.14476, eq. 13); 0 for none."""
    mask_truncated: bool = False
    """Leave responses without a stop token out of the loss and of any baseline; they get no
    penalty."""
    reward_normalization: bool = False
    """Normalise scores by their mean and standard deviation since the start of the run, before any
    penalty."""
    reward_clip: NonNegativeFloat = 0.0
    """Clip scores to +- this, before any penalty; 0 for no clip."""
    filter_groups: Literal["none", "drop", "refill"] = "none"
    """Drop the groups whose scores are all equal; refill samples other prompts in their place
    (DAPO)."""

    SYSTEM_PROMPTS = {  # source of --reward -> prompt for answers in the form that the source reads
        "math": "Please reason step by step, and put your final answer within \\boxed{}.",
        "gsm8k": 'Let us think step by step and output the final answer after "####".',
    }

    def rules(self) -> Iterator[tuple[object, str]]:
        """Yield the conditions that flags must meet, each with what to say otherwise; the rules that
        scripts share are in plumbing/cli.py.
        """
        yield (
            self.critic_warmup_steps
            < self.total_episodes // (self.rollout_batch_size * self.group_size),
            "--critic_warmup_steps must be less than the steps of --total_episodes",
        )
        yield (
            bool(self.ptx_coef) == bool(self.ptx_dataset),
            "--ptx_coef and --ptx_dataset require each other",
        )
        yield (
            self.ptx_dataset or not self.response_column,
            "--response_column requires a --ptx_dataset",
        )
        yield (
            not self.reward_normalization or self.async_steps < 2,
            "--reward_normalization requires --async_steps 0 or 1: the rollout of a step begins with "
            "the statistics of the step before",
        )
        yield (
            self.filter_groups == "none" or self.group_size > 1,
            "--filter_groups requires a --group_size of 2 or more",
        )
        yield (
            not self.turn_rewards
            or (self.environment and "episode" in self.reward and not self.reward_normalization),
            "--turn_rewards requires an --environment, episode in --reward and no "
            "--reward_normalization",
        )


# --------------------------------------------------------------------------------------------------
# The equations: tensors in, tensors out.
# N sequences, T response positions, G responses per prompt, V vocabulary.
# --------------------------------------------------------------------------------------------------


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of x where mask is set; other entries are ignored, even NaN."""
    return x.where(mask, 0.0).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of x where mask is set, 0 where it is set nowhere."""
    return masked_sum(x, mask, dim) / mask.sum(dim).clamp(min=1)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per token from the sampled tokens' log-probabilities, any
    shape.

    d = logprobs - ref_logprobs. On the right stands the expected gradient of each as a loss, on
    policy:
        k1 = d                   zero
        abs = |d|                that of the sum of |p - p_ref| over the vocabulary
        k2 = d^2 / 2             that of the reverse KL
        k3 = exp(-d) + d - 1     that of the forward KL (used by DeepSeekMath)
    k3 clamps d at -20, so that exp stays finite. verl and OpenRLHF also clamp the value of k3 at
    10: its gradient is then 0 for d < -2.6, where the policy has moved furthest away.
    Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return d.square() / 2
    # Clamp d in both terms: below -20 the linear one would still push d down.
    d = d.clamp(min=-MAX_LOG_RATIO)
    return torch.exp(-d) + d - 1


def clipped_loss(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss (arXiv:1707.06347, eq. 7), with dual_clip above 0 that of
    arXiv:1912.09729, eq. 5.

    Args:
        log_ratio: (N, T), log pi - log pi_old, clamped here to +-20. advantages: (N, T).
    Returns:
        Loss (N, T), and where clipping removed the gradient (N, T) bool.
    """
    ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = -advantages * ratio
    loss = torch.maximum(plain, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip:
        loss = loss.clamp(max=-advantages * dual_clip).where(advantages < 0, loss)
    return loss, loss != plain


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) over the entries where mask is set, var unbiased; 0
    elsewhere. Any shape.
    """
    values = x.double()  # a mean of equal float32 is inexact, and its error would grow 10,000 times
    mean = masked_mean(values, mask)
    variance = masked_sum((values - mean).square(), mask) / (mask.sum() - 1).clamp(min=1)
    white = (values - mean) * torch.rsqrt(variance + 1e-8)
    return white.where(mask, 0.0).to(x.dtype)


def token_rewards(
    scores: Tensor,
    kl: Tensor | None,
    mask: Tensor,
    kl_coef: float,
    turn_rewards: Tensor | None = None,
) -> Tensor:
    """Return the reward of each token: -beta * KL_t, and at the last token also the score
    (arXiv:1909.08593, eq. 2).

    With --turn_rewards, the last token of each turn gets u_t, what the turn earned, and the last
    token of the response gets the rest, score - sum_t u_t (MT-PPO, arXiv:2505.11821). Either way
    the rewards add up to the score minus beta * KL.

    Args:
        scores: (N,). kl: (N, T), or None for no penalty. mask: (N, T) bool. kl_coef: beta.
        turn_rewards: u, (N, T), 0 outside of the mask; None for 0.
    Returns:
        (N, T), 0 outside of the mask.
    """
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))  # a conversation's mask has holes
    u = torch.zeros_like(mask, dtype=scores.dtype) if turn_rewards is None else turn_rewards
    rewards = u + torch.where(last, (scores - u.sum(1))[:, None], 0.0)
    return rewards if kl is None else torch.where(mask, rewards - kl_coef * kl, 0.0)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns by generalized advantage estimation (GAE, arXiv:1506.02438, eq.
    16).

    delta_t = r_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma * lam * A_{t+1}. Positions outside
    of the mask pass on what follows them; after the last token, value and advantage are 0.

    Args:
        rewards, values: (N, T). mask: (N, T) bool.
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


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Return the value loss 0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), any shape;
    clip 0 for none.

    Source: OpenAI baselines' ppo2;
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details, detail 9. Returns: the
    loss, and where clipping raised it (bool).
    """
    plain = (values - returns).square()
    if not clip:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - var(R - V) / var(R) over the mask: 1 for a perfect critic, 0 for a constant one;
    NaN for equal R.
    """
    error = (returns - values)[mask].double()
    target = returns[mask].double()
    # Returns that differ by no more than float32's rounding are equal.
    differ = len(target) > 1 and target.var() > 1e-10 * target.square().mean()
    return (1 - error.var() / target.var()).item() if differ else math.nan


def filter_weights(grouped: Tensor, kind: str) -> Tensor:
    """Return how likely PF-PPO draws each response for training (arXiv:2409.06957).

    Args:
        grouped: (P, G) scores, compared along a row; one that is not finite is never drawn unless
            all of its row are.
        kind: "pow": |score|. "max_min": best and worst alike, no other. "max_random": half of the
            draws for the best, half for all others.
    Returns:
        (P, G) float64, each row adds up to 1; uniform where the rule gives no response any weight.
    """
    scored = grouped.isfinite()
    scores = torch.where(scored, grouped, 0.0).double()
    best = scored & (scores == scores.masked_fill(~scored, -torch.inf).amax(1, keepdim=True))
    worst = scored & (scores == scores.masked_fill(~scored, torch.inf).amin(1, keepdim=True))
    # Rows that add up to 1; a row of zeros stays as it is. (Each row holds 0s and 1s.)
    normalise = lambda rows: rows / rows.sum(1, keepdim=True).clamp(min=1)
    if kind == "pow":
        # Divided by the largest, so that the sum neither overflows nor rounds to 0.
        largest = scores.abs().amax(1, keepdim=True).clamp(min=1e-300)
        weights = torch.where(scored, scores.abs() / largest, 0.0)
    elif kind == "max_min":
        weights = normalise(best.double()) + normalise(worst.double())
    else:
        weights = normalise(best.double()) + normalise((scored & ~best).double())
    # A row of zeros becomes uniform over its scored responses, or over all if none is scored.
    for fallback in (scored, torch.ones_like(scored)):
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, fallback.double())
    return weights / weights.sum(1, keepdim=True)


def resample(weights: Tensor, generator: np.random.Generator) -> list[int]:
    """Draw G entries with replacement from each row of weights (P, G), by NumPy's generator; return
    their P * G flat indices.
    """
    size = weights.shape[1]
    draws = [generator.choice(size, size, p=row) for row in weights.tolist()]  # P of (G,)
    return [p * size + i for p, row in enumerate(draws) for i in row.tolist()]


def old_policy(args: Args, correction: str, updates_per_step: int) -> str:
    """Return which policy is pi_old, the denominator of the ratio.

    "rollout": the policy that sampled the tokens, which is older than the start of the step with
        --async_steps. Not used if --rollout_correction accounts for the difference.
    "start": the policy at the start of the step. An extra forward pass before the first update
        computes its log-probabilities.
    "current": the same policy without that pass. With one update per step, the forward pass of
        training gives its log-probabilities, and the ratio is exactly 1.
    """
    if args.async_steps and correction == "none":
        return "rollout"
    return "start" if updates_per_step > 1 else "current"


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, kind: str, cap: float
) -> Tensor:
    """Return importance weights rho = exp(old_logprobs - rollout_logprobs), for samples of another
    policy.

    Args:
        old_logprobs, rollout_logprobs: (N, T), by pi_old and by the policy that sampled. They are the
            same, and all weights 1, where that policy is pi_old.
        kind: "truncate": min(rho, cap) (TIS); "mask": rho, 0 outside of [1 / cap, cap] (IcePop);
            "sequence_mask": rho of the whole response, 0 above cap; "geometric": 1, or 0 for a
            response whose geometric mean of rho is outside of [1 / cap, cap]; "none": 1.
    Returns:
        (N, T), without gradient.
    """
    log_ratio = old_logprobs.detach() - rollout_logprobs
    if kind == "none":
        return torch.ones_like(log_ratio)
    if kind == "sequence_mask":
        log_ratio = masked_sum(log_ratio, mask, 1)[:, None]
    elif kind == "geometric":
        log_ratio = masked_mean(log_ratio, mask, 1)[:, None]
    rho = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind == "truncate":
        return rho.clamp(max=cap)
    lowest = 0 if kind == "sequence_mask" else 1 / cap
    weights = torch.ones_like(rho) if kind == "geometric" else rho
    return weights.where((rho >= lowest) & (rho <= cap), 0.0).expand_as(mask)


def off_policy_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor, delta: float
) -> Tensor:
    """Return which tokens count in the policy loss: all but those with a negative advantage in
    responses that the policy has become unlikely to give (DeepSeek-V3.2, arXiv:2512.02556, eq. 9).

    Args:
        logprobs, rollout_logprobs, advantages: (N, T). mask: (N, T) bool.
        delta: largest mean over a response's tokens of rollout_logprobs - logprobs; 0 for any.
    Returns:
        (N, T) bool.
    """
    drift = masked_mean(rollout_logprobs - logprobs.detach(), mask, 1)[:, None]
    return (advantages >= 0) | (drift <= (delta or math.inf))


def loss_reduction(
    how: str, mask: Tensor, mini: list[int], updates: list[tuple[int, list[int]]], max_length: int
) -> Callable:
    """Return a function of the token losses x (n, T) of a micro-batch and of their mask m (n, T).
    It returns one number, the micro-batch's share of the loss of an update. Counts are those of
    all ranks and micro-batches.

    Args:
        how: "token" = sum / tokens of the update; "step_token" = sum / mean number of tokens of an
            update of the step, so that each token of the step weighs the same (DAPO); "sequence" =
            mean of token means; "sequence_sum" = mean of sums; "constant" = sum / (sequences *
            max_length) (Dr. GRPO).
        mask: (N, T) bool, of all responses of the step.
        mini: the responses of this update. updates: (epoch, responses) of every update of the step.
    """
    divisor: float = len(mini)
    if how == "token":
        divisor = mask[mini].sum().item()
    elif how == "step_token":
        divisor = sum(mask[rows].sum().item() for _, rows in updates) / len(updates)
    elif how == "constant":
        divisor *= max_length
    of_response = masked_mean if how == "sequence" else masked_sum
    return lambda x, m: of_response(x, m, 1).sum() / divisor


def entropy_from_logprobs(logprobs: Tensor) -> Tensor:
    """Return the entropy H = -sum(p * log p) in nats over the vocabulary: log p (..., V) -> (...).

    A masked token (-inf) adds 0; without the clamp it would add 0 * -inf, which is NaN.
    """
    return -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)


# --------------------------------------------------------------------------------------------------
# The policy: log-probabilities of the response tokens, without ever holding logits of all of them
# --------------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """A causal language model whose forward gives statistics of response tokens instead of logits.

    All of it happens inside this module's forward, so that DDP or FSDP, which wrap it, see every
    use of the weights.
    """

    def __init__(self, model: PreTrainedModel, args: Args):
        super().__init__()
        self.model = model
        self.temperature = args.temperature
        self.recompute_logits = args.gradient_checkpointing
        self.trains_entropy = args.entropy_coef > 0

    def forward(
        self,
        input_ids: Tensor,
        response_mask: Tensor,
        shared: int = 0,
        entropy: bool = False,
        temperature: float | None = None,
    ) -> dict[str, Tensor]:
        """Return statistics of the response tokens.

        Args:
            input_ids: (N, L), query and response, padded on the right (causal attention never looks
                there).
            response_mask: (N, L) bool, set on response tokens.
            shared: number of tokens with which all rows begin, forwarded once (--share_prompts).
            entropy: whether to compute the entropies. temperature: divides the logits; None for
                --temperature.
        Returns:
            Tensors (tokens,) by name, one value per set entry of the mask, row by row, float32 or
            better: "logprobs" and, if asked for, "entropies". Unless `trains_entropy` is set, the
            entropies have no gradient, and a loss that uses them raises an error.
        """
        # `nonzero` waits for the GPU. It comes first, so it does not wait for the forward pass.
        rows, positions = response_mask.nonzero(as_tuple=True)  # (tokens,)
        labels = input_ids[rows, positions]
        # A token is predicted at the position before. (tokens, H)
        hidden = last_hidden_states(self.model, input_ids, shared)[rows, positions - 1]
        statistics = self.statistics
        # In the backward pass logits are computed anew, unless a single chunk holds them all.
        if self.recompute_logits and len(labels) > CHUNK_TOKENS:
            statistics = functools.partial(recomputed, statistics)
        chunks = [
            statistics(*chunk, entropy, temperature or self.temperature)
            for chunk in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS))
        ]
        outputs = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        if entropy and not self.trains_entropy:
            outputs["entropies"] = forbid_gradient("entropies", outputs["entropies"])
        return outputs

    def statistics(
        self, hidden: Tensor, labels: Tensor, entropy: bool, temperature: float
    ) -> dict[str, Tensor]:
        """Return log-probability and entropy of each token of a chunk, from (chunk, H) and
        (chunk,); see `forward`.
        """
        logprobs = (head_logits(self.model, hidden) / temperature).log_softmax(-1)  # (chunk, V)
        outputs = {"logprobs": logprobs.gather(-1, labels[:, None])[:, 0]}
        if entropy:
            # A gradient would keep several tensors of the size of the logits.
            kept = logprobs if self.trains_entropy else logprobs.detach()
            outputs["entropies"] = entropy_from_logprobs(kept)
        return outputs


# --------------------------------------------------------------------------------------------------
# The critic, and the supervised loss of PPO-ptx
# --------------------------------------------------------------------------------------------------


class Critic(nn.Module):
    """The value of every response token: the return to expect when the tokens before it are
    known.
    """

    def __init__(self, scalar: loading.ScalarModel):
        super().__init__()
        self.scalar = scalar  # a language model with a head of one output

    def forward(
        self, input_ids: Tensor, response_mask: Tensor, shared: int = 0
    ) -> dict[str, Tensor]:
        """Return "values" (tokens,): of the set entries of the mask, row by row, each read at the
        position before.

        Args:
            input_ids: (N, L), padded on the right. response_mask: (N, L) bool, set on response
                tokens. shared: see `Policy.forward`.
        """
        # The positions before response tokens. `roll` would move a set first entry to the
        # end, but the first token is of the query.
        before = response_mask.roll(-1, 1)
        return {"values": self.scalar(input_ids, before, shared)}


def load_critic(
    args: Args, checkpoint: str | None, dtype: torch.dtype, device: torch.device
) -> Critic:
    """Load the critic of --value_model, or of a checkpoint folder; a language model gets a head of
    zeros.
    """
    # With LoRA the base is loaded as in a new run; `Run.start` loads the checkpoint's adapter.
    name = args.value_model or args.model
    if checkpoint and not args.lora_rank:
        name = os.path.join(checkpoint, "critic")
    scalar, new_head = loading.load_scalar_model("--value_model", name, dtype, device)
    if new_head:
        nn.init.zeros_(scalar.model.score.weight)
    loading.add_adapter(scalar.model, args)
    return Critic(scalar)


def critic_size_and_epochs(args: Args) -> tuple[int, int]:
    """Return --mini_batch_size and --num_epochs of the critic."""
    return (
        args.critic_mini_batch_size or args.mini_batch_size,
        args.critic_num_epochs or args.num_epochs,
    )


def update_critic(
    wrapped: nn.Module,
    optimizer: utils.Optimizer,
    batch: Batch,
    drawn: list[int],
    args: Args,
    step: int,
    world: utils.World,
) -> utils.Sums:
    """Train the critic; return the sums of the value loss and the tokens that were clipped.

    Args:
        drawn: responses with a score; with --pf_ppo some are missing, others are there repeatedly.
    """
    sums = utils.Sums(world)  # for the log; add(m, ...) sums where m is set
    updates = utils.mini_batches(drawn, *critic_size_and_epochs(args), (args.seed, step))
    optimizer.begin_step(step, len(updates))  # fewer where responses were left out
    for _, mini in updates:
        reduce_loss = loss_reduction(
            args.loss_aggregation, batch.response_mask, mini, updates, args.max_response_length
        )
        for inputs, micro, last in batch.micro_batches(mini, args, world):
            m = micro["response_mask"]  # (n, T), as all of micro
            set_gradient_sync(wrapped, last)
            values = forward_tokens(wrapped, inputs, m)["values"]
            losses, clipped = value_loss(
                values, micro["old_values"], micro["returns"], args.value_clip
            )
            loss = reduce_loss(losses, m)
            optimizer.backward(loss)
            sums.add(value_loss=loss / len(updates))
            sums.add(m, value_clipped=clipped, value_tokens=m)
        optimizer.step()
    return sums


def ptx_losses(
    wrapped: nn.Module, prompts: Sequence[Row], args: Args, update: int, world: utils.World
) -> Iterator[Tensor]:
    """Yield this rank's shares, one a micro-batch, of the cross-entropy per token on the rows of
    --ptx_dataset for an update (PTX: arXiv:2203.02155, eq. 2).

    The ranks do not average the gradient here: the backward passes of the policy's loss follow, and
    the last of them averages the sum of both.

    Args:
        prompts: all rows of --ptx_dataset, with responses.
    """
    size = args.ptx_batch_size
    rows = take_prompts(prompts, update * size, size, args.seed)
    batch = Batch.from_samples([Sample.of_row(row) for row in rows], world.device)
    for inputs, *_ in batch.micro_batches([*range(size)], args, world):
        set_gradient_sync(wrapped, False)
        # Temperature 1, whatever that of the rollout.
        logprobs = wrapped(*inputs, temperature=1.0)["logprobs"]
        yield -logprobs.sum() / batch.response_mask.sum()


# --------------------------------------------------------------------------------------------------
# Rollout: the decode loop, and what makes its responses a batch
# --------------------------------------------------------------------------------------------------


@torch.no_grad()  # not inference mode: there autocast casts all weights anew at every token
def generate(
    model: PreTrainedModel,
    queries: list[list[int]],
    uniforms: Tensor,
    stop_ids: list[int],
    args: Args,
    interrupted: Callable,
    lengths: list[int],
    stop_strings: Callable | None = None,
) -> Iterator[tuple[int, Tensor, dict[str, Tensor]]]:
    """Sample one response per query: one forward pass over the different prompts, left-padded, then
    one token at a time with the KV cache.

    A token is drawn by inverting its distribution function at a uniform number given in advance. In a
    greedy response it is the most likely token.
    Whenever a quarter of the rows have ended, they are dropped: the long tail of responses runs in
    a small batch.

    Args:
        queries: token ids. uniforms: (N, T) float64 in [0, 1), T >= all lengths; -1 in the row of a
            greedy response.
        interrupted: called at every token; once it is true, there are no further responses.
        lengths: maximum number of tokens of each response (N,).
        stop_strings: transformers' StopStringCriteria, which ends a turn of a conversation as a
            stop token does.
    Yields:
        The index in `queries` of one whose response has ended; the response (t,), token ids up to
        and including the first stop token; its per-token outputs (t,) by name.
    """
    device = model_device(model)
    # The P different prompts, each with its row in the first pass; a new prompt gets the next row.
    prompts: dict[tuple, int] = {}
    prompt_of = [prompts.setdefault(tuple(query), len(prompts)) for query in queries]  # (N,)
    width = max(map(len, prompts))
    max_length = max(lengths)
    max_lengths = torch.tensor(lengths, device=device)  # (N,)
    # Pad with the first token of the prompt: a repetition penalty also reads padding.
    input_ids = torch.tensor(
        [prompt[:1] * (width - len(prompt)) + prompt for prompt in prompts], device=device
    )  # (P, width); later (n, 1)
    attention = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device
    )  # (P, width); later (n, tokens so far)
    positions = (attention.cumsum(1) - 1).clamp(0)
    sequences = nn.functional.pad(input_ids[prompt_of], (0, max_length))  # (N, width + T)
    outputs = {
        name: torch.zeros(len(queries), max_length, device=device) for name in ROLLOUT_OUTPUTS
    }
    processors = logits_processors(args, width, stop_ids, device)
    stops = torch.tensor(stop_ids, device=device)
    uniforms = uniforms.to(device)
    running = torch.arange(len(queries), device=device)  # (n,), the rows that the batch still holds
    finished = torch.zeros_like(running, dtype=torch.bool)  # (n,)
    finished_count = 0  # rows that have finished and are still in the batch
    cache = None
    for t in range(max_length):
        predicted = model(
            input_ids=input_ids,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = predicted.past_key_values
        logits = predicted.logits[:, -1].float()  # (n, V)
        if t == 0:  # from the prompts' rows to those of the responses
            logits, attention, positions = (x[prompt_of] for x in (logits, attention, positions))
            expand_cache(cache, torch.tensor(prompt_of, device=device))
        for process in processors:
            logits = process(sequences[running, : width + t], logits)
        token_logprobs = logits.log_softmax(-1)
        # (n, 1). NaN logits give any token; `Sampler.rollout` raises an error at its end.
        tokens = invert_distribution(token_logprobs.exp(), uniforms[running, t, None])
        sequences[running, width + t] = tokens[:, 0]
        outputs["rollout_logprobs"][running, t] = token_logprobs.gather(1, tokens)[:, 0]
        ended = torch.isin(tokens[:, 0], stops) | (t + 1 == max_lengths[running])
        if stop_strings is not None:
            ended |= stop_strings(sequences[running, width : width + t + 1], None)
        new = running[ended & ~finished]  # indices of the responses that end at this token
        for index in new.tolist():
            response = sequences[index, width : width + t + 1]
            yield index, response, {name: x[index, : t + 1] for name, x in outputs.items()}
        finished |= ended
        finished_count += len(new)
        if finished_count == len(running) or interrupted():
            return
        input_ids = tokens
        positions = positions[:, -1:] + 1
        attention = nn.functional.pad(attention, (0, 1), value=1)
        if finished_count >= SHRINK_AT * len(running):
            kept = ~finished
            running = running[kept]
            input_ids = input_ids[kept]
            positions = positions[kept]
            attention = attention[kept]
            finished = finished[kept]
            finished_count = 0
            # `reorder_cache` selects the rows of any cache, recurrent states included.
            cache.reorder_cache(kept.nonzero()[:, 0])


# --------------------------------------------------------------------------------------------------
# What a fork changes first: how reward components become one score, and scores become advantages
# --------------------------------------------------------------------------------------------------


def weighted_sum(components: dict[str, Tensor], args: Args) -> Tensor:
    """Return the weighted sum of the reward components: {source: (N,)} -> (N,); NaN if one with a
    weight other than 0 is NaN.
    """
    weighted = [
        weight * components[name]
        for name, weight in zip(args.reward, reward_weights(args))
        if weight
    ]
    return sum(weighted, torch.zeros(()))


def update_statistics(statistics: list[float], scores: Tensor) -> list[float]:
    """Add scores (N,) to the running [count, mean, sum of squared deviations]; what is not finite
    does not count.

    Source: Welford's method in the batch form of Chan, Golub and LeVeque 1979, eq. 2.1.
    """
    count, mean, squares = statistics
    new = scores[scores.isfinite()].double()
    if not len(new):
        return statistics
    total = count + len(new)
    difference = new.mean().item() - mean
    squares += (new - new.mean()).square().sum().item() + difference**2 * count * len(new) / total
    return [total, mean + difference * len(new) / total, squares]


def final_scores(
    scores: Tensor, lengths: Tensor, stopped: Tensor, statistics: list[float], args: Args
) -> Tensor:
    """Return the score that each response trains with (N,); NaN for one that neither trains nor
    counts in a baseline or mean.

    Args:
        scores: (N,), as `weighted_sum` gives them. lengths: (N,), in tokens, including those that
            tools and environments wrote. stopped: (N,) bool.
        statistics: as in `update_statistics`, of all scores so far.
    """
    if args.reward_normalization:
        count, mean, squares = statistics
        scores = (scores - mean) / (math.sqrt(squares / max(1, count - 1)) + 1e-8)
    if args.reward_clip:
        scores = scores.clamp(-args.reward_clip, args.reward_clip)
    if args.non_stop_penalty:
        value = args.penalty_reward_value
        keeps_score = stopped | scores.isnan()  # no penalty in place of a missing score
        scores = scores.where(keeps_score, scores.clamp(max=0) if value is None else value)
    if args.overlong_buffer:
        over = lengths - (args.max_response_length - args.overlong_buffer)
        scores = scores - (over.to(scores.dtype) / args.overlong_buffer).clamp(0, 1)
    return scores.where(stopped, math.nan) if args.mask_truncated else scores


def collect(sampler: Sampler, prompts: Sequence[Row], step: int, state: dict) -> Experience:
    """Sample and score the prompts of a step, and with --filter_groups refill further prompts, until
    enough groups have two different scores.

    Args:
        prompts: all rows of --dataset, of which the step takes some.
        state: `Experience.state` of the previous rollout, and the "score_statistics".
    """
    args = sampler.args
    taken = 0  # prompts that the step has sampled
    count = args.rollout_batch_size  # prompts to sample next
    samples: list[Sample] = []
    earlier = state.get("score_statistics", [0.0, 0.0, 0.0])  # of the steps before
    for refill in range(1 + MAX_REFILLS):
        rows = next_prompts(prompts, step, state, taken, count, args)
        # The first round has the key of a run without refills, and so the same responses.
        key = ("rollout", args.seed, step, refill) if refill else ("rollout", args.seed, step)
        latest = sampler.rollout(rows, args.group_size, key)
        taken += count
        samples += latest.samples
        batch = Batch.from_samples(samples, latest.stopped.device)
        sums = weighted_sum(batch.reward_components, args)
        statistics = update_statistics(earlier, sums)
        batch.scores = final_scores(sums, batch.response_lengths, batch.stopped, statistics, args)
        has_signal = ~equal_scores(batch.scores.view(-1, args.group_size))  # (prompts,)
        # How many prompts a refill has to add; 0 ends the rollout.
        count = prompts_to_add(has_signal, latest, sampler)
        if not count:
            break
    position = state.get("position", 0) + taken  # where the next step begins
    experience = select_groups(batch, has_signal, sampler, step, position)
    experience.state["score_statistics"] = statistics
    return experience


def equal_scores(grouped: Tensor) -> Tensor:
    """Return which groups teach nothing, their scores being equal: (N / G, G) -> (N / G,) bool.

    Missing scores are ignored: a group with one score or none is among them. Scores within 1e-9
    count as equal, because sums such as 0.1 + 0.2 and 0.3 differ by rounding.
    """
    scored = grouped.isfinite()
    highest = grouped.where(scored, -torch.inf).amax(1)
    lowest = grouped.where(scored, torch.inf).amin(1)
    return highest - lowest <= 1e-9


def policy_metrics(total: dict[str, float], scores: Tensor, kl_coef: float) -> dict[str, float]:
    """Return the logged objectives of a step.

    Args:
        total: of `utils.Sums`; a name that was never added reads as NaN. `add_rollout` has added
            "kl", "surprisal" and "responses", each response once; in the other sums each response
            counts once in each epoch.
        scores: (N,), of all responses that were sampled. kl_coef: beta of the step.
    """
    tokens = total["tokens"]
    mean_score = scores.nanmean().item()
    # NaN without a reference; below, `if kl_coef` then keeps it out of the reward.
    kl = total["kl"] / total["responses"]
    return {
        "objective/scores": mean_score,
        "objective/kl": kl,  # mean over responses of the sum over tokens
        "objective/non_score_reward": -kl_coef * kl,
        "objective/rlhf_reward": mean_score - (kl_coef * kl if kl_coef else 0.0),
        "objective/entropy": total["surprisal"] / total["responses"],  # -log p, summed over tokens
        "objective/loss": total["loss"],
        "loss/policy_avg": total["policy_loss"],
        "policy/approxkl_avg": total["approxkl"] / tokens,
        "policy/clipfrac_avg": total["clipped"] / tokens,
        "policy/entropy_avg": total["entropy"] / tokens,
        "rollout/correction_mean": total["weights"] / tokens,
        "rollout/left_out": total["left_out"] / tokens,
    }


def main(args: Args) -> None:
    # ---- setting up ----
    # Responses per step; fewer train where some are left out.
    N = args.rollout_batch_size * args.group_size
    total_steps = args.total_episodes // N
    updates_per_step = utils.count_updates(N, args.mini_batch_size, args.num_epochs)
    critic_updates_per_step = utils.count_updates(N, *critic_size_and_epochs(args))
    parts = set_up(args, __file__, functools.partial(Policy, args=args), generate, ROLLOUT_OUTPUTS)
    world, run, precision, sampler = parts.world, parts.run, parts.precision, parts.sampler
    # `wrapped`: the policy as it trains, in DDP on several ranks without --shard.
    policy, wrapped, reference = parts.policy, parts.wrapped, parts.reference
    critic = load_critic(
        args, run.checkpoint, precision.trained_dtype(args), parts.sharding.load_device
    )
    wrapped_critic = parts.sharding.wrap(critic)
    parts.models["critic"] = critic.scalar.model  # a checkpoint holds it, too
    optimizer = utils.Optimizer(
        policy, args, total_steps - args.critic_warmup_steps, updates_per_step
    )
    critic_optimizer = utils.Optimizer(
        critic, args, total_steps, critic_updates_per_step, prefix="critic_"
    )
    kl_in = "none" if reference is None else args.kl_in
    estimate_kl = functools.partial(kl_estimate, estimator=args.kl_estimator)
    # `sampler.correction`: --rollout_correction, or its default for the engine.
    pi_old = old_policy(args, sampler.correction, updates_per_step)
    # With PF-PPO the KL is logged before the updates, which may draw a response never or twice.
    needs_start_logprobs = pi_old == "start" or kl_in == "reward" or args.pf_ppo != "none"
    rollouts = parts.start(collect, total_steps, {"": optimizer, "critic": critic_optimizer})
    adaptive_kl = utils.AdaptiveKL(args, run.state)
    adaptive_entropy = utils.AdaptiveEntropy(args, run.state)

    for step in run.steps():
        # ---- 1. rollout ----
        run.phase("rollout")
        experience = rollouts.take(step)
        # The responses of all ranks, the same on every rank: `experience.sampled` holds all of them,
        # `batch` lacks those that --filter_groups drops.
        batch = experience.batch
        mask = batch.response_mask  # (N, T)
        scores = batch.scores  # (N,)
        trainable = scores.isfinite().nonzero().flatten().tolist()  # the responses with a score
        kl_coef = adaptive_kl.coef
        entropy_coef = adaptive_entropy.coef

        # ---- 2. log-probs: of the reference, and of the policy at the start of the step ----
        run.phase("logprobs")
        if reference is not None:
            batch.tokens["ref_logprobs"] = forward_batch(reference, batch, "logprobs", args, world)
        if needs_start_logprobs:
            batch.tokens["start_logprobs"] = forward_batch(policy, batch, "logprobs", args, world)

        # ---- 3. values, advantages, and the responses that train ----
        run.phase("values")
        scored = mask & scores.isfinite()[:, None]  # (N, T), the tokens that can train
        kl = None
        if kl_in == "reward":
            kl = estimate_kl(batch.tokens["start_logprobs"], batch.tokens["ref_logprobs"])
        turn_rewards = batch.tokens.get("turn_rewards")
        # Rewards, values, advantages and returns are (N, T).
        rewards = token_rewards(scores.to(precision.loss_dtype), kl, mask, kl_coef, turn_rewards)
        old_values = forward_batch(critic, batch, "values", args, world)
        advantages, returns = gae(rewards, old_values, scored, args.gamma, args.gae_lambda)
        if args.critic_gae_lambda is not None:
            _, returns = gae(rewards, old_values, scored, args.gamma, args.critic_gae_lambda)
        batch.tokens["advantages"] = (
            whiten(advantages, scored) if args.whiten_advantages else advantages
        )
        batch.tokens["old_values"] = old_values
        batch.tokens["returns"] = returns
        drawn = trainable
        if args.pf_ppo != "none":
            # Responses compete with those to their prompt or, with --group_size 1, all of the step.
            groups = scores.view((1, -1) if args.group_size == 1 else (-1, args.group_size))
            drawn = resample(
                filter_weights(groups, args.pf_ppo), utils.generator("filter", args.seed, step)
            )
            # A group without any score was drawn from, too.
            drawn = [i for i in drawn if scores[i].isfinite()]

        # ---- 4. updates of critic and policy: epochs, mini-batches (an optimizer step each) ----
        run.phase("training")
        sums = update_critic(wrapped_critic, critic_optimizer, batch, drawn, args, step, world)
        if args.pf_ppo != "none":  # log each response once, however often it was drawn
            local = world.shard(trainable)  # each rank adds its share to the sums
            mine = {name: x[local] for name, x in batch.tokens.items()}
            add_rollout(sums, mine, mine["start_logprobs"], estimate_kl)
        updates = []  # of the policy: none while the critic warms up
        if step > args.critic_warmup_steps:
            updates = utils.mini_batches(
                drawn, args.mini_batch_size, args.num_epochs, (args.seed, step)
            )
            optimizer.begin_step(step - args.critic_warmup_steps, len(updates))
        for number, (epoch, mini) in enumerate(updates):
            reduce_loss = loss_reduction(
                args.loss_aggregation, mask, mini, updates, args.max_response_length
            )
            if args.ptx_coef:
                for ptx in ptx_losses(wrapped, parts.ptx_rows, args, optimizer.updates, world):
                    optimizer.backward(args.ptx_coef * ptx)
                    of_step = ptx / len(updates)  # its part of the step's mean
                    sums.add(ptx=of_step, loss=args.ptx_coef * of_step)
            for inputs, micro, last in batch.micro_batches(mini, args, world):
                m = micro["response_mask"]  # (n, T), as all of micro and out
                set_gradient_sync(wrapped, last)
                out = forward_tokens(wrapped, inputs, m, entropy=True)
                logprobs = out["logprobs"]
                # Without "start_logprobs": pi_old is "current" (this is the step's only update, so
                # these are the same), or "rollout" (then only the log reads them).
                start_logprobs = micro.get("start_logprobs", logprobs.detach())
                rollout_logprobs = micro["rollout_logprobs"]
                old_logprobs = rollout_logprobs if pi_old == "rollout" else start_logprobs
                weights = correction_weights(
                    old_logprobs, rollout_logprobs, m, sampler.correction, sampler.correction_cap
                )
                in_loss = off_policy_mask(
                    logprobs, rollout_logprobs, micro["advantages"], m, args.off_policy_delta
                )
                token_weights = weights * in_loss  # (n, T), in the policy loss
                token_losses, clipped = clipped_loss(
                    logprobs - old_logprobs,
                    micro["advantages"],
                    args.clip_low,
                    args.clip_high,
                    args.dual_clip,
                )
                loss = policy_term = reduce_loss(token_losses * token_weights, m)
                if entropy_coef:
                    loss = loss - entropy_coef * reduce_loss(out["entropies"], m)
                if kl_in == "loss":
                    token_kl = estimate_kl(logprobs, micro["ref_logprobs"])
                    loss = loss + kl_coef * reduce_loss(token_kl, m)
                optimizer.backward(loss)
                sums.add(policy_loss=policy_term / len(updates), loss=loss / len(updates))
                sums.add(
                    m,
                    tokens=m,
                    entropy=out["entropies"],
                    clipped=clipped,
                    weights=weights,
                    approxkl=(logprobs - old_logprobs).square() / 2,
                    left_out=token_weights == 0,
                )
                # `micro_batches` takes back what is added to `micro`, for tokens.jsonl.
                micro.update(
                    start_logprobs=start_logprobs,
                    entropies=out["entropies"],
                    weights=token_weights,
                    clipped=clipped,
                )
                # Logged once per response: surprisal, KL, trainer - sampler.
                if epoch == 0 and args.pf_ppo == "none":
                    # Whether `start_logprobs` come from weights that this step had already updated.
                    updated = number > 0 and not needs_start_logprobs
                    add_rollout(sums, micro, start_logprobs, estimate_kl, updated)
            optimizer.step()

        # ---- 5. sync: the engine, the reference ----
        run.phase("sync")
        rollouts.sync()
        if args.ref_refresh_every and step % args.ref_refresh_every == 0:
            sync_reference(reference, policy)
        total = sums.totals()

        # ---- 6. metrics, and the controllers ----
        metrics = {
            "epoch": experience.state["position"] / len(parts.prompts),
            "objective/kl_coef": kl_coef,
            **adaptive_entropy.metrics(),
            **policy_metrics(total, experience.sampled.scores, kl_coef),
            **({"loss/ptx": total["ptx"]} if "ptx" in total else {}),
            **batch_metrics(experience.sampled, sampler.reward_sources),
            **mismatch_metrics(total, step, batch),
            "loss/value_avg": total["value_loss"],
            "val/clipfrac_avg": total["value_clipped"] / total["value_tokens"],
            "val/explained_variance": explained_variance(old_values, returns, scored),
            "val/values": masked_mean(old_values, scored).item(),
            "val/returns": masked_mean(returns, scored).item(),
            **experience.metrics,
            **optimizer.metrics(),
            **critic_optimizer.metrics(),
            **sampler.metrics(),
        }
        adaptive_entropy.update(metrics["policy/entropy_avg"])
        if updates:  # --kl_target is a mean over tokens; objective/kl is a sum over them
            adaptive_kl.update(total["token_mean_kl"] / total["responses"], len(trainable))
        run.log_samples(batch)
        # `experience.state`: where the next rollout begins, also that of a resumed run.
        run.finish_step(
            metrics, experience.sampled_tokens, batch.trained_tokens, **experience.state
        )
    run.finish()


if __name__ == "__main__":
    with report_errors():
        main(parse(Args))
