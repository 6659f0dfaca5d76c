"""Meta's model parallel checkpoints: ``consolidated.NN.pth``, one a rank, and ``params.json``.

Tensors are cut by the rules shipped as ``meta_llama`` (see `tensor_parallel`). How many ranks there
were follows from shapes: the norms have all of the model's width, and ``attention.wo`` of each rank
its share of the columns. **That two files were swapped cannot be told.**
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shardspec.checkpoint.catalog import ListedCatalog, StoredTensor
from shardspec.checkpoint.formats.names import META, META_FILE, META_PARAMS, PARTS
from shardspec.checkpoint.formats.tensor_parallel import (
    Chunk,
    CutRule,
    Rules,
    cut_rules,
    merged_tensors,
    shipped_rules,
)
from shardspec.checkpoint.formats.torch_file import open_torch_file
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.strict_json import checked, parse_json
from shardspec.checkpoint.torch_files.state import (
    check_no_copies,
    plain_value,
    read_torch_states,
)
from shardspec.errors import CheckpointError
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

_WIDTH: Final = "norm.weight"
_SHARE: Final = "layers.0.attention.wo.weight"
_TOKENS: Final = "tok_embeddings.weight"
_KEYS: Final = "layers.0.attention.wk.weight"
_MOST_BYTES: Final = 1 << 20


def open_meta(
    directory: Path, *, rules: Mapping[str, object] | Path | str | None = None
) -> ListedCatalog:
    """Read what describes the tensors in the files of all ranks; not their data.

    Refused are files that are missing, damaged, copies, or that contradict each other or
    ``params.json``. `rules` come before the shipped ones.
    """
    names = sorted(path.name for path in directory.iterdir())
    found = {int(match[1]): name for name in names if (match := META_FILE.fullmatch(name))}
    paths = tuple(file_inside(directory, found[rank], directory) for rank in sorted(found))
    states = read_torch_states(paths)
    shapes = {name: tensor.local.shape for name, tensor in states[0].tensors.items()}
    width, share = shapes.get(_WIDTH, ()), shapes.get(_SHARE, ())
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
    embedding = "[S(tp),R]" if shapes.get(_TOKENS, ())[1:] == width else "[R,S(tp)]"
    shipped = shipped_rules("meta_llama") | {_TOKENS: CutRule(ShardingSpec.parse(embedding))}
    chunk = Chunk(paths, tuple(state.tensors for state in states))
    tensors = merged_tensors([chunk], Rules(cut_rules(rules), shipped))
    extras: dict[str, object] = {}
    if META_PARAMS in names:
        extras = _params(file_inside(directory, META_PARAMS, directory), tensors)
        paths = (*paths, directory / META_PARAMS)
    extras |= {key: plain_value(value) for key, value in states[0].extras.items()}
    mesh = DeviceMesh(range(ranks), (ranks,), axis_names=("tp",))
    return ListedCatalog(META, directory, tensors, paths, mesh, extras)


def _params(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, object]:
    """Read what the model is said to be, and compare it with the tensors."""
    with SourceFile(path) as file:
        data = file.read(0, min(file.num_bytes, _MOST_BYTES))
    params = checked(parse_json(data, path, META_PARAMS), dict, path, META_PARAMS)
    rows = {name: tensor.shape[0] for name, tensor in tensors.items() if tensor.shape}
    heads, width = params.get("n_heads"), rows[_WIDTH]
    due: dict[str, int | None] = {
        "dim": width,
        "n_layers": len({name.split(".")[1] for name in tensors if name.startswith("layers.")}),
    }
    if type(heads) is int and heads > 0 and _KEYS in rows:
        due["n_kv_heads"] = rows[_KEYS] * heads // width
    if params.get("vocab_size") != -1:
        due["vocab_size"] = rows.get("output.weight")
    for key, value in due.items():
        said = params.get(key)
        if type(said) is int and value is not None and said != value:
            raise CheckpointError(
                f"{path}: says {key} {said}, but the tensors in the files make up {value}; a file "
                "is missing or of another model, or ranks share heads, which is not read"
            )
    return dict(params)
