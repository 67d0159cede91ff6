"""The recipes in scripts/train and scripts/debug: their flags are good, and each runs, small, for a few steps.

Programs of the same names stand first on the PATH. One way they only write down what they are called with; the other
way they put the tiny model, a few rows and small sizes in place of what the recipe names and run that for real, in
processes forked from one that has imported everything.
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
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked_python
import helpers
import pytest
import transformers
from helpers import ROOT, read_lines, tiny_model, write_rows

from plumbing.cli import parse

RECIPES = sorted(str(path.relative_to(ROOT / "scripts")) for path in ROOT.glob("scripts/*/*.sh"))
SERVED = ("train/grpo_async_6_plus_2.sh", "train/grpo_async_two_nodes.sh")  # by scripts/vllm_server.py
WORDS = {  # what a recipe wants to be called with; several: on several nodes
    "train/ppo_llama3.1_8b_2nodes.sh": [["0", "127.0.0.1"], ["1", "127.0.0.1"]],
    "train/grpo_async_two_nodes.sh": [["serve", "127.0.0.1"], ["train", "127.0.0.1"]],
}
HAS_VLLM = importlib.util.find_spec("vllm") is not None

# Stands for python, torchrun, srun, scontrol and curl.
STAND_IN = """#!PYTHON
import json, os, signal, subprocess, sys
program, words = os.path.basename(sys.argv[0]), sys.argv[1:]
setting = json.loads(os.environ["RECIPE"])

def log(**what):
    with open(setting["log"], "a") as file:
        file.write(json.dumps({"program": program, **what}) + "\\n")

def values_of(words):
    values = {}
    for word in words:
        if word.startswith("--") and word != "--":
            values[word] = []
        else:
            values[list(values)[-1]].append(word)
    return values

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
    launch, script, flags = words[:at], words[at], words[at + 1:]
    log(launch=launch, script=script, flags=flags)
    if not setting["run"]:
        sys.exit()
    values = values_of(flags)
    name = os.path.basename(script)
    for flag in setting["without"]:
        values.pop("--" + flag, None)
    for flag, changed in setting["changes"].get(name, {}).items():
        values["--" + flag] = changed
    for flag, changed in setting["named"].items():
        if "--" + flag in values:
            values["--" + flag] = changed
    if name in setting["others"] and not any(x.startswith("http") for x in values.get("--reward", [])):
        values["--reward"] = setting["others"][name]
    launch = values_of(launch)
    if launch:
        launch["--nproc_per_node"] = [str(setting["ranks"])]
    flat = lambda values: [word for flag, given in values.items() for word in (flag, *given)]
    run = ["-m", "torch.distributed.run"] if program == "torchrun" else []
    os.environ["PYTHON_EXEC"] = "FORKED"  # which torchrun starts its ranks by
    # Slurm's script signals the children of torchrun, and a forked one is no parent of its ranks.
    python = sys.executable if "SLURM_JOB_ID" in os.environ and run else "FORKED"
    os.execv(python, [python, *run, *flat(launch), script, *flat(values)])
"""

# Scores that differ from response to response, whatever a random model writes.
REWARD = (
    "def score(prompts, responses, **_):\n    return [sum(map(ord, p + r)) % 7 / 7 for p, r in zip(prompts, responses)]"
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def python():
    with helpers.vllm_preloaded() if HAS_VLLM else contextlib.nullcontext(), forked_python.python() as program:
        yield program


@pytest.fixture(scope="module")
def small(python, tmp_path_factory) -> Path:
    """A folder with the stand-ins, a model, a reward model and rows."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "bin").mkdir()
    for program in ("python", "torchrun", "srun", "scontrol", "curl"):
        text = STAND_IN.replace("PYTHON", sys.executable, 1).replace("FORKED", python)
        (folder / "bin" / program).write_text(text)
        (folder / "bin" / program).chmod(0o755)
    wide = dict(hidden_size=64, intermediate_size=128)  # vLLM on a CPU takes heads of 32 or more
    tiny_model(folder / "model", chat=True, max_position_embeddings=512, **wide)
    config = transformers.AutoConfig.from_pretrained(folder / "model", num_labels=1)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward_model")
    transformers.AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "reward_model")
    people = "(1) Zoey is a knave\n(2) Oliver is a knight"
    write_rows(folder / "rows.jsonl", [{"quiz": f"Who is {i}?", "solution_text": people} for i in range(12)])
    pairs = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": f"{i}?"} for i in range(12)]
    write_rows(folder / "pairs.jsonl", pairs[3:])
    write_rows(folder / "held_out.jsonl", pairs[:3])
    (folder / "reward.py").write_text(REWARD)
    return folder


