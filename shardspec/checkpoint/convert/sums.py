"""Computes weighted sums of checkpoints: averages, or a base plus the difference of two others.

A tensor of the sum has the boxes of all checkpoints, as if they were addends of a pending
reduction. Readers add them block by block, so memory stays small.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import fsum, isclose
from typing import Any, Final

import numpy as np

from shardspec.checkpoint.catalog import (
    Catalog,
    Outline,
    StoredReduction,
    StoredTensor,
)
from shardspec.checkpoint.compare.coverage import check_tiling
from shardspec.checkpoint.compare.diff import diff_checkpoints
from shardspec.checkpoint.convert.copy import Buffers
from shardspec.checkpoint.convert.model_names import Assembled
from shardspec.checkpoint.convert.select import (
    CatalogNaming,
    Choice,
    Patterns,
    config_beside,
    matches,
    wanted_names,
    without_optimizer,
)
from shardspec.checkpoint.quantization import mapped_source
from shardspec.checkpoint.quantization.cuts import quantized_in
from shardspec.checkpoint.quantization.derived import Recast
from shardspec.dtypes import dtype_name, is_cast, is_step_count, keeps_dtype
from shardspec.errors import CheckpointError
from shardspec.resharding.name_map import Names
from shardspec.text import Argument, counted, shown

_LARGEST: Final = float(np.finfo(np.float32).max)
_NOT_SUMMED: Final = re.compile(r"u?int.*|bool|complex.*|float8_e8m0fnu|float4.*")
"""Dtypes that are not summed: those of counters, codes and scales."""


def check_weights(weights: Sequence[float] | None, checkpoints: int) -> tuple[float, ...]:
    """Check the weights of the checkpoints, and return them as floats.

    Raises CheckpointError if there is not one weight per checkpoint, if a weight is not finite in
    float32, or if all weights are zero.
    """
    if weights is None:
        raise CheckpointError(
            f"{counted(checkpoints, 'checkpoint')} without weights; to sum them, give ",
            Argument("weights"),
        )
    factors: tuple[float, ...] = ()
    with suppress(TypeError, ValueError, OverflowError):
        factors = tuple(map(float, weights))
    if not (factors and all(abs(factor) <= _LARGEST for factor in factors) and any(factors)):
        raise CheckpointError(
            f"weights {shown(weights)} are not all finite in float32, or are all zero; give other "
            "numbers"
        )
    if len(factors) != checkpoints:
        raise CheckpointError(
            f"weights {shown(weights)} are {len(factors)} for "
            f"{counted(checkpoints, 'checkpoint')}; give one for each"
        )
    return factors


def summed_source(
    sources: Sequence[Catalog],
    weights: Sequence[float] | None,
    names: Names | None,
    choice: Choice,
    take_first: Patterns,
) -> tuple[Catalog, Choice]:
    """Return the weighted sum of checkpoints, and the options not yet applied.

    Each checkpoint is first dequantized and renamed. A name map is not applied to a checkpoint that
    already has the names of the target.

    Raises
    ------
    CheckpointError
        If the weights do not fit, or names, shapes, dtypes or values that are not summed differ.
    """
    factors = check_weights(weights, len(sources))
    _check_model_types(sources)
    first, left = mapped_source(sources[0], names, choice)
    every = [first]
    for source in sources[1:]:
        there = {*source.names} == {*first.names} != {*sources[0].names}
        as_is = there and not isinstance(names, CatalogNaming)
        every.append(mapped_source(source, None if as_is else names, left if as_is else choice)[0])
    wanted = [wanted_names(source, left) for source in every]
    if choice.include is None:
        wanted = list(map(without_optimizer, wanted))
    for pattern in (take_first,) if isinstance(take_first, str) else take_first:
        if not any(matches(name, pattern) for name in (*wanted[0], *first.extras)):
            raise CheckpointError(
                f"pattern {pattern!r} of ",
                Argument("take_first"),
                f" matches nothing of {first.directory}; omit it",
            )
    summed, equal = {}, []
    why = quantized_in(first).why
    for name in _same_names(every, wanted, take_first):
        outlines = [_checked(source, name) for source in every]
        dtype = _sum_dtype(every, outlines, left.dtype)
        kept = name in why or name in first.facts.keeps_dtype
        if kept or _NOT_SUMMED.fullmatch(dtype) or is_step_count(name):
            equal.append(name)
        else:
            summed[name] = dtype
    _require_equal(every, equal, why)
    made = SummedCatalog(every, wanted[0], left)
    made.weights, made.summed = factors, summed
    notes = []
    if not isclose(fsum(factors), 1, rel_tol=1e-6):
        notes.append(f"the weights add up to {fsum(factors):.6g}, not 1")
    if optimizer := len(wanted_names(first, left)) - len(wanted[0]):
        notes.append(f"{counted(optimizer, 'tensor')} of the optimizer's state left out")
    others = {
        name: [source.extras.get(name, value) for source in every[1:]]
        for name, value in made.extras.items()
    }
    differing = (
        name
        for name, values in others.items()
        if any(value != made.extras[name] for value in values) and not matches(name, take_first)
    )
    facts = replace(made.facts, summed=tuple(notes), differing=frozenset(differing))
    return made.with_facts(facts), left.after_map()


def _same_names(
    sources: Sequence[Catalog], wanted: Sequence[Sequence[str]], take_first: Patterns
) -> list[str]:
    """Return the names that all checkpoints share; raises CheckpointError if one lacks a name."""
    names = [{name for name in every if not matches(name, take_first)} for every in wanted]
    for source, others in zip(sources[1:], names[1:], strict=True):
        if different := names[0] ^ others:
            name = min(different)
            has, lacks = (sources[0], source) if name in names[0] else (source, sources[0])
            raise CheckpointError(
                f"{lacks.directory} lacks {shown(name)}, which {has.directory} has; exclude it, or "
                "give both the same names"
            )
    return sorted(names[0])


def _checked(source: Catalog, name: str) -> Outline[Any]:
    """Return shape, dtype and boxes of a tensor; raises CheckpointError if boxes do not tile it."""
    outline = source.outline(name)
    try:
        check_tiling(outline)
    except CheckpointError as error:
        raise CheckpointError(f"{source.directory}: ", *error.parts) from None
    return outline


def _sum_dtype(
    sources: Sequence[Catalog], outlines: Sequence[Outline[Any]], target: str | None
) -> str:
    """Return the dtype of a sum: that of all addends, or a wide one if the sum is cast later."""
    first = outlines[0]
    for source, outline in zip(sources[1:], outlines[1:], strict=True):
        if outline.shape != first.shape:
            raise CheckpointError(
                f"{shown(first.name)} has shape {list(first.shape)} in {sources[0].directory}, "
                f"{list(outline.shape)} in {source.directory}; exclude it"
            )
    dtypes = {outline.dtype for outline in outlines}
    wide = "float64" if dtypes == {"float64"} else "float32"
    if target is not None and not keeps_dtype(first.name):
        cast = dtype_name(target)
        after = {cast if is_cast(dtype, cast) else dtype for dtype in dtypes}
        if after == {cast} and dtypes != {cast}:
            return wide
    if len(dtypes) > 1:
        source, other = next(
            (source, outline.dtype)
            for source, outline in zip(sources, outlines, strict=True)
            if outline.dtype != first.dtype
        )
        raise CheckpointError(
            f"{shown(first.name)} is {first.dtype} in {sources[0].directory}, {other} in "
            f"{source.directory}; cast both with ",
            Argument("dtype"),
        )
    return first.dtype


def _require_equal(
    sources: Sequence[Catalog], names: Sequence[str], why: Mapping[str, str]
) -> None:
    """Raise CheckpointError if unsummed tensors `names` differ; keys of `why` are quantized."""
    first = sources[0]
    for source in sources[1:] if names else ():
        pair = (Assembled(each, {name: (each, name) for name in names}) for each in (first, source))
        for found in diff_checkpoints(*pair):
            if found.kind != "tensor":
                continue
            codes = "dequantize with ", Argument("dtype", value="bf16"), ", "
            raise CheckpointError(
                f"{shown(found.name)} is not summed ({first.outline(found.name).dtype}), and "
                f"differs in {source.directory}; ",
                *(codes if found.name in why else ("exclude it, ")),
                "or keep that of the first with ",
                Argument("take_first"),
            )


def _check_model_types(sources: Sequence[Catalog]) -> None:
    """Raise CheckpointError if the configs beside the checkpoints have different model types."""
    types = {source: (config_beside(source) or {}).get("model_type") for source in sources}
    known = [(source, text) for source, text in types.items() if isinstance(text, str)]
    for source, text in known[1:]:
        if text != known[0][1]:
            raise CheckpointError(
                f"{source.directory} is of model_type {shown(text)}, {known[0][0].directory} of "
                f"{shown(known[0][1])}; sum checkpoints of one model"
            )


class SummedCatalog(Assembled):
    """A checkpoint of weighted sums of tensors; some tensors are those of the first checkpoint."""

    def __init__(self, sources: Sequence[Catalog], names: Sequence[str], choice: Choice) -> None:
        first = sources[0]
        super().__init__(first, {name: (first, name) for name in names}, sources)
        kept = [name for name in first.extras if choice.wants(name)]
        kept = kept if choice.include is not None else without_optimizer(kept)
        self._extras = {name: first.extras[name] for name in kept}
        self.weights: tuple[float, ...] = ()
        self.summed: Mapping[str, str] = {}
        """Name of each summed tensor to the dtype of its addends."""
        self._sources, self._spare = sources, list[Buffers]()

    def _look_up(self, name: str) -> StoredTensor:
        dtype = self.summed.get(name)
        if dtype is None:
            return super()._look_up(name)
        boxes = [
            replace(stored, addend=(number,))
            for number, source in enumerate(self._sources)
            for stored in self._addend(source.tensor(name), dtype).boxes
        ]
        pending = StoredReduction("sum", len(self._sources), self.weights)
        shape = self.base.outline(name).shape
        return StoredTensor(name, shape, dtype, None, (pending,), tuple(boxes))

    def _addend(self, tensor: StoredTensor, dtype: str) -> StoredTensor:
        """Return a tensor cast to `dtype`, with its pending reduction finished."""
        as_is = tensor.dtype == dtype and not tensor.pending
        return tensor if as_is else Recast(tensor, dtype, self._spare).tensor()
