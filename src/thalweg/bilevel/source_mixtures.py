"""Weights of data sources for language models, by select-then-differentiate at a matched budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thalweg.bilevel.inverse_hessians import CG, LowerHessian
from thalweg.bilevel.parameter_trees import TreeLayout
from thalweg.common.checks import check_integer, check_number
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch
    from torch.func import functional_call, jvp, vjp
    from torch.nn.attention import SDPBackend, sdpa_kernel

Outputs = Callable[[torch.nn.Module, dict[str, "torch.Tensor"], Any], tuple[Any, Any]]
RISE = 1.02  # how much the mixture's loss may rise in a selection step


def next_token_logits(
    model: torch.nn.Module, parameters: dict[str, torch.Tensor], batch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of all but the last token, and the tokens that follow.

    Parameters
    ----------
    model : Module
        It maps tokens of shape (n, L) to logits of shape (n, L, V), or to an object with
        ``logits``, as the models of transformers do.
    parameters : dict of str to Tensor
        The trainable ones.
    batch : Tensor of shape (n, L)
        Tokens.
    """
    out = functional_call(model, parameters, (batch,))
    logits = getattr(out, "logits", out)
    return logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()


class SourceReweighter:
    r"""Trains a model on a mixture of sources whose weights follow a validation loss.

    The lower level is the mixture's loss :math:`g = \sum_s w_s \ell_s` with w = softmax(x), the
    upper one the validation loss f. Each `step` (a) trains on the mixture, (b) selects: moves along
    -∇f with the component along ∇g removed, and takes back what raises g by over 2 %, (c) solves
    :math:`v = (G + \lambda I)^{-1} \nabla f` by conjugate gradients, with the Gauss-Newton matrix G
    of the mixture, and (d) moves the weights against the hypergradient

    .. math:: \frac{\partial \Phi}{\partial x_s} =
              -w_s \Big( \langle \nabla \ell_s, v \rangle
              - \sum_r w_r \langle \nabla \ell_r, v \rangle \Big)

    Parameters
    ----------
    model : Module
        Parameters that require gradients are trained: all, or those of an adapter (PEFT).
    n_sources : int ≥ 2
    lr_w : float > 0
        Step size of the logits x.
    lr : float > 0
        Step size of AdamW on the model, where no optimizer is given, and of selection steps
        relative to it.
    damping : float > 0
        λ relative to the mean eigenvalue of G, tr(G) / d, of which one random vector tells.
    cg_steps : int ≥ 1
    train_steps, select_steps : int ≥ 1, int ≥ 0
        Steps per call, among which the batches are divided. Without selection steps the weights
        follow implicit differentiation where training ended.
    probe_rows : int ≥ 1
        Rows of every source, the last of its batch, that selection, Gauss-Newton products and the
        sources' gradients take; training takes all.
    outputs : callable, optional
        ``outputs(model, parameters, batch)``: logits of shape (m, V) and classes of shape (m,), by
        `torch.func.functional_call`; by default `next_token_logits`.
    optimizer : torch.optim.Optimizer, optional
        One of the model's parameters, in place of AdamW.
    generator : torch.Generator, optional

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, or a model without trainable parameters.

    Notes
    -----
    *Cost.* Per step one gradient of all rows for training; and, of the probe rows, one and a half
    per selection step, two per step of conjugate gradients, two for the trace, and one for the
    sources' gradients. ``n_tokens`` counts all that pass through the model, so that budgets can be
    matched.

    *Ours.* The paper's is the principle and its use on sources at a matched budget. Gauss-Newton,
    damping, the projected selection with its bound, and Adam are our resolution.

    References
    ----------
    "HG-MS: select-then-differentiate optimistic bilevel optimization", NeurIPS 2026.

    Examples
    --------
    >>> import torch
    >>> from thalweg.bilevel import SourceReweighter
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.Linear(8, 5))
    >>> counting = torch.arange(12).repeat(8, 1) % 5
    >>> reweighter = SourceReweighter(model, 2, lr=0.02)
    >>> for _ in range(15):
    ...     noise = torch.randint(5, (8, 12))
    ...     report = reweighter.step([counting, noise], counting)
    >>> bool(reweighter.mixture()[0] > 0.6)
    True
    """

    def __init__(
        self,
        model: torch.nn.Module,
        n_sources: int,
        *,
        lr_w: float = 0.5,
        lr: float = 1e-3,
        damping: float = 1e-2,
        cg_steps: int = 5,
        train_steps: int = 32,
        select_steps: int = 4,
        probe_rows: int = 8,
        outputs: Outputs | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch Module, got {type(model).__name__}")
        check_integer("n_sources", n_sources, at_least=2)
        check_number("lr_w", lr_w, above=0)
        check_number("lr", lr, above=0)
        check_number("damping", damping, above=0)
        self.cg_steps = check_integer("cg_steps", cg_steps, at_least=1)
        self.train_steps = check_integer("train_steps", train_steps, at_least=1)
        self.select_steps = check_integer("select_steps", select_steps, at_least=0)
        self.probe_rows = check_integer("probe_rows", probe_rows, at_least=1)
        self.model, self.n_sources = model, n_sources
        self.lr_w, self.lr, self.damping = lr_w, lr, damping
        self.generator = generator
        self.outputs = outputs or next_token_logits
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError("model must have a parameter that requires gradients")
        self._layout = TreeLayout("the parameters", dict(self._parameters))
        self.optimizer = optimizer or torch.optim.AdamW(
            list(self._parameters.values()), lr=lr, weight_decay=0.0
        )
        self.logits = torch.zeros(n_sources, dtype=torch.float64)
        self.n_tokens = 0

    def mixture(self) -> torch.Tensor:
        """Return the weights of the sources, of shape (n_sources,)."""
        return torch.softmax(self.logits, dim=0)

    def step(self, source_batches: Sequence[Any], val_batch: Any) -> dict[str, Any]:
        """Train, select, and move the weights.

        Parameters
        ----------
        source_batches : sequence of Tensor
            A batch of rows for every source, as ``outputs`` takes them.
        val_batch : Tensor
            Rows of the validation data.

        Returns
        -------
        dict
            ``mixture``, the weights after the step; ``mixture_loss`` and ``val_loss``, before it
            moves them; ``source_losses``; ``hypergradient`` of shape (n_sources,), which sums to 0;
            ``rejected``, selection steps that were taken back; ``n_tokens``, entries of the batches
            that passed through the model so far, in forward and backward passes.

        Raises
        ------
        ValueError
            If a source is missing or a batch has no rows.
        RuntimeError
            If a loss is not finite; the weights are as before.
        """
        if len(source_batches) != self.n_sources:
            raise ValueError(
                f"source_batches must hold {self.n_sources} batches, got {len(source_batches)}"
            )
        for name, batch in (*enumerate(source_batches), ("val_batch", val_batch)):
            if batch is None or len(batch) == 0:
                raise ValueError(f"batch {name} must have at least one row")
        w = self.mixture()
        for parts in self._divide(source_batches, self.train_steps):
            self._train(parts, w)
        probes = [batch[-self.probe_rows :] for batch in source_batches]
        rejected = sum(
            not self._select(probes, part, w)
            for part in torch.chunk(val_batch, max(self.select_steps, 1))[: self.select_steps]
        )
        f, f_y = self._gradient(val_batch)
        losses, slopes = zip(*(self._gradient(batch) for batch in probes), strict=True)
        v = self._inverse(probes, w, f_y)
        alignment = torch.stack([slope.dot(v).double().cpu() for slope in slopes])
        hypergradient = -w * (alignment - w.dot(alignment))
        self.logits -= self.lr_w * hypergradient
        return {
            "mixture": self.mixture(),
            "mixture_loss": float(w.dot(torch.tensor(losses, dtype=torch.float64))),
            "val_loss": f,
            "source_losses": list(losses),
            "hypergradient": hypergradient,
            "rejected": rejected,
            "n_tokens": self.n_tokens,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the logits, the optimizer's state and the count of tokens, to resume from."""
        return {
            "logits": self.logits.clone(),
            "optimizer": self.optimizer.state_dict(),
            "n_tokens": self.n_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`; the model's own parameters are loaded by the caller."""
        if tuple(state["logits"].shape) != (self.n_sources,):
            raise ValueError(
                f"the state must be of {self.n_sources} sources, got {len(state['logits'])}"
            )
        self.logits = state["logits"].clone()
        self.optimizer.load_state_dict(state["optimizer"])
        self.n_tokens = int(state["n_tokens"])

    def _divide(self, batches: Sequence[Any], steps: int) -> list[list[Any]]:
        """Return the rows of every source, divided among steps; the last may have none left."""
        parts = [torch.chunk(batch, steps) for batch in batches]
        return [[part[i % len(part)] for part in parts] for i in range(steps)]

    def _loss(self, batch: Any) -> torch.Tensor:
        logits, classes = self.outputs(self.model, dict(self._parameters), batch)
        self.n_tokens += batch.numel()
        loss = torch.nn.functional.cross_entropy(logits, classes)
        if not bool(torch.isfinite(loss)):
            raise RuntimeError("a loss of the model is not finite")
        return loss

    def _gradient(self, batch: Any) -> tuple[float, torch.Tensor]:
        loss = self._loss(batch)
        slopes = torch.autograd.grad(loss, list(self._parameters.values()), materialize_grads=True)
        return float(loss.detach()), torch.cat([slope.reshape(-1) for slope in slopes])

    def _train(self, parts: Sequence[Any], w: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        losses = torch.stack([self._loss(part) for part in parts])
        (w.to(losses) * losses).sum().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def _mixture_gradient(self, batches: Sequence[Any], w: torch.Tensor) -> tuple[float, Any]:
        losses, slopes = zip(*(self._gradient(batch) for batch in batches), strict=True)
        value = float(w.dot(torch.tensor(losses, dtype=torch.float64)))
        return value, torch.stack(slopes).T @ w.to(slopes[0])

    def _select(self, batches: Sequence[Any], val_part: Any, w: torch.Tensor) -> bool:
        """Move along -∇f without its component along ∇g; return whether g allowed it."""
        value, g_y = self._mixture_gradient(batches, w)
        _, f_y = self._gradient(val_part)
        direction = f_y - f_y.dot(g_y) / g_y.dot(g_y).clamp_min(1e-30) * g_y
        # As long as a step of Adam, whose entries are of the size of its step size.
        size = self.lr * len(direction) ** 0.5
        move = size / direction.norm().clamp_min(1e-30) * direction
        self._move(-move)
        with torch.no_grad():
            risen = sum(
                float(weight) * float(self._loss(batch))
                for weight, batch in zip(w, batches, strict=True)
            )
        if risen <= RISE * value:
            return True
        self._move(move)
        return False

    @torch.no_grad()
    def _move(self, vector: torch.Tensor) -> None:
        for name, part in self._layout.tree(vector).items():
            self._parameters[name].add_(part)

    def _inverse(self, batches: Sequence[Any], w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return ``(G + λI)⁻¹ b`` by conjugate gradients."""
        weights = [float(weight) for weight in w]

        def products(V: torch.Tensor) -> torch.Tensor:
            rows = []
            for v in V:
                parts = [
                    weight * self._gauss_newton(batch, v)
                    for weight, batch in zip(weights, batches, strict=True)
                ]
                rows.append(torch.stack(parts).sum(dim=0))
            return torch.stack(rows)

        signs = torch.randint(2, b.shape, generator=self.generator).to(b) * 2 - 1
        trace = float(signs.dot(products(signs[None])[0]))
        damping = self.damping * max(trace / len(b), 1e-12)
        solver = CG(self.cg_steps, rtol=1e-6, damping=damping)
        return solver(LowerHessian(lambda k, V: products(V), products), b).v

    def _gauss_newton(self, batch: Any, v: torch.Tensor) -> torch.Tensor:
        """Return ``Jᵀ S J v``, S the Hessian of the mean cross-entropy in the logits."""
        classes: list[torch.Tensor] = []

        def logits_of(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            logits, labels = self.outputs(self.model, parameters, batch)
            classes[:] = [labels]
            return logits

        point = {name: p.detach() for name, p in self._parameters.items()}
        self.n_tokens += 2 * batch.numel()
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward derivatives
            logits, tangent = jvp(logits_of, (point,), (self._layout.tree(v),))[:2]
        p = torch.softmax(logits, dim=-1)
        curved = p * (tangent - (p * tangent).sum(dim=-1, keepdim=True)) / len(logits)
        pull = vjp(logits_of, point)[1]
        return self._layout.vector(pull(curved)[0])
