# Functions for scenarios, which run in dom0. Every wait has a bound.
# shellcheck shell=bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
xen_bin=/usr/lib/xen-4.17/bin
backend=/local/domain/0/backend/vbd

log() { echo "RIG: $*"; }
up() { cut -d' ' -f1 /proc/uptime; }
fail() { log "FAILED: $*"; exit 1; }

# wait_for SECONDS COMMAND...: polls until the command succeeds.
wait_for() {
    local end=$((SECONDS + $1))
    shift
    while ! "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.3
    done
}

toolstack_up() {
    local m
    if [ "${RIG_SYSTEMD:-0}" = 1 ]; then # Debian's xen.service has done the rest
        wait_for 60 test -S /run/xenstored/socket && wait_for 60 xenstore-read /local/domain/0/domid && wait_for 60 pgrep xenconsoled
        return
    fi
    for m in xenfs xen-privcmd xen-evtchn xen-gntdev xen-gntalloc; do modprobe $m || log "no module $m"; done
    mountpoint -q /proc/xen || mount -t xenfs xenfs /proc/xen || return 1
    mkdir -p /run/xen /run/xenstored /run/lock /var/log/xen/console /var/lib/xen /var/lib/xenstored
    $xen_bin/"${RIG_XENSTORED:-xenstored}" --pid-file /run/xenstored.pid
    wait_for 20 test -S /run/xenstored/socket || return 1
    wait_for 20 xenstore-exists /tool || xenstore-write /tool ""
    $xen_bin/xen-init-dom0 || return 1
    $xen_bin/xenconsoled --log=guest --pid-file=/run/xenconsoled.pid
}

# The kernel's own backend would take every vbd: keep it out before the first one appears.
keep_blkback_out() {
    printf 'install xen-blkback /bin/false\n' >/etc/modprobe.d/xenblkd.conf
    ! grep -q '^xen_blkback' /proc/modules || rmmod xen_blkback
}

# daemon_start [OPTION...]: the daemon from /rig/in with these options, its log in /rig/out; sets daemon_pid.
daemon_start() {
    keep_blkback_out
    install -m755 /rig/in/xenblkd /usr/sbin/xenblkd
    mkdir -p /etc/xen/scripts
    install -m755 /rig/in/block-xenblkd /etc/xen/scripts/block-xenblkd
    RUST_LOG=${RIG_LOG:-info} xenblkd run "$@" >>/rig/out/daemon.log 2>&1 &
    daemon_pid=$!
    wait_for 30 xenblkd status || { tail -20 /rig/out/daemon.log; fail "the daemon does not answer"; }
    log "daemon $daemon_pid ready at $(up)"
}
# daemon_stop: SIGTERM, and it must end by itself with 0.
daemon_stop() {
    kill -TERM "$daemon_pid" 2>/dev/null || fail "the daemon is gone already"
    wait_for 20 sh -c "! kill -0 $daemon_pid" || { kill -9 "$daemon_pid"; fail "the daemon ignores SIGTERM"; }
    wait "$daemon_pid" || fail "the daemon ended with $?"
}

# disk TARGET [VDEV]: an xl disk line served by the daemon through its hotplug script.
disk() { echo "'format=raw,vdev=${2:-xvda},access=rw,backendtype=phy,script=block-xenblkd,target=$1'"; }

# domu_initrd JOB [VAR=VALUE...]: the guest's initramfs with this job; its path on stdout.
domu_initrd() {
    local job=$1 dir var
    shift
    dir=$(mktemp -d /tmp/domu.XXXXXX)
    mkdir -p "$dir/job"
    cp /rig/domu/init "$dir/init"
    cp "/rig/domu/$job" "$dir/job/run"
    cp /rig/domu/fio-json.awk "$dir/job/"
    chmod 755 "$dir/init" "$dir/job/run"
    for var in "$@"; do printf 'export %s="%s"\n' "${var%%=*}" "${var#*=}"; done >"$dir/job/env"
    { cat /usr/lib/rig/domu-base.cpio; (cd "$dir" && find . | busybox cpio -o -H newc 2>/dev/null); } >"$dir.cpio"
    rm -rf "$dir"
    echo "$dir.cpio"
}

