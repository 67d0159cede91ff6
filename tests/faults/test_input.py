"""Bad command lines and files: exit code 2, one line that says what to mend, within seconds, and nothing left behind.

What tests/test_bad_input.py and the tests of a single command hold is not here again. Commands run in this process, in
a folder of models and of FILES. Beside each stands how its line begins, without "error: ".
"""

import json
import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import forked_python
import pytest
from helpers import HELD_OUT, ROOT, ROWS, refusal, run_here, scalar_folder, tiny_model, write_rows

from plumbing import command_line

SECONDS = 10  # that a command may take to end

BASE = (
    "--model model --dataset data.jsonl --reward exact --system_prompt= --rollout_batch_size 2 --group_size 4 "
    "--mini_batch_size 8 --total_episodes 8 --max_response_length 10 --eval_every 0 --save_every 0"
)
FLAGS = {  # of a command that would run; what follows them counts
    "grpo": BASE,
    "ppo": BASE,
    "rloo": BASE,
    "reward_model": "--model model --dataset pairs.jsonl --system_prompt= --batch_size 4 --eval_every 0",
    "evaluate": "--model model --dataset data.jsonl --reward exact --system_prompt= --samples 2 --k 1 2",
    "reward_server": "--reward math --port 0",
    "vllm_server": "--model model",
    "plot": "",
}
FUNCTION = 'def f(a: int) -> int:\n    """Do it.\n\n    Args:\n        a: A number.\n    """\n    return a\n'
FILES = {
    "data.jsonl": ROWS,
    "held_out.jsonl": HELD_OUT,
    "pairs.jsonl": [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "none"} for row in ROWS],
    "binary.jsonl": bytes(range(256)) * 100,
    "packed.jsonl": b"\x1f\x8b\x08\x00" + b"\0" * 100,
    "zeros.jsonl": b"\0" * 5_000_000,
    "cut.jsonl": b'{"prompt": "' + b"1" * 5_000_000,
    "utf16.jsonl": '{"prompt": "1+1="}\n'.encode("utf-16"),
    "digits.jsonl": b'{"prompt": "1+1=", "answer": ' + b"9" * 5000 + b"}\n",
    "deep.json": b"[" * 100_000,
    "empty.parquet": b"",
    "split/dataset_dict.json": b"{",
    "unanswered.jsonl": [{"prompt": "1+1="}] * 9,
    "untold.jsonl": [{"prompt": "1+1=", "answer": 2}] * 9,
    "words.jsonl": [{"prompt": "1+1=", "answer": "two"}],
    "template.jinja": b"{% for",
    "raises.jinja": b"{{ raise_exception('never') }}",
    "drops.jinja": b"You are a robot.",
    "divides.jinja": b"{{ 1 // 0 }}",
    "binary.jinja": b"\xff\xfe",
    "tools.py": FUNCTION,
    "imports.py": b"import no_such_module",
    "exits.py": b"import os\nos._exit(3)",
    "no_hints.py": b"def f(a): pass",
    "holds_nul.py": b"\0",
    "curves/metrics.jsonl": [{"step": 1, "objective/scores": 0.5}],
    "broken_curves/metrics.jsonl": b"\xff\xfe\0\n",
    "list_curves/metrics.jsonl": b"[1, 2]\n",
    "text_curves/metrics.jsonl": [{"step": "x", "objective/scores": "y"}],
}
BROKEN = {  # copies of the model: (file, its content or what changes in it, how --model's line goes on)
    "cut config": ("config.json", b'{"model', "no tokenizer could be loaded from it"),
    "list as config": ("config.json", b"[]", "no tokenizer could be loaded from it"),
    "unknown type": ("config.json", {"model_type": "none"}, "no model could be loaded from it"),
    "text as number": ("config.json", {"vocab_size": "many"}, "no tokenizer could be loaded from it"),
    "nothing hidden": ("config.json", {"hidden_size": 0}, "not a causal language model"),
    "more layers": ("config.json", {"num_hidden_layers": 3}, "no tokenizer could be loaded from it"),
    "other sizes": ("config.json", {"hidden_size": 64}, "no model could be loaded from it"),
    "cut weights": ("model.safetensors", b"\x10", "no model could be loaded from it"),
    "cut tokenizer": ("tokenizer.json", b'{"ver', "no tokenizer could be loaded from it"),
    "list as tokenizer": ("tokenizer.json", b"[]", "no tokenizer could be loaded from it"),
    "list as its settings": ("tokenizer_config.json", b"[]", "no tokenizer could be loaded from it"),
    "no end": ("tokenizer_config.json", {"eos_token": None, "pad_token": None}, "its tokenizer has neither a pad"),
    "cut defaults": ("generation_config.json", b"{", "It looks like the config file at"),
    "text as end": ("generation_config.json", {"eos_token_id": "</s>"}, "its generation_config.json has"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder in which the commands run."""
    folder = tmp_path_factory.mktemp("input")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(content, list):
            write_rows(folder / name, content)
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, options in {
        "model": {},
        "chat": {"chat": True},
        "small": {"vocab_size": 9},
        "digits": {"vocab_size": 50},
        "large": {"vocab_size": 500},
    }.items():
        tiny_model(folder / name, **options)
    scalar_folder(folder / "model", folder / "scorer")
    scalar_folder(folder / "model", folder / "two labels", labels=2)
    scalar_folder(folder / "small", folder / "small scorer")
    for name, (file, content, _) in BROKEN.items():
        shutil.copytree(folder / "model", folder / name)
        if isinstance(content, dict):
            content = json.dumps(json.loads((folder / name / file).read_text()) | content).encode()
        (folder / name / file).write_bytes(content)
    (folder / "folder.jsonl").mkdir()
    (folder / "folder.py").mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "lost.jsonl").symlink_to("nowhere")
    return folder


def run(script: str, words: list[str]) -> None:
    """Do in this process what `python SCRIPT.py WORDS` does."""
    module = __import__(script)
    if script == "plot":
        module.main(command_line.parse_ungrouped(module.Args, words))
    elif script == "vllm_server":
        module.main(command_line.parse_ungrouped(module.Args, words), [])
    else:
        run_here(words, script)


@pytest.fixture
def refused(folder, monkeypatch, capsys):
    """A function that runs a command and returns its line, after it has checked all else."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("REWARD_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the server starts"))

    def run_command(command: str) -> str:
        script, *words = shlex.split(command)
        # Python itself leaves compiled files beside what it imports.
        files = lambda: sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts)
        before, begin = files(), time.monotonic()
        with pytest.raises(SystemExit) as end:
            run(script, [*shlex.split(FLAGS[script]), *words])
        said = capsys.readouterr()
        assert end.value.code == 2 and time.monotonic() - begin < SECONDS
        assert files() == before
        printed = [line for line in said.out.splitlines() if not line.startswith(("memory of each device", "--reward"))]
        assert not printed
        line = refusal(said.err)
        assert len(line) < 1000
        return line.removeprefix("error: ")

    return run_command


# ---- command lines ---------------------------------------------------------------------------------------------------

COMMANDS = {
    # files and folders
    "grpo --dataset=": "--dataset : no built-in task",
    "grpo --dataset größe/☃": "--dataset größe/☃: could not be read",
    "grpo --dataset a/b/c": "--dataset a/b/c: no built-in task (arithmetic), no such file or folder",
    "grpo --dataset https://example.com/rows.jsonl": "--dataset https://example.com/rows.jsonl: no built-in task",
    "grpo --dataset data.jsonl/x.jsonl": "--dataset data.jsonl/x.jsonl: ",
    "grpo --dataset folder.jsonl": "--dataset folder.jsonl: could not be read, split 'train'",
    "grpo --dataset pipe.jsonl": "--dataset pipe.jsonl: no built-in task",
    "grpo --dataset lost.jsonl": "--dataset lost.jsonl: no built-in task",
    "grpo --dataset split": "--dataset split: could not be read, split 'train'",
    "grpo --dataset binary.jsonl": "--dataset binary.jsonl: line 1 is not valid JSON",
    "grpo --dataset packed.jsonl": "--dataset packed.jsonl: line 1 is not valid JSON",
    "grpo --dataset zeros.jsonl": "--dataset zeros.jsonl: line 1 is not valid JSON",
    "grpo --dataset cut.jsonl": "--dataset cut.jsonl: line 1 is not valid JSON",
    "grpo --dataset utf16.jsonl": "--dataset utf16.jsonl: line 1 is not valid JSON",
    "grpo --dataset digits.jsonl": "--dataset digits.jsonl: line 1 is not valid JSON",
    "grpo --dataset deep.json": "--dataset deep.json: line 1 is not valid JSON",
    "grpo --dataset empty.parquet": "--dataset empty.parquet: not a readable parquet file",
    "grpo --dataset reasoning_gym:no_such": "--dataset reasoning_gym:no_such: ",
    "grpo --dataset arithmetic --dataset_split=": "--dataset arithmetic: has the splits train and test, not ''",
    "grpo --dataset arithmetic --eval_every 1 --eval_split x": "--eval_split of --dataset arithmetic: has the splits",
    "grpo --prompt_column ..": "--dataset data.jsonl: has no column '..' with anything in it; name one with",
    "grpo --answer_column answer.0": "--dataset data.jsonl: has no column 'answer.0' with anything in it",
    "grpo --max_prompt_length 1": "--dataset data.jsonl: every row is too long; row 1 has",
    "grpo --ptx_coef 1 --ptx_dataset unanswered.jsonl": "--ptx_dataset unanswered.jsonl row 1: has no text to imitate",
    "grpo --ptx_coef 1 --ptx_dataset untold.jsonl": "--ptx_dataset untold.jsonl row 1: has no text to imitate",
    "grpo --ptx_dataset data.jsonl": "--ptx_dataset data.jsonl: has no effect without a --ptx_coef above 0",
    "reward_model --dataset data.jsonl": "--dataset data.jsonl row 1: has no chosen response",
    "reward_model --batch_size 99": "--batch_size 99: --dataset pairs.jsonl has 13 pairs to train on only",
    "evaluate --dataset unanswered.jsonl": "--dataset unanswered.jsonl row 1: has no answer, which --reward exact",
    "evaluate --num_prompts 1e400": "--num_prompts: has to be a whole number, not 1e400",
    # models
    "grpo --model=": "--model : no tokenizer could be loaded from it",
    "grpo --model größe☃": "--model größe☃: no tokenizer could be loaded from it",
    "grpo --model model/config.json": "--model model/config.json: no tokenizer could be loaded from it",
    "grpo --model scorer": "--model scorer: its files lack weights of the model, such as lm_head.weight",
    "grpo --ref_model large": "--ref_model large: its vocabulary has 500 tokens, that of --model 259",
    "grpo --ref_model data.jsonl": "--ref_model data.jsonl: no model could be loaded from it",
    "grpo --model small": "--model small: has 9 tokens, and its tokenizer writes token ",
    "grpo --model digits --ptx_coef 1 --ptx_dataset words.jsonl": "--model digits: has 50 tokens, and its tokenizer",
    "evaluate --model small": "--model small: has 9 tokens, and its tokenizer writes token ",
    "reward_model --model small": "--model small: has 9 tokens, and its tokenizer writes token ",
    "reward_model --model 'two labels'": "--model two labels: its head has 2 labels",
    "ppo --value_model 'two labels'": "--value_model two labels: its head has 2 labels",
    "ppo --value_model 'small scorer'": "--value_model small scorer: cannot read what --model writes: it has 9 tokens",
    "grpo --reward 'small scorer'": "--reward small scorer: a trial call with two responses failed: cannot read",
    "grpo --reward model": "--reward model: is no reward model, as it has no head for a score",
    "grpo --pad_token ' '": "--pad_token  : the tokenizer of --model model has no such token",
    "grpo --stop_token=": "--stop_token '': has to be exactly one token of the tokenizer, this is 0",
    "grpo --stop_token ☃": "--stop_token '☃': has to be exactly one token of the tokenizer, this is 3",
    "grpo --chat_template none.jinja": "--chat_template none.jinja: takes none or a file that can be read",
    "grpo --chat_template model": "--chat_template model: takes none or a file that can be read",
    "grpo --chat_template binary.jinja": "--chat_template binary.jinja: takes none or a file that can be read",
    "grpo --chat_template template.jinja": "--dataset data.jsonl row 1: the chat template of --model refuses it",
    "grpo --chat_template raises.jinja": "--dataset data.jsonl row 1: the chat template of --model refuses it (never)",
    "grpo --chat_template divides.jinja": "--dataset data.jsonl row 1: the chat template of --model refuses it",
    "grpo --chat_template drops.jinja": "--dataset data.jsonl row 1: the chat template of --model leaves out its last",
    # where the run goes
    "grpo --output_dir=": "--output_dir: is empty; . is the folder that you are in",
    "grpo --output_dir /dev/null": "--output_dir /dev/null: ",
    "grpo --output_dir data.jsonl": "--output_dir data.jsonl: ",
    "grpo --run_name ..": "--run_name ..: has to name a folder in --output_dir",
    "grpo --run_name .": "--run_name .: has to name a folder in --output_dir",
    "rloo --run_name /a": "--run_name /a: has to name a folder in --output_dir",
    f"grpo --run_name {'x' * 300}": f"--run_name {'x' * 300}: cannot make a folder of this name (File name too long)",
    "evaluate --output_dir data.jsonl": "--output_dir data.jsonl: ",
    "evaluate --run_name ../x": "--run_name ../x: has to name a folder in --output_dir",
    f"evaluate --run_name {'x' * 300}": f"--run_name {'x' * 300}: cannot make a folder of this name",
    # numbers
    "grpo --reward_weights 1 x": "--reward_weights: has to be a number, not x",
    "grpo --reward_weights=": "--reward_weights: has to be a number, not ''",
    "evaluate --k 1 2.5": "--k: has to be a whole number, not 2.5",
    "evaluate --k 0": "--k: has to be above 0, not 0",
    f"grpo --seed 1{'0' * 30}": f"--seed: has to be 0 or more and at most 1e+15, not 1{'0' * 30}",
    f"grpo --num_epochs 1{'0' * 400}": "--num_epochs: has to be above 0 and at most 1e+15, not 1000",
    f"grpo --seed {'9' * 5000}": "--seed: has to be a whole number, not 9999",
    "grpo --learning_rate 1e300": "--learning_rate: has to be above 0 and at most 1e+30, not 1e300",
    "grpo --learning_rate -0": "--learning_rate: has to be above 0, not -0",
    "grpo --kl_coef -inf": "--kl_coef: has to be 0 or more, not -inf",
    "grpo --reward_timeout 1e9": "--reward_timeout: has to be above 0 and at most 1e6, not 1e9",
    "ppo --gae_lambda nan": "--gae_lambda: has to be between 0 and 1, not nan",
    "rloo --group_size=": "--group_size: has to be a whole number, not ''",
    "grpo --sequence_parallel 3": "--sequence_parallel 3: has to divide the number of ranks, 1",
    "grpo --shard fsdp --shard_group_size 2": "--shard_group_size 2: has to divide the number of ranks, 1",
    "ppo --critic_mini_batch_size 3": "--critic_mini_batch_size 3: has to divide the 8 responses a step",
    "grpo --max_response_length 1000": "--max_response_length 1000, behind a prompt of ",
    # flags that do not fit together
    "grpo --rollout_backend server": "--rollout_backend server and --rollout_servers ADDRESS ... go together",
    "grpo --async_steps 1": "--async_steps 1: takes --rollout_backend vllm or server",
    "grpo --filter_groups refill --group_size 1 --mini_batch_size 2": "--filter_groups refill: takes groups",
    "grpo --turn_stop x": "--turn_stop: takes --tools or an --environment",
    "grpo --tool_call_pattern (?P<arguments>.+)": "--tool_call_pattern: takes --tools or an --environment",
    "ppo --turn_rewards": "--turn_rewards: takes an --environment",
    "ppo --critic_warmup_steps 1": "--critic_warmup_steps 1: leaves the policy no step",
    # rewards, tools, environments, addresses
    "grpo --reward=": "--reward : no such reward; take math",
    "grpo --reward": "--reward: names no source",
    "grpo --reward folder.py:f": "--reward folder.py:f: there is no file folder.py",
    "grpo --reward holds_nul.py:f": "--reward holds_nul.py:f: SyntaxError",
    "grpo --reward exits.py:f": "--reward exits.py:f: its process ended with exit code 3",
    "grpo --reward tools.py:": "--reward tools.py:: a function is named as path/to/file.py:function",
    "grpo --reward knights": "--dataset data.jsonl: --reward knights cannot use the answers of 13 of 13 rows",
    "grpo --reward code": "--dataset data.jsonl: --reward code cannot use the answers of 13 of 13 rows",
    "grpo --reward reasoning_gym": "--dataset data.jsonl: --reward reasoning_gym cannot use the answers of 13 of 13",
    "grpo --reward http://": "--reward http://: is no address, such as http://10.0.0.2:8000",
    "grpo --reward http://127.0.0.1:99999": "--reward http://127.0.0.1:99999: is no address",
    "grpo --reward http://[::1": "--reward http://[::1: is no address",
    "grpo --reward 'http://a b'": "--reward http://a b: is no address",
    "grpo --rollout_backend server --rollout_servers http://a:b": "--rollout_servers http://a:b: is no address",
    "grpo --model chat --tools f": "--tools f: is not of the form path/to/file.py:name",
    "grpo --model chat --tools none.py:f": "--tools none.py:f: there is no file none.py",
    "grpo --model chat --tools imports.py:f": "--tools imports.py:f: ",
    "grpo --model chat --tools no_hints.py:f": "--tools no_hints.py:f: ",
    "grpo --model chat --tools tools.py:f --turn_stop=": "--turn_stop: an empty text would end every turn",
    "grpo --model chat --tools exits.py:f": "--tools, --environment: the process that loads them ended",
    "grpo --model chat --environment imports.py:E": "--environment imports.py:E: ",
    "grpo --model chat --environment tools.py:f": "--environment tools.py:f: ",
    # words of a command line
    "grpo --resume=true": "true behind --resume: no flag takes this word; flags of yes or no stand alone",
    "grpo --resume=": "'': no flag takes this word; flags of yes or no stand alone",
    "grpo ''": "'': no flag takes this word; flags of yes or no stand alone",
    "grpo –-seed 2": "–-seed behind --save_every: no flag takes this word",
    "grpo -seed 2": "-seed: there is no such flag; did you mean --seed?",
    "grpo --Seed 2": "--Seed: there is no such flag; did you mean --seed?",
    "grpo -- --seed 2": "--seed: stands behind --, where no flags are read",
    "grpo --no-seed 2": "--no-seed: there is no such flag; did you mean --seed?",
    f"grpo --{'x' * 5000}": "--xxx",
    "grpo --system_prompt \udcff": "'\\udcff': is no valid text",
    # other commands
    "reward_server --reward": "--reward: names no source",
    "reward_server --port -1": "--port: has to be between 0 and 65535, not -1",
    "reward_server --port 65536": "--port: has to be between 0 and 65535, not 65536",
    "reward_server --host größe☃": "--host größe☃ --port 0: cannot listen there",
    "reward_server --reward imports.py:f": "--reward imports.py:f: ",
    "vllm_server --host 0.0.0.0": "--host 0.0.0.0: other machines can reach this address",
    "vllm_server --port 1e3": "--port: has to be a whole number, not 1e3",
    "vllm_server --tensor_parralel 2": "--tensor_parralel: there is no such flag; did you mean --tensor_parallel?",
    "plot none": "none: has no metrics.jsonl with a whole line",
    "plot curves/metrics.jsonl": "curves/metrics.jsonl: ",
    "plot broken_curves": "broken_curves/metrics.jsonl line 1: is no JSON",
    "plot list_curves": "list_curves/metrics.jsonl line 1: ",
    "plot text_curves --output a.png": "text_curves/metrics.jsonl line 1: ",
    "plot curves --output=": "--output : has to end with .png, .pdf or .svg",
    "plot curves --ouput a.png": "--ouput: there is no such flag; did you mean --output?",
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: ascii(command)[1:60])
def test_command_lines(refused, command):
    line = refused(command)
    assert line.startswith(COMMANDS[command]), line


@pytest.mark.parametrize("name", BROKEN)
def test_models(refused, name):
    line = refused(f"grpo --model '{name}'")
    assert line.startswith(f"--model {name}: {BROKEN[name][2]}"), line


# ---- rows, data sets, configuration files ----------------------------------------------------------------------------

turns = lambda *said: [{"role": role, "content": content} for role, content in said]
BAD_ROWS = [  # (script, row 3 of its data set, further flags, how the line goes on)
    ("grpo", {"prompt": "1+1=", "answer": float("nan")}, "", "has no answer in 'answer', which --reward exact needs"),
    ("grpo", {"prompt": "\ud800", "answer": "1"}, "", "is no valid text"),
    ("grpo", {"prompt": "1+1=", "answer": "2", "verifier": 3}, "", "verifier is 3, which is not in --reward exact"),
    ("grpo", {"prompt": "1+1=", "answer": "2", "verifier": [["exact"]]}, "", "verifier is [['exact']]"),
    ("grpo", {"prompt": turns(("human", "1+1="))}, "--model chat", "has a turn of 'human'; the roles are system"),
    ("grpo", {"prompt": turns(("User", "1+1="))}, "--model chat", "has a turn of 'User'"),
    ("grpo", {"prompt": turns(("", "1+1="))}, "--model chat", "has a turn of ''"),
    ("grpo", {"prompt": turns((3, "1+1="))}, "--model chat", "a prompt is text or a list of messages with role and"),
    ("grpo", {"prompt": turns(("user", " "))}, "--model chat", "the last turn of the prompt is empty"),
    ("grpo", {"prompt": turns(("user", {"a": 1}))}, "--model chat", "the content of a message is text or a list of"),
    ("grpo", {"prompt": turns(("user", "1"), *[("assistant", "2")] * 2)}, "--model chat", "ends with two turns of"),
    ("grpo", {"prompt": [{**turns(("user", "1"))[0], "tool_calls": 3}]}, "--model chat", "the chat template of"),
    ("reward_model", {"prompt": "1", "chosen": "2", "rejected": "3", "margin": True}, "", "margin takes a number, not"),
    ("reward_model", {"prompt": "1", "chosen": "2", "rejected": "3", "margin": 1e200}, "", "margin takes a number"),
    ("reward_model", {"src": "1", "response": ["2", "3"], "sort": [True, False]}, "", "sort takes two different"),
    ("reward_model", {"src": "1", "response": ["2", "3"], "sort": [1, 2, 3]}, "", "src takes one turn more than tgt"),
    ("reward_model", {"prompt": False, "chosen": "2", "rejected": "3"}, "", "a prompt is text or a list of messages"),
    ("reward_model", {"prompt": "1", "chosen": "\ud800", "rejected": "3"}, "", "is no valid text"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD_ROWS)))
