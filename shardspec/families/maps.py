"""Makes the name maps of a model between files, models in memory, Megatron-core and engines.

Every conversion goes through the names in transformers' files: one map to them, and one from them.
If a tool has several spellings of a name, a first map makes them equal.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from shardspec.errors import LayoutError
from shardspec.families.model import Model
from shardspec.resharding.map_file import Side, filled
from shardspec.resharding.name_map import NameMap, bindings_of
from shardspec.resharding.views import parse_view

_MEGATRON: Final = ("megatron", "torch_dist", "sharded")
"""Megatron-core's ways to save layers: numbered; stacked if all layers have the same tensors;
numbered with stacked experts."""
_LOCAL: Final = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
    (".transformer_layer.", ".mtp_model_layer."),
)
"""Pairs of words in names: of Transformer Engine's and of Megatron-core's own layers, or of two
versions of Megatron-core."""
_ENGINES: Final = (
    (".experts.routed_experts.", ".experts."),
    (".block_sparse_moe.experts.", ".block_sparse_moe.experts.routed_experts."),
    (".fused_qkv_a_proj.", ".fused_qkv_a_proj_with_mqa."),
    (".w13_bias", ".w13_weight_bias"),
    (".w2_bias", ".w2_weight_bias"),
    (".attn.", ".self_attn."),
    ("model.embedding.", "model.embed_tokens."),
)
"""Pairs of words in names: of vLLM, and of SGLang or older versions."""
_LOCAL_EXPERT: Final = re.compile(r"(.*\.experts\.)local_experts\.\{e\}\.(linear_fc([12]))\.(\w+)")


def chain_of(
    model: Model, source: str, target: str, names: Iterable[str] | None = None
) -> tuple[NameMap, ...]:
    """Return the maps from one naming convention to another, to be applied one after the other.

    `names` are those of the source; if all have the usual spelling, no map changes spellings.
    """
    for place in (source, target):
        refuse(model, place)
    source = "hf" if source == "live" else source
    maps = []
    first = _from_spellings(model, source)
    if first is not None and (names is None or not _is_spelled(first, names)):
        maps.append(first)
    to_hf = source != "hf" and target in ("hf", "live", "fused")
    to_hf = to_hf or (source == "fused" and target in _MEGATRON)
    if to_hf and source != target:
        maps.append(map_to_files(model, "fused" if source == "fused" else "megatron"))
    if target in _MEGATRON:
        if source not in _MEGATRON:
            maps.append(map_from_files(model, "megatron"))
        if target == "sharded":
            maps.append(_to_saved(model.with_numbered_layers(), stacked=True))
        elif target == "torch_dist" or source in _MEGATRON:
            maps.append(_to_saved(model, stacked=target == "torch_dist"))
    elif target == source:
        maps.append(_identity(model, target))
    elif target == "fused":
        maps.append(map_from_files(model, "fused"))
    if target in ("hf", "live"):
        place = "file" if target == "hf" else "live"
        if not maps or any(tensor.places[place] != tensor.side for tensor in model.tensors):
            maps.append(map_from_files(model, place))
    return tuple(maps)


def spellings(model: Model, source: str) -> dict[str, list[str]]:
    """Map each name in a format to the names or patterns that other versions use for it."""
    map_ = _from_spellings(model, source) or _identity(model, source)
    spelled: dict[str, list[str]] = {}
    for left, right in map_.rules:
        spelled.setdefault(right[0], []).append(left[0])
    for side in map_.unused:
        spelled.setdefault(side[0], []).append(side[0])
    return spelled


def refuse(model: Model, place: str) -> None:
    """Raise LayoutError if a family has no map to or from a naming convention (`place`)."""
    key = "megatron" if place in _MEGATRON else place
    if key in model.family.refused:
        raise LayoutError(model.family.refused[key])


def map_from_files(model: Model, place: str) -> NameMap:
    """Return the map from the names of files to those of `place`, one of `PLACES`."""
    refuse(model, place)
    rules: list[tuple[Side, Side]] = []
    zeros: list[Side] = []
    unused = _unused(model, "hf")
    for tensor in model.tensors:
        side = tensor.places[place]
        if side is None:
            unused.append(tensor.side[:1])
            continue
        left, right = _pair(tensor.side, side)
        if place in ("megatron", "fused") and set(tensor.cut.values()) == {"vocab"}:
            view = right[1].replace("v", "padded_vocab", 1)
            right = (right[0], view, "padded_vocab[:vocab_size]")
            zeros.append((right[0], view, "padded_vocab[vocab_size:]"))
        rules.append((left, right))
    return _map(model, rules, zeros, unused)


def map_to_files(model: Model, place: str) -> NameMap:
    """Return the map from the names of `place`, one of `PLACES`, to those of files."""
    reverse = map_from_files(model, place).reversed()
    # The tensor has the size of the padded vocabulary.
    sizes = {name: size for name, size in reverse.sizes.items() if name != "padded_vocab"}
    copies = []
    for tensor in model.tensors:
        if tensor.places[place] is None:
            side = model.named(tensor.copy_of).places[place]
            assert side is not None, "the origin of a copy has a place"
            view = side[1].replace("v", "padded_vocab", 1)
            copies.append(((side[0], view, "padded_vocab[:vocab_size]"), tensor.side))
    unused = (*reverse.unused, *_unused(model, place))
    return replace(reverse, rules=(*reverse.rules, *copies), sizes=sizes, unused=unused)


def _map(
    model: Model,
    rules: list[tuple[Side, Side]],
    zeros: Iterable[Side] = (),
    unused: Iterable[Side] = (),
) -> NameMap:
    return NameMap(
        tuple(rules),
        model.sizes,
        tuple(zeros),
        tuple(unused),
        model_types=model.family.model_types,
        numbers=model.numbers,
    )


def _unused(model: Model, place: str) -> list[Side]:
    """Return the tensors that maps from convention `place` drop, such as inverse frequencies."""
    sides: list[Side] = []
    if place == "hf":
        sides = [(name,) for name in model.family.unused]
    elif place == "megatron":
        sides = [("rotary_pos_emb.inv_freq",)]
    for tensor in model.copies:
        side = tensor.side if place == "hf" else tensor.places[place]
        sides += [] if side is None else [side[:1]]
    return sides


def _pair(own: Side, other: Side) -> tuple[Side, Side]:
    """Return both sides of an equation without unnecessary slices and factors."""
    if "{e}" not in own[0] + other[0]:
        own, other = (
            tuple(text for n, text in enumerate(side) if n < 2 or "{e}" not in text)
            for side in (own, other)
        )
    theirs = {factor for dim in parse_view(other[1]) for factor in dim}
    dims = []
    for factors in parse_view(own[1]):
        split = len(factors) > 1 and bool(theirs.intersection(factors))
        dims.append(f"({' '.join(factors)})" if split else "_".join(factors))
    return (own[0], " ".join(dims), *own[2:]), other


def _identity(model: Model, place: str) -> NameMap:
    """Return the identity map of convention `place`, which checks that every tensor exists."""
    if place == "hf":
        sides = [tensor.side[:2] for tensor in model.tensors]
    else:
        to_place = map_from_files(model, place)
        sides = [*dict.fromkeys(right[:1] for _, right in to_place.rules)]
    return _map(model, [(side, side) for side in sides], unused=_unused(model, place))


def _from_spellings(model: Model, source: str) -> NameMap | None:
    """Return the map from all spellings to the usual ones; None if there is only one spelling."""
    rules: list[tuple[Side, Side]] = []
    if source in _MEGATRON:
        for own, variants in _tensors(model):
            rules.append((own, own))
            rules += [(side, name) for side, name in variants]
        place = "megatron"
    elif source == "hf":
        place = "hf"
        for tensor in model.tensors:
            rules.append((tensor.side[:1], tensor.side[:1]))
            for key in ("file", "live"):
                side = tensor.places[key]
                if side is not None and side != tensor.side:
                    own, other = _pair(tensor.side, side)
                    rules.append((other, own))
    else:
        place = "fused"
        sides = (tensor.places["fused"] for tensor in model.tensors)
        names = {side[:1]: None for side in sides if side is not None}
        for (name,) in names:
            rules.append(((name,), (name,)))
            # SGLang shares some of vLLM's names, so each word is replaced separately.
            rules += [((other,), (name,)) for other in _respelled(name, _ENGINES)]
    rules = list(dict.fromkeys(rules))
    if all(left == right for left, right in rules):
        return None
    to_own = _map(model, rules, unused=_unused(model, place) if place == "hf" else ())
    copies = () if place == "hf" else [(side, side) for side in _unused(model, place)]
    every = (*rules, *copies)
    return replace(to_own, rules=every, optional=frozenset(range(len(every))))


def _is_spelled(map_: NameMap, names: Iterable[str]) -> bool:
    """Return True if all names are target names of the map, so that it need not change them."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    identities = tuple((left[:1], left[:1]) for left, right in map_.rules if left == right)
    matched: set[str] = set()
    bindings = bindings_of(replace(map_, rules=identities), shapes)
    for bound, (left, _) in zip(bindings, identities, strict=True):
        matched.update(filled(left[:1], numbers)[0] for numbers in bound)
    return shapes.keys() <= matched


