"""The tokenizer of a model: its chat template, the tokens that end a response, and whether two
models share a vocabulary.
"""

import functools
import json
import os
import re
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from plumbing.models.config import base_of, find_file, go_offline_if_unreachable, load_config
from utils import UserError, as_user_error, say, warn

# A conversation that shows what a chat template writes around a turn.
TURNS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "A-TURN"}]


def load_tokenizer_and_stop_ids(args: Any) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Return the tokenizer of --model, see `load_tokenizer`, and the token ids that end a response,
    see `stop_token_ids`; print the tokens.

    Args:
        args: the flags of a script: those of plumbing.cli.PretrainedArgs, and system_prompt.
    """
    tokenizer = load_tokenizer(
        args.model, args.chat_template, args.chat_template_kwargs, args.system_prompt
    )
    stop_ids = stop_token_ids(tokenizer, args.model, args.stop_token)
    say(
        f"stop tokens: {[tokenizer.decode([token]) for token in stop_ids]}; texts to learn end with the first"
    )
    return tokenizer, stop_ids


def load_tokenizer(
    name: str, chat_template: str = "", template_kwargs: str = "{}", system_prompt: str = ""
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of --model, with a pad token.

    Args:
        chat_template: --chat_template. The template of a file replaces the tokenizer's, and is
            saved with the trained model.
        template_kwargs: --chat_template_kwargs, a JSON object. Its values are given to the template
            wherever it is applied.
        system_prompt: --system_prompt. It becomes part of the template, see `with_system_turn`.
    Raises:
        UserError: if there is no tokenizer, or the template does not work with the flags.
    """
    tokenizer = read_tokenizer("--model", name)
    applies_template = chat_template != "none"
    if applies_template and chat_template:
        with as_user_error(f"--chat_template {chat_template}"), open(chat_template) as file:
            tokenizer.chat_template = file.read()
    where = f"--chat_template_kwargs {template_kwargs}"
    values = template_values(where, template_kwargs, tokenizer, applies_template)
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **values)
    if applies_template and tokenizer.chat_template:
        if system_prompt:
            tokenizer.chat_template = with_system_turn(tokenizer.chat_template, system_prompt)
        check_template(tokenizer, system_prompt)
    if tokenizer.pad_token_id is None:  # masks come from lengths, so any token will do
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def template_values(
    where: str, given: Any, tokenizer: PreTrainedTokenizerBase, applies_template: bool
) -> dict:
    """Return the values of an object, or of its JSON text, for the chat template, without nulls;
    raise a UserError if that does not read one that holds something.
    """
    template = str(tokenizer.chat_template) if applies_template else ""
    with as_user_error(where):
        values = dict(json.loads(given) if isinstance(given, str) else given)
        # A table of rows has null where a row lacks a key.
        values = {key: value for key, value in values.items() if value is not None}
        for key, value in values.items():
            if value not in ("", [], {}) and not re.search(rf"\b{re.escape(key)}\b", template):
                raise ValueError(f"the chat template of --model does not read {key}")
    return values