def test_rows(refused, folder, number):
    script, row, flags, said = BAD_ROWS[number]
    rows = list(FILES["pairs.jsonl" if script == "reward_model" else "data.jsonl"])
    write_rows(folder / "rows.jsonl", [*rows[:2], {"answer": "2", **row}, *rows[3:]])
    line = refused(f"{script} --dataset rows.jsonl {flags}")
    assert line.startswith(f"--dataset rows.jsonl row 3: {said}"), line


@pytest.mark.parametrize("answer", [{"a": 1}, [1, 2], ["1", "2"]], ids=str)
def test_answers_that_are_no_text(refused, folder, answer):
    write_rows(folder / "rows.jsonl", [{"prompt": "1+1=", "answer": answer}] * 9)
    assert "--reward exact cannot use the answers of 9 of 9 rows" in refused("grpo --dataset rows.jsonl")


MIXTURES = {
    '[{"prob": true, "filepath": "data.jsonl"}]': " entry 1: takes a prob above 0 and a filepath",
    '[{"prob": "1", "filepath": "data.jsonl"}]': " entry 1: takes a prob above 0 and a filepath",
    '[{"prob": NaN, "filepath": "data.jsonl"}]': " entry 1: takes a prob above 0 and a filepath",
    '[{"prob": 1e400, "filepath": "data.jsonl"}]': " entry 1: takes a prob above 0 and a filepath",
    '[{"prob": -1, "filepath": "data.jsonl"}]': " entry 1: takes a prob above 0 and a filepath",
    '[{"prob": 1, "filepath": ["data.jsonl"]}]': " entry 1: takes a prob above 0 and a filepath",
    '[{"prob": 1, "filepath": "data.jsonl"}, {"prob": 1, "filepath": "none.jsonl"}]': " entry 2 none.jsonl: no",
    '[{"prob": 1, "filepath": "data.jsonl", "wieght": 2}]': " entry 1: has 'wieght', but takes prob, filepath",
    '[{"prob": 1, "filepath": "arithmetic", "split": ""}]': " entry 1 arithmetic: has the splits train and test",
    '[{"prob": 1, "filepath": "mixture.json"}]': " mixture.json: is a list of data sets and stands in another",
    '[{"prob": 1, "filepath": "data.jsonl"}, [1]]': " row 2: has to be an object with named columns, not list",
}


