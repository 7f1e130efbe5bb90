//! Colours, when there is a terminal to show them.

/// Whether to colour.
#[derive(Clone, Copy, Debug, Default)]
pub struct Style {
    /// False: text passes through as it is.
    pub colour: bool,
}

impl Style {
    fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// What matters most.
    pub fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    /// What can be skipped.
    pub fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    /// Good news.
    pub fn good(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// Something to look at.
    pub fn warn(self, text: &str) -> String {
        self.paint("33", text)
    }

    /// Bad news.
    pub fn bad(self, text: &str) -> String {
        self.paint("1;31", text)
    }
}
