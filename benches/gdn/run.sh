#!/usr/bin/env bash
# Prefill and decode beside the peers that this machine has, results into FOLDER as Markdown and JSON. Both always run; the status
# is that of the worse. Names after the folder are peers that must run: FLA, FlashQLA, FlashInfer.
# Peers are looked for on PYTHONPATH; pack_peers.sh brings them to a machine without a registry.
# Use: benches/gdn/run.sh FOLDER [NAME...]
# PREFILL_ARGS and DECODE_ARGS add arguments, TERRACE_KERNELS names libterrace_kernels.so.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:?use: benches/gdn/run.sh FOLDER [NAME...]}
shift
mkdir -p "$folder"
export PYTHONUNBUFFERED=1 FLA_FLASH_QLA=0

require=()
require_decode=()
for name in "$@"; do
    require+=(--require "$name")
    [ "$name" = FLA ] && require_decode=(--require FLA)
done

status=0
# Words of PREFILL_ARGS and DECODE_ARGS are split on purpose.
# shellcheck disable=SC2086
python3 "$here/decode.py" --json "$folder/decode.json" --markdown "$folder/decode.md" \
    "${require_decode[@]}" ${DECODE_ARGS:-} >"$folder/decode.log" 2>&1 || status=1
# shellcheck disable=SC2086
python3 "$here/prefill.py" --json "$folder/prefill.json" --markdown "$folder/prefill.md" \
    "${require[@]}" ${PREFILL_ARGS:-} >"$folder/prefill.log" 2>&1 || status=1

for what in decode prefill; do
    if [ -f "$folder/$what.md" ]; then
        grep '^FAILED' "$folder/$what.log"
        cat "$folder/$what.md"
    else
        echo "$what: no result; the end of its log:"
        tail -n 30 "$folder/$what.log"
    fi
done
exit "$status"
