"""Where a run goes on (plumbing/run/resume.py): which flags may change, damaged files, older checkpoints, the lock; a full
disk; signals before the first step."""

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import helpers
import pytest
from helpers import folder_of, metrics_of, read_lines, run, run_here, same_weights, steps_of

import grpo
import ppo
import reward_model
import rloo
import utils
from plumbing.run import files, resume

# ---- a folder like that of a run, without a run ----------------------------------------------------------------------


def args_of(folder: Path, **changes) -> grpo.Args:
    return grpo.Args(**{"output_dir": str(folder.parent), "run_name": folder.name, "resume": True, **changes})


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two checkpoints, three rows, args.json."""
    folder = tmp_path / "run"
    for step in (2, 4):
        path = folder / "checkpoints" / f"step_{step}"
        (path / "critic").mkdir(parents=True)
        (path / "model.safetensors").write_bytes(bytes(range(256)) * 100)
        (path / "critic" / "model.safetensors").write_bytes(b"critic")
        (path / files.CHECKSUMS).write_text(json.dumps(files.checksums(str(path))))
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 2}\n{"step": 4}\n')
    (folder / "samples.jsonl").write_text('{"step": 2}\n{"step": 4}\n{"ste')
    facts = {
        "args": resume.as_json(args_of(folder, resume=False)),
        "script": "grpo.py",
        "history": [{"after_step": 1, "changes": {}}],
    }
    (folder / "args.json").write_text(json.dumps(facts))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != resume.LOCK}


@pytest.fixture
def refused(folder, capsys):
    """The one line that a resume ends with, before which nothing is changed."""

    def line(script: str = "grpo.py", **changes) -> str:
        before = content(folder)
        with pytest.raises(SystemExit) as end:
            resume.find(args_of(folder, **changes), script)
        said = capsys.readouterr()
        assert end.value.code == 2 and content(folder) == before and not said.out
        error = said.err.splitlines()[-1]
        assert error.startswith("error: ") and said.err.count("error: ") == 1, said.err
        return error

    return line


OTHER_RUNS = {
    "seed": 2, "model": "other", "dataset": "arithmetic", "rollout_batch_size": 32, "group_size": 4,
    "mini_batch_size": 64, "loss": "dapo", "kl_coef": 0.1, "temperature": 0.9, "max_response_length": 10,
    "reward": ("gsm8k", "format"), "system_prompt": "", "precision": "bf16", "eval_dataset": "x.jsonl",
}  # fmt: skip
SAME_RUN = {
    "total_episodes": 999, "learning_rate": 1e-3, "save_every": 1, "log_samples": 1, "track": True, "eval_every": 1,
    "micro_batch_tokens": 9, "shard": "fsdp", "max_skipped_updates": 9, "rollout_servers": ("http://a",),
    "stop_after_step": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_a_flag_that_makes_another_run_of_it(refused, folder, name):
    line = refused(**{name: OTHER_RUNS[name]})
    assert f"--{name} " in line and "(was " in line and "--resume_with_changes" in line
    origin = resume.find(args_of(folder, resume_with_changes=True, **{name: OTHER_RUNS[name]}), "grpo.py")
    assert origin.checkpoint.endswith("step_4") and name in origin.changes


def test_how_values_are_said(refused):
    line = refused(reward=("gsm8k", "format"), system_prompt="")
    assert "--reward gsm8k format (was math)" in line and '--system_prompt "" (was Please' in line


def test_flags_that_may_change(folder):
    """They are taken, and known for args.json's history."""
    origin = resume.find(args_of(folder, **SAME_RUN), "grpo.py")
    assert {name: now for name, (_, now) in origin.changes.items()} == json.loads(json.dumps(SAME_RUN))
    assert origin.changes["learning_rate"] == [1e-6, 1e-3] and len(origin.history) == 1


def test_every_flag_that_may_change_exists():
    fields = {name for module in (grpo, rloo, ppo, reward_model) for name in module.Args.__dataclass_fields__}
    assert resume.MAY_CHANGE <= fields


def test_another_script_or_adapter(refused, folder):
    assert "rloo.py (was grpo.py)" in refused("rloo.py")
    assert resume.find(args_of(folder, resume_with_changes=True), "my_grpo.py").checkpoint
    assert "--lora_rank 4: the run to resume has 0" in refused(lora_rank=4, resume_with_changes=True)


def test_args_of_an_older_version(folder):
    """A flag that it did not have counts as its default; one that is gone does not matter."""
    facts = json.loads((folder / "args.json").read_text())
    del facts["args"]["overlong_buffer"], facts["history"]
    (folder / "args.json").write_text(json.dumps({**facts, "args": {**facts["args"], "gone": 3}}))
    assert not resume.find(args_of(folder), "grpo.py").changes


