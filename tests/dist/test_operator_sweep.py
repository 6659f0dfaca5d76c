"""The operators of torch's own samples on sharded tensors, against one process."""

import pytest


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_no_operator_is_wrong_without_a_word():
    # Importing all of torch's samples takes a minute, so only this does.
    from tests.dist.operator_sweep import SILENT, cases, sweep, table

    found = sweep(2, cases(2, 2))
    print(table(found))
    silent = {
        f"{name} | {variant} | {condition}": finding.examples
        for (name, variant, condition), finding in found.items()
        if set(finding.outcomes) & set(SILENT)
    }
    assert len(found) > 1000
    assert not silent
