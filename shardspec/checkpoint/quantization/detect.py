"""Detects the quantized tensors of a checkpoint, and where their codes may be split.

A tensor is quantized if its name fits and scales or zero points are beside it, if its dtype is used
only for codes, or if the config says so. Codes of the schemes in `schemes` may be split between
blocks; codes of other schemes may not be split.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from shardspec.checkpoint.convert.sidecars import QUANTIZED_BY, SECTIONS
from shardspec.checkpoint.quantization.schemes import USUAL, Coded, Shape, coded, schemes_in
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.storage.strict_json import json_beside

_CONFIGS: Final = ("config.json", *sorted(QUANTIZED_BY), "params.json")

_NARROW: Final = re.compile(r"u?int(8|16|32)|float[48]_.*")
"""Dtypes in which codes are stored."""
_CODES_ALONE: Final = re.compile(r"float[48]_.*")
"""Dtypes that are used only for codes."""
_CODES_WITH_SCALES: Final = re.compile(r"u?int\d+|float[48]_.*")
"""Dtypes of tensors that are codes if their name fits and scales are beside them."""
_CODES_NAME: Final = re.compile(
    r"q?weight|_?weight_(packed|qdata|q)|_data|W_q|codes|q_weight|indices|trellis|Qidxs"
    r"|dense_weights|state\d"
)
"""Names of codes in a module with scales."""
_STEM: Final = re.compile(r"(.+)_(packed|blocks|qdata|q)")
_COMPANION: Final = re.compile(
    r"(?P<base>.+?)[._]_?(?P<kind>(weight_)?scale_inv|(nested_)?absmax\d?|(nested_)?quant_map"
    r"|quant_state\..+|qmap\d|SCB|qzeros"
    r"|weight_(scales?|scale_2|global_scale|zero_points?|zeros?|shape|bitmask|g_idx)"
    r"|scales?|scale_2|scale_weight|scale_input|pre_quant_scale|shift|zeros?|zero_?points?|q?biases"
    r"|(input|output|activation)_(global_)?scale(_ub)?|g_idx|weight_format|codebooks?|centroids"
    r"|tables2?|meta|nbits|suh|svh|SU|SV|q_(scale(_max)?|groups|group_map|perm|invperm))"
)
"""Names of scales, zero points and other tensors that belong to codes."""
_ENOUGH: Final = re.compile(
    r"weight_.*|.*scale_inv|.*absmax\d?|.*quant_map|quant_state.*|qmap\d|SCB|qzeros"
)
"""Kinds of scales that are known by name alone; other kinds need codes beside them."""
_OF_COMPUTED: Final = re.compile(
    r"(.+[._])?([qkv]|kv|prob|input|output|activation)(_cache|_proj)?_(scale|scaling_factor|zero_point)"
)
"""Names of scales for activations of a quantized model."""


class Blocks(NamedTuple):
    """Block sizes of quantized codes; shards may begin only at multiples of them."""

    sides: Shape
    """Block size of each dim."""
    scales: str = ""
    """Name of the tensor of scales to shard like the codes; empty if there is none."""


class Quantized(NamedTuple):
    """Quantized tensors of a checkpoint."""

    why: Mapping[str, str]
    """Quantized tensor -> evidence, such as ``'w_scale_inv' goes with it``."""
    blocks: Mapping[str, Blocks]
    """Tensors that may be split only between blocks."""


def find_quantized(
    tensors: Mapping[str, tuple[Shape, str]], sections: Iterable[Mapping[str, object]] = ()
) -> Quantized:
    """Detect the quantized tensors; `tensors` maps name to shape and dtype.

    >>> tensors = {"w": ((256, 256), "float8_e4m3fn"), "w_scale_inv": ((2, 2), "float32")}
    >>> find_quantized({**tensors, "norm": ((256,), "float32")})
    Quantized(why={'w': "'w_scale_inv' goes with it", 'w_scale_inv': "it goes with 'w'"},\
 blocks={'w': Blocks(sides=(128, 128), scales='w_scale_inv')})
    """
    sections = list(sections)
    why = _named(tensors)
    for name, (_, dtype) in tensors.items():
        if _CODES_ALONE.fullmatch(dtype):
            why.setdefault(name, f"{dtype} numbers are codes, whose scales are elsewhere")
    if sections:
        homes = {
            name.rpartition(".")[0]
            for name, (shape, dtype) in tensors.items()
            if shape and _NARROW.fullmatch(dtype)
        } - {""}
        for name in tensors:
            inside = name.rpartition(".")[0] in homes and not name.endswith("bias")
            if inside or of_computed(name):
                why.setdefault(name, "the config says that weights are quantized")
    schemes = schemes_in(sections) if sections else USUAL
    results = {name: coded(name, tensors, schemes) for name in why}
    known = {name: each[1] for name, each in results.items() if isinstance(each, tuple)}
    scales = {weight.scales for weight in known.values()}
    blocks = {name: _blocks(weight, tensors[name][0]) for name, weight in known.items()}
    for name in why.keys() - known.keys() - scales:
        shape, dtype = tensors[name]
        sides = shape
        if _CODES_ALONE.fullmatch(dtype) and why[name].startswith(dtype):
            # The scales may be in another file; without a config it is unknown if any exist.
            both = (each.block for each in schemes if sections and not each.codes)
            last = next(both, shape if sections else (1, 1))[-len(shape) :]
            sides = (*(1 for _ in shape[len(last) :]), *last)
        if not of_computed(name):
            blocks[name] = Blocks(tuple(max(1, side) for side in sides))
    blocks = {name: at for name, at in blocks.items() if at.scales or max(at.sides, default=1) > 1}
    return Quantized(dict(sorted(why.items())), dict(sorted(blocks.items())))


def _named(tensors: Mapping[str, tuple[Shape, str]]) -> dict[str, str]:
    """Return tensor -> evidence ("'w_scale' goes with it"), for codes and scales found by name."""
    homes: dict[str, list[str]] = {}
    for name, (shape, dtype) in tensors.items():
        if shape and _CODES_WITH_SCALES.fullmatch(dtype):
            module, _, last = name.rpartition(".")
            stem = _STEM.fullmatch(name)
            bases = {name, stem[1] if stem else name}
            if _CODES_NAME.fullmatch(last):
                bases.add(module)
            for base in bases:
                homes.setdefault(base, []).append(name)
    why: dict[str, str] = {}
    for name in tensors:
        match = _COMPANION.fullmatch(name)
        if match is None:
            continue
        base, enough = match["base"], _ENOUGH.fullmatch(match["kind"])
        places = [f"{base}.weight", base] if match["kind"].startswith("weight_") else [base]
        codes = [code for at in places for code in homes.get(at, ()) if code != name]
        if not codes and enough:
            codes = [at for at in places if at in tensors]
        if not codes and not enough:
            continue
        why[name] = f"it goes with {codes[0]!r}" if codes else "its name is that of scales of codes"
        for code in codes:
            why.setdefault(code, f"{name!r} goes with it")
    return why


def _blocks(weight: Coded, shape: Shape) -> Blocks:
    """Return the block sizes of a weight's codes, and the name of its scales."""
    lead = tuple(1 for _ in weight.lead)
    if weight.scheme.codes == "_blocks":
        return Blocks((*lead, 1, 1, shape[-1]))
    high, wide = weight.scheme.block
    sides = high or 1, max(1, wide // (1 + weight.scheme.four))
    return Blocks((*lead, *sides), weight.scales if high else "")


def of_computed(name: str) -> bool:
    """Return True if a tensor has the name of an activation scale.

    >>> of_computed("layers.0.self_attn.k_proj.k_scale"), of_computed("weight_scale")
    (True, False)
    """
    return _OF_COMPUTED.fullmatch(name) is not None


# --- configs


def sections(directory: StoragePath) -> Iterator[dict[str, object]]:
    """Yield the quantization sections of the configs in a directory."""
    for name in _CONFIGS:
        config = json_beside(directory, name)
        if name in QUANTIZED_BY and isinstance(config, dict):
            yield config
        else:
            yield from sections_of(config)


def sections_of(config: object) -> Iterator[dict[str, object]]:
    """Yield the quantization sections of a config, also nested ones.

    >>> list(sections_of({"text_config": {"quantization_config": {"quant_method": "fp8"}}}))
    [{'quant_method': 'fp8'}]
    """
    below = [config]
    while below:
        value = below.pop()
        if isinstance(value, list):
            below += value
        for key, inner in value.items() if isinstance(value, dict) else ():
            if key in SECTIONS and isinstance(inner, dict):
                yield inner
            else:
                below.append(inner)
