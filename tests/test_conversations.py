"""Responses of several turns: how they go on and end, and that only what was sampled is trained on."""

import dataclasses
import functools
import json
import math

import helpers
import pytest
import torch
from helpers import folder_of, metrics_of, read_lines, run, run_ranks
from tiny_models import CPU, make_tokenizer

import grpo
import ppo
import rloo
import utils
from plumbing.rewards.sources import EnvironmentSource
from plumbing.rollout.batch import Experience, forward_batch, in_batches, join, rollout
from plumbing.run import evaluation
from plumbing.turns.conversations import STOP_REASONS, Conversation, Conversations, load_conversations

WORLD = utils.World(0, 1, CPU)
never = lambda: False

FILE = helpers.GAME.rpartition(":")[0]
PATTERN = r"<(?P<name>\w+) (?P<arguments>.*?)>"


def args_of(script=grpo, **changes):
    flags = {"environment": helpers.GAME, "reward": ("environment",), "max_response_length": 60, **changes}
    return dataclasses.replace(script.Args(), tool_timeout=2.0, chat_template="", **flags)


def row_of(tokenizer, prompt: str = "go", **columns) -> dict:
    messages = [{"role": "user", "content": prompt}]
    own = {"prompt": prompt, "query": tokenizer.encode(prompt), "messages": messages, "answer": None}
    return {**own, "columns": {"prompt": prompt, **columns}}


def says(tokenizer, *texts: str, stop: bool = True):
    """A stand-in of the decode loop that says one text after the other, to every conversation."""
    turns = iter(texts)

    def generate(queries, uniforms, lengths, stop_strings=None):
        tokens = tokenizer.encode(next(turns)) + [tokenizer.eos_token_id] * stop
        responses = [tokens[:length] for length in lengths]
        return responses, [{"rollout_logprobs": [-1.0] * len(response)} for response in responses]

    return generate


# ---- how a conversation goes on and ends -----------------------------------------------------------------------------

