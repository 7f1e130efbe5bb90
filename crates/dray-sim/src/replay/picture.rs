//! A picture of a migration: time against block number.
//!
//! Time is painted into columns of equal width; when they run out, neighbours are joined and the
//! width doubles, so that a picture takes the same room however long the migration is.

use dray_types::BlockRange;
use std::fmt::Write;

/// Rows: parts of the disk.
const ROWS: usize = 256;
/// Columns at most; from half of them up are in use.
const COLUMNS: usize = 640;
/// Width of a column at first, in nanoseconds.
const FIRST_WIDTH: u64 = 1_000_000;

/// What is painted, the later ones over the earlier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layer {
    /// Blocks sent for the first time.
    Copied,
    /// Blocks sent again.
    Resent,
    /// Blocks sent because the guest waited for them.
    Demand,
    /// The guest read.
    Read,
    /// The guest wrote.
    Write,
}

const LAYERS: [(Layer, &str, &str); 5] = [
    (Layer::Copied, "#8fb4dd", "copied"),
    (Layer::Resent, "#f2a65a", "sent again"),
    (Layer::Demand, "#8e44ad", "fetched for a waiting guest"),
    (Layer::Read, "#2e8b57", "guest reads"),
    (Layer::Write, "#c0392b", "guest writes"),
];

type Bits = [u64; ROWS / 64];

#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Column([Bits; LAYERS.len()]);

/// A picture that is being painted.
#[derive(Clone, PartialEq, Debug)]
pub struct Picture {
    blocks: u64,
    width: u64,
    columns: Vec<Column>,
    total: u64,
    handover: Option<u64>,
}

impl Picture {
    /// An empty picture of a disk of so many blocks.
    pub(super) fn new(blocks: u64) -> Self {
        let columns = Vec::with_capacity(COLUMNS);
        Self { blocks: blocks.max(1), width: FIRST_WIDTH, columns, total: 0, handover: None }
    }

    /// Something happened to `range` at `time`.
    pub(super) fn paint(&mut self, layer: Layer, time: u64, range: BlockRange) {
        while time / self.width >= COLUMNS as u64 {
            self.join();
        }
        let at = (time / self.width) as usize;
        if at >= self.columns.len() {
            self.columns.resize(at + 1, Column::default());
        }
        let row = |block: u64| (block * ROWS as u64 / self.blocks).min(ROWS as u64 - 1) as usize;
        let bits = &mut self.columns[at].0[layer as usize];
        for row in row(range.start)..=row(range.end().saturating_sub(1)) {
            bits[row / 64] |= 1 << (row % 64);
        }
    }

    fn join(&mut self) {
        self.width *= 2;
        let pairs = self.columns.chunks(2);
        self.columns = pairs
            .map(|pair| {
                let mut joined = pair[0];
                for other in &pair[1..] {
                    let mine = joined.0.iter_mut().flatten();
                    mine.zip(other.0.iter().flatten()).for_each(|(mine, other)| *mine |= other);
                }
                joined
            })
            .collect();
    }

    /// The migration is over.
    pub(super) fn end(&mut self, total: u64, handover: Option<u64>) {
        self.total = total;
        self.handover = handover;
    }

