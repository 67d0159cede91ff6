"""The page of runs: what is in it, and clicks in a headless Chromium where there is one."""

import html
import json
import math
import shutil
import tracemalloc

import pytest
import report
import torch
from helpers import ROOT, read_lines, refuse, refused, write_rows

import grpo
import rloo
from plumbing.run.log import append


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


def data_of(page) -> list[dict]:
    """Return the runs in a page, read as a browser reads it: up to the first end tag of a
    script.
    """
    text = page.read_text().partition('<script id="data" type="application/json">')[2]
    return json.loads(text.partition("</script>")[0], parse_constant=refuse)["runs"]


def make_group(folder, steps: int, texts=("4", "+", "3\n", "=7"), **args) -> str:
    """Write a run of a prompt with four responses a step, of which the last one does not train. The
    second token of `texts` is clipped, the third an observation.
    """
    folder.mkdir(exist_ok=True)
    (folder / "args.json").write_text(json.dumps({"args": args}))
    numbers = range(len(texts))
    sample = {"prompt": "4+3", "response": "".join(texts), "length": len(texts)}
    logs = {"metrics": [], "samples": [], "tokens": []}
    for step in range(1, steps + 1):
        logs["metrics"].append({"step": step, "objective/scores": 0.5})
        for i in range(4):
            logs["samples"].append({"step": step, **sample, "math": i % 2, "advantage": i - 1})
            values = {"advantages": i - 1, "rollout_logprobs": -0.5, "my_number": step / 10}
            if i < 3:
                values |= {"start_logprobs": -0.7, "weights": 1}
            row = {name: [None if t == 2 else x for t in numbers] for name, x in values.items()}
            if i < 3:
                row["clipped"] = [int(t == 1) for t in numbers]
            logs["tokens"].append({"step": step, "sample": i, "texts": list(texts), **row})
    for name, rows in logs.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return str(folder)


# ---- what is in a page ---------------------------------------------------------------------------


def test_a_page_needs_no_network_and_no_sample_ends_its_data(tmp_path):
    """Nor do numbers that JSON does not have."""
    page = tmp_path / "report.html"
    address = "http://me:secret@judge:9/x?key=secret"
    flags = {"reward": [address], "dataset": address, "max_grad_norm": math.inf, "seed": 0}
    folder = make_run(tmp_path / "<i>run & more", **flags)
    append(f"{folder}/metrics.jsonl", [{"step": 12, "objective/scores": math.nan}])
    report.main((folder,), str(page))
    text = page.read_text()
    assert ">Infinity</td>" in text and ">0</td>" in text
    assert "secret" not in text and "http://judge:9/x" in text
    title = text.partition("<title>")[2].partition("</title>")[0]
    assert "<" not in title and html.unescape(title) == "<i>run & more"
    assert not any(
        word in text.lower() for word in ("src=", "<link", "@import", "url(http", "fetch(")
    )
    (run,) = data_of(page)
    assert run["samples"][1]["prompt"] == "</script><b>bold</b>" and run["steps"][-1] == 12
    assert sum(row.get("held_out", False) for row in run["samples"]) == 3
    assert (
        run["metrics"]["eval/accuracy"][:5] == [0.0, None, None, None, 0.2] and not run["finished"]
    )


def test_a_folder_of_metrics_alone_and_folders_without(tmp_path, capsys):
    """A metric that has no number has no curve."""
    row = '{"step": 1, "objective/scores": 0.5, "objective/kl": null}'
    (tmp_path / "metrics.jsonl").write_text(row + '\n{"step": 2, "x')
    report.main((str(tmp_path),), str(tmp_path / "a.html"))
    (run,) = data_of(tmp_path / "a.html")
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


@pytest.mark.parametrize("size, steps", [(10**6, range(1, 12)), (2000, [4, 8, 11]), (1, [8, 11])])
def test_samples_are_left_out_by_whole_steps(tmp_path, size, steps):
    """Evenly, and never the last step; a page of a long run stays small."""
    rows = [
        {"step": step, "prompt": "x" * 200, "place": i} for step in range(1, 12) for i in (0, 1)
    ]
    write_rows(tmp_path / "samples.jsonl", rows)
    kept = report.read_samples(str(tmp_path), "samples.jsonl", size)
    assert kept == [row for row in rows if row["step"] in steps]


