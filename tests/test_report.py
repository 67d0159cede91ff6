"""The page of runs: what is in it, what a run writes for it, and clicks in a headless Chromium."""

import html
import json
import shutil
import subprocess
from types import SimpleNamespace

import forked_python
import helpers
import pytest
import report as command
import torch
from helpers import ROOT, read_lines, write_rows

from plumbing.rollout.batch import Batch
from plumbing.run import curves, report, token_log
from plumbing.run import log as run_log
from utils import World

WORLD = World(0, 1, torch.device("cpu"))
TOKENS = {
    "text": ["2", "9", "?", "5"], "logprob": [-0.1, -0.2, None, -1.5], "entropy": [0.1, 0.4, None, 1.2],
    "logprob_diff": [0.0, -0.01, None, 0.02],
}  # fmt: skip


def make_run(folder, seed: int = 0, steps: int = 12, **args) -> str:
    """Write a run folder as a run leaves it: at each step two samples, one of them colored and of several turns."""
    folder.mkdir(parents=True)
    facts = {"script": "grpo.py", "args": {"seed": seed, "learning_rate": 1e-5, **args}, "ranks": 1}
    facts["defaults"] = {"seed": 1, "learning_rate": 1e-6}
    (folder / "args.json").write_text(json.dumps(facts))
    rows, samples, held_out = [], [], []
    for step in range(steps):
        row = {"step": step, "objective/scores": (step + seed) / 20, "policy/entropy_avg": 0.5, "val/odd": None}
        row |= {"time/rollout": 2.0, "time/training": 1.0, "time/step": 3.0, "time/from_scratch": 3.0 * step}
        rows.append(row | {"perf/peak_memory_gb": 1.5} | ({"eval/accuracy": step / 20} if step % 4 == 0 else {}))
        turns = [{"role": "assistant", "content": "29"}, {"role": "user", "content": "?"}]
        turns.append({"role": "assistant", "content": "5"})
        first = {"prompt": f"{step}+1=", "response": "29?5", "math": 1.0, "advantage": 0.5, "stop_reason": "done"}
        samples.append({"step": step, **first, "turns": turns, "length": 4, "tokens": TOKENS})
        last = {"prompt": "</script><b>bold</b>", "response": f"wrong {step}", "math": 0.0, "advantage": -0.5}
        samples.append({"step": step, **last, "stop_reason": "length", "length": 40 + step})
        if step % 4 == 0:
            answer = {"prompt": "7+7=", "response": f"answer {step}", "math": 0.5, "stop_reason": "stop", "length": 9}
            held_out.append({"step": step, **answer})
    for name, lines in (("metrics", rows), ("samples", samples), ("held_out", held_out)):
        write_rows(folder / f"{name}.jsonl", lines)
    return str(folder)


def data_of(page) -> dict:
    """Return the data in a page, read as a browser reads it: up to the first end tag of a script."""
    text = page.read_text().partition('<script id="data" type="application/json">')[2]
    return json.loads(text.partition("</script>")[0])


# ---- what is in a page ------------------------------------------------------------------------------------------


def test_a_page_needs_no_network_and_no_sample_ends_its_data(tmp_path):
    command.main(command.Args(runs=(make_run(tmp_path / "<i>run & more"),)))
    page = tmp_path / "<i>run & more" / "report.html"
    text = page.read_text()
    title = text.partition("<title>")[2].partition("</title>")[0]
    assert "<" not in title and html.unescape(title) == "<i>run & more"
    assert not any(word in text.lower() for word in ("src=", "<link", "@import", "url(http", "fetch("))
    (run,) = data_of(page)["runs"]
    assert run["samples"][1]["prompt"] == "</script><b>bold</b>" and run["last_step"] == 11
    assert sum(row.get("held_out", False) for row in run["samples"]) == 3 and not run["samples_note"]
    assert run["metrics"]["eval/accuracy"][:5] == [0.0, None, None, None, 0.2] and not run["finished"]


