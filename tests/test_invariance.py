"""However a batch is cut, the result is the same: runs over ranks, shards and micro-batches against
one process.

Every --loss, --loss_aggregation, --kl_estimator and --advantage, actor and critic of ppo, the
reward model, and LoRA. After three steps, of one to four updates each, all metrics (losses and
gradient norms among them) and all weights (policy, critic, moved reference, adapter) agree within
1e-9 in float64 and 1e-4 in float32, in the sense of `helpers.largest_difference`. With --long, over
three times as many cuts.

    python tests/test_invariance.py            # prints the largest difference of each case of --long
"""

import tempfile
from pathlib import Path
from typing import get_args

import conftest  # noqa: F401
import helpers
import numpy as np
import pytest
import torch
from helpers import folder_of, metrics_of, read_lines, run_ranks
from test_shard import exact_runs

import grpo
import rloo

TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
TABLES = helpers.table("invariance.yaml")
CUTS = TABLES["cuts"]
TRAINED = TABLES["trained"]
WHOLE = (1, "none", 40, False)  # what they are compared with


def cases(long: bool) -> list[tuple[str, str, str]]:
    """Return (name, precision, cut) of each case; with GPUs those that have one for each rank, all
    of them in float32, too.
    """
    gpus = torch.cuda.device_count()
    return [
        (name, precision, cut)
        for name, (*_, in_float64, in_float32) in TRAINED.items()
        for precision, cuts in (
            ("float64", in_float64),
            ("float32", in_float32 + in_float64 * (gpus > 0)),
        )
        for cut in (cuts.replace(" ", "") if long else cuts.partition(" ")[0])
        if not gpus or CUTS[cut][0] <= gpus
    ]


def pytest_generate_tests(metafunc):
    if "cut" in metafunc.fixturenames:
        chosen = cases(metafunc.config.getoption("--long"))
        metafunc.parametrize(
            "name, precision, cut", chosen, ids=lambda x: "-".join(map(str, CUTS.get(x, [x])))
        )


class Runs:
    """The runs, in a folder. Those in one process, with which the others are compared, are made
    once.
    """

    def __init__(self, folder: Path):
        self.base = exact_runs(folder)
        self.output = str(folder / "runs")
        self.whole = {}
        # One score in seven is missing, so that mini-batches are uneven.
        (folder / "gaps.py").write_text(helpers.REWARD.replace("% 7 / 7", "% 7 / 7 or None"))
        # transformers' RMSNorm computes in float32 even in a float64 model; GPT-NeoX has another
        # norm.
        self.models = {
            "float64": helpers.tiny_model(folder / "neox", "gpt_neox", stop=4),
            "float32": helpers.tiny_model(folder / "tied", tie_word_embeddings=True, stop=8),
        }

    def flags(self, name: str, precision: str, cut: tuple) -> dict:
        script, changes, *_ = TRAINED[name]
        values = {**self.base[script], "eval_every": 0, **changes}
        values |= {
            "model": self.models[precision],
            "precision": precision,
            "output_dir": self.output,
        }
        if script != "reward_model":
            function, *judges = (
                [values["reward"]] if isinstance(values["reward"], str) else values["reward"]
            )
            values["reward"] = (function.replace("reward.py", "gaps.py"), *judges)
        if "ptx_coef" in changes:
            values["ptx_dataset"] = values["dataset"]
        if "environment" in changes:
            values["environment"] = helpers.GAME
        ranks, values["shard"], values["micro_batch_tokens"], values["gradient_checkpointing"] = cut
        return {**values, "run_name": "-".join(map(str, (name, precision, *cut)))}

    def difference(self, name: str, precision: str, cut: str) -> tuple[float, str]:
        """Run a case, and compare it with one process."""
        script = TRAINED[name][0]
        (ranks, shard, *_) = CUTS[cut]
        values = self.flags(name, precision, CUTS[cut])
        whole = self.flags(name, precision, WHOLE)
        if (name, precision) not in self.whole:
            self.whole[name, precision] = helpers.Running(whole, script=script)
        first = run_ranks(values, ranks, (0,) * ranks, script=script)[0]
        assert (f"sharding: {shard} over {ranks} ranks" in first.out) == (shard != "none")
        reference = self.whole[name, precision].wait()
        assert reference.code == 0, reference.err
        if "filter_groups" in values:
            # groups were replaced
            assert any(row["val/sampled_prompts"] > 2 for row in metrics_of(whole))
        if precision == "float64":
            if script != "reward_model":
                same_tokens(values, whole)
            return helpers.largest_difference(values, whole)
        # How far the rollout's log-probabilities are from the update's is nothing but rounding
        # here.
        rows = metrics_of(values) + metrics_of(whole)
        assert all(row.get("rollout/logprob_diff_max", 0.0) < 1e-4 for row in rows)
        return helpers.largest_difference(values, whole, least=0.1, without="rollout/")


