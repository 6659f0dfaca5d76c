"""Merges an adapter of PEFT into its base model: LoRA, rank-stabilized LoRA and DoRA.

A merged weight, base + scale * B @ A, is computed in float32 while it is read, and rounded once at
the end. As in PEFT, scale * B @ A is also rounded for embeddings and adapted bare parameters.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from math import prod, sqrt
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.catalog import Catalog, StoredTensor
from shardspec.checkpoint.convert.copy import Buffers
from shardspec.checkpoint.convert.model_names import Assembled, ModelNames, model_names
from shardspec.checkpoint.convert.numeric import strips
from shardspec.checkpoint.convert.select import (
    Choice,
    check_drop,
    config_of,
    mapped_choice,
)
from shardspec.checkpoint.quantization import with_numbers
from shardspec.checkpoint.quantization.cuts import quantized_in
from shardspec.checkpoint.quantization.derived import Recast, Recent
from shardspec.checkpoint.storage.strict_json import json_beside
from shardspec.dtypes import dtype_name, is_cast
from shardspec.errors import CheckpointError, ShardSpecError
from shardspec.resharding.name_map import Names
from shardspec.text import Argument, counted, shown

_CONFIG: Final = "adapter_config.json"
_PREFIX: Final = re.compile(r"(.*?\.)?base_model\.model\.")
_PART: Final = re.compile(
    r"(?P<module>.+?)\.(?P<kind>lora_(embedding_)?[AB]|lora_magnitude_vector)"
    r"(\.(?!(weight|bias)$)(?P<adapter>[^.]+))?(\.weight)?"
)
_SAVED: Final = re.compile(
    r"\.base_layer(?=\.)|\.modules_to_save(\.(?!(weight|bias)$)[^.]+)?(?=\.)"
)
"""Words that PEFT adds to the names of trained copies of tensors."""
_CHANGES_BASE: Final = re.compile(r"(pissa|olora|corda|loftq|lora_ga).*")
"""Initializations of adapters that change weights of the base; adapter files lack that change."""
_REFUSED: Final = (
    "layer_replication",
    "trainable_token_indices",
    "lora_bias",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_qalora",
    "use_bdlora",
)
"""Keys of methods that are not merged."""
_KINDS: Final = {
    "rank_pattern": dict | None,
    "alpha_pattern": dict | None,
    "target_parameters": list | None,
    "modules_to_save": list | None,
    "use_rslora": bool | None,
    "use_dora": bool | None,
    "fan_in_fan_out": bool | None,
}
"""Key of an adapter's config -> type of its value."""
_TRANSPOSED: Final = ("gpt_oss", "aria", "openai_privacy_filter")
"""Model types whose stacked experts are stored as (experts, inputs, outputs)."""
_TIED: Final = re.compile(r"(.+\.)?(lm_head|embed_out|embed_tokens|wte|embed_in)\.weight")
_HEAD: Final = re.compile(r"(.+\.)?(lm_head|embed_out)\.weight")
_MOST: Final = 1 << 32
"""Bound of ranks and alphas."""
_REPEATS: Final = "*+{"
"""Characters of a regular expression that repeat a part of it."""
_MOST_REPEATS: Final = 4
"""Maximum of these characters in a key of `rank_pattern`; more could take hours to match."""
_KEPT_BYTES: Final = 32 << 20
"""Bytes of an adapter's tensors that are kept in memory."""
_ALONE: Final = 1 << 18
"""Multiplications up to which OpenBLAS uses one thread; its threads would wait for each other."""


class _Delta(NamedTuple):
    """A change of one weight: names of the adapter's tensors, and how they are combined."""

    a: str
    """Name of A, of shape (rank * experts, inputs)."""
    b: str
    """Name of B, of shape (outputs, rank * experts)."""
    magnitude: str
    """Name of DoRA's magnitudes, one for each output; empty without DoRA."""
    scale: float
    experts: int
    transposed: bool
    """True if the weight is stored as (inputs, outputs)."""
    rounded: bool
    """True if the change is rounded before it is added."""