@pytest.mark.parametrize("entries", MIXTURES)
def test_mixtures(refused, folder, entries):
    (folder / "mixture.json").write_text(entries)
    line = refused("grpo --dataset mixture.json")
    assert line.startswith("--dataset mixture.json" + MIXTURES[entries].removeprefix(" mixture.json")), line


CONFIGS = {
    "config.json": {
        "": "is no valid file of its kind",
        "[" * 100_000: "is no valid file of its kind",
        '{"model": "a\\u0000b"}': "model takes text or numbers",
        '{"model": "\\ud800"}': "model takes text or numbers",
        '{"reward": [["exact"]]}': "reward takes text or numbers, not ['exact']",
        '{"reward": [null]}': "reward takes text or numbers, not None",
        '{"args": {"sead": 1}}': "there is no flag 'sead'; did you mean 'seed'?",
    },
    "config.yaml": {
        "": "has to hold flags and their values",
        "\x00\x01": "is no valid file of its kind",
        "seed: 1\n---\nseed: 2\n": "is no valid file of its kind",
        "!!python/object/apply:os.mkdir [made]": "is no valid file of its kind",
        "a: &a [*a]": "there is no flag 'a'",
        "3: 1": "there is no flag 3",
        "null: 1": "there is no flag None",
        "group-size: 1": "there is no flag 'group-size'; did you mean 'group_size'?",
        "model: yes": "model takes text or numbers, not True",
        "seed: true": "seed takes text or numbers, not True",
        "model: {a: b}": "model takes text or numbers, not {'a': 'b'}",
        "model: [a, b]": "model takes text or numbers, not ['a', 'b']",
        "resume: 1": "resume takes true or false, not 1",
        "seed:": "seed has no value",
    },
}


