"""What is checked of both of vLLM's engines: tests/test_vllm.py and tests/test_vllm_server.py."""

import asyncio
import threading
import time

import torch
from helpers import listed

OBSERVATION = [40, 41, 42, 43, 44]  # what an environment says after each turn of `converse`


def logprobs_of(
    model, query: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities of a response's tokens by the trained model."""
    with torch.no_grad():
        logits = (
            model(input_ids=torch.tensor([query + response])).logits[0, len(query) - 1 : -1]
            / temperature
        )
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def largest_difference(model, queries, responses, logprobs, temperature: float = 1.0) -> float:
    """Between an engine's log-probabilities and the trained model's."""
    worst = 0.0
    for query, response, given in zip(queries, responses, logprobs, strict=True):
        assert len(response) == len(given) > 0
        difference = torch.tensor(given) - logprobs_of(model, query, response, temperature)
        worst = max(worst, difference.abs().max().item())
    return worst


def greedy(model, query: list[int], stop_ids: list[int], length: int) -> list[int]:
    """Return the greedy response of transformers."""
    options = dict(do_sample=False, eos_token_id=stop_ids, max_new_tokens=length)
    return model.generate(torch.tensor([query]), **options)[0, len(query) :].tolist()


def alike(one: tuple, other: tuple) -> bool:
    """Whether two samples (responses, log-probabilities) are the same up to rounding.

    A request is computed together with those that happen to be there, which rounds its numbers
    otherwise: log-probs differ by 1e-6 or so, and once in a long while a draw between two tokens
    falls the other way.
    """
    flipped = 0
    for response, logprobs, others, theirs in zip(*one, *other, strict=True):
        pairs = list(zip(response, others))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        if not torch.allclose(
            torch.tensor(logprobs[:same]), torch.tensor(theirs[:same]), rtol=0, atol=1e-5
        ):
            return False
        flipped += response != others
    return flipped <= len(one[0]) // 10


def sample(
    engine, queries, seeds, stop_ids, args, interrupted=lambda: False
) -> tuple[list[list[int]], list[list[float]]] | None:
    """Responses of an engine and their log-probabilities; None unless all have ended. Greedy ones
    without seeds.
    """
    ended = []
    seeds = seeds or [None] * len(queries)
    end = lambda *response: ended.append(response)
    engine.generate(queries, seeds, stop_ids, args, interrupted, end)
    return listed(ended) if len(ended) == len(queries) else None


def converse(
    engine,
    queries,
    seeds,
    stop_ids,
    args,
    waits=(),
    interrupted=lambda made: False,
    turns=4,
    length=8,
):
    """Conversations side by side: [(query, turn, log-probs) or None] of each, made of its query and
    its seed alone.

    `waits` are the seconds before each turn of a conversation. `interrupted` gets what is returned.
    """

    made = [[] for _ in queries]

    async def conversation(place: int, query: list[int], seed: int, wait: float) -> None:
        for number in range(turns):
            await asyncio.sleep(wait)
            turn = await engine.sample(place, query, 1000 * seed + number, length, stop_ids, args)
            if turn is None:
                made[place].append(None)
                continue
            tokens, outputs = turn
            made[place].append((query, tokens.tolist(), outputs["rollout_logprobs"].tolist()))
            query = [*query, *tokens.tolist(), *OBSERVATION]

    calls = map(conversation, range(len(queries)), queries, seeds, waits or [0.0] * len(queries))
    engine.run_all(calls, lambda: interrupted(made))
    return made


def failure_of(engine) -> str:
    failure = engine.failure
    engine.failure = ""
    return failure


def spoken(conversations: list) -> tuple:
    """Conversations as (responses, log-probabilities) for `alike`."""
    turns = [[turn[part] for turn in turns] for turns in conversations for part in (1, 2)]
    return [sum(ids, []) for ids in turns[::2]], [sum(logprobs, []) for logprobs in turns[1::2]]


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def sync_in_flight(engine, model, queries, args) -> tuple[float, float, int]:
    """Sync other weights, or another adapter, again and again while responses are sampled.

    Returns:
        the largest difference between a token's log-probability and that by the weights that it
        names; the same for the weights after those; and how many responses are of several weights.
    """
    weights = [weights_of(model)]
    ended = []
    given = queries, list(range(len(queries))), [], args, lambda: False  # no token stops
    sampling = threading.Thread(
        target=engine.generate, args=(*given, lambda *response: ended.append(response))
    )
    engine.sync(model, 0)
    sampling.start()
    while sampling.is_alive():
        time.sleep(0.05)
        numbers = torch.Generator().manual_seed(len(weights))
        with torch.no_grad():
            for name, weight in model.state_dict().items():
                if engine.sends_adapter and ".lora_" not in name:
                    continue
                change = torch.randn(weight.shape, generator=numbers)
                weight.copy_(weights[0][name] + 0.05 * change)
        engine.sync(model, len(weights))
        weights.append(weights_of(model))
    worst = [0.0, 0.0]
    assert len(ended) == len(queries), getattr(engine, "failure", "")
    for place, response, outputs in ended:
        given = torch.tensor(outputs["rollout_logprobs"])
        steps = torch.tensor(outputs["policy_steps"]).int()
        assert len(steps) == len(given) == len(response) and (steps.diff() >= 0).all()
        for step in steps.unique():
            for later in (0, 1):
                model.load_state_dict(weights[min(step + later, len(weights) - 1)])
                expected = logprobs_of(model, queries[place], response.tolist(), args.temperature)
                difference = (expected - given)[steps == step].abs().max().item()
                worst[later] = max(worst[later], difference)
    model.load_state_dict(weights[0])
    engine.sync(model, 0)
    return *worst, sum(len(set(outputs["policy_steps"])) > 1 for _, _, outputs in ended)
