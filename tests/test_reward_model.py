"""reward_model.py: its loss, where scores are read, every format of pairs, and whole runs.

(Resumed: test_scripts.py; over ranks: test_shard.py and test_invariance.py.)
"""

import json
import math
import shutil
import statistics
from unittest import mock

import helpers
import pytest
import torch
from helpers import folder_of, metrics_of, read_lines, run_here, write_rows
from test_equations import double
from tiny_models import CPU, WORLD, make_tokenizer
from transformers import AutoModelForSequenceClassification

import grpo
import reward_model
import utils
from plumbing.data import prompts as data
from plumbing.data.pairs import load_pairs, load_train_and_eval_pairs
from plumbing.data.tasks import arithmetic_pairs
from plumbing.models import loading as models
from plumbing.models.tokenizer import load_tokenizer
from plumbing.run.command import report_errors
from reward_model import (
    Args,
    collate_pairs,
    pair_statistics,
    preference_loss,
    score_pairs,
)

F64 = torch.float64
NAN = math.nan
HERE = ["qwen2", "llama", "gpt2", "gpt_neox"]
# the norms of the others compute in float32 in a float64 model, too
EXACT = {"gpt_neox": 1e-10, "gpt2": 1e-10}


# ---- equations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("centre", [0.0, 0.01, 0.5])
def test_preference_loss_by_hand(centre):
    """Value and gradient, with margins of either sign, and where exp overflows."""
    cases = [
        (1, -0.5, 0),
        (-2, 3, 0),
        (0.3, 0.3, 0),
        (1, 0.2, 2.5),
        (0, 1, -0.7),
        (900, -900, 0),
        (-900, 800, 1),
    ]
    chosen, rejected, margins = double(*zip(*cases))
    chosen.requires_grad_(), rejected.requires_grad_()
    losses = preference_loss(chosen, rejected, margins, centre)
    gradients = torch.autograd.grad(losses.sum(), (chosen, rejected))
    for i, (c, r, m) in enumerate(cases):
        x = c - r - m
        value = max(-x, 0) + math.log1p(math.exp(-abs(x))) + centre * (c + r) ** 2
        # 1 - sigmoid(x)
        doubt = math.exp(-max(x, 0)) / (math.exp(-max(x, 0)) + math.exp(min(x, 0)))
        assert losses[i].item() == pytest.approx(value, rel=1e-12)
        assert gradients[0][i].item() == pytest.approx(
            -doubt + 2 * centre * (c + r), rel=1e-12, abs=1e-12
        )
        assert gradients[1][i].item() == pytest.approx(
            doubt + 2 * centre * (c + r), rel=1e-12, abs=1e-12
        )


def test_pair_statistics():
    """A tie is not right, subsets are told apart, a pair may be in none, the standard deviation is
    unbiased.
    """
    rows = [(1.0, 0.0), (2.0, 2.0), (-1.0, 3.0), (5.0, -2.0)]
    found = pair_statistics(double(*rows), ["b", "b", None, "a"])
    scores = [score for row in rows for score in row]
    assert found == pytest.approx(
        {
            "pair_accuracy": 2 / 4,
            "pair_accuracy/a": 1.0,
            "pair_accuracy/b": 1 / 2,
            "margin": (1 + 0 - 4 + 7) / 4,
            "score_mean": statistics.fmean(scores),
            "score_std": statistics.stdev(scores),
            "score_chosen": 7 / 4,
            "score_rejected": 3 / 4,
        }
    )


# ---- scores --------------------------------------------------------------------------------------


def random_pairs() -> list[dict]:
    """Pairs of many lengths; ids 0 (what `collate_pairs` pads with) and 1 (end) stand anywhere, also at
    the very end.
    """
    numbers = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(32, (n,), generator=numbers).tolist()
    shapes = [
        (3, 9, [1]),
        (1, 4, [0]),
        (12, 2, [1, 1]),
        (5, 5, [0, 0]),
        (20, 1, []),
        (2, 3, [1, 0, 1]),
    ]
    return [{"chosen": draw(a) + end, "rejected": draw(b) + end} for a, b, end in shapes]


