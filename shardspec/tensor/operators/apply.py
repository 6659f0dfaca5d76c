"""Runs torch functions on DTensors: `x + y` on each device's shards, `x.sort()` after a gather.

`shardspec.tensor.operators.rules` lists the functions that run on shards, or by the rules of
torch's own DTensor. All others gather their arguments, and their results are replicated. A process
that holds the shards of all devices computes on whole tensors; torch's rules only give the layouts
of results. No value of an element decides, so ranks that make the same call choose alike.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from shardspec.errors import LayoutError, LossyConversionError
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.tensor.operators.call import REFUSALS, Call, leaves_of
from shardspec.tensor.operators.lookups import LOOKUPS
from shardspec.tensor.operators.rules import (
    ALONG,
    OF_DEVICE,
    OF_MEMORY,
    OF_SHAPE,
    POINTWISE,
    RANDOM,
    VIEWS,
    Named,
    are_alike,
    facts_of_layout,
    named,
    torch_is_right,
)
from shardspec.tensor.operators.tensor import TensorLike
from shardspec.tensor.run import copies_of
from shardspec.tensor.shards import check_copies, is_torch_dtensor
from shardspec.tracing import LOGGER

# Importing torch's DTensor takes as long as the rest of torch, so it is imported when needed.
if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor

_OPERANDS_OF_WHERE: Final = 3
"""Number of arguments of `torch.where` that selects values; with fewer it returns indices."""
_DROPOUT_PLACE: Final = 4
"""The position of the probability among the arguments of attention."""
_MAY_RETURN_ARGUMENT: Final = ("to", "type_as", "contiguous", "bool", "float", "double", "half")
"""Functions that return their argument if there is nothing to do."""
_LOSSES: Final = frozenset({torch.ops.aten._log_softmax.default})
"""Operations that torch computes in another way in its `loss_parallel`."""
_KEYS: Final = (int, slice, type(None), type(...))
"""Types that may index a DTensor of torch."""


def apply(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> Any:  # noqa: ANN401
    """Carry out a torch function on DTensors, which may be nested in its arguments."""
    leaves, structure = leaves_of(args, kwargs)
    names = named(function)
    first = next(leaf for leaf in leaves if isinstance(leaf, TensorLike))
    written = (
        tree_leaves([args[:1] if names.writes else (), kwargs.get("out")])
        if (names.writes or kwargs)
        else ()
    )
    for leaf in written:
        if isinstance(leaf, TensorLike) or is_torch_dtensor(leaf):
            continue
        if not isinstance(leaf, torch.Tensor):
            continue
        raise LayoutError(
            f"{names.shown} would write a DTensor to a plain tensor; make this a DTensor too, by "
            "distribute_tensor, or take to_global() of the other"
        )
    call = Call.of(function, names, [_taken(names, x, first) for x in leaves], structure)
    if names.plain in OF_MEMORY:
        raise LayoutError(
            f"{names.shown}: a sharded tensor has no memory of its own; use to_local()"
        )
    if names.plain in OF_SHAPE:
        return call.on({id(first): torch.empty(first.shape, dtype=first.dtype, device="meta")})
    if names.plain in OF_DEVICE:
        return call.on({id(first): next(iter(first.shards.values()), torch.empty(0))})
    for leaf in written:
        if isinstance(leaf, TensorLike):
            _check_writable(call, leaf)
    lookup = LOOKUPS.get(function)
    if lookup is not None:
        result = lookup(*call.arguments)
        if result is not None:
            return result
    if _shards_correspond(call):
        return _on_shards(call)
    if not first.is_simulated and _torch_is_right(call):
        return _by_torch(call)
    if first.is_simulated and _torch_is_right(call):
        return _in_whole(call)
    if not names.writes and any(facts_of_layout(layout).pending for layout in call.layouts):
        return _with_sums_finished(call)
    return _in_whole(call)


def _with_sums_finished(call: Call) -> Any:  # noqa: ANN401
    """Finish pending reductions, and call the function again if torch's rule fits then."""
    done = {
        id(t): t.redistribute(t.layout.spec.without_partial())
        for t in call.tensors
        if t.layout.spec.partials
    }
    if "out" in call.arguments[1]:
        return _in_whole(call)
    before = {key: finished._version for key, finished in done.items()}
    again = Call.of(
        call.function,
        call.names,
        [done.get(id(leaf), leaf) for leaf in call.leaves],
        call.structure,
    )
    result = apply(call.function, *again.arguments)
    owners = {id(done[id(t)]): t for t in call.tensors if id(t) in done}
    for tensor in owners.values():
        finished = done[id(tensor)]
        if finished._version != before[id(tensor)]:  # a flag as inplace=True asked for it
            _check_writable(call, tensor)
            tensor._write(_sharded(_whole(finished), tensor, tensor.layout).shards)

    def ours(leaf: object) -> object:
        if id(leaf) in owners:
            return owners[id(leaf)]
        if isinstance(leaf, TensorLike) and leaf._part_of is not None:
            tensor = owners.get(id(leaf._part_of.base))
            if tensor is not None:
                leaf._become_part_of(tensor)
        return leaf

    return tree_map(ours, result)


