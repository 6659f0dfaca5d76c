"""Renames a model's tensors for another tool: Megatron's ``linear_qkv`` for q, k and v, say."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import NamedTuple

from shardspec.checkpoint import catalog
from shardspec.checkpoint.compare.diff import diff_checkpoints
from shardspec.checkpoint.convert.copy import Buffers, read_box
from shardspec.checkpoint.convert.select import (
    CatalogNaming,
    Choice,
    through,
    wanted_names,
    without_optimizer,
)
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.quantization.cuts import quantized_in
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError, LayoutError
from shardspec.families.family import NamesOf, family_of
from shardspec.families.maps import chain_of, refuse
from shardspec.families.model import Model, model_of
from shardspec.families.recognize import Recognized, Spelling, recognize, require_known
from shardspec.input_files import read_json_object
from shardspec.resharding.map_file import filled, text_config
from shardspec.resharding.name_map import NameMap, Shape
from shardspec.text import Argument, counted, shown


class _Way(NamedTuple):
    """The maps from a checkpoint's names to the requested ones, applied in order."""

    model: Model
    recognized: Recognized
    renamed: NameMap | None
    """New names of tensors that have a prefix, or lack one."""
    maps: tuple[NameMap, ...]
    """Maps to apply after renaming, in order."""

    @property
    def format(self) -> str:
        return self.recognized.format


