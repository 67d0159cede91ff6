"""Reward model from preference pairs (Bradley-Terry), in one file.

A language model with a linear head of one output reads query and response; its output at the last
token is the score r. For each pair of responses to a prompt, of which the first was preferred,
minimise

    -log sigmoid(r_chosen - r_rejected - margin) + centre_coef * (r_chosen + r_rejected)^2

Sources: arXiv:2203.02155, eq. 1; margin: arXiv:2307.09288, eq. 2; centring: arXiv:2312.09244, eq.
2.

Deliberate choices:
1. The head has no bias and starts at Normal(0, 1 / sqrt(hidden + 1)) (arXiv:2009.01325), so
   that scores start near 0.
2. The score is read at the last token by the rows' lengths, never by looking for padding: pad ==
   eos is harmless. (transformers' own forward looks for padding. Where pad == eos, the saved
   config therefore has no pad token, and transformers can score only one row at a time.)
3. A response ends with the stop token of the chat template, as those of a policy do, and is encoded
   behind its prompt.
4. The gradient is that of the global batch: neither the number of ranks nor `--micro_batch_tokens`
   changes it.
5. The order of the pairs is a function of the seed and the step: a resumed run continues bit for
   bit.
6. The output is a folder for AutoModelForSequenceClassification. Its config carries `score_mean`
   and `score_std` of the held-out responses (of up to 1,000 training pairs where there are none)
   for whoever reads it: nothing here does.

    bash scripts/demo.sh reward_model                                                 # a tiny model on a CPU, minutes
    python reward_model.py --model Qwen/Qwen2.5-0.5B-Instruct                         # one GPU of 24 GB, UltraFeedback
    torchrun --nproc_per_node 8 reward_model.py --model Qwen/Qwen2.5-7B-Instruct      # eight GPUs of 80 GB
"""

import math
from typing import Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

import utils
from plumbing import cli
from plumbing.cli import NonNegativeFloat, NonNegativeInt, PathOrName, PositiveFloat, PositiveInt
from plumbing.data.mixture import count_steps, take_prompts
from plumbing.data.pairs import (
    SIDES,  # "chosen" and "rejected", the keys of token ids in a pair
    TEXTS,  # the keys of their texts
    load_train_and_eval_pairs,
)
from plumbing.models import loading
from plumbing.models.sharding import Sharding, set_gradient_sync
from plumbing.models.tokenizer import load_tokenizer_and_stop_ids
from plumbing.run.command import parse, report_errors
from plumbing.run.ranks import Interrupt
from plumbing.run.run import Run


@dataclass
class Args(cli.RunArgs, cli.ModelArgs, cli.OptimizerArgs):
    dataset: PathOrName = "trl-lib/ultrafeedback_binarized"
    """Preference pairs: arithmetic (built in), a .jsonl, .json, .csv or .parquet file, a folder, or
    owner/name[:config] on the hub, each with @split after it for another split than train. Columns:
    chosen and rejected, text or messages, with a prompt or without; or PaddleNLP's src, tgt,
    response and sort. Optional columns: system, tools, chat_template_kwargs, margin (a number) and
    subset."""
    eval_dataset: PathOrName = ""
    """Pairs to evaluate on, split test unless @split is given. Default: split test of --dataset;
    if --dataset is a single file, at most a tenth of its pairs, on which nothing trains."""
    eval_every: NonNegativeInt = 50
    """Steps between evaluations; also before the first step and after the last. 0: never."""
    eval_pairs: NonNegativeInt = 1000
    """Pairs of an evaluation, the first ones of the evaluation set; 0 for all."""
    system_prompt: str = ""
    """System turn put before each prompt that has none; the saved chat template does the same; ""
    adds none."""
    max_length: PositiveInt = 1024
    """Most tokens of prompt and response together; longer pairs are left out, and counted."""
    passes: PositiveFloat = 1.0
    """Passes over the rows of --dataset; the run ends after them (rounded down to whole steps)."""
    batch_size: PositiveInt = 64
    """Pairs per optimizer update, over all ranks."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after the warm-up."""
    centre_coef: NonNegativeFloat = 0.0
    """Weight of (r_chosen + r_rejected)^2, which keeps scores around 0; 0.01 is usual."""


# --------------------------------------------------------------------------------------------------
# The equations: tensors in, tensors out. n pairs, L tokens.
# --------------------------------------------------------------------------------------------------


