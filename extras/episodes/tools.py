"""What the process of a conversation calls: tools (--tools), an environment (--environment), or an
agent (--agent).

It is forked from a process that has imported the users' files, and no torch.
"""

import asyncio
import inspect
import json
import random
import sys
from collections.abc import Callable

from plumbing.processes import accepted, load_function

LONGEST_TEXT = 100_000  # characters of a tool's or an environment's text; the rest is cut


class Tools:
    """The functions of --tools and an instance of --environment, if there is one, for one
    conversation; or in its place the --agent.
    """

    def __init__(self, tools: list[str], environment: str, seed: int):
        self.functions = list(map(load_function, tools))
        made = load_function(environment) if environment else None
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        # One event loop for all calls, to which connections may be bound.
        self.runner = asyncio.Runner()
        self.instance = made() if inspect.isclass(made) else made  # an agent is a function
        if inspect.isclass(made) and not (hasattr(made, "reset") and hasattr(made, "step")):
            raise TypeError("requires methods reset and step")

    def tools(self) -> list[Callable]:
        """Return the functions that the model may call: those of --tools, then those that a method
        `tools` of the environment returns.
        """
        of_environment = self.instance.tools() if hasattr(self.instance, "tools") else []
        return [*self.functions, *of_environment]

    def describe(self) -> list[dict]:
        """Return the schemas of the tools."""
        from transformers.utils import chat_template_utils  # slow to import

        # torch would be imported for a type that no tool has.
        chat_template_utils.is_torch_available = lambda: False
        names = [function.__name__ for function in self.tools()]
        if len(set(names)) < len(names):
            raise ValueError(f"two of the functions have one name: {', '.join(names)}")
        return list(map(chat_template_utils.get_json_schema, self.tools()))

    def call(self, name: str, arguments: dict) -> str:
        """Return the text that a tool answers with."""
        functions = {function.__name__: function for function in self.tools()}
        if name not in functions:
            raise LookupError(f"there is no tool {name!r}, there are {', '.join(functions)}")
        return as_text(self.finish(functions[name](**arguments)))

    def finish(self, result):
        """Return the result of a function, which may be asynchronous."""
        return self.runner.run(result) if inspect.iscoroutine(result) else result

    def reset(self, row: dict) -> str:
        """Return what the environment adds to the prompt."""
        return as_text(self.finish(self.instance.reset(**accepted(self.instance.reset, row))))

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the environment's answer to a turn of the model: (observation, reward, done)."""
        result = self.finish(self.instance.step(text))
        observation, reward, done = result
        if isinstance(done, float | str | dict | None):  # in another order
            raise TypeError(f"{str(result)[:80]!r} is not (text or None, number, bool)")
        return as_text(observation), float(reward), bool(done)

    def play(self, base_url: str, row: dict) -> float | None:
        """Return the reward of the agent, which asks the policy at an address."""
        reward = self.finish(self.instance(base_url, **accepted(self.instance, row)))
        return None if reward is None else float(reward)


def as_text(value) -> str:
    """Return the first LONGEST_TEXT characters of a value as text: "" for None, JSON for anything
    but text.
    """
    if not isinstance(value, str | None):
        plain = lambda x: x.tolist() if hasattr(x, "tolist") else str(x)  # arrays and other objects
        value = json.dumps(value, ensure_ascii=False, default=plain)
    return (value or "")[:LONGEST_TEXT]
