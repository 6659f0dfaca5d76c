"""A checkpoint under the names that a model has elsewhere, given the model's config alone."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Final

from shardspec.checkpoint import catalog
from shardspec.checkpoint.compare.verify import diff_checkpoints
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.quantization.cuts import quantized_in
from shardspec.checkpoint.select.choice import Choice, wanted_names
from shardspec.checkpoint.select.mapped import Naming, through
from shardspec.checkpoint.storage.from_text import storage_path
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.errors import CheckpointError, LayoutError
from shardspec.families.family import NamesOf, family_of
from shardspec.families.maps import chain_of, refuse
from shardspec.families.model import Model, model_of
from shardspec.families.recognise import Recognised, recognise
from shardspec.input_files import read_json_object
from shardspec.resharding.name_map import NameMap
from shardspec.resharding.patterns import filled
from shardspec.resharding.sizes import text_config
from shardspec.text import Argument, shown

_OPTIMIZER: Final = re.compile(r"(chained_\d+\.)?optimizer\..*", re.DOTALL)
"""What Megatron-core calls the state of an optimizer, which is no tensor of the model."""

_PADDED_TO: Final = tuple(1 << power for power in range(3, 15))
"""Multiples to which trainers and engines pad a vocabulary; others are stated in the config."""


@dataclass(frozen=True, slots=True)
class ModelNames(Naming):
    """Names of a model's tensors, as `names=` takes them; see `model_names`."""

    config: Mapping[str, object]
    names: NamesOf
    home: StoragePath | None
    """The directory of the config, whose files go along into an output directory; by default those
    beside the checkpoint do."""
    fill_from: catalog.Catalog | None

    def with_dtype(self, dtype: object) -> Naming:
        """Return the same where what is quantized is to be made a dtype."""
        if self.fill_from is None:
            return self
        from shardspec.checkpoint.quantization.dequantize import dequantized

        return replace(self, fill_from=dequantized(self.fill_from, dtype, config=self.config))

    def recognised(self, source: catalog.Catalog, choice: Choice) -> Recognised:
        """Return what the tensors of a checkpoint are called that are wanted."""
        with _about_input():
            model, names = self._model(), _weights(wanted_names(source, choice))
            _refuse_quantized(source, names)
            return recognise(model, names, source.directory)

    def applied(
        self, source: catalog.Catalog, choice: Choice | None, dropped: Collection[str]
    ) -> catalog.Catalog:
        """Return a checkpoint under these names; `choice` may leave tensors behind."""
        with _about_input():
            return self._applied(source, choice, dropped)

    def maps_for(self, names: Collection[str]) -> tuple[NameMap, ...]:
        """Return the maps from the names of a state dict in memory to these."""
        if self.fill_from is not None:
            raise LayoutError("fill_from= is for checkpoints; give all tensors in the state dict")
        model, where = self._model(), "the state dict"
        recognised = recognise(model, _weights(names), where)
        if recognised.absent:
            side = recognised.absent[0].side[:1]
            name = filled(side, next(model.instances(side[0])))[0]
            raise LayoutError(f"the state dict lacks {shown(name)}, which the config says it has")
        for place in (recognised.format, self.names):
            refuse(model, place)
        inner = [name.removeprefix(recognised.prefix) for name in names]
        renamed = NameMap(tuple(((name,), (new,)) for name, new in zip(names, inner, strict=True)))
        maps = chain_of(model, recognised.format, self.names, inner)
        return (renamed, *maps) if recognised.prefix else maps

    def _applied(
        self, source: catalog.Catalog, choice: Choice | None, dropped: Collection[str]
    ) -> catalog.Catalog:
        model, weights = self._model(), _weights(source.names)
        wanted = {*weights} - {*dropped}
        extras = source.extras
        if choice is not None:
            wanted &= {*wanted_names(source, choice)}
            extras = {name: value for name, value in extras.items() if choice.wants(name)}
        _refuse_quantized(source, wanted)
        gone = {name: source.outline(name).shape for name in source.names if name not in wanted}
        # What the user leaves behind is not absent.
        recognised = recognise(model, wanted, source.directory, behind={*weights} - wanted)
        if recognised.prefix:
            inner = {name: name.removeprefix(recognised.prefix) for name in wanted}
            renamed = NameMap(tuple(((old,), (new,)) for old, new in inner.items()))
            source = through(source, [renamed], gone, extras)
            wanted, gone = {*inner.values()}, dict(source.facts.dropped)
        for place in (recognised.format, self.names):
            refuse(model, place)
        if recognised.absent and self.fill_from is None:
            side = recognised.absent[0].side[:1]
            name = filled(side, next(model.instances(side[0])))[0]
            rest = len(recognised.absent) - 1
            raise LayoutError(
                f"{source.directory} lacks {shown(name)}{f' and {rest} more' if rest else ''}, "
                f"which a model of the family {model.family.name!r} has by the config; correct the "
                "config, or take what is lacking from the original checkpoint with ",
                Argument("fill_from"),
            )
        _check_copies(source, model, recognised.format, self.names)
        _check_padding(source, model, recognised.format, text_config(self.config))
        with _about_model(source, model):
            if self.fill_from is None:
                maps = chain_of(model, recognised.format, self.names, wanted)
                made = through(source, maps, gone, extras)
            else:
                absent = {tensor.side for tensor in recognised.absent}
                present = (tensor for tensor in model.tensors if tensor.side not in absent)
                part = replace(model, tensors=tuple(present))
                maps = chain_of(part, recognised.format, "hf", wanted)
                made = self._filled(through(source, maps, gone, extras), model, self.fill_from)
        return made.with_facts(replace(made.facts, described_in=self.home))

    def _filled(
        self, part: catalog.Catalog, model: Model, origin: catalog.Catalog
    ) -> catalog.Catalog:
        """Return part of a model with what it lacks, and what the family does not know of."""
        others = {*origin.names} - {*part.names} - {*part.facts.dropped}
        expected = model.shapes()
        lacking = {name: (origin, name) for name in others if name in expected}
        tensors = {name: (part, name) for name in part.names} | lacking
        made = through(Assembled(part, tensors), chain_of(model, "hf", self.names), {}, part.extras)
        added = [*lacking]
        if self.names == "hf":
            beside = others - lacking.keys() - {tensor.side[0] for tensor in model.copies}
            every = {name: (made, name) for name in made.names}
            made = Assembled(part, every | {name: (origin, name) for name in beside})
            added += beside
        _refuse_quantized(origin, added)
        return made.with_facts(replace(made.facts, filled=tuple(sorted(added))))

    def _model(self) -> Model:
        model = model_of(family_of(self.config), self.config)
        if not model.whole:
            raise LayoutError(
                "the config does not say how many layers there are; give all of the model's "
                "config.json"
            )
        return model


