"""Responses of several turns: between them a tool (--tools) or an environment (--environment)
answers.

The tokens of a turn stay as they were drawn. The tokens between two turns, an observation, are in
the context, but not in the response mask: nothing is trained on them. docs/agents.md shows
how to write tools and environments.

A conversation has a process in which its tools and its environment run
(extras/episodes/tool_processes.py).
"""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Callable

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.stopping_criteria import StopStringCriteria

from extras.episodes.templates import Call, TurnTemplate
from extras.episodes.tool_processes import (
    EnvironmentFailure,
    ToolError,
    ToolProcess,
    ToolProcesses,
)
from plumbing.data.encoding import CUT, guarded
from plumbing.data.rows import Row
from plumbing.processes import run_all
from plumbing.rewards.sources import reward_weights
from utils import as_user_error, generator, warn

STOP_REASONS = ("done", "max_turns", "length", "error")


@dataclass
class Conversation:
    """A response of several turns."""

    row: Row  # the prompt's, with what the environment added to it
    # Token ids of the turns, and of the observations between them.
    response: list[int] = field(default_factory=list)
    # Per token.
    outputs: dict[str, list] = field(
        default_factory=lambda: {"rollout_logprobs": [], "response_mask": []}
    )
    # Of an agent: where in `response` another context begins, with its prompt.
    starts: list[int] = field(default_factory=list)
    turns: list[dict] = field(default_factory=list)  # the same as messages
    # Of turns, by the place of their last token; an agent's is of none, at -1.
    rewards: dict[int, float] = field(default_factory=dict)
    stop_reason: str = ""  # one of STOP_REASONS, once it has ended
    tool_calls: int = 0
    tool_errors: int = 0
    error: str = ""  # why the environment failed
    place: int = 0  # among those of the rollout
    process: ToolProcess | None = None  # of its tools and its environment, until it ends

    def add(self, tokens: list[int], outputs: dict[str, list] | None = None) -> None:
        """Add the tokens of a turn and what was stored of them, by name; or of an observation or a
        turn that does not train, with zeros.
        """
        sampled = {} if outputs is None else {"response_mask": [1.0] * len(tokens), **outputs}
        for name in self.outputs | sampled:
            self.outputs.setdefault(name, [0.0] * len(self.response)).extend(
                sampled.get(name, [0.0] * len(tokens))
            )
        self.response += tokens

    @property
    def reward(self) -> float:
        """Return the sum of the environment's rewards; NaN if it gave none, or has failed."""
        return sum(self.rewards.values()) if self.rewards and not self.error else math.nan

    def metrics(self) -> dict[str, float]:
        """Return the counts of turns, calls and tokens."""
        return {
            "turns": sum(message["role"] == "assistant" for message in self.turns),
            "tool_calls": self.tool_calls,
            "tool_errors": self.tool_errors,
            "observation_tokens": len(self.response) - int(sum(self.outputs["response_mask"])),
        }


class DecodeLoop:
    """Samples turns by the scripts' decode loop: those of all conversations under way together.

    So what is sampled together does not depend on how long tools run.

    Args:
        generate: the decode loop. at_once: most conversations under way. left: those that have not
            ended.
    """

    def __init__(self, generate: Callable, stop_strings: Callable | None, at_once: int, left: int):
        self.generate = generate
        self.stop_strings = stop_strings
        self.at_once = at_once
        self.left = left
        self.asked: dict[int, tuple] = {}  # by the place of a conversation: what `generate` needs

    async def sample(
        self, place: int, query: list[int], numbers: np.ndarray | None, length: int
    ) -> tuple | None:
        """Return a turn, once all conversations under way wait for theirs; None if interrupted.

        Args:
            numbers: of the response's tokens, of which the last ones are left; None if greedy.
        """
        if not self.asked:
            self.sampled = asyncio.Future()  # {place: turn}
        sampled = self.sampled
        uniforms = None if numbers is None else torch.from_numpy(numbers[-length:])
        self.asked[place] = query, uniforms, length
        self._sample_if_all_wait()
        return (await sampled).get(place)

    def end_one(self) -> None:
        """Wait for one conversation less."""
        self.left -= 1
        self._sample_if_all_wait()

    def _sample_if_all_wait(self) -> None:
        if not self.asked or len(self.asked) < min(self.at_once, self.left):
            return
        places = sorted(self.asked)
        queries, uniforms, lengths = zip(*[self.asked[place] for place in places])
        uniforms = None if uniforms[0] is None else pad_sequence(uniforms, batch_first=True)
        turns = self.generate(queries, uniforms, lengths, self.stop_strings)
        self.asked = {}
        self.sampled.set_result({places[i]: turn for i, *turn in turns})


