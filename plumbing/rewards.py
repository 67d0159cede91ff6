"""The reward sources of a run: built-in verifiers, functions from files, reward models and reward servers.

Each kind is a class with `score(rows, texts, responses) -> [float] * N`, NaN for a response without a score, and with
`failure`, the last reason for that ("" for none). A source that raises, takes over --reward_timeout, or returns None,
NaN or infinity gives no score: never a silent zero.

Rooms: plumbing/reward_worker.py (the processes), plumbing/verifiers.py (names of the built-in sources),
plumbing/models.py (reward models), and plumbing/reward_client.py where a reward server is named.
"""

import atexit
import math
import os
import queue
from concurrent.futures import ThreadPoolExecutor

import torch

from plumbing.models import check_can_read, load_scalar_model, scalar_config
from plumbing.reward_worker import Worker, columns_of, finite_or_nan
from plumbing.verifiers import ANSWER_REWARDS, VERIFIERS
from utils import World, fail, micro_batches, warn


def reward_weights(args) -> tuple[float, ...]:
    """Return the weight of each reward source."""
    return args.reward_weights or (1.0,) * len(args.reward)


def needs_answer(args) -> str:
    """Return "--reward NAME" of the first source that compares responses with the row's answer; "" if none does."""
    return next((f"--reward {name}" for name in args.reward if name in ANSWER_REWARDS), "")


def is_server(name: str) -> bool:
    """Return whether a reward source is the address of a reward server."""
    return name.startswith(("http://", "https://"))


def is_function(name: str) -> bool:
    """Return whether a reward source is "path/to/file.py:function"."""
    return name.rpartition(":")[0].endswith(".py")


def is_reward_model(name: str) -> bool:
    """Return whether a reward source is a model, not something that checks the text."""
    return not (name in VERIFIERS or is_server(name) or is_function(name))


def check_sources(names: tuple[str, ...], weights: tuple[float, ...] = ()) -> None:
    """End the run if --reward names no source or one twice, or --reward_weights does not fit it."""
    if not names:
        fail("--reward: names no source")
    if len(set(names)) < len(names):
        fail(f"--reward {' '.join(names)}: names a source twice")
    if weights and len(weights) != len(names):
        fail(f"--reward_weights: has {len(weights)} weights for {len(names)} sources in --reward")
    if weights and not any(weights):
        fail("--reward_weights: are all 0, so there is nothing to learn from")


def check_name(name: str) -> None:
    """End the run for a name that fits no kind of source. A model's folder or hub name is not opened."""
    if is_reward_model(name) and (name.endswith(".py") or not os.path.isdir(name) and name.count("/") != 1):
        others = "path/to/file.py:function, a reward model's folder or hub name, or a server's http:// address"
        fail(f"--reward {name}: no such reward; take {', '.join(VERIFIERS)}, {others}")


def worker_count() -> int:
    """Return how many worker processes a rank has."""
    return max(1, min(4, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def one_score(sequences: list[list[int]], scores: list[float]) -> list[float]:
    """Give equal sequences the score of the first of them.

    A model's score depends, by rounding, on the other rows of its forward pass. A group of equal responses would get
    advantages that are nothing but this rounding.
    """
    first: dict[tuple, float] = {}
    return [first.setdefault(tuple(sequence), score) for sequence, score in zip(sequences, scores)]


class Rewards:
    """The reward sources of a run, by the names given to --reward."""

    def __init__(self, names: tuple[str, ...], timeout: float, tokenizer):
        """Check all names and start the worker processes; reward models are loaded by `load_models`.

        Args:
            timeout: seconds that a call of a source may take. tokenizer: of the policy; a reward model has to share it.
        """
        self.workers = Workers([name for name in names if name in VERIFIERS or is_function(name)], timeout)
        self.names = names
        self.sources = {}
        for name in names:
            if is_server(name):
                from plumbing.reward_client import ServerSource

                self.sources[name] = ServerSource(name, timeout)
            elif is_reward_model(name):
                self.sources[name] = ModelSource(name, tokenizer)
            else:
                self.sources[name] = WorkerSource(name, self.workers)
        self.models = {name: source for name, source in self.sources.items() if isinstance(source, ModelSource)}
        atexit.register(self.close)
        self.workers.start()

    def load_models(
        self, scale: str, dtype: torch.dtype, device: torch.device, autocast, token_budget: int, sharding=None
    ) -> None:
        """Load the reward models among the sources, see `ModelSource.load`."""
        for source in self.models.values():
            source.load(scale, dtype, device, autocast, token_budget, sharding)

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]]) -> dict[str, list[float]]:
        """Return each source's scores of the responses, NaN where there is none: {name: [float] * N}.

        Args:
            rows: as `plumbing.data.load_prompts` makes them. texts: the responses as text. responses:
                the same as token ids.
        """
        return {name: source.score(rows, texts, responses) for name, source in self.sources.items()}

    def why_missing(self, components: dict[str, torch.Tensor]) -> str:
        """Return what is known of the scores that are missing in `components`, source by source."""
        missing = [name for name, scores in components.items() if scores.isnan().any()]
        why = {name: self.sources[name].failure or "it returned None, NaN or infinity" for name in missing}
        return "; ".join(f"{name}: {reason}" for name, reason in why.items())

    def close(self) -> None:
        self.workers.close()


