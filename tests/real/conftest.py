"""Checkpoints that the tools themselves have written, packed beside this file."""

import tarfile
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """Unpack an archive once; return the folder it is in."""
    places: dict[str, Path] = {}

    def unpacked(name: str) -> Path:
        if name not in places:
            places[name] = tmp_path_factory.mktemp(name)
            with tarfile.open(DATA / f"{name}.tar.xz") as archive:
                archive.extractall(places[name], filter="data")
        return places[name]

    return unpacked
