//! Every size, offset and constant against Xen's own headers, as Debian's libxen-dev installs them:
//! a C program that includes them says what the compiler makes of them. blkif.h between
//! `#pragma pack(4)` is x86_32's layout, where 64-bit fields are aligned to 4 bytes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use xenblk_ring::layout::{self, OFFSETS_64, OFFSETS_X86_32, Offsets};
use xenblk_ring::{Abi, RwOp, Status};

const PROGRAM: &str = r#"
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <xen/xen.h>
#include <xen/grant_table.h>
#include <xen/event_channel.h>
#define xen_mb() __sync_synchronize()
#define xen_rmb() __sync_synchronize()
#define xen_wmb() __sync_synchronize()
#include <xen/io/ring.h>
#include <xen/io/protocols.h>
#ifdef X86_32
#pragma pack(push, 4)
#endif
#include <xen/io/blkif.h>
#ifdef X86_32
#pragma pack(pop)
#endif
#define PRINT(name, value) printf("%s %lld\n", name, (long long)(value))
#define SIZE(type) PRINT(#type, sizeof(type))
#define AT(type, field) PRINT(#type "." #field, offsetof(type, field))
#define CONSTANT(name) PRINT(#name, name)
int main(void)
{
    SIZE(blkif_request_t); SIZE(blkif_response_t); SIZE(struct blkif_request_segment);
    SIZE(union blkif_sring_entry);
    AT(blkif_request_t, operation); AT(blkif_request_t, nr_segments); AT(blkif_request_t, id);
    AT(blkif_request_t, sector_number); AT(blkif_request_t, seg);
    AT(struct blkif_request_segment, gref); AT(struct blkif_request_segment, first_sect);
    AT(struct blkif_request_segment, last_sect);
    AT(blkif_request_discard_t, operation); AT(blkif_request_discard_t, flag);
    AT(blkif_request_discard_t, id); AT(blkif_request_discard_t, sector_number);
    AT(blkif_request_discard_t, nr_sectors);
    AT(blkif_request_indirect_t, operation); AT(blkif_request_indirect_t, indirect_op);
    AT(blkif_request_indirect_t, nr_segments); AT(blkif_request_indirect_t, id);
    AT(blkif_request_indirect_t, sector_number); AT(blkif_request_indirect_t, handle);
    AT(blkif_request_indirect_t, indirect_grefs);
    AT(blkif_response_t, id); AT(blkif_response_t, operation); AT(blkif_response_t, status);
    AT(blkif_sring_t, req_prod); AT(blkif_sring_t, req_event);
    AT(blkif_sring_t, rsp_prod); AT(blkif_sring_t, rsp_event); AT(blkif_sring_t, ring);
    for (int pages = 1; pages <= 16; pages *= 2) {
        char name[32];
        snprintf(name, sizeof name, "entries of %d pages", pages);
        PRINT(name, __CONST_RING_SIZE(blkif, pages * 4096));
    }
    CONSTANT(BLKIF_OP_READ); CONSTANT(BLKIF_OP_WRITE); CONSTANT(BLKIF_OP_WRITE_BARRIER);
    CONSTANT(BLKIF_OP_FLUSH_DISKCACHE); CONSTANT(BLKIF_OP_DISCARD); CONSTANT(BLKIF_OP_INDIRECT);
    CONSTANT(BLKIF_DISCARD_SECURE); CONSTANT(BLKIF_MAX_SEGMENTS_PER_REQUEST);
    CONSTANT(BLKIF_MAX_INDIRECT_PAGES_PER_REQUEST);
    CONSTANT(BLKIF_RSP_OKAY); CONSTANT(BLKIF_RSP_ERROR); CONSTANT(BLKIF_RSP_EOPNOTSUPP);
    PRINT(XEN_IO_PROTO_ABI_X86_32, 0); PRINT(XEN_IO_PROTO_ABI_X86_64, 1);
    PRINT(XEN_IO_PROTO_ABI_ARM, 2);
    return 0;
}
"#;

/// The directory holding xen/io/blkif.h, or why there is none.
fn include_directory() -> Result<PathBuf, String> {
    let directory = std::env::var_os("XENBLK_XEN_INCLUDE")
        .map_or_else(|| PathBuf::from("/usr/include"), PathBuf::from);
    if directory.join("xen/io/blkif.h").exists() {
        return Ok(directory);
    }
    Err(format!(
        "no xen/io/blkif.h in {}: the layouts are not compared with Xen's.\n\
         Install it with `apt-get install libxen-dev gcc`, or name another include directory in \
         XENBLK_XEN_INCLUDE.",
        directory.display()
    ))
}

/// What C says, by name.
fn measure(include: &Path, x86_32: bool) -> BTreeMap<String, i64> {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("layout.c");
    let program = directory.path().join("layout");
    std::fs::write(&source, PROGRAM).unwrap();
    let mut compiler = Command::new("cc");
    compiler
        .arg("-I")
        .arg(include)
        .arg("-o")
        .arg(&program)
        .arg(&source);
    if x86_32 {
        compiler.arg("-DX86_32");
    }
    let compiled = compiler.output().expect("cc runs");
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    let output = Command::new(&program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.to_owned(), value.parse().unwrap())
    };
    text.lines().map(line).collect()
}

