"""What TRL's own code makes of the inputs of agree.py. It runs in an environment that has TRL, and
imports nothing of this project:

    TRL_PYTHON tests/agreement/of_trl.py FOLDER     # reads what agree.write_inputs wrote there, writes trl.safetensors

From the scores to the loss all is GRPOTrainer's and RLOOTrainer's. Replaced are the rollout, and
the log-probabilities: by given ones, or by those of the model from TRL's functions of logits, as
its fused head is in float32 only.
"""

import json
import os
import sys

import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import load_file, save_file
from trl.experimental.gkd import GKDTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

FOLDER = sys.argv[1]
X = load_file(os.path.join(FOLDER, "inputs.safetensors"))
with open(os.path.join(FOLDER, "settings.json")) as file:
    SETTINGS = json.load(file)
MASK = X["mask"]
torch.set_default_dtype(torch.float64)
transformers.logging.set_verbosity_error()


def load(name: str) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        os.path.join(FOLDER, name), dtype=torch.float64
    )


class Given:
    """Makes a trainer take the responses, and the log-probabilities if it is to, from the
    inputs.
    """

    scores = X["scores"]
    logprobs = None

    def _generate(self, prompts: list) -> tuple:
        responses = [row[m].tolist() for row, m in zip(X["responses"], MASK)]
        rollout_logprobs = [row[m].tolist() for row, m in zip(X["rollout_logprobs"], MASK)]
        ids = X["prompts"].tolist()
        texts = [""] * len(MASK)
        if isinstance(self, trl.RLOOTrainer):
            return ids, responses, texts
        return ids, responses, None, texts, rollout_logprobs, {}, None, []

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *rest, **options
    ):
        if self.logprobs is not None:
            now = self.logprobs if torch.is_grad_enabled() else X["old_logprobs"]
            return (
                (X["ref_logprobs"] if model is self.ref_model else now),
                torch.zeros(MASK.shape),
                None,
            )
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits / self.temperature
        logits = logits[:, -logits_to_keep - 1 : -1]
        ids = input_ids[:, -logits_to_keep:]
        return selective_log_softmax(logits, ids), entropy_from_logits(logits), None


def make_trainer(fields: dict, rloo: bool = False, **given):
    """Return a trainer of the model "old" with some fields of its configuration."""
    base, config = (trl.RLOOTrainer, trl.RLOOConfig) if rloo else (trl.GRPOTrainer, trl.GRPOConfig)
    fields = (
        {"beta": 0.0, "num_iterations": 2} | ({} if rloo else {"scale_rewards": "none"}) | fields
    )
    args = config(
        output_dir=os.path.join(FOLDER, "trl"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=len(MASK),
        gradient_accumulation_steps=1,
        num_generations=SETTINGS["group_size"],
        max_completion_length=MASK.shape[1],
        temperature=SETTINGS["temperature"],
        **fields,
    )
    tokenizer = os.path.join(
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "assets/tiny"
    )
    trainer = type("Trainer", (Given, base), given)(
        model=load("old"),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": ""}] * len(MASK)),
        reward_funcs=lambda **columns: [
            None if score.isnan() else score.item() for score in trainer.scores
        ],
        processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer, padding_side="left"),
    )
    if fields["beta"]:
        trainer.ref_model = load("reference")
    # only set here: else it would start an engine
    trainer.use_vllm = "vllm_importance_sampling_mode" in fields
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def rollout(trainer) -> dict:
    return trainer._generate_and_score_completions([{"prompt": ""}] * len(MASK))


def gradient_of_parameters(trainer) -> torch.Tensor:
    """Return the gradient of the model "new" on a rollout of the model "old"."""
    batch = rollout(trainer)
    trainer.model.load_state_dict(load("new").state_dict())
    trainer._compute_loss(trainer.model, batch).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def main() -> None:
    quantities = {}
    for scale in ("group", "batch", "none"):
        quantities[f"advantages: {scale}"] = rollout(make_trainer({"scale_rewards": scale}))[
            "advantages"
        ]
    missing = {"scores": X["scores_missing"]}
    quantities["advantages: none, scores missing"] = rollout(make_trainer({}, **missing))[
        "advantages"
    ]
    quantities["advantages: RLOO"] = rollout(make_trainer({}, rloo=True))["advantages"]
    quantities["advantages: RLOO, scores missing"] = rollout(
        make_trainer({}, rloo=True, **missing)
    )["advantages"]
    with_kl = make_trainer({"beta": SETTINGS["beta"]}, rloo=True, logprobs=X["logprobs"])
    quantities["advantages: RLOO, KL in the reward"] = rollout(with_kl)["advantages"]

    # The KL in the loss: sums of responses over N, without any advantage.
    for name, fields in (
        ("KL: k3", {"use_bias_correction_kl": False}),
        ("KL: k3 by TRL's default", {}),
    ):
        leaf = X["logprobs"].clone().requires_grad_()
        trainer = make_trainer({"loss_type": "luspo", "beta": 1.0, **fields}, logprobs=leaf)
        batch = {**rollout(trainer), "advantages": torch.zeros(len(MASK))}
        (gradient,) = torch.autograd.grad(trainer._compute_loss(trainer.model, batch), leaf)
        quantities[f"{name}, gradient"] = gradient * len(MASK)

    for mode, low, high in (
        ("token_truncate", None, 2.0),
        ("token_mask", 1 / 1.5, 1.5),
        ("sequence_mask", None, 3.0),
    ):
        fields = {"mode": mode, "clip_min": low, "clip_max": high}
        fields = {f"vllm_importance_sampling_{name}": value for name, value in fields.items()}
        weights = rollout(make_trainer(fields, logprobs=X["logprobs"]))["importance_sampling_ratio"]
        quantities[f"rollout correction: {mode.removeprefix('token_')}"] = weights * MASK
    quantities["entropies of logits"] = entropy_from_logits(X["logits"] / SETTINGS["temperature"])
    for beta in (0.0, 0.25, 0.5, 0.75, 1.0):
        leaf = X["logits"].clone().requires_grad_()
        labels = torch.where(MASK, 0, -100)
        loss = GKDTrainer.generalized_jsd_loss(
            leaf, X["logits"].flip(-1), labels, beta, SETTINGS["temperature"]
        )
        quantities[f"distillation: beta {beta}"] = loss.detach()
        (quantities[f"distillation: beta {beta}, gradient"],) = torch.autograd.grad(loss, leaf)

    for step, fields in SETTINGS["trl"].items():
        rloo = SETTINGS["scripts"][step] == "rloo"
        if not fields.get("entropy_coef") and not (rloo and fields["beta"]):
            leaf = X["logprobs"].clone().requires_grad_()
            trainer = make_trainer(fields, rloo, logprobs=leaf)
            loss = trainer._compute_loss(trainer.model, rollout(trainer))
            quantities[f"loss: {step}"] = loss.detach()
            (quantities[f"gradient of the log-probs: {step}"],) = torch.autograd.grad(loss, leaf)
        quantities[f"gradient of the parameters: {step}"] = gradient_of_parameters(
            make_trainer(fields, rloo)
        )
    quantities = {name: x.detach().contiguous() for name, x in quantities.items()}
    save_file(quantities, os.path.join(FOLDER, "trl.safetensors"), {"version": trl.__version__})


if __name__ == "__main__":
    main()
