"""The reward sources of a run: built-in verifiers, functions from files, reward models and reward
servers.

Each kind is a class, a Source. One that raises an exception, takes longer than --timeout, or
returns None, NaN, infinity or over 1e18 gives no score: never a silent zero.
"""

import asyncio
import contextlib
import functools
import importlib.util
import json
import math
import os
import time
from collections import deque
from concurrent.futures import Future, wait
from multiprocessing.util import Finalize
from typing import Callable

import numpy as np
import torch
from pebble import ThreadPool
from torch.nn.utils.rnn import pad_sequence

from plumbing.data.prompts import encode_text, guarded, is_filled
from plumbing.models import loading as models
from plumbing.rewards.verifiers import VERIFIERS, verifier_of
from plumbing.rewards.workers import SECONDS_TO_LOAD, Workers, call_function, never
from utils import World, exit_on_error, fail, first_line, micro_batches, warn

# score; the square of a larger one would not fit into float32, and its advantage become 0
LARGEST = 1e18


def finite_or_nan(score) -> float:
    """Return a score as a float; NaN for None, infinity and anything over LARGEST."""
    score = math.nan if score is None else float(score)
    return score if abs(score) <= LARGEST else math.nan


def columns_of(rows: list[dict]) -> dict[str, list]:
    """Return the columns that prompts had in their files and "answer", a value a prompt; None where
    a row lacks one.
    """
    tables = [{**row.get("columns", {}), "answer": row.get("answer")} for row in rows]
    names = sorted({name for table in tables for name in table})
    return {name: [table.get(name) for table in tables] for name in names}


def reward_weights(args) -> tuple[float, ...]:
    """Return the weight of each reward source."""
    return args.reward_weights or (1.0,) * len(args.reward)


def check_reference(where: str, row: dict, args) -> str:
    """Return why a source of --reward that trains cannot score a row, whatever the response; "" if
    all of them can.

    Exit with code 2 if the row has no answer, and a source needs one.
    """
    if not is_filled(row["answer"]) and (source := needs_answer(args, row["sources"])):
        fail(
            f"{where}: has no answer, which {source} needs; --answer_column names one of {', '.join(row['columns'])}"
        )
    for name, weight in zip(args.reward, reward_weights(args)):
        if weight and is_scored_by(row, name) and (verifier := verifier_of(name)):
            check_name(name)
            try:
                verifier.read(*columns_of([row]).get(verifier.column, [None]))
            except Exception as error:  # references of any form
                return f"--reward {name}: {first_line(error)}"
    return ""


def needs_answer(args, sources: list[str] | None = None) -> str:
    """Return "--reward NAME" of the first of some sources (None: all) that reads the row's answer;
    "" if none does.
    """
    names = args.reward if sources is None else sources
    return next(
        (
            f"--reward {name}"
            for name in names
            if getattr(verifier_of(name), "column", "") == "answer"
        ),
        "",
    )


def kind_of(name: str) -> str:
    """Return what a source of --reward is: "environment", "verifier", "server", "function" or
    "model".
    """
    if name == "environment":
        return name
    if verifier_of(name):
        return "verifier"
    if name.startswith(("http://", "https://")):
        return "server"
    return "function" if name.rpartition(":")[0].endswith(".py") else "model"


@functools.cache
def check_name(name: str) -> None:
    """Exit with code 2 for a source that cannot be used. A model's folder or hub name is not
    opened.
    """
    if kind_of(name) == "model" and not os.path.isdir(name) and name.count("/") != 1:
        others = "path/to/file.py:function, a reward model's folder or hub name, or a server's http:// address"
        fail(f"--reward {name}: there is no such reward; use {', '.join(VERIFIERS)}, {others}")
    if (
        kind_of(name) == "verifier"
        and importlib.util.find_spec(package := verifier_of(name).package) is None
    ):
        fail(f"--reward {name}: requires the package {package} (pip install {package})")
    if name == "code":
        from plumbing.rewards import sandbox

        with exit_on_error("--reward code"):
            missing = sandbox.open_limits()
        if missing:
            warn(f"--reward code: {missing}")