@pytest.mark.parametrize("text", [None, "", '{"args": ', "[1]", '{"args": 3}', '"args"'])
def test_args_that_are_damaged(refused, folder, text):
    (folder / "args.json").unlink() if text is None else (folder / "args.json").write_text(text)
    assert f"{folder}/args.json" in refused()
    assert resume.find(args_of(folder, resume_with_changes=True), "grpo.py").checkpoint.endswith("step_4")


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("row", ['{"step": 1', "\x00\x00", '{"loss": 1}', "3", '{"step": "1"}'])
def test_a_broken_line(refused, folder, name, row):
    (folder / name).write_text('{"step": 0}\n' + row + '\n{"step": 2}\n')
    assert f"error: {folder}/{name} line 2: " in refused()


def test_rows_without_a_checkpoint_are_not_erased(refused, folder):
    shutil.rmtree(folder / "checkpoints")
    assert "4 steps but has no checkpoint" in refused(save_every=4)
    (folder / "metrics.jsonl").write_text("")
    (folder / "final").mkdir()
    assert "no checkpoint" in refused()
    (folder / "final").rmdir()
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')  # killed in its first step
    assert resume.find(args_of(folder), "grpo.py").checkpoint is None


@pytest.mark.parametrize("save_every", [0, 5])
def test_a_run_that_was_killed_before_its_first_checkpoint(refused, folder, capsys, save_every):
    shutil.rmtree(folder / "checkpoints")
    assert "--seed 2 (was 1)" in refused(save_every=save_every, seed=2)
    resume.locks.clear()
    origin = resume.find(args_of(folder, save_every=save_every), "grpo.py")
    assert origin.checkpoint is None and "its 4 steps are run again" in capsys.readouterr().err
    resume.open_folder(origin, "grpo.py", 1, 0)
    assert metrics_of({"output_dir": str(folder.parent), "run_name": folder.name}) == []


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 4])),
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("name", ["model.safetensors", "critic/model.safetensors", files.CHECKSUMS])
@pytest.mark.parametrize("harm", DAMAGES)
def test_the_checkpoint_before_a_damaged_one(refused, folder, capsys, name, harm):
    newest, older = (folder / "checkpoints" / f"step_{step}" for step in (4, 2))
    DAMAGES[harm](newest / name)
    origin = resume.find(args_of(folder), "grpo.py")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and f"{newest / name} " in line
    assert origin.checkpoint == str(older) and origin.damaged == [str(newest)]
    DAMAGES[harm](older / name)
    assert f"{older / name} " in refused()


def test_a_folder_of_somebody_else_is_no_checkpoint(folder):
    (folder / "checkpoints" / "step_abc").mkdir()
    assert resume.find(args_of(folder), "grpo.py").checkpoint.endswith("step_4")


def test_one_process_a_run(refused, folder):
    """The lock of a process is free once it is killed."""
    ready, write = os.pipe()
    child = os.fork()
    if not child:
        resume.lock(str(folder))
        os.write(write, b".")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    assert f"in use by process {child} on " in refused()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert resume.find(args_of(folder), "grpo.py").checkpoint


def test_a_file_in_the_place_of_the_folder(tmp_path, capsys):
    (tmp_path / "run").write_text("")
    with pytest.raises(SystemExit):
        resume.find(args_of(tmp_path / "run"), "grpo.py")
    assert capsys.readouterr().err.startswith(f"error: --resume: {tmp_path / 'run'} ")


def test_a_folder_is_saved_whatever_a_kill_left(tmp_path, world):
    """Between its two renames, or before what it replaced was removed."""
    write = lambda path, on_main: Path(path, "a").write_text("1")
    for left in ("final", ".final.old", ".final.tmp"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "b").write_text("")
    files.save_folder(str(tmp_path / "final"), world, write)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["final", "final/a"]


def test_all_ranks_end_where_the_first_does(monkeypatch):
    """`World.on_main` gives all ranks what rank 0 got, an exit code included."""
    said = []
    first, second = (utils.World(rank, 2, helpers.torch.device("cpu")) for rank in (0, 1))
    monkeypatch.setattr(utils.World, "all_gather", lambda self, items: said.extend(items) or said)
    assert first.on_main(lambda: 3) == 3 and second.on_main(lambda: 4) == 3
    said.clear()
    for world in (first, second):
        with pytest.raises(SystemExit) as end:
            world.on_main(lambda: utils.fail("no"))
        assert end.value.code == 2


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    values = {**helpers.workspace(tmp_path_factory.mktemp("resume")), "run_name": "run", "eval_every": 4}
    run_here(values)
    return values


@pytest.fixture
def copy(whole, tmp_path) -> dict:
    shutil.copytree(whole["output_dir"], tmp_path / "runs")
    return {**whole, "output_dir": str(tmp_path / "runs"), "resume": True}


