"""Text that compares conversion plans: routes, tables and differences."""

from collections.abc import Sequence
from fractions import Fraction

from shardspec.layout.plan import ConversionPlan, communicating_moves, step_text
from shardspec.text import bytes_text, seconds_text, table_text


def route_text(plan: ConversionPlan) -> str:
    """Return the steps of a plan in a line: 'reduce-scatter tp, all-gather (dp,tp)'."""
    each = []
    for step, before, _ in plan.moves:
        labels = before.mesh.axis_labels(step.axes)
        axes = labels[0] if len(labels) == 1 else f"({','.join(labels)})"
        each.append(f"{step_text(step).split()[0]} {axes}" if labels else step_text(step))
    return ", ".join(each) or "nothing to do"


def plans_table(plans: Sequence[ConversionPlan], names: Sequence[str]) -> str:
    """Return a text table of plans between the same layouts; the first is the reference."""
    best = plans[0].cost_seconds
    rows = [
        [
            name,
            route_text(plan),
            ", ".join(str(layout.labelled_spec) for layout in plan.layouts[1:-1]),
            bytes_text(plan.bytes_received),
            seconds_text(plan.cost_seconds),
            f"{plan.cost_seconds / best:.2f}×" if best else "",
            bytes_text(plan.peak_bytes),
        ]
        for name, plan in zip(names, plans, strict=True)
    ]
    header = ["plan", "steps", "through", "receives", "time", "ratio", "peak"]
    optional = (2, 6, 3, 5)
    return table_text(header, rows, numbers_from=3, optional=optional, flexible=1, wraps=True)


def difference_text(plan: ConversionPlan, naive: ConversionPlan) -> str:
    """Say in a sentence what a plan avoids, and how much of it."""
    if not plan.steps:
        return "nothing to do, and nothing to avoid"
    if communicating_moves(plan) == communicating_moves(naive):
        return "this is the naive plan: here no other is cheaper"
    whole = any(layout.spec.dim_partition_dict == {} for layout in plan.layouts)
    lead = "takes another way" if whole else "avoids gathering the whole tensor"
    return (
        f"{lead}: {_speed(plan.cost_seconds, naive.cost_seconds)}, "
        f"receives {_share(plan.bytes_received, naive.bytes_received, 'of the bytes')}, "
        f"holds {_share(plan.peak_bytes, naive.peak_bytes, 'at its peak')}"
    )


def _speed(seconds: float, naive: float) -> str:
    if abs(seconds - naive) < 0.005 * naive:
        return "about as fast"
    if seconds == 0:
        return "free"
    if seconds < naive:
        return f"{naive / seconds:.3g}× faster"
    return f"{seconds / naive:.3g}× slower" if naive else "slower, for the naive plan is free"


def _share(amount: int, naive: int, of_what: str) -> str:
    """Return a part in words: a small fraction where it is close to one, else in per cent."""
    if amount == naive:
        return "as many bytes" if of_what == "of the bytes" else "as much at its peak"
    if amount == 0:
        return "nothing"
    if amount > naive:
        return f"{amount / naive:.3g}× {of_what.replace('of ', '')}" if naive else "more"
    share = Fraction(amount, naive)
    close = share.limit_denominator(64)
    if close and abs(close - share) <= share / 200 and close.numerator <= 9 and close < 1:
        return f"{close} {of_what}"
    return f"{float(share):.0%} {of_what}".replace("%", " %")
