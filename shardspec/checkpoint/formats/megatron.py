"""Reads Megatron-LM's checkpoints, ``mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt``.

XX is the tensor parallel rank, YYY the pipeline stage and ZZZ the expert parallel rank; without
stages, YYY is omitted. Tensors are sharded by the rules of `families/rank_rules.py`. The run's
arguments record whether feed-forward layers are gated. Source: megatron/training/checkpointing.py.

With a virtual pipeline (``model0``, ``model1``) the layers of ``model0`` of all stages come before
those of ``model1``. The arguments record the numbers of ranks and layers; without arguments the
caller must give ``ranks``. The recorded global rank reveals swapped and copied files. Without it
copies are detected by the digests of torch's zips, but **swapped files of equal shapes cannot be
detected**. Tensors of the optimizer have no names in the files, so they are not read.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Final, TypeAlias

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import Catalog, OpaqueValue
from shardspec.checkpoint.formats import Format, Newest, OpenOptions, cut_rules, named_by, only_one
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.torch_files.dcp_metadata import METADATA_NAME
from shardspec.checkpoint.torch_files.states import (
    TorchState,
    check_no_copies,
    mismatch_error,
    plain_value,
    read_torch_states,
)
from shardspec.checkpoint.torch_files.unpickler import Record
from shardspec.errors import CheckpointError
from shardspec.families.rank_rules import megatron_rules
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import Argument

_FILE: Final = "model_optim_rng.pt"
_TRACKER: Final = "latest_checkpointed_iteration.txt"
_RANK: Final = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_ITERATION: Final = re.compile(r"iter_\d{7,12}|release")
_NUMBERED: Final = re.compile(r"iter_\d{7,12}")
_VERL_STEP: Final = "global_step_"
"""Start of the names of checkpoints in a run of verl, which has a tracker like Megatron's."""
_RANKS: Final = "tensor_model_parallel_size"
_STAGES: Final = "pipeline_model_parallel_size"
_EXPERTS: Final = "expert_model_parallel_size"
_COMMON: Final = "common.pt"
"""File of Megatron-core with the arguments of the run, beside torch's metadata."""
_EXTRA: Final = "._extra_state"
_MODEL: Final = re.compile(r"(model\d{0,4})\.(.*)", re.DOTALL)
_DECODER: Final = re.compile(
    r"((?:.*?\.)?(?:decoder|encoder|transformer))\.layers\.([^.]*)", re.DOTALL
)

_Files: TypeAlias = Mapping[tuple[int, int, int], TorchState]
"""(Stage, expert parallel rank, tensor parallel rank) -> file, in this order."""


def _argument(state: TorchState, name: str) -> object:
    """Return a command line argument of the run, which its files record; None if absent."""
    args = state.extras.get("args")
    return args.get(name) if isinstance(args, Record) else None


def _number(state: TorchState, name: str) -> int | None:
    """Return a recorded argument of the run; None unless it is a whole number."""
    value = _argument(state, name)
    return value if type(value) is int else None


def run_facts(source: Catalog) -> dict[str, int]:
    """Return the sizes that a Megatron run recorded: ``{"iteration": 10, ...}``, or {}."""
    first = next(iter(source.files), source.directory)
    if first.name == METADATA_NAME:
        first = file_inside(first.parent, _COMMON, first.parent)
    if first.name not in (_FILE, _COMMON) or not first.exists():
        return {}
    try:
        (state,) = read_torch_states([first])
    except CheckpointError:
        return {}  # the file is copied unread
    iteration = state.extras.get("iteration")
    facts = {"iteration": iteration if type(iteration) is int else None}
    facts |= {"tp": _number(state, _RANKS), "pp": _number(state, _STAGES)}
    facts |= {"ep": _number(state, _EXPERTS)}
    return {key: number for key, number in facts.items() if number is not None}


