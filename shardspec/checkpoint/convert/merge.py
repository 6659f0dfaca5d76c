"""Converting checkpoints: merged into global tensors, or resharded for the ranks of a mesh.

First all is settled that needs no data (`prepare`): tensors are chosen, a format lays out files for
them, and both ends are checked. Then copies are planned, carried out and committed (`output`).
"""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Unpack

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.compare.digest import check_digests_file, write_digests
from shardspec.checkpoint.convert.options import WriteKeywords, WriteOptions, WriteReport
from shardspec.checkpoint.convert.output import Output
from shardspec.checkpoint.convert.prepare import prepared_output
from shardspec.checkpoint.storage.checksums import crc32_combine
from shardspec.checkpoint.storage.from_text import storage_path
from shardspec.checkpoint.targets import Target
from shardspec.layout.layout import Layout
from shardspec.layout.rules import Rules
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.digests import Digests, TensorDigest
from shardspec.resharding.name_map import Names


def merge(
    directory: PurePath | str | Catalog,
    output: PurePath | str,
    *,
    format: str | None = None,
    max_shard_bytes: int | None = None,
    dtype: str | None = None,
    names: Names | None = None,
    overwrite: bool = False,
    **options: Unpack[WriteKeywords],
) -> WriteReport:
    """Write the global tensors of a checkpoint into one file, or into files of a limited size.

    Headers, tiling and replicas are checked before the first byte is written (but the headers that
    torch's DCP puts before chunks). Pending reductions are finished. The output appears under its
    name once it is complete and flushed to the disk. Needs neither torch nor a process
    group; memory does not grow with the sizes of the tensors.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` knows, or one that it has opened.
    output
        The file to write; a directory for the formats ``"huggingface"`` and ``"dcp"``.
    format
        The default is a torch file if the output ends in ``.pt``, ``.pth`` or ``.bin``,
        ``"huggingface"`` if `max_shard_bytes` is given or the output is text that ends in ``/``,
        else one safetensors file. Installed packages may have others (``shardspec.formats``).
    max_shard_bytes
        Most bytes of tensors in a file of the format ``"huggingface"``; 5 GB by default.
    dtype
        Cast floating point tensors to this dtype; quantized weights are dequantized to it.
    names
        A map to the tensors of another model: a `NameMap`, a list of them to be applied in turn, or
        new names. It has to have a use for every tensor that is to be written. `include` and
        `exclude` match names before it, `rename` those that it gives.
    overwrite
        Replace the checkpoint that is there: its own files, and those beside the weights that
        belong to it. A directory with any other file is refused.

    Other Parameters
    ----------------
    include, exclude
        Shell patterns of names, one or several. What matches any of `include`, or all if it is
        None, and none of `exclude`, is written.
    rename
        Regular expressions with their replacements, ``{"^model[.]": ""}`` or pairs. Each is applied
        in turn to its first match in every name.
    drop
        Shell patterns of names whose tensors the map need not use.
    quantize
        Quantize the weights of linear layers: ``"fp8-128x128"``, ``"mxfp8"`` or ``"mxfp4"``. Which
        these are, says the family of the model by its config, or else their names.
    scale_rule
        How a scale of ``"fp8-128x128"`` comes from the largest size in its block, amax:
        ``"transformers"``, which multiplies numbers with 448 · (1 / amax), is the default;
        ``"amax/448"`` divides them by that.
    quantize_include
        Shell patterns of names of the output: what matches any is quantized, and nothing else.
    drop_values
        Allow to lose entries that the format has no place for, which is an error otherwise; `merge`
        loses those without tensors in any case. Both formats of shards keep plain values (None,
        numbers, texts, bytes, lists and dicts of them); between checkpoints of torch everything is
        copied as it is stored.
    threads
        How many threads copy: each a few tensors at a time, or to a store a file.
    metadata
        Copy the metadata of safetensors files into safetensors files.
    strict_cast
        Refuse a cast that does not keep a number: one that overflows, becomes 0, or becomes NaN.
        Otherwise the report counts them.
    verify
        Compare all bytes that are read with the digests of the checkpoint, if it has any.
    dry_run
        Do all checks that come before writing, and write nothing.
    sidecars
        Copy the files beside the weights into directories, such as ``config.json``, a tokenizer's
        files and ``adapter_config.json``; into the format ``"dcp"`` also Megatron's ``common.pt``
        and Lightning's ``meta.pt``.
    progress
        Called with the bytes written so far and in all.
    digests
        A file to write digests of the output's tensors to, as `digest` finds them; they are of the
        bytes that are written anyway.

    Raises
    ------
    OutputExistsError
        If the output exists and `overwrite` is not set; it is kept.
    CheckpointError
        If the checkpoint is missing, unfinished, damaged or contradicts itself, if an object in it
        has tensors that would be lost, if the output would overwrite a part of it, or if the disk
        is full. Nothing appears under the name of the
        output, and no temporary file is left.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from shardspec import DTensor, DeviceMesh, save_sharded
    >>> directory = Path(tempfile.mkdtemp())
    >>> w = DTensor(torch.arange(12.0).view(4, 3), DeviceMesh(range(4), (2, 2)), "[S01,R]")
    >>> save_sharded({"w": w}, directory / "ckpt")
    >>> report = merge(directory / "ckpt", directory / "model.safetensors")
    >>> report.tensors, report.num_bytes
    (1, 144)
    """
    how = WriteOptions(
        way="merged",
        format=format,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        names=names,
        overwrite=overwrite,
        **options,
    )
    return _converted(directory, output, how)


