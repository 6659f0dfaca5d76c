"""Boxes read straight out of the memory of peers on the same host.

A device tells those that want something of it where its shard lies; they read what they want into
its place, and say so. Nothing is sent through the operating system but these notes, and there are
no copies on the way. Where rows are so short that fetching each by itself is slow, the stretch they
lie in is read through a small buffer.
"""

import errno
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Final

import torch

from shardspec.boxes import Box, box_shape, box_size, slices_within
from shardspec.comm.carrier import keep_own_part
from shardspec.comm.chunks import chunks
from shardspec.comm.failures import ranks
from shardspec.comm.host_links import Address, HostLink, Listener, readable
from shardspec.comm.host_memory import Region, read
from shardspec.comm.reduce import combine_into
from shardspec.comm.reduce_op import ReduceOp
from shardspec.comm.role import Incoming, Role
from shardspec.errors import CommunicatorError

__all__ = ["BUFFER_BYTES", "Direct", "join_host"]

BUFFER_BYTES: Final = 1 << 20
"""The most that lies in a buffer at once. Of addends it is how much is combined at once: about what
a core's own cache holds; less costs more in calls than it saves."""
_RUN_BYTES: Final = 6 << 10
"""Fetching a run of bytes by itself costs as much time as reading so many in passing: 0.4 µs."""
_READ: Final = b"read"
_HEADER: Final = struct.Struct("<IQI")


