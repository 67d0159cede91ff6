"""Bad input ends with one line that names the flag, file and row, and exit code 2; no traceback, no run folder."""

import json
import math
import os
import time
from pathlib import Path

import helpers
import pytest
import reward_server
from helpers import HELD_OUT, ROWS, refusal, run_here, tiny_model, write_rows
from transformers import AutoTokenizer

import grpo
from plumbing import command_line
from plumbing.models import loading


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    values = helpers.workspace(tmp_path_factory.mktemp("bad"))
    return {**values, "run_name": "run", "total_episodes": 8, "eval_every": 0, "save_every": 0}


@pytest.fixture(scope="module")
def models(base, tmp_path_factory) -> dict[str, str]:
    """Model folders, each with one thing wrong."""
    folder = tmp_path_factory.mktemp("models")
    made = {name: tiny_model(folder / name, chat=name == "chat") for name in ("no tokenizer", "no model", "chat")}
    made["no pad"] = tiny_model(folder / "no pad", "gpt_neox")
    for name in os.listdir(made["no tokenizer"]):
        if "token" in name:
            os.remove(folder / "no tokenizer" / name)
    config = folder / "no pad" / "tokenizer_config.json"
    settings = json.loads(config.read_text()) | {"tokenizer_class": "TokenizersBackend"}  # Qwen2's has a default
    del settings["pad_token"]
    config.write_text(json.dumps(settings))
    os.remove(folder / "no model" / "model.safetensors")
    (folder / "empty").mkdir()
    return {**made, "empty": str(folder / "empty"), "gone": str(folder / "gone")}


@pytest.fixture
def refuses(base, tmp_path, capsys):
    """Run with flags, in this process; it has to say one thing, of which every word of `named` is a part, and end."""

    def check(named: tuple[str, ...], **changes) -> None:
        values = {**base, "output_dir": str(tmp_path / "runs"), **changes}
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_here(values)
        said = capsys.readouterr()
        line = refusal(said.err)
        assert end.value.code == 2 and len(line) < 1000
        assert not said.out
        for word in named:
            assert word in line, (word, line)
        assert not (Path(values["output_dir"]) / "run").exists()

    return check


# ---- data ------------------------------------------------------------------------------------------------------------


def with_row(k: int, row) -> list:
    return [*ROWS[: k - 1], row, *ROWS[k:]]


ROW_FAULTS = {
    "empty prompt": (with_row(3, {"prompt": " \n", "answer": "1"}), "row 3", "empty"),
    "no prompt in this row": (with_row(5, {"answer": "1"}), "row 5"),
    "null prompt": (with_row(5, {"prompt": None, "answer": "1"}), "row 5"),
    "prompt too long": (with_row(4, {"prompt": "1" * 21, "answer": "1"}), "row 4", "21", "--max_prompt_length 20"),
    "row is a list": (with_row(2, ["1+1=", "2"]), "row 2", "list"),
    "row is text": (with_row(2, "1+1="), "row 2", "str"),
    "row is null": (with_row(2, None), "row 2"),
    "prompt is a number": (with_row(6, {"prompt": 12, "answer": "1"}), "row 6"),
    "prompt is an object": (with_row(6, {"prompt": {"role": "user"}, "answer": "1"}), "row 6"),
    "prompt is a list of numbers": (with_row(6, {"prompt": [1, 2], "answer": "1"}), "row 6"),
    "prompt is an empty list": (with_row(6, {"prompt": [], "answer": "1"}), "row 6"),
    "messages without a template": (
        with_row(7, {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}),
        "row 7",
        "chat template",
    ),
}


@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_rows(refuses, tmp_path, fault):
    rows, *named = ROW_FAULTS[fault]
    file = write_rows(tmp_path / "data.jsonl", rows)
    refuses(("--dataset", file, *named), dataset=file, max_prompt_length=20, overlong_prompts="error")


