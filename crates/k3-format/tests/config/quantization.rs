//! How experts and linears are said to be stored.

use k3_format::ExpertFormat;
use serde_json::{Value, json};

use crate::{K31, accepted, check, fields, good, parse, refused, remove, set};

#[test]
fn quantization_must_be_one_that_the_engine_reads() {
    let q = "text_config.quantization_config";
    let w = format!("{q}.config_groups.group_0.weights");
    for (path, value) in [
        (format!("{q}.quant_method"), json!("gptq")),
        (format!("{q}.quant_method"), json!("modelopt")),
        (format!("{q}.format"), json!("int-quantized")),
        (format!("{w}.num_bits"), json!(8)),
        (format!("{w}.type"), json!("int")),
        (format!("{w}.group_size"), json!(16)),
        (format!("{w}.symmetric"), json!(false)),
    ] {
        check(&path, value, &path);
    }
    check(&format!("{q}.config_groups"), json!({}), &format!("{q}.config_groups.group_0"));
    check("quantization_config", json!({"quant_method": "compressed-tensors"}), "quantization_config");
    // The same object at both places is what a repacked tree has.
    let same = parse(K31)["text_config"]["quantization_config"].clone();
    assert_eq!(accepted("quantization_config", same.clone()).quantization.format, ExpertFormat::Mxfp4);
    let mut json = parse(K31);
    remove(&mut json, q);
    set(&mut json, "quantization_config", same);
    assert_eq!(good(&json).quantization.format, ExpertFormat::Mxfp4);
}

#[test]
fn both_nvfp4_conventions_are_read() {
    let mut json = parse(K31);
    let q = "text_config.quantization_config";
    set(&mut json, &format!("{q}.format"), json!("nvfp4-pack-quantized"));
    let group = format!("{q}.config_groups.group_0.format");
    assert_eq!(fields(&refused(&json, "two formats")), [group.as_str()]);
    set(&mut json, &group, json!("nvfp4-pack-quantized"));
    assert_eq!(
        fields(&refused(&json, "group 32")),
        [format!("{q}.config_groups.group_0.weights.group_size")]
    );
    set(&mut json, &format!("{q}.config_groups.group_0.weights.group_size"), json!(16));
    // Groups of 16 allow widths that MXFP4 does not.
    set(&mut json, "text_config.moe_intermediate_size", json!(3088));
    let file = good(&json);
    assert_eq!(file.quantization.format, ExpertFormat::Nvfp4CompressedTensors);
    assert_eq!(file.quantization.expert_layers, None);
    set(&mut json, &format!("{q}.config_groups.group_0.input_activations"), json!({"num_bits": 4}));
    assert!(good(&json).quantization.quantizes_activations);

    let model_opt = |layers: Value| {
        let mut json = parse(K31);
        remove(&mut json, q);
        let object = json!({"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers});
        set(&mut json, "quantization_config", object);
        json
    };
    let nvfp4 = json!({"quant_algo": "NVFP4", "group_size": 16});
    let file = good(&model_opt(json!({
        "language_model.model.layers.1.block_sparse_moe.experts": nvfp4,
        "model.layers.2.mlp.experts": nvfp4,
        "model.layers.2.mlp.shared_experts": {"quant_algo": "FP8"},
    })));
    assert_eq!(file.quantization.format, ExpertFormat::Nvfp4ModelOpt);
    assert_eq!(file.quantization.expert_layers, Some(vec![1, 2]));
    let path = "quantization_config.quantized_layers";
    assert_eq!(fields(&refused(&model_opt(json!({})), "no layers")), [path]);
    let fp8 = model_opt(json!({"model.layers.1.mlp.experts": {"quant_algo": "FP8"}}));
    assert_eq!(fields(&refused(&fp8, "FP8")), [format!("{path}.model.layers.1.mlp.experts")]);
}

#[test]
fn groups_of_several_formats_are_mixed_precision() {
    let q = "text_config.quantization_config";
    let groups = format!("{q}.config_groups");
    let with = |path: &str, value: Value| {
        let mut json = parse(K31);
        set(&mut json, &format!("{q}.format"), json!("mixed-precision"));
        let weights = json!({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": true});
        let group = json!({"format": "int-quantized", "targets": ["re:.*mlp.*"], "weights": weights});
        set(&mut json, &format!("{groups}.group_1"), group);
        set(&mut json, path, value);
        json
    };
    let read = good(&with("text_config.unused", json!(null))).quantization;
    assert_eq!((read.format, read.groups.len()), (ExpertFormat::Mxfp4, 2));
    assert!(read.entry.contains("group_0.format"), "{}", read.entry);
    assert_eq!(read.groups[1].targets, ["re:.*mlp.*"]);
    // A group that names the experts goes before that of all.
    let named = with(&format!("{groups}.group_1.targets"), json!(["re:.*experts\\..*"]));
    assert_eq!(fields(&refused(&named, "INT8 experts")), [format!("{groups}.group_0")]);
    for (path, value, field) in [
        ("group_0.format", json!("int-quantized"), "group_0.weights.num_bits"),
        ("group_0.format", json!("naive-quantized"), "group_0.format"),
        ("group_0.format", json!(null), "group_0.format"),
        ("group_1.weights.num_bits", json!(4), "group_1.weights.num_bits"),
        ("group_1.weights.strategy", json!("group"), "group_1.weights.strategy"),
        ("group_1.weights.symmetric", json!(false), "group_1.weights.symmetric"),
        ("group_1.weights", json!(null), "group_1.weights"),
        ("group_1.targets", json!("Linear"), "group_1.targets"),
    ] {
        let error = refused(&with(&format!("{groups}.{path}"), value), path);
        let field = format!("{groups}.{field}");
        assert!(fields(&error).contains(&field.as_str()), "{path}: {error}");
    }
}
