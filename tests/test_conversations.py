"""Responses of several turns: how they go on and end, and that only sampled tokens are trained
on.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
from concurrent.futures import ThreadPoolExecutor

import helpers
import numpy as np
import pytest
import torch
from helpers import metrics_of, recorded, run_here
from tiny_models import CPU, WORLD, make_tokenizer
from transformers.generation.stopping_criteria import StopStringCriteria

import grpo
import ppo
import rloo
from extras.episodes.conversations import STOP_REASONS, Conversation, Conversations
from extras.vllm.sampling import RolloutEngine
from plumbing.models.loading import load_model, precision
from plumbing.processes import EventLoop, Processes
from plumbing.rewards.sources import EpisodeSource, RewardSources
from plumbing.rollout.batch import forward_batch
from plumbing.rollout.sampler import Sampler
from plumbing.run.metrics import conversation_metrics

never = lambda: False
GREEDY = np.full((5, 200), -1.0)  # in place of random numbers

FILE = helpers.GAME.rpartition(":")[0]
ALONE = {"tools": (f"{FILE}:add",), "environment": ""}
# Joins the contents, as if there were none.
TEMPLATE = """{{- tools[0].function.name if tools }}
{%- for m in messages %}{{- m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{%- endfor %}"""
# as --turn_stop, for a random model: turns of a few tokens
SHORT = tuple("0123456789abcdefghijklm")


def args_of(script=grpo, **changes):
    flags = {
        "environment": helpers.GAME,
        "reward": ("episode",),
        "max_response_length": 200,
        "timeout": 60.0,
        **changes,
    }
    return dataclasses.replace(script.Args(), chat_template="", **flags)


@functools.cache
def conversations_of(**changes) -> Conversations:
    tokenizer = make_tokenizer(chat_template=TEMPLATE if changes.get("tools") else None)
    return Conversations(args_of(**changes), tokenizer, [tokenizer.eos_token_id])


def row_of(tokenizer, prompt: str = "go", **columns) -> dict:
    row = {
        "prompt": prompt,
        "query": tokenizer.encode(prompt),
        "messages": [{"role": "user", "content": prompt}],
    }
    return {**row, "answer": None, "columns": {"prompt": prompt, **columns}}


def says(tokenizer, *texts: str):
    """A stand-in of the decode loop that says one text after the other, to every conversation."""
    turns = iter(texts)

    def generate(queries, uniforms, lengths, stop_strings=None):
        tokens = tokenizer.encode(next(turns)) + [tokenizer.eos_token_id]
        for place, length in enumerate(lengths):
            response = tokens[:length]  # a fork stores a further value of each token: itself
            yield place, response, {"rollout_logprobs": [-1.0] * len(response), "again": response}

    return generate


def talk(
    conversations: Conversations, rows: list[dict], interrupted, generate
) -> list[Conversation]:
    ended = {}
    conversations.sample(rows, [1, 2], GREEDY, interrupted, ended.__setitem__, generate=generate)
    return [ended[place] for place in range(len(ended))]


# ---- how a conversation goes on and ends ---------------------------------------------------------

# columns of the row, flags, turns of the model, expected text, stop reason, reward, tool calls and
# errors
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
CASES = json.loads(
    (helpers.ROOT / "tests" / "data" / "conversations.json")
    .read_text()
    .replace("GAME", FILE)
    .replace("ADD", json.dumps(ADD)[1:-1])
)


@pytest.mark.parametrize("name", CASES)
def test_how_it_goes(name):
    columns, changes, said, text, stop_reason, reward, calls, errors = CASES[name]
    tokenizer = make_tokenizer()
    reward = math.nan if reward is None else reward
    conversations = conversations_of(
        **{flag: tuple(x) if isinstance(x, list) else x for flag, x in changes.items()}
    )
    rows = [row_of(tokenizer, **columns), row_of(tokenizer, "other", **columns)]
    for row, one in zip(rows, talk(conversations, rows, never, says(tokenizer, *said))):
        assert tokenizer.decode(one.response, skip_special_tokens=True) == text
        assert (one.stop_reason, one.tool_calls, one.tool_errors) == (stop_reason, calls, errors)
        assert one.stop_reason in STOP_REASONS
        assert bool(one.error) == (stop_reason == "error")
        assert one.reward == pytest.approx(reward, nan_ok=True)
        # The mask is set on turns of the model, and on nothing else.
        turns = [turn["content"] for turn in one.turns if turn["role"] == "assistant"]
        masked = [
            token for token, sampled in zip(one.response, one.outputs["response_mask"]) if sampled
        ]
        assert tokenizer.decode(masked, skip_special_tokens=True) == "".join(turns)
        assert one.metrics()["turns"] == len(turns)
        assert {len(column) for column in one.outputs.values()} == {len(one.response)}
        mask = one.outputs["response_mask"]
        assert list(one.outputs.get("again", [])) == [
            token * sampled for token, sampled in zip(one.response, mask)
        ]
        added = "[more]" if columns.get("mode") == "adds" else ""
        assert one.row["prompt"] == row["prompt"] + added and one.row["query"] == tokenizer.encode(
            one.row["prompt"]
        )


def test_so_many_at_once(monkeypatch):
    """Others begin as these end."""
    tokenizer = make_tokenizer()
    sizes = []

    def generate(queries, *_):
        sizes.append(len(queries))
        return [(place, [5, 6], {"rollout_logprobs": [-1.0] * 2}) for place in range(len(queries))]

    ended = []
    conversations_of(generation_batch_size=2, turn_stop=SHORT).sample(
        [row_of(tokenizer)] * 5, range(5), GREEDY, never, lambda *x: ended.append(x), None, generate
    )
    assert sizes == [2] * 6 + [1] * 3  # of three turns each
    assert sorted(place for place, _ in ended) == list(range(5))


@pytest.mark.parametrize("silent", [False, True])
def test_rewards_of_turns_stand_at_their_last_tokens(silent, monkeypatch):
    """Times the weight of the source: they are parts of the score. Turns are counted, also without
    an observation between them.
    """
    tokenizer = make_tokenizer()
    args = args_of(ppo, turn_rewards=True, reward_weights=(2.0,))
    conversations = Conversations(args, tokenizer, [tokenizer.eos_token_id])
    said = says(tokenizer, "ab", "c", "def")
    if silent:
        monkeypatch.setattr(conversations.template, "observation_ids", lambda *_: [])
    (one,) = talk(conversations, [row_of(tokenizer)], never, said)
    ends = [token == tokenizer.eos_token_id for token in one.response]
    earned = iter([0.4, 0.2, 0.6])
    assert one.outputs["turn_rewards"] == pytest.approx(
        [next(earned) if end else 0.0 for end in ends]
    )
    turns = np.cumsum([False, *ends[:-1]]) * one.outputs["response_mask"]
    assert list(one.outputs["turns"]) == list(turns) and turns[-1] == 2


def test_what_reset_adds_forges_no_turn():
    tokenizer = make_tokenizer()
    row = conversations_of()._prompt_with(row_of(tokenizer), "<eos>more")
    assert (
        row["prompt"] == tokenizer.decode(row["query"]) == "go<eos>more"
        and tokenizer.eos_token_id not in row["query"]
    )


def test_what_reset_adds_keeps_the_tools_of_the_row():
    tokenizer = make_tokenizer(chat_template=helpers.CHAT_TEMPLATE)
    conversations = Conversations(args_of(), tokenizer, [tokenizer.eos_token_id])
    row = conversations._prompt_with(row_of(tokenizer, tools=[{"name": "look"}]), " on")
    assert row["prompt"] == tokenizer.decode(row["query"]) == "[look][user]go on>"
    conversations.schemas = [{"function": {"name": "see"}}]  # of --tools
    assert conversations._prompt_with(row_of(tokenizer), " on")["prompt"] == "[see][user]go on>"


def test_conversations_of_several_rollouts_are_bounded_together():
    """The rollouts of several steps, which one engine makes at once."""
    conversations = conversations_of(generation_batch_size=3)
    tokenizer = make_tokenizer()
    engine = RolloutEngine()
    under_way = set()
    most = []
    ended = []

    async def complete(place: int, query: list[int], settings: dict) -> tuple:
        request = (place, len(most))
        under_way.add(request)
        most.append(len(under_way))
        await asyncio.sleep(0.02)
        under_way.remove(request)
        return [tokenizer.eos_token_id], {"rollout_logprobs": [-1.0]}

    engine._complete = complete
    given = [row_of(tokenizer)] * 4, [0] * 4, GREEDY, never, lambda *one: ended.append(one), engine
    with ThreadPoolExecutor(3) as pool:
        for rollout in [pool.submit(conversations.sample, *given) for _ in range(3)]:
            rollout.result()
    assert len(ended) == 12 and max(most) == 3


def test_interruption():
    tokenizer = make_tokenizer()
    conversations = conversations_of()
    calls = []

    def generate(queries, uniforms, lengths, stop_strings=None):
        calls.append(len(queries))
        return []

    rows = [row_of(tokenizer)] * 3
    conversations.sample(
        rows, [0] * 3, GREEDY, lambda: bool(calls), calls.append, generate=generate
    )
    assert calls == [3]
    calls.clear()
    with pytest.raises(KeyError):  # an error ends the run: nobody waits for the turns of the others
        conversations.sample(
            [row_of(tokenizer), {"query": [5]}],
            [0] * 2,
            GREEDY,
            never,
            calls.append,
            generate=generate,
        )
    assert not calls


# ---- only sampled tokens count -------------------------------------------------------------------


class EnvironmentRewards(RewardSources):
    lock = contextlib.nullcontext()
    models = {}
    state = {}
    loop = EventLoop()
    verifiers = ("episode",)

    def __init__(self):
        self.sources = {"episode": EpisodeSource("episode", 1.0, Processes(None, None, 1))}


def sampler_of(model, rewards, conversations, args) -> Sampler:
    return Sampler(
        grpo.generate,
        model,
        None,
        make_tokenizer(),
        [make_tokenizer().eos_token_id],
        rewards,
        conversations,
        args,
        never,
        WORLD,
        precision("float64", WORLD.device),
    )


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """(batch, policy, args): four conversations of a random model in float64."""
    folder = helpers.tiny_model(tmp_path_factory.mktemp("model"))
    flags = dict(model=folder, max_response_length=60, micro_batch_tokens=64, turn_stop=SHORT)
    args = args_of(**flags)
    policy = grpo.Policy(load_model("--model", folder, torch.float64, CPU), args)
    rows = [row_of(make_tokenizer()), row_of(make_tokenizer(), "another", mode="adds")]
    sampler = sampler_of(policy.model, EnvironmentRewards(), conversations_of(**flags), args)
    return sampler.rollout(rows, 2, ("test",)), policy, args


def sampled_positions(conversation: Conversation) -> list[int]:
    """Return the positions in the response of the model's turns, from the text of the observations
    alone.
    """
    positions = []
    start = 0
    mask = conversation.outputs["response_mask"]
    for turn in conversation.turns:
        if turn["role"] == "user":
            length = len(make_tokenizer().encode(turn["content"]))
        else:  # it ends before the next observation
            length = [*mask[start:], 0].index(0)
            positions += range(start, start + length)
        start += length
    assert start == len(conversation.response)
    return positions


def test_only_the_turns_of_the_model_train(batch):
    """The trainer's log-probabilities of their tokens are the sampler's. (By plain forward passes,
    and in a loss: test_agents.py.)
    """
    batch, policy, args = batch
    logprobs = forward_batch(policy, batch, "logprobs", args, WORLD)
    torch.testing.assert_close(
        batch.tokens["rollout_logprobs"], logprobs.float(), rtol=0, atol=1e-5
    )
    for i, sample in enumerate(batch.samples):
        assert sample.row["columns"]["prompt"] in ("go", "another")
        assert sample.row["prompt"].endswith("[more]") == (i >= 2)
        assert sample.conversation.metrics()["observation_tokens"]
        positions = batch.response_mask[i].nonzero()[:, 0].tolist()
        assert positions == sampled_positions(sample.conversation)
    metrics = conversation_metrics(batch)
    assert metrics["conversation/turns"] == 3 and metrics["stop_reason/done"] == 1


@pytest.mark.parametrize("script", [grpo, rloo, ppo])
def test_failed_environments_are_left_out(batch, script, monkeypatch):
    """Their score is NaN; a limit of turns is no cut, and a limit of tokens has the penalty."""
    row = row_of(make_tokenizer())
    values = {"rollout_logprobs": [-1.0], "response_mask": [1], "again": [5]}
    stopped = Conversation(row, [5], values, rewards={0: 1.0}, stop_reason="done")
    failed = Conversation(row, stop_reason="error", error="it is broken")  # in its reset
    others = [
        dataclasses.replace(stopped, stop_reason=reason) for reason in ("max_turns", "length")
    ]
    end_all = lambda rows, seeds, draws, interrupted, end, *_: list(
        map(end, [2, 3, 0, 1], [*others, failed, stopped])
    )
    monkeypatch.setattr(Conversations, "sample", lambda self, *given: end_all(*given))
    scored = EnvironmentRewards()
    scored.sources["model"] = scored.sources.pop("episode")
    scored.verifiers = ()

    async def score(source, samples) -> list[float]:
        return [3.0] * len(samples)

    monkeypatch.setattr(EpisodeSource, "score", score)
    args = args_of(
        script, reward=("model",), rollout_batch_size=1, group_size=4, filter_groups="none"
    )
    sampler = sampler_of(batch[1].model, scored, conversations_of(), args)
    found = script.collect(sampler, [row], 1, {})
    assert found.batch.reward_components["model"].tolist() == pytest.approx(
        [math.nan, 3.0, 3.0, 3.0], nan_ok=True
    )
    assert found.batch.scores.tolist() == pytest.approx([math.nan, 3.0, 3.0, 0.0], nan_ok=True)
    assert found.batch.tokens["again"].tolist() == [[0], [5], [5], [5]]


def test_a_string_ends_a_turn(load, tokenizer):
    """With --turn_stop a turn ends with the token that completes the text, in the decode loop
    itself.
    """
    model = load("qwen2", torch.float64, vocab_size=len(tokenizer))
    queries = [[5, 6], [7, 8, 9], [10]]
    uniforms = torch.rand(3, 20, generator=torch.Generator().manual_seed(0))
    args = grpo.Args(max_response_length=20)
    given = model, queries, uniforms.double(), [1], args, never
    sample = lambda *limits: helpers.listed(grpo.generate(*given, *limits))
    whole, _ = sample([20] * 3)
    text = tokenizer.decode(whole[0][3:5])
    assert len(text) == 2 and "\ufffd" not in text
    cut, logprobs = sample([20, 7, 20], StopStringCriteria(tokenizer, [text]))
    assert cut[0] == whole[0][:5] and cut[1] == whole[1][:7] and cut[2] == whole[2]
    assert list(map(len, logprobs)) == [5, 7, len(whole[2])]


@pytest.mark.parametrize("script", [ppo, rloo, grpo])
def test_rewards_of_turns_reach_the_advantages(script, tmp_path, monkeypatch):
    """In a run; they add up to the score."""
    values = helpers.workspace(tmp_path) | {
        "run_name": "run",
        "turn_rewards": True,
        "turn_stop": SHORT,
        "non_stop_penalty": False,
    }
    values |= {
        "environment": helpers.GAME,
        "reward": "episode",
        "max_response_length": 40,
        "total_episodes": 8,
    }
    values |= {"advantage": "reinforce++"} if script is rloo else {}
    name = "turn_advantages" if script is grpo else "token_rewards"
    original = getattr(script, name)
    calls = recorded(monkeypatch, script, name)
    run_here(values, script.__name__)
    for (scores, *args), _ in calls:
        turn_rewards = args[0] if script is grpo else args[-1]
        torch.testing.assert_close(turn_rewards.sum(1), scores.double(), rtol=1e-6, atol=1e-6)
        assert (turn_rewards != 0).sum(1).max() == 3
        if script is not grpo:  # a score that is more than the turns earned
            rewards = original(scores + 1, None, args[1], 0.0, turn_rewards)
            torch.testing.assert_close(rewards.sum(1).float(), scores.float() + 1)
    if script is grpo:
        means = [x[m].mean().item() for x, m in zip(original(scores, *args), args[2])]
        rows = helpers.read_lines(helpers.folder_of(values) / "samples.jsonl")
        assert [row["advantage"] for row in rows] == pytest.approx(means[: len(rows)], rel=1e-5)
        assert metrics_of(values)[-1]["val/zero_advantage"] < 1


# ---- whole runs ----------------------------------------------------------------------------------
