"""Which tensors are matrices of linear layers, which is what low precision is for."""

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Final

from shardspec.errors import LayoutError
from shardspec.families.family import family_of, forms_in
from shardspec.resharding.patterns import form_of
from shardspec.resharding.sizes import text_config
from shardspec.resharding.views import parse_view

_OTHERS: Final = re.compile(
    r"(.*[._])?(\w*embed\w*|\w*norm\w*|\w*router\w*|\w*head|ln_\w+|w[tp]e|score|classifier|eh_proj"
    r"|(shared_expert_)?gate|output_layer)(\.weight)?"
)
"""Names of matrices that belong to no linear layer, or to one that is not quantized."""


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
            return not (_OTHERS.fullmatch(str(name)) or str(name).endswith("bias"))
        return form_of(str(name)) in self._forms


def module_of(name: str) -> str:
    """Return the module that a weight is of."""
    return name.removesuffix(".weight")


def is_listed(name: str, modules: Collection[str]) -> bool:
    """Return whether a config's list of modules, or of patterns of them, has that of a weight.

    >>> is_listed("model.layers.3.self_attn.q_proj.weight", ["model.layers.*.self_attn"])
    True
    """
    module = module_of(name)
    return any(
        re.match(pattern.removeprefix("re:"), module)
        if pattern.startswith("re:")
        else fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
        for pattern in modules
    )
