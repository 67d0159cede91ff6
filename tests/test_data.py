"""Data: what the readers make of each kind of row, mixtures, and conversations through the chat template."""

import collections
import json
import types

import helpers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from plumbing.data import mixture as data
from plumbing.data import prompts
from plumbing.data.rows import read_rows
from plumbing.models import loading as models
from plumbing.rewards.sources import needs_answer
from plumbing.run import evaluation

ARGS = dict(
    prompt_column="", answer_column="", system_prompt="", max_prompt_length=512, reward=("math",), eval_every=20,
    eval_prompts=256, dataset_split="train", eval_split="test", eval_dataset="", max_response_length=64,
    model=str(helpers.ROOT / "assets" / "tiny"), chat_template="", overlong_prompts="drop", ptx_dataset="",
    ptx_split="train", verifier_column="",
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
    "open-instruct": (
        {"messages": [{"role": "user", "content": "6*7?"}], "ground_truth": "42", "dataset": "gsm8k"},
        "6*7?", "42", "math",
    ),
    "TRL": ({"prompt": "6*7?", "completion": "42"}, "6*7?", "42", "exact"),
    "TRL, as messages": (
        {"prompt": [{"role": "user", "content": "6*7?"}], "completion": [{"role": "assistant", "content": "42"}]},
        "6*7?", "42", "exact",
    ),
    "verl": (
        {
            "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "6*7?"}], "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "42"}, "extra_info": {"index": 3},
        },
        "6*7?", "42", "gsm8k",
    ),
    "src and its reference in another column": ({"src": ["6*7?"], "tgt": [], "answer": "42"}, "6*7?", "42", "math"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECOGNISED)
def test_known_rows_need_no_flags(name, tokenizers, tmp_path):
    row, prompt, answer, reward = RECOGNISED[name]
    messages = isinstance(row.get("prompt", row.get("messages")), list)
    (got,) = load([row], tmp_path, tokenizers[False, WITHOUT_BOS if messages else None], reward=(reward,))
    assert got["prompt"] == (f"<user>{prompt}</><assistant>" if messages else prompt) and got["answer"] == answer
    assert got["columns"] == row  # whole: reward functions get them


def test_reasoning_gym_rows_are_apart_and_the_same_each_time(tokenizers):
    pytest.importorskip("reasoning_gym")
    name, tokenizer = "reasoning_gym:leg_counting", tokenizers[False, None]
    args = args_of(reward=("reasoning_gym",), max_prompt_length=2000)
    train, test = (data.load_prompts("--dataset", name, split, tokenizer, args) for split in ("train", "test"))
    assert (len(train), len(test)) == (5000, 500)
    assert train[7]["columns"]["reasoning_gym"] == ["leg_counting", 5000, 1, 7]
    assert train[:3] == data.load_prompts("--dataset", name, "train", tokenizer, args)[:3]
    assert train[0]["prompt"] != test[0]["prompt"] and train[0]["answer"].isdigit()


@pytest.mark.parametrize("name, words", [("reasoning_gym:no_such", "no_such"), ("reasoning_gym:", "reasoning_gym:")])
def test_no_such_task(name, words, tokenizers, capsys):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(SystemExit):
        data.load_prompts("--dataset", name, "train", tokenizers[False, None], args_of())
    err = capsys.readouterr().err
    assert err.startswith("error: --dataset reasoning_gym:") and words in err and err.count("\n") == 1


@pytest.mark.parametrize("flag, expected", [("", ["exact"]), ("kind", ["math"]), ("none", None), ("kid", None)])
def test_rows_that_name_their_sources(tokenizers, tmp_path, capsys, flag, expected):
    """An answer is needed where a named source reads it; a column that is nowhere is warned of."""
    rows = [{"prompt": "1+1?", "answer": "2", "verifier": "exact", "kind": "math"}]
    reward = ("math", "exact", "format")
    (got,) = load(rows, tmp_path, tokenizers[False, None], reward=reward, verifier_column=flag)
    assert got["sources"] == expected
    warned = capsys.readouterr().err.count("has no column 'kid', which --verifier_column names")
    assert warned == (flag == "kid")
    without = [*rows, {"prompt": "2+2?", "verifier": "format"}]
    if not flag:
        assert [row["answer"] for row in load(without, tmp_path, tokenizers[False, None], reward=reward)] == ["2", None]


# ---- src and tgt ------------------------------------------------------------------------------------------------

