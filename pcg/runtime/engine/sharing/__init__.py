"""Sharing: how much finetuning goes into each step beside serving.

    CoServing         as much as fits beside the step's requests within their SLOs; a share of the
                      time beside requests without
    TemporalSharing   nothing for n steps, then one whole mini-batch and no requests
    SpatialSharing    a fixed share of the time, whatever the SLOs
    InferenceOnly     nothing

The first is the engine's own; the others are what it is compared with. While nothing is served, all
but the last train: nothing is gained by leaving the device idle.

Source: FlexLLM v2 §6.2 for the first, §2 and §8.2 (figure 11) for the second and third. There the
two run at once on parts of a GPU; here a share of each step's time stands for a part of the device.
"""

from __future__ import annotations

from pcg.runtime.engine.sharing.co_serving import CoServing
from pcg.runtime.engine.sharing.compared_rules import InferenceOnly, SpatialSharing, TemporalSharing
from pcg.runtime.engine.sharing.rule import Sharing
from pcg.runtime.engine.sharing.step import Step

__all__ = ["CoServing", "InferenceOnly", "Sharing", "SpatialSharing", "Step", "TemporalSharing"]
