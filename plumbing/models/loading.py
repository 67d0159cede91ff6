"""Models from files or a checkpoint: the policy, the reference, models with a head of one output;
and the number formats in which they are loaded.
"""

import functools
import os
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from plumbing.cli import ModelArgs
from plumbing.models.config import base_of, load_config, scalar_config
from plumbing.models.forward import caps_scores, check_head, last_hidden_states
from plumbing.models.tokenizer import check_same_tokens
from utils import UserError, as_user_error, warn

if TYPE_CHECKING:
    from plumbing.models.sharding import Sharding
    from plumbing.run.setup import Setup

# --precision: the format of weights that train, and of matrix products (None: the same).
FORMATS = {
    "float32": (torch.float32, None),
    "float64": (torch.float64, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
    "pure_bf16": (torch.bfloat16, torch.bfloat16),
}


class Precision(NamedTuple):
    """The number formats of a --precision."""

    param_dtype: torch.dtype  # of weights that train
    loss_dtype: torch.dtype  # of losses and statistics: float32 or better
    compute_dtype: torch.dtype | None  # of matrix products; None: that of the weights
    autocast: Callable[[], torch.autocast]  # returns the context to compute in

    @property
    def frozen_dtype(self) -> torch.dtype:
        """The format of weights that do not train: that of matrix products."""
        return self.compute_dtype or self.param_dtype

    def trained_dtype(self, args: ModelArgs) -> torch.dtype:
        """Return the format in which a model that trains is loaded. LoRA freezes its weights."""
        return self.frozen_dtype if args.lora_rank else self.param_dtype


@functools.cache  # warns once
def precision(name: str, device: torch.device) -> Precision:
    """Return the number formats of --precision `name`."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "float32"
    if name == "pure_bf16":
        warn(
            "--precision pure_bf16: a weight moves only by 1/256 of itself or more; bf16 keeps float32 weights"
        )
    param, compute = FORMATS[name]
    autocast = functools.partial(torch.autocast, device.type, compute, enabled=compute is not None)
    return Precision(param, torch.promote_types(param, torch.float32), compute, autocast)


def load_model(
    flag: str, name: str, dtype: torch.dtype | str, device: torch.device, scalar: bool = False
) -> PreTrainedModel:
    """Return a pretrained model in evaluation mode, so without dropout (Ziegler et al. 2019, p. 3).

    An adapter is merged into its base. Of a model that reads images, only the language model
    trains. The rest is loaded, too, so that the weights have the names that the hub and vLLM know.

    Args:
        flag: the flag that names the model. name: a folder or a name on the hub.
        dtype: of the weights; "auto" for that of the files.
        device: on "meta" the model has no weights, and only the configuration is read.
        scalar: whether the model has a head of one output, see `load_scalar_model`, and not of a
            vocabulary.
    Raises:
        UserError: if the files lack weights of the model, or cannot be read.
    """
    config, has_head = scalar_config(flag, name) if scalar else (load_config(flag, name), True)
    if caps_scores(config):
        config._attn_implementation = "eager"
    if dtype == torch.float64:
        # torch's grouped product of matrices does not know float64.
        config._experts_implementation = "eager"
    with_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    auto_class = transformers.AutoModelForCausalLM
    if scalar:
        auto_class = transformers.AutoModelForSequenceClassification
    elif with_images in (config.architectures or ()):
        auto_class = transformers.AutoModelForImageTextToText
    if device.type == "meta":
        with device:
            model = auto_class.from_config(config, dtype=dtype).eval()
    else:
        with as_user_error(f"{flag} {name}"):
            base = base_of(name)
            model, report = auto_class.from_pretrained(
                base, config=config, dtype=dtype, output_loading_info=True
            )
            if base != name:
                from peft import PeftModel

                model = PeftModel.from_pretrained(model, name).merge_and_unload()
        new = set() if has_head else {"score.weight"}
        if missing := report["missing_keys"] - new:  # transformers has drawn them at random
            raise UserError(
                f"{flag} {name}: its files lack weights of the model, such as {min(missing)}"
            )
    if device.type == "cpu":
        # The weights lie in memory as they lie in the file, and the rounding of matrix products
        # depends on the addresses. A run that resumes from another file would not continue bit for
        # bit.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    for module in model.modules():
        # torch gives the pad token no gradient, and the pad token may be a stop token.
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    if config.get_text_config() is not config:  # the language model is a part of the model
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
        head = model.get_output_embeddings() or getattr(model, "score", None)
        if head is not None:  # `load_scalar_model` reports a missing head
            head.requires_grad_(True)
    return model.to(device)


class ScalarModel(nn.Module):
    """A causal language model with a linear head of one output: a critic or a reward model."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor, shared: int = 0) -> torch.Tensor:
        """Return the head's output (tokens,) at the set positions of a mask, row by row, in float32
        or better, also in autocast.

        Args:
            input_ids: (N, L), padded on the right, where causal attention does not reach.
            mask: (N, L) bool, made from lengths and not from token ids.
            shared: see `last_hidden_states`.
        """
        hidden = last_hidden_states(self.model, input_ids, shared)[mask]
        weight = self.model.score.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        # The 8 bits of bfloat16 are too few for a score.
        with torch.autocast(hidden.device.type, enabled=False):
            scores = nn.functional.linear(hidden.to(dtype), weight.to(dtype))[:, 0]
        return scores.clone()  # FSDP warns of views


def load_scalar_model(
    flag: str, name: str, dtype: torch.dtype, device: torch.device
) -> tuple[ScalarModel, bool]:
    """Load a model with a head of one output; a language model is given a new head.

    Returns:
        The model, and whether its head is new. The values of a new head are random: the caller has
        to replace them.
    """
    _, has_head = scalar_config(flag, name)
    if base_of(name) != name:
        raise UserError(
            f"{flag} {name}: is an adapter, whose folder lacks the head; final/ has all of it"
        )
    model = load_model(flag, name, dtype, device, scalar=True)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise UserError(
            f"{flag} {name}: {type(model).__name__} has no linear head called score, as causal language models have"
        )
    return ScalarModel(model), not has_head


def add_adapter(model: PreTrainedModel, args: Any) -> None:
    """Give a model that trains the adapter of --lora_rank, if the flag asks for one.

    Args:
        args: see `extras.lora.add_lora`.
    """
    if args.lora_rank:
        from extras.lora import add_lora

        add_lora(model, args)


def load_policy(
    args: ModelArgs,
    make_policy: Callable,
    checkpoint: str | None,
    precision: Precision,
    sharding: "Sharding",
) -> tuple[Any, nn.Module]:
    """Load the policy from a checkpoint, or from --model.

    Args:
        make_policy: causal language model -> the script's Policy. checkpoint: folder, or None.
    Returns:
        The policy, and what trains it: the policy itself or its DDP wrapper.
    """
    name = args.model if args.lora_rank else checkpoint or args.model
    model = load_model("--model", name, precision.trained_dtype(args), sharding.load_device)
    check_head(f"--model {args.model}", model)
    add_adapter(model, args)
    policy = make_policy(model)
    return policy, sharding.wrap(policy)


def load_frozen(
    flag: str,
    name: str,
    make_policy: Callable,
    dtype: torch.dtype,
    sharding: "Sharding",
) -> Any:
    """Load a model that does not train, such as the reference of the KL penalty; see
    `load_policy`.
    """
    model = load_model(flag, name, dtype, sharding.load_device).requires_grad_(False)
    check_head(f"{flag} {name}", model)
    return sharding.shard(make_policy(model))


def load_reference(
    args: Any,
    make_policy: Callable,
    policy: nn.Module,
    checkpoint: str | None,
    precision: Precision,
    sharding: "Sharding",
) -> tuple[Any, bool]:
    """Return the reference of the KL penalty, frozen, and whether a checkpoint holds it: only if it
    is, or was, refreshed. With LoRA it is the policy without its adapter.

    Args:
        args: the flags of a script: those of plumbing.cli.ModelArgs, ref_model and
            ref_refresh_every.
        make_policy, checkpoint: see `load_policy`.
    """
    if args.lora_rank and not args.ref_model:
        from extras.lora import forward_without_lora

        return functools.partial(forward_without_lora, policy), False
    flag = "--ref_model" if args.ref_model else "--model"
    name = args.ref_model or args.model
    if args.ref_model:
        check_same_tokens(flag, name, args.model)
    refreshed = os.path.join(checkpoint or "", "reference")
    was_refreshed = bool(checkpoint) and os.path.isdir(refreshed)
    if was_refreshed:
        name = refreshed
    # In the format of weights that train: before the first update, reference and policy agree.
    reference = load_frozen(flag, name, make_policy, precision.param_dtype, sharding)
    ours, theirs = ([weight.shape for weight in x.parameters()] for x in (policy, reference))
    if args.ref_refresh_every and ours != theirs:
        raise UserError(
            f"--ref_refresh_every: {flag} {name} has other layers or shapes than the policy"
        )
    return reference, bool(args.ref_refresh_every or was_refreshed)


def load_teacher(args: Any, make_policy: Callable, parts: "Setup") -> Any:
    """Return what --teacher of distill.py names: a frozen Policy, or the one that trains; a
    ServedTeacher; or None.
    """
    if not args.teacher:
        return None
    if args.is_served:
        from extras.vllm.teacher import ServedTeacher

        return ServedTeacher(args, parts.sampler.tokenizer, parts.prompts)
    if args.teacher == "self":
        return parts.policy
    name = args.teacher
    # A resumed run goes on with the teacher as it was last refreshed.
    if args.ref_refresh_every and parts.run.checkpoint:
        name = os.path.join(parts.run.checkpoint, "teacher")
    dtype = parts.precision.frozen_dtype
    teacher = load_frozen("--teacher", name, make_policy, dtype, parts.sharding)
    if args.ref_refresh_every:
        parts.models["teacher"] = teacher.model
    return teacher
