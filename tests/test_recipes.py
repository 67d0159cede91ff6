"""The recipes in scripts/train and scripts/debug: their flags are good, and those of several
processes run, small.

Programs of the same names stand first on the PATH. They write down what they are called with, and
either end there, or append the flags of a small run and run that, in processes forked from one that
has imported everything.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import datasets
import forked_python
import helpers
import pytest
from helpers import ROOT, free_port, read_lines, scalar_folder, scores_by, tiny_model, write_rows
from tiny_models import make_tokenizer
from transformers import AutoTokenizer

from plumbing.data.rows import read_parts
from plumbing.rewards.sources import RewardSources, kind_of
from plumbing.run.command import parse

RECIPES = sorted(
    str(path.relative_to(ROOT / "scripts"))
    for path in ROOT.glob("scripts/*/*.sh")
    if path.name != "gpu_measure.sh"  # which measures: tests/test_benchmark.py
)
# by scripts/vllm_server.py
SERVED = ("train/grpo_async_6_plus_2.sh", "train/grpo_async_two_nodes.sh")
RUN = (SERVED[1], "train/grpo_reward_server.sh", "train/ppo_llama3.1_8b_2nodes.sh")
PEOPLE = "(1) Zoey is a knave\n(2) Oliver is a knight"
WORDS = {  # what a recipe is called with; several: on several nodes
    **{
        recipe: [["0", "127.0.0.1"], ["1", "127.0.0.1"]]
        for recipe in RECIPES
        if recipe.endswith("_2nodes.sh")
    },
    "debug/cpu.sh": [["distill"], ["reward_model"], ["ppo"]],
    "train/sft_then_grpo.sh": [["--group_size", "4"]],  # which its first command does not have
    "train/grpo_async_two_nodes.sh": [["serve", "127.0.0.1"], ["train", "127.0.0.1"]],
    "train/smollm2.sh": [
        ["grpo"],
        ["rloo"],
        ["ppo"],
        ["distill"],
        ["brief"],
        ["reward_model"],
        ["gsm8k", "."],
    ],
}
ENVIRONMENT = dict(
    SMOLLM2=str(ROOT / "assets/tiny"),
    SLURM_SUBMIT_DIR=str(ROOT),
    SLURM_JOB_ID="7",
    SLURM_JOB_NUM_NODES="2",
    SLURM_JOB_NODELIST="n[1-2]",
)
HAS_VLLM = importlib.util.find_spec("vllm") is not None

# Stands for python, torchrun, srun, scontrol and curl. Of a flag that is there twice, the last one
# counts.
STAND_IN = """#!PYTHON
import json, os, signal, subprocess, sys
program, words = os.path.basename(sys.argv[0]), sys.argv[1:]
setting = json.loads(os.environ["RECIPE"])

def log(**what):
    with open(setting["log"], "a") as file:
        file.write(json.dumps({"program": program, **what}) + "\\n")

if program == "srun":
    words = words[next(i for i, word in enumerate(words) if not word.startswith("-")):]
    nodes = [subprocess.Popen(words) for _ in range(2)]
    signal.signal(signal.SIGUSR1, lambda number, frame: [node.send_signal(number) for node in nodes])
    sys.exit(max(node.wait() for node in nodes))
elif program == "scontrol":
    log(words=words)
    print("127.0.0.1\\nelsewhere" if words[:2] == ["show", "hostnames"] else "")
elif program == "curl":
    if setting["run"]:
        os.execv(setting["curl"], ["curl", *words])
