"""vLLM's engine in this process: the same rollouts as transformers', weights that follow, and the
rollout of the next step in a thread while this one trains.
"""

import asyncio
import copy
import dataclasses
import importlib.util
import math
import time
import types

import engine_checks
import helpers
import pytest
import test_families
import torch
from engine_checks import (
    alike,
    converse,
    failure_of,
    greedy,
    largest_difference,
    logprobs_of,
    spoken,
    sync_in_flight,
)
from helpers import (
    assert_same_run,
    flags_of,
    folder_of,
    metrics_of,
    read_lines,
    recorded,
    run,
    run_here,
    run_ranks,
    variant,
)
from test_lora import BITSANDBYTES
from tiny_models import CPU, WORLD
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
from extras.lora import add_lora
from extras.vllm import engine as vllm_engine
from extras.vllm import sampling as vllm_sampling
from plumbing.models import loading, sharding
from plumbing.rollout.rollouts import Rollouts

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

STOPS = [1, 7, 8]
KEPT = []  # engines: one that is shut down takes the others' process group along


@pytest.fixture(scope="module", autouse=True)
def preloaded_and_kept():
    """Fork the runs from a server that has vLLM, and keep all engines."""
    made = vllm_engine.Engine.__init__
    with helpers.vllm_preloaded(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            vllm_engine.Engine,
            "__init__",
            lambda self, *args: KEPT.append(self) or made(self, *args),
        )
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("vllm")
    values = {**helpers.workspace(folder), "rollout_backend": "vllm", "kv_cache_gb": 0.02}
    for name, tied, stop in (("model", True, 2), ("untied", False, 4)):  # of heads of 32 or more
        helpers.tiny_model(folder / name, hidden_size=64, tie_word_embeddings=tied, stop=stop)
    return {**values, "eval_every": 0, "kl_coef": 0.01, "save_every": 0}


def untied(base: dict) -> str:
    return str(helpers.Path(base["model"]).parent / "untied")


@pytest.fixture(scope="module")
def setting(base):
    """(engine, model, tokenizer, flags) of the untied model. (The runs below are of the tied
    one.)
    """
    args = grpo.Args(
        model=untied(base),
        kv_cache_gb=0.02,
        max_prompt_length=180,
        max_response_length=20,
        precision="float32",
    )
    model = AutoModelForCausalLM.from_pretrained(args.model)
    engine = vllm_engine.Engine(args, WORLD, None, model)
    engine.sync(model, 0)
    return engine, model, AutoTokenizer.from_pretrained(args.model), args


def sums(tokenizer, count: int) -> list[list[int]]:
    return [tokenizer.encode(f"{a}+{3 * a}=") for a in range(1, count + 1)]


def sample(setting, queries, seeds, *interrupted, **changes):
    engine, _, _, args = setting
    args = dataclasses.replace(args, **changes)
    return engine_checks.sample(engine, queries, seeds, STOPS, args, *interrupted)


# ---- responses -----------------------------------------------------------------------------------


def test_greedy_token_by_token(setting):
    _, model, tokenizer, _ = setting
    queries = sums(tokenizer, 13)
    responses, _ = sample(setting, queries, None)
    assert responses == [greedy(model, query, STOPS, 20) for query in queries]
    assert len({len(response) for response in responses}) > 2


def test_log_probabilities_are_those_of_the_trainer(setting):
    _, model, tokenizer, _ = setting
    queries = sums(tokenizer, 100)
    responses, logprobs = sample(setting, queries, list(range(100)), temperature=0.7)
    assert largest_difference(model, queries, responses, logprobs, 0.7) < 1e-4
    # the temperature counts
    assert largest_difference(model, queries, responses, logprobs, 1.4) > 0.1
    stopped = [response[-1] in STOPS for response in responses]
    assert 0 < sum(stopped) < len(stopped)
    # only the last token stops; without a stop the length is full
    for response, end in zip(responses, stopped):
        assert not set(response[:-1]) & set(STOPS) and (end or len(response) == 20)


