"""Rows of files, hub data sets and built-in tasks, turned into prompts as token ids."""

import functools
import json
import os
import random
import zlib

from tqdm import tqdm

from plumbing.verifiers import ANSWER_REWARDS
from utils import fail, first_line, generator, warn

PROMPT_COLUMNS = ("prompt", "question", "messages", "problem", "quiz", "src")

# A Knights-and-Knaves row has its solution as text, too; "tgt" belongs to "src", see `conversation`.
ANSWER_COLUMNS = ("answer", "ground_truth", "solution_text", "solution", "tgt")


def arithmetic_rows(split: str, size: int) -> list[dict]:
    """The built-in task: `size` random problems of 3-digit addition, the same on every machine.

    A tenth of all problems, chosen by a hash of the problem, is held out: "test" draws from that tenth only and
    "train" never does. A row is {"prompt": "737+361=", "answer": "1098"}; the scorer reads what follows "####".
    """
    numbers = random.Random(f"arithmetic {split}")
    rows = []
    while len(rows) < size:
        first, second = numbers.randint(100, 999), numbers.randint(100, 999)
        prompt = f"{first}+{second}="
        held_out = zlib.crc32(prompt.encode()) % 10 == 0
        if held_out == (split == "test"):
            rows.append({"prompt": prompt, "answer": str(first + second)})
    return rows


def worked_addition(prompt: str, noise: float, numbers: random.Random) -> str:
    """The worked answer to a prompt of `arithmetic_rows`, column by column and with the carries: for "737+361=",
    "7+1+0=8 3+6+0=9 7+3+0=10 #### 1098".

    Args:
        noise: probability with which a column gets a wrong digit, which the final answer repeats.
        numbers: where the mistakes come from.
    """
    first, second = prompt.removesuffix("=").split("+")
    columns, answer, carry = [], "", 0
    for a, b in zip(reversed(first), reversed(second)):
        next_carry, digit = divmod(int(a) + int(b) + carry, 10)
        if numbers.random() < noise:
            digit = (digit + numbers.randint(1, 9)) % 10
        columns.append(f"{a}+{b}+{carry}={next_carry or ''}{digit}")
        answer, carry = f"{digit}{answer}", next_carry
    return f"{' '.join(columns)} #### {carry or ''}{answer}"