# ---- verifiers and functions: in worker processes --------------------------------------------------------------------


class Workers:
    """The worker processes of a rank, each of which can compute all of its verifiers and functions."""

    def __init__(self, names: list[str], timeout: float):
        self.names, self.timeout = names, timeout
        self.processes: list[Worker] = []

    def start(self) -> None:
        """Start the processes side by side and wait until all of them are ready."""
        for _ in range(worker_count() if self.names else 0):
            self.processes.append(self._start_one())
        for warning in {self._wait_until_ready(worker) for worker in self.processes} - {None}:
            warn(f"--reward: {warning}")

    def replace(self, index: int) -> None:
        """Start a process in place of one that has died."""
        self.processes[index] = self._start_one()
        self._wait_until_ready(self.processes[index])

    def _start_one(self) -> Worker:
        worker = Worker("-m", "plumbing.reward_worker")
        worker.send({"load": self.names, "timeout": self.timeout})
        return worker

    def _wait_until_ready(self, worker: Worker) -> str | None:
        """Return what a process warns of; end the run if it cannot load a source."""
        answer = worker.receive(timeout=300.0)  # importing may take long on a busy file system
        if "error" in answer:
            fail(f"--reward {answer.get('reward', ' '.join(self.names))}: {answer['error']}", local=True)
        return answer.get("warning")

    def equal_answers(self, prompts: list[list[str]]) -> list[list[str | None] | None]:
        """Return the final answers of the responses to each prompt, those equal as mathematics in the same words.

        None for a prompt whose call hung or crashed.
        """
        idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(self.processes)):
            idle.put(index)

        def ask(responses: list[str]) -> list[str | None] | None:
            index = idle.get()
            self.processes[index].send({"equal_answers": responses})
            answer = self.processes[index].receive(self.timeout)
            if "dead" in answer:
                self.replace(index)
            idle.put(index)
            return answer.get("answers")

        with ThreadPoolExecutor(len(self.processes)) as pool:
            return list(pool.map(ask, prompts))

    def close(self) -> None:
        for worker in self.processes:
            worker.kill()


