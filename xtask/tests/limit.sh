#!/usr/bin/env bash
# Runs a model whose experts do not fit under limits of memory. The budget is taken from the limit (auto), so that what
# is planned is 95 % of it: nothing may be killed, the result is that of a run without limit, and the peak is told
# beside the plan.
#
#     cargo build --release -p k3-cli -p xtask && xtask/tests/limit.sh [--scope | --group] [FOLDER OF k3 AND xtask]
#
# The limit is the process's (`ulimit -d`). With `--scope` it is that of a control group from systemd, with `--group` of
# one that is made by hand, of version 1 or 2; both as root. A control group counts page cache too, so that with
# `--group` mapped files are run as well, and budgets that are named, under a limit of what they plan and 5 %.
set -euo pipefail
cd "$(dirname "$0")/../.."
# Where memory ends, telling of it must not need more.
export RUST_BACKTRACE=0
mode=ulimit
case "${1:-}" in --scope | --group) mode=${1#--} && shift ;; esac
programs=${1:-target/release}
work=$(mktemp -d)
group=
finish() {
    # A group goes when its last process has.
    if [ -n "$group" ]; then rmdir "$group"; fi
    rm -rf "$work"
}
trap finish EXIT

if [ "$mode" = group ]; then
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
        parent=/sys/fs/cgroup version=2
        grep -qw memory "$parent/cgroup.subtree_control" || echo +memory >"$parent/cgroup.subtree_control"
    else
        parent=/sys/fs/cgroup/memory version=1
    fi
    group=$parent/k3-limit-$$
    mkdir "$group"
fi

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

# A new group of so many bytes, which has no page cache to its name yet.
make_group() {
    rmdir "$group" && mkdir "$group"
    # Page cache counts where it was first read or written: what others have read would be free.
    for file in "$work"/model/*.safetensors; do dd if="$file" iflag=nocache count=0 status=none; done
    if [ "$version" = 1 ]; then
        echo "$1" >"$group/memory.limit_in_bytes"
        # There is no such file where swap is not counted.
        if [ -e "$group/memory.memsw.limit_in_bytes" ]; then echo "$1" >"$group/memory.memsw.limit_in_bytes"; fi
    else
        echo "$1" >"$group/memory.max"
        if [ -e "$group/memory.swap.max" ]; then echo 0 >"$group/memory.swap.max"; fi
    fi
}

tell_group() {
    if [ "$version" = 1 ]; then
        echo "the group: at most $(cat "$group/memory.max_usage_in_bytes") bytes with page cache, of" \
            "$(cat "$group/memory.limit_in_bytes"); $(grep 'oom_kill ' "$group/memory.oom_control")"
    else
        peak=unknown
        if [ -e "$group/memory.peak" ]; then peak=$(cat "$group/memory.peak"); fi
        echo "the group: at most $peak bytes with page cache, of $(cat "$group/memory.max");" \
            "$(tr '\n' ' ' <"$group/memory.events")"
    fi
}

# run_within BYTES: with $options
run_within() {
    case $mode in
    ulimit) run sh -c "ulimit -d $(($1 / 1024)) && exec \"\$@\"" sh ;;
    scope) run systemd-run --quiet --scope -p "MemoryMax=$1" -p MemorySwapMax=0 ;;
    group)
        make_group "$1"
        run sh -c "echo \$\$ >$group/cgroup.procs && exec \"\$@\"" sh
        tell_group
        ;;
    esac
    [ "$(grep ^logits_hash "$work/told")" = "$expected" ]
    cmp "$work/tokens" "$work/expected"
    # What is mapped may be page cache of another group, or of none.
    if [[ " ${options[*]} " == *" mapped "* ]]; then return; fi
    peak=$(awk '/^peak memory/ { print int($3 * ($4 ~ /^GB/ ? 1e9 : 1e6)) }' "$work/told")
    if [ "$peak" -gt "$1" ]; then
        echo "FAIL: a peak of $peak bytes under a limit of $1"
        exit 1
    fi
}

echo "== without a limit"
options=()
run env
expected=$(grep ^logits_hash "$work/told")
cp "$work/tokens" "$work/expected"

stores=(direct buffered)
if [ "$mode" = group ]; then stores+=(mapped); fi
for megabytes in 500 600 700; do
    for store in "${stores[@]}"; do
        echo "== $megabytes MiB, $store"
        options=(--store "$store")
        run_within $((megabytes * 1048576))
    done
done

if [ "$mode" = group ]; then
    for budget in 30MB 150MB; do
        for store in direct buffered; do
            options=(--store "$store" --expert-budget "$budget")
            echo "== --expert-budget $budget, $store, without a limit"
            run env
            planned=$(sed -nE 's/^peak memory .*planned ([0-9.]+) (MB|GB),.*/\1 \2/p' "$work/told" |
                awk '{ print int($1 * ($2 == "GB" ? 1e9 : 1e6)) }')
            echo "== --expert-budget $budget, $store, within what is planned and 5 %: $((planned * 105 / 100)) bytes"
            run_within $((planned * 105 / 100))
        done
    done
fi

echo "== a limit below what the weights need"
if sh -c "ulimit -d 262144 && exec \"\$@\"" sh "$programs/k3" generate "$work/model" --ids 3 --store direct >"$work/out" 2>"$work/told"; then
    echo "FAIL: this should not have worked"
    exit 1
fi
grep "missing" "$work/told" | head -1
echo "all as expected"
