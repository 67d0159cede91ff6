"""Runs of the scripts for the tests: tiny models, real processes, and signals at an exact place.

A process of its own costs five seconds of imports, so most runs are forked from a server that has
imported everything: each is a real process with its own signals and exit code. `start` can make
such a process send itself a signal at the n-th call of any function, which hits a phase of the
training exactly, where a sleep would only hit it mostly.
"""

import atexit
import contextlib
import faulthandler
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import socketserver
import sys
import tempfile
import threading
import time
import types
from multiprocessing import forkserver
from pathlib import Path

# Some of these are imported here only so that the forked runs have them.
import datasets  # noqa: F401
import matplotlib.backends.backend_agg  # noqa: F401
import pytest
import torch
import transformers
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
import yaml
from conftest import PATHS, ROOT
from safetensors.torch import load_file
from tiny_models import make_tokenizer

import extras.episodes.conversations  # noqa: F401
import extras.vllm.engine  # noqa: F401
from plumbing.data.encoding import Text, encode_texts
from plumbing.data.messages import read_messages
from plumbing.data.rendering import Rendering
from plumbing.processes import ForkServer
from plumbing.rewards.sources import Scoring
from plumbing.run import log as run_log
from plumbing.run.command import parse, report_errors

GAME = f"{ROOT / 'tests/support/game.py'}:Game"  # an environment
# Thirteen sums of numbers of one and two digits.
ROWS = [
    {"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in zip(range(1, 40, 3), range(2, 93, 7))
]
HELD_OUT = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in (5, 6, 9)]

# Scores that differ from response to response, whatever a random model writes.
REWARD = """
def score(prompts, responses, **columns):
    return [sum(map(ord, prompt + response)) % 7 / 7 for prompt, response in zip(prompts, responses)]
"""

# Shows the names of tools, and writes calls as Qwen's does.
CHAT_TEMPLATE = """
{%- for tool in tools or [] %}{{ '[' + tool.function.name + ']' }}{% endfor %}
{%- for m in messages %}
    {{- '[' + m.role + ']' + m.content }}
    {%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '>' }}{% endif %}"""


