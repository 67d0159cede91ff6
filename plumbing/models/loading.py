"""Tokenizers, configurations, loading of models, number formats, scalar heads."""

import functools
import inspect
import math
import os
from typing import Callable, Iterable, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from utils import fail, first_line, warn


class Precision(NamedTuple):
    """What --precision stands for."""

    param_dtype: torch.dtype
    loss_dtype: torch.dtype  # of losses and statistics: float32 or better
    compute_dtype: torch.dtype | None  # of matrix products; None: that of the weights
    autocast: Callable  # returns the context to compute in


def precision(name: str, device: torch.device) -> Precision:
    """Return the number formats of --precision `name`."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "float32"
    if name == "pure_bf16":
        warn("--precision pure_bf16: a weight moves only by 1/256 of itself or more; bf16 keeps float32 weights")
    param = {"float64": torch.float64, "pure_bf16": torch.bfloat16}.get(name, torch.float32)
    compute = {"bf16": torch.bfloat16, "pure_bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    autocast = functools.partial(torch.autocast, device.type, compute or torch.bfloat16, enabled=compute is not None)
    return Precision(param, torch.promote_types(param, torch.float32), compute, autocast)


def read_tokenizer(flag: str, name: str):
    """Return a model's tokenizer, which pads on the left; end the run if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    except Exception as error:  # files of any content; the tokenizers' own errors are plain ones
        where = "" if os.path.exists(name) else "there is no such folder here; as a name on the hub: "
        fail(f"{flag} {name}: no tokenizer could be loaded from it ({where}{first_line(error)})")
    if not tokenizer.encode("text", add_special_tokens=False):  # transformers makes an empty one up where none is
        fail(f"{flag} {name}: has no tokenizer")
    return tokenizer


def load_tokenizer(name: str, pad_token: str, chat_template: str = ""):
    """Return the tokenizer of --model, with a pad token (eos, where neither it nor the flag names one).

    Args:
        pad_token, chat_template: of the flags of these names. A template from a file replaces the tokenizer's own, and
            is saved with the trained model.
    """
    tokenizer = read_tokenizer("--model", name)
    if chat_template not in ("", "none"):
        try:
            with open(chat_template) as file:
                tokenizer.chat_template = file.read()
        except (OSError, UnicodeDecodeError) as error:
            fail(f"--chat_template {chat_template}: takes none or a file that can be read ({first_line(error)})")
    if pad_token:
        pad_token = tokenizer.eos_token if pad_token == "eos" else pad_token
        if pad_token is None or tokenizer.convert_tokens_to_ids(pad_token) in (None, tokenizer.unk_token_id):
            fail(f"--pad_token {pad_token}: the tokenizer of --model {name} has no such token")
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            fail(f"--model {name}: its tokenizer has neither a pad token nor an end token; name one with --pad_token")
        warn(f"--model {name}: its tokenizer has no pad token, so it pads with {tokenizer.eos_token}, masked by length")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(tokenizer, model_name: str, stop_token: str) -> list[int]:
    """Return the ids that end a response.

    With "eos" these are the end tokens of the tokenizer, which comes first, and of the model; else one named token.
    """
    if stop_token == "eos":
        try:
            configured = GenerationConfig.from_pretrained(model_name).eos_token_id
        except OSError as error:
            if "valid JSON" in str(error):
                fail(f"--model {model_name}: {first_line(error)}")
            configured = None  # a model may come without generation defaults
        ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
        if not all(isinstance(token, int) for token in ids):
            fail(f"--model {model_name}: its generation_config.json has an eos_token_id that is no number")
        if not ids:
            fail("--stop_token eos: neither the tokenizer nor the model names an end token; give the token's text")
        return sorted(ids, key=lambda token: (token != tokenizer.eos_token_id, token))
    ids = tokenizer.encode(stop_token, add_special_tokens=False)
    if len(ids) != 1:
        fail(f"--stop_token {stop_token!r}: has to be exactly one token of the tokenizer, this is {len(ids)}")
    return ids


def load_config(flag: str, name: str):
    """Return a model's configuration with every dropout at 0 (Ziegler et al. 2019, p. 3: no dropout in the policy)."""
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # files of any content
        fail(f"{flag} {name}: no model could be loaded from it ({first_line(error)})")
    for key in config.to_dict():
        is_dropout = key.endswith(("dropout", "pdrop", "dropout_prob", "dropout_rate"))
        if is_dropout and isinstance(getattr(config, key), float):
            setattr(config, key, 0.0)
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # the balance loss of experts does not train, and fails in a decode step
    return config