def reasoning_gym_rows(flag: str, task: str, split: str, size: int) -> list[dict]:
    """`size` generated problems of a reasoning_gym task; training and test ones come from different seeds.

    A row names its problem by what generates it, so that the scorer gets the very entry: "reasoning_gym": [task, size,
    seed, index].
    """
    try:
        import reasoning_gym
    except ImportError:
        fail(f"{flag} reasoning_gym:{task}: takes the package reasoning-gym (pip install reasoning-gym)")
    seed = {"train": 1, "test": 2}[split]
    try:
        entries = reasoning_gym.create_dataset(task, size=size, seed=seed)
    except Exception as error:  # no such task, or one that asks for more than a name
        fail(f"{flag} reasoning_gym:{task}: {first_line(error)}")
    return [
        {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": [task, size, seed, index]}
        for index, entry in enumerate(tqdm(entries, desc=f"making {task}", delay=2, leave=False))
    ]


def read_rows(flag: str, name: str, split: str) -> list[dict]:
    """The rows of a built-in task, a local file or folder, or a hub data set, as dicts.

    Args:
        flag: the option that named it, for messages.
        name: "arithmetic"; "reasoning_gym:TASK"; a .jsonl, .json or .parquet file; a folder; "owner/name" or
            "owner/name:config" on the hub.
        split: the split to read; a single file has only one, whatever it is called.
    """
    task = name.removeprefix("reasoning_gym:")
    if name == "arithmetic" or task != name:
        sizes = {"train": 20_000, "test": 1_000} if name == "arithmetic" else {"train": 5_000, "test": 500}
        if split not in sizes:
            fail(f"{flag} {name}: has the splits {' and '.join(sizes)}, not {split!r}")
        if name == "arithmetic":
            return arithmetic_rows(split, sizes[split])
        return reasoning_gym_rows(flag, task, split, sizes[split])
    import datasets

    datasets.utils.logging.set_verbosity_error()
    if os.path.isfile(name):
        return read_file(flag, name)
    if not os.path.isdir(name) and name.count("/") != 1:
        fail(f"{flag} {name}: no built-in task (arithmetic), no such file or folder, and not an owner/name on the hub")
    path, _, config = (name, "", "") if os.path.isdir(name) else name.partition(":")
    try:
        if os.path.exists(os.path.join(path, "dataset_dict.json")) or os.path.exists(os.path.join(path, "state.json")):
            loaded = datasets.load_from_disk(path)
            data = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            if not config and not os.path.isdir(path):
                configs = datasets.get_dataset_config_names(path)
                config = configs[0] if len(configs) == 1 else next((c for c in ("main", "default") if c in configs), "")
                if not config:
                    fail(f"{flag} {name}: take one of its configurations as {name}:CONFIG: {', '.join(configs)}")
            data = datasets.load_dataset(path, config or None, split=split)
    except Exception as error:  # the hub's clients raise many unrelated types, all of one meaning here
        fail(f"{flag} {name}: could not be read, split {split!r} ({first_line(error)})")
    return data.to_list()


def read_file(flag: str, name: str) -> list[dict]:
    """The rows of a .jsonl, .json (a list of rows) or .parquet file."""
    if name.endswith(".parquet"):
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(name).to_pylist()
        except Exception as error:  # its own types, and OverflowError for dates after 9999
            fail(f"{flag} {name}: not a readable parquet file ({first_line(error)})")
    if not name.endswith((".jsonl", ".json")):
        fail(f"{flag} {name}: a file has to end in .jsonl, .json or .parquet")
    rows, line = [], 0
    try:
        with open(name, "rb") as file:
            if name.endswith(".json"):
                rows = json.load(file)
            else:
                for line, item in enumerate(file, 1):  # noqa: B007
                    rows += [json.loads(item)] if item.strip() else []
    except OSError as error:
        fail(f"{flag} {name}: could not be read ({first_line(error)})")
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        fail(f"{flag} {name}: line {line or getattr(error, 'lineno', 1)} is not valid JSON ({first_line(error)})")
    if not isinstance(rows, list):
        fail(f"{flag} {name}: has to hold a list of rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            fail(f"{flag} {name} row {number}: has to be an object with named columns, not {type(row).__name__}")
    return rows


class Mixture(list):
    """The rows of several data sets, and how often each of them has its turn in `take_prompts`."""

    def __init__(self, parts: list[tuple[list[dict], float]]):
        super().__init__(row for rows, _ in parts for row in rows)
        self.parts, self.counts = parts, [0] * len(parts)
        self.turns: list[tuple[int, int]] = []  # what stands at the first positions, as far as they were asked for

    def turn(self, position: int) -> tuple[int, int]:
        """The part, and the position in it, of what stands at a position of the mixture's endless stream.

        The parts take turns as evenly as their weights allow: next is the one that lags most behind its share.
        """
        total = sum(weight for _, weight in self.parts)
        while len(self.turns) <= position:
            lags = [weight / total * (len(self.turns) + 1) - n for (_, weight), n in zip(self.parts, self.counts)]
            part = lags.index(max(lags))
            self.turns.append((part, self.counts[part]))
            self.counts[part] += 1
        return self.turns[position]


def load_mixture(flag: str, name: str, rows: list[dict], split: str, tokenizer, args) -> Mixture:
    """The data sets that a .json list of {"prob": weight, "filepath": data set} names, relative to its own folder."""
    parts = []
    for number, row in enumerate(rows, 1):
        where, weight, path = f"{flag} {name} entry {number}", row.get("prob"), row["filepath"]
        numeric, named = isinstance(weight, (int, float)), isinstance(path, str) and path.strip()
        if not named or not numeric or not 0 < weight < 1e300:
            fail(f"{where}: takes a prob above 0 and a filepath, not {str(row)[:60]}")
        beside = os.path.join(os.path.dirname(name), path)
        path = beside if os.path.exists(beside) else path
        parts.append((load_prompts(flag, path, split, tokenizer, args, inside=name), weight))
    return Mixture(parts)


def conversation(where: str, src, tgt) -> tuple:
    """PaddleNLP's rows of user turns `src` and assistant turns `tgt`, each a list or a single text.

    With one `tgt` less than `src`, the last `src` is the turn to answer; with as many, the last `tgt` is its reference
    answer.

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
    turns = [turn for pair in zip(src, [*tgt, ""]) for turn in pair][: 2 * len(src) - 1]
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)], reference


def load_prompts(flag: str, name: str, split: str, tokenizer, args, inside: str = "") -> list[dict]:
    """Read a data set and turn each row into a prompt, once and for all, as token ids.

    Args:
        flag, name, split: as in `read_rows`.
        args: --prompt_column and --answer_column, where "" takes the first known one (PROMPT_COLUMNS, ANSWER_COLUMNS),
            --system_prompt, --max_prompt_length, and --reward, some of which need an answer in every row.
        inside: the list of data sets that names it, if one does.
    Returns:
        Rows {"prompt": the text that the model sees, "query": its token ids, "answer": ..., every other column}; a
        Mixture for a .json list of data sets.
    Ends the run, naming the row, on whatever is missing, empty or too long.
    """
    rows = read_rows(flag, name, split)
    if not rows:
        fail(f"{flag} {name}: has no rows in split {split!r}")
    if name.endswith(".json") and all("filepath" in row for row in rows):
        if inside:  # itself, perhaps
            fail(f"{flag} {name}: is a list of data sets and stands in another, {inside}")
        return load_mixture(flag, name, rows, split, tokenizer, args)
    answer_for = next((f"--reward {reward}" for reward in args.reward if reward in ANSWER_REWARDS), "")
    columns = list(rows[0])
    prompt_column = args.prompt_column or next((c for c in PROMPT_COLUMNS if c in columns), "")
    answer_column = args.answer_column or next((c for c in ANSWER_COLUMNS if c in columns), "")
    for option, column, known, needed in (
        ("--prompt_column", prompt_column, PROMPT_COLUMNS, True),
        ("--answer_column", answer_column, ANSWER_COLUMNS, args.answer_column or answer_for),
    ):
        if needed and column not in columns:
            missing = f"no column {column!r}" if column else f"none of the columns {', '.join(known)}"
            fail(f"{flag} {name}: has {missing}; name one with {option}, there are {', '.join(columns)}")
    prompts = []
    for number, row in enumerate(tqdm(rows, desc=f"reading {name}", delay=2, leave=False), 1):
        where = f"{flag} {name} row {number}"
        for column in {"prompts", "responses"} & row.keys():
            fail(f"{where}: has a column {column!r}, which is a name that reward functions get something else by")
        prompt, answer = row.get(prompt_column), row.get(answer_column)
        if prompt_column == "src":
            prompt, reference = conversation(where, prompt, row.get("tgt"))
            answer = reference if answer_column == "tgt" else answer
        text, query = encode_prompt(where, prompt, tokenizer, args.system_prompt)
        if len(query) > args.max_prompt_length:
            fail(f"{where}: the prompt has {len(query)} tokens, over --max_prompt_length {args.max_prompt_length}")
        if answer_for and (answer is None or not str(answer).strip()):
            fail(f"{where}: has no answer in {answer_column!r}, which {answer_for} needs")
        others = {key: value for key, value in row.items() if key not in (prompt_column, answer_column)}
        prompts.append({**others, "prompt": text, "query": query, "answer": answer})
    return prompts


def load_train_and_eval(args, tokenizer) -> tuple[list[dict], list[dict]]:
    """The prompts to train on, and those to evaluate on ([] if there are none), which are never trained on."""
    train, held_out = load_prompts("--dataset", args.dataset, args.dataset_split, tokenizer, args), []
    if args.eval_every and (args.eval_dataset or not os.path.isfile(args.dataset)):
        held_out = load_prompts("--eval_dataset", args.eval_dataset or args.dataset, args.eval_split, tokenizer, args)
        held_out = held_out[: args.eval_prompts or None]
    evaluated = {row["prompt"] for row in held_out}
    others = lambda rows: [row for row in rows if row["prompt"] not in evaluated]
    kept = others(train)
    if isinstance(train, Mixture):
        kept = Mixture([(others(rows), weight) for rows, weight in train.parts if others(rows)])
    if len(kept) < len(train):
        warn(f"--dataset {args.dataset}: left out {len(train) - len(kept)} rows whose prompts are evaluated on")
    if not kept:
        fail(f"--dataset {args.dataset}: every row is evaluated on, none is left to train on")
    return kept, held_out


def load_supervised(args, tokenizer, stop_ids: list[int]) -> list[dict]:
    """The rows of --ptx_dataset, a prompt and the text to imitate: {"query": token ids, "response": token ids}.

    The text stands in the answer column, or is the last turn of messages; it ends with the stop token.
    """
    flag, name, rows = "--ptx_dataset", args.ptx_dataset, []
    for number, row in enumerate(read_rows(flag, name, "train"), 1):
        where = f"{flag} {name} row {number}"
        prompt = next((row[column] for column in PROMPT_COLUMNS if row.get(column)), None)
        text = next((row[column] for column in ANSWER_COLUMNS if row.get(column)), None)
        if prompt is not None and prompt is row.get("src"):
            prompt, reference = conversation(where, prompt, row.get("tgt"))
            text = reference if text is row.get("tgt") else text
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
        rows.append({"query": query, "response": response})
    if not rows:
        fail(f"{flag} {name}: has no rows")
    return rows


def encode_prompt(where: str, prompt, tokenizer, system_prompt: str) -> tuple[str, list[int]]:
    """A prompt (text, or a list of {"role", "content"} turns) as the text and the token ids that the model sees.

    Text becomes one user turn of the tokenizer's chat template, after `system_prompt`; a tokenizer without a template
    gets the text as it is.
    """
    is_text = isinstance(prompt, str)
    is_turn = lambda turn: isinstance(turn, dict) and {"role", "content"} <= set(turn)
    if not is_text and not (isinstance(prompt, list) and prompt and all(map(is_turn, prompt))):
        fail(f"{where}: a prompt is text or a list of messages with role and content, not {str(prompt)[:60]!r}")
    if is_text and not prompt.strip():
        fail(f"{where}: the prompt is empty")
    if tokenizer.chat_template is None:
        if not is_text:
            fail(f"{where}: has messages or several turns, but the tokenizer of --model has no chat template")
        bos = tokenizer.bos_token or ""  # the text may bring its own
        text = (f"{system_prompt}\n" if system_prompt else "") + prompt.removeprefix(bos)
        text = bos + text if prompt.startswith(bos) else text
    else:
        messages = [{"role": "user", "content": prompt}] if is_text else prompt
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
    """Token ids of a text; with `special`, those that the tokenizer puts around a text, but no second BOS."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        fail(f"{where}: is no valid text ({first_line(error)})")
    ids = tokenizer.encode(text, add_special_tokens=special)
    return ids[1:] if special and ids[:2] == [tokenizer.bos_token_id] * 2 else ids


@functools.lru_cache(maxsize=64)
def _shuffled(seed, epoch: int, size: int) -> list[int]:
    return generator("prompts", seed, epoch).permutation(size).tolist()


def take_prompts(prompts: list[dict], position: int, count: int, seed) -> list[dict]:
    """The prompts `position ... position + count - 1` of an endless stream of passes, each shuffled anew.

    In a Mixture, each data set has passes of its own.
    """
    if isinstance(prompts, Mixture):
        turns = [prompts.turn(i) for i in range(position, position + count)]
        return [take_prompts(prompts.parts[part][0], index, 1, (seed, part))[0] for part, index in turns]
    size = len(prompts)
    return [prompts[_shuffled(seed, i // size, size)[i % size]] for i in range(position, position + count)]


def token_lengths(prompts: list[dict], eval_prompts: list[dict], supervised: list[dict]) -> dict[str, list[int]]:
    """Return the tokens of each row by what it is for, {name: [tokens]}, for the statistics that a run shows."""
    rows = {"prompts": prompts, "held-out prompts": eval_prompts, "supervised rows": supervised}
    return {
        name: [len(row["query"]) + len(row.get("response", ())) for row in part] for name, part in rows.items() if part
    }
