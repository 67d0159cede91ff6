"""scripts/benchmark.py: small runs of what it measures, and what it makes of the numbers."""

import helpers  # isort: skip
import benchmark  # helpers made scripts/ importable
import benchmark_bare
import benchmark_padding
import benchmark_scaling
import pytest
import torch

import utils

FLAGS = {
    "model": benchmark.TINY, "max_response_length": 4, "rollout_batch_size": 1, "mini_batch_size": 8, "num_epochs": 2,
    "total_episodes": 8 * 3, "rollout_backend": "hf",
}  # fmt: skip


def test_runs_in_turns():
    """Seconds, tokens and memory of the steps of a run, and the line that says why another cannot be."""
    kinds = {"base": (benchmark.run_grpo, []), "flash": (benchmark.run_grpo, ["--attention", "flash_attention_2"])}
    results = benchmark.compare(FLAGS, kinds, 1)
    (found,) = results["base"]
    assert len(found["steps"]) == 3 and found["peak"] > 0
    for step in found["steps"]:
        parts = [step[name] for name in ("time/rollout", "time/logprobs", "time/training")]
        assert all(seconds > 0 for seconds in parts) and sum(parts) < step["time/whole"]
    assert results["flash"].startswith("--attention flash_attention_2: takes a GPU")
    header, base, flash = benchmark.run_table("tiny", results, ("time/training", "time/logprobs"))
    shown = dict(zip(header, base))
    assert shown["updates, s"] == f"{found['steps'][2]['time/training']:,.4g}" and shown["sync, s"] == ""
    assert base[-1] == "1.00 (1.00 to 1.00)" and flash[:2] == ["flash", results["flash"]] and len(flash) == len(header)


def test_a_table_pairs_the_rounds():
    """Medians over the runs of the median step, without the first two; ratios round by round."""
    run = lambda *seconds: {"steps": [{"time/whole": x} for x in (90.0, 80.0, *seconds)], "peak": 2000.0, "load": 1.0}
    results = {"a": [run(1.0, 2.0, 9.0), run(4.0)], "b": [run(1.0), run(8.0)]}
    header, a, b = benchmark.run_table("title", results, ("time/whole",))
    cells = dict(zip(header, b))
    assert (
        a[1] == "3" and cells["step, s"] == "4.5" and cells["peak, MiB"] == "2,000" and cells["first step, s"] == "90"
    )
    assert b[-1] == "1.25 (0.50 to 2.00)" and cells["tokens"] == ""
    without_base = benchmark.run_table("title", {**results, "a": "no GPU"}, ("time/whole",))[1:]
    assert without_base == [["a", "no GPU", *[""] * (len(header) - 2)], [*b[:-1], ""]]


def test_long_tail(tmp_path):
    """Each token stops a response with probability 1/64."""
    folder = benchmark.random_model("long tail", str(tmp_path))
    model = benchmark.transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model(torch.tensor([[5]])).logits.softmax(-1).tolist() == [[[pytest.approx(1 / 64)] * 64]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_wasted_tokens(ranks):
    lengths = [10, 9, 5, 5, 3, 1]
    share, count = benchmark_padding.wasted(lengths, 20, ranks)
    worlds = [utils.World(rank, ranks, torch.device("cpu")) for rank in range(ranks)]
    cuts = [utils.micro_batches(lengths, 20, world) for world in worlds]
    slowest = 0
    for number in range(count):
        slowest += max(len(cut[number]) * max(lengths[i] for i in cut[number]) if cut[number] else 0 for cut in cuts)
    assert share == pytest.approx(1 - 33 / ranks / slowest) and 0 <= share < 1


def test_padding_is_what_results_say(capsys):
    """Nothing is timed, so that any machine gives the table of results/padding.md."""
    benchmark.measure_padding()
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    recorded = (helpers.ROOT / "results/padding.md").read_text()
    assert len(table) == 6 and "\n".join(table) in recorded


def test_bare_passes_do_the_same_work():
    """The same log-probs, gradient and number of sampled tokens as grpo.py's."""
    model = benchmark.transformers.AutoModelForCausalLM.from_pretrained(benchmark.TINY)
    torch.manual_seed(0)
    ids, found = torch.randint(2, 20, (3, 9)), []
    both = benchmark_bare.bare_passes(model, ids, 1), benchmark_bare.our_passes(model, ids, 1, True)
    for passes in both:
        model.zero_grad()
        passes["time/training"]()
        found.append([passes["time/logprobs"](), model.model.embed_tokens.weight.grad.clone()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert both[0]["time/rollout"]().shape == (3, 9) and [len(x) for x in both[1]["time/rollout"]()[0]] == [8] * 3
    (row, *_) = benchmark_bare.time_passes(benchmark.TINY, "grpo.py", ["time/logprobs"], 2, 4)
    assert 0 < row["time/logprobs"] == row["time/whole"]


def test_scaling(tmp_path):
    """All points are runs that grpo.py takes, and their picture is drawn."""
    for axis, points in benchmark_scaling.AXES.items():
        for size, flags in points.items():
            words = [f"--{name}={x}" for name, x in (benchmark.RUN | benchmark_scaling.BASE | flags).items()]
            args = benchmark.parse(benchmark.grpo.Args, words)
            assert args.model in benchmark.SHAPES and args.group_size * args.rollout_batch_size == args.mini_batch_size
            assert args.total_episodes == 5 * args.mini_batch_size, (axis, size)
    rows = {n: dict.fromkeys((*benchmark.PHASES.values(), "peak"), float(n)) for n in (2, 4)}
    benchmark_scaling.draw({"tokens": rows, "vocabulary": rows}, str(tmp_path / "scaling.png"))
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
