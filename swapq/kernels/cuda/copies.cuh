// Copies from global to shared memory that run by themselves, sixteen bytes a thread at a time (sm_80 and later).
#pragma once

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Through the level-2 cache alone, so what the kernel before has written is seen after wait_for_previous.
DEVICE void copy_16_bytes(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// The thread's copies but those of the newest group have arrived.
DEVICE void copies_wait_but_newest() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
