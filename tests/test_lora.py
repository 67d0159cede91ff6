"""LoRA: the reference is the model without its adapter, and what is saved computes the same merged
and as an adapter. (What ranks and shards do to it: test_invariance.py; the rollout engine's
weights: test_vllm.py.)
"""

import dataclasses
import importlib.util
import json
import os
import shutil

import helpers
import pytest
import torch
from helpers import folder_of, metrics_of, run_here, tensors_of, variant, weights_of
from tiny_models import CPU, WORLD
from transformers import AutoModelForCausalLM

import grpo
import utils
from extras.lora import add_lora
from plumbing.models import loading, sharding
from plumbing.models.sharding import Sharding
from plumbing.models.tokenizer import load_tokenizer
from plumbing.run.command import parse

BITSANDBYTES = "pip install bitsandbytes==0.50.2"  # 60 MB, so no requirement of the tests
IDS = torch.tensor([[5, 9, 13, 21, 22, 25]])


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("lora")
    values = helpers.workspace(folder)
    values["model"] = helpers.tiny_model(folder / "neox", "gpt_neox")
    exact = {"precision": "float64", "lora_rank": 3, "learning_rate": 1e-2, "kl_coef": 0.05}
    return {**values, **exact, "total_episodes": 24, "save_every": 3}


def logits_of(path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)(IDS).logits


def changed_folder(source: str, folder, dtype: torch.dtype) -> str:
    """A model in another format than `helpers.tiny_model` saves."""
    shutil.copytree(source, folder)
    AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank, quantize", [(0, ""), (3, ""), (3, "4bit")])
def test_final_differs_by_what_was_trained(base, tmp_path, capsys, dtype, rank, quantize):
    """In the format of the model's files, where the run computes in another one: untrained weights
    are those of the files bit for bit, and a sum is rounded once. The line says how much that loses.
    """
    if quantize:
        pytest.importorskip("bitsandbytes", reason=BITSANDBYTES)
    model = changed_folder(base["model"], tmp_path / "model", dtype)
    flags = {"precision": "bf16", "lora_rank": rank, "learning_rate": 1e-4, "total_episodes": 8}
    flags["quantize"] = quantize
    values = variant(base, tmp_path, model=model, **flags, save_every=1)
    run_here(values)
    final = folder_of(values) / "final"
    start, saved = weights_of(model), weights_of(final)
    assert json.loads((final / "config.json").read_text())["dtype"] == str(dtype)[6:]
    assert {x.dtype for x in saved.values()} == {dtype}
    if not rank:
        trained = weights_of(folder_of(values) / "checkpoints/step_1")
        assert all(torch.equal(saved[name], x.to(dtype)) for name, x in trained.items())
        return
    adapter = tensors_of(final / "adapter")
    assert {x.dtype for x in adapter.values()} == {torch.float32}
    lost = change = 0
    for name, tensor in start.items():
        keys = [key for key in adapter if f".{name.removesuffix('.weight')}.lora_" in key]
        if not keys:
            assert torch.equal(saved[name], tensor), name
            continue
        down, up = (adapter[key] for key in sorted(keys))
        exact = tensor.double() + 2 * (up @ down)
        assert torch.equal(saved[name], exact.to(dtype)), name
        lost += (saved[name] - exact).square().sum()
        change += (2 * (up @ down).double()).square().sum()
    assert change and len(start) > len(adapter) // 2
    share = (lost / change).sqrt().item()
    assert (share > 0.3) == (dtype == torch.bfloat16)
    assert f"rounding loses {share:.2g} of it" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_what_is_saved_is_what_was_trained(base, tmp_path, script, monkeypatch):
    """final/ is a plain model, final/adapter and the checkpoints are peft's folders, which find
    their base from elsewhere and are loaded as a model; the base's weights stay. PPO's critic
    learns by its adapters and its head.
    """
    of_ppo = {"critic_learning_rate": 1e-2} if script == "ppo" else {}
    values = variant(base, tmp_path, model=os.path.relpath(base["model"]), **of_ppo)
    run_here(values, script)
    monkeypatch.chdir(tmp_path)
    final = folder_of(values) / "final"
    plain, adapted, saved = (
        logits_of(p) for p in (final, final / "adapter", folder_of(values) / "checkpoints/step_3")
    )
    # final/ is float32, as the model it came from
    torch.testing.assert_close(plain, adapted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(saved, adapted, rtol=1e-5, atol=1e-5)
    assert load_tokenizer(str(final / "adapter")).get_vocab()
    loaded = loading.load_model(
        "--model", str(folder_of(values) / "checkpoints/step_3"), torch.float64, CPU
    )
    assert not getattr(loaded, "peft_config", None)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, saved)
    assert (plain - logits_of(base["model"])).abs().max() > 1e-2
    assert weights_of(final).keys() == weights_of(base["model"]).keys()
    assert all(".lora_" in name for name in tensors_of(final / "adapter"))
    rows = metrics_of(values)
    assert rows[1]["objective/kl"] == 0 and rows[-1]["objective/kl"] != 0
    if script == "ppo":
        assert rows[-1]["loss/value_avg"] < rows[1]["loss/value_avg"]
        critic = tensors_of(folder_of(values) / "checkpoints/step_3/critic")
        assert critic and all(".lora_" in name for name in critic)
        assert all(x.any() for name, x in critic.items() if ".lora_B." in name)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_first_kl_is_zero_in_bf16(base, tmp_path, rank):
    """Policy and reference have one format: float32, or with adapters that of matrix products."""
    values = variant(
        base,
        tmp_path,
        precision="bf16",
        lora_rank=rank,
        ref_refresh_every=0,
        gradient_checkpointing=True,
    )
    run_here(values)
    rows = metrics_of(values)
    assert rows[1]["objective/kl"] == 0 and rows[-1]["objective/kl"] != 0
    policy = load(grpo.Args(model=values["model"], lora_rank=rank), "bf16")
    computed = []
    policy.model.base_model.layers[0].mlp.register_forward_hook(
        lambda *x: computed.append(x[2].dtype)
    )
    policy(torch.ones(1, 3, dtype=torch.long), torch.tensor([[False, True, True]]))
    assert computed == [torch.bfloat16]
    dtypes = {(x.dtype, x.requires_grad) for x in policy.parameters()}
    assert dtypes == (
        {(torch.bfloat16, False), (torch.float32, True)} if rank else {(torch.float32, True)}
    )


