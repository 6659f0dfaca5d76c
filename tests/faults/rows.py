"""The table of faults."""

from typing import Final

from tests.faults import (
    bits,
    blocks,
    calls,
    false_headers,
    flipped_bits,
    full,
    indexes,
    injected,
    kills,
    maps,
    operators,
    paths,
    pickled,
    rank_forms,
    ranks,
    states,
    tools,
    truncated,
    writers,
)
from tests.faults.harness import Row

__all__ = ["ROWS"]

ROWS: Final = (
    Row(
        "headers",
        "header, info, index, `.metadata`, `.pt` and `.distcp` cut at every byte",
        truncated.headers,
        prepare="torch_files",
    ),
    Row("payloads", "payload cut", truncated.payloads),
    # A header of 100 MB is read at once.
    Row("false-headers", "headers that are false", false_headers.false_headers, memory=512 << 20),
    Row("data-bits", "bit flips in data with digests", flipped_bits.data, prepare="torch_files"),
    Row("header-bits", "every bit of headers flipped, without digests", flipped_bits.headers),
    Row(
        "info-bits",
        "every bit of the info flipped, without digests",
        flipped_bits.described,
        ends="refused or right",
    ),
    Row(
        "pickle-bits",
        "every bit of `.metadata`, a `.pt` file and an index flipped",
        flipped_bits.pickles,
        ends="refused or whole",
        prepare="torch_files",
    ),
    Row("rank-files", "rank files missing, doubled or swapped: every subset", ranks.files),
    Row(
        "rank-forms",
        "rank files of other formats missing, doubled, swapped or of another mesh",
        rank_forms.forms,
        ends="refused or right",
        prepare="rank_files",
    ),
    Row(
        "lookalikes",
        "the same where files do not say their rank and are of equal sizes",
        rank_forms.lookalikes,
        ends="as the files lie",
        prepare="rank_files",
    ),
    Row(
        "tools",
        "files of DeepSpeed, Meta and Megatron missing, cut, or in the place of others",
        tools.files,
        ends="refused or right",
    ),
    Row(
        "indexes",
        "folders with indexes that name some files, none or others; variants, links, two models",
        indexes.folders,
        ends="refused or right",
    ),
    Row("meshes", "wrong mesh in the info", ranks.meshes),
    Row(
        "maps",
        "models with a tensor, layer or expert missing or too much, under the shipped maps",
        maps.losses,
    ),
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
    Row(
        "save-writes",
        "killed or failing at every write, flush and rename of a save",
        injected.saves,
        ends="whole or refused",
        torch=True,
    ),
    Row("reads", "failing at every read", injected.reads, ends="whole or refused"),
    Row(
        "full",
        "disk full: a tmpfs of 64 sizes",
        full.full,
        ends="whole or refused",
        own_mounts=True,
    ),
    Row(
        "save-full",
        "disk full, in a save",
        full.saves,
        ends="whole or refused",
        torch=True,
        own_mounts=True,
    ),
    Row("writers", "2 to 8 concurrent writers", writers.writers, ends="one wins"),
    Row("save-writers", "2 to 8 concurrent saves", writers.saves, ends="one wins", torch=True),
    Row(
        "bits",
        "NaN payloads, -0, subnormals in every dtype",
        bits.bits,
        ends="bit-identical",
        prepare="every_dtype",
    ),
    Row(
        "blocks",
        "cuts through the blocks of quantized tensors",
        blocks.blocks,
        ends="refused if it parts a block",
    ),
    Row(
        "code",
        "pickles that would run code: 46 names, 6 ways to call",
        pickled.code,
        prepare="torch_files",
    ),
    Row("bombs", "zip and pickle bombs", pickled.bombs, prepare="torch_files", memory=512 << 20),
    Row(
        "states",
        "state dicts that change between planning and running",
        states.changed,
        ends="refused by name or right",
        torch=True,
    ),
    Row(
        "operators",
        "operators of torch on uneven, empty and pending shards, over every two axes",
        operators.operators,
        ends="right or refused",
        torch=True,
        memory=400 << 20,
    ),
    Row(
        "calls",
        "random calls of all commands",
        calls.calls,
        ends="done, or one line",
        memory=500 << 20,
    ),
)
