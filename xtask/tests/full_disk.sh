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
mount -o remount,size=64m "$work/small"
"$xtask" repack "$source" "$work/small/tree" --layers 0..3 >"$work/out"
complete=$(wc -l <"$work/small/tree/.repack-journal")
# Taken after the check of free space, while shards are written: another program's file.
(
    while ! compgen -G "$work/small/tree/model-0000[4-9]*.partial" >/dev/null; do :; done
    head -c 1G /dev/zero >"$work/small/other" 2>/dev/null
) &
filler=$!
if "$xtask" repack "$source" "$work/small/tree" --jobs 1 --io cached >"$work/out" 2>&1; then
    echo "(the run was faster than the file that should fill the disk)"
else
    grep -E "no room|No space" "$work/out" | head -1 | cut -c 1-200
    [ "$(wc -l <"$work/small/tree/.repack-journal")" -ge "$complete" ]
fi
kill "$filler" 2>/dev/null || true
wait "$filler" 2>/dev/null || true
rm -f "$work/small/other"
"$xtask" repack "$source" "$work/small/tree" >"$work/out"
diff -r "$work/whole" "$work/small/tree"
echo "resumed to the same tree"

echo "== a read-only file system"
mount -o remount,ro "$work/small"
check "Read-only file system" "$xtask" repack "$source" "$work/small/other"

echo "== a file system without direct transfers, if this kernel's tmpfs has none"
mount -o remount,rw "$work/small"
rm -rf "$work/small/tree"
"$xtask" repack "$source" "$work/small/tree" --io auto --verify full >"$work/out"
grep -E "in flight" "$work/out"
diff -r "$work/whole" "$work/small/tree"
echo "all as expected"