turns = st.lists(st.text("ab \n", min_size=1).filter(str.strip), min_size=1, max_size=5)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(turns, turns)
def test_both_readings_of_src_and_tgt(src, tgt):
    """The turns alternate and begin with the user; what is left of tgt, if anything, is the reference."""
    if not len(src) - 1 <= len(tgt) <= len(src):
        with pytest.raises(SystemExit):
            prompts.conversation("row", src, tgt)
        return
    prompt, reference = prompts.conversation("row", src, tgt)
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


# ---- messages ----------------------------------------------------------------------------------------------------


def one(row, tmp_path, tokenizer, **changes) -> tuple:
    (got,) = load([row], tmp_path, tokenizer, **changes)
    return got["prompt"], got["answer"]


def test_a_last_turn_of_the_assistant_is_the_reference_and_not_part_of_the_prompt(tokenizers, tmp_path, capsys):
    tokenizer, said = tokenizers[False, WITHOUT_BOS], [*DIALOGUE, {"role": "assistant", "content": "5"}]
    asked = one({"messages": DIALOGUE, "answer": "5"}, tmp_path, tokenizer)
    assert one({"messages": said}, tmp_path, tokenizer) == asked
    assert one({"messages": said, "answer": "five"}, tmp_path, tokenizer) == (asked[0], "five")
    with pytest.raises(SystemExit):
        load([{"messages": said[-1:]}], tmp_path, tokenizer)
    assert "row 1: has a turn of the assistant and nothing before it" in capsys.readouterr().err


def test_parts_of_text_are_joined(tokenizers, tmp_path):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    rows = ({"prompt": [{"role": "user", "content": content}], "answer": "2"} for content in (parts, "1+1?"))
    whole, joined = (one(row, tmp_path, tokenizers[False, WITHOUT_BOS]) for row in rows)
    assert whole == joined


@pytest.mark.parametrize(
    "content", [None, 3, {"text": "a"}, ["a"], [{"type": "image", "url": "a.png"}], [{"type": "text", "text": None}]],
    ids=str,
)  # fmt: skip
def test_content_that_is_no_text_is_named_with_its_row(content, tokenizers, tmp_path, capsys):
    rows = [ROWS["messages"][0], {"messages": [{"role": "user", "content": content}], "answer": "2"}]
    with pytest.raises(SystemExit):
        load(rows, tmp_path, tokenizers[False, WITHOUT_BOS])
    err = capsys.readouterr().err
    assert "row 2: the content of a message is text or a list of text parts" in err and err.count("\n") == 1


def test_a_template_from_a_file_and_none(tokenizers, tmp_path, capsys):
    """Rows that hold the template already are warned of, and go in as they are with `none`."""
    (tmp_path / "chat.jinja").write_text("<eos>{{ messages[-1]['content'] }}<pad>")
    folder = str(helpers.ROOT / "assets" / "tiny")
    tokenizer = models.load_tokenizer(folder, str(tmp_path / "chat.jinja"))
    row = {"prompt": "<eos>1+1=<pad>", "answer": "2"}
    assert one({"prompt": "1+1=", "answer": "2"}, tmp_path, tokenizer)[0] == row["prompt"]
    assert capsys.readouterr().err == ""
    assert one(row, tmp_path, tokenizer)[0] == "<eos><eos>1+1=<pad><pad>"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and "1 of 1 prompts hold <" in line and "--chat_template none" in line
    as_is = dict(chat_template="none", system_prompt="Think.")
    (got,) = load([row], tmp_path, tokenizer, **as_is)
    assert got["prompt"] == row["prompt"] and got["query"] == tokenizer.encode(row["prompt"], add_special_tokens=False)
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        load([{"prompt": DIALOGUE, "answer": "5"}], tmp_path, tokenizer, **as_is)
    assert "--chat_template none takes text" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        models.load_tokenizer(folder, str(tmp_path / "no.jinja"))
    assert capsys.readouterr().err.startswith(f"error: --chat_template {tmp_path / 'no.jinja'}: ")


# ---- rows that lack something, or have too much -------------------------------------------------------------------


def test_first_rows_without_an_answer(tokenizers, tmp_path, capsys):
    """The column is that of any row; a row that has nothing in it is named."""
    rows = [{"prompt": "a", "other": 1}, {"prompt": "b", "answer": None}, {"prompt": "c", "answer": "3"}]
    got = load(rows, tmp_path, tokenizers[False, None], reward=("format",))
    assert [row["answer"] for row in got] == [None, None, "3"]
    with pytest.raises(SystemExit):
        load(rows, tmp_path, tokenizers[False, None])
    assert "row 1: has no answer in 'answer', which --reward math needs" in capsys.readouterr().err


