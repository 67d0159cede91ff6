"""distill.py: the statistics of chunks, whole updates and rows against brute force; bad input.

tests/agreement/ compares the divergences and their gradients with TRL's GKD,
tests/test_invariance.py the cuts of a batch.
"""

import json
import math
from types import SimpleNamespace

import helpers
import pytest
import torch
import transformers
from helpers import (
    flags_of,
    folder_of,
    metrics_of,
    read_lines,
    recorded,
    run_here,
    tiny_model,
    write_rows,
)
from test_reward_client import Server, Told
from tiny_models import CPU

import distill
import utils
from extras.vllm import teacher as vllm_teacher
from plumbing.data.prompts import load_prompts
from plumbing.models import loading

VOCABULARY = 7


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that need a gradient, and a teacher's log-probs (..., V), float64."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, *shape, VOCABULARY, dtype=torch.float64)
    return logits.requires_grad_(), (2 * teacher).log_softmax(-1)


# ---- the equations -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_a_token_that_both_mask_adds_nothing(kind):
    logits, q = pair(2)
    masked = torch.cat([logits, torch.full((2, 1), -math.inf)], -1).log_softmax(-1)
    value = distill.divergence(masked, torch.cat([q, torch.full((2, 1), -math.inf)], -1), kind, 0.3)
    torch.testing.assert_close(value, distill.divergence(logits.log_softmax(-1), q, kind, 0.3))
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert gradient.isfinite().all()


def test_sampled_tokens_give_the_gradient_of_the_reverse_kl():
    """Its expectation over the tokens that another policy sampled."""
    logits, q = pair()
    sampler = torch.randn(VOCABULARY, dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad(
        distill.divergence(p, q, "reverse_kl", 0.5), logits, retain_graph=True
    )
    mean = (sampler.exp() * distill.sampled_reverse_kl(p, q, sampler)).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mean, distill.divergence(p, q, "reverse_kl", 0.5))


@pytest.mark.parametrize("known", [1, 3, VOCABULARY])
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_all_unknown_tokens_of_a_teacher_count_as_one(kind, known):
    """Values and gradients: those over the known tokens and one entry for all others."""
    logits, q = pair(4)
    top, tokens = q.topk(known)
    p = logits.log_softmax(-1)
    merged = []  # student and teacher
    for x in (p, q):
        rows = []
        for row, of_row in zip(x, tokens):
            others = [i for i in range(VOCABULARY) if i not in of_row]
            rest = [sum(row[i].exp() for i in others).log()] if others else []
            rows.append(torch.stack([*(row[i] for i in of_row), *rest]))
        merged.append(torch.stack(rows))
    expected = distill.divergence(*merged, kind, 0.3)
    gradient = torch.autograd.grad(expected.sum(), logits, retain_graph=True)
    # the first one twice, as a server has it
    tokens, top = (torch.cat([x, x[:, :1]], -1) for x in (tokens, top))
    value = distill.divergence(p, vllm_teacher.spread_rest(tokens, top, p.detach()), kind, 0.3)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(value.sum(), logits), gradient, rtol=1e-10, atol=1e-12
    )


# ---- the statistics of chunks --------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [None, 2.0])
def test_chunks_give_what_whole_logits_give(tmp_path, monkeypatch, temperature):
    """Values and gradients; the teacher is another family with a few more rows of its vocabulary,
    and has the temperature of the student, 0.5, unless it is given.
    """
    name = tiny_model(tmp_path / "student")
    rows = transformers.AutoConfig.from_pretrained(name).vocab_size
    other = tiny_model(tmp_path / "teacher", "llama", vocab_size=rows + 5)
    load = lambda flag, name: loading.load_model(flag, name, torch.float64, CPU)
    student = load("--model", name)
    teacher = load("--teacher", other)
    ids = torch.tensor([[7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 0]]).bool()
    ours, theirs = (
        (model(input_ids=ids).logits[:, :-1, :rows] / t).log_softmax(-1)[mask[:, 1:]]
        for model, t in ((student, 0.5), (teacher, temperature or 0.5))
    )  # (tokens, V) each
    tokens = ids[:, 1:][mask[:, 1:], None]
    expected = {
        "logprobs": ours.gather(1, tokens)[:, 0],
        "losses": distill.divergence(ours, theirs, "jsd", 0.3),
        "entropies": -(ours.exp() * ours).sum(1),
        "teacher_entropies": -(theirs.exp() * theirs).sum(1),
        "same_top": (ours.argmax(1) == theirs.argmax(1)).double(),
    }
    gradients = torch.autograd.grad(3 * expected["losses"].sum(), list(student.parameters()))
    temperatures = dict(temperature=0.5, teacher_temperature=temperature)
    args = distill.Args(teacher=other, divergence="jsd", jsd_beta=0.3, **temperatures)
    inputs = ids, mask
    near = dict(rtol=1e-9, atol=1e-11)
    # on GPUs, of at most 2**31 numbers: less than a large head has
    monkeypatch.setattr(torch.Tensor, "dot", None)
    for size in (2, 100):
        monkeypatch.setattr(distill, "CHUNK_TOKENS", size)
        of_teacher = distill.teacher_chunks(distill.Policy(teacher, args), inputs, {})
        out = distill.Policy(student, args)(*inputs, torch.zeros(int(mask.sum())), of_teacher)
        torch.testing.assert_close(out, expected, **near)
        student.zero_grad()
        (3 * out["losses"].sum()).backward()
        torch.testing.assert_close(
            [weight.grad for weight in student.parameters()], list(gradients), **near
        )


