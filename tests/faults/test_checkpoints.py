"""Checkpoints and args.json with damage at a place that a seed draws, and runs that go on with another model.

What one damage of each kind does to a run is in tests/test_resume.py.
"""

import json
import random
import shutil
from functools import partial
from pathlib import Path

import helpers
import pytest
import torch
from helpers import folder_of, metrics_of, run_here, run_ranks, weights_of

import grpo
from plumbing.run import files, resume


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    values = helpers.workspace(tmp_path_factory.mktemp("checkpoints"))
    return {**values, "num_epochs": 1, "save_every": 2, "eval_every": 0, "run_name": "run", "ref_refresh_every": 2}


@pytest.fixture(scope="module")
def whole(base) -> dict:
    """Four steps of two sharded ranks: model, reference, two shards of the optimizer, two random states."""
    run_ranks({**base, "shard": "fsdp"}, 2, (0, 0))
    return base


@pytest.fixture
def copy(whole, tmp_path) -> dict:
    shutil.copytree(whole["output_dir"], tmp_path / "runs")
    return {**whole, "output_dir": str(tmp_path / "runs"), "resume": True}


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def zeros(content: bytes, draw: random.Random) -> bytes:
    """A block that never reached the disk."""
    start = draw.randrange(len(content))
    length = min(len(content) - start, draw.choice((1, 512, 4096)))
    return content[:start] + bytes(length) + content[start + length :]


HARMS = {  # None: the file is removed
    "flip": flip,
    "zeros": zeros,
    "cut": lambda content, draw: content[: draw.randrange(len(content))],
    "longer": lambda content, draw: content + draw.randbytes(draw.randint(1, 9)),
    "swapped": lambda content, draw: content[len(content) // 2 :] + content[: len(content) // 2],
    "empty": lambda content, draw: b"",
    "missing": None,
}


def harm(folder: Path, draw: random.Random) -> tuple[Path, str, bytes]:
    """Damage a file of a folder: which one, how, and what it was before."""
    while True:
        path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        name = draw.choice(list(HARMS))
        before = path.read_bytes()
        after = HARMS[name] and HARMS[name](before, draw)
        if after != before:
            path.unlink() if after is None else path.write_bytes(after)
            return path, name, before


def test_damage_anywhere_is_found(copy, long):
    """In any file of a checkpoint, at any byte, and the file is named."""
    folder = folder_of(copy) / "checkpoints" / "step_4"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"optimizer/__0_0.distcp", "optimizer/__1_0.distcp", "optimizer/.metadata", "random_state_1.pt"} <= names
    assert {"model.safetensors", "reference/model.safetensors", "trainer_state.pt", files.CHECKSUMS} <= names
    draw, seen = random.Random(15), set()
    for _ in range(5000 if long else 300):
        path, name, before = harm(folder, draw)
        reason = files.damage(str(folder))
        assert str(path) in reason or path.name == files.CHECKSUMS and reason, (path, name, reason)
        seen.add((path, name))
        path.write_bytes(before)
    assert not files.damage(str(folder)) and len(seen) > len(names) * (6 if long else 4)