@dataclass(frozen=True, slots=True)
class ModelNames(CatalogNaming):
    """Names of a model's tensors, as `names=` takes them; see `model_names`."""

    config: Mapping[str, object]
    names: NamesOf
    home: StoragePath | None
    """Directory of the config, whose files outputs copy; None for the checkpoint's directory."""
    fill_from: catalog.Catalog | None
    drop_rows: bool = False
    """True if rows beyond the vocabulary are dropped, whatever they contain."""

    def with_dtype(self, dtype: object) -> "ModelNames":
        """Return a copy for output in `dtype`: quantized tensors are dequantized to it."""
        if self.fill_from is None:
            return self
        from shardspec.checkpoint.quantization.dequantize import dequantized

        return replace(self, fill_from=dequantized(self.fill_from, dtype, config=self.config))

    def notes(self, source: catalog.Catalog, choice: Choice) -> list[str]:
        """Return lines for the user, such as which padding rows are dropped."""
        with _about_input():
            every = wanted_names(source, choice)
            names = without_optimizer(every)
            _refuse_quantized(source, names)
            shapes = {name: source.outline(name).shape for name in names}
            found = recognize(self._model(), shapes, source.directory)
            require_known(self._model(), found, source.directory)
        notes = [f"has the names of {found.text}"]
        if len(names) < len(every):
            count = counted(len(every) - len(names), "tensor")
            notes.append(f"{count} of the optimizer's state left out")
        return notes

    def maps(
        self,
        source: Mapping[str, Shape],
        where: object = "the state dict",
        behind: Collection[str] = (),
    ) -> tuple[NameMap, ...]:
        """Return the maps that rename a source's tensors; those in `behind` may be missing."""
        if self.fill_from is not None:
            raise LayoutError(
                "a state dict in memory cannot be filled in from a checkpoint; omit ",
                Argument("fill_from"),
            )
        with _about_input():
            way = self._way(source, where, behind)
            padded_vocab = self.config.get("padded_vocab")
            for name, rows in self._lost_rows(source, way).items():
                if rows.stop != padded_vocab:
                    raise LayoutError(
                        f"{where}: {shown(name)} has {rows.stop} rows, and the config says "
                        f'vocab_size={rows.start}; add "padded_vocab": {rows.stop} to it'
                    )
        return way.maps if way.renamed is None else (way.renamed, *way.maps)

    def applied(
        self, source: catalog.Catalog, choice: Choice | None, dropped: Collection[str]
    ) -> catalog.Catalog:
        """Return a view of a checkpoint under the new names; `choice` may exclude tensors."""
        with _about_input():
            return self._applied(source, choice, dropped)

    def _applied(
        self, source: catalog.Catalog, choice: Choice | None, dropped: Collection[str]
    ) -> catalog.Catalog:
        weights = without_optimizer(source.names)
        selected = {*weights} - {*dropped}
        extras = source.extras
        if choice is not None:
            selected &= {*wanted_names(source, choice)}
            extras = {name: value for name, value in extras.items() if choice.wants(name)}
        _refuse_quantized(source, selected)
        gone = {name: source.outline(name).shape for name in source.names if name not in selected}
        shapes = {name: source.outline(name).shape for name in selected}
        way = self._way(shapes, source.directory, behind={*weights} - selected)
        model = way.model
        if way.renamed is not None:
            source = through(source, [way.renamed], gone, extras)
            gone = dict(source.facts.dropped)
        _check_copies(source, model, way.format, self.names)
        for name, rows in self._lost_rows(shapes, way).items():
            if not _alike(source.tensor(name), rows.start):
                raise LayoutError(
                    f"{source.directory}: {len(rows)} rows of {shown(name)} beyond "
                    f"vocab_size={rows.start} are neither zero nor equal; correct the config, or "
                    "drop them with ",
                    Argument("drop_rows", value=True),
                )
        with _about_model(source, model):
            made = through(source, way.maps, gone, extras)
            if self.fill_from is not None:
                made = self._filled(made, model, self.fill_from)
        return made.with_facts(replace(made.facts, described_in=self.home))

    def _way(
        self, shapes: Mapping[str, Shape], where: object, behind: Collection[str] = ()
    ) -> _Way:
        """Return maps to the new names, or ``hf`` if filled; tensors in `behind` may be missing."""
        model = self._model()
        # Excluded tensors do not count as missing.
        found = recognize(model, shapes, where, behind)
        require_known(model, found, where)
        for place in (found.format, self.names):
            refuse(model, place)
        if found.absent and self.fill_from is None:
            side = found.absent[0].side[:1]
            name = filled(side, next(model.instances(side[0])))[0]
            rest = len(found.absent) - 1
            raise LayoutError(
                f"{where} lacks {shown(name)}{f' and {rest} more' if rest else ''}, "
                f"which a model of the family {model.family.name!r} has by the config; correct the "
                "config, or take missing tensors from the original checkpoint with ",
                Argument("fill_from"),
            )
        renamed = None
        if any(old != new for old, new in found.known.items()):
            renamed = NameMap(tuple(((old,), (new,)) for old, new in found.known.items()))
        if self.fill_from is None:
            maps = chain_of(model, found.format, self.names, found.known.values())
            if self.names == "hf" and self._is_wrapped:
                if found.format != "hf":
                    raise LayoutError(
                        f"the config is of {shown(self.config.get('model_type'))}, but {where} "
                        "has only its language model; give the language model's own config, or "
                        "take the rest from the original with ",
                        Argument("fill_from"),
                    )
                maps = (*maps, *_respelled(model, found.spelling))
        else:
            part = _without(model, found)
            maps = chain_of(part, found.format, "hf", found.known.values())
        return _Way(model, found, renamed, maps)

    def _lost_rows(self, shapes: Mapping[str, Shape], way: _Way) -> dict[str, range]:
        """Return the padding rows that are dropped: {"embed": range(vocab_size, padded size)}."""
        vocab, stacked = text_config(self.config).get("vocab_size"), ("torch_dist", "sharded")
        padded = way.format == "hf" or (way.format == "megatron" and self.names in stacked)
        if self.drop_rows or padded or self.names == way.format or not isinstance(vocab, int):
            return {}
        sizes = {new: shapes[old][0] for old, new in way.recognized.known.items() if shapes[old]}
        sides = (
            tensor.places[way.format]
            for tensor in way.model.tensors
            if {*tensor.cut.values()} == {"vocab"}
        )
        names = [side[0] for side in sides if side is not None and sizes.get(side[0], 0) > vocab]
        return {name: range(vocab, sizes[name]) for name in names}

    @property
    def _is_wrapped(self) -> bool:
        """True if the config's model contains a language model, as vision-language models do."""
        family = family_of(self.config)
        return self.config.get("model_type") not in (None, *family.model_types)

    def _filled(
        self, part: catalog.Catalog, model: Model, origin: catalog.Catalog
    ) -> catalog.Catalog:
        """Return `part` with the tensors that it lacks, taken from the `origin` checkpoint."""
        weights = without_optimizer(origin.names)
        shapes = {name: origin.outline(name).shape for name in weights}
        found = recognize(model, shapes, origin.directory)
        dropped_shapes = {
            name: origin.outline(name).shape for name in origin.names if name not in found.known
        }
        rules = tuple(((old,), (new,)) for old, new in found.known.items())
        own = _without(model, found)
        chain = chain_of(own, found.format, "hf", found.known.values())
        files = through(origin, (NameMap(rules), *chain), dropped_shapes, {})
        lacking = {*files.names} - {*part.names} - {*part.facts.dropped}
        tensors = {name: (part, name) for name in part.names}
        tensors |= {name: (files, name) for name in lacking}
        made = through(Assembled(part, tensors), chain_of(model, "hf", self.names), {}, part.extras)
        beside: dict[str, str] = {}
        added = lacking
        if self.names == "hf":
            spelling = found.spelling
            if self._is_wrapped:
                made = through(made, _respelled(model, spelling), {}, made.extras)
                added = {spelling.spelled(name) for name in lacking}
                beside = {name: name for name in found.strange}
            else:
                beside = {name.removeprefix(spelling.outer): name for name in found.strange}
            every = {name: (made, name) for name in made.names}
            made = Assembled(made, every | {new: (origin, name) for new, name in beside.items()})
        raw = [old for old, new in found.known.items() if new in lacking or new not in files.names]
        _refuse_quantized(origin, [*raw, *beside.values()])
        return made.with_facts(replace(made.facts, filled=tuple(sorted((*added, *beside)))))

    def _model(self) -> Model:
        return model_of(family_of(self.config), self.config)


