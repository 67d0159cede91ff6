"""scripts/replay.py: a recorded step comes out again bit for bit, and what was changed in the record is named."""

import json
import os
import shutil
from types import SimpleNamespace

import helpers
import pytest
import replay
from helpers import ROOT, folder_of, read_lines, refusal

from plumbing.run import resume


@pytest.fixture(scope="module")
def values(tmp_path_factory) -> dict:
    """A run of 4 steps, with checkpoints of steps 2 and 4, an evaluation of both, and a beta that moves."""
    values = helpers.workspace(tmp_path_factory.mktemp("replay"))
    values |= {"run_name": "run", "kl_controller": "adaptive", "kl_horizon": 20, "lr_schedule": "linear"}
    helpers.run(values)
    return values


@pytest.fixture
def again(monkeypatch, tmp_path, capsys):
    """A function that replays in this process, with the script in forked ones; it returns exit code and output."""
    ranks = []

    def run(command: list[str], env: dict):
        assert env["OMP_NUM_THREADS"] == "1"  # as the recorded runs have it
        config = {"config": command[-1]}
        ranks.append(int(command[command.index("--nproc_per_node") + 1]) if "--nproc_per_node" in command else 1)
        if ranks[-1] == 1:
            return type("Done", (), {"returncode": helpers.start(config).wait().code})
        codes = [rank.wait().code for rank in helpers.start_ranks(config, ranks[-1])]
        return type("Done", (), {"returncode": codes[0]})

    monkeypatch.setattr(replay, "subprocess", SimpleNamespace(run=run))

    def replayed(folder, step: int, **changes) -> tuple[int, str]:
        capsys.readouterr()
        try:
            replay.main(replay.Args(str(folder), step, **{"output_dir": str(tmp_path / "replays"), **changes}))
        except SystemExit as end:
            return end.code, "".join(capsys.readouterr())
        return 0, capsys.readouterr().out

    return replayed


def edit(path, change) -> None:
    rows = read_lines(path)
    change(rows)
    helpers.write_rows(path, rows)


