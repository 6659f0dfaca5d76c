"""Facts of a checkpoint survive every view of it, and what is written or loaded of one."""

import pkgutil
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import shardspec.checkpoint
from shardspec import DeviceMesh, DTensor, NameMap, load_sharded, merge, reshard, save_sharded
from shardspec.checkpoint.catalog import (
    Catalog,
    CheckpointFacts,
    DerivedCatalog,
    FileMetadata,
    StoredObject,
)
from shardspec.checkpoint.convert.select import Choice
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.quantization.quantize import Quantize
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.reading import Snapshot

MESH = DeviceMesh(range(2))
RENAMED = NameMap(((("a",), ("new",)),))

# How to make each view of a catalog that has one tensor, "a"; one row a class.
VIEWS = {
    "MappedCatalog": lambda kind, base: kind(base, RENAMED, {}, base.extras),
    "Assembled": lambda kind, base: kind(base, {"new": (base, "a")}),
    "DequantizedCatalog": lambda kind, base: kind(base, {}, (), "bfloat16"),
    "QuantizedCatalog": lambda kind, base: kind(base, (), (), Quantize("fp8-128x128"), None),
    "SummedCatalog": lambda kind, base: kind([base], ["a"], Choice(include="*")),
    "AdaptedCatalog": lambda kind, base: kind(base, base, {}),
    "DeltaCatalog": lambda kind, base: kind(base, {}, [SimpleNamespace(digest=None)]),
}
# What names tensors, and so differs where names do.
EXPECTED: dict[str, dict[str, object]] = {
    "MappedCatalog": {"keeps_dtype": {"new"}, "dropped": {}, "paths": {"step": ("s", "step")}},
    "Assembled": {"keeps_dtype": {"new"}},
}


def subclasses(kind):
    for name in pkgutil.walk_packages(shardspec.checkpoint.__path__, "shardspec.checkpoint."):
        import_module(name.name)
    todo, found = [kind], []
    while todo:
        todo += (below := todo.pop().__subclasses__())
        found += [one for one in below if one.__module__.startswith("shardspec.")]
    return [one for one in found if not one.__abstractmethods__]


def test_every_fact_goes_through_every_view(tmp_path):
    save_file({"a": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    place = storage_path(tmp_path)
    opened = open_checkpoint(tmp_path / "a.safetensors")
    facts = CheckpointFacts(
        snapshot=Snapshot.of(place),
        below=(Snapshot.of(place),),
        file_metadata=FileMetadata({"run": "7"}),
        notes=("a note",),
        objects={"step": StoredObject(place, 0, 1)},
        pickled={"step": ()},
        restored=True,
        paths={"a": ("m", "a"), "step": ("s", "step")},
        described_in=place,
        filled=("b",),
        dropped={"x": (1,)},
        keeps_dtype=frozenset({"a"}),
        summed=("a note",),
        differing=frozenset({"step"}),
        quantization={"quant_method": "fp8"},
    )
    names = [field.name for field in fields(CheckpointFacts)]
    assert all(getattr(facts, name) != getattr(CheckpointFacts(), name) for name in names)
    tensors = {"a": opened.tensor("a")}
    base = Catalog("x", place, tensors, opened.files, MESH, {"step": 3}, facts)
    views = subclasses(DerivedCatalog)
    assert {"MappedCatalog", "Assembled", "QuantizedCatalog"} <= {kind.__name__ for kind in views}
    for kind in views:
        made = VIEWS[kind.__name__](kind, base)
        changed = EXPECTED.get(kind.__name__, {})
        for name in names:
            due = changed.get(name, getattr(facts, name))
            assert getattr(made.facts, name) == due, (kind, name)
        again = made.with_facts(CheckpointFacts())
        assert again.facts == CheckpointFacts()
        assert again.tensor(again.names[0]) == made.tensor(made.names[0])
        assert made.facts.restored


def metadata(path):
    with safe_open(next(Path(path).glob("*.safetensors")), "pt") as file:
        return file.metadata()


@pytest.mark.parametrize("names", [{"a": "new"}, RENAMED], ids=["dict", "map"])
def test_a_map_keeps_the_metadata_of_safetensors_files(tmp_path, names):
    place = tmp_path / "in"
    place.mkdir()
    save_file({"a": torch.ones(2, 2)}, place / "model.safetensors", {"format": "pt", "run": "7"})
    merged = merge(place, tmp_path / "huggingface", format="huggingface", names=names)
    cut = reshard(place, tmp_path / "shardspec", device_mesh=MESH, names=names)
    assert merged.left_out == cut.left_out == ()
    assert metadata(tmp_path / "huggingface")["run"] == "7"
    (tmp_path / "again").mkdir()
    merge(tmp_path / "shardspec", tmp_path / "again" / "model.safetensors", names={"new": "b"})
    assert metadata(tmp_path / "again")["run"] == "7"


@pytest.mark.parametrize("names", [{"m.w": "new"}, NameMap(((("m.w",), ("new",)),))])
def test_a_map_keeps_plain_values(tmp_path, names):
    state = {
        "m": {"w": DTensor(torch.ones(4, 2), MESH, "[S0,R]")},
        "step": 7,
        "options": [{"lr": 0.1}],
    }
    save_sharded(state, tmp_path / "own")
    loaded = load_sharded(tmp_path / "own", MESH, {"*": "[S0,R]"}, names=names)
    assert loaded.pop("new").shape == (4, 2)
    assert loaded == {"step": 7, "options": [{"lr": 0.1}]}
    into = {"new": DTensor(torch.zeros(4, 2), MESH, "[S0,R]"), "step": 0}
    again = load_sharded(tmp_path / "own", into=into, names=names)
    assert again["step"] == 7
    assert again["new"].to_local(0).sum() == 4
    reshard(tmp_path / "own", tmp_path / "dcp", device_mesh=MESH, names=names, format="dcp")
    whole = load_sharded(tmp_path / "dcp", MESH, {"*": "[S0,R]"})
    assert whole["new"].shape == (4, 2)
    assert open_checkpoint(tmp_path / "dcp").extras["step"] == 7


def test_values_beside_tensors_in_a_list_are_kept_flat(tmp_path):
    save_sharded({"layers": [DTensor(torch.ones(2), MESH, "[S0]"), 5]}, tmp_path / "own")
    loaded = load_sharded(tmp_path / "own", MESH, {"*": "[S0]"}, names={"layers.0": "first"})
    assert sorted(loaded) == ["first", "layers.1"]
    assert loaded["layers.1"] == 5
