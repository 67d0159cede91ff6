"""Models that need more than the usual: capped attention scores; vocabularies; --attention."""

import copy
import functools
import json
import os
import runpy
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import transformers
from helpers import ROOT, refused, render_prompt, table, tiny_model
from huggingface_hub import constants
from tiny_models import CPU, WORLD
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, modeling_utils

import utils
from grpo import Args
from plumbing.models import loading
from plumbing.models.config import check_fits, go_offline_if_unreachable
from plumbing.models.forward import checkpoint_blocks, last_hidden_states, set_attention
from plumbing.models.tokenizer import load_tokenizer, read_tokenizer, stop_token_ids
from plumbing.rollout.batch import collate
from plumbing.run import checkpoints

IDS = torch.arange(2, 22)[None]
TINY = str(ROOT / "assets" / "tiny")
REPORTED = ROOT / "tests" / "data" / "reported"


# ---- Gemma 2's soft cap --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemma2", "vaultgemma"])
@torch.no_grad()
def test_capped_attention_scores(tmp_path, load, capsys, kind):
    """transformers' sdpa leaves the cap out without a word; without a cap it is taken."""
    assert load("gemma2", attn_logit_softcapping=None).config._attn_implementation == "sdpa"
    folder = tiny_model(tmp_path, kind, query_pre_attn_scalar=8, attn_logit_softcapping=0.5)
    logits = lambda name: (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name)(IDS).logits
    )
    eager = logits("eager")
    sdpa = logits("sdpa")
    ours = loading.load_model("--model", folder, torch.float32, CPU)
    assert torch.equal(ours(IDS).logits, eager) and (eager - sdpa).abs().max() > 0.01
    # as on the other ranks
    on_meta = loading.load_model("--model", folder, torch.float32, torch.device("meta"))
    assert on_meta.config._attn_implementation == "eager"
    assert refused(capsys, set_attention, ours, "sdpa").startswith("error: --attention sdpa: ")


def test_a_hub_that_does_not_answer(monkeypatch):
    """Its library would ask six times, over half a minute, for the first file alone."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    go_offline_if_unreachable.cache_clear()
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(utils.UserError):
        read_tokenizer("--model", "no/such")
    assert not pauses
    go_offline_if_unreachable.cache_clear()


# ---- tokens that end a response ------------------------------------------------------------------

TABLE = table("models.yaml")


@pytest.mark.parametrize("template, eos, config, expected", TABLE["stop tokens"])
def test_the_first_stop_token_is_that_of_the_chat_template(
    model_folder, tokenizer, template, eos, config, expected
):
    """It is what reward_model.py and --ptx_dataset end texts with; 1 is the tokenizer's."""
    folder = model_folder("qwen2", **config)
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    GenerationConfig(eos_token_id=eos).save_pretrained(folder)
    assert stop_token_ids(tokenizer, folder, "eos") == expected
    assert stop_token_ids(tokenizer, folder, "a") == tokenizer.encode("a")
    with pytest.raises(utils.UserError):
        stop_token_ids(tokenizer, folder, "ab")


CORRUPT = (REPORTED / "23_corrupt_generation_config.json").read_text()


@pytest.mark.parametrize("content, eos", [*TABLE["generation configs"], (CORRUPT, None)])
def test_a_generation_config_of_any_content(tmp_path, tokenizer, capsys, content, eos):
    """Its end tokens are not lost in silence."""
    folder = tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    if eos:
        assert stop_token_ids(tokenizer, folder, "eos") == eos
    else:
        line = refused(capsys, stop_token_ids, tokenizer, folder, "eos")
        assert line.startswith(f"error: --model {folder}: generation_config.json: ")


@pytest.mark.parametrize("template, system_prompt, said", TABLE["said"])
def test_what_a_chat_template_lacks(tmp_path, capsys, template, system_prompt, said):
    file = tmp_path / "chat.jinja"
    file.write_text((REPORTED / template).read_text() if "jinja" in template else template)
    load = functools.partial(load_tokenizer, TINY, str(file), "{}", system_prompt)
    if said.startswith(("renders", "--")):
        assert said in refused(capsys, load)
    else:
        load()
        err = capsys.readouterr().err
        assert said in err and bool(said) == err.startswith("warning: the chat template of --model")


