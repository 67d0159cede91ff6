"""Times an update (forward, backward, AdamW) and a pass for log-probs of grpo.py's policy, with random weights, along
the axes that change its speed and memory but not its meaning. Each run is a process of its own; rounds take turns.

    python scripts/benchmark_training.py --output results/training.md        # on a GPU: the shapes of Qwen2.5
    python scripts/benchmark_training.py --shapes 10m-large 10m-small --axes compile --sequences 8 --length 128 \\
        --prompt 16 --output results/compile.md                              # on a CPU

MFU: 6 FLOPs a token and parameter for an update (8 are done with gradient checkpointing) over the GPU's bf16 peak.
Memory: of a GPU the most that torch allocated, of a CPU what the process grew by during the timed work (Linux only).
"""

import contextlib
import ctypes
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
import transformers
import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import grpo
import utils
from plumbing import models
from plumbing.sharding import Sharding

SHAPES = {  # hidden size, layers, heads, key heads, intermediate size, vocabulary; embeddings are tied
    "0.5b": (896, 24, 14, 2, 4864, 151_936),  # Qwen2.5-0.5B
    "1.5b": (1536, 28, 12, 2, 8960, 151_936),  # Qwen2.5-1.5B
    "10m-large": (64, 4, 4, 2, 256, 151_936),  # 10 million parameters, most of them in the vocabulary
    "10m-small": (320, 8, 5, 5, 1280, 512),  # 13 million parameters, most of them in the blocks
}


@dataclass
class Args:
    shapes: tuple[str, ...] = ("0.5b", "1.5b")
    """Models, of those in SHAPES."""
    axes: tuple[Literal["compile", "attention", "chunk", "shard", "checkpointing", "precision"], ...] = (
        "compile", "attention", "chunk", "shard", "checkpointing", "precision",
    )  # fmt: skip
    """What is varied, one after the other, from what the flags below say."""
    attentions: tuple[str, ...] = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
    """Values of the axis attention."""
    chunks: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    """Values of the axis chunk."""
    precisions: tuple[str, ...] = ("float32", "bf16", "fp16", "pure_bf16")
    """Values of the axis precision."""
    sequences: int = 16
    """Rows of a micro-batch."""
    length: int = 1024
    """Tokens of the longest row; the shortest has three quarters."""
    prompt: int = 256
    """Tokens of a row that are prompt."""
    rounds: int = 3
    """Processes of each kind, in turns, of which the median counts."""
    repeats: int = 3
    """Timed updates of a process, after two for warming up."""
    output: str = ""
    """Markdown file to write the tables to; default: to the console only."""

    # ---- what the axes vary; the names are those of grpo.py ----
    precision: str = "auto"
    """Number format."""
    attention: str = "auto"
    """What computes the attention."""
    compile: bool = False
    """Compile blocks and statistics."""
    shard: str = "none"
    """fsdp: over the one process."""
    gradient_checkpointing: bool = False
    """Recompute activations."""
    logits_chunk_tokens: int = 512
    """Response tokens whose logits exist at once."""
    one: str = ""
    """Used by the script itself: measure this one shape in this process."""


def variants(args: Args) -> dict[str, Args]:
    """The kinds of run, by what they are called: the base, and one change each."""
    gpu = torch.cuda.is_available()
    flash = lambda name: gpu and args.precision != "float32" or name in ("sdpa", "eager")
    of_axis = {
        "compile": {"--compile": {"compile": True}},
        "attention": {f"--attention {x}": {"attention": x} for x in args.attentions if flash(x)},
        "chunk": {f"--logits_chunk_tokens {x}": {"logits_chunk_tokens": x} for x in args.chunks},
        "shard": {"--shard fsdp": {"shard": "fsdp"}},
        "checkpointing": {"--gradient_checkpointing": {"gradient_checkpointing": True}},
        "precision": {f"--precision {x}": {"precision": x} for x in args.precisions if gpu or x != "fp16"},
    }
    changes = {name: change for axis in args.axes for name, change in of_axis[axis].items()}
    return {"base": args, **{name: replace(args, **change) for name, change in changes.items()}}


