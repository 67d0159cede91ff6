"""Families of models: each trains for two steps, and is exact. With --long all of them, else a few that differ most.

python tests/test_families.py     # writes the table of all in docs/models.md
"""

import re
import tempfile
from pathlib import Path

import helpers
import pytest
import torch
import transformers
from tiny_models import CPU, make_tokenizer

import grpo
from plumbing.models import loading

SHAPE = dict(
    vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
EXPERTS = dict(
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1,
    topk_group=1, n_shared_experts=1, shared_expert_intermediate_size=16, moe_num_experts=4, moe_k=2,
)  # fmt: skip
LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    num_key_value_heads=4,
)  # fmt: skip
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
MAMBA = dict(mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1)
GPT = dict(n_embd=32, n_layer=2, n_head=4, n_positions=256)
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
IMAGES = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=8, image_size=28,
    patch_size=14, depth=1, num_heads=2, out_hidden_size=32, num_position_embeddings=4, vision_output_dim=16,
    projector_input_dim=16, projector_output_dim=16, hidden_act="gelu",
)  # fmt: skip


def reads_images(vision: dict | None = None, **text) -> dict:
    return dict(text_config={**SHAPE, **text}, vision_config={**IMAGES, **(vision or {})})


FAMILIES = {  # model_type: what its configuration has beside SHAPE
    "afmoe": EXPERTS, "apertus": {}, "arcee": {}, "bamba": dict(MAMBA, attn_layer_indices=[1]), "bitnet": {},
    "bloom": dict(n_layer=2, n_head=4), "cohere": dict(logit_scale=0.25),
    "cohere2": dict(logit_scale=0.25, sliding_window=4), "deepseek_v2": {**EXPERTS, **LATENT},
    "deepseek_v3": {**EXPERTS, **LATENT}, "deepseek_v32": {**EXPERTS, **LATENT}, "diffllama": {}, "dots1": EXPERTS,
    "ernie4_5": {}, "ernie4_5_moe": EXPERTS, "exaone4": dict(sliding_window=4),
    "falcon_h1": dict(MAMBA, mamba_d_ssm=64, lm_head_multiplier=0.5), "flex_olmo": EXPERTS, "gemma": {},
    "gemma2": dict(query_pre_attn_scalar=8, sliding_window=4, final_logit_softcapping=1.5),
    "gemma3": reads_images(sliding_window=4), "gemma3_text": dict(sliding_window=4),
    "gemma4": reads_images() | dict(audio_config=None), "gemma4_text": {}, "glm": {}, "glm4": {}, "glm4_moe": EXPERTS,
    "glm_moe_dsa": {**EXPERTS, **LATENT}, "gpt2": GPT, "gpt_neox": {}, "gpt_oss": dict(EXPERTS, sliding_window=4),
    "gptj": dict(GPT, rotary_dim=8), "granite": dict(logits_scaling=8.0),
    "granitemoehybrid": {
        **EXPERTS, **MAMBA, "logits_scaling": 8.0, "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 32,
    },
    "helium": {}, "hunyuan_v1_dense": {}, "hunyuan_v1_moe": EXPERTS,
    "jamba": dict(
        EXPERTS, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(EXPERTS, layer_types=["conv", "full_attention"]), "llama": {},
    "llama4": reads_images(**EXPERTS, intermediate_size_mlp=48), "llama4_text": dict(EXPERTS, intermediate_size_mlp=48),
    "minicpm3": dict(LATENT, dim_model_base=16), "minimax_m2": EXPERTS, "ministral3": {},
    "mistral": dict(sliding_window=4),
    "mistral3": reads_images(dict(model_type="pixtral"), model_type="mistral"), "mixtral": EXPERTS, "nanochat": {},
    "nemotron": {},
    "nemotron_h": dict(
        EXPERTS, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1, hybrid_override_pattern="M*"
    ),
    "olmo": {}, "olmo2": {}, "olmo3": dict(sliding_window=4), "olmo_hybrid": DELTA, "olmoe": EXPERTS,
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32), "phi": {}, "phi3": {},
    "phimoe": dict(EXPERTS, router_jitter_noise=0.5, input_jitter_noise=0.01), "qwen2": {},
    "qwen2_moe": dict(EXPERTS, output_router_logits=True), "qwen3": {}, "qwen3_moe": EXPERTS,
    "qwen3_vl": reads_images(dict(deepstack_visual_indexes=[0]), rope_parameters=ROTARY),
    "qwen3_next": {**EXPERTS, **DELTA}, "qwen3_5": reads_images(**DELTA), "qwen3_5_moe_text": {**EXPERTS, **DELTA},
    "seed_oss": {}, "smollm3": {}, "stablelm": {}, "starcoder2": {}, "vaultgemma": {}, "youtu": LATENT, "zaya": {},
}  # fmt: skip
FEW = ("cohere2", "deepseek_v3", "falcon_h1", "gemma3", "llama4_text", "phimoe", "qwen2_moe", "qwen3_5")
REFUSED = {  # by the decode loop; with vLLM they train
    "mamba": dict(state_size=8), "minimax": dict(EXPERTS, layer_types=["linear_attention", "full_attention"]),
    "recurrent_gemma": dict(lru_width=32, block_types=["recurrent", "attention"]), "openai-gpt": GPT,
}  # fmt: skip