def test_a_response_is_a_function_of_its_seed(setting, monkeypatch):
    """Alone, in another order, next to others, and where the prompts do not fit together: so ranks
    do not matter.
    """
    engine, _, tokenizer, _ = setting
    queries = sums(tokenizer, 30)
    seeds = list(range(2**61, 2**61 + 30))
    whole = sample(setting, queries, seeds)
    backwards = sample(setting, queries[::-1], seeds[::-1])
    assert alike((backwards[0][::-1], backwards[1][::-1]), whole)
    assert alike(sample(setting, queries[:10], seeds[:10]), (whole[0][:10], whole[1][:10]))
    assert not alike(sample(setting, queries, [seed + 30 for seed in seeds]), whole)
    monkeypatch.setattr(
        engine.llm.llm_engine.engine_core.engine_core.scheduler, "max_num_scheduled_tokens", 64
    )
    assert engine.llm.reset_prefix_cache()
    assert alike(sample(setting, queries, seeds), whole)


def test_limits_reach_the_engine(setting):
    queries = sums(setting[2], 20)
    seeds = list(range(20))
    plain = sample(setting, queries, None)[0]
    assert {
        len(response) for response in sample(setting, queries, seeds, min_response_length=20)[0]
    } == {20}
    assert sample(setting, queries, seeds, top_p=1e-6)[0] == plain
    assert sample(setting, queries, None, repetition_penalty=1.9)[0] != plain


def test_an_interrupt_leaves_at_once_and_nothing_behind(setting, monkeypatch):
    engine, _, tokenizer, _ = setting
    queries = sums(tokenizer, 6)
    seeds = list(range(6))
    core = engine.llm.llm_engine
    step = core.step
    made = []
    with monkeypatch.context() as patch:
        patch.setattr(core, "step", lambda: time.sleep(0.02) or made.append(1) or step())
        interrupted = lambda: len(made) > 2
        assert sample(setting, queries, seeds, interrupted, min_response_length=20) is None
    assert 2 < len(made) < 15 and not core.has_unfinished_requests() and not engine.failure
    # A response that is complete before its cancelled task runs again.
    engine.waiting["late"] = engine.loop.create_future()
    engine.waiting["late"].cancel()
    late = iter([[types.SimpleNamespace(request_id="late", outputs=[None])]])
    with monkeypatch.context() as patch:
        patch.setattr(core, "step", lambda: next(late, None) or engine.waiting.clear() or [])
        asyncio.run(engine._step())
    assert not engine.failure
    assert sample(setting, queries, seeds)


def test_the_engine_answers_once(setting, monkeypatch):
    """Not at every token, with all of the response so far."""
    outputs = []
    core = setting[0].llm.llm_engine
    step = core.step
    monkeypatch.setattr(core, "step", lambda: outputs.append(step()) or outputs[-1])
    assert sample(setting, sums(setting[2], 3), [1, 2, 3])
    assert [output.finished for each in outputs for output in each] == [True] * 3


def test_an_engine_that_raises_says_why(setting, monkeypatch):
    """In a rollout or in a sync, from which on it makes no response."""
    engine, model, tokenizer, _ = setting
    gathered = []
    gather = lambda *given: gathered.append(1) or sharding.merged(*given)
    for owner, name in ((engine.llm.llm_engine, "step"), (engine.llm, "collective_rpc")):
        with monkeypatch.context() as patch:
            patch.setattr(vllm_sampling, "merged", gather)
            patch.setattr(owner, name, lambda *_, **__: [][0])
            engine.sync(model, 0)
            # of a sharded model, all ranks gather every weight
            assert len(gathered) == len(model.state_dict())
            gathered.clear()
            assert sample(setting, sums(tokenizer, 1), [3]) is None
        assert sample(setting, sums(tokenizer, 1), [3]) is None
        assert failure_of(engine) == "vLLM failed (IndexError: list index out of range)"
        assert sample(setting, sums(tokenizer, 1), [3])
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda **_: False)
        engine.sync(model, 0)
    engine.waiting["a request"] = None
    asyncio.run(engine._step())  # which makes no step
    assert "prefix cache" in failure_of(engine) and engine.waiting.pop("a request") is None


# ---- turns of conversations ----------------------------------------------------------------------


def talk(
    setting, seeds, waits=(), interrupted=lambda made: False, start="", stops=STOPS, **changes
):
    engine, _, tokenizer, args = setting
    queries = [tokenizer.encode(f"{start}{seed}+{seed}=") for seed in seeds]
    return converse(
        engine, queries, seeds, stops, dataclasses.replace(args, **changes), waits, interrupted
    )


