"""What the tensors of a checkpoint are called, by a model's family, and which are strange."""

from collections import Counter
from collections.abc import Collection
from typing import Final, NamedTuple

from shardspec.errors import LayoutError
from shardspec.families.family import family_names, forms_in, shipped_family
from shardspec.families.maps import spellings
from shardspec.families.model import Model, Tensor
from shardspec.resharding.patterns import bindings, form_of, names_by_form
from shardspec.text import Argument, shown

_CALLED: Final = {
    "hf": "transformers",
    "megatron": "Megatron-core",
    "fused": "engines with fused matrices",
}
_SHOWN: Final = 3


class Recognised(NamedTuple):
    """The names of a source."""

    format: str
    """``hf``, ``megatron`` or ``fused``."""
    absent: tuple[Tensor, ...]
    """Tensors of the model that the source lacks."""
    prefix: str = ""
    """What stands before all of them."""

    @property
    def text(self) -> str:
        """Whose names they are."""
        return _CALLED[self.format] + (f" behind {shown(self.prefix)}" if self.prefix else "")


def recognise(
    model: Model, names: Collection[str], where: object, behind: Collection[str] = ()
) -> Recognised:
    """Return what the tensors of a source are called; it has those `behind` too, not wanted.

    Raises
    ------
    LayoutError
        If none has the name of a tensor of the model, or some have no name of its family.
    """
    spelled = {
        format: spellings(model, format) for format in _CALLED if format not in model.family.refused
    }
    forms_of = {
        format: {form_of(name) for every in by_tensor.values() for name in every}
        for format, by_tensor in spelled.items()
    }
    prefix = _outer_prefix(names, {form for forms in forms_of.values() for form in forms})
    inner = {name.removeprefix(prefix) for name in names}
    every = inner | {name.removeprefix(prefix) for name in behind}
    forms = {*map(form_of, every)}
    format = max(forms_of, key=lambda place: len(forms & forms_of[place]))
    strange = sorted(name for name in inner if form_of(name) not in forms_of[format])
    if len(strange) == len(inner):
        first = ", ".join(map(shown, strange[:_SHOWN])) or "(there are none)"
        raise LayoutError(
            f"{where}: no tensor has a name of the family {model.family.name!r}; the names start "
            f"with {first}, of {_users(strange[:1])}; give the config of that model"
        )
    if strange:
        rest = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise LayoutError(
            f"{where}: a model of the family {model.family.name!r} with this config has no "
            f"{shown(strange[0])}{rest}, which is of {_users(strange)}; correct the "
            "config, or leave such tensors behind by name with ",
            Argument("drop"),
        )
    by_form = names_by_form(every)

    def exists(pattern: str) -> bool:
        return bool(bindings(pattern, by_form)) if "{" in pattern else pattern in every

    absent = []
    for tensor in model.tensors:
        side = tensor.side if format == "hf" else tensor.places[format]
        if side is not None and not any(map(exists, spelled[format][side[0]])):
            absent.append(tensor)
    return Recognised(format, tuple(absent), prefix)


def _outer_prefix(names: Collection[str], forms: Collection[str]) -> str:
    """Return what stands before all names of a model, as ``model.`` in a job's state dict."""
    prefixes: Counter[str] = Counter()
    for name in names:
        words = name.split(".")
        ends = (".".join(words[at:]) for at in range(len(words)))
        end = next((end for end in ends if form_of(end) in forms), None)
        if end == name:
            return ""
        if end is not None:
            prefixes[name.removesuffix(end)] += 1
    return prefixes.most_common(1)[0][0] if prefixes else ""


def _users(names: Collection[str]) -> str:
    """Return as text the families that have a tensor of the first of some names."""
    form = next(map(form_of, names), "")
    users = []
    for family_name in family_names():
        rows = (row for own, row, _ in forms_in(shipped_family(family_name)) if own == form)
        if (row := next(rows, None)) is not None:
            where = f" (where {', '.join(row.when)})" if row.when else ""
            users.append(f"{family_name!r}{where}")
    return f"families {', '.join(users)}" if users else "no family that is known"
