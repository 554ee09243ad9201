"""Second-order methods: semismooth Newton, natural gradients and learned spectral algorithms."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
