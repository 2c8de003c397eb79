use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use super::*;

/// A host as a tree of files. The listener keeps XenStore's socket answering.
struct Host {
    folder: tempfile::TempDir,
    store: Option<UnixListener>,
}

impl Host {
    /// Nothing missing: a PV dom0 with everything in place.
    fn good() -> Self {
        let host = Self {
            folder: tempfile::tempdir().unwrap(),
            store: None,
        };
        host.write("sys/hypervisor/type", "xen\n");
        host.write("sys/hypervisor/guest_type", "PV\n");
        host.write("proc/sys/kernel/osrelease", "6.1.0-28-amd64\n");
        host.write("proc/sys/vm/max_map_count", "65530\n");
        host.write(
            "proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max open files            65536                65536                files     \n\
             Max locked memory         unlimited            unlimited            bytes     \n",
        );
        host.write("dev/xen/gntdev", "");
        host.write("dev/xen/evtchn", "");
        host.write(
            "etc/modprobe.d/xenblkd.conf",
            "# why\ninstall xen-blkback /bin/false\n",
        );
        host.write("run/xenstored/pid", "1");
        host.write("usr/sbin/xenhypfs", "#!/bin/sh\necho 1024\n");
        let tool = host.folder.path().join("usr/sbin/xenhypfs");
        fs::set_permissions(tool, fs::Permissions::from_mode(0o755)).unwrap();
        let socket = host.folder.path().join("run/xenstored/socket");
        let store = Some(UnixListener::bind(socket).unwrap());
        Self { store, ..host }
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.folder.path().join(path)).unwrap();
    }

    fn facts(&self) -> Facts {
        let root = Root::new(self.folder.path());
        let config = Config::default();
        let mut facts = Facts::gather(&root, &config);
        // The machine the tests run on decides this one.
        facts.io_uring = Ok(());
        facts
    }

    #[track_caller]
    fn finding(&self, subject: &str) -> Finding {
        let findings = judge(&self.facts());
        findings
            .into_iter()
            .find(|finding| finding.subject == subject)
            .expect("a finding of that subject")
    }
}

#[test]
fn a_good_host_lacks_nothing() {
    let findings = judge(&Host::good().facts());
    let subjects: Vec<&str> = findings.iter().map(|finding| finding.subject).collect();
    let all = [
        "xen",
        "kernel",
        "gntdev",
        "evtchn",
        "xenstore",
        "backend/vbd",
        "io_uring",
        "state",
        "maptrack",
        "max_map_count",
        "memlock",
        "nofile",
    ];
    assert_eq!(subjects, all);
    assert!(
        findings
            .iter()
            .all(|finding| finding.verdict == Verdict::Ok),
        "{findings:#?}"
    );
    assert!(!is_missing(&findings));
}

#[test]
fn a_machine_without_xen_is_told_so_everywhere() {
    let empty = Host {
        folder: tempfile::tempdir().unwrap(),
        store: None,
    };
    let findings = judge(&empty.facts());
    assert!(is_missing(&findings));
    for finding in findings
        .iter()
        .filter(|finding| finding.verdict != Verdict::Ok)
    {
        assert!(finding.remedy.is_some(), "{finding:?}");
        assert!(!finding.found.contains('\n'), "{finding:?}");
    }
    assert_eq!(empty.finding("xen").verdict, Verdict::Missing);
    assert_eq!(
        empty.finding("gntdev").remedy.as_deref(),
        Some("modprobe xen-gntdev")
    );
}

// LONG: a table.
#[test]
fn each_lack_is_found() {
    type Lack = (&'static str, fn(&Host), Verdict, &'static str);
    let lacks: [Lack; 14] = [
        (
            "xen",
            |h| h.write("sys/hypervisor/type", "kvm"),
            Verdict::Missing,
            "says kvm",
        ),
        (
            "kernel",
            |h| h.write("proc/sys/kernel/osrelease", "5.19.17\n"),
            Verdict::Missing,
            "5.19.17",
        ),
        (
            "kernel",
            |h| h.write("proc/sys/kernel/osrelease", "6.0.0"),
            Verdict::Missing,
            "6.0.0",
        ),
        (
            "gntdev",
            |h| h.remove("dev/xen/gntdev"),
            Verdict::Missing,
            "does not exist",
        ),
        (
            "evtchn",
            |h| h.remove("dev/xen/evtchn"),
            Verdict::Missing,
            "does not exist",
        ),
        (
            "xenstore",
            |h| h.remove("run/xenstored/socket"),
            Verdict::Missing,
            "/run/xenstored/socket does not exist",
        ),
        (
            "backend/vbd",
            |h| h.remove("etc/modprobe.d/xenblkd.conf"),
            Verdict::Warning,
            "udev loads",
        ),
        (
            "backend/vbd",
            |h| {
                h.write(
                    "etc/modprobe.d/xenblkd.conf",
                    "blacklist xen-blkback\n#install xen-blkback x",
                );
            },
            Verdict::Warning,
            "udev loads",
        ),
        (
            "backend/vbd",
            |h| {
                h.write("sys/bus/xen-backend/drivers/vbd/uevent", "");
                h.write("sys/module/xen_blkback/initstate", "live\n");
            },
            Verdict::Missing,
            "is loaded",
        ),
        (
            "backend/vbd",
            |h| {
                h.write("sys/bus/xen-backend/drivers/vbd/uevent", "");
                h.write("sys/module/xen_blkback/parameters/max_queues", "4\n");
            },
            Verdict::Missing,
            "built into",
        ),
        (
            "maptrack",
            |h| h.write("usr/sbin/xenhypfs", "#!/bin/sh\necho 16\n"),
            Verdict::Warning,
            "2048 mapped",
        ),
        (
            "max_map_count",
            |h| h.write("proc/sys/vm/max_map_count", "1000"),
            Verdict::Warning,
            "1000, less",
        ),
        (
            "memlock",
            |h| {
                h.write(
                    "proc/self/limits",
                    "Max locked memory  8388608 8388608 bytes",
                );
            },
            Verdict::Warning,
            "8388608",
        ),
        (
            "nofile",
            |h| h.write("proc/self/limits", "Max open files  1024 1024 files"),
            Verdict::Warning,
            "1024, less",
        ),
    ];
    for (subject, spoil, verdict, found) in lacks {
        let host = Host::good();
        spoil(&host);
        let finding = host.finding(subject);
        assert_eq!(finding.verdict, verdict, "{finding:?}");
        assert!(
            finding.found.contains(found),
            "{finding:?}, expected {found:?}"
        );
        assert!(finding.remedy.is_some(), "{finding:?}");
    }
}