@pytest.mark.parametrize(
    "name, content", [(name, content) for name in CONFIGS for content in CONFIGS[name]], ids=lambda x: x[:40]
)
def test_configuration_files(refused, folder, name, content):
    (folder / name).write_text(content)
    line = refused(f"grpo --config {name}")
    assert line.startswith(f"--config {name}: {CONFIGS[name][content]}"), line


FORBIDDEN = {
    "grpo --dataset secret.jsonl": "--dataset secret.jsonl: could not be read ([Errno 13] Permission denied",
    "grpo --config secret.jsonl": "--config secret.jsonl: could not be read ([Errno 13] Permission denied",
    "grpo --chat_template secret.jsonl": "--chat_template secret.jsonl: takes none or a file that can be read",
    "grpo --model 'secret model'": "--model secret model: no tokenizer could be loaded from it",
    "plot 'secret model'": "secret model: has no metrics.jsonl with a whole line",
}


def test_without_permission(refused, folder):
    (folder / "secret.jsonl").write_text("{}")
    (folder / "secret model").mkdir()
    (folder / "secret.jsonl").chmod(0), (folder / "secret model").chmod(0), folder.chmod(0o755)
    user = os.geteuid()
    try:
        if user == 0:  # who may read all
            os.seteuid(65534)
        for command, said in FORBIDDEN.items():
            line = refused(command)
            assert line.startswith(said), line
    finally:
        os.seteuid(user)
        (folder / "secret model").chmod(0o700)


