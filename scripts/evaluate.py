"""Measures a model on a data set, with the data and reward code of the training: avg@n, pass@k and maj@k with 95%
confidence intervals. Writes results.json and samples.jsonl (every response) into OUTPUT_DIR/RUN_NAME.

    python scripts/evaluate.py --model runs/my-run/final --samples 8                       # GSM8K's test split
    python scripts/evaluate.py --model Qwen/Qwen2.5-7B-Instruct --temperature 0 --backend vllm
    torchrun --nproc_per_node 8 scripts/evaluate.py --model Qwen/Qwen2.5-7B-Instruct       # prompts spread over GPUs

n is --samples, P the number of prompts. Every number below is a mean over prompts of a value of each prompt:
1. avg@n: the share of its n responses that are correct: the first source of --reward that is no model gives 1 or more
   and, with --require_stop, the response ended by itself. A missing score is not correct; it is counted and warned of.
2. pass@k: the probability that k of its n responses, drawn without replacement, hold a correct one
   (arXiv:2107.03374, eq. 1). pass@1 is avg@n.
3. maj@k: the probability that the majority vote of k of its n responses, drawn likewise, is correct. Each response
   votes for its final answer; one without any, or cut off under --require_stop, does not vote. Ties are broken by lot,
   and if no one votes, the vote is wrong. The expectation over draws and lots is computed exactly, not sampled; where
   equal answers got different scores, an answer is right to the share of them that is correct.
   Answers are equal as mathematics with --reward math, else as text (see `read_answer`); format and code have none.
4. Intervals take the prompts, not the responses, as the independent draws (arXiv:2411.00640, section 2.2): "se" is the
   standard deviation over prompts / sqrt(P), "ci95" Wilson's interval for as many independent draws as have this
   standard error (see `estimate`). Means of rewards have value +- 1.96 se.
5. Where every answer of the data set has a "####" (GSM8K), gsm8k_strict and gsm8k_flexible hold beside it what
   lm-evaluation-harness calls strict-match and flexible-extract: the first "#### number", the last number. Both read
   the text alone, however it ended.
6. With transformers, each response has random numbers of its own, a function of the seed, its prompt's place in the
   data set and its number: neither ranks, nor --generation_batch_size, nor more --samples or --num_prompts change it.
"""

import atexit
import contextlib
import functools
import importlib.util
import json
import math
import os
import re
import signal
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from plumbing import verifiers as verifier

VOTE = sys.argv[1:2] == ["vote"] and __name__ == "__main__"  # a process of `Voters`, which needs little of this
if not VOTE:  # these take seconds
    import numpy as np
    import torch
    import tyro
    from tqdm import tqdm

    import grpo
    import utils
    from plumbing import checkpoints, data, evaluation, models, run_log
    from plumbing.reward_worker import Worker
    from plumbing.rewards import Rewards, check_sources, is_reward_model, needs_answer, worker_count


