"""Reward model from preference pairs (Bradley-Terry), in one file.

A language model with a linear head of one output reads query and response; its output at the last
token is the score r. For each pair of responses to a prompt, of which the first was preferred,
minimise

    -log sigmoid(r_chosen - r_rejected - margin) + centre_coef * (r_chosen + r_rejected)^2

Sources: arXiv:2203.02155, eq. 1; margin: arXiv:2307.09288, eq. 2; centring: arXiv:2312.09244, eq.
2.

Deliberate choices:
1. The head has no bias and starts at Normal(0, 1 / sqrt(hidden + 1)) (arXiv:2009.01325), scores
   near 0.
2. The score is read at the last token by the rows' lengths, never by looking for padding: pad ==
   eos is harmless. (transformers' forward looks for padding; where pad == eos its config therefore
   gets no pad token, and it reads one row at a time.)
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

import functools
import math
import os
import re
from typing import Any, Literal

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

import utils
from plumbing import cli
from plumbing.cli import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from plumbing.data import prompts
from plumbing.data.cache import check_rows_fit, column, encode_rows, leave_out
from plumbing.data.mixture import SHORT, count_steps, stream, take_prompts, without
from plumbing.data.rows import first_rows, read_rows, split_of
from plumbing.models import loading
from plumbing.models.sharding import Sharding, set_gradient_sync
from plumbing.models.tokenizer import load_tokenizer_and_stop_ids
from plumbing.run.ranks import Interrupt, report_errors
from plumbing.run.run import Run

# Token ids of prompt and response, in a pair as `load_pairs` makes it.
SIDES = ("chosen", "rejected")
TEXTS = ("prompt", "chosen_text", "rejected_text")  # what is shown of a pair


@dataclass
class Args(cli.RunArgs, cli.ModelArgs, cli.OptimizerArgs):
    dataset: str = "trl-lib/ultrafeedback_binarized"
    """Preference pairs: arithmetic (built in), a .jsonl, .json, .csv or .parquet file, a folder, or
    owner/name[:config] on the hub, each with @split after it for another split than train. Columns:
    chosen and rejected, text or messages, with a prompt or without; or src, tgt, response, sort;
    where there are any, margin (a number) and subset."""
    eval_dataset: str = ""
    """Pairs to evaluate on, split test unless @split is given; default: those of --dataset, or for
    a single file a tenth of it at most."""
    eval_every: NonNegativeInt = 50
    """Steps between evaluations; also before the first step and after the last. 0: never."""
    eval_pairs: NonNegativeInt = 1000
    """Pairs of an evaluation, the first ones of the evaluation set; 0 for all."""
    system_prompt: str = ""
    """System turn put before each prompt that has none, also by the chat template that is saved; ""
    adds none."""
    max_length: PositiveInt = 1024
    """Most tokens of prompt and response together; longer pairs are left out, and counted."""
    passes: PositiveFloat = 1.0
    """Passes over the rows of --dataset; the run ends after them (rounded down to whole steps)."""
    batch_size: PositiveInt = 64
    """Pairs an optimizer update, over all ranks."""
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
# Preference pairs
# --------------------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Return whether a value of a file is a number that float32 can hold; true and false are not
    numbers.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30


def read_pair(where: str, row: dict) -> list[tuple]:
    """Return the two sides of a row, chosen and rejected: (prompt (text, messages or None), the
    response as a message) each.

    Raise a UserError, naming the row, if a side is missing or the two are equal.
    """
    if "response" in row and "sort" in row:  # PaddleNLP's form
        responses = row["response"]
        sort = row["sort"]
        prompt, reference = prompts.prompt_and_answer(
            where, prompts.with_messages(where, row, "src"), "src", "tgt"
        )
        if reference is not None or not all(
            isinstance(x, list) and len(x) == 2 for x in (responses, sort)
        ):
            raise utils.UserError(
                f"{where}: src requires one turn more than tgt, response and sort two entries each"
            )
        if not all(map(is_number, sort)) or sort[0] == sort[1]:
            raise utils.UserError(
                f"{where}: sort must be two different numbers, the higher for the chosen response, not {sort}"
            )
        chosen = int(sort[1] > sort[0])
        row = {"prompt": prompt, "chosen": responses[chosen], "rejected": responses[1 - chosen]}
    column = next(
        (name for name in prompts.COLUMNS["prompt"] if row.get(name) not in (None, "", [])), None
    )
    prompt = column and prompts.with_messages(where, row, column)[column]
    sides = []
    for name in SIDES:
        before = []
        response = row.get(name)
        # Messages: the last turn is the response, the others belong to the prompt.
        if isinstance(response, list):
            if not prompts.is_turn_of_assistant(response):
                raise utils.UserError(
                    f"{where}: messages of the {name} side have to end with a turn of the assistant"
                )
            *before, response = response
            if prompts.is_turn_of_assistant(before[:1]) and prompt:  # continues the prompt
                before = prompts.as_turns(prompt) + before
        elif isinstance(response, str):
            response = {"role": "assistant", "content": response}
        if not isinstance(response, dict) or not prompts.says_something(where, response):
            raise utils.UserError(f"{where}: has no {name} response")
        sides.append((before or prompt, response))  # the whole conversation, if there is one
    if sides[0] == sides[1]:
        raise utils.UserError(f"{where}: the chosen and the rejected response are the same")
    return sides


def make_pair(
    at: str,
    row: dict,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str,
    as_is: bool,
    stop_ids: list[int],
) -> list[dict]:
    """Return a pair of a row at a place, for `encode_rows`: see `load_pairs`."""
    margin = 0.0 if row.get("margin") is None else row["margin"]
    if not is_number(margin):
        raise utils.UserError(f"{at}: margin must be a number, not {str(margin)[:60]!r}")
    subset = None if row.get("subset") is None else str(row["subset"])
    pair: dict[str, Any] = {"prompt": "", "margin": margin, "subset": subset, "problem": ""}
    tools = prompts.tools_of(at, row)
    for side, (prompt, turn) in zip(SIDES, read_pair(at, row)):
        if prompt is None:
            if others := turn.keys() - {"role", "content"}:
                raise utils.UserError(
                    f"{at}: has {', '.join(sorted(others))}, and no prompt before it"
                )
            text = prompts.render_response(at, turn["content"], tokenizer, stop_ids, special=True)
            pair[side] = [text]
        else:
            messages, query = prompts.render_prompt(
                at, prompt, tokenizer, system_prompt, as_is, tools
            )
            text = prompts.render_turn(at, messages, query, turn, stop_ids, tokenizer, as_is, tools)
            pair["prompt"] = query.shown
            pair[side] = [query, text]
        pair[f"{side}_text"] = text.shown
    pair["about"] = pair["prompt"] or str(sorted(pair[f"{side}_text"] for side in SIDES))
    return [pair]


def load_pairs(
    flag: str,
    name: str,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
    args: Args,
):
    """Read preference pairs and encode them, once and for all; those over --max_length are left out
    and reported.

    Returns:
        Rows {"prompt", "chosen_text", "rejected_text": text; "chosen", "rejected": token ids of
        prompt, response and stop token; "margin": float, 0 if the row has none; "subset": text or
        None}
    """
    dataset = split_of(name)[0]
    where = f"{flag} {dataset}"
    raw = read_rows(flag, re.sub("^arithmetic(@|$)", r"arithmetic_pairs\1", name), split)
    make = functools.partial(
        make_pair,
        tokenizer=tokenizer,
        system_prompt=args.system_prompt,
        as_is=args.chat_template == "none",
        stop_ids=stop_ids,
    )
    first_rows(where, raw)  # there are some
    pairs = encode_rows(flag, dataset, raw, make, tokenizer, stop_ids)
    for part in TEXTS:
        utils.say(f"{where}: {part}: {SHORT.repr(pairs[0][part])}")
    lengths = np.maximum(*(column(pairs, side) for side in SIDES))
    why = f"which have more tokens than --max_length {args.max_length}"
    return leave_out(where, pairs, lengths <= args.max_length, why)


def load_train_and_eval_pairs(
    args: Args, tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]
) -> tuple:
    """Return the pairs to train on, and those to evaluate on, which are never trained on (none with
    --eval_every 0).
    """
    pairs = load_pairs("--dataset", args.dataset, "train", tokenizer, stop_ids, args)
    held_out = pairs.take(0)
    (dataset, _) = split_of(args.dataset)
    if args.eval_every and (args.eval_dataset or not os.path.isfile(dataset)):
        held_out = load_pairs(
            "--eval_dataset", args.eval_dataset or dataset, "test", tokenizer, stop_ids, args
        )
        held_out = held_out.take(min(args.eval_pairs or len(held_out), len(held_out)))
    elif args.eval_every:
        count = min(args.eval_pairs or len(pairs), max(1, len(pairs) // 10))
        held_out = pairs.select(stream(len(pairs), 0, count, args.seed))
    kept = without(f"--dataset {args.dataset}", pairs, held_out)
    for side in SIDES:
        for part in (kept, held_out):
            check_rows_fit(args.model, part, [side], f"--dataset {args.dataset}")
    return kept, held_out


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
    local: list[tuple] = []
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
    scorer, new_head = loading.load_scalar_model(
        "--model", args.model if args.lora_rank else saved or args.model, dtype, device
    )
    config = scorer.model.config
    head = scorer.model.score.weight.data
    loading.add_adapter(scorer.model, args)
    # transformers' forward reads it, and would treat a stop token that is the pad token as padding.
    config.pad_token_id = None if tokenizer.pad_token_id in stop_ids else tokenizer.pad_token_id
    config.score_token = stop_ids[0]  # for those that read text: where scores are read
    if not saved:  # of another model's scores
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
    world = utils.setup_processes()
    run = Run(args, __file__, world)
    tokenizer, stop_ids = load_tokenizer_and_stop_ids(args)
    pairs, eval_pairs = load_train_and_eval_pairs(args, tokenizer, stop_ids)
    total_steps = count_steps(args.passes, pairs, args.batch_size)
    precision = loading.precision(args.precision, world.device)
    sharding = Sharding(args, world, precision)
    scorer = load_scorer(
        args, tokenizer, stop_ids, run.checkpoint, precision.base_dtype(args), sharding.load_device
    )
    config = scorer.model.config
    wrapped = sharding.wrap(scorer)
    optimizer = utils.Optimizer(scorer, args, total_steps)

    def evaluate(pairs: list[dict] = eval_pairs) -> tuple[dict, list[dict]]:
        """Score pairs, keep mean and deviation in the model's config, and return metrics and
        samples.
        """
        # (P, 2)
        scores = score_pairs(scorer, pairs, args.micro_batch_tokens, run.interrupt, world)
        config.score_mean = scores.mean().item()
        config.score_std = scores.std().item()
        statistics = pair_statistics(scores, [pair["subset"] for pair in pairs])
        samples = sample_pairs(list(pairs)[: max(4, args.log_samples)], scores)
        return {f"eval/{name}": x for name, x in statistics.items()}, samples

    run.start(
        total_steps,
        tokenizer=tokenizer,
        models={"": scorer.model},
        optimizers={"": optimizer},
        evaluate=evaluate if eval_pairs else None,
    )
    run.check_rows(pairs, eval_pairs)

    for step in run.steps():
        # ---- update: one batch of pairs, cut into micro-batches ----
        run.phase("training")
        optimizer.begin_step(step, 1)
        position = run.state.get("position", 0)
        batch = take_prompts(pairs, position, args.batch_size, args.seed)
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        local: list[tuple] = []
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
        gathered = [pair for _, pair in sorted(world.all_gather(local))]
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
        samples = sample_pairs(batch[: args.log_samples], scores)
        tokens = sum(len(pair[side]) for pair in batch for side in SIDES)
        run.finish_step(metrics, samples, tokens, tokens, position=position)
    if not eval_pairs:  # mean and deviation of the scores are those of training pairs
        try:
            evaluate(take_prompts(pairs, 0, min(1000, len(pairs)), args.seed))
        except utils.Interrupted:
            run.save_and_exit()
    run.finish()


if __name__ == "__main__":
    with report_errors():
        main(cli.parse(Args))
