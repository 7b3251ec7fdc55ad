#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Whole models beside the reference package on one idle GPU, in two parts that may be two days:
#
#   bash benchmarks/models/device.sh tune    REFERENCE[:PATHS] CACHE   about 4 minutes, 16 cores, nothing beside it
#   bash benchmarks/models/device.sh measure REFERENCE[:PATHS] CACHE   about 3 minutes
#
# `tune` lets the reference compile and time all its configurations, on models of two layers (the kernels are those of
# any depth), and leaves the results in CACHE, a Triton cache folder: bring it back, and take it along to `measure`. On
# Hopper with Triton below 3.7.1 the reference's Gated DeltaNet trains with tilelang only; give its folder in PATHS.
set -eu
part=$1 reference=$2 cache=$3
here=$(dirname "$0")
export TRITON_CACHE_DIR=$cache TILELANG_CACHE_DIR=$cache/tilelang
mkdir -p "$TILELANG_CACHE_DIR"
models=${MODELS:-KDA KDA-5 GDN GLA}
case $part in
tune)
    # One after the other: what is timed beside other work is timed wrongly.
    for model in $models; do
        python3 "$here/throughput.py" --only-reference --reference "$reference" --models "$model" --modes train decode \
            --layers 2 --batches 16 --steps 1 --warmup 1 --decode-steps 4 --tuning-ms 20 --compile-threads 12 || true
    done
    ;;
measure)
    # shellcheck disable=SC2086
    python3 "$here/throughput.py" --reference "$reference" --models $models --modes train decode first \
        --batches 24 16 8 --steps 4 --tuning-ms 20 --compile-threads 12 --decode-steps 32 --profile 20 \
        --json "$cache/throughput.json"
    ;;
*)
    echo "tune or measure?" >&2
    exit 2
    ;;
esac
