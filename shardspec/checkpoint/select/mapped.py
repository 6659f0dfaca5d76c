"""A checkpoint under the names and shapes of another model, by a name map; nothing is copied.

An equation between views says where in a source tensor the elements of a target lie. So a stored
box of the source is a few boxes of the target, each with strides of its own in the same file.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from shardspec.boxes import box_shape, box_size
from shardspec.checkpoint import catalog
from shardspec.checkpoint.select.choice import Choice, check_drop, wanted_names
from shardspec.checkpoint.state.state_dict import fitting_paths
from shardspec.checkpoint.storage.strict_json import json_beside
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.resharding.name_map import Equation, NameMap, Names, Naming, Shape, padding
from shardspec.resharding.total import apply_map
from shardspec.resharding.views import MOST_PIECES, TensorView, View, bounded, parts_of_view
from shardspec.text import shown


class CatalogNaming(Naming):
    """Chooses the name maps for a checkpoint, and reads of it what a choice depends on."""

    __slots__ = ()
    config: Mapping[str, object]
    """The config of the model."""

    @abstractmethod
    def with_dtype(self, dtype: object) -> "CatalogNaming":
        """Return the same for output in a dtype, where quantized tensors are dequantized."""

    @abstractmethod
    def applied(
        self, source: catalog.Catalog, choice: Choice | None, dropped: Collection[str]
    ) -> catalog.Catalog:
        """Return a checkpoint with the maps applied."""


def mapped(
    source: catalog.Catalog,
    names: Names | None,
    choice: Choice | None = None,
    *,
    dropped: Collection[str] = (),
) -> catalog.Catalog:
    """Return a checkpoint with a map applied; as it is without one.

    What `choice` does not want, and what is `dropped`, the map need not use. Raises LayoutError if
    the map is not total for these tensors, has no use for some, is for models of another type, or
    mixes dtypes, or a tensor is stored with a reduction pending.
    """
    if names is None:
        return source
    if isinstance(names, CatalogNaming):
        return names.applied(source, choice, dropped)
    if not isinstance(names, NameMap | Mapping):
        raise LayoutError(
            f"names= is {shown(names)}; give a NameMap, a dict of new names, or model_names(...)"
        )
    extras = source.extras
    if choice is not None:
        dropped = {*dropped, *source.names} - {*wanted_names(source, choice)}
        extras = {name: value for name, value in extras.items() if choice.wants(name)}
    shapes = {name: source.outline(name).shape for name in sorted(dropped)}
    if isinstance(names, Mapping):
        if unknown := [name for name in names if name not in source.names]:
            raise LayoutError(f"names= maps {shown(unknown[0])}, which {source.directory} lacks")
        rules = (((name,), (names.get(name, name),)) for name in source.names)
        return MappedCatalog(source, NameMap(tuple(rules)), shapes, extras)
    return through(source, [names], shapes, extras)


def mapped_choice(
    source: catalog.Catalog, names: Names | None, choice: Choice
) -> tuple[catalog.Catalog, Choice]:
    """Return a checkpoint with a map applied to what is chosen, and what remains to be chosen.

    Raises LayoutError as `mapped` does, and if tensors are to be dropped without a map.
    """
    if names is None:
        check_drop(choice)
        return source, choice
    return mapped(source, names, choice), choice.after_map()


def through(
    source: catalog.Catalog,
    maps: Sequence[NameMap],
    dropped: Mapping[str, Shape],
    extras: Mapping[str, object],
) -> catalog.Catalog:
    """Return a checkpoint with maps applied in turn to what is not dropped."""
    for name_map in maps:
        source = MappedCatalog(source, configured(source, name_map), dropped, extras)
        dropped = dict(source.facts.dropped)
    return source


def configured(source: catalog.Catalog, names: NameMap) -> NameMap:
    """Return a map with the sizes that the config.json beside a checkpoint gives.

    Raises LayoutError if that is of a model that the map is not for.
    """
    config = config_beside(source)
    if config is None:
        return names
    numbers = {name: size for name, size in names.sizes.items() if isinstance(size, int)}
    return names.with_sizes(config).with_sizes(numbers)


def config_beside(source: catalog.Catalog) -> dict[str, object] | None:
    """Return what the config.json beside a checkpoint says, if there is one that can be read."""
    config = json_beside(source.home, "config.json")
    return config if isinstance(config, dict) else None


def config_of(source: catalog.Catalog, names: Names | None) -> Mapping[str, object] | None:
    """Return the config of a model: that of its names, else the one beside the checkpoint."""
    return names.config if isinstance(names, CatalogNaming) else config_beside(source)


def require_finished(tensor: catalog.Outline[catalog.FileBox]) -> None:
    """Raise LayoutError if a tensor is stored with a reduction pending."""
    if tensor.pending:
        raise LayoutError(
            f"{tensor.name!r} is stored with a reduction pending; merge or reshard the checkpoint "
            "first, which finishes it"
        )


class MappedCatalog(catalog.DerivedCatalog):
    """A checkpoint with a map applied; boxes are mapped on demand."""

    def __init__(
        self,
        source: catalog.Catalog,
        names: NameMap,
        dropped: Mapping[str, Shape],
        extras: Mapping[str, object],
    ) -> None:
        outlines = {name: source.outline(name) for name in source.names if name not in dropped}
        shapes = {name: outline.shape for name, outline in outlines.items()}
        targets, behind, report = apply_map(names, {**shapes, **dropped}, dropped)
        if not report.equations:
            first = ", ".join(map(shown, source.names[:3]))
            raise LayoutError(
                f"the map names no tensor of {source.directory}, whose names start with {first}"
            )
        report.require_total()
        self._equations: dict[str, list[Equation]] = {}
        self._dtypes: dict[str, str] = {}
        for equation in report.equations:
            outline = outlines[equation.source]
            dtype = self._dtypes.setdefault(equation.target, outline.dtype)
            if dtype != outline.dtype:
                raise LayoutError(
                    f"the map makes {equation.target!r} of {dtype} and of {outline.dtype}, that of "
                    f"{equation.source!r}; cast one of them first"
                )
            require_finished(outline)
            self._equations.setdefault(equation.target, []).append(equation)
        self._padding: dict[str, list[TensorView]] = {}
        for target, side in padding(names, targets):
            if target not in self._equations:
                raise LayoutError(f"the map fills {target!r} with zeros alone; leave it out")
            self._padding.setdefault(target, []).append(side)
        self._shapes = targets
        facts = source.facts
        kept = (e.target for e in report.equations if e.source in facts.keeps_dtype)
        facts = replace(
            facts,
            keeps_dtype=frozenset(kept),
            dropped=behind,
            paths=fitting_paths(facts.paths, extras, self._equations),
            objects={name: facts.objects[name] for name in facts.objects if name in extras},
            pickled={name: facts.pickled[name] for name in facts.pickled if name in extras},
        )
        super().__init__(source, self._equations, extras, source.mesh, facts)

    def equations(self, name: str) -> Sequence[Equation]:
        """Return what a tensor of the target is made of."""
        return self._equations[name]

    def _look_up(self, name: str) -> catalog.StoredTensor:
        width = item_bytes(self._dtypes[name])
        parts_of_files = (
            box
            for equation in self._equations[name]
            for stored in self.base.tensor(equation.source).boxes
            for box in target_boxes(equation.view, stored, width)
        )
        boxes = list(islice(parts_of_files, MOST_PIECES + 1))
        bounded(len(boxes))
        for side in self._padding.get(name, ()):
            factors = sorted(factor for dim in side.dims for factor in dim)
            whole = tuple((0, factor.length) for factor in factors)
            parts = parts_of_view(side, whole, [0] * len(whole)) if box_size(whole) else ()
            boxes += [catalog.StoredBox(part, (), 0, catalog.ZEROS, 0) for part, _, _ in parts]
        return catalog.StoredTensor(
            name, self._shapes[name], self._dtypes[name], None, (), tuple(boxes)
        )


def target_boxes(view: View, stored: catalog.StoredBox, width: int) -> Iterator[catalog.StoredBox]:
    """Yield the boxes of the target that a stored box of the source is."""
    strides = stored.strides or catalog.row_major_strides(box_shape(stored.box), width)
    sides = [[side] for side in stored.box]
    for box in view.source.boxes(stored.box, len(view.shape)):
        steps, at = view.source.in_memory(strides, sides, [lo for lo, _ in box])
        for part, by, before in parts_of_view(view.target, box, steps):
            plain = catalog.row_major_strides(box_shape(part), width)
            flat = all(n == 1 or a == b for n, a, b in zip(box_shape(part), by, plain, strict=True))
            yield replace(
                stored, box=part, offset=stored.offset + at + before, strides=None if flat else by
            )
