"""Detects quantized weights in checkpoints, and quantizes or dequantizes weights."""

from collections.abc import Mapping

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.convert.select import CatalogNaming, Choice, config_of, mapped_choice
from shardspec.resharding.name_map import Names


def mapped_source(source: Catalog, names: Names | None, choice: Choice) -> tuple[Catalog, Choice]:
    """Dequantize and rename the tensors of a checkpoint; return the remaining options too."""
    if choice.dtype is not None:
        source = with_numbers(source, choice.dtype, choice, config_of(source, names))
        names = names.with_dtype(choice.dtype) if isinstance(names, CatalogNaming) else names
    return mapped_choice(source, names, choice)


def with_numbers(
    source: Catalog,
    dtype: object,
    choice: Choice | None = None,
    config: Mapping[str, object] | None = None,
) -> Catalog:
    """Return a checkpoint whose quantized weights are dequantized, if a dtype is requested."""
    if dtype is None:
        return source
    # Importing numpy takes as long as copying 200 MiB, and a plain copy needs none.
    from shardspec.checkpoint.quantization.dequantize import dequantized

    return dequantized(source, dtype, choice, config)
