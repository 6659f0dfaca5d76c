"""Computes how a trainer or an inference engine, as in "vllm:tp=2", shards a model's tensors."""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.comm.steps import ReduceOp
from shardspec.dtypes import keeps_dtype
from shardspec.errors import LayoutError
from shardspec.families.family import NamesOf, family_of
from shardspec.families.glance import ModelLayouts
from shardspec.families.model import model_of
from shardspec.input_files import read_json_object
from shardspec.layout.layout import Layout
from shardspec.layout.spec import DimSpec, Part, ShardingSpec
from shardspec.mesh.device_mesh import Axis, DeviceMesh
from shardspec.resharding.map_file import Side, filled, known_sizes, placeholders, text_config
from shardspec.resharding.views import factors_of, parse_view
from shardspec.text import shown

_KEYS: Final = {
    "hf-tp": {"tp", "dp"},
    "fsdp": {"fsdp", "dp"},
    "megatron": {"tp", "ep", "etp", "pp", "dp", "layers", "spec"},
    "vllm": {"tp", "ep", "dp"},
}
_FORMS: Final = "hf-tp:N, fsdp:N, megatron:tp=,ep=,etp=,pp= and vllm:tp=,ep="
_PLACES: Final[Mapping[str, NamesOf]] = {
    "hf-tp": "live",
    "fsdp": "live",
    "megatron": "sharded",
    "vllm": "fused",
}
_DATA_AXES: Final = {"dp", "ddp", "data", "replicate", "dp_replicate"}
_ROUND_UP: Final = 64
"""Engines pad a vocabulary to a multiple of this many rows."""


class ParsedLayout(NamedTuple):
    """The parsed text of a layout, such as ``"megatron:tp=2,ep=4"``."""

    kind: str
    sizes: Mapping[str, int]
    layers: tuple[int, ...]
    """Number of layers per stage; empty if the text has none."""
    local: bool
    """True for Megatron-core's own layers, False for those of Transformer Engine."""

    @property
    def place(self) -> NamesOf:
        """Naming convention of the tensors."""
        return _PLACES[self.kind]


class _Target(NamedTuple):
    """A tensor of a trainer or engine, or one per layer."""

    name: str
    view: str
    rows: tuple[tuple[Side, str], ...]
    """(side, way of sharding) of each row of the family that is stored in this tensor."""


def parse_layout(text: str) -> ParsedLayout:
    """Return the parsed text of a layout; raises `LayoutError` if it is malformed.

    >>> parse_layout("megatron:tp=2,ep=4").sizes
    {'tp': 2, 'ep': 4}
    """
    kind, _, rest = text.partition(":")
    if kind not in _KEYS:
        raise LayoutError(f"unknown layout {shown(text)}; give one of {_FORMS}")
    alone = "fsdp" if kind == "fsdp" else "tp"
    sizes: dict[str, int] = {}
    layers: tuple[int, ...] = ()
    local = False
    for word in rest.split(","):
        key, equals, value = word.strip().partition("=")
        key, value = (key, value) if equals else (alone, key)
        if key not in _KEYS[kind] or key in sizes:
            keys = ", ".join(sorted(_KEYS[kind]))
            raise LayoutError(
                f"layout {shown(text)}: {shown(word)} is unknown or repeated; keys: {keys}"
            )
        if key == "spec" and value in ("local", "te"):
            local = value == "local"
        elif key == "layers" and re.fullmatch(r"\d{1,6}(\+\d{1,6})*", value):
            layers = tuple(map(int, value.split("+")))
        elif re.fullmatch(r"\d{1,6}", value) and int(value):
            sizes[key] = int(value)
        else:
            raise LayoutError(f"layout {shown(text)}: {shown(word)} is not a number from 1 on")
    return ParsedLayout(kind, sizes, layers, local)


