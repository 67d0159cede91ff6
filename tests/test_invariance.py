"""However a batch is cut, the result is the same: runs over ranks, shards and micro-batches against one process.

Every --loss, --loss_aggregation, --kl_estimator and --advantage, actor and critic of ppo, the reward model, and LoRA.
After three steps, of one to four updates each, all metrics (losses and gradient norms among them) and all weights
(policy, critic, moved reference, adapter) agree within 1e-9 in float64 and 1e-4 in float32, in the sense of
`helpers.largest_difference`.

    python tests/test_invariance.py            # prints the table of docs/guarantees.md
"""

import collections
import sys
import tempfile
from pathlib import Path
from typing import get_args

import helpers
import pytest
import transformers
from helpers import folder_of, metrics_of, read_lines, run_here, run_ranks
from test_shard import exact_runs

import grpo
import rloo

TOLERANCES = {"float64": 1e-9, "float32": 1e-4}

ONE, SOME, ALL = 1, 40, 10_000  # tokens of a micro-batch: one sequence, some, all that a rank has
CUTS = {  # ranks, --shard, --micro_batch_tokens, --gradient_checkpointing
    "a": (1, "none", ONE, False), "b": (1, "none", SOME, True), "c": (1, "none", ALL, True),
    "d": (2, "none", ONE, True), "e": (2, "none", SOME, False), "f": (2, "none", ALL, False),
    "g": (4, "none", ONE, False), "h": (4, "none", SOME, True), "i": (4, "none", ALL, False),
    "j": (1, "fsdp", ONE, False), "k": (1, "fsdp", SOME, True), "l": (1, "fsdp", ALL, False),
    "m": (2, "fsdp", ONE, True), "n": (2, "fsdp", SOME, False), "o": (2, "fsdp", ALL, True),
    "p": (4, "fsdp", ONE, False), "q": (4, "fsdp", SOME, True), "r": (4, "fsdp", ALL, False),
}  # fmt: skip
WHOLE = (1, "none", SOME, False)  # what they are compared with

ONCE = dict(num_epochs=1, mini_batch_size=8)  # one update a step, in which the old policy is the current one
LORA = dict(lora_rank=3, lora_alpha=8.0, learning_rate=1e-2)
STAYS = dict(ref_refresh_every=0)  # the reference of LoRA
# Row of the table, script, flags beside those of `exact_runs`, cuts in float64 and in float32; those after a space are
# run with --long only. The names of a row share all that knows of ranks, and the short form cuts each over some ranks.
TRAINED = {
    "grpo": ("grpo, dr_grpo", "grpo", dict(loss="grpo", kl_estimator="k3"), "g ejo", "m q"),
    "dr_grpo": ("grpo, dr_grpo", "grpo", dict(loss="dr_grpo", kl_estimator="k1"), "n dgr", " d"),
    "dapo": ("dapo, bnpo", "grpo", dict(loss="dapo", kl_estimator="k2"), "d lnr", " eh"),
    "bnpo": ("dapo, bnpo", "grpo", dict(loss="bnpo", kl_estimator="abs", kl_in="reward"), "n fi", "m"),
    "gspo": ("gspo", "grpo", dict(loss="gspo", kl_estimator="full"), "fm hjr", "o i"),
    "cispo": ("cispo, sapo", "grpo", dict(loss="cispo", loss_aggregation="sequence_sum"), "o ceg", " fg"),
    "sapo": ("cispo, sapo", "grpo", dict(loss="sapo", advantage_scale="batch"), "e knq", "d r"),
    "reinforce": ("reinforce", "grpo", dict(loss="reinforce", **ONCE), "en ailq", "e m"),
    "rloo": ("rloo, opo, remax", "rloo", dict(advantage="rloo", ratio="sequence"), "d mq", " j"),
    "opo": ("rloo, opo, remax", "rloo", dict(advantage="opo", kl_estimator="full"), "n fhl", "d h"),
    "remax": ("rloo, opo, remax", "rloo", dict(advantage="remax", kl_estimator="k2"), "f m", " o"),
    "reinforce++": ("reinforce++, baseline", "rloo", dict(advantage="reinforce++", gamma=0.95), "d gjno", " f"),
    "baseline": ("reinforce++, baseline", "rloo", dict(advantage="reinforce++-baseline", kl_in="loss"), "o fr", "m q"),
    "ppo": ("ppo, actor and critic", "ppo", {}, "dr biln", "n g"),
    "reward_model": ("reward_model", "reward_model", dict(centre_coef=0.05), "em cgjr", "f r"),
    "grpo lora": ("grpo, LoRA", "grpo", dict(kl_estimator="full", **LORA, **STAYS), "fn hjr", "n f"),
    "ppo lora": ("ppo, LoRA", "ppo", dict(**LORA, **STAYS), "do gkq", "d r"),
    "reward_model lora": ("reward_model, LoRA", "reward_model", LORA, "em ilp", "m g"),
}