def load(args, precision="float32") -> grpo.Policy:
    formats = loading.precision(precision, CPU)
    sharding = Sharding(args, WORLD, formats)
    return loading.load_policy(
        args, lambda model: grpo.Policy(model, args), None, formats, sharding
    )[0]


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_weights_of_4_bits(base, precision):
    """A policy computes what it does with the dequantized weights, and so does its gradient, also
    after it has sampled. The numbers are NF4's: 16 in each block of 64.
    """
    pytest.importorskip("bitsandbytes", reason=BITSANDBYTES)
    plain = grpo.Args(model=base["model"], lora_rank=3, precision=precision)
    policies = [load(dataclasses.replace(plain, quantize=x), precision) for x in ("4bit", "")]
    ids = torch.arange(5, 29).reshape(2, 12)
    mask = (ids != ids[:, :1]) & torch.ones_like(ids, dtype=torch.bool)
    state, other = (policy.model.state_dict() for policy in policies)
    with torch.no_grad():
        for name in other:
            if ".lora_B." in name:
                state[name].normal_(std=0.1, generator=torch.Generator().manual_seed(0))
            if ".lora_" in name:
                other[name].copy_(state[name])
        weights = zip(*(sharding.base_weights(policy.model) for policy in policies), strict=True)
        for (name, small, layer), (_, tensor, _) in weights:
            whole = sharding.merged(small, layer, False)
            assert torch.equal(whole, tensor) == (layer is None)
            assert layer is None or max(len(x.unique()) for x in whole.view(-1, 64)) <= 16, name
            tensor.copy_(whole)
    gradients = []
    for policy in policies:
        with torch.no_grad():
            policy(ids, mask)
        logprobs = policy(ids, mask)["logprobs"]
        logprobs.sum().backward()
        gradients.append([logprobs, *(x.grad for x in policy.parameters() if x.requires_grad)])
    assert any(x.any() for x in gradients[0])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    assert sum(x.dtype == torch.uint8 for x in policies[0].parameters()) == 8
    assert policies[0].model.num_parameters() == policies[1].model.num_parameters()


