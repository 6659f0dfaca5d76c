"""Reads the JSON files that ``shardspec profile`` wrote before it wrote files of links."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final

from shardspec.comm.cluster_file import link_of_record
from shardspec.comm.curves import Link, exchange_floor
from shardspec.errors import ProfileError, ShardSpecError
from shardspec.input_files import MAX_JSON_BYTES, read_input_file
from shardspec.text import shown


def read_earlier_profile(path: Path) -> tuple[tuple[int, ...], tuple[Link, ...], Any]:
    """Return the mesh shape, the link of each axis, and the link model of a profile in JSON.

    Raises `ProfileError` if there is no such file, or it is no profile.
    """
    try:
        root = json.loads(read_input_file(path, MAX_JSON_BYTES))
        if (root["format"], root["version"]) != ("shardspec profile", 1):
            raise ProfileError(f"format is {shown(root['format'])}")
        return _parse(root)
    except ShardSpecError as error:
        why = str(error).removeprefix(f"{path}: ")
    except KeyError as error:
        why = f"{error} is missing"
    except (TypeError, ValueError, AttributeError, RecursionError, ArithmeticError) as error:
        why = str(error).splitlines()[0]
    raise ProfileError(f"{path}: is not a profile: {why}; 'shardspec profile' makes one")


def _parse(root: Any) -> tuple[tuple[int, ...], tuple[Link, ...], Any]:  # noqa: ANN401
    shape, model = tuple(root["mesh_shape"]), root["link_model"]
    if model not in ("ring", "shared-bus"):
        raise ProfileError(f"link_model is {shown(model)}; known are 'ring' and 'shared-bus'")
    links = []
    for axis, fit in enumerate(root["fits"][model]["links"]):
        # A bus is shared by the bytes of all devices.
        sharing = prod(shape) if model == "shared-bus" else 1
        curves = [
            {
                **{key: curve[key] for key in ("collective", "devices", "sizes")},
                "lines": [[fixed * 1e6, slope * 1e12] for fixed, slope in curve["lines"]],
            }
            for curve in root.get("curves", ())
            if axis in curve["axes"]
        ]
        rate = 1e-9 / fit["seconds_per_byte"] if fit["seconds_per_byte"] else float("inf")
        record = {"latency_us": fit["latency_s"] * 1e6, "gb_per_s": rate, "start_us": 0.0}
        link = link_of_record({**record, "curves": curves}, "measured")
        start, per_byte = exchange_floor(link.curves)
        slower = max(link.seconds_per_byte, per_byte / sharing)
        links.append(replace(link, start_s=start, seconds_per_byte=slower))
    return shape, tuple(links), model
