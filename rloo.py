"""REINFORCE for language models, without a critic: RLOO, REINFORCE++, ReMax and OPO, in one file.

For each prompt, sample responses from the current policy, score them, and minimise over the
response tokens

    mean of  max(-A * r, -A * clip(r, 1 - low, 1 + high))          r = pi / pi_old of the token or of the sequence

The algorithms differ in the advantage A alone (`token_advantages`; R: score minus beta * KL of the
response):

    rloo                  R - mean R of the other responses to the prompt         arXiv:2402.14740, section 2.3
    reinforce++           reward-to-go of each token, whitened over the batch     arXiv:2501.03262v9, eq. 4 and 5
    reinforce++-baseline  R - mean R of the group, whitened over the batch        arXiv:2501.03262v9, eq. 6 and 7
    remax                 R - score of the greedy response                        arXiv:2310.10505
    opo                   R - mean R of the group weighted by length              arXiv:2505.23585

Deliberate choices. As in all scripts here, the gradient is that of the global batch, whatever the
ranks and micro-batches; the sampling temperature is in every log-probability; each (response,
position) has one random number; masks come from lengths, never from token ids; what could not be
scored is left out and counted; per-token tensors live in `Batch.tokens`, a dict that carries
whatever is put there (see grpo.py, choice 8). And:
1. The KL stands in the reward, estimator k1, as RLOO and REINFORCE++ have it; `--kl_in loss` moves
   it to the loss.
2. `--ratio sequence` has one ratio per response, as in the derivation of RLOO; most systems run one
   ratio per token.
3. With one update per rollout the ratio is exactly 1, and all of this is REINFORCE with a baseline.
4. Whitening counts the response tokens of all ranks, its variance is unbiased, and a response
   without a score is out.
5. The greedy response of remax is scored without its KL: a baseline that does not depend
   on the response adds no bias.

    bash scripts/demo.sh rloo                                                         # a tiny model on a CPU, minutes
    python rloo.py --model Qwen/Qwen2.5-0.5B-Instruct                                 # one GPU of 24 GB, GSM8K
    torchrun --nproc_per_node 8 rloo.py --model Qwen/Qwen2.5-7B                       # eight GPUs of 80 GB
"""

