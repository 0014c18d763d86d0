//! Tags and segments (`docs/xtml.md` 3 and 4).

use std::borrow::Cow;

use super::Segment;
use crate::control::Control;

#[derive(Default)]
pub(super) struct Writer {
    pub(super) segments: Vec<Segment>,
}

impl Writer {
    pub(super) fn control(&mut self, marker: Control) {
        self.segments.push(Segment { text: Cow::Borrowed(marker.spelling()), control: true });
    }

    /// A text segment; empty text makes none.
    pub(super) fn text(&mut self, text: impl Into<Cow<'static, str>>) {
        let text = text.into();
        if !text.is_empty() {
            self.segments.push(Segment { text, control: false });
        }
    }

    /// An opening tag. Keys come with the space before them: that is how they are cut into segments.
    pub(super) fn open(&mut self, name: &'static str, attributes: &[(&'static str, &str)]) {
        self.control(Control::Open);
        self.text(name);
        for (key, value) in attributes {
            self.text(*key);
            self.text("=\"");
            self.text(value.replace('&', "&amp;").replace('"', "&quot;"));
            self.text("\"");
        }
        self.control(Control::Sep);
    }

    pub(super) fn close(&mut self, name: &'static str) {
        self.control(Control::Close);
        self.text(name);
        self.control(Control::Sep);
    }
}