@pytest.fixture
def record(values, tmp_path):
    """A copy of the run, to be changed."""
    shutil.copytree(folder_of(values), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("step, said", [(1, "from the start"), (2, "from the start"), (4, "step_2")])
def test_a_step_comes_out_again(again, record, tmp_path, step, said):
    before = sorted((path, path.stat().st_mtime_ns) for path in record.rglob("*"))
    code, out = again(record, step, log_samples=20)
    assert code == 0 and said in out and out.rstrip().endswith("metrics and samples agree bit for bit")
    assert before == sorted((path, path.stat().st_mtime_ns) for path in record.rglob("*"))
    made = tmp_path / "replays" / f"run-step_{step}"
    assert (made / "checkpoints" / f"step_{step}" / "model.safetensors").exists()
    assert [row["step"] for row in read_lines(made / "metrics.jsonl")][-1] == step
    assert not (tmp_path / "replays" / f"run-step_{step}.json").exists()
    assert (made / "final").exists() == (step == 4)  # which ends the run


def test_what_differs_is_named(again, record, tmp_path):
    edit(record / "metrics.jsonl", lambda rows: rows[-1].update({"loss/grad_norm": 0.5}))
    facts = json.loads((record / "args.json").read_text())
    (record / "args.json").write_text(json.dumps({**facts, "git_commit": "abc"}))
    changed = read_lines(record / "samples.jsonl")[-1]["response"]
    edit(record / "samples.jsonl", lambda rows: rows[-1].update({"response": changed[:3] + "#" + changed[4:]}))
    code, out = again(record, 4)
    lines = out.splitlines()
    assert code == 1 and "step 4 is the first that differs:" in lines
    assert any(line.startswith("commit: abc recorded, ") for line in lines)
    at = lines.index("step 4 is the first that differs:")
    assert lines[at + 1].startswith("  metrics.jsonl: loss/grad_norm: 0.5 recorded, ")
    assert "sample 8: response from character 3: '#" in lines[at + 2] and len(lines) == at + 3
    assert again(record, 3)[0] == 0


def test_the_first_step_that_differs(again, record):
    edit(record / "metrics.jsonl", lambda rows: rows[1].update({"step": rows[1]["step"], "lr": 0.5}))
    code, out = again(record, 2)
    assert code == 1 and "step 1 is the first that differs" in out


def test_two_ranks_and_flags_that_changed_later(again, values, tmp_path):
    two = {**values, "run_name": "two", "learning_rate": 1e-3, "save_every": 1, "keep_checkpoints": 0}
    helpers.run_ranks({**two, "total_episodes": 16}, 2, (0, 0))
    helpers.run_ranks({**two, "resume": True, "learning_rate": 1e-2}, 2, (0, 0))
    code, out = again(folder_of(two), 2)
    assert code == 0, out
    code, out = again(folder_of(two), 4)
    assert code == 0 and "checkpoints/step_3" in out, out


def test_what_the_script_is_started_with(record, tmp_path, monkeypatch, capsys):
    """The flags from before all later changes, without what would leave the machine, and the run's ranks and threads;
    a damaged checkpoint is passed over. A script that fails before the step says so."""
    facts = json.loads((record / "args.json").read_text()) | {"ranks": 2, "threads": 3}
    facts["args"] |= {"push_to_hub": True, "hub_model_id": "me/model", "hub_private_repo": True, "track": "wandb"}
    facts["history"] = [{"after_step": n, "changes": {"learning_rate": [n, n + 1]}} for n in (2, 3, 4)]
    (record / "args.json").write_text(json.dumps(facts))
    (record / "checkpoints" / "step_2" / "model.safetensors").write_bytes(b"")
    started = []

    def run(command: list[str], env: dict):
        with open(command[-1]) as config:
            started.append((command[:-3], env["OMP_NUM_THREADS"], json.load(config)))
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(replay.subprocess, "run", run)
    with pytest.raises(SystemExit) as end:
        replay.main(replay.Args(str(record), 3, str(tmp_path / "replays")))
    said = capsys.readouterr()
    assert end.value.code == 7 and "grpo.py ended with exit code 7 before step 3" in said.err
    assert "step 3 again, from the start" in said.out
    ((launch, threads, values),) = started
    assert launch[-2:] == ["--nproc_per_node", "2"] and threads == "3" and values["learning_rate"] == 3
    assert values["stop_after_step"] == 3 and not any(values[n] for n in ("push_to_hub", "hub_model_id", "track"))
    assert not values["hub_private_repo"]


def test_bad_input(again, record, tmp_path):
    code, out = again(record, 5)
    assert code == 2 and "--step 5" in refusal(out) and "4 steps" in refusal(out)
    (tmp_path / "replays" / "run-step_3").mkdir(parents=True)
    code, out = again(record, 3)
    assert code == 2 and "run-step_3 exists" in refusal(out)
    facts = json.loads((record / "args.json").read_text())
    for broken in ("{", "[]", json.dumps({"args": facts["args"]})):
        (record / "args.json").write_text(broken)
        code, out = again(record, 4)
        assert code == 2 and "args.json" in refusal(out)
    code, out = again(tmp_path / "gone", 1)
    assert code == 2 and "gone" in refusal(out)


def test_a_fork_in_a_folder_is_found_again(tmp_path, monkeypatch):
    """And finds utils.py and plumbing/, from wherever it is replayed."""
    script, done = os.path.join(ROOT, "forks", "mine.py"), []
    resume.open_folder(resume.Origin(str(tmp_path / "run"), {}), script, 1, 0)
    facts = json.loads((tmp_path / "run" / "args.json").read_text())
    monkeypatch.setattr(
        replay.subprocess, "run", lambda words, env: done.append((words, env)) or SimpleNamespace(returncode=0)
    )
    assert replay.run_script(facts, "flags.json") == 0
    [(words, env)] = done
    assert words[-3:] == [script, "--config", "flags.json"]
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT) and env["OMP_NUM_THREADS"] == "1"


def test_where_lists_of_tokens_differ():
    before = {"tokens": {"text": ["a", "b", "c"], "logprob": [-0.1, -0.2]}, "turns": [1, 2]}
    now = {"tokens": {"text": ["a", "x", "c"], "logprob": [-0.1, -0.2]}, "turns": [1]}
    assert replay.differences(before, now) == [
        "tokens: text from entry 1: ['b', 'c'] recorded, ['x', 'c'] now", "turns from entry 1: [2] recorded, [] now",
    ]  # fmt: skip