def is_scored_by(row: dict, name: str) -> bool:
    """Return whether a source scores a row: all of them do, unless the row names its sources, as
    open-instruct's.

    `name` may also be that of a further number, "SOURCE/NUMBER".
    """
    return row.get("sources") is None or not {name, name.rpartition("/")[0]}.isdisjoint(
        row["sources"]
    )


class RewardSources:
    """The reward sources of a run, by the names given to --reward."""

    waited = 0.0  # seconds for scores of a step, once all responses had ended

    def __init__(self, args, tokenizer, rows: list[dict] = (), environment: bool = False):
        """Check all sources and start the worker processes; reward models are loaded by
        `load_models`.

        Args:
            args: --reward, and --timeout in seconds of a call. tokenizer: of the policy. rows:
                prompts of the run, of which each source gets two in a call that has to succeed;
                none for no such call.
            environment: whether responses are conversations.
        """
        # Verifiers share the responses of a rank out among processes; functions share one process
        # and what it holds.
        count = args.reward_workers or (os.cpu_count() or 1) // int(
            os.environ.get("LOCAL_WORLD_SIZE", "1")
        )
        packages = [verifier.package for verifier in map(verifier_of, args.reward) if verifier]
        self.workers = {"verifier": Workers(max(1, count), packages), "function": Workers(1)}
        self.sources = {}
        self.further = []
        self.warned = set()
        # at the end of this process, a child of multiprocessing, too
        Finalize(None, self.close, exitpriority=1)
        for name in args.reward:
            check_name(name)
            kind = kind_of(name)
            self.sources[name] = SOURCES[kind](
                name, args.timeout, self.workers.get(kind), tokenizer
            )
            if kind == "function" and (failure := self.sources[name].load()):
                fail(f"--reward {name}: {failure}", local=True)
        self.models = {
            name: source for name, source in self.sources.items() if isinstance(source, ModelSource)
        }
        if rows:
            self._try_out(rows, tokenizer, environment)
        # Those that tell a right response, by 1 or more, from a wrong one, as reward models do not.
        self.verifiers = tuple(name for name, source in self.sources.items() if source.verifies)

    def _try_out(self, rows: list[dict], tokenizer, environment: bool) -> None:
        """Exit with code 2 if a source fails in a call with two prompts, answered by their
        references or "42".
        """
        for name, source in self.sources.items():
            scored = [row for row in rows if is_scored_by(row, name)]
            two = scored[:1] + scored[-1:]
            texts = ["42" if row["answer"] is None else str(row["answer"]) for row in two]
            responses = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            if environment:
                two = [
                    {**row, "turns": [{"role": "assistant", "content": x}]}
                    for row, x in zip(two, texts)
                ]
            if name in self.models:
                source.read(two, texts, responses)  # its weights are not loaded yet
            elif kind_of(name) in ("function", "server"):
                results = source.score(two, texts, responses)
                if results and isinstance(results[0], dict):
                    self.further += [key for key in results[0] if key != name]
            if source.failure:
                fail(f"--reward {name}: a trial call with two responses failed: {source.failure}")

    def load_models(self, args, precision, sharding=None) -> None:
        """Load the reward models among the sources, see `ModelSource.load`."""
        for source in self.models.values():
            source.load(args, precision, sharding)

    def score_equal_responses_alike(self, samples: list) -> None:
        """Give equal responses to a prompt, of the samples of all ranks, a reward model's score of
        the first of them.

        It depends, by rounding, on the rows of its micro-batch: advantages of equal responses would
        be nothing else.
        """
        for name in self.models:
            first: dict[tuple, float] = {}
            for x in samples:
                sequence = (is_scored_by(x.row, name), tuple(x.row["query"]), x.response.tobytes())
                x.scores[name] = first.setdefault(sequence, x.scores[name])

    def why_missing(self, name: str) -> str:
        """Return a source and why scores of it are missing."""
        return f"{name}: {self.sources[name].failure or f'it returned None, NaN, infinity or over {LARGEST:g}'}"

    def close(self) -> None:
        """Kill the worker processes."""
        for workers in self.workers.values():
            workers.close()