import dataclasses
import functools
import math
from typing import Callable, Iterator, Literal, Sequence

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
    PositiveFloat,
    PositiveInt,
)
from plumbing.data.mixture import next_prompts
from plumbing.data.rows import Row
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
    unscored,
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
    rollout_batch_size: PositiveInt = 64
    """Prompts per step, over all ranks."""
    group_size: PositiveInt = 8
    """Responses per prompt (G)."""
    mini_batch_size: NonNegativeInt = 0
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

    advantage: Literal["rloo", "reinforce++", "reinforce++-baseline", "remax", "opo"] = "rloo"
    """The algorithm, which is how scores become advantages."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio of each token, or one of the whole response."""
    gamma: Fraction = 1.0
    """Discount per token of the rewards that come later."""
    turn_rewards: bool = False
    """Give each reward of the --environment to the last token of its turn, instead of giving
    their sum to the last token of the response."""
    loss_aggregation: (
        Literal["token", "step_token", "sequence", "sequence_sum", "constant"] | None
    ) = None
    """How token losses become one number. token: mean over an update's tokens; step_token: over a
    step's tokens; sequence: mean of the sequences' means; sequence_sum: mean of their sums;
    constant: sum / (sequences * max_response_length). Default: that of --ratio."""
    clip_low: Fraction = 0.2
    """The ratio is clipped below at 1 - this."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped above at 1 + this."""
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

    non_stop_penalty: bool = True
    """Penalise a response without a stop token by --penalty_reward_value."""
    penalty_reward_value: FiniteFloat | None = None
    """Score of a response without a stop token; default: the lower of its score and 0."""
    overlong_buffer: NonNegativeInt = 0
    """Soft overlong penalty: over this many last tokens before --max_response_length the score
    falls linearly by up to 1 (DAPO, arXiv:2503.14476, eq. 13); 0 for none."""
    length_penalty: NonNegativeFloat = 0.0
    """Subtract from each score: this * mean score of its group * its length / greatest length in
    its group, with lengths in tokens of the model. 0 for none."""
    mask_truncated: bool = False
    """Leave responses without a stop token out of the loss and of any baseline; they get no
    penalty."""
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
            self.group_size >= 2 or self.advantage in ("reinforce++", "remax"),
            "--group_size must be 2 or more with this --advantage, which compares the "
            "responses to a prompt",
        )
        yield (
            self.filter_groups == "none" or self.advantage not in ("remax", "reinforce++"),
            "--filter_groups requires another --advantage: this one learns from equal scores, too",
        )
        yield (
            not self.length_penalty or (self.group_size >= 2 and self.advantage != "remax"),
            "--length_penalty requires a --group_size of 2 or more and another --advantage than remax",
        )
        yield (
            not self.turn_rewards
            or (self.environment and "episode" in self.reward and self.advantage == "reinforce++"),
            "--turn_rewards requires an --environment, episode in --reward and --advantage reinforce++",
        )
        yield (
            self.gamma == 1 or self.advantage == "reinforce++",
            "a --gamma other than 1 requires --advantage reinforce++",
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


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma * G_{t+1} over the tokens of each row (N, T).

    An entry outside of the mask (N, T) bool is G of the next token inside, 0 if there is none.
    """
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(mask[:, t], rewards[:, t] + gamma * following, following)
        returns[:, t] = following
    return returns


def minus_mean(grouped: Tensor, weights: Tensor) -> Tensor:
    """Return R_i minus the weighted mean of its group, for P prompts: scores (P, G) and positive
    weights (P, G) -> (P, G).
    """
    scored = grouped.isfinite()
    total = masked_sum(weights, scored, 1)
    return grouped - (masked_sum(weights * grouped, scored, 1) / total)[:, None]


def leave_one_out(grouped: Tensor) -> Tensor:
    """Return R_i minus the mean of the others in its group: (P, G) -> (P, G).

    It is n / (n - 1) * (R_i - mean of all n). For a group with one score it is NaN; the caller
    puts 0 in its place, by `equal_scores`.
    """
    count = grouped.isfinite().sum(1, keepdim=True)
    return minus_mean(grouped, torch.ones_like(grouped)) * count / (count - 1)


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
        self, input_ids: Tensor, response_mask: Tensor, shared: int = 0, entropy: bool = False
    ) -> dict[str, Tensor]:
        """Return statistics of the response tokens.

        Args:
            input_ids: (N, L), query and response, padded on the right (causal attention never looks
                there).
            response_mask: (N, L) bool, set on response tokens.
            shared: number of tokens with which all rows begin, forwarded once (--share_prompts).
            entropy: whether to compute the entropies.
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
            statistics(*chunk, entropy)
            for chunk in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS))
        ]
        outputs = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        if entropy and not self.trains_entropy:
            outputs["entropies"] = forbid_gradient("entropies", outputs["entropies"])
        return outputs

    def statistics(self, hidden: Tensor, labels: Tensor, entropy: bool) -> dict[str, Tensor]:
        """Return log-probability and entropy of each token of a chunk, from (chunk, H) and
        (chunk,); see `forward`.
        """
        # (chunk, V)
        logprobs = (head_logits(self.model, hidden) / self.temperature).log_softmax(-1)
        outputs = {"logprobs": logprobs.gather(-1, labels[:, None])[:, 0]}
        if entropy:
            # A gradient would keep several tensors of the size of the logits.
            kept = logprobs if self.trains_entropy else logprobs.detach()
            outputs["entropies"] = entropy_from_logprobs(kept)
        return outputs


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


def final_scores(scores: Tensor, lengths: Tensor, stopped: Tensor, args: Args) -> Tensor:
    """Return the score that each response trains with (N,); NaN for one that neither trains nor
    counts in a baseline or mean.

    Args:
        scores: (N,), as `weighted_sum` gives them. lengths: (N,), in tokens, including those that
            tools and environments wrote. stopped: (N,) bool.
    """
    if args.non_stop_penalty:
        value = args.penalty_reward_value
        keeps_score = stopped | scores.isnan()  # no penalty in place of a missing score
        scores = scores.where(keeps_score, scores.clamp(max=0) if value is None else value)
    if args.overlong_buffer:
        over = lengths - (args.max_response_length - args.overlong_buffer)
        scores = scores - (over.to(scores.dtype) / args.overlong_buffer).clamp(0, 1)
    return scores.where(stopped, math.nan) if args.mask_truncated else scores


