#!/usr/bin/env bash
# What more steps and samples gain at test time: trains models from several seeds, on 4x4 and 6x6 Sudoku, and
# evaluates each, whole and from half of its way, on a grid of steps and samples. evaluate.py prints, and
# writes for each group, mean and deviation over the seeds (summary.json). What is done is not done again.
#
#     benchmarks/reasoning.sh checkpoints/reasoning [model ...]     SEEDS=3 STEPS=600 GRID_STEPS=4,8,16 SAMPLES=1,4,8
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?a folder for data and runs}; shift
models=("$@")
[ $# -gt 0 ] || models=(hrm_4x4 trm_4x4 serrm_4x4 serrm_6x6)
python=.venv/bin/python seeds=${SEEDS:-3} steps=${STEPS:-600}
export OMP_NUM_THREADS=1 WANDB_MODE=disabled

small="arch.hidden_size=64 arch.num_heads=2 arch.L_layers=2 arch.halt_max_steps=4"
for model in "${models[@]}"; do
    case $model in
    hrm*) arch="arch=hrm $small arch.H_layers=2 arch.q_target=deferred" ;;
    trm*) arch="arch=trm $small arch.H_cycles=2 arch.L_cycles=3" ;;
    *) arch="arch=serrm arch.hidden_size=32 arch.num_heads=2 arch.head_dim=16 arch.num_heads_t=2 arch.head_dim_t=16
        arch.L_layers=2 arch.H_cycles=1 arch.L_cycles=3 arch.halt_max_steps=4 global_batch_size=64" ;;
    esac
    size=${model#*_}
    box=2x2; [ "$size" = 4x4 ] || box=2x3
    data=$folder/$size
    [ -d "$data" ] || $python -m dataset.build sudoku --output-dir "$data" --box $box --generate "${PUZZLES:-1000}" --num-aug 8
    for ((seed = 0; seed < seeds; seed++)); do
        # shellcheck disable=SC2086
        $python pretrain.py global_batch_size=128 optimizer=muon lr=5e-3 lr_warmup_steps=50 weight_decay=1.0 \
            puzzle_emb_lr=2e-3 eval_interval=null keep_checkpoints=null compile=false sanity_check=false device=cpu \
            $arch data_path="$data" checkpoint_path="$folder/${model}_$seed" seed=$seed epochs=100000 \
            max_steps="$steps" checkpoint_interval=$(((steps + 1) / 2))
    done
    for step in $(((steps + 1) / 2)) "$steps"; do
        checkpoints=$(for ((seed = 0; seed < seeds; seed++)); do printf '%s,' "$folder/${model}_$seed/step_$step"; done)
        output=$folder/evaluation/${model}_step_$step
        [ -d "$output" ] || $python evaluate.py checkpoint="[${checkpoints%,}]" output_dir="$output" device=cpu compile=false \
            halt_max_steps="[${GRID_STEPS:-4,8,16}]" samples="[${SAMPLES:-1,4,8}]" noise=0.3 evaluators='[sudoku]' \
            select='[q_head,q_head_any_step,first_to_halt,vote,residual,rules]'
    done
done
