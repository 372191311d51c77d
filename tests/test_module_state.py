"""``state_dict()`` and ``load_state_dict()`` of a sharded module itself."""

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from sharding_support import STRATEGIES, Stack, double, shard_stack, whole_weights, worst_error

from ep_overlap.testing import RankPool
from fsdp_hooks.checkpoint_shard import TensorShard


def moved_by_itself(strategy: str, directory: str) -> list[float]:
    """Errors after a load from whole tensors, from another module's dict, and through DCP."""
    plain, model, second, third = double(Stack), *(double(Stack, seed=s) for s in (1, 2, 3))
    for sharded in (model, second, third):
        shard_stack(sharded, strategy=strategy)
    expected = {name: param.detach() for name, param in plain.named_parameters()}
    model.load_state_dict(plain.state_dict())
    second.load_state_dict(model.state_dict())
    dcp.save(model.state_dict(), checkpoint_id=directory)
    dcp.load(third.state_dict(), checkpoint_id=directory)
    return [worst_error(whole_weights(each), expected) for each in (model, second, third)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_modules_own_state_dict_goes_to_every_rows_place(
    ranks2: RankPool, strategy: str, tmp_path: Path
) -> None:
    assert ranks2.run(moved_by_itself, strategy, str(tmp_path)) == [[0.0] * 3] * 2


def refused() -> tuple[bool, str]:
    whole, sharded = double(Stack), double(Stack)
    shard_stack(whole, strategy="no_shard")
    shard_stack(sharded)
    state = sharded.state_dict()
    with pytest.raises(RuntimeError, match="used as if they were the whole"):
        _ = state["head.weight"] + 1
    try:
        whole.load_state_dict(state)
    except RuntimeError as error:
        return isinstance(state["head.weight"], TensorShard), str(error)
    return False, ""


def test_shards_of_another_layout_are_refused(ranks2: RankPool) -> None:
    for is_shard, message in ranks2.run(refused):
        assert is_shard
        assert "sharded otherwise. Load whole tensors instead" in message
