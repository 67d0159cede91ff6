"""Group Relative Policy Optimization (GRPO) and its variants, in one file.

For each prompt q, sample G responses o_1..o_G from the current policy, score them, and minimise

    mean over i of the mean over t of  max(-A_i * r_it, -A_i * clip(r_it, 1 - low, 1 + high)) + beta * KL_it
    r_it = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)          A_i = (R_i - mean(R)) / (std(R) + 1e-6)

Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3 and 4. `--loss` names one of the
VARIANTS below.

Deliberate choices:
1. The gradient is that of the global batch: sums are divided by counts over all ranks and
   micro-batches.
2. The sampling temperature divides the logits in every log-probability (TRL issue 3029).
3. The random number that draws a token is fixed by seed, step, response and position: a rollout
   depends neither on the number of ranks nor, after a resume, on what ran before it.
4. Masks come from lengths, never from token ids, so pad == eos is harmless and the stop token is
   trained on.
5. Where a synchronous rollout gets a single update, the old log-probabilities ARE the current ones,
   and the ratio is exactly 1. (In the losses of DPPO it is a ratio to the policy that sampled.)
6. A response that could not be scored is left out of its group and counted. It is never a silent
   zero.
7. Training rows are padded on the right and attended causally: no attention mask, no position ids.
8. `Batch.tokens` is a dict of per-token tensors (N, T). What `generate` returns is gathered and
   padded to that shape; what the loop puts there has it. The loss finds both, sliced, as
   `micro[name]`, without gradient.

    bash scripts/demo.sh                                                              # a tiny model on a CPU, minutes
    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct                                 # one GPU of 24 GB, GSM8K
    torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen2.5-7B                       # eight GPUs of 80 GB
"""

import functools
import math
from typing import Callable, Iterator, Literal, NamedTuple, Sequence

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


class Variant(NamedTuple):
    """The settings of a --loss."""

    token_loss: str  # `kind` of `policy_loss`
    loss_aggregation: str  # `how` of `loss_reduction`
    advantage_scale: str  # `scale` of `group_advantages`
    clip_low: float
    clip_high: float


