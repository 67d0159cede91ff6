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

import contextlib
import math
import socket
from types import SimpleNamespace
from typing import Iterator, Literal

import repository  # noqa: F401
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, model_validator
from pydantic.dataclasses import dataclass
from server_key import CheckKey, require_key
from yarl import URL

import utils
from plumbing import cli
from plumbing.cli import Port, PositiveInt, RewardArgs, Seconds
from plumbing.data.formats import named_sources
from plumbing.data.messages import read_messages
from plumbing.models import loading
from plumbing.rewards import sources
from plumbing.run.ranks import report_errors


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


class Request(BaseModel):
    """The body of a request."""

    src: list[str]
    tgt: list[str | bool | int | float | None]
    response: list[str]
    messages: list[list[dict] | None] | None = None
    turns: list[list[dict]] | None = None
    columns: dict[str, list] = {}

    @model_validator(mode="after")
    def one_entry_a_sample(self):
        given = {
            "tgt": self.tgt,
            "response": self.response,
            "messages": self.messages or self.src,
            "turns": self.turns or self.src,
            **self.columns,
        }
        for name, column in given.items():
            if len(column) != len(self.src):
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

    def score(self, request: Request) -> list[float | None]:
        """Return a score for each response, None where a source has none."""
        scoring = sources.Scoring(self.reward_sources, lambda: False)
        for i in range(len(request.src)):
            scoring.add(i, self.sample(request, i))
        scores = []
        for sample in scoring.finish():
            numbers = sample.scores.values()  # in the order of --reward
            total = sum(weight * number for weight, number in zip(self.weights, numbers))
            scores.append(total if math.isfinite(total) else None)
        return scores

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
            row["turns"] = request.turns[i]
        return SimpleNamespace(row=row, text=request.response[i], response=[])


def make_app(scorer: Scorer) -> FastAPI:
    app = FastAPI()
    app.add_middleware(CheckKey, variable="REWARD_API_KEY")

    @app.post("/")
    def score(request: Request) -> dict:
        try:
            scores = scorer.score(request)
        except utils.UserError as error:
            raise HTTPException(400, str(error)) from error
        return {"error_code": 0, "error_msg": "Success", "score": scores}

    @app.get("/health")
    async def health() -> dict:
        kind = {"verifies": scorer.verifies, "whole": scorer.reward_sources.whole}
        return {"status": "ok", "reward": scorer.args.reward, **kind}

    return app


def main(args: Args) -> None:
    with utils.as_user_error(f"--host {args.host} --port {args.port}"):
        require_key(args.host, "REWARD_API_KEY")
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        # Clients wait until models are loaded.
        listener = socket.create_server((args.host, args.port), family=family)
    scorer = Scorer(args, utils.setup_processes())
    app = make_app(scorer)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3)
    url = URL.build(scheme="http", host=args.host, port=listener.getsockname()[1])
    print(f"{' '.join(args.reward)} at {url}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    with report_errors():
        main(cli.parse(Args))