def adapted_source(
    source: Catalog, adapter: Catalog, names: Names | None, choice: Choice
) -> tuple[Catalog, Choice]:
    """Merge an adapter into its base, and rename tensors; return the remaining options too.

    An adapter has the names of the model in memory, so the base is first renamed to these.

    Raises CheckpointError if the base lacks an adapted tensor, or the adapter's method is unknown.
    """
    config = config_of(source, names)
    numbered = with_numbers(source, choice.dtype, choice, config)
    if not isinstance(names, ModelNames):
        try:
            merged = _merged(numbered, adapter, config or {}, choice.dtype)
        except CheckpointError as error:
            if names is not None or config is None:
                raise
            try:
                family = model_names(config)
                return _in_memory(numbered, adapter, family, choice)
            except ShardSpecError:
                raise error from None
        if names is None:
            check_drop(choice)
        return mapped_choice(merged, names, choice)
    return _in_memory(numbered, adapter, names.with_dtype(choice.dtype), choice)


def _in_memory(
    source: Catalog, adapter: Catalog, names: ModelNames, choice: Choice
) -> tuple[Catalog, Choice]:
    """Return the base merged with the adapter, and the options that still apply."""
    live = replace(names, names="live").applied(source, choice, ())
    merged = _merged(live, adapter, names.config, choice.dtype)
    made = replace(names, fill_from=None).applied(merged, None, ())
    return made, choice.after_map()


def _merged(
    base: Catalog, adapter: Catalog, model: Mapping[str, object], dtype: str | None
) -> Catalog:
    """Return `base` with the changes and retrained tensors of `adapter` in place."""
    config = _config(adapter)
    parts, saved = _parts(adapter)
    places = _Places(base, model)
    deltas: dict[str, list[_Delta]] = {}
    for target, delta in _deltas(parts, adapter, places, config):
        for name in places.tied(target):
            deltas.setdefault(name, []).append(delta)
    trained = tuple(map(str, config.get("modules_to_save") or ()))
    new: dict[str, str] = {}
    for name, own in saved.items():
        place, shape = places.get(name), adapter.outline(own).shape
        replaces = ".base_layer." not in own and name.rpartition(".")[0].endswith(trained)
        tied = replaces and place is not None and places.is_tied(place)
        if tied and not config.get("ensure_weight_tying"):
            raise CheckpointError(
                f"{adapter.directory}: {shown(own)} replaces one of two tied tensors, which unties "
                "them; save an adapter with ensure_weight_tying, or merge it with PEFT"
            )
        if place is None and name.rpartition(".")[0].endswith(trained):
            new[name] = own
        elif place is None or base.outline(place).shape != shape:
            raise CheckpointError(
                f"{adapter.directory}: {shown(own)} of shape {list(shape)} has no place in "
                f"{base.directory}; is it an adapter of another model?"
            )
        else:
            if adapter.outline(own).dtype != base.outline(place).dtype:
                _check_real(adapter, own)
            new |= dict.fromkeys(places.tied(place), own)
    for name, several in deltas.items():
        _check_real(base, name)
        if len(several) > 1 and any(delta.magnitude for delta in several):
            raise CheckpointError(
                f"{adapter.directory}: DoRA has two magnitudes for the tied {shown(name)}; merge "
                "it with PEFT"
            )
    made = AdaptedCatalog(base, adapter, new)
    made.deltas, made.dtype = deltas, dtype
    note = f"{counted(len({*deltas, *new}), 'tensor')} changed by the adapter {adapter.directory}"
    return made.with_facts(replace(made.facts, summed=(note,)))


def _check_real(source: Catalog, name: str) -> None:
    """Raise CheckpointError if a tensor is not of a real floating-point dtype."""
    dtype = source.outline(name).dtype
    if dtype != "float32" and not is_cast(dtype, "float32"):
        raise CheckpointError(
            f"{source.directory}: {shown(name)} is {dtype}; save it in floating point"
        )


def _config(adapter: Catalog) -> Mapping[str, Any]:
    """Return the config of an adapter; raises CheckpointError if its method is unknown."""
    config = json_beside(adapter.home, _CONFIG)
    problem = ""
    if not isinstance(config, dict):
        problem = f"has no readable {_CONFIG} beside it, which states the scale; copy it there"
        config = {}
    elif config.get("peft_type") != "LORA":
        problem = f"has peft_type {shown(config.get('peft_type'))}; merge it with PEFT"
    elif _CHANGES_BASE.fullmatch(str(config.get("init_lora_weights"))):
        start = shown(config["init_lora_weights"])
        problem = f"starts from a base changed by init_lora_weights={start}; convert it with PEFT"
    elif used := [key for key in _REFUSED if config.get(key)]:
        problem = f"uses {used[0]}, which is not merged; merge it with PEFT"
    elif odd := [key for key, kind in _KINDS.items() if not isinstance(config.get(key), kind)]:
        problem = f"has {odd[0]}={shown(config[odd[0]])} in {_CONFIG}; correct it"
    if problem:
        raise CheckpointError(f"{adapter.directory}: cannot merge this adapter: it {problem}")
    return config


