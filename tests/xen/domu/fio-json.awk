# fio's terse output, version 3: one JSON line for each direction that moved data; latencies in microseconds.
function percentile(from, p,   i, part) {
    for (i = from; i < from + 20; i++) { split($i, part, "="); if (part[1] + 0 == p) return part[2] + 0 }
    return 0
}
function line(direction, b) {
    if ($b + 0 == 0) return
    printf "RIG-JSON {\"test\":\"%s\",\"dir\":\"%s\",\"iops\":%d,\"bw_kib\":%d,\"p50_us\":%d,\"p99_us\":%d,\"mean_us\":%d,\"errors\":%d}\n",
        test, direction, $(b + 2), $(b + 1), percentile(b + 12, 50), percentile(b + 12, 99), $(b + 34), $5
}
BEGIN { FS = ";" }
$1 == 3 { line("read", 6); line("write", 47) }