def model_names(
    model: Path | str | Mapping[str, object],
    names: NamesOf = "hf",
    *,
    fill_from: PurePath | str | catalog.Catalog | None = None,
    drop_rows: bool = False,
) -> ModelNames:
    """Return the names of a model's tensors, as `names=` takes them.

    The names of a source are recognized. It must have every tensor that the config implies, in
    shapes that fit the config, and no others.

    Parameters
    ----------
    model
        A directory with the model's ``config.json``, the file itself, or its contents as a dict.
    names
        ``"hf"``, the names of transformers' files; ``"live"``, those of its models in memory;
        ``"megatron"``; ``"torch_dist"``, as Megatron-core saves them, or ``"sharded"``, the same
        with all layers numbered; ``"fused"``, of engines.
    fill_from
        The original checkpoint, to take tensors from that were not trained, such as layers for
        multi-token prediction.
    drop_rows
        Drop the rows of a padded vocabulary beyond ``vocab_size``, even if they are neither zero
        nor equal to each other.

    Raises
    ------
    CheckpointError, InputFileError
        If the config cannot be read, or its model belongs to no known family.

    Examples
    --------
    >>> sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    >>> model_names({"model_type": "qwen3", **sizes}, "megatron").names
    'megatron'
    """
    home = None
    if isinstance(model, Mapping):
        config = {**model}
    else:
        place = Path(model)
        if place.is_dir():
            place = place / "config.json"
        config = read_json_object(place)
        # Files beside a config of another name may belong to another model.
        home = storage_path(str(place.parent)) if place.name == "config.json" else None
    with _about_input():
        family_of(config)
    origin = None if fill_from is None else as_catalog(fill_from)
    return ModelNames(config, names, home, origin, drop_rows)


@contextmanager
def _about_input() -> Iterator[None]:
    """Turn a LayoutError into a CheckpointError: the input is wrong, not the call."""
    try:
        yield
    except LayoutError as error:
        raise CheckpointError(*error.parts) from None


@contextmanager
def _about_model(source: catalog.Catalog, model: Model) -> Iterator[None]:
    """Turn a LayoutError into a CheckpointError that names the model family and a remedy."""
    try:
        yield
    except LayoutError as error:
        raise CheckpointError(
            f"{source.directory} is no model of the family {model.family.name!r} with this "
            "config: ",
            *error.parts,
            "; give the config that it was saved with, or restore what is missing",
        ) from None


class Assembled(catalog.DerivedCatalog):
    """A checkpoint whose tensors come from several others, under new names."""

    def __init__(
        self,
        source: catalog.Catalog,
        parts: Mapping[str, tuple[catalog.Catalog, str]],
        others: Iterable[catalog.Catalog] = (),
    ) -> None:
        uncast = (name for name, (owner, old) in parts.items() if old in owner.facts.keeps_dtype)
        facts = replace(source.facts, keeps_dtype=frozenset(uncast))
        super().__init__(source, parts.keys(), source.extras, facts=facts)
        self._parts = parts
        owners = (*others, *(owner for owner, _ in parts.values()))
        self._others = {owner: None for owner in owners if owner is not source}
        more = (path for owner in self._others for path in owner.files)
        self.files = tuple(dict.fromkeys((*self.files, *more)))

    @property
    def sources(self) -> tuple[catalog.Catalog, ...]:
        """The checkpoints whose files are read."""
        every = (self.base, *self._others)
        return tuple(dict.fromkeys(source for each in every for source in each.sources))

    def _look_up(self, name: str) -> catalog.StoredTensor:
        source, old = self._parts[name]
        return replace(source.tensor(old), name=name)

    def check_unchanged(self, beside: Iterable[StoragePath] = ()) -> None:
        """Check that no file of any of the checkpoints has changed since it was opened."""
        super().check_unchanged(beside)
        for source in self._others:
            source.check_unchanged()


