//! Tables of text: columns as wide as their widest cell, two spaces between them.

use super::style::Style;

/// On which side of its column a cell stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Lays out `rows` under `head`. The last column is not padded.
pub fn table<const N: usize>(
    head: [(&str, Align); N],
    rows: &[[String; N]],
    style: Style,
) -> String {
    let mut widths = head.map(|(name, _)| name.chars().count());
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: [&str; N]| {
        let mut text = String::new();
        for (place, cell) in cells.into_iter().enumerate() {
            let pad = " ".repeat(widths[place].saturating_sub(cell.chars().count()));
            match head[place].1 {
                Align::Left => text += &format!("{cell}{pad}  "),
                Align::Right => text += &format!("{pad}{cell}  "),
            }
        }
        text.trim_end().to_owned()
    };
    let mut text = style.dim(&line(head.map(|(name, _)| name))) + "\n";
    for row in rows {
        text += &line(row.each_ref().map(String::as_str));
        text.push('\n');
    }
    text
}

/// Lines of `label   value`, the labels in one column; an empty label continues the line above.
pub fn fields(fields: &[(&str, String)], style: Style) -> String {
    let width = fields.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (label, value) in fields {
        text += &format!("  {}  {value}\n", style.dim(&format!("{label:<width$}")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [["a".into(), "10".into()], ["long".into(), "9".into()]];
        let text = table([("NAME", Align::Left), ("N", Align::Right)], &rows, Style::default());
        assert_eq!(text, "NAME   N\na     10\nlong   9\n");
    }
}
