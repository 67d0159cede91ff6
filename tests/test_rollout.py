"""Sampling against a loop that draws one token at a time for one prompt alone and against transformers' generate, what
travels with a batch, and prompts from text to token ids."""

import contextlib
import io
import math
import types

import helpers
import pytest
import torch
import transformers
from tiny_models import CPU, make_tokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import utils
from grpo import Args, Policy, generate
from plumbing.data import prompts
from plumbing.models import loading as models
from plumbing.rollout import engines
from plumbing.rollout.batch import Batch, Experience, join, pad_rows, rollout

FAMILIES = ["qwen2", "llama", "gemma", "gemma2", "gpt_neox", "gpt2"]
F32, F64 = torch.float32, torch.float64
LENGTHS = [3, 9, 1, 5, 2, 7, 4, 6, 12, 3, 8, 1]
STOPS = [1, 6, 11, 16, 20, 27]  # of 32 tokens, so that most responses end early


def queries_of(lengths=LENGTHS, vocabulary: int = 32, seed: int = 0) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (n,), generator=numbers).tolist() for n in lengths]


def uniforms_of(rows: int, length: int, seed: int = 0):
    return torch.rand(rows, length, dtype=F64, generator=torch.Generator().manual_seed(seed))


def never():
    return False


@torch.no_grad()
def one_by_one(model, query, numbers, stop_ids, args):
    """(response, log-probs), drawn token by token: the whole model each time, this row alone, loops over floats."""
    response, logprobs = [], []
    while len(response) < args.max_response_length and not (response and response[-1] in stop_ids):
        logits = model(input_ids=torch.tensor([query + response])).logits[0, -1].float()
        if len(response) < args.min_response_length:
            logits[stop_ids] = -math.inf
        if numbers is None:
            plain = logits.log_softmax(-1).tolist()
            token = plain.index(max(plain))
        else:
            plain = (logits / args.temperature).log_softmax(-1).tolist()
            left = numbers[len(response)].item() * math.fsum(map(math.exp, plain))
            token = 0
            while left >= math.exp(plain[token]):
                left -= math.exp(plain[token])
                token += 1
        response.append(token)
        logprobs.append(plain[token])
    return response, logprobs


def check_one_by_one(model, queries, numbers, stop_ids, args, got):
    responses, values = got
    assert len(responses) == len(values) == len(queries)
    for i, query in enumerate(queries):
        response, expected = one_by_one(model, query, None if numbers is None else numbers[i], stop_ids, args)
        assert responses[i] == response, f"row {i}"
        assert values[i] == {"rollout_logprobs": pytest.approx(expected, abs=1e-5)}


# ---- drawing a token --------------------------------------------------------------------------------------------


class Fixed:
    """Stands for a model: the logits of each step are given, for the rows that are left then, (n, V) each."""

    device, config = CPU, transformers.Qwen2Config(num_hidden_layers=1)

    def __init__(self, *logits):
        self.logits = iter(logits)

    def __call__(self, input_ids, **_):
        logits = next(self.logits)
        assert len(input_ids) == len(logits)
        return types.SimpleNamespace(logits=logits[:, None])


def draw(logits, numbers):
    """Tokens drawn for each row at position 0, and their log-probabilities."""
    args = Args(max_response_length=1)
    responses, values = generate(Fixed(logits), [[0]] * len(logits), numbers, [], args, never)
    logprobs = [logprob for value in values for logprob in value["rollout_logprobs"]]
    assert len(logprobs) == len(logits)
    return torch.tensor([token for (token,) in responses]), torch.tensor(logprobs)


def test_sampler_at_the_edges():
    ninf, below_one = -math.inf, 1 - 2**-53  # the largest number that torch.rand gives in float64
    numbers = torch.tensor([0.0, 0.25, 0.49999, 0.5, 0.75, below_one], dtype=F64)[:, None]
    uniform = torch.zeros(6, 4)  # four equal tokens: a number on a border belongs to the token above it
    assert draw(uniform, numbers)[0].tolist() == [0, 1, 1, 2, 3, 3]
    gaps = torch.tensor([ninf, 0.0, ninf, 0.0, 0.0, 0.0, ninf, ninf]).expand(6, 8)  # impossible at both ends and inside
    tokens, logprobs = draw(gaps, numbers)
    assert tokens.tolist() == [1, 3, 3, 4, 5, 5]
    assert logprobs.tolist() == pytest.approx([-math.log(4)] * 6)
    alone = torch.tensor([ninf, ninf, 3.0, ninf]).expand(6, 4)
    assert draw(alone, numbers)[0].tolist() == [2] * 6
    assert draw(torch.tensor([[1.0, 3.0, 2.0]]), None)[0].tolist() == [1]  # greedy


