from .lazy_minimize import minimize_lazy_ssn as minimize_lazy_ssn
from .lazy_optimizer import LazySSN as LazySSN
from .separable_penalties import BoxPenalty as BoxPenalty
from .separable_penalties import L1Penalty as L1Penalty
from .separable_penalties import SeparablePenalty as SeparablePenalty
from .torch_derivatives import TorchFunction as TorchFunction
