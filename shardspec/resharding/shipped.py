"""Name maps that come with shardspec, for models that many people train and serve."""

import re
from importlib.resources import files

from shardspec.errors import LayoutError
from shardspec.resharding.maps import NameMap

__all__ = ["load_map", "map_chain", "shipped_maps"]


def shipped_maps() -> tuple[str, ...]:
    """Return the names of the maps that come with shardspec.

    Examples
    --------
    >>> "llama-hf-to-megatron" in shipped_maps()
    True
    """
    found = (files("shardspec.resharding") / "models").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in found if f.name.endswith(".toml")))


def load_map(name: str, sizes: dict[str, int] | None = None) -> NameMap:
    """Return a map that comes with shardspec.

    Parameters
    ----------
    name
        One of `shipped_maps`.
    sizes
        Whole numbers of the model's config, such as ``num_attention_heads``.

    Raises
    ------
    LayoutError
        If there is no such map.

    Examples
    --------
    >>> sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    >>> load_map("llama-hf-to-megatron", sizes).known_sizes()["head_dim"]
    8
    """
    if name not in shipped_maps():
        raise LayoutError(f"there is no map {name!r}; choose among {', '.join(shipped_maps())}")
    text = (files("shardspec.resharding") / "models" / f"{name}.toml").read_text(encoding="utf-8")
    return NameMap.parse(text).with_sizes(sizes or {})


def map_chain(name: str, sizes: dict[str, int] | None = None) -> tuple[NameMap, ...]:
    """Return the maps that lead from one form of a model to another, one after the other.

    A name such as ``"llama-megatron-to-fused"`` is a map to Hugging Face's names and one from them.

    Raises
    ------
    LayoutError
        If there is no such map.

    Examples
    --------
    >>> [len(map_chain(name)) for name in ("llama-hf-to-fused", "llama-megatron-to-fused")]
    [1, 2]
    """
    found = re.fullmatch("(.+)-(hf|megatron|fused)-to-(hf|megatron|fused)", name)
    if found is None or found[2] in ("hf", found[3]):
        return (load_map(name, sizes),)
    model, source, target = found.groups()
    back = load_map(f"{model}-hf-to-{source}", sizes).reversed()
    return (back,) if target == "hf" else (back, load_map(f"{model}-hf-to-{target}", sizes))
