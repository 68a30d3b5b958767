"""How far two computations of the same log-probs are apart, and how far they may be by dtype.

In float32 two orders of the same sums differ by 1e-5 nats and a wrong distribution by whole nats: one bound tells them
apart. In bfloat16 a rare token is off by half a nat without any fault, so mean, 99th percentile and largest value each
have their own bound (infra/decisions/0038 has the measurement).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# Nats, of the mean over tokens; about five times what a trained model showed in bfloat16.
MEAN_TOLERANCE = {"float32": 1e-4, "float16": 0.0125, "bfloat16": 0.1}
P99_FACTOR, MAX_FACTOR = 8, 40  # of the mean's bound


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on |difference| over tokens (nats)."""

    mean: float

    @property
    def p99(self) -> float:
        return P99_FACTOR * self.mean

    @property
    def max(self) -> float:
        return MAX_FACTOR * self.mean

    def __str__(self) -> str:
        return f"mean {self.mean:.2g}, 99th percentile {self.p99:.2g}, largest {self.max:.2g}"


def tolerance_of(*dtypes: str) -> Tolerance:
    """That of the coarsest; one that is not known (`auto`, a quantised one) counts as bfloat16."""
    return Tolerance(max(MEAN_TOLERANCE.get(dtype, MEAN_TOLERANCE["bfloat16"]) for dtype in dtypes))


class NotFinite(ValueError):
    """A model whose own forward gives log-probs that are NaN or infinite: no other engine mends that."""


def refuse_what_is_not_finite(own_logp: Iterable[Iterable[float]], *, model: str) -> None:
    if not all(math.isfinite(logp) for row in own_logp for logp in row):
        raise NotFinite(
            f"{model}: some of its log-probs are no finite numbers, so nothing can be played or trained. A number "
            f"in its weights is not finite, or sums overflow in its dtype. Take its last version without, or set "
            f"compute.weights (with train.lora: compute.frozen) to float32."
        )


@dataclass(frozen=True, slots=True)
class Differences:
    """Statistics of |difference| over tokens (nats); NaN counts as infinite."""

    mean: float
    median: float
    p99: float
    max: float
    num_tokens: int

    @classmethod
    def of(cls, gaps: Iterable[float]) -> Differences:
        values = sorted(abs(gap) if gap == gap else math.inf for gap in gaps)
        last = len(values) - 1
        if last < 0:
            return cls(0.0, 0.0, 0.0, 0.0, 0)
        median, p99 = (values[math.ceil(share * last)] for share in (0.5, 0.99))
        return cls(math.fsum(values) / len(values), median, p99, values[-1], len(values))

    def is_within(self, tolerance: Tolerance) -> bool:
        return self.mean <= tolerance.mean and self.p99 <= tolerance.p99 and self.max <= tolerance.max

    def __str__(self) -> str:
        largest = f"99th percentile {self.p99:.2g}, largest {self.max:.2g}"
        return f"mean {self.mean:.2g}, {largest} over {self.num_tokens} tokens"
