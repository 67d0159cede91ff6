"""Data: what the readers make of each kind of row and of any bytes, mixtures, and conversations
through the chat template.
"""

import collections
import contextlib
import copy
import datetime
import functools
import gzip
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import resource
import signal
import time
import types
from pathlib import Path

import datasets
import helpers
import pandas
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import WORLD

import ppo
import reward_model
from plumbing.data import cache, formats, mixture, pairs
from plumbing.data import prompts as data
from plumbing.data.rows import VERSION, first_rows, read_parts, read_rows
from plumbing.data.tasks import BUILT_IN
from plumbing.models.tokenizer import load_tokenizer
from plumbing.rewards.sources import why_unscorable
from plumbing.run.command import report_errors
from plumbing.run.ranks import Interrupt
from plumbing.run.setup import load_supervised
from utils import UserError

ARGS = vars(
    ppo.Args(model=str(helpers.ROOT / "assets" / "tiny"), max_response_length=64, system_prompt="")
)

# The templates of Llama (which begins with the BOS) and of Qwen (which has none), as far as they
# matter here.
WITH_BOS = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501
WITHOUT_BOS = WITH_BOS.removeprefix("{{ bos_token }}")


def args_of(**changes):
    return types.SimpleNamespace(**{**ARGS, **changes})


@pytest.fixture(scope="module")
def tokenizers() -> dict:
    """One that puts a BOS before a text and one that does not, each with and without a template."""
    kinds = itertools.product((True, False), (None, WITH_BOS, WITHOUT_BOS))
    return {
        (bos, template): helpers.make_tokenizer(bos, bos_token="<bos>", chat_template=template)
        for bos, template in kinds
    }


def parts_of(name, tokenizer, split: str = "train", check=why_unscorable, **changes) -> list[tuple]:
    """(rows, weight) of each data set of a file or list."""
    return data.load_prompts("--dataset", str(name), split, tokenizer, args_of(**changes), check)


def prompts_of(name, tokenizer, split: str = "train", **changes) -> list[dict]:
    return list(mixture.mix(parts_of(name, tokenizer, split, **changes), 1))


def load(rows, tmp_path, tokenizer, **changes) -> list[dict]:
    return prompts_of(helpers.write_rows(tmp_path / "rows.jsonl", rows), tokenizer, **changes)


# ---- rows that people have -----------------------------------------------------------------------

TABLES = helpers.table("rows.yaml")
RECOGNISED = TABLES["recognised"]


@pytest.mark.parametrize("name", RECOGNISED)
def test_known_rows_need_no_flags(name, tokenizers, tmp_path):
    row, answer, reward = RECOGNISED[name]
    messages = isinstance(row.get("prompt", row.get("messages")), list)
    (got,) = load(
        [row], tmp_path, tokenizers[False, WITHOUT_BOS if messages else None], reward=(reward,)
    )
    assert (
        got["prompt"] == ("<user>6*7?</><assistant>" if messages else "6*7?")
        and got["answer"] == answer
    )
    assert got["columns"] == row  # whole: reward functions get them


def test_reasoning_gym_rows_are_apart_and_the_same_each_time(tokenizer, capsys, monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.setitem(BUILT_IN, "reasoning_gym", {"train": 20, "test": 5})
    name = "reasoning_gym:leg_counting"
    changes = dict(reward=("reasoning_gym",), max_prompt_length=2000)
    train, test = (prompts_of(name, tokenizer, split, **changes) for split in ("train", "test"))
    assert (len(train), len(test)) == (20, 5)
    assert train[7]["columns"]["reasoning_gym"] == ["leg_counting", 20, 1, 7]
    assert train[:3] == prompts_of(f"{name}@train", tokenizer, "test", **changes)[:3]
    assert train[0]["prompt"] != test[0]["prompt"] and train[0]["answer"].isdigit()
    line = refused(capsys, prompts_of, "reasoning_gym:no_such", tokenizer)
    assert line.startswith("error: --dataset reasoning_gym:no_such: ")


# ---- one way of reading for a file, its folder and what else holds the rows ----------------------

VALUES = TABLES["values"]
REPORTED = helpers.ROOT / "tests" / "data" / "reported"


def columns_of(name) -> list[dict]:
    """The rows of a data set as they are read."""
    return first_rows("", read_rows("--dataset", str(name), "train"))


@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_of_the_file_whatever_holds_them(name, tmp_path):
    """Also those of several types, which datasets stores as JSON."""
    rows = [{"prompt": f"{i}+1=", "value": value} for i, value in enumerate(VALUES[name])]
    for folder in ("lines", "list", "packed", "parquet"):
        (tmp_path / folder).mkdir()
    text = Path(helpers.write_rows(tmp_path / "lines" / "train.jsonl", rows)).read_bytes()
    (tmp_path / "packed" / "train.jsonl.gz").write_bytes(gzip.compress(text))
    (tmp_path / "list" / "train.json").write_text(json.dumps(rows))
    typed = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    typed.to_parquet(tmp_path / "parquet" / "train.parquet")
    typed.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=typed).save_to_disk(tmp_path / "splits")
    for place in (*tmp_path.glob("*"), *tmp_path.glob("*/train.[jp]*")):
        if place.name != "splits" or place.is_dir():
            assert columns_of(place) == rows, place


