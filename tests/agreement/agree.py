"""Compare the equations and whole steps of grpo.py, rloo.py and ppo.py, and the divergences of
distill.py, with TRL's and verl's own code, on the same random inputs, in float64; docs/evidence.md
has a table.

    python tests/agreement/agree.py --trl_python trl-venv/bin/python --verl_python verl-venv/bin/python

The inputs and small random models are files in a folder. of_trl.py and of_verl.py, each run by the
Python of an environment that has the package, make quantities of them by the functions installed
there; the command stores these next to this file. `ours` makes the same quantities, by name, and
test_agree.py compares. Of each entry of steps.yaml three are made:

- "loss" and "gradient of the log-probs": of given log-probs, with ratios far outside of all clip
  ranges,
- "gradient of the parameters": of a whole second update on a rollout. Ours is `main` of the script,
  from the scores and token ids of a batch on; replaced are the rollout, what is read and written,
  and the first update of the weights.
"""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
from unittest import mock

import torch
import transformers
import tyro
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import distill
import grpo
import ppo
import rloo
import utils
from plumbing.models import tokenizer
from plumbing.rollout.batch import Batch, Sample
from plumbing.rollout.sampler import Experience
from plumbing.run import setup

FOLDER = os.path.dirname(os.path.abspath(__file__))
PROMPTS = 3
GROUP_SIZE = 4
TOKENS = 6
VOCABULARY = 12
HIDDEN_SIZE = 8
TEMPERATURE = 0.75  # a power of two times an integer: verl holds it in float32
BETA = 0.125

MEAN = "seq-mean-token-mean"  # verl's name
# Advantages are not scaled, as TRL's have another eps.
with open(os.path.join(FOLDER, "steps.yaml")) as file:
    STEPS = yaml.safe_load(file)

# What is meant to be another number: {who: {quantity: why}}. Where `ours` has a "QUANTITY, as WHO
# has it", with the other choice made, that is compared, too.
EPS = "it adds 1e-4 to the standard deviation; here it is 1e-6, as in verl, so that scores close together count"
CLAMP = "it clamps the value of k3 at 10, where the gradient becomes 0 exactly for tokens that ran away furthest"
RATIO = "it weighs the KL by the ratio (use_bias_correction_kl, arXiv:2512.02556), as here `--kl_weighting ratio` does"
DELIBERATE = {
    "trl": {
        "advantages: group": EPS,
        "advantages: batch": EPS,
        "KL: k3 by TRL's default, gradient": RATIO,
    },
    "verl": {
        "KL: k3": CLAMP,
        "KL: k3, gradient": CLAMP,
        "loss: GRPO, KL k3": CLAMP,
        "gradient of the log-probs: GRPO, KL k3": CLAMP,
    },
}
# verl adds 1e-8 to counts it divides by, in whitening and in means of responses: these agree to
# about that.
COUNTS = {"whitening", "advantages: REINFORCE++", "advantages: REINFORCE++-baseline"}
COUNTS |= {f"advantages: REINFORCE++{kind}, conversations" for kind in ("", "-baseline")}
COUNTS |= {"advantages: GAE, whitened", "gradient of the parameters: PPO, KL in the reward"}
WAYS = ("loss", "gradient of the log-probs", "gradient of the parameters")
COUNTS |= {
    f"{way}: {step}"
    for way in WAYS
    for step in STEPS
    if MEAN in STEPS[step].get("verl", {}).values()
}


# ---- the inputs ----------------------------------------------------------------------------------


