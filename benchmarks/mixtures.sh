#!/bin/sh
# Mixtures of experts beside llama.cpp: a random file of each shape is written, both programs are measured on
# it, one loaded at a time, and the file is removed.
#
#     benchmarks/mixtures.sh --folder DIR --out DIR --llama-bench PATH [--only NAMES] [--rounds 7]
#                            [--python PROGRAM] [--keep yes]
#
# NAMES are some of these, with commas: qwen-q4_0 qwen-q4_k_m oss smallthinker mixtral olmoe turbosparse. The
# largest takes 12 GB of disk, and as much memory. turbosparse, which llama.cpp does not know, is hotcold alone,
# beside a plain read of memory. Reports are OUT/NAME.json and OUT/NAME.md.
set -u
cd "$(dirname "$0")/.." || exit 1
folder= out= llama= rounds=7 python=python3 keep=
only=qwen-q4_0,qwen-q4_k_m,oss,smallthinker,mixtral,olmoe,turbosparse
usage() { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || usage
    case $1 in
        --folder) folder=$2 ;; --out) out=$2 ;; --llama-bench) llama=$2 ;; --only) only=$2 ;;
        --rounds) rounds=$2 ;; --python) python=$2 ;; --keep) keep=$2 ;; *) usage ;;
    esac
    shift 2
done
[ -n "$folder" ] && [ -n "$out" ] && [ -n "$llama" ] || usage
mkdir -p "$folder" "$out" || exit 1
failed=0

# NAME MODE, then options of benchmarks.random_gguf
compare() {
    name=$1 mode=$2
    shift 2
    case ",$only," in *,"$name",*) ;; *) return ;; esac
    file=$folder/$name.gguf
    [ -e "$file" ] || "$python" -m benchmarks.random_gguf "$file" "$@" || { failed=1; return; }
    "$python" -m benchmarks.vs_llama_cpp "$file" --llama-bench "$llama" --mode "$mode" --batch 1 --batch 8 \
        --prompt-tokens 512 --tokens 48 --rounds "$rounds" --load-rounds 0 --one-at-a-time --out "$out/$name" ||
        failed=1
    [ -n "$keep" ] || rm -f "$file"
}

compare qwen-q4_0 dense --shape qwen3-30b-a3b --format q4_0 --layers 24
compare qwen-q4_k_m dense --shape qwen3-30b-a3b --format q4_k_m --layers 24
compare oss dense --shape gpt-oss-20b --format mxfp4 --layers 16
compare smallthinker exact --shape smallthinker-21b --format q4_0 --layers 32
compare mixtral dense --shape mixtral-8x7b --format q4_k_m --layers 6
compare olmoe dense --shape olmoe-1b-7b --format q4_0 --layers 16
case ",$only," in *,turbosparse,*)
    model=$folder/turbosparse
    [ -e "$model/config.json" ] ||
        "$python" -m hotcold.jobs.cli make-model "$model" --shape turbosparse-mixtral-47b --layers 3 || failed=1
    for batch in 1 8; do
        "$python" -m hotcold.jobs.cli bench decode "$model" --dtype q4 --batch "$batch" --repeat "$rounds" \
            --json > "$out/turbosparse-$batch.json" || failed=1
    done
    [ -n "$keep" ] || rm -rf "$model"
esac
exit "$failed"
