"""Responses of several turns: between them a tool (--tools) or an environment (--environment) answers.

The tokens of a turn stay as they were drawn. The tokens between two turns, an observation, are in the context, but not
in the response mask: nothing is trained on them. docs/environments.md shows how to write tools and environments.
"""

import asyncio
import functools
import math
from dataclasses import dataclass, field
from typing import Callable, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.stopping_criteria import StopStringCriteria

from plumbing.data.prompts import encode_prompt
from plumbing.turns.processes import EnvironmentFailure, ToolError, ToolProcess, ToolProcesses
from plumbing.turns.templates import RefusedMessages, Turns
from plumbing.turns.tool_calls import ToolCall
from utils import warn

STOP_REASONS = ("done", "max_turns", "length", "error")


@dataclass
class Conversation:
    """A response of several turns."""

    row: dict  # the prompt's, with what the environment added to it
    response: list[int] = field(default_factory=list)  # token ids of the turns, and of the observations between them
    values: dict[str, list] = field(default_factory=lambda: {"rollout_logprobs": [], "response_mask": []})  # per token
    turns: list[dict] = field(default_factory=list)  # the same as messages
    rewards: list[float] = field(default_factory=list)  # of the environment, for each turn
    stop_reason: str = ""  # one of STOP_REASONS, once it has ended
    tool_calls: int = 0
    tool_errors: int = 0
    error: str = ""  # why the environment failed

    def add(self, tokens: list[int], logprobs: list[float] | None = None) -> None:
        """Add the tokens of a turn, or those of an observation, which have no log-probabilities."""
        self.response += tokens
        self.values["rollout_logprobs"] += [0.0] * len(tokens) if logprobs is None else logprobs
        self.values["response_mask"] += [int(logprobs is not None)] * len(tokens)

    @property
    def reward(self) -> float:
        """Return the sum of the environment's rewards; NaN if it gave none, or has failed."""
        return sum(self.rewards) if self.rewards and not self.error else math.nan

    @property
    def stopped(self) -> bool:
        """Return whether it ended by itself."""
        return self.stop_reason == "done"

    def scored_row(self) -> dict:
        """Return the row with what reward sources read of the conversation."""
        return {**self.row, "turns": self.turns, "environment": self.reward}

    def metrics(self) -> dict[str, float]:
        """Return the counts of turns, calls and tokens."""
        return {
            "turns": sum(message["role"] == "assistant" for message in self.turns),
            "tool_calls": self.tool_calls,
            "tool_errors": self.tool_errors,
            "observation_tokens": len(self.response) - sum(self.values["response_mask"]),
        }


class Turn(NamedTuple):
    """A turn of the model."""

    tokens: list[int]
    text: str  # with special tokens, which may be part of calls, but without the stop token
    stopped: bool  # whether a stop token or a text of --turn_stop ended it


class Interrupted(Exception):
    """The run is interrupted, or the engine has failed."""


