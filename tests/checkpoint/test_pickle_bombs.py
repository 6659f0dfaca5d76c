"""Bombs: small pickles of large values are refused, or read, in little memory and time."""

import pytest

from tests.checkpoint.test_pickles import raw
from tests.forked import run_forked

IMPORTS = """
import re, sys, time
from pathlib import Path
from shardspec.checkpoint.torch_files.unpickler import record_class, unpickle
from shardspec.errors import CheckpointError
"""
LIMITED = """
data = Path(sys.argv[1]).read_bytes()
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
used = peak()
started = time.process_time()
try:
    value = unpickle(data, {"a.Thing": record_class("Thing")}, Path("x"), "pickle")
    print("read")
except CheckpointError as error:
    assert len(str(error)) < 400
    print("refused:", error)
more = peak() - used
print(more)
assert more < 450, more
assert time.process_time() - started < 20
"""


TOO_MUCH = "needs more memory or time than a checkpoint does"
EITHER = ""
DAMAGED = "is not as pickle writes it; it is damaged, restore it"


def laughs(width):
    """A tuple of the tuple before, twice, and so on: what shows or hashes it never ends."""
    body = b")q\0"
    for level in range(width):
        body += b"h" + bytes([level]) + b"\x86q" + bytes([level + 1])
    return body


def bombs(share):
    """Return pickles, and what is said of them; more are tried in files, by `tests.faults`."""
    return {
        "many lists": (b"(" + b"]" * (8 << 20) + b"t", TOO_MUCH),
        "many dicts of an item": (b"(" + b"}NNs" * (3 << 20) + b"t", TOO_MUCH),
        "many names": (
            b"(" + b"".join(b"ca\n%d\n" % n for n in range((1 << 20) // share)) + b"t",
            "names a.",
        ),
        "records": (b"(ca\nThing\nq\0" + b"h\0)\x81" * ((2 << 20) // share) + b"t", "read"),
        "records with states": (
            b"(ca\nThing\nq\0" + b"h\0)\x81}K\1K\1sb" * ((1 << 20) // share) + b"t",
            EITHER,
        ),
        "numbers of one hash": (
            b"}("
            + b"".join(
                b"\x8a\x0b" + ((2**61 - 1) * n).to_bytes(11, "little") + b"N"
                for n in range(1 << 20, (1 << 20) + 40_000)
            )
            + b"u",
            TOO_MUCH,
        ),
        "wide tuples as keys": (
            b"((" + b"K\1" * 100_000 + b"tq\0}" + b"h\0Ns" * 100_000 + b"t",
            TOO_MUCH,
        ),
        "many tuples as keys": (
            b"}("
            + b"".join(b"J" + n.to_bytes(4, "little") + b"\x85N" for n in range(20_000))
            + b"u",
            TOO_MUCH,
        ),
        "small dicts": (
            b"(" + b"}K\1K\1s" * ((1 << 20) // share) + b"t",
            EITHER,
        ),
        "a thousand laughs as a key": (b"}" + laughs(200) + b"K\1s", TOO_MUCH),
        "a thousand laughs as a list": (laughs(200) + b"K\1a", DAMAGED),
        "a thousand laughs as an argument": (
            b"ca\nThing\n" + laughs(200) + b"\x85R",
            "read",
        ),
        "a thousand laughs called": (laughs(200) + b")R", DAMAGED),
        "a thousand laughs referred to": (
            laughs(200) + b"Q",
            "refers to a tuple, which is not in the file",
        ),
        "a thousand laughs as a name": (laughs(200) + b"h\0\x93", DAMAGED),
        "a thousand laughs with a state": (laughs(200) + b"}b", DAMAGED),
    }


NAMES = list(bombs(1 << 20))


@pytest.fixture(scope="module", params=[8, pytest.param(1, marks=pytest.mark.exhaustive)])
def ended(request, tmp_path_factory):
    """How the reading of each ended, in a process of its own, and what it is to say."""
    folder = tmp_path_factory.mktemp("bombs")
    made = bombs(request.param)
    for number, (body, _) in enumerate(made.values()):
        (folder / str(number)).write_bytes(raw(body, 4))
    runs = run_forked(IMPORTS, LIMITED, [[folder / str(number)] for number in range(len(made))])
    return {case: (run, made[case][1]) for case, run in zip(made, runs, strict=True)}


@pytest.mark.parametrize("case", NAMES)
def test_bombs_take_little_memory(case, ended):
    run, message = ended[case]
    assert run.returncode == 0, run
    assert message in run.stdout
