from .gradients import NonFiniteGradientError as NonFiniteGradientError
from .stab_minimize import minimize_stab_sgd as minimize_stab_sgd
from .stab_sgd import StabRecord as StabRecord
from .stab_sgd import StabSGD as StabSGD
from .stability import StabEstimate as StabEstimate
from .stability import stability_ratio as stability_ratio
