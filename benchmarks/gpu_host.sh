#!/bin/sh
# Everything that only a real GPU can show, on a bare host: a GPU with its driver, CUDA, torch and CuPy, but no
# network and no Ray. A folder of wheels carried along brings what is missing.
#
#     benchmarks/gpu_host.sh --wheels DIR --out DIR [--stages LIST] [--folder DIR] [--llama-bench PATH]
#                            [--python PROGRAM]
#
# Stages, in this order: machine (what it is, how fast it reads); kernels, hybrid (layers beside the CPU) and
# systems (whole ones in a Ray), which are tests; falcon, opt, relu_llama, llama, qwen and smallthinker: tokens a
# second under several budgets, llama.cpp first; sanitizer (compute-sanitizer over the kernels' tests, where there
# is one). Each leaves OUT/NAME.log, and OUT/NAME.xml or OUT/NAME.md.
set -u
cd "$(dirname "$0")/.." || exit 1
wheels= out= folder=/dev/shm/hotcold llama= python=python3 failed=
stages=machine,kernels,hybrid,systems,falcon,opt,relu_llama,llama,qwen,smallthinker,sanitizer
usage() { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || usage
    case $1 in
        --wheels) wheels=$2 ;; --out) out=$2 ;; --stages) stages=$2 ;; --folder) folder=$2 ;;
        --llama-bench) llama=$2 ;; --python) python=$2 ;; *) usage ;;
    esac
    shift 2
done
[ -n "$out" ] || usage
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
if [ -n "$wheels" ] && [ ! -e "$out/site" ]; then
    "$python" -m pip install --quiet --no-deps --no-index --target "$out/site" "$wheels"/*.whl || exit 1
fi
# What is carried along counts before what the host has: only what that lacks should be there.
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
[ -d "$out/site" ] && PYTHONPATH=$PYTHONPATH:$out/site
export PYTHONPATH RAY_worker_niceness=0

stage() { # NAME COMMAND...: its output goes to OUT/NAME.log, too
    name=$1; shift
    case ,$stages, in *,$name,*) ;; *) return 0 ;; esac
    "$@" >"$out/$name.log" 2>&1 || failed="$failed $name"
    tail -n 3 "$out/$name.log"
}
tests() { # STAGE FILE PROCESSES
    stage "$1" "$python" -m pytest -n "$3" --dist load -q -p no:cacheprovider --junitxml "$out/$1.xml" "$2"
}
figures() { # STAGE OPTIONS...
    name=$1; shift
    [ -n "$llama" ] && set -- "$@" --llama-bench "$llama"
    stage "$name" "$python" -m benchmarks.gpu_hybrid "$@" --folder "$folder/$name" --out "$out/$name.md"
    rm -rf "${folder:?}/$name" # the next shape needs the memory
}

"$python" -m hotcold.cuda_kernels.device || { echo "there is no usable GPU" >&2; exit 1; }
stage machine "$python" -m hotcold doctor --fresh --machine-out "$out/machine.json"
tests kernels tests/gpu/test_kernels.py 4
tests hybrid tests/gpu/test_hybrid.py 4
tests systems tests/gpu/test_systems.py 0
figures falcon --shape falcon-40b-like --layers 10 --vocab 8192 --density 0.05 \
    --mode sign --mode lowrank --mode exact --budget 4GiB --budget 6GiB --budget 16GiB
figures opt --shape opt-30b --layers 8 --vocab 8192 --density 0.03 --mode sign --mode lowrank --budget 4GiB
figures relu_llama --shape llama-70b --layers 6 --vocab 8192 --density 0.18 \
    --mode sign --mode lowrank --budget 2GiB --budget 4GiB
figures llama --shape llama-13b --density 0.10 --mode exact --mode dense --budget 10GiB --budget 30GiB
figures qwen --shape qwen3-30b-a3b --layers 8 --format q4_0 --mode dense --budget 2GiB --budget 8GiB
figures smallthinker --shape smallthinker-21b --layers 8 --format q4_0 --mode exact --budget 2GiB --budget 8GiB
if command -v compute-sanitizer >/dev/null; then
    stage sanitizer compute-sanitizer --error-exitcode 9 --target-processes all \
        "$python" -m pytest -n 0 -q -x -p no:cacheprovider tests/gpu/test_kernels.py -k "not 2_to_31"
fi
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