@pytest.mark.parametrize("family", HERE)
def test_scores_by_a_plain_forward_of_each_side_alone(model_folder, family):
    """The head times the last hidden state, number by number, in any cut and with padding that
    neighbours force.
    """
    scalar, is_new = models.load_scalar_model("--model", model_folder(family), F64, CPU)
    assert is_new
    scalar.model.score.weight.data = torch.randn(
        1, 16, generator=torch.Generator().manual_seed(5)
    ).double()
    pairs = random_pairs()
    interrupt = mock.Mock(agreed=lambda: False)
    weight = scalar.model.score.weight[0].tolist()
    expected = []
    for pair in pairs:
        hidden = [
            scalar.model.base_model(torch.tensor([pair[side]]))[0][0, -1]
            for side in ("chosen", "rejected")
        ]
        expected.append(
            [math.fsum(w * h for w, h in zip(weight, state.tolist())) for state in hidden]
        )
    for budget in (1, 60, 10_000):
        for cut in reward_model.cut_pairs(pairs, budget, WORLD):
            assert len(cut) == 1 or collate_pairs([pairs[i] for i in cut], CPU)[0].numel() <= budget
        got = score_pairs(scalar, pairs, budget, interrupt, WORLD)
        torch.testing.assert_close(got, double(*expected), rtol=0, atol=EXACT.get(family, 1e-5))
    assert got.dtype == F64 and not got.requires_grad


def test_a_new_head_has_the_papers_standard_deviation(model_folder, tokenizer):
    """1 / sqrt(hidden + 1), another one for each seed; transformers' own would be 0.02."""
    wide = model_folder("llama", hidden_size=1024, num_hidden_layers=1)
    heads = []
    for seed in (1, 1, 2, 3):
        args = Args(model=wide, seed=seed)
        heads.append(
            reward_model.load_scorer(
                args, tokenizer, [1], None, F64, CPU
            ).model.score.weight.detach()
        )
    numbers = torch.cat(heads[1:]).flatten().tolist()
    assert torch.equal(heads[0], heads[1]) and len(set(numbers)) > 3000
    assert statistics.stdev(numbers) == pytest.approx(1025**-0.5, rel=0.05)
    assert abs(statistics.fmean(numbers)) < 4 * 1025**-0.5 / len(numbers) ** 0.5


# ---- formats of pairs ----------------------------------------------------------------------------

ROWS = helpers.table("rows.yaml")
TEXTS = ROWS["turns"]["texts"]
BAD = ROWS["no_pairs"]
BAD["margin over all floats"] = {"prompt": "2+2=", **TEXTS, "margin": 10**400}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = make_tokenizer(bos_token="<s>")
PUTS_BOS = make_tokenizer(True, bos_token="<s>")
CHAT = make_tokenizer(True, bos_token="<s>", chat_template=TEMPLATE)


@pytest.fixture
def load(tmp_path):
    """A function (rows, tokenizer, stop ids, **flags) -> pairs, as the script reads them from a
    file.
    """

    def load(rows, tokenizer=PLAIN, stop_ids=(1,), **flags):
        path = write_rows(tmp_path / "p.jsonl", rows)
        return list(load_pairs("--dataset", path, "x", tokenizer, stop_ids, Args(**flags)))

    return load


@pytest.mark.parametrize(
    "tokenizer, system_prompt",
    [(PLAIN, ""), (PUTS_BOS, "Be brief."), (CHAT, ""), (CHAT, "Be brief.")],
)
@pytest.mark.parametrize("name", ROWS["pairs"])
def test_formats(load, tmp_path, tokenizer, name, system_prompt):
    """Each side: the prompt as a rollout of the policy has it, the response, the end; the beginning
    not doubled.
    """
    row, *prompts = ROWS["pairs"][name]
    if tokenizer.chat_template is None and any(
        isinstance(prompt, list) and prompt[1:] for prompt in prompts
    ):
        with pytest.raises(utils.UserError):
            load([row], tokenizer)
        return
    expected = {
        "margin": 0.0,
        "subset": None,
        "prompt": "",
        "chosen_text": "4",
        "rejected_text": "5",
    }
    for side, text, prompt in zip(("chosen", "rejected"), "45", prompts):
        query = tokenizer.encode("")  # the beginning, if it puts one there
        if prompt is not None:
            file = write_rows(tmp_path / "rollout.jsonl", [{"prompt": prompt}])
            seen = grpo.Args(system_prompt=system_prompt, max_prompt_length=999, reward=("format",))
            [([rollout], _)] = data.load_prompts(
                "--dataset", file, "x", tokenizer, seen, lambda *_: ""
            )
            expected["prompt"] = rollout["prompt"]
            query = rollout["query"]
        expected[side] = [*query, *tokenizer.encode(text, add_special_tokens=False), 1]
        assert expected[side].count(tokenizer.bos_token_id) == int(tokenizer is not PLAIN)
    (pair,) = load([row], tokenizer, system_prompt=system_prompt)
    assert {name: pair[name] for name in expected} == expected