CASES = {  # columns of the row, flags, what the model says, expected text, stop reason, reward, tool calls and errors
    "done": ({}, {}, ["ab", "c", "def"], "ab2>c3>def", "done", 0.6, 0, 0),
    "adds": ({"mode": "adds"}, {}, ["a", "b", "c"], "a1>b2>c", "done", 0.3, 0, 0),
    "no observation": ({"mode": "silent"}, {}, ["a", "b"], "ab", "done", 1.0, 0, 0),
    "max_turns": ({}, {"max_turns": 2}, ["ab", "c"], "ab2>c", "max_turns", 0.3, 0, 0),
    "turns of two": ({}, {"max_turn_length": 2}, ["abcd", "efg", "h"], "ab2>ef4>h", "done", 0.5, 0, 0),
    "length of the whole": ({}, {"max_response_length": 6}, ["ab", "cdef"], "ab2>c", "length", 0.3, 0, 0),
    "a long observation": ({"mode": "talks"}, {}, ["ab"], "ab", "length", 0.0, 0, 0),
    "the environment raises": ({"mode": "raises"}, {}, ["ab", "c"], "ab2>c", "error", math.nan, 0, 0),
    "the environment hangs": ({"mode": "hangs"}, {}, ["ab"], "ab", "error", math.nan, 0, 0),
    "too long a prompt": ({"mode": "long"}, {"max_prompt_length": 100}, [], "", "error", math.nan, 0, 0),
    "tools of TRL's form": (
        {}, {"environment": f"{FILE}:Counter", "tool_call_pattern": PATTERN},
        ['<increment {"by": 2}>', '<increment {"by": 1}>'], '<increment {"by": 2}>2<increment {"by": 1}>',
        "done", 3, 2, 0,
    ),
    "a reward at the end alone": (
        {"late": True}, {"environment": f"{FILE}:Counter", "tool_call_pattern": PATTERN},
        ['<increment {"by": 2}>', '<increment {"by": 2}>'], '<increment {"by": 2}>2<increment {"by": 2}>',
        "done", 4, 2, 0,
    ),
    "a special token ends a turn": (
        {}, {"tools": f"{FILE}:add", "turn_stop": ("<unk>",), "max_turn_length": 3}, ["ab<unk>"], "ab",
        "stop", None, 0, 0,
    ),
    "a tool, then words": (
        {}, {"tools": f"{FILE}:add"}, ['<add {"a": 1, "b": 2}>', "x"], '<add {"a": 1, "b": 2}>3x', "stop", None, 1, 0,
    ),
    "two calls": (
        {}, {"tools": f"{FILE}:add"}, ['<add {"a": 1, "b": 2}><add {"a": 3, "b": 4}>', "x"],
        '<add {"a": 1, "b": 2}><add {"a": 3, "b": 4}>37x', "stop", None, 2, 0,
    ),
    "bad arguments": (
        {}, {"tools": f"{FILE}:add"}, ['<add {"a": 1}>', "x"],
        '<add {"a": 1}>Error: add: the argument \'b\' is missingx', "stop", None, 1, 1,
    ),
    "a tool hangs": (
        {}, {"tools": f"{FILE}:sleep"}, ['<sleep {"seconds": 60}>', "x"],
        '<sleep {"seconds": 60}>Error: sleep gave no answer within --tool_timeout 2 sx', "stop", None, 1, 1,
    ),
    "a tool writes a megabyte": (
        {}, {"tools": f"{FILE}:fill"}, ['<fill {"count": 1000000}>'], '<fill {"count": 1000000}>', "length", None, 1, 0,
    ),
    "cut off": ({}, {"tools": f"{FILE}:add", "max_turn_length": 3}, ["abcdef"], "abc", "length", None, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_how_it_goes(name):
    columns, changes, said, text, stop_reason, reward, calls, errors = CASES[name]
    if "tools" in changes:
        tools = (changes["tools"],)
        changes = {"environment": "", "reward": ("math",), "tool_call_pattern": PATTERN, **changes, "tools": tools}
        changes.setdefault("max_response_length", 200)
    if changes.get("environment"):
        changes = {**changes, "max_response_length": 200}
    changes = {"max_response_length": 120, **changes} if "tools" in changes else changes
    tokenizer, args = make_tokenizer(), args_of(**changes)
    conversations = load_conversations(args, tokenizer, [tokenizer.eos_token_id])
    rows = [row_of(tokenizer, **columns), row_of(tokenizer, "other", **columns)]
    found = conversations.sample(rows, [1, 2], None, never, generate=says(tokenizer, *said))
    conversations.processes.close()
    for row, one in zip(rows, found):
        assert tokenizer.decode(one.response, skip_special_tokens=True) == text
        assert (one.stop_reason, one.tool_calls, one.tool_errors) == (stop_reason, calls, errors)
        assert one.stop_reason in STOP_REASONS and one.stopped == (stop_reason in ("stop", "done"))
        assert bool(one.error) == (stop_reason == "error")
        if reward is not None:
            assert one.reward == pytest.approx(reward, nan_ok=True)
        # The mask is set on what the model said, and on nothing else.
        turns = [turn["content"] for turn in one.turns if turn["role"] == "assistant"]
        masked = [token for token, own in zip(one.response, one.values["response_mask"]) if own]
        assert tokenizer.decode(masked, skip_special_tokens=True) == "".join(turns)
        assert one.metrics()["turns"] == len(turns)
        assert {len(column) for column in one.values.values()} == {len(one.response)}
        added = "[more]" if columns.get("mode") == "adds" else ""
        assert one.row["prompt"] == row["prompt"] + added and one.row["query"] == tokenizer.encode(one.row["prompt"])


def test_interruption_leaves_no_process():
    tokenizer = make_tokenizer()
    conversations = load_conversations(args_of(), tokenizer, [tokenizer.eos_token_id])
    calls = []
    interrupted = lambda: bool(calls)

    def generate(queries, uniforms, lengths, stop_strings=None):
        calls.append(len(queries))
        return [], []

    assert conversations.sample([row_of(tokenizer)] * 3, [0] * 3, None, interrupted, generate=generate) is None
    assert calls[0] == 3
    calls.clear()
    with pytest.raises(KeyError):  # an error ends the run: nobody waits for the turns of the others
        conversations.sample([row_of(tokenizer), {"query": [5]}], [0] * 2, None, never, generate=generate)
    assert not calls
    conversations.processes.close()


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"environment": ""}, "--reward environment: takes an --environment"),
        ({"min_response_length": 1}, "--min_response_length: takes responses of one turn"),
        ({"vllm_tensor_parallel": 2}, "--vllm_tensor_parallel: with --tools or --environment"),
        ({"environment": "nowhere.py:Game"}, "--environment nowhere.py:Game: there is no file nowhere.py"),
        ({"tools": ("nowhere.py:add",)}, "--tools nowhere.py:add: there is no file nowhere.py"),
    ],
)
def test_flags_that_do_not_fit(capsys, flags, message):
    with pytest.raises(SystemExit) as end:
        load_conversations(args_of(**flags), make_tokenizer(), [1])
    assert end.value.code == 2 and capsys.readouterr().err.startswith(f"error: {message}")


