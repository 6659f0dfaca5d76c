"""The table of faults."""

from typing import Final

from tests.faults import flips, injected, kills, lies, paths, ranks, truncated
from tests.faults.harness import Row

__all__ = ["ROWS"]

ROWS: Final = (
    Row("headers", "header, info or index cut at every byte", truncated.headers),
    Row("payloads", "payload cut", truncated.payloads),
    Row("lies", "header lies", lies.lies),
    Row("data-flips", "bit flips in data with digests", flips.data, prepare="torch_files"),
    Row("header-flips", "every bit of headers flipped, without digests", flips.headers),
    Row(
        "info-flips",
        "every bit of the info flipped, without digests",
        flips.described,
        ends="refused or right",
    ),
    Row(
        "pickle-flips",
        "every bit of `.metadata`, a `.pt` file and an index flipped",
        flips.pickles,
        ends="refused or whole",
        prepare="torch_files",
    ),
    Row("rank-files", "rank files missing, doubled or swapped: every subset", ranks.files),
    Row("meshes", "wrong mesh in the info", ranks.meshes),
    Row(
        "paths",
        "paths that lead elsewhere or nowhere",
        paths.paths,
        ends="refused or harmless",
        prepare="torch_files",
    ),
    Row("kills", "`kill -9` at random points of merge and reshard", kills.kills, ends="whole"),
    Row(
        "save-kills", "`kill -9` at random points of a save", kills.saves, ends="whole", torch=True
    ),
    Row(
        "writes",
        "killed or failing at every write, flush and rename",
        injected.writes,
        ends="whole or refused",
    ),
    Row("save-writes", "the same in a save", injected.saves, ends="whole or refused", torch=True),
    Row("reads", "failing at every read", injected.reads, ends="whole or refused"),
)