def test_turns_are_those_of_the_trainer_and_functions_of_their_seeds(setting):
    """Whoever else speaks, and whenever."""
    whole = talk(setting, range(12), temperature=0.8)
    turns = [turn for each in whole for turn in each]
    assert largest_difference(setting[1], *zip(*turns), 0.8) < 1e-4
    assert all(
        not set(ids[:-1]) & set(STOPS) and (ids[-1] in STOPS or len(ids) == 8)
        for _, ids, _ in turns
    )
    late = [0.02 * (i % 4) for i in range(12)]
    assert alike(
        spoken(talk(setting, range(11, -1, -1), late, temperature=0.8)[::-1]), spoken(whole)
    )


def test_strings_that_end_a_turn(setting):
    """With the token that completes one; a special token's text counts, too."""
    tokenizer = setting[2]
    whole = talk(setting, range(12))
    assert alike(
        spoken(talk(setting, range(12), stops=[7, 8], turn_stop=("<eos>",))), spoken(whole)
    )
    pairs = [tokenizer.decode(ids[2:4]) for (_, ids, _), *_ in whole]
    stops = ("no such text", next(text for text in pairs if text.isascii() and len(text) == 2))
    ended = [turns[:1] for turns in talk(setting, range(12), turn_stop=stops)]
    complete = lambda ids: any(stop in tokenizer.decode(ids) for stop in stops)
    lengths = [
        next((n for n in range(1, len(ids)) if complete(ids[:n])), len(ids))
        for (_, ids, _), *_ in whole
    ]
    first = [
        [(query, ids[:n], logprobs[:n])] for ((query, ids, logprobs), *_), n in zip(whole, lengths)
    ]
    assert alike(spoken(ended), spoken(first)) and min(lengths) < 8


def test_what_ends_all_conversations(setting):
    """An interrupt, and a prompt that is too long; nothing is left."""
    engine, _, tokenizer, args = setting
    turns = talk(setting, range(6), [0.05] * 6, all, stops=[])
    made = [len(list(filter(None, each))) for each in turns]
    assert min(made) > 0 and sum(made) < 4 * 6 and not engine.failure
    turns = converse(engine, [tokenizer.encode("1+1="), [5] * 999], [1, 2], STOPS, args)
    assert len(list(filter(None, turns[0]))) < 4 and not any(turns[1])
    assert "999" in failure_of(engine) and not engine.llm.llm_engine.has_unfinished_requests()
    assert all(all(each) for each in talk(setting, range(6)))


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora_rank", [0, 3])
def test_the_engine_follows_the_weights(setting, lora_rank):
    """Every weight, the output head and adapters included; with prompts so long that the prefix
    cache would keep old states.
    """
    engine, original, tokenizer, _ = setting
    model = copy.deepcopy(original)
    queries = [tokenizer.encode("12+34=" * 9)] * 4
    if lora_rank:
        add_lora(model, grpo.Args(lora_rank=lora_rank))
    difference = lambda: largest_difference(
        model, queries, *sample(setting, queries, list(range(4)))
    )
    assert difference() < 1e-4
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3).add_(0.02)
    assert difference() > 0.05
    engine.sync(model, 0)
    size = sum(weight.numel() * weight.element_size() for weight in original.state_dict().values())
    assert difference() < 1e-4 and engine.metrics() == {"rollout/sync_gb": size / 1e9}
    engine.sync(original, 0)


@pytest.fixture(scope="module")
def adapting(setting):
    """As `setting`, of a model with an adapter, whose base has numbers of bfloat16."""
    _, original, tokenizer, args = setting
    args = dataclasses.replace(args, lora_rank=3)
    model = copy.deepcopy(original)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    add_lora(model, args)
    return vllm_engine.Engine(args, WORLD, None, model), model, tokenizer, args


@pytest.mark.parametrize("quantize", ["", "4bit"])
def test_an_adapter_goes_to_the_engine(adapting, quantize):
    """Beside the base, which only the first sync brings: so a change arrives that merging in
    bfloat16 would lose, in a hundredth of the bytes.
    """
    engine, model, tokenizer, args = adapting
    if quantize:
        pytest.importorskip("bitsandbytes", reason=BITSANDBYTES)
        model = AutoModelForCausalLM.from_pretrained(args.model)
        add_lora(model, dataclasses.replace(args, quantize=quantize))
        model.to("cpu")
    engine.has_base = False  # or another one
    queries = sums(tokenizer, 12)
    difference = lambda: largest_difference(
        model, queries, *sample(adapting, queries, list(range(12)))
    )
    engine.sync(model, 0)
    adapter = 4 * sum(x.numel() for x in model.parameters() if x.requires_grad)
    assert engine.synced > 10 * adapter and difference() < 1e-4
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=3e-4, generator=numbers)
    weights = [
        [sharding.merged(tensor, layer, merge).bfloat16() for merge in (False, True)]
        for _, tensor, layer in sharding.base_weights(model)
        if layer and not quantize
    ]
    kept = [(base == merged).double().mean().item() for base, merged in weights]
    assert not kept or min(kept) > 0.8, kept
    stale = difference()
    engine.sync(model, 1)
    assert stale > 1e-3 and difference() < 1e-4 and adapter < engine.synced < 1.5 * adapter


