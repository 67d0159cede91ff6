"""Reward sources: worker processes, reward models and reward servers."""

import atexit
import contextlib
import functools
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from plumbing.models import check_can_read, load_scalar_model, scalar_config
from plumbing.sharding import Sharding
from utils import ROOT, World, fail, first_line, micro_batches, warn

ANSWER_REWARDS = ("math", "gsm8k", "exact", "code", "knights")  # hold the response against the row's answer

BUILTIN_REWARDS = (*ANSWER_REWARDS, "format", "reasoning_gym")

SERVER_BATCH = 32  # responses in a request to a reward server


def reward_names(args) -> tuple[str, ...]:
    """The reward sources of a run: those of --reward, then --reward_model."""
    return args.reward + ((args.reward_model,) if args.reward_model else ())


def reward_weights(args) -> tuple[float, ...]:
    """The weight of each of `reward_names`."""
    return args.reward_weights or (1.0,) * len(reward_names(args))


def is_reward_model(name: str) -> bool:
    """Whether a reward source is a model, not something that checks the text."""
    return name not in BUILTIN_REWARDS and not is_server(name) and not name.rpartition(":")[0].endswith(".py")


def is_server(name: str) -> bool:
    """Whether a reward source is the address of a reward server."""
    return name.startswith(("http://", "https://"))


