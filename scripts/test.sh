#!/usr/bin/env bash
# Installs what the tests need and runs them all; words after it go to pytest.
#   bash scripts/test.sh            bash scripts/test.sh tests/test_equations.py -k kl
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
tools="pytest==9.2.0 hypothesis==6.170.15 reasoning-gym==0.1.25"
if [ "$(cat .venv/installed-test-tools.txt 2>/dev/null)" != "$tools" ]; then
    # shellcheck disable=SC2086
    .venv/bin/python -m pip --disable-pip-version-check install --quiet $tools
    echo "$tools" >.venv/installed-test-tools.txt
fi
exec .venv/bin/python -m pytest "$@"
