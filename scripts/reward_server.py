"""Serve rewards over HTTP to runs on other machines, in the protocol of PaddleNLP's reward server.

    python scripts/reward_server.py --reward math --port 8731
    python scripts/reward_server.py --reward runs/rm/final gsm8k --reward_weights 1 0.5
    curl http://127.0.0.1:8731 -d '{"src": ["6*7="], "tgt": ["42"], "response": ["It is 42."]}'
    python grpo.py --reward http://127.0.0.1:8731

POST / takes prompts, reference answers ("" or null where there is none) and responses, and answers
{"error_code": 0, "error_msg": "Success", "score": [...]}: the weighted sum of the sources for each response, null where
one of them has no score. "columns": {name: [...]}, which PaddleNLP does not have, brings what else a source reads from
a row, as reasoning_gym and functions from files do. GET /health answers once everything is loaded; its "verifies" says
whether 1 or more is a right response, as by a single verifier of weight 1.

An error carries no scores, and its status is its error_code: 400 for a request that cannot be read, 401 without the
key, 408 for a body that takes longer than --body_timeout, 413 for one over --max_body_mb, 500 for a source that failed
as a whole, 503 while the server ends.

A prompt that is text is what the policy saw, its chat template included (so PaddleNLP and this repository send it), and
a reward model reads it as it is, so it has to know the policy's template; a list of messages goes through the reward
model's template. Each response gets one stop token, also where a run has cut it short.

With a key in the variable REWARD_API_KEY, of the server and of the run, every POST takes it as `Authorization: Bearer`.
An address other than this machine's loopback is listened on with a key only. Key and texts travel unencrypted: let
--host be an address in a private network. On a loopback without a key, every user of the machine may ask.
"""

import asyncio
import contextlib
import io
import ipaddress
import json
import math
import os
import secrets
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from pydantic.dataclasses import dataclass
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing import cli
from plumbing.cli import Port, PositiveFloat, PositiveInt, Removed, RewardArgs, Seconds
from plumbing.data import prompts
from plumbing.data.prompts import is_filled
from plumbing.models import loading as models
from plumbing.rewards.sources import (
    Rewards,
    check_name,
    is_reward_model,
    is_scored_by,
    named_sources,
    needs_answer,
    reward_weights,
)
from plumbing.rewards.verifiers import VERIFIERS

GRACE = 3  # seconds that requests have to end in after SIGTERM
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}  # of answers with such a status


@dataclass
class Args(Removed, RewardArgs):
    timeout: Seconds = 10.0
    """Seconds that one call of a reward source may take before it is killed and its sample left out. Shorter than that
    of the runs which ask: theirs is for all of a request, the wait for its turn included."""
    host: str = "127.0.0.1"
    """Address to listen at, 0.0.0.0 for all of the machine's; one that other machines reach takes a key in the variable
    REWARD_API_KEY."""
    port: Port = 8731
    """Port to listen at; 0 for a free one, which the first line of output names."""
    max_body_mb: PositiveFloat = 64.0
    """MB (2^20 bytes) of a request's body; a larger one is refused before it is held in memory. Scoring a body takes
    several times its size."""
    body_timeout: Seconds = 60.0
    """Seconds that a request's body may take to arrive."""
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


class Failure(Exception):
    """Why a request gets no scores: (HTTP status, message)."""


@contextlib.contextmanager
def failing_with(status: int):
    """Turn what would end a run (`utils.fail`) into a Failure, which only ends the request."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit:
        raise Failure(status, said.getvalue().strip().removeprefix("error: ")) from None
    sys.stderr.write(said.getvalue())


def check_key(request: Request) -> None:
    """Raise Failure if the request comes without the key in REWARD_API_KEY."""
    key = os.environ.get("REWARD_API_KEY")
    given = request.headers.get("Authorization", "")
    if key and not secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
        raise Failure(401, "REWARD_API_KEY is not the one of the server")


async def read_body(request: Request, args: Args) -> bytearray:
    """Return the body of a request. Raise Failure if it is too large or takes too long.

    Of a body that is too large, the rest is read and dropped: a sender that is cut off would not see the answer.
    """
    limit, body, size = args.max_body_mb * 2**20, bytearray(), 0
    try:
        async with asyncio.timeout(args.body_timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    body += chunk
                else:
                    body.clear()
    except TimeoutError:
        raise Failure(408, f"the body took longer than --body_timeout {args.body_timeout:g} s of the server") from None
    if size > limit:
        raise Failure(413, f"the body is over --max_body_mb {args.max_body_mb:g} of the server")
    return body


def read_batch(body: bytearray) -> Batch:
    """Return a request's Batch. Raise Failure if it cannot be read."""
    try:
        batch = Batch.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise Failure(400, ": ".join([".".join(map(str, first["loc"])) or "body", first["msg"]])) from None
    for name, column in {"tgt": batch.tgt, "response": batch.response, **batch.columns}.items():
        if len(column) != len(batch.src):
            raise Failure(400, f"{name} has {len(column)} entries, src has {len(batch.src)}; there is one a sample")
    return batch


