//! Ids back to bytes and text, at once and token by token.

use k3_tokenizer::{ControlText, StreamDecoder, Tokenizer, UnknownId, Utf8Stream};
use proptest::prelude::*;

use crate::support::{corpus, o200k, small};

/// Texts whose characters have one to four bytes, joined emoji, and combining signs.
const TEXTS: [&str; 6] = ["naïve", "家に帰る。", "👩‍🚀👨‍👩‍👧‍👦🏳️‍🌈", "हिन्दी क्षत्रिय", "a😀b\u{301}c", "𠀀\u{10ffff}"];

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut stream = StreamDecoder::new(tokenizer, ControlText::Spell);
    let mut text: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    text += &stream.finish();
    text
}

#[test]
fn every_split_of_a_text_joins() {
    for text in TEXTS {
        let bytes = text.as_bytes();
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let mut stream = Utf8Stream::default();
                let mut joined = String::new();
                for part in [&bytes[..first], &bytes[first..second], &bytes[second..]] {
                    stream.push(part, &mut joined);
                }
                // What was held back would be an U+FFFD now.
                stream.finish(&mut joined);
                assert_eq!(joined, text);
            }
        }
    }
}

#[test]
fn every_byte_as_a_token_joins() {
    let byte_ids: Vec<u32> = (0..=255).map(|byte| small().token_id(&[byte]).unwrap()).collect();
    for text in TEXTS {
        let ids: Vec<u32> = text.bytes().map(|byte| byte_ids[usize::from(byte)]).collect();
        assert_eq!(streamed(small(), &ids), text);
        // Each delta is whole characters, as early as they are whole.
        let mut stream = StreamDecoder::new(small(), ControlText::Spell);
        let deltas: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        let whole: Vec<_> = deltas.iter().filter(|delta| !delta.is_empty()).cloned().collect();
        assert_eq!(whole, text.chars().map(String::from).collect::<Vec<_>>());
    }
}

#[test]
fn streams_of_the_corpus_join() {
    for line in corpus() {
        assert_eq!(streamed(o200k(), &o200k().encode(line)), *line);
        assert_eq!(streamed(small(), &small().encode(line)), *line);
    }
}

#[test]
fn an_incomplete_end_is_flushed_once() {
    let mut stream = StreamDecoder::new(small(), ControlText::Spell);
    assert_eq!(stream.push(small().token_id(&[0xf0]).unwrap()).unwrap(), "");
    assert_eq!(stream.push(small().token_id(&[0x9f]).unwrap()).unwrap(), "");
    assert_eq!(stream.finish(), "\u{fffd}");
    assert_eq!(stream.finish(), "");
    assert_eq!(stream.push(small().token_id(b"a").unwrap()).unwrap(), "a");
}

#[test]
fn control_tokens_are_spelled_or_skipped() {
    let open = small().control_id("<|open|>").unwrap();
    let a = small().token_id(b"a").unwrap();
    for (control_text, expected) in [(ControlText::Spell, "a<|open|>a"), (ControlText::Skip, "aa")] {
        let mut stream = StreamDecoder::new(small(), control_text);
        let text: String = [a, open, a].map(|id| stream.push(id).unwrap()).concat();
        assert_eq!(text, expected);
    }
    assert_eq!(small().decode_lossy(&[a, open, a]).unwrap(), "a<|open|>a");
}

#[test]
fn unknown_ids_are_an_error() {
    let unknown = |id| UnknownId { id, vocab_size: 1024 };
    for id in [1024, u32::MAX] {
        assert_eq!(small().token_bytes(id), Err(unknown(id)));
        assert_eq!(small().decode_bytes(&[0, id]), Err(unknown(id)));
        assert_eq!(small().decode_lossy(&[id]), Err(unknown(id)));
        assert_eq!(StreamDecoder::new(small(), ControlText::Skip).push(id), Err(unknown(id)));
    }
    assert_eq!(unknown(1024).to_string(), "decoding: token id 1024 is outside the vocabulary of 1024");
}

proptest! {
    #[test]
    fn text_comes_back(text in any::<String>()) {
        for tokenizer in [small(), o200k()] {
            let ids = tokenizer.encode(&text);
            prop_assert_eq!(tokenizer.decode_bytes(&ids).unwrap(), text.as_bytes());
        }
    }

    #[test]
    fn any_stream_of_tokens_is_the_lossy_whole(ids in prop::collection::vec(0..1024_u32, 0..64)) {
        let whole = String::from_utf8_lossy(&small().decode_bytes(&ids).unwrap()).into_owned();
        prop_assert_eq!(streamed(small(), &ids), whole);
    }

    #[test]
    fn any_stream_of_bytes_is_the_lossy_whole(parts in prop::collection::vec(prop::collection::vec(prop_oneof![
        any::<u8>(), Just(0xf0), Just(0xe0), Just(0x9f), Just(0x80), Just(0xed), Just(0xc2), Just(b'a'),
    ], 0..5), 0..24)) {
        let mut stream = Utf8Stream::default();
        let mut text = String::new();
        parts.iter().for_each(|part| stream.push(part, &mut text));
        stream.finish(&mut text);
        prop_assert_eq!(text, String::from_utf8_lossy(&parts.concat()).into_owned());
    }
}
