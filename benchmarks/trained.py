"""The paper's trained networks and splits for given seeds, by default from 100 on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn

from ffcp_paper.data import result_cache
from ffcp_paper.data.datasets import Split
from ffcp_paper.experiments.studies import Study, available
from ffcp_paper.experiments.tasks import TRAINED, Settings

SEEDS = range(100, 105)


def networks(data: str, seeds: range = SEEDS) -> Iterator[tuple[nn.Module, Split]]:
    """Yield the trained network and the split of every seed; networks not cached are trained."""
    if not available(data):
        raise SystemExit(f"the files of {data} are missing: run ffcp-paper data fetch {data}")
    study = Study(data, Settings())

    def known(seed: int) -> nn.Module | None:
        build = partial(study._fresh, seed, TRAINED)
        return result_cache.known_network(study._key(seed, TRAINED), build)

    missing = [(TRAINED, seed) for seed in seeds if known(seed) is None]
    if missing:
        study._train(missing)
    for seed in seeds:
        model = known(seed)
        assert model is not None
        yield model, study.parts(seed)