def test_stop_token_stands_once_at_the_end(load, capsys):
    row = {"prompt": "2+2=", "chosen": "4<eos>", "rejected": "5"}
    ids = PLAIN.encode("2+2=")
    four, five, dot = (PLAIN.encode(text)[0] for text in "45.")
    (pair,) = load([row])
    assert "p.jsonl: chosen_text: '4<eos>'\n" in capsys.readouterr().out
    assert (pair["chosen"], pair["rejected"]) == ([*ids, four, 1], [*ids, five, 1])
    (pair,) = load([row], stop_ids=[1, 0])  # the first, where there are several
    assert pair["rejected"] == [*ids, five, 1]
    (pair,) = load([{**row, "chosen": "4."}], stop_ids=[dot])
    assert (pair["chosen"], pair["rejected"]) == ([*ids, four, dot], [*ids, five, dot])


def test_pairs_without_a_known_prompt_are_warned_of(load, capsys):
    load([{"input": "2+2=", **TEXTS}])
    assert "none of prompt, question" in capsys.readouterr().err


def test_margin_and_subset(load):
    more = [
        {"margin": 0.5, "subset": "a"},
        {"margin": -2, "subset": 7},
        {"margin": None, "subset": None},
        {"margin": "", "subset": None},
        {"margin": "0.5"},
        {},
    ]
    pairs = load([{"prompt": "2+2=", **TEXTS, **columns} for columns in more])
    assert [(pair["margin"], pair["subset"]) for pair in pairs] == [
        (0.5, "a"),
        (-2, "7"),
        (0, None),
        (0, None),
        (0.5, None),
        (0, None),
    ]


def test_pairs_that_are_too_long_are_left_out_and_counted(load, tmp_path, capsys):
    rows = [
        {"prompt": "1+1=", "chosen": "2" * n, "rejected": "3" * m}
        for n, m in ((3, 5), (6, 1), (1, 9), (5, 1))
    ]
    # 4 + 5 + the end fit
    assert [pair["chosen_text"] for pair in load(rows, max_length=10)] == ["222", "22222"]
    report = "left out 2 of 4 rows, which have more tokens than --max_length 10"
    assert capsys.readouterr().err == f"warning: --dataset {tmp_path}/p.jsonl: {report}\n"
    with pytest.raises(utils.UserError, match="left out 4 of 4 rows"):
        load(rows, max_length=5)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_ends_the_run_with_one_line(load, tmp_path, capsys, name):
    with pytest.raises(SystemExit) as end, report_errors():
        load([ROWS["pairs"]["text after messages"][0], BAD[name]], CHAT)
    line = capsys.readouterr().err
    assert end.value.code == 2
    assert (
        line.startswith(f"error: --dataset {tmp_path}/p.jsonl row 2") and line.count("\n") == 1
    ), line


# ---- what is evaluated ---------------------------------------------------------------------------


def distinct(count: int, start: int = 0) -> list[dict]:
    """Pairs that all differ, of many lengths, some with margin and subset."""
    return [
        {
            "prompt": f"{i}+{i}=",
            "chosen": str(2 * i) * (1 + i % 4),
            "rejected": str(2 * i + 1) * (1 + i % 3),
            "margin": i % 2 / 2,
            "subset": ("odd", None, "even")[i % 3],
        }
        for i in range(start, start + count)
    ]


