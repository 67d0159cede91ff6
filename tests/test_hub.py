"""--push_to_hub: the final model and its card on a stand-in for the hub, and what happens where that fails."""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import shlex
import sys
import types
import typing
from pathlib import Path

import helpers
import huggingface_hub
import pytest
import torch
import transformers
from helpers import ROOT, folder_of, run_here
from hub_server import Hub
from huggingface_hub import ModelCard, constants

import grpo
import reward_model
import rloo
from plumbing import command_line, flags
from plumbing.data import prompts
from plumbing.models import loading as models
from plumbing.run import hub, model_card
from plumbing.run.resume import as_json


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A stand-in for the hub, with this process's client logged in there."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "good")
    huggingface_hub.utils.disable_progress_bars()
    with Hub(xet_folder=str(tmp_path / "xet")) as hub_server:
        monkeypatch.setattr(constants, "ENDPOINT", hub_server.url)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub_server.url)  # of its functions
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # made once a process, with the endpoint of then
        template = hub_server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        (tmp_path / "xet").mkdir()
        yield hub_server


def refused(capsys, action, *arguments) -> str:
    with pytest.raises(SystemExit) as end:
        action(*arguments)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert end.value.code == 2 and len(lines) == 1
    return lines[0]


# ---- at the start ----------------------------------------------------------------------------------------------------


def test_a_repository_is_made_or_found(server):
    args = grpo.Args(push_to_hub=True)
    assert (
        hub.open_repository(args, "grpo__Qwen2.5-0.5B-Instruct__gsm8k__1") == "me/grpo__Qwen2.5-0.5B-Instruct__gsm8k__1"
    )
    args = grpo.Args(push_to_hub=True, hub_model_id="me/mine", hub_private_repo=True)
    assert [hub.open_repository(args, "x") for _ in range(2)] == ["me/mine"] * 2
    assert server.private == {"me/mine"}


@pytest.mark.parametrize(
    "flags, reason",
    [
        (dict(hub_model_id="a/b/c"), "--hub_model_id a/b/c: takes name or owner/name"),
        (dict(hub_model_id="a name"), "--hub_model_id a name: takes name or owner/name"),
        (dict(), "--push_to_hub as a--run (without --hub_model_id): takes name or owner/name"),
        (dict(hub_model_id="you/model"), "(403 Forbidden: You don't have the rights to create a model under you)"),
        (dict(hub_model_id="me/locked"), "--hub_model_id me/locked: cannot be pushed to (403 Forbidden"),
        (dict(hub_model_id="me/locked", hub_private_repo=True), "cannot be pushed to (403 Forbidden"),
    ],
)
def test_what_cannot_be_pushed_to(server, capsys, flags, reason):
    assert reason in refused(capsys, hub.open_repository, grpo.Args(push_to_hub=True, **flags), "a--run")


def test_who_cannot_push(server, capsys, monkeypatch):
    args = grpo.Args(push_to_hub=True, hub_model_id="me/mine")
    said = lambda: refused(capsys, hub.open_repository, args, "x")
    monkeypatch.setenv("HF_TOKEN", "bad")
    assert "(401 Unauthorized)" in said()
    monkeypatch.delenv("HF_TOKEN")
    assert "--push_to_hub: there is no token of the hub; hf auth login" in said()
    monkeypatch.setenv("HF_TOKEN", "good")
    server.faults.append(("whoami", 500))
    assert "(500 Internal Server Error: as told)" in said()
    server.faults.append(("repos/create", "cut"))
    assert "(Server disconnected" in said()
    hub.open_repository(args, "x")
    args.hub_private_repo = True
    assert "me/mine is there already, and public" in said()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in said()


@pytest.mark.parametrize("values", [dict(hub_model_id="me/x"), dict(hub_private_repo=True)])
def test_a_repository_without_a_push(values, capsys):
    assert "takes --push_to_hub" in refused(capsys, flags.check_training_args, grpo.Args(**values))


# ---- at the end ------------------------------------------------------------------------------------------------------

ROWS = [
    {"step": 0, "eval/accuracy": 0.25, "eval/pass@2": 0.5},
    {"step": 1, "episode": 8, "objective/scores": 0.125, "eval/accuracy": 0.75, "time/from_scratch": 60.0},
    {"step": 2, "episode": 16, "objective/scores": 0.5, "eval/accuracy": 0.5, "objective/kl": None,
     "time/from_scratch": 90.0},
]  # fmt: skip


