"""Writes the tables of README.md: each stands after a comment that names its result, and is made from that.

    python -m experiments.readme

The comment <!-- compare-stories: losses --> is followed by the table "losses" of experiments.compare, from
results/compare-stories.json; <!-- report: claims --> by what experiments.report prints.
"""

import re
import sys

import checkpoint
import experiments
from experiments import ablations, anatomy, compare, icl, length, outliers, report, retrieval, scaling, speed, tune

MODULES = (ablations, anatomy, compare, icl, length, outliers, retrieval, scaling, speed, tune)
README = experiments.ROOT / "README.md"


def rows_of(marker):
    """The rows of the table that a comment names."""
    result, name = marker.split(": ")
    if result == "report":
        return report.tables()[name]
    experiment = {module.__name__.split(".")[-1]: module for module in MODULES}[result.split("-")[0]]
    return experiment.tables(experiments.load(result))[name]


def filled(text):
    """The text with every table made anew."""

    def table(match):
        head, *rows = (f"| {' | '.join(row)} |\n" for row in rows_of(match[2]))
        return f"{match[1]}{head}|{'---|' * len(rows_of(match[2])[0])}\n{''.join(rows)}"

    return re.sub(r"(<!-- (.+: .+) -->\n)(?:\|.*\n)*", table, text)


def main():
    try:
        text = filled(README.read_text(encoding="utf-8"))
    except ValueError as error:
        sys.exit(f"readme: {error}")
    checkpoint.write(README, lambda file: file.write(text.encode()))


if __name__ == "__main__":
    main()
