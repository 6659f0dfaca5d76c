"""Traces of conversions: what was done, what was measured, what was predicted."""

import logging
import subprocess
import sys

import pytest
import torch

import shardspec
from shardspec import DeviceMesh, DTensor, Layout, LayoutConverter, ShardSpecError
from shardspec.comm.steps import AllGather, AllToAll, Exchange, ReduceScatter
from shardspec.tracing import log_from_environment

MESH = DeviceMesh(range(6), (2, 3), None, (1e-6,) * 2, (1e-11,) * 2, axis_names=("dp", "tp"))

OTHER = DeviceMesh(range(6, 9), (3,), mesh_alpha=(1e-6,), mesh_beta=(2e-11,))


def halves():
    return DTensor(torch.arange(72.0).reshape(6, 12), MESH, "[S(dp),R]")


def test_every_step_is_recorded_with_what_the_plan_says():
    tensor = halves()
    plan = LayoutConverter().plan(tensor.layout, "[R,S(tp,dp)]")
    with shardspec.trace() as trace:
        tensor.convert(plan)
    assert [record.step for record in trace.records] == list(plan.steps)
    assert [record.after for record in trace.records] == list(plan.layouts[1:])
    assert [record.num_bytes for record in trace.records] == list(plan.step_bytes)
    assert [r.predicted_seconds for r in trace.records] == list(plan.step_seconds)
    assert all(record.seconds > 0 for record in trace.records)
    assert all(record.devices == MESH.ids for record in trace.records)
    assert not any(record.backward for record in trace.records)


def test_nothing_is_recorded_outside_the_block():
    with shardspec.trace() as trace:
        pass
    halves().redistribute("[R,R]")
    assert trace.records == []
    assert str(trace) == "no step was executed"


def test_blocks_may_be_nested():
    with shardspec.trace() as outer:
        halves().redistribute("[R,R]")
        with shardspec.trace() as inner:
            halves().redistribute("[R,S(dp)]")
    assert [type(record.step) for record in inner.records] == [AllToAll]
    assert [type(record.step) for record in outer.records] == [AllGather, AllToAll]


def test_gradients_are_recorded_as_such():
    tensor = DTensor(torch.ones(6, 12, requires_grad=True), MESH, "[S(dp),R]")
    with shardspec.trace() as trace:
        tensor.redistribute("[R,S(dp)]").shards[0].sum().backward()
    forward, back = trace.records
    assert (forward.backward, back.backward) == (False, True)
    assert (back.before, back.after) == (forward.after, forward.before)
    assert back.num_bytes == forward.num_bytes
    assert back.predicted_seconds == pytest.approx(forward.predicted_seconds)


def test_gradient_of_a_pending_sum_is_priced_without_the_reduction():
    ones = {device: torch.ones(600, 12, requires_grad=True) for device in range(6)}
    tensor = DTensor.from_local(ones, DeviceMesh(range(6), (6,)), "[R,R|P0]")
    with shardspec.trace() as trace:
        tensor.redistribute("[S0,R]").shards[0].sum().backward()
    kinds = [type(record.step) for record in trace.records]
    assert kinds == [ReduceScatter, AllGather]
    assert trace.records[1].num_bytes == 500 * 12 * 4
    assert trace.records[1].after.spec == tensor.layout.spec


def test_moves_to_other_meshes_are_recorded():
    with shardspec.trace() as trace:
        halves().redistribute("[S0,R]", device_mesh=OTHER)
    (record,) = trace.records
    assert record.step == Exchange(())
    assert record.num_bytes == 2 * 12 * 4
    assert record.devices == tuple(range(9))


def test_gradients_come_back_from_another_mesh_by_the_links_of_both():
    """The mesh with more axes has the links; the slow one is crossed by nothing that need not."""
    line = DeviceMesh(range(4), (4,), mesh_alpha=(1e-5,), mesh_beta=(2e-11,))
    grid = DeviceMesh(range(4), (2, 2), mesh_alpha=(2e-5, 1e-6), mesh_beta=(4e-11, 1e-11))
    tensor = DTensor(torch.ones(8, 8, requires_grad=True), line, "[S0,R]")
    moved = tensor.redistribute("[S1,S0]", device_mesh=grid)
    with shardspec.trace() as trace:
        torch.cat(list(moved.shards.values())).sum().backward()
    (record,) = [record for record in trace.records if record.before.mesh != record.after.mesh]
    assert record.backward
    assert record.step == Exchange((), apart=(0,))
    assert record.predicted_seconds > 0
    for device in range(4):
        grad = tensor.shards[device].grad
        assert grad is not None
        assert torch.equal(grad, torch.ones(2, 8))


def test_a_trace_prints_a_line_a_step():
    with shardspec.trace() as trace:
        halves().redistribute("[R,S(dp)]")
        halves().redistribute("[R,R]")
    first, second = str(trace).splitlines()
    assert first.startswith("all-to-all dim 0 → 1, [S(dp),R] → [R,S(dp)] of [6, 12] float32, 72 B")
    assert second.startswith("all-gather dim 0, [S(dp),R] → [R,R] of [6, 12] float32, 144 B")


def test_steps_are_ranges_of_the_profiler():
    with torch.profiler.profile() as profiler:
        halves().redistribute("[R,S(dp)]")
    names = [event.key for event in profiler.key_averages()]
    assert "shardspec: all-to-all dim 0 → 1" in names


def test_log_has_a_line_a_step(caplog):
    with caplog.at_level(logging.DEBUG, logger="shardspec"):
        halves().redistribute("[R,S(dp)]")
    (line,) = caplog.messages
    assert line.startswith(
        "rank 0,1,2,3,…: all-to-all dim 0 → 1, [S(dp),R] → [R,S(dp)] of [6, 12] float32, 72 B in "
    )
    assert len(caplog.records) == 1


def test_environment_turns_the_log_on():
    code = (
        "import torch\n"
        "from shardspec import DeviceMesh, DTensor\n"
        "DTensor(torch.ones(4), DeviceMesh([0, 1], (2,)), '[S0]').redistribute('[R]')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": "", "SHARDSPEC_LOG": "debug"},
        check=True,
    )
    assert done.stderr.startswith(
        "shardspec DEBUG rank 0,1: all-gather dim 0, [S0] → [R] of [4] float32, 8 B in "
    )
    assert len(done.stderr.splitlines()) == 1


def test_environment_with_an_unknown_level(monkeypatch):
    monkeypatch.setenv("SHARDSPEC_LOG", "loud")
    with pytest.raises(ShardSpecError, match="SHARDSPEC_LOG=loud: use one of debug, info, warning"):
        log_from_environment()


def test_results_are_the_same_while_traced():
    tensor = halves()
    with shardspec.trace():
        traced = tensor.redistribute("[R,S(tp)]")
    assert traced.layout == Layout(MESH, "[R,S(tp)]", (6, 12), "float32")
    assert torch.equal(traced.to_global(), tensor.to_global())