def test_null_in_the_objects_of_parquet_is_no_key(tmp_path):
    """It gives all objects the same keys; a column is one of all rows."""
    rows = [
        {"a": {"city": "Oslo", "n": [{"x": 1}]}, "b": None},
        {"a": {"n": [{"y": None}]}, "b": 2},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (first, second) = columns_of(tmp_path / "rows.parquet")
    assert first == rows[0] and second == {"a": {"n": [{}]}, "b": 2}
    helpers.write_rows(tmp_path / "rows.jsonl", rows)
    assert columns_of(tmp_path / "rows.jsonl") == rows


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_folder_whose_files_differ_in_columns(ending, tmp_path, tokenizer, capsys):
    for i, column in enumerate(("prompt", "question")):
        frame = pandas.DataFrame({column: ["1+1="], "answer": ["2"]})
        file = tmp_path / f"train-{i}.{ending}"
        writers = {
            "jsonl": functools.partial(frame.to_json, orient="records", lines=True),
            "csv": functools.partial(frame.to_csv, index=False),
            "parquet": frame.to_parquet,
        }
        writers[ending](file)
    line = refused(capsys, prompts_of, str(tmp_path), tokenizer)
    assert "train-1." in line and "prompt" in line
    name = REPORTED / "18_folder_mixed_schema"
    line = refused(capsys, prompts_of, str(name), tokenizer)
    assert f"{name} train-00001.jsonl row 1: has nothing in column 'prompt'" in line


@pytest.mark.parametrize("other", ["train2.csv", "more.jsonl", "deep/more.parquet"])
def test_a_folder_whose_files_are_not_all_read(other, tmp_path, capsys):
    """As datasets chooses them."""
    (tmp_path / "deep").mkdir()
    for name in ("train.jsonl", "train-2.jsonl", "config.json", "deep/.hidden.json", other):
        (tmp_path / name).write_text('{"prompt": "1"}\n')
    assert len(columns_of(tmp_path)) == 2
    warning = f"warning: {tmp_path}: 1 of 3 files are not read, such as {tmp_path / other}\n"
    assert capsys.readouterr().err == warning


def test_a_data_set_of_the_hub_is_read_from_its_cache(tmp_path, monkeypatch):
    """Without a network, as datasets has stored it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    folder = tmp_path / "owner___name/default/0.0.0/abc"
    datasets.Dataset.from_list(helpers.ROWS).save_to_disk(folder)
    (folder / "data-00000-of-00001.arrow").rename(folder / "name-train.arrow")
    info = json.loads((folder / "dataset_info.json").read_text())
    info |= {"dataset_name": "name", "config_name": "default", "version": "0.0.0"}
    info["splits"] = {"train": {"name": "train", "num_examples": len(helpers.ROWS)}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    assert columns_of("owner/name") == helpers.ROWS


def test_files_of_any_content(tmp_path, capsys):
    """A long cell, .csv in a folder, lines in a .json; lines that are broken, with their file."""
    assert len(columns_of(REPORTED / "19_long_cell.csv")[0]["context"]) > 131_072
    files = {
        "a.csv": "prompt,answer\n1,007\n",
        "b.json": '{"prompt": "1"}\n\n{"prompt": "\u2028"}\n',
        "c.json": '\ufeff\n [\n{"prompt": "1"}]',
    }
    for name, text in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"train-{name}").write_text(text)
    assert columns_of(tmp_path / "a.csv") == [{"prompt": "1", "answer": "007"}]
    assert columns_of(tmp_path / "b.json") == [{"prompt": "1"}, {"prompt": "\u2028"}]
    assert columns_of(tmp_path / "c.json") == [{"prompt": "1"}]
    for ending, text in (("json", b"[{"), ("jsonl", b"\xff"), ("jsonl.gz", b"\x1f\x8b\x08x")):
        bad = tmp_path / "b.json" / f"train-bad.{ending}"
        bad.write_bytes(text)
        assert str(bad) in refused(capsys, columns_of, bad)
        assert ending == "jsonl.gz" or bad.name in refused(capsys, columns_of, bad.parent)
        bad.unlink()


# ---- src and tgt ---------------------------------------------------------------------------------

turns = st.lists(st.text("ab \n", min_size=1).filter(str.strip), min_size=1, max_size=5)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(turns, turns)
def test_both_readings_of_src_and_tgt(src, tgt):
    """The turns alternate and begin with the user; what is left of tgt, if anything, is the
    reference.
    """
    row = {"src": src, "tgt": tgt}
    read = functools.partial(formats.read_prompt, "row", row, "src")
    if not len(src) - 1 <= len(tgt) <= len(src):
        with pytest.raises(UserError):
            read()
        return
    messages = read()
    reference = messages.pop()["content"] if len(tgt) == len(src) else None
    assert reference == (tgt[-1] if len(tgt) == len(src) else None)
    assert formats.read_answer("row", {}, "tgt", reference) == reference
    assert [turn["content"] for turn in messages[::2]] == src
    assert [turn["content"] for turn in messages[1::2]] == tgt[: len(src) - 1]
    assert [turn["role"] for turn in messages] == ["user", "assistant"] * (len(src) - 1) + ["user"]


# ---- the chat template, exactly once -------------------------------------------------------------

DIALOGUE = TABLES["dialogue"]
ROWS = TABLES["prompts"]


@pytest.mark.parametrize("system", ["", "Think."])
@pytest.mark.parametrize(
    "kind", [(True, WITH_BOS), (True, WITHOUT_BOS), (False, WITHOUT_BOS)], ids=str
)
@pytest.mark.parametrize("name", ROWS)
def test_token_ids_are_those_of_apply_chat_template(name, kind, system, tokenizers, tmp_path):
    row, messages = ROWS[name]
    tokenizer = tokenizers[kind]
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    (got,) = load([row], tmp_path, tokenizer, system_prompt=system)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert got["query"] == ids and ids.count(tokenizer.bos_token_id) == (kind[1] == WITH_BOS)
    assert got["prompt"] == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )


@pytest.mark.parametrize("bos", [True, False])
def test_without_a_template_text_stays_as_it_is(bos, tokenizers, tmp_path, capsys):
    """But for a system prompt above it. A BOS stands there once."""
    tokenizer = tokenizers[bos, None]
    for begin, system in (("", "Be brief."), ("<bos>", ""), ("", "")):
        rows = [{"prompt": f"{begin}1+1?", "answer": "2"}]
        (row,) = load(rows, tmp_path, tokenizer, system_prompt=system)
        plain = tokenizer.encode(f"{system}\n1+1?".lstrip(), add_special_tokens=False)
        assert row["query"] == [tokenizer.bos_token_id] * bool(bos or begin) + plain
    assert row["prompt"] == "1+1?"
    line = refused(capsys, load, [ROWS["src and tgt"][0]], tmp_path, tokenizer)
    assert "row 1: has several turns, and the tokenizer of --model has no chat template" in line
    assert line.endswith("name a file of one with --chat_template")
    assert (
        load([{"prompt": DIALOGUE[:1], "answer": "2"}], tmp_path, tokenizer)[0]["query"]
        == row["query"]
    )


# ---- messages ------------------------------------------------------------------------------------


def one(row, tmp_path, tokenizer, **changes) -> tuple:
    (got,) = load([row], tmp_path, tokenizer, **changes)
    return got["prompt"], got["answer"]


def test_a_last_turn_of_the_assistant_is_the_reference_and_not_part_of_the_prompt(
    tokenizers, tmp_path, capsys
):
    tokenizer = tokenizers[False, WITHOUT_BOS]
    answered = [*DIALOGUE, {"role": "assistant", "content": "5"}]
    asked = one({"messages": DIALOGUE, "answer": "5"}, tmp_path, tokenizer)
    assert one({"messages": answered}, tmp_path, tokenizer) == asked
    assert one({"messages": answered, "answer": "five"}, tmp_path, tokenizer) == (asked[0], "five")
    assert "row 1 prompt: " in refused(
        capsys, load, [{"messages": answered[-1:]}], tmp_path, tokenizer
    )


def test_a_template_from_a_file_and_none(tokenizers, tmp_path, capsys):
    (tmp_path / "chat.jinja").write_text("<eos>{{ messages[-1]['content'] }}<pad>")
    tokenizer = load_tokenizer(str(helpers.ROOT / "assets" / "tiny"), str(tmp_path / "chat.jinja"))
    row = {"prompt": "<eos>1+1=<pad>", "answer": "2"}
    assert one({"prompt": "1+1=", "answer": "2"}, tmp_path, tokenizer)[0] == row["prompt"]
    (read,) = load([row], tmp_path, tokenizer, chat_template="none", system_prompt="Think.")
    ids = tokenizer.encode(row["prompt"], add_special_tokens=False)
    assert (
        read["prompt"] == row["prompt"] and read["query"] == ids and capsys.readouterr().err == ""
    )


# ---- rows that lack something, or have too much --------------------------------------------------


def test_first_rows_without_an_answer(tokenizer, tmp_path):
    """The column is that of any row."""
    rows = [
        {"prompt": "a", "other": 1},
        {"prompt": "b", "answer": None},
        {"prompt": "c", "answer": "3"},
    ]
    read = load(rows, tmp_path, tokenizer, reward=("format",))
    assert [row["answer"] for row in read] == [None, None, "3"]


def test_columns_with_dots(tokenizer, tmp_path, capsys):
    row = {"in": {"text": "6*7?"}, "out": {"a": {"b": 42}}, "out.a": "exactly so called"}
    names = dict(prompt_column="in.text", answer_column="out.a.b")
    assert one(row, tmp_path, tokenizer, **names) == ("6*7?", 42)
    assert (
        one(row, tmp_path, tokenizer, **{**names, "answer_column": "out.a"})[1]
        == "exactly so called"
    )
    row["out"] = '{"a": {"b": 42}}'
    assert one(row, tmp_path, tokenizer, **names)[1] == 42
    names["answer_column"] = "in.text.b"
    line = refused(capsys, lambda: one(row, tmp_path, tokenizer, **names))
    assert "has nothing in column 'in.text.b'; name a column with --answer_column" in line


def test_prompts_that_are_too_long_are_left_out_and_counted(tokenizer, tmp_path, capsys):
    rows = [{"prompt": "1" * length, "answer": "1"} for length in (3, 9, 4, 8)]
    read = load(rows, tmp_path, tokenizer, max_prompt_length=5)
    assert [len(row["query"]) for row in read] == [3, 4]
    dropped = "2 of 4 rows, which have more tokens than --max_prompt_length 5"
    assert (
        capsys.readouterr().err
        == f"warning: --dataset {tmp_path / 'rows.jsonl'}: left out {dropped}\n"
    )


USELESS = {  # source: references that no response can equal
    "gsm8k": ["none"],
    "math": ["-", "x" * 501],
    "exact": [["1", "2"]],
    "code": ["x = 1", "assert ("],
    "reasoning_gym": ["5"],
    "ifeval": [
        "{'instruction_id': ['no:such'], 'kwargs': [None]}",
        '{"func_name": "verify_letter_frequency", "N": 2}',
        '{"func_name": "validate_word_constraint", "N": 9, "quantifier": "around"}',
    ],
}
USEFUL = {
    "code": "assert f(2) == 4",
    "ifeval": "{'instruction_id': ['punctuation:no_comma'], 'kwargs': [None]}",
}


@pytest.mark.parametrize("source", USELESS)
def test_rows_that_no_response_can_answer_are_left_out_and_counted(
    source, tokenizer, tmp_path, capsys
):
    """Unless the source is only measured, or another one scores the row."""
    pytest.importorskip(
        {"ifeval": "if_verifiable"}.get(source, source if source == "reasoning_gym" else "re")
    )
    bad = USELESS[source]
    good = {"answer": USEFUL.get(source, "4"), "reasoning_gym": ["leg_counting", 1, 1, 0]}
    rows = [
        {"prompt": "a", **good},
        *({"prompt": "b", "answer": x} for x in bad),
        {"prompt": "c", **good},
    ]
    read = load(rows, tmp_path, tokenizer, reward=(source,))
    assert [row["prompt"] for row in read] == ["a", "c"]
    err = capsys.readouterr().err
    assert (
        f"left out {len(bad)} of {len(rows)} rows, which have no score: --reward {source}: " in err
    )
    named = [{**row, "verifier": "format"} for row in rows]
    for others, flags in ((rows, {"reward_weights": (0, 1)}), (named, {})):
        assert len(load(others, tmp_path, tokenizer, reward=(source, "format"), **flags)) == len(
            rows
        )


TEMPLATES = (
    "<|im_start|>user\n1+1=<|im_end|>\n",
    "[INST] 1+1= [/INST]",
    "USER: 1+1= ASSISTANT:",
    "1+1=",
)


@pytest.mark.parametrize("text", TEMPLATES)
def test_text_that_holds_a_chat_template(text, tokenizers, tmp_path, capsys):
    for template in (WITHOUT_BOS, None):
        for name in ("", "none"):
            load(
                [{"prompt": text, "answer": "2"}],
                tmp_path,
                tokenizers[False, template],
                chat_template=name,
            )
            warned = "prompts hold a chat template" in capsys.readouterr().err
            assert warned == (template is not None and not name and text != "1+1=")


def test_prompts_that_are_all_evaluated_on(tokenizer, tmp_path, capsys):
    file = helpers.write_rows(
        tmp_path / "rows.jsonl", [{"prompt": str(i), "answer": "1"} for i in range(3)]
    )
    args = args_of(dataset=file, eval_dataset=file)
    train, held_out = data.load_train_and_eval(args, tokenizer, why_unscorable)
    assert list(train) == list(held_out) and len(train) == 3
    assert "every row is evaluated on" in capsys.readouterr().err


def test_a_share_is_held_out_by_its_prompts(tokenizer, tmp_path, capsys):
    """The same rows in any order, and a line if nothing is evaluated."""
    # each prompt twice
    rows = [{"prompt": f"{i // 2}", "answer": "1", "number": i} for i in range(400)]
    load_both = lambda rows, **changes: data.load_train_and_eval(
        args_of(
            dataset=helpers.write_rows(tmp_path / "rows.jsonl", rows), eval_prompts=0, **changes
        ),
        tokenizer,
        why_unscorable,
    )
    parts = load_both(rows, eval_share=0.2)
    train, held_out = ({row["prompt"] for row in part} for part in parts)
    assert not train & held_out and len(train | held_out) == 200 and 25 < len(held_out) < 55
    assert sum(map(len, parts)) == 400 and "nothing is evaluated" not in capsys.readouterr().out
    assert {row["prompt"] for row in load_both(rows[::-1], eval_share=0.2)[1]} == held_out
    assert (
        not load_both(rows)[1]
        and "so nothing is evaluated; --eval_share" in capsys.readouterr().out
    )
    with pytest.raises(UserError, match=r"--eval_share 1e-09 of .*: holds out none of 400 rows"):
        load_both(rows, eval_share=1e-9)


def test_rows_come_from_the_cache(tokenizer, tmp_path, capsys, monkeypatch):
    """Until the file changes, by whatever number of processes; what is wrong is one line."""
    file = tmp_path / "rows.jsonl"
    read = lambda: parts_of(file, tokenizer)[0][0]
    rows = [{"prompt": f"{i}+1=", "answer": i, "other": [None, {"a": 1.5}]} for i in range(3)]
    helpers.write_rows(file, rows)
    monkeypatch.setattr(cache, "ROWS_PER_PROCESS", 1)  # two processes
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    first = read()
    assert [row["columns"] for row in first] == rows and len(first.cache_files) == 2
    os.utime(file)
    monkeypatch.setattr(cache, "ROWS_PER_PROCESS", 9)
    again = read()
    assert list(again) == list(first) and again._fingerprint == first._fingerprint
    for each in again.cache_files:
        os.truncate(each["filename"], 100)
    assert refused(capsys, read).startswith(f"error: --dataset {file}: ")
    changed = os.stat(file)
    file.write_text("no row")
    os.utime(file, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    assert "row 1: Expecting value" in refused(capsys, read)


def test_the_version_of_the_cache_is_that_of_golden_rows(tmp_path):
    """Raise VERSION, and give each name its digest, where rows are encoded in another way."""
    tables = {name: TABLES[name] for name in ("recognised", "prompts", "learned", "pairs")}
    made = {}
    for kind, name, (row, *_) in (
        (k, n, x) for k, table in tables.items() for n, x in table.items()
    ):
        file = helpers.write_rows(tmp_path / "golden.jsonl", [row])
        flags = dict(reward=("exact", "math"), reward_weights=(1, 0))
        if kind == "pairs":
            given = reward_model.Args(system_prompt="Add.")
            rows = pairs.load_pairs("", file, "x", CHAT, [1], given)
        elif kind == "learned":
            args = args_of(on_policy_share=0, **flags)
            given = "train", CHAT, args, lambda *_: "", None, "conversations", [1]
            rows = data.load_prompts("", file, *given)[0][0]
        else:
            rows = prompts_of(file, CHAT, **flags)
        text = json.dumps([{**x, "dataset": ""} for x in rows], sort_keys=True)
        made[f"{kind}: {name}"] = hashlib.sha256(text.encode()).hexdigest()[:8]
    assert {"version": VERSION, "rows": made} == helpers.table("encoded.yaml")


def test_what_the_cache_goes_by(tmp_path, monkeypatch):
    """The template, the flags and the version; the day where the template writes it. A resume asks
    for the rows and their columns alone.
    """
    file = helpers.write_rows(tmp_path / "rows.jsonl", helpers.ROWS)
    tokenizer = copy.deepcopy(CHAT)
    fingerprints = set()

    def name(**flags) -> str:
        rows = parts_of(file, tokenizer, **flags)[0][0]
        fingerprints.add(rows._fingerprint)
        return rows.cache_files[0]["filename"]

    seen = [name(), name(system_prompt="Add.")]
    monkeypatch.setattr(cache, "date", types.SimpleNamespace(today=lambda: "tomorrow"))
    assert name() == seen[0]
    template = tokenizer.chat_template
    tokenizer.chat_template = template + "{{ strftime_now('%d') }}"
    seen.append(name())
    monkeypatch.setattr(cache, "date", datetime.date)
    seen.append(name())
    tokenizer.chat_template = template
    monkeypatch.setattr(cache, "VERSION", 0)
    assert len({*seen, name()}) == 5 and len(fingerprints) == 1
    name(prompt_column="answer")
    name(answer_column="prompt")
    assert len(fingerprints) == 3


def test_what_stops_encoding_is_one_line(tokenizer, tmp_path, capfd, monkeypatch):
    """A row that one of several processes cannot read, and a disk without room.

    They are forked from a run, with its handlers, and end as datasets ends them, by SIGTERM.
    """
    handled = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    Interrupt(WORLD, __file__).can_save = True
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    rows = [{"prompt": f"{i}+1=", "answer": "1"} for i in range(2000)]
    for rows_per_process, end in ((1000, [{"prompt": ""}]), (9999, [])):
        monkeypatch.setattr(cache, "ROWS_PER_PROCESS", rows_per_process)
        file = helpers.write_rows(tmp_path / f"{rows_per_process}.jsonl", rows + end)
        read_rows("--dataset", file, "train")  # is in the cache
        capfd.readouterr()
        if not end:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            with pytest.raises(SystemExit), report_errors():
                prompts_of(file, tokenizer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        err = capfd.readouterr().err
        what = "row 2001: has nothing in column 'prompt'" if end else "File too large"
        assert err.startswith(f"error: --dataset {file}") and what in err and err.count("\n") == 1
    for number, handler in handled.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("ranks", [True, False], ids=["ranks of a run", "runs"])
def test_two_that_read_at_once(tokenizer, tmp_path, ranks):
    """The second rank waits for the first, for longer than a collective may last; two runs map
    both.
    """
    rows = [{"prompt": f"{i}+1=", "answer": i} for i in range(5)]
    file = helpers.write_rows(tmp_path / "rows.jsonl", rows)
    read_rows("--dataset", file, "train")  # is in the cache
    mapped = tmp_path / "mapped"

    def check_slowly(at, row, args) -> str:
        with mapped.open("a") as names:
            names.write(at[-1])
        time.sleep(1.0 if ranks else 0.2)
        return ""

    def read(rank: int) -> None:
        torch.set_num_threads(1)
        if ranks:
            os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            # A group that a test before has left, in the process that forked this one.
            dist.distributed_c10d._update_default_pg(None)
            dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=2, rank=rank)
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=4))
        ((read, _),) = parts_of(file, tokenizer, check=check_slowly)
        assert [row["columns"] for row in read] == rows

    both = [multiprocessing.get_context("fork").Process(target=read, args=[i]) for i in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(100)
        process.kill()
    assert [process.exitcode for process in both] == [0, 0]
    assert sorted(mapped.read_text()) == sorted("12345" if ranks else 2 * "12345")


def test_what_was_read_is_shown(tokenizer, tmp_path, capsys):
    """In one short line each, of both ends; .csv holds texts."""
    name = str(tmp_path / "rows.csv")
    with open(name, "w", encoding="utf-8-sig") as file:  # as Excel writes them
        file.write(
            'question,solution,note\n"'
            + "first\n"
            + 99 * "x, "
            + 'last",007,\n2+2?,"4 ""four""",\n'
        )
    rows = prompts_of(name, tokenizer, prompt_column="question")
    assert [row["answer"] for row in rows] == ["007", '4 "four"'] and rows[1]["columns"][
        "note"
    ] == ""
    prompt, answer = capsys.readouterr().out.splitlines()
    assert prompt.startswith(
        f"--dataset {name}: prompt (question): 'first\\nx, "
    ) and prompt.endswith("x, last'")
    assert len(prompt) < 150 + 150 and answer == f"--dataset {name}: answer (solution): '007'"
    (tmp_path / "rows.csv").write_text("prompt,answer\na,b,c\n")
    assert refused(capsys, prompts_of, name, tokenizer).startswith(
        f"error: --dataset {name}: row 1 has more cells"
    )


