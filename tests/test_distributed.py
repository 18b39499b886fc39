"""Two processes over gloo: DDP and FSDP2 training of a converted model gives the gradients of one process."""

import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

import swapq
from swapq.checkpoint import layouts
from swapq.checkpoint.writer import ShardWriter
from swapq.errors import CheckpointError
from tests.helpers import fsdp
from tests.helpers.models import prompts, qwen3_moe
from tests.helpers.ranks import WORLD, shard, spawn, train_step, whole_gradients
from tests.helpers.recipes import tiny

CASES = [("nvfp4-rl", "dequantized", 8), ("mxfp8-rl", "low_precision", 8), ("nvfp4-rl", "high_precision", 1)]
CASES += [("fp8-block-rl", "dequantized", 8), ("fp8-rollout", "bf16", 8), ("int4-qat", "dequantized", 8)]
IDS = [f"{r}-{b}-{e} experts" for r, b, e in CASES]

#: recipes whose walk is watched: all quantized, some layers of BF16 experts, all of them
WALKS: dict[str, dict[str, object]] = {
    "mxfp8-rl": {"last_layers_bf16": 0},
    "nvfp4-rl": {"last_layers_bf16": 4},
    "bf16": {},
}


def build(recipe: str, backward: str, experts: int) -> PreTrainedModel:
    model = qwen3_moe(num_experts=experts, num_experts_per_tok=min(2, experts))
    return swapq.convert(model, tiny(recipe), backward=backward, last_layers_bf16=0)


def batch(rank: int | None) -> Tensor:
    ids = prompts(rows=4)
    return ids if rank is None else ids[rank * 2 : rank * 2 + 2]


def ddp(model: PreTrainedModel, rank: int) -> dict[str, Tensor]:
    wrapped = DistributedDataParallel(model)
    train_step(wrapped, batch(rank))
    return whole_gradients(wrapped)


def fsdp2(model: PreTrainedModel, rank: int) -> dict[str, Tensor]:
    shard(model)
    train_step(model, batch(rank))
    return whole_gradients(model)


def accelerated(model: PreTrainedModel, rank: int) -> dict[str, Tensor]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = batch(rank)
    accelerator.backward(model(ids, labels=ids).loss)
    return whole_gradients(model)


def digests_of_a_sharded_model(model: PreTrainedModel, rank: int) -> dict[str, Tensor]:
    """The checkpoint of a sharded model is that of the whole one, also after a state dict was loaded into the shards."""
    expected = swapq.digest(model)
    shard(model)
    first = swapq.digest(model)
    model.load_state_dict(model.state_dict())
    again = swapq.digest(model)
    return {"equal": torch.tensor([first == expected, again == expected])}


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except swapq.SwapqError as error:
        return str(error)
    return ""


def exports_of_several_ranks(model: PreTrainedModel, rank: int) -> dict[str, Tensor]:
    """Every rank exports to the same folder, sharded or not; one rank writes, and a failure is a failure everywhere."""
    folder = Path(os.environ["SWAPQ_TEST_FOLDER"]) / "exports"
    expected, facts = swapq.digest(model), []
    swapq.export(model, folder / "plain")
    dist.barrier()
    facts.append(swapq.digest(folder / "plain") == expected)
    shard(model)
    shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    held = set(swapq.recipe_of(model).formats)
    for layout in [
        "swapq",
        *(name for name in layouts.names() if name != "swapq" and held <= layouts.get(name).formats),
    ][:2]:
        swapq.export(model, folder / layout, layout=layout)  # whole when it returns, on every rank
        facts += [swapq.verify(folder / layout).ok, not list((folder / layout).glob(".*.tmp"))]
    facts.append(swapq.digest(folder / "swapq") == expected)

    (folder / f"file-{rank}").touch()
    facts.append("is a file" in refused(lambda: swapq.export(model, folder / "file-0")))
    writing, parts = ShardWriter.add, []

    def full(self: ShardWriter, name: str, tensor: Tensor) -> None:
        parts.append(name)
        if len(parts) == 5:
            raise CheckpointError("no space left on device")
        writing(self, name, tensor)

    ShardWriter.add = full
    try:
        said = refused(lambda: swapq.export(model, folder / "swapq"))
    finally:
        ShardWriter.add = writing
    facts += ["no space left" in said, bool(parts) == (rank == 0), swapq.digest(folder / "swapq") == expected]
    facts.append(swapq.digest(model) == expected)  # the ranks still meet
    everywhere: list[list[bool]] = [[]] * WORLD
    dist.all_gather_object(everywhere, facts)
    return {"facts": torch.tensor(everywhere)}


def evaluated_then_exported(model: PreTrainedModel, rank: int) -> dict[str, Tensor]:
    """A model sharded as one unit is gathered as a whole since its last forward, and still exported by one rank of two."""
    folder = Path(os.environ["SWAPQ_TEST_FOLDER"]) / "evaluated"
    shutil.rmtree(folder, ignore_errors=True)
    expected = swapq.digest(model)
    fully_shard(model)
    with torch.no_grad():
        model(batch(rank))
    swapq.export(model, folder)
    return {"equal": torch.tensor([swapq.digest(model) == expected, swapq.digest(folder) == expected])}


