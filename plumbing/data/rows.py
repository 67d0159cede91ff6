"""Rows, as dicts, of built-in tasks, files, folders and hub data sets."""

import csv
import json
import os
import random
import zlib
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from utils import exit_on_error, fail, find_hub, warn

# ---- built-in tasks ------------------------------------------------------------------------------

BUILT_IN = {  # rows of each split
    "arithmetic": {"train": 20_000, "test": 1_000},
    "reasoning_gym": {"train": 5_000, "test": 500},
}


def arithmetic_rows(split: str, size: int) -> list[dict]:
    """Return `size` random problems of 3-digit addition, the same on every machine.

    A tenth of all problems, chosen by a hash of the problem, is held out: "test" draws from that
    tenth only and "train" never does. A row is {"prompt": "737+361=", "answer": "1098", "solution":
    what `worked_addition` gives}.
    """
    numbers = random.Random(f"arithmetic {split}")
    rows = []
    while len(rows) < size:
        first = numbers.randint(100, 999)
        second = numbers.randint(100, 999)
        prompt = f"{first}+{second}="
        held_out = zlib.crc32(prompt.encode()) % 10 == 0
        if held_out == (split == "test"):
            solution = worked_addition(prompt, 0.0, random.Random(0))
            rows.append({"prompt": prompt, "answer": str(first + second), "solution": solution})
    return rows


def worked_addition(prompt: str, noise: float, numbers: random.Random) -> str:
    """Return the worked answer to a prompt of `arithmetic_rows`, column by column and with the
    carries.

    For "737+361=" it is "7+1+0=8 3+6+0=9 7+3+0=10 #### 1098".

    Args:
        noise: probability with which a column gets a wrong digit, which the final answer repeats.
        numbers: where the mistakes come from.
    """
    first, second = prompt.removesuffix("=").split("+")
    columns = []
    answer = ""
    carry = 0
    for a, b in zip(reversed(first), reversed(second)):
        next_carry, digit = divmod(int(a) + int(b) + carry, 10)
        if numbers.random() < noise:
            digit = (digit + numbers.randint(1, 9)) % 10
        columns.append(f"{a}+{b}+{carry}={next_carry or ''}{digit}")
        answer = f"{digit}{answer}"
        carry = next_carry
    return f"{' '.join(columns)} #### {carry or ''}{answer}"


def reasoning_gym_rows(task: str, split: str, size: int) -> list[dict]:
    """Return `size` generated problems of a reasoning_gym task; training and test ones come from
    different seeds.

    The column "reasoning_gym", [task, size, seed, index], is what generates the problem again: the
    scorer needs it.
    """
    import reasoning_gym

    seed = {"train": 1, "test": 2}[split]
    entries = reasoning_gym.create_dataset(task, size=size, seed=seed)
    return [
        {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "reasoning_gym": [task, size, seed, index],
        }
        for index, entry in enumerate(entries)
    ]


# ---- reading rows --------------------------------------------------------------------------------


def split_of(name: str, default: str = "train") -> tuple[str, str]:
    """Return the name of a data set and its split: "openai/gsm8k@test" -> ("openai/gsm8k", "test").

    The @ in the name of a file or folder that exists is part of that name.
    """
    path, at, split = name.rpartition("@")
    return (path, split) if at and not os.path.exists(name) else (name, default)


def read_rows(flag: str, name: str, split: str) -> list[dict]:
    """Return the rows of a data set as dicts; exit with code 2 if it cannot be read or is empty.

    Args:
        flag: the option that named it, for messages.
        name: "arithmetic"; "reasoning_gym:TASK"; a .jsonl, .json, .csv or .parquet file; a folder;
            "owner/name" or "owner/name:config" on the hub; each with or without "@split".
        split: the split to read where `name` has none. A single file has only one split, whatever
            it is called.
    """
    name, split = split_of(name, split)
    kind, _, task = name.partition(":")
    if kind in BUILT_IN and split not in BUILT_IN[kind]:
        fail(f"{flag} {name}: has the splits {' and '.join(BUILT_IN[kind])}, not {split!r}")
    with exit_on_error(f"{flag} {name}"):
        if kind == "arithmetic":
            rows = arithmetic_rows(split, BUILT_IN[kind][split])
        elif kind == "reasoning_gym":
            rows = reasoning_gym_rows(task, split, BUILT_IN[kind][split])
        elif os.path.isfile(name):
            rows = read_file(flag, name)
        elif os.path.isdir(name) or name.count("/") == 1:
            rows = read_data_set(name, split)
        else:
            raise ValueError(
                "not a built-in task (arithmetic), a file, a folder, or an owner/name on the hub"
            )
    if not rows:
        fail(f"{flag} {name}: has no rows in split {split!r}")
    return check(f"{flag} {name}", rows, ROWS)


