"""LoRA adapters, by peft, and the quantization of what they adapt (--quantize), by bitsandbytes."""

import os
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from utils import UserError


def add_lora(model: PreTrainedModel, args: Any) -> None:
    """Freeze a model and give each linear layer of its blocks a LoRA adapter (arXiv:2106.09685), with
    an alpha of twice --lora_rank.

    A new adapter does not change what the model computes. On resume,
    `checkpoints.load_optimizer` loads the adapter's weights.

    Args:
        args: flags with model, lora_rank, quantize and seed.
    """
    from peft import LoraConfig

    # A saved adapter names its base by this path, which has to be right from any folder.
    if os.path.isdir(args.model):
        model.name_or_path = os.path.abspath(args.model)
    # The head of a reward model trains whole. The part that reads images does not train.
    excluded = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and (name == "score" or not part.weight.requires_grad)
    ]
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=2 * args.lora_rank,
        target_modules="all-linear",
        exclude_modules=excluded or None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)  # the same numbers on all ranks
        model.add_adapter(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name or name == "score.weight")
        if parameter.requires_grad:  # in float32 or better, if the base has half precision
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    if args.quantize:
        model.is_loaded_in_4bit = True  # transformers counts two numbers a byte
        for layer in [part for part in model.modules() if hasattr(part, "lora_A")]:
            layer.base_layer = quantized(layer.base_layer)


def quantized(layer: nn.Module) -> nn.Module:
    """Return a frozen linear layer whose weight has 4 bits a number: NF4 with double quantization
    (QLoRA, arXiv:2305.14314). The weight is quantized when the layer is moved to a device.
    """
    import bitsandbytes as bnb

    if not isinstance(layer, nn.Linear):
        raise UserError(f"--quantize: bitsandbytes has no {type(layer).__name__} of 4 bits")
    small = bnb.nn.Linear4bit(
        layer.in_features, layer.out_features, compute_dtype=layer.weight.dtype, device="meta"
    )
    small.weight = bnb.nn.Params4bit(layer.weight.data, quant_type="nf4")
    small.bias = layer.bias
    # It would pack a weight for sampling on a CPU, through which there is no gradient.
    small.support_avx512bf16_for_cpu = False
    return small


def forward_without_lora(policy: Any, *inputs: torch.Tensor, **options: Any):
    """Return what a policy's forward returns without its adapter: that of the reference."""
    policy.model.disable_adapters()
    try:
        return policy(*inputs, **options)
    finally:
        policy.model.enable_adapters()
