"""Shards the parameters and activations of torch modules by rules: `distribute_module`."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.nn.modules.dropout import _DropoutNd

from shardspec.comm.process_group import communicator_of
from shardspec.errors import LayoutError
from shardspec.interop.torch_dtensor import in_our_words
from shardspec.layout.layout import Layout, SpecLike, checked_mesh, is_own_spec, resolve_axes
from shardspec.layout.placements import check_count, own_placements
from shardspec.layout.rules import match_rules, winning_patterns
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.tensor.dtensor import DTensor
from shardspec.tensor.for_modules import StandIn, stand_ins
from shardspec.tensor.redistribute import redistribute

PartitionFn: TypeAlias = Callable[..., object]
"""Takes the name of a submodule, the submodule and the mesh, or the first two, and replaces
parameters; its result is ignored."""
InputFn: TypeAlias = Callable[..., Any]
"""Takes module, positional inputs and mesh, or the last two; returns other inputs, or None."""
OutputFn: TypeAlias = Callable[..., Any]
"""Takes module, output and mesh, or the last two; returns another output, or None."""


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    rules: Mapping[str, SpecLike] | PartitionFn | None = None,
    input_fn: InputFn | None = None,
    output_fn: OutputFn | None = None,
    *,
    partition_fn: PartitionFn | None = None,
    outputs: Mapping[str, SpecLike] | None = None,
    src_rank: int | None = 0,
) -> nn.Module:
    """Shard a module's parameters, in place, and return it; every rank calls this.

    Parameters and buffers become torch DTensors, for torch's optimizers, `fully_shard` and
    distributed checkpoints. Those that no rule matches, or that `partition_fn` leaves unchanged,
    are replicated. Meta tensors stay without data, and a torch DTensor on `device_mesh` is
    redistributed. Dropout draws equal numbers on all devices with the same box, and different
    numbers for different boxes.

    Without a job one process simulates the mesh. Parameters are then DTensors of shardspec.

    Parameters
    ----------
    module
        The module; its tensors have the same names, shapes and dtypes on every rank.
    device_mesh
        The devices. If `fully_shard` will shard the module too, a slice of the mesh without its
        axes, such as ``mesh["tp"]``.
    rules
        Name pattern to spec (see `shardspec.match_rules`); names are those of ``state_dict()``. A
        function here is the `partition_fn`, as in torch.
    input_fn, output_fn
        Called before and after the module's forward with module, inputs or output, and mesh; their
        results replace inputs or output. See `inputs_as` and `outputs_as`.
    partition_fn
        Called as ``partition_fn(name, submodule, mesh)``, or without the mesh, for every submodule,
        the module first. It replaces parameters by ``nn.Parameter(distribute_tensor(...))``, or
        calls ``submodule._apply``.
    outputs
        Name pattern of submodules to the spec of their output, as in sequence parallelism. The
        output is redistributed to it.
    src_rank
        The rank whose values are used, as for `DTensor`.

    Raises
    ------
    LayoutError
        If a rule matches nothing, or only names that later rules match too, if a spec is for
        another number of dims or has a pending reduction, if one tensor under two names gets two
        specs, or if `partition_fn` distributes nothing.
    SpecSyntaxError, AxisError
        If a spec is malformed, the mesh lacks one of its axes, or its reductions do not commute.
    MeshError
        If torch cannot represent the mesh.

    Examples
    --------
    In a job of eight::

        mesh = init_device_mesh("cpu", (2, 4), axis_names=("dp", "tp"))
        rules = {"up.weight": "[S(tp),R]", "up.bias": "[S(tp)]", "down.weight": "[R,S(tp)]"}
        distribute_module(block, mesh, rules, inputs_as("[S(dp),R]"), outputs_as("[S(dp),R]"))
    """
    device_mesh = checked_mesh(device_mesh)
    with communicator_of(device_mesh).telling():
        before, after = _hooks(input_fn, output_fn, device_mesh)
        if rules is not None and partition_fn is not None:
            raise LayoutError("give either rules or a partition_fn: both say how to shard")
        if callable(rules):
            rules, partition_fn = None, rules
        if partition_fn is not None:
            _partition(module, device_mesh, partition_fn)
        tensors = list(_tensors(module))
        specs = _specs(tensors, rules or {}, device_mesh)
        watched = _matched_modules(module, outputs or {}, device_mesh)
        made: dict[int, torch.Tensor] = {}
        for name, owned, own_name, tensor in tensors:
            if id(tensor) not in made:
                made[id(tensor)] = _sharded(tensor, device_mesh, specs.get(name), src_rank)
            # Like torch's distribute_module: a parameter of another class cannot be assigned.
            owned[own_name] = made[id(tensor)]
        for submodule in module.modules():
            if isinstance(submodule, _DropoutNd):
                dropout = _DropoutHooks()
                submodule.register_forward_pre_hook(dropout.before)
                submodule.register_forward_hook(dropout.after)
            elif isinstance(submodule, nn.Embedding):
                submodule.register_forward_hook(_finish_masked)
        for submodule, output_spec in watched:
            hook = partial(_redistribute_output, output_spec, device_mesh)
            submodule.register_forward_hook(hook)
        if before is not None:
            module.register_forward_pre_hook(before)
        if after is not None:
            module.register_forward_hook(after)
    return module


def _hooks(
    input_fn: InputFn | None, output_fn: OutputFn | None, mesh: DeviceMesh
) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Return hooks that call `input_fn` before a forward and `output_fn` after it; None without."""
    before = after = None
    if input_fn is not None:
        takes_module = _takes(input_fn, "input_fn", "module, inputs, mesh", "inputs, mesh")

        def before(owner: nn.Module, inputs: Any) -> Any:  # noqa: ANN401
            return input_fn(*([owner] if takes_module else []), inputs, mesh)

    if output_fn is not None:
        takes_owner = _takes(output_fn, "output_fn", "module, output, mesh", "output, mesh")

        def after(owner: nn.Module, _: object, output: Any) -> Any:  # noqa: ANN401
            return output_fn(*([owner] if takes_owner else []), output, mesh)

    return before, after


