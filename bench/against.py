"""Compare this tree with an earlier commit, on one server: `python -m bench.against REV`.

Runs alternate, and each pair gives one ratio, so that other load on the machine affects both sides alike.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.harness import ROOT, fresh_database
from bench.server import server


def items_per_second(tree: Path, dsn: str, items: int) -> float:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "src")])}
    with fresh_database(dsn) as database:
        command = [sys.executable, "-m", "bench.one", "ecluse", "--dsn", database, "--items", str(items)]
        done = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    return float(measured["items"] / measured["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.against", description=__doc__)
    parser.add_argument("revision", help="the commit to compare with")
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ecluse-against-") as folder, server(None, None) as (dsn, _):
        former = Path(folder) / "tree"
        archive = subprocess.run(["git", "archive", options.revision], cwd=ROOT, check=True, capture_output=True).stdout
        former.mkdir()
        subprocess.run(["tar", "-x", "-C", str(former)], input=archive, check=True)
        pairs = []
        for n in range(options.pairs):
            trees = (former, ROOT) if n % 2 == 0 else (ROOT, former)  # the second finds a warmer server
            rates = {tree: items_per_second(tree, dsn, options.items) for tree in trees}
            pairs.append((rates[former], rates[ROOT]))
            print(
                f"{n + 1:>3}  {rates[former]:>8,.0f}  {rates[ROOT]:>8,.0f}  {rates[ROOT] / rates[former]:.3f}",
                flush=True,
            )
    before, now = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(now / before for before, now in pairs)
    print(f"median: {before:,.0f} items/s at {options.revision}, {now:,.0f} here; of the paired ratios: {ratio:.3f}")


if __name__ == "__main__":
    main()
