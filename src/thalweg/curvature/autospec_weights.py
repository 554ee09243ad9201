"""Weights of AutoSpec that come with the library, and the command that trains them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from thalweg.common.optional import requires
from thalweg.curvature.autospec_network import AutoSpec, Task

with requires("curvature"):
    import torch

WEIGHTS = Path(__file__).parent / "weights"
SHIPPED: tuple[tuple[Task, int], ...] = (
    ("precond", 6),
    ("precond", 12),
    ("precond", 24),
    ("inv", 16),
    ("invsqrt", 16),
    ("sqrt", 16),
    ("log", 16),
    ("exp", 16),
    ("filter", 12),
)
# Large discretized operators are worse conditioned than the 3000 that training defaults to.
KAPPA = (10.0, 1e6)


def pretrained(task: Task, degree: int) -> AutoSpec:
    """Return an `AutoSpec` whose weights come with the library.

    Trained on condition numbers up to 10^6 by ``python -m thalweg.curvature.autospec_weights``.

    Parameters
    ----------
    task : {"precond", "inv", "invsqrt", "sqrt", "log", "exp", "filter"}
        What the polynomial is for; see `AutoSpec`.
    degree : int
        6, 12 or 24 for ``"precond"``, 12 for ``"filter"``, 16 for the functions.

    Raises
    ------
    ValueError
        If there are no such weights; `AutoSpec.fit_synthetic` makes them in minutes.

    Examples
    --------
    >>> from thalweg.curvature import pretrained
    >>> pretrained("invsqrt", 16).degree
    16
    """
    if (task, degree) not in SHIPPED:
        there = ", ".join(f"{name} {number}" for name, number in SHIPPED)
        raise ValueError(
            f"task and degree must be one of {there}, got {task} {degree}; "
            "AutoSpec(task, degree).fit_synthetic() trains others"
        )
    return _load(task, degree)


@cache
def _load(task: Task, degree: int) -> AutoSpec:
    return AutoSpec.load(_path(WEIGHTS, task, degree)).requires_grad_(False)


def _path(directory: Path, task: str, degree: int) -> Path:
    return directory / f"autospec-{task}-{degree}.safetensors"


def train_weights(
    task: Annotated[str, typer.Option(help="One task alone; all by default.")] = "",
    degree: Annotated[int, typer.Option(help="One degree alone; all by default.")] = 0,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 3000,
    seed: Annotated[int, typer.Option(help="Of the generator.")] = 0,
    out: Annotated[Path, typer.Option(help="Where to write the files.")] = WEIGHTS,
) -> None:
    """Train the weights that the library ships, on synthetic spectra."""
    wanted = [
        pair
        for pair in SHIPPED
        if (not task or pair[0] == task) and (not degree or pair[1] == degree)
    ]
    if not wanted and task in get_args(Task) and degree:
        wanted = [(cast(Task, task), degree)]
    if not wanted:
        raise typer.BadParameter(f"there is nothing to train for task {task!r}, degree {degree}")
    out.mkdir(parents=True, exist_ok=True)
    for name, number in wanted:
        generator = torch.Generator().manual_seed(seed)
        model = AutoSpec(name, number)
        model.fit_synthetic(kappa=KAPPA, steps=steps, generator=generator)
        model.save(_path(out, name, number))
        typer.echo(f"{_path(out, name, number)}: loss {sum(model.losses[-100:]) / 100:.3f}")


if __name__ == "__main__":
    typer.run(train_weights)