def split(
    tmp_path, rows: list, held_out: list | None = None, **flags
) -> tuple[list[str], list[str]]:
    """Prompts trained on, and evaluated on."""
    flags = dict(dataset=write_rows(tmp_path / "train.jsonl", rows), batch_size=1) | flags
    flags["model"] = str(helpers.ROOT / "assets/tiny")
    if held_out is not None:
        flags["eval_dataset"] = write_rows(tmp_path / "eval.jsonl", held_out)
    pairs = load_train_and_eval_pairs(Args(**flags), PLAIN, [1])
    return tuple([pair["prompt"] for pair in part] for part in pairs)


def test_what_is_evaluated_is_never_trained_on(tmp_path, capsys):
    """A tenth of a single file; or the rows of --eval_dataset, also where --dataset has them the
    other way round.
    """
    rows = distinct(40)
    everything = [row["prompt"] for row in rows]
    train, held_out = split(tmp_path, rows + rows[:20])
    assert set(train).isdisjoint(held_out) and {*train, *held_out} == set(everything)
    assert len(held_out) == 6 and held_out != everything[:6]  # of 60; taken at random
    assert split(tmp_path, rows)[1] != split(tmp_path, rows, seed=2)[1]
    assert (
        len(split(tmp_path, rows, eval_pairs=3)[1]) == 3
        and len(split(tmp_path, rows, eval_pairs=0)[1]) == 4
    )
    assert split(tmp_path, rows, eval_every=0) == (everything, [])
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:5]]
    assert split(tmp_path, rows, swapped) == (everything[5:], everything[:5])
    # a prompt that is evaluated on is enough
    others = [{**row, "chosen": "another response"} for row in rows[:5]]
    assert split(tmp_path, rows, others) == (everything[5:], everything[:5])
    assert "left out 5 of 40 rows, whose prompts are evaluated on" in capsys.readouterr().err
    assert split(tmp_path, rows, rows[:5], eval_pairs=2) == (everything[2:], everything[:2])


def test_arithmetic_pairs():
    """The chosen side is right; the other is not, in as many of the three columns as `subset`
    says.
    """
    for row in arithmetic_pairs("", "test", 1000):
        right, wrong = (row[side].split(" ") for side in ("chosen", "rejected"))
        assert int(right[4]) == sum(map(int, row["prompt"][:-1].split("+"))) and len(wrong) == 5
        assert (
            row["subset"] == f"{sum(a != b for a, b in zip(right[:3], wrong))} wrong" != "0 wrong"
        )


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    """Four steps of three pairs over ten, so that a pass ends in the middle of a batch."""
    folder = tmp_path_factory.mktemp("reward_model")
    return {
        "model": helpers.tiny_model(
            folder / "model", "gpt_neox", hidden_dropout=0.1, attention_dropout=0.1
        ),
        "dataset": write_rows(folder / "train.jsonl", distinct(10)),
        "eval_dataset": write_rows(folder / "eval.jsonl", distinct(5, 100)),
        "output_dir": str(folder / "runs"),
        "max_length": 40,
        "batch_size": 3,
        "passes": 1,
        "learning_rate": 3e-3,
        "centre_coef": 0.05,
        "eval_every": 2,
        "save_every": 0,
        "lr_schedule": "linear",
    }


@pytest.fixture(scope="module")
def straight(base) -> dict:
    """Two passes, six steps, in one go."""
    values = {**base, "run_name": "straight", "passes": 2}
    run_here(values, "reward_model")
    return values


