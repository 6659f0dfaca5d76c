"""Runs torch operations on DTensors by torch's own DTensor; errors name a remedy.

In a job each rank has torch's DTensor of its shard. A process that holds the shards of all devices
simulates all ranks of a job for the operation, under the same conditions.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeGuard

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from shardspec.errors import LayoutError
from shardspec.interop.torch_dtensor import layout_of, local_of, torch_dtensor
from shardspec.interop.torch_parts import parts_of, shard_memory
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.tensor.operators.call import (
    Call,
    Function,
    RandomDraws,
    Result,
    earlier_calls,
    run_call,
)
from shardspec.tensor.operators.conditions import is_mean, layout_facts, never_merge_gathers
from shardspec.tensor.operators.simulated import (
    Locals,
    differentiable,
    each_draws,
    simulated_mesh,
    untracked,
    within_limits,
)
from shardspec.tensor.operators.tensor import TensorLike
from shardspec.tensor.operators.watch import is_alias, specs_text
from shardspec.tensor.run import copies_of
from shardspec.tensor.shards import check_copies

_DECISIVE: Final = (TensorLike, int, float, torch.dtype, type(None))
"""Arguments by which earlier calls are looked up at once."""
_DROPOUT_PLACE: Final = 4
"""The position of the probability among the arguments of attention."""
_RANDOM: Final = re.compile(
    "((native|alpha|feature|feature_alpha)_)?dropout_?|dropout[123]d|(rand|randn|randint)_like|"
    "(bernoulli|rrelu)_?|(normal|uniform|exponential|random|cauchy|log_normal|geometric)_|"
    "multinomial|poisson|gumbel_softmax"
)
"""Names of functions that draw random numbers, besides attention with dropout."""


def apply(function: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:  # noqa: ANN401
    """Call a torch function with DTensors among its arguments, which may be nested."""
    result = None if kwargs else _at_once(function, args)
    if result is not None:
        return result
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    call = Call(function, args, kwargs, leaves, structure)
    tensors, name = call.tensors, call.shown
    first = tensors[0]
    out = kwargs.get("out")
    if out is not None:
        _check_out(name, tensors, out)
    if call.writes and any(map(_is_plain, args[:1])):
        raise LayoutError(
            f"{name} would write a DTensor to a plain tensor; make this a DTensor too, by "
            "distribute_tensor, or take to_global() of the other"
        )
    if torch.is_grad_enabled() and (call.writes or out is not None):
        for leaf in tree_leaves((args[:1], out)):
            if isinstance(leaf, TensorLike) and leaf.is_leaf_with_gradient():
                raise LayoutError(
                    f"{name} would write to a leaf that requires a gradient; do it under "
                    "torch.no_grad(), or without writing in place"
                )
    for leaf in leaves:
        _check_leaf(name, leaf, first)
    facts = [layout_facts(tensor.layout) for tensor in tensors]
    if is_mean(name, kwargs) and any(each.is_sharded for each in facts):
        return apply(function, args, {**kwargs, "reduction": "none"}).mean()
    # torch would give plain tensors DTensors as gradients.
    plain = {
        id(leaf): _replicated(leaf, first)
        for leaf in leaves
        if _is_plain(leaf) and leaf.requires_grad and torch.is_grad_enabled()
    }
    call = replace(call, leaves=[plain.get(id(leaf), leaf) for leaf in leaves])
    if first.is_simulated:
        return _in_simulation(call)
    if any(each.is_uneven_over_axes for each in facts):
        never_merge_gathers(first.to_torch().device_mesh)
    return _in_job(call)


def _at_once(function: Function, args: Sequence[object]) -> TensorLike | None:
    """Return the result of a call in a job that needed no help earlier; None otherwise.

    None as well if the call depends on other arguments, or the result shares memory.
    """
    ours = [arg for arg in args if isinstance(arg, TensorLike)]
    if any(tensor.is_copied_part or tensor.is_simulated for tensor in ours) or not all(
        isinstance(arg, _DECISIVE) for arg in args
    ):
        return None
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in ours)
    layouts = [tensor.layout for tensor in ours]
    if not earlier_calls(function, args, {}, layouts, tracked=tracked).is_plain:
        return None
    theirs = [arg.to_torch() if isinstance(arg, TensorLike) else arg for arg in args]
    with implicit_replication():
        result = function(*theirs)
    if any(is_alias(result, tensor) for tensor in theirs if isinstance(tensor, TorchDTensor)):
        return None
    # Autocast and the default dtype may differ from those of earlier calls.
    layout = layout_of(result, ours[0].layout.mesh)
    return ours[0]._made(layout, ours[0].communicator, None, result)


def _in_job(call: Call) -> Any:  # noqa: ANN401
    """Carry out a call on the shards of this rank; the other ranks do the same."""
    first = call.tensors[0]
    tensors = {id(tensor): tensor.to_torch() for tensor in call.tensors}
    others = [leaf for leaf in call.leaves if isinstance(leaf, TorchDTensor)]
    tracked = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (*tensors.values(), *others)
    )
    drawing: RandomDraws | None = None
    if first.to_torch().device_mesh.device_type == "cpu" and _draws(call):
        drawing = partial(_drawing, first, _source(call.kwargs.get("generator")))

    def ours(leaf: object) -> object:
        if not isinstance(leaf, Result):
            return leaf
        if leaf.given is not None:
            leaf.given.follow(leaf.tensor)
            return leaf.given
        wrapped = first._made(leaf.layout, first.communicator, None, leaf.tensor)
        wrapped.is_copied_part = leaf.is_copied_part
        return wrapped

    return tree_map(ours, run_call(call, tensors, tracked=tracked, drawing=drawing))


def _in_simulation(call: Call) -> Any:  # noqa: ANN401
    """Carry out a call on the shards of all devices."""
    first = call.tensors[0]
    mesh, made = first.layout.mesh, first._made
    # Random numbers of devices come from separate generators.
    leaves = [None if isinstance(leaf, torch.Generator) else leaf for leaf in call.leaves]
    inner = replace(call, leaves=leaves)
    tensors = list({id(tensor): tensor for tensor in inner.tensors}.values())
    shards = [list(tensor.shards.values()) for tensor in tensors]
    device_type = shards[0][0].device.type
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    drawing: RandomDraws | None = None
    if device_type == "cpu" and _draws(call):
        seeds = _seeds(first, _source(call.kwargs.get("generator")))
        drawing = partial(each_draws, list(seeds.values()))
    results: list[Any] = []

    def function(locals_: Locals) -> Locals:
        torch_mesh = simulated_mesh(mesh, device_type)
        given = {
            id(tensor): torch_dtensor(local, tensor.layout, torch_mesh)
            for tensor, local in zip(tensors, locals_, strict=True)
        }
        specs = specs_text(str(tensor.layout.labelled_spec) for tensor in tensors)
        with within_limits(call.shown, specs):
            returned = run_call(inner, given, tracked=tracked, frozen=tracked, drawing=drawing)
        results[:] = [returned]
        return [local_of(each.tensor) for each in tree_leaves(results) if _is_new(each)]

    if tracked:
        locals_ = differentiable(function, call.shown, mesh, shards)
    else:
        locals_ = untracked(function, mesh, device_type, shards)
    new = iter(locals_)

    def ours(leaf: object) -> object:
        if not isinstance(leaf, Result):
            return parts_of(leaf)[0] if isinstance(leaf, torch.Tensor) else leaf
        if leaf.given is None:
            wrapped = made(
                leaf.layout, first.communicator, dict(zip(mesh.ids, next(new), strict=True))
            )
            wrapped.is_copied_part = leaf.is_copied_part
            return wrapped
        if leaf.layout != leaf.given.layout:
            parts = parts_of(shard_memory(leaf.tensor))
            leaf.given.adopt(leaf.layout, dict(zip(mesh.ids, parts, strict=True)))
        return leaf.given

    return tree_map(ours, results[0])


def _is_plain(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, TorchDTensor)


def _replicated(leaf: torch.Tensor, first: TensorLike) -> TensorLike:
    """Return a plain scalar tensor as a replicated DTensor."""
    devices = first.communicator.addressable
    shards = dict(zip(devices, copies_of(leaf, len(devices)), strict=True))
    layout = Layout(first.layout.mesh, ShardingSpec(0), (), leaf.dtype)
    return first._made(layout, first.communicator, shards)


def _is_new(leaf: object) -> bool:
    return isinstance(leaf, Result) and leaf.given is None


def _check_out(name: str, sharded: Sequence[TensorLike], out: object) -> None:
    """Raise `LayoutError` for a sharded ``out=`` of a function without DTensors, as `torch.eye`."""
    into = [leaf for leaf in tree_leaves(out) if isinstance(leaf, TensorLike)]
    if len(into) == len(sharded) and any(not layout_facts(t.layout).is_whole for t in into):
        raise LayoutError(
            f"{name}: torch makes each shard of out= as if it were the whole tensor of layout "
            f"{into[0].layout}; make a plain tensor, and shard it by distribute_tensor"
        )


def _check_leaf(name: str, leaf: object, first: TensorLike) -> None:
    """Raise `LayoutError` for tensors on other meshes, and plain ones with dims.

    The latter may differ between ranks.
    """
    mesh, other = first.layout.mesh, ""
    if isinstance(leaf, TensorLike):
        if leaf.layout.mesh != mesh:
            other = f"on mesh {leaf.layout.mesh} of ids {leaf.layout.mesh.ids}"
        elif leaf.communicator.addressable != first.communicator.addressable:
            raise LayoutError(
                f"{name}: one tensor on mesh {mesh} is of a job, and another is simulated in this "
                "process; give both one communicator"
            )
        # torch would convert others to strided shards, for which most of its rules fail.
        leaf.layout.spec.check_plain("torch's operators")
    elif isinstance(leaf, TorchDTensor):
        if leaf.device_mesh != first.to_torch().device_mesh:
            other = f"is a torch DTensor on {leaf.device_mesh}"
    elif _is_plain(leaf):
        if leaf.dim() > 0:
            raise LayoutError(
                f"{name}: a plain tensor of shape {tuple(leaf.shape)} is mixed with a DTensor; "
                "shard or replicate it first, by distribute_tensor"
            )
        copies = dict.fromkeys(first.communicator.addressable, leaf)
        check_copies(first.communicator, copies, f"{name}: a plain tensor without dims")
    if other:
        raise LayoutError(
            f"{name}: one tensor is on mesh {mesh} of ids {mesh.ids}, another {other}; bring them "
            "to one mesh first, by redistribute(device_mesh=)"
        )


def _draws(call: Call) -> bool:
    if call.name == "scaled_dot_product_attention":
        place = call.args[_DROPOUT_PLACE] if len(call.args) > _DROPOUT_PLACE else 0
        return bool(call.kwargs.get("dropout_p", place))
    return bool(_RANDOM.fullmatch(call.name)) and call.kwargs.get("training") is not False


def _source(generator: object) -> torch.Generator:
    return generator if isinstance(generator, torch.Generator) else torch.default_generator


def _seeds(tensor: TensorLike, source: torch.Generator) -> dict[int, int]:
    """Return a seed for each device of this process, equal for devices that hold the same box.

    Seeds are consecutive from a number drawn on the first device of the mesh. On every rank the
    source advances by one number.
    """
    own = int(torch.randint(2**48, (), generator=source))
    mesh, spec, devices = tensor.layout.mesh, tensor.layout.spec, tensor.communicator.addressable
    drawn, seeds = tensor.communicator.gather(dict.fromkeys(devices, own)), {}
    for device in devices:
        place, coordinates = 0, mesh.coordinates(device)
        for axis in (int(axis) for dim_spec in spec.dim_specs for axis in dim_spec.axes):
            place = place * mesh.shape[axis] + coordinates[axis]
        seeds[device] = drawn[mesh.ids[0]] + place
    return seeds


@contextmanager
def _drawing(tensor: TensorLike, source: torch.Generator) -> Iterator[None]:
    """Let devices draw the same random numbers if and only if they hold the same box.

    torch's DTensor does this only on CUDA. The numbers depend on mesh and spec, unlike those of
    `shardspec.rand`.
    """
    seeds = _seeds(tensor, source)
    # torch's DTensor always draws from its own generator.
    after = {each: each.get_state() for each in (source, torch.default_generator)}
    for seed in seeds.values():
        for each in after:
            each.manual_seed(seed)
    try:
        yield
    finally:
        for each, state in after.items():
            each.set_state(state)
