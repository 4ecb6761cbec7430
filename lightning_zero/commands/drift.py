"""`lightning-zero drift`: compare recent values with a reference; exit code 1 means drift."""

from __future__ import annotations

import sys

from lightning_zero.commands.showing import Parser, not_negative, print_json
from lightning_zero.io.text import print_table


def parser() -> Parser:
    made = Parser(
        prog="lightning-zero drift",
        description="Compare values that DriftMonitor has saved. The exit code is 1 if a quantity has drifted.",
    )
    made.add_argument("reference", help="file written by DriftMonitor(save_to=...) on the reference data")
    made.add_argument("recent", help="file written by DriftMonitor(save_to=...) on recent data")
    made.add_argument("--psi-above", type=not_negative, default=0.2, help="population stability index (default: 0.2)")
    made.add_argument("--ks-above", type=not_negative, default=0.1, help="Kolmogorov-Smirnov statistic (default: 0.1)")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    return made


def main(arguments: list[str]) -> int:
    given = parser().parse_args(arguments)
    from lightning_zero.callbacks.drift import drift_of, read_values

    try:
        found = drift_of(read_values(given.reference), read_values(given.recent))
    except (ImportError, OSError, ValueError) as error:
        print(f"lightning-zero drift: {error}", file=sys.stderr)
        return 2
    drifted = {name: drift.exceeds(given.psi_above, given.ks_above) for name, drift in found.items()}
    if given.json:
        print_json({name: {**drift._asdict(), "drifted": drifted[name]} for name, drift in found.items()})
    else:
        rows = [
            (name, f"{each.psi:.3f}", f"{each.ks:.3f}", f"{each.p:.2g}", "yes" if drifted[name] else "no")
            for name, each in found.items()
        ]
        print_table([("quantity", "psi", "ks", "p", "drifted"), *rows], right=(1, 2, 3))
    return int(any(drifted.values()))
