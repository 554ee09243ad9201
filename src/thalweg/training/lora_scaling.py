"""LoRA-alpha: LoRA's scaling factor as a large multiple of the square root of the rank."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import TYPE_CHECKING, Any, Literal

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn

Convention = Literal["alpha/r", "rslora", "none"]
CONVENTIONS = ("alpha/r", "rslora", "none")
COEF = 256.0
DEFAULT_RANK = 16
# Parts of the names of optimizers whose steps do not grow with the gradient.
NORMALIZED = ("adam", "adafactor", "adan", "lion", "muon", "rmsprop", "shampoo", "sign", "soap")


def lora_alpha(r: int, *, coef: float = COEF, convention: Convention = "alpha/r") -> float:
    r"""Return the number to pass as ``lora_alpha``, so that the adapter's scale is c/√r.

    .. math:: W = W_0 + s B A, \qquad s = c / \sqrt r, \qquad \alpha = s r = c \sqrt r

    with α in PEFT's default convention. It replaces the habits α = r and α = 2r, which leave the
    adapter under-trained at the small learning rates of full fine-tuning, 2e-5, where it removes
    the search for a learning rate.

    Parameters
    ----------
    r : int ≥ 1
        The rank: A has shape (r, d_in), B has shape (d_out, r).
    coef : float > 0, default 256
        c, meant for AdamW with a step size near 2e-5 and a usual number of steps. The best c falls
        roughly as 1/lr and with the number of steps; elsewhere, find it with `find_coef`.
    convention : {"alpha/r", "rslora", "none"}, default "alpha/r"
        What the library that takes the number does with it: s = α/r (PEFT), s = α/√r (PEFT with
        ``use_rslora=True``), or s = α.

    Returns
    -------
    float
        c√r, c, or c/√r.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Notes
    -----
    *Why a root.* A step of Adam changes B by about -lr · sign(s G Aᵀ), and a generic token x by
    ``‖s ΔB A x‖``, in which r incoherent terms add up to √r. The update does not depend on
    the rank if s is proportional to 1/√r. For signals that are coherent over the ranks s would be
    proportional to 1/r, α constant; a linear α over-scales in either case.

    *Why α, and not lr.* Adam is indifferent to the scale of gradients. With s' = k s the same
    trajectory results from the step size k · lr for B and lr for A; see `as_lora_plus_groups`. A
    larger lr for both also turns A faster, and with A the subspace that B has learned to use. The
    ratio of this drift to the signal is set by lr, not by α; see `signal_drift`.

    *Ours.* The abstract has the root and a coefficient that is "unexpectedly large", without a
    number; 256 is a value for AdamW at lr = 2e-5. The scale is constant in training: learning
    rate schedules act on lr alone. Decoupled weight decay, lr · λ per step, weighs less against
    a larger s.

    References
    ----------
    "LoRA-alpha", the paper on LoRA's scaling factor and its Signal-Drift framework, NeurIPS 2026.
    E. J. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
    D. Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.

    Examples
    --------
    >>> lora_alpha(16), lora_alpha(64), lora_alpha(16, convention="rslora")
    (1024.0, 2048.0, 256.0)
    """
    rank = check_integer("r", r, at_least=1)
    c = check_number("coef", coef, above=0)
    check_choice("convention", convention, CONVENTIONS)
    scale = c / math.sqrt(rank)
    return {"alpha/r": scale * rank, "rslora": c, "none": scale}[convention]


def lora_alpha_config(
    base: LoraConfig | None = None,
    *,
    r: int | None = None,
    coef: float = COEF,
    convention: Literal["alpha/r", "rslora"] | None = None,
    **settings: Any,
) -> LoraConfig:
    """Return a `peft.LoraConfig` whose adapters all have the scale c/√r.

    Parameters
    ----------
    base : peft.LoraConfig, optional
        Copied; its ``lora_alpha`` and ``alpha_pattern`` are replaced.
    r : int ≥ 1, optional
        The rank; by default that of ``base``, or 16.
    coef : float > 0, default 256
        c; see `lora_alpha`.
    convention : {"alpha/r", "rslora"}, optional
        Sets ``use_rslora``; by default as ``base`` or ``settings`` have it.
    **settings
        Further settings of `peft.LoraConfig`, such as ``target_modules``. Every rank in
        ``rank_pattern`` gets its own alpha in ``alpha_pattern``.

    Returns
    -------
    peft.LoraConfig
        For `peft.get_peft_model`, TRL's ``SFTTrainer(peft_config=...)`` and the like. Its alphas
        need not be integers.

    Raises
    ------
    TypeError
        If ``base`` is a config of another kind than LoRA, or a setting is unknown to PEFT.
    ValueError
        If ``settings`` contain alphas, or ``use_rslora`` that contradicts ``convention``.

    Warns
    -----
    UserWarning
        If the rule was not made for the config: DoRA, or another initialization than PEFT's
        default (A uniform, B zero).

    Examples
    --------
    >>> from thalweg.training import lora_alpha_config
    >>> config = lora_alpha_config(r=16, target_modules=["q_proj", "v_proj"])
    >>> config.lora_alpha
    1024.0
    >>> lora_alpha_config(config, rank_pattern={"v_proj": 4}).alpha_pattern
    {'v_proj': 512.0}
    """
    with requires("lora"):
        from peft import LoraConfig, PeftType

    if base is not None and (
        not isinstance(base, LoraConfig) or base.peft_type is not PeftType.LORA
    ):
        raise TypeError(f"base must be a peft.LoraConfig of type LORA, got {type(base).__name__}")
    for name in ("lora_alpha", "alpha_pattern"):
        if name in settings:
            raise ValueError(f"{name} must not be given: it is what lora_alpha_config computes")
    rslora = _use_rslora(base, settings.pop("use_rslora", None), convention)
    settings["use_rslora"] = rslora
    settings["r"] = rank = r if r is not None else base.r if base is not None else DEFAULT_RANK

    def alpha(of_rank: int) -> float:
        return lora_alpha(of_rank, coef=coef, convention="rslora" if rslora else "alpha/r")

    ranks = settings.get("rank_pattern", base.rank_pattern if base is not None else {}) or {}
    settings["lora_alpha"] = alpha(rank)
    settings["alpha_pattern"] = {key: alpha(of_rank) for key, of_rank in ranks.items()}
    config = dataclasses.replace(base or LoraConfig(), **settings)
    if config.use_dora or config.init_lora_weights is not True:
        kind = "DoRA" if config.use_dora else f"init_lora_weights={config.init_lora_weights!r}"
        warnings.warn(
            f"LoRA-alpha was derived for LoRA with uniform A and B = 0, not for {kind}; "
            "check its coefficient with find_coef",
            stacklevel=2,
        )
    return config


def _use_rslora(base: Any, given: bool | None, convention: str | None) -> bool:
    if convention is not None:
        check_choice("convention", convention, ("alpha/r", "rslora"))
    if given is None and convention is not None:
        return convention == "rslora"
    if given is None:
        return bool(base is not None and base.use_rslora)
    check_choice("use_rslora", given, (False, True))
    if given and convention == "alpha/r":
        raise ValueError(
            'use_rslora must not be True with convention="alpha/r": the scale would be applied '
            'twice; use convention="rslora"'
        )
    if not given and convention == "rslora":
        raise ValueError('use_rslora must not be False with convention="rslora"')
    return given


def as_lora_plus_groups(
    model: nn.Module, lr: float, c: float, *, eps: float = 1e-8
) -> list[dict[str, Any]]:
    r"""Return param groups of Adam that do to a LoRA model what a c times larger α would do.

    .. math:: (\alpha' = c \alpha,\; \eta) \quad\equiv\quad (\alpha,\; \eta_A = \eta,\;
              \eta_B = c \eta)

    which is LoRA+ with ratio c. Put B = c B': both models compute the same, the gradient of A is
    the same, and that of B' is c times that of B. Adam divides this factor out, so B' makes
    the steps of B, and those count c times. The gradient's scale enters only by ε, which is
    divided by c for B here; then the two trajectories agree in exact arithmetic, for weight decay
    0 and a B that starts at 0. No single learning rate can do the same. For SGD and a fixed A, B
    needs c² lr.

    Parameters
    ----------
    model : nn.Module
        With adapters of PEFT or `LoRALinear`.
    lr : float > 0
        η of everything that is trained, except B.
    c : float > 0
        The factor of α.
    eps : float ≥ 0, default 1e-8
        Adam's ε.

    Returns
    -------
    list of dict
        For `torch.optim.Adam` or ``AdamW``: B, and if there are any, A and other trained
        parameters.

    Raises
    ------
    TypeError, ValueError
        For numbers out of range, and a model that trains no B.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import LoRALinear, as_lora_plus_groups
    >>> layer = LoRALinear(torch.nn.Linear(8, 4), r=2, alpha=2)
    >>> optimizer = torch.optim.AdamW(as_lora_plus_groups(layer, lr=1e-4, c=16))
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.0016, 0.0001]
    """
    size = check_number("lr", lr, above=0)
    factor = check_number("c", c, above=0)
    epsilon = check_number("eps", eps, at_least=0)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    of_b = [p for name, p in trained.items() if _is_b(name)]
    others = [p for name, p in trained.items() if not _is_b(name)]
    if not of_b:
        raise ValueError("model must train LoRA's B (lora_B of PEFT or LoRALinear), found none")
    groups = [
        {"params": of_b, "lr": factor * size, "eps": epsilon / factor, "weight_decay": 0.0},
        {"params": others, "lr": size, "eps": epsilon, "weight_decay": 0.0},
    ]
    return groups if others else groups[:1]


def _is_b(name: str) -> bool:
    return any(part in ("lora_B", "lora_embedding_B") for part in name.split("."))


def warn_unless_normalized(optimizer: object) -> None:
    """Warn of an optimizer whose steps grow with the gradient, for which the rule is not made."""
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper holds the optimizer
    name = type(inner).__name__
    if not any(part in name.lower() for part in NORMALIZED):
        warnings.warn(
            f"LoRA-alpha was derived for Adam, whose steps do not grow with the gradient; with "
            f"{name} a k times larger scale makes B's effect on the weights grow k² times as fast",
            stacklevel=3,
        )
