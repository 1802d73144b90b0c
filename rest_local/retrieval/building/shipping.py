"""Texts of files that a node of a Ray cluster does not have: Ray Data reads them on the driver's node.

The driver's node reads with the reader of a local build, so that the texts, their states and what is skipped are the
same. A few megabytes of text are on their way at a time.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rest_local.retrieval.building.shards import Plan, PlannedFile
from rest_local.retrieval.building.writing import Progress
from rest_local.retrieval.documents import Text
from rest_local.retrieval.sources.corpus import Filters, read_files
from rest_local.retrieval.sources.skipped import Skipped, joined

if TYPE_CHECKING:
    import pyarrow as pa

GROUP = 4 << 20
"""Bytes of the files that are read together."""


def shipped_texts(part: Plan, node: str, skipped: Skipped, report: Progress) -> Iterator[Text]:
    """The texts of the only shard of a plan, in its order, read on the node with this id."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    _be_quiet_and_ordered()
    items = [{"paths": pickle.dumps([file.path for file in group])} for group in _groups(part.shards[0])]
    if not items:
        return
    read: Any = _read
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        read,
        fn_args=(part.filters,),
        batch_size=1,
        batch_format="pyarrow",
        num_cpus=0,
        concurrency=2,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        for data in batch["texts"].to_pylist():  # type: ignore[union-attr]
            texts, counted, size = pickle.loads(data)
            _add(skipped, counted)
            report("read", size)
            yield from texts


def _read(batch: pa.Table, filters: Filters) -> pa.Table:
    """A task of Ray Data: (texts, what was skipped, bytes) of some files."""
    import pyarrow as pa

    found = []
    for paths in batch["paths"].to_pylist():
        skipped, sizes = Skipped(), list[int]()
        texts = list(read_files(pickle.loads(paths), filters, skipped, sizes.append))
        found.append(pickle.dumps((texts, skipped, sum(sizes))))
    return pa.table({"texts": pa.array(found, pa.large_binary())})


def _add(skipped: Skipped, more: Skipped) -> None:
    both = joined([skipped, more])
    skipped.counts, skipped.kinds, skipped.secrets = both.counts, both.kinds, both.secrets


def _groups(files: Sequence[PlannedFile]) -> Iterator[list[PlannedFile]]:
    group: list[PlannedFile] = []
    size = 0
    for file in files:
        if group and size + file.size > GROUP:
            yield group
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        yield group


def _be_quiet_and_ordered() -> None:
    from ray.data import DataContext

    context: Any = DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