VARIANTS = {
    "grpo": Variant("ppo", "sequence", "group", 0.2, 0.2),  # DeepSeekMath, arXiv:2402.03300, eq. 3
    "dr_grpo": Variant("ppo", "constant", "none", 0.2, 0.2),  # Dr. GRPO, arXiv:2503.20783
    "dapo": Variant("ppo", "step_token", "group", 0.2, 0.28),  # DAPO, arXiv:2503.14476, eq. 8
    "bnpo": Variant("ppo", "token", "group", 0.2, 0.2),  # TRL's name; mean over an update's tokens
    "gspo": Variant("gspo", "sequence", "group", 3e-4, 4e-4),  # GSPO-token, arXiv:2507.18071 eq. 13
    "cispo": Variant("cispo", "token", "group", 1.0, 4.0),  # MiniMax-M1, arXiv:2506.13585, eq. 4
    "sapo": Variant("sapo", "sequence", "group", 0.0, 0.0),  # arXiv:2511.20347, eq. 5; no clip
    "reinforce": Variant("reinforce", "token", "group", 0.0, 0.0),  # -A log pi, no ratio
    "dppo": Variant("dppo", "token", "group", 0.2, 0.2),  # DPPO, arXiv:2602.04879, binary TV
    "dppo_kl": Variant("dppo_kl", "token", "group", 0.05, 0.05),  # the same, binary KL
}
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

    loss: Literal[*VARIANTS] = "grpo"  # type: ignore[valid-type]
    """Variant: fixes the token loss, and sets what --loss_aggregation, --advantage_scale,
    --clip_low and --clip_high leave open (VARIANTS). dppo is made for --async_steps."""
    loss_aggregation: (
        Literal["token", "step_token", "sequence", "sequence_sum", "constant"] | None
    ) = None
    """How token losses become one number. token: mean over an update's tokens; step_token: over a
    step's tokens; sequence: mean of the sequences' means; sequence_sum: mean of their sums;
    constant: sum / (sequences * max_response_length). Default: the variant's."""
    advantage_scale: Literal["group", "batch", "none", "gdpo", "maxrl", "passk"] | None = None
    """How a score minus the mean of its group becomes an advantage. group: divided by the standard
    deviation of the group's scores; batch: by that of the step's scores; none: as it is; gdpo: each
    reward is normalized in its group, and their weighted sum is divided by its standard deviation
    over the step (arXiv:2601.05242); maxrl: divided by the mean of the group's scores, which must
    not be negative (arXiv:2602.02710); passk: only the best response of a group has an advantage
    (arXiv:2503.19595). With --kl_in reward a scale also divides the KL. Default: the variant's."""
    turn_rewards: bool = False
    """Give each turn of an --environment an advantage of its own, in place of one for the whole
    response: its return, the rewards from this turn on, is compared with those of the turns of the
    same number in the group (arXiv:2505.11821)."""
    clip_low: Fraction | None = None
    """The ratio is clipped below at 1 - this. dppo leaves out a token with a negative advantage
    whose probability has fallen by more than this since it was sampled; dppo_kl leaves out one at
    which the KL from the policy that sampled is above this. Default: the variant's."""
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped above at 1 + this. dppo and dppo_kl: as --clip_low, for a token with a
    positive advantage whose probability has risen. Default: the variant's."""
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
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or subtract it from the score."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Estimator of the KL per token."""
    kl_weighting: Literal["none", "ratio"] = "none"
    """Weight a token's KL in the loss by the ratio, which makes its gradient unbiased, also off
    policy."""
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
            self.group_size >= 2,
            "--group_size must be 2 or more: advantages are relative to a group",
        )
        yield (
            self.advantage_scale not in ("gdpo", "maxrl")
            or (self.kl_in == "loss" and not self.length_penalty and not self.turn_rewards),
            "--advantage_scale gdpo and maxrl require --kl_in loss, --length_penalty 0 and no "
            "--turn_rewards: gdpo normalizes each reward by itself, and maxrl divides by a mean that "
            "must not be negative",
        )
        yield (
            self.advantage_scale != "maxrl"
            or (
                not self.overlong_buffer
                and not (self.non_stop_penalty and (self.penalty_reward_value or 0) < 0)
            ),
            "--advantage_scale maxrl requires --overlong_buffer 0 and no negative "
            "--penalty_reward_value: a score must not be negative",
        )
        yield (
            self.kl_weighting == "none"
            or (self.kl_in == "loss" and self.kl_coef > 0 and self.kl_estimator != "abs"),
            "--kl_weighting ratio requires --kl_in loss, a --kl_coef above 0 and another "
            "--kl_estimator than abs",
        )
        yield (
            not self.dual_clip or VARIANTS[self.loss].token_loss in ("ppo", "gspo"),
            "--dual_clip requires a --loss that clips the ratio",
        )
        yield (
            self.loss not in ("sapo", "reinforce")
            or (self.clip_low, self.clip_high) == (None, None),
            "--clip_low and --clip_high require a --loss that clips the ratio",
        )
        yield (
            "dppo" not in self.loss or self.rollout_correction in (None, "none"),
            "--rollout_correction requires another --loss: the ratio of dppo is to the policy that "
            "sampled, so that nothing is left to correct",
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
            not self.turn_rewards
            or (
                self.environment
                and "episode" in self.reward
                and self.kl_in == "loss"
                and self.filter_groups == "none"
            ),
            "--turn_rewards requires an --environment, episode in --reward, --kl_in loss and "
            "--filter_groups none, which compares whole responses",
        )


