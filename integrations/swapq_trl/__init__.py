"""TRL trainers whose rollout engine serves exactly the policy that is trained.

```python
from swapq_trl import GRPOTrainer          # was: from trl import GRPOTrainer
model = swapq.convert(model, "nvfp4-rl")   # one line
```
"""

from swapq_trl.generation import VLLMGeneration
from swapq_trl.report import SyncReport
from swapq_trl.trainers import GRPOTrainer, RLOOTrainer

__all__ = ["GRPOTrainer", "RLOOTrainer", "SyncReport", "VLLMGeneration"]
