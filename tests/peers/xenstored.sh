#!/bin/bash
# Debian's real xenstored, C or OCaml, on a machine without Xen. Needs no root: packages are unpacked,
# not installed.
#   xenstored.sh fetch DIR              download and unpack into DIR/root, build the shim
#   xenstored.sh start DIR c|ocaml      run one in the background; prints its socket, pid in DIR/<kind>/pid
#   xenstored.sh stop DIR c|ocaml       end it
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
command=${1:?fetch, start or stop} dir=$(realpath -m "${2:?directory}") kind=${3:-}
root=$dir/root

fetch() {
    if ! compgen -G "$root/usr/lib/xen-*/bin/xenstored" >/dev/null; then
        mkdir -p "$dir/debs" "$root"
        local utils
        utils=$(apt-cache search --names-only '^xen-utils-[0-9.]+$' | cut -d' ' -f1 | sort -V | tail -1)
        [ -n "$utils" ] || { echo "xenstored.sh: no package xen-utils-* (apt-get update?)" >&2; exit 1; }
        # The xen libraries only: everything else they need is on every Debian.
        mapfile -t libraries < <(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts \
            --no-breaks --no-replaces --no-enhances "$utils" xenstore-utils | grep -E '^libxen' | sort -u)
        (cd "$dir/debs" && apt-get -qq -o APT::Sandbox::User=root download "$utils" xenstore-utils libxen-dev "${libraries[@]}")
        for deb in "$dir"/debs/*.deb; do dpkg -x "$deb" "$root"; done
    fi
    gcc -shared -fPIC -O2 -Wall -Wextra -I "$root/usr/include" -o "$dir/xenshim.so" "$here/xenshim.c" -ldl
}

start() {
    local run=$dir/$kind bin
    bin=$(echo "$root"/usr/lib/xen-*/bin)
    rm -rf "$run"
    mkdir -p "$run"
    truncate -s 4096 "$run/xsd_kva"
    printf 1 >"$run/xsd_port"
    # The C daemon takes XENSTORED_PATH for its own socket.
    unset XENSTORED_PATH
    export XENSHIM_DIR=$run XENSTORED_RUNDIR=$run XENSTORED_ROOTDIR=$run
    LD_LIBRARY_PATH=$(dirname "$(find "$root/usr/lib" -name 'libxenstore.so.*' | head -1)")
    export LD_LIBRARY_PATH
    case $kind in
    c) set -- "$bin/xenstored" -N -F "$run/daemon-pid" ;;
    ocaml)
        printf '%s\n' "pid-file = $run/daemon-pid" 'persistent = false' 'perms-activate = true' \
            'perms-watch-activate = true' 'quota-activate = true' 'quota-maxentity = 1000' \
            'quota-maxsize = 2048' 'quota-maxwatch = 100' 'quota-transaction = 10' 'quota-path-max = 1024' \
            "xenstored-log-file = $run/log" "access-log-file = $run/access" \
            "xenstored-kva = $run/xsd_kva" "xenstored-port = $run/xsd_port" >"$run/conf"
        set -- "$bin/oxenstored" --no-fork --config-file "$run/conf"
        ;;
    *) echo "xenstored.sh: \"$kind\" is neither c nor ocaml" >&2; exit 2 ;;
    esac
    LD_PRELOAD=$dir/xenshim.so "$@" >"$run/output" 2>&1 &
    echo $! >"$run/pid"
    for _ in $(seq 200); do
        [ -S "$run/socket" ] && { echo "$run/socket"; return; }
        kill -0 "$(cat "$run/pid")" 2>/dev/null || break
        sleep 0.05
    done
    echo "xenstored.sh: $kind daemon did not come up:" >&2
    cat "$run/output" >&2
    exit 1
}

case $command in
fetch) fetch ;;
start) start ;;
stop) kill "$(cat "$dir/$kind/pid")" 2>/dev/null || true ;;
*) echo "xenstored.sh: \"$command\" is none of fetch, start, stop" >&2; exit 2 ;;
esac
