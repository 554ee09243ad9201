"""Bilevel optimization: problems whose constraint is the solution of another problem."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
