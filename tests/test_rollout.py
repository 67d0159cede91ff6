"""Sampling against a loop that draws one token at a time for one prompt alone, what travels with a
batch.
"""

import contextlib
import dataclasses
import math
import pickle
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from helpers import listed, refused
from tiny_models import CPU, WORLD
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import utils
from grpo import Args, generate
from plumbing.models.forward import (
    ROOM,
    RoomyLayer,
    attend_by_group,
    expand_cache,
    invert_distribution,
)
from plumbing.models.loading import precision
from plumbing.processes import EventLoop
from plumbing.rewards.sources import RewardSources
from plumbing.rollout.batch import Batch
from plumbing.rollout.sampler import Sampler

FAMILIES = ["qwen2", "llama", "gemma", "gemma2", "gpt_neox", "gpt2"]
F64 = torch.float64
LENGTHS = [3, 9, 1, 5, 2, 7, 4, 6, 12, 3, 8, 1]
STOPS = [1, 6, 11, 16, 20, 27]  # of 32 tokens, so that most responses end early
never = lambda: False


def queries_of(lengths=LENGTHS, vocabulary: int = 32, seed: int = 0) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (n,), generator=numbers).tolist() for n in lengths]


def uniforms_of(rows: int, length: int, seed: int = 0):
    return torch.rand(rows, length, dtype=F64, generator=torch.Generator().manual_seed(seed))


def sampled(model, queries, uniforms, stop_ids, args, interrupted=never):
    """Responses and their log-probs, by `generate`, all with the limit of the flag."""
    lengths = [args.max_response_length] * len(queries)
    return listed(generate(model, queries, uniforms, stop_ids, args, interrupted, lengths))


@torch.no_grad()
def one_by_one(model, query, numbers, stop_ids, args):
    """(response, log-probs), drawn token by token: the whole model each time, this row alone, loops
    over floats.
    """
    response = []
    logprobs = []
    while len(response) < args.max_response_length and not (response and response[-1] in stop_ids):
        logits = model(input_ids=torch.tensor([query + response])).logits[0, -1].float()
        if len(response) < args.min_response_length:
            logits[stop_ids] = -math.inf
        plain = (logits / args.temperature).log_softmax(-1).tolist()
        left = numbers[len(response)].item() * math.fsum(map(math.exp, plain))
        token = 0
        while left >= math.exp(plain[token]):
            left -= math.exp(plain[token])
            token += 1
        response.append(token)
        logprobs.append(plain[token])
    return response, logprobs


def check_one_by_one(model, queries, stop_ids, args) -> list[list[int]]:
    """Sample responses, compare them with those of each row alone, and return them."""
    numbers = uniforms_of(len(queries), args.max_response_length)
    responses, logprobs = sampled(model, queries, numbers, stop_ids, args)
    assert len(responses) == len(logprobs) == len(queries)
    for i, query in enumerate(queries):
        response, expected = one_by_one(model, query, numbers[i], stop_ids, args)
        assert responses[i] == response, f"row {i}"
        assert logprobs[i] == pytest.approx(expected, abs=1e-5)
    return responses


# ---- drawing a token -----------------------------------------------------------------------------


class Fixed:
    """Stands for a model: the logits of each step are given, for the rows that are left then, (n,
    V) each.
    """

    device = CPU
    config = transformers.Qwen2Config(num_hidden_layers=1)

    def __init__(self, *logits):
        self.logits = iter(logits)

    def __call__(self, input_ids, **_):
        logits = next(self.logits)
        assert len(input_ids) == len(logits)
        return SimpleNamespace(logits=logits[:, None], past_key_values=DynamicCache())


def draw(logits, numbers):
    """Tokens drawn for each row at position 0, and their log-probabilities."""
    args = Args(max_response_length=1)
    queries = [[i] for i in range(len(logits))]
    responses, logprobs = sampled(Fixed(logits), queries, numbers, [], args)
    return torch.tensor(responses)[:, 0], torch.tensor(logprobs)[:, 0]


