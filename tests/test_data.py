"""Data: what the readers make of each kind of row, mixtures, and conversations through the chat template."""

import collections
import json
import types

import helpers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from plumbing import data
from plumbing.rewards import needs_answer

ARGS = dict(
    prompt_column="", answer_column="", system_prompt="", max_prompt_length=512, reward=("math",), eval_every=20,
    eval_prompts=256, dataset_split="train", eval_split="test", eval_dataset="", max_response_length=64,
)  # fmt: skip

# The templates of Llama (which begins with the BOS) and of Qwen (which has none), as far as they matter here.
WITH_BOS = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501
WITHOUT_BOS = WITH_BOS.removeprefix("{{ bos_token }}")


def args_of(**changes):
    return types.SimpleNamespace(**{**ARGS, **changes})


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict:
    """One that puts a BOS before a text and one that does not, each with and without a template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    folder, made = tmp_path_factory.mktemp("tokenizers"), {}
    tokens = ["<pad>", "<eos>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    for bos in (True, False):
        core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        if bos:
            core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
        for template in (None, WITH_BOS, WITHOUT_BOS):
            special = {"pad_token": "<pad>", "eos_token": "<eos>", **({"bos_token": "<bos>"} if bos else {})}
            if template == WITH_BOS and not bos:
                continue
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **special)
            path = folder / f"{bos}{len(template or '')}"
            tokenizer.save_pretrained(path)
            made[bos, template] = AutoTokenizer.from_pretrained(path)
    return made


def load(rows, tmp_path, tokenizer, **changes) -> list[dict]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = args_of(**changes)
    return data.load_prompts("--dataset", str(path), "train", tokenizer, args, needs_answer(args))


# ---- rows that people have --------------------------------------------------------------------------------------

RECOGNISED = {
    "GSM8K": ({"question": "6*7?", "answer": "6*7=42\n#### 42"}, "6*7?", "6*7=42\n#### 42", "gsm8k"),
    "MATH": (
        {"problem": "6*7?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{42}$."},
        "6*7?", "It is $\\boxed{42}$.", "math",
    ),
    "DeepScaleR": (
        {"problem": "6*7?", "answer": "42", "solution": "See above."}, "6*7?", "42", "math",
    ),
    "BigMath": ({"prompt": "6*7?", "ground_truth": 42}, "6*7?", 42, "math"),
    "Knights and Knaves": (
        {
            "quiz": "Zoey says ...", "names": ["Zoey"], "solution": [True], "solution_text": "Zoey is a knight.",
            "solution_text_format": "(1) Zoey is a knight",
        },
        "Zoey says ...", "Zoey is a knight.", "knights",
    ),
    "src and tgt": ({"src": ["6*7?"], "tgt": ["42"]}, "6*7?", "42", "math"),
    "src and tgt as text": ({"src": "6*7?", "tgt": "42"}, "6*7?", "42", "math"),
    "src and its reference in another column": ({"src": ["6*7?"], "tgt": [], "answer": "42"}, "6*7?", "42", "math"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECOGNISED)
def test_known_rows_need_no_flags(name, tokenizers, tmp_path):
    row, prompt, answer, reward = RECOGNISED[name]
    (got,) = load([row], tmp_path, tokenizers[False, None], reward=(reward,))
    assert got["prompt"] == prompt and got["answer"] == answer
    assert name != "MATH" or (got["level"], got["type"]) == ("Level 1", "Algebra")  # reward functions get the rest


def test_reasoning_gym_rows_are_apart_and_the_same_each_time(tokenizers):
    pytest.importorskip("reasoning_gym")
    name, tokenizer = "reasoning_gym:leg_counting", tokenizers[False, None]
    args = args_of(reward=("reasoning_gym",), max_prompt_length=2000)
    train, test = (data.load_prompts("--dataset", name, split, tokenizer, args) for split in ("train", "test"))
    assert (len(train), len(test)) == (5000, 500) and train[7]["reasoning_gym"] == ["leg_counting", 5000, 1, 7]
    assert train[:3] == data.load_prompts("--dataset", name, "train", tokenizer, args)[:3]
    assert train[0]["prompt"] != test[0]["prompt"] and train[0]["answer"].isdigit()


@pytest.mark.parametrize("name, words", [("reasoning_gym:no_such", "no_such"), ("reasoning_gym:", "reasoning_gym:")])
def test_no_such_task(name, words, tokenizers, capsys):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(SystemExit):
        data.load_prompts("--dataset", name, "train", tokenizers[False, None], args_of())
    err = capsys.readouterr().err
    assert err.startswith("error: --dataset reasoning_gym:") and words in err and err.count("\n") == 1


# ---- src and tgt ------------------------------------------------------------------------------------------------

turns = st.lists(st.text("ab \n", min_size=1).filter(str.strip), min_size=1, max_size=5)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(turns, turns)
def test_both_readings_of_src_and_tgt(src, tgt):
    """The turns alternate and begin with the user; what is left of tgt, if anything, is the reference."""
    if not len(src) - 1 <= len(tgt) <= len(src):
        with pytest.raises(SystemExit):
            data.conversation("row", src, tgt)
        return
    prompt, reference = data.conversation("row", src, tgt)
    assert reference == (tgt[-1] if len(tgt) == len(src) else None)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    assert isinstance(prompt, str) == (len(src) == 1)
    assert [turn["content"] for turn in messages[::2]] == src
    assert [turn["content"] for turn in messages[1::2]] == tgt[: len(src) - 1]
    assert [turn["role"] for turn in messages] == ["user", "assistant"] * (len(src) - 1) + ["user"]


@pytest.mark.parametrize(
    "row", [
        {"src": [], "tgt": []}, {"src": ["a"], "tgt": ["b", "c"]}, {"src": ["a", "b"], "tgt": []},
        {"src": ["a", ""], "tgt": ["b"]}, {"src": [1], "tgt": ["b"]}, {"src": {"a": 1}, "tgt": []}, {"src": None},
        {"src": ["a"], "tgt": [None]}, {"src": ["a"], "tgt": 5},
    ],
)  # fmt: skip
def test_bad_src_and_tgt(row, tokenizers, tmp_path, capsys):
    with pytest.raises(SystemExit):
        load([{"src": "a", "tgt": "b"}, row], tmp_path, tokenizers[False, None])
    err = capsys.readouterr().err
    assert err.startswith(f"error: --dataset {tmp_path / 'rows.jsonl'} row 2: ") and err.count("\n") == 1


# ---- the chat template, exactly once ------------------------------------------------------------------------------

DIALOGUE = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "+3?"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]
ROWS = {
    "text": ({"prompt": "1+1?", "answer": "2"}, DIALOGUE[:1]),
    "src and tgt": ({"src": ["1+1?", "+3?"], "tgt": ["2", "5"]}, DIALOGUE),
    "src and tgt without a reference": ({"src": ["1+1?", "+3?"], "tgt": ["2"], "answer": "5"}, DIALOGUE),
    "messages": ({"messages": DIALOGUE, "answer": "5"}, DIALOGUE),
    "messages with a system turn": ({"messages": SYSTEM + DIALOGUE, "answer": "5"}, SYSTEM + DIALOGUE),
}


@pytest.mark.parametrize("system", ["", "Think."])
@pytest.mark.parametrize("kind", [(True, WITH_BOS), (True, WITHOUT_BOS), (False, WITHOUT_BOS)], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_token_ids_are_those_of_apply_chat_template(name, kind, system, tokenizers, tmp_path):
    row, messages = ROWS[name]
    tokenizer = tokenizers[kind]
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    (got,) = load([row], tmp_path, tokenizer, system_prompt=system)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert got["query"] == ids and ids.count(2) == (kind[1] == WITH_BOS)
    assert got["prompt"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("bos", [True, False])
def test_without_a_template_text_stays_as_it_is(bos, tokenizers, tmp_path, capsys):
    tokenizer = tokenizers[bos, None]
    (got,) = load([ROWS["text"][0]], tmp_path, tokenizer)
    assert got["query"] == tokenizer.encode("1+1?") and got["query"].count(2) == bos and got["prompt"] == "1+1?"
    with pytest.raises(SystemExit):
        load([ROWS["src and tgt"][0]], tmp_path, tokenizer)
    assert (
        "row 1: has messages or several turns, but the tokenizer of --model has no chat template"
        in capsys.readouterr().err
    )


# ---- mixtures ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path, tokenizers):
    """A list of data sets whose prompts begin with a, b, c ..., sizes and weights as given."""

    def make(parts: list[tuple[int, float]], **changes):
        (tmp_path / "parts").mkdir()
        for letter, (size, _) in zip("abcdef", parts):
            rows = [{"prompt": f"{letter}{i}", "answer": str(i)} for i in range(size)]
            helpers.write_rows(tmp_path / "parts" / f"{letter}.jsonl", rows)
        entries = [{"prob": weight, "filepath": f"parts/{c}.jsonl"} for c, (_, weight) in zip("abcdef", parts)]
        (tmp_path / "mix.json").write_text(json.dumps(entries))
        args = args_of(dataset=str(tmp_path / "mix.json"), **changes)
        return data.load_train_and_eval(args, tokenizers[False, None], needs_answer(args))

    return make


def test_a_mixture_takes_turns_by_weight_and_passes_through_each_part(mixed):
    rows, _ = mixed([(3, 2), (50, 1), (7, 5)])
    assert len(rows) == 60
    stream = [row["prompt"] for row in data.take_prompts(rows, 0, 800, seed=1)]
    for end in range(1, 800):
        counts = collections.Counter(prompt[0] for prompt in stream[:end])
        assert all(abs(counts[c] - share * end / 8) < 1.01 for c, share in zip("abc", (2, 1, 5)))
    for letter, size in zip("abc", (3, 50, 7)):
        own = [prompt for prompt in stream if prompt[0] == letter]
        passes = [own[i : i + size] for i in range(0, len(own) - size + 1, size)]
        assert len(passes) >= 2 and all(len(set(each)) == size for each in passes)
        assert len({tuple(each) for each in passes}) > 1  # shuffled anew
    pieces = [row["prompt"] for start in (400, 37, 0) for row in data.take_prompts(rows, start, 37, seed=1)]
    assert pieces == stream[400:437] + stream[37:74] + stream[:37]  # whatever was asked before
    assert stream != [row["prompt"] for row in data.take_prompts(rows, 0, 800, seed=2)]


def test_what_is_evaluated_on_is_taken_from_each_part(mixed, tmp_path, capsys):
    held_out = helpers.write_rows(
        tmp_path / "held_out.jsonl", [{"prompt": p, "answer": "0"} for p in ("a0", "b1", "b0")]
    )
    rows, evaluated = mixed([(1, 1), (3, 1)], eval_dataset=held_out)
    assert [row["prompt"] for row in evaluated] == ["a0", "b1", "b0"] and [row["prompt"] for row in rows] == ["b2"]
    assert {row["prompt"] for row in data.take_prompts(rows, 0, 9, seed=1)} == {"b2"}
    assert "left out 3 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    "entry", [
        {"prob": 0, "filepath": "parts/a.jsonl"}, {"prob": -1, "filepath": "parts/a.jsonl"},
        {"prob": "1", "filepath": "parts/a.jsonl"}, {"prob": 1, "filepath": 3}, {"prob": None, "filepath": "a"},
        {"prob": 10**400, "filepath": "parts/a.jsonl"}, {"prob": 1, "filepath": " "},
    ],
)  # fmt: skip
def test_bad_entries(entry, tmp_path, tokenizers, capsys):
    helpers.write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1"}])
    (tmp_path / "mix.json").write_text(json.dumps([{"prob": 0.5, "filepath": "a.jsonl"}, entry]))
    with pytest.raises(SystemExit):
        data.load_prompts("--dataset", str(tmp_path / "mix.json"), "train", tokenizers[False, None], args_of())
    err = capsys.readouterr().err
    assert err.startswith(f"error: --dataset {tmp_path / 'mix.json'} entry 2: takes a prob") and err.count("\n") == 1


def test_a_run_on_a_mixture(tmp_path):
    """Resumed or not, the same prompts, as samples.jsonl tells."""
    values = helpers.workspace(tmp_path)
    (tmp_path / "mix.json").write_text(
        json.dumps([{"prob": 3, "filepath": "train.jsonl"}, {"prob": 1, "filepath": "held_out.jsonl"}])
    )
    values |= {"dataset": str(tmp_path / "mix.json"), "eval_dataset": "", "eval_every": 0, "run_name": "whole"}
    helpers.run_here(values)
    parts = {"run_name": "parts", "total_episodes": 16}
    helpers.run_here({**values, **parts})
    helpers.run_here({**values, **parts, "total_episodes": 32, "resume": True})
    whole, pieces = (helpers.read_lines(tmp_path / "runs" / name / "samples.jsonl") for name in ("whole", "parts"))
    assert whole == pieces and len(whole) == 32
    held_out = {row["prompt"] for row in helpers.HELD_OUT}
    assert sum(row["prompt"] in held_out for row in whole) == 8
