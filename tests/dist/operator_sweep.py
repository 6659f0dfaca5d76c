"""Every operator of torch's OpInfo samples on sharded tensors, beside the same in one process.

``python -m tests.dist.operator_sweep [--mesh 2x2] [--simulated] [NAME …]`` prints a table: of each
operator how many calls were right, refused, and wrong. A case is one sample under one scheme of
layouts, and has up to five variants: its value, its gradient, in place, ``out=``, and a write
through the view it returns. Ranks are processes, or one process simulates them.
"""

import argparse
import multiprocessing as mp
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import shardspec
from shardspec import DeviceMesh, DTensor, Layout, ShardSpecError
from tests.conversions import index_of
from tests.dist.operator_cases import Case, cases, samples_of, spec_of_tensor, variants

__all__ = ["REFUSED", "SILENT", "Finding", "sweep", "table"]

SILENT: Final = ("WRONG", "WAITS", "RANKS DIFFER", "BREAKS")
"""Outcomes that nobody wants."""
REFUSED: Final = ("refused by torch", "refused by us")
_NO_RULE: Final = "has no rule for it on DTensors, on any layout"
_WAIT_S: Final = 60.0


@dataclass
class Finding:
    """What became of the cases of an operator under a condition."""

    outcomes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


def _whole(sample: Any) -> dict[str, Any]:
    """Do a case in one process; variants that are not possible there are left out."""
    found: dict[str, Any] = {}
    info, case = sample
    for name, call in variants(info, case, lambda tensor, _: tensor):
        try:
            result = call()
        except Exception:
            if name == "value":
                return {}
            continue
        if name == "through view":
            base, part = result
            if not (torch.is_tensor(base) and part._is_view() and part._base is base):
                continue
        found[name] = tree_leaves(result)
    return found


def _packed(leaf: Any, rank: int) -> Any:
    if isinstance(leaf, DTensor):
        layout, local = leaf.layout, leaf.to_local(rank).detach()
        pending = {int(partial.axis): partial.op for partial in layout.spec.partials}
        places = enumerate(layout.mesh.coordinates(rank))
        others = tuple(at for axis, at in places if axis not in pending)
        box = [(s.start, s.stop) for s in index_of(layout, rank)]
        array = local.resolve_conj().resolve_neg().contiguous().numpy()
        return (
            "ours",
            layout.global_shape,
            box,
            (sorted(set(pending.values())), others),
            str(layout.spec),
            array,
        )
    if isinstance(leaf, torch.Tensor):
        return ("plain", leaf.detach().resolve_conj().resolve_neg().contiguous().numpy())
    return ("value", leaf)


def _done(case: Case, variant: str, sample: Any, mesh: DeviceMesh, ranks: Sequence[int]) -> Any:
    """Do a variant of a case on the shards of some ranks; return the answer of each."""
    devices = len(mesh.ids)

    def made(tensor: torch.Tensor, place: int) -> Any:
        spec = spec_of_tensor(tensor, place, case.scheme, mesh)
        if "P" not in spec:
            return DTensor(tensor, mesh, spec)
        layout = Layout(mesh, spec, tensor.shape, tensor.dtype)
        addends = {}
        for rank in ranks:
            # Addends that differ, of which none is zero.
            at, addends_in_all = mesh.coordinates(rank)[0], mesh.shape[0]
            addend = tensor.detach()[index_of(layout, rank)] * ((1 + 2 * at) / addends_in_all**2)
            addends[rank] = addend.clone().requires_grad_(tensor.requires_grad)
        return DTensor.from_local(addends, mesh, spec, global_shape=tensor.shape)

    calls = dict(variants(op_db[case.op], sample, made))
    try:
        leaves = tree_leaves(calls[variant]())
        return [("done", [_packed(leaf, rank) for leaf in leaves]) for rank in ranks]
    except ShardSpecError as error:
        return [("refused by us", str(error)[:300])] * devices
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        is_ours = Path(where).is_relative_to(Path(shardspec.__file__).parent)
        what = "BREAKS" if is_ours else "refused by torch"
        return [(what, f"{type(error).__name__}: {error}"[:300])] * devices


