"""What is checked of both of vLLM's engines: tests/test_vllm.py and tests/test_vllm_server.py."""

import asyncio

import torch

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


def converse(
    engine, queries, seeds, stop_ids, args, waits=(), interrupted=lambda: False, turns=4, length=8
):
    """Conversations side by side: [(query, turn, log-probs) or None] of each, made of its query and
    its seed alone.

    `waits` are the seconds before each turn of a conversation.
    """

    async def conversation(
        place: int, query: list[int], seed: int, wait: float
    ) -> list[tuple | None]:
        made = []
        for number in range(turns):
            await asyncio.sleep(wait)
            turn = await engine.sample(
                place, query, 1000 * seed + number, length, stop_ids, args, interrupted
            )
            made.append(None if turn is None else (query, turn[0], *turn[1].values()))
            query = query if turn is None else query + turn[0] + OBSERVATION
        return made

    async def conversations() -> list:
        return await asyncio.gather(
            *map(conversation, range(len(queries)), queries, seeds, waits or [0.0] * len(queries))
        )

    return asyncio.run(conversations())


def failure_of(engine) -> str:
    failure = engine.failure
    engine.failure = ""
    return failure


def spoken(conversations: list) -> tuple:
    """Conversations as (responses, log-probabilities) for `alike`."""
    turns = [[turn[part] for turn in turns] for turns in conversations for part in (1, 2)]
    return [sum(ids, []) for ids in turns[::2]], [sum(logprobs, []) for logprobs in turns[1::2]]