def length_penalties(scores: Tensor, lengths: Tensor, group_size: int, weight: float) -> Tensor:
    """Return what --length_penalty subtracts: weight * mean of the group's scores * length /
    greatest length in the group (after prime-rl).

    A response without a score counts neither in the mean nor as the longest. A negative mean would
    reward length, and counts as 0.

    Args:
        scores: (N,), as `final_scores` gives them. lengths: (N,), in tokens of the model.
    Returns:
        (N,), NaN for a response without a score.
    """
    grouped, lengths = scores.view(-1, group_size), lengths.view(-1, group_size)
    scored = grouped.isfinite()
    longest = lengths.where(scored, 1).amax(1, keepdim=True)
    mean = masked_mean(grouped, scored, 1)[:, None].clamp(min=0)
    return (weight * mean * lengths / longest).where(scored, math.nan).view(-1)


def collect(sampler: Sampler, prompts: Sequence[Row], step: int, state: dict) -> Experience:
    """Sample and score the prompts of a step, and with --filter_groups refill further prompts, until
    enough groups have two different scores.

    With --advantage remax, each prompt also gets a greedy response, whose score is the baseline of
    the sampled ones.

    Args:
        prompts: all rows of --dataset, of which the step takes some.
        state: `Experience.state` of the previous rollout.
    """
    args = sampler.args
    taken = 0  # prompts that the step has sampled
    count = args.rollout_batch_size  # prompts to sample next
    samples: list[Sample] = []
    for refill in range(1 + MAX_REFILLS):
        rows = next_prompts(prompts, step, state, taken, count, args)
        # The first round has the key of a run without refills, and so the same responses.
        key = ("rollout", args.seed, step, refill) if refill else ("rollout", args.seed, step)
        latest = sampler.rollout(rows, args.group_size, key, greedy=args.advantage == "remax")
        taken += count
        samples += [x for x in latest.samples if not x.greedy]
        batch = Batch.from_samples(samples, latest.stopped.device)
        sums = weighted_sum(batch.reward_components, args)
        batch.scores = final_scores(sums, batch.response_lengths, batch.stopped, args)
        if args.length_penalty:
            lengths = batch.response_mask.sum(1)
            penalties = length_penalties(
                batch.scores, lengths, args.group_size, args.length_penalty
            )
            batch.scores = batch.scores - penalties
            batch.reward_components["length_penalty"] = -penalties  # for the log
        has_signal = ~equal_scores(batch.scores.view(-1, args.group_size))  # (prompts,)
        # How many prompts a refill has to add; 0 ends the rollout.
        count = prompts_to_add(has_signal, latest, sampler)
        if not count:
            break
    position = state.get("position", 0) + taken  # where the next step begins
    if args.advantage != "remax":
        return select_groups(batch, has_signal, sampler, step, position)
    # Remax has no refills: `latest` has the greedy response to each prompt.
    greedy = Batch.from_samples([x for x in latest.samples if x.greedy], batch.scores.device)
    sums = weighted_sum(greedy.reward_components, args)
    # --mask_truncated leaves no baseline out: a greedy response without a stop token keeps
    # its score, with the penalty.
    unmasked = dataclasses.replace(args, mask_truncated=False)
    baselines = final_scores(sums, greedy.response_lengths, greedy.stopped, unmasked)  # (prompts,)
    missing = ~baselines.isfinite()  # (prompts,); no response to these trains
    batch.scores = batch.scores.masked_fill(missing.repeat_interleave(args.group_size), math.nan)
    experience = select_groups(batch, has_signal, sampler, step, position)
    experience.baselines = baselines.repeat_interleave(args.group_size)
    experience.metrics["val/missing_greedy_scores"] = int(missing.sum())
    experience.sampled_tokens += sum(greedy.lengths)
    # The reason why a source has scored none of the samples, else none of the greedy responses.
    experience.unscored = experience.unscored or unscored(greedy, sampler.reward_sources, args)
    return experience