# domu_start NAME JOB "DISK SPECS" [VAR=VALUE...]: the specs as in xl.cfg, comma-separated.
domu_start() {
    local name=$1 job=$2 disks=$3 initrd code=0
    shift 3
    initrd=$(domu_initrd "$job" "$@")
    cat >"/tmp/$name.cfg" <<CFG
name = "$name"
type = "${DOMU_TYPE:-pv}"
kernel = "/boot/vmlinuz"
ramdisk = "$initrd"
extra = "console=hvc0 quiet panic=1 mitigations=off"
memory = ${DOMU_MEM:-512}
vcpus = ${DOMU_VCPUS:-2}
disk = [ $disks ]
tsc_mode = "native"
on_poweroff = "destroy"
on_reboot = "${DOMU_ON_REBOOT:-destroy}"
on_crash = "destroy"
CFG
    rm -f "/var/log/xen/console/guest-$name.log"
    timeout 120 xl create "/tmp/$name.cfg" >"/rig/out/$name.xl" 2>&1 || code=$?
    [ $code = 0 ] || { sed 's/^/xl: /' "/rig/out/$name.xl"; log "xl create $name failed ($code)"; return 1; }
    log "guest $name started at $(up)"
}

console_of() { echo "/var/log/xen/console/guest-$1.log"; }

# domu_wait NAME SECONDS: until its job is done; prints its RIG-JSON lines, returns the job's exit code.
domu_wait() {
    local name=$1 seconds=$2 console code=
    console=$(console_of "$1")
    if ! wait_for "$seconds" sh -c "! xl domid $name || grep -aq RIG-DOMU-EXIT $console"; then
        log "guest $name is not done after $seconds s"
        domu_dump "$name" timeout
        tail -30 "$console"
        code=124
    else
        wait_for 20 sh -c "! xl domid $name" || log "guest $name is slow to die"
    fi
    ! xl domid "$name" >/dev/null 2>&1 || xl destroy "$name"
    cp "$console" "/rig/out/$name.console.log"
    [ -n "$code" ] || code=$(tr -d '\r' <"$console" | sed -n 's/.*RIG-DOMU-EXIT \([0-9]*\).*/\1/p' | tail -1)
    tr -d '\r' <"$console" | sed -n "s/.*RIG-JSON {/{\"backend\":\"${LABEL:-xenblkd}\",/p" | tee -a /rig/out/results.jsonl
    [ -n "$code" ] || { log "guest $name died without a result"; tail -30 "$console"; code=97; }
    return "$code"
}

# domu_dump NAME TAG: the XenStore nodes of its block devices, both ends.
domu_dump() {
    local id
    id=$(xl domid "$1" 2>/dev/null) || return 1
    {
        xenstore-ls -f -p "/local/domain/$id/device/vbd"
        xenstore-ls -f -p "$backend/$id"
        xenstore-ls -f -p "/local/domain/0/error"
    } >"/rig/out/xenstore-$1-$2.txt" 2>/dev/null
}
frontend_state() { xenstore-read "/local/domain/$(xl domid "$1")/device/vbd/${2:-51712}/state"; }
connected() { [ "$(frontend_state "$@" 2>/dev/null)" = 4 ]; }

# Grants of guests that dom0 has mapped, as the hypervisor counts them, without those that guests always have mapped there:
# reference 0 is the console's page (xenconsoled's), 1 XenStore's (xenstored's).
mapped_grants() {
    xl dmesg -c >/dev/null
    xl debug-keys g
    sleep 0.5
    # [ref] localdom mfn pin localdom gmfn flags: a pin other than 0 is a mapping.
    xl dmesg | awk '/\[0x[0-9a-f]+\]/ && !/\[0x00[01]\]/ { pin = $0; sub(/.*\] */, "", pin); split(pin, f, " ")
            if (f[1] == 0 && f[3] != "0x00000000") n++ }
        END { print n + 0 }'
}
# Event channels of dom0 connected to another domain: two a guest for its console and XenStore, the rest for its disks.
interdomain_ports() { $xen_bin/lsevtchn 0 2>/dev/null | grep 'Interdomain' | grep -vc 'Remote Domain 0,'; }

# null_blk_up NAME SIZE_MB QUEUES MEMORY_BACKED(0/1): makes /dev/NAME.
null_blk_up() {
    modprobe null_blk nr_devices=0 || return 1
    mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
    local dir=/sys/kernel/config/nullb/$1
    mkdir "$dir" || return 1
    echo "$2" >"$dir/size"
    echo "$3" >"$dir/submit_queues"
    echo 0 >"$dir/irqmode"
    echo 2 >"$dir/queue_mode"
    echo 128 >"$dir/hw_queue_depth"
    echo 512 >"$dir/blocksize"
    echo "$4" >"$dir/memory_backed"
    echo 1 >"$dir/power"
    wait_for 5 test -b "/dev/$1"
}
