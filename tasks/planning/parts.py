"""Memory by part, in the three phases of an iteration, and where a model is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes on the device while episodes are played, weights are updated and a checkpoint is copied; `host` is pinned
    memory beside a GPU's. `evaluate`: while assess, evaluate or a warm start's check plays a model, without a trainer.
    """

    name: str
    rollout: float
    update: float
    save: float
    host: float = 0.0
    evaluate: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    parts: tuple[Part, ...]

    @property
    def phases(self) -> dict[str, float]:
        return {
            "playing": sum(part.rollout for part in self.parts),
            "updating": sum(part.update for part in self.parts),
            "saving": sum(part.save for part in self.parts),
            "evaluating": sum(part.evaluate for part in self.parts),
        }

    @property
    def peak(self) -> float:
        return max(self.phases.values())

    @property
    def host(self) -> float:
        return sum(part.host for part in self.parts)