    /// The picture as SVG, under a title.
    pub fn svg(&self, title: &str) -> String {
        const LEFT: f64 = 70.0;
        const TOP: f64 = 64.0;
        const WIDE: f64 = 900.0;
        const HIGH: f64 = 512.0;
        let span = (self.columns.len().max(1) as u64 * self.width).max(self.total) as f64;
        let wide = WIDE * self.width as f64 / span;
        let high = HIGH / ROWS as f64;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1000\" height=\"640\" \
             viewBox=\"0 0 1000 640\" font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"1000\" height=\"640\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"22\" font-size=\"16\">{}</text>\n",
            escaped(title)
        );
        legend(&mut svg, LEFT);
        for (place, &(_, colour, _)) in LAYERS.iter().enumerate() {
            let _ = writeln!(svg, "<g fill=\"{colour}\">");
            for (at, column) in self.columns.iter().enumerate() {
                for (from, rows) in runs(&column.0[place]) {
                    let (x, y) = (LEFT + at as f64 * wide, TOP + from as f64 * high);
                    let (w, h) = (wide.max(1.0), rows as f64 * high);
                    let _ = writeln!(
                        svg,
                        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\"/>"
                    );
                }
            }
            svg += "</g>\n";
        }
        self.axes(&mut svg, (LEFT, TOP, WIDE, HIGH), span);
        svg + "</svg>\n"
    }

    fn axes(&self, svg: &mut String, (left, top, wide, high): (f64, f64, f64, f64), span: f64) {
        let bottom = top + high;
        let _ = writeln!(
            svg,
            "<rect x=\"{left}\" y=\"{top}\" width=\"{wide}\" height=\"{high}\" fill=\"none\" \
             stroke=\"#444\"/>"
        );
        for tick in 0..=4 {
            let share = f64::from(tick) / 4.0;
            let (x, y) = (left + share * wide, top + share * high);
            let seconds = share * span / 1e9;
            let gib = share * self.blocks as f64 * 4096.0 / f64::from(1 << 30);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{seconds:.0} s</text>\n\
                 <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{gib:.1} GiB</text>",
                bottom + 18.0,
                left - 6.0,
                y + 4.0
            );
        }
        for (time, name) in
            self.handover.iter().map(|&at| (at, "handover")).chain([(self.total, "complete")])
        {
            let x = left + time as f64 / span * wide;
            let _ = writeln!(
                svg,
                "<line x1=\"{x:.1}\" y1=\"{top}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"black\" \
                 stroke-dasharray=\"5 3\"/>\n<text x=\"{x:.0}\" y=\"{:.0}\" \
                 text-anchor=\"middle\">{name}</text>",
                bottom + 36.0
            );
        }
    }
}

fn legend(svg: &mut String, left: f64) {
    let mut x = left;
    for (_, colour, name) in LAYERS {
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.0}\" y=\"36\" width=\"14\" height=\"14\" fill=\"{colour}\"/>\n\
             <text x=\"{:.0}\" y=\"48\">{name}</text>",
            x + 20.0
        );
        x += 50.0 + 7.5 * name.len() as f64;
    }
}

/// Runs of set bits: first row and number of rows.
fn runs(bits: &Bits) -> impl Iterator<Item = (usize, usize)> + '_ {
    let set = |row: usize| row < ROWS && bits[row / 64] >> (row % 64) & 1 == 1;
    let mut row = 0;
    std::iter::from_fn(move || {
        while row < ROWS && !set(row) {
            row += 1;
        }
        let from = row;
        while set(row) {
            row += 1;
        }
        (row > from).then_some((from, row - from))
    })
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_migrations_take_no_more_room() {
        let mut picture = Picture::new(ROWS as u64);
        for second in 0..10_000 {
            let range = BlockRange::new(second % ROWS as u64, 1);
            picture.paint(Layer::Write, second * 1_000_000_000, range);
        }
        assert!(picture.columns.len() <= COLUMNS && picture.columns.len() > COLUMNS / 3);
        let painted: u32 = picture
            .columns
            .iter()
            .flat_map(|column| column.0[Layer::Write as usize])
            .map(u64::count_ones)
            .sum();
        assert_eq!(painted, 10_000, "one row each, joined columns keep all of them");
    }

    #[test]
    fn svg_names_what_it_shows() {
        let mut picture = Picture::new(1 << 20);
        picture.paint(Layer::Copied, 0, BlockRange::new(0, 1 << 19));
        picture.paint(Layer::Demand, 5, BlockRange::new((1 << 20) - 1, 1));
        picture.end(2_000_000, Some(1_000_000));
        let svg = picture.svg("a < b & \"c\"");
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("a &lt; b &amp; &quot;c&quot;"));
        assert!(svg.contains("handover") && svg.contains("complete") && svg.contains("4.0 GiB"));
        assert_eq!(svg.matches("#8fb4dd").count(), 2);
    }
}