def finished(folder: Path, args, script: str = "grpo.py") -> Path:
    """A run's folder, as it is when its model is saved."""
    (folder / "final").mkdir(parents=True, exist_ok=True)
    (folder / "final" / "model.safetensors").touch()
    facts = {"args": as_json(args), "defaults": as_json(type(args)()), "script": script, "ranks": 2, "history": []}
    (folder / "args.json").write_text(json.dumps({**facts, "versions": {"torch": "2.13"}, "git_commit": "abc"}))
    addresses = {f"eval/reward/{name}": 0.5 for name in getattr(args, "reward", ()) if "://" in name}
    helpers.write_rows(folder / "metrics.jsonl", [row | addresses for row in ROWS])
    (folder / "curves.png").write_bytes(os.urandom(3000))
    return folder


def pushed(server, folder: Path, args, chat_template=None) -> dict[str, bytes]:
    tokenizer = types.SimpleNamespace(chat_template=chat_template)
    repository = hub.open_repository(args, folder.name)
    hub.push(str(folder), repository, args, tokenizer, None)
    return server.repositories[repository]


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def examples(card: str) -> list[str]:
    """The programs in a card that need no vLLM; those that do have to be Python at least."""
    programs = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert all(compile(program, "card", "exec") for program in programs)
    return [program for program in programs if "vllm" not in program]


def done_by(program: str) -> tuple[dict, str]:
    """What a program defines and prints."""
    names, out = {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(program, names)
    return names, out.getvalue()


@pytest.fixture
def run_folder(tmp_path):
    folder = finished(tmp_path / "run", ARGS)
    (folder / "final" / "model.safetensors").write_bytes(os.urandom(2_000_000))
    return folder


ARGS = grpo.Args(push_to_hub=True, reward=("math", "http://user:secret@host:80/r"), loss="dapo", mask_truncated=True)


def test_what_is_pushed(server, run_folder):
    """All of final/, byte for byte, in place of the weights before; what else was there stays."""
    server.repositories["me/run"] = {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"x"}
    found = pushed(server, run_folder, ARGS)
    assert found == {**files_below(run_folder / "final"), "notes.txt": b"x"}
    assert {"args.json", "metrics.jsonl", "curves.png", "README.md", "model.safetensors"} < found.keys()
    assert not any(b"secret" in content for content in found.values()) and b"http://host:80/r" in found["args.json"]
    assert b"http://host:80/r" in found["metrics.jsonl"] and b"http://host:80/r" in found["README.md"]
    assert b"secret" in (run_folder / "args.json").read_bytes()
    assert server.messages == ["Model of run"]


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"reward": ["http://user:secret@host:80/r"]}', '{"reward": ["http://host:80/r"]}'),
        ("https://user@host, https://host", "https://host, https://host"),
        ("http://user:p@ss-w%2Frd!@host/a@b?c@d", "http://host/a@b?c@d"),
        ("http://host/a http://host?a@b user@host", "http://host/a http://host?a@b user@host"),
    ],
)
def test_addresses_without_passwords(text, expected):
    assert hub.without_passwords(text) == expected


@pytest.mark.parametrize("fault", [("preupload", 500), ("PUT /large", "cut"), ("PUT /large", 500)])
def test_a_fault_that_passes(server, run_folder, fault):
    server.faults.append(fault)
    assert pushed(server, run_folder, ARGS) == {".gitattributes": b"", **files_below(run_folder / "final")}


@pytest.mark.parametrize("fault", [("preupload", 401), ("commit", 500), ("commit", "cut"), ("PUT /large", 403)])
def test_a_push_that_fails(server, run_folder, capsys, fault):
    """The model stays, and the command of the message pushes it."""
    server.faults.append(fault)
    line = refused(capsys, pushed, server, run_folder, ARGS)
    why = "Server disconnected" if fault[1] == "cut" else str(fault[1])
    again = f"push it by hf upload me/run {run_folder / 'final'} --delete '*.safetensors*'"
    assert why in line and line.endswith(again)
    assert "model.safetensors" not in server.repositories["me/run"]


