"""Input files of hostile content are refused before they take much time or memory."""

import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from shardspec import NameMap, ShardSpecError
from shardspec.checkpoint.formats.cut_rules import read_toml
from shardspec.comm.cluster_file import read_links
from shardspec.families.layouts import model_layouts
from shardspec.input_files import parse_toml

_READERS: list[Callable[[Path], object]] = [NameMap.load, read_links, read_toml]


@pytest.mark.parametrize("read", _READERS)
@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 20_000) + " = 1",
        "[" + " . ".join("a" * 20_000) + "]\nb = 1",
        "a = {" + '"."'.join("." * 20_000) + " = 1}",
        ".".join(["1.1"] * 20_000) + " = 1",
        "a = " + "[" * 20_000,
        "a = " + "1" * 2_000_000,
    ],
    ids=["key", "table", "quoted", "numbers", "nested", "digits"],
)
def test_refuses_toml_that_would_take_long(
    tmp_path: Path, read: Callable[[Path], object], text: str
) -> None:
    path = tmp_path / "hostile.toml"
    path.write_text(text)
    started = time.process_time()
    with pytest.raises(ShardSpecError, match=r"hostile\.toml"):
        read(path)
    assert time.process_time() - started < 2


def test_numbers_of_thousands_of_digits_are_called_so(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}")
    for read in (lambda: NameMap.parse(f"sizes.a = {'9' * 5000}"), lambda: model_layouts(path, "")):
        with pytest.raises(ShardSpecError, match="number has thousands of digits"):
            read()


def test_reads_long_rows_of_fractions_and_many_short_keys() -> None:
    text = f"a = {[n + 0.5 for n in range(500)]}\n" + "b.c.d.e = 1.5e-3\n"
    assert parse_toml(text) == tomllib.loads(text)


def test_refuses_configs_of_many_megabytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [' + "{}," * 2_000_000 + "0]}")
    with pytest.raises(ShardSpecError, match=r"config\.json: .*4,194,304"):
        model_layouts(tmp_path, "replicated")
