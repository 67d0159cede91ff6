"""Measure a model on a data set, with the data, sampling and rewards of training: avg@n, pass@k,
maj@n.

    python scripts/evaluate.py --model runs/my-run/final --samples 8                       # GSM8K's test split
    python scripts/evaluate.py --model runs/my-run/final --config runs/my-run/args.json    # as the run evaluates
    python scripts/evaluate.py --model Qwen/Qwen2.5-7B-Instruct --temperature 0
    torchrun --nproc_per_node 8 scripts/evaluate.py --model Qwen/Qwen2.5-7B-Instruct       # prompts spread over GPUs

A model that a run saved reads and writes what it was trained on: unless they are given, the flags
of `Args.FROM_RUN` (system prompt, template, stop token, lengths) are those of the run's args.json,
and printed. --config RUN/args.json takes all flags that the run has in common with this command,
also --tools and --environment, and measures as the run did: on the prompts of its --eval_dataset or
--eval_share, --eval_prompts of them, --eval_samples responses each, so that avg@n is the
eval/accuracy that it logged (of over 256 prompts, the later ones have other random numbers).
Without --model it measures the model that the run began with.

Write results.json, samples.jsonl (every response, as in a run's samples.jsonl) and tokens.jsonl
(their tokens) to OUTPUT_DIR/RUN_NAME; scripts/report.py draws them. With n = --samples responses to
each of P prompts, every number is a mean over prompts, and "se" its standard error, the standard
deviation over prompts / sqrt(P) (arXiv:2411.00640, section 2.2), none where all prompts are alike.
"low" and "high" are the 95 % interval of a share that P trials have (`wilson_interval`), which
holds for few prompts and at 0 and 1, too, and is wide for n > 1:
1. avg@n: the share of the n responses that are correct, by the rule of training
   (`correct_responses`): the first verifier of --reward gave 1 or more, and the response stopped
   by itself. Responses without a score are left out, and counted.
2. pass@k, for k = 1, 2, 4, ...: the probability that k of the n responses, drawn without
   replacement, include a correct one (arXiv:2107.03374, eq. 1). Prompts with fewer than k scores
   are left out.
3. maj@n: whether the most frequent final answer of the n responses is correct (of equally frequent
   ones the first). Answers are equal as text (`voted_answer`); the first with a score says whether
   they are correct, and a prompt whose answer has none is left out. A response that was cut off
   does not vote.
4. The score of each source by its name, the share of responses that stopped by themselves, and
   tokens per response.

With --tools or --environment a response is a conversation, as in training; the vote is on its last
turn. The random numbers of a response are a function of the seed, its prompt's place in the data
set and its number among n: neither ranks nor --generation_batch_size change them.
"""

import json
import math
import os
import types
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import pandas
import repository  # noqa: F401
from pydantic import Field
from pydantic.dataclasses import dataclass
from tqdm import tqdm

import grpo
import utils
from plumbing import cli
from plumbing.cli import Decay, NonNegativeFloat, NonNegativeInt, PositiveInt
from plumbing.data.mixture import first_prompts
from plumbing.data.prompts import check_responses_fit, load_prompts
from plumbing.data.rows import split_of
from plumbing.models import loading
from plumbing.models.forward import check_decodes
from plumbing.models.tokenizer import load_tokenizer_and_stop_ids
from plumbing.rewards.answers import marked_number, stated_text
from plumbing.rewards.sources import RewardSources, final_turn, why_unscorable
from plumbing.rollout import engines
from plumbing.rollout.batch import Batch
from plumbing.rollout.sampler import Sampler, unscored
from plumbing.run import evaluation
from plumbing.run.command import parse, report_errors
from plumbing.run.folder import git_commit, run_of, versions
from plumbing.run.log import append, as_logged, read_args, replace_file
from plumbing.run.metrics import (
    conversation_metrics,
    correct_responses,
    sample_rows,
    token_rows,
)
from plumbing.run.ranks import Interrupt
from plumbing.run.setup import load_conversations

PROMPTS_AT_ONCE = 256  # between two moves of the progress bar