def start(small: Path, recipe: str, folder: Path, words=(), run=True, ranks=1, steps=2, **environment):
    """Start a recipe with the stand-ins; its process, which leads a group of its own."""
    folder.mkdir(exist_ok=True, parents=True)
    rows, sizes = str(small / "rows.jsonl"), {"max_prompt_length": "256", "max_response_length": "6"}
    sizes |= {"rollout_batch_size": "4", "group_size": "2", "mini_batch_size": "4", "total_episodes": str(8 * steps)}
    sizes |= {"dataset": rows, "eval_dataset": rows, "eval_prompts": "2", "eval_samples": "1"}
    sizes |= {"micro_batch_tokens": "1024", "eval_every": "2", "save_every": "2", "kv_cache_gb": "0.05"}
    pairs = {"dataset": str(small / "pairs.jsonl"), "eval_dataset": str(small / "held_out.jsonl"), "max_length": "64"}
    pairs |= {"batch_size": "4", "num_epochs": "1", "eval_every": "2"}
    own = {"model": str(small / "model"), "output_dir": str(folder / "runs")}
    changes = {name: {flag: [x] for flag, x in (sizes | own).items()} for name in ("grpo.py", "rloo.py", "ppo.py")}
    changes["reward_model.py"] = {flag: [x] for flag, x in (pairs | own).items()}
    served = {"model": [own["model"]], "tensor_parallel": ["1"], "kv_cache_gb": ["0.05"], "max_length": ["300"]}
    changes["vllm_server.py"] = served
    without = [] if HAS_VLLM or recipe in SERVED else ["rollout_backend", "async_steps"]
    setting = {
        "run": run, "log": str(folder / "log.jsonl"), "ranks": ranks, "changes": changes, "without": without,
        "named": {"value_model": [str(small / "reward_model")]},
        "curl": shutil.which("curl"),
        "others": {name: [f"{small / 'reward.py'}:score"] for name in ("grpo.py", "rloo.py", "ppo.py")},
    }  # fmt: skip
    environment = {
        **os.environ, "PATH": f"{small / 'bin'}:{os.environ['PATH']}", "RECIPE": json.dumps(setting),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PORT": str(free_port()),
        "VLLM_API_KEY": "a key" if "two_nodes" in recipe else "",
        **environment,
    }  # fmt: skip
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    with open(folder / f"out{len(list(folder.glob('out*')))}", "a") as out:
        command = ["bash", str(ROOT / "scripts" / recipe), *words]
        kinds = dict(stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **kinds)


def end(process: subprocess.Popen, seconds: float = 100) -> int:
    """Wait for a recipe; its exit code. Nothing of it stays."""
    try:
        return process.wait(seconds)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def said(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("out*")))


# ---- what the recipes call -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_flags(recipe, small, tmp_path):
    """Each flag exists, its value is good, and the values go together."""
    slurm = dict(SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="n[1-2]")
    for words in WORDS.get(recipe, [[]]):
        process = start(
            small, recipe, tmp_path, [*words, "--seed", "5"] if "serve" not in words else words, False, **slurm
        )
        assert end(process, 20) == 0, said(tmp_path)
    calls = [call for call in read_lines(tmp_path / "log.jsonl") if "script" in call]
    trainers = [call for call in calls if not call["script"].startswith("scripts/")]
    assert trainers and all("--seed" in call["flags"] for call in trainers)  # what a user adds is passed on
    for call in calls:
        assert (ROOT / call["script"]).exists()
        module, words = importlib.import_module(Path(call["script"]).stem), call["flags"]
        try:
            parse(module.Args, words)
        except SystemExit:
            pytest.fail(f"{recipe}: {call['script']} does not take {words}")


