"""What verl's own code makes of the inputs of agree.py. It runs in an environment that has verl,
and imports nothing of this project:

    VERL_PYTHON tests/agreement/of_verl.py FOLDER   # reads what agree.write_inputs wrote there, writes verl.safetensors

Advantages, KL, losses, their aggregation and the weights of rollout correction are verl's
functions, as its workers call them. The models' forward passes are transformers'.
"""

import json
import os
import sys
from importlib import metadata

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.utils import torch_functional
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.config import ActorConfig, CriticConfig
from verl.workers.utils.losses import ppo_loss, value_loss

FOLDER = sys.argv[1]
X = load_file(os.path.join(FOLDER, "inputs.safetensors"))
with open(os.path.join(FOLDER, "settings.json")) as file:
    SETTINGS = json.load(file)
MASK = X["mask"].long()
TURNS = X["turn_mask"].long()
N, T = MASK.shape
TEMPERATURE = SETTINGS["temperature"]
BETA = SETTINGS["beta"]
torch.set_default_dtype(torch.float64)

PROMPTS = np.arange(N) // SETTINGS["group_size"]
LAST = MASK * (MASK.cumsum(1) == MASK.sum(1, keepdim=True))
SCORES = LAST * X["scores"][:, None]  # of tokens
IDS = [
    torch.cat([query, ids[m.bool()]]) for query, ids, m in zip(X["prompts"], X["responses"], MASK)
]


def gradient(loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, leaf)[0]


