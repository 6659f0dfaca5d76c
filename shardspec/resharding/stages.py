"""What goes from device to device at once when a state dict changes its layouts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardspec.resharding.hosts import Hosts
from shardspec.resharding.transfers import Ints, Kind, Senders, balanced

__all__ = ["Stage", "Traffic"]


class Traffic(NamedTuple):
    """Messages between pairs of devices, in ascending order of the pairs."""

    sender: Ints
    receiver: Ints
    num_bytes: Ints


@dataclass(frozen=True, eq=False)
class Stage:
    """Copies that need nothing of each other; a stage starts when the one before has ended."""

    kinds: tuple[Kind, ...]
    """What is wanted, for every pair of layouts."""
    counts: tuple[int, ...]
    """How many tensors want it."""
    item_bytes: tuple[int, ...]
    """Bytes of an element on its way."""

    @cached_property
    def senders(self) -> Senders:
        """Which of the replicas sends what."""
        return balanced(self.kinds, self.counts, self.item_bytes)

    @cached_property
    def sent(self) -> dict[int, int]:
        """Bytes that devices send."""
        found: dict[int, int] = {}
        for holders, ends in self.senders.ends.items():
            for device, num_bytes in zip(holders, np.diff(ends, prepend=0).tolist(), strict=True):
                found[device] = found.get(device, 0) + num_bytes
        return found

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes that devices receive: what they want and lack."""
        found: dict[int, int] = {}
        for kind, width, count in zip(self.kinds, self.item_bytes, self.counts, strict=True):
            devices, index = np.unique(kind.receiver, return_inverse=True)
            sums = np.bincount(index, kind.elements * (width * count), len(devices))
            for device, num_bytes in zip(devices.tolist(), sums.tolist(), strict=True):
                found[device] = found.get(device, 0) + round(num_bytes)
        return found

    @cached_property
    def traffic(self) -> Traffic:
        """Who sends to whom, and how much; of what replicas share up to a row of a tensor."""
        parts: list[tuple[Ints, Ints, Ints]] = []
        for kind, width, count, starts in zip(
            self.kinds, self.item_bytes, self.counts, self.senders.starts, strict=True
        ):
            bounds = np.searchsorted(kind.at, np.arange(len(kind.holders) + 1)).tolist()
            num_bytes = kind.elements * (width * count)
            for holders, first, last in zip(kind.holders, bounds[:-1], bounds[1:], strict=True):
                if first == last:
                    continue
                receiver, size = kind.receiver[first:last], num_bytes[first:last]
                if len(holders) == 1:
                    parts.append((np.full_like(receiver, holders[0]), receiver, size))
                    continue
                start = starts[first:last]
                begin = 0
                for holder, end in zip(holders, self.senders.ends[holders].tolist(), strict=True):
                    share = np.minimum(start + size, end) - np.maximum(start, begin)
                    some = share > 0
                    parts.append((np.full(some.sum(), holder), receiver[some], share[some]))
                    begin = end
        if not parts:
            nothing: Ints = np.zeros(0, dtype=np.int64)
            return Traffic(nothing, nothing, nothing)
        sender, receiver, size = (np.concatenate(column) for column in zip(*parts, strict=True))
        row = int(max(sender.max(), receiver.max())) + 1
        pairs, index = np.unique(sender * row + receiver, return_inverse=True)
        # Whole numbers, as sums of floating-point ones would round.
        total = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(total, index, size)
        return Traffic(pairs // row, pairs % row, total)

    @property
    def most_peers(self) -> int:
        """To how many devices one sends at most, or from how many it receives."""
        ends = self.traffic.sender, self.traffic.receiver
        return max(
            (int(np.unique(e, return_counts=True)[1].max()) for e in ends if len(e)), default=0
        )

    def bytes_between(self, host: Mapping[int, int]) -> int:
        """Return the bytes that go from one host to another."""
        return int(self.traffic.num_bytes[self._crosses(host)].sum())

    def seconds(
        self, between: tuple[float, float], hosts: Hosts | None, files: frozenset[int]
    ) -> float:
        """Return modelled seconds: those of the device that sends or receives longest.

        Parameters
        ----------
        between
            Latency of a message, and seconds a byte, where all links are alike.
        hosts
            Where they are not.
        files
            Numbers that are no devices.
        """
        traffic = self.traffic
        latency, per_byte = between if hosts is None else hosts.between
        seconds = latency + per_byte * traffic.num_bytes
        if hosts is not None:
            latency, per_byte = hosts.inside
            inside = latency + per_byte * traffic.num_bytes
            seconds = np.where(self._crosses(hosts.number), seconds, inside)
        longest = 0.0
        for ends in (traffic.sender, traffic.receiver):
            devices, index = np.unique(ends, return_inverse=True)
            sums = np.bincount(index, seconds, len(devices))
            longest = max(longest, *sums[~np.isin(devices, list(files))].tolist(), 0.0)
        return longest

    def _crosses(self, host: Mapping[int, int]) -> npt.NDArray[np.bool_]:
        """Return for each pair whether its messages leave the host."""
        devices, index = np.unique(np.concatenate(self.traffic[:2]), return_inverse=True)
        hosts = np.array([host.get(device, -1) for device in devices.tolist()])[index]
        half = len(self.traffic.sender)
        return np.asarray(hosts[:half] != hosts[half:])