def variant_of(args: Args) -> Variant:
    """Return the settings of --loss, with those that flags override."""
    variant = VARIANTS[args.loss]
    return Variant(
        variant.token_loss,
        args.loss_aggregation or variant.loss_aggregation,
        args.advantage_scale or variant.advantage_scale,
        variant.clip_low if args.clip_low is None else args.clip_low,
        variant.clip_high if args.clip_high is None else args.clip_high,
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


def kl_ratio(logprobs: Tensor, old_logprobs: Tensor, estimator: str) -> Tensor:
    """Return pi / pi_old of each token, any shape: its product with `kl_estimate` has the gradient
    of the reverse KL.

    For k1 and k3 the ratio has a gradient, and the mean of the product is the KL. For k2 the ratio
    has none: on policy k2 already has the gradient of the KL; the ratio corrects for pi_old.
    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 7.
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ratio.detach() if estimator == "k2" else ratio


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    kind: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each response token.

    Args:
        logprobs, old_logprobs: (N, T), of pi and pi_old. advantages: (N, T). mask: (N, T) bool.
        kind: "ppo" (arXiv:1707.06347, eq. 7; dual clip: arXiv:1912.09729, eq. 5), "gspo"
            (arXiv:2507.18071, eq. 13), "cispo" (arXiv:2506.13585, eq. 4), "sapo" (arXiv:2511.20347,
            eq. 5), "reinforce", "dppo" or "dppo_kl" (arXiv:2602.04879: the trust region bounds the
            change of a token's probability, which is small for rare tokens of any ratio).
    Returns:
        Loss (N, T), and where clipping removed the gradient or changed the weight (N, T) bool.
    """
    if kind == "reinforce":
        return -advantages * logprobs, torch.zeros_like(mask)
    log_ratio = logprobs - old_logprobs
    if kind == "gspo":
        # One ratio per sequence; logprobs - logprobs.detach() is 0 and carries the gradient.
        sequence = masked_mean(log_ratio, mask, 1)[:, None]
        log_ratio = sequence.detach() + (logprobs - logprobs.detach())
    ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    if kind == "cispo":
        weight = ratio.clamp(1 - clip_low, 1 + clip_high).detach()
        return -weight * advantages * logprobs, weight != ratio
    if kind == "sapo":
        # The temperatures of the paper.
        tau = torch.full_like(advantages, 1.05).masked_fill(advantages > 0, 1.0)
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, torch.zeros_like(mask)
    if "dppo" in kind:
        p = logprobs.detach().exp()
        q = old_logprobs.exp()
        change = (p - q).abs()
        if kind == "dppo_kl":
            # KL(q || p) between two outcomes, this token and any other: the sum of q * log(q / p).
            # The 1e-8 is verl's: a p that rounds to 1 is not infinitely far away.
            log_of_others = ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
            change = (1 - q) * log_of_others + q * (old_logprobs - logprobs.detach())
        too_high = (p > q) & (change > clip_high)
        too_low = (p < q) & (change > clip_low)
        left_out = too_high.where(advantages > 0, too_low)
        # The paper's bound of the ratio, section 5.4: so high that it hardly biases.
        weight = ratio.detach().clamp(max=20).masked_fill(left_out, 0.0)
        return -weight * advantages * logprobs, left_out
    plain = -advantages * ratio
    loss = torch.maximum(plain, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip:
        loss = loss.clamp(max=-advantages * dual_clip).where(advantages < 0, loss)
    return loss, loss != plain


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
# The supervised loss of PPO-ptx
# --------------------------------------------------------------------------------------------------


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
    for inputs, *_ in batch.micro_batches([*range(size)], args, world):  # ids and response mask
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


def final_scores(scores: Tensor, lengths: Tensor, stopped: Tensor, args: Args) -> Tensor:
    """Return the score that each response trains with (N,); NaN for one that neither trains nor
    counts in a baseline or mean.

    Args:
        scores: (N,), of `weighted_sum`, or of a single source for `outcomes_of`. lengths:
            (N,), in tokens, including those that tools and environments wrote. stopped: (N,) bool.
    """
    if args.non_stop_penalty:
        value = args.penalty_reward_value
        keeps_score = stopped | scores.isnan()  # no penalty in place of a missing score
        scores = scores.where(keeps_score, scores.clamp(max=0) if value is None else value)
    if args.overlong_buffer:
        over = lengths - (args.max_response_length - args.overlong_buffer)
        scores = scores - (over.to(scores.dtype) / args.overlong_buffer).clamp(0, 1)
    return scores.where(stopped, math.nan) if args.mask_truncated else scores


def outcomes_of(batch: Batch, args: Args) -> Tensor:
    """Return what is compared within a group (N,): the scores, or with --advantage_scale gdpo the
    weighted sum of the rewards, each normalized in its group (GDPO, arXiv:2601.05242, eq. 4, 5 and
    7). NaN for a response that is left out.

    With gdpo, penalties act on the score of each source, and a source that does not score a row
    counts as 0 there.
    """
    if variant_of(args).advantage_scale != "gdpo":
        return batch.scores
    left_out = batch.scores.isnan()
    normalized = {}
    for name, scores in batch.reward_components.items():
        scores = final_scores(scores, batch.response_lengths, batch.stopped, args)
        scores = scores.where(batch.scored_by(name), 0.0).masked_fill(left_out, math.nan)
        normalized[name] = group_advantages(scores, args.group_size, "group")
    return weighted_sum(normalized, args).masked_fill(left_out, math.nan)


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
        latest = sampler.rollout(rows, args.group_size, key)
        taken += count
        samples += latest.samples
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
        outcomes = outcomes_of(batch, args)
        has_signal = ~equal_scores(outcomes.view(-1, args.group_size))  # (prompts,)
        # How many prompts a refill has to add; 0 ends the rollout.
        count = prompts_to_add(has_signal, latest, sampler)
        if not count:
            break
    position = state.get("position", 0) + taken  # where the next step begins
    # An Experience without the groups that --filter_groups drops.
    return select_groups(batch, has_signal, sampler, step, position)


def group_advantages(scores: Tensor, group_size: int, scale: str) -> Tensor:
    """Return group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    Args:
        scores: (N,), the G responses of a prompt next to each other; NaN or infinite where there is
            no score.
        scale: divide by the "group"'s or the "batch"'s unbiased standard deviation + 1e-6, or by
            nothing ("none"). "gdpo" is "batch" for its `outcomes_of` (eq. 6 of GDPO), which have
            mean 0 in each group. "maxrl": by the group's mean (arXiv:2602.02710); 0 where that is 0.
            "passk": (best - second) / (std + 1e-6) for the best response, 0 for the others
            (arXiv:2503.19595).
    Returns:
        (N,): (R - mean) / (std + eps); exactly 0 in a group whose scores are all equal, and for a
        missing score, which does not count in its group either.
    """
    grouped = scores.view(-1, group_size)  # (N / G, G)
    scored = grouped.isfinite()
    mean = masked_mean(grouped, scored, 1)[:, None]
    centred = torch.where(scored, grouped - mean, 0.0)
    if scale in ("group", "passk"):
        variance = (centred.square().sum(1) / (scored.sum(1) - 1).clamp(min=1))[:, None]
        if scale == "passk":
            best, second = grouped.where(scored, -torch.inf).topk(2).values.split(1, 1)
            centred = torch.where(grouped == best, best - second, 0.0)
        centred = centred / (variance.sqrt() + 1e-6)
    elif scale == "maxrl":
        centred = torch.where(mean > 0, centred / mean, 0.0)
    elif scale in ("batch", "gdpo") and scored.sum() > 1:
        centred = centred / (grouped[scored].std() + 1e-6)
    return centred.masked_fill(equal_scores(grouped)[:, None], 0.0).view(-1)


def turn_advantages(
    scores: Tensor,
    turn_rewards: Tensor,
    turns: Tensor,
    mask: Tensor,
    group_size: int,
    scale: str,
) -> Tensor:
    """Return the advantage of each token: that of its turn among the turns of the same number in
    the group (after MT-GRPO, arXiv:2505.11821).

    The return of a turn is the score minus the rewards of the turns before it.

    Args:
        scores: (N,). turn_rewards: (N, T), at the last token of each turn. turns: (N, T), number
            of the turn. mask: (N, T) bool.
        scale: as in `group_advantages`.
    Returns:
        (N, T), 0 outside of the mask, in a turn that one response of the group has alone, and where
        all responses have the same return.
    """
    earlier = nn.functional.pad(turn_rewards.cumsum(1), (1, -1))  # sum over the tokens before
    returns = scores[:, None] - earlier  # (N, T), the same at all tokens of a turn
    advantages = torch.zeros_like(returns)
    for turn in turns.unique():
        tokens = mask & (turns == turn)
        turn_returns = returns.where(tokens, -torch.inf).amax(1)  # (N,), -inf without such a turn
        advantages += tokens * group_advantages(turn_returns, group_size, scale)[:, None]
    return advantages


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
    settings = variant_of(args)
    parts = set_up(args, __file__, functools.partial(Policy, args=args), generate, ROLLOUT_OUTPUTS)
    world, run, sampler = parts.world, parts.run, parts.sampler
    # `wrapped`: the policy as it trains, in DDP on several ranks without --shard.
    policy, wrapped, reference = parts.policy, parts.wrapped, parts.reference
    optimizer = utils.Optimizer(policy, args, total_steps, updates_per_step)
    kl_in = "none" if reference is None else args.kl_in
    estimate_kl = functools.partial(kl_estimate, estimator=args.kl_estimator)
    # `sampler.correction`: --rollout_correction, or its default for the engine.
    pi_old = old_policy(args, sampler.correction, updates_per_step)
    if "dppo" in args.loss:  # its trust region is around the policy that sampled
        pi_old = "rollout"
    needs_start_logprobs = pi_old == "start" or kl_in == "reward"
    # Loads a checkpoint, if there is one; from then on `rollouts.take` calls `collect`. "" is the name
    # of the policy, and so of its optimizer.
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
        outcomes = outcomes_of(batch, args)  # R, (N,)
        if kl_in == "reward":
            kl = estimate_kl(batch.tokens["start_logprobs"], batch.tokens["ref_logprobs"])
            outcomes = outcomes - kl_coef * masked_sum(kl, mask, 1)
        # Rewards that cancel may leave a rounding error below 0.
        if settings.advantage_scale == "maxrl" and (scores < -1e-9).any():
            worst = scores.nan_to_num().argmin()
            raise utils.UserError(
                "--advantage_scale maxrl: a score is negative, of a response to "
                f"{batch.samples[worst].row['prompt']!r}"
            )
        grouping = args.group_size, settings.advantage_scale
        if args.turn_rewards:  # an advantage for each turn, (N, T)
            of_turns = batch.tokens["turn_rewards"], batch.tokens["turns"]
            advantages = turn_advantages(scores, *of_turns, mask, *grouping)
            experience.metrics["val/zero_advantage"] = (advantages[mask] == 0).float().mean().item()
        else:  # one for each response
            advantages = group_advantages(outcomes, *grouping)  # (N,)
            # A response whose KL is not finite gets NaN, so that `Optimizer.step` skips the update; 0,
            # as for a missing score, would hide it.
            advantages[scores.isfinite() & ~outcomes.isfinite()] = math.nan
            advantages = advantages[:, None].where(mask, 0.0)  # (N, T)
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
                settings.loss_aggregation, mask, mini, updates, args.max_response_length
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
                token_losses, clipped = policy_loss(
                    logprobs,
                    old_logprobs,
                    micro["advantages"],
                    m,
                    settings.token_loss,
                    settings.clip_low,
                    settings.clip_high,
                    args.dual_clip,
                )
                loss = policy_term = reduce_loss(token_losses * token_weights, m)
                if entropy_coef:
                    loss = loss - entropy_coef * reduce_loss(out["entropies"], m)
                if kl_in == "loss":
                    kl_losses = estimate_kl(logprobs, micro["ref_logprobs"])
                    if args.kl_weighting == "ratio":
                        ratio = kl_ratio(logprobs, old_logprobs, args.kl_estimator)
                        # weights * ratio: pi / pi_rollout, with --rollout_correction up to its cap
                        kl_losses = weights * ratio * kl_losses
                    loss = loss + kl_coef * reduce_loss(kl_losses, m)
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
            **({"loss/ptx": total["ptx"]} if "ptx" in total else {}),
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