class Direct:
    """Carries boxes between processes that can read each other; a `Carrier`.

    Parameters
    ----------
    links
        To every process that is reached, by rank.
    readable
        For every rank of the mesh, which others it can read.
    timeout_s
        How long a step waits for a peer.
    """

    def __init__(
        self,
        links: Mapping[int, HostLink],
        readable: Mapping[int, frozenset[int]],
        timeout_s: float,
    ) -> None:
        self._links = links
        self._readable = readable
        self._timeout_s = timeout_s
        self._joined: dict[tuple[int, ...], bool] = {}

    def joins(self, members: tuple[int, ...]) -> bool:
        """Say whether each of some ranks can read each other one; all of them say the same."""
        if members not in self._joined:
            self._joined[members] = all(
                a in self._readable[b] and b in self._readable[a]
                for a, b in combinations(members, 2)
            )
        return self._joined[members]

    def move(self, what: object, role: Role, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Fill the result with what comes in, and let others read; see `Carrier`."""
        with self._serving(what, role, shard) as deadline:
            keep_own_part(role, shard, result)
            for peer, parts in _by_peer(role).items():
                there = self._receive(what, peer, parts[0], shard, deadline)
                for part in parts:
                    place = result[slices_within(part.box, role.wanted)]
                    self._fetch(peer, _part_of(there, part), place)
                self._release(peer)

    def reduce(
        self,
        what: object,
        role: Role,
        shard: torch.Tensor,
        result: torch.Tensor,
        op: ReduceOp,
    ) -> None:
        """Fill the result with what the addends of all members come to; see `Carrier`."""
        shares = result.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        with self._serving(what, role, shard) as deadline:
            there = {
                peer: self._receive(what, peer, parts[0], shard, deadline)
                for peer, parts in _by_peer(role).items()
            }
            most = max(1, min(box_size(role.wanted), BUFFER_BYTES // shard.element_size()))
            buffer, copy = shard.new_empty(most), shard.new_empty(most if shares else 0)
            for box in chunks(role.wanted, most):
                place = result[slices_within(box, role.wanted)]
                own = shard[slices_within(box, role.held)]
                if shares:  # the result takes its place, and it may not be the first
                    own = copy[: own.numel()].view(own.shape).copy_(own)
                into = buffer[: place.numel()].view(place.shape)
                combine_into(place, self._addends(role, there, box, own, place, into), op)
            for peer in there:
                self._release(peer)

    def _addends(
        self,
        role: Role,
        there: Mapping[int, Region],
        box: Box,
        own: torch.Tensor,
        place: torch.Tensor,
        buffer: torch.Tensor,
    ) -> Iterator[torch.Tensor]:
        """Yield every member's addend of a box in their order: the first in its place."""
        for at, part in enumerate(role.incoming):
            if part.peer == role.device:
                yield own
            else:
                into = buffer if at else place
                source = _part_of(there[part.peer], Incoming(part.peer, box, part.held))
                self._fetch(part.peer, source, into)
                yield into

    @contextmanager
    def _serving(self, what: object, role: Role, shard: torch.Tensor) -> Iterator[float]:
        """Let others read the shard until they say that they have; yields when to give up."""
        deadline = time.monotonic() + self._timeout_s
        sources = [part.peer for part in role.incoming if part.peer != role.device]
        readers = dict.fromkeys(peer for peer, _ in role.outgoing)
        try:
            for peer in readers:
                self._links[peer].send(_note(what, shard))
            yield deadline
            for peer in readers:
                note = self._links[peer].receive(deadline)
                assert note == _READ, "notes of one peer come in its order"
        except BaseException as error:
            peers = {*sources, *readers}
            ended = [peer for peer in peers if self._links[peer].has_ended()]
            for link in self._links.values():
                link.close()
            if not isinstance(error, CommunicatorError):
                raise
            gone = f"; {ranks(ended)} have ended or given up" if len(ended) > 1 else ""
            raise CommunicatorError(
                f"{what} with {ranks(peers)} failed: {error}{gone}"
            ) from error.__cause__

    def _receive(
        self, what: object, peer: int, part: Incoming, shard: torch.Tensor, deadline: float
    ) -> Region:
        """Return where a peer's shard lies, once it is ready."""
        note = self._links[peer].receive(deadline)
        step, address, item_bytes = _HEADER.unpack_from(note)
        numbers = struct.unpack_from(f"<{2 * len(part.held)}q", note, _HEADER.size)
        shape, strides = numbers[: len(part.held)], numbers[len(part.held) :]
        expected = (_digest(what), box_shape(part.held), shard.element_size())
        if (step, shape, item_bytes) != expected:
            raise CommunicatorError(
                f"rank {peer} carries out another step, or holds a shard of shape {shape} and "
                f"{item_bytes} bytes an element where {expected[1]} and {expected[2]} are expected"
            )
        return Region(address, shape, strides, item_bytes)

    def _release(self, peer: int) -> None:
        """Tell a peer that all has been read; until then it is there, if all is well."""
        # A peer that fails hangs up before it lets go of its shard. So what has been read from one
        # that has not hung up is right.
        if self._links[peer].has_ended():
            raise CommunicatorError(f"rank {peer} has ended or given up this step")
        self._links[peer].send(_READ)

    def _fetch(self, peer: int, source: Region, place: torch.Tensor) -> None:
        target = _region(place)
        runs = source.num_bytes // min(source.run_bytes, target.run_bytes)
        try:
            if runs == 1 or source.span >= runs * _RUN_BYTES:
                read(self._links[peer].pid, source, target)
            else:
                self._fetch_span(peer, source, place)
        except OSError as error:
            why = "it has ended" if error.errno == errno.ESRCH else error.strerror
            raise CommunicatorError(f"the memory of rank {peer} cannot be read: {why}") from error

    def _fetch_span(self, peer: int, source: Region, place: torch.Tensor) -> None:
        """Read the whole stretch in which rows lie, so much at a time as fits the buffer."""
        if source.span > BUFFER_BYTES and place.numel() > 1:
            widest = max(
                (d for d, size in enumerate(source.shape) if size > 1),
                key=lambda d: source.strides[d],
            )
            half = source.shape[widest] // 2
            for start, stop in ((0, half), (half, source.shape[widest])):
                starts = [start if d == widest else 0 for d in range(place.dim())]
                shape = [stop - start if d == widest else n for d, n in enumerate(source.shape)]
                part = place.narrow(widest, start, stop - start)
                self._fetch_span(peer, source.part(starts, shape), part)
            return
        buffer = torch.empty(source.span, dtype=torch.uint8)
        size = (source.span,)
        stretch = Region(source.address, size, (1,), 1)
        read(self._links[peer].pid, stretch, _region(buffer))
        steps = [stride // source.item_bytes for stride in source.strides]
        place.copy_(buffer.view(place.dtype).as_strided(source.shape, steps))


def join_host(
    me: int,
    gather_addresses: Callable[[Address], dict[int, Address]],
    gather_readable: Callable[[frozenset[int]], dict[int, frozenset[int]]],
    links: dict[int, HostLink],
    timeout_s: float,
    *,
    takes_part: bool = True,
) -> Direct | None:
    """Link this process with those of its host; every rank of a mesh calls this.

    Parameters
    ----------
    me
        The rank of this process.
    gather_addresses, gather_readable
        Hand a value to all ranks of the mesh, and return theirs.
    links
        Links of the job so far; new ones are added. Two ranks both have one, or neither has.
    timeout_s
        How long to wait for peers, here and in every step.
    takes_part
        Whether this process may be read. If not it says so, and gets no link.

    Returns
    -------
    Direct or None
        None where no other rank of the mesh can be read.

    Raises
    ------
    CommunicatorError
        If a rank has gone or does not come.
    """
    with Listener(takes_part=takes_part) as listener:
        addresses = gather_addresses(listener.address)
        near = listener.reachable(addresses)
        missing = {peer: addresses[peer] for peer in near if peer not in links}
        deadline = time.monotonic() + timeout_s
        links.update((link.peer, link) for link in listener.connect(me, missing, deadline))
        # Asked of all: what is known of a link made for another mesh is known to its two ends.
        found = gather_readable(readable([links[peer] for peer in near], addresses))
    # Only now may the content go that others have looked for: it lies in the listener.
    if not any(found.values()):
        return None
    return Direct({peer: links[peer] for peer in near}, found, timeout_s)


def _by_peer(role: Role) -> dict[int, list[Incoming]]:
    """Sort what comes in by peer; everyone starts with another peer."""
    order = {peer: at for at, peer in enumerate(role.members)}
    own = order.get(role.device, 0)
    found: dict[int, list[Incoming]] = {}
    others = [part for part in role.incoming if part.peer != role.device]
    for part in sorted(others, key=lambda p: (order[p.peer] - own) % len(order)):
        found.setdefault(part.peer, []).append(part)
    return found


def _region(tensor: torch.Tensor) -> Region:
    item = tensor.element_size()
    strides = tuple(stride * item for stride in tensor.stride())
    return Region(tensor.data_ptr(), tuple(tensor.shape), strides, item)


def _part_of(held: Region, part: Incoming) -> Region:
    starts = [lo - held_lo for (lo, _), (held_lo, _) in zip(part.box, part.held, strict=True)]
    return held.part(starts, box_shape(part.box))


def _note(what: object, shard: torch.Tensor) -> bytes:
    region = _region(shard)
    header = _HEADER.pack(_digest(what), region.address, region.item_bytes)
    numbers = (*region.shape, *region.strides)
    return header + struct.pack(f"<{len(numbers)}q", *numbers)


def _digest(what: object) -> int:
    return zlib.crc32(str(what).encode())
