"""The policy's entropy where a schedule changes what tokens are drawn from.

Drawn at another temperature or from a nucleus, the tokens' log-probs say how wide the draw was, not how sure the policy
is: a schedule would look like a collapse, or hide one. So the trainer computes the entropy of the whole distribution
at the temperature of every other measurement. That is one more forward of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tasks.core.records import Group
from tasks.learning.shared.batching import MicroBatch, own_share
from tasks.learning.shared.lanes import Lanes
from tasks.learning.shared.policy import LogProbs
from tasks.learning.shared.ranks import Ranks
from tasks.learning.shared.rows import rows_of
from tasks.learning.shared.settings import GRPOSettings


def mean_entropy(
    log_probs: LogProbs,
    groups: Sequence[Group],
    settings: GRPOSettings,
    *,
    temperature: float,
    lanes: Lanes,
    ranks: Ranks,
) -> float | None:
    """Nats per sampled token of all ranks' shares; None where no token was sampled. The model is in eval mode."""
    of_groups = [[row for item in group.trajectories for row in rows_of(item, advantage=0.0)] for group in groups]
    written = [rows for rows in of_groups if rows]
    if not written:
        return None
    share = own_share(written, settings, device=log_probs.model.device, ranks=ranks, lanes=lanes)

    def entropy(batch: MicroBatch) -> Tensor:
        of_tokens: Tensor = log_probs(batch, temperature=temperature, autocast=settings.autocast, quantity="entropy")
        return of_tokens

    found = lanes.each(share.batches, entropy)
    own = sum(part.double().sum().item() for part in found), sum(map(len, found))
    totals, counts = zip(*ranks.gather(own), strict=True)
    return sum(totals) / sum(counts)