# ---- only what was sampled counts ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """(batch, policy, args): four conversations of a random model in float64, of PPO with rewards of turns."""
    folder = helpers.tiny_model(tmp_path_factory.mktemp("model"))
    tokenizer = make_tokenizer()
    changes = dict(turn_rewards=True, model=folder, max_turn_length=4, logits_chunk_tokens=5, micro_batch_tokens=64)
    args = args_of(ppo, **changes)
    policy = ppo.load_policy(args, None, torch.float64, CPU)
    stop_ids = [tokenizer.eos_token_id]
    conversations = load_conversations(args, tokenizer, stop_ids)
    rows = [row_of(tokenizer), row_of(tokenizer, "another", mode="adds")]

    class Rewards:
        models, verifiers = {}, ("environment",)

        def score(self, rows, texts, responses, interrupted):
            return {"environment": [row["environment"] for row in rows]}

    found = rollout(
        rows, 2, ("test",), generate=ppo.generate, model=policy.model, engine=None, tokenizer=tokenizer,
        stop_ids=stop_ids, rewards=Rewards(), args=args, interrupt=utils.Interrupt(WORLD), world=WORLD,
        autocast=torch.enable_grad, conversations=conversations,
    )  # fmt: skip
    conversations.processes.close()
    found.scores = found.reward_components["environment"]
    return found, policy, args


def places(batch, i: int) -> list[int]:
    """Positions in the response of what the model said, from the text of its turns alone."""
    found, position = [], 0
    for turn in batch.conversations[i].turns:
        length = len(make_tokenizer().encode(turn["content"])) if turn["role"] == "user" else None
        if length is None:  # the turn ends before the next observation
            rest = batch.conversations[i].values["response_mask"][position:]
            length = rest.index(0) if 0 in rest else len(rest)
            found += range(position, position + length)
        position += length
    assert position == len(batch.responses[i])
    return found


def test_logprobs_and_loss_by_hand(batch):
    """Each sampled token's log-probability is that of a plain forward pass over all tokens before it; the loss is the
    mean over these tokens alone."""
    batch, policy, args = batch
    options = dict(token_budget=64, world=WORLD, autocast=torch.enable_grad)
    outputs = forward_batch(policy, batch, **options)
    assert all(conversation.metrics()["observation_tokens"] for conversation in batch.conversations)
    count, loss, advantages = 0, 0.0, torch.linspace(-1, 1, batch.response_mask.numel()).view_as(batch.response_mask)
    for i, row in enumerate(batch.rows):
        query, response = row["query"], batch.responses[i]
        assert "[more]" not in row["columns"]["prompt"] and row["prompt"].endswith("[more]") == (i >= 2)
        logits = policy.model(torch.tensor([query + response])).logits[0].double() / args.temperature
        expected = logits.log_softmax(-1)
        own = places(batch, i)
        assert batch.response_mask[i].nonzero()[:, 0].tolist() == own
        for t in range(batch.response_mask.shape[1]):
            want = expected[len(query) + t - 1, response[t]].item() if t in own else 0.0
            assert outputs["logprobs"][i, t].item() == pytest.approx(want, abs=1e-12)
            assert batch.tokens["rollout_logprobs"][i, t].item() == pytest.approx(want, abs=1e-5)
            if t in own:
                count, loss = count + 1, loss - advantages[i, t].item() * want
    mask = batch.response_mask
    mine = ppo.aggregate(-advantages * outputs["logprobs"], mask, "token", mask.sum().item(), len(batch.rows), 60)
    assert mine.item() == pytest.approx(loss / count, abs=1e-12)
    found = evaluation.batch_metrics(batch)
    assert found["val/sequence_lengths"] == count / 4 and found["conversation/turns"] == 3
    assert found["stop_reason/done"] == 1 and found["stop_reason/length"] == 0


