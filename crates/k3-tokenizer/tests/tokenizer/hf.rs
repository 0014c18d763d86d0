//! The pipeline of the `tokenizers` crate has the same ids.

use k3_tokenizer::hf::HfTokenizer;

use crate::support::{corpus, expected, o200k, small};

fn ids(hf: &HfTokenizer, text: &str) -> Vec<u32> {
    let fast = hf.encode_fast(text, false).unwrap().get_ids().to_vec();
    assert_eq!(hf.encode(text, true).unwrap().get_ids(), fast);
    fast
}

#[test]
fn the_corpus_has_the_same_ids_and_comes_back() {
    for tokenizer in [small(), o200k()] {
        let hf = tokenizer.to_hf().unwrap();
        for line in corpus() {
            let ids = ids(&hf, line);
            assert_eq!(ids, tokenizer.encode(line), "{line:?}");
            assert_eq!(hf.decode(&ids, false).unwrap(), *line);
        }
    }
}

#[test]
fn the_cuts_are_made() {
    let hf = o200k().to_hf().unwrap();
    for run in expected().runs.iter().filter(|run| run.tokens < 20_000) {
        let text = run.text();
        assert_eq!(hf.encode_fast(&*text, false).unwrap().get_ids(), o200k().encode(&text), "{}", run.name);
    }
}

#[test]
fn control_tokens_only_when_asked_for() {
    let text = "<|open|>message role=\"user\"<|sep|>[PAD] x<|reserved_token_776|>";
    assert_eq!(ids(&small().to_hf().unwrap(), text), small().encode(text));
    let hf = small().to_hf_with_control_tokens().unwrap();
    let expected = [
        vec![771],
        small().encode("message role=\"user\""),
        vec![773, 1023],
        small().encode(" x"),
        vec![776],
    ]
    .concat();
    assert_eq!(ids(&hf, text), expected);
    // <|open|> and <|sep|> are not flagged special, [PAD] and the reserved ones are.
    assert_eq!(hf.decode(&expected, false).unwrap(), text);
    assert_eq!(hf.decode(&expected, true).unwrap(), "<|open|>message role=\"user\"<|sep|> x");
}

#[test]
fn the_vocabulary_is_whole() {
    for hf in [small().to_hf().unwrap(), small().to_hf_with_control_tokens().unwrap()] {
        assert_eq!(hf.get_vocab_size(true), 1024);
        assert_eq!(hf.get_vocab(true).len(), 1024);
        for id in 0..1024 {
            let token = hf.id_to_token(id).unwrap();
            assert_eq!(hf.token_to_id(&token), Some(id));
        }
        assert_eq!(hf.id_to_token(1024), None);
        assert_eq!(hf.token_to_id("<|im_end|>"), None);
        assert_eq!(hf.token_to_id("Ġrole"), small().token_id(b" role"));
    }
}

#[test]
fn offsets_are_bytes_of_the_text() {
    let hf = small().to_hf().unwrap();
    let encoding = hf.encode("a role中", false).unwrap();
    assert_eq!(&encoding.get_offsets()[..2], [(0, 1), (1, 6)]);
    assert_eq!(encoding.get_offsets().last().unwrap().1, "a role中".len());
    assert_eq!(&encoding.get_tokens()[..2], ["a", "Ġrole"]);
}

#[test]
fn streams_and_batches() {
    let hf = small().to_hf().unwrap();
    let text = "hello 👩‍🚀 中文";
    let mut stream = hf.decode_stream(false);
    let joined: String = small().encode(text).into_iter().filter_map(|id| stream.step(id).unwrap()).collect();
    assert_eq!(joined, text);
    let batch = hf.encode_batch(vec!["one", "two two"], false).unwrap();
    assert_eq!(batch[1].get_ids(), small().encode("two two"));
}
