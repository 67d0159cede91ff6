"""Measure a model on a data set, with the data, sampling and rewards of training: avg@n, pass@k, maj@n.

    python scripts/evaluate.py --model runs/my-run/final --samples 8                       # GSM8K's test split
    python scripts/evaluate.py --model Qwen/Qwen2.5-7B-Instruct --temperature 0 --backend vllm
    torchrun --nproc_per_node 8 scripts/evaluate.py --model Qwen/Qwen2.5-7B-Instruct       # prompts spread over GPUs

Write results.json and samples.jsonl (every response) to OUTPUT_DIR/RUN_NAME. With n = --samples responses to each of P
prompts, every number is a mean over prompts, and "se" its standard error, the standard deviation over prompts / sqrt(P)
(arXiv:2411.00640, section 2.2):
1. avg@n: the share of the n responses that are correct, by the rule of training (`evaluation.correct_responses`): the
   first source of --reward that is not a model gave 1 or more, and the response stopped by itself. Responses without a
   score are left out, and counted.
2. pass@k, for k = 1, 2, 4, ...: the probability that k of the n responses, drawn without replacement, include a correct
   one (arXiv:2107.03374, eq. 1).
3. maj@n: whether the most frequent final answer of the n responses is correct (of equally frequent ones the first).
   Answers are equal as text (`plumbing/rewards/answers.py: voted_answer`). A response that was cut off does not vote.
   format, code and ifeval have no answer to vote for.

With --tools or --environment a response is a conversation, as in training; the vote is on its last turn. The random
numbers of a response are a function of the seed, its prompt's place in the data set and its number among n: neither
ranks nor --generation_batch_size change them.
"""

import collections
import json
import os
import sys
import time
import types
from dataclasses import asdict
from typing import Annotated, Literal

import pandas
from pydantic import Field
from pydantic.dataclasses import dataclass
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import grpo
import utils
from plumbing import cli
from plumbing.cli import NonNegativeFloat, NonNegativeInt, PositiveInt
from plumbing.data import mixture
from plumbing.models import loading
from plumbing.rewards.answers import voted_answer
from plumbing.rewards.sources import Rewards, check_reference, is_scored_by
from plumbing.rollout import engines
from plumbing.rollout.batch import Batch, Sampler
from plumbing.run import evaluation, resume
from plumbing.run.log import finite, replace_file
from plumbing.run.ranks import Interrupt, record

NO_ANSWERS = ("format", "code", "ifeval", "environment")  # sources whose responses have nothing to vote for
PROMPTS_AT_ONCE = 128  # between two moves of the progress bar


@dataclass
class Args(
    cli.OutputArgs, cli.PretrainedArgs, cli.PromptArgs, cli.ScoringArgs, cli.SamplingArgs, cli.ConversationArgs
):  # fmt: skip
    num_prompts: NonNegativeInt = 0
    """Number of prompts, the first ones of the data set (split test, unless @split is given); 0 for all."""
    samples: Annotated[int, Field(ge=0, le=512)] = 0
    """Responses a prompt (n); 0: 8, or 1 if --temperature is 0."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 for the greedy response."""
    max_response_length: PositiveInt = 1024
    """Maximum number of tokens of a response; of a conversation with its observations."""
    backend: Literal["hf", "vllm"] = "hf"
    """What generates: the sampler of training, on transformers (hf), or vLLM in this process."""
    micro_batch_tokens: PositiveInt = 16_384
    """Tokens, padding included, of a reward model's forward pass. Memory and speed only."""

    RULES = {
        "--samples must be at most 1 with --temperature 0, as all responses would be the same": lambda a: (
            a.temperature > 0 or a.samples <= 1
        )
    }
    # Not flags, but read by vLLM's engine and `evaluation.unscored`.
    async_steps, vllm_tensor_parallel, reward_weights = 0, 1, ()