def test_a_folder_without_the_split(tokenizer, tmp_path, capsys):
    """Its only split is not taken for another one."""
    (tmp_path / "folder").mkdir()
    helpers.write_rows(tmp_path / "folder" / "train.jsonl", helpers.ROWS)
    name = str(tmp_path / "folder")
    assert columns_of(name) == helpers.ROWS
    args = args_of(dataset=name), tokenizer, why_unscorable
    line = refused(capsys, data.load_train_and_eval, *args, noisy=True)
    assert (
        line.startswith(f"error: --eval_dataset {name}: ")
        and "test" in line
        and "['train']" in line
    )


# ---- rows of odd types ---------------------------------------------------------------------------

CHAT = helpers.make_tokenizer()
CHAT.chat_template = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{% endfor %}>"
)


def prompts_or_error(file: str, tokenizer, **changes) -> list | str:
    """The prompts of a file, or the one line with which reading them exits; nothing else."""
    err = io.TextIOWrapper(io.BytesIO(), errors="backslashreplace")  # as sys.stderr
    try:
        with contextlib.redirect_stderr(err), report_errors():
            return prompts_of(file, tokenizer, **changes)
    except SystemExit as end:
        err.seek(0)
        text = err.read()
        assert end.code == 2 and text.startswith("error: --dataset ") and text.count("\n") == 1, (
            text
        )
        return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


