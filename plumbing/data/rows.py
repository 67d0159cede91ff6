"""Rows, as dicts, of built-in tasks (assets/tasks.py), files, folders and hub data sets."""

import csv
import hashlib
import json
import os
from typing import Annotated, Any, Iterable, Iterator, TypedDict

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from assets import tasks
from utils import exit_on_error, fail, find_hub


class Row(TypedDict, total=False):
    """A prompt as a run reads it; `plumbing.data.mixture.make_prompts` makes it of a row of a data
    set.
    """

    prompt: str  # the text that the model sees
    query: list[int]  # its token ids
    messages: list[dict] | None  # the same as messages, None with --chat_template none
    answer: Any  # the reference, or None
    response: list[int]  # to learn from: its token ids
    mask: list[int]  # of the response: 1 where it is learned
    sources: list[str]  # of --reward, where the row names them
    dataset: str
    columns: dict  # the row as it was read
    turns: list[dict]  # of a conversation that has ended
    environment: float  # the sum of its rewards


LINE = "line of JSON"  # the column of rows whose columns have no types


def split_of(name: str, default: str = "train") -> tuple[str, str]:
    """Return the name of a data set and its split: "openai/gsm8k@test" -> ("openai/gsm8k", "test").

    The @ in the name of a file or folder that exists is part of that name.
    """
    path, at, split = name.rpartition("@")
    return (path, split) if at and not os.path.exists(name) else (name, default)


def read_rows(flag: str, name: str, split: str):
    """Return a data set as a `datasets.Dataset`, see `parse`.

    Exit with code 2 if the data set cannot be read, or is empty.

    Args:
        flag: the option that named it, for messages.
        name: a built-in task, or "reasoning_gym:TASK" (assets/tasks.py); a .jsonl, .json, .csv or
            .parquet file; a folder; "owner/name" or "owner/name:config" on the hub; each with or
            without "@split".
        split: the split to read where `name` has none. A single file has only one split, whatever
            it is called.
    """
    name, split = split_of(name, split)
    built_in, _, task = name.partition(":")
    sizes = tasks.BUILT_IN.get(built_in)
    on_hub = not sizes and not os.path.exists(name) and name.count("/") == 1
    if on_hub:
        find_hub()  # before the import, which reads what it sets
    import datasets

    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    where = f"{flag} {name}"
    with exit_on_error(where):
        try:
            if sizes and split not in sizes:
                raise ValueError(f"has the splits {' and '.join(sizes)}, not {split!r}")
            if sizes:
                return as_lines(where, getattr(tasks, built_in)(task, split, sizes[split]))
            if os.path.isfile(name):
                with open(name, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                rows = read_file(where, name, digest)
                rows._fingerprint = digest  # that of the library goes by path and time
                return rows
            if os.path.isdir(name) or on_hub:
                return read_data_set(name, split)
            raise ValueError(
                "not a built-in task (arithmetic, instructions), a file, a folder, or an owner/name on the hub"
            )
        except datasets.exceptions.DatasetGenerationError as error:  # does not say what it was
            raise error.__cause__ or error from None


def as_lines(where: str, rows):
    """Return rows as a data set of lines of JSON."""
    import datasets

    lines = list(map(json.dumps, validate(where, list(rows), ROWS)))
    return datasets.Dataset.from_dict({LINE: lines})


def read_file(where: str, name: str, digest: str):
    """Return a .jsonl, .json (a list of rows) or .csv file (all columns are text) as lines of JSON,
    since `datasets` gives each column one type for all rows; a .parquet file as it is.
    """
    import datasets

    if not os.path.getsize(name):
        fail(f"{where}: has no rows")
    folder = os.path.join(datasets.config.HF_DATASETS_CACHE, digest)
    _, ending = os.path.splitext(name)
    if ending == ".parquet":
        return datasets.Dataset.from_parquet(name, cache_dir=folder)
    if ending == ".jsonl":
        lines = datasets.Features({LINE: datasets.Value("string")})
        return datasets.Dataset.from_text(
            name, cache_dir=folder, features=lines, encoding="utf-8-sig"
        )
    with open(name, encoding="utf-8-sig", newline="") as file:
        if ending == ".json":
            return as_lines(where, json.load(file))
        if ending == ".csv":
            return as_lines(where, csv.DictReader(file, strict=True))
    raise ValueError("a file has to end in .jsonl, .json, .csv or .parquet")


def parse(where: str, table, indices: Iterable[int]) -> Iterator[tuple[int, dict]]:
    """Yield the number of each row of a `pyarrow.Table`, from 1, and the row.

    Args:
        where: of the data set. table: of columns, or of LINE alone. indices: of the rows.
    """
    is_lines = table.column_names == [LINE]
    for i, row in zip(indices, table[LINE].to_pylist() if is_lines else table.to_pylist()):
        at = f"{where} row {i + 1}"
        if is_lines and not row.strip():
            continue
        if is_lines:
            with exit_on_error(at):
                row = json.loads(row)
        yield i + 1, validate(at, row, ROW)


def first_rows(where: str, rows) -> list[dict]:
    """Return the first 1,000 rows of a data set; exit with code 2 if there are none."""
    table = rows.with_format("arrow")[:1000]
    first = [row for _, row in parse(where, table, range(1000))]
    if not first:
        fail(f"{where}: has no rows")
    return first


def read_data_set(name: str, split: str):
    """Return the rows of a split of a folder, or of "owner/name" or "owner/name:config" on the
    hub.
    """
    import datasets

    config = ""
    if not os.path.isdir(name):
        name, _, config = name.partition(":")
        if not config and "main" in datasets.get_dataset_config_names(name):  # GSM8K has two
            config = "main"
    return datasets.load_dataset(name, config or None, split=split)


# ---- checks --------------------------------------------------------------------------------------


class MixtureEntry(BaseModel):
    """An entry of a list of data sets."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prob: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Weight of the data set; the sum over the list need not be 1."""
    filepath: Annotated[str, Field(min_length=1)]
    """Any data set, with or without @split; a file relative to the folder of the list."""


ROW = TypeAdapter(dict[str, object])
ROWS = TypeAdapter(list[dict[str, object]])
ENTRIES = TypeAdapter(list[MixtureEntry])


def validate(where: str, value, adapter: TypeAdapter, item: str = "row"):
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


def read_parts(flag: str, name: str, split: str) -> list[tuple]:
    """Return the data sets of a list, a .json file of `MixtureEntry`s, as (name, what `read_rows`
    gives, weight); any other one alone.

    Args:
        flag, name, split: as in `read_rows`.
    """
    path, split = split_of(name, split)
    where = f"{flag} {path}"
    rows = read_rows(flag, path, split)
    entries = first_rows(where, rows) if path.endswith(".json") else []
    if not any("filepath" in row for row in entries):
        return [(path, rows, 1.0)]
    parts = []
    for entry in validate(where, entries, ENTRIES, "entry"):
        in_folder = os.path.join(os.path.dirname(path), entry.filepath)
        source = in_folder if os.path.exists(split_of(in_folder)[0]) else entry.filepath
        parts.append((entry.filepath, read_rows(f"{where}:", source, split), entry.prob))
    return parts
