"""The command `shardspec presets`."""

import json
from textwrap import fill

import click

from shardspec.cli.options import json_option
from shardspec.cli.output import say
from shardspec.comm.presets import PRESETS, LinkPreset
from shardspec.text import bytes_text, table_text

__all__ = ["command"]


@click.command(
    "presets",
    epilog="""\b
Examples:
  shardspec presets
  shardspec presets --json
""",
)
@json_option("Print everything as JSON.")
def command(as_json: bool) -> None:
    """Show the links that --links knows, where their numbers come from and what they hold for.

    Rates are in 10^9 bytes a second, in one direction, per device.
    """
    if as_json:
        records = [preset.as_dict() for preset in PRESETS.values()]
        say(json.dumps({"presets": records}))
    else:
        say(_text())


def _text() -> str:
    presets = PRESETS.values()
    table = table_text(
        ["preset", "scope", "basis", "confidence", "devices", "latency", "rate"],
        [
            [
                preset.name,
                preset.scope,
                preset.basis,
                preset.confidence,
                _devices(preset),
                f"{preset.start_us + preset.latency_us:.4g} µs",
                f"{preset.gb_per_s:.4g} GB/s",
            ]
            for preset in presets
        ],
        numbers_from=4,
    )
    notes = "\n".join(
        f"{p.name}\n"
        f"{_note('for', p.valid_for + _sizes(p))}\n"
        f"{_note('from', f'{p.source}; read {p.read_on}')}"
        for p in presets
    )
    return (
        f"{table}\n\n{notes}\n\n"
        "Latency and rate are those of one message. Where collectives were measured, fitted curves "
        "price\nthem; their errors stand with every plan. This project measured none of them."
    )


def _note(title: str, text: str) -> str:
    return fill(f"  {title:4}  {text}", 100, subsequent_indent=" " * 8, break_on_hyphens=False)


def _devices(preset: LinkPreset) -> str:
    fewest, most = preset.devices
    return f"{fewest} or more" if most is None else f"{fewest} to {most}"


def _sizes(preset: LinkPreset) -> str:
    if preset.sizes is None:
        return ""
    least, most = map(bytes_text, preset.sizes)
    return f"; published at {least}" if least == most else f"; published at {least} to {most}"
