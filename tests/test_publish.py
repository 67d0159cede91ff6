"""scripts/publish.py: the card, and what is asked of the hub, whose client is replaced."""

import json
import shutil

import publish
import pytest
import tyro
from helpers import refused, write_rows
from huggingface_hub import RepoUrl
from huggingface_hub.errors import LocalTokenNotFoundError

DEFAULTS = {
    "model": "a/b",
    "dataset": "x",
    "reward": ["math"],
    "lora_rank": 8,
    "non_stop_penalty": True,
}
CHANGED = {
    "model": "Qwen/Qwen2.5-0.5B",
    "dataset": "https://me:secret@host/a.jsonl?key=secret",
    "reward": ["math", "http://me:secret@judge:9/x?key=secret"],
    "non_stop_penalty": False,
}


@pytest.fixture
def run(tmp_path):
    """A run's folder."""
    folder = tmp_path / "run"
    (folder / "final").mkdir(parents=True)
    rows = [{"step": 6, "loss": 1.0}, {"step": 7, "eval/accuracy": 0.51234, "objective/kl": None}]
    write_rows(folder / "metrics.jsonl", rows)
    flags = {
        "args": DEFAULTS | CHANGED | {"run_name": "x"},
        "defaults": {**DEFAULTS, "run_name": ""},
    }
    (folder / "args.json").write_text(json.dumps({**flags, "script": "grpo.py"}))
    return folder


@pytest.fixture
def pushed(monkeypatch) -> list[dict]:
    """What is pushed to a hub that has any repository, of "me" where no owner is named."""
    calls = []
    make = lambda name, exist_ok: RepoUrl(
        f"https://huggingface.co/{name if '/' in name else f'me/{name}'}"
    )
    monkeypatch.setattr(publish, "create_repo", make)
    monkeypatch.setattr(publish, "upload_folder", lambda **options: calls.append(options))
    return calls


def command(*words) -> None:
    tyro.cli(publish.main, args=list(map(str, words)))


def test_the_model_is_pushed_with_its_card(run, pushed, capsys):
    """Flags without defaults and without what a server's address may hide, the last numbers, and
    the run's address.
    """
    (run / "tracked.txt").write_text("https://wandb.ai/me/run")
    command(run, "my-model")
    assert capsys.readouterr().out == "https://huggingface.co/me/my-model\n"
    assert pushed == [
        {
            "repo_id": "me/my-model",
            "folder_path": f"{run}/final",
            "delete_patterns": "*.safetensors*",
        }
    ]
    text = (run / "final" / "README.md").read_text()
    assert "secret" not in text and "base_model: Qwen/Qwen2.5-0.5B\n" in text
    assert "# my-model\n\n`Qwen/Qwen2.5-0.5B` after 7 steps on `https://host/a.jsonl`." in text
    assert ". [The run](https://wandb.ai/me/run).\n" in text
    assert json.loads(text.partition("```json")[2].partition("```")[0]) == {
        **CHANGED,
        "dataset": "https://host/a.jsonl",
        "reward": ["math", "http://judge:9/x"],
    }
    assert "| held-out accuracy, sampled (what is trained) | 0.5123 |\n\n" in text
    assert "KL" not in text


def test_a_run_of_a_folder_without_tracking(run, pushed, monkeypatch):
    """Its card names no base model, which others do not have, and no address."""
    (run.parent / "Qwen" / "Qwen2.5-0.5B").mkdir(parents=True)
    monkeypatch.chdir(run.parent)
    command("run", "lab/my-model")
    text = (run / "final" / "README.md").read_text()
    assert "base_model" not in text and "The run" not in text
    assert pushed[0]["repo_id"] == "lab/my-model"


@pytest.mark.parametrize("missing", ["final", "args.json", "metrics.jsonl"])
def test_a_run_that_is_not_whole(run, pushed, capsys, missing):
    path = run / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    line = refused(capsys, command, run, "my-model")
    assert line.startswith(f"error: RUN {run}: has no ") and missing in line
    assert not pushed


@pytest.mark.parametrize(
    "call, error",
    [
        ("create_repo", LocalTokenNotFoundError("Token is required\nbut no token found.")),
        ("upload_folder", OSError("503 Service Unavailable")),
    ],
)
def test_a_hub_that_refuses(run, pushed, monkeypatch, capsys, call, error):
    def refuse(*_, **options):
        raise error

    monkeypatch.setattr(publish, call, refuse)
    line = refused(capsys, command, run, "me/my-model")
    assert line == f"error: MODEL me/my-model: {str(error).splitlines()[0]}"
