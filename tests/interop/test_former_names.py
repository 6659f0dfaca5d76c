"""Modules that were put together can be imported by their former names, with a warning."""

from importlib import import_module

import pytest

from shardspec.interop import notations


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch_placements", "placements_text"),
        ("jax_specs", "to_partition_spec"),
        ("other_specs", "shardy_text"),
        ("dcp_chunks", "to_chunks"),
    ],
)
def test_former_modules(module, name):
    former = import_module(f"shardspec.interop.{module}")
    with pytest.warns(DeprecationWarning, match=r"is shardspec\.interop\.notations now"):
        assert getattr(former, name) is getattr(notations, name)
    with pytest.raises(AttributeError):
        former.__nothing__  # noqa: B018  # the access is the test