def test_large_models_are_sharded_and_small_ones_are_not(small, tmp_path):
    """By DDP a model of 7B does not fit."""
    for recipe in RECIPES:
        text = (ROOT / "scripts" / recipe).read_text()
        assert ("--shard fsdp" in text) == bool(re.search(r"-[78]B\b", text)), recipe


# ---- runs ------------------------------------------------------------------------------------------------------------

RANKS = {"train/grpo_reward_server.sh": 2, "train/reward_model_7b.sh": 2, "train/grpo_qwen2.5_7b_8gpu.sh": 2}
RUN = [recipe for recipe in RECIPES if recipe != "train/slurm.sh"]


def run(small: Path, recipe: str, folder: Path) -> int:
    """A recipe, small and for real, on all of its nodes; the last one's exit code."""
    port = free_port()
    if recipe == "train/grpo_async_two_nodes.sh":
        serving = start(small, recipe, folder, WORDS[recipe][0], PORT=str(port), SERVERS="1")
        try:
            return end(start(small, recipe, folder, WORDS[recipe][1], PORT=str(port), SERVERS="1"), 500)
        finally:
            serving.terminate()
            end(serving, 20)
    calls = WORDS.get(recipe, [[]])
    processes = [start(small, recipe, folder, w, ranks=RANKS.get(recipe, 1), PORT=str(port)) for w in calls]
    return max([end(process, 500) for process in processes], key=abs)


@pytest.fixture(scope="module")
def runs(small, tmp_path_factory):
    """{recipe: (folder, future of its exit code)}: two at a time, as most of a small run is waiting."""
    with ThreadPoolExecutor(2) as pool:
        folders = {recipe: tmp_path_factory.mktemp("run") for recipe in RUN}
        wanted = [recipe for recipe in RUN if recipe not in SERVED or HAS_VLLM]
        yield {recipe: (folders[recipe], pool.submit(run, small, recipe, folders[recipe])) for recipe in wanted}


@pytest.mark.parametrize("recipe", RUN)
def test_runs(recipe, runs):
    if recipe not in runs:
        pytest.skip("needs vLLM")
    folder, done = runs[recipe]
    assert done.result() == 0, said(folder)
    (left,) = (folder / "runs").iterdir()
    rows = read_lines(left / "metrics.jsonl")
    assert rows[-1]["step"] == 2 and (left / "final" / "model.safetensors").exists()
    ranks = RANKS.get(recipe, len(WORDS.get(recipe, [[]])) if recipe not in SERVED else 1)
    assert json.loads((left / "args.json").read_text())["ranks"] == ranks
    trainer = [call for call in read_lines(folder / "log.jsonl") if not call["script"].startswith("scripts/")][0]
    assert (trainer["program"] == "torchrun") == bool(trainer["launch"])


def test_slurm_saves_before_the_limit_and_goes_on(small, tmp_path):
    """SIGTERM to the batch script, as --signal=B:TERM sends it: a checkpoint, back in the queue, and on from there."""
    slurm = dict(SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="n[1-2]")
    begin = functools.partial(start, small, "train/slurm.sh", tmp_path, **slurm)
    process, left = begin(steps=500), tmp_path / "runs" / "slurm-7"
    try:
        deadline = time.monotonic() + 60
        while not (left / "metrics.jsonl").exists() or read_lines(left / "metrics.jsonl")[-1:] == []:
            assert process.poll() is None and time.monotonic() < deadline, said(tmp_path)
            time.sleep(0.1)
        process.terminate()
    finally:
        code = end(process, 60)
    asked = lambda: [x["words"] for x in read_lines(tmp_path / "log.jsonl") if x["program"] == "scontrol"]
    shown = ["show", "hostnames", "n[1-2]"]
    assert code == 0 and asked() == [shown, ["requeue", "7"]], said(tmp_path)
    assert "is saved, go on with --resume" in (tmp_path / "out0").read_text()
    saved = max(int(path.name[5:]) for path in (left / "checkpoints").glob("step_*"))
    assert end(begin(steps=saved + 2)) == 0, said(tmp_path)
    assert [row["step"] for row in read_lines(left / "metrics.jsonl")] == list(range(saved + 3))
    assert (left / "final").exists() and asked() == [shown, ["requeue", "7"], shown]