# ---- rows ----------------------------------------------------------------------------------------

ROWS = helpers.table("rows.yaml")
MESSAGES, LEARNED, TOLD = ROWS["messages"], ROWS["learned"], ROWS["told"]


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned_from_a_row(tmp_path, name):
    row, expected = LEARNED[name]
    model = tiny_model(tmp_path / "model", chat=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    named = "thought" if "thought" in row else ""
    args = distill.Args(model=model, max_response_length=50, response_column=named)
    path = write_rows(tmp_path / "rows.jsonl", [row])
    load = lambda learn: load_prompts(
        "--dataset", path, "train", tokenizer, args, lambda *_: "", None, learn, [1]
    )
    [(rows, _)], [(alone, _)] = load("turns"), load("prompts")  # with responses, and prompts alone
    assert [row["query"] for row in alone] == [row["query"] for row in rows]
    assert len(rows) == len(expected) and all(row["sources"] == [] for row in rows)
    for row, (prompt, response) in zip(rows, expected):
        assert prompt in (None, row["prompt"]) and tokenizer.decode(row["query"]) == row["prompt"]
        assert tokenizer.decode(row["response"]) == f"{response}<eos>"


# ---- whole updates -------------------------------------------------------------------------------


def flags(folder, **changes) -> dict:
    return {
        **flags_of("distill", helpers.workspace(folder)),
        "precision": "float64",
        "run_name": "run",
        "num_epochs": 1,
        "rollout_batch_size": 4,
        "passes": 8 / 13,
        "eval_every": 0,
        "save_every": 0,
        **changes,
    }


TURNS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
AS_ONE = TURNS + "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.mark.parametrize(
    "template, count",
    [("", 5), (AS_ONE, 3), (AS_ONE.replace("] }}<", "] }}{{ '' if loop.last else ' ' }}<"), 5)],
)
def test_supervised_updates_are_those_of_cross_entropy(tmp_path, capsys, template, count):
    """Loss and gradient norm of the first update, of rows of messages: each turn of the assistant,
    and nothing else.

    A conversation is one row, unless the template changes earlier turns or does not end them by the
    stop token.
    """
    model = tiny_model(tmp_path / "chat", chat=True)
    if template:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(model)
    rows = [
        {"messages": [{**turn, "content": f"{i}{turn['content']}"} for turn in MESSAGES]}
        for i in range(2)
    ]
    rows.append({"messages": MESSAGES[:2]})
    values = flags(
        tmp_path,
        model=model,
        dataset=write_rows(tmp_path / "rows.jsonl", rows),
        passes=2,
        temperature=0.7,
    )
    values |= {"rollout_batch_size": count, "mini_batch_size": 0}
    # with a prompt more than the model's positions: it does not matter here
    values["max_response_length"] = 300
    run_here({**values, "on_policy_share": 0}, "distill")
    assert f"\n2 steps of {count} rows: 2 passes over {count} rows\n" in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    total = 0.0
    count = 0
    for row in rows:
        for end in range(2, len(row["messages"]) + 1, 2):
            *before, turn = row["messages"][:end]
            query = tokenizer.encode(
                tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
            )
            response = tokenizer.encode(turn["content"]) + [tokenizer.eos_token_id]
            logprobs = policy(torch.tensor([[*query, *response]])).logits[0].log_softmax(-1)
            total = total - sum(
                logprobs[len(query) - 1 + i, token] for i, token in enumerate(response)
            )
            count += len(response)
    (total / count).backward()
    norm = torch.stack([p.grad.norm() for p in policy.parameters()]).norm()
    first = metrics_of(values)[0]
    assert first["train/loss"] == pytest.approx((total / count).item(), rel=1e-9)
    assert first["loss/grad_norm"] == pytest.approx(norm.item(), rel=1e-7)  # softmax is float32
    assert first["val/on_policy_share"] == 0 and "objective/divergence" not in first


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_who_answers_a_prompt(tmp_path, share):
    teacher = tiny_model(tmp_path / "teacher", "llama", hidden_size=48)
    values = flags(
        tmp_path,
        teacher=teacher,
        on_policy_share=share,
        passes=80 / 13,
        rollout_batch_size=20,
        mini_batch_size=20,
    )
    run_here(values, "distill")
    answers = {row["prompt"]: row["answer"] for row in helpers.ROWS}
    rows = read_lines(folder_of(values) / "samples.jsonl")
    metrics = metrics_of(values)
    copied = sum(row["response"] == answers[row["prompt"]] for row in rows) / len(rows)
    assert 1 - copied == share if share in (0, 1) else abs(1 - copied - share) < 0.3
    assert all(
        abs(row["val/on_policy_share"] - share) < (1e-12 if share in (0, 1) else 0.3)
        for row in metrics
    )
    assert all(row["objective/divergence"] == pytest.approx(row["train/loss"]) for row in metrics)
    assert all(
        0 <= row["teacher/same_top_token"] <= 1 and row["teacher/entropy_avg"] > 0
        for row in metrics
    )
    compared = [row["rollout/logprob_diff_max"] for row in metrics if row["val/on_policy_share"]]
    assert max(compared, default=0) < 1e-4 and (len(compared) < len(metrics)) == (share < 0.5)


