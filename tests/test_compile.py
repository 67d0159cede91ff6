"""--compile changes speed, never a result: whole runs in float64 against runs without it, and the number of graphs that
micro-batches of many shapes take. --attention: what is computed, and what cannot be."""

import math

import helpers
import pytest
import torch
from helpers import metrics_of, run
from test_policy import gradient_of, random_batch, relative
from test_shard import SCRIPTS, base, compare  # noqa: F401
from tiny_models import CPU
from torch._dynamo.testing import CompileCounterWithBackend

import grpo
from plumbing.models.sharding import compile_parts, set_attention

# The backend inductor takes longest, ten seconds a graph: it gets a run with as few as can be, forward and backward
# pass of a block and of the logits' statistics. The others take the graphs of all that is compiled.
FEW_GRAPHS = {
    "kl_coef": 0.0, "kl_controller": "fixed", "ref_refresh_every": 0, "num_epochs": 1, "mini_batch_size": 8,
}  # fmt: skip
# script, ranks, backend, flags
RUNS = {
    "grpo": ("grpo", 1, "aot_eager", {}),
    "rloo, few graphs": ("rloo", 1, "inductor", FEW_GRAPHS),
    "ppo": ("ppo", 1, "aot_eager", {"ptx_coef": 0.0, "ptx_dataset": "", "ref_refresh_every": 0}),
    "reward_model, sharded": ("reward_model", 2, "eager", {"shard": "fsdp", "gradient_checkpointing": True}),
    "grpo, adapters": ("grpo", 1, "aot_eager", {"lora_rank": 2, "ref_refresh_every": 0, "num_epochs": 1}),
}


@pytest.fixture(scope="module")
def runs(base):  # noqa: F811
    """Pairs of runs, without --compile and with it, all started at once: {name: (script, flags, flags, processes)}."""
    started = {}
    for name, (script, ranks, backend, changes) in RUNS.items():
        values = {**base[script], **changes, "micro_batch_tokens": 10_000, "eval_every": 0, "run_name": name}
        compiled = {**values, "run_name": f"{name}, compiled", "compile": True}
        processes = [helpers.start({**values, "shard": "none"}, script=script)]
        environment = {"COMPILE_BACKEND": backend}
        processes += helpers.start_ranks(compiled, ranks, script=script, environment=environment)
        started[name] = (script, values, compiled, processes)
    yield started
    for _, _, _, processes in started.values():
        for each in processes:
            each.process.kill()


@pytest.mark.parametrize("name", RUNS)
def test_compiling_changes_nothing(runs, name):
    """Metrics and weights of three updates or more, sharded and checkpointed ones, too; files have the same names."""
    script, values, compiled, processes = runs[name]
    for each in processes:
        assert each.wait(900).code == 0, each.err[-4000:]
    compare(compiled, values)
    assert len(metrics_of(compiled)) == 3


class Counted:
    """A context in which all that is compiled is compiled by a backend that counts the graphs."""

    def __init__(self, backend: str = "eager"):
        self.backend = backend

    def __enter__(self) -> CompileCounterWithBackend:
        torch._dynamo.reset()
        self.counter = CompileCounterWithBackend(self.backend)
        self.stance = torch.compiler.set_stance("default", force_backend=self.counter)
        return self.counter

    def __exit__(self, *_) -> None:
        self.stance.__exit__(None, None, None)
        torch._dynamo.reset()


def compiled(load, family: str, dtype: torch.dtype = torch.float64, **changes) -> grpo.Policy:
    policy = grpo.Policy(load(family, dtype, **changes), 0.8, 4)
    compile_parts(policy, list(next(m for m in policy.modules() if isinstance(m, torch.nn.ModuleList))))
    return policy


@pytest.mark.parametrize("family", ["qwen2", "gpt_neox"])
def test_many_shapes_take_few_graphs(load, family):
    """One graph of a block serves all layers and shapes of two rows or more, for each of training and no gradient."""
    batch, counts = random_batch(), {}
    for layers in (2, 3):
        policy, plain = (make(load, family, num_hidden_layers=layers) for make in (compiled, plain_policy))
        names = set(policy.state_dict())
        assert names == set(plain.state_dict())
        with Counted() as counter:
            for rows in (range(8), range(2, 7), range(1, 4), [0, 2, 4, 6, 7], range(3, 8)):
                ours, theirs = (p(*batch.collate(list(rows))) for p in (policy, plain))
                assert ours.keys() == theirs.keys() == {"logprobs", "detached_entropies"}
                assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)
                ours["logprobs"].sum().backward(), theirs["logprobs"].sum().backward()
                assert relative(gradient_of(policy), gradient_of(plain)) < 1e-6
                with torch.no_grad():
                    policy(*batch.collate(list(rows)))
        counts[layers] = counter.frame_count
    assert counts[2] == counts[3] <= 12


def plain_policy(load, family: str, **changes) -> grpo.Policy:
    return grpo.Policy(load(family, torch.float64, **changes), 0.8, 4)