def _partition(module: nn.Module, mesh: DeviceMesh, partition_fn: PartitionFn) -> None:
    """Call `partition_fn` for every submodule; raises `LayoutError` if it distributes nothing."""
    takes_mesh = _takes(partition_fn, "partition_fn", "name, module, mesh", "name, module")
    with stand_ins():
        for name, submodule in list(module.named_modules()):
            partition_fn(name, submodule, *([mesh] if takes_mesh else []))
        tensors = [tensor for _, _, _, tensor in _tensors(module)]
        if tensors and not any(
            isinstance(each, TorchDTensor | StandIn | DTensor) for each in tensors
        ):
            raise LayoutError(
                "partition_fn distributed no parameter; let it set module.weight = "
                "nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)])), or omit it to "
                "replicate all"
            )


def _takes(function: Callable[..., object], what: str, most: str, fewer: str) -> bool:
    """Return True if a function can be called with `most` arguments, False if with `fewer`.

    Raises `LayoutError` if neither is possible.
    """
    signature = inspect.signature(function)
    for arguments in (most, fewer):
        with suppress(TypeError):
            signature.bind(*arguments.split(", "))
            return arguments == most
    raise LayoutError(f"{what} is called with ({most}) or ({fewer}), but it takes {signature}")


def inputs_as(spec: SpecLike) -> InputFn:
    """Return an `input_fn` that takes each rank's tensors as shards of this spec.

    DTensors are unchanged. Dims of a tensor beyond those of the spec are replicated.

    >>> (x,) = inputs_as("[S0]")(nn.Identity(), (torch.ones(2, 3),), DeviceMesh([0]))
    >>> str(x.layout.spec)
    '[S0,R]'
    """
    target = _checked(spec)

    def take(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        def shard_of(value: object) -> object:
            if not isinstance(value, torch.Tensor) or isinstance(value, TorchDTensor | DTensor):
                return value
            sharded = DTensor.from_local(value, mesh, _for_dims(target, value.dim()))
            return sharded if sharded.is_simulated else sharded.to_torch()

        return tuple(map(shard_of, inputs))

    return take


def outputs_as(spec: SpecLike) -> OutputFn:
    """Return an `output_fn` that redistributes tensors to this spec and returns each rank's shard.

    The gradient of a shard is the gradient of its box; see `shardspec.tensor.dtensor`. If one
    process has all shards, the function returns the DTensor.

    >>> mesh = DeviceMesh(range(2))
    >>> x = DTensor(torch.ones(4, 2), mesh, "[S0,R]")
    >>> str(outputs_as("[R,R]")(nn.Identity(), x, mesh).layout.spec)
    '[R,R]'
    """
    target = _checked(spec)

    def give(_: nn.Module, output: object, mesh: DeviceMesh) -> object:
        def shard_of(value: object) -> object:
            value = _redistributed(target, mesh, value)
            if isinstance(value, TorchDTensor):
                value = DTensor.from_torch(value, device_mesh=mesh)
            if isinstance(value, DTensor) and not value.is_simulated:
                return value.to_local()
            return value

        return _mapped(shard_of, output)

    return give


class _DropoutHooks:
    """Hooks that give dropout a DTensor of shardspec, to draw equal numbers for copies of a box."""

    def __init__(self) -> None:
        self._was_torchs = False

    def before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._was_torchs = module.training and isinstance(inputs[0], TorchDTensor)
        if not self._was_torchs:
            return None
        return (DTensor.from_torch(in_our_words(inputs[0])), *inputs[1:])

    def after(self, _module: nn.Module, _inputs: object, output: object) -> object:
        return output.to_torch() if self._was_torchs and isinstance(output, DTensor) else output


def _finish_masked(_module: nn.Module, _inputs: object, output: object) -> object:
    """Finish the sum of an embedding sharded by rows, which torch can do only once."""
    return in_our_words(output) if isinstance(output, TorchDTensor) else output


def _redistribute_output(
    spec: SpecLike, mesh: DeviceMesh, _module: nn.Module, _inputs: object, output: object
) -> object:
    return _mapped(partial(_redistributed, spec, mesh), output)


def _redistributed(spec: SpecLike, mesh: DeviceMesh, value: object) -> object:
    if isinstance(value, DTensor):
        return value.redistribute(_for_dims(spec, value.dim()))
    if isinstance(value, TorchDTensor):
        return redistribute(value, _for_dims(spec, value.dim()), mesh)
    return value


def _mapped(function: Callable[[object], object], value: object) -> object:
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_mapped(function, item) for item in value)
    return function(value)


