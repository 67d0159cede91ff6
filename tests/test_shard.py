"""Sharding changes memory, never a result (tests/test_invariance.py has the same numbers over all
cuts): ranks without work, runs resumed over other numbers of ranks; and the number formats of
--precision.
"""

import shutil

import helpers
import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import (
    MOVING,
    OF_PPO,
    SCHEDULE,
    flags_of,
    folder_of,
    metrics_of,
    read_lines,
    run,
    run_ranks,
    scalar_folder,
    steps_of,
    variant,
    weights_of,
)
from test_families import family_folder
from test_scripts import write_pairs
from tiny_models import CPU
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
import utils
from plumbing.models import loading
from plumbing.models.sharding import Sharding, set_gradient_sync

SCRIPTS = ("grpo", "rloo", "ppo", "reward_model")


def exact_runs(folder) -> dict[str, dict]:
    """Flags of three steps of each script, with all that is sharded: policy, reference, critic,
    reward model.
    """
    common = {
        **helpers.workspace(folder),
        "total_episodes": 24,
        "eval_every": 3,
        "save_every": 3,
        "eval_prompts": 2,
    }
    common["model"] = helpers.tiny_model(folder / "neox", "gpt_neox")
    judge = scalar_folder(common["model"], folder / "judge")
    exact = dict(precision="float64", learning_rate=1e-3)
    pairs = write_pairs(folder / "pairs.jsonl", helpers.ROWS, 18)
    held_out = write_pairs(folder / "held_out_pairs.jsonl", helpers.HELD_OUT, 3)
    of_pairs = {"dataset": pairs, "eval_dataset": held_out, "batch_size": 6}
    of_teacher = {
        "teacher": helpers.tiny_model(folder / "teacher", "llama", hidden_size=48),
        "rollout_batch_size": 8,
        "passes": 24 / len(helpers.ROWS),
    }
    rewards = {"reward": (common["reward"], judge), "reward_weights": (1.0, 0.1)}
    return {
        "grpo": {**common, **exact, **rewards, **MOVING, "kl_in": "loss", "entropy_coef": 0.01},
        "rloo": {**common, **exact, **MOVING, "advantage": "remax"},
        "ppo": {**common, **exact, **rewards, **MOVING, **OF_PPO, "ptx_dataset": common["dataset"]},
        "distill": {**flags_of("distill", common), **exact, **SCHEDULE, **of_teacher},
        "reward_model": {**flags_of("reward_model", common), **exact, **SCHEDULE, **of_pairs},
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, dict]:
    return exact_runs(tmp_path_factory.mktemp("shard"))


@pytest.fixture(scope="module")
def whole(base) -> dict[str, dict]:
    """The same runs in one process, without sharding."""
    runs = {script: {**base[script], "run_name": f"{script} whole"} for script in SCRIPTS}
    for script, values in runs.items():
        run(values, script=script)
    return runs


def sharded(
    values: dict, ranks: int, script: str, codes: tuple = (), **options
) -> list[helpers.Running]:
    return run_ranks(
        {**values, "shard": "fsdp"}, ranks, codes or (0,) * ranks, script=script, **options
    )


def compare(values: dict, reference: dict, *parts: str) -> None:
    worst, where = helpers.largest_difference(values, reference, parts)
    assert worst < 1e-9, where


# ---- more ranks than work ------------------------------------------------------------------------


class NoCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "c10d" not in function.namespace
        return function(*args, **(kwargs or {}))


def watched() -> None:
    """Make a run end with an error where a decode loop waits for another rank, or a rank has all of
    the policy.
    """
    generate = grpo.generate
    wrap = Sharding.wrap

    def generate_alone(*args):
        with NoCollectives():
            return generate(*args)

    def wrap_sharded(sharding: Sharding, policy: torch.nn.Module):
        assert {x.device.type for x in policy.parameters()} == {
            "cpu" if sharding.world.main else "meta"
        }
        policy = wrap(sharding, policy)
        assert all(x.to_local().numel() < x.numel() for x in policy.parameters() if x.ndim == 2)
        return policy

    grpo.generate = generate_alone
    Sharding.wrap = wrap_sharded


FEW = dict(eval_prompts=1, eval_samples=1, rollout_batch_size=1, num_epochs=1)
FEW_OF = {  # less of everything than four ranks; in ppo a single response is all of a step
    "grpo": FEW | dict(group_size=2, mini_batch_size=2, total_episodes=6),
    "ppo": FEW | dict(group_size=1, mini_batch_size=1, total_episodes=3, ptx_batch_size=1),
    "reward_model": dict(batch_size=3, micro_batch_tokens=1),  # three are held out, too
}


