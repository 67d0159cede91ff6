"""scripts/benchmark.py: a small run of what it measures, and what it makes of the numbers."""

import benchmark
import helpers
import pandas
import pytest

FLAGS = benchmark.TABLE["flags"] | {
    "model": benchmark.TINY,
    "min_response_length": 1,
    "max_response_length": 4,
    "rollout_batch_size": 1,
    "mini_batch_size": 8,
    "total_episodes": 8 * 3,
}


def test_processes(monkeypatch, tmp_path):
    """Runs of grpo.py without and with a further flag, each in a process of its own."""
    # one that has its imports
    monkeypatch.setattr(benchmark, "get_context", lambda method: helpers._server())
    kinds = ["grpo.py", "grpo.py --lora_rank 2"]
    cases = {"case": FLAGS | {"output_dir": str(tmp_path)}}
    runs, failed = benchmark.compare(cases, kinds, 1, 10)
    assert [kind for kind, _ in runs["case"]] == kinds and not failed
    for steps in runs["case"].values():
        assert (benchmark.medians(steps) > 0).all() and steps["time/step"].count() == 3


def test_a_table_pairs_the_rounds():
    """Medians over the rounds, without the first steps; ratios round by round."""
    seconds = {("TRL", 1): 2.0, ("grpo.py", 1): 1.0, ("TRL", 2): 4.0, ("grpo.py", 2): 8.0}
    runs = {key: pandas.DataFrame({"time/step": [9.0, 9.0, x]}) for key, x in seconds.items()}
    lines = [line.split() for line in benchmark.table(runs).splitlines()]
    assert lines[1:3] == [["TRL", "3.0", "9.0"], ["grpo.py", "4.5", "9.0"]]
    assert [line[-1] for line in lines[-6:-3]] == ["1.25", "0.50", "2.00"]  # median, min, max


@pytest.mark.parametrize("unit", benchmark.TABLE["counts"])
def test_each_unit_costs_something(unit, tmp_path):
    """In this process; 1,000 tokens are one response."""
    assert benchmark.cost(unit, 1000 if unit == "token" else 3, str(tmp_path)) > 0
