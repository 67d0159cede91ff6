"""Accuracy on held-out prompts, and the metrics of a batch.

Imports plumbing.rewards.sources for the kinds of sources, plumbing.rollout.batch for the batch, plumbing.turns.conversations for how they
end, and plumbing.run.measures.
"""

import math
from typing import Callable

import torch

from plumbing.rewards.sources import Rewards, is_scored_by, reward_weights
from plumbing.rollout.batch import Batch
from plumbing.run.measures import pass_at_k
from plumbing.turns.conversations import STOP_REASONS, Conversation
from utils import Sums, warn


def counted(batch: Batch, name: str) -> torch.Tensor:
    """Return (N,) bool: the responses that a source scores, which are all unless rows name other sources."""
    return torch.tensor([is_scored_by(row, name) for row in batch.rows], device=batch.stopped.device)


def unscored(batch: Batch, rewards: Rewards, args) -> str:
    """Return the first reward source that has a weight and gave no response a score, and why; "" if there is none."""
    for (name, scores), weight in zip(batch.reward_components.items(), reward_weights(args)):
        own = scores[counted(batch, name)]
        if weight and len(own) and own.isnan().all():
            return rewards.why_missing({name: scores})
    return ""


def correct_responses(batch: Batch) -> torch.Tensor | None:
    """Return (N,): 1 if the first source that tells right from wrong gave 1 or more and the response stopped, else 0.

    Of a row that names its sources, it is the first of these. NaN where it gave no score: a failed reward says nothing
    of a response, so means leave it out. None if no source tells right from wrong, as reward models do not.
    """
    correct = torch.full(batch.stopped.shape, math.nan, dtype=torch.float64, device=batch.stopped.device)
    for name in reversed(batch.verifiers):
        scores = batch.reward_components[name]
        right = ((scores >= 1) & batch.stopped).double().masked_fill(scores.isnan(), math.nan)
        correct = torch.where(counted(batch, name), right, correct)
    return correct if batch.verifiers else None


def evaluate(sample: Callable, rows: list[dict], args) -> tuple[dict, list[dict], list[int]] | None:
    """Measure greedy and sampled accuracy, with the same random numbers at every call; warn of missing scores.

    Args:
        sample: `plumbing.rollout.batch.rollout` with all but its first three arguments. rows: held-out prompts.
    Returns:
        Metrics (eval/accuracy is the mean over all samples, which is pass@1; NaN where there is no score), samples as
        `sample_rows` gives them, one a prompt, and the lengths of all responses in tokens; None if interrupted.
    """
    metrics, k = {}, args.eval_samples
    for name, samples in (("greedy_", 0), ("", k)):
        batch = sample(rows, samples, ("evaluation", args.seed))
        if batch is None:
            return None
        for source, scores in batch.reward_components.items():
            if missing := int(scores.isnan().sum()):
                what = f"{missing} of {len(scores)} {'greedy' if name else 'sampled'} responses"
                warn(f"--reward {source}: gave {what} of the evaluation no score; means leave them out, null if all")
        correct = correct_responses(batch)
        if correct is not None:
            metrics[f"eval/{name}accuracy"] = correct.nanmean().item()
    if correct is not None:
        grouped = correct.view(len(rows), k)
        counts = list(zip(grouped.isfinite().sum(1).tolist(), grouped.nansum(1).int().tolist()))
        for n in (2**i for i in range(1, k.bit_length())):  # 2, 4, ... up to the number of samples
            passed = [pass_at_k(scored, right, n) for scored, right in counts if scored >= n]
            metrics[f"eval/pass@{n}"] = sum(passed) / len(passed) if passed else math.nan
        metrics |= accuracy_of_data_sets(batch.rows, correct)
    for name, value in batch_metrics(batch).items():
        if name in ("val/sequence_lengths", "val/missing_scores") or name.startswith("reward/"):
            metrics[f"eval/{name.removeprefix('val/')}"] = value
    return metrics, sample_rows(batch, max(4, args.log_samples), every=k), batch.response_mask.sum(1).tolist()