def _to_saved(model: Model, *, stacked: bool) -> NameMap:
    """Return the map from Megatron-core's numbered tensors to their names in a checkpoint."""
    rules: list[tuple[Side, Side]] = []
    for own, variants in _tensors(model):
        side, plain = variants[0] if stacked else (own, own)
        rules.append((plain, side))
    sizes = {"l": model.sizes["{i}"], "e": model.sizes.get("{e}", 1)}
    map_ = _map(model, rules, unused=_unused(model, "megatron"))
    return replace(map_, sizes={**model.sizes, **sizes})


def _tensors(model: Model) -> Iterator[tuple[Side, list[tuple[Side, Side]]]]:
    """Yield each tensor of Megatron-core, and the ways to store it as (stored side, own side).

    The first way is that of `torch_dist`, which stacks uniform layers and all experts.
    """
    names: dict[str, str] = {}
    gated = set()
    for tensor in model.tensors:
        side = tensor.places["megatron"]
        if side is not None:
            count = len(parse_view(side[1]))
            names.setdefault(side[0], " ".join(f"dim{n}" for n in range(count)))
            if "two" in parse_view(side[1])[0]:
                gated.add(side[0])
    for name, dims in names.items():
        own: Side = (name, dims)
        rest = dims.removeprefix("dim0")
        spelled = (name, *_respelled(name, (*_LOCAL, *(pair[::-1] for pair in _LOCAL))))
        places: list[tuple[Side, Side]] = [
            (place, own) for spelling in spelled for place in _stacks(spelling, dims, model)
        ]
        # `singleton_local_shards` saves the halves of a gated matrix separately.
        for spelling in spelled if name in gated else ():
            for number, half in enumerate("wv"):
                part: Side = (name, f"(two half){rest}", f"two[{number}]")
                places.append(((f"{_single(spelling)}_{half}", f"half{rest}"), part))
        yield own, places