def cases(long: bool) -> list[tuple[str, str, str]]:
    """Return (name, precision, cut) of each case."""
    return [
        (name, precision, cut)
        for name, (*_, in_float64, in_float32) in TRAINED.items()
        for precision, cuts in (("float64", in_float64), ("float32", in_float32))
        for cut in (cuts.replace(" ", "") if long else cuts.partition(" ")[0])
    ]


def pytest_generate_tests(metafunc):
    if "cut" in metafunc.fixturenames:
        found = cases(metafunc.config.getoption("--long"))
        metafunc.parametrize("name, precision, cut", found, ids=lambda x: "-".join(map(str, CUTS.get(x, [x]))))


COLUMNS = {
    **{f"DDP {n}": lambda ranks, shard, *_, n=n: (ranks, shard) == (n, "none") for n in (2, 4)},
    **{f"FSDP {n}": lambda ranks, shard, *_, n=n: (ranks, shard) == (n, "fsdp") for n in (1, 2, 4)},
    "one sequence": lambda ranks, shard, budget, recompute: budget == ONE,
    "all at once": lambda ranks, shard, budget, recompute: budget == ALL,
    "checkpointing": lambda ranks, shard, budget, recompute: recompute,
}


class Runs:
    """The runs, in a folder. Those in one process, with which the others are compared, are made once."""

    def __init__(self, folder: Path):
        self.base, self.output, self.whole = exact_runs(folder), str(folder / "runs"), {}
        # One score in seven is missing, so that mini-batches are uneven.
        (folder / "gaps.py").write_text(helpers.REWARD.replace("% 7 / 7", "% 7 / 7 or None"))
        # transformers' RMSNorm computes in float32 even in a float64 model; GPT-NeoX has another norm.
        tied = helpers.tiny_model(folder / "tied", tie_word_embeddings=True)
        self.models = {"float64": self.base["grpo"]["model"], "float32": tied}
        for path, likelier in zip(self.models.values(), (4, 8)):  # the stop token: responses of many lengths
            model = transformers.AutoModelForCausalLM.from_pretrained(path)
            model.get_output_embeddings().weight.data[model.config.eos_token_id] *= likelier
            model.save_pretrained(path)

    def flags(self, name: str, precision: str, cut: tuple) -> dict:
        _, script, changes, *_ = TRAINED[name]
        values = {**self.base.get(script, self.base["grpo"]), "eval_every": 0, **changes}  # that of grpo for its forks
        values |= {"model": self.models[precision], "precision": precision, "output_dir": self.output}
        if script != "reward_model":
            own, *judges = [values["reward"]] if isinstance(values["reward"], str) else values["reward"]
            values["reward"] = (own.replace("reward.py", "gaps.py"), *judges)
        ranks, values["shard"], values["micro_batch_tokens"], values["gradient_checkpointing"] = cut
        return {**values, "run_name": "-".join(map(str, (name, precision, *cut)))}

    def difference(self, name: str, precision: str, cut: str) -> tuple[float, str]:
        """Run a case, and compare it with one process."""
        options, (ranks, shard, *_) = {"script": TRAINED[name][1]}, CUTS[cut]
        values, whole = self.flags(name, precision, CUTS[cut]), self.flags(name, precision, WHOLE)
        if (name, precision) not in self.whole:
            self.whole[name, precision] = helpers.start(whole, **options)
        if (ranks, shard) == (1, "none"):
            first = helpers.run(values, **options)
        else:
            first = run_ranks(values, ranks, (0,) * ranks, **options)[0]
        assert (f"sharding: fsdp over {ranks} ranks" in first.out) == (shard == "fsdp")
        reference = self.whole[name, precision].wait()
        assert reference.code == 0, reference.err[-3000:]
        if precision == "float64":
            return helpers.largest_difference(values, whole)
        # How far the rollout's log-probabilities are from the update's is nothing but rounding here.
        rows = metrics_of(values) + metrics_of(whole)
        assert all(row.get("rollout/logprob_diff_max", 0.0) < 1e-4 for row in rows)
        return helpers.largest_difference(values, whole, least=0.1, without="rollout/")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("invariance"))


