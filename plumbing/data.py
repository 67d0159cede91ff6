"""The data sets of a run: rows turned into prompts as token ids, and the order in which a run takes them.

Imports plumbing.rows, which reads the rows.
"""

import functools
import os

from tqdm import tqdm

from plumbing.rows import read_rows
from utils import fail, first_line, generator, warn

# The columns that are looked for, in this order. Knights-and-Knaves rows have their solution as text, too.
PROMPT_COLUMNS = ("prompt", "question", "messages", "problem", "quiz", "src")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution_text", "solution", "tgt")


# ---- the data sets of a run ------------------------------------------------------------------------------------------


def load_train_and_eval(args, tokenizer, answer_for: str) -> tuple[list[dict], list[dict]]:
    """Return the prompts to train on, and those to evaluate on ([] for none), which are never trained on."""
    train, held_out = load_prompts("--dataset", args.dataset, args.dataset_split, tokenizer, args, answer_for), []
    if args.eval_every and (args.eval_dataset or not os.path.isfile(args.dataset)):
        name = args.eval_dataset or args.dataset
        held_out = load_prompts("--eval_dataset", name, args.eval_split, tokenizer, args, answer_for)
        held_out = held_out[: args.eval_prompts or None]
    kept = without(train, {row["prompt"] for row in held_out})
    if len(kept) < len(train):
        warn(f"--dataset {args.dataset}: left out {len(train) - len(kept)} rows whose prompts are evaluated on")
    if not kept:
        fail(f"--dataset {args.dataset}: every row is evaluated on, none is left to train on")
    return kept, held_out


def load_prompts(flag: str, name: str, split: str, tokenizer, args, answer_for: str = "") -> list[dict]:
    """Read a data set, or a .json list of them, and turn each row into a prompt, once and for all, as token ids.

    Args:
        flag, name, split: as in `read_rows`; name may also be a .json list of {"prob": weight, "filepath": any of
            these, relative to the list's own folder}.
        args: --prompt_column, --answer_column, --system_prompt and --max_prompt_length.
        answer_for: the flag that needs an answer in every row, such as "--reward math"; "" if none does.
    Returns:
        Rows {"prompt": the text that the model sees, "query": its token ids, "answer": ..., every other column}; a
        Mixture for a list of data sets. Ends the run, naming the row, on whatever is missing, empty or too long.
    """
    rows = read_rows(flag, name, split)
    if not is_list_of_data_sets(name, rows):
        return encode_rows(f"{flag} {name}", rows, tokenizer, args, answer_for)
    parts = []
    for number, entry in enumerate(rows, 1):
        weight, path = entry.get("prob"), entry["filepath"]
        named, numeric = isinstance(path, str) and path.strip(), isinstance(weight, (int, float))
        if not named or not numeric or not 0 < weight < 1e300:
            fail(f"{flag} {name} entry {number}: takes a prob above 0 and a filepath, not {str(entry)[:60]}")
        in_folder = os.path.join(os.path.dirname(name), path)
        path = in_folder if os.path.exists(in_folder) else path
        part = read_rows(flag, path, split)
        if is_list_of_data_sets(path, part):  # itself, perhaps
            fail(f"{flag} {path}: is a list of data sets and stands in another, {name}")
        parts.append((encode_rows(f"{flag} {path}", part, tokenizer, args, answer_for), weight))
    return Mixture(parts)


def is_list_of_data_sets(name: str, rows: list[dict]) -> bool:
    return name.endswith(".json") and all("filepath" in row for row in rows)


