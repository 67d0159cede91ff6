"""The accuracy on held-out prompts."""

import math

import torch
from torch import Tensor

from plumbing.data.rows import Row
from plumbing.rollout.batch import Batch
from plumbing.rollout.sampler import Sampler
from plumbing.run.metrics import batch_metrics, correct_responses, nanmean, sample_rows


def evaluate(sampler: Sampler, rows: list[Row]) -> tuple[dict[str, float], list[dict]]:
    """Measure greedy and sampled accuracy, with the same random numbers at every call.

    Args:
        rows: held-out prompts.
    Returns:
        Metrics. eval/accuracy is the mean over all samples with a score, which is pass@1.
        Samples as `sample_rows` gives them, one per prompt.
    """
    reward_sources = sampler.reward_sources
    args = sampler.args
    if args.eval_temperature or args.eval_top_p:
        sampler = sampler.with_args(
            temperature=args.eval_temperature or args.temperature,
            top_p=args.eval_top_p or args.top_p,
        )
    key = ("evaluation", args.seed)
    both = sampler.rollout(rows, args.eval_samples, key, greedy=True)
    greedy, sampled = (
        Batch.from_samples([x for x in both.samples if x.greedy == kind], both.scores.device)
        for kind in (True, False)
    )
    metrics = {}
    if reward_sources.verifiers:
        correct = correct_responses(sampled, reward_sources)  # (rows * eval_samples,)
        metrics["eval/greedy_accuracy"] = nanmean(correct_responses(greedy, reward_sources))
        metrics["eval/accuracy"] = nanmean(correct)
        metrics |= pass_at_ks(correct.view(len(rows), args.eval_samples))
        datasets = [sample.row.get("dataset") for sample in sampled.samples]
        if len(set(datasets)) > 1:
            for dataset in dict.fromkeys(datasets):
                of_dataset = torch.tensor([each == dataset for each in datasets])
                metrics[f"eval/accuracy/{dataset}"] = nanmean(correct[of_dataset])
    for name, value in batch_metrics(sampled, reward_sources).items():
        if name in ("val/sequence_lengths", "val/missing_scores") or name.startswith("reward/"):
            metrics[f"eval/{name.removeprefix('val/')}"] = value
    reward_sources.waited = 0.0  # a step logs its own waiting only
    return metrics, sample_rows(sampled, max(4, args.log_samples), every=args.eval_samples)


def pass_at_ks(correct: Tensor) -> dict[str, float]:
    """Return eval/pass@k, the mean over prompts, for k = 2, 4, ... up to the number of samples.

    Args:
        correct: (prompts, samples), 1 or 0, NaN where there is no score.
    """
    scored = correct.isfinite().sum(1).tolist()
    right = correct.nansum(1).int().tolist()
    rates = {}
    k = 2
    while k <= correct.shape[1]:
        of_prompts = [pass_at_k(samples, count, k) for samples, count in zip(scored, right)]
        rates[f"eval/pass@{k}"] = nanmean(torch.tensor(of_prompts, dtype=torch.float64))
        k *= 2
    return rates


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k), NaN for fewer than k
    samples.

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1; n samples, c of them correct.
    """
    if samples < k:
        return math.nan
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)