def test_how_a_batch_is_cut_changes_nothing(runs, name, precision, cut):
    difference, where = runs.difference(name, precision, cut)
    assert difference < TOLERANCES[precision], where


def test_equal_responses_have_equal_scores(runs):
    """Though a reward model rounds by what else is in its micro-batch: else their advantages would be that rounding."""
    values = {**runs.flags("grpo", "float32", WHOLE), "run_name": "equal", "top_k": 1, "loss_aggregation": "token"}
    values |= {"reward": values["reward"][1:], "reward_weights": (1.0,), "group_size": 5, "mini_batch_size": 10}
    values |= {"total_episodes": 100, "kl_coef": 0.0, "ref_refresh_every": 0, "entropy_coef": 0.0, "log_samples": 10}
    helpers.run(values)
    assert all(row["val/zero_std_fraction"] == 1 and row["loss/grad_norm"] == 0 for row in metrics_of(values))
    samples = read_lines(folder_of(values) / "samples.jsonl")
    assert len(samples) == 100 and all(row["advantage"] == 0 for row in samples)
    assert len({row["response"] for row in samples}) > 1


# ---- do the cases say anything? --------------------------------------------------------------------------------------


def choices(module, field: str) -> set:
    """What a flag takes."""
    kinds = module.Args.__annotations__[field]
    return {x for kind in (kinds, *get_args(kinds)) for x in get_args(kind) if isinstance(x, str)}


def test_all_is_covered():
    """Each value of a flag; each row by DDP, by FSDP and in float32, and each name over ranks. With --long each name
    with all of that, and all columns of each row."""
    flags = {name: {"loss": "grpo", "kl_estimator": "full", **changes} for name, (_, _, changes, *_) in TRAINED.items()}
    of_grpo = [flags[name] for name, (_, script, *_) in TRAINED.items() if script == "grpo"]
    aggregation = lambda values: values.get("loss_aggregation", grpo.VARIANTS[values["loss"]][1])
    assert {values["loss"] for values in of_grpo} == choices(grpo, "loss") == set(grpo.VARIANTS)
    assert {values["kl_estimator"] for values in of_grpo} == choices(grpo, "kl_estimator")
    assert {aggregation(values) for values in of_grpo} == choices(grpo, "loss_aggregation")
    assert {values.get("advantage", "rloo") for values in flags.values()} == choices(rloo, "advantage")
    for long in (False, True):
        done = collections.defaultdict(list)
        for name, precision, cut in cases(long):
            for key in (precision, (precision, name), (precision, TRAINED[name][0])):
                done[key].append(CUTS[cut])
        for name, (row, *_) in TRAINED.items():
            whom = name if long else row
            assert done["float32", whom]
            assert {"none", "fsdp"} <= {
                shard for ranks, shard, *_ in done["float64", whom] if (ranks, shard) != (1, "none")
            }
            assert any(ranks > 1 for ranks, *_ in done["float64", name])
            assert not long or all(any(has(*cut) for cut in done["float64", row]) for has in COLUMNS.values()), row
        missing = [name for name, has in COLUMNS.items() if not any(has(*cut) for cut in done["float64"])]
        assert missing == ([] if long else ["FSDP 1"])
        assert not long or set(done["float64"]) == set(CUTS.values())
        assert not long or all(any(has(*cut) for cut in done["float32"]) for has in COLUMNS.values())


