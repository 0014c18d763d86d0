//! Byte-pair encoding by ranks: the id of a token is its place in the merge order.

use std::{cmp::Reverse, collections::BinaryHeap, hash::BuildHasher};

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::error::LineProblem;

/// The most tokens a vocabulary may have; K3 has 163,584.
pub(crate) const MAX_TOKENS: usize = 1 << 21;
/// The most bytes a token may have; K3's longest has 256.
pub(crate) const MAX_TOKEN_BYTES: usize = 4096;
/// Pre-tokens longer than this are merged by a heap: below, scanning the few parts is faster.
const LONG_PIECE: usize = 192;
/// No token has these bytes. Ids stay far below.
const NONE: u32 = u32::MAX;

/// Token bytes to id and back. Ids are dense from 0; the first 256 are the single bytes.
pub(crate) struct Ranks {
    /// All tokens one after the other.
    bytes: Vec<u8>,
    /// Where token `id` starts, and one more for the end of the last.
    starts: Vec<u32>,
    /// Ids by the hash of their bytes.
    table: HashTable<u32>,
    hasher: DefaultHashBuilder,
    byte_ids: [u32; 256],
    /// Ids of the two-byte tokens by their big-endian value: most look-ups are these.
    pair_ids: Vec<u32>,
    longest: usize,
}

/// A part of a piece while it is merged.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    start: u32,
    id: u32,
    /// Id of this part joined with the next one.
    joined: u32,
}

impl Ranks {
    pub(crate) fn new() -> Self {
        Self {
            bytes: Vec::new(),
            starts: vec![0],
            table: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            byte_ids: [NONE; 256],
            pair_ids: vec![NONE; 1 << 16],
            longest: 0,
        }
    }

    /// Gives `token` the next id.
    pub(crate) fn push(&mut self, token: &[u8]) -> Result<(), LineProblem> {
        let id = self.len();
        match token.len() {
            0 => return Err(LineProblem::Empty),
            bytes @ 2.. if id < 256 => return Err(LineProblem::NotAByte { bytes }),
            bytes if bytes > MAX_TOKEN_BYTES => {
                return Err(LineProblem::TooLong { bytes, limit: MAX_TOKEN_BYTES });
            }
            _ if id >= MAX_TOKENS || self.bytes.len() + token.len() > u32::MAX as usize => {
                return Err(LineProblem::TooMany { limit: MAX_TOKENS });
            }
            _ => {}
        }
        if let Some(first) = self.id(token) {
            return Err(LineProblem::Duplicate { first: first as usize + 1 });
        }
        let id = id as u32;
        match *token {
            [b] => self.byte_ids[usize::from(b)] = id,
            [a, b] => self.pair_ids[pair(a, b)] = id,
            _ => {}
        }
        self.longest = self.longest.max(token.len());
        self.bytes.extend_from_slice(token);
        self.starts.push(self.bytes.len() as u32);
        let Self { table, hasher, bytes, starts, .. } = self;
        table.insert_unique(hasher.hash_one(token), id, |&id| hasher.hash_one(slice(bytes, starts, id)));
        Ok(())
    }

    /// Number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// The bytes of `id`.
    pub(crate) fn token(&self, id: u32) -> Option<&[u8]> {
        ((id as usize) < self.len()).then(|| slice(&self.bytes, &self.starts, id))
    }

    /// The id of exactly these bytes.
    pub(crate) fn id(&self, token: &[u8]) -> Option<u32> {
        let id = self.find(token);
        (id != NONE).then_some(id)
    }

    fn find(&self, token: &[u8]) -> u32 {
        match *token {
            [b] => self.byte_ids[usize::from(b)],
            [a, b] => self.pair_ids[pair(a, b)],
            _ if token.len() > self.longest => NONE,
            _ => {
                let same = |&id: &u32| slice(&self.bytes, &self.starts, id) == token;
                self.table.find(self.hasher.hash_one(token), same).copied().unwrap_or(NONE)
            }
        }
    }

    /// Appends the ids of one pre-token.
    pub(crate) fn encode_piece(&self, piece: &[u8], parts: &mut Vec<Part>, out: &mut Vec<u32>) {
        match self.id(piece) {
            Some(id) => out.push(id),
            None if piece.len() > LONG_PIECE => self.merge_long(piece, out),
            None => self.merge_short(piece, parts, out),
        }
    }

    /// Finds the lowest rank by scanning all parts: quadratic, and fastest for the usual few.
    fn merge_short(&self, piece: &[u8], parts: &mut Vec<Part>, out: &mut Vec<u32>) {
        parts.clear();
        parts.extend(piece.iter().enumerate().map(|(i, &byte)| Part {
            start: i as u32,
            id: self.byte_ids[usize::from(byte)],
            joined: piece.get(i + 1).map_or(NONE, |&next| self.pair_ids[pair(byte, next)]),
        }));
        loop {
            let mut lowest = (NONE, 0);
            for (i, part) in parts.iter().enumerate() {
                if part.joined < lowest.0 {
                    lowest = (part.joined, i);
                }
            }
            let (id, i) = lowest;
            if id == NONE {
                break;
            }
            parts.remove(i + 1);
            parts[i].id = id;
            // From the start of part `from` to the end of part `to`.
            let joined = |from: usize, to: usize| {
                if to >= parts.len() {
                    return NONE;
                }
                let end = parts.get(to + 1).map_or(piece.len(), |next| next.start as usize);
                self.find(&piece[parts[from].start as usize..end])
            };
            let after = joined(i, i + 1);
            let before = if i > 0 { joined(i - 1, i) } else { NONE };
            parts[i].joined = after;
            if i > 0 {
                parts[i - 1].joined = before;
            }
        }
        out.extend(parts.iter().map(|part| part.id));
    }

