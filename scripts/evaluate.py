"""Measures a model on a data set, with the data, sampling and rewards of training: avg@n, pass@k, maj@k.

    python scripts/evaluate.py --model runs/my-run/final --samples 8                       # GSM8K's test split
    python scripts/evaluate.py --model Qwen/Qwen2.5-7B-Instruct --temperature 0 --backend vllm
    torchrun --nproc_per_node 8 scripts/evaluate.py --model Qwen/Qwen2.5-7B-Instruct       # prompts spread over GPUs

Writes results.json and samples.jsonl (every response) into OUTPUT_DIR/RUN_NAME. With n = --samples responses to each of
P prompts, every number is a mean over prompts:
1. avg@n: the share of the n responses that are correct: the first source of --reward that is no model gives 1 or more
   and, with --require_stop, the response ended by itself. A missing score is not correct; it is warned of.
2. pass@k: the probability that k of the n responses, drawn without replacement, hold a correct one
   (arXiv:2107.03374, eq. 1). pass@1 is avg@n.
3. maj@k: the probability that the majority vote of k of the n responses, drawn likewise, is correct: the exact
   expectation over draws and ties. Each response votes for its final answer; one without any, or cut off under
   --require_stop, does not vote, and where no one votes, the vote is wrong. An answer that got different scores is
   correct to the share of its votes that is. Answers are equal as mathematics with --reward math, else as text
   (`voted_answer` in plumbing/rewards/answers.py); format, code and ifeval have none.
4. 95% confidence intervals take the prompts, not the responses, as the independent draws (arXiv:2411.00640, section
   2.2): "se" is the standard deviation over prompts / sqrt(P), "ci95" an interval from it (plumbing/run/measures.py).
5. Where every answer of the data set has a "####" (GSM8K), gsm8k_strict and gsm8k_flexible are lm-evaluation-harness's
   strict-match and flexible-extract: the first "#### number", the last number. They read the text, however it ended.
6. With --tools or --environment a response is a conversation, as in training: what is voted on is its last turn, and
   tokens are those of the model.
7. Each response has random numbers of its own, a function of the seed, its prompt's place in the data set and its
   number. Neither ranks, nor --generation_batch_size, nor more --samples or --num_prompts change what it draws.
"""

import functools
import importlib.util
import json
import math
import os
import sys
import time
from dataclasses import asdict
from typing import Annotated, Iterator, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import grpo
import utils
from plumbing import cli
from plumbing.data import mixture as data
from plumbing.models import loading as models
from plumbing.rewards.answers import harness_answer, harness_text, plain_answer, voted_answer
from plumbing.rewards.sources import Rewards, is_scored_by, needs_answer
from plumbing.rollout.batch import in_batches, load_conversations
from plumbing.run import checkpoints, resume
from plumbing.run import log as run_log
from plumbing.run.evaluation import conversation_metrics
from plumbing.run.measures import estimate, measures
from plumbing.turns.conversations import Conversation, Conversations

NO_ANSWERS = ("format", "code", "ifeval", "environment")  # sources whose responses have nothing to vote for


@dataclass
class Args(cli.OutputArgs, cli.PretrainedArgs, cli.PromptArgs, cli.ScoringArgs, cli.SamplingArgs, cli.ConversationArgs):
    num_prompts: NonNegativeInt = 0
    """Prompts to take, the first ones of the data set, of a list in turns; 0 for all."""
    samples: Annotated[int, Field(ge=0, le=512)] = 0
    """Responses a prompt (n); 0: 8, or 1 if --temperature is 0."""
    k: tuple[PositiveInt, ...] = ()
    """The k of pass@k and maj@k; default: the powers of two up to n."""
    temperature: cli.NonNegativeFloat = 1.0
    """Sampling temperature; 0 for the greedy response."""
    max_response_length: PositiveInt = 1024
    """Most tokens of a response; of a conversation with its observations."""
    require_stop: bool = True
    """Count a response as correct only if it ended with a stop token, as training's held-out accuracy does."""
    backend: Literal["hf", "vllm"] = "hf"
    """What generates: the sampler of training, on transformers (hf), or vLLM in this process."""
    micro_batch_tokens: PositiveInt = 16_384
    """Tokens, padding included, of a reward model's forward pass. Memory and speed only."""

    RULES = {
        "--samples above 1 requires a --temperature above 0": lambda a: a.temperature or a.samples <= 1,
        "--k must be at most --samples": lambda a: max(a.k, default=1) <= (a.samples or (8 if a.temperature else 1)),
        "--precision float64 requires --backend hf": lambda a: a.backend == "hf" or a.precision != "float64",
        "--temperature must be at most 2 with --backend vllm": lambda a: a.backend == "hf" or a.temperature <= 2,
    }
    async_steps, vllm_tensor_parallel = 0, 1  # no flags, but read by vLLM's engine