def same_tokens(values: dict, whole: dict) -> None:
    """Check that two runs logged the same tokens, four digits of each number."""
    ours, theirs = (read_lines(folder_of(each) / "tokens.jsonl") for each in (values, whole))
    assert any(1 in row["trains"] for row in ours)
    for row, other in zip(ours, theirs, strict=True):
        assert row.keys() == other.keys() and row.pop("texts") == other.pop("texts")
        for name in row.keys() - {"step", "sample"}:
            numbers = [np.array(each[name], dtype=float) for each in (row, other)]  # NaN for None
            np.testing.assert_allclose(*numbers, rtol=1e-3, atol=1e-8, err_msg=name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("invariance"))


def test_how_a_batch_is_cut_changes_nothing(runs, name, precision, cut):
    difference, where = runs.difference(name, precision, cut)
    assert difference < TOLERANCES[precision], where


def test_equal_responses_have_equal_scores(runs):
    """Though a reward model rounds by what else is in its micro-batch: else their advantages would
    be that rounding.
    """
    values = {
        **runs.flags("grpo", "float32", WHOLE),
        "run_name": "equal",
        "top_p": 1e-9,
        "loss_aggregation": "token",
    }
    values |= {
        "reward": values["reward"][1:],
        "reward_weights": (1.0,),
        "group_size": 5,
        "mini_batch_size": 10,
    }
    values |= {
        "total_episodes": 50,
        "kl_coef": 0.0,
        "ref_refresh_every": 0,
        "kl_target": 0.0,
        "entropy_coef": 0.0,
    }
    values["log_samples"] = 10
    helpers.run(values)
    assert all(
        row["val/zero_std_fraction"] == 1 and row["loss/grad_norm"] == 0
        for row in metrics_of(values)
    )
    samples = read_lines(folder_of(values) / "samples.jsonl")
    assert len(samples) == 50 and all(row["advantage"] == 0 for row in samples)
    assert len({row["response"] for row in samples}) > 1


# ---- do the cases say anything? ------------------------------------------------------------------


def choices(module, field: str) -> set:
    """Return the values of a flag."""
    kinds = module.Args.__annotations__[field]
    return {x for kind in (kinds, *get_args(kinds)) for x in get_args(kind) if isinstance(x, str)}


def test_all_is_covered():
    """Each value of a flag; each name over ranks in float64; all cuts with --long."""
    of_grpo = [
        {"loss": "grpo", **changes} for script, changes, *_ in TRAINED.values() if script == "grpo"
    ]
    aggregation = lambda values: values.get(
        "loss_aggregation", grpo.VARIANTS[values["loss"]].loss_aggregation
    )
    assert {values["loss"] for values in of_grpo} == choices(grpo, "loss") == set(grpo.VARIANTS)
    assert {values.get("kl_estimator", "k3") for values in of_grpo} == choices(grpo, "kl_estimator")
    assert {aggregation(values) for values in of_grpo} == choices(grpo, "loss_aggregation")
    of_rloo = [changes for script, changes, *_ in TRAINED.values() if script == "rloo"]
    assert {changes["advantage"] for changes in of_rloo} == choices(rloo, "advantage")
    over_ranks = {
        name for name, precision, cut in cases(False) if precision == "float64" and CUTS[cut][0] > 1
    }
    assert over_ranks == set(TRAINED)
    assert {cut for _, _, cut in cases(True)} == set(CUTS)


@pytest.mark.parametrize("name", ["grpo", "rloo", "ppo"])
def test_the_runs_differ_from_step_to_step(runs, name):
    """Responses of several lengths, missing scores, clipping, a beta that moves."""
    if (name, "float64") not in runs.whole:
        runs.difference(name, "float64", TRAINED[name][2][0])
    values = runs.flags(name, "float64", WHOLE)
    rows = metrics_of(values)
    assert len(rows) == 3 and len({row["policy/entropy_avg"] for row in rows}) == 3
    assert len({row["objective/kl_coef"] for row in rows}) > 1
    assert (
        len({len(row["response"]) for row in read_lines(folder_of(values) / "samples.jsonl")}) > 4
    )
    assert any(row["val/missing_scores"] for row in rows) and any(
        row["policy/clipfrac_avg"] for row in rows
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        for name, precision, cut in cases(long=True):
            difference, where = runs.difference(name, precision, cut)
            print(f"{name} {precision} {CUTS[cut]}: {difference:.1e} in {where}", flush=True)


if __name__ == "__main__":
    main()