class Conversations:
    """Makes conversations with a run's tools and environment. `schemas`: of all tools, for the template, or None."""

    def __init__(self, args, tokenizer, stop_ids: list[int]):
        """Load and check the tools, the environment and the chat template; exit with code 2 where they do not fit."""
        self.args, self.tokenizer, self.stop_ids = args, tokenizer, stop_ids
        self.processes = ToolProcesses(args.tools, args.environment, args.timeout)
        self.schemas = self.processes.schemas or None
        self.turns = Turns(tokenizer, stop_ids, self.processes.schemas, args, self.processes.has_step)
        self.stop_strings = StopStringCriteria(tokenizer, list(args.turn_stop)) if args.turn_stop else None

    def sample(
        self, rows: list[dict], seeds: list[int], draws, interrupted: Callable, engine=None,
        generate: Callable | None = None,
    ) -> list[Conversation] | None:  # fmt: skip
        """Return a conversation for each row; None if interrupted, or if the engine has failed.

        Args:
            seeds: of the random numbers of tools and environments, one a row.
            draws: random numbers, a line for each row: seeds of its turns for an engine, or else uniform numbers of its
                tokens; None for greedy decoding.
            engine: see plumbing/rollout/engines.py; without one, `generate`, the scripts' decode loop, samples turns.
        """
        return asyncio.run(self._sample(rows, seeds, draws, interrupted, engine, generate))

    def leave_out_failed(self, samples: list) -> None:
        """Set the scores of responses whose environment has failed to NaN; warn of them."""
        failed = [sample for sample in samples if sample.conversation.error]
        for sample in failed:
            sample.scores = dict.fromkeys(sample.scores, math.nan)
        if failed:
            first = failed[0].conversation.error
            warn(f"--environment: {len(failed)} of {len(samples)} responses are left out; the first: {first}")

    async def _sample(self, rows, seeds, draws, interrupted: Callable, engine, generate) -> list[Conversation] | None:
        sampler = EngineTurns(engine, self, interrupted) if engine else DecodedTurns(generate, len(rows), self)
        draws = [None] * len(rows) if draws is None else draws

        async def interruption() -> None:
            while not interrupted():
                await asyncio.sleep(0.1)

        tasks = [
            asyncio.create_task(self._converse(row, seed, functools.partial(sampler.sample, i, line), sampler.leave))
            for i, (row, seed, line) in enumerate(zip(rows, seeds, draws))
        ]
        all_ended, watch = asyncio.gather(*tasks), asyncio.create_task(interruption())
        await asyncio.wait([all_ended, watch], return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        for task in tasks:  # those that have not ended
            task.cancel()
        try:
            return await all_ended
        except (Interrupted, asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)  # until their processes are gone
            return None

    async def _converse(self, row: dict, seed: int, sample: Callable, leave: Callable) -> Conversation:
        """Have one conversation; call `leave` at its end, unless it is cancelled or an error ends the run."""
        conversation, process = Conversation(row), self.processes.open(seed)
        try:
            if self.args.environment:
                conversation.row = self._prompt_with(row, await process.ask("reset", row["columns"]))
            while not conversation.stop_reason:
                turn = await self._sample_turn(conversation, sample)
                messages, reward, done = await self._answer_turn(conversation, turn, process)
                conversation.rewards += [] if reward is None else [reward]
                observation = self.turns.observation_ids(messages, turn.tokens[-1]) if messages and not done else []
                conversation.stop_reason = self._why_it_ends(conversation, turn, messages, observation, done)
                if not conversation.stop_reason:
                    conversation.turns += messages
                    conversation.add(observation)
        except (EnvironmentFailure, RefusedMessages) as error:
            conversation.stop_reason, conversation.error = "error", str(error)
        finally:
            process.kill()
        leave()
        return conversation

    async def _sample_turn(self, conversation: Conversation, sample: Callable) -> Turn:
        """Add a turn of the model to a conversation, and return it."""
        query, position = conversation.row["query"] + conversation.response, len(conversation.response)
        length = self.args.max_response_length - position
        tokens, logprobs = await sample(query, conversation.metrics()["turns"], position, length)
        conversation.add(tokens, logprobs)
        content = self.tokenizer.decode(tokens, skip_special_tokens=True)
        conversation.turns.append({"role": "assistant", "content": content})
        stopped = tokens[-1] in self.stop_ids
        text = self.tokenizer.decode(tokens[:-1] if stopped else tokens)
        return Turn(tokens, text, stopped or any(stop in text for stop in self.args.turn_stop))

    async def _answer_turn(
        self, conversation: Conversation, turn: Turn, process: ToolProcess
    ) -> tuple[list[dict], float | None, bool]:
        """Return the messages that follow a turn, the environment's reward or None, and whether it is done.

        A turn with calls is for the tools, any other turn for the environment. Without either there is no message.
        """
        calls = self.turns.calls(turn.text)
        messages = [await self._call(conversation, call, process) for call in calls]
        if not self.args.environment:
            return messages, None, False
        if not self.processes.has_step:
            return messages, *await process.ask("outcome")
        if calls:
            return messages, 0.0, False
        observation, reward, done = await process.ask("step", conversation.turns[-1]["content"])
        return [{"role": "user", "content": observation or ""}], reward, done

    async def _call(self, conversation: Conversation, call: ToolCall | str, process: ToolProcess) -> dict:
        """Return the message that answers a call of a tool."""
        conversation.tool_calls += 1
        name = call.name if isinstance(call, ToolCall) else ""
        try:
            if not name:
                raise ToolError(call)
            content = await process.call(name, call.arguments)
        except ToolError as error:
            conversation.tool_errors += 1
            content = f"Error: {error}"
        return {"role": "tool", "name": name, "content": content}

    def _why_it_ends(
        self, conversation: Conversation, turn: Turn, messages: list[dict], observation: list[int], done: bool
    ) -> str:
        """Return the stop reason after a turn; "" if the conversation continues with the observation."""
        if done:
            return "done"
        if not messages:
            return "done" if turn.stopped else "length"
        if conversation.metrics()["turns"] == self.args.max_turns:
            return "max_turns"
        too_long = len(conversation.response) + len(observation) >= self.args.max_response_length
        return "length" if too_long else ""

    def _prompt_with(self, row: dict, added: str | list | None) -> dict:
        """Return a prompt with what the environment adds to it: text to its last message, or messages."""
        if not added:
            return row
        as_is = row["messages"] is None or self.tokenizer.chat_template is None
        if as_is and not isinstance(added, str):
            raise EnvironmentFailure("reset returned messages, and there is no chat template for them")
        if as_is:
            prompt = row["prompt"] + added
        elif isinstance(added, str):
            *before, last = row["messages"]
            prompt = [*before, {**last, "content": last["content"] + added}]
        else:
            prompt = row["messages"] + added
        where = f"--environment {self.args.environment}: reset"
        text, query = encode_prompt(where, prompt, self.tokenizer, "", as_is, self.schemas)
        if len(query) > self.args.max_prompt_length:
            raise EnvironmentFailure(f"reset makes a prompt of {len(query)} tokens, over --max_prompt_length")
        return {**row, "prompt": text, "query": query, "messages": None if as_is else prompt}


class EngineTurns:
    """Samples turns by a rollout engine, each as soon as it is asked for."""

    def __init__(self, engine, conversations: Conversations, interrupted: Callable):
        self.engine, self.options = engine, (conversations.stop_ids, conversations.args, interrupted)

    async def sample(self, place: int, seeds, query: list[int], turn: int, position: int, length: int) -> tuple:
        """Return the token ids of a turn and their log-probabilities.

        Args:
            place: of the conversation. seeds: of all its turns, or None. query: token ids of all before the turn.
            turn: its number. position: of its first token in the response. length: most tokens of it.
        """
        seed = None if seeds is None else int(seeds[turn])
        sampled = await self.engine.sample(query, seed, length, *self.options)
        if sampled is None:
            raise Interrupted
        return sampled

    def leave(self) -> None:
        """Do nothing: no turn waits for other conversations."""


class DecodedTurns:
    """Samples turns by the script's decode loop: those of all conversations together, once each of them waits for one.

    So what is sampled together does not depend on how long tools run.
    """

    def __init__(self, generate: Callable, running: int, conversations: Conversations):
        self.generate = functools.partial(generate, stop_strings=conversations.stop_strings)
        self.running, self.waiting = running, {}

    async def sample(self, place: int, uniforms, query: list[int], turn: int, position: int, length: int) -> tuple:
        """As `EngineTurns.sample`; `uniforms` are those of all tokens of the response, or None."""
        numbers = None if uniforms is None else torch.from_numpy(uniforms[position : position + length])
        future = asyncio.get_running_loop().create_future()
        self.waiting[place] = (query, numbers, length, future)
        self._sample_if_all_wait()
        return await future

    def leave(self) -> None:
        self.running -= 1
        self._sample_if_all_wait()

    def _sample_if_all_wait(self) -> None:
        if not self.waiting or len(self.waiting) < self.running:
            return
        queries, uniforms, lengths, futures = map(list, zip(*(self.waiting[place] for place in sorted(self.waiting))))
        self.waiting = {}
        table = None if uniforms[0] is None else pad_sequence(uniforms, batch_first=True)
        responses, values = self.generate(queries, table, lengths)
        for future, response, value in zip(futures, responses, values):
            if not future.done():  # not cancelled
                future.set_result((response, value["rollout_logprobs"]))