@dataclass
class Args:
    # ---- run ----
    run_name: str = ""
    """Name of the folder with the results; default: model, data set and seed."""
    output_dir: str = "runs"
    """Folder that holds it."""
    seed: int = 1
    """Seed of the sampling."""

    # ---- model ----
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """Model to evaluate: a causal language model's folder or hub name."""
    backend: Literal["hf", "vllm"] = "hf"
    """What generates: the sampler of the training, on transformers (hf), or vLLM's engine."""
    precision: Literal["auto", "float32", "float64", "bf16"] = "auto"
    """As in the training: bf16 computes in bfloat16, with float32 weights (transformers) or bfloat16 ones (vllm);
    auto is bf16 on GPUs and float32 elsewhere."""
    kv_cache_gb: float = 0.0
    """GB that vLLM's cache takes; 0: what is free on a GPU, 1 on a CPU."""

    # ---- data ----
    dataset: str = "openai/gsm8k"
    """Prompts: arithmetic (built in), reasoning_gym:TASK, a .jsonl, .json or .parquet file, a folder, or
    owner/name[:config] on the hub."""
    dataset_split: str = "test"
    """Split of --dataset to evaluate on."""
    num_prompts: int = 0
    """Prompts to take, the first ones of the data set; 0 for all."""
    prompt_column: str = ""
    """Column of the prompt, text or messages; default: the first known one, as in the training."""
    answer_column: str = ""
    """Column of the reference answer; default: the first known one, as in the training."""
    system_prompt: str = "Please reason step by step, and put your final answer within \\boxed{}."
    """System turn put before each prompt that has none; "" for none."""
    max_prompt_length: int = 512
    """Most tokens of a prompt; a longer one ends the run at the start, naming its row."""

    # ---- rewards ----
    reward: tuple[str, ...] = ("math",)
    """Reward sources, named as in the training. A response counts as correct if the first one that is no model gives it
    1 or more; of the others the mean is given."""
    reward_model_scale: Literal["raw", "centred", "standardized"] = "raw"
    """Take a reward model's score as it is, minus the mean that its config carries, or divided by its deviation too."""
    reward_timeout: float = 30.0
    """Seconds that one call of a reward source, or the vote on one prompt, may take before it is killed."""
    require_stop: bool = True
    """Count a response as correct only if it ended with a stop token, as the training's held-out accuracy does."""
    micro_batch_tokens: int = 16_384
    """Tokens, padding included, of a reward model's forward pass. Memory and speed only."""

    # ---- sampling ----
    samples: int | None = None
    """Responses a prompt (n); default: 8, or 1 if --temperature is 0."""
    k: tuple[int, ...] = ()
    """The k of pass@k and maj@k; default: the powers of two up to n."""
    max_response_length: int = 1024
    """Most tokens of a response."""
    min_response_length: int = 0
    """Tokens before which a stop token cannot be sampled."""
    temperature: float = 1.0
    """Sampling temperature; 0 for the greedy response."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 for all."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens seen before."""
    stop_token: str = "eos"
    """Token that ends a response: eos (every end token of tokenizer and model) or the text of one token."""
    pad_token: str = ""
    """Padding token for a tokenizer that has none, such as eos."""
    generation_batch_size: int = 512
    """Responses that one device generates at once (transformers) or scores at once. Memory and speed only."""


