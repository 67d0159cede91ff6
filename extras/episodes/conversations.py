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
from typing import Callable, Coroutine, Iterable, Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.stopping_criteria import StopStringCriteria

from extras.episodes.templates import Call, TurnTemplate
from extras.episodes.tool_processes import (
    EnvironmentFailure,
    ToolError,
    ToolProcess,
    start_tools,
)
from plumbing.data.encoding import CUT, guarded
from plumbing.data.rendering import Rendering
from plumbing.data.rows import Row
from plumbing.processes import run_all, run_until_done
from plumbing.rewards.sources import reward_weights
from utils import as_user_error, generator, warn

STOP_REASONS = ("done", "max_turns", "length", "error")


@dataclass
class Conversation:
    """A response of several turns."""

    row: Row  # the prompt's, with what the environment added to it
    # (T,) int32, token ids of the turns, and of the observations between them.
    response: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    # (T,) float32 by name, 0 where nothing was stored.
    outputs: dict[str, np.ndarray] = field(
        default_factory=lambda: dict.fromkeys(
            ("rollout_logprobs", "response_mask"), np.empty(0, np.float32)
        )
    )
    # Of an agent: where in `response` another context begins, with its prompt.
    starts: list[int] = field(default_factory=list)
    turns: list[dict] = field(default_factory=list)  # the same as messages
    # By the place of a turn's last token; the reward of an agent, which is of no turn, is at -1.
    rewards: dict[int, float] = field(default_factory=dict)
    stop_reason: str = ""  # one of STOP_REASONS, once it has ended
    tool_calls: int = 0
    tool_errors: int = 0
    error: str = ""  # why the environment failed

    def add(self, tokens: Sequence[int], outputs: dict[str, np.ndarray] | None = None) -> None:
        """Add the tokens of a turn and what was stored of them, by name; or of an observation or a
        turn that does not train, with zeros.
        """
        begin = len(self.response)
        self.response = np.append(self.response, tokens).astype(np.int32)
        sampled = {"response_mask": 1.0, **outputs} if outputs else {}
        for name in self.outputs | sampled:
            values = np.zeros(len(self.response), np.float32)
            values[:begin] = self.outputs.get(name, 0.0)
            values[begin:] = sampled.get(name, 0.0)
            self.outputs[name] = values

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
            "observation_tokens": len(self.response) - int(self.outputs["response_mask"].sum()),
        }


