#!/usr/bin/env bash
# Usage: launch/setup.sh PYTHON VENV [EXTRA]
# Makes the virtual environment. On a host with an NVIDIA GPU pip's default torch (CUDA) is taken; on any
# other host only a CPU build: if none is to be had, this stops before gigabytes of CUDA wheels arrive.
set -euo pipefail
python=$1 venv=$2 extra=${3:-}
cd "$(dirname "$0")/.."
say() { printf 'setup: %s\n' "$*" >&2; }

command -v "$python" >/dev/null || { say "there is no $python; pass another: make PYTHON=... ..."; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  say "$python is older than Python 3.11; pass another: make PYTHON=python3.12 ..."; exit 1; }
# Without pip it is what a failed attempt has left (Debian without python3-venv), and made again.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv" || {
  say "$python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    say "installing torch for CUDA"
    pip install -q torch
  else
    say "no GPU: installing a CPU build of torch"
    if ! pip install -q 'torch==2.13.0+cpu' 2>/dev/null; then
      # macOS, Windows and Arm wheels are CPU builds without the "+cpu" label.
      plan=$(pip install --dry-run --quiet --report - torch) || { say "pip finds no torch"; exit 1; }
      if grep -q '"name": "nvidia-' <<<"$plan"; then
        say "pip offers only a CUDA build of torch, which this host cannot use (several gigabytes)."
        say "Point pip at PyTorch's CPU wheels (PIP_EXTRA_INDEX_URL; see PyTorch's install page) and run"
        say "make again, or install a torch of your choice into $venv yourself."
        exit 1
      fi
      pip install -q torch
    fi
  fi
fi
say "installing asyncrl${extra:+ with $extra}"
pip install -q -e ".[gguf${extra:+,$extra}]"
touch "$venv/.installed${extra:+-$extra}"
