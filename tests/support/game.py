"""An environment and tools for the tests of conversations."""

import time

import numpy as np


class Game:
    """Answers with the number of characters said so far, three times."""

    def reset(self, prompt, mode="", **row):
        self.said = []
        self.mode = mode
        return {"adds": "[more]", "long": "x" * 300}.get(mode)

    def step(self, response):
        self.said.append(response)
        if self.mode == "raises" and len(self.said) == 2:
            raise RuntimeError("the board is broken")
        if self.mode == "hangs":
            time.sleep(60)
        if self.mode == "talks":
            return "y" * 300, 0.0, False
        return f"{sum(map(len, self.said))}>", len(response) / 10, len(self.said) == 3


class Counter:
    """Counts, as TRL has it: its methods are tools."""

    def reset(self, late=False, **row):
        self.count = 0
        self.done = False
        self.reward = None if late else 0.0

    def increment(self, by: int) -> int:
        """Count.

        Args:
            by: how far.
        """
        self.count += by
        self.done = np.bool_(self.count >= 3)
        if self.done or self.reward is not None:
            self.reward = np.float32(self.count)
        return self.count

    def _hidden(self):
        pass


class Judged(Counter):
    """Is asked for its reward, once."""

    def get_reward(self):
        self.reward += 10
        return self.reward

    @staticmethod
    def helper(x):
        return x


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one.
        b: the other.
    """
    return a + b