def test_the_same_fault_in_the_evaluation_set(refuses, tmp_path):
    file = write_rows(tmp_path / "test.jsonl", with_row(3, {"prompt": "", "answer": "1"}))
    refuses(("--eval_dataset", file, "row 3"), eval_dataset=file, eval_every=1)


def test_messages_with_a_bad_turn(refuses, tmp_path, models):
    for turn in ({"role": "user"}, "hello", 3, None):
        file = write_rows(tmp_path / "data.jsonl", with_row(2, {"prompt": [turn], "answer": "1"}))
        refuses(("--dataset", file, "row 2"), dataset=file, model=models["chat"])


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_row_without_an_answer(refuses, tmp_path, answer):
    file = write_rows(tmp_path / "data.jsonl", with_row(4, {"prompt": "1+1=", "answer": answer}))
    refuses(("--dataset", file, "row 4", "answer", "gsm8k"), dataset=file, reward="gsm8k")


def test_columns(refuses, tmp_path):
    file = write_rows(tmp_path / "data.jsonl", [{"input": "1+1=", "output": "2"}] * 3)
    refuses(("--dataset", file, "--prompt_column", "input, output"), dataset=file)
    refuses(("--dataset", file, "--prompt_column", "'text'", "input, output"), dataset=file, prompt_column="text")
    refuses(
        ("--dataset", file, "--answer_column", "input, output"), dataset=file, prompt_column="input", reward="exact"
    )
    refuses(
        ("--dataset", file, "--answer_column", "'label'"), dataset=file, prompt_column="input", answer_column="label"
    )


@pytest.mark.parametrize(
    "name, content, named",
    [
        ("data.jsonl", '{"prompt": "a"}\n\n{"prompt": "a"\n{"prompt": "b"}\n', ("line 3",)),
        ("data.jsonl", '{"prompt": "a"}\n{"prompt": "b"} {"prompt": "c"}\n', ("line 2",)),
        ("data.json", '[{"prompt": "a"},\n{"prompt": }]', ("line 2",)),
        ("data.json", '{"prompt": "a"}', ("list of rows",)),
        ("data.json", "[[1]]", ("row 1",)),
        ("data.json", "[]", ("no rows",)),
        ("data.jsonl", "", ("no rows",)),
        ("data.jsonl", "\n \n", ("no rows",)),
        ("data.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff\xfe"}\n', ("line 2",)),
        ("data.parquet", "not parquet", ("parquet",)),
        ("data.csv", "prompt\na\n", (".jsonl",)),
    ],
)
def test_files(refuses, tmp_path, name, content, named):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refuses(("--dataset", str(file), *named), dataset=str(file))


def test_data_sets_that_do_not_exist(refuses, tmp_path):
    refuses(("--dataset", "arithmetics"), dataset="arithmetics")
    refuses(("--dataset", "no/such/file.jsonl"), dataset="no/such/file.jsonl")
    refuses(("--dataset", "no/file.jsonl"), dataset="no/file.jsonl")
    refuses(("--dataset", "arithmetic", "'validation'"), dataset="arithmetic", dataset_split="validation")
    (tmp_path / "folder").mkdir()
    refuses(("--dataset", str(tmp_path / "folder")), dataset=str(tmp_path / "folder"))


def test_every_row_held_out(refuses, tmp_path):
    file = write_rows(tmp_path / "data.jsonl", HELD_OUT)
    refuses(("--dataset", file), dataset=file, eval_every=1)


# ---- models and tokenizers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gone", "no tokenizer", "no model", "empty"])
def test_models(refuses, models, name):
    refuses(("--model", models[name]), model=models[name])


def test_reference_model(refuses, models):
    refuses(("--ref_model", models["gone"]), ref_model=models["gone"])


def test_no_pad_token(models, base, tmp_path):
    """The end token takes its place."""
    run_here({**base, "output_dir": str(tmp_path), "model": models["no pad"]})
    final = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    assert final.pad_token == final.eos_token == "<eos>"


