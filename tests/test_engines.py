"""What a run does with an engine that works no more, whatever the engine: the step is saved, and
one line says why.
"""

import asyncio
import dataclasses
import importlib.util
import math
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import helpers
import pytest
import torch
from helpers import metrics_of, run_here, steps_of, variant, workspace
from tiny_models import CPU, WORLD

import grpo
import utils
from extras.vllm.sampling import RolloutEngine
from plumbing.data.mixture import next_prompts
from plumbing.models import loading
from plumbing.rewards.sources import Scoring
from plumbing.rollout import engines
from plumbing.rollout.batch import Batch, Sample
from plumbing.rollout.rollouts import Rollouts
from plumbing.rollout.sampler import Experience, Sampler


class StandIn:
    """Responses of two tokens by their seeds; fails at the call of a number."""

    about = "a stand-in"

    def __init__(self, fails_at: int = 0):
        self.fails_at = fails_at
        self.calls = 0
        self.failure = ""

    def generate(self, queries, seeds, stop_ids, args, interrupted, end):
        self.calls += 1
        if self.calls == self.fails_at:
            self.failure = "vLLM failed (RuntimeError: it broke)"
        for place, seed in enumerate([] if self.failure else seeds):
            end(place, [3 + (seed or 0) % 90, stop_ids[0]], {"rollout_logprobs": [-4.5, -4.5]})

    def sync(self, model, step):
        pass

    sleep = lambda self: None
    metrics = lambda self: {}


@pytest.mark.parametrize("async_steps, call, step", [(0, 3, 1), (0, 4, 2), (1, 5, 2)])
def test_a_failure_ends_the_run_with_the_step_saved(
    tmp_path, monkeypatch, capsys, async_steps, call, step
):
    """In a rollout and in an evaluation, also where a rollout is one step ahead; then the run can
    go on.

    Calls: the evaluation at step 0, the rollouts of steps 1 and 2, the evaluation at step 2, and so on.
    """
    values = {
        **workspace(tmp_path),
        "rollout_backend": "vllm",
        "async_steps": async_steps,
        "save_every": 0,
    }
    use = lambda engine: monkeypatch.setattr(engines, "rollout_engine", lambda *_: engine)
    straight = {**values, "run_name": "straight"}
    stopped = {**values, "run_name": "stopped"}
    use(StandIn())
    run_here(straight)
    weights = {row.get("rollout/correction_mean", 1) for row in metrics_of(straight)}
    # by default, only synchronous rollouts of an engine are corrected
    assert (weights == {1}) == async_steps
    use(StandIn(fails_at=call))
    capsys.readouterr()
    line = helpers.refused(capsys, run_here, stopped)
    assert line == "error: --rollout_backend vllm: vLLM failed (RuntimeError: it broke)"
    assert steps_of(stopped) == [f"step_{step}"]
    use(StandIn())
    run_here({**stopped, "resume": True})
    # a rollout that was one step ahead is made anew
    assert len(metrics_of(stopped)) == len(metrics_of(straight))
    assert async_steps or metrics_of(stopped) == metrics_of(straight)


