"""Agents (--agent): programs of the user that ask the policy by one of the APIs of apis.py.

A function play(base_url, **row) makes a response and returns its reward, in a process of its own.
It may start any program. The address is the response's own, http://127.0.0.1:PORT/NAME/v1.

Sampled tokens are never tokenised again. A request whose messages begin with those of an earlier
request and its answer continues the tokens of that answer, by what the chat template writes for the
messages that follow. Any other request, as of an agent that edits its history, begins a context,
with all of its messages in its prompt. A response has one context or more; each turn trains in one.
"""

import asyncio
import copy
import functools
import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Callable

from aiohttp import web
from aiohttp.log import server_logger

from extras.episodes.apis import APIS, Api
from extras.episodes.conversations import Conversation, Conversations
from extras.episodes.tool_processes import EnvironmentFailure, ToolProcess
from extras.http import in_one_line
from plumbing.data.messages import read_messages, without_empty
from plumbing.models.config import positions_of
from utils import first_line

# The fields of a request that are accepted: with any value, which is read or changes nothing; with a
# value that is false, 0 or empty; and with one of some values.
READ = (
    "messages tools temperature max_tokens max_completion_tokens stop stream model user seed store "
    "metadata stream_options service_tier prompt_cache_key safety_identifier"
).split()
OFF = (
    "frequency_penalty presence_penalty logit_bias functions logprobs top_logprobs min_p min_tokens "
    "ignore_eos use_beam_search echo add_special_tokens continue_final_message chat_template_kwargs"
).split()
FIXED = {
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_k": (-1, 0),
    "include": ([], ["reasoning.encrypted_content"]),
    "reasoning": ({"effort": "none"},),
    "text": ({"format": {"type": "text"}}, {"verbosity": "low"}),
    "thinking": ({"type": "disabled"},),
    "truncation": ("disabled",),
    "parallel_tool_calls": (True,),
    "skip_special_tokens": (True,),
    **dict.fromkeys(("n", "best_of", "top_p", "repetition_penalty", "length_penalty"), (1,)),
}
BYTES_A_TOKEN = 64  # of a request at most; text has fewer, and so has its JSON


@dataclass(eq=False)
class Turn:
    """An answer of the policy; without tokens while a request waits for it."""

    messages: list[dict] = field(default_factory=list)  # of the request, and the answer
    tools: str = ""  # of the request, JSON; "" while it waits
    prompt: list[int] = field(default_factory=list)  # all tokens before it
    tokens: list[int] = field(default_factory=list)
    outputs: dict | None = None  # of its tokens, arrays by name; None: they do not train