def model_names(
    model: Path | str | Mapping[str, object],
    names: NamesOf = "hf",
    *,
    fill_from: PurePath | str | catalog.Catalog | None = None,
) -> ModelNames:
    """Return the names of a model's tensors, for `names=` of what reads and writes checkpoints.

    What a checkpoint is called already is recognised by its names. All that the config says is to
    be there, is, in shapes that fit it, and nothing else.

    Parameters
    ----------
    model
        A directory with the model's ``config.json``, the file itself, or what is in it.
    names
        Which names: ``"hf"``, those of transformers' files; ``"live"``, of its models in memory;
        ``"megatron"``; ``"torch_dist"``, as Megatron-core saves them, or ``"sharded"``, the same
        with all layers numbered; ``"fused"``, of engines.
    fill_from
        The original checkpoint, from which is taken what training did not have, such as layers
        that predict further tokens.

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
        # What lies beside a file of another name need not be of this model.
        home = storage_path(str(place.parent)) if place.name == "config.json" else None
    with _about_input():
        family_of(config)
    origin = None if fill_from is None else as_catalog(fill_from)
    return ModelNames(config, names, home, origin)


@contextmanager
def _about_input() -> Iterator[None]:
    """Say that what does not fit is in a checkpoint or a config, not in how this is called."""
    try:
        yield
    except LayoutError as error:
        raise CheckpointError(*error.parts) from None


@contextmanager
def _about_model(source: catalog.Catalog, model: Model) -> Iterator[None]:
    """Say that tensors are not those that a config says, and what to do."""
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
    """Tensors of several checkpoints, each under a name of its own."""

    def __init__(
        self,
        source: catalog.Catalog,
        parts: Mapping[str, tuple[catalog.Catalog, str]],
    ) -> None:
        kept = (name for name, (owner, old) in parts.items() if old in owner.facts.keeps_dtype)
        facts = replace(source.facts, keeps_dtype=frozenset(kept))
        super().__init__(source, parts.keys(), source.extras, facts=facts)
        self._parts = parts
        self._others = {owner: None for owner, _ in parts.values() if owner is not source}
        more = (path for owner in self._others for path in owner.files)
        self.files = tuple(dict.fromkeys((*self.files, *more)))

    def _look_up(self, name: str) -> catalog.StoredTensor:
        source, old = self._parts[name]
        return replace(source.tensor(old), name=name)

    def check_unchanged(self, beside: Iterable[StoragePath] = ()) -> None:
        """Check that no file of any of the checkpoints has changed since it was opened."""
        super().check_unchanged(beside)
        for source in self._others:
            source.check_unchanged()


def _weights(names: Iterable[str]) -> list[str]:
    """Return names without those of an optimizer's state."""
    return [name for name in names if not _OPTIMIZER.fullmatch(name)]


def _refuse_quantized(source: catalog.Catalog, names: Collection[str]) -> None:
    """Raise LayoutError if codes, or what gives them a meaning, are among the names."""
    why = quantized_in(source).why
    for name in sorted(why.keys() & {*names}):
        raise LayoutError(
            f"{source.directory}: {shown(name)} is quantized ({why[name]}), and the names of a "
            "model are for its 16- or 32-bit weights; dequantize them on the way with ",
            Argument("dtype", value="bf16"),
        )


def _check_padding(
    source: catalog.Catalog, model: Model, format: str, config: Mapping[str, object]
) -> None:
    """Raise LayoutError if a vocabulary has more rows than padding adds to that of the config."""
    vocab, stated = (config.get(key) for key in ("vocab_size", "padded_vocab"))
    if format == "hf" or not isinstance(vocab, int):
        return
    for tensor in model.tensors:
        side = tensor.places[format]
        if side is None or {*tensor.cut.values()} != {"vocab"} or side[0] not in {*source.names}:
            continue
        rows = source.outline(side[0]).shape[0]
        multiples = (m for m in _PADDED_TO if rows - vocab < m and rows % m == 0)
        if rows > vocab and rows != stated and not any(multiples):
            raise LayoutError(
                f"{source.directory}: {shown(side[0])} has {rows} rows, and the config says "
                f"vocab_size={vocab}, which no padding makes {rows}; correct the config, or state "
                f'"padded_vocab": {rows} in it'
            )


def _check_copies(source: catalog.Catalog, model: Model, format: str, target: str) -> None:
    """Raise CheckpointError if a tensor that only repeats another one says something else."""
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
                    f"{source.directory}: {shown(own[0])} is to repeat {shown(copied[0])} by the "
                    "config, but differs from it; correct the config"
                )