@pytest.mark.parametrize(
    "script, field, changes",
    [
        ("grpo", "loss", {}),
        ("grpo", "loss_aggregation", {}),
        ("grpo", "kl_estimator", {"kl_in": "loss"}),
        ("rloo", "advantage", {}),
    ],
)
def test_each_choice_trains_otherwise(runs, script, field, changes):
    """Else a case that covers it would say nothing about it: another gradient, by more than cuts may change it."""
    norms = []
    for choice in sorted(choices({"grpo": grpo, "rloo": rloo}[script], field)):
        values = {**runs.flags(script, "float64", WHOLE), **changes, field: choice}
        values |= {"loss_aggregation": "token"} if field == "advantage" else {}
        values |= {"total_episodes": 16, "save_every": 0, "run_name": f"{field} {choice}"}
        run_here(values, script)
        norms.append(sum(row["loss/grad_norm"] for row in metrics_of(values)))
    norms.sort()
    assert all(high - low > 1e-6 * high for low, high in zip(norms, norms[1:])), norms


def test_the_runs_differ_from_step_to_step(runs):
    """Mini-batches and responses of several lengths, missing scores, clipping, a beta and a reference that move."""
    names = [name for name, (_, script, *_) in TRAINED.items() if script != "reward_model"]
    missing = clipped = 0
    for name in names:
        if (name, "float64") not in runs.whole:
            runs.difference(name, "float64", TRAINED[name][3][0])
    for name, precision in runs.whole:
        if name not in names:
            continue
        values = runs.flags(name, precision, WHOLE)
        rows = metrics_of(values)
        assert len(rows) == 3 and len({row["policy/entropy_avg"] for row in rows}) == 3
        assert len({row["objective/kl_coef"] for row in rows}) > 1
        assert len({len(row["response"]) for row in read_lines(folder_of(values) / "samples.jsonl")}) > 4
        missing += sum(row["val/missing_scores"] for row in rows)
        clipped += sum(row["policy/clipfrac_avg"] > 0 for row in rows)
    assert missing > len(names) and clipped > len(names)


# ---- the table -------------------------------------------------------------------------------------------------------


def main() -> None:
    worst = collections.defaultdict(float)  # (row, column): largest difference
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        for name, precision, cut in cases(long=True):
            (found, where), row = runs.difference(name, precision, cut), TRAINED[name][0]
            print(f"{name} {precision} {CUTS[cut]}: {found:.1e} in {where}", file=sys.stderr, flush=True)
            own = [column for column, has in COLUMNS.items() if has(*CUTS[cut])]
            for column in own if precision == "float64" else ["float32"]:
                worst[row, column] = max(worst[row, column], found)
    columns = [*COLUMNS, "float32"]
    print("|", " | ".join(["trained", *columns]), "|")
    print("|" + "---|" * (1 + len(columns)))
    for row in dict.fromkeys(row for row, *_ in TRAINED.values()):
        print("|", " | ".join([row, *(f"{worst[row, column]:.0e}".replace("0e+00", "0") for column in columns)]), "|")


if __name__ == "__main__":
    main()