def encode_rows(where: str, rows: list[dict], tokenizer, args, answer_for: str) -> list[dict]:
    """Turn the rows of one data set into prompts; see `load_prompts`. `where` names it in messages."""
    prompt_column = find_column(where, "--prompt_column", args.prompt_column, PROMPT_COLUMNS, rows[0], required=True)
    answer_column = find_column(
        where, "--answer_column", args.answer_column, ANSWER_COLUMNS, rows[0], required=bool(answer_for)
    )
    prompts = []
    for number, row in enumerate(tqdm(rows, desc=f"reading {where}", delay=2, leave=False), 1):
        at = f"{where} row {number}"
        for column in {"prompts", "responses"} & row.keys():
            fail(f"{at}: has a column {column!r}, which is a name that reward functions get something else by")
        prompt, answer = prompt_and_answer(at, row, prompt_column, answer_column)
        text, query = encode_prompt(at, prompt, tokenizer, args.system_prompt)
        if len(query) > args.max_prompt_length:
            fail(f"{at}: the prompt has {len(query)} tokens, over --max_prompt_length {args.max_prompt_length}")
        if answer_for and (answer is None or not str(answer).strip()):
            fail(f"{at}: has no answer in {answer_column!r}, which {answer_for} needs")
        others = {key: value for key, value in row.items() if key not in (prompt_column, answer_column)}
        prompts.append({**others, "prompt": text, "query": query, "answer": answer})
    return prompts


def load_supervised(args, tokenizer, stop_ids: list[int]) -> list[dict]:
    """Return the rows of --ptx_dataset: {"query": token ids of the prompt, "response": those of the text to imitate}.

    The text stands in the answer column, or is the last turn of messages. A stop token is added to it.
    """
    name, supervised = args.ptx_dataset, []
    for number, row in enumerate(read_rows("--ptx_dataset", name, "train"), 1):
        where = f"--ptx_dataset {name} row {number}"
        columns = first_filled(row, PROMPT_COLUMNS), first_filled(row, ANSWER_COLUMNS)
        prompt, text = prompt_and_answer(where, row, *columns)
        last = prompt[-1] if text is None and isinstance(prompt, list) else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            prompt, text = prompt[:-1], last.get("content")
        if not isinstance(text, str) or not text.strip():
            fail(f"{where}: has no text to imitate in {', '.join(ANSWER_COLUMNS)} or in a last turn of the assistant")
        _, query = encode_prompt(where, prompt, tokenizer, args.system_prompt)
        response = [*encode_text(where, text, tokenizer, special=False), stop_ids[0]]
        for option, ids in (("max_prompt_length", query), ("max_response_length", response)):
            if len(ids) > getattr(args, option):
                fail(f"{where}: has {len(ids)} tokens, over --{option} {getattr(args, option)}")
        supervised.append({"query": query, "response": response})
    return supervised


def token_lengths(prompts: list[dict], eval_prompts: list[dict], supervised: list[dict]) -> dict[str, list[int]]:
    """Return the tokens of each row by what it is for, {name: [tokens]}, for the statistics that a run shows."""
    rows = {"prompts": prompts, "held-out prompts": eval_prompts, "supervised rows": supervised}
    return {
        name: [len(row["query"]) + len(row.get("response", ())) for row in part] for name, part in rows.items() if part
    }


# ---- the prompt and the answer of a row ------------------------------------------------------------------------------


def find_column(where: str, option: str, named: str, known: tuple[str, ...], row: dict, required: bool) -> str | None:
    """Return the column that a flag names, or else the first known one of a row; None if there is none.

    End the run if a named column, or a required one, is missing.
    """
    column = named or next((column for column in known if column in row), None)
    if column not in row and (named or required):
        missing = f"no column {column!r}" if column else f"none of the columns {', '.join(known)}"
        fail(f"{where}: has {missing}; name one with {option}, there are {', '.join(row)}")
    return column


def first_filled(row: dict, columns: tuple[str, ...]) -> str | None:
    """Return the first of some columns in which a row has something, None if there is none."""
    return next((column for column in columns if row.get(column)), None)


def prompt_and_answer(where: str, row: dict, prompt_column: str | None, answer_column: str | None) -> tuple:
    """Return the prompt of a row (text or messages, if it is valid) and its answer (anything, None if it has none)."""
    prompt, answer = row.get(prompt_column), row.get(answer_column)
    if prompt_column == "src":
        prompt, reference = conversation(where, prompt, row.get("tgt"))
        answer = reference if answer_column == "tgt" else answer
    return prompt, answer


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