@dataclass
class Args(
    cli.OutputArgs,
    cli.PretrainedArgs,
    cli.PromptArgs,
    cli.ScoringArgs,
    cli.SamplingArgs,
    cli.ConversationArgs,
):
    num_prompts: NonNegativeInt = 0
    """Number of prompts, the first ones of the data set (split test, unless @split is given); 0 for
    all."""
    samples: Annotated[int, Field(ge=1, le=512)] = 8
    """Responses per prompt (n)."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 for the greedy response, a single one (n = 1)."""
    max_response_length: PositiveInt = 1024
    """Maximum number of tokens of a response; of a conversation with its observations."""
    system_prompt: str | None = None
    """System turn put before each prompt that has none; "" adds none. Default: that of SYSTEM_PROMPTS
    for the first source of --reward, else none."""
    eval_share: Decay = 0.0
    """Measure on the rows of --dataset alone that a run with this --eval_share holds out; 0 for all
    rows."""
    backend: Literal["auto", "hf", "vllm"] = "auto"
    """What generates: the sampler of training, on transformers (hf), or vLLM in this process; auto
    is vLLM on a GPU where it is installed, else hf."""
    micro_batch_tokens: PositiveInt = 16_384
    """Tokens, padding included, of a reward model's forward pass. Memory and speed only."""

    SYSTEM_PROMPTS = grpo.Args.SYSTEM_PROMPTS
    FROM_RUN = (
        "system_prompt chat_template chat_template_kwargs stop_token "
        "max_prompt_length min_response_length max_response_length"
    ).split()
    # Not flags, but read by vLLM's engine and by `why_unscorable`.
    async_steps = 0
    vllm_tensor_parallel = 1
    reward_weights = ()

    @classmethod
    def from_model(cls, model: str) -> dict:
        """Return the flags FROM_RUN of the run that saved a model, and print them; {} if there is
        no such run.
        """
        run = run_of(model)
        if run is None:
            return {}
        with utils.as_user_error(f"--model {model}"):
            flags = read_args(run).get("args", {})
        taken = {name: flags[name] for name in cls.FROM_RUN if name in flags}
        print(f"defaults by {run}/args.json: {taken}; --config takes its other flags, too")
        return taken

    @classmethod
    def from_run(cls, flags: dict) -> dict:
        """Return the flags that measure as a run with some flags does. The name of its folder is
        taken.
        """
        own = {name: flags[name] for name in cls.__dataclass_fields__ if name in flags}
        own["run_name"] = ""
        if "eval_samples" in flags:  # not in this command's own results.json
            own |= {"num_prompts": flags["eval_prompts"], "samples": flags["eval_samples"]}
            if not flags.get("eval_share"):
                own["dataset"] = flags["eval_dataset"] or split_of(flags["dataset"])[0]
        return own


def voted_answer(response: str) -> str | None:
    """Return the answer of a response as text, for a vote among responses; None without one.

    The number behind "####", if there is one, else the `stated_text` without dollar signs, final
    full stop and case.
    """
    text = stated_text(response)
    number = marked_number(text)
    if number is not None:
        return str(number)
    return " ".join(text.replace("$", " ").split()).rstrip(". ").casefold() or None


def sample_table(batch: Batch, reward_sources: RewardSources, n: int) -> pandas.DataFrame:
    """Return a row for each of the n responses to each prompt."""
    table = pandas.DataFrame(sample_rows(batch, len(batch.samples)))
    return table.assign(
        index=table.index // n,
        dataset=[sample.row["dataset"] for sample in batch.samples],
        tokens=batch.response_mask.sum(1).tolist(),
        stopped=[sample.stopped for sample in batch.samples],
        correct=correct_responses(batch, reward_sources).tolist(),
        extracted=[
            voted_answer(final_turn(sample)) if sample.stopped else None for sample in batch.samples
        ],
    )


def majority(responses: pandas.DataFrame) -> float:
    """Return whether the most frequent answer of the responses to a prompt is correct; 0 if none
    votes.

    NaN if no response with this answer has a score.
    """
    answers = responses.groupby("extracted", sort=False)["correct"]
    return answers.first()[answers.size().idxmax()] if len(answers) else 0.0


def wilson_interval(share: float, trials: int) -> dict[str, float]:
    """Return the 95 % interval of a share of some trials, {"low", "high"} (Wilson 1927, as in
    Newcombe 1998, doi:10.1002/(SICI)1097-0258(19980430)17:8<857::AID-SIM777>3.0.CO;2-E, method 3).
    """
    z = 1.959964
    right = trials * share
    half = z * math.sqrt(z**2 / 4 + right * (1 - share))
    scale = trials + z**2
    # Added in this order, no end is below 0 or above 1.
    return {
        "low": (right + (z**2 / 2 - half)) / scale,
        "high": (right + (z**2 / 2 + half)) / scale,
    }


def measure(table: pandas.DataFrame, n: int, columns: list[str]) -> dict[str, dict]:
    """Return {measure: {"value", "se"}} of a table of responses: means over prompts, without those
    that have no number; of shares with "low" and "high", too.

    avg@n, pass@k and maj@n if a source tells right from wrong; and the mean of each of some
    columns.
    """
    prompts = table.groupby("index")
    measures = {}
    if table["correct"].notna().any():
        measures[f"avg@{n}"] = prompts["correct"].mean()
        for k in (2**i for i in range(n.bit_length())):
            pass_at_k = lambda x, k=k: evaluation.pass_at_k(x.count(), int(x.sum()), k)
            measures[f"pass@{k}"] = prompts["correct"].agg(pass_at_k)
        if table["extracted"].notna().any():
            measures[f"maj@{n}"] = prompts[["extracted", "correct"]].apply(majority)
    shares = [*measures, "stopped"]
    measures |= prompts[columns].mean()
    results = {}
    for name, by_prompt in measures.items():
        value = by_prompt.mean()
        interval = wilson_interval(value, max(1, by_prompt.count())) if name in shares else {}
        results[name] = as_logged({"value": value, "se": by_prompt.sem() or math.nan, **interval})
    return results


