"""Ranks that share sequences compute what one rank does: whole runs of all scripts on 2 and 4 CPU processes, with whole
models and sharded ones; and what cannot be shared is refused."""

from types import SimpleNamespace

import helpers
import pytest
import torch
from helpers import run, run_ranks
from test_shard import CPU, SCRIPTS, base, compare, whole  # noqa: F401

import utils
from plumbing.models import loading as models
from plumbing.models import sequence_parallel

CUTS = [  # ranks, of a sequence-parallel group, sharding, tokens of a micro-batch on a rank, gradient checkpointing
    (2, 2, "none", 40, True),
    (4, 2, "fsdp", 20, False),
]


def shared(values: dict, ranks: int, script: str, codes: tuple = ()) -> list[helpers.Running]:
    return run_ranks(values, ranks, codes or (0,) * ranks, script=script)


@pytest.mark.parametrize("ranks, group, shard, budget, recompute", CUTS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_sharing_changes_nothing(base, whole, tmp_path, script, ranks, group, shard, budget, recompute):  # noqa: F811
    values = {**base[script], "output_dir": str(tmp_path), "run_name": f"{script} {ranks} {group} {shard}"}
    values |= {"micro_batch_tokens": budget, "gradient_checkpointing": recompute, "shard": shard}
    shared({**values, "sequence_parallel": group}, ranks, script)
    compare(values, whole[script])


def test_fewer_keys_than_ranks_and_an_adapter(base, tmp_path):  # noqa: F811
    """All four ranks in one group, four heads with two keys, LoRA. (Its norms and rotations compute in float32.)"""
    model = helpers.tiny_model(tmp_path / "qwen2", num_attention_heads=4, num_key_value_heads=2)
    common = {**base["grpo"], "model": model, "output_dir": str(tmp_path), "lora_rank": 4, "ref_refresh_every": 0}
    alone, four = ({**common, "run_name": name} for name in ("alone", "four"))
    run(alone)
    shared({**four, "sequence_parallel": 4, "micro_batch_tokens": 10}, 4, "grpo")
    worst, where = helpers.largest_difference(four, alone, ("final",))
    assert worst < 1e-4, where


def test_each_rank_has_its_part():
    """Of a sequence only a slice goes through the model, and of a micro-batch's tokens a rank counts its own."""

    class Group:  # of three ranks
        size, rank = lambda self: 3, lambda self: 2

    group, model = Group(), torch.nn.Module()
    world = utils.World(1, 2, CPU, sequence_parallel_group=group)
    assert utils.micro_batches([7, 6, 5, 4], 5, world) == [[1, 3]]  # 2 x 7 of the first group, of which a rank has 5
    assert utils.micro_batches([7, 6, 5, 4], 4, world) == [[1], [3]]
    ids = torch.arange(14).view(2, 7)
    assert models.local_positions(model, ids)[0] is ids
    model.sequence_parallel, seen = sequence_parallel.SequenceParallel(group), []
    model.base_model = lambda **inputs: seen.append(inputs) or SimpleNamespace(last_hidden_state=inputs["input_ids"])
    (local,) = models.local_positions(model, ids)
    assert local.tolist() == [[6, 0, 0], [13, 0, 0]]
    assert models.last_hidden_states(model, local, local > 0)[0].tolist() == [6, 13]
    assert seen[0]["position_ids"].tolist() == [[6, 7, 8]] and seen[0]["sequence_parallel_group"] is group


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("mistral", {"sliding_window": 8}),
        ("gemma2", {}),  # a window in every other layer
        ("bloom", {}),  # has an attention of its own
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("qwen2", {"num_attention_heads": 3, "hidden_size": 24}),
        ("qwen2_moe", {"output_router_logits": True}),  # needs whole sequences
    ],
)
def test_models_that_cannot(tmp_path, capsys, kind, changes):
    model = models.load_model("--model", helpers.tiny_model(tmp_path, kind, **changes), torch.float32, CPU)
    with pytest.raises(SystemExit):
        sequence_parallel.enable_sequence_parallel(model, SimpleNamespace(size=lambda: 2))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --sequence_parallel 2: ") and not hasattr(model, "sequence_parallel")


def test_ranks_that_make_no_groups(base, tmp_path):  # noqa: F811
    values = {**base["reward_model"], "output_dir": str(tmp_path), "run_name": "groups", "sequence_parallel": 2}
    assert "--sequence_parallel 2" in run(values, 2, script="reward_model").errors[0]
    assert "has to be above 0, not 0" in run({**values, "sequence_parallel": 0}, 2, script="reward_model").err
    (line,) = run({**values, "attention": "eager"}, 2, script="reward_model").errors
    assert "--sequence_parallel 2: takes --attention sdpa" in line