def _checked(spec: SpecLike, mesh: DeviceMesh | None = None) -> SpecLike:
    """Return a spec, parsed, or placements as given; raises `LayoutError` if they are invalid."""
    if is_own_spec(spec):
        parsed = ShardingSpec.of(spec)
        return parsed if mesh is None else resolve_axes(parsed, mesh)
    placements = own_placements(spec)
    if mesh is not None:
        check_count(placements, mesh.shape)
    return spec


def _for_dims(spec: SpecLike, dims: int) -> SpecLike:
    """Return the spec extended by replicated dims; placements fit any number of dims."""
    if not isinstance(spec, ShardingSpec) or spec.dims >= dims:
        return spec
    return ShardingSpec(dims, dict(enumerate(spec.dim_specs)), partial=spec.partial)


def _tensors(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Yield (name, dict, key, tensor) of parameters and buffers: ``dict[key]`` is the tensor.

    A tensor with two names is yielded twice.
    """
    for prefix, owner in module.named_modules():
        for owned in (owner._parameters, owner._buffers):
            for own_name, tensor in owned.items():
                if tensor is not None:
                    yield f"{prefix}.{own_name}" if prefix else own_name, owned, own_name, tensor


def _specs(
    tensors: Sequence[tuple[str, dict[str, Any], str, torch.Tensor]],
    rules: Mapping[str, SpecLike],
    mesh: DeviceMesh,
) -> dict[str, ShardingSpec]:
    """Return the spec of each tensor that rules match; raises `LayoutError` if one does not fit."""
    shapes = {name: tuple(tensor.shape) for name, _, _, tensor in tensors}
    matched = match_rules(rules, shapes, mesh)
    specs = {name: resolve_axes(spec, mesh) for name, spec in matched.items()}
    shared: dict[int, tuple[str, ShardingSpec]] = {}
    for name, _, _, tensor in tensors:
        spec = specs.get(name, ShardingSpec(tensor.dim()))
        if spec.partials:
            raise LayoutError(
                f"tensor {name!r} cannot be sharded as {matched[name]}; give a spec without "
                "pending reductions"
            )
        other, first = shared.setdefault(id(tensor), (name, spec))
        if first != spec:
            raise LayoutError(
                f"{other!r} and {name!r} are one tensor, but the rules shard it as {first} and as "
                f"{spec}; give both the same"
            )
        Layout(mesh, spec, tensor.shape, tensor.dtype)
    return specs


def _matched_modules(
    module: nn.Module, outputs: Mapping[str, SpecLike], mesh: DeviceMesh
) -> list[tuple[nn.Module, SpecLike]]:
    """Return the submodules that patterns match, each with the spec of the last match."""
    modules = {name: submodule for name, submodule in module.named_modules() if name}
    specs = {pattern: _checked(given, mesh) for pattern, given in outputs.items()}
    winners = winning_patterns(list(specs), modules, "module")
    return [(modules[name], specs[pattern]) for name, pattern in winners.items()]


def _sharded(
    tensor: torch.Tensor, mesh: DeviceMesh, spec: ShardingSpec | None, src_rank: int | None
) -> torch.Tensor:
    if isinstance(tensor, TorchDTensor):
        result = tensor.detach() if spec is None else redistribute(tensor.detach(), spec, mesh)
    else:
        given = tensor.tensor if isinstance(tensor, StandIn) else tensor.detach()
        if not isinstance(given, DTensor):
            target = spec or ShardingSpec(tensor.dim())
            given = DTensor(given, mesh, target, src_rank=src_rank)
        elif spec is not None:
            given = given.redistribute(spec, device_mesh=mesh)
        if given.is_simulated:
            return given.detach().requires_grad_(tensor.requires_grad)
        result = given.to_torch().detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(result, requires_grad=tensor.requires_grad)
    return result