def check_args(args: Args) -> tuple[str, int, tuple[int, ...]]:
    """Return the folder of the results, which must be new, n, and every k."""
    n = args.samples or (8 if args.temperature else 1)
    if args.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        utils.fail("--backend vllm: the package vllm is not installed here (requirements.txt has the version)")
    model = "-".join(os.path.normpath(args.model).split(os.sep)[-2:])  # final/ is the name of many
    dataset = os.path.basename(os.path.normpath(args.dataset))
    folder = os.path.join(args.output_dir, args.run_name or f"evaluate__{model}__{dataset}__{args.seed}")
    if os.path.exists(folder):
        utils.fail(f"--run_name {os.path.basename(folder)}: {folder} exists; take another name")
    return folder, n, tuple(sorted(set(args.k))) or tuple(2**i for i in range(n.bit_length()))


def parts(total: int, size: int, name: str, world: utils.World) -> Iterator[slice]:
    """Yield slices of at most `size` that cover `total` items, with a progress bar on rank 0."""
    with tqdm(total=total, desc=name, dynamic_ncols=True, disable=not world.main) as bar:
        utils.progress_bars[:] = [bar]
        for start in range(0, total, size):
            yield slice(start, start + size)
            bar.update(min(size, total - start))


def generate(rows: list[dict], keys: list[tuple], model, engine, stop_ids, autocast, args) -> list[list[int]]:
    """Return a response to each row as token ids, with its stop token; `keys` name its random numbers."""
    queries, draws, never = [row["query"] for row in rows], [utils.generator(*key) for key in keys], lambda: False
    if engine is not None:
        seeds = [int(draw.integers(2**62)) for draw in draws] if args.temperature else None
        sampled = engine.generate(queries, seeds, stop_ids, args, never)
        return sampled[0] if sampled else utils.fail(f"--backend vllm: {engine.failure}", True)
    uniforms = None
    if args.temperature:
        uniforms = torch.from_numpy(np.stack([draw.random(args.max_response_length) for draw in draws]))  # (N, T)
    with autocast():
        responses, values = grpo.generate(model, queries, uniforms, stop_ids, args, never)
    if not all(math.isfinite(x) for row in values for x in row["rollout_logprobs"]):
        utils.fail("--model: its log-probabilities are not finite, so its weights or --precision are to blame", True)
    return responses


def converse(
    rows: list[dict], keys: list[tuple], conversations: Conversations, model, engine, stop_ids, autocast, args
) -> list[Conversation]:
    """Return a response of several turns to each row; `keys` name its random numbers."""
    generators, draws, never = [utils.generator(*key) for key in keys], None, lambda: False
    seeds = [int(rng.integers(2**62)) for rng in generators]  # of tools and environments
    if args.temperature and engine is not None:
        draws = [rng.integers(2**62, size=args.max_turns) for rng in generators]
    elif args.temperature:
        draws = [rng.random(args.max_response_length) for rng in generators]
    decode = functools.partial(in_batches, grpo.generate, model=model, stop_ids=stop_ids, args=args, interrupted=never)
    with autocast():
        talks = conversations.sample(rows, seeds, draws, never, engine, decode)
    if talks is None:
        utils.fail(f"--backend vllm: {engine.failure}", True)
    if not all(math.isfinite(x) for talk in talks for x in talk.values["rollout_logprobs"]):
        utils.fail("--model: its log-probabilities are not finite, so its weights or --precision are to blame", True)
    return talks


def show(args: Args, results: dict) -> None:
    """Print the results, a line for each number."""
    print(f"{args.model} on {args.dataset}: {results['prompts']} prompts x {results['samples']} responses")
    lines = [(name, measure, x) for name, scores in results["scores"].items() for measure, x in scores.items()]
    lines += [(name, "mean reward", x) for name, x in results["rewards"].items()]
    for part, scores in results["datasets"].items():
        lines += [(f"{part} {name}", measure, x) for name, own in scores.items() for measure, x in own.items()]
    for name, measure, x in lines:
        interval = "  95% interval {:.4g} to {:.4g}".format(*x["ci95"]) if x["ci95"] else ""
        print(f"  {name:<16} {measure:<12} {x['value']:<8.4g}{interval}")
    print(f"stopped: {results['stopped']:.1%}; mean length {results['response_tokens']['mean']:.1f} tokens")
    for name, value in results["conversations"].items():
        print(f"  {name:<32} {value:.4g}")