def test_sampler_at_the_edges():
    ninf, below_one = -math.inf, 1 - 2**-53  # the largest number that torch.rand gives in float64
    numbers = torch.tensor([0.0, 0.25, 0.49999, 0.5, 0.75, below_one], dtype=F64)[:, None]
    # four equal tokens: a number on a border belongs to the token above it
    uniform = torch.zeros(6, 4)
    assert draw(uniform, numbers)[0].tolist() == [0, 1, 1, 2, 3, 3]
    # impossible at both ends and inside
    gaps = torch.tensor([ninf, 0.0, ninf, 0.0, 0.0, 0.0, ninf, ninf]).expand(6, 8)
    tokens, logprobs = draw(gaps, numbers)
    assert tokens.tolist() == [1, 3, 3, 4, 5, 5]
    assert logprobs.tolist() == pytest.approx([-math.log(4)] * 6)
    alone = torch.tensor([ninf, ninf, 3.0, ninf]).expand(6, 4)
    assert draw(alone, numbers)[0].tolist() == [2] * 6
    greedy = torch.tensor([[-1.0]], dtype=F64)
    assert draw(torch.tensor([[1.0, 3.0, 2.0]]), greedy)[0].tolist() == [1]


def test_sampler_is_exact_in_a_large_vocabulary():
    size = 150_000
    tokens = torch.tensor([0, 1, 777, 74_999, 100_001, 149_998, 149_999])
    numbers = ((tokens.double() + 0.5) / size)[:, None]
    assert torch.equal(draw(torch.zeros(7, size), numbers)[0], tokens)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 5_000])
def test_sums_by_blocks_draw_what_a_plain_sum_does(size):
    numbers = uniforms_of(3_000, 1)
    numbers[::3] = 0.0
    numbers[1::3] = 1 - 2**-53
    weights = (9 * torch.randn(3_000, size, generator=torch.Generator().manual_seed(1))).exp()
    weights[torch.rand(3_000, size, generator=torch.Generator().manual_seed(2)) < 0.5] = 0
    weights[:, size // 2] = 0.1
    tokens = invert_distribution(weights, numbers)
    cdf = weights.cumsum(-1, dtype=F64)
    shares = pad(cdf, (1, 0)) / cdf[:, -1:]
    assert (weights.gather(1, tokens) > 0).all()  # never what is masked
    assert (shares.gather(1, tokens) <= numbers + 1e-15).all()
    assert (shares.gather(1, tokens + 1) >= numbers - 1e-15).all()
    # 0 draws the first that is possible, and the largest number below 1 the last that matters
    assert torch.equal(tokens[::3, 0], (weights[::3] > 0).int().argmax(1))
    assert (cdf.gather(1, tokens)[1::3] >= cdf[1::3, -1:] * (1 - 1e-15)).all()


# ---- generate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_each_row_alone(load, family, temperature):
    """Prompts of 1 to 12 tokens are padded to one width, and rows that have ended leave the
    batch.
    """
    model = load(family, F64)
    args = Args(max_response_length=16, temperature=temperature)
    stops = list(range(0, 32, 4))
    sizes = []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: sizes.append(len(inputs[0]))
    )
    responses = check_one_by_one(model, queries_of(LENGTHS * 2), stops, args)
    decoding = sizes[: max(map(len, responses))]  # without the passes of each row alone
    assert len(set(decoding)) >= 2 and decoding == sorted(decoding, reverse=True)
    assert len({len(response) for response in responses}) >= 4
    assert len({response[-1] for response in responses} & set(stops)) > 2


@pytest.mark.parametrize("family", FAMILIES)
def test_each_prompt_is_read_once(load, family):
    """And no padding counts, which --repetition_penalty could take for tokens of the prompt."""
    model = load(family, F64)
    rows = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: rows.append(tuple(inputs[0].shape))
    )
    queries = queries_of([3, 9, 1, 5])
    mixed = [queries[i] for i in (0, 1, 1, 2, 0, 3, 1, 2)]
    numbers = uniforms_of(8, 6)
    seen = set()
    for penalty in (1.0, 2.5):
        args = Args(max_response_length=6, min_response_length=3, repetition_penalty=penalty)
        for uniforms in (numbers, torch.full_like(numbers, -1)):
            rows.clear()
            together = sampled(model, mixed, uniforms, STOPS, args)
            assert rows[:2] == [(4, 9), (8, 1)]
            seen.add(str(together[0]))
            for i, query in enumerate(mixed):
                alone = sampled(model, [query], uniforms[i : i + 1], STOPS, args)
                assert together[0][i] == alone[0][0]
                assert together[1][i] == pytest.approx(alone[1][0], abs=1e-6)
    assert len(seen) == 4  # the penalty changes them