def resumed_by_accelerate(model: PreTrainedModel, rank: int) -> dict[str, Tensor]:
    """Accelerate's sharded checkpoint, from which a Trainer resumes under FSDP2, brings the experts back; ours refuses shards."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import load_fsdp_model, save_fsdp_model

    folder, facts = Path(os.environ["SWAPQ_TEST_FOLDER"]) / "resumed", []
    expected = swapq.digest(model)
    shard(model)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    save_fsdp_model(plugin, accelerator, model, str(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    facts.append(swapq.digest(model) != expected)
    dist.barrier()
    load_fsdp_model(plugin, accelerator, model, str(folder))
    facts.append(swapq.digest(model) == expected)
    if rank == 0:
        qwen3_moe().save_pretrained(folder / "whole")
    dist.barrier()
    said = refused(lambda: swapq.load_checkpoint(model, folder / "whole"))
    facts.append("is sharded; load the checkpoint before" in said)
    return {"facts": torch.tensor(facts)}


SCENARIOS: dict[str, Callable[[PreTrainedModel, int], dict[str, Tensor]]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "accelerate": accelerated,
    "digests": digests_of_a_sharded_model,
    "exports": exports_of_several_ranks,
    "evaluated": evaluated_then_exported,
    "resumed": resumed_by_accelerate,
}


def worker(rank: int, device: torch.device, folder: str) -> None:
    os.environ["SWAPQ_TEST_FOLDER"] = folder
    for name, scenario in SCENARIOS.items():
        for case, label in zip(CASES, IDS, strict=True):
            found = scenario(build(*case), rank)
            if rank == 0:
                save_file({k: v.contiguous() for k, v in found.items()}, Path(folder) / f"{name}-{label}.safetensors")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    spawn(worker, str(folder))
    return folder


@pytest.mark.parametrize(("case", "label"), zip(CASES, IDS, strict=True), ids=IDS)
@pytest.mark.parametrize("scenario", ["ddp", "fsdp2", "accelerate"])
def test_two_processes_give_the_gradients_of_one(
    results: Path, scenario: str, case: tuple[str, str, int], label: str
) -> None:
    found = load_file(results / f"{scenario}-{label}.safetensors")
    halves = []
    for rank in range(WORLD):
        model = build(*case)
        train_step(model, batch(rank))
        halves.append(whole_gradients(model))
    assert found.keys() == halves[0].keys()
    for name, grad in found.items():
        expected = (halves[0][name] + halves[1][name]) / WORLD
        assert torch.allclose(grad.float(), expected.float(), rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("label", IDS)
def test_a_sharded_model_has_the_checkpoint_of_the_whole_one(results: Path, label: str) -> None:
    assert load_file(results / f"digests-{label}.safetensors")["equal"].tolist() == [True, True]


@pytest.mark.parametrize("label", IDS)
def test_a_model_gathered_by_an_evaluation_is_exported_like_the_whole_one(results: Path, label: str) -> None:
    assert load_file(results / f"evaluated-{label}.safetensors")["equal"].tolist() == [True, True]


@pytest.mark.parametrize("label", IDS)
def test_accelerate_brings_a_sharded_model_back_with_its_experts(results: Path, label: str) -> None:
    facts = load_file(results / f"resumed-{label}.safetensors")["facts"]
    assert facts.shape == (3,)
    assert facts.all(), facts


@pytest.mark.parametrize("label", IDS)
def test_one_rank_writes_an_export_and_a_failure_is_known_to_all(results: Path, label: str) -> None:
    facts = load_file(results / f"exports-{label}.safetensors")["facts"]
    assert facts.shape == (WORLD, 11)
    assert facts.all(), facts


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    spawn(fsdp.steps, str(folder))
    return folder


@pytest.mark.parametrize(("recipe", "backward"), fsdp.CASES)
def test_a_sharded_step_with_bf16_gathering_is_that_of_one_process(steps: Path, recipe: str, backward: str) -> None:
    fsdp.judge(steps, recipe, backward)


def walks(rank: int, device: torch.device, folder: str) -> None:
    """Of a walk over a sharded model: bytes of its parameters, the most that gathered ones held at once, whether the tensors are right."""
    gather, held = DTensor.full_tensor, []
    for recipe, layers in WALKS.items():
        model = swapq.convert(qwen3_moe(num_hidden_layers=6), recipe, **layers)
        expected, total = swapq.digest(model), sum(p.nbytes for p in model.parameters())
        shard(model)
        storages: list[weakref.ref[Any]] = []
        held.clear()

        def noted(self: DTensor, storages: list[Any] = storages) -> Tensor:
            gathered = gather(self)
            storages.append(weakref.ref(gathered.untyped_storage()))
            held.append(sum(storage.nbytes() for ref in storages if (storage := ref()) is not None))
            return gathered

        DTensor.full_tensor = noted
        try:
            equal = swapq.digest(model) == expected
        finally:
            DTensor.full_tensor = gather
        if rank == 0:
            save_file({"facts": torch.tensor([total, max(held), equal])}, Path(folder) / f"{recipe}.safetensors")


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walks")
    spawn(walks, str(folder))
    return folder


@pytest.mark.parametrize("recipe", WALKS)
def test_a_walk_over_a_sharded_model_gathers_it_layer_by_layer(walked: Path, recipe: str) -> None:
    total, held, equal = load_file(walked / f"{recipe}.safetensors")["facts"].tolist()
    assert equal
    assert 0 < held < total / 4  # six layers; a layer and what it was a moment ago