class Scoring:
    """Scores of a rank's responses: each response goes to its sources when it has ended, while
    others are sampled.

    A source takes as many as are waiting, up to its `most`: what is scored together depends on when
    responses end, so a score must not depend on it. A source without threads, such as a reward
    model, takes all of them at the end.
    """

    def __init__(self, reward_sources: RewardSources, interrupted: Callable[[], bool]):
        self.reward_sources = reward_sources
        self.interrupted = interrupted
        self.samples = {}  # by their places
        self.waiting = {name: deque() for name in reward_sources.sources}  # places
        self.jobs: list[Future] = []

    def add(self, place: int, sample) -> None:
        """Have a response scored: a plumbing.rollout.batch.Sample, whose `scores` this sets,
        {source: score}.

        NaN stands for no score, and 0, which adds nothing to the weighted sum, where a source does
        not count for a row. Behind the sources come the further numbers of functions, named
        "SOURCE/NUMBER".
        """
        self.samples[place] = sample
        sample.scores = dict.fromkeys(
            [*self.reward_sources.sources, *self.reward_sources.further], math.nan
        )
        for name, source in self.reward_sources.sources.items():
            if not is_scored_by(sample.row, name):
                sample.scores[name] = 0.0
                continue
            self.waiting[name].append(place)
            if source.threads:
                self.jobs.append(source.threads.schedule(self._score, [name]))

    def _score(self, name: str) -> None:
        """Have a source score what waits for it."""
        source = self.reward_sources.sources[name]
        places = []
        with contextlib.suppress(IndexError):  # another thread may have taken it
            while len(places) < source.most:
                places.append(self.waiting[name].popleft())
        if not places and source.threads:
            return
        samples = [self.samples[place] for place in sorted(places)]
        given = [x.row for x in samples], [x.text for x in samples], [x.response for x in samples]
        for sample, result in zip(samples, source.score(*given, self.interrupted)):
            numbers = result if isinstance(result, dict) else {name: result}
            sample.scores.update(
                {key: finite_or_nan(x) for key, x in numbers.items() if key in sample.scores}
            )

    def finish(self) -> list:
        """Wait for all scores, and return the samples in order; if interrupted, scores may be
        missing.
        """
        begin = time.monotonic()
        for name, source in self.reward_sources.sources.items():
            if source.threads is None:
                self._score(name)
        while wait(self.jobs, timeout=0.1).not_done and not self.interrupted():
            pass
        for job in self.jobs:
            if job.done():
                job.result()  # raises what it has raised
        self.reward_sources.waited += time.monotonic() - begin
        samples = [self.samples[place] for place in sorted(self.samples)]
        for name in self.reward_sources.sources:
            missing = any(math.isnan(x.scores[name]) for x in samples)
            if missing and name not in self.reward_sources.warned and not self.interrupted():
                self.reward_sources.warned.add(name)
                reason = self.reward_sources.why_missing(name)
                warn(f"--reward {reason}; such responses have no score (this is said once)")
        return samples


class Source:
    """What scores responses."""

    verifies = True  # whether a score of 1 or more is that of a right response
    most = math.inf  # responses in a call of `score`
    # that call `score` while responses are sampled; None: once all are there
    threads: ThreadPool | None = None
    failure = ""  # the last reason for a score that is missing

    def __init__(self, name: str, timeout: float, workers: Workers | None, tokenizer):
        """`workers`: of sources of this kind. `tokenizer`: of the policy."""
        self.name = name
        self.timeout = timeout
        self.workers = workers
        self.threads = workers and workers.threads

    def score(
        self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never
    ) -> list:
        """Return a number for each response, None or NaN for no score. Several threads may call
        this.

        Args:
            rows: as `plumbing.data.mixture.load_prompts` makes them. responses: token ids of
                `texts`.
            interrupted: returns whether the run ends, which uses no scores.
        """
        raise NotImplementedError

    def note(self, failure: str, responses: int) -> None:
        """Keep why scores are missing, if they are; of a time limit its flag, and how many
        responses it was for.
        """
        if failure.startswith("TimeoutError"):
            failure = f"TimeoutError: no result for {responses} responses within --timeout {self.timeout:g} s"
        self.failure = failure or self.failure


