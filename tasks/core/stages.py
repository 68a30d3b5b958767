"""The stages of the pipeline, in their order; `tasks/pipeline/order.py` runs them."""

from __future__ import annotations

STAGES = ("curate", "assess", "warm_start", "train", "evaluate", "promote")
