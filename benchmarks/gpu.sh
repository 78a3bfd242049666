#!/usr/bin/env bash
# What only a GPU can show, the most important first: for a machine with a CUDA device, after `make setup`.
# What fails does not stop the rest; the status is 1 then.
#
#     benchmarks/gpu.sh checkpoints/gpu 2>&1 | tee gpu.txt          DEVICE=cpu QUICK=--quick: to see that it works
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?a folder for data and a run}
python=${PYTHON:-.venv/bin/python} device=${DEVICE:-cuda} quick=${QUICK:-} status=0

try() { echo "\$ $*"; "$@" || { echo "failed: $*"; status=1; }; }

try $python -m pytest -q tests/test_cuda.py
try $python -m tests.golden --device "$device"
# shellcheck disable=SC2086
{
    sizes=${QUICK:---published-sizes}
    names="published published_compiled exact exact_compiled deferred deferred_compiled"
    try $python -m benchmarks.step --device "$device" $sizes --contenders $names
    try $python -m benchmarks.step --device "$device" $sizes --arch hrm --length 900 --batch 32 --contenders $names
    try $python -m benchmarks.optimizers --device "$device" $quick
    try $python -m benchmarks.checkpoint --device "$device" $quick
    [ "$($python -c "import torch; print(torch.cuda.device_count())")" -lt 2 ] ||
        try $python -m benchmarks.layout --device "$device" $quick --layout pipeline_parallel_degree=2
}
[ -d "$folder/data" ] || try $python -m dataset.build sudoku --output-dir "$folder/data" --generate "${PUZZLES:-1000}" \
    --num-aug "${VARIANTS:-1000}"
# shellcheck disable=SC2086
try $python pretrain.py experiment=trm_sudoku_mlp data_path="$folder/data" checkpoint_path="$folder/run" device="$device" \
    epochs="${EPOCHS:-2000}" eval_interval="${EPOCHS:-2000}" wandb_mode=disabled report=true ${WORDS:-}
exit $status
