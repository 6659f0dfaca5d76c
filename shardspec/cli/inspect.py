"""The command `shardspec inspect`."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import click

from shardspec.checkpoint.inspect import CheckpointSummary, TensorSummary, inspect_checkpoint
from shardspec.checkpoint.source import box_text
from shardspec.errors import CheckpointError
from shardspec.text import bytes_text, table_text

__all__ = ["command"]


@click.command(
    "inspect",
    epilog="""\b
Examples:
  shardspec inspect ckpt
  shardspec inspect ckpt --tensor 'layers.0.*'     with the box and file of every rank
  shardspec inspect ckpt --json
""",
)
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="CKPT")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--tensor",
    "pattern",
    metavar="PATTERN",
    help="Only tensors whose name matches (*, ? and [abc] as in a shell), with all their boxes.",
)
def command(checkpoint: Path, as_json: bool, pattern: str | None) -> None:
    """Show mesh, tensors, specs and sizes of the checkpoint CKPT, and what each rank stored.

    Reads the sharding info and the header of every file, and checks that they agree; no data.
    """
    summary = inspect_checkpoint(checkpoint)
    if pattern is not None:
        summary = _only(summary, pattern)
    if as_json:
        click.echo(json.dumps(summary.to_json()))
    elif pattern is None:
        click.echo(_overview(summary))
    else:
        click.echo("\n\n".join(_boxes(tensor) for tensor in summary.tensors))


def _only(summary: CheckpointSummary, pattern: str) -> CheckpointSummary:
    found = tuple(t for t in summary.tensors if fnmatchcase(t.stored.name, pattern))
    if not found:
        names = ", ".join(repr(t.stored.name) for t in summary.tensors[:3])
        raise CheckpointError(
            f"{summary.directory}: no tensor matches {pattern!r}; the names start with "
            f"{names or '(there are none)'}"
        )
    return replace(summary, tensors=found)


def _overview(summary: CheckpointSummary) -> str:
    mesh = summary.mesh
    tensors = table_text(
        ["tensor", "spec", "dtype", "shape", "size"],
        [
            [*_facts(t), "×".join(map(str, t.stored.shape)) or "scalar", bytes_text(t.num_bytes)]
            for t in summary.tensors
        ],
        numbers_from=3,
    )
    files = summary.files_by_rank
    ranks = table_text(
        ["rank", "coordinates", "stored", "file"],
        [
            [
                str(rank),
                "" if mesh is None else str(mesh.coordinates(rank)),
                bytes_text(num_bytes),
                files.get(rank, "none"),
            ]
            for rank, num_bytes in summary.bytes_by_rank.items()
        ],
        numbers_from=4,
    )
    return (
        f"{summary.directory}: {len(summary.tensors)} tensors, {bytes_text(summary.num_bytes)}, "
        f"{_writer(summary)}\n\n{tensors}\n\n{ranks}"
    )


def _writer(summary: CheckpointSummary) -> str:
    if summary.mesh is None:
        return f"in the form of {summary.format}"
    return f"saved on mesh {summary.mesh} ({summary.mesh.size} devices)"


def _facts(tensor: TensorSummary) -> list[str]:
    stored = tensor.stored
    return [_plain(stored.name), "" if stored.spec is None else str(stored.spec), stored.dtype]


def _plain(name: str) -> str:
    """Return a name that cannot upset the terminal."""
    return name if name.isprintable() else ascii(name)


def _boxes(tensor: TensorSummary) -> str:
    stored = tensor.stored
    title = (
        f"{' '.join(_facts(tensor))} {list(stored.shape)}: {bytes_text(tensor.num_bytes)}, "
        f"{bytes_text(tensor.stored_bytes)} stored"
    )
    rows = [
        [
            box_text(box.box) + (f" addend {list(box.addend)}" if box.addend else ""),
            str(box.rank),
            bytes_text(tensor.box_bytes(box)),
            str(box.offset),
            box.path.name,
        ]
        for box in stored.boxes
    ]
    return f"{title}\n{table_text(['box', 'rank', 'size', 'offset', 'file'], rows)}"