def main(args: Args) -> None:
    # ---- set up: data, rewards, model ----
    folder, n, ks = check_args(args)
    world = utils.setup_processes()
    tokenizer = models.load_tokenizer(args.model, args.chat_template)
    stop_ids = models.stop_token_ids(tokenizer, args.model, args.stop_token)
    conversations = load_conversations(args, tokenizer, stop_ids)
    tools, answer_for = conversations and conversations.schemas, needs_answer
    prompts = data.load_prompts("--dataset", args.dataset, "test", tokenizer, args, answer_for, tools)
    prompts = data.first_prompts(prompts, args.num_prompts)
    data.check_lengths(args, prompts)
    if world.any(len(prompts) < world.size):  # asked together, so that no rank is gone before the others have joined
        utils.fail(f"--dataset {args.dataset}: has {len(prompts)} prompts for {world.size} processes")
    rewards = Rewards(args, tokenizer, prompts, conversations is not None)
    precision = models.precision(args.precision, world.device)
    param_dtype, _, compute_dtype, autocast = precision
    model = engine = None
    if args.backend == "vllm":
        from plumbing.rollout.vllm_engine import Engine

        engine = Engine(args, world, compute_dtype, load_format="auto")
    else:
        model = models.load_model("--model", args.model, param_dtype, world.device).requires_grad_(False).eval()
        models.check_decodes(f"--model {args.model}", model, "--backend vllm")
    rewards.load_models(args, precision)

    # ---- generate and score: this rank's prompts, the n responses to each next to each other ----
    mine = [(place, row, number) for place, row in world.shard(list(enumerate(prompts))) for number in range(n)]
    rows, keys = [row for _, row, _ in mine], [("evaluate", args.seed, place, number) for place, _, number in mine]
    # vLLM starts the next response when one ends, so its parts are larger: they are for the progress bar only.
    size, begin, responses, talks = args.generation_batch_size, time.perf_counter(), [], []
    for part in parts(len(rows), 8 * size if engine else size, "generate", world):
        if conversations:
            talks += converse(rows[part], keys[part], conversations, model, engine, stop_ids, autocast, args)
        else:
            responses += generate(rows[part], keys[part], model, engine, stop_ids, autocast, args)
    if conversations:
        rows, responses = [talk.scored_row() for talk in talks], [talk.response for talk in talks]
    seconds = max(world.all_gather([time.perf_counter() - begin]))
    texts = [tokenizer.decode(response, skip_special_tokens=True) for response in responses]
    scores: dict[str, list[float]] = {name: [] for name in args.reward}
    for part in parts(len(rows), size, "score", world):
        for name, new in rewards.score(rows[part], texts[part], responses[part]).items():
            scores[name] += new
    if conversations:
        scores = dict(zip(scores, conversations.leave_out_failed(talks, list(scores.values()))))

    # ---- judge: which responses are correct, and what they vote for ----
    if conversations:
        stopped = [talk.stopped for talk in talks]
        said = [talk.turns[-1]["content"] if talk.turns else "" for talk in talks]  # the answer, in the last turn
        tokens = [sum(talk.values["response_mask"]) for talk in talks]  # the model's
        endings = [{"stop_reason": talk.stop_reason, "turns": talk.turns} for talk in talks]
    else:
        stopped = [response[-1] in stop_ids for response in responses]
        said, tokens = texts, [len(response) for response in responses]
        endings = [{"stop_reason": "stop" if stop else "length"} for stop in stopped]
    by_prompt = lambda items: [items[i : i + n] for i in range(0, len(items), n)]
    correct, answers = {}, {}  # {how it is scored: [of each response]}, twice
    judge_of = lambda row: next((name for name in rewards.verifiers if is_scored_by(row, name)), None)
    for judge in dict.fromkeys(filter(None, map(judge_of, prompts))):  # one, unless rows name their sources
        counts = [judge_of(row) == judge and (stop or not args.require_stop) for row, stop in zip(rows, stopped)]
        correct[judge] = [count and score >= 1 for count, score in zip(counts, scores[judge])]
        counted = [text if count else "" for text, count in zip(said, counts)]  # "" does not vote
        if judge == "math":
            answers[judge] = list(map(plain_answer, counted))
        else:
            answers[judge] = [None if judge in NO_ANSWERS else voted_answer(judge, text) for text in counted]
    if all("#### " in str(row["answer"]) for row in prompts):
        references = [harness_text(str(row["answer"])) for row in rows]
        for name, flexible in (("gsm8k_strict", False), ("gsm8k_flexible", True)):
            answers[name] = [harness_answer(text, flexible) for text in said]
            correct[name] = [answer == reference for answer, reference in zip(answers[name], references)]
    own_scores = lambda row: {name: column for name, column in scores.items() if is_scored_by(row, name)}
    judges = lambda row: [name for name in correct if name not in scores or name == judge_of(row)]
    samples = [
        {
            "index": place, "sample": number, "prompt": rows[i]["prompt"], "answer": row["answer"],
            "response": texts[i], "dataset": row["dataset"], "tokens": tokens[i], **endings[i],
            **{f"reward/{name}": column[i] for name, column in own_scores(row).items()},
            **{f"correct/{name}": correct[name][i] for name in judges(row)},
            **{f"extracted/{name}": answers[name][i] for name in judges(row)},
        }
        for i, (place, row, number) in enumerate(mine)
    ]  # fmt: skip
    samples = [sample for group in world.unshard(by_prompt(samples), len(prompts)) for sample in group]
    talks = [talk for group in world.unshard(by_prompt(talks), len(prompts)) for talk in group] if conversations else []

    # ---- results ----
    # P lists of n, over all prompts or those of one data set, without prompts whose rows name other sources.
    column = lambda name, part="": by_prompt([s[name] for s in samples if name in s and part in ("", s["dataset"])])
    voted = {name: column(f"extracted/{name}") for name in answers if name not in NO_ANSWERS}

    def scores_of(part: str) -> dict:
        found = {}
        for name in correct:
            said, right = (column(f"{what}/{name}", part) for what in ("extracted", "correct"))
            if right:
                found[name] = measures(right, said if name in voted else None, ks)
        return found

    datasets = list(dict.fromkeys(sample["dataset"] for sample in samples))
    mean_rewards = {}
    for name in args.reward:
        asked = column(f"reward/{name}")
        if not asked:
            continue
        scored = [[x for x in row if not math.isnan(x)] for row in asked]
        missing = len(asked) * n - sum(map(len, scored))
        reasons = [*world.all_gather([rewards.sources[name].failure]), *(talk.error for talk in talks)]
        why = next(filter(None, reasons), "it returned None, NaN or infinity")
        if missing == len(asked) * n:
            utils.fail(f"--reward {name}: no response got a score ({why})")
        if missing:
            utils.warn(f"--reward {name}: {missing} of {len(asked) * n} responses got no score ({why})")
        mean_rewards[name] = {**estimate([sum(row) / len(row) for row in scored if row]), "missing": missing}
    lengths = [sample["tokens"] for sample in samples]
    results = {
        "scores": scores_of(""),
        "datasets": {part: scores_of(part) for part in datasets} if len(datasets) > 1 else {},
        "rewards": mean_rewards,
        "prompts": len(prompts),
        "samples": n,
        "stopped": sum(world.all_gather(stopped)) / len(samples),
        "conversations": conversation_metrics(talks),
        "without_answer": {name: sum(row.count(None) for row in rows) / len(rows) / n for name, rows in voted.items()},
        "response_tokens": {"mean": sum(lengths) / len(lengths), "max": max(lengths)},
        "generation": {"seconds": seconds, "tokens_per_second": sum(lengths) / seconds, "ranks": world.size},
        "args": asdict(args),
        "versions": resume.versions(),
        "git_commit": resume.git_commit(),
    }

    def write(path: str) -> None:
        with open(os.path.join(path, "results.json"), "w") as file:
            json.dump(results, file, indent=2, allow_nan=False)
        with open(os.path.join(path, "samples.jsonl"), "w") as file:
            for sample in samples:
                file.write(json.dumps(run_log.finite(sample), allow_nan=False, default=str) + "\n")

    checkpoints.save_folder(folder, world, lambda path: world.on_main(lambda: write(path)))
    if world.main:
        show(args, results)
        print(os.path.join(folder, "results.json"), flush=True)


if __name__ == "__main__":
    try:
        main(cli.parse(Args))
    except KeyboardInterrupt:
        for bar in utils.progress_bars:
            bar.close()  # which ends the bar's line
        sys.exit("interrupted: nothing was written")
