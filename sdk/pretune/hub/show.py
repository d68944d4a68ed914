"""How the results of ``pretune hub`` look on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text


def _table(*columns: str) -> Table:
    table = Table(*columns)
    for column in table.columns:
        column.overflow = "fold"
    return table


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def targets(found: dict[str, Any], console: Console) -> None:
    """Weights, and how they cover the machine."""
    table = _table("target", "where", "revision", "coverage here", "size", "top-1", "top-5")
    for row in found["targets"]:
        figures = (row["quality"].get(name) for name in ("top1", "top5"))
        quality = ["-" if figure is None else f"{figure:.2f}" for figure in figures]
        where = (row["name"], row["source"], row["revision"][:12] or "-")
        table.add_row(*where, row["coverage"], _megabytes(row["bytes"]), *quality)
    console.print(table)
    _show_advice(found, console)


def reasons(found: dict[str, Any], console: Console) -> None:
    """Verdicts with all reasons."""
    machine = found["hardware"]
    names = dict.fromkeys((machine["microarch"], machine["isa_level"]))  # a GPU has one name for both
    console.print(f"{machine['model_name']} ({', '.join(names)})", soft_wrap=True, markup=False)
    table = _table("target", "where", "", "coverage", "why")
    for row in found["targets"]:
        taken = "accepted" if row["accepted"] else "rejected"
        table.add_row(row["name"], row["source"], taken, row["coverage"], "; ".join(row["reasons"]))
    console.print(table)
    _show_advice(found, console)


def _show_advice(found: dict[str, Any], console: Console) -> None:
    best = found["best"]
    if best is None:
        console.print(escape(found["advice"]), soft_wrap=True)
    elif best["source"] == "hub":
        console.print(
            f"best: {best['name']} on the hub; run: pretune hub pull {best['repo']}", soft_wrap=True
        )
    else:
        console.print(f"best: {best['name']} ({best['source']}), which pretune tune uses", soft_wrap=True)


def info(found: dict[str, Any], console: Console) -> None:
    """One set of weights."""
    config = found["config"]
    table = Table.grid(padding=(0, 2))

    def row(name: str, value: object) -> None:
        table.add_row(Text(name, style="bold"), Text(str(value), overflow="fold"))

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
        console.print(f"{row['repo']}@{row['revision'][:12]}: {row['path']}", soft_wrap=True)


def checked(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Folders, and what is wrong with them."""
    for row in rows:
        state = "all files are as they should be"
        if row["bad"]:
            state = f"{len(row['bad'])} bad files"
        elif row["repaired"]:
            state = f"repaired: {', '.join(row['repaired'])}"
        console.print(f"{row['path']}: {state}", soft_wrap=True)


def pins(found: dict[str, Any], console: Console) -> None:
    """Pins."""
    for name, pin in found["targets"].items():
        console.print(f"{name}: {pin['repo']}@{pin['revision']}", soft_wrap=True)
    console.print(f"written to {found['file']}", soft_wrap=True)