def test_advantages_pass_over_observations(batch):
    """GAE over a conversation is GAE over the model's tokens alone, as is the place of scores and of rewards."""
    batch, _, _ = batch
    generator = torch.Generator().manual_seed(0)
    mask, turns = batch.response_mask, batch.tokens["turn_rewards"].double()
    assert turns.sum(1).tolist() == pytest.approx(batch.scores.tolist()) and (turns != 0).sum(1).tolist() == [3] * 4
    values = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    kl = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    scores = batch.scores.double() + 1
    rewards = ppo.earlier_rewards(ppo.token_rewards(scores, kl, mask, 0.1), turns, mask)
    advantages, returns = ppo.gae(rewards, values, mask, 0.9, 0.8)
    for i, row in enumerate(mask):
        own = row.nonzero()[:, 0]
        expected = -0.1 * kl[i, own] + turns[i, own]
        expected[-1] += 1  # what the environment did not give
        torch.testing.assert_close(rewards[i, own], expected)
        dense = torch.ones(1, len(own), dtype=torch.bool)
        alone = ppo.gae(expected[None], values[i, own][None], dense, 0.9, 0.8)
        torch.testing.assert_close(advantages[i, own], alone[0][0])
        torch.testing.assert_close(returns[i, own], alone[1][0])
    assert not rewards[~mask].any() and not advantages[~mask].any() and not returns[~mask].any()


def test_join_select_and_state_keep_conversations(batch):
    batch, _, args = batch
    both = join([batch, batch])
    assert (
        both.conversations == batch.conversations * 2
        and both.response_mask.tolist() == batch.response_mask.tolist() * 2
    )
    both.scores = torch.cat([batch.scores] * 2)
    part = both.select([5, 0])
    assert part.conversations == [batch.conversations[1], batch.conversations[0]]
    experience = Experience(part, {}, 1, 2, [0.0], 3, args.group_size, "")
    state = json.loads(json.dumps(experience.state(), default=torch.Tensor.tolist))  # plain types and tensors
    assert state["batch"]["conversations"][0]["row"].keys() == {"prompt", "query", "sources"}
    again = Experience.from_state(experience.state(), dataclasses.replace(args, async_steps=1), CPU)
    assert all(isinstance(x, Conversation) for x in again.batch.conversations)
    assert again.batch.conversations[0].turns == part.conversations[0].turns
    rows = evaluation.sample_rows(again.batch, 1)
    assert rows[0]["turns"] == part.conversations[0].turns and rows[0]["stop_reason"] == "done"


@pytest.mark.parametrize("script", [grpo, rloo, ppo])
def test_failed_environments_are_left_out(batch, script):
    """Neither the score of an equal response nor the penalty of those that a limit cut off is theirs."""
    _, policy, _ = batch
    row = row_of(make_tokenizer())
    stopped = Conversation(row, [5], {"rollout_logprobs": [-1.0], "response_mask": [1]}, [], "stop", 1.0)
    failed = dataclasses.replace(stopped, stop_reason="error", error="it is broken")
    cut_off = dataclasses.replace(stopped, stop_reason="max_turns")

    class ThreeConversations(Conversations):
        def __init__(self):
            pass

        def sample(self, *_):
            return [failed, stopped, cut_off]

    class Rewards:
        models, verifiers = {"model": None}, ()

        def score(self, rows, texts, responses, interrupted):
            return {"model": [2.0, 3.0, 3.0]}

    rewards, args = Rewards(), args_of(script, reward=("model",), rollout_batch_size=1, group_size=3)
    sample = functools.partial(
        rollout, generate=grpo.generate, model=policy.model, engine=None, tokenizer=make_tokenizer(), stop_ids=[1],
        rewards=rewards, args=args, interrupt=utils.Interrupt(WORLD), world=WORLD, autocast=torch.enable_grad,
        conversations=ThreeConversations(),
    )  # fmt: skip
    found = script.collect(1, 0, [0.0, 0.0, 0.0], 0, prompts=[row], sample=sample, rewards=rewards, args=args)
    assert found.batch.reward_components["model"].tolist() == pytest.approx([math.nan, 2.0, 2.0], nan_ok=True)
    assert found.batch.scores.tolist() == pytest.approx([math.nan, 2.0, 0.0], nan_ok=True)