def tiny_model(
    folder, kind: str = "qwen2", chat: bool = False, stop: float = 1.0, **changes
) -> str:
    """Save a random model of two layers and its tokenizer (one token a character) in a folder.

    `stop` is a factor of the stop token's row of the output head: responses of many lengths, where
    it is larger than 1.
    """
    tokenizer = make_tokenizer()
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    shape = dict(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if kind != "gpt_neox":
        shape |= dict(num_key_value_heads=1)
    if kind.startswith("gemma"):
        shape |= dict(head_dim=16)
    config = transformers.AutoConfig.for_model(kind, **{**shape, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # far from uniform, so that a step changes something
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.get_output_embeddings().weight.data[tokenizer.eos_token_id] *= stop
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def scalar_folder(
    source: str, folder, labels: int = 1, tokens: tuple = (), tokenizer=None, **config
) -> str:
    """A reward model in a folder: the body of a language model, and a head at random values far
    from 0.
    """
    torch.manual_seed(5)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=labels
    )
    model.score.weight.data = torch.randn_like(model.score.weight)
    model.config.update(config)
    model.save_pretrained(folder)
    tokenizer = tokenizer or make_tokenizer()
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(folder)
    return str(folder)


def table(name: str) -> dict:
    """Return what a file of tests/data holds."""
    return yaml.safe_load((ROOT / "tests/data" / name).read_text())


WORKSPACE, SCHEDULE, MOVING, OF_PPO = table("runs.yaml").values()


def dialogue(prompt, tokenizer, system_prompt: str = "") -> list[dict]:
    """Return a prompt, text or messages, as messages."""
    rendering = Rendering(tokenizer, system_prompt=system_prompt)
    return rendering.dialogue(read_messages("", prompt))


def render_prompt(prompt, tokenizer, system_prompt: str = "", tools: list | None = None) -> Text:
    """Return a prompt as the text to encode."""
    messages = dialogue(prompt, tokenizer, system_prompt)
    return Rendering(tokenizer, system_prompt=system_prompt, tools=tools).prompt("", messages)


def encode_prompt(prompt, tokenizer, *given, **named) -> tuple[str, list[int]]:
    """Return a prompt as the text and as the token ids that the model sees."""
    text = render_prompt(prompt, tokenizer, *given, **named)
    return text.shown, encode_texts([text], tokenizer)[0]


def encode_response(where: str, text: str, tokenizer, stop_ids: list[int]) -> list[int]:
    """Return the token ids of a response to learn."""
    response = Rendering(tokenizer, stop_ids).response(where, text)
    return encode_texts([response], tokenizer, stop_ids)[0]


def write_rows(path, rows: list) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_files(folder, files: dict[str, str | list]) -> None:
    """Write files of rows, or of a text in Latin-1."""
    for name, content in files.items():
        if isinstance(content, list):
            write_rows(folder / name, content)
        else:
            (folder / name).write_text(content, encoding="latin-1")


def workspace(folder) -> dict:
    """Flags of a small run, with its model, data and reward in a folder."""
    folder = Path(folder)
    (folder / "reward.py").write_text(REWARD)
    return {
        **WORKSPACE,
        "model": tiny_model(folder / "model"),
        "dataset": write_rows(folder / "train.jsonl", ROWS),
        "eval_dataset": write_rows(folder / "held_out.jsonl", HELD_OUT),
        "reward": f"{folder / 'reward.py'}:score",
        "output_dir": str(folder / "runs"),
    }


def variant(base: dict, folder, **changes) -> dict:
    """The flags of a run with other ones, in a folder of its own."""
    return {**base, "output_dir": str(folder), "run_name": "run", **changes}


def flags_of(script: str, values: dict) -> dict:
    """Return those of some flags that a script has."""
    fields = __import__(script).Args.__dataclass_fields__
    return {name: value for name, value in values.items() if name in fields}


def words(values: dict) -> list[str]:
    """Return {"resume": True, "kl_coef": 0.1} as ["--resume", "--kl_coef", "0.1"]."""
    line = []
    for name, value in values.items():
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name.replace('_', '-')}")
        else:
            line += [f"--{name}", *map(str, value if isinstance(value, (tuple, list)) else [value])]
    return line


# ---- processes -----------------------------------------------------------------------------------


def _before(name: str, action) -> None:
    """Make every call of a function call `action(how often)` first: "utils.Optimizer.step"."""
    *path, function = name.split(".")
    rooms = [
        module
        for module in sys.modules
        if re.fullmatch(rf"(plumbing|extras)\.(\w+\.)?{path[0]}", module)
    ]
    owner = sys.modules[max(rooms, key=len, default=path[0])]
    for part in path[1:]:
        owner = getattr(owner, part)
    original = getattr(owner, function)
    calls = []

    def call(*args, **kwargs):
        calls.append(1)
        action(len(calls))
        return original(*args, **kwargs)

    setattr(owner, function, call)


def _send_after(calls: int, what: signal.Signals) -> None:
    """Make this process send itself a signal after so many further calls of functions in this
    thread, C's included.
    """
    left = calls

    def count(frame, event: str, argument) -> None:
        nonlocal left
        left -= event in ("call", "c_call")
        if left <= 0:
            sys.setprofile(None)
            os.kill(os.getpid(), what)

    sys.setprofile(count) if calls else os.kill(os.getpid(), what)


def _signal_at(place: str) -> None:
    """Make this process send itself a signal before the n-th call of a function:
    "utils.Optimizer.step:3:SIGTERM".

    "A;B" stands for two such places, and "run_log.RunLog.log>json.dumps:2:SIGKILL" for the second
    call of json.dumps after run_log.RunLog.log was called for the first time.
    "utils.Optimizer.step:3:SIGTERM+500" is the 500th call of any function after that of
    "utils.Optimizer.step:3:SIGTERM".
    """
    for part in place.split(";"):
        first, _, then = part.rpartition(">")
        name, number, what = then.split(":")
        signal_name, _, later = what.partition("+")
        send = (
            lambda calls, at=int(number), what=signal.Signals[signal_name], later=int(later or 0): (
                _send_after(later, what) if calls == at else None
            )
        )
        if first:
            _before(
                first,
                lambda calls, name=name, send=send: _before(name, send) if calls == 1 else None,
            )
        else:
            _before(name, send)


def run_and_exit(main) -> None:
    """Call a function, and end this process as an interpreter does."""
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()  # closes the reward processes
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def _main(script: str, flags: list[str], log: str, environment: dict, place: str) -> None:
    """What `python SCRIPT FLAGS` does, in a process that has its imports."""
    multiprocessing.current_process()._config["daemon"] = False  # else it could not start workers
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False)
    faulthandler.enable(sys.stderr)  # shows where it is when it crashes
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    os.environ.clear()  # the server's is that of the test which started it
    os.environ.update(environment)
    module = __import__(script)
    if callable(place):
        place()
    elif place:
        _signal_at(place)
    run_log.RunLog.draw = lambda self: None
    run_and_exit(report_errors()(lambda: module.main(parse(module.Args, flags))))