# ---- the model as its own teacher ----------------------------------------------------------------

WORKED = "{prompt}={answer}:"


def test_the_model_teaches_itself_behind_another_prompt(tmp_path):
    values = flags(tmp_path, on_policy_share=0.0, teacher_prompt=WORKED, passes=4 / 13)
    values["teacher"] = "self"
    run_here({**values, "micro_batch_tokens": 1}, "distill")
    model = transformers.AutoModelForCausalLM.from_pretrained(values["model"], dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(values["model"])
    answers = {row["prompt"]: row["answer"] for row in helpers.ROWS}
    (metrics,) = metrics_of(values)
    expected = []
    for row in read_lines(folder_of(values) / "samples.jsonl"):
        answer = answers[row["prompt"]]
        response = tokenizer.encode(row["response"])
        logprobs = []
        for prompt in (row["prompt"], f"{row['prompt']}={answer}:"):
            query = tokenizer.encode(prompt)
            ids = torch.tensor([query + response])
            logprobs.append(model(ids).logits[0, len(query) - 1 :].log_softmax(-1))
        expected += distill.divergence(*logprobs, "reverse_kl", 0.5).tolist()
    mean = sum(expected) / len(expected)
    assert metrics["objective/divergence"] == pytest.approx(mean, rel=1e-6)


def test_longer_prompts_of_a_teacher_count_in_a_micro_batch(tmp_path, monkeypatch):
    passes = recorded(monkeypatch, distill.Policy, "forward")
    longer = {"teacher": "self", "teacher_prompt": "{prompt}" * 10}
    values = flags(tmp_path, **longer, passes=4 / 13, on_policy_share=0.0)
    run_here({**values, "micro_batch_tokens": 100}, "distill")
    assert 50 < max(ids.numel() for (_, ids, *_), _ in passes) <= 100


def test_a_refreshed_teacher_is_the_live_model_once_a_step(tmp_path):
    """Also after it was resumed: the checkpoint holds the teacher."""
    values = flags(tmp_path, teacher_prompt=WORKED, passes=16 / 13, mini_batch_size=0)
    losses = {}
    for name, changes in (
        ("live", {"teacher": "self"}),
        ("whole", {"teacher": values["model"], "ref_refresh_every": 1}),
        ("every other", {"teacher": values["model"], "ref_refresh_every": 2}),
    ):
        run = {**values, **changes, "run_name": name}
        run_here(run, "distill")
        losses[name] = [row["train/loss"] for row in metrics_of(run)]
    assert losses["whole"] == pytest.approx(losses["live"], rel=1e-9)
    assert losses["every other"][1] != pytest.approx(losses["live"][1], rel=1e-9)
    halves = {**run, "run_name": "halves", "save_every": 3, "passes": 12 / 13}
    run_here(halves, "distill")
    run_here({**halves, "passes": 16 / 13, "resume": True}, "distill")
    assert [row["train/loss"] for row in metrics_of(halves)] == losses["every other"]


def test_the_prompt_of_the_teacher(tmp_path):
    """A column of text or messages, a template; a system turn of its own."""
    model = tiny_model(tmp_path / "model", chat=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    path = write_rows(tmp_path / "rows.jsonl", [TOLD["row"]])
    load = lambda name, args: load_prompts(
        "--dataset", name, "train", tokenizer, args, lambda *_: "", None, "prompts", [1]
    )
    for prompt, system, expected in TOLD["seen"]:
        given = dict(teacher="self", teacher_prompt=prompt, teacher_system_prompt=system)
        args = distill.Args(model=model, max_response_length=50, **given)
        [(loaded, _)] = load(path, args)
        text = tokenizer.apply_chat_template(expected, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(loaded[0]["teacher_query"]) == text
        assert loaded[0]["query"] != loaded[0]["teacher_query"]
    several = write_rows(tmp_path / "several.jsonl", [{"messages": MESSAGES, "more": {"x": "y"}}])
    with pytest.raises(utils.UserError, match="several.jsonl row 1: has several turns to learn"):
        load(several, args)


# ---- a teacher on a server -----------------------------------------------------------------------


class Serving(Told):
    """As vLLM; a POST is answered by `Server.behave`."""

    def do_GET(self):
        body = json.dumps({"data": [{"max_model_len": 250}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def serve():
    """Serves a model; `status(prompt)` is that of an answer."""
    servers = []

    def start(name: str, status=lambda prompt: 200, decode=None) -> str:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64)

        def behave(question, _):
            if "tokens" in question:
                return 200, {"prompt": (decode or tokenizer.decode)(question["tokens"])}, {}
            ids, k = question["prompt"], question["prompt_logprobs"]
            assert question["max_tokens"] == 1
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            known = [None]
            for token, row in zip(ids[1:], logprobs):
                chosen = dict.fromkeys([token, *row.topk(k).indices.tolist()])
                known.append({i: {"logprob": row[i].item()} for i in chosen})
            return status(ids), {"choices": [{"prompt_logprobs": known}]}, {}

        servers.append(Server(behave, Serving))
        return servers[-1].url

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"divergence": "jsd", "on_policy_share": 0.5, "teacher_prompt": WORKED},
        {"estimator": "sampled"},
    ],
)
def test_a_server_teaches_as_a_local_model_does(tmp_path, serve, changes):
    """With the log-probabilities of all tokens, and more of them than the student has, or of the
    sampled one.
    """
    values = flags(tmp_path, **changes)
    size = transformers.AutoConfig.from_pretrained(values["model"]).vocab_size
    size += 0 if "estimator" in changes else 5
    teacher = tiny_model(tmp_path / "teacher", "llama", hidden_size=48, vocab_size=size)
    run_here({**values, "teacher": teacher}, "distill")
    local = metrics_of(values)
    top_k = {} if "estimator" in changes else {"teacher_top_k": size}
    served = {**values, "teacher": serve(teacher), "run_name": "served", **top_k}
    run_here(served, "distill")
    for row, expected in zip(metrics_of(served), local, strict=True):
        names = ["train/loss", "objective/divergence", "loss/grad_norm"]
        names += ["teacher/same_top_token"] if top_k else []
        assert row.pop("teacher/left_out") == 0
        assert [row[x] for x in names] == pytest.approx([expected[x] for x in names], rel=1e-6)


def test_what_a_server_does_not_answer_does_not_train(tmp_path, serve, capfd, monkeypatch):
    """Other requests are sent again after 503; a step without any answer ends the run."""
    monkeypatch.setattr(vllm_teacher, "SERVER_PATIENCE", 60.0)
    teacher = tiny_model(tmp_path / "teacher", "llama")
    asked = []

    def status(ids: list[int]) -> int:
        """Refuse the first prompt; the others are answered when they are asked again."""
        asked.append(ids)
        return 404 if ids == asked[0] else 200 if asked.count(ids) > 1 else 503

    values = flags(tmp_path, teacher=serve(teacher, status), passes=4 / 13)
    run_here(values, "distill")
    (row,) = metrics_of(values)
    assert 0 < row["teacher/left_out"] < 1 and row["train/loss"] > 0
    assert "HTTP status 404" in capfd.readouterr().err
    failing = {**values, "teacher": serve(teacher, lambda _: 400), "run_name": "failing"}
    line = helpers.refused(capfd, run_here, failing, "distill")
    assert "--teacher http://" in line and "answered for no response of step 1" in line


def test_servers_that_cannot_teach(tmp_path, serve, capsys, monkeypatch):
    monkeypatch.setattr(vllm_teacher, "SERVER_START", 0.0)
    values = flags(tmp_path)
    nobody = f"http://127.0.0.1:{helpers.free_port()}"
    refused = lambda **x: helpers.refused(capsys, run_here, {**values, **x}, "distill")
    assert f"--teacher {nobody}/v1/models failed" in refused(teacher=nobody)
    url = serve(values["model"])
    assert f"--teacher {url}: reads 250 tokens" in refused(teacher=url, max_response_length=245)
    url = serve(values["model"], decode=lambda ids: "another text")
    assert "another vocabulary" in refused(teacher=url)


def test_a_student_becomes_its_teacher(tmp_path):
    """By the sampled form of the reverse KL. (Runs with a whole divergence: test_golden.py.) Of the
    two updates of a step, the mismatch with the sampler is that before the first one.
    """
    teacher = tiny_model(tmp_path / "teacher", initializer_range=0.1)
    changes = dict(rollout_batch_size=16, mini_batch_size=8, passes=480 / 13, learning_rate=1e-2)
    values = flags(tmp_path, teacher=teacher, estimator="sampled", **changes)
    run_here(values, "distill")
    rows = metrics_of(values)
    assert all(row["rollout/logprob_diff_max"] < 1e-5 for row in rows)
    assert 0 < rows[-1]["objective/divergence"] < 0.95 * rows[0]["objective/divergence"]


BROKEN = """
class Broken:
    def reset(self, prompt, **columns):
        if prompt != "1+2=":
            raise ValueError("no such game")

    def step(self, text): return "", 1.0, True
"""


def test_conversations_that_fail_do_not_train(tmp_path, capfd):
    """Nor does a step of which all fail, in which nothing changes; also where they are read from
    files.
    """
    (tmp_path / "broken.py").write_text(BROKEN)
    values = flags(
        tmp_path, teacher=tiny_model(tmp_path / "teacher", "llama"), passes=16 / 13, num_epochs=2
    )
    values |= {"environment": f"{tmp_path / 'broken.py'}:Broken", "rollout_batch_size": 4}
    run_here({**values, "save_rollouts": True}, "distill")
    rows = metrics_of(values)
    again = {**values, "rollouts_from": str(folder_of(values)), "run_name": "again"}
    run_here(again, "distill")
    losses = [[row["train/loss"] for row in each] for each in (rows, metrics_of(again))]
    assert losses[0] == losses[1]
    trained = [row["train/loss"] is not None for row in rows]
    assert any(trained) and not all(trained)
    assert [row["rollout/logprob_diff_max"] is not None for row in rows] == trained
    assert [row["val/skipped_updates"] for row in rows] == [0] * 4
    assert "responses are left out; the first: reset" in capfd.readouterr().err


# ---- bad input -----------------------------------------------------------------------------------

# Flags, and what the line names.
REFUSED = helpers.table("command_lines.json")["distill"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    values = flags(folder)
    tiny_model(folder / "teacher", "llama")
    tiny_model(folder / "smaller", vocab_size=150)
    helpers.scalar_folder(values["model"], folder / "other_vocabulary", tokens=("ab", "12"))
    write_rows(folder / "unanswered.jsonl", [{"prompt": "1+1="}] * 9)
    told = {"prompt": "1+1=", "turns": [{"role": "user"}], "long": "1" * 245}
    write_rows(folder / "turns.jsonl", [told] * 9)
    return SimpleNamespace(folder=folder, values={**values, "model": "model"})


@pytest.mark.parametrize("line", REFUSED)
def test_refused(files, line, monkeypatch, capsys):
    monkeypatch.chdir(files.folder)
    words = helpers.words(files.values) + line.split()
    assert REFUSED[line] in helpers.refused(capsys, run_here, words, "distill")
    assert not [*files.folder.glob("runs/*")]
