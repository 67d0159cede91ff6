"""Texts turned into token ids.

A content that spells a token of the added vocabulary, such as "<|im_end|>", is encoded in parts: only
a chat template writes such tokens.
"""

import functools
import re
from itertools import chain
from typing import Any, NamedTuple, Sequence

from transformers import PreTrainedTokenizerBase

from utils import UserError, first_line

CUT = "\ufdd0"  # not a character of any text: Unicode reserves it for marks within a program
OWN = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # what the model itself writes


class Text(NamedTuple):
    """A text to encode, with CUT where no token may span."""

    where: str
    """Its place, for messages."""
    text: str
    special: bool = False
    """Whether the tokenizer puts special tokens around it, as around what no template has written."""
    is_learned: bool = False
    """Whether it is a response, which ends by a stop token."""
    before: str = ""
    """What stands before it."""

    @property
    def shown(self) -> str:
        return self.text.replace(CUT, "")


def encode_texts(
    texts: Sequence[Text], tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int] = ()
) -> list[list[int]]:
    """Return the token ids of texts; responses end by the first stop token, unless they have one
    there.

    The parts of a text between CUTs are encoded one by one, so that no token spans a cut. Raise
    UserError, naming the first text that the tokenizer refuses or makes no tokens of.
    """
    parts = [text.text.split(CUT) for text in texts]
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    encode = functools.partial(backend.encode_batch_fast, add_special_tokens=False)
    contexts = [
        context_of(tokenizer, before)
        for text, of_text in zip(texts, parts)
        for before in (text.before, *of_text[:-1])
    ]
    try:
        # A call of the tokenizer takes a fifth longer: it makes masks and offsets, too.
        encoded = iter(encode([a + b for a, b in zip(contexts, chain(*parts))]))
    except Exception as error:  # tokenizers raise exceptions of any type
        if len(texts) == 1:
            raise UserError(f"{texts[0].where}: {first_line(error)}") from error
        return [encode_texts([text], tokenizer, stop_ids)[0] for text in texts]
    drop = (len(x.ids) for x in encode(contexts))
    lists = []
    for text, of_text in zip(texts, parts):
        first, *others = [(next(encoded), next(drop)) for _ in of_text]
        if text.special:
            first = backend.post_process(first[0]), 0
        ids = list(chain.from_iterable(part.ids[start:] for part, start in (first, *others)))
        if text.special and ids[:2] == [tokenizer.bos_token_id] * 2:
            ids = ids[1:]
        if text.is_learned and ids[-1:] not in ([stop] for stop in stop_ids):
            ids.append(stop_ids[0])
        if not ids and text.text.strip():
            raise UserError(
                f"{text.where}: the tokenizer of --model makes no tokens of {text.text[:60]!r}"
            )
        lists.append(ids)
    return lists


def context_of(tokenizer: PreTrainedTokenizerBase, before: str) -> str:
    """Return what to encode before a text that stands behind another one, so that its tokens are
    those of the whole; its own tokens are dropped.

    SentencePiece and some others put a space before the first word of what they encode. "" for other
    tokenizers.
    """
    if not before or not puts_space(tokenizer):
        return ""
    added = (token for token in tokenizer.get_added_vocab() if before.endswith(token))
    return next(added, "\n")


@functools.cache
def puts_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer puts a space before a text."""
    tokens = tokenizer.backend_tokenizer.encode("x", add_special_tokens=False).tokens
    return tokens[:1] != [] and tokens[0][0] in "\u2581\u0120"  # of SentencePiece, and of bytes


@functools.cache
def added_texts(tokenizer: PreTrainedTokenizerBase, own: bool) -> re.Pattern:
    """Return a pattern of the first character of each text that is a token of the added
    vocabulary.
    """
    # Gemma's has blanks, too, which structure no conversation.
    texts = [
        text
        for text in tokenizer.get_added_vocab()
        if len(text.strip()) > 1 and not (own and text in OWN)
    ]
    patterns = [re.escape(text[0]) + f"(?={re.escape(text[1:])})" for text in texts]
    return re.compile("|".join(patterns) or "(?!)")


@functools.lru_cache(maxsize=1000)  # each turn of a conversation is rendered several times
def guarded_text(text: str, tokenizer: PreTrainedTokenizerBase, own: bool) -> str:
    """Return a text with CUT within what spells a token of the added vocabulary."""
    return added_texts(tokenizer, own).sub(lambda first: first[0] + CUT, text)


def guarded(value: Any, tokenizer: PreTrainedTokenizerBase, own: bool = False):
    """Return a text with CUT within what spells a token of the added vocabulary; of lists and
    objects, all texts.

    Only a chat template writes such tokens: a content with "<|im_end|>" would otherwise forge the
    turns behind it. `encode_texts` drops the cuts. Without them the token ids are those of the whole
    text.

    Args:
        own: leave OWN, as in turns of the assistant and in the instructions of a system turn.
    """
    if isinstance(value, str):
        return guarded_text(value, tokenizer, own)
    if isinstance(value, list):
        return [guarded(item, tokenizer, own) for item in value]
    if isinstance(value, dict):
        own = own or value.get("role") in ("assistant", "system")
        return {
            guarded(key, tokenizer, own): guarded(item, tokenizer, own)
            for key, item in value.items()
        }
    return value
