"""Opens an exported checkpoint in a fresh vLLM process and in transformers, and says whether they agree.

Run as a script it is the vLLM half: prompts on standard input, greedy answers with log-probabilities on standard output.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

MAX_TOKENS = 6
# Two correct BF16 programs differ in rounding, and now and then a router near a tie makes more of it. These bounds are far
# above that and far below a real fault: a wrong layout gives a mean of 1 and answers that agree by chance.
MEAN_TOLERANCE = 0.05
MIN_SAME = 0.95
# Logits of 8 to 16 are 0.0625 apart in BF16: two that differ by no more than two such steps are a tie.
TIE = 0.125


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What two programs that opened one export said about the same prompts."""

    answers: int
    """Number of prompts."""
    same: int
    """Prompts with equal greedy answers; of two tokens within two BF16 steps of each other either is right."""
    mean_difference: float
    """Mean absolute difference of the log-probabilities of the answers' tokens."""
    max_difference: float
    """Largest absolute difference."""
    texts: list[str]
    """vLLM's answers."""

    @property
    def ok(self) -> bool:
        """Whether greedy answers and log-probabilities agree within rounding."""
        return self.same >= MIN_SAME * self.answers and self.mean_difference < MEAN_TOLERANCE


def compare_export(directory: Path, prompts: list[str]) -> Agreement:
    """Open `directory` in a fresh vLLM process and in transformers of this process, by its configuration alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import swapq  # noqa: F401  registers the checkpoint format with transformers

    answers = _ask_fresh_vllm(directory, prompts)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    same, differences = 0, []
    for prompt, answer in zip(prompts, answers, strict=True):
        head, tail = tokenizer(prompt)["input_ids"], answer["ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([head + tail], device=model.device)).logits
        logps = torch.log_softmax(logits[0, len(head) - 1 : -1].float(), dim=-1).cpu()
        chosen = logps.gather(1, torch.tensor(tail).unsqueeze(1)).squeeze(1)
        # greedy agrees where vLLM's token is also the best one here
        same += bool((logps.max(dim=-1).values - chosen <= TIE).all())
        differences.append((chosen - torch.tensor(answer["logps"])).abs())
    difference = torch.cat(differences)
    return Agreement(
        answers=len(prompts),
        same=same,
        mean_difference=difference.mean().item(),
        max_difference=difference.max().item(),
        texts=[tokenizer.decode(answer["ids"], skip_special_tokens=True) for answer in answers],
    )


def _ask_fresh_vllm(directory: Path, prompts: list[str]) -> list[dict[str, Any]]:
    """Greedy answers of a vLLM that knows nothing but the folder."""
    # the training process described its place in a distributed world; the fresh process is its own
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    done = subprocess.run(
        [sys.executable, __file__, str(directory)],
        input=json.dumps(prompts),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"a fresh vLLM could not open {directory} (exit {done.returncode}):\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _answer(directory: str) -> None:
    """The fresh process: prompts in, answers out."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    prompts = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    llm = LLM(model=directory, enforce_eager=True, gpu_memory_utilization=0.2, logprobs_mode="processed_logprobs")
    outputs = llm.generate(
        [{"prompt_token_ids": tokenizer(prompt)["input_ids"]} for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=1),
        use_tqdm=False,
    )
    answers = []
    for output in outputs:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        logps = [position[token].logprob for token, position in zip(ids, completion.logprobs, strict=True)]
        answers.append({"ids": ids, "logps": logps})
    print(json.dumps(answers))


if __name__ == "__main__":
    _answer(sys.argv[1])