# --- which arguments are taken ---


def _taken(names: Named, leaf: object, first: TensorLike) -> object:
    """Return an argument for torch: a DTensor unchanged, a plain scalar tensor as a replicated one.

    Raises an error for a DTensor on another mesh than `first`, and for a plain tensor with several
    elements, since ranks may have different ones.
    """
    mesh, other = first.layout.mesh, ""
    if isinstance(leaf, TensorLike):
        if leaf.layout.mesh != mesh:
            other = f"on mesh {leaf.layout.mesh} of ids {leaf.layout.mesh.ids}"
        elif leaf.communicator.addressable != first.communicator.addressable:
            raise LayoutError(
                f"{names.shown}: one tensor on mesh {mesh} is of a job, and another is simulated "
                "in this process; give both one communicator"
            )
    elif is_torch_dtensor(leaf):
        from shardspec.interop.torch_dtensor import in_our_words

        torch_mesh = None if first.is_simulated else mesh.to_torch(leaf.device_mesh.device_type)
        if leaf.device_mesh != torch_mesh:
            other = f"is a torch DTensor on {leaf.device_mesh}"
        else:
            return first._wrap(in_our_words(leaf))
    elif isinstance(leaf, torch.Tensor):
        if leaf.numel() != 1:
            raise LayoutError(
                f"{names.shown}: a plain tensor of shape {tuple(leaf.shape)} is mixed with a "
                "DTensor; shard or replicate it first, by distribute_tensor"
            )
        copies = dict.fromkeys(first.communicator.addressable, leaf)
        check_copies(first.communicator, copies, f"{names.shown}: a plain tensor of one element")
        if leaf.dim() or (leaf.requires_grad and torch.is_grad_enabled()):
            return _replicated(leaf, first)
    if other:
        raise LayoutError(
            f"{names.shown}: one tensor is on mesh {mesh} of ids {mesh.ids}, another {other}; "
            "bring them to one mesh first, by redistribute(device_mesh=)"
        )
    return leaf


def _check_writable(call: Call, tensor: TensorLike) -> None:
    """Raise `LayoutError` if a write to the tensor would be lost, or would lose a gradient."""
    tensor._check_current()
    part, name = tensor._part_of, call.names.shown
    if torch.is_grad_enabled() and tensor._is_leaf_with_gradient():
        raise LayoutError(
            f"{name} would write to a leaf that requires a gradient; do it under "
            "torch.no_grad(), or without writing in place"
        )
    while part is not None:
        if part.is_copy:
            raise LayoutError(
                f"{name} would write to a part that was gathered into a copy, not to the tensor "
                "itself; assign to the part, as in t[1] = value, or redistribute first"
            )
        if torch.is_grad_enabled() and (call.is_tracked or part.base.requires_grad):
            raise LayoutError(
                f"{name} would write to a part of a tensor whose gradient is tracked; assign to "
                "the part, as in t[1] = value, or write under torch.no_grad()"
            )
        part = part.base._part_of


# --- on shards ---


def _shards_correspond(call: Call) -> bool:
    """Return True if calling the function on each device's shards gives the right shards."""
    plain, tensors = call.names.plain, call.tensors
    whole = all(facts_of_layout(layout).is_whole for layout in call.layouts)
    if plain in VIEWS and whole and not call.names.writes:
        return True  # views of replicas are views on each device
    if plain in ALONG:
        args, kwargs = call.arguments
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        layout = tensors[0].layout
        return (
            len(tensors) == 1
            and isinstance(dim, int)
            and -len(layout.global_shape) <= dim < len(layout.global_shape)
            and not layout.spec.partials
            and not layout.spec.dim_specs[dim].axes
        )
    if plain not in POINTWISE or "out" in call.arguments[1]:
        return False
    if plain == "where" and len(call.leaves) < _OPERANDS_OF_WHERE:
        return False
    if any(t.layout.spec.partials for t in tensors):
        return False
    numbers = [t for t in tensors if not t.layout.global_shape and not t.requires_grad]
    sharded = tuple(t.layout for t in tensors if t.layout.global_shape) or call.layouts
    return are_alike(sharded) and len(sharded) + len(numbers) >= len(tensors)


