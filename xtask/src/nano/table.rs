//! Plain tables.

use std::io::{Result, Write};

/// How a column is written.
pub(super) struct Column {
    title: &'static str,
    is_right: bool,
}

impl Column {
    /// Of words.
    pub(super) fn left(title: &'static str) -> Self {
        Self { title, is_right: false }
    }

    /// Of numbers.
    pub(super) fn right(title: &'static str) -> Self {
        Self { title, is_right: true }
    }
}

/// Writes a title line and `rows`, each with a cell for every column.
pub(super) fn table(columns: &[Column], rows: &[Vec<String>], out: &mut dyn Write) -> Result<()> {
    let titles: Vec<String> = columns.iter().map(|c| c.title.to_owned()).collect();
    let all = || std::iter::once(&titles).chain(rows);
    let widths: Vec<usize> =
        (0..columns.len()).map(|i| all().map(|r| r[i].chars().count()).max().unwrap_or(0)).collect();
    for row in all() {
        let cells = row.iter().zip(columns).zip(&widths).map(|((cell, column), &width)| {
            if column.is_right { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}
