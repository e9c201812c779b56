#!/bin/sh
# Everything that only a real GPU can show, in one command, on a bare host: a GPU with its driver, CUDA,
# torch and CuPy, but no network and no Ray. A folder of wheels carried along brings what is missing.
#
#     benchmarks/gpu_host.sh --wheels DIR --out DIR [--minutes 9] [--stages LIST] [--folder DIR]
#                            [--llama-bench PATH] [--python PROGRAM]
#                            [--workers N]
#
# Stages, in this order: machine (what it is, how fast it reads), kernels (the kernels' suite), hybrid (layers
# beside the CPU), layers (shared with CPU services, as one request and one by one), falcon, opt, relu_llama
# and llama (tokens a second under several budgets, llama.cpp first), speed (kernels beside a copy), experts (two
# shapes, which the report names), systems (whole ones in a Ray), sanitizer (compute-sanitizer over a part of the
# kernels' suite, where there is one). Tests run in N processes (4), which share the GPU. A stage that was finished
# is not done again, so where one call may only take so long the same command is given again. OUT/report.json says
# it all, and is written after each stage.
set -u
cd "$(dirname "$0")/.." || exit 1
wheels= out= minutes=9 folder=/dev/shm/hotcold llama= python=python3 workers=4 compiling=
parts=qwen,smallthinker # of the stage experts; each is done only once
stages=machine,kernels,hybrid,layers,falcon,opt,relu_llama,llama,speed,experts,systems,sanitizer
usage() { sed -n '2,16s/^# \{0,1\}//p' "$0" >&2; exit 2; }
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
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
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

wanted() { case ,$stages,$parts, in *,$1,*) [ ! -e "$out/$1.done" ] ;; *) false ;; esac; }
stage() { # NAME COMMAND...: run it within the time that is left; its output goes to OUT/NAME.log
    name=$1; shift
    wanted "$name" || return 0
    seconds=$(left_s)
    if [ "$seconds" -lt 20 ]; then echo "$name: no time left" >&2; return 0; fi
    echo "$name: at most $seconds s" >&2
    timeout -k 10 "$seconds" "$@" >>"$out/$name.log" 2>&1
    status=$?
    echo "$status" >"$out/$name.status"
    case $status in 124|137) ;; *) touch "$out/$name.done" ;; esac # out of time
    report
}
report() { "$python" -m benchmarks.gpu_report "$out" >"$out/report.new" && mv "$out/report.new" "$out/report.json"; }
hybrid() { # NAME OPTIONS...
    name=$1; shift
    minutes_left=$(($(left_s) / 60))
    set -- "$@" --folder "$folder" --minutes "$minutes_left" --out "$out/$name.json"
    [ -n "$llama" ] && set -- "$@" --llama-bench "$llama"
    stage "$name" "$python" -m benchmarks.gpu_hybrid "$@"
    # What is left over goes on with the next call.
    grep -q '"left": \[\]' "$out/$name.json" 2>/dev/null || rm -f "$out/$name.done"
    [ -e "$out/$name.done" ] && rm -rf "$folder/$2-"* # the next shape needs the memory
}

"$python" -m hotcold.cuda_kernels.device >"$out/device.json" || { echo "there is no usable GPU" >&2; exit 1; }
run_tests() { # STAGE FILE PROCESSES
    stage "$1" "$python" -m pytest -n "$3" --dist load -q -p no:cacheprovider \
        --junitxml "$out/$1.xml" "$2"
}
# The CPU's kernels compile while tests of the GPU's run, not beside what is measured.
starts_systems() { for one in layers falcon opt relu_llama llama experts systems; do wanted $one && return; done; false; }
if [ ! -e "$out/compile.done" ] && starts_systems; then
    timeout -k 10 "$(left_s)" "$python" -m hotcold compile >"$out/compile.log" 2>&1 &
    compiling=$!
fi
wanted machine && { lscpu; nvidia-smi; } >"$out/machine.log" 2>&1
stage machine "$python" -m hotcold doctor --fresh --machine-out "$out/machine.json"
run_tests kernels tests/gpu/test_kernels.py "$workers"
run_tests hybrid tests/gpu/test_hybrid.py "$workers"
[ -z "$compiling" ] || { wait "$compiling" && touch "$out/compile.done"; }
stage layers "$python" -m benchmarks.gpu_layers "$folder/layers" --hot 0.3 --hot 0.7 --hot 1 \
    --threads $(($(nproc) - 2)) --out "$out/layers.json"
rm -rf "$folder/layers"
hybrid falcon --shape falcon-40b-like --layers 10 --vocab 8192 --density 0.05 \
    --mode sign --mode lowrank --mode exact --budget 4GiB --budget 6GiB --budget 16GiB
hybrid opt --shape opt-30b --layers 8 --vocab 8192 --density 0.03 --mode sign --mode lowrank --budget 4GiB
hybrid relu_llama --shape llama-70b --layers 6 --vocab 8192 --density 0.18 \
    --mode sign --mode lowrank --budget 2GiB --budget 4GiB
hybrid llama --shape llama-13b --density 0.10 --mode exact --mode dense --budget 10GiB --budget 30GiB
stage speed "$python" -m benchmarks.gpu_kernels --out "$out/speed.json"
if wanted experts; then
    hybrid qwen --shape qwen3-30b-a3b --layers 8 --format q4_0 --mode dense --budget 2GiB --budget 8GiB
    hybrid smallthinker --shape smallthinker-21b --layers 8 --format q4_0 --mode exact \
        --budget 2GiB --budget 8GiB
    [ -e "$out/qwen.done" ] && [ -e "$out/smallthinker.done" ] && touch "$out/experts.done"
fi
run_tests systems tests/gpu/test_systems.py 0
if command -v compute-sanitizer >/dev/null; then
    stage sanitizer compute-sanitizer --error-exitcode 9 --target-processes all \
        "$python" -m pytest -n 0 -q -x -p no:cacheprovider tests/gpu/test_kernels.py -k "not 2_to_31"
fi
report
echo "$out/report.json"
