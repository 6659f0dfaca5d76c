"""Meta's model parallel checkpoints: ``consolidated.NN.pth``, one a rank, and ``params.json``.

The files do not say how tensors are cut; rules do (`cut_rules`), those of the caller before those
shipped as ``meta_llama``, over the axis ``tp``. How many ranks there were follows from shapes: the
norms have all of the model's width, and ``attention.wo`` of each rank its share of the columns.
**That two files were swapped cannot be told.**
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shardspec.checkpoint.catalog import ListedCatalog, StoredTensor
from shardspec.checkpoint.formats.cut_rules import parse_rules, read_cut_rules, shipped_rules
from shardspec.checkpoint.formats.megatron_model import Chunk, Rules, merged_tensors
from shardspec.checkpoint.formats.names import META, META_FILE, META_PARAMS, PARTS
from shardspec.checkpoint.formats.torch_file import open_torch_file
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.strict_json import checked, parse_json
from shardspec.checkpoint.torch_files.torch_state import (
    check_no_copies,
    plain_value,
    read_torch_state,
)
from shardspec.errors import CheckpointError
from shardspec.mesh import DeviceMesh

__all__ = ["open_meta"]

_WIDTH: Final = "norm.weight"
_SHARE: Final = "layers.0.attention.wo.weight"
_TOKENS: Final = "tok_embeddings.weight"
_KEYS: Final = "layers.0.attention.wk.weight"
_MOST_BYTES: Final = 1 << 20


def open_meta(
    directory: Path, *, rules: Mapping[str, object] | Path | str | None = None
) -> ListedCatalog:
    """Read what describes the tensors in the files of all ranks; not their data.

    Parameters
    ----------
    directory
        With the files.
    rules
        How tensors are cut, before the shipped rules.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, if files contradict each other or ``params.json``, or if no
        rule says how a tensor was cut.
    """
    names = sorted(path.name for path in directory.iterdir())
    found = {int(match[1]): name for name in names if (match := META_FILE.fullmatch(name))}
    paths = tuple(file_inside(directory, found[rank], directory) for rank in sorted(found))
    with prefetch_map(paths, read_torch_state, prefetch_depth(directory)) as read:
        states = tuple(read)
    first = states[0].tensors
    width = first[_WIDTH].local.shape if _WIDTH in first else ()
    share = first[_SHARE].local.shape if _SHARE in first else ()
    if sorted(found) == [0] and not (width and share):
        return open_torch_file(paths[0])
    if len(width) != 1 or len(share) != 2 or not share[1] or width[0] % share[1]:
        raise CheckpointError(
            f"{paths[0]}: its {_WIDTH} and {_SHARE} are not those of LLaMA ({list(width)} and "
            f"{list(share)}), by whose rules it would be read; convert it with {PARTS[META][1]}"
        )
    ranks = width[0] // share[1]
    if sorted(found) != list(range(ranks)):
        lacks = next((f"consolidated.{n:02d}.pth" for n in range(ranks) if n not in found), "none")
        raise CheckpointError(
            f"{directory}: has {len(found)} files consolidated.NN.pth, but by the shapes in them "
            f"{ranks} ranks wrote one ({lacks} is missing); restore them, or move others away"
        )
    check_no_copies(states)
    own = rules if isinstance(rules, Mapping) else None
    given = parse_rules(own, "rules") if own is not None else {}
    if rules is not None and own is None:
        given = read_cut_rules(Path(str(rules)))
    tokens = first[_TOKENS].local.shape if _TOKENS in first else ()
    embedding = "[S(tp),R]" if tokens[1:] == width else "[R,S(tp)]"
    shipped = shipped_rules("meta_llama") | parse_rules({_TOKENS: embedding}, META)
    chunk = Chunk(paths, 0, tuple(state.tensors for state in states))
    tensors = merged_tensors([chunk], Rules(given, shipped, old_qkv=False))
    extras: dict[str, object] = {}
    params = directory / META_PARAMS
    if META_PARAMS in names:
        extras = _params(file_inside(directory, META_PARAMS, directory), tensors)
        paths = (*paths, params)
    extras |= {key: plain_value(value) for key, value in states[0].extras.items()}
    mesh = DeviceMesh(range(ranks), (ranks,), axis_names=("tp",))
    return ListedCatalog(META, directory, tensors, paths, mesh, extras)


def _params(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, object]:
    """Read what the model is said to be, and compare it with the tensors."""
    with SourceFile(path) as file:
        data = file.read(0, min(file.num_bytes, _MOST_BYTES))
    params = checked(parse_json(data, path, META_PARAMS), dict, path, META_PARAMS)
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}

    def rows(name: str, dim: int = 0) -> int | None:
        return tensors[name].shape[dim] if name in tensors else None

    heads, width = params.get("n_heads"), rows(_WIDTH)
    due: dict[str, int | None] = {"dim": width, "n_layers": len(layers)}
    if type(heads) is int and heads > 0 and width is not None:
        keys = rows(_KEYS)
        due["n_kv_heads"] = None if keys is None else keys * heads // width
    if params.get("vocab_size") != -1:
        due["vocab_size"] = rows("output.weight")
    for key, value in due.items():
        said = params.get(key)
        if type(said) is int and value is not None and said != value:
            raise CheckpointError(
                f"{path}: says {key} {said}, but the tensors in the files make up {value}; a file "
                "is missing or of another model, or ranks share heads, which is not read"
            )
    return dict(params)
