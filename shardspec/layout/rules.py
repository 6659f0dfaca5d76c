"""Gives tensors their specs by rules, which are patterns of names: ``{"*.bias": "[R]"}``.

A rule is a shell pattern with a spec. If several rules match a name, the last one applies. A spec
with ``...`` is for tensors of any number of dims: ``[S(dp),...]`` shards the first dim.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

from shardspec.errors import AxisError, LayoutError, SpecSyntaxError
from shardspec.layout.layout import OwnSpec, SpecLike, is_own_spec
from shardspec.layout.placements import Placement, Split, own_placements, spec_of_placements
from shardspec.layout.spec import DimSpec, ShardingSpec, parse_for_rule
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import counted, first_of, shown

Rules: TypeAlias = Mapping[str, SpecLike]
"""Name pattern to spec; a tensor that no pattern matches is replicated."""

_MAX_SHOWN: Final = 3
"""The most rules or names in an error."""


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """The spec of a rule; with ``...`` it fits tensors of any number of dims.

    Examples
    --------
    >>> rule = RuleSpec.of("[S(tp),...,S0]")
    >>> str(rule), str(rule.for_dims(2)), str(rule.for_dims(4)), rule.for_dims(1)
    ('[S(tp),...,S0]', '[S(tp),S0]', '[S(tp),R,R,S0]', None)
    """

    spec: ShardingSpec
    """The spec without the dims of the ellipsis."""
    ellipsis: int | None = None
    """Number of dims before the ellipsis; None without an ellipsis."""

    @classmethod
    def of(cls, spec: OwnSpec) -> "RuleSpec":
        """Return the spec of a rule; raises what `ShardingSpec.parse` raises."""
        return cls(spec) if isinstance(spec, ShardingSpec) else cls(*parse_for_rule(spec))

    def for_dims(self, dims: int) -> ShardingSpec | None:
        """Return the spec for a tensor of `dims` dims; None if the rule does not fit.

        A tensor without dims is replicated by any rule with ``...``.
        """
        spec, more = self.spec, dims - self.spec.dims
        if self.ellipsis is None:
            return spec if more == 0 else None
        if more < 0 < dims:
            return None
        cuts = [*spec.dim_specs] if dims else []
        cuts[self.ellipsis : self.ellipsis] = [DimSpec()] * max(more, 0)
        return ShardingSpec(dims, dict(enumerate(cuts)), partial=spec.partial)

    def __str__(self) -> str:
        if self.ellipsis is None:
            return str(self.spec)
        dims = [*map(str, self.spec.dim_specs)]
        dims.insert(self.ellipsis, "...")
        pending = str(ShardingSpec(0, partial=self.spec.partial))  # "[|P0]" or "[]"
        return f"[{','.join(dims)}{pending[1:]}"


def last_match(patterns: Iterable[str], name: str) -> str | None:
    """Return the last pattern that matches a name; None if none does.

    >>> last_match(["*", "*.bias", "x.*"], "up.bias")
    '*.bias'
    """
    matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
    return matching[-1] if matching else None


def winning_patterns(
    patterns: Sequence[str], names: Iterable[str], what: str = "tensor"
) -> dict[str, str]:
    """Return the last pattern that matches each name; skip names that no pattern matches.

    Raises `LayoutError` for a pattern without a match, or whose names all match later patterns.

    >>> winning_patterns(["*", "*.bias"], ["up.weight", "up.bias"])
    {'up.weight': '*', 'up.bias': '*.bias'}
    """
    names = list(names)
    winners: dict[str, str] = {}
    overruled: dict[str, dict[str, None]] = {pattern: {} for pattern in patterns}
    idle = set(patterns)
    for name in names:
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        idle.difference_update(matching)
        if matching:
            winners[name] = matching[-1]
            for pattern in matching[:-1]:
                overruled[pattern][matching[-1]] = None
    used = set(winners.values())
    for pattern in patterns:
        if pattern in idle:
            first = ", ".join(map(shown, names[:_MAX_SHOWN]))
            start = f"the names start with {first}" if names else f"there are no {what}s"
            raise LayoutError(f"rule {shown(pattern)} matches no {what}; {start}")
        if pattern not in used:
            later = list(overruled[pattern])
            raise LayoutError(
                f"rule {shown(pattern)} has no effect, since later rules win and "
                f"{first_of([*map(shown, later)], _MAX_SHOWN)} "
                f"match{'es' if len(later) == 1 else ''} every {what} that it does; put it after "
                "them, or remove it"
            )
    return winners


def match_rules(
    rules: Rules,
    tensors: Mapping[str, int | Sequence[int]],
    device_mesh: DeviceMesh | None = None,
) -> dict[str, ShardingSpec]:
    """Return the spec of every tensor that a rule matches.

    Parameters
    ----------
    rules
        Name pattern to spec. Patterns are those of the shell (``*``, ``?``, ``[abc]``), matched
        against the full name, case-sensitively. If several match a name, the last one applies.
        ``...`` in a spec stands for ``R`` in all other dims; such a spec replicates tensors without
        dims. torch's placements fit any number of dims too, and replicate tensors without dims.
    tensors
        Tensor name to its number of dims or its shape.
    device_mesh
        The mesh of torch's placements; only `_StridedShard` needs it, and shapes of the tensors.

    Returns
    -------
    dict
        Name to spec, in the order of `tensors`, without the tensors that no rule matches.

    Raises
    ------
    LayoutError
        If a rule matches no name, or only names that later rules match too; if a spec does not fit
        the dims of a tensor; or if placements do not fit the tensor or the mesh.
    SpecSyntaxError, AxisError
        If a spec is malformed; the message names the rule.

    Examples
    --------
    >>> rules = {"*": "[S0,...]", "*.down.weight": "[R,S0]"}
    >>> specs = match_rules(rules, {"0.up.weight": 2, "0.down.weight": 2, "0.up.bias": 1})
    >>> {name: str(spec) for name, spec in specs.items()}
    {'0.up.weight': '[S0,R]', '0.down.weight': '[R,S0]', '0.up.bias': '[S0]'}
    """
    if not isinstance(rules, Mapping):
        raise LayoutError(
            f"the rules are a {type(rules).__name__}; give a dict of name pattern to spec"
        )
    specs: dict[str, RuleSpec | tuple[Placement, ...]] = {}
    for pattern, spec in rules.items():
        try:
            specs[pattern] = RuleSpec.of(spec) if is_own_spec(spec) else own_placements(spec)
        except SpecSyntaxError as error:
            problem = f"rule {pattern!r}: {error.problem}"
            raise SpecSyntaxError(problem, error.text, error.position) from None
        except (AxisError, LayoutError) as error:
            raise type(error)(f"rule {pattern!r}: {error}") from None
    matched: dict[str, ShardingSpec] = {}
    for name, pattern in winning_patterns(list(specs), tensors).items():
        rule, sizes = specs[pattern], tensors[name]
        dims = sizes if isinstance(sizes, int) else len(sizes)
        if isinstance(rule, RuleSpec):
            spec_for_dims = rule.for_dims(dims)
            if spec_for_dims is None:
                raise LayoutError(misfit_text(pattern, rule, name, dims))
            matched[name] = spec_for_dims
            continue
        try:
            matched[name] = _of_placements(rule, sizes, device_mesh)
        except (AxisError, LayoutError) as error:
            raise type(error)(f"rule {pattern!r}, tensor {shown(name)}: {error}") from None
    return matched


def _of_placements(
    placements: Sequence[Placement], sizes: int | Sequence[int], mesh: DeviceMesh | None
) -> ShardingSpec:
    """Return the spec of torch's placements; a tensor without dims is replicated."""
    if mesh is None and any(isinstance(p, Split) and p.split_factor > 1 for p in placements):
        raise LayoutError("a _StridedShard depends on the mesh; give device_mesh=")
    if not sizes:
        placements = [None if isinstance(p, Split) else p for p in placements]
    # Without strides the order of the axes is sufficient.
    shape = (1,) * len(placements) if mesh is None else mesh.shape
    return spec_of_placements(placements, sizes, shape)


def misfit_text(pattern: str, rule: RuleSpec, name: str, dims: int) -> str:
    """Return the error text for a rule that does not fit a tensor's dims, with a remedy."""
    least = "at least " if rule.ellipsis is not None else ""
    problem = (
        f"rule {shown(pattern)} has spec {rule} of {least}{counted(rule.spec.dims, 'dim')}, but "
        f"tensor {shown(name)} has {dims}"
    )
    cuts = [*rule.spec.dim_specs]
    while rule.ellipsis is None and cuts and not cuts[-1].axes:
        del cuts[-1]
    spec = ShardingSpec(len(cuts), dict(enumerate(cuts)), partial=rule.spec.partial)
    wider = RuleSpec(spec, len(cuts))
    remedies = []
    if rule.ellipsis is None and wider.for_dims(dims) is not None:
        remedies.append(f"write {wider}, which fits any number of dims from {len(cuts) or 0}")
    if pattern != name:
        own = f"[{','.join('R' * dims)}]"
        remedies.append(f"give that tensor a rule of its own after it, such as {own}")
    elif not remedies:
        remedies.append(f"give it a spec of {counted(dims, 'dim')}")
    return f"{problem}; {', or '.join(remedies)}"