def _on_shards(call: Call) -> Any:  # noqa: ANN401
    """Call the function on the shards of each device; results have the layout of the arguments."""
    tensors, writes = call.tensors, call.names.writes
    first = max(tensors, key=lambda t: len(t.layout.global_shape))
    like, devices = first.layout, first.communicator.addressable
    # A tracked write goes to a copy, and from there to the shard, which then has its history.
    copies = call.may_write and not (writes and not call.is_tracked)
    seed, returned, given = _seed(call), [], []
    for device in devices or (None,):
        shards = {id(tensor): _shard(tensor, device) for tensor in tensors}
        if copies:
            shards = {key: shard.clone() for key, shard in shards.items()}
        with _drawing(call, None if seed is None else seed + _place(like, device)):
            returned.append(tree_flatten(call.on(shards)))
        given.append(shards)

    def ours(leaves: tuple[object, ...]) -> object:
        if not isinstance(leaves[0], torch.Tensor):
            return leaves[0]
        owner = next((t for t in tensors if given[0][id(t)] is leaves[0]), None)
        if owner is None:
            shape = tuple(leaves[0].shape)
            spec = ShardingSpec(len(shape)) if facts_of_layout(like).is_whole else like.spec
            shape = shape if facts_of_layout(like).is_whole else like.global_shape
            layout = Layout(like.mesh, spec, shape, leaves[0].dtype)
            shards: Any = dict(zip(devices, leaves, strict=False))
            made = first._made(layout, first.communicator, shards)
            if call.names.plain in VIEWS and _is_alias(leaves[0], given[0][id(first)]):
                made._become_part_of(first)
            return made
        if writes or (copies and call.names.plain not in _MAY_RETURN_ARGUMENT):
            if not writes:
                _check_writable(call, owner)
            owner._write({d: g[id(owner)] for d, g in zip(devices, given, strict=False)})
        return owner

    columns = zip(*(leaves for leaves, _ in returned), strict=True)
    return tree_unflatten(list(map(ours, columns)), returned[0][1])


def _shard(tensor: TensorLike, device: int | None) -> torch.Tensor:
    """Return the shard of a device; on a rank outside the mesh, a tensor without data (meta)."""
    if device is not None:
        return tensor.shards[device]
    shape = tensor.layout.local_shape(tensor.layout.mesh.ids[0])
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


# --- by torch's rules ---


def _torch_is_right(call: Call) -> bool:
    """Return True if torch's own DTensor would compute this call correctly."""
    plain, (args, kwargs) = call.names.plain, call.arguments
    if "out" in kwargs or (call.names.writes and plain not in POINTWISE):
        return False
    if plain == "where" and len(call.leaves) < _OPERANDS_OF_WHERE:
        return False
    if plain == "getitem" and not all(
        isinstance(key, _KEYS) and not isinstance(key, bool)
        for key in (args[1] if isinstance(args[1], tuple) else args[1:])
    ):
        return False
    if plain == "cross_entropy" and _is_under_loss_parallel():
        return len(args) > 1 and _is_loss_parallel(args[0].layout, args[1].layout)
    return torch_is_right(plain, call.layouts)


def _is_under_loss_parallel() -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    handlers = {} if module is None else module.DTensor._op_dispatcher._custom_op_handlers
    return bool(handlers.keys() & _LOSSES)


def _is_loss_parallel(logits: Layout, target: Layout) -> bool:
    """Return True if logits are sharded by class alone, as torch's `loss_parallel` requires."""
    classes = 1 if len(logits.global_shape) > 1 else 0
    cut, facts = logits.spec.dim_specs[classes].axes, facts_of_layout(logits)
    return (
        len(cut) == 1
        and logits.spec.axes == cut
        and facts.is_even
        and facts.in_torch
        and facts_of_layout(target).is_whole
    )