def outcome_advantages(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the advantages (N, T) of those that know no critic."""
    given = {"token_level_rewards": SCORES, "response_mask": mask}
    grouped = {**given, "index": PROMPTS}
    greedy = X["greedy_scores"]
    made = {
        "group": core_algos.compute_grpo_outcome_advantage(**grouped, norm_adv_by_std_in_grpo=True),
        "none": core_algos.compute_grpo_outcome_advantage(**grouped, norm_adv_by_std_in_grpo=False),
        "RLOO": core_algos.compute_rloo_outcome_advantage(**grouped),
        "OPO": core_algos.compute_opo_outcome_advantage(**grouped),
        "ReMax": core_algos.compute_remax_outcome_advantage(**given, reward_baselines=greedy),
        "REINFORCE++": core_algos.compute_reinforce_plus_plus_outcome_advantage(
            **given, config=AlgoConfig(gamma=0.9)
        ),
        "REINFORCE++-baseline": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            **grouped
        ),
    }
    # ReMax has them in holes
    return {f"advantages: {name}": estimate * mask for name, (estimate, _) in made.items()}


def advantages() -> dict[str, torch.Tensor]:
    quantities = outcome_advantages(MASK)
    for name in ("group", "none", "RLOO"):
        # each response has a first token
        quantities[f"advantages: {name}"] = quantities[f"advantages: {name}"][:, 0]
    passk, _ = core_algos.compute_grpo_passk_outcome_advantage(
        SCORES, MASK, PROMPTS, config=AlgoConfig(norm_adv_by_std_in_grpo=True)
    )
    quantities["advantages: passk"] = passk[:, 0]
    quantities |= {f"{name}, conversations": x for name, x in outcome_advantages(TURNS).items()}
    whitened, returns = core_algos.compute_gae_advantage_return(
        X["rewards"], X["old_values"], TURNS, 0.97, 0.9
    )
    quantities["advantages: GAE, whitened"] = whitened * TURNS
    quantities["returns of GAE"] = returns * TURNS
    quantities["whitening"] = torch_functional.masked_whiten(X["rewards"], TURNS) * TURNS
    rewards = core_algos.compute_rewards(SCORES, X["old_logprobs"], X["ref_logprobs"], BETA)
    quantities["rewards of tokens, KL taken off"] = rewards * MASK
    return quantities


def kl_and_values() -> dict[str, torch.Tensor]:
    quantities = {}
    for name in ("k1", "abs", "k2", "k3"):
        leaf = X["logprobs"].clone().requires_grad_()
        kl = core_algos.kl_penalty(leaf, X["ref_logprobs"], name)
        quantities[f"KL: {name}"] = kl * MASK
        quantities[f"KL: {name}, gradient"] = gradient(kl.sum(), leaf) * MASK
    unclamped = torch.exp(X["ref_logprobs"] - X["logprobs"]) + X["logprobs"] - X["ref_logprobs"] - 1
    # the controller's input
    mean_kl = torch_functional.masked_mean(unclamped, MASK, 1).mean().item()
    controllers = [core_algos.AdaptiveKLController(BETA, 0.5, 1000) for _ in range(3)]
    for controller, kl in zip(controllers, (mean_kl, 0.52, 0.01)):
        controller.update(kl, N)
    quantities["KL controller"] = torch.tensor([controller.value for controller in controllers])
    for clip, name in ((0.2, "value loss"), (1e9, "value loss, no clip")):
        leaf = X["values"].clone().requires_grad_()
        loss, _ = core_algos.compute_value_loss(leaf, X["returns"], X["old_values"], MASK, clip)
        quantities[name] = loss
        quantities[f"{name}, gradient"] = gradient(loss, leaf)
    log_ratio = X["old_logprobs"] - X["rollout_logprobs"]
    for kind, level, cap in (
        ("truncate", "token", 2.0),
        ("mask", "token", f"{1 / 1.5}_1.5"),
        ("sequence_mask", "sequence", "1e-9_3.0"),
    ):
        quantities[f"rollout correction: {kind}"] = compute_rollout_correction_weights(
            log_ratio, MASK, level, cap
        )[0]
    quantities["mask of rollout correction: geometric"] = compute_rollout_rejection_mask(
        log_ratio, MASK, "seq_mean_k1", f"{1 / 1.1}_1.1"
    )[0].double()
    quantities["entropies of logits"] = torch_functional.entropy_from_logits(
        X["logits"] / TEMPERATURE
    )
    return quantities


# ---- steps ---------------------------------------------------------------------------------------


def load(name: str, family=transformers.AutoModelForCausalLM) -> torch.nn.Module:
    return family.from_pretrained(os.path.join(FOLDER, name), dtype=torch.float64)


def forward(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return log-probabilities of the next token and entropies at all tokens, one response behind
    the other.
    """
    quantities = {"log_probs": [], "entropy": []}
    for ids in IDS:
        logits = model(input_ids=ids[None]).logits[0] / TEMPERATURE
        quantities["log_probs"].append(torch_functional.logprobs_from_logits(logits, ids.roll(-1)))
        quantities["entropy"].append(torch_functional.entropy_from_logits(logits))
    return {name: torch.cat(parts) for name, parts in quantities.items()}


def forward_values(model: torch.nn.Module) -> torch.Tensor:
    bodies = [model.base_model(input_ids=ids[None]).last_hidden_state[0] for ids in IDS]
    return torch.cat([model.score(body)[:, 0] for body in bodies])


def nested(x: torch.Tensor) -> torch.Tensor:
    """Return (N, T) without its padding, as verl's workers hold it."""
    return torch.nested.as_nested_tensor(
        [row[m.bool()] for row, m in zip(x, MASK)], layout=torch.jagged
    )


def of_responses(flat: torch.Tensor) -> torch.Tensor:
    """Return what predicts each response token: of all tokens -> (N, T)."""
    rows = flat.detach().split([len(ids) for ids in IDS])
    Q = X["prompts"].shape[1]
    return torch.stack(
        [torch.nn.functional.pad(row[Q - 1 : -1], (0, T + Q - len(row))) for row in rows]
    )


def to_data(**tokens: torch.Tensor) -> TensorDict:
    fields = {
        name: nested(x)
        for name, x in {"response_mask": MASK, "responses": X["responses"], **tokens}.items()
    }
    prompts = torch.nested.as_nested_tensor(list(X["prompts"]), layout=torch.jagged)
    batch = TensorDict({**fields, "prompts": prompts}, batch_size=N)
    assign_non_tensor(
        batch,
        dp_size=1,
        batch_num_tokens=MASK.sum().item(),
        global_batch_size=N,
        max_response_len=T,
    )
    return batch


def actor_loss(
    fields: dict, logprobs: dict, old: torch.Tensor, reference: torch.Tensor, values: torch.Tensor
):
    """Return verl's loss of the actor, and the returns that its critic is trained to."""
    fields = dict(fields)
    name = fields.pop("adv", "grpo")
    level = fields.pop("rollout_is", None)
    cap = fields.pop("rollout_is_threshold", 0)
    if fields.pop("bypass_mode", False):  # the ratio is to the policy that sampled
        old = X["rollout_logprobs"]
    returns = None
    if name == "gae":
        rewards = core_algos.compute_rewards(SCORES, old, reference, BETA) * MASK
        estimate, returns = core_algos.compute_gae_advantage_return(
            rewards, values, MASK, 1.0, 0.95
        )
    elif name == "rloo":
        estimate, _ = core_algos.compute_rloo_outcome_advantage(SCORES, MASK, PROMPTS)
    else:
        estimate, _ = core_algos.compute_grpo_outcome_advantage(
            SCORES, MASK, PROMPTS, norm_adv_by_std_in_grpo=False
        )
    more = {}
    if level is not None:
        log_ratio = old - X["rollout_logprobs"]
        more["rollout_is_weights"], _ = compute_rollout_correction_weights(
            log_ratio, MASK, level, cap
        )
    if fields.get("loss_scale_factor") == "tokens":
        fields["loss_scale_factor"] = T
    policy_loss = {"loss_mode": fields.pop("loss_mode", "vanilla")}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        **{
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.2,
            "clip_ratio_c": 1e9,
            "policy_loss": policy_loss,
            **fields,
        },
    )
    batch = to_data(old_log_probs=old, advantages=estimate, ref_log_prob=reference, **more)
    return ppo_loss(config, logprobs, batch)[0], returns