def test_a_step_by_plain_loops(base, straight):
    """Loss and gradient norm of the first batch, side by side through transformers' own forward
    pass.
    """
    start = str(folder_of(straight) / "final")  # a reward model: its head is known, and stays
    values = {
        **base,
        "run_name": "step",
        "model": start,
        "precision": "float64",
        "batch_size": 5,
        "micro_batch_tokens": 40,
        "eval_every": 0,
    }
    run_here(values, "reward_model")
    model = AutoModelForSequenceClassification.from_pretrained(start, dtype=F64)
    tokenizer = load_tokenizer(start)
    batch = [row for row in read_lines(folder_of(values) / "samples.jsonl") if row["step"] == 1]
    margins = {row["prompt"]: row["margin"] for row in distinct(10)}
    losses = []
    for row in batch:
        texts = (row["prompt"] + row[side] for side in ("chosen_text", "rejected_text"))
        ids = [torch.tensor([[*tokenizer.encode(text), tokenizer.eos_token_id]]) for text in texts]
        chosen, rejected = (model(x).logits[0, 0] for x in ids)
        assert (row["chosen_score"], row["rejected_score"]) == pytest.approx(
            (chosen.item(), rejected.item()), rel=1e-9
        )
        x = chosen - rejected - margins[row["prompt"]]
        losses.append(torch.log1p(torch.exp(-x)) + values["centre_coef"] * (chosen + rejected) ** 2)
    loss = sum(losses) / 5
    loss.backward()
    norm = math.sqrt(math.fsum(p.grad.square().sum().item() for p in model.parameters()))
    found = metrics_of(values)[0]
    assert len(batch) == 5 and len({margins[row["prompt"]] for row in batch}) == 2
    assert found["train/loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert found["loss/grad_norm"] == pytest.approx(norm, rel=1e-9)


def test_scores_of_a_run(straight):
    """A model that transformers loads, which scores what was held out as the run says it does."""
    folder = folder_of(straight)
    rows = metrics_of(straight)
    assert {"eval/pair_accuracy/odd", "eval/pair_accuracy/even"} <= rows[0].keys()
    assert len({row["train/loss"] for row in rows[1:]}) == 6
    samples = read_lines(folder / "samples.jsonl")
    assert len({row["prompt"] for row in samples[:9]}) == 9  # a pass has each pair once
    for i, row in enumerate(rows[1:]):
        chosen = [sample["chosen_score"] for sample in samples[3 * i : 3 * i + 3]]
        assert row["train/score_chosen"] == pytest.approx(statistics.fmean(chosen))
    final = AutoModelForSequenceClassification.from_pretrained(folder / "final")
    tokenizer = load_tokenizer(str(folder / "final"))
    assert final.config.num_labels == 1 and final.config.pad_token_id == tokenizer.pad_token_id
    texts = [
        row["prompt"] + row[side] for side in ("chosen", "rejected") for row in distinct(5, 100)
    ]
    ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    scores = [final(torch.tensor([row])).logits.item() for row in ids]
    last = rows[-1]
    assert last["eval/score_mean"] == pytest.approx(statistics.fmean(scores), rel=1e-4, abs=1e-5)
    assert last["eval/score_std"] == pytest.approx(statistics.stdev(scores), rel=1e-4)
    assert last["eval/pair_accuracy"] == sum(c > r for c, r in zip(scores[:5], scores[5:])) / 5
    assert (final.config.score_mean, final.config.score_std) == (
        last["eval/score_mean"],
        last["eval/score_std"],
    )


def test_a_pad_token_that_ends_responses_and_another_models_statistics(straight, tmp_path):
    """transformers would take the stop token for padding; and the statistics of --model are not
    those of its heir.
    """
    first = shutil.copytree(folder_of(straight) / "final", tmp_path / "first")
    configured = json.loads((first / "tokenizer_config.json").read_text()) | {"pad_token": "<eos>"}
    (first / "tokenizer_config.json").write_text(json.dumps(configured))
    values = {**straight, "model": str(first), "output_dir": str(tmp_path), "eval_every": 0}
    run_here({**values, "save_every": 2, "keep_checkpoints": 0}, "reward_model")
    final, saved = (folder_of(values) / name for name in ("final", "checkpoints/step_2"))
    assert "score_mean" in json.loads((first / "config.json").read_text())
    assert "score_mean" not in json.loads((saved / "config.json").read_text())
    model = AutoModelForSequenceClassification.from_pretrained(final)
    tokenizer = load_tokenizer(str(final))
    ids = torch.tensor([[*tokenizer.encode("1+1=2"), tokenizer.eos_token_id]])
    assert model.config.pad_token_id is None and hasattr(model.config, "score_mean")
    own = models.ScalarModel(model)(ids, torch.arange(ids.shape[1])[None] == ids.shape[1] - 1)
    torch.testing.assert_close(model(ids).logits[0], own)