def test_responses_longer_than_the_model_can_read(refuses, tmp_path):
    """The tiny model has 256 positions; its longest prompt has 5 tokens or so."""
    refuses(("--max_response_length 255", "makes 2", "256 positions"), max_response_length=255)
    file = write_rows(tmp_path / "ptx.jsonl", [{"prompt": "1" * 200, "answer": "1" * 60}])
    ptx = dict(ptx_dataset=file, ptx_coef=1.0, max_response_length=100)
    refuses(("--ptx_dataset", "its longest row", "makes 261 tokens", "256 positions"), **ptx)


def test_stop_token(refuses):
    refuses(("--stop_token", "'12'"), stop_token="12")


# ---- rewards ---------------------------------------------------------------------------------------------------------


def test_rewards(refuses, tmp_path):
    refuses(("--reward maths", "gsm8k"), reward="maths")
    file = tmp_path / "reward.py"
    refuses((f"--reward {file}:score", "no file"), reward=f"{file}:score")
    file.write_text("def other(prompts, responses): pass\nvalue = 3\n")
    refuses((f"--reward {file}:score",), reward=f"{file}:score")
    refuses((f"--reward {file}:value",), reward=f"{file}:value")
    refuses((f"--reward {file}",), reward=str(file))
    refuses((f"--reward {file}:score",), reward=("gsm8k", f"{file}:score"))
    file.write_text("def score(prompts, responses:\n    return\n")
    refuses((f"--reward {file}:score", "SyntaxError"), reward=f"{file}:score")
    file.write_text("import no_such_module\n")
    refuses((f"--reward {file}:score", "no_such_module"), reward=f"{file}:score")
    file.write_text("import sys\nsys.exit(3)\n")
    refuses((f"--reward {file}:score",), reward=f"{file}:score")


def test_reward_weights(refuses):
    refuses(("--reward_weights", "2", "1"), reward_weights=(1.0, 2.0))
    refuses(("--reward_weights", "1", "2"), reward=("exact", "format"), reward_weights=(1.0,))


