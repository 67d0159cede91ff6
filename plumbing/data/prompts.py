"""A row turned into what a run needs of it: the prompt as the token ids that the model sees, and the reference answer.

Imports utils only.
"""

from utils import fail, first_line

# The columns that are looked for, in this order; a dot goes into an object. They are those of GSM8K, MATH,
# open-instruct (messages, ground_truth), verl (reward_model.ground_truth), TRL (prompt, solution, completion),
# PaddleNLP (src, tgt), and Knights-and-Knaves, whose solution as text stands before the one as a list.
PROMPT_COLUMNS = ("prompt", "question", "messages", "problem", "quiz", "src")
ANSWER_COLUMNS = (
    "answer", "ground_truth", "reward_model.ground_truth", "solution_text", "solution", "tgt", "completion"
)  # fmt: skip

ROLES = ("system", "developer", "user", "assistant", "tool")  # of turns; a chat template may have others


# ---- columns ---------------------------------------------------------------------------------------------------------


def value_at(row: dict, column: str | None):
    """Return what a row has in a column, where "a.b" is b in the object a; None if it has no such column."""
    if column is None or column in row:
        return row.get(column)
    value = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def is_filled(value) -> bool:
    """Return whether a row says anything in a column: neither null or NaN (pandas' null), nor empty or blank."""
    if value is None or value != value or value in ([], {}):
        return False
    return not isinstance(value, str) or bool(value.strip())


def find_column(
    where: str, option: str, named: str, known: tuple[str, ...], rows: list[dict], required: bool
) -> str | None:
    """Return the column that a flag names, or else the first known one in which any row has something, None for none.

    End the run if no row has anything in a named column, or in any known one where it is required.
    """
    for column in [named] if named else known:
        if any(is_filled(value_at(row, column)) for row in rows):
            return column
    if named or required:
        missing = f"no column {named!r} with anything in it" if named else f"none of the columns {', '.join(known)}"
        there = list(dict.fromkeys(name for row in rows[:1000] for name in row))
        fail(f"{where}: has {missing}; name one with {option}, there are {', '.join(there)}")
    return None


# ---- the prompt and the answer of a row ------------------------------------------------------------------------------


def prompt_and_answer(where: str, row: dict, prompt_column: str | None, answer_column: str | None) -> tuple:
    """Return the prompt of a row (text or messages, not yet checked) and its reference answer (anything, or None).

    Messages that end with a turn of the assistant lose it: it is the reference, unless the row has another one.
    """
    prompt, answer = value_at(row, prompt_column), value_at(row, answer_column)
    if prompt_column == "src":
        prompt, reference = conversation(where, prompt, row.get("tgt"))
        answer = reference if answer_column == "tgt" else answer
    if is_turn_of_assistant(prompt):
        prompt, said = prompt[:-1], text_of(where, prompt[-1])
        if not prompt:
            fail(f"{where}: has a turn of the assistant and nothing before it")
        if is_turn_of_assistant(prompt):
            fail(f"{where}: ends with two turns of the assistant")
        answer = answer if is_filled(answer) else said
    if answer is None and is_filled(row.get("instruction_id_list")):  # IFEval's rows, for the reward ifeval
        answer = {"instruction_id": row["instruction_id_list"], "kwargs": row.get("kwargs")}
    if is_turn_of_assistant(answer):  # TRL's completions are messages, too
        answer = text_of(where, answer[-1])
    return prompt, answer


def is_turn_of_assistant(messages) -> bool:
    """Return whether a value is a list of messages of which the last one is the assistant's."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def text_of(where: str, message: dict) -> str:
    """Return the content of a message as text, its parts joined; end the run if there is anything but text in it."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    is_text = lambda part: isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    if not (isinstance(parts, list) and all(map(is_text, parts))):
        fail(f"{where}: the content of a message is text or a list of text parts, not {str(content)[:60]!r}")
    return "".join(part["text"] for part in parts)


