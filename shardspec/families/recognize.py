"""Recognizes whose names the tensors of a checkpoint have: transformers', Megatron's or vLLM's.

Names may have any prefix, such as ``actor.``:

>>> spelling = Spelling(base="model.", inner="actor.model.", outer="actor.")
>>> spelling.plain("actor.lm_head.weight", ()), spelling.spelled("model.norm.weight")
('lm_head.weight', 'actor.model.norm.weight')
"""

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
    """Prefixes of the names in a source, and the prefix of the format."""

    base: str
    """Prefix of the base model in the format, as ``model.``; the head has none."""
    inner: str
    """Prefix of the base model in the source."""
    outer: str
    """Prefix of other tensors in the source."""

    @property
    def is_plain(self) -> bool:
        """True if names in the source have the prefix of the format."""
        return self.inner == self.base and not self.outer

    def plain(self, name: str, forms: Collection[str]) -> str:
        """Return the name that the format has for a name in the source."""
        if self.is_plain:
            return name
        plain = self.base + name.removeprefix(self.inner)
        if name.startswith(self.inner) and form_of(plain) in forms:
            return plain
        return name.removeprefix(self.outer)

    def spelled(self, plain: str) -> str:
        """Return the name that the source has for a name in the format."""
        if self.base and plain.startswith(self.base):
            return self.inner + plain.removeprefix(self.base)
        return self.outer + plain


class Recognized(NamedTuple):
    """The format and the tensors of a source, recognized by its names."""

    format: str
    """``hf``, ``megatron`` or ``fused``."""
    spelling: Spelling
    known: Mapping[str, str]
    """Name in the source -> name in the format, of the family's tensors."""
    strange: tuple[str, ...]
    """Names of other tensors in the source."""
    absent: tuple[Tensor, ...]
    """Tensors of the model that the source lacks."""

    @property
    def text(self) -> str:
        """Text with the tool whose names these are, and the prefix."""
        _, inner, outer = self.spelling
        if self.spelling.is_plain:
            return _CALLED[self.format]
        lead = f" behind {shown(outer or inner)}" if outer or inner else ", without a prefix"
        return _CALLED[self.format] + lead


def recognize(
    model: Model, shapes: Mapping[str, Shape], where: object, behind: Collection[str] = ()
) -> Recognized:
    """Return the naming convention, prefixes and missing tensors of a source.

    Parameters
    ----------
    model
        The model.
    shapes
        Name to global shape of the requested tensors.
    where
        The source, for errors.
    behind
        Names of the other tensors in the source.

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
        # Names of GPT-2 in files and in engines are equal; shapes differ by a transposition.
        sizes = {spelling.plain(name, forms): shape for name, shape in shapes.items()}
        fits = _fitting(model, format, sizes)
        ranked.append((hits, fits, format == "hf", format, spelling, forms))
    *_, format, spelling, forms = max(ranked, key=lambda entry: entry[:3])
    plain = {name: spelling.plain(name, forms) for name in shapes}
    known = {name: own for name, own in plain.items() if form_of(own) in forms}
    strange = tuple(sorted(shapes.keys() - known.keys()))
    if not known:
        first = ", ".join(map(shown, strange[:_SHOWN])) or "(there are none)"
        raise LayoutError(
            f"{where}: no tensor has a name of the family {model.family.name!r}; the first names, "
            f"{first}, belong to {_users(strange[:1])}; give the config of that model"
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
        f"{shown(strange[0].removeprefix(recognized.spelling.outer))}{rest}, which belongs to "
        f"{_users(strange)}; correct the config, or exclude such tensors with ",
        Argument("drop"),
    )


def _spelling(
    model: Model, format: str, samples: Mapping[str, str], forms: Collection[str]
) -> Spelling:
    """Return the prefixes of a source's names; `samples` has one for all that differ in numbers."""
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
        suffixes = (".".join(words[at:]) for at in range(len(words)))
        for suffix in suffixes:
            if (kind := form_of(suffix)) in cores:
                # A vision tower may have layers of the same names, and no embedding of tokens.
                inner[name.removesuffix(suffix)] += len(samples) if kind in embeddings else 1
                break
            if kind in outers:
                outer[name.removesuffix(suffix)] += 1
                break
    lead = inner.most_common(1)[0][0] if inner else base
    if outer:
        return Spelling(base, lead, outer.most_common(1)[0][0])
    return Spelling(base, lead, lead.removesuffix(base) if lead.endswith(base) else "")


def _fitting(model: Model, format: str, shapes: Mapping[str, Shape]) -> int:
    """Count the tensors in `shapes` whose shape is that of the model in a format."""
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
    """Return the families with a tensor of the first name in `names`, as text for an error."""
    form = next(map(form_of, names), "")
    users = []
    for family_name in family_names():
        rows = (row for own, row, _ in forms_in(shipped_family(family_name)) if own == form)
        if (row := next(rows, None)) is not None:
            where = f" (where {', '.join(row.when)})" if row.when else ""
            users.append(f"{family_name!r}{where}")
    return f"families {', '.join(users)}" if users else "no known family"
