#!/usr/bin/env bash
# Plans every recorded forward with `plan solve` and prints a Markdown table: what the plan needs beside what PyTorch's caching
# allocator reserved, and the wall time of the whole command (reading included), median of five runs.
# Use: benches/recorded.sh > benches/results/DATE-recorded.md
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet --bin plan
plan=${CARGO_TARGET_DIR:-target}/release/plan

field() { sed -E "s/.*\"$1\":\"?([^,\"}]+).*/\1/" <<<"$2"; }
cpu=$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)
echo "Command: benches/recorded.sh, $(date -u +%F), commit $(git rev-parse --short HEAD), $(nproc) cores (${cpu:-unknown})."
echo
echo '| recorded forward | buffers | plan, bytes | lower bound, bytes | proven optimal | reserved by the caching allocator | reserved / plan | command, ms |'
echo '|---|---:|---:|---:|---|---:|---:|---:|'
for profile in profiles/recorded/*.profile; do
    times=()
    for _ in 1 2 3 4 5; do
        begin=$(date +%s%N)
        json=$("$plan" solve --format json "$profile")
        times+=($((($(date +%s%N) - begin) / 10000)))
    done
    median=$(printf '%s\n' "${times[@]}" | sort -n | sed -n 3p)
    reserved=$(sed -n 's/^note reserved[^0-9]*\([0-9]*\) bytes.*/\1/p' "$profile" | head -n 1)
    makespan=$(field makespan "$json")
    printf '| %s | %s | %s | %s | %s | %s | %s | %s.%02d |\n' "$(basename "$profile" .profile)" "$(field buffers "$json")" "$makespan" \
        "$(field lower_bound "$json")" "$(field optimal "$json")" "$reserved" \
        "$(awk -v r="$reserved" -v m="$makespan" 'BEGIN { printf "%.2f", r / m }')" $((median / 100)) $((median % 100))
done
