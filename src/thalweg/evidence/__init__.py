"""The harness that checks claims: it knows no method."""

from thalweg.evidence.claim import (
    Claim,
    Contender,
    Measurement,
    Metric,
    Scale,
    at_least,
    at_most,
    between,
    claim,
    trend,
)

__all__ = [
    "Claim",
    "Contender",
    "Measurement",
    "Metric",
    "Scale",
    "at_least",
    "at_most",
    "between",
    "claim",
    "trend",
]
