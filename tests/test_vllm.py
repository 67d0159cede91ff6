"""vLLM's real engine in this process: the same rollouts as transformers', weights that follow, and the rollout of the
next step in a thread while this one trains."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import math
import os
import subprocess
import threading
import time
import types

import forked_python
import helpers
import pytest
import torch
from helpers import folder_of, metrics_of, read_lines, run, run_here, run_ranks, same_weights
from test_evaluate import measure
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import utils
from plumbing import flags
from plumbing.models import loading as models
from plumbing.rollout import batch as rollout
from plumbing.rollout import engines, vllm_engine
from plumbing.turns.conversations import load_conversations

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

CPU = torch.device("cpu")
STOPS = [1, 7, 8]
KEPT = []  # engines: one that is shut down takes the others' process group along


@pytest.fixture(scope="module", autouse=True)
def preloaded():
    with helpers.vllm_preloaded():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("vllm")
    values = {**helpers.workspace(folder), "rollout_backend": "vllm", "kv_cache_gb": 0.02, "max_prompt_length": 64}
    for name, tied in (("model", True), ("untied", False)):
        path = helpers.tiny_model(folder / name, hidden_size=64, tie_word_embeddings=tied)  # heads of 32 or more
        model = AutoModelForCausalLM.from_pretrained(path)
        model.get_output_embeddings().weight.data[1] *= 2 if tied else 4  # responses of many lengths
        model.save_pretrained(path)
    return {**values, "eval_every": 0, "kl_coef": 0.01, "save_every": 0}


@pytest.fixture(autouse=True)
def keep_engines(monkeypatch):
    """Keep them, and give those of a test so few tokens at a time that the prompts of a rollout do not fit together."""
    made = vllm_engine.Engine.__init__

    def make(self, *args):
        KEPT.append(self)
        made(self, *args)
        scheduler_of(self).max_num_scheduled_tokens = 64

    monkeypatch.setattr(vllm_engine.Engine, "__init__", make)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, "ERROR" if "LEVEL" in name else "1"))


def scheduler_of(engine):
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def variant(base: dict, tmp_path, **changes) -> dict:
    return {**base, "output_dir": str(tmp_path), "run_name": "run", **changes}


def args_of(base: dict, **changes) -> grpo.Args:
    names = {field.name for field in dataclasses.fields(grpo.Args)}
    values = {name: value for name, value in {**base, **changes}.items() if name in names}
    return grpo.Args(**{**values, "reward": (values["reward"],)})


@pytest.fixture(scope="module")
def made(base):
    """(engine, model, tokenizer, flags) of the tied and of the untied model."""
    found = {}
    for name in ("model", "untied"):
        path = str(helpers.Path(base["model"]).parent / name)
        args = args_of(base, model=path, max_prompt_length=180, max_response_length=20)
        engine = vllm_engine.Engine(args, utils.World(0, 1, CPU), None)
        model = models.load_model("--model", args.model, torch.float32, CPU)
        engine.sync(model)
        KEPT.append(engine)
        found[name] = engine, model, AutoTokenizer.from_pretrained(args.model), args
    return found


def roll(setting, samples, engine, key=("rollout", 1, 1), conversations=None, **changes):
    """A rollout of the script's own, by the engine or (None) by transformers."""
    _, model, tokenizer, args = setting
    prompts = [f"{a}+{b}=" for a, b in zip(range(1, 40, 3), range(2, 93, 7))]
    rows = [
        {"prompt": text, "query": tokenizer.encode(text), "answer": "1", "columns": {"prompt": text}}
        for text in prompts
    ]

    class Scores:
        models, verifiers = {}, ("a",)

        def score(self, rows, texts, responses, interrupted):
            return {"a": [float(len(text)) for text in texts]}

    return rollout.rollout(
        rows, samples, key, generate=grpo.generate, model=model, engine=engine, tokenizer=tokenizer, stop_ids=STOPS,
        rewards=Scores(), args=dataclasses.replace(args, **changes), world=utils.World(0, 1, CPU),
        interrupt=types.SimpleNamespace(requested=False), autocast=contextlib.nullcontext,
        conversations=conversations,
    )  # fmt: skip


