"""A run of grpo.py that benchmark.py measures, by TRL's GRPOTrainer. `benchmark.py trl` calls it where TRL is."""

import time
import zlib
from typing import Callable

import torch
import transformers

from plumbing.data import rows
from plumbing.rewards import verifiers

DEMO = {
    "model": "assets/tiny", "learning_rate": 3e-4, "rollout_batch_size": 32, "mini_batch_size": 256,
    "max_response_length": 48, "total_episodes": 12 * 256,
}  # fmt: skip
TAIL = {
    **DEMO, "model": "long tail", "reward": "scripts/benchmark_trl.py:checksum_parity", "learning_rate": 1e-9,
    "max_response_length": 256, "total_episodes": 6 * 256,
}  # fmt: skip
LARGE = {
    **TAIL, "model": "large vocabulary", "rollout_batch_size": 2, "mini_batch_size": 16, "total_episodes": 2 * 16,
    "recompute_logits": "yes",
}  # fmt: skip
CASES = {  # what it is, flags of grpo.py, TRL's micro-batch in responses
    "short": ("the demo without KL: 32 prompts x 8 responses of up to 48 tokens; the strict #### reward", DEMO, 128),
    "long tail": (
        "a model that stops after each token with probability 1/64: 32 x 8 responses of up to 256 tokens; the reward "
        "is the parity of a checksum, so that groups have advantages; the learning rate is negligible", TAIL, 64,
    ),
    "memory, at once": (
        "a vocabulary of 151,936; 2 prompts x 8 responses of up to 256 tokens in one micro-batch",
        {**LARGE, "micro_batch_tokens": 16_384}, 16,
    ),
    "memory, one by one": ("the same in micro-batches of one response", {**LARGE, "micro_batch_tokens": 1}, 1),
}  # fmt: skip


def checksum_parity(prompts: list[str], responses: list[str], **columns) -> list[float]:
    return [float(zlib.crc32(response.encode()) % 2) for response in responses]


def train(folder: str, flags: dict, micro_batch: int, begin: Callable[[], None]) -> list[dict]:
    """Train, and return the times of each step and its mean response length, by grpo.py's names.

    Args:
        flags: of grpo.py. micro_batch: responses. begin: called once the trainer is made.
    """
    import trl
    from datasets import Dataset

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    steps, now = [], time.perf_counter

    class Timed(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            start = now()
            out = super()._generate_and_score_completions(inputs)
            self.rollout_end, self.tokens = now(), out["completion_mask"].sum(1).double().mean().item()
            self.rollout = self.rollout_end - start
            return out

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            begin()
            self.last = now()

        def on_step_end(self, *args, **kwargs):
            end, found = now(), {"time/rollout": trainer.rollout, "val/sequence_lengths": trainer.tokens}
            steps.append({"time/whole": end - self.last, "time/training": end - trainer.rollout_end, **found})
            self.last = end

    config = trl.GRPOConfig(
        output_dir=folder, seed=flags["seed"], use_cpu=True, bf16=False, gradient_checkpointing=False,
        # one rollout, one update
        per_device_train_batch_size=micro_batch, num_generations=8, num_iterations=1,
        gradient_accumulation_steps=flags["mini_batch_size"] // micro_batch,
        max_steps=flags["total_episodes"] // flags["mini_batch_size"],
        max_completion_length=flags["max_response_length"],
        # the loss
        loss_type="grpo", beta=0.0, epsilon=0.2, scale_rewards="group", temperature=1.0, top_p=1.0, top_k=0,
        # the optimizer
        learning_rate=flags["learning_rate"], lr_scheduler_type="constant", warmup_steps=0, adam_beta1=0.9,
        adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
        # what is not the work
        save_strategy="no", eval_strategy="no", logging_strategy="no", report_to="none", log_completions=False,
        disable_tqdm=True,
    )  # fmt: skip
    reward = lambda completions, prompts, **columns: checksum_parity(prompts, completions)
    if flags["reward"] == "gsm8k":
        reward = lambda completions, answer, **columns: list(map(verifiers.gsm8k, completions, answer))
    trainer = Timed(
        model=transformers.AutoModelForCausalLM.from_pretrained(flags["model"], dtype=torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(flags["model"], padding_side="left"),
        train_dataset=Dataset.from_list(rows.read_rows("--dataset", flags["dataset"], "train")), reward_funcs=reward,
        args=config, callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    return steps
