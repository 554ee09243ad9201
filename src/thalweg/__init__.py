"""Recently published optimization methods as fast, tested components, each with evidence.

Nothing heavy is imported here: families load on first use, as in
``from thalweg.training import StabSGD``.
"""

import lazy_loader

__getattr__, __dir__, _submodules = lazy_loader.attach(
    __name__,
    submodules=[
        "bandits",
        "bilevel",
        "catalog",
        "combinatorial",
        "convex",
        "curvature",
        "evidence",
        "tasks",
        "training",
    ],
)
__version__ = "0.1.0"
__all__ = [*_submodules, "__version__"]
