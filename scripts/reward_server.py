"""Serve rewards over HTTP to runs on other machines, in the protocol of PaddleNLP's reward server.

    python scripts/reward_server.py --reward runs/rm/final gsm8k --reward_weights 1 0.5
    curl http://127.0.0.1:8731 --json '{"src": ["6*7="], "tgt": ["42"], "response": ["It is 42."]}'
    python grpo.py --reward http://127.0.0.1:8731

The score of a response is the weighted sum of the sources, null where one of them has none (the
server's output says why, once a source) or reads a reference answer that is missing. PaddleNLP has
neither "columns": {name: [...]}, what else a source reads from a row, nor "messages": [...] and
"turns": [...], prompts and conversations as lists of messages. A reward model reads prompts through
its chat template, if it has one. A prompt that is there as text only is what the policy saw, its
chat template included: who writes it can write the template's tokens, too.
docs/data_and_rewards.md has the key, the statuses and GET /health.
"""

import asyncio
import contextlib
import json
import math
import socket
from collections import defaultdict
from types import SimpleNamespace
from typing import Iterator, Literal

import repository  # noqa: F401
from aiohttp import web
from aiohttp.log import server_logger
from pydantic import BaseModel, FiniteFloat, model_validator
from pydantic.dataclasses import dataclass
from server_key import has_key, require_key
from yarl import URL

import utils
from extras.http import in_one_line
from plumbing.cli import Port, PositiveInt, RewardArgs, Seconds
from plumbing.data.formats import named_sources
from plumbing.data.messages import read_messages
from plumbing.models import loading
from plumbing.rewards import sources
from plumbing.run.command import parse, report_errors

LARGEST_BODY = 1 << 26  # bytes of a request
PART = 16  # responses of a request that are scored together
PARTS = 8  # of a client that are scored at the same time, 2 of each request
# Connections that wait for the rest of a request, of which the oldest are closed: half of the file
# descriptors that a process has by default.
MOST_WAITING = 512


@dataclass
class Args(RewardArgs):
    timeout: Seconds = 10.0
    """Seconds that one call of a reward source may take before it is killed and its sample left
    out. Shorter than that of the runs which ask: theirs is for all of a request, the wait for its
    turn included."""
    host: str = "127.0.0.1"
    """Address to listen at, 0.0.0.0 for all of the machine's; one that other machines reach
    requires a key in the variable REWARD_API_KEY."""
    port: Port = 8731
    """Port to listen at; 0 for a free one, which the first line of output names."""
    precision: Literal["auto", "float32", "float64", "bf16"] = "auto"
    """What a reward model computes in; auto is bf16 on GPUs and float32 elsewhere."""
    micro_batch_tokens: PositiveInt = 16_384
    """Tokens, padding included, of a reward model's forward pass. Memory and speed; results change
    by rounding only."""

    def rules(self) -> Iterator[tuple[object, str]]:
        """Yield the conditions that flags must meet, each with what to say otherwise."""
        yield "episode" not in self.reward, "--reward episode requires the conversations of a run"


class Turn(BaseModel, extra="allow"):
    """A message of a conversation."""

    content: str


class Request(BaseModel):
    """The body of a request."""

    src: list[str]
    tgt: list[str | bool | int | FiniteFloat | None]
    response: list[str]
    messages: list[list[dict] | None] | None = None
    turns: list[list[Turn]] | None = None
    columns: dict[str, list] = {}

    @model_validator(mode="after")
    def one_entry_a_sample(self):
        for name, column in [*self, *self.columns.items()]:
            if isinstance(column, list) and len(column) != len(self.src):
                raise ValueError(f"{name} has {len(column)} entries, src has {len(self.src)}")
        return self


