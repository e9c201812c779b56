#!/bin/sh
# Everything that only a real GPU can show, in one command, on a bare host: a GPU with its driver, CUDA,
# torch and CuPy, but no network and no Ray. A folder of wheels carried along brings what is missing.
#
#     benchmarks/gpu_host.sh --wheels DIR --out DIR [--minutes 9] [--stages LIST] [--folder DIR]
#                            [--llama-bench PATH] [--python PROGRAM]
#                            [--workers N]
#
# Stages, in this order: kernels (the kernels' suite), sanitizer (compute-sanitizer over a part of it, where
# there is one), hybrid (layers beside the CPU), systems (whole ones in a Ray), then models of random
# weights, whose tokens a second `hotcold bench decode` measures under several budgets: falcon, llama,
# qwen, smallthinker (beside llama.cpp, of a build with CUDA). Tests run in N processes (4), which share
# the GPU. Each step leaves OUT/NAME.log, which ends in its figures as JSON, and OUT/NAME.status. A step
# that was finished is not done again, so where one call may only take so long the same command is given
# again.
set -u
cd "$(dirname "$0")/.." || exit 1
wheels= out= minutes=9 folder=/dev/shm/hotcold llama= python=python3 workers=4 compiling=
stages=kernels,sanitizer,hybrid,systems,falcon,llama,qwen,smallthinker
usage() { sed -n '2,17s/^# \{0,1\}//p' "$0" >&2; exit 2; }
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || usage
    case $1 in
        --wheels) wheels=$2 ;; --out) out=$2 ;; --minutes) minutes=$2 ;; --stages) stages=$2 ;;
        --folder) folder=$2 ;; --llama-bench) llama=$2 ;; --python) python=$2 ;;
        --workers) workers=$2 ;; *) usage ;;
    esac
    shift 2
done
[ -n "$out" ] || usage
mkdir -p "$out" "$folder" && out=$(cd "$out" && pwd) || exit 1
end=$(($(date +%s) + ${minutes%.*} * 60))
left_s() { echo $((end - $(date +%s))); }

site=$out/site
if [ -n "$wheels" ] && [ ! -e "$site/.done" ]; then
    "$python" -m pip install --quiet --no-deps --no-index --target "$site" "$wheels"/*.whl &&
        touch "$site/.done" || { echo "the wheels of $wheels cannot be installed" >&2; exit 1; }
fi
# What is carried along counts before what the host has: only what that lacks should be there.
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
[ -d "$site" ] && PYTHONPATH=$PYTHONPATH:$site
export PYTHONPATH RAY_worker_niceness=0

wanted() { case ,$stages, in *,$1,*) [ ! -e "$out/$1.done" ] ;; *) false ;; esac; }
step() { # NAME COMMAND...: run it within the time that is left; its output goes to OUT/NAME.log
    name=$1; shift
    [ ! -e "$out/$name.done" ] || return 0
    seconds=$(left_s)
    if [ "$seconds" -lt 20 ]; then echo "$name: no time left" >&2; return 1; fi
    echo "$name: at most $seconds s" >&2
    timeout -k 10 "$seconds" "$@" >>"$out/$name.log" 2>&1
    status=$?
    echo "$status" >"$out/$name.status"
    case $status in 124|137) return 1 ;; esac # out of time
    touch "$out/$name.done"
}
run_tests() { # STAGE FILE PROCESSES
    wanted "$1" || return 0
    step "$1" "$python" -m pytest -n "$3" --dist load -q -p no:cacheprovider \
        --junitxml "$out/$1.xml" "$2"
}
speed() { # STAGE MODES BUDGETS COMMAND...: of the model that COMMAND makes, in each mode and budget
    stage=$1 modes=$2 budgets=$3 model=$folder/$1 inputs=0; shift 3
    wanted "$stage" || return 0
    case $modes in *sign*) inputs=1024 ;; esac
    step "$stage-make" "$python" -m "$@" "$model" &&
        step "$stage-profile" "$python" -m hotcold profile "$model" --text "$ids" --inputs $inputs || return 0
    if [ $inputs -gt 0 ]; then
        step "$stage-predictors" "$python" -m hotcold train-predictors "$model" --kind sign || return 0
    fi
    if [ -n "$llama" ] && [ -f "$model" ]; then
        step "$stage-llama.cpp" "$llama" -m "$model" -ngl 99 -fa 1 -p 0 -n 64 -r 3 -o jsonl || return 0
    fi
    for mode in $modes; do
        step "$stage-$mode-cpu" "$python" -m hotcold bench decode "$model" \
            --mode "$mode" --device cpu --json || return 0
        for budget in $budgets; do
            step "$stage-$mode-$budget" "$python" -m hotcold bench decode "$model" \
                --mode "$mode" --device cuda --gpu-memory "$budget" --repeat 5 --json || return 0
        done
    done
    touch "$out/$stage.done"
    rm -rf "$model" "$folder/hotcold/$stage" # the next shape needs the memory
}

"$python" -m hotcold.cuda_kernels.device >"$out/device.json" || { echo "there is no usable GPU" >&2; exit 1; }
ids=$folder/ids.jsonl # of tokens to be profiled, which every model has
"$python" -c 'import random; print({"ids": random.Random(0).choices(range(8192), k=1024)})' |
    tr "'" '"' >"$ids"
# The stage of whole systems needs the CPU's kernels: they compile while other stages run.
if wanted systems; then
    timeout -k 10 "$(left_s)" "$python" -m hotcold compile >"$out/compile.log" 2>&1 &
    compiling=$!
fi
run_tests kernels tests/gpu/test_kernels.py "$workers"
if wanted sanitizer && command -v compute-sanitizer >/dev/null; then
    step sanitizer compute-sanitizer --error-exitcode 9 --target-processes all \
        "$python" -m pytest -n 0 -q -x -p no:cacheprovider tests/gpu/test_kernels.py -k "not 2_to_31"
fi
run_tests hybrid tests/gpu/test_hybrid.py "$workers"
[ -z "$compiling" ] || wait "$compiling"
run_tests systems tests/gpu/test_systems.py 0
speed falcon "sign exact" "4GiB 6GiB 16GiB" \
    hotcold make-model --shape falcon-40b-like --layers 10 --vocab 8192 --density 0.05
speed llama exact "10GiB 16GiB" hotcold make-model --shape llama-13b --density 0.10
speed qwen dense "2GiB 8GiB" \
    benchmarks.random_gguf --shape qwen3-30b-a3b --layers 8 --format q4_0
speed smallthinker exact "2GiB 8GiB" \
    benchmarks.random_gguf --shape smallthinker-21b --layers 8 --format q4_0
for file in "$out"/*.status; do
    echo "$(basename "$file" .status): exit status $(cat "$file")"
done