def _by_torch(call: Call) -> Any:  # noqa: ANN401
    """Call the function on torch's DTensors of the same shards; all ranks do so at once."""
    from torch.distributed.tensor.experimental import implicit_replication

    first, tensors = call.tensors[0], call.tensors
    theirs = {id(tensor): tensor.to_torch() for tensor in tensors}
    written = tree_leaves(call.arguments[0][:1])[0] if call.names.writes else None
    copies = written is not None and call.is_tracked
    if copies:
        copy: Any = theirs[id(written)].clone()
        theirs[id(written)] = copy
    seed = _seed(call)
    place = _place(first.layout, next(iter(first.communicator.addressable), None))
    drawn = None if seed is None else seed + place
    try:
        with ExitStack() as stack:
            stack.enter_context(implicit_replication())  # of plain tensors that torch makes
            if call.names.plain == "scaled_dot_product_attention" and first.device.type == "cpu":
                # DTensor has no rule for the fused CPU kernel, but has rules for matrix products.
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_drawing(call, drawn))
            result = call.on(theirs)
        if isinstance(result, torch.Tensor):
            return _ours(call, result, theirs, copies)
        return tree_map(lambda leaf: _ours(call, leaf, theirs, copies), result)
    except (*REFUSALS, LossyConversionError, LayoutError):
        from shardspec.tensor.operators.propagate import layouts_by_torch

        if layouts_by_torch(call, first.to_torch().device_mesh) is not None:
            raise  # values are the reason, not layouts
    return _in_whole(call)


def _ours(call: Call, leaf: object, theirs: Mapping[int, "TorchDTensor"], copies: bool) -> object:
    """Convert a result of torch's DTensor to a DTensor of shardspec."""
    if not is_torch_dtensor(leaf):
        return leaf
    from shardspec.interop.torch_dtensor import in_our_words

    first, tensors = call.tensors[0], call.tensors
    owner = next((tensor for tensor in tensors if theirs[id(tensor)] is leaf), None)
    if owner is None:
        made = first._wrap(in_our_words(leaf))
        if call.names.plain in VIEWS:
            for tensor in tensors:
                if _is_alias(leaf, theirs[id(tensor)]):
                    made._become_part_of(tensor)
        kinds = facts_of_layout(made.layout).pending
        if kinds <= {"sum", "avg"}:
            return made
        return made.redistribute(made.layout.spec.without_partial())
    if call.names.writes:
        owner._write(first._wrap(leaf).shards if copies else {})
    return owner