def _single(name: str) -> str:
    """Return the name of an expert's tensor if Megatron runs with `singleton_local_shards`."""
    return _LOCAL_EXPERT.sub(r"\1experts.{e}.\2.\4", name)


def _stacks(name: str, dims: str, model: Model) -> Iterator[Side]:
    """Yield the (name, view) under which checkpoints may store a tensor; `torch_dist`'s first."""
    every: list[Side] = []
    expert = _LOCAL_EXPERT.fullmatch(name)
    if expert is not None:
        before, layer, number, kind = expert.groups()
        every.append((f"{before}experts.{layer}.{kind}", f"e {dims}", "e[{e}]"))
        every.append((f"{before}{layer}.{kind}{{e}}", dims))
        if kind == "weight":
            view = "dim1 (e dim0)" if number == "1" else "(e dim1) dim0"
            every.append((f"{before}weight{number}", view, "e[{e}]"))
        every.append((_single(name), dims))
    every.append((name, dims))
    if "{i}" in name and model.has_uniform_layers:
        for place in every:
            yield (place[0].replace(".{i}", "", 1), f"l {place[1]}", "l[{i}]", *place[2:])
    yield from every


def _respelled(name: str, words: Iterable[tuple[str, str]]) -> list[str]:
    """Return the name with one or more of the `words` (old, new) replaced, in every combination.

    >>> _respelled("a.b", [("a", "x"), ("b", "y")])
    ['x.b', 'a.y', 'x.y']
    """
    spelled = [name]
    for old, new in words:
        spelled += [spelling.replace(old, new) for spelling in spelled if old in spelling]
    return list(dict.fromkeys(spelled))[1:]