fn sizes_and_offsets(abi: Abi, at: &Offsets) -> Vec<(&'static str, usize)> {
    vec![
        ("blkif_request_t", abi.slot_bytes()),
        ("blkif_response_t", at.response_bytes),
        ("struct blkif_request_segment", layout::SEGMENT_BYTES),
        ("union blkif_sring_entry", abi.slot_bytes()),
        ("blkif_request_t.operation", 0),
        ("blkif_request_t.nr_segments", 1),
        ("blkif_request_t.id", at.id),
        ("blkif_request_t.sector_number", at.sector),
        ("blkif_request_t.seg", at.segments),
        ("struct blkif_request_segment.gref", 0),
        ("struct blkif_request_segment.first_sect", 4),
        ("struct blkif_request_segment.last_sect", 5),
        ("blkif_request_discard_t.operation", 0),
        ("blkif_request_discard_t.flag", 1),
        ("blkif_request_discard_t.id", at.id),
        ("blkif_request_discard_t.sector_number", at.sector),
        ("blkif_request_discard_t.nr_sectors", at.discard_sectors),
        ("blkif_request_indirect_t.operation", 0),
        ("blkif_request_indirect_t.indirect_op", 1),
        ("blkif_request_indirect_t.nr_segments", 2),
        ("blkif_request_indirect_t.id", at.id),
        ("blkif_request_indirect_t.sector_number", at.sector),
        ("blkif_request_indirect_t.handle", at.indirect_handle),
        ("blkif_request_indirect_t.indirect_grefs", at.indirect_grefs),
        ("blkif_response_t.id", at.response_id),
        ("blkif_response_t.operation", at.response_operation),
        ("blkif_response_t.status", at.response_operation + 2),
        ("blkif_sring_t.req_prod", 4 * layout::REQ_PROD),
        ("blkif_sring_t.req_event", 4 * layout::REQ_EVENT),
        ("blkif_sring_t.rsp_prod", 4 * layout::RSP_PROD),
        ("blkif_sring_t.rsp_event", 4 * layout::RSP_EVENT),
        ("blkif_sring_t.ring", layout::RING_HEADER_BYTES),
        ("entries of 1 pages", abi.entries(1) as usize),
        ("entries of 2 pages", abi.entries(2) as usize),
        ("entries of 4 pages", abi.entries(4) as usize),
        ("entries of 8 pages", abi.entries(8) as usize),
        ("entries of 16 pages", abi.entries(16) as usize),
    ]
}

fn constants() -> Vec<(&'static str, i64)> {
    let small = |value: usize| i64::try_from(value).unwrap();
    vec![
        ("BLKIF_OP_READ", RwOp::Read.operation().into()),
        ("BLKIF_OP_WRITE", RwOp::Write.operation().into()),
        ("BLKIF_OP_WRITE_BARRIER", layout::OP_WRITE_BARRIER.into()),
        (
            "BLKIF_OP_FLUSH_DISKCACHE",
            layout::OP_FLUSH_DISKCACHE.into(),
        ),
        ("BLKIF_OP_DISCARD", layout::OP_DISCARD.into()),
        ("BLKIF_OP_INDIRECT", layout::OP_INDIRECT.into()),
        ("BLKIF_DISCARD_SECURE", layout::DISCARD_SECURE.into()),
        (
            "BLKIF_MAX_SEGMENTS_PER_REQUEST",
            small(layout::MAX_DIRECT_SEGMENTS),
        ),
        (
            "BLKIF_MAX_INDIRECT_PAGES_PER_REQUEST",
            small(layout::MAX_INDIRECT_PAGES),
        ),
        ("BLKIF_RSP_OKAY", Status::Okay.to_wire().into()),
        ("BLKIF_RSP_ERROR", Status::Error.to_wire().into()),
        (
            "BLKIF_RSP_EOPNOTSUPP",
            Status::NotSupported.to_wire().into(),
        ),
        (Abi::X86_32.protocol(), 0),
        (Abi::X86_64.protocol(), 1),
        (Abi::Arm.protocol(), 2),
    ]
}

#[test]
fn layouts_are_those_of_xens_headers() {
    let include = match include_directory() {
        Ok(include) => include,
        Err(reason) => {
            let required = std::env::var("XENBLK_PEERS").is_ok_and(|value| value == "required");
            assert!(!required, "{reason}");
            eprintln!("{reason}");
            return;
        }
    };
    for (abi, offsets) in [(Abi::X86_64, &OFFSETS_64), (Abi::X86_32, &OFFSETS_X86_32)] {
        let theirs = measure(&include, abi == Abi::X86_32);
        let ours: BTreeMap<String, i64> = sizes_and_offsets(abi, offsets)
            .into_iter()
            .map(|(name, value)| (name, i64::try_from(value).unwrap()))
            .chain(constants())
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        assert_eq!(ours, theirs, "{abi:?}");
    }
    assert_eq!(
        Abi::Arm.offsets(),
        OFFSETS_64,
        "arm and x86_64 align 64-bit fields to 8 bytes"
    );
}