def test_generate_runs_as_it_is(load):
    """And leaves the compiler as it was."""
    policy = compiled(load, "qwen2", torch.float32)
    args = grpo.Args(max_response_length=5)
    with Counted() as counter:
        uniforms = torch.rand(2, 5, dtype=torch.float64)
        responses, _ = grpo.generate(policy.model, [[3, 4, 5], [6]], uniforms, [1], args, lambda: False)
        assert responses and counter.frame_count == 0
        with torch.no_grad():
            policy(*random_batch().collate([0, 1]))
        assert counter.frame_count > 0


def test_half_precision(load):
    """Under autocast a compiled policy computes what it does otherwise, as far as bfloat16 goes."""
    both = [grpo.Policy(load("qwen2"), 0.8, 4), compiled(load, "qwen2", torch.float32)]
    found, batch = [], random_batch()
    with Counted("aot_eager") as counter:
        for policy in both:
            with torch.autocast("cpu", torch.bfloat16):
                outputs = policy(*batch.collate(list(range(8))))
            outputs["logprobs"].sum().backward()
            found.append((*(x.detach() for x in outputs.values()), gradient_of(policy)))
        assert counter.frame_count > 0
    assert all(ours.dtype == torch.float32 and relative(ours, theirs) < 0.005 for ours, theirs in zip(*found))


def without_compiler() -> None:
    torch._inductor.config.cpp.cxx = ("/no/such/compiler",)  # torch reads $CXX when it is imported


def test_no_compiler_is_one_line(base, tmp_path):  # noqa: F811
    values = {**base["reward_model"], "output_dir": str(tmp_path), "run_name": "none", "compile": True}
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = run(values, 2, script="reward_model", environment=environment, place=without_compiler)
    lines = [line for line in done.err.splitlines() if "error" in line.lower()]
    assert "Traceback" not in done.err
    assert len(lines) == 1 and lines[0].startswith("error: --compile: torch.compile does not work here (")


# ---- --attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])  # query heads that share a key
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_causal_attention_without_a_mask(load, monkeypatch, family, groups):
    """So that CUDA's flash kernel, which takes no mask, may be chosen; also where rows are padded, and compiled."""
    calls, original = [], torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        calls.append((attn_mask, dropout_p, is_causal, query.shape[1] // key.shape[1], more.get("enable_gqa", False)))
        return original(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    policy = grpo.Policy(load(family, num_key_value_heads=2 // groups), 1.0, 4)
    policy(*random_batch().collate(list(range(8))))
    policy.model.train()
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy(*random_batch().collate(list(range(8))))["logprobs"].sum().backward()
    assert set(calls) == {(None, 0.0, True, groups, groups > 1)} and len(calls) == 6  # keys are not repeated


def test_attention_changes_the_way_only(load):
    found, batch = [], random_batch()
    for name in ("sdpa", "eager"):
        policy = grpo.Policy(load("gpt_neox", torch.float64), 1.0, 4)
        set_attention(policy.model, name)
        logprobs = policy(*batch.collate(list(range(8))))["logprobs"]
        logprobs.sum().backward()
        found.append((logprobs.detach(), gradient_of(policy)))
    assert all(0 < relative(ours, theirs) < 1e-5 for ours, theirs in zip(*found))  # one has a softmax in float32


def test_attention_of_all_models(base, tmp_path):  # noqa: F811
    """Policy, reference, critic and reward model by eager attention: one run, the same numbers, nothing saved of it."""
    values = {**base["ppo"], "output_dir": str(tmp_path), "run_name": "sdpa", "total_episodes": 16, "eval_every": 0}
    values |= {"precision": "float32"}
    eager = {**values, "run_name": "eager", "attention": "eager"}
    run(values, script="ppo"), run(eager, script="ppo")
    for ours, theirs in zip(metrics_of(eager), metrics_of(values), strict=True):
        assert all(x is None or math.isclose(x, theirs[key], rel_tol=1e-3, abs_tol=1e-5) for key, x in ours.items())
    assert metrics_of(eager) != metrics_of(values)
    assert "eager" not in (helpers.folder_of(eager) / "final" / "config.json").read_text()


FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


@pytest.mark.parametrize("name, why", [*((x, "takes a GPU") for x in (*FLASH, "flex_attention")), ("eager", "not in")])
def test_attention_that_cannot_be(base, tmp_path, name, why):  # noqa: F811
    """On a CPU in float64, before a model is loaded."""
    values = {**base["grpo"], "output_dir": str(tmp_path), "run_name": "none", "attention": name}
    (line,) = run(values, 2).errors
    assert line.startswith(f"error: --attention {name}: {why}")


def test_attention_that_is_not_installed(load, capsys, monkeypatch):
    for name, model in (("flash_attention_2", load("qwen2")), ("flex_attention", load("gpt2"))):
        with pytest.raises(SystemExit) as ended:
            set_attention(model, name)
        assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"error: --attention {name}: ")
    model = load("qwen2")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda *_: False)
    with pytest.raises(SystemExit):
        set_attention(model, "eager")
    assert "Qwen2ForCausalLM" in capsys.readouterr().err and model.device == CPU