def _open(directory: StoragePath, options: OpenOptions) -> Catalog:
    """Return the catalog of a Megatron checkpoint; reads the pickles of all ranks, no data."""
    files = _read(directory)
    states = list(files.values())
    stages, experts, tensor_ranks = (1 + last for last in max(files))
    models = _models(states)
    expected = {
        _RANKS: tensor_ranks,
        _STAGES: stages,
        _EXPERTS: experts,
        "expert_tensor_parallel_size": tensor_ranks,
        "virtual_pipeline_model_parallel_size": len(models),
    }
    _check_one_save(directory, states, expected, options.ranks)
    ordered = _ordered(states)
    chunks = []
    for model, stage, expert in product(models, range(stages), range(experts)):
        first = (stage * experts + expert) * tensor_ranks
        chunk_states = [
            state._replace(
                tensors={
                    name.removeprefix(f"{model}."): tensor
                    for name, tensor in state.tensors.items()
                    if name.startswith(f"{model}.") and not name.endswith(_EXTRA)
                }
            )
            for state in states[first : first + tensor_ranks]
        ]
        chunks.append(cut_rules.ModelChunk(chunk_states, first, expert, experts))
    tensors = cut_rules.merged_tensors(chunks, _rules(options.source_rules, states[0]))
    layers = {match.groups() for match in map(_DECODER.match, tensors) if match}
    num_layers = _number(states[0], "num_layers")
    if num_layers not in (None, len(layers)) and len({stack for stack, _ in layers}) == 1:
        where = f"the stages of {directory}"
        raise mismatch_error(states[0].path, "num_layers", num_layers, where, len(layers))
    if not ordered:
        boxes = ((tensor.shape, box) for tensor in tensors.values() for box in tensor.boxes)
        sharded = {box.path for shape, box in boxes if box_shape(box.box) != shape}
        for chosen in range(experts):  # experts may have equal weights on all of their ranks
            check_no_copies(
                state
                for (_, expert, rank), state in files.items()
                if expert == chosen and (state.path in sharded or rank == 0)
            )
    mesh = None
    if len(chunks) == 1:
        mesh = DeviceMesh(range(tensor_ranks), (tensor_ranks,), axis_names=("tp",))
    else:
        # A spec needs a mesh of all ranks, but only the ranks of one stage have the tensor.
        tensors = {name: replace(tensor, spec=None) for name, tensor in tensors.items()}
    paths = [state.path for state in states]
    return Catalog(FORMAT.called, directory, tensors, paths, mesh, _extras(states))


def _read(place: StoragePath) -> _Files:
    """Return the files of all ranks; raises CheckpointError if they are of several saves."""
    folders: dict[tuple[int, int, int], str] = {}
    counts = set()
    for name in place.names():
        if match := _RANK.fullmatch(name):
            rank, *more = (int(number) for number in match.groups() if number is not None)
            stage, expert, *_ = *more, 0, 0
            counts.add(len(more))
            first_name = folders.setdefault((stage, expert, rank), name)
            if first_name != name or len(counts) > 1:
                raise CheckpointError(
                    f"{place}: {min(folders.values())} and {name} are of different saves; move the "
                    "files of one save away"
                )
    (count,) = counts
    paths = {}
    # Stops at the first missing file: a name may claim any number.
    ranges = (range(1 + max(numbers)) for numbers in zip(*folders, strict=True))
    for stage, expert, rank in product(*ranges):
        name = "_".join((f"mp_rank_{rank:02d}", *(f"{n:03d}" for n in (stage, expert)[:count])))
        folder = file_inside(place, folders.get((stage, expert, rank), name), place)
        path = file_inside(folder, _FILE, folder) if folder.exists() else folder
        if not path.exists():
            raise CheckpointError(f"{path}: is missing; restore it")
        paths[stage, expert, rank] = path
    states = read_torch_states([*paths.values()])
    # The second of two numbers in a name may be a stage or an expert parallel rank.
    staged, shared = (_number(states[0], name) or 1 for name in (_STAGES, _EXPERTS))
    if count == 1 and staged == 1 < shared:
        paths = {(0, stage, rank): path for (stage, _, rank), path in paths.items()}
    return dict(zip(paths, states, strict=True))


def _models(states: Sequence[TorchState]) -> list[str]:
    """Return the keys of a file's parts of the model: ``model``, or ``model0``, ``model1``..."""
    keys: set[str] = set()
    for state in states:
        for name, tensor in state.tensors.items():
            if match := _MODEL.fullmatch(name):
                keys.add(match[1])
                if tensor.local.placed is not None:
                    raise CheckpointError(
                        f"{state.path}: tensor {name!r} is a DTensor, which Megatron does not "
                        "write in this format; save it again with torch.distributed.checkpoint"
                    )
    ordered = ["model"] if keys == {"model"} else [f"model{i}" for i in range(len(keys))]
    if not keys or set(ordered) != keys:
        raise CheckpointError(
            f"{states[0].path}: has the models {', '.join(sorted(keys)) or '(none)'}, but should "
            "have model, or model0, model1 and so on; the file was changed, restore it"
        )
    return ordered


