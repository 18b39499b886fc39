"""The sending end: names, dtypes and shapes that never change, storage that nobody else writes, and what is refused."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import swapq
from swapq.digest import Digests, tensor_digest
from swapq.errors import FormatError, SyncError, UnsupportedError
from swapq_trl.sending import sent_tensors, with_digests
from tests.helpers.reads import Reads
from tests.trl.jobs import tiny

RECIPES = {"bf16": {}, "mxfp8-rl": {}, "nvfp4-rl": {"last_layers_bf16": 0}}


@pytest.fixture(params=RECIPES)
def model(request: pytest.FixtureRequest) -> Any:
    """A converted tiny model."""
    return swapq.convert(tiny(), request.param, **RECIPES[request.param])


class Server:
    """The client end of a server that packs as TRL's does: it reads tensors only when all have been yielded."""

    def __init__(self, answer: dict[str, Any], status: int = 200, emptied: bool = True) -> None:
        self.base_url = "http://server"
        self.session = self
        self.answer, self.status, self.emptied, self.paused = answer, status, emptied, False
        self.metadata: list[Any] = []
        self.received: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []

    def update_named_params(self, metadata: list[Any], named: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.calls.append("update")
        self.metadata.append(metadata)
        self.received = dict(list(named))

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def get(self, url: str) -> Any:
        assert url == "http://server/is_paused"
        return answered({"is_paused": self.paused})

    def post(self, url: str, json: dict[str, Any] | None = None) -> Any:
        if json is None:
            self.calls.append(url.removeprefix("http://server/"))
            self.paused = self.calls[-1] != "resume" and (self.paused or self.calls[-1].startswith("pause"))
            return answered({"success": self.emptied})
        self.calls.append(json["method"])
        wrong = {name for name in self.answer.get("wrong", ())}
        equal = [name for name in json["kwargs"]["expected_digests"] if name not in wrong]
        found = {"wrong": sorted(wrong), "unsent": [], "unknown": [], "unreadable": [], "equal": equal}
        return answered({"results": [found]}, self.status)


def answered(content: Any, status: int = 200) -> Any:
    return SimpleNamespace(status_code=status, text=str(content or ""), json=lambda: content)


#: before anything is sent: no request runs, and nothing of the old weights is cached
RESTING = ["pause?mode=wait&clear_cache=false", "reset_encoder_cache", "reset_prefix_cache?reset_external=true"]


def server_generation(model: Any, server: Server) -> Any:
    """swapq's `VLLMGeneration` in server mode, without the connection that needs a GPU."""
    from swapq_trl.generation import VLLMGeneration

    class Unconnected(VLLMGeneration):
        def _init_vllm(self) -> None:
            self.vllm_client = server

    return Unconnected(model, Accelerator(cpu=True), None, mode="server")


def test_server_metadata_is_the_same_at_every_sync_and_describes_what_is_sent(model: Any) -> None:
    server = Server({})
    generation = server_generation(model, server)
    first = generation.sync_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    second = generation.sync_weights()
    assert server.metadata[0] == server.metadata[1]
    described = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in server.received.items()]
    assert described == server.metadata[0]
    assert first.tensors == second.tensors == len(described)
    assert second.bytes == sum(t.nbytes for t in server.received.values())
    assert server.calls == [*RESTING, "update", "reset", "swapq_verify", "resume"] * 2


def test_what_a_server_receives_is_what_a_checkpoint_holds(model: Any, tmp_path: Any) -> None:
    server = Server({})
    generation = server_generation(model, server)
    report = generation.sync_weights()
    swapq.export(model.to(torch.bfloat16), tmp_path)
    scalars = {name for name in server.received if name.endswith("weight_scale_2")}
    assert bool(scalars) == (swapq.recipe_of(model).name == "nvfp4-rl")
    assert all(server.received[name].shape == (1,) for name in scalars), "vLLM's packed transfer cannot unpack a scalar"
    received = {name: t.reshape(()) if name in scalars else t for name, t in server.received.items()}
    assert {name: tensor_digest(t) for name, t in received.items()} == swapq.digest(tmp_path)
    assert report.verified == report.tensors


def test_dtypes_on_the_wire_are_those_a_server_can_name(model: Any) -> None:
    generation = server_generation(model, Server({}))
    dtypes = {tensor.dtype for _, tensor in generation._iter_named_params()}
    assert dtypes <= {torch.uint8, torch.float8_e4m3fn, torch.float32, torch.bfloat16}
    if swapq.recipe_of(model).name == "mxfp8-rl":  # E8M0 travels as bytes
        scales = [t for name, t in generation._iter_named_params() if name.endswith("weight_scale")]
        assert scales
        assert all(scale.dtype == torch.uint8 for scale in scales)