def test_answers_that_a_reward_cannot_use(tokenizers, tmp_path, capsys):
    """They are named by their number in the file, and not asked of a reward that does not score the row."""
    rows = [{"prompt": "a" * 600, "answer": "1"}, {"prompt": "a", "answer": ["966"]}, {"prompt": "b", "answer": [1, 2]}]
    rows.append({"prompt": "c", "answer": [1, 2], "verifier": "format"})
    changes = {"overlong_prompts": "drop", "reward": ("math", "format")}
    assert len(load(rows, tmp_path, tokenizers[False, None], **changes)) == 3
    said = capsys.readouterr().err
    assert "--reward math cannot use the answers of 1 of 2 rows" in said and "(row 3: [1, 2] is a list" in said


def test_columns_with_dots(tokenizers, tmp_path, capsys):
    row = {"in": {"text": "6*7?"}, "out": {"a": {"b": 42}}, "out.a": "exactly so called"}
    names = dict(prompt_column="in.text", answer_column="out.a.b")
    assert one(row, tmp_path, tokenizers[False, None], **names) == ("6*7?", 42)
    assert one(row, tmp_path, tokenizers[False, None], **{**names, "answer_column": "out.a"})[1] == "exactly so called"
    with pytest.raises(SystemExit):
        one(row, tmp_path, tokenizers[False, None], **{**names, "answer_column": "in.text.b"})
    assert "has no column 'in.text.b' with anything in it; name one with --answer_column" in capsys.readouterr().err


def test_prompts_that_are_too_long_are_left_out_and_counted(tokenizers, tmp_path, capsys):
    rows = [{"prompt": "1" * length, "answer": "1"} for length in (3, 9, 4, 8)]
    got = load(rows, tmp_path, tokenizers[False, None], max_prompt_length=5)
    assert [len(row["query"]) for row in got] == [3, 4]
    (line,) = capsys.readouterr().err.splitlines()
    told = "left out 2 of 4 rows that are too long; row 2 has 9 tokens, over --max_prompt_length 5"
    assert line == f"warning: --dataset {tmp_path / 'rows.jsonl'}: {told}"
    for changes in (dict(max_prompt_length=2), dict(max_prompt_length=5, overlong_prompts="error")):
        with pytest.raises(SystemExit):
            load(rows, tmp_path, tokenizers[False, None], **changes)
    first, second = capsys.readouterr().err.splitlines()
    assert "every row is too long; row 1 has 3 tokens" in first
    assert "row 2: has 9 tokens, over --max_prompt_length 5; --overlong_prompts drop" in second


