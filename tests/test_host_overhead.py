"""The measurement of host overhead, and what it shows on any machine: who costs less."""

import gc
import io

import pytest
import torch
from rich.console import Console

from ep_overlap.report.host_overhead import Cost, HostOverhead, measure, table


def test_a_schedule_costs_less_than_megatrons_and_more_than_no_schedule() -> None:
    record_stream = torch.Tensor.record_stream
    num_threads = torch.get_num_threads()
    gc.collect()
    gc.freeze()  # what other tests left would be looked through again and again
    try:
        result = measure(num_rounds=11)
    finally:
        gc.unfreeze()
    assert result.megatron is not None
    # CPU time: other processes hardly change it.
    assert result.one_graph.cpu_us < result.inline.cpu_us < result.megatron.cpu_us
    assert result.inline.cpu_us < result.threads.cpu_us
    assert torch.Tensor.record_stream is record_stream
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("with_megatron", [True, False])
def test_the_table_has_a_line_for_each_variant(with_megatron: bool) -> None:
    costs = [Cost(wall_us=100.0 * i, cpu_us=90.0 * i) for i in range(1, 5)]
    result = HostOverhead(
        one_graph=costs[0],
        inline=costs[1],
        threads=costs[2],
        megatron=costs[3] if with_megatron else None,
    )
    written = io.StringIO()
    Console(file=written, width=100).print(table(result))
    lines = [line.split() for line in written.getvalue().splitlines()]
    rows = {row[1]: row for row in lines if row and row[0] == "\u2502"}
    assert rows["inline"][3::2] == ["200", "180", "90"]
    assert ("megatron" in rows) is with_megatron
