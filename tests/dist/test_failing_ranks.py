"""A rank that fails in its own way before anything moves: the others are told at once."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor as distributed_by_torch

from shardspec import (
    DeviceMesh,
    DTensor,
    LayoutConverter,
    distribute_module,
    distribute_tensor,
    load_sharded,
    plan_reshard,
    rand,
    redistribute,
    reshard_state,
    save_sharded,
)
from shardspec.checkpoint.job import load
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.comm import process_group
from shardspec.comm.process_group import ProcessGroupCommunicator
from tests.dist.processes import communicator_by, run_ranks, substitute

pytestmark = pytest.mark.dist

WORLD, BAD = 3, 1
MESH = DeviceMesh(range(WORLD))
SOON_S = 60.0
"""For a busy machine; the timeout of the process group is 30 minutes."""
WHOLE = torch.arange(12.0).reshape(6, 2)


class _Failing(dict[str, Any]):
    """A state dict that cannot be read."""

    def __init__(self, values: dict[str, Any], error: BaseException) -> None:
        super().__init__(values)
        self._error = error

    def items(self) -> NoReturn:
        raise self._error

    values = __getitem__ = items  # type: ignore[assignment]


class _NotSent:
    """A value that cannot be pickled."""

    def __reduce__(self) -> NoReturn:
        raise KeyError("not to be sent")


def _raises(error: BaseException) -> Callable[..., NoReturn]:
    def act(*_: object, **__: object) -> NoReturn:
        raise error

    return act


def _cases(rank: int, place: Path) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield what a rank does, with a name, and what is said of rank 1."""
    tensor = DTensor(WHOLE, MESH, "[S0,R]")
    state: dict[str, Any] = {"w": tensor, "step": (1, 2)}
    rules = {"w": "[R,S0]"}
    plan, good, bad = plan_reshard(state, (MESH, rules)), place / "good", rank == BAD
    save_sharded(state, good)
    from_files = plan_reshard(good, (MESH, rules))
    by_torch = distributed_by_torch(WHOLE, MESH.to_torch(), [Shard(0)])
    out = {"w": DTensor(torch.zeros(6, 2), MESH, "[R,S0]")}

    def failing(error: BaseException, values: dict[str, Any] = state) -> dict[str, Any]:
        return _Failing(values, error) if bad else values

    def patched(where: Any, name: str, act: Callable[[], object], error: BaseException) -> Any:
        if not bad:
            return act()
        with mock.patch.object(where, name, _raises(error)):
            return act()

    # The same objects are raised again and again.
    mine, stop, room = KeyError("mine"), KeyboardInterrupt(), MemoryError("no room")
    yield "run", "KeyError: 'mine'", lambda: plan.run(failing(mine))
    yield "run, interrupted", "KeyboardInterrupt", lambda: plan.run(failing(stop))
    yield "run, results", "no room", lambda: patched(torch, "zeros", lambda: plan.run(state), room)
    sent = {**state, "step": _NotSent() if bad else (1, 2)}
    yield "run, values", "was a plain value when", lambda: plan.run(sent)
    yield "reshard_state", "'mine'", lambda: reshard_state(failing(mine), rules)
    wrong = _Failing(rules, TypeError("a rule")) if bad else rules
    yield "reshard_state, rules", "TypeError: a rule", lambda: reshard_state(state, wrong)
    act = lambda: tensor.redistribute("[R,S0]")  # noqa: E731
    yield "redistribute", "no room", lambda: patched(LayoutConverter, "plan", act, room)
    yield "another spec", "axis 7", lambda: tensor.redistribute("[R,S7]" if bad else "[R,S0]")
    again = lambda: redistribute(by_torch, [Shard(1)])  # noqa: E731
    yield "torch's", "MemoryError: no room", lambda: patched(LayoutConverter, "plan", again, room)
    given: Any = [1] if bad else WHOLE
    yield "distribute", "got a list", lambda: distribute_tensor(given, MESH, "[S0,R]")
    both = [Shard(0)] if bad else None
    act4 = lambda: distribute_tensor(WHOLE, MESH, "[S0,R]", placements=both)  # noqa: E731
    yield "distribute, both", "give one of the two", act4
    odd: Any = 3 if bad else MESH
    yield "odd mesh", "is a int", lambda: tensor.redistribute("[R,S0]", device_mesh=odd)
    yield "torch's, odd mesh", "is a int", lambda: redistribute(by_torch, [Shard(1)], odd)
    ends = LayoutConverter().plan(tensor.layout.with_spec("[R,S0]" if bad else "[S0,R]"), "[R,R]")
    yield "convert", "the plan starts from", lambda: tensor.convert(ends)
    dtype = torch.int64 if bad else torch.float32
    yield "rand", "made in int64", lambda: rand(6, device_mesh=MESH, dtype=dtype)
    rule = {"none" if bad else "weight": "[S0,R]"}
    layer = torch.nn.Linear(2, 6)
    yield "module", "'none'", lambda: distribute_module(layer, MESH, rule)
    yield "from_local", "got a list", lambda: DTensor.from_local(given, MESH, "[R,R|P0]")
    there = place / "there"
    yield "save", "'mine'", lambda: save_sharded(failing(mine), there)
    yield "save, interrupted", "KeyboardInterrupt", lambda: save_sharded(failing(stop), there)
    act2 = lambda: save_sharded(state, there)  # noqa: E731
    yield "save, writing", "'mine'", lambda: patched(LocalPath, "write", act2, mine)
    yield "save, stopped", "Keyboard", lambda: patched(LocalPath, "write", act2, stop)
    yield "load", "no such", lambda: load_sharded(place / "none" if bad else good, MESH)
    yield "load, rules", "TypeError: a rule", lambda: load_sharded(good, MESH, wrong)
    yield "load, into", "'mine'", lambda: load_sharded(good, into=failing(mine, out))
    act3 = lambda: load_sharded(good, MESH)  # noqa: E731
    yield "load, stopped", "KeyboardInterrupt", lambda: patched(load, "_fill", act3, stop)
    yield "plan of files", "'mine'", lambda: from_files.run({}, failing(mine, out))
    ones = torch.ones(6, 2, requires_grad=True)
    loss = DTensor(ones, MESH, "[S0,R]").redistribute("[R,S0]").to_local().sum()
    back = lambda: patched(process_group, "run_transfers", loss.backward, room)  # noqa: E731
    if ProcessGroupCommunicator.of(MESH).transport_name == "memory":
        # Last: a rank that fails within a step leaves connections closed.
        yield "a step back", "no room", back


def _fail(rank: int, place: Path, reads_peers: bool) -> list[str]:
    torch.set_num_threads(1)
    substitute(communicator_by(MESH, reads_peers=reads_peers))
    wrong: list[str] = []
    for name, words, act in _cases(rank, place / str(reads_peers)):
        start, said = time.monotonic(), "nothing"
        try:
            act()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        if words not in said or (rank != BAD and "rank 1" not in said):
            wrong.append(f"{name}: {said}")
        if time.monotonic() > start + SOON_S:
            wrong.append(f"{name}: {time.monotonic() - start:.0f} s")
        if name == "a step back":
            break
        # The job goes on.
        found = DTensor(WHOLE, MESH, "[S0,R]").redistribute("[R,R]").to_local()
        if not torch.equal(found, WHOLE):
            wrong.append(f"after {name}: {found}")
    left = [path.name for path in place.glob("*/there/shard-*")]
    return [*wrong, *left]


@pytest.mark.parametrize("reads_peers", [True, False], ids=["reading", "messages"])
def test_the_others_are_told_at_once(tmp_path, reads_peers):
    assert run_ranks(WORLD, tmp_path, _fail, tmp_path, reads_peers) == [[]] * WORLD
