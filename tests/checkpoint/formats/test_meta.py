"""Meta's consolidated files, of models that are cut here by torch."""

import json
import shutil

import pytest
import torch

from shardspec import merge
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.reading import assert_same, read_whole, refused

WIDTH, HEADS, KEYS, FFN, VOCAB, LAYERS = 16, 4, 4, 24, 40, 3
DIMS = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}


def model():
    made = torch.Generator().manual_seed(1)

    def number(*shape):
        return torch.randn(shape, generator=made).to(torch.bfloat16)

    layer = {
        "attention.wq": (WIDTH, WIDTH),
        "attention.wk": (KEYS * WIDTH // HEADS, WIDTH),
        "attention.wv": (KEYS * WIDTH // HEADS, WIDTH),
        "attention.wo": (WIDTH, WIDTH),
        "feed_forward.w1": (FFN, WIDTH),
        "feed_forward.w2": (WIDTH, FFN),
        "feed_forward.w3": (FFN, WIDTH),
        "attention_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
    }
    return {
        "tok_embeddings.weight": number(VOCAB, WIDTH),
        "norm.weight": number(WIDTH),
        "output.weight": number(VOCAB, WIDTH),
        "rope.freqs": number(2),
        **{
            f"layers.{i}.{name}.weight": number(*shape)
            for i in range(LAYERS)
            for name, shape in layer.items()
        },
    }


def write(place, whole, ranks, tokens_dim=1, **params):
    place.mkdir()
    for rank in range(ranks):
        state = {}
        for name, tensor in whole.items():
            dim = {**DIMS, "tok_embeddings": tokens_dim}.get(name.split(".")[-2])
            state[name] = (tensor if dim is None else tensor.chunk(ranks, dim)[rank]).clone()
        torch.save(state, place / f"consolidated.{rank:02d}.pth")
    said = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "vocab_size": VOCAB}
    (place / "params.json").write_text(json.dumps({**said, "norm_eps": 1e-05, **params}))
    return place


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tokens_dim", [0, 1])
def test_every_tensor_is_put_together(tmp_path, ranks, tokens_dim):
    whole = model()
    place = write(tmp_path / "llama", whole, ranks, tokens_dim, vocab_size=-1, n_kv_heads=KEYS)
    assert_same(read_whole(place), whole)
    assert_same(read_whole(place / "consolidated.00.pth"), whole)
    (place / "params.json").unlink()
    assert_same(read_whole(place), whole)


def test_rules_of_the_caller_come_first(tmp_path):
    whole = {**model(), "layers.0.extra.weight": torch.arange(8.0)}
    place = write(tmp_path / "llama", whole, 2)
    assert "no rule says how tensor 'layers.0.extra.weight'" in refused(place)
    assert_same(read_whole(place, source_rules={"*.extra.weight": "[R]"}), whole)
    rules = tmp_path / "rules.toml"
    rules.write_text('"*.extra.weight" = "[R]"\n')
    assert_same(read_whole(place, source_rules=rules), whole)


def other_norm(place):
    path = place / "consolidated.01.pth"
    state = torch.load(path)
    state["layers.1.ffn_norm.weight"][3] += 1
    torch.save(state, path)


def other_shape(place):
    path = place / "consolidated.01.pth"
    state = torch.load(path)
    state["output.weight"] = state["output.weight"][:-1].clone()
    torch.save(state, path)


def cut_short(place):
    path = place / "consolidated.02.pth"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        *(
            (
                lambda place, at=at: (place / f"consolidated.{at:02d}.pth").unlink(),
                f"restore consolidated.0{at}",
            )
            for at in range(4)
        ),
        (
            lambda place: shutil.copy(place / "consolidated.01.pth", place / "consolidated.04.pth"),
            "4 ranks",
        ),
        (
            lambda place: shutil.copy(place / "consolidated.01.pth", place / "consolidated.02.pth"),
            "copy of",
        ),
        (lambda place: (place / "params.json").write_text('{"dim": 32}'), "dim 32"),
        (lambda place: (place / "params.json").write_text('{"n_layers": 4}'), "n_layers 4"),
        (lambda place: (place / "params.json").write_text('{"vocab_size": 41}'), "vocab_size 41"),
        (
            lambda place: (place / "params.json").write_text('{"n_heads": 4, "n_kv_heads": 2}'),
            "n_kv_",
        ),
        (lambda place: (place / "params.json").write_text('{"dim": '), "params.json"),
        (other_norm, "layers.1.ffn_norm.weight"),
        (other_shape, "output.weight"),
        (cut_short, "is not a whole zip"),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path, change, told):
    place = write(tmp_path / "llama", model(), 4)
    change(place)
    with pytest.raises(CheckpointError, match=told) as caught:
        merge(place, tmp_path / "out.safetensors")
    assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]