def given(logprobs: torch.Tensor) -> torch.Tensor:
    """Return (N, T) as a model's output: of all tokens, each where its token is predicted."""
    rows = [
        (torch.zeros(X["prompts"].shape[1] - 1), row[m.bool()], torch.zeros(1))
        for row, m in zip(logprobs, MASK)
    ]
    return torch.cat([x for row in rows for x in row])


def steps() -> dict[str, torch.Tensor]:
    quantities = {}
    old = load("old")
    reference = load("reference")
    with torch.no_grad():
        old_logprobs, ref_logprobs = (
            of_responses(forward(model)["log_probs"]) for model in (old, reference)
        )
        values = of_responses(
            forward_values(load("critic_old", transformers.AutoModelForSequenceClassification))
        )
    for step, fields in SETTINGS["verl"].items():
        if not fields.get("entropy_coeff") and "adv" not in fields:
            leaf = X["logprobs"].clone().requires_grad_()
            loss, _ = actor_loss(
                fields, {"log_probs": given(leaf)}, X["old_logprobs"], X["ref_logprobs"], None
            )
            quantities[f"loss: {step}"] = loss
            quantities[f"gradient of the log-probs: {step}"] = gradient(loss, leaf)
        model = load("new")
        loss, returns = actor_loss(fields, forward(model), old_logprobs, ref_logprobs, values)
        loss.backward()
        quantities[f"gradient of the parameters: {step}"] = torch.cat(
            [p.grad.flatten() for p in model.parameters()]
        )
        if returns is not None:
            critic = load("critic_new", transformers.AutoModelForSequenceClassification)
            config = CriticConfig(
                strategy="fsdp",
                use_dynamic_bsz=True,
                rollout_n=1,
                cliprange_value=0.2,
                loss_agg_mode="token-mean",
            )
            batch = to_data(values=values, returns=returns)
            value_loss(config, {"values": forward_values(critic)}, batch)[0].backward()
            gradients = [p.grad.flatten() for p in critic.parameters()]
            quantities[f"gradient of the parameters: {step}, critic"] = torch.cat(gradients)
    return quantities


if __name__ == "__main__":
    results = {**advantages(), **kl_and_values(), **steps()}
    results = {name: x.detach().contiguous() for name, x in results.items()}
    save_file(
        results, os.path.join(FOLDER, "verl.safetensors"), {"version": metadata.version("verl")}
    )
