import time

import pytest
from rich.cells import cell_len

from shardspec.text import bytes_text, counted, rate_text, seconds_text, table_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1025, "1.001 KiB"),
        (1024**2 * 3 / 2, "1.5 MiB"),
        (7 * 1024**3, "7 GiB"),
        (1024**4, "1 TiB"),
        (5000 * 1024**4, "5000 TiB"),
    ],
)
def test_text_of_bytes(num_bytes, text):
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.5e-9, "0.0015 µs"),
        (3.4e-6, "3.4 µs"),
        (999e-6, "999 µs"),
        (1e-3, "1 ms"),
        (0.5, "500 ms"),
        (1, "1 s"),
        (123.456, "123.5 s"),
    ],
)
def test_text_of_seconds(seconds, text):
    assert seconds_text(seconds) == text


def test_rates_are_decimal():
    rates = [rate_text(rate) for rate in (0, 15_720_000, 1.25e9, 5e13)]
    assert rates == ["0 B/s", "15.72 MB/s", "1.25 GB/s", "5e+04 GB/s"]


def test_what_is_counted():
    texts = counted(1, "tensor"), counted(0, "tensor"), counted(2, "box", "boxes")
    assert texts == ("1 tensor", "0 tensors", "2 boxes")


def test_a_table_is_as_wide_as_its_cells():
    text = table_text(
        ["name", "spec", "size"], [["[w]", "[S0,R]", "12"], ["é", "", "3"]], numbers_from=2
    )
    assert text.splitlines() == [
        "name   spec     size",
        "────────────────────",
        "[w]    [S0,R]     12",
        "é                  3",
    ]


def test_text_after_numbers():
    text = table_text(["n", "size", "why"], [["a", "12", "b"], ["c", "3", "long"]], text_from=2)
    assert text.splitlines()[2:] == ["a     12   b", "c      3   long"]


def test_a_footer():
    lines = table_text(["a", "b"], [["x" * 30, "1"]], footer=["all", "10"]).splitlines()
    assert lines[0] == "a" + " " * 32 + " b"
    assert lines[2] == "x" * 30 + "    1"
    assert lines[-1] == "all" + " " * 30 + "10"
    assert len(lines) == 5


@pytest.mark.parametrize("columns", [40, 80])
def test_long_cells_fit_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    header, row = ["n", "what", "size"], ["1", "层" * 200, "12"]
    *_, cut = table_text(header, [row], numbers_from=2, flexible=1).splitlines()
    assert columns - 1 <= cell_len(cut) <= columns
    assert "…" in cut
    row = ["1", "all-gather tp, " * 9, "12"]
    lines = table_text(header, [row], numbers_from=2, flexible=1, wraps=True).splitlines()
    assert max(map(cell_len, lines)) <= columns
    assert lines[2].endswith("12")
    assert " ".join(lines[2:]).replace("12", "").split() == ["1", *["all-gather", "tp,"] * 9]
    # Columns that matter least go first.
    (*_, short) = table_text(header, [["层" * 200, "y" * 20, "12"]], optional=[1]).splitlines()
    assert ("y" in short) == (columns == 80)


def test_cells_are_not_markup():
    assert "[red]x[/red]" in table_text(["a"], [["[red]x[/red]"]])
    assert r"\[S0]" in table_text(["a"], [[r"\[S0]"]])


def test_a_table_without_rows_has_its_head():
    assert table_text(["a", "b"], []).splitlines()[0] == "a   b"


def test_a_table_of_many_rows_is_made_soon():
    started = time.process_time()
    text = table_text(["name", "size"], [[f"layer.{at}", str(at)] for at in range(20_000)])
    assert time.process_time() - started < 2
    lines = text.splitlines()
    assert lines[0] == f"{'name':11}   {'size':>5}"
    assert lines[2] == f"{'layer.0':11}   {'0':>5}"
    assert lines[-1] == "layer.19999   19999"
