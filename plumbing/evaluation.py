"""Accuracy on held-out prompts, and what a batch says of itself.

Imports plumbing.rewards for the kinds of sources and plumbing.rollout for the batch.
"""

import math
from typing import Callable

import torch

from plumbing.rewards import Rewards, is_reward_model, reward_weights
from plumbing.rollout import Batch
from utils import Sums


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased pass@k, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def unscored(batch: Batch, rewards: Rewards, args) -> str:
    """Return the first reward source that counts and gave no response a score, and why; "" if there is none."""
    for (name, scores), weight in zip(batch.reward_components.items(), reward_weights(args)):
        if weight and scores.isnan().all():
            return rewards.why_missing({name: scores})
    return ""


def correct_responses(batch: Batch) -> torch.Tensor | None:
    """Return (N,) bool: the first source that is no reward model gave 1 or more, and the response stopped.

    A missing score is not correct. None if all sources are reward models, none of which tells right from wrong.
    """
    verifier = next((name for name in batch.reward_components if not is_reward_model(name)), None)
    return None if verifier is None else (batch.reward_components[verifier] >= 1) & batch.stopped


def evaluate(sample: Callable, rows: list[dict], args) -> tuple[dict, list[dict], list[int]] | None:
    """Measure greedy and sampled accuracy, with the same random numbers at every call.

    Args:
        sample: `plumbing.rollout.rollout` with all but its first three arguments. rows: held-out prompts.
    Returns:
        Metrics (eval/accuracy is the mean over all samples, which is pass@1), four samples as `sample_rows` gives
        them, and the lengths of all responses in tokens; None if the run is interrupted.
    """
    metrics, k = {}, args.eval_samples
    for name, samples in (("greedy_", 0), ("", k)):
        batch = sample(rows, samples, ("evaluation", args.seed))
        if batch is None:
            return None
        correct = correct_responses(batch)
        if correct is not None:
            metrics[f"eval/{name}accuracy"] = correct.double().mean().item()
    if correct is not None:
        counts = correct.view(len(rows), k).sum(1).tolist()
        for n in (2**i for i in range(1, k.bit_length())):  # 2, 4, ... up to the number of samples
            metrics[f"eval/pass@{n}"] = sum(pass_at_k(k, count, n) for count in counts) / len(counts)
        metrics |= accuracy_of_data_sets(batch.rows, correct)
    for name, value in batch_metrics(batch).items():
        if name in ("val/sequence_lengths", "val/missing_scores") or name.startswith("reward/"):
            metrics[f"eval/{name.removeprefix('val/')}"] = value
    return metrics, sample_rows(batch, 4, every=k), [len(response) for response in batch.responses]


def accuracy_of_data_sets(rows: list[dict], correct: torch.Tensor) -> dict[str, float]:
    """Return the accuracy on each data set, {"eval/accuracy/NAME": share of its samples}; {} if there is but one.

    Args:
        rows: the prompt of each sample. correct: (N,) bool.
    """
    names = [row.get("dataset") for row in rows]
    different = list(dict.fromkeys(names))
    samples_of = {name: [i for i, other in enumerate(names) if other == name] for name in different}
    if len(different) == 1:
        return {}
    return {f"eval/accuracy/{name}": correct[own].double().mean().item() for name, own in samples_of.items()}


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return lengths, stops and correctness of a batch, and mean and spread of each reward component."""
    correct, components = correct_responses(batch), batch.reward_components
    scored = {name: scores[scores.isfinite()] for name, scores in components.items()}
    missing = sum(scores.isnan() for scores in components.values()).count_nonzero()
    verified = {name: scores for name, scores in components.items() if not is_reward_model(name)}
    return {
        "objective/verifiable_correct_rate": math.nan if correct is None else correct.double().mean().item(),
        "val/sequence_lengths": sum(map(len, batch.responses)) / len(batch.responses),
        "val/num_stop_token_ids": int(batch.stopped.sum()),
        "val/missing_scores": int(missing),
        **{f"reward/{name}": scores.nanmean().item() for name, scores in components.items()},
        **{f"reward_std/{name}": x.std().item() if len(x) > 1 else math.nan for name, x in scored.items()},
        **{f"reward_correct/{name}": (scores >= 1).double().mean().item() for name, scores in verified.items()},
    }


def sample_rows(batch: Batch, count: int, advantages: torch.Tensor | None = None, every: int = 1) -> list[dict]:
    """Return `count` responses, one in `every`, for samples.jsonl and the console; advantages: (N,)."""
    rows = []
    for i in range(0, len(batch.texts), every)[:count]:
        scores = {name: component[i].item() for name, component in batch.reward_components.items()}
        if advantages is not None:
            scores["advantage"] = advantages[i].item()
        stop = "stop" if batch.stopped[i] else "length"
        rows.append({"prompt": batch.rows[i]["prompt"], "response": batch.texts[i], **scores, "stop_reason": stop})
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
