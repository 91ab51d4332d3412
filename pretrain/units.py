"""Formats counts, durations and energies for display, and flattens settings. Has no slow imports, for runs.py."""

import re
from typing import Any

UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
JOULES_PER_KWH = 3.6e6
COUNT = re.compile(r"^([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([kKMBT]?)$")


def parse_count(value: Any, thousand: int = 1000) -> Any:
    """Converts '10B' to 10_000_000_000, '2k' to 2 * thousand, and 1e9 to an int. Leaves other values unchanged."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and (match := COUNT.match(value.strip())):
        unit = {**UNITS, "k": thousand, "K": thousand}[match[2]]
        number = float(match[1].replace("_", ""))
        # Check the quotient, because products such as 2.01 * 1000 aren't exact.
        count = round(min(number * unit, 1e300))
        if count / unit == number:
            return count
    return value


def count_text(count: float) -> str:
    """Formats 1234567 as '1.23M'."""
    count = float(f"{count:.3g}")
    unit = next((unit for unit in reversed(UNITS) if count >= UNITS[unit]), "")
    return f"{count / UNITS[unit]:.3g}{unit}"


def counted(count: int, noun: str) -> str:
    """Formats a count with its noun: '1 process', '2 processes'."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def duration_text(seconds: float) -> str:
    """Formats 3725 as '1 h 02 min'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def bytes_text(count: float) -> str:
    """Formats 23688207 as '23.7 MB'."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} bytes"


def energy_text(joules: float, how: str | None, grams_per_kwh: float | None) -> str:
    """Formats energy, as in '1.23 kWh, measured by NVML (582 g of CO2 at 473 g/kWh)'."""
    kilowatt_hours = joules / JOULES_PER_KWH
    return f"{kilowatt_hours:.3g} kWh" + (f", {how}" if how else "") + co2_text(kilowatt_hours, grams_per_kwh)


def co2_text(kilowatt_hours: float, grams_per_kwh: float | None) -> str:
    """Formats emissions, as in ' (582 g of CO2 at 473 g/kWh)'. Returns '' if grams_per_kwh is None."""
    if grams_per_kwh is None:
        return ""
    grams = kilowatt_hours * grams_per_kwh
    unit, size = next((row for row in (("t", 1e6), ("kg", 1e3)) if grams >= row[1]), ("g", 1))
    return f" ({grams / size:,.3g} {unit} of CO2 at {grams_per_kwh:g} g/kWh)"


def table(rows: list[list[str]], *, right: set[int] = frozenset()) -> str:
    """Formats rows as aligned columns separated by two spaces. Columns in `right` are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def leaves(values: Any, prefix: str = "", *, whole_lists: bool = False) -> dict[str, Any]:
    """Flattens {'a': {'b': [1]}} to {'a.b.0': 1}. Empty lists and mappings are leaves.

    whole_lists: True to leave lists unchanged, except lists of mappings or lists.
    """
    if isinstance(values, list) and (not whole_lists or any(isinstance(value, dict | list) for value in values)):
        items = enumerate(values)
    else:
        items = values.items() if isinstance(values, dict) else ()
    found = {}
    for key, value in items:
        found |= leaves(value, f"{prefix}{key}.", whole_lists=whole_lists)
    return found or {prefix.removesuffix("."): values}
