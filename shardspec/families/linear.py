"""Selects the weights of linear layers, the only ones to quantize."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

from shardspec.errors import LayoutError
from shardspec.families.family import family_of, forms_in
from shardspec.resharding.map_file import form_of, text_config
from shardspec.resharding.views import parse_view
from shardspec.text import shown

_OTHERS: Final = re.compile(
    r"(.*[._])?(\w*embed\w*|\w*norm\w*|\w*router\w*|\w*head|ln_\w+|w[tp]e|score|classifier|eh_proj"
    r"|(shared_expert_)?gate|output_layer)(\.weight)?"
)
"""Names of matrices that belong to no linear layer, or to one that is not quantized."""
_MOST_REPEATS: Final = 4
"""Repeats in a regular expression of a config: more may take hours to match."""


class LinearLayers:
    """The linear layers of a model, by the names of their weights."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._forms: set[str] | None = None
        self.model_type = text_config(config).get("model_type")
        try:
            family = family_of(config)
        except LayoutError:  # other models: the usual names of linear layers decide
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
            return not (is_other(str(name)) or str(name).endswith("bias"))
        return form_of(str(name)) in self._forms


def module_of(name: str) -> str:
    """Return the module that a weight is of."""
    return name.removesuffix(".weight")


class SkippedModules:
    """The modules that configs list as not quantized, in any form that a reader of them takes.

    An entry is the start of a module's name, up to a dot, or its end (transformers), a shell
    pattern (modelopt), or a regular expression after ``re:`` (compressed-tensors). A ``.weight`` at
    its end does not count.

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
        self._ends = tuple(plain)
        for pattern in self._regular:
            if len(re.findall(r"[*+{]", pattern)) > _MOST_REPEATS or ")+" in pattern:
                raise LayoutError(
                    f"the config skips modules by {shown(pattern)}, which takes too long to match; "
                    "list them by their names"
                )

    def __contains__(self, name: object) -> bool:
        module = module_of(str(name))
        parts = module.split(".")
        return (
            module.endswith(self._ends)
            or any(".".join(parts[:count]) in self._names for count in range(1, len(parts) + 1))
            or any(re.match(pattern, module) for pattern in self._regular)
            or any(
                fnmatchcase(module, end)
                for pattern in self._patterns
                for end in (pattern, f"{pattern}.*", f"*.{pattern}")
            )
        )


def is_other(name: str) -> bool:
    """Return True if a matrix has the name of an embedding, a norm, a router, or the like."""
    return _OTHERS.fullmatch(name) is not None
