"""Serve rewards over HTTP to runs on other machines, in the protocol of PaddleNLP's reward server.

    python scripts/reward_server.py --reward runs/rm/final gsm8k --reward_weights 1 0.5
    curl http://127.0.0.1:8731 --json '{"src": ["6*7="], "tgt": ["42"], "response": ["It is 42."]}'
    python grpo.py --reward http://127.0.0.1:8731

The score of a response is the weighted sum of the sources, null where one of them has none, which the server's output
explains. "columns": {name: [...]}, which PaddleNLP does not have, holds what else a source reads from a row. A prompt
that is text is what the policy saw, its chat template included; a list of messages goes through the reward model's
template. Each response gets one stop token. docs/data_and_rewards.md has the key, the statuses and GET /health.
"""

import contextlib
import math
import os
import socket
import sys
import threading
from typing import Literal

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, model_validator
from pydantic.dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing import cli
from plumbing.cli import Port, PositiveInt, RewardArgs, Seconds
from plumbing.data import prompts
from plumbing.http import CheckKey, require_key
from plumbing.models import loading
from plumbing.rewards import sources


@dataclass
class Args(RewardArgs):
    timeout: Seconds = 10.0
    """Seconds that one call of a reward source may take before it is killed and its sample left out. Shorter than that
    of the runs which ask: theirs is for all of a request, the wait for its turn included."""
    host: str = "127.0.0.1"
    """Address to listen at, 0.0.0.0 for all of the machine's; one that other machines reach requires a key in the
    variable REWARD_API_KEY."""
    port: Port = 8731
    """Port to listen at; 0 for a free one, which the first line of output names."""
    stop_token: str = "eos"
    """Token that ends a response for a reward model: eos or the text of one token."""
    precision: Literal["auto", "float32", "float64", "bf16"] = "auto"
    """What a reward model computes in; auto is bf16 on GPUs and float32 elsewhere."""
    micro_batch_tokens: PositiveInt = 16_384
    """Tokens, padding included, of a reward model's forward pass. Memory and speed; results change by rounding only."""

    RULES = {"--reward environment requires the conversations of a run": lambda a: "environment" not in a.reward}


class Batch(BaseModel):
    """The body of a request."""

    src: list[str | list[dict]]
    tgt: list[str | bool | int | float | None]
    response: list[str]
    columns: dict[str, list] = {}

    @model_validator(mode="after")
    def one_entry_a_sample(self):
        for name, column in {"tgt": self.tgt, "response": self.response, **self.columns}.items():
            if len(column) != len(self.src):
                raise ValueError(f"{name} has {len(column)} entries, src has {len(self.src)}")
        return self


class Scorer:
    """The reward sources of the server. One thread at a time may use it."""

    def __init__(self, args: Args, world: utils.World):
        self.args, self.tokenizer, self.weights = args, None, sources.reward_weights(args)
        for name in args.reward:
            sources.check_name(name)
            if sources.kind_of(name) == "model" and self.tokenizer is None:
                self.tokenizer = loading.read_tokenizer("--reward", name)
                self.stop_ids = loading.stop_token_ids(self.tokenizer, name, args.stop_token)
        self.rewards = sources.Rewards(args, self.tokenizer)
        self.rewards.load_models(args, loading.precision(args.precision, world.device))
        # Whether 1 or more is a right response, as by a single verifier of weight 1.
        self.verifies = tuple(self.weights) == (1,) and self.rewards.verifiers == tuple(args.reward)

    def score(self, batch: Batch) -> list[float | None]:
        """Return a score for each response, None where a source has none or its reference is missing."""
        rows = [self.row(batch, i) for i in range(len(batch.src))]
        scores = self.rewards.score(rows, batch.response, [row["response"] for row in rows])
        components = {name: torch.tensor(column, dtype=torch.float64) for name, column in scores.items()}
        total = sum(weight * component for weight, component in zip(self.weights, components.values()))
        for i, row in enumerate(rows):  # a response could equal a reference that is missing: "" or None
            if not prompts.is_filled(row["answer"]) and sources.needs_answer(self.args, row["sources"]):
                total[i] = math.nan
        if not total.isfinite().all():
            print(f"no score: {self.rewards.why_missing(components) or 'no reference answer'}", flush=True)
        return [score if math.isfinite(score) else None for score in total.tolist()]

    def row(self, batch: Batch, i: int) -> dict:
        """Return a sample as a row of a data set with its response; for a reward model, both as token ids, too."""
        prompt, columns = batch.src[i], {name: column[i] for name, column in batch.columns.items()}
        query, response, at, is_text = [], [], f"entry {i} of", isinstance(prompt, str)
        if self.tokenizer is not None:
            special = self.tokenizer.chat_template is None  # else the template has written the special tokens
            if is_text:
                query = prompts.encode_text(f"{at} src", prompt, self.tokenizer, special)
            else:
                _, query = prompts.encode_prompt(f"{at} src", prompt, self.tokenizer, "")
            response = prompts.encode_response(f"{at} response", batch.response[i], self.tokenizer, self.stop_ids)
        return {
            "prompt": prompt, "query": query, "response": response, "messages": None if is_text else prompt,
            "answer": batch.tgt[i], "sources": prompts.named_sources(f"{at} columns", columns, self.args),
            "columns": columns,
        }  # fmt: skip


def make_app(args: Args, scorer: Scorer) -> FastAPI:
    app, turn = FastAPI(), threading.Lock()
    app.add_middleware(CheckKey, variable="REWARD_API_KEY")

    @app.post("/")
    def score(batch: Batch) -> dict:
        try:
            with turn:
                scores = scorer.score(batch)
        except SystemExit as error:  # by utils.fail
            raise HTTPException(400, "the server's output says what is wrong with a row") from error
        return {"error_code": 0, "error_msg": "Success", "score": scores}

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok", "reward": args.reward, "verifies": scorer.verifies}

    return app


def main(args: Args) -> None:
    with utils.loading(f"--host {args.host} --port {args.port}"):
        require_key(args.host, "REWARD_API_KEY")
        listener = socket.create_server((args.host, args.port))  # clients wait until the models are loaded
    scorer = Scorer(args, utils.setup_processes())
    config = uvicorn.Config(make_app(args, scorer), log_level="warning", timeout_graceful_shutdown=3)
    print(f"{' '.join(args.reward)} at http://{args.host}:{listener.getsockname()[1]}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(cli.parse(Args))
