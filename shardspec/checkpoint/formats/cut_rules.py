"""Rules that say how ranks have cut tensors, for formats whose files do not say it.

A rule is a pattern of names (that of the shell) and a spec over the named axes of the writers; a
fused tensor may say beside it that the cut dim is made of parts, each cut for itself. In TOML::

    "*.linear_fc2.weight" = "[R,S(tp)]"
    "*.linear_fc1.weight" = { spec = "[S(tp),R]", parts = 2 }
    "*.qkv.weight" = { spec = "[S(tp),R]", parts = [4, 1, 1] }

Rules for the layers of known writers are shipped beside this module, in ``rules/``.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Final

from shardspec.errors import CheckpointError, InputFileError, LayoutError, ShardSpecError
from shardspec.input_files import read_input_file
from shardspec.layout.spec import ShardingSpec

__all__ = ["CutRule", "find_rule", "parse_rules", "read_cut_rules", "read_toml", "shipped_rules"]


_MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CutRule:
    """How a tensor was cut."""

    spec: ShardingSpec
    """Axes by name."""
    parts: tuple[int, ...] = (1,)
    """The parts that the cut dim is made of, by their proportions; each was cut for itself."""

    def __str__(self) -> str:
        return f"{self.spec}" if len(self.parts) == 1 else f"{self.spec} in parts {self.parts}"


def parse_rules(rules: Mapping[str, object], stated_by: str) -> dict[str, CutRule]:
    """Return rules as values.

    Parameters
    ----------
    rules
        Per pattern a spec, or a table of ``spec`` and ``parts``.
    stated_by
        For errors.

    Raises
    ------
    CheckpointError
        If a rule is neither.

    Examples
    --------
    >>> rules = parse_rules({"*.up": {"spec": "[S(tp)]", "parts": 2}, "b": "[R]"}, "example")
    >>> print(*rules.values())
    [S(tp)] in parts (1, 1) [R]
    """
    return {pattern: _rule(pattern, value, stated_by) for pattern, value in rules.items()}


def _rule(pattern: str, value: object, stated_by: str) -> CutRule:
    spec = value
    parts: tuple[int, ...] = (1,)
    if isinstance(value, Mapping):
        if not {"spec"} <= value.keys() <= {"spec", "parts"}:
            raise CheckpointError(
                f"{stated_by}: the rule of {pattern!r} has {', '.join(map(str, value))}; give it a "
                "spec, and parts if there are any"
            )
        spec, parts = value["spec"], _parts(value.get("parts", 1), pattern, stated_by)
    if not isinstance(spec, str | ShardingSpec):
        raise CheckpointError(
            f"{stated_by}: the rule of {pattern!r} is {spec!r:.60}, not a spec in quotes; a "
            "pattern with dots or stars has to be in quotes too"
        )
    try:
        found = ShardingSpec.of(spec)
    except ShardSpecError as error:
        raise CheckpointError(f"{stated_by}: the rule of {pattern!r}: {_line(error)}") from None
    if not found.is_plain:
        raise CheckpointError(
            f"{stated_by}: the rule of {pattern!r} is {found}; give axes alone, and the number or "
            "sizes of parts as 'parts'"
        )
    cuts = found.dim_partition_dict
    if found.partials or (len(parts) > 1 and len(cuts) != 1):
        raise CheckpointError(
            f"{stated_by}: the rule of {pattern!r} is {found} in {len(parts)} parts; a "
            "tensor has nothing pending, and parts are those of the one dim that is cut"
        )
    return CutRule(found, parts)


def _parts(value: object, pattern: str, stated_by: str) -> tuple[int, ...]:
    parts = value
    if type(value) is int and 0 < value < 1024:
        parts = (1,) * value
    if (
        not isinstance(parts, Sequence)
        or not 0 < len(parts) < 1024
        or not all(type(part) is int and part > 0 for part in parts)
    ):
        raise CheckpointError(
            f"{stated_by}: the parts of {pattern!r} are {value!r:.60}; give their number, or a "
            "list of their proportions"
        )
    return tuple(parts)


def _line(error: ShardSpecError) -> str:
    """Return the first line: the picture of a syntax error takes more."""
    return str(error).splitlines()[0]


def read_toml(path: Path) -> dict[str, object]:
    """Read a small TOML file of rules.

    Raises
    ------
    CheckpointError
        If the file cannot be read, is too large or is no TOML.
    """
    try:
        return _from_toml(read_input_file(path, _MOST_BYTES).decode("utf-8-sig"), str(path))
    except InputFileError as error:
        raise CheckpointError(str(error)) from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is no TOML: {error}") from None


def read_cut_rules(path: Path) -> dict[str, CutRule]:
    """Read rules from a TOML file; raises as `read_toml`, and where it holds something else."""
    return parse_rules(read_toml(path), str(path))


def shipped_rules(name: str) -> dict[str, CutRule]:
    """Return rules that come with the library.

    Examples
    --------
    >>> print(shipped_rules("megatron_llama")["*.linear_fc1.weight"])
    [S(tp),R] in parts (1, 1)
    """
    text = files("shardspec.checkpoint").joinpath("rules", f"{name}.toml").read_text("utf-8")
    return parse_rules(_from_toml(text, f"{name}.toml"), f"{name}.toml")


def _from_toml(text: str, stated_by: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Besides its own error: numbers of thousands of digits, and what nests too deep.
        raise CheckpointError(
            f'{stated_by}: is no TOML: {error}; write one rule a line: "*.weight" = "[S(tp),R]"'
        ) from None


def find_rule(rules: Mapping[str, CutRule], name: str) -> CutRule | None:
    """Return the rule of a tensor, or None if there is none.

    Raises
    ------
    LayoutError
        If two rules match it and say different things.

    Examples
    --------
    >>> rules = parse_rules({"*.weight": "[S(tp)]", "b.*": "[R]"}, "example")
    >>> print(find_rule(rules, "a.weight"), find_rule(rules, "a.bias"))
    [S(tp)] None
    """
    matching = [pattern for pattern in rules if fnmatchcase(name, pattern)]
    if len({rules[pattern] for pattern in matching}) > 1:
        raise LayoutError(
            f"tensor {name!r} is matched by the rules {matching}; narrow the patterns so that one "
            "is left"
        )
    return rules[matching[0]] if matching else None
