"""Run every CUDA kernel once or more, on small and odd shapes.

What compute-sanitizer should watch:

    compute-sanitizer --tool memcheck python scripts/every_kernel.py     # and racecheck, synccheck, initcheck
"""

import torch

import swapq
from swapq import formats
from swapq.digest import Digests, tensor_digest
from swapq.kernels import dispatch, fast
from swapq.kernels.cuda import columns, elementwise
from swapq.kernels.cuda.quantize import row_operand
from swapq.kernels.refused import BY_KERNEL, any_refused
from swapq.kernels.routing import Routing
from swapq.nn.functional import LinearSpec
from swapq.nn.gate import activation_table
from swapq.nn.low_precision import gradients_of

CUDA = torch.device("cuda")
EXPERTS, TOP = 6, 2
FP8_BLOCKS = (
    ((3, 144, 208), "tile", -1),
    ((3, 144, 208), "halves", -1),
    ((33, 200), "row", -1),
    ((130, 77), "row", -2),
)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)


def block(fmt: str, hidden: int, inner: int) -> None:
    """Quantizers, both grouped products, routing and combine."""
    up = swapq.quantize(normal(EXPERTS, 2 * inner, hidden) * 0.05, fmt).parts
    down = swapq.quantize(normal(EXPERTS, hidden, inner) * 0.05, fmt).parts
    table = activation_table("silu", CUDA)
    for tokens in (1, 5, 40, 300):
        weights, ids = torch.topk(torch.rand(tokens, EXPERTS, device=CUDA), TOP)
        fast.stored_block(normal(tokens, hidden), ids.int(), weights, up, down, fmt, table)
    local = torch.tensor([0, -1, 1, -1, 2, -1], dtype=torch.int32, device=CUDA)
    some = [swapq.formats.Parts(*(p if p is None else p[:3].contiguous() for p in w)) for w in (up, down)]
    fast.stored_block(normal(tokens, hidden), ids.int(), weights, *some, fmt, table, local_of=local)
    row_operand(normal(9, 2 * inner), fmt, table=table)
    for rows in (3, 70, 300):
        x, w = normal(rows, hidden), swapq.quantize(normal(2 * inner, hidden), fmt).parts
        fast.dense_linear(x, w, fmt, normal(2 * inner))


def stored_block(fmt: str, hidden: int, inner: int) -> None:
    """The product that reads FP8 blocks and INT4 groups."""
    stored = [
        formats.get(fmt).stored(swapq.quantize(normal(EXPERTS, *shape) * 0.05, fmt).parts)
        for shape in ((2 * inner, hidden), (hidden, inner))
    ]
    table = activation_table("silu", CUDA)
    for tokens in (1, 5, 300):
        weights, ids = torch.topk(torch.rand(tokens, EXPERTS, device=CUDA), TOP)
        fast.stored_block(normal(tokens, hidden), ids.int(), weights, *stored, fmt, table)


def fp8_gradients(n: int, k: int) -> None:
    """Both products of a backward pass whose operands are FP8 blocks, and what quantizes them."""
    routing = Routing.of(torch.randint(0, 4, (150, TOP), device=CUDA), EXPERTS)  # the last experts get nothing
    gradients, form = gradients_of("fp8_block"), formats.get("fp8_block")
    scope = form.scope_of_stack(n, 2)
    master, rows = normal(EXPERTS, n, k), sum(routing.counts)
    w = swapq.quantize(master, "fp8_block", scope=scope)
    saved, dy = gradients.save(normal(rows, k), master, w, routing), normal(rows, n)
    gradients.input_grad(saved, dy, routing, LinearSpec("fp8_block", "fp8_block", "low_precision"), scope)
    gradients.weight_grad(saved, dy, routing, torch.float32)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit(
            "error: every_kernel.py launches CUDA kernels and there is no CUDA device; run it on a Hopper GPU"
        )
    for hidden, inner in ((160, 96), (512, 256)):
        for fmt in ("nvfp4", "mxfp8"):
            block(fmt, hidden, inner)
    for k in (32, 768, 2048):
        dispatch.quantize(normal(5, 72, k), "nvfp4", "tensor", -1, None)
        dispatch.quantize(normal(33, k), "nvfp4", "row", -1, None)
        dispatch.quantize(normal(2, 72, k), "mxfp8", "block", -2, None)
        for fmt in ("nvfp4", "mxfp8"):
            swapq.quantize(normal(3, 64, k), fmt).dequantize(torch.bfloat16)
    for fmt in ("fp8_block", "int4"):
        stored_block(fmt, 512, 256)
    for n, k in ((192, 144), (512, 256)):
        fp8_gradients(n, k)
    for fmt in ("int4", "int4_g32"):
        swapq.quantize(normal(3, 40, 256), fmt).dequantize(torch.bfloat16)
    for shape, scope, axis in FP8_BLOCKS:
        swapq.quantize(normal(*shape), "fp8_block", scope=scope, axis=axis).dequantize(torch.bfloat16)
    columns.quantize_columns(normal(70, 96), (1, 33, 0, 36))
    table, rows = activation_table("silu", CUDA), normal(11, 96)
    elementwise.swiglu(rows, table)
    elementwise.swiglu_backward(rows, table, torch.rand(65536, device=CUDA), normal(11, 48))
    weights, slots = torch.rand(6, TOP, device=CUDA), torch.randperm(12, device=CUDA)[:11]
    elementwise.combine_backward(normal(11, 48), weights, slots, TOP, normal(6, 48))
    raw = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=CUDA) for size in (5, 0, 262_148, 2_097_152)]
    for x in raw:
        tensor_digest(x)
    Digests().add_all((str(len(x)), x) for x in raw)
    whole = [x[: len(x) // 4 * 4] for x in raw]
    any_refused([x for x in whole for _ in BY_KERNEL], [kind for _ in whole for kind in BY_KERNEL])
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