def test_sampler_inverts_by_loops():
    torch.manual_seed(0)
    logits, numbers = torch.randn(500, 20) * 3, torch.rand(500, 1, dtype=F64)
    tokens, logprobs = draw(logits, numbers)
    for row, u, token, logprob in zip(logits.tolist(), numbers[:, 0].tolist(), tokens.tolist(), logprobs.tolist()):
        weights = [math.exp(z) for z in row]
        below = math.fsum(weights[:token]) / math.fsum(weights)
        assert below - 1e-6 <= u < below + weights[token] / math.fsum(weights) + 1e-6
        assert logprob == pytest.approx(math.log(weights[token] / math.fsum(weights)), abs=1e-5)


def test_sampler_is_exact_in_a_large_vocabulary():
    size = 150_000
    wanted = torch.tensor([0, 1, 777, 74_999, 100_001, 149_998, 149_999])
    numbers = ((wanted.double() + 0.5) / size)[:, None]
    assert torch.equal(draw(torch.zeros(7, size), numbers)[0], wanted)


def test_sampler_frequencies_match_softmax():
    logits = torch.tensor([2.0, 0.5, -1.0, 1.0, -math.inf, 0.0, -2.5])
    rows = 20_000
    tokens, _ = draw(logits.expand(rows, 7), uniforms_of(rows, 1))
    counts, expected = torch.bincount(tokens, minlength=7).double(), logits.double().softmax(0) * rows
    assert counts[4] == 0
    kept = expected > 0
    assert ((counts - expected)[kept].square() / expected[kept]).sum() < 20.5  # 99.9 % of chi-square with 5 degrees


def test_sampler_takes_the_numbers_of_the_row_and_the_position():
    numbers = torch.tensor([[0.1, 0.55, 0.3], [0.35, 0.8, 0.9], [0.6, 0.1, 0.9], [0.4, 0.1, 0.2]], dtype=F64)
    two = torch.log(torch.tensor([[0.2, 0.1, 0.3, 0.4]] * 2))
    args, queries = Args(max_response_length=3), [[0], [0, 0], [0], [0]]
    model = Fixed(torch.zeros(4, 4), two, two[:, [3, 2, 1, 0]])  # two of four rows draw a stop token at once
    responses, values = generate(model, queries, numbers, [1], args, never)
    assert responses == [[0, 2, 0], [1], [2, 0, 3], [1]]
    expected = [[0.25, 0.3, 0.4], [0.25], [0.25, 0.2, 0.2], [0.25]]
    assert [torch.tensor(x["rollout_logprobs"]).exp().tolist() for x in values] == [pytest.approx(x) for x in expected]


# ---- generate ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def batch_sizes(model):
    """The number of rows in each forward pass."""
    sizes = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    yield sizes
    hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_a_loop_of_argmax(load, family):
    """Prompts of 1 to 12 tokens are padded to one width, and rows that are finished leave the batch."""
    model, queries, args = load(family, F64), queries_of(), Args(max_response_length=14)
    endless = generate(model, queries, None, [999], args, never)[0]
    stops = [endless[0][1], endless[4][3], endless[5][6], endless[8][8]]  # tokens that greedy responses do reach
    with batch_sizes(model) as sizes:
        got = generate(model, queries, None, stops, args, never)
    check_one_by_one(model, queries, None, stops, args, got)
    assert len({len(response) for response in got[0]}) >= 3 and sizes[0] == 12 and sizes[-1] <= 6


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_each_row_alone(load, family, temperature):
    model, queries, numbers = load(family, F64), queries_of(), uniforms_of(12, 16)
    args = Args(max_response_length=16, temperature=temperature)
    with batch_sizes(model) as sizes:
        got = generate(model, queries, numbers, STOPS, args, never)
    check_one_by_one(model, queries, numbers, STOPS, args, got)
    assert len({len(response) for response in got[0]}) >= 4 and len(set(sizes)) >= 2


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2"])
def test_samples_of_a_batch_that_shrinks_many_times(load, family):
    model, queries, numbers = load(family, F64), queries_of(LENGTHS * 3), uniforms_of(36, 24)
    stops, args = list(range(0, 32, 4)), Args(max_response_length=24)
    with batch_sizes(model) as sizes:
        got = generate(model, queries, numbers, stops, args, never)
    check_one_by_one(model, queries, numbers, stops, args, got)
    assert len(set(sizes)) >= 4 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("pad", [0, 1, 30])
