"""The process in which answers are checked: whatever hangs or crashes here is killed without harm to the training.

`utils.Rewards` starts it with a line {"load": [names], "timeout": seconds}, which it answers with {"loaded": true} or
{"reward": name, "error": why}, then sends a line of JSON a call:
    {"reward": name, "prompts": [...], "responses": [...], "columns": {"answer": [...], ...}}
A built-in reward answers {"scores": [x]} or {"error": why} response by response, so that the reader can tell which one
is stuck; a function from a file answers once for all.
"""

import importlib.util
import json
import logging
import os
import re
import signal
import sys
import traceback


def gold_answer(answer) -> str:
    """The reference answer of a row: what follows the last "####" in a GSM8K solution, else the text itself."""
    return str(answer).rsplit("####", 1)[-1].strip()


def plain_number(text: str) -> str:
    """A number without thousands separators, currency and a final full stop."""
    return text.replace(",", "").replace("$", "").strip().rstrip(".")


def gsm8k(response: str, answer) -> float:
    """Strict GSM8K: 1 if the last "#### number" of the response is the reference number."""
    found = re.findall(r"####\s*(-?[$]?[\d,]*\.?\d+)", response)
    return float(bool(found) and plain_number(found[-1]) == plain_number(gold_answer(answer)))


def exact(response: str, answer) -> float:
    """1 if the response is the reference answer, leading and trailing white space aside."""
    return float(response.strip() == gold_answer(answer))


def math(response: str, answer) -> float:
    """1 if the response's final answer equals the reference as mathematics (parsed and compared by math-verify)."""
    from math_verify import parse, verify

    gold = gold_answer(answer)
    # The library's own time limits need signals; this process is killed from outside instead.
    reference = parse(gold if "$" in gold or "\\" not in gold else f"${gold}$", parsing_timeout=None)
    if not reference:
        raise ValueError(f"math-verify cannot parse the reference answer {gold!r}")
    return float(verify(reference, parse(response, parsing_timeout=None), timeout_seconds=None))


def format(response: str, answer) -> float:
    """1 for the form of DeepSeek-R1: <think> ... </think> <answer> ... </answer> and nothing else, each once."""
    whole = re.fullmatch(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", response, re.DOTALL)
    return float(
        bool(whole) and all(response.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    )


BUILTIN = {"math": math, "gsm8k": gsm8k, "exact": exact, "format": format}


def load_function(name: str):
    """The function of "path/to/file.py:function"."""
    path, _, function = name.rpartition(":")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("reward_function", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise AttributeError(f"{path} has no function {function!r}")
    return getattr(module, function)


def as_numbers(scores, count: int) -> list:
    """What a reward function returned, as `count` floats or Nones."""
    scores = list(scores)
    if len(scores) != count:
        raise ValueError(f"returned {len(scores)} scores for {count} responses")
    return [None if score is None else float(score) for score in scores]


def main() -> None:
    logging.disable(logging.WARNING)  # math-verify warns at every call that its time limits are off
    # What a reward function prints must not get between the answers: it goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**message) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    functions = dict(BUILTIN)
    settings = json.loads(sys.stdin.readline())
    for name in settings["load"]:
        try:
            if name == "math":
                import math_verify  # noqa: F401  (slow to import: not within the time limit of the first call)
            functions[name] = functions.get(name) or load_function(name)
        except BaseException as error:
            answer(reward=name, error=f"{type(error).__name__}: {error}")
            return
    answer(loaded=True)

    for line in sys.stdin:
        request = json.loads(line)
        function, responses, columns = functions[request["reward"]], request["responses"], request["columns"]
        # A built-in reward is called once a response, a function from a file once with all of them.
        calls = zip(responses, columns["answer"]) if request["reward"] in BUILTIN else [None]
        for call in calls:
            # The caller kills this process after the time limit; if the caller is gone, the kernel does, a bit later.
            signal.setitimer(signal.ITIMER_REAL, settings["timeout"] + 5)
            try:
                if call is None:
                    answer(scores=as_numbers(function(request["prompts"], responses, **columns), len(responses)))
                else:
                    answer(scores=[function(*call)])
            except BaseException as error:
                traceback.print_exc()
                answer(error=f"{type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
