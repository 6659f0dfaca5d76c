"""Ranks compare what they are about to do, before the first of them waits for the others in vain.

Every rank sends every other one record of fixed size: a digest of what it asks for, and the words
that say so. Records have a tag of their own, so that they are not taken for shards.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist

from shardspec.comm.failures import cause
from shardspec.comm.failures import ranks as ranks_text
from shardspec.errors import CommunicatorError

__all__ = ["check_agreement"]

_RECORD_BYTES: Final = 4096
_MOST_OF_A_WORD: Final = 240
_TAG: Final = 0x5AD


def check_agreement(rank: int, ranks: Sequence[int], words: Mapping[str, str]) -> None:
    """Raise on every rank unless all of them say the same; all of them call this at once.

    Parameters
    ----------
    rank
        This one.
    ranks
        Global ranks that must agree, this one included.
    words
        What is to be done, by what each word is about.

    Raises
    ------
    CommunicatorError
        If a rank says something else, naming it and the first difference; or if one does not
        answer within the timeout of the process group.
    """
    others = [peer for peer in ranks if peer != rank]
    if not others:
        return
    device = "cpu" if "gloo" in dist.get_backend_config() else "cuda"
    mine = torch.frombuffer(bytearray(_record(words)), dtype=torch.uint8).to(device)
    records = {peer: torch.zeros_like(mine) for peer in others}
    ops = [dist.P2POp(dist.irecv, record, peer, tag=_TAG) for peer, record in records.items()]
    ops += [dist.P2POp(dist.isend, mine, peer, tag=_TAG) for peer in others]
    try:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    except RuntimeError as error:
        silent = [peer for peer, record in records.items() if not record.any()]
        raise CommunicatorError(
            f"{ranks_text(silent or others)} did not say what to convert, as rank {rank} did "
            f"({_text(words)}): {cause(error)}; every rank of the mesh must call the same "
            "conversions in the same order"
        ) from error
    records[rank] = mine
    told = {peer: records[peer].cpu().numpy().tobytes() for peer in ranks}
    first = ranks[0]
    for peer in ranks:
        if told[peer] != told[first]:
            raise CommunicatorError(_difference(first, told[first], peer, told[peer]))


def _record(words: Mapping[str, str]) -> bytes:
    """Return the digest of all words, then the words, long ones cut, as many as there is room."""
    digest = hashlib.sha256(json.dumps(dict(words)).encode()).hexdigest()
    room = {name: _cut(word) for name, word in words.items()}
    text = json.dumps({"digest": digest, **room}, ensure_ascii=False).encode()
    assert len(text) <= _RECORD_BYTES, "there are few words"
    return text.ljust(_RECORD_BYTES)


def _cut(word: str) -> str:
    if len(word) <= _MOST_OF_A_WORD:
        return word
    half = _MOST_OF_A_WORD // 2
    return f"{word[:half]} … {word[-half:]}"


def _difference(first: int, told: bytes, other: int, otherwise: bytes) -> str:
    here, there = json.loads(told), json.loads(otherwise)
    names = [name for name in here if name != "digest" and here[name] != there.get(name)]
    what = "; ".join(
        f"{name} {there.get(name)} where rank {first} has {here[name]}" for name in names
    )
    return (
        f"rank {other} asks for another conversion than rank {first}: "
        f"{what or 'they differ in a part too long to show'}; every rank of the mesh must call the "
        "same conversions in the same order"
    )


def _text(words: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {_cut(word)}" for name, word in words.items())