def sample_table(batch: Batch, rewards: Rewards, n: int) -> pandas.DataFrame:
    """Return a row for each of the n responses to each prompt."""
    correct, rows = evaluation.correct_responses(batch, rewards).tolist(), []
    for i, sample in enumerate(batch.samples):
        row, conversation = sample.row, sample.conversation
        verifier = next((name for name in rewards.verifiers if is_scored_by(row, name)), None)
        last_turn, ending = sample.text, {"stop_reason": "stop" if sample.stopped else "length"}
        if conversation is not None:
            last_turn = conversation.turns[-1]["content"] if conversation.turns else ""
            ending = {"stop_reason": conversation.stop_reason, "turns": conversation.turns}
        votes = sample.stopped and verifier is not None and verifier.partition(":")[0] not in NO_ANSWERS
        scores = {f"reward/{name}": x for name, x in sample.scores.items() if is_scored_by(row, name)}
        rows.append({
            "index": i // n, "sample": i % n, "dataset": row["dataset"], "prompt": row["prompt"],
            "answer": row["answer"], "response": sample.text, "stopped": sample.stopped, **ending,
            "tokens": int(batch.response_mask[i].sum()), **scores, "correct": correct[i],
            "extracted": voted_answer(verifier, last_turn) if votes else None,
        })  # fmt: skip
    return pandas.DataFrame(rows)


def estimate(by_prompt: pandas.Series) -> dict[str, float | None]:
    """Return the mean over prompts, without those that have no number, and its standard error; None where undefined."""
    return finite({"value": by_prompt.mean(), "se": by_prompt.sem()})


def majority(responses: pandas.DataFrame) -> float:
    """Return whether the most frequent answer of the responses to a prompt is correct; 0 if none votes."""
    votes = collections.Counter(responses["extracted"].dropna())
    if not votes:
        return 0.0
    (winner, _), *_ = votes.most_common(1)
    return responses.loc[responses["extracted"] == winner, "correct"].iloc[0]


def measure(table: pandas.DataFrame, n: int) -> dict[str, dict]:
    """Return {measure: {"value", "se"}} of a table of responses; {} if no source tells right from wrong."""
    if table["correct"].isna().all():
        return {}
    prompts = table.groupby("index")
    counts = prompts["correct"].agg(["count", "sum"]).astype(int)
    scores = {f"avg@{n}": prompts["correct"].mean()}
    for k in (2**i for i in range(n.bit_length())):
        enough = counts[counts["count"] >= k]
        passed = [evaluation.pass_at_k(scored, right, k) for scored, right in enough.itertuples(index=False)]
        scores[f"pass@{k}"] = pandas.Series(passed, dtype=float)
    if table["extracted"].notna().any():
        scores[f"maj@{n}"] = pandas.Series([majority(rows) for _, rows in prompts])
    return {name: estimate(by_prompt) for name, by_prompt in scores.items()}


def show(results: dict) -> None:
    """Print the results, a line for each number."""
    lines = {**results["scores"], **{f"mean reward {name}": x for name, x in results["rewards"].items()}}
    for dataset, scores in results["datasets"].items():
        lines |= {f"{dataset} {name}": x for name, x in scores.items()}
    print(f"{results['prompts']} prompts x {results['samples']} responses")
    print(pandas.DataFrame.from_dict(lines, "index", columns=["value", "se"]).to_string(float_format="%.4g"))
    print(f"stopped: {results['stopped']:.1%}; mean length {results['response_tokens']['mean']:.1f} tokens")


