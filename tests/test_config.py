"""Flags from a file: --config."""

import dataclasses
import json

import pytest
from helpers import refusal

import grpo
import reward_model
from plumbing import command_line


def parse(tmp_path, content: str, *words: str, name: str = "config.yaml", script=grpo):
    (tmp_path / name).write_text(content)
    return command_line.parse(script.Args, ["--config", str(tmp_path / name), *words])


def test_flags_of_the_command_line_go_over_the_file(tmp_path):
    content = "learning_rate: 1e-5\nreward: [math, format]\ngroup_size: 4\nnon_stop_penalty: false\nclip_low: null\n"
    args = parse(tmp_path, content, "--group_size", "16", "--reward", "exact", "--resume")
    changed = dict(learning_rate=1e-5, reward=("exact",), group_size=16, non_stop_penalty=False, resume=True)
    assert args == dataclasses.replace(grpo.Args(), **changed)
    assert parse(tmp_path, content, "--seed=2", "--mini_batch_size=64").reward == ("math", "format")
    texts = {"system_prompt": "- think\n--seed 3 = 'x'", "run_name": "", "reward_weights": [1, -0.5]}
    args = parse(tmp_path, json.dumps(texts), name="config.json")
    assert (args.system_prompt, args.reward_weights) == (texts["system_prompt"], (1.0, -0.5))


@pytest.mark.parametrize("script", [grpo, reward_model])
def test_what_a_run_leaves_is_a_config(script, tmp_path):
    args = dataclasses.replace(script.Args(), seed=7, system_prompt="", learning_rate=3e-7)
    left = json.dumps({"args": dataclasses.asdict(args), "script": "grpo.py", "ranks": 2})
    assert parse(tmp_path, left, name="args.json", script=script) == args


@pytest.mark.parametrize(
    "content, word",
    [
        ("lerning_rate: 1e-5", "there is no flag 'lerning_rate'; did you mean 'learning_rate'?"),
        ("group_size: two", "--group_size"), ("kl_coef: -1", "--kl_coef: has to be 0 or more, not -1"),
        ("group_size: [1, 2]", "takes text or numbers"), ("model:", "model has no value"), ("loss: ppo", "--loss"),
        ("resume: 1", "resume takes true or false, not 1"), ("- a", "{flag: value}"), ("a: [", "no valid file"),
        ("config: other.yaml", "there is no flag 'config'"),
    ],
)  # fmt: skip
def test_a_bad_file_is_said_in_a_line(content, word, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        parse(tmp_path, content)
    assert end.value.code == 2 and word in refusal(capsys.readouterr().err)


def test_a_file_that_is_not_there(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        command_line.parse(grpo.Args, [f"--config={tmp_path / 'no.json'}"])
    line = refusal(capsys.readouterr().err)
    assert end.value.code == 2 and line.startswith(f"error: --config {tmp_path / 'no.json'}: could not be read")