def _check_one_save(
    place: StoragePath, states: Sequence[TorchState], expected: Mapping[str, int], ranks: int | None
) -> None:
    """Check that a file of every rank exists, for the recorded sizes or the caller's `ranks`."""
    if ranks not in (None, len(states)):
        remedy = "restore the others, or " if ranks and ranks > len(states) else ""
        raise CheckpointError(
            f"{place}: contains the files of {len(states)} ranks, but {ranks} are expected; "
            f"{remedy}correct the number"
        )
    first = states[0]
    for state in states:
        for name, count in expected.items():
            if (recorded := _number(state, name)) not in (None, count):
                raise CheckpointError(
                    f"{state.path}: was saved with {name} {recorded}, but the files are of {count}"
                    "; restore what is missing"
                )
        for key in ("iteration", "checkpoint_version"):
            first_value, value = first.extras.get(key), state.extras.get(key)
            if {type(first_value), type(value)} <= {int, float} and first_value != value:
                raise mismatch_error(state.path, key, value, first.path, first_value)
    if ranks is None and None in (_number(first, _RANKS), _number(first, _STAGES)):
        raise CheckpointError(
            f"{first.path}: does not say how many ranks there were (it has no args), so files of "
            "later ranks may be missing; if none are, confirm it with ",
            Argument("ranks", len(states)),
        )


def _ordered(states: Sequence[TorchState]) -> bool:
    """Check that the ranks recorded in files ascend; return False if the files record none."""
    ranks = [rank for state in states if (rank := _number(state, "rank")) is not None]
    if len(ranks) < len(states) or not any(ranks):
        return False
    for (earlier, a), (later, b) in pairwise(zip(states, ranks, strict=True)):
        if a >= b:
            raise CheckpointError(
                f"{earlier.path}: was saved by rank {a}, and {later.path} by rank {b}; files are "
                "swapped, copied or of different saves; restore them"
            )
    return True


def _rules(rules: cut_rules.CutRules, state: TorchState) -> cut_rules.SourceRules:
    """Return the rules that say how tensors are sharded: the caller's, then those for Megatron."""
    shipped, gated = (cut_rules.cut_rules(megatron_rules(gated=halves)) for halves in (False, True))
    swiglu = _argument(state, "swiglu")
    if swiglu is True or _argument(state, "quick_geglu") is True:
        shipped = gated
    elif swiglu is not False:
        # Tensors for which the two differ have no rule.
        shipped = {name: rule for name, rule in shipped.items() if gated.get(name) == rule}
    version = state.extras.get("checkpoint_version", 0)
    old = isinstance(version, int | float) and version < 1
    return cut_rules.SourceRules(cut_rules.cut_rules(rules), shipped, old)


def _extras(states: Sequence[TorchState]) -> dict[str, object]:
    """Return the first file's values that are not tensors; of other entries only their number."""
    counts: Counter[str] = Counter()
    for state in states:
        for name in (*state.tensors, *state.extras):
            if not _MODEL.fullmatch(name):
                counts[name.partition(".")[0]] += 1
            elif name.endswith(_EXTRA):
                counts[_EXTRA[1:]] += 1
    extras: dict[str, object] = {}
    for key, count in counts.items():
        text = f"{count} entries in the files of {len(states)} ranks, not read"
        extras[key] = OpaqueValue(text)
        if key in states[0].extras:
            value = states[0].extras[key]
            if isinstance(value, Record) and isinstance(value.state, dict):  # arguments
                value = value.state
            extras[key] = plain_value(value, states[0].archive)
    return extras


def _recognizes(names: Collection[str]) -> bool:
    of_rank = any(_RANK.fullmatch(name) or _NUMBERED.fullmatch(name) for name in names)
    return of_rank or _TRACKER in names


def _part_of(path: StoragePath) -> StoragePath | None:
    if path.name == _FILE and _RANK.fullmatch(path.parent.name):
        return path.parent.parent
    return path.parent if _recognizes((path.name,)) else None


def _newest(place: StoragePath, names: Sequence[str]) -> Newest | None:
    """Return the checkpoint that a run's tracker file names, or the only one; None without one."""
    if any(map(_RANK.fullmatch, names)):
        return None
    if _TRACKER in names:
        return named_by(place / _TRACKER, names, _folders)
    checkpoints = [name for name in names if _ITERATION.fullmatch(name)]
    return None if checkpoints in ([], ["release"]) else only_one(place, checkpoints, _TRACKER)


def _folders(text: str) -> list[str]:
    """Return the directory names that a tracker's text may mean: "10" means `iter_0000010`."""
    if text.isdecimal() and text.isascii():
        return [f"iter_{int(text):07d}", f"{_VERL_STEP}{int(text)}"]
    return [text] if _ITERATION.fullmatch(text) else []


FORMAT: Final = Format(
    name="megatron",
    title="Megatron-LM",
    recognizes=_recognizes,
    open=_open,
    instead="Megatron-core loads the format 'dcp', as torch_dist",
    part_of=_part_of,
    newest=_newest,
    keeps="notes",
    nested=True,
    takes=("ranks", "source_rules"),
    known_by="mp_rank_00",
)