class Scorer:
    """The reward sources of the server. Several threads may use it."""

    def __init__(self, args: Args, world: utils.World):
        self.args = args
        self.reward_sources = sources.RewardSources(args)
        self.reward_sources.load_models(args, loading.precision(args.precision, world.device))
        self.weights = sources.reward_weights(args)
        # Whether 1 or more is a right response, as by a single verifier of weight 1.
        self.verifies = self.weights == (1,) and bool(self.reward_sources.verifiers)

    def score(self, request: Request, places: range) -> list[float | None]:
        """Return the scores of some responses, None where a source has none."""
        scoring = sources.Scoring(self.reward_sources, lambda: False)
        for i in places:
            scoring.add(i, self.sample(request, i))
        totals = [
            # The scores are in the order of --reward.
            sum(weight * score for weight, score in zip(self.weights, sample.scores.values()))
            for sample in scoring.finish()
        ]
        return [total if math.isfinite(total) else None for total in totals]

    def sample(self, request: Request, i: int) -> SimpleNamespace:
        """Return an entry of a request as a row of a data set and a response to it."""
        where = f"entry {i}"
        messages = request.messages and request.messages[i]
        columns = {name: column[i] for name, column in request.columns.items()}
        row = {
            "prompt": request.src[i],
            "messages": messages
            and [message.as_dict() for message in read_messages(f"{where} prompt", messages)],
            "answer": request.tgt[i],
            "sources": named_sources(where, columns, self.args.reward),
            "columns": columns,
        }
        if request.turns:
            row["turns"] = [turn.model_dump() for turn in request.turns[i]]
        return SimpleNamespace(row=row, text=request.response[i], response=[])


async def serve(scorer: Scorer, listener: socket.socket) -> None:
    """Answer the requests that arrive at a socket, without end.

    A request is scored part by part, and each part waits for a slot of its client: so no request
    waits for all of another one, and no client for all requests of another one.
    """
    server_logger.addFilter(in_one_line)
    slots = defaultdict(lambda: asyncio.Semaphore(PARTS))
    busy = set()  # connections with a request that has come whole

    async def score(request: web.Request) -> web.Response:
        if not has_key(request.raw_headers, "REWARD_API_KEY"):
            raise web.HTTPUnauthorized(text="REWARD_API_KEY is not the one of the server")
        two = asyncio.Semaphore(2)  # else processes would wait for the last row of each part

        async def score_part(i: int) -> list[float | None]:
            async with two, slots[request.remote]:
                return await asyncio.to_thread(scorer.score, asked, places[i : i + size])

        try:
            asked = Request.model_validate(json.loads(await request.read()))
            busy.add(request.protocol)
            places = range(len(asked.src))
            size = sources.Source.most if scorer.reward_sources.whole else PART
            parts = await asyncio.gather(*map(score_part, places[::size]))
        except (utils.UserError, web.RequestPayloadError, ValueError, RecursionError) as error:
            status = 400 if isinstance(error, utils.UserError) else 422
            text = utils.one_line(f"{type(error).__name__}: {error}")
            return web.Response(text=text[:1000], status=status)
        finally:
            busy.discard(request.protocol)
        return web.json_response({"error_code": 0, "error_msg": "Success", "score": sum(parts, [])})

    async def health(_) -> web.Response:
        whole = scorer.reward_sources.whole
        return web.json_response({"status": "ok", "verifies": scorer.verifies, "whole": whole})

    def connect() -> asyncio.Protocol:
        waiting = [x for x in runner.server.connections if x not in busy]
        for connection in waiting[:-MOST_WAITING]:
            connection.force_close()
        return runner.server()

    app = web.Application(client_max_size=LARGEST_BODY)
    app.add_routes([web.post("/", score), web.get("/health", health)])
    # Once a client has left, its `score` is cancelled: the part under way ends, and no other begins.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    server = await asyncio.get_running_loop().create_server(connect, sock=listener)
    await server.serve_forever()


def main(args: Args) -> None:
    with utils.as_user_error(f"--host {args.host} --port {args.port}"):
        require_key(args.host, "REWARD_API_KEY")
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        # Clients wait until models are loaded.
        listener = socket.create_server((args.host, args.port), family=family)
    scorer = Scorer(args, utils.setup_processes())
    url = URL.build(scheme="http", host=args.host, port=listener.getsockname()[1])
    print(f"{' '.join(args.reward)} at {url}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(scorer, listener))


if __name__ == "__main__":
    with report_errors():
        main(parse(Args))