PRELOADED = ["helpers", "preloaded"]


@functools.cache
def _fork_server(*preloaded: str) -> forkserver.ForkServer:
    """A process that has imported some modules and forks the runs."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(list(preloaded))
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "VLLM_LOGGING_LEVEL")}
    # Python 3.11's server does not take over sys.path
    os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)
    # as the engine sets it, before vLLM is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    server.ensure_running()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    return server


def _server() -> multiprocessing.context.ForkServerContext:
    """The context of which a process is forked from the server of PRELOADED."""
    forkserver.connect_to_new_process = _fork_server(*PRELOADED).connect_to_new_process
    return multiprocessing.get_context("forkserver")


# What vLLM's CPU build needs; on GPUs, scripts/vllm_server.py needs nothing of this.
SERVER_ON_CPU = (
    "-- --enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens 65536".split()
)
VLLM_ON_CPU = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@contextlib.contextmanager
def vllm_preloaded():
    """Fork the runs from a server that has imported vLLM, too, which other runs do not: it changes
    torch.compile.
    """
    PRELOADED.append("preloaded_vllm")
    yield
    PRELOADED.remove("preloaded_vllm")


class Running:
    """A run in a process of its own, without curves.png, which takes as long as four steps."""

    def __init__(
        self, values: dict, script: str = "grpo", environment: dict | None = None, place: str = ""
    ):
        context = _server()
        self.log = tempfile.mktemp(prefix="log_", dir=_logs.name)
        environment = {**os.environ, "RUN_TEST_LOG": self.log, **(environment or {})}
        given = (script, words(values), self.log, environment, place)
        self.process = context.Process(target=_main, args=given, daemon=True)
        self.process.start()

    def wait(self, seconds: float = 240) -> "Running":
        self.process.join(seconds)
        if self.process.exitcode is None:
            os.kill(self.process.pid, signal.SIGUSR1)  # shows where it is
            time.sleep(0.5)
            self.process.kill()
            raise TimeoutError(f"still running after {seconds} s\n{self.out}\n{self.err}")
        return self

    @property
    def code(self) -> int:
        return self.process.exitcode

    @property
    def out(self) -> str:
        return self._text("out")

    @property
    def err(self) -> str:
        return self._text("err")

    def _text(self, name: str) -> str:
        file = Path(f"{self.log}.{name}")
        return file.read_text() if file.exists() else ""  # killed at once

    @property
    def errors(self) -> list[str]:
        """The lines that say why a run ended. (A progress bar shares its line with what comes after
        it.)
        """
        return [
            line for line in self.err.replace("\r", "\n").split("\n") if line.startswith("error:")
        ]


class Threads(socketserver.ThreadingMixIn):
    """The threads of a server whose clients may leave early.

    What else fails in a thread is raised by `shutdown`. It is not printed, because the thread may
    outlive its test, and another test may be the one whose output is read by then.
    """

    daemon_threads = True

    def __init__(self, *args):
        super().__init__(*args)
        self.failures = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), OSError):
            self.failures.append(sys.exception())

    def shutdown(self) -> None:
        super().shutdown()
        if self.failures:
            raise self.failures[0]


def processes_of(running: Running) -> list[int]:
    """The processes that a run has started and that are still there."""
    mark = f"RUN_TEST_LOG={running.log}\0".encode()
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark in (process / "environ").read_bytes() + b"\0":
                processes.append(int(process.name))
    return processes


def refused(captured, call, *args, noisy: bool = False, **options) -> str:
    """Call what has to end with exit code 2; return its one line of stderr that says why.

    Nothing else may be there but warnings, unless it is `noisy`: a progress bar, a traceback of the
    user's function.
    """
    with pytest.raises(SystemExit) as end:
        report_errors()(call)(*args, **options)
    err = captured.readouterr().err
    lines = [line for line in err.splitlines() if line and not line.startswith("warning:")]
    errors = [line for line in lines if line.startswith("error: ")]
    assert end.value.code == 2 and len(errors) == 1 and (noisy or lines == errors), err
    return errors[0]


_logs = tempfile.TemporaryDirectory(prefix="run_tests_", ignore_cleanup_errors=True)


def scores_by(
    reward_sources, rows: list[dict], texts: list[str], responses: list, interrupted=lambda: False
) -> dict:
    """Each source's scores of responses that are all there."""
    scoring = Scoring(reward_sources, interrupted)
    there = threading.Event()  # whether all are there: what a source takes at once does not vary
    reward_sources.loop.loop.call_soon_threadsafe(there.wait, 60)
    for i, (row, text, response) in enumerate(zip(rows, texts, responses)):
        scoring.add(i, types.SimpleNamespace(row=row, text=text, response=response))
    there.set()
    scores = [sample.scores for sample in scoring.finish()]
    names = {name: None for each in (reward_sources.sources, *scores) for name in each}
    return {name: [each[name] for each in scores] for name in names}


