"""Finds the weights of a model that quantization applies to: those of its linear layers."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

from shardspec.errors import LayoutError
from shardspec.families.family import family_of, forms_in
from shardspec.resharding.map_file import form_of, text_config
from shardspec.resharding.views import parse_view
from shardspec.text import shown

_NOT_QUANTIZED: Final = re.compile(
    r"(.*[._])?(\w*embed\w*|\w*norm\w*|\w*router\w*|\w*head|ln_\w+|w[tp]e|score|classifier|eh_proj"
    r"|(shared_expert_)?gate|output_layer)(\.weight)?"
)
"""Names of matrices that are never quantized, such as embeddings."""
_MAX_REPEATS: Final = 4
"""Maximum repeats in a regular expression of a config; more may take hours to match."""


class LinearLayers:
    """Names of the weights of a model's linear layers.

    >>> layers = LinearLayers({"model_type": "llama"})
    >>> "model.layers.0.mlp.up_proj.weight" in layers, "model.embed_tokens.weight" in layers
    (True, False)
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._forms: set[str] | None = None
        self.model_type = text_config(config).get("model_type")
        try:
            family = family_of(config)
        except LayoutError:  # for other models, usual names decide
            return
        self._forms = {
            form
            for form, row, (name, view, *_) in forms_in(family)
            if not {"vocab", "replicated", "summed"} & {*row.cut.values()}
            and not name.endswith("bias")
            and len(parse_view(view)) > 1
        }

    def __contains__(self, name: object) -> bool:
        if self._forms is None:
            return not (is_exempt(str(name)) or str(name).endswith("bias"))
        return form_of(str(name)) in self._forms


def module_of(name: str) -> str:
    """Return the name of a weight's module, without ``.weight``."""
    return name.removesuffix(".weight")


class SkippedModules:
    """Modules that a config lists as not quantized.

    An entry is the beginning or the end of a module's name (transformers), a shell pattern
    (modelopt), or a regular expression after ``re:`` (compressed-tensors). A final ``.weight`` of
    an entry is ignored.

    >>> skipped = SkippedModules(["down_proj", "model.layers.1", "model.layers.*.self_attn"])
    >>> [f"model.layers.{name}.weight" in skipped
    ...  for name in ("1.mlp.up_proj", "11.mlp.up_proj", "11.mlp.down_proj", "3.self_attn.q_proj")]
    [True, False, True, True]
    """

    def __init__(self, modules: Iterable[str]) -> None:
        entries = {module_of(module) for module in modules if module}
        self._regular = [entry.removeprefix("re:") for entry in entries if entry[:3] == "re:"]
        plain = [entry for entry in entries if entry[:3] != "re:"]
        self._patterns = [entry for entry in plain if set(entry) & set("*?[")]
        self._names = {entry.rstrip(".") for entry in plain}
        self._suffixes = tuple(plain)
        for pattern in self._regular:
            if len(re.findall(r"[*+{]", pattern)) > _MAX_REPEATS or ")+" in pattern:
                raise LayoutError(
                    f"the config skips modules by {shown(pattern)}, which may take hours to match; "
                    "list them by name"
                )

    def __contains__(self, name: object) -> bool:
        module = module_of(str(name))
        parts = module.split(".")
        return (
            module.endswith(self._suffixes)
            or any(".".join(parts[:count]) in self._names for count in range(1, len(parts) + 1))
            or any(re.match(pattern, module) for pattern in self._regular)
            or any(
                fnmatchcase(module, shell_pattern)
                for pattern in self._patterns
                for shell_pattern in (pattern, f"{pattern}.*", f"*.{pattern}")
            )
        )


def is_exempt(name: str) -> bool:
    """Return True for names of tensors never quantized: embeddings, norms, routers, heads.

    >>> is_exempt("lm_head.weight"), is_exempt("mlp.up_proj.weight")
    (True, False)
    """
    return _NOT_QUANTIZED.fullmatch(name) is not None
