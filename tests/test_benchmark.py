"""scripts/benchmark.py: a small run of what it measures, and what it makes of the numbers."""

import benchmark
import helpers
import pandas
import torch
import transformers

import grpo

FLAGS = benchmark.FLAGS | {
    "model": benchmark.TINY, "min_response_length": 1, "max_response_length": 4, "rollout_batch_size": 1,
    "mini_batch_size": 8, "total_episodes": 8 * 3,
}  # fmt: skip


def fails(flags, words):
    raise ValueError("there is no GPU")


def test_processes(capsys, monkeypatch):
    """What kinds measured, each in a process of its own, and the line that says why another cannot be."""
    monkeypatch.setattr(benchmark, "get_context", lambda method: helpers._server())  # one that has its imports
    kinds = {"transformers": (benchmark.run_transformers, []), "grpo.py": (benchmark.run_grpo, []), "none": (fails, [])}
    rows = benchmark.compare(FLAGS, kinds, 1)
    assert "none: ValueError: there is no GPU" in capsys.readouterr().err
    assert [kind for kind, _ in rows.index] == ["transformers", "grpo.py"] and (rows > 0).all(axis=None)
    assert (rows[list(benchmark.PHASES)].sum(axis=1) <= rows["step, s"] * (1 + 1e-9)).all()
    header, bare, ours = benchmark.table(rows).splitlines()
    assert "ratio of updates" in header and "1.00 (1.00 to 1.00)" in bare and ours.startswith("grpo.py")


def test_a_table_pairs_the_rounds():
    """Medians over the rounds; ratios round by round."""
    seconds = {("transformers", 1): 2.0, ("grpo.py", 1): 1.0, ("transformers", 2): 4.0, ("grpo.py", 2): 8.0}
    rows = pandas.DataFrame.from_dict({key: dict.fromkeys(benchmark.PHASES, x) for key, x in seconds.items()}, "index")
    _, bare, ours = benchmark.table(rows).splitlines()
    assert bare.split()[1] == "3" and ours.split()[1] == "4.5" and "1.25 (0.50 to 2.00)" in ours


def test_transformers_alone_does_the_same_work():
    """The same log-probs as grpo.py's."""
    model = transformers.AutoModelForCausalLM.from_pretrained(benchmark.TINY)
    ids = torch.randint(2, 20, (3, 9))
    ours = grpo.Policy(model, grpo.Args())(ids, torch.arange(9).expand_as(ids) > 0)["logprobs"]
    torch.testing.assert_close(benchmark.bare_logprobs(model, ids).flatten(), ours, rtol=1e-4, atol=1e-5)
