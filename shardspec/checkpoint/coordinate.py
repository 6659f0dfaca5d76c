"""Several processes that write one output, as torchrun starts them.

They exchange values through the store of `torch.distributed`: torchrun's, or the job's own. Every
process sends heartbeats, so that one that was killed or stopped soon ends the others. torch is
imported here only, and only where there are several processes.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar
from zlib import crc32

from shardspec.checkpoint.store import RemotePath
from shardspec.errors import CheckpointError, ShardSpecError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to write in all."""

TIMEOUT_S: Final = 30.0
"""How long a process may send no heartbeat, or the store may not answer."""
_HEARTBEAT_S: Final = 2.0
_RENDEZVOUS_S: Final = 600.0
_CLEANUP_S: Final = 10.0
"""How long a process waits for the others to remove what they have written."""
_CHECK_S: Final = 0.5
"""How often a process checks on the others."""
_POLL_S: Final = 0.02


class Member(NamedTuple):
    """One of the processes."""

    rank: int
    size: int

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> "Member | None":
        """Return which of the processes of torchrun this is; None if it is the only one."""
        rank, size = (environment.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if "TORCHELASTIC_RUN_ID" not in environment or not (rank.isdecimal() and size.isdecimal()):
            return None
        return cls(int(rank), int(size)) if int(size) > 1 else None


class Workers:
    """The processes of a run; without a store there is one. What they exchange is sent as JSON."""

    def __init__(self, member: Member, token: str, store: "Store | None" = None) -> None:
        self.member = member
        self.token = token
        """A random text that all processes of this run have, and no other run."""
        self._store = store
        self._heartbeats: dict[int, tuple[object, float]] = {}
        """Per rank the last heartbeat, and when it was first seen."""
        self._checked = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, daemon=True)
        if store is not None:
            self._thread.start()

    def broadcast(self, key: str, value: object = None) -> Any:  # noqa: ANN401  # what JSON gives
        """Return the value of the first process, once it is there."""
        if self.member.rank:
            return self._wait(key)
        self._set(key, value)
        return value

    def gather(self, key: str, value: object) -> list[Any]:
        """Return the values of all processes by rank; to the first process only."""
        if self._store is None:
            return [value]
        self._set(f"{key}/{self.member.rank}", value)
        ranks = range(0 if self.member.rank else self.member.size)
        return [self._wait(f"{key}/{rank}") for rank in ranks]

    def check(self) -> None:
        """Raise a `CheckpointError` if another process has failed, or sends no heartbeats any more.

        Called often; it asks the store now and then.
        """
        now = time.monotonic()
        if self._store is None or now < self._checked + _CHECK_S:
            return
        if (failed := self._get("failed")) is not None:
            raise CheckpointError(failed)
        for rank in range(self.member.size):
            beat = self._get(f"heartbeat/{rank}")
            last, since = self._heartbeats.setdefault(rank, (beat, now))
            if beat != last:
                self._heartbeats[rank] = beat, now
            elif beat != "ended" and now - since > TIMEOUT_S:
                raise CheckpointError(
                    f"rank {rank} has sent no heartbeat for {TIMEOUT_S:.0f} s; it was killed, "
                    "or its machine has stopped"
                )
        self._checked = time.monotonic()

    def has_failed(self) -> bool:
        """Return whether any process has failed."""
        return self._get("failed") is not None

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tell the other processes of an error; all raise the first one, which is the cause."""
        try:
            yield
        except BaseException as error:
            if self._store is None:
                raise
            text = str(error) if isinstance(error, ShardSpecError) else "was interrupted"
            if not text.startswith("rank "):
                text = f"rank {self.member.rank}: {text}"
            said = json.dumps(text)
            # If the store is gone, nobody is waiting for it.
            with suppress(ShardSpecError):
                first = self._call(lambda store: store.compare_set("failed", "", said))
                text = json.loads(first or said)
            if not isinstance(error, ShardSpecError) or text == str(error):
                raise
            raise type(error)(text) from None

    def end(self) -> None:
        """Wait until all processes have ended: torchrun kills the rest once one exits in error."""
        if self._store is None:
            return
        self._ended.set()
        self._thread.join(TIMEOUT_S)
        deadline = time.monotonic() + _CLEANUP_S
        with suppress(ShardSpecError):
            keys = [f"heartbeat/{rank}" for rank in range(self.member.size)]
            self._set(keys[self.member.rank], "ended")
            while any(self._get(k) != "ended" for k in keys) and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def _send_heartbeats(self) -> None:
        # The main thread notices by itself if the store is gone.
        with suppress(ShardSpecError):
            ended = False
            while not ended:
                self._set(f"heartbeat/{self.member.rank}", time.time())
                ended = self._ended.wait(_HEARTBEAT_S)

    def _wait(self, key: str) -> Any:  # noqa: ANN401  # what JSON gives
        while (value := self._get(key)) is None:
            self.check()
            time.sleep(_POLL_S)
        return value

    def _set(self, key: str, value: object) -> None:
        self._call(lambda store: store.set(key, json.dumps(value)))

    def _get(self, key: str) -> Any:  # noqa: ANN401  # what JSON gives
        """Return a value; None as long as there is none."""
        found = self._call(lambda store: bytes(store.get(key)) if store.check([key]) else b"null")
        return None if found is None else json.loads(found)

    def _call(self, act: "Callable[[Store], T]") -> T | None:
        """Call the store in a thread: calls cannot be interrupted, and some have no timeout."""
        if (store := self._store) is None:
            return None
        answer: list[T] = []

        def call() -> None:
            with suppress(RuntimeError):  # the class of torch's errors
                answer.append(act(store))

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(TIMEOUT_S)
        if not answer:
            raise CheckpointError(
                "the processes have lost their connection: the one that holds the store has ended "
                "or stopped"
            )
        return answer[0]


@contextmanager
def together(member: Member | None, path: Path) -> Iterator[Workers]:
    """Meet the other processes, if there are any; what fails in one fails in all.

    `path` is the output, the same for all. Raises a `CheckpointError` in every process if one of
    them fails, is killed, or does not appear in time.
    """
    workers = Workers(Member(0, 1), os.urandom(8).hex()) if member is None else _meet(member, path)
    try:
        with workers.failing_together():
            yield workers
    finally:
        workers.end()


def _meet(member: Member, path: Path) -> Workers:
    """Wait for all processes; their keys are those of this run at this output."""
    if isinstance(path, RemotePath):
        if len(path.parts) < 3:
            raise CheckpointError(f"{path}: is a bucket; name a file or a directory in it")
        if path.parts[0] == "memory:":
            raise CheckpointError(
                f"{path}: memory:// is the memory of one process, and others do not see it; start "
                "one process"
            )
    try:
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous
    except ImportError:
        raise CheckpointError(
            "several processes write one output through torch.distributed, and torch is missing; "
            "install torch, or start one process"
        ) from None
    timeout = timedelta(seconds=_RENDEZVOUS_S)
    try:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        else:
            store, _, _ = next(rendezvous("env://", member.rank, member.size, timeout=timeout))
        # Every process makes the same runs at one output, in the same order.
        name = f"shardspec/{crc32(os.fsencode(str(path))):08x}"
        number = store.add(f"{name}/runs/{member.rank}", 1)
        own = PrefixStore(f"{name}/{number}", store)
        if member.rank == 0:
            own.set("token", os.urandom(8).hex())
        own.wait(["token"], timeout)
        return Workers(member, own.get("token").decode(), own)
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path}: the {member.size} processes did not meet within {_RENDEZVOUS_S:.0f} s "
            f"({str(error).splitlines()[0]}); start all of them by torchrun"
        ) from None