def model_layouts(
    config: Mapping[str, object] | Path | str,
    layout: str,
    *,
    device_mesh: DeviceMesh | None = None,
    dtype: object = "bfloat16",
) -> ModelLayouts:
    """Return the layout of each tensor of a model under a trainer or an engine.

    Parameters
    ----------
    config
        The model's config, or the path of its ``config.json``.
    layout
        ``"hf-tp:N"``, by the tensor-parallel plan of the installed transformers; ``"fsdp:N"``;
        ``"megatron:tp=2,ep=4,etp=1,pp=2"``; ``"vllm:tp=8,ep=8"``. ``dp=``, or the axis of that
        name of the mesh, is the number of data-parallel replicas. ``layers=16+15`` gives stages of
        unequal length; ``spec=local`` selects Megatron-core's own layers.
    device_mesh
        The devices, in the order of ranks; by default those from 0 on.
    dtype
        The dtype of all tensors except biases of routers, which are float32.

    Returns
    -------
    ModelLayouts
        Name to layout; prints as a summary by kind of tensor. Names are those of transformers'
        models in memory, of Megatron-core's checkpoints with numbered layers, or of vLLM.

    Raises
    ------
    LayoutError
        If a size of the model is not divisible by the number of ranks that shard it.

    Examples
    --------
    >>> sizes = {"hidden_size": 8, "num_attention_heads": 4, "intermediate_size": 12}
    >>> config = {"model_type": "llama", "vocab_size": 32, "num_hidden_layers": 1, **sizes}
    >>> layouts = model_layouts(config, "vllm:tp=2")
    >>> print(layouts["model.layers.0.self_attn.qkv_proj.weight"].labelled_spec)
    [S(tp){8,8,8},R]
    """
    if not isinstance(config, Mapping):
        place = Path(config)
        config = read_json_object(place / "config.json" if place.is_dir() else place)
    parsed = parse_layout(layout)
    return _Sharded(config, parsed, device_mesh, dtype).layouts()