    /// The same with a heap of candidates over a linked list of parts: O(n log n).
    fn merge_long(&self, piece: &[u8], out: &mut Vec<u32>) {
        const DEAD: u32 = NONE;
        let n = piece.len();
        // Part i starts at byte i; `ends[i]` is where it ends and the next one starts.
        let mut ends: Vec<usize> = (1..=n).collect();
        let mut before: Vec<usize> = (0..n).map(|i| i.saturating_sub(1)).collect();
        let mut ids: Vec<u32> = piece.iter().map(|&byte| self.byte_ids[usize::from(byte)]).collect();
        let candidate = |start: usize, end: usize| {
            let id = self.find(&piece[start..end]);
            (id != NONE).then_some(Reverse((id, start, end)))
        };
        let mut heap: BinaryHeap<_> = (0..n - 1).filter_map(|i| candidate(i, i + 2)).collect();
        while let Some(Reverse((id, start, end))) = heap.pop() {
            // A candidate is stale if its bytes are no longer two neighbouring parts.
            let middle = ends[start];
            if ids[start] == DEAD || middle >= end || ends[middle] != end {
                continue;
            }
            ids[start] = id;
            ids[middle] = DEAD;
            ends[start] = end;
            if end < n {
                before[end] = start;
                heap.extend(candidate(start, ends[end]));
            }
            if start > 0 {
                heap.extend(candidate(before[start], end));
            }
        }
        let mut at = 0;
        while at < n {
            out.push(ids[at]);
            at = ends[at];
        }
    }
}

fn pair(a: u8, b: u8) -> usize {
    usize::from(a) << 8 | usize::from(b)
}

fn slice<'b>(bytes: &'b [u8], starts: &[u32], id: u32) -> &'b [u8] {
    &bytes[starts[id as usize] as usize..starts[id as usize + 1] as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(tokens: &[&str]) -> Ranks {
        let mut ranks = Ranks::new();
        (0..=255).for_each(|byte| ranks.push(&[byte]).unwrap());
        tokens.iter().for_each(|token| ranks.push(token.as_bytes()).unwrap());
        ranks
    }

    /// Both ways to merge, which must agree, as token texts.
    #[track_caller]
    fn check(tokens: &[&str], piece: &str, expected: &[&str]) {
        let ranks = ranks(tokens);
        let text = |ids: &[u32]| -> Vec<String> {
            ids.iter().map(|&id| String::from_utf8_lossy(ranks.token(id).unwrap()).into_owned()).collect()
        };
        let (mut short, mut long) = (Vec::new(), Vec::new());
        ranks.merge_short(piece.as_bytes(), &mut Vec::new(), &mut short);
        ranks.merge_long(piece.as_bytes(), &mut long);
        assert_eq!(text(&short), expected);
        assert_eq!(text(&long), expected);
    }

    #[test]
    fn the_lowest_rank_of_the_joined_bytes_goes_first() {
        check(&["bc", "ab"], "abc", &["a", "bc"]);
        check(&["ab", "bc"], "abc", &["ab", "c"]);
        check(&["ab", "cd", "abcd", "bc"], "abcd", &["abcd"]);
        // Rank decides, not the order in which parts come about: "cd" before "abc".
        check(&["ab", "cd", "abc"], "abcd", &["ab", "cd"]);
    }

    #[test]
    fn leftmost_on_ties() {
        check(&["aa"], "aaa", &["aa", "a"]);
        check(&["aa", "aaaa"], "aaaaaaa", &["aaaa", "aa", "a"]);
        check(&["aa", "aaa"], "aaaaa", &["aa", "aaa"]);
    }

    #[test]
    fn a_token_that_no_pair_builds() {
        // Inside a longer piece nothing leads to "xyz"; alone it is itself.
        check(&["xyz"], "xyz", &["x", "y", "z"]);
        let ranks = ranks(&["xyz"]);
        let encode = |piece: &str| {
            let mut out = Vec::new();
            ranks.encode_piece(piece.as_bytes(), &mut Vec::new(), &mut out);
            out
        };
        assert_eq!(encode("xyz"), [256]);
        assert_eq!(encode("xyzw"), [120, 121, 122, 119]);
        // Two ways to join the same bytes: whatever the parts were, the rank is that of the whole.
        check(&["bcd", "cd", "ab"], "abcd", &["a", "bcd"]);
    }

    #[test]
    fn what_cannot_be_pushed() {
        let mut full = ranks(&["ab"]);
        assert_eq!(full.push(b""), Err(LineProblem::Empty));
        assert_eq!(full.push(b"a"), Err(LineProblem::Duplicate { first: 98 }));
        assert_eq!(full.push(b"ab"), Err(LineProblem::Duplicate { first: 257 }));
        assert_eq!(
            full.push(&[0; MAX_TOKEN_BYTES + 1]),
            Err(LineProblem::TooLong { bytes: MAX_TOKEN_BYTES + 1, limit: MAX_TOKEN_BYTES })
        );
        assert_eq!(Ranks::new().push(b"ab"), Err(LineProblem::NotAByte { bytes: 2 }));
    }
}