def check_positions(name: str, length: int, what: str) -> None:
    """End the run if --model `name` cannot read a sequence of `length` tokens; `what` says where it is from."""
    most = getattr(load_config("--model", name).get_text_config(), "max_position_embeddings", None)
    if most and length > most:
        fail(f"{what}: makes {length} tokens, and --model {name} has {most} positions")


def check_vocabulary(name: str, sequences: Iterable[list[int]]) -> None:
    """End the run if --model `name` has no embedding of a token id that its tokenizer gave."""
    size = getattr(load_config("--model", name).get_text_config(), "vocab_size", None)
    highest = max(map(max, sequences))
    if size and highest >= size:
        fail(f"--model {name}: has {size} tokens, and its tokenizer writes token {highest}: they do not fit together")


def load_model(
    flag: str, name: str, dtype: torch.dtype, device: torch.device, auto_class=AutoModelForCausalLM, config=None,
    new_weights: tuple[str, ...] = (),
) -> torch.nn.Module:  # fmt: skip
    """Load a pretrained model without dropout, in evaluation mode; end the run if its files lack weights.

    Args:
        flag: names the model in messages. name: folder or hub name.
        device: on "meta" the model has no weights, and only the configuration is read.
        new_weights: may be missing in the files; the caller sets them.
    """
    config = config or load_config(flag, name)
    if caps_scores(config):
        if dtype == torch.float64:  # transformers' eager softmax is of float32
            fail(f"--precision float64: not for {flag} {name}, as it caps the scores of attention")
        config._attn_implementation = "eager"
    if device.type == "meta":
        with device:
            return prepare(auto_class.from_config(config, dtype=dtype).eval())
    try:
        model, report = auto_class.from_pretrained(name, config=config, dtype=dtype, output_loading_info=True)
    except Exception as error:  # files of any content
        fail(f"{flag} {name}: no model could be loaded from it ({first_line(error)})")
    missing = report["missing_keys"] - set(new_weights)
    if missing:  # transformers would leave them at random values
        fail(f"{flag} {name}: its files lack weights of the model, such as {min(missing)}")
    for key, parameter in model.named_parameters():
        if not parameter.amax() < math.inf:  # NaN, too; -inf is what masks a token of the vocabulary
            fail(f"{flag} {name}: its weights {key} are not finite")
    if device.type == "cpu":
        # The weights lie in memory as they do in the file, and matrix products round by the address of their operands:
        # a run that is resumed from another file would not go on bit for bit.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return prepare(model).to(device)


def prepare(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model that trains the embedding of its pad token.

    torch would leave that embedding without gradient. It may be the stop token's; padding is masked by length.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    return model


def caps_scores(config) -> bool:
    """Return whether a model caps the scores of its attention, as Gemma 2 does: transformers' sdpa leaves that out."""
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


class ScalarModel(torch.nn.Module):
    """A causal language model with a linear head of one output: a critic's values, a reward model's scores."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the head's output at the set positions of a mask, row by row; float32 or better, also in autocast.

        Args:
            input_ids: (N, L), padded on the right, where causal attention does not reach.
            mask: (N, L) bool, made from lengths and not from token ids.
        """
        hidden = last_hidden_states(self.model, input_ids, mask)
        dtype = torch.promote_types(self.model.score.weight.dtype, torch.float32)
        weight, bias = (x if x is None else x.to(dtype) for x in (self.model.score.weight, self.model.score.bias))
        with torch.autocast(hidden.device.type, enabled=False):  # bfloat16 has 8 bits: too few for a score
            return torch.nn.functional.linear(hidden.to(dtype), weight, bias)[:, 0].clone()  # FSDP warns of views


def load_scalar_model(flag: str, name: str, dtype: torch.dtype, device: torch.device) -> tuple[ScalarModel, bool]:
    """Load a reward model, or a language model that is given a head of one output.

    Returns:
        The model, and whether its head is new; a new head has random values, which the caller has to replace.
    """
    config, trained = scalar_config(flag, name)
    new_weights = () if trained else ("score.weight",)
    model = load_model(flag, name, dtype, device, AutoModelForSequenceClassification, config, new_weights)
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        fail(f"{flag} {name}: {type(model).__name__} has no linear head called score, as causal language models have")
    return ScalarModel(model), not trained


def scalar_config(flag: str, name: str) -> tuple:
    """Return a model's configuration for a head of one output, and whether its files hold such a head."""
    config = load_config(flag, name)
    trained = any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())
    if trained and config.num_labels != 1:
        fail(f"{flag} {name}: its head has {config.num_labels} labels, and a score takes one with 1")
    config.num_labels = 1
    return config, trained


