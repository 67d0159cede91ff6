"""Rows, as dicts, of built-in tasks, files, folders and hub data sets.

Imports utils only.
"""

import json
import os
import random
import zlib

from tqdm import tqdm

from utils import fail, first_line

# ---- built-in tasks --------------------------------------------------------------------------------------------------

BUILT_IN = {  # rows of each split
    "arithmetic": {"train": 20_000, "test": 1_000},
    "reasoning_gym": {"train": 5_000, "test": 500},
}


def arithmetic_rows(split: str, size: int) -> list[dict]:
    """Return `size` random problems of 3-digit addition, the same on every machine.

    A tenth of all problems, chosen by a hash of the problem, is held out: "test" draws from that tenth only and
    "train" never does. A row is {"prompt": "737+361=", "answer": "1098"}.
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
    """Return the worked answer to a prompt of `arithmetic_rows`, column by column and with the carries.

    For "737+361=" it is "7+1+0=8 3+6+0=9 7+3+0=10 #### 1098".

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


def arithmetic_pairs(split: str) -> list[dict]:
    """Return preference pairs for `arithmetic_rows`: the worked answer, and the same with wrong digits.

    `subset` says how many of the three columns are wrong.
    """
    numbers, pairs = random.Random(f"pairs {split}"), []
    for row in read_rows("--dataset", "arithmetic", split):
        chosen = rejected = worked_addition(row["prompt"], 0.0, numbers)
        while rejected == chosen:
            rejected = worked_addition(row["prompt"], 0.3, numbers)
        wrong = sum(a[4:] != b[4:] for a, b in zip(chosen.split()[:3], rejected.split()))
        pairs.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected, "subset": f"{wrong} wrong"})
    return pairs


def reasoning_gym_rows(flag: str, task: str, split: str, size: int) -> list[dict]:
    """Return `size` generated problems of a reasoning_gym task; training and test ones come from different seeds.

    The column "reasoning_gym", [task, size, seed, index], is what generates the problem again: the scorer needs it.
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


# ---- reading rows ----------------------------------------------------------------------------------------------------


def split_of(name: str, default: str = "train") -> tuple[str, str]:
    """Return the name of a data set and its split: "openai/gsm8k@test" -> ("openai/gsm8k", "test").

    A file or folder whose own name has an @ in it is taken whole.
    """
    path, at, split = name.rpartition("@")
    return (path, split) if at and not os.path.exists(name) else (name, default)


def read_rows(flag: str, name: str, split: str) -> list[dict]:
    """Return the rows of a data set as dicts; end the run if it cannot be read or has none.

    Args:
        flag: the option that named it, for messages.
        name: "arithmetic"; "reasoning_gym:TASK"; a .jsonl, .json or .parquet file; a folder; "owner/name" or
            "owner/name:config" on the hub.
        split: the split to read where `name` has no @split; a single file has only one, whatever it is called.
    """
    name, split = split_of(name, split)
    if name == "arithmetic" or name.startswith("reasoning_gym:"):
        kind, _, task = name.partition(":")
        sizes = BUILT_IN[kind]
        if split not in sizes:
            fail(f"{flag} {name}: has the splits {' and '.join(sizes)}, not {split!r}")
        size = sizes[split]
        rows = reasoning_gym_rows(flag, task, split, size) if kind != name else arithmetic_rows(split, size)
    elif os.path.isfile(name):
        rows = read_file(flag, name)
    elif os.path.isdir(name) or name.count("/") == 1:
        rows = read_data_set(flag, name, split)
    else:
        fail(f"{flag} {name}: no built-in task (arithmetic), no such file or folder, and not an owner/name on the hub")
    if not rows:
        fail(f"{flag} {name}: has no rows in split {split!r}")
    return rows


def read_parts(flag: str, name: str, split: str) -> list[tuple[str, list[dict], float]]:
    """Return the data sets that a list of them names, as (name, rows, weight); any other data set alone.

    A list is a .json file of {"prob": weight, "filepath": a data set, relative to the list's own folder}. An entry may
    have a "split", in place of the one that is given here.

    Args:
        flag, name, split: as in `read_rows`.
    """
    name, split = split_of(name, split)
    rows = read_rows(flag, name, split)
    if not is_list_of_data_sets(name, rows):
        return [(name, rows, 1.0)]
    parts = []
    for number, entry in enumerate(rows, 1):
        at, weight, path = f"{flag} {name} entry {number}", entry.get("prob"), entry.get("filepath")
        for key in entry.keys() - {"prob", "filepath", "split"}:
            fail(f"{at}: has {key!r}, but takes prob, filepath and split")
        named = isinstance(path, str) and path.strip()
        if not named or not is_number(weight) or weight <= 0:
            fail(f"{at}: takes a prob above 0 and a filepath, not {str(entry)[:60]}")
        if not isinstance(entry.get("split", ""), str):
            fail(f"{at}: split takes a name, not {entry['split']!r}")
        in_folder = os.path.join(os.path.dirname(name), path)
        source = in_folder if os.path.exists(in_folder) else path
        part = read_rows(at, source, entry.get("split", split))
        if is_list_of_data_sets(source, part):  # itself, perhaps
            fail(f"{flag} {source}: is a list of data sets and stands in another, {name}")
        parts.append((f"{path}:{entry['split']}" if "split" in entry else path, part, float(weight)))
    return parts


def is_number(value) -> bool:
    """Return whether a value of a file is a number that float32 can hold; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30


def is_list_of_data_sets(name: str, rows: list[dict]) -> bool:
    """Return whether what was read are the entries of a list of data sets, right or wrong, and not rows."""
    entries = [row for row in rows if "filepath" in row]
    return name.endswith(".json") and bool(entries) and all("filepath" in row or "prob" in row for row in rows)


def read_file(flag: str, name: str) -> list[dict]:
    """Return the rows of a .jsonl, .json (a list of rows) or .parquet file.

    `datasets` reads these, too, but gives each column one type for all rows, and does not name the line of an error.
    """
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
                for line, text in enumerate(file, 1):  # noqa: B007 (read where it fails)
                    if text.strip():
                        rows.append(json.loads(text))
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


def read_data_set(flag: str, name: str, split: str) -> list[dict]:
    """Return the rows of a split of a folder, or of "owner/name" or "owner/name:config" on the hub."""
    import datasets

    datasets.utils.logging.set_verbosity_error()
    path, _, config = (name, "", "") if os.path.isdir(name) else name.partition(":")
    try:
        if any(os.path.exists(os.path.join(path, file)) for file in ("dataset_dict.json", "state.json")):
            data = datasets.load_from_disk(path)  # written by save_to_disk
            data = data if isinstance(data, datasets.DatasetDict) else {str(data.split or "train"): data}
            if split not in data:
                raise ValueError(f'Unknown split "{split}". Should be one of {list(data)}.')  # as load_dataset says
            data = data[split]
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
