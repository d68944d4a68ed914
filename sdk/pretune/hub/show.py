"""How the results of ``pretune hub`` look on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def _text(value: object) -> Text:
    """Text as it is: names and reasons come from whoever publishes weights, so they steer no terminal."""
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value)))


def _table(*columns: str) -> Table:
    table = Table(*columns)
    for column in table.columns:
        column.overflow = "fold"
    return table


def _line(console: Console, text: str) -> None:
    console.print(_text(text), soft_wrap=True)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def targets(found: dict[str, Any], console: Console) -> None:
    """Weights, and how they cover the machine."""
    table = _table("target", "where", "revision", "coverage here", "size", "top-1", "top-5")
    for row in found["targets"]:
        figures = (row["quality"].get(name) for name in ("top1", "top5"))
        quality = ["-" if figure is None else f"{figure:.2f}" for figure in figures]
        where = (row["name"], row["source"], row["revision"][:12] or "-")
        table.add_row(*map(_text, (*where, row["coverage"], _megabytes(row["bytes"]), *quality)))
    console.print(table)
    _show_advice(found, console)


def reasons(found: dict[str, Any], console: Console) -> None:
    """Verdicts with all reasons."""
    machine = found["hardware"]
    names = dict.fromkeys((machine["microarch"], machine["isa_level"]))  # a GPU has one name for both
    _line(console, f"{machine['model_name']} ({', '.join(names)})")
    table = _table("target", "where", "", "coverage", "why")
    for row in found["targets"]:
        taken = "accepted" if row["accepted"] else "rejected"
        cells = (row["name"], row["source"], taken, row["coverage"], "; ".join(row["reasons"]))
        table.add_row(*map(_text, cells))
    console.print(table)
    _show_advice(found, console)


def _show_advice(found: dict[str, Any], console: Console) -> None:
    best = found["best"]
    if best is None:
        _line(console, found["advice"])
    elif best["source"] == "hub":
        _line(console, f"best: {best['name']} on the hub; run: pretune hub pull {best['repo']}")
    else:
        _line(console, f"best: {best['name']} ({best['source']}), which pretune tune uses")


def info(found: dict[str, Any], console: Console) -> None:
    """One set of weights."""
    config = found["config"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")

    def row(name: str, value: object) -> None:
        table.add_row(name, _text(value))

    row("name", found["name"])
    row("from", f"{found['repo']}@{found['revision']}" if found["revision"] else found["path"])
    if found["versions"]:
        row("versions", ", ".join(found["versions"]))
    covers = config["covers"]
    row("covers", f"{covers['kind']} {covers['arch']} {covers['isa_level']}")
    for m in config["measured_on"]:
        row("measured on", f"{m['cpu']} ({m['microarch']}, {m['cores']} cores): {m['schedules']} schedules")
    for name, value in config["quality"].items():
        row(name, f"{value:.3f}")
    row("tvm", config["tvm"])
    row("format", f"{config['format_version']}, feature schema {config['feature_schema']}")
    row("size", f"{_megabytes(found['bytes'])} in {len(found['files'])} files")
    console.print(table)


def paths(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Revisions in the cache, and where they lie."""
    for row in rows:
        _line(console, f"{row['repo']}@{row['revision'][:12]}: {row['path']}")


def checked(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Folders, and what is wrong with them."""
    for row in rows:
        state = "all files are as they should be"
        if row["bad"]:
            state = f"bad: {', '.join(fault['file'] for fault in row['bad'])}"
        elif row["repaired"]:
            state = f"repaired: {', '.join(row['repaired'])}"
        _line(console, f"{row['path']}: {state}")


def pins(found: dict[str, Any], console: Console) -> None:
    """Pins."""
    for name, pin in found["targets"].items():
        _line(console, f"{name}: {pin['repo']}@{pin['revision']}")
    _line(console, f"written to {found['file']}")