def _parts(adapter: Catalog) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return module -> kind ("A", "B"...) -> tensor, and base name -> retrained tensor."""
    parts: dict[str, dict[str, str]] = {}
    saved: dict[str, str] = {}
    adapters = set()
    for own in adapter.names:
        prefix = _PREFIX.match(own)
        name = own[prefix.end() :] if prefix else own
        match = _PART.fullmatch(name)
        if match is None:
            if "lora_" in name:
                raise CheckpointError(
                    f"{adapter.directory}: {shown(own)} is of no known kind; merge it with PEFT"
                )
            saved[_SAVED.sub("", name)] = own
            continue
        adapters.add(match["adapter"])
        of_module = parts.setdefault(match["module"], {})
        of_module[match["kind"].rpartition("_")[2]] = own
        if "embedding" in match["kind"]:
            of_module["embedding"] = own
    if len(adapters) > 1:
        several = ", ".join(sorted(map(str, adapters)))
        raise CheckpointError(f"{adapter.directory}: has several adapters ({several}); save one")
    if not parts and not saved:
        raise CheckpointError(f"{adapter.directory}: has no tensors; check the path")
    return parts, saved


class _Places:
    """Looks up tensors of the base; a tied embedding and head count as one tensor."""

    def __init__(self, base: Catalog, model: Mapping[str, object]) -> None:
        self.base, self.model = base, model
        self._names = frozenset(base.names)
        self._ends = [name for name in base.names if _TIED.fullmatch(name)]

    def get(self, name: str) -> str | None:
        """Return the name of a tensor in the base; a missing head is the embedding."""
        if name in self._names:
            return name
        lacks = not any(map(_HEAD.fullmatch, self._ends))
        return self._ends[0] if _HEAD.fullmatch(name) and lacks and len(self._ends) == 1 else None

    def is_tied(self, name: str) -> bool:
        """Return True if a tensor is the embedding and the head of the model."""
        if self.model.get("tie_word_embeddings") is False or name not in self._ends:
            return False
        return len(self.tied(name)) > 1 or not any(map(_HEAD.fullmatch, self._ends))

    def tied(self, name: str) -> Collection[str]:
        """Return the names of the tensors that share memory with one."""
        if name not in self._ends:
            return (name,)
        says = self.model.get("tie_word_embeddings") is True
        origin = self.base.origin(name)
        return [end for end in self._ends if says or self.base.origin(end) == origin]


def _deltas(
    parts: Mapping[str, Mapping[str, str]],
    adapter: Catalog,
    places: _Places,
    config: Mapping[str, Any],
) -> Iterator[tuple[str, _Delta]]:
    """Yield (name, change) of each weight of the base that the adapter changes."""
    wrapped: dict[str, list[Mapping[str, str]]] = {}
    for module, names in parts.items():
        if not {"A", "B"} <= names.keys():
            raise CheckpointError(
                f"{adapter.directory}: module {shown(module)} lacks lora_A or lora_B; save it again"
            )
        if ("vector" in names) != bool(config.get("use_dora")):
            raise CheckpointError(
                f"{adapter.directory}: use_dora={bool(config.get('use_dora'))} in {_CONFIG} does "
                f"not fit module {shown(module)}; give the config that it was saved with"
            )
        for own in names.values():
            _check_real(adapter, own)
        wrapped.setdefault(re.sub(r"(\.base_layer)+$", "", module), []).append(names)
    parameters = config.get("target_parameters") or ()
    why = quantized_in(places.base).why
    codes = {name.rpartition(".")[0]: name for name in why}
    for module, every in wrapped.items():
        if module in codes:
            raise CheckpointError(
                f"{places.base.directory}: {shown(codes[module])} is quantized "
                f"({why[codes[module]]}); dequantize it first, FP8 and MXFP4 with ",
                Argument("dtype", value="bf16"),
            )
        weight = places.get(f"{module}.weight")
        targets = [weight] if weight is not None else [
            name
            for name in places.base.names
            if name.rpartition(".")[0] == module
            and any(f".{name}".endswith(f".{parameter}") for parameter in parameters)
        ]  # fmt: skip
        fitting = []
        for order in permutations(targets) if len(targets) == len(every) else ():
            pairs = zip(order, every, strict=True)
            changes = [_delta(module, name, own, adapter, places, config) for name, own in pairs]
            if None not in changes:
                fitting.append(list(zip(order, changes, strict=True)))
        if len(fitting) != 1:
            shapes = [[*adapter.outline(names[kind]).shape] for names in every for kind in "AB"]
            raise CheckpointError(
                f"{adapter.directory}: {shown(module)} with A and B of shapes {shapes} has no "
                f"place in {places.base.directory}; is it an adapter of another model?"
            )
        for target, delta in fitting[0]:
            assert delta is not None
            yield target, delta


def _delta(
    module: str,
    target: str,
    names: Mapping[str, str],
    adapter: Catalog,
    places: _Places,
    config: Mapping[str, Any],
) -> _Delta | None:
    """Return the change that A and B make to a weight; None if their shapes do not fit it."""
    a, b = (adapter.outline(names[kind]).shape for kind in "AB")
    shape = places.base.outline(target).shape
    if len(a) != 2 or len(b) != 2 or len(shape) not in (2, 3) or 0 in (*a, *b, *shape):
        return None
    experts = shape[0] if len(shape) == 3 else 1
    magnitude = names.get("vector", "")
    sizes = prod(adapter.outline(magnitude).shape) if magnitude else b[0]
    if a[0] != b[1] or a[0] % experts or sizes != b[0] or (magnitude and experts > 1):
        return None
    straight = "embedding" not in names and shape[-2:] == (b[0], a[1])
    transposed = shape[-2:] == (a[1], b[0])
    if straight and transposed:
        # A square matrix does not show how it is stored.
        stacked = len(shape) == 3
        fan = places.model.get("model_type") in _TRANSPOSED if stacked else False
        transposed = fan or bool(config.get("fan_in_fan_out"))
    elif not straight and not transposed:
        return None
    parameters = config.get("target_parameters") or ()
    named = any(f".{target}".endswith(f".{parameter}") for parameter in parameters)
    key = target if named else module
    rank, alpha = _stated(config, "r", "rank", key), _stated(config, "lora_alpha", "alpha", key)
    if rank != a[0] // experts:
        raise CheckpointError(
            f"{adapter.directory}: {shown(names['A'])} is of rank {a[0] // experts}, but {_CONFIG} "
            f"says {rank}; give the config that it was saved with"
        )
    scale = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
    rounded = named or ("embedding" in names and not magnitude)
    return _Delta(names["A"], names["B"], magnitude, scale, experts, transposed, rounded)


def _stated(config: Mapping[str, Any], key: str, pattern: str, module: str) -> float:
    """Return the rank or alpha of a module: the value of a matching pattern, or the default."""
    value = config.get(key)
    for expression, of_pattern in (config.get(f"{pattern}_pattern") or {}).items():
        try:
            # Python's expressions may need a time that grows exponentially with repetitions.
            if sum(map(expression.count, _REPEATS)) > _MOST_REPEATS or re.search(
                rf"\)[{_REPEATS}]", expression
            ):
                raise re.error("repeats")
            if re.match(rf"(.*\.)?({expression})$", module):
                value = of_pattern
                break
        except re.error:
            raise CheckpointError(
                f"{_CONFIG}: {shown(expression)} in {pattern}_pattern is not a regular expression, "
                "or repeats too often; correct it"
            ) from None
    if isinstance(value, int | float) and 0 < value < _MOST:
        return value
    raise CheckpointError(
        f"{_CONFIG}: {key} is {shown(value)} for {shown(module)}; give a number from 1 to {_MOST}"
    )


class AdaptedCatalog(Assembled):
    """A base with some weights changed by an adapter, or replaced by its trained copies."""

    def __init__(self, base: Catalog, adapter: Catalog, new: Mapping[str, str]) -> None:
        parts = {name: (base, name) for name in base.names}
        parts |= {name: (adapter, own) for name, own in new.items()}
        super().__init__(base, parts, (adapter,))
        self.adapter, self._in_base = adapter, frozenset(base.names)
        self.deltas: Mapping[str, Sequence[_Delta]] = {}
        self.dtype: str | None = None
        """Dtype to which the output is cast."""
        self._recent, self.spare = Recent(_KEPT_BYTES), list[Buffers]()

    def _look_up(self, name: str) -> StoredTensor:
        tensor = super()._look_up(name)
        dtype = self.base.outline(name).dtype if name in self._in_base else tensor.dtype
        deltas = self.deltas.get(name)
        if deltas is None:
            return tensor if tensor.dtype == dtype else Recast(tensor, dtype, self.spare).tensor()
        if self.dtype is not None and is_cast(dtype, dtype_name(self.dtype)):
            dtype = "float64" if dtype == "float64" else "float32"
        return _Changed(tensor, dtype, deltas, self).tensor()

    def read(self, name: str, wide: str) -> NDArray[Any]:
        """Return the numbers of one of the adapter's tensors as a matrix."""
        made = self._recent.get((name, wide))
        if made is None:
            source = Recast(self.adapter.tensor(name), wide, self.spare)
            parts = source.parts(0, 0, 0, (source.rows, source.columns))
            made = np.concatenate([values for _, values in parts])
            self._recent.keep((name, wide), made)
        return made