def test_samples_are_read_line_by_line(tmp_path):
    """Of 5 MB, what the page shows is in memory."""
    write_rows(
        tmp_path / "samples.jsonl", [{"step": step, "response": "x" * 5000} for step in range(1000)]
    )
    tracemalloc.start()
    kept = report.read_samples(str(tmp_path), "samples.jsonl", 100_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept) == 17 and peak < 500_000


def test_samples_have_their_tokens(tmp_path, monkeypatch):
    """Of evenly spread steps, as many as the page has room for; also of a folder of evaluate.py."""
    run = make_group(tmp_path / "a", 6)
    monkeypatch.setattr(report, "SAMPLE_BYTES", 6400)  # of two runs, and of evaluations
    monkeypatch.setattr(report, "TOKEN_BYTES", 4000)
    samples = report.read_run(run, "a", 2)["samples"]
    assert [row["step"] for row in samples if row["tokens"]] == [4] * 4 + [6] * 4
    assert len(samples) == 12 and samples[4]["tokens"]["advantages"] == [-1, -1, None, -1]
    for name in ("samples.jsonl", "tokens.jsonl"):
        rows = read_lines(tmp_path / "a" / name)[:4]
        write_rows(tmp_path / "a" / name, [row for row in rows if row.pop("step")])
    results = {"scores": {"avg@4": {"value": 0.5}}, "args": {"reward": ["http://a:b@c"]}}
    (tmp_path / "a/results.json").write_text(json.dumps(results))
    assert "<th>eval/avg@4</th>" in report.page([run])[0]
    run = report.read_run(run, "a", 1)
    assert run["metrics"] == {"eval/avg@4": [0.5]} and run["finished"]
    assert run["args"] == {"reward": ["http://c"]}
    samples = [(row["step"], row["tokens"]["sample"]) for row in run["samples"]]
    assert samples == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_why_a_score_gave_its_advantage():
    """As grpo.py and rloo.py compute it; nothing is said where neither does."""
    args = {"group_size": 4, "reward": ["math", "form"], "reward_weights": [1, 0.5]}
    args |= {"non_stop_penalty": True, "penalty_reward_value": None}
    rows = [{"math": x, "form": 1 - x, "stop_reason": "stop"} for x in (0, 1, 1, 1)]
    rows[-1]["stop_reason"] = "length"
    scores = torch.tensor([0.5, 1, 1, 0])

    def why(advantages, scores=scores, **changed):
        group = [{**row, "advantage": a} for row, a in zip(rows, advantages.tolist())]
        report.explain_advantages(group, args | changed)
        return [row.get("why") for row in group]

    normalized, left_out = (
        grpo.group_advantages(scores, 4, "group"),
        rloo.leave_one_out(scores[None]),
    )
    assert why(normalized)[::3] == [f" = (score {x} - mean 0.625) / std 0.479" for x in (0.5, 0)]
    assert why(left_out[0], advantage="rloo")[0] == " = score 0.5 - mean of the others 0.667"
    assert why(normalized, non_stop_penalty=False) == why(normalized, group_size=8) == [None] * 4
    equal = why(torch.zeros(4), reward_weights=[0, 0])
    assert why(left_out[0]) == [None] * 4
    assert "equal scores" in equal[0] and why(torch.ones(4), reward_weights=[0, 0]) == [None] * 4
    assert why(torch.full((4,), math.nan))
    group = [{"math": x, "form": 0.0, "advantage": 0.0} for x in (0.3, 0.1 + 0.2, 0.3, 0.3)]
    report.explain_advantages(group, args | {"non_stop_penalty": False})
    assert all("equal scores" in row["why"] for row in group)


def test_what_the_flags_say_of_clipping_and_of_the_kl(tmp_path):
    """Of a step's only update, that nothing can be clipped, but only where that is certain."""
    one = {"rollout_batch_size": 2, "group_size": 4, "mini_batch_size": 8, "num_epochs": 1}
    one |= {"async_steps": 0, "kl_in": "loss", "kl_coef": 0.01, "kl_estimator": "k3"}
    text = lambda **changed: report.page([make_group(tmp_path / "a", 1, **{**one, **changed})])[0]
    says = "This step had 1 update"
    assert says in text(clip_low=None) and says in text(mini_batch_size=0)
    for changed in ({"mini_batch_size": 7}, {"num_epochs": 2}, {"async_steps": 1}, {"loss": "x"}):
        assert (says in text(**changed)) == ("loss" in changed)
    assert "KL: beta 0.01, k3, not in the push." in text()
    in_reward = text(kl_in="reward")
    assert "k3, in the advantage, and so in the push." in in_reward and says not in in_reward
    assert ">default</td>" in text(clip_low=None) and ">default</td>" not in text()