@pytest.mark.parametrize("saved", [False, True])
def test_a_folder_without_the_split(saved, tokenizers, tmp_path, capsys):
    """Its only split is not taken for another one."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    (tmp_path / "folder").mkdir()
    helpers.write_rows(tmp_path / "folder" / "train.jsonl", helpers.ROWS)
    name = str(tmp_path / "folder")
    if saved:
        rows = datasets.load_dataset(name, split="train", cache_dir=str(tmp_path / "cache"))
        rows.save_to_disk(tmp_path / "saved")
        name = str(tmp_path / "saved")
    assert read_rows("--dataset", name, "train") == helpers.ROWS
    capsys.readouterr()
    with pytest.raises(SystemExit):
        data.load_train_and_eval(args_of(dataset=name), tokenizers[False, None], "")
    err = capsys.readouterr().err
    assert err.startswith(f"error: --eval_split of --dataset {name}: ") and "'test'" in err and "['train']" in err


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


def test_an_evaluation_takes_turns_and_each_prompt_once(mixed):
    rows, _ = mixed([(3, 2), (50, 1), (7, 1e-9)])
    taken = [row["prompt"] for row in data.first_prompts(rows, 8)]
    assert taken == ["a0", "b0", "a1", "a2", "b1", "b2", "b3", "b4"]
    everything = [row["prompt"] for row in data.first_prompts(rows, 0)]
    assert len(everything) == 60 and set(everything) == {row["prompt"] for row in rows}
    assert [row["prompt"] for row in data.first_prompts(rows.parts[1][0], 2)] == ["b0", "b1"]
    assert {row["dataset"] for row in rows} == {f"parts/{c}.jsonl" for c in "abc"}


def test_entries_may_name_their_split(tmp_path, tokenizers):
    entries = [{"prob": 1, "filepath": "arithmetic"}, {"prob": 1, "filepath": "arithmetic", "split": "test"}]
    (tmp_path / "mix.json").write_text(json.dumps(entries))
    rows = data.load_prompts("--dataset", str(tmp_path / "mix.json"), "train", tokenizers[False, None], args_of())
    sizes = {part[0]["dataset"]: len(part) for part, _ in rows.parts}
    assert sizes == {"arithmetic": 20_000, "arithmetic:test": 1_000}


def test_supervised_rows_of_a_list(tmp_path, tokenizers):
    helpers.write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    entries = [{"prob": 3, "filepath": "a.jsonl"}, {"prob": 1, "filepath": "arithmetic"}]
    (tmp_path / "mix.json").write_text(json.dumps(entries))
    tokenizer = tokenizers[False, None]
    args = args_of(ptx_dataset=str(tmp_path / "mix.json"), ptx_split="test")
    rows = data.load_supervised(args, tokenizer, [1])
    assert [len(part) for part, _ in rows.parts] == [1, 1000]
    stream = data.take_prompts(rows, 0, 8, seed=1)
    assert [tokenizer.decode(row["response"]) for row in stream].count("b<eos>") == 6


@pytest.mark.parametrize(
    "entry, word",
    [
        ({"prob": 1, "filepath": "a.jsonl", "weight": 2}, "'weight'"), ({"prob": 1, "file": "a.jsonl"}, "'file'"),
        ({"prob": 1, "filepath": "a.jsonl", "split": 3}, "split takes a name"),
    ],
)  # fmt: skip
def test_unknown_keys_of_an_entry(entry, word, tmp_path, tokenizers, capsys):
    helpers.write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1"}])
    (tmp_path / "mix.json").write_text(json.dumps([{"prob": 0.5, "filepath": "a.jsonl"}, entry]))
    with pytest.raises(SystemExit):
        data.load_prompts("--dataset", str(tmp_path / "mix.json"), "train", tokenizers[False, None], args_of())
    err = capsys.readouterr().err
    assert err.startswith(f"error: --dataset {tmp_path / 'mix.json'} entry 2: ") and word in err


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
    """Resumed or not, the same prompts, as samples.jsonl tells. Each data set of an evaluation has an accuracy."""
    values = helpers.workspace(tmp_path)
    (tmp_path / "mix.json").write_text(
        json.dumps([{"prob": 3, "filepath": "train.jsonl"}, {"prob": 1, "filepath": "held_out.jsonl"}])
    )
    for letter in "ab":
        helpers.write_rows(tmp_path / f"{letter}.jsonl", [{"prompt": f"{letter}{i}", "answer": "1"} for i in range(5)])
    (tmp_path / "evaluated.json").write_text(json.dumps([{"prob": 1, "filepath": f"{c}.jsonl"} for c in "ab"]))
    values |= {"dataset": str(tmp_path / "mix.json"), "eval_dataset": "", "eval_every": 0, "run_name": "whole"}
    helpers.run_here({**values, "eval_dataset": str(tmp_path / "evaluated.json"), "eval_prompts": 4, "eval_every": 4})
    parts = {"run_name": "parts", "total_episodes": 16}
    helpers.run_here({**values, **parts})
    helpers.run_here({**values, **parts, "total_episodes": 32, "resume": True})
    whole, pieces = (helpers.read_lines(tmp_path / "runs" / name / "samples.jsonl") for name in ("whole", "parts"))
    assert whole == pieces and len(whole) == 32
    held_out = {row["prompt"] for row in helpers.HELD_OUT}
    assert sum(row["prompt"] in held_out for row in whole) == 8
    last = helpers.read_lines(tmp_path / "runs" / "whole" / "metrics.jsonl")[-1]
    assert {name for name in last if name.startswith("eval/accuracy/")} == {f"eval/accuracy/{c}.jsonl" for c in "ab"}


def test_accuracy_of_each_data_set():
    rows = [{"dataset": name} for name in "aabab"]
    found = evaluation.accuracy_of_data_sets(rows, torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]))
    assert found == {"eval/accuracy/a": pytest.approx(2 / 3), "eval/accuracy/b": 1.0}
    assert evaluation.accuracy_of_data_sets(rows[:2], torch.tensor([1.0, 0.0])) == {}