#[test]
fn kernels_from_6_1_are_taken() {
    for release in [
        "6.1",
        "6.1.0-28-amd64",
        "6.12.95+deb12-amd64",
        "7.0-rc1",
        "10.2.3",
    ] {
        assert_eq!(kernel(Some(release)).verdict, Verdict::Ok, "{release}");
    }
    for release in ["", "x", "6", "5.10.0", "6.0.19"] {
        assert_eq!(kernel(Some(release)).verdict, Verdict::Missing, "{release}");
    }
}

#[test]
fn a_host_without_xens_parameters_is_told_where_else_to_look() {
    let host = Host::good();
    host.remove("usr/sbin/xenhypfs");
    let finding = host.finding("maptrack");
    assert_eq!(finding.verdict, Verdict::Ok);
    assert!(
        finding.found.contains("`xl info` shows in xen_commandline"),
        "{finding:?}"
    );
}

/// The kernel has no backend for them.
#[test]
fn xapis_disks_are_not_blkbacks() {
    let host = Host::good();
    host.write("sys/bus/xen-backend/drivers/vbd/bind", "");
    assert_eq!(host.finding("backend/vbd").verdict, Verdict::Missing);
    let mut facts = host.facts();
    facts.kind = Kind::Vbd3;
    let findings = judge(&facts);
    assert!(!is_missing(&findings), "{findings:#?}");
    let owner = findings.iter().find(|one| one.subject == "backend/vbd3");
    assert!(owner.unwrap().found.contains("tapback"), "{owner:?}");
}

#[test]
fn a_store_that_nobody_listens_on_is_not_usable() {
    let mut host = Host::good();
    host.store = None;
    let finding = host.finding("xenstore");
    assert_eq!(finding.verdict, Verdict::Missing);
    assert!(finding.found.contains("refused"), "{finding:?}");
}

#[test]
fn a_driver_domain_has_the_device_and_no_socket() {
    let host = Host::good();
    host.remove("run/xenstored/socket");
    host.write("dev/xen/xenbus", "");
    assert_eq!(host.finding("xenstore"), ok("xenstore", "/dev/xen/xenbus"));
}

#[test]
fn the_state_folder_or_its_parent_must_be_there() {
    let host = Host::good();
    let root = Root::new(host.folder.path());
    let reach = |path: &str| {
        let config = host.folder.path().join("config");
        fs::write(&config, format!("state-directory = {path:?}\n")).unwrap();
        let config = Config::load(Some(&config)).unwrap();
        Facts::gather(&root, &config).state_directory.1
    };
    assert_eq!(reach("/run/xenblkd"), Reach::Usable);
    assert_eq!(reach("/nowhere/xenblkd"), Reach::Missing);
}

#[test]
fn the_table_shows_verdicts_and_remedies() {
    let findings = [
        ok("xen", "a PV domain"),
        warning("memlock", "8192, less than 16384", "raise it"),
        missing(
            "gntdev",
            "/dev/xen/gntdev does not exist",
            "modprobe xen-gntdev",
        ),
    ];
    let expected = "xen      ok       a PV domain\n\
                    memlock  warning  8192, less than 16384\n                  -> raise it\n\
                    gntdev   MISSING  /dev/xen/gntdev does not exist\n                  -> modprobe xen-gntdev\n\
                    \nxenblkd cannot run here until what is MISSING is mended.\n";
    assert_eq!(table(&findings), expected);
    assert!(table(&findings[..2]).ends_with("\nxenblkd can run here; see the warnings.\n"));
    assert!(table(&findings[..1]).ends_with("\nxenblkd can run here.\n"));
    let json = serde_json::to_value(&findings[1..]).unwrap();
    assert_eq!(json[0]["verdict"], "warning");
    assert_eq!(json[1]["remedy"], "modprobe xen-gntdev");
}