class Scorer:
    """The reward sources of the server. One thread at a time may use it."""

    def __init__(self, args: Args, world: utils.World):
        self.args, self.tokenizer = args, None
        self.weights = dict(zip(args.reward, reward_weights(args)))
        for model in filter(is_reward_model, args.reward):
            check_name(model)
            self.tokenizer = models.read_tokenizer("--reward", model)
            self.stop_ids = models.stop_token_ids(self.tokenizer, model, args.stop_token)
            break  # further models read the first one's token ids or, of another vocabulary, messages only
        self.rewards = Rewards(args.reward, args.reward_timeout, self.tokenizer)
        stored, _, _, autocast = models.precision(args.precision, world.device)
        self.rewards.load_models(args.reward_model_scale, stored, world.device, autocast, args.micro_batch_tokens)
        configs = [source.model.model.config for source in self.rewards.models.values()]
        lengths = [getattr(config, "max_position_embeddings", None) or math.inf for config in configs]
        self.max_length = min(lengths, default=math.inf)
        counted = {name: weight for name, weight in self.weights.items() if weight}
        self.verifies = list(counted.values()) == [1] and set(counted) <= set(self.rewards.verifiers)

    def _encode(self, where: str, prompt, response: str) -> tuple[list[int], list[int]]:
        """Return the token ids of prompt and response as reward_model.py makes them; none without a reward model."""
        if self.tokenizer is None:
            return [], []
        if isinstance(prompt, str):  # a template has written the special tokens, if there is one
            special = self.tokenizer.chat_template is None
            query = prompts.encode_text(f"{where} of src", prompt, self.tokenizer, special)
        else:
            _, query = prompts.encode_prompt(f"{where} of src", prompt, self.tokenizer, "")
        ids = prompts.encode_text(f"{where} of response", response, self.tokenizer, special=False)
        ids = ids if ids and ids[-1] in self.stop_ids else [*ids, self.stop_ids[0]]
        length = len(query) + len(ids)
        if length > self.max_length:
            raise Failure(400, f"{where} has {length} tokens, over the {self.max_length} of the reward model")
        return query, ids

    def score(self, batch: Batch) -> tuple[list[float | None], str]:
        """Return a score, or None, for each response, and why some of them are missing."""
        counted = [name for name, weight in self.weights.items() if weight]
        rows, responses = [], []
        with failing_with(400):
            for i, (prompt, reference, text) in enumerate(zip(batch.src, batch.tgt, batch.response)):
                query, response = self._encode(f"entry {i}", prompt, text)
                messages = None if isinstance(prompt, str) else prompt
                others = {name: column[i] for name, column in batch.columns.items()}
                sources = named_sources(f"entry {i} of columns", others, self.args)
                own = {"prompt": prompt, "query": query, "messages": messages, "answer": reference}
                rows.append({**own, "sources": sources, "columns": others})
                responses.append(response)
        # A verifier would take a reference that is missing for one that is empty, or is called None.
        needs = [needs_answer(self.args, [name for name in counted if is_scored_by(row, name)]) for row in rows]
        used = [i for i, row in enumerate(rows) if not needs[i] or is_filled(row["answer"])]
        why = [f"{needs[i]}: there is no reference answer" for i in range(len(rows)) if i not in used][:1]
        scores: list[float | None] = [None] * len(rows)
        if not used:
            return scores, "; ".join(why)
        for source in self.rewards.sources.values():
            source.failure = ""  # of an earlier request
        with failing_with(500):
            found = self.rewards.score(*([column[i] for i in used] for column in (rows, batch.response, responses)))
        components = {name: torch.tensor(found[name], dtype=torch.float64) for name in counted}
        for name, component in components.items():
            failure = self.rewards.sources[name].failure
            one_by_one = name in VERIFIERS or name in self.rewards.models  # the other kinds fail as a whole
            if failure and not one_by_one and component.isnan().all():
                raise Failure(500, f"{name}: {failure}")
        total = sum(self.weights[name] * component for name, component in components.items())
        for i, score in zip(used, total.tolist()):
            scores[i] = score if math.isfinite(score) else None
        return scores, "; ".join(filter(None, [*why, self.rewards.why_missing(components)]))


