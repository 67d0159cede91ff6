#!/usr/bin/env bash
# Makes the virtual environment .venv and installs requirements.txt into it; does nothing if that is done.
#   bash scripts/setup.sh            PYTHON=python3.12 bash scripts/setup.sh
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $PYTHON is older than Python 3.11; name a newer one, as in PYTHON=python3.12 bash $0" >&2
    exit 2
}
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
stamp=.venv/installed-requirements.txt
if cmp -s requirements.txt "$stamp"; then exit 0; fi

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
install() { pip install --quiet --no-compile "$@"; }
torch=$(grep '^torch==' requirements.txt)
echo "installing requirements.txt into .venv (once)"
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    install -r requirements.txt
else
    # No NVIDIA driver: the CPU build of torch, from the package index where it has one, else by uv, which knows
    # where it lies (macOS has no other build). vllm needs a GPU.
    if [ "$(uname)" = Darwin ]; then
        install "$torch"
    elif ! install "$torch+cpu" 2>/dev/null; then
        install uv
        .venv/bin/uv pip install --quiet --python .venv/bin/python --torch-backend cpu "$torch"
    fi
    grep -v '^vllm==' requirements.txt | install -r /dev/stdin
    # CUDA builds, left by an interrupted test.sh; twice quiet: mostly there are none.
    pip uninstall --quiet --quiet --yes torchvision torchaudio torchcodec
fi
# As pip would, but on all cores. It fails at files that are no Python.
.venv/bin/python -W ignore -m compileall -qq -j 0 .venv/lib || true
cp requirements.txt "$stamp"
