#!/usr/bin/env bash
# Everything that wants a GPU, in one run of under ten minutes: kernels against their twins, their time against verification, and the
# plugin's set-up on Model Runner V2 where vLLM is installed. Needs a Python with torch and triton; nothing is downloaded.
#
#   benchmarks/gpu_check.sh [OUT.json]             on a machine with an NVIDIA GPU
#   benchmarks/gpu_check.sh --interpret [OUT.json] a dry run on a CPU: every step, at sizes Triton's interpreter can do
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TRITON_DEFAULT_FP_FUSION="${TRITON_DEFAULT_FP_FUSION:-1}"
if [ "${1:-}" = --interpret ]; then
  shift
  export TRITON_INTERPRET=1 AG_KERNELS=interpret
  set -- --interpret "$@"
fi
exec timeout -k 10 590 "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