@pytest.mark.parametrize(
    "script, shard", [("grpo", "fsdp"), ("ppo", "none"), ("reward_model", "none")]
)
def test_more_ranks_than_work(base, tmp_path, script, shard):
    """Ranks with no prompt to generate for, no sequence to score and no row to train on keep nobody
    waiting.
    """
    one = {**base[script], **FEW_OF[script], "output_dir": str(tmp_path), "run_name": "one"}
    four = {**one, "run_name": "four", "shard": shard}
    run(one, script=script)
    places = dict.fromkeys(range(4), watched) if shard == "fsdp" else None
    run_ranks(four, 4, (0,) * 4, places, script=script)
    compare(four, one, "checkpoints/step_3", "final")


# ---- checkpoints ---------------------------------------------------------------------------------

# Where one of two sharded ranks is told to stop: within a rollout, in ppo and for the reward model
# at its end.
STOPS = {
    "grpo": "utils.Optimizer.step>torch.searchsorted:3",
    "rloo": "rloo.generate:3",
    "ppo": "ppo.generate:3",
    "reward_model": "utils.Optimizer.step:1",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_other_numbers_of_ranks_go_on(base, whole, tmp_path, script):
    """Two sharded ranks are stopped by SIGTERM to one of them, one whole rank goes on, then two
    sharded ones again, or four of ppo, which has all that can be saved.
    """
    values = variant(base[script], tmp_path, save_every=0)
    ranks = sharded(values, 2, script, (75, 75), places={1: f"{STOPS[script]}:SIGTERM"})
    assert "Traceback" not in ranks[0].err + ranks[1].err and steps_of(values) == ["step_1"]
    saved = folder_of(values) / "checkpoints" / "step_1"
    # ppo's policy does not train yet
    assert (saved / ("critic" if script == "ppo" else ".") / "optimizer").is_dir()
    values["resume"] = True
    run(values, 75, script=script, place="utils.Optimizer.step:1:SIGTERM")
    assert steps_of(values) == ["step_1", "step_2"]
    sharded(values, 4 if script == "ppo" else 2, script)
    compare(values, whole[script], "final")
    samples = [read_lines(folder_of(each) / "samples.jsonl") for each in (values, whole[script])]
    text = "chosen_text" if script == "reward_model" else "response"
    assert [row[text] for row in samples[0]] == [row[text] for row in samples[1]]


def test_what_is_saved_loads_as_it_is(base, tmp_path):
    """Tied embeddings stay tied, and final/ has the number format of the model that the run began
    with.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        helpers.tiny_model(tmp_path / "qwen2", tie_word_embeddings=True)
    )
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "qwen2").save_pretrained(
        tmp_path / "bf16"
    )
    changes = dict(total_episodes=8, save_every=1, eval_every=0, ref_refresh_every=0)
    values = variant(base["rloo"], tmp_path, model=str(tmp_path / "bf16"), **changes)
    sharded(values, 2, "rloo")
    for name, dtype in (("checkpoints/step_1", torch.float64), ("final", torch.bfloat16)):
        weights = weights_of(folder_of(values) / name)
        assert {x.dtype for x in weights.values()} == {dtype} and "lm_head.weight" not in weights
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder_of(values) / name, output_loading_info=True
        )
        assert (
            not report["missing_keys"] and not report["unexpected_keys"] and loaded.dtype == dtype
        )


def test_files_that_rank_0_cannot_read(base, tmp_path):
    """It alone reads them; the other ranks end as it does, and not by an exception over a broken
    connection.
    """
    broken = shutil.copytree(base["rloo"]["model"], tmp_path / "broken") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:5000])
    values = variant(base["rloo"], tmp_path, ref_model=str(broken.parent))
    ranks = sharded(values, 3, "rloo", (2, 2, 2))
    assert [len(rank.err.splitlines()) for rank in ranks] == [1, 1, 1]
    assert ranks[0].errors[0].startswith(f"error: --ref_model {broken.parent}: ")
    for number in (1, 2):
        assert (
            f"rank {number} of 3, in the phase 'load': another rank has ended"
            in ranks[number].errors[0]
        )


def test_tensors_with_formats_of_their_own(base, tmp_path):
    """transformers keeps the bias of DeepSeek's router in float32, which only the rank that reads
    the files knows.
    """
    changes = dict(precision="pure_bf16", total_episodes=8, save_every=1, eval_every=0)
    values = variant(base["rloo"], tmp_path, **changes)
    values["model"] = family_folder("deepseek_v3", tmp_path / "model")
    sharded(values, 2, "rloo")
    kinds = {
        name: tensor.dtype
        for name, tensor in weights_of(folder_of(values) / "checkpoints" / "step_1").items()
    }
    assert [name for name, kind in kinds.items() if kind == torch.float32] == [
        "model.layers.1.mlp.gate.e_score_correction_bias"
    ]


# ---- number formats ------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure_bf16"])
def test_half_precision_with_and_without_sharding(base, tmp_path, precision):
    """The same first gradient but for rounding; weights are kept in the format that was asked
    for.
    """
    changes = dict(precision=precision, save_every=1, eval_every=1, batch_size=18)
    changes |= dict(model=helpers.tiny_model(tmp_path / "qwen2"), learning_rate=1e-2)
    values = variant(base["reward_model"], tmp_path, lr_schedule="constant", **changes)
    runs = [{**values, "run_name": name} for name in ("none", "fsdp")]
    run(runs[0], script="reward_model")
    (first, _) = sharded(runs[1], 2, "reward_model")
    assert ("--precision pure_bf16" in first.err) == (precision == "pure_bf16")
    (none, fsdp) = (metrics_of(each)[1] for each in runs)
    kind = {"pure_bf16": torch.bfloat16}
    assert fsdp["train/loss"] == pytest.approx(none["train/loss"], rel=2e-2)
    assert fsdp["loss/grad_norm"] == pytest.approx(none["loss/grad_norm"], rel=5e-2)
    assert none["val/skipped_updates"] == fsdp["val/skipped_updates"] == 0
    assert (
        none.get("val/loss_scale")
        == fsdp.get("val/loss_scale")
        == (2.0**16 if precision == "fp16" else None)
    )
    for each in runs:
        weights = weights_of(folder_of(each) / "checkpoints" / "step_1")
        assert {x.dtype for x in weights.values()} == {kind.get(precision, torch.float32)}
        state = torch.load(
            folder_of(each) / "checkpoints" / "step_1" / "trainer_state.pt", weights_only=True
        )
        assert state["optimizers"][""].get("loss_scale") == (
            2.0**16 if precision == "fp16" else None
        )


def test_ranks_average_gradients_once_an_update():
    is_alone = not dist.is_initialized()  # an engine of vLLM leaves its group in the process
    if is_alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = DistributedDataParallel(torch.nn.Linear(2, 1))
    averaged = []

    def average(_, bucket):
        averaged.append(last)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    module.register_comm_hook(None, average)
    for last in (False, False, True, False, True):
        set_gradient_sync(module, last)
        module(torch.ones(1, 2)).sum().backward()
    if is_alone:
        dist.destroy_process_group()
    assert averaged == [True, True]


def test_the_scale_of_the_loss():
    """Halved by a gradient that overflows, which does not count as a skipped update; doubled after
    2000 that are finite; the gradient that trains is the unscaled one; scale and counter are part
    of the state.
    """
    args = grpo.Args(precision="fp16", max_grad_norm=1e9, learning_rate=0.1)

    def updated(
        optimizer: utils.Optimizer, *gradients: list[float], times: int = 1
    ) -> utils.Optimizer:
        for gradient in gradients * times:
            optimizer.backward((optimizer.parameters[0] * torch.tensor(gradient)).sum())
            optimizer.step()
        return optimizer

    new = lambda: utils.Optimizer(torch.nn.Linear(2, 1, bias=False), args, 10_000)
    scaled = updated(new(), [3.0, 4.0], times=3)
    assert scaled.norms == [5.0] * 3 and scaled.loss_scale == 2.0**16
    before = scaled.parameters[0].detach().clone()
    updated(scaled, [torch.inf, 1.0], times=16)
    assert (
        scaled.loss_scale == 1
        and torch.equal(before, scaled.parameters[0])
        and scaled.skipped_in_a_row == 0
    )
    again = new()
    again.load_state_dict(scaled.state_dict())
    assert again.loss_scale == 1.0
    assert updated(again, [1.0, 1.0], times=2000).loss_scale == 2.0
    updated(again, [torch.nan, 1.0], times=3)  # of which the first lowers the scale
    assert again.loss_scale == 1.0 and again.skipped_in_a_row == 2
    assert again.metrics() == {
        "lr": again.lr,
        "loss/grad_norm": pytest.approx(2**0.5),
        "val/skipped_updates": 3,
        "val/loss_scale": 1.0,
    }
    third = new()
    third.load_state_dict(again.state_dict())
    assert third.skipped_in_a_row == 2 and third.lr == again.lr > 0
    assert updated(third, [1.0, 1.0]).skipped_in_a_row == 0


# ---- --shard auto --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device, ranks, on", [("cuda", 8, True), ("cuda", 1, False), ("cpu", 2, False)]
)
def test_auto(monkeypatch, capsys, device, ranks, on):
    """Sharded over several GPUs; reward models not where they score while the policy trains."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_device_mesh", lambda *args, **options: None)
    world = utils.World(0, ranks, torch.device(device, 0))
    precision = loading.precision("bf16", world.device)
    sharding = Sharding(grpo.Args(), world, precision)
    assert capsys.readouterr().out == ("sharding: fsdp over 8 ranks\n" if on else "")
    assert sharding.load_device == (CPU if on else world.device)
    assert sharding.shards_reward_models == on
    assert not Sharding(grpo.Args(async_steps=1), world, precision).shards_reward_models