def assert_equal(values: dict, whole: dict) -> None:
    assert metrics_of(values) == metrics_of(whole)
    for name in ("samples.jsonl", "held_out.jsonl"):
        assert read_lines(folder_of(values) / name) == read_lines(folder_of(whole) / name)
    assert same_weights(folder_of(values) / "final", folder_of(whole) / "final")


def test_a_run_goes_on_from_the_checkpoint_before(whole, copy, capsys):
    """And the damaged one is kept beside the new one of its step."""
    model = folder_of(copy) / "checkpoints" / "step_4" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-9])
    run_here(copy)
    said = capsys.readouterr()
    assert "goes on after step 2" in said.out and f"{model} is damaged" in said.err
    assert steps_of(copy) == ["damaged_step_4", "step_2", "step_4"]
    assert_equal(copy, whole)


def test_the_end_is_saved(whole, tmp_path):
    """So that a finished run with --save_every 0 is not run again, and none of it is lost."""
    values = {**whole, "output_dir": str(tmp_path), "save_every": 0}
    run_here(values)
    assert steps_of(values) == ["step_4"]
    run_here({**values, "resume": True})
    assert_equal(values, whole)


def test_changed_flags_are_said_and_kept(copy, capsys):
    longer = {**copy, "total_episodes": 40, "learning_rate": 1e-3}
    run_here(longer)
    said = capsys.readouterr().out
    assert "changed since: --total_episodes 32 -> 40\n" in said and "--learning_rate 0.003 -> 0.001\n" in said
    run_here({**longer, "seed": 5, "total_episodes": 48, "resume_with_changes": True})
    facts = json.loads((folder_of(copy) / "args.json").read_text())
    assert (facts["args"]["total_episodes"], facts["args"]["seed"]) == (48, 5)
    assert [entry["after_step"] for entry in facts["history"]] == [4, 5]
    assert facts["history"][0]["changes"]["total_episodes"] == [32, 40] and facts["history"][1]["changes"]["seed"]
    assert [row["step"] for row in metrics_of(copy)] == [0, 1, 2, 3, 4, 5, 6]


def test_a_log_on_a_full_disk(capsys):
    with pytest.raises(SystemExit) as end:
        files.append("/dev/full", [{"step": 1}])
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: /dev/full: cannot be written (No space left on device)\n"


def test_a_checkpoint_on_a_full_disk(whole, tmp_path, capsys):
    """Files of more than so many bytes cannot be written, as on a full disk: one line, and no half checkpoint."""
    values = {**whole, "output_dir": str(tmp_path), "eval_every": 0}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(SystemExit) as end:
            run_here(values)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errors = [line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if line.startswith("error:")]
    (line,) = errors
    assert end.value.code == 2 and f"{folder_of(values) / 'checkpoints/step_2'}: cannot be written (" in line
    assert not [path for path in folder_of(values).rglob("*") if path.is_dir() and path.name != "checkpoints"]


# ---- before the first step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_run_starts(whole, tmp_path, number):
    """It waits for a vLLM server that is not there, and ends with one line within seconds."""
    values = {
        **whole,
        "output_dir": str(tmp_path),
        "rollout_backend": "server",
        "rollout_servers": "http://127.0.0.1:9",
    }
    running = helpers.start(values)
    while not os.path.exists(f"{running.log}.out") or "waiting for the vLLM server" not in running.out:
        assert running.process.is_alive(), running.err
        time.sleep(0.05)
    begin = time.monotonic()
    os.kill(running.process.pid, number)
    assert running.wait(20).code == 75 and time.monotonic() - begin < 5
    assert f"{number.name}: ends before the first step" in running.err and "Traceback" not in running.err
    assert not os.listdir(tmp_path)


def test_track_without_a_login(whole, tmp_path):
    pytest.importorskip("wandb")
    values = {**whole, "output_dir": str(tmp_path / "runs"), "track": True}
    (tmp_path / "home").mkdir()
    done = run(
        values, code=2, environment={"HOME": str(tmp_path / "home"), "WANDB_API_KEY": "", "WANDB_MODE": "online"}
    )
    assert len(done.errors) == 1 and done.errors[0].startswith("error: --track wandb: ") and "login" in done.errors[0]
    assert "Traceback" not in done.err and not (tmp_path / "runs").exists()


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_git_commit_marks_changed_files(tmp_path, monkeypatch):
    command = ["git", "-C", str(tmp_path)]
    git = lambda *words: subprocess.run([*command, *words], check=True, capture_output=True, text=True)
    monkeypatch.setattr(resume, "ROOT", str(tmp_path))
    assert resume.git_commit() is None
    git("init")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "x")
    assert resume.git_commit() == git("rev-parse", "HEAD").stdout.strip()
    (tmp_path / "new.py").touch()
    assert resume.git_commit() == git("rev-parse", "HEAD").stdout.strip() + "+"
