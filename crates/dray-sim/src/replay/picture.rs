//! A picture of a migration: time against block number.
//!
//! Time is painted into columns of equal width; when they run out, neighbours are joined and the
//! width doubles, so that a picture takes the same room however long the migration is. What the guest
//! does lies underneath, pale, and darker where it does more; what the migration sends lies on top.

use dray_types::BlockRange;
use std::fmt::Write;

/// Rows: parts of the disk.
const ROWS: usize = 256;
/// Columns at most; from half of them up are in use.
const COLUMNS: usize = 640;
/// Rows and columns that share one count of the guest's accesses.
const COARSE: usize = 2;
/// Width of a column at first, in nanoseconds.
const FIRST_WIDTH: u64 = 1_000_000;

/// Where the picture is in the drawing, in pixels.
const LEFT: f64 = 70.0;
const TOP: f64 = 64.0;
const WIDE: f64 = 900.0;
const HIGH: f64 = 512.0;

/// What is painted.
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

/// What was sent, the later ones over the earlier: colours that people who see few colours tell apart,
/// by lightness too.
const SENT: [(&str, &str); 3] =
    [("#0072b2", "copied"), ("#e8420f", "sent again"), ("#000000", "fetched for a waiting guest")];
/// What the guest did, each in so many shades: the later over the earlier.
const GUEST: [(&str, &str); 2] = [("#009e73", "guest reads"), ("#e69f00", "guest writes")];
const SHADES: i32 = 3;
/// Of each shade; where a guest does more they lie on each other.
const OPACITY: f64 = 0.13;

type Bits = [u64; ROWS / 64];

#[derive(Clone, Copy, PartialEq, Debug)]
struct Column {
    /// Of each of [`SENT`]: rows.
    sent: [Bits; SENT.len()],
    /// Of each of [`GUEST`]: accesses.
    guest: [[u32; ROWS / COARSE]; GUEST.len()],
}

const EMPTY: Column =
    Column { sent: [[0; ROWS / 64]; SENT.len()], guest: [[0; ROWS / COARSE]; GUEST.len()] };

impl Column {
    fn join(&mut self, other: &Self) {
        let bits = self.sent.iter_mut().flatten().zip(other.sent.iter().flatten());
        bits.for_each(|(mine, other)| *mine |= other);
        let counts = self.guest.iter_mut().flatten().zip(other.guest.iter().flatten());
        counts.for_each(|(mine, other)| *mine = mine.saturating_add(*other));
    }
}

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
            self.columns.resize(at + 1, EMPTY);
        }
        let row = |block: u64| (block * ROWS as u64 / self.blocks).min(ROWS as u64 - 1) as usize;
        let (first, last) = (row(range.start), row(range.end().saturating_sub(1)));
        let last = last.max(first);
        let column = &mut self.columns[at];
        match layer {
            Layer::Copied | Layer::Resent | Layer::Demand => {
                let bits = &mut column.sent[layer as usize];
                (first..=last).for_each(|row| bits[row / 64] |= 1 << (row % 64));
            }
            Layer::Read | Layer::Write => {
                let counts = &mut column.guest[usize::from(layer == Layer::Write)];
                let counts = &mut counts[first / COARSE..=last / COARSE];
                counts.iter_mut().for_each(|count| *count = count.saturating_add(1));
            }
        }
    }

    fn join(&mut self) {
        self.width *= 2;
        let pair = |pair: &[Column]| {
            let mut joined = pair[0];
            pair[1..].iter().for_each(|other| joined.join(other));
            joined
        };
        self.columns = self.columns.chunks(2).map(pair).collect();
    }

    /// The migration is over.
    pub(super) fn end(&mut self, total: u64, handover: Option<u64>) {
        self.total = total;
        self.handover = handover;
    }

    /// The picture as SVG, under a title.
    pub fn svg(&self, title: &str) -> String {
        let span = (self.columns.len().max(1) as u64 * self.width).max(self.total) as f64;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1000\" height=\"640\" \
             viewBox=\"0 0 1000 640\" font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"1000\" height=\"640\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"22\" font-size=\"16\">{}</text>\n",
            escaped(title)
        );
        legend(&mut svg);
        // Paths count in columns and rows.
        let (x, y) = (WIDE * self.width as f64 / span, HIGH / ROWS as f64);
        let _ = writeln!(
            svg,
            "<g transform=\"translate({LEFT} {TOP}) scale({x:.6} {y:.6})\" \
             shape-rendering=\"crispEdges\">"
        );
        self.guest(&mut svg);
        self.sent(&mut svg);
        svg += "</g>\n";
        self.axes(&mut svg, span);
        svg + "</svg>\n"
    }

    fn guest(&self, svg: &mut String) {
        let rows = ROWS / COARSE;
        for (place, (colour, _)) in GUEST.iter().enumerate() {
            let join = |columns: &[Column]| -> Vec<u32> {
                let count = |row| columns.iter().map(|column| column.guest[place][row]).sum();
                (0..rows).map(count).collect()
            };
            let cells: Vec<Vec<u32>> = self.columns.chunks(COARSE).map(join).collect();
            let most = cells.iter().flatten().copied().max().unwrap_or(0);
            for least in shades(most) {
                let areas = rectangles(cells.len(), rows, |at, row| cells[at][row] >= least);
                let opacity = format!(" fill-opacity=\"{OPACITY}\"");
                path(svg, colour, &opacity, COARSE, &areas);
            }
        }
    }

    fn sent(&self, svg: &mut String) {
        for (place, (colour, _)) in SENT.iter().enumerate() {
            let set = |at: usize, row: usize| {
                self.columns[at].sent[place][row / 64] >> (row % 64) & 1 == 1
            };
            path(svg, colour, "", 1, &rectangles(self.columns.len(), ROWS, set));
        }
    }

    fn axes(&self, svg: &mut String, span: f64) {
        let bottom = TOP + HIGH;
        let _ = writeln!(
            svg,
            "<rect x=\"{LEFT}\" y=\"{TOP}\" width=\"{WIDE}\" height=\"{HIGH}\" fill=\"none\" \
             stroke=\"#444\"/>"
        );
        for tick in 0..=4 {
            let share = f64::from(tick) / 4.0;
            let (x, y) = (LEFT + share * WIDE, TOP + share * HIGH);
            let seconds = share * span / 1e9;
            let gib = share * self.blocks as f64 * 4096.0 / f64::from(1 << 30);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{seconds:.0} s</text>\n\
                 <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{gib:.1} GiB</text>",
                bottom + 18.0,
                LEFT - 6.0,
                y + 4.0
            );
        }
        let handover = self.handover.map(|at| (at, "handover", 36.0));
        for (time, name, below) in handover.into_iter().chain([(self.total, "complete", 52.0)]) {
            let x = LEFT + time as f64 / span * WIDE;
            let _ = writeln!(
                svg,
                "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#555\" \
                 stroke-dasharray=\"5 3\"/>\n<text x=\"{x:.0}\" y=\"{:.0}\" \
                 text-anchor=\"middle\">{name}</text>",
                bottom + below
            );
        }
    }
}

