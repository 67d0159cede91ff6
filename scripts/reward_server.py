"""Serve rewards over HTTP to runs on other machines, in the protocol of PaddleNLP's reward server.

    python scripts/reward_server.py --reward runs/rm/final gsm8k --reward_weights 1 0.5
    curl http://127.0.0.1:8731 -d '{"src": ["6*7="], "tgt": ["42"], "response": ["It is 42."]}'
    python grpo.py --reward http://127.0.0.1:8731

POST / reads prompts, reference answers ("" or null where there is none) and responses, and answers
{"error_code": 0, "error_msg": "Success", "score": [...]}: the weighted sum of the sources for each response, null where
one of them has no score. "columns": {name: [...]}, which PaddleNLP does not have, holds what else a source reads from
a row, as functions from files do. An error carries no scores, and its status is its error_code: 400 for a request that
cannot be read, 500 for a source that failed as a whole. GET /health answers once everything is loaded.

A prompt that is text is what the policy saw, its chat template included, and a reward model reads it as it is; a list
of messages goes through the reward model's template. Each response gets one stop token, also a truncated one.

An address other than the loopback requires a key in the variable REWARD_API_KEY, of the server and of the run. Key and
texts travel unencrypted: let --host be an address in a private network.
"""

import asyncio
import contextlib
import math
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError, model_validator
from pydantic.dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing import cli
from plumbing.cli import Port, PositiveInt, RewardArgs, Seconds
from plumbing.data import prompts
from plumbing.http import CheckKey, require_key
from plumbing.models import loading
from plumbing.rewards import sources
from plumbing.rewards.workers import FunctionSource


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
        if model := next(filter(sources.is_reward_model, args.reward), None):
            sources.check_name(model)
            self.tokenizer = loading.read_tokenizer("--reward", model)
            self.stop_ids = loading.stop_token_ids(self.tokenizer, model, args.stop_token)
        self.rewards = sources.Rewards(args, self.tokenizer)
        self.rewards.load_models(args, loading.precision(args.precision, world.device))
        # Whether 1 or more is a right response, as by a single verifier of weight 1.
        self.verifies = tuple(self.weights) == (1,) and self.rewards.verifiers == tuple(args.reward)

    def row(self, at: str, prompt: str | list, answer, columns: dict) -> dict:
        """Return a sample as a row of a data set; without a reward model, its prompt has no token ids."""
        query, is_text = [], isinstance(prompt, str)
        if self.tokenizer is not None and is_text:
            special = self.tokenizer.chat_template is None  # else the template has written the special tokens
            query = prompts.encode_text(f"{at} of src", prompt, self.tokenizer, special)
        elif self.tokenizer is not None:
            _, query = prompts.encode_prompt(f"{at} of src", prompt, self.tokenizer, "")
        names = prompts.named_sources(f"{at} of columns", columns, self.args)
        row = {"prompt": prompt, "query": query, "messages": None if is_text else prompt, "answer": answer}
        return row | {"sources": names, "columns": columns}

    def response(self, at: str, text: str) -> list[int]:
        """Return a response as token ids that end with a stop token; without a reward model, none."""
        if self.tokenizer is None:
            return []
        ids = prompts.encode_text(f"{at} of response", text, self.tokenizer, special=False)
        return ids if ids and ids[-1] in self.stop_ids else [*ids, self.stop_ids[0]]

    def is_complete(self, row: dict) -> bool:
        """Return whether a row has the reference that its sources need. (A response could equal "" or None.)"""
        names = [name for name in self.args.reward if sources.is_scored_by(row, name)]
        return not sources.needs_answer(self.args, names) or prompts.is_filled(row["answer"])

    def score(self, batch: Batch) -> list[float | None]:
        """Return a score, or None, for each response. Raise RuntimeError if a function fails as a whole."""
        rows, responses = [], []
        for i, text in enumerate(batch.response):
            columns = {name: column[i] for name, column in batch.columns.items()}
            rows.append(self.row(f"entry {i}", batch.src[i], batch.tgt[i], columns))
            responses.append(self.response(f"entry {i}", text))
        complete = [i for i, row in enumerate(rows) if self.is_complete(row)]
        chosen = ([column[i] for i in complete] for column in (rows, batch.response, responses))
        for source in self.rewards.sources.values():
            source.failure = ""  # of an earlier request
        components = {name: torch.tensor(x, dtype=torch.float64) for name, x in self.rewards.score(*chosen).items()}
        for name, source in self.rewards.sources.items():
            if isinstance(source, FunctionSource) and source.failure:
                raise RuntimeError(f"{name}: {source.failure}")
        scores: list[float | None] = [None] * len(rows)
        total = sum(weight * component for weight, component in zip(self.weights, components.values()))
        for i, score in zip(complete, total.tolist()):
            scores[i] = score if math.isfinite(score) else None
        if None in scores:
            print(f"no score: {self.rewards.why_missing(components) or 'no reference answer'}", flush=True)
        return scores


def make_app(args: Args, scorer: Scorer) -> FastAPI:
    app, thread = FastAPI(), ThreadPoolExecutor(1)
    app.add_middleware(CheckKey, variable="REWARD_API_KEY")

    @app.post("/")
    async def score(request: Request) -> JSONResponse:
        start, status, message, scores = time.monotonic(), 200, "Success", []
        try:
            batch = Batch.model_validate_json(await request.body())
            scores = await asyncio.get_running_loop().run_in_executor(thread, scorer.score, batch)
        except ValidationError as error:
            status, message = 400, str(error)
        except SystemExit:  # by utils.fail
            status, message = 400, "the server's output says what is wrong with a row"
        except Exception as error:  # out of memory on the GPU, say: the next request may fit
            status, message = 500, utils.first_line(error)
        print(f"{status} {message}: {len(scores)} scores in {time.monotonic() - start:.2f} s", flush=True)
        content = {"error_code": 0 if status == 200 else status, "error_msg": message, "score": scores}
        return JSONResponse(content, status)

    @app.get("/health")
    async def health() -> dict:
        model = next(iter(scorer.rewards.models), None)
        return {"status": "ok", "reward": args.reward, "model": model, "verifies": scorer.verifies}

    return app


def main(args: Args) -> None:
    with utils.loading(f"--host {args.host} --port {args.port}"):
        require_key(args.host, "REWARD_API_KEY")
        listener = socket.create_server((args.host, args.port))  # clients wait until the models are loaded
    scorer = Scorer(args, utils.setup_processes())
    config = uvicorn.Config(make_app(args, scorer), log_level="warning", access_log=False, timeout_graceful_shutdown=3)
    print(f"{' '.join(args.reward)} at http://{args.host}:{listener.getsockname()[1]}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(cli.parse(Args))
