"""Claims whose outcome is known, for the tests of the harness.

Run as a program it is a stand-in for ``thalweg verify``: tests kill it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim, trend

SCALES = {
    name: Scale(seeds=n, tuning_seeds=2, n=8)
    for name, n in (("smoke", 2), ("quick", 10), ("full", 20))
}


def toy(
    method_loss=1.0, peer_loss=2.0, grid=(0.1, 1.0, 10.0), best=1.0, bound=0.8, seconds=0.0, **card
):
    """Return a claim on losses that are lowest at lr = best."""

    @claim(
        method="toy",
        statement="the method's loss is at most 0.8 of the best peer's",
        metric=Metric("loss", "lower", curve=("step", "loss")),
        contenders=[
            Contender("method", make=lambda: method_loss, tune={"lr": list(grid)}),
            Contender("peer", make=lambda: peer_loss, tune={"lr": [0.1, 1.0, 3.0, 10.0]}),
            Contender("shipped", make=lambda: 10 * peer_loss),
        ],
        expect=at_most(bound, of="best peer"),
        scales=SCALES,
        **card,
    )
    def losses(contender, rng, *, n, lr=1.0):
        """Draw a loss near the contender's own."""
        time.sleep(seconds)
        noise = rng.normal(size=n)
        value = contender.make() * (1 + 0.01 * noise.mean()) + abs(np.log(lr / best))
        return Measurement(value, (range(n), value + noise), {"noise": noise.mean()})

    return losses


@claim(
    method="toy",
    statement="the time grows linearly",
    metric=Metric("time", "lower", average="geometric mean", unit="s"),
    contenders=[Contender("method")],
    expect=trend(0.9, 1.1, over="n"),
    scales={name: Scale(seeds=10, sweep={"n": [10, 100, 1000]}) for name in SCALES},
)
def growth(contender, rng, *, n):
    """Return n up to a little noise."""
    return Measurement(n * np.exp(0.01 * rng.normal()))


def main(database: str) -> None:
    from thalweg.evidence.backends import ProcessBackend
    from thalweg.evidence.runner import verify
    from thalweg.evidence.store import Store

    with Store(Path(database)) as store:
        backend = ProcessBackend(2)
        (record,) = verify([toy(seconds=0.05)], scale="full", store=store, backend=backend)
        backend.close()
    print(record["verdict"], [c["values"] for c in record["contenders"]])


if __name__ == "__main__":
    main(sys.argv[1])