def test_adapters_that_vllm_does_not_take(adapting, monkeypatch):
    """Of a rank or a family that it does not support: then weights are merged. Layers that its model
    lacks are an error.
    """
    engine, model, _, args = adapting
    layers = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj".split()
    settings = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": layers}
    assert vllm_engine.lora_settings(args, model) == settings
    assert not vllm_engine.lora_settings(dataclasses.replace(args, lora_rank=513), model)
    with monkeypatch.context() as patch:
        patch.setattr("vllm.model_executor.models.supports_lora", lambda family: False)
        assert not vllm_engine.lora_settings(args, model)
    data, *scale = vllm_sampling.packed_adapter(model, torch.float32)
    others = data.replace(b"layers.0.mlp", b"layers.9.mlp"), *scale
    monkeypatch.setattr(vllm_sampling, "packed_adapter", lambda *_: others)
    engine.sync(model, 0)
    assert "--vllm_lora: it lacks 3 layers of the adapter, such as model" in failure_of(engine)


def test_weights_arrive_while_requests_run(setting, adapting):
    adapting[0].has_base = False
    for engine, model, tokenizer, args in (setting, adapting):
        args = dataclasses.replace(args, max_response_length=150)
        difference, of_others, mixed = sync_in_flight(engine, model, sums(tokenizer, 12), args)
        assert difference < 1e-4 and of_others > 0.1 and mixed > 0


# ---- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(base, tmp_path_factory) -> dict[int, dict]:
    """{async_steps: flags} of runs on one rank, with which others are compared."""
    folder = str(tmp_path_factory.mktemp("one"))
    common = {**base, "output_dir": folder, "total_episodes": 32, "eval_every": 2}
    runs = {steps: {**common, "run_name": f"one {steps}", "async_steps": steps} for steps in (0, 1)}
    for values in runs.values():
        run(values)
    return runs


def responses_of(values: dict) -> list[str]:
    return [row["response"] for row in read_lines(folder_of(values) / "samples.jsonl")]


def test_two_ranks_sample_the_same(one, tmp_path):
    """Each rank's engine gets whole tensors after each update, though a rollout has run during the
    update.
    """
    values = variant(one[1], tmp_path, run_name="two", shard="fsdp")
    run_ranks(values, 2, (0, 0))
    assert responses_of(values) == responses_of(one[1])
    for a, b in zip(metrics_of(values)[1:], metrics_of(one[1])[1:], strict=True):
        assert (
            a["rollout/staleness"] == (a["step"] > 1)
            and a["rollout/sync_gb"] == b["rollout/sync_gb"]
        )
        for key in ("objective/scores", "loss/policy_avg", "objective/kl"):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5)


def test_one_engine_for_two_ranks(base, tmp_path):
    """Tensor parallelism: both ranks make every rollout of their engine, and each counts once. An
    adapter is gathered from both.
    """
    # of ranks that were killed; vLLM would not start
    for left in helpers.Path("/dev/shm").glob("-tp:*cpushm*"):
        left.unlink()
    values = variant(base, tmp_path, run_name="one", total_episodes=16, model=untied(base))
    values |= {"lora_rank": 2, "learning_rate": 1e-2}
    two = {**values, "run_name": "two", "vllm_tensor_parallel": 2, "shard": "fsdp"}
    run(values)
    run_ranks(two, 2, (0, 0))
    assert responses_of(values) == responses_of(two)


@pytest.mark.parametrize("async_steps", [0, 2])
def test_a_stopped_run_goes_on(one, tmp_path, async_steps):
    """Stopped in the rollout of step 3, or of a step after it, which is made anew, or in the
    evaluation meanwhile.
    """
    stopped = variant(one[0], tmp_path, run_name="stopped", async_steps=async_steps)
    run(stopped, code=75, place="extras.vllm.engine.Engine.generate:5:SIGTERM")
    done = run({**stopped, "resume": True})
    assert "goes on after step 2" in done.out and len(metrics_of(stopped)) == 5
    if not async_steps:
        assert_same_run(stopped, one[0])


