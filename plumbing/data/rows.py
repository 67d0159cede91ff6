"""Rows, as dicts, of built-in tasks (plumbing/data/tasks.py), files, folders and hub data sets."""

import glob
import hashlib
import json
import logging
import os
import re
from typing import Annotated, Any, Iterable, Iterator, TypedDict

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from plumbing.cli import PathOrName
from plumbing.models.config import go_offline_if_unreachable
from utils import UserError, as_user_error, warn


class Row(TypedDict, total=False):
    """A prompt as a run reads it; `plumbing.data.prompts.make_prompts` makes it of a row of a data
    set.
    """

    prompt: str  # the text that the model sees
    query: list[int]  # its token ids
    teacher_query: list[int]  # of the prompt that the teacher reads, if it is another one
    messages: list[dict] | None  # the same as messages, None with --chat_template none
    answer: Any  # the reference, or None
    response: list[int]  # to learn from: its token ids
    mask: list[int]  # of the response: 1 where it is learned
    sources: list[str]  # of --reward, where the row names them
    dataset: str
    place: int  # among the rows of the run, with --pass_rates
    columns: dict  # the row as it was read
    rollout_group: int  # number of its group in the rollout
    turns: list[dict]  # of a conversation that has ended
    episode: float  # what its environment or agent gave


# Raise it when a change of the code reads or encodes rows in another way: the names of cache files
# are hashes of it, too (tests/test_data.py).
VERSION = 5
FILE = r"\.(jsonl?|csv|parquet)(\.(gz|bz2|xz|zst))?$"  # how the name of a file ends
# The columns of a table whose rows are JSON: the place of a row, for messages, and the row.
AT, LINE = "place", "line of JSON"


def is_scored_by(row: Row, name: str) -> bool:
    """Return whether a source scores a row: all of them do, unless the row names its sources, as
    open-instruct's.

    `name` may also be that of a further number, "SOURCE/NUMBER".
    """
    named = row.get("sources")
    return named is None or name in named or name.rpartition("/")[0] in named


def split_of(name: str, default: str = "train") -> tuple[str, str]:
    """Return the name of a data set and its split: "openai/gsm8k@test" -> ("openai/gsm8k", "test").

    The @ in the name of a file or folder that exists is part of that name.
    """
    path, at, split = name.rpartition("@")
    return (path, split) if at and not os.path.exists(name) else (name, default)


def read_rows(flag: str, name: str, split: str):
    """Return a data set as a `datasets.Dataset`, see `parse`.

    Raise a UserError if the data set cannot be read, or is empty.

    Args:
        flag: the option that named it, for messages.
        name: a built-in task, or "reasoning_gym:TASK" (plumbing/data/tasks.py); a .jsonl, .json or .csv
            file, also compressed, or a .parquet file; a folder; "owner/name" or
            "owner/name:config" on the hub; each with or without "@split".
        split: the split to read where `name` has none. A single file has only one split, whatever
            it is called.
    """
    from plumbing.data import tasks

    name, split = split_of(name, split)
    built_in, _, task = name.partition(":")
    sizes = tasks.BUILT_IN.get(built_in)
    is_local = os.path.exists(name) or re.search(FILE, name)
    on_hub = not sizes and not is_local and name.count("/") == 1
    if on_hub:
        go_offline_if_unreachable()  # before the import, which reads what it sets
    import datasets

    datasets.utils.logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    with as_user_error(f"{flag} {name}"):
        try:
            if sizes and split not in sizes:
                raise ValueError(f"has the splits {' and '.join(sizes)}, not {split!r}")
            if sizes:
                made = getattr(tasks, built_in)(task, split, sizes[split])
                places = [f"row {i}" for i in range(1, len(made) + 1)]
                return datasets.Dataset.from_dict({AT: places, LINE: list(map(json.dumps, made))})
            if os.path.isfile(name):
                rows = read_file(name)
            elif os.path.isdir(name) or on_hub:
                rows = read_data_set(name, split)
            else:
                raise ValueError(
                    "not a built-in task (arithmetic, instructions), a file, a folder, or an owner/name on the hub"
                )
            if not len(rows):
                raise ValueError("has no rows")
            return rows
        except datasets.exceptions.DatasetGenerationError as error:  # does not say what it was
            raise error.__cause__ or error from None


