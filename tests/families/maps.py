"""Maps of families by name, as ``llama-hf-to-megatron``: what `model_names` applies, one by one."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from shardspec import NameMap
from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.convert.select import through
from shardspec.checkpoint.open import open_checkpoint
from shardspec.families.family import shipped_family
from shardspec.families.maps import chain_of, map_from_files
from shardspec.families.model import Model, model_of


def _model(family: str, config: Mapping[str, object]) -> Model:
    return model_of(shipped_family(family), config)


def load_map(name: str, config: Mapping[str, object]) -> NameMap:
    """Return the one map from transformers' names to others."""
    family, _, place = name.partition("-hf-to-")
    return map_from_files(_model(family, config), place)


def map_chain(
    name: str, config: Mapping[str, object], *, reverse: bool = False
) -> tuple[NameMap, ...]:
    """Return the maps from any spelling of some names to others."""
    match = re.fullmatch("(.+)-(hf|live|megatron|torch_dist|fused)-to-(.+)", name)
    assert match is not None, name
    family, *ends = match.groups()
    source, target = reversed(ends) if reverse else ends
    return chain_of(_model(family, config), source, target)


def by_maps(source: Path, maps: Iterable[NameMap], drop: str | None = None) -> Catalog:
    """Return a checkpoint with maps applied one after the other."""
    catalog = open_checkpoint(source)
    dropped = {n: catalog.outline(n).shape for n in catalog.names if drop and fnmatchcase(n, drop)}
    return through(catalog, [*maps], dropped, catalog.extras)
