//! `xenblk-sim serve`: the guest's disks over NBD until somebody says stop.

use std::io::{Write, stdout};
use std::process::ExitCode;
use std::sync::Arc;

use xenblk_tests::disk::GuestDisk;
use xenblk_tests::frontend::Disk;
use xenblk_tests::nbd::{self, Export, ServeError};
use xenblk_tests::world::DRAIN;

use crate::cli::Serve;
use crate::session::{Interrupt, Result, Session, check_image};

pub(crate) fn run(args: &Serve) -> Result<ExitCode> {
    for image in &args.images {
        check_image(image, args.readonly)?;
    }
    if let Some(path) = args
        .nbd
        .as_ref()
        .filter(|path| path.symlink_metadata().is_ok())
    {
        return Err(ServeError::Exists(path.clone()).into());
    }
    let config = args.guest.config(args.queues)?;
    let interrupt = Interrupt::install()?;
    let mut session = Session::start(config, args.images.len())?;
    let disks = args
        .images
        .iter()
        .map(|image| session.attach(image, args.readonly))
        .collect::<Result<Vec<Arc<Disk>>>>()?;
    let path = args
        .nbd
        .clone()
        .unwrap_or_else(|| session.world.directory().join("nbd"));
    let names: Vec<String> = match args.images.len() {
        1 => vec![String::new()],
        count => ('a'..='z')
            .take(count)
            .map(|letter| format!("xvd{letter}"))
            .collect(),
    };
    let exports = names.iter().zip(&disks).map(|(name, disk)| Export {
        name: name.clone(),
        disk: Arc::clone(disk) as Arc<dyn GuestDisk>,
    });
    let server = nbd::serve(&path, exports.collect())?;
    for ((name, disk), image) in names.iter().zip(&disks).zip(&args.images) {
        let info = disk.info();
        let mode = if info.readonly { ", read-only" } else { "" };
        let (uri, size, queues) = (server.uri(name), info.size, info.queues);
        writeln!(
            stdout(),
            "{uri}  {image}: {size} bytes, {queues} rings{mode}"
        )?;
    }
    interrupt.wait(&session.world);
    let cut = server.shutdown(DRAIN);
    session.end()?;
    if cut > 0 {
        return Err(format!("{cut} NBD connections were cut: not done within {DRAIN:?}").into());
    }
    Ok(ExitCode::SUCCESS)
}
