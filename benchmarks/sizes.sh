#!/usr/bin/env bash
# Trains published experiments for some steps at full width, on generated puzzles of the published form: the
# commands run, the memory of a process, and that the loss falls. 80 minutes on two cores; what is done is not
# done again.
#
#     benchmarks/sizes.sh checkpoints/sizes [experiment ...]        STEPS=300 WORDS="arch.hidden_size=64 ..."
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?a folder for data and runs}; shift
names=("$@")
[ $# -gt 0 ] || names=(sudoku_extreme maze_hard arc1 arc2 trm_sudoku_mlp trm_maze trm_arc1 trm_arc2)
python=.venv/bin/python steps=${STEPS:-300}

for name in "${names[@]}"; do
    case $name in
    *sudoku*) kind=sudoku puzzles=8 build="--generate ${PUZZLES:-1000} --num-test 20 --num-aug ${VARIANTS:-1000}" ;;
    *maze*) kind=maze puzzles=2 build="--generate ${PUZZLES:-200} --num-test 20" ;;
    *) kind=arc puzzles=2 build="--generate ${PUZZLES:-400} --num-aug ${VARIANTS:-100}" ;;
    esac
    # shellcheck disable=SC2086
    [ -d "$folder/data/$kind" ] || $python -m dataset.build $kind --output-dir "$folder/data/$kind" $build
    log=$folder/$name/metrics.jsonl
    touch -a "$folder/$name.txt"
    # max_steps would evaluate at its end, a day for ARC: so it is stopped from here.
    # shellcheck disable=SC2086
    OMP_NUM_THREADS=1 WANDB_MODE=disabled .venv/bin/torchrun --nproc-per-node 2 pretrain.py experiment="$name" \
        data_path="$folder/data/$kind" checkpoint_path="$folder/$name" global_batch_size=$puzzles log_interval=1 \
        sanity_check=false ${WORDS:-} >> "$folder/$name.txt" 2>&1 &
    run=$!
    trap 'kill $run 2> /dev/null || true' EXIT
    while kill -0 $run 2> /dev/null && [ "$(cat "$log" 2> /dev/null | wc -l)" -lt "$steps" ]; do sleep 0.5; done
    kill $run 2> /dev/null || true
    wait $run || true
    $python - "$name" "$log" "$steps" << 'END'
import json, pathlib, statistics, sys
name, log, steps = sys.argv[1:]
rows = [json.loads(line) for line in open(log)][: int(steps)]
assert len(rows) == int(steps), f"{log} ends after {len(rows)} steps"
losses = [row["train/lm_loss"] for row in rows if "train/lm_loss" in row]
part = max(1, len(losses) // 10)
seconds = statistics.median(row["train/step_seconds"] for row in rows)
memory = max(row["train/peak_memory_bytes"] for row in rows) / 2**20
first, last = statistics.fmean(losses[:part]), statistics.fmean(losses[-part:])
start = json.loads(pathlib.Path(log).with_name("starts.jsonl").read_text().splitlines()[-1])
print(f"{start['hardware']}, torch {start['torch']}")
print(f"{name}: {seconds:.2f} s a step, {memory:.0f} MiB a process, loss {first:.2f} -> {last:.2f}")
END
done