def encode_prompt(where: str, prompt, tokenizer, system_prompt: str) -> tuple[str, list[int]]:
    """Return a prompt as the text and as the token ids that the model sees; end the run if it is not valid.

    Args:
        prompt: text, which becomes one user turn; or messages, a list of {"role", "content"}. A tokenizer without a
            chat template takes text only, as it is.
        system_prompt: stands before a prompt that has no system turn; "" for none.
    """
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
        if not prompt.strip():
            fail(f"{where}: the prompt is empty")
    else:
        messages = prompt
        is_turn = lambda turn: isinstance(turn, dict) and {"role", "content"} <= set(turn)
        if not (isinstance(messages, list) and messages and all(map(is_turn, messages))):
            fail(f"{where}: a prompt is text or a list of messages with role and content, not {str(prompt)[:60]!r}")
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            fail(f"{where}: has messages or several turns, but the tokenizer of --model has no chat template")
        bos = tokenizer.bos_token or ""  # the text may bring its own, which stays in front
        text = (f"{system_prompt}\n" if system_prompt else "") + prompt.removeprefix(bos)
        text = bos + text if prompt.startswith(bos) else text
    else:
        if system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of their own and raise whatever they like
            fail(f"{where}: the chat template of --model refuses it ({first_line(error)})")
    ids = encode_text(where, text, tokenizer, special=tokenizer.chat_template is None)  # else the template wrote them
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


# ---- the order in which a run takes its prompts ----------------------------------------------------------------------


class Mixture(list):
    """The rows of several data sets, which `take_prompts` takes in turns."""

    def __init__(self, parts: list[tuple[list[dict], float]]):
        """`parts`: the rows of each data set, and the weight with which it gets its turns."""
        super().__init__(row for rows, _ in parts for row in rows)
        self.parts, self.counts = parts, [0] * len(parts)
        self.turns: list[tuple[int, int]] = []  # (part, position in it) of the positions that were asked for so far

    def turn(self, position: int) -> tuple[int, int]:
        """Return the part, and the position in it, of a position of the mixture's endless stream.

        The parts take turns as evenly as their weights allow: next is the one that lags most behind its share.
        """
        total = sum(weight for _, weight in self.parts)
        while len(self.turns) <= position:
            lags = [weight / total * (len(self.turns) + 1) - n for (_, weight), n in zip(self.parts, self.counts)]
            part = lags.index(max(lags))
            self.turns.append((part, self.counts[part]))
            self.counts[part] += 1
        return self.turns[position]


def without(rows: list[dict], prompts: set[str]) -> list[dict]:
    """Return the rows whose prompt is not one of `prompts`; of a Mixture, one of the parts that are left."""
    if isinstance(rows, Mixture):
        parts = [(without(part, prompts), weight) for part, weight in rows.parts]
        return Mixture([(part, weight) for part, weight in parts if part])
    return [row for row in rows if row["prompt"] not in prompts]


def take_prompts(prompts: list[dict], position: int, count: int, seed) -> list[dict]:
    """Return the prompts `position ... position + count - 1` of an endless stream of passes, each shuffled anew.

    In a Mixture, each data set has passes of its own.
    """
    positions = range(position, position + count)
    if isinstance(prompts, Mixture):
        turns = map(prompts.turn, positions)
        return [take_prompts(prompts.parts[part][0], index, 1, (seed, part))[0] for part, index in turns]
    size = len(prompts)
    return [prompts[pass_order(seed, i // size, size)[i % size]] for i in positions]


@functools.lru_cache(maxsize=64)
def pass_order(seed, number: int, size: int) -> list[int]:
    """Return the order of the rows in a pass over `size` of them."""
    return generator("prompts", seed, number).permutation(size).tolist()
