"""--track: what wandb and libraries like it get."""

import math
import sys
import types

import pytest

import grpo
import utils
from plumbing.run import log
from plumbing.run.resume import Origin


def logged(folder, name: str) -> log.RunLog:
    """Log a step of a run, with a sample."""
    run = log.RunLog(Origin(str(folder), run_id="7"), grpo.Args(track=name), utils.World(0, 1, None), 4, 1)
    run.table(2, [{"prompt": "1+1=", "math": 1.0}])
    run.log({"step": 2, "objective/scores": 0.5, "perf/mfu": math.nan})
    run.close("the end")
    return run


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged(tmp_path, "wandb")
    wandb.teardown()  # else it stays offline in this process
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_library_gets_metrics_and_samples(tmp_path, monkeypatch):
    """trackio has the functions of wandb that are used; a resumed run goes on under its name or id."""
    calls = []
    for name in ("trackio", "wandb"):
        library = types.ModuleType(name)
        library.init = lambda **options: calls.append(options) or types.SimpleNamespace(url="https://there/run")
        library.log = lambda row, step: calls.append((row, step))
        library.Table = lambda columns, data: (columns, data)
        library.finish = lambda: calls.append("finished")
        monkeypatch.setitem(sys.modules, name, library)
    for name in ("trackio", "wandb"):
        calls.clear()
        run = logged(tmp_path, name)
        begin, *rest = calls
        assert begin["name"] == tmp_path.name and begin["resume"] == "allow" and begin["config"]["track"] == name
        assert begin.get("id") == (None if name == "trackio" else "7") and run.url == "https://there/run"
        samples = {"samples": (["prompt", "math"], [["1+1=", 1.0]])}
        assert rest == [(samples, 2), ({"step": 2, "objective/scores": 0.5}, 2), "finished"]


def test_a_library_that_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(SystemExit) as end:
        log.check_track("trackio")
    assert end.value.code == 2 and capsys.readouterr().err.startswith("error: --track trackio: ")


def test_a_login_that_is_missing(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(SystemExit) as end:
        log.check_track("wandb")
    assert end.value.code == 2 and "error: --track wandb: " in capsys.readouterr().err