# ---- asynchronous --------------------------------------------------------------------------------

ASYNC = dict(async_steps=1, save_every=1, keep_checkpoints=0, total_episodes=40)


def overlap(monkeypatch) -> None:
    """Let responses that begin before an update of the weights end after it, however long it takes:
    while the run trains, they get four tokens.
    """
    left = [math.inf]
    step, take, sync = LLMEngine.step, Rollouts.take, vllm_engine.Engine.sync

    def step_or_wait(core):
        while left[0] <= 0:
            time.sleep(0.01)
        left[0] -= 1
        return step(core)

    def take_and_limit(rollouts, number):
        experience = take(rollouts, number)
        left[0] = 4
        return experience

    def sync_within(engine, *given):
        while left[0] > 0 and engine.waiting:
            time.sleep(0.01)
        left[0] = math.inf
        sync(engine, *given)

    monkeypatch.setattr(LLMEngine, "step", step_or_wait)
    monkeypatch.setattr(Rollouts, "take", take_and_limit)
    monkeypatch.setattr(vllm_engine.Engine, "sync", sync_within)


@pytest.mark.parametrize(
    "script, async_steps", [("grpo", 0), ("rloo", 1), ("grpo", 2), ("distill", 2), ("ppo", 3)]
)
def test_which_policy_made_which_token(base, tmp_path, monkeypatch, script, async_steps):
    """A token's log-probability is that of the checkpoint that it names: with --async_steps 0 of the
    step before, and with 1 of the one before that; from 2 on no older than so many steps, and some
    responses are of several, as weights arrive while requests run. Those of ppo are conversations.
    """
    module = __import__(script)
    running = []
    load = vllm_engine.Engine._load
    collected = recorded(monkeypatch, module, "collect")
    monkeypatch.setattr(
        vllm_engine.Engine,
        "_load",
        lambda self, *given: running.append(len(self.waiting)) or load(self, *given),
    )
    if async_steps > 1:
        overlap(monkeypatch)
    values = variant(
        base, tmp_path, **{**ASYNC, "async_steps": async_steps}, learning_rate=1e-2, temperature=0.8
    )
    if script == "ppo":
        values |= {"environment": helpers.GAME, "reward": "episode"}
    if script == "rloo":
        player = helpers.ROOT / "tests" / "support" / "player.py"
        values |= {"agent": f"{player}:play", "reward": "episode"}
    if script == "distill":
        values = flags_of(script, values)
        values |= {"teacher": untied(base), "passes": 10 / len(helpers.ROWS)}
    run_here(values, script)
    checkpoints = folder_of(values) / "checkpoints"
    policies = [AutoModelForCausalLM.from_pretrained(base["model"])]
    policies += [
        AutoModelForCausalLM.from_pretrained(checkpoints / f"step_{step}") for step in range(1, 5)
    ]
    ages = {}
    for (_, _, step, *_), experience in collected:
        batch = experience.batch
        named = batch.tokens["policy_steps"].masked_fill(~batch.response_mask, -1).long()
        ages[step] = step - 1 - named[batch.response_mask]
        for i, x in enumerate(batch.samples):
            for policy in set(named[i].tolist()) - {-1}:
                expected = logprobs_of(policies[policy], x.row["query"], x.response.tolist(), 0.8)
                n = len(expected)
                difference = expected - batch.tokens["rollout_logprobs"][i, :n]
                assert difference[named[i, :n] == policy].abs().max() < 1e-4
    assert sorted(ages) == [1, 2, 3, 4, 5] and not ages[1].any()
    rows = read_lines(folder_of(values) / "metrics.jsonl")[-5:]
    for step, row in enumerate(rows, 1):
        assert row["rollout/staleness"] == pytest.approx(ages[step].double().mean().item())
        assert row["rollout/staleness_max"] == ages[step].max() <= async_steps
        assert row["rollout/sync_gb"] * 1e9 == policies[0].num_parameters() * 4  # tied head: once
        if not async_steps:
            assert row["rollout/logprob_diff_max"] < 1e-4 and row["rollout/prob_diff_mean"] < 1e-5
            assert row["rollout/correction_mean"] == pytest.approx(1, abs=1e-6)
    if async_steps < 2:
        assert all(age == async_steps for step in range(2, 6) for age in ages[step])
        assert not any(running)
    else:
        assert any(running) and any(row["rollout/mixed_policies"] for row in rows)


