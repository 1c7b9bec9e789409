"""Kinds of tables, measures and figures by name: what serves every table, and what serves one paper."""

from __future__ import annotations

from collections.abc import Mapping

from fedsweep.reproduce import kinds

TABLES: Mapping[str, str] = {
    "groups": "fedsweep.papers.dynamicfl.choosing:GroupTable",
}
MEASURES: Mapping[str, str] = {
    "gap_pearson": "fedsweep.papers.feddhad.loss_gap:gap_pearson",
    "gap_r2": "fedsweep.papers.feddhad.loss_gap:gap_r2",
    "gap_spearman": "fedsweep.papers.feddhad.loss_gap:gap_spearman",
    "scratch_accuracy": "fedsweep.papers.dynafed.synthetic_set:scratch_accuracy",
}
FIGURES: Mapping[str, str] = {
    **kinds.FIGURES,
    "membership": "fedsweep.papers.dynamicfl.group_figures:membership",
    "group_labels": "fedsweep.papers.dynamicfl.group_figures:group_labels",
    "client_losses": "fedsweep.papers.dynafed.synthetic_set:losses_figure",
    "loss_gap": "fedsweep.papers.feddhad.loss_gap:gap_figure",
}
