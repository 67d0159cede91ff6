"""scripts/plot.py, and the scripts of scripts/debug/ with a fork."""

import json
import os
import shutil
import subprocess

import forked_python
import plot
import pytest
from helpers import ROOT, write_rows
from matplotlib.figure import Figure
from matplotlib.image import imread

from plumbing.run import curves


@pytest.fixture
def runs(tmp_path) -> list[str]:
    """Two runs of one name."""
    folders = [tmp_path / "monday" / "run", tmp_path / "tuesday" / "run"]
    for i, folder in enumerate(folders):
        folder.mkdir(parents=True)
        write_rows(folder / "metrics.jsonl", [{"step": s, "objective/scores": (i + s) / 9} for s in range(4)])
    return list(map(str, folders))


def refused(capsys, *words: str, output: str = "curves.png") -> str:
    with pytest.raises(SystemExit) as end:
        plot.main(plot.Args(runs=words, output=output))
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("error: ")
    return line


def test_two_runs_of_one_name(runs, tmp_path, monkeypatch):
    """Both are drawn, called by what tells them apart; a run that is named twice is drawn once."""
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k))
    plot.main(plot.Args(runs=(*runs, runs[0] + "/"), output=str(tmp_path / "a.png")))
    lines = drawn[0].axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["monday/run", "tuesday/run"]
    assert len({line.get_color() for line in lines}) == 2 and imread(tmp_path / "a.png").std() > 0.01


def test_seeds_share_a_line_in_a_band(runs, tmp_path, monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k))
    for seed, folder in enumerate(runs):
        facts = {"script": "grpo.py", "args": {"seed": seed, "run_name": str(seed), "kl_coef": 0.1}}
        with open(f"{folder}/args.json", "w") as file:
            json.dump(facts, file)
    with open(f"{runs[0]}/metrics.jsonl", "a") as file:  # the other has not got there
        file.write('{"step": 4, "objective/scores": 0.75}\n')
    words = plot.Args(runs=tuple(runs), output=str(tmp_path / "a.svg"), metrics=("objective/scores",), log="y")
    plot.main(words)
    (axis,) = drawn[0].axes
    (line,), (band,) = axis.get_lines(), axis.collections
    assert (
        list(line.get_ydata()) == pytest.approx([*((s + 0.5) / 9 for s in range(4)), 0.75])
        and axis.get_yscale() == "log"
    )
    edges = {(x, round(y, 6)) for x, y in band.get_paths()[0].vertices}
    assert {(s, round((s + i) / 9, 6)) for s in range(4) for i in (0, 1)} <= edges
    assert (tmp_path / "a.svg").read_text().startswith("<?xml") and sorted(os.listdir(tmp_path))[0] == "a.svg"


@pytest.mark.parametrize("output", ["no/such/folder/a.png", "a.xyz", "."])
def test_an_output_that_cannot_be_written(runs, tmp_path, capsys, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, *runs, output=output).startswith(f"error: --output {output}: ")


def test_runs_that_cannot_be_drawn(runs, tmp_path, capsys):
    assert "metrics.jsonl" in refused(capsys, str(tmp_path))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n')
    assert "metrics.jsonl line 2: is no JSON" in refused(capsys, str(tmp_path / "broken"))
    (tmp_path / "broken" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "none of the metrics" in refused(capsys, str(tmp_path / "broken"))


def test_no_arguments(tmp_path):
    with forked_python.python() as python:
        words = [python, str(ROOT / "scripts" / "plot.py")]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr and not os.listdir(tmp_path), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


def test_a_run_of_its_own_is_called_by_its_name(runs, tmp_path):
    assert curves.plot_curves([runs[0]], str(tmp_path / "a.png"))


@pytest.mark.parametrize("name", ["cpu", "gpu"])
@pytest.mark.parametrize("source", ["grpo", "ppo", "reward_model"])
def test_debug_scripts_take_a_fork(tmp_path, name, source):
    """With the flags of what it is a fork of. A `python` that prints its words stands in for the real one."""
    if (name, source) == ("gpu", "reward_model"):
        pytest.skip("has no rollout, which this script is about")
    (tmp_path / "scripts" / "debug").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "debug" / f"{name}.sh", tmp_path / "scripts" / "debug")
    shutil.copy(ROOT / f"{source}.py", tmp_path / "my_fork.py")
    shutil.copy(ROOT / f"{source}.py", tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\n[ ${PYTHONPATH%%:*} = $PWD ] && echo $*\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    said = []
    for script in (source, "my_fork.py"):
        words = ["bash", str(tmp_path / "scripts" / "debug" / f"{name}.sh"), script, "--seed", "3"]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **path}, check=True)
        said.append(done.stdout.split())
    ours, fork = said
    assert (ours[0], fork[0]) == (f"{source}.py", "my_fork.py") and fork[2].startswith("debug-my_fork-")
    assert ours[3:] == fork[3:] and ours[-2:] == ["--seed", "3"]
    assert ("--rollout_batch_size" in ours) == (source != "reward_model")