def test_other_configuration_files(refused):
    assert refused("grpo --config model").startswith("--config model: could not be read")
    assert refused("grpo --config none.json").startswith("--config none.json: could not be read")


# ---- what is right ---------------------------------------------------------------------------------------------------


def test_a_flag_that_is_given_twice_counts_the_last_time(folder, monkeypatch):
    """As recipes need it, which pass on what they are called with."""
    monkeypatch.chdir(folder)
    (folder / "twice.yaml").write_text("seed: 5\n")
    words = "--seed 1 --config none.yaml --resume --reward a b --config twice.yaml --no-resume --reward c --seed 2"
    args = command_line.parse(__import__("grpo").Args, words.split())
    assert (args.seed, args.resume, args.reward) == (2, False, ("c",))


def test_true_stays_true_on_its_way_to_a_reward_server():
    """It would arrive as 1, and score another way than in the run itself."""
    body = b'{"src": ["1"], "tgt": [true], "response": ["1"]}'
    assert __import__("reward_server").read_batch(bytearray(body)).tgt[0] is True


# ---- whole commands --------------------------------------------------------------------------------------------------

WHOLE = {
    "grpo.py --group_sise 4": "--group_sise: there is no such flag; did you mean --group_size?",
    "scripts/evaluate.py --model model --run_name ..": "--run_name ..: has to name a folder in --output_dir",
    "scripts/plot.py none": "none: has no metrics.jsonl with a whole line",
    "scripts/reward_server.py --reward math --port x": "--port: has to be a whole number, not x",
    "scripts/vllm_server.py --model model --port x": "--port: has to be a whole number, not x",
}


def test_whole_commands(folder):
    """Each in a process of its own: nothing is printed but the line."""
    before = sorted(folder.rglob("*"))
    with forked_python.python() as python:
        for command, said in WHOLE.items():
            script, *words = shlex.split(command)
            done = subprocess.run([python, str(ROOT / script), *words], capture_output=True, text=True, cwd=folder)
            assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {said}\n")
    assert sorted(folder.rglob("*")) == before