def log(about: str) -> None:
    print(time.strftime("%H:%M:%S"), about, flush=True)


def reply(scorer: Scorer, body: bytearray, arrived: float) -> Response:
    """Return the answer to a request, and print a line about it."""
    start, status, message, scores, about = time.monotonic(), 200, "Success", [], ""
    try:
        scores, why = scorer.score(read_batch(body))
        missing = f", {scores.count(None)} without a score ({why})" if None in scores else ""
        about = f"{len(scores)} rows{missing}"
    except Failure as error:
        status, message = error.args
    except Exception as error:  # out of memory on the GPU, say: the next request may fit
        status, message = 500, f"{type(error).__name__}: {utils.first_line(error)}"
    seconds = f"{time.monotonic() - start:.2f} s, waited {start - arrived:.2f} s"
    log(f"{about or f'error {status}: {message}'}, {seconds}")
    return answer(status, message, scores)


def answer(status: int, message: str, scores: list) -> Response:
    content = {"error_code": 0 if status == 200 else status, "error_msg": message, "score": scores}
    return Response(json.dumps(content, allow_nan=False), status, HEADERS.get(status), "application/json")


def make_app(args: Args, scorer: Scorer) -> FastAPI:
    app, turn, thread = FastAPI(), asyncio.Lock(), ThreadPoolExecutor(1)

    @app.post("/")
    async def score(request: Request) -> Response:
        try:
            check_key(request)
            body, arrived = await read_body(request, args), time.monotonic()
            async with turn:  # first come, first served
                if await request.is_disconnected():  # it has given up, and may ask again: don't work for both
                    raise ClientDisconnect
                return await asyncio.get_running_loop().run_in_executor(thread, reply, scorer, body, arrived)
        except Failure as error:
            status, message = error.args
            log(f"error {status}: {message}")
            return answer(status, message, [])
        except ClientDisconnect:
            log("left out a request whose sender has gone")
            return Response()
        except asyncio.CancelledError:  # GRACE has passed; 503 tells the sender to ask again
            return answer(503, "the server is ending", [])

    @app.get("/health")
    async def health() -> dict:
        model = next(iter(scorer.rewards.models), None)
        return {"status": "ok", "reward": args.reward, "model": model, "verifies": scorer.verifies}

    @app.exception_handler(HTTPException)
    async def no_such_page(request: Request, error: HTTPException) -> Response:
        return answer(error.status_code, f"{request.method} {request.url.path}: {error.detail}", [])

    return app


def main(args: Args) -> None:
    scorer = None

    def leave(*_) -> None:
        """End at once, without waiting for a call that was left undone. (sys.exit would wait for its thread.)"""
        if scorer is not None:
            scorer.rewards.close()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):  # until uvicorn takes them over, which raises them once more
        signal.signal(number, leave)
    try:  # before the models are loaded; who connects meanwhile waits until they are
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family)
    except (OSError, OverflowError) as error:
        utils.fail(f"--host {args.host} --port {args.port}: cannot listen there ({utils.first_line(error)})")
    address = listener.getsockname()[0]
    if not ipaddress.ip_address(address).is_loopback and not os.environ.get("REWARD_API_KEY"):
        utils.fail(
            f"--host {args.host}: every machine that reaches this address could ask; set the variable REWARD_API_KEY "
            "to a key of your choice, for the server and for the run"
        )
    scorer = Scorer(args, utils.setup_processes())
    config = uvicorn.Config(
        make_app(args, scorer), log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE
    )
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"{' '.join(args.reward)} at http://{host}:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(cli.parse(Args))
