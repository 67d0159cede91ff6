"""The page of runs: what is in it, and clicks in a headless Chromium where there is one."""

import html
import json
import shutil
import tracemalloc

import pytest
import report
from helpers import ROOT, read_lines, refused, write_rows


def make_run(folder, seed: int = 0, **args) -> str:
    """Write a run folder as a run leaves it: at each step two samples, one of them of several
    turns.
    """
    shutil.copytree(ROOT / "tests/data/run", folder)
    facts = json.loads((folder / "args.json").read_text())
    facts["args"] |= {"seed": seed, **args}
    (folder / "args.json").write_text(json.dumps(facts))
    rows = read_lines(folder / "metrics.jsonl")
    write_rows(
        folder / "metrics.jsonl",
        [row | {"objective/scores": (row["step"] + seed) / 20} for row in rows],
    )
    return str(folder)


def data_of(page) -> dict:
    """Return the data in a page, read as a browser reads it: up to the first end tag of a
    script.
    """
    text = page.read_text().partition('<script id="data" type="application/json">')[2]
    return json.loads(text.partition("</script>")[0])


# ---- what is in a page ---------------------------------------------------------------------------


def test_a_page_needs_no_network_and_no_sample_ends_its_data(tmp_path):
    page = tmp_path / "report.html"
    address = "http://me:secret@judge:9/x?key=secret"
    report.main(
        (make_run(tmp_path / "<i>run & more", reward=[address], dataset=address),), str(page)
    )
    text = page.read_text()
    assert "secret" not in text and "http://judge:9/x" in text
    title = text.partition("<title>")[2].partition("</title>")[0]
    assert "<" not in title and html.unescape(title) == "<i>run & more"
    assert not any(
        word in text.lower() for word in ("src=", "<link", "@import", "url(http", "fetch(")
    )
    (run,) = data_of(page)["runs"]
    assert run["samples"][1]["prompt"] == "</script><b>bold</b>" and run["steps"][-1] == 11
    assert sum(row.get("held_out", False) for row in run["samples"]) == 3
    assert (
        run["metrics"]["eval/accuracy"][:5] == [0.0, None, None, None, 0.2] and not run["finished"]
    )