else:
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    log(script=words[at], flags=words[at + 1:])
    if setting["run"]:
        small = setting["flags"].get(os.path.basename(words[at]), [])
        reward = words[words.index("--reward") + 1] if "--reward" in words else ""
        if reward.startswith("http"):
            small = [*small, "--reward", reward]
        launch = ["-m", "torch.distributed.run", *words[:at], "--nproc_per_node", "1"] if program == "torchrun" else []
        os.environ["PYTHON_EXEC"] = "FORKED"  # which torchrun starts its ranks by
        # Slurm's script signals the children of torchrun, and a forked one is no parent of its ranks.
        python = sys.executable if "SLURM_JOB_ID" in os.environ and launch else "FORKED"
        os.execv(python, [python, *launch, *words[at:], *small])
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with the stand-ins, a model, a reward model and rows."""
    folder = tmp_path_factory.mktemp("recipes")
    # heads of 32, for vLLM
    tiny_model(folder / "model", chat=True, max_position_embeddings=512, hidden_size=64)
    scalar_folder(
        folder / "model",
        folder / "reward_model",
        tokenizer=AutoTokenizer.from_pretrained(folder / "model"),
    )
    write_rows(
        folder / "rows.jsonl",
        [{"quiz": f"Who is {i}?", "solution_text": PEOPLE} for i in range(12)],
    )
    (folder / "reward.py").write_text(helpers.REWARD)
    (folder / "bin").mkdir()
    with (
        helpers.vllm_preloaded() if HAS_VLLM else contextlib.nullcontext(),
        forked_python.python() as python,
    ):
        for program in ("python", "torchrun", "srun", "scontrol", "curl"):
            text = STAND_IN.replace("PYTHON", sys.executable, 1).replace("FORKED", python)
            (folder / "bin" / program).write_text(text)
            (folder / "bin" / program).chmod(0o755)
        yield folder


def start(
    small: Path, recipe: str, folder: Path, words=(), run=True, steps=2, **environment
) -> subprocess.Popen:
    """Start a recipe with the stand-ins; its process leads a group of its own."""
    common = f"--model {small}/model --output_dir {folder}/runs --micro_batch_tokens 1024 --eval_every 2 --save_every 2"
    rl = f"""{common} --dataset {small}/rows.jsonl --eval_dataset {small}/rows.jsonl --reward {small}/reward.py:score
        --reward_weights 1 --rollout_batch_size 4 --group_size 2 --mini_batch_size 4 --total_episodes {8 * steps}
        --max_prompt_length 256 --max_response_length 6 --eval_prompts 2 --eval_samples 1 --kv_cache_gb 0.05"""
    if not HAS_VLLM and recipe not in SERVED:
        rl += " --rollout_backend hf --async_steps 0"
    served = f"--model {small}/model --tensor_parallel 1 --kv_cache_gb 0.05 --max_length 300 --precision float32"
    flags = {
        "grpo.py": rl,
        "ppo.py": f"{rl} --value_model {small}/reward_model",
        "vllm_server.py": " ".join([served, *helpers.SERVER_ON_CPU]),
    }
    flags = {script: line.split() for script, line in flags.items()}
    setting = {
        "run": run,
        "log": str(folder / "log.jsonl"),
        "flags": flags,
        "curl": shutil.which("curl"),
    }
    environment = {
        **os.environ,
        "PATH": f"{small / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(small),
        "RECIPE": json.dumps(setting),
        "PORT": str(free_port()),
        "VLLM_API_KEY": "a key" if "two_nodes" in recipe else "",
        **helpers.VLLM_ON_CPU,
        **environment,
    }
    with open(folder / "out", "a") as out:
        command = ["bash", str(ROOT / "scripts" / recipe), *words]
        kinds = dict(stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        return subprocess.Popen(
            command, cwd=folder, env=environment, start_new_session=True, **kinds
        )


def end(process: subprocess.Popen, seconds: float = 500) -> int:
    """Wait for a recipe; its exit code. Nothing of it stays."""
    try:
        return process.wait(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def output(folder: Path) -> str:
    return (folder / "out").read_text()[-3000:]


@pytest.mark.parametrize("recipe", RECIPES)
def test_flags(recipe, small, tmp_path):
    """Each flag exists, its value is good, and the values go together; what a user adds is passed
    on.
    """
    for words in WORDS.get(recipe, [[]]):
        added = [] if "serve" in words else ["--seed", "5"]
        assert end(start(small, recipe, tmp_path, [*words, *added], False, **ENVIRONMENT)) == 0, (
            output(tmp_path)
        )
    calls = [call for call in read_lines(tmp_path / "log.jsonl") if "script" in call]
    trained = []
    for call in calls:
        if call["script"] == "scripts/pairs.py":  # has no flags
            continue
        args = parse(importlib.import_module(Path(call["script"]).stem).Args, call["flags"])
        if not call["script"].startswith("scripts/"):  # those may be written down after it
            trained.append(args)
        assert {
            x for x in getattr(args, "reward", ()) if kind_of(x) in ("verifier", "function")
        } <= EXAMPLES.keys() | {"scripts/train/group_judge.py:score"}  # tests/test_reward_client.py
    last = trained[-1]
    assert last.seed == 5
    # A recipe whose first run has ended can be started again.
    assert all(args.resume for args in trained if f"/{args.run_name}/final" in str(last))


SOURCES = {  # what the recipes' sources say
    "train/ppo_gsm8k_qwen2.5_0.5b.sh": "--gae_lambda 1 --value_clip 0.5 --kl_coef 0.001",
    "train/grpo_qwen2.5_32b_2nodes.sh": "--reward_weights 2 --loss dapo --kl_coef 0 --group_size 16",
}


def test_recipes_as_their_sources_have_them():
    for recipe, flags in SOURCES.items():
        text = " ".join((ROOT / "scripts" / recipe).read_text().replace("\\\n", " ").split()) + " "
        for flag in re.findall(r"--\w+ \S+", flags):
            assert f"{flag} " in text, (recipe, flag)


EXAMPLES = {  # reward: a reference, a right and a wrong response
    "math": ("72", r"So it is \boxed{72}.", r"So it is \boxed{71}."),
    "gsm8k": ("#### 72", "So it is #### 72", "So it is #### 71"),
    "ifeval": ({"func_name": "validate_no_commas"}, "One and two", "One, two"),
    "scripts/train/knights.py:score": (
        PEOPLE,
        f"<think>No.</think> {PEOPLE}",
        PEOPLE.replace("knave", "knight"),
    ),
    "scripts/train/brief.py:at_most_30_words": ("", "word " * 30, "word " * 31),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_rewards(name):
    """As a run calls them, with the columns of the rows."""
    if name == "ifeval":
        pytest.importorskip("if_verifiable")
    reference, *responses = EXAMPLES[name]
    columns = {"quiz": "Who is who?", "names": ["Zoey"], "solution_text": reference}
    rows = [
        {"prompt": "p", "query": [1], "answer": reference, "sources": None, "columns": columns}
    ] * 2
    reward_sources = RewardSources(
        types.SimpleNamespace(reward=(name,), timeout=60.0, reward_workers=1),
        make_tokenizer(),
        rows,
    )
    assert scores_by(reward_sources, rows, responses, [[1]] * 2) == {name: [1.0, 0.0]}
    helpers.end_processes(reward_sources.server)


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("scripts/**/*.json"), *ROOT.glob("assets/*/*.jsonl")]), ids=str
)
def test_data_files(path, monkeypatch):
    """Every one that is shipped is read, those that a list names on the hub aside."""
    row = lambda name, split: datasets.Dataset.from_list([{"quiz": name, "split": split}])
    monkeypatch.setattr("plumbing.data.rows.read_data_set", row)
    splits = [rows[0].get("split") for _, rows, _ in read_parts("--dataset", str(path), "train")]
    assert splits in ([None], ["3ppl", "4ppl", "5ppl", "6ppl", "7ppl"])


@pytest.mark.parametrize("recipe", RUN)
def test_runs(recipe, small, tmp_path):
    """Recipes of several processes: servers next to a run, several nodes, a reward model."""
    if recipe in SERVED and not HAS_VLLM:
        pytest.skip("needs vLLM")
    common = dict(PORT=str(free_port()), SERVERS="1")
    *others, last = [
        start(small, recipe, tmp_path, words, **common) for words in WORDS.get(recipe, [[]])
    ]
    try:
        assert end(last) == 0, output(tmp_path)
    finally:
        for process in others:
            process.terminate()
            end(process, 60)
    (left,) = (tmp_path / "runs").iterdir()
    assert (
        read_lines(left / "metrics.jsonl")[-1]["step"] == 2
        and (left / "final" / "model.safetensors").exists()
    )
    assert json.loads((left / "args.json").read_text())["ranks"] == (2 if "2nodes" in recipe else 1)


def test_slurm_saves_before_the_limit_and_goes_on(small, tmp_path):
    """SIGTERM to the batch script, as --signal=B:TERM sends it: a checkpoint, back in the queue,
    and on from there.
    """
    begin = functools.partial(start, small, "train/slurm.sh", tmp_path, **ENVIRONMENT)
    process = begin(steps=500)
    left = tmp_path / "runs" / "slurm-7"
    try:
        while (
            not (left / "metrics.jsonl").exists() or read_lines(left / "metrics.jsonl")[-1:] == []
        ):
            assert process.poll() is None, output(tmp_path)
            time.sleep(0.1)
        process.terminate()
    finally:
        code = end(process)
    asked = lambda: [
        x["words"] for x in read_lines(tmp_path / "log.jsonl") if x["program"] == "scontrol"
    ]
    hosts = ["show", "hostnames", "n[1-2]"]
    assert code == 0 and asked() == [hosts, ["requeue", "7"]], output(tmp_path)
    saved = max(int(path.name[5:]) for path in (left / "checkpoints").glob("step_*"))
    assert end(begin(steps=saved + 2)) == 0, output(tmp_path)
    assert [row["step"] for row in read_lines(left / "metrics.jsonl")] == list(range(saved + 3))
    assert (left / "final").exists() and asked() == [hosts, ["requeue", "7"], hosts]