class VerifierSource(Source):
    """A built-in verifier, which scores response by response."""

    def __init__(self, name: str, timeout: float, workers: Workers, tokenizer):
        super().__init__(name, timeout, workers, tokenizer)
        self.verifier = verifier_of(name)
        self.check = self.verifier.check
        self.most = self.verifier.calls_a_job
        self.limit = min(timeout, self.verifier.limit)
        if name.startswith("code"):
            # Less than the call may last: a program that is stuck scores 0, a call that is stuck
            # has no score.
            self.check = functools.partial(self.check, seconds=0.8 * timeout)

    def score(self, rows, texts, responses, interrupted=never):
        references = columns_of(rows).get(self.verifier.column, [None] * len(rows))
        # The answer of a conversation is the model's last turn, not that of a tool.
        texts = [
            row["turns"][-1]["content"] if row.get("turns") else text
            for row, text in zip(rows, texts)
        ]
        check = lambda *calls: self.workers.run(self.check, list(calls), self.limit, interrupted)
        results = check(*zip(texts, references))
        for i, (_, failure) in enumerate(results):
            if failure.startswith("TimeoutError") and self.verifier.limit < math.inf:
                # Comparing a formula can last forever. Then the response is wrong, unless the
                # reference is to blame.
                ((score, failure),) = check(("", references[i]))
                results[i] = (
                    score,
                    failure and f"the reference {references[i]!r:.60} alone: {failure}",
                )
        self.note(next((failure for _, failure in results if failure), ""), len(rows))
        return [score for score, _ in results]


class FunctionSource(Source):
    """A function from a user's file, called with lists of responses, always in the same process."""

    def load(self) -> str:
        """Import the file in the worker process, once. Return why that failed, "" if it did not."""
        ((self.verifies, failure),) = self.workers.run(
            call_function, [(self.name,)], SECONDS_TO_LOAD
        )
        return failure

    def score(self, rows, texts, responses, interrupted=never):
        """Return {NAME OF THE SOURCE: score, "NAME OF THE SOURCE/KEY": a further number} for each
        response.
        """
        prompts = [row["prompt"] for row in rows]
        columns = columns_of(rows)
        if "turns" in rows[0]:
            columns["turns"] = [row["turns"] for row in rows]
        call = (self.name, prompts, texts, [np.array(ids).tolist() for ids in responses], columns)
        self.load()  # the process may be a new one, and the time of a call is not for imports
        ((results, failure),) = self.workers.run(call_function, [call], self.timeout, interrupted)
        self.note(failure, len(rows))
        return [
            {f"{self.name}/{key}".removesuffix("/score"): number for key, number in result.items()}
            for result in results or [{"score": None}] * len(rows)
        ]


class EnvironmentSource(Source):
    """The sum of --environment's rewards, which the conversations bring along."""

    def score(self, rows, texts, responses, interrupted=never):
        return [row["environment"] for row in rows]


