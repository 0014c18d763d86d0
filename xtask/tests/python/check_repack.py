"""Opens a repacked tree with the packages that other engines use, and compares it with its source.

    python check_repack.py SOURCE RESULT

Files are read with `safetensors`. Routed experts of RESULT are dequantized by the package of whose names they carry:
`compressed-tensors` (also for MXFP4) or NVIDIA's `modelopt`. The source's values come from the few lines of
docs/checkpoint.md 6.1 below, in f32. All must be equal bit for bit, signs of zeros included; ModelOpt reads -0 as +0, so
there values are compared, and the codes byte for byte.

Matrices outside the experts that are quantized (docs/dense-formats.md) are dequantized by the same packages, under the
group of the config that those find for the module, and by the formulas of that document; both must be equal. Their
distance from the source must be what repack.json says.

Exit codes: 0 equal, 1 not, 77 a package is missing.
"""

import json
import os
import sys
import warnings

warnings.filterwarnings("ignore")
MISSING = 77

try:
    import torch
    from safetensors import safe_open
except ImportError as e:
    print(f"missing: {e}")
    sys.exit(MISSING)

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32)


class Tree:
    """The tensors of a snapshot by name, through its index."""

    def __init__(self, path):
        self.path = path
        with open(os.path.join(path, "model.safetensors.index.json")) as f:
            index = json.load(f)
        self.shard_of = index["weight_map"]
        self.files = {
            shard: safe_open(os.path.join(path, shard), framework="pt")
            for shard in sorted(set(self.shard_of.values()))
        }
        # The index names what the shards hold, no more and no less.
        held = {name for file in self.files.values() for name in file.keys()}
        assert held == set(self.shard_of), "index and shards differ"
        total = sum(self[name].nbytes for name in held)
        assert total == index["metadata"]["total_size"], f"total_size: tensors have {total} bytes"
        with open(os.path.join(path, "config.json")) as f:
            self.config = json.load(f)

    def __getitem__(self, name):
        return self.files[self.shard_of[name]].get_tensor(name)

    def __contains__(self, name):
        return name in self.shard_of


def source_values(tree, module):
    """An MXFP4 matrix as f32: code * 2^(e - 127), 32 columns a scale, low nibble first."""
    packed, scale = tree[f"{module}.weight_packed"], tree[f"{module}.weight_scale"]
    assert packed.dtype == torch.uint8 and scale.dtype == torch.uint8
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(packed.shape[0], -1)
    power = torch.ldexp(torch.ones(()), scale.to(torch.int32) - 127)
    return E2M1[codes.long()] * power.repeat_interleave(32, dim=1)


def compressed_tensors_values(tree):
    """A function from a module to its values, by the scheme that the tree's own config describes."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    described = tree.config["quantization_config"]
    assert described == tree.config["text_config"]["quantization_config"], "the two quantization configs differ"
    config = QuantizationConfig.model_validate(described)
    scheme = scheme_of(config, "language_model.model.layers.1.block_sparse_moe.experts.0.w1")
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    parts = ["weight_packed", "weight_scale"]
    if scheme.format == "nvfp4-pack-quantized":
        parts.append("weight_global_scale")

    def values(module):
        state = {part: tree[f"{module}.{part}"] for part in parts}
        return compressor.decompress(state, scheme)["weight"]

    return values, f"compressed-tensors, {scheme.format}"


def modelopt_values(tree):
    """The same by ModelOpt's own class."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    assert "quantization_config" not in tree.config["text_config"]
    described = tree.config["quantization_config"]
    with open(os.path.join(tree.path, "hf_quant_config.json")) as f:
        assert json.load(f)["quantization"] == described, "hf_quant_config.json differs from config.json"

    def values(module):
        bank = module.rsplit(".", 2)[0]
        assert described["quantized_layers"][bank] == {"quant_algo": "NVFP4", "group_size": 16}
        packed, scale = tree[f"{module}.weight"], tree[f"{module}.weight_scale"]
        factor = tree[f"{module}.weight_scale_2"]
        assert scale.dtype == torch.float8_e4m3fn and factor.shape == () and factor.dtype == torch.float32
        assert tree[f"{module}.input_scale"] == 1.0
        shape = torch.Size([packed.shape[0], 2 * packed.shape[1]])
        tensor = NVFP4QTensor(shape, torch.float32, packed)
        return tensor.dequantize(scale=scale, double_scale=factor, block_sizes={-1: 16})

    return values, "modelopt, NVFP4"


def scheme_of(config, module):
    """Index of the group that stands for a module, as compressed-tensors finds it: names, patterns, then classes."""
    from compressed_tensors.utils.match import match_name, match_targets

    linear = torch.nn.Linear(1, 1, bias=False)
    targets = [target for group in config.config_groups.values() for target in group.targets]
    if any(match_name(module, entry) for entry in config.ignore):
        return None
    found = match_targets(module, linear, targets)
    groups = [name for target in found for name, group in config.config_groups.items() if target in group.targets]
    return config.config_groups[groups[0]] if groups else None


