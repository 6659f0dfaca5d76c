"""Megatron-LM's checkpoints, ``mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt``.

XX is the tensor parallel rank and YYY the pipeline stage, in a directory ``iter_0000123`` or
``release``. A path to the directory above means what ``latest_checkpointed_iteration.txt`` says.
Source: ``get_checkpoint_name``, ``generate_state_dict`` and ``save_checkpoint`` of
megatron/training/checkpointing.py.

**Cuts.** The files do not say how a tensor was cut; rules do (`cut_rules`), over the axis
``tp``. Those of the caller come first; then those shipped as ``megatron_gpt`` or
``megatron_llama``, by whether the arguments in the files say that feed-forward layers are gated
(``swiglu``). A tensor without a rule is refused: that it is alike on all ranks proves nothing.
Tensors that are not cut are stored by each rank, and the copies are compared.

**Layers.** Each stage counts its layers from 0; here they follow on from those of the stages
before. With a virtual pipeline (``model0``, ``model1``) the first chunks of all stages come before
the second ones. Where a name that is no layer's stands in several stages, these are copies and are
compared. Expert parallel ranks (``mp_rank_XX_YYY_ZZZ``, or ``mp_rank_XX_ZZZ`` without stages) count
their experts from 0; here they follow on, and their other tensors are copies. Tied embeddings have
a name of their own in the last stage (``output_layer.weight`` or
``word_embeddings_for_head.weight``), which is kept.

**What must be there.** The arguments in the files say how many ranks and layers there are; without
them (``ranks``) the caller has to. They also hold the global rank, by which swapped and copied
files are found. Without arguments, or where a converter has written rank 0 everywhere, copies are
found by the digests of torch's zips; **that files of equal shapes were swapped cannot be told**.
The optimizer has no names for its tensors: it is listed among `others`, as are
arguments, random states and the ``_extra_state`` of Transformer Engine. Ranks are numbered
stage by stage, without the data parallel ones between them, which save nothing.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Final

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import ListedCatalog, OpaqueValue, StoredTensor
from shardspec.checkpoint.formats.cut_rules import (
    CutRule,
    parse_rules,
    read_cut_rules,
    shipped_rules,
)
from shardspec.checkpoint.formats.megatron_model import Chunk, Rules, merged_tensors
from shardspec.checkpoint.formats.names import (
    MEGATRON,
    MEGATRON_FILE,
    MEGATRON_RANK,
)
from shardspec.checkpoint.source_files import prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.torch_files.state import (
    StateTensor,
    TorchState,
    plain_value,
    read_torch_state,
)
from shardspec.checkpoint.torch_files.unpickler import Names, Record, record_class
from shardspec.errors import CheckpointError
from shardspec.mesh import DeviceMesh

__all__ = ["open_megatron"]

_STAGES: Final = "pipeline_model_parallel_size"
_EXPERTS: Final = "expert_model_parallel_size"
_EXTRA: Final = "._extra_state"
_MODEL: Final = re.compile(r"(model\d{0,4})\.(.*)", re.DOTALL)

_NAMES: Final[Names] = {
    name: record_class(name)
    for name in (
        *(f"megatron.core.enums.{kind}" for kind in ("ModelType", "Fp8Recipe", "Fp4Recipe")),
        *(
            f"megatron.core.transformer.enums.{kind}"
            for kind in ("AttnBackend", "AttnMaskType", "AttnType", "LayerType", "ModelType")
        ),
        "megatron.core.transformer.enums.CudaGraphScope",
        *(
            f"megatron.core.rerun_state_machine.Rerun{kind}"
            for kind in ("Diagnostic", "Mode", "State")
        ),
        *("megatron.legacy.model.enums.ModelType", "megatron.model.enums.ModelType"),
        "megatron.model.enums.AttnMaskType",
        *("megatron.model.enums.PositionEmbeddingType", "megatron.enums.PositionEmbeddingType"),
        *("signal.Signals", "_io.BytesIO"),
    )
}
"""What arguments and states of Megatron hold besides; records stand for them, nothing is made."""


@dataclass(frozen=True, slots=True)
class _File:
    """What one rank saved."""

    tensor_rank: int
    stage: int
    expert: int
    state: TorchState

    @property
    def at(self) -> tuple[int, int]:
        """Its stage and expert parallel rank."""
        return self.stage, self.expert

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

    Parameters
    ----------
    directory
        With the ``mp_rank_`` directories.
    rules
        How tensors are cut, before the shipped rules: pattern to spec over the axis ``tp``, or the
        path of a TOML file.
    ranks
        Tensor parallel ranks times stages; needed where the files have no arguments.

    Raises
    ------
    CheckpointError
        If a file is missing, damaged or swapped with another, if files contradict each other, or if
        no rule says how a tensor was cut.
    """
    place = directory
    files = _read(place)
    tensor_ranks, stages, experts = _grid(files)
    keys = _model_keys(files)
    _check_arguments(place, files, keys, ranks)
    _check_iteration(files)
    ordered = _check_order(files)
    chunks = [
        Chunk(
            tuple(file.state.path for file in files if file.at == (stage, expert)),
            (stage * experts + expert) * tensor_ranks,
            tuple(file.model(key) for file in files if file.at == (stage, expert)),
            expert,
            experts,
        )
        for key, stage, expert in product(keys, range(stages), range(experts))
    ]
    tensors = merged_tensors(chunks, _rules(rules, files[0]))
    _check_layers(place, files[0], tensors)
    if not ordered:
        _check_copies(files, tensors)
    mesh = None
    if len(chunks) == 1:
        mesh = DeviceMesh(range(tensor_ranks), (tensor_ranks,), axis_names=("tp",))
    else:
        # A spec counts the axes of a mesh on which all ranks hold something of a tensor.
        tensors = {name: replace(tensor, spec=None) for name, tensor in tensors.items()}
    paths = tuple(file.state.path for file in files)
    return ListedCatalog(MEGATRON, place, tensors, paths, mesh, _others(files))