def test_a_folder_of_metrics_alone_and_folders_without(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "objective/scores": 0.5}\n{"step": 2, "x')
    report.main((str(tmp_path),), str(tmp_path / "a.html"))
    (run,) = data_of(tmp_path / "a.html")["runs"]
    assert (
        run["steps"] == [1] and run["metrics"] == {"objective/scores": [0.5]} and run["args"] == {}
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "metrics.jsonl").write_text("null\n{\n")
    for runs, says in (
        ((), "names no run folder"),
        ((str(tmp_path / "empty"),), ""),
        ((str(tmp_path),), "metrics.jsonl: "),
    ):
        assert says in refused(capsys, report.main, runs, str(tmp_path / "b.html"))
    assert not (tmp_path / "b.html").exists()


@pytest.mark.parametrize("size, steps", [(10**6, 12), (2000, 4), (1, 1)])
def test_samples_are_left_out_by_whole_steps(tmp_path, size, steps):
    """Evenly, and never the last step; a page of a long run stays small."""
    rows = [
        {"step": step, "prompt": "x" * 200, "response": str(i)}
        for step in range(1, 13)
        for i in range(2)
    ]
    write_rows(tmp_path / "samples.jsonl", rows)
    kept = sorted(
        {row["step"] for row in report.read_samples(str(tmp_path), "samples.jsonl", size)}
    )
    assert (
        len(kept) == steps and kept[-1] == 12 and len({b - a for a, b in zip(kept, kept[1:])}) <= 1
    )


def test_samples_are_read_line_by_line(tmp_path):
    """Of 5 MB, what the page shows is in memory."""
    write_rows(
        tmp_path / "samples.jsonl", [{"step": step, "response": "x" * 5000} for step in range(1000)]
    )
    tracemalloc.start()
    kept = report.read_samples(str(tmp_path), "samples.jsonl", 100_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept) == 20 and peak < 500_000


def test_runs_that_differ_by_their_seed_share_a_group(three):
    assert [run["group"] for run in data_of(three)["runs"]] == [0, 0, 1]


# ---- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium: that of Playwright, or one that is installed on the machine."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
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
    runs = [make_run(folder / f"a-seed{seed}", seed, run_name=f"a{seed}") for seed in (1, 2)]
    report.main(
        (*runs, make_run(folder / "b", 7, learning_rate=0.1, gamma=1)), str(folder / "page.html")
    )
    return folder / "page.html"


@pytest.mark.parametrize("width", [1400, 390])
def test_clicks(chromium, three, width):
    """What a user does, on a wide and on a narrow screen: no error, nothing cut off at the side."""
    page = chromium.new_page(viewport={"width": width, "height": 900})
    errors = []
    page.set_default_timeout(10_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"file://{three}")
    inner = lambda selector: page.inner_text(selector)
    assert "3 runs" in inner("h1") and "a-seed1 (2 seeds)" in inner("#legend")
    assert page.locator("#headline tbody tr").count() == 3
    # before it is scrolled
    assert page.locator("#charts .uplot").count() == page.locator("#charts .card").count() == 7
    assert inner("#phases").count("3.3 s a step") == 3  # an evaluation of 1.2 s every four steps
    # Curves: a band for two seeds; smoothed, with logarithms, a run hidden, a metric found.
    card = '[data-metric="objective/scores"]'
    page.locator(f"{card} canvas").wait_for()
    assert "0.625 ± 0.0354" in inner(f"{card} .readout")
    page.wait_for_timeout(200)
    ink = f"document.querySelector('{card} canvas').toDataURL()"
    pictures = [page.evaluate(ink)]
    for action in (
        lambda: page.fill("#smooth", "0.9"),
        lambda: page.check("#log"),
        lambda: page.uncheck("#legend input >> nth=1"),
    ):
        action()
        page.wait_for_function(f"before => {ink} !== before", arg=pictures[-1])
        pictures.append(page.evaluate(ink))
    assert len(set(pictures)) == len(pictures)
    page.hover(f"{card} .u-over")
    assert "step" in inner(f"{card} .readout")
    page.fill("#metric-search", "entropy")
    assert page.locator("#charts .card").count() == 1
    # Arguments: only what differs, and no flag that other scripts do not have; none is cut into
    # lines.
    assert "--learning_rate" in inner("#argument-table") and page.locator("tr.between").count() == 3
    assert page.locator("#argument-table td >> text=--learning_rate").bounding_box()["height"] < 40
    # Samples: search, kind, reason, run, order. What a model writes is text here.
    listed = lambda: page.locator("#sample-list li[data-id]").count()
    assert listed() == 3 * (24 + 3) and inner("#sample-count") == "81 of 81 samples of 12 steps"
    page.fill("#filter-text", "ANSWER 4")
    assert listed() == 3 and inner("#sample mark") == "answer 4"
    page.fill("#filter-text", "")
    page.select_option("#filter-kind", "held-out")
    assert listed() == 9
    page.select_option("#filter-kind", "")
    page.select_option("#filter-reason", "length")
    assert "</script><b>bold</b>" in inner("#sample") and not page.locator("#sample b").count()
    page.select_option("#filter-reason", "done")
    page.select_option("#filter-run", "1")
    page.select_option("#filter-order", "oldest step")
    assert listed() == 12 and "step 0" in inner("#sample-list li >> nth=0")
    turns = [page.locator(".columns .turn").nth(i).inner_text().split() for i in range(3)]
    assert page.locator("#sample .turn >> nth=0").inner_text().split() == [
        "reference",
        "answer",
        "12",
    ]
    assert turns == [["assistant", "29"], ["user", "?"], ["assistant", "5"]]
    # Two responses to a prompt, side by side.
    page.select_option("#filter-reason", "stop")
    page.select_option("#filter-order", "newest step")
    assert inner("#same-prompt thead").split() == "run step math ended by response".split()
    page.click("#same-prompt tr >> text=answer 8 >> nth=0")
    assert page.locator("#same-prompt [aria-selected]").count() == 2
    assert [page.locator("#sample .card .text-block").nth(i).inner_text() for i in (0, 1)] == [
        "answer 0",
        "answer 8",
    ]
    assert page.evaluate("document.documentElement.scrollWidth") <= width and not errors
    page.close()