def padded_config(
    config: Mapping[str, object], parsed: ParsedLayout, rows: int | None = None
) -> dict[str, object]:
    """Return a config with the key ``padded_vocab``: the rows of the padded vocabulary.

    vLLM pads to a multiple of 64. For Megatron-core the config may have the key; by default it is
    `rows`, which is read from its checkpoint.

    >>> padded_config({"vocab_size": 100}, parse_layout("vllm:tp=2"))
    {'vocab_size': 100, 'padded_vocab': 128}
    """
    padded, vocab = {**config}, text_config(config).get("vocab_size")
    if parsed.kind == "vllm" and isinstance(vocab, int):
        padded["padded_vocab"] = -(-vocab // _ROUND_UP) * _ROUND_UP
    elif parsed.kind == "megatron" and rows is not None:
        padded.setdefault("padded_vocab", rows)
    return padded


class _Sharded:
    """Computes the layouts of one model, given its config and the parsed text of a layout."""

    def __init__(
        self,
        config: Mapping[str, object],
        parsed: ParsedLayout,
        device_mesh: DeviceMesh | None,
        dtype: object,
    ) -> None:
        self._parsed, self._dtype = parsed, dtype
        self._config = padded_config(config, parsed)
        self._model = model_of(family_of(config), self._config)
        self._known = known_sizes(self._model.sizes)
        sizes = parsed.sizes
        self._tp, self._pp = sizes.get("tp", sizes.get("fsdp", 1)), sizes.get("pp", 1)
        self._ep = sizes.get("ep", 1)
        self._etp = sizes.get("etp", self._tp)
        self._dp = self._replicas(device_mesh)
        count = self._tp * self._pp * self._dp
        ids = range(count) if device_mesh is None else device_mesh.ids
        if len(ids) != count:
            raise LayoutError(
                f"the layout is for {count} devices, the mesh has {len(ids)}; change either"
            )
        self._ids = list(ids)

    def _replicas(self, mesh: DeviceMesh | None) -> int:
        """Return the number of data parallel replicas."""
        kind, dp = self._parsed.kind, self._parsed.sizes.get("dp")
        if dp is None and mesh is not None:
            axes = dict(zip(mesh.axis_names or (), mesh.shape, strict=False))
            of_mesh = prod(size for name, size in axes.items() if str(name) in _DATA_AXES)
            if of_mesh * self._tp * self._pp == len(mesh.ids):
                dp = of_mesh
        if kind == "vllm":
            dp = dp or max(1, self._ep // self._tp)
            if self._ep not in (1, self._tp * dp):
                raise LayoutError(
                    f"ep={self._ep} is neither 1 nor all {self._tp * dp} ranks (tp × dp); omit ep, "
                    "or change dp="
                )
        elif kind == "megatron":
            group = self._etp * self._ep
            dp = dp or group // gcd(group, self._tp)
            if self._tp * dp % group:
                raise LayoutError(
                    f"etp={self._etp} × ep={self._ep} does not divide tp={self._tp} × dp={dp}; "
                    "change dp="
                )
        return dp or 1

    def layouts(self) -> ModelLayouts:
        """Return the layout of each tensor by name."""
        kind = self._parsed.kind
        plan: TensorPlan | None = None
        if kind == "hf-tp":
            head = self._known.get("qk", self._known.get("d", 0))
            plan = plan_specs(text_config(self._config), self._tp, head)
        layouts: dict[str, Layout] = {}
        padding: dict[str, int] = {}
        for target in self._targets():
            dims = parse_view(target.view)
            shape = self._model.shape_of(target.view)
            spec: ShardingSpec | None = None
            if kind == "fsdp":
                spec = ShardingSpec(len(shape), {0: DimSpec(("dp",))} if shape else {})
            elif kind != "hf-tp":
                spec = self._spec(target, dims, shape)
            for numbers in self._model.instances(target.name):
                name = filled((target.name,), numbers)[0]
                layer = next(iter(numbers.values()), None)
                if plan is not None:
                    spec = plan.spec(name, len(shape), shape)
                assert spec is not None, "each kind has a rule"
                mesh = self._mesh(target, layer, experts=self._is_expert(target, dims))
                dtype = "float32" if keeps_dtype(name) else self._dtype
                layouts[name] = Layout(mesh, spec, shape, dtype)
                if dims and tuple(dims[0]) == ("padded_vocab",):
                    padding[name] = (shape[0] - self._known["v"]) * prod(shape[1:])
        return ModelLayouts(layouts, padding)

    def _targets(self) -> Iterator[_Target]:
        """Yield the tensors that the trainer or engine has, under its own names."""
        place = self._parsed.place
        views: dict[str, str] = {}
        rows: dict[str, list[tuple[Side, str]]] = {}
        for tensor in self._model.tensors:
            side = tensor.places["megatron" if place == "sharded" else place]
            if place == "sharded" and "megatron" in self._model.family.refused:
                raise LayoutError(self._model.family.refused["megatron"])
            if side is None:
                continue
            name, view, *slices = side
            if place == "sharded" and ".local_experts.{e}." in name:
                name, view = name.replace(".local_experts.{e}.", ".experts."), f"e {view}"
            slices = [text for text in slices if "{e}" not in text]
            cut = tensor.cut.get("fused" if place == "fused" else "megatron", "replicated")
            if cut == "vocab" and place != "live":
                view = view.replace("v", "padded_vocab", 1)
            views.setdefault(name, view)
            rows.setdefault(name, []).append(((name, view, *slices), cut))
        for name, view in views.items():
            yield _Target(name, view, tuple(rows[name]))

    def _is_expert(self, target: _Target, dims: Sequence[Sequence[str]]) -> bool:
        return tuple(dims[0]) == ("e",) and target.rows[0][1] in ("columns", "rows", "summed")

    def _spec(
        self, target: _Target, dims: Sequence[Sequence[str]], shape: tuple[int, ...]
    ) -> ShardingSpec:
        """Return the spec of a tensor in Megatron-core or vLLM."""
        cut, count = target.rows[0][1], len(shape)
        expert, vllm = self._is_expert(target, dims), self._parsed.kind == "vllm"
        axes: tuple[str, ...] = ("tp",)
        size = self._tp
        cuts: dict[int, DimSpec] = {}
        if expert:
            if self._ep > 1:
                self._divides("experts", shape[0], self._ep, "ep")
                cuts[0] = DimSpec(("dp", "tp") if vllm else ("ep",))
                if vllm:
                    return ShardingSpec(count, cuts)
            axes, size = (("dp", "tp"), self._tp * self._dp) if vllm else (("etp",), self._etp)
            if cut == "summed" and not vllm and size > 1:
                raise LayoutError(
                    f"{self._shown(target)}: Megatron-core does not shard biases of experts; give "
                    f"etp=1, not {size}"
                )
        if cut == "summed" and vllm and size > 1:
            pending: dict[Axis, ReduceOp] = dict.fromkeys(axes, "sum")
            return ShardingSpec(count, cuts, partial=pending)
        local = cut == "latent" and self._parsed.local
        if cut in ("replicated", "summed") or (cut == "latent" and not local) or size == 1:
            return ShardingSpec(count, cuts)
        dim = count - 1 if cut == "rows" else int(expert)
        cuts[dim] = DimSpec(axes, self._parts(target, dim, dims, shape, size))
        return ShardingSpec(count, cuts)

    def _parts(
        self,
        target: _Target,
        dim: int,
        dims: Sequence[Sequence[str]],
        shape: tuple[int, ...],
        size: int,
    ) -> tuple[Part, ...]:
        """Return the separately sharded parts of a dim; empty if it is one part."""
        first, *rest = dims[dim]
        width = prod(self._known[name] for name in rest)
        by = "etp" if self._parsed.kind == "megatron" and size == self._etp != self._tp else "tp"
        if {"heads", "kv-heads"} & {cut for _, cut in target.rows}:
            heads = self._known.get("n", self._known.get("num_attention_heads", 0))
            self._divides("heads", heads, size, by)
            groups = self._known.get("g", heads)
            if groups % size and size % groups:
                raise LayoutError(
                    f"{groups} key-value heads neither divide nor are divisible by {by}={size}; "
                    "choose another number of ranks"
                )
        else:
            groups = size
        pieces: dict[int, tuple[int, str]] = {}
        for side, cut in target.rows:
            factor = factors_of(side[1:], shape, self._known)[1][first]
            if first in ("two", "three"):
                each = range(factor.start, factor.start + factor.length)
                pieces |= dict.fromkeys(each, (width, cut))
            else:
                pieces[factor.start] = (factor.length * width, cut)
        if len(pieces) == 1:
            self._divides(f"rows of {self._shown(target)}", shape[dim], size, by)
            return ()
        if self._model.family.name == "gpt-oss" and size > groups:
            raise LayoutError(
                f"vLLM does not copy the {groups} key-value heads of gpt-oss; give tp={groups}"
            )
        parts = []
        for _, (length, cut) in sorted(pieces.items()):
            shares = groups if cut == "kv-heads" and size > groups else 0
            if not shares:
                self._divides(f"rows of {self._shown(target)}", length, size, by)
            parts.append(Part(length, shares))
        return tuple(parts)

    def _shown(self, target: _Target) -> str:
        """Return the name of a target for errors, with the numbers of its first tensor."""
        return shown(filled((target.name,), next(self._model.instances(target.name)))[0])

    def _divides(self, label: str, size: int, ranks: int, axis: str) -> None:
        if size % ranks:
            raise LayoutError(
                f"{size} {label} are not divisible by {axis}={ranks}; choose another number of "
                "ranks" + (", or add padded_vocab to the config" if "embed" in label else "")
            )

    def _mesh(self, target: _Target, layer: int | None, *, experts: bool) -> DeviceMesh:
        """Return the mesh of the devices that store a target; `layer` is None outside of layers."""
        if self._parsed.kind == "fsdp":
            return DeviceMesh(self._ids, (self._dp, self._tp), axis_names=("replicate", "dp"))
        if self._parsed.kind != "megatron":
            return DeviceMesh(self._ids, (self._dp, self._tp), axis_names=("dp", "tp"))
        each = self._dp * self._tp
        stages = [self._ids[at : at + each] for at in range(0, len(self._ids), each)]
        chosen = [stages[self._stage(target, layer)]]
        embedding = "embedding." in target.name
        twice = embedding and self._pp > 1 and (self._model.copies or self._known.get("mtp_layers"))
        if twice:
            chosen.append(stages[-1])
        ids = [device for stage in chosen for device in stage]
        if experts:
            group = self._etp * self._ep
            shape = (each // group, self._ep, self._etp)
            return DeviceMesh(ids, shape, axis_names=("edp", "ep", "etp"))
        if twice:
            return DeviceMesh(ids, (2, self._dp, self._tp), axis_names=("pp", "dp", "tp"))
        return DeviceMesh(ids, (self._dp, self._tp), axis_names=("dp", "tp"))

    def _stage(self, target: _Target, layer: int | None) -> int:
        count = self._known["{i}"]
        layers = self._parsed.layers or (count // self._pp,) * self._pp
        if sum(layers) != count or len(layers) != self._pp:
            raise LayoutError(
                f"{count} layers do not fill pp={self._pp} stages"
                + (f" of {', '.join(map(str, layers))}" if self._parsed.layers else "")
                + "; give the layers per stage, as layers=16+15"
            )
        if layer is None or not placeholders(target.name):
            return 0 if target.name.startswith("embedding.") else self._pp - 1
        stage = 0
        while layer >= layers[stage]:
            layer -= layers[stage]
            stage += 1
        return stage


_COLUMNS: Final = {"colwise", "colwise_rep", "colwise_gather_output"}
_ROWS: Final = {"rowwise", "rowwise_rep", "rowwise_split_input"}
_PACKED: Final = {"packed_colwise": -2, "packed_rowwise": -1}
_REPLICATED: Final = {
    *("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts"),
    *("moe_identity_expert", "ep_router", "gather", "sequence_parallel", "activation"),
}
_HEADS: Final = re.compile(r"(.+\.)?[qkv]_proj\.(weight|bias)")


class TensorPlan(NamedTuple):
    """Transformers' tensor-parallel plan: name -> style; ``*`` in a name stands for a number.

    >>> plan = TensorPlan({"layers.*.up_proj": "colwise"}, ranks=2, head_dim=4)
    >>> str(plan.spec("layers.0.up_proj.weight", 2, (8, 4)))
    '[S(tp),R]'
    """

    styles: Mapping[str, str]
    ranks: int
    head_dim: int

    def spec(self, name: str, dims: int, shape: tuple[int, ...]) -> ShardingSpec:
        """Return the spec of a tensor; raises `LayoutError` for unknown styles and uneven sizes."""
        module, _, last = name.rpartition(".")
        keys = (name, module) if last in ("weight", "bias") else (name,)
        style = next((self.styles[key] for key in map(_numberless, keys) if key in self.styles), "")
        bias = last == "bias"
        cut: int | None = None
        if style in _COLUMNS or style in _PACKED:
            cut = dims + _PACKED.get(style, -2) if dims > 1 else 0
        elif style in _ROWS:
            cut = None if bias else dims - 1
        elif style in ("embedding_rowwise", "grouped_gemm"):
            cut = 0
        elif style and style not in _REPLICATED:
            raise LayoutError(f"{name!r}: transformers' style {shown(style)} is not supported")
        if cut is None or self.ranks == 1:
            return ShardingSpec(dims)
        size = shape[cut]
        if style in _COLUMNS and _HEADS.fullmatch(name) and size % (self.ranks * self.head_dim):
            raise LayoutError(
                f"{name!r}: {size // self.head_dim} heads are not divisible by {self.ranks} ranks; "
                "transformers loads such a model, but cannot run it"
            )
        parts: tuple[Part, ...] = ()
        if style in _PACKED:
            if size % (2 * self.ranks):
                raise LayoutError(f"{name!r}: {size // 2} rows are not divisible by {self.ranks}")
            parts = (Part(size // 2), Part(size // 2))
        return ShardingSpec(dims, {cut: DimSpec(("tp",), parts)})


def _numberless(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def plan_specs(config: Mapping[str, object], ranks: int, head_dim: int) -> TensorPlan:
    """Return transformers' tensor-parallel plan of a model, built on the meta device."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise LayoutError("the layout hf-tp needs the package transformers; install it") from None
    values = {key: value for key, value in config.items() if key != "model_type"}
    built = AutoConfig.for_model(str(config.get("model_type")), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    styles = {str(key): str(style) for key, style in dict(model.tp_plan).items()}
    return TensorPlan(styles, ranks, max(1, head_dim))
