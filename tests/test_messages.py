"""Messages: all that a row says reaches the model as the chat template writes it, or the run ends.

The templates are those of real models, which the package trl ships.
"""

import functools
import importlib.util
import json
import types
from pathlib import Path

import helpers
import pytest
from helpers import refused
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

import distill
import grpo
from plumbing.data import cache, prompts
from plumbing.data.encoding import Text, encode_texts, puts_space
from plumbing.data.formats import Columns
from plumbing.data.mixture import mix
from plumbing.data.pairs import make_pair
from plumbing.data.rendering import Rendering
from plumbing.rewards.sources import why_unscorable
from utils import UserError

SPEC = importlib.util.find_spec("trl")
TEMPLATES = Path(SPEC.submodule_search_locations[0], "chat_templates") if SPEC else None
TABLE = helpers.table("messages.yaml")
REPORTED = helpers.ROOT / "tests/data/reported"
WORDS = "QQ1 AA1 SS1 DD1 QQ2 AA2 RR1 TT1 get_weather Oslo".split()  # of the forms
real_templates = pytest.mark.skipif(SPEC is None, reason="requires trl's templates")


@functools.cache
def tokenizer_of(template: str):
    """Return a tokenizer of bytes with the template of a model."""
    tokens = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        bos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token=None,
    )
    tokenizer.add_tokens("<|im_start|> <tool_call> </tool_call> <think> </think>".split())
    tokenizer.chat_template = TABLE.get(template) or (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


def load(path, template: str, learn: bool, monkeypatch, talks=None, **changes) -> list[dict]:
    """Return the rows of a file, to learn from, or as prompts of RL."""
    monkeypatch.setattr(cache, "check_fits", lambda *_, **__: None)  # there is no model
    args = vars((distill if learn else grpo).Args(model=str(helpers.ROOT / "assets/tiny")))
    given = {"max_prompt_length": 4096, "max_response_length": 512, "system_prompt": ""}
    given |= {"on_policy_share": 0.0} if learn else {"reward": ("exact",)}
    tokenizer = tokenizer_of(template)
    parts = prompts.load_prompts(
        "--dataset",
        str(path),
        "train",
        tokenizer,
        types.SimpleNamespace(**{**args, **given, **changes}),
        (lambda *_: "") if learn else why_unscorable,
        talks,
        "conversations" if learn else "",
        [tokenizer.eos_token_id],
    )
    return list(mix(parts, 1))


def learned(row: dict, tokenizer) -> str:
    return tokenizer.decode([x for x, kept in zip(row["response"], row["mask"]) if kept])


# ---- real templates ------------------------------------------------------------------------------


@real_templates
@pytest.mark.parametrize("template", TABLE["templates"])
def test_every_form_of_message_is_shown_or_refused(template, capsys):
    """Held: all words of the row are in its tokens, and what is learned has those of its turns."""
    tokenizer = tokenizer_of(template)
    stop_ids = (tokenizer.eos_token_id,)
    make = functools.partial(
        prompts.make_prompts,
        columns=Columns("messages", None),
        rendering=Rendering(tokenizer, stop_ids),
        learn="conversations",
        span=(0, 1),
        sources=None,
        why_unscorable=lambda *_: "",
    )
    held = []
    for form, (row, to_learn) in TABLE["forms"].items():
        try:
            made = make("row 1", row)
        except UserError as error:
            assert "row 1" in str(error)
            continue
        held.append(form)
        rows = [
            {
                "query": encode_texts(x["query"], tokenizer)[0],
                "response": sum(encode_texts(x["response"], tokenizer, stop_ids), []),
                "learned": [text.shown for text in x["response"] if text.is_learned],
            }
            for x in made
        ]
        whole = "".join(tokenizer.decode(x["query"] + x["response"]) for x in rows)
        said = json.dumps(row["messages"])
        assert [x for x in WORDS if x in said and x not in whole] == []
        text = "".join(sum([x["learned"] for x in rows], []))
        assert [x for x in WORDS if x in text] == [x for x in WORDS if x in to_learn.split()]
    assert held == TABLE["templates"][template].split()


# ---- what was reported, and its kin ----------------------------------------------------------------


@real_templates
@pytest.mark.parametrize("case", TABLE["rows"])
def test_rows_as_people_have_them(case, tmp_path, monkeypatch, capsys):
    """[template, how it is used, a file of tests/data/reported or its row, what it becomes]."""
    template, use, row, *expected = TABLE["rows"][case]
    path = REPORTED / f"{row}.jsonl"
    if isinstance(row, dict):
        path = helpers.write_rows(tmp_path / "rows.jsonl", [row])
    if use == "refused":
        line = refused(capsys, load, path, template, expected[0] == "learn", monkeypatch)
        assert f"row 1{expected[1]}" in line
        return
    rows = load(path, template, use == "learn", monkeypatch)
    tokenizer = tokenizer_of(template)
    if use == "learn":
        assert [learned(x, tokenizer) for x in rows] == expected[0]
    (parts,) = expected[1:] or [[]]
    for part in parts:
        assert part in tokenizer.decode(rows[-1]["query"])
    if use == "prompt":
        assert rows[0]["answer"] == expected[0]


@real_templates
def test_pairs_are_compared_with_their_calls(capsys):
    lines = (REPORTED / "30_pairs_of_calls.jsonl").read_text().splitlines()
    pair = json.loads(lines[0])
    tokenizer = tokenizer_of("qwen3")
    rendering = Rendering(tokenizer, (tokenizer.eos_token_id,))
    make = functools.partial(make_pair, "row 1", rendering=rendering)
    (made,) = make(pair)
    assert '{"city": "Oslo"}}\n</tool_call>' in made["chosen_text"]
    assert '{"city": "Rome"}}\n</tool_call>' in made["rejected_text"]
    pair["rejected"] = [pair["chosen"][0], {**pair["rejected"][1], "content": "Let me look."}]
    assert make(pair)[0]["chosen_text"] != make(pair)[0]["rejected_text"]
    with pytest.raises(UserError, match="are the same"):
        make({**pair, "rejected": pair["chosen"]})
    with pytest.raises(UserError, match="tool_calls, and no prompt before it"):
        make({"chosen": pair["chosen"][1:], "rejected": pair["rejected"][1:]})


@real_templates
def test_values_for_the_template_in_pairs_and_conversations(tmp_path, monkeypatch, capsys):
    tokenizer = tokenizer_of("qwen3")
    values = {"chat_template_kwargs": {"enable_thinking": False}}
    row = {"prompt": "Hi", "chosen": "Ho", "rejected": "No", **values}
    (made,) = make_pair("row 1", row, Rendering(tokenizer, (tokenizer.eos_token_id,)))
    assert made["prompt"].endswith("</think>\n\n") and made["chosen_text"] == "Ho<|im_end|>"
    path = helpers.write_rows(tmp_path / "rows.jsonl", [row])
    talks = types.SimpleNamespace(schemas=None)
    line = refused(capsys, load, path, "qwen3", False, monkeypatch, talks)
    assert "row 1: chat_template_kwargs cannot vary with --tools" in line


@real_templates
def test_an_answer_beside_the_last_turn_is_said(tmp_path, monkeypatch, capsys):
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "It is"}]
    path = helpers.write_rows(tmp_path / "rows.jsonl", [{"messages": turns, "answer": "2"}])
    load(path, "qwen3", False, monkeypatch)
    assert "the assistant's last turn is left out" in capsys.readouterr().out


# ---- tokenizers that put a space before what they encode ------------------------------------------


SPACES = {
    "prepend": {"normalizer": [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]},
    "first": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False)},
    "always": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always", split=False)},
    "bytes": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
}


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize(
    "before, text",
    [
        ("[INST] 2+2? [/INST]", "Four it is<eos>"),
        ("a<eos>", "\nb c"),
        ("<eos>", "Next one"),
        ("a\n", " b"),
    ],
)
def test_parts_have_the_tokens_of_the_whole(kind, before, text):
    pieces = dict.fromkeys([*"▁Ġ▁Ċ[]/+?\n", *map(chr, range(48, 123)), "▁F", "▁N", "▁b", "ĠF"])
    merges = [tuple(piece) for piece in pieces if len(piece) == 2]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    for name, value in SPACES[kind].items():
        value = normalizers.Sequence(value) if isinstance(value, list) else value
        setattr(core, name, value)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    parts = encode_texts([Text("", before), Text("", text, before=before)], tokenizer)
    assert puts_space(tokenizer)
    assert sum(parts, []) == tokenizer.encode(before + text, add_special_tokens=False)
    if before.endswith("]"):
        assert encode_texts([Text("", text)], tokenizer)[0] != parts[1]