def test_by_xet(server, run_folder, monkeypatch):
    """The way that the hub's client takes by itself: content by content, in a folder here."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    server.faults.append(("commit", 500))
    found, final = pushed(server, run_folder, ARGS), files_below(run_folder / "final")
    large = {name: content for name, content in final.items() if name.endswith((".safetensors", ".png"))}
    assert found == {".gitattributes": b"", **final} | {
        name: hashlib.sha256(content).hexdigest().encode() for name, content in large.items()
    }
    stored = sum(path.stat().st_size for path in Path(server.xet_folder).rglob("*") if path.is_file())
    assert stored > sum(map(len, large.values()))


# ---- the card --------------------------------------------------------------------------------------------------------


def card_of(folder: Path, args, script: str = "grpo.py") -> ModelCard:
    finished(folder, args, script)
    for name in ("args.json", "metrics.jsonl"):
        (folder / name).rename(folder / "final" / name)
    return model_card.model_card(str(folder / "final"), "me/run", False, None)


def test_the_card(tmp_path):
    """Its metadata by the hub's own parser; only what is on the hub is named there."""
    args = grpo.Args(
        loss="dapo", mask_truncated=True, non_stop_penalty=False, system_prompt="Think, then say 'it'.",
        reward=("math", "code"), output_dir="elsewhere", dataset="openai/gsm8k:main",
    )  # fmt: skip
    card = card_of(tmp_path / "run", args)
    data = ModelCard(str(card)).data.to_dict()
    assert data == {
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct", "datasets": ["openai/gsm8k"], "library_name": "transformers",
        "pipeline_tag": "text-generation", "tags": ["dapo", "reinforcement-learning"],
    }  # fmt: skip
    base = "[Qwen/Qwen2.5-0.5B-Instruct](https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct)"
    paper = "[arXiv:2503.14476](https://arxiv.org/abs/2503.14476)"
    on = "[openai/gsm8k:main](https://huggingface.co/datasets/openai/gsm8k)"
    assert f"{base}, trained by GRPO with DAPO's loss ({paper}) on {on}." in card.text
    assert "Rewards: `math`, `code`." in card.text and "It took 2 steps and 16 responses, 1.5 minutes." in card.text
    assert "| | step 0 (first) | step 1 (best) | step 2 (last) |\n|---|---|---|---|\n" in card.text
    assert "| `eval/accuracy` | 0.25 | 0.75 | 0.5 |\n| `eval/pass@2` | 0.5 |  |  |\n\n" in card.text
    assert "| | step 2 |\n|---|---|\n| mean score | 0.5 |\n\n" in card.text
    (line,) = re.findall("torchrun --nproc_per_node 2 grpo.py .*", card.text)
    assert command_line.parse(grpo.Args, shlex.split(line)[4:]) == dataclasses.replace(args, output_dir="runs")
    named = {word for word in shlex.split(line) if word.startswith("--")} - {"--nproc_per_node"}
    assert named == {"--dataset", "--loss", "--mask_truncated", "--no-non_stop_penalty", "--reward", "--system_prompt"}
    assert "With 2 ranks, torch 2.13, commit abc." in card.text


@pytest.mark.parametrize("loss", [*grpo.VARIANTS, "a fork's"])
def test_every_algorithm_has_its_paper(tmp_path, loss):
    text = card_of(tmp_path / "run", dataclasses.replace(grpo.Args(), loss=loss)).text
    known = loss in model_card.ALGORITHMS
    assert known or loss in ("reinforce", "a fork's")
    assert ("arxiv.org/abs/" in text) == known and ("trained by `" in text) != known


def test_a_fork_has_its_own_name(tmp_path):
    """Whatever it is called: a fork's --loss need not do what the paper says."""
    text = card_of(tmp_path / "run", grpo.Args(loss="dapo", push_to_hub=True), "forks/dapo.py").text
    assert "trained by `dapo.py` on" in text and "arxiv.org" not in text
    assert "torchrun --nproc_per_node 2 forks/dapo.py --loss dapo\n" in text


def test_papers_of_the_other_scripts():
    advantages = typing.get_args(typing.get_type_hints(rloo.Args)["advantage"])
    assert {*advantages, "ppo", "reward_model"} < model_card.ALGORITHMS.keys()
    sources = " ".join((ROOT / f"{name}.py").read_text() for name in ("grpo", "rloo", "ppo", "reward_model"))
    assert all(paper in sources for _, paper in model_card.ALGORITHMS.values())


def test_local_models_and_data(tmp_path, tiny_folder):
    """A list of data sets is named by what stands in it; paths of this machine are no names on the hub."""
    (tmp_path / "rows.jsonl").touch()
    parts = [{"prob": 1.0, "filepath": "rows.jsonl"}, {"prob": 2.0, "filepath": "openai/gsm8k"}]
    (tmp_path / "list.json").write_text(json.dumps(parts))
    card = card_of(tmp_path / "run", rloo.Args(model=tiny_folder, dataset=str(tmp_path / "list.json")), "rloo.py")
    assert card.data.base_model is None and card.data.datasets == ["openai/gsm8k"]
    on = "`rows.jsonl`, [openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k)"
    assert f"`{os.path.basename(tiny_folder)}`, trained by RLOO " in card.text and f" on {on}." in card.text