def test_rewards_that_are_no_finite_numbers():
    """They are no scores, and rewards of turns leave them out."""
    source, rows = EnvironmentSource(), [{"environment": x} for x in (math.inf, math.nan, -1.0)]
    assert source.score(rows, [], []) == pytest.approx([math.nan, math.nan, -1.0], nan_ok=True)
    tokenizer = make_tokenizer()
    conversations = load_conversations(args_of(ppo, turn_rewards=True), tokenizer, [tokenizer.eos_token_id])
    row = row_of(tokenizer, mode="unknown")
    (found,) = conversations.sample([row], [1], None, never, generate=says(tokenizer, "a", "b"))
    conversations.processes.close()
    assert math.isnan(found.reward) and sum(found.values["turn_rewards"]) == 0.5


def test_a_string_ends_a_turn(load, tokenizer):
    """With --turn_stop a turn ends with the token that completes the text, in the decode loop itself."""
    from transformers.generation.stopping_criteria import StopStringCriteria

    model, queries = load("qwen2", torch.float64, vocab_size=len(tokenizer)), [[5, 6], [7, 8, 9], [10]]
    uniforms, args = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)), grpo.Args(max_response_length=20)
    options = dict(model=model, stop_ids=[1], args=args, interrupted=never)
    whole, _ = in_batches(grpo.generate, queries, uniforms.double(), None, **options)
    stop = tokenizer.convert_ids_to_tokens(whole[0][3:5])
    text = tokenizer.decode(whole[0][3:5])
    assert len(text) == 2 and "\ufffd" not in text, stop
    criteria = StopStringCriteria(tokenizer, [text])
    cut, values = in_batches(grpo.generate, queries, uniforms.double(), [20, 7, 20], criteria, **options)
    assert cut[0] == whole[0][:5] and cut[1] == whole[1][:7] and cut[2] == whole[2]
    assert [len(value["rollout_logprobs"]) for value in values] == [5, 7, len(whole[2])]


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The flags of a run with an environment, and such a run of each script."""
    folder = tmp_path_factory.mktemp("runs")
    values = helpers.workspace(folder) | {"environment": helpers.GAME, "reward": "environment", "precision": "float64"}
    values |= {"max_response_length": 30, "max_turn_length": 5, "save_every": 1}
    done = {}
    for script, own in {"grpo": {}, "rloo": {}, "ppo": {"turn_rewards": True}}.items():
        done[script] = values | own | {"run_name": script}
        run(done[script], script=script)
    return done


@pytest.mark.parametrize("script", ["grpo", "rloo", "ppo"])
def test_sampler_and_trainer_agree(runs, script):
    rows, samples = metrics_of(runs[script]), read_lines(folder_of(runs[script]) / "samples.jsonl")
    for row in rows[1:]:
        assert row["rollout/logprob_diff_max"] < 1e-5 and math.isfinite(row["loss/policy_avg"])
        assert row["stop_reason/done"] == 1 and row["conversation/turns"] == 3
        assert row["conversation/observation_tokens"] > 0 and row["val/sequence_lengths"] <= 15
    assert [turn["role"] for turn in samples[0]["turns"]] == ["assistant", "user"] * 2 + ["assistant"]


def test_two_ranks_are_one(runs):
    values = runs["grpo"] | {"run_name": "ranks"}
    run_ranks(values, 2, (0, 0))
    one, two = metrics_of(runs["grpo"]), metrics_of(values)
    for row, other in zip(one, two, strict=True):
        assert other == pytest.approx(row, rel=1e-6, abs=1e-6)
    turns = lambda values: [row["turns"] for row in read_lines(folder_of(values) / "samples.jsonl")]
    assert turns(runs["grpo"]) == turns(values)


@pytest.mark.parametrize("signal, code", [("SIGKILL", -9), ("SIGTERM", 75)])
def test_ended_in_a_conversation(runs, signal, code):
    """The resumed run is the undisturbed one, bit for bit."""
    values = runs["grpo"] | {"run_name": signal}
    first = helpers.Running(values, place=f"tool_processes.ToolProcess.step:70:{signal}").wait()
    assert first.code == code and 0 < len(metrics_of(values)) < len(metrics_of(runs["grpo"]))
    run(values | {"resume": True})
    assert metrics_of(values) == metrics_of(runs["grpo"])
    read = lambda values: read_lines(folder_of(values) / "samples.jsonl")
    assert read(values) == read(runs["grpo"])
