"""Time and memory of Spectral Annealing from 2^14 to 2^23 spins, one process per size.

    python speed/specann_scaling.py --log2-spins 14 17 20 23

The graph is a +-1 spin glass on a random 3-regular graph (``--torus`` for a square torus), the
settings are the shipped ones. Peak memory is the process's, minus that of an empty run.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np


def measure(log2_spins: int, torus: bool) -> dict[str, float]:
    """Run once in this process."""
    from thalweg.combinatorial import specann
    from thalweg.tasks import regular_glass, toroidal_glass

    specann(regular_glass(20_000, 3, rng=0), taus=2, rng=0)  # compiles
    n = 2**log2_spins
    if torus:
        J = toroidal_glass(2 ** (log2_spins // 2), 2 ** (log2_spins - log2_spins // 2), rng=0)
    else:
        J = regular_glass(n, 3, rng=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    result = specann(J, rng=0, progress=False)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "spins": n,
        "entries": J.nnz,
        "seconds": seconds,
        "peak": 1024.0 * peak,
        "before": 1024.0 * before,
        "energy": result.energy / n,
        "gap": result.gap,
        **result.time,
    }


def main() -> None:
    """Measure every size in a process of its own and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log2-spins", type=int, nargs="+", default=[14, 17, 20])
    parser.add_argument("--torus", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.log2_spins[0], options.torus)))
        return
    print(f"{'spins':>9} {'entries':>10} {'seconds':>8} {'µs/spin':>8} {'GiB':>6} {'B/spin':>7} "
          f"{'energy/n':>9} {'gap':>6}   eigen + search + bound")  # fmt: skip
    rows = []
    for size in options.log2_spins:
        command = [sys.executable, __file__, "--child", "--log2-spins", str(size)]
        done = subprocess.run(
            command + ["--torus"] * options.torus, capture_output=True, text=True, check=True
        )
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        print(f"{row['spins']:>9.0f} {row['entries']:>10.0f} {row['seconds']:>8.2f} "
              f"{1e6 * row['seconds'] / row['spins']:>8.2f} {row['peak'] / 2**30:>6.2f} "
              f"{row['peak'] / row['spins']:>7.0f} {row['energy']:>9.4f} {row['gap']:>6.3f}   "
              f"{row['eigen']:.1f} + {row['local_search']:.1f} + {row['bound']:.1f}",
              flush=True)  # fmt: skip
    if len(rows) > 1:
        logs = np.log([[row["entries"], row["seconds"]] for row in rows])
        slope = np.polyfit(logs[:, 0], logs[:, 1], 1)[0]
        print(f"log-log slope of time against entries: {slope:.3f}")


if __name__ == "__main__":
    main()
