"""What the tensors of a checkpoint are called, by a model's family, and which are strange."""

from collections import Counter
from collections.abc import Collection
from typing import Final, NamedTuple

from shardspec.errors import LayoutError
from shardspec.families.family import Family, Row, family_names, rows_in, shipped_family
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
    """Tensors of the model of which the source has none."""
    prefix: str = ""
    """What stands before all of them."""

    @property
    def text(self) -> str:
        """Whose names they are."""
        return _CALLED[self.format] + (f" behind {shown(self.prefix)}" if self.prefix else "")


def recognise(
    model: Model, names: Collection[str], where: object, behind: Collection[str] = ()
) -> Recognised:
    """Return what the tensors of a source are called; others are there too, but left `behind`.

    Raises
    ------
    LayoutError
        If none has the name of a tensor of the model, or some have no name of its family.
    """
    forms = {form_of(name) for name in (*names, *behind)}
    known = {}
    for format in _CALLED:
        if format not in model.family.refused:
            by_place = spellings(model, format)
            known[format] = by_place, {form_of(one) for every in by_place.values() for one in every}
    format = max(known, key=lambda one: sum(form in known[one][1] for form in forms))
    by_place, of_format = known[format]
    strange = sorted(name for name in names if form_of(name) not in of_format)
    if len(strange) == len(names):
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

    every = {*names, *behind}
    by_form = names_by_form(every)

    def there(pattern: str) -> bool:
        return bool(bindings(pattern, by_form)) if "{" in pattern else pattern in every

    absent = []
    for tensor in model.tensors:
        side = tensor.side if format == "hf" else tensor.places[format]
        if side is not None and not any(map(there, by_place[side[0]])):
            absent.append(tensor)
    return Recognised(format, tuple(absent))


def outer_prefix(model: Model, names: Collection[str]) -> str:
    """Return what stands before all names of a model, as ``model.`` in a job's state dict."""
    known = {
        form_of(name)
        for format in _CALLED
        if format not in model.family.refused
        for every in spellings(model, format).values()
        for name in every
    }
    found: Counter[str] = Counter()
    for name in names:
        words = name.split(".")
        ends = (".".join(words[at:]) for at in range(len(words)))
        end = next((one for one in ends if form_of(one) in known), None)
        if end == name:
            return ""
        if end is not None:
            found[name.removesuffix(end)] += 1
    return found.most_common(1)[0][0] if found else ""


def _users(names: Collection[str]) -> str:
    """Return as text the families that have a tensor of the first of some names."""
    form = next(map(form_of, names), "")
    found = []
    for family_name in family_names():
        family = shipped_family(family_name)
        users = (row for table, row in rows_in(family) if form in _forms(family, table, row))
        if (row := next(users, None)) is not None:
            found.append(
                f"{family_name!r}" + (f" (where {', '.join(row.when)})" if row.when else "")
            )
    return f"families {', '.join(found)}" if found else "no family that is known"


def _forms(family: Family, table: str, row: Row) -> set[str]:
    """Return what a row is called in all places."""
    found = set()
    for place, side in {"hf": row.side, **row.places}.items():
        prefix = family.prefix["megatron" if place == "megatron" else "hf"]
        if side is not None:
            found.add(form_of(("" if table == "model" else prefix) + side[0]))
    return found
