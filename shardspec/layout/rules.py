"""Rules: name patterns to specs, so that a whole model is cut by a few lines."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from shardspec.errors import AxisError, LayoutError, SpecSyntaxError
from shardspec.layout.layout import SpecLike
from shardspec.layout.spec import ShardingSpec
from shardspec.text import counted


def match_rules(
    rules: Mapping[str, SpecLike], tensors: Mapping[str, int]
) -> dict[str, ShardingSpec]:
    """Return the spec of every tensor that a rule matches.

    Parameters
    ----------
    rules
        Name pattern to spec. Patterns are those of the shell (``*``, ``?``, ``[abc]``), matched
        against the whole name with case.
    tensors
        Tensor name to its number of dims.

    Returns
    -------
    dict
        Name to spec, in the order of `tensors`; a tensor that no rule matches is left out.

    Raises
    ------
    LayoutError
        If two rules match one tensor, a rule matches nothing, or a spec is for another number of
        dims than the tensor has.
    SpecSyntaxError, AxisError
        If a spec is given as text that is not one; names the rule.

    Examples
    --------
    >>> match_rules({"*.weight": "[S0,R]", "*.bias": "[S0]"}, {"up.weight": 2, "up.bias": 1})
    {'up.weight': ShardingSpec.parse('[S0,R]'), 'up.bias': ShardingSpec.parse('[S0]')}
    """
    if not isinstance(rules, Mapping):
        raise LayoutError(
            f"a {type(rules).__name__} is no rules; give a dict of name pattern to spec"
        )
    specs = {pattern: _spec(pattern, spec) for pattern, spec in rules.items()}
    unused = set(specs)
    matched: dict[str, ShardingSpec] = {}
    for name, dims in tensors.items():
        patterns = [pattern for pattern in specs if fnmatchcase(name, pattern)]
        unused.difference_update(patterns)
        if len(patterns) > 1:
            raise LayoutError(
                f"tensor {name!r} is matched by the rules {patterns}; narrow the patterns so that "
                "one is left"
            )
        for pattern in patterns:
            if specs[pattern].dims != dims:
                remedy = "narrow the pattern, and give that tensor a rule of its own"
                if pattern == name:
                    remedy = f"give it a spec of {counted(dims, 'dim')}"
                raise LayoutError(
                    f"rule {pattern!r} has spec {specs[pattern]} of "
                    f"{counted(specs[pattern].dims, 'dim')}, but tensor {name!r} has {dims}; "
                    f"{remedy}"
                )
            matched[name] = specs[pattern]
    if unused:
        raise LayoutError(
            f"rule {sorted(unused)[0]!r} matches no tensor; the names start with "
            f"{', '.join(map(repr, list(tensors)[:3])) or '(there are none)'}"
        )
    return matched


def _spec(pattern: str, spec: SpecLike) -> ShardingSpec:
    try:
        return ShardingSpec.of(spec)
    except SpecSyntaxError as error:
        problem = f"rule {pattern!r}: {error.problem}"
        raise SpecSyntaxError(problem, error.text, error.position) from None
    except AxisError as error:
        raise AxisError(f"rule {pattern!r}: {error}") from None
