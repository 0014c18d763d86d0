#!/usr/bin/env bash
# Runs a model whose experts do not fit under limits of memory. The budget is taken from the limit (auto), so that what
# is planned is 95 % of it: nothing may be killed, the result is that of a run without limit, and the peak is told
# beside the plan.
#
#     cargo build --release -p k3-cli -p xtask && xtask/tests/limit.sh [FOLDER OF k3 AND xtask]
#
# With `--scope` the limit is a control group's (`systemd-run --scope`, as root), else that of the process (`ulimit -d`).
set -euo pipefail
cd "$(dirname "$0")/../.."
# Where memory ends, telling of it must not need more.
export RUST_BACKTRACE=0
scope=
if [ "${1:-}" = --scope ]; then scope=1 && shift; fi
programs=${1:-target/release}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# 192 experts of 1.5 MB, of which a token uses 32, beside 0.4 GB of other weights.
"$programs/xtask" synth "$work/model" --geometry bench --layers 3 --experts 96 >"$work/out"
tail -1 "$work/out"
ids=$(seq -s, 3 60)
run() {
    "$@" "$programs/k3" generate "$work/model" --ids "$ids" --max-tokens 8 --temperature 0 --ignore-eos --threads 2 \
        --usage none --stats "${options[@]}" >"$work/tokens" 2>"$work/told" || {
        echo "FAIL: $*"
        cat "$work/told"
        exit 1
    }
    grep -E "^(experts:|peak memory|memory|logits_hash)|  (experts|reserve) " "$work/told"
}

echo "== without a limit"
options=()
run env
expected=$(grep ^logits_hash "$work/told")
cp "$work/tokens" "$work/expected"

for megabytes in 500 600 700; do
    for store in direct buffered; do
        echo "== $megabytes MiB, $store"
        options=(--store "$store")
        if [ -n "$scope" ]; then
            run systemd-run --quiet --scope -p "MemoryMax=${megabytes}M" -p MemorySwapMax=0
        else
            run sh -c "ulimit -d $((megabytes * 1024)) && exec \"\$@\"" sh
        fi
        [ "$(grep ^logits_hash "$work/told")" = "$expected" ]
        cmp "$work/tokens" "$work/expected"
        peak=$(awk '/^peak memory/ { print int($3 * ($4 ~ /^GB/ ? 1000 : 1)) }' "$work/told")
        if [ $((peak * 1000000)) -gt $((megabytes * 1048576)) ]; then
            echo "FAIL: a peak of $peak MB under a limit of $megabytes MiB"
            exit 1
        fi
    done
done

echo "== a limit below what the weights need"
if sh -c "ulimit -d 262144 && exec \"\$@\"" sh "$programs/k3" generate "$work/model" --ids 3 --store direct >"$work/out" 2>"$work/told"; then
    echo "FAIL: this should not have worked"
    exit 1
fi
grep "missing" "$work/told" | head -1
echo "all as expected"
