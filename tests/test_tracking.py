"""What a run prints, and what wandb and libraries like it get by --track."""

import contextlib
import math
import os
import pty
import re
import sys
import termios
import time
import types

import pytest
from helpers import ROOT, read_lines, refused, table, write_rows
from tiny_models import WORLD

import grpo
import utils
from plumbing.run import log
from plumbing.run.command import report_errors
from plumbing.run.run import Run


def log_of(folder, track: str = "", steps: int = 4, step: int = 1, **flags) -> log.RunLog:
    rewards = ("http://me:secret@judge:9/x?key=secret", "math")
    args = grpo.Args(track=track, reward=rewards, **flags)
    return log.RunLog(str(folder), "7", args, WORLD, steps, step)


def logged(folder, name: str) -> log.RunLog:
    """Log a step of a run, with a sample."""
    run = log_of(folder, name)
    run.lengths(1, "rows", [5, 5, 7])
    run.lengths(1, "none", [])
    run.table(2, [{"prompt": "1+1=", "/a/b.py:f": 1.0, "length": 3}])
    run.log({"step": 2, "objective/scores": 0.5, "time/step": 3.0, "perf/mfu": math.nan})
    run.close("the end")
    return run


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged(tmp_path, "wandb")
    wandb.teardown()  # else it stays offline in this process
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_library_gets_metrics_and_samples(tmp_path, monkeypatch, capsys):
    """trackio has the functions of wandb that are used; a resumed run goes on under its name or
    id.
    """
    calls = []
    for name in ("trackio", "wandb"):
        library = types.ModuleType(name)
        library.init = lambda **options: (
            calls.append(options) or types.SimpleNamespace(url="https://there/run")
        )
        library.log = lambda row, step: calls.append((row, step))
        library.Table = lambda columns, data: (columns, data)
        library.Histogram = tuple
        library.finish = lambda: calls.append("finished")
        monkeypatch.setitem(sys.modules, name, library)
    for name in ("trackio", "wandb"):
        calls.clear()
        logged(tmp_path, name)
        assert capsys.readouterr().out.startswith(
            "rows: 3 of 5 to 7 tokens, median 5\nheld-out sample after step 2"
        )
        begin, *rest = calls
        assert begin["config"]["reward"] == ["http://judge:9/x", "math"]
        assert (
            begin["name"] == tmp_path.name
            and begin["resume"] == "allow"
            and begin["config"]["track"] == name
        )
        assert begin.get("id") == (None if name == "trackio" else "7")
        assert (tmp_path / "tracked.txt").read_text() == "https://there/run"
        samples = {"samples": (["prompt", "b.py:f"], [["1+1=", 1.0]])}
        assert rest == [
            ({"lengths/rows": (5, 5, 7)}, 1),
            (samples, 2),
            ({"step": 2, "objective/scores": 0.5, "time/step": 3.0}, 2),
            "finished",
        ]


BROKEN = [
    ("3", ""),
    ("1", ""),
    ("1000", "1"),
    ("2", "1"),
]  # calls of `log` before one fails; the end


@pytest.mark.parametrize("at, finish", BROKEN)
def test_a_library_that_fails_is_a_warning(tmp_path, monkeypatch, capsys, at, finish):
    """Said once; the run goes on, and metrics.jsonl has all of it."""
    monkeypatch.syspath_prepend(ROOT / "tests/data/reported/25_fake_wandb")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("FAIL_AT", at)
    monkeypatch.setenv("FAIL_FINISH", finish)
    logged(tmp_path, "wandb")
    del sys.modules["wandb"]  # by monkeypatch it would come back after the test
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("warning: --track wandb: ") and said.endswith("; the run goes on")
    assert read_lines(tmp_path / "metrics.jsonl")[-1]["objective/scores"] == 0.5


def test_a_library_that_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert refused(capsys, log.check_track, "trackio").endswith(": pip install trackio")


def test_a_login_that_is_missing(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert refused(capsys, log.check_track, "wandb").startswith("error: --track wandb: ")


# ---- the console ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(24, 100), (0, 0), (0, 80), None])
def test_a_bar_on_a_terminal_and_lines_elsewhere(tmp_path, monkeypatch, capsys, size):
    """One of no rows has no room for a bar. A phase that lasts shows how many responses have
    ended.
    """
    if size:
        main, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, size)
        monkeypatch.setattr(sys, "stderr", open(terminal, "w"))
    run = log_of(tmp_path, steps=100)
    run.log({"step": 0, "eval/accuracy": 0.25, "time/evaluation": 90.0})
    run.show_every = 30.0  # on a terminal, too, as this machine may be busy
    run.phase("rollout")
    run.next_show = 0.0
    run.show(37, 64)
    assert time.monotonic() < run.next_show < time.monotonic() + 31
    run.log(
        {
            "step": 2,
            "objective/scores": 0.5,
            "val/num_stop_token_ids": 30,
            "val/sampled_prompts": 8,
            "val/zero_std_fraction": 0.25,
            "rollout/logprob_diff_mean": 1.234e-5,
            "time/step": 30.0,
        }
    )
    values = "left=49 min, stopped=30/64, score=0.5, zero-std=0.25, logp-diff=1.23e-05, seconds=30"
    out = capsys.readouterr().out
    if size and min(size):
        sys.stderr.close()  # a busy kernel hands over what was written in parts, then an error
        written = ""
        with contextlib.suppress(OSError):
            while True:
                written += os.read(main, 10_000).decode()
        assert "rollout 37/64: |" in written and ", held-out=0.25, left=49 min, stop" in written
        assert not out
    else:
        assert out.splitlines() == [
            "step 0 of 100: held-out=0.25",
            "rollout: 37 of 64 responses have ended",
            f"step 2 of 100: {values}",
        ]