names = st.sampled_from(
    "prompt question messages src tgt answer solution role content".split() + ["\u00e9 ", ""]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50)
turn = st.fixed_dictionaries({"role": scalars | st.just("user"), "content": scalars})
values = st.recursive(
    scalars | turn,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(names, values, max_size=4)


@pytest.mark.parametrize("tokenizer", [None, CHAT], ids=["text", "chat"])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows=st.lists(objects, max_size=4), column=names, value=values)
def test_rows_of_odd_types(folder, tokenizers, tokenizer, rows, column, value):
    """Each is a prompt of token ids, or the line that refuses it."""
    tokenizer = tokenizer or tokenizers[False, None]
    for odd in (rows, [{"prompt": "1+1=", "answer": "2", column: value}]):
        file = helpers.write_rows(folder / "odd.jsonl", odd)
        read = prompts_or_error(file, tokenizer, reward=("exact",), max_prompt_length=40)
        for row in read if isinstance(read, list) else []:
            assert isinstance(row["prompt"], str) and 0 < len(row["query"]) <= 40
            assert all(type(token) is int for token in row["query"]) and str(row["answer"]).strip()


@pytest.mark.parametrize(
    "value", [datetime.datetime(2020, 1, 1), b"\xff", True, {"a": 1}, [b"1"], None], ids=repr
)
def test_types_that_only_parquet_has(folder, tokenizer, value):
    for column in ("prompt", "answer", "other"):
        row = {"prompt": "1+1=", "answer": "2", column: value}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "types.parquet")
        read = prompts_or_error(str(folder / "types.parquet"), tokenizer)
        assert isinstance(read, str) == (
            column == "prompt" or column == "answer" and value in (None, {"a": 1})
        ), read


