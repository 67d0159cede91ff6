"""Models that need more than the usual: capped attention scores, mixtures of experts."""

import helpers
import pytest
import torch
from tiny_models import CPU, KV, SMALL
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import grpo
from plumbing.models import loading as models
from plumbing.models import sharding
from plumbing.rollout.batch import collate, pad_rows

IDS = torch.arange(2, 22)[None]


def saved(folder, kind: str, **changes) -> str:
    """A random model with large weights, in a folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **KV, **changes}))
    for parameter in model.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return str(folder)


# ---- Gemma 2's soft cap ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemma2", "vaultgemma"])
@torch.no_grad()
def test_capped_attention_scores(tmp_path, capsys, kind):
    """transformers' sdpa leaves the cap out without a word."""
    cap = dict(head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=0.5)
    folder = saved(tmp_path, kind, **cap)
    eager, sdpa = (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=x)(IDS).logits for x in ("eager", "sdpa")
    )
    ours = models.load_model("--model", folder, torch.float32, CPU)
    assert torch.equal(ours(IDS).logits, eager) and (eager - sdpa).abs().max() > 0.01
    on_meta = models.load_model("--model", folder, torch.float32, torch.device("meta"))  # as on the other ranks
    assert on_meta.config._attn_implementation == "eager"
    for call, words in (
        (lambda: sharding.set_attention(ours, "sdpa"), "error: --attention sdpa: "),
        (lambda: models.load_model("--model", folder, torch.float64, CPU), "error: --precision float64: "),
    ):
        with pytest.raises(SystemExit):
            call()
        assert capsys.readouterr().err.startswith(words)


def test_without_a_cap_attention_is_sdpa(load):
    assert load("gemma2", attn_logit_softcapping=None).config._attn_implementation == "sdpa"


# ---- vocabularies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])  # meta: where rank 0 alone reads the weights of a sharded model
def test_the_embedding_of_the_pad_token_gets_a_gradient(model_folder, device):
    folder = model_folder("qwen2", pad_token_id=3)
    model = models.load_model("--model", folder, torch.float32, torch.device(device))
    assert model.config.pad_token_id == 3 and model.get_input_embeddings().padding_idx is None


def test_the_last_token_of_a_vocabulary(model_folder, capsys):
    """SMALL has 32."""
    models.check_vocabulary(model_folder(), [[31], [0, 30]])
    with pytest.raises(SystemExit):
        models.check_vocabulary(model_folder(), [[1], [32, 2]])
    assert "has 32 tokens, and its tokenizer writes token 32" in capsys.readouterr().err


# ---- mixtures of experts ---------------------------------------------------------------------------------------------

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
MIXTURES = {
    "qwen2_moe": dict(**EXPERTS, shared_expert_intermediate_size=8, decoder_sparse_step=1),
    "qwen3_moe": dict(**EXPERTS, head_dim=8, decoder_sparse_step=1),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
}
BALANCE = dict(output_router_logits=True, router_aux_loss_coef=0.5)


def batch_of(lengths: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(2, 32, (n,), generator=numbers).tolist()
    return collate([(draw(a), draw(b)) for a, b in lengths], CPU)


@pytest.mark.parametrize("kind", MIXTURES)
def test_balance_loss_is_that_of_transformers_for_each_row(tmp_path, kind):
    """Over the tokens that predict the response, whatever the row's neighbours; with a gradient for the routers."""
    model = models.load_model("--model", saved(tmp_path, kind, **MIXTURES[kind], **BALANCE), torch.float32, CPU)
    policy = grpo.Policy(model, 1.0, 100)
    ids, mask = batch_of([(3, 9), (1, 4), (6, 2)])
    losses = pad_rows(policy(ids, mask)["router_losses"], mask)
    for i, row in enumerate(mask):
        (places,) = row.nonzero(as_tuple=True)
        logits = model.base_model(ids[i : i + 1, : places[-1] + 1]).router_logits
        expected = 0.5 * load_balancing_loss_func(tuple(x[places - 1] for x in logits), 4, 2)
        torch.testing.assert_close(losses[i][row], expected.expand(len(places)))
    losses.sum().backward()
    routers = [p for name, p in model.named_parameters() if name.endswith(("mlp.gate.weight", "router.weight"))]
    assert len(routers) == 2 and all(p.grad.abs().sum() > 0 for p in routers)


def test_where_it_is_not_asked_for_there_is_none(tmp_path):
    model = models.load_model("--model", saved(tmp_path, "qwen2_moe", **MIXTURES["qwen2_moe"]), torch.float32, CPU)
    assert "router_losses" not in grpo.Policy(model, 1.0, 100)(*batch_of([(3, 4)]))


@pytest.mark.parametrize("script", ["grpo", "rloo", "ppo"])
def test_mixtures_of_experts_train(tmp_path, script):
    """The balance loss is part of the loss, and neither sharding nor micro-batches change a result."""
    values = {
        **helpers.workspace(tmp_path),
        "total_episodes": 16,
        "num_epochs": 1,
        "mini_batch_size": 8,
        "save_every": 0,
    }
    losses = {}
    for name, asked in (("plain", {}), ("balanced", BALANCE)):
        model = helpers.tiny_model(tmp_path / name, "qwen2_moe", **{**MIXTURES["qwen2_moe"], **asked})
        values |= {"model": model, "run_name": name}
        helpers.run_here({**values, "micro_batch_tokens": 1000}, script)
        losses[name] = helpers.metrics_of(values)[1]["objective/loss"]
    assert 0.5 < losses["balanced"] - losses["plain"] < 2  # 0.5 * 2 where the experts have equal shares
    if script == "grpo":
        whole, values["run_name"] = dict(values), "sharded"
        helpers.run_ranks({**values, "shard": "fsdp", "micro_batch_tokens": 40}, 2, (0, 0))
        worst, where = helpers.largest_difference(values, whole, ("final",))
        assert worst < 1e-3, where
