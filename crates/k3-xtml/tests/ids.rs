//! `fixtures/xtml/ids.json`, as far as it goes without the vocabulary: control ids and their places.

mod support;

use k3_xtml::{Control, EncodeOptions, Entry, Revision, encode};
use support::{request, string, vectors};

#[test]
fn control_ids_stand_where_segments_say() {
    let cases = vectors("ids.json");
    assert_eq!(cases.len(), 9);
    for case in &cases {
        let name = string(case, "name");
        let entry = if string(case, "entry") == "served" { Entry::Served } else { Entry::Bare };
        for revision in [Revision::Current, Revision::July] {
            let prompt = encode(&request(case).unwrap(), &EncodeOptions { entry, revision }).unwrap();
            assert_eq!(prompt.flat(), string(case, "flat"), "{name}");

            let Some(k3_xtml::json::Value::Array(ids)) = case.get("ids") else { panic!("{name}: no ids") };
            let ids: Vec<u32> = ids.iter().map(|id| id.to_string().parse().unwrap()).collect();
            // Control ids, and between them whether there is text and at most how much: a BPE piece is a byte at least.
            let mut place = 0;
            for segment in prompt.segments.chunk_by(|a, b| !a.control && !b.control) {
                if let [only] = segment
                    && only.control
                {
                    let control =
                        Control::from_id(ids[place]).unwrap_or_else(|| panic!("{name}: id {place}"));
                    assert_eq!(control.spelling(), only.text, "{name}: id {place}");
                    place += 1;
                } else {
                    let text = ids[place..].iter().take_while(|&&id| Control::from_id(id).is_none()).count();
                    let bytes: usize = segment.iter().map(|s| s.text.len()).sum();
                    assert!((segment.len()..=bytes).contains(&text), "{name}: {text} ids for {segment:?}");
                    place += text;
                }
            }
            assert_eq!(place, ids.len(), "{name}");
        }
    }
}

#[test]
fn ids_and_controls() {
    for control in Control::MARKERS.into_iter().chain([Control::Eos]) {
        assert_eq!(control.id().and_then(Control::from_id), Some(control));
    }
    assert_eq!(Control::from_id(163_583), None);
    assert_eq!(Control::from_id(163_584), Some(Control::Other));
    assert_eq!(Control::from_id(163_839), Some(Control::Other));
    assert_eq!(Control::from_id(163_840), None);
    assert_eq!(Control::Other.id(), None);
}