def test_watch_writes_the_page_until_the_run_has_ended(tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    reloads = lambda: 'http-equiv="refresh"' in page.read_text()
    (tmp_path / "args.json").write_text('{"args": {"seed": 1}}')

    def go_on(_):
        assert reloads() and not data_of(page)[0]["steps"]
        make_group(tmp_path, 2)
        (tmp_path / "final").mkdir()

    monkeypatch.setattr(report.time, "sleep", go_on)
    report.main((str(tmp_path),), str(page), watch=True)
    assert data_of(page)[0]["steps"] == [1, 2] and not reloads()


def test_runs_that_differ_by_their_seed_share_a_group(three):
    assert [run["group"] for run in data_of(three)] == [0, 0, 1]


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


@pytest.fixture
def visit(chromium):
    """A function that opens a page. After the test the page has had no error, and is not cut off at
    the side.
    """
    pages, errors = [], []

    def visit(path, width: int = 1300):
        page = chromium.new_page(viewport={"width": width, "height": 900})
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"file://{path}")
        pages.append(page)
        return page

    yield visit
    for page in pages:
        wider = "document.documentElement.scrollWidth > innerWidth"
        assert not page.evaluate(wider) and not errors
        page.close()


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
def test_clicks(visit, three, width):
    """What a user does, on a wide and on a narrow screen."""
    page = visit(three, width)
    inner = lambda selector: page.inner_text(selector)
    assert "3 runs" in inner("h1") and "a-seed1 (2 seeds)" in inner("#legend")
    assert page.locator("#headline tbody tr").count() == 3
    # before it is scrolled
    assert page.locator("#charts .uplot").count() == page.locator("#charts .card").count() == 7
    assert inner("#time").count("3.3 s a step") == 3  # an evaluation of 1.2 s every four steps
    # Curves: a band for two seeds; smoothed, with logarithms, a run hidden, a metric found.
    card = '.card:has([title="objective/scores"])'
    page.locator(f"{card} canvas").wait_for()
    assert "0.625 ± 0.0354" in inner(f"{card} .readout")
    page.wait_for_timeout(200)
    ink = f"document.querySelector('{card} canvas').toDataURL()"
    for action in (
        lambda: page.fill("#smooth", "0.9"),
        lambda: page.check("#log"),
        lambda: page.uncheck("#legend input >> nth=1"),
    ):
        before = page.evaluate(ink)
        action()
        page.wait_for_function(f"before => {ink} !== before", arg=before)
    page.hover(f"{card} .u-over")
    assert "step" in inner(f"{card} .readout")
    page.fill("#metric-search", "entropy")
    assert page.locator("#charts .card:visible").count() == 1
    # Arguments: only what differs, and no flag that other scripts do not have; none is cut into
    # lines.
    assert "--learning_rate" in inner("#argument-table") and page.locator("tr.between").count() == 3
    assert page.locator("#argument-table td >> text=--learning_rate").bounding_box()["height"] < 40
    # Samples: search, kind, reason, run, order. What a model writes is text here.
    listed = lambda: page.locator("#sample-list label").count()
    assert listed() == 3 * (24 + 3) and inner("#sample-count") == "81 of 81 samples of 12 steps"
    page.fill("#filter-text", "ANSWER 4")
    assert listed() == 3
    page.fill("#filter-text", "")
    page.select_option("#filter-held_out", "true")
    assert listed() == 9
    page.select_option("#filter-held_out", "")
    page.select_option("#filter-stop_reason", "length")
    assert "</script><b>bold</b>" in inner("#sample") and not page.locator("#sample b").count()
    page.select_option("#filter-stop_reason", "done")
    page.select_option("#filter-run", "1")
    page.select_option("#filter-order", "oldest step")
    assert listed() == 12 and "step 0" in inner("#sample-list li >> nth=0")
    turns = [text.split() for text in page.locator(".columns .turn").all_inner_texts()]
    assert turns == [["assistant", "29"], ["user", "?"], ["assistant", "5"]]
    assert inner("#sample .turn >> nth=0").split() == "reference answer 1".split()
    # Two responses to a prompt, side by side; with itself, its group.
    page.select_option("#filter-stop_reason", "stop")
    page.select_option("#filter-order", "newest step")
    texts = lambda: page.locator("#sample .card .text-block").all_inner_texts()
    first = texts()
    page.locator("#same-prompt li:has-text('answer 8')").first.click()
    assert texts() == [first[0], "answer 8"]
    page.keyboard.press("ArrowUp")
    assert len(texts()) == 2 and texts() != [first[0], "answer 8"]


