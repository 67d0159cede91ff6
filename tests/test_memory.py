"""scripts/memory.py against what torch itself counts on a CPU, and against public figures of Qwen2.5-7B."""

import json
import math
import shutil
import subprocess
from types import SimpleNamespace

import forked_python
import helpers
import memory as command  # helpers made scripts/ importable
import pytest
import torch
from conftest import ROOT
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import grpo
import ppo
import reward_model
import rloo
import utils
from plumbing.models import memory
from plumbing.models.loading import ModelNames, ScalarModel

SHAPE = dict(
    vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip
SHAPES = {  # each far from the others in what takes most
    "plain": {},
    "wide": dict(hidden_size=128, intermediate_size=512, num_hidden_layers=8),
    "tall": dict(num_hidden_layers=12, intermediate_size=96, num_attention_heads=8, num_key_value_heads=1),
    "words": dict(vocab_size=8192),
    "tied": dict(vocab_size=8192, tie_word_embeddings=True),
}
QWEN_7B = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=3584, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, intermediate_size=18944, vocab_size=152064,
    tie_word_embeddings=False,
)  # fmt: skip
GIB, ROWS, LENGTH, PROMPT, CHUNK = 2**30, 4, 256, 64, 128
STATES = ("weights", "gradients", "optimizer", "frozen")


def make(kind: str = "qwen2", precision: str = "float32", **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **changes}))
    return (model.bfloat16() if precision == "pure_bf16" else model).train()


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


def flags(**changes) -> grpo.Args:
    sizes = dict(
        micro_batch_tokens=ROWS * LENGTH, logits_chunk_tokens=CHUNK, max_prompt_length=PROMPT,
        max_response_length=LENGTH - PROMPT, rollout_backend="server", precision="float32",
    )  # fmt: skip
    return grpo.Args(**{**sizes, **changes})


def estimate(model, **changes) -> dict[str, float]:
    size, logits = count(model), not hasattr(model, "score")
    return memory.estimate(
        flags(**changes), [memory.Model(model.config, size, size, logits)], memory.Devices(1, math.inf, False)
    )


def batch():
    ids = torch.randint(0, 512, (ROWS, LENGTH))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, PROMPT:] = True
    return ids, mask


def autocast(precision: str):
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


@pytest.fixture(scope="module")
def tiny() -> str:
    return f"{ROOT}/assets/tiny"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    """Flags of a run of ppo.py with all models that there are, the critic of another size."""
    folder = tmp_path_factory.mktemp("base")
    values = helpers.workspace(folder)
    wide = helpers.tiny_model(folder / "wide", hidden_size=32)
    judge = str(shutil.copytree(values["model"], folder / "judge"))
    AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1).save_pretrained(judge)
    return {**values, "value_model": wide, "reward": (values["reward"], judge), "run_name": "run"}