def _is_alias(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Return True if a result shares memory with an argument, as torch sees it."""
    # torch has no public function for this: addresses do not tell empty or meta tensors apart.
    return bool(torch._C._is_alias_of(view, base))  # type: ignore[attr-defined]


# --- on gathered tensors ---


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Records which of the gathered tensors a function writes to."""

    def __init__(self, call: Call, wholes: Mapping[int, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.written: dict[int, TensorLike] = {}
        self._call = call
        self._owners = {_place_in_memory(wholes[id(tensor)]): tensor for tensor in call.tensors}

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        _types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operation and record its writes; `LayoutError` if a write is refused."""
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            # The schema of batch norm does not say that it writes to its statistics.
            statistics = argument.name in ("running_mean", "running_var") and given.get("training")
            if statistics or (argument.alias_info is not None and argument.alias_info.is_write):
                for leaf in tree_leaves(given.get(argument.name)):
                    if isinstance(leaf, torch.Tensor) and leaf.numel():
                        owner = self._owners.get(_place_in_memory(leaf))
                        if owner is not None and id(owner) not in self.written:
                            _check_writable(self._call, owner)
                            self.written[id(owner)] = owner
        return func(*args, **(kwargs or {}))


def _place_in_memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if not tensor.is_meta else id(tensor)


def _in_whole(call: Call) -> Any:  # noqa: ANN401
    """Gather the arguments and call the function on them; results are replicated."""
    tensors = call.tensors
    first = tensors[0]
    layouts: Sequence[Layout | None] | None = None
    if first.is_simulated and _torch_is_right(call):
        from shardspec.tensor.operators.propagate import layouts_by_torch

        layouts = layouts_by_torch(call)
    if layouts is None and LOGGER.isEnabledFor(logging.DEBUG):
        gathered = [layout.title for layout in call.layouts if not facts_of_layout(layout).is_whole]
        LOGGER.debug("%s: gathered %s", call.names.shown, ", ".join(gathered) or "nothing")
    wholes = {id(tensor): _whole(tensor) for tensor in tensors}
    if call.may_write and call.is_tracked:
        wholes = {key: whole.clone() for key, whole in wholes.items()}
    writes = _Writes(call, wholes)
    out = [x for x in tree_leaves(call.arguments[1].get("out")) if isinstance(x, TensorLike)]
    # While it is watched, torch leaves some tensors as they are that are given as out=.
    with _drawing(call, _seed(call)), nullcontext() if out else writes:
        result = call.on(wholes)
    for owner in [*writes.written.values(), *out]:
        whole = wholes[id(owner)]
        if whole.shape != owner.shape:
            raise LayoutError(
                f"{call.names.shown} would change the shape of a DTensor of layout {owner.layout} "
                "in place; use the function that returns a new tensor"
            )
        owner._write(_sharded(whole, first, owner.layout).shards)
    wanted = iter(layouts or ())
    bases = {_place_in_memory(wholes[id(tensor)]): tensor for tensor in reversed(tensors)}

    def ours(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        layout = next(wanted, None)
        owner = next((tensor for tensor in tensors if wholes[id(tensor)] is leaf), None)
        if owner is not None:
            return owner
        made = _sharded(leaf, first, layout)
        base = bases.get(_place_in_memory(leaf)) if leaf.numel() else None
        if base is not None:
            made._become_part_of(base)
        return made

    return tree_map(ours, result)


def _whole(tensor: TensorLike) -> torch.Tensor:
    """Return the global tensor on every rank of the mesh; on other ranks one without data."""
    if tensor.communicator.addressable:
        return tensor.to_global()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _sharded(whole: torch.Tensor, like: TensorLike, wanted: Layout | None) -> TensorLike:
    """Return a global tensor as a DTensor of the `wanted` layout, by default replicated."""
    mesh = like.layout.mesh
    if wanted is None or wanted.global_shape != tuple(whole.shape) or not wanted.spec.axes:
        return _replicated(whole, like)
    replicas = _replicated(whole, like, distinct=False)
    pending = {int(p.axis): p.op for p in wanted.spec.partials}
    wanted = Layout(mesh, wanted.spec, whole.shape, whole.dtype)
    plain = wanted.spec.without_partial()
    made = replicas.redistribute(plain)
    if not pending:
        return made
    count = prod(mesh.shape[axis] for axis, op in pending.items() if op == "avg")
    shards = {}
    for device, shard in made.shards.items():
        others = {op for axis, op in pending.items() if mesh.coordinates(device)[axis]}
        if not others or others & {"min", "max"}:
            shards[device] = shard if count == 1 else shard * count
        else:
            shards[device] = torch.ones_like(shard) if "prod" in others else torch.zeros_like(shard)
    return like._made(wanted, like.communicator, shards)


def _replicated(leaf: torch.Tensor, like: TensorLike, *, distinct: bool = True) -> TensorLike:
    """Return a tensor that all ranks have as a replicated DTensor, on the mesh of `like`."""
    devices = like.communicator.addressable
    shards = dict(zip(devices, copies_of(leaf, len(devices), distinct=distinct), strict=True))
    layout = Layout(like.layout.mesh, ShardingSpec(leaf.dim()), leaf.shape, leaf.dtype)
    return like._made(layout, like.communicator, shards)


# --- random numbers ---


def _seed(call: Call) -> int | None:
    """Return a seed that all ranks share; None if the function draws no random numbers."""
    args, kwargs = call.arguments
    if call.names.plain == "scaled_dot_product_attention":
        place = args[_DROPOUT_PLACE] if len(args) > _DROPOUT_PLACE else 0
        draws = bool(kwargs.get("dropout_p", place))
    else:
        draws = bool(RANDOM.fullmatch(call.names.name)) and kwargs.get("training") is not False
    if not draws:
        return None
    first = call.tensors[0]
    own = int(torch.randint(2**48, (), generator=_sources(call)[0]))
    drawn = first.communicator.gather(dict.fromkeys(first.communicator.addressable, own))
    return drawn.get(first.layout.mesh.ids[0], own)


def _sources(call: Call) -> list[torch.Generator]:
    """Return the random generators that a call may use, first a CPU one in its arguments."""
    given = [leaf for leaf in call.leaves if isinstance(leaf, torch.Generator)]
    devices = {s.device for t in call.tensors for s in t.shards.values() if s.is_cuda}
    cuda = [torch.cuda.default_generators[device.index or 0] for device in devices]
    return [*(g for g in given if g.device.type == "cpu"), torch.default_generator, *cuda]


def _place(layout: Layout, device: int | None) -> int:
    """Return the number of a device's box: devices that are replicas have the same number."""
    place, mesh = 0, layout.mesh
    if device is not None:
        at = mesh.coordinates(device)
        for axis in (int(axis) for cut in layout.spec.dim_specs for axis in cut.axes):
            place = place * mesh.shape[axis] + at[axis]
    return place


@contextmanager
def _drawing(call: Call, seed: int | None) -> Iterator[None]:
    """Seed all generators within the block, if there is a seed; restore their states afterwards."""
    if seed is None:
        yield
        return
    before = {source: source.get_state() for source in _sources(call)}
    for source in before:
        source.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DTensor random operators may not have complete")
            yield
    finally:
        for source, state in before.items():
            source.set_state(state)
