"""Reads and writes files of torch without it: zips, and pickles that are never executed."""

import re
from collections.abc import Callable, Iterable
from typing import Final

DEEPSPEED: Final = "DeepSpeed ZeRO"
META: Final = "Meta's model parallel"
META_FILE: Final = re.compile(r"consolidated\.(\d\d)\.pth")
_ALL_OF_THEM: Final = "name the directory with the files of all of them"
EXPERTS: Final = "DeepSpeed's mixture of experts"
PIPELINE: Final = "DeepSpeed's pipeline"
TENSOR_PARALLEL: Final = "DeepSpeed's tensor parallel"
PARTS: Final = {
    DEEPSPEED: (
        re.compile(r"(?:(?:bf16|fp16)_)?zero_pp_rank_\d+_mp_rank_\d+_(?:model|optim)_states\.pt"),
        _ALL_OF_THEM,
    ),
    EXPERTS: (
        re.compile(
            r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt"
            r"|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
        ),
        'put the weights together with python -c "import glob, torch; '
        "s = torch.load('RUN/mp_rank_00_model_states.pt', weights_only=False)['module']; "
        "[s.update(torch.load(f)) for f in glob.glob('RUN/*expert_*_model_states.pt')]; "
        "torch.save(s, 'OUT.pt')\"",
    ),
    PIPELINE: (
        re.compile(r"layer_\d+-model_(?:\d+-model_)?states\.pt"),
        "load it in a run of as many stages, and save the whole state dict",
    ),
    TENSOR_PARALLEL: (
        re.compile(r"mp_rank_(\d+)_model_states\.pt"),
        "load it in a run of as many ranks, and save the whole state dict",
    ),
    META: (META_FILE, _ALL_OF_THEM),
}
"""Formats with a file per rank -> pattern of file names, and remedy. A single file with number 0 is
no part."""


def part_of_several(name: str, beside: Callable[[], Iterable[str]]) -> str | None:
    """Return the key in `PARTS` of a file, by its name and those beside it; None for others.

    >>> part_of_several("layer_01-model_states.pt", list)
    "DeepSpeed's pipeline"
    """
    for kind, (pattern, _) in PARTS.items():
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if not match.groups():
            return kind
        siblings = list(beside())
        if kind == TENSOR_PARALLEL:
            # Beside files of experts or stages, it contains only the shared tensors.
            for sibling in (EXPERTS, PIPELINE):
                if any(map(PARTS[sibling][0].fullmatch, siblings)):
                    return sibling
        if int(match[1]) or sum(pattern.fullmatch(sibling) is not None for sibling in siblings) > 1:
            return kind
    return None


def part_text(kind: str) -> str:
    """Return the kind of a file of one of `PARTS`, and the remedy, for errors."""
    return f"{kind}, which are not read one by one; {PARTS[kind][1]}"
