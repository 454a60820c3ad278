"""Strict training and prediction as a user runs them: the command line, five seeds, ledgers kept.

    python -m benchmarks.utility.strict [--only COMMAND] [--seeds N] [--out FILE]

For every line one JSON object is appended, so that a run that was stopped goes on where it was. The epsilon of each run
comes from `pbmvfl privacy RUN --json`, and the ledgers' totals with it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: (dataset, options): what the commands say beside the seed.
RUNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    *(("phishing", ("--epsilon", epsilon)) for epsilon in ("8", "1", "0.5")),
    ("phishing", ("--epsilon", "8", "--unit", "record")),
    *(("activity", ("--epsilon", epsilon)) for epsilon in ("8", "2", "1", "0.5")),
    ("activity", ("--epsilon", "8", "--unit", "record")),
    *(("phishing", ("--epsilon", "8", "--prediction-epsilon", epsilon)) for epsilon in ("8", "2")),
    *(("activity", ("--epsilon", "8", "--prediction-epsilon", epsilon)) for epsilon in ("8", "2", "1")),
)
OUT = Path(__file__).parents[1] / "results" / "strict.jsonl"


def command(*arguments: str) -> dict[str, Any]:
    run = [sys.executable, "-m", "pbmvfl", *arguments, "--json"]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(dataset: str, options: tuple[str, ...], seed: int) -> dict[str, Any]:
    unit = "record" if "record" in options else "cell"
    with tempfile.TemporaryDirectory() as folder:
        out, books = f"{folder}/run", f"{folder}/books"
        result = command("train", dataset, *options, "--seed", str(seed), "--out", out, "--ledger", books)
        spent = command("privacy", out)

    def strict(rows: list[dict[str, Any]]) -> dict[str, float]:
        (found,) = (
            row
            for row in rows
            if (row["unit"], row["accounting"], row["adversary"], row["colluding_parties"])
            == (unit, "strict", "server", 0)
        )
        return {name: found[name] for name in ("epsilon", "advantage_upper_bound", "detection_upper_bound")}

    return {
        "dataset": dataset,
        "options": list(options),
        "seed": seed,
        "metrics": {name: value for name, value in result["metrics"].items() if name.startswith("test")},
        "seconds": result["seconds"],
        "strict": {split: strict(rows) for split, rows in spent["bounds_by_split"].items()},
        "as_ledgers_count": spent["strict_as_ledgers_count"][unit],
        "ledgers": sorted({book[unit] for book in spent["ledgers"]}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=None, help="only this command, such as 'phishing --epsilon 1'")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    lines = chosen.out.read_text().splitlines() if chosen.out.exists() else []
    known = {(each["dataset"], *each["options"], each["seed"]) for each in map(json.loads, lines)}
    wanted = [
        (dataset, options, seed)
        for dataset, options in RUNS
        for seed in range(chosen.seeds)
        if chosen.only in (None, " ".join((dataset, *options))) and (dataset, *options, seed) not in known
    ]
    for number, (dataset, options, seed) in enumerate(wanted, start=1):
        found = measured(dataset, options, seed)
        with chosen.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{number}/{len(wanted)}", dataset, *options, f"seed {seed}:", found["metrics"], flush=True)


if __name__ == "__main__":
    main()
