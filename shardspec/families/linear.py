"""Which tensors are matrices of linear layers, which is what low precision is for."""

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Final

from shardspec.errors import LayoutError
from shardspec.families.family import family_of, rows_in, text_config
from shardspec.resharding.patterns import form_of
from shardspec.resharding.views import parse_view

_OTHERS: Final = re.compile(
    r"(.*[._])?(\w*embed\w*|\w*norm\w*|\w*router\w*|\w*head|ln_\w+|w[tp]e|score|classifier|eh_proj"
    r"|(shared_expert_)?gate|output_layer)(\.weight)?"
)
"""Names of matrices that are of no linear layer, or of one that stays as it is."""


class LinearLayers:
    """The linear layers of a model, by the names of their weights."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._forms: set[str] | None = None
        self.model_type = text_config(config).get("model_type")
        try:
            family = family_of(config)
        except LayoutError:  # other models: by what such layers are called
            return
        self._forms = set()
        for table, row in rows_in(family):
            if {"vocab", "replicated", "summed"} & set(row.cut.values()):
                continue
            for place, side in {"hf": row.side, **row.places}.items():
                if side is None or side[0].endswith("bias") or len(parse_view(side[1])) < 2:
                    continue
                prefix = family.prefix["megatron" if place == "megatron" else "hf"]
                self._forms.add(form_of(("" if table == "model" else prefix) + side[0]))

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
    expressions = [one.removeprefix("re:") for one in modules if one.startswith("re:")]
    if any(re.match(one, module) for one in expressions):
        return True
    return any(fnmatchcase(module, one) or fnmatchcase(module, f"{one}.*") for one in modules)