def _read(place: Path) -> list[_File]:
    """Return what all ranks saved, by stage, expert parallel rank and tensor parallel rank."""
    found: dict[tuple[int, int, int], str] = {}
    numbered: dict[int, str] = {}
    for name in sorted(path.name for path in place.iterdir()):
        match = MEGATRON_RANK.fullmatch(name)
        if match is None:
            continue
        numbers = [int(number) for number in match.groups() if number is not None]
        stage, expert, *_ = *numbers[1:], 0, 0
        key = stage, expert, numbers[0]
        other = found.setdefault(key, name)
        numbered.setdefault(len(numbers), name)
        if other != name or len(numbered) > 1:
            raise CheckpointError(
                f"{place}: {min(other, *numbered.values())} and {name} cannot be of one save; move "
                "those of the other away"
            )
    count = min(numbered)
    paths = {}
    stages, experts, ranks = (range(1 + max(key[at] for key in found)) for at in range(3))
    for key in product(stages, experts, ranks):
        folder = found.get(key)
        if folder is None:
            name = "_".join((f"mp_rank_{key[2]:02d}", *(f"{n:03d}" for n in key[: count - 1])))
            raise CheckpointError(
                f"{place}: {name} is missing, which tensor parallel rank {key[2]} of stage "
                f"{key[0]} wrote; restore it"
            )
        inside = file_inside(place, folder, place)
        path = file_inside(inside, MEGATRON_FILE, inside)
        if not path.exists():
            raise CheckpointError(f"{path}: is missing; restore it")
        paths[key] = path
    look = partial(read_torch_state, more=_NAMES)
    with prefetch_map(paths.values(), look, prefetch_depth(place)) as states:
        files = [
            _File(rank, stage, expert, state)
            for (stage, expert, rank), state in zip(paths, states, strict=True)
        ]
    # A name with two numbers does not say whether the second is a stage or a share of the experts.
    staged, shared = (files[0].number(name) or 1 for name in (_STAGES, _EXPERTS))
    if count == 2 and staged == 1 < shared:
        files = [_File(file.tensor_rank, 0, file.stage, file.state) for file in files]
    return files


def _grid(files: list[_File]) -> tuple[int, int, int]:
    """Return how many tensor parallel ranks, stages and expert parallel ranks there are."""
    last = files[-1]
    return last.tensor_rank + 1, last.stage + 1, last.expert + 1


def _model_keys(files: list[_File]) -> list[str]:
    """Return the keys of the models in the files, in the order of their layers."""
    keys: set[str] = set()
    for file in files:
        for name, found in file.state.tensors.items():
            match = _MODEL.fullmatch(name)
            if match is not None:
                keys.add(match[1])
                if found.local.placed is not None:
                    raise CheckpointError(
                        f"{file.state.path}: tensor {name!r} is a DTensor, which Megatron does not "
                        "write in this format; save it again with torch.distributed.checkpoint"
                    )
    ordered = ["model"] if keys == {"model"} else [f"model{i}" for i in range(len(keys))]
    if not keys or set(ordered) != keys:
        raise CheckpointError(
            f"{files[0].state.path}: has the models {', '.join(sorted(keys)) or '(none)'}, but "
            "model, or model0, model1 and so on, are due; the file was changed, restore it"
        )
    return ordered


def _check_arguments(
    place: Path,
    files: list[_File],
    keys: list[str],
    ranks: int | None,
) -> None:
    """Compare what is there with what the run was told, or with what the caller says."""
    tensor_ranks, stages, experts = _grid(files)
    if ranks is not None and ranks != len(files):
        raise CheckpointError(
            f"{place}: holds the files of {len(files)} ranks, but {ranks} are said to have written "
            "some; restore what is missing or correct the number"
        )
    for file in files:
        for name, count, plural in (
            ("tensor_model_parallel_size", tensor_ranks, "tensor parallel ranks"),
            (_STAGES, stages, "pipeline stages"),
            (_EXPERTS, experts, "expert parallel ranks"),
            ("expert_tensor_parallel_size", tensor_ranks, "tensor parallel ranks of experts"),
            ("virtual_pipeline_model_parallel_size", len(keys), "models in a file"),
        ):
            said = file.number(name)
            if said is not None and said != count:
                raise CheckpointError(
                    f"{file.state.path}: was saved with {name} {said}, but {count} {plural} are "
                    "there; restore what is missing"
                )
    told = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline"))
    if ranks is None and None in map(files[0].number, told):
        raise CheckpointError(
            f"{files[0].state.path}: does not say how many ranks there were (it has no args), so "
            "that later ones may be missing without a trace; if there were none, say so: --ranks "
            f"{len(files)} (ranks={len(files)})"
        )


