"""EQOL: linear contextual bandits with a quasi-optimistic, capped quadratic bonus."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from thalweg.bandits import linear_methods
from thalweg.bandits.batch import AgentBatch
from thalweg.bandits.choice import ArmChoice
from thalweg.bandits.ridge import RidgeRegression
from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.random import RNGLike

Array = NDArray[Any]

# Stands for an infinite c1, whose product with s = 0 would be NaN.
HUGE = 1e150


def ellipsoid_radius(s: Array, c1: Any, c2: Any) -> Array:
    r"""Return r(x) = min(c₁ s, c₂), the radius of the ellipsoid that EQOL uses for an action.

    ``s`` (..., K) holds the norms ‖x‖ in the metric V⁻¹; ``c1`` and ``c2`` are numbers or (...).
    """
    c1, c2 = np.minimum(c1, HUGE)[..., None], np.asarray(c2)[..., None]
    radius: Array = np.minimum(c1 * s, c2)
    return radius


def capped_quadratic_bonus(s: Array, c1: Any, c2: Any) -> Array:
    r"""Return min(c₁ s², c₂ s), which is r(x) s. Shapes as for `ellipsoid_radius`."""
    return ellipsoid_radius(s, c1, c2) * s


class EQOL:
    r"""Quasi-optimistic linear contextual bandit: OFUL with a bonus that may be too small.

    In round t = 1, 2, ... each offered context x, with
    :math:`s = \|x\|_{V_{t-1}^{-1}}`, has the index

    .. math:: x^\top\hat\theta_t + \min\{c_{1,t}\,s^2,\; c_{2,t}\,s\},

    and the arm of largest index is played. The ridge estimate is
    :math:`\hat\theta_t = V_{t-1}^{-1} b_{t-1}`, and by default
    :math:`c_{1,t} = c\,\beta_t\sqrt{t/d}` and :math:`c_{2,t} = \beta_t`, with OFUL's radius

    .. math:: \beta_t = \sigma\sqrt{2\log(1/\delta) + \log\det(V_{t-1}/\lambda)} + \sqrt\lambda\,S.

    Parameters
    ----------
    dim : int
        The dimension d of a context.
    lam : float, default 1.0
        Ridge regularization λ > 0, in squared units of a context. The bound needs ‖x‖² ≤ λ;
        the first context played that is longer gives a `UserWarning`.
    sigma : float or "auto", default 1.0
        Sub-Gaussian scale of the reward noise, in units of the reward. "auto" (experimental, no
        guarantee) plugs in the standard deviation of the residuals, and 1 in the first round.
    S : float, default 1.0
        Bound on ‖θ*‖₂, in units of the reward over units of a context.
    delta : float, default 0.01
        The bound holds with probability 1 - δ.
    c : float or "bound", default 0.1
        The constant of the default ``c1``. Every c > 0 has both rates; a larger c ends the √T
        phase earlier, at :math:`t_0 = d\beta^2/(4c^2\Delta^2)` for a gap Δ, and pays more in it.
        "bound" minimizes the bound below: :math:`c = 1/(2\sqrt L)`, L = log det(V/λ)/d.
    c1, c2 : float or callable, optional
        Another schedule: constants ≥ 0, infinity included, or functions of the agent, which may
        read ``t``, ``beta``, ``dim``, ``ridge``. ``c1=inf`` is OFUL, ``c2=inf`` the pure
        quadratic bonus without a cap, ``c1=0`` is greedy. Not both infinite.
    horizon : int, optional
        The number of rounds T if it is known: then c₁ is :math:`c\,\beta_t\sqrt{T/d}`.
    tie_break : {"random", "first"}, default "random"
        Which of several arms with exactly the largest index is played.
    refactor_every : int, default 2000
        Updates between two Cholesky factorizations of V; rank-one updates do the rest.
    dtype : {float64, float32}, default float64
        Precision of contexts and of the maintained inverse; sums stay in float64.
    rng : int, numpy.random.Generator or None
        Breaks ties.

    Attributes
    ----------
    t : int
        The number of the coming round: 1 + updates. Selections without an update don't count.
    theta, V : ndarray of shape (d,) and (d, d)
        The ridge estimate and the regularized Gram matrix.
    beta : float
        The confidence radius of the coming round.

    Raises
    ------
    TypeError, ValueError
        If an argument is outside its range, or a context or reward is not finite.
    IndexError
        If ``update`` is given an arm that was not offered.

    Notes
    -----
    *Quasi-optimism.* Let :math:`\|\hat\theta_t-\theta_*\|_{V_{t-1}}\le\beta_t` for all t, which
    has probability 1 - δ, and :math:`c_{2,t}\ge\beta_t`. As
    :math:`\beta s\le c_1 s^2+\beta^2/(4c_1)`, every index is optimistic up to a residual:

    .. math:: x^\top\theta_* \le \mathrm{index}_t(x) + \rho_t, \qquad
              \rho_t = \beta_t^2/(4c_{1,t}).

    Where the cap is active the deficit is 0. Hence, for *any* schedule, and with :math:`s_t` the
    norm of the context played,

    .. math:: R_T \le \sum_t\big(\min\{c_{1,t}s_t^2,\,c_{2,t}s_t\}+\beta_t s_t\big)
              + \sum_t \frac{\beta_t^2}{4c_{1,t}},

    the cost of exploration plus the quasi-optimistic residual. Under the default schedule, with
    :math:`\|x\|^2\le\lambda` and :math:`D=\log\det(V_T/\lambda)`, these are at most
    :math:`2c\,\beta_T\sqrt{T/d}\,D+\beta_T\sqrt{2TD}` and :math:`\beta_T\sqrt{dT}/(2c)`: together
    Õ(d√T). Minimizing their sum over c gives ``c="bound"``.

    *Gap.* If the best arm leads by Δ or more in every round, :math:`\rho_t\le\Delta/2` from
    :math:`t_0=d\beta^2/(4c^2\Delta^2)` on. The rounds before cost
    :math:`O(\beta\sqrt{dt_0})=O(d\beta^2/\Delta)`; after them
    :math:`\Delta\le2(c_2+\beta)s_t` for every wrong arm, which sums to Õ(d²/Δ). The tuning does
    not know Δ.

    *Geometry.* The index is the largest :math:`x^\top\theta` over the ellipsoid
    :math:`\|\theta-\hat\theta_t\|_{V_{t-1}}\le r_t(x)=\min\{c_{1,t}s,c_{2,t}\}`, which is smaller
    only for actions that are explored already, :math:`s<c_2/c_1=\sqrt{d/t}/c`. A UCB bonus with
    a smaller scale shrinks the ellipsoid of all actions alike. For ‖x‖² ≤ λ the default schedule
    reaches the cap after :math:`d/c^2` rounds at the earliest, for actions hardly explored by then.

    *One-hot contexts* make it a tabular bandit with the bonus
    :math:`\min\{c_1/(N_a+\lambda),\,c_2/\sqrt{N_a+\lambda}\}`.

    *The paper's and ours.* The index, the bound for any schedule, both rates and the geometry
    are the paper's. The schedule and c are our resolution: the abstract gives the form of the
    bonus only, and they follow from the bound.

    *Cost.* `select` takes O(K d²), `update` O(d²); memory is O(d²). Rewards may come late and in
    any order: give the context that was played with ``arm=None``.

    References
    ----------
    "Quasi-optimistic linear contextual bandits", NeurIPS 2026. Abbasi-Yadkori, Pál and
    Szepesvári, "Improved algorithms for linear stochastic bandits", NeurIPS 2011 (the radius β).

    Examples
    --------
    Five offers, described by three features; the reward is noisy.

    >>> rng = np.random.default_rng(0)
    >>> offers = rng.uniform(-0.5, 0.5, size=(5, 3))
    >>> agent = EQOL(dim=3, sigma=0.1, rng=0)
    >>> for _ in range(200):
    ...     arm = agent.select(offers)
    ...     reward = offers[arm] @ [1.0, -0.5, 0.2] + 0.1 * rng.normal()
    ...     agent.update(offers, arm, reward)
    >>> agent.select(offers) == int(np.argmax(offers @ [1.0, -0.5, 0.2]))
    True
    """

    select = linear_methods.select
    update = linear_methods.update
    predict = linear_methods.predict
    get_state = linear_methods.get_state
    set_state = linear_methods.set_state

    def __init__(
        self,
        dim: int,
        *,
        lam: float = 1.0,
        sigma: float | str = 1.0,
        S: float = 1.0,
        delta: float = 0.01,
        c: float | str = 0.1,
        c1: float | Callable[[EQOL], float] | None = None,
        c2: float | Callable[[EQOL], float] | None = None,
        horizon: int | None = None,
        tie_break: str = "random",
        refactor_every: int = 2000,
        dtype: DTypeLike = np.float64,
        rng: RNGLike = None,
    ) -> None:
        self.ridge = RidgeRegression(dim, lam=lam, refactor_every=refactor_every, dtype=dtype)
        self.choice = ArmChoice(tie_break, rng)
        self.sigma: float | str = (
            check_choice("sigma", sigma, ("auto",))
            if isinstance(sigma, str)
            else check_number("sigma", sigma, at_least=0)
        )
        self.S = check_number("S", S, at_least=0)
        self.delta = check_number("delta", delta, above=0, below=1)
        self.c: float | str = (
            check_choice("c", c, ("bound",))
            if isinstance(c, str)
            else check_number("c", c, above=0)
        )
        self.c1 = _check_schedule("c1", c1)
        self.c2 = _check_schedule("c2", c2)
        if self.c1 == self.c2 == math.inf:
            raise ValueError("c1 and c2 must not both be infinite: the bonus would be")
        self.horizon = None if horizon is None else check_integer("horizon", horizon, at_least=1)

    @property
    def dim(self) -> int:
        """The dimension of a context."""
        return self.ridge.dim

    @property
    def t(self) -> int:
        """The number of the coming round, 1 + updates."""
        return self.ridge.updates + 1

    @property
    def theta(self) -> Array:
        """The ridge estimate, (d,)."""
        return self.ridge.theta

    @property
    def V(self) -> Array:  # noqa: N802
        """The regularized Gram matrix, (d, d)."""
        return self.ridge.V

    @property
    def beta(self) -> Any:
        """The confidence radius of the coming round, in units of the reward."""
        sigma = self.ridge.noise_scale() if isinstance(self.sigma, str) else self.sigma
        return self.ridge.confidence_radius(sigma, self.S, self.delta)

    def coefficients(self) -> tuple[Any, Any]:
        """Return c₁ and c₂ of the coming round."""
        beta = self.beta
        c1, c2 = self.c1, self.c2
        if c1 is None:
            c1 = self._constant() * beta * math.sqrt((self.horizon or self.t) / self.dim)
        if c2 is None:
            c2 = beta
        if callable(c1) or callable(c2):
            c1, c2 = self._evaluate("c1", c1), self._evaluate("c2", c2)
            if np.any(np.isinf(c1) & np.isinf(c2)):
                raise ValueError(f"c1 and c2 must not both be infinite, as in round {self.t}")
        return c1, c2

    def bonus(self, contexts: ArrayLike) -> Array:
        """Return min(c₁ s², c₂ s) of each of the K contexts (K, d); shape (K,)."""
        contexts = self.ridge.check_contexts(contexts)
        return capped_quadratic_bonus(self.ridge.norms(contexts), *self.coefficients())

    def index(self, contexts: ArrayLike) -> Array:
        """Return the estimate plus the bonus of each of the K contexts (K, d); shape (K,)."""
        contexts = self.ridge.check_contexts(contexts)
        bonus = capped_quadratic_bonus(self.ridge.norms(contexts), *self.coefficients())
        index: Array = self.ridge.predict(contexts) + bonus
        return index

    def capped(self, contexts: ArrayLike) -> NDArray[np.bool_]:
        """Return which of the K contexts (K, d) have c₂ s for a bonus, the cap; shape (K,)."""
        s = self.ridge.norms(self.ridge.check_contexts(contexts))
        c1, c2 = self.coefficients()
        is_capped: NDArray[np.bool_] = ellipsoid_radius(s, c1, c2) >= np.asarray(c2)[..., None]
        return is_capped

    def _constant(self) -> Any:
        if not isinstance(self.c, str):
            return self.c
        # Before the first update L is 0 and c infinite; a huge one means the cap as well.
        L = np.maximum(self.ridge.log_det / self.dim, 1e-200)
        return 0.5 / np.sqrt(L)

    def _evaluate(self, name: str, schedule: Any) -> Any:
        value = schedule(self) if callable(schedule) else schedule
        # The comparison is written so that NaN is refused as well.
        if not np.all(np.asarray(value) >= 0):
            raise ValueError(f"{name} must return a number >= 0, got {value!r} in round {self.t}")
        return value


class EQOLBatch:
    """R independent replications of `EQOL` in single NumPy calls.

    Parameters
    ----------
    n_runs : int
        The number R of replications.
    dim : int
        The dimension d of a context.
    **parameters
        Those of `EQOL`, common to all replications. A callable ``c1`` or ``c2`` gets the batched
        agent, whose ``beta`` is (R,), and returns a number or (R,).

    Attributes
    ----------
    agent : EQOL
        The agent with batched statistics: ``theta`` is (R, d), ``V`` (R, d, d), ``beta`` (R,);
        its ``index``, ``bonus``, ``predict`` take contexts (R, K, d).

    See Also
    --------
    AgentBatch : The same for any linear agent.

    Notes
    -----
    A round costs O(R K d²), with the Python overhead of one agent.

    Examples
    --------
    >>> batch = EQOLBatch(n_runs=4, dim=2, tie_break="first")
    >>> contexts = np.broadcast_to(np.eye(2), (4, 2, 2))
    >>> batch.update(contexts, [0, 0, 1, 1], [1.0, -1.0, 1.0, -1.0])
    >>> batch.select(contexts)
    array([0, 1, 1, 0])
    """

    def __init__(self, n_runs: int, dim: int, **parameters: Any) -> None:
        self._batch = AgentBatch(EQOL(dim, **parameters), n_runs)
        self.n_runs = self._batch.n_runs
        self.agent = self._batch.agent

    def bonus(self, contexts: ArrayLike) -> Array:
        """Return the bonus of each context (R, K, d); shape (R, K)."""
        return self.agent.bonus(contexts)

    def index(self, contexts: ArrayLike) -> Array:
        """Return the estimate plus the bonus of each context (R, K, d); shape (R, K)."""
        return self.agent.index(contexts)

    def select(self, contexts: ArrayLike) -> NDArray[np.intp]:
        """Return the arm of each run, (R,), given contexts (R, K, d)."""
        return self._batch.select(contexts)

    def update(self, contexts: ArrayLike, arms: ArrayLike | None, rewards: ArrayLike) -> None:
        """Learn the rewards (R,) of the arms (R,) of contexts (R, K, d), or of contexts (R, d)."""
        self._batch.update(contexts, arms, rewards)

    def get_state(self) -> dict[str, Any]:
        """Return what `set_state` needs to go on bit for bit: arrays, numbers and one string."""
        return self._batch.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `get_state` of a batch with the same parameters returned."""
        self._batch.set_state(state)


def _check_schedule(name: str, value: Any) -> Any:
    if value is None or callable(value):
        return value
    return check_number(name, value, at_least=0, allow_infinite=True)
