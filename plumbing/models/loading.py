"""Tokenizers, configurations, number formats, scalar heads; policy and reference from files or a
checkpoint.
"""

import functools
import json
import math
import os
import re
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from plumbing.cli import ModelArgs
from utils import UserError, as_user_error, find_hub, say, warn

if TYPE_CHECKING:  # which imports this file
    from plumbing.models.sharding import Sharding


class Precision(NamedTuple):
    """What --precision stands for."""

    param_dtype: torch.dtype
    loss_dtype: torch.dtype  # of losses and statistics: float32 or better
    compute_dtype: torch.dtype | None  # of matrix products; None: that of the weights
    autocast: Callable  # returns the context to compute in

    @property
    def frozen_dtype(self) -> torch.dtype:
        """The format of weights that do not train: that of matrix products.

        The reference has the policy's format, so that its log-probabilities are the policy's before
        the first update.
        """
        return self.compute_dtype or self.param_dtype

    def base_dtype(self, args: ModelArgs) -> torch.dtype:
        """Return the format in which a model that trains is loaded: with LoRA its weights are
        frozen.
        """
        return self.frozen_dtype if args.lora_rank else self.param_dtype


# --precision: the format of weights that train, and of matrix products (None: the same).
FORMATS = {
    "float32": (torch.float32, None),
    "float64": (torch.float64, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
    "pure_bf16": (torch.bfloat16, torch.bfloat16),
}


# A conversation that shows what a chat template writes around a turn.
TURNS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "A-TURN"}]


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


def read_tokenizer(flag: str, name: str):
    """Return the tokenizer of the model `name`, which pads on the left; raise a UserError if there
    is none.
    """
    if not os.path.isdir(name):
        if name.count("/") > 1:
            raise UserError(f"{flag} {name}: there is no such folder")
        find_hub()
    with as_user_error(f"{flag} {name}"):
        # mistral_format: tekken.json would be read by a library that has no chat template.
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, padding_side="left", trust_remote_code=False, mistral_format=False
        )
    # transformers makes an empty one up where none is.
    if not tokenizer.encode("text", add_special_tokens=False):
        raise UserError(f"{flag} {name}: has no tokenizer")
    return tokenizer


def load_tokenizer(
    name: str, chat_template: str = "", template_kwargs: str = "{}", system_prompt: str = ""
):
    """Return the tokenizer of --model, with a pad token and, from a file, the template of
    --chat_template.

    A template from a file replaces the tokenizer's, and is saved with the trained model, as is
    --system_prompt, see `with_system_turn`. The values of --chat_template_kwargs, a JSON object,
    are given to the template wherever it is applied.
    """
    tokenizer = read_tokenizer("--model", name)
    if chat_template not in ("", "none"):
        with as_user_error(f"--chat_template {chat_template}"), open(chat_template) as file:
            tokenizer.chat_template = file.read()
    with as_user_error(f"--chat_template_kwargs {template_kwargs}"):
        values = dict(json.loads(template_kwargs))
    template = "" if chat_template == "none" else str(tokenizer.chat_template)
    if unread := [key for key in values if not re.search(rf"\b{re.escape(key)}\b", template)]:
        raise UserError(
            f"--chat_template_kwargs {template_kwargs}: the chat template of --model does not read {unread[0]}"
        )
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **values)
    if system_prompt and chat_template != "none" and tokenizer.chat_template:
        tokenizer.chat_template = with_system_turn(tokenizer.chat_template, system_prompt)
    if chat_template != "none" and tokenizer.chat_template:
        check_template(tokenizer, system_prompt)
    if tokenizer.pad_token_id is None:  # any token will do: masks are made from lengths
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def check_template(tokenizer: PreTrainedTokenizerBase, system_prompt: str) -> None:
    """Raise a UserError if the chat template refuses a prompt or renders nothing of it; warn if it
    does not begin the assistant's turn.
    """
    flag = "the chat template of --model"
    refused = f'--system_prompt ("" for none): {flag}' if system_prompt else flag
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    with as_user_error(refused):
        prompt = render(TURNS[:1], add_generation_prompt=True)
        before, turn, _ = render(TURNS).partition("A-TURN")
    if not prompt.strip():
        raise UserError(f"{flag} renders nothing; name a file of another one with --chat_template")
    header = before[len(os.path.commonprefix([prompt, before])) :].strip()
    if turn and header and prompt == render(TURNS[:1]):
        warn(
            f"{flag} has no generation prompt: prompts lack {header[-60:]!r}, with which the assistant's turns begin"
        )


