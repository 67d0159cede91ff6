"""What a message of a conversation is: who speaks, what the message says, and what it calls.

A key of a message that nothing reads is an error.
"""

import json
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)

from plumbing.data.rows import validate

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # a message's keys; templates read one


def without_empty(value: Any, *, empty: tuple = (None, [], {})):
    """Return an object without its keys that are empty; any other value as it is."""
    if not isinstance(value, dict):
        return value
    return {name: x for name, x in value.items() if x not in empty}


class Strict(BaseModel):
    """A part of a row in which a key that nothing reads is an error, and one that is null, or an
    empty list or object, counts as absent.
    """

    model_config = ConfigDict(extra="forbid")
    drop_empty = model_validator(mode="before")(without_empty)


class Function(Strict):
    """What a turn calls, and with which arguments, an object or its text."""

    name: str
    arguments: dict[str, Any] = {}

    @field_validator("arguments", mode="before")
    @classmethod
    def as_object(cls, value: Any):
        """Read JSON text, "" and null, too: whatever a model writes, pydantic's Json does not."""
        if isinstance(value, str):
            value = json.loads(value or "null")
        return {} if value is None else value


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = Field(None, exclude=True)  # in a stream of chunks
    function: Function

    @model_validator(mode="before")
    @classmethod
    def nested(cls, value: Any):
        """Read {"name", "arguments"}, too."""
        is_flat = isinstance(value, dict) and value.get("name") is not None
        return {"function": value} if is_flat else value


class Message(Strict):
    """A turn of a conversation."""

    role: str
    content: str = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)  # [] would be copied each time
    thought: str = Field("", validation_alias=AliasChoices(*THOUGHTS))
    name: str | None = None
    tool_call_id: str | None = None
    # 0 for a turn of the assistant that is not learned; other turns never are
    weight: Literal[0, 1, False, True] = Field(1, validation_alias=AliasChoices("weight", "train"))

    @field_validator("content", mode="before")
    @classmethod
    def joined(cls, value: Any):
        """Join the parts of a content; images and the like are refused."""
        if not isinstance(value, list):
            return value
        for part in map(without_empty, value):
            if not isinstance(part, dict) or part != {
                "type": "text",
                "text": str(part.get("text")),
            }:
                raise ValueError(f"only parts of type text are read, not {part!r:.80}")
        return "".join(part["text"] for part in value)

    @field_validator("weight")
    @classmethod
    def is_read(cls, weight: int, info: ValidationInfo) -> int:
        if weight and info.data.get("role") != "assistant":
            raise ValueError("only turns of the assistant are learned")
        return weight

    @property
    def says(self) -> bool:
        """Whether the message has a text, a call or a thought."""
        return bool(self.content.strip() or self.tool_calls or self.thought)

    @property
    def is_learned(self) -> bool:
        """Whether the message is a turn of the assistant to learn, where rows are learned from."""
        return self.role == "assistant" and bool(self.weight) and self.says

    def as_dict(self) -> dict:
        """Return what the message says: its content, and its other keys but the weight."""
        calls = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        return without_empty(
            {
                "role": self.role,
                "name": self.name,
                "tool_call_id": self.tool_call_id,
                "tool_calls": calls,
                THOUGHTS[0]: self.thought or None,
                "content": self.content,
            }
        )


MESSAGES = TypeAdapter(Annotated[list[Message], Field(min_length=1)])


def read_messages(where: str, turns: Any, role: str = "user") -> list[Message]:
    """Return messages as they are checked; raise a UserError, with the turn and key, if they are none.

    Results of tools are put into the order of their calls, as many chat templates do not write the
    ids.

    Args:
        turns: messages, or the text of the only one. role: of the text.
    """
    if isinstance(turns, str):
        turns = [{"role": role, "content": turns}]
    made: list[Message] = []
    messages = validate(where, turns, MESSAGES, "turn")
    for _, of_role in groupby(messages, lambda message: message.role):
        places = {call.id: i for message in made[-1:] for i, call in enumerate(message.tool_calls)}
        made += sorted(of_role, key=lambda message: places.get(message.tool_call_id, 0))
    return made


def is_turn_of_assistant(messages: Any) -> bool:
    """Return whether a value is a list of messages of which the last one is the assistant's."""
    match messages:
        case [*_, {"role": "assistant"}]:
            return True
    return False