class Conversations:
    """Makes conversations with a run's tools and environment. `schemas`: of all tools, for the
    template, or None.
    """

    def __init__(self, args, tokenizer, stop_ids: list[int]):
        """Load and check the tools, the environment and the chat template; raise a UserError where
        they do not fit.
        """
        self.args = args
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.flag = "--agent" if args.agent else "--environment" if args.environment else "--tools"
        environment = args.environment or args.agent
        timeout = args.agent_timeout if args.agent else args.timeout
        self.processes = ToolProcesses(args.tools, environment, timeout, self.flag)
        # Of all rollouts that an engine makes at once.
        self.free = asyncio.Semaphore(args.generation_batch_size)
        self.schemas = self.processes.schemas or None
        with as_user_error(f"{self.flag}: the chat template of --model"):
            self.template = self.template_with(self.schemas)
        self.stop_strings = (
            StopStringCriteria(tokenizer, list(args.turn_stop)) if args.turn_stop else None
        )

    def template_with(self, schemas: list[dict] | None) -> TurnTemplate:
        """Return the TurnTemplate of conversations with some tools; see there what is raised."""
        args = self.args
        followers = ["tool"] * bool(schemas) + ["user"] * bool(args.environment or args.agent)
        has_template = args.chat_template != "none"
        return TurnTemplate(self.tokenizer, self.stop_ids, schemas, followers, has_template)

    def sample(
        self,
        rows: list[Row],
        seeds: list[int],
        draws: np.ndarray | None,
        interrupted: Callable,
        end: Callable,
        engine=None,
        generate: Callable | None = None,
    ) -> None:
        """Have a conversation for each row, --generation_batch_size of them at the same time.

        Args:
            seeds: of the random numbers of tools and environments, one per row.
            draws: see `plumbing.rollout.batch.Sampler.sample`.
            end: called with the place of a row and its Conversation once that has ended: for all
                rows, unless this is interrupted or the engine fails.
            engine: see plumbing/rollout/engines.py; without one, `generate`, the scripts' decode
                loop, samples turns.
        """
        at_once = self.args.generation_batch_size
        free = asyncio.Semaphore(at_once) if engine is None else self.free
        decode_loop = DecodeLoop(generate, self.stop_strings, at_once, len(rows))

        async def sample_turn(
            conversation: Conversation, query: list[int], length: int, args, repetition: int = 0
        ) -> tuple | None:
            place = conversation.place
            numbers = None if draws is None else draws[place]
            if engine is None:
                return await decode_loop.sample(place, query, numbers, length)
            seed = None
            if numbers is not None:  # whatever the order of parallel requests
                seed = int(generator(numbers[0], repetition, query).integers(2**62))
            return await engine.sample(place, query, seed, length, self.stop_ids, args, interrupted)

        async def converse(place: int) -> None:
            async with free:
                process = ToolProcess(self.processes, seeds[place])
                conversation = Conversation(rows[place], place=place, process=process)
                try:
                    await self._converse(conversation, sample_turn)
                except EnvironmentFailure as error:
                    conversation.stop_reason = "error"
                    conversation.error = str(error)
                finally:
                    process.kill()
            if conversation.stop_reason:
                conversation.process = None
                self._finish(conversation)
                end(place, conversation)
                decode_loop.end_one()

        calls = map(converse, range(len(rows)))
        if engine is None:
            asyncio.run(run_all(calls, interrupted))
        else:
            engine.run_all(calls, interrupted)

    def _finish(self, conversation: Conversation) -> None:
        """Add what the script and the reward sources read of a conversation that has ended."""
        if getattr(self.args, "turn_rewards", False):  # parts of the score
            weight = dict(zip(self.args.reward, reward_weights(self.args)))["episode"]
            earned = [conversation.rewards.get(t, 0.0) for t in range(len(conversation.response))]
            # float64, as the score, from which they are subtracted
            conversation.outputs["turn_rewards"] = weight * np.array(earned)
        read = {"turns": conversation.turns, "episode": conversation.reward}
        conversation.row = {**conversation.row, **read}

    def leave_out_failed(self, samples: list) -> None:
        """Set the scores of responses whose environment has failed to NaN; warn of them."""
        failed = [sample for sample in samples if sample.conversation.error]
        for sample in failed:
            sample.scores = dict.fromkeys(sample.scores, math.nan)
        if failed:
            first = failed[0].conversation.error
            warn(
                f"{self.flag}: {len(failed)} of {len(samples)} responses are left out; the first: {first}"
            )

    async def _converse(self, conversation: Conversation, sample_turn: Callable) -> None:
        """Have a conversation, until it ends or `sample_turn` returns None, as it was
        interrupted.
        """
        columns = conversation.row["columns"]
        if self.args.environment and (added := await conversation.process.ask("reset", columns)):
            conversation.row = self._prompt_with(conversation.row, added)
        while not conversation.stop_reason:
            query = conversation.row["query"] + conversation.response
            length = self.args.max_response_length - len(conversation.response)
            turn = await sample_turn(conversation, query, length, self.args)
            if turn is None:
                return
            await self._add_turn(conversation, *turn)

    async def _add_turn(
        self, conversation: Conversation, tokens: list[int], outputs: dict[str, list]
    ) -> None:
        """Add a turn of the model, and the observation that follows it; or end the conversation.

        A turn with calls is for the tools, any other turn for the environment. Without either there
        is no observation.
        """
        conversation.add(tokens, outputs)
        last_token = len(conversation.response) - 1
        content, text, stopped = self.read(tokens, self.args.turn_stop)
        conversation.turns.append({"role": "assistant", "content": content})
        calls = self.template.calls(text)
        messages = [await self._call(conversation, call) for call in calls]
        reward = 0.0
        done = False
        if self.args.environment:
            if not calls:
                observation, reward, done = await conversation.process.ask("step", content)
                messages = [{"role": "user", "content": observation}]
            conversation.rewards[last_token] = reward
        observation = (
            self.template.observation_ids(messages, tokens[-1]) if messages and not done else []
        )
        length = len(conversation.response) + len(observation)
        if done or (stopped and not messages):
            conversation.stop_reason = "done"
        elif messages and conversation.metrics()["turns"] == self.args.max_turns:
            conversation.stop_reason = "max_turns" if stopped else "length"
        elif not messages or length >= self.args.max_response_length:
            conversation.stop_reason = "length"
        else:
            conversation.turns += messages
            conversation.add(observation)

    def read(self, tokens: list[int], stops: tuple[str, ...]) -> tuple[str, str, bool]:
        """Return the text of a turn; its text with special tokens, which may be part of calls; and
        whether it has ended by itself.
        """
        stopped = tokens[-1] in self.stop_ids
        text = self.tokenizer.decode(tokens[:-1] if stopped else tokens)
        content = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return content, text, stopped or any(stop in text for stop in stops)

    async def _call(self, conversation: Conversation, call: Call | str) -> dict:
        """Return the message that answers a call of a tool."""
        conversation.tool_calls += 1
        name, arguments = call if isinstance(call, tuple) else ("", call)
        try:
            if not name:
                raise ToolError(arguments)
            content = await conversation.process.ask("call", name, arguments)
        except ToolError as error:
            conversation.tool_errors += 1
            content = f"Error: {error}"
        return {"role": "tool", "name": name, "content": content}

    def _prompt_with(self, row: Row, added: str) -> Row:
        """Return a prompt with a text added to its last message."""
        messages = None
        text = row["prompt"] + guarded(added, self.tokenizer)
        if self.template.has_template:
            *before, last = row["messages"]
            messages = [*before, {**last, "content": last["content"] + added}]
            text = self.template.prompt(messages)
        query = self.template.encode(text, special=messages is None)
        if len(query) > self.args.max_prompt_length:
            raise EnvironmentFailure(
                f"reset makes a prompt of {len(query)} tokens, over --max_prompt_length"
            )
        return {**row, "prompt": text.replace(CUT, ""), "query": query, "messages": messages}