@dataclass
class DecodeLoop:
    """Samples turns by the scripts' decode loop, with the methods of an engine
    (plumbing/rollout/engines.py): those of all conversations under way together.

    So what is sampled together does not depend on how long tools run.
    """

    generate: Callable
    draws: np.ndarray  # see `plumbing.rollout.sampler.Sampler.sample`
    stop_strings: Callable | None
    at_once: int  # most conversations under way
    left: int  # conversations that have not ended
    # By the place of a conversation: what `generate` needs, and a future of its turn.
    asked: dict[int, tuple] = field(default_factory=dict)

    def run_all(self, conversations: Iterable[Coroutine], interrupted: Callable) -> None:
        """Have conversations, see `plumbing.processes.run_all`."""
        run_until_done(run_all(map(self._until_its_end, conversations), interrupted))

    async def _until_its_end(self, conversation: Coroutine) -> None:
        await conversation
        self.left -= 1
        self._sample_if_all_wait()

    async def sample(
        self, place: int, query: list[int], seed: int | None, length: int, *_
    ) -> tuple | None:
        """Return a turn, once all conversations under way wait for theirs; None if interrupted."""
        # The last numbers of the response are left. They take the place of the seed.
        uniforms = torch.from_numpy(self.draws[place, -length:])
        turn: asyncio.Future = asyncio.Future()
        self.asked[place] = query, uniforms, length, turn
        self._sample_if_all_wait()
        return await turn

    def _sample_if_all_wait(self) -> None:
        if not self.asked or len(self.asked) < min(self.at_once, self.left):
            return
        asked = [self.asked.pop(place) for place in sorted(self.asked)]
        queries, uniforms, lengths, turns = zip(*asked)
        uniforms = pad_sequence(uniforms, batch_first=True)
        sampled = self.generate(queries, uniforms, lengths, self.stop_strings)
        found = {i: turn for i, *turn in sampled}
        for i, turn in enumerate(turns):
            turn.set_result(found.get(i))


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
        self.process_of, schemas = start_tools(
            args.tools,
            args.environment or args.agent,
            args.agent_timeout if args.agent else args.timeout,
            self.flag,
        )
        # Bounds the conversations of all rollouts that an engine makes at the same time.
        self.free = asyncio.Semaphore(args.generation_batch_size)
        self.schemas = schemas or None
        with as_user_error(f"{self.flag}: the chat template of --model"):
            self.template = self.template_with(self.schemas)
        self.stop_strings = (
            StopStringCriteria(tokenizer, list(args.turn_stop)) if args.turn_stop else None
        )

    def template_with(self, schemas: list[dict] | None) -> TurnTemplate:
        """Return the TurnTemplate of conversations with some tools; see there what is raised."""
        args = self.args
        followers = ["tool"] * bool(schemas) + ["user"] * bool(args.environment or args.agent)
        return TurnTemplate(
            self.tokenizer, self.stop_ids, schemas, followers, args.chat_template != "none"
        )

    def sample(
        self,
        rows: list[Row],
        seeds: list[int],
        draws: np.ndarray,
        interrupted: Callable,
        end: Callable,
        engine=None,
        generate: Callable | None = None,
    ) -> None:
        """Have a conversation for each row, --generation_batch_size of them at the same time.

        Args:
            seeds: of the random numbers of tools and environments, one per row.
            draws: see `plumbing.rollout.sampler.Sampler.sample`.
            end: called with the place of a row and its Conversation once that has ended: for all
                rows, unless this is interrupted or the engine fails.
            engine: see plumbing/rollout/engines.py; without one, `generate`, the scripts' decode
                loop, samples turns.
        """
        at_once = self.args.generation_batch_size
        free = self.free if engine else asyncio.Semaphore(at_once)
        engine = engine or DecodeLoop(generate, draws, self.stop_strings, at_once, len(rows))

        async def converse(place: int) -> None:
            async def sample_turn(
                query: list[int], length: int, args, repetition: int = 0
            ) -> tuple | None:
                seed = None
                if draws[place, 0] >= 0:  # whatever the order of parallel requests
                    seed = int(generator(draws[place, 0], repetition, query).integers(2**62))
                return await engine.sample(place, query, seed, length, self.stop_ids, args)

            conversation = Conversation(rows[place])
            async with free:
                process = self.process_of(seeds[place])
                try:
                    reason = await self._converse(conversation, process, sample_turn)
                except EnvironmentFailure as error:
                    reason = "error"
                    conversation.error = str(error)
                finally:
                    process.kill()
            if reason:
                conversation.stop_reason = reason
                self._finish(conversation)
                end(place, conversation)

        engine.run_all(map(converse, range(len(rows))), interrupted)

    def _finish(self, conversation: Conversation) -> None:
        """Add what the script and the reward sources read of a conversation that has ended."""
        if getattr(self.args, "turn_rewards", False):  # parts of the score
            weight = dict(zip(self.args.reward, reward_weights(self.args)))["episode"]
            earned = [conversation.rewards.get(t, 0.0) for t in range(len(conversation.response))]
            # float64, as the score, from which they are subtracted
            conversation.outputs["turn_rewards"] = weight * np.array(earned)
        conversation.row = {
            **conversation.row,
            "turns": conversation.turns,
            "episode": conversation.reward,
        }

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

    async def _converse(
        self, conversation: Conversation, process: ToolProcess, sample: Callable
    ) -> str:
        """Have a conversation, and return its stop reason; "" once `sample` returns None, as the
        engine has failed.

        Args:
            process: of the tools and the environment.
            sample: (query, length, args, repetition) -> the tokens of a turn, and what is stored of
                them. `repetition`: how often an agent has sent this query before.
        """
        args = self.args
        row = conversation.row
        if args.environment and (added := await process.ask("reset", row["columns"])):
            conversation.row = self._prompt_with(row, added)
        while True:
            query = [*conversation.row["query"], *conversation.response.tolist()]
            turn = await sample(query, args.max_response_length - len(conversation.response), args)
            if turn is None:
                return ""
            tokens, outputs = turn
            conversation.add(tokens, outputs | {"turns": conversation.metrics()["turns"]})
            content, text, stopped = self.read(tokens, args.turn_stop)
            conversation.turns.append({"role": "assistant", "content": content})

            # A turn with calls is for the tools, any other turn for the environment.
            _, calls = self.template.parse(text)
            messages = [await self._call(conversation, process, call) for call in calls]
            done = False
            if args.environment:
                reward = 0.0
                if not calls:
                    observation, reward, done = await process.ask("step", content)
                    messages = [{"role": "user", "content": observation}]
                conversation.rewards[len(conversation.response) - 1] = reward
            if done:
                return "done"
            if not messages:
                return "done" if stopped else "length"

            observation_ids = self.template.observation_ids(messages, tokens[-1])
            if conversation.metrics()["turns"] == args.max_turns:
                return "max_turns" if stopped else "length"
            if len(conversation.response) + len(observation_ids) >= args.max_response_length:
                return "length"
            conversation.turns += messages
            conversation.add(observation_ids)

    def read(self, tokens: list[int], stops: tuple[str, ...]) -> tuple[str, str, bool]:
        """Return the text of a turn; its text with special tokens, which may be part of calls; and
        whether it has ended by itself.
        """
        stopped = tokens[-1] in self.stop_ids
        text = self.tokenizer.decode(tokens[:-1] if stopped else tokens)
        content = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return content, text, stopped or any(stop in text for stop in stops)

    async def _call(
        self, conversation: Conversation, process: ToolProcess, call: Call | str
    ) -> dict:
        """Return the message that answers a call of a tool."""
        conversation.tool_calls += 1
        name = ""
        try:
            if isinstance(call, str):  # why it cannot be read
                raise ToolError(call)
            name, arguments = call
            content = await process.ask("call", name, arguments)
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
            rendering = Rendering(self.tokenizer, tools=self.schemas).of_row(
                "reset", row["columns"]
            )
            text = rendering.prompt("reset", messages).text
        query = self.template.encode(text, special=messages is None)
        if len(query) > self.args.max_prompt_length:
            raise EnvironmentFailure(
                f"reset makes a prompt of {len(query)} tokens, over --max_prompt_length"
            )
        return {**row, "prompt": text.replace(CUT, ""), "query": query, "messages": messages}