# ----------------------------------------------------------------------------------------------------------------
# The measures. n responses a prompt, P prompts
# ----------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def majority_at_k(groups: tuple[tuple[int, int], ...], samples: int, ks: tuple[int, ...]) -> list[float]:
    """For each k the probability that the majority vote of k responses, drawn without replacement, is correct.

    Args:
        groups: (votes, correct ones among them) of each answer.
        samples: n; those that are in no group do not vote.

    For every t, sum over the draws in which t votes win: the r answers that have exactly t share the draw. Answers with
    less than t votes in all can do as they like; those with more are taken in one after the other.
    """
    most, wins = max(ks), dict.fromkeys(ks, 0.0)
    for t in range(1, min(most, max((votes for votes, _ in groups), default=0)) + 1):
        able = [(votes, correct / votes) for votes, correct in groups if votes >= t]
        others = samples - sum(votes for votes, _ in able)
        # [r, s]: ways to draw s votes from `able` so that r answers have t and none more; right: sum of their shares
        ways = np.zeros((1 + min(len(able), most // t), most + 1))
        ways[0, 0], right = 1.0, np.zeros_like(ways)
        for votes, share in able:
            new_ways, new_right = np.zeros_like(ways), np.zeros_like(ways)
            for j in range(t):
                new_ways[:, j:] += math.comb(votes, j) * ways[:, : most + 1 - j]
                new_right[:, j:] += math.comb(votes, j) * right[:, : most + 1 - j]
            before, count = np.s_[:-1, : most + 1 - t], math.comb(votes, t)
            new_ways[1:, t:] += count * ways[before]
            new_right[1:, t:] += count * (right[before] + share * ways[before])
            ways, right = new_ways, new_right
        won = (right[1:] / np.arange(1, len(right))[:, None]).sum(0)  # (most + 1,)
        for k in ks:
            wins[k] += sum(won[s] * math.comb(others, k - s) for s in range(t, k + 1))
    return [round(float(wins[k] / math.comb(samples, k)), 12) for k in ks]  # 1, where it is 1


def estimate(values: list[float], draws: float = 0) -> dict:
    """The mean over prompts, its standard error, and a 95% interval.

    Args:
        values: one a prompt, NaN for a prompt that has none.
        draws: independent draws that a value rests on at most, n / k, if the values are probabilities; else 0.

    Numbers in general get value +- 1.96 se. Probabilities get Wilson's interval, with the number of independent draws
    that has this standard error, p (1 - p) / se^2, between P and P * `draws`, as its size (Dean and Pagano 2015,
    "Evaluating confidence interval methods for binomial proportions in clustered surveys"): it stays within [0, 1], and
    still has a width where all prompts are alike, where value +- 1.96 se has none.
    """
    values = [x for x in values if math.isfinite(x)]
    count, z = len(values), 1.959964
    if not count:
        return {"value": None, "se": None, "ci95": None}
    mean = math.fsum(values) / count
    if count == 1:
        return {"value": mean, "se": None, "ci95": None}
    variance = math.fsum((x - mean) ** 2 for x in values) / (count - 1) / count
    middle, half = mean, z * math.sqrt(variance)
    if draws:
        spread = mean * (1 - mean)
        # all alike, up to rounding: nothing to go by
        size = min(max(count, spread / variance), count * draws) if variance > 1e-24 else count
        middle = (mean + z**2 / (2 * size)) / (1 + z**2 / size)
        half = z / (1 + z**2 / size) * math.sqrt(spread / size + z**2 / (4 * size**2))
    ci = (middle - half, middle + half)
    return {"value": mean, "se": math.sqrt(variance), "ci95": [min(max(x, 0.0), 1.0) if draws else x for x in ci]}


def measures(correct: list[list[bool]], answers: list[list[str | None]] | None, ks: tuple[int, ...]) -> dict:
    """{"avg@n", "pass@k" and, if there are answers to vote with, "maj@k" of each k: `estimate`}.

    Args:
        correct, answers: of the n responses of each prompt.
    """
    n = len(correct[0])
    results = {f"avg@{n}": estimate([sum(row) / n for row in correct], n)}
    for k in ks:
        results[f"pass@{k}"] = estimate([evaluation.pass_at_k(n, sum(row), k) for row in correct], n / k)
    if answers is not None:
        votes = [vote_counts(row, said) for row, said in zip(correct, answers)]
        won = [majority_at_k(groups, n, ks) for groups in votes]
        results |= {f"maj@{k}": estimate([row[i] for row in won], n / k) for i, k in enumerate(ks)}
    return results


def vote_counts(correct: list[bool], answers: list[str | None]) -> tuple[tuple[int, int], ...]:
    """Votes for each answer, and correct ones among them; None is no vote."""
    groups: dict[str, tuple[int, int]] = {}
    for right, answer in zip(correct, answers):
        votes, good = groups.get(answer, (0, 0))
        groups[answer] = (votes + 1, good + right)
    groups.pop(None, None)
    return tuple(sorted(groups.values()))


# ----------------------------------------------------------------------------------------------------------------
# Final answers, to vote with
# ----------------------------------------------------------------------------------------------------------------


def answer_text(response: str) -> str | None:
    """The final answer of a response: verifier.py's `final_answer`, else the rest of the line after the last "####",
    else all that follows </think>; without dollar signs, a final full stop, thousands separators and differences in
    case or white space."""
    answer = verifier.final_answer(response)
    if answer is None:
        marked = re.findall(r"####[ \t]*(\S.*)", response)
        answer = marked[-1] if marked else response.rpartition("</think>")[2]
    answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", " ".join(answer.replace("$", " ").split()).rstrip(". "))
    return answer.casefold() or None


def harness_answer(response: str, flexible: bool) -> str | None:
    """What lm-evaluation-harness takes as the answer (lm_eval/tasks/gsm8k, version 3), as `harness_text`."""
    if not flexible:
        found = re.findall(r"#### (\-?[0-9\.\,]+)", response)[:1]
    else:
        found = ["".join(match) for match in re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", response)[-1:]]
    return harness_text(found[0]) or None if found else None


def harness_text(text: str) -> str:
    """An answer, or a reference solution, as lm-evaluation-harness compares them."""
    for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(ignored, "", text)
    return text.strip().lower()


def group_as_mathematics(responses: list[str]) -> list[str | None]:
    """The final answer of each response as math-verify reads it, in the words of the first one that is equal to it."""
    from math_verify import verify

    words, groups = {}, []  # what an answer's text stands for; (text, parsed) of each group
    answers = []
    for response in responses:
        text = None
        with contextlib.suppress(Exception):  # as in the reward: what cannot be read is no answer
            parsed = verifier.parse_response(response)
            text = str(parsed[-1]) if parsed else None
        if text is not None and text not in words:
            for first, other in groups:
                with contextlib.suppress(Exception):
                    if verify(other, parsed, timeout_seconds=None):
                        words[text] = first
                        break
            else:
                groups.append((text, parsed))
                words[text] = text
        answers.append(words.get(text))
    return answers


def serve_votes(timeout: float) -> None:
    """What a process of `Voters` does: a list of responses in, a list of answers out, a line of JSON each."""
    import logging

    logging.disable(logging.WARNING)  # math-verify warns at every call that its time limits are off
    group_as_mathematics(["1", "\\boxed{2}"])  # imports all there is
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, timeout + 5)  # if the caller, who kills this process, is gone
        print(json.dumps(group_as_mathematics(json.loads(line))), flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)


class Voters:
    """Processes that run `group_as_mathematics`, one prompt at a time, and are killed when they get stuck."""

    def __init__(self, timeout: float):
        self.timeout, self.failures = timeout, 0
        self.workers: list[Worker | None] = [None] * worker_count()
        atexit.register(self.close)

    def vote(self, prompts: list[list[str]], progress) -> list[list[str | None]]:
        """The answers of the responses to each prompt."""
        count = len(self.workers)
        answers: list = [None] * len(prompts)

        def share(index: int) -> None:
            for i in range(index, len(prompts), count):
                answers[i] = self.ask(index, prompts[i])
                progress.update()

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(share, range(count)))
        return answers

    def ask(self, index: int, responses: list[str]) -> list[str | None]:
        """The answers by process `index`; by `answer_text` if it takes too long or dies, and a new one comes next."""
        said, worker = "ready", self.workers[index]
        if worker is None:
            worker = self.workers[index] = Worker(os.path.abspath(__file__), "vote", str(self.timeout))
            said = worker.receive(timeout=300.0)  # importing may take long on a busy file system
        if said == "ready":
            worker.send(responses)
            said = worker.receive(self.timeout)
        if isinstance(said, list):
            return said
        self.workers[index] = None
        self.failures += 1
        return [answer_text(response) for response in responses]

    def close(self) -> None:
        for worker in filter(None, self.workers):
            worker.kill()


NO_ANSWERS = ("format", "code")  # sources whose responses have nothing to vote for


def read_answer(source: str, text: str) -> str | None:
    """What a response votes for: with gsm8k its last "#### number", with exact all of it, else `answer_text`."""
    if source == "gsm8k":  # as in verifier.py
        found = re.findall(r"####\s*(-?[$]?[\d,]*\.?\d+)", text)
        return verifier.plain_number(found[-1]) if found else None
    return text.strip() or None if source == "exact" else answer_text(text)


# ----------------------------------------------------------------------------------------------------------------
# Generation: the n responses of each prompt one after the other, as token ids with their stop token
# ----------------------------------------------------------------------------------------------------------------


def generate_transformers(
    prompts: list[tuple[int, dict]], model, tokenizer, stop_ids, args, n: int, autocast, progress
):
    """The responses of grpo.py's sampler to prompts, each with its place in the data set."""
    responses, jobs = [], [(index, j, row["query"]) for index, row in prompts for j in range(n)]
    for start in range(0, len(jobs), args.generation_batch_size):
        part, uniforms = jobs[start : start + args.generation_batch_size], None
        if args.temperature > 0:
            keys = [("evaluate", args.seed, index, j) for index, j, _ in part]
            numbers = [utils.generator(*key).random(args.max_response_length) for key in keys]
            uniforms = torch.from_numpy(np.stack(numbers))  # (N, T)
        queries = [query for *_, query in part]
        with autocast():
            new, logprobs = grpo.generate(
                model, queries, uniforms, stop_ids, tokenizer.pad_token_id, args, lambda: False
            )
        if not all(math.isfinite(x) for row in logprobs for x in row):
            utils.fail(
                "--model: its log-probabilities are not finite, so its weights or --precision are to blame", True
            )
        responses += new
        progress.update(len(part))
    return responses


def generate_vllm(prompts: list[tuple[int, dict]], stop_ids: list[int], args, n: int, world, dtype: str):
    """The responses of vLLM's engine, in this process; the engine, which is kept to the end."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    on_cpu = world.device.type == "cpu"
    options = {}
    if on_cpu or args.kv_cache_gb:  # on a CPU, vLLM would take nearly all memory
        options["kv_cache_memory_bytes"] = int((args.kv_cache_gb or 1) * 2**30)
    if world.size > 1:
        options["distributed_executor_backend"] = "external_launcher"
    try:
        llm = LLM(
            args.model, dtype=dtype, seed=0, enforce_eager=on_cpu, generation_config="vllm",
            max_model_len=max(len(row["query"]) for _, row in prompts) + args.max_response_length, **options,
        )  # fmt: skip
    except (ValueError, RuntimeError, OSError) as error:
        utils.fail(f"--backend vllm: cannot run --model {args.model} ({utils.first_line(error)})")
    # A request with seed s draws its n responses with s ... s + n - 1, of which a CPU takes 32 bits.
    base = int(utils.generator("evaluate vllm", args.seed).integers(2**31))
    settings = [
        SamplingParams(
            n=n, seed=base + index * n, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k,
            repetition_penalty=args.repetition_penalty, max_tokens=args.max_response_length,
            min_tokens=args.min_response_length, stop_token_ids=stop_ids, ignore_eos=True, detokenize=False,
        )
        for index, _ in prompts
    ]  # fmt: skip
    queries = [{"prompt_token_ids": row["query"]} for _, row in prompts]
    outputs = llm.generate(queries, settings, use_tqdm=world.main)
    completions = [c for output in outputs for c in sorted(output.outputs, key=lambda c: c.index)]
    bad = next((c.finish_reason for c in completions if c.finish_reason not in ("stop", "length")), "")
    if bad:
        utils.fail(f"--backend vllm: a response ended with {bad!r}", local=True)
    return [grpo.truncate_at_stop(list(c.token_ids), stop_ids) for c in completions], llm


# ----------------------------------------------------------------------------------------------------------------


def check_args(args: Args) -> tuple[str, int, tuple[int, ...]]:
    """End the run for flags that are out of range. Returns the folder of the results, n, and every k."""
    for name in (
        "generation_batch_size", "max_prompt_length", "max_response_length", "micro_batch_tokens", "reward_timeout",
        "repetition_penalty",
    ):  # fmt: skip
        if not 0 < getattr(args, name) < math.inf:
            utils.fail(f"--{name} {getattr(args, name)}: has to be above 0")
    for name in ("temperature", "top_k", "num_prompts", "seed", "kv_cache_gb"):
        if not 0 <= getattr(args, name) < math.inf:
            utils.fail(f"--{name} {getattr(args, name)}: has to be 0 or more")
    if not 0 < args.top_p <= 1:
        utils.fail(f"--top_p {args.top_p}: has to lie in (0, 1]")
    if not 0 <= args.min_response_length <= args.max_response_length:
        utils.fail(f"--min_response_length {args.min_response_length}: has to lie between 0 and --max_response_length")
    n = args.samples if args.samples is not None else 8 if args.temperature else 1
    if not 1 <= n <= 512:
        utils.fail(f"--samples {n}: has to lie between 1 and 512")
    if not args.temperature and n > 1:
        utils.fail(f"--samples {n}: with --temperature 0 all of them would be the same; take 1")
    if not all(1 <= k <= n for k in args.k):
        utils.fail(f"--k {' '.join(map(str, args.k))}: each has to lie between 1 and --samples {n}")
    check_sources(args.reward)
    if args.backend == "vllm":
        if importlib.util.find_spec("vllm") is None:
            utils.fail("--backend vllm: the package vllm is not installed here (requirements.txt has the version)")
        if args.precision == "float64":
            utils.fail("--precision float64: takes --backend hf")
        if args.temperature > 2:
            utils.fail(f"--temperature {args.temperature}: --backend vllm takes at most 2")
    model = "-".join(os.path.normpath(args.model).split(os.sep)[-2:])  # final/ is the name of many
    dataset = os.path.basename(os.path.normpath(args.dataset))
    folder = os.path.join(args.output_dir, args.run_name or f"evaluate__{model}__{dataset}__{args.seed}")
    if os.path.exists(folder):
        utils.fail(f"--run_name {os.path.basename(folder)}: {folder} exists; take another name")
    powers = tuple(2**i for i in range(n.bit_length()))
    return folder, n, tuple(sorted(set(args.k))) or powers


def show(results: dict) -> None:
    """Print the results as a table."""
    import rich.box
    import rich.console
    import rich.table

    def cell(x: dict | None) -> str:
        if not x or x["value"] is None:
            return ""
        return f"{x['value']:.4g}" + (f"  [{x['ci95'][0]:.4g}, {x['ci95'][1]:.4g}]" if x["ci95"] else "")

    scores, rewards = results["scores"], results["rewards"]
    console = rich.console.Console()
    if scores:
        table = rich.table.Table("", *scores, box=rich.box.SIMPLE_HEAD)
        for name in dict.fromkeys(name for each in scores.values() for name in each):
            table.add_row(name, *(cell(each.get(name)) for each in scores.values()))
        console.print(table)
    for name, each in rewards.items():
        if name in scores and each["value"] == scores[name][f"avg@{results['samples']}"]["value"]:
            continue  # the reward is 1 or 0, and the table has said it
        console.print(f"mean reward {name}: {cell(each)}", highlight=False, markup=False)


def main(args: Args) -> None:
    # ---- set up -----------------------------------------------------------------------------------------------------
    folder, n, ks = check_args(args)
    world = utils.setup_processes()
    tokenizer = models.load_tokenizer(args.model, args.pad_token)
    stop_ids = models.stop_token_ids(tokenizer, args.model, args.stop_token)
    prompts = data.load_prompts("--dataset", args.dataset, args.dataset_split, tokenizer, args, needs_answer(args))
    prompts = prompts[: args.num_prompts or None]
    if world.any(len(prompts) < world.size):  # asked together, so that no rank is gone before the others have joined
        utils.fail(f"--dataset {args.dataset}: has {len(prompts)} prompts for {world.size} processes")
    rewards = Rewards(args.reward, args.reward_timeout, tokenizer)
    voters = Voters(args.reward_timeout)

    stored, _, half, autocast = models.precision(args.precision, world.device)
    if args.backend == "hf":
        model = models.load_model("--model", args.model, stored, world.device).requires_grad_(False).eval()
    rewards.load_models(args.reward_model_scale, stored, world.device, autocast, args.micro_batch_tokens)

    # ---- generate: this rank's prompts, all n responses of each -----------------------------------------------------
    def bar(name: str, total: int) -> tqdm:
        for finished in utils.progress_bars:
            finished.close()
        unit = " prompts" if name == "vote" else " responses"
        utils.progress_bars[:] = [tqdm(total=total, desc=name, unit=unit, dynamic_ncols=True, disable=not world.main)]
        return utils.progress_bars[0]

    mine = world.shard(list(enumerate(prompts)))
    begin = time.perf_counter()
    if args.backend == "vllm":
        responses, engine = generate_vllm(mine, stop_ids, args, n, world, "bfloat16" if half else "float32")
    else:
        progress = bar("generate", len(mine) * n)
        responses = generate_transformers(mine, model, tokenizer, stop_ids, args, n, autocast, progress)
    seconds = time.perf_counter() - begin

    # ---- score and vote ---------------------------------------------------------------------------------------------
    rows = [row for _, row in mine for _ in range(n)]
    texts = [tokenizer.decode(response, skip_special_tokens=True) for response in responses]
    scored: dict[str, list[float]] = {name: [] for name in args.reward}
    progress = bar("score", len(rows))
    for i in range(0, len(rows), args.generation_batch_size):
        cut = slice(i, i + args.generation_batch_size)
        for name, new in rewards.score(rows[cut], texts[cut], responses[cut]).items():
            scored[name] += new
        progress.update(len(rows[cut]))
    parts = {name: torch.tensor(column, dtype=torch.float64) for name, column in scored.items()}
    stopped = torch.tensor([response[-1] in stop_ids for response in responses])
    valid = stopped if args.require_stop else torch.ones_like(stopped)
    correct = evaluation.correct_responses(types.SimpleNamespace(parts=parts, stopped=valid))
    judge = next((name for name in args.reward if not is_reward_model(name)), "")

    by_prompt = lambda items: [list(items[i : i + n]) for i in range(0, len(items), n)]
    heard = [text if ok else "" for text, ok in zip(texts, valid.tolist())]  # "" does not vote
    right: dict[str, list[bool]] = {}  # of each way to score, the responses that are correct,
    said: dict[str, list[str | None]] = {}  # and what they vote for
    if judge:
        right[judge] = correct.tolist()
        said[judge] = [None if judge in NO_ANSWERS else read_answer(judge, text) for text in heard]
        if judge == "math":
            said[judge] = [x for row in voters.vote(by_prompt(heard), bar("vote", len(mine))) for x in row]
    if all("#### " in str(row["answer"]) for row in prompts):
        references = [harness_text(str(row["answer"])) for row in rows]
        for name in ("gsm8k_strict", "gsm8k_flexible"):
            said[name] = [harness_answer(text, name == "gsm8k_flexible") for text in texts]
            right[name] = [answer == reference for answer, reference in zip(said[name], references)]
    utils.progress_bars[0].close()

    samples = []
    for i, row in enumerate(rows):
        sample = {
            "index": mine[i // n][0], "sample": i % n, "prompt": row["prompt"], "answer": row["answer"],
            "response": texts[i], "tokens": len(responses[i]), "stop_reason": "stop" if stopped[i] else "length",
            **{f"reward/{name}": column[i] for name, column in scored.items()},
        }  # fmt: skip
        for name in right:
            sample |= {f"correct/{name}": right[name][i], f"extracted/{name}": said[name][i]}
        samples.append(sample)
    samples = [sample for group in world.unshard(by_prompt(samples), len(prompts)) for sample in group]
    failures, seconds = sum(world.all_gather([voters.failures])), max(world.all_gather([seconds]))

    # ---- results ----------------------------------------------------------------------------------------------------
    column = lambda name: by_prompt([sample[name] for sample in samples])
    missing = {name: sum(math.isnan(sample[f"reward/{name}"]) for sample in samples) for name in scored}
    for name, count in missing.items():
        why = "; ".join(dict.fromkeys(filter(None, world.all_gather([rewards.why_missing({name: parts[name]})]))))
        if count == len(samples):
            utils.fail(f"--reward {name}: no response got a score ({why})")
        if count:
            utils.warn(f"--reward {name}: {count} of {len(samples)} responses got no score ({why})")
    if failures:
        utils.warn(f"the votes on {failures} prompts were not done within --reward_timeout, and were counted as text")
    scores = {
        name: measures(column(f"correct/{name}"), None if name in NO_ANSWERS else column(f"extracted/{name}"), ks)
        for name in right
    }
    mean = lambda row: sum(row) / len(row) if row else math.nan
    means = {name: [mean([x for x in row if x == x]) for row in column(f"reward/{name}")] for name in scored}
    lengths = [sample["tokens"] for sample in samples]
    silent = {name: sum(sample[f"extracted/{name}"] is None for sample in samples) for name in right}
    results = {
        "scores": scores,
        "rewards": {name: {**estimate(values), "missing": missing[name]} for name, values in means.items()},
        "prompts": len(prompts),
        "samples": n,
        "stopped": sum(sample["stop_reason"] == "stop" for sample in samples) / len(samples),
        "without_answer": {name: count / len(samples) for name, count in silent.items() if name not in NO_ANSWERS},
        "response_tokens": {"mean": sum(lengths) / len(lengths), "max": max(lengths)},
        "votes_as_text": failures,
        "generation": {"seconds": seconds, "tokens_per_second": sum(lengths) / seconds, "ranks": world.size},
        "args": asdict(args),
        "versions": run_log.versions(),
        "git_commit": run_log.git_commit(),
    }

    def write(path: str) -> None:
        if world.main:
            with open(os.path.join(path, "results.json"), "w") as file:
                json.dump(results, file, indent=2, allow_nan=False)
            with open(os.path.join(path, "samples.jsonl"), "w") as file:
                file.writelines(
                    json.dumps(run_log.finite(sample), allow_nan=False, default=str) + "\n" for sample in samples
                )

    checkpoints.save_folder(folder, world, write)
    if world.main:
        print(f"{args.model} on {args.dataset}: {len(prompts)} prompts x {n} responses, 95% confidence intervals")
        show(results)
        print(f"stopped by themselves: {results['stopped']:.1%}; mean length {sum(lengths) / len(lengths):.1f} tokens")
        print(os.path.join(folder, "results.json"), flush=True)


if __name__ == "__main__":
    if VOTE:
        serve_votes(float(sys.argv[2]))
    else:
        try:
            main(tyro.cli(Args))
        except KeyboardInterrupt:
            for progress in utils.progress_bars:
                progress.close()  # which ends the bar's line
            sys.exit("interrupted: nothing was written")
