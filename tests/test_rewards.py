"""The reward sources of a run together: trial calls at its start, and rows that name the sources
which score them.
"""

import asyncio
import contextlib
import functools
import itertools
import math
import os
import re
import signal
import subprocess
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import evaluate
import pytest
from conftest import ROOT
from helpers import end_processes, refused, scores_by, table
from test_data import prompts_of
from tiny_models import CPU, make_tokenizer

from plumbing import processes
from plumbing.data.formats import named_sources
from plumbing.data.rows import is_scored_by
from plumbing.rewards import verifiers
from plumbing.rewards.sources import (
    RewardSources,
    Scoring,
    columns_of,
    final_turn,
    finite_or_nan,
    why_unscorable,
)
from plumbing.rollout.batch import Batch, Sample
from plumbing.rollout.sampler import unscored
from plumbing.run.metrics import batch_metrics, correct_responses, sample_rows
from utils import UserError

REPORTED = ROOT / "tests/data/reported"
FUNCTIONS = """
import asyncio, concurrent.futures, multiprocessing
calls = 0
def good(prompts, responses, **columns):
    global calls
    calls += 1
    return [float(calls)] * len(responses)

def none(prompts, responses, **columns): return [None] * len(responses)
none.verifies = False
def reads(responses): return [float(response) if response else None for response in responses]
def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "words": 2}
def too_few(prompts, responses, **columns): return [1.0]

def trl(completions): return [{"score": len(completions), "place": i} for i in range(len(completions))]
def ours(prompts, responses): return trl(responses)
ours.whole = True
class Judge:
    whole = True
    def __call__(self, responses): return trl(responses)
def at_once(completions, **columns): return trl(completions)
at_once.whole = False
def by_three(completions, rollout_group): return [1 / (rollout_group.count(x) == 3) for x in rollout_group]
def fails(completions): return [1 / (len(completions) < 3)] * len(completions)

queue = asyncio.Queue()
async def waits(responses):  # for what another task brings
    getters = [asyncio.create_task(queue.get()) for _ in responses]
    await asyncio.sleep(0)
    for response in responses:
        await queue.put(float(len(response)))
    return await asyncio.gather(*getters)
class Client:
    lock = asyncio.Lock()
    async def ask(self, response):
        async with self.lock:
            await asyncio.sleep(0.01)
            return float(len(response))
    async def __call__(self, prompts, responses):
        return await asyncio.gather(*map(self.ask, responses))
def once(responses):
    global calls
    calls += 1
    return [1 / (calls < 2)] * len(responses)
def one(response): return float(len(response))
def spawns(responses):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
        return list(executor.map(one, responses))
def forks(responses):
    with multiprocessing.get_context("fork").Pool(1) as pool: return pool.map(one, responses)
"""


def row(answer, sources=None, **columns) -> dict:
    own = {
        "prompt": "p",
        "query": [1],
        "messages": [{"role": "user", "content": "p"}],
        "answer": answer,
    }
    return {**own, "dataset": "rows.jsonl", "sources": sources, "columns": columns}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "judge.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def make():
    made = []

    def make(*names, rows=(), timeout=30.0, group_size=1):
        made.append(
            RewardSources(
                types.SimpleNamespace(
                    reward=names, timeout=timeout, reward_workers=2, group_size=group_size
                ),
                make_tokenizer(),
                rows,
            )
        )
        return made[-1]

    yield make
    for each in made:
        end_processes(each.server)


# ---- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, whole", [("trl", 1), ("ours", 1), ("Judge", 1), ("at_once", 0)])
def test_whole_groups(file, make, name, whole):
    """Called once with all responses, in order, whichever ends first; others with what has ended."""
    reward_sources = make("exact", source := f"{file}:{name}")
    assert reward_sources.whole == whole
    scoring = Scoring(reward_sources, lambda: False)
    for place in (2, 0, 1):
        scoring.add(place, types.SimpleNamespace(row=row("1"), text="1", response=[5]))
        for job in scoring.jobs:
            job.result(timeout=60)
    scores = [sample.scores for sample in scoring.finish()]
    assert not whole or reward_sources.waited > 0
    assert [x[source] for x in scores] == [3 if whole else 1] * 3
    assert [x[f"{source}/place"] for x in scores] == ([0, 1, 2] if whole else [0, 0, 0])