def _rank(rank: int, mesh: DeviceMesh, rendezvous: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=len(mesh.ids),
        timeout=timedelta(seconds=4 * _WAIT_S),
    )
    mesh = DeviceMesh(mesh.ids, mesh.shape)
    cached: tuple[int, list[Any]] = (-1, [])
    while True:
        task = pipe.recv()
        if task is None:
            os._exit(0)
        case, variant = task
        if cached[0] != case.op:
            cached = (case.op, samples_of(case.op))
        pipe.send(_done(case, variant, cached[1][case.sample], mesh, [rank])[0])


class _Simulation:
    """All ranks in this process."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def ask(self, case: Case, variant: str, sample: Any) -> list[tuple[str, Any]]:
        """Return every rank's answer."""
        answers: list[tuple[str, Any]] = _done(case, variant, sample, self.mesh, self.mesh.ids)
        return answers

    def end(self) -> None:
        pass


class _Job:
    """So many ranks, which do cases in step."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = mp.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in mesh.ids:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, mesh, f"{self.folder.name}/r", theirs), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, case: Case, variant: str, _: Any) -> list[tuple[str, Any]] | None:
        """Return every rank's answer; None if a rank waits for another for ever, or has died."""
        for pipe in self.pipes:
            pipe.send((case, variant))
        answers: list[Any] = [None] * len(self.pipes)
        end = time.monotonic() + _WAIT_S
        while None in answers:
            waiting = [p for p, a in zip(self.pipes, answers, strict=True) if a is None]
            ready = mp.connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                return None
            for place, pipe in enumerate(self.pipes):
                try:
                    if pipe in ready:
                        answers[place] = pipe.recv()
                except EOFError:
                    return None
        return answers

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


_REDUCE: Final[dict[str, Any]] = {
    "sum": np.sum,
    "avg": np.mean,
    "min": np.min,
    "max": np.max,
    "prod": np.prod,
}


def _differs(wanted: Any, packed: list[Any]) -> str:
    """Say how what the ranks hold differs from one process's result; empty where it does not."""
    kind = packed[0][0]
    if wanted is None or not isinstance(wanted, torch.Tensor):
        if kind == "ours" and wanted is None:
            return "a gradient for none" if any(np.any(p[-1]) for p in packed) else ""
        got = [p[1].item() if kind == "plain" and p[1].size == 1 else p[-1] for p in packed]
        return "" if all(_same(np.asarray(wanted), np.asarray(g)) for g in got) else f"{got}"
    whole = wanted.detach().resolve_conj().resolve_neg().contiguous().numpy()
    if kind == "value":
        return "" if packed[0][1] is None and not whole.any() else f"{packed[0][1]} for a tensor"
    if kind == "plain":
        return "" if all(_same(whole, p[1]) for p in packed) else "plain value"
    _, shape, _, (ops, _), spec, _ = packed[0]
    if tuple(shape) != whole.shape:
        return f"shape {shape} for {whole.shape}"
    if packed[0][-1].dtype != whole.dtype:
        return f"dtype {packed[0][-1].dtype} for {whole.dtype}"
    for rank, (_, _, box, _, _, local) in enumerate(packed):
        if local.shape != tuple(hi - lo for lo, hi in box):
            return f"rank {rank} has {local.shape} under {spec} of {shape}"
    # Addends are those of ranks that differ in nothing but the axes of the pending reduction.
    for others in {others for _, _, _, (_, others), _, _ in packed}:
        of_box = [p for p in packed if p[3][1] == others]
        addends = np.stack([p[-1] for p in of_box])
        part = _REDUCE[ops[0]](addends, 0).astype(whole.dtype) if ops else addends[0]
        if not _same(whole[tuple(slice(lo, hi) for lo, hi in of_box[0][2])], part):
            return f"value {spec}"
    return ""


def _same(a: Any, b: Any) -> bool:
    try:
        return a.shape == b.shape and np.allclose(a, b, rtol=1e-6, atol=1e-8, equal_nan=True)
    except TypeError:
        return bool(np.all(a == b))