def _check_iteration(files: list[_File]) -> None:
    """Check that all files are of one iteration and version, where they say it."""
    first = files[0]
    for file, key in product(files, ("iteration", "checkpoint_version")):
        one, other = (f.state.extras.get(key) for f in (first, file))
        if {type(one), type(other)} <= {int, float} and one != other:
            raise CheckpointError(
                f"{first.state.path}: is of {key.replace('_', ' ')} {one}, but {file.state.path} "
                f"of {other}; the files are not of one save, restore those of one"
            )


def _check_order(files: list[_File]) -> bool:
    """Check that files are in the order of the ranks that wrote them; False if they say none."""
    said = [file.number("rank") for file in files]
    known = [rank for rank in said if rank is not None]
    if len(known) < len(files) or not any(known):
        return False
    for (one, a), (other, b) in pairwise(zip(files, known, strict=True)):
        if a >= b:
            raise CheckpointError(
                f"{one.state.path}: was saved by rank {a}, and {other.state.path} by rank {b}; the "
                "files are swapped, copied or not of one save, restore their places"
            )
    return True


def _check_copies(files: list[_File], tensors: Mapping[str, StoredTensor]) -> None:
    """Check that no two files hold the same parts of a model, by the digests of torch's zips."""
    boxes = ((tensor.shape, stored) for tensor in tensors.values() for stored in tensor.boxes)
    cut = {stored.path for shape, stored in boxes if box_shape(stored.box) != shape}
    seen: dict[tuple[object, ...], _File] = {}
    for file in files:
        held = [
            (name, found.local.shape, found.place.digest.crc32)
            for name, found in file.state.tensors.items()
            if _MODEL.fullmatch(name) and found.place.digest is not None
        ]
        # Experts may have started alike on all expert parallel ranks.
        first = seen.setdefault((file.expert, frozenset(held)), file)
        # Ranks of one stage are alike where no rule cuts anything.
        if held and first is not file and (first.stage != file.stage or file.state.path in cut):
            raise CheckpointError(
                f"{first.state.path} and {file.state.path} hold the same parts of the model; one "
                "is a copy in the place of another rank's file, restore that"
            )


def _check_layers(place: Path, file: _File, tensors: Mapping[str, StoredTensor]) -> None:
    """Compare the layers of the one stack of a decoder with what the run was told."""
    due = file.number("num_layers")
    parts = (name.partition(".layers.") for name in tensors)
    layers = {
        (stack, rest.partition(".")[0])
        for stack, found, rest in parts
        if found and stack.split(".")[-1] in ("decoder", "encoder", "transformer")
    }
    alone = len({stack for stack, _ in layers}) == 1
    if due is not None and alone and len(layers) != due:
        raise CheckpointError(
            f"{place}: the stages hold {len(layers)} layers in all, but the run had num_layers "
            f"{due}; the files are not of one save"
        )


def _rules(rules: Mapping[str, object] | Path | str | None, file: _File) -> Rules:
    """Return the rules of the caller and those that are shipped for such a model."""
    own: Mapping[str, CutRule] = {}
    if isinstance(rules, Mapping):
        own = parse_rules(rules, "rules")
    elif rules is not None:
        own = read_cut_rules(Path(rules))
    plain, gated = shipped_rules("megatron_gpt"), shipped_rules("megatron_llama")
    match file.argument("swiglu"), file.argument("quick_geglu"):
        case (True, _) | (_, True):
            shipped = gated
        case False, _:
            shipped = plain
        case _:
            # Nothing is said of tensors on which the two differ.
            shipped = {name: rule for name, rule in plain.items() if gated.get(name) == rule}
    version = file.state.extras.get("checkpoint_version", 0)
    return Rules(own, shipped, isinstance(version, int | float) and version < 1)


def _others(files: list[_File]) -> dict[str, object]:
    """Return what is no tensor of the model; what ranks hold of their own is counted."""
    counts = Counter(
        _EXTRA[1:] if _MODEL.fullmatch(name) else name.partition(".")[0]
        for file in files
        for name in (*file.state.tensors, *file.state.extras)
        if name.endswith(_EXTRA) or not _MODEL.fullmatch(name)
    )
    first = files[0].state.extras
    others: dict[str, object] = {}
    for key, count in counts.items():
        value = first.get(key)
        others[key] = plain_value(value.state if isinstance(value, Record) else value)
        if key not in first:
            others[key] = OpaqueValue(
                f"{count} entries in the files of {len(files)} ranks, not read"
            )
    return others