def main(args: Args) -> None:
    # ---- setting up: data, rewards, model ----
    world = utils.setup_processes()
    path = Path(args.model)
    owner = run_of(args.model) or path.parent  # final/ is one of many
    model = f"{owner.name}-{path.name}".strip("-")
    name = args.run_name or f"evaluate__{model}__{Path(args.dataset).name}__{args.seed}"
    folder = Path(args.output_dir, name)
    if folder.exists():
        raise utils.UserError(f"--run_name {name}: {folder} exists; choose another name")
    with utils.as_user_error(f"--output_dir {args.output_dir}"):  # now, as the samples take hours
        folder.parent.mkdir(parents=True, exist_ok=True)
    n = args.samples if args.temperature else 1
    tokenizer, stop_ids = load_tokenizer_and_stop_ids(args)
    conversations = load_conversations(args, tokenizer, stop_ids)
    split, span = ("train", (0, args.eval_share)) if args.eval_share else ("test", (0, 1))
    parts = load_prompts(
        "--dataset",
        args.dataset,
        split,
        tokenizer,
        args,
        why_unscorable,
        conversations,
        span=span,
    )
    prompts = first_prompts(parts, args.num_prompts)
    check_responses_fit(args, prompts)
    reward_sources = RewardSources(args, tokenizer, prompts, conversations is not None)
    precision = loading.precision(args.precision, world.device)
    args.backend = engines.backend_of("backend", args)
    if args.backend == "vllm":
        from extras.vllm.engine import Engine

        engine = Engine(args, world, precision.compute_dtype)
        model = types.SimpleNamespace(device=world.device)  # the engine has the weights
    else:
        engine = None
        model = loading.load_model(
            "--model", args.model, precision.param_dtype, world.device
        ).requires_grad_(False)
        check_decodes(f"--model {args.model}", model, "--backend vllm")
    reward_sources.load_models(args, precision)
    interrupt = Interrupt(world, __file__)
    sampler = Sampler(
        generate=grpo.generate,
        model=model,
        engine=engine,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        reward_sources=reward_sources,
        conversations=conversations,
        args=args,
        interrupted=lambda: interrupt.requested,
        world=world,
        precision=precision,
    )

    # ---- sample and score ----
    samples = []
    starts = range(0, len(prompts), PROMPTS_AT_ONCE)
    for first in tqdm(
        starts, "prompts", unit_scale=PROMPTS_AT_ONCE, disable=None if world.main else True
    ):
        # As in a run's evaluation.
        key = ("evaluation", args.seed, first) if first else ("evaluation", args.seed)
        part = prompts.skip(first).take(PROMPTS_AT_ONCE)
        try:
            batch = sampler.rollout(part, n if args.temperature else 0, key, not args.temperature)
        except utils.Interrupted as error:
            if engine is None or not engine.failure:
                raise
            raise utils.UserError(f"--backend {args.backend}: {engine.failure}") from error
        samples += batch.samples

    # ---- results ----
    batch = Batch.from_samples(samples, batch.stopped.device)
    table = sample_table(batch, reward_sources, n)
    missing = {name: int(scores.isnan().sum()) for name, scores in batch.reward_components.items()}
    columns = [*missing, "stopped", "tokens"]
    by_dataset = table.groupby("dataset", sort=False)
    results = {
        "scores": measure(table, n, columns),
        "datasets": {
            name: measure(rows, n, columns) for name, rows in by_dataset if len(by_dataset) > 1
        },
        "missing_scores": missing,
        "conversations": conversation_metrics(batch),
        "args": asdict(args),
        "versions": versions(),
        "git_commit": git_commit(),
    }
    if world.main:
        if folder.exists():  # by another evaluation of this name: the samples have taken hours
            folder = folder.with_name(f"{name}-{os.getpid()}")
        folder.mkdir()
        append(folder / "samples.jsonl", map(as_logged, table.to_dict("records")))
        if args.log_tokens:
            append(folder / "tokens.jsonl", token_rows(batch, len(samples), tokenizer, {}))
        replace_file(folder / "results.json", json.dumps(results, indent=2, allow_nan=False))
        print(f"{len(prompts)} prompts x {n} responses; without a score: {missing}")
        for name, scores in {"": results["scores"], **results["datasets"]}.items():
            print(
                name, pandas.DataFrame(scores).T.to_string(float_format="{:.4g}".format), sep="\n"
            )
        print(folder / "results.json")
    if reason := unscored(batch, reward_sources, args):
        raise utils.UserError(f"--reward: no response got a score ({reason})")


if __name__ == "__main__":
    with report_errors():
        main(parse(Args))
