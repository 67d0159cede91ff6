"""Command lines, --config and the rules of flags (plumbing/cli.py): in this process, before anything is loaded."""

import dataclasses
import json
import math
import re
import shlex

import evaluate
import pytest
import reward_server
import vllm_server
from pydantic import ValidationError

import distill
import grpo
import ppo
import reward_model
import rloo
from plumbing import cli

SCRIPTS = {"grpo": grpo, "rloo": rloo, "ppo": ppo, "reward_model": reward_model, "evaluate": evaluate}
SCRIPTS |= {"distill": distill, "reward_server": reward_server, "vllm_server": vllm_server}


def parse(line: str):
    script, *words = shlex.split(line)
    return cli.parse(SCRIPTS[script].Args, words)


def refused(capsys, line: str) -> str:
    """Return what a command line that is refused prints."""
    with pytest.raises(SystemExit) as end:
        parse(line)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    return err


# ---- words and ranges: tyro's and pydantic's own messages, which name the flag ---------------------------------------

COMMAND_LINES = {
    "grpo --group_sise 4": "Perhaps you meant: --group_size",
    "grpo --group_size two": "--group_size: invalid literal for int() with base 10: 'two'",
    "grpo --async_steps 2": "invalid choice '2' for argument '--async_steps'. Expected one of ('0', '1')",
    "vllm_server --model a --port 1e3": "--port: invalid literal for int()",
    "grpo --reward": "reward Tuple should have at least 1 item",
    "grpo --rollout_servers http://a:b": "rollout_servers.0 String should match pattern",
    "ppo --tools a.py:f --turn_stop=": "turn_stop.0 String should have at least 1 character",
    "reward_server --port 65536": "port Input should be less than 65536",
    "evaluate --samples 513": "samples Input should be less than or equal to 512",
    "grpo --config none.json": "--config none.json: [Errno 2] No such file or directory",
    # names of other systems
    "grpo --max_steps 5": "max_steps: is --total_episodes here",
    "rloo --per-device-train-batch-size=8": "is --rollout_batch_size and --mini_batch_size here",
    "reward_model --model_name_or_path a/b": "is --model here",
    "ppo data.train_batch_size=8": "data.train_batch_size: is --rollout_batch_size here",
    "grpo --reward_funcs f --loss-type=bnpo --epsilon 0.1": "error: reward_funcs: is --reward here; "
    "loss_type: is --loss here; epsilon: is --clip_low and --clip_high here",
    "rloo --report_to none --bf16 --logging_steps=1": "error: report_to: is --track here; "
    "bf16: is --precision here; logging_steps: is always 1 here",
    "ppo data.max_prompt_length=9 trainer.n_gpus_per_node=8": "max_prompt_length here; "
    "trainer.n_gpus_per_node: is torchrun --nproc_per_node here",
    "rloo algorithm.adv_estimator=grpo": "algorithm.adv_estimator: is the script (grpo.py",
    "reward_model --num_epochs 3": "num_epochs: is --passes here",
    "distill --total_episodes=300 --num_epochs 3": "error: total_episodes: is --passes here",
}


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_bad_words(line, capsys):
    assert COMMAND_LINES[line] in re.sub(r"[│╭╮╰╯─|+\s]+|-{9,}", " ", refused(capsys, line))  # without boxes


RANGES = {  # flag: values outside of its range; below 0, NaN and infinity are in a test below
    "rollout_batch_size": "0", "num_epochs": "0", "micro_batch_tokens": "0", "learning_rate": "0",
    "warmup_ratio": "1.5", "max_grad_norm": "0", "temperature": "0", "top_p": "0 1.5", "repetition_penalty": "0",
    "kl_horizon": "0", "eval_samples": "0", "timeout": "0 1e9", "clip_low": "-1 2", "clip_high": "-0.1",
    "reward_weights": "1e30", "overlong_buffer": "-1",
}  # fmt: skip


@pytest.mark.parametrize("name", RANGES)
def test_ranges(name):
    for value in RANGES[name].split():
        with pytest.raises(ValidationError, match=f"{name}(.0)?\n  Input should be "):
            grpo.Args(**{name: (value,) if name == "reward_weights" else value})


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "vllm_server"])
def test_every_number_has_a_range(script):
    """No number takes NaN or infinity, and only two make sense below 0."""
    cls = SCRIPTS[script].Args
    numbers = [field for field in dataclasses.fields(cls) if isinstance(field.default, (int, float))]
    numbers = [field.name for field in numbers if "Literal" not in str(field.type) and field.type is not bool]
    assert len(numbers) >= 3
    for name in numbers:
        for value in [math.nan, math.inf] + [-1] * (name != "penalty_reward_value"):
            with pytest.raises(ValidationError):
                cls(**{name: value})


# ---- rules and warnings ----------------------------------------------------------------------------------------------