def test_folders_with_modules_of_one_name(make, tmp_path):
    for score in "12":
        (folder := tmp_path / score).mkdir()
        (folder / "judge.py").write_text("from own import score")
        (folder / "own.py").write_text(f"score = lambda responses: [{score}]")
    names = [f"{tmp_path}/{score}/judge.py:score" for score in "12"]
    assert [*scores_by(make(*names), [row("1")], ["1"], [[5]]).values()] == [[1], [2]]


def test_whole_groups_in_the_trial_call_and_failures(file, make):
    """The trial call has groups as large as the run's, with their numbers. Of a call that fails no
    score counts.
    """
    names = [f"{file}:{name}" for name in ("by_three", "fails")]
    reward_sources = make(names[0], rows=[row("1"), row("2")], group_size=3)
    assert scores_by(reward_sources, [row("1")] * 3, ["1"] * 3, [[5]] * 3)[names[0]] == [1] * 3
    reward_sources = make(names[1], rows=[row("1"), row("2")])
    assert all(
        map(math.isnan, scores_by(reward_sources, [row("1")] * 3, ["1"] * 3, [[5]] * 3)[names[1]])
    )
    assert "ZeroDivisionError" in reward_sources.why_missing(names[1])


LIKE_ONE = [  # files, of which the last two have names like those of other modules, and functions
    *((REPORTED / "22_rewards.py", name) for name in ("limited", "pool")),
    *(("judge.py", name) for name in ("waits", "Client", "spawns")),
    *((name, "forks") for name in ("math.py", "a.judge.py")),
]


@pytest.mark.parametrize("base, name", LIKE_ONE)
def test_event_loops_and_process_pools(make, tmp_path, base, name):
    """A file's locks and clients last from call to call, and its processes find its functions."""
    if not (path := tmp_path / base).exists():
        path.write_text(FUNCTIONS)
    reward_sources = make(source := f"{path}:{name}", rows=[row("1"), row("22")])
    for _ in range(2):
        scores = scores_by(reward_sources, [row("1")] * 3, ["1", "22", "333"], [[5]] * 3)
        assert scores[source] == [1, 2, 3], reward_sources.why_missing(source)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("once", r"ZeroDivisionError \(.*\.py:\d+\): division by zero"),
        ("too_few", "ValueError: returned 1 scores for 2 responses"),
    ],
)
def test_a_function_that_fails_in_the_trial_calls(file, make, capfd, name, reason):
    line = refused(capfd, lambda: make(f"{file}:{name}", rows=[row("1")]), noisy=True)
    assert re.fullmatch(f"error: --reward {file}:{name}: a trial call failed: {reason}", line)


@pytest.mark.parametrize("base", ["15_turns_column", "16_responses_column"])
def test_reported_columns(file, make, capfd, base):
    """A function in TRL's form gets the responses; one that would get both is refused."""
    rows = prompts_of(f"{REPORTED}/{base}.jsonl", make_tokenizer(), reward=("exact",)) * 2
    source = f"{REPORTED}/22_rewards.py:trl"
    got = scores_by(make("exact", source, rows=rows), rows, ["4", "2"], [[5], [6]])
    right = [float(text == rows[0]["answer"]) for text in ("4", "2")]
    assert got == {"exact": right, source: [1, 0]}
    if "responses" in base:
        line = refused(capfd, lambda: make(f"{file}:good", rows=rows), noisy=True)
        assert "have a column 'responses', the name of another argument" in line


THOUGHTS = [  # the end of a prompt, a response, and what format, math and exact give it
    ("<think>\n", "Sum.</think>\n<answer>4</answer>", (1, 1, 1)),
    ("<think>", r"It may be \boxed{4}, or", (0, 0, 0)),
    ("<think>\n\n", "4", (0, 0, 0)),
    ("<think>\n\n</think>\n\n", "<answer>4</answer>", (0, 1, 1)),
    ("think in <think>. A:", r"\boxed{4}", (0, 1, 1)),
    ("A:", "<think>Sum.</think> <answer>4</answer>", (1, 1, 1)),
]


