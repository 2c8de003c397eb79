//! Tables for people: right-aligned columns, one row per ring.

use std::io::{self, Write};
use std::time::Duration;

/// Writes `rows` under `heads`, every column as wide as its widest cell.
pub(crate) fn write(out: &mut impl Write, heads: &[&str], rows: &[Vec<String>]) -> io::Result<()> {
    let width = |column: usize| {
        let cells = rows
            .iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count());
        cells
            .chain([heads[column].chars().count()])
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let heads: Vec<String> = heads.iter().map(|&head| head.to_owned()).collect();
    for row in [&heads].into_iter().chain(rows) {
        let cells = row.iter().zip(&widths);
        let cells: Vec<String> = cells
            .map(|(cell, &width)| format!("{cell:>width$}"))
            .collect();
        writeln!(out, "{}", cells.join("  "))?;
    }
    Ok(())
}

/// In µs, or in ms from 10 ms on.
pub(crate) fn time(duration: Duration) -> String {
    match duration.as_micros() {
        micros if micros < 10_000 => format!("{micros} us"),
        micros => format!("{} ms", micros / 1000),
    }
}

/// `a / b` with one digit, or a dash.
pub(crate) fn ratio(a: u64, b: u64) -> String {
    if b == 0 {
        "-".into()
    } else {
        format!("{:.1}", a as f64 / b as f64)
    }
}
