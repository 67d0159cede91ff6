"""Families of models: each trains for two steps, and is exact. With --long all of them, else a few
that differ most.

python tests/test_families.py     # writes the list of all in results/families.md
"""

import re
import tempfile
from pathlib import Path

import conftest  # noqa: F401
import helpers
import pytest
import torch
import transformers
from tiny_models import CPU, make_tokenizer

import grpo
from plumbing.models import loading
from plumbing.models.forward import NO_DECODE_LOOP, check_decodes, check_head, checkpoint_blocks

PARTS, FAMILIES, REFUSED = helpers.table("families.yaml").values()
FEW = "cohere2 deepseek_v3 falcon_h1 gemma3 llama4_text phimoe qwen2_moe qwen3_5".split()


def family_folder(family: str, folder) -> str:
    """Save a random model of a family and its tokenizer (one token a character) in a folder."""
    changes = (FAMILIES | REFUSED)[family]
    shape = (
        {}
        if "text_config" in changes
        else {key: x for key, x in PARTS["shape"].items() if key not in changes}
    )
    config = transformers.AutoConfig.for_model(family, **shape, **changes)
    with_images = "text_config" in changes
    auto_class = (
        transformers.AutoModelForImageTextToText
        if with_images
        else transformers.AutoModelForCausalLM
    )
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
    """Train for two steps; return the largest difference between log-probabilities of rollout and
    training.

    With an update a step, of which the metric compares the forward pass, and blocks that recompute.
    """
    values = helpers.workspace(folder) | dict(
        total_episodes=16, eval_every=0, save_every=0, run_name="run"
    )
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
    """The gradient of a padded row's log-probabilities, to that of transformers' own logits of the
    row alone.
    """
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 0, 0]])
    length = 8
    begin = 3
    mask = torch.zeros_like(ids, dtype=torch.bool)
    gradients = []
    mask[0, begin:length] = True
    for own in (True, False):
        model = loading.load_model("--model", folder, torch.float64, CPU)
        if own:
            checkpoint_blocks(model)
            logprobs = grpo.Policy(model, grpo.Args())(ids, mask)["logprobs"]
        else:
            logits = model(input_ids=ids[:, :length], use_cache=False).logits[0, begin - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(-1, ids[0, begin:length, None])[:, 0]
        logprobs.sum().backward()
        gradients.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    largest = max(gradient.abs().max() for gradient in gradients[1].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(
            gradient, gradients[1][name], rtol=1e-6, atol=1e-6 * largest.item()
        )


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES if metafunc.config.getoption("--long") else FEW)


def test_a_family_trains_and_is_exact(family, tmp_path):
    assert largest_difference(family, tmp_path) < 1e-5


@pytest.mark.parametrize("script, changes", [("ppo", {}), ("grpo", {"lora_rank": 2})])
def test_what_reads_images_stays_as_it_is(tmp_path, script, changes):
    values = helpers.workspace(tmp_path) | dict(
        total_episodes=8, eval_every=0, run_name="run", **changes
    )
    values["model"] = family_folder("gemma3", tmp_path / "family")
    helpers.run_here(values, script)
    before, after = (
        helpers.weights_of(x) for x in (values["model"], helpers.folder_of(values) / "final")
    )
    changed = [name for name, weight in after.items() if not torch.equal(weight, before[name])]
    assert changed and all(name.startswith("language_model.") for name in changed)
    if "lora_rank" in changes:
        adapter = helpers.tensors_of(helpers.folder_of(values) / "final/adapter")
        assert adapter and all(".language_model." in name for name in adapter)


def test_an_unknown_head_is_refused(tmp_path, capsys, monkeypatch):
    model = loading.load_model("--model", family_folder("granite", tmp_path), torch.float32, CPU)
    monkeypatch.setattr("plumbing.models.forward.LOGIT_FACTORS", {})
    line = helpers.refused(capsys, check_head, "--model there", model)
    assert line.endswith(
        "GraniteForCausalLM trains by other logits: what changes them is not in `head_logits`"
    )
    monkeypatch.undo()
    check_head("--model there", model)
    model.model.norm.register_forward_hook(lambda _, x, y: y + torch.is_grad_enabled())
    assert "trains by other logits" in helpers.refused(capsys, check_head, "--model there", model)


@torch.no_grad()
def change_by_decoding(model) -> float:
    """Return how much left padding and a cache that drops a row change the logits, of their size."""
    ids = torch.arange(12).view(2, 6)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # two prompts of 5 and 2 tokens; then the first one ends
    positions = (mask.cumsum(1) - 1).clamp(0)
    first = dict(attention_mask=mask[:, :5], position_ids=positions[:, :5], use_cache=True)
    cache = model(input_ids=ids[:, :5], **first).past_key_values
    cache.reorder_cache(torch.tensor([1]))
    then = dict(attention_mask=mask[1:], position_ids=positions[1:, 5:], past_key_values=cache)
    logits = model(input_ids=ids[1:, 5:], use_cache=True, **then).logits[0, -1]
    expected = model(input_ids=ids[1:, 3:], use_cache=False).logits[0, -1]
    return ((logits - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", ["qwen2", *NO_DECODE_LOOP])
def test_models_that_the_decode_loop_cannot_run_are_refused(kind, tmp_path, capsys):
    """Those of which the last test would not hold, and no others."""
    model = loading.load_model("--model", family_folder(kind, tmp_path), torch.float32, CPU)
    check = check_decodes, "--model there", model, "--rollout_backend vllm"
    if kind == "qwen2":
        check[0](*check[1:])
        assert change_by_decoding(model) < 1e-5
        return
    name = type(model).__name__
    assert helpers.refused(capsys, *check) == (
        f"error: --model there: {name} cannot sample by the decode loop; use --rollout_backend vllm"
    )
    with pytest.raises((AttributeError, RuntimeError)):
        change_by_decoding(model)
    if kind == "openai-gpt":
        line = helpers.refused(capsys, checkpoint_blocks, model)
        assert line.startswith(
            f"error: --gradient_checkpointing: {name} does not support it; use --no-gradient_ch"
        )


def write_list() -> None:
    """Put the list in place of the one of results/families.md."""
    page = Path(__file__).parent.parent / "results/families.md"
    by_difference = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            by_difference.setdefault(f"{largest_difference(family, Path(folder)):.0e}", []).append(
                family
            )
    in_order = sorted(by_difference.items(), key=lambda x: float(x[0]))
    lines = "".join(f"- {nats}: {', '.join(names)}\n" for nats, names in in_order)
    page.write_text(re.sub(r"(- \de-\d\d: .*\n)+", lines, page.read_text()))


if __name__ == "__main__":
    write_list()