def logprobs_of(model, query: list[int], response: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([query + response])).logits[0, len(query) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def worst(batch, model, temperature: float) -> float:
    """The largest difference between the engine's log-probabilities and the model's."""
    differences = []
    for i, (query, response) in enumerate(zip(batch.queries, batch.responses)):
        sampled = batch.response_mask[i, : len(response)]
        expected = logprobs_of(model, query, response, temperature)[sampled]
        found = batch.tokens["rollout_logprobs"][i, : len(response)][sampled]
        differences.append((found - expected).abs().max().item())
    return max(differences)


# ---- the same rollout -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model", "untied"])
def test_greedy_token_by_token(made, name):
    """Responses, their ends, masks and texts; stop tokens beside the tokenizer's own end token."""
    theirs, ours = (roll(made[name], 0, engine) for engine in (made[name][0], None))
    assert theirs.responses == ours.responses and theirs.texts == ours.texts
    assert torch.equal(theirs.response_mask, ours.response_mask) and torch.equal(theirs.stopped, ours.stopped)
    assert 0 < theirs.stopped.sum() < len(theirs.stopped) and len({len(r) for r in theirs.responses}) > 2
    assert torch.equal(theirs.reward_components["a"], ours.reward_components["a"])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_log_probabilities_are_those_of_the_trainer(made, temperature):
    batch = roll(made["model"], 8, made["model"][0], temperature=temperature)
    assert worst(batch, made["model"][1], temperature) < 1e-4
    assert worst(batch, made["model"][1], 2 * temperature) > 0.1  # the temperature counts
    ends = [response[-1] in STOPS for response in batch.responses]
    assert batch.stopped.tolist() == ends and 0 < sum(ends) < len(ends)
    for response, end in zip(batch.responses, ends):  # only the last token stops; without a stop the length is full
        assert not set(response[:-1]) & set(STOPS) and (end or len(response) == 20)


def test_the_distribution_at_temperature_1(made):
    """Frequencies of the first two tokens of 3,000 responses against the exact probabilities (chi-square)."""
    engine, model, tokenizer, args = made["model"]
    query, count = tokenizer.encode("12+34="), 3000
    short = dataclasses.replace(args, max_response_length=2)
    seeds = utils.generator("seeds").integers(2**62, size=count).tolist()
    responses, _ = engine.generate([query] * count, seeds, STOPS, short, lambda: False)
    with torch.no_grad():
        first = model(input_ids=torch.tensor([query])).logits[0, -1].softmax(-1)
    frequent = [token for token in first.topk(5).indices.tolist() if token not in STOPS][:2]
    for given in (None, *frequent):
        drawn = [r[0] for r in responses] if given is None else [r[1] for r in responses if r[0] == given]
        ids = torch.tensor([query if given is None else [*query, given]])
        with torch.no_grad():
            exact = model(input_ids=ids).logits[0, -1].softmax(-1) * len(drawn)
        seen = torch.bincount(torch.tensor(drawn), minlength=len(exact))[: len(exact)].float()
        common = exact >= 5
        cells = [(seen[common], exact[common]), (seen[~common].sum()[None], exact[~common].sum()[None])]
        chi = sum(((s - e).square() / e.clamp(min=1e-9)).sum().item() for s, e in cells)
        freedom = int(common.sum())
        assert freedom > 3 and chi < freedom + 5 * math.sqrt(2 * freedom), (given, chi, freedom)


def test_a_response_is_a_function_of_its_seed(made):
    """Alone, in another order, beside others: so the number of ranks does not matter."""
    engine, _, tokenizer, args = made["model"]
    queries = [tokenizer.encode(f"{i}+{i}=") for i in range(6)] * 2
    seeds = list(range(2**61, 2**61 + 12))
    whole = engine.generate(queries, seeds, STOPS, args, lambda: False)
    assert whole == engine.generate(queries, seeds, STOPS, args, lambda: False) and whole[0][:6] != whole[0][6:]
    backwards = engine.generate(queries[::-1], seeds[::-1], STOPS, args, lambda: False)
    assert [column[::-1] for column in backwards] == list(whole)
    for i in (3, 8):
        alone = engine.generate([queries[i]], [seeds[i]], STOPS, args, lambda: False)
        assert alone == ([whole[0][i]], [whole[1][i]])


def test_the_sampling_flags_reach_the_engine(made):
    engine, model, tokenizer, args = made["model"]
    setting = made["model"]
    assert all(len(r) >= 12 for r in roll(setting, 4, engine, min_response_length=12).responses)
    few = roll(setting, 16, engine, top_k=2, max_response_length=1)
    assert all(len(set(few.responses[i][0] for i in range(j, j + 16))) <= 2 for j in range(0, len(few.responses), 16))
    assert roll(setting, 8, engine, top_p=1e-6).responses[::8] == roll(setting, 0, engine).responses
    plain, without = (roll(setting, 0, engine, repetition_penalty=x, max_response_length=12) for x in (1.0, 1.9))
    assert plain.responses != without.responses


def test_prompts_that_do_not_fit_together(made, monkeypatch):
    """Those that are left wait. (A prefill in chunks fails on a CPU where a request has a seed.)"""
    engine, _, tokenizer, args = made["model"]
    queries = [tokenizer.encode(f"{i}+{i}=" * 9)[:60] for i in range(30)]
    whole = engine.generate(queries, list(range(30)), STOPS, args, lambda: False)
    assert scheduler_of(engine).max_num_scheduled_tokens >= 65_536
    monkeypatch.setattr(scheduler_of(engine), "max_num_scheduled_tokens", 100)
    assert engine.llm.reset_prefix_cache()
    assert engine.generate(queries, list(range(30)), STOPS, args, lambda: False) == whole != None  # noqa: E711


def test_an_interrupt_leaves_at_once_and_nothing_behind(made):
    engine, _, tokenizer, args = made["model"]
    queries, seeds = [tokenizer.encode(f"{i}+{i}=") for i in range(6)], list(range(6))
    expected, asked = engine.generate(queries, seeds, STOPS, args, lambda: False), []
    assert engine.generate(queries, seeds, STOPS, args, lambda: asked.append(1) or len(asked) > 3) is None
    assert len(asked) == 4 and not engine.llm.llm_engine.has_unfinished_requests() and not engine.failure
    assert engine.generate(queries, seeds, STOPS, args, lambda: False) == expected


def test_an_engine_that_raises_says_why(made, monkeypatch):
    """In a rollout or in a sync, from which on it makes no response."""
    engine, model, tokenizer, args = made["model"]
    generate = lambda: engine.generate([tokenizer.encode("1+2=")], [3], STOPS, args, lambda: False)
    expected = generate()
    for owner, name in ((engine.llm.llm_engine, "step"), (engine.llm, "collective_rpc")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_, **__: [][0])
            engine.sync(model)
            assert generate() is None and engine.failure == "vLLM failed (IndexError: list index out of range)"
        assert generate() is None
        engine.failure = ""
        assert generate() == expected
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: False)
        engine.sync(model)
        assert "prefix cache" in engine.failure
    engine.failure = ""


