"""Reads Meta's LLaMA checkpoints: ``consolidated.NN.pth``, one per rank, and ``params.json``.

The number of ranks follows from shapes: a norm has the width of the model, and ``attention.wo`` has
width / ranks columns in each file. **Swapped files cannot be detected.**
"""

from collections.abc import Mapping
from typing import Final

from shardspec.checkpoint.catalog import Catalog, StoredTensor
from shardspec.checkpoint.formats import Format, OpenOptions
from shardspec.checkpoint.formats.cut_rules import (
    ModelChunk,
    SourceRules,
    cut_rules,
    merged_tensors,
)
from shardspec.checkpoint.formats.torch_file import open_torch_file
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.storage.strict_json import read_json
from shardspec.checkpoint.torch_files import META, META_FILE
from shardspec.checkpoint.torch_files.states import check_no_copies, plain_value, read_torch_states
from shardspec.errors import CheckpointError
from shardspec.families.rank_rules import meta_rules
from shardspec.layout.rules import RuleSpec
from shardspec.mesh.device_mesh import DeviceMesh

_PARAMS: Final = "params.json"
_WIDTH: Final = "norm.weight"
_SHARE: Final = "layers.0.attention.wo.weight"
_TOKENS: Final = "tok_embeddings.weight"
_KEYS: Final = "layers.0.attention.wk.weight"


def _open(directory: StoragePath, options: OpenOptions) -> Catalog:
    """Return the catalog of a LLaMA checkpoint; reads the pickles of all ranks, no data."""
    names = directory.names()
    by_rank = {int(match[1]): name for name in names if (match := META_FILE.fullmatch(name))}
    paths = tuple(file_inside(directory, by_rank[rank], directory) for rank in sorted(by_rank))
    states = read_torch_states(paths)
    shapes = {name: tensor.local.shape for name, tensor in states[0].tensors.items()}
    width, share = shapes.get(_WIDTH, ()), shapes.get(_SHARE, ())
    if sorted(by_rank) == [0] and not (width and share):
        return open_torch_file(paths[0])
    if len(width) != 1 or len(share) != 2 or not share[1] or width[0] % share[1]:
        raise CheckpointError(
            f"{paths[0]}: shapes {list(width)} of {_WIDTH} and {list(share)} of {_SHARE} are not "
            "those of LLaMA; load it with the code of its model, and save a full state dict"
        )
    ranks = width[0] // share[1]
    if sorted(by_rank) != list(range(ranks)):
        missing = [f"consolidated.{n:02d}.pth" for n in range(ranks) if n not in by_rank]
        remedy = f"restore {missing[0]}" if missing else f"move those from {ranks} on away"
        raise CheckpointError(
            f"{directory}: has {len(by_rank)} files consolidated.NN.pth, but the shapes of the "
            f"tensors are those of {ranks} ranks; {remedy}"
        )
    check_no_copies(states)
    embedding = "[S(tp),R]" if shapes.get(_TOKENS, ())[1:] == width else "[R,S(tp)]"
    shipped = cut_rules(meta_rules()) | {_TOKENS: RuleSpec.of(embedding)}
    tensors = merged_tensors(
        [ModelChunk(states)], SourceRules(cut_rules(options.source_rules), shipped)
    )
    extras: dict[str, object] = {}
    if _PARAMS in names:
        extras = _params(file_inside(directory, _PARAMS, directory), tensors)
        paths = (*paths, directory / _PARAMS)
    extras |= {
        key: plain_value(value, states[0].archive) for key, value in states[0].extras.items()
    }
    mesh = DeviceMesh(range(ranks), (ranks,), axis_names=("tp",))
    return Catalog(FORMAT.called, directory, tensors, paths, mesh, extras)


def _params(path: StoragePath, tensors: Mapping[str, StoredTensor]) -> dict[str, object]:
    """Return the contents of ``params.json``, such as ``dim``, after comparing them with shapes."""
    params = read_json(path, _PARAMS)
    rows = {name: tensor.shape[0] for name, tensor in tensors.items() if tensor.shape}
    heads, width = params.get("n_heads"), rows[_WIDTH]
    implied: dict[str, int | None] = {
        "dim": width,
        "n_layers": len({name.split(".")[1] for name in tensors if name.startswith("layers.")}),
    }
    if type(heads) is int and heads > 0 and _KEYS in rows:
        implied["n_kv_heads"] = rows[_KEYS] * heads // width
    if params.get("vocab_size") != -1:
        implied["vocab_size"] = rows.get("output.weight")
    for key, value in implied.items():
        recorded = params.get(key)
        if type(recorded) is int and value is not None and recorded != value:
            raise CheckpointError(
                f"{path}: says {key} {recorded}, but the tensors in the files make up {value}; a "
                "file is missing or of another model, or ranks share heads, which cannot be read"
            )
    return params


FORMAT: Final = Format(
    name="meta",
    title=META,
    recognizes=lambda names: any(map(META_FILE.fullmatch, names)),
    open=_open,
    instead="Meta's code loads the format 'torch' on one device, as consolidated.00.pth",
    keeps="notes",
    takes=("source_rules",),
    known_by="consolidated.00.pth",
)