def test_old_runs_and_broken_lines(tmp_path):
    """A folder of metrics alone has a page, and lines that cannot be read are counted on it."""
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "objective/scores": 0.5}\n{"step"\nnull\n{"step": 2, "x')
    (folder / "args.json").write_text("{")
    (folder / "samples.jsonl").write_bytes(b'{"step": 1, "prompt": "a", "response": "b"}\n{"step": 1, \xff\n{"step": 2')
    report.write_report([str(folder)], str(tmp_path / "a.html"))
    (run,) = data_of(tmp_path / "a.html")["runs"]
    assert run["steps"] == [1] and run["metrics"] == {"objective/scores": [0.5]} and run["defaults"] is None
    assert run["samples_note"].startswith("old: 2 lines of metrics.jsonl could not be read. 1 of the 2 rows")


@pytest.mark.parametrize("room, steps", [(10**6, 12), (2000, 4), (1, 1)])
def test_samples_are_left_out_by_whole_steps(tmp_path, room, steps):
    """Evenly, and never the last step; a page of a long run stays small."""
    rows = [{"step": step, "prompt": "x" * 200, "response": str(i)} for step in range(1, 13) for i in range(2)]
    kept, note = report.read_samples(write_rows(tmp_path / "samples.jsonl", rows), room)
    kept_steps = sorted({row["step"] for row in kept})
    assert (
        len(kept_steps) == steps
        and kept_steps[-1] == 12
        and len({b - a for a, b in zip(kept_steps, kept_steps[1:])}) <= 1
    )
    assert note == ("" if len(kept) == 24 else f"{len(kept)} of the 24 rows of samples.jsonl are in this page.")
    assert len(kept) == (1 if room == 1 else 2 * steps)


def test_long_curves_are_means_of_neighbours(monkeypatch):
    monkeypatch.setattr(report, "STEPS", 3)
    rows = [
        {"step": step, "a": float(step), "b": None if step % 2 else 1 / 3, "reason": "text"} for step in range(1, 8)
    ]
    steps, columns = report.compress(rows)
    assert steps == [3, 6, 7] and columns == {"a": [2.0, 5.0, 7.0], "b": [0.33333, 0.33333, None]}


def test_runs_that_differ_by_their_seed_share_a_group(tmp_path):
    folders = [make_run(tmp_path / f"gsm8k-seed{seed}", seed, run_name=f"{seed}") for seed in (1, 2)]
    folders.append(make_run(tmp_path / "other", 1, learning_rate=1e-4))
    report.write_report(folders, str(tmp_path / "a.html"))
    runs = data_of(tmp_path / "a.html")["runs"]
    assert [run["group"] for run in runs] == [0, 0, 1] and runs[0]["group_name"] == "gsm8k"
    fork = [{"name": x, "script": f"{x[0]}.py", "args": {"seed": 1, "model": "m"}} for x in ("a-s1", "a-s2", "b")]
    assert [name for name, _ in curves.groups_of_seeds(fork)] == ["a", "b"]
    assert curves.common_name(["1", "2"]) == "1" and curves.common_name(["a/s1", "a/s2"]) == "a"


def test_refusals(tmp_path, capsys):
    for runs, output in (((), ""), ((str(tmp_path),), ""), ((make_run(tmp_path / "run"),), str(tmp_path / "no" / "a"))):
        with pytest.raises(SystemExit) as end:
            command.main(command.Args(runs=runs, output=output))
        (line,) = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and line.startswith("error: ")


# ---- what a run writes for it -----------------------------------------------------------------------------------


def test_token_texts_join_to_the_text():
    tokenizer = helpers.make_tokenizer()
    for text in ("12+34=46", "", " a  b"):
        ids = tokenizer.encode(text)
        assert "".join(token_log.token_texts(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_of_several_tokens():
    import tiny_models

    tokenizer = tiny_models.make_tokenizer()  # a token a byte
    texts = token_log.token_texts(tokenizer, tokenizer.encode("aé€b"))
    assert texts == ["a", "", "é", "", "", "€", "b"]


def test_token_log():
    """Values of the first responses come from any micro-batch; what was not sampled has none."""
    tokenizer = helpers.make_tokenizer()
    ids = tokenizer.encode("12+3")
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    tokens = {"response_mask": mask, "rollout_logprobs": mask / -3.0, "advantages": torch.ones(3, 4) * mask}
    tokens["advantages"][1, 0] = 2.0
    batch = Batch([], [ids, ids, ids[:1]], [], None, {}, tokens)
    log = token_log.TokenLog(batch, SimpleNamespace(log_samples=2))
    values = torch.arange(8.0).view(2, 4)
    log.add({"rows": torch.tensor([2, 0])}, entropy=values)
    log.add({"rows": torch.tensor([2])}, entropy=values[:1])
    first, second = log.rows(tokenizer, WORLD)
    assert first["entropy"] == [4.0, 5.0, None, 7.0] and first["logprob"] == [-0.3333, -0.3333, None, -0.3333]
    assert "advantage" not in first and "entropy" not in second and second["advantage"] == [2.0, 1.0, 1.0, 1.0]
    assert "".join(first["text"]) == "12+3"
    others = SimpleNamespace(all_gather=lambda found: [*found, (2, {"entropy": [9.0, 0.0, 0.0, 0.0]})])  # of a rank
    *_, third = token_log.TokenLog(batch, SimpleNamespace(log_samples=3)).rows(tokenizer, others)
    assert third == {"text": ["1"], "logprob": [-0.3333], "entropy": [9.0]}


def test_long_responses_are_not_all_logged(monkeypatch):
    batch = Batch([], [[0] * 6] * 4, [], None, {}, {})
    count = lambda: token_log.TokenLog(batch, SimpleNamespace(log_samples=3)).count
    assert count() == 3
    for most, expected in ((12, 2), (5, 1)):
        monkeypatch.setattr(token_log, "TOKENS", most)
        assert count() == expected


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a run with --report whose second page cannot be written, and what it printed of that."""
    values = helpers.workspace(tmp_path_factory.mktemp("report"))
    values |= {"run_name": "run", "report": True, "total_episodes": 16, "save_every": 0, "eval_every": 1}
    pages, warnings, write = [], [], run_log.write_report

    def failing(folders, path):
        pages.append(path)
        if len(pages) == 2:
            raise ValueError("broken\nand more")
        write(folders, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log, "write_report", failing)
        patch.setattr(run_log, "warn", warnings.append)
        helpers.run_here(values)
    return helpers.folder_of(values), pages, warnings


def test_a_run_writes_its_page(ran):
    """At each evaluation and at the end; a failure is a warning."""
    folder, pages, warnings = ran
    assert len(pages) == 3 and set(pages) == {str(folder / "report.html")}
    assert warnings == [f"{folder / 'report.html'}: cannot be written (broken)"]
    (run,) = data_of(folder / "report.html")["runs"]
    assert run["finished"] and run["last_step"] == run["total_steps"] == 2
    assert run["defaults"].keys() == run["args"].keys() and run["args"]["report"]


def test_a_run_logs_tokens_and_held_out_samples(ran):
    folder, *_ = ran
    samples, held_out = (read_lines(folder / name) for name in ("samples.jsonl", "held_out.jsonl"))
    for row in samples:
        columns = row["tokens"]
        assert {"text", "logprob", "entropy", "logprob_diff"} == columns.keys()
        assert {len(column) for column in columns.values()} == {row["length"]}
        assert all(x > 0 for x in columns["entropy"]) and all(abs(x) < 1e-4 for x in columns["logprob_diff"])
    assert [row["step"] for row in held_out] == [0] * 3 + [1] * 3 + [2] * 3
    assert len({row["prompt"] for row in held_out}) == 3


# ---- in a browser -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium: that of Playwright, or one that is installed on the machine."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which scripts/test.sh installs")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    installed = next(filter(None, map(shutil.which, names)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=installed)
        except sync_api.Error as error:
            pytest.skip(f"needs a Chromium: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """The page of two seeds and another run."""
    folder = tmp_path_factory.mktemp("three")
    runs = [make_run(folder / f"a-seed{seed}", seed) for seed in (1, 2)] + [
        make_run(folder / "b", 7, learning_rate=0.1)
    ]
    report.write_report(runs, str(folder / "page.html"))
    return folder / "page.html"


def open_page(chromium, path, width=1400, theme="light"):
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    page.errors = []
    page.set_default_timeout(10_000)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.goto(f"file://{path}")
    return page


def test_clicks(chromium, three):
    page = open_page(chromium, three)
    inner = lambda selector: page.inner_text(selector)
    assert "3 runs" in inner("h1") and "a (2 seeds)" in inner("#legend")
    assert page.locator("#headline tbody tr").count() == 3
    # Curves: a band for two seeds; by minutes, with logarithms, smoothed, a metric found, a run hidden.
    card = '[data-metric="objective/scores"]'
    ink = lambda: page.evaluate(f"document.querySelector('{card} canvas').toDataURL()")
    looks = [ink()]
    for action in (
        lambda: page.click("#x-axis >> text=minutes"),
        lambda: page.click("#y-axis >> text=log"),
        lambda: page.fill("#smooth", "0.9"),
        lambda: page.click("#seeds >> text=each run"),
        lambda: page.click("#legend >> text=b"),
    ):
        action()
        looks.append(ink())
    assert len(set(looks)) == len(looks)
    page.hover(f"{card} .u-over")
    assert "min" in inner(f"{card} .readout")
    page.fill("#metric-search", "entropy")
    assert page.locator("#charts .card").count() == 1
    page.reload()  # the address holds the view
    assert page.input_value("#metric-search") == "entropy" and page.is_checked("#x-axis input[value=minute]")
    # Arguments: only what differs, then all.
    assert "--learning_rate" in inner("#argument-table") and page.locator("tr.between").count() == 2
    assert page.locator("td.changed").count() > 2
    # Samples: search, score, length, reason, step.
    listed = lambda: page.locator("#sample-list li[data-id]").count()
    assert listed() == 3 * (24 + 3)
    for name, value, expected in (
        ("text", "ANSWER 4", 3), ("text", "", 81), ("scoreMin", "0.5", 45), ("scoreMax", "0.5", 9),
        ("scoreMin", "", 45), ("scoreMax", "", 81),
        ("lengthMin", "50", 6), ("lengthMin", "", 81), ("stepMin", "11", 6), ("stepMin", "", 81),
    ):  # fmt: skip
        page.fill(f"#filter-{name}", value)
        assert listed() == expected, name
    page.select_option("#filter-kind", "held-out")
    assert listed() == 9
    page.select_option("#filter-kind", "training")
    shown = lambda: page.locator("#sample-list li[data-id] b").all_inner_texts()
    for order, first, last in (("highest score", "1", "0"), ("lowest score", "0", "1")):
        page.select_option("#filter-order", order)
        assert (shown()[0], shown()[-1]) == (first, last)
    page.select_option("#filter-order", "newest step")
    page.select_option("#filter-kind", "")
    # What a model writes is text here, too.
    page.select_option("#filter-reason", "length")
    page.click("#sample-list li >> nth=0")
    assert "</script><b>bold</b>" in inner("#sample") and not page.locator("#sample b").count()
    page.select_option("#filter-reason", "done")
    page.select_option("#filter-run", "1")
    assert listed() == 12
    # A response of several turns, and its tokens colored.
    page.click("#sample-list li >> nth=2")
    assert [page.locator(".turn").nth(i).inner_text().split() for i in range(3)] == [
        ["assistant", "29"], ["user", "?"], ["assistant", "5"],
    ]  # fmt: skip
    for color in ("advantage", "logprob_diff", "entropy", "logprob"):
        page.click(f"[data-color={color}]")
        backgrounds = page.eval_on_selector_all(".token", "all => all.map(x => getComputedStyle(x).backgroundColor)")
        assert len(backgrounds) == 4 and len(set(backgrounds)) == (2 if color == "advantage" else 4), color
        assert page.locator(".token.outside").inner_text() == "?"
    page.hover(".token >> nth=3")
    assert "entropy 1.2" in inner("#tip") and 'token 4: "5"' in inner("#tip")
    # Two steps of a prompt, side by side.
    page.select_option("#filter-reason", "stop")
    page.click("#sample-list li >> nth=0")
    page.click("#same-prompt button >> text=a-seed2 step 0")
    assert [page.locator("#sample .card .text-block").nth(i).inner_text() for i in (0, 1)] == ["answer 0", "answer 8"]
    assert not page.errors
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 420])
def test_widths_and_themes(chromium, three, width, theme):
    """Nothing is cut off at the side, each curve has a plot once it is scrolled to, and text stands out."""
    page = open_page(chromium, three, width, theme)
    page.locator("#arguments").scroll_into_view_if_needed()
    for card in page.locator("#charts > .grid > .card").all():
        card.scroll_into_view_if_needed()
        card.locator("canvas").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width and not page.errors
    style = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
    brightness = [sum(map(int, color[4:-1].split(", "))) for color in style]
    assert abs(brightness[0] - brightness[1]) > 400 and (brightness[1] < 200) == (theme == "dark")
    page.close()


def test_a_run_in_a_browser(chromium, ran):
    page = open_page(chromium, ran[0] / "report.html")
    assert "held-out accuracy" in page.inner_text("#headline") and page.locator("#live").is_hidden()
    page.click("[data-color=entropy]")
    assert page.locator(".token").count() > 1 and not page.errors
    page.close()


def test_a_page_that_goes_on(chromium, tmp_path):
    """A page of a run that has not ended can be told to show what is new."""
    report.write_report([make_run(tmp_path / "run")], str(tmp_path / "a.html"))
    page = open_page(chromium, tmp_path / "a.html")
    page.check("#reload")
    page.reload()
    assert page.is_checked("#reload") and "step 11" in page.inner_text("#about") and not page.errors
    page.close()


def test_the_command_from_elsewhere(tmp_path):
    with forked_python.python() as python:
        words = [python, str(ROOT / "scripts" / "report.py"), make_run(tmp_path / "run"), "--output", "a.html"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "a.html\n" and (tmp_path / "a.html").exists(), done.stderr