class ModelSource(Source):
    """A reward model, from a folder or the hub, that scores responses in this process.

    One of the policy's vocabulary reads the sampled token ids themselves. Another one reads prompt
    and response as text, through its tokenizer and chat template, as verl's reward workers do.
    """

    verifies = False

    def __init__(self, name: str, timeout: float, workers: None, tokenizer):
        """Exit with code 2 if `name` is not a reward model, or cannot read what the policy of
        `tokenizer` writes.
        """
        self.name = name
        self.tokenizer = models.read_tokenizer("--reward", name)
        config, trained = models.scalar_config("--reward", name)
        if not trained:
            fail(
                f"--reward {name}: is not a reward model, as it has no head for a score (see reward_model.py)"
            )
        self.positions = (
            getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
        )
        self.difference = models.vocabulary_difference(tokenizer, self.tokenizer)
        # Of the same vocabulary, the policy's pad token, if it alone has one.
        self.unknown = set(tokenizer.get_vocab().values()) - set(
            self.tokenizer.get_vocab().values()
        )
        if self.difference:
            self.unknown = set()
            self.stop_id = models.stop_token_ids(self.tokenizer, name, "eos")[0]
            # A model of reward_model.py is read at its end token, another one behind all that its
            # template writes.
            is_ours = hasattr(config, "score_token")
            self.ending = (
                (models.end_of_turn(self.tokenizer), [self.stop_id]) if is_ours else ("", [])
            )
            if tokenizer.chat_template and not self.tokenizer.chat_template:
                fail(
                    f"--reward {name}: its vocabulary {self.difference}, and it has no chat template to read text by"
                )
            warn(f"--reward {name}: reads text, as its vocabulary {self.difference}")

    def load(self, args, precision, sharding=None) -> None:
        """Load the model, in one piece on this process's device without a
        plumbing.models.sharding.Sharding.
        """
        self.autocast = precision.autocast
        self.token_budget = args.micro_batch_tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.world = World(0, 1, self.device)  # the ranks that make forward passes together
        load_device = self.device
        if sharding is not None and sharding.shards_reward_models:
            self.world = sharding.world
            load_device = sharding.load_device
        self.model, _ = models.load_scalar_model(
            "--reward", self.name, precision.frozen_dtype, load_device
        )
        self.model.requires_grad_(False)
        if sharding is not None:
            sharding.shard(self.model, reward_model=True)

    @torch.no_grad()
    def score(self, rows, texts, responses, interrupted=never):
        self.failure = ""
        scores = [math.nan] * len(rows)
        sequences = self.read(rows, texts, responses)
        readable = [i for i, sequence in enumerate(sequences) if sequence]
        batches = micro_batches(
            [len(sequences[i]) for i in readable], self.token_budget, World(0, 1, self.device)
        )
        # Each rank has cut its sequences; a rank with fewer batches joins the passes of the others.
        most = self.world.max(torch.tensor(len(batches), device=self.device)).item()
        for batch in batches + [[]] * (most - len(batches)):
            chosen = [readable[place] for place in batch]
            ids = [sequences[i] for i in chosen] or [[0, 0]]
            # (n, L)
            input_ids = pad_sequence(
                [torch.tensor(x, device=self.device) for x in ids], batch_first=True
            )
            last = torch.tensor([len(x) - 1 for x in ids], device=self.device)
            with self.autocast():
                outputs = self.model(
                    input_ids, torch.arange(input_ids.shape[1], device=self.device) == last[:, None]
                )
            for i, score in zip(chosen, outputs.tolist()):
                scores[i] = score
        return scores

    def read(
        self, rows: list[dict], texts: list[str], responses: list[list[int]]
    ) -> list[list[int]]:
        """Return prompts and responses as token ids of the reward model, [] and `failure` where it
        cannot read them.
        """
        sequences = []
        for row, text, response in zip(rows, texts, responses):
            try:
                ids = self._read_text(row, text) if self.difference else [*row["query"], *response]
                ids = [token for token in ids if token not in self.unknown]
                if len(ids) > self.positions:
                    raise ValueError(
                        f"it has {len(ids)} tokens, and the model {self.positions} positions"
                    )
            except Exception as error:  # templates raise exceptions of any type
                self.failure = f"cannot read a response with its prompt: {first_line(error)}"
                ids = []
            sequences.append(ids)
        return sequences

    def _read_text(self, row: dict, text: str) -> list[int]:
        """Return prompt and response as token ids by the reward model's template, or as they are
        without one.
        """
        if self.tokenizer.chat_template is None:
            text = row["prompt"] + guarded(text, self.tokenizer, own=True)
            return [*encode_text("the prompt", text, self.tokenizer), self.stop_id]
        if row["messages"] is None:
            raise ValueError(
                "its text may hold a chat template already, as with --chat_template none"
            )
        messages = guarded(
            [*row["messages"], {"role": "assistant", "content": text}], self.tokenizer
        )
        written, end = self.ending
        conversation = self.tokenizer.apply_chat_template(messages, tokenize=False).removesuffix(
            written
        )
        return encode_text("the prompt", conversation, self.tokenizer, special=False) + end