def check_can_read(flag: str, name: str, tokenizer, policy: str) -> None:
    """End the run unless a model knows every token that --model `policy` writes by the id that `tokenizer` gives it."""
    if difference := vocabulary_difference(tokenizer, read_tokenizer(flag, name)):
        fail(f"{flag} {name}: cannot read what --model writes: its vocabulary {difference}")
    ours = load_config("--model", policy).get_text_config().vocab_size
    theirs = load_config(flag, name).get_text_config().vocab_size
    if theirs < min(ours, 1 + max(tokenizer.get_vocab().values())):
        fail(f"{flag} {name}: cannot read what --model writes: it has {theirs} tokens, --model {ours}")


def vocabulary_difference(ours, theirs) -> str:
    """Return how the vocabulary of a tokenizer, `theirs`, differs from that of --model; "" if it does not.

    A pad token that only one of the two has is no difference: padding is masked by length.
    """
    mine, other = ours.get_vocab(), theirs.get_vocab()
    for pad in {ours.pad_token, theirs.pad_token}:
        if (pad in mine) != (pad in other):
            (mine if pad in mine else other).pop(pad)
    if len(mine) != len(other):
        return f"has {len(other)} tokens, that of --model {len(mine)}"
    different = sorted(token for token, index in mine.items() if other.get(token) != index)
    if different:
        return f"gives other ids to {len(different)} of the {len(mine)} tokens, such as {different[0]!r}"
    return ""


def check_same_shapes(flag: str, model: torch.nn.Module, policy: torch.nn.Module, everything: bool) -> None:
    """End the run if a model differs from the policy in its vocabulary's size or, with `everything`, in any shape."""
    sizes = [m.model.get_output_embeddings().weight.shape[0] for m in (model, policy)]
    if sizes[0] != sizes[1]:
        fail(f"{flag}: its vocabulary has {sizes[0]} tokens, that of --model {sizes[1]}")
    shapes = [{name: p.shape for name, p in m.named_parameters()} for m in (model, policy)]
    if everything and shapes[0] != shapes[1]:
        fail(f"{flag}: has other layers than the model that trains; --resume and --ref_refresh_every take the same")


@torch.no_grad()
def check_head(flag: str, model: torch.nn.Module, head: Callable) -> None:
    """End the run if `head`, hidden states -> logits, differs from the model itself (some scale their logits)."""
    if model.device.type == "meta":  # rank 0 has the weights
        return
    ids = torch.arange(min(32, model.config.get_text_config().vocab_size), device=model.device)[None]
    ours = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    theirs = model(input_ids=ids, use_cache=False).logits.to(ours.dtype)
    largest = theirs[theirs != -math.inf].abs().max().item()  # -inf masks a token; NaN is not equal to it
    if not math.isfinite(largest):
        fail(f"{flag}: its logits are not finite, so its weights or --precision are to blame")
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * largest):
        fail(f"{flag}: {type(model).__name__} changes its logits in a way unknown to Policy.logits")


def check_decodes(flag: str, model: torch.nn.Module, instead: str = "--rollout_backend vllm") -> None:
    """End the run if a model cannot take left-padded prompts, or its cache cannot drop the rows that have finished.

    Args:
        flag: the flag that names the model, with its value. instead: the flag for another way to sample.
    """
    layers, takes = DynamicCache(config=model.config).layers, inspect.signature(type(model).forward).parameters
    why = ""
    if model._is_stateful or any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        why = "keeps a state from which finished responses cannot be dropped"
    elif "position_ids" not in takes:
        why = "takes no position_ids, which left-padded prompts need"
    elif "past_key_values" not in takes:
        why = "takes no past_key_values, which one token at a time needs"
    if why:
        fail(f"{flag}: {type(model).__name__} {why}; take {instead}")


def last_hidden_states(model: torch.nn.Module, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a language model's last hidden states at the set positions of a mask (N, L): (tokens, H), row by row."""
    return model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[mask]
