"""Measures what samples: tokens a second of transformers and vLLM, seconds of a weight sync, and whole steps with the
rollout before the training and beside it.

    python scripts/benchmark_rollout.py --output results/rollout.md
"""

import contextlib
import dataclasses
import io
import os
import platform
import statistics
import sys
import tempfile
import time
import types
from dataclasses import dataclass

import torch
import transformers
import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import grpo
import utils
from plumbing import models, run_log, vllm_engine

SHAPES = {  # hidden size, layers, heads, intermediate size, vocabulary, responses, tokens of each at most
    "the demo's model": None,
    "Qwen2 of 10 M parameters": (256, 8, 4, 1024, 8_192, 64, 96),
}


@dataclass
class Args:
    output: str = ""
    """Markdown file to write the tables to; default: to the console only."""
    repeats: int = 5
    """Rollouts of each kind, in turns, of which the median counts."""
    steps: int = 12
    """Steps of the runs that are compared; the first three do not count."""


def make_model(folder: str, shape: tuple) -> str:
    """A random Qwen2 with the demo's tokenizer."""
    hidden, layers, heads, inner, vocabulary, *_ = shape
    config = transformers.Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(f"{utils.ROOT}/assets/tiny").save_pretrained(folder)
    return folder


def rollouts(model_name: str, responses: int, tokens: int, repeats: int) -> dict:
    """Seconds and tokens of the same rollout by transformers and by vLLM in turns, and seconds of a sync."""
    world = utils.World(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    args = grpo.Args(model=model_name, max_prompt_length=16, max_response_length=tokens, rollout_backend="vllm")
    args = dataclasses.replace(args, kv_cache_gb=0.5 if world.device.type == "cpu" else 0.0)
    model = models.load_model("--model", model_name, torch.float32, world.device)
    tokenizer = models.load_tokenizer(model_name, "")
    engine = vllm_engine.Engine(args, world, torch.bfloat16 if world.device.type == "cuda" else None)
    sync = []
    for _ in range(repeats):
        begin = time.perf_counter()
        engine.sync(model)
        sync.append(time.perf_counter() - begin)
    rows = [
        {"prompt": p, "query": tokenizer.encode(p)} for p in (f"{i}+{i}=" for i in range(100, 100 + responses // 8))
    ]
    none = types.SimpleNamespace(score=lambda rows, texts, responses: {"none": [0.0] * len(texts)})
    taken: dict = {"hf": [], "vllm": []}
    autocast = lambda: torch.autocast(world.device.type, torch.bfloat16, enabled=world.device.type == "cuda")
    for i in range(repeats + 1):  # the first of each is a warm-up
        for name, each in (("hf", None), ("vllm", engine)):
            begin = time.perf_counter()
            batch = grpo.rollout(
                rows, 8, ("benchmark", i), model=model, engine=each, tokenizer=tokenizer, stop_ids=[1], rewards=none,
                args=args, interrupt=types.SimpleNamespace(requested=False), world=world, autocast=autocast,
            )  # fmt: skip
            taken[name].append(sum(map(len, batch.responses)) / (time.perf_counter() - begin))
    speed = {name: statistics.median(values[1:]) for name, values in taken.items()}
    ratio = statistics.median(b / a for a, b in zip(taken["hf"][1:], taken["vllm"][1:]))
    return {**speed, "ratio": ratio, "sync": statistics.median(sync), "megabytes": engine.synced / 1e6}


def step_seconds(model_name: str, responses: int, tokens: int, steps: int, **flags) -> tuple[float, float]:
    """Median seconds of a whole step and of its waiting for the rollout, in a run of its own."""
    with tempfile.TemporaryDirectory() as folder:
        args = grpo.Args(
            output_dir=folder, run_name="run", model=model_name, dataset="arithmetic", system_prompt="",
            reward=("gsm8k",), max_prompt_length=16, max_response_length=tokens, rollout_batch_size=responses // 8,
            mini_batch_size=responses, total_episodes=responses * steps, micro_batch_tokens=4096, eval_every=0,
            save_every=0, log_samples=0, kv_cache_gb=0.5 if not torch.cuda.is_available() else 0.0, **flags,
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            grpo.main(args)
        rows = run_log.read_jsonl(os.path.join(folder, "run", "metrics.jsonl"))[3:]
    return tuple(statistics.median(row[key] for row in rows) for key in ("time/step", "time/rollout"))


def main(args: Args) -> None:
    lines: list[str] = []
    show = lambda line: (lines.append(line), print(line, flush=True))
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    show(f"# Rollouts on {device}, {torch.get_num_threads()} thread(s)\n")
    show(f"`python scripts/benchmark_rollout.py`: medians of {args.repeats} in turns; of {args.steps - 3} steps.\n")
    show("| model | responses x tokens | transformers, tokens/s | vLLM, tokens/s | ratio | weight sync |")
    show("|---|---|---|---|---|---|")
    models = {}
    for name, shape in SHAPES.items():
        folder = make_model(tempfile.mkdtemp(), shape) if shape else f"{utils.ROOT}/assets/tiny"
        models[name] = (folder, *(shape[-2:] if shape else (256, 48)))
        got = rollouts(*models[name], args.repeats)
        speed = f"{got['hf']:,.0f} | {got['vllm']:,.0f} | {got['ratio']:.2f}"
        sync = f"{got['sync'] * 1e3:.0f} ms, {got['megabytes']:.1f} MB"
        show(f"| {name} | {models[name][1]} x {models[name][2]} | {speed} | {sync} |")
    show("\n| model | synchronous, s a step | asynchronous, s a step | ratio |")
    show("|---|---|---|---|")
    for name, (folder, responses, tokens) in models.items():
        vllm = dict(rollout_backend="vllm")
        (sync, rollout), (ahead, waits) = (
            step_seconds(folder, responses, tokens, args.steps, **vllm, async_steps=steps) for steps in (0, 1)
        )
        before, beside = f"{sync:.2f}, of which rollout {rollout:.2f}", f"{ahead:.2f}, of which waiting {waits:.2f}"
        show(f"| {name} | {before} | {beside} | {ahead / sync:.2f} |")
    if args.output:
        with open(args.output, "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
