"""Opens a repacked tree with the packages that other engines use, and compares it with its source.

    python check_repack.py SOURCE RESULT

Files are read with `safetensors`. Routed experts of RESULT are dequantized by the package of whose names they carry:
`compressed-tensors` (also for MXFP4) or NVIDIA's `modelopt`. The source's values come from the few lines of
docs/checkpoint.md 6.1 below, in f32. All must be equal bit for bit, signs of zeros included; ModelOpt reads -0 as +0, so
there values are compared, and the codes byte for byte.

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
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    parts = ["weight_packed", "weight_scale"]
    if config.format == "nvfp4-pack-quantized":
        parts.append("weight_global_scale")

    def values(module):
        state = {part: tree[f"{module}.{part}"] for part in parts}
        return compressor.decompress(state, scheme)["weight"]

    return values, f"compressed-tensors, {config.format}"


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

    matrices, others = 0, 0
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
        elif name in result:
            a, b = source[name], result[name]
            assert a.dtype == b.dtype and a.shape == b.shape, name
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{name} differs"
            others += 1
        else:
            assert name.startswith(("vision_tower.", "mm_projector.")), f"{name} is missing"
    assert matrices > 0 and others > 0
    print(f"{by}: {matrices} matrices of routed experts bit-equal, {others} other tensors equal")


main()
