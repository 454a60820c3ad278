"""PBM-VFL as the paper prints it, in one file, to be read beside the paper.

    quantise      Algorithm 1, the scalar Poisson binomial mechanism
    secure_sum    Protocol 0, a sum behind pairwise masks
    train         Algorithm 2, PBM-VFL

Comments give the paper's line numbers; the steps of Protocol 0, which the paper describes in prose, are numbered here.

NOT FOR PROTECTING DATA. One process plays every role and holds every column. There is no cryptography: masks and noise
come from one ordinary generator that the caller holds. No privacy loss is counted and no limit is enforced. This is a
specification and a test oracle, and it shares no code with the rest of the package. `pbmvfl.Federation` runs the same
algorithm with keys, secret noise and a privacy account; docs/how-to/pbm-vfl.md names the function there for each line.

Symbols:

    M, N, P, T    parties, rows, length of an embedding, iterations
    X_m, y        party m's columns of all N rows; the labels, which the server holds
    B_t           the rows of iteration t's batch
    h_m, theta_m  party m's network and its weights; h_0 and theta_0 are the server's fusion model
    C, b, beta    bound on embeddings; trials per coordinate; slope of the success probability
    eta           learning rate
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Integers = npt.NDArray[np.int64]


def quantise(x: npt.ArrayLike, *, b: int, beta: float, C: float = 1.0, rng: np.random.Generator) -> Integers:
    """Draw the quantised value of each coordinate (Algorithm 1).

    Args:
        x: Values in [-C, C], in any shape.
        b: Number of trials, at least 1.
        beta: Slope of the success probability, in [0, 1/4].
        C: Bound on the values, above 0.
        rng: Generator of the noise.

    Returns:
        Integers in 0..b, in the shape of x.

    Raises:
        ValueError: An argument is outside its range.
    """
    x = np.asarray(x, dtype=np.float64)
    if b < 1 or not 0 <= beta <= 1 / 4 or not C > 0 or not (np.abs(x) <= C).all():  # Algorithm 1, line 1
        raise ValueError(f"b={b}, beta={beta}, C={C}: needs b >= 1, beta in [0, 1/4], C > 0 and every x in [-C, C]")
    p = 1 / 2 + beta / C * x  # Algorithm 1, line 2
    q: Integers = rng.binomial(b, p)  # Algorithm 1, line 3
    return q  # Algorithm 1, line 4


def mask(q: Integers, u: Integers, *, modulus: int) -> Integers:
    """Return the masked value y_m that each party sends (Protocol 0, steps 2 and 3).

    Args:
        q: Secret integers of the M parties, shape (M, ...).
        u: Integers in 0..modulus-1, shape (M, M, ...). Parties m and k both know u[m, k] and u[k, m].
        modulus: All sums are taken modulo this number. The paper has none, and there the largest y_m reveals q_m.

    Returns:
        y, in the shape of q.
    """
    p = u - u.swapaxes(0, 1)  # Protocol 0, step 2: p[m, k] = u[m, k] - u[k, m]; p[m, m] = 0
    return np.asarray((q + p.sum(axis=1)) % modulus)  # Protocol 0, step 3: y_m = q_m + sum over k of p[m, k]


def secure_sum(q: Integers, *, modulus: int, rng: np.random.Generator) -> Integers:
    """Sum the parties' integers so that the server sees masked values only (Protocol 0).

    Args:
        q: Secret integers of the M parties, shape (M, ...).
        modulus: Larger than any possible sum, so that the result is the sum of the integers themselves.
        rng: Stands in for the generator that each pair of parties seeds with a secret of its own.

    Returns:
        The sum over the parties modulo `modulus`, shape (...).
    """
    u = rng.integers(modulus, size=(len(q), *q.shape))  # Protocol 0, step 1
    y = mask(q, u, modulus=modulus)  # Protocol 0, steps 2 and 3, at the parties
    return np.asarray(y.sum(axis=0) % modulus)  # Protocol 0, step 4, at the server: the masks cancel


def train(
    h_0: nn.Module,
    h: Sequence[nn.Module],
    X: Sequence[Tensor],
    y: Tensor,
    batches: Iterable[Integers],
    *,
    eta: float,
    b: int | None,
    beta: float = 1 / 4,
    C: float = 1.0,
    rng: np.random.Generator,
) -> list[float]:
    """Train the networks in place (Algorithm 2).

    Args:
        h_0: Fusion model of the server: a sum of embeddings, (B, P), to class scores.
        h: Network of each party: its columns, (B, ...), to embeddings in [-C, C], (B, P).
        X: Columns of each party, (N, ...).
        y: Class of each row, (N,).
        batches: Rows of each iteration, such as `(rng.choice(N, B, replace=False) for _ in range(T))`.
        eta: Learning rate of every network.
        b: Number of trials, or None for exact sums: the paper's baseline without privacy and quantisation (NPQ).
        beta: Slope of the success probability, in (0, 1/4].
        C: Bound on the embeddings, above 0.
        rng: Generator of noise and masks.

    Returns:
        Loss of each batch, before its step.
    """
    M, losses = len(h), []  # Algorithm 2, line 1: the networks arrive with their first weights
    for B_t in map(torch.as_tensor, batches):  # Algorithm 2, lines 2 and 3
        embeddings = [h_m(X_m[B_t]) for h_m, X_m in zip(h, X, strict=True)]  # Algorithm 2, lines 4 to 7, at party m
        values = [embedding.detach().numpy() for embedding in embeddings]
        if b is None:
            h_tilde = np.sum(values, axis=0)
        else:
            q = np.stack([quantise(x, b=b, beta=beta, C=C, rng=rng) for x in values])  # Algorithm 2, line 6
            q_hat = secure_sum(q, modulus=b * M + 1, rng=rng)  # Algorithm 2, line 9
            h_tilde = C / (beta * b) * (q_hat - b * M / 2)  # Algorithm 2, line 10, which is printed for C = 1
        sums = torch.as_tensor(h_tilde, dtype=embeddings[0].dtype).requires_grad_()
        loss = cross_entropy(h_0(sums), y[B_t])  # mean over the batch
        # Algorithm 2, line 11: the server sends the gradient at the sums, one tensor for all parties.
        gradient, *gradient_0 = torch.autograd.grad(loss, [sums, *h_0.parameters()])
        descend(h_0, gradient_0, eta)  # Algorithm 2, line 13
        for h_m, embedding in zip(h, embeddings, strict=True):  # Algorithm 2, lines 14 to 19, at party m
            # Algorithm 2, lines 16 and 17: the derivative of the sum at one embedding is the identity.
            gradient_m = torch.autograd.grad(embedding, list(h_m.parameters()), grad_outputs=gradient)
            descend(h_m, gradient_m, eta)  # Algorithm 2, line 18
        losses.append(loss.item())
    return losses


@torch.no_grad()
def descend(network: nn.Module, gradients: Sequence[Tensor], eta: float) -> None:
    """Take one gradient step, theta - eta * gradient, in place."""
    for theta, gradient in zip(network.parameters(), gradients, strict=True):
        theta.sub_(eta * gradient)
