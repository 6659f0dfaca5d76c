"""A checkpoint as it is asked for: with numbers in place of codes, and under other names."""

from collections.abc import Mapping

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.select.choice import Choice
from shardspec.checkpoint.select.mapped import CatalogNaming, config_beside, mapped_choice
from shardspec.resharding.name_map import Names


def mapped_source(source: Catalog, names: Names | None, choice: Choice) -> tuple[Catalog, Choice]:
    """Return what a map makes of a checkpoint, and what is left to choose of it.

    Before, what is quantised becomes numbers if a dtype is wanted.
    """
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
    """Return a checkpoint with numbers in place of codes, if a dtype is wanted."""
    if dtype is None:
        return source
    # Importing numpy takes as long as copying 200 MiB, and a plain copy needs none.
    from shardspec.checkpoint.quantization.dequantize import dequantised

    return dequantised(source, dtype, choice, config)


def config_of(source: Catalog, names: Names | None) -> Mapping[str, object] | None:
    """Return the config of a model: that by which it is named, or which lies beside it."""
    return names.config if isinstance(names, CatalogNaming) else config_beside(source)