def conversation(where: str, src, tgt) -> tuple:
    """Return the prompt and the reference answer of PaddleNLP's rows.

    With one `tgt` less than `src`, the last `src` is the turn to answer; with as many, the last `tgt` is its reference
    answer.

    Args:
        src: the turns of the user, a list or a single text. tgt: those of the assistant, or None.
    Returns:
        The prompt (text if it is a single turn, else messages), and the reference answer or None.
    """
    src, tgt = ([turns] if isinstance(turns, str) else turns for turns in (src, [] if tgt is None else tgt))
    if not all(isinstance(turns, list) for turns in (src, tgt)) or not len(src) - 1 <= len(tgt) <= len(src) or not src:
        fail(f"{where}: src and tgt take lists of turns, tgt as many as src or one less")
    if not all(isinstance(turn, str) and turn.strip() for turn in (*src, *tgt)):
        fail(f"{where}: every turn of src and tgt has to be text")
    reference = tgt[-1] if len(tgt) == len(src) else None
    if len(src) == 1:
        return src[0], reference
    messages = []
    for user, assistant in zip(src[:-1], tgt):
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*messages, {"role": "user", "content": src[-1]}], reference


# ---- token ids -------------------------------------------------------------------------------------------------------


def as_messages(where: str, prompt, system_prompt: str) -> list[dict]:
    """Return a prompt, text or messages, as messages with a system turn in front; end the run if it is not valid."""
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
        if not prompt.strip():
            fail(f"{where}: the prompt is empty")
    else:
        is_turn = lambda turn: isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn
        if not (isinstance(prompt, list) and prompt and all(map(is_turn, prompt))):
            fail(f"{where}: a prompt is text or a list of messages with role and content, not {str(prompt)[:60]!r}")
        messages = [{**turn, "content": text_of(where, turn)} for turn in prompt]
        if not messages[-1]["content"].strip():
            fail(f"{where}: the last turn of the prompt is empty")
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def encode_prompt(
    where: str, prompt, tokenizer, system_prompt: str, as_is: bool = False, tools: list[dict] | None = None
) -> tuple[str, list[int]]:
    """Return a prompt as the text and as the token ids that the model sees; end the run if it is not valid.

    Args:
        prompt: text, which becomes one user turn; or messages, a list of {"role", "content"}. A tokenizer without a
            chat template takes text only.
        system_prompt: stands before a prompt that has no system turn; "" for none.
        as_is: take a text without chat template and system prompt, for one that holds both already.
        tools: the schemas that the chat template shows to the model.
    """
    messages = as_messages(where, prompt, system_prompt)
    if as_is or tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            without = "--chat_template none takes text" if as_is else "the tokenizer of --model has no chat template"
            fail(f"{where}: has messages or several turns, but {without}")
        bos = tokenizer.bos_token or ""  # the text may bring its own, which stays in front
        text = (f"{system_prompt}\n" if system_prompt and not as_is else "") + prompt.removeprefix(bos)
        text = bos + text if prompt.startswith(bos) else text
        ids = encode_text(where, text, tokenizer)
    else:
        for role in {turn["role"] for turn in messages} - set(ROLES):
            named = any(f"{quote}{role}{quote}" in str(tokenizer.chat_template) for quote in "'\"")
            if not named:  # it would be left out, or shown as it is
                fail(f"{where}: has a turn of {role!r}; the roles are {', '.join(ROLES)}")
        try:
            text = tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of their own and raise whatever they like
            fail(f"{where}: the chat template of --model refuses it ({first_line(error)})")
        last = messages[-1]
        if last["role"] == "user" and not any(word in text for word in last["content"].split()):
            fail(f"{where}: the chat template of --model leaves out its last turn")
        ids = encode_text(where, text, tokenizer, special=False)  # the template has written the special tokens
    if not ids:
        fail(f"{where}: the tokenizer of --model makes no tokens of the prompt")
    return text, ids


def encode_text(where: str, text: str, tokenizer, special: bool = True) -> list[int]:
    """Return the token ids of a text; with `special`, those that the tokenizer puts around it, but no second BOS."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        fail(f"{where}: is no valid text ({first_line(error)})")
    ids = tokenizer.encode(text, add_special_tokens=special)
    return ids[1:] if special and ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def template_tokens(tokenizer) -> list[str]:
    """Return the special tokens that the chat template puts around a turn; none where there is no template."""
    if tokenizer.chat_template is None:
        return []
    turn = {"role": "user", "content": "x"}
    try:
        text = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    except Exception:  # which is said of the first row
        return []
    return [token for token in tokenizer.get_added_vocab() if token in text and token.strip()]  # some are white space