class ServerSource(Source):
    """A reward server, asked in PaddleNLP's protocol (scripts/reward_server.py) for batches of
    responses.

    A request ends after --timeout, whatever has come until then. A batch is sent again after
    connection errors, time-outs and the statuses 408, 429 and 5xx. If that does not help, and after
    any other error, its responses have no score (NaN). A key in the variable REWARD_API_KEY is sent
    along.
    """

    most, CONNECTIONS = 32, 8  # responses in a request, requests at the same time
    PAUSES = (0, 2, 4, 8, 16, 0)  # seconds after each try that fails

    def __init__(self, name: str, timeout: float, workers: None, tokenizer):
        super().__init__(name, timeout, workers, tokenizer)
        self.threads = ThreadPool(self.CONNECTIONS)

    @property
    def verifies(self) -> bool:
        """Whether its scores tell right from wrong, by GET /health; True for a server without that
        page.
        """
        try:
            return bool(
                asyncio.run(self._request("GET", f"{self.name.rstrip('/')}/health"))["verifies"]
            )
        except Exception:  # an address may answer anything
            warn(
                f"--reward {self.name}: has no /health, so a score of 1 or more counts as a correct response"
            )
            return True

    def score(self, rows, texts, responses, interrupted=never):
        columns = columns_of(rows)
        count = len(rows)
        body = {
            "src": [row["prompt"] for row in rows],
            "tgt": list(map(as_text, columns.pop("answer"))),
        }
        body |= {
            "response": texts,
            "messages": [row.get("messages") for row in rows],
            "columns": columns,
        }
        content = json.dumps(body, default=str)
        for pause in self.PAUSES:
            try:
                answer = asyncio.run(self._request("POST", self.name, content))
                if (
                    answer["error_code"]
                    or not isinstance(answer["score"], list)
                    or len(answer["score"]) != count
                ):
                    raise ValueError(f"not {count} scores: {answer}")
                # null, NaN and infinity are scores that are missing
                return list(map(finite_or_nan, answer["score"]))
            except Exception as error:  # an address may answer anything
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                if isinstance(error, (ValueError, TypeError, LookupError)):
                    break  # it is no answer, and there will be no other one
            time.sleep(pause)
        self.note(reason, count)
        return [math.nan] * count

    async def _request(self, method: str, url: str, content: str = "") -> dict:
        """Return what a JSON answer holds; raise ValueError for another one, or OSError, if asking
        again may help.
        """
        import aiohttp  # slow, and for runs with a server only

        key = os.environ.get("REWARD_API_KEY")
        limit = aiohttp.ClientTimeout(self.timeout)
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        given = {"data": content, "headers": headers, "timeout": limit}
        async with aiohttp.request(method, url, allow_redirects=False, **given) as answer:
            status = answer.status
            text = await answer.text(errors="replace")
        if 200 <= status < 300:
            return json.loads(text)
        raise (OSError if status in (408, 429) or status >= 500 else ValueError)(
            f"HTTP status {status}: {text}"
        )


def as_text(answer) -> str:
    """Return a reference answer as PaddleNLP's protocol has it."""
    if isinstance(answer, (list, dict)):
        return json.dumps(answer, default=str)
    return "" if answer is None else str(answer)


SOURCES = {
    "environment": EnvironmentSource,
    "verifier": VerifierSource,
    "server": ServerSource,
    "function": FunctionSource,
    "model": ModelSource,
}
