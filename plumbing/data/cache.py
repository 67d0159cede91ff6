"""Rows as a run reads them: encoded once by `datasets`, then read by index from a memory-mapped
file.

The first process of a node encodes what is not in the cache, and the others wait. The name of a
cache file is a hash of all that decides what is in it: rows, tokenizer and template, flags, and for
the code VERSION in plumbing/data/rows.py. A row, a dict, is stored as JSON, since its values may be
of any type, with NUMBERS in columns of their own.
"""

import functools
import gc
import json
import os
from datetime import date, timedelta
from itertools import chain
from typing import Any, Sequence

import numpy as np
import pyarrow
import torch.distributed as dist
import transformers
from transformers import PreTrainedTokenizerBase
from xxhash import xxh64_intdigest

from plumbing.data.encoding import encode_texts
from plumbing.data.rows import VERSION, parse
from plumbing.models.config import check_fits
from utils import UserError, first_line, warn

LISTS = ("query", "response", "chosen", "rejected")
ENCODED = (*LISTS, "teacher_query")  # the teacher's prompt is no part of what a run trains on
ROWS_PER_PROCESS = 20_000  # fewer are encoded sooner than a process starts
# How many token ids a row has in each of ENCODED, the highest of them, whether the row has a problem,
# and a hash of what must not be trained and evaluated on.
NUMBERS = (*ENCODED, "highest", "has_problem", "about")
to_json = json.JSONEncoder(default=str).encode  # what JSON lacks, such as dates, becomes text


def encode_rows(
    flag: str,
    name: str,
    raw: Any,
    make: functools.partial,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
):
    """Return rows from the cache, which are put there if it lacks them.

    Args:
        flag, name: of the data set; rows say the name, and may have another one in the next run.
        raw: as `read_rows` gives it.
        make: a partial function, which makes a list of rows of a row, from its place and itself: ENCODED, of `Text`s,
            and what else JSON can hold, with "problem": why nothing can score it, or "". "about", by
            default "prompt", is what must not be trained and evaluated on.
        stop_ids: see `encode_texts`.
    Returns:
        A `datasets.Dataset` of the rows without a problem: `rows[i]` reads one, in which ENCODED are
        token ids, and "mask" is 1 for those of the response that are to be learned. Its fingerprint
        is a hash of what decides which rows they are, the columns read included, and their order,
        not how they are encoded.
    """
    import datasets
    from datasets.fingerprint import Hasher

    where = f"{flag} {name}"
    today = date.today() if "strftime_now" in str(tokenizer.chat_template) else None
    given = VERSION, transformers.__version__, make.func.__name__, make.keywords, stop_ids, today
    fingerprint = Hasher.hash([raw._fingerprint, tokenizer, *given])
    file = f"{fingerprint}-{Hasher.hash(name)}.arrow"
    file = os.path.join(datasets.config.HF_DATASETS_CACHE, file)
    processes = min(os.cpu_count() or 1, len(raw) // ROWS_PER_PROCESS)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    # Their other collectives wait for half an hour.
    others = os.environ.get("WORLD_SIZE", "1") != "1" and dist.new_group(
        backend="gloo", timeout=timedelta(days=7)
    )
    if others and not is_first:
        dist.barrier(others)
    try:
        gc.freeze()  # forked processes would copy what the collector visits
        rows = raw.with_format("arrow").map(
            encode_batch,
            batched=True,
            with_indices=True,
            fn_kwargs={
                "where": where,
                "dataset": name,
                "make": make,
                "tokenizer": tokenizer,
                "stop_ids": stop_ids,
            },
            num_proc=processes if processes > 1 else None,
            new_fingerprint=fingerprint,
            cache_file_name=file,
        )
    except UserError:  # of a row, from a process of datasets, too
        raise
    except Exception as error:  # of a disk or a cache, whatever it lacks
        raise UserError(f"{where}: {first_line(error)} ({file})") from error
    if others and is_first:
        dist.barrier(others)
    rows = rows.with_transform(as_row)
    rows._fingerprint = Hasher.hash([raw._fingerprint, len(rows), make.keywords.get("columns")])
    kept = numbers_of(rows, "has_problem") == 0
    if kept.all():
        return rows
    first = rows[int(kept.argmin())]
    return leave_out(where, rows, kept, f"which have no score: {first['problem']}")


def encode_batch(
    table: pyarrow.Table,
    indices: list[int],
    where: str,
    dataset: str,
    make: functools.partial,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
):
    """Return the encoded rows of a batch, a `pyarrow.Table`, as a table of NUMBERS and
    JSON, for `Dataset.map`.
    """
    rows = []
    for at, row in parse(where, table, indices):
        rows += make(at, row)
    texts = [text for row in rows for name in ENCODED for text in row.get(name, ())]
    # 64 at a time: on 4,000 texts that took less time than one call for all.
    lists = (encode_texts(texts[i : i + 64], tokenizer, stop_ids) for i in range(0, len(texts), 64))
    encoded = zip(texts, chain.from_iterable(lists))
    made = []
    for row in rows:
        numbers = {"has_problem": int(row["problem"] != ""), "highest": 0}
        for name in ENCODED:
            parts = [next(encoded) for _ in row.get(name, ())]
            row[name] = list(chain.from_iterable(ids for _, ids in parts))
            numbers[name] = len(row[name])
            numbers["highest"] = max(numbers["highest"], *row[name], 0)
            if name == "response":
                row["mask"] = []
                for text, ids in parts:
                    row["mask"] += [int(text.is_learned)] * len(ids)
        numbers["about"] = xxh64_intdigest(row.pop("about", row["prompt"]).encode()) >> 1
        made.append(numbers | {"row": to_json(row | {"dataset": dataset})})
    schema = dict.fromkeys(NUMBERS, pyarrow.int64()) | {"row": pyarrow.string()}
    return pyarrow.Table.from_pylist(made, pyarrow.schema(schema))


def as_row(batch: dict) -> dict:
    """Return a row of the cache as it was made, for `Dataset.with_transform`."""
    return {name: [value] for name, value in json.loads(batch["row"][0]).items()}


def numbers_of(rows: Any, *names: str) -> np.ndarray:
    """Return one of NUMBERS of some rows, or the sum of several (n,)."""
    table = rows.select_columns(list(names)).with_format("numpy")[:]
    return sum(table[name] for name in names)


def check_rows_fit(model: str, rows: Any, names: Sequence[str], flag: str, room: int = 0) -> None:
    """Raise a UserError if --model cannot read some of ENCODED of all rows, the longest with `room`
    more tokens; see `check_fits`.
    """
    if len(rows):
        check_fits(
            model, numbers_of(rows, "highest").max(), numbers_of(rows, *names).max() + room, flag
        )


def leave_out(where: str, rows: Any, kept: np.ndarray, why: str):
    """Return the rows where a mask is set; count the others in one line, and raise a UserError if
    none is left.
    """
    message = f"{where}: left out {(~kept).sum()} of {len(rows)} rows, {why}"
    if not kept.any():
        raise UserError(message)
    if not kept.all():
        warn(message)
        rows = rows.select(np.flatnonzero(kept))
    return rows