def test_sent_tensors_share_no_storage_with_the_model_or_with_each_other(model: Any) -> None:
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    sent = dict(sent_tensors(model, torch.bfloat16))
    storages = [tensor.untyped_storage().data_ptr() for tensor in sent.values()]
    assert not own & set(storages)
    assert len(set(storages)) == len(storages)
    before = {name: tensor_digest(tensor) for name, tensor in sent.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert before == {name: tensor_digest(tensor) for name, tensor in sent.items()}


def test_stacks_hold_the_bytes_of_single_experts_and_nothing_else_changes(model: Any) -> None:
    prefix = "model.layers.1.mlp.experts"
    single = dict(sent_tensors(model, torch.bfloat16))
    stacked = {name: t.clone() for name, t in sent_tensors(model, torch.bfloat16, stacked={prefix}, fresh=False)}
    rest = {name for name in single if not name.startswith(f"{prefix}.")}
    if swapq.recipe_of(model).name == "bf16":
        assert list(stacked) == list(single)
        return
    assert rest < set(stacked)
    assert all(tensor_digest(stacked[name]) == tensor_digest(single[name]) for name in rest)
    assert sum(t.nbytes for t in stacked.values()) == sum(t.nbytes for t in single.values())
    for suffix in {name.rpartition(".")[2] for name in set(single) - rest}:
        down, both = stacked[f"{prefix}.down_proj.{suffix}"], stacked[f"{prefix}.gate_up_proj.{suffix}"]
        for e in range(len(down)):
            gate, up, own = (single[f"{prefix}.{e}.{p}_proj.{suffix}"] for p in ("gate", "up", "down"))
            joined = torch.stack([gate, up]) if gate.dim() == 0 else torch.cat([gate, up])
            assert tensor_digest(both[e]) == tensor_digest(joined)
            assert tensor_digest(down[e]) == tensor_digest(own)


def test_names_dtypes_and_shapes_of_stacks_never_change(model: Any) -> None:
    def described() -> list[tuple[str, torch.dtype, torch.Size]]:
        prefixes = {f"model.layers.{i}.mlp.experts" for i in range(2)}
        return [(n, t.dtype, t.shape) for n, t in sent_tensors(model, torch.bfloat16, stacked=prefixes, fresh=False)]

    first = described()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert described() == first


def test_digests_are_there_when_the_last_tensor_has_passed() -> None:
    model, digests = swapq.convert(tiny(), "nvfp4-rl", last_layers_bf16=0), Digests()
    passed = [(name, t.clone()) for name, t in with_digests(sent_tensors(model, torch.bfloat16), digests)]
    assert list(digests) == [name for name, _ in passed]
    assert digests == {name: tensor_digest(t) for name, t in passed}


@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl", "bf16"])
def test_a_walk_over_all_tensors_asks_the_device_once_whether_the_masters_are_finite(recipe: str) -> None:
    model, digests = swapq.convert(tiny(), recipe), Digests()
    with Reads() as reads:
        sent = list(with_digests(sent_tensors(model, torch.bfloat16), digests))
    assert len(sent) > 20
    assert reads.count == (recipe != "bf16")


@pytest.mark.parametrize("layer", [0, 1])
def test_a_master_that_is_not_finite_is_named_before_any_tensor_is_given(layer: int) -> None:
    model = swapq.convert(tiny(), "nvfp4-rl", last_layers_bf16=0)
    with torch.no_grad():
        model.model.layers[layer].mlp.experts.down_proj[3, 1, 2] = float("inf")
    sending = sent_tensors(model, torch.bfloat16)
    with pytest.raises(FormatError, match=rf"model.layers.{layer}.mlp.experts.down_proj: 1 of .* \(3, 1, 2\)"):
        next(sending)


@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl"])
def test_a_float32_master_too_large_for_bf16_is_named_before_any_tensor_is_given(recipe: str) -> None:
    model = swapq.convert(tiny(), recipe, last_layers_bf16=0)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 1, 2] = 3.4e38  # below float32's largest number, above BF16's
    sending = sent_tensors(model, torch.bfloat16)
    with pytest.raises(
        FormatError, match=r"model.layers.1.mlp.experts.down_proj: 1 of .* not finite in BF16.* \(3, 1, 2\) \(3\."
    ):
        next(sending)