def test_old_log_probabilities_are_of_the_policy_that_sampled(base, tmp_path):
    """What the engine said; with a correction the policy at the start of the step, weighted by the
    quotient.
    """
    exact = dict(num_epochs=1, mini_batch_size=8, learning_rate=1e-2, total_episodes=24)
    rows = {}
    for correction in ("none", "truncate"):
        values = variant(
            base, tmp_path, **{**ASYNC, **exact}, run_name=correction, rollout_correction=correction
        )
        run(values)
        rows[correction] = metrics_of(values)[-3:]
    kl = {name: [row["policy/approxkl_avg"] for row in each] for name, each in rows.items()}
    assert kl["none"][0] < 1e-8 and kl["none"][2] > 1e-6 and max(kl["truncate"]) < 1e-12
    means = [row["rollout/correction_mean"] for row in rows["truncate"]]
    assert means[0] == pytest.approx(1, abs=1e-5) and abs(means[2] - 1) > 1e-4


def test_the_demo_learns_two_steps_ahead(tmp_path, long):
    """As the synchronous one does: 0.43 at its start, 0.7 after 15 steps."""
    if not long:
        pytest.skip("runs with --long")
    flags = dict(total_episodes=15 * 256, rollout_batch_size=32, group_size=8, mini_batch_size=256)
    flags |= dict(max_prompt_length=16, max_response_length=48, micro_batch_tokens=4096)
    flags |= dict(learning_rate=3e-4, adam_betas=(0.9, 0.95), warmup_ratio=0.04, eval_every=0)
    flags |= dict(dataset="arithmetic", reward="gsm8k", system_prompt="", save_every=0)
    flags |= dict(model=helpers.ROOT / "assets" / "tiny", rollout_backend="vllm", kv_cache_gb=0.1)
    values = {**flags, "output_dir": tmp_path, "run_name": "run", "async_steps": 2}
    run({**values, "gradient_checkpointing": False})
    rows = metrics_of(values)
    scores = [row["objective/scores"] for row in rows]
    assert sum(scores[:3]) / 3 < 0.5 and sum(scores[-3:]) / 3 > 0.6
    assert max(row["rollout/staleness_max"] for row in rows) == 2


def test_evaluate(base, tmp_path):
    """scripts/evaluate.py: greedy responses of vLLM are those of transformers."""
    values = {
        name: base[name] for name in ("model", "dataset", "reward", "kv_cache_gb", "system_prompt")
    }
    values |= {"output_dir": str(tmp_path), "temperature": 0.0, "max_response_length": 10}
    for backend in ("hf", "vllm"):
        run({**values, "backend": backend, "run_name": backend}, script="evaluate")
    hf, vllm = (read_lines(tmp_path / backend / "samples.jsonl") for backend in ("hf", "vllm"))
    assert [row["response"] for row in hf] == [row["response"] for row in vllm]


# ---- models that read images ---------------------------------------------------------------------

TORCHVISION = """
import sys
from unittest.mock import MagicMock
for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
    sys.modules["torchvision" + name] = MagicMock(__spec__=__spec__, __version__="0.28")
"""


def test_a_model_that_reads_images_samples_text(tmp_path, monkeypatch):
    """vLLM's CPU build does not import what reads images; the names of weights are the same with
    it.
    """
    (tmp_path / "torchvision.py").write_text(TORCHVISION)
    monkeypatch.syspath_prepend(tmp_path)
    # of the process in which vLLM inspects the class
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # not what an earlier run has found
    text = test_families.FAMILIES["mistral3"]["text_config"]
    monkeypatch.setitem(text, "head_dim", 32)  # as the CPU build requires
    folder = test_families.family_folder("mistral3", tmp_path / "model")
    args = grpo.Args(model=folder, kv_cache_gb=0.02, max_prompt_length=20, max_response_length=20)
    engine = vllm_engine.Engine(args, WORLD, None)
    model = loading.load_model("--model", folder, torch.float32, CPU)
    engine.sync(model, 0)
    made = sample((engine, model, None, args), [[5, 6, 7], [8]], [1, 2])
    assert largest_difference(model, [[5, 6, 7], [8]], *made) < 1e-4
    part = sharding.base_weights(model)[:9]
    monkeypatch.setattr("extras.vllm.sampling.base_weights", lambda model: part)
    engine.sync(model, 0)
    assert "of its weights are none of the trained model's" in failure_of(engine)