def read_file(flag: str, name: str) -> list[dict]:
    """Return the rows of a .jsonl, .json (a list of rows), .csv (all columns are text) or .parquet
    file.

    `datasets` reads these, too, but gives each column one type for all rows.
    """
    if name.endswith(".parquet"):
        import pyarrow.parquet

        return pyarrow.parquet.read_table(name).to_pylist()
    if not name.endswith((".jsonl", ".json", ".csv")):
        raise ValueError("a file has to end in .jsonl, .json, .csv or .parquet")
    rows = []
    with open(name, encoding="utf-8-sig", newline="") as file:
        if name.endswith(".json"):
            return json.load(file)
        if name.endswith(".csv"):
            return list(csv.DictReader(file, strict=True))
        for number, line in enumerate(file, 1):
            with exit_on_error(f"{flag} {name}: row {number}"):
                rows += [json.loads(line)] if line.strip() else []
    return rows


def read_data_set(name: str, split: str) -> list[dict]:
    """Return the rows of a split of a folder, or of "owner/name" or "owner/name:config" on the
    hub.
    """
    on_hub = not os.path.isdir(name)
    config = ""
    if on_hub:
        find_hub()  # before the import, which reads what it sets
        name, _, config = name.partition(":")
    import datasets

    datasets.utils.logging.set_verbosity_error()
    if on_hub and not config and "main" in datasets.get_dataset_config_names(name):  # GSM8K has two
        config = "main"
    return datasets.load_dataset(name, config or None, split=split).to_list()


def leave_out(where: str, rows: list, kept: list, why: str) -> list:
    """Return the rows that are kept; count the others in one line, and exit with code 2 if none is
    left.
    """
    message = f"{where}: left out {len(rows) - len(kept)} of {len(rows)} rows, {why}"
    if not kept:
        fail(message)
    if len(kept) < len(rows):
        warn(message)
    return kept


# ---- checks --------------------------------------------------------------------------------------


class MixtureEntry(BaseModel):
    """An entry of a list of data sets."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prob: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Weight of the data set; the sum over the list need not be 1."""
    filepath: Annotated[str, Field(min_length=1)]
    """Any data set, with or without @split; a file relative to the folder of the list."""


ROWS = TypeAdapter(list[dict[str, Any]])
ENTRIES = TypeAdapter(list[MixtureEntry])


def check(where: str, value, adapter: TypeAdapter, item: str = "row"):
    """Return a value as pydantic reads it; exit with code 2, and the item, field and message of
    pydantic's first error.

    Args:
        where: where the value is from. item: what an item of it is, if it is a list.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        fields = list(first["loc"])
        if fields and isinstance(fields[0], int):
            where = f"{where} {item} {fields.pop(0) + 1}"
        fail(f"{': '.join([where, *map(str, fields)])}: {first['msg']}")


def is_number(value) -> bool:
    """Return whether a value of a file is a number that float32 can hold; true and false are not
    numbers.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30


def read_parts(flag: str, name: str, split: str) -> list[tuple[str, list[dict], float]]:
    """Return the data sets of a list, a .json file of `MixtureEntry`s, as (name, rows, weight); any
    other one alone.

    Args:
        flag, name, split: as in `read_rows`.
    """
    path, split = split_of(name, split)
    rows = read_rows(flag, path, split)
    if not (path.endswith(".json") and any("filepath" in row for row in rows)):
        return [(path, rows, 1.0)]
    parts = []
    for entry in check(f"{flag} {path}", rows, ENTRIES, "entry"):
        in_folder = os.path.join(os.path.dirname(path), entry.filepath)
        source = in_folder if os.path.exists(split_of(in_folder)[0]) else entry.filepath
        parts.append((entry.filepath, read_rows(f"{flag} {path}:", source, split), entry.prob))
    return parts