def dense_values(tree):
    """A function from a quantized module to its values by the formula, and by somebody's package."""
    described = tree.config["quantization_config"]

    def nibbles(packed):
        codes = packed.view(torch.uint8)
        return torch.stack([codes & 15, codes >> 4], dim=-1).reshape(packed.shape[0], -1)

    def values(module):
        scale = tree[f"{module}.weight_scale"]
        if scale.dtype == torch.float8_e4m3fn:
            divisor = f"{module}.weight_global_scale" in tree
            packed = tree[f"{module}.weight_packed" if divisor else f"{module}.weight"]
            g = tree[f"{module}.weight_global_scale" if divisor else f"{module}.weight_scale_2"].reshape(())
            each = scale.to(torch.float32).repeat_interleave(16, dim=1)
            plain = E2M1[nibbles(packed).long()] * each
            plain = plain / g if divisor else plain * g
        elif f"{module}.weight_packed" in tree:
            packed = tree[f"{module}.weight_packed"]
            assert packed.dtype == torch.int32
            integers = nibbles(packed).to(torch.float32) - 8
            assert list(integers.shape) == tree[f"{module}.weight_shape"].tolist()
            plain = integers * scale.to(torch.float32).repeat_interleave(64, dim=1)
        else:
            assert tree[f"{module}.weight"].dtype == torch.int8
            plain = tree[f"{module}.weight"].to(torch.float32) * scale.to(torch.float32)
        if described["quant_method"] == "modelopt_mixed":
            from modelopt.torch.quantization.qtensor import NVFP4QTensor

            assert described["quantized_layers"][module] == {"quant_algo": "NVFP4", "group_size": 16}
            shape = torch.Size([packed.shape[0], 2 * packed.shape[1]])
            factor = tree[f"{module}.weight_scale_2"]
            theirs = NVFP4QTensor(shape, torch.float32, packed).dequantize(
                scale=scale, double_scale=factor, block_sizes={-1: 16}
            )
            return plain, theirs
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig

        scheme = scheme_of(QuantizationConfig.model_validate(described), module)
        assert scheme is not None, f"{module} is quantized, and the config does not say so"
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        parts = ["weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_shape"]
        state = {part: tree[f"{module}.{part}"] for part in parts if f"{module}.{part}" in tree}
        theirs = compressor.decompress(state, scheme)["weight"]
        # It computes in bf16, and rounds where our values need more bits.
        return plain, theirs.to(torch.float32)

    return values


def is_quantized(tree, name):
    return f"{name.removesuffix('.weight')}.weight_scale" in tree


def check_dense(source, result, name, values, reported):
    plain, theirs = values(name.removesuffix(".weight"))
    rounded = plain.to(torch.bfloat16).to(torch.float32)
    assert torch.equal(rounded, theirs.to(torch.bfloat16).to(torch.float32)), f"{name}: the package reads other values"
    before = source[name].to(torch.float64)
    error = ((plain.to(torch.float64) - before).norm() / before.norm()).item()
    assert abs(error - reported[name]) <= 1e-9 * error, f"{name}: error {error}, reported {reported[name]}"


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def main():
    source, result = Tree(sys.argv[1]), Tree(sys.argv[2])
    make = compressed_tensors_values
    if result.config["quantization_config"]["quant_method"] == "modelopt_mixed":
        make = modelopt_values
    try:
        values, by = make(result)
    except ImportError as e:
        print(f"missing: {e}")
        sys.exit(MISSING)

    with open(os.path.join(result.path, "repack.json")) as f:
        shards = json.load(f)["shards"]
    reported = {m["tensor"]: m["relative_l2"] for shard in shards for m in shard.get("rounding", [])}
    dense = dense_values(result)
    matrices, others, quantized = 0, 0, 0
    for name in source.shard_of:
        if ".block_sparse_moe.experts." in name:
            if not name.endswith(".weight_packed"):
                continue
            module = name.removesuffix(".weight_packed")
            found, expected = values(module), source_values(source, module)
            # The result of compressed-tensors is bf16, which holds every value of these formats.
            found = found.to(torch.float32)
            equal = same_bits(found, expected)
            if make is modelopt_values:
                equal = torch.equal(found, expected) and torch.equal(result[f"{module}.weight"], source[name])
            if not equal:
                sys.exit(f"{module} has other values")
            if f"{module}.weight_scale_2" in result or f"{module}.weight_global_scale" in result:
                suffix = "weight_scale_2" if f"{module}.weight_scale_2" in result else "weight_global_scale"
                pair = module.replace(".w1", ".w3")
                assert result[f"{module}.{suffix}"] == result[f"{pair}.{suffix}"], f"{module}: gate and up differ"
            matrices += 1
        elif is_quantized(result, name):
            check_dense(source, result, name, dense, reported)
            quantized += 1
        elif name in result:
            a, b = source[name], result[name]
            assert a.dtype == b.dtype and a.shape == b.shape, name
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{name} differs"
            others += 1
        else:
            assert name.startswith(("vision_tower.", "mm_projector.")), f"{name} is missing"
    assert matrices > 0 and others > 0
    assert quantized == len(reported)
    print(
        f"{by}: {matrices} matrices of routed experts bit-equal, {others} other tensors equal, "
        f"{quantized} dense matrices quantized as reported"
    )


main()
