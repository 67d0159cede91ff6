"""Mixtures of experts: the loss that spreads the tokens over the experts, where a model's configuration asks for it.

It does if `output_router_logits` is true there, as for transformers' own training. Imports no other module of plumbing.
"""

import functools

import torch


def asks_for_balance(config) -> bool:
    return getattr(config, "output_router_logits", False)


def decode_without_balance(model: torch.nn.Module) -> None:
    """Keep `model(...)` itself from computing the loss, which in transformers fails at a step of decoding.

    `model.base_model(...)`, by which models train, still returns the logits of the routers.
    """
    if asks_for_balance(model.config):
        model.forward = functools.partial(model.forward, output_router_logits=False)


def balance_losses(config, outputs, mask: torch.Tensor) -> torch.Tensor | None:
    """Return the balance loss of each row's tokens, weighted by the configuration's `router_aux_loss_coef`.

    coef * experts * sum over experts e of f_e * P_e: f_e is the share of the row's tokens that are routed to e, which
    has no gradient, and P_e their mean probability of e, both over all layers. This is transformers' loss
    (arXiv:2101.03961, eq. 4 to 6) of each row by itself, as in DeepSeek-V3 (arXiv:2412.19437, eq. 17). The one of a
    whole batch is a product of means over the batch, so it would depend on how the batch is cut.

    Args:
        outputs: of the model's body, whose `router_logits` are (N * L, experts) of each layer.
        mask: (N, L) bool, the tokens that count.
    Returns:
        (tokens,): at each set entry of the mask, row by row, the loss of its row. None if there are no router logits.
    """
    router_logits = getattr(outputs, "router_logits", None)
    if not router_logits:
        return None
    counts, routed, probability = mask.sum(1, keepdim=True).clamp(min=1), 0.0, 0.0
    for logits in router_logits:
        probs = logits.view(*mask.shape, -1).float().softmax(-1) * mask[..., None]  # (N, L, experts)
        chosen = torch.zeros_like(probs).scatter(-1, probs.topk(config.num_experts_per_tok).indices, 1.0)
        routed = routed + (chosen * mask[..., None]).sum(1) / counts / len(router_logits)  # (N, experts)
        probability = probability + probs.sum(1) / counts / len(router_logits)
    losses = config.router_aux_loss_coef * probs.shape[-1] * (routed * probability).sum(1, keepdim=True)  # (N, 1)
    return losses.expand(mask.shape)[mask]