def token_advantages(
    kind: str,
    scores: Tensor,
    baselines: Tensor | None,
    rewards: Tensor,
    mask: Tensor,
    group_size: int,
    gamma: float,
) -> Tensor:
    """Return the advantage of every response token: where the algorithms of this file differ.

    Args:
        kind: as --advantage; each formula stands in the docstring at the top.
        scores: (N,), the G responses of a prompt next to each other; NaN or infinite where there is
            no score.
        baselines: (N,), scores of the greedy response to the same prompt, for remax; NaN only where
            `scores` are.
        rewards: (N, T), see `token_rewards`. mask: (N, T) bool.
    Returns:
        (N, T), 0 outside of the mask and for a response without a score, which does not count in
        its group either. The kinds that use a group's mean give exactly 0 where all R of the group
        are equal (before any whitening over the batch).
    """
    scored = mask & scores.isfinite()[:, None]
    if kind == "reinforce++":
        return whiten(reward_to_go(rewards, mask, gamma), scored)
    totals = torch.where(scores.isfinite(), rewards.sum(1), math.nan)  # R, (N,)
    grouped, lengths = totals.view(-1, group_size), mask.sum(1).view(-1, group_size)  # (N / G, G)
    if kind == "remax":
        assert baselines is not None  # `collect` has made them
        advantages = totals - baselines
    else:
        if kind == "rloo":
            advantages = leave_one_out(grouped)
        else:
            advantages = minus_mean(grouped, lengths if kind == "opo" else torch.ones_like(lengths))
        # 0 where all R of a group are equal. A missing score gets its 0 below, by `scored`. An R
        # that the KL has made NaN stays NaN, and `Optimizer.step` skips the update.
        advantages = advantages.masked_fill(
            equal_scores(grouped)[:, None] & grouped.isfinite(), 0.0
        ).flatten()
    advantages = torch.where(scored, advantages[:, None], 0.0)
    return whiten(advantages, scored) if kind == "reinforce++-baseline" else advantages


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
    parts = set_up(args, __file__, functools.partial(Policy, args=args), generate, ROLLOUT_OUTPUTS)
    world, run, sampler = parts.world, parts.run, parts.sampler
    # `wrapped`: the policy as it trains, in DDP on several ranks without --shard.
    policy, wrapped, reference = parts.policy, parts.wrapped, parts.reference
    optimizer = utils.Optimizer(policy, args, total_steps, updates_per_step)
    loss_aggregation = args.loss_aggregation or args.ratio  # "token" or "sequence"
    kl_in = "none" if reference is None else args.kl_in
    estimate_kl = functools.partial(kl_estimate, estimator=args.kl_estimator)
    # `sampler.correction`: --rollout_correction, or its default for the engine.
    pi_old = old_policy(args, sampler.correction, updates_per_step)
    needs_start_logprobs = pi_old == "start" or kl_in == "reward"
    # Models and optimizers have names, and "" is that of the policy.
    rollouts = parts.start(collect, total_steps, {"": optimizer})
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

        # ---- 3. advantages ----
        kl = None
        if kl_in == "reward":
            kl = estimate_kl(batch.tokens["start_logprobs"], batch.tokens["ref_logprobs"])
        # Rewards and advantages are (N, T).
        rewards = token_rewards(scores, kl, mask, kl_coef, batch.tokens.get("turn_rewards"))
        advantages = token_advantages(
            args.advantage,
            scores,
            experience.baselines,
            rewards,
            mask,
            args.group_size,
            args.gamma,
        )
        batch.tokens["advantages"] = advantages.to(parts.precision.loss_dtype)

        # ---- 4. update: epochs, mini-batches (an optimizer step each), micro-batches ----
        run.phase("training")
        sums = utils.Sums(world)  # for the log; add(m, ...) sums where m is set
        updates = utils.mini_batches(
            trainable, args.mini_batch_size, args.num_epochs, (args.seed, step)
        )
        # There are fewer updates than `updates_per_step` where responses were left out.
        optimizer.begin_step(step, len(updates))
        for number, (epoch, mini) in enumerate(updates):
            reduce_loss = loss_reduction(
                loss_aggregation, mask, mini, updates, args.max_response_length
            )
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
                log_ratio = logprobs - old_logprobs
                if args.ratio == "sequence":  # `reduce_loss` takes the mean of a response's tokens
                    log_ratio = masked_sum(log_ratio, m, 1)[:, None].expand_as(log_ratio)
                token_losses, clipped = clipped_loss(
                    log_ratio,
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
                if epoch == 0:  # logged once per response: surprisal, KL, trainer - sampler
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
            **batch_metrics(experience.sampled, sampler.reward_sources),
            **mismatch_metrics(total, step, batch),
            **experience.metrics,
            **optimizer.metrics(),
            **sampler.metrics(),
        }
        adaptive_entropy.update(metrics["policy/entropy_avg"])
        # --kl_target is a mean over tokens; objective/kl is a sum over them.
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