# ---- how to load it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_the_example_of_a_reward_model(server, tmp_path, chat):
    """It gives the score that the trainer gives the same token ids."""
    folder, tokenizer = tmp_path / "run", helpers.make_tokenizer()
    tokenizer.chat_template = helpers.CHAT_TEMPLATE if chat else None
    helpers.scalar_folder(helpers.tiny_model(tmp_path / "model"), folder / "final", tokenizer=tokenizer)
    args = reward_model.Args(push_to_hub=True, system_prompt="Be brief.")
    found = pushed(server, finished(folder, args, "reward_model.py"), args, tokenizer.chat_template)
    card = ModelCard(found["README.md"].decode())
    assert card.data.pipeline_tag == "text-classification" and "[arXiv:2203.02155]" in card.text
    (program,) = examples(card.text)
    names, out = done_by(program)
    _, query = prompts.encode_prompt("", model_card.QUESTION, tokenizer, args.system_prompt)
    ids = [*query, *tokenizer.encode(model_card.RESPONSE), tokenizer.eos_token_id]
    assert names["ids"] == ids
    scorer, _ = models.load_scalar_model("--model", str(folder / "final"), torch.float32, torch.device("cpu"))
    pair = {"chosen": ids, "rejected": ids}
    with torch.no_grad():
        assert float(out) == pytest.approx(scorer(*reward_model.collate([pair], "cpu"))[0].item(), rel=1e-5)


def test_the_example_of_a_chat_model(server, tmp_path):
    folder = tmp_path / "run"
    helpers.tiny_model(folder / "final", chat=True)
    args = grpo.Args(push_to_hub=True, max_response_length=4, system_prompt="Say \\boxed{it}.")
    found = pushed(server, finished(folder, args), args, helpers.CHAT_TEMPLATE)
    (program,) = examples(found["README.md"].decode())
    names, _ = done_by(program)
    tokenizer = names["tokenizer"]
    text, ids = prompts.encode_prompt("", model_card.QUESTION, tokenizer, args.system_prompt)
    assert "Say \\boxed{it}." in text and names["inputs"]["input_ids"].tolist() == [ids]
    assert 1 <= names["output"].shape[1] - len(ids) <= 4


class TrackedRun(types.SimpleNamespace):
    """What wandb.init returns, as far as a run log asks."""

    url = "https://wandb.ai/me/project/runs/1"
    finish = lambda self: None

    def log(self, values: dict, step: int, commit: bool = True) -> None:
        self.logged |= {step: {**self.logged.get(step, {}), **values}}


def test_a_run_that_is_pushed_when_it_is_resumed(server, tmp_path, monkeypatch, capsys):
    """A first push fails; the model that a second one brings is loaded from there, by the programs of its card."""
    values = helpers.workspace(tmp_path) | dict(
        total_episodes=8, kl_coef=0.0, num_epochs=1, run_name="run", stop_token="5"
    )
    values |= dict(lora_rank=2, push_to_hub=True)
    server.faults.append(("commit", 401))
    line = refused(capsys, run_here, values)
    assert "(401 Unauthorized: as told); push it by hf upload me/run " in line
    before = helpers.weights_of(folder_of(values) / "final")
    tracked = TrackedRun(summary={}, logged={})
    wandb = dict(init=lambda **_: tracked, login=lambda: True, Error=OSError, Settings=dict, Histogram=len, Table=dict)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(**wandb))
    run_here(values | dict(resume=True, track=True))
    final = folder_of(values) / "final"
    assert server.repositories["me/run"] == {".gitattributes": b"", **files_below(final)}
    assert f"published: {server.url}/me/run" in capsys.readouterr().out
    assert tracked.summary == {"published_model": f"{server.url}/me/run"}
    last = {name: x for name, x in helpers.read_lines(final / "metrics.jsonl")[-1].items() if x is not None}
    assert last.items() <= tracked.logged[1].items()
    card = ModelCard.load("me/run")
    assert f"[The run in Weights & Biases]({tracked.url})." in card.text
    generation, adapter = examples(card.text)
    names, _ = done_by(generation)
    loaded = names["model"].state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in before.items())
    assert loaded["model.embed_tokens.weight"].equal(loaded["lm_head.weight"]) == ("lm_head.weight" not in before)
    with torch.no_grad():
        theirs = done_by(adapter)[0]["model"].eval()(**names["inputs"]).logits
        torch.testing.assert_close(theirs, names["model"].eval()(**names["inputs"]).logits, rtol=1e-4, atol=1e-4)
