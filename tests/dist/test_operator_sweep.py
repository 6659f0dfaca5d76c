"""The operators of torch's own samples on sharded tensors, against one process."""

import pytest

from shardspec import DeviceMesh


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("shape", "simulated"), [((2,), False), ((2, 3), True)])
def test_no_operator_is_wrong_without_a_word(shape, simulated):
    # Importing all of torch's samples takes a minute, so only this does.
    from tests.dist.operator_cases import cases
    from tests.dist.operator_sweep import SILENT, sweep, table

    mesh = DeviceMesh(range(6 if simulated else 2), shape)
    found = sweep(mesh, cases(mesh, 1), simulated=simulated)
    print(table(found))
    silent = {
        f"{name} | {variant} | {condition}": finding.examples
        for (name, variant, condition), finding in found.items()
        if set(finding.outcomes) & set(SILENT)
    }
    assert len(found) > 1000
    assert not silent