@pytest.mark.parametrize(
    "phase, key, shown",
    [
        ("rollout", ("rollout", 1, 4), True),
        ("rollout", ("rollout", 1, 5), False),  # ahead, with --async_steps
        ("evaluation", ("evaluation", 1), True),
        ("evaluation", ("rollout", 1, 4), False),
        ("training", ("rollout", 1, 5), False),
    ],
)
def test_the_console_shows_the_rollout_that_the_run_waits_for(phase, key, shown):
    seen = []
    run = types.SimpleNamespace(state={"step": 3}, clock=types.SimpleNamespace(phase=phase))
    run.log = types.SimpleNamespace(show=lambda *counts: seen.append(counts), next_show=math.inf)
    Run.show_ended(run, key, 36, 64)  # too early
    run.log.next_show = 0.0
    Run.show_ended(run, key, 37, 64)
    assert seen == [(37, 64)] * shown


def test_the_end_names_what_is_there(tmp_path, monkeypatch, capsys):
    """Which accuracy is trained comes first; curves.png only where it was drawn."""
    write_rows(
        tmp_path / "metrics.jsonl",
        [{"step": i, "eval/accuracy": i, "eval/greedy_accuracy": 1} for i in (0, 4)],
    )
    monkeypatch.setattr(log.RunLog, "draw", lambda self: None)
    log_of(tmp_path).close("the end")
    assert capsys.readouterr().out.splitlines() == [
        "the end",
        "held-out accuracy, sampled (what is trained): 0.000 at step 0, 4.000 at step 4",
        "held-out accuracy, greedy: 1.000 at step 0, 1.000 at step 4",
    ]


UNUSUAL = [  # how many of 8 responses stop in each step; what is said
    ([0, 2], "1 to 2: stopped is 0.125"),
    ([1] * 30, "1 to 10: stopped is 0.125"),
    ([8] * 10 + [0] * 20, "7 to 16: stopped is 0.4"),
    ([4] * 30, ""),
]


@pytest.mark.parametrize("counts, said", UNUSUAL)
def test_what_is_out_of_its_usual_range_is_said_once(tmp_path, monkeypatch, capsys, counts, said):
    """By the mean of ten steps, or at the end of fewer; docs/metrics.md has the same ranges."""
    monkeypatch.setattr(log.RunLog, "draw", lambda self: None)
    run = log_of(tmp_path, steps=30, step=0)
    run.log({"step": 0, "eval/accuracy": 0.5})
    for step, count in enumerate(counts, 1):
        row = {"val/sampled_prompts": 1, "val/num_stop_token_ids": count, "time/step": 1.0}
        run.log({"step": step, **row, "val/zero_std_fraction": math.nan})
    run.close("the end")
    page = "; docs/metrics.md#usual-ranges says what it may mean\n"
    expected = said and f"warning: steps {said} (usual: 0.5 to 1){page}"
    assert capsys.readouterr().err == expected
    assert "stopped" not in read_lines(tmp_path / "metrics.jsonl")[1]
    page = (ROOT / "docs/metrics.md").read_text()
    listed = re.findall(r"^\| `(\S+)` \| (\S+) to (\S+) \|", page, re.MULTILINE)
    ranges = {name: (float(low), float(high)) for name, low, high in listed}
    assert ranges == log.USUAL and "## Usual ranges" in page


@pytest.mark.parametrize("later, shown", [(0, (0, 3, 6)), (2, (2, 4, 6)), (7, ())])
def test_the_end_of_a_run_shows_each_data_set_and_three_answers(tmp_path, capsys, later, shown):
    """Of the prompts that the first and the last evaluation share."""
    log = log_of(tmp_path, steps=2, step=0)
    for step, accuracy in ((0, 0.25), (2, 0.75)):
        places = range(7) if step == 0 else range(later, 7 + later)
        rows = [{"prompt": f"p {i}\n", "response": f"r {i} at {step}"} for i in places]
        log.samples(step, rows, "held_out.jsonl")
        log.log({"step": step, "time/step": 1.0, "eval/accuracy/a:b": accuracy})
    log.close("the end")
    out = capsys.readouterr().out
    assert "held-out accuracy of a:b: 0.250 at step 0, 0.750 at step 2" in out
    printed = [line for line in out.splitlines() if line.startswith(("prompt:", "    "))]
    assert printed == [
        line
        for i in shown
        for line in (f"prompt: p {i} ", f"    before: r {i} at 0", f"    after: r {i} at 2")
    ]


def test_no_control_code_reaches_the_terminal(tmp_path, capsys):
    """Neither of a sample nor of what a file or a server says."""
    text = "\x1b]52;c;cm0=\x07\x9b2J"
    log_of(tmp_path).table(1, [{"prompt": "a\nb", "response": text, "math": None}])
    utils.say(text)
    utils.warn(text)
    with pytest.raises(SystemExit), report_errors():
        raise utils.UserError(text)
    printed = "".join(capsys.readouterr())
    assert printed.count("]52;c;cm0=") == 4 and not {*"\x1b\x07\x9b"} & {*printed}


def test_names_in_logs_have_no_folders_and_no_secrets():
    """Unless two would be the same."""
    names = table("command_lines.json")["names in logs"]
    assert log.as_logged(dict.fromkeys(names, math.nan)) == dict.fromkeys(names.values())
