"""What the files of a model say before its weights are read: its configuration, its positions, and
the base of an adapter; and whether the hub answers that has them.
"""

import functools
import json
import math
import os

import transformers
from huggingface_hub import constants, get_session

from utils import UserError, as_user_error


@functools.cache
def go_offline_if_unreachable() -> None:
    """Make the hub's library read only its cache if the hub does not answer. Otherwise each call
    would try to reach it for a minute.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # any error of the network or of a proxy
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"


def load_config(flag: str, name: str) -> transformers.PretrainedConfig:
    """Return the configuration of a model, or of an adapter's base.

    Args:
        flag: the flag that names the model. name: a folder or a name on the hub.
    Raises:
        UserError: if there is no configuration.
    """
    with as_user_error(f"{flag} {name}"):
        config = transformers.AutoConfig.from_pretrained(base_of(name), trust_remote_code=False)
    if getattr(config, "output_router_logits", False):
        # The experts' balance loss does not train here, and it fails in a decode step.
        config.output_router_logits = False
    return config


def scalar_config(flag: str, name: str) -> tuple[transformers.PretrainedConfig, bool]:
    """Return a model's configuration with a head of one output, and whether the model's files have
    such a head.
    """
    config = load_config(flag, name)
    has_head = any(
        kind.endswith("ForSequenceClassification") for kind in config.architectures or ()
    )
    if has_head and config.num_labels != 1:
        raise UserError(
            f"{flag} {name}: its head has {config.num_labels} labels, and a score requires one"
        )
    config.num_labels = 1
    return config, has_head


def base_of(name: str) -> str:
    """Return the base model of a folder that holds an adapter; return any other name unchanged."""
    path = os.path.join(name, "adapter_config.json")
    if not os.path.exists(path):
        return name
    with as_user_error(f"--model {name}"), open(path) as file:
        return json.load(file)["base_model_name_or_path"]


def find_file(name: str, file: str) -> str | None:
    """Return the path of one of a model's files, which may be on the hub; None if the model lacks
    it.
    """
    return transformers.utils.cached_file(
        name,
        file,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def positions_of(name: str) -> float:
    """Return the most tokens that --model `name` can read; infinity if it names no limit."""
    config = load_config("--model", name).get_text_config()
    return getattr(config, "max_position_embeddings", None) or math.inf


def check_fits(name: str, highest: int, length: int, flag: str) -> None:
    """Raise a UserError if --model `name` cannot read a token id, or sequences of a length.

    Args:
        highest: the highest token id of the sequences. length: tokens of the longest one.
        flag: the flag that the sequences come from, with its value.
    """
    size = load_config("--model", name).get_text_config().vocab_size
    positions = positions_of(name)
    if highest >= size:
        raise UserError(
            f"--model {name}: has {size} tokens, and its tokenizer writes token {highest}: they do not fit together"
        )
    if length > positions:
        raise UserError(
            f"{flag}: makes sequences of {length} tokens, and --model {name} has {positions} positions"
        )
