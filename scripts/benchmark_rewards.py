"""Measures reward sources: responses a second on one core, the round trip to a reward server, what stuck calls cost.

    python scripts/benchmark_rewards.py --output results/rewards.md
"""

import os
import platform
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing.rewards import Rewards, worker_count

CODE = "```python\ndef twice(x):\n    return 2 * x\n```"
STDIN = "```python\nprint(2 * int(input()))\n```"
STUCK = "```python\nwhile True: pass\n```"
WORK = {  # what it is: (source, response, answer)
    "math": ("math", "So the answer is $\\boxed{\\frac{1}{2}}$.", "0.5"),
    "gsm8k": ("gsm8k", "6*7=42\n#### 42", "6*7=42\n#### 42"),
    "exact": ("exact", "42", "42"),
    "format": ("format", "<think>6*7=42</think><answer>42</answer>", None),
    "code, three asserts": ("code", CODE, ["assert twice(1) == 2", "assert twice(0) == 0", "assert twice(-3) == -6"]),
    "code, three inputs": ("code", STDIN, {"inputs": ["1", "2", "-3"], "outputs": ["2", "4", "-6"]}),
}


@dataclass
class Args:
    output: str = ""
    """Markdown file to write the tables to; default: to the console only."""
    responses: int = 512
    """Responses of a measurement."""
    repeats: int = 5
    """Measurements, of which the median counts."""


def seconds(rewards: Rewards, rows: list[dict], texts: list[str], repeats: int) -> tuple[float, list[float]]:
    """Median of the seconds that it takes to score these responses by the only source, and their scores."""
    (name,), taken = rewards.names, []
    for _ in range(repeats):
        start = time.perf_counter()
        scores = rewards.score(rows, texts, [[]] * len(rows))[name]
        taken.append(time.perf_counter() - start)
    return statistics.median(taken), scores


def main(args: Args) -> None:
    count, lines = args.responses, []
    show = lambda line: (lines.append(line), print(line, flush=True))
    show(f"# Reward sources on {platform.processor() or platform.machine()}, {os.cpu_count()} cores\n")
    show(f"`python scripts/benchmark_rewards.py`: median of {args.repeats}, {count} responses.\n")
    show("| source | responses a second, one process | through a reward server on this machine, seconds | directly |")
    show("|---|---|---|---|")
    os.environ["LOCAL_WORLD_SIZE"] = str(os.cpu_count())  # one process, as for a rank among that many
    for about, (source, text, answer) in WORK.items():
        rows, texts = [{"prompt": "", "query": [], "answer": answer}] * count, [text] * count
        server = subprocess.Popen(
            [sys.executable, f"{utils.ROOT}/scripts/reward_server.py", "--reward", source, "--port", "0"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        url = re.search(r"http\S+", server.stdout.readline())[0]
        found = []
        for name in (source, url):
            rewards = Rewards((name,), 30.0, None)
            rewards.score(rows[:32], texts[:32], [[]] * 32)  # what is slow the first time only
            found.append(seconds(rewards, rows, texts, args.repeats))
            rewards.close()
        server.terminate()
        (direct, scores), (through, theirs) = found
        assert scores == theirs == [1.0] * count
        show(f"| {about} | {count / direct:,.0f} | {through:.3f} | {direct:.3f} |")
    del os.environ["LOCAL_WORLD_SIZE"]

    limit, tests = 2.0, WORK["code, three asserts"][2]
    texts = [STUCK if i in (10, 41) else CODE for i in range(64)]
    rows = [{"prompt": "", "query": [], "answer": tests}] * 64
    rewards = Rewards(("code",), limit, None)
    usual, _ = seconds(rewards, rows, [CODE] * 64, 1)
    taken, scores = seconds(rewards, rows, texts, 1)
    rewards.close()
    wrong = [i for i, score in enumerate(scores) if score != 1]
    show(
        f"\nTwo endless loops among 64 programs, `--reward_timeout {limit:g}`, {worker_count()} processes: "
        f"{taken:.1f} s instead of {usual:.1f} s; all but responses {wrong} keep their scores."
    )
    assert wrong == [10, 41]
    if args.output:
        with open(args.output, "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
