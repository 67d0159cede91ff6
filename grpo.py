"""Group Relative Policy Optimization (GRPO) and its variants, in one file.

For each prompt q, sample G responses o_1..o_G from the current policy, score them, and minimise

    mean over i of the mean over t of  max(-A_i * r_it, -A_i * clip(r_it, 1 - low, 1 + high)) + beta * KL_it
    r_it = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)          A_i = (R_i - mean(R)) / (std(R) + 1e-6)

Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3 and 4. `--loss` takes the variants in VARIANTS below.

Deliberate choices:
1. The gradient is that of the global batch: sums are divided by counts over all ranks and micro-batches.
2. The sampling temperature divides the logits in every log-probability (TRL issue 3029).
3. Each (response, position) has its own uniform random number, a function of the seed and the step: a rollout does not
   depend on the number of ranks, nor a resumed run on what ran before.
4. Masks come from lengths, never from token ids, so pad == eos is harmless and the stop token is trained on.
5. With one update a synchronous rollout the old log-probabilities ARE the current ones: the ratio is exactly 1.
6. A response that could not be scored is left out of its group and counted. It is never a silent zero.
7. Training rows are padded on the right and attended causally: no attention mask, no position ids.
8. Per-token values live in `Batch.tokens`, (N, T) by name. What `generate` or the loop puts there is gathered, joined,
   padded, sliced and saved with the rest; the loss finds it as `t[name]`, without gradient. What `Policy` computes
   without gradient is called detached.

    bash scripts/demo.sh                                                              # a tiny model on a CPU, minutes
    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct                                 # one GPU, GSM8K
    torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen2.5-7B                       # eight GPUs
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
from plumbing.models.sharding import Sharding, gradient_sync, model_device, sync_reference
from plumbing.rewards.sources import Rewards, needs_answer, reward_weights
from plumbing.rollout import engines
from plumbing.rollout.batch import Experience, collate, forward_batch, forward_tokens, join, logits_processors, rollout
from plumbing.run import evaluation
from plumbing.run.ranks import record
from plumbing.run.run import Run
from plumbing.turns.conversations import load_conversations

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
class Args(cli.RunArgs, cli.ModelArgs, cli.DataArgs, cli.RewardArgs, cli.RolloutArgs, cli.ConversationArgs):
    total_episodes: PositiveInt = 180_000
    """Responses after which the run ends (rounded down to whole steps); GSM8K with 8 a prompt has 59,784 a pass."""
    rollout_batch_size: PositiveInt = 64
    """Prompts a step, over all ranks."""
    group_size: PositiveInt = 8
    """Responses a prompt (G)."""
    mini_batch_size: PositiveInt = 512
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

    loss: Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo", "reinforce"] = "grpo"
    """Variant: fixes the token loss, and sets what --loss_aggregation, --advantage_scale, --clip_low and --clip_high
    leave open (VARIANTS)."""
    loss_aggregation: Literal["token", "step_token", "sequence", "sequence_sum", "constant"] | None = None
    """How token losses become one number: mean over an update's tokens, over a step's tokens, mean of sequence means,
    of sequence sums, or sum / (sequences * max_response_length); default: the variant's."""
    advantage_scale: Literal["group", "batch", "none"] | None = None
    """Divide advantages by the standard deviation of the group's scores, of the step's, or by nothing; default: the
    variant's."""
    clip_low: Share | None = None
    """The ratio is clipped below at 1 - this; default: the variant's."""
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped above at 1 + this; default: the variant's."""
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
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or take it from the score."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Estimator of the KL per token."""
    kl_target: NonNegativeFloat = 0.0
    """Mean KL per token to which beta is steered (Ziegler et al. 2019, adaptive); 0 keeps beta fixed."""
    kl_horizon: PositiveInt = 10_000
    """Responses over which --kl_target acts."""
    ref_model: str = ""
    """Reference for the KL penalty; default: --model as it was at the start."""
    ref_refresh_every: NonNegativeInt = 0
    """Steps between refreshes of the reference from the policy (TR-DPO, arXiv:2404.09656); 0 for never."""

    non_stop_penalty: bool = True
    """Replace the score of a response that does not end with a stop token by --penalty_reward_value."""
    penalty_reward_value: FiniteFloat = 0.0
    """Score of a response without a stop token."""
    overlong_buffer: NonNegativeInt = 0
    """Soft overlong penalty: over the last so many tokens before --max_response_length the score falls linearly by up
    to 1 (DAPO, arXiv:2503.14476, eq. 13); 0 for none."""
    mask_truncated: bool = False
    """Leave responses without a stop token out, of the loss and of their group's baseline; no penalty touches them."""
    filter_groups: Literal["none", "drop", "refill"] = "none"
    """Drop the groups whose scores are all equal; refill also samples other prompts in their place (DAPO's dynamic
    sampling)."""

    RULES = cli.RL_RULES | {
        "--group_size must be 2 or more: advantages are relative to a group": lambda a: a.group_size >= 2,
        "--dual_clip requires a --loss that clips the ratio": lambda a: (
            not a.dual_clip or VARIANTS[a.loss][0] in ("ppo", "gspo")
        ),
    }
    WARNINGS = cli.RL_WARNINGS


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


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, kind: str, clip_low: float,
    clip_high: float, dual_clip: float = 0.0, tau_positive: float = 1.0, tau_negative: float = 1.05,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the loss of each response token.

    Args:
        logprobs, old_logprobs: (N, T), current and at the rollout. advantages: (N, T). mask: (N, T) bool.
        kind: "ppo" (arXiv:1707.06347, eq. 7; dual clip: arXiv:1912.09729, eq. 5), "gspo" (arXiv:2507.18071, eq. 13),
            "cispo" (arXiv:2506.13585, eq. 4), "sapo" (arXiv:2511.20347, eq. 5) or "reinforce".
    Returns:
        Loss (N, T), and where clipping took the gradient or changed the weight (N, T) bool.
    """
    if kind == "reinforce":
        return -advantages * logprobs, torch.zeros_like(mask)
    log_ratio = logprobs - old_logprobs
    if kind == "gspo":  # one ratio a sequence; logprobs - logprobs.detach() is 0 and carries the token's gradient
        sequence = masked_mean(log_ratio, mask, 1)[:, None]
        log_ratio = sequence.detach() + (logprobs - logprobs.detach())
    ratio = torch.exp(log_ratio.clamp(-20, 20))
    if kind == "cispo":
        weight = ratio.clamp(1 - clip_low, 1 + clip_high).detach()
        return -weight * advantages * logprobs, weight != ratio
    if kind == "sapo":
        tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, torch.zeros_like(mask)
    outside = (ratio < 1 - clip_low) & (advantages < 0) | (ratio > 1 + clip_high) & (advantages > 0)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip:
        bounded = (advantages < 0) & (loss > -advantages * dual_clip)
        loss, outside = torch.where(bounded, -advantages * dual_clip, loss), outside | bounded
    return loss, outside


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


def group_advantages(scores: Tensor, group_size: int, scale: str) -> Tensor:
    """Return group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    Args:
        scores: (N,), the G responses of a prompt next to each other; NaN or infinite where there is no score.
        scale: divide by the "group"'s or the "batch"'s unbiased standard deviation + 1e-6, or by nothing ("none").
    Returns:
        (N,): (R - mean) / (std + eps); exactly 0 in a group whose scores are all equal, and for a missing score, which
        does not count in its group either.
    """
    grouped = scores.view(-1, group_size)  # (N / G, G)
    scored = grouped.isfinite()
    centred = torch.where(scored, grouped - masked_mean(grouped, scored, 1)[:, None], 0.0)
    if scale == "group":
        variance = centred.square().sum(1, keepdim=True) / (scored.sum(1, keepdim=True) - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + 1e-6)
    elif scale == "batch" and scored.sum() > 1:
        centred = centred / (scores[scores.isfinite()].std() + 1e-6)
    return centred.masked_fill(equal_scores(grouped)[:, None], 0.0).view(-1)


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
    token_loss, *defaults = VARIANTS[args.loss]
    chosen = (args.loss_aggregation, args.advantage_scale, args.clip_low, args.clip_high)
    aggregation, scale, clip_low, clip_high = (d if c is None else c for d, c in zip(defaults, chosen))

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
    optimizer = utils.Optimizer(policy, args, total_steps * updates_a_step)
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
    kept = {"": model} | ({"reference": reference.model} if keeps_reference else {})
    run.start(total_steps, tokenizer, kept, {"": optimizer}, engine)
    run.log.lengths(data.token_lengths(prompts, eval_prompts, ptx_rows))
    run.clock.count_flops(policy)
    if reference not in (None, policy):
        run.clock.count_flops(reference)
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
        if needs_old or kl_in_reward:
            old = forward_all(policy, batch, entropy=False, **exact_kl_args)
            if exact_kl_args:
                batch.tokens["kl"] = old["kl"]
            elif reference is not None:
                batch.tokens["kl"] = kl_estimate(old["logprobs"], batch.tokens["ref_logprobs"], args.kl_estimator)
        if old_from_engine:
            batch.tokens["old_logprobs"] = batch.tokens["rollout_logprobs"].to(loss_dtype)
        elif needs_old:
            batch.tokens["old_logprobs"] = old["logprobs"]

        # ---- 3. advantages ----
        outcomes = scores  # R, (N,)
        if kl_in_reward:
            outcomes = scores - kl_coef * masked_sum(batch.tokens["kl"], mask, 1)
        advantages = group_advantages(outcomes, args.group_size, scale).to(loss_dtype)  # (N,)
        if kl_in_reward:  # a KL that is not finite is no missing score: `Optimizer.step` skips its update
            advantages = advantages.masked_fill(scores.isfinite() & ~outcomes.isfinite(), math.nan)
        batch.tokens["advantages"] = torch.where(mask, advantages[:, None], 0.0)

        # ---- 4. update: epochs, mini-batches (an optimizer step each), micro-batches ----
        run.phase("training")
        model.train()  # for gradient checkpointing; there is no dropout
        sums = utils.Sums(dp)
        updates = utils.mini_batches(trained, args.mini_batch_size, args.num_epochs, (args.seed, step))
        optimizer.updates += updates_a_step - len(updates)  # fewer where responses were left out; schedules go by steps
        for number, (epoch, mini) in enumerate(updates):
            token_count = mask[mini].sum().item()
            if aggregation == "step_token":  # the mean over updates of sum / this is the token mean of the step
                token_count = mask[trained].sum().item() * args.num_epochs / len(updates)
            reduce_loss = functools.partial(
                aggregate, how=aggregation, tokens=token_count, sequences=len(mini), max_length=args.max_response_length
            )
            if args.ptx_coef:
                count = args.ptx_batch_size
                rows = data.take_prompts(ptx_rows, optimizer.updates * count, count, args.seed)
                sums.add(ptx=ptx_loss(wrapped, rows, args, optimizer, dp, autocast))
            for inputs, t, last in batch.micro_batches(mini, args.micro_batch_tokens, dp):
                m = t["response_mask"]  # (n, T), as all of t and out
                with gradient_sync(wrapped, last):
                    with autocast():
                        out = forward_tokens(wrapped, inputs, m, **(exact_kl_args if kl_in_loss else {}))
                    logprobs = out["logprobs"]
                    old_logprobs = t.get("old_logprobs", logprobs.detach())
                    weights = correction_weights(
                        old_logprobs, t["rollout_logprobs"], m, args.rollout_correction, args.rollout_correction_cap
                    )
                    token_losses, clipped = policy_loss(
                        logprobs, old_logprobs, t["advantages"], m, token_loss, clip_low, clip_high,
                        args.dual_clip, args.sapo_tau_positive, args.sapo_tau_negative,
                    )  # fmt: skip
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
            optimizer.step()
        model.eval()

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
        next_kl_coef = kl_coef
        if reference is not None and args.kl_controller == "adaptive":
            next_kl_coef = adapt_kl_coef(
                kl_coef, total["mean_kl"] / max(1, len(trained)), args.kl_target, len(trained), args.kl_horizon
            )

        # ---- 6. metrics ----
        metrics = {
            "epoch": position / len(prompts),
            "objective/kl_coef": kl_coef,
            **evaluation.policy_metrics(
                total, len(updates), len(trained), args, experience.metrics["objective/scores"], kl_coef
            ),
            "rollout/staleness": step - 1 - experience.policy_step,
            **experience.metrics,
            **optimizer.metrics(),
            **(engine.metrics() if engine is not None else {}),
        }
        engines.watch_agreement({"step": step, **metrics})
        mean_advantages = masked_mean(batch.tokens["advantages"], mask, 1)
        shown = evaluation.sample_rows(batch, args.log_samples, mean_advantages)
        run.finish_step(
            metrics, shown, experience.sampled_tokens,
            position=position, score_statistics=statistics, kl_coef=next_kl_coef,
        )  # fmt: skip
    run.finish()


if __name__ == "__main__":
    main(cli.parse(Args))
