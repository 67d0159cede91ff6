"""The critic of ppo.py: its flags, its model, where its values start, and how far it has learned.

What it is trained to, and with which loss, stands in ppo.py. Imports utils and plumbing.flags, .lora and .models.
"""

import math
import os

import torch
from torch import Tensor, nn

from plumbing.models import loading as models
from plumbing.models import lora
from utils import warn

LOW, LOW_STEPS = 0.05, 50  # a critic that has explained less than this over so many steps is warned of
RISE = 0.01  # a smaller rise of the explained variance is none


class Critic(nn.Module):
    """The value of every response token: what is to come when the tokens before it are known."""

    def __init__(self, scalar: models.ScalarModel, warmup_steps: int = 0, fits: bool = False):
        """
        Args:
            warmup_steps: in which the critic trains alone, at most.
            fits: whether `fit` is to be called on the first values.
        """
        super().__init__()
        self.scalar = scalar
        self.state = {"offset": 0.0, "fits": fits, "warmup_steps": warmup_steps, "history": []}

    def forward(self, input_ids: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
        """Return "values" (tokens,), each read one position before its token, the set entries of the mask row by row.

        Args:
            input_ids: (N, L), padded on the right. response_mask: (N, L) bool, set on response tokens.
        """
        outputs = self.scalar(input_ids, nn.functional.pad(response_mask[:, 1:], (0, 1)))
        return {"values": outputs + self.state["offset"]}

    @torch.no_grad()
    def fit(self, values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        """Scale and shift all values from now on by `least_squares`; return these (N, T) so."""
        scale, offset = least_squares(values, returns, mask)
        for parameter in self.scalar.model.score.parameters():
            parameter.mul_(scale)  # in the weights, a factor behind them would scale every update of the values, too
        self.state |= {"offset": offset, "fits": False}
        return torch.where(mask, scale * values + offset, 0.0)

    def end_step(self, step: int, responses: int, explained: float, patience: int) -> None:
        """Note the explained variance of a step, and end the warm-up if it has stopped rising.

        Args:
            responses: of all steps so far. patience: see `has_stopped_rising`.
        """
        history = self.state["history"] = [*self.state["history"], explained]
        if step < self.state["warmup_steps"] and has_stopped_rising(history, patience):
            self.state["warmup_steps"] = step
        if step == self.state["warmup_steps"] and os.environ.get("RANK", "0") == "0":
            about = f"{step} steps, {responses:,} responses, explained variance {explained:.3f}"
            print(f"critic warm-up: {about}", flush=True)
        warn_of_low(history)


def least_squares(x: Tensor, y: Tensor, mask: Tensor) -> tuple[float, float]:
    """Return scale and offset of the line scale * x + offset with the least squared error to y over the mask.

    scale = cov(x, y) / var(x), offset = mean(y) - scale * mean(x); a scale of 1 where x is constant.
    """
    x, y = x[mask].double(), y[mask].double()
    if not len(x):
        return 1.0, 0.0
    centred = x - x.mean()
    variance = centred.square().mean()
    varies = variance > 1e-10 * x.square().mean()  # by more than float32 rounds
    scale = (centred * y).mean() / variance if varies else torch.ones_like(variance)
    return scale.item(), (y.mean() - scale * x.mean()).item()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - var(R - V) / var(R) over the mask: 1 for a perfect critic, 0 for a constant one; NaN for equal R."""
    error, target = (returns - values)[mask].double(), returns[mask].double()
    # By more than float32 rounds.
    differ = len(target) > 1 and target.var() > 1e-10 * target.square().mean()
    return (1 - error.var() / target.var()).item() if differ else math.nan


def load_critic(args, saved: str | None, dtype: torch.dtype, device) -> Critic:
    """Load the critic of --value_model, or of the checkpoint folder `saved`; a language model gets a head of zeros."""
    saved = os.path.join(saved, "critic") if saved else None
    name = (None if args.lora_rank else saved) or args.value_model or args.model
    scalar, new_head = models.load_scalar_model("--value_model", name, dtype, device)
    if new_head:
        nn.init.zeros_(scalar.model.score.weight)
    if args.lora_rank:
        lora.add_lora(scalar.model, args)
    if args.gradient_checkpointing or args.critic_gradient_checkpointing:
        scalar.model.gradient_checkpointing_enable({"use_reentrant": False})
    return Critic(scalar, args.critic_warmup_steps, fits=args.fit_value_model and not new_head)


def critic_schedule(args) -> tuple[int, int, int]:
    """Return the critic's passes over a rollout, the responses of an update, and the updates of a whole step."""
    epochs, size = args.critic_num_epochs or args.num_epochs, args.critic_mini_batch_size or args.mini_batch_size
    return epochs, size, epochs * args.rollout_batch_size * args.group_size // size


def has_stopped_rising(history: list[float], patience: int) -> bool:
    """Return whether the last `patience` entries are all less than RISE above the best one before them."""
    before, last = history[: len(history) - patience], history[len(history) - patience :]
    return bool(patience and before and last and max(last) < max(before) + RISE)


def warn_of_low(history: list[float]) -> None:
    """Warn if the explained variances of the last LOW_STEPS steps, and of no more, are below LOW; NaN is not."""
    low = [x < LOW for x in history[-LOW_STEPS - 1 :]]
    if len(low) >= LOW_STEPS and all(low[-LOW_STEPS:]) and (len(low) == LOW_STEPS or not low[0]):
        warn(
            f"step {len(history)}: val/explained_variance has been below {LOW} for {LOW_STEPS} steps: the critic is no "
            "better than the mean return; give it --critic_num_epochs, --critic_learning_rate or a --value_model, or "
            "take rloo.py, which has none"
        )