# ---- turns of conversations -------------------------------------------------------------------------------------


def converse(setting, seeds, waits=(), interrupted=lambda: False, start="", stops=STOPS, **changes):
    engine, _, tokenizer, args = setting
    args = dataclasses.replace(args, **changes)
    queries = [tokenizer.encode(f"{start}{seed}+{seed}=") for seed in seeds]
    return helpers.converse(engine, queries, seeds, stops, args, waits, interrupted)


def test_log_probabilities_of_turns_are_those_of_the_trainer(made):
    turns = [turn for said in converse(made["model"], range(12), temperature=0.8) for turn in said]
    for query, ids, logprobs in turns:
        expected = logprobs_of(made["model"][1], query, ids, 0.8)
        assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4
        assert not set(ids[:-1]) & set(STOPS) and (ids[-1] in STOPS or len(ids) == 8)
    assert len({len(ids) for _, ids, _ in turns}) > 3


def test_a_turn_is_a_function_of_its_seed(made):
    """Whoever else speaks, and whenever; as a response is."""
    engine, _, tokenizer, args = made["model"]
    expected = converse(made["model"], range(12))
    late = [0.02 * (i % 4) for i in range(12)]
    assert converse(made["model"], range(11, -1, -1), late) == expected[::-1]
    assert converse(made["model"], [7]) == expected[7:8]
    (response,), (logprobs,) = engine.generate([tokenizer.encode("7+7=")], [7000], STOPS, args, lambda: False)
    assert (response[:8], logprobs[:8]) == expected[7][0][1:]