@pytest.fixture(scope="module")
def qwen_7b(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return str(folder)


# ---- against torch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "pure_bf16"])
@pytest.mark.parametrize("shape", ["plain", "tied"])
def test_states_are_exact(shape, precision):
    model = make(precision=precision, **SHAPES[shape])
    optimizer = utils.Optimizer(model, grpo.Args(weight_decay=0.1), 1)
    model(input_ids=batch()[0]).logits.sum().backward()
    size = lambda tensors: sum(x.numel() * x.element_size() for x in tensors)
    parts = estimate(model, precision=precision)
    assert parts["weights"] == size(model.parameters())
    assert parts["gradients"] == size(p.grad for p in model.parameters())
    optimizer.step()
    states = [x for state in optimizer.adam.state.values() for name, x in state.items() if name != "step"]
    assert parts["optimizer"] == size(states)


def saved_bytes(model, ids, precision: str) -> int:
    """Of the storages that a forward pass keeps for the backward pass, beside the weights and their copies."""
    own, found, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}, []
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape[::-1]) for p in model.parameters()}

    def pack(x):
        storage, is_copy = x.untyped_storage(), x.dtype == torch.bfloat16 and tuple(x.shape) in shapes
        if storage.data_ptr() not in own and not is_copy:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(x)  # so that nothing else gets its address
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), autocast(precision):
        output = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    assert output.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("precision", ["float32", "bf16", "pure_bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations(shape, precision, checkpointing):
    model, ids = make(precision=precision, **SHAPES[shape]), batch()[0]
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parts = estimate(model, precision=precision, gradient_checkpointing=checkpointing)
    expected = parts["activations"]
    if checkpointing:  # the block that is computed again comes later; the end of the model is there now
        last = model.config.hidden_size * (4 + memory.BYTES[precision][0])
        expected += ids.numel() * (last - memory.block_activations(model.config, precision))
    assert saved_bytes(model, ids, precision) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_activations_of_other_families(kind):
    changes = {"head_dim": 16} if kind == "qwen3" else {}
    model = make(kind, **changes)
    assert saved_bytes(model, batch()[0], "float32") == pytest.approx(
        estimate(model, precision="float32")["activations"], rel=0.15
    )


def peak_bytes(work) -> int:
    """The most that torch has allocated at one time while `work` ran, above what was there before."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()
    now = most = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += size
        most = max(most, now)
    return most


@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("precision", ["float32", "bf16", "pure_bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_peak_of_a_micro_batch(shape, precision, checkpointing):
    """Forward and backward through grpo.Policy: copies, activations, logits and temporaries together."""
    model, (ids, mask) = make(precision=precision, **SHAPES[shape]), batch()
    mask[:, 1:] = True  # a micro-batch of short prompts, which has most logits
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = grpo.Policy(model, 1.0, CHUNK, recompute_logits=checkpointing)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def work():
        with autocast(precision):
            logprobs = policy(ids, mask)["logprobs"]
        logprobs.sum().backward()

    logits = "yes" if checkpointing else "no"
    parts = estimate(model, precision=precision, gradient_checkpointing=checkpointing, recompute_logits=logits)
    expected = parts["while training"] - sum(parts[name] for name in STATES)
    assert peak_bytes(work) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("recompute", ["no", "yes"])
@pytest.mark.parametrize("entropy_coef, kl_estimator", [(0.1, "k3"), (0.0, "full"), (0.1, "full")])
def test_peak_with_a_trained_entropy_and_an_exact_kl(entropy_coef, kl_estimator, recompute):
    model, reference = make(**SHAPES["words"]), make(**SHAPES["words"]).requires_grad_(False)
    ids, mask = batch()
    mask[:, 1:] = True
    policy = grpo.Policy(model, 1.0, CHUNK, entropy_coef > 0, recompute == "yes")
    frozen = grpo.Policy(reference, 1.0, CHUNK) if kl_estimator == "full" else None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def work():
        out = policy(ids, mask, frozen)
        sum(x.sum() for name, x in out.items() if not name.startswith("detached")).backward()

    parts = estimate(model, entropy_coef=entropy_coef, kl_estimator=kl_estimator, recompute_logits=recompute)
    expected = parts["while training"] - sum(parts[name] for name in STATES)
    assert peak_bytes(work) == pytest.approx(expected, rel=0.15)


def test_what_a_run_keeps(tiny):
    """Logits where nothing is said, unless blocks are recomputed; the policy is told."""
    for checkpointing, flag, kept in ((False, "auto", True), (True, "auto", False), (True, "no", True)):
        args = grpo.Args(model=tiny, gradient_checkpointing=checkpointing, recompute_logits=flag, rollout_backend="hf")
        plan_alone(args, ModelNames([("--model", tiny)], [], []))
        for script in (grpo, ppo, rloo):
            policy = script.load_policy(args, None, torch.float32, torch.device("cpu"))
            assert args.recompute_logits == ("no" if kept else "yes") and policy.recompute_logits != kept


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("shape", ["plain", "words", "tied"])
def test_peak_of_a_scalar_model(shape, precision):
    """A critic or a reward model: no logits, no head of the vocabulary's size."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **{**SHAPE, **SHAPES[shape]}, num_labels=1)
    model, (ids, mask) = AutoModelForSequenceClassification.from_config(config).train(), batch()
    scalar = ScalarModel(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def work():
        with autocast(precision):
            values = scalar(ids, mask)
        values.sum().backward()

    parts = estimate(model, precision=precision)
    expected = parts["while training"] - sum(parts[name] for name in STATES)
    assert not parts["logits"] and peak_bytes(work) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(
    "shape, precision, rows, prompt, response",
    [
        ("words", "float32", 64, 8, 8),  # the distributions
        ("words", "bf16", 64, 8, 8),
        ("plain", "float32", 32, 32, 96),  # the cache
        ("plain", "pure_bf16", 32, 32, 96),
        ("tall", "float32", 32, 200, 8),  # the prompts
        ("wide", "pure_bf16", 16, 200, 8),
    ],
)
def test_peak_of_a_rollout(shape, precision, rows, prompt, response):
    model = make(precision=precision, **SHAPES[shape]).eval()
    args = flags(
        max_prompt_length=prompt, max_response_length=response, generation_batch_size=rows, rollout_backend="hf",
        precision=precision,
    )  # fmt: skip
    queries, uniforms = [[5] * (prompt - i % 4) for i in range(rows)], torch.rand(rows, response, dtype=torch.float64)

    def work():
        with autocast(precision):
            grpo.generate(model, queries, uniforms, [], args, lambda: False)

    policy = memory.Model(model.config, count(model), count(model), True)
    expected = memory.sampling_bytes(args, policy, memory.Devices(1, math.inf, False))["sampler"]
    assert peak_bytes(work) == pytest.approx(expected, rel=0.15)


def test_layers_of_several_widths():
    config = AutoConfig.for_model("gemma3n_text", intermediate_size=[8, 32, 16] + 32 * [8])
    assert memory.shape(config)[4] == 32


def test_adapters_are_counted():
    model = make()
    inner = sum(m.in_features + m.out_features for n, m in model.named_modules() if n.endswith("_proj"))
    assert memory.adapter_parameters(model, 8) == 8 * inner


# ---- Qwen2.5-7B ------------------------------------------------------------------------------------------------------


def planned(folder: str, *words: str) -> tuple[dict[str, float], grpo.Args, memory.Devices]:
    """What the command estimates, the flags that it settles on, and the GPUs."""
    own, args, models = command.read_args(["--model", folder, *" ".join(words).split()])
    args, devices = command.settle(own, args, models)
    return memory.estimate(args, models, devices), args, devices


FIXED = "--micro_batch_tokens 16384 --logits_chunk_tokens 512"


def parts_of(folder: str, words: str = "") -> dict[str, float]:
    return planned(folder, FIXED, words if "--shard" in words else f"--shard none {words}")[0]


def test_figures_of_7b(qwen_7b):
    size, matrix = 7_615_616_512, 152064 * 3584
    assert count(memory.without_weights("--model", qwen_7b)) == size
    plain, sharded = parts_of(qwen_7b, "--gpus 8"), parts_of(qwen_7b, "--gpus 8 --shard fsdp")
    states = lambda parts: sum(parts[name] for name in ("weights", "gradients", "optimizer")) / GIB
    assert states(plain) == pytest.approx(113.5, abs=0.1)  # 16 bytes a parameter
    assert states(sharded) == pytest.approx(14.2, abs=0.1)
    block = (size - 2 * matrix) / 28
    assert sharded["copies"] == pytest.approx(2 * matrix * 4 + matrix * 2 + 2 * block * 2, rel=0.001)  # 5.9 GiB
    assert parts_of(qwen_7b, "--gpus 8 --shard fsdp --shard_group_size 4")["weights"] == 2 * sharded["weights"]
    collected = parts_of(qwen_7b, "--gpus 8 --shard fsdp --gpu_gb 160")
    assert collected["gradients"] == plain["gradients"]  # below Sharding.GRADIENT_SHARE of the GPU
    assert plain["frozen"] == 4 * size and parts_of(qwen_7b, "--kl_coef 0")["frozen"] == 0
    ppo, critic = parts_of(qwen_7b, "--algorithm ppo"), size - matrix + 3584  # a head of one output
    assert ppo["frozen"] == plain["frozen"] and states(ppo) - states(plain) == pytest.approx(16 * critic / GIB)
    offloaded = parts_of(qwen_7b, "--gpus 8 --shard fsdp --cpu_offload")
    assert not any(offloaded[name] for name in STATES)


def test_which_parts_there_are(qwen_7b):
    vllm, server = parts_of(qwen_7b, "--kv_cache_gb 10"), parts_of(qwen_7b, "--rollout_backend server")
    assert vllm["engine"] == 2 * 7_615_616_512 + 10e9 and server["engine"] == server["sampler"] == 0
    assert parts_of(qwen_7b)["engine"] == 2 * 7_615_616_512 + 20e9
    assert parts_of(qwen_7b, "--kv_cache_gb 10 --vllm_tensor_parallel 2")["engine"] == 7_615_616_512 + 10e9
    together = parts_of(qwen_7b, "--kv_cache_gb 10 --async_steps 1")
    assert together["while training"] == vllm["while training"] + vllm["engine"]
    assert parts_of(qwen_7b, "--rollout_backend hf")["sampler"] > 512 * 1536 * 28 * 512 * 6
    scores, _, _ = planned(qwen_7b, "--algorithm reward_model")
    assert scores["logits"] == scores["frozen"] == scores["engine"] == 0
    adapters = parts_of(qwen_7b, "--lora_rank 16")
    assert adapters["frozen"] == 0 and adapters["gradients"] < 0.01 * adapters["weights"]


def test_the_pass_that_takes_most_counts(qwen_7b, tiny):
    """Of a small policy with a large critic, the critic's."""
    args = flags(model=tiny, precision="bf16")
    read = lambda trained, scalar: memory.read_models(ModelNames(trained, scalar, []), 0)
    small, large = [("--model", tiny)], [("--value_model", qwen_7b)]
    most = lambda models: memory.estimate(args, models, memory.Devices(1, 80e9, False))["activations"]
    assert most(read(small, large)) == most(read([], large)) > 100 * most(read(small, []))


# ---- a run -----------------------------------------------------------------------------------------------------------


SCRIPTS = ("grpo", "rloo", "ppo", "reward_model")


def test_the_plan_goes_by_the_models_that_the_script_names(base, tmp_path, monkeypatch):
    """A copy of ppo.py under another name is planned with its critic, by a run and by the command."""
    (tmp_path / "forks").mkdir()
    shutil.copy(f"{ROOT}/ppo.py", tmp_path / "forks" / "mine.py")
    monkeypatch.syspath_prepend(tmp_path / "forks")
    monkeypatch.setattr(command, "ROOT", str(tmp_path))
    value_model, judge = base["value_model"], base["reward"][1]
    words = ("--ref_model", base["model"], "--value_model", value_model, "--reward", *base["reward"])
    _, _, models = command.read_args(["--algorithm", "forks/mine.py", "--model", base["model"], *words])
    sizes = [utils.parameter_count(memory.without_weights("", name)) for name in (base["model"], base["model"])]
    scalar = [utils.parameter_count(memory.without_weights("", name, True)) for name in (value_model, judge)]
    assert [(m.parameters, m.trained > 0, m.logits) for m in models] == [
        (sizes[0], True, True), (scalar[0], True, False), (sizes[1], False, False), (scalar[1], False, False),
    ]  # fmt: skip

    class Planned(Exception):
        pass

    def plan_run(args, names, world, sharding):
        raise Planned(memory.read_models(names, args.lora_rank))

    monkeypatch.setattr(memory, "plan_run", plan_run)
    with pytest.raises(Planned) as raised:
        helpers.run_here(base, "mine")
    assert raised.value.args[0] == models


def plan_alone(args, names: ModelNames, memory_bytes: float = math.inf) -> None:
    device = torch.device("cpu" if math.isinf(memory_bytes) else "cuda")
    memory.plan_run(args, names, utils.World(0, 1, device), SimpleNamespace(on=False, memory=memory_bytes))


def test_a_pair_is_what_a_reward_model_takes_at_least(tiny, capsys):
    args = reward_model.Args(model=tiny, max_length=5000)
    assert memory.longest_sequence(args) == 10_000
    plan_alone(args, ModelNames([], [("--model", tiny)], []))
    assert args.micro_batch_tokens == 16_384 and "with 16,384 tokens at once" in capsys.readouterr().out


def test_what_a_run_says(tiny, qwen_7b, capsys):
    """One line, and a warning where the run may not fit; the GPU is made up."""
    names = lambda folder: ModelNames([("--model", folder)], [], [])
    args = grpo.Args(model=tiny, rollout_backend="hf")
    plan_alone(args, names(tiny))
    said = capsys.readouterr()
    assert said.out.startswith("memory of each device with 16,384 tokens at once and logits of 512, kept, estimated: ")
    assert said.out.count("\n") == 1 and not said.err and args.logits_chunk_tokens == 512
    args = grpo.Args(model=qwen_7b, rollout_backend="server")
    plan_alone(args, names(qwen_7b), 80e9)
    warning = capsys.readouterr().err
    assert "the GPU has 80 GB: the run may not fit; try --gradient_checkpointing, --shard fsdp" in warning
    assert args.micro_batch_tokens == 2048  # the longest sequence has 1,536


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, shard, tokens, chunk",
    [
        ("", "none", 4096, 512),  # 0.5B on one GPU of 24 GB
        ("--gpus 8", "none", 4096, 512),
        ("--gpus 8 --gpu_gb 4", "fsdp", 2048, 512),
        ("--gpus 8 --gpu_gb 80", "none", 16_384, 4096),
        ("--gpu_gb 4", "none", 2048, 512),  # the longest sequence has 1,536
        ("--gpu_gb 4 --micro_batch_tokens 100", "none", 100, 512),
        ("--gpu_gb 80 --logits_chunk_tokens 3", "none", 16_384, 3),
        ("--gpus 8 --shard fsdp", "fsdp", 8192, 512),
        ("--gpus 8 --max_response_length 24000 --sequence_parallel 8", "none", 4096, 512),
    ],
)
def test_what_is_left_to_the_estimate(tmp_path, words, shard, tokens, chunk):
    """--shard auto goes by what models and Adam take, --micro_batch_tokens 0 by what training does."""
    config = {**QWEN_7B, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "vocab_size": 151936}
    config |= {"num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    gb = "" if "gpu_gb" in words else "--gpu_gb 24"
    parts, args, devices = planned(str(tmp_path), words, gb)
    assert (args.shard, args.micro_batch_tokens, args.logits_chunk_tokens) == (shard, tokens, chunk)
    if tokens not in (100, 16_384):
        twice, _, _ = planned(str(tmp_path), words, gb, f"--micro_batch_tokens {2 * tokens}")
        assert twice["while training"] > 0.8 * devices.memory
    if tokens > 2048:
        assert parts["while training"] <= 0.8 * devices.memory


def test_the_command_of_the_readme_fits(qwen_7b):
    """torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen2.5-7B, and the same of the other scripts, on 80 GB."""
    for algorithm in SCRIPTS:
        parts, args, devices = planned(qwen_7b, f"--gpus 8 --algorithm {algorithm}")
        assert args.shard == "fsdp" and devices.fits(parts)


def test_command(qwen_7b, tiny, capsys):
    def said(*words: str) -> str:
        command.main([*words])
        found = capsys.readouterr()
        assert not found.err
        return found.out

    out = said("--model", qwen_7b, "--gpus", "8")
    assert "--shard fsdp, 4,096 tokens at once and logits of 1,024, recomputed;" in out and "\nfits into 80" in out
    out = said("--model", qwen_7b, "--gpus", "8", "--shard", "none", *FIXED.split())
    assert "7,615,616,512 parameters" in out and "does not fit into 80 GB" in out
    assert "\ntry --gradient_checkpointing, --shard fsdp, " in out
    out = said("--model", qwen_7b, "--gpus", "8", "--shard", "fsdp", "--cpu_offload")
    assert "GB in the memory of all machines together" in out
    with forked_python.python() as python:
        line = [python, f"{ROOT}/scripts/memory.py", "--model", tiny]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr and "\nfits into 80 GB" in done.stdout


@pytest.mark.parametrize(
    "words, said",
    [
        ("--model Nobody/has-this", "error: --model Nobody/has-this"),
        ("--cpu_offload", "error: --cpu_offload: takes --shard fsdp"),
        ("--algorithm sac", "error: --algorithm sac"),
        ("--sequence_parallel 4 --gpus 6", "error: --sequence_parallel 4"),
        ("--gpus 0", "error: --gpus: has to be above 0"),
        ("--gpu_gb nan", "error: --gpu_gb: has to be above 0"),
        ("--lora_rank -1", "error: --lora_rank: has to be 0 or more"),
    ],
)
def test_bad_flags(words, said, capsys, tiny):
    with pytest.raises(SystemExit) as ended:
        command.main([*words.split(), *([] if "--model" in words else ["--model", tiny])])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error
    assert error.count("\n") == 1
