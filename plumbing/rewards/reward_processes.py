"""The built-in verifiers and the functions from files as sources of scores, computed in worker processes.

Rooms: plumbing/rewards/reward_worker.py (one such process) and plumbing/rewards/verifiers.py (names of the verifiers).
"""

import math
import os
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

from plumbing.rewards.reward_worker import Worker, columns_of, finite_or_nan, never
from plumbing.rewards.verifiers import VERIFIERS
from utils import fail, warn


def worker_count() -> int:
    """Return how many worker processes a rank has."""
    return max(1, min(4, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class Workers:
    """The worker processes of a rank, each of which can compute all of its verifiers and functions."""

    def __init__(self, names: list[str], timeout: float):
        self.names, self.timeout = names, timeout
        self.processes: list[Worker] = []
        self.spare: list[Worker] = []  # one for trial calls, so that they leave no trace in the others; or none

    def start(self, spare: bool = False) -> None:
        """Start the processes side by side and wait until all of them are ready."""
        # Verifiers share the responses of a rank out among the processes; a function gets all of them in one request.
        count = worker_count() if any(name in VERIFIERS for name in self.names) else 1
        self.processes = [self._start_one() for _ in range(count if self.names else 0)]
        self.spare = [self._start_one()] if spare else []
        for warning in {self._wait_until_ready(worker) for worker in self.processes + self.spare} - {None}:
            warn(f"--reward: {warning}")

    def end_spare(self) -> None:
        while self.spare:
            self.spare.pop().kill()

    def replace(self, index: int) -> None:
        """Start a process in place of one that has died."""
        self.processes[index] = self._start_one()
        self._wait_until_ready(self.processes[index])

    def _start_one(self) -> Worker:
        worker = Worker("-m", "plumbing.rewards.reward_worker")
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
        for worker in self.processes + self.spare:
            worker.kill()


class WorkerSource:
    """A built-in verifier, or a function from a file.

    A verifier scores response by response, spread over the processes. A function gets all responses of a rank in one
    request; see plumbing/rewards/functions.py for how it is called.
    """

    verifies = True

    def __init__(self, name: str, workers: Workers):
        self.name, self.workers, self.failure = name, workers, ""
        own_limit = VERIFIERS[name].limit if name in VERIFIERS else math.inf
        self.limit, self.blames_response = min(workers.timeout, own_limit), own_limit < math.inf
        path, _, function = name.rpartition(":")
        if name in VERIFIERS:
            return
        if not function.isidentifier():
            fail(f"--reward {name}: a function is named as path/to/file.py:function")
        if not os.path.isfile(path):
            fail(f"--reward {name}: there is no file {path}")

    def try_out(self, rows: list[dict], texts: list[str], responses: list[list[int]]) -> str:
        """Return why a function fails in a trial call; "" if it does not. (Of the built-in sources none is called.)"""
        if self.name in VERIFIERS:
            return ""
        (worker,) = self.workers.spare
        worker.send(self._request(rows, texts, responses))
        return worker.receive(self.workers.timeout).get("error", "")

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never) -> list[float]:
        if self.name not in VERIFIERS:
            return self._score_by(0, rows, texts, responses, interrupted)
        scores, count = [math.nan] * len(texts), len(self.workers.processes)
        with ThreadPoolExecutor(count) as pool:
            shares = pool.map(
                lambda i: self._score_by(i, rows[i::count], texts[i::count], responses[i::count], interrupted),
                range(count),
            )
        for i, share in enumerate(shares):
            scores[i::count] = share
        return scores

    def _score_by(
        self, index: int, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted: Callable
    ) -> list[float]:
        """Return the scores by process `index`. If it gets stuck or dies, a new one goes on after that response."""
        scores: list[float] = []
        while len(scores) < len(texts):
            rest, worker = slice(len(scores), None), self.workers.processes[index]
            worker.send(self._request(rows[rest], texts[rest], responses[rest]))
            answered_at_once = 1 if self.name in VERIFIERS else len(texts[rest])
            died = False
            while len(scores) < len(texts) and not died:
                answer = worker.receive(self.limit, interrupted)
                died = "dead" in answer
                if died:
                    self.workers.replace(index)
                    if self.blames_response:
                        answer = self._score_reference(index, rows[len(scores)])
                if "error" in answer:
                    self.failure = answer["error"]
                scores += map(finite_or_nan, answer.get("scores", [None] * answered_at_once))
        return scores

    def _score_reference(self, index: int, row: dict) -> dict:
        """Return the answer to an empty response: 0, unless the reference hangs the verifier, too."""
        self.workers.processes[index].send(self._request([row], [""], [[]]))
        answer = self.workers.processes[index].receive(self.limit)
        if "dead" in answer:
            self.workers.replace(index)
            return {"error": f"the reference {row.get('answer')!r:.60} alone takes over {self.limit:g} s, or a crash"}
        return answer

    def _request(self, rows: list[dict], texts: list[str], responses: list[list[int]]) -> dict:
        columns = columns_of(rows) | {"answer": [row["answer"] for row in rows]}
        turns = [row["turns"] for row in rows if "turns" in row]
        if turns:
            columns["turns"] = turns
        request = {"reward": self.name, "responses": texts, "columns": columns}
        if self.name not in VERIFIERS:
            request |= {"prompts": [row["prompt"] for row in rows], "ids": responses}
        elif turns:  # the answer is the model's, not that of a tool
            request["responses"] = [own[-1]["content"] if own else "" for own in turns]
        return request