def family_folder(family: str, folder) -> str:
    """Save a random model of a family and its tokenizer (one token a character) in a folder."""
    changes = (FAMILIES | REFUSED)[family]
    shape = {} if "text_config" in changes else {key: x for key, x in SHAPE.items() if key not in changes}
    config = transformers.AutoConfig.for_model(family, **shape, **changes)
    with_images = "text_config" in changes
    auto_class = transformers.AutoModelForImageTextToText if with_images else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto_class.from_config(config)
    for parameter in model.parameters():  # far from uniform, so that a step changes something
        parameter.data += 0.05 * torch.randn_like(parameter)
    stops = list(range(1, 60))  # responses of all lengths, so that the loop drops rows
    model.generation_config = transformers.GenerationConfig(eos_token_id=stops, pad_token_id=0)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def largest_difference(family: str, folder) -> float:
    """Train for two steps; return the largest difference between log-probabilities of rollout and training.

    With an update a step, of which the metric compares the forward pass, and blocks that recompute, which transformers
    has in training mode only: in it, some families compute something else.
    """
    values = helpers.workspace(folder) | dict(total_episodes=16, eval_every=0, save_every=0, run_name="run")
    values |= dict(mini_batch_size=0, num_epochs=1, gradient_checkpointing=True)
    values["model"] = family_folder(family, folder / "family")
    helpers.run_here(values)
    rows = helpers.metrics_of(values)
    assert len(rows) == 2 and all(row["loss/grad_norm"] > 0 for row in rows)
    check_gradient(values["model"])
    final = f"{values['output_dir']}/run/final"
    assert helpers.weights_of(values["model"]).keys() == helpers.weights_of(final).keys()
    loading.load_model("--model", final, torch.float32, CPU)  # exits if a weight is missing
    return max(row["rollout/logprob_diff_max"] for row in rows)


def check_gradient(folder: str) -> None:
    """The gradient of a padded row's log-probabilities, to that of transformers' own logits of the row alone."""
    ids, length, begin = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 0, 0]]), 8, 3
    mask, gradients = torch.zeros_like(ids, dtype=torch.bool), []
    mask[0, begin:length] = True
    for own in (True, False):
        model = loading.load_model("--model", folder, torch.float64, CPU)
        if own:
            loading.checkpoint_blocks("--model", model)
            logprobs = grpo.Policy(model, grpo.Args())(ids, mask)["logprobs"]
        else:
            logits = model(input_ids=ids[:, :length], use_cache=False).logits[0, begin - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(-1, ids[0, begin:length, None])[:, 0]
        logprobs.sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    largest = max(gradient.abs().max() for gradient in gradients[1].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-6, atol=1e-6 * largest.item())


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES if metafunc.config.getoption("--long") else FEW)


def test_a_family_trains_and_is_exact(family, tmp_path):
    assert largest_difference(family, tmp_path) < 1e-5


@pytest.mark.parametrize("script, changes", [("ppo", {}), ("grpo", {"lora_rank": 2})])
def test_what_reads_images_stays_as_it_is(tmp_path, script, changes):
    values = helpers.workspace(tmp_path) | dict(total_episodes=8, eval_every=0, run_name="run", **changes)
    values["model"] = family_folder("gemma3", tmp_path / "family")
    helpers.run_here(values, script)
    before, after = (helpers.weights_of(x) for x in (values["model"], helpers.folder_of(values) / "final"))
    changed = [name for name, weight in after.items() if not torch.equal(weight, before[name])]
    assert changed and all(name.startswith("language_model.") for name in changed)
    if "lora_rank" in changes:
        adapter = helpers.tensors_of(helpers.folder_of(values) / "final/adapter")
        assert adapter and all(".language_model." in name for name in adapter)


def test_padding_that_changes_a_prediction_and_an_unknown_head_are_refused(tmp_path, capsys, monkeypatch):
    model = loading.load_model("--model", family_folder("granite", tmp_path), torch.float32, CPU)
    forward, head = model.forward, grpo.Policy(model, grpo.Args()).logits
    model.forward = lambda attention_mask=None, **inputs: forward(**inputs)
    decodes = "--model there", model, None, "--rollout_backend vllm"
    assert "its logits differ by" in helpers.refused(capsys, loading.check_decodes, *decodes)
    monkeypatch.setattr(loading, "LOGIT_FACTORS", {})
    line = helpers.refused(capsys, loading.check_head, "--model there", model, head)
    assert "changes its logits in a way unknown" in line


def test_gradient_checkpointing_that_changes_what_is_computed_is_refused(load, capsys, monkeypatch):
    model = load("qwen2")
    block = model.model.layers[1]
    block.input_layernorm.register_forward_hook(lambda norm, x, y: y + block.training)
    line = helpers.refused(capsys, loading.checkpoint_blocks, "--model there", model)
    assert line.endswith("there: gradient checkpointing: Qwen2ForCausalLM computes something else in training mode")
    model = load("gpt2")
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    assert "does not support" in helpers.refused(capsys, loading.checkpoint_blocks, "--model there", model)


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_the_decode_loop_cannot_run_are_refused(kind, tmp_path, capsys):
    model = loading.load_model("--model", family_folder(kind, tmp_path), torch.float32, CPU)
    line = helpers.refused(capsys, loading.check_decodes, "--model there", model, None, "--rollout_backend vllm")
    name = type(model).__name__
    assert line.startswith(f"error: --model there: {name} cannot sample by the decode loop; use --rollout_backend vllm")


def write_table() -> None:
    """Put the table in place of the one of the page."""
    page, by_difference = Path(__file__).parent.parent / "docs/models.md", {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            by_difference.setdefault(f"{largest_difference(family, Path(folder)):.0e}", []).append(family)
    in_order = sorted(by_difference.items(), key=lambda x: float(x[0]))
    rows = [f"| {nats} | {', '.join(names)} |" for nats, names in in_order]
    table = "\n".join(["| nats | families |", "|---|---|", *rows, ""])
    page.write_text(re.sub(r"(\|.*\n)+", table, page.read_text()))


if __name__ == "__main__":
    write_table()