def _outcome(wanted: list[Any], answers: list[tuple[str, Any]] | None) -> tuple[str, str]:
    if answers is None:
        return "WAITS", "a rank waits for another, or died"
    kinds = {kind for kind, _ in answers}
    if len(kinds) > 1:
        return "RANKS DIFFER", "; ".join(f"{k}: {str(v)[:120]}" for k, v in answers)
    if kinds != {"done"}:
        texts = {text for _, text in answers}
        return kinds.pop(), sorted(texts)[0]
    if len({len(leaves) for _, leaves in answers} | {len(wanted)}) > 1:
        return "WRONG", "another number of results"
    for place, whole in enumerate(wanted):
        why = _differs(whole, [leaves[place] for _, leaves in answers])
        if why:
            return "WRONG", f"result {place}: {why}"
    return "right", ""


def sweep(
    mesh: DeviceMesh,
    chosen: Iterable[Case],
    report: Callable[[str], object] = print,
    *,
    simulated: bool = False,
) -> dict[tuple[str, str, str], Finding]:
    """Run cases; return what became of them by operator, variant and condition."""
    begin = _Simulation if simulated else _Job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[tuple[str, str, str], Finding] = defaultdict(Finding)
    job: Any = begin(mesh)
    try:
        for op, of_op in groupby(chosen, lambda case: case.op):
            samples, tried = samples_of(op), 0
            for case in of_op:
                for variant, wanted in _whole((op_db[op], samples[case.sample])).items():
                    answers = job.ask(case, variant, samples[case.sample])
                    if answers is None:
                        job.end()
                        job = begin(mesh)
                    what, example = _outcome(wanted, answers)
                    finding = found[case.name, variant, case.condition]
                    finding.outcomes[what] += 1
                    finding.examples.setdefault(what, f"{case.scheme} #{case.sample}: {example}")
                    tried += 1
                    if what in SILENT:
                        report(
                            f"{what} | {case.name} | {variant} | {case.condition} | "
                            f"{case.scheme} #{case.sample} | {example}"
                        )
                if tried and all(
                    set(f.outcomes) == {"refused by us"} and _NO_RULE in f.examples["refused by us"]
                    for (name, _, _), f in found.items()
                    if name == case.name
                ):
                    break
    finally:
        job.end()
    return found


def table(found: dict[tuple[str, str, str], Finding]) -> str:
    """Return of each operator its samples, and what became of them, as a table."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for (name, _, _), finding in found.items():
        for what, count in finding.outcomes.items():
            counts[name]["wrong" if what in SILENT else what] += count
    columns = ("right", *REFUSED, "wrong")
    rows = [["operator", "calls", *columns]]
    for name, of_one in [*sorted(counts.items()), ("in all", sum(counts.values(), Counter[str]()))]:
        rows.append([name, str(of_one.total()), *(str(of_one[what]) for what in columns)])
    return "\n".join(" | ".join(row) for row in rows)


def reasons(found: dict[tuple[str, str, str], Finding]) -> str:
    """Return why torch or we have refused, an example a line."""
    return "\n".join(
        f"{what} | {name} | {variant} | {condition} | {finding.examples[what]!r}"
        for (name, variant, condition), finding in sorted(found.items())
        for what in REFUSED
        if what in finding.examples
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mesh", default="2", help="its shape, as 2x3")
    parser.add_argument("--simulated", action="store_true", help="all ranks in this process")
    parser.add_argument("--most", type=int, default=2)
    parser.add_argument("--share", type=str, default="0/1")
    parser.add_argument("--reasons", action="store_true", help="why what is refused is")
    options = parser.parse_args()
    part, parts = map(int, options.share.split("/"))
    shape = tuple(map(int, options.mesh.split("x")))
    mesh = DeviceMesh(range(prod(shape)), shape)
    chosen = cases(mesh, options.most, options.names, (part, parts))
    found = sweep(mesh, chosen, lambda line: print(line, flush=True), simulated=options.simulated)
    print(table(found))
    if options.reasons:
        print(reasons(found))


if __name__ == "__main__":
    main()