def with_system_turn(template: str | dict[str, str], text: str):
    """Return a chat template, or several by name, that puts a system turn before a conversation
    that has none.

    All that saves or applies the template has the turn then. Training from a model that was saved
    with one writes it once, as its own prompts have a system turn.
    """
    if isinstance(template, dict):
        return {name: with_system_turn(each, text) for name, each in template.items()}
    turn = json.dumps(
        {"role": "system", "content": text}, ensure_ascii=False
    )  # jinja reads it, too
    first = f"{{%- if messages[0]['role'] != 'system' %}}{{%- set messages = [{turn}] + messages %}}{{%- endif %}}"
    # On a line of its own, whose end transformers and vLLM drop, as they do behind any block.
    return template if template.startswith(first) else f"{first}\n{template}"


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template writes behind a last turn of the assistant; "" if there is no
    template.
    """
    if tokenizer.chat_template is None:
        return ""
    with as_user_error("the chat template of --model"):
        return tokenizer.apply_chat_template(TURNS, tokenize=False).partition("A-TURN")[2]


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_name: str, stop_token: str
) -> list[int]:
    """Return the ids that end a response; the first is the one that a policy writes, and that ends
    a text to learn.

    With "eos" these are the end tokens of the tokenizer and of the model, and that of the chat
    template's turns, which base models may have there alone. First is that with which the rows of a
    reward model ended (`score_token`), or that of the chat template, or else the tokenizer's.
    Otherwise it is one named token.
    """
    if stop_token != "eos":
        ids = tokenizer.encode(stop_token, add_special_tokens=False)
        if len(ids) != 1:
            raise UserError(
                f"--stop_token {stop_token!r}: must be exactly one token of the tokenizer, this is {len(ids)}"
            )
        return ids
    configured = []
    base = base_of(model_name)
    with as_user_error(f"--model {model_name}: generation_config.json"):
        if find_file(base, transformers.utils.GENERATION_CONFIG_NAME):
            given = transformers.GenerationConfig.from_pretrained(base).eos_token_id
            configured = list(map(int, given if isinstance(given, list) else {given} - {None}))
    trained = getattr(load_config("--model", model_name), "score_token", None)
    ending = tokenizer.encode(end_of_turn(tokenizer), add_special_tokens=False)
    known = {tokenizer.eos_token_id, trained, *configured}
    ends = [x for x in ending if x in known]
    ends += [x for x in ending if x in tokenizer.added_tokens_decoder]
    ids = dict.fromkeys([trained, *ends[:1], tokenizer.eos_token_id, *configured])
    ids.pop(None, None)
    if not ids:
        raise UserError(
            "--stop_token eos: neither the tokenizer nor the model names an end token; give the token's text"
        )
    return list(ids)


def load_tokenizer_and_stop_ids(args: Any) -> tuple:
    """Return the tokenizer of --model and the ids that end a response, which are printed; see the
    functions above.
    """
    tokenizer = load_tokenizer(
        args.model, args.chat_template, args.chat_template_kwargs, args.system_prompt
    )
    stop_ids = stop_token_ids(tokenizer, args.model, args.stop_token)
    say(
        f"stop tokens: {[tokenizer.decode([token]) for token in stop_ids]}; texts to learn end with the first"
    )
    return tokenizer, stop_ids


def base_of(name: str) -> str:
    """Return the model that a folder of an adapter names as its base; any other name as it is."""
    path = os.path.join(name, "adapter_config.json")
    if not os.path.exists(path):
        return name
    with as_user_error(f"--model {name}"), open(path) as file:
        return json.load(file)["base_model_name_or_path"]


def find_file(name: str, file: str) -> str | None:
    """Return the path of a file of a model that it may lack, as on the hub; None if it does."""
    return transformers.utils.cached_file(
        name,
        file,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def load_config(flag: str, name: str):
    """Return a model's configuration; raise a UserError if there is none."""
    with as_user_error(f"{flag} {name}"):
        config = transformers.AutoConfig.from_pretrained(base_of(name), trust_remote_code=False)
    if getattr(config, "output_router_logits", False):
        # The balance loss of experts does not train, and fails in a decode step.
        config.output_router_logits = False
    return config