class Copies(TorchDispatchMode):
    """Records (operator, elements, where its first input is) of each tensor that is written anew."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("_to_copy", "clone", "cat", "constant_pad_nd", "index_select"):
            source = args[0][0] if name == "cat" else args[0]
            self.seen.append((name, result.numel(), source.data_ptr()))
        return result


@pytest.mark.parametrize("half", [True, False])
def test_a_token_copies_neither_the_weights_nor_what_came_before(load, half):
    model = load("llama", num_attention_heads=4, num_key_value_heads=2)
    weights = {x.data_ptr() for x in model.parameters() if x.dim() == 2}
    args = Args(max_response_length=20)
    caches = []
    keep = lambda model, inputs, options: caches.append(options["past_key_values"])
    model.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=half), Copies() as copies:
        # of 100 tokens, so that what came before is more than the logits
        queries = queries_of([100, 99, 98, 97])
        sampled(model, queries, uniforms_of(4, 20), [999], args)
    casts = [where for _, _, where in copies.seen if where in weights]
    assert len(casts) == len(set(casts)) == half * (len(weights) - 1)  # without the embeddings
    held = caches[-1].layers[0].keys
    assert held.dtype == (torch.bfloat16 if half else torch.float32) and held.shape[2] == 119
    large = [name for name, size, _ in copies.seen if size >= 100 * 4 * held.shape[-1]]
    # the prompts' pass, then keys and values of two layers expanded, and given room
    assert large[-8:] == ["index_select"] * 4 + ["constant_pad_nd"] * 4
    with Copies() as copies:
        caches[-1].layers[0].update(held[:, :, :1], held[:, :, :1])
    assert not copies.seen


def test_a_layer_with_room_is_one_without():
    plain = DynamicLayer()
    numbers = torch.Generator().manual_seed(0)
    states = lambda rows, length: torch.randn(2, rows, 2, length, 4, generator=numbers)
    plain.update(*states(3, 5))
    roomy = RoomyLayer(plain)
    for length in (1, 1, ROOM - 2, 1, 1, 3 * ROOM):
        new = states(3, length)
        for a, b in zip(roomy.update(*new), plain.update(*new)):
            assert torch.equal(a, b)
        assert roomy.get_mask_sizes(1) == plain.get_mask_sizes(1)
    for rows in ([2, 0, 0, 1, 2], [1, 3], [0]):
        new = states(len(rows), 1)
        for layer in (roomy, plain):
            layer.reorder_cache(torch.tensor(rows))
        for a, b in zip(roomy.update(*new), plain.update(*new)):
            assert torch.equal(a, b)


def test_only_plain_layers_get_room():
    cache = Cache([DynamicLayer(), DynamicSlidingWindowLayer(4), DynamicLayer()])
    for i in range(2):  # the last one stays empty, as where layers share a cache
        cache.update(*torch.ones(2, 2, 1, 3, 4), i)
    expand_cache(cache, torch.tensor([0, 1, 1]))
    types = [RoomyLayer, DynamicSlidingWindowLayer, DynamicLayer]
    assert [type(layer) for layer in cache.layers] == types
    assert [len(layer.keys) for layer in cache.layers[:2]] == [3, 3]


@pytest.mark.parametrize("masked", ["rows", "heads", "none"])
def test_heads_that_share_a_key_attend_as_each_alone(masked):
    numbers = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, 1, 8, generator=numbers, dtype=F64)
    key, value = torch.randn(2, 3, 2, 5, 8, generator=numbers, dtype=F64)
    mask = torch.rand(3, 6 if masked == "heads" else 1, 1, 5, generator=numbers) < 0.7
    mask[..., 0] = True
    mask = None if masked == "none" else mask
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    inputs = (module, query, key, value, mask)
    expected = sdpa_attention_forward(*inputs, scaling=0.3)[0]
    torch.testing.assert_close(attend_by_group(*inputs, scaling=0.3)[0], expected)
    bias = torch.randn(1, 6, 1, 5, generator=numbers, dtype=F64)
    if masked != "heads":
        expected = sdpa_attention_forward(*inputs, position_bias=bias)[0]
        torch.testing.assert_close(attend_by_group(*inputs, position_bias=bias)[0], expected)


@pytest.mark.parametrize("longest, least", [(12, 0), (1, 0), (7, 1), (12, 4), (12, 12)])
def test_responses_end_with_a_stop_token_or_are_full(load, longest, least):
    """Neither the id that pads the prompts, here a stop token, nor the model's own defaults for
    sampling matter.
    """
    model = load("qwen2", F64)
    model.generation_config = defaults = GenerationConfig(
        repetition_penalty=5.0,
        temperature=0.1,
        top_k=2,
        top_p=0.3,
        do_sample=True,
        eos_token_id=[2, 3],
        pad_token_id=5,
        max_new_tokens=2,
        suppress_tokens=[4],
        no_repeat_ngram_size=1,
    )
    before = defaults.to_dict()
    args = Args(max_response_length=longest, min_response_length=least)
    responses = check_one_by_one(model, [[1, *query] for query in queries_of()], STOPS, args)
    lengths = {len(response) for response in responses}
    assert max(lengths) == longest and (len(lengths) > 1) == (longest not in (1, least))
    assert model.generation_config is defaults and defaults.to_dict() == before


@pytest.mark.parametrize("calls", [0, 1, 4])
def test_an_interruption_returns_early(load, calls):
    model = load("qwen2", F64)
    asked = []
    args = Args(max_response_length=100)

    def interrupted():
        asked.append(1)
        return len(asked) > calls

    nothing = sampled(model, queries_of(), uniforms_of(12, 100), [999], args, interrupted)
    assert nothing == ([], [])
    assert len(asked) == calls + 1  # it is asked after each token


# ---- rollout -------------------------------------------------------------------------------------


class Scores(RewardSources):
    """Rewards with a source, itself, that knows which text belongs to which row."""

    models = {}
    verifiers = ("length",)
    most = 99
    at_once = contextlib.nullcontext()
    warned = True
    loop = EventLoop()
    state = {}
    lock = threading.Lock()

    def __init__(self):
        self.seen = []
        self.sources = {"length": self}

    async def score(self, samples):
        self.seen += [(x.row["answer"], x.text, x.response.tolist()) for x in samples]
        return [100.0 * x.row["answer"] + len(x.text) for x in samples]


@pytest.fixture
def setting(load, tokenizer) -> tuple[Sampler, list[dict]]:
    """What a rollout samples with, and five prompts of different lengths."""
    vocabulary = len(tokenizer)
    stops = [1, *range(40, vocabulary, 9)]  # many of 259 tokens, so that most responses stop
    rows = [
        {"query": q, "answer": i, "prompt": ""}
        for i, q in enumerate(queries_of([4, 9, 1, 6, 3], vocabulary))
    ]
    model = load("qwen2", F64, vocab_size=vocabulary)
    sampler = Sampler(
        generate,
        model,
        None,
        tokenizer,
        stops,
        Scores(),
        None,
        Args(max_response_length=10, temperature=0.8),
        never,
        WORLD,
        precision("float64", CPU),
    )
    return sampler, rows


KEY = ("rollout", 1, 1)


def responses_of(batch: Batch) -> list[list[int]]:
    return [sample.response.tolist() for sample in batch.samples]


def same(one: Batch, other: Batch) -> bool:
    parts = lambda batch: [
        (x.row["query"], x.response.tolist(), x.text, x.stopped, x.scores) for x in batch.samples
    ]
    return (
        parts(one) == parts(other)
        and one.tokens.keys() == other.tokens.keys()
        and all(
            torch.allclose(x, other.tokens[name], rtol=0, atol=1e-6)
            for name, x in one.tokens.items()
        )
        and torch.equal(one.stopped, other.stopped)
        and torch.equal(one.reward_components["length"], other.reward_components["length"])
    )


def test_a_rollout_says_how_many_responses_have_ended(setting):
    sampler, rows = setting
    seen = []
    see = lambda key, ended, total: seen.append((key, ended, total))
    dataclasses.replace(sampler, show_ended=see).rollout(rows, 3, KEY)
    counts = [ended for _, ended, _ in seen]
    assert {(key, total) for key, _, total in seen} == {(KEY, 15)}
    assert counts == sorted(counts) and counts[-1] == 15 and len({*counts}) > 3


def test_an_engine_gets_no_seed_for_a_greedy_response(setting):
    sampler, rows = setting
    asked = []

    def answer(queries, seeds, stop_ids, args, interrupted, end):
        asked.extend(seeds)
        for place in range(len(queries)):
            end(place, np.array([1]), {"rollout_logprobs": -np.ones(1)})

    sampler = dataclasses.replace(sampler, engine=SimpleNamespace(generate=answer))
    sampler.rollout(rows[:2], 2, KEY, greedy=True)
    assert [seed is None for seed in asked] == [False, False, True] * 2


def test_what_the_decode_loop_has_read(setting):
    """Each token but the first of a response reads those before it."""
    sampler, rows = setting
    sampler = sampler.with_args(generation_batch_size=4)
    samples = sampler.rollout(rows, 3, KEY).samples
    read = sum(len(x.row["query"]) + t for x in samples for t in range(1, len(x.response)))
    assert sampler.decoding.cached == read


def test_rollout_lays_out_the_batch(setting):
    sampler, rows = setting
    batch = sampler.rollout(rows, 3, KEY)
    numbers = torch.from_numpy(utils.generator(*KEY).random((15, 10)))
    widest = max(map(len, responses_of(batch)))
    # the three responses of a prompt stand next to each other
    for i, sample in enumerate(batch.samples):
        assert sample.row == rows[i // 3] | {"rollout_group": i // 3}
        query = sample.row["query"]
        stops = sampler.stop_ids
        response, logprobs = one_by_one(sampler.model, query, numbers[i], stops, sampler.args)
        assert sample.response.tolist() == response and sample.response.dtype == np.int32
        assert sample.outputs["rollout_logprobs"].base is None  # which would hold all rows
        padding = [0.0] * (widest - len(response))
        assert batch.tokens["rollout_logprobs"][i].tolist() == pytest.approx(
            logprobs + padding, abs=1e-5
        )
        assert batch.response_mask[i].tolist() == [1] * len(response) + padding
        assert batch.stopped[i].item() == (response[-1] in sampler.stop_ids)
        assert sample.text == sampler.tokenizer.decode(response, skip_special_tokens=True)
        assert batch.reward_components["length"][i] == 100 * (i // 3) + len(sample.text)
        assert (i // 3, sample.text, response) in sampler.reward_sources.seen
        assert batch.lengths[i] == len(query) + len(response)
    assert len(batch.samples) == 15 and batch.stopped.any() and not batch.stopped.all()
    assert (
        set(batch.tokens) == {"response_mask", "rollout_logprobs"}
        and batch.response_mask.dtype == torch.bool
    )


def test_rollout_is_a_function_of_its_key_however_it_is_cut(setting):
    sampler, rows = setting
    whole = sampler.rollout(rows, 3, KEY)
    torch.rand(100)
    for size in (1, 2, 4, 100):
        args = Args(max_response_length=10, temperature=0.8, generation_batch_size=size)
        assert same(replace(sampler, args=args).rollout(rows, 3, KEY), whole)
    for other in (("rollout", 1, 2), ("rollout", 2, 1)):
        assert responses_of(sampler.rollout(rows, 3, other)) != responses_of(whole)
    assert len(set(map(tuple, responses_of(whole)[:3]))) > 1  # and samples of a prompt differ


def repeating(*inputs):
    """The decode loop of a fork that stores one more value a token: the token itself."""
    for place, response, values in generate(*inputs):
        yield place, response, {**values, "again": response}


def test_a_greedy_response_changes_no_other_one(setting):
    """Each prompt gets one, behind the others: it has -1 in place of random numbers."""
    sampler, rows = setting
    last = np.arange(20) % 4 == 3
    samples = sampler.rollout(rows, 3, KEY, greedy=True).samples
    assert [x.greedy for x in samples] == last.tolist()
    others = [x.response.tolist() for x in samples if not x.greedy]
    assert others == responses_of(sampler.rollout(rows, 3, KEY))
    for engine in (None, "vllm"):
        sampler = replace(sampler, engine=engine, conversations="tools")
        draws, seeds = sampler.random_numbers(5, 3, KEY, greedy=True)
        plain = sampler.random_numbers(5, 3, KEY, greedy=False)
        assert (draws[last] == -1).all() and len({*seeds}) == 20
        assert np.array_equal(draws[~last], plain[0]) and np.array_equal(seeds[~last], plain[1])


@pytest.mark.parametrize(
    "count, samples, greedy", [(5, 3, False), (4, 2, True), (1, 0, True), (2, 0, True)]
)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("by_group", [False, True])
def test_rollout_on_several_ranks_is_the_same(
    setting, monkeypatch, by_group, size, count, samples, greedy
):
    """The ranks run one after the other; what they would send each other is noted in a first
    round. A source that compares responses gets those of its groups in one call, in order.
    """
    shares = {}

    def all_gather_object(parts, share, group=None):
        shares[rank] = share
        # a KeyError in the first round, but for its last rank
        parts[:] = [shares[r] for r in range(len(parts))]

    monkeypatch.setattr(utils.dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(utils.dist, "all_reduce", lambda *_, **__: None)
    sampler, rows = setting
    sampler = replace(sampler, generate=repeating)  # all that is stored of a token comes along
    whole = sampler.rollout(rows[:count], samples, KEY, greedy)
    batches = []
    seen = []
    for rank in [*range(size), *range(size)]:
        reward_sources = Scores()
        reward_sources.whole = by_group
        of_rank = replace(
            sampler, reward_sources=reward_sources, world=utils.World(rank, size, CPU)
        )
        with contextlib.suppress(KeyError):
            batches.append(of_rank.rollout(rows[:count], samples, KEY, greedy))
            seen.append(len(reward_sources.seen))
        if by_group:
            assert [answer for answer, *_ in reward_sources.seen] == [
                i for i in range(rank, count, size) for _ in range(samples + greedy)
            ]
    assert len(batches) == size + 1 and all(same(batch, whole) for batch in batches)
    for again, mask, response in zip(
        whole.tokens["again"], whole.response_mask, responses_of(whole)
    ):
        assert again[mask].tolist() == response and not again[~mask].any()
    assert sum(seen[1:]) == len(whole.samples)  # each response was scored on one rank


def test_a_response_is_scored_before_the_next_one_has_ended(setting):
    """And what ranks send each other is arrays: 8 bytes a token, and no rows, which all of them
    have.
    """
    sampler, rows = setting
    rows = [{**row, "long": "x" * 10_000} for row in rows]
    source = sampler.reward_sources
    seen = []
    end = time.monotonic() + 300

    def slow(*inputs):
        for response in generate(*inputs):
            yield response
            while len(source.seen) == len(seen):
                assert time.monotonic() < end, "scores were for the end"
            seen.append(response)

    gathered = []
    gather = lambda items: gathered.append(pickle.dumps(items)) or items
    world = SimpleNamespace(size=1, shard=list, any=bool, all_gather=gather)
    batch = replace(
        sampler, generate=slow, world=world, args=replace(sampler.args, max_response_length=500)
    ).rollout(rows, 3, KEY)
    assert len(seen) == 15 and sorted(source.seen) == sorted(
        (x.row["answer"], x.text, x.response.tolist()) for x in batch.samples
    )
    assert len(gathered[0]) < 15 * 400 + 9 * sum(len(x.response) for x in batch.samples)


def test_micro_batches_are_as_long_as_their_longest_response(setting):
    batch = setting[0].rollout(setting[1], 3, KEY)
    cuts = list(batch.micro_batches([*range(15)], Args(micro_batch_tokens=40), WORLD))
    assert len(cuts) > 3 and len({t["response_mask"].shape[1] for _, t, _ in cuts}) > 1
    assert all(
        x.shape == t["response_mask"].shape and t["response_mask"][:, -1].any()
        for _, t, _ in cuts
        for x in t.values()
    )


def test_an_interrupted_rollout_is_none(setting):
    sampler, rows = setting
    with pytest.raises(utils.Interrupted):
        replace(sampler, interrupted=lambda: True).rollout(rows, 3, KEY)
    assert not sampler.reward_sources.seen


def test_a_model_that_gives_no_numbers_is_refused(setting, capsys):
    sampler, rows = setting
    sampler.model.get_output_embeddings().register_forward_hook(
        lambda _, __, logits: logits * math.nan
    )
    assert refused(capsys, sampler.rollout, rows, 3, KEY).startswith(
        "error: --model or --learning_rate: "
    )