def test_a_turn_computes_its_new_tokens_only(made, monkeypatch):
    """The whole blocks of what was said before are in vLLM's cache; none of them after a sync."""
    engine, model, *_ = made["model"]
    outputs, step = [], engine.llm.llm_engine.step
    monkeypatch.setattr(engine.llm.llm_engine, "step", lambda: outputs.extend(found := step()) or found)
    block = engine.llm.llm_engine.vllm_config.cache_config.block_size
    for _ in range(2):
        engine.sync(model)
        turns = converse(made["model"], [5], start="12+34=" * 20)[0]
        computed = [0, *(len(query) + len(turn) - 1 for query, turn, _ in turns[:-1])]  # a turn's last token is not
        cached = [output.num_cached_tokens for output in outputs if output.finished]
        assert cached == [tokens // block * block for tokens in computed] and cached[-1] > 0
        del outputs[:]


def test_strings_that_end_a_turn(made):
    """With the token that completes one; a special token's text counts, too."""
    tokenizer = made["model"][2]
    whole = converse(made["model"], range(12))
    assert converse(made["model"], range(12), stops=[7, 8], turn_stop=("<eos>",)) == whole
    pairs = [tokenizer.decode(ids[2:4]) for (_, ids, _), *_ in whole]
    stop = next(text for text in pairs if text.isascii() and len(text) == 2)
    ended = converse(made["model"], range(12), turn_stop=("no such text", stop))
    for ((_, full, logprobs), *_), ((_, ids, theirs), *_) in zip(whole, ended):
        length = next((n for n in range(len(full)) if stop in tokenizer.decode(full[:n])), len(full))
        assert (ids, theirs) == (full[:length], logprobs[:length])
    assert [said[0] for said in ended] != [said[0] for said in whole]


def test_an_interrupt_ends_all_conversations(made):
    engine, asked = made["model"][0], []
    expected = converse(made["model"], range(6))
    said = converse(made["model"], range(6), stops=[], interrupted=lambda: asked.append(1) or len(asked) > 12)
    assert all(turns[0] and not any(turns[1:]) for turns in said)  # each has 8 tokens
    assert not engine.llm.llm_engine.has_unfinished_requests() and not engine.failure
    assert converse(made["model"], range(6)) == expected


def test_an_engine_that_raises_ends_all_conversations(made, monkeypatch):
    engine, _, tokenizer, args = made["model"]
    expected, step, steps = converse(made["model"], range(6)), engine.llm.llm_engine.step, []
    fails = lambda: step() if steps.append(1) or len(steps) < 12 else [][0]
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm.llm_engine, "step", fails)
        said = converse(made["model"], range(6), [0, 0, 0, 0, 0, 0.5], stops=[])
    assert all(turns[0] and not any(turns[1:]) for turns in said[:5]) and not any(said[5])
    assert engine.failure == "vLLM failed (IndexError: list index out of range)" and len(steps) == 12
    engine.failure = ""
    assert converse(made["model"], range(6)) == expected
    queries = [tokenizer.encode("1+1="), [5] * 999]  # one that is too long
    assert helpers.converse(engine, queries, [1, 2], STOPS, args) == [[None] * 4] * 2
    assert "999" in engine.failure and not engine.llm.llm_engine.has_unfinished_requests()
    engine.failure = ""


def test_a_conversation_that_raises_leaves_nothing_behind(made):
    engine, _, tokenizer, args = made["model"]
    expected = converse(made["model"], range(6))

    async def breaks() -> None:
        await engine.sample(tokenizer.encode("1+1="), 1, 3, STOPS, args, lambda: False)
        raise OSError("it broke here")

    async def conversations() -> None:
        long = engine.sample(tokenizer.encode("2+2="), 2, 100, [], args, lambda: False)
        await asyncio.gather(breaks(), long)

    with pytest.raises(OSError, match="it broke here"):
        asyncio.run(conversations())
    assert not engine.llm.llm_engine.has_unfinished_requests() and not engine.failure
    assert converse(made["model"], range(6)) == expected


