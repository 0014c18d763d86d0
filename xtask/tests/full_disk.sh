#!/usr/bin/env bash
# Repacks onto a really full file system, a read-only one, and one without direct transfers. Needs root, for mounting.
#
#     cargo build --release -p xtask && sudo xtask/tests/full_disk.sh [PATH OF xtask]
set -euo pipefail
cd "$(dirname "$0")/../.."
xtask=${1:-target/release/xtask}
source=fixtures/tiny-k31
work=$(mktemp -d)
mounted=()
finish() {
    for place in "${mounted[@]}"; do umount "$place"; done
    rm -rf "$work"
}
trap finish EXIT

check() {
    local wanted=$1
    shift
    if "$@" >"$work/out" 2>&1; then
        echo "FAIL: this should not have worked: $*"
        exit 1
    fi
    if ! grep -q -- "$wanted" "$work/out"; then
        echo "FAIL: expected \"$wanted\", found:"
        cat "$work/out"
        exit 1
    fi
    grep -- "$wanted" "$work/out" | head -1 | cut -c 1-200
}

"$xtask" repack "$source" "$work/whole" >"$work/out"

echo "== a file system that is too small from the start"
mkdir "$work/small"
mount -t tmpfs -o size=4m tmpfs "$work/small"
mounted+=("$work/small")
check "bytes free" "$xtask" repack "$source" "$work/small/tree"
[ ! -e "$work/small/tree" ]

echo "== a file system that fills up on the way"
"$xtask" synth "$work/larger" --geometry tiny --experts 1500 >"$work/out"
"$xtask" repack "$work/larger" "$work/larger-whole" >"$work/out"
mount -o remount,size=512m "$work/small"
# After the check of free space, another program takes all that is left.
(
    until [ -s "$work/small/tree/.repack-journal" ]; do :; done
    exec head -c 1G /dev/zero >"$work/small/other" 2>/dev/null
) &
filler=$!
check "no room" "$xtask" repack "$work/larger" "$work/small/tree" --jobs 1 --io cached
wait "$filler" || true
[ ! -e "$work/small/tree/model.safetensors.index.json" ]
rm "$work/small/other"
"$xtask" repack "$work/larger" "$work/small/tree" >"$work/out"
grep "complete already" "$work/out" || true
diff -r "$work/larger-whole" "$work/small/tree"
echo "resumed to the same tree"

echo "== a read-only file system"
mount -o remount,ro "$work/small"
check "read-only file system" "$xtask" repack "$source" "$work/small/other"
# A finished tree is verified there all the same.
"$xtask" repack "$work/larger" "$work/small/tree" --verify full >"$work/out"
grep "verified: source and result" "$work/out" | cut -c 1-100
diff -r "$work/larger-whole" "$work/small/tree"

echo "== a file system without direct transfers, if this kernel's tmpfs has none"
mount -o remount,rw "$work/small"
rm -r "$work/small/tree"
"$xtask" repack "$source" "$work/small/tree" --io auto --verify full >"$work/out"
grep -E "in flight" "$work/out"
diff -r "$work/whole" "$work/small/tree"
echo "all as expected"
