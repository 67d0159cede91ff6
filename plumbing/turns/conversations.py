"""Responses of several turns: between them answers a tool (--tools) or an environment (--environment).

The tokens of a turn stay as they were drawn. What stands between two turns, an observation, is in the context, but not
in the response mask: nothing is trained on it. docs/environments.md shows how tools and environments are written.

Imports plumbing.turns.templates (the text of turns), plumbing.turns.tool_processes (where tools and environments run),
plumbing.data.prompts (prompts that an environment adds to) and plumbing.flags (ranges of flags).
"""

import asyncio
import functools
import math
from dataclasses import dataclass, field
from typing import Callable

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.stopping_criteria import StopStringCriteria

from plumbing.data.prompts import encode_prompt
from plumbing.turns.templates import Turns
from plumbing.turns.tool_processes import EnvironmentFailure, ToolError, ToolProcess, ToolProcesses
from utils import fail, warn

STOP_REASONS = ("stop", "done", "max_turns", "length", "error")


@dataclass
class Conversation:
    """A response of several turns."""

    row: dict  # the prompt's, with what the environment added to it
    response: list[int] = field(default_factory=list)  # token ids of the turns, and of the observations between them
    values: dict[str, list] = field(default_factory=dict)  # a value a token, by name; see `Batch.tokens`
    turns: list[dict] = field(default_factory=list)  # the same as messages
    stop_reason: str = "max_turns"  # one of STOP_REASONS
    reward: float = math.nan  # the sum of the environment's
    tool_calls: int = 0
    tool_errors: int = 0
    error: str = ""  # why the environment failed

    def add(self, tokens: list[int], **values: list) -> None:
        """Add tokens and their values by name; what is not given is 0."""
        self.response += tokens
        for name, column in self.values.items():
            column += values.get(name, [0] * len(tokens))

    @property
    def stopped(self) -> bool:
        """Return whether it ended by itself."""
        return self.stop_reason in ("stop", "done")

    def scored_row(self) -> dict:
        """Return the row with what reward sources read of the conversation."""
        return {**self.row, "turns": self.turns, "environment": self.reward}

    def metrics(self) -> dict[str, float]:
        """Return what is counted of a response."""
        return {
            "turns": sum(message["role"] == "assistant" for message in self.turns),
            "tool_calls": self.tool_calls,
            "tool_errors": self.tool_errors,
            "observation_tokens": len(self.response) - sum(self.values["response_mask"]),
        }


class Interrupted(Exception):
    """The run is interrupted, or the engine has failed."""


def load_conversations(args, tokenizer, stop_ids: list[int]) -> "Conversations | None":
    """Return the Conversations of --tools and --environment; None without them."""
    if args.tools or args.environment:
        return Conversations(args, tokenizer, stop_ids)
    if "environment" in args.reward:
        fail("--reward environment: takes an --environment")
    for name in ("tool_call_pattern", "turn_stop"):
        if getattr(args, name):
            fail(f"--{name}: takes --tools or an --environment")
    return None


