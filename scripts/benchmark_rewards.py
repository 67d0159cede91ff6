"""What scores cost, by each kind of source. `scripts/benchmark.py rewards` calls it."""

import os
import re
import statistics
import subprocess
import sys
import time
from unittest import mock

import utils
from plumbing.rewards import sources as rewards

CODE = "```python\ndef twice(x):\n    return 2 * x\n```"
ASSERTS = ["assert twice(1) == 2", "assert twice(0) == 0", "assert twice(-3) == -6"]
STDIN = "```python\nprint(2 * int(input()))\n```"
SOURCES = {  # what it is: (source, response, answer)
    "math": ("math", "So the answer is $\\boxed{\\frac{1}{2}}$.", "0.5"),
    "gsm8k": ("gsm8k", "6*7=42\n#### 42", "6*7=42\n#### 42"),
    "exact": ("exact", "42", "42"),
    "format": ("format", "<think>6*7=42</think><answer>42</answer>", None),
    "code, three asserts": ("code", CODE, ASSERTS),
    "code, three inputs": ("code", STDIN, {"inputs": ["1", "2", "-3"], "outputs": ["2", "4", "-6"]}),
}


def score_seconds(source: str, timeout: float, texts: list[str], answer, repeats: int) -> float:
    """Return the median seconds that it takes to score these responses, all of which but endless loops are right."""
    rows, taken = [{"prompt": "", "query": [], "answer": answer}] * len(texts), []
    sources = rewards.Rewards((source,), timeout, None)
    sources.score(rows[:32], texts[:32], [[]] * 32)  # what is slow the first time only
    for _ in range(repeats):
        begin = time.perf_counter()
        scores = sources.score(rows, texts, [[]] * len(rows))[source]
        taken.append(time.perf_counter() - begin)
    sources.close()
    assert [score == 1 for score in scores] == ["while True" not in text for text in texts], f"{source}: {scores}"
    return statistics.median(taken)


def measure(responses: int, repeats: int) -> tuple[list[str], list[list[str]]]:
    """Return lines about the measurement, and its table of cells, the header first."""
    table = [["source", "responses a second, one process", "by a reward server here, seconds", "directly"]]
    # One process, as for a rank among that many.
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(os.cpu_count())):
        for name, (source, text, answer) in SOURCES.items():
            command = [sys.executable, f"{utils.ROOT}/scripts/reward_server.py", "--reward", source, "--port", "0"]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            address = re.search(r"http\S+", server.stdout.readline())[0]
            directly = score_seconds(source, 30.0, [text] * responses, answer, repeats)
            by_server = score_seconds(address, 30.0, [text] * responses, answer, repeats)
            server.terminate()
            table.append([name, f"{responses / directly:,.0f}", f"{by_server:.3f}", f"{directly:.3f}"])
    stuck = ["```python\nwhile True: pass\n```" if i in (40, 41) else CODE for i in range(64)]
    usual, longer = (score_seconds("code", 2.0, texts, ASSERTS, 1) for texts in ([CODE] * 64, stuck))
    about = f"64 programs on all cores: {usual:.1f} s; with two endless loops among them and --reward_timeout 2"
    about += f" {longer:.1f} s, and the others keep their scores"
    return [f"median of {repeats}, {responses} responses", about], table