def test_verifiers_get_the_thought_that_the_prompt_opened(make):
    """In conversations, too; and what votes in scripts/evaluate.py."""
    prompts, texts, expected = zip(*THOUGHTS)
    rows = [{**row("4"), "prompt": prompt} for prompt in prompts]
    talks = [
        each | {"turns": [{"role": "assistant", "content": x} for x in ("1", text)]}
        for each, text in zip(rows, texts)
    ]
    names = ("format", "math", "exact")
    scores = scores_by(make(*names), rows + talks, [*texts, *prompts], [[5]] * 2 * len(rows))
    assert list(zip(*scores.values())) == list(expected) * 2
    turns = [
        final_turn(types.SimpleNamespace(row=each, text=text)) for each, text in zip(rows, texts)
    ]
    assert [evaluate.voted_answer(turn) == "4" for turn in turns] == [x[2] for x in expected]


def test_functions_and_verifiers_together(file, make):
    """A function that gives no score, None, passes its two trial calls. Calls of a function share a
    process.

    One may say that it does not tell right from wrong, and return further numbers.
    """
    names = [f"{file}:{name}" for name in ("good", "none", "verl")]
    reward_sources = make("exact", *names, rows=[row("1"), row(None), row("2")])
    scores = scores_by(reward_sources, [row("1"), row("2")], ["1", "1"], [[5], [5]])
    assert [scores[name] for name in ("exact", names[0], names[2])] == [[1, 0], [3, 3], [1, 0]]
    assert all(map(math.isnan, scores[names[1]]))
    assert scores[f"{names[2]}/words"] == [2, 2] and reward_sources.verifiers == (
        "exact",
        names[0],
        names[2],
    )
    assert is_scored_by(row("1", [names[2]]), f"{names[2]}/words")


def test_several_threads_may_score(file, make):
    """As rollouts of several steps do: each gets its own scores, and a call of the function."""
    reward_sources = make("gsm8k", f"{file}:good")

    def score(i: int) -> dict:
        texts = [f"#### {i}"] * 10 + ["#### x"] * 10
        return scores_by(reward_sources, [row(str(i))] * 20, texts, [[]] * 20)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(score, range(6), timeout=120))
    assert all(scores["gsm8k"] == [1] * 10 + [0] * 10 for scores in results)
    calls = [set(scores[f"{file}:good"]) for scores in results]
    assert all(len(each) == 1 for each in calls) and set.union(*calls) == {1, 2, 3, 4, 5, 6}


def test_a_source_without_some_scores_says_so_once(file, make, capfd):
    """With the reason, in one line a source and without a traceback for each response."""
    reward_sources = make("gsm8k", f"{file}:none")
    for _ in range(2):
        scores_by(reward_sources, [row("1"), row("x")], ["#### 1"] * 2, [[]] * 2)
    said = capfd.readouterr().err.splitlines()
    assert (
        len(said) == 2
        and said[0].startswith("warning: --reward gsm8k: ")
        and "'x' is not a number" in said[0]
    )
    assert said[1].startswith(f"warning: --reward {file}:none: it returned None")


def test_the_reason_is_that_of_the_last_missing_score(file, make):
    """Not of an older one, nor is it forgotten where all is well."""
    reward_sources = make(f"{file}:reads")
    for text, reason in [("x", "ValueError"), ("1", "ValueError"), ("", "it returned None")]:
        scores_by(reward_sources, [row("1")], [text], [[5]])
        assert reason in reward_sources.why_missing(f"{file}:reads")


def test_processes_import_no_torch(make):
    reward_sources = make("math", "exact", "code")
    scores = scores_by(reward_sources, [row("1")], ["1"], [[]])
    assert scores["math"] == scores["exact"] == [1]
    assert ask(reward_sources, "'torch' in __import__('sys').modules") == ([[False], ""], "")