fn legend(svg: &mut String) {
    let mut x = LEFT;
    for (colour, name) in SENT {
        square(svg, x, 14.0, colour, 1.0);
        x = named(svg, x + 20.0, name);
    }
    for (colour, name) in GUEST {
        for shade in 0..SHADES {
            let left = x + 10.0 * f64::from(shade);
            square(svg, left, 10.0, colour, 1.0 - (1.0 - OPACITY).powi(shade + 1));
        }
        x = named(svg, x + 10.0 * f64::from(SHADES) + 6.0, name);
    }
    named(svg, x - 12.0, "(darker: more)");
}

fn square(svg: &mut String, x: f64, wide: f64, colour: &str, opacity: f64) {
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.0}\" y=\"36\" width=\"{wide}\" height=\"14\" fill=\"{colour}\" \
         fill-opacity=\"{opacity:.2}\"/>"
    );
}

/// Writes a name into the legend; where the next sign goes.
fn named(svg: &mut String, x: f64, name: &str) -> f64 {
    let _ = writeln!(svg, "<text x=\"{x:.0}\" y=\"48\">{name}</text>");
    x + 24.0 + 6.8 * name.len() as f64
}

/// The least count of each shade: 1, and equal steps of the logarithm up to the greatest count. No
/// two are equal, so that what happens once is pale also where nothing happens twice.
fn shades(most: u32) -> impl Iterator<Item = u32> {
    (0..SHADES).map(move |shade| {
        let step = f64::from(most).powf(f64::from(shade) / f64::from(SHADES));
        (step.ceil() as u32).max(shade as u32 + 1)
    })
}

/// Columns `x` and `wide` on, rows `y` and `high` on.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Area {
    x: usize,
    y: usize,
    wide: usize,
    high: usize,
}

/// Cells that are set, joined to areas that do not overlap, along time or along the disk, whichever
/// makes fewer.
fn rectangles(columns: usize, rows: usize, set: impl Fn(usize, usize) -> bool) -> Vec<Area> {
    let across = joined(columns, rows, &set);
    let turned = |Area { x, y, wide, high }| Area { x: y, y: x, wide: high, high: wide };
    let down: Vec<Area> =
        joined(rows, columns, |row, at| set(at, row)).into_iter().map(turned).collect();
    if down.len() < across.len() { down } else { across }
}

