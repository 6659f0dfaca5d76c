"""Megatron-LM's checkpoints, ``mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt``.

XX is the tensor parallel rank, YYY the pipeline stage and ZZZ the expert parallel rank, which
stands without YYY where there are no stages. Tensors are sharded by the rules shipped as
``megatron_gpt``, or ``megatron_llama`` where the arguments say that feed-forward layers are gated
(see `tensor_parallel`). Source: megatron/training/checkpointing.py.

Each file counts its layers and experts from 0; here they follow on from those of the stages and
expert parallel ranks before. With a virtual pipeline (``model0``, ``model1``) the first chunks of
all stages come before the second ones. What several stages or expert parallel ranks hold under a
name that is not a layer's or expert's is a copy, and is compared.

The arguments say how many ranks and layers there are; without them the caller has to (``ranks``).
They also hold the global rank, by which swapped and copied files are found. Without it copies are
found by the digests of torch's zips; **that files of equal shapes were swapped cannot be told**.
The optimizer has no names for its tensors: it is listed among the `extras`, as are arguments,
random states and the ``_extra_state`` of Transformer Engine.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import ListedCatalog, OpaqueValue, StoredTensor
from shardspec.checkpoint.formats import tensor_parallel
from shardspec.checkpoint.formats.names import MEGATRON, MEGATRON_FILE, MEGATRON_RANK
from shardspec.checkpoint.formats.torch_file import (
    StateTensor,
    TorchState,
    check_no_copies,
    of_two_saves,
    plain_value,
    read_torch_states,
)
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.torch_files.unpickler import Names, Record, record_class
from shardspec.errors import CheckpointError
from shardspec.mesh import DeviceMesh

_RANKS: Final = "tensor_model_parallel_size"
_STAGES: Final = "pipeline_model_parallel_size"
_EXPERTS: Final = "expert_model_parallel_size"
_EXTRA: Final = "._extra_state"
_MODEL: Final = re.compile(r"(model\d{0,4})\.(.*)", re.DOTALL)
_DECODER: Final = re.compile(
    r"((?:.*?\.)?(?:decoder|encoder|transformer))\.layers\.([^.]*)", re.DOTALL
)

_KINDS: Final = {
    "megatron.core.enums": "ModelType Fp8Recipe Fp4Recipe",
    "megatron.core.transformer.enums": (
        "AttnBackend AttnMaskType AttnType LayerType ModelType CudaGraphScope"
    ),
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    "megatron.legacy.model.enums": "ModelType",
    "megatron.model.enums": "ModelType AttnMaskType PositionEmbeddingType",
    "megatron.enums": "PositionEmbeddingType",
    "signal": "Signals",
    "_io": "BytesIO",
}
_NAMES: Final[Names] = {
    f"{home}.{kind}": record_class(f"{home}.{kind}")
    for home, kinds in _KINDS.items()
    for kind in kinds.split()
}
"""What arguments and states of Megatron name besides tensors."""


class _File(NamedTuple):
    """What one rank saved."""

    stage: int
    expert: int
    tensor_rank: int
    state: TorchState

    @property
    def path(self) -> Path:
        return self.state.path

    def argument(self, name: str) -> object:
        """Return an argument of the run, None if the file does not say it."""
        args = self.state.extras.get("args")
        return args.get(name) if isinstance(args, Record) else None

    def number(self, name: str) -> int | None:
        """Return an argument that is a whole number."""
        value = self.argument(name)
        return value if type(value) is int else None

    def model(self, key: str) -> dict[str, StateTensor]:
        """Return the tensors of one of its models."""
        start = f"{key}."
        return {
            name.removeprefix(start): found
            for name, found in self.state.tensors.items()
            if name.startswith(start) and not name.endswith(_EXTRA)
        }


def open_megatron(
    directory: Path,
    *,
    rules: Mapping[str, object] | Path | str | None = None,
    ranks: int | None = None,
) -> ListedCatalog:
    """Read what describes the models in the files of all ranks; not their data.

    `directory` has the ``mp_rank_`` directories. `rules` come before the shipped ones. `ranks` are
    tensor parallel ranks times stages; they are needed where the files have no arguments.
    """
    files = _read(directory)
    stages, experts, tensor_ranks = (1 + at for at in files[-1][:3])
    keys = _model_keys(files)
    _check_one_save(directory, files, len(keys), ranks)
    ordered = _ordered(files)
    chunks = []
    for key, stage, expert in product(keys, range(stages), range(experts)):
        first = (stage * experts + expert) * tensor_ranks
        held = files[first : first + tensor_ranks]
        models = tuple(file.model(key) for file in held)
        paths = tuple(file.path for file in held)
        chunks.append(tensor_parallel.Chunk(paths, models, first, expert, experts))
    tensors = tensor_parallel.merged_tensors(chunks, _rules(rules, files[0]))
    _check_layers(directory, files[0], tensors)
    if not ordered:
        boxes = ((tensor.shape, box) for tensor in tensors.values() for box in tensor.boxes)
        sharded = {box.path for shape, box in boxes if box_shape(box.box) != shape}
        for expert in range(experts):  # experts may have started alike on all of their ranks
            check_no_copies(
                file.state
                for file in files
                if file.expert == expert and (file.path in sharded or file.tensor_rank == 0)
            )
    mesh = None
    if len(chunks) == 1:
        mesh = DeviceMesh(range(tensor_ranks), (tensor_ranks,), axis_names=("tp",))
    else:
        # A spec counts the axes of a mesh on which all ranks hold something of a tensor.
        tensors = {name: replace(tensor, spec=None) for name, tensor in tensors.items()}
    paths = tuple(file.path for file in files)
    return ListedCatalog(MEGATRON, directory, tensors, paths, mesh, _others(files))


def _read(place: Path) -> list[_File]:
    """Return what all ranks saved, by stage, expert parallel rank and tensor parallel rank."""
    found: dict[tuple[int, int, int], str] = {}
    counts = set()
    for name in sorted(path.name for path in place.iterdir()):
        if match := MEGATRON_RANK.fullmatch(name):
            rank, *more = (int(number) for number in match.groups() if number is not None)
            stage, expert, *_ = *more, 0, 0
            counts.add(len(more))
            other = found.setdefault((stage, expert, rank), name)
            if other != name or len(counts) > 1:
                raise CheckpointError(
                    f"{place}: {min(found.values())} and {name} cannot be of one save; move those "
                    "of the other away"
                )
    (count,) = counts
    keys, paths = [], []
    # Up to the first that is missing: names may claim any number.
    ranges = (range(1 + max(key[at] for key in found)) for at in range(3))
    for stage, expert, rank in product(*ranges):
        name = "_".join((f"mp_rank_{rank:02d}", *(f"{n:03d}" for n in (stage, expert)[:count])))
        folder = file_inside(place, found.get((stage, expert, rank), name), place)
        path = file_inside(folder, MEGATRON_FILE, folder) if folder.exists() else folder
        if not path.exists():
            raise CheckpointError(f"{path}: is missing; restore it")
        keys.append((stage, expert, rank))
        paths.append(path)
    states = read_torch_states(paths, _NAMES)
    files = [_File(*key, state) for key, state in zip(keys, states, strict=True)]
    # A name with two numbers does not say whether the second is a stage or an expert parallel rank.
    staged, shared = (files[0].number(name) or 1 for name in (_STAGES, _EXPERTS))
    if count == 1 and staged == 1 < shared:
        files = [file._replace(stage=0, expert=file.stage) for file in files]
    return files


def _model_keys(files: Sequence[_File]) -> list[str]:
    """Return the keys of the models in the files, in the order of their layers."""
    keys: set[str] = set()
    for file in files:
        for name, found in file.state.tensors.items():
            if match := _MODEL.fullmatch(name):
                keys.add(match[1])
                if found.local.placed is not None:
                    raise CheckpointError(
                        f"{file.path}: tensor {name!r} is a DTensor, which Megatron does not write "
                        "in this format; save it again with torch.distributed.checkpoint"
                    )
    ordered = ["model"] if keys == {"model"} else [f"model{i}" for i in range(len(keys))]
    if not keys or set(ordered) != keys:
        raise CheckpointError(
            f"{files[0].path}: has the models {', '.join(sorted(keys)) or '(none)'}, but model, or "
            "model0, model1 and so on, are due; the file was changed, restore it"
        )
    return ordered


def _check_one_save(place: Path, files: Sequence[_File], models: int, ranks: int | None) -> None:
    """Check that all files of a save are there, by its arguments or by what the caller says."""
    if ranks is not None and ranks != len(files):
        raise CheckpointError(
            f"{place}: holds the files of {len(files)} ranks, but {ranks} are said to have written "
            "some; restore what is missing or correct the number"
        )
    first = files[0]
    stages, experts, tensor_ranks = (1 + at for at in files[-1][:3])
    due = {
        _RANKS: tensor_ranks,
        _STAGES: stages,
        _EXPERTS: experts,
        "expert_tensor_parallel_size": tensor_ranks,
        "virtual_pipeline_model_parallel_size": models,
    }
    for file in files:
        for name, count in due.items():
            if (said := file.number(name)) not in (None, count):
                raise CheckpointError(
                    f"{file.path}: was saved with {name} {said}, but the files are of {count}; "
                    "restore what is missing"
                )
        for key in ("iteration", "checkpoint_version"):
            one, other = (at.state.extras.get(key) for at in (first, file))
            if {type(one), type(other)} <= {int, float} and one != other:
                raise of_two_saves(file.path, key, other, first.path, one)
    if ranks is None and None in map(first.number, (_RANKS, _STAGES)):
        raise CheckpointError(
            f"{first.path}: does not say how many ranks there were (it has no args), so that "
            "later ones may be missing without a trace; if there were none, say so: --ranks "
            f"{len(files)} (ranks={len(files)})"
        )


def _ordered(files: Sequence[_File]) -> bool:
    """Check that files are in the order of the ranks that wrote them; False if they say none."""
    said = [rank for file in files if (rank := file.number("rank")) is not None]
    if len(said) < len(files) or not any(said):
        return False
    for (one, a), (other, b) in pairwise(zip(files, said, strict=True)):
        if a >= b:
            raise CheckpointError(
                f"{one.path}: was saved by rank {a}, and {other.path} by rank {b}; the files are "
                "swapped, copied or not of one save, restore their places"
            )
    return True


def _check_layers(place: Path, file: _File, tensors: Mapping[str, StoredTensor]) -> None:
    """Compare the layers of the one stack of a decoder with what the run was told."""
    due = file.number("num_layers")
    layers = {match.groups() for match in map(_DECODER.match, tensors) if match}
    alone = len({stack for stack, _ in layers}) == 1
    if due is not None and alone and len(layers) != due:
        raise of_two_saves(file.path, "num_layers", due, f"the stages of {place}", len(layers))


def _rules(rules: Mapping[str, object] | Path | str | None, file: _File) -> tensor_parallel.Rules:
    """Return the rules of the caller and those that are shipped for such a model."""
    shipped, gated = map(tensor_parallel.shipped_rules, ("megatron_gpt", "megatron_llama"))
    swiglu = file.argument("swiglu")
    if swiglu is True or file.argument("quick_geglu") is True:
        shipped = gated
    elif swiglu is not False:
        # Nothing is said of tensors on which the two differ.
        shipped = {name: rule for name, rule in shipped.items() if gated.get(name) == rule}
    version = file.state.extras.get("checkpoint_version", 0)
    old = isinstance(version, int | float) and version < 1
    return tensor_parallel.Rules(tensor_parallel.cut_rules(rules), shipped, old)


def _others(files: Sequence[_File]) -> dict[str, object]:
    """Return entries that are not tensors of the model; those of each rank are only counted."""
    first = files[0].state.extras
    counts: Counter[str] = Counter()
    for file in files:
        for name in (*file.state.tensors, *file.state.extras):
            if not _MODEL.fullmatch(name):
                counts[name.partition(".")[0]] += 1
            elif name.endswith(_EXTRA):
                counts[_EXTRA[1:]] += 1
    others: dict[str, object] = {}
    for key, count in counts.items():
        value = first.get(key)
        plain = plain_value(value.state if isinstance(value, Record) else value)
        said = f"{count} entries in the files of {len(files)} ranks, not read"
        others[key] = plain if key in first else OpaqueValue(said)
    return others