# ---- weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model", "untied"])
def test_the_engine_follows_the_weights(made, name, monkeypatch):
    """Every weight, the output head included; with prompts so long that the prefix cache would keep old states."""
    engine, model, tokenizer, args = made[name]
    query = tokenizer.encode("12+34=" * 9)
    seeds, before = list(range(4)), {k: x.clone() for k, x in model.state_dict().items()}

    def difference() -> float:
        responses, logprobs = engine.generate([query] * 4, seeds, STOPS, args, lambda: False)
        expected = [logprobs_of(model, query, response, 1.0) for response in responses]
        return max((torch.tensor(a) - b).abs().max().item() for a, b in zip(logprobs, expected))

    assert difference() < 1e-4
    size = sum(x.numel() * x.element_size() for x in before.values())
    for parameter in dict(model.named_parameters()):
        with torch.no_grad():
            model.get_parameter(parameter).mul_(1.3).add_(0.02)
    assert difference() > 0.05
    engine.sync(model)
    assert difference() < 1e-4 and engine.metrics() == {"rollout/sync_gb": size / 1e9}
    model.load_state_dict(before)
    engine.sync(model)
    assert difference() < 1e-4


def test_the_engine_gets_merged_weights(base, tmp_path):
    """Of a model with a LoRA adapter."""
    values = variant(base, tmp_path, total_episodes=24, learning_rate=1e-2, lora_rank=3, lora_alpha=8.0)
    run_here(values)
    rows = metrics_of(values)
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows) and rows[-1]["objective/kl"] != 0


def test_conversations_are_those_of_the_decode_loop(made):
    """Greedy turns, with an environment whose answers hang on what was said; sampled ones by the same log-probs."""
    flags = {"environment": helpers.GAME, "reward": ("environment",), "max_turn_length": 6}
    engine, model, tokenizer, args = made["untied"]
    conversations = load_conversations(dataclasses.replace(args, **flags), tokenizer, STOPS)
    with contextlib.closing(conversations.processes):
        found = [roll(made["untied"], 0, which, conversations=conversations, **flags) for which in (engine, None)]
        sampled = roll(made["untied"], 4, engine, conversations=conversations, **flags)
    assert found[0].responses == found[1].responses and found[0].response_mask.equal(found[1].response_mask)
    assert all(x.metrics()["turns"] == 3 for x in sampled.conversations)
    assert worst(sampled, model, args.temperature) < 1e-4


def test_random_numbers_of_the_process_stay_as_they_were(base):
    state = torch.get_rng_state()
    engine = vllm_engine.Engine(args_of(base), utils.World(0, 1, CPU), None)
    assert torch.equal(torch.get_rng_state(), state)
    assert "cannot sleep" in engine.about and "0.02 GB" in engine.about
    engine.sleep()  # which changes nothing here
    assert not engine.asleep


# ---- runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(base, tmp_path_factory) -> dict[int, dict]:
    """{async_steps: flags} of runs on one rank, with which others are compared."""
    folder = str(tmp_path_factory.mktemp("one"))
    common = {**base, "output_dir": folder, "total_episodes": 32, "eval_every": 2}
    runs = {steps: {**common, "run_name": f"one {steps}", "async_steps": steps} for steps in (0, 1)}
    for running in [helpers.start(values) for values in runs.values()]:
        assert running.wait().code == 0, running.err[-3000:]
    return runs


def responses_of(values: dict) -> list[str]:
    return [row["response"] for row in read_lines(folder_of(values) / "samples.jsonl")]


def test_two_ranks_sample_the_same(one, tmp_path):
    two = variant(one[0], tmp_path, run_name="two")
    run_ranks(two, 2, (0, 0))
    assert responses_of(two) == responses_of(one[0])
    for a, b in zip(metrics_of(one[0]), metrics_of(two), strict=True):
        assert {k: a[k] for k in b if k.startswith("eval/")} == {k: b[k] for k in b if k.startswith("eval/")}
        for key in ("objective/scores", "loss/policy_avg", "objective/kl"):
            assert key not in b or a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("steps", [0, 1])
