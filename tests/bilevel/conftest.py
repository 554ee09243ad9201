"""What the tests of the family share."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def close_figures():
    """Leave no figure open in which later tests would draw."""
    yield
    plt.close("all")