RULES = {
    "rloo --total_episodes 511": "--total_episodes must be at least a step, --rollout_batch_size x --group_size (total",
    "grpo --group_size 1": "--group_size must be 2 or more",
    "grpo --min_response_length 1025": "--min_response_length must be at most --max_response_length",
    "ppo --min_learning_rate 1": "--min_learning_rate must be at most --learning_rate",
    "reward_model --min_learning_rate 1": "--min_learning_rate must be at most --learning_rate",
    "grpo --dual_clip 3 --loss cispo": "--dual_clip requires a --loss that clips the ratio (dual_clip 3.0, l",
    "grpo --advantage_scale gdpo --kl_in reward": "--advantage_scale gdpo requires --kl_in loss",
    "grpo --kl_weighting ratio --kl_in reward": "--kl_weighting ratio requires --kl_in loss, a --kl_coef above 0",
    "grpo --kl_weighting ratio --kl_coef 0": "--kl_weighting ratio requires --kl_in loss, a --kl_coef above 0",
    "grpo --kl_weighting ratio --kl_estimator abs": "and another --kl_estimator than abs",
    "rloo --dual_clip 1": "--dual_clip must be above 1, or 0 for none",
    "grpo --ref_refresh_every 2 --kl_coef 0": "--ref_refresh_every requires a reference",
    "ppo --ref_refresh_every 2 --lora_rank 4": "--ref_refresh_every requires a reference",
    "rloo --kl_coef 0 --ref_model a/b": "--ref_model and --kl_target require a --kl_coef above 0",
    "ppo --kl_coef 0 --kl_target 1": "--ref_model and --kl_target require a --kl_coef above 0",
    "grpo --loss sapo --clip_low 0.1": "--clip_low and --clip_high require a --loss that clips the ratio (cl",
    "grpo --loss reinforce --clip_high 0.1": "--clip_low and --clip_high require a --loss that clips the ratio",
    "grpo --overlong_buffer 1025": "--overlong_buffer must be at most --max_response_length",
    "ppo --filter_groups drop": "--filter_groups requires a --group_size of 2 or more",
    "rloo --group_size 1": "--group_size must be 2 or more with this --advantage",
    "rloo --advantage remax --filter_groups drop": "--filter_groups requires another --advantage",
    "ppo --ptx_coef 1": "--ptx_coef and --ptx_dataset require each other",
    "ppo --ptx_dataset data.jsonl": "--ptx_coef and --ptx_dataset require each other",
    "ppo --critic_warmup_steps 351": "--critic_warmup_steps must be less than the steps of --total_episodes",
    "grpo --reward math math": "--reward must not name a source twice",
    "grpo --reward http://": "--reward: the address of a reward server must be of the form http://10.0.0.2:8000",
    "grpo --reward 'http://a b'": "--reward: the address",
    "grpo --reward math format --reward_weights 1": "--reward_weights must hold one weight for each source of --reward",
    "grpo --reward_weights 0": "--reward_weights must not all be 0",
    "reward_server --reward environment": "--reward environment requires the conversations of a run",
    "grpo --rollout_backend server": "--rollout_backend server and --rollout_servers require each other",
    "grpo --rollout_servers http://x": "--rollout_backend server and --rollout_servers require each other",
    "evaluate --samples 2 --temperature 0": "--samples must be at most 1 with --temperature 0",
    "grpo --vllm_tensor_parallel 2": "--vllm_tensor_parallel requires --rollout_backend vllm",
    "grpo --rollout_backend vllm --vllm_tensor_parallel 2 --async_steps 1": "--async_steps 1 requires",
    "grpo --reward environment": "--reward environment requires an --environment",
    "grpo --tool_call_pattern x": "--tool_call_pattern and --turn_stop require --tools or an --environment",
    "grpo --turn_stop x": "--tool_call_pattern and --turn_stop require --tools or an --environment",
    "rloo --tools a.py:f --min_response_length 2": "--tools and --environment require --min_response_length 0",
    "grpo --rollout_correction mask --rollout_correction_cap 0.5": "requires a --rollout_correction_cap of 1 or more",
}


@pytest.mark.parametrize("line", RULES)
def test_rules(line, capsys):
    """One line with the values of the flags that it names."""
    err = refused(capsys, line)
    assert err.startswith("error: ") and RULES[line] in err and err.count("\n") == 1 and err.endswith(")\n")