class Conversations:
    """Makes conversations with a run's tools and environment. `schemas`: of all tools, for the template, or None."""

    def __init__(self, args, tokenizer, stop_ids: list[int]):
        """Load and check the tools, the environment and the chat template; end the run where they do not fit."""
        if args.vllm_tensor_parallel > 1:
            fail("--vllm_tensor_parallel: with --tools or --environment each rank takes an engine of its own")
        if args.min_response_length:
            fail("--min_response_length: takes responses of one turn, so no --tools and no --environment")
        if args.environment and "environment" not in args.reward and args.reward:
            warn(f"--environment {args.environment}: its rewards do not count without environment in --reward")
        if "" in args.turn_stop:
            fail("--turn_stop: an empty text would end every turn")
        self.args, self.tokenizer, self.stop_ids = args, tokenizer, stop_ids
        self.processes = ToolProcesses(args.tools, args.environment, args.tool_timeout)
        self.schemas = self.processes.schemas or None
        self.turns = Turns(tokenizer, stop_ids, self.processes.schemas, args, self.processes.has_step)
        self.stop_strings = StopStringCriteria(tokenizer, list(args.turn_stop)) if args.turn_stop else None
        self.value_names = ["rollout_logprobs", "response_mask"]
        if getattr(args, "turn_rewards", False):  # a flag of PPO
            self.value_names.append("turn_rewards")

    def sample(
        self, rows: list[dict], seeds: list[int], draws, interrupted: Callable, engine=None,
        generate: Callable | None = None,
    ) -> list[Conversation] | None:  # fmt: skip
        """Return a conversation for each row; None if interrupted, or if the engine has failed.

        Args:
            seeds: of what is random in tools and environments, one a row.
            draws: random numbers, a line for each row: seeds of its turns for an engine, or else uniform numbers of its
                tokens; None for greedy decoding.
            engine: see plumbing/rollout/engines.py; without one, `generate` samples turns as the scripts' decode loop does.
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
        conversation = Conversation(row, values={name: [] for name in self.value_names})
        process = self.processes.open(seed)
        try:
            if self.args.environment:
                conversation.reward = 0.0
                conversation.row = self._prompt_with(row, await process.reset(row["columns"]))
            for number in range(self.args.max_turns):
                if not await self._take_turn(conversation, number, process, sample):
                    break
        except EnvironmentFailure as error:
            conversation.stop_reason, conversation.error, conversation.reward = "error", str(error), math.nan
        finally:
            process.kill()
        leave()
        return conversation

    async def _take_turn(self, conversation: Conversation, number: int, process: ToolProcess, sample: Callable) -> bool:
        """Sample a turn, and add the observation that follows it; return whether the conversation goes on."""
        position = len(conversation.response)
        left = self.args.max_response_length - position
        length = min(self.args.max_turn_length or left, left)
        tokens, logprobs = await sample(conversation.row["query"] + conversation.response, number, position, length)
        conversation.add(tokens, rollout_logprobs=logprobs, response_mask=[1] * len(tokens))
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        conversation.turns.append({"role": "assistant", "content": text})
        stopped = tokens[-1] in self.stop_ids
        words = self.tokenizer.decode(tokens[:-1] if stopped else tokens)  # calls and --turn_stop may be special tokens
        stopped = stopped or any(stop in words for stop in self.args.turn_stop)

        # A turn with calls is for the tools, another one for the environment, which ends the conversation if none does.
        calls = self.turns.calls(words) if self.schemas else []
        messages, reward, done = [await self._call(conversation, call, process) for call in calls], 0.0, False
        if self.processes.has_step and not calls:
            observation, reward, done = await process.step(text)
            messages = [{"role": "user", "content": observation or ""}]
            conversation.reward += reward
        elif self.args.environment and not self.processes.has_step:
            before, (conversation.reward, done) = conversation.reward, await process.outcome()
            reward = conversation.reward - (before if math.isfinite(before) else 0.0)  # NaN: there was none yet
        if "turn_rewards" in conversation.values and math.isfinite(reward):
            conversation.values["turn_rewards"][-1] += reward
        if done or not messages:
            conversation.stop_reason = "done" if done else "stop" if stopped else "length"
            return False
        if number + 1 == self.args.max_turns:
            return False
        try:
            observation = self.turns.observation_ids(messages, tokens[-1])
        except ValueError as error:  # the template refuses the environment's messages
            raise EnvironmentFailure(str(error)) from None
        if len(conversation.response) + len(observation) >= self.args.max_response_length:
            conversation.stop_reason = "length"
            return False
        conversation.turns += messages
        conversation.add(observation)
        return True

    async def _call(self, conversation: Conversation, call, process: ToolProcess) -> dict:
        """Return the message that answers a call of a tool."""
        conversation.tool_calls += 1
        name = getattr(call, "name", "")
        try:
            if not name:
                raise ToolError(call)
            content = await process.call(name, call.arguments)
        except ToolError as error:
            conversation.tool_errors += 1
            content = f"Error: {error}"
        return {"role": "tool", "name": name, "content": content}

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
        found = await self.engine.sample(query, seed, length, *self.options)
        if found is None:
            raise Interrupted
        return found

    def leave(self) -> None:
        """Do nothing: no turn waits for other conversations."""


class DecodedTurns:
    """Samples turns by the script's decode loop: those of all conversations together, once each of them waits for one.

    So what is sampled together does not depend on how long tools take.
    """

    def __init__(self, generate: Callable, running: int, conversations: Conversations):
        self.generate = functools.partial(generate, stop_strings=conversations.stop_strings)
        self.running, self.waiting = running, {}

    async def sample(self, place: int, uniforms, query: list[int], turn: int, position: int, length: int) -> tuple:
        """As `EngineTurns.sample`; `uniforms` are those of all tokens of the response, or None."""
        own = None if uniforms is None else torch.from_numpy(uniforms[position : position + length])
        future = asyncio.get_running_loop().create_future()
        self.waiting[place] = (query, own, length, future)
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