class Agents(Conversations):
    """Has a run's agent make responses."""

    def __init__(self, args, tokenizer, stop_ids: list[int]):
        """Load the agent, and check the chat template; raise a UserError where they do not fit."""
        super().__init__(args, tokenizer, stop_ids)
        server_logger.addFilter(in_one_line)
        # Tokens of a context.
        self.longest = min(
            args.max_prompt_length + args.max_response_length, positions_of(args.model)
        )
        # By the tools of a request, JSON.
        self.template_of = functools.lru_cache(1000)(
            lambda tools: self.template_with(json.loads(tools))
        )

    async def _converse(
        self, conversation: Conversation, process: ToolProcess, sample: Callable
    ) -> str:
        """Have the agent make a response, and return its stop reason."""
        turns: list[Turn] = []

        def refuse(reason: str | None, status: int = 400) -> web.Response:
            error = {"message": reason, "type": "invalid_request_error"}
            return web.json_response({"error": error, "type": "error"}, status=status)

        async def respond(api: Api, request: web.Request) -> web.Response:
            turn = Turn()
            turns.append(turn)
            try:
                asked = json.loads(await request.read())
                answer = await self._answer(api.to_chat(asked), turn, turns, sample, api)
            except web.HTTPRequestEntityTooLarge as error:
                return refuse(error.text, 413)
            except KeyError as error:
                return refuse(f"{error} is missing")
            except Exception as error:  # of any type: a template may raise it
                return refuse(f"{type(error).__name__}: {first_line(error)}")
            finally:
                if not turn.tools:  # it has no answer: refused, or the client has left
                    turns.remove(turn)
            answer = api.from_chat(answer)
            if asked.get("stream"):
                text = "".join(api.stream(answer))
                return web.Response(text=text, content_type="text/event-stream")
            return web.json_response(answer)

        async def models(_) -> web.Response:
            model = {"id": self.args.model, "object": "model"}
            return web.json_response({"object": "list", "data": [model]})

        path = f"/{secrets.token_urlsafe(16)}/v1"
        app = web.Application(client_max_size=BYTES_A_TOKEN * self.longest)
        app.router.add_get(f"{path}/models", models)
        for api in APIS:
            app.router.add_post(f"{path}/{api.path}", functools.partial(respond, api))
        # Once a client has left, its `respond` is cancelled.
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
            reward = await process.ask("play", url, conversation.row["columns"])
        finally:
            # `play` may have ended before the answer to a request.
            self._lay_out([turn for turn in turns if turn.tokens], conversation)
            await runner.cleanup()
        if not conversation.outputs["response_mask"].any():
            raise EnvironmentFailure("play asked for nothing that trains")
        if reward is not None:
            conversation.rewards[-1] = reward
        return "done"

    async def _answer(
        self, given: dict, turn: Turn, turns: list[Turn], sample: Callable, api: Api
    ) -> dict:
        """Return the answer to a request of Chat Completions; raise ValueError or another exception
        if it cannot have any.

        Args:
            given: the request.
            turn: one of `turns`, which are all of the response; its fields are set.
            sample: see `Conversations._converse`.
        """
        asked = without_empty(given, empty=(None,))
        for name, value in asked.items():
            is_off = name in OFF and not value
            if not is_off and name not in READ and value not in FIXED.get(name, ()):
                raise ValueError(f"{name} {value!r} is not supported")
        args = copy.copy(self.args)  # not `replace`, which refuses temperature 0
        if len(turns) > args.max_turns:
            raise ValueError(f"a response has at most --max_turns {args.max_turns} requests")

        messages = plain(asked["messages"])
        tools = json.dumps(asked.get("tools", []))
        prompt = await asyncio.to_thread(self._prompt, messages, tools, turns)
        room = min(args.max_response_length, self.longest - len(prompt))
        length = int(min(room, asked.get("max_completion_tokens", asked.get("max_tokens", room))))
        args.temperature = min(args.temperature, asked.get("temperature", args.temperature))
        stops = asked.get("stop", [])
        stops = [stops] if isinstance(stops, str) else stops
        # The engine would fail, and the run.
        if not prompt or length < 1 or args.temperature < 0 or not all(map(str.encode, stops)):
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, and the maximum context length is {self.longest}; "
                "max_tokens has to be 1 or more, temperature 0 or more, and stop without empty texts"
            )

        args.turn_stop = (*args.turn_stop, *stops)
        repetition = sum(other.prompt == prompt for other in turns)
        turn.prompt = prompt
        sampled = await sample(prompt, length, args, repetition)
        if sampled is None:
            await asyncio.Future()  # the conversation is cancelled
        tokens, outputs = sampled
        turn.tokens = tokens.tolist()
        if args.temperature == self.args.temperature:  # of the policy that trains
            turn.outputs = outputs

        content, text, ended = self.read(turn.tokens, args.turn_stop)
        for stop in stops:
            content = content.partition(stop)[0]
        message = {"role": "assistant", "content": content}
        reason = "stop" if ended else "length"
        template = self.template_of(tools)
        said, calls = template.parse(text)
        may_call = asked.get("tool_choice") != "none"
        if may_call and calls and all(isinstance(call, tuple) for call in calls):
            reason = "tool_calls"
            message["content"] = said
            message["tool_calls"] = [
                {
                    "index": i,
                    "id": f"call_{len(prompt)}_{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for i, (name, arguments) in enumerate(calls)
            ]
        if api.thoughts_apart and "</think>" in message["content"]:
            thought, _, said = message["content"].partition("</think>")
            message["reasoning_content"] = thought.removeprefix("<think>").strip("\n")
            message["content"] = said.lstrip("\n")
        turn.messages = [*messages, *plain([message])]
        turn.tools = tools  # last: `_prompt`, in another thread, finds the turn by it
        return completion(turn, message, reason, args.model)

    def _prompt(self, messages: list[dict], tools: str, turns: list[Turn]) -> list[int]:
        """Return the token ids of a request."""
        template = self.template_of(tools)
        for turn in sorted(turns, key=lambda turn: -len(turn.messages)):
            count = len(turn.messages)
            if (turn.tools, turn.messages) == (tools, messages[:count]):
                following = template.observation_ids(messages[count:], turn.tokens[-1])
                return turn.prompt + turn.tokens + following
        return template.encode(template.prompt(messages), special=not template.has_template)

    def _lay_out(self, turns: list[Turn], conversation: Conversation) -> None:
        """Give a conversation the tokens of its turns, one context after the other.

        In this order a turn follows the one that it continues, whenever parallel requests came.
        """
        conversation.turns = [turn.messages[-1] for turn in turns]
        conversation.tool_calls = sum(len(x.get("tool_calls", ())) for x in conversation.turns)
        context: list[int] = []
        for turn in sorted(turns, key=lambda turn: (turn.prompt, turn.tokens)):
            if not context:
                context = turn.prompt
                read = {"prompt": self.tokenizer.decode(context), "query": context}
                conversation.row = {**conversation.row, **read}
            elif turn.prompt[: len(context)] != context:
                conversation.starts.append(len(conversation.response))
                context = []
            conversation.add(turn.prompt[len(context) :])
            conversation.add(turn.tokens, turn.outputs)
            context = turn.prompt + turn.tokens


def completion(turn: Turn, message: dict, reason: str, model: str) -> dict:
    """Return an answer as Chat Completions writes it."""
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "finish_reason": reason, "message": message}],
        "usage": {
            "prompt_tokens": len(turn.prompt),
            "completion_tokens": len(turn.tokens),
            "total_tokens": len(turn.prompt + turn.tokens),
        },
    }


def plain(messages: list[dict]) -> list[dict]:
    """Return what messages say, however a client library writes it, as chat templates read it; raise
    UserError, with the turn and key, for what cannot be read.

    A key without a value counts as none. A result has the name of the call that its id belongs to.
    """
    given = [{name: x for name, x in turn.items() if x} for turn in messages]
    names: dict[str, str] = {}  # of calls, by their ids
    said = []
    for message in read_messages("messages", given):
        turn = message.as_dict()
        if name := names.get(turn.pop("tool_call_id", "")):
            turn.setdefault("name", name)
        for call in turn.get("tool_calls", ()):
            names[call.pop("id", "")] = call["function"]["name"]
        said.append(turn)
    return said
