"""What is logged of a batch of responses: its metrics, and samples of it with their tokens."""

import functools
import math
from statistics import fmean
from typing import Any, Callable

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from plumbing.rewards.sources import RewardSources
from plumbing.rollout.batch import Batch
from utils import Sums


def nanmean(values: Tensor) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    return values.nanmean().item()


def batch_metrics(batch: Batch, reward_sources: RewardSources) -> dict[str, float]:
    """Return the metrics of a batch: lengths, stops, correctness, the mean and spread of each reward
    component, and the mean score of the responses that stopped and of those that were cut off.

    The statistics of a source leave out the responses without a score, and those that the source
    does not score.
    """
    components = batch.reward_components
    correct = correct_responses(batch, reward_sources)
    missing = torch.stack([components[name].isnan() for name in reward_sources.sources]).any(0)
    metrics = {
        "objective/verifiable_correct_rate": nanmean(correct),
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
    if not batch.scores.isnan().all():
        for end, chosen in (("stopped", batch.stopped), ("cut_off", ~batch.stopped)):
            if chosen.any():
                metrics[f"reward/{end}"] = nanmean(batch.scores[chosen])
    return metrics | conversation_metrics(batch)


def correct_responses(batch: Batch, reward_sources: RewardSources) -> Tensor:
    """Return (N,) float64: 1 where the row's first verifier gave 1 or more and the response stopped,
    else 0.

    NaN where that verifier gave no score, or the row has no verifier: a failed reward does not mean
    a wrong response.
    """
    scores = batch.verifier_scores(reward_sources.verifiers)
    return ((scores >= 1) & batch.stopped).double().masked_fill(scores.isnan(), math.nan)


def conversation_metrics(batch: Batch) -> dict[str, float]:
    """Return means over the conversations, and the share of each reason for which they ended; {}
    without conversations.
    """
    conversations = [sample.conversation for sample in batch.samples if sample.conversation]
    if not conversations:
        return {}
    from extras.episodes.conversations import STOP_REASONS

    counts = [conversation.metrics() for conversation in conversations]
    reasons = [conversation.stop_reason for conversation in conversations]
    return {
        **{f"conversation/{name}": fmean(x[name] for x in counts) for name in counts[0]},
        **{f"stop_reason/{name}": reasons.count(name) / len(reasons) for name in STOP_REASONS},
    }


def add_rollout(
    sums: Sums,
    micro: dict[str, Tensor],
    logprobs: Tensor,
    estimate_kl: Callable[[Tensor, Tensor], Tensor] | None = None,
    updated: bool = False,
) -> None:
    """Add to the sums what is logged once for each response of a micro-batch: surprisal, KL to the
    reference, and the distance of the trainer's log-probabilities from the sampler's.

    Args:
        micro: (n, T) by name. logprobs: (n, T), of the trainer.
        estimate_kl: (logprobs, ref_logprobs) -> KL of each token.
        updated: whether the step has changed the weights that gave `logprobs`. Then `logprobs` are
            not compared with the sampler's.
    """
    m = micro["response_mask"]
    if not updated:
        rollout_logprobs = micro["rollout_logprobs"]
        difference = (logprobs - rollout_logprobs).abs()
        probability = (logprobs.exp() - rollout_logprobs.exp()).abs()
        sums.add(m, mismatch=difference, mismatch_probability=probability, compared=m)
        sums.max(mismatch=torch.where(m, difference, 0.0))
    sums.add(m, surprisal=-logprobs)
    sums.add(responses=m.any(1).sum())
    if estimate_kl and "ref_logprobs" in micro:
        kl = torch.where(m, estimate_kl(logprobs, micro["ref_logprobs"]), 0.0).sum(1)  # (n,)
        lengths = m.sum(1).clamp(min=1)
        sums.add(kl=kl.sum(), token_mean_kl=(kl / lengths).sum())


def mismatch_metrics(total: dict[str, float], step: int, batch: Batch) -> dict[str, float]:
    """Return how far engine and trainer differ, and how old the policies are that sampled the
    tokens; {} if no policy has sampled any of them.

    Args:
        total: of the sums of `add_rollout`.
    """
    if total["compared"] == 0:
        return {}
    metrics: dict[str, float] = {"rollout/staleness": 0}
    if "policy_steps" in batch.tokens:  # of an engine
        # distill.py also learns responses of the data set, which no policy has sampled.
        sampled = batch.response_mask & batch.tokens["rollout_logprobs"].isfinite()
        policy_steps = batch.tokens["policy_steps"].double()
        ages = (step - 1 - policy_steps).where(sampled, math.nan)  # (N, T), in steps
        newest = ages.nan_to_num(math.inf).amin(1, keepdim=True)
        metrics = {
            "rollout/staleness": nanmean(ages),
            "rollout/staleness_max": ages[sampled].max().item(),
            "rollout/mixed_policies": (ages > newest).any(1).double().mean().item(),
        }
    return metrics | {
        "rollout/logprob_diff_mean": total["mismatch"] / total["compared"],
        "rollout/logprob_diff_max": total["max_mismatch"],
        "rollout/prob_diff_mean": total["mismatch_probability"] / total["compared"],
    }


def sample_rows(batch: Batch, count: int, every: int = 1) -> list[dict]:
    """Return `count` responses, the first one of each `every`, as rows of samples.jsonl; with their
    scores and mean advantages.
    """
    advantages = batch.tokens.get("advantages")
    mask = batch.response_mask
    # (N,) each, NaN also where the source does not score the row
    scores = {
        name: x.masked_fill(~batch.scored_by(name), math.nan).tolist()
        for name, x in batch.reward_components.items()
    }
    rows = []
    for i in range(0, len(batch.samples), every)[:count]:
        sample = batch.samples[i]
        answer = sample.row.get("answer")
        row: dict[str, Any] = {
            "prompt": sample.row["prompt"],
            "response": sample.text,
            "answer": answer and str(answer)[:1000],  # the tests of a program may be long
        }
        row |= {name: x[i] for name, x in scores.items()}
        if advantages is not None:
            row["advantage"] = advantages[i][mask[i]].mean().item()
        if sample.conversation is None:
            row["stop_reason"] = "stop" if sample.stopped else "length"
        else:
            row["stop_reason"] = sample.conversation.stop_reason
            row["turns"] = sample.conversation.turns
        row["length"] = len(sample.response)
        rows.append(row)
    return rows


def token_rows(
    batch: Batch, count: int, tokenizer: PreTrainedTokenizerBase, added: dict[int, dict]
) -> list[dict]:
    """Return the tokens of the first `count` responses as rows of tokens.jsonl: "texts", "trains"
    (whether the step has updated weights by a token), and each of `Batch.tokens` and of `added`
    by its name with four digits, None for an observation and for what is not finite.

    Args:
        added: as `Batch.gather_added` returns it.
    """
    # What has several numbers a token, such as a teacher's most likely ones, is not logged.
    tokens = {name: x[:count].cpu() for name, x in batch.tokens.items() if x.dim() == 2}
    sampled = tokens.pop("response_mask")
    rows = []
    for i, sample in enumerate(batch.samples[:count]):
        length = len(sample.response)
        known = sampled[i, :length]
        # Of a character that consists of several tokens the last one has the text.
        stream = DecodeStream(skip_special_tokens=False)
        decode = functools.partial(stream.step, tokenizer.backend_tokenizer)
        row: dict[str, Any] = {
            "sample": i,
            "texts": [decode(int(token)) or "" for token in sample.response],
            "trains": (known & (i in added)).int().tolist(),
        }
        of_sample = {name: x[i] for name, x in tokens.items()} | added.get(i, {})
        for name, of_token in of_sample.items():
            values = of_token[:length].double().masked_fill(~known, math.nan).tolist()
            row[name] = [float(f"{x:.4g}") if math.isfinite(x) else None for x in values]
        rows.append(row)
    return rows