def test_each_bit_of_the_checksums(copy, long):
    folder = folder_of(copy) / "checkpoints" / "step_4"
    path = folder / files.CHECKSUMS
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 1 if long else 29):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert files.damage(str(folder)), (bit, bytes(changed[bit // 8 - 20 : bit // 8 + 20]))


def test_an_entry_that_got_the_name_of_another(tmp_path):
    """By one bit: both are checked all the same."""
    for name in ("state_0", "state_1"):
        (tmp_path / name).write_text(name)
    entries = json.dumps(files.checksums(str(tmp_path)))
    (tmp_path / files.CHECKSUMS).write_text(entries)
    assert not files.damage(str(tmp_path))
    for was, now in (("state_0", "state_1"), ("state_1", "state_0")):
        (tmp_path / files.CHECKSUMS).write_text(entries.replace(was, now))
        assert f"{now} is damaged" in files.damage(str(tmp_path))
    for other in ("1", "[1]", "null", '"ab"', '["abc"]'):
        (tmp_path / files.CHECKSUMS).write_text(other)
        assert f"{files.CHECKSUMS} cannot be read" in files.damage(str(tmp_path)), other


def test_a_run_goes_on_whatever_is_damaged(whole, tmp_path, long, capsys):
    """From the checkpoint before, and ends as it has ended."""
    for number in range(20 if long else 2):
        values = {**whole, "output_dir": str(tmp_path / str(number)), "resume": True}
        shutil.copytree(whole["output_dir"], values["output_dir"])
        path, _, _ = harm(folder_of(values) / "checkpoints" / "step_4", random.Random(number))
        run_here(values)
        said = capsys.readouterr()
        assert f"{path}" in said.err and "so the checkpoint before it is taken" in said.err
        assert "goes on after step 2" in said.out and [row["step"] for row in metrics_of(values)] == [1, 2, 3, 4]
        ours, theirs = (weights_of(folder_of(each) / "final") for each in (values, whole))  # one rank, and two sharded
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in theirs)
        shutil.rmtree(values["output_dir"])


def test_text_files_with_damage(copy, long, capsys):
    """A resume reads args.json and the logs or refuses them with one line; it never ends in a traceback."""
    folder, draw = folder_of(copy), random.Random(3)
    args, refused = grpo.Args(output_dir=copy["output_dir"], run_name="run", resume=True), 0
    for number in range(3000 if long else 200):
        path = folder / draw.choice(("args.json", "metrics.jsonl", "samples.jsonl"))
        before = path.read_bytes()
        kind = draw.choice(("flip", "zeros", "cut", "longer", "swapped", "empty"))
        path.write_bytes(HARMS[kind](before, draw))
        try:
            args.resume_with_changes = bool(number % 2)
            resume.find(args, "grpo.py")
        except SystemExit as end:
            errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
            assert end.code == 2 and len(errors) == 1, (path, kind, errors)
            refused += 1
        finally:
            path.write_bytes(before)
            resume.locks.clear()
    assert refused


# ---- another model or script -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(base, tmp_path_factory) -> dict[str, dict]:
    """A step of grpo.py, without and with an adapter."""
    folder = str(tmp_path_factory.mktemp("short"))
    once = {**base, "output_dir": folder, "total_episodes": 8, "save_every": 1, "ref_refresh_every": 0}
    runs = {"whole": {**once, "run_name": "whole"}, "adapter": {**once, "run_name": "adapter", "lora_rank": 2}}
    for values in runs.values():
        run_here(values)
    return {name: {**values, "resume": True, "total_episodes": 16} for name, values in runs.items()}


def other_ids(folder: str) -> None:
    """Let the tokens of a tokenizer change places."""
    path = Path(folder) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    ids = tokenizer["model"]["vocab"]
    names = [name for name in ids if len(name) == 1]
    ids.update(zip(names, [ids[name] for name in reversed(names)]))
    path.write_text(json.dumps(tokenizer))


OTHER_MODELS = {  # what --model has become, and what is said of it
    "wider": (partial(helpers.tiny_model, hidden_size=48), "has other layers than the model that trains"),
    "deeper": (partial(helpers.tiny_model, num_hidden_layers=3), "has other layers than the model that trains"),
    "another family": (partial(helpers.tiny_model, kind="gpt_neox"), "has other layers than the model that trains"),
    "more logits": (partial(helpers.tiny_model, vocab_size=300), "its vocabulary has 300 tokens, that of --model 259"),
    "other ids": (other_ids, "gives other ids to "),
}


@pytest.mark.parametrize(
    "kind, name, renamed",
    [("whole", name, renamed) for name in OTHER_MODELS for renamed in (False, True)]
    + [
        ("adapter", name, False) for name in OTHER_MODELS if name != "more logits"
    ],  # of which the adapter knows nothing
)
def test_another_model(short, tmp_path, capsys, kind, name, renamed):
    """Under the same name, or under another one that --resume_with_changes lets pass."""
    change, said = OTHER_MODELS[name]
    values = {**short[kind], "output_dir": str(tmp_path)}
    shutil.copytree(folder_of(short[kind]), folder_of(values))
    model, kept = Path(values["model"]), tmp_path / "kept"
    shutil.copytree(model, kept)
    if renamed:
        values |= {"model": str(kept), "resume_with_changes": True}
    try:
        change(values["model"])
        before = [path.read_bytes() for path in sorted(folder_of(values).rglob("*.json*"))]
        with pytest.raises(SystemExit) as end:
            run_here(values)
    finally:
        if not renamed:
            shutil.rmtree(model)
            shutil.copytree(kept, model)
    (line,) = [line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if line.startswith("error:")]
    if kind == "adapter" and name != "other ids":
        said = "step_1 cannot be loaded ("
    assert end.value.code == 2 and said in line and "--model" in line, line
    assert [path.read_bytes() for path in sorted(folder_of(values).rglob("*.json*"))] == before


@pytest.mark.parametrize("script", ["rloo", "ppo"])
def test_another_script(short, tmp_path, capsys, script):
    """A line, also where --resume_with_changes lets it pass, and a part of the checkpoint is missing for it."""
    values = {**short["whole"], "output_dir": str(tmp_path)}
    shutil.copytree(folder_of(short["whole"]), folder_of(values))
    for changes, said in (({}, f"{script}.py (was grpo.py)"), ({"resume_with_changes": True}, "step_1/critic")):
        if script == "rloo" and changes:
            run_here({**values, **changes}, script)  # nothing that it needs is missing
            continue
        with pytest.raises(SystemExit) as end:
            run_here({**values, **changes}, script)
        errors = [x for x in capsys.readouterr().err.replace("\r", "\n").split("\n") if x.startswith("error:")]
        assert end.value.code == 2 and len(errors) == 1 and said in errors[0], errors
