"""Command lines, --config and the rules of flags (plumbing/run/command.py): in this process, before
anything is loaded.
"""

import dataclasses
import json
import math
import re
import shlex

import evaluate
import helpers
import pytest
import reward_server
import vllm_server
from pydantic import ValidationError

import distill
import grpo
import ppo
import reward_model
import rloo
from plumbing.run import command
from plumbing.run.command import report_errors

SCRIPTS = {
    x.__name__: x
    for x in (grpo, rloo, ppo, reward_model, evaluate, distill, reward_server, vllm_server)
}

# {line: what is printed}: words that are refused, rules, warnings ("" for none); {content of a
# .yaml file: its error}; {flag: values outside of its range}, those of NaN and infinity aside;
# {reward: a part of its system prompt}
CASES = helpers.table("command_lines.json")


def parse(line: str):
    script, *words = shlex.split(line)
    return command.parse(SCRIPTS[script].Args, words)


def refused(capsys, line: str) -> str:
    """Return what a command line that is refused prints."""
    with pytest.raises(SystemExit) as end, report_errors():
        parse(line)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    return err


# ---- words and ranges: tyro's and pydantic's own messages, which name the flag -------------------


@pytest.mark.parametrize("line", CASES["words"])
def test_bad_words(line, capsys):
    # without boxes
    assert CASES["words"][line] in re.sub(r"[│╭╮╰╯─|+\s]+|-{9,}", " ", refused(capsys, line))


@pytest.mark.parametrize("name", CASES["ranges"])
def test_ranges(name):
    for value in CASES["ranges"][name].split():
        with pytest.raises(ValidationError, match=f"{name}(.0)?\n  Input should be "):
            grpo.Args(**{name: (value,) if name == "reward_weights" else value})


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "vllm_server"])
def test_every_number_has_a_range(script):
    """No number takes NaN or infinity, and only two make sense below 0."""
    cls = SCRIPTS[script].Args
    numbers = [
        field.name
        for field in dataclasses.fields(cls)
        if type(field.default) in (int, float) and "Literal" not in str(field.type)
    ]
    assert len(numbers) >= 3
    for name in numbers:
        for value in [math.nan, math.inf] + [-1] * (name != "penalty_reward_value"):
            with pytest.raises(ValidationError):
                cls(**{name: value})


NO_PATHS = (
    "run_name keep_best stop_token chat_template_kwargs prompt_column answer_column response_column "
    "turn_stop rollout_servers system_prompt teacher_prompt teacher_system_prompt host"
).split()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_path_may_begin_at_home(script, monkeypatch):
    """Where the shell has left the ~, as in quotes and in a file."""
    monkeypatch.setenv("HOME", "/h")
    cls = SCRIPTS[script].Args
    read = 0
    for field in dataclasses.fields(cls):
        if re.search(r"\bstr\b", str(field.type)) and field.name not in NO_PATHS:
            several = "tuple" in str(field.type)
            values = {"model": ""} if script == "vllm_server" else {}
            values[field.name] = ["~/a.py:b"] if several else "~/a.py:b"
            expected = ("/h/a.py:b",) if several else "/h/a.py:b"
            assert getattr(cls(**values), field.name) == expected, field.name
            read += 1
    assert read


# ---- rules and warnings --------------------------------------------------------------------------


@pytest.mark.parametrize("line", CASES["rules"])
def test_rules(line, capsys):
    """One line with the values of the flags that it names."""
    err = helpers.refused(capsys, parse, line)
    assert CASES["rules"][line] in err and err.endswith(")")


WARNINGS = CASES["warnings"] | {x: "" for x in SCRIPTS if x not in ("distill", "vllm_server")}


@pytest.mark.parametrize("line", WARNINGS)
def test_warnings(line, capsys):
    parse(line)
    err = capsys.readouterr().err
    assert err.startswith(WARNINGS[line]) and err.count("\n") == bool(WARNINGS[line])


@pytest.mark.parametrize("reward", CASES["system prompts"])
def test_the_system_prompt_goes_by_the_first_reward(reward, capsys):
    """It is printed, and stands in args.json; one that is given stays."""
    text = parse(f"grpo --reward {reward}").system_prompt
    part = CASES["system prompts"][reward]
    assert part in text and bool(text) == bool(part)
    assert capsys.readouterr().out == f"--system_prompt {text!r}, by --reward {reward.split()[0]}\n"
    assert (
        parse(f"evaluate --reward {reward} --system_prompt=").system_prompt == ""
        and not capsys.readouterr().out
    )


def test_one_rank_of_a_node_speaks(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    for line in ("grpo --kl_coef -1", "grpo --kl_ceof 1", "grpo --total_episodes 3"):
        with pytest.raises(SystemExit) as end, report_errors():
            parse(line)
        assert end.value.code == 2 and capsys.readouterr() == ("", "")


# ---- --config ------------------------------------------------------------------------------------


def with_file(
    tmp_path, content: str, line: str = "", name: str = "config.yaml", script: str = "grpo"
):
    (tmp_path / name).write_text(content)
    return parse(f"{script} --config {tmp_path / name} {line}")


def test_flags_of_the_command_line_override_the_file(tmp_path):
    content = "learning_rate: 1e-5\nreward: [math, format]\ngroup_size: 16\nnon_stop_penalty: false\nclip_low: null\n"
    args = with_file(
        tmp_path, content, "--group_size 32 --reward exact --resume --no-resume --resume --seed=3"
    )
    changed = dict(learning_rate=1e-5, reward=("exact",), group_size=32, resume=True, seed=3)
    changed |= dict(non_stop_penalty=False, system_prompt="")
    assert args == dataclasses.replace(grpo.Args(), **changed)
    assert with_file(tmp_path, content).reward == ("math", "format")
    texts = {
        "system_prompt": "- think\n--seed 3 = 'x'",
        "reward_weights": [-0.5],
        "adam_betas": [0.9, 0.95],
    }
    args = with_file(tmp_path, json.dumps(texts), name="config.json")
    assert (args.system_prompt, args.reward_weights, args.adam_betas) == (
        texts["system_prompt"],
        (-0.5,),
        (0.9, 0.95),
    )


@pytest.mark.parametrize("script", ["grpo", "ppo", "reward_model", "evaluate"])
def test_what_a_run_leaves_is_a_config(script, tmp_path):
    args = dataclasses.replace(SCRIPTS[script].Args(), seed=7, system_prompt="")
    left = json.dumps({"args": dataclasses.asdict(args), "script": f"{script}.py", "ranks": 2})
    assert with_file(tmp_path, left, name="args.json", script=script) == args


def test_a_config_may_merge_keys(tmp_path):
    args = with_file(tmp_path, "<<: {seed: 3, group_size: 4}\nseed: 5\n")
    assert (args.seed, args.group_size) == (5, 4)


@pytest.mark.parametrize("content", CASES["configs"])
def test_bad_files(content, tmp_path, capsys):
    path = tmp_path / ("config.json" if content.startswith("{") else "config.yaml")
    path.write_text(content)
    err = refused(capsys, f"grpo --config {path}")
    assert err.startswith("error: --") and CASES["configs"][content] in err and err.count("\n") == 1
