#!/usr/bin/env bash
# Make .venv with pinned versions. A second call ends at once unless setup.py or constraints.txt changed.
#   bootstrap.sh               make or renew .venv
#   bootstrap.sh --find-only   print the interpreter that would be used, and stop
# PYTHON=/path/to/python chooses an interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
STAMP=$VENV/.dynatrain-installed

say() { printf '[bootstrap] %s\n' "$*" >&2; }

# A name on PATH proves nothing: pyenv puts shims there for versions that are not active, and Debian's
# python3 may lack venv. So each candidate has to answer.
usable() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12)); ' >/dev/null 2>&1 &&
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

# 3.12 first, because the pinned versions are tested there.
candidates() {
  printf '%s\n' python3.12 python3.13 python3.14 python3
  local directory
  for directory in "${PYENV_ROOT:-}" "$HOME/.pyenv"; do
    [ -n "$directory" ] || continue
    find "$directory/versions" -maxdepth 3 -name python -path '*/bin/python' 2>/dev/null | sort -V
  done
}

find_python() {
  local candidate path
  if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" || { say "PYTHON=$PYTHON is not a Python >= 3.12 with venv and ensurepip"; return 1; }
    command -v "$PYTHON"
    return
  fi
  while IFS= read -r candidate; do
    path=$(command -v "$candidate" 2>/dev/null) || continue
    if usable "$path"; then
      "$path" -c 'import sys; print(sys.executable)'
      return
    fi
  done < <(candidates)
  say "no Python >= 3.12 (with venv and ensurepip) found on PATH or under ~/.pyenv/versions."
  say "Get one, for example:  pyenv install 3.12   |   apt-get install python3.12 python3.12-venv   |   uv python install 3.12"
  say "then run again, or name it:  PYTHON=/path/to/python3.12 make bootstrap"
  return 1
}

# The editable install records the checkout's path, so a moved checkout is installed anew.
fingerprint() { { pwd -P; cat setup.py pyproject.toml constraints.txt scripts/bootstrap.sh; } | sha256sum | cut -d' ' -f1; }

if [ "${1:-}" = "--find-only" ]; then
  find_python
  exit
fi

want=$(fingerprint)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$want" ] && [ -x "$VENV/bin/python" ]; then
  exit 0
fi

if [ -x "$VENV/bin/python" ] && usable "$VENV/bin/python"; then
  say "renewing $VENV ($("$VENV/bin/python" --version))"
else
  python=$(find_python)
  say "making $VENV with $python ($("$python" --version))"
  "$python" -m venv --clear "$VENV"
fi
rm -f "$STAMP"

say "installing pinned versions (torch is large: a few minutes the first time)"
"$VENV/bin/python" -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
"$VENV/bin/python" -c 'import megatron_dynatrain, megatron_dynatrain.patches; print("[bootstrap] megatron-dynatrain", megatron_dynatrain.__version__, "is ready")'
printf '%s\n' "$want" >"$STAMP"
