"""Where a run begins (plumbing/run/folder.py): its checkpoint, changed flags, the lock, other
models; whole folders.
"""

import dataclasses
import json
import math
import os
import pkgutil
import shutil
import signal
import subprocess
import time
from pathlib import Path

import helpers
import pytest
import torch
from helpers import flags_of, folder_of, metrics_of, read_lines, run_here, steps_of
from tiny_models import CPU

import grpo
import ppo
import utils
from plumbing.models import loading
from plumbing.run import checkpoints, log
from plumbing.run import folder as run_folder

# ---- a folder like that of a run, without a run --------------------------------------------------


def args_of(folder: Path, **changes) -> grpo.Args:
    return grpo.Args(
        **{"output_dir": str(folder.parent), "run_name": folder.name, "resume": True, **changes}
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two checkpoints, three rows, args.json."""
    folder = tmp_path / "run"
    for step in (2, 10):
        (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
    (folder / "checkpoints" / "step_abc").mkdir()  # somebody else's
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 2}\n{"step": 10}\n')
    for name in ("samples.jsonl", "tokens.jsonl"):
        (folder / name).write_text('{"step": 2}\n{"step": 11}\n{"ste')
    facts = {
        "args": run_folder.as_json(args_of(folder, resume=False)),
        "script": "grpo.py",
        "run_id": "abc",
    }
    (folder / "args.json").write_text(json.dumps(facts))
    return folder


def refusal(capsys, folder: Path, **changes) -> str:
    """Return the line with which a resume is refused, which changes nothing."""
    content = lambda: {str(path): path.read_bytes() for path in folder.rglob("*.json*")}
    before = content()
    line = helpers.refused(capsys, run_folder.find_origin, args_of(folder, **changes), "grpo.py")
    assert content() == before
    return line


def test_the_newest_checkpoint_and_what_has_changed(folder, capsys):
    origin = run_folder.find_origin(
        args_of(folder, seed=2, reward=("gsm8k", "format")), str(utils.ROOT) + "/rloo.py"
    )
    assert origin.checkpoint == str(folder / "checkpoints" / "step_10") and origin.run_id == "abc"
    changes = ["reward ['math'] -> ['gsm8k', 'format']", "seed 1 -> 2", "script grpo.py -> rloo.py"]
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(
        f"changed since: --{each}" for each in changes
    )
    run_folder.open_folder(origin, args_of(folder, seed=2), "grpo.py", 1, 10)
    # that of step 10 is in it
    assert [row["step"] for row in read_lines(folder / "metrics.jsonl")] == [0, 2]
    for name in ("samples.jsonl", "tokens.jsonl"):
        assert [row["step"] for row in read_lines(folder / name)] == [2]
    assert (
        log.read_args(str(folder))["args"]["seed"] == 2
        and log.read_args(str(folder))["run_id"] == "abc"
    )


def test_what_a_resume_refuses(folder, capsys):
    assert "exists; continue it with --resume" in refusal(capsys, folder, resume=False)
    for name in ("metrics.jsonl", "args.json"):
        before = (folder / name).read_text()
        (folder / name).write_text('{"step": 1\n{"step": 2}\n')
        assert f"{folder}" in refusal(capsys, folder)
        (folder / name).write_text(before)
    shutil.rmtree(folder / "checkpoints")
    assert "has 10 steps and no checkpoint" in refusal(capsys, folder, save_every=10)
    (folder / "final").mkdir()  # never wipe a finished run
    assert "no checkpoint" in refusal(capsys, folder, save_every=0)
    (folder / "final").rmdir()
    assert run_folder.find_origin(args_of(folder), "grpo.py").checkpoint is None
    assert "was killed before its first checkpoint" in capsys.readouterr().err


def test_the_commit_of_the_code(tmp_path, monkeypatch):
    """Files of runs and notes beside it do not change it."""
    git = lambda words: subprocess.run(
        ["git", "-C", tmp_path, *words.split()], check=True, capture_output=True
    )
    monkeypatch.setattr(run_folder, "ROOT", str(tmp_path))
    assert run_folder.git_commit() is None
    (tmp_path / "code").write_text("1")
    for words in ("init", "add code", "-c user.name=a -c user.email=a commit -m a", "tag v1"):
        git(words)
    (tmp_path / "notes").write_text("1")
    head = run_folder.git_commit()
    assert len(head) == 40
    (tmp_path / "code").write_text("2")
    assert run_folder.git_commit() == f"{head}+"


def test_one_process_a_run(folder, capsys):
    """The lock of a process is free once it is killed, although a child of it lives. A new run has a
    lock, too.
    """
    new = folder / "new"
    ready, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            run_folder.lock(str(folder))
            origin = run_folder.find_origin(args_of(new), "grpo.py")
            run_folder.open_folder(origin, args_of(new), "grpo.py", 1, 0)
            grandchild = os.fork()
            os.write(write, str(grandchild).encode() if grandchild else b"")
            time.sleep(60)
        finally:
            os._exit(0)  # pytest goes on in the parent alone
    os.close(write)  # so that a child which dies is read as an end
    grandchild = int(os.read(ready, 20))
    for each in (folder, new):
        assert "is in use by another process" in refusal(capsys, each)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert run_folder.find_origin(args_of(folder), "grpo.py").checkpoint
    os.kill(grandchild, signal.SIGKILL)


@pytest.mark.parametrize("name", ["run", "ü" * 150, "locked"])
def test_a_name_that_cannot_be_taken_any_more(tmp_path, capsys, name):
    """Another run of this name began while this one loaded its models; or the disk allows no such
    name, or no lock, here a folder.
    """
    args = args_of(tmp_path / name, resume=name == "locked")
    origin = run_folder.find_origin(args, "grpo.py")
    if name == "locked":
        (tmp_path / name / ".lock").mkdir(parents=True)
    if name == "run":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1}\n')
    line = helpers.refused(capsys, run_folder.open_folder, origin, args, "grpo.py", 1, 0)
    assert line.startswith(f"error: --run_name {name}: ")
    if name == "run":
        assert read_lines(tmp_path / name / "metrics.jsonl") == [{"step": 1}]


def test_a_folder_is_saved_whatever_a_kill_left(tmp_path, world, monkeypatch):
    """Between its two renames, or before what it replaced was removed, which begins once the new
    one is there; a write that fails leaves the old one.
    """

    def remove(path, ignore_errors, remove=shutil.rmtree) -> None:
        assert (tmp_path / "final").exists()
        remove(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove)
    write = lambda path: Path(path, "a").write_text("1")
    for left in ("final", ".final.old", ".final.tmp"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "b").write_text("")
    with pytest.raises(OSError):
        checkpoints.save_folder(
            str(tmp_path / "final"), world, lambda path: open("/dev/full", "w").write("x" * 99999)
        )
    assert (tmp_path / "final" / "b").exists()
    checkpoints.save_folder(str(tmp_path / "final"), world, write)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "final",
        "final/a",
    ]


def test_all_ranks_end_where_the_first_does(monkeypatch):
    """`World.on_main` gives all ranks what rank 0 got, a UserError included."""
    gathered = []

    def refuse() -> None:
        raise utils.UserError("no")

    first, second = (utils.World(rank, 2, CPU) for rank in (0, 1))
    monkeypatch.setattr(
        utils.World, "all_gather", lambda self, items: gathered.extend(items) or gathered
    )
    assert first.on_main(lambda: 3) == 3 and second.on_main(lambda: 4) == 3
    gathered.clear()
    for world in (first, second):
        with pytest.raises(utils.UserError, match="no"):
            world.on_main(refuse)


# ---- flags that a resume changes -----------------------------------------------------------------

CASES = helpers.table("command_lines.json")
CHANGED = CASES["changed flags of an optimizer"]


@pytest.mark.parametrize("prefix", ["", "critic_"])
def test_changed_flags_of_an_optimizer(load, tokenizer, world, tmp_path, prefix):
    """Each has an effect on the next update. Moments and counters go on; a scale of the loss only
    with fp16.
    """

    def update(optimizer: utils.Optimizer, step: int) -> torch.Tensor:
        optimizer.begin_step(step, 1)
        optimizer.backward(sum(x.square().sum() for x in optimizer.parameters))
        optimizer.step()
        return torch.cat([x.detach().flatten() for x in optimizer.parameters])

    def resumed(args: ppo.Args) -> torch.Tensor:
        model = loading.load_model(
            "--model", str(tmp_path / "checkpoints/step_1"), torch.float32, CPU
        )
        optimizer = utils.Optimizer(model, args, 9, prefix=prefix)
        checkpoints.load_checkpoint(model.name_or_path, tokenizer, {"": model}, {"": optimizer})
        assert optimizer.loss_scale == (2.0**16 if args.precision == "fp16" else 1.0)
        return update(optimizer, 3)

    for precision in ("fp16", "float32"):
        args = ppo.Args(learning_rate=1e-3, critic_learning_rate=1e-3, precision=precision)
        args.lr_schedule = args.critic_lr_schedule = "linear"
        model = load("qwen2")
        optimizer = utils.Optimizer(model, args, 9, prefix=prefix)
        for step in (1, 2):
            update(optimizer, step)
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        # An older checkpoint has a counter of updates, which nothing reads.
        state = {"step": 1, "optimizers": {"": {**optimizer.state_dict(), "updates": 7}}}
        checkpoints.save_checkpoint(
            str(tmp_path), world, tokenizer, state, {"": model}, {"": optimizer}, 0
        )
        unchanged = update(optimizer, 3)
        for name in ("fp16", "float32"):
            assert torch.equal(resumed(dataclasses.replace(args, precision=name)), unchanged)
    changed = {
        x
        for x in CHANGED
        if not torch.equal(resumed(dataclasses.replace(args, **{x: CHANGED[x]})), unchanged)
    }
    of_critic = {x for x in CHANGED if x.startswith("critic_")} | {"adam_betas", "max_grad_norm"}
    assert changed == (of_critic if prefix else {x for x in CHANGED if not x.startswith("critic_")})


@pytest.mark.parametrize("script", ["grpo", "rloo", "ppo"])
def test_a_changed_weight_of_the_kl(tmp_path, script):
    """It is that of the flag, unless --kl_target has adapted it: then a resume goes on with it.
    Responses without a score do not count.
    """
    values = {**helpers.workspace(tmp_path), "run_name": "run", "eval_every": 0, "kl_horizon": 10}
    reward = Path(values["reward"].partition(":")[0])
    reward.write_text(helpers.REWARD.replace("% 7 / 7", "% 7 % 5 / 7 or None"))
    changes = [
        {},
        {"kl_coef": 0.2},
        {"kl_coef": 0.3, "kl_target": 9.0},
        {"kl_coef": 0.4, "kl_target": 9.0},
        {},
    ]
    for step, changed in enumerate(changes, 1):
        run_here({**values, **changed, "total_episodes": 8 * step, "resume": step > 1}, script)
    rows = metrics_of(values)
    scored = 8 - rows[2]["val/missing_scores"]
    assert 0 < scored < 8
    # far below the target
    expected = [0.1, 0.2, 0.3, 0.3 * (1 - 0.2 * scored / 10), 0.1]
    assert [row["objective/kl_coef"] for row in rows] == pytest.approx(expected)


SCHEDULES = helpers.table("schedules.yaml")


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory) -> dict[str, dict]:
    """Runs of two steps with a checkpoint."""
    folder = tmp_path_factory.mktemp("schedules")
    common = {**helpers.workspace(folder), "run_name": "run", "num_epochs": 1, "eval_every": 0}
    pairs = [{**row, "chosen": row["answer"], "rejected": "?"} for row in helpers.ROWS]
    runs = {}
    for script, flags in SCHEDULES["begin"].items():
        runs[script] = flags_of(script, common) | flags | {"output_dir": str(folder / script)}
    runs["reward_model"]["dataset"] = helpers.write_rows(folder / "pairs.jsonl", pairs)
    for script, values in runs.items():
        half = {"passes": 1.3} if "passes" in values else {"total_episodes": 16}
        run_here({**values, **half}, script)
    return runs


@pytest.mark.parametrize("script, changed", SCHEDULES["resumed"])
def test_the_place_in_the_schedule(scheduled, tmp_path, monkeypatch, script, changed):
    """After a resume with other flags, each update has the learning rate of a run that has had them
    from the start.
    """
    rates = []
    step = utils.Optimizer.step

    def noting(optimizer: utils.Optimizer) -> None:
        step(optimizer)
        rates.append((optimizer.prefix, optimizer.lr))

    monkeypatch.setattr(utils.Optimizer, "step", noting)
    values = {**scheduled[script], **changed, "save_every": 0}
    run_here({**values, "output_dir": str(tmp_path / "from the start")}, script)
    expected, rates[:] = rates[:], []
    shutil.copytree(scheduled[script]["output_dir"], tmp_path / "runs")
    run_here({**values, "output_dir": str(tmp_path / "runs"), "resume": True}, script)
    assert 0 < len(rates) < len(expected) and rates == expected[-len(rates) :]
    assert len({rate for _, rate in rates}) > 1


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    values = {
        **helpers.workspace(tmp_path_factory.mktemp("resume")),
        "run_name": "run",
        "eval_every": 4,
    }
    run_here(values)
    return values


@pytest.fixture
def copy(whole, tmp_path) -> dict:
    shutil.copytree(whole["output_dir"], tmp_path / "runs")
    return {**whole, "output_dir": str(tmp_path / "runs"), "resume": True}


@pytest.mark.parametrize("save_every", [3, 0])
def test_a_finished_run_changes_nothing(whole, tmp_path, capsys, save_every):
    """And with fewer episodes it does not train on for ever. With --save_every 0 there is no
    checkpoint of it.
    """
    values = {**whole, "output_dir": str(tmp_path), "save_every": save_every}
    run_here(values)
    assert [*folder_of(values).glob("checkpoints")] == [folder_of(values) / "checkpoints"][
        :save_every
    ]
    if save_every:
        run_here({**values, "resume": True})
        run_here({**values, "resume": True, "total_episodes": 16})
    else:
        capsys.readouterr()
        assert "has 4 steps and no checkpoint" in helpers.refused(
            capsys, run_here, {**values, "resume": True}
        )
    helpers.assert_same_run(values, whole)
    assert read_lines(folder_of(values) / "held_out.jsonl") == read_lines(
        folder_of(whole) / "held_out.jsonl"
    )


# what raises at its n-th call; in a step and in an evaluation is one call of `generate`, and in a step
# are four updates
PLACES = [
    ("grpo.generate", 4, "; step 2 is saved, continue with --resume)"),
    ("utils.Optimizer.step", 9, "; step 2 is saved"),
    ("torch.optim.AdamW.step", 9, "; nothing is saved"),
]


@pytest.mark.parametrize("place, call, said", PLACES)
def test_an_exception_in_a_step(whole, tmp_path, monkeypatch, place, call, said):
    """The steps before are saved unless a weight may have changed since; the run goes on as if
    nothing had been.
    """
    values = {**whole, "output_dir": str(tmp_path), "save_every": 0}
    original = pkgutil.resolve_name(place)
    calls = []

    def raises(*args, **options):
        calls.append(1)
        assert len(calls) != call
        return original(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(AssertionError) as error:
        patch.setattr(place, raises)
        run_here(values)
    assert said in error.value.__notes__[0] and len(calls) == call
    if "nothing" not in said:
        run_here({**values, "resume": True})
        helpers.assert_same_run(values, whole)


def test_the_best_model_is_kept(whole, tmp_path, monkeypatch, capsys):
    """Of those that were trained, also where a run goes on; a metric that there is not is named."""
    values = {**whole, "output_dir": str(tmp_path), "eval_every": 1}
    accuracies = [0.9, math.nan, 0.5, 0.4, 0.5, 0.9]
    evaluate = lambda *_: ({"eval/accuracy": accuracies.pop(0)}, [{"prompt": "1"}])
    monkeypatch.setattr("plumbing.run.evaluation.evaluate", evaluate)
    values |= {"keep_best": "eval/accuracy", "keep_checkpoints": 1}
    run_here({**values, "total_episodes": 16})
    run_here({**values, "resume": True})
    assert steps_of(values) == ["best", "step_4"]
    assert torch.load(folder_of(values) / "checkpoints/best/trainer_state.pt")["step"] == 2
    line = helpers.refused(
        capsys, run_here, {**values, "keep_best": "eval/acuracy", "run_name": "other"}
    )
    assert "--keep_best eval/acuracy: " in line


def states_of(values: dict, *names: str) -> list[dict]:
    folder = folder_of(values) / "checkpoints"
    return [torch.load(folder / name / "trainer_state.pt") for name in names]


def test_the_best_value_is_that_of_the_folder(whole, tmp_path, monkeypatch):
    """Not that of the checkpoint from which a killed run goes on."""
    values = {**whole, "output_dir": str(tmp_path), "eval_every": 1, "save_every": 2}
    accuracies = [0.0, 0.1, 0.3, 0.9, 0.2]
    evaluate = lambda *_: ({"eval/accuracy": accuracies.pop(0)}, [{"prompt": "1"}])
    monkeypatch.setattr("plumbing.run.evaluation.evaluate", evaluate)
    values |= {"keep_best": "eval/accuracy"}
    run_here(values)
    for lost, later in (["step_4"], [0.5, 0.6]), (["step_4", "best"], [0.2, 0.1]):
        for name in lost:
            shutil.rmtree(folder_of(values) / "checkpoints" / name)
        accuracies[:] = later
        run_here({**values, "resume": True})
        best, last = states_of(values, "best", "step_4")
        assert best["step"] == 3 and last["eval/accuracy"] == later[-1]


def test_the_best_value_is_what_its_model_got(tmp_path):
    """Also where the state has a later value of the flag's metric, or none of it."""
    folder = tmp_path / "checkpoints/best"
    assert checkpoints.best_value(str(tmp_path), "eval/a") == -math.inf
    folder.mkdir(parents=True)
    state = {"results": {"eval/a": 0.25, "eval/b": None}, "eval/a": 0.5, "eval/c": 1.0}
    torch.save(state, folder / "trainer_state.pt")
    values = [checkpoints.best_value(str(tmp_path), f"eval/{name}") for name in "abc"]
    assert values == [0.25, -math.inf, -math.inf]


def test_a_run_that_begins_again_has_no_best_model_yet(whole, tmp_path, monkeypatch):
    values = {**whole, "output_dir": str(tmp_path), "eval_every": 1, "save_every": 0}
    accuracies = [0.0, 0.9, 0.1, 0.2, 0.3]
    evaluate = lambda *_: ({"eval/accuracy": accuracies.pop(0)}, [{"prompt": "1"}])
    monkeypatch.setattr("plumbing.run.evaluation.evaluate", evaluate)
    run_here({**values, "keep_best": "eval/accuracy"})
    shutil.rmtree(folder_of(values) / "final")
    accuracies[:] = [0.0, 0.1, 0.2, 0.3, 0.4]
    run_here({**values, "keep_best": "eval/accuracy", "resume": True})
    assert states_of(values, "best")[0]["step"] == 4


def test_changed_flags_and_rows_are_printed(copy, tmp_path, capsys):
    fewer = helpers.write_rows(tmp_path / "fewer.jsonl", helpers.ROWS[1:])
    state = folder_of(copy) / "checkpoints/step_4/trainer_state.pt"
    torch.save({**torch.load(state), "pass_rates": {12: 0.5}}, state)  # of a row that is gone
    changed = {"total_episodes": 80, "rollout_batch_size": 2 * copy["rollout_batch_size"]}
    run_here({**copy, **changed, "learning_rate": 1e-3, "dataset": fewer})
    assert [row["episode"] for row in metrics_of(copy)] == [0, 8, 16, 24, 32, 48]
    state = folder_of(copy) / "checkpoints/step_5/trainer_state.pt"
    assert "pass_rates" not in torch.load(state)
    out, err = capsys.readouterr()
    assert (
        "changed since: --total_episodes 32 -> 80\n" in out
        and "--learning_rate 0.003 -> 0.001\n" in out
    )
    assert err.count("warning: --resume: the rows to train on have changed") == 1
    (folder_of(copy) / "checkpoints" / ".step_9").mkdir()  # of a save that was killed
    run_here({**copy, **changed, "dataset": shutil.copy(fewer, tmp_path / "the_same.jsonl")})
    assert "--resume" not in capsys.readouterr().err and not [
        *folder_of(copy).glob("checkpoints/.step*")
    ]
    assert log.read_args(str(folder_of(copy)))["args"]["total_episodes"] == 80
    run_here({**copy, "total_episodes": 16, "dataset": fewer})
    assert "nothing is left to train, as the run has 5 steps already" in capsys.readouterr().err
    assert [row["step"] for row in metrics_of(copy)] == [0, 1, 2, 3, 4, 5]


def other_ids(folder: str) -> None:
    """Let the tokens of a tokenizer change places."""
    path = Path(folder) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    ids = tokenizer["model"]["vocab"]
    names = [name for name in ids if len(name) == 1]
    ids.update(zip(names, [ids[name] for name in reversed(names)]))
    path.write_text(json.dumps(tokenizer))


OTHERS = {  # what --model has become, flags, script
    "other ids": (other_ids, {}, "grpo"),
    "adapter": (None, {"lora_rank": 4}, "grpo"),
    "critic": (None, {}, "ppo"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_or_script(copy, tmp_path, capsys, name):
    """A checkpoint that does not fit is refused with one line, and nothing changes."""
    change, flags, script = OTHERS[name]
    model = shutil.copytree(copy["model"], tmp_path / "model")
    if change:
        change(str(model))
    before = [path.read_bytes() for path in sorted(folder_of(copy).rglob("*.json*"))]
    helpers.refused(
        capsys, run_here, {**copy, "model": str(model), "total_episodes": 40, **flags}, script
    )
    assert [path.read_bytes() for path in sorted(folder_of(copy).rglob("*.json*"))] == before


# ---- before the first step -----------------------------------------------------------------------


def test_a_signal_while_a_run_starts(whole, tmp_path):
    """It waits for a vLLM server that does not exist, and ends with one line within seconds."""
    servers = {"rollout_backend": "server", "rollout_servers": "http://127.0.0.1:9"}
    values = {**whole, **servers, "output_dir": str(tmp_path)}
    running = helpers.Running(values)
    while "waiting for " not in running.out:
        assert running.process.is_alive(), running.err
        time.sleep(0.05)
    os.kill(running.process.pid, signal.SIGINT)
    assert running.wait(100).code == 75
    assert (
        "SIGINT: the run exits before its first step" in running.err
        and "Traceback" not in running.err
    )
    assert not os.listdir(tmp_path)