def test_sharded_weights_reach_the_engine(one, tmp_path, steps):
    """Each rank's engine gets whole tensors after each update, also where a rollout has run beside the update."""
    values = variant(one[steps], tmp_path, run_name="sharded", shard="fsdp", eval_every=0)
    run_ranks(values, 2, (0, 0))
    assert responses_of(values) == responses_of(one[steps])
    for a, b in zip(metrics_of(values), metrics_of(one[steps])[1:], strict=True):
        assert a["rollout/staleness"] == steps * (a["step"] > 1) and a["rollout/sync_gb"] == b["rollout/sync_gb"]
        assert steps or a["rollout/logprob_diff_max"] < 1e-4
        for key in ("objective/scores", "loss/policy_avg", "objective/kl"):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5)


def test_one_engine_for_two_ranks(base, tmp_path):
    """Tensor parallelism: both ranks make every rollout of their engine, and each counts once."""
    for left in helpers.Path("/dev/shm").glob("-tp:*cpushm*"):  # of ranks that were killed; vLLM would not start
        left.unlink()
    values = variant(base, tmp_path, run_name="one", total_episodes=8)
    two = {**values, "run_name": "two", "vllm_tensor_parallel": 2}
    values["model"] = two["model"] = str(helpers.Path(base["model"]).parent / "untied")
    running = helpers.start(values)
    run_ranks(two, 2, (0, 0))
    assert running.wait().code == 0, running.err[-3000:]
    assert responses_of(values) == responses_of(two)


def test_resume_is_exact(one, tmp_path):
    """Stopped in the rollout of step 3; an evaluation makes two."""
    stopped = variant(one[0], tmp_path, run_name="stopped")
    run(stopped, code=75, place="plumbing.rollout.vllm_engine.Engine.generate:7:SIGTERM")
    done = run({**stopped, "resume": True})
    assert "goes on after step 2" in done.out
    assert metrics_of(stopped) == metrics_of(one[0]) and len(metrics_of(stopped)) == 5
    assert same_weights(folder_of(stopped) / "final", folder_of(one[0]) / "final")


def test_runs_with_a_correction(base, tmp_path):
    """Where the engine agrees with the trainer, a correction changes nothing."""
    losses = {}
    for how in ("none", "truncate", "mask", "sequence_mask"):
        values = variant(base, tmp_path, run_name=how, total_episodes=16, rollout_correction=how)
        run_here(values)
        losses[how] = [row["loss/policy_avg"] for row in metrics_of(values)]
    for how in losses:
        assert losses[how] == pytest.approx(losses["none"], rel=1e-4, abs=1e-6), how


# ---- asynchronous -----------------------------------------------------------------------------------------------

ASYNC = dict(async_steps=1, save_every=1, keep_checkpoints=0, total_episodes=40)


@pytest.mark.parametrize("script", ["grpo", "rloo", "ppo"])
@pytest.mark.parametrize("async_steps", [0, 1])
def test_which_policy_made_which_data(base, tmp_path, monkeypatch, script, async_steps, capsys):
    """Steps 1 and 2 train on data of policy 1, step k on data of policy k - 1; synchronous: step k on policy k, of
    which the metrics say that the engine has the weights that the run trains.

    Policy k is checkpoint k - 1, by whose log-probabilities the data are recognised. Those of ppo are conversations.
    """
    module, seen = __import__(script), []
    monkeypatch.setattr(
        module, "collect", lambda *a, f=module.collect, **o: seen.append((a[0], f(*a, **o))) or seen[-1][1]
    )
    values = variant(base, tmp_path, **{**ASYNC, "async_steps": async_steps}, learning_rate=1e-2)
    values |= {"eval_every": 2, "temperature": 0.8}
    if script == "ppo":
        values |= {"environment": helpers.GAME, "reward": "environment", "max_turn_length": 4}
    run_here(values, script)
    assert "rollout: vLLM " in capsys.readouterr().out
    checkpoints = folder_of(values) / "checkpoints"
    policies = {1: AutoModelForCausalLM.from_pretrained(base["model"])}
    policies |= {k: AutoModelForCausalLM.from_pretrained(checkpoints / f"step_{k - 1}") for k in range(2, 6)}
    order = [(step, min(policies, key=lambda k: worst(got.batch, policies[k], 0.8))) for step, got in seen]
    assert order == [(1, 1), *((k, k - async_steps) for k in range(2, 6))]
    assert all(worst(got.batch, policies[policy], 0.8) < 1e-4 for (_, got), (_, policy) in zip(seen, order))
    first, *rows = read_lines(folder_of(values) / "metrics.jsonl")
    assert helpers.finite_or_null([first, *rows]) and "eval/accuracy" in first
    assert [row["rollout/staleness"] for row in rows] == [0, *[async_steps] * 4]
    for row in rows:
        assert row["time/sync"] > 0 and row["rollout/sync_gb"] > 0
        if not async_steps:
            assert row["rollout/logprob_diff_max"] < 1e-4 and row["rollout/prob_diff_mean"] < 1e-5
            assert row["rollout/correction_mean"] == pytest.approx(1, abs=1e-6)
    assert [got.policy_step + 1 for _, got in seen] == [policy for _, policy in order]


