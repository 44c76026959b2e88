#!/usr/bin/env bash
# Replays the recorded runs with steps against the allocator on host memory and prints a Markdown table.
# Use: benches/replayed.sh > benches/results/DATE-replayed.md
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet -p terrace-allocator --example replay
replay=${CARGO_TARGET_DIR:-target}/release/examples/replay

field() { sed -E "s/.*\"$1\":([0-9]+).*/\1/" <<<"$2"; }
share() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.4f", b ? a / b : 1 }'; }
echo "Command: benches/replayed.sh, $(date -u +%F), commit $(git rev-parse --short HEAD)."
echo
echo '| recorded run | steps | requests of keys seen before | in plan | in plan, keys seen twice before | arena, bytes | lower bound, bytes | overflow peak, bytes | grew | overlaps |'
echo '|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|'
for name in dense8-mixed dense8-multiturn moe8-mixed moe8-multiturn; do
    json=$("$replay" --json "profiles/recorded/$name.profile")
    printf '| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s |\n' "$name" "$(field steps "$json")" "$(field replay_allocs "$json")" \
        "$(share "$(field hits "$json")" "$(field replay_allocs "$json")")" \
        "$(share "$(field hits_warm "$json")" "$(field replay_allocs_warm "$json")")" \
        "$(field arena_bytes "$json")" "$(field lower_bound "$json")" "$(field overflow_peak "$json")" "$(field grew "$json")" \
        "$(field overlaps "$json")"
done
