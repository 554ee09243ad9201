"""A membrane pressed onto an obstacle: a variational problem on finite elements of any fineness."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_integer, check_number
from thalweg.common.optional import requires

with requires("peers"):
    import skfem
    from skfem.models.poisson import laplace, mass

Array = NDArray[np.float64]
STIFFNESS = 20.0  # of the springs, κ


class ContactMembrane:
    r"""The energy of a membrane on springs that stiffen, in contact with a penalized obstacle.

    .. math:: E(u) = \int \tfrac12 |\nabla u|^2 + \tfrac\kappa4 u^4 - fu
              + \tfrac\gamma2 \max(0, \psi - u)^2, \qquad u = 0 \text{ on the border}

    on the unit square, with linear finite elements. With γ = 0 the obstacle is left to bounds
    (`lower`). All vectors hold the values at the inner nodes.

    Parameters
    ----------
    cells : int ≥ 2
        Cells per side.
    load : float
        f, upwards.
    gamma : float ≥ 0
        Stiffness of the obstacle.
    center : (float, float)
        Of the obstacle ψ = -0.02 - 2 |x - center|², the hilltop.

    Attributes
    ----------
    stiffness, mass : sparse array of shape (d, d)
        K and M, which give the norms of H¹₀ and L².
    nodes : ndarray of shape (2, d)
        Coordinates of the inner nodes.
    lower : ndarray of shape (d,)
        ψ at the nodes.

    Examples
    --------
    >>> membrane = ContactMembrane(8)
    >>> membrane.d
    49
    """

    def __init__(
        self,
        cells: int,
        *,
        load: float = -8.0,
        gamma: float = 1e4,
        center: tuple[float, float] = (0.5, 0.5),
    ) -> None:
        check_integer("cells", cells, at_least=2)
        self.gamma = check_number("gamma", gamma, at_least=0)
        mesh = skfem.MeshTri.init_tensor(*[np.linspace(0, 1, cells + 1)] * 2)
        self._basis = skfem.Basis(mesh, skfem.ElementTriP1(), intorder=3)
        inner = self._inner = self._basis.complement_dofs(self._basis.get_dofs())
        self.d = len(inner)
        self._whole_stiffness = laplace.assemble(self._basis)
        self.stiffness = self._whole_stiffness[inner][:, inner].tocsc()
        self.mass = mass.assemble(self._basis)[inner][:, inner].tocsc()
        self._load = load * skfem.LinearForm(lambda v, _: v).assemble(self._basis)
        self._obstacle = _hill(self._basis.global_coordinates(), center)
        self.nodes: Array = self._basis.doflocs[:, inner]
        self.lower: Array = _hill(self.nodes, center)

    @property
    def x0(self) -> Array:
        """The flat membrane."""
        return np.zeros(self.d)

    def __call__(self, u: Array) -> tuple[float, Array]:
        """Return the energy and its derivative, of shape (d,)."""
        whole = np.zeros(self._basis.N)
        whole[self._inner] = u
        field = self._basis.interpolate(whole)
        depth = np.maximum(0, self._obstacle - field)
        density = STIFFNESS / 4 * np.asarray(field) ** 4 + self.gamma / 2 * depth**2
        elastic = self._whole_stiffness @ whole
        value = float(whole @ elastic / 2 - whole @ self._load + np.sum(density * self._basis.dx))
        force = STIFFNESS * np.asarray(field) ** 3 - self.gamma * depth
        derivative = elastic - self._load + _weighted.assemble(self._basis, weight=force)
        return value, derivative[self._inner]

    def hessian(self, u: Array) -> Any:
        """Return the sparse tangent stiffness matrix, assembled."""
        weight = self._tangent(u)
        assembled = _weighted_mass.assemble(self._basis, weight=weight)
        return self.stiffness + assembled[self._inner][:, self._inner].tocsc()

    def _tangent(self, u: Array) -> Array:
        whole = np.zeros(self._basis.N)
        whole[self._inner] = u
        field = np.asarray(self._basis.interpolate(whole))
        tangent: Array = 3 * STIFFNESS * field**2 + self.gamma * (field < self._obstacle)
        return tangent

    def product(self, u: Array, p: Array) -> Array:
        """Return the product of the Hessian at u and p, without the matrix."""
        whole = np.zeros(self._basis.N)
        whole[self._inner] = p
        moved = self._tangent(u) * np.asarray(self._basis.interpolate(whole))
        spring = _weighted.assemble(self._basis, weight=moved)[self._inner]
        product: Array = self.stiffness @ p + spring
        return product


@skfem.LinearForm  # type: ignore[untyped-decorator]
def _weighted(v: Any, w: Any) -> Any:
    return w["weight"] * v


@skfem.BilinearForm  # type: ignore[untyped-decorator]
def _weighted_mass(u: Any, v: Any, w: Any) -> Any:
    return w["weight"] * u * v


def _hill(points: Any, center: tuple[float, float]) -> Array:
    x, y = np.asarray(points[0]), np.asarray(points[1])
    hill: Array = -0.02 - 2 * ((x - center[0]) ** 2 + (y - center[1]) ** 2)
    return hill


def contact_membrane(
    rng: np.random.Generator, cells: int, *, gamma: float = 1e4
) -> ContactMembrane:
    """Return a membrane under a random load, on a hill at a random place."""
    load = float(rng.uniform(-12, -6))
    center = (float(rng.uniform(0.35, 0.65)), float(rng.uniform(0.35, 0.65)))
    return _membrane(cells, load, gamma, center)


@lru_cache(maxsize=8)
def _membrane(
    cells: int, load: float, gamma: float, center: tuple[float, float]
) -> ContactMembrane:
    return ContactMembrane(cells, load=load, gamma=gamma, center=center)