def test_the_rollout_runs_while_the_step_trains(base, tmp_path, monkeypatch):
    spans = {"rollout": [], "training": []}

    def timed(name, function):
        def call(*args, **options):
            begin = time.monotonic()
            result = function(*args, **options)
            spans[name].append((begin, time.monotonic(), threading.current_thread() is threading.main_thread()))
            return result

        return call

    monkeypatch.setattr(vllm_engine.Engine, "generate", timed("rollout", vllm_engine.Engine.generate))
    monkeypatch.setattr(grpo.Policy, "hidden_and_labels", timed("training", grpo.Policy.hidden_and_labels))
    run_here(variant(base, tmp_path, **ASYNC, micro_batch_tokens=8))
    assert [main for *_, main in spans["rollout"]] == [True, False, False, False, False]
    for begin, end, _ in spans["rollout"][1:]:
        assert any(begin < start < end for start, *_ in spans["training"])


def test_old_log_probabilities_are_of_the_policy_that_sampled(base, tmp_path, monkeypatch):
    """What the engine said; with a correction the policy at the start of the step, weighted by the quotient."""
    seen = []
    monkeypatch.setattr(grpo, "policy_loss", lambda *a, f=grpo.policy_loss: seen.append(a) or f(*a))
    made = []
    monkeypatch.setattr(grpo, "collect", lambda *a, f=grpo.collect, **o: made.append(f(*a, **o)) or made[-1])
    exact = dict(num_epochs=1, mini_batch_size=8, micro_batch_tokens=10_000, learning_rate=1e-2, total_episodes=24)
    run_here(variant(base, tmp_path, **{**ASYNC, **exact}))
    for (_, old, _, mask, *_), experience in zip(seen, made, strict=True):
        tokens = experience.batch.tokens
        sampled = {tuple(row[m].tolist()) for row, m in zip(tokens["rollout_logprobs"], tokens["response_mask"])}
        assert {tuple(row[m].tolist()) for row, m in zip(old, mask)} == sampled
    assert (seen[0][0] - seen[0][1])[seen[0][3]].abs().max() < 1e-4 < (seen[2][0] - seen[2][1])[seen[2][3]].abs().max()
    del seen[:], made[:]
    values = variant(base, tmp_path, **{**ASYNC, **exact}, rollout_correction="truncate")
    values["run_name"] = "corrected"
    run_here(values)
    assert all(torch.equal(now.detach(), old) for now, old, *_ in seen)
    means = [row["rollout/correction_mean"] for row in metrics_of(values)]
    assert means[0] == pytest.approx(1, abs=1e-5) and abs(means[2] - 1) > 1e-4


def test_resume_of_an_asynchronous_run_is_exact(base, tmp_path):
    """The rollout that is one step ahead is part of the checkpoint."""
    values = variant(base, tmp_path, **{**ASYNC, "filter_groups": "refill", "num_epochs": 2})
    straight, parts = {**values, "run_name": "straight"}, {**values, "run_name": "parts"}
    running = helpers.start(straight)
    run({**parts, "total_episodes": 40}, code=75, place="utils.Optimizer.metrics:3:SIGTERM")
    done = run({**parts, "resume": True})
    assert "goes on after step 3" in done.out and running.wait().code == 0
    assert metrics_of(parts) == metrics_of(straight) and len(metrics_of(straight)) == 5
    assert same_weights(folder_of(parts) / "final", folder_of(straight) / "final")