def check_fits(name: str, highest: int, length: int, flag: str) -> None:
    """Raise a UserError if --model `name` cannot read a token id, or sequences of a length.

    Args:
        flag: the option that the sequences are from, with its value.
    """
    size = load_config("--model", name).get_text_config().vocab_size
    if highest >= size:
        raise UserError(
            f"--model {name}: has {size} tokens, and its tokenizer writes token {highest}: they do not fit together"
        )
    if length > positions_of(name):
        raise UserError(
            f"{flag}: makes sequences of {length} tokens, and --model {name} has {positions_of(name)} positions"
        )


def positions_of(name: str) -> float:
    """Return the most tokens that --model `name` can read; infinity if it names no limit."""
    config = load_config("--model", name).get_text_config()
    return getattr(config, "max_position_embeddings", None) or math.inf


def load_model(
    flag: str, name: str, dtype: torch.dtype | str, device: torch.device, scalar: bool = False
) -> torch.nn.Module:
    """Return a pretrained model in evaluation mode, so without dropout (Ziegler et al. 2019, p. 3);
    raise a UserError if its files lack weights.

    The adapter of a folder of LoRA is merged into its base. Of a model that reads images, the
    language model trains; the rest is frozen, and loaded so that the weights have the names that
    the hub and vLLM know.

    Args:
        flag: names the model in messages. name: folder or hub name.
        dtype: of its weights; "auto" for that of its files.
        device: on "meta" the model has no weights, and only the configuration is read.
        scalar: whether to load it with a head of one output, see `load_scalar_model`, rather than
            of a vocabulary.
    """
    config, trained = scalar_config(flag, name) if scalar else (load_config(flag, name), True)
    with_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    auto_class = transformers.AutoModelForCausalLM
    if scalar:
        auto_class = transformers.AutoModelForSequenceClassification
    elif with_images in (config.architectures or ()):
        auto_class = transformers.AutoModelForImageTextToText
    if caps_scores(config):
        config._attn_implementation = "eager"
    if dtype == torch.float64:
        # torch's grouped product of matrices does not know float64.
        config._experts_implementation = "eager"
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
        new = set() if trained else {"score.weight"}
        if missing := report["missing_keys"] - new:  # transformers draws them at random
            raise UserError(
                f"{flag} {name}: its files lack weights of the model, such as {min(missing)}"
            )
    if device.type == "cpu":
        # The weights lie in memory as they do in the file, and matrix products round by the address
        # of their operands: a run that is resumed from another file would not continue bit for bit.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    for module in model.modules():
        # torch gives the pad token no gradient, and it may be a stop token.
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    if config.get_text_config() is not config:  # a language model is a part of it
        model.requires_grad_(False)
        for part in (
            model.get_decoder(),
            model.get_output_embeddings() or getattr(model, "score", None),
        ):
            if part is not None:  # a missing score is reported by `load_scalar_model`
                part.requires_grad_(True)
    return model.to(device)


def caps_scores(config: PretrainedConfig) -> bool:
    """Return whether a model caps the scores of its attention, as Gemma 2 does: transformers' sdpa
    leaves that out.
    """
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


class ScalarModel(torch.nn.Module):
    """A causal language model with a linear head of one output: a critic's values, a reward model's
    scores.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the head's output at the set positions of a mask, row by row; float32 or better,
        also in autocast.

        Args:
            input_ids: (N, L), padded on the right, where causal attention does not reach.
            mask: (N, L) bool, made from lengths and not from token ids.
        """
        hidden = last_hidden_states(self.model, input_ids, mask)
        weight = self.model.score.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        # bfloat16 has 8 bits: too few for a score.
        with torch.autocast(hidden.device.type, enabled=False):
            # FSDP warns of views
            return torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype))[:, 0].clone()


