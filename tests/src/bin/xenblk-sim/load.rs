//! `xenblk-sim load`: one run for each number of rings, each with a new guest and backend.

mod report;

use std::process::ExitCode;
use std::sync::Arc;

use xenblk_tests::frontend::Config;
use xenblk_tests::load::{Mode, Spec, run as run_load};

use self::report::Run;
use crate::cli::Load;
use crate::session::{Interrupt, Result, Session, check_image};

/// What plain `null:` means.
const NULL_DISK: &str = "null:1G";

pub(crate) fn run(args: &Load) -> Result<ExitCode> {
    let readonly = matches!(args.rw.into(), Mode::Read | Mode::RandRead);
    let image = if args.image == "null:" {
        NULL_DISK
    } else {
        &args.image
    };
    let queues = args.queues.iter().map(|&queues| Some(queues));
    let usual = args.queues.is_empty().then_some(None);
    let configs = queues.chain(usual).map(|queues| args.guest.config(queues));
    let configs: Vec<Config> = configs.collect::<std::result::Result<_, _>>()?;
    check_image(image, readonly)?;
    let interrupt = Interrupt::install()?;
    let mut errors = 0;
    for config in configs {
        let run = one(args, image, config, &interrupt)?;
        if args.json {
            run.print_json()?;
        } else {
            run.print_table()?;
        }
        errors += run.total.errors;
        if run.leaks > 0 {
            let pages = run.leaks;
            return Err(format!("the backend let go of the disk but not of {pages} pages").into());
        }
        if interrupt.came() {
            return Err("interrupted".into());
        }
    }
    if errors > 0 {
        return Err(format!("{errors} requests failed").into());
    }
    Ok(ExitCode::SUCCESS)
}

fn one(args: &Load, image: &str, config: Config, interrupt: &Interrupt) -> Result<Run> {
    let mode = args.rw.into();
    let readonly = matches!(mode, Mode::Read | Mode::RandRead);
    let mut session = Session::start(config, 1)?;
    let disk = session.attach(image, readonly)?;
    let spec = Spec {
        mode,
        block: args.bs,
        depth: args.iodepth as usize,
        runtime: args.runtime,
        size: args.size,
        stop: Arc::clone(&interrupt.stop),
    };
    let results = run_load(&disk, &spec)?;
    let mut run = Run::new(image, config, &spec, &disk, &results, &session.rings()?);
    run.interrupted = interrupt.came();
    session.detach()?;
    run.leaks = session.mapped();
    session.end()?;
    Ok(run)
}
