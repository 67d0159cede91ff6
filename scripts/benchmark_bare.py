"""What grpo.py's passes cost beside bare ones of transformers. `scripts/benchmark.py bare` calls it."""

import time
from typing import Callable

import torch
import transformers
from torch.nn.functional import cross_entropy

import grpo

REPEATS = 5  # of each pass
KINDS = "transformers", "grpo.py", "grpo.py --recompute_logits yes"
# A model, sequences, and the tokens of each.
UPDATES = ("39m", 8, 256), ("10m-small", 8, 256)
ROLLOUTS = ("assets/tiny", 256, 48), ("10m-rollout", 64, 96), ("10m-large", 32, 64)
RANKS = {  # flags of the runs of one and two ranks, with a KL to a reference
    "model": "10m-small", "rollout_batch_size": 8, "mini_batch_size": 64, "num_epochs": 1, "kl_coef": 0.001,
    "max_response_length": 96, "min_response_length": 96, "total_episodes": 64 * 5,
}  # fmt: skip


def bare_passes(model, ids: torch.Tensor, stops: int) -> dict[str, Callable]:
    """Return transformers' own sampling, log-probs with whole logits, and their backward pass; ids: (N, L)."""
    vocabulary, length = model.config.vocab_size, ids.shape[1]
    sampling = transformers.GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=length - 1, min_new_tokens=length - 1, eos_token_id=stops,
        pad_token_id=stops,
    )  # fmt: skip

    def logprobs():
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        return -cross_entropy(logits.view(-1, vocabulary), ids[:, 1:].flatten(), reduction="none")

    return {
        "time/rollout": lambda: model.generate(ids[:, :1], generation_config=sampling),
        "time/logprobs": torch.no_grad()(logprobs),
        "time/training": lambda: logprobs().mean().backward(),
    }


def our_passes(model, ids: torch.Tensor, stops: int, recompute: bool) -> dict[str, Callable]:
    """Return the same by grpo.py; the update's pass has the entropies that a run logs, too."""
    args = grpo.Args(max_response_length=ids.shape[1] - 1, min_response_length=ids.shape[1] - 1)
    policy, queries = grpo.Policy(model, 1.0, 512, recompute_logits=recompute), ids[:, :1].tolist()
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    uniforms = torch.rand(len(ids), ids.shape[1] - 1, dtype=torch.float64)
    return {
        "time/rollout": lambda: grpo.generate(model, queries, uniforms, [stops], args, lambda: False),
        "time/logprobs": torch.no_grad()(lambda: policy(ids, mask, entropy=False)["logprobs"]),
        "time/training": lambda: policy(ids, mask)["logprobs"].mean().backward(),
    }


def time_passes(folder: str, who: str, names: list[str], sequences: int, length: int) -> list[dict[str, float]]:
    """Return the seconds of passes of a model in a folder, repeat by repeat.

    Args:
        who: of KINDS.
        names: of the passes.
        length: tokens of a response; the prompt is one token.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = torch.randint(2, model.config.vocab_size, (sequences, length + 1), device=device)
    model, stops = model.to(device), model.config.eos_token_id
    recompute = who.endswith("yes")
    passes = bare_passes(model, ids, stops) if who == "transformers" else our_passes(model, ids, stops, recompute)
    found = [{} for _ in range(REPEATS)]
    for name in names:
        for row in found:
            begin = time.perf_counter()
            passes[name]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            row[name] = time.perf_counter() - begin
    return [{**row, "time/whole": sum(row.values())} for row in found]