def test_what_quantization_requires(base, capsys, monkeypatch, tmp_path):
    flags = "--lora_rank 2 --quantize 4bit".split()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = helpers.refused(capsys, parse, grpo.Args, flags)
    assert "--quantize requires bitsandbytes: pip install bitsandbytes==0.50.2" in line
    with pytest.raises(utils.UserError, match="--quantize 4bit: requires --shard none"):
        load(grpo.Args(model=base["model"], lora_rank=2, quantize="4bit", shard="fsdp"))


@pytest.mark.parametrize("quantize", ["", "4bit"])
def test_resume_is_exact(base, tmp_path, capsys, quantize):
    """Metrics, and in the last checkpoint the adapter and the critic's."""
    if quantize:
        pytest.importorskip("bitsandbytes", reason=BITSANDBYTES)
        base = {**base, "precision": "float32", "quantize": quantize}
    straight = variant(base, tmp_path / "straight", save_every=2, keep_checkpoints=0)
    run_here(straight, "ppo")
    stopped = variant(
        straight, shutil.copytree(tmp_path / "straight", tmp_path / "stopped"), resume=True
    )
    for what in ("final", "checkpoints/step_3"):
        shutil.rmtree(folder_of(stopped) / what)
    run_here(stopped, "ppo")
    assert "goes on after step 2" in capsys.readouterr().out
    assert helpers.largest_difference(stopped, straight)[0] == 0


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_merged_weights(tmp_path, kind):
    """Linear layers and GPT-2's transposed ones; a model without adapters comes through as it
    is.
    """
    model = AutoModelForCausalLM.from_pretrained(
        helpers.tiny_model(tmp_path / "model", kind), dtype=torch.float64
    )
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert all(
        torch.equal(sharding.merged(t, layer), plain[name])
        for name, t, layer in sharding.base_weights(model)
    )
    add_lora(model, grpo.Args(lora_rank=2))
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    with torch.no_grad():
        # a new adapter changes nothing
        torch.testing.assert_close(model(IDS).logits, other(IDS).logits)
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (".lora_" in name)
            if ".lora_B." in name:
                parameter.normal_()
        state = {
            name: sharding.merged(tensor, layer)
            for name, tensor, layer in sharding.base_weights(model)
        }
        assert (
            state.keys() == plain.keys()
            and (model(IDS).logits - other(IDS).logits).abs().max() > 0.1
        )
        other.load_state_dict(state)
        torch.testing.assert_close(model(IDS).logits, other(IDS).logits)


def test_reward_model(base, tmp_path):
    """Adapters and the head train, and final/ is a plain reward model. (Shards:
    test_invariance.py.)
    """
    pairs = [
        {"prompt": x["prompt"], "chosen": x["answer"], "rejected": f"{x['answer']}?"}
        for x in helpers.ROWS * 2
    ]
    values = dict(
        model=base["model"],
        output_dir=str(tmp_path),
        dataset=helpers.write_rows(tmp_path / "pairs.jsonl", pairs),
        precision="float64",
        lora_rank=3,
        max_length=64,
        batch_size=8,
        eval_every=0,
        learning_rate=1e-2,
        run_name="one",
    )
    run_here(values, "reward_model")
    start = weights_of(base["model"])
    final = weights_of(folder_of(values) / "final")
    moved = [name for name in start if name in final and not torch.equal(start[name], final[name])]
    assert "score.weight" in final and moved and all(name.endswith("weight") for name in moved)
    scalar, new_head = loading.load_scalar_model(
        "", str(folder_of(values) / "final"), torch.float32, CPU
    )
    assert not new_head
