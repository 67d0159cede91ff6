"""scripts/benchmark.py: a small run of what it measures, and what it makes of the numbers."""

import itertools
import os
import subprocess
import types

import benchmark
import helpers
import pandas
import pytest
import transformers
from conftest import ROOT
from tiny_models import CPU

import grpo
from plumbing.models import loading, speed

FLAGS = benchmark.TABLE["flags"] | {
    "model": benchmark.TINY,
    "min_response_length": 1,
    "max_response_length": 4,
    "rollout_batch_size": 1,
    "mini_batch_size": 8,
    "total_episodes": 8 * 3,
}


def test_processes(monkeypatch, tmp_path, capsys):
    """Runs without and with further flags, each in a process of its own. One that fails is
    reported, and no process outlives the minutes.
    """
    # one that has its imports
    monkeypatch.setattr(benchmark, "get_context", lambda method: helpers._server())
    flags = FLAGS | {"output_dir": str(tmp_path)}
    kinds = ["grpo.py", "grpo.py --temperature 0", "grpo.py --lora_rank 2"]
    runs, failed = benchmark.compare({("case", kind): flags for kind in kinds}, 1, 10)
    assert [kind for _, kind, _ in runs] == kinds[::2]
    for steps in runs.values():
        assert (benchmark.medians(steps) > 0).all() and steps["time/step"].count() == 3
    assert failed == ["case, grpo.py --temperature 0, round 1"]
    with pytest.raises(SystemExit, match="temperature 0"):
        benchmark.report("Steps", runs, failed, "")
    long = {**flags, "output_dir": str(tmp_path / "long"), "total_episodes": 80_000}
    assert benchmark.compare({("case", "grpo.py"): long}, 9, 1 / 600) == ({}, [])
    assert "no number" in capsys.readouterr().out


def test_what_the_decode_loop_reads(tmp_path, monkeypatch):
    """Of a model of two layers with a head of keys of 16 numbers; by a clock of 10 ms a look."""
    clock = types.SimpleNamespace(perf_counter=itertools.count(step=0.01).__next__)
    monkeypatch.setattr(speed, "time", clock)
    folder = helpers.tiny_model(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, size in {"float64": 8, "bf16": 2}.items():
        decoding = speed.Decoding(model, loading.precision(name, CPU))
        assert decoding.metrics() == {}
        asked = decoding.timed(lambda: False)
        for _ in range(6):  # tokens: five forward passes behind that of the prompts
            assert not asked()
        decoding.count_cached(10, 6)  # reads 11, 12, 13, 14 and 15 tokens of the cache
        decoding.count_cached(1, 2)
        read = size * (model.num_parameters() + 2 * 2 * 16 * (65 + 2) / 5)
        found = decoding.metrics()
        assert found["perf/decode_ms_bound"] == pytest.approx(1e3 * read / decoding.bandwidth)
        assert found["perf/decode_ms_per_token"] == pytest.approx(10)
        assert decoding.metrics() == {}


def test_a_table_pairs_the_rounds(capsys):
    """Medians over the rounds, without the first steps; ratios round by round."""
    seconds = {("TRL", 1): 2.0, ("grpo.py", 1): 1.0, ("TRL", 2): 4.0, ("grpo.py", 2): 8.0}
    runs = {
        ("case", *key): pandas.DataFrame({"time/step": [9.0, 9.0, x]}) for key, x in seconds.items()
    }
    benchmark.report("Steps", runs, [], "")
    said = capsys.readouterr().out
    assert f"at {benchmark.git_commit()}\n" in said  # by which evidence.sh knows what is done
    lines = [line.split() for line in said.splitlines()]
    assert lines[5:8] == [["case"], ["step,", "s", "first", "step,", "s"], ["TRL", "3.0", "9.0"]], (
        lines
    )
    assert [line[-1] for line in lines[-8:-5]] == ["1.25", "0.50", "2.00"]  # median, min, max


def test_the_work_that_trl_shares(tmp_path, monkeypatch):
    """All flags of each are grpo.py's, each kind runs, and the picture is drawn."""
    steps = pandas.DataFrame({"time/step": [9.0, 9.0, 3.0], "eval/accuracy": [None, 0.1, 0.2]})
    seen = []

    def compare(cases, rounds, minutes):
        for (name, kind), flags in cases.items():
            args = grpo.Args(**flags)
            seen.append((name, kind, args.precision, args.max_response_length))
        return {(*case, 1): steps for case in cases}, []

    monkeypatch.setattr(benchmark, "compare", compare)
    picture = tmp_path / "demo.png"
    kinds = ["TRL", "grpo.py", "grpo.py --compile"]
    work = {  # what runs, in which format, and how many tokens at most
        "demo": (kinds[:2], "auto", 48),
        "long tail": (kinds[:2], "auto", 256),
        "bf16": (kinds, "bf16", 64),
        "float32": (kinds, "float32", 64),
    }
    benchmark.trl(tuple(work), rounds=1, model=benchmark.TINY, picture=str(picture))
    assert picture.stat().st_size > 1000
    assert seen == [(name, kind, *rest) for name, (run, *rest) in work.items() for kind in run]


def test_only_the_parts_that_are_asked_for(tmp_path):
    """What gpu_measure.sh has measured before stays, and no model is needed that no part uses."""
    (tmp_path / "train").mkdir()
    command = ["bash", ROOT / "scripts/debug/gpu_measure.sh", tmp_path, "step"]
    assert subprocess.run(command, env={**os.environ, "PYTHON": "true"}).returncode == 0
    assert (tmp_path / "train").exists() and (tmp_path / "step.log").exists()