# ---- mixtures ------------------------------------------------------------------------------------


def write_mixture(folder, parts: dict[str, tuple[int, float]], name: str = "mix.json") -> str:
    """Write a list of data sets {letter: (size, weight)}, whose prompts begin with their letter;
    return its path.
    """
    entries = []
    for letter, (size, weight) in parts.items():
        rows = [{"prompt": f"{letter}{i}", "answer": str(i)} for i in range(size)]
        helpers.write_rows(folder / f"{letter}.jsonl", rows)
        entries.append({"prob": weight, "filepath": f"{letter}.jsonl"})
    return helpers.write_rows(folder / name, [entries])


def test_a_mixture_is_drawn_by_weight_and_passes_through_each_part(tmp_path, tokenizer):
    """It is one list, the same for the same seed."""
    path = write_mixture(tmp_path, {"a": (30, 2), "b": (500, 1), "c": (70, 5)})
    draw = lambda seed: data.load_train_and_eval(
        args_of(dataset=path, eval_every=0, seed=seed), tokenizer, why_unscorable
    )[0]
    rows = draw(1)
    drawn = [row["prompt"] for row in rows]
    assert len(drawn) == 600 and list(draw(1)) == list(rows) != list(draw(2))
    counts = collections.Counter(prompt[0] for prompt in drawn)
    for letter, size, share in (("a", 30, 2 / 8), ("b", 500, 1 / 8), ("c", 70, 5 / 8)):
        assert abs(counts[letter] - 600 * share) < 4 * math.sqrt(600 * share * (1 - share))
        part = [prompt for prompt in drawn if prompt[0] == letter]
        passes = [part[i : i + size] for i in range(0, len(part), size)]
        assert all(len(set(each)) == len(each) for each in passes) and len(
            {tuple(x) for x in passes}
        ) == len(passes)
    assert {row["dataset"] for row in rows} == {"a.jsonl", "b.jsonl", "c.jsonl"}