def reshard(
    directory: PurePath | str | Catalog,
    output: PurePath | str,
    *,
    device_mesh: DeviceMesh | None = None,
    rules: Rules | None = None,
    like: PurePath | str | Catalog | Mapping[str, Layout] | None = None,
    format: str | None = None,
    dtype: str | None = None,
    names: Names | None = None,
    overwrite: bool = False,
    **options: Unpack[WriteKeywords],
) -> WriteReport:
    """Write a checkpoint of any format as the ranks of a mesh would have saved it.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` knows, or one that it has opened.
    output
        The directory to write.
    device_mesh
        The devices to shard for.
    rules
        Name pattern to spec, matched against the new names as by `match_rules`: the last rule that
        matches a tensor counts. One that no rule matches is replicated.
    like
        A checkpoint to take mesh and specs from, by name, in place of the two above; or the layout
        of each tensor, as `model_layouts` returns them.
    format
        shardspec's own, which is the default, or that of `torch.distributed.checkpoint`.
    dtype, names, overwrite
        As for `merge`, as are all other parameters.

    Raises
    ------
    LayoutError, AxisError
        If the rules do not fit the tensors or the mesh.
    OutputExistsError, CheckpointError
        As for `merge`.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from shardspec import save_sharded
    >>> place = Path(tempfile.mkdtemp())
    >>> save_sharded({"w": torch.arange(12.0).view(4, 3)}, place / "whole")
    >>> mesh = DeviceMesh(range(4), (4,))
    >>> report = reshard(place / "whole", place / "cut", device_mesh=mesh, rules={"w": "[S0,R]"})
    >>> len(report.files)
    5
    """
    how = WriteOptions(
        way="sharded",
        format=format,
        device_mesh=device_mesh,
        rules=rules,
        like=like,
        dtype=dtype,
        names=names,
        overwrite=overwrite,
        **options,
    )
    return _converted(directory, output, how)


def _converted(
    checkpoint: PurePath | str | Catalog, place: PurePath | str, options: WriteOptions
) -> WriteReport:
    """Check that an output can be made of a checkpoint and may be written, and write it."""
    started = time.monotonic()
    output = storage_path(place)
    if isinstance(place, str) and place.endswith(("/", os.sep)):
        options = replace(options, in_directory=True)
    digests_file = None if options.digests is None else storage_path(options.digests)
    prepared = prepared_output(checkpoint, output, options, os.urandom(8).hex())
    if digests_file is not None:
        check_digests_file(digests_file, output, overwrite=options.overwrite)
    report = prepared.report
    if not options.dry_run:
        begun = Output(*prepared[:3], options)
        written = begun.write()
        crc = 0
        for _, num_bytes, value in written:
            crc = crc32_combine(crc, value, num_bytes)
        digests = None
        if digests_file is not None:
            digests = _digests(prepared.target, begun)
            write_digests(digests_file, digests, overwrite=options.overwrite)
        report = replace(
            report,
            writes={name: num_bytes for name, num_bytes, _ in written},
            crc32=crc if begun.digested else None,
            cast_losses=begun.losses,
            written=True,
            digests=digests,
        )
    return replace(report, seconds=time.monotonic() - started)


def _digests(target: Target, output: Output) -> Digests:
    """Return the digests of what was written; tensors that share bytes were written once."""
    digests = {}
    for tensor in target.tensors:
        empty = TensorDigest(tensor.dtype, tensor.shape)
        written = target.same.get(tensor.name, tensor.name)
        digests[tensor.name] = output.tensor_digests.get(written, empty)
    return Digests(digests)