@record
def main(args: Args) -> None:
    # ---- setting up: data, rewards, model ----
    model, dataset = (os.path.normpath(name).split(os.sep) for name in (args.model, args.dataset))
    name = args.run_name or f"evaluate__{'-'.join(model[-2:])}__{dataset[-1]}__{args.seed}"  # final/ is one of many
    folder = os.path.join(args.output_dir, name)
    if os.path.exists(folder):
        utils.fail(f"--run_name {name}: {folder} exists; choose another name")
    with utils.loading(f"--output_dir {args.output_dir}"):  # now, as the samples take hours
        os.makedirs(args.output_dir, exist_ok=True)
    n = args.samples or (8 if args.temperature else 1)
    world = utils.setup_processes()
    tokenizer = loading.load_tokenizer(args.model, args.chat_template, args.chat_template_kwargs)
    stop_ids = loading.stop_token_ids(tokenizer, args.model, args.stop_token)
    conversations = engines.load_conversations(args, tokenizer, stop_ids)
    parts = mixture.load_prompts("--dataset", args.dataset, "test", tokenizer, args, check_reference, conversations)
    prompts = mixture.first_prompts(parts, args.num_prompts)
    mixture.check_responses_fit(args, prompts)
    rewards = Rewards(args, tokenizer, prompts, conversations is not None)
    precision, engine = loading.precision(args.precision, world.device), None
    if args.backend == "vllm":
        if reason := engines.obstacle(args):
            utils.fail(f"--backend vllm: {reason}")
        from plumbing.rollout.vllm_engine import Engine

        engine = Engine(args, world, precision.compute_dtype, load_format="auto")
        model = types.SimpleNamespace(device=world.device)  # the engine has the weights
    else:
        model = loading.load_model("--model", args.model, precision.param_dtype, world.device).requires_grad_(False)
        loading.check_decodes(f"--model {args.model}", model, precision.compute_dtype, "--backend vllm")
    rewards.load_models(args, precision)
    sampler = Sampler(
        generate=grpo.generate,
        model=model,
        engine=engine,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        rewards=rewards,
        conversations=conversations,
        args=args,
        interrupt=Interrupt(world),
        world=world,
        autocast=precision.autocast,
    )

    # ---- sample and score ----
    begin, samples = time.perf_counter(), []
    with tqdm(total=len(prompts), desc="prompts", dynamic_ncols=True, disable=None if world.main else True) as bar:
        for first in range(0, len(prompts), PROMPTS_AT_ONCE):
            rows, key = prompts[first : first + PROMPTS_AT_ONCE], ("evaluate", args.seed, first)
            batch = sampler.rollout(rows, n if args.temperature else 0, key)
            if batch is None:
                utils.fail(f"--backend {args.backend}: {sampler.engine.failure}")
            samples += batch.samples
            bar.update(len(rows))
    seconds = time.perf_counter() - begin

    # ---- results ----
    batch = Batch.from_samples(samples, batch.stopped.device)
    table = sample_table(batch, rewards, n)
    if reason := evaluation.unscored(batch, rewards, args):
        utils.fail(f"--reward: no response got a score ({reason})")
    mean_rewards = {}
    for name, components in batch.reward_components.items():
        scores, missing = table.get(f"reward/{name}"), int(components.isnan().sum())
        if missing:
            reason = rewards.why_missing({name: components})
            utils.warn(f"--reward {name}: {missing} of {len(table)} responses got no score ({reason})")
        if scores is not None:
            mean_rewards[name] = {**estimate(scores.groupby(table["index"]).mean()), "missing": missing}
    by_dataset = list(table.groupby("dataset", sort=False))
    results = {
        "scores": measure(table, n),
        "datasets": {name: measure(rows, n) for name, rows in by_dataset} if len(by_dataset) > 1 else {},
        "rewards": mean_rewards,
        "prompts": len(prompts),
        "samples": n,
        "stopped": table["stopped"].mean(),
        "conversations": evaluation.conversation_metrics(batch),
        "response_tokens": {"mean": table["tokens"].mean(), "max": int(table["tokens"].max())},
        "generation": {"seconds": seconds, "tokens_per_second": table["tokens"].sum() / seconds, "ranks": world.size},
        "args": asdict(args),
        "versions": resume.versions(),
        "git_commit": resume.git_commit(),
    }

    if world.main:
        lines = [json.dumps(finite(row), allow_nan=False, default=str) + "\n" for row in table.to_dict("records")]
        os.makedirs(folder)
        replace_file(os.path.join(folder, "samples.jsonl"), "".join(lines))
        replace_file(os.path.join(folder, "results.json"), json.dumps(results, indent=2, allow_nan=False))
        show(results)
        print(os.path.join(folder, "results.json"), flush=True)


if __name__ == "__main__":
    main(cli.parse(Args))
