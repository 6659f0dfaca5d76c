"""Several processes that write one output, as torchrun starts them.

They talk through the store of `torch.distributed`, which torchrun has set up (or the job's own):
each says what it has found or done, and waits for what the others say. Every process also says
that it is alive, so that one that was killed or has stopped ends the others soon. torch is
imported here only, and only where there are several processes.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from zlib import crc32

from shardspec.checkpoint.store import RemotePath
from shardspec.errors import CheckpointError, ShardSpecError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to write in all."""

TIMEOUT_S: Final = 30.0
"""How long a process may show no sign of life before the others give up."""
_ALIVE_EVERY_S: Final = 2.0
_MEET_S: Final = 600.0
"""How long the others may take to appear."""
_LISTEN_S: Final = 1.0
"""How often to ask, while writing, whether another process has failed."""
_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Member:
    """One of the processes."""

    rank: int
    size: int
    job: str = field(default="", compare=False, repr=False)
    """A word that tells the processes of one torchrun from those of another."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> "Member | None":
        """Return which of the processes of torchrun this is; None if it is alone."""
        if "TORCHELASTIC_RUN_ID" not in environment:
            return None
        try:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        except (KeyError, ValueError):
            return None
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
        job = "/".join(environment.get(name, "") for name in names)
        return cls(rank, size, f"{crc32(job.encode()):08x}") if size > 1 else None


class Workers:
    """The processes of a run, once all have met; one that is alone hears what it says itself."""

    def __init__(self, member: Member, token: str, store: "Store | None" = None) -> None:
        self.member = member
        self.token = token
        """A word that all processes of this run know, and no other run."""
        self._store = store
        self._said: dict[str, bytes] = {}
        """What one says that is alone."""
        self._seen = {rank: (b"", time.monotonic()) for rank in range(member.size)}
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._keep_beating, daemon=True)
        if store is not None:
            self._set("alive", str(time.time()))
            self._beating.start()

    def say(self, what: str, value: object) -> None:
        """Tell the others something, once."""
        self._set(what, json.dumps(value))

    def hear(self, what: str, rank: int = 0) -> Any:  # noqa: ANN401  # what JSON gives
        """Wait for what one of them says; raise if any has failed or shows no sign of life."""
        pause = _PAUSE_S
        while True:
            value = self._get(what, rank)
            if value is not None:
                return json.loads(value)
            self.listen()
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    def gather(self, what: str) -> list[Any]:
        """Return what every one says, in the order of their ranks; raise if any has failed."""
        return [self.hear(what, rank) for rank in range(self.member.size)]

    def said(self, what: str) -> list[Any]:
        """Return what was said so far, without waiting."""
        found = (self._get(what, rank) for rank in range(self.member.size))
        return [json.loads(value) for value in found if value is not None]

    def listen(self) -> None:
        """Raise a `CheckpointError` if one says that it has failed, or shows no sign of life."""
        failed = self._get("failed")
        if failed is not None:
            raise CheckpointError(str(json.loads(failed)))
        now = time.monotonic()
        for rank, (beat, since) in self._seen.items():
            found = self._get("alive", rank) or b""
            if found != beat:
                self._seen[rank] = found, now
            elif found != b"ended" and now - since > TIMEOUT_S:
                raise CheckpointError(
                    f"rank {rank} has shown no sign of life for {TIMEOUT_S:.0f} s; it was killed, "
                    "or its machine has stopped"
                )

    def has_failed(self) -> bool:
        """Return whether a process says that it has failed."""
        return self._get("failed") is not None

    def listener(self, progress: Progress | None) -> Progress | None:
        """Return what is told of progress, and stops it when another process has failed."""
        if self._store is None:
            return progress
        due = time.monotonic() + _LISTEN_S

        def listen(done: int, total: int) -> None:
            nonlocal due
            if time.monotonic() > due:
                self.listen()
                due = time.monotonic() + _LISTEN_S
            if progress is not None:
                progress(done, total)

        return listen

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tell the others when something goes wrong; all raise what went wrong first.

        That is the cause; that others find their files gone is not.
        """
        try:
            yield
        except BaseException as error:
            if self._store is None:
                raise
            rank = f"rank {self.member.rank}"
            said = f"{rank} was interrupted"
            if isinstance(error, ShardSpecError):
                said = str(error) if str(error).startswith("rank ") else f"{rank}: {error}"
            store, text = self._store, json.dumps(said)
            # Where nobody can be told any more, nobody waits.
            with suppress(ShardSpecError):
                said = json.loads(self._ask(lambda: store.compare_set("failed", "", text)))
            if not isinstance(error, ShardSpecError) or said == str(error):
                raise
            raise type(error)(said) from None

    def end(self) -> None:
        """Stop saying that this process is alive: it has ended.

        The first one waits until all have ended, as the store may go with it.
        """
        if self._store is None:
            return
        self._ended.set()
        self._beating.join(TIMEOUT_S)
        others = range(1, self.member.size) if self.member.rank == 0 else ()
        deadline = time.monotonic() + TIMEOUT_S
        with suppress(ShardSpecError):
            self._set("alive", "ended")
            while time.monotonic() < deadline and not all(
                self._get("alive", rank) == b"ended" for rank in others
            ):
                time.sleep(_PAUSE_S)

    def _keep_beating(self) -> None:
        while not self._ended.wait(_ALIVE_EVERY_S):
            # A store that has gone is noticed by who waits for something.
            with suppress(ShardSpecError):
                self._set("alive", str(time.time()))

    def _set(self, what: str, value: str) -> None:
        key, store = f"{what}/{self.member.rank}", self._store
        if store is None:
            self._said[key] = value.encode()
        else:
            self._ask(lambda: store.set(key, value))

    def _get(self, what: str, rank: int | None = None) -> bytes | None:
        key, store = what if rank is None else f"{what}/{rank}", self._store
        if store is None:
            return self._said.get(key)
        return self._ask(lambda: bytes(store.get(key)) if store.check([key]) else None)

    def _ask(self, act: Callable[[], T]) -> T:
        """Ask the store something; who holds it may have gone, or may have stopped."""
        answers: list[T] = []
        errors: list[RuntimeError] = []

        def ask() -> None:
            try:
                answers.append(act())
            except RuntimeError as error:  # torch names its errors so, or by children of that
                errors.append(error)

        # Calls of the store cannot be interrupted, and some have no timeout.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(TIMEOUT_S)
        if not answers:
            raise CheckpointError(
                "the processes cannot talk to each other any more: the one that holds their store "
                "has ended or stopped"
            ) from (errors[0] if errors else None)
        return answers[0]


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
    """Wait for all processes; they talk through keys that only they and this call use."""
    if "\0" in str(path):
        raise CheckpointError(f"{str(path)!r}: a file name cannot hold a NUL")
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
    try:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        else:
            waiting = timedelta(seconds=_MEET_S)
            store, _, _ = next(rendezvous("env://", member.rank, member.size, timeout=waiting))
        # Runs at one output follow each other in the same order in every process.
        name = f"shardspec/{crc32(os.fsencode(str(path))):08x}"
        number = store.add(f"{name}/runs/{member.rank}", 1)
        own = PrefixStore(f"{name}/{number}", store)
        if member.rank == 0:
            own.set("token", os.urandom(8).hex())
        own.wait(["token"], timedelta(seconds=_MEET_S))
        return Workers(member, own.get("token").decode(), own)
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path}: the {member.size} processes did not meet within {_MEET_S:.0f} s "
            f"({str(error).splitlines()[0]}); start all of them by torchrun"
        ) from None