class _Changed(Recast):
    """A weight with changes added, and its rows scaled by DoRA."""

    def __init__(
        self, tensor: StoredTensor, dtype: str, deltas: Sequence[_Delta], owner: AdaptedCatalog
    ) -> None:
        names = [name for delta in deltas for name in (delta.a, delta.b, delta.magnitude) if name]
        super().__init__(tensor, dtype, owner.spare, [owner.adapter.tensor(name) for name in names])
        self._deltas, self._owner = deltas, owner
        self._factor: NDArray[Any] | None = None

    def parts(
        self, matrix: int, row: int, column: int, shape: tuple[int, ...]
    ) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield (rows, numbers) of a part, with the changes added and scaled by DoRA."""
        delta = self._deltas[0]
        if delta.magnitude and self._factor is None:
            self._factor = self._magnitudes(delta)
        for rows, values in self._sums(matrix, row, column, shape):
            if self._factor is not None and delta.transposed:
                values *= self._factor[column : column + shape[1]]
            elif self._factor is not None:
                values *= self._factor[row + rows.start : row + rows.stop, None]
            yield rows, values

    def _sums(
        self, matrix: int, row: int, column: int, shape: tuple[int, ...]
    ) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield (rows, weights + scale * B @ A) of the part of a matrix from `row`, `column` on."""
        places = slice(row, row + shape[0]), slice(column, column + shape[1])
        factors = [self._factors(delta, matrix, *places) for delta in self._deltas]
        change: NDArray[Any] | None = None
        for rows, values in super().parts(matrix, row, column, shape):
            # Ranges after the first are no longer; new memory would take as long as the product.
            change = np.empty_like(values) if change is None else change[: len(values)]
            for left, right, rounded in factors:
                some = left[rows]
                step = max(1, _ALONE // some.size)
                for at in range(0, shape[1], step):
                    columns = slice(at, at + step)
                    np.matmul(some, right[:, columns], out=change[:, columns])
                values += self.round(change) if rounded else change
            yield rows, values

    def _factors(
        self, delta: _Delta, matrix: int, rows: slice, columns: slice
    ) -> tuple[NDArray[Any], NDArray[Any], bool]:
        """Return (scale * B, A) for a part of a matrix, and True if their product is rounded."""
        a, b = (self._owner.read(name, self.wide) for name in (delta.a, delta.b))
        right = a.reshape(delta.experts, -1, a.shape[1])[matrix if delta.experts > 1 else 0]
        left = b.reshape(len(b), -1, delta.experts)[..., matrix % delta.experts]
        if delta.transposed:
            left, right = right.T, left.T
        return left[rows] * left.dtype.type(delta.scale), right[:, columns], delta.rounded

    def _magnitudes(self, delta: _Delta) -> NDArray[Any]:
        """Return DoRA's factor of each output: its magnitude divided by the norm of its weights."""
        squares = np.zeros(self.columns if delta.transposed else self.rows)
        for some in strips(self.rows, self.columns):
            shape = some.stop - some.start, self.columns
            for rows, values in self._sums(0, some.start, 0, shape):
                first = some.start + rows.start
                square = np.square(values, dtype=np.float64)
                if delta.transposed:
                    squares += square.sum(0)
                else:
                    squares[first : first + len(values)] = square.sum(1)
        norms = np.sqrt(squares).astype(self.wide)
        factor: NDArray[Any] = self._owner.read(delta.magnitude, self.wide).reshape(-1) / norms
        return factor
