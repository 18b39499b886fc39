"""TRL trainers whose rollout engine serves exactly the policy that is trained.

```python
from swapq_trl import GRPOTrainer          # was: from trl import GRPOTrainer
model = swapq.convert(model, "nvfp4-rl")   # one line
```
"""

import importlib

from swapq.errors import MissingPackageError

try:
    importlib.import_module("trl.generation.vllm_generation")
except ImportError as error:
    raise MissingPackageError(
        f"swapq_trl needs TRL 1.16, which cannot be imported ({error}); pip install 'swapq[trl]'"
    ) from error

from swapq_trl.generation import VLLMGeneration
from swapq_trl.report import SyncReport
from swapq_trl.trainers import GRPOTrainer, RLOOTrainer

__all__ = ["GRPOTrainer", "RLOOTrainer", "SyncReport", "VLLMGeneration"]