def accuracy_of_data_sets(rows: list[dict], correct: torch.Tensor) -> dict[str, float]:
    """Return the accuracy on each data set, {"eval/accuracy/NAME": share of its samples}; {} if there is but one.

    Args:
        rows: the prompt of each sample. correct: (N,), as `correct_responses` gives it.
    """
    names = [row.get("dataset") for row in rows]
    different = list(dict.fromkeys(names))
    samples_of = {name: [i for i, other in enumerate(names) if other == name] for name in different}
    if len(different) == 1:
        return {}
    return {f"eval/accuracy/{name}": correct[own].nanmean().item() for name, own in samples_of.items()}


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return lengths, stops and correctness of a batch, and mean and spread of each reward component.

    Responses without a score, and those that a source does not score, are left out of what is measured of its scores.
    """
    correct, components = correct_responses(batch), batch.reward_components
    scored = {name: scores[scores.isfinite() & counted(batch, name)] for name, scores in components.items()}
    missing = sum(scores.isnan() for scores in components.values()).count_nonzero()
    verified = {name: scored[name] for name in batch.verifiers}
    return {
        "objective/verifiable_correct_rate": math.nan if correct is None else correct.nanmean().item(),
        "val/sequence_lengths": batch.response_mask.sum().item() / len(batch.responses),
        "val/num_stop_token_ids": int(batch.stopped.sum()),
        "val/missing_scores": int(missing),
        **{f"reward/{name}": scores.mean().item() for name, scores in scored.items()},
        **{f"reward_std/{name}": x.std().item() if len(x) > 1 else math.nan for name, x in scored.items()},
        **{f"reward_correct/{name}": (x >= 1).double().mean().item() for name, x in verified.items()},
        **conversation_metrics(batch.conversations or []),
    }


def conversation_metrics(conversations: list[Conversation]) -> dict[str, float]:
    """Return means over conversations, and the share of each reason for which they ended; {} if there are none."""
    if not conversations:
        return {}
    mean = lambda values: sum(values) / len(conversations)
    counts = [conversation.metrics() for conversation in conversations]
    return {
        **{f"conversation/{name}": mean([count[name] for count in counts]) for name in counts[0]},
        **{f"stop_reason/{name}": mean([x.stop_reason == name for x in conversations]) for name in STOP_REASONS},
    }


def sample_rows(
    batch: Batch, count: int, advantages: torch.Tensor | None = None, tokens: list[dict] = (), every: int = 1
) -> list[dict]:
    """Return `count` responses, one in `every`, for samples.jsonl and the console.

    Args:
        advantages: (N,), means over the tokens. tokens: of the first responses, see plumbing/run/token_log.py.
    """
    rows = []
    for i in range(0, len(batch.texts), every)[:count]:
        row, components = batch.rows[i], batch.reward_components
        scores = {name: x[i].item() if is_scored_by(row, name) else math.nan for name, x in components.items()}
        if advantages is not None:
            scores["advantage"] = advantages[i].item()
        sample = {"prompt": row["prompt"], "response": batch.texts[i], **scores}
        sample["stop_reason"] = "stop" if batch.stopped[i] else "length"
        if batch.conversations:
            sample |= {"stop_reason": batch.conversations[i].stop_reason, "turns": batch.conversations[i].turns}
        sample["length"] = len(batch.responses[i])
        if i < len(tokens):
            sample["tokens"] = tokens[i]
        rows.append(sample)
    return rows


def add_mismatch(sums: Sums, logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor) -> None:
    """Add to the sums how far the trainer's log-probabilities (n, T) are from those of what sampled."""
    difference = torch.where(mask, (logprobs - rollout_logprobs).abs(), 0.0)
    probability = torch.where(mask, (logprobs.exp() - rollout_logprobs.exp()).abs(), 0.0)
    sums.add(mismatch=difference.sum(), mismatch_probability=probability.sum(), compared=mask.sum())
    sums.max(mismatch=difference)


def policy_metrics(
    total: dict[str, float], updates: int, responses: int, args, mean_score: float, kl_coef: float
) -> dict[str, float]:
    """Return the metrics of a policy's updates in a step from the totals of its sums.

    Args:
        total: sums over the tokens of all updates; those of kl, surprisal and weights over the first epoch only.
        updates: optimizer updates. responses: that trained. mean_score: of the step. kl_coef: beta of the step.
    """
    if not responses:
        why = "--mask_truncated leaves out all that --max_response_length cut off" if args.mask_truncated else ""
        warn(f"no response of this step trains; {why or 'its groups were filtered out or have no scores'}")
    tokens, updates, responses = total["tokens"], max(1, updates), max(1, responses)
    kl = total["kl"] / responses if args.kl_coef else math.nan
    return {
        "objective/kl": kl,
        "objective/non_score_reward": -kl_coef * kl,
        "objective/rlhf_reward": mean_score - (kl_coef * kl if args.kl_coef else 0.0),
        "objective/entropy": total["surprisal"] / responses,
        "objective/loss": (total["loss"] + args.ptx_coef * total.get("ptx", 0.0)) / updates,
        "loss/policy_avg": total["policy_loss"] / updates,
        **({"loss/ptx": total["ptx"] / updates} if "ptx" in total else {}),
        "policy/approxkl_avg": total["approxkl"] / tokens,
        "policy/clipfrac_avg": total["clipped"] / tokens,
        "policy/entropy_avg": total["entropy"] / tokens,
        "rollout/correction_mean": total["weights"] * args.num_epochs / tokens,
        "rollout/logprob_diff_mean": total["mismatch"] / total["compared"],
        "rollout/logprob_diff_max": total["max_mismatch"],
        "rollout/prob_diff_mean": total["mismatch_probability"] / total["compared"],
    }