def load_scalar_model(
    flag: str, name: str, dtype: torch.dtype, device: torch.device
) -> tuple[ScalarModel, bool]:
    """Load a reward model, or a language model that is given a head of one output.

    Returns:
        The model, and whether its head is new; a new head has random values, which the caller has
        to replace.
    """
    _, trained = scalar_config(flag, name)
    if base_of(name) != name:
        raise UserError(
            f"{flag} {name}: is an adapter, whose folder lacks the head; final/ has all of it"
        )
    model = load_model(flag, name, dtype, device, scalar=True)
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise UserError(
            f"{flag} {name}: {type(model).__name__} has no linear head called score, as causal language models have"
        )
    return ScalarModel(model), not trained


def scalar_config(flag: str, name: str) -> tuple:
    """Return a model's configuration with a head of one output, and whether its files have such a
    head.
    """
    config = load_config(flag, name)
    trained = any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())
    if trained and config.num_labels != 1:
        raise UserError(
            f"{flag} {name}: its head has {config.num_labels} labels, and a score requires one"
        )
    config.num_labels = 1
    return config, trained


def check_can_read(flag: str, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a UserError unless a model gives each token the id that `tokenizer`, that of --model,
    gives it.
    """
    if difference := vocabulary_difference(tokenizer, read_tokenizer(flag, name)):
        raise UserError(
            f"{flag} {name}: cannot read what --model writes: its vocabulary {difference}"
        )


def check_same_tokens(flag: str, name: str, model: str) -> None:
    """Raise a UserError unless a model has a log-prob for each token of --model; it may be padded to
    more tokens.
    """
    check_can_read(flag, name, read_tokenizer("--model", model))
    theirs, ours = (load_config(flag, x).get_text_config().vocab_size for x in (name, model))
    if theirs < ours:
        raise UserError(f"{flag} {name}: has {theirs} tokens, less than the {ours} of --model")


def vocabulary_difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str:
    """Return how the vocabulary of a tokenizer, `theirs`, differs from that of --model; "" if it
    does not.

    A pad token that only one of the two has does not count: padding is masked by length.
    """
    mine = ours.get_vocab()
    other = theirs.get_vocab()
    pads = {ours.pad_token, theirs.pad_token} - (mine.keys() & other.keys())
    different = sorted(
        token for token in (mine | other).keys() - pads if mine.get(token) != other.get(token)
    )
    return (
        f"has other ids for {len(different)} tokens, such as {different[0]!r}" if different else ""
    )


@torch.no_grad()
def check_head(flag: str, model: PreTrainedModel, head: Callable) -> None:
    """Raise a UserError if `head`, hidden states -> logits, as it trains, differs from the model's
    as it samples.
    """
    if model.device.type == "meta":  # rank 0 has the weights
        return
    ids = torch.arange(min(32, model.config.get_text_config().vocab_size), device=model.device)[
        None
    ]
    with torch.enable_grad():
        ours = head(body(model)(input_ids=ids, use_cache=False).last_hidden_state)
    theirs = model(input_ids=ids, use_cache=False).logits.to(ours.dtype)
    # -inf masks a token; NaN is not equal to it
    largest = theirs[theirs != -math.inf].abs().max().item()
    if not math.isfinite(largest):
        raise UserError(
            f"{flag}: its logits are not finite, so its weights or --precision are to blame"
        )
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * largest):
        raise UserError(
            f"{flag}: {type(model).__name__} trains by other logits: what changes them is not in `adjusted_logits`"
        )


# The families without a cache that left-padded rows share, and that drops those which have finished.
NO_DECODE_LOOP = ("mamba", "minimax", "recurrent_gemma", "openai-gpt")
LOGIT_FACTORS = {  # entries of configurations -> power of the factor
    "logit_scale": 1,  # Cohere
    "lm_head_multiplier": 1,  # Falcon-H1
    "logits_scaling": -1,  # Granite, MiniCPM
    "logits_mup_width_multiplier": -1,  # Inkling
}


def adjusted_logits(logits: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Return what a model makes of its head's output (..., V), by its configuration: scaled, or
    capped (Gemma).
    """
    for name, power in LOGIT_FACTORS.items():
        factor = getattr(config, name, 1.0)
        if factor not in (None, 1.0):
            logits = logits * factor**power
    softcap = getattr(config, "final_logit_softcapping", None)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def check_decodes(flag: str, model: PreTrainedModel, instead: str) -> None:
    """Raise a UserError for a family of NO_DECODE_LOOP.

    Args:
        flag: the flag that names the model, with its value. instead: the flag for another way to
            sample.
    """
    if model.config.model_type in NO_DECODE_LOOP:
        raise UserError(
            f"{flag}: {type(model).__name__} cannot sample by the decode loop; use {instead}"
        )


def body(model: PreTrainedModel) -> torch.nn.Module:
    """Return a language model without its head. (Llama 4's decoder has the head in it.)"""
    decoder = model.get_decoder()
    return getattr(decoder, "model", decoder)


def last_hidden_states(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the last hidden states (tokens, H) at the set positions of a mask (N, L), or at (rows,
    columns).
    """
    return body(model)(input_ids=input_ids, use_cache=False).last_hidden_state[positions]


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the decoder blocks of a model; transformers marks them as those that can be
    recomputed.
    """
    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def checkpoint_blocks(model: torch.nn.Module) -> None:
    """Recompute the blocks of a model in the backward pass, as --gradient_checkpointing asks for.

    transformers does so in training mode only, in which some families compute something else:
    phi-3.5-moe draws its experts at random. Here no model is ever in that mode. Raise a UserError if
    a model has no such blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError(
            f"--gradient_checkpointing: {type(model).__name__} does not support it; use --no-gradient_checkpointing"
        )
    for block in blocks:
        block.forward = functools.partial(recomputed, block.forward)


def recomputed(forward: Callable, *args: Any, **options: Any):
    """Return `forward(*args, **options)`, of which only the inputs are kept for the backward
    pass.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


def add_adapter(model: PreTrainedModel, args: Any) -> None:
    """Give a model that trains the adapter of --lora_rank, if the flag asks for one."""
    if args.lora_rank:
        from extras.lora import add_lora

        add_lora(model, args)


def load_policy(
    args: Any,
    make_policy: Callable,
    checkpoint: str | None,
    precision: Precision,
    sharding: "Sharding",
) -> tuple:
    """Load the policy of --model, or of a checkpoint.

    Args:
        make_policy: wraps a causal language model in the script's Policy. checkpoint: folder, or
            None.
    Returns:
        The policy, and what trains it: the policy itself or its DDP wrapper.
    """
    name = args.model if args.lora_rank else checkpoint or args.model
    model = load_model("--model", name, precision.base_dtype(args), sharding.load_device)
    add_adapter(model, args)
    policy = make_policy(model)
    check_head(f"--model {args.model}", model, policy.logits)
    return policy, sharding.wrap(policy)


def load_frozen(
    flag: str, name: str, make_policy: Callable, dtype: torch.dtype, sharding: "Sharding"
) -> torch.nn.Module:
    """Load a model that does not train, such as the reference of the KL penalty; see
    `load_policy`.
    """
    model = load_model(flag, name, dtype, sharding.load_device).requires_grad_(False)
    policy = make_policy(model)
    check_head(f"{flag} {name}", model, policy.logits)
    return sharding.shard(policy)


def load_reference(
    args: Any,
    make_policy: Callable,
    policy: torch.nn.Module,
    checkpoint: str | None,
    precision: Precision,
    sharding: Any,
) -> tuple[Any, bool]:
    """Return the frozen reference of the KL penalty, with LoRA the policy without its adapter, and
    whether a checkpoint holds it, as it is, or was, refreshed.

    Args:
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
    reference = load_frozen(flag, name, make_policy, precision.param_dtype, sharding)
    ours, theirs = ([weight.shape for weight in x.parameters()] for x in (policy, reference))
    if args.ref_refresh_every and ours != theirs:
        raise UserError(
            f"--ref_refresh_every: {flag} {name} has other layers or shapes than the policy"
        )
    return reference, bool(args.ref_refresh_every or was_refreshed)