def end_processes(*servers) -> None:
    """End fork servers, and all that was forked from them."""
    for server in servers:
        if server.process:
            server.control.close()
            server.process.wait(60)


def listed(sampled) -> tuple[list[list[int]], list[list[float]]]:
    """Responses and their log-probabilities, in the order of their queries, of what a decode loop
    yields.
    """
    in_order = sorted(sampled, key=lambda each: each[0])
    logprobs = [outputs["rollout_logprobs"].tolist() for *_, outputs in in_order]
    return [response.tolist() for _, response, _ in in_order], logprobs


def run(values: dict, code: int = 0, **options) -> Running:
    """Run to the end, and check the exit code."""
    done = Running(values, **options).wait()
    assert done.code == code, f"exit code {done.code}\n{done.err}"
    return done


# Below the ports that the kernel gives to connections; those of two test processes are far apart.
_ports = itertools.count(10_000 + os.getpid() * 997 % 20_000)


def free_port() -> int:
    """Return a port where nothing listens; each call returns another one."""
    for port in _ports:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def start_ranks(
    values: dict, size: int, places: dict | None = None, environment: dict | None = None, **options
) -> list[Running]:
    """The same over several ranks; `places` gives one rank a signal, {1:
    "grpo.generate:3:SIGTERM"}, or calls there what breaks something (picklable).
    """
    group = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    start_rank = lambda rank, **variables: Running(
        values,
        environment={name: str(x) for name, x in variables.items()} | (environment or {}),
        place=(places or {}).get(rank, ""),
        **options,
    )
    return [start_rank(rank, **group, RANK=rank, LOCAL_RANK=rank) for rank in range(size)]


def run_ranks(
    values: dict, size: int, codes: tuple, places: dict | None = None, **options
) -> list[Running]:
    """Run several ranks to the end, and check the exit codes."""
    ranks = start_ranks(values, size, places, **options)
    try:
        for rank in ranks:
            rank.wait()
    finally:
        for rank in ranks:
            rank.process.kill()
    assert tuple(rank.code for rank in ranks) == codes, "\n".join(rank.err for rank in ranks)
    return ranks