def worker_count() -> int:
    """How many processes of its own a rank has for checking answers."""
    return max(1, min(4, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class Worker:
    """A process of a script in scripts/: a line of JSON goes in, lines of JSON come out."""

    def __init__(self, script: str, *words: str):
        command, pipe = [sys.executable, os.path.join(ROOT, script), *words], subprocess.PIPE
        # In a session of its own: a Ctrl-C at the terminal is for the trainer.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def send(self, message) -> None:
        with contextlib.suppress(BrokenPipeError):  # that the process has died is seen when its answer is read
            self.process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self, timeout: float):
        """The next answer; where none comes, {"error": why, "dead": True}, and the process is ended."""
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            return {"error": f"gave no answer within --reward_timeout {timeout:g} s", "dead": True}
        if line is None:
            return {"error": f"its process ended with exit code {self.process.wait()}", "dead": True}
        return json.loads(line)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def one_score(sequences: list[list[int]], scores: list[float]) -> list[float]:
    """Equal sequences get the score of the first of them.

    What a model gives depends, by rounding, on the rows beside it; a group of equal responses would have advantages of
    nothing else.
    """
    first: dict[tuple, float] = {}
    return [first.setdefault(tuple(sequence), score) for sequence, score in zip(sequences, scores)]


class Rewards:
    """The reward sources of a run, by the names given to `--reward`.

    A built-in one (BUILTIN_REWARDS) scores response by response, spread over a few processes;
    "path/to/file.py:function" is called once with all responses of a rank. A call that raises, takes over `timeout`
    seconds, or returns None, NaN or infinity leaves its responses without a score (NaN): never a silent zero.
    The folder or hub name of a reward model is loaded by `load_models` and scores in this process; an http(s) address
    is asked as PaddleNLP's reward server is (scripts/reward_server.py).
    """

    def __init__(self, names: tuple[str, ...], timeout: float, tokenizer):
        """`tokenizer`: of the policy, which a reward model has to share."""
        self.names, self.timeout = names, timeout
        self.failures: dict[str, str] = {}  # the last failure of each source, for messages
        self.models: dict[str, tuple] = {}  # name: ScalarModel, and what its score is shifted and scaled by
        self.checkers = tuple(name for name in names if not is_reward_model(name) and not is_server(name))
        for name in names:
            path, _, function = name.rpartition(":")
            if is_reward_model(name):
                self._check_model(name, tokenizer)
            elif name in self.checkers and name not in BUILTIN_REWARDS:
                if not function.isidentifier():
                    fail(f"--reward {name}: a function is named as path/to/file.py:function")
                if not os.path.isfile(path):
                    fail(f"--reward {name}: there is no file {path}")
        self.workers = [self._start() for _ in range(worker_count() if self.checkers else 0)]
        atexit.register(self.close)
        for warning in {self._await_loaded(worker) for worker in self.workers} - {None}:
            warn(f"--reward: {warning}")

    def _check_model(self, name: str, tokenizer) -> None:
        if name.endswith(".py") or not os.path.isdir(name) and name.count("/") != 1:
            others = "path/to/file.py:function, a reward model's folder or hub name, or a server's http:// address"
            fail(f"--reward {name}: no such reward; take {', '.join(BUILTIN_REWARDS)}, {others}")
        if not scalar_config("--reward", name)[1]:
            fail(f"--reward {name}: is no reward model, as it has no head for a score; reward_model.py makes one of it")
        check_can_read("--reward", name, tokenizer)

    def load_models(
        self, scale: str, dtype: torch.dtype, device: torch.device, autocast, token_budget: int,
        sharding: Sharding | None = None,
    ) -> None:  # fmt: skip
        """Load the reward models among the sources.

        Args:
            scale: "raw" scores, "centred" by the mean that the model's config carries, or "standardized" by its mean
                and standard deviation.
            autocast: a function that gives the context to compute in. token_budget: of a forward pass.
            sharding: None for whole models, as they are.
        """
        self.device, self.autocast, self.token_budget = device, autocast, token_budget
        sharded = sharding is not None and sharding.on and sharding.rewards
        self.world = sharding.world if sharded else World(0, 1, device)  # of the ranks that pass forward together
        for name in filter(is_reward_model, self.names):
            model, _ = load_scalar_model("--reward", name, dtype, sharding.home if sharded else device)
            mean, std = (getattr(model.model.config, key, None) for key in ("score_mean", "score_std"))
            shift, divisor = {"raw": (0.0, 1.0), "centred": (mean, 1.0), "standardized": (mean, std)}[scale]
            if shift is None or not divisor:
                fail(f"--reward_model_scale {scale}: the config of {name} has no score_mean or no score_std above 0")
            model.requires_grad_(False)
            if sharding is not None:
                sharding.shard(model, beside=not sharding.rewards, rewards=True)
            self.models[name] = (model, shift, divisor)

    def _start(self) -> Worker:
        worker = Worker("plumbing/verifiers.py")
        worker.send({"load": self.checkers, "timeout": self.timeout})
        return worker

    def _await_loaded(self, worker: Worker) -> str | None:
        """What a worker warns of once it has loaded its sources, if anything."""
        answer = worker.receive(timeout=300.0)  # importing may take long on a busy file system
        if "error" in answer:
            fail(f"--reward {answer.get('reward', ' '.join(self.names))}: {answer['error']}", local=True)
        return answer.get("warning")

    def why_missing(self, parts: dict[str, torch.Tensor]) -> str:
        """What is known of the scores that are missing in `parts`, source by source."""
        missing = [name for name, part in parts.items() if part.isnan().any()]
        return "; ".join(f"{name}: {self.failures.get(name, 'it returned None, NaN or infinity')}" for name in missing)

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]]) -> dict[str, list[float]]:
        """Each source's score of each response to its row's prompt, NaN where there is none: {name: [float] * N}.

        Args:
            rows: with "prompt" and "query", its token ids. texts, responses: the same as text and as token ids.
        """
        sequences = [row["query"] + response for row, response in zip(rows, responses)]
        return {
            name: self._model_scores(name, sequences) if name in self.models else self._score(name, rows, texts)
            for name in self.names
        }

    @torch.no_grad()
    def _model_scores(self, name: str, sequences: list[list[int]]) -> list[float]:
        model, shift, divisor = self.models[name]
        scores = [math.nan] * len(sequences)
        alone = World(0, 1, self.device)
        cuts = micro_batches([len(sequence) for sequence in sequences], self.token_budget, alone)
        most = self.world.max(torch.tensor(len(cuts), device=self.device)).item()  # each rank cuts its own
        for cut in cuts + [[]] * (most - len(cuts)):
            rows = [torch.tensor(sequences[i], device=self.device) for i in cut]
            last = torch.tensor([len(row) - 1 for row in rows] or [-1], device=self.device)
            rows = rows or [torch.zeros(2, dtype=torch.long, device=self.device)]  # takes part, and is not read
            input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (n, L)
            with self.autocast():
                outputs = model(input_ids, torch.arange(input_ids.shape[1], device=self.device) == last[:, None])
            for i, score in zip(cut, outputs.tolist()):
                scores[i] = (score - shift) / divisor if math.isfinite(score) else math.nan
        self.failures[name] = "its score is not finite"  # read only where scores are missing
        return scores

    def _ask(self, url: str, rows: list[dict], responses: list[str]) -> list[float]:
        """Scores from a reward server, in batches sent side by side; NaN for those of a batch that it gave up on.

        Connection errors, time-outs and the answers 429 and 5xx are tried again, after 1, 2, 4 and 8 s or what the
        server's Retry-After says, a minute at most. What the sources of a server read of a row beside PaddleNLP's
        fields goes into "columns".
        """
        import requests

        others = sorted({column for row in rows for column in row} - {"prompt", "query", "answer"})
        as_json, headers = functools.partial(json.dumps, default=str), {"Content-Type": "application/json"}
        self.failures.pop(url, None)

        def ask(start: int) -> list[float]:
            part, texts = rows[start : start + SERVER_BATCH], responses[start : start + SERVER_BATCH]
            answers = ["" if row.get("answer") is None else row["answer"] for row in part]
            tgt = [as_json(answer) if isinstance(answer, (list, dict)) else str(answer) for answer in answers]
            question = {"src": [row["prompt"] for row in part], "tgt": tgt, "response": texts}
            if others:
                question["columns"] = {column: [row.get(column) for row in part] for column in others}
            data, begin = as_json(question), time.monotonic()
            for wait in (1, 2, 4, 8, 0):
                try:
                    transient = True  # another try may do better
                    answer = requests.post(url, data, headers=headers, timeout=self.timeout)
                    transient = answer.status_code == 429 or answer.status_code >= 500
                    if not answer.ok:
                        with contextlib.suppress(KeyError, ValueError):  # it may be a date
                            wait = wait and max(wait, min(60.0, float(answer.headers["Retry-After"])))
                        raise ValueError(f"HTTP status {answer.status_code}: {answer.text[:300]}")
                    body = answer.json()
                    if body.get("error_code") != 0:
                        raise ValueError(f"error_code {body.get('error_code')}: {body.get('error_msg')}")
                    scores = [math.nan if x is None else float(x) for x in body["score"]]
                    if len(scores) != len(part):
                        raise ValueError(f"gave {len(scores)} scores for {len(part)} responses")
                    return [x if math.isfinite(x) else math.nan for x in scores]
                except Exception as error:  # whatever an address may answer
                    said = first_line(error)
                if not (transient and wait):
                    break
                time.sleep(wait)
            self.failures[url] = f"gave up after {time.monotonic() - begin:.1f} s ({said})"
            return [math.nan] * len(part)

        with ThreadPoolExecutor(8) as pool:
            return [score for scores in pool.map(ask, range(0, len(rows), SERVER_BATCH)) for score in scores]

    def _score(self, name: str, rows: list[dict], responses: list[str]) -> list[float]:
        if is_server(name):
            return self._ask(name, rows, responses)
        if name not in BUILTIN_REWARDS:
            return self._call(0, name, rows, responses)
        scores, count = [math.nan] * len(responses), len(self.workers)
        with ThreadPoolExecutor(count) as pool:
            shares = pool.map(lambda i: self._call(i, name, rows[i::count], responses[i::count]), range(count))
        for i, share in enumerate(shares):
            scores[i::count] = share
        return scores

    def _call(self, index: int, name: str, rows: list[dict], responses: list[str]) -> list[float]:
        """Scores from worker `index`. If it gets stuck or dies, a new one takes its place and goes on after that."""
        scores: list[float] = []
        while len(scores) < len(responses):
            worker, rest, texts = self.workers[index], rows[len(scores) :], responses[len(scores) :]
            question = {"reward": name, "prompts": [row["prompt"] for row in rest], "responses": texts}
            columns = sorted({column for row in rest for column in row} - {"prompt", "query"})
            question["columns"] = {column: [row.get(column) for row in rest] for column in columns}
            worker.send(question)
            answer: dict = {}
            while len(scores) < len(responses) and "dead" not in answer:
                answer = worker.receive(self.timeout)
                if "error" in answer:
                    self.failures[name] = answer["error"]
                    answer["scores"] = [None] * (1 if name in BUILTIN_REWARDS else len(rest))
                scores += [math.nan if x is None or not math.isfinite(x) else x for x in answer["scores"]]
            if "dead" in answer:
                self.workers[index] = self._start()
                self._await_loaded(self.workers[index])
        return scores

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
