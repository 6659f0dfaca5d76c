"""Recognizes the names of a checkpoint's tensors by a model's family, with any prefix or suffix."""

from collections import Counter
from collections.abc import Collection, Mapping
from math import prod
from typing import Final, NamedTuple

from shardspec.errors import LayoutError
from shardspec.families.family import family_names, forms_in, shipped_family
from shardspec.families.maps import spellings
from shardspec.families.model import Model, Tensor
from shardspec.resharding.map_file import bindings, filled, form_of, known_sizes, names_by_form
from shardspec.resharding.name_map import Shape
from shardspec.resharding.views import parse_view
from shardspec.text import Argument, shown

_CALLED: Final = {
    "hf": "transformers",
    "megatron": "Megatron-core",
    "fused": "engines with fused matrices",
}
_SHOWN: Final = 3


class Spelling(NamedTuple):
    """Text before the names of a source, and the text that a format has there."""

    base: str
    """Text before the tensors of the base model in the format, as ``model.``; the head has none."""
    inner: str
    """Text before the tensors of the base model in the source."""
    outer: str
    """Text before the other tensors in the source."""

    @property
    def is_plain(self) -> bool:
        """True if the source has the names of the format."""
        return self.inner == self.base and not self.outer

    def plain(self, name: str, forms: Collection[str]) -> str:
        """Return the name of the format for a name of the source, the same if there is none."""
        if self.is_plain:
            return name
        plain = self.base + name.removeprefix(self.inner)
        if name.startswith(self.inner) and form_of(plain) in forms:
            return plain
        return name.removeprefix(self.outer)

    def spelled(self, plain: str) -> str:
        """Return the name of the source for a name of the format."""
        if self.base and plain.startswith(self.base):
            return self.inner + plain.removeprefix(self.base)
        return self.outer + plain


class Recognized(NamedTuple):
    """The names of a source."""

    format: str
    """``hf``, ``megatron`` or ``fused``."""
    spelling: Spelling
    known: Mapping[str, str]
    """Tensors of the family: name in the source to name in the format."""
    strange: tuple[str, ...]
    """Names in the source of other tensors."""
    absent: tuple[Tensor, ...]
    """Tensors of the model that the source lacks."""

    @property
    def text(self) -> str:
        """The tool that uses the names, and what precedes them."""
        _, inner, outer = self.spelling
        if self.spelling.is_plain:
            return _CALLED[self.format]
        lead = f" behind {shown(outer or inner)}" if outer or inner else ", without a prefix"
        return _CALLED[self.format] + lead


def recognize(
    model: Model, shapes: Mapping[str, Shape], where: object, behind: Collection[str] = ()
) -> Recognized:
    """Return the format and the spelling of a source's names.

    Parameters
    ----------
    model
        The model.
    shapes
        Name to global shape of the tensors that are requested.
    where
        The source, for errors.
    behind
        Names of the tensors that the source has too.

    Raises
    ------
    LayoutError
        If no tensor has a name of the family.
    """
    samples = {form_of(name): name for name in (*behind, *shapes)}
    ranked = []
    for format in _CALLED.keys() - model.family.refused.keys():
        names = spellings(model, format)
        forms = {form_of(name) for every in names.values() for name in every}
        spelling = _spelling(model, format, samples, forms)
        hits = sum(form_of(spelling.plain(name, forms)) in forms for name in samples.values())
        # GPT-2 has the same names in files and in engines, where matrices are transposed.
        sizes = {spelling.plain(name, forms): shape for name, shape in shapes.items()}
        fits = _fitting(model, format, sizes)
        ranked.append((hits, fits, format == "hf", format, spelling, forms))
    *_, format, spelling, forms = max(ranked, key=lambda one: one[:3])
    plain = {name: spelling.plain(name, forms) for name in shapes}
    known = {name: own for name, own in plain.items() if form_of(own) in forms}
    strange = tuple(sorted(shapes.keys() - known.keys()))
    if not known:
        first = ", ".join(map(shown, strange[:_SHOWN])) or "(there are none)"
        raise LayoutError(
            f"{where}: no tensor has a name of the family {model.family.name!r}; the names start "
            f"with {first}, of {_users(strange[:1])}; give the config of that model"
        )
    every = {*known.values()} | {spelling.plain(name, forms) for name in behind}
    by_form = names_by_form(every)

    def exists(pattern: str) -> bool:
        return bool(bindings(pattern, by_form)) if "{" in pattern else pattern in every

    spelled = spellings(model, format)
    absent = []
    for tensor in model.tensors:
        side = tensor.side if format == "hf" else tensor.places[format]
        if side is not None and not any(map(exists, spelled[side[0]])):
            absent.append(tensor)
    return Recognized(format, spelling, known, strange, tuple(absent))


def require_known(model: Model, recognized: Recognized, where: object) -> None:
    """Raise LayoutError if a source has tensors that the model lacks."""
    if not (strange := recognized.strange):
        return
    rest = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
    raise LayoutError(
        f"{where}: a model of the family {model.family.name!r} with this config has no "
        f"{shown(strange[0].removeprefix(recognized.spelling.outer))}{rest}, which is of "
        f"{_users(strange)}; correct the config, or leave such tensors behind by name with ",
        Argument("drop"),
    )


def _spelling(
    model: Model, format: str, samples: Mapping[str, str], forms: Collection[str]
) -> Spelling:
    """Return what precedes the names of a source; `samples` has a name of each form."""
    prefix = model.family.prefix["hf"]
    nested = format != "megatron" and prefix.count(".") > 2
    base = prefix[: prefix.index(".") + 1] if nested else ""
    cores = {form.removeprefix(base) for form in forms if form.startswith(base)}
    outers = {form for form in forms if not form.startswith(base)}
    embeddings = {
        form_of(own[0]).removeprefix(base)
        for tensor in model.tensors
        if {*tensor.cut.values()} == {"vocab"} and not tensor.copy_of
        for own in [tensor.side if format == "hf" else tensor.places[format]]
        if own is not None
    }
    inner, outer = Counter[str](), Counter[str]()
    for name in samples.values():
        words = name.split(".")
        ends = (".".join(words[at:]) for at in range(len(words)))
        for end in ends:
            if (kind := form_of(end)) in cores:
                # A vision tower may have layers of the same names, and no embedding of tokens.
                inner[name.removesuffix(end)] += len(samples) if kind in embeddings else 1
                break
            if kind in outers:
                outer[name.removesuffix(end)] += 1
                break
    lead = inner.most_common(1)[0][0] if inner else base
    if outer:
        return Spelling(base, lead, outer.most_common(1)[0][0])
    return Spelling(base, lead, lead.removesuffix(base) if lead.endswith(base) else "")


def _fitting(model: Model, format: str, shapes: Mapping[str, Shape]) -> int:
    """Return the number of tensors whose shapes are those of a format."""
    known, count = known_sizes(model.sizes), 0
    for tensor in model.tensors:
        side = tensor.places["file" if format == "hf" else format]
        if side is None:
            continue
        numbers = next(model.instances(side[0]), {})
        shape = shapes.get(filled(side[:1], numbers)[0])
        dims = parse_view(side[1])
        count += shape == tuple(prod(known.get(name, 0) for name in dim) for dim in dims)
    return count


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