def test_a_response_that_hangs_math_is_wrong(make, monkeypatch):
    """Unless the reference hangs it, too. From a thread: math-verify's time limits would need
    signals there.
    """
    quick = verifiers.verifier("math")._replace(limit=1.0)
    monkeypatch.setattr(verifiers, "verifier", lambda name: quick)
    references = ["42", "42", "42", "{" * 240 + "1" + "}" * 240, "42"]
    texts = ["42", r"\boxed{9^{9^{9^9}}}", "42", "42", "41"]
    with ThreadPoolExecutor(1) as pool:
        reward_sources = pool.submit(make, "math").result()
        scores = pool.submit(
            scores_by, reward_sources, list(map(row, references)), texts, [[]] * 5
        ).result()["math"]
    assert scores == pytest.approx([1, 0, 1, math.nan, 0], nan_ok=True)
    said = reward_sources.sources["math"].failure
    assert said.endswith("alone: over 1 s of CPU time")


def test_a_response_that_waits_for_a_processor_is_not_wrong(make):
    """Here asleep; the empty response, which a stuck one is scored as, would get 0 at once."""
    source = make("math", timeout=1.0).sources["math"]
    source.check = functools.partial(subprocess.call, shell=True)
    sample = types.SimpleNamespace(row=row(-1), text="sleep 60")
    assert asyncio.run(source.score([sample])) == [None]
    assert source.failure == "TimeoutError: no result within --timeout 1 s"


def processes_of(reward_sources) -> list[int]:
    """Return the processes in which rewards are computed."""
    server = reward_sources.server.process.pid
    return list(map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split()))


def ask(reward_sources, code: str, seconds: float = 60.0) -> tuple:
    """What a process of verifiers makes of some code."""
    source = reward_sources.sources["exact"]
    return reward_sources.loop.run(source.ask(seconds, "score", eval, [(code,)]))


def test_a_call_whose_process_ends_is_made_once_more(make, tmp_path, monkeypatch):
    """So no right answer is wrong because its process was killed. Then the reason is said: what has
    ended may also be the process that forks another one. No descriptor stays open.
    """
    mark = str(tmp_path / "mark")
    die = "__import__('os').kill(__import__('os').getpid(), 9)"
    dies_once = f"__import__('os').path.exists({mark!r}) or (open({mark!r}, 'x'), {die})"
    reward_sources = make("exact")
    fork = processes.ForkServer.fork

    def fork_and_end(server, connection):
        server.process.send_signal(signal.SIGSTOP)
        fork(server, connection)
        server.process.kill()

    assert ask(reward_sources, dies_once) == ([[True], ""], "")
    descriptors = len(os.listdir("/proc/self/fd"))
    for process in processes_of(reward_sources):
        os.kill(process, signal.SIGKILL)
    assert scores_by(reward_sources, [row("1")], ["1"], [[5]])["exact"] == [1]
    said = "the process of the call has ended, or wrote into its connection"
    assert ask(reward_sources, die) == (None, said)
    assert ask(reward_sources, "1") == ([[1], ""], "")
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    monkeypatch.setattr(processes.ForkServer, "fork", fork_and_end)
    assert ask(reward_sources, die) == (None, "the fork server, which starts processes, has ended")


STEP = "setattr(__import__('time'), 'time', __import__('itertools').count(step=1e5).__next__)"


def test_a_step_of_the_wall_clock_is_no_time_out(make, monkeypatch):
    """Not in the trainer, nor in a process; a program has a clock of its own."""
    monkeypatch.setattr(time, "time", itertools.count(step=1e5).__next__)
    reward_sources = make("exact", "code")
    assert ask(reward_sources, f"{STEP} or __import__('time').sleep(0.1)") == ([[None], ""], "")
    rows = [row("1", ["exact"]), row({"inputs": [""], "outputs": ["1"]}, ["code"])]
    scores = scores_by(reward_sources, rows, ["1", "print(1)"], [[5]] * 2)
    assert scores == {"exact": [1, 0], "code": [0, 1]}


def test_a_call_that_no_process_begins_fails_in_time(make, monkeypatch):
    """The limit of a call begins with its process."""
    monkeypatch.setattr(processes, "SECONDS_TO_LOAD", 0.3)
    monkeypatch.setattr(processes.ForkServer, "fork", lambda *_: time.sleep(0.1))
    assert not any(ask(make("exact"), "1", 0.2)[0] or ())


def test_the_largest_score():
    scores = [1e18, -1e18, 1.001e18, -1.001e18, math.inf, None, "2"]
    assert list(map(finite_or_nan, scores)) == pytest.approx(
        [1e18, -1e18, *[math.nan] * 4, 2], nan_ok=True
    )