def test_the_padding_token_does_not_matter(load, pad):
    """It is the first one of the query: the stop token (1), or any other."""
    model, queries, numbers = load("qwen2", F64), [[pad] + query for query in queries_of()], uniforms_of(12, 16)
    got = generate(model, queries, numbers, STOPS, Args(max_response_length=16), never)
    check_one_by_one(model, queries, numbers, STOPS, Args(max_response_length=16), got)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_the_sampler_are_those_of_the_policy(load, family, temperature):
    model, queries, numbers = load(family, F32), queries_of(), uniforms_of(12, 16)
    args = Args(max_response_length=16, temperature=temperature)
    responses, values = generate(model, queries, numbers, STOPS, args, never)
    rows = [torch.tensor(q + r) for q, r in zip(queries, responses)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    places = torch.arange(ids.shape[1])
    mask = torch.stack([(places >= len(q)) & (places < len(q) + len(r)) for q, r in zip(queries, responses)])
    recomputed = Policy(model, temperature, 16)(ids, mask)["logprobs"]
    drawn = torch.tensor([logprob for value in values for logprob in value["rollout_logprobs"]])
    torch.testing.assert_close(drawn, recomputed, rtol=0, atol=1e-5)


@torch.no_grad()
def truncate_at_stop(tokens: list[int], stop_ids: list[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens) - 1)
    return tokens[: end + 1]


def by_transformers(model, queries, stop_ids, length):
    """(response, log-probabilities) of each query by transformers' own generate, greedy."""
    width = max(map(len, queries))
    config = GenerationConfig(
        max_new_tokens=length, eos_token_id=stop_ids, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )  # fmt: skip
    output = model.generate(
        torch.tensor([[0] * (width - len(query)) + query for query in queries]),
        attention_mask=torch.tensor([[0] * (width - len(query)) + [1] * len(query) for query in queries]),
        generation_config=config,
    )
    logprobs, found = torch.stack(output.logits, 1).float().log_softmax(-1), []
    for row, response in zip(logprobs, output.sequences[:, width:].tolist()):
        response = truncate_at_stop(response, stop_ids)
        found.append((response, [row[t, token].item() for t, token in enumerate(response)]))
    return found


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_transformers_generate(load, family, dtype):
    model, queries, args = load(family, dtype), queries_of(LENGTHS * 2), Args(max_response_length=20)
    endless = [response for response, _ in by_transformers(model, queries, [999], 20)]
    stops = sorted({max(response, key=response.index) for response in endless[::2]})  # what came last in half of them
    expected = by_transformers(model, queries, stops, 20)
    with batch_sizes(model) as sizes:
        responses, values = generate(model, queries, None, stops, args, never)
    assert responses == [response for response, _ in expected]
    for value, (_, logprobs) in zip(values, expected):
        assert value["rollout_logprobs"] == pytest.approx(logprobs, abs=1e-5)
    assert len({len(response) for response in responses}) >= 3 and len(set(sizes)) >= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_dropping_rows_changes_nothing(load, family):
    """Without a stop token no row is ever dropped; up to where they would have stopped, responses are the same."""
    model, queries, numbers = load(family, F64), queries_of(LENGTHS * 2), uniforms_of(24, 20)
    args = Args(max_response_length=20)
    with batch_sizes(model) as sizes:
        responses, values = generate(model, queries, numbers, STOPS, args, never)
    assert len(set(sizes)) >= 3 and len(sizes) > 8
    with batch_sizes(model) as sizes:
        endless, whole = generate(model, queries, numbers, [999], args, never)
    assert sizes == [24] * 20
    assert responses == [truncate_at_stop(response, STOPS) for response in endless]
    for value, other, response in zip(values, whole, responses):
        expected = other["rollout_logprobs"][: len(response)]
        assert value == {"rollout_logprobs": pytest.approx(expected, abs=1e-5)}


@pytest.mark.parametrize("stop_ids", [[1], [6, 20], STOPS])
def test_responses_end_with_the_first_stop_token_or_are_full(load, stop_ids):
    model, queries, numbers = load("llama", F64), queries_of([4] * 40), uniforms_of(40, 12)
    responses, values = generate(model, queries, numbers, stop_ids, Args(max_response_length=12), never)
    ends = set()
    for response, value in zip(responses, values):
        assert len(value["rollout_logprobs"]) == len(response) <= 12 and not set(response[:-1]) & set(stop_ids)
        assert response[-1] in stop_ids or len(response) == 12
        ends |= {response[-1]} & set(stop_ids)
    assert ends == set(stop_ids)


def test_a_response_may_have_no_stop_token(load):
    model, args = load("qwen2", F64), Args(max_response_length=7)
    queries, numbers = queries_of([2, 6, 3]), uniforms_of(3, 7)
    got = generate(model, queries, numbers, [999], args, never)
    assert [len(response) for response in got[0]] == [7, 7, 7]
    check_one_by_one(model, queries, numbers, [999], args, got)
    args = Args(max_response_length=1)
    check_one_by_one(model, queries, numbers, STOPS, args, generate(model, queries, numbers, STOPS, args, never))


@pytest.mark.parametrize("least", [1, 4, 16])
def test_min_response_length(load, least):
    model, queries, numbers = load("qwen2", F64), queries_of(), uniforms_of(12, 16)
    args = Args(max_response_length=16, min_response_length=least)
    got = generate(model, queries, numbers, STOPS, args, never)
    check_one_by_one(model, queries, numbers, STOPS, args, got)
    assert min(map(len, got[0])) >= least
    assert not any(set(response[:least]) & set(STOPS) for response in got[0])
    shorter = Args(max_response_length=16)
    assert min(map(len, generate(model, queries, numbers, STOPS, shorter, never)[0])) <= 4 or least == 1


def test_top_k_and_top_p(load):
    """One token left to sample from is the greedy one; the set of the tokens left is the one that the flags name."""
    model, queries, numbers = load("qwen2", F64), queries_of(), uniforms_of(12, 10)
    args = Args(max_response_length=10)
    greedy = generate(model, queries, None, STOPS, args, never)[0]
    for flag in ({"top_k": 1}, {"top_p": 1e-6}):
        assert generate(model, queries, numbers, STOPS, Args(max_response_length=10, **flag), never)[0] == greedy
    with torch.no_grad():
        probabilities = model(input_ids=torch.tensor([queries[0]])).logits[0, -1].softmax(-1)
    ranked = probabilities.argsort(descending=True).tolist()
    many = uniforms_of(400, 1)
    first = generate(model, [queries[0]] * 400, many, [999], Args(max_response_length=1, top_k=3), never)[0]
    assert {response[0] for response in first} == set(ranked[:3])
    nucleus, mass = [], 0.0
    while mass < 0.6:
        nucleus.append(ranked[len(nucleus)])
        mass += probabilities[nucleus[-1]].item()
    first = generate(model, [queries[0]] * 400, many, [999], Args(max_response_length=1, top_p=0.6), never)[0]
    assert {response[0] for response in first} == set(nucleus)


def test_repetition_penalty_does_not_depend_on_the_padding(load):
    """Padding is no token of the prompt: it must not be penalised, least of all where it is the stop token."""
    model, queries, numbers = load("qwen2", F64), queries_of(), uniforms_of(12, 16)
    args = Args(max_response_length=16, repetition_penalty=2.5)
    together = generate(model, queries, numbers, STOPS, args, never)[0]
    alone = [generate(model, [q], numbers[i : i + 1], STOPS, args, never)[0][0] for i, q in enumerate(queries)]
    assert together == alone
    without = generate(model, queries, numbers, STOPS, Args(max_response_length=16), never)[0]
    assert alone != without


def test_the_models_own_generation_defaults_do_not_matter(load):
    model, queries, numbers = load("qwen2", F64), queries_of(), uniforms_of(12, 16)
    defaults = GenerationConfig(
        repetition_penalty=5.0, temperature=0.1, top_k=2, top_p=0.3, do_sample=True, eos_token_id=[2, 3],
        pad_token_id=5, max_new_tokens=2, suppress_tokens=[4], no_repeat_ngram_size=1,
    )  # fmt: skip
    model.generation_config = defaults
    before = defaults.to_dict()
    got = generate(model, queries, numbers, STOPS, Args(max_response_length=16), never)
    check_one_by_one(model, queries, numbers, STOPS, Args(max_response_length=16), got)
    assert model.generation_config is defaults and defaults.to_dict() == before


@pytest.mark.parametrize("calls", [0, 1, 4])
def test_an_interruption_returns_early(load, calls):
    model, asked, args = load("qwen2", F64), [], Args(max_response_length=100)

    def interrupted():
        asked.append(1)
        return len(asked) > calls

    with batch_sizes(model) as sizes:
        responses, values = generate(model, queries_of(), uniforms_of(12, 100), [999], args, interrupted)
    assert len(sizes) == calls + 1 and len(responses) == len(values) == 12  # it is asked after each token
    assert {len(response) for response in responses} == {len(sizes)}


# ---- models that the loop can run -------------------------------------------------------------------------------


def tiny(kind: str, **changes):
    shape = dict(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, **changes)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_the_decode_loop_runs(load, family):
    models.check_decodes("--model here", load(family))


@pytest.mark.parametrize(
    "kind, changes, line",
    [
        ("mamba", dict(state_size=4), "MambaForCausalLM keeps a state that cannot drop finished responses"),
        (
            "minimax", dict(intermediate_size=16, num_key_value_heads=1, num_local_experts=2),
            "MiniMaxForCausalLM keeps a state that cannot drop finished responses",
        ),  # not "stateful" by transformers' flag, but every other layer has linear attention
        ("bloom", {}, "BloomForCausalLM has no position_ids, which the decode loop requires"),
        ("openai-gpt", {}, "OpenAIGPTLMHeadModel has no past_key_values, which the decode loop requires"),
    ],
)  # fmt: skip
def test_models_that_it_cannot_run_end_the_run(kind, changes, line, capsys):
    with pytest.raises(SystemExit) as end:
        models.check_decodes("--model there", tiny(kind, **changes))
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: --model there: {line}; use --rollout_backend vllm\n"


@pytest.mark.parametrize("script", ["grpo", "rloo", "ppo"])
def test_scripts_ask_whether_the_decode_loop_runs_the_model(tmp_path, script):
    values = {**helpers.workspace(tmp_path), "model": helpers.tiny_model(tmp_path / "bloom", "bloom")}
    (line,) = helpers.run(values, 2, script=script).errors
    assert line.startswith(f"error: --model {values['model']}: BloomForCausalLM has no position_ids")
    assert not (tmp_path / "runs").exists()


# ---- rollout ----------------------------------------------------------------------------------------------------


class Scores:
    """A reward source that knows which text belongs to which row."""

    models, verifiers = {}, ("length",)

    def __init__(self):
        self.seen = []

    def score(self, rows, texts, responses, interrupted):
        assert len(rows) == len(texts)
        self.seen += [(row["answer"], text) for row, text in zip(rows, texts)]
        return {"length": [100.0 * row["answer"] + len(text) for row, text in zip(rows, texts)]}


def interrupt(requested: bool = False):
    return types.SimpleNamespace(requested=requested, agreed=lambda: requested)


@pytest.fixture(scope="module")
def setting(load, tokenizer):
    """Five prompts of different lengths, and what `rollout` needs beside them."""
    vocabulary = len(tokenizer)
    stops = [1, *range(40, vocabulary, 9)]  # many of 259 tokens, so that most responses stop
    rows = [{"query": q, "answer": i, "prompt": ""} for i, q in enumerate(queries_of([4, 9, 1, 6, 3], vocabulary))]
    model = load("qwen2", F64, vocab_size=vocabulary)
    return rows, options_of(model, tokenizer, stops)


def options_of(model, tokenizer, stop_ids) -> dict:
    more = dict(generate=generate, engine=None, autocast=contextlib.nullcontext)
    return dict(model=model, tokenizer=tokenizer, stop_ids=stop_ids, **more)


def roll(setting, samples=3, key=("rollout", 1, 1), rows=None, world=None, rewards=None, requested=False, **changes):
    all_rows, options = setting
    args = changes.pop("args", None) or Args(max_response_length=10, temperature=0.8, **changes)
    return rollout(
        all_rows if rows is None else rows, samples, key, rewards=rewards or Scores(), args=args,
        interrupt=interrupt(requested), world=world or utils.World(0, 1, CPU), **options,
    )  # fmt: skip


def same(one, other) -> bool:
    return (
        (one.rows, one.queries, one.responses, one.texts) == (other.rows, other.queries, other.responses, other.texts)
        and one.tokens.keys() == other.tokens.keys()
        and all(torch.allclose(x, other.tokens[name], rtol=0, atol=1e-6) for name, x in one.tokens.items())
        and torch.equal(one.response_mask, other.response_mask)
        and torch.equal(one.stopped, other.stopped)
        and one.reward_components.keys() == other.reward_components.keys()
        and all(torch.equal(x, other.reward_components[name]) for name, x in one.reward_components.items())
    )


def test_rollout_lays_out_the_batch(setting, tokenizer):
    rows, options = setting
    args, rewards = Args(max_response_length=10, temperature=0.8), Scores()
    batch = roll(setting, args=args, rewards=rewards)
    numbers = torch.from_numpy(utils.generator("rollout", 1, 1).random((15, 10)))
    widest = max(map(len, batch.responses))
    for i in range(15):  # the three responses of a prompt stand next to each other
        assert batch.rows[i] is rows[i // 3] and batch.queries[i] == rows[i // 3]["query"]
        response, logprobs = one_by_one(options["model"], batch.queries[i], numbers[i], options["stop_ids"], args)
        assert batch.responses[i] == response
        padding = [0.0] * (widest - len(response))
        assert batch.tokens["rollout_logprobs"][i].tolist() == pytest.approx(logprobs + padding, abs=1e-5)
        assert batch.response_mask[i].tolist() == [1] * len(response) + padding
        assert batch.stopped[i].item() == (response[-1] in options["stop_ids"])
        assert batch.texts[i] == tokenizer.decode(response, skip_special_tokens=True)
        assert batch.reward_components["length"][i] == 100 * (i // 3) + len(batch.texts[i])
        assert rewards.seen[i] == (i // 3, batch.texts[i])
    assert batch.stopped.any() and not batch.stopped.all()
    assert batch.lengths == [len(q) + len(r) for q, r in zip(batch.queries, batch.responses)]
    assert set(batch.tokens) == {"response_mask", "rollout_logprobs"} and batch.response_mask.dtype == torch.bool


def test_rollout_does_not_depend_on_how_it_is_cut(setting):
    whole = roll(setting)
    for size in (1, 2, 4, 100):
        assert same(roll(setting, generation_batch_size=size), whole)


def test_rollout_is_a_function_of_its_key(setting):
    whole = roll(setting)
    torch.rand(100)
    assert same(roll(setting), whole)
    assert roll(setting, key=("rollout", 1, 2)).responses != whole.responses
    assert roll(setting, key=("rollout", 2, 1)).responses != whole.responses
    assert len({tuple(response) for response in whole.responses[:3]}) > 1  # and samples of a prompt differ


def test_greedy_rollout(setting):
    rows, options = setting
    batch, args = roll(setting, samples=0), Args(max_response_length=10)
    expected = [one_by_one(options["model"], row["query"], None, options["stop_ids"], args)[0] for row in rows]
    assert batch.responses == expected


@pytest.mark.parametrize("rows, samples", [(5, 3), (4, 2), (1, 0), (2, 0)])
@pytest.mark.parametrize("size", [2, 3])
def test_rollout_on_several_ranks_is_the_same(setting, monkeypatch, size, rows, samples):
    """The ranks run one after the other; what they would send each other is noted in a first round."""
    shares = {}

    class Missing(Exception):
        pass

    def all_gather_object(parts, share, group=None):
        shares[rank] = share
        if len(shares) < len(parts):
            raise Missing
        parts[:] = [shares[r] for r in range(len(parts))]

    monkeypatch.setattr(utils.dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(utils.dist, "all_reduce", lambda *_, **__: None)
    setting = with_counts(setting)  # all that is stored of a token comes along
    whole, batches, seen = roll(setting, samples, rows=setting[0][:rows]), [], []
    for rank in [*range(size), *range(size)]:
        rewards = Scores()
        with contextlib.suppress(Missing):
            batches.append(
                roll(setting, samples, rows=setting[0][:rows], world=utils.World(rank, size, CPU), rewards=rewards)
            )
            seen.append(len(rewards.seen))
    assert len(batches) == size + 1 and all(same(batch, whole) for batch in batches)
    assert torch.equal(whole.tokens["counted"], counts_of(whole))
    assert sum(seen[1:]) == len(whole.responses)  # each response was scored on one rank


def test_a_model_scores_equal_sequences_once(setting):
    """Rounding would tell them apart; but what it has of a row that names other sources is no score."""
    sources, rewards = (["exact"], None, ["length"]), Scores()
    rows = [{**setting[0][0], "answer": i, "sources": names} for i, names in enumerate(sources)]
    rewards.models = {"length": None}
    found = roll(setting, samples=0, rows=rows, rewards=rewards).reward_components["length"]
    assert (found - found[0]).tolist() == [0, 100, 100]


def test_an_interrupted_rollout_is_none(setting):
    rewards = Scores()
    assert roll(setting, requested=True, rewards=rewards) is None
    assert not rewards.seen


def test_a_model_that_gives_no_numbers_ends_the_run(setting, capsys):
    rows, options = setting
    hook = options["model"].get_output_embeddings().register_forward_hook(lambda _, __, logits: logits * math.nan)
    with pytest.raises(SystemExit) as end:
        roll(setting)
    hook.remove()
    assert end.value.code == 2 and capsys.readouterr().err.startswith("error: --model: ")


def test_training_sees_the_sampled_ids_where_text_would_give_others(load):
    """Merges and bytes that are no UTF-8: what was sampled is not what the tokenizer makes of its text."""
    tokens = [*make_tokenizer().get_vocab()]
    vocabulary = {token: i for i, token in enumerate([*tokens, "ab", "abc"])}
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=[("a", "b"), ("ab", "c")], pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    a, b, c = (vocabulary[letter] for letter in "abc")
    assert tokenizer.encode("abc") == [vocabulary["abc"]] and tokenizer.decode([a, b, c]) == "abc"
    model = load("qwen2", F64, vocab_size=len(vocabulary))
    allowed = torch.full((len(vocabulary),), -math.inf, dtype=F64)
    allowed[[a, b, c, vocabulary["Ã"], 1]] = 0.0  # "Ã" is the byte C3, no UTF-8 by itself
    hook = model.get_output_embeddings().register_forward_hook(lambda _, __, logits: logits * 0.1 + allowed)
    options = options_of(model, tokenizer, [1])
    batch = roll(([{"query": [a, b], "answer": 0}] * 4, options), samples=4)
    hook.remove()
    again = [tokenizer.encode(text) + [1] * int(stopped) for text, stopped in zip(batch.texts, batch.stopped)]
    assert any(one != other for one, other in zip(again, batch.responses))
    assert all(set(response) <= {a, b, c, vocabulary["Ã"], 1} for response in batch.responses)  # no merged token
    ids, mask = batch.collate(list(range(16)))
    assert [row[m].tolist() for row, m in zip(ids, mask)] == batch.responses
    assert pad_rows(ids[mask], batch.response_mask).shape == batch.tokens["rollout_logprobs"].shape
    assert all(row[:2].tolist() == [a, b] for row in ids)


# ---- per-token values travel by name ----------------------------------------------------------------------------


def counting(*inputs):
    """The decode loop of a fork that stores one more value a token: 1000 * token + its place."""
    responses, values = generate(*inputs)
    for response, value in zip(responses, values):
        value["counted"] = [1000 * token + t for t, token in enumerate(response)]
    return responses, values


def with_counts(setting) -> tuple:
    rows, options = setting
    return rows, {**options, "generate": counting}


def counts_of(batch) -> torch.Tensor:
    expected = torch.zeros(batch.response_mask.shape, dtype=torch.long)
    for row, response in zip(expected, batch.responses):
        row[: len(response)] = torch.tensor(response) * 1000 + torch.arange(len(response))
    return expected


def test_a_further_value_travels_from_the_sampler_to_the_loss(setting):
    """Through the rollout, joining, selecting, a checkpoint and micro-batches, none of which names it."""
    rows, _ = setting
    alone = []
    for part, length in ((rows[:3], 10), (rows[3:], 6)):
        args = Args(max_response_length=length, temperature=0.8)
        alone.append(roll(with_counts(setting), rows=part, key=("rollout", 1, length), args=args))
    assert all(torch.equal(batch.tokens["counted"], counts_of(batch)) for batch in alone)
    assert len({batch.response_mask.shape[1] for batch in alone}) == 2  # so joining pads
    batch = join(alone)
    assert batch.texts == [*alone[0].texts, *alone[1].texts] and batch.rows == [*alone[0].rows, *alone[1].rows]
    assert torch.equal(batch.tokens["counted"], counts_of(batch)) and batch.scores is None
    assert torch.equal(batch.stopped, torch.cat([x.stopped for x in alone]))
    lengths = [100.0 * (i // 3) + len(text) for i, text in enumerate(batch.texts)]
    assert batch.reward_components["length"].tolist() == lengths

    batch.scores, chosen = torch.arange(15.0), [1, 3, 4, 8, 14]
    some = batch.select(chosen)
    assert some.scores.tolist() == chosen and some.responses == [batch.responses[i] for i in chosen]
    assert torch.equal(some.tokens["counted"], counts_of(batch)[chosen])
    assert some.reward_components["length"].tolist() == [lengths[i] for i in chosen]
    assert torch.equal(some.stopped, batch.stopped[chosen]) and some.queries == [batch.queries[i] for i in chosen]
    assert some.rows == [batch.rows[i] for i in chosen] and some.texts == [batch.texts[i] for i in chosen]

    args, file = Args(async_steps=1, group_size=3), io.BytesIO()
    made = Experience(some, {"a": 1.0}, 70, 5, [1.0, 2.0, 3.0], 4, 3, "")
    torch.save(made.state(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)  # plain types and tensors, as a checkpoint takes them
    assert Experience.from_state(state, Args(group_size=3), CPU) is None  # of a run that is not asynchronous
    assert Experience.from_state(state, Args(async_steps=1, group_size=4), CPU) is None
    assert Experience.from_state(None, args, CPU) is None
    again = Experience.from_state(state, args, CPU)
    assert vars(again) | {"batch": 0} == vars(made) | {"batch": 0}
    assert again.batch.rows == [{"prompt": "", "query": query, "sources": None} for query in some.queries]
    assert same(again.batch, some_rows(some, again.batch.rows)) and torch.equal(again.batch.scores, some.scores)

    seen, ids = [], []
    for rank in range(2):
        cuts = list(again.batch.micro_batches([0, 1, 2, 4], 20, utils.World(rank, 2, CPU)))
        assert [last for *_, last in cuts] == [False] * (len(cuts) - 1) + [True]
        for (input_ids, mask), t, _ in cuts:
            assert set(t) == {"response_mask", "rollout_logprobs", "counted", "rows"}
            assert len(mask) == max(1, len(t["counted"])) and torch.equal(
                t["counted"], again.batch.tokens["counted"][t["rows"]]
            )
            seen += t["counted"][t["response_mask"]].tolist()
            ids += input_ids[mask].tolist()
            assert torch.equal(t["counted"] // 1000, pad_rows(input_ids[mask], t["response_mask"]))
    assert sorted(seen) == sorted(counts_of(some)[[0, 1, 2, 4]][some.response_mask[[0, 1, 2, 4]]].tolist())
    assert sorted(ids) == sorted(token for i in (0, 1, 2, 4) for token in some.responses[i])


def some_rows(batch: Batch, rows: list[dict]) -> Batch:
    return Batch(**{**vars(batch), "rows": rows})


# ---- prompts to token ids ---------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def bos_tokenizer(adds_bos: bool, chat_template: str | None = None):
    """One token a byte and "<s>", which the tokenizer puts before every text by itself if it `adds_bos`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(BPE({t: i for i, t in enumerate(["<pad>", "</s>", "<s>", *alphabet])}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 2)]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.mark.parametrize("system_prompt", ["", "Be brief."])
@pytest.mark.parametrize("text", ["two and two", "<s>two and two"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_text_gets_the_beginning_token_at_most_once(adds_bos, text, system_prompt):
    tokenizer = bos_tokenizer(adds_bos)
    assert (tokenizer.encode("a")[0] == 2) == adds_bos
    _, ids = prompts.encode_prompt("here", text, tokenizer, system_prompt)
    assert ids.count(2) == int(adds_bos or text.startswith("<s>"))
    words = (f"{system_prompt}\n" if system_prompt else "") + "two and two"
    assert [i for i in ids if i != 2] == tokenizer.encode(words, add_special_tokens=False)
    if 2 in ids:
        assert ids[0] == 2


@pytest.mark.parametrize("system_prompt", ["", "Be brief."])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_chat_gets_exactly_what_its_template_says(adds_bos, system_prompt):
    tokenizer = bos_tokenizer(adds_bos, TEMPLATE)
    system, user = {"role": "system", "content": system_prompt}, {"role": "user", "content": "two and two"}
    said = [user, {"role": "assistant", "content": "4"}, {"role": "user", "content": "and one?"}]
    own = [{"role": "system", "content": "Be long."}, user]
    before = [system] if system_prompt else []
    cases = [("two and two", [*before, user]), ([user], [*before, user]), (said, before + said), (own, own)]
    for prompt, messages in cases:
        text, ids = prompts.encode_prompt("here", prompt, tokenizer, system_prompt)
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ids == expected and ids.count(2) == 1 and ids[0] == 2
        assert text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.endswith("<assistant>")


@pytest.mark.parametrize(
    "prompt, template",
    [("", None), ("  \n", None), (None, None), (7, None), ([], TEMPLATE), ([{"role": "user"}], TEMPLATE),
     ("", TEMPLATE), ([{"role": "user", "content": "x"}], None), ([7], TEMPLATE), ([["role", "content"]], TEMPLATE),
     ("x", "{{ raise_exception('only poems') }}")],
)  # fmt: skip
def test_a_prompt_that_cannot_be_encoded_ends_the_run(prompt, template, capsys):
    with pytest.raises(SystemExit) as end:
        prompts.encode_prompt("--dataset d.jsonl row 4", prompt, bos_tokenizer(True, template), "")
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("error: --dataset d.jsonl row 4: ") and line.count("\n") == 1


@pytest.mark.parametrize("difference, staleness, warned", [(0.011, 0, True), (0.009, 0, False), (0.5, 1, False)])
def test_disagreement_of_rollout_and_trainer_is_warned_of(difference, staleness, warned, capsys):
    """But not where the weights have moved in between, nor where nothing was measured."""
    metrics = {"step": 3, "rollout/prob_diff_mean": difference, "rollout/staleness": staleness}
    engines.watch_agreement(metrics)
    engines.watch_agreement({**metrics, "rollout/prob_diff_mean": math.nan})
    err = capsys.readouterr().err
    assert err.startswith("warning: step 3: ") == warned and err.count("\n") == warned
