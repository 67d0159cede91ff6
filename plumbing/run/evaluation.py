"""Accuracy on held-out prompts, and the metrics of a batch."""

import math
from statistics import fmean
from typing import Any, Callable

import torch

from plumbing.data.rows import Row
from plumbing.rewards.sources import RewardSources, is_scored_by
from plumbing.rollout.batch import Batch, Sampler
from utils import Sums, warn

# Mean difference of probabilities above which the engine does not sample from the trained policy.
# bfloat16 alone was seen to give 0.011.
MOST_MISMATCH = 0.02


def correct_responses(batch: Batch, reward_sources: RewardSources) -> torch.Tensor:
    """Return (N,) float64: 1 where the first verifier of the row gave 1 or more and the response
    stopped, else 0.

    NaN where it gave no score, or there is no verifier: a failed reward does not mean a wrong
    response.
    """
    correct = torch.full_like(batch.stopped, math.nan, dtype=torch.float64)
    for name in reversed(reward_sources.verifiers):
        scores = batch.reward_components[name]
        right = ((scores >= 1) & batch.stopped).double().masked_fill(scores.isnan(), math.nan)
        correct = torch.where(batch.scored_by(name), right, correct)
    return correct


def evaluate(sampler: Sampler, rows: list[Row]) -> tuple[dict, list[dict]]:
    """Measure greedy and sampled accuracy, with the same random numbers at every call.

    Args:
        rows: held-out prompts.
    Returns:
        Metrics (eval/accuracy is the mean over all samples, which is pass@1; NaN where there is no
        score), and samples as `sample_rows` gives them, one per prompt.
    """
    reward_sources = sampler.reward_sources
    args = sampler.args
    metrics = {}
    k = args.eval_samples
    for name, samples in (("greedy_", 0), ("", k)):
        batch = sampler.rollout(rows, samples, ("evaluation", args.seed))
        correct = correct_responses(batch, reward_sources)
        if reward_sources.verifiers:
            metrics[f"eval/{name}accuracy"] = correct.nanmean().item()
    if reward_sources.verifiers:
        grouped = correct.view(len(rows), k)
        scored = grouped.isfinite().sum(1).tolist()
        right = grouped.nansum(1).int().tolist()
        for n in (2**i for i in range(1, k.bit_length())):  # 2, 4, ... up to the number of samples
            passed = [pass_at_k(*counts, n) for counts in zip(scored, right)]
            metrics[f"eval/pass@{n}"] = torch.tensor(passed, dtype=torch.float64).nanmean().item()
        datasets = [sample.row.get("dataset") for sample in batch.samples]
        for dataset in dict.fromkeys(datasets) if len(set(datasets)) > 1 else ():
            of_dataset = torch.tensor([each == dataset for each in datasets])
            metrics[f"eval/accuracy/{dataset}"] = correct[of_dataset].nanmean().item()
    for name, value in batch_metrics(batch, reward_sources).items():
        if name in ("val/sequence_lengths", "val/missing_scores") or name.startswith("reward/"):
            metrics[f"eval/{name.removeprefix('val/')}"] = value
    reward_sources.waited = 0.0  # not of a step
    return metrics, sample_rows(batch, max(4, args.log_samples), every=k)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
    arXiv:2107.03374, eq. 1).

    NaN for fewer than k samples.
    """
    if samples < k:
        return math.nan
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def batch_metrics(batch: Batch, reward_sources: RewardSources) -> dict[str, float]:
    """Return lengths, stops and correctness of a batch, mean and spread of each reward component,
    and the mean score that responses of either end train with.

    Responses without a score, and those that a source does not score, are left out of the
    statistics of its scores.
    """
    components = batch.reward_components
    correct = correct_responses(batch, reward_sources)
    missing = torch.stack([components[name].isnan() for name in reward_sources.sources]).any(0)
    metrics = {
        "objective/verifiable_correct_rate": correct.nanmean().item(),
        "val/sequence_lengths": batch.response_mask.sum().item() / len(batch.samples),
        "val/num_stop_token_ids": int(batch.stopped.sum()),
        "val/missing_scores": int(missing.sum()),
    }
    for name, scores in components.items():
        scored = scores[scores.isfinite() & batch.scored_by(name)]
        metrics[f"reward/{name}"] = scored.mean().item()
        metrics[f"reward_std/{name}"] = scored.std().item() if len(scored) > 1 else math.nan
        if name in reward_sources.verifiers:
            metrics[f"reward_correct/{name}"] = (scored >= 1).double().mean().item()
    for end, chosen in (("stopped", batch.stopped), ("cut_off", ~batch.stopped)):
        if chosen.any() and not batch.scores.isnan().all():
            metrics[f"reward/{end}"] = batch.scores[chosen].nanmean().item()
    return metrics | conversation_metrics(batch)


def conversation_metrics(batch: Batch) -> dict[str, float]:
    """Return means over conversations, and the share of each reason for which they ended; {} if
    there are none.
    """
    conversations = [sample.conversation for sample in batch.samples if sample.conversation]
    if not conversations:
        return {}
    from extras.episodes.conversations import STOP_REASONS

    counts = [conversation.metrics() for conversation in conversations]
    reasons = [conversation.stop_reason for conversation in conversations]
    return {
        **{f"conversation/{name}": fmean(count[name] for count in counts) for name in counts[0]},
        **{f"stop_reason/{name}": reasons.count(name) / len(reasons) for name in STOP_REASONS},
    }


def sample_rows(batch: Batch, count: int, every: int = 1) -> list[dict]:
    """Return `count` responses, one in `every`, with their mean advantages, for samples.jsonl and
    the console.
    """
    advantages = batch.tokens.get("advantages")
    rows = []
    for i in range(0, len(batch.samples), every)[:count]:
        sample = batch.samples[i]
        scores = {
            name: x[i].item() if is_scored_by(sample.row, name) else math.nan
            for name, x in batch.reward_components.items()
        }
        if advantages is not None:
            scores["advantage"] = advantages[i][batch.response_mask[i]].mean().item()
        # The tests of a program may be long.
        answer = sample.row.get("answer") and str(sample.row["answer"])[:1000]
        conversation = sample.conversation
        ending: dict[str, Any] = {"stop_reason": "stop" if sample.stopped else "length"}
        if conversation is not None:
            ending = {"stop_reason": conversation.stop_reason, "turns": conversation.turns}
        row = {"prompt": sample.row["prompt"], "response": sample.text, "answer": answer}
        rows.append({**row, **scores, **ending, "length": len(sample.response)})
    return rows


def add_rollout(
    sums: Sums,
    micro: dict[str, torch.Tensor],
    logprobs: torch.Tensor,
    estimate_kl: Callable | None = None,
    updated: bool = False,
) -> None:
    """Add to the sums what is logged of a micro-batch's responses, once for each: surprisal, KL to
    the reference, and how far the trainer's log-probabilities are from the sampler's.

    Args:
        micro: (n, T) by name. logprobs: (n, T), of the trainer.
        estimate_kl: (logprobs, ref_logprobs) -> KL of each token.
        updated: whether the step has changed the weights that `logprobs` are of. They are not
            compared with the sampler's then.
    """
    m = micro["response_mask"]
    if not updated:
        difference = (logprobs - micro["rollout_logprobs"]).abs()
        probability = (logprobs.exp() - micro["rollout_logprobs"].exp()).abs()
        sums.add(m, mismatch=difference, mismatch_probability=probability, compared=m)
        sums.max(mismatch=torch.where(m, difference, 0.0))
    sums.add(m, surprisal=-logprobs)
    sums.add(responses=m.any(1).sum())
    if estimate_kl and "ref_logprobs" in micro:
        kl = torch.where(m, estimate_kl(logprobs, micro["ref_logprobs"]), 0.0).sum(1)  # (n,)
        sums.add(kl=kl.sum(), mean_kl=(kl / m.sum(1).clamp(min=1)).sum())


def mismatch_metrics(total: dict[str, float], step: int, batch: Batch) -> dict[str, float]:
    """Return how far engine and trainer differ, how many steps the policy has trained since it
    sampled a token, and the share of responses that several policies have sampled; warn if engine
    and trainer disagree although they have the same weights.

    Args:
        total: of the sums of `add_rollout`.
    """
    metrics: dict[str, float] = {"rollout/staleness": 0}
    if "policy_steps" in batch.tokens:  # of an engine
        # What distill.py learns of the data set is sampled by no policy.
        sampled = batch.response_mask & batch.tokens["rollout_logprobs"].isfinite()
        ages = (step - 1 - batch.tokens["policy_steps"].double()).where(sampled, math.nan)  # (N, T)
        newest = ages.nan_to_num(math.inf).amin(1, keepdim=True)
        metrics = {
            "rollout/staleness": ages.nanmean().item(),
            "rollout/staleness_max": ages[sampled].max().item(),
            "rollout/mixed_policies": (ages > newest).any(1).double().mean().item(),
        }
    difference = total["mismatch_probability"] / total["compared"]
    if difference > MOST_MISMATCH and metrics["rollout/staleness"] == 0:
        warn(
            f"step {step}: rollout and trainer differ by {difference:.3f} in a token's mean probability. --top_p, "
            "--repetition_penalty and --min_response_length do that; else try --precision float32, or "
            "--rollout_backend hf to see which is wrong"
        )
    return metrics | {
        "rollout/logprob_diff_mean": total["mismatch"] / total["compared"],
        "rollout/logprob_diff_max": total["max_mismatch"],
        "rollout/prob_diff_mean": difference,
    }