def test_what_is_evaluated_on_is_not_trained_on(tmp_path, tokenizer, capsys):
    """Of a list, the first of each data set in proportion to its weight."""
    evaluated = write_mixture(tmp_path, {"a": (5, 3), "b": (50, 1)}, "evaluated.json")
    args = args_of(dataset=str(tmp_path / "b.jsonl"), eval_dataset=evaluated, eval_prompts=4)
    train, held_out = data.load_train_and_eval(args, tokenizer, why_unscorable)
    assert [row["prompt"] for row in held_out] == ["a0", "a1", "a2", "b0"]
    assert [row["prompt"] for row in train] == [f"b{i}" for i in range(1, 50)]
    assert "left out 1 of 50 rows, whose prompts are evaluated on" in capsys.readouterr().err
    parts = parts_of(evaluated, tokenizer)
    assert len(mixture.first_prompts(parts, 0)) == 55
    assert [row["prompt"] for row in mixture.first_prompts(parts[1:], 2)] == ["b0", "b1"]


def test_entries_may_name_their_split(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(BUILT_IN, "arithmetic", {"train": 20, "test": 10})
    entries = [{"prob": 1, "filepath": "arithmetic"}, {"prob": 1, "filepath": "arithmetic@test"}]
    path = helpers.write_rows(tmp_path / "mix.json", [entries])
    sizes = {rows[0]["dataset"]: len(rows) for rows, _ in parts_of(path, tokenizer)}
    assert sizes == {"arithmetic": 20, "arithmetic@test": 10}


def test_an_entry_may_begin_at_home(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    helpers.write_rows(tmp_path / "rows.jsonl", helpers.ROWS)
    (tmp_path / "lists").mkdir()
    entries = [{"prob": 1, "filepath": "~/rows.jsonl"}]
    path = helpers.write_rows(tmp_path / "lists/mix.json", [entries])
    assert len(parts_of(path, tokenizer)[0][0]) == len(helpers.ROWS)


def test_supervised_rows(tmp_path, tokenizer, capsys):
    rows = [{"prompt": "a", "completion": "b" * n} for n in (1, 2, 99)]
    file = helpers.write_rows(tmp_path / "a.jsonl", rows)

    def responses(**flags) -> list[str]:
        args = ppo.Args(**vars(args_of(ptx_dataset=file, **flags)))
        return [tokenizer.decode(x["response"]) for x in load_supervised(args, tokenizer, [1])]

    assert responses() == ["b<eos>", "bb<eos>"]
    assert "left out 1 of 3 rows" in capsys.readouterr().err
    assert responses(response_column="prompt") == ["a<eos>"] * 3


def test_a_list_of_more_data_sets_than_are_read(tmp_path, capsys):
    path = tmp_path / "list.json"
    path.write_text(json.dumps([{"prob": 1, "filepath": "none"}] * 1001))
    line = refused(capsys, read_parts, "--dataset", str(path), "train")
    assert line == f"error: --dataset {path}: lists 1001 data sets, of which 1000 are read"


@pytest.mark.parametrize(
    "entry, field",
    [
        ({"prob": 0, "filepath": "a.jsonl"}, "prob"),
        ({"prob": float("nan"), "filepath": "a.jsonl"}, "prob"),
        ({"prob": 1, "filepath": ""}, "filepath"),
        ({"prob": 1, "filepath": "a.jsonl", "weight": 2}, "weight"),
    ],
)
def test_bad_entries(entry, field, tmp_path, tokenizer, capsys):
    path = write_mixture(tmp_path, {"a": (1, 0.5)})
    helpers.write_rows(path, [[{"prob": 0.5, "filepath": "a.jsonl"}, entry]])
    line = refused(capsys, prompts_of, path, tokenizer)
    assert line.startswith(f"error: --dataset {path} entry 2: {field}: ")