WARNINGS = {
    "grpo --clip_high 11": "warning: --clip_high: above 10",
    "ppo --value_clip 11": "warning: --value_clip: above 10",
    "grpo --kl_estimator k1": "warning: --kl_in loss with --kl_estimator k1",
    "rloo --top_p 0.9": "warning: --top_p, ",
    "grpo --environment a.py:A": "warning: --environment: its rewards do not count without environment in --reward",
    "ppo --repetition_penalty 1.1": "warning: --top_p, ",
    "grpo --kl_estimator k1 --kl_in reward": "",
    "grpo --kl_estimator k1 --kl_coef 0": "",
    "grpo --kl_estimator k1 --kl_weighting ratio": "",
    "distill --teacher a --rollout_batch_size 8": "",
    "grpo --rollout_batch_size 3": "",
    "ppo --rollout_batch_size 100": "",
} | {script: "" for script in SCRIPTS if script not in ("distill", "vllm_server")}  # of the defaults


@pytest.mark.parametrize("line", WARNINGS)
def test_warnings(line, capsys):
    parse(line)
    err = capsys.readouterr().err
    assert err.startswith(WARNINGS[line]) and err.count("\n") == bool(WARNINGS[line])


SYSTEM_PROMPTS = {"math format": "boxed{}", "gsm8k math": '"####"', "code": "", "gsm8k --chat_template none": ""}


@pytest.mark.parametrize("reward", SYSTEM_PROMPTS)
def test_the_system_prompt_goes_by_the_first_reward(reward, capsys):
    """It is printed, and stands in args.json; one that is given stays."""
    text = parse(f"grpo --reward {reward}").system_prompt
    assert SYSTEM_PROMPTS[reward] in text and bool(text) == bool(SYSTEM_PROMPTS[reward])
    assert capsys.readouterr().out == f"--system_prompt {text!r}, by --reward {reward.split()[0]}\n"
    assert parse(f"evaluate --reward {reward} --system_prompt=").system_prompt == "" and not capsys.readouterr().out


def test_one_rank_of_a_node_speaks(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    for line in ("grpo --kl_coef -1", "grpo --kl_ceof 1", "grpo --total_episodes 3"):
        with pytest.raises(SystemExit) as end:
            parse(line)
        assert end.value.code == 2 and capsys.readouterr() == ("", "")


# ---- --config --------------------------------------------------------------------------------------------------------


def with_file(tmp_path, content: str, line: str = "", name: str = "config.yaml", script: str = "grpo"):
    (tmp_path / name).write_text(content)
    return parse(f"{script} --config {tmp_path / name} {line}")


def test_flags_of_the_command_line_override_the_file(tmp_path):
    content = "learning_rate: 1e-5\nreward: [math, format]\ngroup_size: 16\nnon_stop_penalty: false\nclip_low: null\n"
    args = with_file(tmp_path, content, "--group_size 32 --reward exact --resume --no-resume --resume --seed=3")
    changed = dict(learning_rate=1e-5, reward=("exact",), group_size=32, resume=True, seed=3)
    changed |= dict(non_stop_penalty=False, system_prompt="")
    assert args == dataclasses.replace(grpo.Args(), **changed)
    assert with_file(tmp_path, content).reward == ("math", "format")
    assert with_file(tmp_path, "reward: exact\nreward_weights: 2\n").reward_weights == (2.0,)
    texts = {"system_prompt": "- think\n--seed 3 = 'x'", "reward_weights": [-0.5], "adam_betas": [0.9, 0.95]}
    args = with_file(tmp_path, json.dumps(texts), name="config.json")
    assert (args.system_prompt, args.reward_weights, args.adam_betas) == (texts["system_prompt"], (-0.5,), (0.9, 0.95))


@pytest.mark.parametrize("script", ["grpo", "ppo", "reward_model", "evaluate"])
def test_what_a_run_leaves_is_a_config(script, tmp_path):
    args = dataclasses.replace(SCRIPTS[script].Args(), seed=7, system_prompt="")
    left = json.dumps({"args": dataclasses.asdict(args), "script": f"{script}.py", "ranks": 2})
    assert with_file(tmp_path, left, name="args.json", script=script) == args
    assert parse(f"{script} {tmp_path / 'args.json'}") == args


CONFIGS = {
    "group-size: 4": "there is no flag 'group-size'",
    "kl_coef: -1": "kl_coef: Input should be greater than or equal to 0",
    "model: yes": "model: Input should be a valid string",
    "loss: ppo": "loss: Input should be 'grpo', 'dr_grpo'",
    "reward: [[exact]]": "reward: 0: Input should be a valid string",
    "total_episodes: 3": "--total_episodes must be at least a step",
    "- a": "Input should be a dictionary",
    "": "Input should be a dictionary",
    "beta: 1": "beta: is --kl_coef here",
    "1: 2": "Keys should be strings",
    "a: [": "while parsing a flow node",
    "!!python/object/apply:os.mkdir [made]": "could not determine a constructor",
}


@pytest.mark.parametrize("content", CONFIGS)
def test_bad_files(content, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(content)
    err = refused(capsys, f"grpo --config {tmp_path / 'config.yaml'}")
    assert err.startswith("error: --") and CONFIGS[content] in err and err.count("\n") == 1
