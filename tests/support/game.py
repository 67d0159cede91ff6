"""An environment and tools for the tests of conversations."""

import time


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


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one.
        b: the other.
    """
    return a + b
