"""A real cluster of two nodes on this machine, and a model that shows when and where it works."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle
from ray.cluster_utils import Cluster
from torch import Tensor, nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not find the tests
_STORE = 100 * 2**20
PATIENCE = 600  # seconds until a sign that does not come is a failure, on a busy machine too


class Showing(nn.Module):
    """A network that leaves a file for each batch, named by its node and process."""

    def __init__(self, folder: Path, pause: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.folder, self.pause = str(folder), pause
        self.driver = os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.driver:
            node = ray.get_runtime_context().get_node_id()
            (Path(self.folder) / f"{time.time_ns()}_{node}_{os.getpid()}").touch()
            time.sleep(self.pause)
        found: Tensor = self.layers(x)
        return found


class Two:
    """A head, where the driver is, and a second node: of three workers with a seat it has one."""

    def __init__(self) -> None:
        head = {"num_cpus": 1, "object_store_memory": _STORE, "include_dashboard": False}
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**head, "resources": {"seat": 2}}
        )
        self.add()
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.wait_for_min_actors_s = PATIENCE  # all workers are there when work begins
        logging.getLogger("ray.data").setLevel(logging.ERROR)

    def add(self) -> None:
        """Let there be a second node."""
        self.second = self.cluster.add_node(
            num_cpus=1, object_store_memory=_STORE, resources={"seat": 1}
        )
        self.cluster.wait_for_nodes()

    def remove(self) -> None:
        """Take the second node away, as if its plug were pulled."""
        self.cluster.remove_node(self.second, allow_graceful=False)

    def stop(self) -> None:
        """Leave no process behind."""
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    """A cluster for all tests of a module, each of which leaves it with two nodes."""
    cluster = Two()
    yield cluster
    cluster.stop()


def signs(folder: Path) -> list[tuple[str, int]]:
    """Give node and process of every batch so far, the oldest first."""
    names = sorted(name for name in os.listdir(folder))
    return [(node, int(pid)) for _, node, pid in (name.split("_") for name in names)]


@contextlib.contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[None]:
    """Do something in a thread, and see to it that it was done well."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE)
    assert not thread.is_alive(), "what was to happen meanwhile did not"
    if failed:
        raise failed[0]


def when(is_so: Callable[[], bool]) -> None:
    """Wait for a sign."""
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, "no sign of the work came"
        time.sleep(0.01)


def kill(folder: Path, times: int, every: int, seed: int) -> list[int]:
    """Kill the process of the last batch, some batches after the last kill, several times."""
    rng, dead, seen = random.Random(seed), list[int](), 0

    def is_time(after: int) -> bool:
        now = signs(folder)
        return len(now) >= after and now[-1][1] not in dead

    for _ in range(times):
        when(functools.partial(is_time, seen + rng.randint(1, every)))
        seen, pid = len(signs(folder)), signs(folder)[-1][1]
        os.kill(pid, signal.SIGKILL)
        dead.append(pid)
    return dead
