"""How the tests run: what is importable, the flag --long, and the order of the files.

A test that is run as a script imports this file, too, so that it finds the same modules.
"""

import faulthandler
import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest

pytest.register_assert_rewrite("helpers")  # so that its asserts show what differs
ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT / part) for part in (".", "scripts", "assets", "tests", "tests/support")]
sys.path[:0] = [path for path in PATHS if path not in sys.path]
# read when transformers is imported: no test waits for a network
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
cache = tempfile.TemporaryDirectory(prefix="run_tests_", ignore_cleanup_errors=True)
os.environ.setdefault("HF_DATASETS_CACHE", cache.name)  # the same for all processes of the tests
# read as pyarrow is: its allocator's thread may hold a lock while a test forks this process
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
# read as torch is imported; vLLM on a CPU requires it
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config):
    """Import the fixtures, which takes seconds, where tests run: with --numprocesses that is not in
    this process.
    """
    config.stderr = os.dup(2)  # which is not captured here
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tiny_models")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    """Bound what follows a test, too: once it has failed, the limits of pytest.ini are off."""
    faulthandler.dump_traceback_later(100, exit=True, file=item.config.stderr)


def pytest_addoption(parser):
    parser.addoption(
        "--long",
        action="store_true",
        help="the campaign of faults in its longer form (tests/faults)",
    )
    parser.addoption("--device", help="where tests/test_equations.py computes, such as cuda")


@pytest.fixture(scope="session")
def long(request) -> bool:
    """Whether tests of faults draw their longer form: more instants, more commands, more runs."""
    return request.config.getoption("--long")


# Files that take half a minute or so, the slowest first.
SLOWEST = (
    "vllm recipes vllm_server invariance shard run kills resume golden scripts code signals conversations "
    "agents cluster failing_ranks pretend_device memory tool_processes evaluate compile rewards "
    "rewards_fail drift families ranks random_runs lora ppo distill data policy"
).split()


# import vLLM, in 20 seconds: see helpers.vllm_preloaded
OF_VLLM = ("test_vllm", "test_recipes", "test_vllm_server")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give a file to one process, and those of OF_VLLM to the same one."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "vLLM" if Path(file).stem in OF_VLLM else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    """Begin with the slowest files: what processes that share the files finish with is short, so
    they end together.
    """
    place = {f"test_{name}": i for i, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    gc.collect()
    gc.freeze()  # what is imported by now stays: no collection goes through it again
