// Kernels that begin while the one before them in the stream ends (programmatic dependent launch, sm_90 and later).
//
// A kernel lets the next one start only after it has waited itself. So whoever runs may read, before its own wait, what any kernel but
// the immediate predecessor has written, and nothing is written before the wait: memory that the predecessor still reads may have been
// given away already. The exception is a kernel launched BESIDE one that is known: what both touch is alive. Both functions are without
// effect in an ordinary launch.
#pragma once

DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