def _without(model: Model, found: Recognized) -> Model:
    """Return `model` without the tensors in `found.absent`, which the source lacks."""
    absent = {tensor.side for tensor in found.absent}
    present = tuple(tensor for tensor in model.tensors if tensor.side not in absent)
    return replace(model, tensors=present)


def _respelled(model: Model, spelling: Spelling) -> list[NameMap]:
    """Return a list of the map that changes the prefix of names; empty if the prefix is usual."""
    if spelling.is_plain:
        return []
    sides = {tensor.places["file"] or tensor.side: None for tensor in model.tensors}
    names = dict.fromkeys(side[0] for side in sides)
    rules = tuple(((name,), (spelling.spelled(name),)) for name in names)
    return [NameMap(rules, model.sizes, numbers=model.numbers)]


def _refuse_quantized(source: catalog.Catalog, names: Collection[str]) -> None:
    """Raise LayoutError if a tensor in `names` contains codes or scales."""
    why = quantized_in(source).why
    for name in sorted(why.keys() & {*names}):
        raise LayoutError(
            f"{source.directory}: {shown(name)} is quantized ({why[name]}), but only 16- and "
            "32-bit weights can be mapped to other names; dequantize in the same run with ",
            Argument("dtype", value="bf16"),
        )


def _alike(tensor: catalog.StoredTensor, first: int) -> bool:
    """Return True if the rows from `first` on look like padding: all zero, or all equal."""
    rows, columns = tensor.shape
    buffers = Buffers()
    expected = bytes(columns * item_bytes(tensor.dtype)) if rows - first == 1 else None
    with OpenFiles() as files:
        for row in range(first, rows):
            box = ((row, row + 1), (0, columns))
            data = b"".join(bytes(block) for block, _ in read_box(tensor, box, files, buffers))
            if expected not in (None, data):
                return False
            expected = data
    return True


def _check_copies(source: catalog.Catalog, model: Model, format: str, target: str) -> None:
    """Check that tensors that the config ties, such as head and embedding, are equal."""
    place = "megatron" if target in ("megatron", "torch_dist", "sharded") else target
    repeated = [own for own in model.tensors if own.copy_of and own.places.get(place, ()) is None]
    for tensor in (*model.copies, *repeated):
        other = model.named(tensor.copy_of)
        keys = ("file", "live") if format == "hf" else (format,)
        for key in keys:
            own, copied = tensor.places[key], other.places[key]
            if own is None or copied is None or not {own[0], copied[0]} <= {*source.names}:
                continue
            if source.origin(own[0]) == source.origin(copied[0]):
                continue
            pair = (Assembled(source, {copied[0]: (source, name)}) for name in (own[0], copied[0]))
            for _ in diff_checkpoints(*pair):
                raise CheckpointError(
                    f"{source.directory}: config ties {shown(own[0])} to {shown(copied[0])}, but "
                    "they differ; correct the config"
                )


def load_map(
    path: Path | str, config: Mapping[str, object] | None = None
) -> "NameMap | ModelNames":
    """Return a name map from a TOML file, with the numbers of a model's config for its symbols.

    Deprecated: use `NameMap.load` for files. A name of a former map, such as
    ``"qwen3-hf-to-fused"``, means `model_names` of the config.

    Raises
    ------
    LayoutError
        If the file cannot be read, or a former map is named without a config.
    """
    former = re.fullmatch(r"[\w.-]+-hf-to-(fused|megatron)", str(path))
    if former is None or Path(path).exists():
        return NameMap.load(path).with_sizes(config or {})
    if config is None:
        raise LayoutError(f"the map {path} was removed; give model_names(config, {former[1]!r})")
    return model_names(config, "fused" if former[1] == "fused" else "megatron")
