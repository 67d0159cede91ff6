"""What the policy keeps of the logits: those of a chunk without a gradient, and with
--gradient_checkpointing; what is logged of a GPU's memory; that scripts/memory.py counts what torch
allocates.
"""

import subprocess

import forked_python
import pytest
import torch
from helpers import ROOT
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

import grpo
import utils

VOCABULARY = 4096
ROWS = 16
LENGTH = 256
LOGITS = 4 * VOCABULARY * ROWS * LENGTH  # bytes of the log-probs of all tokens, float32


def peak_bytes(work) -> int:
    """The most that torch has allocated at one time while `work` ran, above what was there
    before.
    """
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()
    now = most = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += size
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    "checkpointing, grad, least, most",
    [
        (False, False, 0.0, 0.6),  # four tensors of a chunk of eight
        (True, True, 0.0, 0.8),
        (False, True, 1.0, 1.8),  # the log-probs of all tokens
    ],
)
def test_logits_that_are_kept(checkpointing, grad, least, most):
    """Forward and backward: peak memory as a share of the log-probs of all tokens."""
    shape = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    shape |= dict(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **shape)).train()
    policy = grpo.Policy(model, grpo.Args(gradient_checkpointing=checkpointing))
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    mask = torch.ones_like(ids, dtype=torch.bool)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def work():
        with torch.set_grad_enabled(grad):
            logprobs = policy(ids, mask)["logprobs"]
        if grad:
            logprobs.sum().backward()

    assert least < peak_bytes(work) / LOGITS < most


def test_the_peak_of_a_gpu(monkeypatch):
    """The largest of the driver's figures at the ends of a step's phases; torch's would count a
    vLLM that sleeps.
    """
    free = iter([9e9, 1e9, 2e9, 8e9, 6e9, 7e9])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 10e9))
    clock = utils.Clock(utils.World(0, 1, torch.device("cuda", 0)), 0.0)
    peaks = []
    for _ in range(2):
        clock.peak_memory_gb = 0.0
        clock.begin_phase("rollout")
        clock.begin_phase("training")
        peaks.append(clock.metrics(1)["perf/peak_memory_gb"])
    assert peaks == [9, 4]


COUNTED = """
import faulthandler, gc, sys, torch
faulthandler.dump_traceback_later(540, exit=True)
sys.path.insert(0, "tests")
import conftest
import grpo, memory
from plumbing.models.forward import checkpoint_blocks
from plumbing.models import loading
from plumbing.run import ranks
from plumbing.run.command import report_errors
from test_memory import AutoConfig, AutoModelForCausalLM, peak_bytes
torch.set_num_threads(1)

def model_and_update(checkpointing):
    shape = dict(vocab_size=8_192, hidden_size=384, intermediate_size=1536, num_hidden_layers=2)
    shape |= dict(num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **shape))
    if checkpointing:
        checkpoint_blocks(model)
    policy = grpo.Policy(model, grpo.Args(gradient_checkpointing=checkpointing))
    adam = torch.optim.AdamW(policy.parameters(), fused=True)
    ids = torch.randint(0, 1000, (4, 256))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False

    def update():
        for _ in range(2):  # micro-batches
            with torch.autocast("cpu", torch.bfloat16):
                logprobs = policy(ids, mask)["logprobs"]
            logprobs.mean().backward()
        adam.step()
        adam.zero_grad()

    return policy, update

for checkpointing in (False, True):
    with memory.memory:
        model, update = model_and_update(checkpointing)
        update()
        ranks.status.phase = str(checkpointing)
        update()
    counted = memory.memory.peaks[ranks.status.phase].total()
    model, update = model_and_update(checkpointing)  # of real numbers
    state = 12 * sum(parameter.numel() for parameter in model.parameters())  # weights and Adam's moments
    print(counted / (peak_bytes(update) + state))
    gc.collect()
tiny = "grpo --model assets/tiny --max_prompt_length 16 --max_response_length 48 --micro_batch_tokens 256 "
for line in (
    "nothing", "grpo --model nobody/none", "grpo --model Qwen/Qwen3-30B-A3B",
    tiny + "--rollout_backend hf", tiny + "--shard fsdp_offload",
    tiny + "--tools tools.py:search", tiny.replace("grpo", "distill") + "--teacher http://127.0.0.1:1",
    tiny + "--lora_rank 2 --quantize 4bit",
    tiny + "--gpus 2", tiny + "--gpus 2 --shard none --gpu_gb 6",
):
    sys.argv[1:] = line.split()
    try:
        report_errors()(memory.main)()
    except SystemExit as end:
        print("code", int(end.code))
    torch.distributed.destroy_process_group()
"""


def test_memory_counts_what_torch_allocates(tmp_path):
    """To 2 %, with and without recomputation; bad input is one line and exit code 2, what does not
    fit is 1.
    """
    script = tmp_path / "counted.py"
    script.write_text(COUNTED)
    with forked_python.python() as python:
        done = subprocess.run([python, script], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    codes = [line for line in lines if line.startswith("code")]
    assert all(0.98 < float(line) < 1.02 for line in lines[:2]), done.stdout + done.stderr
    assert codes == [f"code {code}" for code in (2, 2, 2, 2, 2, 2, 2, 0, 0, 1)], (
        done.stdout + done.stderr
    )
    assert done.stderr.count("error: ") == 7 and "Traceback" not in done.stderr
    assert "--model nobody/none: " in done.stderr