@pytest.fixture
def reported(tmp_path, monkeypatch):
    """A function: runs a program that was reported, in a folder of its own."""
    names = {"json": json, "os": os, "transformers": transformers, "R": str(ROOT)}
    monkeypatch.setitem(sys.modules, "lab", types.SimpleNamespace(**names))
    monkeypatch.setattr(loading, "read_tokenizer", read_tokenizer, raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda name: runpy.run_path(REPORTED / name)


def test_the_folder_of_a_run_is_no_model(tmp_path, capsys):
    (tmp_path / "args.json").write_text("{}")
    line = refused(capsys, read_tokenizer, "--model", str(tmp_path))
    assert line.endswith("is the folder of a run, which leaves its model in final/")


def test_tokenizer_json_is_read_where_tekken_json_is_beside_it(tmp_path, reported, capsys):
    """By each class that a folder may name, or none."""
    folder = Path(tiny_model(tmp_path / "models/tekken", "mistral", chat=True))
    (folder / "tekken.json").write_text("{}")
    reported("28_tekken.py")
    found = capsys.readouterr().out.splitlines()[2:]
    assert len(found) == 4 and all(line.endswith(" True") for line in found), found
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": None}))
    assert load_tokenizer(str(folder)).backend_tokenizer.get_vocab_size() > 256


def test_what_reads_images_is_saved_with_the_model(tmp_path, reported):
    reported("24_vlm_folder.py")
    source = tmp_path / "models/g3"
    (source / "video_preprocessor_config.json").write_text("{}")
    names = [f"{name}_config.json" for name in ("preprocessor", "video_preprocessor", "processor")]
    files = {name: (source / name).read_text() for name in names}
    folder = str(source)
    model = loading.load_model("--model", folder, torch.float32, CPU)
    given = WORLD, model, load_tokenizer(folder), folder
    checkpoints.save_final(str(tmp_path), *given)
    world, model, tokenizer, _ = given
    for step in (1, 2):  # the second one resumes from the first, whose folder is a model, too
        state = {"step": step}
        optimizer = utils.Optimizer(model, Args(model=folder), 1, 1)
        models = {"": model}, {"": optimizer}
        checkpoints.save_checkpoint(str(tmp_path), world, tokenizer, state, *models, 0)
        tokenizer = load_tokenizer(f"{tmp_path}/checkpoints/step_{step}")
    for saved in ("final", "checkpoints/step_1", "checkpoints/step_2"):
        assert files == {name: (tmp_path / saved / name).read_text() for name in names}


def test_values_for_the_chat_template(tmp_path, capsys):
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{{ messages[0]['content'] }}{% if not enable_thinking %}<think></think>{% endif %}"
    )
    ask = [{"role": "user", "content": "1"}]
    for values, text in (("{}", "1<think></think>"), ('{"enable_thinking": true}', "1")):
        tokenizer = load_tokenizer(TINY, str(template), values)
        assert tokenizer.apply_chat_template(ask, tokenize=False) == text
    for values, word in (
        ("{", "Expecting"),
        ("[1]", "dict"),
        ('{"thinking": 1}', "does not read thinking"),
    ):
        line = refused(capsys, load_tokenizer, TINY, str(template), values)
        assert line.startswith("error: --chat_template_kwargs") and word in line


SYSTEM_PROMPT = (
    """Say "x" or 'y'.\n\tEnd by \\boxed{}; %} {{ no }} {% raw %} \u00e9 \U0001f600 \x07 #}"""
)