/// Runs of each column, and what has the same run in the columns behind it.
fn joined(columns: usize, rows: usize, set: impl Fn(usize, usize) -> bool) -> Vec<Area> {
    let (mut done, mut open): (Vec<Area>, Vec<Area>) = (Vec::new(), Vec::new());
    for x in 0..columns {
        let mut next = Vec::new();
        let mut before = open.into_iter().peekable();
        for (y, high) in runs(rows, |row| set(x, row)) {
            while let Some(area) = before.next_if(|area| area.y < y) {
                done.push(area);
            }
            next.push(match before.next_if(|area| (area.y, area.high) == (y, high)) {
                Some(area) => Area { wide: area.wide + 1, ..area },
                None => Area { x, y, wide: 1, high },
            });
        }
        done.extend(before);
        open = next;
    }
    done.extend(open);
    done
}

/// Runs of what is set: first row and number of rows.
fn runs(rows: usize, set: impl Fn(usize) -> bool) -> impl Iterator<Item = (usize, usize)> {
    let mut row = 0;
    std::iter::from_fn(move || {
        while row < rows && !set(row) {
            row += 1;
        }
        let from = row;
        while row < rows && set(row) {
            row += 1;
        }
        (row > from).then_some((from, row - from))
    })
}

/// One path of all these areas, a cell of which is `scale` columns and rows.
fn path(svg: &mut String, colour: &str, more: &str, scale: usize, areas: &[Area]) {
    let _ = write!(svg, "<path fill=\"{colour}\"{more} d=\"");
    for area in areas {
        let [x, y, wide, high] = [area.x, area.y, area.wide, area.high].map(|cell| cell * scale);
        let _ = write!(svg, "M{x} {y}h{wide}v{high}h-{wide}z");
    }
    *svg += "\"/>\n";
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
            picture.paint(Layer::Copied, second * 1_000_000_000, range);
        }
        assert!(picture.columns.len() <= COLUMNS && picture.columns.len() > COLUMNS / 3);
        let counted: u32 = picture.columns.iter().flat_map(|column| column.guest[1]).sum();
        let painted: u32 =
            picture.columns.iter().flat_map(|column| column.sent[0]).map(u64::count_ones).sum();
        assert_eq!((counted, painted), (10_000, 10_000), "joined columns keep all of them");
    }

    #[test]
    fn areas_are_what_is_set_each_cell_once() {
        let mut rng = dray_trace::Rng::new(1);
        for chance in [0.0, 0.1, 0.5, 0.9, 1.0] {
            let cells: Vec<[bool; 9]> =
                (0..20).map(|_| [(); 9].map(|()| rng.chance(chance))).collect();
            let mut seen = vec![[0; 9]; 20];
            for Area { x, y, wide, high } in rectangles(20, 9, |at, row| cells[at][row]) {
                for column in &mut seen[x..x + wide] {
                    column[y..y + high].iter_mut().for_each(|cell| *cell += 1);
                }
            }
            assert_eq!(seen, cells.iter().map(|column| column.map(i32::from)).collect::<Vec<_>>());
        }
        let wall = rectangles(20, 9, |_, _| true);
        assert_eq!(wall, [Area { x: 0, y: 0, wide: 20, high: 9 }]);
        assert_eq!(rectangles(20, 9, |_, row| row % 2 == 0).len(), 5);
    }

    #[test]
    fn one_access_is_pale_and_many_are_dark() {
        assert!(shades(1).eq([1, 2, 3]));
        assert!(shades(1000).eq([1, 10, 100]));
    }

    /// A guest that is everywhere all the time: what is sent lies over it.
    #[test]
    fn a_busy_guest_hides_nothing_and_takes_no_room() {
        let mut picture = Picture::new(1 << 20);
        for cell in 0..400_000u64 {
            let range = BlockRange::new(cell * 7919 % (1 << 20), 1);
            let layer = if cell % 3 == 0 { Layer::Read } else { Layer::Write };
            picture.paint(layer, cell * 1_000_000, range);
            picture.paint(Layer::Copied, cell * 1_000_000, BlockRange::new(cell, 1));
        }
        let svg = picture.svg("busy");
        assert!(svg.len() < 600_000, "{}", svg.len());
        let places = ["#009e73", "#e69f00", "#0072b2", "#e8420f", "#000000"]
            .map(|colour| svg.rfind(&format!("<path fill=\"{colour}\"")).unwrap());
        assert!(places.is_sorted(), "{places:?}");
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
        assert!(svg.contains("<path fill=\"#0072b2\" d=\"M0 0h1v128h-1z\"/>"), "{svg}");
        assert!(svg.contains("<path fill=\"#000000\" d=\"M0 255h1v1h-1z\"/>"), "{svg}");
    }
}
