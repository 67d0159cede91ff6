"""scripts/benchmark.py: a small run of what it measures, and what it makes of the numbers."""

import benchmark
import pandas
import pytest
import torch
import transformers

import grpo

FLAGS = {
    "model": benchmark.TINY, "max_response_length": 4, "rollout_batch_size": 1, "mini_batch_size": 8, "num_epochs": 2,
    "total_episodes": 8 * 3, "rollout_backend": "hf",
}  # fmt: skip


@pytest.mark.parametrize("run", [benchmark.run_grpo, benchmark.run_transformers])
def test_a_run(tmp_path, run):
    """Seconds and tokens of the steps of a run."""
    steps = run(str(tmp_path), {**FLAGS, "seed": 1}, [])
    assert len(steps) == 3
    for step in steps:
        parts = [step[name] for name in ("time/rollout", "time/logprobs", "time/training")]
        assert all(seconds > 0 for seconds in parts) and sum(parts) <= step["time/whole"] * (1 + 1e-9)
        assert 0 < step["val/sequence_lengths"] <= 4


def fails(folder, flags, more):
    raise ValueError("there is no GPU")


def test_processes_and_their_table(capsys):
    """What a kind measured in a process of its own, and the line that says why another cannot be."""
    kinds = {"bare": (benchmark.run_transformers, []), "none": (fails, [])}
    results = benchmark.compare(FLAGS, kinds, 1)
    assert "none: ValueError: there is no GPU" in capsys.readouterr().err
    header, bare = benchmark.run_table("tiny", results, "time/logprobs")
    assert bare[-1] == "1.00 (1.00 to 1.00)" and len(bare) == len(header) and results["bare"]["peak"][0] > 0


def test_a_table_pairs_the_rounds():
    """Medians over the rounds; ratios round by round."""
    rounds = lambda *seconds: pandas.DataFrame({"time/whole": seconds, "peak": 2000.0})
    header, a, b = benchmark.run_table("title", {"a": rounds(2.0, 4.0), "b": rounds(1.0, 8.0)}, "time/whole")
    cells = dict(zip(header, b))
    assert a[1] == "3" and cells["step, s"] == "4.5" and cells["peak, MiB"] == "2,000" and cells["tokens"] == ""
    assert b[-1] == "1.25 (0.50 to 2.00)"


def test_transformers_alone_does_the_same_work():
    """The same log-probs as grpo.py's."""
    model = transformers.AutoModelForCausalLM.from_pretrained(benchmark.TINY)
    ids = torch.randint(2, 20, (3, 9))
    ours = grpo.Policy(model, grpo.Args())(ids, torch.arange(9).expand_as(ids) > 0)["logprobs"]
    torch.testing.assert_close(benchmark.bare_logprobs(model, ids).flatten(), ours, rtol=1e-4, atol=1e-5)
