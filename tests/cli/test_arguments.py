"""Arguments that commands share."""

import re

import pytest

from shardspec import DeviceMesh
from shardspec.cli.options import (
    IDS,
    MAX_DEVICES,
    ClusterLinks,
    ClusterOptions,
    parse_cluster_links,
    parse_mesh,
    parse_shape,
)
from shardspec.errors import MeshError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", ((8,), None)),
        ("2x3x5", ((2, 3, 5), None)),
        (" 2 X 3 ", ((2, 3), None)),
        ("tp=4", ((4,), ("tp",))),
        ("dp=2, tp=3", ((2, 3), ("dp", "tp"))),
        ("x=2,y=3", ((2, 3), ("x", "y"))),
        ("1024x1024", ((1024, 1024), None)),
    ],
)
def test_parse_mesh(text, expected):
    assert parse_mesh(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mesh '': '' is not a whole number; give sizes as in 2x4, or named axes as in dp=2"),
        ("2y4", "'2y4' is not a whole number"),
        ("2x", "'' is not a whole number"),
        ("2,4", "'2,4' is not a whole number"),
        ("-2x4", "'-2' is not a whole number"),
        ("1_0", "'1_0' is not a whole number"),
        ("٣", "'٣' is not a whole number"),
        ("2.5", "'2.5' is not a whole number"),
        ("dp=2,tp", "'' is not a whole number"),
        ("dp=2,tp=x", "'x' is not a whole number"),
        ("1024x1025", f"mesh '1024x1025' has more than {MAX_DEVICES:,} devices"),
        ("9" * 5000, "99999 is too large, the limit is 2^63 - 1"),
    ],
)
def test_no_mesh(text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_mesh(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        (" ", ()),
        ("7", (7,)),
        ("4096x1024", (4096, 1024)),
        ("0x3", (0, 3)),
        (f"{2**62}", (2**62,)),
        (f"0x{2**63 - 1}", (0, 2**63 - 1)),
    ],
)
def test_parse_shape(text, expected):
    assert parse_shape(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4x", "shape '4x': '' is not a whole number; give sizes as in 4096x4096, or \"\" for a"),
        ("4,4", "'4,4' is not a whole number"),
        ("-1", "'-1' is not a whole number"),
        (f"{2**32}x{2**31}", "more elements than a tensor can have, 2^63 - 1"),
        (f"{2**63}", "9223372036854775808 is too large"),
    ],
)
def test_no_shape(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_shape(text)


def test_parse_ids():
    assert IDS.read("3, 1,0,2") == (3, 1, 0, 2)
    message = "ids '3,,1': '' is not a whole number; give them as in 3,1,0,2"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        IDS.read("3,,1")


def test_links_by_numbers():
    links = parse_cluster_links("1e-5:0, 3 : 4e-11")
    assert links == ClusterLinks(numbers=((1e-5, 0.0), (3.0, 4e-11)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1e-5:x", "'x' is not a number"),
        (":", "'' is not a number"),
        ("-1:0", "'-1' must be finite and not negative"),
        ("1:1,1:inf", "'inf' must be finite and not negative"),
        ("nan:1", "'nan' must be finite and not negative"),
        ("1:1.7e308", "'1:1.7e308': give seconds that are 0, or from 1e-100 to 1e9"),
        ("5e-324:1", "'5e-324:1': give seconds that are 0, or from 1e-100 to 1e9"),
    ],
)
def test_no_links_by_numbers(text, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        parse_cluster_links(text)


def built(**given):
    return ClusterOptions(**given).build()[0]


def test_the_mesh_of_options():
    assert built(mesh=((2, 3), None)) == DeviceMesh(range(6), (2, 3))
    assert built(
        mesh=((2, 2), ("a", "b")),
        ids=(3, 1, 0, 2),
        links=ClusterLinks(numbers=((1e-5, 2e-11), (1e-5, 3e-12))),
        link_model="shared-bus",
    ) == DeviceMesh(
        [3, 1, 0, 2],
        (2, 2),
        mesh_alpha=(1e-5, 1e-5),
        mesh_beta=(2e-11, 3e-12),
        axis_names=("a", "b"),
        link_model="shared-bus",
    )


def test_ids_that_do_not_fill_the_mesh():
    with pytest.raises(MeshError) as caught:
        built(mesh=((2, 3), None), ids=(0, 1))
    assert str(caught.value) == "mesh shape 2x3 needs 6 device ids, but 2 were given"
