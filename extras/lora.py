"""LoRA adapters, by peft."""

import os
from typing import Any

import torch
from transformers import PreTrainedModel


def add_lora(model: PreTrainedModel, args: Any) -> None:
    """Freeze a model and give each linear layer of its blocks a LoRA adapter (arXiv:2106.09685), with
    an alpha of twice --lora_rank.

    A new adapter does not change what the model computes. On resume,
    `checkpoints.load_optimizer` loads the adapter's weights.

    Args:
        args: flags with model, lora_rank and seed.
    """
    from peft import LoraConfig

    # A saved adapter names its base by this path, which has to be right from any folder.
    if os.path.isdir(args.model):
        model.name_or_path = os.path.abspath(args.model)
    # The head of a reward model trains whole. The part that reads images does not train.
    excluded = [
        name
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and (name == "score" or not part.weight.requires_grad)
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


def forward_without_lora(policy: Any, *inputs: torch.Tensor, **options: Any):
    """Return what a policy's forward returns without its adapter: that of the reference."""
    policy.model.disable_adapters()
    try:
        return policy(*inputs, **options)
    finally:
        policy.model.enable_adapters()