@pytest.mark.parametrize("width", [1300, 390])
def test_tokens(visit, tmp_path, width):
    """Colours, a token's numbers by pointer and by keys, a group, another run; a reload keeps it."""
    report.main(
        tuple(make_group(tmp_path / name, steps) for name, steps in (("a", 2), ("b", 1))),
        str(tmp_path / "page.html"),
    )
    page = visit(tmp_path / "page.html", width)
    cards = page.locator("#sample .card")
    of_spans = "spans => spans.map(span => [...span.classList])"
    classes = lambda card: cards.nth(card).locator(".block span").evaluate_all(of_spans)
    counts = lambda text: [each.count(text) for each in cards.all_inner_texts()]
    # The group: the first one is pushed down, the second not at all, the last one has no push.
    assert cards.count() == 4 and page.input_value("#colour") == "push"
    assert classes(0) == [["down", "at"], ["down", "clipped"], ["none"], ["down"]]
    assert classes(1)[0] == ["up"] and classes(3) == [["none"]] * 4
    assert page.inner_text("#lowest") == "-0.503" and page.inner_text("#highest") == "0.503"
    assert "this response pushes the token down; blue: up" in page.inner_text("#scale")
    assert "4 responses of a group at step 2; mean math 0.5" in page.inner_text("#sample")
    assert counts("chosen in the list") == counts("advantage -1") == [1, 0, 0, 0]
    cards.nth(2).locator("span.up").first.hover()
    push = "push 0.503: advantage 1 × weight 1 × (1 - probability) 0.503"
    assert page.inner_text("#number") == f'1: "4" {push}'  # 1 - exp(-0.7)
    page.click("#token summary")
    facts = page.locator("#numbers div")
    assert facts.locator("b").all_inner_texts() == [
        push,
        "advantage 1",
        "weight 1",
        "log-prob by sampler -0.5 (60.7%)",
        "log-prob by policy -0.7 (49.7%)",
        "policy - sampler -0.2",
        "clipped no",
        "my_number 0.2",
    ]
    for i, says in (
        (0, "without a KL in the loss"),
        (1, "all tokens"),
        (6, "without --async_steps, the ratio is 1"),
    ):
        assert says in facts.nth(i).inner_text()
    # A click keeps a token, in any colour; a second one lets go of it.
    assert page.locator("#grey").is_visible() and page.locator("#underlined").is_visible()
    cards.nth(1).locator("span", has_text="4").last.click()
    cards.nth(2).locator("span.up").first.hover()
    assert (
        page.inner_text("#number")
        == '1: "4" push 0: advantage 0 × weight 1 × (1 - probability) 0.503'
    )
    page.select_option("#colour", "weights")
    assert page.inner_text("#number") == '1: "4" weight 1' and "at" in classes(1)[0]
    page.select_option("#colour", "push")
    cards.nth(1).locator(".at").click()
    cards.nth(2).locator("span.up").first.hover()
    assert "push 0.503" in page.inner_text("#number")
    cards.nth(1).locator(".block span").first.click()
    for key, token in (("Home", "4"), ("ArrowRight", "+"), ("End", "=7"), ("ArrowRight", "4")):
        page.keyboard.press(key)
        assert page.inner_text(".at") == token
    assert page.inner_text("#number").startswith('1: "4" push 0:')
    for key, card in (("ArrowDown", 1), ("ArrowUp", 0)):  # the list has the focus
        page.keyboard.press(key)
        assert "chosen in the list" in cards.first.inner_text()
        assert page.locator("#sample-list li").nth(card).locator(":checked").count()
    cards.first.click(position={"x": 3, "y": 3})  # the frame
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".chosen .at") == "+"
    # A number of a fork, another order, the same prompt in another run, plain text.
    page.select_option("#colour", "my_number")
    assert "up" in classes(3)[0]
    assert page.inner_text("#lowest") == "0" and page.inner_text("#highest") == "0.2"
    page.locator("#same-prompt li:has-text('b · ')").nth(1).click()
    chosen = "[...document.querySelectorAll('#sample .card')].map(card => card.id)"
    assert page.evaluate(chosen) == ["a/false/2/0", "b/false/1/1"]
    page.keyboard.press("End")
    assert page.inner_text(".card:last-child .at") == "=7"
    shares = [cards.nth(i).locator("span.up").first.get_attribute("style") for i in (0, 1)]
    assert shares == ["--w: 75%;", "--w: 53%;"]  # the root of 0.2 and 0.1, in that of the largest
    page.reload()
    assert page.evaluate(chosen) == ["a/false/2/0", "b/false/1/1"]
    assert page.input_value("#colour") == "my_number" and "up" in classes(1)[0]
    assert page.locator("#numbers").is_visible()
    page.select_option("#colour", "")
    assert not page.locator(".tokens").count() and page.locator("#scale").is_hidden()
    assert page.locator("#token").is_hidden()