def test_a_signal_while_the_next_rollout_runs(base, tmp_path):
    """The rollout is left, the step's training is kept, and the run goes on with a new rollout."""
    values = variant(base, tmp_path, **ASYNC)
    run(values, code=75, place="plumbing.rollout.vllm_engine.Engine.generate:3:SIGTERM")
    done = run({**values, "resume": True})
    assert "goes on after step" in done.out and len(metrics_of(values)) == 5


def test_two_ranks_asynchronously(one, tmp_path):
    """The threads of the ranks meet in a group of their own, beside the training's."""
    two = variant(one[1], tmp_path, run_name="two", save_every=1)
    run_ranks(two, 2, (0, 0))
    assert responses_of(two)[:16] == responses_of(one[1])[:16]


BREAK = """
import tyro
import grpo, utils, plumbing.rollout.vllm_engine
calls, original = [], {what}
def broken(*args, **options):
    calls.append(1)
    if len(calls) == 3:
        raise OSError("it broke here")
    return original(*args, **options)
{what} = broken
grpo.main(tyro.cli(grpo.Args))
"""


@pytest.mark.parametrize("what", ["plumbing.rollout.vllm_engine.Engine.generate", "utils.Optimizer.step"])
def test_an_error_in_either_thread_ends_the_run(base, tmp_path, what):
    """With its traceback and exit code 1; the other thread does not keep the process alive."""
    script = tmp_path / "broken.py"
    script.write_text(BREAK.format(what=what))
    words = helpers.words(variant(base, tmp_path, **ASYNC))
    with forked_python.python() as python:
        done = subprocess.run([python, script, *words], capture_output=True, text=True, timeout=90)
    assert done.returncode == 1 and done.stderr.count("OSError: it broke here") == 1, done.stderr[-2000:]
    assert "in broken" in done.stderr and "Fatal Python error" not in done.stderr


def test_evaluate(tmp_path):
    """scripts/evaluate.py: greedy, the same responses as with transformers; sampled, the same twice, and about as many
    correct ones."""
    greedy, sampled = dict(temperature=0, samples=1, num_prompts=40), dict(num_prompts=60, samples=8)
    _, expected, _ = measure(tmp_path, **greedy, run_name="hf")
    ours, _, _ = measure(tmp_path, **sampled, run_name="hf-sampled")
    _, found, _ = measure(tmp_path, **greedy, backend="vllm", run_name="greedy")
    one, two = (measure(tmp_path, **sampled, backend="vllm", run_name=name)[:2] for name in ("one", "two"))
    assert found == expected and one[1] == two[1]
    assert len({s["response"] for s in one[1]}) > 200  # each response has noise of its own
    score = lambda results: results["scores"]["gsm8k"]["avg@8"]
    spread = math.hypot(score(ours)["se"], score(one[0])["se"])
    assert abs(score(ours)["value"] - score(one[0])["value"]) < 4 * spread


def test_flags(base, capsys):
    for options, words in (
        (dict(rollout_backend="hf", async_steps=1), "--async_steps 1: takes --rollout_backend vllm or server"),
        (dict(rollout_backend="vllm", temperature=2.5), "--temperature 2.5: vLLM takes at most 2"),
        (dict(rollout_backend="server"), "--rollout_backend server and --rollout_servers"),
        (dict(rollout_servers=("http://x",)), "--rollout_backend server and --rollout_servers"),
        (dict(vllm_tensor_parallel=2, rollout_backend="hf"), "--vllm_tensor_parallel 2: takes --rollout_backend vllm"),
        (dict(rollout_correction="mask", rollout_correction_cap=0.5), "--rollout_correction_cap 0.5"),
    ):
        args = args_of(base, **{"mini_batch_size": 8, **options})
        with pytest.raises(SystemExit):
            flags.check_rl_args(args)
            engines.rollout_engine(args, utils.World(0, 1, CPU), None)
        err = capsys.readouterr().err
        assert err.startswith("error: ") and words in err and err.count("\n") == 1