def gigabytes(field: str) -> float:
    """GB of this process now (VmRSS), or at most since the last reset (VmHWM)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 / 1e9 for line in file if line.startswith(field))


def measure(args: Args) -> dict[str, float]:
    """Seconds, memory and tokens of one kind of run, in this process."""
    world = utils.setup_processes()
    precision = models.precision(args.precision, world.device)
    flags = grpo.Args(attention=args.attention, compile=args.compile, shard=args.shard, precision=args.precision)
    with contextlib.redirect_stdout(sys.stderr):
        names = models.ModelNames([], [], [])  # only --shard auto goes by them
        sharding = Sharding(flags, world, precision, names)
    hidden, layers, heads, keys, inner, vocabulary = SHAPES[args.one]
    config = transformers.Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, tie_word_embeddings=True,
        max_position_embeddings=max(args.length, 1024),
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=precision.param_dtype)
    model = model.to(sharding.load_device).eval()
    policy = grpo.Policy(model, 1.0, args.logits_chunk_tokens)
    wrapped, size = sharding.wrap(policy), utils.parameter_count(model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = utils.Optimizer(policy, flags, 1000)
    numbers, lengths = utils.generator("benchmark"), torch.linspace(args.length, 0.75 * args.length, args.sequences)
    draw = lambda count: numbers.integers(vocabulary, size=count).tolist()
    rows = [(draw(args.prompt), draw(int(length) - args.prompt)) for length in lengths]
    batch, tokens = grpo.collate(rows, world.device), sum(map(int, lengths))
    gpu, taken, peaks = world.device.type == "cuda", {"update": [], "logprobs": []}, []
    for i in range(2 + args.repeats):
        if i == 2 and not gpu:
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the warm-up left free would hide what is needed
            before = gigabytes("VmRSS")
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        clock = utils.Clock(world.device, 0.0)
        clock.start()
        with torch.no_grad(), precision.autocast():
            wrapped(*batch, entropies=False)
        clock.lap("logprobs")
        model.train()
        with precision.autocast():
            logprobs, _, _ = wrapped(*batch)
        (-logprobs.mean() * optimizer.loss_scale).backward()
        optimizer.step()
        model.eval()
        clock.lap("update")
        peaks.append(clock.peak_gb)
        for name, times in taken.items():
            times.append(clock.laps[name])
    median = {name: statistics.median(times[2:]) for name, times in taken.items()}
    peak = max(peaks[2:]) if gpu else gigabytes("VmHWM") - before
    mfu = 6 * size * tokens / median["update"] / utils.peak_flops(world.device)
    first = taken["update"][0] + taken["logprobs"][0]
    return {**median, "first": first, "peak": peak, "mfu": mfu, "tokens": tokens, "size": size}


def in_process(args: Args, shape: str) -> dict[str, float] | str:
    """`measure` in a process of its own, or the line that says why it cannot be."""
    values = json.dumps(asdict(replace(args, one=shape)))
    with tempfile.TemporaryDirectory() as cache:  # so that the first update compiles all
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--measure", values]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = [line for line in done.stderr.splitlines() if "rror" in line] or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix("error: ")[:160]


def main(args: Args) -> None:
    lines: list[str] = []
    show = lambda line: (lines.append(line), print(line, flush=True))
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"{platform.machine()}, {os.cpu_count()} cores"
    show(f"# Updates on {device}, {torch.get_num_threads()} thread(s), torch {torch.__version__}\n")
    show(f"`python scripts/benchmark_training.py {' '.join(sys.argv[1:])}`\n")
    show(
        f"Rows: {args.sequences} of {args.length} to {int(0.75 * args.length)} tokens, {args.prompt} of them prompt. "
        f"Seconds and memory: medians over {args.rounds} processes of each kind, in turns, of the median of "
        f"{args.repeats} updates. Ratio: seconds of update and log-probs together over those of the base in the same "
        "round, median (lowest to highest). First: the first update and log-probs, with all that is compiled.\n"
    )
    kinds = variants(args)
    for shape in args.shapes:
        results: dict[str, list] = {name: [] for name in kinds}
        for _ in range(args.rounds):
            for name, kind in kinds.items():
                if not any(isinstance(x, str) for x in results[name]):
                    results[name].append(in_process(kind, shape))
        base = results["base"]
        if isinstance(base[0], str):
            sys.exit(f"error: {shape}: {base[0]}")
        show(f"## {shape}: {base[0]['size']:,} parameters, vocabulary {SHAPES[shape][-1]:,}\n")
        show("| flags | update, s | log-probs, s | tokens/s | MFU | peak, GB | ratio | first, s |")
        show("|---|---|---|---|---|---|---|---|")
        for name, found in results.items():
            if isinstance(found[-1], str):
                show(f"| {name} | {found[-1]} |" + " |" * 6)
                continue
            m = {key: statistics.median(each[key] for each in found) for key in found[0]}
            total = lambda each: each["update"] + each["logprobs"]
            ratios = [total(ours) / total(theirs) for ours, theirs in zip(found, base)]
            mfu = "" if math.isnan(m["mfu"]) else f"{m['mfu']:.3f}"
            speed = f"{m['update']:.3f} | {m['logprobs']:.3f} | {m['tokens'] / total(m):,.0f} | {mfu} | {m['peak']:.2f}"
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            show(f"| {name} | {speed} | {ratio} | {m['first']:.1f} |")
        show("")
    if args.output:
        with open(args.output, "w") as file:
            file.write("\n".join(lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        values = {key: tuple(x) if isinstance(x, list) else x for key, x in json.loads(sys.argv[2]).items()}
        print(json.dumps(measure(Args(**values))))
    else:
        main(tyro.cli(Args))