def test_every_step_of_a_long_run_can_be_reached(visit, tmp_path, monkeypatch):
    """The list grows as it is scrolled, a click on a curve lists a step, keys move in the list. A
    step that is typed is found.
    """
    run = make_group(tmp_path / "a", 101, ["4"], log_samples=4, rollout_batch_size=8, group_size=4)
    reason = lambda group, _: [row.update(why=" by a rule") for row in group]
    monkeypatch.setattr(report, "explain_advantages", reason)
    append(f"{run}/held_out.jsonl", [{"step": 0, "prompt": "1+1", "response": "2", "math": 1.0}])
    report.main((run,), str(tmp_path / "page.html"))
    page = visit(tmp_path / "page.html", 390)
    listed = page.locator("#sample-list li")
    chosen = lambda: page.locator("#sample-list li:has(:checked)").inner_text()
    top = "document.getElementById('sample-list').scrollTop"
    assert page.inner_text("#sample-count").startswith("405 of 405 samples")
    assert "Of the 32 responses of a step, the first 4 are logged" in page.inner_text("#filters")
    assert listed.count() == 300
    listed.last.scroll_into_view_if_needed()
    listed.nth(404).wait_for()
    page.select_option("#colour", "clipped")  # keeps the place in the list, unlike another order
    assert page.evaluate(top)
    assert "0 at each" in page.inner_text("#scale") and page.locator("#ends").is_hidden()
    page.select_option("#filter-order", "score -1")
    assert page.evaluate(top) == 0 and "math 1" in chosen()
    page.click("#charts .u-over")
    page.wait_for_function("document.getElementById('filter-step').value === '51'")
    assert listed.count() == 4
    page.keyboard.press("ArrowDown")
    assert "step 51 · math 1" in chosen() and "advantage 2 by a rule" in page.inner_text("#sample")
    page.keyboard.press("ArrowDown")
    assert "step 51 · math 0" in chosen() and "training" not in page.inner_text("#sample")
    page.select_option("#filter-held_out", "true")
    assert "the nearest step with such samples is 0" in page.inner_text("#sample-count")
    page.fill("#filter-step", "50")
    assert listed.count() == 4 and page.input_value("#filter-held_out") == ""


def test_a_long_response_is_laid_out_where_it_is_seen(visit, tmp_path):
    """In blocks, which end at the ends of lines where there are some. Tokens that the page moves
    below the pointer are not pointed at.
    """
    texts = ["x", " y", ".\n"] * 5333 + ["z"] * 1500
    report.main((make_group(tmp_path / "a", 1, texts),), str(tmp_path / "page.html"))
    page = visit(tmp_path / "page.html", 390)
    blocks = "[...document.querySelectorAll('.card:first-child .block')]"
    sizes = page.evaluate(f"{blocks}.map(block => block.children.length)")
    assert sum(sizes) == len(texts) and sizes[:2] == [102, 102] and max(sizes) == 1000
    assert page.evaluate(f"getComputedStyle({blocks}[9]).contentVisibility") == "auto"
    page.locator(".block span").nth(40).hover()
    number = page.inner_text("#number")
    assert number.startswith("41: ")
    before = page.evaluate("scrollY")
    page.mouse.wheel(0, 200)
    page.wait_for_function("before => scrollY > before + 100", arg=before)
    page.wait_for_timeout(200)
    assert page.inner_text("#number") == number