def read_tokenizer(flag: str, name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model `name`, which pads on the left.

    Args:
        flag: the flag that names the model. name: a folder or a name on the hub.
    Raises:
        UserError: if there is no tokenizer.
    """
    if not os.path.isdir(name):
        if name.count("/") > 1:
            raise UserError(f"{flag} {name}: there is no such folder")
        go_offline_if_unreachable()
    elif "args.json" in os.listdir(name):
        raise UserError(f"{flag} {name}: is the folder of a run, which leaves its model in final/")
    with as_user_error(f"{flag} {name}"):
        # mistral_format: a library without chat templates would read tekken.json.
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, padding_side="left", trust_remote_code=False, mistral_format=False
        )
    # Where there is no tokenizer, transformers makes up an empty one.
    if not tokenizer.encode("text", add_special_tokens=False):
        raise UserError(f"{flag} {name}: has no tokenizer")
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


def with_system_turn(template: str | dict[str, str], text: str) -> str | dict[str, str]:
    """Return a chat template that puts a system turn before each conversation without one; of
    several templates by name, return all.

    Whatever saves or applies the template then has the turn. A model that was saved with it can be
    trained again: the turn is written once, as the prompts then have a system turn.
    """
    if isinstance(template, dict):
        return {name: with_system_turn(each, text) for name, each in template.items()}  # type: ignore[misc]
    # A JSON object is also an expression of jinja.
    turn = json.dumps({"role": "system", "content": text}, ensure_ascii=False)
    first = f"{{%- if messages[0]['role'] != 'system' %}}{{%- set messages = [{turn}] + messages %}}{{%- endif %}}"
    # transformers and vLLM drop the line end behind a block.
    return template if template.startswith(first) else f"{first}\n{template}"


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_name: str, stop_token: str
) -> list[int]:
    """Return the token ids that end a response. The first one also ends a text to learn.

    Args:
        stop_token: --stop_token, the text of one token, or "eos" for the following ones in this
            order: the token at which a reward model was trained to score (`score_token`), the token
            that ends a turn of the chat template, the tokenizer's end token, and the end tokens of
            generation_config.json. Base models may have only the template's.
    """
    if stop_token != "eos":
        ids = tokenizer.encode(stop_token, add_special_tokens=False)
        if len(ids) != 1:
            raise UserError(
                f"--stop_token {stop_token!r}: must be exactly one token of the tokenizer, this is {len(ids)}"
            )
        return ids
    configured: list[int] = []
    base = base_of(model_name)
    with as_user_error(f"--model {model_name}: generation_config.json"):
        if find_file(base, transformers.utils.GENERATION_CONFIG_NAME):
            given = transformers.GenerationConfig.from_pretrained(base).eos_token_id
            listed = given if isinstance(given, list) else [given]
            configured = [int(token) for token in listed if token is not None]
    scored = getattr(load_config("--model", model_name), "score_token", None)
    ending = tokenizer.encode(end_of_turn(tokenizer), add_special_tokens=False)
    known = {tokenizer.eos_token_id, scored, *configured}
    ends = [token for token in ending if token in known]
    ends += [token for token in ending if token in tokenizer.added_tokens_decoder]
    stop_ids = dict.fromkeys([scored, *ends[:1], tokenizer.eos_token_id, *configured])
    stop_ids.pop(None, None)
    if not stop_ids:
        raise UserError(
            "--stop_token eos: neither the tokenizer nor the model names an end token; give the token's text"
        )
    return list(stop_ids)


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template writes behind the last turn of the assistant; "" without a
    template.
    """
    if tokenizer.chat_template is None:
        return ""
    with as_user_error("the chat template of --model"):
        return tokenizer.apply_chat_template(TURNS, tokenize=False).partition("A-TURN")[2]


def check_can_read(flag: str, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a UserError unless the model `name` gives each token the id that `tokenizer`, that of
    --model, gives it.
    """
    if difference := vocabulary_difference(tokenizer, read_tokenizer(flag, name)):
        raise UserError(
            f"{flag} {name}: cannot read what --model writes: its vocabulary {difference}"
        )


def check_same_tokens(flag: str, name: str, model: str) -> None:
    """Raise a UserError unless the model `name` has a log-probability for each token of --model
    `model`. It may have more tokens, as padding.
    """
    check_can_read(flag, name, read_tokenizer("--model", model))
    theirs, ours = (load_config(flag, x).get_text_config().vocab_size for x in (name, model))
    if theirs < ours:
        raise UserError(f"{flag} {name}: has {theirs} tokens, less than the {ours} of --model")


def vocabulary_difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str:
    """Return how the vocabulary of `theirs` differs from that of `ours`, the tokenizer of --model;
    "" if they are the same.

    A pad token that only one of them has is no difference: padding is masked by length.
    """
    our_ids = ours.get_vocab()
    their_ids = theirs.get_vocab()
    pads = {ours.pad_token, theirs.pad_token} - (our_ids.keys() & their_ids.keys())
    tokens = (our_ids | their_ids).keys() - pads
    different = sorted(token for token in tokens if our_ids.get(token) != their_ids.get(token))
    if not different:
        return ""
    return f"has other ids for {len(different)} tokens, such as {different[0]!r}"
