//! Control tokens, channels, and the pieces a reply is made of.

use std::fmt;

/// Lowest id of the special slots: ids below are ordinary BPE pieces (`docs/xtml.md` 2).
const FIRST_CONTROL_ID: u32 = 163_584;

/// Number of ids in the vocabulary, special slots included (`docs/xtml.md` 2).
const VOCAB_SIZE: u32 = 163_840;

/// A control token. Only the first four occur in a text-only prompt (`docs/xtml.md` 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Control {
    /// `<|open|>`, id 163587: starts an opening tag.
    Open,
    /// `<|close|>`, id 163588: starts a closing tag.
    Close,
    /// `<|sep|>`, id 163589: ends either kind of tag.
    Sep,
    /// `<|end_of_msg|>`, id 163586: ends a message, and the model's turn.
    EndOfMsg,
    /// `[EOS]`, id 163585: never in a prompt, ends the model's turn.
    Eos,
    /// Any other special slot. It has no meaning in a reply.
    Other,
}

impl Control {
    /// The four markers that text mode searches for.
    pub const MARKERS: [Control; 4] = [Control::Open, Control::Close, Control::Sep, Control::EndOfMsg];

    /// The control token of a vocabulary id; `None` for ordinary pieces and for ids outside the vocabulary.
    pub fn from_id(id: u32) -> Option<Control> {
        match id {
            163_585 => Some(Control::Eos),
            163_586 => Some(Control::EndOfMsg),
            163_587 => Some(Control::Open),
            163_588 => Some(Control::Close),
            163_589 => Some(Control::Sep),
            FIRST_CONTROL_ID..VOCAB_SIZE => Some(Control::Other),
            _ => None,
        }
    }

    /// The control token that is spelled exactly so; `None` for all that is not one of the five with a meaning.
    pub fn from_spelling(spelling: &str) -> Option<Control> {
        Control::MARKERS.into_iter().chain([Control::Eos]).find(|control| control.spelling() == spelling)
    }

    /// The vocabulary id; `None` for [`Control::Other`], which stands for many.
    pub fn id(self) -> Option<u32> {
        match self {
            Control::Eos => Some(163_585),
            Control::EndOfMsg => Some(163_586),
            Control::Open => Some(163_587),
            Control::Close => Some(163_588),
            Control::Sep => Some(163_589),
            Control::Other => None,
        }
    }

    /// The spelling in the vocabulary; empty for [`Control::Other`].
    pub fn spelling(self) -> &'static str {
        match self {
            Control::Open => "<|open|>",
            Control::Close => "<|close|>",
            Control::Sep => "<|sep|>",
            Control::EndOfMsg => "<|end_of_msg|>",
            Control::Eos => "[EOS]",
            Control::Other => "",
        }
    }
}

/// A channel of an assistant message. The prompt leaves one open (`docs/xtml.md` 6) and the reply continues in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// Reasoning.
    Think,
    /// The answer.
    Response,
}

impl Channel {
    /// The element name.
    pub fn name(self) -> &'static str {
        match self {
            Channel::Think => "think",
            Channel::Response => "response",
        }
    }
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A stretch of a reply. The caller maps token ids: special slots to [`Piece::Control`], everything else, whatever
/// it spells, to [`Piece::Text`] with split UTF-8 characters already joined (`docs/xtml.md` 11.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// One control token.
    Control(Control),
    /// Text of any number of ordinary tokens.
    Text(&'a str),
}