def write_inputs(folder: str) -> None:
    """Write inputs.safetensors, settings.json and the models old, new, reference, critic_old and
    critic_new.

    The numbers are numpy's, which any machine draws alike. Prompts are of one length: TRL pads them
    on the left without position ids, which rotary positions make up for but for their rounding.
    """
    numbers = utils.generator("agree", 1)
    G = GROUP_SIZE
    T = TOKENS
    V = VOCABULARY
    N = PROMPTS * G

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.from_numpy(numbers.standard_normal(shape)) * scale

    # LayerNorm is in float64 where the model is; the RMSNorm of most families is in float32.
    config = transformers.GPTNeoXConfig(
        vocab_size=V,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=128,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        num_labels=1,
    )
    causal = transformers.AutoModelForCausalLM
    scalar = transformers.AutoModelForSequenceClassification
    names = {
        "old": causal,
        "new": causal,
        "reference": causal,
        "critic_old": scalar,
        "critic_new": scalar,
    }
    transformers.logging.disable_progress_bar()
    weights: dict[type, list[Tensor]] = {}
    for name, family in names.items():
        model = family.from_config(config, dtype=torch.float64)
        parameters = list(model.parameters())
        base = weights.setdefault(
            family, [normal(*p.shape, scale=p.shape[-1] ** -0.5) for p in parameters]
        )
        moved = 0.0 if name.endswith("old") else 0.25
        for parameter, value in zip(parameters, base):
            parameter.data = value + moved * normal(*value.shape, scale=value.shape[-1] ** -0.5)
        model.save_pretrained(os.path.join(folder, name))

    lengths = torch.from_numpy(numbers.integers(1, T + 1, N))
    lengths[:2] = torch.tensor([T, 1])
    mask = torch.arange(T) < lengths[:, None]
    # exact in float32, in which TRL holds them
    scores = torch.from_numpy(numbers.integers(-8, 9, N)).double() / 8
    scores[-G:] = 0.375  # a group without differences
    missing = scores.clone()
    missing[1] = torch.nan
    missing[G : 2 * G - 1] = torch.nan
    prompts = torch.from_numpy(numbers.integers(2, V, (PROMPTS, 3))).repeat_interleave(G, 0)
    responses = torch.where(mask, torch.from_numpy(numbers.integers(2, V, (N, T))), 0)
    old = causal.from_pretrained(os.path.join(folder, "old"), dtype=torch.float64)
    with torch.no_grad():
        logits = old(torch.cat([prompts, responses], 1)).logits[:, prompts.shape[1] - 1 : -1]
    old_logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(-1, responses[..., None])[..., 0]
    # of a row: inside of clip ranges or not
    spread = torch.tensor([1e-3, 0.02, 0.3, 1.0]).double().repeat(N)[:N, None]
    far = 4 * (torch.from_numpy(numbers.random((N, T))) < 0.05)  # so far that k3 is above 10
    turns = mask & (torch.from_numpy(numbers.random((N, T))) < 0.7)
    turns[torch.arange(N), lengths - 1] = True
    inputs = {
        "scores": scores,
        "scores_missing": missing,
        "greedy_scores": ((normal(N // G) * 8).round() / 8).repeat_interleave(G),
        "mask": mask,
        "turn_mask": turns,
        "prompts": prompts,
        "responses": responses,
        "logits": logits,
        "old_logprobs": old_logprobs,
        "logprobs": old_logprobs + spread * normal(N, T),
        "ref_logprobs": old_logprobs + 0.5 * normal(N, T) + far,
        "rollout_logprobs": old_logprobs + 0.3 * normal(N, T),
        "old_values": normal(N, T),
        "values": normal(N, T),
        "returns": normal(N, T),
        "rewards": normal(N, T),
    }
    save_file(
        {name: x.contiguous() for name, x in inputs.items()},
        os.path.join(folder, "inputs.safetensors"),
    )
    settings = {"group_size": G, "temperature": TEMPERATURE, "beta": BETA}
    for who in ("trl", "verl"):
        settings[who] = {name: step[who] for name, step in STEPS.items() if who in step}
    settings["scripts"] = {name: step["ours"][0] for name, step in STEPS.items()}
    with open(os.path.join(folder, "settings.json"), "w") as file:
        json.dump(settings, file)


# ---- our quantities ------------------------------------------------------------------------------


def ours(folder: str) -> dict[str, Tensor]:
    """Return all quantities, by the functions of the scripts and, of STEPS, by their `main`."""
    x = load_file(os.path.join(folder, "inputs.safetensors"))
    quantities = {**advantages(x, GROUP_SIZE), **kl_and_values(x)}
    for step in STEPS:
        quantities |= loss_of_logprobs(step, folder, x, GROUP_SIZE)
        quantities |= gradient_of_parameters(step, folder, x, GROUP_SIZE)
    return quantities


def advantages(x: dict[str, Tensor], G: int) -> dict[str, Tensor]:
    quantities = {}
    mask = x["mask"]
    T = x["mask"].shape[1]
    spread = {
        "group": x["scores"].view(-1, G).std(1).repeat_interleave(G),
        "batch": x["scores"].std(),
    }
    for scale in ("group", "batch", "none"):
        quantities[f"advantages: {scale}"] = grpo.group_advantages(x["scores"], G, scale)
        if scale in spread:
            other_eps = (spread[scale] + 1e-6) / (spread[scale] + 1e-4)
            quantities[f"advantages: {scale}, as trl has it"] = (
                quantities[f"advantages: {scale}"] * other_eps
            )
    quantities["advantages: passk"] = grpo.group_advantages(x["scores"], G, "passk")
    quantities["advantages: none, scores missing"] = grpo.group_advantages(
        x["scores_missing"], G, "none"
    )

    def of_tokens(
        kind: str, scores: str = "scores", kl: Tensor | None = None, mask: Tensor = mask
    ) -> Tensor:
        gamma = 0.9 if kind == "reinforce++" else 1.0
        rewards = rloo.token_rewards(x[scores], kl, mask, BETA)
        return rloo.token_advantages(kind, x[scores], x["greedy_scores"], rewards, mask, G, gamma)

    # conversations: observations leave holes
    turns, kl = x["turn_mask"], x["old_logprobs"] - x["ref_logprobs"]
    for scale in ("group", "none"):
        estimate = quantities[f"advantages: {scale}"][:, None]
        quantities[f"advantages: {scale}, conversations"] = torch.where(turns, estimate, 0.0)
    for name in ("RLOO", "OPO", "ReMax", "REINFORCE++", "REINFORCE++-baseline"):
        quantities[f"advantages: {name}"] = of_tokens(name.lower())
        quantities[f"advantages: {name}, conversations"] = of_tokens(name.lower(), mask=turns)
    quantities["advantages: RLOO"] = quantities["advantages: RLOO"][:, 0]
    quantities["advantages: RLOO, scores missing"] = of_tokens("rloo", "scores_missing")[:, 0]
    quantities["advantages: RLOO, KL in the reward"] = of_tokens("rloo", kl=kl)[:, 0]
    gae, quantities["returns of GAE"] = ppo.gae(x["rewards"], x["old_values"], turns, 0.97, 0.9)
    quantities["advantages: GAE, whitened"] = ppo.whiten(gae, turns)
    quantities["whitening"] = ppo.whiten(x["rewards"], turns)
    quantities["rewards of tokens, KL taken off"] = ppo.token_rewards(x["scores"], kl, mask, BETA)
    assert all(value.shape in ((len(mask),), (len(mask), T)) for value in quantities.values())
    return quantities


def with_gradient(function, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a function makes of a tensor, and the gradient of its sum."""
    leaf = x.clone().requires_grad_()
    value = function(leaf)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def kl_and_values(x: dict[str, Tensor]) -> dict[str, Tensor]:
    quantities = {}
    mask = x["mask"]
    estimate = lambda kind: lambda p: grpo.kl_estimate(p, x["ref_logprobs"], kind)
    k3, default = estimate("k3"), "KL: k3 by TRL's default"
    weighted = lambda p: k3(p) * (p - x["old_logprobs"]).exp()
    cases = [(f"KL: {kind}", "", estimate(kind)) for kind in ("k1", "abs", "k2", "k3")]
    cases += [("KL: k3", ", as verl has it", lambda p: k3(p).clamp(max=10))]
    cases += [(default, "", k3), (default, ", as trl has it", weighted)]
    for name, choice, function in cases:
        kl, gradient = with_gradient(function, x["logprobs"])
        quantities[f"{name}{choice}"] = kl * mask
        quantities[f"{name}, gradient{choice}"] = gradient * mask
    mean_kl = grpo.masked_mean(quantities["KL: k3"], mask, 1).mean().item()
    flags = grpo.Args(kl_coef=BETA, kl_target=0.5, kl_horizon=1000)
    controllers = [utils.AdaptiveKL(flags, {}) for _ in range(3)]
    for controller, kl in zip(controllers, (mean_kl, 0.52, 0.01)):
        controller.update(kl, len(mask))
    beta = [controller.coef for controller in controllers]
    quantities["KL controller"] = torch.tensor(beta, dtype=torch.float64)
    losses = lambda values, clip: ppo.value_loss(values, x["old_values"], x["returns"], clip)[0]
    for name, clip in (("value loss", 0.2), ("value loss, no clip", 0.0)):
        mean = lambda values, clip=clip: reduction("token", mask)(losses(values, clip), mask)
        quantities[name], quantities[f"{name}, gradient"] = with_gradient(mean, x["values"])
    for kind, cap in (("truncate", 2.0), ("mask", 1.5), ("sequence_mask", 3.0)):
        weights = grpo.correction_weights(x["old_logprobs"], x["rollout_logprobs"], mask, kind, cap)
        quantities[f"rollout correction: {kind}"] = weights * mask
    # verl leaves the tokens out of the mask, by which it divides.
    quantities["mask of rollout correction: geometric"] = mask * grpo.correction_weights(
        x["old_logprobs"], x["rollout_logprobs"], mask, "geometric", 1.1
    )
    quantities["entropies of logits"] = grpo.entropy_from_logprobs(
        (x["logits"] / TEMPERATURE).log_softmax(-1)
    )
    for beta in (0.0, 0.25, 0.5, 0.75, 1.0):
        leaf = x["logits"].clone().requires_grad_()
        student, teacher = (
            (logits / TEMPERATURE).log_softmax(-1) for logits in (leaf, x["logits"].flip(-1))
        )
        kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
        loss = grpo.masked_sum(distill.divergence(student, teacher, kind, beta), mask) / mask.sum()
        quantities[f"distillation: beta {beta}"] = loss.detach()
        (quantities[f"distillation: beta {beta}, gradient"],) = torch.autograd.grad(loss, leaf)
    return quantities


def arguments(step: str, folder: str, x: dict[str, Tensor], G: int):
    """Return the module of a step's script and its arguments: two updates on a rollout, each in
    several passes.
    """
    script, flags = STEPS[step]["ours"]
    N, T = x["mask"].shape
    module = importlib.import_module(script)
    own = {
        "grpo": {"advantage_scale": "none", "kl_coef": 0.0},
        "rloo": {},
        "ppo": {"value_model": os.path.join(folder, "critic_old")},
    }[script]
    same = {
        "model": os.path.join(folder, "old"),
        "ref_model": os.path.join(folder, "reference"),
        "precision": "float64",
        "num_epochs": 2,
        "total_episodes": N,
        "mini_batch_size": N,
        "rollout_batch_size": N // G,
        "group_size": G,
        "max_response_length": T,
        "temperature": TEMPERATURE,
        "eval_every": 0,
        "rollout_backend": "hf",
        "micro_batch_tokens": 5 * T,
    }
    return module, module.Args(**{**same, **own, **flags})


def reduction(how: str, mask: Tensor):
    """Return `grpo.loss_reduction` for all responses in one update."""
    everything = list(range(len(mask)))
    return grpo.loss_reduction(how, mask, everything, [(0, everything)], mask.shape[1])


def loss_of_logprobs(step: str, folder: str, x: dict[str, Tensor], G: int) -> dict[str, Tensor]:
    """Return a step's loss and its gradient (N, T) by the equations of its script, of given
    log-probabilities.

    A step that is an earlier one with other advantages, or with an entropy, has no such loss.
    """
    module, args = arguments(step, folder, x, G)
    ratio_of_responses = getattr(args, "ratio", "token") == "sequence"
    if (
        args.entropy_coef
        or module is ppo
        or module is rloo
        and (args.kl_coef or not ratio_of_responses)
    ):
        return {}
    mask = x["mask"]
    leaf = x["logprobs"].clone().requires_grad_()
    if module is rloo:
        rewards = rloo.token_rewards(x["scores"], None, mask, 0.0)
        advantages = rloo.token_advantages(args.advantage, x["scores"], None, rewards, mask, G, 1.0)
        log_ratio = rloo.masked_sum(leaf - x["old_logprobs"], mask, 1)[:, None].expand_as(leaf)
        losses, _ = rloo.clipped_loss(log_ratio, advantages, args.clip_low, args.clip_high)
        how = args.loss_aggregation
    else:
        variant = grpo.VARIANTS[args.loss]
        low = variant.clip_low if args.clip_low is None else args.clip_low
        high = variant.clip_high if args.clip_high is None else args.clip_high
        how = args.loss_aggregation or variant.loss_aggregation
        advantages = grpo.group_advantages(x["scores"], G, args.advantage_scale)[:, None].expand_as(
            leaf
        )
        old = x["rollout_logprobs" if "dppo" in args.loss else "old_logprobs"]
        losses, _ = grpo.policy_loss(
            leaf, old, advantages, mask, variant.token_loss, low, high, args.dual_clip
        )
    weights = grpo.correction_weights(
        x["old_logprobs"],
        x["rollout_logprobs"],
        mask,
        args.rollout_correction or "none",
        args.rollout_correction_cap or 2.0,
    )
    weights = weights * grpo.off_policy_mask(
        leaf, x["rollout_logprobs"], advantages, mask, args.off_policy_delta
    )

    reduced = reduction(how, mask)
    reduce_loss = lambda x: reduced(x, mask)
    choices = {"": reduce_loss(losses * weights)}
    if args.kl_coef:
        kl = grpo.kl_estimate(leaf, x["ref_logprobs"], args.kl_estimator)
        choices[", as verl has it"] = choices[""] + args.kl_coef * reduce_loss(kl.clamp(max=10))
        choices[""] = choices[""] + args.kl_coef * reduce_loss(kl)
    quantities = {}
    for choice, loss in choices.items():
        quantities[f"loss: {step}{choice}"] = loss.detach()
        quantities[f"gradient of the log-probs: {step}{choice}"] = torch.autograd.grad(
            loss, leaf, retain_graph=True
        )[0]
    return quantities


def gradient_of_parameters(
    step: str, folder: str, x: dict[str, Tensor], G: int
) -> dict[str, Tensor]:
    """Return the gradient of all parameters, and of the critic's, in the second update of a
    script's `main`.
    """
    module, args = arguments(step, folder, x, G)
    samples = [
        Sample(
            {"query": query.tolist(), "prompt": ""}, ids[m].tolist(), {}, stopped=True, scores={}
        )
        for query, ids, m in zip(x["prompts"], x["responses"], x["mask"])
    ]
    tokens = {"response_mask": x["mask"], "rollout_logprobs": x["rollout_logprobs"]}
    batch = Batch(samples, torch.ones(len(samples), dtype=torch.bool), {}, tokens, x["scores"])
    experience = Experience(batch, batch, {}, 0, {"position": 0}, "")
    run = mock.MagicMock(args=args, checkpoint=None, state={"step": 0}, total_steps=1)
    quantities = {}
    run.steps.return_value = [1]

    def update(optimizer: utils.Optimizer) -> None:
        """Set the weights to those of the new model in place of a first update; note the gradient
        of a second one.
        """
        critic = optimizer.prefix == "critic_"
        kind = (
            transformers.AutoModelForSequenceClassification
            if critic
            else transformers.AutoModelForCausalLM
        )
        if optimizer.updates == 0:
            new = kind.from_pretrained(
                os.path.join(folder, f"{optimizer.prefix}new"), dtype=torch.float64
            )
            for parameter, value in zip(optimizer.parameters, new.parameters()):
                parameter.data.copy_(value.data)
        else:
            name = f"gradient of the parameters: {step}" + (", critic" if critic else "")
            quantities[name] = torch.cat([p.grad.flatten() for p in optimizer.parameters])
        optimizer.adam.zero_grad()
        optimizer.updates += 1

    replaced = contextlib.ExitStack()
    for owner, name, value in (
        (module, "collect", lambda *_, **options: experience),
        (setup, "Run", lambda *_: run),
        (setup, "RewardSources", mock.MagicMock()),
        (module, "CHUNK_TOKENS", 11),
        (module, "batch_metrics", lambda *_: {}),
        (utils.Optimizer, "step", update),
        (tokenizer, "load_tokenizer", mock.MagicMock()),
        (tokenizer, "stop_token_ids", lambda *_: [1]),
        (tokenizer, "read_tokenizer", mock.MagicMock()),
        (tokenizer, "vocabulary_difference", lambda *_: ""),
        (setup, "load_train_and_eval", lambda *_: ([{"query": []}], [])),
    ):
        replaced.enter_context(mock.patch.object(owner, name, value))
    with replaced, contextlib.redirect_stdout(io.StringIO()):
        module.main(args)
    return quantities


# ---- what the others make ------------------------------------------------------------------------


def sketch(quantities: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the quantities with 8 random projections of each gradient of the parameters in its
    place, to be stored.
    """

    def projections(x: Tensor) -> Tensor:
        return torch.from_numpy(utils.generator("sketch").standard_normal((8, len(x)))) @ x

    return {name: projections(x) if "parameters" in name else x for name, x in quantities.items()}


def theirs(who: str, python: str, folder: str) -> dict[str, Tensor]:
    """Return the quantities that of_trl.py or of_verl.py makes of the inputs in a folder."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([python, os.path.join(FOLDER, f"of_{who}.py"), folder], env=env, check=True)
    return load_file(os.path.join(folder, f"{who}.safetensors"))


def main(trl_python: str = "", verl_python: str = "") -> None:
    """Store what the others make, for test_agree.py.

    Args:
        trl_python: Python of an environment with TRL; "" leaves TRL out.
        verl_python: Python of one with verl.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(folder)
        for who, python in (("trl", trl_python), ("verl", verl_python)):
            if python:
                save_file(
                    sketch(theirs(who, python, folder)), os.path.join(FOLDER, f"{who}.safetensors")
                )


if __name__ == "__main__":
    tyro.cli(main)