@pytest.mark.parametrize("template", TABLE["saved"])
@pytest.mark.parametrize("text", ["", "Be brief.", SYSTEM_PROMPT])
def test_what_is_saved_has_the_system_prompt_of_training(tmp_path, template, text):
    """Plain transformers renders what the run has trained on, also where a run begins with what
    another one has saved: with the same prompt, which is there once, or another one.
    """
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    asked = [{"role": "user", "content": "1+1="}]
    with_turn = [{"role": "system", "content": "Mine."}, *asked]
    original = load_tokenizer(TINY, str(file))
    saved = tmp_path / "saved"
    for name in (TINY, str(saved), str(saved)):
        tokenizer = load_tokenizer(name, str(file) if name == TINY else "", "{}", text)
        tokenizer.save_pretrained(saved)
        seen = render_prompt(asked, original, text)
        assert render_prompt(asked, tokenizer, text) == seen
        plain = AutoTokenizer.from_pretrained(saved)
        render = functools.partial(
            plain.apply_chat_template, tokenize=False, add_generation_prompt=True
        )
        assert render(asked) == seen.shown and (text in seen.shown)
        assert render(with_turn) == render_prompt(with_turn, original).shown
        assert plain.chat_template.count("I am") == template.count("I am")
        assert len(plain.chat_template) <= len(template) + 2 * len(text) + 120
    other = load_tokenizer(str(saved), "", "{}", "Other.")
    assert render_prompt(asked, original, "Other.").text == other.apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )


def test_a_system_prompt_in_several_templates_or_none(monkeypatch):
    tokenizer = read_tokenizer("--model", TINY)
    monkeypatch.setattr("plumbing.models.tokenizer.read_tokenizer", lambda *_: tokenizer)
    load = functools.partial(load_tokenizer, TINY, system_prompt="Be brief.")
    assert load().chat_template is None
    for name, turns in (("none", "1"), ("", "2")):
        tokenizer.chat_template = {"default": "{{ messages|length }}", "rag": "?"}
        assert load(name).apply_chat_template([{"role": "user"}], tokenize=False) == turns


# ---- vocabularies --------------------------------------------------------------------------------


# meta: where rank 0 alone reads the weights of a sharded model
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_embedding_of_the_pad_token_gets_a_gradient(model_folder, device):
    folder = model_folder("qwen2", pad_token_id=3)
    model = loading.load_model("--model", folder, torch.float32, torch.device(device))
    assert model.config.pad_token_id == 3 and model.get_input_embeddings().padding_idx is None


def test_the_last_token_of_a_vocabulary(model_folder, capsys):
    """SMALL has 32."""
    check_fits(model_folder(), 31, 2, "--dataset here")
    line = refused(capsys, check_fits, model_folder(), 32, 2, "--dataset here")
    assert "has 32 tokens, and its tokenizer writes token 32" in line


# ---- --attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])  # query heads that share a key
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_causal_attention_without_a_mask(load, monkeypatch, family, groups):
    """So that CUDA's flash kernel, which takes no mask, may be chosen; also where rows are
    padded.
    """
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        calls.append(
            (
                attn_mask,
                dropout_p,
                is_causal,
                query.shape[1] // key.shape[1],
                more.get("enable_gqa", False),
            )
        )
        return original(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **more
        )

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    model = load(family, num_key_value_heads=2 // groups)
    ids, mask = collate([([3, 4, 5], [6, 7]), ([8], [9, 10, 11])], CPU)
    checkpoint_blocks(model)
    calls.clear()
    last_hidden_states(model, ids)[mask].sum().backward()
    # keys are not repeated
    assert set(calls) == {(None, 0.0, True, groups, groups > 1)} and len(calls) == 4


def test_attention_that_is_not_supported(load, capsys, monkeypatch):
    monkeypatch.setattr(type(load("llama")), "_can_set_attn_implementation", lambda *_: False)
    for name, family in (
        ("flash_attention_2", "qwen2"),
        ("flex_attention", "gpt2"),
        ("eager", "llama"),
    ):
        line = refused(capsys, set_attention, load(family), name)
        assert line.startswith(f"error: --attention {name}: ")
    assert "LlamaForCausalLM" in line


def test_flash_attention_from_the_hub(load, monkeypatch):
    """transformers takes it from there where its package is not installed, and names it otherwise
    then.
    """
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda: True)
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda *_, **__: None)
    model = load("qwen2")
    set_attention(model, "flash_attention_2")
    assert model.config._attn_implementation == "kernels-community/flash-attn2"