def preference_loss(
    chosen: Tensor, rejected: Tensor, margins: Tensor, centre_coef: float
) -> Tensor:
    """Return the loss of each pair (n,), from the scores of both sides and the margins, (n,) each.

    -log sigmoid(r_chosen - r_rejected - margin) (arXiv:2307.09288, eq. 2) + centre_coef * (r_chosen
    + r_rejected)^2 (arXiv:2312.09244, eq. 2).
    """
    return (
        -nn.functional.logsigmoid(chosen - rejected - margins)
        + centre_coef * (chosen + rejected).square()
    )


def collate_pairs(pairs: list[dict], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return all chosen sides, then all rejected ones: input_ids (2n, L), padded on the right, and
    a mask (2n, L) of the last token of each. Without pairs there is one row of padding, of which
    nothing is read.
    """
    sides = [torch.tensor(pair[side]) for side in SIDES for pair in pairs]
    input_ids = nn.utils.rnn.pad_sequence(
        sides or [torch.zeros(2, dtype=torch.long)], batch_first=True
    )
    last = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, side in zip(last, sides):
        row[len(side) - 1] = True
    return input_ids.to(device), last.to(device)


def pair_statistics(scores: Tensor, subsets: list) -> dict[str, float]:
    """Return how the scores (P, 2), chosen and rejected, rank the pairs, in all and per subset
    (None: of no subset).

    Equal scores do not rank a pair right. The standard deviation is unbiased, over both sides.
    """
    chosen, rejected = scores.unbind(1)
    right = (chosen > rejected).double()
    statistics = {
        "pair_accuracy": right.mean(),
        "margin": (chosen - rejected).mean(),
        "score_mean": scores.mean(),
        "score_std": scores.std(),
        "score_chosen": chosen.mean(),
        "score_rejected": rejected.mean(),
    }
    for subset in sorted({*subsets} - {None}):
        of_subset = torch.tensor([name == subset for name in subsets])
        statistics[f"pair_accuracy/{subset}"] = right[of_subset].mean()
    return {name: value.item() for name, value in statistics.items()}


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------


def cut_pairs(pairs: list[dict], budget: int, world: utils.World) -> list[list[int]]:
    """Return this rank's micro-batches of pairs, both sides of a pair in the same one; see
    `utils.micro_batches`.
    """
    lengths = [2 * max(len(pair["chosen"]), len(pair["rejected"])) for pair in pairs]
    return utils.micro_batches(lengths, budget, world)


def score_pairs(
    model: nn.Module, pairs: list[dict], budget: int, interrupt: Interrupt, world: utils.World
) -> Tensor:
    """Return scores of chosen and rejected sides (P, 2) float64, computed on all ranks; raise
    Interrupted once one of them is asked to save and exit.
    """
    local: list[tuple] = []  # of this rank: (index of the pair, its two scores)
    for cut in cut_pairs(pairs, budget, world):
        if interrupt.agreed():
            raise utils.Interrupted
        with torch.no_grad():
            scores = model(*collate_pairs([pairs[i] for i in cut], world.device))
        local += zip(cut, scores.view(2, -1).T.tolist())
    return torch.tensor(
        [scores for _, scores in sorted(world.all_gather(local))], dtype=torch.float64
    )


def sample_pairs(pairs: list[dict], scores: Tensor) -> list[dict]:
    """Return pairs with their scores (P, 2), for samples.jsonl and the console."""
    return [
        {name: pair[name] for name in TEXTS} | {"chosen_score": chosen, "rejected_score": rejected}
        for pair, (chosen, rejected) in zip(pairs, scores.tolist())
    ]


def load_scorer(
    args: Args,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
    saved: str | None,
    dtype: torch.dtype,
    device: torch.device,
):
    """Load --model, or the checkpoint folder `saved`, with a head of one output; a new head is
    random (choice 1).
    """
    # With LoRA the base is loaded as in a new run; `Run.start` loads the checkpoint's adapter.
    scorer, new_head = loading.load_scalar_model(
        "--model", saved if saved and not args.lora_rank else args.model, dtype, device
    )
    config = scorer.model.config
    head = scorer.model.score.weight.data
    loading.add_adapter(scorer.model, args)
    # transformers' forward looks for the pad token, and would take a stop token of the same id for
    # padding.
    config.pad_token_id = None if tokenizer.pad_token_id in stop_ids else tokenizer.pad_token_id
    # The token that a text ends with; what scores texts reads it in the config.
    config.score_token = stop_ids[0]
    if not saved:  # statistics that --model brought are not of this model
        for name in ("score_mean", "score_std"):
            vars(config).pop(name, None)
    if new_head:
        values = utils.generator("head", args.seed).normal(
            0, 1 / math.sqrt(head.shape[1] + 1), head.shape
        )
        head.copy_(torch.from_numpy(values))
    return scorer


def main(args: Args) -> None:
    # ---- setting up ----
    world = utils.setup_processes(args.collective_timeout)
    run = Run(args, __file__, world)
    tokenizer, stop_ids = load_tokenizer_and_stop_ids(args)
    pairs, eval_pairs = load_train_and_eval_pairs(args, tokenizer, stop_ids)
    total_steps = count_steps(args.passes, pairs, args.batch_size)
    precision = loading.precision(args.precision, world.device)
    sharding = Sharding(args, world, precision)
    scorer = load_scorer(
        args,
        tokenizer,
        stop_ids,
        run.checkpoint,
        precision.trained_dtype(args),
        sharding.load_device,
    )
    config = scorer.model.config
    wrapped = sharding.wrap(scorer)
    optimizer = utils.Optimizer(scorer, args, total_steps)

    def evaluate(pairs: list[dict] = eval_pairs) -> tuple[dict, list[dict]]:
        """Score pairs, keep mean and deviation in the model's config, and return metrics and
        samples.
        """
        pairs = list(pairs)  # each access decodes a row
        # (P, 2)
        scores = score_pairs(scorer, pairs, args.micro_batch_tokens, run.interrupt, world)
        config.score_mean = scores.mean().item()
        config.score_std = scores.std().item()
        statistics = pair_statistics(scores, [pair["subset"] for pair in pairs])
        samples = sample_pairs(pairs[: max(4, args.log_samples)], scores)
        return {f"eval/{name}": x for name, x in statistics.items()}, samples

    run.start(
        total_steps,
        tokenizer=tokenizer,
        models={"": scorer.model},
        optimizers={"": optimizer},
        evaluate=evaluate if eval_pairs else None,
    )
    run.check_rows(pairs, eval_pairs)  # prints their lengths, warns if a resume has others

    for step in run.steps():
        # ---- update: one batch of pairs, cut into micro-batches ----
        run.phase("training")
        optimizer.begin_step(step, 1)
        position = run.state.get("position", 0)
        batch = take_prompts(pairs, position, args.batch_size, args.seed)
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        local: list[tuple] = []  # of this rank: (index of the pair, its two scores)
        cuts = cut_pairs(batch, args.micro_batch_tokens, world)
        for number, cut in enumerate(cuts, 1):
            micro = [batch[i] for i in cut]
            set_gradient_sync(wrapped, number == len(cuts))
            scores = wrapped(*collate_pairs(micro, world.device)).view(2, -1)  # (2, n)
            margins = torch.tensor(
                [pair["margin"] for pair in micro],
                device=world.device,
                dtype=precision.loss_dtype,
            )
            loss = (
                preference_loss(scores[0], scores[1], margins, args.centre_coef).sum()
                / args.batch_size
            )
            optimizer.backward(loss)
            total += loss.detach()
            local += zip(cut, scores.detach().T.tolist())
        optimizer.step()

        # ---- metrics ----
        gathered = [pair_scores for _, pair_scores in sorted(world.all_gather(local))]
        scores = torch.tensor(gathered, dtype=torch.float64)  # (P, 2)
        position += args.batch_size
        metrics = {
            "epoch": position / len(pairs),
            "train/loss": world.sum(total).item(),
            **{
                f"train/{name}": x
                for name, x in pair_statistics(scores, [None] * len(batch)).items()
            },
            **optimizer.metrics(),
        }
        run.log.samples(step, sample_pairs(batch[: args.log_samples], scores))
        tokens = sum(len(pair[side]) for pair in batch for side in SIDES)
        run.finish_step(metrics, tokens=tokens, trained_tokens=tokens, position=position)
    if not eval_pairs:  # mean and deviation of the scores are those of training pairs
        try:
            evaluate(take_prompts(pairs, 0, min(1000, len(pairs)), args.seed))
        except utils.Interrupted:
            run.save_and_exit()
    run.finish()


if __name__ == "__main__":
    with report_errors():
        main(parse(Args))
