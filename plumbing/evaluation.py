"""Accuracy on held-out prompts, and what a batch says of itself."""

import math
from typing import Callable

import torch

from plumbing.rewards import is_reward_model, reward_weights


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def silent_source(batch, args) -> str:
    """The first reward source that counts and gave no response of a Batch a score; "" if there is none."""
    counted = zip(batch.parts.items(), reward_weights(args))
    return next((name for (name, part), weight in counted if weight and part.isnan().all()), "")


def correct_responses(batch) -> torch.Tensor | None:
    """(N,) bool: the first reward source that is no model gives 1 or more, and the response stopped.

    A missing score is not correct; None if all sources are models, of which none tells right from wrong.
    """
    verifier = next((name for name in batch.parts if not is_reward_model(name)), None)
    return None if verifier is None else (batch.parts[verifier] >= 1) & batch.stopped


def evaluate(sample: Callable, rows: list[dict], args) -> tuple[dict, object]:
    """Greedy and sampled accuracy on rows that are never trained on, with the same random numbers at every call.

    Args:
        sample: the script's `rollout`, called with rows, samples and key.
    Returns:
        metrics and the sampled Batch; both empty if the run is interrupted. eval/accuracy is the mean over all samples,
        which is pass@1.
    """
    metrics, k = {}, args.eval_samples
    for name, samples in (("greedy_", 0), ("", k)):
        batch = sample(rows, samples, ("evaluation", args.seed))
        if batch is None:
            return {}, None
        correct = correct_responses(batch)
        if correct is not None:
            metrics[f"eval/{name}accuracy"] = correct.double().mean().item()
    if correct is not None:
        counts = correct.view(len(rows), k).sum(1).tolist()
        for n in (2**i for i in range(1, k.bit_length())):  # 2, 4, ... up to the number of samples
            metrics[f"eval/pass@{n}"] = sum(pass_at_k(k, count, n) for count in counts) / len(counts)
    common = batch_metrics(batch)
    kept = ("val/sequence_lengths", "val/missing_scores", *(name for name in common if name.startswith("reward/")))
    return {**metrics, **{f"eval/{name.removeprefix('val/')}": common[name] for name in kept}}, batch


def batch_metrics(batch) -> dict[str, float]:
    """What a Batch says of itself: lengths, stops, correctness, and each reward source."""
    correct = correct_responses(batch)
    verified = {name: part for name, part in batch.parts.items() if not is_reward_model(name)}
    present = lambda part: part[part.isfinite()]
    std = lambda part: present(part).std().item() if len(present(part)) > 1 else math.nan
    return {
        "objective/verifiable_correct_rate": math.nan if correct is None else correct.double().mean().item(),
        "val/sequence_lengths": sum(map(len, batch.responses)) / len(batch.responses),
        "val/num_stop_token_ids": int(batch.stopped.sum()),
        "val/missing_scores": int(sum(part.isnan() for part in batch.parts.values()).count_nonzero()),
        **{f"reward/{name}": part.nanmean().item() for name, part in batch.parts.items()},
        **{f"reward_std/{name}": std(part) for name, part in batch.parts.items()},
        **{f"reward_correct/{name}": (part >= 1).double().mean().item() for name, part in verified.items()},
    }


def sample_rows(batch, count: int, advantages: torch.Tensor | None = None, apart: int = 1) -> list[dict]:
    """`count` responses of a Batch, every `apart`-th, for samples.jsonl and the console."""
    rows = []
    for i in range(0, len(batch.texts), apart)[:count]:
        scores = {name: part[i].item() for name, part in batch.parts.items()}
        if advantages is not None:
            scores["advantage"] = advantages[i].item()
        stop = "stop" if batch.stopped[i] else "length"
        rows.append({"prompt": batch.rows[i]["prompt"], "response": batch.texts[i], **scores, "stop_reason": stop})
    return rows