def test_a_server_that_holds_something_else_is_an_error_that_names_it(model: Any) -> None:
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    generation = server_generation(model, Server({"wrong": [name]}))
    with pytest.raises(SyncError, match=name):
        generation.sync_weights()
    with pytest.raises(SyncError, match="nothing is generated"):
        generation.generate([[1]], None, 1)


def test_a_server_without_the_worker_extension_is_refused_with_the_option_to_start_it_with(model: Any) -> None:
    generation = server_generation(model, Server({}, status=404))
    with pytest.raises(SyncError, match=r"--worker-extension-cls swapq_vllm\.worker\.WorkerExtension"):
        generation.sync_weights()


def test_an_unconverted_model_is_sent_under_hub_names_in_bf16() -> None:
    model = tiny()
    sent = dict(sent_tensors(model, torch.bfloat16))
    assert "model.layers.1.mlp.experts.7.gate_proj.weight" in sent
    assert all(tensor.dtype == torch.bfloat16 for tensor in sent.values())
    converted = dict(sent_tensors(swapq.convert(model, "bf16"), torch.bfloat16))
    assert list(sent) == list(converted)
    assert all(torch.equal(sent[name], converted[name]) for name in sent)


def test_flattened_parameters_of_a_converted_model_are_refused_and_of_a_plain_one_renamed() -> None:
    model = tiny()
    plain = dict(sent_tensors(model, torch.bfloat16))
    flattened = dict(sent_tensors(model, torch.bfloat16, flattened=lambda: iter(model.named_parameters())))
    assert set(flattened) == set(plain)
    assert all(torch.equal(flattened[name], plain[name]) for name in plain)
    swapq.convert(model, "nvfp4-rl", last_layers_bf16=0)
    with pytest.raises(UnsupportedError, match="FSDP2"):
        list(sent_tensors(model, torch.bfloat16, flattened=lambda: iter(model.named_parameters())))


def test_correction_biases_kept_in_float32_stay_in_float32() -> None:
    from swapq_trl.sending import _fresh

    bias = torch.randn(4)
    kept = ("e_score_correction_bias",)
    assert _fresh("model.layers.1.mlp.gate.e_score_correction_bias", bias, torch.bfloat16, kept).dtype == torch.float32
    assert _fresh("model.layers.1.mlp.gate.weight", bias, torch.bfloat16, kept).dtype == torch.bfloat16
    assert _fresh("experts.0.up_proj.weight_scale_2", bias, torch.bfloat16, ()).dtype == torch.float32


def test_the_users_arguments_are_as_they_were_after_a_constructor_that_failed() -> None:
    from trl import GRPOConfig

    import swapq_trl

    config = GRPOConfig(
        output_dir="/tmp/x", use_vllm=True, use_cpu=True, report_to="none", generation_kwargs={"seed": 1}
    )
    with pytest.raises(Exception, match=r".+"):
        swapq_trl.GRPOTrainer(tiny(), [], args=config, train_dataset=None, processing_class=SimpleNamespace())
    assert config.use_vllm is True
    assert config.generation_kwargs == {"seed": 1}


def test_vespo_with_a_sequence_correction_is_refused_as_in_trl() -> None:
    from trl import GRPOConfig

    import swapq_trl

    config = GRPOConfig(output_dir="/tmp/x", use_vllm=True, use_cpu=True, report_to="none", loss_type="vespo")
    with pytest.raises(UnsupportedError, match="token_truncate"):
        swapq_trl.GRPOTrainer(tiny(), [len], args=config, train_dataset=None, processing_class=None)


class Answering:
    """A client whose server answers the same to every call; an exception is raised instead."""

    def __init__(self, answer: Any) -> None:
        self.base_url, self.session, self.answer = "http://server", self, answer
        self.status_code, self.text = 200, ""
        self.transfer: dict[str, Any] | None = None

    def post(self, url: str, json: dict[str, Any] | None = None) -> "Answering":
        if isinstance(self.answer, Exception):
            raise self.answer
        return self

    def get_server_info(self) -> dict[str, Any]:
        return {"kv_transfer_config": self.transfer}

    def json(self) -> dict[str, Any]:
        return {"results": self.answer}


def test_a_server_that_fails_at_every_try_is_an_error_with_the_option_to_start_it_with() -> None:
    from requests.exceptions import RetryError

    from swapq_trl import server

    with pytest.raises(SyncError, match=r"RetryError: too many 500.*--worker-extension-cls"):
        server.running(Answering(RetryError("too many 500 error responses")))


