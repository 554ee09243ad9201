"""How a regularized Newton step is weighted and judged: rules on plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.common.checks import check_number

LEAST_LAMBDA = 1e-10
STEEP_LAMBDA = 1e3  # above it the factor grows faster
MOST_LAMBDA = 1e18
FLATNESS = 450.0  # machine epsilons: 1e-13 in float64


@dataclass(frozen=True)
class StepRule:
    r"""The weight λ = Λ gᵖ of the proximal term, and the two tests that a step must pass.

    Parameters
    ----------
    power : float in [0, 1]
        p. 0 is the Levenberg-Marquardt rule of LeAP-SSN.
    alpha : float in (0, 1)
        Of the gradient test, ⟨F'(x⁺), x - x⁺⟩ ≥ (α/λ) ‖F'(x⁺)‖².
    beta : float in (0, 1/2)
        Of the decrease test, F(x) - F(x⁺) ≥ β λ ‖x⁺ - x‖².

    Raises
    ------
    TypeError, ValueError
        If a number is not as described.

    Examples
    --------
    >>> rule = StepRule()
    >>> rule.weight(2.0, 0.25)
    0.5
    >>> rule.lighter(1.0), rule.heavier(1.0), rule.heavier(2000.0)
    (0.5, 2.0, 8000.0)
    """

    power: float = 1.0
    alpha: float = 0.5
    beta: float = 0.25

    def __post_init__(self) -> None:
        check_number("power", self.power, at_least=0, at_most=1)
        check_number("alpha", self.alpha, above=0, below=1)
        check_number("beta", self.beta, above=0, below=0.5)

    def weight(self, Lambda: float, gradient_norm: float) -> float:
        """Return λ."""
        weight: float = Lambda * gradient_norm**self.power
        return weight

    def decreases(self, decrease: float, squared_step: float, weight: float) -> bool:
        """Return whether F has fallen enough; False if it is NaN."""
        return decrease >= self.beta * weight * squared_step

    def turns(self, product: float, squared_gradient: float, weight: float) -> bool:
        """Return whether ⟨F'(x⁺), x - x⁺⟩ is large enough; False if it is NaN."""
        return product >= self.alpha / weight * squared_gradient

    @staticmethod
    def lighter(Lambda: float) -> float:
        """Return Λ after a step."""
        return max(Lambda / 2, LEAST_LAMBDA)

    @staticmethod
    def heavier(Lambda: float) -> float:
        """Return Λ after a rejected trial."""
        return (4 if Lambda > STEEP_LAMBDA else 2) * Lambda


def rounding_floor(value: float, epsilon: float) -> float:
    """Return the difference of two objectives near ``value`` below which it says nothing."""
    return FLATNESS * epsilon * max(1.0, abs(value))
