"""The page of `shardspec explore`: tables, style and script in one file that needs nothing else."""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Final

from shardspec.dtypes import dtype_name
from shardspec.errors import LayoutError
from shardspec.explorer.tables import (
    MAX_DIMS,
    count_conversions,
    mesh_tables,
    models_of,
)
from shardspec.layout.drawing import COLOURS
from shardspec.mesh import DeviceMesh

__all__ = ["MAX_CONVERSIONS", "MAX_DEVICES", "MAX_PAGE_BYTES", "explorer_page"]

MAX_DEVICES: Final = 32
"""Devices of the largest mesh that can be drawn so that their boxes can be told apart."""
MAX_CONVERSIONS: Final = 50_000
"""Conversions that can be planned in about a minute."""
MAX_PAGE_BYTES: Final = 16 * 2**20
"""A page that browsers open at once."""


def explorer_page(
    meshes: Sequence[DeviceMesh],
    shapes: Sequence[tuple[int, ...]],
    links: Sequence[tuple[str, ...]],
    dtype: object,
) -> str:
    """Return an HTML page in which to pick a conversion and to see its plans step by step.

    Parameters
    ----------
    meshes
        What can be picked; their ids count up from 0.
    shapes, dtype
        Tensors of 1 to 3 dims.
    links
        Names of presets, per choice one for all axes or one per axis; a mesh has those that fit.

    Raises
    ------
    LayoutError
        If a mesh or a tensor is too large to draw, if there are more conversions than
        `MAX_CONVERSIONS`, or if links fit no mesh.
    MeshError
        If there is no such preset.

    Examples
    --------
    >>> page = explorer_page([DeviceMesh(range(2), (2,))], [(4, 4)], [("unit",)], "int8")
    >>> page.startswith("<!DOCTYPE html>"), "https:" in page
    (True, False)
    """
    name = dtype_name(dtype)
    _check(meshes, shapes, links)
    data = {
        "dtype": name,
        "colours": dict(COLOURS),
        "meshes": [mesh_tables(mesh, shapes, models_of(mesh, links), name) for mesh in meshes],
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    parts = {
        "TITLE": escape(f"shardspec: conversions on {', '.join(map(str, meshes))}"),
        "STYLE": _asset("page.css"),
        "SCRIPT": _asset("picture.js") + _asset("page.js"),
        # Nothing in the tables may end the element that they stand in.
        "DATA": text.replace("<", "\\u003c"),
    }
    page = _asset("page.html")
    for mark, part in parts.items():
        page = page.replace(f"%{mark}%", part)
    size = len(page.encode())
    if size > MAX_PAGE_BYTES:
        raise LayoutError(
            f"the page would have {size:,} bytes, the limit is {MAX_PAGE_BYTES:,}; give fewer "
            "meshes, shapes or links"
        )
    return page


def _asset(name: str) -> str:
    return files("shardspec.explorer").joinpath(name).read_text("utf-8")


def _check(
    meshes: Sequence[DeviceMesh],
    shapes: Sequence[tuple[int, ...]],
    links: Sequence[tuple[str, ...]],
) -> None:
    for mesh in meshes:
        if mesh.size > MAX_DEVICES:
            raise LayoutError(
                f"mesh {mesh} of {mesh.size} devices is too large to draw; the limit is "
                f"{MAX_DEVICES} devices"
            )
    for shape in shapes:
        if not 1 <= len(shape) <= MAX_DIMS:
            raise LayoutError(
                f"a tensor of shape {shape} cannot be drawn; give one of 1 to {MAX_DIMS} dims"
            )
        if 0 in shape:
            raise LayoutError(
                f"a tensor of shape {shape} has no elements to draw; give one that has"
            )
    for names in links:
        if all(len(names) not in (1, mesh.ndim) for mesh in meshes):
            raise LayoutError(
                f"links {','.join(names)} fit no mesh: give one preset for all axes, "
                "or one per axis"
            )
    count = sum(
        count_conversions(mesh.ndim, len(shape)) * len(models_of(mesh, links))
        for mesh in meshes
        for shape in shapes
    )
    if count > MAX_CONVERSIONS:
        raise LayoutError(
            f"the page would hold {count:,} conversions, the limit is {MAX_CONVERSIONS:,}; give "
            "meshes of fewer axes, or fewer meshes, shapes or links"
        )
