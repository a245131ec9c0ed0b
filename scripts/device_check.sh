#!/usr/bin/env bash
# The device check on a CUDA box: one GPU, PyTorch with CUDA, under ten minutes. See docs/gpu.md.
# It installs nothing and changes no setting of the device or the system.
set -euo pipefail

usage() {
  echo "usage: scripts/device_check.sh OUT_FOLDER [--fake] [--share-device] [--python PYTHON]" >&2
  echo "                               [--only STEP]... [--seconds SECONDS]" >&2
  exit 2
}

python=python3
arguments=()
while (($#)); do
  case "$1" in
    --python)
      (($# >= 2)) || usage
      python=$2
      shift
      ;;
    -h | --help) usage ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
((${#arguments[@]})) || usage

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$here/src${PYTHONPATH:+:$PYTHONPATH}"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0

if ! "$python" -c 'import cyclopts, msgspec, numpy, rich, torch, transformers' 2>/dev/null; then
  echo "$python cannot import all that headrace[cpu] needs; install that, or name another by --python" >&2
  exit 2
fi
exec "$python" -m headrace.bench.device "${arguments[@]}"
