"""Weights of a language model's sources: the formula, the budget, and bad input."""

from __future__ import annotations

import pytest
import torch

from thalweg.bilevel import SourceReweighter

TOKENS = 5


def linear_model(seed=0, dtype=torch.float64):
    """Return a table of next-token logits, whose Gauss-Newton matrix is its Hessian."""
    torch.manual_seed(seed)
    return torch.nn.Embedding(TOKENS, TOKENS, dtype=dtype)


def rows(n=4, seed=0, length=7):
    return torch.randint(TOKENS, (n, length), generator=torch.Generator().manual_seed(seed))


def reweighter(model=None, n_sources=2, **settings):
    given = {"train_steps": 1, "select_steps": 0, "lr": 1e-12, "lr_w": 1.0}
    return SourceReweighter(model or linear_model(), n_sources, **(given | settings))


def loss(weight, batch):
    return torch.nn.functional.cross_entropy(
        weight[batch[:, :-1].flatten()], batch[:, 1:].flatten()
    )


class TestHypergradient:
    def test_is_that_of_the_damped_formula(self):
        """The Gauss-Newton matrix of a linear model is the Hessian: all is known in closed form."""
        model = linear_model()
        W = model.weight.detach().clone()
        batches, val = [rows(seed=1), rows(seed=2)], rows(seed=3)
        damping = 1e-2
        ours = reweighter(
            model, damping=damping, cg_steps=60, generator=torch.Generator().manual_seed(5)
        )
        report = ours.step(batches, val)
        w = torch.tensor([0.5, 0.5], dtype=torch.float64)

        def mixture(flat):
            W = flat.view(TOKENS, TOKENS)
            return sum(a * loss(W, batch) for a, batch in zip(w, batches, strict=True))

        H = torch.autograd.functional.hessian(mixture, W.flatten())
        signs = torch.randint(2, (25,), generator=torch.Generator().manual_seed(5)).double() * 2 - 1
        shift = damping * float(signs @ H @ signs) / 25

        def slope(batch):
            flat = W.flatten().requires_grad_()
            return torch.autograd.grad(loss(flat.view(TOKENS, TOKENS), batch), flat)[0]

        v = torch.linalg.solve(H + shift * torch.eye(25, dtype=torch.float64), slope(val))
        alignment = torch.stack([slope(batch) @ v for batch in batches])
        expected = -w * (alignment - w @ alignment)
        torch.testing.assert_close(report["hypergradient"], expected, rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(
            report["mixture"], torch.softmax(-expected, 0), rtol=1e-5, atol=1e-9
        )

    def test_sums_to_zero(self):
        ours = reweighter(n_sources=4)
        report = ours.step([rows(seed=k) for k in range(4)], rows(seed=9))
        assert abs(float(report["hypergradient"].sum())) < 1e-12
        assert float(report["mixture"].sum()) == pytest.approx(1)

    def test_like_sources_keep_like_weights(self):
        batch = rows()
        report = reweighter(n_sources=3).step([batch] * 3, rows(seed=1))
        assert report["hypergradient"].abs().max() < 1e-15

    def test_gauss_newton_is_symmetric_and_positive(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(TOKENS, 4), torch.nn.Tanh(), torch.nn.Linear(4, TOKENS)
        ).double()
        ours = reweighter(model)
        d = ours._layout.size
        G = torch.stack([ours._gauss_newton(rows(), v) for v in torch.eye(d, dtype=torch.float64)])
        torch.testing.assert_close(G, G.T)
        assert torch.linalg.eigvalsh(G)[0] > -1e-12


class TestSelection:
    def test_moves_along_the_mixtures_level(self):
        model = linear_model()
        before = model.weight.detach().clone()
        batches, val = [rows(8, seed=1), rows(8, seed=2)], rows(8, seed=3)
        ours = reweighter(model, select_steps=2, lr=1e-3)
        ours.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        report = ours.step(batches, val)
        moved = model.weight.detach() - before
        assert report["rejected"] == 0
        assert moved.norm() > 0
        at = before.clone().requires_grad_()
        mixture = sum(loss(at, batch) for batch in batches) / 2
        slope = torch.autograd.grad(mixture, at)[0]
        cosine = (slope * moved).sum() / slope.norm() / moved.norm()
        assert abs(float(cosine)) < 0.05
        assert loss(model.weight, val) < loss(before, val)

    def test_steps_that_raise_the_mixtures_loss_are_taken_back(self):
        model = linear_model()
        before = model.weight.detach().clone()
        ours = reweighter(model, select_steps=3, lr=50.0)
        ours.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        report = ours.step([rows(8, seed=1), rows(8, seed=2)], rows(9, seed=3))
        assert report["rejected"] == 3
        torch.testing.assert_close(model.weight, before, atol=1e-10, rtol=0)


class TestTraining:
    def test_learns_which_source_helps(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(TOKENS, 16), torch.nn.Linear(16, TOKENS))
        counting = torch.arange(12).repeat(16, 1) % TOKENS
        ours = SourceReweighter(
            model, 3, lr=1e-2, train_steps=4, generator=torch.Generator().manual_seed(0)
        )
        for step in range(20):
            noise = torch.randint(TOKENS, (16, 12), generator=torch.Generator().manual_seed(step))
            report = ours.step([noise, counting, noise.flip(0)], counting)
        assert report["mixture"].argmax() == 1
        assert report["mixture"][1] > 0.5
        assert report["val_loss"] < 1.0

    def test_only_trainable_parameters_move(self):
        model = torch.nn.Sequential(torch.nn.Embedding(TOKENS, 4), torch.nn.Linear(4, TOKENS))
        model[0].weight.requires_grad_(False)
        before = model[0].weight.clone()
        SourceReweighter(model, 2, train_steps=1).step([rows(), rows(seed=1)], rows(seed=2))
        assert torch.equal(model[0].weight, before)

    def test_counts_tokens(self):
        ours = reweighter(cg_steps=1, select_steps=1, train_steps=2, probe_rows=2)
        report = ours.step([rows(4), rows(4, seed=1)], rows(4, seed=2))
        train, probe, val = 2 * 4 * 7, 2 * 2 * 7, 4 * 7
        # Selection: gradients of the mixture and of f, and a value; then f, the trace, one step.
        assert report["n_tokens"] == train + (2 * probe + val) + val + probe + 2 * 2 * probe

    def test_resumes(self):
        def run(ours, steps):
            for step in steps:
                report = ours.step([rows(seed=step), rows(seed=50 + step)], rows(seed=step + 99))
            return report

        settings = {"lr": 0.05, "select_steps": 1}
        straight = reweighter(**settings, generator=torch.Generator().manual_seed(0))
        whole = run(straight, range(4))
        model = linear_model()
        generator = torch.Generator().manual_seed(0)
        first = reweighter(model, **settings, generator=generator)
        run(first, range(2))
        second = reweighter(model, **settings, generator=generator)
        second.load_state_dict(first.state_dict())
        assert torch.equal(run(second, range(2, 4))["mixture"], whole["mixture"])

    def test_models_of_transformers(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            vocab_size=TOKENS, n_positions=8, n_embd=8, n_layer=1, n_head=2
        )
        model = transformers.GPT2LMHeadModel(config).eval()
        ours = SourceReweighter(model, 2, train_steps=1, select_steps=1)
        report = ours.step([rows(), rows(seed=1)], rows(seed=2))
        assert abs(float(report["hypergradient"].sum())) < 1e-7


class TestBadInput:
    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"model": 3}, TypeError, "model must be a torch Module"),
            ({"n_sources": 1}, ValueError, "n_sources must be"),
            ({"lr_w": 0.0}, ValueError, "lr_w must be"),
            ({"lr": -1.0}, ValueError, "lr must be"),
            ({"damping": 0.0}, ValueError, "damping must be"),
            ({"cg_steps": 0}, ValueError, "cg_steps must be"),
            ({"train_steps": 0}, ValueError, "train_steps must be"),
            ({"select_steps": -1}, ValueError, "select_steps must be"),
            ({"probe_rows": 0}, ValueError, "probe_rows must be"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_settings(self, settings, error, message):
        with pytest.raises(error, match=message):
            reweighter(**settings)

    def test_frozen_model(self):
        with pytest.raises(ValueError, match="must have a parameter that requires gradients"):
            SourceReweighter(linear_model().requires_grad_(False), 2)

    def test_missing_sources(self):
        with pytest.raises(ValueError, match="must hold 2 batches, got 1"):
            reweighter().step([rows()], rows())
        with pytest.raises(ValueError, match="batch 1 must have at least one row"):
            reweighter().step([rows(), rows()[:0]], rows())
        with pytest.raises(ValueError, match="batch val_batch must have"):
            reweighter().step([rows(), rows()], rows()[:0])

    def test_losses_that_are_not_finite(self):
        model = linear_model()
        ours = reweighter(model)
        with torch.no_grad():
            model.weight[0, 0] = torch.nan
        with pytest.raises(RuntimeError, match="a loss of the model is not finite"):
            ours.step([rows(), rows(seed=1)], rows(seed=2))
        assert ours.mixture().tolist() == [0.5, 0.5]

    def test_states_of_other_sources(self):
        with pytest.raises(ValueError, match="must be of 2 sources, got 3"):
            reweighter().load_state_dict(reweighter(n_sources=3).state_dict())