def run_here(values: dict | list[str], script: str = "grpo") -> None:
    """`main` in this process, without curves.png; `values` may be the words of a command line.

    What it changes is put back: signal handlers; its reward processes are ended.
    """
    module = __import__(script)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    line = values if isinstance(values, list) else words(values)
    made: list[ForkServer] = []
    begin = ForkServer.__init__
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                ForkServer, "__init__", lambda *args: made.append(args[0]) or begin(*args)
            )
            patch.setattr(run_log.RunLog, "draw", lambda self: None)
            report_errors()(lambda: module.main(parse(module.Args, line)))()
    finally:
        end_processes(*made)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def recorded(monkeypatch, owner, name: str) -> list[tuple]:
    """Return a list that gets (arguments, result) of each call of a function from now on."""
    calls = []
    function = getattr(owner, name)

    def call(*args, **options):
        calls.append((args, function(*args, **options)))
        return calls[-1][1]

    monkeypatch.setattr(owner, name, call)
    return calls


# ---- what a run left -----------------------------------------------------------------------------


def refuse(constant: str):
    raise ValueError(f"{constant} is not JSON")


def read_lines(path) -> list[dict]:
    """The rows of a .jsonl file; NaN and Infinity, which are no JSON, raise."""
    return [json.loads(line, parse_constant=refuse) for line in Path(path).read_text().splitlines()]


def folder_of(values: dict) -> Path:
    return Path(values["output_dir"]) / values["run_name"]


def metrics_of(values: dict) -> list[dict]:
    """Return the rows of metrics.jsonl without times and memory."""
    rows = read_lines(folder_of(values) / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def tensors_of(folder) -> dict[str, torch.Tensor]:
    """All that the .safetensors files in and below a folder hold: model or adapter, critic,
    reference.
    """
    files = {
        path.relative_to(folder): load_file(path)
        for path in sorted(Path(folder).rglob("*.safetensors"))
    }
    return {
        f"{path} {name}": tensor
        for path, tensors in files.items()
        for name, tensor in tensors.items()
    }


def largest_difference(
    values: dict,
    reference: dict,
    parts: tuple = ("checkpoints/step_3",),
    least: float = 1e-2,
    without: str = " ",
) -> tuple[float, str]:
    """The largest difference between two runs, and where it is: in any metric of any step but those
    that begin with `without`, and in any weight in some of their folders.

    It is relative to the reference's number, and to the largest number of a tensor, but to `least`
    at least, as a loss can be next to 0. Both runs have to have the same metrics, and tensors of
    the same names and formats.
    """
    differences = [(0.0, "nowhere")]
    for row, expected in zip(metrics_of(values), metrics_of(reference), strict=True):
        assert row.keys() == expected.keys()
        assert [x is None for x in row.values()] == [x is None for x in expected.values()]
        compared = {
            key: x for key, x in expected.items() if x is not None and not key.startswith(without)
        }
        differences += [
            (abs(row[key] - x) / max(abs(x), least), f"{key} of step {row['step']}")
            for key, x in compared.items()
        ]
    for part in parts:
        ours = tensors_of(folder_of(values) / part)
        theirs = tensors_of(folder_of(reference) / part)
        assert theirs and {key: x.dtype for key, x in ours.items()} == {
            key: x.dtype for key, x in theirs.items()
        }
        for key, x in theirs.items():
            size = (ours[key] - x).abs().max().item() / max(x.abs().max().item(), least)
            differences.append((size, f"{part}/{key}"))
    # NaN, which is not less than anything, counts most
    return max(differences, key=lambda x: (math.isnan(x[0]), x))


def steps_of(values: dict) -> list[str]:
    return sorted(path.name for path in (folder_of(values) / "checkpoints").iterdir())


def same_weights(one, other) -> bool:
    one = weights_of(one)
    other = weights_of(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same_run(values: dict, whole: dict) -> None:
    """What a run left is that of another one, bit for bit, clocks aside; and nothing is left half
    saved.
    """
    assert metrics_of(values) == metrics_of(whole)
    ours = folder_of(values)
    theirs = folder_of(whole)
    assert read_lines(ours / "samples.jsonl") == read_lines(theirs / "samples.jsonl")
    if (theirs / "tokens.jsonl").exists():  # a reward model has none
        assert read_lines(ours / "tokens.jsonl") == read_lines(theirs / "tokens.jsonl")
    assert same_weights(ours / "final", theirs / "final")
    assert not list((ours / "checkpoints").glob(".*"))


def all_finite(folder) -> bool:
    return all(tensor.isfinite().all() for tensor in weights_of(folder).values())