def read_file(name: str):
    """Return the rows of a file."""
    import datasets

    from plumbing.data.lines import Lines

    kind = re.search(FILE, name)
    if not kind:
        raise ValueError("a file has to end in .jsonl, .json, .csv or .parquet")
    with open(name, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    given = {"cache_dir": os.path.join(datasets.config.HF_DATASETS_CACHE, digest)}
    if kind[1] == "parquet":
        rows = datasets.Dataset.from_parquet(name, **given)
    else:
        files = datasets.data_files.DataFilesDict({"train": [os.path.abspath(name)]})
        sep = "," if kind[1] == "csv" else ""
        rows = prepare(Lines(data_files=files, sep=sep, **given), "train")
    rows._fingerprint = digest  # that of the library goes by path and time
    return rows


def prepare(builder: Any, split: str):
    """Return the rows of a split that a builder of `datasets` makes, from its cache if they are
    there; raise ValueError if there are none, or for .parquet files that differ in columns.
    """
    import datasets
    import pyarrow.parquet

    try:
        builder.download_and_prepare()
    except datasets.exceptions.DatasetGenerationError as error:
        files = builder.config.data_files.get(split, []) if builder.name == "parquet" else []
        schemas = map(pyarrow.parquet.read_schema, builder.dl_manager.download(files))
        columns = [{f"{field.name}: {field.type}" for field in schema} for schema in schemas]
        for file, other in zip(files, columns):
            if columns[0] != other:
                message = f"{file} differs from {files[0]} in {sorted(columns[0] ^ other)}"
                raise ValueError(message) from error
        raise
    part = builder.info.splits.get(split)
    if part and not part.num_examples:
        raise ValueError("has no rows")
    return builder.as_dataset(split)


def read_data_set(name: str, split: str):
    """Return the rows of a split of a folder, also of `save_to_disk`, or of "owner/name" or
    "owner/name:config" on the hub.
    """
    import datasets
    from datasets.data_files import FILES_TO_IGNORE
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json

    from plumbing.data.lines import Lines

    config = ""
    if not os.path.isdir(name):
        name, _, config = name.partition(":")
        if not config and "main" in datasets.get_dataset_config_names(name):  # GSM8K has two
            config = "main"
    elif {"state.json", "dataset_dict.json"} & {*os.listdir(name)}:
        saved = datasets.load_from_disk(name)
        if not isinstance(saved, dict):
            saved = {str(saved.split or "train"): saved}
        if split not in saved:
            raise ValueError(f"has the splits {', '.join(saved)}, not {split!r}")
        return saved[split]
    builder = datasets.load_dataset_builder(name, config or None)
    if os.path.isdir(name):
        # Of several kinds of files the library reads one, and beside names with splits no others.
        known = set(sum(builder.config.data_files.values(), []))
        found = {
            os.path.join(os.path.realpath(name), path)
            for path in glob.glob("**", root_dir=name, recursive=True)
            if re.search(FILE, path) and os.path.basename(path) not in FILES_TO_IGNORE
        }
        if left_out := sorted(found - known):
            warn(
                f"{name}: {len(left_out)} of {len(found)} files are not read, such as {left_out[0]}"
            )
    if isinstance(builder, (Json, Csv)) and not getattr(builder.config, "field", None):
        # Named as the library's, whose cache finds it without a network, too.
        builder = Lines(
            dataset_name=builder.dataset_name,
            repo_id=builder.repo_id,
            config_name=builder.config.name,
            config_id=builder.config_id,
            hash=builder.hash,
            data_files=builder.config.data_files,
            sep=getattr(builder.config, "sep", ""),
        )
    return prepare(builder, split)


def parse(where: str, table: Any, indices: Iterable[int]) -> Iterator[tuple[str, dict]]:
    """Yield the place of each row of a `pyarrow.Table`, and the row.

    Args:
        where: of the data set. table: of columns, or of AT and LINE. indices: of the rows.
    """
    if table.column_names == [AT, LINE]:
        places, lines = (column.to_pylist() for column in table.columns)
        for at, line in zip(places, lines):
            with as_user_error(f"{where} {at}"):
                row = json.loads(line)
            yield f"{where} {at}", validate(f"{where} {at}", row, ROW)
        return
    columns = (
        [as_written(value, column.type) for value in column.to_pylist()] for column in table.columns
    )
    for i, values in zip(indices, zip(*columns)):
        yield f"{where} row {i + 1}", dict(zip(table.column_names, values))


def as_written(value: Any, kind: Any):
    """Return a value of a column of a type as its row had it: a column of Arrow stores values of
    several types as JSON, and gives all objects the same keys, null where they have none.
    """
    import pyarrow

    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if pyarrow.types.is_struct(kind):
        items = ((field.name, as_written(value[field.name], field.type)) for field in kind)
        return {name: item for name, item in items if item is not None}
    if isinstance(kind, (pyarrow.ListType, pyarrow.LargeListType, pyarrow.FixedSizeListType)):
        return [as_written(item, kind.value_type) for item in value]
    return value


def first_rows(where: str, rows: Any) -> list[dict]:
    """Return the first 1,000 rows of a data set."""
    table = rows.with_format("arrow")[:1000]
    return [row for _, row in parse(where, table, range(1000))]


# ---- checks --------------------------------------------------------------------------------------


class MixtureEntry(BaseModel):
    """An entry of a list of data sets."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prob: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Weight of the data set; the sum over the list need not be 1."""
    filepath: Annotated[PathOrName, Field(min_length=1)]
    """Any data set, with or without @split; a file relative to the folder of the list."""


ROW = TypeAdapter(dict[str, object])
ENTRIES = TypeAdapter(list[MixtureEntry])


def validate(where: str, value: Any, adapter: TypeAdapter, item: str = "row"):
    """Return a value as pydantic reads it; raise a UserError, and the item, field and message of
    pydantic's first error.

    Args:
        where: where the value is from. item: what an item of it is, if it is a list.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        fields: list[Any] = list(first["loc"])
        if fields and isinstance(fields[0], int):
            where = f"{where} {item} {fields.pop(0) + 1}"
        raise UserError(f"{': '.join([where, *map(str, fields)])}: {first['msg']}") from None


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
    if len(rows) > len(entries):
        raise UserError(f"{where}: lists {len(rows)} data sets, of which {len(entries)} are read")
    parts = []
    for entry in validate(where, entries, ENTRIES, "entry"):
        in_folder = os.path.join(os.path.dirname(path), entry.filepath)
        source = in_folder if os.path.exists(split_of(in_folder)[0]) else entry.filepath
        parts.append((entry.filepath, read_rows(f"{where}:", source, split), entry.prob))
    return parts