# ---- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "named, changes",
    [
        (("--mini_batch_size 3", "8"), dict(mini_batch_size=3)),
        (("--mini_batch_size 16", "8"), dict(mini_batch_size=16)),
        (("--total_episodes 7", "8"), dict(total_episodes=7)),
        (("--group_size 1",), dict(group_size=1, mini_batch_size=1)),
        (("--min_response_length 11",), dict(min_response_length=11)),
        (("--min_learning_rate 1",), dict(min_learning_rate=1.0)),
        (("--dual_clip", "cispo"), dict(dual_clip=3.0, loss="cispo")),
        (("--ref_refresh_every", "--kl_coef"), dict(ref_refresh_every=2, kl_coef=0.0)),
        (("--overlong_buffer 11",), dict(overlong_buffer=11)),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_flags(refuses, named, changes):
    refuses(named, **changes)


@pytest.mark.parametrize(
    "name, value, meaning",
    [
        ("rollout_batch_size", 0, "above 0"),
        ("rollout_batch_size", -2, "above 0"),
        ("num_epochs", 0, "above 0"),
        ("max_response_length", 0, "above 0"),
        ("micro_batch_tokens", -1, "0 or more"),
        ("learning_rate", -0.001, "above 0"),
        ("learning_rate", "nan", "above 0"),
        ("warmup_ratio", -1.0, "between 0 and 1"),
        ("warmup_ratio", 1.5, "between 0 and 1"),
        ("weight_decay", -0.1, "0 or more"),
        ("weight_decay", "inf", "0 or more"),
        ("adam_beta1", 1.0, "0 or more and below 1"),
        ("adam_beta2", -0.5, "0 or more and below 1"),
        ("max_grad_norm", 0.0, "above 0"),
        ("dual_clip", 0.5, "above 1, or 0 for none"),
        ("dual_clip", 1.0, "above 1, or 0 for none"),
        ("temperature", 0.0, "above 0"),
        ("top_p", 1.5, "above 0 and at most 1"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_k", -1, "0 or more"),
        ("repetition_penalty", 0.0, "above 0"),
        ("ref_refresh_every", -1, "0 or more"),
        ("kl_target", 0.0, "above 0"),
        ("kl_horizon", 0, "above 0"),
        ("keep_checkpoints", -1, "0 or more"),
        ("save_every", -1, "0 or more"),
        ("eval_every", -1, "0 or more"),
        ("eval_prompts", -1, "0 or more"),
        ("eval_samples", 0, "above 0"),
        ("reward_timeout", 0.0, "above 0 and at most 1e6"),
        ("log_samples", -1, "0 or more"),
        ("max_skipped_updates", -1, "0 or more"),
        ("sapo_tau_positive", 0.0, "above 0"),
        ("penalty_reward_value", "nan", "a finite number"),
    ],
)
def test_ranges(refuses, name, value, meaning):
    """The line says which value of which flag, and the range that stands in its type."""
    refuses((f"--{name}: has to be {meaning}, not {value}",), **{name: value})


def test_the_range_of_a_number_that_may_be_left_out(refuses):
    refuses(("--clip_low", "has to be between 0 and 1, not 1.5"), clip_low=1.5)
    refuses(("--clip_high", "has to be 0 or more, not -0.1"), clip_high=-0.1)


def test_the_range_of_numbers_in_a_list(refuses):
    refuses(("--reward_weights: ", "inf"), reward_weights=(1.0, math.inf))


NO_FLAG = "there is no such flag"
COMMAND_LINES = {
    "--group_sise 4": f"--group_sise: {NO_FLAG}; did you mean --group_size?",
    "--group-sise=4": f"--group-sise: {NO_FLAG}; did you mean --group_size?",
    "--confg x.json": f"--confg: {NO_FLAG}; did you mean --config?",
    "--hepl": f"--hepl: {NO_FLAG}; did you mean --help?",
    "--zzzz 1": f"--zzzz: {NO_FLAG}; --help lists them",
    "-x": f"-x: {NO_FLAG}; --help lists them",
    "--group_size 8 9": "9 behind --group_size: no flag takes this word; flags of yes or no stand alone",
    "--resume true": "true behind --resume: no flag takes this word; flags of yes or no stand alone",
    "--group_size --seed 2": "--group_size: takes a value",
    "--config": "--config: takes a value",
    "--group_size two": "--group_size: has to be a whole number, not two",
    "--group_size 1.5": "--group_size: has to be a whole number, not 1.5",
    "--learning_rate x": "--learning_rate: has to be a number, not x",
    "--clip_low x": "--clip_low: has to be a number, not x",
    "--clip_low -1": "--clip_low: has to be between 0 and 1, not -1",
    "--async_steps 2": "--async_steps 2: has to be one of 0, 1",
    "--shard größe": "--shard größe: has to be one of auto, none, fsdp",
    "--advantage_scale median": "--advantage_scale median: has to be one of batch, group, none",
}


@pytest.mark.parametrize("typed", COMMAND_LINES)
def test_a_bad_command_line_is_one_line(typed, capsys):
    with pytest.raises(SystemExit) as end:
        command_line.parse(grpo.Args, typed.split())
    said = capsys.readouterr()
    assert end.value.code == 2 and not said.out and said.err == f"error: {COMMAND_LINES[typed]}\n"


@pytest.mark.parametrize(
    "words, line",
    [
        (["--port", "1"], "--reward: has to be given"),
        (["--reward", "math", "--prot", "1"], f"--prot: {NO_FLAG}; did you mean --port?"),
        (["--reward", "math", "--reward_weights", "nan"], "--reward_weights: has to be a finite number, not nan"),
        (["--reward", "math", "--reward_timeout", "0"], "--reward_timeout: has to be above 0 and at most 1e6, not 0"),
    ],
)
def test_a_bad_command_line_of_a_command_is_one_line(words, line, capsys):
    with pytest.raises(SystemExit) as end:
        command_line.parse_ungrouped(reward_server.Args, words)
    assert end.value.code == 2 and refusal(capsys.readouterr().err).startswith(f"error: {line}")


def test_one_rank_of_a_node_speaks_of_a_flag(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as end:
        command_line.parse(grpo.Args, ["--kl_coef", "-1"])
    assert end.value.code == 2 and capsys.readouterr() == ("", "")


# ---- as a user sees it: processes of their own -----------------------------------------------------------------------


def test_a_run_that_exists(base, tmp_path):
    values = {**base, "output_dir": str(tmp_path)}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    line = refusal(helpers.run(values, code=2).err)
    assert line.startswith("error: --run_name run") and "--resume" in line
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_one_line_from_two_ranks(base, tmp_path):
    values = {**base, "output_dir": str(tmp_path), "group_size": 1, "mini_batch_size": 1}
    first, second = helpers.run_ranks(values, 2, (2, 2))
    assert "--group_size 1" in refusal(first.err) and not second.errors
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("option", ["dataset", "model"])
def test_a_hub_that_cannot_be_reached(base, tmp_path, option):
    """One line, in a time that a person waits: here without being asked, as HF_HUB_OFFLINE is set."""
    values = {**base, "output_dir": str(tmp_path / "runs"), option: "nobody/nothing-of-this-name"}
    begin = time.monotonic()
    line = refusal(helpers.run(values, code=2).err)
    assert line.startswith(f"error: --{option} nobody/nothing-of-this-name")
    assert time.monotonic() - begin < 60 and not (tmp_path / "runs").exists()


# ---- runs that cannot go on, or begin ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> dict:
    values = {**helpers.workspace(tmp_path_factory.mktemp("finished")), "eval_every": 0, "run_name": "run"}
    helpers.run_here({**values, "total_episodes": 16})
    return values


def last_line(values, capsys, script: str = "grpo") -> str:
    with pytest.raises(SystemExit) as end:
        helpers.run_here(values, script)
    errors = [line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if line.startswith("error:")]
    assert end.value.code == 2 and len(errors) == 1
    return errors[0]


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_an_output_folder_that_cannot_be_made(finished, tmp_path, capsys, folder):
    (tmp_path / "file").write_text("")
    line = last_line({**finished, "output_dir": str(tmp_path / folder)}, capsys)
    assert line.startswith(f"error: --output_dir {tmp_path / folder}: ")


def test_two_runs_that_begin_at_once(finished, tmp_path, capsys, monkeypatch):
    """The second one to make the folder ends, though there was none when it looked."""
    values = {**finished, "output_dir": str(tmp_path)}
    monkeypatch.setattr(loading, "check_decodes", lambda *_: (tmp_path / "run").mkdir())
    assert "cannot make" in last_line(values, capsys)


def test_ranks_end_alike_where_the_first_cannot_make_the_folder(finished, tmp_path):
    values = {**finished, "output_dir": str(tmp_path), "run_name": "long" * 70}
    first, second = helpers.run_ranks(values, 2, (2, 2))
    assert len(first.errors) == 1 and "cannot make" in first.errors[0]
    assert not second.errors and "Traceback" not in first.err + second.err


def test_a_column_that_is_named_as_an_argument(finished, tmp_path, capsys):
    path = helpers.write_rows(tmp_path / "rows.jsonl", [{"prompt": "1", "answer": "2", "responses": "3"}])
    line = last_line({**finished, "dataset": path, "run_name": "columns"}, capsys)
    assert line.startswith(f"error: --dataset {path} row 1: has a column 'responses'")
