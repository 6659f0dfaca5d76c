"""ZeRO checkpoints of many sizes, cut by torch: groups, paddings, frozen and tied parameters."""

import random
from math import ceil

import pytest
import torch

from shardspec.checkpoint.compare.verify import verify_checkpoint
from tests.checkpoint.formats.reading import assert_same, read_whole, refused

KINDS = ("", "exp_avg", "exp_avg_sq")
SHAPES = [(7, 3), (1,), (), (2, 5, 3), (4,), (0, 3), (3, 1, 2), (11,), (2, 2)]


def flats(groups, whole, ranks, stage, gaps):
    """Return of each kind, rank and group the flat tensor."""
    found = {}
    for kind in KINDS:
        of = {
            name: whole[f"optimizer.{kind}.{name}" if kind else name]
            for group in groups
            for name in group
        }
        for at, group in enumerate(groups):
            if stage == 3:
                parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
                for name in group:
                    flat, share = of[name].reshape(-1), ceil(of[name].numel() / ranks)
                    padded = torch.cat([flat, torch.full((share * ranks - len(flat),), -1.0)])
                    for rank, part in enumerate(parts):
                        part.append(padded[rank * share : (rank + 1) * share])
                for rank, part in enumerate(parts):
                    found[kind, rank, at] = torch.cat(part).clone()
                continue
            flat = torch.cat(
                [
                    part
                    for name in group
                    for part in (of[name].reshape(-1), torch.full((gaps,), -2.0))
                ]
            )
            padded = torch.cat([flat, torch.full((-len(flat) % (2 * ranks),), -1.0)])
            for rank, piece in enumerate(padded.chunk(ranks)):
                # Padding is left out of the parameters, not of the moments.
                end = len(piece) if kind else len(flat) - rank * len(piece)
                found[kind, rank, at] = piece[: max(0, end)].clone()
    return found


def write(place, ranks, stage, seed, gaps=0, split=False):
    """Write a checkpoint of random parameters; return what is due."""
    torch.manual_seed(seed)
    names = [f"p{at}" for at in range(len(SHAPES))]
    random.Random(seed).shuffle(names)
    shapes = dict(zip(names, SHAPES, strict=True))
    groups = [names[:5], names[5:]]
    whole = {}
    for name in names:
        for kind in KINDS:
            whole[f"optimizer.{kind}.{name}" if kind else name] = torch.randn(shapes[name])
        whole[f"optimizer.step.{name}"] = torch.tensor(7.0)
    held = flats(groups, whole, ranks, stage, gaps)
    if split:
        # Groups of stage 3 are cut at any place into those that fit the memory.
        joined = {key[:2]: torch.cat([held[*key[:2], at] for at in range(2)]) for key in held}
        held = {
            (kind, rank, at): part.clone()
            for (kind, rank), flat in joined.items()
            for at, part in enumerate(flat.split([3, 2, len(flat) - 5]))
        }
    numbers = sorted({group for *_, group in held})
    frozen, buffer = torch.randn(5, 3).bfloat16(), torch.arange(6)
    place.mkdir()
    for rank in range(ranks):
        fragment = frozen
        if stage == 3:
            share = ceil(15 / ranks)
            padded = torch.cat([frozen.reshape(-1), torch.zeros(share * ranks - 15).bfloat16()])
            fragment = padded[rank * share : (rank + 1) * share].clone()
        empty = torch.empty(0) if stage == 3 else None
        model = {
            "module": {
                name: torch.zeros(shapes[name]) if empty is None else empty for name in names
            }
            | {"cold": frozen if empty is None else empty, "shift": buffer}
            | {"twin": torch.zeros(shapes["p0"]) if empty is None else empty},
            "buffer_names": ["shift"],
            "param_shapes": [{name: torch.Size(shapes[name]) for name in part} for part in groups],
            "frozen_param_shapes": {"cold": torch.Size((5, 3))},
            "frozen_param_fragments": {"cold": fragment},
            "shared_params": {"twin": "p0"},
            "dp_world_size": ranks,
            "global_steps": 7,
        }
        start = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(model, place / f"{start}mp_rank_00_model_states.pt")
        state = {
            at: {"step": torch.tensor(7.0)} | {kind: held[kind, rank, at] for kind in KINDS[1:]}
            for at in numbers
        }
        optimizer = {"zero_stage": stage, "partition_count": ranks if stage == 3 else [ranks] * 2}
        flat = [torch.nn.Parameter(held["", rank, at]) for at in numbers]
        if stage == 3:
            optimizer |= {"fp32_flat_groups": flat, "optimizer_state_dict": {"state": state}}
        else:
            optimizer |= {
                "single_partition_of_fp32_groups": flat,
                "base_optimizer_state": {"state": state},
                "param_alignment_paddings": [[gaps] * len(group) for group in groups],
            }
        path = place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, path)
    return whole | {"cold": frozen, "shift": buffer, "twin": whole["p0"]}


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("stage", "gaps", "split"), [(1, 0, False), (2, 3, False), (3, 0, False), (3, 0, True)]
)
def test_every_tensor_is_put_together(tmp_path, ranks, stage, gaps, split, seeds):
    for seed in range(seeds):
        place = tmp_path / f"run{seed}"
        due = write(place, ranks, stage, seed, gaps, split)
        assert_same(read_whole(place), due)
        assert verify_checkpoint(place, every=True).flaws == ()


@pytest.mark.parametrize("ranks", [[2], pytest.param([0, 1], marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("stage", [2, 3])
def test_every_flat_tensor_that_is_longer_or_shorter_is_refused(tmp_path, stage, ranks):
    place = tmp_path / "run"
    write(place, 3, stage, 0)
    for rank in ranks:
        path = place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        held = path.read_bytes()
        for group in range(2):
            for kind in KINDS:
                for more in (-1, 12):
                    state = torch.load(path, weights_only=True)
                    inner = state["optimizer_state_dict"]
                    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
                    moments = inner[
                        "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
                    ]
                    at, place_of = (kind, moments["state"][group]) if kind else (group, inner[key])
                    flat = place_of[at].detach()
                    place_of[at] = torch.cat([flat, torch.zeros(12)])[: len(flat) + more].clone()
                    torch.save(state, path)
                    assert "by param_shapes it should have" in refused(place)
        path.write_bytes(held)


def test_a_universal_checkpoint_is_refused(tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    torch.save({"module": {}}, place / "mp_rank_00_model_states.pt")
    (place / "zero").mkdir()
    assert "name the checkpoint from which DeepSpeed made it" in refused(place)
