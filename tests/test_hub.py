"""--push_to_hub: the model card, and what is asked of the hub; its client is replaced."""

import json
import types

import helpers
import huggingface_hub
import pytest
from helpers import folder_of, refused, run_here, variant

from plumbing.run import hub


class Hub:
    """Stands for huggingface_hub.HfApi, and notes what it is asked."""

    def __init__(self, monkeypatch, fails: str = ""):
        self.fails = fails
        self.pushed = []
        monkeypatch.setattr(hub, "HfApi", lambda: self)

    def create_repo(self, name: str, exist_ok: bool):
        if self.fails == "create":
            raise huggingface_hub.errors.LocalTokenNotFoundError(
                "Token is required\nbut no token found."
            )
        return types.SimpleNamespace(repo_id=f"me/{name}" if "/" not in name else name)

    def upload_folder(self, **options):
        if self.fails == "upload":
            raise OSError("503 Service Unavailable")
        self.pushed.append(options)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    values = helpers.workspace(tmp_path_factory.mktemp("hub"))
    return values | {
        "total_episodes": 8,
        "save_every": 1,
        "eval_every": 1,
        "push_to_hub": "my-model",
    }


def test_a_run_pushes_its_final_model(base, tmp_path, monkeypatch, capsys):
    api = Hub(monkeypatch)
    values = variant(base, tmp_path)
    run_here(values)
    (pushed,) = api.pushed
    assert pushed["repo_id"] == "me/my-model" and pushed["folder_path"] == str(
        folder_of(values) / "final"
    )
    assert (
        capsys.readouterr().out.rstrip().endswith("published: https://huggingface.co/me/my-model")
    )
    card = (folder_of(values) / "final" / "README.md").read_text()
    assert "# my-model" in card and "flags of `grpo.py`" in card and '"kl_coef": 0.1' in card
    # of a folder on this machine
    assert "| held-out accuracy, sampled" in card and "base_model" not in card
    # A finished run is published by --resume; the model stays where the push fails, and the line
    # says how to repeat it.
    Hub(monkeypatch, fails="upload")
    line = refused(capsys, run_here, {**values, "resume": True})
    assert "503 Service Unavailable" in line and "--push_to_hub me/my-model: " in line
    assert f"hf upload me/my-model {folder_of(values) / 'final'} . " in line
    assert (
        json.loads((folder_of(values) / "args.json").read_text())["args"]["push_to_hub"]
        == "me/my-model"
    )


def test_no_token(base, tmp_path, monkeypatch, capsys):
    """Is noticed before a model is loaded, and no folder is left."""
    Hub(monkeypatch, fails="create")
    values = variant(base, tmp_path)
    line = refused(capsys, run_here, values)
    assert line.startswith("error: --push_to_hub my-model: Token is required")
    assert not folder_of(values).exists()


def test_the_card(tmp_path, monkeypatch):
    """Flags without defaults and without what a server's address may hide, the last numbers, and
    the run's address.
    """
    defaults = {
        "model": "a/b",
        "dataset": "x",
        "reward": ["math"],
        "lora_rank": 8,
        "non_stop_penalty": True,
    }
    args = {
        "model": "Qwen/Qwen2.5-0.5B",
        "dataset": "https://me:secret@host/a.jsonl?key=secret",
        "lora_rank": 8,
    }
    args |= {"reward": ["math", "http://me:secret@judge:9/x?key=secret"], "non_stop_penalty": False}
    helpers.write_rows(
        tmp_path / "metrics.jsonl", [{"step": 7, "eval/accuracy": 0.51234, "objective/kl": None}]
    )
    (tmp_path / "args.json").write_text(
        json.dumps({"args": args, "defaults": defaults, "script": "grpo.py"})
    )
    (tmp_path / "final").mkdir()
    Hub(monkeypatch)
    hub.push(str(tmp_path), "me/model", "https://wandb.ai/me/run")
    text = (tmp_path / "final" / "README.md").read_text()
    assert "secret" not in text and "base_model: Qwen/Qwen2.5-0.5B\n" in text
    assert (
        "`Qwen/Qwen2.5-0.5B` after 7 steps on `https://host/a.jsonl`. [The run](https://wandb.ai/me/run)."
        in text
    )
    assert json.loads(text.partition("```json")[2].partition("```")[0]) == {
        "model": "Qwen/Qwen2.5-0.5B",
        "dataset": "https://host/a.jsonl",
        "reward": ["math", "http://judge:9/x"],
        "non_stop_penalty": False,
    }
    assert "| held-out accuracy, sampled (what is trained) | 0.5123 |" in text and "KL" not in text