@pytest.mark.parametrize("owner, name", [(StandIn, "generate"), (utils.Optimizer, "step")])
def test_an_error_in_either_thread_ends_the_run(tmp_path, monkeypatch, owner, name):
    monkeypatch.setattr(engines, "rollout_engine", lambda *_: StandIn())
    values = workspace(tmp_path) | {"rollout_backend": "vllm", "async_steps": 1, "eval_every": 0}
    calls = []
    original = getattr(owner, name)

    def broken(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise OSError("it broke here")
        return original(*args, **options)

    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(OSError, match="it broke here"):
        run_here(values)


@pytest.mark.parametrize("installed, gpu, flags, outputs, expected", helpers.table("engines.yaml"))
def test_which_engine_samples(installed, gpu, flags, outputs, expected, monkeypatch, capsys):
    """auto is vLLM on a GPU where it is installed and can do what the flags ask."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(
        "extras.vllm.engine.Engine", lambda *_: types.SimpleNamespace(about="the engine")
    )
    monkeypatch.setattr(engines, "check_decodes", lambda *_: None)
    args = grpo.Args(**flags)
    choose = lambda: engines.rollout_engine(
        args, None, WORLD, loading.precision("float32", CPU), outputs
    )
    if expected in ("vllm", "hf"):
        assert (choose() is not None) == (expected == "vllm")
        printed = {"vllm": "rollout: the engine\n", "hf": "rollout: transformers\n"}[expected]
        assert capsys.readouterr().out == printed
    else:
        assert expected in helpers.refused(capsys, choose)


@pytest.mark.parametrize("script", ["grpo", "rloo", "ppo"])
def test_trainer_and_sampler_are_compared_before_an_update(tmp_path, monkeypatch, script):
    """Also where a step makes several updates and the old log-probabilities are the sampler's."""
    monkeypatch.setattr(engines, "rollout_engine", lambda *_: None)  # the model itself samples
    values = variant(
        workspace(tmp_path),
        tmp_path,
        async_steps=1,
        total_episodes=8,
        kl_in="loss",
        learning_rate=0.1,
        precision="float64",
        eval_every=0,
        save_every=0,
    )
    run_here(values, script)
    assert metrics_of(values)[0]["rollout/prob_diff_mean"] < 1e-6


def rollouts_of(state: dict, total_steps: int, prompts, collect, **fields) -> Rollouts:
    """Rollouts of a run that is a stand-in; `fields` are those of the sampler."""
    empty = Sampler(*[None] * 9, world=None, precision=None)
    sampler = dataclasses.replace(empty, reward_sources=types.SimpleNamespace(), **fields)
    world = types.SimpleNamespace(device=CPU, rollout_world=lambda _: object())
    interrupt = types.SimpleNamespace(requested=False)
    run = types.SimpleNamespace(
        state=state, total_steps=total_steps, world=world, interrupt=interrupt
    )
    return Rollouts(run, sampler, prompts, collect)


@pytest.mark.parametrize("async_steps", [1, 3])
def test_when_rollouts_begin_and_weights_arrive(async_steps):
    """A rollout begins at its prompts when the step so many steps before trains, and shares its group
    of ranks with none that is under way; one step ahead, new weights wait for it, else not.
    """
    happened = []
    groups = {}  # of ranks, by step
    left_by = {}  # whose state a step is given
    begun = threading.Semaphore(0)
    released = threading.Event()

    def collect(sampler, prompts, step: int, state: dict):
        happened.append((step, state["position"]))
        groups[step] = sampler.world
        left_by[step] = state.get("left_by")
        begun.release()
        if step > 1:
            assert released.wait(30)
        state = {"position": state["position"] + 5, "left_by": step}
        return types.SimpleNamespace(unscored="", state=state)

    engine = types.SimpleNamespace(
        sync=lambda model, step: happened.append(f"sync {step}"), sleep=lambda: None
    )
    args = grpo.Args(async_steps=async_steps, rollout_batch_size=5)
    state = {"step": 0, "position": 10}
    rollouts = rollouts_of(state, 5, [], collect, args=args, engine=engine)
    interrupt = rollouts.run.interrupt
    rollouts.take(1)
    assert all(begun.acquire(timeout=30) for _ in range(1 + async_steps))
    ahead = [(step, 10 + 5 * (step - 1)) for step in range(2, 2 + async_steps)]
    assert happened[:2] == ["sync 0", (1, 10)] and sorted(happened[2:]) == ahead
    assert len(set(groups.values())) == 1 + async_steps
    if async_steps == 1:
        threading.Timer(0.2, released.set).start()
    rollouts.sync()
    assert happened[-1] == "sync 1" and released.is_set() == (async_steps == 1)
    released.set()
    for step in range(2, 6):
        rollouts.take(step)
    assert sorted(entry for entry in happened if isinstance(entry, tuple)) == [
        (step, 10 + 5 * (step - 1)) for step in range(1, 6)
    ]
    del left_by[1]
    assert left_by == {step: max(1, step - async_steps) for step in range(2, 6)}
    # The process waits at its end until what is under way has noticed.
    rollouts.collect = lambda *_: [time.sleep(0.1) for _ in iter(lambda: interrupt.requested, True)]
    rollouts.ahead[6] = rollouts._begin(6, state)
    rollouts._leave()
    assert rollouts.ahead[6].done()


@pytest.mark.parametrize("async_steps, late", [(0, 0), (1, 0), (2, 0), (2, 1), (3, 2)])
def test_which_pass_rates_a_step_sees(async_steps, late):
    """Those after the step K before it, whichever rollout ends first: here some wait until those of
    the next `late` steps have ended. A group without a score changes no rate.
    """
    prompts = [{"row": i} for i in range(20)]
    args = grpo.Args(async_steps=async_steps, rollout_batch_size=5, group_size=2)
    args.pass_rates, args.seed = (0.3, 0.7), 1
    ended = [threading.Event() for _ in range(7)]  # by step
    drawn = {}
    rate_of = lambda step, row: math.nan if row == 3 else (row + step) % 3 / 2

    def collect(sampler, prompts, step: int, state: dict):
        position = state.get("position", 0)
        rows = next_prompts(prompts, step, state, 0, 5, args)
        drawn[step] = [row["row"] for row in rows]
        if step > 1 and step % (late + 1) == 0:
            assert all(event.wait(30) for event in ended[step + 1 : step + late + 1])
        scores = [[rate_of(step, i), math.nan] for i in drawn[step]]
        samples = [
            Sample(row, [1], {}, True, scores={"judge": score})
            for row, group in zip(rows, scores)
            for score in group
        ]
        batch = Batch.from_samples(samples, CPU)
        ended[step].set()
        return Experience(batch, batch, {}, 0, {"position": position + 5}, "")

    rollouts = rollouts_of(state := {"step": 0}, 6, prompts, collect, args=args)
    rollouts.sampler.reward_sources.verifiers = ("judge",)
    known = [{}]  # rates after a step
    for step in range(1, 7):
        experience = rollouts.take(step)
        state.update(experience.state)
        seen = {"pass_rates": known[max(step - max(1, async_steps), min(1, step - 1))]}
        assert drawn[step] == [x["row"] for x in next_prompts(prompts, step, seen, 0, 5, args)]
        known.append(known[-1] | {i: rate_of(step, i) for i in drawn[step] if i != 3})
        assert state["pass_rates"] == known[-1]
    rates = list(known[-1].values())
    shares = {x: experience.metrics[f"pass_rates/{x}"] for x in ("below", "inside", "above")}
    counts = [rates.count(rate) / 20 for rate in (0.0, 0.5, 1.0)]
    assert [*shares.values()] == pytest.approx(counts) and all(counts)
    assert experience.metrics["pass_rates/unseen"] == pytest.approx(1 - len(rates) / 20)


def test_what_ends_coroutines_that_run_in_the_engine():
    """An error of one, an exit and an interrupt: the others are cancelled, and the engine goes on."""
    engine = RolloutEngine()
    cancelled = []

    async def wait(seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    async def end(how: Callable) -> None:
        await asyncio.sleep(0.01)
        how()

    def leave() -> None:
        raise utils.UserError("--environment: it exits")

    for how, error in ((leave, utils.UserError), (lambda: {}["a"], KeyError)):
        with pytest.raises(error):
            engine.run_all([wait(60), end(how), wait(60)], lambda: False)
    assert len(cancelled) == 4
    asked = iter([False, True])
    engine.run_all([wait(0), wait(60)], lambda: next(asked))
    assert len(cancelled) == 5
    engine.run_all([wait(0), wait(0)], lambda: False)
    engine.is_shared = True  # then an interrupt of one rank ends nothing
    ended = []
    engine.run_all([end(lambda: ended.append(1))], lambda: True)
    assert ended


def test_a_source_without_threads_scores_one_rollout_at_a_time():
    """A reward model, though the rollouts of several steps end at once."""
    at_once = []

    def score(samples):
        at_once.append(1)
        time.sleep(0.05)
        assert at_once == [1]
        at_once.clear()
        return [1.0]

    models = {"model": types.SimpleNamespace(whole=False, score=score)}
    sources = types.SimpleNamespace(
        sources=models, models=models, waited=0.0, lock=threading.Lock(), state={}
    )

    def finish(_) -> float:
        scoring = Scoring(sources, lambda: False)
        scoring.add(0, types.SimpleNamespace(row={}))
        return scoring.finish()[0].scores["model"]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(finish, range(4))) == [1.0] * 4