def test_what_a_servers_workers_compute_in_is_put_together_and_must_agree() -> None:
    from swapq_trl import server

    own: list[dict[str, Any]] = [{"a": ["nvfp4", "nvfp4"]}, {"a": ["nvfp4", "nvfp4"], "b": ["bf16", "bf16"]}]
    assert server.running(Answering(own)) == {"a": ("nvfp4", "nvfp4"), "b": ("bf16", "bf16")}
    own[1]["a"] = ["nvfp4", "bf16"]
    with pytest.raises(SyncError, match=r"a runs as \('nvfp4', 'bf16'\) in worker 1"):
        server.running(Answering(own))


def test_a_server_with_another_recipe_is_refused_when_the_trainer_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from swapq.diagnostics.audit import running as runs_in
    from swapq_trl import generation

    model = swapq.convert(tiny(), "nvfp4-rl", last_layers_bf16=0)
    answer = {name: list(formats) for name, formats in runs_in(model, served=True).items()}
    name = "model.layers.1.mlp.experts.2.down_proj.weight"

    def connected(self: Any) -> None:
        self.vllm_client = Answering([answer])

    monkeypatch.setattr(generation._VLLMGeneration, "_init_vllm", connected)
    generation.VLLMGeneration(model, Accelerator(cpu=True), None, mode="server")
    answer[name] = ["nvfp4", "bf16"]
    with pytest.raises(SyncError, match=f"{name} runs as nvfp4 with nvfp4 rows in the trainer and as nvfp4 with bf16"):
        generation.VLLMGeneration(model, Accelerator(cpu=True), None, mode="server")


def test_a_connector_is_refused_where_nobody_can_tell_whether_it_was_emptied() -> None:
    from requests.exceptions import RetryError

    from swapq_trl import server

    without = Answering(RetryError("too many 500 error responses"))
    server.require_forgetting(without)
    without.transfer = {"kv_connector": "LMCacheConnectorV1"}
    with pytest.raises(SyncError, match=r"whether its KV connector, LMCacheConnectorV1, can be emptied.*--worker-ext"):
        server.require_forgetting(without)
    old = Answering([[], []])  # the body of its answer to a reset is empty
    old.transfer = {"kv_connector": "OffloadingConnector"}
    with pytest.raises(UnsupportedError, match=r"OffloadingConnector, and its vLLM does not say.*vLLM 0\.26"):
        server.require_forgetting(old)
    keeps = Answering([[], ["LMCacheConnectorV1"]])
    keeps.transfer = {"kv_connector": "MultiConnector"}
    with pytest.raises(UnsupportedError, match=r"LMCacheConnectorV1, has no reset_cache\(\)"):
        server.require_forgetting(keeps)


def test_a_server_that_did_not_forget_is_sent_nothing_and_goes_on(model: Any) -> None:
    server = Server({}, emptied=False)
    with pytest.raises(SyncError, match="did not empty its caches"):
        server_generation(model, server).sync_weights()
    assert server.calls == [*RESTING, "resume"]


def test_a_server_that_holds_something_else_stays_paused_until_an_update_lands_whole(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server({"wrong": ["model.norm.weight"]})
    generation = server_generation(model, server)
    with pytest.raises(SyncError, match=r"model\.norm\.weight"):
        generation.sync_weights()
    assert server.calls == [*RESTING, "update", "reset", "swapq_verify"]
    assert "http://server stays paused" in caplog.text
    server.answer, server.emptied = {}, False
    with pytest.raises(SyncError, match="did not empty its caches"):
        generation.sync_weights()
    assert server.paused, "it went on with half an update"
    server.emptied = True
    generation.sync_weights()
    assert not server.paused


def test_names_are_found_again_when_a_model_has_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    import swapq.checkpoint.tensors as module

    model = swapq.convert(tiny(), "nvfp4-rl", last_layers_bf16=0)
    asked: list[int] = []
    rules = module.as_saved
    monkeypatch.setattr(module, "as_saved", lambda root, state: asked.append(len(state)) or rules(root, state))
    first = {name: tensor.shape for name, tensor in sent_tensors(model, torch.bfloat16)}
    again = {name: tensor.shape for name, tensor in sent_tensors(model, torch.bfloat16)}
    assert again == first
    assert len(asked) == 1
    model.model.norm.register_parameter("bias", torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    more = {name: tensor.shape for name, tensor in sent_tensors(model, torch.bfloat16)}
    assert more == {**first, "model.norm.bias": (3,)}
    assert len(asked) == 2
