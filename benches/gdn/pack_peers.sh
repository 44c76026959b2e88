#!/usr/bin/env bash
# Packs the peers for a CUDA machine without a registry (Python 3.12, x86-64, with torch, triton and einops): FOLDER/fla.tar.xz (0.5 MB),
# FOLDER/flash-qla.tar.xz (38 MB), FOLDER/flashinfer.tar.xz (4 MB). There, unpack them into one folder and put it on PYTHONPATH:
#   for t in FOLDER/*.tar.xz; do tar -xJf "$t" -C SITE || python3 -m tarfile -e "$t" SITE; done; export PYTHONPATH=SITE
# FlashQLA and FlashInfer compile with nvcc at first use.
# Left out: z3's command, and of FlashInfer CUTLASS's Python and examples; headers stay, nvcc needs them.
# Use: benches/gdn/pack_peers.sh FOLDER
set -euo pipefail
out=${1:?use: benches/gdn/pack_peers.sh FOLDER}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# bring SITE NAME==VERSION...: the wheels' content, without what they depend on.
bring() {
    local site=$work/$1 platform
    shift
    local platforms=()
    for platform in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${platform}_x86_64"); done
    python3 -m pip install -q --no-deps --no-compile --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
        --platform manylinux2014_x86_64 --upgrade --target "$site" "$@"
}

bring fla fla-core==0.6.0
bring flash-qla flash-qla==0.1.3 tilelang==0.1.15 apache-tvm-ffi==0.1.12 torch-c-dlpack-ext==0.1.5 z3-solver==4.15.4.0 cloudpickle==3.1.3
bring flashinfer flashinfer-python==0.6.4 apache-tvm-ffi==0.1.12

rm -rf "$work"/*/bin
ln -sf libz3.so.4.15 "$work/flash-qla/z3/lib/libz3.so"
rm -rf "$work"/flashinfer/flashinfer/data/cutlass/{examples,python,test,media,docs}

for site in fla flash-qla flashinfer; do
    tar --sort=name --owner=0 --group=0 -C "$work/$site" -cf - . | xz -T0 -9 >"$out/$site.tar.xz"
done
du -h "$out"/*.tar.xz