class WorkerSource:
    """A built-in verifier, or a function from a file.

    A verifier scores response by response, spread over the processes. A function gets all responses of a rank in one
    call: (prompts, responses, **columns of the rows) -> a float or None for each.
    """

    def __init__(self, name: str, workers: Workers):
        self.name, self.workers, self.failure = name, workers, ""
        path, _, function = name.rpartition(":")
        if name in VERIFIERS:
            return
        if not function.isidentifier():
            fail(f"--reward {name}: a function is named as path/to/file.py:function")
        if not os.path.isfile(path):
            fail(f"--reward {name}: there is no file {path}")

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]]) -> list[float]:
        if self.name not in VERIFIERS:
            return self._score_by(0, rows, texts)
        scores, count = [math.nan] * len(texts), len(self.workers.processes)
        with ThreadPoolExecutor(count) as pool:
            shares = pool.map(lambda i: self._score_by(i, rows[i::count], texts[i::count]), range(count))
        for i, share in enumerate(shares):
            scores[i::count] = share
        return scores

    def _score_by(self, index: int, rows: list[dict], texts: list[str]) -> list[float]:
        """Return the scores by process `index`. If it gets stuck or dies, a new one goes on after that response."""
        scores: list[float] = []
        while len(scores) < len(texts):
            rest, worker = slice(len(scores), None), self.workers.processes[index]
            worker.send(self._request(rows[rest], texts[rest]))
            answered_at_once = 1 if self.name in VERIFIERS else len(texts[rest])
            while len(scores) < len(texts):
                answer = worker.receive(self.workers.timeout)
                if "error" in answer:
                    self.failure = answer["error"]
                scores += map(finite_or_nan, answer.get("scores", [None] * answered_at_once))
                if "dead" in answer:
                    self.workers.replace(index)
                    break
        return scores

    def _request(self, rows: list[dict], texts: list[str]) -> dict:
        columns = columns_of(rows) | {"answer": [row["answer"] for row in rows]}
        return {
            "reward": self.name, "prompts": [row["prompt"] for row in rows], "responses": texts, "columns": columns
        }  # fmt: skip


# ---- reward models ---------------------------------------------------------------------------------------------------


class ModelSource:
    """A reward model, from a folder or the hub, which scores the token ids of prompt and response in this process."""

    def __init__(self, name: str, tokenizer):
        """End the run if `name` is no reward model or does not share the tokenizer."""
        self.name, self.failure = name, ""
        check_name(name)
        if not scalar_config("--reward", name)[1]:
            fail(f"--reward {name}: is no reward model, as it has no head for a score; reward_model.py makes one of it")
        check_can_read("--reward", name, tokenizer)

    def load(self, scale: str, dtype: torch.dtype, device: torch.device, autocast, token_budget: int, sharding) -> None:
        """Load the model.

        Args:
            scale: "raw" scores, "centred" by the mean that the model's config carries, or "standardized" by its mean
                and standard deviation.
            autocast: a function that returns the context to compute in. token_budget: of a forward pass.
            sharding: a plumbing.sharding.Sharding; None for a model that is kept in one piece.
        """
        self.device, self.autocast, self.token_budget = device, autocast, token_budget
        sharded = sharding is not None and sharding.shards_reward_models
        self.world = sharding.world if sharded else World(0, 1, device)  # of the ranks that pass forward together
        self.model, _ = load_scalar_model("--reward", self.name, dtype, sharding.load_device if sharded else device)
        mean, std = (getattr(self.model.model.config, key, None) for key in ("score_mean", "score_std"))
        self.shift, self.divisor = {"raw": (0.0, 1.0), "centred": (mean, 1.0), "standardized": (mean, std)}[scale]
        if self.shift is None or not self.divisor:
            fail(f"--reward_model_scale {scale}: the config of {self.name} has no score_mean or no score_std above 0")
        self.model.requires_grad_(False)
        if sharding is not None:
            sharding.shard(self.model, reward_model=True)

    @torch.no_grad()
    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]]) -> list[float]:
        sequences = [row["query"] + response for row, response in zip(rows, responses)]
        scores = [math.nan] * len(sequences)
        batches = micro_batches([len(sequence) for sequence in sequences], self.token_budget, World(0, 1, self.device))
        # Each rank has cut its own sequences; a rank with fewer batches takes part in the others' passes.
        most = self.world.max(torch.tensor(len(batches), device=self.device)).item()
        for batch in batches + [[]] * (most - len(batches)):
            for i, score in zip(batch, self._forward([sequences[i] for i in batch] or [[0, 0]])):
                scores[i] = (score - self.shift) / self.divisor if math.isfinite(score) else math.nan
        if any(map(math.isnan, scores)):
            self.failure = "its score is not finite"
        return scores

    def _forward(self, sequences: list[list[int]]) -> list[float]:
        """Return the model's output at the last token of each sequence."""
        rows = [torch.tensor(sequence, device=self.device) for sequence in sequences]
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (n, L)
        last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=self.device)
        with self.autocast():
            return self.model(input_ids, torch.arange(input_ids.shape[1], device=self.device) == last[:, None]).tolist()