# ---- rows that name their sources ----------------------------------------------------------------


@pytest.mark.parametrize("columns, expected, reward", table("rows.yaml")["sources"])
def test_named_sources(columns, expected, reward):
    with pytest.raises(UserError) if expected == "error" else contextlib.nullcontext():
        assert named_sources("rows.jsonl row 1", columns, reward) == expected


def test_an_answer_is_needed_where_a_source_reads_it(capsys):
    """Also where its weight is 0."""
    args = types.SimpleNamespace(reward=("format", "exact", "gsm8k"), reward_weights=(1, 0, 1))
    for without in (row(None), row(" ", ["exact"])):
        said = refused(capsys, why_unscorable, "row 1", without, args)
        assert said.startswith("error: row 1: has no answer, which --reward exact needs")
    assert why_unscorable("", row(None, ["format"]), args) == ""
    assert why_unscorable("", row("1"), args) == ""


def test_functions_get_the_row_s_own_answer_where_there_is_no_reference():
    """As of a column that is empty in the first rows."""
    own = [{"answer": "1"}, {"answer": "3"}, {}]
    rows = [row(answer) | {"columns": x} for answer, x in zip((None, "2", None), own)]
    assert columns_of(rows)["answer"] == ["1", "2", None]


def batch_of(rows: list[dict], **components) -> Batch:
    samples = [
        Sample(
            row,
            [1],
            {},
            True,
            text="t",
            scores={name: scores[i] for name, scores in components.items()},
        )
        for i, row in enumerate(rows)
    ]
    return Batch.from_samples(samples, CPU)


def test_metrics_of_rows_that_name_their_sources():
    """Means of a source are over its rows; a response is correct by the first verifier that scores
    its row.
    """
    rows = [
        row("1", ["math"]),
        row("1", ["math"]),
        row("1", ["code"]),
        row("1", ["code", "math"]),
        row("1", ["model"]),
    ]
    nan = math.nan
    reward_sources = types.SimpleNamespace(
        sources=("math", "code", "model"), verifiers=("math", "code")
    )
    batch = batch_of(
        rows,
        math=[1.0, 0.0, 0.0, 1.0, 0.0],
        code=[0.0, 0.0, 1.0, nan, 0.0],
        model=[0.0, 0.0, 0.0, 0.0, -3.0],
    )
    correct = correct_responses(batch, reward_sources)
    assert correct.tolist() == pytest.approx([1, 0, 1, 1, nan], nan_ok=True)
    metrics = batch_metrics(batch, reward_sources)
    assert (
        metrics["objective/verifiable_correct_rate"] == 0.75 and metrics["val/missing_scores"] == 1
    )
    means = {name: metrics[f"reward/{name}"] for name in ("math", "code", "model")}
    assert means == pytest.approx({"math": 2 / 3, "code": 1.0, "model": -3.0})
    assert (
        metrics["reward_correct/math"] == pytest.approx(2 / 3)
        and "reward_correct/model" not in metrics
    )
    samples = sample_rows(batch, 5)
    assert [[math.isnan(sample[name]) for name in means] for sample in samples[:3]] == [
        [False, True, True],
        [False, True, True],
        [True, False, True],
    ]


def test_a_further_number_that_some_responses_lack():
    samples = [
        Sample(row("1"), [1], {}, True, scores={"a": 1.0} | more) for more in ({}, {"a/b": 2.0})
    ]
    components = Batch.from_samples(samples, CPU).reward_components
    assert components["a/b"].tolist() == pytest.approx([math.nan, 2.0], nan_ok=True)


def test_a_source_that_fails_on_all_of_its_rows():
    """The zeros of the rows that it does not score do not hide it."""
    args = types.SimpleNamespace(reward=("math", "code"), reward_weights=())
    reward_sources = types.SimpleNamespace(why_missing=lambda name: f"{name} failed")
    rows = [row("1", ["math"]), row("1", ["code"])]
    failed = batch_of(rows, math=[1.0, 0.0], code=[0.0, math.nan])
    assert unscored(failed, reward_sources, args) == "code failed"
    without = batch_of(rows[:1], math=[1.0], code=[0.0])  # a step without rows for code
    assert unscored(without, reward_sources, args) == ""
