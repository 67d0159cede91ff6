"""A model's weights, without or with its LoRA adapter, by the names that a model without one has."""

from typing import Any

import torch

from utils import full_tensor


def base_weights(model: torch.nn.Module) -> list[tuple]:
    """Return the weights of a model without its adapter, under the names that they have in a model
    without one.

    Returns:
        (name, tensor, LoRA layer of the tensor or None), to be passed to `merged`. Tied weights are
        there twice.
    """
    layers = {
        f"{name}.base_layer.weight": x for name, x in model.named_modules() if hasattr(x, "lora_A")
    }
    return [
        (name.replace(".base_layer.", "."), tensor, layers.get(name))
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    ]


@torch.no_grad()
def merged(tensor: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return one of `base_weights` as a full tensor, plus the product of its adapter, in float32 or
    better; a collective if it is sharded.

    (peft would merge in place, and all weights at once.)
    """
    tensor = full_tensor(tensor)
    if layer is None:
        return tensor
    return tensor + full_tensor(layer.get_delta_weight("default"))
